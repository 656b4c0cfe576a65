"""The layers in action: what wins, where it came from, and how a configuration is written down again."""

import sys
from types import ModuleType
from typing import get_args

import pytest
from pydantic import Field

from common.algorithms.api import Entry
from common.algorithms.on_policy import ActorCriticPolicy
from common.algorithms.ppo import PPO
from common.algorithms.sections import AlgorithmSection
from common.algorithms.settings import AlgorithmSettings, ImpalaSettings
from common.conditions import PER_ENVIRONMENT, marks
from common.config.load import CHOSEN, as_yaml, load_settings, preset_names, with_chosen
from common.config.run_config import RunConfig
from common.config.schema import Settings
from common.errors import ConfigError

pytestmark = pytest.mark.pure


def test_command_line_wins_over_environment_over_file_over_default(tmp_path):
    """A container sets a variable, the user a flag: the nearer to the person, the stronger."""
    path = tmp_path / "x.yaml"
    path.write_text("rollout: {length: 8}\nlearner: {credits: 8, batch: 1}\nalgorithm: {minibatch: 8}\n")
    environ = {"ROOKERY_LEARNER__CREDITS": "16", "ROOKERY_ALGORITHM__MINIBATCH": "16", "HOME": "/x"}
    loaded = load_settings(preset=str(path), overrides=["algorithm.minibatch=32", "algorithm.minibatch=64"], environ=environ)
    settings, provenance = loaded.settings, loaded.provenance
    assert settings.checkpoint.keep == 3
    assert provenance["checkpoint.keep"] == "default"
    assert settings.rollout.length == 8
    assert provenance["rollout.length"] == f"file {path}"
    assert settings.learner.credits == 16
    assert provenance["learner.credits"] == "ROOKERY_LEARNER__CREDITS"
    assert settings.algorithm.minibatch == 64
    assert provenance["algorithm.minibatch"] == "command line"


@pytest.mark.parametrize(
    ("preset", "override", "name"),
    [
        ("cartpole", "env.id=LunarLander-v3", "LunarLander-v3-ppo"),
        ("cartpole-dqn", "env.id=LunarLander-v3", "LunarLander-v3-dqn"),
        ("pong", "env.id=ALE/Breakout-v5", "Breakout-v5-ppo"),
        ("cartpole", "env.entry_point=common.envs.probes:matching_action", "common.envs.probes.matching_action-ppo"),
        ("cartpole", "env.id=mygames:Games/Pole-v0", "Pole-v0-ppo"),
        ("cartpole", "env.id=CartPole-v1", "cartpole"),
        ("cartpole", "env.num_envs=4", "cartpole"),
        ("cartpole", "learner.credits=4", "cartpole"),
        (None, "env.id=LunarLander-v3", ""),
    ],
)
def test_a_run_of_another_environment_than_its_presets_is_named_by_environment_and_algorithm(preset, override, name):
    loaded = load_settings(preset=preset, overrides=[override], environ={})
    assert loaded.settings.run.preset == name
    assert bool(loaded.notes) == (name not in ("", preset))


def test_a_name_that_the_user_chose_stays_where_the_environment_is_another():
    overrides = ["env.id=LunarLander-v3", "run.preset=moon"]
    assert load_settings(preset="cartpole", overrides=overrides, environ={}).settings.run.preset == "moon"


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([], "target.mean100=475, target.env_steps=100000"),
        (["target.mean100=200"], "target.env_steps=100000"),
        (["target.mean100=null", "target.env_steps=200000"], ""),
    ],
)
def test_target_and_budget_that_another_environment_inherits_are_named(overrides, kept):
    notes = load_settings(preset="cartpole", overrides=["env.id=LunarLander-v3", *overrides], environ={}).notes
    what = "inherited from preset cartpole, which is for CartPole-v1 and not for LunarLander-v3"
    assert notes == ((f"{what}: {kept}; set your own where they do not fit",) if kept else ())


