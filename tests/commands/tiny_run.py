"""A tiny target folder and conversation files, so that whole commands run in seconds."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers import MASK_TOKEN_ID, tiny_model, tiny_tokenizer

WORDS = ("red fish swims", "blue bird sings", "old tree grows", "small cat naps", "warm rain falls")


def write_target(folder: Path) -> Path:
    """Save a random Llama of six layers with its tokenizer."""
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_conversations(path: Path, count: int) -> Path:
    """Write ``count`` answered conversations of different lengths."""
    lines = []
    for i in range(count):
        answer = " and ".join(WORDS[(i + j) % len(WORDS)] for j in range(1 + i % 3))
        messages = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": f"t-{i}", "messages": messages, "source": "tiny", "finish_reason": "stop"}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def overrides(folder: Path, *, samples: int = 24) -> list[str]:
    """Write target and data below ``folder`` and return the command line that trains on them."""
    target = write_target(folder / "target")
    train = write_conversations(folder / "train.jsonl", samples)
    validation = write_conversations(folder / "validation.jsonl", 3)
    return [
        "recipe=quickstart",
        "target=path",
        f"target.path={target}",
        "target.name=tiny",
        f"target.mask_token_id={MASK_TOKEN_ID}",
        "target.target_layer_ids=[1,2,3]",
        "data=jsonl",
        f"data.path={train}",
        f"data.validation={validation}",
        "data.max_length=96",
        "data.anchors_per_sample=8",
        "drafter.num_layers=1",
        "drafter.gamma=3",
        "drafter.markov_rank=8",
        "drafter.init=random",
        "drafter.draft_vocab_size=null",
        "engine.micro_batch_size=2",
        "engine.global_batch_size=4",
        f"paths.cache={folder / 'cache'}",
        f"paths.run={folder / 'run'}",
        "train.log_every=2",
        "train.epochs=1",
        "train.max_steps=8",
        "features.memory_gib=0",
    ]
