"""The commands that serve a folder, the scripts that print them, and the sidecars."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspec.errors import ConfigError
from deepspec.export.layouts import serving
from deepspec.export.layouts.sidecars import SPS, STS, check_sps, sps, sts
from deepspec.export.layouts.write import write_files
from tests.unit.export.layouts.cases import files

LAUNCH = Path(__file__).parents[4] / "launch"


def folder(tmp_path: Path, kind: str = "dspark", layout: str | None = None, **over: Any) -> Path:
    path = tmp_path / "draft"
    path.mkdir()
    write_files(path, files(kind, layout, **over))
    return path


def script(server: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(LAUNCH / f"serve_{server}.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


EXPECTED: list[tuple[str, str, str | None, str]] = [
    ("vllm", "dspark", None, "vllm serve org/tiny --dtype bfloat16 --speculative-config '{\"method\": \"dspark\", "
     "\"model\": \"DRAFT\", \"num_speculative_tokens\": 4, \"draft_sample_method\": \"probabilistic\"}'"),
    ("vllm", "fill_in", None, "vllm serve org/tiny --dtype bfloat16 --speculative-config '{\"method\": \"dflash\", "
     "\"model\": \"DRAFT\", \"num_speculative_tokens\": 4}'"),
    ("vllm", "eagle3", None, "vllm serve org/tiny --dtype bfloat16 --speculative-config '{\"method\": \"eagle3\", "
     "\"model\": \"DRAFT\", \"num_speculative_tokens\": 4}'"),
    ("vllm", "fill_in", "speculators", "vllm serve org/tiny --dtype bfloat16 --speculative-config "
     "'{\"method\": \"dflash\", \"model\": \"DRAFT\", \"num_speculative_tokens\": 4}'"),
    ("sglang", "dspark", None, "python3 -m sglang.launch_server --model-path org/tiny --dtype bfloat16 "
     "--speculative-algorithm DSPARK --speculative-draft-model-path DRAFT"),
    ("sglang", "fill_in", None, "python3 -m sglang.launch_server --model-path org/tiny --dtype bfloat16 "
     "--speculative-algorithm DFLASH --speculative-draft-model-path DRAFT --speculative-num-draft-tokens 5"),
    ("sglang", "eagle3", None, "python3 -m sglang.launch_server --model-path org/tiny --dtype bfloat16 "
     "--speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT --speculative-num-steps 4 "
     "--speculative-eagle-topk 1 --speculative-num-draft-tokens 5"),
]  # fmt: skip


@pytest.mark.parametrize(("server", "kind", "layout", "expected"), EXPECTED)
def test_the_script_prints_the_command(
    tmp_path: Path, server: str, kind: str, layout: str | None, expected: str
) -> None:
    path = folder(tmp_path, kind, layout)
    done = script(server, "--dry-run", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == expected.replace("DRAFT", str(path)) + "\n"


def test_target_and_options_are_taken_over(tmp_path: Path) -> None:
    path = folder(tmp_path)
    done = script("vllm", "--dry-run", "--adaptive", str(path), "/models/mine", "--", "--port", "9000")
    assert done.stdout.startswith("vllm serve /models/mine ")
    assert done.stdout.endswith(" --port 9000\n")
    assert '"enable_adaptive_verification": true' in done.stdout


def test_sglang_uses_the_sidecars_when_both_are_there(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / STS).write_text("{}")
    assert "SGLANG" not in script("sglang", "--dry-run", str(path)).stdout
    (path / SPS).write_text("{}")
    said = script("sglang", "--dry-run", str(path)).stdout
    assert said.startswith("SGLANG_RAGGED_VERIFY_MODE=compact python3 -m sglang.launch_server ")
    assert f"--speculative-dspark-sps-table-path {path / SPS}" in said
    assert f"--speculative-dspark-confidence-sts-path {path / STS}" in said


@pytest.mark.parametrize(("quantisation", "kept"), [("none", True), ("w8a8", False)])
def test_a_drafter_does_not_inherit_the_targets_quantisation(tmp_path: Path, quantisation: str, kept: bool) -> None:
    path = folder(tmp_path, quantisation=quantisation)
    said = script("sglang", "--dry-run", str(path), "--", "--quantization", "fp8").stdout
    assert ("--speculative-draft-model-quantization unquant" in said) == kept


def test_without_dry_run_the_command_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "vllm"
    program.write_text('#!/usr/bin/env bash\necho "ran with $# words"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    lines = script("vllm", str(folder(tmp_path))).stdout.splitlines()
    assert lines[0].startswith("vllm serve org/tiny")
    assert lines[1] == "ran with 6 words"


@pytest.mark.parametrize(
    ("server", "make", "words"),
    [
        ("sglang", lambda p: folder(p, layout="speculators"), "cannot read the format of speculators"),
        ("vllm", lambda p: p, "config.json"),
        ("vllm", lambda p: folder(p, "mtp"), "no layout for a server"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, server: str, make: Callable[[Path], Path], words: str) -> None:
    done = script(server, "--dry-run", str(make(tmp_path)))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error: " in done.stderr and words in done.stderr


def test_a_server_that_is_not_installed_and_a_config_that_is_none(tmp_path: Path) -> None:
    done = script("vllm", str(folder(tmp_path)))
    assert done.returncode == 2 and "there is no vllm here" in done.stderr and "Traceback" not in done.stderr
    for text in ("[]", '{"architectures": 3}'):
        (tmp_path / "odd").mkdir(exist_ok=True)
        (tmp_path / "odd" / "config.json").write_text(text)
        done = script("vllm", "--dry-run", str(tmp_path / "odd"))
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr


def test_an_unknown_target_has_to_be_given(tmp_path: Path) -> None:
    path = folder(tmp_path, "eagle3")
    config = json.loads((path / "config.json").read_text())
    del config["deepspec"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="give it as the second word"):
        serving.command_for("vllm", path, "", [])
    assert serving.command_for("vllm", path, "t", []).words[2] == "t"


def test_sts_has_sglangs_schema() -> None:
    assert sts([1.0, 2], 2, dataset="d", num_samples=9, ece_before=[0.1, 0.2], ece_after=[0.05, 0.1]) == {
        "temperatures": [1.0, 2.0],
        "dataset": "d",
        "num_samples": 9,
        "ece_before": [0.1, 0.2],
        "ece_after": [0.05, 0.1],
    }


@pytest.mark.parametrize("temperatures", [[1.0], [1.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_temperatures_that_sglang_refuses(temperatures: list[float]) -> None:
    with pytest.raises(ConfigError, match="2 numbers above 0"):
        sts(temperatures, 2)


def test_sps_has_either_of_sglangs_schemas() -> None:
    table = sps([8, 16], [90.0, 60.0], 16)
    assert table == {"sample_batch_tokens": [8, 16], "sample_steps_per_sec": [90.0, 60.0], "max_batch_tokens": 16}
    curve = {"bs_probes": [1, 8], "alpha_seconds": [0.0, 1e-3], "m_probes": [8, 64], "theta_seconds": [1e-3, 2e-3]}
    check_sps({"bias_seconds": 0.01, **curve})
    json.dumps(table)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sample_batch_tokens": [16, 8]}, "must rise"),
        ({"sample_batch_tokens": [8]}, "one length"),
        ({"sample_steps_per_sec": [90.0, 0.0]}, "must be finite"),
        ({"sample_steps_per_sec": "x"}, "must be lists"),
        ({"max_batch_tokens": 4}, "below the largest point"),
        ({"more": 1}, "it must have"),
    ],
)
def test_a_table_that_sglang_would_not_read_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_sps({**sps([8, 16], [90.0, 60.0], 16), **change})
