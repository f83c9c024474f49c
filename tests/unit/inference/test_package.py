"""Loading a package: what it gives back, and every damage that must be named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspec.contracts import Batch
from deepspec.errors import PackageError
from deepspec.export.package import write_checksums
from deepspec.export.quantise import quantise_rows
from deepspec.inference.decoder import SpeculativeDecoder
from deepspec.inference.package import is_package, load_package
from deepspec.inference.package_config import CONFIG, read_config
from deepspec.inference.proposers import DrafterProposer, PlainProposer
from deepspec.nn.int8 import Int8Linear
from deepspec.targets.layers import OFFSETS, from_project, to_project
from deepspec.targets.target import Target
from tests.unit.drafters.small import only
from tests.unit.export.tiny import (
    LAYER_IDS,
    ForcedLogits,
    copy_package,
    edit_config,
    edit_tensors,
    make_drafter,
    make_package,
    make_target,
)

PROFILES = ("bf16", "fp16", "fp16_int8")
MATRIX = "layers.0.mlp.up_proj.weight"  # [48, 32] int8 with a scale
FLOAT = "fc.weight"  # [32, 96] fp16


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(1)
    return make_target()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    return make_package(tmp_path_factory.mktemp("packages") / "int8", "fp16_int8", target)


@pytest.fixture
def copy(package: Path, tmp_path: Path) -> Path:
    return copy_package(package, tmp_path / "copy")


def block_logits(drafter: Any, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Draft behind ``hidden`` [t, C*D]; ``tokens`` are the anchor and the K forced tokens. Returns [K, V]."""
    state = drafter.start(len(hidden) + 8)
    drafter.extend(state, only(hidden))
    sampler = ForcedLogits(tokens[1:])
    drafter.propose(state, tokens[0], len(tokens) - 1, sampler)
    return torch.stack(sampler.logits)


# ---- what comes back


@pytest.mark.parametrize("profile", PROFILES)
def test_round_trip(profile: Any, tmp_path: Path, target: Target) -> None:
    drafter, _ = make_drafter(target)
    loaded = load_package(make_package(tmp_path / "p", profile, target), target)
    assert is_package(tmp_path / "p")
    assert loaded.conventions == drafter.conventions
    own = drafter.state_dict()
    for name, value in loaded.state_dict().items():
        step = 2**-8 if profile == "bf16" else 2**-11
        if profile == "fp16_int8" and "_proj" in name and name.startswith("layers."):
            assert bool(((value - own[name]).abs() <= own[name].abs().amax(1, keepdim=True) / 127 * 0.51).all())
        else:
            assert bool(((value - own[name]).abs() <= step * own[name].abs() + 1e-7).all())
    hidden = torch.randn(9, 96)
    before, after = (block_logits(d, hidden, [5, 1, 2, 3, 4]) for d in (drafter, loaded))
    assert (before - after).norm() < 0.05 * before.norm()


@pytest.mark.parametrize("profile", PROFILES)
def test_round_trip_of_a_reduced_vocabulary(profile: Any, tmp_path: Path, target: Target) -> None:
    drafter, _ = make_drafter(target, draft_vocab_size=25)
    package = make_package(tmp_path / "p", profile, target, draft_vocab_size=25)
    assert json.loads((package / CONFIG).read_text())["draft_vocab_size"] == 25
    loaded = load_package(package, target)
    assert loaded.d2t is not None
    assert drafter.d2t is not None
    assert loaded.d2t.dtype == torch.int64
    assert loaded.d2t.equal(drafter.d2t)
    hidden = torch.randn(9, 96)
    before, after = (block_logits(d, hidden, [5, 1, 2, 3, 4]) for d in (drafter, loaded))
    assert before.shape == (4, 25)
    assert (before - after).norm() < 0.05 * before.norm()
    if profile == "fp16":  # what fp16 holds, it gives back
        drafter.load_state_dict({n: t.half().float() if t.is_floating_point() else t for n, t in _state(drafter)})
        assert block_logits(drafter, hidden, [5, 1, 2, 3, 4]).equal(after)
    plain = SpeculativeDecoder(target, PlainProposer()).generate([5, 17, 42], 12).tokens
    assert SpeculativeDecoder(target, DrafterProposer(loaded)).generate([5, 17, 42], 12).tokens == plain


def _state(drafter: Any) -> list[tuple[str, torch.Tensor]]:
    return list(drafter.state_dict().items())


