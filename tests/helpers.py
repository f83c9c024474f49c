"""Tiny random targets and a tiny tokenizer, for every part's tests."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from deepspec.targets.target import Target

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "phi3": {"pad_token_id": 0, "sliding_window": None, "original_max_position_embeddings": 512},
    "olmo2": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2},
    "gemma2": {"sliding_window": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 8, "final_logit_softcapping": 2.0},
    "gemma4_text": {
        "sliding_window": 8,
        "final_logit_softcapping": 2.0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "global_head_dim": 16,
    },
    "granite": {"embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 8},
}
"""What each family needs beside the common sizes; scales and caps are chosen so that forgetting them shows."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
MASK_TOKEN_ID = 3
EOS_TOKEN_ID = 2
_CHARACTERS = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"()[]{}<>+-*/=_#|@&"


def tiny_config(family: str = "llama", *, vocab: int = 97, layers: int = 6, hidden: int = 32, **over: Any) -> Any:
    """Return the configuration of a tiny model of ``family`` (a model type of transformers)."""
    values: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": max(8, hidden // 4),
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    if family in ("olmo2", "phi3", "cohere", "cohere2", "granite"):
        values.pop("head_dim")
    values |= FAMILIES.get(family, {})
    if family == "gemma4_text":
        values["vocab_size_per_layer_input"] = vocab
    return AutoConfig.for_model(family, **(values | over))


def tiny_model(
    family: str = "llama", vocab: int = 97, layers: int = 6, hidden: int = 32, seed: int = 0, **over: Any
) -> Any:
    """Return a tiny random causal LM in fp32; every norm's weight differs from 1."""
    torch.manual_seed(seed)
    config = tiny_config(family, vocab=vocab, layers=layers, hidden=hidden, **over)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.add_(0.3 * torch.rand_like(parameter))
    return model


def tiny_target(
    family: str = "llama", vocab: int = 97, layers: int = 6, hidden: int = 32, seed: int = 0, **over: Any
) -> Target:
    """Return a tiny random target with ``tiny_tokenizer`` where its vocabulary is large enough."""
    model = tiny_model(family, vocab, layers, hidden, seed, **over)
    tokenizer = tiny_tokenizer() if vocab >= len(SPECIALS) + len(_CHARACTERS) else None
    return Target(model, tokenizer, name=f"tiny-{family}")


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters below 97 ids, with ChatML's special tokens and a mask token."""
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *_CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="#"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=chat_template,
        pad_token=SPECIALS[0],
        eos_token=SPECIALS[EOS_TOKEN_ID],
        unk_token="#",
        additional_special_tokens=[SPECIALS[1], SPECIALS[3]],
        clean_up_tokenization_spaces=False,
    )
