"""SIGTERM and SIGINT before and after the steps of training, where a run can end at any point and nothing is lost."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deepspec.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGINT)


class _Stop(BaseException):
    """Passes through code that catches every ``Exception``."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Let either signal end the block at once; ``SignalHook`` takes both over while steps are run.

    Raises:
        Interrupted: a signal came.
    """

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        # When the first rank leaves, a launcher sends SIGTERM to the others, which may still have to write status.json.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise _Stop(signal.Signals(number).name)

    previous: dict[signal.Signals, Any] = {}
    try:
        for number in STOPPING:
            previous[number] = signal.signal(number, stop)
        yield
    except _Stop as received:
        raise Interrupted(f"stopped between steps: received {received}; run the same command to go on") from None
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) is stop:  # else one was received
                signal.signal(number, handler)
