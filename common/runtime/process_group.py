"""The ranks of a learner as a process group of `torch.distributed`: gloo between CPUs, NCCL between GPUs.

A rank is one process. Its launcher (`rookery train`, torchrun, a StatefulSet) sets the variables of torchrun: RANK, WORLD_SIZE,
LOCAL_RANK (on its machine), MASTER_ADDR and MASTER_PORT (where rank 0 is found). A rank that is lost, or hangs for longer than
the time limit of an operation, ends the others with `LostRankError`, and their launchers restart all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import queue
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from common.config.endpoint import MAX_PORT, Endpoint
from common.errors import ConfigError, LostRankError, RookeryError
from common.units import Seconds

TIMEOUT: Seconds = 60.0  # of an operation of training, and of the connections between ranks
SLOW_TIMEOUT: Seconds = 330.0  # of an operation after which a rank may have loaded or saved a checkpoint, for 300 s
POLL_SECONDS: Seconds = 0.1
TRY_SECONDS: Seconds = 1.0  # of one attempt to reach rank 0
ANSWER_SECONDS: Seconds = 5.0  # for the first answer of rank 0: another program may listen at its address


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunEnvironment:
    """The variables of torchrun: rank, world size, and the address of rank 0."""

    rank: int
    local_rank: int
    world_size: int
    master: Endpoint
    agent_store: bool = False  # whether torchrun serves the store at that address, for all attempts of a run

    @classmethod
    def of(cls, world_size: int, environ: Mapping[str, str]) -> TorchrunEnvironment:
        """Return the variables of one rank of a learner of `world_size` ranks. Raises `ConfigError`."""
        launcher = "start it with `rookery train`, with torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set"
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        if missing:
            fact = f"learner.ranks is {world_size}, and this process does not know which one it is"
            raise ConfigError(fact, found=f"no {', '.join(missing)}", fix=launcher)
        rank = _number(environ, "RANK", most=world_size - 1)
        found = _number(environ, "WORLD_SIZE", default=world_size)
        if found != world_size:
            raise ConfigError("learner.ranks and WORLD_SIZE", found=f"{world_size} and {found}", wanted="the same number")
        return cls(
            rank=rank,
            local_rank=_number(environ, "LOCAL_RANK", default=0, most=world_size - 1),
            world_size=world_size,
            master=Endpoint(environ["MASTER_ADDR"], _number(environ, "MASTER_PORT", most=MAX_PORT)),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None, most: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal() or (most is not None and int(text) > most):
        raise ConfigError(f"variable {name}", found=text, wanted="a number" if most is None else f"0 to {most}")
    return int(text)


class ProcessGroup:
    """`common.algorithms.ranks.Ranks` over processes. One thread uses it. Every operation may raise `LostRankError`.

    `sum`, `gather` and `gather_votes`, the operations of training, wait for the other ranks at most `TIMEOUT`; `gather_json`,
    `broadcast` and `broadcast_bytes`, those of starts and checkpoints, at most `SLOW_TIMEOUT`.
    """

    def __init__(self, own: TorchrunEnvironment, slow: torch.distributed.ProcessGroup) -> None:
        """`slow`: the group whose operations have the longer time limit."""
        self.index, self.count = own.rank, own.world_size
        self._slow = slow
        self._sums: tuple[Seconds, Seconds | None] = 0.0, None  # time in finished operations, and when the running one began

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks; `values` is overwritten."""
        with self._timed(), _lost_as_error():
            torch.distributed.all_reduce(values)
        return values

    def sum_seconds(self) -> Seconds:
        """Return the time in `sum` and `gather` so far, until the slowest rank took part; on a GPU the time to start them.

        Safe from any thread.
        """
        finished, began = self._sums
        return finished if began is None else finished + time.monotonic() - began

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self._sums = self._sums[0], time.monotonic()
        yield
        self._sums = self.sum_seconds(), None

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks by rank, [N, *shape]."""
        with self._timed():
            return self._gather(values, None)

    def gather_votes(self, values: Tensor) -> Tensor:
        """Return the same as `gather`, for decisions between updates: `sum_seconds` does not include its time."""
        return self._gather(values, None)

    def gather_json(self, value: Any) -> list[Any]:
        """Return the JSON value of all ranks by rank."""
        data = bytearray(json.dumps(value).encode())
        sizes = self._gather(torch.tensor([len(data)]), self._slow).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        rows = self._gather(padded, self._slow)
        return [json.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, values: Tensor) -> Tensor:
        """Return the values of rank 0, of one shape and dtype on all ranks; `values` is overwritten."""
        with _lost_as_error():
            torch.distributed.broadcast(values, src=0, group=self._slow)
        return values

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return the bytes of rank 0; those of the other ranks are not used."""
        size = int(self.broadcast(torch.tensor([len(data)])))
        own = bytearray(data if self.index == 0 else size)
        return bytes(self.broadcast(torch.frombuffer(own, dtype=torch.uint8)).numpy()) if size else b""

    def _gather(self, values: Tensor, group: torch.distributed.ProcessGroup | None) -> Tensor:
        values = values.contiguous()
        gathered = [torch.empty_like(values) for _ in range(self.count)]
        with _lost_as_error():
            torch.distributed.all_gather(gathered, values, group=group)
        return torch.stack(gathered)


