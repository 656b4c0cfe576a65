"""`rookery compare` and `rookery report` on runs of two configurations."""

import os
from html.parser import HTMLParser

import pytest

from services.cli.app import main

pytestmark = pytest.mark.service

LEDGER = {"produced": 1100, "trained": 1000, "queued": 0, "in_flight": 0, "dropped": {"run_ended": 98, "stale": 0}}


@pytest.fixture
def runs(tmp_path, write_run, monkeypatch):
    """Two presets with two seeds each, and a run that has just begun."""
    for name in [name for name in os.environ if name.startswith("ROOKERY_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    for preset in ("cartpole", "cartpole-dqn"):
        for seed in (1, 2):
            write_run(
                tmp_path / "runs" / preset / f"s{seed}",
                f"run.seed={seed}",
                preset=preset,
                command=f"rookery train {preset} --seed {seed} '<b>'",
                curve=[(5, 100, 20 * seed, None), (10, 1000, 480, 490.5)],
                solved=True,
                solved_at={"env_steps": 1000, "wall_seconds": 10.0},
                env_steps=1000,
                wall_seconds=90.0,
                mean100=470.0 + 10 * seed,
                ledger=LEDGER,
            )
    write_run(tmp_path / "runs" / "begun", "env.id=Acrobot-v1")
    return tmp_path / "runs"


class Page(HTMLParser):
    """Collects the attributes that load something, and the text."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.shown = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in {"src", "href", "xlink:href"} and not value.startswith("#")]
        assert tag not in {"script", "link", "b", "img"}

    def handle_data(self, data):
        self.shown.append(data)


def test_a_report_is_one_file_that_loads_nothing(runs, capsys):
    assert main(["report", str(runs), "--out", "out/r.html"]) == 0
    assert "5 runs" in capsys.readouterr().out
    text = (runs.parent / "out" / "r.html").read_text()
    page = Page(text)
    assert page.loads == []
    assert "@import" not in text
    assert "url(http" not in text
    shown = " ".join(" ".join(page.shown).split())
    assert "rookery train cartpole --seed 1 '<b>'" in shown
    assert "480 [480, 490]" not in shown
    assert "485 [480, 490]" in shown
    assert "run_ended 98" in shown
    assert "algorithm.name" in shown
    assert "No run on Acrobot-v1 has ended an episode yet." in shown
    assert text.count("<svg") == 1


def test_compare_shows_the_same_values_on_the_terminal(runs, capsys):
    assert main(["compare", str(runs / "cartpole"), str(runs / "cartpole-dqn")]) == 0
    shown = capsys.readouterr().out
    assert shown.count("485 [480, 490]") == 2
    assert "2 of 2" in shown
    assert "algorithm.replay_capacity" in shown


@pytest.mark.parametrize(
    ("words", "hint"),
    [(["compare"], "RUN"), (["report", "nowhere"], "no run in nowhere"), (["report", ".", "--out", "/proc/x/r.html"], "--out")],
)
def test_bad_input_is_one_line_and_exit_code_2(runs, words, hint, capsys):
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert hint in err
