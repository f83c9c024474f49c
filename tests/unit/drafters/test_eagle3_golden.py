"""Eagle3 against figures of the published reference implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspec.contracts import Batch, Features
from deepspec.drafters.eagle3.config import Eagle3Config
from deepspec.drafters.eagle3.model import Eagle3Drafter
from deepspec.losses.fused import block_loss
from deepspec.losses.task import RowTask
from deepspec.nn.head import FrozenHead
from tests.unit.drafters.small import target_info

GOLDEN = Path(__file__).parents[2] / "golden"
Case = tuple[dict[str, torch.Tensor], Eagle3Drafter, Batch, Features, dict[str, Any]]


@pytest.fixture(scope="module")
def case() -> Case:
    """The anchors are all tokens but the first: the chain of anchor a starts from the reference's row a - 1."""
    settings: dict[str, Any] = json.loads((GOLDEN / "eagle3.json").read_text())
    tensors = load_file(GOLDEN / "eagle3.safetensors")
    config = Eagle3Config(
        num_layers=settings["draft_num_hidden_layers"],
        ttt_length=settings["ttt_length"],
        step_decay=settings["step_loss_decay"],
        qk_norm=True,
    )
    assert config.problems() == []
    info = target_info(rope_parameters=settings["rope_parameters"])
    model = config.build(info, tuple(settings["target_layer_ids"]), mask_token_id=0)
    weights = {name.removeprefix("param."): t for name, t in tensors.items() if name.startswith("param.")}
    model.bind(FrozenHead.from_tensors(info, weights.pop("embed_tokens.weight"), weights.pop("lm_head.weight")))
    model.load_state_dict(weights)
    ids = tensors["in.input_ids"]
    assert bool(tensors["in.attention_mask"].all())
    batch = Batch(
        input_ids=ids,
        segment_ids=torch.ones_like(ids),
        position_ids=torch.arange(ids.shape[1])[None],
        loss_mask=tensors["in.loss_mask"].bool(),
        anchor_indices=torch.arange(1, ids.shape[1])[None],
        anchor_mask=torch.ones(1, ids.shape[1] - 1, dtype=torch.bool),
    )
    features = Features(tensors["in.target_hidden_states"], tensors["in.target_last_hidden_states"])
    return tensors, model, batch, features, settings


def test_the_logits_of_each_step(case: Case) -> None:
    """Step j of row t is told the token at t+1+j; rows that would need one beyond the text are left out."""
    tensors, model, batch, features, settings = case
    logits = model.head.logits(model.block_states(batch, features))[0]  # [A, K, V]
    for step in range(settings["ttt_length"]):
        rows = batch.input_ids.shape[1] - 1 - step
        reference = tensors[f"out.draft_logits.{step}"][0, :rows]
        assert (logits[:rows, step] - reference).norm() <= 1e-5 * reference.norm()


def test_the_loss(case: Case) -> None:
    """The reference lets row t count in step j where position t+j is supervised, and divides by all positions."""
    tensors, model, batch, features, settings = case
    states = model.block_states(batch, features)[0]  # [A, K, D]
    length, steps = batch.input_ids.shape[1], settings["ttt_length"]
    places = [(t, j) for j in range(steps) for t in range(length - 1 - j) if batch.loss_mask[0, t + j]]
    rows, step = torch.tensor(places).unbind(1)
    task = RowTask(
        target_hidden=features.last_hidden[0],
        target_index=rows + 1 + step,
        labels=torch.zeros_like(rows),
        weights=torch.tensor(model.config.slot_weights)[step],
        head=model.head,
        ce=0.0,
        l1=0.0,
        soft=1.0,
    )
    loss = block_loss(states[rows, step], task).total / length
    torch.testing.assert_close(loss, tensors["out.loss"][0], rtol=1e-5, atol=0.0)
