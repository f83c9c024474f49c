"""Logging, results for people, and progress on long work.

Everything a program says about its own running goes through ``get_logger``; the results a person asked for go to
standard output through ``emit``, and only there. Works before ranks exist: the rank is read from the environment.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

T = TypeVar("T")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def rank() -> int:
    """Return this process's rank as the launcher set it, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; call as ``log = get_logger(__name__)``."""
    return logging.getLogger(name)


def setup_logging(log_dir: Path | None = None, level: str = "INFO") -> None:
    """Send log lines to standard error (rank 0) and, when ``log_dir`` is given, to one file a rank."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(level if rank() == 0 else "ERROR")
    handlers: list[logging.Handler] = [console]
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_dir / f"rank{rank()}.log"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        root.addHandler(handler)
    root.setLevel(level)


def emit(text: str = "", end: str = "\n") -> None:
    """Write a result for a person to standard output."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def printable(text: str) -> str:
    """Return ``text`` without the control characters that could steer a terminal; lines and tabs stay."""
    return "".join(c if c in "\n\t" or c.isprintable() else " " * c.isspace() for c in text)


def progress(items: Iterable[T], total: int, what: str, every_s: float = 20.0) -> Iterator[T]:
    """Yield ``items`` with a bar on a terminal and a plain line every ``every_s`` seconds elsewhere; rank 0 only."""
    if rank() != 0:
        yield from items
        return
    terminal = sys.stderr.isatty()
    start = shown = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - shown >= (0.2 if terminal else every_s) or done == total:
            shown = now
            _show(what, done, total, now - start, terminal)
    if terminal:
        sys.stderr.write("\n")


def _show(what: str, done: int, total: int, seconds: float, terminal: bool) -> None:
    share = min(1.0, done / max(total, 1))
    left = seconds / max(share, 1e-9) - seconds
    line = f"{what}: {done}/{total} ({share:.0%}), {seconds:.0f} s, about {left:.0f} s left"
    if terminal:
        bar = "#" * int(24 * share)
        sys.stderr.write(f"\r{what} [{bar:<24}] {done}/{total}  {left:4.0f} s left ")
    else:
        sys.stderr.write(line + "\n")
    sys.stderr.flush()
