"""A sweep around a trainer that only writes files: what is tried, what ends early, and what a resumed one continues."""

import io
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.config.load import load_settings
from common.errors import ConfigError
from services.cli.compare.runs import read_run
from services.cli.series.grid import split_overrides
from services.cli.series.space import read_sweep

optuna = pytest.importorskip("optuna")
sweep_module = pytest.importorskip("services.cli.series.sweep")

pytestmark = pytest.mark.service

FILE = """
preset: cartpole
settings: {target.env_steps: 1000}
search:
  algorithm.learning_rate: {low: 1e-4, high: 1e-2, log: true}
  algorithm.epochs: {low: 2, high: 9}
  model.hidden: {choices: [[64, 64], [8]]}
  algorithm.lr_schedule: {choices: [linear, constant]}
  algorithm.lr_final: {low: 1e-6, high: 1e-5}
trials: TRIALS
"""

NO_TARGET = "target.mean100: null, target.evaluation: null"


class FakeTrainer:
    """Writes the curve of each trial, lower for each next one, and gives the sweep a look at it while it runs."""

    def __init__(self, write_run, codes=(), stop_at=None, first=500, **ended):
        self.calls, self.ended_early, self.stopped = [], [], False
        self._write, self._codes, self._stop_at, self._first, self._ended = write_run, dict(codes), stop_at, first, ended

    def train(self, argv, *, over):
        path = Path(argv[argv.index("--run-dir") + 1])
        overrides = [word for word in argv[argv.index("--") + 1 :] if "=" in word]
        self.calls.append((path.name, "--resume" in argv, tuple(overrides)))
        height = self._first - 40 * int(path.name[1:])
        curve = [(step / 10, step, height * step / 1000, None) for step in range(50, 1050, 50)]
        self._write(path, *overrides, curve=curve[:10])
        if over():
            self.ended_early.append(path.name)
            return 0
        if path.name == self._stop_at:
            self.stopped = True
            return 0
        ended = {"mean100": height, "mean100_episodes": 100, "env_steps": 1000, "wall_seconds": 9.0} | self._ended
        self._write(path, *overrides, curve=curve, **ended)
        return self._codes.get(path.name, 0)


@pytest.fixture
def swept(tmp_path, write_run):
    """Run a sweep; gives exit code, trainer, and what was shown."""

    def run(
        *, trials=6, resume=False, preset="cartpole", settings="settings: {", search="", environ=None, trainer=None, **script
    ):
        file, folder, shown, environ = tmp_path / "file.yaml", tmp_path / "sweep", io.StringIO(), environ or {}
        text = FILE.replace("TRIALS", str(trials)).replace("settings: {", settings).replace("cartpole", preset)
        file.write_text(text.replace("search:", f"search:{search}"))
        trainer, messages = trainer or FakeTrainer(write_run, **script), []
        with sweep_module.open_sweep(None if resume else file, folder, resume=resume, environ=environ) as sweep:
            code = sweep_module.run_sweep(sweep, folder, trainer=trainer, show=messages.append, stdout=shown, environ=environ)
        return code, trainer, shown.getvalue() + "\n".join(messages)

    return run


def test_values_of_a_sweep_are_those_of_its_file(tmp_path):
    """Text that YAML would read as a number, a mapping or nothing, or a series as two values, stays text."""
    texts = ["1", "1e3", "off", "a: b", "[", "1,2", "", "plain", "tcp://host:1"]
    values = {f"env.kwargs.v{number}": value for number, value in enumerate([*texts, 1, 0.5, None, [1, "2"], {"a": "1"}])}
    file = tmp_path / "file.yaml"
    search = {"env.kwargs.s": {"choices": ["01", 1, True]}}
    file.write_text(json.dumps({"preset": "cartpole", "settings": values, "search": search}))
    sweep = read_sweep(file)
    sweep.require_once()
    for trial in sweep.corners():
        shared, grid = split_overrides(sweep.overrides(trial))
        found = load_settings(preset="cartpole", overrides=shared, environ={}).settings.env.kwargs
        wanted = {key.rpartition(".")[2]: value for key, value in (values | trial).items()}
        assert (found, grid) == (wanted, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.entry_point", ""), ("run.id", "7"), ("run.init", "runs/a: b"), ("actor.learner", "tcp://a:1,tcp://b:2")],
)
def test_a_setting_that_takes_any_text_gets_it_without_quotes(tmp_path, key, value):
    file = tmp_path / "file.yaml"
    file.write_text(json.dumps({"preset": "cartpole", "settings": {key: value}, "search": {"env.num_envs": {"choices": [1, 2]}}}))
    sweep = read_sweep(file)
    text, _ = sweep.overrides(next(sweep.corners()))
    assert text == f"{key}={value}"
    assert split_overrides([text]) == ((text,), {})


