"""The ladder: its settings are valid, its games yield the same kind of transitions, its table has every rung."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import ladder, learning
from benchmarks.textbook_dqn import Program, gradient_step, network, play
from common.config.load import load_settings

pytestmark = pytest.mark.service

RATES = [100.0, 110, 200, 300, 400, 500, 600, 2_000, 9_000]


@pytest.mark.parametrize("rung", [rung for rung in ladder.RUNGS if rung.preset], ids=lambda rung: rung.change)
def test_the_settings_of_every_rung_are_valid(rung):
    settings = load_settings(preset=rung.preset, overrides=rung.overrides, environ={}).settings
    if rung.overrides:  # the same work as in the textbook programs
        assert settings.algorithm.samples_per_insert == 32
        assert (settings.env.height, settings.env.width, settings.env.crop) == (84, 84, (0, 0))


@pytest.mark.parametrize("games", ["wrapped", "tuned", "vector"])
def test_every_kind_of_games_shows_the_same_images(games):
    observation, action, reward, ended, following = next(play(Program(games=games, envs=2, no_grad=True), network()))[0]
    assert observation.shape == following.shape == (4, 84, 84)
    newest = following[-1] * (255 if games == "wrapped" else 1)
    assert 80 < np.median(newest) < 120  # the grey of the field
    assert (action in range(6), reward, bool(ended)) == (True, 0.0, False)


def test_a_gradient_step_moves_the_value_of_the_action_towards_the_reward():
    import torch

    values = network()
    stack = np.ones((4, 84, 84), np.float32)
    before = values(torch.from_numpy(stack[None]))[0].detach()
    optimizer = torch.optim.SGD(values.parameters(), lr=1e-3)
    gradient_step(values, network(), optimizer, [(stack, 2, 10.0, True, stack)] * 4)
    moved = values(torch.from_numpy(stack[None]))[0].detach() - before
    assert moved[2] > 0
    assert moved.argmax() == 2


def test_the_table_has_every_rung_and_recorded_times_alone():
    lines = ladder.table(RATES).splitlines()[2:]
    assert len(lines) == len(ladder.RUNGS)
    assert lines[8].startswith("| Rookery, preset pong | 9,000 | 90.0x | ")
    assert ["not run" in line for line in lines[:7]] == [True] * 7


def test_times_are_those_of_the_page_of_learning():
    rung = next(rung for rung in ladder.RUNGS if rung.change == "Rookery, preset pong")
    section = (learning.RESULTS / learning.PAGE).read_text().partition("\n## pong\n")[2].partition("\n## ")[0]
    minutes = [float(line.split("|")[4]) for line in section.splitlines() if line.startswith(("| 1 ", "| 2 ", "| 3 "))]
    assert ladder.solved(rung)[0] == f"{min(minutes):.1f} to {max(minutes):.1f} min, 3 of 3 runs"


@pytest.mark.parametrize(("load", "says"), [(2.0, "idle otherwise"), (20.0, "The machine was busy** (load 1 to 20")])
def test_a_busy_machine_is_named(monkeypatch, load, says):
    monkeypatch.setattr(ladder, "cores", lambda: 2)
    assert says in ladder.conditions(45.0, [1.0, load])


def test_one_command_writes_page_picture_and_table(tmp_path, monkeypatch):
    for name in ("TABLE", "PICTURE", "PAGE"):
        monkeypatch.setattr(ladder, name, tmp_path / name)
    (tmp_path / "PAGE").write_text("before\n" + "\nold\n".join(ladder.MARKS) + "\nafter\n")
    rates = iter(RATES * 2)
    monkeypatch.setattr(ladder, "frames_per_second", lambda *_: next(rates))
    ladder.main([])
    picture = (tmp_path / "PICTURE").read_bytes()
    page = (tmp_path / "PAGE").read_text()
    assert page.startswith("before\n" + ladder.MARKS[0])
    assert page.endswith(ladder.MARKS[1] + "\nafter\n")
    assert "9,000" in page
    assert "\nold\n" not in page  # the page names the processor, which may be an "Intel Xeon Gold"
    ladder.main(["--seconds", "3"])
    assert (tmp_path / "PICTURE").read_bytes() == picture
    assert "3 s a rung" in (tmp_path / "TABLE").read_text()
