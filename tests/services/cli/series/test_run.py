"""A series around a trainer that only writes files: which runs start, which are skipped, and the exit code."""

import io
import json
import threading
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import pytest

from common.config.load import find_preset, load_settings
from common.errors import ConfigError
from services.cli import env_trial
from services.cli.series.plan import SeriesRequest, is_series, open_series
from services.cli.series.run import run_series
from tests.services.cli.conftest import called

pytestmark = pytest.mark.service

NOW = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)


class FakeTrainer:
    """Leaves a finished run, or what `script` says for the name of its directory: an exit code, and whether it has finished."""

    def __init__(self, write_run, script=None, stop_after=None):
        self.calls, self.commands, self.stopped = [], [], False
        self._write, self._script, self._stop_after = write_run, script or {}, stop_after

    def train(self, argv, **_):
        path = Path(argv[argv.index("--run-dir") + 1])
        self.calls.append((path.name, "--resume" in argv))
        words = argv[argv.index("--") + 1 :]  # the preset of a run that begins, and settings
        self.commands.append(" ".join([*words, *argv[1 : argv.index("--member")]]))
        code, done = self._script.get(path.name, (0, True))
        overrides = [word for word in words if "=" in word]
        self._write(path, *overrides, solved=done, env_steps=1000, mean100=480.0, wall_seconds=60.0)
        self.stopped = path.name == self._stop_after
        return code


