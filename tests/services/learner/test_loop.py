"""Tests of the train loop between a scripted intake and an algorithm that trains nothing."""

from __future__ import annotations

import json
import math
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from common.algorithms.api import UpdateResult
from common.config.schema import Settings
from common.config.sections import ActorSettings, CheckpointSettings, LearnerSettings, RunSettings, TargetSettings
from common.envs.spec import ActionSpec, EnvSettings, EnvSpec, Leaf
from common.errors import DropReason, ResourceError
from common.models import snapshot
from common.observability.health import Health
from common.observability.learner_stats import PHASES, IntakeStats, LearnerStats
from common.observability.metrics import Phases
from common.protocol.events import Evaluated, Experience, WorkerKey
from common.protocol.messages import Evaluation, Snapshot
from common.runtime.checkpoints import CheckpointStore, by_version
from common.runtime.run_directory import create
from services.learner.coverage import Coverage
from services.learner.intake import HUNG_SECONDS
from services.learner.journal import Journal
from services.learner.loop import END_SECONDS, STOP_SECONDS, WAIT_SECONDS, TrainLoop
from services.learner.ranks import Agreement
from services.learner.record import RunRecord
from services.learner.results import Results
from services.learner.saving import RunCheckpoints
from tests.ranks import ThreadRanks, on_every_rank

pytestmark = pytest.mark.service

STEPS = 8  # env steps of one trajectory
PATIENCE = 120.0  # seconds; only a fault lets it pass
LEDGER = {"produced": 0, "trained": 0, "queued": 0, "in_flight": 0, "dropped": {str(reason): 0 for reason in DropReason}}


class FakeIntake:
    """Returns one list of the script per `take`, and records every call."""

    def __init__(self, clock):
        """An empty script."""
        self.script, self.evaluations, self.log, self.clock = [], [], [], clock
        self.stats = IntakeStats(ledger=LEDGER)
        self.asked, self.waits = [], []

    def take(self, count, timeout, *, patience):
        """The next list of the script; an empty script passes the time."""
        self.asked.append(count)
        self.waits.append(timeout)
        self.patience = patience
        self.clock.now += timeout or 0.01  # so that a loop that never waits ends, too
        return self.script.pop(0) if self.script else []

    def take_round(self, choose, timeout):
        """Return what `choose` takes of the next list of the script; an empty script requests the end."""
        self.clock.now += timeout
        if not self.script:
            self.stops()
        return choose(self.script.pop(0)) if self.script else []

    def stops(self):
        """For the test to end the run."""

    def complete(self, items, reason=None):
        """Record the messages and their end."""
        if items:
            self.log.append(("complete", [item.seq for item in items], reason))

    def publish(self, snapshot):
        """Remember the version and a parameter."""
        self.log.append(("publish", snapshot.version, float(snapshot.arrays["parameters"][0])))

    def drain(self, reason, deadline_seconds):
        """Remember the words."""
        self.log.append(("drain", reason, deadline_seconds))

    def wait_for_goodbyes(self, timeout, *, alive, abort):
        """All workers leave at once."""
        alive()
        self.log.append(("wait", timeout, abort()))
        return True

    def take_evaluations(self):
        """Return the evaluations that the test put there."""
        taken, self.evaluations = self.evaluations, []
        return taken

    def session_state(self):
        """Some JSON."""
        return {"workers": [], "ledger": LEDGER}

    def update_stats(self):
        """Remember it."""
        self.log.append(("update_stats",))

    def finish(self):
        """Remember it."""
        self.log.append(("finish",))

    def said(self, *kinds):
        """The remembered words of these kinds."""
        return [entry for entry in self.log if entry[0] in kinds]


class FakeAlgorithm:
    """Counts its updates in its only weight."""

    long, steps = 0, 0

    def __init__(self, log):
        """One weight, at zero."""
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.batches, self.metrics, self.progress, self.log = [], {"policy_loss": 0.5, "entropy": math.nan}, [], log

    def between_steps(self):
        """For the test to act."""

    def ingest(self, samples):
        """The batch is its samples."""
        return samples

    def update(self, batch, progress, stop):
        """Train, in at most `long` gradient steps until `stop`."""
        self.batches.append([sample.version for sample in batch])
        self.progress.append(progress)
        for _ in range(self.long):
            self.between_steps()
            if stop():
                break
            self.steps += 1
        with torch.no_grad():
            self.model.weight += 1.0
        return UpdateResult(samples=STEPS, metrics=self.metrics)

    def observe(self, samples):
        """Record the messages, and the parameter."""
        self.log.append(("observe", [sample.seq for sample in samples], self.model.weight.item()))

    def state_dict(self):
        """All there is."""
        return {"weight": self.model.weight.detach().clone()}


class Clock:
    """Time that passes while the intake is asked."""

    now = 100.0

    def __call__(self):
        """The time."""
        return self.now


