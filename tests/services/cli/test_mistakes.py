"""Mistakes of a first run: each is found before a process starts, and is answered in one line with exit code 2."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.app import main

pytestmark = pytest.mark.service

ENVIRONMENTS = """
import multiprocessing
import os
import signal
import sys

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from common.envs import trial

trial.TRIAL_SECONDS = 300.0  # the first env steps are taken however long they take

class Sound(gymnasium.Env):
    observation_space, action_space = Box(-1.0, 1.0, (3,), np.float32), Discrete(2)
    shown, reward = 3, 1.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.shown, np.float32), {}

    def step(self, action):
        return np.zeros(self.shown, np.float32), self.reward, False, False, {}

class Raises(Sound):
    def step(self, action):
        raise ValueError("no such level")

class RaisesLater(Sound):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 200:
            raise ValueError("no such level")
        return super().step(action)

class NotANumber(Sound):
    reward = float("nan")

class NotANumberLater(RaisesLater):
    def step(self, action):
        self.reward = float("nan") if self.steps == 100 else 1.0
        return super().step(action)

class OtherShape(Sound):
    shown = 4

class Unbounded(Sound):
    action_space = Box(-np.inf, np.inf, (2,), np.float32)

class TwoActions(Sound):
    action_space = MultiDiscrete([2, 2])

class Talks(Sound):
    def __init__(self):
        print("licence found")

class Crashes(Sound):
    def step(self, action):
        os.kill(os.getpid(), signal.SIGKILL)

class Leaves(Sound):
    def reset(self, *, seed=None, options=None):
        sys.exit(3)

class Hangs(Sound):
    def step(self, action):
        signal.pause()

class Parent(Sound):
    def reset(self, *, seed=None, options=None):
        multiprocessing.get_context("fork").Process(target=signal.pause).start()
        return super().reset(seed=seed)

class CrashesAsParent(Parent):
    def step(self, action):
        os.kill(os.getpid(), signal.SIGSEGV)

class HangsAsParent(Parent):
    def step(self, action):
        print("hangs")
        signal.pause()

class Masks(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"action_mask": np.ones(2, np.int8)}

def fixed(size=4):
    return gymnasium.vector.SyncVectorEnv([Sound] * size)

KEPT = Sound()

def kept():
    return KEPT

class OneForAll(gymnasium.vector.SyncVectorEnv):
    def __init__(self, num_envs):
        super().__init__([Sound] * num_envs)

    def reset(self, **given):
        return super().reset(**given)[0][:1], {}
"""

POOLED = """
from concurrent.futures import ThreadPoolExecutor

from newcomers import Sound

POOL = ThreadPoolExecutor(1)
POOL.submit(Sound).result()

