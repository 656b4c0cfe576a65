"""Tests of the thread that uploads a run: its store is slow, away, or comes back."""

from __future__ import annotations

import math
import threading

import pytest

from common.config.schema import Settings
from common.runtime.run_directory import RunDirectory
from services.learner.uploads import Uploads, open_uploads

pytestmark = pytest.mark.service

PATIENCE = 120.0  # only a fault lets it pass


class Store:
    """A store that can hang or be away."""

    def __init__(self):
        self.done, self.begun, self.free, self.up = 0, threading.Semaphore(0), threading.Event(), True
        self.free.set()

    def __call__(self, _):
        self.begun.release()
        assert self.free.wait(PATIENCE)
        if not self.up:
            raise ConnectionError("away")
        self.done += 1


@pytest.fixture
def store():
    return Store()


def uploads(store, tmp_path, **settings):
    return Uploads(store, RunDirectory(tmp_path), **settings)


def test_requests_that_come_during_an_upload_are_one_upload_more(store, tmp_path):
    store.free.clear()
    thread = uploads(store, tmp_path)
    saved = []
    save = thread.after(saved.append)
    save("first")
    assert store.begun.acquire(timeout=PATIENCE)
    for number in range(5):
        save(number)
    store.free.set()
    assert store.begun.acquire(timeout=PATIENCE)
    assert thread.close(PATIENCE)
    assert store.done in (2, 3), "the first, one for five requests, and one at the end unless that was the same"
    assert saved == ["first", 0, 1, 2, 3, 4]
    assert thread.stats.last_success > 0


def test_an_upload_that_failed_is_counted_and_repeated(store, tmp_path):
    store.up = False
    thread = uploads(store, tmp_path, retry_seconds=0.001)
    thread.request()
    for _ in range(3):
        assert store.begun.acquire(timeout=PATIENCE)
    store.up = True
    assert thread.close(PATIENCE)
    assert thread.stats.failures >= 2
    assert store.done >= 1


def test_the_end_waits_for_a_store_that_hangs_until_its_deadline(store, tmp_path, monkeypatch):
    store.free.clear()
    thread = uploads(store, tmp_path)
    assert not thread.close(0.01)
    monkeypatch.setattr(threading.Thread, "join", lambda *_: pytest.fail("a second call waits"))
    assert not thread.close(PATIENCE)
    store.free.set()


def test_without_a_store_nothing_counts_as_an_upload(tmp_path):
    before = threading.enumerate()
    none = open_uploads(Settings(), RunDirectory(tmp_path))
    assert set(threading.enumerate()) <= set(before)
    none.after(lambda _: None)("first")
    assert none.close(PATIENCE)
    assert math.isnan(none.stats.last_success), "a store that has no upload yet has 0"


def test_the_end_uploads_what_no_request_named(store, tmp_path):
    assert uploads(store, tmp_path).close(PATIENCE)
    assert store.done == 1