@pytest.fixture
def ran(tmp_path, monkeypatch, write_run):
    """Open and run a series; gives exit code, the started runs, and what was shown."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides, seeds=None, resume=False, preset="cartpole", trainer=None, parallel=1, options=(), environ=None):
        request = SeriesRequest(
            preset=preset, overrides=overrides, seeds=seeds, folder=Path("series"), resume=resume, options=options
        )
        trainer, shown, messages, environ = trainer or FakeTrainer(write_run), io.StringIO(), [], environ or {}
        with open_series(request, environ=environ, now=NOW) as (series, folder):
            given = {"show": messages.append, "stdout": shown, "environ": environ, "parallel": parallel}
            code = run_series(series, folder, trainer=trainer, **given)
        return code, trainer.calls, shown.getvalue() + "\n".join(messages)

    run.write = write_run
    return run


def test_each_member_runs_once_in_its_own_directory(ran):
    code, calls, shown = ran("algorithm.learning_rate=1e-3,3e-4", seeds="1-2")
    names = ["learning_rate=1e-3-s1", "learning_rate=1e-3-s2", "learning_rate=3e-4-s1", "learning_rate=3e-4-s2"]
    assert (code, calls) == (0, [(name, False) for name in names])
    assert shown.count("solved: the target was reached") == 4
    assert "go on" not in shown


def test_a_series_takes_a_setting_that_has_an_effect_in_some_of_its_runs_alone(ran):
    code, calls, _ = ran("algorithm.lr_schedule=constant,linear", "algorithm.lr_final=1e-5")
    assert (code, len(calls)) == (0, 2)
    with pytest.raises(ConfigError, match=r"algorithm\.lr_final: found 1e-05"):
        ran("algorithm.lr_schedule=constant", "algorithm.lr_final=1e-5", seeds="1-2")


def test_runs_side_by_side_write_to_logs_of_their_own(ran, write_run):
    """Each of the first two waits until the other has begun."""
    together, logs = threading.Barrier(2, timeout=60.0), []

    class Waiting(FakeTrainer):
        def train(self, argv, *, log):
            logs.append(log.name)
            if len(logs) < 3:
                together.wait()
            return super().train(argv)

    code, calls, shown = ran(seeds="1-3", trainer=Waiting(write_run), parallel=2)
    assert (code, sorted(calls)) == (0, [("s1", False), ("s2", False), ("s3", False)])
    assert sorted(logs) == ["s1.log", "s2.log", "s3.log"]
    assert "run 3 of 3, s3: solved: the target was reached" in shown


def test_a_failure_does_not_end_the_series_and_is_in_its_exit_code(ran, write_run):
    code, calls, shown = ran(seeds="1-3", trainer=FakeTrainer(write_run, {"s2": (1, False)}))
    assert code == 1
    assert [name for name, _ in calls] == ["s1", "s2", "s3"]
    assert "1 of 3 runs have not finished: s2" in shown


@pytest.mark.parametrize("text", ["run: [", "run: {sede: 1}"])
def test_a_run_whose_settings_cannot_be_read_has_failed_and_the_others_still_run(ran, tmp_path, text):
    ran(seeds="1-3", trainer=FakeTrainer(ran.write, stop_after="s2"))
    (tmp_path / "series" / "s1" / "config.yaml").write_text(text)
    code, calls, shown = ran(preset=None, resume=True)
    assert (code, calls) == (1, [("s3", False)])
    assert "s1 counts as failed: " in shown
    assert "1 of 3 runs have not finished: s1" in shown
    assert "Results" in shown


def test_a_run_that_ends_with_files_that_cannot_be_read_is_shown_with_its_exit_code(ran):
    class Breaking(FakeTrainer):
        def train(self, argv, **_):
            super().train(argv)
            (Path(argv[argv.index("--run-dir") + 1]) / "config.yaml").write_text("run: [")
            return 1

    code, calls, shown = ran(seeds="1-2", trainer=Breaking(ran.write), parallel=2)
    assert (code, len(calls)) == (1, 2)
    assert "s1: exit code 1" in shown
    assert "s2: exit code 1" in shown


def test_a_stop_ends_the_series(ran, write_run):
    code, calls, shown = ran(seeds="1-3", trainer=FakeTrainer(write_run, {"s2": (0, False)}, stop_after="s2"))
    assert (code, [name for name, _ in calls]) == (0, ["s1", "s2"])
    assert "2 of 3 runs have not finished: s2, s3" in shown
    assert "rookery train --resume --run-dir series" in shown


def test_a_second_stop_ends_the_series_at_once(ran, write_run):
    code, calls, _ = ran(seeds="1-3", trainer=FakeTrainer(write_run, {"s1": (130, False)}))
    assert (code, len(calls)) == (130, 1)


def test_resumed_it_skips_finished_runs_and_resumes_the_others(ran, write_run):
    ran(seeds="1-4", trainer=FakeTrainer(write_run, {"s2": (0, False)}, stop_after="s2"))
    code, calls, shown = ran(preset=None, resume=True)
    assert (code, calls) == (0, [("s2", True), ("s3", False), ("s4", False)])
    assert "s1: finished before: solved" in shown


def test_resumed_with_a_larger_budget_finished_runs_go_on(ran, write_run):
    script = dict.fromkeys(("s1", "s2"), (0, False))
    ran("target.env_steps=1000", seeds="1-2", trainer=FakeTrainer(write_run, script))
    assert ran(preset=None, resume=True)[1] == []
    assert ran("target.env_steps=2000", preset=None, resume=True)[1] == [("s1", True), ("s2", True)]


@pytest.mark.parametrize("target", ["target.mean100=400", "target.evaluation=490"])
def test_resumed_with_another_target_finished_runs_go_on(ran, target):
    """A run that is resumed alone begins to look for the new target, too."""
    ran(seeds="1-2")
    assert ran("target.mean100=475", preset=None, resume=True)[1] == []
    assert ran(target, preset=None, resume=True)[1] == [("s1", True), ("s2", True)]


def test_a_run_that_was_killed_after_an_earlier_end_goes_on(ran, tmp_path):
    """It was resumed alone, with another target: no table has a result of it."""
    ran(seeds="1-2")
    with (tmp_path / "series" / "s1" / "learning_curve.csv").open("a") as curve:
        curve.write("90,2000,100,\n")
    assert ran(preset=None, resume=True)[1] == [("s1", True)]


def test_resumed_with_other_seeds_it_has_these(ran):
    ran(seeds="1-2")
    assert ran(seeds="1-3", preset=None, resume=True)[1] == [("s3", False)]


def test_resumed_with_other_seeds_it_keeps_settings_values_and_options(ran, tmp_path):
    """Hours of runs with the preset's own settings stood beside those that were asked for."""
    ran("algorithm.gamma=0.9", "algorithm.learning_rate=1e-3,3e-4", seeds="1")
    series = tmp_path / "series" / "series.json"
    series.write_text(series.read_text().replace('"options": []', '"options": ["--actors", "1"]'))
    first, second = FakeTrainer(ran.write), FakeTrainer(ran.write)
    ran(seeds="1-2", preset=None, resume=True, trainer=first)
    rest = "run.seed=2 --actors 1"
    assert first.commands == [f"cartpole algorithm.gamma=0.9 algorithm.learning_rate={rate} {rest}" for rate in ("1e-3", "3e-4")]
    ran("algorithm.gamma=0.8", "algorithm.learning_rate=3e-4,1e-2", preset=None, resume=True, trainer=second)
    assert second.commands == [
        f"cartpole algorithm.gamma=0.9 algorithm.gamma=0.8 algorithm.learning_rate=1e-2 run.seed={seed} --actors 1"
        for seed in (1, 2)
    ]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("1e-3,3e-4", "1e-3", "found no several values, wanted algorithm.learning_rate=1e-3,3e-4"),
        ("1e-3", "1e-3,3e-4", "found algorithm.learning_rate=1e-3,3e-4, wanted none"),
    ],
)
def test_a_resume_that_would_name_all_runs_otherwise_is_refused(ran, tmp_path, first, second, message):
    """They began anew beside themselves."""
    ran(f"algorithm.learning_rate={first}", seeds="1-2")
    before = (tmp_path / "series" / "series.json").read_bytes()
    with pytest.raises(ConfigError, match=message):
        ran(f"algorithm.learning_rate={second}", resume=True)
    assert (tmp_path / "series" / "series.json").read_bytes() == before


