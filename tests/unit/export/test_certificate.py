"""The bound on the accepted length, domain by domain, from rows whose losses are known."""

from __future__ import annotations

import math

import pytest

from deepspec.contracts import Conversation
from deepspec.export.certificate import (
    CERTIFICATE_HEAD,
    DomainResult,
    certificate_problems,
    certificate_rows,
    certify,
)
from deepspec.export.compare import SampleRows
from deepspec.export.material import of_each_domain


def rows_of(domain: str, losses: list[float], *, blocks: int = 3) -> list[SampleRows]:
    """Return one sample for each loss; the samples' own lengths differ widely."""
    lengths = [1.2 + n for n in range(len(losses))]
    return [
        SampleRows(domain, tv=[0.01], promised=[(length, length * (1 - loss))] * blocks)
        for length, loss in zip(lengths, losses, strict=True)
    ]


def only(rows: list[SampleRows]) -> DomainResult:
    (result,) = certify(rows)
    return result


def test_a_loss_that_all_samples_share_is_known_exactly_although_their_lengths_differ() -> None:
    """That is what pairing is for: unpaired, lengths of 1.2 .. 6.2 would know no loss below tens of percent."""
    result = only(rows_of("chat", [0.005] * 6))
    assert result.loss.value == pytest.approx(0.005)
    assert result.bound == pytest.approx(0.005, abs=1e-9)
    assert certificate_problems([result], 0.0051) == []
    assert len(certificate_problems([result], 0.0049)) == 1


def test_the_upper_end_counts_and_not_the_mean() -> None:
    result = only(rows_of("chat", [0.03, -0.03, 0.03, -0.03, 0.03, -0.03]))
    assert abs(result.loss.value) < 0.01 < result.bound
    (problem,) = certificate_problems([result], 0.01)
    assert "domain 'chat'" in problem
    assert "upper end of its 95 % interval (6 samples); export.max_length_change=0.01 lets 1.00% through" in problem


def test_a_gain_passes() -> None:
    assert certificate_problems([only(rows_of("chat", [-0.1, -0.2, -0.15]))], 0.0) == []


def test_one_lossy_domain_is_refused_though_all_together_would_pass() -> None:
    results = certify(rows_of("chat", [-0.01] * 9) + rows_of("code", [0.02] * 3))
    assert [result.domain for result in results] == ["chat", "code", "all"]
    assert results[2].bound < 0.01
    problems = certificate_problems(results, 0.01)
    assert len(problems) == 1
    assert "domain 'code'" in problems[0]


def test_a_single_domain_is_not_repeated_under_all() -> None:
    assert [result.domain for result in certify(rows_of("chat", [0.0] * 3))] == ["chat"]


@pytest.mark.parametrize("samples", [0, 1])
def test_too_few_samples_bound_nothing_and_are_refused(samples: int) -> None:
    rows = rows_of("chat", [0.0] * samples) + [SampleRows("chat", tv=[0.1])]  # no whole block in the last
    result = only(rows)
    assert result.samples == samples
    assert result.bound > 0.01
    (problem,) = certificate_problems([result], 0.01)
    assert f"{samples} samples hold a whole block, which bounds no loss" in problem
    assert "data.test" in problem
    assert certificate_problems([result], 1.0) == []
    assert math.isnan(result.before) == (samples == 0)
    assert "too few samples" in certificate_rows([result])[0]


def test_a_length_that_is_not_a_number_is_refused() -> None:
    rows = [SampleRows("chat", tv=[0.1], promised=[(2.0, math.nan)]) for _ in range(3)]
    assert certificate_problems([only(rows)], 1.0)


def test_the_confidence_drifts_where_its_order_is_lost() -> None:
    kept = [(0.9, 0.9), (0.6, 0.6), (0.2, 0.2)]
    same = [SampleRows("chat", kept=kept, confidence=kept)]
    drift = only(same).confidence
    assert drift is not None
    assert (drift.auc_before, drift.brier_before) == (drift.auc_after, drift.brier_after)
    turned = [(0.9, 0.2), (0.6, 0.6), (0.2, 0.9)]
    drift = only([SampleRows("chat", kept=kept, confidence=turned)]).confidence
    assert drift is not None
    assert drift.auc_after < 0.5 < drift.auc_before
    assert drift.brier_after > drift.brier_before
    assert only(rows_of("chat", [0.0, 0.0])).confidence is None


def test_the_table_has_a_cell_for_every_column() -> None:
    results = certify(rows_of("chat", [0.01] * 3) + rows_of("code", [0.0]))
    assert {len(row) for row in certificate_rows(results)} == {len(CERTIFICATE_HEAD)}


def test_each_domain_gives_its_own_samples() -> None:
    """A large domain does not crowd out a small one."""
    sources = ["chat/a"] * 50 + ["code"] * 3 + [""] * 2
    conversations = [Conversation(str(n), (("user", "x"),), source) for n, source in enumerate(sources)]
    chosen = of_each_domain(conversations, 4)
    assert [c.source for c in chosen] == ["chat/a"] * 4 + ["code"] * 3 + [""] * 2
    assert [c.id for c in chosen[:4]] == ["0", "12", "25", "37"]
