"""The learner's root on bad input: one line that says what to do, exit code 2, and nothing on disk."""

from __future__ import annotations

import json
import logging
import socket
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.algorithms.trajectories import TrajectoryLearner
from common.observability.learner_stats import UploadStats
from common.runtime import checkpoint_files, checkpoints
from common.runtime.run_directory import RunDirectory, held
from common.transport.curve import make
from common.transport.zmq_socket import LINGER
from services.cli.train.supervisor import Timeouts
from services.learner import __main__ as module
from services.learner import resume
from services.learner.__main__ import main
from services.learner.loop import STOP_SECONDS
from services.learner.ranks import Joined
from services.learner.startup import with_run_id

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def _quiet(tmp_path, monkeypatch):
    """An empty folder, and a log that is as it was afterwards."""
    monkeypatch.chdir(tmp_path)
    before, level = list(logging.getLogger().handlers), logging.getLogger().level
    yield
    logging.getLogger().handlers[:] = before
    logging.getLogger().setLevel(level)


@pytest.fixture
def taken():
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def refused(words, capsys):
    """The one line on stderr of a learner that does not start."""
    assert main(["learner.bind=tcp://127.0.0.1:0", *words]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert lines[0].startswith("rookery learner: error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config", "pogn"], ["'pogn'", "did you mean pong?"]),
        (["env.num_env=4"], ["env.num_env", "did you mean num_envs?"]),
        (["algorithm.gamma=2"], ["algorithm.gamma", "found 2"]),
        (["learner.batch=two"], ["learner.batch", "'two'"]),
        (["env.id=CartPol-v1"], ["CartPol-v1", "CartPole-v1"]),
        (["env.id=ALE/Pogn-v5"], ["ALE/Pogn-v5", "ALE/Pong-v5"]),
        (["env.entry_point=nowhere.at_all:build"], ["nowhere.at_all"]),
        (["env.entry_point=common.envs.probes:nothing"], ["nothing", "common.envs.probes"]),
        (["--config", "pendulum-td3", "env.id=CartPole-v1"], ["found 2 discrete actions", "such as algorithm.name=dqn"]),
        (["--config", "pendulum-sac", "env.id=CartPole-v1"], ["sac needs", "found 2 discrete", "such as algorithm.name=dqn"]),
        (["--config", "cartpole-dqn", "algorithm.epochs=3"], ["it is a setting of ppo and pqn, and algorithm.name is dqn"]),
        (
            ["--config", "cartpole-dqn", "algorithm.replay_capacity=1000000000000"],
            ["replay memory", "at most", "GB; lower algorithm.replay_capacity"],
        ),
        (["--config", "cartpole-dqn", "env.id=Pendulum-v1"], ["dqn", "one of n actions"]),
        (["--config", "cartpole-dqn", "algorithm.n_step=40"], ["algorithm.n_step", "found 40", "rollout.length"]),
        (["--resume"], ["no run to resume", "--run-dir"]),
        (["--resume", "--run-dir", "nowhere"], ["no run to resume", "nowhere"]),
    ],
)
def test_a_wrong_setting_costs_one_line_and_leaves_nothing(words, says, capsys):
    """Each slip: what was found, what was wanted, exit code 2, and an empty folder."""
    line = refused(words, capsys)
    for word in says:
        assert word in line
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("key", ["learner.bind=tcp://127.0.0.1:{}", "metrics.port={}"])
def test_a_port_in_use_leaves_no_run_directory(key, taken, capsys):
    """Another run is going on: neither its port nor the disk is touched."""
    line = refused(["--run-dir", "run", key.format(taken)], capsys)
    assert str(taken) in line
    assert "in use" in line
    assert list(Path().iterdir()) == []


def test_a_gpu_without_memory_left_is_named(monkeypatch, capsys):
    """The same batch would not fit after a restart either: no bug, and no traceback."""
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.15 GiB of which 1.25 GiB is free. Including 9 GiB."

    def train(_):
        raise torch.OutOfMemoryError(text)

    monkeypatch.setattr(module.TrainLoop, "run", train)
    line = refused(["--run-dir", "run"], capsys)
    assert "found CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.15 GiB of which 1.25 GiB is free; use " in line


def test_a_port_in_use_of_another_rank_is_found_before_the_run_begins(taken, monkeypatch, capsys):
    """Rank 1 of a new run: it takes part in nothing, so rank 0 has not begun to train either."""

    class Group:
        index, count = 1, 2

        def __getattr__(self, operation):
            pytest.fail(f"takes part in {operation} before it has its port")

    @contextmanager
    def joined(invocation, _):
        yield Joined(group=Group(), invocation=with_run_id(invocation), local_rank=0, local_ranks=1)

    monkeypatch.setattr(module, "join_ranks", joined)
    line = refused(["--run-dir", "run", "learner.ranks=2", f"learner.bind=tcp://127.0.0.1:{taken}"], capsys)
    assert str(taken) in line
    assert "in use" in line
    assert list(Path().iterdir()) == []


