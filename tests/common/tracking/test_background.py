"""Tests of a tracker in a thread of its own: its server is slow, away, or comes back."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace

import pytest

from common.tracking.background import POINTS_AT_ONCE, BackgroundTracker, Point

pytestmark = pytest.mark.service

PATIENCE = 120.0  # only a fault lets it pass


class Server:
    """A tracker whose server can go away or hang; it counts how often it was opened."""

    def __init__(self):
        self.received, self.batches, self.results, self.opened, self.closed, self.reports = [], [], [], 0, 0, []
        self.up, self.hanging, self.reported, self.asked = True, threading.Event(), threading.Event(), threading.Event()
        self.ready = threading.Event()  # opened
        self.hanging.set()

    def __call__(self):
        self._answer()
        self.opened += 1
        self.ready.set()
        return self

    def _answer(self):
        self.asked.set()
        assert self.hanging.wait(PATIENCE)
        if not self.up:
            raise ConnectionError("away")

    def write(self, points):
        self._answer()
        self.received += [point.env_steps for point in points]
        self.batches.append(len(points))

    def finish(self, result, *, complete):
        self._answer()
        self.results.append((len(self.received), dict(result), complete))

    def close(self):
        self.closed += 1

    def report(self, event, *, tracker, error="", **_):
        self.reports.append((event, tracker, str(error)))
        self.reported.set()

    def tracker(self, **settings):
        return BackgroundTracker("fake", self, **settings)


@pytest.fixture
def server(monkeypatch):
    server = Server()
    monkeypatch.setattr("common.tracking.background._log", SimpleNamespace(warning=server.report, info=server.report))
    return server


def point(env_steps):
    return Point(env_steps=env_steps, unix_seconds=0.0, values={"x": 1.0})


def close(tracker):
    tracker.close(time.monotonic() + PATIENCE)


def test_all_points_arrive_in_order_and_the_result_after_them(server):
    server.hanging.clear()
    tracker = server.tracker()
    for env_steps in range(120):
        tracker.write(point(env_steps))
    tracker.finish({"mean100": 1.0}, complete=True)
    server.hanging.set()
    close(tracker)
    assert server.received == list(range(120))
    assert max(server.batches) == POINTS_AT_ONCE
    assert server.results == [(120, {"mean100": 1.0}, True)]
    assert (server.opened, server.closed, tracker.dropped, server.reports) == (1, 1, 0, [])


def test_a_server_that_goes_away_is_reported_once_and_gets_the_points_when_it_is_back(server):
    tracker = server.tracker(retry_seconds=0.001)
    server.up = False
    for env_steps in range(5):
        tracker.write(point(env_steps))
    assert server.reported.wait(PATIENCE)
    server.asked.clear()
    assert server.asked.wait(PATIENCE), "it is asked again"
    server.up = True
    close(tracker)
    assert server.received == list(range(5))
    assert server.reports == [("tracker_lost", "fake", "away"), ("tracker_resumed", "fake", "")]
    assert tracker.dropped == 0


def test_of_more_points_than_are_kept_the_oldest_are_dropped_and_counted(server):
    server.hanging.clear()
    tracker = server.tracker(capacity=3)
    assert server.asked.wait(PATIENCE), "it is opened before there are points"
    for env_steps in range(10):
        tracker.write(point(env_steps))
    assert tracker.dropped == 7
    server.hanging.set()
    close(tracker)
    assert server.received == [7, 8, 9]
    assert tracker.dropped == 7


@pytest.mark.parametrize("up", [True, False])
def test_points_that_wait_behind_those_on_their_way_are_kept_and_no_point_counts_as_dropped_that_arrives(server, up):
    """The number is a counter, which Prometheus takes for a new one where it falls."""
    tracker = server.tracker(capacity=3, retry_seconds=0.0)
    assert server.ready.wait(PATIENCE)
    server.asked.clear()
    server.hanging.clear()
    for env_steps in range(3):
        tracker.write(point(env_steps))
    assert server.asked.wait(PATIENCE), "a batch is on its way"
    for env_steps in range(3, 6):
        tracker.write(point(env_steps))
    dropped, server.up = tracker.dropped, up
    server.hanging.set()
    if not up:
        assert server.reported.wait(PATIENCE)
        assert tracker.dropped == 3
        server.up = True
    close(tracker)
    assert server.received[-3:] == [3, 4, 5]
    assert len(server.received) + tracker.dropped == 6
    assert tracker.dropped == (dropped if up else 3)


def test_the_end_waits_for_no_server_that_hangs(server):
    server.hanging.clear()
    tracker = server.tracker()
    for env_steps in range(4):
        tracker.write(point(env_steps))
    tracker.finish({}, complete=True)
    tracker.close(-math.inf)
    assert tracker.dropped == 4
    assert tracker.lost == "fake did not get 4 points and the result"
    server.hanging.set()


def test_the_end_of_a_run_whose_server_is_away_waits_for_it_until_the_deadline_alone(server):
    server.up = False
    tracker = server.tracker(retry_seconds=PATIENCE * 10)
    tracker.write(point(1))
    assert server.reported.wait(PATIENCE)
    tracker.close(time.monotonic() + 0.01)
    assert (server.received, tracker.dropped) == ([], 1)
    assert tracker.lost == "fake did not get 1 point"


def test_a_server_that_comes_back_at_the_end_gets_all_points(server):
    server.up = False
    tracker = server.tracker(retry_seconds=PATIENCE * 10)
    tracker.write(point(1))
    assert server.reported.wait(PATIENCE)
    server.up = True
    close(tracker)
    assert (server.received, tracker.dropped, tracker.lost) == ([1], 0, "")
