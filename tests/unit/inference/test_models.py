"""Greedy speculative output on tiny models of several families is the model's own, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspec.drafters.dflash.config import DFlashConfig
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.dspark.model import DSparkDrafter
from deepspec.drafters.eagle3.config import Eagle3Config
from deepspec.drafters.mtp.config import MTPConfig
from deepspec.inference.accelerate import accelerate
from deepspec.inference.decoder import SpeculativeDecoder
from deepspec.inference.proposers import DrafterProposer, PlainProposer, PromptLookupProposer, Proposer
from deepspec.inference.sampling import SamplerSettings
from deepspec.targets.target import Target
from tests.helpers import MASK_TOKEN_ID, tiny_target
from tests.overfit import overfit

PROMPT = [5, 17, 42, 8, 17, 42, 9, 60, 33, 17, 42]
LAYERS = (0, 2, 4)


def drafter_for(target: Target, seed: int = 1, **over: object) -> DSparkDrafter:
    torch.manual_seed(seed)
    config = DSparkConfig(**({"num_layers": 2, "gamma": 5, "markov_rank": 8} | over))  # type: ignore[arg-type]
    drafter = config.build(target.info, LAYERS, MASK_TOKEN_ID)
    if config.draft_vocab_size is not None:
        drafter.set_vocabulary(torch.randperm(target.info.vocab_size)[: config.draft_vocab_size].sort().values)
    drafter.bind(target.head)
    return drafter.eval()


@torch.no_grad()
def model_greedy(target: Target, count: int) -> tuple[list[int], float]:
    """Return the model's own greedy continuation without any cache, and the smallest gap of the two best logits."""
    text, gap = list(PROMPT), float("inf")
    for _ in range(count):
        best = target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].float().topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        text.append(int(best.indices[0]))
    return text[len(PROMPT) :], gap


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "qwen3_moe"])
def test_greedy_output_is_the_models_own(family: str) -> None:
    target = tiny_target(family)
    expected, gap = model_greedy(target, 30)
    assert gap > 1e-5  # no tie: the comparison is meaningful
    proposers: dict[str, Proposer] = {
        "plain": PlainProposer(),
        "lookup": PromptLookupProposer(target.info.vocab_size),
        "drafter": DrafterProposer(drafter_for(target)),
        "window": DrafterProposer(drafter_for(target, sliding_window=4)),
        "reduced": DrafterProposer(drafter_for(target, draft_vocab_size=25)),
    }
    for name, proposer in proposers.items():
        result = SpeculativeDecoder(target, proposer).generate(PROMPT, 30)
        assert result.tokens == expected, name


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_fewer_tokens_than_trained(gamma: int) -> None:
    target = tiny_target()
    decoder = SpeculativeDecoder(target, DrafterProposer(drafter_for(target)))
    result = decoder.generate(PROMPT, 25, gamma=gamma)
    assert result.tokens == model_greedy(target, 25)[0]
    assert max(r.drafted for r in result.rounds) == gamma


def test_beyond_the_trained_length_and_the_windows() -> None:
    """Positions far behind every window, and a prompt of one token."""
    target = tiny_target("mistral")
    decoder = SpeculativeDecoder(target, DrafterProposer(drafter_for(target, sliding_window=4)))
    plain = SpeculativeDecoder(target, PlainProposer())
    assert decoder.generate([5], 120).tokens == plain.generate([5], 120).tokens


def test_packed_weights_keep_the_output() -> None:
    target = tiny_target()
    for parameter in target.model.parameters():  # as a checkpoint in bf16 would have them
        parameter.data = parameter.data.bfloat16().float()
    target = Target(target.model, target.tokenizer)
    drafter = drafter_for(target)
    before = SpeculativeDecoder(target, DrafterProposer(drafter)).generate(PROMPT, 30).tokens
    assert accelerate(target, drafter) > 0
    assert SpeculativeDecoder(target, DrafterProposer(drafter)).generate(PROMPT, 30).tokens == before


def test_sampling_is_reproducible_with_a_real_drafter() -> None:
    target = tiny_target()
    decoder = SpeculativeDecoder(target, DrafterProposer(drafter_for(target), confidence_threshold=0.3))
    settings = SamplerSettings(0.8, seed=3, top_p=0.95)
    assert decoder.generate(PROMPT, 20, settings).tokens == decoder.generate(PROMPT, 20, settings).tokens


@pytest.mark.parametrize(
    "config",
    [
        DSparkConfig(num_layers=2, gamma=5, markov_rank=4),
        DSparkConfig(num_layers=2, gamma=5, markov_rank=4, markov_head="gated"),
        DSparkConfig(num_layers=2, gamma=5, markov_rank=4, markov_head="rnn"),
        DFlashConfig(num_layers=2, gamma=5),
        DFlashConfig(num_layers=2, gamma=5, block_layout="fill_in"),
        Eagle3Config(ttt_length=5, ce=1.0),
        MTPConfig(ce=1.0),
    ],
    ids=lambda c: f"{type(c).__name__} {getattr(c, 'markov_head', getattr(c, 'block_layout', ''))}",
)
def test_an_overfitted_sequence_is_accepted_whole_every_round(config: Any) -> None:
    """Pitfall 6: labels shifted by one against the decoder would show here and nowhere in training."""
    target = tiny_target()
    answer = SpeculativeDecoder(target, PlainProposer()).generate(PROMPT, 31).tokens
    torch.manual_seed(2)
    drafter = config.build(target.info, LAYERS, target.info.vocab_size - 1)
    drafter.bind(target.head)
    overfit(target, drafter, [*PROMPT, *answer], len(PROMPT), LAYERS, steps=150)
    result = SpeculativeDecoder(target, DrafterProposer(drafter)).generate(PROMPT, 31)
    assert result.tokens == answer
    gamma = config.gamma
    assert [(r.drafted, r.accepted) for r in result.rounds] == [(gamma, gamma)] * (30 // (gamma + 1))
