"""What every drafter promises to the engine and to the decoder, asked through ``Drafter``'s own interface.

``CASES`` holds each drafter of the package in its variants, and one from outside. What a block predicts shows twice: in
the training forward as the acceptance by position, and in ``propose`` as the probabilities that the tokens were drawn
from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspec.drafters
from deepspec.contracts import Batch, Features
from deepspec.drafters.files import load_drafter, save_drafter
from deepspec.nn.head import FrozenHead
from tests.contract.outside import BigramConfig
from tests.unit.drafters.small import (
    TAPS,
    VOCAB,
    Forced,
    dflash,
    drafter,
    eagle3,
    greedy,
    known,
    mtp,
    packed,
    padded,
    random_weights,
    row,
    stacked,
    target_info,
)


def reduced(make: Callable[..., Any]) -> Any:
    """Return a drafter that proposes 40 of the target's tokens."""
    made = make(draft_vocab_size=40)
    made.set_vocabulary(range(1, 81, 2))
    return made


def outside() -> Any:
    return random_weights(BigramConfig().build(target_info(), TAPS, VOCAB - 1), target_info())


CASES: dict[str, Callable[[], Any]] = {
    "dspark": drafter,
    "dspark without a Markov head": partial(drafter, markov_head="none", confidence_with_markov=False),
    "dspark without a confidence head": partial(drafter, confidence_head=False),
    "dspark with a sliding window": partial(drafter, sliding_window=4),
    "dspark with a draft vocabulary": partial(reduced, drafter),
    "dspark with a gated head": partial(drafter, markov_head="gated"),
    "dspark with a recurrent head": partial(drafter, markov_head="rnn"),
    "dspark whose confidence does not see the Markov head": partial(drafter, confidence_with_markov=False),
    "dspark with D-PACE's weights": partial(drafter, position_weights="dpace"),
    "dflash": dflash,
    "dflash with a sliding window": partial(dflash, sliding_window=4),
    "dflash that fills in": partial(dflash, block_layout="fill_in"),
    "dflash that fills in, with a sliding window": partial(dflash, block_layout="fill_in", sliding_window=4),
    "dflash with a draft vocabulary": partial(reduced, dflash),
    "dflash with D-PACE's weights and a draft vocabulary": partial(reduced, partial(dflash, position_weights="dpace")),
    "eagle3": eagle3,
    "eagle3 with a draft vocabulary": partial(reduced, eagle3),
    "eagle3 with head norms": partial(eagle3, qk_norm=True),
    "eagle3 with two layers and a sliding window": partial(eagle3, num_layers=2, sliding_window=6),
    "mtp": mtp,
    "mtp with a draft vocabulary": partial(reduced, mtp),
    "mtp with two layers and a sliding window": partial(mtp, num_layers=2, sliding_window=4),
    "outside the package": outside,
}


@pytest.fixture(params=list(CASES))
def model(request: pytest.FixtureRequest) -> Any:
    return CASES[request.param]()


def accepted(model: Any, batch: Batch, features: Features) -> torch.Tensor:
    """Return the acceptance [K], summed over the blocks, out of the training forward."""
    numerator: torch.Tensor = model(batch, features).metrics["acceptance"].numerator
    return numerator


def at(anchors: list[int]) -> tuple[Batch, Features]:
    """Return the same 40 tokens and features with blocks at ``anchors``."""
    return row(40, anchors)


def test_every_drafter_of_the_package_is_asked() -> None:
    folders = {path.parent.name for path in Path(deepspec.drafters.__path__[0]).glob("*/config.py")}
    assert {name.split()[0] for name in CASES} == {*folders, "outside"}


def test_shapes(model: Any) -> None:
    batch, features = at([3, 20])
    output, weights, gamma = model(batch, features), model.denominators(batch), model.conventions.gamma
    assert output.sums.keys() == weights.keys() == model.coefficients.keys()
    assert all(value.shape == () and value.requires_grad for value in output.sums.values())
    assert all(value.shape == () and value.dtype == torch.float32 for value in weights.values())
    assert not any(part.requires_grad for ratio in output.metrics.values() for part in ratio)
    assert [part.shape for part in output.metrics["acceptance"]] == [(gamma,), (gamma,)]
    state = model.start(40)
    model.extend(state, known(batch, features, 0, 7))
    for asked in (1, gamma):
        found = model.propose(state, 11, asked, greedy)
        assert (found.tokens.shape, found.tokens.dtype) == ((asked,), torch.int64)
        assert (found.probabilities.shape, found.probabilities.dtype) == ((asked, VOCAB), torch.float32)
        torch.testing.assert_close(found.probabilities.sum(-1), torch.ones(asked))
        assert found.tokens.equal(found.probabilities.argmax(-1))
        if found.confidence is not None:
            assert found.confidence.shape == (asked,)
            assert bool(((found.confidence > 0) & (found.confidence < 1)).all())


