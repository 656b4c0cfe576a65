"""The slots of a policy server, and the greeting by which an env worker comes to hold one.

The name of an env worker holds its slot while it is away: the same name gets the same slot, unless another took it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.protocol import events as e
from common.protocol.events import RefusalCode, Route
from common.protocol.greeting import Objection, check_run, refusal
from common.protocol.messages import ENV_WORKER, Act, Arrays, ArraySpec, Credit, Hello, Message, Welcome
from common.units import Count, Seconds, Sequence

Ended: TypeAlias = NDArray[np.bool_]
"""[R] bool, of the rows of a slot: its episode is over, and the next one has not begun."""

HEARTBEAT_SECONDS: Seconds = 1.0  # a connected env worker is sent a message at least this often
SILENCE_SECONDS: Seconds = 10.0  # after which an env worker counts as lost, beside the step timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSessionConfig:
    """Facts of the session that do not change. Every slot has `rows` environments."""

    run: str
    env_config: str  # for Welcome.config
    env_signature: str
    schema: tuple[ArraySpec, ...]  # arrays of an Observe
    check: Callable[[Arrays, Ended | None], Ended]  # of its values, such as `common.envs.remote.check_observe`
    slots: int
    rows: int
    reset_seconds: Seconds  # as `silence_seconds`, while an env worker begins new episodes
    silence_seconds: Seconds = SILENCE_SECONDS


class SlotState(StrEnum):
    """State of a slot. Only a slot in READY gets an action, and only one in STEPPING brings a valid row."""

    EMPTY = "empty"  # no env worker, or one that is silent
    RESETTING = "resetting"  # its env worker was asked to begin new episodes
    BEGUN = "begun"  # the first observations are here, and in no row yet
    READY = "ready"  # its newest observations are in the last row
    STEPPING = "stepping"  # an action was sent
    STEPPED = "stepped"  # its answer is here, and in no row yet


@dataclass(slots=True, kw_only=True)
class Slot:
    """One slot and its env worker."""

    index: int
    state: SlotState = SlotState.EMPTY
    worker: str = ""  # name of the env worker that holds the slot or held it last
    incarnation: int = -1
    route: Route | None = None
    challenger: Route | None = None  # another connection that greeted by the same name
    heard_at: Seconds = 0.0
    sent_at: Seconds = 0.0
    reset_at: Seconds = 0.0  # time of the newest Act to begin new episodes
    generation: int = -1  # incarnations that held the slot before the present one; -1: none has held it
    resets: Count = 0  # number of times that its environments began anew
    act: Act | None = None  # the newest one
    arrays: Arrays | None = None  # of its answer
    ended: Ended | None = None  # after its newest answer to an Act for a step; None: the env worker was asked to begin episodes
    missing: bool = True  # its last rows were, or there were none

    @property
    def number(self) -> Sequence:
        """Return the number of the newest Act; -1 before the first."""
        return -1 if self.act is None else self.act.number

    def send(self, message: Message, now: Seconds) -> list[e.Instruction]:
        """Send a message to the env worker, of which there must be one; keep an Act."""
        assert self.route is not None
        self.act = message if isinstance(message, Act) else self.act
        self.sent_at = now
        return [e.Send(route=self.route, message=message)]

    def free(self) -> None:
        """Disconnect the env worker. The slot keeps its name, in case that it greets again."""
        self.state, self.route, self.arrays, self.challenger = SlotState.EMPTY, None, None, None


class EnvSlots:
    """All slots, by index, and answers to Hellos. Owned by `EnvSide`."""

    def __init__(self, config: EnvSessionConfig) -> None:
        self._config = config
        self._slots = [Slot(index=index) for index in range(config.slots)]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def at(self, route: Route) -> Slot | None:
        """Return the slot whose env worker has this connection."""
        return next((slot for slot in self._slots if slot.route == route), None)

    def hello(
        self, route: Route, hello: Hello, run: str, *, draining: bool, now: Seconds
    ) -> tuple[list[e.Instruction], Slot | None]:
        """Answer a Hello: a Welcome to a slot, or a Refusal.

        Also return the slot where its environments must begin new episodes: unless its connected incarnation has greeted again.
        """
        held = next((slot for slot in self._slots if slot.worker == hello.worker), None)
        same = held is not None and held.incarnation == hello.incarnation
        objection = _check_config(hello, run, self._config, draining=draining)
        if objection is None and held is not None and held.route not in (None, route) and not same:
            if held.challenger != route:  # where this Credit cannot be sent, the slot is free when the next Hello comes
                held.challenger = route
                return held.send(Credit(acked=0, credits=0, version=-1), now), None
            fact = f"a connected env worker has the name {hello.worker!r}; give each its own name"
            objection = Objection(RefusalCode.IN_USE, fact, retry=True)
        if objection is not None:
            return refusal(route, objection.code, objection.reason, retry=objection.retry), None
        slot = held or next((slot for slot in self._slots if slot.state is SlotState.EMPTY), None)
        if slot is None:
            fact = f"all {self._config.slots} slots have an env worker; raise policy_server.workers to admit another"
            return refusal(route, RefusalCode.FULL, fact, retry=True), None
        goes_on = same and slot.state is not SlotState.EMPTY
        slot.worker, slot.incarnation, slot.route, slot.challenger = hello.worker, hello.incarnation, route, None
        slot.generation += not same
        slot.heard_at = now
        welcomed = e.LogEvent(event="env_worker_welcomed", fields={"worker": slot.worker, "slot": slot.index, "again": same})
        return [*slot.send(_welcome(slot, self._config), now), welcomed], None if goes_on else slot


def _check_config(hello: Hello, run: str, config: EnvSessionConfig, *, draining: bool) -> Objection | None:
    if draining:
        return Objection(RefusalCode.DRAINING, "the run is ending", retry=False)
    if hello.role != ENV_WORKER:
        fact = f"role: found {hello.role!r}, wanted {ENV_WORKER}: this is a policy server"
        return Objection(RefusalCode.ROLE, fact, retry=False)
    return check_run(hello, run, config.run, config.env_signature, worker="env worker", server="policy server")


def _welcome(slot: Slot, config: EnvSessionConfig) -> Welcome:
    return Welcome(
        index=slot.index,
        generation=slot.generation,
        config=config.env_config,
        env_signature=config.env_signature,
        schema=config.schema,
        credits=0,
        version=-1,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        incarnation=slot.incarnation,
    )
