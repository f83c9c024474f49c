"""Train the variants of a study and compare them: ``python -m deepspec.compare study=NAME``.

    python -m deepspec.compare study=drafters
    python -m deepspec.compare study=ablations study.hours=1.5

Goes on where an earlier call stopped. The tables lie in <paths.runs>/<study>, beside the run folders;
docs/comparison.md explains them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepspec.config.cli import hydra_command

if TYPE_CHECKING:
    from deepspec.config.study import CompareCommand


@hydra_command("compare")
def main(cfg: CompareCommand) -> None:
    """Run deepspec.train and deepspec.evaluate for each variant and seed, and write one table.

    What is finished is not done again. A variant that fails is listed with its reason and does not stop the others; the
    next call tries it again.
    """
    from deepspec.comparison.plan import plan_runs
    from deepspec.comparison.process import Processes, locked
    from deepspec.comparison.report import save, terminal_text
    from deepspec.comparison.results import gather
    from deepspec.comparison.work import Work
    from deepspec.errors import DeepSpecError
    from deepspec.log import emit

    runs, folder = plan_runs(cfg), Path(cfg.paths.runs) / cfg.study.name
    with locked(folder) as lock, Processes(keep_open=lock) as execute:
        work = Work(runs, execute, hours=cfg.study.hours)
        try:
            work.do(after_each=lambda: save(folder, gather(cfg.study, runs, work.failures), runs))
        finally:
            comparison = gather(cfg.study, runs, work.failures)
            emit(terminal_text(comparison))
            for path in save(folder, comparison, runs):
                emit(f"written: {path}")
    if work.failures:
        raise DeepSpecError("\n".join([f"{len(work.failures)} of {len(runs)} runs failed:", *work.failed_lines()]))


if __name__ == "__main__":
    main()