def test_the_training_forward_predicts_what_is_proposed(model: Any) -> None:
    """The distributions of a block, drafted step by step with the batch's own tokens, give the forward's acceptance."""
    anchors, gamma = [3, 5, 20], model.conventions.gamma  # the first two blocks overlap
    batch, features = at(anchors)
    expected = torch.zeros(gamma)
    for anchor in anchors:
        tokens = batch.input_ids[0, anchor:].tolist()
        state = model.start(anchor)
        model.extend(state, known(batch, features, 0, anchor // 2))
        model.extend(state, known(batch, features, anchor // 2, anchor))
        q = model.propose(state, tokens[0], gamma, Forced(tokens[1:])).probabilities
        p = model.head.logits(features.last_hidden[0, anchor : anchor + gamma]).softmax(-1)
        expected += torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(accepted(model, batch, features), expected, atol=1e-5, rtol=1e-4)


def test_training_and_proposing_agree_in_bf16(model: Any) -> None:
    """Kernels differ in where they round; a product that is rounded before its sum would show here."""
    model.to(torch.bfloat16)
    model.bind(model.head.to(dtype=torch.bfloat16))
    anchors, gamma = [3, 5, 20], model.conventions.gamma
    batch, features = at(anchors)
    features = Features(features.hidden.bfloat16(), features.last_hidden.bfloat16())
    expected = torch.zeros(gamma)
    for anchor in anchors:
        tokens, state = batch.input_ids[0, anchor:].tolist(), model.start(anchor)
        model.extend(state, known(batch, features, 0, anchor))
        q = model.propose(state, tokens[0], gamma, Forced(tokens[1:])).probabilities
        p = model.head.logits(features.last_hidden[0, anchor : anchor + gamma]).float().softmax(-1)
        expected += torch.minimum(p, q).sum(-1)
    assert (accepted(model, batch, features) - expected).abs().max() < 0.05


def test_a_slot_does_not_look_into_the_future(model: Any) -> None:
    """Slot j knows the features before its anchor and the tokens up to a+j, and nothing of a block that it overlaps."""
    batch, features = at([20])
    before = accepted(model, batch, features)
    for slot in range(model.conventions.gamma):
        ids, hidden, last = batch.input_ids.clone(), features.hidden.clone(), features.last_hidden.clone()
        ids[:, 21 + slot :], hidden[:, 20:], last[:, 21 + slot :] = 7, 0.5, 0.5
        after = accepted(model, replace(batch, input_ids=ids), Features(hidden, last))
        torch.testing.assert_close(after[: slot + 1], before[: slot + 1])
    torch.testing.assert_close(accepted(model, *at([20, 22])), before + accepted(model, *at([22])))
    hidden, last = features.hidden.clone(), features.last_hidden.clone()
    hidden[:, 19], last[:, 19] = 0.5, 0.5
    assert (accepted(model, batch, Features(hidden, last)) - before).abs().max() > 1e-3, "no context is seen"


def test_what_comes_after_the_block_does_not_change_the_loss(model: Any) -> None:
    batch, features = at([10])
    ids, hidden, last = batch.input_ids.clone(), features.hidden.clone(), features.last_hidden.clone()
    end = 10 + model.conventions.gamma
    ids[:, end + 1 :], hidden[:, 10:], last[:, end:] = 3, 0.5, 0.5
    before, after = model(batch, features), model(replace(batch, input_ids=ids), Features(hidden, last))
    for name in before.sums:
        torch.testing.assert_close(after.sums[name], before.sums[name])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_packing_padding_and_splitting_give_the_same_sums_and_gradients(model: Any, backend: str) -> None:
    """Documents in one row, in rows of their own with padding, and in micro-batches of their own."""
    first, second = row(17, [3, 6, 11], seed=1), row(33, [4, 27], seed=2)
    model.attention_backend = backend

    def run(cases: list[tuple[Batch, Features]]) -> tuple[dict[str, float], torch.Tensor, float]:
        model.zero_grad()
        sums: dict[str, float] = {}
        weight = 0.0
        for batch, features in cases:
            out = model(batch, features)
            weight += float(model.denominators(batch)["draft"])
            torch.stack(list(out.sums.values())).sum().backward()
            for name, value in out.sums.items():
                sums[name] = sums.get(name, 0.0) + value.item()
        return sums, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), weight

    expected = run([first, second])
    rows = stacked(padded(first, 40, 4), padded(second, 40, 4))
    for other in (run([packed(first, second)]), run([rows])):
        assert other[0] == pytest.approx(expected[0], rel=1e-5)
        assert (other[1] - expected[1]).norm() <= 1e-5 * expected[1].norm()
        assert other[2] == pytest.approx(expected[2], rel=1e-6)


def test_the_first_token_of_a_document_reads_nothing_of_the_document_before(model: Any) -> None:
    """An anchor there has no context: a block drafter drafts from the token alone, a chain cannot start."""
    first, second = row(17, [3, 6], seed=1), row(33, [0, 4], seed=2, supervised_from=0)
    batch, features = packed(first, second)
    other = features.hidden.clone(), features.last_hidden.clone()
    other[0][:, 16], other[1][:, 16] = 0.5, 0.5  # the row before the second document, which judges nothing
    before, after = model(batch, features), model(batch, Features(*other))
    for name, value in before.sums.items():
        torch.testing.assert_close(after.sums[name], value)
    alone = float(model.denominators(first[0])["draft"]) + float(model.denominators(second[0])["draft"])
    assert float(model.denominators(batch)["draft"]) == pytest.approx(alone)


def test_every_parameter_learns_and_the_target_does_not(model: Any) -> None:
    frozen = [tensor.clone().requires_grad_() for tensor in (model.head.embedding, model.head.weight)]
    model.bind(FrozenHead.from_tensors(model.target, *frozen))
    batch, features = at([3, 5, 20])
    sums = model(batch, features).sums
    torch.stack([model.coefficients[name] * value for name, value in sums.items()]).sum().backward()
    assert all(tensor.grad is None for tensor in frozen)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()) and parameter.grad.any(), name
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert own.isdisjoint(tensor.data_ptr() for tensor in frozen), "the target's tensors would be saved"


def test_a_batch_without_a_slot_gives_zero_sums_and_zero_gradients(model: Any) -> None:
    batch, features = at([3])
    silent = replace(batch, anchor_mask=torch.zeros(1, 1, dtype=torch.bool))
    sums = model(silent, features).sums
    torch.stack(list(sums.values())).sum().backward()
    assert all(value.item() == 0.0 for value in (*sums.values(), *model.denominators(silent).values()))
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_packed_rows_without_a_slot_reach_the_parameters_that_others_reach(model: Any) -> None:
    """Ranks reduce a gradient when it arrives: a parameter that gets none on one of them would stop them all."""
    reached = []
    for batch, features in (at([3]), packed(row(17, [3], seed=1), row(33, [4], seed=2))):
        model.zero_grad()
        silent = replace(batch, anchor_mask=torch.zeros_like(batch.anchor_mask))
        torch.stack(list(model(silent, features).sums.values())).sum().backward()
        reached.append({name for name, p in model.named_parameters() if p.grad is not None})
    assert reached[0] == reached[1]


def test_proposing_leaves_the_state_as_it_was(model: Any) -> None:
    batch, features = at([3])
    used, fresh = model.start(20), model.start(20)
    model.extend(used, known(batch, features, 0, 7))
    gamma, fewer = model.conventions.gamma, min(2, model.conventions.gamma)
    whole, part = model.propose(used, 11, gamma, greedy), model.propose(used, 11, fewer, greedy)
    assert part.tokens.equal(whole.tokens[:fewer]), "fewer tokens are the first of the block"
    torch.testing.assert_close(part.probabilities, whole.probabilities[:fewer])
    if whole.confidence is not None:
        torch.testing.assert_close(part.confidence, whole.confidence[:fewer])
    model.extend(used, known(batch, features, 7, 9))
    model.extend(fresh, known(batch, features, 0, 9))
    again, other = (model.propose(state, 12, gamma, greedy) for state in (used, fresh))
    torch.testing.assert_close(again.probabilities, other.probabilities)


def test_a_saved_drafter_comes_back_the_same(model: Any, tmp_path: Path) -> None:
    save_drafter(tmp_path, model, model.config, model.target)
    loaded: Any = load_drafter(tmp_path)
    assert (loaded.conventions, loaded.config) == (model.conventions, model.config)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    loaded.bind(model.head)
    batch, features = at([3, 5, 20])
    before, after = (each(batch, features).sums for each in (model, loaded))
    assert all(after[name].equal(value) for name, value in before.items())
    proposals = []
    for each in (model, loaded):
        state = each.start(20)
        each.extend(state, known(batch, features, 0, 9))
        proposals.append(each.propose(state, 11, model.conventions.gamma, greedy).probabilities)
    assert proposals[0].equal(proposals[1])
