"""Tests of the soak without its two hours: slopes and their interval, the verdict, and the page."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import soak
from benchmarks.chaos.books import Books
from benchmarks.chaos.deployment import Exit
from benchmarks.soak import STEADY, lines, missed, page, sizes, theil_sen

pytestmark = pytest.mark.system

HOUR = np.arange(0.0, 3600.0, 10.0)


def samples(name, rss, *, pid=7, descriptors=20):
    """Return the samples of one process over an hour."""
    return [
        {"seconds": at, "name": name, "pid": pid, "rss_mb": float(held), "descriptors": descriptors, "threads": 5}
        for at, held in zip(HOUR, rss, strict=True)
    ]


def test_the_slope_is_found_beneath_noise_and_outliers():
    """5 MB/h, with noise of 1 MB and a few peaks of 100 MB, which a least-squares line would follow."""
    random = np.random.default_rng(1)
    values = 300.0 + 5.0 * HOUR / 3600.0 + random.normal(0.0, 1.0, len(HOUR))
    values[::40] += 100.0
    slope = theil_sen(HOUR, values)
    assert slope.low < 5.0 < slope.high
    assert slope.median == pytest.approx(5.0, abs=1.0)
    assert slope.high - slope.low < 2.0
    assert np.isnan(theil_sen(HOUR[:1], values[:1]).median)


def test_growth_after_the_warm_up_is_missed_and_growth_before_it_is_not():
    """A process that fills its caches for some minutes is well; one that goes on growing is not."""
    warm = np.where(HOUR < 300, 200 + HOUR / 10, 230.0)
    leak = 200 + 2.0 * HOUR / 3600
    found = lines([*samples("actor-0", warm, pid=1), *samples("learner", leak, pid=2)], minutes=60)
    assert {line.name: line.passes for line in found} == {"actor-0": True, "learner": False}
    text = page(found, {"checkpoints": 2e6}, Books(), missed(found, Books(), ()), minutes=60)
    assert "1 of 2 processes pass" in text
    assert "| learner (2) |" in text
    assert "| checkpoints | 2,000 |" in text
    assert "- MISSED: learner (2) grows\n- MISSED: evaluator did not live long enough to be judged\n\n| run" in text


def test_descriptors_that_come_and_do_not_go_are_missed():
    """Twenty, then sixty."""
    series = samples("learner", np.full(len(HOUR), 300.0))
    for sample in series[200:]:
        sample["descriptors"] = 60
    (line,) = lines(series, minutes=60)
    assert line.descriptors == (20, 60)
    assert not line.passes


def test_the_run_directory_is_measured_by_part(tmp_path):
    """Files in folders count for the folder."""
    (tmp_path / "checkpoints" / "one").mkdir(parents=True)
    (tmp_path / "checkpoints" / "one" / "state").write_bytes(bytes(10))
    (tmp_path / "config.yaml").write_bytes(bytes(3))
    assert sizes(tmp_path) == {"checkpoints": 10.0, "config.yaml": 3.0}


WELL = [sample for pid, name in enumerate(STEADY) for sample in samples(name, np.full(len(HOUR), 300.0), pid=pid)]
CRASH = Exit(name="actor-1", pid=9, code=-11, caused=False, words="segmentation fault")
ASKED = Exit(name="actor-1", pid=8, code=0, caused=True, words="actor_ended")
SHORT = [sample for sample in WELL if sample["name"] != "evaluator" or sample["seconds"] < 800]  # 200 s after its warm-up


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({"exits": [ASKED]}, []),
        ({"exits": [ASKED, CRASH]}, ["actor-1 ended with -11: segmentation fault"]),
        (
            {"books": Books(note="the learner logged ledger_unbalanced")},
            ["0 env steps unaccounted the learner logged ledger_unbalanced"],
        ),
        ({"books": Books(stepped=1)}, ["1 env steps unaccounted"]),
        ({"taken": SHORT}, ["evaluator did not live long enough to be judged"]),
        ({"taken": []}, [f"{name} did not live long enough to be judged" for name in STEADY]),
    ],
)
def test_a_missed_goal_is_printed_and_is_the_exit_code(changes, sentences, monkeypatch, tmp_path, capsys):
    """A process that ends by itself, an unbalanced ledger, and a process that never lived long enough."""
    known = {"exits": [], "books": Books(), "taken": WELL} | changes
    deployment = SimpleNamespace(exits=known["exits"], finish=lambda: None)
    monkeypatch.setattr(soak, "deployed", lambda _: nullcontext(deployment))
    monkeypatch.setattr(soak, "soak", lambda *_, **__: (known["taken"], {}))
    monkeypatch.setattr(soak, "close_books", lambda *_, **__: known["books"])
    assert soak.main(["--csv", str(tmp_path / "soak.csv")]) == bool(sentences)
    assert [line[10:] for line in capsys.readouterr().out.splitlines() if line.startswith("- MISSED: ")] == sentences