@contextmanager
def process_group(
    own: TorchrunEnvironment,
    *,
    waiting: Callable[[], None],
    join_seconds: Seconds | None = TIMEOUT,
    timeout: Seconds = TIMEOUT,
    slow_timeout: Seconds = SLOW_TIMEOUT,
) -> Iterator[ProcessGroup]:
    """Join the process group of all ranks while inside, after a `rendezvous`, whose arguments and errors it has."""
    if own.master.loopback:  # all ranks are on this machine, whatever address its host name has
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    store = rendezvous(own, waiting=waiting, seconds=join_seconds)
    with _lost_as_error():
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=store,
            rank=own.rank,
            world_size=own.world_size,
            timeout=timedelta(seconds=timeout),
        )
        slow = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=slow_timeout))
    try:
        yield ProcessGroup(own, slow)
    finally:
        torch.distributed.destroy_process_group()


def rendezvous(own: TorchrunEnvironment, *, waiting: Callable[[], None], seconds: Seconds | None) -> PrefixStore:
    """Return the store of a group with one living process for each rank; `waiting` is called at each poll, and may raise.

    Each process writes a token under its rank, reads those of all ranks, and confirms what it has read. The group is complete
    when all have confirmed the same tokens. A process that ended before it confirmed is not waited for, because its successor
    writes another token.

    Raises `ConfigError` where a rank never comes within `seconds` (None: no limit) or two processes have the same rank, and
    `LostRankError` where a rank came and ended.
    """
    serves, limit = own.rank == 0 and not own.agent_store, math.inf if seconds is None else seconds
    store = _serve(own) if serves else None
    token, present, reached_before = "", 0, False
    deadline = time.monotonic() + limit
    while True:
        waiting()
        store, overdue = store or _reached(own), time.monotonic() >= deadline
        try:
            if store is not None:
                token, reached_before = token or _register(own, store), True
                if group := _confirmed(own, store, token):
                    return PrefixStore(group, store)
                present = sum(store.check([name]) for name in _names(own)) if overdue else 0
        except RuntimeError:  # rank 0 has ended, and is restarted
            if serves:
                raise
            store, token, overdue, deadline = None, "", False, time.monotonic() + limit
        if overdue:
            raise _absent(own, f"{limit:g} s", present=present, reached=store is not None, reached_before=reached_before)
        time.sleep(POLL_SECONDS)


def _names(own: TorchrunEnvironment) -> list[str]:
    return [f"rookery/rank/{rank}" for rank in range(own.world_size)]


def _register(own: TorchrunEnvironment, store: TCPStore) -> str:
    token = secrets.token_hex(8)
    store.set(_names(own)[own.rank], token)
    return token


def _confirmed(own: TorchrunEnvironment, store: TCPStore, token: str) -> str:
    """Confirm the tokens of all ranks; return the name of their group where all have confirmed them, else ""."""
    names = _names(own)
    if not store.check(names):
        return ""
    tokens = store.multi_get(names)
    if tokens[own.rank] != token.encode():
        raise ConfigError(f"rank {own.rank} is taken", found="two processes with this RANK", wanted="one of each rank")
    group = f"rookery/{hashlib.sha256(b''.join(tokens)).hexdigest()}"
    confirmations = [f"{group}/{rank}" for rank in range(own.world_size)]
    store.set(confirmations[own.rank], "1")
    return group if store.check(confirmations) else ""


def _absent(own: TorchrunEnvironment, seconds: str, *, present: int, reached: bool, reached_before: bool) -> RookeryError:
    """Return the error for ranks that do not come: an invalid setting where one never came."""
    if reached_before and (not reached or present == own.world_size):
        fix = "its own log has the reason; all ranks restart"
        found = f"no group of {own.world_size} in {seconds}"
        return LostRankError("another rank of the learner was lost while the ranks joined", found=found, fix=fix)
    if not reached:
        fact, found = f"rank {own.rank} does not reach rank 0 at {own.master}", f"no answer in {seconds}"
        return ConfigError(fact, found=found, wanted="rank 0 there", fix="look at its log, and at MASTER_ADDR and MASTER_PORT")
    return ConfigError(
        "learner.ranks: not all ranks have come",
        found=f"{present} of {own.world_size} in {seconds}",
        wanted=f"{own.world_size}",
        fix="start the others, look at their logs, or lower learner.ranks",
    )


def _serve(own: TorchrunEnvironment) -> TCPStore:
    """Return the store, which rank 0 serves: to this machine alone where its address is of this machine.

    Rank 0 reaches its own store over loopback: its name may not be in DNS yet, and no signal interrupts torch's look-up.
    """
    host = own.master.host if own.master.loopback else ""
    try:
        listener = socket.create_server((host, own.master.port))
    except OSError as error:
        fix = "set MASTER_PORT to a free port"
        raise ConfigError(f"rank 0 cannot bind {own.master}", found=error.strerror, wanted="a free port", fix=fix) from error
    return TCPStore(
        host or "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT),
        master_listen_fd=listener.detach(),
    )


def _reached(own: TorchrunEnvironment) -> TCPStore | None:
    """Return the store of rank 0; None where it does not answer.

    torch has no time limit for the first answer of a store. A thread waits for it, which may outlive this call.
    """
    host, port = own.master.host, own.master.port
    answer = queue.SimpleQueue[TCPStore | None]()

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=TRY_SECONDS).close()
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=ANSWER_SECONDS))
            store.set_timeout(timedelta(seconds=TIMEOUT))
            answer.put(store)
        except (OSError, RuntimeError):
            answer.put(None)

    threading.Thread(target=connect, name="store", daemon=True).start()
    with suppress(queue.Empty):
        return answer.get(timeout=ANSWER_SECONDS)
    return None


@contextmanager
def _lost_as_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch raises it for connections that end and for timeouts
        found = re.sub(r"^\[[^]]*\] *", "", str(error)).partition("\n")[0].partition(". ")[0]  # without torch's source file
        fix = "its own log has the reason; all ranks restart from the newest checkpoint"
        raise LostRankError("another rank of the learner was lost", found=found[:200], fix=fix) from error
