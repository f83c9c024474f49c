"""From a trained drafter to a folder for servers that was read back, checked for its consumers and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepspec.export.card import Origin
from deepspec.export.importers.load import import_drafter
from deepspec.export.layouts.activations import quantise_activations
from deepspec.export.layouts.card import card_text, report_text
from deepspec.export.layouts.common import linears
from deepspec.export.layouts.registry import chosen_consumers, make_files
from deepspec.export.layouts.write import conformance, require_conformance, write_checksums, write_extras, write_files
from deepspec.export.package import staged
from deepspec.export.quantise import balance
from deepspec.export.run import Exported, ExportTarget
from deepspec.export.verify import Verification, refuse
from deepspec.inference.package_config import CARD

if TYPE_CHECKING:
    from pathlib import Path

    from deepspec.drafters.base import Drafter
    from deepspec.export.layouts.common import Source

Judge = Callable[["Drafter", "Drafter"], Verification]
"""Compares the trained drafter with the one that came back from disk."""


def export_layout(
    source: Source,
    target: ExportTarget,
    out: Path,
    layout: str,
    judge: Judge,
    *,
    consumers: tuple[str, ...] = (),
    extras: Mapping[str, Any] | None = None,
    late_extras: Callable[[], Mapping[str, Any]] | None = None,
    force: bool = False,
    origin: Origin | None = None,
) -> Exported:
    """Write the folder of ``layout``, and give it its name when everything about it was checked.

    Args:
        source: The trained drafter, bound to ``target``, and the number formats; INT8 balances its MLPs in place.
        target: The target at hand.
        out: The folder; an older one of the same kind is replaced.
        layout: Name of the layout.
        judge: Compares the trained drafter with the one that was read back.
        consumers: Who has to load it. None named: those that the layout is for, and one of them is enough.
        extras: More JSON files by name, such as the sidecars.
        late_extras: Makes more of them, which takes a while: it is asked when every consumer was found content.
        force: Write the folder although ``judge`` found problems.
        origin: For the card.

    Raises:
        ConfigError: the layout cannot hold this drafter, or is not for a consumer.
        PackageError: what was written would not be loaded as it was meant.
        VerificationError: it does not draft what the trained drafter does.
    """
    names = chosen_consumers(layout, consumers, source.include_embeddings)
    if source.numbers.quantisation != "none":
        balance(source.drafter)
    made = make_files(layout, source)
    files = replace(made, extras={**made.extras, **(extras or {})})
    with staged(out) as folder:
        write_files(folder, files)
        reports = conformance(folder, names, source.target, source.numbers.dtype_name)
        require_conformance(reports, all_of_them=bool(consumers))
        if late_extras is not None:
            late = late_extras()
            write_extras(folder, late)
            files = replace(files, extras={**files.extras, **late})
        verification = judge(source.drafter.eval(), read_back(folder, target, source))
        refuse(verification, force=force)
        card = card_text(source, files, reports, verification, origin or Origin(), forced=bool(verification.problems))
        (folder / CARD).write_text(card, encoding="utf-8")
        write_checksums(folder)
    return Exported(out, verification, report_text(reports, verification))


def read_back(folder: Path, target: ExportTarget, source: Source) -> Drafter:
    """Return the drafter that a server would make of the folder."""
    drafter = import_drafter(folder, target).drafter
    if source.numbers.quantisation == "w8a8":
        quantise_activations(drafter, linears(drafter))
    return drafter