def test_runs_with_numbers_in_their_names_keep_them(ran):
    """Where the order of the values changes, a run would continue with the value of another one."""
    words = "run.preset=a b,a/b"
    names = [f"{number}-preset=a_b-s" for number in ("000", "001")]
    assert ran(words, seeds="1")[1] == [(f"{name}1", False) for name in names]
    assert ran(words, seeds="1-2", resume=True)[1] == [(f"{name}2", False) for name in names]
    with pytest.raises(ConfigError, match="the runs of the series would get other names"):
        ran("run.preset=a/b,a b", resume=True)


def test_resumed_it_keeps_each_option_that_the_command_does_not_name(ran):
    ran(seeds="1", options=("--actors", "auto", "--log-format", "plain"))
    trainer = FakeTrainer(ran.write)
    ran(seeds="2", resume=True, options=("--log-format", "json"), trainer=trainer)
    ran("actor.count=2", seeds="3", resume=True, trainer=trainer)  # instead of the search for a number
    ran(seeds="4", resume=True, options=("--actors", "auto"), trainer=trainer)
    assert trainer.commands == [
        "cartpole run.seed=2 --actors auto --log-format json",
        "cartpole actor.count=2 run.seed=3 --log-format json",
        "cartpole actor.count=2 run.seed=4 --log-format json --actors auto",
    ]


def test_a_number_of_actors_is_a_setting_of_the_series(ran, tmp_path, monkeypatch):
    trainer = FakeTrainer(ran.write)
    monkeypatch.setattr("services.cli.series.run.train_processes", lambda: nullcontext(trainer))
    for words in (["cartpole", "--seeds", "1", "--actors", "4"], ["--resume", "--seeds", "2", "actor.count=3"]):
        assert called("train", *words, "--run-dir", tmp_path / "series") == 0
    assert trainer.commands == [
        "cartpole actor.count=4 run.seed=1",
        "cartpole actor.count=4 actor.count=3 run.seed=2",
    ]
    assert called("train", "cartpole", "actor.count=1,2", "--actors", "4", "--run-dir", tmp_path / "other") == 2


def test_a_series_is_not_resumed_with_variables_or_a_preset_that_changed(ran, tmp_path):
    preset, text = tmp_path / "my.yaml", find_preset("cartpole").text
    preset.write_text(text)
    environ = {"ROOKERY_ALGORITHM__GAMMA": "0.9"}
    ran(preset="my.yaml", seeds="1-2", environ=environ, trainer=FakeTrainer(ran.write, stop_after="s1"))
    with pytest.raises(ConfigError, match=r"found algorithm\.gamma=0\.98, wanted algorithm\.gamma=0\.9;"):
        ran(preset=None, resume=True)
    preset.write_text(text.replace("epochs: 10", "epochs: 2"))
    with pytest.raises(ConfigError, match=r"found algorithm\.epochs=2, wanted algorithm\.epochs=10;"):
        ran(preset=None, resume=True, environ=environ)
    preset.write_text(text)
    with pytest.raises(ConfigError, match=r"found env\.kwargs\.x=1, wanted env\.kwargs={};"):
        ran(preset=None, resume=True, environ=environ | {"ROOKERY_ENV__KWARGS": "{x: 1}"})
    assert ran(preset=None, resume=True, environ=environ | {"ROOKERY_LOG__FORMAT": "json"})[1] == [("s2", False)]
    assert ran("algorithm.gamma=0.9", preset=None, resume=True)[1] == []  # named in place of the variable
    assert ran(preset=None, seeds="3", resume=True)[1] == [("s3", False)]


