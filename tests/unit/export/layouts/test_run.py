"""From a trained drafter to a folder with its name, or to nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspec.errors import ConfigError, PackageError
from deepspec.export.layouts.activations import quantise_activations, round_per_token
from deepspec.export.layouts.command import served_dtype
from deepspec.export.layouts.common import Numbers, Source
from deepspec.export.layouts.judge import compare
from deepspec.export.layouts.run import export_layout
from deepspec.export.layouts.serving import command_for
from deepspec.export.run import Exported
from deepspec.export.verify import Material, VerificationError
from deepspec.targets.target import Target
from tests.unit.export.layouts.cases import CONFIGS
from tests.unit.export.tiny import make_drafter, make_samples, make_target


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def export(target: Target, out: Path, kind: str, layout: str, **over: Any) -> Exported:
    drafter, config = make_drafter(target, config=CONFIGS[kind]())
    numbers = Numbers(over.pop("dtype", torch.bfloat16), over.pop("quantisation", "none"))
    material = Material(make_samples(2))
    limit = over.pop("limit", 1.0)
    judge = partial(compare, target=target, material=material, numbers=numbers, max_length_change=limit)
    source = Source(drafter, config, target.info, numbers, verifier="org/tiny")
    if over.pop("any_tv", True):
        judge = partial(without_problems, judge)
    return export_layout(source, target, out, layout, judge, **over)


def without_problems(judge: Any, before: Any, after: Any) -> Any:
    """Random drafters change far more by rounding than trained ones: what is measured is not this test's matter."""
    return replace(judge(before, after), problems=())


@pytest.mark.parametrize(
    ("kind", "layout", "quantisation"),
    [
        ("dspark", "universal", "w8a16"),
        ("fill_in", "zlab_dflash", "w8a8"),
        ("fill_in", "speculators", "none"),
        ("eagle3", "eagle3", "w8a16"),
        ("mtp", "mtp", "none"),
    ],
)
def test_every_layout_becomes_a_folder(
    target: Target, tmp_path: Path, kind: str, layout: str, quantisation: str
) -> None:
    done = export(target, tmp_path / "out", kind, layout, quantisation=quantisation)
    card = (done.folder / "card.md").read_text()
    assert f"layout {layout}" in card and "total variation" in card
    assert set(json.loads((done.folder / "checksums.json").read_text())["sha256"]) >= {"card.md", "model.safetensors"}
    if layout == "mtp":
        assert "No server that was verified" in card
        return
    said = str(command_for("vllm", done.folder, "", []))
    assert f"    {said.replace(str(done.folder), 'FOLDER')}\n" in card
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_strays_is_not_written(target: Target, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="export.max_length_change=-2"):
        export(target, tmp_path / "out", "dspark", "universal", any_tv=False, limit=-2)
    assert list(tmp_path.iterdir()) == []
    export(target, tmp_path / "out", "dspark", "universal", any_tv=False, limit=-2, force=True)
    assert "Written by force" in (tmp_path / "out" / "card.md").read_text()


def test_a_folder_of_somebody_else_is_not_replaced(target: Target, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="is not a package"):
        export(target, tmp_path / "out", "dspark", "universal")


def test_a_file_of_somebody_else_in_a_package_is_not_lost(target: Target, tmp_path: Path) -> None:
    out = export(target, tmp_path / "out", "dspark", "universal").folder
    export(target, out, "dspark", "universal")
    (out / "NOTES.md").write_text("mine")
    with pytest.raises(ConfigError, match="holds NOTES.md, which no export has written"):
        export(target, out, "dspark", "universal")
    assert (out / "NOTES.md").read_text() == "mine"
    (out / "checksums.json").unlink()
    with pytest.raises(ConfigError, match=r"checksums.json cannot be read: give another export.out"):
        export(target, out, "dspark", "universal")


def test_a_target_whose_head_is_scaled_has_no_layout(tmp_path: Path) -> None:
    from tests.helpers import tiny_target

    granite = tiny_target("granite")
    with pytest.raises(ConfigError, match="multiplies its embeddings by 6"):
        export(granite, tmp_path / "out", "dspark", "universal")
    assert list(tmp_path.iterdir()) == []


def test_a_wanted_consumer_that_fails_leaves_nothing(target: Target, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="nothing fills parameter embed_tokens.weight"):
        export(
            target,
            tmp_path / "out",
            "dspark",
            "universal",
            consumers=("vllm", "published_eval"),
            late_extras=lambda: pytest.fail("minutes of decoding, for a folder that is refused"),
        )
    assert list(tmp_path.iterdir()) == []


def test_what_takes_long_comes_last(target: Target, tmp_path: Path) -> None:
    done = export(target, tmp_path / "out", "dspark", "universal", late_extras=lambda: {"late.json": [1.5]})
    assert json.loads((done.folder / "late.json").read_text()) == [1.5]
    assert "late.json" in (done.folder / "card.md").read_text()
    assert "late.json" in json.loads((done.folder / "checksums.json").read_text())["sha256"]


def test_w8a8_is_measured_with_rounded_activations() -> None:
    x = torch.randn(3, 5, 8)
    rounded = round_per_token(x)
    step = x.abs().amax(-1, keepdim=True) / 127
    assert bool(((rounded - x).abs() <= 0.501 * step).all()) and not rounded.equal(x)
    assert round_per_token(torch.zeros(2, 4)).equal(torch.zeros(2, 4))
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(4, 2, bias=False))
    expected = model[1](round_per_token(model[0](x)))
    quantise_activations(model, ["1.weight"])
    assert model(x).equal(expected)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"text_config": {"dtype": "float16"}}, torch.float16),
        ({"dtype": "float32"}, torch.bfloat16),
        (None, torch.bfloat16),  # the target at hand is in fp32
    ],
)
def test_the_served_type(target: Target, tmp_path: Path, config: Any, expected: torch.dtype) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert served_dtype("auto", str(tmp_path), target) == expected
    assert served_dtype("fp16", str(tmp_path), target) == torch.float16
