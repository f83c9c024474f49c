"""A folder as a consumer sees it: its config, and the kinds of its tensors, whatever is in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from deepspec.errors import ConfigError
from deepspec.targets.layers import read_taps

if TYPE_CHECKING:
    from deepspec.contracts import TargetInfo
    from deepspec.drafters.files import TensorKind

ALGORITHMS = {
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DFlashDraftModel": "dflash",
    "LlamaForCausalLMEagle3": "eagle3",
}
"""Algorithm of each architecture that a consumer here may meet."""
LAYERS = "transformer_layer_config"


class Finding(NamedTuple):
    """Something about a folder that its consumer refuses, gets wrong in silence, or may get wrong."""

    refused: bool
    text: str


def refused(text: str) -> Finding:
    """Return a finding that keeps the folder from being served."""
    return Finding(True, text)


def warned(text: str) -> Finding:
    """Return a finding that the reader has to know."""
    return Finding(False, text)


@dataclass(frozen=True)
class Folder:
    """What lies on disk; ``target`` and ``served_dtype`` are those of the model that it is meant for, where known."""

    config: Mapping[str, Any]
    kinds: Mapping[str, TensorKind]
    target: TargetInfo | None = None
    served_dtype: str | None = None
    files: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_speculators(self) -> bool:
        """Whether the decoder layers' keys have a section of their own, which is how that format is recognised."""
        return "model_type" not in self.config and "speculators_config" in self.config

    @cached_property
    def keys(self) -> Mapping[str, Any]:
        """The config as one level: in the format of speculators the layers' keys below the algorithm's."""
        layers = self.config.get(LAYERS)
        if not self.is_speculators or not isinstance(layers, Mapping):
            return self.config
        return {**layers, **self.config}

    @property
    def algorithm(self) -> str:
        """``dspark``, ``dflash`` or ``eagle3``; empty where the config names none of them."""
        if self.is_speculators:
            return str(self.config.get("speculators_model_type", ""))
        names = self.config.get("architectures")
        name = names[0] if isinstance(names, list) and len(names) == 1 else None
        return ALGORITHMS.get(name, "") if isinstance(name, str) else ""

    @cached_property
    def taps(self) -> Mapping[str, tuple[int, ...]]:
        """Every list of tapped layers, in our numbers, by its key; empty where one cannot be read."""
        try:
            return read_taps(self.config)
        except ConfigError:
            return {}

    def get(self, path: str) -> Any:
        """Return the value of a dotted key, None when it is missing."""
        value: Any = self.keys
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def number(self, path: str, default: int = 0) -> int:
        """Return a whole number, ``default`` when there is none."""
        value = self.get(path)
        return value if type(value) is int else default

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that can be proposed."""
        return self.number("draft_vocab_size", self.number("vocab_size"))

    @property
    def is_reduced(self) -> bool:
        """Whether not every token of the target can be proposed."""
        return 0 < self.draft_vocab_size < self.number("vocab_size")
