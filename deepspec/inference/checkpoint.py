"""Load the drafter of a training checkpoint and bind it to the target that it was trained with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspec.drafters.files import load_drafter, read_description, target_info
from deepspec.inference.package_checks import BindableTarget, check_target

if TYPE_CHECKING:
    from pathlib import Path

    from deepspec.drafters.base import Drafter


def load_checkpoint(folder: Path, target: BindableTarget, *, allow_other_target: bool = False) -> Drafter:
    """Load the drafter in ``folder`` in fp32 and return it bound to ``target``, on its device, ready to propose.

    The target is checked as packages check theirs.

    Args:
        folder: What training has written: ``drafter.safetensors`` and ``drafter.json``.
        target: The target that verifies the drafts; the drafter uses its embedding and head.
        allow_other_target: Accept another revision of the target than the one trained with (same shapes).

    Raises:
        PackageError: With the file, key or tensor that is wrong.
    """
    trained_with = target_info(read_description(folder), folder)
    check_target(trained_with, target, allow_other_target, what="the checkpoint")
    drafter = load_drafter(folder).to(target.head.weight.device)
    drafter.bind(target.head)
    return drafter.eval().requires_grad_(False)
