"""Tests of the start of a run: new, in a folder that was made for it, or resumed."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from common.algorithms.registry import build_algorithm
from common.algorithms.settings import DQNSettings, PPOSettings
from common.config.schema import Settings
from common.config.sections import LearnerSettings
from common.envs.spec import ActionSpec, EnvSettings, EnvSpec
from common.envs.trial import spec_of
from common.errors import ConfigError, ResourceError
from common.models import arithmetic
from common.models.snapshot import ParameterLayout, flatten
from common.models.spec import ModelSettings
from common.observability.logs import PlainFormatter
from common.protocol.events import Evaluated
from common.protocol.messages import PROTOCOL_VERSION, Evaluation, Snapshot
from common.runtime import machine
from common.runtime.checkpoint_files import Checkpoint
from common.runtime.checkpoints import STATE_SETTINGS, CheckpointStore
from common.runtime.copies import copy_address
from common.runtime.run_directory import RunDirectory, held
from common.runtime.store import RunStore
from services.cli.train.plan import Request, make_plan
from services.learner import startup
from services.learner.resume import open_state
from services.learner.saving import better_policy
from services.learner.startup import open_directory, parse, require_own, restore_config, with_run_id, write_config

pytestmark = pytest.mark.service

HOUR = 3600.0
ENV = EnvSpec(
    observation_shape=(84, 84), observation_dtype="uint8", action=ActionSpec(choices=(6,), shape=()), frame_stack=4, frame_skip=4
)
MODEL = ModelSettings(hidden=(8,))
DQN = Settings(algorithm=DQNSettings(replay_capacity=10_000), model=MODEL)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Runs go to a folder of their own."""
    monkeypatch.chdir(tmp_path)


def invoked(*words):
    """Return the invocation of a command line, with a run id."""
    return with_run_id(parse(["--config", "cartpole", *words], {}))


def begun(*words):
    """Invocation, directory and algorithm of a run, its folder made an hour ago by the clock of its file server."""
    invocation = invoked("--run-dir", "run", *words)
    directory = open_directory(invocation, words)
    ago = time.time() - HOUR
    os.utime(directory.command, (ago, ago))
    env = spec_of(invocation.settings.env)
    return invocation, directory, build_algorithm(invocation.settings.algorithm, model=invocation.settings.model, env=env, seed=1)


def state(invocation, directory, algorithm):
    """The record and the session it begins with."""
    return open_state(
        invocation,
        directory,
        algorithm=algorithm,
        env=spec_of(invocation.settings.env),
        store=CheckpointStore(directory.checkpoints, keep=3),
    )


def save(invocation, directory, algorithm):
    """A checkpoint at version 7, after 100 s of training."""
    record, session = state(invocation, directory, algorithm)
    record.version, record.env_steps = 7, 1000
    counters = {"record": record.state_dict(record.started_at + 100.0), "session": session.saved.state_dict()}
    checkpoint = Checkpoint(
        run_id=record.run_id,
        version=7,
        env_steps=1000,
        architecture=ParameterLayout.of(algorithm.model).fingerprint,
        counters=counters,
        state=algorithm.state_dict(),
    )
    CheckpointStore(directory.checkpoints, keep=3).save(checkpoint)


def lines(path):
    """The lines of a configuration, less those that differ from run to run."""
    chosen = ("id:", "dir:", "bind:", "learner:")
    return [line for line in path.read_text().splitlines() if not line.strip().startswith(chosen)]


def test_a_learner_alone_writes_the_configuration_that_rookery_train_writes():
    """A month later somebody asks where a value came from: preset, command line or default stand beside it either way."""
    overrides = ("learner.batch=1", "run.seed=7", "log.format=json")
    request = Request(preset="cartpole", overrides=overrides, run_dir=Path("trained"))
    with make_plan(request, environ={}, command_line=["rookery"], now=datetime.now(UTC)) as plan:
        pass
    alone = open_directory(invoked(*overrides, "--run-dir", "alone"), overrides)
    assert lines(alone.config) == lines(plan.directory.config)
    run = alone.config.read_text().partition("env:")[0]
    assert "dir: alone  # chosen for this run" in run
    assert "seed: 7  # command line" in run
    assert "# chosen for this run" in next(line for line in run.splitlines() if " id:" in line)


