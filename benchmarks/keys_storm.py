"""Connections of unknown senders to a learner with keys: the learner must not receive a message from any of them.

    python -m benchmarks.keys_storm --connections 2000

A quarter each has a key that the learner does not accept, another learner's public key, no keys (NULL), and a user name with a
password (PLAIN). Each sends a message as soon as it can. One worker with a key that is allowed is served meanwhile.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from common.transport.curve import ServerKeys, WorkerKeys, make
from common.transport.zmq import ZmqServer, ZmqWorker

KINDS = ("unknown key", "wrong learner key", "no keys", "password")
AT_ONCE = 100  # connections
PATIENCE_MS = 20_000  # for the outcome of one
ACCEPTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


def storm(endpoint: str, connections: int, seed: int, *, learner_key: bytes) -> Counter[str]:
    """Connect that many unknown senders to the learner at `endpoint` with public key `learner_key` (Z85), shuffled by `seed`.

    Returns how many of each kind were refused, were accepted, or got no answer: "unknown key: refused", for example.
    """
    kinds = [KINDS[number % len(KINDS)] for number in range(connections)]
    random.Random(seed).shuffle(kinds)  # noqa: S311  an order, not a secret
    counts: Counter[str] = Counter()
    with zmq.Context() as context:
        for begin in range(0, connections, AT_ONCE):
            senders = [(kind, _unknown_sender(context, kind, learner_key)) for kind in kinds[begin : begin + AT_ONCE]]
            monitors = [sender.get_monitor_socket(ACCEPTED | REFUSED) for _, sender in senders]
            for _, sender in senders:
                sender.connect(endpoint)
                with suppress(zmq.Again):
                    sender.send(b"intruder", zmq.DONTWAIT)
            for (kind, sender), monitor in zip(senders, monitors, strict=True):
                counts[f"{kind}: {_outcome(monitor)}"] += 1
                sender.disable_monitor()
                monitor.close(linger=0)
                sender.close(linger=0)
    return counts


def _unknown_sender(context: zmq.Context[zmq.Socket[bytes]], kind: str, learner_key: bytes) -> zmq.Socket[bytes]:
    sender = context.socket(zmq.DEALER)
    sender.setsockopt(zmq.RECONNECT_IVL, -1)
    sender.setsockopt(zmq.LINGER, 0)
    match kind:
        case "unknown key" | "wrong learner key":
            sender.curve_publickey, sender.curve_secretkey = zmq.curve_keypair()
            sender.curve_serverkey = learner_key if kind == "unknown key" else zmq.curve_keypair()[0]
        case "password":
            sender.plain_username, sender.plain_password = b"rookery", b"rookery"
    return sender


def _outcome(monitor: zmq.Socket[bytes]) -> str:
    if not monitor.poll(PATIENCE_MS):
        return "no answer"
    return "accepted" if recv_monitor_message(monitor)["event"] == ACCEPTED else "refused"


class Served(threading.Thread):
    """A learner with keys and one worker that has one: counts what arrives from the worker, and from others."""

    def __init__(self, folder: Path) -> None:
        """Create the keys in `folder`."""
        super().__init__(daemon=True)
        make(folder, ["worker"])
        keys = ServerKeys.of(str(folder / "learner"))
        assert keys is not None
        self.key = keys.public
        self.learner = ZmqServer("tcp://127.0.0.1:0", keys=keys, linger=0.0)
        self._worker = ZmqWorker(self.learner.endpoint, keys=WorkerKeys.of(str(folder / "worker")), linger=0.0)
        self.received: Counter[str] = Counter()
        self._ended = threading.Event()

    def run(self) -> None:
        """Serve until `end`, and until the worker was served at least once."""
        with closing(self.learner), closing(self._worker):
            while not (self._ended.is_set() and self.received["worker"]):
                self._worker.receive(0.0)
                self._worker.send([b"work"])
                arrived = self.learner.receive(0.01)
                if arrived is not None:
                    self.received["worker" if arrived[1] == [b"work"] else "unknown sender"] += 1

    def end(self) -> Counter[str]:
        """Stop, and return the messages that arrived, counted by sender."""
        self._ended.set()
        self.join()
        return self.received


def main() -> None:
    """Print the outcomes of the connections, and the messages that arrived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder))
        served.start()
        began = time.monotonic()
        counts = storm(served.learner.endpoint, words.connections, words.seed, learner_key=served.key)
        seconds = time.monotonic() - began
        failed = dict(served.learner.handshakes.failed)
        received = served.end()
    for outcome, times in sorted(counts.items()):
        print(f"{outcome:30} {times:6}")
    print(f"messages of unknown senders {received['unknown sender']:6}")
    print(f"messages of the worker      {received['worker']:6}")
    print(f"failed handshakes counted by the learner: {failed}; {seconds:.1f} s")


if __name__ == "__main__":
    main()
