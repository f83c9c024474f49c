"""The number formats of packages as data: which part of a drafter is stored how, profile by profile.

Writer and reader of a package share these tables. A package spells its formats out group by group, and the reader
compares them with what its profile says of that very drafter, so that no tensor can be left out of a group or be put
into another without being noticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from deepspec.nn.int4 import dequantise_int4
from deepspec.nn.int8 import dequantise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

Profile = Literal["bf16", "fp16", "fp16_int8", "fp16_int8_full", "int8_dynamic", "int4_mlp"]
SchemeName = Literal["int8_per_output_channel", "int8_per_group", "int4_per_group"]
Activations = Literal["unquantised", "int8_per_token"]
Part = Literal["qkv", "mlp", "layers", "fusion", "markov"]
QkvStorage = Literal["int8", "16bit"]
Int4Group = Literal[32, 128]

SCALE = "_scale"
"""What the name of a quantised tensor's partner ends in."""
INT8: SchemeName = "int8_per_output_channel"
INT8_GROUPS: SchemeName = "int8_per_group"
INT4: SchemeName = "int4_per_group"
GROUPS: Mapping[SchemeName, tuple[int, ...]] = {INT8_GROUPS: (32,), INT4: (32, 128)}
"""Columns that may share a scale; a scheme that is not here has one scale a row."""
PARTS: dict[Part, re.Pattern[str]] = {
    "qkv": re.compile(r"layers\.\d+\.self_attn\.[qkv]_proj\.weight"),
    "mlp": re.compile(r"layers\.\d+\.mlp\.(gate|up|down)_proj\.weight"),
    "layers": re.compile(r"layers\..+\.weight"),
    "fusion": re.compile(r"(fc|eh_proj)\.weight"),
    "markov": re.compile(r"markov_head\.markov_w[12]\.weight"),
}
"""The matrices that some profile quantises, by their published names; the first pattern that fits counts. ``layers``
are the other linears of the layers. Servers fuse q, k and v, hence one part for the three."""


FORMAT_MEANINGS = {
    "quantisation": "part by part: tensor X [o, i] is values * X_scale. int8_per_output_channel: X is int8 [o, i] in "
    "-127 .. 127, X_scale [o, 1]. int4_per_group: X is uint8 [o, i/2], byte c of a row holds column 2c in its low half "
    "and 2c+1 in its high half, each as value + 8 with values -8 .. 7; X_scale [o, i/group]. activations "
    "int8_per_token: the input row of a token is rounded to round(x / s) with s = max|x| / 127, and the product is one "
    "of integers",
    "bfloat16": "fp16 cannot hold what is named here: tensors are stored in bf16, states are the modules whose inputs "
    "or outputs grew too large on test conversations; the drafter does not run in fp16 where anything is named",
}
"""What every package says of the two sections of its number formats."""
SCHEME_MEANINGS: Mapping[SchemeName, str] = {
    INT8_GROUPS: "X is int8 [o, i] in -127 .. 127, X_scale [o, i/group]: neighbouring columns of a group share a scale"
}
"""What a package says besides of a scheme that it uses."""


@dataclass(frozen=True)
class Scheme:
    """How the values of a matrix [o, i] and their scales are stored."""

    bits: Literal[4, 8]
    stored: Literal["int8", "uint8"]  # [o, i] one to a byte, or [o, i/2] two to a byte
    scale_dtype: Literal["float32", "float16"]
    restore: Callable[[Tensor, Tensor, torch.dtype], Tensor]

    def shapes(self, shape: tuple[int, ...], group: int | None) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of values and scales of a matrix [o, i] with ``group`` columns to a scale, None: all."""
        rows, columns = shape
        return (rows, columns * self.bits // 8), (rows, columns // (group or columns))


SCHEMES: dict[SchemeName, Scheme] = {
    INT8: Scheme(8, "int8", "float32", dequantise),
    INT8_GROUPS: Scheme(8, "int8", "float32", dequantise),
    INT4: Scheme(4, "uint8", "float16", dequantise_int4),
}


@dataclass(frozen=True)
class ProfileSpec:
    """What one profile stores: ``parts`` by scheme, everything else in ``dtype``."""

    dtype: Literal["bfloat16", "float16"]
    parts: Mapping[Part, SchemeName]
    activations: Activations = "unquantised"


_LAYERS_INT8: dict[Part, SchemeName] = {"qkv": INT8, "mlp": INT8, "layers": INT8}
PROFILES: dict[Profile, ProfileSpec] = {
    "bf16": ProfileSpec("bfloat16", {}),
    "fp16": ProfileSpec("float16", {}),
    "fp16_int8": ProfileSpec("float16", _LAYERS_INT8),
    "fp16_int8_full": ProfileSpec("float16", {**_LAYERS_INT8, "fusion": INT8_GROUPS, "markov": INT8}),
    "int8_dynamic": ProfileSpec("float16", _LAYERS_INT8, "int8_per_token"),
    "int4_mlp": ProfileSpec("float16", {**_LAYERS_INT8, "mlp": INT4}),
}


@dataclass(frozen=True)
class QuantisedGroup:
    """How the ``tensors`` of one part are stored: X in ``scheme``, its scales in X_scale."""

    scheme: SchemeName
    bits: Literal[4, 8]
    group: int | None  # columns that share a scale; None: a whole row
    symmetric: Literal[True]
    scale_dtype: Literal["float32", "float16"]
    activations: Activations
    tensors: tuple[str, ...]

    def weight(self, values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix [o, i] that ``values`` and ``scale`` stand for."""
        return SCHEMES[self.scheme].restore(values, scale, dtype)