class Scene:
    """A learner and all that it meets."""

    def __init__(self, folder, *, batch=1, batch_seconds=None, lag=4, every_seconds=1e6, envs=8, **target):
        """A run of at most 1,000 env steps that never stops by itself before."""
        self.clock = Clock()
        self.intake = FakeIntake(self.clock)
        self.algorithm = FakeAlgorithm(self.intake.log)
        self.settings = Settings(
            learner=LearnerSettings(batch=batch, batch_seconds=batch_seconds, max_policy_lag=lag),
            checkpoint=CheckpointSettings(every_seconds=every_seconds),
            env=EnvSettings(num_envs=envs),
            target=TargetSettings(**{"env_steps": 100_000, "wall_seconds": 60.0} | target),
        )
        self.directory = create(folder / "run", config="run: {}\n", command=["rookery"])
        self.record = RunRecord(settings=self.settings, run_id="run-1", frame_skip=4, started_at=100.0)
        self.stats, self.saved, self.notes, self.stop = LearnerStats(phases=Phases(PHASES, clock=self.clock)), [], [], False
        self.best, self.agreement, self.masked = [], None, None
        self.disk_full, self.health, self.will_restart = False, Health(clock=self.clock), False
        self.remove_later, self.newest_saved = lambda _: None, lambda: -1

    def save(self, checkpoint):
        """A disk that may be full."""
        if self.disk_full:
            raise ResourceError("checkpoint save did not finish", found="no space")
        self.saved.append(checkpoint)

    def save_best(self, checkpoint):
        """As `save`."""
        if self.disk_full:
            raise ResourceError("checkpoint save did not finish", found="no space")
        self.best.append(checkpoint)

    def run(self):
        """From the start to the end, with its log; the reason."""
        noted = lambda event, **fields: self.notes.append((event, fields))  # noqa: E731
        log = SimpleNamespace(info=noted, warning=noted, log_event=lambda event: noted(event.event, **event.fields))
        with ExitStack() as stack:
            for module in ("loop", "results", "saving"):
                stack.enter_context(patch(f"services.learner.{module}._log", log))
            return self.train()

    def train(self):
        """From the start to the end; the reason."""
        journal = Journal(self.directory, env_steps=0)
        own = {
            "record": self.record,
            "stats": self.stats,
            "agreement": self.agreement,
            "clock": self.clock,
            "masked": self.masked,
        }
        results = Results(journal=journal, **own)
        common = {"algorithm": self.algorithm, "intake": self.intake, "results": results, "health": self.health}
        disk = {"save_checkpoint": self.save, "save_best": self.save_best, "remove_later": self.remove_later}
        disk["newest_saved"] = self.newest_saved
        checkpoints = RunCheckpoints(**common, **disk)
        stopping = lambda: self.stop  # noqa: E731
        loop = TrainLoop(**common, checkpoints=checkpoints, stopping=stopping, will_restart=self.will_restart)
        with closing(journal):
            return loop.run()

    @property
    def summary(self):
        """Return the content of summary.json."""
        return json.loads(self.directory.summary.read_text())


def item(seq, *, version=0, returns=(), arrived_at=100.0):
    """A rollout in the queue."""
    arrays = {"episode_return": np.array(returns, np.float32), "episode_length": np.ones(len(returns), np.int32)}
    worker = WorkerKey(name="actor-0", incarnation=1)
    return Experience(worker=worker, seq=seq, version=version, env_steps=STEPS, arrays=arrays, arrived_at=arrived_at)


def evaluation(mode, *returns, version=1, known=True):
    """Return the report of an evaluator, with the policy that it played where that is `known`."""
    arrays = {"episode_return": np.array(returns, np.float32), "episode_length": np.ones(len(returns), np.int32)}
    weight = np.full(1, version / 4, np.float32)
    played = Snapshot(version=version, env_steps=version * 100, precision="fp32", layout="weights", arrays={"parameters": weight})
    return Evaluated(message=Evaluation(version=version, mode=mode, arrays=arrays), snapshot=played if known else None)


def test_each_batch_gives_a_policy_that_is_published_at_once(tmp_path):
    """Version 0 is there before any experience; version n has had n updates."""
    scene = Scene(tmp_path, env_steps=3 * STEPS * 128)
    scene.intake.script = [[item(0)], [], [item(1, version=1)], [item(2, version=2)]]
    assert scene.run() == "wall-clock budget spent"
    steps = [[("observe", [seq], seq + 1.0), ("publish", seq + 1, seq + 1.0), ("complete", [seq], None)] for seq in range(3)]
    assert scene.intake.said("observe", "publish", "complete") == [("publish", 0, 0.0), *chain.from_iterable(steps)]
    assert scene.algorithm.batches == [[0], [1], [2]]
    assert [(p.version, p.env_steps) for p in scene.algorithm.progress] == [(0, 0), (1, STEPS), (2, 2 * STEPS)]
    assert {p.env_steps_planned for p in scene.algorithm.progress} == {scene.settings.target.env_steps}
    assert (scene.summary["env_steps"], scene.summary["learner_updates"]) == (3 * STEPS, 3)


def test_results_that_take_long_to_write_have_a_phase_of_their_own(tmp_path):
    """On a slow disk the doctor said that the learner lacks CPU: publishing, which needs a core, seemed to take all the time."""

    class SlowDisk(Journal):
        def update(self, *given, **more):
            scene.clock.now += 3.0
            super().update(*given, **more)

    scene = Scene(tmp_path)
    scene.intake.script = [[item(0)]]
    with patch(f"{__name__}.Journal", SlowDisk):
        scene.run()
    assert scene.stats.phases.seconds()["record"] == 3.0


def test_the_share_of_allowed_actions_is_a_metric_where_actions_are_masked(tmp_path):
    scene = Scene(tmp_path)
    leaves = (Leaf(path="a", shape=(2,), dtype="uint8"), Leaf(path="action_mask", shape=(4,), dtype="uint8", choices=(2,) * 4))
    action = ActionSpec(choices=(4,), shape=())
    frame = {"observation_shape": (6,), "observation_dtype": "uint8", "frame_stack": 2, "frame_skip": 1}
    scene.masked = EnvSpec(**frame, action=action, leaves=leaves, action_mask=True)
    experience = item(0)
    experience.arrays["obs"] = np.zeros((4, 2, 6), np.uint8)  # a row of the stack before, two rows, and one that was not acted on
    experience.arrays["obs"][1:3] = [9, 9, 1, 0, 0, 0]
    experience.arrays["obs"][2, 1] = 1
    experience.arrays["valid"] = np.array([[True, True], [True, False]])
    scene.intake.script = [[experience], [item(1)]]  # the second, of gradients, has no observations
    scene.run()
    assert scene.stats.training_metrics["allowed_actions"] == 0.25


