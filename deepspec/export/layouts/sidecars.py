"""Files beside a DSpark that SGLang's dynamic verification reads: temperatures of the confidence, and step rates.

``dspark_sts.json`` holds one temperature a drafted position: confidence_j = sigmoid(logit_j / T_j), and the chance that
a block survives up to j is their product. ``dspark_sps.json`` says how many verification steps a second the server
makes at how many tokens a step; without it the planner verifies every block whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepspec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

STS, SPS = "dspark_sts.json", "dspark_sps.json"
SAMPLED = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")
FITTED = ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")
"""SGLang's two schemas of step rates: measured points, or step time = bias + alpha(batch) + theta(tokens)."""


def sts(
    temperatures: Sequence[float],
    gamma: int,
    *,
    dataset: str = "",
    num_samples: int = 0,
    ece_before: Sequence[float] = (),
    ece_after: Sequence[float] = (),
) -> dict[str, Any]:
    """Return the contents of ``dspark_sts.json``: one temperature for each of ``gamma`` positions.

    Raises:
        ConfigError: another number of temperatures, or one that is not above 0.
    """
    if len(temperatures) != gamma or not all(math.isfinite(t) and t > 0 for t in temperatures):
        raise ConfigError(
            f"{STS}: temperatures {list(temperatures)} must be {gamma} numbers above 0, one a drafted position"
        )
    return {
        "temperatures": [float(t) for t in temperatures],
        "dataset": dataset,
        "num_samples": num_samples,
        "ece_before": [float(e) for e in ece_before],
        "ece_after": [float(e) for e in ece_after],
    }


def sps(tokens: Sequence[int], steps_per_second: Sequence[float], max_tokens: int) -> dict[str, Any]:
    """Return the contents of ``dspark_sps.json`` from points that were measured: tokens a step, steps a second.

    Raises:
        ConfigError: as ``check_sps`` does.
    """
    table = {
        "sample_batch_tokens": [int(t) for t in tokens],
        "sample_steps_per_sec": [float(s) for s in steps_per_second],
        "max_batch_tokens": int(max_tokens),
    }
    check_sps(table)
    return table


def check_sps(table: object) -> None:
    """Refuse a table that SGLang would not read.

    Raises:
        ConfigError: naming the key.
    """
    if not isinstance(table, Mapping) or set(table) not in (set(SAMPLED), set(FITTED)):
        keys = sorted(table) if isinstance(table, Mapping) else table
        raise ConfigError(f"{SPS} has {keys}, it must have {', '.join(SAMPLED)}, or {', '.join(FITTED)}")
    pairs = [SAMPLED[:2]] if "max_batch_tokens" in table else [FITTED[1:3], FITTED[3:5]]
    for places, values in pairs:
        _check_curve(places, table[places], values, table[values])
    if "max_batch_tokens" in table and not _is_number(table["max_batch_tokens"], least=max(table[SAMPLED[0]])):
        raise ConfigError(f"{SPS}: max_batch_tokens={table['max_batch_tokens']!r} is below the largest point")
    if "bias_seconds" in table and not _is_number(table["bias_seconds"], least=0):
        raise ConfigError(f"{SPS}: bias_seconds={table['bias_seconds']!r} must be a number of at least 0")


def _check_curve(places: str, at: object, values: str, found: object) -> None:
    if not isinstance(at, list) or not isinstance(found, list) or len(at) != len(found) or not at:
        raise ConfigError(f"{SPS}: {places} and {values} must be lists of one length, and not empty")
    if not all(_is_number(place, least=1) for place in at) or at != sorted(set(at)):
        raise ConfigError(f"{SPS}: {places}={at} must rise from 1 on")
    least = 0 if values.endswith("_seconds") else 1e-9
    if not all(_is_number(value, least=least) for value in found):
        raise ConfigError(f"{SPS}: {values}={found} must be finite, and above 0 where it is a rate")


def _is_number(value: object, *, least: float) -> bool:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and math.isfinite(value) and value >= least  # type: ignore[operator, arg-type]
