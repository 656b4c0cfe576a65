"""The workers of a session by name and incarnation.

A role has as many slots as workers of it may be connected at once. A name holds a slot (`index`) from its first Hello on,
while it is away and after it is closed, so that it has the same slot when it returns. It loses the slot only to a new
name that finds none free, and is forgotten. So the registry is bounded however many names come and go.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import count
from typing import Any

from common.protocol.events import Route, WorkerKey
from common.protocol.incarnation import Worker, WorkerState, progress, restored
from common.protocol.limits import INCARNATION_MAX
from common.protocol.messages import Hello
from common.protocol.session_config import SessionConfig
from common.units import Seconds


class WorkerRegistry:
    """The newest incarnation of each name, and closed ones whose messages are still in the queue or being trained on."""

    def __init__(self, config: SessionConfig) -> None:
        self.forgotten = -1  # largest incarnation of a name that was forgotten; see `greeting._check_identity`
        self.named = -1  # largest incarnation that a refusal named: no two workers are named the same
        self._config = config
        self._workers: dict[WorkerKey, Worker] = {}
        self._newest: dict[str, Worker] = {}
        self.routes: dict[Route, Worker] = {}  # connected workers by their connections
        self._connected: Counter[str] = Counter()  # `routes` by role
        self._owed: dict[Route, Worker] = {}  # connected workers that are to get a Credit, in order
        self._due: list[tuple[Seconds, int, Worker]] = []  # heap of workers with an open account, by the time of their next turn
        self._turns = count()  # breaks ties in the heap
        self._replaced: dict[WorkerKey, Worker] = {}  # of the workers, those that are not the newest of their name
        self._closed: dict[WorkerKey, Worker] = {}  # closed workers whose accounts have changed since `take_closed`
        self._generations: Counter[tuple[str, int]] = Counter()  # (role, index) -> incarnations that held it so far

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __getitem__(self, key: WorkerKey) -> Worker:
        return self._workers[key]

    def connected(self, role: str) -> int:
        """Return the number of connected workers of this role."""
        return self._connected[role]

    def window(self, worker: Worker) -> int:
        """Return the credits of this worker: waiting messages of earlier incarnations hold credits of their slot."""
        if worker.role != "actor":
            return 0
        return max(0, self._config.window(self.connected("actor")) - self.waiting_before(worker))

    def waiting_before(self, worker: Worker) -> int:
        """Return the messages in the queue of incarnations, of this name or another, that held the slot of a worker before."""
        slot = worker.role, worker.index
        return sum(len(other.waiting) for other in self._replaced.values() if (other.role, other.index) == slot)

    def owe_credit(self, worker: Worker) -> None:
        """Let a worker get a Credit if it is connected: one that is away gets its acknowledgements after its next Hello."""
        if worker.route is not None:
            self._owed[worker.route] = worker

    def owe_credits(self) -> None:
        """Let each connected worker get a Credit."""
        self._owed.update(self.routes)

    def take_owed(self) -> list[Worker]:
        """Return the workers that are to get a Credit now."""
        owed, self._owed = self._owed, {}
        return list(owed.values())

    def take_due(self, now: Seconds) -> list[Worker]:
        """Return the workers that are due; the caller calls `next_turn` for those that stay open."""
        due: list[Worker] = []
        while self._due and self._due[0][0] <= now:
            at, _, worker = heappop(self._due)
            if worker.turn_at == at and worker.state is not WorkerState.CLOSED:
                worker.turn_at = math.inf
                due.append(worker)
        return due

    def next_turn(self, worker: Worker, at: Seconds) -> None:
        """Let `take_due` return a worker at this time, or earlier if that was asked for."""
        if at < worker.turn_at:
            worker.turn_at = at
            heappush(self._due, (at, next(self._turns), worker))

    def account_changed(self, worker: Worker) -> None:
        """Record the change of a closed account, which no Credit shows."""
        if worker.state is WorkerState.CLOSED:
            self._closed[worker.key] = worker

    def take_closed(self) -> list[Worker]:
        """Return the workers with closed accounts that have changed since the last call."""
        closed, self._closed = self._closed, {}
        return list(closed.values())

    def connect(self, worker: Worker, route: Route, now: Seconds) -> None:
        """Make `route` the connection of a worker whose Hello was accepted."""
        self.disconnect(worker)
        if route in self.routes:
            self.disconnect(self.routes[route])  # the process at this connection has another name now
        worker.enter(WorkerState.CONNECTED)
        worker.route, worker.heard_at = route, now
        worker.crossing = max(worker.crossing, self._config.crossing(worker.role))
        before = self._actor_window
        self.routes[route] = worker
        self._connected[worker.role] += 1
        self.next_turn(worker, now)
        self.owe_credit(worker)
        self._owe_changed_windows(before)

    def disconnect(self, worker: Worker) -> None:
        """Make a connected worker an absent one."""
        if worker.state is WorkerState.CONNECTED:
            self._remove_route(worker)
            worker.enter(WorkerState.AWAY)

    def close(self, worker: Worker) -> None:
        """Accept nothing more of this incarnation."""
        self._remove_route(worker)
        worker.snapshot = None
        if worker.state is not WorkerState.CLOSED:
            worker.enter(WorkerState.CLOSED)
        self.account_changed(worker)

    def _remove_route(self, worker: Worker) -> None:
        if worker.route is not None:
            before = self._actor_window
            del self.routes[worker.route]
            self._owed.pop(worker.route, None)
            self._connected[worker.role] -= 1
            worker.route = None
            self._owe_changed_windows(before)

    @property
    def _actor_window(self) -> int:
        return self._config.window(self._connected["actor"])

    def _owe_changed_windows(self, before: int) -> None:
        """Owe all a Credit where their window, which depends on the number of actors, is not as `before`."""
        if self._actor_window != before:
            self.owe_credits()

    def holders(self, role: str) -> list[Worker]:
        """Return the workers that hold a slot of this role, one for each name."""
        return [worker for worker in self._newest.values() if worker.role == role]

    def find(self, hello: Hello) -> Worker | None:
        """Return the newest incarnation of a name; of a forgotten name that incarnation, while its messages are in the queue."""
        key = WorkerKey(name=hello.worker, incarnation=hello.incarnation)
        return self._newest.get(hello.worker) or self._workers.get(key)

    def keeps(self, hello: Hello) -> bool:
        """Return whether the very incarnation has an account: it is connected, or forgotten with messages in the queue."""
        return WorkerKey(name=hello.worker, incarnation=hello.incarnation) in self._workers

    def name_incarnation(self, name: str) -> int:
        """Return an incarnation above all known ones of this name; each is returned once."""
        newest = self._newest[name].key.incarnation if name in self._newest else self.forgotten
        self.named = max(self.named, newest) + 1
        return self.named

    def join(self, key: WorkerKey, role: str) -> Worker:
        """Return a new incarnation: of a known name at its slot, else at the first free slot."""
        older = self._newest.get(key.name)
        index = older.index if older is not None and older.role == role else self._free(role)
        worker = Worker(key=key, role=role, index=index, generation=self._generations[role, index])
        if older is not None:  # a new incarnation is no way around the limits of its name
            worker.bad_messages = older.bad_messages
            worker.evaluations, worker.evaluations_since = older.evaluations, older.evaluations_since
        self._generations[role, index] += 1  # of the slot, not of the name: the next holder has random streams of its own
        self._add(worker)
        return worker

    def has_replaced(self, other: Worker) -> bool:
        """Return whether a worker of another registry was replaced here, and removed: its env steps are in the ledger's sums."""
        return other.key not in self._workers and other.generation < self._generations[other.role, other.index]

    def adopt(self, other: Worker) -> Worker:
        """Return the worker of an incarnation in another registry, at its slot: with its account here, or with a new one."""
        known = self._workers.get(other.key)
        if known is None:
            known = Worker(
                key=other.key,
                role=other.role,
                index=other.index,
                generation=other.generation,
                public_key=other.public_key,
            )
            self._add(known)
        return known

    def _add(self, worker: Worker) -> None:
        older = self._newest.get(worker.key.name)
        if older is not None:
            self._replaced[older.key] = older
        self._replaced.pop(worker.key, None)
        self._newest[worker.key.name] = self._workers[worker.key] = worker
        self.next_turn(worker, -math.inf)

    def raise_numbers(self, other: WorkerRegistry) -> None:
        """Skip the numbers that another learner gave: generations of slots, and incarnations."""
        self.forgotten, self.named = max(self.forgotten, other.forgotten), max(self.named, other.named)
        self._generations |= other._generations

    def begin_generations_at(self, number: int) -> None:
        """Let each slot of a session without workers begin with this generation, above those of an earlier session."""
        slots = [(role, index) for role in ("actor", "evaluator") for index in range(self._config.slots(role))]
        self._generations = Counter(dict.fromkeys(slots, number))

    def crowded_out(self, role: str, now: Seconds) -> list[Worker]:
        """Return the workers to forget before a new name joins: first those closed longest, then those away longest."""
        holders = self.holders(role)
        absent = [worker for worker in holders if worker.state is not WorkerState.CONNECTED]
        absent.sort(key=lambda worker: (worker.state is WorkerState.CLOSED, worker.silent(now)), reverse=True)
        return absent[: max(0, len(holders) + 1 - self._config.slots(role))]

    def forget(self, worker: Worker) -> None:
        """Free the slot of a name; the env steps of its closed account stay in the ledger's sums."""
        del self._newest[worker.key.name]
        self._replaced[worker.key] = worker
        self.forgotten = max(self.forgotten, worker.key.incarnation)

    def sweep(self) -> None:
        """Remove closed incarnations of which all messages are completed."""
        for worker in list(self._replaced.values()):
            if not worker.waiting and not worker.taken:
                del self._workers[worker.key], self._replaced[worker.key]
                self._closed.pop(worker.key, None)

    def state_dict(self) -> dict[str, Any]:
        """Return names, slots and the progress of each worker. JSON values."""
        return {
            "workers": [progress(worker) for worker in self._newest.values()],
            "generations": [[role, index, number] for (role, index), number in self._generations.items()],
            "forgotten": self.forgotten,
            "named": self.named,
        }

    def state_of(self, workers: Iterable[Worker]) -> dict[str, Any]:
        """Return the progress of `workers`, and the incarnations that were named. JSON values."""
        return {"workers": [progress(worker) for worker in workers], "forgotten": self.forgotten, "named": self.named}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; no worker is connected."""
        self.named = state["named"]
        most = max(INCARNATION_MAX, self.named)
        self._workers = {worker.key: worker for worker in (restored(worker, most=most) for worker in state["workers"])}
        self._newest = {worker.key.name: worker for worker in self}
        for worker in self:
            self.next_turn(worker, -math.inf)
        self._generations = Counter({(role, index): number for role, index, number in state["generations"]})
        self.forgotten = min(state["forgotten"], most)

    def _free(self, role: str) -> int:
        taken = {worker.index for worker in self.holders(role)}
        return next(index for index in count() if index not in taken)