def test_a_replay_memory_that_shrinks_is_in_the_log_once(tmp_path):
    """More actors joined than it is laid out for, and stay."""
    scene = Scene(tmp_path)
    scene.algorithm.metrics = {"replay_incomplete": 0.34}
    scene.intake.script = [[item(0)], [item(1)]]
    scene.run()
    (fields,) = [fields for event, fields in scene.notes if event == "replay_shrinks"]
    assert fields == {"incomplete": 0.34, "fix": "set actor.count to all actors that join"}


def test_stale_experience_is_dropped_and_its_place_in_the_batch_taken_by_fresh(tmp_path):
    """An actor froze for a while: what it then sends is older than the limit, and the batch waits for something younger."""
    scene = Scene(tmp_path, batch=2, lag=3)
    scene.record.version = 10
    scene.intake.script = [[item(0, version=6), item(1, version=7)], [item(2, version=10)]]
    scene.run()
    assert scene.intake.said("complete") == [("complete", [0], DropReason.STALE), ("complete", [1, 2], None)]
    assert scene.algorithm.batches == [[7, 10]]
    assert scene.intake.asked[:3] == [2, 1, 2]
    assert scene.summary["env_steps"] == 2 * STEPS
    assert scene.summary["policy_lag"] == {"min": 0, "mean": 1.5, "max": 3}
    assert scene.stats.policy_lag.read == (2, 3.0)  # how many, and their sum: the metric


def test_an_incomplete_batch_is_trained_on_when_its_first_message_has_waited_long_enough(tmp_path):
    """One of four actors was killed in the middle of a group: the update comes at the deadline, with what the others sent."""
    scene = Scene(tmp_path, batch=4, batch_seconds=0.9)
    first, second = [item(seq, arrived_at=100.0) for seq in range(3)], [item(3, version=1, arrived_at=101.5)]
    scene.intake.script = [[], [], [], [], first, second]
    updated_at = []
    update = scene.algorithm.update
    scene.algorithm.update = lambda *given: updated_at.append(scene.clock.now) or update(*given)
    scene.run()
    assert scene.algorithm.batches == [[0, 0, 0], [1]]
    assert updated_at == pytest.approx([101.0, 102.4], abs=WAIT_SECONDS + 1e-6)
    assert scene.intake.patience == 0.9
    assert scene.summary["env_steps"] == 4 * STEPS


def test_the_rest_of_a_batch_with_stale_messages_waits_no_longer_than_any_other(tmp_path):
    """Two of three were too old: the third is not kept waiting for ever."""
    scene = Scene(tmp_path, batch=3, batch_seconds=2.0, lag=1)
    scene.record.version = 5
    scene.intake.script = [[item(0, version=1), item(1, version=2), item(2, version=5)], [], [item(3, version=5)]]
    scene.run()
    assert scene.algorithm.batches == [[5, 5]]
    assert scene.intake.asked[:3] == [3, 2, 2]


def test_without_a_deadline_a_batch_waits_until_it_is_full(tmp_path):
    """The default: every update is on as much as was asked for."""
    scene = Scene(tmp_path, batch=2)
    scene.intake.script = [[item(0)]]
    scene.run()
    assert scene.algorithm.batches == []
    assert scene.intake.patience == math.inf
    assert scene.intake.said("complete") == [("complete", [0], DropReason.RUN_ENDED)]


def test_the_run_ends_at_its_target(tmp_path):
    """A hundred episodes at the target: solved, and nothing more is trained."""
    scene = Scene(tmp_path, mean100=5.0)
    scene.intake.script = [[item(0, returns=[5.0] * 100)], [item(1)]]
    assert scene.run() == "target reached"
    assert scene.summary["solved"]
    assert scene.summary["mean100"] == 5.0
    assert scene.intake.said("drain", "wait", "finish") == [
        ("drain", "target reached", END_SECONDS),
        ("wait", END_SECONDS, False),
        ("finish",),
    ]


def test_alerts_can_ask_whether_the_run_trains_and_what_its_limits_are(tmp_path):
    """A learner that lets its workers go, or stays after the end, must not look like one that is stuck."""
    scene = Scene(tmp_path, lag=3, every_seconds=7.0)
    seen, take, wait = [], scene.intake.take, scene.intake.wait_for_goodbyes
    scene.intake.take = lambda *asked, **how: seen.append(scene.stats.training) or take(*asked, **how)
    scene.intake.wait_for_goodbyes = lambda *asked, **how: seen.append(scene.stats.training) or wait(*asked, **how)
    before = scene.stats.training
    scene.run()
    assert (before, seen[0], seen[-2], seen[-1], scene.stats.training) == (0, 1, 1, 0, 0)
    assert scene.stats.policy_lag_limit == 3
    assert scene.stats.checkpoint_interval == 7.0


def test_the_run_ends_when_its_env_steps_are_spent(tmp_path):
    """The budget is trained on to the end, and not one batch more."""
    scene = Scene(tmp_path, env_steps=2048)
    scene.record.env_steps = 2048 - STEPS
    scene.intake.script = [[item(0)], [item(1)]]
    assert scene.run() == "env step budget spent"
    assert scene.summary["env_steps"] == 2048
    assert not scene.summary["solved"]


def test_sigterm_saves_the_work_and_drains_the_workers_in_little_time(tmp_path):
    """SIGTERM: what was taken and not trained on is dropped by name, the workers get seconds, all is saved."""
    scene = Scene(tmp_path, batch=2, lag=0)
    scene.stop = True
    scene.intake.script = [[item(0), item(1, version=-1)]]
    assert scene.run() == "stopped"
    assert scene.intake.said("complete", "drain", "wait", "finish") == [
        ("complete", [1], DropReason.STALE),
        ("complete", [0], DropReason.RUN_ENDED),
        ("drain", "stopped", STOP_SECONDS),
        ("wait", STOP_SECONDS, False),
        ("finish",),
    ]
    assert len(scene.saved) == 1
    assert scene.summary["env_steps"] == 0


