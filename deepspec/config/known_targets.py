"""The shapes of targets that recipes name, so that ``plan`` can tell their cost before anything is downloaded.

A local ``config.json``, or one that the hub's cache already holds, comes first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspec.config.rules import local_target_config
from deepspec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """Widths of a target that its cost depends on; letters as in ``contracts.py``."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    tied: bool
    num_experts: int = 1
    experts_per_token: int = 1
    expert_size: int = 0  # width of one expert's MLP; 0 for a dense model

    @property
    def attention_parameters(self) -> int:
        """Return the weights of q, k, v and o of one layer."""
        return 2 * self.hidden_size * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)

    def layer_parameters(self, experts: int) -> int:
        """Return the weights of one layer with so many of its experts counted."""
        width = self.expert_size or self.intermediate_size
        count = experts if self.expert_size else 1
        return self.attention_parameters + 3 * self.hidden_size * width * count + 2 * self.hidden_size

    @property
    def parameters(self) -> int:
        """Return all weights, embedding and head included."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return tables + self.num_layers * self.layer_parameters(self.num_experts) + self.hidden_size

    @property
    def active_parameters(self) -> int:
        """Return the weights that one token passes through in the decoder stack (no embedding, no head)."""
        return self.num_layers * self.layer_parameters(self.experts_per_token)


_NAMES = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
          "intermediate_size", "tied")  # fmt: skip
_KNOWN: dict[str, tuple[int, ...]] = {
    "qwen3-4b": (151936, 2560, 36, 32, 8, 128, 9728, True),
    "qwen3-8b": (151936, 4096, 36, 32, 8, 128, 12288, False),
    "qwen3-14b": (151936, 5120, 40, 40, 8, 128, 17408, False),
    "smollm2-135m-instruct": (49152, 576, 30, 9, 3, 64, 1536, True),
}


def target_shape(path: str) -> TargetShape:
    """Return the shape of a target from its local or cached config.json, or from the table.

    Raises:
        ConfigError: Nothing on this machine says how large it is.
    """
    config = local_target_config(path) or _cached_config(path)
    if config:
        return _from_config(config, path)
    name = path.rstrip("/").rpartition("/")[2].lower()
    if name in _KNOWN:
        return TargetShape(**dict(zip(_NAMES, _KNOWN[name], strict=True)))  # type: ignore[arg-type]
    raise ConfigError(
        f"target.path={path}: its config.json is not on this machine, so its size is unknown; give target.path=FOLDER "
        "with a config.json in it, or fetch it first with deepspec.prepare mode=target"
    )


def _cached_config(path: str) -> dict[str, Any]:
    """Return the config.json of a hub id that was downloaded before; empty when it was not."""
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        return {}
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json")
    return local_target_config(str(Path(found).parent)) if isinstance(found, str) else {}


def _from_config(config: dict[str, Any], path: str) -> TargetShape:
    try:
        heads = int(config["num_attention_heads"])
        width = int(config["hidden_size"])
        return TargetShape(
            vocab_size=int(config["vocab_size"]),
            hidden_size=width,
            num_layers=int(config["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or width // heads),
            intermediate_size=int(config["intermediate_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            num_experts=int(config.get("num_experts") or config.get("num_local_experts") or 1),
            experts_per_token=int(config.get("num_experts_per_tok") or 1),
            expert_size=int(config.get("moe_intermediate_size") or 0),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"target.path={path}: its config.json does not say {error}: {json.dumps(config)[:80]}"
        ) from error
