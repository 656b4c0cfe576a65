"""Account of each worker on disk between two checkpoints, from which the successor of a killed learner continues.

The successor continues from a checkpoint, so that training after it is lost. This file holds how much was lost, also
where all workers were killed too. A worker gets credits only after its account was written: the file lacks at
most the env steps that a worker may send with the credits that it has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import ResourceError
from common.observability import logs
from common.protocol.events import Instruction, Send
from common.protocol.learner_side import LearnerSide
from common.protocol.messages import Credit
from common.protocol.saved_session import check_saved
from common.runtime.disk import DISK, Disk
from common.units import MIB, Seconds

MOST_BYTES = 4 * MIB  # then the file starts again with one line
RETRY_SECONDS: Seconds = 30.0  # after the disk refused a line, or was slow
SLOW_SECONDS: Seconds = 0.5  # for one line: the intake thread writes it, and workers wait for that thread

_log = logs.EventLog(__name__)


@dataclass(slots=True)
class AccountsFile:
    """Writer of the accounts file, of one line for all accounts and then a line for each change. The intake thread owns it.

    Nothing is synced: lines that a killed process wrote are with the system. The file stays open between two lines.
    """

    path: Path
    run_id: str
    clock: Callable[[], Seconds]
    disk: Disk = DISK
    _file: BinaryIO | None = None
    _bytes: int = 0
    _retry_at: Seconds = -math.inf
    _loss_logged: bool = False  # only the first loss is

    @property
    def due(self) -> bool:
        """Return whether `restart` is due: before the first line, after enough bytes, a while after a failure."""
        return (self._file is None or self._bytes >= MOST_BYTES) and self.clock() >= self._retry_at

    def write(self, session: LearnerSide, instructions: Iterable[Instruction], *, closed: bool) -> None:
        """Write the accounts of the workers that `instructions` give credits, and those `closed` since the last time."""
        routes = [send.route for send in instructions if isinstance(send, Send) and isinstance(send.message, Credit)]
        if not routes and not closed:
            return
        if self.due:
            self.restart(session.saved.accounts())
        if changes := session.saved.changed_accounts(routes, closed=closed):
            self.append(changes)

    def restart(self, state: Mapping[str, Any]) -> None:
        """Replace the file by one with a single line: `state`, the accounts of all workers (`SavedSession.accounts`)."""
        self.close()
        partial = self.path.with_name(f".partial-{self.path.name}")
        try:
            line = _line({"run_id": self.run_id, "session": state})
            self.disk.write(partial, line)
            self.disk.rename(partial, self.path)
            self._file, self._bytes = self.path.open("ab"), len(line)
        except OSError as error:
            self._lost(error)

    def append(self, changes: Mapping[str, Any]) -> None:
        """Add the accounts of some workers (`SavedSession.changed_accounts`)."""
        if self._file is None:
            return
        line, began = _line(changes), self.clock()
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self._lost(error)
        self._bytes += len(line)
        if (seconds := self.clock() - began) > SLOW_SECONDS:
            self._lost(TimeoutError(f"a line took {seconds:.1f} s"))

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _lost(self, error: Exception) -> None:
        self.close()
        self._retry_at = self.clock() + RETRY_SECONDS
        if not self._loss_logged:
            self._loss_logged = True
            consequence = "if it is killed, what it trained on since its checkpoint is not counted"
            _log.warning("accounts_lost", error=error, consequence=consequence)


_encode = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would build an encoder for each line


def _line(values: Mapping[str, Any]) -> bytes:
    return _encode(values).encode() + b"\n"


def read(path: Path, *, run_id: str, produced: int) -> Mapping[str, Any] | None:
    """Return the session's state in the file; None without one, or where the checkpoint, with `produced` env steps, is not older.

    Raises `ResourceError` where the file cannot be used. A last line that a kill cut short is left out.
    """
    try:
        whole, *lines = path.read_bytes().split(b"\n")
        found = json.loads(whole)
        check_saved(found["session"])
        state = _applied(lines[:-1], found["session"])
        check_saved(state)
        other, older = found["run_id"] != run_id, found["session"]["ledger"]["produced"] < produced
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ResourceError("accounts of the killed learner cannot be read", found=f"{str(error)[:200]!r} at {path}") from error
    if other:
        raise ResourceError("accounts are of another run", found=str(found["run_id"])[:200], wanted=run_id)
    return None if older else state


def _applied(lines: Iterable[bytes], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` after the changes in `lines`. A new incarnation closes the older of its name, and that at its index.

    An incarnation that was replaced before `state` was written, of which messages were still in the queue, comes before all
    others: it closes none, and is not the newest of its name. Its env steps are in the ledger of `state`.
    """
    registry, produced = state["registry"], state["ledger"]["produced"]
    workers = {(worker["name"], worker["incarnation"]): worker for worker in registry["workers"]}
    generations = {(role, index): number for role, index, number in registry["generations"]}
    numbers = {name: registry[name] for name in ("forgotten", "named")}
    for changes in map(json.loads, lines):
        for worker in changes["workers"]:
            key, place = (worker["name"], worker["incarnation"]), (worker["role"], worker["index"])
            if key in workers:
                produced += worker["account"]["produced"] - workers[key]["account"]["produced"]
                workers[key] = worker
            elif worker["generation"] < generations.get(place, 0):
                workers = {key: worker, **workers}
            else:
                for older in workers.values():
                    older["closed"] |= older["name"] == worker["name"] or (older["role"], older["index"]) == place
                produced += worker["account"]["produced"]
                workers[key] = worker
            generations[place] = max(generations.get(place, 0), worker["generation"] + 1)
        numbers = {name: max(number, changes[name]) for name, number in numbers.items()}
    applied = {
        "workers": [*workers.values()],
        "generations": [[role, index, number] for (role, index), number in generations.items()],
        **numbers,
    }
    return {**state, "ledger": {**state["ledger"], "produced": produced}, "registry": applied}
