"""The files beside the weights: calibration, copies of the target's embedding and head, shards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspec.drafters.dflash.config import DFlashConfig
from deepspec.errors import DeepSpecError, PackageError
from deepspec.export.package import native_package, staged, write_checksums, write_package
from deepspec.inference.calibration import calibration_problems
from deepspec.inference.package import is_package, load_package
from deepspec.inference.package_config import CALIBRATION, CONFIG, INDEX, SELFCHECK, read_config
from deepspec.inference.proposers import DrafterProposer
from deepspec.inference.sampling import Sampler, SamplerSettings
from deepspec.targets.target import Target
from tests.unit.drafters.small import only
from tests.unit.export.tiny import (
    edit_config,
    edit_tensors,
    make_drafter,
    make_package,
    make_target,
    tiny_calibration,
)


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


# ---- calibration


def test_the_decoders_threshold_applies_the_temperatures(tmp_path: Path, target: Target) -> None:
    package = make_package(tmp_path / "p", "fp16", target, whole=True)
    assert read_config(package).calibration == CALIBRATION
    drafter = load_package(package, target)
    temperatures = torch.tensor(tiny_calibration(4).temperatures)
    proposer = DrafterProposer(drafter)
    proposer.start(20)
    proposer.extend(only(torch.randn(9, 96, generator=torch.Generator().manual_seed(1))))
    whole = proposer.propose(5, 4, Sampler(SamplerSettings()))
    assert whole is not None
    assert whole.confidence_logits is not None
    survival = (whole.confidence_logits / temperatures).sigmoid().cumprod(dim=0)
    for threshold in (0.9, 0.5, 0.2, 0.05):
        limited = DrafterProposer(drafter, threshold)
        limited.start(20)
        limited.extend(only(torch.randn(9, 96, generator=torch.Generator().manual_seed(1))))
        found = limited.propose(5, 4, Sampler(SamplerSettings()))
        assert found is not None
        assert len(found.tokens) == int((survival >= threshold).sum())


def test_a_package_without_them_says_so(tmp_path: Path, target: Target) -> None:
    package = make_package(tmp_path / "p", "fp16", target)
    stored = json.loads((package / CONFIG).read_text())
    assert (stored["calibration"], stored["selfcheck"], stored["weights"]) == (None, None, "model.safetensors")
    assert load_package(package, target, self_check=True).confidence_temperatures is None


@pytest.mark.parametrize("name", [CALIBRATION, SELFCHECK])
@pytest.mark.parametrize("forgotten", ["file", "checksum"])
def test_a_missing_file_is_refused_by_name(tmp_path: Path, target: Target, name: str, forgotten: str) -> None:
    package = make_package(tmp_path / "p", "fp16", target, whole=True)
    if forgotten == "file":
        (package / name).unlink()
        write_checksums(package)
    else:
        stated = json.loads((package / "checksums.json").read_text())
        del stated["sha256"][name]
        (package / "checksums.json").write_text(json.dumps(stated))
    with pytest.raises(PackageError, match=name):
        load_package(package, target)


@pytest.mark.parametrize("name", [CALIBRATION, SELFCHECK])
def test_a_file_that_the_config_no_longer_names_is_refused(tmp_path: Path, target: Target, name: str) -> None:
    package = make_package(tmp_path / "p", "fp16", target, whole=True)
    edit_config(package, lambda config: config.update({name.removesuffix(".json"): None}), header_too=True)
    with pytest.raises(PackageError, match=f"disagree on whether there is a {name}"):
        load_package(package, target)


def test_a_calibration_without_a_confidence_head_is_refused(tmp_path: Path, target: Target) -> None:
    drafter, config = make_drafter(target, config=DFlashConfig(num_layers=1, gamma=4))
    with staged(tmp_path / "p") as folder:
        write_package(folder, *native_package(drafter, config, target.info, "fp16"), tiny_calibration(4))
    with pytest.raises(PackageError, match="no confidence head"):
        load_package(tmp_path / "p", target)


@pytest.mark.parametrize(
    ("message", "over"),
    [
        ("temperatures has 3 entries, config.json says gamma=4", {"temperatures": (1.0, 1.0, 1.0)}),
        ("temperatures[1]=0.0 must be above 0", {"temperatures": (1.0, 0.0, 1.0, 1.0)}),
        ("kept[0]=91 must be in 0 .. 90", {"kept": (91, 0, 0, 0)}),
        ("rounds[2]=81 is more than the 80", {"rounds": (90, 80, 81, 60)}),
        ("ece_after[0]=1.5 must lie between 0 and 1", {"ece_after": (1.5, 0.1, 0.1, 0.1)}),
        ("brier_before[3] is null, but rounds[3]=60", {"brier_before": (0.1, 0.1, 0.1, None)}),
        ("prompts=0 must be at least 1", {"prompts": 0}),
        ("decoding_temperature=-1.0 must not", {"decoding_temperature": -1.0}),
    ],
)
def test_a_calibration_that_cannot_be_is_refused(message: str, over: dict[str, Any]) -> None:
    assert list(calibration_problems(tiny_calibration(4), 4)) == []
    found = list(calibration_problems(replace(tiny_calibration(4), **over), 4))
    assert any(message in problem for problem in found), found


@pytest.mark.parametrize("value", ["NaN", "Infinity", "true", '"1"'])
def test_a_temperature_that_is_no_number_is_refused(tmp_path: Path, target: Target, value: str) -> None:
    package = make_package(tmp_path / "p", "fp16", target, whole=True)
    path = package / CALIBRATION
    path.write_text(path.read_text().replace("0.75", value))
    write_checksums(package)
    with pytest.raises(PackageError, match=r"calibration\.json.*temperatures\[1\]"):
        load_package(package, target)


# ---- copies of embedding and head


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("profile", ["bf16", "fp16_int8"])
def test_copies_are_stored_once_and_the_targets_own_are_used(tmp_path: Path, tied: bool, profile: Any) -> None:
    target = make_target(tie_word_embeddings=tied)
    package = make_package(tmp_path / "p", profile, target, include_embeddings=True)
    names: dict[str, torch.Tensor] = {}
    edit_tensors(package, names.update)
    assert ("embed_tokens.weight" in names, "lm_head.weight" in names) == (True, not tied)
    assert json.loads((package / CONFIG).read_text())["stored_embeddings"] == {"tied": tied, "head_bias": False}
    drafter = load_package(package, target)
    assert drafter.head is target.head
    assert not any(name.startswith(("embed", "lm_head")) for name in drafter.state_dict())


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_copy_that_is_not_the_targets_is_refused_with_its_row(tmp_path: Path, name: str) -> None:
    target = make_target(tie_word_embeddings=False)
    package = make_package(tmp_path / "p", "fp16", target, include_embeddings=True)
    edit_tensors(package, lambda tensors: tensors[name][41].mul_(1.01))
    with pytest.raises(PackageError, match=f"{name}: row 41 is not the target's"):
        load_package(package, target)


def test_a_target_in_another_precision_has_the_same_rows(tmp_path: Path) -> None:
    target = make_target()
    package = make_package(tmp_path / "p", "fp16", target, include_embeddings=True)
    load_package(package, SimpleNamespace(info=target.info, head=target.head.to(dtype=torch.bfloat16)))
    other = SimpleNamespace(info=replace(target.info, fingerprint="other"), head=make_target(seed=9).head)
    load_package(package, other, allow_other_target=True)  # its rows differ, and nobody claims that they do not


def test_a_tied_copy_for_an_untied_target_is_refused(tmp_path: Path) -> None:
    target = make_target()
    package = make_package(tmp_path / "p", "fp16", target, include_embeddings=True)
    untied = replace(target.head, weight=target.head.weight.clone())
    with pytest.raises(PackageError, match=r"stored_embeddings\.tied=True"):
        load_package(package, SimpleNamespace(info=target.info, head=untied))


def test_the_heads_bias_is_stored_and_compared(tmp_path: Path) -> None:
    target = make_target()
    head = replace(target.head, bias=torch.linspace(-1, 1, 97))
    bound = SimpleNamespace(info=target.info, head=head)
    drafter, config = make_drafter(target)
    drafter.bind(head)
    with staged(tmp_path / "p") as folder:
        write_package(folder, *native_package(drafter, config, target.info, "fp16", include_embeddings=True))
    load_package(tmp_path / "p", bound)
    with pytest.raises(PackageError, match=r"lm_head\.bias: row 0"):
        load_package(tmp_path / "p", target)


def test_rows_that_fp16_cannot_hold_are_refused_by_name() -> None:
    target = make_target()
    drafter, config = make_drafter(target)
    drafter.bind(replace(target.head, weight=target.head.weight * 1e7, embedding=target.head.embedding))
    with pytest.raises(DeepSpecError, match=r"lm_head\.weight holds"):
        native_package(drafter, config, target.info, "fp16", include_embeddings=True)


# ---- shards


def test_shards_hold_what_one_file_holds(tmp_path: Path, target: Target) -> None:
    one = make_package(tmp_path / "one", "fp16", target, whole=True)
    many = make_package(tmp_path / "many", "fp16", target, whole=True, shard_bytes=10_000)
    assert read_config(many).weights == INDEX
    assert not (many / "model.safetensors").exists()
    assert is_package(many)
    sizes = [path.stat().st_size for path in many.glob("model-*")]
    assert len(sizes) > 3
    first, second = (load_package(package, target, self_check=True).state_dict() for package in (one, many))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../model-00001-of-00002.safetensors", "is not a name like"),
        ("/etc/passwd", "is not a name like"),
        ("model-00009-of-00009.safetensors", "not one of 9 files"),
        (7, "is not a name like"),
    ],
)
def test_an_index_that_names_other_files_is_refused(tmp_path: Path, target: Target, name: Any, message: str) -> None:
    package = make_package(tmp_path / "p", "fp16", target, shard_bytes=10_000)
    index = json.loads((package / INDEX).read_text())
    index["weight_map"]["norm.weight"] = name
    (package / INDEX).write_text(json.dumps(index))
    write_checksums(package)
    with pytest.raises(PackageError, match=message):
        load_package(package, target)


def test_a_shard_that_leads_out_of_the_folder_is_refused(tmp_path: Path, target: Target) -> None:
    package = make_package(tmp_path / "p", "fp16", target, shard_bytes=10_000)
    shard = next(package.glob("model-00001-*"))
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PackageError, match="leads out of its folder"):
        load_package(package, target)


def test_a_shard_without_a_checksum_is_refused(tmp_path: Path, target: Target) -> None:
    package = make_package(tmp_path / "p", "fp16", target, shard_bytes=10_000)
    stated = json.loads((package / "checksums.json").read_text())
    del stated["sha256"][next(package.glob("model-00001-*")).name]
    (package / "checksums.json").write_text(json.dumps(stated))
    with pytest.raises(PackageError, match=r"no checksum of model-00001"):
        load_package(package, target)