@pytest.mark.parametrize(
    ("value", "message"), [(-1, "must rise|is not in"), (97, r"token 97 is not in 0 \.\. 96"), (None, "int64")]
)
def test_a_damaged_vocabulary_is_refused(tmp_path: Path, target: Target, value: int | None, message: str) -> None:
    package = make_package(tmp_path / "p", "fp16", target, draft_vocab_size=25)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if value is None:
            tensors["d2t"] = tensors["d2t"].int()
        else:
            tensors["d2t"][-1] = value - 24

    edit_tensors(package, edit)
    with pytest.raises(PackageError, match=message):
        load_package(package, target)


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path, target: Target) -> None:
    package = make_package(tmp_path / "p", "fp16", target, draft_vocab_size=25)
    edit_config(package, lambda config: config.update(draft_vocab_size=26), header_too=True)
    with pytest.raises(PackageError, match="draft_vocab_size=26 contradicts the drafter section, which has 25"):
        load_package(package, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_int8_package_runs_in_every_precision(package: Path, target: Target, dtype: torch.dtype) -> None:
    hidden = torch.randn(9, 96)
    want = block_logits(load_package(package, target), hidden, [5, 1, 2, 3, 4])
    bound = SimpleNamespace(info=target.info, head=target.head.to(dtype=dtype))
    drafter = load_package(package, bound)
    assert next(drafter.parameters()).dtype == dtype
    got = block_logits(drafter, hidden.to(dtype), [5, 1, 2, 3, 4])
    assert (got - want).norm() < (0.05 if dtype == torch.bfloat16 else 0.01) * want.norm()
    int8 = [m for m in drafter.modules() if isinstance(m, Int8Linear)]
    assert len(int8) in ((0, 14) if dtype == torch.bfloat16 else (0,))


def test_drafts_beyond_the_training_length_use_the_right_positions(tmp_path: Path) -> None:
    """Nothing of the training length is in a package: position 200 drafts as a reference with explicit positions."""
    target = make_target()
    package = make_package(tmp_path / "p", "fp16", target)
    assert read_config(package).max_position_embeddings == 256
    drafter: Any = load_package(package, target)
    length, ids = 200, torch.randint(3, 96, (1, 205))
    hidden = torch.randn(1, 205, 96)
    ones = torch.ones(1, 205, dtype=torch.int64)
    batch = Batch(ids, ones, torch.arange(205)[None], ones.bool(), torch.tensor([[length]]), torch.tensor([[True]]))
    states = drafter.block_states(batch, hidden)[0, 0]  # [K, D]
    tokens = ids[0, length : length + 5].tolist()
    markov = drafter.markov_head
    want = target.head.logits(states) + markov.markov_w1.weight[tokens[:-1]] @ markov.markov_w2.weight.T
    got = block_logits(drafter, hidden[0, :length], tokens)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", **SCALING}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", **SCALING}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 1e6},
    ],
    ids=["new", "old", "old type", "plain"],
)
def test_rotary_base_and_scaling_survive(rope: dict[str, Any], tmp_path: Path) -> None:
    target = make_target(**rope)
    loaded: Any = load_package(make_package(tmp_path / "p", "bf16", target), target)
    model: Any = target.model
    positions = torch.arange(0, 250, 7)
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions[None])
    got = loaded.rope(positions)
    torch.testing.assert_close(got[0], cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(got[1], sin[0], rtol=0, atol=1e-6)


NUMBERING = {
    "transformers": (2, 3, 5),
    "vllm": (2, 3, 5),
    "speculators": (2, 3, 5),
    "sglang": (1, 2, 4),
    "published": (1, 2, 4),
    "zlab": (1, 2, 4),
}
"""What each project writes for the outputs of the layers 1, 2 and 4."""


def test_layer_ids_survive_every_projects_numbering(package: Path) -> None:
    assert json.loads((package / CONFIG).read_text())["target_layer_ids"] == [1, 2, 4]
    ids = read_config(package).target_layer_ids
    assert ids == LAYER_IDS == (1, 2, 4)
    assert {project: to_project(ids, project) for project in OFFSETS} == NUMBERING
    assert all(from_project(written, project) == ids for project, written in NUMBERING.items())


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_the_targets_and_stored_nowhere(tied: bool, tmp_path: Path) -> None:
    target = make_target(tie_word_embeddings=tied)
    package = make_package(tmp_path / "p", "fp16_int8", target)
    drafter = load_package(package, target)
    assert drafter.head is target.head
    assert drafter.head.tied == tied
    model: Any = target.model
    assert drafter.head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert not any(name.startswith(("embed", "lm_head")) for name in drafter.state_dict())


def test_a_quantised_target_keeps_a_float_drafter(tmp_path: Path) -> None:
    plain = make_target()
    package = make_package(tmp_path / "p", "fp16", plain)
    quantised = make_target()
    mlps: list[Any] = [layer.mlp for layer in quantised.layers]
    for mlp in mlps:
        mlp.up_proj = Int8Linear(*quantise_rows(mlp.up_proj.weight))
    bound = Target(quantised.model, name="tiny")
    assert bound.info.fingerprint != plain.info.fingerprint
    with pytest.raises(PackageError, match="fingerprint"):
        load_package(package, bound)
    drafter = load_package(package, bound, allow_other_target=True)
    assert not any(isinstance(m, Int8Linear) for m in drafter.modules())
    assert all(t.dtype == torch.float32 for t in drafter.state_dict().values())


def test_a_16_bit_target_keeps_an_int8_drafter(package: Path) -> None:
    target = make_target()
    loaded = load_package(package, SimpleNamespace(info=target.info, head=target.head.to(dtype=torch.float16)))
    weight = loaded.state_dict()[MATRIX].float()
    steps = weight / (weight.abs().amax(1, keepdim=True) / 127)
    assert (steps - steps.round()).abs().max() < 0.1  # still on the INT8 grid


def test_another_revision_is_refused_unless_allowed(package: Path, target: Target) -> None:
    other = SimpleNamespace(info=replace(target.info, fingerprint="other"), head=target.head)
    with pytest.raises(PackageError, match=r"fingerprint is 'other'.*allow_other_target"):
        load_package(package, other)
    assert load_package(package, other, allow_other_target=True).conventions.gamma == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 98),
        ("hidden_size", 64),
        ("num_layers", 7),
        ("model_type", "qwen3"),
        ("logit_scale", 0.5),
        ("logit_softcap", 30.0),
        ("embed_scale", 8.0),
        ("head_dim", 8),
    ],
)
def test_a_target_of_another_shape_is_always_refused(package: Path, target: Target, name: str, value: Any) -> None:
    other = SimpleNamespace(info=replace(target.info, **{name: value}), head=target.head)
    with pytest.raises(PackageError, match=rf"{name} is {value!r}"):
        load_package(package, other, allow_other_target=True)


