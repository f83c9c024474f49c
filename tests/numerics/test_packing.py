"""Loss and gradient of packed rows equal those of one sample a row, for every drafter and several targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from deepspec.contracts import Batch, Sample
from deepspec.data.loader import BatchMaker
from deepspec.data.sampler import BatchPlan
from deepspec.engine.loop import normalised_loss
from deepspec.features import online
from deepspec.features.online import OnlineFeatures
from deepspec.nn import chain, masks, spans
from deepspec.targets.target import Target
from tests.helpers import tiny_target
from tests.unit.drafters.small import dflash, drafter, eagle3, mtp

DRAFTERS: dict[str, Callable[..., Any]] = {
    "dspark": drafter,
    "dspark, recurrent head": partial(drafter, markov_head="rnn"),
    "dspark, sliding window": partial(drafter, sliding_window=4),
    "dflash, fill-in": partial(dflash, block_layout="fill_in"),
    "eagle3": eagle3,
    "eagle3, two layers, sliding window": partial(eagle3, num_layers=2, sliding_window=6),
    "mtp": mtp,
}


def samples() -> list[Sample]:
    """Return documents of 3 to 60 tokens; of one everything is supervised, of another nothing."""
    rng = np.random.default_rng(5)
    made = []
    for i, size in enumerate([60, 3, 17, 31, 8, 24, 40, 5]):
        prompt = {2: 0, 4: size}.get(i, 2)
        made.append(Sample(f"s{i}", tuple(rng.integers(4, 90, size).tolist()), tuple(j >= prompt for j in range(size))))
    return made


def batches(row_tokens: int | None, micro: int) -> list[Batch]:
    """Return the micro-batches of one step over all samples."""
    documents = samples()
    plan = BatchPlan(
        [len(s.input_ids) for s in documents],
        global_batch_size=len(documents),
        micro_batch_size=micro,
        row_tokens=row_tokens,
    )
    make = BatchMaker(documents, seed=0, anchors_per_sample=12, anchor_share=0.5)
    return [make(rows) for rows in plan.micro_batches(0)]


def merged(batch: Batch) -> Batch:
    """Return a batch whose rows are one document each."""
    return replace(batch, segment_ids=(batch.segment_ids > 0).long())


def step(
    model: Any, target: Target, micro_batches: list[Batch], seen: Callable[[Batch], Batch] = lambda batch: batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the gradient of one optimiser step, of batches as the drafter has ``seen`` them."""
    model.zero_grad()
    own = [model.denominators(batch) for batch in micro_batches]
    totals = {name: torch.stack([d[name] for d in own]).sum() for name in own[0]}
    features, total = OnlineFeatures(target, model.taps), torch.zeros(())
    for batch in micro_batches:
        loss = normalised_loss(model(seen(batch), features(batch)).sums, model.coefficients, totals)
        loss.backward()
        total = total + loss.detach()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(params=[True, False], ids=["piece by piece", "one mask"])
def by_piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run packed attention document by document, and as a GPU does, with one mask over the row."""
    if not request.param:
        for module in (chain, masks):
            monkeypatch.setattr(module, "separable", lambda _batch: None)
    return bool(request.param)


def bound(make: Callable[..., Any], target: Target) -> Any:
    model = make(info=target.info)
    model.bind(target.head)
    return model


@pytest.mark.usefixtures("by_piece")
@pytest.mark.parametrize("name", DRAFTERS)
def test_packed_equals_unpacked(name: str) -> None:
    target = tiny_target("llama")
    model = bound(DRAFTERS[name], target)
    loss, gradient = step(model, target, batches(None, micro=2))
    for row_tokens, micro in ((64, 1), (64, 3), (200, 1)):
        parts = batches(row_tokens, micro)
        assert any((batch.segment_ids > 2).any() for batch in parts), "nothing is packed"
        packed_loss, packed_gradient = step(model, target, parts)
        torch.testing.assert_close(packed_loss, loss, rtol=1e-5, atol=0.0)
        assert distance(packed_gradient, gradient) < 1e-5


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "phi3", "cohere"])
def test_a_targets_own_attention_keeps_documents_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "ENOUGH_TOKENS", 40)
    target = tiny_target(family)
    source, alone = OnlineFeatures(target, (0, 4)), {}
    for batch in batches(None, micro=1):
        features, length = source(batch), int((batch.segment_ids > 0).sum())
        alone[batch.sample_ids[0]] = torch.cat((features.hidden, features.last_hidden), -1)[0, :length]
    for batch in batches(64, micro=2):
        for features in (source(batch), target.features(batch, (0, 4))):
            both = torch.cat((features.hidden, features.last_hidden), -1)
            for name, span in zip(batch.sample_ids, spans.document_spans(batch), strict=True):
                torch.testing.assert_close(both[span.row, span.start : span.stop], alone[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dspark", "eagle3, two layers, sliding window"])
def test_documents_that_see_each_other_are_noticed(name: str) -> None:
    target = tiny_target("llama")
    model = bound(DRAFTERS[name], target)
    _, gradient = step(model, target, batches(None, micro=2))
    _, other = step(model, target, batches(64, micro=1), seen=merged)
    assert distance(other, gradient) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dspark", "eagle3"])
def test_one_compilation_serves_every_shape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention takes one mask for a row, as on a GPU, nothing in the drafter depends on the data of a batch."""
    for module in (chain, masks):
        monkeypatch.setattr(module, "separable", lambda _batch: None)
    target = tiny_target("llama")
    model, counter, shapes = bound(DRAFTERS[name], target), CompileCounter(), set()
    torch._dynamo.reset()
    compiled = torch.compile(model.block_states, backend=counter, dynamic=True, fullgraph=True)
    source = OnlineFeatures(target, model.taps)
    for batch in (*batches(64, 1), *batches(200, 1), *batches(None, 1)):
        features = source(batch)
        shapes.add((batch.input_ids.shape, batch.anchor_indices.shape))
        compiled(batch, features if name == "eagle3" else features.hidden)
    assert len(shapes) > 4
    assert counter.frame_count <= 2
