"""``python -m deepspec.export run=DIR``: from a trained run to a verified, quantised inference package.

    python -m deepspec.export run=runs/quickstart
    python -m deepspec.export run=runs/quickstart export.profile=bf16 export.out=packages/mine
    python -m deepspec.export run=runs/quickstart export.layout=universal
    python -m deepspec.export run=runs/quickstart source=FOLDER

The newest checkpoint of the run is written, reloaded from disk, and compared with the trained drafter: its
distributions on test conversations, domain by domain, and its accepted length on decoded prompts. A package that strays
is not written (docs/quantisation.md). A confidence head is calibrated on prompts of the validation split.
``export.layout`` writes a folder for servers instead; ``source`` brings in a drafter that another project has trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepspec.config.cli import hydra_command

if TYPE_CHECKING:
    from deepspec.config.schema import ExportCommand


@hydra_command("export")
def main(cfg: ExportCommand) -> None:
    """Write a verified, quantised inference package from a trained run."""
    from deepspec.checkpoint.store import newest_drafter
    from deepspec.config.resolve import save_config
    from deepspec.data.chat import ChatRenderer
    from deepspec.drafters.files import read_description, target_info
    from deepspec.drafters.registry import drafter_from_dict
    from deepspec.engine.distributed import choose_device
    from deepspec.export.card import Origin
    from deepspec.export.command import Trained, check_splits, export_as_asked
    from deepspec.export.importers.load import import_run
    from deepspec.inference.accelerate import accelerate
    from deepspec.inference.checkpoint import load_checkpoint
    from deepspec.log import emit
    from deepspec.targets.load import load_target

    run, settings = cfg.config, cfg.config.export
    if cfg.source is not None:
        target = load_target(run.target, choose_device(run.engine.device, 0))
        out = Path(settings.out or Path(cfg.run).parent / f"imported-{Path(cfg.source).resolve().name}")
        emit(f"imported: {import_run(Path(cfg.source), target, run, out, save_config)}")
        return
    check_splits(run)
    checkpoint = newest_drafter(Path(cfg.run))
    description = read_description(checkpoint)
    target = load_target(run.target, choose_device(run.engine.device, 0))
    accelerate(target)
    drafter = load_checkpoint(checkpoint, target)
    eos, length = target.info.eos_token_ids, run.data.max_length
    renderer = ChatRenderer(target.tokenizer, run.target.template_options, eos_token_ids=eos, max_length=length)
    trained = Trained(drafter, drafter_from_dict(description["drafter"]), target_info(description, checkpoint))
    origin = Origin(run.recipe, run.data.name, description["step"], run.target.path, run.target.revision or "")
    exported = export_as_asked(run, trained, target, renderer, Path(cfg.run), origin)
    emit(exported.report)
    emit(f"package: {exported.folder}")


if __name__ == "__main__":
    main()
