"""A key-value cache that is allocated once, can be cut back by a number, and keeps every position of every layer.

Sliding-window layers of the target get the same full-length storage: a window that has dropped positions could not be
cut back after a rejected draft. The model still masks by its own window, since it builds its masks from positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import Cache, DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer in buffers [B, H, capacity, Dh], of which the first ``length`` are in use."""

    def __init__(self, capacity: int = 256, **_unused: object) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers when the first keys show their shape; ``capacity`` columns."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(*key_states.shape[:2], self.capacity, key_states.shape[-1])
        self.values = value_states.new_empty(*value_states.shape[:2], self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [B, H, t, Dh] and return views of everything so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.capacity:
            self._grow(max(end, self.capacity * 2))
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        return self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]

    def get_seq_length(self) -> int:
        """Return the number of positions in use."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` positions."""
        self.length -= abs(tokens_to_remove)

    def remap(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace both buffers by ``change(buffer)``; the caller sets ``length``."""
        if self.is_initialized:
            self.keys, self.values = change(self.key_buffer), change(self.value_buffer)
            self.capacity = self.key_buffer.shape[2]

    @property
    def key_buffer(self) -> Tensor:
        """All columns of the keys, [B, H, capacity, Dh]."""
        if self.keys is None:
            raise RuntimeError("the cache layer holds nothing yet")
        return self.keys

    @property
    def value_buffer(self) -> Tensor:
        """All columns of the values, [B, H, capacity, Dh]."""
        if self.values is None:
            raise RuntimeError("the cache layer holds nothing yet")
        return self.values

    def _grow(self, capacity: int) -> None:
        def longer(buffer: Tensor) -> Tensor:
            grown = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[-1])
            grown[:, :, : self.length] = buffer[:, :, : self.length]
            return grown

        self.remap(longer)


class TargetCache(Cache):
    """The layers' caches; layers appear as the model reaches them."""

    layers: list[GrowingLayer]  # type: ignore[assignment]

    def __init__(self, max_length: int) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)
        self.max_length = max_length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of one layer."""
        while len(self.layers) <= layer_idx:
            self.layers.append(GrowingLayer(self.max_length))
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    @property
    def length(self) -> int:
        """Positions in use."""
        return max((layer.length for layer in self.layers), default=0)

    def crop_to(self, length: int) -> None:
        """Forget every position from ``length`` on."""
        for layer in self.layers:
            layer.length = min(layer.length, length)
