"""State of the learner's session outside of the process: in checkpoints, and in the accounts file between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from common.errors import DropReason
from common.protocol.accounting import Accounting
from common.protocol.events import Route
from common.protocol.incarnation import Worker, WorkerState
from common.protocol.ledger import Ledger
from common.protocol.lockstep_states import LockstepStates
from common.protocol.messages import PROTOCOL_VERSION, Dropped
from common.protocol.session_config import SessionConfig
from common.protocol.worker_registry import WorkerRegistry
from common.units import EnvSteps


class SavedSession:
    """Saves and restores the accounts of a session, and in lockstep the states of its slots. `LearnerSide` owns it."""

    def __init__(self, registry: WorkerRegistry, accounting: Accounting, states: LockstepStates, config: SessionConfig) -> None:
        self._registry = registry
        self._accounting = accounting
        self._states = states
        self._config = config

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed learner needs: the ledger of completed messages, the actors' progress, lockstep states.

        JSON values and arrays.
        """
        return {**self.accounts(), "actor_states": self._states.state_dict()}

    def accounts(self) -> dict[str, Any]:
        """Return the ledger and the progress of each actor, in JSON values: the argument of `load_accounts`."""
        return {
            "protocol": PROTOCOL_VERSION,
            "ledger": self._accounting.ledger.as_dict(),
            "registry": self._registry.state_dict(),
        }

    def changed_accounts(self, routes: Iterable[Route], *, closed: bool) -> dict[str, Any] | None:
        """Return accounts that changed since they were last returned: at `routes`, and the `closed` ones. None: none changed."""
        workers = [worker for route in routes if (worker := self._registry.routes.get(route))]
        workers += self._registry.take_closed() if closed else []
        changed = []
        for worker in workers:
            if (mark := worker.mark) != worker.written:
                worker.written = mark
                changed.append(worker)
        return self._registry.state_of(changed) if changed else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: its workers are away until their Hellos; open messages of closed accounts are rolled back.

        Raises `ValueError` where `state` is no state of a session; then nothing has changed.
        """
        check_saved(state)
        self._accounting.resumed = True
        self._registry.load_state_dict(state["registry"])
        self._states.load_state_dict(state.get("actor_states", {}))
        self._accounting.ledger = Ledger.restored(state["ledger"], self._accounting.in_flight)

    def load_ledgers(self, ledgers: Iterable[Mapping[str, Any]]) -> None:
        """Continue with the sums of these ledgers (`Ledger.as_dict`), of sessions that no longer exist.

        What was queued or in flight is rolled back: their workers begin new accounts.
        """
        for state in ledgers:
            ended = Ledger.restored(state, 0)
            self._accounting.ledger.produced += ended.produced
            self._accounting.ledger.trained += ended.trained
            self._accounting.ledger.dropped.update(ended.dropped)

    def begin_anew(self, env_steps: EnvSteps) -> None:
        """Continue, after `env_steps` of the run, without the workers of sessions that no longer exist.

        Each of their incarnations that was trained on has sent an env step: no random stream of theirs is repeated, but in
        lockstep, where an actor without a state begins as the first one did.
        """
        self._registry.begin_generations_at(env_steps)

    def load_accounts(self, state: Mapping[str, Any]) -> None:
        """Take over the progress that a killed learner had made after the checkpoint that this learner continues from.

        Messages trained on since are rolled back, as each worker's Hello would do: such a Hello then changes nothing. So are the
        env steps of incarnations that were replaced before `state` was written: they are in its ledger alone.
        """
        check_saved(state)
        self._accounting.resumed = True
        killed = WorkerRegistry(self._config)
        killed.load_state_dict(state["registry"])
        self._forget_absent(killed)
        for reached in killed:
            if not self._registry.has_replaced(reached):
                self._advance(self._registry.adopt(reached), reached)
        self._forget_replaced()
        self._registry.raise_numbers(killed)
        ledger = self._accounting.ledger
        removed = max(0, state["ledger"]["produced"] - ledger.produced)
        ledger.produced += removed
        ledger.drop(DropReason.ROLLED_BACK, removed)

    def _forget_absent(self, killed: WorkerRegistry) -> None:
        present = {worker.key for worker in killed}
        for worker in [*self._registry]:
            if worker.key not in present:
                self._accounting.close(worker)
                self._registry.forget(worker)

    def _advance(self, worker: Worker, reached: Worker) -> None:
        """Advance the account of a worker to the one that the killed learner had `reached`."""
        env_steps = reached.account.received - sum(reached.ahead.values())  # of all messages before the next
        missing = worker.missing(reached.expected, env_steps)
        self._accounting.skip(worker, reached.expected, *missing, DropReason.ROLLED_BACK)
        drops = reached.account.dropped_by_worker.items()
        dropped = tuple(Dropped(reason=reason, env_steps=env_steps) for reason, env_steps in drops)
        self._accounting.ledger.report(worker.account, reached.account.produced, dropped)
        if reached.state is WorkerState.CLOSED and worker.state is not WorkerState.CLOSED:
            self._accounting.close(worker)

    def _forget_replaced(self) -> None:
        """Forget closed workers whose slot another name holds: the killed learner had given it to that one."""
        open_slots = {(worker.role, worker.index) for worker in self._registry if worker.state is not WorkerState.CLOSED}
        for worker in [*self._registry.holders("actor"), *self._registry.holders("evaluator")]:
            if worker.state is WorkerState.CLOSED and (worker.role, worker.index) in open_slots:
                self._registry.forget(worker)


# --- its form ---

Number = Annotated[int, Field(ge=0, strict=True)]
Incarnation = Annotated[int, Field(ge=-1, strict=True)]


class _Account(BaseModel):
    produced: Number
    received: Number
    lost: Number
    dropped_by_worker: dict[str, Number]


class _Worker(BaseModel):
    name: str
    incarnation: Number
    role: str
    index: Number
    generation: Number
    public_key: str = ""
    closed: bool
    expected: Number
    ahead: list[tuple[Number, Number]]
    account: _Account


class _Registry(BaseModel):
    workers: list[_Worker]
    generations: list[tuple[str, Number, Number]]
    forgotten: Incarnation
    named: Incarnation


class _Ledger(BaseModel):
    produced: Number
    trained: Number
    dropped: dict[str, Number]


class _Session(BaseModel):
    ledger: _Ledger
    registry: _Registry


def check_saved(state: Any) -> None:
    """Raise `ValueError` unless `state` has the form of `SavedSession.state_dict`."""
    protocol = state.get("protocol", 1) if isinstance(state, Mapping) else None
    if protocol != PROTOCOL_VERSION:
        fact = f"session state of protocol version: found {protocol}, wanted {PROTOCOL_VERSION}"
        raise ValueError(f"{fact}; resume the run with the release that began it")
    _Session.model_validate(state)
