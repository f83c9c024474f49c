"""Another project's folder in our terms: which project wrote it, its settings on one level, its tensors as floats.

Only what a folder says counts. Where projects take another default for a key that is missing, the folder is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from deepspec.errors import ConfigError, PackageError
from deepspec.export.layouts.common import D2T, EMBEDDING, HEAD, T2D, in_draft
from deepspec.export.layouts.compressed import restore
from deepspec.export.layouts.mtp import ARCHITECTURE, layer_prefix, ours
from deepspec.export.layouts.write import read_weights
from deepspec.inference.package_config import CONFIG
from deepspec.inference.strict_json import read_json
from deepspec.nn.vocabulary import id_problems, target_ids
from deepspec.targets.layers import read_taps

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

Project = Literal["published", "published_eagle3", "zlab", "specforge", "speculators", "eagle3", "mtp"]
ARCHITECTURES: Mapping[str, Project] = {
    "Qwen3DSparkModel": "published",
    "Qwen3Eagle3Model": "published_eagle3",
    "Eagle3DraftModel": "published_eagle3",
    "DSparkDraftModel": "specforge",
    "DFlashDraftModel": "zlab",
    "LlamaForCausalLMEagle3": "eagle3",
    ARCHITECTURE: "mtp",
}
TAP_ORDER: Mapping[Project, tuple[str, ...]] = {
    "published": ("target_layer_ids",),
    "published_eagle3": ("target_layer_ids",),
    "zlab": ("dflash_config.target_layer_ids", "target_layer_ids"),
    "specforge": ("dflash_config.target_layer_ids", "target_layer_ids"),
    "speculators": ("aux_hidden_state_layer_ids",),
    "eagle3": ("eagle_config.eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
    "mtp": ("target_layer_ids",),
}
"""Where each project says which layers are tapped. A list elsewhere has to stand for the same layers."""
TRAINED_MASK = "mask_embedding.pt"


@dataclass(frozen=True)
class Foreign:
    """What a folder says."""

    project: Project
    settings: Mapping[str, Any]  # on one level, the more specific section on top
    config: Mapping[str, Any]  # config.json as it is
    tensors: dict[str, Tensor]  # fp32 under our names; integers as they are
    embedding: Tensor | None
    head: Tensor | None

    def number(self, key: str) -> int:
        """Return a whole number that has to be there."""
        value = self.settings.get(key)
        if type(value) is not int:
            raise PackageError(f"{CONFIG}: {key}={value!r} must be a whole number")
        return value

    def matrix(self, name: str) -> Tensor | None:
        """Return a tensor of rows and columns, None when there is none of that name."""
        tensor = self.tensors.get(name)
        if tensor is not None and tensor.ndim != 2:  # noqa: PLR2004 - rows and columns
            raise PackageError(f"tensor {name} has shape {tuple(tensor.shape)}: it must have rows and columns")
        return tensor

    def flag(self, key: str) -> bool | None:
        """Return true or false, None when the key is missing."""
        value = self.settings.get(key)
        if value is not None and not isinstance(value, bool):
            raise PackageError(f"{CONFIG}: {key}={value!r} must be true or false")
        return value

    @property
    def taps(self) -> tuple[int, ...]:
        """The tapped layers in our numbers.

        Raises:
            PackageError: none are named, or two lists stand for different layers.
        """
        try:
            found = read_taps(self.config)
        except ConfigError as error:
            raise PackageError(f"{CONFIG}: {error}") from error
        chosen = next((key for key in TAP_ORDER[self.project] if key in found), None)
        if chosen is None:
            raise PackageError(
                f"{CONFIG} lacks {TAP_ORDER[self.project][0]}: which layers are tapped cannot be guessed"
            )
        for key, ids in found.items():
            if ids != found[chosen]:
                raise PackageError(
                    f"{CONFIG}: {key} stands for the outputs of layers {list(ids)}, {chosen} for {list(found[chosen])}"
                )
        return found[chosen]


def read_foreign(folder: Path) -> Foreign:
    """Read a folder that another project, or a layout for servers, has written.

    Raises:
        PackageError: with the file, key or tensor that is wrong, or the reason why it cannot be read here.
    """
    config = read_json(folder, CONFIG)
    project = project_of(config)
    if (folder / TRAINED_MASK).exists():
        raise PackageError(
            f"{folder / TRAINED_MASK} is a mask embedding of its own: drafters here use the target's frozen row"
        )
    tensors = _floats(read_weights(folder))
    embedding, head = tensors.pop(EMBEDDING, None), tensors.pop(HEAD, None)
    settings = _settings(config, project)
    _check_members(tensors, settings)
    return Foreign(project, settings, config, _our_names(tensors, config, project), embedding, head)


def project_of(config: Mapping[str, Any]) -> Project:
    """Return who wrote a config.

    Raises:
        PackageError: nobody that is known, or someone whose drafters are built differently.
    """
    if "speculators_config" in config and "model_type" not in config:
        return "speculators"
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    project = ARCHITECTURES.get(name) if isinstance(name, str) else None
    nested = config.get("dflash_config")
    kind = nested.get("projector_type") if isinstance(nested, Mapping) else None
    if project is None or (project == "zlab" and kind not in (None, "dflash")):
        raise PackageError(
            f"{CONFIG}: architectures={names!r}{f' with projector_type={kind!r}' if kind else ''} cannot be imported; "
            f"known are {', '.join(ARCHITECTURES)} and the format of speculators"
        )
    return project


def _settings(config: Mapping[str, Any], project: Project) -> dict[str, Any]:
    """Put the sections of a config on one level: some projects nest the algorithm's keys, speculators the layers'."""
    if project == "speculators":
        layers = config.get("transformer_layer_config")
        return {**(layers if isinstance(layers, Mapping) else {}), **config}
    section = config.get("dflash_config")
    nested = section if isinstance(section, Mapping) else {}
    different = [
        f"dflash_config.{key}={value!r} contradicts {key}={config[key]!r}"
        for key, value in nested.items()
        if key != "target_layer_ids" and config.get(key) not in (None, value)
    ]
    if different:
        raise PackageError(f"{CONFIG}: " + "; ".join(different))
    return {**config, **nested}


def _floats(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply quantised matrices out and widen floats to fp32."""
    quantised = [name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")]
    parts = {f"{name}{suffix}" for name in quantised for suffix in ("", "_scale", "_packed", "_shape")}
    found = {name: restore(tensors, name) for name in quantised}
    for name, tensor in tensors.items():
        if name not in parts:
            found[name] = tensor.to(torch.float32) if tensor.is_floating_point() else tensor
    return found


def _our_names(tensors: Mapping[str, Tensor], config: Mapping[str, Any], project: Project) -> dict[str, Tensor]:
    """Rename the one layer of an Eagle3 or an MTP; every other name is ours already."""
    if project == "mtp":
        layers = config.get("num_target_layers", 0)
        if type(layers) is not int:
            raise PackageError(f"{CONFIG}: num_target_layers={layers!r} must be a whole number")
        prefix = layer_prefix(layers)
        return {ours(name, prefix): tensor for name, tensor in tensors.items()}
    return {
        f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name: tensor
        for name, tensor in tensors.items()
    }


def _check_members(tensors: dict[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Widen ``d2t``, and take ``t2d`` away, which says the same once more."""
    members, offsets = tensors.pop(T2D, None), tensors.get(D2T)
    if offsets is None:
        return
    if offsets.ndim != 1 or offsets.is_floating_point():
        raise PackageError(f"tensor {D2T} is {offsets.dtype} {tuple(offsets.shape)}: it must be a row of whole numbers")
    tensors[D2T], vocab = offsets.to(torch.int64), settings.get("vocab_size")
    if type(vocab) is not int:
        raise PackageError(f"{CONFIG}: vocab_size={vocab!r} must be a whole number")
    if problems := id_problems(target_ids(tensors[D2T]), vocab):
        raise PackageError(f"tensor {D2T}: " + "; ".join(problems))
    if members is not None and not members.bool().equal(in_draft(tensors[D2T], vocab)):
        raise PackageError(f"tensor {T2D} contradicts {D2T}: they name different tokens")
