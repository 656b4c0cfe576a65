"""Several ranks of a learner as threads of one process."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import torch


class ThreadRanks:
    """One of N ranks, each in its own thread, which exchange tensors at a barrier."""

    def __init__(self, index, shared, barrier):
        self.index, self.count, self._shared, self._barrier = index, len(shared), shared, barrier
        self.sums = 0

    @classmethod
    def make(cls, count):
        """All ranks of one learner."""
        barrier, shared = threading.Barrier(count, timeout=120.0), [None] * count
        return [cls(index, shared, barrier) for index in range(count)]

    def abort(self):
        """End the waits of all ranks with an error."""
        self._barrier.abort()

    def gather(self, values):
        """As `Ranks.gather`."""
        return torch.stack(self._exchanged(values.clone()))

    def gather_votes(self, values):
        """As `ProcessGroup.gather_votes`."""
        return self.gather(values)

    def sum(self, values):
        """As `Ranks.sum`."""
        self.sums += 1
        return self.gather(values).sum(dim=0)

    def sum_seconds(self):
        """As `ProcessGroup.sum_seconds`: a second for each."""
        return float(self.sums)

    def gather_json(self, value):
        """As `ProcessGroup.gather_json`."""
        return [json.loads(text) for text in self._exchanged(json.dumps(value))]

    def broadcast(self, values):
        """As `ProcessGroup.broadcast`."""
        return self._exchanged(values.clone())[0]

    def broadcast_bytes(self, data):
        """As `ProcessGroup.broadcast_bytes`."""
        return self._exchanged(data)[0]

    def _exchanged(self, value):
        self._shared[self.index] = value
        self._barrier.wait()
        gathered = list(self._shared)
        self._barrier.wait()
        return gathered


def on_every_rank(count, work):
    """The results of `work(ranks)` on each of `count` ranks; a failure of one ends the others."""

    def on_rank(ranks):
        try:
            return work(ranks)
        except BaseException:
            ranks.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        done = [pool.submit(on_rank, ranks) for ranks in ThreadRanks.make(count)]
    failures = [failure for future in done if (failure := future.exception())]
    for failure in sorted(failures, key=lambda failure: isinstance(failure, threading.BrokenBarrierError)):
        raise failure
    return [future.result() for future in done]
