"""The frozen target: what it says about tokens, in batches for training and step by step for decoding."""

from __future__ import annotations

import hashlib
import inspect
import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepspec.contracts import Features, TargetInfo
from deepspec.errors import TargetError
from deepspec.nn.head import FrozenHead
from deepspec.nn.spans import is_packed
from deepspec.targets.cache import TargetCache
from deepspec.targets.families import FAMILIES, attention_shape, find_parts, flat_rope, scales

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from deepspec.contracts import Batch

EMBEDDING = -1  # layer id of the embedding's output
SAMPLED_ROWS = 16  # rows of each sampled matrix that go into the fingerprint
SELF_CHECK_TOLERANCE = 2e-3  # relative to the largest logit; a forgotten scale or soft-cap is far above it


@dataclass(frozen=True)
class StepFeatures:
    """What one decoding step gives for its last n tokens (logits) and all its t tokens (the states)."""

    logits: Tensor  # [n, V] fp32
    hidden: Tensor  # [t, C*D]
    last_hidden: Tensor  # [t, D], after the final norm


class Target:
    """A frozen causal LM, its embedding and head, its tokenizer, and what a drafter has to know of it."""

    def __init__(self, model: Any, tokenizer: Any = None, *, name: str = "") -> None:
        """Freeze ``model`` (a causal LM of transformers) and find its parts.

        Raises:
            TargetError: the family is unknown, and its parts or its logits do not fit the common description.
        """
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        config = model.config.get_text_config(decoder=True)
        self._parts = find_parts(model, config.model_type)
        parameters = inspect.signature(type(self._parts.base).forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.info = _describe(model, config, name or config.model_type, self._parts.embedding.weight)
        self.head = FrozenHead.from_tensors(
            self.info, self._parts.embedding.weight, self._parts.head.weight, getattr(self._parts.head, "bias", None)
        )
        if config.model_type not in FAMILIES:
            self._check_unknown_family()

    @property
    def device(self) -> torch.device:
        """Where the target's weights are."""
        return self.head.embedding.device

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self._parts.layers

    @torch.no_grad()
    def features(self, batch: Batch, layer_ids: Sequence[int]) -> Features:
        """Run the decoder stack on a batch and return the chosen layers' outputs and the final-normed state.

        Rows are padded on the right, so a causal model needs no mask for them. Where a row holds several segments,
        the model is given the positions that restart, from which transformers keeps the segments apart.
        """
        packed = is_packed(batch)
        with self._capture(layer_ids) as taps:
            output = self._parts.base(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids if packed else None,
                use_cache=False,
            )
        last_hidden = output.last_hidden_state
        return Features(hidden=_join(taps, layer_ids, last_hidden), last_hidden=last_hidden)

    def new_cache(self, max_length: int) -> TargetCache:
        """Return an empty cache for sequences of about ``max_length`` positions; it grows if they get longer."""
        return TargetCache(max_length)

    @torch.no_grad()
    def step(
        self, input_ids: Tensor, cache: TargetCache, layer_ids: Sequence[int] = (), *, num_logits: int | None = None
    ) -> StepFeatures:
        """Append ``input_ids`` [1, t] to the cache and return their features.

        Args:
            input_ids: the next t tokens, the whole prompt in the first step.
            cache: what ``new_cache`` gave; grows by t positions.
            layer_ids: layers whose outputs are wanted.
            num_logits: compute the logits of the last so many tokens only; None takes all t.
        """
        with self._capture(layer_ids) as taps:
            last_hidden = self.forward_cached(input_ids, cache)  # [1, t, D]
        wanted = last_hidden[0] if num_logits is None else last_hidden[0, last_hidden.shape[1] - num_logits :]
        hidden = _join(taps, layer_ids, last_hidden)[0]
        return StepFeatures(self.head.logits(wanted).float(), hidden, last_hidden[0])

    def crop(self, cache: TargetCache, length: int) -> None:
        """Keep the first ``length`` positions of the cache."""
        cache.crop_to(length)

    @torch.no_grad()
    def forward_cached(
        self,
        input_ids: Tensor,
        cache: TargetCache,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Append tokens [B, t] to the cache and return their final-normed states [B, t, D].

        ``attention_mask`` [B, columns] is False where a column of the cache belongs to no token of that row;
        ``position_ids`` [B, t] are needed with it.
        """
        output = self._parts.base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            **{self._cache_argument: cache},
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    @contextmanager
    def _capture(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect the outputs of layers in a dict while the block runs."""
        taps: dict[int, Tensor] = {}
        handles = [self._hook(layer, taps) for layer in layer_ids]
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer: int, taps: dict[int, Tensor]) -> Any:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taps[layer] = args[0] if args else kwargs["hidden_states"]

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            taps[layer] = output[0] if isinstance(output, tuple) else output

        if not EMBEDDING <= layer < len(self.layers):
            raise TargetError(f"layer {layer} was asked for, but {self.info.name} has {len(self.layers)} layers")
        if layer == EMBEDDING:
            return self.layers[0].register_forward_pre_hook(before, with_kwargs=True)
        return self.layers[layer].register_forward_hook(after)

    @torch.no_grad()
    def _check_unknown_family(self) -> None:
        """Compare the described embedding and head with the model itself on a few tokens."""
        ids = torch.arange(8, device=self.device)[None] % self.info.vocab_size
        try:
            with self._capture([EMBEDDING]) as taps:
                last_hidden = self._parts.base(input_ids=ids, use_cache=False).last_hidden_state
            own = self.model(input_ids=ids, use_cache=False).logits.float()
            pairs = [
                (self.head.logits(last_hidden).float(), own),
                (self.head.embed(ids).float(), taps[EMBEDDING].float()),
            ]
            fits = all(_close(mine, theirs) for mine, theirs in pairs)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise TargetError(self._unknown(str(error))) from error
        if not fits:
            raise TargetError(self._unknown("its logits or embeddings are scaled in a way that is not described"))

    def _unknown(self, why: str) -> str:
        return (
            f"models of the family {self.info.model_type!r} cannot be used as a target: {why}. "
            f"Known families: {', '.join(FAMILIES)}. Set target.path to another model."
        )


def _join(taps: dict[int, Tensor], layer_ids: Sequence[int], like: Tensor) -> Tensor:
    """Join the outputs [B, T, D] of layers to [B, T, C*D]; without a layer it is as long as ``like`` [B, T, D]."""
    return torch.cat([taps[layer] for layer in layer_ids], dim=-1) if layer_ids else like[..., :0]


def _close(mine: Tensor, theirs: Tensor) -> bool:
    same_shape = mine.shape == theirs.shape
    return same_shape and bool((mine - theirs).abs().max() <= SELF_CHECK_TOLERANCE * theirs.abs().max())


def _describe(model: Any, config: Any, name: str, embedding: Tensor) -> TargetInfo:
    embed_scale, logit_scale, softcap = factors = scales(config, config.model_type)
    heads, kv_heads, head_dim = attention_shape(config)
    rope = flat_rope(config)
    return TargetInfo(
        name=name,
        model_type=config.model_type,
        vocab_size=embedding.shape[0],
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", getattr(config, "layer_norm_eps", 1e-6))),
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
        embed_scale=embed_scale,
        logit_scale=logit_scale,
        logit_softcap=softcap,
        fingerprint=fingerprint(model, {"type": config.model_type, "rope": rope, "scales": [*factors]}),
        eos_token_ids=eos_ids(getattr(model, "generation_config", None), config),
    )


def fingerprint(model: nn.Module, essentials: dict[str, Any]) -> str:
    """Hash configuration essentials and sampled weights: equal for equal weights, whatever precision holds them."""
    digest = hashlib.sha256(json.dumps(essentials, sort_keys=True, default=str).encode())
    tensors = sorted(model.state_dict().items())
    for name, value in tensors[:: max(1, len(tensors) // 32)]:
        rows = value.detach().reshape(-1, value.shape[-1] if value.dim() else 1)
        sample = rows[:: max(1, rows.shape[0] // SAMPLED_ROWS)][:SAMPLED_ROWS]
        digest.update(f"{name}{tuple(value.shape)}".encode())
        digest.update(sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def eos_ids(generation: Any, config: Any) -> tuple[int, ...]:
    """Return the ids that end generation: those of the generation settings, else of the configuration."""
    value = getattr(generation, "eos_token_id", None)
    value = getattr(config, "eos_token_id", None) if value is None else value
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(token) for token in value)
