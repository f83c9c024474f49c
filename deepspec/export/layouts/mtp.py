"""The tensors of an MTP-1 beside its target, under the names that DeepSeek gives its own: one more layer of the target.

A server reads such a layer only where its class for the target declares one, and then builds it like the target's other
layers; a dense layer with grouped attention as here fits none that was verified. So the layout has no consumer in the
tables: it is for who patches a server, and for coming back into DeepSpec. The names of Qwen3-Next are not written: its
norms are stored less one, and its attention is gated.
"""

from __future__ import annotations

from deepspec.export.layouts.common import LayoutFiles, Source, backbone, finish, require, require_plain_target, weights

NAME = "mtp"
ARCHITECTURE = "DeepSpecMTP"
MERGE = "merge.json"
"""What has to be added to the target's own config and index."""
SHARD = "mtp.safetensors"
NAMES = {"layers.0.": "", "norm.": "shared_head.norm."}
"""What our names turn into behind the layer's prefix; others stay."""


def mtp(source: Source) -> LayoutFiles:
    """Return the folder of an MTP-1 of one layer.

    Raises:
        ConfigError: the drafter is no such, has a reduced vocabulary, or is to be quantised.
    """
    conventions, target = source.drafter.conventions, source.target
    own = weights(source)
    require("eh_proj.weight" in own, NAME, f"it holds an MTP-1, not a {type(source.drafter).__name__}")
    require(source.layers == 1, NAME, f"it is one layer, this drafter {source.layers}: set drafter.num_layers=1")
    require(source.drafter.d2t is None, NAME, "its head is the target's whole one: set drafter.draft_vocab_size=null")
    require(conventions.sliding_window is None, NAME, "it sees the whole context: set drafter.sliding_window=null")
    require(
        source.numbers.quantisation == "none" and not source.include_embeddings,
        NAME,
        "it becomes part of the target, whose quantisation and embeddings are its own: set "
        "export.server_quantisation=none and export.include_embeddings=false",
    )
    require_plain_target(target, NAME)
    prefix = layer_prefix(target.num_layers)
    tensors = {theirs(name, prefix): tensor for name, tensor in own.items()}
    config = {
        **backbone(source),
        "architectures": [ARCHITECTURE],
        "model_type": target.model_type,
        "num_nextn_predict_layers": 1,
        "num_target_layers": target.num_layers,
        "target_layer_ids": list(conventions.target_layer_ids),
        "mask_token_id": conventions.mask_token_id,
    }
    made = finish(source, NAME, config, tensors, (), ())
    made.extras[MERGE] = {
        "config": {"num_nextn_predict_layers": 1},
        "rename": {"model.safetensors": SHARD},
        "weight_map": dict.fromkeys(tensors, SHARD),
    }
    return made


def layer_prefix(num_layers: int) -> str:
    """Return what stands in front of the names: the layer behind the target's last."""
    return f"model.layers.{num_layers}."


def theirs(name: str, prefix: str) -> str:
    """Return DeepSeek's name of one of our tensors."""
    ours = next((ours for ours in NAMES if name.startswith(ours)), "")
    return prefix + (NAMES[ours] + name.removeprefix(ours) if ours else name)


def ours(name: str, prefix: str) -> str:
    """Return our name of one of DeepSeek's tensors; a name without the prefix stays."""
    if not name.startswith(prefix):
        return name
    inner = name.removeprefix(prefix)
    if inner.startswith("shared_head.norm."):
        return inner.removeprefix("shared_head.")
    return inner if inner.startswith(("enorm.", "hnorm.", "eh_proj.")) else f"layers.0.{inner}"
