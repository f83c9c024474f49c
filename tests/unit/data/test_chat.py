"""Loss masks by the design's rule, on templates that imitate the habits of many families."""

from __future__ import annotations

from typing import Any

import pytest

from deepspec.contracts import Conversation, Sample
from deepspec.data.chat import CUT_AWAY, NO_ANSWER, TOO_SHORT, ChatRenderer, Dropped
from deepspec.errors import DataError
from tests.unit.data import conftest as t

USER, BOT = "user", "assistant"
TWO_TURNS = ((USER, "who are you"), (BOT, "a model"), (USER, "and who am I"), (BOT, "the user"))


def talk(*messages: tuple[str, str], finish: str | None = "stop") -> Conversation:
    return Conversation("chat/x/1", messages, "chat", finish)


def renderer(template: str, eos: str = "<|im_end|>", **options: Any) -> ChatRenderer:
    return ChatRenderer(t.make_tokenizer(template, eos), options)


def sample_of(r: ChatRenderer, conversation: Conversation) -> Sample:
    result = r.render(conversation)
    assert isinstance(result, Sample), result
    return result


def supervised(r: ChatRenderer, sample: Sample) -> list[str]:
    """Return the text of each supervised run."""
    runs: list[list[int]] = [[]]
    for token, mask in zip(sample.input_ids, sample.loss_mask, strict=True):
        if mask:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [r.tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


def text(r: ChatRenderer, sample: Sample) -> str:
    decoded: str = r.tokenizer.decode(sample.input_ids, skip_special_tokens=False)
    return decoded


FAMILIES = [
    pytest.param(t.CHATML, "<|im_end|>", id="chatml"),
    pytest.param(t.QWEN3, "<|im_end|>", id="qwen3"),
    pytest.param(t.LLAMA3, "<|eot_id|>", id="llama3"),
    pytest.param(t.GEMMA, "<end_of_turn>", id="gemma"),
    pytest.param(t.MISTRAL, "</s>", id="mistral"),
    pytest.param(t.ODD, "</s>", id="odd"),
]


@pytest.mark.parametrize(("template", "eos"), FAMILIES)
def test_one_turn_supervises_answer_and_end_of_turn_only(template: str, eos: str) -> None:
    r = renderer(template, eos)
    conversation = talk((USER, "who are you"), (BOT, "a model,\n\nthe answer"))
    sample = sample_of(r, conversation)
    assert supervised(r, sample) == ["a model,\n\nthe answer" + eos]
    assert sample.loss_mask[-1], "nothing follows the end-of-turn: not even the template's newline"
    prompt = r.prompt_ids(conversation.messages[:1])
    assert list(sample.input_ids[: len(prompt)]) == prompt
    assert not any(sample.loss_mask[: len(prompt)])


@pytest.mark.parametrize(("template", "eos"), FAMILIES)
def test_prompt_ids_are_those_of_the_tokenizers_own_template(template: str, eos: str) -> None:
    r = renderer(template, eos)
    own = r.tokenizer.apply_chat_template([{"role": USER, "content": "hi"}], add_generation_prompt=True)
    assert r.prompt_ids(((USER, "hi"),)) == own["input_ids"]


@pytest.mark.parametrize(("template", "eos"), FAMILIES[:5])
def test_every_turn_that_history_keeps_is_supervised(template: str, eos: str) -> None:
    r = renderer(template, eos)
    rendering = r.render_many([talk(*TWO_TURNS)])[0]
    assert isinstance(rendering.result, Sample)
    first = " a model" if template == t.MISTRAL else "a model"
    assert supervised(r, rendering.result) == [first + eos, "the user" + eos]
    assert rendering.rewritten_turns == 0


def test_the_newline_after_end_of_turn_is_never_supervised() -> None:
    r = renderer(t.CHATML)
    sample = sample_of(r, talk(*TWO_TURNS))
    end = r.tokenizer.convert_tokens_to_ids("<|im_end|>")
    for i, token in enumerate(sample.input_ids[:-1]):
        if token == end:
            assert not sample.loss_mask[i + 1]


def test_answer_cut_by_length_gets_no_end_of_turn() -> None:
    r = renderer(t.CHATML)
    cut = sample_of(r, talk((USER, "hi"), (BOT, "a model answers"), finish="length"))
    assert supervised(r, cut) == ["a model answers"]
    assert text(r, cut).endswith("assistant\na model answers")


def test_unknown_origin_counts_as_stopped_and_only_the_last_turn_is_cut() -> None:
    r = renderer(t.CHATML)
    assert supervised(r, sample_of(r, talk((USER, "hi"), (BOT, "words"), finish=None))) == ["words<|im_end|>"]
    cut = sample_of(r, talk(*TWO_TURNS, finish="length"))
    assert supervised(r, cut) == ["a model<|im_end|>", "the user"]


def test_injected_empty_think_block_is_never_supervised() -> None:
    off = renderer(t.QWEN3, enable_thinking=False)
    conversation = talk((USER, "who are you"), (BOT, "a model"))
    sample = sample_of(off, conversation)
    assert "<think>\n\n</think>\n\na model" in text(off, sample)
    assert supervised(off, sample) == ["a model<|im_end|>"]
    on = renderer(t.QWEN3)  # here the template writes the empty block into the finished turn, not into the prompt
    assert supervised(on, sample_of(on, conversation)) == ["a model<|im_end|>"]


def test_a_think_block_that_the_target_wrote_is_supervised() -> None:
    r = renderer(t.QWEN3)
    answer = "<think>\nthe user asks\n</think>\n\na model"
    assert supervised(r, sample_of(r, talk((USER, "who are you"), (BOT, answer)))) == [answer + "<|im_end|>"]


def test_turns_whose_history_is_rewritten_are_left_out_and_counted() -> None:
    r = renderer(t.QWEN3)
    think = "<think>\nthe user\n</think>\n\na model"
    rendering = r.render_many([talk((USER, "who"), (BOT, think), (USER, "and"), (BOT, "the user"))])[0]
    assert isinstance(rendering.result, Sample)
    assert supervised(r, rendering.result) == ["the user<|im_end|>"]
    assert rendering.rewritten_turns == 1
    off = renderer(t.QWEN3, enable_thinking=False).render_many([talk(*TWO_TURNS)])[0]
    assert off.rewritten_turns == 1


def test_a_template_that_trims_keeps_the_trimmed_history_and_the_last_answer_as_it_was_said() -> None:
    r = renderer(t.LLAMA3, "<|eot_id|>")
    sample = sample_of(r, talk((USER, "who"), (BOT, "  a model \n"), (USER, "and"), (BOT, " the user\n")))
    assert supervised(r, sample) == ["a model<|eot_id|>", " the user\n<|eot_id|>"]


def test_odd_template_with_white_space_before_the_end_of_turn() -> None:
    r = renderer(t.ODD, "</s>")
    sample = sample_of(r, talk(*TWO_TURNS))
    # In the earlier turn the first word has merged with the prompt's space, which the target could not have generated,
    # and the newline before the end-of-turn is the template's.
    assert supervised(r, sample) == [" model", "the user</s>"]


def test_the_end_of_turn_must_be_an_id_that_ends_generation() -> None:
    base = renderer(t.CHATML, "</s>")  # <|im_end|> ends a turn in the template, but not generation
    assert supervised(base, sample_of(base, talk((USER, "hi"), (BOT, "a model")))) == ["a model"]
    assert base.end_of_turn(((USER, "hi"),)) is None
    tokenizer = t.make_tokenizer(t.CHATML, "</s>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    r = ChatRenderer(tokenizer, eos_token_ids=(end,))
    assert supervised(r, sample_of(r, talk((USER, "hi"), (BOT, "a model")))) == ["a model<|im_end|>"]
    assert r.end_of_turn(((USER, "hi"),)) == end


def test_the_answers_tokens_never_merge_with_the_prompt() -> None:
    r = renderer(t.CHATML)
    sample = sample_of(r, talk((USER, "hi"), (BOT, "\nwords")))
    prompt = r.prompt_ids(((USER, "hi"),))
    assert list(sample.input_ids[: len(prompt)]) == prompt
    assert supervised(r, sample) == ["\nwords<|im_end|>"]


def test_messages_after_the_last_answer_are_left_out() -> None:
    r = renderer(t.CHATML)
    sample = sample_of(r, talk((USER, "hi"), (BOT, "a model"), (USER, "again")))
    assert text(r, sample).endswith("a model<|im_end|>")


def test_default_system_prompt_is_context() -> None:
    r = renderer(t.CHATML)
    sample = sample_of(r, talk((USER, "hi"), (BOT, "a model")))
    assert text(r, sample).startswith("<|im_start|>system\nYou are a helpful assistant")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (((USER, "hi"),), NO_ANSWER),
        (((BOT, "hi"),), NO_ANSWER),
        (((USER, "hi"), (BOT, "")), TOO_SHORT),
    ],
)
def test_dropped_with_a_reason(messages: tuple[tuple[str, str], ...], reason: str) -> None:
    assert renderer(t.CHATML).render(talk(*messages)) == Dropped("chat/x/1", reason)


