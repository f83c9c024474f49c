"""One folder that vLLM, SGLang and speculators load, and with embeddings the published evaluation code.

Its config says everything where each of them looks: DSpark's keys at top level, again under ``dflash_config``, and the
block of speculators. Anchor-first only. A drafter without a Markov head gets one of zeros, which changes no draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspec.export.layouts.common import (
    LayoutFiles,
    Source,
    backbone,
    finish,
    linears,
    require,
    require_plain_target,
    shared_tensors,
)
from deepspec.export.layouts.heads import NOT_QUANTISED, dspark_tensors, head_keys
from deepspec.export.layouts.speculators import speculators_block
from deepspec.targets.layers import to_speculators, to_vllm

if TYPE_CHECKING:
    from torch import Tensor

NAME = "universal"


def universal(source: Source) -> LayoutFiles:
    """Return the folder of an anchor-first block drafter.

    Raises:
        ConfigError: the drafter or its target has something that the consumers' drafters do not know.
    """
    conventions = source.drafter.conventions
    require(
        conventions.block_layout == "anchor_first",
        NAME,
        f"its DSpark is anchor-first, this drafter is {conventions.block_layout}: use "
        + ("export.layout=zlab_dflash" if conventions.block_layout == "fill_in" else "export.layout=eagle3 or native"),
    )
    require_plain_target(source.target, NAME)
    tensors = {**dspark_tensors(source), **shared_tensors(source)}
    config = {**backbone(source), **dspark_keys(source, tensors), **speculators_block(source, head_keys(tensors))}
    return finish(source, NAME, config, tensors, linears(source.drafter), NOT_QUANTISED)


def dspark_keys(source: Source, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return DSpark's own keys, at top level and once more for those who look into ``dflash_config``."""
    conventions, heads = source.drafter.conventions, head_keys(tensors)
    block = {
        "block_size": conventions.block_size,
        "mask_token_id": conventions.mask_token_id,
        "target_layer_ids": list(conventions.target_layer_ids),
        "sample_from_anchor": True,
    }
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **block,
        **heads,
        "is_causal": False,
        "target_hidden_size": source.target.hidden_size,
        "num_target_layers": source.target.num_layers,
        "num_anchors": 1,  # a training setting that the published evaluation code asks for and does not use
        "draft_vocab_size": source.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(to_vllm(conventions.target_layer_ids)),
        "aux_hidden_state_layer_ids": list(to_speculators(conventions.target_layer_ids)),
        "dflash_config": {**block, **heads, "causal": False, "projector_type": "dspark", "attention_mode": "gqa"},
    }
