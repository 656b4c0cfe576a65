"""The process of a run in a series: its exit code, and the stop signals that it receives."""

import os
import signal
import subprocess
import sys

import pytest

from services.cli.series.run import train_processes

pytestmark = pytest.mark.system

# Waits for as many SIGTERM as its last argument says, and then for SIGUSR1; exits with 40 and the number of all SIGTERM.
CHILD = """
import pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
pathlib.Path(sys.argv[1]).write_text("ready")
for _ in range(int(sys.argv[2])):
    signal.sigwait([signal.SIGTERM])
pathlib.Path(sys.argv[1]).with_name("counted").touch()
signal.sigwait([signal.SIGUSR1])
sys.exit(40 + int(sys.argv[2]) + (signal.SIGTERM in signal.sigpending()))
"""

# Ends at the first SIGTERM, as a run that still imports its modules: of the signal, or with its last argument as exit code.
STARTING = """
import os, pathlib, signal, sys
if sys.argv[2:]:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(int(sys.argv[2])))
pathlib.Path(sys.argv[1]).write_text("ready")
while True:
    signal.pause()
"""


def child():
    return train_processes(command=(sys.executable, "-c", CHILD))


@pytest.fixture(autouse=True)
def _three_more_turns(tmp_path, monkeypatch):
    """Send the child SIGUSR1 once its parent has gone round three times after it has counted: time for one SIGTERM too many."""
    turns, wait = [], subprocess.Popen.wait

    def counted(process, timeout=None):
        turns.extend([1] * (tmp_path / "counted").exists())
        if len(turns) > 3:
            process.send_signal(signal.SIGUSR1)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", counted)
    monkeypatch.setattr("services.cli.series.run.POLL_SECONDS", 0.01)


def test_the_exit_code_is_that_of_the_run(tmp_path):
    with child() as trainer:
        assert trainer.train([str(tmp_path / "ready"), "0"]) == 40
        assert not trainer.stopped


def test_a_stop_signal_reaches_the_run_once(tmp_path):
    ready, before = tmp_path / "ready", signal.getsignal(signal.SIGINT)

    def interrupt():
        if ready.exists() and not trainer.stopped:
            os.kill(os.getpid(), signal.SIGINT)
        return False

    with child() as trainer:
        assert trainer.train([str(ready), "1"], over=interrupt) == 41
        assert trainer.stopped
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("code", [(), ("143",)])
def test_a_run_that_a_stop_ends_before_it_handles_signals_was_stopped(tmp_path, code):
    ready = tmp_path / "ready"

    def interrupt():
        if ready.exists() and not trainer.stopped:
            os.kill(os.getpid(), signal.SIGINT)
        return False

    with train_processes(command=(sys.executable, "-c", STARTING)) as trainer:
        assert trainer.train([str(ready), *code], over=interrupt) == 0


def test_a_run_that_another_process_ends_has_failed(tmp_path):
    with train_processes(command=(sys.executable, "-c", "import os; os.kill(os.getpid(), 15)")) as trainer:
        assert trainer.train([]) == -signal.SIGTERM


def test_a_run_that_is_to_end_early_gets_one_signal_and_is_no_stop(tmp_path):
    ready = tmp_path / "ready"
    with child() as trainer:
        assert trainer.train([str(ready), "1"], over=ready.exists) == 41
        assert not trainer.stopped


def test_a_stop_of_a_run_that_is_over_is_one_signal(tmp_path):
    """The second one would end it at once, and lose what is not saved."""
    ready = tmp_path / "ready"

    def over():
        if ready.exists():
            os.kill(os.getpid(), signal.SIGINT)
        return ready.exists()

    with child() as trainer:
        assert trainer.train([str(ready), "1"], over=over) == 41
        assert trainer.stopped