def make():
    return POOL.submit(Sound).result()
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    """An empty working directory, and a user's modules elsewhere; one hides Box2D, where that is installed."""
    for name in [name for name in os.environ if name.startswith("ROOKERY_")]:
        monkeypatch.delenv(name)
    (tmp_path / "modules").mkdir()
    for name, text in (("newcomers", ENVIRONMENTS), ("pooled", POOLED), ("Box2D", "raise ImportError")):
        (tmp_path / "modules" / f"{name}.py").write_text(text)
    (tmp_path / "here").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)
    for name in ("newcomers", "pooled"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize("command", [("config", "validate"), ("train",)])
@pytest.mark.parametrize(
    ("words", "hints"),
    [
        (["cartpole", "env.id=CartPol-v1"], ["unknown environment id: found CartPol-v1, wanted CartPole-v1"]),
        (["cartpole", "env.id=LunarLander-v3"], ["LunarLander-v3 needs", 'pip install "gymnasium[box2d]"']),
        (["cartpole", "env.entry_point=newcomers:Raises"], ["newcomers:Raises fails", "found ValueError: no such level"]),
        (
            ["cartpole", "env.entry_point=newcomers:RaisesLater"],
            ["RaisesLater fails", "found ValueError: no such level"],
        ),
        (["cartpole", "env.entry_point=newcomers:NotANumber"], ["returns rewards that are not finite as float32: found nan"]),
        (
            ["cartpole", "env.entry_point=newcomers:NotANumberLater"],
            ["returns rewards that are not finite as float32: found nan"],
        ),
        (["cartpole", "env.entry_point=newcomers:OtherShape"], ["newcomers:OtherShape fails", "observations of shape (3,)"]),
        (["pendulum-td3", "env.id=CartPole-v1"], ["td3 needs continuous actions: found 2 discrete", "algorithm.name=dqn"]),
        (["cartpole-dqn", "env.id=Pendulum-v1"], ["dqn cannot choose", "algorithm.name=td3"]),
        (
            ["pendulum-td3", "env.entry_point=newcomers:Unbounded"],
            ["td3 needs continuous actions", "2 of 2 components without finite bounds", "ppo"],
        ),
        (
            ["cartpole", "env.entry_point=common.envs.probes:named_action", "model.normalize_observation=true"],
            ["discrete observations have no mean", "set model.normalize_observation=false"],
        ),
        (
            ["cartpole-dqn", "env.entry_point=newcomers:TwoActions"],
            ["dqn cannot choose", "found 2 discrete components", "algorithm.name=ppo"],
        ),
        (["cartpole", "env.entry_point=newcomers:Crashes"], ["newcomers:Crashes ends its process", "found signal 9", "correct"]),
        (["cartpole", "env.entry_point=newcomers:CrashesAsParent"], ["newcomers:CrashesAsParent ends its process", "signal 11"]),
        (["cartpole", "env.entry_point=newcomers:Leaves"], ["newcomers:Leaves ends its process", "found exit code 3"]),
        (
            ["cartpole", "env.entry_point=newcomers:fixed", "env.num_envs=6"],
            ["newcomers:fixed makes another number of environments: found 4, wanted 6", "num_envs"],
        ),
        (
            ["cartpole", "env.entry_point=newcomers:fixed", "env.num_envs=4", "policy_server.workers=2"],
            ["newcomers:fixed makes another number of environments: found 4, wanted 2", "policy_server.workers"],
        ),
        (
            ["cartpole", "env.entry_point=newcomers:kept"],
            ["newcomers:kept returns an environment that it returned before: found 1"],
        ),
        (["cartpole", "env.entry_point=newcomers:OneForAll"], ["found shape (1, 3), wanted shape (2, 3)"]),
        (["cartpole-a3c-grad", "model.normalize_observation=true"], ["vectors by a3c-grad: found true", "algorithm.name=a3c"]),
        (["cartpole-a3c-grad", "env.normalize_reward=true"], ["env.normalize_reward: found true, wanted false", "no rewards"]),
        (["breakout", "env.normalize_reward=true"], ["env.normalize_reward: found true, wanted false", "signs have no scale"]),
        (
            ["pong", "env.id=", "env.entry_point=common.envs.probes:pictured_action", "model.conv=[[32,8,4],[64,4,2],[64,3,1]]"],
            ["model.conv does not fit the image: found (16, 16)", "auto"],
        ),
        (["cartpole", "env.num_env=4"], ["env.num_env", "did you mean num_envs?"]),
        (["cartpole", "learner.bind=127.0.0.1:5700"], ["learner.bind", "found '127.0.0.1:5700'", "tcp://host:port"]),
        (["cartpole", "learner.bind=tcp://0.0.0.0:5700"], ["learner.keys", "rookery keys"]),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(command, words, hints, capfd):
    assert main([*command, *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for hint in hints:
        assert hint in err
    assert list(Path().iterdir()) == []


def test_a_port_in_use_is_one_line_before_anything_starts(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["train", "cartpole", f"learner.bind=tcp://127.0.0.1:{port}"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"tcp://127.0.0.1:{port}" in err
    assert "in use" in err
    assert list(Path().iterdir()) == []


def test_a_start_is_checked_without_modules_that_take_long():
    """The processes of a run start after the checks, and import torch themselves; a curve is drawn at the end."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["train", "cartpole", f"learner.bind=tcp://127.0.0.1:{taken.getsockname()[1]}"]
        program = (
            "import sys\nfrom services.cli.app import main\n"
            f"print(main({words}), {{'torch', 'tensorboard', 'matplotlib', 'fsspec'}} & set(sys.modules))"
        )
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout == "2 set()\n", ended.stderr


def test_settings_that_can_work_are_valid_and_what_the_environment_prints_is_no_output(capfd):
    assert main(["config", "validate", "cartpole", "env.entry_point=newcomers:Talks"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("newcomers.Talks-ppo: all settings are valid, and the environment starts\n")
    assert err == "licence found\n" * 2


def test_an_environment_that_hangs_ends_the_command_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("services.cli.env_trial.SLOW_SECONDS", 0.1)
    monkeypatch.setattr("services.cli.env_trial.BUILD_SECONDS", 0.2)
    assert main(["config", "validate", "cartpole", "env.entry_point=newcomers:Hangs"]) == 2
    slow, line = capsys.readouterr().err.splitlines()
    assert "newcomers:Hangs has not taken its first env steps after 0 s" in slow
    assert "newcomers:Hangs hangs when it is built, reset or stepped: found nothing within 0 s" in line


@pytest.mark.parametrize(
    "words",
    [
        ["--actors", "auto", "actor.count=4"],
        ["--seed", "3", "run.seed=5", "algorithm.gamma=0.9,0.8"],
        ["--run-dir", "here", "run.dir=there"],
    ],
)
def test_a_setting_that_an_option_sets_too_is_refused(words, capsys):
    """The option would win without a word."""
    assert main(["train", "cartpole", *words]) == 2
    assert "by an option and by its name: found" in capsys.readouterr().err


def test_a_folder_for_each_run_of_a_series_is_refused(capsys):
    """The runs would not be in it."""
    assert main(["train", "cartpole", "--seeds", "1-2", "run.dir=there"]) == 2
    assert (
        "run.dir of a series: found there, wanted none; name the folder of all its runs by --run-dir" in capsys.readouterr().err
    )


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_ends_the_command_and_what_an_environment_that_hangs_has_started(stop, code):
    """Ctrl-C, or what a series sends to a run that is still checking."""
    command = [sys.executable, "-m", "services.cli", "config", "validate", "env.entry_point=newcomers:HangsAsParent"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert "hangs\n" in process.stderr  # on a busy machine behind the line about slow first env steps
        process.send_signal(stop)
        process.stderr.read()  # until every process that could write to it has ended
    assert process.returncode == code


def test_an_environment_may_use_a_thread_that_its_module_has_started(capsys):
    assert main(["config", "validate", "cartpole", "env.entry_point=pooled:make"]) == 0


def test_debug_shows_the_line_of_an_environment_that_fails(capsys):
    assert main(["config", "validate", "cartpole", "env.entry_point=newcomers:Raises", "--debug"]) == 2
    assert 'raise ValueError("no such level")' in capsys.readouterr().err


@pytest.mark.parametrize(("name", "lines"), [("Masks", 1), ("Sound", 0), ("fixed", 0)])
def test_an_action_mask_is_not_ignored_without_a_word(name, lines, capfd):
    assert main(["config", "validate", "cartpole", f"env.entry_point=newcomers:{name}", "env.num_envs=4"]) == 0
    err = capfd.readouterr().err.splitlines()
    assert len(err) == lines
    assert all("newcomers:Masks offers an action_mask, which is not used" in line for line in err)


def test_the_noise_of_continuous_actions_is_not_ignored_without_a_word(capfd):
    ignored = "rookery: warning: model.initial_log_std has no effect: actions of CartPole-v1 are discrete"
    for env, value, lines in (("CartPole-v1", -1, [ignored]), ("CartPole-v1", 0, []), ("Pendulum-v1", -1, [])):
        assert main(["config", "validate", "cartpole", f"env.id={env}", f"model.initial_log_std={value}"]) == 0
        assert capfd.readouterr().err.splitlines() == lines


def test_the_schedule_of_an_entropy_bonus_that_is_not_set_is_not_ignored_without_a_word(capfd):
    ignored = "rookery: warning: algorithm.entropy_env_steps has no effect: algorithm.entropy_coef of continuous actions is"
    end = [f"{ignored} algorithm.entropy_final = 0"]
    cases = (("Pendulum-v1", "null", end), ("Pendulum-v1", 0.01, []), ("CartPole-v1", "null", []))
    for env, value, lines in cases:
        changes = [f"env.id={env}", f"algorithm.entropy_coef={value}", "algorithm.entropy_env_steps=1000"]
        assert main(["config", "validate", "cartpole", *changes]) == 0
        assert capfd.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("command", [("config", "show"), ("config", "validate"), ("train",), ("train", "--seeds", "1-2")])
def test_a_setting_with_two_values_is_refused_in_one_line(command, capsys):
    assert main([*command, "cartpole", "model.hidden=[64, 64]", "run.seed=1", "model.hidden=[32]"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("model.hidden is set twice: found model.hidden=[64, 64] and model.hidden=[32], wanted one value")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("words", [("train", "cartpole", "--seed", "1", "--seed=2"), ("play", "x", "--seed", "1", "--seed", "1")])
def test_an_option_that_is_given_twice_is_refused_in_one_line(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert (ended.value.code, list(Path().iterdir())) == (2, [])
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: --seed is given twice; name it once" in line


def test_a_value_in_a_mapping_and_by_its_own_name_is_refused(capsys):
    words = ["env.kwargs={sutton_barto_reward: true}", "env.kwargs.sutton_barto_reward="]
    for value in ("false", "1"):
        assert main(["config", "show", "cartpole", words[0], f"{words[1]}{value}"]) == 2
        assert "env.kwargs.sutton_barto_reward is set twice" in capsys.readouterr().err
    assert main(["config", "show", "cartpole", words[0], f"{words[1]}true"]) == 0


def test_an_empty_mapping_after_a_value_in_it_is_refused(capsys):
    words = ["env.kwargs.sutton_barto_reward=true", "env.kwargs={}"]
    assert main(["config", "show", "cartpole", *words]) == 2
    assert f"env.kwargs is set twice: found {words[0]} and {words[1]}, wanted one value" in capsys.readouterr().err
    assert main(["config", "show", "cartpole", *reversed(words)]) == 0


def test_a_setting_with_one_value_may_be_named_twice(capsys):
    words = ["algorithm.learning_rate=0.001", "algorithm.learning_rate=1e-3"]
    assert main(["config", "show", "cartpole", *words]) == 0
    assert "  learning_rate: 0.001  # command line" in capsys.readouterr().out


def test_convolutions_without_images_are_not_ignored_without_a_word(capfd):
    for name, lines in (("impala", ["rookery: warning: model.conv has no effect: CartPole-v1 has no images"]), ("auto", [])):
        assert main(["config", "validate", "cartpole", f"model.conv={name}"]) == 0
        assert capfd.readouterr().err.splitlines() == lines