def test_a_run_without_a_folder_gets_one_and_says_so_in_its_own_configuration():
    """`rookery learner --config cartpole`: a resumed learner finds the folder in the file too."""
    directory = open_directory(invoked(), [])
    assert directory.path.parent == Path("runs")
    assert yaml.safe_load(directory.config.read_text())["run"]["dir"] == str(directory.path)


def test_an_id_is_chosen_once():
    """Workers of the run use this id through every restart of its learner."""
    first = invoked()
    assert first.settings.run.id.startswith("cartpole-")
    assert with_run_id(first) == first
    assert invoked().settings.run.id != first.settings.run.id
    assert invoked("run.id=mine").loaded.provenance["run.id"] == "command line"


def spent(record):
    """Seconds of the run until now."""
    return pytest.approx(time.monotonic() - record.started_at, abs=HOUR / 10)


def test_the_start_of_the_learners_process_is_part_of_the_run_whatever_a_clock_says(monkeypatch):
    """Torch is imported: for the user the run has begun. The clock of a file server, or of this machine, may be an hour off."""
    monkeypatch.setattr("common.runtime.lifecycle.STARTED", time.monotonic() - 2 * HOUR)
    record, _ = state(*begun())
    assert spent(record) == 2 * HOUR


@pytest.mark.parametrize("saved", [True, False])
def test_the_time_that_a_run_lay_idle_is_not_the_runs(saved, monkeypatch):
    """Stopped yesterday, resumed today: a budget of wall-clock time must not be spent by the night."""
    monkeypatch.setattr("common.runtime.lifecycle.STARTED", time.monotonic())
    invocation, directory, algorithm = begun()
    if saved:
        save(invocation, directory, algorithm)
    record, _ = state(*begun("--resume")[:1], RunDirectory(Path("run")), algorithm)
    assert spent(record) == (100.0 if saved else 0.0)


def test_a_resumed_run_has_the_id_and_the_counters_of_its_checkpoint():
    """Resumed with the preset alone: the actors that outlived the learner know the run by its first id."""
    first = begun()
    save(*first)
    record, session = state(*begun("--resume"))
    assert record.run_id == session.config.run == first[0].settings.run.id
    assert (record.version, record.env_steps) == (7, 1000)


def test_a_resumed_run_knows_its_best_policy():
    """It was written after the newest checkpoint: a worse one must not replace it. A damaged one is replaced by any."""
    first = begun()
    save(*first)
    played = Snapshot(
        version=9, env_steps=1200, precision="fp32", layout="", arrays={"parameters": flatten(first[2].model, "fp32")}
    )
    arrays = {"episode_return": np.array([3.0, 4.0], np.float32), "episode_length": np.ones(2, np.int32)}
    evaluated = Evaluated(message=Evaluation(version=9, mode="greedy", arrays=arrays), snapshot=played)
    best = better_policy(evaluated, None, mean=3.5, run_id="run-1")
    best = replace(best, counters=best.counters | {STATE_SETTINGS: first[0].settings.state_settings})
    CheckpointStore(first[1].checkpoints, keep=3).save_best(best)
    record, _ = state(*begun("--resume"))
    assert record.best == {"version": 9, "mean": 3.5, "episodes": 2, "env_steps": 1200}
    assert record.version == 7
    assert state(*begun("--resume", "env.num_envs=2"))[0].best == record.best
    assert state(*begun("--resume", "env.kwargs={sutton_barto_reward: true}"))[0].best is None  # of another environment
    (first[1].checkpoints / "best" / "manifest.json").write_bytes(b"")
    assert state(*begun("--resume"))[0].best is None


def test_a_resumed_run_without_any_checkpoint_begins_at_zero():
    """Killed in its first minute: there is a folder, and nothing in it to go on from."""
    begun()
    record, _ = state(*begun("--resume"))
    assert (record.version, record.env_steps) == (0, 0)


@pytest.mark.parametrize("trained", ["learning_curve.csv", "checkpoints/checkpoint-000000000007"])
def test_a_folder_that_was_made_for_it_is_taken_and_one_in_which_a_run_trained_is_not(trained):
    """The supervisor writes config.yaml and starts the learner; a second learner in the same folder would be another run."""
    first, directory, _ = begun()
    before = directory.config.read_bytes()
    second = invoked("--run-dir", "run")
    assert open_directory(second, []).path == directory.path
    assert directory.config.read_bytes() == before
    assert second.settings.run.id == first.settings.run.id, "its checkpoints are refused where config.yaml cannot be replaced"
    (directory.path / trained).mkdir(parents=True)
    with pytest.raises(ConfigError, match="in use"):
        open_directory(invoked("--run-dir", "run"), [])


