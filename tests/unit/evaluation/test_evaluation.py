"""Acceptance counts, the estimator, the lossless check, speed and reports."""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepspec
from deepspec.config.schema import EvaluateConfig
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.dspark.model import DSparkDrafter
from deepspec.errors import ConfigError
from deepspec.evaluation import run, speed
from deepspec.evaluation.acceptance import (
    Decoded,
    Prompt,
    accepted_length,
    by_domain,
    decode_prompts,
    expected_length,
    per_position,
    summarise,
)
from deepspec.evaluation.estimator import estimate, expected_lengths, round_anchors
from deepspec.evaluation.lossless import compare_greedy
from deepspec.evaluation.replay import replay
from deepspec.evaluation.report import commit_of, markdown, page, terminal_text, write_report
from deepspec.evaluation.run import Answer, Scores, score, spread
from deepspec.evaluation.speed import compare, measure
from deepspec.evaluation.table import notes, side_by_side
from deepspec.inference.decoder import Generation, Round, SpeculativeDecoder
from deepspec.inference.proposers import DrafterProposer, PlainProposer, PromptLookupProposer
from deepspec.inference.sampling import SamplerSettings
from deepspec.targets.target import Target
from tests.helpers import MASK_TOKEN_ID, tiny_model, tiny_target
from tests.unit.inference.toys import ToyDrafter, ToyTarget


def decoded(rounds: list[Round], domain: str = "chat", tokens: list[int] | None = None, name: str = "a") -> Decoded:
    count = 1 + sum(r.committed for r in rounds)
    generation = Generation(tokens or list(range(count)), rounds, 2.0, 1.0, "length")
    return Decoded(Prompt(name, domain, [0]), generation)


def test_a_censored_round_is_not_a_refusal() -> None:
    rounds = [
        Round(3, 3, 4, censored=False),
        Round(3, 1, 2, censored=False),  # slot 2 refused
        Round(3, 1, 1, censored=True),  # the text ended after slot 1: slot 2 was never judged
        Round(1, 1, 2, censored=True),  # no room for more
        Round(0, 0, 1, censored=True),
    ]
    positions = per_position(rounds)
    assert [(p.judged, p.accepted) for p in positions] == [(4, 4), (2, 1), (1, 1)]
    assert expected_length([p.rate for p in positions]) == 1 + 1 + 0.5 + 0.5


def test_both_poolings() -> None:
    long = decoded([Round(2, 2, 3, censored=False)] * 3)
    short = decoded([Round(2, 0, 1, censored=False)], "code", name="b")
    both = summarise([long, short], 100, 0)
    assert both.per_round.value == 10 / 4
    assert both.per_request.value == (3 + 1) / 2
    assert accepted_length([long, short]) == 2.5
    groups = by_domain([long, short], 100, 0)
    assert list(groups) == ["chat", "code", "all"]
    assert (groups["chat"].per_round.value, groups["code"].per_round.value) == (3, 1)


def test_a_prompt_without_rounds_is_left_out() -> None:
    assert summarise([decoded([]), decoded([Round(0, 0, 1, censored=False)])], 10, 0).prompts == 1
    assert math.isnan(summarise([decoded([])], 10, 0).per_round.value)


def _chains(scale: float = 1.0) -> tuple[ToyTarget, ToyDrafter]:
    generator = torch.Generator().manual_seed(0)
    target = scale * torch.randn(6, 6, generator=generator)
    return ToyTarget(target), ToyDrafter(target + 0.7 * torch.randn(6, 6, generator=generator), gamma=3)


def test_the_estimator_is_the_product_of_one_minus_total_variation() -> None:
    target, drafter = _chains()
    p, q = torch.softmax(target.logits, -1), torch.softmax(drafter.logits, -1)
    overlap = torch.minimum(p, q).sum(-1)  # 1 - TV, by the token before
    text = [2, 4, 1, 5]
    lengths = expected_lengths(target, drafter, [0, 3], text, [0, 2])  # type: ignore[arg-type]
    a, b, c = overlap[2].item(), overlap[4].item(), overlap[1].item()
    assert lengths == [pytest.approx(1 + a + a * b + a * b * c)]  # behind the second anchor there is a single token
    shorter = expected_lengths(target, drafter, [0, 3], text, [0, 1, 2], gamma=2)  # type: ignore[arg-type]
    assert shorter == [pytest.approx(1 + a + a * b), pytest.approx(1 + b + b * c)]
    assert drafter.positions == [0.0, 1.0, 2.0]


