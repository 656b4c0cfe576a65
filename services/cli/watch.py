"""Asks the services how they are, once a second, in a thread: a service that hangs must not make the supervisor wait."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from common.units import Seconds
from services.cli.readings import Moment, Reading, compare
from services.cli.status import STARTING, RunStatus, fetch_metrics, fetch_status
from services.cli.supervisor import LEARNER

PERIOD: Seconds = 1.0
MOMENTS = 11  # ten seconds


class Watch:
    """`latest` is the newest status; replaced whole, so that it may be read from any thread."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        """`urls` gives each child's metrics address, such as http://127.0.0.1:20000."""
        self._urls = dict(urls)
        self._kept: deque[Moment] = deque(maxlen=MOMENTS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.latest = RunStatus()

    def __enter__(self) -> Self:
        """Begin to ask."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop; a question under way is left to its timeout."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            self.latest = self.ask()
            self._ended.wait(max(0.0, PERIOD - (time.monotonic() - began)))

    def ask(self) -> RunStatus:
        """One round of questions."""
        answer = fetch_status(self._urls[LEARNER])
        if answer is None:  # it starts, or is being restarted: what it said last still holds, but for its phase
            away = self.latest.phase != STARTING
            return self.latest.model_copy(update={"phase": "learner away", "bottleneck": ""}) if away else self.latest
        said = {name: value for name, value in answer.items() if value is not None}
        try:
            return RunStatus.model_validate(said | {"bottleneck": self._bottleneck(time.monotonic())})
        except ValidationError:  # somebody else answers at that address
            return self.latest

    def _bottleneck(self, now: Seconds) -> str:
        """The verdict on the last ten seconds, by the metrics of all services."""
        answers = {child: fetch_metrics(url) or {} for child, url in self._urls.items()}
        self._kept.append({child: Reading(at=now, role=child.partition("-")[0], samples=answers[child]) for child in answers})
        return compare(self._kept[0], self._kept[-1]).bottleneck.sentence
