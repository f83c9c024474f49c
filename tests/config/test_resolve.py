"""From OmegaConf to dataclasses: every mistake at once, each with the key to change."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from deepspec.config.compose import compose, compose_run
from deepspec.config.convert import Problems, build, describe, near, type_hints
from deepspec.config.resolve import load_config, resolve, resolve_command, save_config, to_plain
from deepspec.config.schema import EvaluateCommand, ExportCommand, RunConfig
from deepspec.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    rate: float = 1.0
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    flag: bool = False
    stage: Literal[0, 1] = 0
    ids: Literal["auto"] | tuple[int, ...] = "auto"
    pair: tuple[float, float] = (0.0, 1.0)
    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


@cache
def base(*groups: str) -> DictConfig:
    return compose(["recipe=quickstart", *groups])


def problems_of(*overrides: str, check_files: bool = False) -> list[str]:
    """Return the mistakes of the quickstart with overrides; composing is slow, so single keys are set afterwards."""
    groups = [o for o in overrides if o.partition("=")[0] in ("target", "data", "engine", "optim")]
    cfg = copy.deepcopy(base(*groups))
    OmegaConf.set_struct(cfg, False)
    for key, _, value in (o.partition("=") for o in overrides if o not in groups):
        OmegaConf.update(cfg, key, yaml.safe_load(value), force_add=True)
    with pytest.raises(ConfigError) as caught:
        resolve(cfg, check_files=check_files)
    return caught.value.problems


def test_values_become_the_declared_types() -> None:
    found = Problems()
    values = {"count": 2, "ids": [1, 2], "pair": [1, 0.5], "inner": {"rate": 3}, "options": {"x": 1}}
    made = build(Outer, values, "", found)
    assert found.found == []
    assert made == Outer(count=2, ids=(1, 2), pair=(1.0, 0.5), inner=Inner(rate=3.0), options={"x": 1})
    assert isinstance(made.pair[0], float) and isinstance(made.inner.rate, float)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("count", "3", "count='3': must be a whole number"),
        ("count", True, "count=true: must be a whole number"),
        ("count", 1.5, "count=1.5: must be a whole number"),
        ("flag", 1, "flag=1: must be true or false"),
        ("stage", True, "stage=true: must be 0 | 1"),
        ("stage", 2, "stage=2: must be 0 | 1"),
        ("ids", "autp", "ids=autp: must be auto or a list of whole numbers; did you mean auto?"),
        ("ids", [1, "x"], "must be auto or a list of whole numbers"),
        ("pair", [1], "pair=[1]: must be a list of 2 numbers"),
        ("name", 7, "name=7: must be text or null"),
        ("options", [1], "options=[1]: must be a group of keys"),
        ("inner", 3, "inner: must be a group of keys, not 3"),
    ],
)
def test_wrong_types_are_named(key: str, value: object, says: str) -> None:
    found = Problems()
    build(Outer, {"count": 1, key: value}, "", found)
    assert len(found.found) == 1
    assert says in found.found[0]


def test_a_missing_value_is_named_with_its_meaning() -> None:
    found = Problems()
    build(Outer, {}, "outer", found)
    assert found.found == ["outer.count: must be given, for example outer.count=..."]


def test_every_mistake_is_reported_at_once() -> None:
    found = problems_of(
        "engine.micro_batchsize=4", "engine.micro_batch_size=8", "engine.global_batch_size=12", "engine.zero_stage=7",
        "optim.lr=fast", "lr=1", "drafter.gama=3", "tracker.mode=onlin", "target.target_layer_ids=[9,1]",
        "train.surprise=1", "train.keep=0",
    )  # fmt: skip
    text = "\n".join(found)
    for expected in (
        "engine.micro_batchsize: no such key; did you mean engine.micro_batch_size?",
        "engine.zero_stage=7: must be 0 | 1 | 2 | 3",
        "optim.lr=fast: must be a number",
        "lr: no such key; did you mean optim.lr?",
        "drafter.gama: no such key; did you mean drafter.gamma?",
        "tracker.mode=onlin: must be online | offline | disabled; did you mean online?",
        "target.target_layer_ids=[9, 1]: must be ascending",
        "train.surprise: no such key",
        "train.keep=0: must be at least 1",
        "engine.global_batch_size=12: must be a multiple of engine.micro_batch_size=8 x 1 rank = 8",
    ):
        assert expected in text
    assert len(found) == 10


def test_batch_arithmetic_counts_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    (problem,) = problems_of("engine.micro_batch_size=8", "engine.global_batch_size=16")
    assert "engine.global_batch_size=16: must be a multiple of engine.micro_batch_size=8 x 3 ranks = 24" in problem


def test_packed_rows_fit_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    batch = ("engine.micro_batch_size=8", "engine.global_batch_size=16")
    (problem,) = problems_of(*batch, "data.row_tokens=1024", "seed=-1")
    assert "seed=-1" in problem


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["engine.zero_stage=2"], "needs engine=deepspeed"),
        (
            ["engine=deepspeed", "engine.micro_batch_size=8", "engine.global_batch_size=16", "optim=muon"],
            "engine=plain only",
        ),
        (["engine=deepspeed", "engine.zero_stage=1", "optim=adamw8bit"], "engine.zero_stage=1 splits them"),
        (["engine.loss_precision=common_mode"], "is for low precision"),
        (["data.row_tokens=511"], "must hold the longest sample, data.max_length=512"),
        (["data.anchor_share=0"], "data.anchor_share=0.0: must be above 0 and at most 1"),
        (["target.target_layer_ids=[-2,3]"], "-1 is the embedding output"),
        (["target.target_layer_ids=[]"], "at least one layer"),
        (["target.target_layer_ids=[1,1]"], "ascending, each layer once"),
        (["optim.betas=[0.9,1.0]"], "both must lie in [0, 1)"),
        (["optim.warmup_ratio=4"], "must lie between 0 and 1"),
        (["generate.max_repeats=0"], "generate.max_repeats=0: must be at least 2"),
        (["generate.max_repeats=1"], "generate.max_repeats=1: must be at least 2"),
        (["optim.eps=0"], "optim.eps=0.0: must be above 0"),
        (["optim.lr=.nan"], "optim.lr=nan: must not be negative"),
        (["data.path=x.jsonl"], "is read by data=jsonl only"),
        (["drafter.sliding_window=0"], "sliding_window"),
        (["drafter.gamma=0"], "gamma"),
        (["drafter._target_=nowhere.Config"], "cannot be imported"),
        (["drafter._target_=json.dumps"], "must be a frozen dataclass"),
        (["data=jsonl"], "data.path: must be given"),
        (["target=path", "target.path=Qwen/Qwen3-4B"], "target.mask_token_id: must be given"),
        (["seed=${oc.env:NOT_SET_ANYWHERE}"], "NOT_SET_ANYWHERE"),
    ],
)
def test_rules_name_the_key(overrides: list[str], says: str) -> None:
    found = problems_of(*overrides)
    assert len(found) == 1, found
    assert says in found[0]


def numbers() -> list[str]:
    """Return every key of the schema that takes one number."""
    groups: dict[str, Any] = {name: hint for name, hint in type_hints(RunConfig).items() if is_dataclass(hint)}
    found = {f"{group}.{key}": hint for group, cls in groups.items() for key, hint in type_hints(cls).items()}
    found |= {key: hint for key, hint in type_hints(RunConfig).items() if key not in groups}
    return [
        key for key, hint in found.items() if {hint, *get_args(hint)} & {int, float} and get_origin(hint) is not tuple
    ]


def test_every_number_has_a_lower_bound() -> None:
    keys = numbers()
    assert len(keys) > 40
    found = problems_of(*(f"{key}=-2" for key in keys))
    assert [key for key in keys if not any(p.startswith(f"{key}=-2") for p in found)] == []


def test_precisions_are_free_on_a_cpu() -> None:
    for precision in ("fp32", "bf16", "fp16"):
        assert compose_run(["recipe=quickstart", f"engine.precision={precision}"], check_files=False)


@pytest.fixture
def local_target(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 6, "vocab_size": 97}))
    (tmp_path / "train.jsonl").write_text("{}\n")
    return tmp_path


def local(folder: Path, *more: str) -> list[str]:
    data = ["data=jsonl", f"data.path={folder / 'train.jsonl'}"]
    return ["target=path", f"target.path={folder}", "target.mask_token_id=96", *data, *more]


def test_a_local_target_is_checked_before_it_is_loaded(local_target: Path) -> None:
    assert compose_run(["recipe=flash", *local(local_target, "target.target_layer_ids=[-1,4]")])
    found = problems_of(
        *local(local_target, "target.target_layer_ids=[1,5,9]", "target.mask_token_id=97"), check_files=True
    )
    assert found[0] == "target.mask_token_id=97: must be below the target's vocabulary size 97"
    assert "5 is the last of the target's 6 layers" in found[1]
    assert "9 is not one of -1 .. 4 (6 layers)" in found[2]


def test_missing_files_are_named(tmp_path: Path) -> None:
    found = problems_of(
        "data=jsonl", "data.path=none.jsonl", "data.test=gone.jsonl", "target=path", "target.mask_token_id=1",
        f"target.path={tmp_path / 'gone'}", check_files=True,
    )  # fmt: skip
    assert found == [
        "data.train=none.jsonl: no such file",
        "data.test=gone.jsonl: no such file",
        f"target.path={tmp_path / 'gone'}: no such folder",
    ]


def test_the_target_alone_needs_no_data(tmp_path: Path) -> None:
    compose_run(["recipe=flash", "data.path=none.jsonl", "mode=target"])


def test_a_run_folder_keeps_its_config(tmp_path: Path) -> None:
    run = compose_run(
        ["recipe=flash", "target=smollm2", "data=quickstart", "target.target_layer_ids=[1,8]"], check_files=False
    )
    save_config(run, tmp_path / "config.yaml")
    assert load_config(tmp_path) == run
    plain = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert plain["drafter"]["_target_"] == "deepspec.drafters.dspark.config.DSparkConfig"
    assert to_plain(run) == plain


def test_evaluate_lays_its_keys_over_the_runs_own(tmp_path: Path) -> None:
    run = compose_run(["recipe=quickstart"], check_files=False)
    package = tmp_path / "package-bf16"
    package.mkdir()
    save_config(run, tmp_path / "config.yaml")
    made = resolve_command(compose([f"run={tmp_path}", "++evaluate.limit=3"], "evaluate"), EvaluateCommand)
    assert (made.config.evaluate.limit, made.config.drafter, made.package) == (3, run.drafter, None)
    of_package = resolve_command(compose([f"run={package}"], "evaluate"), EvaluateCommand)
    assert (of_package.run, of_package.package) == (str(tmp_path), str(package))
    export = resolve_command(compose([f"run={tmp_path}", "++export.profile=bf16"], "export"), ExportCommand)
    assert export.config.export.profile == "bf16"


def test_evaluate_refuses_what_the_training_fixed(tmp_path: Path) -> None:
    save_config(compose_run(["recipe=quickstart"], check_files=False), tmp_path / "config.yaml")
    overrides = [f"run={tmp_path}", "++drafter.gamma=2", "++evaluate.gama=2", "++ou=x"]
    with pytest.raises(ConfigError) as caught:
        resolve_command(compose(overrides, "evaluate"), EvaluateCommand)
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="is no run folder"):
        resolve_command(compose([f"run={tmp_path / 'other'}"], "evaluate"), EvaluateCommand)


def test_showing_a_config_lets_missing_values_pass() -> None:
    cfg = compose(["recipe=flash"])
    assert resolve(cfg, complete=False, check_files=False).recipe == "flash"
    with pytest.raises(ConfigError, match="data.path: must be given"):
        resolve(cfg, check_files=False)


def test_suggestions() -> None:
    keys = ("optim.lr", "optim.muon_lr", "engine.precision")
    assert near("lr", keys) == "; did you mean optim.lr?"
    assert near("engine.precison", keys) == "; did you mean engine.precision?"
    assert near("colour", keys) == ""
    assert describe(Literal["a", "b"] | None) == "a | b or null"