def test_the_estimate_is_of_the_gamma_asked_for_and_of_whole_blocks() -> None:
    """Many short texts: cut blocks among them would pull the estimate down."""
    target, drafter = _chains()
    p, q = torch.softmax(target.logits, -1), torch.softmax(drafter.logits, -1)
    proposer = DrafterProposer(drafter)  # type: ignore[arg-type]
    prompts = [Prompt(str(i), "chat", [i % 6]) for i in range(20)]
    runs = decode_prompts(SpeculativeDecoder(target, proposer), prompts, 6, SamplerSettings(1.0, 1), [])
    overlap = torch.minimum(p, q).sum(-1)
    expected = []
    for item in runs:
        tokens = item.generation.tokens
        for a in (a for a in round_anchors(item) if a + 2 < len(tokens)):
            first, second = overlap[tokens[a]].item(), overlap[tokens[a + 1]].item()
            expected.append(1 + first + first * second)
    found = estimate(target, drafter, runs, gamma=2)  # type: ignore[arg-type]
    assert found == pytest.approx(sum(expected) / len(expected))


def test_the_estimator_agrees_with_decoding() -> None:
    target, drafter = _chains()
    decoder = SpeculativeDecoder(target, DrafterProposer(drafter))  # type: ignore[arg-type]
    runs = decode_prompts(decoder, [Prompt("a", "chat", [0])], 2000, SamplerSettings(1.0, 1), [])
    assert estimate(target, drafter, runs) == pytest.approx(accepted_length(runs), rel=0.06)  # type: ignore[arg-type]


def test_anchors_of_rounds() -> None:
    assert round_anchors(decoded([Round(2, 2, 3, censored=False), Round(2, 0, 1, censored=False)])) == [0, 3]


def test_ties_are_counted_and_differences_are_found() -> None:
    logits = torch.zeros(4, 4)
    logits[0, 1], logits[0, 2], logits[0, 3] = 1.0, 1.0 + 5e-6, 0.5
    target = ToyTarget(logits)

    def texts(token: int) -> list[Decoded]:
        return [decoded([], tokens=[token], name="x")]

    assert compare_greedy(target, texts(2), texts(2)).equal == 1
    tie = compare_greedy(target, texts(2), texts(1))
    assert (tie.equal, len(tie.ties), tie.lossless) == (0, 1, True)
    wrong = compare_greedy(target, texts(2), texts(3))
    assert not wrong.lossless
    assert wrong.differing[0].logit_gap == pytest.approx(0.5, abs=1e-4)
    cut = compare_greedy(target, [decoded([], tokens=[2, 1])], [decoded([], tokens=[2])])
    assert not cut.lossless


def test_replay_counts_what_decoding_counts() -> None:
    target = tiny_target()
    prompts = [Prompt("a", "chat", [5, 6, 7, 5, 6]), Prompt("b", "chat", [9, 9, 9])]
    lookup = PromptLookupProposer(target.info.vocab_size, 4)
    plain = decode_prompts(SpeculativeDecoder(target, PlainProposer()), prompts, 40, SamplerSettings(), [2])
    real = decode_prompts(SpeculativeDecoder(target, lookup), prompts, 40, SamplerSettings(), [2])
    again = replay(plain, lookup, target.info.vocab_size, 40, [2])
    assert [d.generation.rounds for d in again] == [d.generation.rounds for d in real]
    assert [d.generation.tokens for d in again] == [d.generation.tokens for d in plain]


