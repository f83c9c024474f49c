"""The folder of the speculators library: DSpark and DFlash with the decoder layers' keys in a section of their own.

There is no ``model_type`` at top level; vLLM recognises the format by that. ``auto_map``, which the library's own
folders carry, is not written: it names code to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspec.export.layouts.common import (
    LayoutFiles,
    Source,
    architectures,
    backbone,
    finish,
    linears,
    require,
    require_plain_target,
    shared_tensors,
    weights,
)
from deepspec.export.layouts.heads import NOT_QUANTISED, dspark_tensors, head_keys
from deepspec.targets.layers import to_speculators

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "speculators"
VERSION = "0.9.0"
"""Version of the library whose schema is written."""
CLASSES = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}


def speculators(source: Source) -> LayoutFiles:
    """Return the folder of a block drafter: ``dspark`` for anchor-first ones, ``dflash`` for fill-in.

    Raises:
        ConfigError: the drafter or its target has something that the library's models do not know.
    """
    layout = source.drafter.conventions.block_layout
    require(
        layout in ("anchor_first", "fill_in"),
        NAME,
        f"it is written for block drafters, this one is {layout}: use export.layout=eagle3 for an Eagle3",
    )
    require_plain_target(source.target, NAME)
    anchor_first = layout == "anchor_first"
    own = dspark_tensors(source) if anchor_first else weights(source)
    tensors = {**own, **shared_tensors(source)}
    config = {
        **speculators_block(source, head_keys(tensors) if anchor_first else {}),
        "architectures": [CLASSES[kind_of(source)]],
        "tie_word_embeddings": False,
    }
    return finish(source, NAME, config, tensors, linears(source.drafter), NOT_QUANTISED)


def kind_of(source: Source) -> str:
    """Return the library's name of the algorithm."""
    return "dspark" if source.drafter.conventions.block_layout == "anchor_first" else "dflash"


def speculators_block(source: Source, heads: Mapping[str, Any]) -> dict[str, Any]:
    """Return the library's keys; ``heads`` are those of Markov and confidence head.

    ``sliding_window_non_causal`` is true whether or not there is a window: blocks are bidirectional, and vLLM takes
    false for a causal mask in every layer of a DFlash.
    """
    conventions = source.drafter.conventions
    return {
        **heads,
        "speculators_model_type": kind_of(source),
        "speculators_version": VERSION,
        "block_size": conventions.block_size,
        "draft_vocab_size": source.draft_vocab_size,
        "mask_token_id": conventions.mask_token_id,
        "sample_from_anchor": conventions.silent_rows == 0,
        "sliding_window_non_causal": True,
        "target_hidden_size": source.target.hidden_size,
        "aux_hidden_state_layer_ids": list(to_speculators(conventions.target_layer_ids)),
        "speculators_config": proposal(source, kind_of(source)),
        "transformer_layer_config": {"model_type": "qwen3", **backbone(source)},
    }


def proposal(source: Source, algorithm: str) -> dict[str, Any]:
    """Return who is made faster and how many tokens a block has."""
    method = {"proposal_type": "greedy", "speculative_tokens": source.drafter.conventions.gamma}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{**method, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
        "verifier": {
            "name_or_path": source.verifier or source.target.name,
            "architectures": architectures(source.target.model_type),
        },
    }
