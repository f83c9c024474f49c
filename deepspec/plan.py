"""Memory, disk and hours of a run, before anything is downloaded or loaded.

    python -m deepspec.plan recipe=quickstart
    python -m deepspec.plan recipe=pro data.path=FILE plan.ranks=8 plan.tflops=300

Sizes of weights and optimiser states are exact; activations and time are estimates from plan.* (docs/config.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspec.config.cli import hydra_command

if TYPE_CHECKING:
    from deepspec.config.schema import RunConfig


@hydra_command("config", check_files=False)
def main(cfg: RunConfig) -> None:
    """Print what the run will need."""
    from deepspec.config.estimate import estimate, report
    from deepspec.log import emit

    emit(report(cfg, estimate(cfg)))


if __name__ == "__main__":
    main()