def test_trials_are_within_the_space_bad_ones_end_early_and_the_best_is_shown_as_a_command(swept, tmp_path):
    code, trainer, shown = swept()
    assert code == 0
    assert [name for name, _, _ in trainer.calls] == [f"t{number:03}" for number in range(6)]
    values = [dict(word.split("=", 1) for word in words) for _, _, words in trainer.calls]
    rates = sorted({float(trial["algorithm.learning_rate"]) for trial in values})
    assert (len(rates), rates[0] >= 1e-4, rates[-1] <= 1e-2) == (6, True, True)
    assert rates[2] < 2.5e-3  # log: true
    assert {trial["model.hidden"] for trial in values} == {"[64, 64]", "[8]"}
    best = read_run(tmp_path / "sweep" / "t000").settings
    assert f"algorithm.lr_schedule={best['algorithm.lr_schedule']}" in shown.partition("best")[2]
    assert f"algorithm.learning_rate={best['algorithm.learning_rate']}" in shown.partition("best")[2]
    constant = best["algorithm.lr_schedule"] == "constant"
    assert ("algorithm.lr_final=" in shown.partition("best ")[2].partition("\n")[0]) is not constant  # `train` would refuse it
    assert trainer.ended_early == ["t004", "t005"]  # below the median of the first four
    # Optuna keeps the last return of a pruned trial, which is no value of the goal.
    assert [line.split()[-1] for line in shown.splitlines() if "pruned" in line] == ["-", "-"]


def test_a_trial_that_reaches_its_target_before_its_early_end_has_a_value(swept, write_run):
    """It played its last games when the sweep stopped it."""
    trainer = FakeTrainer(write_run)

    def train(argv, *, over):
        trainer.train(argv, over=over)
        if trainer.ended_early:
            write_run(Path(argv[argv.index("--run-dir") + 1]), curve=[(1, 500, 400, None)], solved=True, env_steps=500)
        return 0

    code, _, shown = swept(trials=5, trainer=SimpleNamespace(train=train, stopped=False))
    assert (code, trainer.ended_early) == (0, ["t004"])
    assert "pruned" not in shown
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith("t004")] == ["400"]


def test_the_command_of_the_best_trial_names_no_setting_without_effect(swept, tmp_path):
    """`rookery train` would refuse it, whether it was searched or is the same in all trials."""
    _, _, shown = swept(trials=1, settings="settings: {algorithm.lr_env_steps: 500, ")
    command = shown.partition("best ")[2].partition("\n")[0]
    assert read_run(tmp_path / "sweep" / "t000").settings["algorithm.lr_schedule"] == "constant"
    assert "algorithm.lr_env_steps=" not in command
    assert "algorithm.lr_schedule=constant" in command


def test_the_command_of_the_best_trial_keeps_what_the_presets_own_value_would_harm(swept):
    """Its memory is off, because a trunk for the policy alone has none."""
    settings = "settings: {env.num_envs: 8, model.recurrent: null, model.shared_trunk: false, "
    _, _, shown = swept(trials=1, preset="cartpole-velocity-free", settings=settings)
    assert "model.recurrent=null" in shown.partition("best ")[2].partition("\n")[0]


def test_trials_that_end_at_their_target_are_compared_at_every_stage(tmp_path, write_run):
    """Else the median at the late stages would be that of the trials which did not reach it. The first four are not compared."""
    with sweep_module._study(tmp_path, SimpleNamespace(prune=True)) as study:
        for number in range(4):
            trial, place = (
                study.ask(),
                write_run(tmp_path / f"t{number}", curve=[(1, 100, 0, None), (2, 500, 475, None)], solved=True, env_steps=500),
            )
            watch = sweep_module._Watch(trial=trial, place=place, budget=1000, reported=3)
            watch.report_rest(read_run(place))
            study.tell(trial, 475)
            late = dict.fromkeys(range(10, 21), 475)
            assert study.trials[number].intermediate_values == dict.fromkeys(range(4, 10), 0) | late
        slow, place = study.ask(), write_run(tmp_path / "slow", curve=[(1, 10, -1, None), (2, 249, -1, None)])
        watch = sweep_module._Watch(trial=slow, place=place, budget=1000, reported=0)
        assert not watch.should_end()  # four points of the budget are not compared
        write_run(tmp_path / "slow", curve=[(1, 10, -1, None), (2, 250, -1, None)])
        watch._next = 0.0
        assert watch.should_end()


