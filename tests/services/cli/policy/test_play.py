"""`rookery play`: the video that it writes, the window that it opens, and one line for bad input."""

from __future__ import annotations

import json
import os
import re
import signal

import av
import numpy as np
import pytest

from common.policies.load import load_policy
from common.policies.trained import TrainedPolicy
from common.runtime.lifecycle import handled
from tests.services.cli.conftest import called

pytestmark = pytest.mark.service

SMALL_PONG = ["env.height=36", "env.width=36", "env.crop=[0,0]", "model.conv=[[4,8,4]]", "model.hidden=[8]"]


@pytest.fixture(autouse=True)
def _no_display(monkeypatch):
    """No window on the tester's own desktop; what `play` sets for pygame ends with the test."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER", "PYGAME_HIDE_SUPPORT_PROMPT"):
        monkeypatch.setenv(name, "")
        del os.environ[name]


def pictures(path):
    """Rate and pictures of a video."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return container.streams.video[0].average_rate, np.array(frames)


def test_the_video_shows_every_step_of_a_game(make_run, tmp_path, capsys):
    run, _ = make_run("model.hidden=[8]")
    assert called("play", run.path, "--episodes", 2, "--video", tmp_path / "pole.mp4") == 0
    out, err = capsys.readouterr()
    lengths = [int(text) for text in re.findall(r"episode \d: return \d+, (\d+) env steps", out)]
    rate, shown = pictures(tmp_path / "pole.mp4")
    assert len(lengths) == 2
    assert len(shown) == sum(lengths) + 2
    assert rate == 50
    assert f"{len(shown)} pictures at 50 Hz, {len(shown) / 50:.1f} s" in out
    assert err == ""
    env = load_policy(run.path).make_env(render_mode="rgb_array")
    env.reset(seed=1)
    assert np.abs(shown[0].astype(int) - env.render()).mean() < 2.0
    env.close()


def test_atari_is_in_colour_at_60_hertz(make_run, tmp_path, capsys):
    run, _ = make_run(*SMALL_PONG, "env.max_episode_frames=100", preset="pong")
    assert called("play", run.path, "--video", tmp_path / "pong.mp4", "--sampled", "env.noop_max=0") == 0
    rate, shown = pictures(tmp_path / "pong.mp4")
    assert rate == 60
    assert shown.shape[1:] == (420, 320, 3)
    assert len(shown) == 1 + 100  # all emulator frames
    assert np.ptp(shown.astype(int), axis=3).max() > 50
    assert "at 60 Hz" in capsys.readouterr().out


def test_all_agents_of_an_environment_play_by_the_policy(make_run, tmp_path, capsys):
    """They leave after 1 and 3 env steps, and the return is the mean of theirs."""
    run, _ = make_run("env.entry_point=common.envs.probes:leaving_agents", "env.num_envs=4", "model.hidden=[8]")
    assert called("play", run.path, "--episodes", 3, "--video", tmp_path / "agents.mp4") == 0
    lines = re.findall(r"episode \d: return (\S+), 3 env steps", capsys.readouterr().out)
    assert len(lines) == 3
    assert {float(line) for line in lines} <= {-2.0, -1.0, 0.0, 1.0, 2.0}
    rate, shown = pictures(tmp_path / "agents.mp4")
    assert (rate, len(shown)) == (5, 12)


@pytest.mark.parametrize("words", [("play", "--episodes", 9, "--video", "x.mp4"), ("evaluate",)])
def test_sigterm_ends_the_command_and_completes_the_video(make_run, tmp_path, monkeypatch, words):
    """SDL has a handler of its own for it, where there is none yet, and an event that is not read."""
    run, _ = make_run("model.hidden=[8]")
    act, acted = TrainedPolicy.act, []

    def terminated(policy, batch, *, greedy):
        acted.append(1)
        if len(acted) == 4:
            signal.raise_signal(signal.SIGTERM)
        return act(policy, batch, greedy=greedy)

    monkeypatch.setattr(TrainedPolicy, "act", terminated)
    monkeypatch.chdir(tmp_path)
    with handled([signal.SIGTERM], lambda *_: None):
        assert called(words[0], run.path, *words[1:]) == 143
    assert len(acted) == 4
    if "--video" in words:
        assert len(pictures(tmp_path / "x.mp4")[1]) == 4


