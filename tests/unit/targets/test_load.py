from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from deepspec.config.schema import TargetConfig
from deepspec.errors import ConfigError, TargetError
from deepspec.targets.load import fetch_target, layer_ids, load_target, load_tokenizer
from tests.helpers import EOS_TOKEN_ID, MASK_TOKEN_ID, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model(layers=6).bfloat16().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def config(folder: Path) -> TargetConfig:
    return TargetConfig(name="tiny", path=str(folder), mask_token_id=MASK_TOKEN_ID)


def test_loads_frozen_in_fp32_on_cpu(config: TargetConfig) -> None:
    target = load_target(config)
    assert target.head.weight.dtype == torch.float32
    assert load_target(replace(config, dtype="bf16")).head.weight.dtype == torch.bfloat16
    assert target.info.name == "tiny"
    assert target.info.eos_token_ids == (EOS_TOKEN_ID,)
    assert target.tokenizer.chat_template


def test_tokenizer_alone(config: TargetConfig) -> None:
    tokenizer, eos = load_tokenizer(config)
    assert eos == (EOS_TOKEN_ID,)
    assert tokenizer.decode(tokenizer("a 12\n").input_ids) == "a 12\n"


def test_layer_ids(config: TargetConfig) -> None:
    assert layer_ids(config, 6) == (1, 2, 3)
    assert layer_ids(replace(config, target_layer_ids=(-1, 2)), 6) == (-1, 2)
    with pytest.raises(ConfigError, match="last of the target's 6 layers"):
        load_target(replace(config, target_layer_ids=(1, 5)))


def test_missing_folder(config: TargetConfig, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such folder"):
        load_target(replace(config, path=str(tmp_path / "nowhere")))
    with pytest.raises(TargetError, match="no config.json"):
        load_target(replace(config, path=str(tmp_path)))


def test_hub_out_of_reach_says_what_to_do(config: TargetConfig) -> None:
    with pytest.raises(TargetError, match="cannot be reached.*local folder.*hf download Nobody/nothing-1B") as caught:
        load_target(replace(config, path="Nobody/nothing-1B"))
    assert "\n" not in str(caught.value)


class Hub:
    """Stands for the model hub: a repository of some files, or an error."""

    def __init__(self, cache: Path, files: list[str], error: Exception | None = None) -> None:
        self.cache, self.files, self.error = cache, files, error

    def snapshot_download(self, name: str, *, revision: str, allow_patterns: Any, ignore_patterns: Any) -> str:
        if self.error:
            raise self.error
        assert (name, revision) == ("org/model", "v2")
        for file in filter_repo_objects(
            self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns, key=str
        ):
            path = self.cache / file
            path.parent.mkdir(parents=True, exist_ok=True)
            shards = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
            path.write_text(json.dumps(shards))
        return str(self.cache)


OTHERS = ["config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "vocab.model"]
UNWANTED = ["pytorch_model.bin", "own.py", "onnx/model.safetensors", "consolidated.safetensors", "x.gguf"]
SHARDS = ["model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"]


@pytest.mark.parametrize("weights", [["model.safetensors"], SHARDS])
def test_fetching_takes_weights_config_and_tokenizer(
    config: TargetConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: list[str]
) -> None:
    hub = Hub(tmp_path, [*OTHERS, *UNWANTED, *weights])
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    config = replace(config, path="org/model", revision="v2")
    assert fetch_target(config) == tmp_path
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == {*OTHERS, *weights}
    fetch_target(replace(config, trust_remote_code=True))
    assert (tmp_path / "own.py").exists()


def test_fetching_a_local_folder_is_to_name_it(config: TargetConfig, folder: Path) -> None:
    assert fetch_target(config) == folder


def test_what_cannot_be_fetched_is_said(config: TargetConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config, path="org/model", revision="v2")
    with pytest.raises(TargetError, match="cannot be reached.*hf download org/model"):
        fetch_target(config)  # the real client, offline
    for files, missing in ((OTHERS + UNWANTED, "model.safetensors"), (SHARDS[:2], "model-2.safetensors")):
        monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(tmp_path, files).snapshot_download)
        with pytest.raises(TargetError, match=f"target.path=org/model: {missing} is not there"):
            fetch_target(config)
    full = Hub(tmp_path, [], OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", full.snapshot_download)
    with pytest.raises(OSError, match="No space left"):
        fetch_target(config)


@pytest.mark.parametrize("mask", [97, -1])
def test_mask_token_beyond_the_vocabulary(config: TargetConfig, mask: int) -> None:
    with pytest.raises(TargetError, match=f"target.mask_token_id={mask}.*97"):
        load_target(replace(config, mask_token_id=mask))


def test_encoder_decoder_is_refused(config: TargetConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(TargetError, match="encoder-decoder"):
        load_target(replace(config, path=str(tmp_path)))


def test_other_kinds_of_model_are_refused(config: TargetConfig, tmp_path: Path) -> None:
    for model_type in ("vit", "no_such_family"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(TargetError, match="not a causal LM"):
            load_target(replace(config, path=str(tmp_path)))


def test_code_of_the_model_runs_only_if_asked(config: TargetConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.M"}})
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OwnConfig: pass\nclass M: pass\n")
    with pytest.raises(TargetError, match="target.trust_remote_code=true"):
        load_target(replace(config, path=str(tmp_path)))
    assert not (tmp_path / "ran").exists()


def damaged(folder: Path, tmp_path: Path, change: str) -> Path:
    """Copy a target and cut its weights short, leave a tensor out, or give one another shape."""
    copy = Path(shutil.copytree(folder, tmp_path / "damaged"))
    file = copy / "model.safetensors"
    if change == "cut":
        file.write_bytes(file.read_bytes()[:1000])
        return copy
    tensors = load_file(file)
    name = "model.layers.2.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("cut", "its weights cannot be read"),
        ("missing", r"model\.layers\.2\.mlp\.up_proj\.weight are missing"),
        ("shape", r"model\.layers\.2\.mlp\.up_proj\.weight have other shapes than config\.json says"),
    ],
)
def test_damaged_weights_are_refused(
    config: TargetConfig, folder: Path, tmp_path: Path, change: str, says: str
) -> None:
    """transformers fills a gap with random numbers and a warning: such a target would train a useless drafter."""
    with pytest.raises(TargetError, match=says):
        load_target(replace(config, path=str(damaged(folder, tmp_path, change))))