@pytest.mark.parametrize("words", [("--config", "cartpole"), ()], ids=["another file", "its own file"])
def test_a_run_that_goes_on_with_other_settings_says_so_in_its_configuration(words):
    """A ConfigMap was changed, or a resumed learner got an override: the file holds the settings in force, and their sources."""
    first, directory, _ = begun()
    again = with_run_id(parse([*words, "--run-dir", "run", "--resume-if-found", "learner.batch=3"], {}))
    write_config(again, open_directory(again, []))
    assert "batch: 3  # command line" in directory.config.read_text()
    kept = parse(["--run-dir", "run", "--resume"], {}).settings
    assert kept == again.settings.model_copy(update={"run": again.settings.run.model_copy(update={"dir": "run"})})
    assert kept.run.id == first.settings.run.id


@pytest.mark.parametrize("option", ["--resume", "--resume-if-found"])
def test_a_run_does_not_go_on_with_another_seed(option):
    begun("run.seed=7")
    for seed in (9, 0):
        with pytest.raises(ConfigError, match=rf"run\.seed of a run that goes on: found {seed}, wanted 7"):
            parse(["--run-dir", "run", option, f"run.seed={seed}"], {})


@pytest.mark.parametrize("option", ["--resume", "--resume-if-found"])
def test_a_run_does_not_go_on_with_other_first_weights(option):
    """Before its first checkpoint it may: a path that was wrong is corrected."""
    begun("run.init=there")
    words = ["--run-dir", "run", option, "run.init=elsewhere"]
    assert parse(words, {}).resume
    Path("run/checkpoints/checkpoint-000000000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run\.init of a run that goes on: found elsewhere, wanted there"):
        parse(words, {})
    Path("own.yaml").write_text("run: {seed: 1}\n")
    assert parse([*words[:-1], "--config", "own.yaml"], {}).resume, "a file without it says nothing of the weights"


def test_a_learner_with_the_configuration_of_another_run_chooses_an_id():
    first, *_ = begun()
    second = with_run_id(parse(["--config", "run/config.yaml", "--run-dir", "other"], {}))
    assert second.settings.run.id not in {"", first.settings.run.id}


@pytest.fixture
def gone_on(tmp_path):
    """Words of a learner whose run went on elsewhere: its copy has a newer checkpoint. And the folder of that checkpoint."""
    _, directory, _ = begun()
    elsewhere, bucket = RunDirectory(tmp_path / "elsewhere" / "run"), f"file://{tmp_path}/bucket"
    shutil.copytree(directory.path, elsewhere.path)
    newer = Checkpoint(run_id="r", version=9, env_steps=9, architecture="a", counters={}, state={"w": torch.zeros(1)})
    CheckpointStore(elsewhere.checkpoints, keep=1).save(newer)
    RunStore(copy_address(bucket, elsewhere.path)).upload(elsewhere, keep=3)
    place = tmp_path / "bucket" / "run" / "checkpoints" / "checkpoint-000000000009"
    return ["--run-dir", "run", "--resume-if-found", f"run.store={bucket}"], place


def test_a_folder_that_stayed_behind_its_copy_is_not_resumed(gone_on):
    words, _ = gone_on
    with pytest.raises(ConfigError, match="the copy of this run has gone on: found checkpoint-000000000009"):
        parse(words, {})
    assert parse(words, {"RANK": "1"}).resume, "other ranks have folders of their own, without a copy"
    assert parse([*words, "--run-lock", "3"], {}).resume, "`rookery train` has compared them"
    shutil.rmtree("run")
    assert parse(words, {}).resume


@pytest.mark.parametrize("damaged", ["manifest.json", "tensors.safetensors"])
def test_a_damaged_checkpoint_of_the_copy_keeps_no_run_from_going_on(gone_on, damaged):
    """It was passed over before, and the next upload removes it."""
    words, place = gone_on
    (place / damaged).write_bytes(b"cut")
    assert parse(words, {}).resume


def test_a_run_goes_on_with_its_own_id_whatever_file_its_learner_names():
    begun()
    words = ["--config", "run/config.yaml", "--run-dir", "other", "--resume-if-found"]
    first = with_run_id(parse(words, {}))
    open_directory(first, [])
    assert with_run_id(parse(words, {})).settings.run.id == first.settings.run.id
    with pytest.raises(ConfigError, match=r"run\.id of a run that goes on: found mine, wanted cartpole-"):
        parse([*words, "run.id=mine"], {})


