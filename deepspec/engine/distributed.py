"""Ranks: how many there are, which one this is, and the few collectives that the loop needs.

Any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT will do (torchrun, DeepSpeed's own,
``srun`` through ``launch/slurm.sbatch``). Without them the program is one rank.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from deepspec.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from deepspec.config.schema import EngineConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks. ``control`` carries host-side flags without touching the GPU's queue."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files and speaks."""
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add ``tensor`` up over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give every rank the first rank's values, in place."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.data, src=0)

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank; every rank gets the same answer."""
        if self.world_size == 1:
            return flag
        value = torch.tensor(int(flag), dtype=torch.int32)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.control)
        return bool(value.item())

    def from_first(self, text: str | None) -> str | None:
        """Return the first rank's ``text`` on every rank."""
        if self.world_size == 1:
            return text
        box: list[str | None] = [text]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def first_then_all(self, make: Callable[[], T]) -> T:
        """Let the first rank ``make`` something that it leaves in a cache, then every other rank."""
        result: T | None = None
        error: Exception | None = None
        if self.is_first:
            try:
                result = make()
            except Exception as problem:  # noqa: BLE001 - raised again as soon as every rank knows
                error = problem
        if self.any(error is not None):
            raise error or TrainingError("the first rank failed; see its message")
        return make() if result is None else result


@contextmanager
def joined_ranks(config: EngineConfig) -> Iterator[Ranks]:
    """Join the process group for the length of a block; a rank that fails leaves at once, so that others notice."""
    ranks = start_ranks(config)
    yield ranks
    if dist.is_initialized():
        dist.destroy_process_group()


def start_ranks(config: EngineConfig) -> Ranks:
    """Join the process group that the launcher describes and choose this rank's device."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(config.device, local_rank)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if world_size == 1 and config.kind == "plain":
        return Ranks(0, local_rank, 1, device)
    if not dist.is_initialized():
        _init_process_group(rank, world_size, device)
    control = dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else dist.group.WORLD
    return Ranks(rank, local_rank, world_size, device, control)


def _init_process_group(rank: int, world_size: int, device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, rank=rank, world_size=world_size)
        return
    if world_size > 1:
        raise ConfigError("WORLD_SIZE is above 1 but MASTER_ADDR is not set; start through launch/torchrun.sh")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of this rank."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("engine.device=cuda, but PyTorch finds no CUDA device; set engine.device=cpu or auto")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local_rank} of this machine has no GPU of its own ({torch.cuda.device_count()} found); "
            "start fewer processes or set engine.device=cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