def test_a_trial_that_has_spent_its_budget_is_not_stopped_early(tmp_path, write_run):
    """It has a value of the goal: the mean of this curve is the best one, though the last return is below the median."""
    with sweep_module._study(tmp_path, SimpleNamespace(prune=True)) as study:
        for number in range(4):
            late = [(1, 100, 0, None), (2, 900, 0, None), (3, 1000, 475, None)]
            trial, place = study.ask(), write_run(tmp_path / f"t{number}", curve=late, env_steps=1000)
            sweep_module._Watch(trial=trial, place=place, budget=1000, reported=0).report_rest(read_run(place))
            study.tell(trial, sweep_module.goal_value(read_run(place), "curve", budget=1000))
        early, place = study.ask(), write_run(tmp_path / "early", curve=[(1, 100, 470, None), (2, 1000, 470, None)])
        assert not sweep_module._Watch(trial=early, place=place, budget=1000, reported=0).should_end()
        assert sweep_module.goal_value(read_run(place), "curve", budget=1000) > max(trial.value or 0 for trial in study.trials)
        assert early.should_prune()  # by its last return


def test_a_trial_that_the_clock_ends_has_no_later_stages(tmp_path, write_run):
    with sweep_module._study(tmp_path, SimpleNamespace(prune=True)) as study:
        trial, place = study.ask(), write_run(tmp_path / "t0", curve=[(1, 100, 0, None), (2, 500, 475, None)], env_steps=510)
        sweep_module._Watch(trial=trial, place=place, budget=1000, reported=8).report_rest(read_run(place))
        assert study.trials[0].intermediate_values == {9: 0, 10: 475}


def test_a_trial_that_ends_between_two_looks_has_all_its_stages(swept, tmp_path):
    """The trainer gives one look, at half of the budget."""
    swept(trials=1)
    with sweep_module._study(tmp_path / "sweep", SimpleNamespace(prune=True)) as study:
        assert study.trials[0].intermediate_values == {stage: 25 * stage for stage in range(1, 21)}


def test_a_resumed_sweep_continues_its_interrupted_trial_with_the_same_values(swept):
    _, first, shown = swept(trials=3, stop_at="t001")
    assert "rookery sweep --resume" in shown
    code, second, shown = swept(trials=3, resume=True)
    assert code == 0
    assert [name for name, _, _ in second.calls] == [f"t{number:03}" for number in (1, 2)]
    assert second.calls[0] == ("t001", True, first.calls[1][2])
    assert second.calls[1][2] != first.calls[0][2]  # the search does not begin anew
    assert "go on" not in shown
    assert swept(trials=3, resume=True)[1].calls == []


