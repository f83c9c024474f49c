"""Number formats of packages: each comes back as it was written, keeps to itself, and every damage is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspec.engine.warm_start import warm_start
from deepspec.errors import PackageError
from deepspec.export.package import native_package, staged, write_package
from deepspec.export.quantise import Formats, quantise_rows
from deepspec.inference.decoder import SpeculativeDecoder
from deepspec.inference.package import load_package
from deepspec.inference.package_config import read_config
from deepspec.inference.profiles import PROFILES, Profile
from deepspec.inference.proposers import DrafterProposer, PlainProposer
from deepspec.nn.int8 import Int8DynamicLinear, Int8Linear
from deepspec.targets.target import Target
from tests.unit.drafters.small import only
from tests.unit.export.tiny import (
    ForcedLogits,
    copy_package,
    edit_config,
    edit_tensors,
    make_drafter,
    make_package,
    make_target,
)

QUANTISED: tuple[Profile, ...] = ("fp16_int8", "fp16_int8_full", "int8_dynamic", "int4_mlp")
UP, Q, FC = "layers.0.mlp.up_proj.weight", "layers.0.self_attn.q_proj.weight", "fc.weight"  # UP is [64, 32]
Tensors = dict[str, torch.Tensor]


def target_of(**over: Any) -> Target:
    """Return a target whose widths groups of 32 divide."""
    return make_target(intermediate_size=64, **over)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(1)
    return target_of()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory, target: Target) -> dict[Profile, Path]:
    folder = tmp_path_factory.mktemp("packages")
    return {profile: make_package(folder / profile, profile, target) for profile in QUANTISED}


def draft(drafter: Any, tokens: tuple[int, ...] = (5, 1, 2, 3, 4)) -> torch.Tensor:
    """Draft behind fixed features; ``tokens`` are the anchor and the K forced tokens. Returns [K, V]."""
    hidden = torch.randn(9, 96, generator=torch.Generator().manual_seed(0))
    state = drafter.start(17)
    drafter.extend(state, only(hidden))
    sampler = ForcedLogits(list(tokens[1:]))
    drafter.propose(state, tokens[0], len(tokens) - 1, sampler)
    return torch.stack(sampler.logits)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


# ---- what comes back

STORED: dict[Profile, dict[str, str]] = {
    "fp16_int8": {UP: "int8", Q: "int8", FC: "float16"},
    "fp16_int8_full": {UP: "int8", Q: "int8", FC: "int8", "markov_head.markov_w1.weight": "int8"},
    "int8_dynamic": {UP: "int8", Q: "int8", FC: "float16"},
    "int4_mlp": {UP: "uint8", Q: "int8", FC: "float16"},
}


@pytest.mark.parametrize("profile", QUANTISED)
def test_each_part_is_stored_as_its_profile_says(packages: dict[Profile, Path], profile: Profile) -> None:
    tensors: Tensors = {}
    edit_tensors(copy_package(packages[profile], packages[profile].with_name(f"{profile} read")), tensors.update)
    assert {name: str(tensors[name].dtype).removeprefix("torch.") for name in STORED[profile]} == STORED[profile]
    assert all(t.dtype == torch.float16 for n, t in tensors.items() if "norm" in n or "confidence" in n)
    config = read_config(packages[profile])
    assert set(config.quantisation) == set(PROFILES[profile].parts)
    assert {f"{name}_scale" for name in config.quantised} == {n for n in tensors if n.endswith("_scale")}


BOUNDS: dict[Profile, float] = {"fp16_int8": 0.05, "fp16_int8_full": 0.05, "int8_dynamic": 0.08, "int4_mlp": 0.3}


@pytest.mark.parametrize("profile", QUANTISED)
def test_each_profile_drafts_nearly_what_was_trained_and_decodes_losslessly(
    packages: dict[Profile, Path], target: Target, profile: Profile
) -> None:
    drafter, _ = make_drafter(target)
    loaded = load_package(packages[profile], target)
    assert 0 < relative(draft(loaded), draft(drafter)) < BOUNDS[profile]
    plain = SpeculativeDecoder(target, PlainProposer()).generate([5, 17, 42], 12).tokens
    assert SpeculativeDecoder(target, DrafterProposer(loaded)).generate([5, 17, 42], 12).tokens == plain


@pytest.mark.parametrize("profile", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_target_keeps_a_quantised_drafter(
    packages: dict[Profile, Path], target: Target, profile: Profile, dtype: torch.dtype
) -> None:
    """The drafter runs in the target's precision, on the numbers that its own package stores."""
    want = draft(load_package(packages[profile], target))
    bound: Any = SimpleNamespace(info=target.info, head=target.head.to(dtype=dtype))
    loaded = load_package(packages[profile], bound)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert relative(draft(loaded), want) < 0.06
    kinds = {type(m) for m in loaded.modules() if isinstance(m, Int8Linear | Int8DynamicLinear)}
    assert (Int8DynamicLinear in kinds) == (profile == "int8_dynamic")


