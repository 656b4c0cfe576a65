"""`rookery evaluate`: the numbers that it prints, and one line for bad input."""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import closing

import numpy as np
import pytest
import torch

from common.algorithms.on_policy import ActorCriticPolicy
from common.envs.make import build
from common.envs.spec import EnvSettings
from common.policies.atari_scores import ATARI_SCORES
from services.cli.policy.evaluate import interval95, protocol
from tests.services.cli.conftest import called

pytestmark = pytest.mark.service

COUNTING = [
    "env.entry_point=common.envs.probes:counting",
    "env.kwargs={lengths: [3, 1, 5], truncates: [false]}",
    "model.hidden=[8]",
]
SMALL_PONG = ["env.height=36", "env.width=36", "env.crop=[0,0]", "model.conv=[[4,8,4]]", "model.hidden=[8]"]


def evaluated(capsys, *words):
    """The object that `rookery evaluate --json` prints."""
    assert called("evaluate", *words, "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""  # no progress bar outside of a terminal
    return json.loads(out)


def test_each_environment_plays_the_same_number_of_episodes(make_run, capsys):
    """Episodes of 3, 1 and 5 steps return 3, 0 and 10; of 8 in 4 environments each plays a long and a short one."""
    run, _ = make_run(*COUNTING)
    result = evaluated(capsys, run.path, "--episodes", 8, "env.num_envs=4")
    assert result["returns"] == [3.0, 0.0] * 4
    assert result["lengths"] == [3, 1] * 4
    assert (result["mean"], result["minimum"], result["maximum"], result["mean_length"]) == (1.5, 0.0, 3.0, 2.0)
    assert math.isclose(result["standard_deviation"], np.std(result["returns"], ddof=1))
    assert (result["mode"], result["environments"], result["episodes"]) == ("greedy", 4, 8)
    assert (result["version"], result["env_steps"], result["run_id"], result["algorithm"]) == (7, 7000, "tiny", "ppo")
    assert result["human_normalized_percent"] is None


@pytest.mark.parametrize(("words", "times"), [(("evaluate", "env.num_envs=3"), 15), (("play",), 12)])
def test_a_policy_with_memory_begins_each_episode_without_one(make_run, monkeypatch, words, times):
    """Observations count from 0; of 4 episodes of 3 and 1 env steps two environments play 1 and one 2, of `play` all are of 3."""
    run, _ = make_run(*COUNTING, "model.recurrent=lstm", "model.recurrent_size=8", "model.shared_trunk=true")
    act, acted = ActorCriticPolicy.act, []

    def checked(policy, observation, **mode):
        acted.extend(observation[:, 0].tolist())
        assert torch.equal(policy._past.start[0], observation[:, 0] == 0)
        return act(policy, observation, **mode)

    monkeypatch.setattr(ActorCriticPolicy, "act", checked)
    command, *overrides = words
    assert called(command, run.path, "--episodes", 4, *overrides) == 0
    assert len(acted) == times
    assert {0.0, 2.0} < set(acted)


def test_all_agents_have_as_many_episodes(make_run, capsys):
    """7 episodes become 8, in 8 rows of 2 agents: those of one agent last 1 env step, those of the other 3."""
    run, _ = make_run("env.entry_point=common.envs.probes:leaving_agents", "env.num_envs=12", "model.hidden=[8]")
    result = evaluated(capsys, run.path, "--episodes", 7)
    assert (result["environments"], result["lengths"]) == (8, [1, 3] * 4)
    assert result["mean_interval_95"] is None
    assert result["no_interval"] == "the 2 agents of an environment are not independent"
    assert called("evaluate", run.path, "--episodes", 7) == 0
    assert "no interval: the 2 agents of an environment are not independent" in capsys.readouterr().out
    assert evaluated(capsys, run.path, "--episodes", 12, "env.num_envs=6")["lengths"] == [1, 1, 3, 3] * 3


@pytest.mark.parametrize(("episodes", "reason"), [(4, "fewer than 5 episodes"), (5, "all returns are equal"), (6, None)])
def test_the_reason_for_no_interval_is_given(make_run, capsys, episodes, reason):
    """Five first episodes return 3 each: an interval without width would exclude 0 and 10, which others return."""
    run, _ = make_run(*COUNTING)
    words = [run.path, "--episodes", episodes, "env.num_envs=5"]
    result = evaluated(capsys, *words)
    assert (result["no_interval"], result["mean_interval_95"] is None) == (reason, reason is not None)
    assert called("evaluate", *words) == 0
    assert (f"no interval: {reason}, from" in capsys.readouterr().out) == (reason is not None)


@pytest.mark.parametrize("folder", [".", "valve"])
def test_a_run_of_a_series_over_values_is_no_setting(make_run, tmp_path, monkeypatch, capsys, folder):
    run, _ = make_run(*COUNTING, path=tmp_path / "valve" / "learning_rate=1e-3-s1")
    monkeypatch.chdir(tmp_path / folder)
    result = evaluated(capsys, run.path.relative_to(tmp_path / folder), "--episodes", 4, "env.num_envs=4")
    assert result["environments"] == 4


def test_the_table_has_score_and_evaluation_rules(make_run, capsys):
    run, _ = make_run(*COUNTING)
    assert called("evaluate", run.path, "--episodes", "6", "env.num_envs=2") == 0
    out = capsys.readouterr().out
    assert "mean 4.33333, standard deviation 4.59, 95 % interval of the mean -0.478134 to 9.1448, from 0 to 10" in out
    assert "6, greedy, 2 side by side, seed 1" in out
    assert "version 7, 7,000 env steps" in out
    assert "mean 3.0 env steps, from 1 to 5" in out
    assert "evaluation rules  common.envs.probes:counting" in out


@pytest.mark.parametrize("env_id", ["CartPole-v1", "gymnasium:CartPole-v1"])
def test_the_time_limit_is_a_rule_also_of_an_id_with_a_module(env_id):
    assert protocol(EnvSettings(id=env_id))["max_episode_steps"] == 500


def test_the_seed_and_the_mode_decide_what_is_played(make_run, capsys):
    run, _ = make_run("model.hidden=[8]")
    words = [run.path, "--episodes", 4]
    first, again = (evaluated(capsys, *words, "--sampled", "--seed", 3)["returns"] for _ in range(2))
    assert first == again
    assert evaluated(capsys, *words, "--sampled", "--seed", 4)["returns"] != first
    assert evaluated(capsys, *words, "--seed", 3)["returns"] != first
    assert called("evaluate", *words) == 0
    assert "evaluation rules  CartPole-v1, at most 500 env steps, raw rewards" in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "rule"), [(None, 200), (30, 30)])
