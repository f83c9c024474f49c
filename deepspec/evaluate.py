"""Score a trained drafter or a package by really decoding: ``python -m deepspec.evaluate run=DIR``.

python -m deepspec.evaluate run=runs/quickstart
python -m deepspec.evaluate run=runs/quickstart package=runs/quickstart/package-fp16_int8 evaluate.limit=5
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepspec.config.cli import hydra_command

if TYPE_CHECKING:
    from deepspec.config.schema import EvaluateCommand


@hydra_command("evaluate")
def main(cfg: EvaluateCommand) -> None:
    """Decode the test prompts: accepted length, losslessness, tokens per second, and one sample answer."""
    from deepspec.checkpoint.store import newest_drafter
    from deepspec.data.chat import ChatRenderer
    from deepspec.data.prompts import read_prompts
    from deepspec.engine.distributed import choose_device
    from deepspec.errors import ConfigError
    from deepspec.evaluation.report import terminal_text, write_report
    from deepspec.evaluation.run import score
    from deepspec.inference.checkpoint import load_checkpoint
    from deepspec.inference.package import is_package, load_package
    from deepspec.log import emit
    from deepspec.targets.load import load_target

    run = cfg.config
    if run.data.test is None:
        raise ConfigError("data.test is not set: evaluate decodes the prompts of that file")
    target = load_target(run.target, choose_device(run.engine.device, 0))
    renderer = ChatRenderer(
        target.tokenizer,
        run.target.template_options,
        eos_token_ids=target.info.eos_token_ids,
        max_length=run.data.max_length,
    )
    prompts = read_prompts(run.data.test, renderer, limit=run.evaluate.limit)
    source = Path(cfg.package or cfg.run)
    if is_package(source):
        drafter = load_package(source, target, allow_other_target=cfg.allow_other_target)
    else:
        source = newest_drafter(source)
        drafter = load_checkpoint(source, target, allow_other_target=cfg.allow_other_target)
    scores = score(target, drafter, prompts, run.evaluate, renderer.eos_token_ids)
    emit(terminal_text(scores))
    subject = {"drafter": source, "target": run.target.path, "recipe": run.recipe, "data": run.data.test}
    for path in write_report(Path(cfg.out or Path(cfg.run) / "evaluation"), scores, subject):
        emit(f"written: {path}")


if __name__ == "__main__":
    main()
