"""What ``config.json`` of an inference package says, and the rules that it must obey.

The writer and the reader share this one dataclass. Every convention is spelled out, none has a default: a package that
leaves a field out is refused, because a guess would load and then draft nonsense. Where a value can be told in two ways
(block_size and gamma, the rope parameters of package and target) both are written and have to agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal

from deepspec.contracts import BlockLayout, Conventions, TargetInfo
from deepspec.errors import ConfigError, PackageError
from deepspec.inference.profiles import (
    FORMAT_MEANINGS,
    PROFILES,
    SCHEME_MEANINGS,
    Bfloat16,
    Part,
    Profile,
    QuantisedGroup,
    quantisation_problems,
)
from deepspec.inference.strict_json import build, read_json
from deepspec.targets.layers import validate_layer_ids

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "deepspec-package"
VERSION = 2
CONFIG = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CALIBRATION: Final = "calibration.json"
SELFCHECK: Final = "selfcheck.json"
CHECKSUMS = "checksums.json"
CARD = "card.md"
HEADER_KEYS = {CONFIG: "deepspec_config", CALIBRATION: "deepspec_calibration", SELFCHECK: "deepspec_selfcheck"}
"""Keys of the copies of these files in the header of the weights: neither can be changed without the other."""
DRAFT_SIZE = "draft_vocab_size"
"""Key of a drafter's configuration for a reduced vocabulary; null, or no such key, is the target's whole one."""
OFFSETS = "d2t"  # the tensor of a reduced vocabulary

MEANINGS = {
    "target_layer_ids": "k is the output of decoder layer k of the target, counted from 0, before the final norm; "
    "-1 is the output of the embedding",
    "block_layout": "anchor_first: the inputs are the anchor and gamma-1 masks at positions a .. a+gamma-1, slot "
    "j = 0 .. gamma-1 predicts the token at a+1+j. fill_in: the inputs are the anchor and gamma masks at a .. a+gamma, "
    "slot j = 1 .. gamma predicts the token at a+j. autoregressive: the row of position t joins the target's features "
    "of t with the token at t+1 and predicts the token at t+2; the first slot of a block is the row of a-1, and each "
    "further row takes the state that came out of the row before and the token just drafted",
    "context": "a block reads the target's features of positions before its anchor; attention inside the block is "
    "bidirectional, or causal where is_causal says so",
    "positions": "every token keeps its own position in the sequence; context keys are turned at their own positions",
    "sliding_window": "null sees the whole context; w: a query at position p sees context positions >= p-(w-1), and of "
    "its block what is_causal lets it see",
    "draft_vocab_size": "tokens that can be proposed. Where they are fewer than vocab_size, tensor d2t (int64) holds "
    "offsets: target id = draft id + d2t[draft id]; markov_w2 has a row for each draft id, and all other token ids are "
    "the target's",
    "embeddings": "embedding and head are the target's own, with its scales and soft-cap. stored_embeddings null: they "
    "are not in the package. Otherwise copies of their rows are, for other software: embed_tokens.weight [vocab_size, "
    "hidden_size]; lm_head.weight of that shape unless tied, where the embedding is the head too; lm_head.bias "
    "[vocab_size] with head_bias",
    "calibration": "null, or a file with one temperature a drafted slot: the chance that a block is kept up to slot j "
    "is the product over i <= j of sigmoid(logit_i / temperature_i), with the confidence head's logits",
    "selfcheck": "null, or a file of prompts with the tokens that the drafter proposes greedily behind each",
    "weights": "the file of the tensors, or the index of the files that they are spread over",
    **FORMAT_MEANINGS,
    "template_options": "variables that the chat template of the target was given, beside the messages, wherever the "
    "drafter was trained",
}


@dataclass(frozen=True)
class StoredEmbeddings:
    """Which copies of the target's embedding and head are in the package."""

    tied: bool  # the embedding is the head too, and is there once
    head_bias: bool


@dataclass(frozen=True)
class PackageConfig:
    """The contents of ``config.json``."""

    format: str
    version: int
    layout: Literal["native"]
    profile: Profile
    dtype: Literal["bfloat16", "float16"]
    block_layout: BlockLayout
    anchor_predicts: bool
    gamma: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    sliding_window: int | None
    is_causal: bool
    rope_parameters: Mapping[str, object]
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    embeddings: Literal["target"]
    stored_embeddings: StoredEmbeddings | None
    weights: Literal["model.safetensors", "model.safetensors.index.json"]
    calibration: Literal["calibration.json"] | None
    selfcheck: Literal["selfcheck.json"] | None
    template_options: Mapping[str, object]
    meanings: Mapping[str, object]
    quantisation: Mapping[Part, QuantisedGroup]
    bfloat16: Bfloat16
    drafter: Mapping[str, object]
    target: TargetInfo

    @property
    def conventions(self) -> Conventions:
        """The block conventions."""
        return Conventions(**{f.name: getattr(self, f.name) for f in fields(Conventions)})

    @property
    def quantised(self) -> tuple[str, ...]:
        """Names of the tensors that are stored as integers with a scale."""
        return tuple(self.groups)

    @property
    def groups(self) -> dict[str, QuantisedGroup]:
        """How each of the quantised tensors is stored."""
        return {name: group for group in self.quantisation.values() for name in group.tensors}

    def dtype_of(self, name: str) -> str:
        """Return the type that a tensor of floats is stored in."""
        return "bfloat16" if name in self.bfloat16.tensors else self.dtype


