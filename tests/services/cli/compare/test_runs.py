"""Runs from their files, and the configurations that they form."""

import json
import re

import pytest

from common.errors import ConfigError
from services.cli.compare.runs import configurations, differing_settings, read_run, read_runs

pytestmark = pytest.mark.service


def test_runs_that_differ_in_the_seed_alone_are_one_configuration(tmp_path, write_run):
    for seed in (2, 1):
        write_run(
            tmp_path / f"s{seed}",
            f"run.seed={seed}",
            f"run.id=r{seed}",
            f"learner.bind=tcp://127.0.0.1:570{seed}",
            "run.tracking=[]",
        )
    (group,) = configurations(read_runs([tmp_path]))
    assert [run.seed for run in group.runs] == [1, 2]
    assert group.label == "cartpole"


@pytest.mark.parametrize(
    ("setting", "count"),
    [
        ("run.store=file:///copies", 1),
        ("checkpoint.every_seconds=7", 1),
        ("metrics.port=7000", 1),
        ("log.format=json", 1),
        ("actor.allow_code=[games]", 1),
        ("evaluator.name=one", 1),
        ("learner.keys=/keys", 1),
        ("learner.batch=7", 2),
        ("learner.credits=7", 2),
        ("learner.max_policy_lag=7", 2),
        ("actor.count=7", 2),
    ],
)
def test_runs_that_differ_in_what_has_no_effect_on_training_are_one_configuration(tmp_path, write_run, setting, count):
    write_run(tmp_path / "a", setting)
    write_run(tmp_path / "b")
    assert len(configurations(read_runs([tmp_path]))) == count


@pytest.mark.parametrize(("settings", "differ"), [(("9", "9.0"), {}), (("1", "true"), {"env.kwargs.x": [1, True]})])
def test_numbers_are_equal_however_they_are_written(tmp_path, write_run, settings, differ):
    """Seeds of one configuration were two, between which no setting differed."""
    for seed, value in enumerate(settings):
        write_run(tmp_path / f"s{seed}", f"run.seed={seed}", f"env.kwargs.x={value}")
    groups = configurations(read_runs([tmp_path]))
    assert (len(groups), differing_settings(groups)) == (1 + len(differ), differ)


def test_a_configuration_is_named_by_what_differs_within_its_preset(tmp_path, write_run):
    """By the whole key: of `enabled=False` nobody knows what is not enabled."""
    write_run(tmp_path / "a", "evaluator.enabled=false")
    write_run(tmp_path / "b", "evaluator.enabled=true")
    write_run(tmp_path / "c", preset="cartpole-dqn")
    groups = configurations(read_runs([tmp_path]))
    labels = ["cartpole evaluator.enabled=False", "cartpole evaluator.enabled=True", "cartpole-dqn"]
    assert [group.label for group in groups] == labels
    assert differing_settings(groups[:2]) == {"evaluator.enabled": [False, True]}


def test_a_list_that_differs_is_in_the_name(tmp_path, write_run):
    write_run(tmp_path / "a", "model.hidden=[64, 64]")
    write_run(tmp_path / "b", "model.hidden=[128]")
    labels = [group.label for group in configurations(read_runs([tmp_path]))]
    assert labels == ["cartpole model.hidden=[64, 64]", "cartpole model.hidden=[128]"]


def test_configurations_whose_first_differences_are_equal_are_named_by_a_folder_too(tmp_path, write_run):
    others = [f"{key}=3" for key in ("env.num_envs", "learner.batch", "learner.credits", "actor.count")]
    for name, settings in (("a", []), ("b", others), ("c", [*others, "algorithm.gamma=0.7"])):
        write_run(tmp_path / name, *settings)
    labels = [group.label for group in configurations(read_runs([tmp_path]))]
    assert [label.rpartition("=")[2] for label in labels] == ["1 ... (a)", "3 ... (b)", "3 ... (c)"]


def test_a_setting_that_a_run_lacks_is_not_in_its_name(tmp_path, write_run):
    write_run(tmp_path / "a", "run.init=runs/x")
    write_run(tmp_path / "b")
    assert [group.label for group in configurations(read_runs([tmp_path]))] == ["cartpole run.init=runs/x", "cartpole"]


def test_a_setting_that_an_older_version_did_not_have_is_at_its_default(tmp_path, write_run):
    write_run(tmp_path / "new")
    config = write_run(tmp_path / "old", "run.seed=2") / "config.yaml"
    config.write_text("\n".join(line for line in config.read_text().splitlines() if "torch_threads" not in line))
    assert len(configurations(read_runs([tmp_path]))) == 1