def test_a_run_directory_that_cannot_be_written_is_named(capsys):
    """A file stands where the folder should be; so would a read-only disk."""
    Path("file").write_text("here")
    line = refused(["--run-dir", "file/run"], capsys)
    assert "run directory cannot be written" in line
    assert "run.dir" in line
    assert Path("file").read_text() == "here"


def test_a_run_directory_of_another_run_is_not_touched(capsys):
    """The same command twice must not mix two runs."""
    folder = Path("run")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    line = refused(["--run-dir", "run"], capsys)
    assert "in use" in line
    assert "--resume" in line
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.fixture
def finished(capsys):
    """The folder of a run that has ended with a checkpoint."""
    words = ["--config", "cartpole", "target.env_steps=256", "target.wall_seconds=0.05", "--run-dir", "run"]
    assert main(["learner.bind=tcp://127.0.0.1:0", *words]) == 0
    capsys.readouterr()
    (place,) = Path("run/checkpoints").glob("checkpoint-*")
    return place


@pytest.mark.usefixtures("finished")
def test_a_folder_that_a_learner_writes_to_is_no_other_learners(capsys):
    """By hand, in two terminals."""
    with held(RunDirectory(Path("run"))):
        line = refused(["--resume", "--run-dir", "run"], capsys)
    assert "a run is under way in this directory, or a series or sweep of runs: found run" in line


@pytest.mark.usefixtures("finished")
def test_the_ports_of_a_run_in_progress_are_not_touched(monkeypatch, capsys):
    """`rookery train` restarts its learner on the same ports, which another learner must not bind, not even for a moment."""
    monkeypatch.setattr("services.learner.__main__.ZmqServer", lambda *_, **__: pytest.fail("bound the port"))
    with held(RunDirectory(Path("run"))):
        assert "a run is under way" in refused(["--resume", "--run-dir", "run"], capsys)
    assert "run directory is in use" in refused(["--run-dir", "run"], capsys)


def test_a_run_without_any_worker_ends_with_its_budget_and_leaves_everything(finished):
    """No worker came: the summary is JSON, with zeros."""
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["preset"], summary["solved"], summary["env_steps"]) == ("cartpole", False, 0)
    assert finished.name == "checkpoint-000000000000"
    assert Path("run/config.yaml").exists()
    assert Path("run/command.txt").read_text().startswith("rookery learner ")


def test_the_first_line_names_the_keys_of_workers_that_the_learner_accepts(capsys):
    """One that was revoked, and is in the folder still, is seen there."""
    make(Path("keys"), ["worker", "lab", "cluster"])
    Path("keys/learner/worker.key").unlink()
    words = ["learner.bind=tcp://127.0.0.1:0", "--config", "cartpole", "target.wall_seconds=0.05", "--keys", "keys/learner"]
    assert main(words) == 0
    assert ' worker_keys="cluster, lab"\n' in capsys.readouterr().err


def test_a_job_that_is_stopped_is_no_success_and_one_whose_run_ends_is(monkeypatch):
    """A Job counts a pod that ends with exit code 0 as done, and would never start it again after an eviction."""
    words = ["learner.bind=tcp://127.0.0.1:0", "--config", "cartpole", "--run-dir", "run", "--resume-if-found", "--job"]
    with monkeypatch.context() as stopped:
        stopped.setattr(module.Shutdown, "requested", property(lambda _: True))
        assert main(words) == 1
    assert list(Path("run/checkpoints").glob("checkpoint-*"))
    assert main([*words, "target.wall_seconds=0.05"]) == 0


def test_a_stop_without_trackers_and_store_that_answer_leaves_time_for_the_checkpoint(monkeypatch):
    """`rookery train` kills a learner that takes longer, and its run counts as failed."""
    waited, uploaded = {}, []
    tracker = SimpleNamespace(
        name="silent",
        dropped=0,
        lost="",
        write=lambda _: None,
        finish=lambda *_, **__: None,
        close=lambda deadline: waited.setdefault("tracker", deadline - time.monotonic()),
    )
    store = SimpleNamespace(
        stats=UploadStats(),
        after=lambda save: uploaded.append(save.__name__) or save,
        close=lambda seconds=60.0: waited.setdefault("store", seconds),
    )
    monkeypatch.setattr(module, "open_trackers", lambda *_: [tracker])
    monkeypatch.setattr(module, "open_uploads", lambda *_: store)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(waited.values())))
    monkeypatch.setattr(module.Shutdown, "requested", property(lambda _: True))
    assert main(["learner.bind=tcp://127.0.0.1:0", "--config", "cartpole", "--run-dir", "run"]) == 0
    assert list(waited) == ["tracker", "store"]
    assert uploaded == ["save", "save_best"]
    assert STOP_SECONDS + sum(waited.values()) + LINGER <= Timeouts().learner_stop - 5.0