@pytest.mark.parametrize("name", ["is it?", "{this}", "100%41#", "ä"])
def test_a_study_is_in_its_folder_whatever_its_name_is(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    for _ in range(2):
        with sweep_module._study(folder, SimpleNamespace(prune=True)) as study:
            number = study.ask().number
    assert (number, [*tmp_path.rglob("*")]) == (1, [folder, folder / "study.sqlite"])


def test_the_command_that_goes_on_allows_the_code_of_all_trials(swept, tmp_path, monkeypatch):
    """Without one of the modules the sweep would be refused."""
    places = [tmp_path / "elsewhere" / f"sweep_{name}.py" for name in ("one", "two")]
    places[0].parent.mkdir()
    for place in places:
        place.write_text("def make(): ...")
    monkeypatch.syspath_prepend(str(places[0].parent))
    monkeypatch.setattr(sweep_module, "try_runs", lambda *_: None)
    _, _, shown = swept(search="\n  env.entry_point: {choices: ['sweep_one:make', 'sweep_two:make']}", stop_at="t000")
    assert "--allow-code sweep_one --allow-code sweep_two" in shown.partition("go on")[2].partition("\n")[0]


@pytest.mark.parametrize(
    ("edited", "found"),
    [
        (
            "goal: mean100\nsettings: {target.mean100: null, ",
            "target.mean100=null, goal=mean100, wanted goal=curve",
        ),
        ("settings: {algorithm.gamma: 0.9, ", "found settings.algorithm.gamma=0.9, wanted no more"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_a_sweep_is_not_resumed_with_a_file_that_makes_its_trials_incomparable(swept, tmp_path, edited, found, named):
    """Trials of two goals stood in one table, and the best of them was the best of neither."""
    swept(trials=2)
    file = tmp_path / "file.yaml" if named else tmp_path / "sweep" / sweep_module.FILE
    kept = file.read_text()
    file.write_text(kept.replace("settings: {", edited))
    resumed = partial(sweep_module.open_sweep, file if named else None, tmp_path / "sweep", resume=True, environ={})
    with pytest.raises(ConfigError, match=found), resumed():
        pass
    assert named == ((tmp_path / "sweep" / sweep_module.FILE).read_text() == kept)
    file.write_text(f"{kept.replace('trials: 2', 'trials: 3')}\nprune: false\n")
    with resumed() as sweep:
        assert sweep.trials == 3


def test_a_sweep_is_not_resumed_with_variables_that_changed(swept):
    environ = {"ROOKERY_ALGORITHM__GAMMA": "0.9"}
    swept(trials=2, stop_at="t001", environ=environ)
    with pytest.raises(ConfigError, match=r"found algorithm\.gamma=0\.98, wanted algorithm\.gamma=0\.9;"):
        swept(trials=2, resume=True)
    assert swept(trials=2, resume=True, environ=environ)[0] == 0


def test_a_sweep_that_runs_is_not_resumed(swept, write_run):
    """A second command took its trial for an interrupted one, and failed it."""

    class Trainer(FakeTrainer):
        def train(self, argv, **more):
            with pytest.raises(ConfigError, match="a run is under way in this directory, or a series or sweep"):
                swept(trials=1, resume=True)
            return super().train(argv, **more)

    code, trainer, _ = swept(trials=1, trainer=Trainer(write_run))
    assert (code, len(trainer.calls)) == (0, 1)
    assert swept(trials=1, resume=True)[1].calls == []


def test_two_commands_that_resume_at_once_lose_no_change(swept, monkeypatch):
    """The second one begins while the first checks the file that it has read."""
    swept(trials=1)

    def check(**given):
        monkeypatch.setattr(sweep_module, "load_settings", load_settings)
        with pytest.raises(ConfigError, match="or a series or sweep of runs: found"):
            swept(resume=True)
        return load_settings(**given)

    monkeypatch.setattr(sweep_module, "load_settings", check)
    assert swept(resume=True)[0] == 0


def test_a_failed_trial_is_in_the_exit_code_and_the_search_goes_on(swept):
    code, trainer, shown = swept(trials=3, codes={"t001": 1, "t003": 1})
    assert (code, len(trainer.calls)) == (1, 5)
    assert "trial 2 of 3, t002" in shown
    assert "fail" in shown
    assert "go on" not in shown
    code, trainer, _ = swept(trials=3, resume=True)
    assert (code, trainer.calls) == (0, [])


CONFLICTING = "\n  rollout.length: {low: 64, high: 512}\n  algorithm.minibatch: {low: 2, high: 65}"


def test_a_trial_of_values_that_conflict_has_failed_and_the_search_goes_on(swept, tmp_path):
    """Each bound is valid beside the bounds of the others. The trial stayed open, and ended each resume too."""
    swept(trials=4, stop_at="t000", settings="settings: {env.num_envs: 1, ", search=CONFLICTING)
    with sweep_module._study(tmp_path / "sweep", SimpleNamespace(prune=True)) as study:
        for _ in range(2):
            study.enqueue_trial({"rollout.length": 64, "algorithm.minibatch": 65})
    code, trainer, shown = swept(resume=True)
    assert (code, [name for name, *_ in trainer.calls]) == (1, ["t000", "t003", "t004", "t005"])
    assert "t001 counts as failed: algorithm.minibatch: found 65, wanted at most 64" in shown
    assert "(algorithm.minibatch from file of the sweep)" in shown
    assert "fail " in shown
    code, trainer, _ = swept(resume=True)
    assert (code, trainer.calls) == (0, [])


def test_a_space_whose_values_conflict_again_and_again_ends_the_sweep(swept, tmp_path):
    trials = sweep_module.MAX_CONFLICTS + 2
    swept(trials=trials, stop_at="t000", settings="settings: {env.num_envs: 1, ", search=CONFLICTING)
    with sweep_module._study(tmp_path / "sweep", SimpleNamespace(prune=True)) as study:
        for _ in range(sweep_module.MAX_CONFLICTS):
            study.enqueue_trial({"rollout.length": 64, "algorithm.minibatch": 65})
    code, trainer, shown = swept(resume=True)
    assert (code, [name for name, *_ in trainer.calls]) == (1, ["t000"])
    assert "20 trials in a row conflict" in shown


def test_two_failures_in_a_row_end_the_sweep_which_can_be_resumed(swept):
    """As on a full disk, where all trials failed within seconds."""
    code, trainer, shown = swept(trials=3, codes=dict.fromkeys(("t001", "t002"), 2))
    assert (code, len(trainer.calls)) == (1, 3)
    assert "rookery sweep --resume" in shown
    code, trainer, _ = swept(trials=3, resume=True)
    assert (code, [name for name, *_ in trainer.calls]) == (0, ["t003", "t004"])


def test_a_trial_without_a_value_has_failed(swept):
    code, trainer, shown = swept(settings=f"goal: evaluation\nsettings: {{{NO_TARGET}, ")
    assert (code, len(trainer.calls), shown.count("fail ")) == (1, 2, 2)
    assert "t000 counts as failed, because it ended without an evaluation" in shown


def test_a_mean_of_fewer_than_100_episodes_says_so_where_trials_are_ranked_by_it(swept):
    *_, shown = swept(trials=2, first=-100, mean100_episodes=7, settings=f"goal: mean100\nsettings: {{{NO_TARGET}, ")
    assert shown.count("(of 7 episodes)") == 2
    assert [line.split()[-1] for line in shown.splitlines() if "complete" in line] == ["-100", "-140"]


def test_a_trial_whose_files_are_damaged_keeps_its_value_in_the_table(swept, tmp_path):
    """It ended the sweep without a table: no other trial was shown either."""
    swept(trials=2, mean100_episodes=7, settings=f"goal: mean100\nsettings: {{{NO_TARGET}, ")
    (tmp_path / "sweep" / "t000" / "summary.json").write_text("{")
    *_, shown = swept(trials=2, resume=True)
    assert [line.split()[-1] for line in shown.splitlines() if "complete" in line] == ["500", "460"]
    assert shown.count("(of 7 episodes)") == 1


@pytest.mark.parametrize("version", [3, 500])
def test_an_evaluation_of_an_older_policy_says_so_where_trials_are_ranked_by_it(swept, version):
    ended = {"last_evaluation": {"mean": 475.0, "version": version}, "version": 500}
    *_, shown = swept(trials=2, settings=f"goal: evaluation\nsettings: {{{NO_TARGET}, ", **ended)
    assert shown.count("(not of the last policy)") == (2 if version == 3 else 0)


def test_a_second_stop_ends_the_sweep(swept):
    code, trainer, _ = swept(codes={"t001": 130})
    assert (code, len(trainer.calls)) == (130, 2)


def test_the_mean_of_the_curve_counts_early_learning_and_keeps_the_last_return(tmp_path, write_run):
    slow = read_run(write_run(tmp_path / "slow", curve=[(1, 0, 0, None), (2, 50, 100, None), (3, 100, 100, None)]))
    early = read_run(write_run(tmp_path / "early", curve=[(1, 0, 0, None), (2, 25, 100, None)]))
    assert sweep_module.goal_value(slow, "curve", budget=100) == 75
    assert sweep_module.goal_value(early, "curve", budget=100) == 87.5


def test_the_mean_of_the_curve_begins_at_0_whenever_the_first_point_is(tmp_path, write_run):
    late = read_run(write_run(tmp_path / "late", curve=[(1, 50, 10, None), (2, 100, 90, None)]))
    assert sweep_module.goal_value(late, "curve", budget=100) == 30


@pytest.mark.parametrize("setting", ["id", "dir"])
def test_an_id_or_a_directory_for_all_trials_is_refused(swept, setting):
    """Trackers would take them for one run."""
    with pytest.raises(ConfigError, match=rf"run\.{setting} of a series: found mine, wanted none"):
        swept(settings=f"settings: {{run.{setting}: mine, ")


@pytest.mark.parametrize("goal", ["mean100", "evaluation"])
@pytest.mark.parametrize("target", ["mean100", "evaluation"])
def test_trials_that_end_at_a_target_are_compared_by_neither_score(swept, goal, target):
    """Nor by the other one: some end at the target, others at the end of the budget."""
    other = {"mean100": "evaluation", "evaluation": "mean100"}[target]
    with pytest.raises(ConfigError, match=f"goal {goal} .*: found target.{target} 400, wanted null;"):
        swept(settings=f"goal: {goal}\nsettings: {{target.{target}: 400, target.{other}: null, ")


def test_trials_without_an_evaluator_are_not_compared_by_evaluations(swept):
    """Each failed, at its end."""
    with pytest.raises(ConfigError, match=r"goal evaluation .*: found evaluator\.enabled false, wanted true"):
        swept(settings=f"goal: evaluation\nsettings: {{evaluator.enabled: false, {NO_TARGET}, ")


def test_trials_that_the_clock_ends_are_not_compared_over_the_whole_budget(swept):
    """The last return of one counted as if it held over the rest of the budget."""
    with pytest.raises(ConfigError, match=r"goal curve .*: found target\.wall_seconds 30, .* wanted null"):
        swept(settings="settings: {target.wall_seconds: 30, ")
    assert swept(trials=1, settings=f"goal: mean100\nsettings: {{target.wall_seconds: 30, {NO_TARGET}, ")[0] == 0


def test_a_sweep_that_an_earlier_version_began_goes_on(tmp_path):
    """With what a new one would be refused for."""
    file = tmp_path / "file.yaml"
    file.write_text(FILE.replace("TRIALS", "3").replace("settings: {", "settings: {target.wall_seconds: 30, "))
    with pytest.raises(ConfigError, match="goal curve"):
        sweep_module._check_new(read_sweep(file), {})
    sweep_module._check_resumed(read_sweep(file), tmp_path, {})


def test_the_mean_of_the_curve_of_a_short_run_has_its_last_point(tmp_path, write_run):
    runs = [read_run(write_run(tmp_path / str(last), curve=[(1, 10, 20, None), (2, 110, last, None)])) for last in (40, 80)]
    assert [round(sweep_module.goal_value(run, "curve", budget=100), 1) for run in runs] == [29.1, 47.3]
    only = read_run(write_run(tmp_path / "one", curve=[(1, 110, 20, None)]))
    assert sweep_module.goal_value(only, "curve", budget=100) == 20


def test_stages_compare_trials_at_equal_env_steps():
    assert sweep_module.stages([30, 70, 140], [1, 2, 3], budget=1000) == [(1, 1), (2, 2)]
    assert sweep_module.stages([], [], budget=1000) == []


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("low: 2", "low: 12", "low < high"),
        ("log: true", "lag: true", "algorithm.learning_rate"),
        ("[[64, 64], [8]]", "[[64, 64]]", r"search.model.hidden.choices: found \[\[64, 64\]\], wanted List"),
        ("preset: cartpole", "", "preset: found nothing"),
        ("search:", "serch:", "search"),
        ("algorithm.epochs", "algorithm.epoch", "did you mean epochs"),
        ("high: 1e-2", "high: -1", "low < high"),
        ("preset: cartpole", "preset: cartpol", "did you mean cartpole"),
        ("trials: 1", "trials: 0", "trials"),
        ("trials: 1", "trials: '5'", "trials: found 5, wanted Input should be a valid integer"),
        ("log: true", "log: 'yes'", "algorithm.learning_rate.log: found yes, wanted Input should be a valid boolean"),
        ("low: 1e-4", "low: '1e-4'", "algorithm.learning_rate.low"),
        ("[[64, 64], [8]]", "[[64, 64], [8], [ 8]]", r"choices of model.hidden: found .*, wanted different ones"),
        ("{target.env_steps: 1000}", "{env.id: CartPol-v1}", "unknown environment id: found CartPol-v1"),
        (
            "epochs: {low: 2, high: 9}",
            "epochs: {choices: [2, 9]}\n  env.id: {choices: [CartPole-v1, CartPole-v9]}",
            "found CartPole-v9",
        ),
        ("algorithm.epochs: {low: 2, high: 9}", "learner.ranks: {choices: [1, 2]}", "actor.count: found 1, wanted at least 2"),
        ("{target.env_steps: 1000}", "{algorithm.epochs: 3}", "found algorithm.epochs, wanted `settings` or `search`, not both"),
        (
            "{target.env_steps: 1000}",
            "{algorithm: {epochs: 3}}",
            "found algorithm.epochs, wanted `settings` or `search`, not both",
        ),
    ],
)
def test_a_file_that_is_not_valid_is_one_error_and_writes_nothing(tmp_path, old, new, hint):
    file = tmp_path / "file.yaml"
    file.write_text(FILE.replace("TRIALS", "1").replace(old, new))
    with pytest.raises(ConfigError, match=hint), sweep_module.open_sweep(file, tmp_path / "sweep", resume=False, environ={}):
        pass
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_sweep(tmp_path / "none.yaml")