def test_where_a_value_came_from_is_kept_while_no_value_changes():
    """A learner that goes on with its own file would call that file the source of all."""
    _, directory, _ = begun("run.seed=7")
    before = directory.config.read_bytes()
    write_config(with_run_id(parse(["--run-dir", "run", "--resume"], {})), directory)
    assert directory.config.read_bytes() == before


def test_the_configuration_that_rookery_train_wrote_is_left_alone():
    """It gives each service a port of its own on the command line; what the run goes by stands in the file."""
    _, directory, _ = begun()
    before = directory.config.read_bytes()
    words = ["--config", str(directory.config), "--run-dir", "run", "--resume", "metrics.port=9101"]
    write_config(with_run_id(parse(words, {})), directory)
    assert directory.config.read_bytes() == before


def test_a_configuration_that_was_deleted_is_written_again_with_a_warning(caplog):
    """Without the file the checkpoints in the folder could not be resumed."""
    invocation, directory, _ = begun("run.seed=7")
    before = directory.config.read_text()
    with ExitStack() as resources:
        restore_config(invocation, directory, resources)
        assert "run_directory_deleted" not in caplog.text
        for _ in range(2):
            directory.config.unlink()
            restore_config(invocation, directory, resources)
            assert directory.config.read_text() == before
            with pytest.raises(ConfigError, match="a run is under way"), held(directory):
                pass  # the lock of the deleted directory keeps nobody out
    assert "run_directory_deleted" in caplog.text


def test_a_run_writes_no_checkpoint_to_the_directory_of_another_run():
    """Its own was deleted, and the other began in one of its name: a save would remove the checkpoints of the other."""
    first, directory, _ = begun()
    store = CheckpointStore(directory.checkpoints, keep=3, check=partial(require_own, first, directory))
    own = Checkpoint(run_id="r", version=7, env_steps=7, architecture="a", counters={}, state={"w": torch.zeros(1)})
    store.save(own)
    shutil.rmtree(directory.path)
    store.save(own)
    shutil.rmtree(directory.path)
    second, *_ = begun()
    ids = rf"found {second.settings.run.id} in run, wanted {first.settings.run.id}"
    changes = (lambda: store.save(own), lambda: store.save_best(own), lambda: store.remove_later(3), store.newest)
    for change in changes:
        with pytest.raises(ResourceError, match=f"another run has taken this directory: {ids}"):
            change()
    assert not directory.checkpoints.exists()


def test_a_full_disk_keeps_the_configuration_of_before(monkeypatch, caplog):
    """The run goes on: a warning says that the file is out of date."""
    _, directory, _ = begun()
    before = directory.config.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(startup, "write_atomically", full)
    write_config(invoked("--run-dir", "run", "--resume", "algorithm.learning_rate=1e-5"), directory)
    assert directory.config.read_bytes() == before
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", "config_not_written")]


def test_the_memory_of_a_run_is_logged_at_its_start(caplog):
    """10,000 frames of 84x84 are 71 MB, and a little more."""
    with caplog.at_level(logging.INFO):
        assert startup.build_run_algorithm(DQN, ENV, seed=0).replay_env_steps >= 10_000
    line = PlainFormatter("learner", tracebacks=False).format(caplog.records[-1])
    assert "replay_allocated env_steps=10" in line
    assert "gigabytes=0.07" in line


def test_an_algorithm_without_a_memory_says_nothing(caplog):
    """PPO."""
    with caplog.at_level(logging.INFO):
        startup.build_run_algorithm(Settings(model=MODEL), ENV, seed=0)
    assert not caplog.records


@pytest.mark.parametrize("normalizes", [True, False])
def test_the_algorithm_normalises_rewards_where_the_run_does(normalizes):
    settings = Settings(model=MODEL, env=EnvSettings(normalize_reward=normalizes))
    assert bool(startup.build_run_algorithm(settings, ENV, seed=0)._rewards.metrics) == normalizes


@pytest.mark.parametrize(
    ("has", "logged"), [("fp32", ["no_bfloat16 setting=algorithm.precision device=cpu precision=fp32"]), ("bf16", [])]
)
def test_bfloat16_on_a_processor_without_it_is_replaced_and_logged(monkeypatch, caplog, has, logged):
    """It trains in float32, and logs that once."""
    monkeypatch.setattr(arithmetic, "native", lambda *_: has)
    with caplog.at_level(logging.INFO):
        startup.build_run_algorithm(Settings(algorithm=PPOSettings(precision="bf16"), model=MODEL), ENV, seed=0)
    lines = [PlainFormatter("learner", tracebacks=False).format(record) for record in caplog.records]
    assert [line.partition("learner ")[2] for line in lines] == logged