def test_a_learner_that_will_restart_saves_its_work_and_drains_no_worker(tmp_path):
    """A pod is moved: its actors wait for the next learner and send again what it had not taken."""
    scene = Scene(tmp_path, batch=2)
    scene.stop = scene.will_restart = True
    scene.intake.script = [[item(0)]]
    assert scene.run() == "stopped"
    ends = scene.intake.said("complete", "drain", "wait", "update_stats", "finish")
    assert ends == [("complete", [0], DropReason.RUN_ENDED), ("update_stats",)]
    assert len(scene.saved) == 1
    assert scene.summary["env_steps"] == 0
    assert scene.record.phase != "finished"
    assert not scene.stats.ended


@pytest.mark.parametrize(("will_restart", "last"), [(True, "update_stats"), (False, "finish")])
def test_a_learner_that_ends_is_healthy_while_it_waits_for_a_slow_disk(tmp_path, will_restart, last):
    scene, seen = Scene(tmp_path), []
    scene.stop, scene.will_restart = True, will_restart

    def slow():
        scene.clock.now += HUNG_SECONDS - 1.0
        seen.append(scene.health.liveness().ok)

    setattr(scene.intake, last, slow)
    assert scene.run() == "stopped"
    assert seen == [True]
    assert len(scene.saved) == 1


def test_a_learner_that_will_restart_drains_the_workers_when_the_run_is_over(tmp_path):
    """The target is reached: there will be no next learner to wait for. Its status later is that of the end."""
    scene = Scene(tmp_path, env_steps=2048)
    scene.will_restart, scene.record.env_steps = True, 2048
    scene.run()
    assert scene.intake.said("drain", "finish") == [("drain", "env step budget spent", END_SECONDS), ("finish",)]
    assert scene.stats.ended
    before = scene.stats.phases.seconds()
    scene.clock.now += 1000.0
    assert scene.stats.phases.seconds() == before
    status = scene.record.status(scene.intake.stats, scene.clock())
    assert status["phase"] == "finished"
    assert status.items() >= (scene.summary | {"frames_per_second": status["frames_per_second"]}).items()


def test_a_stop_while_the_last_evaluation_plays_is_hurried(tmp_path):
    """Ctrl-C after the target was reached: nobody waits for the evaluator any more."""
    scene = Scene(tmp_path, env_steps=2048)
    scene.record.env_steps = 2048
    waits = scene.intake.wait_for_goodbyes

    def signalled(timeout, *, alive, abort):
        scene.stop = True
        return waits(timeout, alive=alive, abort=abort)

    scene.intake.wait_for_goodbyes = signalled
    assert scene.run() == "env step budget spent"
    assert scene.intake.said("wait") == [("wait", END_SECONDS, True)]


def test_a_resumed_run_has_the_evaluation_of_before_in_its_metrics(tmp_path):
    scene = Scene(tmp_path)
    scene.record.last_evaluation = {"version": 1, "mode": "greedy", "mean": 3.0, "episodes": 2}
    scene.run()
    assert scene.stats.evaluation_return_means["greedy"] == 3.0


def test_a_tracker_gets_the_rate_from_update_to_update_and_none_before_the_second(tmp_path):
    """An update every 12 s: the point of an update is written before the loop's next turn, in which the metric follows."""
    scene = Scene(tmp_path, wall_seconds=100.0)
    scene.intake.script = [[item(0)], *[[]] * 11, [item(1)], *[[]] * 11, [item(2)]]
    seen, update = [], Journal.update

    def take(*_, **__):
        scene.clock.now += 1.0
        return scene.intake.script.pop(0)

    def watch(journal, env_steps, *, means, newest, returns):
        seen.append((newest.get("throughput/frames_per_second"), scene.stats.frames_per_second))
        update(journal, env_steps, means=means, newest=newest, returns=returns)
        scene.stop = len(seen) == 3

    scene.intake.take = take
    with patch.object(Journal, "update", watch):
        scene.run()
    assert seen == [(None, 0.0), (4 * STEPS / 12, 0.0), (4 * STEPS / 12, 4 * STEPS / 12)]


def test_the_curve_has_no_return_before_each_environment_has_ended_an_episode(tmp_path):
    """A mean over the first to end is one over short episodes: a sweep took trials with many environments for good ones."""
    scene, returns = Scene(tmp_path, envs=2), []
    scene.intake.script = [[item(0, returns=[-1.0])], [item(1)], [item(2, returns=[-5.0])]]
    with patch.object(Journal, "update", lambda *_, newest, **__: returns.append(newest.get("episode/return_mean100"))):
        scene.run()
    assert returns == [None, None, -3.0]
    rows = [row.split(",") for row in scene.directory.learning_curve_csv.read_text().splitlines()[1:]]
    assert [row[2] for row in rows] == ["", "-3.0"]


def test_while_the_last_evaluation_is_played_a_run_is_done_and_its_curve_complete(tmp_path):
    """Games that take 30 s neither date the last row of the curve, nor leave an estimate of the time to the budget."""
    scene, seen = Scene(tmp_path, env_steps=10**9, wall_seconds=3600.0, mean100=3.0), []
    scene.intake.script = [[item(seq, returns=[3.0] * 50)] for seq in range(2)]
    waits = scene.intake.wait_for_goodbyes

    def play(timeout, *, alive, abort):
        status = scene.record.status(IntakeStats(), scene.clock.now)
        rates = status["frames_per_second"]["last_60s"], scene.stats.frames_per_second
        seen.append((status["progress"], *rates, scene.stats.seconds_left))
        scene.clock.now += 30.0
        return waits(timeout, alive=alive, abort=abort)

    scene.intake.wait_for_goodbyes = play
    assert scene.run() == "target reached"
    assert seen == [({"fraction": 1.0, "seconds_left": None}, 0.0, 0.0, None)]
    rows = [row.split(",") for row in scene.directory.learning_curve_csv.read_text().splitlines()[1:]]
    assert float(rows[-1][0]) == scene.summary["solved_at"]["wall_seconds"] < 30.0


