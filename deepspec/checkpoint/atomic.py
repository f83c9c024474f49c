"""Files and folders that are either whole or not there."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPORARY_SUFFIX = ".tmp"


def sync_path(path: Path) -> None:
    """Flush a file, or the list of entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` under a temporary name, flush it, and rename it to ``path``."""
    temporary = path.with_name(f"{path.name}{TEMPORARY_SUFFIX}{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_path(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def free_path(path: Path) -> Path:
    """Return ``path`` with the first number behind it, ``path-1`` on, that nothing stands under."""
    number = 1
    while (free := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return free


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes ``path`` when the block ends well and vanishes otherwise.

    An older ``path`` is replaced.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.iterdir():
            sync_path(file)
        sync_path(temporary)
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_path(path.parent)
