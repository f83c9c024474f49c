"""The keys that each consumer reads, as tables: type, values, and what happens otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from deepspec.export.conformance.folder import Finding, Folder, refused, warned

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

INT, NUMBER, BOOL, TEXT, LIST, SECTION = "whole number", "number", "bool", "text", "list", "object"
_TYPES: dict[str, tuple[type, ...]] = {
    INT: (int,),
    NUMBER: (int, float),
    BOOL: (bool,),
    TEXT: (str,),
    LIST: (list,),
    SECTION: (dict,),
}


class Key(NamedTuple):
    """A key that has to be there; ``advised`` ones only have to be right when they are."""

    path: str
    kind: str
    values: tuple[Any, ...] = ()  # any value of that type when empty
    why: str = ""
    advised: bool = False


BACKBONE = (
    Key("vocab_size", INT),
    Key("hidden_size", INT),
    Key("intermediate_size", INT),
    Key("num_hidden_layers", INT),
    Key("num_attention_heads", INT),
    Key("num_key_value_heads", INT),
    Key("head_dim", INT),
    Key("hidden_act", TEXT, ("silu",)),
    Key("rms_norm_eps", NUMBER),
    Key("max_position_embeddings", INT),
    Key("rope_parameters", SECTION),
    Key("attention_bias", BOOL, (False,), "the drafter has no such biases"),
)
SERVED = (
    Key("rope_theta", NUMBER, why="versions before transformers 5 read it", advised=True),
    Key("dtype", TEXT, ("bfloat16", "float16"), "SGLang takes float16 when it is missing", advised=True),
    Key(
        "is_causal",
        BOOL,
        (False,),
        "vLLM and SGLang make sliding layers causal without it; the drafter was trained bidirectionally",
        advised=True,
    ),
)
DSPARK_HEADS = (
    Key("markov_rank", INT, why="it is read at top level only"),
    Key("enable_confidence_head", BOOL, why="vLLM takes false when it is missing", advised=True),
    Key("confidence_head_with_markov", BOOL, why="vLLM and SGLang assume different values", advised=True),
)
ANCHOR_FIRST = (
    Key("block_size", INT),
    Key("mask_token_id", INT),
    Key("sample_from_anchor", BOOL, (True,), "false means another thing in each consumer", advised=True),
)
DSPARK = (Key("model_type", TEXT, ("qwen3",)), *BACKBONE, *SERVED, *DSPARK_HEADS, *ANCHOR_FIRST)
DFLASH = (
    Key("model_type", TEXT, ("qwen3",)),
    *BACKBONE,
    *SERVED,
    Key("block_size", INT),
    Key("dflash_config", SECTION),
    Key("dflash_config.mask_token_id", INT),
    Key("dflash_config.target_layer_ids", LIST),
    Key("dflash_config.causal", BOOL, (False,), "blocks are bidirectional", advised=True),
)
EAGLE3 = (
    Key("model_type", TEXT, ("llama",)),
    *BACKBONE,
    *SERVED[:2],
    Key("num_hidden_layers", INT, (1,), "one layer is built"),
    Key("draft_vocab_size", INT, why="SGLang reads it directly"),
    Key("num_aux_hidden_states", INT, why="vLLM takes three when it is missing", advised=True),
    Key("norm_before_residual", BOOL, (False,), "the residual is taken before the norm", advised=True),
)
SPECULATORS = (
    Key("speculators_model_type", TEXT, ("dspark", "dflash")),
    Key("transformer_layer_config", SECTION),
    Key("transformer_layer_config.model_type", TEXT, ("qwen3",)),
    *BACKBONE,
    SERVED[1],
    Key("speculators_config", SECTION),
    Key("speculators_config.algorithm", TEXT),
    Key("speculators_config.proposal_methods", LIST),
    Key("speculators_config.verifier", SECTION),
    Key("speculators_config.verifier.name_or_path", TEXT),
    Key("aux_hidden_state_layer_ids", LIST),
    Key("mask_token_id", INT),
    Key("block_size", INT),
    Key("draft_vocab_size", INT),
    Key("sample_from_anchor", BOOL, why="vLLM takes false when it is missing, the library true for a DSpark"),
    Key(
        "sliding_window_non_causal",
        BOOL,
        (True,),
        "vLLM makes every layer of a DFlash causal for false, which is the library's default",
        advised=True,
    ),
)
PUBLISHED = (
    Key("architectures", LIST, (["Qwen3DSparkModel"],)),
    Key("model_type", TEXT, ("qwen3",)),
    *BACKBONE,
    Key("layer_types", LIST),
    Key("num_anchors", INT),
    Key("target_layer_ids", LIST),
    Key("mask_token_id", INT),
    Key("block_size", INT),
    Key("enable_confidence_head", BOOL),
    Key("markov_rank", INT),
)


def key_findings(folder: Folder, keys: Iterable[Key]) -> Iterator[Finding]:
    """Yield what is wrong with the keys of a table."""
    for key in keys:
        value, what = folder.get(key.path), f"{key.path} ({key.why})" if key.why else key.path
        if value is None:
            text = f"config.json lacks {what}"
            yield warned(text) if key.advised else refused(text)
        elif not _has_type(value, key.kind):
            yield refused(f"{key.path}={value!r} must be a {key.kind}")
        elif key.values and value not in key.values:
            choices = " or ".join(repr(choice) for choice in key.values)
            yield refused(f"{key.path}={value!r} must be {choices}{f': {key.why}' if key.why else ''}")
        elif key.kind == INT and key.path != "markov_rank" and value < (0 if key.path == "mask_token_id" else 1):
            yield refused(f"{key.path}={value!r} must be at least 1")


def _has_type(value: object, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == BOOL or not isinstance(value, bool))
