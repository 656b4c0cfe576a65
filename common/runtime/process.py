"""The parts that the roots of all services share: exit codes, the resources that a process takes, its random seeds."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import resource
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np

from common.errors import RookeryError
from common.observability.health import Health
from common.observability.logs import EventLog, configure, flush
from common.runtime.lifecycle import BUILD_SECONDS, CLOSE_SECONDS, Shutdown, time_limit
from common.units import Seconds

INTERRUPTED = 130  # what a shell reports after Ctrl-C
LINGER_SECONDS: Seconds = 5.0  # between two ticks of a learner that has nothing left to do

Purpose: TypeAlias = Literal["model", "environment", "policy"]
_PURPOSE_KEYS = {"model": 0, "environment": 1, "policy": 2}
_ROLE_KEYS = {"learner": 0, "actor": 1, "evaluator": 2, "env_worker": 3, "evaluate": 4}

_log = EventLog(__name__)


def run(main: Callable[[], int], *, program: str, debug: bool = False) -> int:
    """Run `main` and return the exit code of the process.

    An error of ours is ONE line on stderr and the code it carries; its traceback shows only with `debug`. Any other
    exception is a bug: code 1, and logged with its traceback. Garbage collection that `begin_process` paused goes on.
    """
    if not gc.isenabled():
        gc.freeze()  # modules live as long as the process
        gc.enable()
    try:
        return main()
    except RookeryError as error:
        if debug:
            traceback.print_exception(error)
        with suppress(OSError):  # a log file on a full disk must not change the exit code
            sys.stderr.write(f"{program}: error: {' '.join(str(error).split())}\n")
        return error.exit_code
    except KeyboardInterrupt:  # before the signals were installed
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  the outermost place: whatever comes here ends the process anyway
        if not logging.getLogger().handlers:
            configure(program)
        _log.bug("unexpected_error", error=error)
        return 1
    finally:
        flush()


def end_process(code: int) -> NoReturn:
    """End this process with `code`, without the interpreter's teardown, which with torch takes half a second of CPU time or more.

    For the last line of a service's program only, when all resources are closed. Functions registered with `atexit` are
    called: a user's environment may end its simulator there.
    """
    atexit._run_exitfuncs()  # noqa: SLF001  as multiprocessing does before its own `os._exit`
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has ended, or it is closed
            stream.flush()
    os._exit(code)


def linger(
    shutdown: Shutdown,
    health: Health,
    *,
    seconds: Seconds = LINGER_SECONDS,
    check: Callable[[], bool | None] = lambda: None,
    until: str = "SIGTERM",
) -> None:
    """Stay alive and ready until the stop is requested, because an orchestrator restarts each process that ends.

    Every `seconds` `check` returns True where there is another reason to end, and raises where a part of the service has died.
    `until` names the reasons in the log.
    """
    if shutdown.requested:
        return
    _log.info("lingering", until=until)
    health.ready()
    health.tick(doing="lingers", within=2 * seconds)
    while not shutdown.wait(seconds) and not check():
        health.tick(doing="lingers", within=2 * seconds)


def build_limit() -> AbstractContextManager[None]:
    """Return a context manager that warns of environments that are slow to build, and ends the process with 1 if they hang."""
    return _environment_limit("built and reset", BUILD_SECONDS)


def close_environments(environments: Any) -> None:
    """Close environments. If that hangs, the process ends with 1.

    An error of theirs is logged: raised, it would replace the one that came before, or fail a process whose work is done.
    """
    with _environment_limit("closed", CLOSE_SECONDS):
        try:
            environments.close()
        except Exception as error:  # noqa: BLE001  a user's environment may raise anything
            _log.warning("environment_not_closed", error=error, consequence="what it had opened may stay open")


def _environment_limit(done: str, limit: Seconds) -> AbstractContextManager[None]:
    """Return the limit of one piece of work on environments; where they hang, the log names the error that came before."""
    before = sys.exception()

    def on_slow(seconds: Seconds) -> None:
        _log.warning("environment_slow", detail=f"not {done} after {seconds:.0f} s", limit_s=limit)

    def on_limit(seconds: Seconds) -> None:
        after = f", after {before!r}" if before else ""
        detail = f"the environment hangs: not {done} within {seconds:.0f} s{after}"
        _log.error("environment_hangs", detail=detail, consequence="this process ends")

    return time_limit(limit, on_slow=on_slow, on_limit=on_limit)


def set_torch_threads(threads: int) -> None:
    """Let torch share each operation among `threads` threads of this process, and start no other threads."""
    import torch  # noqa: PLC0415  the command line uses this module and must not wait seconds for torch

    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:  # torch accepts the call only once in a process
        torch.set_num_interop_threads(1)


def allow_descriptors() -> None:
    """Let this process open as many files and connections as its hard limit allows: the usual soft limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a system that does not let a process go to its hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def derive_seed(seed: int, purpose: Purpose, *, role: str, index: int = 0, generation: int = 0) -> int:
    """Return a seed below 2**31 for one purpose of one incarnation of one process, from the one seed of the run.

    The streams are reproducible and disjoint (O'Neill's seed_seq mixing, as in numpy). `role` is that of the process, or
    "evaluate" for `rookery evaluate`, which must not repeat the episodes by which the evaluator chose the best policy of the run.
    """
    key = (_ROLE_KEYS[role], index, generation, _PURPOSE_KEYS[purpose])
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0] >> 1)
