"""A tiny tokenizer, and chat templates written to imitate the habits of well-known families."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system
You are a helpful assistant<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Strips think blocks from history, writes an empty one before a last answer without one, and injects an empty one into
# the generation prompt when thinking is switched off.
QWEN3 = """{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content %}
{%- if m.role == 'assistant' %}
{%- set think = '' %}
{%- if '</think>' in content %}
{%- set think = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > last.user %}
{{- '<|im_start|>assistant\\n<think>\\n' + think + '\\n</think>\\n\\n' + content }}
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{% endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + content }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) }}"
    "{{ '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""

# Trims every content, marks turns in plain words, puts white space before the end-of-turn, and never says the role.
ODD = """{% for m in messages %}{{ 'Q: ' if m.role == 'user' else 'A: ' }}{{ m.content | trim }}
{{ '' if m.role == 'user' else eos_token }}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"""

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>",
]  # fmt: skip
TEXT = ["the user asks the assistant and the model answers with words", "system user assistant model think", "\n\n\n  "]


@cache
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    return tokenizer.to_str()


def make_tokenizer(template: str | None, eos: str = "<|im_end|>") -> Any:
    """Return a byte-level tokenizer of about 300 words with a chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()), bos_token="<s>", eos_token=eos, pad_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def tokenizer_for() -> Callable[..., Any]:
    return make_tokenizer


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer(CHATML)