def test_evaluations_are_recorded_wherever_people_look(tmp_path):
    """Summary, metrics, learning curve and log; also the one that comes while the run ends."""
    scene = Scene(tmp_path)
    scene.intake.evaluations = [evaluation("sampled", 1.0), evaluation("greedy", 2.0, 4.0)]
    scene.run()
    assert scene.summary["last_evaluation"] == {"version": 1, "mode": "greedy", "mean": 3.0, "episodes": 2}
    assert scene.stats.evaluation_return_means["greedy"] == 3.0
    assert scene.stats.evaluation_return_means["sampled"] == 1.0
    assert [row.split(",")[-1] for row in scene.directory.learning_curve_csv.read_text().splitlines()[1:]] == ["3.0", ""]
    assert [event for event, _ in scene.notes] == ["evaluated", "evaluated"]


def test_an_evaluation_is_entered_at_the_env_steps_of_the_policy_that_was_played(tmp_path):
    """It arrives updates later. The rows of returns are of one update each, the last one too."""
    scene = Scene(tmp_path, evaluation=3.0)
    scene.intake.script = [[item(seq)] for seq in range(3)]
    scene.intake.evaluations = [evaluation("greedy", 1.0, version=0)]
    late = evaluation("greedy", 3.0, version=1)
    between = scene.algorithm.update

    def update(batch, progress, stop):
        scene.intake.evaluations = [late] if progress.version == 2 else []
        return between(batch, progress, stop)

    scene.algorithm.update = update
    scene.run()
    rows = [row.split(",") for row in scene.directory.learning_curve_csv.read_text().splitlines()[1:]]
    assert [(row[1], row[3]) for row in rows if row[3]] == [("0", "1.0"), ("100", "3.0")]
    assert scene.summary["solved_at"]["env_steps"] == 100
    trained = [row[1] for row in rows if not row[3]]
    assert len(set(trained)) == len(trained)


def test_the_policy_with_the_best_greedy_evaluation_is_kept(tmp_path):
    """Of these, four are better than all before, or equal and newer; the second is of a policy that is not known any more."""
    scene = Scene(tmp_path)
    scene.intake.evaluations = [
        evaluation("greedy", -7.0, version=1),
        evaluation("greedy", 50.0, version=2, known=False),
        evaluation("sampled", 50.0, version=3),
        evaluation("greedy", 2.0, 4.0, version=4),
        evaluation("greedy", 2.5, version=5),
        evaluation("greedy", 3.5, version=6),
        evaluation("greedy", 1.0, version=7),
        evaluation("greedy", 3.0, 4.0, version=8),
        evaluation("greedy", 3.5, version=8),
    ]
    scene.run()
    assert [(checkpoint.version, checkpoint.env_steps) for checkpoint in scene.best] == [(1, 100), (4, 400), (6, 600), (8, 800)]
    assert [checkpoint.state["policy"].tolist() for checkpoint in scene.best] == [[0.25], [1.0], [1.5], [2.0]]
    assert scene.best[0].architecture == "weights"
    assert scene.summary["best"] == {"version": 8, "mean": 3.5, "episodes": 2, "env_steps": 800}


def test_a_full_disk_costs_the_best_policy_and_not_the_run(tmp_path):
    """The policy could not be written: the next that is better than what is on the disk is."""
    scene = Scene(tmp_path)
    scene.disk_full = True
    scene.intake.evaluations = [evaluation("greedy", 9.0)]
    take = scene.intake.take_evaluations

    def freed():
        taken = take()
        if scene.clock.now > 110.0 and scene.disk_full:
            scene.disk_full, scene.intake.evaluations = False, [evaluation("greedy", 5.0, version=2)]
        return taken

    scene.intake.take_evaluations = freed
    assert scene.run() == "wall-clock budget spent"
    assert [event for event, _ in scene.notes][:2] == ["evaluated", "checkpoint_failed"]
    assert scene.stats.checkpoint_failures == 1
    assert scene.summary["best"]["version"] == 2


def test_a_checkpoint_that_fails_costs_a_counter_and_not_the_run(tmp_path):
    """The disk is full for a night: the run goes on, logs each failure, and its summary is written."""
    scene = Scene(tmp_path, every_seconds=10.0)
    scene.disk_full = True
    scene.intake.script = [[item(0)]]
    assert scene.run() == "wall-clock budget spent"
    failures = scene.stats.checkpoint_failures
    assert failures == len([event for event, _ in scene.notes if event == "checkpoint_failed"]) >= 6
    assert scene.stats.checkpoint_last_success == 0
    assert scene.summary["learner_updates"] == 1


def test_an_intake_that_does_not_answer_costs_a_checkpoint_and_not_the_run(tmp_path):
    """The machine stood still for ten seconds: the session's state is missing, and the next checkpoint is soon enough."""
    scene = Scene(tmp_path, every_seconds=10.0)

    def silent():
        raise ResourceError("the intake thread does not answer")

    scene.intake.session_state = silent
    scene.intake.script = [[item(0)]]
    assert scene.run() == "wall-clock budget spent"
    assert scene.stats.checkpoint_failures >= 6
    assert scene.saved == []


def test_whoever_stops_a_run_hears_that_its_work_is_not_saved(tmp_path):
    """Ctrl-C on a full disk: an exit code of 0 would say that the last checkpoint is there. The summary is, if it can be."""
    scene = Scene(tmp_path)
    scene.disk_full = scene.stop = True
    with pytest.raises(ResourceError, match="checkpoint save did not finish"):
        scene.run()
    assert scene.summary["learner_updates"] == 0


