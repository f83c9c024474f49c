"""The parameters that a consumer builds out of a config, as tables: name, shape, and when it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deepspec.export.conformance.folder import Folder


class Parameter(NamedTuple):
    """One parameter. ``{i}`` in the name is a layer; the shape names the sizes of ``sizes_of``."""

    name: str
    shape: tuple[str, ...]
    when: str = ""  # a feature of ``features_of``; empty is always
    kind: Literal["float", "linear", "integer", "flag"] = "float"  # linear: quantised where the config says so


_LAYER = (
    Parameter("layers.{i}.input_layernorm.weight", ("H",)),
    Parameter("layers.{i}.self_attn.q_proj.weight", ("q", "H"), kind="linear"),
    Parameter("layers.{i}.self_attn.k_proj.weight", ("kv", "H"), kind="linear"),
    Parameter("layers.{i}.self_attn.v_proj.weight", ("kv", "H"), kind="linear"),
    Parameter("layers.{i}.self_attn.o_proj.weight", ("H", "q"), kind="linear"),
    Parameter("layers.{i}.self_attn.q_norm.weight", ("hd",)),
    Parameter("layers.{i}.self_attn.k_norm.weight", ("hd",)),
    Parameter("layers.{i}.post_attention_layernorm.weight", ("H",)),
    Parameter("layers.{i}.mlp.gate_proj.weight", ("I", "H"), kind="linear"),
    Parameter("layers.{i}.mlp.up_proj.weight", ("I", "H"), kind="linear"),
    Parameter("layers.{i}.mlp.down_proj.weight", ("H", "I"), kind="linear"),
)
DFLASH = (
    Parameter("fc.weight", ("H", "taps"), kind="linear"),
    Parameter("hidden_norm.weight", ("H",)),
    *_LAYER,
    Parameter("norm.weight", ("H",)),
)
DSPARK = (
    *DFLASH,
    Parameter("markov_head.markov_w1.weight", ("V", "r"), "markov"),
    Parameter("markov_head.markov_w2.weight", ("Vd", "r"), "markov", "linear"),
    Parameter("markov_head.gate_proj.weight", ("r", "H+r"), "gated"),
    Parameter("markov_head.gate_proj.bias", ("r",), "gated"),
    Parameter("markov_head.joint_proj.weight", ("3r", "2r+H"), "rnn"),
    Parameter("markov_head.joint_proj.bias", ("3r",), "rnn"),
    Parameter("confidence_head.proj.weight", ("1", "confidence"), "confidence"),
    Parameter("confidence_head.proj.bias", ("1",), "confidence"),
)
EAGLE3 = (
    Parameter("fc.weight", ("H", "taps"), kind="linear"),
    Parameter("midlayer.input_layernorm.weight", ("H",)),
    Parameter("midlayer.hidden_norm.weight", ("H",)),
    Parameter("midlayer.self_attn.q_proj.weight", ("q", "2H"), kind="linear"),
    Parameter("midlayer.self_attn.k_proj.weight", ("kv", "2H"), kind="linear"),
    Parameter("midlayer.self_attn.v_proj.weight", ("kv", "2H"), kind="linear"),
    Parameter("midlayer.self_attn.o_proj.weight", ("H", "q"), kind="linear"),
    Parameter("midlayer.post_attention_layernorm.weight", ("H",)),
    Parameter("midlayer.mlp.gate_proj.weight", ("I", "H"), kind="linear"),
    Parameter("midlayer.mlp.up_proj.weight", ("I", "H"), kind="linear"),
    Parameter("midlayer.mlp.down_proj.weight", ("H", "I"), kind="linear"),
    Parameter("norm.weight", ("H",)),
)
EMBEDDING = Parameter("embed_tokens.weight", ("V", "H"))
HEAD = Parameter("lm_head.weight", ("Vd", "H"))
REDUCED_HEAD = HEAD._replace(when="reduced")
OFFSETS = Parameter("d2t", ("Vd",), "reduced", "integer")
MEMBERS = Parameter("t2d", ("V",), "reduced", "flag")


def sizes_of(folder: Folder) -> dict[str, int]:
    """Return the sizes that shapes name; one that the config does not tell is 0."""
    hidden, rank = folder.number("hidden_size"), folder.number("markov_rank")
    head_dim = folder.number("head_dim")
    taps = max((len(ids) for ids in folder.taps.values()), default=0)
    return {
        "1": 1,
        "H": hidden,
        "2H": 2 * hidden,
        "taps": taps * folder.number("target_hidden_size", hidden),
        "hd": head_dim,
        "q": folder.number("num_attention_heads") * head_dim,
        "kv": folder.number("num_key_value_heads") * head_dim,
        "I": folder.number("intermediate_size"),
        "V": folder.number("vocab_size"),
        "Vd": folder.draft_vocab_size,
        "r": rank,
        "3r": 3 * rank,
        "H+r": hidden + rank,
        "2r+H": 2 * rank + hidden,
        "confidence": hidden + (rank if folder.get("confidence_head_with_markov") is True else 0),
    }


def features_of(folder: Folder) -> set[str]:
    """Return what the config switches on."""
    features = {"markov"} if folder.number("markov_rank") > 0 else set()
    kind = folder.get("markov_head_type")
    if features and kind in ("gated", "rnn"):
        features.add(str(kind))
    if folder.get("enable_confidence_head") is True:
        features.add("confidence")
    if folder.is_reduced:
        features.add("reduced")
    return features


def instances(parameter: Parameter, sizes: Mapping[str, int], layers: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a parameter in every layer that has it."""
    shape = tuple(sizes[size] for size in parameter.shape)
    many = range(layers) if "{i}" in parameter.name else range(1)
    return {parameter.name.replace("{i}", str(index)): shape for index in many}
