"""Signals, output and the lock, with real processes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from deepspec.comparison import process
from deepspec.comparison.process import Processes, last_lines, locked
from deepspec.errors import Interrupted, UserError

TRAINING = 'trap "echo saved; exit 75" TERM INT; echo ready; while :; do sleep 0.02; done'


def test_exit_code_and_output(tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    with Processes() as execute:
        assert execute(["sh", "-c", "echo one; echo error: two >&2; exit 3"], output) == 3
        assert execute(["sh", "-c", "echo three"], output) == 0
    assert output.read_text() == "one\nerror: two\nthree\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_process_save_and_stops_the_study(tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "out.txt"

    def stop() -> None:
        deadline = time.monotonic() + 30
        while "ready" not in last_lines(output) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=stop)
    with Processes() as execute:
        thread.start()
        with pytest.raises(Interrupted, match=f"received {number.name}"):
            execute(["sh", "-c", TRAINING], output)
        with pytest.raises(Interrupted):
            execute(["sh", "-c", "echo more"], output)
    thread.join()
    assert output.read_text() == "ready\nsaved\n"
    assert signal.getsignal(number) is before


def test_a_terminal_reaches_the_process_through_here_alone(tmp_path: Path) -> None:
    """Ctrl-C goes to every process of a terminal's group: a training in it would get it twice, and end unsaved."""
    output = tmp_path / "out.txt"
    with Processes() as execute:
        execute([sys.executable, "-c", "import os; print(os.getpgrp())"], output)
    assert int(output.read_text()) != os.getpgrp()


def test_what_a_process_says_is_told_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "TOLD_EVERY_S", 0.02)
    marker = tmp_path / "told"

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "step 3" in record.getMessage():
                marker.touch()

    listener = Listener()
    process.log.addHandler(listener)
    try:
        with caplog.at_level(logging.INFO), Processes() as execute:
            script = f"printf 'step 1\\rstep 2\\nstep 3\\n'; while [ ! -e {marker} ]; do sleep 0.02; done"
            assert execute(["sh", "-c", script], tmp_path / "out.txt") == 0
    finally:
        process.log.removeHandler(listener)
    assert [r.getMessage() for r in caplog.records] == ["  step 3"], "once"


def test_the_last_lines_steer_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000 + b"\nfirst\n\n\x1b[31mlast\xff\n")
    assert last_lines(tmp_path / "a")[-2:] == ["first", "[31mlast\ufffd"]
    assert last_lines(tmp_path / "missing") == []


def test_one_comparison_at_a_time(tmp_path: Path) -> None:
    """A training that outlives its study keeps the folder, too."""
    folder, output = tmp_path / "study", tmp_path / "out.txt"
    with locked(folder), pytest.raises(UserError, match="another comparison"), locked(folder):
        pass
    with locked(folder) as lock, Processes(keep_open=lock) as execute:
        execute(["sh", "-c", f"(while [ ! -e {tmp_path / 'end'} ]; do sleep 0.02; done) > /dev/null 2>&1 &"], output)
    with pytest.raises(UserError, match=r"paths\.runs"), locked(folder):
        pass
    (tmp_path / "end").touch()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            with locked(folder):
                return
        except UserError:
            time.sleep(0.02)
    pytest.fail("the folder stayed locked")
