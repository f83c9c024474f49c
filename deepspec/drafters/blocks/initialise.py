"""Start a drafter from its target's own last layers.

The drafter's L layers get the weights of the target's last L of N layers; with ``init=fitted`` only those behind
``layers.0`` are copies, of the last L-1. ``fc`` passes one captured layer on as the context of every layer: N-L, which
the layer that ``layers.1`` copies reads in the target, where it is captured, else the last. So the choice serves the
layers behind ``layers.0``; the layer that a copied ``layers.0`` comes from reads N-L-1. Three things differ and are
folded in:

- One ``hidden_norm`` serves the keys and values of every layer, while each target layer has its own input norm. Both
  norms of the drafter take the geometric mean of the copied ones, and each layer's projections take up the difference;
  as a function of the normalised state nothing changes.
- The drafter normalises the heads of queries and keys. For a target that does not, the norm's weight is the typical
  root mean square of the target's heads, measured on tokens spread evenly over its vocabulary. (From the weights alone,
  as if states had equal spread, the products come out at less than half their size: real states share a strong mean.)
- Scales that a family puts elsewhere (attention scale, residual multiplier) move into the weights.

Norms are read by what they do to a vector of alternating signs, which also covers weights stored as w - 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from deepspec.drafters.blocks.model import BlockDrafter
    from deepspec.nn.block import ContextAttention, DrafterLayer

PROBE_TOKENS = 64
INTERLEAVED_ROPE = ("cohere", "cohere2")  # these turn channels (2i, 2i+1) together, the drafter (i, i + Dh/2)


@torch.no_grad()
def initialise_from(drafter: BlockDrafter, target_model: nn.Module, *, first: int = 0) -> list[str]:
    """Copy what fits from the target's own layers; return a line for each part that was taken or left.

    The drafter's layers before ``first`` stay as they are.
    """
    stack, parent = decoder_stack(target_model)
    layers = drafter.decoder_layers[first:]
    if stack is None or len(stack) < len(layers):
        return ["the target shows no stack of decoder layers that is deep enough: every weight stays random"]
    sources = list(stack)[-len(layers) :]
    shared = _shared_input_norm(drafter, sources)
    interleaved = getattr(getattr(target_model, "config", None), "model_type", "") in INTERLEAVED_ROPE
    states = _normed_inputs(target_model, sources, drafter.target.vocab_size)
    lines = []
    for index, (layer, source) in enumerate(zip(layers, sources, strict=True)):
        taken = _copy_layer(layer, source, shared, states.get(index), interleaved=interleaved)
        lines.append(
            f"layers.{first + index} from the target's layer {len(stack) - len(layers) + index}: {', '.join(taken)}"
        )
    drafter.hidden_norm.weight.copy_(shared)
    lines.append(_copy_final_norm(drafter, parent))
    lines.append(_pass_tap_on(drafter))
    return lines


def decoder_stack(model: nn.Module) -> tuple[nn.ModuleList | None, nn.Module]:
    """Return the longest list of layers with attention and MLP, and the module that holds it."""
    best: nn.ModuleList | None = None
    holder = model
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and all(hasattr(x, "self_attn") and hasattr(x, "mlp") for x in child):
                if best is None or len(child) > len(best):
                    best, holder = child, module
    return best, holder


def norm_weight(norm: object, width: int) -> Tensor | None:
    """Return the effective weight [width] of a norm by its answer to a vector of alternating signs; None if unfit."""
    parameter = next(norm.parameters(), None) if isinstance(norm, nn.Module) else None
    if parameter is None or not isinstance(norm, nn.Module) or parameter.shape != (width,):
        return None
    signs = torch.ones(width, dtype=torch.float32, device=parameter.device)
    signs[1::2] = -1.0
    return (norm(signs.to(parameter.dtype)[None, None])[0, 0].float() * signs).cpu()


def _shared_input_norm(drafter: BlockDrafter, sources: list[nn.Module]) -> Tensor:
    """Return the geometric mean [D] of the input norms, kept away from zero so that it can be divided by."""
    width = drafter.target.hidden_size
    weights = [norm_weight(getattr(source, "input_layernorm", None), width) for source in sources]
    known = torch.stack([torch.ones(width) if w is None else w.abs() for w in weights])
    floor = 1e-2 * known.mean().clamp(min=1e-6)
    return known.clamp(min=floor).log().mean(0).exp()


def _normed_inputs(target_model: nn.Module, sources: list[nn.Module], vocab_size: int) -> dict[int, Tensor]:
    """Return the states [n, D] that each layer's projections read, by running the target on a few tokens."""
    caught: dict[int, Tensor] = {}

    def catch(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            caught[index] = output[0].float().cpu()

        return hook

    norms = [(i, norm) for i, source in enumerate(sources) if (norm := getattr(source, "input_layernorm", None))]
    handles = [norm.register_forward_hook(catch(i)) for i, norm in norms]
    try:
        ids = torch.linspace(0, vocab_size - 1, PROBE_TOKENS).long()[None]
        target_model(input_ids=ids.to(next(target_model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return caught


def _copy_layer(
    layer: DrafterLayer, source: nn.Module, shared: Tensor, states: Tensor | None, *, interleaved: bool
) -> list[str]:
    """Fill one layer and say in a few words what was taken and what was not."""
    width = shared.shape[0]
    own = norm_weight(getattr(source, "input_layernorm", None), width)
    ratio = torch.ones(width) if own is None else own / shared
    layer.input_layernorm.weight.copy_(shared)
    said = ["norms" if own is not None else "no input norm to take"]
    before_mlp = getattr(source, "pre_feedforward_layernorm", None)
    second = norm_weight(before_mlp or getattr(source, "post_attention_layernorm", None), width)
    if second is not None:
        layer.post_attention_layernorm.weight.copy_(second)
    residual = float(getattr(source, "residual_multiplier", 1.0))
    said += _copy_attention(layer.self_attn, source.get_submodule("self_attn"), ratio, residual, interleaved)
    said += _head_norms(layer.self_attn, source.get_submodule("self_attn"), states)
    said += _copy_mlp(layer, source.get_submodule("mlp"), residual)
    if before_mlp is not None:
        said.append("the norms after attention and MLP have no place")
    return said


def _copy_attention(
    attention: ContextAttention, source: nn.Module, ratio: Tensor, residual: float, interleaved: bool
) -> list[str]:
    """Copy the projections; ``ratio`` [D] is what their inputs were scaled by before and are no longer."""
    query, key, value = _query_key_value(attention, source)
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    pairs = _fitting(linears, (query, key, value, _weight(source, "o_proj")))
    if not pairs:
        return ["attention stays random (other shape)"]
    factors = (ratio, ratio, ratio, torch.tensor(residual))
    for (linear, weight), factor in zip(pairs, factors, strict=True):
        turned = interleaved and linear in (attention.q_proj, attention.k_proj)
        linear.weight.copy_((_uninterleave(weight, attention.head_dim) if turned else weight) * factor)
    return ["attention", "its biases dropped"] if _has_bias(source) else ["attention"]


def _query_key_value(
    attention: ContextAttention, source: nn.Module
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the target's projections, cut apart where it keeps them in one matrix."""
    rows, group_rows = attention.q_proj.out_features, attention.k_proj.out_features
    fused = _weight(source, "qkv_proj")
    if fused is not None and fused.shape[0] == rows + 2 * group_rows:
        query, key, value = fused.split((rows, group_rows, group_rows))
        return query, key, value
    return _weight(source, "q_proj"), _weight(source, "k_proj"), _weight(source, "v_proj")


def _head_norms(attention: ContextAttention, source: nn.Module, states: Tensor | None) -> list[str]:
    """Copy q_norm and k_norm, or set them so that query-key products keep the target's scale."""
    width = attention.head_dim
    scale = float(getattr(source, "scaling", width**-0.5)) * width**0.5  # the drafter divides by sqrt(Dh)
    query, key = (norm_weight(getattr(source, name, None), width) for name in ("q_norm", "k_norm"))
    said = []
    if query is None or key is None:
        weights = _query_key_value(attention, source)[:2]
        if states is None or any(w is None or w.shape[1] != states.shape[1] for w in weights):
            return ["head norms stay at one"]
        query, key = (_typical_rms(states, weight, width) for weight in weights if weight is not None)
        said = ["head norms from the size of its queries and keys"]
    attention.q_norm.weight.copy_(query * scale)
    attention.k_norm.weight.copy_(key)
    return said


def _typical_rms(states: Tensor, projection: Tensor, head_dim: int) -> Tensor:
    """Return the median root mean square of the heads of projected ``states`` [n, D]."""
    heads = (states @ projection.t()).view(-1, head_dim)
    return heads.square().mean(-1).sqrt().median()


def _copy_mlp(layer: DrafterLayer, source: nn.Module, residual: float) -> list[str]:
    fused = _weight(source, "gate_up_proj")
    gate, up = fused.chunk(2) if fused is not None else (_weight(source, "gate_proj"), _weight(source, "up_proj"))
    mlp = layer.mlp
    pairs = _fitting((mlp.gate_proj, mlp.up_proj, mlp.down_proj), (gate, up, _weight(source, "down_proj")))
    if not pairs:
        return ["MLP stays random (other shape)"]
    for (linear, weight), factor in zip(pairs, (1.0, 1.0, residual), strict=True):
        linear.weight.copy_(weight * factor)
    return ["MLP"]


def _copy_final_norm(drafter: BlockDrafter, parent: nn.Module) -> str:
    weight = norm_weight(getattr(parent, "norm", None), drafter.target.hidden_size)
    if weight is None:
        return "norm stays at one: the target's final norm has another form"
    drafter.norm.weight.copy_(weight)
    return "norm from the target's final norm"


def passed_tap(drafter: BlockDrafter) -> int:
    """Return the place among the captured layers of the one that ``fc`` passes on.

    It serves the layers behind ``layers.0``: it is what the first of them reads in the target, or else the last.
    """
    ids = drafter.conventions.target_layer_ids
    wanted = _read_by_copies(drafter)
    return ids.index(wanted) if wanted in ids else len(ids) - 1


def _read_by_copies(drafter: BlockDrafter) -> int:
    """Return the target's layer whose output the copies behind ``layers.0`` start from."""
    return drafter.target.num_layers - len(drafter.layers)


def _pass_tap_on(drafter: BlockDrafter) -> str:
    """Let ``fc`` hand one captured layer on; the other layers start at zero and are learned."""
    width, place = drafter.fc.out_features, passed_tap(drafter)
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, place * width : (place + 1) * width] = torch.eye(width)
    passed, wanted = drafter.conventions.target_layer_ids[place], _read_by_copies(drafter)
    if len(drafter.layers) == 1:
        return f"fc passes layer {passed} on"
    if passed == wanted:
        return f"fc passes layer {passed} on, for the layers behind layers.0"
    return (
        f"fc passes layer {passed} on (better for the layers behind layers.0: {wanted}, "
        "which is not among target.target_layer_ids)"
    )


def _weight(module: nn.Module, name: str) -> Tensor | None:
    """Return the weight of a linear child in fp32 on the CPU, None when there is no such floating-point matrix."""
    weight = getattr(getattr(module, name, None), "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        return None
    return weight.detach().float().cpu()


def _fitting(linears: tuple[nn.Linear, ...], weights: tuple[Tensor | None, ...]) -> list[tuple[nn.Linear, Tensor]]:
    """Pair the linears with their weights; an empty list when one is missing or has another shape."""
    pairs = [(a, b) for a, b in zip(linears, weights, strict=True) if b is not None and b.shape == a.weight.shape]
    return pairs if len(pairs) == len(linears) else []


def _has_bias(source: nn.Module) -> bool:
    linears = (getattr(source, f"{name}_proj", None) for name in ("q", "k", "v", "o", "qkv"))
    return any(getattr(linear, "bias", None) is not None for linear in linears)


def _uninterleave(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head from pairs (2i, 2i+1) to pairs (i, i + Dh/2)."""
    heads = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)