def make_config(
    *,
    profile: Profile,
    conventions: Conventions,
    target: TargetInfo,
    drafter: Mapping[str, object],
    template_options: Mapping[str, object] | None = None,
    quantisation: Mapping[Part, QuantisedGroup] | None = None,
    bfloat16: Bfloat16 | None = None,
    stored_embeddings: StoredEmbeddings | None = None,
) -> PackageConfig:
    """Build the config of a native package from what the drafter and its target say.

    Of the files beside it, it names one file of weights alone; who writes others names them.
    """
    values: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "layout": "native",
        "profile": profile,
        "dtype": PROFILES[profile].dtype,
        **asdict(conventions),
        "anchor_predicts": conventions.silent_rows == 0,
        "block_size": conventions.block_size,
        "rope_parameters": dict(target.rope_parameters),
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": drafter.get(DRAFT_SIZE) or target.vocab_size,
        "hidden_size": target.hidden_size,
        "embeddings": "target",
        "stored_embeddings": None if stored_embeddings is None else asdict(stored_embeddings),
        "weights": WEIGHTS,
        "calibration": None,
        "selfcheck": None,
        "template_options": dict(template_options or {}),
        "meanings": meanings_of(quantisation or {}),
        "quantisation": {part: asdict(group) for part, group in (quantisation or {}).items()},
        "bfloat16": asdict(bfloat16 or Bfloat16()),
        "drafter": dict(drafter),
        "target": asdict(target),
    }
    return parse_config(json.loads(json.dumps({f.name: values[f.name] for f in fields(PackageConfig)})))


def beside(config: PackageConfig) -> tuple[str, ...]:
    """Return the names of the files beside the weights that ``config`` speaks of."""
    index = config.weights if config.weights == INDEX else None
    return tuple(name for name in (index, config.calibration, config.selfcheck) if name is not None)


def read_config(folder: Path) -> PackageConfig:
    """Read and check ``config.json`` of a package.

    Raises:
        PackageError: Naming the key that is missing, unknown, of a wrong type, or contradicted by another.
    """
    return parse_config(read_json(folder, CONFIG))


def parse_config(values: Mapping[str, Any]) -> PackageConfig:
    """Turn JSON values into a config that obeys every rule."""
    found = (values.get("format"), values.get("version"))
    if found != (FORMAT, VERSION) or isinstance(found[1], bool):
        raise PackageError(
            f"{CONFIG}: format {found[0]!r} version {found[1]!r} cannot be read; "
            f"this program reads {FORMAT!r} version {VERSION}"
        )
    config = build(PackageConfig, values, CONFIG)
    problems = config_problems(config)
    if problems:
        raise PackageError("\n".join(f"{CONFIG}: {problem}" for problem in problems))
    return config


def config_problems(config: PackageConfig) -> list[str]:
    """List every contradiction inside the config."""
    return [*_meaning_problems(config), *_block_problems(config), *_target_problems(config), *_dtype_problems(config)]


def meanings_of(quantisation: Mapping[Part, QuantisedGroup]) -> dict[str, str]:
    """Return what a package with such number formats says of its keys."""
    used = {group.scheme for group in quantisation.values()}
    return MEANINGS | {scheme: text for scheme, text in SCHEME_MEANINGS.items() if scheme in used}


def _meaning_problems(config: PackageConfig) -> list[str]:
    meant = meanings_of(config.quantisation)
    return [
        f"meanings.{key} is {config.meanings.get(key)!r}, this program reads {meant.get(key)!r}"
        for key in sorted({*config.meanings, *meant})
        if config.meanings.get(key) != meant.get(key)
    ]


def _block_problems(config: PackageConfig) -> list[str]:
    problems = []
    first, size = config.conventions.silent_rows == 0, config.conventions.block_size
    if config.gamma < 1:
        problems.append(f"gamma={config.gamma} must be at least 1")
    if config.anchor_predicts != first:
        problems.append(f"anchor_predicts={config.anchor_predicts} contradicts block_layout={config.block_layout!r}")
    if config.block_size != size:
        problems.append(
            f"block_size={config.block_size} must be {size} for gamma={config.gamma}, {config.block_layout}"
        )
    if config.is_causal != (config.block_layout == "autoregressive"):
        problems.append(f"is_causal={config.is_causal} contradicts block_layout={config.block_layout!r}")
    if config.sliding_window is not None and config.sliding_window < 2:
        problems.append(f"sliding_window={config.sliding_window} must be null or at least 2")
    if not 0 <= config.mask_token_id < config.vocab_size:
        problems.append(f"mask_token_id={config.mask_token_id} must be in 0 .. {config.vocab_size - 1}")
    try:
        validate_layer_ids(config.target_layer_ids, config.target.num_layers)
    except ConfigError as error:
        problems += error.problems
    return problems


def _target_problems(config: PackageConfig) -> list[str]:
    drafted = config.drafter.get(DRAFT_SIZE) or config.vocab_size
    problems = []
    if config.draft_vocab_size != drafted:
        problems.append(
            f"draft_vocab_size={config.draft_vocab_size} contradicts the drafter section, which has {drafted}"
        )
    return problems + [
        f"{name}={getattr(config, name)!r} contradicts target.{name}={getattr(config.target, name)!r}"
        for name in ("vocab_size", "hidden_size", "max_position_embeddings", "rope_parameters")
        if getattr(config, name) != getattr(config.target, name)
    ]


def _dtype_problems(config: PackageConfig) -> list[str]:
    dtype = PROFILES[config.profile].dtype
    problems = quantisation_problems(config.quantisation, config.profile)
    if config.dtype != dtype:
        problems.append(f"dtype={config.dtype!r} contradicts profile={config.profile!r}, which stores {dtype}")
    if config.bfloat16 and dtype == "bfloat16":
        problems.append(f"bfloat16={config.bfloat16} contradicts profile={config.profile!r}, which is bf16 throughout")
    return problems + [
        f"bfloat16.tensors names {name}, which is stored as integers"
        for name in config.bfloat16.tensors
        if name in config.groups
    ]
