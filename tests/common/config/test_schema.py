"""The settings themselves: strict types, ranges, and settings that only fail together."""

import json
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from common.algorithms.settings import DQNSettings, PPOSettings
from common.config.layers import parse_yaml
from common.config.load import as_yaml, find_preset, preset_names
from common.config.run_config import RunConfig
from common.config.schema import WELCOME_BYTES, Settings, file_schema
from common.config.sections import (
    ActorSettings,
    EvaluatorSettings,
    LearnerSettings,
    LogSettings,
    RolloutSettings,
    RunSettings,
    TargetSettings,
)
from common.envs.spec import EnvSettings
from common.errors import ConfigError
from common.protocol import codec
from common.protocol.messages import Envelope, Welcome
from common.protocol.worker_side import Identity

pytestmark = pytest.mark.pure


def test_the_defaults_are_a_run_that_fits_together():
    """Someone starts without any file: the tree's own values must be a valid run."""
    settings = Settings()
    assert settings.scale.batch_env_steps == 2 * 128 * 8
    assert settings.learner.bind == settings.actor.learner == settings.evaluator.learner


def test_every_setting_says_what_it_does():
    """`rookery config schema` is the reference page: a setting without a sentence would be a riddle there."""
    sections = [field.annotation for name, field in Settings.model_fields.items() if name != "algorithm"]
    models = [*sections, *get_args(Settings.model_fields["algorithm"].annotation)]
    silent = [f"{m.__name__}.{k}" for m in models for k, f in m.model_fields.items() if not f.description]
    assert all(issubclass(model, BaseModel) for model in models)
    assert silent == []


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        *((find_preset(name).text, True) for name in preset_names()),
        (as_yaml(Settings()), True),
        ("algorithm: {gamma: 0.9}", True),
        ("algorithm: {target_every: 9}", True),  # the command line may name DQN
        ("algorithm: {name: 'own.package:ENTRY', patience: 7}", True),
        ("learner:\nalgorithm:\n", True),
        ("algorithm: {name: ppo, target_every: 9}", False),
        ("algorithm: {name: own, patience: 7}", False),
        ("algorithm: {patience: 7}", False),
        ("learner: {batches: 3}", False),
        ("learners: {batch: 3}", False),
    ],
)
def test_the_schema_accepts_the_files_that_are_loaded(text, valid):
    validator = pytest.importorskip("jsonschema").Draft202012Validator(file_schema())
    assert validator.is_valid(parse_yaml(text, source="text")) is valid


def test_settings_cannot_be_changed_after_they_were_checked():
    """A service that alters its settings would no longer run what config.yaml says."""
    with pytest.raises(ValidationError, match="frozen"):
        Settings().log.level = "debug"


def test_an_address_without_a_scheme_is_refused():
    """A forgotten scheme or port would otherwise show as an actor that waits for ever."""
    assert LearnerSettings(bind="tcp://*:0").bind == "tcp://*:0"
    with pytest.raises(ValidationError, match="tcp://host:port"):
        ActorSettings(learner="localhost:5700")


def _settings(**sections):
    base = {
        "env": EnvSettings(num_envs=4),
        "rollout": RolloutSettings(length=16),
        "algorithm": PPOSettings(minibatch=64),
        "learner": LearnerSettings(batch=2, credits=1),
        "actor": ActorSettings(count=2),
    }
    return Settings(**(base | sections))


def test_a_minibatch_may_be_the_whole_batch_and_no_more():
    """2 trajectories of 16 x 4 are 128 rows: 128 can be drawn from them, 129 cannot."""
    assert _settings(algorithm=PPOSettings(minibatch=128)).scale.batch_env_steps == 128
    with pytest.raises(ValidationError, match=r"algorithm\.minibatch: found 129, wanted at most 128"):
        _settings(algorithm=PPOSettings(minibatch=129))


def test_settings_that_are_accepted_fit_into_a_welcome():
    """Arguments of a user's environment may be long; the learner ended at its first Welcome where they were too long."""

    def with_kwargs(length):
        return Settings(
            env=EnvSettings(entry_point="games:make", kwargs={"map": "x" * length}), run=RunSettings(preset="p" * 255)
        )

    shortest, size = with_kwargs(0), len(EnvSettings(entry_point="games:make", kwargs={"map": ""}).model_dump_json())
    size += sum(len(section.model_dump_json()) for section in (shortest.model, shortest.algorithm))
    longest = with_kwargs(WELCOME_BYTES - size)
    message = Welcome(
        index=0,
        generation=0,
        config=RunConfig.of(longest, run_id="r" * 255).model_dump_json(),
        env_signature="",
        schema=(),
        credits=1,
        version=0,
        heartbeat_seconds=1.0,
    )
    assert codec.decode([bytes(part) for part in codec.encode(Envelope(run="r", message=message))]).message == message
    with pytest.raises(ValidationError, match=r"env\.kwargs: found 28,673 bytes of .*, wanted at most 28,672"):
        with_kwargs(WELCOME_BYTES - size + 1)


