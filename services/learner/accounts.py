"""Account of each worker on disk between two checkpoints, from which the successor of a killed learner continues.

The successor continues from a checkpoint, so that training after it is lost. This file holds how much was lost, also
where all workers were killed too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.errors import ResourceError
from common.runtime.disk import DISK, Disk
from common.session.saved import check_saved
from common.units import Seconds

SPACING: Seconds = 0.2
SHARE = 0.01  # of the train loop's time, at most


class AccountsFile:
    """Writer of the accounts file. It replaces the file without fsync, since a process that is killed leaves it whole."""

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        state: Callable[[], Mapping[str, Any]],
        clock: Callable[[], Seconds],
        on_loss: Callable[[Exception], None],
        disk: Disk = DISK,
    ) -> None:
        """`state` returns the session's state; the first failure goes to `on_loss`, later ones are silent."""
        self._path = path
        self._run_id = run_id
        self._state = state
        self._clock = clock
        self._on_loss: Callable[[Exception], None] | None = on_loss
        self._disk = disk
        self._next_at = clock()

    def update(self) -> None:
        """Write the current accounts, unless they were written a moment ago."""
        began = self._clock()
        if began < self._next_at:
            return
        try:
            partial = self._path.with_name(f".partial-{self._path.name}")
            self._disk.write(partial, json.dumps({"run_id": self._run_id, "session": self._state()}).encode())
            self._disk.rename(partial, self._path)
        except (OSError, ResourceError) as error:
            self._lost(error)
        ended = self._clock()
        self._next_at = ended + max(SPACING, (ended - began) / SHARE)

    def remove(self) -> None:
        """Remove the file: a checkpoint holds newer accounts."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        on_loss, self._on_loss = self._on_loss, None
        if on_loss is not None:
            on_loss(error)


def read(path: Path, *, run_id: str, produced: int) -> Mapping[str, Any] | None:
    """Return the session's state in the file; None without one, or where the checkpoint, with `produced` env steps, is not older.

    Raises `ResourceError` where the file cannot be used.
    """
    try:
        found = json.loads(path.read_bytes())
        state: Mapping[str, Any] = found["session"]
        check_saved(state)
        other = found["run_id"] != run_id
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ResourceError("accounts of the killed learner cannot be read", found=f"{str(error)[:200]!r} at {path}") from error
    if other:
        raise ResourceError("accounts are of another run", found=str(found["run_id"])[:200], wanted=run_id)
    return state if state["ledger"]["produced"] >= produced else None