def test_the_ranks_of_a_machine_share_what_is_free(monkeypatch):
    monkeypatch.setattr(machine, "available_bytes", lambda: 100_000_000)
    assert 50_000_000 < startup.build_run_algorithm(DQN, ENV, seed=0).replay_bytes < 100_000_000
    with pytest.raises(ConfigError, match=r"larger than what is free here: found 0\.1 GB, wanted at most 0\.1 GB"):
        startup.build_run_algorithm(DQN, ENV, seed=0, local_ranks=2)


def test_a_memory_larger_than_what_is_free_is_refused(monkeypatch):
    """A pod with 64 MB: better now than when it is killed, an hour from now."""
    monkeypatch.setattr(machine, "available_bytes", lambda: 64_000_000)
    with pytest.raises(
        ConfigError, match=r"larger than what is free here: found 0\.1 GB, wanted at most 0\.1 GB; lower algorithm"
    ):
        startup.build_run_algorithm(DQN, ENV, seed=0)


def test_experience_that_no_learner_would_receive_is_refused():
    """1,024 steps of 64 environments of 84x84: 464 MB in one array."""
    settings = Settings.model_validate({"model": MODEL, "rollout": {"length": 1024}, "env": {"num_envs": 64}})
    found = r"array obs of an experience message is too large: found 464,228,352 bytes, wanted at most 268,435,456; lower rollout"
    with pytest.raises(ConfigError, match=found):
        startup.build_run_algorithm(settings, ENV, seed=0)


def test_a_policy_that_no_worker_would_receive_is_refused(monkeypatch):
    algorithm = PPOSettings(minibatch=2)
    policy = ParameterLayout.of(build_algorithm(algorithm, model=MODEL, env=ENV, seed=0).model).size
    settings = Settings(algorithm=algorithm, model=MODEL, env={"num_envs": 1}, rollout={"length": 1})
    monkeypatch.setattr(startup, "ARRAY_BYTES", 4 * policy)
    startup.build_run_algorithm(settings, ENV, seed=0)
    monkeypatch.setattr(startup, "ARRAY_BYTES", 4 * policy - 1)
    with pytest.raises(ConfigError, match=f"the policy is too large for a message: found {4 * policy:,} bytes"):
        startup.build_run_algorithm(settings, ENV, seed=0)


def test_where_nothing_is_known_of_the_machine_the_run_goes_on(monkeypatch):
    """Not every system says what is free."""
    monkeypatch.setattr(machine, "available_bytes", lambda: None)
    assert startup.build_run_algorithm(DQN, ENV, seed=0)


def test_a_memory_that_the_system_will_not_promise_is_refused_in_the_same_way(monkeypatch):
    """Terabytes by a slip of the finger."""

    def build_algorithm(*_, **__):
        raise MemoryError("Unable to allocate 6.42 TiB for an array with shape (1000000000, 7056) and data type uint8")

    monkeypatch.setattr(startup, "build_algorithm", build_algorithm)
    with pytest.raises(
        ConfigError, match=r"cannot be allocated: found Unable to allocate 6\.42 TiB.*lower algorithm.replay_capacity"
    ):
        startup.build_run_algorithm(DQN, ENV, seed=0)


@pytest.mark.parametrize(("cuda", "found"), [(None, "built for CPUs"), ("12.8", "built for CUDA 12.8, and no device")])
def test_a_gpu_that_is_not_there_is_missed_before_the_run_starts(monkeypatch, cuda, found):
    """The image for GPUs on a node without one, or a setting copied to a laptop: it must not train on the CPU in silence."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    settings = Settings(learner=LearnerSettings(device="cuda"), model=MODEL)
    with pytest.raises(ConfigError, match=f"no GPU to train on: found torch .*, {found}, wanted .*; .*learner.device=cpu"):
        startup.build_run_algorithm(settings, ENV, seed=0)


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch):
    """Two ranks on a machine with one GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    settings = Settings(learner=LearnerSettings(device="cuda", ranks=2), model=MODEL)
    found = "learner.ranks needs more GPUs: found 1 GPUs, wanted at least 2: one for each rank on this machine; lower .* see all"
    with pytest.raises(ConfigError, match=found):
        startup.build_run_algorithm(settings, ENV, seed=0, local_rank=1)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("actor.count=3", "learner.batch=4", "learner.credits=5"), (5, 4, 64, False)),
        (("actor.count=3", "learner.batch=4", "run.mode=lockstep"), (2, 6, 3, True)),
    ],
)
def test_in_lockstep_every_actor_has_credits_for_its_share_and_there_are_no_others(words, offered):
    """Credits, batch and slots: an actor with more of them could be ahead of the others."""
    invocation, directory, algorithm = begun(*words)
    terms = state(invocation, directory, algorithm)[1].config
    assert (terms.credits, terms.batch, terms.max_actors, terms.lockstep) == offered


