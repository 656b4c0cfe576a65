"""The time limit of the environments that a service builds and resets: one that hangs would hang the service for ever."""

from __future__ import annotations

from contextlib import AbstractContextManager

from common.observability import logs
from common.runtime.lifecycle import BUILD_SECONDS, time_limit
from common.units import Seconds

_log = logs.EventLog(__name__)


def build_limit() -> AbstractContextManager[None]:
    """Return a context manager that warns of environments that are slow to build, and ends the process with 1 if they hang."""
    return time_limit(BUILD_SECONDS, on_slow=_warn, on_limit=_report)


def _warn(seconds: Seconds) -> None:
    _log.warning("environment_slow", detail=f"not built and reset after {seconds:.0f} s", limit_s=BUILD_SECONDS)


def _report(seconds: Seconds) -> None:
    detail = f"the environment hangs: not built and reset within {seconds:.0f} s"
    _log.error("environment_hangs", detail=detail, consequence="this process ends")
