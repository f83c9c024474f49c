"""Start a drafter from its target's own last layers.

The drafter's layers get the weights of the target's last ``num_layers`` layers, and ``fc`` passes the last captured
layer on, so that the first drafter is those layers reading a state a few layers too early. Three things differ and are
folded in:

- One ``hidden_norm`` serves the keys and values of every layer, while each target layer has its own input norm. Both
  norms of the drafter take the geometric mean of the copied ones, and each layer's projections take up the difference;
  as a function of the normalised state nothing changes.
- The drafter normalises the heads of queries and keys. For a target that does not, the norm's weight is the typical
  length that the target's heads have, judged from its projections as if the normalised state had equal spread.
- Scales that a family puts elsewhere (attention scale, residual multiplier) move into the weights.

Norms are read by what they do to a vector of alternating signs, which also covers weights stored as w - 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.drafters.dspark.model import DSparkDrafter
    from deepspec.nn.block import ContextAttention, DrafterLayer

INTERLEAVED_ROPE = ("cohere", "cohere2")  # these turn channels (2i, 2i+1) together, the drafter (i, i + Dh/2)


@torch.no_grad()
def initialise_from(drafter: DSparkDrafter, target_model: nn.Module) -> list[str]:
    """Copy what fits from the target's own layers; return a line for each part that was taken or left."""
    stack, parent = decoder_stack(target_model)
    layers = drafter.decoder_layers
    if stack is None or len(stack) < len(layers):
        return ["the target shows no stack of decoder layers that is deep enough: every weight stays random"]
    sources = list(stack)[-len(layers) :]
    shared = _shared_input_norm(drafter, sources)
    interleaved = getattr(getattr(target_model, "config", None), "model_type", "") in INTERLEAVED_ROPE
    lines = []
    for index, (layer, source) in enumerate(zip(layers, sources, strict=True)):
        taken = _copy_layer(layer, source, shared, interleaved=interleaved)
        lines.append(f"layers.{index} from the target's layer {len(stack) - len(layers) + index}: {', '.join(taken)}")
    drafter.hidden_norm.weight.copy_(shared)
    lines.append(_copy_final_norm(drafter, parent))
    lines.append(_pass_last_tap_on(drafter))
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


def _shared_input_norm(drafter: DSparkDrafter, sources: list[nn.Module]) -> Tensor:
    """Return the geometric mean [D] of the input norms, kept away from zero so that it can be divided by."""
    width = drafter.target.hidden_size
    weights = [norm_weight(getattr(source, "input_layernorm", None), width) for source in sources]
    known = torch.stack([torch.ones(width) if w is None else w.abs() for w in weights])
    floor = 1e-2 * known.mean().clamp(min=1e-6)
    return known.clamp(min=floor).log().mean(0).exp()


def _copy_layer(layer: DrafterLayer, source: nn.Module, shared: Tensor, *, interleaved: bool) -> list[str]:
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
    said += _copy_attention(layer.self_attn, source.get_submodule("self_attn"), ratio, shared, residual, interleaved)
    said += _copy_mlp(layer, source.get_submodule("mlp"), residual)
    if before_mlp is not None:
        said.append("the norms after attention and MLP have no place")
    return said


def _copy_attention(
    attention: ContextAttention, source: nn.Module, ratio: Tensor, shared: Tensor, residual: float, interleaved: bool
) -> list[str]:
    """Copy the projections and choose the weights of the head norms."""
    heads, groups = (linear.weight.shape[0] for linear in (attention.q_proj, attention.k_proj))
    fused = _weight(source, "qkv_proj")
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    if fused is not None and fused.shape[0] == heads + 2 * groups:
        query, key, value = fused.split((heads, groups, groups))
    else:
        query, key, value = (_weight(source, f"{name}_proj") for name in "qkv")
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    pairs = _fitting(linears, (query, key, value, _weight(source, "o_proj")))
    if not pairs:
        return ["attention stays random (other shape)"]
    factors = (ratio, ratio, ratio, torch.tensor(residual))
    for (linear, weight), factor in zip(pairs, factors, strict=True):
        turned = interleaved and linear in (attention.q_proj, attention.k_proj)
        linear.weight.copy_((_uninterleave(weight, attention.head_dim) if turned else weight) * factor)
    said = ["attention"] + (["its biases dropped"] if _has_bias(source) else [])
    return said + _head_norms(attention, source, shared)


def _head_norms(attention: ContextAttention, source: nn.Module, shared: Tensor) -> list[str]:
    """Copy q_norm and k_norm, or set them so that query-key products keep the target's scale."""
    width = attention.head_dim
    scale = float(getattr(source, "scaling", width**-0.5)) * width**0.5  # the drafter divides by sqrt(Dh)
    query, key = (norm_weight(getattr(source, name, None), width) for name in ("q_norm", "k_norm"))
    said = []
    if query is None or key is None:
        query, key = (_typical_length(linear.weight, shared) for linear in (attention.q_proj, attention.k_proj))
        said = ["head norms from the scale of its projections"]
    attention.q_norm.weight.copy_(query * scale)
    attention.k_norm.weight.copy_(key)
    return said


def _typical_length(projection: Tensor, shared: Tensor) -> Tensor:
    """Return the root mean square of a projected state whose normalised channels have unit variance."""
    return (projection * shared).square().sum(1).mean().sqrt()


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


def _copy_final_norm(drafter: DSparkDrafter, parent: nn.Module) -> str:
    weight = norm_weight(getattr(parent, "norm", None), drafter.target.hidden_size)
    if weight is None:
        return "norm stays at one: the target's final norm has another form"
    drafter.norm.weight.copy_(weight)
    return "norm from the target's final norm"


def _pass_last_tap_on(drafter: DSparkDrafter) -> str:
    """Let ``fc`` hand the last captured layer on; the other layers start at zero and are learned."""
    width = drafter.fc.out_features
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -width:] = torch.eye(width)
    return f"fc passes layer {drafter.conventions.target_layer_ids[-1]} on"


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
