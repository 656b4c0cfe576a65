"""The end of a process, asked for by a thread, by a signal, and by an impatient user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from common.runtime import lifecycle
from common.runtime.lifecycle import Echo, Shutdown, on_signals, time_limit

pytestmark = pytest.mark.service


def test_nothing_is_requested_at_first():
    """A service that runs."""
    shutdown = Shutdown()
    assert (shutdown.requested, shutdown.reason) == (False, "")
    assert not shutdown.wait(0.0)


def test_the_first_request_stands():
    """The target was reached, and then SIGTERM came: the reason is the target."""
    shutdown = Shutdown()
    shutdown.request("target reached")
    shutdown.request("SIGTERM")
    assert (shutdown.requested, shutdown.reason) == (True, "target reached")


def test_a_request_wakes_a_waiting_thread():
    """The train loop ends while the root waits for it."""
    shutdown = Shutdown()
    threading.Thread(target=shutdown.request, args=("done",)).start()
    assert shutdown.wait(120.0)
    assert shutdown.reason == "done"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request_with_its_name(number):
    """Kubernetes sends SIGTERM, Ctrl-C sends SIGINT; both mean: end well."""
    before = signal.getsignal(number)
    shutdown = Shutdown()
    with on_signals(shutdown):
        os.kill(os.getpid(), number)
        assert shutdown.wait(120.0)
    assert shutdown.reason == number.name
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_the_process_at_once():
    """The user pressed Ctrl-C, waited, and pressed again."""
    program = (
        "import os, signal\n"
        "from common.runtime.lifecycle import Shutdown, on_signals\n"
        "shutdown, now = Shutdown(), [0.0]\n"
        "with on_signals(shutdown, clock=lambda: now[0]):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert shutdown.wait(120.0)\n"
        "    now[0] = 1.0\n"
        "    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('too late', flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    assert ended.stdout == b"still here\n"


def test_one_request_that_comes_twice_is_one():
    """`timeout` signals the process, and then the group that it is in."""
    shutdown = Shutdown()
    with on_signals(shutdown, clock=lambda: 0.0):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert shutdown.wait(120.0)
    assert shutdown.reason == "SIGTERM"


def test_an_echo_comes_at_once_and_does_not_put_off_a_second_request():
    """By hand: half a second counts from the first signal, however many come."""
    times = iter([30.0, 30.001, 30.4, 30.6, 31.0])
    echo = Echo(lambda: next(times))
    assert [echo.heard() for _ in range(5)] == [False, True, True, False, False]


def test_work_beyond_its_time_limit_is_reported_and_ends_the_process(monkeypatch):
    monkeypatch.setattr(lifecycle, "SLOW_SECONDS", 0.01)
    ended, reported = threading.Event(), []

    def end(code):
        reported.append(code)
        ended.set()

    with time_limit(0.02, on_slow=reported.append, on_limit=reported.append, exit_process=end):
        assert ended.wait(60.0)
    assert reported == [0.01, 0.02, 1]


def test_work_within_its_time_limit_is_not_reported(monkeypatch):
    watches = []
    monkeypatch.setattr(lifecycle, "Thread", lambda **thread: watches.append(thread["target"]) or threading.Thread(**thread))
    with time_limit(3600.0, on_slow=pytest.fail, on_limit=pytest.fail, exit_process=pytest.fail):
        pass
    watches[0]()  # returns at once, because the work has ended