def test_an_edited_preset_is_found_where_the_first_member_does_not_read_it(ran, tmp_path):
    """The settings of the other algorithm are in no file of the first one."""
    preset, text = tmp_path / "my.yaml", find_preset("cartpole").text
    preset.write_text(text)
    stopped = FakeTrainer(ran.write, stop_after="name=dqn-s1")
    ran("algorithm.name=dqn,ppo", preset="my.yaml", trainer=stopped)
    preset.write_text(text.replace("epochs: 10", "epochs: 2"))
    with pytest.raises(ConfigError, match=r"found algorithm\.epochs=2, wanted algorithm\.epochs=10;"):
        ran(preset=None, resume=True)
    assert ran("algorithm.epochs=2", "algorithm.name=pqn,ppo", preset=None, resume=True)[1] == [
        ("name=pqn-s1", False),
        ("name=ppo-s1", False),
    ]


def test_what_the_command_names_is_not_compared_with_all_that_is_inside(ran, tmp_path):
    """A mapping, and an algorithm, which has settings of its own."""
    preset, text = tmp_path / "my.yaml", find_preset("cartpole").text
    preset.write_text(text)
    ran(preset="my.yaml", seeds="1-2", trainer=FakeTrainer(ran.write, stop_after="s1"))
    preset.write_text(text.replace("id: CartPole-v1", "id: CartPole-v1\n  kwargs: {sutton_barto_reward: true}"))
    with pytest.raises(ConfigError, match=r"found env\.kwargs\.sutton_barto_reward=true"):
        ran(preset=None, resume=True)
    assert ran("env.kwargs={sutton_barto_reward: false}", preset=None, resume=True)[1] == [("s2", False)]
    preset.write_text(text)
    with pytest.raises(ConfigError, match=r"found algorithm\.gamma=0\.9, wanted algorithm\.gamma=0\.98"):
        ran("algorithm.name=ppo", preset=None, resume=True, environ={"ROOKERY_ALGORITHM__GAMMA": "0.9"})
    assert ran("algorithm.name=a3c", seeds="1-3", preset=None, resume=True)[1] == [("s3", False)]


def test_a_key_inside_an_empty_mapping_may_be_named(ran):
    ran(seeds="1")
    assert ran("env.kwargs.sutton_barto_reward=true", preset=None, seeds="1-2", resume=True)[1] == [("s2", False)]


def test_an_id_for_all_runs_is_refused(ran):
    """Trackers would take them for one."""
    with pytest.raises(ConfigError, match=r"run\.id of a series: found mine, wanted none"):
        ran("run.id=mine", seeds="1-2")


@pytest.mark.parametrize("setting", ["run.init=there", "run.init=there,elsewhere"])
def test_a_series_is_not_resumed_with_other_first_weights(ran, tmp_path, setting):
    """Each of its runs would refuse them, and so at each later resume."""
    ran(seeds="1")
    before = (tmp_path / "series" / "series.json").read_bytes()
    with pytest.raises(ConfigError, match=rf"run\.init of a series that goes on: found {setting}, wanted none"):
        ran(setting, resume=True)
    assert (tmp_path / "series" / "series.json").read_bytes() == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_seed_beside_seeds_is_refused(ran, resume):
    if resume:
        ran(seeds="1-2")
    with pytest.raises(ConfigError, match="a seed beside the seeds of the series"):
        ran("run.seed=9", seeds=None if resume else "1-2", resume=resume)


@pytest.mark.parametrize(
    ("request_", "hint"),
    [
        ({"overrides": ("env.num_envs=4,0",), "seeds": None}, "found 0"),
        ({"overrides": (), "seeds": "1-x"}, "--seeds"),
        ({"overrides": (), "seeds": "1", "preset": "pogn"}, "did you mean pong"),
        ({"overrides": (), "seeds": None, "resume": True}, "no series to resume"),
        ({"overrides": ("env.id=CartPol-v1",), "seeds": "1-2"}, "unknown environment id: found CartPol-v1"),
        ({"overrides": ("algorithm.name=ppo,td3",), "seeds": None}, "td3 needs continuous actions"),
        ({"overrides": ("run.tracking=[],[mlflow]",), "seeds": None}, "run.tracking names mlflow"),
        ({"overrides": ("learner.ranks=1,2", "actor.count=1"), "seeds": None}, "actor.count: found 1, wanted at least 2"),
        (
            {"overrides": ("policy_server.workers=0,1",), "seeds": None, "options": ("--actors", "auto")},
            "number of policy servers cannot be searched for",
        ),
        (
            {"overrides": ("metrics.port=19100",), "seeds": "1-2", "parallel": 2},
            r"metrics\.port of several runs at a time: found 19100, wanted port 0",
        ),
        (
            {"overrides": ("learner.bind=tcp://127.0.0.1:5700", "env.num_envs=4,8"), "seeds": None, "parallel": 2},
            r"learner\.bind of several runs at a time: found tcp://127.0.0.1:5700, wanted port 0",
        ),
    ],
)
def test_bad_input_writes_nothing(tmp_path, request_, hint):
    request = SeriesRequest(**{"preset": "cartpole", "folder": tmp_path / "s"} | request_)
    with pytest.raises(ConfigError, match=hint), open_series(request, environ={}, now=NOW):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ports", [("metrics.port=19100,19200", "learner.bind=tcp://127.0.0.1:0"), ("metrics.port=0",)])
