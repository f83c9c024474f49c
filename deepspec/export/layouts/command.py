"""From the keys of ``export`` to a folder for servers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepspec.errors import ConfigError
from deepspec.export.layouts.common import Numbers, Source
from deepspec.export.layouts.judge import compare
from deepspec.export.layouts.run import export_layout
from deepspec.export.layouts.sidecars import SPS, STS, check_sps, sts
from deepspec.inference.package_config import CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deepspec.config.schema import ExportConfig
    from deepspec.contracts import TargetInfo
    from deepspec.drafters.base import Drafter, DrafterConfig
    from deepspec.export.card import Origin
    from deepspec.export.run import Exported, ExportTarget
    from deepspec.export.verify import Material

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def export_for_servers(
    settings: ExportConfig,
    drafter: Drafter,
    drafter_config: DrafterConfig,
    trained_with: TargetInfo,
    target: ExportTarget,
    out: Path,
    material: Material,
    origin: Origin,
    calibrate: Callable[[], Sequence[float]] | None = None,
) -> Exported:
    """Write the folder that ``export.layout`` names.

    ``calibrate`` decodes prompts and returns the temperatures of the confidence, one a drafted position, for the
    sidecar of a layout that is a DSpark; it is called when the folder was found to fit. The other arguments are those
    of ``export_package``.
    """
    tables = step_rates(settings)
    wanted = calibrate is not None and settings.layout == "universal" and settings.fold_temperature is None
    numbers = Numbers(served_dtype(settings.server_dtype, origin.target_path, target), settings.server_quantisation)
    source = Source(
        drafter=drafter,
        config=drafter_config,
        target=trained_with,
        numbers=numbers,
        include_embeddings=settings.include_embeddings,
        verifier=origin.target_path,
        temperature=settings.fold_temperature or 1.0,
    )
    return export_layout(
        source,
        target,
        out,
        settings.layout,
        partial(
            compare,
            target=target,
            material=material,
            numbers=numbers,
            max_length_change=settings.max_length_change,
        ),
        consumers=settings.consumer,
        extras=tables,
        late_extras=partial(temperatures, calibrate, drafter.conventions.gamma) if calibrate and wanted else None,
        force=settings.force,
        origin=origin,
    )


def step_rates(settings: ExportConfig) -> dict[str, Any]:
    """Return the file of step rates that goes beside a DSpark, if one is asked for.

    Raises:
        ConfigError: the layout is no DSpark, or the table is none.
    """
    if settings.sps_table is None:
        return {}
    if settings.layout != "universal":
        raise ConfigError(f"export.sps_table: is read beside a DSpark, export.layout={settings.layout} is none")
    try:
        table = json.loads(Path(settings.sps_table).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"export.sps_table={settings.sps_table} cannot be read: {error}") from error
    check_sps(table)
    return {SPS: table}


def temperatures(calibrate: Callable[[], Sequence[float]], gamma: int) -> dict[str, Any]:
    """Return the file of temperatures that goes beside a DSpark."""
    return {STS: sts(calibrate(), gamma)}


def served_dtype(setting: str, path: str, target: ExportTarget) -> torch.dtype:
    """Return the type that servers run the target in: what is set, what its checkpoint says, or bfloat16 for fp32."""
    if setting != "auto":
        return DTYPES[setting]
    try:
        config = json.loads((Path(path).expanduser() / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    inner = config.get("text_config") or config
    name = inner.get("dtype") or inner.get("torch_dtype") or str(target.head.weight.dtype).removeprefix("torch.")
    return NAMES.get(name, torch.bfloat16)