def test_a_time_limit_of_null_is_that_of_the_environment(limit, rule):
    settings = EnvSettings(id="Pendulum-v1", kwargs={"max_episode_steps": limit})
    assert protocol(settings) == {"environment": "Pendulum-v1", "max_episode_steps": rule, "rewards": "raw"}
    with closing(build(settings, 1)) as environment:
        environment.reset(1)
        assert [environment.step(np.zeros((1, 1), np.float32)).truncated[0] for _ in range(rule)] == [False] * (rule - 1) + [True]


def test_neighbouring_seeds_play_other_episodes(make_run, capsys):
    """Else the intervals of several seeds would count most episodes several times: environment b had `seed + b`."""
    run, _ = make_run("env.id=Pendulum-v1", "model.hidden=[8]")
    words = [run.path, "--episodes", 3, "env.num_envs=3"]
    first, second = (evaluated(capsys, *words, "--seed", seed)["returns"] for seed in (1, 2))
    assert not set(first) & set(second)


def test_atari_scores_come_with_their_evaluation_rules(make_run, capsys):
    run, _ = make_run(*SMALL_PONG, "env.max_episode_frames=200", preset="pong")
    result = evaluated(capsys, run.path, "--episodes", 2, "env.sticky_actions=0.25", "env.noop_max=0")
    wanted = {"environment": "ALE/Pong-v5", "sticky_actions": 0.25, "noop_max": 0, "frame_skip": 4, "full_action_space": False}
    assert result["protocol"] == wanted | {"max_episode_frames": 200, "use_fire_reset": True, "rewards": "raw"}
    assert math.isclose(result["human_normalized_percent"], 100 * (result["mean"] + 20.7) / 35.3)


