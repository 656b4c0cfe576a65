"""The state of a run in one value: the learner's `GET /status`, and every service's `/metrics` for the bottleneck.

`StatusPoller` reads it once a second. The views show a `RunStatus`, and `--log-format json` prints it. Unknown fields of a newer
learner are ignored.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import REFUSED_EXPERIENCE
from common.observability.deployment import EVALUATOR, LEARNER, Samples, Scrape, ServiceSample, by_label, compare
from common.observability.learner_metrics import MESSAGES_DROPPED
from common.observability.learner_stats import Progress
from common.observability.worker_metrics import EVALUATOR_EPISODES_PLAYING
from common.protocol.ledger import sum_counts
from common.units import EnvSteps, Seconds, Version
from services.cli.inspect.scrape import get, parse_metrics

T = TypeVar("T")

POLL_SECONDS: Seconds = 1.0
KEPT_SCRAPES = 11  # ten seconds

OF_EACH_RANK = ("workers", "queue", "ledger")
"""Parts of a learner's answer that each of its ranks has for itself, as it has the policy lag; all others are of the run."""

STARTING = "starting"  # phase until the learner answers for the first time
ENDED = ("stopping", "finished")  # phases of the learner after which it does not answer


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class FrameRates(_Value):
    """Emulator frames per second, over three windows."""

    last_10s: float = 0.0
    last_60s: float = 0.0
    run: float = 0.0


class Queue(_Value):
    """The learner's bounded queue of messages."""

    depth: int = 0
    capacity: int = 0


class PolicyLag(_Value):
    """Policy lag of the trained experience in versions. None before the first update."""

    min: float | None = None
    mean: float | None = None
    max: float | None = None


class EvaluationResult(_Value):
    """One finished evaluation."""

    version: Version
    mode: str
    mean: float
    episodes: int


class Target(_Value):
    """Target scores and budget of the run."""

    mean100: float | None = None
    evaluation: float | None = None
    env_steps: EnvSteps | None = None


class LedgerCounts(_Value):
    """Produced env steps by where they are now."""

    produced: EnvSteps = 0
    trained: EnvSteps = 0
    queued: EnvSteps = 0
    in_flight: EnvSteps = 0
    dropped: Mapping[str, EnvSteps] = Field(default_factory=dict)

    @property
    def accepted(self) -> EnvSteps:
        """Return the env steps that the learner has admitted, as far as they were not dropped later."""
        return self.trained + self.queued

    @property
    def refused(self) -> EnvSteps:
        """Return the env steps of experience that the learner refused for its content."""
        return sum(self.dropped.get(reason, 0) for reason in REFUSED_EXPERIENCE)


class RunStatus(_Value):
    """The learner's answer to `GET /status`; the supervisor adds the fields after `ledger`."""

    phase: str = STARTING
    wall_seconds: Seconds = 0.0
    env_steps: EnvSteps = 0
    env_steps_per_second: float = 0.0
    frames_per_second: FrameRates = FrameRates()
    learner_updates: int = 0
    version: Version = 0
    queue: Queue = Queue()
    policy_lag: PolicyLag = PolicyLag()
    mean100: float | None = None
    mean100_episodes: int = 0
    environments_unfinished: int = 0
    episodes_before_leaving: int = 0
    last_evaluation: EvaluationResult | None = None
    target: Target = Target()
    progress: Progress = Progress()
    training: Mapping[str, float] = Field(default_factory=dict)  # metrics of the newest update of this learner process
    workers: Mapping[str, int] = Field(default_factory=dict)
    ledger: LedgerCounts = LedgerCounts()
    actors_wanted: int = 0
    restarts: int = 0
    bottleneck: str = ""
    episodes_playing: int = 0  # of the running evaluation
    refused_messages: int = 0  # of experience, since the learner process started


# --- requests ---


def _fetch(url: str, parse: Callable[[str], T]) -> T | None:
    """GET `url`; None without a valid answer in time, as while a service starts or restarts."""
    try:
        code, text = get(url)
        return parse(text) if code == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError):
        return None


def fetch_status(base_url: str) -> dict[str, Any] | None:
    """Return the learner's `/status`, or None without a valid answer."""
    answer = _fetch(f"{base_url}/status", json.loads)
    return answer if isinstance(answer, dict) else None


