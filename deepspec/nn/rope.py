"""Rotary positions exactly as the target turns them.

The frequencies come from transformers' own table of scaling rules, so that ``linear``, ``llama3``, ``yarn`` and the
rest need no second definition. No table of positions is kept: any position can be asked for, however short the training
samples were. Rules that look at the sequence length (``dynamic``, ``longrope``) keep the frequencies of the target's
usual length, because keys that are already cached could not follow a change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deepspec.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class RotaryEmbedding:
    """Cosines and sines by position. Holds no parameter and no buffer: a cast of the drafter must not round it."""

    def __init__(self, rope_parameters: Mapping[str, object], *, head_dim: int, max_position: int) -> None:
        parameters = dict(rope_parameters)
        parameters["rope_type"] = parameters.get("rope_type", parameters.pop("type", "default"))
        self.inverse_frequencies, self.scaling = _frequencies(parameters, head_dim, max_position)  # [Dr/2]

    def __call__(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Map ``positions`` [..., n] to (cos, sin), each [..., n, Dr], Dr the rotated width of a head."""
        if self.inverse_frequencies.device != positions.device:
            self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions[..., None].float() * self.inverse_frequencies  # [..., n, Dr/2]
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads ``x`` [..., n, Dh] by ``cos``, ``sin`` [..., n, Dr]; channels beyond Dr stay as they are."""
    width = cos.shape[-1]
    turned = x if width == x.shape[-1] else x[..., :width]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def _frequencies(parameters: dict[str, object], head_dim: int, max_position: int) -> tuple[Tensor, float]:
    rope_type = str(parameters["rope_type"])
    if rope_type == "default":
        dim = int(head_dim * float(str(parameters.get("partial_rotary_factor", 1.0))))
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / float(str(parameters["rope_theta"])) ** exponents, 1.0
    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise TargetError(
            f"rope_type {rope_type!r} of the target is not one of default, {', '.join(ROPE_INIT_FUNCTIONS)}: "
            "choose another target"
        )
    config = Qwen3Config(
        hidden_size=head_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rope_parameters=parameters,
    )
    with torch.device("cpu"):  # also where the drafter's shapes alone are built, on the meta device
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return frequencies.float(), float(scaling)
