"""The rules that tie several keys together, each with the numbers and the key to change.

A rule is a function of the run that yields problems. When a key it reads was missing or wrong, that is already reported
and the rule is skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspec.errors import ConfigError
from deepspec.targets.layers import validate_layer_ids

if TYPE_CHECKING:
    from deepspec.config.schema import RunConfig

Rule = Callable[["RunConfig"], Iterator[str]]


def rule_problems(run: RunConfig, *, partial: bool = False, training: bool = True) -> list[str]:
    """Return what is wrong between keys. ``training=False`` leaves out what only the training loop needs."""
    return _collect(run, _RULES + _TRAINING_RULES if training else _RULES, partial)


def file_problems(run: RunConfig, *, partial: bool = False) -> list[str]:
    """Return what is wrong with the local files that the config names."""
    return _collect(run, _FILE_RULES, partial)


def _collect(run: RunConfig, rules: tuple[Rule, ...], partial: bool) -> list[str]:
    found: list[str] = []
    for rule in rules:
        try:
            found += list(rule(run))
        except AttributeError:
            if not partial:
                raise
    return found


def _positive(run: RunConfig) -> Iterator[str]:
    for path in _AT_LEAST_ONE:
        value = _read(run, path)
        if value is not None and not value >= 1:
            yield f"{path}={value}: must be at least 1"
    for path in _AT_LEAST_ZERO:
        value = _read(run, path)
        if value is not None and not value >= 0:
            yield f"{path}={value}: must not be negative"
    for path in _ABOVE_ZERO:
        value = _read(run, path)
        if value is not None and not value > 0:
            yield f"{path}={value}: must be above 0"
    for path in _SHARES:
        value = _read(run, path)
        if value is not None and not 0 <= value <= 1:
            yield f"{path}={value}: must lie between 0 and 1"


_AT_LEAST_ONE = (
    "data.max_length", "data.row_tokens", "data.anchors_per_sample", "data.limit", "generate.max_new_tokens",
    "generate.batch_size", "engine.micro_batch_size", "engine.global_batch_size", "engine.threads",
    "engine.initial_loss_scale",
    "train.epochs", "train.max_steps", "train.log_every", "train.validate_every", "train.save_every", "train.keep",
    "train.max_bad_steps", "evaluate.limit", "evaluate.max_new_tokens", "evaluate.gamma", "evaluate.threads",
    "evaluate.bootstrap", "evaluate.timing_new_tokens", "export.verify_samples", "plan.ranks", "plan.samples",
    "plan.tokens_per_sample",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "seed", "data.seed", "show", "target.mask_token_id", "generate.temperature", "generate.seed", "optim.lr",
    "optim.muon_lr", "features.memory_gib", "optim.weight_decay", "optim.clip_norm", "evaluate.temperature",
    "evaluate.timing_prompts", "evaluate.seed", "export.verify_prompts", "export.calibration_prompts",
    "export.max_length_change", "plan.tflops",
)  # fmt: skip
_ABOVE_ZERO = ("optim.eps",)  # a parameter without a gradient would be stepped by 0 / 0
_SHARES = ("optim.warmup_ratio", "optim.min_lr_ratio", "optim.decay_ratio", "evaluate.confidence_threshold")


def _read(run: RunConfig, path: str) -> Any:
    """Return the value of a dotted key; None when it was refused, which is reported elsewhere."""
    section, _, leaf = path.rpartition(".")
    return getattr(getattr(run, section, None) if section else run, leaf, None)


def _repeats(run: RunConfig) -> Iterator[str]:
    value = run.generate.max_repeats
    if value is not None and value < 2:  # noqa: PLR2004 - once is no repetition
        yield f"generate.max_repeats={value}: must be at least 2, or null; every answer says its words once"


def _layer_ids(run: RunConfig) -> Iterator[str]:
    ids = run.target.target_layer_ids
    if ids == "auto":
        return
    where = f"target.target_layer_ids={list(ids)}"
    if not ids:
        yield f"{where}: must name at least one layer, or auto"
    if list(ids) != sorted(set(ids)):
        yield f"{where}: must be ascending, each layer once"
    if any(i < -1 for i in ids):
        yield f"{where}: layers count from 0; -1 is the embedding output, and nothing lies below it"


def _betas(run: RunConfig) -> Iterator[str]:
    if not all(0 <= b < 1 for b in run.optim.betas):
        yield f"optim.betas={list(run.optim.betas)}: both must lie in [0, 1)"


def _drafter(run: RunConfig) -> Iterator[str]:
    for problem in run.drafter.problems():
        yield problem if problem.startswith("drafter.") else f"drafter.{problem}"


def _shorthand(run: RunConfig) -> Iterator[str]:
    if run.data.path is not None and run.data.path != run.data.train:
        yield f"data.path={run.data.path}: is read by data=jsonl only; add data=jsonl, or set data.train"


def _batch(run: RunConfig) -> Iterator[str]:
    """Accumulation is derived, so the three numbers have to fit; packed rows are as many as they are."""
    micro, total, ranks = run.engine.micro_batch_size, run.engine.global_batch_size, world_size()
    if run.data.row_tokens is None and min(micro, total) >= 1 and total % (micro * ranks):
        yield (
            f"engine.global_batch_size={total}: must be a multiple of engine.micro_batch_size={micro} x {ranks} "
            f"rank{'s' if ranks > 1 else ''} = {micro * ranks}; change either, or the number of ranks"
        )


def _packing(run: RunConfig) -> Iterator[str]:
    data = run.data
    if data.row_tokens is not None and 1 <= data.row_tokens < data.max_length:
        yield f"data.row_tokens={data.row_tokens}: must hold the longest sample, data.max_length={data.max_length}"
    if data.anchor_share is not None and not 0 < data.anchor_share <= 1:
        yield f"data.anchor_share={data.anchor_share}: must be above 0 and at most 1, or null"


def _engine(run: RunConfig) -> Iterator[str]:
    engine = run.engine
    if engine.kind == "plain" and engine.zero_stage > 0:
        yield f"engine.zero_stage={engine.zero_stage}: needs engine=deepspeed; the plain engine shards nothing"
    if engine.kind == "deepspeed" and run.optim.name == "muon":
        yield "optim.name=muon: runs on engine=plain only; use optim=adamw with engine=deepspeed"
    if engine.kind == "deepspeed" and engine.zero_stage > 0 and run.optim.name == "adamw8bit":
        # ZeRO flattens parameters and cuts the result at the ranks: a block of 256 numbers would span parameters, norms
        # would lose their fp32 moments, and no rank could hand a parameter's moments to a checkpoint.
        yield (
            f"optim.name=adamw8bit: needs whole parameters, and engine.zero_stage={engine.zero_stage} splits them; use "
            "engine.zero_stage=0 or engine=plain, or optim=adamw, whose moments ZeRO divides among the ranks"
        )
    if engine.loss_precision == "common_mode" and engine.precision == "fp32":
        yield "engine.loss_precision=common_mode: is for low precision; use exact or auto with engine.precision=fp32"


def _layout(run: RunConfig) -> Iterator[str]:
    export = run.export
    for name in [n for n in export.consumer if n not in _CONSUMERS]:
        yield f"export.consumer={name}: must be {', '.join(_CONSUMERS)}"
    if export.fold_temperature is not None and not export.fold_temperature > 0:
        yield f"export.fold_temperature={export.fold_temperature}: must be above 0, or null"
    for leaf, default in _SERVERS_ONLY.items():
        if export.layout == "native" and getattr(export, leaf) != default:
            yield f"export.{leaf}={getattr(export, leaf)}: is for layouts of servers; set export.layout=universal"


_CONSUMERS = ("vllm", "sglang", "speculators", "published_eval")
_SERVERS_ONLY = {"consumer": (), "server_quantisation": "none", "fold_temperature": None, "sps_table": None}


_RULES: tuple[Rule, ...] = (_positive, _repeats, _layer_ids, _betas, _drafter, _shorthand, _layout)
_TRAINING_RULES: tuple[Rule, ...] = (_batch, _packing, _engine)


def _data_files(run: RunConfig) -> Iterator[str]:
    for name in ("train", "validation", "test"):
        value = getattr(run.data, name)
        if run.mode == "target" or value is None or Path(value).is_file():
            continue
        hint = ""
        if run.data.name == "quickstart" and not Path(value).parent.is_dir():
            hint = "; the quickstart data comes with a clone of the repository, not with the wheel"
        yield f"data.{name}={value}: no such file{hint}"


def _target_folder(run: RunConfig) -> Iterator[str]:
    path, looks_local = Path(run.target.path), run.target.path.startswith(("/", ".", "~"))
    if run.target.gguf_package is None and looks_local and not path.expanduser().is_dir():
        yield f"target.path={run.target.path}: no such folder"


def _local_target(run: RunConfig) -> Iterator[str]:
    """Check ids against the config.json of a target that is already on this machine."""
    config = local_target_config(run.target.path)
    layers, vocab = config.get("num_hidden_layers"), config.get("vocab_size")
    mask = getattr(run.target, "mask_token_id", None)
    ids: Any = getattr(run.target, "target_layer_ids", "auto")
    if isinstance(vocab, int) and mask is not None and mask >= vocab:
        yield f"target.mask_token_id={mask}: must be below the target's vocabulary size {vocab}"
    if isinstance(layers, int) and ids != "auto" and not list(_layer_ids(run)):
        try:
            validate_layer_ids(ids, layers)
        except ConfigError as error:
            yield from error.problems


_FILE_RULES: tuple[Rule, ...] = (_data_files, _target_folder, _local_target)


def local_target_config(path: str) -> dict[str, Any]:
    """Return the text model's part of a local ``config.json``; empty when there is none."""
    try:
        config = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def world_size() -> int:
    """Return the number of ranks as the launcher set it, 1 without a launcher."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() and int(text) > 0 else 1
