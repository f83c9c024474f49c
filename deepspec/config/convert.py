"""Plain values into frozen dataclasses, with every mistake collected instead of the first one raised."""

from __future__ import annotations

import difflib
import types
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from deepspec.config.schema import MISSING

INVALID: Any = object()
"""Stands for a value that was refused; the reason is already in the list of problems."""


@dataclass
class Problems:
    """The mistakes found so far, and the keys that may be suggested for a misspelt one."""

    known_keys: tuple[str, ...] = ()
    complete: bool = True
    """False lets missing keys pass, as ``--cfg job`` does."""
    found: list[str] = field(default_factory=list)
    refused: bool = False
    """True once a value was missing or wrong, so that some object is only partly filled."""

    def add(self, text: str) -> None:
        """Note a mistake."""
        self.found.append(text)

    def unknown(self, path: str, known: tuple[str, ...] = ()) -> None:
        """Note a key that no schema has."""
        self.add(f"{path}: no such key{near(path, known or self.known_keys)}")

    def missing(self, path: str, why: str = "") -> None:
        """Note a key that must be given."""
        self.refused = True
        if self.complete:
            self.add(f"{path}: must be given{f' ({why})' if why else ''}, for example {path}=...")


def near(word: str, candidates: tuple[str, ...] | list[str]) -> str:
    """Return ``; did you mean ...?`` for the candidates closest to ``word``, or an empty text."""
    section, _, leaf = word.rpartition(".")
    leaves: dict[str, list[str]] = {}
    for candidate in candidates:
        leaves.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    names = [leaf] if leaf in leaves else difflib.get_close_matches(leaf, list(leaves), n=2, cutoff=0.7)
    close = sorted((c for name in names for c in leaves[name]), key=lambda c: c.rpartition(".")[0] != section)
    return f"; did you mean {' or '.join(close[:3])}?" if close else ""


def type_hints(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def default_of(item: Any) -> Any:
    """Return a field's default, ``???`` when there is none."""
    if item.default is not NO_DEFAULT:
        return item.default
    return item.default_factory() if item.default_factory is not NO_DEFAULT else MISSING


def build(cls: type, values: Any, path: str, problems: Problems, skip: tuple[str, ...] = ()) -> Any:
    """Return ``cls`` made from a mapping, without the fields named in ``skip``.

    A field that is missing or wrong is left out of the object, so reading it raises AttributeError; ``problems`` says
    why. Only when ``problems.found`` stays empty is the object whole.
    """
    if not isinstance(values, dict):
        problems.refused = True
        problems.add(f"{path}: must be a group of keys, not {values!r}")
        return INVALID
    hints = {name: hint for name, hint in type_hints(cls).items() if name not in skip}
    for name in values:
        if name not in hints:
            problems.unknown(_join(path, str(name)), tuple(_join(path, h) for h in hints) if path else ())
    made: Any = object.__new__(cls)
    for item in (f for f in fields(cls) if f.name in hints):
        value = values.get(item.name, default_of(item))
        where = _join(path, item.name)
        if isinstance(value, str) and value == MISSING and is_dataclass(hints[item.name]):
            value = build(hints[item.name], {}, where, problems)  # a group that nobody mentioned: its defaults
        elif isinstance(value, str) and value == MISSING:
            problems.missing(where, item.metadata.get("help", "").split(";")[0])
            value = INVALID
        elif value is not INVALID:
            value = convert(hints[item.name], value, where, problems)
        if value is not INVALID:
            object.__setattr__(made, item.name, value)
        else:
            problems.refused = True
    return made


def convert(hint: Any, value: Any, path: str, problems: Problems) -> Any:
    """Return ``value`` as the type ``hint``, or ``INVALID`` with the reason noted."""
    if is_dataclass(hint) and isinstance(hint, type) and not isinstance(value, hint):
        return build(hint, value, path, problems)
    inner = get_args(hint)[1] if get_origin(hint) is dict else None
    if isinstance(inner, type) and is_dataclass(inner) and isinstance(value, dict):
        return {str(name): convert(inner, item, _join(path, str(name)), problems) for name, item in value.items()}
    converted = _try(hint, value)
    if converted is INVALID:
        problems.add(f"{path}={_show(value)}: must be {describe(hint)}{_near_literal(hint, value)}")
    return converted


def _try(hint: Any, value: Any) -> Any:
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin is Literal:
        return _literal(hint, value)
    if origin in (Union, types.UnionType):
        return next((c for h in get_args(hint) if (c := _try(h, value)) is not INVALID), INVALID)
    if origin is tuple:
        return _tuple(get_args(hint), value)
    if origin is dict or hint is dict:
        return dict(value) if isinstance(value, dict) else INVALID
    return _scalar(hint, value)


def _literal(hint: Any, value: Any) -> Any:
    """Match by type too: True is not 1."""
    return next((v for v in get_args(hint) if type(v) is type(value) and v == value), INVALID)


def _scalar(hint: Any, value: Any) -> Any:
    if hint is type(None):
        return None if value is None else INVALID
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if type(value) is hint else INVALID


def _tuple(args: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return INVALID
    hints = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
    if len(hints) != len(value):
        return INVALID
    made = tuple(_try(h, v) for h, v in zip(hints, value, strict=True))
    return INVALID if any(m is INVALID for m in made) else made


def describe(hint: Any) -> str:
    """Say in words what a type accepts."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join("null" if a is None else str(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin is tuple:
        return f"a list of {_PLURAL[args[0]]}" if args[-1] is Ellipsis else f"a list of {len(args)} {_PLURAL[args[0]]}"
    if origin is dict or hint is dict:
        return "a group of keys"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Any: "anything",
}
_PLURAL: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "texts", Any: "values", bool: "true or false"}


def _near_literal(hint: Any, value: Any) -> str:
    """Suggest the closest choice, for a type that offers choices."""
    hints = [hint] if get_origin(hint) is Literal else [h for h in get_args(hint) if get_origin(h) is Literal]
    choices = [str(v) for h in hints for v in get_args(h)]
    return near(str(value), choices) if isinstance(value, str) else ""


def _show(value: Any) -> str:
    """Write a value as it would stand on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.replace(".", "", 1).isdigit():
        return f"'{value}'"
    return "null" if value is None else str(value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
