"""Tests of the chaos benchmark without its runs: seeded disturbances, ledgers, goals, the table, the faulty network."""

import itertools
import math
import os
import random
import socket
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import keys_storm
from benchmarks.chaos import flooder, floods, storm
from benchmarks.chaos.__main__ import STORMS, main
from benchmarks.chaos.books import Books
from benchmarks.chaos.kills import blows
from benchmarks.chaos.measure import Usage
from benchmarks.chaos.messages import Target, flood
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.storm import Row, Scene
from benchmarks.chaos.table import COLUMNS, faults, line, page, slow
from common.protocol.messages import ArraySpec
from common.transport.zmq import ZmqServer

pytestmark = pytest.mark.system

USED = Usage(rss_mib=300.0, descriptors=20, threads=7)
STORM = next(storm for storm in STORMS if storm.rate_goal == 0.95)
BALANCED = Books(stepped=1000, produced=990, trained=900, dropped=90, unseen=10)


def row(**changes):
    """A row that passes."""
    known = {"storm": STORM, "seed": 3, "seconds": 5.0, "flow_back": (0.5, 1.0), "rate_before": 100.0, "rate_during": 96.0}
    return Row(**known | {"before": USED, "after": USED, "peak_rss_mib": 310.0, "books": BALANCED} | changes)


def test_the_same_seed_gives_the_same_storm():
    """A row that failed can be repeated: signals and messages alike."""
    one, same, other = (blows(random.Random(seed), count=200, seconds=600, actors=4) for seed in (1, 1, 2))
    assert one == same != other
    assert {blow.kind for blow in one[:5]} == {"KILL", "SEGV", "TERM", "STOP"}
    assert 300 < one[-1].at < 900
    target = Target(run="r", schema=(ArraySpec(name="reward", dtype="float32", shape=(4,)),))
    floods = [list(itertools.islice(flood(random.Random(seed), lambda: target), 300)) for seed in (1, 1, 2)]
    assert floods[0] == floods[1] != floods[2]


def test_storms_have_names_of_their_own():
    """`--only NAME` means one storm."""
    names = [storm.name for storm in STORMS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("books", "unaccounted"),
    [
        (BALANCED, 0),
        (Books(stepped=1000, produced=990, trained=900, dropped=90), 10),  # the learner never heard of ten
        (Books(stepped=1000, produced=1000, trained=900, dropped=90, open=10), 10),  # ten are still open at the end
        (Books(stepped=990, produced=1000, trained=910, dropped=90), 10),  # ten that no environment made
        (Books(stepped=990, produced=1000, trained=910, dropped=90, claims=True), 0),  # a flooder claimed them
    ],
)
def test_each_env_step_that_no_column_explains_is_counted(books, unaccounted):
    """Env steps are missing on either side."""
    assert books.unaccounted == unaccounted


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"learner_exits": 1}, "1 learner exits"),
        ({"worker_exits": 2}, "2 workers ended by themselves"),
        ({"flow_back": (0.5, math.inf)}, "flow did not come back"),
        ({"books": Books(stepped=1)}, "1 env steps unaccounted"),
        ({"books": Books(note="the learner left no summary.json")}, "0 env steps unaccounted the learner left no summary.json"),
        ({"broken": ("3 of 2,000 connections with wrong keys got in",)}, "3 of 2,000 connections with wrong keys got in"),
        ({"after": replace(USED, descriptors=26)}, "descriptors 20 to 26"),
    ],
)
def test_a_missed_goal_is_said(changes, sentence):
    """In the line that is printed, and in the page."""
    assert faults(row()) == slow(row()) == []
    assert faults(row(**changes)) == [sentence]
    assert f"MISSED: {sentence}" in line(row(**changes))
    assert sentence in page([row(**changes)], command="python -m benchmarks.chaos")


@pytest.mark.parametrize("changes", [{"after": replace(USED, descriptors=25, rss_mib=332.0)}, {"after": None}, {"before": None}])
def test_a_learner_may_hold_a_little_more_or_have_ended(changes):
    assert faults(row(**changes)) == slow(row(**changes)) == []


