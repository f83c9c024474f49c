"""Compare the drafter that was read back from a server layout with the trained one.

Every tensor is where it belongs already, or the import had refused the folder; what is left is what rounding costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.export.verify import Material, Verification, compare_drafters

if TYPE_CHECKING:
    from deepspec.drafters.base import Drafter
    from deepspec.export.layouts.common import Numbers
    from deepspec.inference.decoder import DecodingTarget
    from deepspec.inference.profiles import Profile


def compare(
    before: Drafter,
    after: Drafter,
    target: DecodingTarget,
    material: Material,
    numbers: Numbers,
    max_length_change: float,
) -> Verification:
    """Decode with both drafters and compare what they say about the same slots; problems are in the result."""
    profile = profile_of(numbers)
    return compare_drafters(before, after, target, material, profile=profile, max_length_change=max_length_change)


def profile_of(numbers: Numbers) -> Profile:
    """Return the native profile that rounds as much."""
    if numbers.quantisation == "none":
        return "bf16" if numbers.dtype == torch.bfloat16 else "fp16"
    return "int8_dynamic" if numbers.quantisation == "w8a8" else "fp16_int8"
