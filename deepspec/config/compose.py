"""Composing a recipe: where the config lies, the resolvers it uses, and composition from Python."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import deepspec

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from deepspec.config.schema import RunConfig

CONF = Path(deepspec.__file__).resolve().parent / "conf"


def compose(overrides: list[str], config_name: str = "config") -> DictConfig:
    """Compose a config from Python as the commands do; ``overrides`` are those of the command line.

    Inside a command, what its own ``--config-dir`` offers can be chosen too.

    Raises:
        ConfigError: Hydra cannot read an override, or finds no such choice.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import open_dict, read_write
    from omegaconf.errors import OmegaConfBaseException

    from deepspec.config.messages import composition_error

    register_resolvers()
    inside = GlobalHydra.instance().is_initialized()
    try:
        with nullcontext() if inside else initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = hydra_compose(config_name, overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise composition_error(error, CONF) from error
    HydraConfig.instance().set_config(cfg)
    with read_write(cfg), open_dict(cfg):
        del cfg["hydra"]
    return cfg


def compose_run(overrides: list[str], *, check_files: bool = True) -> RunConfig:
    """Return the resolved recipe, for example ``compose_run(["recipe=flash", "target=smollm2"])``."""
    from deepspec.config.arguments import groups_of, parse
    from deepspec.config.resolve import resolve

    return resolve(compose(parse(overrides, groups_of(CONF)).hydra), check_files=check_files)


def config_dir() -> str | None:
    """Return the folder that the running command was given by ``--config-dir``."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return None
    sources = HydraConfig.get().runtime.config_sources
    return next((str(s.path) for s in sources if s.provider == "command-line"), None)


def register_resolvers() -> None:
    """Make ``${deepspec.root:}``, ``${deepspec.basename:PATH}`` and ``${deepspec.job:}`` known."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("deepspec.root", lambda: str(CONF.parent.parent), replace=True)
    OmegaConf.register_new_resolver("deepspec.basename", _basename, replace=True)
    OmegaConf.register_new_resolver("deepspec.job", _job, replace=True)


def _basename(path: str) -> str:
    """Turn a path or hub id into a short name: Qwen/Qwen3-4B -> qwen3-4b, answers.train.jsonl -> answers.train."""
    name = Path(str(path).rstrip("/")).name
    return name.removesuffix(".jsonl").lower()


def _job() -> str:
    """Return the folder of a job inside a sweep, nothing outside one."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    if not HydraConfig.initialized():
        return ""
    hydra = HydraConfig.get()
    return (
        f"/job-{hydra.job.num}" if hydra.mode == RunMode.MULTIRUN and not OmegaConf.is_missing(hydra.job, "num") else ""
    )
