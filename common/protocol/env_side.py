"""The protocol as a policy server sees it: slots of env workers, their greeting, one Act at a time to each, and missing rows.

The rows of one step are divided among the slots. The rows of a slot whose env worker does not answer within the step are missing,
and so are those that follow, until its environments, or those of another env worker, have begun new episodes. No socket and no
clock: see `events`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from common.errors import DropReason, InternalError, ProtocolError
from common.protocol import events as e
from common.protocol.content import check_numbers, check_schema
from common.protocol.events import RefusalCode, Route, sentence
from common.protocol.greeting import refusal
from common.protocol.limits import OBSERVATION_MAX, REWARD_MAX
from common.protocol.messages import (
    ENV_WORKER,
    Act,
    Arrays,
    ArraySpec,
    Credit,
    Drain,
    Envelope,
    Goodbye,
    Hello,
    Message,
    Observe,
    Report,
    Welcome,
)
from common.units import Count, Seconds, Sequence

SEEDS = 2**31  # environments take no larger seed
SILENCE_SECONDS: Seconds = 10.0  # after which an env worker counts as lost, beside the step timeout
_LARGEST: Mapping[str, float] = {"observation": OBSERVATION_MAX, "final_observation": OBSERVATION_MAX, "reward": REWARD_MAX}


class SlotState(StrEnum):
    """State of a slot. Only a slot in READY gets an action, and only one in STEPPING brings a valid row."""

    EMPTY = "empty"  # no env worker, or one that is silent
    RESETTING = "resetting"  # its env worker was asked to begin new episodes
    BEGUN = "begun"  # the first observations are here, and in no row yet
    READY = "ready"  # its newest observations are in the last row
    STEPPING = "stepping"  # an action was sent
    STEPPED = "stepped"  # its answer is here, and in no row yet


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSessionConfig:
    """Facts of the session that do not change. Every slot has `rows` environments."""

    run: str
    env_config: str  # for Welcome.config
    env_signature: str
    schema: tuple[ArraySpec, ...]  # arrays of an Observe
    slots: int
    rows: int
    heartbeat_seconds: Seconds = 1.0
    silence_seconds: Seconds = SILENCE_SECONDS


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows of one slot in one step: `arrays` of an Observe, None where missing; `begun`: first observations of new episodes."""

    rows: slice
    arrays: Arrays | None
    begun: bool = False


@dataclass(slots=True, kw_only=True)
class _Slot:
    index: int
    state: SlotState = SlotState.EMPTY
    worker: str = ""  # name of the env worker that holds the slot or held it last
    incarnation: int = -1
    route: Route | None = None
    challenger: Route | None = None  # another connection that greeted by the same name
    heard_at: Seconds = 0.0
    sent_at: Seconds = 0.0
    generation: int = -1  # incarnations that held the slot before the present one; -1: none has held it
    resets: Count = 0  # number of times that its environments began anew
    act: Act | None = None  # the newest one
    arrays: Arrays | None = None  # of its answer
    missing: bool = True  # its last rows were, or there were none

    @property
    def number(self) -> Sequence:
        return -1 if self.act is None else self.act.number