@pytest.mark.parametrize(("words", "independent"), [([], False), (["--sampled"], True), (["env.sticky_actions=0.25"], True)])
def test_greedy_games_that_differ_by_no_ops_alone_have_no_interval(make_run, capsys, words, independent):
    run, _ = make_run(*SMALL_PONG, "env.max_episode_frames=40", "env.sticky_actions=0", preset="pong")
    reason = evaluated(capsys, run.path, "--episodes", 5, *words)["no_interval"]  # games of ten env steps all return 0
    assert (reason == "all returns are equal") == independent
    assert called("evaluate", run.path, "--episodes", 5, *words) == 0
    out = capsys.readouterr().out
    assert ("no interval: greedy games without sticky actions" in out) == (not independent)
    assert "human-normalised  58.6 % (random play -20.7 is 0 %, the human 14.6 is 100 %)" in out
    sticky = "0.25" if "env.sticky_actions=0.25" in words else "0"
    rules = "up to 30 no-ops at the start, use_fire_reset True, frame skip 4, the game's own actions, at most 40 emulator frames"
    assert f"sticky actions {sticky}, {rules}, raw rewards" in out


@pytest.mark.parametrize(("epsilon", "independent"), [(0, False), (0.01, True)])
def test_sampled_games_of_a_policy_that_never_explores_are_greedy_ones(make_run, capsys, epsilon, independent):
    run, _ = make_run(*SMALL_PONG, "env.max_episode_frames=40", f"algorithm.epsilon={epsilon}", preset="pong-dqn")
    reason = evaluated(capsys, run.path, "--episodes", 5, "--sampled")["no_interval"]  # games of ten env steps all return 0
    assert reason.startswith("all returns are equal" if independent else "greedy games without sticky actions")


def test_a_version_is_chosen(make_run, capsys):
    run, _ = make_run(*COUNTING, version=7)
    make_run(*COUNTING, version=9)
    newest = evaluated(capsys, run.path)
    assert (newest["version"], newest["episodes"]) == (9, 100)
    assert evaluated(capsys, run.path, "--episodes", 1, "--checkpoint", 7)["version"] == 7


@pytest.mark.parametrize(("n", "quantile"), [(5, 2.776), (10, 2.262), (30, 2.045), (100, 1.984)])
def test_the_interval_is_students(n, quantile):
    values = np.random.default_rng(0).normal(size=n)
    half = quantile * values.std(ddof=1) / math.sqrt(n)
    assert np.allclose(interval95(values), (values.mean() - half, values.mean() + half), rtol=0, atol=0.004 * half)


