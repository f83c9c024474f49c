"""Prompts to answers by the target to tokenised samples: ``python -m deepspec.prepare recipe=NAME``."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from deepspec.config.cli import hydra_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspec.config.schema import RunConfig
    from deepspec.contracts import Conversation
    from deepspec.targets.target import Target


@hydra_command("config")
def main(cfg: RunConfig) -> None:
    """Get the target, let it answer the prompts that have no answer, and tokenise every split.

    mode=target stops after the target, mode=answers after the answers; out=FOLDER keeps a copy of the answered files;
    show=N prints N samples with their supervised tokens marked.
    """
    from deepspec.data.answer_store import AnswerStore
    from deepspec.data.answers import answer_file
    from deepspec.data.chat import ChatRenderer
    from deepspec.data.conversations import read_conversations, write_conversations
    from deepspec.data.prepare import prepare_samples
    from deepspec.data.report import prepared_lines
    from deepspec.data.show import show_samples
    from deepspec.engine.distributed import choose_device
    from deepspec.log import emit
    from deepspec.targets.load import fetch_target, load_target, load_tokenizer

    tokenizer, eos_token_ids = load_tokenizer(cfg.target)
    emit(f"target {cfg.target.name}: {fetch_target(cfg.target) if cfg.mode == 'target' else cfg.target.path}")
    if cfg.mode == "target":
        return
    renderer = ChatRenderer(
        tokenizer, cfg.target.template_options, eos_token_ids=eos_token_ids, max_length=cfg.data.max_length
    )
    cache = Path(cfg.paths.cache)
    store = AnswerStore(cache, renderer, cfg.target.path, cfg.target.revision, asdict(cfg.generate))

    @lru_cache(maxsize=1)
    def target() -> Target:
        return load_target(cfg.target, choose_device(cfg.engine.device, 0))

    def answer(split: str, conversations: Sequence[Conversation], out: Path) -> None:
        emit(f"{split}: {answer_file(target(), renderer, conversations, cfg.generate, out).line()}")

    given = {"train": cfg.data.train, "validation": cfg.data.validation, "test": cfg.data.test}
    paths = {name: path for name, path in given.items() if path is not None}
    files = {name: store.complete(path, partial(answer, name), cfg.data.limit) for name, path in paths.items()}
    if cfg.out is not None:
        for name, file in files.items():
            write_conversations(Path(cfg.out) / f"{name}.jsonl", read_conversations(file, cfg.data.limit))
            emit(f"{name} written to {Path(cfg.out) / f'{name}.jsonl'}")
    if cfg.mode == "answers":
        return
    samples = {name: prepare_samples(file, renderer, cache, limit=cfg.data.limit) for name, file in files.items()}
    for line in prepared_lines(files, samples, cfg.data.limit):
        emit(line)
    show_samples(samples["train"], tokenizer, cfg.show)


if __name__ == "__main__":
    main()
