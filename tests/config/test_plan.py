"""Costs that can be worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspec.config.compose import compose_run
from deepspec.config.estimate import estimate, report
from deepspec.config.known_targets import target_shape
from deepspec.config.schema import RunConfig
from deepspec.errors import ConfigError

SHAPE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4, "head_dim": 8,
         "num_key_value_heads": 2, "intermediate_size": 64, "tie_word_embeddings": True}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "train.jsonl").write_text("{}\n" * 40)
    return compose_run(
        ["recipe=flash", "target=path", f"target.path={folder}", "target.mask_token_id=96",
         f"data.path={folder / 'train.jsonl'}", "engine.global_batch_size=4", "train.epochs=2",
         "drafter.num_layers=2", "drafter.markov_rank=4", "plan.tokens_per_sample=10", "plan.ranks=2"],
    )  # fmt: skip


def closed_form(layers: int, taps: int, rank: int, d: int = 32, v: int = 97) -> int:
    """Count a DSpark drafter's weights by hand."""
    attention = d * 32 + 2 * d * 16 + 32 * d + 2 * 8  # q, k and v, o, and the two norms of width head_dim
    layer = attention + 3 * d * 64 + 2 * d
    return taps * d * d + d + layers * layer + d + 2 * v * rank + (d + rank + 1)


def test_the_drafters_parameters_are_counted_exactly(run: RunConfig) -> None:
    assert estimate(run).drafter_parameters == closed_form(layers=2, taps=5, rank=4)


def test_zero_stages_shard_what_they_should(run: RunConfig) -> None:
    n = estimate(run).drafter_parameters
    names = ("drafter, weights", "drafter, gradients", "drafter, fp32 masters and Adam moments")
    expected: dict[Any, tuple[int, ...]] = {
        0: (2 * n, 4 * n, 12 * n),
        1: (2 * n, 4 * n, 6 * n),
        2: (2 * n, 2 * n, 6 * n),
        3: (n, 2 * n, 6 * n),
    }
    for stage, sizes in expected.items():
        memory = estimate(replace(run, engine=replace(run.engine, zero_stage=stage))).memory
        assert tuple(memory[name] for name in names) == sizes


def test_steps_follow_from_the_samples(run: RunConfig) -> None:
    assert estimate(run).steps == 40 * 2 // 4
    assert estimate(replace(run, train=replace(run.train, max_steps=3))).steps == 3


def test_hours_fall_with_the_rate(run: RunConfig) -> None:
    fast = replace(run, plan=replace(run.plan, tflops=run.plan.tflops * 10))
    assert estimate(run).hours == pytest.approx(10 * estimate(fast).hours)


def test_the_report_names_its_assumptions(run: RunConfig) -> None:
    text = report(run, estimate(run))
    assert "plan.tflops" in text and "memory of one rank (2 in all)" in text and "together" in text


@pytest.mark.parametrize(
    ("name", "millions"), [("Qwen/Qwen3-4B", 4022), ("Qwen/Qwen3-8B", 8191), ("Qwen/Qwen3-14B", 14768)]
)
def test_known_targets_have_their_published_size(name: str, millions: int) -> None:
    assert target_shape(name).parameters / 1e6 == pytest.approx(millions, rel=1e-3)


def test_an_unknown_target_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give target.path=FOLDER"):
        target_shape("someone/unheard-of")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5}))
    with pytest.raises(ConfigError, match="does not say"):
        target_shape(str(tmp_path))


def test_experts_count_in_full_for_memory_and_in_part_for_time(tmp_path: Path) -> None:
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **moe}))
    shape = target_shape(str(tmp_path))
    assert shape.layer_parameters(8) - shape.layer_parameters(2) == 6 * 3 * 32 * 16
    assert shape.active_parameters == 8 * shape.layer_parameters(2)


def test_packed_rows_and_a_share_of_anchors_count(run: RunConfig) -> None:
    """A row of 64 tokens holds two samples of 32; half of the anchors are half of the drafter's work."""
    run = replace(run, plan=replace(run.plan, tokens_per_sample=32), engine=replace(run.engine, micro_batch_size=1))
    whole = replace(run, data=replace(run.data, max_length=64, anchors_per_sample=512))
    packed = replace(whole, data=replace(whole.data, row_tokens=64))
    shared = replace(packed, data=replace(packed.data, anchor_share=0.5))
    part = "drafter, activations (estimate)"
    rows = [estimate(each).memory[part] for each in (whole, packed, shared)]
    assert rows[1] == pytest.approx(2 * rows[0])
    assert rows[2] == pytest.approx(rows[0])
    assert estimate(shared).hours < estimate(packed).hours == pytest.approx(estimate(whole).hours)
