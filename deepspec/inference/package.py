"""Load an inference package and bind it to its target.

Everything is checked before memory is taken, and every fault has a message that names it: checksums, the config's keys
and their agreement, the target, and each tensor's name, shape and type against what the drafter needs. Nothing in a
package is executed: there is no pickle, ``auto_map`` is not followed, and a drafter from outside DeepSpec is only built
when the caller names its class.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from deepspec.drafters.files import read_drafter_config
from deepspec.drafters.registry import TARGET_KEY, drafter_to_dict
from deepspec.errors import PackageError, UserError
from deepspec.inference.assemble import assemble
from deepspec.inference.calibration import Calibration, read_calibration
from deepspec.inference.package_checks import (
    BindableTarget,
    check_files,
    check_headers,
    check_named,
    check_target,
    check_tensors,
    check_vocabulary,
)
from deepspec.inference.package_config import (
    CALIBRATION,
    CONFIG,
    INDEX,
    SELFCHECK,
    WEIGHTS,
    PackageConfig,
    beside,
    read_config,
)
from deepspec.inference.package_embeddings import check_embeddings, embedding_tensors
from deepspec.inference.package_weights import StoredWeights
from deepspec.inference.profiles import SCALE
from deepspec.inference.selfcheck import SelfCheck, read_selfcheck, run_selfcheck
from deepspec.log import get_logger
from deepspec.nn.int8 import MAX_INT8

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.drafters.base import Drafter, DrafterConfig
    from deepspec.inference.decoder import DecodingTarget

log = get_logger(__name__)

OWN_DRAFTER = re.compile(r"deepspec\.drafters\.[a-z0-9_]+\.config\.[A-Za-z0-9]+")


def is_package(path: str | Path) -> bool:
    """Whether ``path`` looks like a package folder."""
    folder = Path(path)
    return (folder / CONFIG).is_file() and ((folder / WEIGHTS).is_file() or (folder / INDEX).is_file())


def load_package(
    path: str | Path,
    target: BindableTarget,
    *,
    dtype: torch.dtype | None = None,
    allow_other_target: bool = False,
    multiplied_out: bool = False,
    trusted_drafters: tuple[str, ...] = (),
    self_check: bool = False,
) -> Drafter:
    """Load a package, check it, and return its drafter bound to ``target``, ready to propose.

    Args:
        path: The package's folder.
        target: The target that verifies the drafts; the drafter uses its embedding and head.
        dtype: Precision to run in; None takes the target's when that is a float type, else the package's own.
        allow_other_target: Accept another revision of the target than the one trained with (same shapes).
        multiplied_out: Hold every weight as floats and round no activations, to go on training from them.
        trusted_drafters: Dotted paths of configuration classes outside DeepSpec that may be imported.
        self_check: Draft the first blocks of the stored prompts and compare them; costs a forward pass of the target
            for each of them. Left out, with a warning, for another revision of the target.

    Raises:
        PackageError: With the file, key or tensor that is wrong, or the prompt and slot that is drafted otherwise.
    """
    folder = Path(path)
    checked = check_files(folder)
    config = read_config(folder)
    check_target(config.target, target, allow_other_target)
    weights = StoredWeights(folder, config)
    check_named(folder, checked, (CONFIG, *weights.files, *beside(config)))
    calibration, selfcheck = read_calibration(folder, config), read_selfcheck(folder, config)
    check_headers({CONFIG: config, CALIBRATION: calibration, SELFCHECK: selfcheck}, weights.metadata())
    drafter_config = _drafter_config(config, trusted_drafters)
    check_tensors(config, drafter_config, weights.kinds())
    tensors = weights.tensors()
    _check_values(tensors)
    check_vocabulary(config, tensors)
    copies = {name: tensors.pop(name) for name in embedding_tensors(config)}
    known = config.target.fingerprint == target.info.fingerprint
    if known:
        check_embeddings(config, copies, target.head)
    drafter = assemble(config, drafter_config, tensors, target.head, dtype=dtype, multiplied_out=multiplied_out)
    _calibrate(drafter, calibration)
    if self_check and selfcheck is not None:
        _self_check(selfcheck, drafter, target, known=known)
    return drafter


def _calibrate(drafter: Drafter, calibration: Calibration | None) -> None:
    if calibration is None:
        return
    if not drafter.predicts_acceptance:
        raise PackageError(f"{CONFIG}: calibration={CALIBRATION!r}, but this drafter has no confidence head")
    drafter.confidence_temperatures = calibration.temperatures


def _self_check(stored: SelfCheck, drafter: Drafter, target: BindableTarget, *, known: bool) -> None:
    if not known:
        log.warning("no self-check: its tokens are those of the target that the drafter was trained with")
    elif not hasattr(target, "step"):
        raise UserError("self_check needs a target that can read tokens (targets.Target): leave it out")
    else:
        run_selfcheck(stored, drafter, cast("DecodingTarget", target))


def _drafter_config(config: PackageConfig, trusted: tuple[str, ...]) -> DrafterConfig:
    name = str(config.drafter.get(TARGET_KEY))
    if not OWN_DRAFTER.fullmatch(name) and name not in trusted:
        raise PackageError(
            f"{CONFIG}: drafter.{TARGET_KEY}={name!r} is not a drafter of DeepSpec, and a package "
            "runs no code of its own: pass the name in trusted_drafters if you trust it"
        )
    drafter_config = read_drafter_config(config.drafter, CONFIG)
    missing = [key for key in drafter_to_dict(drafter_config) if key not in config.drafter]
    if missing:
        raise PackageError("\n".join(f"{CONFIG}: drafter.{key} is missing" for key in missing))
    return drafter_config


def _check_values(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise PackageError(f"{WEIGHTS}: tensor {name} holds values that are not finite")
        if tensor.dtype == torch.int8 and bool((tensor < -MAX_INT8).any()):
            raise PackageError(f"{WEIGHTS}: tensor {name} holds {-MAX_INT8 - 1}, outside -{MAX_INT8} .. {MAX_INT8}")
        if name.endswith(SCALE) and not bool((tensor > 0).all()):
            raise PackageError(f"{WEIGHTS}: tensor {name} holds scales that are not above 0")
