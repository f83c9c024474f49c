"""Block drafters against figures of the published reference implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspec.contracts import Batch, Features
from deepspec.drafters.dflash.config import DFlashConfig
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.nn.head import FrozenHead
from tests.unit.drafters.small import draft_logits, greedy, only, target_info

GOLDEN = Path(__file__).parents[2] / "golden"
Case = tuple[dict[str, torch.Tensor], Any, Batch, Features]


def described(settings: dict[str, Any]) -> DFlashConfig | DSparkConfig:
    """Return our configuration of a reference drafter; one without heads is a DFlash."""
    loss = settings["_loss"]
    values: dict[str, Any] = {
        "num_layers": settings["num_hidden_layers"],
        "gamma": settings["block_size"],
        "ce": loss["ce_loss_alpha"],
        "l1": loss["l1_loss_alpha"],
        "decay": loss["loss_decay_gamma"],
    }
    if not settings["markov_rank"]:
        return DFlashConfig(**values)
    return DSparkConfig(
        **values,
        markov_head=settings["markov_head_type"],
        markov_rank=settings["markov_rank"],
        confidence_head=settings["enable_confidence_head"],
        confidence_with_markov=settings["confidence_head_with_markov"],
        confidence=loss["confidence_head_alpha"],
    )


@pytest.fixture(params=["dspark_vanilla", "dspark_rnn", "dflash"])
def case(request: pytest.FixtureRequest) -> Case:
    settings: dict[str, Any] = json.loads((GOLDEN / f"{request.param}.json").read_text())
    tensors = load_file(GOLDEN / f"{request.param}.safetensors")
    config = described(settings)
    assert config.problems() == []
    info = target_info(rope_parameters=settings["rope_parameters"])
    model = config.build(info, tuple(settings["target_layer_ids"]), settings["mask_token_id"])
    weights = {name.removeprefix("param."): t for name, t in tensors.items() if name.startswith("param.")}
    model.bind(FrozenHead.from_tensors(info, weights.pop("embed_tokens.weight"), weights.pop("lm_head.weight")))
    model.load_state_dict(weights)
    ids = tensors["in.input_ids"]
    batch = Batch(
        input_ids=ids,
        segment_ids=torch.ones_like(ids),
        position_ids=torch.arange(ids.shape[1])[None],
        loss_mask=tensors["in.loss_mask"].bool(),
        anchor_indices=tensors["in.anchor_positions"],
        anchor_mask=tensors["in.block_keep_mask"],
    )
    return tensors, model, batch, Features(tensors["in.target_hidden_states"], tensors["in.target_last_hidden_states"])


def close(value: torch.Tensor, reference: torch.Tensor, tolerance: float) -> bool:
    return bool((value - reference).norm() <= tolerance * reference.norm())


def test_draft_and_target_logits(case: Case) -> None:
    tensors, model, batch, features = case
    assert close(draft_logits(model, batch, features.hidden), tensors["out.draft_logits"], 1e-5)
    slots = batch.anchor_indices[..., None] + torch.arange(model.conventions.gamma)
    judge = features.last_hidden[0][slots.clamp(max=batch.input_ids.shape[1] - 1)]
    mask = tensors["out.eval_mask"]
    assert close(model.head.logits(judge)[mask], tensors["out.aligned_target_logits"][mask], 1e-5)


def test_terms_and_loss(case: Case) -> None:
    tensors, model, batch, features = case
    out, denominators = model(batch, features), model.denominators(batch)
    assert close(out.metrics["ce"].numerator, tensors["out.term.ce_loss_num"][0], 1e-5)
    assert close(out.metrics["l1"].numerator, tensors["out.term.l1_loss_num"][0], 1e-5)
    assert close(denominators["draft"], tensors["out.term.ce_loss_den"][0], 1e-6)
    if "confidence" in out.sums:
        assert close(out.sums["confidence"], tensors["out.term.confidence_loss_num"][0], 1e-5)
        assert close(denominators["confidence"], tensors["out.term.confidence_loss_den"][0], 1e-6)
    loss = sum(model.coefficients[name] * value / denominators[name] for name, value in out.sums.items())
    assert close(torch.as_tensor(loss), tensors["out.loss"][0], 1e-5)


def test_gradients(case: Case) -> None:
    tensors, model, batch, features = case
    out, denominators = model(batch, features), model.denominators(batch)
    sum(model.coefficients[name] * value / denominators[name] for name, value in out.sums.items()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert close(parameter.grad, tensors[f"grad.{name}"], 1e-4), name


def test_confidence_logits(case: Case) -> None:
    tensors, model, batch, features = case
    if "confidence" not in model.coefficients:
        assert not any(name.startswith("out.confidence") for name in tensors)
        return
    slots = batch.anchor_indices[..., None] + torch.arange(model.conventions.gamma)
    previous = batch.input_ids[0][slots.clamp(max=batch.input_ids.shape[1] - 1)]
    states = model.block_states(batch, features.hidden)
    logits = model.confidence_head(states, model.markov_head.markov_w1(previous))
    mask = tensors["out.eval_mask"]
    assert close(logits[mask], tensors["out.confidence_logits"][mask], 1e-5)


def test_greedy_block(case: Case) -> None:
    tensors, model, _, features = case
    context = int(tensors["draft.context_len"])
    state = model.start(64)
    model.extend(state, only(features.hidden[0, :context]))
    proposal = model.propose(state, int(tensors["draft.anchor"]), model.conventions.gamma, greedy)
    assert proposal.tokens.tolist() == tensors["draft.tokens"][0].tolist()
    assert close(proposal.probabilities, tensors["draft.logits"][0].softmax(-1), 1e-5)
    if proposal.confidence is not None:
        assert close(proposal.confidence, tensors["draft.confidence_logits"][0].sigmoid(), 1e-5)
