"""Uploads of a run to its store, in a thread of its own: a slow or unreachable store costs copies, and never the run's time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from common.config.schema import Settings
from common.observability import logs
from common.observability.learner_stats import UploadStats
from common.runtime.checkpoint_files import Checkpoint
from common.runtime.copies import copy_address
from common.runtime.run_directory import RunDirectory
from common.runtime.store import RunStore
from common.units import Seconds

RETRY_SECONDS: Seconds = 30.0  # after an upload that failed
LAST_RETRY_SECONDS: Seconds = 1.0  # the same, at the end of the run
END_SECONDS: Seconds = 120.0  # for the trackers and then the last upload of a run that ends by itself
STOP_SECONDS: Seconds = 8.0  # the same, when a stop is requested

_log = logs.EventLog(__name__)


class Uploads:
    """Thread that calls `upload` after each request, once for all requests that came meanwhile.

    The first upload of an outage that failed is logged; all are counted, and repeated after `retry_seconds`.
    """

    def __init__(
        self,
        upload: Callable[[RunDirectory], object] | None,
        directory: RunDirectory,
        *,
        retry_seconds: Seconds = RETRY_SECONDS,
    ) -> None:
        """Start the thread; it uploads nothing yet. Without `upload` there is no store: no thread, and no call has an effect."""
        self._directory, self._retry_seconds = directory, retry_seconds
        self._changed = threading.Condition()
        self._requested = self._losing = False
        self._deadline: Seconds | None = None  # of the end of the run; None before
        self.stats = UploadStats() if upload is None else UploadStats(last_success=0.0)
        self._thread: threading.Thread | None = None
        if upload is not None:
            self._thread = threading.Thread(target=self._run, args=(upload,), name="uploads", daemon=True)
            self._thread.start()

    def request(self) -> None:
        """Ask for an upload; does not block."""
        with self._changed:
            self._requested = True
            self._changed.notify()

    def after(self, save: Callable[[Checkpoint], object]) -> Callable[[Checkpoint], None]:
        """Return a function that saves a checkpoint and then asks for an upload."""

        def save_and_request(checkpoint: Checkpoint) -> None:
            save(checkpoint)
            self.request()

        return save_and_request

    def close(self, seconds: Seconds = STOP_SECONDS) -> bool:
        """Upload a last time, for at most `seconds`; return whether that was done. Only the first call has an effect."""
        if self._thread is None:
            return True
        if self._deadline is None:
            with self._changed:
                self._deadline = time.monotonic() + seconds
                self._changed.notify()
            self._thread.join(seconds)
            if self._thread.is_alive() or self._losing:
                _log.warning("upload_unfinished", consequence="the copy of the run is older than the run")
        return not (self._thread.is_alive() or self._losing)

    def _run(self, upload: Callable[[RunDirectory], object]) -> None:
        while self._next(upload):
            pass

    def _next(self, upload: Callable[[RunDirectory], object]) -> bool:
        """Wait for a request and upload; return False after the last upload."""
        with self._changed:
            wait = self._retry_seconds if self._losing else None
            self._changed.wait_for(lambda: self._requested or self._deadline is not None, wait)
            if not (self._requested or self._losing or self._deadline is not None):
                return True
            self._requested, deadline = False, self._deadline
        try:
            upload(self._directory)
        except Exception as error:  # noqa: BLE001  file systems of buckets raise anything; none of it may end the run
            self.stats = replace(self.stats, failures=self.stats.failures + 1)
            if not self._losing:
                self._losing = True
                _log.warning("upload_failed", error=error, consequence="the run goes on; the upload is repeated")
            if deadline is None:
                return True
            with self._changed:
                self._changed.wait(LAST_RETRY_SECONDS)
            return time.monotonic() < deadline
        self.stats = replace(self.stats, last_success=time.time())
        if self._losing:
            self._losing = False
            _log.info("uploads_resumed")
        return deadline is None


def open_uploads(settings: Settings, directory: RunDirectory) -> Uploads:
    """Return the uploads of the run; they upload nothing where it has no store. Raises `ConfigError` for a bad address."""
    if not settings.run.store:
        return Uploads(None, directory)
    store = RunStore(copy_address(settings.run.store, directory.path))
    _log.info("uploads", store=store.address)
    return Uploads(partial(store.upload, keep=settings.checkpoint.keep), directory)
