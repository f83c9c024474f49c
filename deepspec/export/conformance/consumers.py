"""The four consumers, as data: what each builds, reads, leaves out, and does with names that it does not know.

How the facts were verified: vLLM 0.33 and SGLang 0.5.23 by running their own loaders on a CPU, speculators 0.9.0 and
the published evaluation code by loading. Whether a given folder was ever served is another matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from deepspec.export.conformance import keys, parameters, rules
from deepspec.export.conformance.folder import Finding, Folder
from deepspec.export.conformance.keys import Key
from deepspec.export.conformance.parameters import Parameter
from deepspec.export.conformance.quantised import NAMELESS

Rule = Callable[[Folder], Iterator[Finding]]


@dataclass(frozen=True)
class Algorithm:
    """What a consumer does for one drafting algorithm."""

    builds: tuple[Parameter, ...]
    keys: tuple[Key, ...]
    rules: tuple[Rule, ...]
    may_hold: tuple[str, ...] = ()  # read, shared or skipped on purpose; the folder may leave them out


@dataclass(frozen=True)
class Consumer:
    """Someone who loads a folder."""

    name: str
    title: str
    algorithms: Mapping[str, Algorithm]
    unknown: str  # what it does with a tensor whose name it does not know
    missing: str  # what it does about one that is not there
    name_of: Callable[[str, Folder], str]  # what it calls a module when it asks whether that is quantised
    quantises: Callable[[str], bool]  # whether it can hold a parameter quantised at all


def _vllm_name(module: str, folder: Folder) -> str:
    """Put ``model.`` in front; layers are counted behind the target's."""
    parts = module.split(".")
    if parts[0] == "layers":
        parts[1] = str(int(parts[1]) + (folder.target.num_layers if folder.target else 0))
    return ".".join(["model", *parts])


def _sglang_name(module: str, folder: Folder) -> str:  # noqa: ARG001 - one signature for all
    return NAMELESS.get(module.rpartition(".")[2], module)


def _plain_name(module: str, folder: Folder) -> str:  # noqa: ARG001 - one signature for all
    return module


def _in_layers(name: str) -> bool:
    return name.startswith(("layers.", "midlayer."))


def _layers_and_fusion(name: str) -> bool:
    return _in_layers(name) or name in ("fc.weight", "markov_head.markov_w2.weight")


_EVERYWHERE: tuple[Rule, ...] = (
    rules.no_auto_map, rules.mask_token, rules.rope, rules.sliding, rules.served_target, rules.served_dtype,
    rules.schemes,
)  # fmt: skip
_BLOCKS: tuple[Rule, ...] = (*_EVERYWHERE, rules.nested_agrees)
_VLLM_TAPS = rules.taps(
    (
        "eagle_aux_hidden_state_layer_ids", "dflash_config.target_layer_ids", "dspark_target_layer_ids",
        "target_layer_ids", "aux_hidden_state_layer_ids",
    )
)  # fmt: skip
_SGLANG_TAPS = rules.taps(("dflash_config.target_layer_ids", "target_layer_ids", "dspark_target_layer_ids"))
_HEADS = (parameters.REDUCED_HEAD, parameters.OFFSETS)
_OWN = ("embed_tokens.weight", "lm_head.weight")

VLLM = Consumer(
    name="vllm",
    title="vLLM",
    algorithms={
        "dspark": Algorithm(
            (*parameters.DSPARK, *_HEADS),
            keys.DSPARK,
            (*_BLOCKS, _VLLM_TAPS, rules.vanilla_only, rules.fused(_vllm_name)),
            (*_OWN, "t2d"),
        ),
        "dflash": Algorithm(
            (*parameters.DFLASH, *_HEADS),
            keys.DFLASH,
            (*_BLOCKS, _VLLM_TAPS, rules.fused(_vllm_name)),
            (*_OWN, "t2d"),
        ),
        "eagle3": Algorithm(
            (*parameters.EAGLE3, *_HEADS),
            keys.EAGLE3,
            (*_EVERYWHERE, rules.taps(("eagle_aux_hidden_state_layer_ids",)), rules.number_of_taps),
            (*_OWN, "t2d"),
        ),
    },
    unknown="it stops with an error",
    missing="the server does not look, and starts with whatever is in memory there",
    name_of=_vllm_name,
    quantises=_layers_and_fusion,
)
SGLANG = Consumer(
    name="sglang",
    title="SGLang",
    algorithms={
        "dspark": Algorithm(
            parameters.DSPARK,
            keys.DSPARK,
            (
                *_BLOCKS, _SGLANG_TAPS, rules.no_embedding_tap, rules.some_rank, rules.whole_vocabulary,
                rules.confidence_for_ragged, rules.class_targets, rules.fused(_sglang_name),
            ),
            _OWN,
        ),
        "dflash": Algorithm(
            parameters.DFLASH,
            keys.DFLASH,
            (
                *_BLOCKS, _SGLANG_TAPS, rules.no_embedding_tap, rules.whole_vocabulary, rules.class_targets,
                rules.fused(_sglang_name),
            ),
            _OWN,
        ),
        "eagle3": Algorithm(
            (*parameters.EAGLE3, parameters.HEAD, parameters.OFFSETS),
            keys.EAGLE3,
            (
                *_EVERYWHERE, rules.taps(("eagle_config.eagle_aux_hidden_state_layer_ids",)), rules.no_embedding_tap,
                rules.number_of_taps, rules.class_targets,
            ),
            ("embed_tokens.weight", "t2d"),
        ),
    },
    unknown="it is skipped in silence",
    missing="the server does not look, and starts with whatever is in memory there",
    name_of=_sglang_name,
    quantises=_in_layers,
)  # fmt: skip
_LIBRARY: tuple[Rule, ...] = (
    *_EVERYWHERE, rules.taps(("aux_hidden_state_layer_ids",)), rules.speculators_proposal, rules.section_agrees,
    rules.quantised_untried,
)  # fmt: skip
_LIBRARY_HEADS = (*_HEADS, parameters.MEMBERS)
SPECULATORS = Consumer(
    name="speculators",
    title="speculators",
    algorithms={
        "dspark": Algorithm(
            (*parameters.DSPARK, *_LIBRARY_HEADS), (*keys.SPECULATORS, *keys.DSPARK_HEADS), _LIBRARY, _OWN
        ),
        "dflash": Algorithm((*parameters.DFLASH, *_LIBRARY_HEADS), keys.SPECULATORS, _LIBRARY, _OWN),
    },
    unknown="it is dropped with a warning",
    missing="it is filled with random numbers, with a warning",
    name_of=_plain_name,
    quantises=_in_layers,
)
PUBLISHED = Consumer(
    name="published_eval",
    title="the published evaluation code",
    algorithms={
        "dspark": Algorithm(
            (*parameters.DSPARK, parameters.EMBEDDING, parameters.HEAD),
            keys.PUBLISHED,
            (
                rules.no_auto_map, rules.mask_token, rules.rope, rules.sliding, rules.served_target,
                rules.taps(("target_layer_ids",)), rules.whole_vocabulary, rules.not_quantised,
            ),
        )
    },
    unknown="it is dropped with a warning",
    missing="it is filled with random numbers, with a warning",
    name_of=_plain_name,
    quantises=lambda name: False,  # noqa: ARG005 - one signature for all
)  # fmt: skip
CONSUMERS: Mapping[str, Consumer] = {c.name: c for c in (VLLM, SGLANG, SPECULATORS, PUBLISHED)}
