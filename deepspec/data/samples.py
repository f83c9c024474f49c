"""A set of tokenised samples, and its folder on disk.

The folder holds ``samples.safetensors`` (``input_ids`` int32 [N], ``loss_mask`` uint8 [N], ``offsets`` int64 [S+1];
sample i is the slice ``offsets[i]:offsets[i+1]``) and ``samples.json`` (version, ids, sources, report).
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, overload

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from deepspec.contracts import Sample
from deepspec.log import get_logger

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
log = get_logger(__name__)


@dataclass
class PrepareReport:
    """What a conversation file became. Counts, except ``supervised_tokens`` and ``tokens`` (tokens)."""

    conversations: int = 0
    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    rewritten_turns: int = 0  # earlier answers left unsupervised, because the template rewrites history
    cut_answers: int = 0  # answers cut by length: their end-of-turn is not supervised
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> conversations
    by_source: dict[str, int] = field(default_factory=dict)  # source -> samples

    def lines(self) -> list[str]:
        """Return the report for a person."""
        text = [
            f"{self.conversations} conversations -> {self.samples} samples, {self.tokens} tokens, "
            f"{self.supervised_tokens} supervised"
        ]
        if self.by_source:
            text.append(
                "sources: " + ", ".join(f"{name or '(none)'} {n}" for name, n in sorted(self.by_source.items()))
            )
        text += [f"dropped {n}: {reason}" for reason, n in sorted(self.dropped.items())]
        if self.cut_answers:
            text.append(f"{self.cut_answers} answers were cut by length, their end-of-turn is not supervised")
        if self.rewritten_turns:
            text.append(f"{self.rewritten_turns} earlier answers not supervised: the template rewrites history")
        return text


class SampleSet(Sequence[Sample]):
    """Tokenised samples over three flat tensors."""

    def __init__(
        self, input_ids: Tensor, loss_mask: Tensor, offsets: Tensor, ids: list[str], sources: list[str],
        report: PrepareReport,
    ) -> None:  # fmt: skip
        """Take ``input_ids`` int32 [N], ``loss_mask`` uint8 [N] and ``offsets`` int64 [S+1]."""
        self.input_ids = input_ids
        self.loss_mask = loss_mask
        self.offsets = offsets
        self.ids = ids
        self.sources = sources
        self.report = report

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        lengths: list[int] = self.offsets.diff().tolist()
        return lengths

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        start, end = self.offsets[index : index + 2].tolist()
        mask = self.loss_mask[start:end].bool().tolist()
        return Sample(self.ids[index], tuple(self.input_ids[start:end].tolist()), tuple(mask), self.sources[index])

    def checksum(self) -> str:
        """Return a CRC-32 of all that a training run reads of the set: ids, tokens, masks and lengths."""
        value = zlib.crc32(json.dumps(self.ids).encode())
        for tensor in (self.input_ids, self.loss_mask, self.offsets):
            value = zlib.crc32(tensor.contiguous().numpy().data, value)
        return f"{value:08x}"


def save_samples(folder: Path, samples: SampleSet) -> None:
    """Write a set under a temporary name and rename it; whoever comes second keeps what the first one wrote."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        tensors = {"input_ids": samples.input_ids, "loss_mask": samples.loss_mask, "offsets": samples.offsets}
        save_file(tensors, temporary / "samples.safetensors")
        meta = {"version": VERSION, "ids": samples.ids, "sources": samples.sources, "report": asdict(samples.report)}
        (temporary / "samples.json").write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")
        if load_samples(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)  # what stood there cannot be read
            temporary.rename(folder)
    except OSError:
        if load_samples(folder) is None:  # else another rank was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_samples(folder: Path) -> SampleSet | None:
    """Return the stored set, None when there is none that can be read."""
    try:
        meta = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "samples.safetensors")
        report = PrepareReport(**meta["report"])
        samples = SampleSet(
            tensors["input_ids"], tensors["loss_mask"], tensors["offsets"], meta["ids"], meta["sources"], report
        )
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be used (%s); the samples are made again", folder, error)
        return None
    return samples if meta.get("version") == VERSION and _consistent(samples) else None


def _consistent(samples: SampleSet) -> bool:
    size = len(samples.input_ids)
    return (
        len(samples.loss_mask) == size
        and len(samples.offsets) == len(samples.ids) + 1 == len(samples.sources) + 1
        and int(samples.offsets[-1]) == size
    )