def test_a_run_that_ends_by_itself_ends_well_without_its_last_checkpoint(tmp_path):
    """Its result stands in the summary; there is nothing to go on with."""
    scene = Scene(tmp_path, env_steps=2048)
    scene.disk_full, scene.record.env_steps = True, 2048
    assert scene.run() == "env step budget spent"


def test_a_stop_does_not_wait_for_the_end_of_a_long_update(tmp_path):
    """SIGTERM in the first seconds of an update of an hour: it is cut short, counts as one, and its weights are saved."""
    scene = Scene(tmp_path)
    scene.algorithm.long = 1_000_000

    def signalled():
        scene.stop = scene.algorithm.steps == 3

    scene.algorithm.between_steps = signalled
    scene.intake.script = [[item(0)], [item(1)]]
    assert scene.run() == "stopped"
    assert scene.algorithm.steps == 3
    assert scene.intake.said("complete") == [("complete", [0], None)]
    (last,) = scene.saved
    assert (last.version, last.env_steps, float(last.state["weight"])) == (1, STEPS, 1.0)


def test_a_long_update_ends_with_the_budget_of_time(tmp_path):
    """A ratio of 90,000 samples per insert: one message pays for minutes of gradient steps, and the run was given one."""
    scene = Scene(tmp_path)
    scene.algorithm.long = 1_000_000

    def a_second_passes():
        scene.clock.now += 1.0

    scene.algorithm.between_steps = a_second_passes
    scene.intake.script = [[item(0)], [item(1)]]
    assert scene.run() == "wall-clock budget spent"
    assert 50 < scene.algorithm.steps < 60
    assert scene.intake.said("complete") == [("complete", [0], None)]


@pytest.mark.parametrize(("seconds", "alive"), [(100.0, True), (1000.0, False)])
def test_a_long_update_is_alive_for_as_long_as_it_steps(tmp_path, seconds, alive):
    """An hour of gradient steps on one batch is no reason for Kubernetes to restart the learner; a step that hangs is one."""
    scene, answers = Scene(tmp_path, wall_seconds=50_000.0), []
    scene.algorithm.long, scene.intake.script = 36, [[item(0)]]

    def a_step():
        scene.clock.now += seconds
        answers.append(scene.health.liveness())
        scene.stop = len(answers) == 36

    scene.algorithm.between_steps = a_step
    scene.run()
    assert [answer.ok for answer in answers] == [alive] * 36
    assert alive or "while it trains" in answers[0].sentence


def test_checkpoints_come_as_often_as_asked_and_once_more_at_the_end(tmp_path):
    """Sixty seconds at one in twenty, and the last one holds the final weights and counters."""
    scene = Scene(tmp_path, every_seconds=20.0)
    scene.intake.script = [[item(0)], [item(1)]]
    scene.run()
    assert 3 <= len(scene.saved) <= 4
    last = scene.saved[-1]
    assert (last.version, last.env_steps, last.run_id) == (2, 2 * STEPS, "run-1")
    assert float(last.state["weight"]) == 2.0
    assert last.counters["record"]["updates"] == 2
    assert scene.stats.checkpoint_last_success > 0


def test_a_resumed_run_publishes_the_version_it_resumed_at(tmp_path):
    """Actors know versions by number: the first policy after a resume has the number of the checkpoint."""
    scene = Scene(tmp_path)
    scene.record.version = 41
    scene.intake.script = [[item(0, version=41)]]
    scene.run()
    assert [entry[1] for entry in scene.intake.said("publish")] == [41, 42]


def test_metrics_and_tensorboard_have_each_update(tmp_path):
    """Counters are in env steps and in frames, a loss that is not finite is shown as such and ends nothing."""
    scene = Scene(tmp_path)
    scene.intake.script = [[item(0, returns=[3.0, 5.0])], [item(1)]]
    scene.run()
    stats = scene.stats
    assert (stats.env_steps_trained, stats.frame_skip) == (2 * STEPS, 4)
    assert (stats.updates, stats.episodes) == (2, 2)
    assert stats.episode_return_mean == 4.0
    assert stats.policy_version == 2
    assert math.isnan(stats.training_metrics["entropy"])
    assert list(scene.directory.tensorboard.iterdir())


def test_gradient_steps_left_out_of_an_update_are_counted(tmp_path):
    """The metrics of the last update do not have those of the update before."""
    scene = Scene(tmp_path)
    scene.intake.script = [[item(seq)] for seq in range(3)]
    left_out = iter([0.0, 2.0, 0.0])

    def ingest(samples):
        scene.algorithm.metrics = {"nonfinite_steps": next(left_out)}
        return samples

    scene.algorithm.ingest = ingest
    scene.run()
    assert (scene.stats.nonfinite_steps, scene.stats.training_metrics["nonfinite_steps"]) == (2, 0.0)


def test_why_the_target_waits_is_in_the_metrics(tmp_path):
    scene = Scene(tmp_path)
    scene.intake.script = [[item(0)]]
    scene.record.ended([-20.0] * 5, [20] * 5, 0.0, Coverage(42, 20))
    scene.record.ended([], [], 0.0, Coverage(2, 0, left=20))
    scene.run()
    assert scene.stats.episodes_before_leaving == 5
    assert scene.stats.environments_unfinished == scene.record.unfinished > 0


def lockstep_scene(folder, *, lag=4):
    """Two actors that take turns with the learner."""
    scene = Scene(folder)
    scene.settings = Settings(
        run=RunSettings(mode="lockstep"),
        actor=ActorSettings(count=2),
        learner=LearnerSettings(batch=1, max_policy_lag=lag),
        target=TargetSettings(env_steps=2 * 128 * 8),
    )
    scene.record = RunRecord(settings=scene.settings, run_id="run-1", frame_skip=4, started_at=100.0)
    scene.intake.stops = lambda: setattr(scene, "stop", True)
    return scene


