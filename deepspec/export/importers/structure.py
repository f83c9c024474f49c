"""The drafter configuration that a foreign folder shows, and what has to agree with the target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from deepspec.drafters.dflash.config import DFlashConfig
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.eagle3.config import Eagle3Config
from deepspec.drafters.files import read_drafter_config
from deepspec.drafters.mtp.config import MTPConfig
from deepspec.drafters.registry import TARGET_KEY, drafter_to_dict
from deepspec.errors import DeepSpecError, PackageError
from deepspec.export.layouts.common import D2T, OWN_KEY
from deepspec.export.layouts.heads import CONFIDENCE, KINDS, W1, W2
from deepspec.inference.package_config import CONFIG
from deepspec.nn.rope import RotaryEmbedding

if TYPE_CHECKING:
    from deepspec.contracts import TargetInfo
    from deepspec.drafters.base import DrafterConfig
    from deepspec.export.importers.foreign import Foreign

OWN_DRAFTER = re.compile(r"deepspec\.drafters\.[a-z0-9_]+\.config\.[A-Za-z0-9]+")
ROPE_TOLERANCE = 1e-6
DEFAULT_STEPS = 7
"""Drafted tokens of an Eagle3 whose folder does not say: its chain has no length of its own."""


def drafter_config(foreign: Foreign, target: TargetInfo) -> tuple[DrafterConfig, Foreign]:
    """Return the configuration of the drafter, and the folder without a Markov head that only stands in for none.

    Where DeepSpec wrote the folder, the configuration has its training's keys too.

    Raises:
        PackageError: a key is missing that cannot be guessed, or contradicts another.
    """
    written = _written(foreign)
    if written is None:
        return _shown(foreign, target, DSparkConfig), foreign
    foreign = _without_idle_head(foreign, written)
    shown = _shown(foreign, target, type(written))
    ours, theirs = essence(written, target), essence(shown, target)
    different = [
        f"{key}={value!r}, {OWN_KEY}.drafter says {ours.get(key)!r}"
        for key, value in theirs.items()
        if value != ours.get(key)
    ]
    if different or type(written) is not type(shown):
        raise PackageError(
            f"{CONFIG} contradicts itself: " + ("; ".join(different) or f"it shows a {type(shown).__name__}")
        )
    return written, foreign


def essence(config: DrafterConfig, target: TargetInfo) -> dict[str, Any]:
    """Return what a folder shows of a configuration, defaults written out."""
    values = drafter_to_dict(config)
    keys = ("num_layers", "gamma", "ttt_length", "block_layout", "qk_norm", "sliding_window", "confidence_head")
    found = {key: values[key] for key in keys if key in values}
    found["intermediate_size"] = values["intermediate_size"] or target.intermediate_size
    found["draft_vocab_size"] = values["draft_vocab_size"] or target.vocab_size
    if isinstance(config, DSparkConfig):
        found["markov_head"] = config.markov_head
        found["markov_rank"] = config.markov_rank if config.uses_markov else 0
        found["confidence_with_markov"] = config.confidence_head and config.confidence_sees_markov
    return found


def _written(foreign: Foreign) -> DrafterConfig | None:
    block = foreign.config.get(OWN_KEY)
    if block is None:
        return None
    section = block.get("drafter") if isinstance(block, Mapping) else None
    if not isinstance(section, Mapping) or not OWN_DRAFTER.fullmatch(str(section.get(TARGET_KEY))):
        raise PackageError(f"{CONFIG}: {OWN_KEY}.drafter is no configuration of a drafter of DeepSpec")
    return read_drafter_config(section, CONFIG)


def _without_idle_head(foreign: Foreign, written: DrafterConfig) -> Foreign:
    """Take the Markov head of zeros away that stands in for none."""
    has_head = isinstance(written, DSparkConfig) and written.uses_markov
    if has_head or W2 not in foreign.tensors:
        return foreign
    if bool(foreign.tensors[W2].any()):
        raise PackageError(f"tensor {W2} is not zero, but {OWN_KEY}.drafter has no Markov head")
    tensors = {name: tensor for name, tensor in foreign.tensors.items() if name not in (W1, W2)}
    return replace(foreign, tensors=tensors, settings={**foreign.settings, "markov_rank": 0})


def _shown(foreign: Foreign, target: TargetInfo, like: type) -> DrafterConfig:
    """Return the configuration that keys and tensors show; without small heads a DSpark only if ``like`` is one."""
    gate = foreign.matrix("layers.0.mlp.gate_proj.weight")
    if gate is None:
        raise PackageError("tensor layers.0.mlp.gate_proj.weight is missing")
    common: dict[str, Any] = {
        "num_layers": foreign.number("num_hidden_layers"),
        "intermediate_size": None if gate.shape[0] == target.intermediate_size else gate.shape[0],
        "draft_vocab_size": _drafted(foreign, target),
    }
    if foreign.project in ("eagle3", "published_eagle3"):
        head_norms = "layers.0.self_attn.q_norm.weight" in foreign.tensors
        return Eagle3Config(**common, ttt_length=_steps(foreign), qk_norm=head_norms)
    if foreign.project == "mtp":
        return MTPConfig(**common)
    size, first = foreign.number("block_size"), anchor_first(foreign)
    common |= {"gamma": size if first else size - 1, "sliding_window": _window(foreign)}
    heads = _heads(foreign)
    if not first or (heads["markov_head"] == "none" and not heads["confidence_head"] and _is_headless(foreign, like)):
        return DFlashConfig(**common, block_layout="anchor_first" if first else "fill_in")
    return DSparkConfig(**common, **heads)


def _is_headless(foreign: Foreign, like: type) -> bool:
    """Whether a block drafter without small heads is a DFlash, as published ones are."""
    return like is DFlashConfig or OWN_KEY not in foreign.config


def _heads(foreign: Foreign) -> dict[str, Any]:
    """Return the keys of the small heads, from their tensors; the config must not say otherwise."""
    embeddings, confidence = foreign.matrix(W1), foreign.matrix(CONFIDENCE)
    rank = 0 if embeddings is None else embeddings.shape[1]
    kind = next((kind for name, kind in KINDS.items() if name in foreign.tensors), "vanilla") if rank else "none"
    sees = confidence is not None and confidence.shape[1] > foreign.number("hidden_size")
    shown: dict[str, Any] = {"markov_rank": rank, "enable_confidence_head": confidence is not None}
    shown |= {"markov_head_type": kind} if rank else {}
    shown |= {"confidence_head_with_markov": sees} if confidence is not None else {}
    for key, value in shown.items():
        said = foreign.settings.get(key)
        if said is not None and said != value:
            raise PackageError(f"{CONFIG}: {key}={said!r}, but the tensors show {value!r}")
    return {
        "markov_head": kind,
        "markov_rank": rank or DSparkConfig.markov_rank,
        "confidence_head": confidence is not None,
        "confidence_with_markov": sees,
    }


def anchor_first(foreign: Foreign) -> bool:
    """Whether the anchor's row predicts the first token.

    DSpark of the published code and of SpecForge always is, z-lab's DFlash never; speculators has both, and readers
    disagree about a DSpark that does not say.

    Raises:
        PackageError: it is not said where it has to be, or cannot be.
    """
    said = foreign.flag("sample_from_anchor")
    kind = foreign.settings.get("speculators_model_type")
    if foreign.project == "speculators":
        if said is None and kind != "dflash":
            raise PackageError(
                f"{CONFIG} lacks sample_from_anchor: speculators takes true for a DSpark and vLLM false, so it cannot "
                "be guessed"
            )
        first = bool(said)
    else:
        first = foreign.project != "zlab"
        if said is not None and said != first:
            raise PackageError(f"{CONFIG}: sample_from_anchor={said} contradicts {foreign.config['architectures']}")
    if not first and (W1 in foreign.tensors or CONFIDENCE in foreign.tensors):
        raise PackageError(f"{CONFIG}: sample_from_anchor=False: a DSpark here is anchor-first")
    return first


def _window(foreign: Foreign) -> int | None:
    """Return the sliding window of all layers; how its blocks look at themselves has to be said."""
    types = foreign.settings.get("layer_types") or []
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise PackageError(f"{CONFIG}: layer_types={types!r} must be a list of names, one a layer")
    if "sliding_attention" not in types:
        return None
    if set(types) != {"sliding_attention"}:
        raise PackageError(f"{CONFIG}: layer_types={types}: the layers of a drafter here all have the same window")
    causal, free = foreign.flag("is_causal"), foreign.flag("sliding_window_non_causal")
    if causal is not False and free is not True:
        raise PackageError(
            f"{CONFIG}: is_causal={causal} with a sliding window: say false for blocks that see themselves whole, as "
            "drafters here do; servers take true when it is missing"
        )
    return foreign.number("sliding_window")


def _drafted(foreign: Foreign, target: TargetInfo) -> int | None:
    offsets = foreign.tensors.get(D2T)
    said = foreign.settings.get("draft_vocab_size")
    if offsets is None and said not in (None, target.vocab_size):
        raise PackageError(f"{CONFIG}: draft_vocab_size={said!r}, but tensor {D2T} is missing")
    if offsets is not None and said not in (None, len(offsets)):
        raise PackageError(f"{CONFIG}: draft_vocab_size={said!r}, tensor {D2T} names {len(offsets)} tokens")
    return None if offsets is None else len(offsets)


def _steps(foreign: Foreign) -> int:
    for key in ("ttt_length", "num_speculative_tokens"):
        if foreign.settings.get(key) is not None:
            return foreign.number(key)
    return DEFAULT_STEPS


def check_against(foreign: Foreign, target: TargetInfo) -> None:
    """Refuse a folder whose widths, norms or rotary positions are not the target's: drafters here take them from it.

    Raises:
        PackageError: with every value that differs.
    """
    own = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "target_hidden_size": target.hidden_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }
    found = {key: foreign.settings.get(key) for key in own}
    different = [f"{key}={found[key]!r}, the target has or DeepSpec builds {value!r}" for key, value in own.items()
                 if found[key] not in (None, value)]  # fmt: skip
    if not _same_rotation(rope_of(foreign.settings), target):
        different.append(f"rope {rope_of(foreign.settings)}, the target has {dict(target.rope_parameters)}")
    if different:
        raise PackageError(f"{CONFIG} does not fit the target: " + "; ".join(different))


def rope_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters as one flat dict, from the keys of transformers 5 or those before it.

    Raises:
        PackageError: the base is missing, or said in two ways.
    """
    flat, scaling = ({} if settings.get(k) is None else settings[k] for k in ("rope_parameters", "rope_scaling"))
    for key, section in (("rope_parameters", flat), ("rope_scaling", scaling)):
        if not isinstance(section, Mapping):
            raise PackageError(f"{CONFIG}: {key}={section!r} must be a section of keys")
    said = [value for value in (flat.get("rope_theta"), settings.get("rope_theta")) if value is not None]
    for value in said:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PackageError(f"{CONFIG}: rope_theta={value!r} must be a number")
    theta = set(said)
    if len(theta) != 1:
        raise PackageError(
            f"{CONFIG}: the rotary base is {sorted(theta) or 'missing'}: rope_parameters.rope_theta or rope_theta has "
            "to say one value, since projects take different ones when it is missing"
        )
    merged = {**scaling, **flat, "rope_theta": theta.pop()}
    merged["rope_type"] = merged.get("rope_type", merged.pop("type", "default"))
    return {key: value for key, value in merged.items() if value is not None}


def _same_rotation(rope: Mapping[str, Any], target: TargetInfo) -> bool:
    """Compare by the frequencies themselves: one scaling can be written in several ways."""
    try:
        pair = [
            RotaryEmbedding(parameters, head_dim=target.head_dim, max_position=target.max_position_embeddings)
            for parameters in (rope, target.rope_parameters)
        ]
    except (KeyError, TypeError, ValueError, ZeroDivisionError, DeepSpecError) as error:  # transformers' own checks
        raise PackageError(f"{CONFIG}: rope {dict(rope)} cannot be read: {error}") from error
    ours, theirs = (embedding.inverse_frequencies for embedding in pair)
    return (
        ours.shape == theirs.shape
        and torch.allclose(ours, theirs, rtol=ROPE_TOLERANCE, atol=0.0)
        and abs(pair[0].scaling - pair[1].scaling) <= ROPE_TOLERANCE
    )
