"""The rule for settings without effect: on every condition that is declared, and by the source of each value."""

from typing import get_args

import pytest

from common.algorithms.settings import AlgorithmSettings, DQNSettings, PPOSettings
from common.conditions import COMMAND_LINE, DEFAULT, OnlyIf, UnlessEqual, contradictions, marks, unmet
from common.config.load import as_yaml, load_settings
from common.config.schema import Settings
from common.errors import ConfigError

pytestmark = pytest.mark.pure

ALGORITHMS = get_args(get_args(AlgorithmSettings)[0])
SECTIONS = [*(algorithm() for algorithm in ALGORITHMS), PPOSettings(entropy_coef=0.02, entropy_env_steps=9)]
RUNS = [Settings().model_copy(update={"algorithm": section}) for section in SECTIONS]


def changed(settings, key, value):
    """The settings with another value, which is not checked."""
    section, name = key.split(".")
    own = getattr(settings, section)
    return settings.model_copy(update={section: own.model_copy(update={name: value})})


def has(settings, key):
    section, name = key.split(".")
    return hasattr(getattr(settings, section), name)


def value_of(settings, key):
    section, name = key.split(".")
    return getattr(getattr(settings, section), name)


def other_than(value):
    """A value of the same type, which need not be valid."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return {str: f"other than {value}", tuple: (*value, 1), dict: {"a": 1}}[type(value)] if value is not None else 1.0


def situations():
    """Each algorithm, with each setting with effect on which others depend, at a value that is named and at another one."""
    for run in RUNS:
        yield run
        named = {}
        for key, mark in marks(run):
            if isinstance(mark, OnlyIf):
                own = f"{key.partition('.')[0]}."
                equal = value_of(run, own + mark.other) if isinstance(mark, UnlessEqual) else None
                named[mark.key if "." in mark.key else own + mark.key] = mark.values[0] if mark.values else equal
        for other, value in named.items():
            if other != "algorithm.name" and has(run, other):
                for run_with in (changed(run, other, value), changed(run, other, other_than(value))):
                    if other not in {key for key, *_ in unmet(run_with)}:
                        yield run_with


SITUATIONS = [(run, {key for key, *_ in unmet(run)}) for run in situations()]
CONDITIONAL = sorted({key for run in RUNS for key, mark in marks(run) if isinstance(mark, OnlyIf) and mark.key != key})


def complaints(settings, key):
    """All that is said of the value of `key`, which the command line set; all else is as it is by default."""
    source = lambda each: COMMAND_LINE if each == key else DEFAULT  # noqa: E731
    lines, notes = contradictions(settings, source, files=(), begun=False, strict=True)
    assert notes == []
    return [line for line in lines if line.startswith(f"{key}: ") and "wanted at most" not in line and "wanted less" not in line]


@pytest.mark.parametrize("key", CONDITIONAL)
def test_a_setting_is_refused_wherever_its_condition_does_not_hold_and_accepted_elsewhere(key):
    """Of all algorithms: each condition can hold and can fail, and what was not set is never named."""
    seen = set()
    for run, idle in SITUATIONS:
        case = (key in idle, run.algorithm.name)
        if has(run, key) and case not in seen:
            seen.add(case)
            said = complaints(changed(run, key, other_than(value_of(run, key))), key)
            assert bool(said) is (key in idle)
            assert not any("\n" in line for line in said)
    assert {dead for dead, _ in seen} == {True, False}


def test_defaults_are_never_named():
    for run, _ in SITUATIONS:
        refused, notes = contradictions(run, lambda _: DEFAULT, files=(), begun=False, strict=True)
        assert not [line for line in refused + notes if "no effect" in line or "wanted at most" not in line]


FILE = "file run.yaml"


@pytest.mark.parametrize("key", CONDITIONAL)
@pytest.mark.parametrize("source", [FILE, "ROOKERY_X__Y", COMMAND_LINE])
def test_a_value_without_effect_is_only_named_where_other_processes_or_runs_have_its_source(key, source):
    """The same file and variables are read by processes in which it has an effect; a sweep combines what it is asked for."""
    run = next(run for run, idle in SITUATIONS if key in idle and has(run, key))
    found = changed(run, key, other_than(value_of(run, key)))
    sources = lambda each: source if each == key else DEFAULT  # noqa: E731
    refused, notes = contradictions(found, sources, files=(FILE,), begun=False, strict=source != COMMAND_LINE)
    assert len([line for line in refused if line.startswith(f"{key}: ")]) + len(notes) == 1  # harm is refused
    assert all(", wanted " in line for line in refused)
    assert all(note.startswith(f"{source} sets what has no effect where ") and f": {key}=" in note for note in notes)


DEAD = [
    ("cartpole-dqn", ["algorithm.target_rate=0.005"], "algorithm.target_rate: found 0.005, wanted 1 where"),
    ("cartpole", ["target.evaluation=475", "evaluator.enabled=false"], "target.evaluation: found 475 (command line)"),
    ("cartpole", ["env.sticky_actions=0.25"], "env.sticky_actions: found 0.25 (command line), which has no effect where"),
    ("cartpole", ["env.terminate_on_life_loss=true"], "env.terminate_on_life_loss: found true"),
    ("cartpole", ["env.frame_skip=8"], "env.frame_skip: found 8"),
    ("cartpole", ["env.max_episode_frames=100"], "env.max_episode_frames: found 100"),
    ("cartpole", ["policy_server.workers=1", "env.autoreset=same_step"], "env.autoreset: found same_step"),
    ("cartpole", ["env.crop=[1, 1]"], "env.crop: found [1, 1]"),
    ("pong", ["env.entry_point=common.envs.probes:matching_action", "env.noop_max=3"], "env.noop_max: found 3"),
    ("cartpole", ["algorithm.lr_schedule=constant", "algorithm.lr_final=1e-5"], "algorithm.lr_final: found 1e-05"),
    ("cartpole", ["algorithm.lr_schedule=constant", "algorithm.lr_env_steps=9"], "algorithm.lr_env_steps: found 9"),
    ("cartpole", ["algorithm.kl_target=0.02"], "algorithm.kl_target: found 0.02"),
    ("cartpole", ["algorithm.lr_final=0.5"], "algorithm.lr_final: found 0.5, wanted at most 0.001 = algorithm.learning_rate"),
    ("cartpole", ["algorithm.entropy_final=0.2"], "algorithm.entropy_final: found 0.2"),
    ("cartpole", ["algorithm.entropy_final=0", "algorithm.entropy_env_steps=50_000"], "algorithm.entropy_env_steps: found 50000"),
    ("cartpole", ["algorithm.lr_final=1e-3", "algorithm.lr_env_steps=9"], "algorithm.lr_env_steps: found 9 (command line)"),
    ("cartpole-dqn", ["algorithm.epsilon=1.0", "algorithm.epsilon_env_steps=9"], "algorithm.epsilon_env_steps: found 9"),
    ("cartpole", ["algorithm.normalize_advantage=false", "algorithm.least_advantage_std=0.2"], "algorithm.least_advantage_std: "),
    ("pendulum-td3", ["algorithm.target_noise=0.3", "algorithm.target_noise_clip=0"], "algorithm.target_noise: found 0.3"),
    ("cartpole", ["env.id=Acrobot-v1", "env.entry_point=common.envs.probes:matching_action"], "env.id: found Acrobot-v1"),
    ("cartpole", ["policy_server.step_timeout_ms=20"], "policy_server.step_timeout_ms: found 20"),
    ("cartpole", ["checkpoint.replay=true"], "checkpoint.replay: found true (command line), which has no effect"),
    ("cartpole-dqn", ["model.shared_trunk=false"], "model.shared_trunk: found false"),
    ("cartpole", ["run.mode=lockstep", "learner.batch_seconds=1.5"], "learner.batch_seconds: found 1.5, wanted null where run."),
    ("cartpole", ["run.mode=lockstep", "target.wall_seconds=60"], "target.wall_seconds: found 60, wanted null where run.mode"),
    ("cartpole", ["run.mode=lockstep", "target.evaluation=475"], "target.evaluation: found 475, wanted null where run.mode"),
    ("cartpole", ["run.mode=lockstep", "algorithm.plain_ratio_lag=3"], "algorithm.plain_ratio_lag: found 3"),
    ("cartpole", ["run.mode=lockstep", "learner.device=cuda"], "learner.device: found cuda, wanted cpu where run.mode is"),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "overrides", "line"), DEAD)
def test_a_value_of_the_command_line_that_has_no_effect_is_refused_in_one_line(preset, overrides, line):
    with pytest.raises(ConfigError) as caught:
        load_settings(preset=preset, overrides=overrides, environ={}, strict=True)
    text = str(caught.value)
    assert text.startswith(line)
    assert "command line)" in text
    assert "\n" not in text
    assert "; leave it out, or " in text or "wanted" in text


OWN_FILE = "algorithm: {name: ppo, lr_schedule: linear, lr_final: 1e-4}\n"


def test_a_value_of_a_file_whose_effect_the_command_line_removed_is_named_and_accepted(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(OWN_FILE)
    assert load_settings(preset=str(path), environ={}).notes == ()
    (note,) = load_settings(preset=str(path), overrides=["algorithm.lr_schedule=constant"], environ={}).notes
    lost = "no effect where algorithm.lr_schedule is constant (command line): algorithm.lr_final=0.0001"
    assert note == f"file {path} sets what has {lost}"


def test_a_file_that_contradicts_itself_is_accepted_with_one_note(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("algorithm: {name: ppo, lr_schedule: constant, lr_final: 1e-4, lr_env_steps: 9}\n")
    (note,) = load_settings(preset=str(path), environ={}, strict=True).notes
    lost = f"no effect where algorithm.lr_schedule is constant (file {path}): algorithm.lr_final=0.0001, algorithm.lr_env_steps=9"
    assert note == f"file {path} sets what has {lost}"


@pytest.mark.parametrize(
    ("preset", "key"),
    [("pong", "lr_env_steps"), ("pong", "entropy_env_steps"), ("pong-dqn", "epsilon_env_steps")],
)
def test_a_schedule_that_the_run_will_not_complete_is_named(preset, key):
    loaded = load_settings(preset=preset, environ={}, strict=True)
    planned = getattr(loaded.settings.algorithm, key)
    assert loaded.notes == ()
    assert load_settings(preset=preset, overrides=[f"target.env_steps={planned}"], environ={}, strict=True).notes == ()
    notes = load_settings(preset=preset, overrides=[f"target.env_steps={planned - 1}"], environ={}, strict=True).notes
    more = f"algorithm.{key}={planned} (preset {preset}) is more than target.env_steps={planned - 1} (command line)"
    assert f"{more}: the run ends before the schedule does" in notes


@pytest.mark.parametrize(
    ("preset", "key", "start", "end"),
    [
        ("pong", "lr_env_steps", "learning_rate", "lr_final"),
        ("pong", "entropy_env_steps", "entropy_coef", "entropy_final"),
        ("pong-dqn", "epsilon_env_steps", "epsilon_initial", "epsilon"),
    ],
)
def test_a_schedule_between_equal_values_has_no_effect_and_may_be_longer_than_the_run(preset, key, start, end):
    environ = {f"ROOKERY_ALGORITHM__{key.upper()}": "1_000_000_000"}
    for value, named in (("0.002", f"algorithm.{key}=1000000000 "), ("0.001", "ROOKERY_ALGORITHM__")):
        overrides = [f"algorithm.{start}={value}", f"algorithm.{end}=0.001"]
        notes = load_settings(preset=preset, overrides=overrides, environ=environ, strict=True).notes
        (note,) = [note for note in notes if f"algorithm.{key}=1000000000" in note]
        assert note.startswith(named)
    assert f"no effect where algorithm.{end} (command line) equals algorithm.{start} = 0.001: " in note


@pytest.mark.parametrize(
    ("preset", "key", "ranks", "steps"),
    [("cartpole-dqn", "target_every", 1, 25), ("cartpole-dqn", "target_every", 2, 12), ("pendulum-td3", "policy_delay", 1, 1000)],
)
def test_an_interval_in_gradient_steps_that_is_longer_than_the_run_is_named(preset, key, ranks, steps):
    size = ["algorithm.minibatch=32", "algorithm.samples_per_insert=8", "algorithm.warmup=1000", "target.env_steps=1100"]
    td3 = ["algorithm.samples_per_insert=256", "algorithm.warmup=1000", "target.env_steps=2000"]
    overrides = td3 if key == "policy_delay" else [*size, "algorithm.target_rate=1.0", "actor.count=2", f"learner.ranks={ranks}"]
    load = lambda value: load_settings(preset=preset, overrides=[*overrides, f"algorithm.{key}={value}"], environ={}).notes  # noqa: E731
    named = lambda value: [note for note in load(value) if note.startswith(f"algorithm.{key}: ")]  # noqa: E731
    assert named(steps) == []
    (note,) = named(steps + 1)
    assert note.startswith(f"algorithm.{key}: found {steps + 1}, more than the number of gradient steps that target.env_steps ")
    assert f"pays for, {steps}: " in note
    assert note.endswith(f"initial weights (algorithm.{key} from command line)")


@pytest.mark.parametrize("environ", [{}, {"ROOKERY_LEARNER__RANKS": "2", "ROOKERY_POLICY_SERVER__WORKERS": "1"}])
def test_a_file_is_valid_for_each_process_of_a_deployment(tmp_path, environ):
    """Only the policy server has its number of workers in a variable, and only the learner that of its ranks."""
    path = tmp_path / "run.yaml"
    path.write_text("policy_server: {step_timeout_ms: 500}\nlearner: {ranks_seconds: 300}\n")
    notes = load_settings(preset=str(path), environ=environ, strict=True).notes
    assert len(notes) == (0 if environ else 2)


def test_a_variable_is_named_beside_a_command_line_that_contradicts_it():
    environ = {"ROOKERY_ALGORITHM__LR_FINAL": "1e-5"}
    notes = load_settings(preset="pong", overrides=["algorithm.lr_schedule=constant"], environ=environ, strict=True).notes
    lost = "no effect where algorithm.lr_schedule is constant (command line): algorithm.lr_final=1e-05"
    assert f"ROOKERY_ALGORITHM__LR_FINAL sets what has {lost}" in notes


def test_a_function_that_may_return_an_atari_environment_uses_what_such_an_environment_uses():
    own = "env.entry_point=common.envs.probes:matching_action"
    used = ["env.crop=[1, 1]", "env.frame_skip=8", "env.terminate_on_life_loss=true"]
    assert load_settings(preset=None, overrides=[own, *used], environ={}, strict=True).notes == ()
    with pytest.raises(ConfigError, match=r"env\.sticky_actions: found 0\.25 .* where env\.entry_point is"):
        load_settings(preset=None, overrides=[own, "env.sticky_actions=0.25"], environ={}, strict=True)


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("pong", ["algorithm.lr_schedule=constant"]),
        ("pong", ["env.entry_point=common.envs.probes:matching_action", "env.frame_stack=1"]),
        ("cartpole", ["evaluator.enabled=false"]),
        ("pong", ["run.mode=lockstep"]),
    ],
)
def test_the_config_of_a_run_is_loaded_again(tmp_path, preset, overrides):
    """It has every value, also those of the preset that lost their effect, and all of them come from this file."""
    first = load_settings(preset=preset, overrides=[*overrides, f"run.dir={tmp_path}"], environ={})
    path = tmp_path / "config.yaml"
    path.write_text(as_yaml(first.settings, first.provenance))
    again = load_settings(preset=str(path), overrides=["run.seed=7"], environ={})
    assert again.settings.algorithm == first.settings.algorithm
    assert len(again.notes) <= len(first.notes)
    with pytest.raises(ConfigError, match=r"kl_target: found 0\.5 \(command line\), which has no effect"):
        load_settings(preset=str(path), overrides=["algorithm.kl_target=0.5"], environ={}, strict=True)


def test_where_the_learners_address_was_set_another_evaluator_may_reach_the_target():
    overrides = ["target.evaluation=475", "evaluator.enabled=false", "evaluator.episodes=20", "learner.bind=tcp://127.0.0.1:5700"]
    (note,) = load_settings(preset="cartpole", overrides=overrides, environ={}, strict=True).notes
    lost = "no effect where evaluator.enabled is false (command line): target.evaluation=475"
    assert note == f"command line sets what has {lost}"


def test_a_default_that_is_set_where_it_has_no_effect_is_named_and_accepted():
    (note,) = load_settings(preset="cartpole", overrides=["env.frame_skip=4"], environ={}, strict=True).notes
    assert note == "command line sets what has no effect where env.id is CartPole-v1 (preset cartpole): env.frame_skip=4"
    overrides = ["env.id=", "env.entry_point=common.envs.probes:matching_action"]
    assert load_settings(preset="cartpole", overrides=overrides, environ={}, strict=True)


def test_what_switches_a_setting_off_is_accepted_anywhere():
    """`rookery train pong algorithm.lr_schedule=constant algorithm.lr_final=0` contradicts nothing."""
    overrides = ["algorithm.lr_schedule=constant", "algorithm.lr_final=0.0", "algorithm.lr_env_steps=0"]
    assert load_settings(preset="pong", overrides=overrides, environ={}, strict=True).notes == ()
    overrides = ["algorithm.target_rate=1.0", "algorithm.target_every=50"]
    assert load_settings(preset="cartpole-dqn", overrides=overrides, environ={}).settings.algorithm.target_every == 50


def test_harm_is_refused_whoever_set_it(tmp_path):
    """The preset's file set the rate, the command line the interval: the target network stands nearly still."""
    path = tmp_path / "own.yaml"
    path.write_text("algorithm: {name: dqn, target_rate: 0.005, target_every: 1}\nrollout: {length: 16}\n")
    assert isinstance(load_settings(preset=str(path), environ={}).settings.algorithm, DQNSettings)
    with pytest.raises(ConfigError, match=r"target_rate: found 0\.005, wanted 1 where algorithm\.target_every is 50"):
        load_settings(preset=str(path), overrides=["algorithm.target_every=50"], environ={})


