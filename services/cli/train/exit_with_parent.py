"""Run a command that is killed when its parent ends: `python -I -S exit_with_parent.py PARENT_PID COMMAND...`.

This process sets PR_SET_PDEATHSIG (Linux) and then executes the command, which keeps the pid and the setting. A `preexec_fn`
would do the same, but may deadlock in a parent that has threads. On other systems the command runs on after its parent.

The signal is SIGKILL, even for a learner that could still save its state: a parent with threads ends thread by thread, the
kernel may send the signal once for each, and a service aborts on the second SIGTERM anyway.

The kernel watches the parent's *thread*: the supervisor starts its children from its main thread.
This file imports nothing of the project, so that it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def wrapper() -> list[str]:
    """Return what precedes a command that is killed when this process ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid())]


def exit_with_parent(parent: int) -> bool:
    """Have the kernel kill this process when `parent` ends; False where it ended before."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


if __name__ == "__main__":
    if not exit_with_parent(int(sys.argv[1])):
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