def test_speed_compares_pairs() -> None:
    target = ToyTarget(10.0 * torch.eye(6).roll(1, dims=1))
    decoders = {
        "plain": SpeculativeDecoder(target, PlainProposer()),
        "prompt lookup": SpeculativeDecoder(target, PromptLookupProposer(6, 4)),
    }
    threads = torch.get_num_threads()
    prompts = [Prompt(str(i), "chat", [0, 1, 2, 3, 4, 5, 0]) for i in range(3)]
    speeds = compare(measure(decoders, prompts, 30), resamples=50)
    assert torch.get_num_threads() == threads
    assert [s.name for s in speeds] == ["plain", "prompt lookup"]
    assert (speeds[0].ratio.value, speeds[0].accepted_length) == (1.0, 1.0)
    assert speeds[1].accepted_length > 3
    assert len(speeds[1].per_prompt) == 3


class SlowDrafter:
    """Proposes in 5 ms by its own clock, the first time in 50; taking in text costs 20."""

    gamma, layer_ids = 3, (1,)

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def start(self, max_length: int) -> None:
        pass

    def extend(self, committed: Any) -> None:
        self.now += 0.02

    def propose(self, anchor: int, num_tokens: int, sampler: Any) -> None:
        self.calls += 1
        self.now += 0.05 if self.calls == 1 else 0.005


def test_only_whole_blocks_and_nothing_but_drafting_are_clocked(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer: Any = SlowDrafter()
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: proposer.now))
    clocked = speed.ClockedProposer(proposer, torch.device("cpu"))
    assert (clocked.gamma, clocked.layer_ids) == (3, (1,))
    anything: Any = None
    for wanted in ((3,), (3, 3, 2), (1,)):
        clocked.start(9)
        for number in wanted:
            clocked.extend(anything)
            clocked.propose(0, number, anything)
    assert [len(blocks) for blocks in clocked.seconds()] == [1, 2, 0]
    found = speed.draft_time(clocked.seconds()[1:], resamples=20, seed=0)
    assert found is not None
    assert (found.blocks, found.per_prompt) == (2, [pytest.approx(5.0)])
    assert speed.draft_time([[]], resamples=20, seed=0) is None
    assert proposer.calls == 5


def test_only_a_cpu_is_pinned_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "pinned", lambda threads: pytest.fail("pinned"))
    generation = Generation([1, 2], [Round(0, 0, 1, censored=False)], 2.0, 1.0, "length")
    gpu = SimpleNamespace(target=SimpleNamespace(device=torch.device("cuda")), generate=lambda *arguments: generation)
    decoders: Any = {"plain": gpu}
    assert measure(decoders, [Prompt("a", "chat", [0])], 2) == {"plain": [generation]}


@pytest.fixture(scope="module")
def scored() -> tuple[Target, DSparkDrafter, Scores]:
    target = tiny_target()
    torch.manual_seed(3)
    drafter = DSparkConfig(num_layers=1, gamma=3, markov_rank=4).build(target.info, (0, 2), MASK_TOKEN_ID).eval()
    drafter.bind(target.head)
    domains = ("chat", "code", "math")
    prompts = [Prompt(f"p{i}", domains[i % 3], [5 + i, 6, 7, 5 + i]) for i in range(6)]
    config = EvaluateConfig(max_new_tokens=12, timing_prompts=2, timing_new_tokens=8, bootstrap=50)
    return target, drafter, score(target, drafter, prompts, config, {2})


def test_everything_is_scored(scored: tuple[Target, DSparkDrafter, Scores]) -> None:
    scores = scored[2]
    assert list(scores.acceptance) == list(scores.lookup) == ["chat", "code", "math", "all"]
    assert scores.lossless is not None
    assert scores.lossless.lossless
    assert scores.lossless.prompts == 6
    assert [s.name for s in scores.speed] == ["plain", "prompt lookup", "speculative"]
    assert 1.0 <= scores.expected_length <= 4.0
    assert [(p.id, p.domain) for p in scores.prompts][:2] == [("p0", "chat"), ("p1", "code")]
    assert sum(p.tokens for p in scores.prompts) == scores.acceptance["all"].tokens
    assert sum(p.rounds for p in scores.prompts) == scores.acceptance["all"].rounds
    assert scores.draft is not None
    assert scores.draft.blocks >= 2
    assert any("Drafting one block" in note for note in notes(scores))


