"""What a run is doing, in one value: the learner's `GET /status`, and every service's `/metrics` for the bottleneck.

`RunStatus` is what the view shows and what `--log-format json` prints; unknown fields of a newer learner are ignored.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, TypeAlias

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field

from common.units import MIB, EnvSteps, Seconds, Version

TIMEOUT: Seconds = 0.5
LIMIT = 16 * MIB  # of one page: ours have some KiB

STARTING = "starting"  # until the learner has answered once

Samples: TypeAlias = Mapping[tuple[str, str], float]
"""One service's metrics: (name, value of its first label or "") -> value."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Rates(_Value):
    """Emulator frames per second, over three windows."""

    last_10s: float = 0.0
    last_60s: float = 0.0
    run: float = 0.0


class Queue(_Value):
    """The learner's bounded queue, in messages."""

    depth: int = 0
    capacity: int = 0


class Lag(_Value):
    """Policy lag in versions: newest published minus acting, of what was trained on. None before the first update."""

    min: float | None = None
    mean: float | None = None
    max: float | None = None


class Evaluation(_Value):
    """One finished evaluation."""

    version: Version
    mode: str
    mean: float
    episodes: int


class Target(_Value):
    """What ends the run."""

    mean100: float | None = None
    env_steps: EnvSteps | None = None


class Ledger(_Value):
    """Where every produced env step is."""

    produced: EnvSteps = 0
    trained: EnvSteps = 0
    queued: EnvSteps = 0
    in_flight: EnvSteps = 0
    dropped: Mapping[str, EnvSteps] = Field(default_factory=dict)


class RunStatus(_Value):
    """The learner's answer, and what only the supervisor knows (`actors_wanted`, `restarts`, `bottleneck`)."""

    phase: str = STARTING
    wall_seconds: Seconds = 0.0
    env_steps: EnvSteps = 0
    env_steps_per_second: float = 0.0
    frames_per_second: Rates = Rates()
    learner_updates: int = 0
    version: Version = 0
    queue: Queue = Queue()
    policy_lag: Lag = Lag()
    mean100: float | None = None
    last_evaluation: Evaluation | None = None
    target: Target = Target()
    peers: Mapping[str, int] = Field(default_factory=dict)
    ledger: Ledger = Ledger()
    actors_wanted: int = 0
    restarts: int = 0
    bottleneck: str = ""


def parse_metrics(text: str) -> Samples:
    """Read the Prometheus text format. Histogram buckets are left out: only their sums and counts are of use here."""
    families = text_string_to_metric_families(text)
    samples = (sample for family in families for sample in family.samples if not sample.name.endswith("_bucket"))
    return {(sample.name, next(iter(sample.labels.values()), "")): sample.value for sample in samples}


def by_label(samples: Samples, name: str) -> dict[str, float]:
    """All values of one metric by the value of its label, such as seconds by phase."""
    return {label: value for (sample, label), value in samples.items() if sample == name}


def get(url: str, *, timeout: Seconds = TIMEOUT, limit: int = LIMIT) -> tuple[int, str]:
    """Status and text of a page.

    Raises OSError or HTTPException where nobody answers, ValueError where it can be no page of ours.
    """
    try:
        answer = urllib.request.urlopen(url, timeout=timeout)  # noqa: S310  # http and https only: see who calls
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        body = answer.read(limit + 1)
        if len(body) > limit:
            raise ValueError(f"more than {limit} bytes at {url}")
        return answer.status, body.decode()


def fetch(url: str) -> str | None:
    """GET `url`; None where nobody answers in time, or another, which is ordinary while a service starts or restarts."""
    try:
        code, text = get(url)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    return text if code == http.client.OK else None


def fetch_status(base_url: str) -> dict[str, Any] | None:
    """The learner's `/status`, or None where nobody answers, or somebody else."""
    text = fetch(f"{base_url}/status")
    try:
        answer = None if text is None else json.loads(text)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def fetch_metrics(base_url: str) -> Samples | None:
    """One service's `/metrics`, or None where nobody answers, or somebody else."""
    text = fetch(f"{base_url}/metrics")
    try:
        return None if text is None else parse_metrics(text)
    except ValueError:
        return None
