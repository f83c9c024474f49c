"""Compare the drafter that was read back from a server layout with the trained one.

Every tensor is where it belongs already, or the import had refused the folder; what is left is what rounding costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.export.certificate import certificate_problems, certify
from deepspec.export.compare import compare_lengths, read_samples, summarise
from deepspec.export.verify import MEAN_TV_LIMIT, Verification

if TYPE_CHECKING:
    from deepspec.drafters.base import Drafter
    from deepspec.export.compare import Distributions, Lengths
    from deepspec.export.layouts.common import Numbers
    from deepspec.export.verify import Material
    from deepspec.inference.decoder import DecodingTarget
    from deepspec.inference.profiles import Profile


@torch.inference_mode()
def compare(
    before: Drafter,
    after: Drafter,
    target: DecodingTarget,
    material: Material,
    numbers: Numbers,
    max_length_change: float,
) -> Verification:
    """Decode with both drafters and compare what they say about the same slots; problems are in the result."""
    lengths, texts = compare_lengths(before, after, target, material) if material.prompts else (None, [])
    rows = read_samples(before, after, target, material.samples or texts)
    found, domains, profile = summarise(rows), certify(rows), _profile(numbers)
    problems = _problems(found, lengths, MEAN_TV_LIMIT[profile], max_length_change)
    problems += certificate_problems(domains, max_length_change)
    return Verification(profile, found, lengths, domains, problems=tuple(problems))


def _profile(numbers: Numbers) -> Profile:
    """Return the native profile that rounds as much."""
    if numbers.quantisation != "none":
        return "fp16_int8"
    return "bf16" if numbers.dtype == torch.bfloat16 else "fp16"


def _problems(found: Distributions, lengths: Lengths | None, tv_limit: float, limit: float) -> list[str]:
    problems = []
    if not found.mean_tv <= tv_limit:  # NaN is a problem too
        problems.append(
            f"its distributions differ from the trained drafter's by a total variation of {found.mean_tv:.4f} on "
            f"average; rounding explains {tv_limit} at most"
        )
    if lengths is not None and lengths.loss.low > limit:
        problems.append(
            f"its accepted length is {lengths.after:.3f} after {lengths.before:.3f}; "
            f"export.max_length_change={limit} lets a loss of {limit:.2%} through"
        )
    return problems
