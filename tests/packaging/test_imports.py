"""The layers of the package: who may import whom, and what the library never does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "deepspec"
ORDER = [
    ("contracts", "errors", "log"),
    ("nn",),
    ("losses",),
    ("drafters",),
    ("targets",),
    ("inference",),
    ("scheduling",),
    ("evaluation",),
    ("data",),
    ("features",),
    ("checkpoint",),
    ("engine",),
    ("export",),
    ("config",),
    ("comparison",),
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
TOP = len(ORDER)
"""Level of the composition roots."""


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "conf" not in p.relative_to(PACKAGE).parts)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_root(path: Path) -> bool:
    return (path.parent == PACKAGE and path.stem not in LEVEL and path.stem != "__init__") or path.stem == "__main__"


def level_of(path: Path) -> int:
    """Return a module's place in the order; inference's command stays below training."""
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if path.stem == "__main__" and part == "inference":
        return LEVEL["inference"]
    return TOP if is_root(path) else LEVEL.get(part, -1)


def imports(tree: ast.AST, module: str) -> Iterator[str]:
    """Yield the dotted names that run-time code imports; ``if TYPE_CHECKING`` blocks are for the type checker only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                yield from imports(ast.Module([child], []), module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node, module)


def imported(path: Path) -> set[str]:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return set(imports(ast.parse(path.read_text(encoding="utf-8")), module))


def uses(path: Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imported(path))


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_only_from_lower_ones(path: Path) -> None:
    own = level_of(path)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "deepspec" or len(parts) < 2:
            continue
        other = LEVEL.get(parts[1])
        if other is None:
            assert parts[1] in ("__version__",) or own == TOP or not (PACKAGE / f"{parts[1]}.py").exists(), (
                f"{name_of(path)} imports the command {name}"
            )
        else:
            assert other <= own, f"{name_of(path)} imports {name}, which stands above it"


def test_every_folder_has_its_place_in_the_order() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name not in ("conf", "__pycache__")}
    assert folders <= set(LEVEL)


def test_deepspeed_is_imported_in_one_file_of_the_engine() -> None:
    users = [p for p in modules() if uses(p, "deepspeed")]
    assert len(users) <= 1
    assert all(p.parent == PACKAGE / "engine" for p in users)


@pytest.mark.parametrize("package", ["hydra", "omegaconf"])
def test_hydra_stays_in_config_and_the_commands(package: str) -> None:
    users = [p for p in modules() if uses(p, package) and PACKAGE / "config" not in p.parents and not is_root(p)]
    assert not users, f"{package} is imported by {[name_of(p) for p in users]}"


def test_torch_distributed_stays_in_the_engine_and_the_targets_sharding() -> None:
    for path in modules():
        if PACKAGE / "engine" in path.parents or path == PACKAGE / "targets" / "sharding.py":
            continue
        attributes = [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed")
        ]
        assert not uses(path, "torch.distributed") and not attributes, name_of(path)


@pytest.mark.parametrize("path", sorted((PACKAGE / "drafters").glob("*/*.py")), ids=name_of)
def test_no_drafter_imports_another(path: Path) -> None:
    """What several share lies in folders without a configuration, which are no drafters."""
    folders = {p.parent.name for p in (PACKAGE / "drafters").glob("*/config.py")} - {path.parent.name}
    for name in imported(path):
        parts = name.split(".")
        assert parts[:2] != ["deepspec", "drafters"] or len(parts) < 3 or parts[2] not in folders, (
            f"{name_of(path)}: {name}"
        )


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_the_library_does_not_print_assert_or_use_globals(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), f"{where}: assert"
        assert not isinstance(node, ast.Global), f"{where}: global"
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        assert called != "print", f"{where}: print"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_no_pickles(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"torch.load", "torch.save"} and not uses(path, "pickle"), name_of(path)


@pytest.mark.parametrize("path", [p for p in modules() if level_of(p) == TOP], ids=name_of)
def test_a_command_only_puts_parts_together(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 80, name_of(path)
