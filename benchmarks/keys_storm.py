"""Connections of strangers to a learner with keys: the learner must not receive a message from any of them.

    python -m benchmarks.keys_storm --connections 2000

A quarter each has a key that the learner does not know, another learner's public key, no keys (NULL), and a user name with a
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

from common.transport.curve import LearnerKeys, PeerKeys, make
from common.transport.zmq import ZmqLearner, ZmqPeer

KINDS = ("unknown key", "wrong learner key", "no keys", "password")
AT_ONCE = 100  # connections
PATIENCE_MS = 20_000  # for the outcome of one
LET_IN = zmq.EVENT_HANDSHAKE_SUCCEEDED
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


def storm(endpoint: str, connections: int, seed: int, *, learner_key: bytes) -> Counter[str]:
    """Connect that many strangers to the learner at `endpoint`, whose public key (Z85) is `learner_key`, shuffled by `seed`.

    Returns how many of each kind were refused, were accepted, or got no answer: "unknown key: refused", for example.
    """
    kinds = [KINDS[number % len(KINDS)] for number in range(connections)]
    random.Random(seed).shuffle(kinds)  # noqa: S311  an order, not a secret
    counts: Counter[str] = Counter()
    with zmq.Context() as context:
        for begin in range(0, connections, AT_ONCE):
            strangers = [(kind, _stranger(context, kind, learner_key)) for kind in kinds[begin : begin + AT_ONCE]]
            monitors = [stranger.get_monitor_socket(LET_IN | REFUSED) for _, stranger in strangers]
            for _, stranger in strangers:
                stranger.connect(endpoint)
                with suppress(zmq.Again):
                    stranger.send(b"intruder", zmq.DONTWAIT)
            for (kind, stranger), monitor in zip(strangers, monitors, strict=True):
                counts[f"{kind}: {_outcome(monitor)}"] += 1
                stranger.disable_monitor()
                monitor.close(linger=0)
                stranger.close(linger=0)
    return counts


def _stranger(context: zmq.Context[zmq.Socket[bytes]], kind: str, learner_key: bytes) -> zmq.Socket[bytes]:
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.RECONNECT_IVL, -1)
    stranger.setsockopt(zmq.LINGER, 0)
    match kind:
        case "unknown key" | "wrong learner key":
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.curve_serverkey = learner_key if kind == "unknown key" else zmq.curve_keypair()[0]
        case "password":
            stranger.plain_username, stranger.plain_password = b"rookery", b"rookery"
    return stranger


def _outcome(monitor: zmq.Socket[bytes]) -> str:
    if not monitor.poll(PATIENCE_MS):
        return "heard nothing"
    return "let in" if recv_monitor_message(monitor)["event"] == LET_IN else "refused"


class Served(threading.Thread):
    """A learner with keys and one worker that has one: counts what arrives from the worker, and from others."""

    def __init__(self, folder: Path) -> None:
        """Create the keys in `folder`."""
        super().__init__(daemon=True)
        make(folder, ["worker"])
        keys = LearnerKeys.of(str(folder / "learner"))
        assert keys is not None
        self.key = keys.public
        self.learner = ZmqLearner("tcp://127.0.0.1:0", keys=keys, linger=0.0)
        self._worker = ZmqPeer(self.learner.endpoint, keys=PeerKeys.of(str(folder / "worker")), linger=0.0)
        self.received: Counter[str] = Counter()
        self._ended = threading.Event()

    def run(self) -> None:
        """Serve until `end`."""
        with closing(self.learner), closing(self._worker):
            while not self._ended.is_set():
                self._worker.receive(0.0)
                self._worker.send([b"work"])
                arrived = self.learner.receive(0.01)
                if arrived is not None:
                    self.received["worker" if arrived[1] == [b"work"] else "stranger"] += 1

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
    print(f"messages of strangers received {received['stranger']:6}")
    print(f"messages of the worker         {received['worker']:6}")
    print(f"failed handshakes counted by the learner: {failed}; {seconds:.1f} s")


if __name__ == "__main__":
    main()
