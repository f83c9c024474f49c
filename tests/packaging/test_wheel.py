"""The wheel holds the configuration as real files, and composes from them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_direct_dependencies_are_pinned() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {re.split(r"[<>=!~\[ ]", d)[0].lower() for d in wanted}
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert names <= pinned


def test_the_config_is_linked_into_the_package() -> None:
    assert (ROOT / "deepspec/conf").resolve() == ROOT / "conf"
    assert (ROOT / "conf/recipe").resolve() == ROOT / "recipes"


@pytest.mark.slow
def test_a_wheel_composes_away_from_the_repository(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, text=True, timeout=240)
    (wheel,) = tmp_path.glob("deepspec-*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        assert len(names) == len(set(names))
        files.extractall(tmp_path / "site")
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        inside = tmp_path / "site/deepspec/conf/recipe" / recipe.name
        assert inside.read_text() == recipe.read_text() and not inside.is_symlink()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "deepspec.plan", "--cfg", "job", "--resolve", "recipe=flash"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "zero_stage: 1" in done.stdout
    missing = [sys.executable, "-m", "deepspec.prepare", "recipe=quickstart"]
    said = subprocess.run(missing, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert said.returncode == 2
    assert "comes with a clone of the repository" in said.stderr