def test_the_preset_values_that_depend_on_the_environment_are_named_where_it_is_another():
    (note,) = load_settings(preset="pong", overrides=["env.id=ALE/Qbert-v5", "target.mean100=null"], environ={}).notes
    named = "env.crop=[9, 4], algorithm.lr_env_steps=800000, algorithm.entropy_env_steps=800000, target.env_steps=3000000"
    assert f": {named}; set your own" in note
    overrides = ["env.id=ALE/Qbert-v5", "algorithm.lr_schedule=constant"]
    note, lost = load_settings(preset="pong", overrides=overrides, environ={}).notes
    assert "lr_env_steps" not in note
    assert lost == (
        "preset pong sets what has no effect where algorithm.lr_schedule is constant (command line): "
        "algorithm.lr_final=0.0002, algorithm.lr_env_steps=800000"
    )


def test_every_duration_in_env_steps_counts_as_one_that_depends_on_the_environment():
    for algorithm in get_args(get_args(AlgorithmSettings)[0]):
        settings = Settings().model_copy(update={"algorithm": algorithm()})
        marked = {key for key, mark in marks(settings) if mark == PER_ENVIRONMENT}
        durations = {f"{section}.{name}" for section, own in settings for name, _ in own if f"_{name}".endswith("_env_steps")}
        assert durations <= marked
        assert len(durations) > 1


def test_a_resumed_run_keeps_its_name(tmp_path):
    first = load_settings(preset="cartpole", overrides=["env.id=LunarLander-v3"], environ={})
    path = tmp_path / "config.yaml"
    path.write_text(as_yaml(first.settings, first.provenance))
    again = load_settings(preset=str(path), overrides=["run.seed=2"], environ={})
    assert (again.settings.run.preset, again.notes) == ("LunarLander-v3-ppo", ())


def test_open_settings_are_chosen_and_marked_so():
    """The run id is chosen at the start: config.yaml must not claim that it was a default, nor that all else was chosen."""
    loaded = load_settings(preset="cartpole", overrides=["run.dir=here"], environ={})
    chosen = with_chosen(loaded, {"run.id": "cartpole-1", "run.dir": "here"})
    assert (chosen.settings.run.id, chosen.settings.run.dir) == ("cartpole-1", "here")
    assert (chosen.provenance["run.id"], chosen.provenance["run.dir"]) == (CHOSEN, "command line")
    assert "id: cartpole-1  # chosen for this run" in as_yaml(chosen.settings, chosen.provenance)
    assert loaded.provenance["run.id"] == "default"


def test_settings_that_the_environment_decides_are_shown_undecided() -> None:
    """No value stands there that the run may not use; one that is set is shown with its source."""
    loaded = load_settings(preset=None, overrides=["env.id=HalfCheetah-v5"], environ={})
    text = as_yaml(loaded.settings, loaded.provenance)
    assert "  entropy_coef: null  # default\n" in text
    assert "  conv: auto  # default\n" in text
    loaded = load_settings(preset=None, overrides=["algorithm.entropy_coef=0.01"], environ={})
    assert "  entropy_coef: 0.01  # command line\n" in as_yaml(loaded.settings, loaded.provenance)


def test_a_presets_values_carry_its_name():
    """`rookery config show pong` distinguishes the preset's choices from the defaults."""
    provenance = load_settings(preset="pong", environ={}).provenance
    assert provenance["env.id"] == "preset pong"
    assert provenance["metrics.port"] == "default"


def test_a_setting_that_is_text_takes_the_text_as_it_stands():
    """A name that looks like a number, a colon in an address, an empty value: no quotes within quotes in a shell."""
    settings = load_settings(
        preset=None,
        overrides=["actor.name=12", "run.dir=", "run.id=5e3", "env.id=ns/[x]: y"],
        environ={"ROOKERY_EVALUATOR__NAME": "true"},
    ).settings
    assert (settings.actor.name, settings.run.dir, settings.run.id, settings.env.id) == ("12", "", "5e3", "ns/[x]: y")
    assert settings.evaluator.name == "true"