def test_a_target_whose_head_has_other_rows_is_refused(package: Path, target: Target) -> None:
    head = replace(target.head, weight=target.head.weight[:-1])
    with pytest.raises(PackageError, match=r"head is \[96, 32\]"):
        load_package(package, SimpleNamespace(info=target.info, head=head))


# ---- contradictions: header and checksums agree, so that the rules have to catch them


def shift_ids(config: dict[str, Any]) -> None:
    config["target_layer_ids"] = [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("fc.weight", shift_ids),  # the projection was built for three layers
        ("block_size", lambda c: c.update(gamma=5)),
        ("block_size", lambda c: c.update(block_size=5)),
        ("gamma", lambda c: c.update(gamma=5, block_size=5)),
        ("block_layout", lambda c: c.update(block_layout="fill_in", anchor_predicts=False, block_size=5)),
        ("anchor_predicts", lambda c: c.update(anchor_predicts=False)),
        ("target_layer_ids", lambda c: c.update(target_layer_ids=[1, 2, 5])),  # the last layer
        ("target_layer_ids", lambda c: c.update(target_layer_ids=[2, 1, 4])),
        ("target_layer_ids", lambda c: c.update(target_layer_ids=[1, 1, 4])),
        ("mask_token_id", lambda c: c.update(mask_token_id=97)),
        ("sliding_window", lambda c: c.update(sliding_window=8)),
        ("is_causal", lambda c: c.update(is_causal=True)),
        ("max_position_embeddings", lambda c: c.update(max_position_embeddings=32)),
        ("rope_parameters", lambda c: c["rope_parameters"].update(rope_theta=5e5)),
        ("vocab_size", lambda c: c.update(vocab_size=98)),
        ("dtype", lambda c: c.update(dtype="bfloat16")),
        ("quantisation", lambda c: c.update(quantisation=None)),
        (MATRIX, lambda c: c["quantisation"]["mlp"]["tensors"].remove(MATRIX)),
        ("norm.weight", lambda c: c["quantisation"]["mlp"]["tensors"].append("norm.weight")),
        ("twice", lambda c: c["quantisation"]["mlp"]["tensors"].append(MATRIX)),
        ("num_layers", lambda c: c["drafter"].update(num_layers=10**9)),
        ("layers.2.mlp.up_proj.weight", lambda c: c["drafter"].update(num_layers=3)),
        ("markov_head.markov_w1.weight", lambda c: c["drafter"].update(markov_rank=9)),
        ("_target_", lambda c: c["drafter"].update(_target_="os.system")),
        ("_target_", lambda c: c["drafter"].update(_target_="tests.unit.export.tiny.make_target")),
        ("markov_head", lambda c: c["drafter"].update(markov_head="rnn")),
        ("auto_map", lambda c: c.update(auto_map={"AutoModel": "evil.Model"})),
        ("weights", lambda c: c.update(weights="model.safetensors.index.json")),
        ("weights", lambda c: c.update(weights="../model.safetensors")),
        ("calibration.json", lambda c: c.update(calibration="calibration.json")),  # which is not there
        ("selfcheck.json", lambda c: c.update(selfcheck="selfcheck.json")),
        ("embed_tokens.weight", lambda c: c.update(stored_embeddings={"tied": True, "head_bias": False})),
        ("version", lambda c: c.update(version=1)),
        ("version", lambda c: c.update(version=3)),
        ("format", lambda c: c.update(format="other")),
    ],
)
def test_contradictions_are_refused_although_config_and_header_agree(
    copy: Path, target: Target, name: str, edit: Callable[[dict[str, Any]], None]
) -> None:
    edit_config(copy, edit, header_too=True)
    with pytest.raises(PackageError) as error:
        load_package(copy, target)
    assert name in str(error.value).replace(str(copy), "")  # the folder's own name says nothing


