"""What differs between model families, as data.

A family that is not listed works when the common names fit; ``Target`` then checks with a few tokens that the head
described here gives the model's own logits, and refuses the model if it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspec.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


@dataclass(frozen=True)
class Family:
    """Where the parts of a model live, and which keys of its configuration scale embedding and logits."""

    base: str = "model"  # the decoder stack inside the causal LM
    embedding: str = "embed_tokens"  # inside the stack, like the two below
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"  # inside the causal LM
    embed_sqrt_width: bool = False  # the embedding is multiplied by sqrt(D)
    embed_scale: str | None = None  # key of a factor of the embedding
    logit_scale: str | None = None  # key of a factor of the logits
    logit_divisor: str | None = None  # key of a divisor of the logits
    logit_softcap: str | None = None  # key of the soft-cap of the logits


_COMMON = Family()
_GEMMA = Family(embed_sqrt_width=True, logit_softcap="final_logit_softcapping")
_COHERE = Family(logit_scale="logit_scale")

FAMILIES: Mapping[str, Family] = {
    "llama": _COMMON,
    "mistral": _COMMON,
    "phi3": _COMMON,
    "olmo2": _COMMON,
    "qwen2": _COMMON,
    "qwen3": _COMMON,
    "qwen3_moe": _COMMON,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": _GEMMA,
    "granite": Family(embed_scale="embedding_multiplier", logit_divisor="logits_scaling"),
    "cohere": _COHERE,
    "cohere2": _COHERE,
}


@dataclass(frozen=True)
class Parts:
    """The modules of a causal LM that a target is used through."""

    base: nn.Module
    embedding: nn.Embedding
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Linear


def find_parts(model: Any, model_type: str) -> Parts:
    """Return the modules of ``model`` by the names of its family.

    Raises:
        TargetError: the family is unknown and the common names do not fit.
    """
    family = FAMILIES.get(model_type, _COMMON)
    try:
        base: Any = model.get_submodule(family.base)
        return Parts(
            base=base,
            embedding=base.get_submodule(family.embedding),
            layers=base.get_submodule(family.layers),
            norm=base.get_submodule(family.norm),
            head=model.get_submodule(family.head),
        )
    except AttributeError as error:
        raise TargetError(
            f"models of the family {model_type!r} cannot be used as a target: {error}. Known families: "
            f"{', '.join(FAMILIES)}. Set target.path to another model."
        ) from error


def scales(config: Any, model_type: str) -> tuple[float, float, float | None]:
    """Return (embed_scale, logit_scale, logit_softcap) of a configuration."""
    family = FAMILIES.get(model_type, _COMMON)
    embed = float(config.hidden_size) ** 0.5 if family.embed_sqrt_width else _number(config, family.embed_scale, 1.0)
    logit = _number(config, family.logit_scale, 1.0) / _number(config, family.logit_divisor, 1.0)
    softcap = getattr(config, family.logit_softcap, None) if family.logit_softcap else None
    return embed, logit, None if softcap is None else float(softcap)


def flat_rope(config: Any) -> dict[str, object]:
    """Return the rotary parameters as one flat dict; those of the full-attention layers where layer types differ."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope and all(isinstance(value, dict) for value in rope.values()):
        rope = dict(rope.get("full_attention") or next(iter(rope.values())))
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", float(getattr(config, "rope_theta", 10000.0)))
    return {key: value for key, value in rope.items() if value is not None}


def attention_shape(config: Any) -> tuple[int, int, int]:
    """Return (attention heads, key-value heads, head width), of a full-attention layer where layers differ."""
    types = getattr(config, "layer_types", None) or []
    layer = config
    if "full_attention" in types and getattr(config, "per_layer_config", None):
        layer = config.per_layer_config[types.index("full_attention")]
    heads = int(layer.num_attention_heads)
    kv = int(getattr(layer, "num_key_value_heads", None) or heads)
    return heads, kv, int(getattr(layer, "head_dim", None) or config.hidden_size // heads)


def _number(config: Any, key: str | None, default: float) -> float:
    return default if key is None else float(getattr(config, key, default))
