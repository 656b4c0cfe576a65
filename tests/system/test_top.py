"""`rookery top` and `rookery doctor` beside a real run, asked by its folder, or for the run of this machine."""

from __future__ import annotations

import re
import signal

import pytest

pytestmark = pytest.mark.system

ROWS = {"learner": "training", "actor-0": "connected", "actor-1": "connected", "evaluator": "connected"}


def state(table):
    """Service -> state of a table."""
    cells = [line.split() for line in table.splitlines()]
    return {words[0]: words[1] for words in cells if words and words[0] in ROWS}


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