def test_the_parts_of_a_message_without_an_end_may_be_kept():
    unfinished = next(storm for storm in STORMS if storm.name == "unfinished")
    assert slow(row(storm=unfinished, after=replace(USED, rss_mib=1_174.0))) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"flow_back": (4.0, 4.0)}, "flow back 4.0 / 4.0 s"),
        ({"flow_back": (1.0, 1.0, 11.0)}, "flow back 1.0 / 11.0 s"),
        ({"log_bytes_per_minute": 1_200_000}, "1,200 KB of log per minute"),
        ({"after": replace(USED, rss_mib=333.0)}, "learner RSS 300 / 310 / 333 MiB"),
        ({"rate_during": 94.0}, "honest rate 94% of before, wanted 95%"),
        ({"rate_before": 0.0, "rate_during": 0.0}, "honest rate 0% of before, wanted 95%"),
    ],
)
def test_goals_that_depend_on_the_speed_of_the_machine_are_reported_apart(changes, sentence):
    """A busy machine is no broken promise: the system test leaves these out, the benchmark does not."""
    assert faults(row(**changes)) == []
    assert slow(row(**changes)) == [sentence]


def test_a_row_says_how_to_repeat_it_and_a_page_has_all_columns():
    """A skipped storm has a row as well, with its reason."""
    assert f"python -m benchmarks.chaos --only {STORM.name} --seed 3" in line(row())
    text = page([row(), row(storm=STORMS[0], skipped="mounting a file system needs root")], command="x")
    table = [each for each in text.splitlines() if each.startswith("|")]
    assert {each.count("|") for each in table} == {len(COLUMNS) + 1}
    assert "1 of\n1 storms passed, 1 were skipped" in text
    assert f"| {STORM.name}: {STORM.what} (seed 3, " in text