def test_a_run_that_goes_on_without_a_checkpoint_keeps_its_id():
    """Killed in its first minute in a pod that names the preset each time: its actors know the run, and must not be refused."""
    first = begun()[0].settings.run.id
    assert with_run_id(parse(["--config", "cartpole", "--run-dir", "run", "--resume-if-found"], {})).settings.run.id == first
    Path("run/config.yaml").write_text("run: {}\nlog: {}\n")
    assert with_run_id(parse(["--config", "cartpole", "--run-dir", "run", "--resume"], {})).settings.run.id not in ("", first)


def rewrite(directory, algorithm, version, change):
    """Save a checkpoint with malformed counters and right hashes."""
    architecture = ParameterLayout.of(algorithm.model).fingerprint
    store = CheckpointStore(directory.checkpoints, keep=3)
    found = store.load_newest(architecture=architecture, warn=lambda _: None, restore=lambda found: found)
    counters = json.loads(json.dumps(found.counters))
    change(counters)
    store.save(replace(found, version=version, counters=counters))


MALFORMED = {
    "no record": lambda counters: counters.pop("record"),
    "a record without a counter": lambda counters: counters["record"].pop("updates"),
    "a counter that is a word": lambda counters: counters["record"].update(env_steps="many"),
    "a session without a ledger": lambda counters: counters["session"].pop("ledger"),
    "a worker without an account": lambda counters: counters["session"]["registry"].update(workers=[{"name": "a"}]),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_checkpoint_with_malformed_counters_is_passed_over(what, caplog):
    """The next older one serves; where there is none, one line says why."""
    first = begun()
    save(*first)
    rewrite(*first[1:], 8, MALFORMED[what])
    invocation, directory, algorithm = begun("--resume")
    with caplog.at_level(logging.WARNING):
        record, _ = state(invocation, directory, algorithm)
    assert record.version == 7
    line = PlainFormatter("learner", tracebacks=False).format(caplog.records[0])
    assert "checkpoint-000000000008 is passed over: content does not fit the run" in line
    shutil.rmtree(directory.checkpoints / "checkpoint-000000000008")
    rewrite(directory, algorithm, 7, MALFORMED[what])
    with pytest.raises(ResourceError, match="no good checkpoint"):
        state(invocation, directory, algorithm)


def test_what_was_trained_on_after_the_checkpoint_is_rolled_back(caplog):
    """Learner and actors were killed at once; the accounts beside the checkpoints were written a moment before."""
    first = begun()
    save(*first)
    directory = first[1]
    account = {"produced": 500, "received": 450, "lost": 0, "dropped_by_worker": {}}
    worker = {"name": "actor-0", "incarnation": 5, "role": "actor", "index": 0, "generation": 0, "closed": False}
    worker |= {"expected": 9, "ahead": [], "account": account}
    registry = {"workers": [worker], "generations": [], "forgotten": -1, "named": -1}
    found = {"protocol": PROTOCOL_VERSION, "ledger": {"produced": 500, "trained": 450, "dropped": {}}, "registry": registry}
    run_id = yaml.safe_load(directory.config.read_text())["run"]["id"]
    directory.accounts.write_text(json.dumps({"run_id": run_id, "session": found}))
    _, session = state(*begun("--resume"))
    session.check_ledger()
    assert session.ledger.as_dict()["dropped"]["rolled_back"] == 450
    assert session.ledger.in_flight == 50
    directory.accounts.write_text("{")
    with caplog.at_level(logging.WARNING):
        _, session = state(*begun("--resume"))
    assert session.ledger.produced == 0
    assert "accounts_skipped" in caplog.text