@pytest.mark.parametrize("profile", ("fp16", *QUANTISED))
def test_an_int8_target_leaves_its_drafter_alone(profile: Profile, tmp_path: Path, target: Target) -> None:
    quantised = target_of()
    for layer in quantised.layers:
        mlp: Any = layer.mlp
        mlp.up_proj = Int8Linear(*quantise_rows(mlp.up_proj.weight))
    bound = Target(quantised.model, name="tiny")
    package = make_package(tmp_path / "p", profile, target)
    loaded = load_package(package, bound, allow_other_target=True)
    assert draft(loaded).equal(draft(load_package(package, target)))


def test_activations_are_really_rounded_and_training_goes_on_without(
    packages: dict[Profile, Path], target: Target
) -> None:
    """Both profiles store the same numbers; what differs is the rounding of activations."""
    dynamic = load_package(packages["int8_dynamic"], target)
    static = load_package(packages["fp16_int8"], target)
    assert sum(isinstance(m, Int8DynamicLinear) for m in dynamic.modules()) == 2 * 7
    assert 1e-3 < relative(draft(dynamic), draft(static)) < 0.08
    plain = load_package(packages["int8_dynamic"], target, multiplied_out=True)
    assert draft(plain).equal(draft(static))
    fresh, _ = make_drafter(target, seed=5)
    warm_start(fresh, str(packages["int8_dynamic"]), target)
    assert fresh.state_dict()[UP].equal(static.state_dict()[UP])


@pytest.mark.parametrize("profile", QUANTISED)
def test_q_k_and_v_stay_in_16_bits_together(profile: Profile, tmp_path: Path, target: Target) -> None:
    package = make_package(tmp_path / "p", profile, target, formats=Formats(qkv="16bit"))
    config = read_config(package)
    assert "qkv" not in config.quantisation
    assert not any("q_proj" in n or "k_proj" in n or "v_proj" in n for n in config.quantised)
    drafter, _ = make_drafter(target)
    torch.testing.assert_close(load_package(package, target).state_dict()[Q], drafter.state_dict()[Q].half().float())


def test_a_tensor_beyond_fp16_comes_back_and_never_runs_in_fp16(tmp_path: Path, target: Target) -> None:
    drafter, config = make_drafter(target)
    drafter.state_dict()["norm.weight"][0] = 98304.0  # 1.5 * 2^16, which bf16 holds
    with staged(tmp_path / "p") as folder:
        written = native_package(drafter, config, target.info, "fp16_int8", formats=Formats(overflow="bf16"))
        write_package(folder, *written)
    assert read_config(tmp_path / "p").bfloat16.tensors == ("norm.weight",)
    assert float(load_package(tmp_path / "p", target).state_dict()["norm.weight"][0]) == 98304.0
    half: Any = SimpleNamespace(info=target.info, head=target.head.to(dtype=torch.float16))
    loaded = load_package(tmp_path / "p", half)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert bool(draft(loaded).isfinite().all())
    with pytest.raises(PackageError, match=r"bfloat16 names norm\.weight, which fp16 cannot hold"):
        load_package(tmp_path / "p", half, dtype=torch.float16)


# ---- contradictions: config and header agree, so that the rules have to catch them


def drop_q(config: dict[str, Any]) -> None:
    config["quantisation"]["qkv"]["tensors"].remove(Q)


def swap(config: dict[str, Any]) -> None:
    """Call q's tensor one of the MLP."""
    drop_q(config)
    config["quantisation"]["mlp"]["tensors"].append(Q)


