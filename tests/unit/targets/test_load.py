from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspec.config.schema import TargetConfig
from deepspec.errors import ConfigError, TargetError
from deepspec.targets.load import layer_ids, load_target, load_tokenizer
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