def test_all_else_is_yaml_wherever_it_is_written():
    """Lists, numbers with an exponent and nothing at all, from a shell."""
    settings = load_settings(
        preset="pong",
        overrides=["model.hidden=[32, 16]", "algorithm.learning_rate=5e-4", "target.mean100=null", "env.kwargs.gravity=9.5"],
        environ={"ROOKERY_EVALUATOR__ENABLED": "false", "ROOKERY_ENV__KWARGS__MODE": "hard"},
    ).settings
    assert settings.model.hidden == (32, 16)
    assert settings.algorithm.learning_rate == 5e-4
    assert settings.target.mean100 is None
    assert settings.env.kwargs == {"gravity": 9.5, "mode": "hard"}
    assert settings.evaluator.enabled is False


@pytest.mark.parametrize("content", ['"8"', "8.0", "true"])
def test_a_type_is_never_guessed(tmp_path, content):
    """A quoted number, a fraction, a truth value: what the file says is not what a count is."""
    path = tmp_path / "x.yaml"
    path.write_text(f"env: {{num_envs: {content}}}\n")
    with pytest.raises(ConfigError, match=r"env\.num_envs: .*wanted integer"):
        load_settings(preset=str(path), environ={})


def test_variables_of_others_are_left_alone():
    """Kubernetes sets ROOKERY_LEARNER_PORT and its kin in every pod beside a service called rookery-learner."""
    environ = {
        "ROOKERY_LEARNER_PORT": "tcp://10.0.0.1:5700",
        "ROOKERY_LEARNER_SERVICE_HOST": "x",
        "ROOKERY_POLICY_SERVER_PORT": "x",
        "LOG__LEVEL": "x",
    }
    assert load_settings(preset=None, environ=environ) == load_settings(preset=None, environ={})


@pytest.mark.parametrize(
    ("section", "key"),
    [("ACTOR", "COUNT"), ("POLICY_SERVER", "WORKERS"), ("ALGORITHM", "EPOCHS"), ("ALGORITHM", "REPLAY_CAPACITY")],
)
def test_a_variable_with_one_underscore_too_few_is_reported(section, key):
    """It would be ignored in silence, and the run start with other settings than meant."""
    with pytest.raises(ConfigError, match=f"found ROOKERY_{section}_{key}, wanted ROOKERY_{section}__{key}"):
        load_settings(preset=None, environ={f"ROOKERY_{section}_{key}": "4"})


def test_a_wrong_variable_is_named_as_it_was_set():
    """The complaint leads to the line in the pod's manifest."""
    with pytest.raises(ConfigError, match=r"actor\.count: found 'many' \(ROOKERY_ACTOR__COUNT\)"):
        load_settings(preset=None, environ={"ROOKERY_ACTOR__COUNT": "many"})


@pytest.mark.parametrize("text", ["", "env.num_envs", "=3", "env..id=x", ".id=x", "--actors"])
def test_an_argument_that_is_no_setting_shows_how_one_looks(text):
    """A flag or a bare word where a setting belongs."""
    with pytest.raises(ConfigError, match=r"wanted section\.key=value"):
        load_settings(preset=None, overrides=[text], environ={})


@pytest.mark.parametrize("content", ["- a\n", "text\n", "3\n"])
def test_a_file_without_sections_is_refused(tmp_path, content):
    """A YAML file of another program."""
    path = tmp_path / "x.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match="holds no sections"):
        load_settings(preset=str(path), environ={})


@pytest.mark.parametrize("content", ["", "# only a comment\n"])
def test_an_empty_file_changes_nothing(tmp_path, content):
    """The first version of one's own file."""
    path = tmp_path / "x.yaml"
    path.write_text(content)
    assert load_settings(preset=str(path), environ={}).settings.env == load_settings(preset=None, environ={}).settings.env