@pytest.mark.parametrize("source", ["file", "command line", "ROOKERY_MODEL__RECURRENT"])
def test_a_memory_is_refused_where_the_algorithm_or_the_network_has_none_whoever_set_it(tmp_path, source):
    """TD3 and SAC would train without it, and a trunk of the values' own would not have what the policy remembers."""
    path = tmp_path / "own.yaml"
    for text, wanted in (
        ("algorithm: {name: td3}\n", "algorithm.name is td3: it has no memory"),
        ("algorithm: {name: sac}\n", "algorithm.name is sac: it has no memory"),
        ("model: {shared_trunk: false}\n", "model.shared_trunk is false: values would not have the memory"),
    ):
        path.write_text(text)
        given = {"preset": str(path), "overrides": [], "environ": {}}
        if source == "file":
            path.write_text(
                text.replace("model: {", "model: {recurrent: gru, ") + "model: {recurrent: gru}\n" * ("model" not in text)
            )
        elif source == "command line":
            given["overrides"] = ["model.recurrent=gru"]
        else:
            given["environ"] = {source: "gru"}
        with pytest.raises(ConfigError, match=f"model.recurrent: found gru, wanted null where {wanted}.*{source}") as refused:
            load_settings(**given)
        assert "\n" not in str(refused.value)