def test_all_conflicts_are_named_at_once():
    """Someone edits four numbers: the second start should not bring the second complaint."""
    with pytest.raises(ValidationError) as caught:
        _settings(
            algorithm=PPOSettings(minibatch=1000),
            actor=ActorSettings(count=3),
            learner=LearnerSettings(batch=4, credits=1, max_actors=2),
            target=TargetSettings(env_steps=255),
        )
    text = str(caught.value)
    assert all(key in text for key in ("algorithm.minibatch", "actor.count", "target.env_steps"))


@pytest.mark.parametrize(
    "bind", ["tcp://0.0.0.0:5700", "tcp://10.0.0.7:5700", "tcp://learner:5700", "tcp://*:0", "tcp://[::]:5700"]
)
def test_a_learner_that_other_machines_reach_has_keys_or_is_set_to_run_without(bind):
    with pytest.raises(ValidationError, match=r"learner\.bind: found .*, wanted an address of this machine alone") as caught:
        Settings(learner=LearnerSettings(bind=bind))
    assert bind in str(caught.value)
    for way in ({"keys": "keys/learner"}, {"insecure": True}):
        assert Settings(learner=LearnerSettings(bind=bind, **way)).learner.bind == bind


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:5700", "tcp://127.3.2.1:0", "tcp://localhost:5700", "tcp://[::1]:5700"])
def test_on_this_machine_alone_no_keys_are_needed(bind):
    """`rookery train` on a laptop: one command, no keys."""
    assert not Settings(learner=LearnerSettings(bind=bind)).learner.keys


@pytest.mark.parametrize("address", ["tcp://10.0.0.7:5700", "tcp://learner:5700", "tcp://0.0.0.0:5700", "tcp://[fe80::1]:5700"])
@pytest.mark.parametrize(("role", "section"), [("actor", ActorSettings), ("evaluator", EvaluatorSettings)])
def test_a_worker_joins_another_machine_with_keys_or_where_its_network_is_trusted(role, section, address):
    """Without keys any process at that address is the learner, and decides which code the worker builds."""
    with pytest.raises(ValidationError, match=rf"{role}\.learner: found .*, wanted an address of this machine alone") as caught:
        Settings(**{role: section(learner=address)})
    assert f"found {address}, " in str(caught.value)
    assert f"{role}.insecure=true" in str(caught.value)
    for way in ({"keys": "keys/worker"}, {"insecure": True}):
        assert getattr(Settings(**{role: section(learner=address, **way)}), role).learner == address


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5700", "tcp://127.3.2.1:5700", "tcp://localhost:5700", "tcp://[::1]:5700"])
def test_a_worker_joins_a_learner_of_its_own_machine_without_keys(address):
    """`rookery train` on a laptop."""
    assert not Settings(actor=ActorSettings(learner=address), evaluator=EvaluatorSettings(learner=address)).actor.insecure


@pytest.mark.parametrize("name", ["mygames:make", "", "my-games", "mygames.", ".mygames", "mygames.envs.2d"])
def test_an_allowed_package_is_named_as_python_names_it(name):
    """A typo would allow nothing, and would show only once a learner answers."""
    with pytest.raises(ValidationError, match="the name of a package or module, such as mygames"):
        ActorSettings(allow_code=("fine", name))


def test_a_worker_gets_the_run_it_belongs_to_and_nothing_of_one_process():
    """The actor knows the learner's address only; all else comes in the Welcome."""
    settings = Settings(run=RunSettings(preset="pong", seed=7, dir="/home/x"), log=LogSettings(level="debug"))
    config = RunConfig.of(settings, run_id="pong-1")
    assert RunConfig.from_json(config.model_dump_json()) == config
    assert set(config.evaluation.model_dump()) == {"episodes", "every_seconds", "cpu_share"}
    assert (config.run_id, config.preset, config.seed, config.env) == ("pong-1", "pong", 7, settings.env)
    assert set(json.loads(config.model_dump_json())) == {
        "run_id", "seed", "preset", "env", "model", "algorithm", "rollout", "target", "actors", "acting_precision",
        "evaluation",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [({"rollout": {"length": "8"}}, "rollout.length"), ({"colour": 1}, "colour"), ({"rollout": {"length": 0}}, "rollout.length")],
)
def test_a_welcome_that_this_version_does_not_understand_names_the_setting(change, named):
    """An old actor meets a new learner: ignoring a setting would train on another environment than the learner thinks."""
    document = json.loads(RunConfig.of(Settings(), run_id="r").model_dump_json()) | change
    with pytest.raises(ConfigError, match=named) as caught:
        RunConfig.from_json(json.dumps(document))
    assert "same rookery version" in str(caught.value)


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '{"run_id": 1}'])
def test_a_welcome_that_is_no_configuration_is_one_clear_error(text):
    """Bytes from outside, even from the learner, never end in a traceback."""
    with pytest.raises(ConfigError, match="run configuration"):
        RunConfig.from_json(text)


