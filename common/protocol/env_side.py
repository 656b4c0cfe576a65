"""The protocol as a policy server sees it: one Act at a time to each env worker, and missing rows; `env_slots` has the greeting.

The rows of one step are divided among the slots. The rows of a slot whose env worker does not answer within the step are missing,
and so are those that follow, until its environments, or those of another env worker, have begun new episodes. No socket and no
clock: see `events`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from common.errors import DropReason, InternalError, ProtocolError
from common.protocol import events as e
from common.protocol.content import check_numbers, check_schema
from common.protocol.env_slots import HEARTBEAT_SECONDS, EnvSessionConfig, EnvSlots, Slot, SlotState
from common.protocol.events import RefusalCode, Route, sentence
from common.protocol.greeting import refusal
from common.protocol.limits import OBSERVATION_MAX, REWARD_MAX
from common.protocol.messages import Act, Arrays, Credit, Drain, Envelope, Goodbye, Hello, Observe, Report
from common.units import Seconds

SEEDS = 2**31  # environments take no larger seed
_LARGEST: Mapping[str, float] = {"observation": OBSERVATION_MAX, "reward": REWARD_MAX}


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows of one slot in one step: `arrays` of an Observe, None where missing; `begun`: first observations of new episodes."""

    rows: slice
    arrays: Arrays | None
    begun: bool = False


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
        self._slots = EnvSlots(config)
        self._seed = 0
        self._draining = False

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
                out += slot.send(Act(number=slot.number + 1, arrays={"action": action[self._rows(slot)]}), now)
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

    def _rows(self, slot: Slot) -> slice:
        first = slot.index * self.config.rows
        return slice(first, first + self.config.rows)

    def _reset(self, slot: Slot, now: Seconds) -> list[e.Instruction]:
        seed = (self._seed + self._rows(slot).start + slot.resets * self.num_envs) % SEEDS
        slot.resets += 1
        slot.state, slot.arrays, slot.ended, slot.reset_at = SlotState.RESETTING, None, None, now
        return slot.send(Act(number=slot.number + 1, seed=seed), now)

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
                slot = self._slots.at(route)
                return self._lose(slot, "its connection is closed") if slot else []
            case e.DrainAsked(reason=reason, deadline_seconds=deadline):
                self._draining = True
                drain = Drain(reason=reason, deadline_seconds=deadline)
                return [e.Send(route=slot.route, message=drain) for slot in self._slots if slot.route is not None]
        raise InternalError("an event of another session reached a policy server's", found=type(event).__name__)

    def _tick(self, slot: Slot, now: Seconds) -> list[e.Instruction]:
        begins = slot.state is SlotState.RESETTING and slot.heard_at > slot.reset_at  # an env worker sends nothing in a reset
        if (silent := now - slot.heard_at) > (self.config.reset_seconds if begins else self.config.silence_seconds):
            return self._lose(slot, f"no message for {silent:.1f} s")
        if now - slot.sent_at < HEARTBEAT_SECONDS:
            return []
        if slot.state is SlotState.RESETTING and slot.act is not None:  # the Act or its answer may have been lost
            return slot.send(slot.act, now)
        return slot.send(Credit(acked=0, credits=0, version=-1), now)

    def _received(self, route: Route, envelope: Envelope, now: Seconds) -> list[e.Instruction]:
        message, slot = envelope.message, self._slots.at(route)
        if isinstance(message, Hello):
            out, begins = self._slots.hello(route, message, envelope.run, draining=self._draining, now=now)
            return out if begins is None else [*out, *self._reset(begins, now)]
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
                slot.free()
                return [e.LogEvent(event="env_worker_left", fields={"worker": slot.worker, "reason": sentence(reason)})]
        self.messages_refused[DropReason.SCHEMA] += 1
        return refusal(route, RefusalCode.ROLE, f"a policy server takes no {message.tag}", retry=False)

    def _observed(self, slot: Slot, observe: Observe, now: Seconds) -> list[e.Instruction]:
        if observe.number != slot.number or slot.state not in (SlotState.STEPPING, SlotState.RESETTING):
            return []  # of a step that is over, or a second answer to an Act that was sent twice
        try:
            check_schema(observe.arrays, self.config.schema)
            check_numbers(observe.arrays, _LARGEST)
            slot.ended = self.config.check(observe.arrays, slot.ended)
        except ProtocolError as error:
            self.messages_refused[error.reason] += 1
            return [self._event("observations_refused", slot, reason=error.reason, detail=str(error)), *self._reset(slot, now)]
        self.answers += 1
        slot.arrays = observe.arrays
        slot.state = SlotState.STEPPED if slot.state is SlotState.STEPPING else SlotState.BEGUN
        return []

    def _lose(self, slot: Slot, why: str) -> list[e.Instruction]:
        slot.free()
        self.workers_lost += 1
        return [self._event("env_worker_lost", slot, reason=why)]

    def _event(self, event: str, slot: Slot, **fields: object) -> e.LogEvent:
        return e.LogEvent(event=event, fields={"worker": slot.worker, "slot": slot.index, **fields}, warning=True)
