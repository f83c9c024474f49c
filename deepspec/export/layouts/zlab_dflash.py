"""The folder of a fill-in DFlash as z-lab publishes them, which vLLM and SGLang load.

The anchor's row predicts nothing, so ``block_size`` is one more than the tokens that are drafted.
"""

from __future__ import annotations

from deepspec.export.layouts.common import (
    LayoutFiles,
    Source,
    backbone,
    finish,
    linears,
    require,
    require_plain_target,
    shared_tensors,
    weights,
)
from deepspec.targets.layers import to_project

NAME = "zlab_dflash"


def zlab_dflash(source: Source) -> LayoutFiles:
    """Return the folder of a fill-in DFlash.

    Raises:
        ConfigError: the drafter is not fill-in, or its target has something that the servers' drafters do not know.
    """
    conventions, target = source.drafter.conventions, source.target
    require(
        conventions.block_layout == "fill_in",
        NAME,
        f"its blocks are fill-in, this drafter's are {conventions.block_layout}: use export.layout=universal for "
        "anchor-first, or train with drafter=dflash drafter.block_layout=fill_in",
    )
    require_plain_target(target, NAME)
    taps = list(to_project(conventions.target_layer_ids, "zlab"))
    config = {
        **backbone(source),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": conventions.block_size,
        "mask_token_id": conventions.mask_token_id,
        "is_causal": False,
        "target_hidden_size": target.hidden_size,
        "num_target_layers": target.num_layers,
        "draft_vocab_size": source.draft_vocab_size,
        "dflash_config": {
            "mask_token_id": conventions.mask_token_id,
            "target_layer_ids": taps,
            "block_size": conventions.block_size,
            "causal": False,
        },
    }
    tensors = {**weights(source), **shared_tensors(source)}
    return finish(source, NAME, config, tensors, linears(source.drafter), ("fc$",))
