"""What the layouts for serving stacks share: what they are made from, number formats, and the keys of a backbone.

A layout is a pure function from a ``Source`` to ``LayoutFiles``. It refuses what it cannot express; what one server
alone cannot read is found by ``export.conformance`` on the files themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deepspec.drafters.files import type_name
from deepspec.drafters.registry import drafter_to_dict
from deepspec.errors import ConfigError
from deepspec.export import quantise
from deepspec.export.layouts.compressed import compress, quantisation_config
from deepspec.export.package import SERVER_KEY
from deepspec.inference.profiles import Part, matrices

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from deepspec.contracts import TargetInfo
    from deepspec.drafters.base import Drafter, DrafterConfig

LINEARS: tuple[Part, ...] = ("qkv", "mlp", "layers")
ServerQuantisation = Literal["none", "w8a8", "w8a16"]

LAYOUT_KEY = "layout"
OWN_KEY = SERVER_KEY
"""Key of the block that only DeepSpec reads: the drafter's configuration, so that an import gives it back whole."""
OWN_VERSION = 1
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
D2T, T2D = "d2t", "t2d"
IDLE_RANK = 16
"""Rank of the Markov head of zeros that stands in where a drafter has none: SGLang's DSpark needs one."""


@dataclass(frozen=True)
class Numbers:
    """The type of the 16-bit tensors, which is the one the target is served in, and the linears of the layers."""

    dtype: torch.dtype
    quantisation: ServerQuantisation = "none"

    @property
    def dtype_name(self) -> str:
        """``bfloat16`` or ``float16``."""
        return type_name(self.dtype)


@dataclass(frozen=True)
class Source:
    """What a layout is made from. The drafter is bound to its target."""

    drafter: Drafter
    config: DrafterConfig
    target: TargetInfo
    numbers: Numbers
    include_embeddings: bool = False
    verifier: str = ""  # hub id or folder of the target
    temperature: float = 1.0  # folded into the confidence head: its log-odds are divided by it

    @property
    def layers(self) -> int:
        """Decoder layers of the drafter."""
        return len(list(self.drafter.get_submodule("layers").children()))

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that can be proposed."""
        return self.target.vocab_size if self.drafter.d2t is None else len(self.drafter.d2t)


@dataclass(frozen=True)
class LayoutFiles:
    """The contents of a folder: ``config.json``, the weights, and more JSON files by name."""

    layout: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    extras: dict[str, Any] = field(default_factory=dict)


def finish(
    source: Source,
    layout: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    quantised: Collection[str],
    ignore: Collection[str],
) -> LayoutFiles:
    """Cast and quantise the tensors and add the keys that say so.

    Args:
        source: What the layout is made from.
        layout: Its name.
        config: The keys that the consumers read.
        tensors: fp32 tensors under the consumers' names.
        quantised: Names of the weights that ``numbers.quantisation`` quantises.
        ignore: Patterns of the modules that stay as they are.
    """
    numbers = source.numbers
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in quantised and numbers.quantisation != "none":
            quantise.check_finite(name, tensor)
            made |= compress(name, tensor, numbers.quantisation, numbers.dtype)
        else:
            made[name] = cast(name, tensor, numbers.dtype)
    keys = {**config, "dtype": numbers.dtype_name}
    if numbers.quantisation != "none":
        keys["quantization_config"] = quantisation_config(numbers.quantisation, ignore)
    keys[OWN_KEY] = own_block(source, layout)
    return LayoutFiles(layout, keys, {name: t.contiguous() for name, t in made.items()})


def own_block(source: Source, layout: str) -> dict[str, Any]:
    """Return what only DeepSpec reads. Plain values; the consumers keep unknown keys of a config and look at none."""
    target = source.target
    served = {"name": target.name, "model_type": target.model_type, "fingerprint": target.fingerprint}
    return {
        "version": OWN_VERSION,
        LAYOUT_KEY: layout,
        "drafter": drafter_to_dict(source.config),
        "target": {**served, "path": source.verifier},
        "folded_temperature": source.temperature,
    }


def weights(source: Source) -> dict[str, Tensor]:
    """Return the drafter's own fp32 weights on the CPU, without the draft vocabulary."""
    state = source.drafter.state_dict()
    found = {name: value.detach().to("cpu") for name, value in state.items() if name != D2T}
    for name in ("confidence_head.proj.weight", "confidence_head.proj.bias"):
        if name in found and source.temperature != 1.0:
            found[name] = found[name] / source.temperature
    return found