def test_a_scale_of_zero_is_refused(copy: Path, target: Target) -> None:
    edit_tensors(copy, lambda tensors: tensors[f"{MATRIX}_scale"].zero_())
    with pytest.raises(PackageError, match=f"{MATRIX}_scale"):
        load_package(copy, target)


def test_an_unknown_tensor_is_refused(copy: Path, target: Target) -> None:
    edit_tensors(copy, lambda tensors: tensors.update(extra=torch.ones(1)))
    with pytest.raises(PackageError, match="tensor extra is unknown"):
        load_package(copy, target)


# ---- files


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "checksums.json"])
def test_a_missing_file_is_refused(copy: Path, target: Target, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(PackageError, match=name):
        load_package(copy, target)


@pytest.mark.parametrize("name", ["config.json", "checksums.json"])
@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 5000, '{"a": NaN'])
def test_malformed_json_is_refused(copy: Path, target: Target, name: str, text: str) -> None:
    (copy / name).write_text(text)
    if name == "config.json":
        write_checksums(copy)
    with pytest.raises(PackageError, match=name):
        load_package(copy, target)


def test_an_endless_config_is_not_read(copy: Path, target: Target) -> None:
    (copy / "config.json").write_text(" " * (1 << 20) + "{}")
    write_checksums(copy)
    with pytest.raises(PackageError, match="larger than"):
        load_package(copy, target)


def test_cut_weights_are_refused(copy: Path, target: Target) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    write_checksums(copy)
    with pytest.raises(PackageError, match=r"model\.safetensors cannot be read"):
        load_package(copy, target)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "", "..", "a/b", "a\\b"])
def test_names_that_lead_out_of_the_folder_are_refused(copy: Path, target: Target, name: str) -> None:
    checksums = json.loads((copy / "checksums.json").read_text())
    checksums["sha256"][name] = "0" * 64
    (copy / "checksums.json").write_text(json.dumps(checksums))
    with pytest.raises(PackageError, match="not a file beside it"):
        load_package(copy, target)


def test_a_link_out_of_the_folder_is_refused(copy: Path, target: Target, tmp_path: Path) -> None:
    (copy / "model.safetensors").rename(tmp_path / "elsewhere")
    (copy / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PackageError, match="leads out of its folder"):
        load_package(copy, target)


def test_no_folder_is_refused(tmp_path: Path, target: Target) -> None:
    with pytest.raises(PackageError, match="not a folder"):
        load_package(tmp_path / "none", target)


LOAD = """
import sys
from types import SimpleNamespace
import torch
from deepspec.inference.package import load_package, read_config
from pathlib import Path
from deepspec.nn.head import FrozenHead
info = read_config(Path(sys.argv[1])).target
table = torch.randn(info.vocab_size, info.hidden_size)
load_package(sys.argv[1], SimpleNamespace(info=info, head=FrozenHead.from_tensors(info, table, table)))
tops = {name.split(".")[0] for name in sys.modules}
parts = {name.split(".")[1] for name in sys.modules if name.startswith("deepspec.")}
print(sorted(tops & {"deepspeed", "hydra", "omegaconf", "datasets", "wandb", "bitsandbytes"}))
print(sorted(parts & {"export", "config", "engine", "checkpoint", "features", "data", "evaluation", "scheduling"}))
"""


def test_loading_imports_no_training_dependency(package: Path) -> None:
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(package)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "[]"]