def test_a_section_whose_keys_are_all_comments_has_the_defaults(tmp_path):
    """Another layer may fill it."""
    path = tmp_path / "x.yaml"
    path.write_text("env:\n  # num_envs: 3\nrun:\n")
    loaded = load_settings(preset=str(path), overrides=["env.id=Pendulum-v1", "run.seed=3"], environ={}).settings
    defaults = load_settings(preset=None, environ={}).settings
    assert (loaded.env.id, loaded.env.num_envs, loaded.run.seed) == ("Pendulum-v1", defaults.env.num_envs, 3)
    path.write_text("envs:\n")
    with pytest.raises(ConfigError, match="envs"):
        load_settings(preset=str(path), environ={})


def test_an_empty_section_is_no_source_of_its_settings(tmp_path):
    """`rookery train` gives actors the address of their learner unless a user set one."""
    path = tmp_path / "x.yaml"
    path.write_text("actor: {}\nlearner: {batch: 1}\n")
    loaded = load_settings(preset=str(path), overrides=["env={}"], environ={})
    assert (loaded.provenance["actor.learner"], loaded.provenance["learner.bind"]) == ("default", "default")
    assert not loaded.notes, "that the command line sets what has no effect"
    with pytest.raises(ConfigError, match=r"actors: unknown section \(command line\)"):
        load_settings(preset=str(path), overrides=["actors={}"], environ={})


@pytest.mark.parametrize("preset", [None, *preset_names()])
def test_what_is_written_down_gives_the_same_settings_again(tmp_path, preset):
    """A run is repeated, or its services are started, from its config.yaml."""
    overrides = [
        "actor.name=1e3",
        "run.id=true",
        "run.dir=a: b # c",
        "env.id=[x",
        "env.kwargs={Deep: [1.5e-7, {x: null}], t: 'no'}",
    ]
    settings = load_settings(preset=preset, overrides=overrides, environ={}).settings
    path = tmp_path / "config.yaml"
    path.write_text(as_yaml(settings))
    assert load_settings(preset=str(path), environ={}).settings == settings


def test_sources_are_written_beside_the_values():
    """`rookery config show`: the comment is no part of the value."""
    loaded = load_settings(preset="pong", overrides=["env.kwargs.a=1", "run.seed=5"], environ={"ROOKERY_ENV__KWARGS__B": "2"})
    text = as_yaml(loaded.settings, loaded.provenance)
    assert "  seed: 5  # command line\n" in text
    assert "  id: ALE/Pong-v5  # preset pong\n" in text
    assert '  kwargs: {"b": 2, "a": 1}  # ROOKERY_ENV__KWARGS__B, command line\n' in text


def test_each_value_can_have_its_description_above_it(tmp_path):
    settings = load_settings(preset="pong", environ={}).settings
    text = as_yaml(settings, describe=True)
    assert "  # every random stream of the run grows from it\n  seed: 1\n" in text
    assert max(map(len, text.splitlines())) < 130
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert load_settings(preset=str(path), environ={}).settings == settings


def test_naming_another_algorithm_leaves_the_settings_of_the_presets_own_behind():
    """`rookery train pong algorithm.name=impala`: the preset's clip range is nothing that IMPALA knows, and no slip either."""
    overrides = ["algorithm.learning_rate=0.5", "algorithm.name=impala"]
    loaded = load_settings(preset="cartpole", overrides=overrides, environ={})
    assert loaded.settings.algorithm == ImpalaSettings(learning_rate=0.5)
    assert loaded.provenance["algorithm.gamma"] == "default"
    assert loaded.settings.rollout == load_settings(preset="cartpole", environ={}).settings.rollout


class OwnSettings(AlgorithmSection):
    """A section of a user's package."""

    shape: tuple[int, int] = (1, 2)
    patience: int = Field(default=3, ge=1)

    def conflicts(self, scale):
        """More environments than patience."""
        yield from super().conflicts(scale)
        if scale.num_envs > 64:
            yield f"env.num_envs: found {scale.num_envs}, wanted at most 64"


OWN = "own_algorithms:ENTRY"