def test_timed_texts_are_not_decoded_again(
    scored: tuple[Target, DSparkDrafter, Scores], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy texts of equal length and the same prompts: the figures are those of an evaluation that times nothing."""
    target, drafter, _ = scored
    prompts = [Prompt(f"p{i}", "chat", [5 + i, 6, 7, 5 + i]) for i in range(3)]
    apart = EvaluateConfig(max_new_tokens=8, timing_prompts=0, bootstrap=50)
    together = replace(apart, timing_prompts=3, timing_new_tokens=8)
    expected = score(target, drafter, prompts, apart, {2})
    monkeypatch.setattr(run, "decode_prompts", lambda *a, **k: pytest.fail("decoded again"))
    found = score(target, drafter, prompts, together, {2})
    for field in ("acceptance", "lookup", "gain", "expected_length", "lossless"):
        assert getattr(found, field) == getattr(expected, field), field


def test_confident_blocks_are_timed_beside_whole_ones(scored: tuple[Target, DSparkDrafter, Scores]) -> None:
    """Nothing is drafted at a threshold of 1, so the text comes from the target alone, a token a pass."""
    target, drafter, _ = scored
    config = EvaluateConfig(max_new_tokens=8, timing_prompts=1, timing_new_tokens=6, bootstrap=10)
    prompts = [Prompt("a", "chat", [5, 9, 7])]
    sure = score(target, drafter, prompts, replace(config, confidence_threshold=1.0), {2})
    assert [s.name for s in sure.speed] == ["plain", "prompt lookup", "speculative", "speculative, confident"]
    assert sure.speed[-1].accepted_length == 1.0
    assert sure.acceptance == score(target, drafter, prompts, config, {2}).acceptance


def test_sampling_has_no_lossless_check(scored: tuple[Target, DSparkDrafter, Scores]) -> None:
    target, drafter, _ = scored
    config = EvaluateConfig(max_new_tokens=6, timing_prompts=0, bootstrap=10, temperature=1.0, gamma=2)
    scores = score(target, drafter, [Prompt("a", "chat", [5])], config, {2})
    assert (scores.lossless, scores.speed, scores.draft, scores.lookup, scores.gain) == (None, [], None, {}, None)
    assert scores.gamma == 2
    assert len(scores.acceptance["chat"].positions) <= 2


def test_in_16_bits_texts_are_not_compared_and_the_report_says_so(
    scored: tuple[Target, DSparkDrafter, Scores],
) -> None:
    target = Target(tiny_model().to(torch.bfloat16), scored[0].tokenizer, name="tiny")
    drafter = DSparkConfig(num_layers=1, gamma=3, markov_rank=4).build(target.info, (0, 2), MASK_TOKEN_ID).eval()
    drafter.bind(target.head)
    config = EvaluateConfig(max_new_tokens=6, timing_prompts=0, bootstrap=10)
    scores = score(target, drafter, [Prompt("a", "chat", [5])], config, {2})
    assert (scores.lossless, scores.device, scores.precision) == (None, "cpu", "bfloat16")
    assert scores.lookup
    assert "not compared with plain decoding: in bfloat16" in "\n".join(notes(scores))
    assert not any("not compared" in note for note in notes(scored[2]))


def test_the_expected_length_is_that_of_the_gamma_asked_for(
    scored: tuple[Target, DSparkDrafter, Scores], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter, _ = scored
    config = EvaluateConfig(max_new_tokens=12, timing_prompts=0, bootstrap=10, gamma=1)
    seen: list[int | None] = []

    def note(*arguments: object, gamma: int | None = None) -> float:
        seen.append(gamma)
        return 1.5

    monkeypatch.setattr(run, "estimate", note)
    score(target, drafter, [Prompt("a", "chat", [5])], config, {2})
    assert seen == [1]


def test_too_large_a_gamma_and_no_prompts(scored: tuple[Target, DSparkDrafter, Scores]) -> None:
    target, drafter, _ = scored
    with pytest.raises(ConfigError, match="evaluate.gamma=9"):
        score(target, drafter, [Prompt("a", "chat", [5])], EvaluateConfig(gamma=9), {2})
    with pytest.raises(ConfigError, match="data.test"):
        score(target, drafter, [], EvaluateConfig(), {2})


def test_report_files(scored: tuple[Target, DSparkDrafter, Scores], tmp_path: Path) -> None:
    paths = write_report(tmp_path / "new", scored[2], {"drafter": "x"})
    record = json.loads((tmp_path / "new" / "report.json").read_text())
    assert record["scores"]["acceptance"]["all"]["prompts"] == 6
    assert record["subject"]["command"]
    assert record["scores"]["settings"]["timing_new_tokens"] == 8
    assert {"id": "p0", "domain": "chat"}.items() <= record["scores"]["prompts"][0].items()
    assert {p.name for p in paths} >= {"report.json", "report.md", "report.html"}
    assert not list((tmp_path / "new").glob("*.part"))


def test_the_commit_is_the_packages_own(tmp_path: Path) -> None:
    """A package in a virtual environment inside a repository is not that repository's code."""
    own, installed = tmp_path / "deepspec", tmp_path / ".venv" / "lib" / "deepspec"
    for folder in (own, installed):
        folder.mkdir(parents=True)
    version = f"none, version {deepspec.__version__}"
    assert commit_of(own) == version
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c")
    for arguments in (("init", "--quiet"), ("commit", "--quiet", "--allow-empty", "--message=x")):
        subprocess.run([*git, *arguments], check=True, timeout=60)
    assert re.fullmatch(r"[0-9a-f]{12}", commit_of(own))
    assert commit_of(installed) == version


def test_text_from_outside_is_escaped(scored: tuple[Target, DSparkDrafter, Scores]) -> None:
    hostile = "<script>alert(1)</script> | `x` [a](b)"
    scores = Scores(**{**vars(scored[2]), "answer": Answer(hostile, hostile, hostile)})
    assert "<script>" not in page(scores, {"data": hostile})
    text = markdown(scores, {"data": hostile})
    assert all(line.startswith("    ") for line in text.splitlines() if "<script>" in line and "\\<" not in line)


def test_no_text_becomes_markup_or_steers_a_terminal(scored: tuple[Target, DSparkDrafter, Scores]) -> None:
    hostile = "![a](b) # [c] !d &lt; \x1b[31m\x9b2J\u202e"
    scores = Scores(**{**vars(scored[2]), "answer": Answer(hostile, hostile, hostile)})
    scores.acceptance[hostile] = scores.acceptance["all"]
    try:
        texts = [terminal_text(scores), markdown(scores, {"data": hostile}), page(scores, {"data": hostile})]
    finally:
        del scores.acceptance[hostile]
    assert not any(c in text for text in texts for c in "\x1b\x9b\u202e")
    escaped = "\\!\\[a\\](b) \\# \\[c\\] \\!d \\&lt; \\[31m2J"
    assert texts[1].count(escaped) == 2  # the fact and the table's row; the answers are code
    assert texts[1].count("\n    ![a](b) # [c] !d &lt; [31m2J\n") == 3
    assert "&amp;lt;" in texts[2]


def test_without_matplotlib_the_message_names_the_extra(
    scored: tuple[Target, DSparkDrafter, Scores],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    paths = write_report(tmp_path, scored[2], {})
    assert not [p for p in paths if p.suffix == ".png"]
    assert "deepspec[evaluate]" in caplog.text


def test_side_by_side() -> None:
    text = side_by_side("a b\nc", "d", ("left", "right"), width=4)
    assert text.splitlines() == ["left | right", "-----+-----", "a b  | d", "c    |"]


def test_spread_takes_from_everywhere() -> None:
    prompts = [Prompt(str(i), "chat", [0]) for i in range(10)]
    assert [p.id for p in spread(prompts, 3)] == ["0", "3", "6"]
    assert spread(prompts, 0) == []
