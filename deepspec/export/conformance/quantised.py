"""Which linears a consumer takes for quantised, and the tensors that it then asks for.

Consumers find that out by names of their own: vLLM puts ``model.`` in front, SGLang builds the layers without any name.
Where that differs from what the exporter meant, a matrix is filled with the bytes of another type, in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepspec.export.conformance.folder import Finding, Folder, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deepspec.drafters.files import TensorKind

FLOATS = ("bfloat16", "float16", "float32")
FORMATS = {"int-quantized": ("int", True), "pack-quantized": ("int", False), "float-quantized": ("float", True)}
"""Type of the values, and whether activations are quantised too."""
NAMELESS = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "o_proj": "o_proj"} | {
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"
}  # fmt: skip
"""Names that SGLang gives the linears of a draft's layers: nothing in front."""


def scheme_of(folder: Folder) -> Mapping[str, Any] | None:
    """Return the quantisation of a config, None without one."""
    found = folder.config.get("quantization_config")
    return found if isinstance(found, Mapping) else None


def is_quantised(name: str, scheme: Mapping[str, Any], cls: str) -> bool:
    """Whether a consumer that calls a module ``name``, of the class ``cls``, takes it for quantised."""
    ignored = any(_matches(entry, name) for entry in scheme.get("ignore") or ())
    return not ignored and any(entry == cls or _matches(entry, name) for entry in _targets(scheme))


def expected_kinds(name: str, shape: tuple[int, ...], scheme: Mapping[str, Any]) -> dict[str, TensorKind]:
    """Return the tensors that stand for the quantised matrix ``name`` [o, i]; the scale's type is free."""
    rows, columns = shape
    packed, stem = scheme.get("format") == "pack-quantized", name.removesuffix(".weight")
    scale = {f"{stem}.weight_scale": ((rows, 1), "scale")}
    if packed:
        words = ((rows, -(-columns // 4)), "int32")
        return {f"{stem}.weight_packed": words, **scale, f"{stem}.weight_shape": ((2,), "int64")}
    return {f"{stem}.weight": (shape, "int8" if scheme.get("format") == "int-quantized" else "F8_E4M3"), **scale}


def scheme_findings(folder: Folder) -> Iterator[Finding]:
    """Yield what is wrong with a config's quantisation for every server."""
    scheme = scheme_of(folder)
    if scheme is None:
        return
    if scheme.get("quant_method") != "compressed-tensors":
        yield refused(
            f"quantization_config.quant_method={scheme.get('quant_method')!r}: only compressed-tensors was verified"
        )
        return
    if scheme.get("format") not in FORMATS:
        yield refused(f"quantization_config.format={scheme.get('format')!r} must be one of {', '.join(FORMATS)}")
        return
    kind, dynamic = FORMATS[scheme["format"]]
    for name, group in _groups(scheme).items():
        where = f"quantization_config.config_groups.{name}"
        found = group.get("weights") if isinstance(group.get("weights"), Mapping) else {}
        if (found or {}).get("num_bits") != 8 or (found or {}).get("type") != kind:  # noqa: PLR2004 - INT8 or FP8
            yield refused(f"{where}.weights must be 8-bit {kind} for format={scheme['format']}")
        if (group.get("input_activations") is not None) != dynamic:
            yield refused(
                f"{where}.input_activations={group.get('input_activations')!r} contradicts "
                f"format={scheme['format']}: servers refuse weight-only INT8 unless it is packed"
            )


def fused_findings(folder: Folder, name_of: Callable[[str, Folder], str]) -> Iterator[Finding]:
    """Yield the groups of matrices that a server fuses although they are not quantised alike."""
    scheme = scheme_of(folder)
    if scheme is None:
        return
    groups = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))
    for index in range(folder.number("num_hidden_layers")):
        for part, members in groups:
            names = [f"layers.{index}.{part}.{member}" for member in members]
            if len({is_quantised(name_of(name, folder), scheme, "Linear") for name in names}) > 1:
                yield refused(f"{', '.join(names)} are fused and need one scheme, quantization_config gives them two")


def target_findings(folder: Folder) -> Iterator[Finding]:
    """Yield targets by name, which match nothing where the linears have no name."""
    scheme = scheme_of(folder)
    targets = [] if scheme is None else _targets(scheme)
    if scheme is not None and not any(
        entry == "Linear" or any(_matches(entry, name) for name in set(NAMELESS.values())) for entry in targets
    ):
        yield refused(
            f"quantization_config targets {targets}: its layers are built without names, so only the class "
            '"Linear" matches'
        )


def _groups(scheme: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    groups = scheme.get("config_groups")
    found = groups if isinstance(groups, Mapping) else {}
    return {str(name): group for name, group in found.items() if isinstance(group, Mapping)}


def _targets(scheme: Mapping[str, Any]) -> list[str]:
    return [str(entry) for group in _groups(scheme).values() for entry in group.get("targets") or ()]


def _matches(entry: object, name: str) -> bool:
    """Compare as compressed-tensors does: an exact name, or an expression from the name's start."""
    text = str(entry)
    return bool(re.match(text[3:], name)) if text.startswith("re:") else text == name
