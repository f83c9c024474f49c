"""Commands as processes, one at a time: signals are passed on to them, and what they say goes into a file."""

from __future__ import annotations

import fcntl
import signal
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deepspec.engine.signals import STOPPING
from deepspec.errors import Interrupted, UserError
from deepspec.log import get_logger, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import FrameType

log = get_logger(__name__)

TOLD_EVERY_S = 30.0
_TAIL_BYTES = 4096


class Processes:
    """Runs a command and waits for its end.

    A process has a group of its own, so that Ctrl-C reaches it once, through here: the first SIGTERM or SIGINT lets a
    training save, a second SIGINT ends it at once. ``keep_open`` is a file that it holds open as long as it lives.
    """

    def __init__(self, keep_open: int | None = None) -> None:
        self._keep_open = keep_open
        self._received = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Processes:
        """Take over both signals."""
        for number in STOPPING:
            self._previous[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __call__(self, command: Sequence[str], output: Path) -> int:
        """Run ``command``, append what it writes to ``output``, and return its exit code (negative: a signal's number).

        Raises:
            Interrupted: a signal came, and the process has ended.
        """
        self._stop_if_asked()
        with output.open("ab") as file:
            kept = () if self._keep_open is None else (self._keep_open,)
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0, pass_fds=kept
            )
        if self._received:  # between the last look and the start
            self._process.terminate()
        code = self._wait(self._process, output)
        self._process = None
        self._stop_if_asked()
        return code

    def _wait(self, process: subprocess.Popen[bytes], output: Path) -> int:
        """Wait, and tell every now and then what the process said last."""
        told = ""
        while True:
            try:
                return process.wait(timeout=TOLD_EVERY_S)
            except subprocess.TimeoutExpired:
                said = last_lines(output)[-1:]
                if said and said[0] != told:
                    told = said[0]
                    log.info("  %s", told)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._received = signal.Signals(number).name
        if self._process is not None:
            self._process.send_signal(number)

    def _stop_if_asked(self) -> None:
        if self._received:
            raise Interrupted(f"received {self._received}; run the same command to go on")


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Keep ``folder``, made if it is missing, for this process and those that inherit the file it yields.

    Raises:
        UserError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another comparison, or a training that it left behind, works in {folder}; wait for it, end it, or "
                "set paths.runs"
            ) from None
        yield file.fileno()


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a file that hold anything, without what could steer a terminal."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.strip() for line in printable(text.replace("\r", "\n")).splitlines() if line.strip()]
