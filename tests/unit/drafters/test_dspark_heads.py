"""The sequential heads of DSpark, written out."""

from __future__ import annotations

import pytest
import torch

from deepspec.drafters.dspark.heads import GatedMarkovHead, MarkovHead, RNNHead
from tests.unit.drafters.small import drafter

WIDTH, RANK, VOCAB, DRAFTED = 6, 4, 11, 7


def head(kind: type[MarkovHead]) -> MarkovHead:
    torch.manual_seed(0)
    made = kind(VOCAB, DRAFTED, RANK, WIDTH)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def test_the_gate_reads_the_state_and_then_the_embedding() -> None:
    made = head(GatedMarkovHead)
    assert isinstance(made, GatedMarkovHead)
    states, embeddings = torch.randn(3, WIDTH), torch.randn(3, RANK)
    joined = torch.cat((states, embeddings), dim=1)
    gate = torch.sigmoid(joined @ made.gate_proj.weight.t() + made.gate_proj.bias)
    torch.testing.assert_close(made(states, embeddings), gate * embeddings)


@pytest.mark.parametrize("kind", [MarkovHead, GatedMarkovHead, RNNHead])
def test_a_block_at_once_is_its_slots_one_by_one(kind: type[MarkovHead]) -> None:
    made = head(kind)
    states, embeddings = torch.randn(2, 5, WIDTH), torch.randn(2, 5, RANK)
    whole = made(states, embeddings)
    for block in range(2):
        memory = None
        for slot in range(5):
            found, memory = made.step(states[block, slot], embeddings[block, slot], memory)
            torch.testing.assert_close(found, whole[block, slot])


@pytest.mark.parametrize(("kind", "reads"), [(MarkovHead, False), (GatedMarkovHead, False), (RNNHead, True)])
def test_only_a_recurrent_head_reads_earlier_slots(kind: type[MarkovHead], reads: bool) -> None:
    made = head(kind)
    states, embeddings = torch.randn(1, 5, WIDTH), torch.randn(1, 5, RANK)
    other = embeddings.clone()
    other[:, 0] += 1.0
    changed = (made(states, other) - made(states, embeddings)).abs().amax(-1)[0] > 0
    assert changed.tolist() == [True, *[reads] * 4]
    assert made.recurrent is reads


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_every_head_starts_as_none(kind: str) -> None:
    made = drafter(markov_head=kind)
    assert made.markov_head is not None
    made.markov_head.reset()
    bias = made.token_bias(torch.randn(2, 32))
    assert bias is not None
    assert not bias(torch.tensor(3)).any()
    assert not bias(torch.tensor(4)).any()
