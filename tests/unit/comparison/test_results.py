"""Pooling over seeds, pairing with the baseline, and what is more than chance."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from deepspec.comparison.report import save, tables, terminal_text, verdict
from deepspec.comparison.results import Comparison, Gain, RunResult, compare, gather, read_result, seed_deviation
from deepspec.comparison.work import Failure
from deepspec.evaluation.acceptance import Position
from deepspec.evaluation.statistics import Interval
from tests.unit.comparison.study import planned, study, write_evaluation, write_training

PROMPTS = 12


def result(run: str, seed: int, gain: float = 0.0, *, wobble: float = 0.0) -> RunResult:
    """Return a run of ten rounds a prompt whose accepted length is 1.5 on average, plus ``gain``."""
    counts = {f"p{i}": (10 * (1.5 + gain) + (wobble if i % 2 else -wobble), 10.0) for i in range(PROMPTS)}
    return RunResult(
        run=run,
        seed=seed,
        counts=counts,
        domains={name: "chat" if i < 6 else "code" for i, name in enumerate(counts)},
        positions=[Position(1, 10, 5), Position(2, 5, seed)],
        training_seconds=60.0 * (seed + 1),
        parameters=1000,
        draft_ms=[4.0 + seed, 6.0 + seed],
        speed_ratios=[1.1],
    )


def compared(**results: list[RunResult]) -> Comparison:
    return compare("s", "base", {name: 3 for name in results}, results, resamples=200)


def test_seeds_are_pooled() -> None:
    found = compared(base=[result("base-seed0", 0), result("base-seed1", 1, 0.1)]).variants[0]
    assert list(found.accepted) == ["chat", "code", "all"]
    assert found.accepted["all"].value == pytest.approx(1.55)
    assert found.by_seed == {0: pytest.approx(1.5), 1: pytest.approx(1.6)}
    assert found.spread == pytest.approx(0.1 / math.sqrt(2))
    assert [(p.judged, p.accepted) for p in found.positions] == [(20, 10), (10, 1)]
    assert found.uncensored == pytest.approx(1 + 0.5 + 0.5 * 0.1)
    assert found.training_minutes == 1.5
    assert found.draft_ms.value == pytest.approx(5.5)
    assert found.gain is None


def test_the_difference_is_paired_by_prompt() -> None:
    """Prompts differ by more than the variants do; the difference is the same on each."""
    found = compared(base=[result("b", 0, wobble=4.0)], other=[result("o", 0, 0.1, wobble=4.0)]).variants[1]
    assert found.accepted["all"].high - found.accepted["all"].low > 0.2
    assert found.gain is not None
    d = found.gain.difference
    assert (d.value, d.low, d.high) == pytest.approx((0.1, 0.1, 0.1))
    assert found.gain.seed_error is None


def test_the_error_of_the_seeds() -> None:
    assert seed_deviation([[1.0], [2.0]]) is None
    assert seed_deviation([[1.0, 2.0, 3.0], [5.0], [4.0, 6.0]]) == pytest.approx(math.sqrt((2 + 2) / 3))
    base = [result(f"b{k}", k, 0.02 * k) for k in range(3)]  # standard deviation 0.02
    gain = compared(base=base, other=[result("o", 0, 0.1)]).variants[1].gain
    assert gain is not None
    assert gain.seed_error == pytest.approx(0.02 * math.sqrt(1 + 1 / 3))
    assert gain.difference.value == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("interval", "error", "said"),
    [
        ((0.1, -0.01, 0.2), 0.01, "no"),
        ((0.1, 0.01, 0.2), 0.01, "yes"),
        ((-0.1, -0.2, -0.01), 0.01, "yes"),
        ((0.1, 0.01, 0.2), 0.06, "no, seeds"),
        ((0.1, 0.01, 0.2), None, "yes, but for seeds"),
    ],
)
def test_more_than_chance(interval: tuple[float, float, float], error: float | None, said: str) -> None:
    assert verdict(Gain(Interval(*interval), error)) == said


def test_runs_on_other_prompts_are_left_out() -> None:
    other = result("o", 0)
    other = replace(other, counts={**other.counts, "extra": (1.0, 1.0)}, domains={**other.domains, "extra": "chat"})
    found = compared(base=[result("b", 0)], other=[other])
    assert [v.name for v in found.variants] == ["base"]
    assert "o was evaluated on other prompts" in found.notes[0]


def test_without_the_baseline_there_is_no_difference() -> None:
    found = compared(base=[], other=[result("o", 0)])
    assert [(v.name, v.gain) for v in found.variants] == [("other", None)]
    assert compared(base=[]).variants == []


def test_a_run_is_read(tmp_path: Path) -> None:
    run = planned(tmp_path)
    assert read_result(run) is None
    write_training(run, seconds=150.0)
    write_evaluation(run)
    found = read_result(run)
    assert found is not None
    assert found.counts == {"p0": (12.0, 6.0), "p1": (9.0, 6.0), "p2": (8.0, 4.0)}
    assert found.accepted_length == 29 / 16
    assert (found.parameters, found.training_seconds) == (16, 150.0), "whole numbers are not trained"
    assert found.speed_ratios == [1.2, 1.4, 1.3]


def test_tables_and_files(tmp_path: Path) -> None:
    command = study(a=(0, 1), b=(0,), c=(0, 1))
    runs = [planned(tmp_path, v, s) for v, config in command.study.variants.items() for s in config.seeds]
    for run in runs[:3]:
        write_training(run)
        write_evaluation(run, tokens=(12, 9, 8 + run.seed))
    write_training(runs[3])
    found = gather(command.study, runs, [Failure("c-seed1", "train", "no | memory <b>")])
    assert found.missing == {"c-seed0": "not evaluated yet", "c-seed1": "train failed: no | memory <b>"}
    lengths, positions, costs = tables(found)
    assert lengths.head[:5] == ["variant", "runs", "all", "chat", "code"]
    assert lengths.rows[0][:2] == ["a", "2/2"] and lengths.rows[1][:2] == ["b", "1/1"]
    assert lengths.rows[0][-2:] == ["-", "-"]
    assert lengths.rows[1][-2].startswith("-0.03 [")
    assert positions.rows[0] == ["a", "0.50", "0.20", "1.60"]
    assert costs.rows[0][1:3] == ["0.00", "2.0"]
    paths = save(tmp_path, found, runs)
    assert [p.name for p in paths] == ["comparison.json", "comparison.md"]
    assert not list(tmp_path.glob("*.tmp*"))
    record = json.loads(paths[0].read_text())
    assert (record["format"], record["version"]) == ("deepspec-comparison", 1)
    assert record["comparison"]["variants"][1]["more_than_chance"] == verdict(found.variants[1].gain)  # type: ignore[arg-type]
    assert record["runs"]["b-seed0"][2] == "deepspec.train"
    text = paths[1].read_text()
    assert "| b | 1/1 |" in text and "no \\| memory \\<b\\>" in text
    assert "c-seed1: train failed: no | memory <b>" in terminal_text(found)


def test_before_anything_is_finished_there_is_a_list_and_no_table(tmp_path: Path) -> None:
    command = study(a=(0,))
    runs = [planned(tmp_path)]
    found = gather(command.study, runs, [])
    assert tables(found) == []
    assert terminal_text(found).strip() == "a-seed0: not trained yet"
    assert json.loads(save(tmp_path, found, runs)[0].read_text())["comparison"]["variants"] == []


def test_another_course_is_noted(tmp_path: Path) -> None:
    command = study(a=(0,), b=(0,))
    runs = [planned(tmp_path, "a"), planned(tmp_path, "b")]
    runs[1].config["data"]["limit"] = 9
    runs[1].config["data"]["test"] = "elsewhere.jsonl"
    notes = gather(command.study, runs, []).notes
    assert notes == ["b does not see the baseline's samples step by step: data.limit=9 (baseline 4)"]


def test_the_table_says_what_the_runs_were_made_by(tmp_path: Path) -> None:
    """Not what this call runs on: the runs may be those of a call on another commit."""
    command, runs = study(a=[0, 1]), [planned(tmp_path, "a", seed) for seed in (0, 1)]
    for run, commit in zip(runs, ("abc", "def"), strict=True):
        write_training(run)
        write_evaluation(run, commit=commit)
    found = gather(command.study, runs, [])
    assert found.made_by == {"machine": "one", "commit": "abc and def"}
    assert "commit differs among the runs: abc and def" in found.notes
    save(tmp_path, found, runs)
    assert json.loads((tmp_path / "comparison.json").read_text())["facts"]["commit"] == "abc and def"