def test_a_part_of_a_storm_is_not_kept(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.chaos.__main__.run", lambda *_, **__: pytest.fail("it began"))
    with pytest.raises(SystemExit, match="2"):
        main(["--short", "--write"])
    assert "--short performs a part" in capsys.readouterr().err


def test_a_page_keeps_the_rows_and_remarks_of_storms_that_did_not_run_this_time():
    first, second = STORM, next(storm for storm in STORMS if storm is not STORM)
    names = [first.name, second.name]
    before = page([row(storm=first, seconds=1.0, notes=("old",)), row(storm=second, learner_exits=1)], command="x", names=names)
    text = page([row(storm=second, notes=("new",))], command="y", names=names, before=before)
    table = [each for each in text.splitlines() if each.startswith("| ")][1:]
    assert [each.split(":")[0] for each in table] == [f"| {first.name}", f"| {second.name}"]
    assert "2 of\n2 storms passed, 0 were skipped. 1 rows are of earlier commands." in text
    assert text.splitlines()[-2:] == [f"- `{first.name}`: old", f"- `{second.name}`: new"]


@pytest.fixture
def echo():
    """The port of a server that sends back what it gets."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        with server:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection):
        with connection:
            while data := connection.recv(4096):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)


GREETING = bytes(64)
FRAME = b"\x00\x05hello"  # one ZMTP frame: answers pass frame by frame


def test_the_proxy_passes_holds_back_and_cuts(echo):
    """Stalled bytes arrive later; a cut connection ends at once, and the next one is served."""
    with Proxy(echo) as proxy:
        address = ("127.0.0.1", int(proxy.endpoint.rpartition(":")[2]))
        with socket.create_connection(address, timeout=120.0) as worker:
            worker.sendall(GREETING + FRAME)
            assert exactly(worker, len(GREETING + FRAME)) == GREETING + FRAME
            proxy.pass_nothing(on=True)
            worker.sendall(FRAME)
            proxy.pass_nothing(on=False)
            proxy.cut()
            while worker.recv(4096):
                pass
        with socket.create_connection(address, timeout=120.0) as worker:
            worker.sendall(GREETING + FRAME)
            assert exactly(worker, len(GREETING + FRAME)) == GREETING + FRAME


def test_the_proxy_damages_what_it_is_asked_to(echo):
    """One byte of each chunk, another each time."""
    with Proxy(echo) as proxy:
        proxy.corrupted = 1.0
        address = ("127.0.0.1", int(proxy.endpoint.rpartition(":")[2]))
        with socket.create_connection(address, timeout=120.0) as worker:
            worker.sendall(GREETING)
            assert exactly(worker, len(GREETING)) != GREETING


def exactly(connection, count):
    """Return exactly `count` bytes that the connection received."""
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        assert part, "the connection ended"
        data += part
    return data


# --- floods ---


def test_every_message_of_a_flood_without_keys_arrives():
    """Four connections that are closed as soon as they have sent theirs."""
    with closing(ZmqServer("tcp://127.0.0.1:0", linger=0.0)) as server:
        sender = flooder.Plain(server.endpoint)
        for number in range(4 * flooder.BURST):
            sender.send([b"%d" % number])
        arrived = itertools.takewhile(bool, (server.receive(10.0) for _ in range(4 * flooder.BURST)))
        assert sorted(int(bytes(frames[0])) for _, frames in arrived) == list(range(4 * flooder.BURST))


def test_a_flood_counts_the_messages_that_were_written(monkeypatch):
    """A second passes between two looks at the clock; every third attempt fails."""
    attempts = []

    def send(frames):
        attempts.append(frames)
        if len(attempts) % 3 == 0:
            raise ConnectionResetError

    monkeypatch.setattr(flooder, "time", SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda _: None))
    assert flooder.flood(send, itertools.repeat([b""]), count=10, rate=4.0) == 7
    assert len(attempts) == 10


class Calm:
    """A deployment on a port where nobody listens; its actors flow where `flows`."""

    def __init__(self, port=0, *, flows=True):
        self.port, self.keys, self._flows = port, Path("keys"), flows

    def mark(self):
        return {"actor-0": 0}

    def flowing(self, since, _seconds):
        return dict.fromkeys(since, 0.0) if self._flows else {}

    def read(self, _name):
        return {floods.UNREADABLE: 3.0}

    def until(self, happened, _what):
        return happened()


def scene(deployment=None):
    """The short form of a storm's scene."""
    return Scene(deployment=deployment or Calm(), chance=random.Random(1), short=True)


@pytest.mark.parametrize(
    ("arrived", "door", "broken"),
    [
        (90, False, []),
        (89, False, ["89 of 100 messages arrived"]),
        (0, True, []),
        (1, True, ["1 of 100 messages without a key arrived"]),
    ],
)
def test_a_flood_that_does_not_arrive_shows_nothing(arrived, door, broken):
    """At the door, without a key, none may."""
    flooded = scene()
    floods.check_arrival(flooded, arrived, 100, door=door)
    assert flooded.broken == broken


def test_actors_that_stood_still_in_the_measured_part_have_no_rate(monkeypatch):
    """The rate of the whole storm, in which the actors step again afterwards, is another one."""
    monkeypatch.setattr(storm.time, "sleep", lambda _: None)
    made = {"actor-0": 0}
    still = scene(SimpleNamespace(exits=[], log_bytes=int, pid=lambda _: os.getpid(), steps=lambda: made))
    still.flow_back = [0.5]

    def disturb(scene):
        with scene.rated():
            pass
        made["actor-0"] += 1_000

    assert storm._pass(replace(STORM, disturb=disturb), still, seed=1).rate_during == 0.0


def test_half_open_connections_must_be_taken_while_actors_flow(monkeypatch):
    monkeypatch.setattr(floods.time, "sleep", lambda _: None)
    alone = scene(Calm(port=1, flows=False))
    floods.half_open(alone)
    stuck, refused = alone.broken
    assert stuck == "an actor did not flow while the connections were open"
    assert refused == "200 of 200 connections were not taken"


@pytest.mark.parametrize(
    ("outcome", "broken"),
    [("refused", []), *((each, ["2 of 100 connections with wrong keys were not refused"]) for each in ("accepted", "no answer"))],
)
def test_every_connection_with_wrong_keys_must_be_refused(outcome, broken, monkeypatch):
    monkeypatch.setattr(keys_storm, "storm", lambda *_, **__: Counter({"no keys: refused": 98, f"password: {outcome}": 2}))
    monkeypatch.setattr(floods.WorkerKeys, "of", lambda _: SimpleNamespace(server=b""))
    knocking = scene()
    floods.wrong_keys(knocking)
    assert knocking.broken == broken