@pytest.mark.parametrize(
    ("profile", "name", "edit"),
    [
        ("int4_mlp", Q, drop_q),  # one of the three that servers fuse
        ("int4_mlp", Q, swap),
        ("int4_mlp", "quantisation.mlp.tensors lacks", lambda c: c["quantisation"].pop("mlp")),
        ("int4_mlp", "quantisation.mlp.group", lambda c: c["quantisation"]["mlp"].update(group=16)),
        ("int4_mlp", "quantisation.mlp.group", lambda c: c["quantisation"]["mlp"].update(group=None)),
        ("int4_mlp", "128 do not divide", lambda c: c["quantisation"]["mlp"].update(group=128)),
        ("int4_mlp", "quantisation.mlp.bits", lambda c: c["quantisation"]["mlp"].update(bits=8)),
        ("int4_mlp", "quantisation.qkv.bits", lambda c: c["quantisation"]["qkv"].update(bits=4)),
        ("int4_mlp", "quantisation.qkv.group", lambda c: c["quantisation"]["qkv"].update(group=32)),
        ("int4_mlp", "scheme", lambda c: c["quantisation"]["mlp"].update(scheme="int8_per_output_channel")),
        ("int4_mlp", "scale_dtype", lambda c: c["quantisation"]["mlp"].update(scale_dtype="float32")),
        ("int4_mlp", "symmetric", lambda c: c["quantisation"]["mlp"].update(symmetric=False)),
        ("int4_mlp", "profile", lambda c: c.update(profile="fp16_int8")),
        ("fp16_int8", "activations", lambda c: c["quantisation"]["mlp"].update(activations="int8_per_token")),
        ("fp16_int8", "activations", lambda c: c.update(profile="int8_dynamic")),
        ("int8_dynamic", "activations", lambda c: c.update(profile="fp16_int8")),
        ("fp16_int8", "quantisation.qkv", lambda c: c.update(profile="fp16")),
        ("fp16_int8", "quantisation.fusion", lambda c: c.update(profile="fp16_int8_full")),
        ("fp16_int8_full", "quantisation.markov", lambda c: c.update(profile="fp16_int8")),
        ("fp16_int8", "'tail'", lambda c: c["quantisation"].update(tail=c["quantisation"]["mlp"])),
        ("fp16_int8", UP, lambda c: c["bfloat16"]["tensors"].append(UP)),
        ("fp16_int8", FC, lambda c: c["bfloat16"]["tensors"].append(FC)),  # which is stored in fp16
        ("fp16_int8", "nowhere", lambda c: c["bfloat16"]["tensors"].append("nowhere")),
        ("fp16_int8", "nowhere", lambda c: c["bfloat16"]["states"].append("nowhere")),
    ],
)
def test_a_contradiction_about_formats_is_refused_by_name(
    packages: dict[Profile, Path],
    target: Target,
    tmp_path: Path,
    profile: Profile,
    name: str,
    edit: Callable[[dict[str, Any]], object],
) -> None:
    copy = copy_package(packages[profile], tmp_path / "copy")
    edit_config(copy, edit, header_too=True)  # type: ignore[arg-type]
    with pytest.raises(PackageError) as error:
        load_package(copy, target)
    assert name in str(error.value).replace(str(copy), "")


# ---- damaged tensors


def longer(name: str) -> Callable[[Tensors], object]:
    return lambda t: t.update({name: torch.cat((t[name], t[name][:, :1]), dim=1)})


SCALES = f"{UP}_scale"


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        (UP, lambda t: t.pop(UP)),
        (SCALES, lambda t: t.pop(SCALES)),
        (SCALES, lambda t: t.update({f"{UP}.scale": t.pop(SCALES)})),
        (UP, longer(UP)),
        (SCALES, longer(SCALES)),
        (UP, lambda t: t.update({UP: t[UP].T})),
        (SCALES, lambda t: t.update({SCALES: t[SCALES].T})),
        (UP, lambda t: t.update({UP: t[UP].to(torch.int8)})),  # packed, but signed
        (UP, lambda t: t.update({UP: torch.zeros(64, 32, dtype=torch.uint8)})),  # one to a byte
        (SCALES, lambda t: t.update({SCALES: t[SCALES].float()})),
        (SCALES, lambda t: t[SCALES].view(-1)[:1].zero_()),
        (SCALES, lambda t: t[SCALES].neg_()),
        (SCALES, lambda t: t[SCALES].view(-1)[-1:].fill_(float("nan"))),
        (SCALES, lambda t: t[SCALES].view(-1)[-1:].fill_(float("inf"))),
        (Q, lambda t: t[Q].view(-1)[-1:].fill_(-128)),  # INT8 is symmetric
        (f"{FC}_scale", lambda t: t.update({f"{FC}_scale": torch.ones(32, 1)})),  # a scale of what has none
    ],
)
def test_damage_of_4_bit_and_8_bit_tensors_is_refused_by_name(
    packages: dict[Profile, Path], target: Target, tmp_path: Path, name: str, edit: Callable[[Tensors], object]
) -> None:
    copy = copy_package(packages["int4_mlp"], tmp_path / "copy")
    edit_tensors(copy, edit)
    with pytest.raises(PackageError) as error:
        load_package(copy, target)
    assert name in str(error.value).replace(str(copy), "")