def fetch_metrics(base_url: str) -> Samples | None:
    """Return one service's `/metrics`, or None without a valid answer."""
    return _fetch(f"{base_url}/metrics", parse_metrics)


def _lag_of_ranks(answers: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the policy lag of the env steps that all ranks trained on, from their answers."""
    lags = [(answer.get("policy_lag") or {}, max(1, answer["ledger"]["trained"])) for answer in answers]
    known = [(lag, trained) for lag, trained in lags if lag.get("mean") is not None]
    if not known:
        return {"min": None, "mean": None, "max": None}
    mean = sum(lag["mean"] * trained for lag, trained in known) / sum(trained for _, trained in known)
    return {"min": min(lag["min"] for lag, _ in known), "mean": mean, "max": max(lag["max"] for lag, _ in known)}


class StatusPoller:
    """`latest` is the newest status; it is replaced whole, so that any thread may read it."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = dict(urls)
        self._kept: deque[Scrape] = deque(maxlen=KEPT_SCRAPES)
        self._of_rank: dict[str, dict[str, Any]] = {}  # newest answer of each rank of the learner
        self._refused_at: dict[str, int] = {}  # messages of experience that each rank has refused, as of its newest metrics
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poll", daemon=True)
        self.latest = RunStatus()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop; a request that is under way ends at its timeout."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                self.latest = self.poll()
            except Exception:  # noqa: BLE001  a page that no parser foresaw must not end the thread, which no other replaces
                self.latest = self._unanswered()
            self._ended.wait(max(0.0, POLL_SECONDS - (time.monotonic() - began)))

    def poll(self) -> RunStatus:
        """Return the status as of now; the last one, with its phase, while the learner does not answer."""
        answer = fetch_status(self._urls[LEARNER])
        if answer is None:
            return self._unanswered()
        known = {name: value for name, value in answer.items() if value is not None} | self._sums(answer)
        try:
            status = RunStatus.model_validate(known | {"bottleneck": self._bottleneck(time.monotonic())})
        except ValidationError:  # another program answers at that address
            return self.latest
        evaluator = self._kept[-1].get(EVALUATOR)
        playing = evaluator.samples.get((EVALUATOR_EPISODES_PLAYING.name, ""), 0) if evaluator else 0
        refused = self._refused() if status.ledger.refused else 0
        return status.model_copy(update={"refused_messages": refused, "episodes_playing": int(playing)})

    def _unanswered(self) -> RunStatus:
        """Return the last status, which holds but for the phase while the learner starts, ends or is being restarted."""
        unreachable = self.latest.phase not in {STARTING, *ENDED}
        return self.latest.model_copy(update={"phase": "learner unreachable", "bottleneck": ""}) if unreachable else self.latest

    def _sums(self, first: dict[str, Any]) -> dict[str, Any]:
        """Return workers, queue, ledger and lag of all ranks of the learner together, `first` being the answer of rank 0.

        A rank that does not answer now counts with its newest answer, so that no sum falls and grows again.
        """
        for rank in self._ranks[1:]:
            answer = fetch_status(self._urls[rank])
            if answer and all(isinstance(answer.get(name), dict) for name in OF_EACH_RANK):
                self._of_rank[rank] = answer
        answers = [first, *self._of_rank.values()]
        if len(answers) == 1:
            return {}
        try:
            sums: dict[str, Any] = {name: sum_counts([answer[name] for answer in answers]) for name in OF_EACH_RANK}
            return sums | {"policy_lag": _lag_of_ranks(answers)}
        except (KeyError, TypeError, AttributeError):  # another program answers at one of the addresses
            return {}

    def _refused(self) -> int:
        for rank in self._ranks:
            if samples := self._kept[-1][rank].samples:
                messages = by_label(samples, MESSAGES_DROPPED.name)
                self._refused_at[rank] = sum(int(messages.get(reason, 0)) for reason in REFUSED_EXPERIENCE)
        return sum(self._refused_at.values())

    @property
    def _ranks(self) -> list[str]:
        return [LEARNER, *(child for child in self._urls if child.startswith(f"{LEARNER}-"))]

    def _bottleneck(self, now: Seconds) -> str:
        answers = {child: fetch_metrics(url) or {} for child, url in self._urls.items()}
        self._kept.append(
            {child: ServiceSample(at=now, role=child.partition("-")[0], samples=samples) for child, samples in answers.items()}
        )
        return compare(self._kept[0], self._kept[-1]).bottleneck.sentence
