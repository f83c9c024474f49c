"""Splits by template family: ids are ``source/family/number``, and no family may stand in two splits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepspec.errors import DataError


def family_of(sample_id: str) -> str:
    """Return the ``source/family`` part of an id; an id of another form is a family of its own."""
    parts = sample_id.split("/")
    return "/".join(parts[:-1]) if len(parts) >= 3 else sample_id


def shared_families(splits: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Return the families that stand in more than one split, with the names of those splits."""
    where: dict[str, set[str]] = {}
    for name, ids in splits.items():
        for sample_id in ids:
            where.setdefault(family_of(sample_id), set()).add(name)
    return {family: sorted(names) for family, names in sorted(where.items()) if len(names) > 1}


def check_families(splits: Mapping[str, Iterable[str]]) -> None:
    """Refuse splits that share a family.

    Raises:
        DataError: naming the families and the splits.
    """
    shared = shared_families(splits)
    if shared:
        some = "; ".join(f"{family} in {' and '.join(names)}" for family, names in list(shared.items())[:5])
        raise DataError(f"{len(shared)} template families stand in more than one split ({some}); see data.train/test")
