"""Samples to a run folder (checkpoints, metrics, config): ``python -m deepspec.train recipe=NAME``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepspec.config.cli import hydra_command

if TYPE_CHECKING:
    from deepspec.config.schema import RunConfig
    from deepspec.engine.distributed import Ranks


@hydra_command("config")
def main(cfg: RunConfig) -> None:
    """Distil a drafter from its frozen target.

    Goes on from the newest checkpoint in paths.run; train.resume=false starts anew. The same program runs under
    torchrun, DeepSpeed's launcher and Slurm.
    """
    from deepspec.engine.signals import stoppable
    from deepspec.engine.status import recorded_status
    from deepspec.log import setup_logging

    run = Path(cfg.paths.run)
    with recorded_status(run), stoppable():
        from deepspec.engine.distributed import joined_ranks  # imports torch, which takes a while

        with joined_ranks(cfg.engine) as ranks:
            setup_logging(run / "logs")
            train(cfg, run, ranks)


def train(cfg: RunConfig, run: Path, ranks: Ranks) -> None:
    """Build target, drafter and data, and hand them to the loop."""
    import torch

    from deepspec.config.resolve import save_config, to_plain
    from deepspec.engine.build import attention_backend, build_trainer
    from deepspec.engine.inputs import read_inputs
    from deepspec.engine.start import choose_vocabulary, start_weights
    from deepspec.features.online import online_features
    from deepspec.targets.load import layer_ids, load_target

    target = load_target(cfg.target, ranks.device)
    taps = layer_ids(cfg.target, target.info.num_layers)
    torch.manual_seed(cfg.seed)
    drafter = cfg.drafter.build(target.info, taps, cfg.target.mask_token_id)
    drafter.loss_precision = cfg.engine.loss_precision
    drafter.attention_backend = attention_backend(cfg.engine.attention, ranks.device)
    drafter.bind(target.head)
    inputs = read_inputs(cfg, target, ranks)
    choose_vocabulary(cfg, drafter, target.info, inputs)
    features = online_features(
        target,
        drafter.taps,
        cfg.features.memory_gib,
        reduced=drafter.vocabulary is not None,
        visits=cfg.train.epochs,
    )
    trainer = build_trainer(
        cfg,
        run=run,
        ranks=ranks,
        drafter=drafter,
        info=target.info,
        inputs=inputs,
        features=features,
        start=lambda: start_weights(cfg, drafter, target, inputs, features, ranks),
        plain_config=to_plain(cfg),
    )
    if ranks.is_first:  # now that the checkpoint, if there is one, was found to fit
        save_config(cfg, run / "config.yaml")
    trainer.run()


if __name__ == "__main__":
    main()
