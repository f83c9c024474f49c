"""``python -m deepspec.export run=DIR``: from a trained run to a verified, quantised inference package.

    python -m deepspec.export run=runs/quickstart
    python -m deepspec.export run=runs/quickstart export.layout=universal
    python -m deepspec.export run=runs/quickstart source=FOLDER

The newest checkpoint of the run is written, reloaded from disk and compared with the trained drafter; a package that
strays is not written (docs/quantisation.md). ``export.layout`` writes a folder for servers instead (docs/serving.md);
``source`` brings in a drafter that another project has trained.
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
    from deepspec.errors import ConfigError
    from deepspec.export.card import Origin
    from deepspec.export.importers.load import import_run
    from deepspec.export.layouts.command import export_for_servers
    from deepspec.export.material import read_material
    from deepspec.export.quantise import Formats
    from deepspec.export.run import export_package
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
    if run.data.test is None:
        raise ConfigError("data.test is not set: export compares the package with the drafter on test conversations")
    kind = settings.profile if settings.layout == "native" else settings.layout
    out = Path(settings.out) if settings.out else Path(cfg.run) / f"package-{kind}"
    checkpoint = newest_drafter(Path(cfg.run))
    description = read_description(checkpoint)
    target = load_target(run.target, choose_device(run.engine.device, 0))
    accelerate(target)
    drafter = load_checkpoint(checkpoint, target)
    renderer = ChatRenderer(
        target.tokenizer, run.target.template_options, eos_token_ids=target.info.eos_token_ids,
        max_length=run.data.max_length,
    )  # fmt: skip
    material = read_material(
        run.data.test, renderer, prompts=settings.verify_prompts, samples=settings.verify_samples,
        max_new_tokens=run.evaluate.max_new_tokens, stop_ids=renderer.eos_token_ids,
    )  # fmt: skip
    trained = (drafter, drafter_from_dict(description["drafter"]), target_info(description, checkpoint))
    origin = Origin(run.recipe, run.data.name, description["step"], run.target.path)
    if settings.layout == "native":
        exported = export_package(
            *trained, target, out, material, profile=settings.profile,
            formats=Formats(settings.qkv, settings.int4_group, settings.overflow), origin=origin, force=settings.force,
            template_options=run.target.template_options, max_length_change=settings.max_length_change,
        )  # fmt: skip
    else:
        exported = export_for_servers(settings, *trained, target, out, material, origin)
    emit(exported.report)
    emit(f"package: {exported.folder}")


if __name__ == "__main__":
    main()