def test_a_window_is_opened_at_the_size_of_the_pictures(make_run, monkeypatch, capsys):
    pygame = pytest.importorskip("pygame")
    run, _ = make_run("model.hidden=[8]")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    sizes, flips, rates = [], [], []
    display, flip = pygame.display.set_mode, pygame.display.flip
    monkeypatch.setattr(pygame.display, "set_mode", lambda size, *rest: sizes.append(size) or display(size, *rest))
    monkeypatch.setattr(pygame.display, "flip", lambda: flips.append(1) or flip())
    monkeypatch.setattr(pygame.time, "Clock", lambda: type("Clock", (), {"tick": lambda _, fps: rates.append(fps)})())
    assert called("play", run.path, "--render") == 0
    (length,) = re.findall(r"return \d+, (\d+) env steps", capsys.readouterr().out)
    assert (600, 400) in sizes
    assert len(flips) == int(length) + 1
    assert set(rates) == {50}


def test_a_window_that_is_closed_ends_the_game(make_run, monkeypatch, capsys):
    pygame = pytest.importorskip("pygame")
    run, _ = make_run("model.hidden=[8]")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    closed = type("Event", (), {"type": pygame.QUIT})()
    monkeypatch.setattr(pygame.event, "get", lambda: [closed])
    capsys.readouterr()  # its import prints a line
    assert called("play", run.path, "--render", "--episodes", 5) == 0
    assert capsys.readouterr().out == ""


def test_without_pictures_it_prints_returns(make_run, capsys):
    counting = "env.kwargs={lengths: [3, 1, 5], truncates: [false]}"
    run, _ = make_run("env.entry_point=common.envs.probes:counting", counting, "model.hidden=[8]")
    assert called("play", run.path, "--episodes", 2) == 0
    assert capsys.readouterr().out == "episode 1: return 3, 3 env steps\nepisode 2: return 3, 3 env steps\n"


def test_episodes_are_the_first_ones_of_an_evaluation_with_the_same_seed(make_run, capsys):
    run, _ = make_run("env.id=Pendulum-v1", "model.hidden=[8]")
    words = [run.path, "--episodes", 2, "--seed", 3]
    outputs = []
    for command in (["evaluate", "--json"], ["play"], ["play", "--sampled"]):
        assert called(*command, *words) == 0
        outputs.append(capsys.readouterr().out)
    evaluated = json.loads(outputs[0])["returns"]
    greedy, sampled = ([float(text) for text in re.findall(r"return (\S+),", out)] for out in outputs[1:])
    assert greedy == pytest.approx(evaluated, rel=1e-3)
    assert sampled != pytest.approx(evaluated, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "no run named"),
        (["nowhere"], "no config.yaml in nowhere"),
        (["RUN", "env.num_envs=3", "env.autoreset=same_step"], "found env.autoreset, env.num_envs, wanted none"),
        (["RUN", "--render"], "no display for a window"),
        (["RUN", "--video", "nowhere/x.mp4"], "no directory nowhere"),
        (["RUN", "--video", "."], "found another ending"),
        (["RUN", "--video", "x.gif"], "wanted a writable FILE.mp4"),
        (["RUN", "--video", "/proc/x.mp4"], "video /proc/x.mp4 cannot be written"),
        (["RUN", "--video", "x.mp4"], "draws no pictures"),
    ],
)
def test_bad_input_costs_one_line_and_exit_code_2(make_run, monkeypatch, capsys, words, hint):
    plain = [] if "/proc/x.mp4" in words else ["env.entry_point=common.envs.probes:counting"]
    run, _ = make_run(*plain, "model.hidden=[8]")
    here = run.path.parent / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert called("play", *(str(run.path) if word == "RUN" else word for word in words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"rookery play: error: .*\n", err)
    assert hint in err
    assert not list(here.iterdir())