def placed(index, seq, *, version, continues=True):
    """A rollout of the actor at a place; another process's where it does not continue the one before."""
    worker = WorkerKey(name=f"actor-{index}", incarnation=1 + (not continues))
    return replace(item(seq, version=version), worker=worker, index=index, continues=continues)


def test_in_lockstep_a_policy_is_published_before_the_credits_of_its_round_return(tmp_path):
    """Batches of one are raised to one of each; the end by a stop is no end that another run would have."""
    scene = lockstep_scene(tmp_path)
    scene.intake.script = [[placed(0, n, version=n), placed(1, n, version=n)] for n in range(2)]
    assert scene.run() == "stopped"
    assert scene.algorithm.batches == [[0, 0], [1, 1]]
    assert [entry[:2] for entry in scene.intake.said("publish", "complete")] == [
        ("publish", 0),
        ("publish", 1),
        ("complete", [0, 0]),
        ("publish", 2),
        ("complete", [1, 1]),
    ]
    assert scene.notes[0] == ("lockstep", {"actors": 2, "trajectories_per_update": 2, "broken": "no"})
    assert scene.notes[-1] == ("lockstep_broken", {"why": "stopped on request, not by the run's own settings"})
    assert scene.summary["parameters_sha256"] == snapshot.digest(scene.algorithm.model)


def test_broken_lockstep_is_logged_once_and_the_run_goes_on(tmp_path):
    """An actor was replaced: the next rounds differ, too, and are trained on without another word."""
    scene = lockstep_scene(tmp_path)
    scene.intake.script = [
        [placed(0, 0, version=0), placed(1, 0, version=0)],
        [placed(0, 1, version=1), placed(1, 0, version=1, continues=False)],
        [placed(0, 2, version=2), placed(1, 1, version=2, continues=False)],
    ]
    scene.run()
    assert len(scene.algorithm.batches) == 3
    (broken,) = [fields for event, fields in scene.notes if event == "lockstep_broken"]
    assert broken["why"].startswith("actor 1 was replaced")
    assert not scene.summary["reproducible"]


def test_in_lockstep_a_round_is_trained_on_without_what_was_stale_in_it(tmp_path):
    """No actor can send more before the others have their credits back: a wait for a full batch would not end."""
    scene = lockstep_scene(tmp_path, lag=0)
    scene.record.version = 1
    scene.intake.script = [[placed(0, 1, version=1), placed(1, 0, version=0)]]
    scene.run()
    assert scene.intake.said("complete") == [("complete", [0], DropReason.STALE), ("complete", [1], None)]
    assert scene.algorithm.batches == [[1]]


# --- several ranks ---


def on_two_ranks(folder, prepare, **changed):
    """Train on two ranks, each with a scene of its own, which `prepare(scene, ranks)` may change; return the scenes."""

    def on_rank(ranks):
        scene = Scene(folder / str(ranks.index), **changed)
        scene.agreement = Agreement(ranks)
        prepare(scene, ranks)
        assert scene.train() == "wall-clock budget spent"
        return scene

    return on_every_rank(2, on_rank)


def test_a_session_that_does_not_answer_on_one_rank_costs_all_ranks_a_checkpoint_and_not_the_run(tmp_path):
    def prepare(scene, ranks):
        def silent():
            raise ResourceError("the intake thread does not answer")

        if ranks.index == 1:
            scene.intake.session_state = silent

    for scene in on_two_ranks(tmp_path, prepare, every_seconds=10.0):
        assert scene.saved == []
        assert scene.stats.checkpoint_failures >= 6
        assert scene.stats.checkpoint_last_success == 0


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_of_one_rank_costs_a_checkpoint_of_all_ranks(tmp_path, full):
    """That of rank 0 comes last, so no resume takes the checkpoints of the others for complete."""

    def prepare(scene, ranks):
        scene.disk_full = ranks.index == full

    first, second = on_two_ranks(tmp_path, prepare, every_seconds=10.0)
    assert first.saved == []
    assert first.stats.checkpoint_failures == second.stats.checkpoint_failures >= 6


def test_checkpoints_that_rank_0_cannot_write_take_the_place_of_none_that_all_ranks_have(tmp_path):
    """Ranks continue from a version that all have: the good checkpoints of the others went while the disk of rank 0 was full."""
    stores = [CheckpointStore(tmp_path / str(rank), keep=1 + rank) for rank in range(2)]

    def prepare(scene, ranks):
        def trained():
            scene.record.version += 1
            return {"ledger": LEDGER}

        def save(checkpoint):
            if ranks.index == 0 and by_version(stores[0].folder):
                raise ResourceError("checkpoint save did not finish", found="no space")
            stores[ranks.index].save(checkpoint)

        scene.intake.session_state = trained
        scene.save = save
        scene.remove_later, scene.newest_saved = stores[ranks.index].remove_later, stores[ranks.index].newest

    _, second = on_two_ranks(tmp_path, prepare, every_seconds=10.0)
    assert second.stats.checkpoint_failures >= 5
    ((good, _),) = by_version(stores[0].folder).items()
    assert list(by_version(stores[1].folder)) == [second.record.version, good]


def test_each_rank_saves_the_ledgers_and_the_policy_lag_of_all(tmp_path):
    def prepare(scene, ranks):
        scene.record.lag.add((1, 5)[ranks.index], 256)

    for scene in on_two_ranks(tmp_path, prepare, every_seconds=20.0):
        assert len(scene.saved) >= 3
        assert all(checkpoint.counters["ledgers"] == [LEDGER, LEDGER] for checkpoint in scene.saved)
        assert [lag[1] for lag in scene.saved[-1].counters["lags"]] == [1, 5]


