"""The least-squares start: its regression, the heads it places by hand, and what it gains."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepspec.contracts import Batch, Features
from deepspec.drafters.blocks import model as model_module
from deepspec.drafters.blocks.fit import NEAREST, SIDE, TOKEN, _parts, _sketches
from deepspec.drafters.blocks.least_squares import LeastSquares
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.dspark.model import DSparkDrafter
from deepspec.nn.head import FrozenHead
from deepspec.nn.masks import block_visible
from deepspec.nn.rope import RotaryEmbedding, rotate
from tests.helpers import tiny_target
from tests.unit.drafters.small import TAPS, VOCAB, WIDTH, row, target_info

Example = tuple[Batch, Features]


class Planted:
    """A target whose captured state ``tap`` follows from the one before and from the token: x = M x' + B e + mean.

    States and embeddings share a strong mean, as those of language models do, and embeddings of frequent tokens differ
    in few directions.
    """

    def __init__(self, tap: int = len(TAPS) - 1, **over: Any) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tap = slice(tap * WIDTH, (tap + 1) * WIDTH)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.info = target_info(head_dim=64, **over)
        spread = 2.0 * torch.exp(-torch.arange(WIDTH) / 4.0)
        self.embedding = random(VOCAB, WIDTH) * spread + random(WIDTH)
        self.head = FrozenHead.from_tensors(self.info, self.embedding, 0.4 * random(VOCAB, WIDTH))
        self.step, self.token = 0.7 * torch.linalg.qr(random(WIDTH, WIDTH)).Q, random(WIDTH, WIDTH)
        self.mean = 3.0 * random(WIDTH)

    def examples(self, count: int, first_seed: int = 0) -> list[Example]:
        return [self._example(first_seed + seed) for seed in range(count)]

    def _example(self, seed: int) -> Example:
        batch, features = row(48, range(4, 40, 2), seed=seed)
        state, states = self.mean, []
        for token in batch.input_ids[0]:
            state = self.step @ (state - self.mean) + self.token @ self.embedding[token] + self.mean
            states.append(state)
        hidden = features.hidden.clone()
        hidden[0, :, self.tap] = torch.stack(states)
        return batch, Features(hidden, torch.stack(states)[None])

    def drafter(self, **over: Any) -> DSparkDrafter:
        torch.manual_seed(0)
        values: dict[str, Any] = {"num_layers": 2, "gamma": 4, "markov_rank": 8, "init": "fitted"}
        drafter = DSparkConfig(**values | over).build(self.info, TAPS, VOCAB - 1)
        drafter.bind(self.head)
        with torch.no_grad():  # as initialise_from leaves it
            drafter.fc.weight.zero_()
            drafter.fc.weight[:, self.tap] = torch.eye(WIDTH)
        return drafter


@torch.no_grad()
def _left(drafter: DSparkDrafter, examples: list[Example], slot: int, tap: slice = slice(-WIDTH, None)) -> float:
    """Return the mean square of what the first layer misses of the wanted state, over the state's variance."""
    said, wanted = [], []
    for batch, features in examples:
        rows = drafter.supervised_rows(batch)
        arguments = drafter.block_arguments(batch, features.hidden)
        states = drafter.decoder_layers[0](*arguments, drafter.attention_backend).flatten(0, 1)[rows.index]
        said.append(states[rows.slot == slot])
        wanted.append(features.hidden[..., tap].flatten(0, 1)[rows.position[rows.slot == slot]])
    target = torch.cat(wanted)
    return float((torch.cat(said) - target).square().sum() / (target - target.mean(0)).square().sum())