def test_runs_at_a_time_with_ports_of_their_own_are_accepted(tmp_path, ports):
    seeds = "1" if "," in ports[0] else "1-2"
    request = SeriesRequest(preset="cartpole", overrides=ports, seeds=seeds, folder=tmp_path / "s", parallel=2)
    with open_series(request, environ={}, now=NOW) as (series, _):
        assert len(series.members) == 2


def test_actors_whose_number_is_sought_are_enough_for_each_rank(ran):
    assert ran("learner.ranks=1,2", "actor.count=1", options=("--actors", "auto"))[0] == 0


def test_a_setting_of_a_resume_that_cannot_work_is_refused_and_not_kept(ran, tmp_path):
    ran(seeds="1")
    before = (tmp_path / "series" / "series.json").read_bytes()
    with pytest.raises(ConfigError, match=r"CartPole-v1 does not take env.kwargs: found {'gravity': 9}"):
        ran("env.kwargs.gravity=9", resume=True)
    assert (tmp_path / "series" / "series.json").read_bytes() == before


def test_an_environment_is_tried_once_for_all_runs_and_not_again_by_a_resume_alone(ran, monkeypatch):
    tried, answer = [], env_trial._answer
    monkeypatch.setattr(env_trial, "_answer", lambda env: (tried.append(env.num_envs), answer(env))[1])
    ran("env.num_envs=4,8", "algorithm.learning_rate=1e-3,3e-4", seeds="1-2")
    assert tried == [4, 8]
    ran(seeds="1-3", resume=True)
    assert tried == [4, 8]


def test_what_has_no_effect_in_several_runs_is_named_once(ran, capsys):
    ran("model.conv=impala", "algorithm.learning_rate=1e-3,3e-4", seeds="1-2")
    assert capsys.readouterr().err == "rookery: warning: model.conv has no effect: CartPole-v1 has no images\n"


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "notes").write_text("mine")
    request = SeriesRequest(preset="cartpole", overrides=(), seeds="1", folder=tmp_path)
    with pytest.raises(ConfigError, match="in use"), open_series(request, environ={}, now=NOW):
        pass
    assert not is_series(tmp_path)


@pytest.mark.parametrize("resume", [False, True])
def test_one_command_at_a_time_has_the_folder(ran, tmp_path, resume):
    class Trainer(FakeTrainer):
        def train(self, argv, **more):
            with pytest.raises(ConfigError, match="or a series or sweep of runs: found series"):
                ran(seeds="1-5", resume=resume)
            return super().train(argv, **more)

    assert ran(seeds="1", trainer=Trainer(ran.write))[:2] == (0, [("s1", False)])
    assert json.loads((tmp_path / "series" / "series.json").read_text())["seeds"] == [1]
    assert ran(seeds="1-2", resume=True)[1] == [("s2", False)]


def test_two_commands_that_resume_at_once_lose_no_change(ran, tmp_path, monkeypatch):
    """The second one begins while the first checks the series that it has read."""
    ran(seeds="1")

    def check(**given):
        monkeypatch.setattr("services.cli.series.plan.load_settings", load_settings)
        with pytest.raises(ConfigError, match="or a series or sweep of runs: found series"):
            ran(seeds="1-3", resume=True)
        return load_settings(**given)

    monkeypatch.setattr("services.cli.series.plan.load_settings", check)
    assert ran("env.num_envs=4", resume=True)[0] == 0
    assert json.loads((tmp_path / "series" / "series.json").read_text())["overrides"] == ["env.num_envs=4"]


def test_a_series_is_of_one_preset(ran):
    ran(seeds="1")
    with pytest.raises(ConfigError, match="another preset"):
        ran(seeds="1", preset="pong", resume=True)