def test_episodes_that_end_first_solve_no_run_of_several_ranks(tmp_path):
    """Each environment but one has ended a short episode in the first update; the long one, of the second, costs most."""

    def prepare(scene, ranks):
        scene.record.coverage.num_envs = 60
        short = item(0, returns=[-2.0] * 59)
        short.arrays["episode_env"] = np.arange(59)
        long = item(1, version=1, returns=[-400.0] * ranks.index)
        long.arrays["episode_env"] = np.full(ranks.index, 59)
        scene.intake.script = [[short], [long]]

    for scene in on_two_ranks(tmp_path, prepare, mean100=-3.0):
        assert (scene.record.updates, scene.record.episodes, scene.record.unfinished) == (2, 119, 1)
        assert not scene.record.solved


def test_the_summary_has_the_policy_lag_of_all_ranks(tmp_path):
    """That of rank 0, which writes it, stood beside the env steps of both."""

    def prepare(scene, ranks):
        scene.record.lag.add((0, 16)[ranks.index], 256)
        scene.record.lag.add((2, 8)[ranks.index], 256)

    assert [scene.summary["policy_lag"] for scene in on_two_ranks(tmp_path, prepare)] == [{"min": 0, "mean": 6.5, "max": 16}] * 2


class WatchedRanks(ThreadRanks):
    """Notes the operations of a rank in their order."""

    operations, changed = (), threading.Condition()

    def gather_votes(self, values):
        """Return the values of all ranks, as training does."""
        return self.noted("training", super().gather, values)

    def gather_json(self, value):
        """Return the values of all ranks, however slow they are."""
        return self.noted("slow", super().gather_json, value)

    def noted(self, kind, operation, value):
        """Return the result of an operation that begins now."""
        with self.changed:
            self.operations = *self.operations, kind
            self.changed.notify_all()
        return operation(value)


@pytest.mark.parametrize("slow", [0, 1])
def test_no_rank_waits_in_an_operation_of_training_for_a_rank_that_writes(tmp_path, slow):
    """A replay memory, or a slow disk: what one rank writes takes longer than any other wait for a rank may."""
    all_ranks, seen = {}, []

    def prepare(scene, ranks):
        ranks.__class__ = WatchedRanks
        all_ranks[ranks.index] = ranks
        if ranks.index == 0:
            scene.intake.evaluations = [evaluation("greedy", 1.0)]
        if ranks.index == slow:
            scene.save = scene.save_best = lambda _: seen.append(operation_of_the_other())

    def operation_of_the_other():
        """The operation in which the other rank waits for this one, which has completed as many as it has begun."""
        own, other = all_ranks[slow], all_ranks[1 - slow]
        with other.changed:
            assert other.changed.wait_for(lambda: len(other.operations) > len(own.operations), PATIENCE)
        return other.operations[len(own.operations)]

    on_two_ranks(tmp_path, prepare, every_seconds=20.0)
    assert set(seen) == {"slow"}
    assert len(seen) >= 4 - slow  # checkpoints, and the best policy of rank 0


def votes_of(scene):
    """Return the votes of the only rank of a run: time of the vote, and whether it was ready."""
    (ranks,) = ThreadRanks.make(1)
    scene.agreement, votes = Agreement(ranks), []
    decide = scene.agreement.decide
    scene.agreement.decide = lambda vote: votes.append((scene.clock.now, vote.ready)) or decide(vote)
    scene.run()
    return votes


def test_a_rank_without_workers_is_always_ready(tmp_path):
    """It has no experience to wait for, and the other ranks train without it."""
    scene = Scene(tmp_path, batch=4)
    assert {ready for _, ready in votes_of(scene)} == {True}
    assert scene.algorithm.batches == []


def test_a_rank_with_workers_is_ready_with_a_batch_or_after_its_deadline(tmp_path):
    waits, late = Scene(tmp_path / "1", batch=4), Scene(tmp_path / "2", batch=4, batch_seconds=30.0)
    for scene in (waits, late):
        scene.intake.stats = replace(scene.intake.stats, actors=1)
    assert {ready for _, ready in votes_of(waits)} == {False}
    assert all(ready == (at >= 130.0) for at, ready in votes_of(late))


def test_a_rank_without_workers_keeps_no_other_waiting(tmp_path):
    def prepare(scene, ranks):
        if ranks.index == 0:
            scene.intake.stats = replace(scene.intake.stats, actors=1)
            scene.intake.script = [[item(0)], [], [item(1, version=1)]]

    busy, idle = on_two_ranks(tmp_path, prepare)
    assert busy.algorithm.batches == [[0], [1]]
    assert set(busy.intake.waits) == {WAIT_SECONDS}
    assert set(idle.intake.waits) == {0.0}


def test_a_rank_with_workers_waits_for_its_batch_no_longer_than_its_deadline(tmp_path):
    scene = Scene(tmp_path, batch=4, batch_seconds=0.75 * WAIT_SECONDS)
    scene.intake.stats = replace(scene.intake.stats, actors=1)
    (_, ready), *_ = votes_of(scene)
    assert scene.intake.waits[0] == pytest.approx(0.75 * WAIT_SECONDS)
    assert ready


def test_ranks_wait_between_their_votes_while_none_has_experience(tmp_path):
    def prepare(scene, ranks):
        if ranks.index == 0:
            scene.intake.script = [[], [], [item(0)], [item(1, version=1)]]

    for scene in on_two_ranks(tmp_path, prepare):
        assert scene.intake.waits[:5] == [0.0, WAIT_SECONDS, WAIT_SECONDS, 0.0, 0.0]
        assert set(scene.intake.waits[5:]) == {WAIT_SECONDS}


def test_a_rank_in_lockstep_is_never_ready_without_its_batch(tmp_path):
    scene = lockstep_scene(tmp_path)
    scene.intake.script = [[], [], []]
    assert {ready for _, ready in votes_of(scene)} == {False}