class EnvSide:
    """State machine of a policy server towards its env workers.

    One step: `act`, `handle` until `answered`, or `expire` at the step timeout, and `finish`.
    """

    def __init__(self, config: EnvSessionConfig) -> None:
        self.config = config
        self.workers_lost = 0
        self.answers = 0  # Observes that answered an Act in time
        self.messages_refused: Counter[str] = Counter()  # by `DropReason`
        self.missing_rows = 0  # that no env worker brought
        self._slots = [_Slot(index=index) for index in range(config.slots)]
        self._seed = 0
        self._drain = ""

    @property
    def num_envs(self) -> int:
        """Return the number of rows of one step."""
        return self.config.slots * self.config.rows

    @property
    def connected(self) -> int:
        """Return the number of slots with an env worker."""
        return sum(slot.state is not SlotState.EMPTY for slot in self._slots)

    @property
    def rows_waiting(self) -> int:
        """Return the number of rows that were acted on and have no answer yet."""
        return self.config.rows * sum(slot.state is SlotState.STEPPING for slot in self._slots)

    @property
    def answered(self) -> bool:
        """Return whether no env worker is stepping, and one at least has something for a row."""
        states = {slot.state for slot in self._slots}
        return SlotState.STEPPING not in states and bool(states & {SlotState.BEGUN, SlotState.STEPPED})

    # --- steps ---

    def begin(self, seed: int, now: Seconds) -> list[e.Instruction]:
        """Let all environments begin new episodes, environment b with `seed + b`, and later with other seeds."""
        self._seed = seed % (SEEDS - self.num_envs)
        for slot in self._slots:
            slot.resets, slot.missing = 0, True
        return [out for slot in self._slots if slot.state is not SlotState.EMPTY for out in self._reset(slot, now)]

    def act(self, action: np.ndarray, now: Seconds) -> list[e.Instruction]:
        """Send each env worker that is ready its rows of `action` [B, ...]."""
        out: list[e.Instruction] = []
        for slot in self._slots:
            if slot.state is SlotState.READY:
                slot.state = SlotState.STEPPING
                out += self._send_act(slot, Act(number=slot.number + 1, arrays={"action": action[self._rows(slot)]}), now)
        return out

    def expire(self, now: Seconds) -> list[e.Instruction]:
        """Let the env workers that have not answered within the step timeout begin new episodes."""
        late = [slot for slot in self._slots if slot.state is SlotState.STEPPING]
        return [out for slot in late for out in (self._event("env_worker_late", slot), *self._reset(slot, now))]

    def finish(self) -> list[SlotRows]:
        """End the step: return the rows of every slot."""
        rows = []
        for slot in self._slots:
            begun = slot.state is SlotState.BEGUN and slot.missing  # new episodes never follow a row of the lost ones directly
            slot.missing = not begun and slot.state is not SlotState.STEPPED
            if slot.missing:
                rows.append(SlotRows(self._rows(slot), None))
                self.missing_rows += self.config.rows
                continue
            rows.append(SlotRows(self._rows(slot), slot.arrays, begun=begun))
            slot.state, slot.arrays = SlotState.READY, None
        return rows

    def _rows(self, slot: _Slot) -> slice:
        first = slot.index * self.config.rows
        return slice(first, first + self.config.rows)

    def _reset(self, slot: _Slot, now: Seconds) -> list[e.Instruction]:
        seed = (self._seed + self._rows(slot).start + slot.resets * self.num_envs) % SEEDS
        slot.resets += 1
        slot.state, slot.arrays = SlotState.RESETTING, None
        return self._send_act(slot, Act(number=slot.number + 1, seed=seed), now)

    def _send_act(self, slot: _Slot, act: Act, now: Seconds) -> list[e.Instruction]:
        slot.act = act
        return self._send(slot, act, now)

    def _send(self, slot: _Slot, message: Message, now: Seconds) -> list[e.Instruction]:
        assert slot.route is not None
        slot.sent_at = now
        return [e.Send(route=slot.route, message=message)]

    # --- events ---

    def handle(self, event: e.Event, now: Seconds) -> list[e.Instruction]:
        """Advance by one event at monotonic time `now` (seconds); return what to do, in order."""
        match event:
            case e.Tick():
                return [out for slot in self._slots if slot.route is not None for out in self._tick(slot, now)]
            case e.Received(route=route, envelope=envelope):
                return self._received(route, envelope, now)
            case e.Undecodable(route=route, detail=detail, protocol=protocol):
                self.messages_refused[DropReason.DECODE] += 1
                code = RefusalCode.PROTOCOL if protocol else RefusalCode.DECODE
                return refusal(route, code, detail, retry=not protocol)
            case e.Unsent(route=route):
                slot = self._at(route)
                return self._lose(slot, "its connection is closed") if slot else []
            case e.DrainAsked(reason=reason, deadline_seconds=deadline):
                self._drain = reason
                drain = Drain(reason=reason, deadline_seconds=deadline)
                return [e.Send(route=slot.route, message=drain) for slot in self._slots if slot.route is not None]
        raise InternalError("an event of another session reached a policy server's", found=type(event).__name__)

    def _tick(self, slot: _Slot, now: Seconds) -> list[e.Instruction]:
        if (silent := now - slot.heard_at) > self.config.silence_seconds:
            return self._lose(slot, f"no message for {silent:.1f} s")
        if now - slot.sent_at < self.config.heartbeat_seconds:
            return []
        if slot.state is SlotState.RESETTING and slot.act is not None:  # the Act or its answer may have been lost
            return self._send(slot, slot.act, now)
        return self._send(slot, Credit(acked=0, credits=0, version=-1), now)

    def _received(self, route: Route, envelope: Envelope, now: Seconds) -> list[e.Instruction]:
        message, slot = envelope.message, self._at(route)
        if isinstance(message, Hello):
            return self._hello(route, message, envelope.run, now)
        if slot is None:
            if isinstance(message, Goodbye):
                return []
            return refusal(route, RefusalCode.UNKNOWN_SENDER, "greet first", retry=True)
        slot.heard_at = now
        match message:
            case Observe():
                return self._observed(slot, message, now)
            case Report():
                return []
            case Goodbye(reason=reason):
                self._free(slot)
                return [e.LogEvent(event="env_worker_left", fields={"worker": slot.worker, "reason": sentence(reason)})]
        self.messages_refused[DropReason.SCHEMA] += 1
        return refusal(route, RefusalCode.ROLE, f"a policy server takes no {message.tag}", retry=False)

    def _observed(self, slot: _Slot, observe: Observe, now: Seconds) -> list[e.Instruction]:
        if observe.number != slot.number or slot.state not in (SlotState.STEPPING, SlotState.RESETTING):
            return []  # of a step that is over, or a second answer to an Act that was sent twice
        try:
            self._check(observe)
        except ProtocolError as error:
            self.messages_refused[error.reason] += 1
            return [self._event("observations_refused", slot, reason=error.reason, detail=str(error)), *self._reset(slot, now)]
        self.answers += 1
        slot.arrays = observe.arrays
        slot.state = SlotState.STEPPED if slot.state is SlotState.STEPPING else SlotState.BEGUN
        return []

    def _check(self, observe: Observe) -> None:
        arrays = observe.arrays
        check_schema(arrays, self.config.schema)
        check_numbers(arrays, _LARGEST)
        index = arrays["final_index"]
        if len(index) != len(arrays["final_observation"]) or (
            index.size and not 0 <= index.min() <= index.max() < self.config.rows
        ):
            found, wanted = f"{index.tolist()[:8]}", f"one of 0 to {self.config.rows - 1} for each final observation"
            raise ProtocolError(DropReason.SCHEMA, "final_index of an Observe", found=found, wanted=wanted)

    # --- greeting ---

    def _hello(self, route: Route, hello: Hello, run: str, now: Seconds) -> list[e.Instruction]:
        held = next((slot for slot in self._slots if slot.worker == hello.worker), None)
        same = held is not None and held.incarnation == hello.incarnation
        objection = self._objection(hello, run)
        if objection is None and held is not None and held.route not in (None, route) and not same:
            if held.challenger != route:  # where this Credit cannot be sent, the slot is free when the next Hello comes
                held.challenger = route
                return self._send(held, Credit(acked=0, credits=0, version=-1), now)
            fact = f"a connected env worker has the name {hello.worker!r}; give each its own name"
            objection = RefusalCode.IN_USE, fact, True
        slot = held or next((slot for slot in self._slots if slot.state is SlotState.EMPTY), None)
        if objection is None and slot is None:
            fact = f"all {self.config.slots} slots have an env worker; raise policy_server.workers to admit another"
            objection = RefusalCode.FULL, fact, True
        if objection is not None or slot is None:
            assert objection is not None
            code, reason, retry = objection
            return refusal(route, code, reason, retry=retry)
        goes_on = same and slot.state is not SlotState.EMPTY
        slot.worker, slot.incarnation, slot.route, slot.challenger = hello.worker, hello.incarnation, route, None
        slot.generation += not same
        slot.heard_at = slot.sent_at = now
        note = e.LogEvent(event="env_worker_welcomed", fields={"worker": slot.worker, "slot": slot.index, "again": same})
        out: list[e.Instruction] = [e.Send(route=route, message=self._welcome(slot)), note]
        return out if goes_on else [*out, *self._reset(slot, now)]

    def _objection(self, hello: Hello, run: str) -> tuple[RefusalCode, str, bool] | None:
        if self._drain:
            return RefusalCode.DRAINING, "the run is ending", False
        if hello.role != ENV_WORKER:
            return RefusalCode.ROLE, f"role: found {hello.role!r}, wanted {ENV_WORKER}: this is a policy server", False
        if run not in ("", self.config.run):
            found = f"run: found {run!r}, wanted {self.config.run!r}"
            return RefusalCode.RUN, f"{found}; restart this env worker to join the run", False
        if hello.env_signature not in ("", self.config.env_signature):
            found = f"environment signature: found {hello.env_signature}, wanted {self.config.env_signature}"
            return RefusalCode.ENVIRONMENT, f"{found}; install the policy server's environment packages here", False
        return None

    def _welcome(self, slot: _Slot) -> Welcome:
        return Welcome(
            index=slot.index,
            generation=slot.generation,
            config=self.config.env_config,
            env_signature=self.config.env_signature,
            schema=self.config.schema,
            credits=0,
            version=-1,
            heartbeat_seconds=self.config.heartbeat_seconds,
            incarnation=slot.incarnation,
        )

    def _at(self, route: Route) -> _Slot | None:
        return next((slot for slot in self._slots if slot.route == route), None)

    def _lose(self, slot: _Slot, why: str) -> list[e.Instruction]:
        self._free(slot)
        self.workers_lost += 1
        return [self._event("env_worker_lost", slot, reason=why)]

    @staticmethod
    def _free(slot: _Slot) -> None:
        slot.state, slot.route, slot.arrays, slot.challenger = SlotState.EMPTY, None, None, None

    def _event(self, event: str, slot: _Slot, **fields: object) -> e.LogEvent:
        return e.LogEvent(event=event, fields={"worker": slot.worker, "slot": slot.index, **fields}, warning=True)