def test_least_squares_in_parts_is_least_squares() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(60, 5) * torch.tensor([1.0, 1e3, 1e-2, 1.0, 10.0]), torch.randn(60, 3)
    weight = torch.rand(60)
    fit = LeastSquares(5, 3, torch.device("cpu"))
    for part in (slice(0, 7), slice(7, 60)):
        fit.add(x[part], y[part], weight[part])
    root = weight.sqrt()[:, None]
    exact = torch.linalg.lstsq((x * root).double(), (y * root).double()).solution
    torch.testing.assert_close(fit.solve(1e-9).double(), exact, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(fit.moment, (x * root).t() @ (x * root) / weight.sum())


def test_inputs_that_never_move_do_no_harm() -> None:
    fit = LeastSquares(3, 1, torch.device("cpu"))
    x = torch.tensor([[1.0, 0.0, 2.0], [2.0, 0.0, 1.0]])
    fit.add(x, x.sum(1, keepdim=True), torch.ones(2))
    solution = fit.solve(1e-6)
    assert torch.isfinite(solution).all()
    torch.testing.assert_close(x @ solution, x.sum(1, keepdim=True), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("theta", [1e4, 1e5, 1e6])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_nearest_position_scores_highest(head_dim: int, theta: float) -> None:
    """For every slot of a block of five: its nearest context lies slot + 1 positions back."""
    parameters = {"rope_type": "default", "rope_theta": theta}
    rope = RotaryEmbedding(parameters, head_dim=head_dim, max_position=4096)
    parts = _parts(rope.inverse_frequencies, head_dim)
    near, still = parts.near, parts.still
    whole = torch.cat((near[None], still[None], parts.sketch))
    torch.testing.assert_close(whole @ whole.t(), torch.eye(len(whole)))
    assert len(parts.sketch) >= head_dim // 4
    cos, sin = rope(torch.arange(1024))
    by_distance = (rotate(near.expand(1024, -1), cos, sin) @ rotate(near[None], cos[-1:], sin[-1:])[0]).flip(0)
    torch.testing.assert_close(by_distance[0], torch.tensor(1.0))
    for slot in range(5 if theta < 1e6 else 4):  # few fast pairs at a large theta: slot 4 finds its equal far away
        assert float(by_distance[slot + 1]) > float(by_distance[slot + 2 :].max())
    token = torch.nn.functional.normalize(torch.randn(head_dim // 4) @ parts.sketch[: head_dim // 4], dim=0)
    found = rotate(token.expand(1024, -1), cos, sin) @ rotate(token[None], cos[-1:], sin[-1:])[0]
    assert float(found[-100:].min()) > 0.7
    resting = rotate(still.expand(1024, -1), cos, sin) @ rotate(still[None], cos[-1:], sin[-1:])[0]
    assert float(resting[-8:].min()) > 0.95


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("intermediate", [24, 48, 80])
def test_the_first_layer_says_the_wanted_state(kv_heads: int, intermediate: int) -> None:
    """Measured on texts that the fit has not seen; the other layers are left as they are."""
    target = Planted(num_key_value_heads=kv_heads, intermediate_size=intermediate)
    drafter, unseen = target.drafter(), target.examples(6, first_seed=100)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    assert len(drafter.fit(target.examples(40))) == 2
    narrow = kv_heads == 1 or intermediate < WIDTH  # one group cannot look at both; half the rank in the MLP
    assert _left(drafter, unseen, slot=0) < (0.8 if narrow else 0.65)
    assert _left(drafter, unseen, slot=3) < 1.15  # beyond reach, and not made worse than its mean
    changed = {name for name, value in drafter.state_dict().items() if not value.equal(before[name])}
    overlooking = {f"layers.1.self_attn.{name}_proj.weight" for name in "kv"}
    assert all(name.startswith(("layers.0.", "markov_head.", "fc.")) for name in changed - overlooking), changed
    assert all(torch.isfinite(value).all() for value in drafter.state_dict().values())


def test_the_wanted_state_is_the_one_that_the_copied_layers_read() -> None:
    """Four layers behind six of the target: the copies start from what its layer 2 says, the second tap."""
    target = Planted(tap=1)
    drafter = target.drafter(num_layers=4)
    lines = drafter.fit(target.examples(40))
    assert lines[0] == "layers.0 fitted to the target's layer 2"
    assert _left(drafter, target.examples(6, first_seed=100), slot=0, tap=target.tap) < 0.65


@torch.no_grad()
def test_heads_do_their_jobs() -> None:
    target = Planted(num_key_value_heads=4)
    drafter, examples = target.drafter(), target.examples(30)
    drafter.fit(examples)
    batch, features = examples[0]
    arguments = drafter.block_arguments(batch, features.hidden)
    layer, block = drafter.decoder_layers[0], 5
    x = layer.input_layernorm(arguments.x)
    cos, sin = (torch.cat(p, dim=-2) for p in zip(arguments.context_rotation, arguments.rotation, strict=True))
    keys, _ = layer.self_attn.keys_values(torch.cat((arguments.context, x), dim=1), (cos, sin))
    scores = layer.self_attn.queries(x, arguments.rotation) @ keys.transpose(-1, -2) / target.info.head_dim**0.5
    assert isinstance(arguments.mask, torch.Tensor)
    shares = scores.masked_fill(~arguments.mask, -torch.inf).softmax(-1)[0]  # [H, A*K, T + A*K]
    width, anchor = batch.input_ids.shape[1], int(batch.anchor_indices[0, block])
    first, end = width + block * 4, width + block * 4 + 4
    for slot in range(4):
        row = block * 4 + slot
        assert float(shares[NEAREST, row, anchor - 1]) > 0.8
        if slot > 0:
            assert float(shares[TOKEN, row, first]) > 0.9
            assert float(shares[SIDE, row, first + 1 : end].sum()) > 0.9
    assert float(shares[SIDE, block * 4, :width].sum()) > 0.9


def test_a_query_finds_its_token_among_many() -> None:
    """Sketches of frequent tokens are nearly orthogonal, though embeddings share a mean and few directions."""
    torch.manual_seed(0)
    spread = torch.exp(-torch.arange(64) / 16.0)
    embedding = torch.randn(500, 64) * spread + 3.0 * torch.randn(64)
    drafter = Planted().drafter()
    drafter.bind(FrozenHead.from_tensors(target_info(), embedding, embedding))
    sketches = _sketches(drafter, torch.arange(500), 24)
    torch.testing.assert_close(sketches.norm(dim=1), torch.ones(500))
    likeness = sketches @ sketches.t() - 2 * torch.eye(500)
    assert float(likeness.max(1).values.median()) < 0.65  # cosines of 24 random numbers: 0.2 apart


def test_a_fitted_drafter_begins_with_a_lower_loss() -> None:
    target = Planted()
    fitted, random, unseen = target.drafter(), target.drafter(), target.examples(6, first_seed=100)
    fitted.fit(target.examples(40))

    def loss(drafter: DSparkDrafter) -> float:
        sums = [drafter(batch, features).metrics["l1"] for batch, features in unseen]
        return float(sum(r.numerator for r in sums)) / float(sum(r.denominator for r in sums))

    assert loss(fitted) < 0.9 * loss(random)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "cohere"])
def test_any_family_can_be_fitted(family: str) -> None:
    target = tiny_target(family)
    drafter = DSparkConfig(num_layers=3, gamma=4, markov_rank=8, init="fitted").build(target.info, (1, 3), 4)
    drafter.bind(target.head)
    copied = drafter.initialise_from(target.model)
    assert [line.split()[0] for line in copied[:2]] == ["layers.1", "layers.2"]
    batches = [row(48, range(4, 40, 2), seed=seed)[0] for seed in range(4)]
    drafter.fit([(batch, target.features(batch, (1, 3))) for batch in batches])
    assert all(torch.isfinite(value).all() for value in drafter.state_dict().values())


def test_a_reduced_vocabulary_gets_its_own_markov_rows() -> None:
    target = Planted()
    whole, reduced = target.drafter(), target.drafter(draft_vocab_size=20)
    ids = torch.arange(0, 97, 5)[:20]
    reduced.set_vocabulary(ids)
    for drafter in (whole, reduced):
        torch.manual_seed(1)
        drafter.fit(target.examples(8))
    assert whole.markov_head is not None and reduced.markov_head is not None
    torch.testing.assert_close(whole.markov_head.markov_w2.weight[ids], reduced.markov_head.markov_w2.weight)


def test_masks_of_all_examples_are_never_held_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask holds slots times keys: half a gigabyte for one answer of thousands of tokens."""
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal most
        mask = block_visible(*arguments)
        assert isinstance(mask, torch.Tensor)
        made.append(weakref.ref(mask))
        most = max(most, sum(reference() is not None for reference in made))
        return mask

    monkeypatch.setattr(model_module, "block_visible", counted)
    target = Planted()
    target.drafter().fit(target.examples(8))
    assert len(made) > 8
    assert most <= 2


def test_blocks_of_one_slot_can_be_fitted() -> None:
    """There is no other slot whose rows could be told apart or fitted."""
    target = Planted()
    drafter = target.drafter(gamma=1)
    drafter.fit(target.examples(8))
    assert all(torch.isfinite(value).all() for value in drafter.state_dict().values())


def test_one_layer_cannot_be_fitted() -> None:
    config = DSparkConfig(num_layers=1, init="fitted")
    assert config.problems() == ["drafter.num_layers=1 must be at least 2 for drafter.init=fitted"]
    assert replace(config, num_layers=2).problems() == []