@pytest.fixture
def own(monkeypatch):
    """A module `own_algorithms`, as a user's package would be."""
    module = ModuleType("own_algorithms")
    module.ENTRY = Entry(settings=OwnSettings, algorithm=PPO, policy=ActorCriticPolicy)
    monkeypatch.setitem(sys.modules, "own_algorithms", module)
    return module


@pytest.mark.usefixtures("own")
def test_a_users_own_section_is_filled_as_ours_are(tmp_path):
    """Layers, sources and types; the preset's section is another algorithm's and stays behind."""
    overrides = [f"algorithm.name={OWN}", "algorithm.patience=7", "algorithm.shape=[3, 4]"]
    loaded = load_settings(preset="cartpole", overrides=overrides, environ={"ROOKERY_ALGORITHM__GAMMA": "0.5"})
    assert loaded.settings.algorithm == OwnSettings(name=OWN, patience=7, shape=(3, 4), gamma=0.5)
    assert loaded.provenance["algorithm.patience"] == "command line"
    assert loaded.provenance["algorithm.gamma"] == "ROOKERY_ALGORITHM__GAMMA"
    assert loaded.provenance["algorithm.clip_reward"] == "default"
    path = tmp_path / "config.yaml"
    path.write_text(as_yaml(loaded.settings))
    assert load_settings(preset=str(path), environ={}).settings == loaded.settings


@pytest.mark.usefixtures("own")
def test_a_variable_of_a_users_own_section_with_one_underscore_too_few_is_reported():
    """As of the project's own algorithms; other variables stay ignored."""
    with pytest.raises(ConfigError, match="found ROOKERY_ALGORITHM_PATIENCE, wanted ROOKERY_ALGORITHM__PATIENCE"):
        load_settings(preset=None, overrides=[f"algorithm.name={OWN}"], environ={"ROOKERY_ALGORITHM_PATIENCE": "4"})
    load_settings(preset=None, environ={"ROOKERY_ALGORITHM_PATIENCE": "4"})


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm.patience=0", "algorithm.patience: found 0 (command line), wanted integer >= 1"),
        ("algorithm.shape=[1]", "algorithm.shape: found [1] (command line), wanted list of (integer, integer)"),
        (
            "algorithm.patienc=3",
            "algorithm.patienc: unknown key (command line); did you mean patience? algorithm has name, gamma,",
        ),
        ("env.num_envs=65", "env.num_envs: found 65, wanted at most 64 (env.num_envs from command line)"),
        ("env.entry_point=own_algorithms:make", "env.entry_point names no function of own_algorithms: found make, wanted"),
        ("model.entry_point=own_algorithms:Net", "model.entry_point names no function of own_algorithms: found Net, wanted"),
        ("algorithm.name=own_algorithms:ENTRYS", "algorithm.name names no ENTRY of own_algorithms: found ENTRYS, wanted ENTRY"),
    ],
)
def test_a_slip_in_what_is_the_users_own_reads_like_any_other(override, line):
    """Key, value, source and wish."""
    with pytest.raises(ConfigError) as caught:
        load_settings(preset="cartpole", overrides=[f"algorithm.name={OWN}", override], environ={})
    assert str(caught.value).startswith(line)


@pytest.mark.usefixtures("own")
def test_a_run_sends_its_workers_an_algorithm_of_the_users(monkeypatch):
    """The whole section goes to the actors, and where the package is not installed that is said in one line."""
    settings = load_settings(preset=None, overrides=[f"algorithm.name={OWN}", "algorithm.patience=9"], environ={}).settings
    run = RunConfig.of(settings, run_id="r")
    assert RunConfig.from_json(run.model_dump_json()) == run
    assert RunConfig.from_json(run.model_dump_json()).algorithm.patience == 9
    monkeypatch.delitem(sys.modules, "own_algorithms")
    with pytest.raises(
        ConfigError, match=r"algorithm.name names a module that does not exist: found own_algorithms .*; install it"
    ):
        RunConfig.from_json(run.model_dump_json())