@pytest.mark.parametrize(
    ("seeds", "budget", "counts"),
    [
        ([1, 2], {"target.env_steps": 2000, "target.wall_seconds": 90.0}, [2]),
        ([1, 2], {"target.env_steps": 2000, "target.wall_seconds": None}, [2]),
        ([1, 2], {"target.env_steps": 500, "target.wall_seconds": 10.0}, [1, 1]),  # a smaller one ended no run
        ([1, 2], {}, [1, 1]),  # it has several values, which are compared
        ([1], {"target.env_steps": 2000, "target.wall_seconds": 90.0}, [1, 1]),  # resumed for other seeds
    ],
)
def test_a_solved_run_of_a_series_that_was_resumed_with_a_larger_budget_is_not_apart(tmp_path, write_run, seeds, budget, counts):
    """Only those that were not solved go on: rows of their own would hold runs chosen by their result."""
    series = {"grid": {}, "seeds": seeds, "settings": [budget]}
    (tmp_path / "series.json").write_text(json.dumps(series))
    went_on = [f"{key}={json.dumps(value)}" for key, value in (budget or {"target.env_steps": 2000}).items()]
    write_run(tmp_path / "s1", "run.seed=1", *went_on, solved=False, env_steps=2000)
    write_run(tmp_path / "s2", "run.seed=2", "target.env_steps=1000", "target.wall_seconds=60", solved=True, env_steps=900)
    groups = configurations(read_runs([tmp_path]))
    assert [len(group.runs) for group in groups] == counts
    assert (groups[0].label == "cartpole") == (counts == [2])


def test_runs_are_found_in_folders_of_series_and_once(tmp_path, write_run):
    place = write_run(tmp_path / "runs" / "series" / "s1")
    (place / "checkpoints" / "checkpoint-000000000001").mkdir(parents=True)
    assert [run.path for run in read_runs([tmp_path / "runs", place])] == [tmp_path / "runs" / "series" / "s1"]


@pytest.mark.parametrize("cut", ["3,30", "3,300,4", "3,300,,4", "3,300,4\n", "3,300\n"])  # of 3,300,45,45 or 3,300,,45
def test_a_row_that_a_kill_cut_short_is_left_out(tmp_path, write_run, cut):
    place = write_run(tmp_path / "r", curve=[(1, 100, 20, None), (2, 200, 30, 40)])
    with (place / "learning_curve.csv").open("a") as file:
        file.write(cut)
    run = read_run(place)
    assert run.points("env_steps", "episode_return_mean") == ([100, 200], [20, 30])
    assert run.points("wall_seconds", "evaluation_return") == ([2], [40])


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        (None, "no folder"),
        ({}, "an empty folder"),
        ({"notes.txt": "x"}, "a folder without one"),
        ({"config.yaml": "a: [1"}, "no valid YAML"),
        ({"config.yaml": "- 1"}, "is cut"),
        ({"config.yaml": "run: {seed: 1}\nlog: {}", "summary.json": "{"}, "cannot be read"),
        ({"config.yaml": "run: {seed: abc}\nlog: {}"}, "'abc'"),
        ({"config.yaml": "run: {}\ntarget: {mean100: abc}\nlog: {}"}, "not str"),
        ({"config.yaml": "run: {}\nlog: {}", "summary.json": '{"env_steps": null}'}, "NoneType"),
        ({"config.yaml": "run: {}\nlog: {}", "summary.json": '{"env_steps": "9"}'}, "'str'"),
        ({"config.yaml": "run: {}\nlog: {}", "summary.json": '{"last_evaluation": [1]}'}, "'list'"),
        ({"config.yaml": "run: {}\nlog: {}", "settings_changed.json": "[1]"}, "'int'"),
        ({"config.yaml": "run: {}\nlog: {}", "settings_changed.json": '[{"settings": ["a was 1"]}]'}, "env_steps"),
    ],
)
def test_a_path_without_a_run_is_one_error(tmp_path, files, hint):
    place = tmp_path / "r"
    if files is not None:
        place.mkdir()
        for name, text in files.items():
            (place / name).write_text(text)
    with pytest.raises(ConfigError, match=hint):
        read_runs([place])


@pytest.mark.parametrize("lines", [5, 50])
def test_a_run_whose_configuration_is_cut_is_one_error(tmp_path, write_run, lines):
    """Defaults in place of the lost sections would make it a configuration of its own, with another target."""
    for name in ("a", "b"):
        write_run(tmp_path / name)
    config = tmp_path / "a" / "config.yaml"
    config.write_text("\n".join(config.read_text().splitlines()[:lines]))
    cut = re.escape(f"config.yaml of the run is cut: found not all sections in {config}, wanted")
    with pytest.raises(ConfigError, match=f"^{cut}"):
        read_runs([tmp_path])
