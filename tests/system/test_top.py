"""`rookery top` and `rookery doctor` beside a real run, asked in each of the ways that a user has."""

from __future__ import annotations

import re
import shutil
import signal
from functools import partial

import pytest

from tests.system.test_monitoring import Prometheus

pytestmark = pytest.mark.system

ROWS = {"learner": "training", "actor-0": "connected", "actor-1": "connected", "evaluator": "connected"}


def state(table):
    """Service -> state of a table."""
    cells = [line.split() for line in table.splitlines()]
    return {words[0]: words[1] for words in cells if words and words[0] in ROWS}


@pytest.fixture
def said(colony):
    """Exit code and words of each of some `rookery` commands, which run side by side."""

    def run(*lines, patient=True):
        start = colony.rookery if patient else partial(colony.start, "services.cli")
        asked = [start(*line.split()) for line in lines]
        return [(command.ended(), command.output) for command in asked]

    return run


def test_a_run_is_watched_by_its_directory_while_it_goes_on(colony, wait, said):
    """`rookery top` in another terminal: the run is found by its folder, or by itself; afterwards there is none to find."""
    colony.run_dir = colony.folder / "runs" / "mine"
    run = colony.train("target.env_steps=100_000_000")
    wait(lambda: run.http.status().get("learner_updates", 0) > 3, "the run trains")
    wait(lambda: run.http.status().get("workers") == {"actor": 2, "evaluator": 1}, "all workers are welcomed")
    *tables, (code, words) = said("top --once runs/mine", "top --once", "doctor --seconds 3 runs/mine")
    for shown, table in tables:
        assert (shown, state(table)) == (0, ROWS), table
        assert "env steps" in table
    assert re.match(r"runs/mine: learner, actor-0, actor-1, evaluator, over [1-9]\d* s", words), words
    assert code in {0, 1}
    run.children()["actor-1"].send_signal(signal.SIGSTOP)

    def unreachable():
        (_, table), (code, words) = said("top --once", "doctor --seconds 1", patient=False)
        print(table, words)  # noqa: T201 - shown with a failure
        silent = "actor-1 does not answer: timed out"
        return code == 1 and silent in table and f"WorkerUnreachable: {silent}" in words

    wait(unreachable, "a stopped actor is named")  # on a busy machine the others may be silent as well, and none be found
    run.children()["actor-1"].send_signal(signal.SIGCONT)
    run.signal(signal.SIGINT)
    assert run.ended() == 0, run.output
    (refused, _), (code, line) = said("doctor runs/mine", "top")
    assert (refused, code, line.count("\n")) == (2, 2, 1)
    assert "no run is under way here" in line


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian package prometheus)")
def test_a_prometheus_gives_the_same_table_of_a_run(colony, wait, said):
    """Of a cluster one knows one address: that of the Prometheus which scrapes it."""
    run = colony.train()
    base = int(run.http.url.rpartition(":")[2])
    server = Prometheus(colony.folder, {"learner": [base], "evaluator": [base + 1], "actor": [base + 2, base + 3]})
    try:
        wait(lambda: run.http.status().get("learner_updates", 0) > 3, "the run trains")
        wait(lambda: run.http.status().get("workers") == {"actor": 2, "evaluator": 1}, "all workers are welcomed")
        old = "rookery_learner_updates_total offset 5s > 0"
        wait(lambda: server.get("/-/ready")[0] == 200 and server.series(old), "Prometheus has seen it for five seconds")
        asked = "doctor --seconds 4 --prometheus", "top --once --prometheus"

        def complete():
            (code, words), (shown, table) = said(*(f"{line} {server.url}" for line in asked))
            print(words, table)  # noqa: T201 - shown with a failure
            head = words.partition("\n")[0]
            measured = f"learner 127.0.0.1:{base}" in head and re.search(r", over [1-9]\d* s", head)
            judged = code in {0, 1} and re.search(r"(-bound|-starved|balanced)\b", words)
            return measured and judged and shown == 0 and f"actor 127.0.0.1:{base + 3}" in table and "mean100" in table

        wait(complete, "table and verdict are of the whole run")  # Prometheus gives up a scrape after a second
        ((code, line),) = said(f"doctor --prometheus {run.http.url}")
        assert (code, line.count("\n")) == (2, 1)
        assert "no Prometheus answers there" in line
    finally:
        server.process.terminate()
        server.process.wait()