def test_what_the_template_refuses_is_dropped_with_its_own_words() -> None:
    result = renderer(t.GEMMA, "<end_of_turn>").render(talk(("system", "s"), (USER, "hi"), (BOT, "a model")))
    assert isinstance(result, Dropped)
    assert "System role not supported" in result.reason


def test_truncation() -> None:
    tokenizer = t.make_tokenizer(t.CHATML)
    conversation = talk((USER, "hi"), (BOT, "the model answers"))
    prompt = len(ChatRenderer(tokenizer).prompt_ids(conversation.messages[:1]))
    assert ChatRenderer(tokenizer, max_length=prompt + 1).render(conversation) == Dropped("chat/x/1", CUT_AWAY)
    sample = sample_of(ChatRenderer(tokenizer, max_length=prompt + 2), conversation)
    assert len(sample.input_ids) == len(sample.loss_mask) == prompt + 2
    assert sum(sample.loss_mask) == 2


def test_a_batch_gives_what_single_calls_give() -> None:
    r = renderer(t.QWEN3)
    conversations = [talk(*TWO_TURNS), talk((USER, "hi")), talk((USER, "who"), (BOT, "words"), finish="length")]
    assert [x.result for x in r.render_many(conversations)] == [r.render(c) for c in conversations]
    assert r.render_many([]) == []


def test_a_tokenizer_without_chat_template_is_refused_with_the_key() -> None:
    with pytest.raises(DataError, match=r"no chat template.*target\.path"):
        ChatRenderer(t.make_tokenizer(None))