def linears(drafter: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of the linears inside the decoder layers."""
    found = matrices(drafter)
    return tuple(name for part in LINEARS for name in found.get(part, ()))


def shared_tensors(source: Source, *, head_always: bool = False) -> dict[str, Tensor]:
    """Return copies of the target's embedding and head, as far as they belong into the folder, ``d2t`` and ``t2d``.

    The head has the rows of the draft vocabulary alone, which is what servers multiply with. Tied or not, embedding and
    head are two tensors here, because every consumer reads them by name.
    """
    head = source.drafter.draft_head
    found: dict[str, Tensor] = {}
    if source.include_embeddings:
        found[EMBEDDING] = source.drafter.head.embedding.detach().to("cpu").clone()
    if source.include_embeddings or head_always or source.drafter.d2t is not None:
        if head.bias is not None:
            raise ConfigError(
                f"the head of {source.target.name} has a bias, which a folder with the head's rows cannot carry: "
                "use export.layout=native"
            )
        found[HEAD] = head.weight.detach().to("cpu").clone()
    if source.drafter.d2t is not None:
        found[D2T] = source.drafter.d2t.detach().to("cpu", torch.int64).clone()
        found[T2D] = in_draft(found[D2T], source.target.vocab_size)
    return found


def in_draft(d2t: Tensor, vocab_size: int) -> Tensor:
    """Return t2d [V] bool: whether a token of the target can be proposed."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[d2t + torch.arange(len(d2t))] = True
    return mask


def backbone(source: Source, intermediate: str = "layers.0.mlp.gate_proj.weight") -> dict[str, Any]:
    """Return the keys of the decoder layers, as configs of transformers name them."""
    target, conventions = source.target, source.drafter.conventions
    window = conventions.sliding_window
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": source.drafter.state_dict()[intermediate].shape[0],
        "num_hidden_layers": source.layers,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": target.max_position_embeddings,
        **rope_keys(target.rope_parameters),
        "layer_types": ["full_attention" if window is None else "sliding_attention"] * source.layers,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0 if window is not None else source.layers,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def rope_keys(parameters: Mapping[str, object]) -> dict[str, Any]:
    """Write the rotary parameters twice: as transformers 5 reads them, and as versions before it do."""
    flat = dict(parameters)
    scaling = {key: value for key, value in flat.items() if key != "rope_theta"}
    keys: dict[str, Any] = {"rope_parameters": flat, "rope_theta": flat["rope_theta"], "rope_scaling": scaling}
    if scaling.get("rope_type", "default") == "default":
        keys["rope_scaling"] = None
    if "partial_rotary_factor" in flat:
        keys["partial_rotary_factor"] = flat["partial_rotary_factor"]
    return keys


def architectures(model_type: str) -> list[str]:
    """Return the class name of a target, as its own config says it."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return [name] if isinstance(name, str) else []


def require_plain_target(target: TargetInfo, layout: str) -> None:
    """Refuse a target whose embedding or logits carry a factor: the consumers' drafters do not apply it.

    Raises:
        ConfigError: with the factor.
    """
    factors = {
        "multiplies its embeddings by": (target.embed_scale, 1.0),
        "multiplies its logits by": (target.logit_scale, 1.0),
        "soft-caps its logits at": (target.logit_softcap, None),
    }
    problems = [
        f"export.layout={layout}: {target.name} {what} {value:.6g}; the drafters of vLLM, SGLang, speculators and the "
        "published evaluation code that read this layout do not, so every draft would be wrong: use "
        "export.layout=native"
        for what, (value, neutral) in factors.items()
        if value != neutral
    ]
    if problems:
        raise ConfigError(problems)


def require(condition: bool, layout: str, why: str) -> None:
    """Raise a ConfigError that says why ``layout`` cannot hold this drafter."""
    if not condition:
        raise ConfigError(f"export.layout={layout}: {why}")


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return floats in the 16-bit type and everything else as it is.

    Raises:
        DeepSpecError: the tensor is not finite, or would overflow; the message names it.
    """
    if not tensor.is_floating_point():
        return tensor
    return quantise.cast(name, tensor, dtype, "serve the target in bfloat16 and set export.server_dtype=bf16")
