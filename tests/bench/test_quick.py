"""The benchmarks run, and both sides of a pair do the same work; nothing is asked of their timings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspec.data.loader import BatchMaker
from deepspec.engine.loop import normalised_loss
from deepspec.inference.open_target import open_target
from tests.bench import accuracy, attention, loss, packages, packing, step
from tests.bench.published import PublishedStep
from tests.commands.tiny_run import write_conversations, write_target
from tests.unit.export.tiny import make_package


def test_the_loss_of_both_shapes_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    found = loss.main(["--quick", "--device=cpu"])
    sizes = {rows: figure for rows, figure in found["exact fp32"].items() if figure.measured}
    assert sizes
    for rows, ours in sizes.items():
        assert ours.loss == pytest.approx(found["published fp32"][rows].loss, rel=1e-4)
        assert found["exact bf16"][rows].loss == pytest.approx(found["published bf16"][rows].loss, rel=2e-2)
        assert found["common_mode bf16"][rows].loss == pytest.approx(found["exact bf16"][rows].loss, rel=2e-2)
    out = capsys.readouterr().out
    assert "machine: " in out and "commit:  " in out and "tests.bench.loss --quick" in out


def test_a_loss_is_measured_in_a_process_of_its_own_and_may_not_fit() -> None:
    small = loss.parse(["--vocab=256", "--width=16", "--rank=4", "--device=cpu", "--threads=1"])
    found = loss.measure_apart(small, "published fp32", 4)
    assert found is not None and found.seconds and found.measured
    far = loss.parse(["--vocab=256", "--width=16", "--rank=1000000000000", "--device=cpu", "--threads=1"])
    assert loss.measure_apart(far, "exact fp32", 4) is None


def test_kinds_take_turns_and_pairs_are_of_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine gets slower by the run: medians of each side would compare other moments."""
    ran: list[str] = []

    def run(_arguments: object, name: str, _rows: int) -> loss.Figure:
        ran.append(name)
        return loss.Figure([float(2 ** len(ran))], 10.0 * len(ran), 1.0)

    monkeypatch.setattr(loss, "measure_apart", run)
    arguments = loss.parse(["--rows=4", "--repeats=3", "--budget=1000", "--device=cpu"])
    names = ["published fp32", "exact fp32"]
    found = loss.figures(arguments, names, 4, {name: {} for name in names})
    assert ran == names * 3
    assert (found["exact fp32"].seconds, found["exact fp32"].peak) == ([4.0, 16.0, 64.0], 60.0)
    assert loss.times_as_fast(found["exact fp32"], found["published fp32"]) == 0.5
    guess = loss.Figure([100.0], 1.0, measured=False)
    assert loss.times_as_fast(found["exact fp32"], guess) == 100.0 / 16.0


def test_what_is_not_measured_lies_on_the_line_through_the_two_largest_sizes() -> None:
    known = {rows: loss.Figure([2.0 + rows], 100.0 * rows) for rows in (1, 64, 128)}
    line = loss.Line.of(known | {256: loss.Figure([99.0], 1.0, measured=False)})
    assert line is not None
    guess = line.at(512, known)
    assert (guess.seconds, guess.peak, guess.measured) == ([514.0], 51200.0, False)
    assert loss.Line.of({64: known[64]}) is None
    few = loss.Line.of({rows: known[rows] for rows in (1, 64)})
    assert few is not None and "MB" not in str(few)  # the Markov matrix takes the memory there, not the logits


def test_accuracy_is_told_by_precision_and_way() -> None:
    found = accuracy.report(quick=True)
    assert found["fp32", "exact"][0] < 1e-4
    least = found["bf16", "float64, rounded to bf16"][0]
    assert max(found["bf16", "exact"][0], found["bf16", "common_mode"][0]) < 0.05
    assert all(values[0] >= 0.99 * least for (precision, _), values in found.items() if precision == "bf16")


def test_published_and_our_step_have_the_same_loss(capsys: pytest.CaptureFixture[str]) -> None:
    made = step.run(step.tiny(1), budget=60)
    published, ours = made["published fp32"].losses, made["ours fp32"].losses
    assert len(published) == 2
    torch.testing.assert_close(torch.tensor(ours[:1]), torch.tensor(published[:1]), rtol=1e-5, atol=0.0)
    low = torch.tensor([made["published bf16"].losses[0], made["ours bf16"].losses[0]])
    torch.testing.assert_close(low, torch.full_like(low, published[0]), rtol=2e-2, atol=0.0)
    assert capsys.readouterr().out.count("\n| ") == 1 + len(made)


def test_published_and_our_step_have_the_same_gradient() -> None:
    bench = step.tiny(1)
    (batch,) = bench.steps[0]
    features, gradients = bench.online("fp32")(batch), []
    for shape in ("published", "ours"):
        model = bench.build("fp32")
        if shape == "published":
            loss = PublishedStep(model, bench.online("fp32")).loss(batch, features)
        else:
            loss = normalised_loss(model(batch, features).sums, model.coefficients, model.denominators(batch))
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, one in gradients[0].items():
        assert one is not None and bool(one.any()), name
        torch.testing.assert_close(gradients[1][name], one, rtol=1e-4, atol=1e-6)


def test_every_back_end_of_attention_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    attention.main(["--quick", "--device=cpu"])
    out = capsys.readouterr().out
    assert all(f"| {name} |" in out for name in attention.BACKENDS)


def test_packing_is_timed_against_padding(capsys: pytest.CaptureFixture[str]) -> None:
    samples = packing.conversations(20, 256, 97)
    padded, packed = packing.both_sides(BatchMaker(samples, seed=0, anchors_per_sample=4), 256, torch.device("cpu"))
    seen = [sorted(name for batch in side for name in batch.sample_ids) for side in (padded, packed)]
    assert seen[0] == seen[1] == sorted(sample.id for sample in samples)
    assert all(batch.input_ids.numel() <= 256 for batch in (*padded, *packed))
    packing.main(["--quick"])
    out = capsys.readouterr().out
    assert "commit:  " in out and "tests.bench.packing --quick" in out
    assert out.count("\n| ") == 2


def test_packages_are_timed_on_the_same_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_target(tmp_path / "target")
    target = open_target(folder, torch.device("cpu"), "fp32")
    made = [make_package(tmp_path / profile, profile, target) for profile in ("bf16", "fp16_int8")]
    asked = write_conversations(tmp_path / "test.jsonl", 3)
    words = [str(folder), *map(str, made), "--prompts=2", "--tokens=12", f"--data={asked}"]
    found = packages.main(words)
    assert {name: len(blocks) for name, blocks in found.items()} == {"bf16": 2, "fp16_int8": 2}
    assert capsys.readouterr().out.count("\n| ") == 1 + 3