@pytest.mark.parametrize(("batch", "actors", "raised"), [(1, 1, 1), (1, 3, 3), (2, 1, 2), (2, 3, 3), (4, 3, 6), (6, 3, 6)])
def test_in_lockstep_a_batch_has_as_much_of_every_actor(batch, actors, raised):
    """Never less than was asked for; asynchronous runs have exactly that."""
    parts = {"learner": LearnerSettings(batch=batch), "actor": ActorSettings(count=actors)}
    lockstep = _settings(run=RunSettings(mode="lockstep"), **parts)
    assert (lockstep.batch, lockstep.scale.batch, lockstep.scale.waiting) == (raised, raised, 1)
    assert _settings(**parts).batch == batch


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"actor": ActorSettings(count=0)}, r"actor\.count: found 0, wanted at least 1 in lockstep"),
        ({"learner": LearnerSettings(torch_threads=2)}, r"learner\.torch_threads: found 2, wanted 1 in lockstep"),
        ({"actor": ActorSettings(torch_threads=4)}, r"actor\.torch_threads: found 4, wanted 1 in lockstep"),
    ],
)
def test_lockstep_refuses_what_would_make_two_runs_differ(change, sentence):
    """Refused before the run starts, with what to do; without lockstep there is nothing wrong with any of it."""
    with pytest.raises(ValidationError, match=sentence):
        _settings(run=RunSettings(mode="lockstep"), **change)
    assert _settings(**change)


def test_in_lockstep_the_number_of_actors_is_its_own_limit():
    """The session has a slot for each of them, whatever `learner.max_actors` is."""
    given = {"learner": LearnerSettings(max_actors=2), "actor": ActorSettings(count=3)}
    assert _settings(run=RunSettings(mode="lockstep"), **given).batch == 3
    with pytest.raises(ValidationError, match=r"actor\.count: found 3, wanted at most 2 = "):
        _settings(**given)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_limits_of_a_learner_are_those_of_each_of_its_ranks(ranks):
    """`learner.max_actors`, and the lag of messages that wait for their gradient steps."""
    learner = {"batch": 1, "credits": 2, "ranks": ranks, "max_actors": 12}
    run = {"algorithm": DQNSettings(), "rollout": RolloutSettings(length=16)}
    _settings(**run, learner=LearnerSettings(**learner, max_policy_lag=24), actor=ActorSettings(count=12 * ranks))
    with pytest.raises(ValidationError, match=rf"actor\.count: found {12 * ranks + 1}, wanted at most {12 * ranks} = "):
        _settings(**run, learner=LearnerSettings(**learner, max_policy_lag=99), actor=ActorSettings(count=12 * ranks + 1))
    with pytest.raises(ValidationError, match=r"learner\.max_policy_lag: found 23, wanted at least 24 = "):
        _settings(**run, learner=LearnerSettings(**learner, max_policy_lag=23), actor=ActorSettings(count=12 * ranks))


@pytest.mark.parametrize("name", ["", "actor-0", "a.b:c_d-e", "_", "7" * 128, ".hidden", "-x", ":x", "a b", "x" * 129, "a\n"])
def test_a_name_that_the_settings_take_is_one_that_a_worker_can_go_by(name):
    """Otherwise the error would appear on another machine, when the worker starts. An empty name is replaced there."""
    try:
        Identity(role="actor", name=name or "made-up", incarnation=1, software="1")
    except ConfigError:
        with pytest.raises(ValidationError, match="name"):
            ActorSettings(name=name)
    else:
        assert ActorSettings(name=name).name == name


def test_each_rank_has_a_port():
    """Else `rookery train` ended with a traceback."""
    last = {"bind": "tcp://127.0.0.1:65534", "ranks": 2}
    assert Settings(learner=last).learner.ranks == 2
    with pytest.raises(ValidationError, match=r"learner\.bind: found tcp://127\.0\.0\.1:65535, wanted a port of at most 65534"):
        Settings(learner=last | {"bind": "tcp://127.0.0.1:65535"})
    with pytest.raises(ValidationError, match=r"metrics\.port: found 65535, wanted a port of at most 65534"):
        Settings(learner=last, metrics={"port": 65535})
