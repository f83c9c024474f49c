"""The folder of a Llama-shaped Eagle3, which vLLM and SGLang load.

Both read which layers are tapped from a key of the same name: vLLM at top level, where i is the input of layer i, and
SGLang inside ``eagle_config``, where k is the output of layer k. Both are written. The head is always in the folder,
because SGLang builds one of the draft vocabulary's size.
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
from deepspec.targets.layers import to_sglang, to_vllm

NAME = "eagle3"
OURS, THEIRS = "layers.0.", "midlayer."


def eagle3(source: Source) -> LayoutFiles:
    """Return the folder of an Eagle3 of one layer without norms of heads.

    Raises:
        ConfigError: the drafter has another shape, or its target something that the servers' drafters do not know.
    """
    conventions, target = source.drafter.conventions, source.target
    state = source.drafter.state_dict()
    require(
        conventions.block_layout == "autoregressive" and "fc.weight" in state,
        NAME,
        f"it holds an Eagle3, not a {type(source.drafter).__name__}",
    )
    require(
        f"{OURS}self_attn.q_norm.weight" not in state,
        NAME,
        "SGLang drops the norms of queries and keys in silence, and the Llama shape has none: train with "
        "drafter.qk_norm=false, or use export.layout=native",
    )
    require(source.layers == 1, NAME, f"it has one layer, this drafter {source.layers}: set drafter.num_layers=1")
    require(
        conventions.sliding_window is None,
        NAME,
        f"the servers' Eagle3 sees the whole context, drafter.sliding_window={conventions.sliding_window} does not",
    )
    require_plain_target(target, NAME)
    tensors = {name.replace(OURS, THEIRS, 1): tensor for name, tensor in weights(source).items()}
    tensors |= shared_tensors(source, head_always=True)
    quantised = {name.replace(OURS, THEIRS, 1) for name in linears(source.drafter)}
    config = {**backbone(source), **eagle3_keys(source)}
    return finish(source, NAME, config, tensors, quantised, ("fc$",))


def eagle3_keys(source: Source) -> dict[str, object]:
    """Return Eagle3's own keys."""
    conventions = source.drafter.conventions
    taps = conventions.target_layer_ids
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "mlp_bias": False,
        "draft_vocab_size": source.draft_vocab_size,
        "target_hidden_size": source.target.hidden_size,
        "num_aux_hidden_states": len(taps),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "mask_token_id": conventions.mask_token_id,
        "num_speculative_tokens": conventions.gamma,
        "eagle_aux_hidden_state_layer_ids": list(to_vllm(taps)),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(to_sglang(taps)),
            "use_aux_hidden_state": True,
        },
    }
