"""The CPU limit of the container around a process, and its metrics: how often the container used its quota up and was stopped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.observability.metrics import UNKNOWN, Metric

QUOTA_STATES = ("throttled", "not_throttled")


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """A quota of CPU time in each period (of 100 ms by default), and what became of the periods so far."""

    cores: float  # core seconds per second
    periods: int = 0  # in which processes of the container ran
    throttled: int = 0  # of these: the quota was used up, and all had to wait for the next period


def cpu_limit_metrics(service: str) -> tuple[Metric[Any], Metric[Any]]:
    """Return the metrics of the CPU limit around a service, which `cpu_limit` of its state returns as of now."""

    def cores(state: Any) -> float:
        limit: CpuLimit | None = state.cpu_limit()
        return limit.cores if limit else UNKNOWN

    def periods(state: Any) -> dict[str, float]:
        limit = state.cpu_limit() or CpuLimit(0.0)
        return dict(zip(QUOTA_STATES, (limit.throttled, limit.periods - limit.throttled), strict=True))

    return (
        Metric(
            f"rookery_{service}_cpu_limit_cores",
            "CPU limit of the container in cores; NaN where it has none.",
            read=cores,
        ),
        Metric(
            f"rookery_{service}_cpu_limit_periods_total",
            "Periods of the container's CPU limit in which it ran, 100 ms each by default. In a throttled one it used up its CPU "
            "time and was stopped until the next. Counts all processes of the container.",
            read=periods,
            labels={"state": QUOTA_STATES},
        ),
    )