def test_the_table_of_games_is_that_of_ale():
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    games = {spec.kwargs["game"] for name, spec in gymnasium.registry.items() if name.startswith("ALE/")}
    assert len(ATARI_SCORES) == 57
    assert set(ATARI_SCORES) <= games
    assert all(scores.human > scores.random for scores in ATARI_SCORES.values())
    assert ATARI_SCORES["breakout"].normalized(30.5) == 100.0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "no run named"),
        (["nowhere"], "no config.yaml in nowhere"),
        (["RUN", "--checkpoint", "8"], "wanted newest or one of 7"),
        (["RUN", "--checkpoint", "best"], "wanted newest or one of 7"),
        (["RUN", "--episodes", "0"], "found '0', wanted a number from 1"),
        (["RUN", "--seed", "-1"], "found '-1'"),
        (["RUN", "--seed", str(2**31)], f"found '{2**31}', wanted a number from 0 to {2**31 - 1}"),
        (["RUN", "env.sticky_actions=0.25"], "env.sticky_actions: found 0.25 (command line), which has no effect"),
        (["RUN", "env.frame_skip=2"], "settings without effect on"),
        (["RUN", "env.normalize_reward=true"], "settings without effect on"),
        (["RUN", "algorithm.gamma=1"], "wanted env.key=value"),
        (["RUN", "env.num_env=1"], "did you mean num_envs?"),
        (["RUN", "env.frame_stack=2"], "the environment does not fit the policy: found other settings of ['frame_stack']"),
        (["RUN", "--video", "x.mp4"], "unknown option --video"),
    ],
)
def test_bad_input_costs_one_line_and_exit_code_2(make_run, capsys, words, hint):
    run, _ = make_run(*COUNTING)
    assert called("evaluate", *(str(run.path) if word == "RUN" else word for word in words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"rookery evaluate: error: .*\n", err)
    assert hint in err


def test_returns_that_are_no_numbers_are_an_error(make_run, capsys, tmp_path, monkeypatch):
    text = "import common.envs.probes as probes\n\ndef broken():\n    return probes.Probe(length=1, observe=lambda *_: 0.0, "
    (tmp_path / "broken_games.py").write_text(text + "reward=lambda *_: float('nan'))\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)  # code of a run is in the current directory
    run, _ = make_run("env.entry_point=broken_games:broken", "model.hidden=[8]")
    assert called("evaluate", run.path, "--episodes", 2) == 2
    assert "found 2 of 2" in capsys.readouterr().err


@pytest.mark.parametrize("case", [("evaluate", "steering"), ("evaluate", "choosing"), ("play", "steering"), ("play", "choosing")])
def test_observations_that_are_no_numbers_are_an_error(case, make_run, capsys, tmp_path, monkeypatch):
    text = "import gymnasium, numpy as np\nfrom common.envs.probes import Probe\n\ndef blind(space):\n    return Probe(length=3, "
    text += "observe=lambda _, age: float('nan') if age == 1 else 0.0, reward=lambda *_: 0.0, actions=space)\n\n"
    text += "def steering():\n    return blind(gymnasium.spaces.Box(-1, 1, (1,), np.float32))\n\n"
    text += "def choosing():\n    return blind(gymnasium.spaces.Discrete(2))\n"
    command, game = case
    (tmp_path / f"blind_{command}_{game}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)  # code of a run is in the current directory
    run, _ = make_run(f"env.entry_point=blind_{command}_{game}:{game}", "model.hidden=[8]")
    assert called(command, run.path, "--episodes", 2) == 2
    assert "observations are not finite: found" in capsys.readouterr().err


def test_an_environment_of_a_fixed_number_is_evaluated_and_played(make_run, capsys, tmp_path, monkeypatch):
    text = "import gymnasium\nfrom common.envs.probes import counting\n\ndef fixed():\n"
    text += "    return gymnasium.vector.SyncVectorEnv([lambda: counting([3, 1, 5], [False])] * 4)\n"
    (tmp_path / "fixed_games.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)  # code of a run is in the current directory
    run, _ = make_run("env.entry_point=fixed_games:fixed", "env.num_envs=4", "model.hidden=[8]")
    result = evaluated(capsys, run.path, "--episodes", 3)
    assert (result["lengths"], result["environments"]) == ([3, 3, 3], 4)
    assert called("play", run.path, "--episodes", 1) == 0
    assert capsys.readouterr().out == "episode 1: return 3, 3 env steps\n"


def test_what_the_environment_prints_is_not_in_the_result(make_run, capsys, tmp_path, monkeypatch):
    text = "from common.envs.probes import *\n\ndef talkative():\n    print('loading')\n    return counting([2])\n"
    (tmp_path / "talkative_games.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)  # code of a run is in the current directory
    run, _ = make_run("env.entry_point=talkative_games:talkative", "model.hidden=[8]")
    capsys.readouterr()  # to make the run, an environment was built in this process
    assert called("evaluate", run.path, "--episodes", 1, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["episodes"] == 1
    assert "loading" in err


@pytest.mark.parametrize("command", ["evaluate", "play"])
def test_an_environment_that_fails_in_the_middle_costs_one_line(make_run, capsys, tmp_path, monkeypatch, command):
    text = """
from common.envs.probes import Probe

class Failing(Probe):
    def step(self, action):
        raise OSError("unplugged")

def failing():
    return Failing(length=9, observe=lambda *_: 0.0, reward=lambda *_: 0.0)
"""
    (tmp_path / "failing_games.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)  # code of a run is in the current directory
    monkeypatch.delitem(sys.modules, "failing_games", raising=False)
    run, _ = make_run("env.entry_point=failing_games:failing", "model.hidden=[8]")
    assert called(command, run.path, "--episodes", 1) == 2
    fact = "failing_games:failing fails while it is played: found OSError: unplugged, wanted whole episodes"
    assert capsys.readouterr().err == f"rookery {command}: error: {fact}; correct the environment; --debug shows the line\n"
