"""Layer ids: which layers are tapped, and how other projects count them.

Here ``k`` is the output of decoder layer k counted from 0, before the final norm, and -1 the embedding's output.

| project | what it writes for k | example k = 1 |
|---|---|---|
| transformers, the list ``hidden_states`` | k + 1 (entry 0 is the embedding) | 2 |
| vLLM, ``eagle_aux_hidden_state_layer_ids`` | k + 1 | 2 |
| speculators, ``aux_hidden_state_layer_ids`` | k + 1 | 2 |
| SGLang, ``target_layer_ids`` | k (it captures before layer k + 1) | 1 |
| published DSpark and Eagle3 checkpoints, SpecForge, ``target_layer_ids`` | k | 1 |
| z-lab's DFlash checkpoints, ``dflash_config.target_layer_ids`` | k | 1 |

``TAP_KEYS`` says which key of a config is counted in whose way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepspec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

KEY = "target.target_layer_ids"
AUTO_COUNT = 5

OFFSETS = {"transformers": 1, "vllm": 1, "speculators": 1, "sglang": 0, "published": 0, "zlab": 0}
"""What each project adds to our ids."""

NO_EMBEDDING = frozenset({"sglang", "zlab"})
"""Projects that cannot name the embedding's output."""

TAP_KEYS = {
    "eagle_aux_hidden_state_layer_ids": "vllm",
    "dflash_config.target_layer_ids": "zlab",
    "dspark_target_layer_ids": "sglang",
    "target_layer_ids": "published",
    "aux_hidden_state_layer_ids": "speculators",
    "eagle_config.eagle_aux_hidden_state_layer_ids": "sglang",
}
"""Whose way of counting each key of a config follows. A dot leads into a section. Two keys of one name differ."""


def auto_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return five ids evenly spaced over 1 .. N-3, fewer where the target has not as many layers.

    36 layers give 1 9 17 25 33; 40 give 1 10 19 28 37; 30 give 1 8 14 20 27.
    """
    if num_layers < 2:
        raise ConfigError(f"{KEY}=auto: the target has {num_layers} layers, at least 2 are needed")
    first, last = (1, num_layers - 3) if num_layers >= 4 else (0, num_layers - 2)
    step = (last - first) / (AUTO_COUNT - 1)
    return tuple(sorted({round(first + i * step) for i in range(AUTO_COUNT)}))


def validate_layer_ids(ids: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """Return ``ids`` as a tuple if they can be tapped and served.

    Raises:
        ConfigError: an id does not exist, is the last layer, or the ids do not rise.
    """
    ids = tuple(ids)
    problems = [f"{KEY}: no layer is given"] if not ids else []
    if list(ids) != sorted(set(ids)):
        problems.append(f"{KEY}={list(ids)}: ids must rise strictly, since serving stacks sort them")
    for layer in ids:
        if layer == num_layers - 1:
            problems.append(
                f"{KEY}: {layer} is the last of the target's {num_layers} layers; serving stacks cannot capture its "
                f"output before the final norm, so use ids up to {num_layers - 2}"
            )
        elif not -1 <= layer < num_layers:
            problems.append(f"{KEY}: {layer} is not one of -1 .. {num_layers - 2} ({num_layers} layers)")
    if problems:
        raise ConfigError(problems)
    return ids


def to_project(ids: Iterable[int], project: str) -> tuple[int, ...]:
    """Return our layer ids as ``project`` (a key of ``OFFSETS``) counts them."""
    ids = tuple(ids)
    if -1 in ids and project in NO_EMBEDDING:
        raise ConfigError(f"{KEY}={list(ids)}: {project} cannot capture the embedding's output (-1)")
    return tuple(layer + OFFSETS[project] for layer in ids)


def from_project(ids: Iterable[int], project: str) -> tuple[int, ...]:
    """Return the layer ids of ``project`` as we count them; the inverse of ``to_project``."""
    return tuple(layer - OFFSETS[project] for layer in ids)


def read_taps(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return every list of tapped layers in another project's config, in our numbers, by its key.

    Raises:
        ConfigError: a list holds something else than whole numbers.
    """
    found = {}
    for key, project in TAP_KEYS.items():
        section, _, name = key.rpartition(".")
        holder = config.get(section) if section else config
        ids = holder.get(name) if isinstance(holder, Mapping) else None
        if ids is None:
            continue
        if not isinstance(ids, list | tuple) or not all(type(layer) is int for layer in ids):
            raise ConfigError(f"{key}={ids!r} must be a list of whole numbers")
        found[key] = from_project(ids, project)
    return found


def to_hf(ids: Iterable[int]) -> tuple[int, ...]:
    """Return indices into the ``hidden_states`` of transformers."""
    return to_project(ids, "transformers")


def to_vllm(ids: Iterable[int]) -> tuple[int, ...]:
    """Return vLLM's ``eagle_aux_hidden_state_layer_ids``."""
    return to_project(ids, "vllm")


def to_sglang(ids: Iterable[int]) -> tuple[int, ...]:
    """Return SGLang's ``target_layer_ids``."""
    return to_project(ids, "sglang")


def to_speculators(ids: Iterable[int]) -> tuple[int, ...]:
    """Return the ``aux_hidden_state_layer_ids`` of speculators."""
    return to_project(ids, "speculators")