def test_a_memory_is_accepted_where_the_trunk_that_forbids_it_has_no_effect():
    """The networks of values alone have one trunk, whatever the preset's own algorithm shares."""
    overrides = ["algorithm.name=dqn", "model.recurrent=lstm"]
    loaded = load_settings(preset="cartpole", overrides=overrides, environ={}, strict=True)
    assert (loaded.settings.model.recurrent, loaded.settings.model.shared_trunk) == ("lstm", False)


HARM = [
    (
        "name: dqn, target_rate: 0.005, target_every: 20",
        "algorithm.target_every=50",
        "algorithm.target_rate: found 0.005, wanted 1",
    ),
    (
        "name: ppo, learning_rate: 1e-4, lr_schedule: linear, lr_final: 1e-3",
        "algorithm.lr_final=2e-3",
        "algorithm.lr_final: found",
    ),
]


@pytest.mark.parametrize(("algorithm", "override", "line"), HARM)
def test_harm_in_the_config_of_a_run_that_began_is_named_so_that_the_run_can_go_on(tmp_path, algorithm, override, line):
    """Also evaluation, play and export read this file."""
    path = tmp_path / "config.yaml"
    text = f"algorithm: {{{algorithm}}}\nrollout: {{length: 16}}\n"
    path.write_text(text)
    with pytest.raises(ConfigError, match=line):
        load_settings(preset=str(path), environ={})
    path.write_text(f"{text}run: {{dir: {tmp_path}}}\n")
    (note,) = load_settings(preset=str(path), overrides=["run.seed=2"], environ={}, strict=True).notes
    assert note.startswith(line)
    with pytest.raises(ConfigError, match=line):
        load_settings(preset=str(path), overrides=[override], environ={})
