"""Run a command that dies with its parent: `python -I -S tether.py PARENT_PID COMMAND...`.

The kernel is asked to kill this process when its parent ends (Linux, prctl PR_SET_PDEATHSIG), then the
command takes this process over: same pid, and the wish survives exec. Done here and not in a `preexec_fn`,
which may deadlock in a parent that has threads. Elsewhere than on Linux the command simply runs, untethered.

Why SIGKILL, even for a learner that could still save: a parent that has threads dies thread by thread, and the kernel
may send the signal once for each. To our services a later SIGTERM means "at once", so that asking is no better.

The wish is bound to the parent's *thread*: the supervisor starts its children from its main thread.
Imports nothing of this project, so that it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tether(parent: int) -> bool:
    """Ask to be killed at the end of `parent`; False where the parent had gone before we could ask."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


if __name__ == "__main__":
    if not tether(int(sys.argv[1])):
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606  # the point of this file