@pytest.mark.parametrize(("updates", "init", "examples"), [(0, "", [(4,)]), (1, "", []), (0, "other", [])])
def test_examples_begin_the_normalisation_of_random_weights_alone(updates, init, examples, monkeypatch):
    """Trained weights belong to the normalisation that they were saved with."""
    calibrated = []
    monkeypatch.setattr(TrajectoryLearner, "calibrate", lambda _, frames: calibrated.append(frames.shape[1:]))
    monkeypatch.setattr(module.RunRecord, "updates", property(lambda _: updates, lambda *_: None))
    monkeypatch.setattr(resume, "_load_initial_weights", lambda *_: None)
    monkeypatch.setattr(module.Shutdown, "requested", property(lambda _: True))
    words = ["--config", "cartpole", "--run-dir", "run", "model.normalize_observation=true", f"run.init={init}"]
    assert main(["learner.bind=tcp://127.0.0.1:0", *words]) == 0
    assert calibrated == examples


def test_a_truncated_checkpoint_is_refused_and_left_alone(finished, capsys):
    """The disk was full when it was copied."""
    tensors = finished / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-7])
    line = refused(["--config", "cartpole", "--run-dir", "run", "--resume"], capsys)
    assert "no good checkpoint" in line
    assert "bytes" in line
    assert finished.exists()


def test_a_checkpoint_of_another_architecture_is_refused(finished, capsys):
    """Resumed with a wider net by mistake."""
    line = refused(["--config", "cartpole", "model.hidden=[32]", "--run-dir", "run", "--resume"], capsys)
    assert "is of another architecture: found model.hidden=[64, 64], wanted model.hidden=[32]; resume with" in line
    assert str(finished) in line


def test_a_resumed_run_begins_where_it_ended(finished, capsys):
    """Same run id, so that actors that still live may come back."""
    before = json.loads(Path("run/summary.json").read_text())
    words = ["--config", "cartpole", "target.env_steps=256", "target.wall_seconds=0.05", "--run-dir", "run", "--resume"]
    assert main(["learner.bind=tcp://127.0.0.1:0", *words]) == 0
    assert json.loads(Path("run/summary.json").read_text())["run_id"] == before["run_id"]


@pytest.mark.usefixtures("finished")
def test_settings_that_changed_at_a_resume_are_written_at_the_start(monkeypatch):
    """A run that is killed writes no summary; and the settings of before bring it back to one without changes."""
    monkeypatch.setattr(module.Journal, "summary", lambda *_, **__: None)
    monkeypatch.setattr(module.RunCheckpoints, "save", lambda _: None)
    words = ["--config", "cartpole", "target.wall_seconds=0.05", "--run-dir", "run", "--resume"]
    changes = [{"env_steps": 0, "settings": ["target.env_steps was 256, is 512"]}]
    for env_steps, written in ((512, changes), (256, [])):
        assert main(["learner.bind=tcp://127.0.0.1:0", *words, f"target.env_steps={env_steps}"]) == 0
        assert json.loads(Path("run/settings_changed.json").read_text()) == written


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize(("change", "kept"), [("env.num_envs=4", True), ("env.kwargs.sutton_barto_reward=true", False)])
def test_a_run_that_goes_on_in_another_environment_has_no_summary_of_before(change, kept, monkeypatch):
    """`rookery compare` showed its result, until the first row of the curve: of a run that is killed before, for good."""
    monkeypatch.setattr(module.Journal, "summary", lambda *_, **__: None)
    words = ["--config", "cartpole", "target.env_steps=256", "target.wall_seconds=0.05", "--run-dir", "run", "--resume"]
    assert main(["learner.bind=tcp://127.0.0.1:0", *words, change]) == 0
    assert Path("run/summary.json").exists() == kept


@pytest.mark.usefixtures("finished")
def test_a_resumed_learner_accepts_connections_once_its_checkpoint_is_read(monkeypatch):
    """A flood while it reads for minutes would fill the memory: the guard runs in the intake thread, which starts later."""
    steps, read, bind = [], checkpoint_files.read, module.ZmqServer
    monkeypatch.setattr(checkpoints, "read", lambda place: steps.append("read") or read(place))
    monkeypatch.setattr(module, "ZmqServer", lambda *how, **keys: steps.append("bind") or bind(*how, **keys))
    words = ["--config", "cartpole", "target.env_steps=256", "target.wall_seconds=0.05", "--run-dir", "run", "--resume"]
    assert main(["learner.bind=tcp://127.0.0.1:0", *words]) == 0
    assert steps == ["read", "bind"]


@pytest.mark.usefixtures("finished")
def test_a_learner_that_is_resumed_on_a_full_disk_trains_and_says_what_is_lost(no_room, capsys):
    """It ended with a traceback, and an orchestrator restarted it for ever."""
    words = ["--config", "cartpole", "target.env_steps=256", "target.wall_seconds=0.05", "--run-dir", "run", "--resume"]
    with no_room():
        assert main(["learner.bind=tcp://127.0.0.1:0", *words]) == 0
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    events = ("learner_started", "results_lost", "results_incomplete", "learner_ended")
    assert [shown.count(event) for event in events] == [1, 1, 1, 1]
    assert "WARNING checkpoint_failed" in shown
    (incomplete,) = [line for line in shown.splitlines() if "results_incomplete" in line]
    assert "rows and points" in incomplete
    assert "checkpoint save did not finish" in incomplete