Quantisation = Mapping[Part, QuantisedGroup]


@dataclass(frozen=True)
class Bfloat16:
    """What fp16 cannot hold: tensors that are stored in bf16, and modules whose states reach beyond it.

    Where either names anything, the drafter does not run in fp16.
    """

    tensors: tuple[str, ...] = ()
    states: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tensors or self.states)


def matrices(drafter: nn.Module) -> dict[Part, tuple[str, ...]]:
    """Return the names of the drafter's matrices that can be quantised, part by part.

    In layers and fusion those are linears without bias. Norms, biases and the confidence head belong to no part.
    """
    found: dict[Part, list[str]] = {}
    for name, module in drafter.named_modules():
        part = part_of(f"{name}.weight")
        plain = isinstance(module, nn.Linear) and module.bias is None
        if part is not None and (plain or part == "markov"):
            found.setdefault(part, []).append(f"{name}.weight")
    return {part: tuple(found[part]) for part in PARTS if part in found}


def part_of(name: str) -> Part | None:
    """Return the part whose pattern the name of a tensor fits first."""
    return next((part for part, pattern in PARTS.items() if pattern.fullmatch(name)), None)


def plan(
    found: Mapping[Part, tuple[str, ...]], profile: Profile, *, qkv: QkvStorage = "int8", int4_group: Int4Group = 32
) -> dict[Part, QuantisedGroup]:
    """Return how ``profile`` stores the matrices ``found`` of a drafter, but for q, k and v where they are 16bit."""
    spec = PROFILES[profile]
    chosen = {p: s for p, s in spec.parts.items() if p in found and not (p == "qkv" and qkv == "16bit")}
    return {part: _group(scheme, spec.activations, int4_group, found[part]) for part, scheme in chosen.items()}


def _group(scheme: SchemeName, activations: Activations, int4_group: int, names: tuple[str, ...]) -> QuantisedGroup:
    facts = SCHEMES[scheme]
    group = int4_group if scheme == INT4 else next(iter(GROUPS.get(scheme, ())), None)
    return QuantisedGroup(scheme, facts.bits, group, True, facts.scale_dtype, activations, names)


def quantisation_problems(quantisation: Quantisation, profile: Profile) -> list[str]:
    """List what of ``quantisation`` contradicts itself or ``profile``, whatever the drafter."""
    spec, problems = PROFILES[profile], []
    for part in (p for p in quantisation if p not in spec.parts):
        problems.append(f"quantisation.{part} contradicts profile={profile!r}, which does not quantise it")
    for part in (p for p in spec.parts if p in quantisation):
        problems += _group_problems(part, quantisation[part], profile)
    names = [name for group in quantisation.values() for name in group.tensors]
    problems += [f"quantisation names tensor {name} twice" for name in _repeated(names)]
    return problems


def _group_problems(part: Part, given: QuantisedGroup, profile: Profile) -> Iterator[str]:
    spec = PROFILES[profile]
    wanted = _group(spec.parts[part], spec.activations, 0, given.tensors)
    for key in ("scheme", "bits", "scale_dtype", "activations"):
        if getattr(given, key) != getattr(wanted, key):
            yield (
                f"quantisation.{part}.{key}={getattr(given, key)!r} contradicts profile={profile!r}, "
                f"which has {getattr(wanted, key)!r}"
            )
    allowed = GROUPS.get(wanted.scheme, (None,))
    if given.group not in allowed:
        yield f"quantisation.{part}.group={given.group} must be {' or '.join(map(str, allowed))}"


def membership_problems(
    quantisation: Quantisation, profile: Profile, found: Mapping[Part, tuple[str, ...]]
) -> Iterator[str]:
    """List the tensors that ``quantisation`` names too many or too few, for a drafter with the matrices ``found``."""
    for part in PROFILES[profile].parts:
        there = part in quantisation
        if not there and part == "qkv":
            continue  # all three in 16 bits
        named = quantisation[part].tensors if there else ()
        yield from (f"quantisation.{part}.tensors lacks {n}" for n in found.get(part, ()) if n not in named)
        yield from (f"quantisation.{part}.tensors names {n}, which is not of it" for n in _strange(named, found, part))


def _strange(named: Iterable[str], found: Mapping[Part, tuple[str, ...]], part: Part) -> list[str]:
    return [name for name in named if name not in found.get(part, ())]


def width_problems(quantisation: Quantisation, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """List the matrices whose width their group does not divide."""
    return [
        f"tensor {name} has {shapes[name][1]} columns, which groups of {group.group} do not divide"
        for group in quantisation.values()
        for name in group.tensors
        if group.group is not None and shapes[name][1] % group.group
    ]


def _repeated(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})
