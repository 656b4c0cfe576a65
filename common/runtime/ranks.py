"""The ranks of a learner as a process group of `torch.distributed`: gloo between CPUs, NCCL between GPUs.

A rank is one process. Its launcher (`rookery train`, torchrun, a StatefulSet) says in the variables of torchrun which one it is:
RANK, WORLD_SIZE, LOCAL_RANK (on its machine), MASTER_ADDR and MASTER_PORT (where rank 0 is found). No wait is longer than
`TIMEOUT`: a rank that is lost, or hangs, ends the others with `LostRankError`, and their launchers restart all of them.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from common.config.endpoint import MAX_PORT, Endpoint
from common.errors import ConfigError, LostRankError
from common.units import Seconds

TIMEOUT: Seconds = 60.0
POLL_SECONDS: Seconds = 0.1
TRY_SECONDS: Seconds = 1.0  # of one attempt to reach rank 0
JOINED = "joined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of this process among the ranks, and the address of rank 0."""

    rank: int
    local_rank: int
    count: int
    master: Endpoint
    agent_store: bool = False  # whether torchrun serves the store at that address, for all attempts of a run
    attempt: int = 0  # of torchrun, which restarts all ranks together

    @classmethod
    def of(cls, count: int, environ: Mapping[str, str]) -> Place:
        """Return the place that torchrun's variables name in a learner of `count` ranks. Raises `ConfigError`."""
        launcher = "start it with `rookery train`, with torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set"
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        if missing:
            fact = f"learner.ranks is {count}, and this process does not know which one it is"
            raise ConfigError(fact, found=f"no {', '.join(missing)}", fix=launcher)
        rank = _number(environ, "RANK", most=count - 1)
        world = _number(environ, "WORLD_SIZE", default=count)
        if world != count:
            raise ConfigError("learner.ranks and WORLD_SIZE", found=f"{count} and {world}", wanted="the same number")
        return cls(
            rank=rank,
            local_rank=_number(environ, "LOCAL_RANK", default=0, most=count - 1),
            count=count,
            master=Endpoint(environ["MASTER_ADDR"], _number(environ, "MASTER_PORT", most=MAX_PORT)),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        )


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None, most: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal() or (most is not None and int(text) > most):
        raise ConfigError(f"variable {name}", found=text, wanted="a number" if most is None else f"0 to {most}")
    return int(text)


class ProcessGroup:
    """`common.algorithms.ranks.Ranks` over processes. One thread uses it."""

    def __init__(self, place: Place) -> None:
        self.index, self.count = place.rank, place.count
        self.sum_seconds: Seconds = 0.0
        """Time in `sum`, until the slowest rank took part; of tensors on a GPU the time to start it."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks; `values` is overwritten. Raises `LostRankError`."""
        began = time.monotonic()
        with _lost_as_error():
            torch.distributed.all_reduce(values)
        self.sum_seconds += time.monotonic() - began
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks by rank, [N, *shape]. Raises `LostRankError`."""
        values = values.contiguous()
        gathered = [torch.empty_like(values) for _ in range(self.count)]
        with _lost_as_error():
            torch.distributed.all_gather(gathered, values)
        return torch.stack(gathered)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks by rank. Raises `LostRankError`."""
        sizes = self.gather(torch.tensor([len(data)])).flatten().tolist()
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [bytes(row[:size].numpy()) for row, size in zip(self.gather(padded), sizes, strict=True)]

    def gather_json(self, value: Any) -> list[Any]:
        """Return the JSON value of all ranks by rank. Raises `LostRankError`."""
        return [json.loads(data) for data in self.gather_bytes(json.dumps(value).encode())]


@contextmanager
def process_group(place: Place, *, waiting: Callable[[], None], timeout: Seconds = TIMEOUT) -> Iterator[ProcessGroup]:
    """Join the process group of all ranks while inside. `waiting` is called several times a second, and may raise.

    Raises `ConfigError` where a rank does not come within `timeout`, or where two processes have the same rank.
    """
    _prefer_loopback(place)
    store = _joined(place, waiting, timeout)
    with _lost_as_error():
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=PrefixStore(f"group-{place.attempt}", store),
            rank=place.rank,
            world_size=place.count,
            timeout=timedelta(seconds=timeout),
        )
    try:
        yield ProcessGroup(place)
    finally:
        torch.distributed.destroy_process_group()


def _prefer_loopback(place: Place) -> None:
    """Keep gloo's connections on this machine where all ranks are: its choice follows the name of the host otherwise."""
    if place.master.loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def _joined(place: Place, waiting: Callable[[], None], timeout: Seconds) -> TCPStore:
    """Return the store of all ranks, when all have come."""
    deadline = time.monotonic() + timeout
    serves = place.rank == 0 and not place.agent_store
    store = _serve(place) if serves else None
    registered, joined = False, f"{JOINED}-{place.attempt}"
    while True:
        waiting()
        here = 0
        if store is None:
            store = _reached(place)
        if store is not None:
            try:
                registered = registered or store.add(f"{joined}/{place.rank}", 1) == 1
                here = sum(store.check([f"{joined}/{rank}"]) for rank in range(place.count))
            except RuntimeError:  # rank 0 has ended, and comes back
                if serves:
                    raise
                store, registered = None, False
        if registered and here == place.count:
            assert store is not None
            return store
        if time.monotonic() >= deadline:
            raise _absent(place, here, reached=store is not None, registered=registered, timeout=timeout)
        if store is not None and not registered:
            store = store if serves else None  # a process of the same rank is there: of the group before, which ends
        time.sleep(POLL_SECONDS)


def _absent(place: Place, here: int, *, reached: bool, registered: bool, timeout: Seconds) -> ConfigError:
    if not reached:
        fact, found = f"rank {place.rank} does not reach rank 0 at {place.master}", f"no answer in {timeout:g} s"
        return ConfigError(fact, found=found, wanted="rank 0 there", fix="look at its log, and at MASTER_ADDR and MASTER_PORT")
    if not registered:
        return ConfigError(f"rank {place.rank} is taken", found="two processes with this RANK", wanted="one of each rank")
    return ConfigError(
        "learner.ranks: not all ranks have come",
        found=f"{here} of {place.count} in {timeout:g} s",
        wanted=f"{place.count}",
        fix="start the others, look at their logs, or lower learner.ranks",
    )


def _serve(place: Place) -> TCPStore:
    """Return the store, which rank 0 serves: to this machine alone where its address is of this machine."""
    host = place.master.host if place.master.loopback else ""
    try:
        listener = socket.create_server((host, place.master.port))
    except OSError as error:
        fix = "set MASTER_PORT to a free port"
        raise ConfigError(f"rank 0 cannot bind {place.master}", found=error.strerror, wanted="a free port", fix=fix) from error
    return TCPStore(
        place.master.host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT),
        master_listen_fd=listener.detach(),
    )


def _reached(place: Place) -> TCPStore | None:
    """Return the store of rank 0; None where it does not answer."""
    try:
        socket.create_connection((place.master.host, place.master.port), timeout=TRY_SECONDS).close()
        return TCPStore(
            place.master.host,
            place.master.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=TIMEOUT),
        )
    except (OSError, RuntimeError):
        return None


@contextmanager
def _lost_as_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch raises it for connections that end and for timeouts
        found = re.sub(r"^\[[^]]*\] *", "", str(error)).partition("\n")[0].partition(". ")[0]  # without torch's source file
        fix = "its own log says why; all ranks restart from the newest checkpoint"
        raise LostRankError("another rank of the learner was lost", found=found[:200], fix=fix) from error
