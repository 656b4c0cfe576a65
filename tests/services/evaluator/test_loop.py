"""The evaluator's loop on a scripted link: what it plays, what it reports, and the last evaluation of a run."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.envs.make import make
from common.envs.spec import EnvSettings
from common.errors import RunChangedError
from common.observability import logs
from common.observability.worker_metrics import EvaluatorStats
from common.protocol.messages import Drain, Snapshot
from services.evaluator import EvaluatorLoop

pytestmark = pytest.mark.service

EPISODES = 3


class FakeLink:
    """Link to a scripted learner: `on_service(n)` runs at the n-th service."""

    def __init__(self, scene):
        """Nothing has arrived."""
        self.scene, self.drain, self.newest, self.reports, self.services = scene, None, None, [], 0
        self.connected, self.wanted, self.sent = True, None, []
        self.session = SimpleNamespace(version=-1)
        self.on_service = lambda _: None

    def request_snapshot(self, after):
        """An open request."""
        self.wanted = after

    def publish(self, version):
        """The learner has a new policy."""
        arrays = {"parameters": np.full(3, version, np.float32)}
        self.newest = Snapshot(version=version, env_steps=0, precision="fp32", layout="", arrays=arrays)
        self.session.version = version

    def take_snapshot(self):
        """The newest policy, once for each request."""
        if self.newest is None or self.wanted in (None, self.newest.version):
            return None
        self.wanted = None
        self.sent.append(self.newest.version)
        return self.newest

    def service(self, timeout=0.0):
        """Time passes; let the test act."""
        self.services += 1
        assert self.services < 5000, "the loop waits for something that never comes"
        self.scene.now += max(timeout, 0.01)
        self.on_service(self.services)

    def say(self, message):
        """Remember, unless the learner is away."""
        if self.connected:
            self.reports.append(message)
        return self.connected


class FakePolicy:
    """Records its arguments."""

    def __init__(self):
        """No weights yet."""
        self.version, self.acts = -1, []

    def load(self, version, parameters, *, env_steps):  # noqa: ARG002
        """Take the weights."""
        assert parameters.tolist() == [version] * 3
        self.version = version

    def act(self, observation, *, greedy=False):
        """Action 0."""
        self.acts.append((self.version, greedy))
        return {"action": torch.zeros(len(observation), dtype=torch.int64)}


class Scene:
    """An evaluator on counting environments."""

    def __init__(self, *, every_seconds=10.0, lengths=(3, 1, 5)):
        """Three environments; episode n lasts lengths[n]."""
        self.now, self.rests, self.stop, self.turns, self.lags = 100.0, 0, False, 0, []
        kwargs = {"lengths": list(lengths), "truncates": [False]}
        self.environment = make(EnvSettings(entry_point="common.envs.probes:counting", num_envs=EPISODES, kwargs=kwargs))
        self.link, self.policy = FakeLink(self), FakePolicy()
        self.stats = EvaluatorStats(policy_lag=SimpleNamespace(observe=self.lags.append))
        self.evaluator = EvaluatorLoop(
            link=self.link,
            environment=self.environment,
            episodes=EPISODES,
            policy=self.policy,
            seed=5,
            every_seconds=every_seconds,
            rest=self.rest,
            stats=self.stats,
            stopping=lambda: self.stop,
            alive=self.turn,
            clock=lambda: self.now,
        )

    def rest(self):
        """A pause after a step."""
        self.rests += 1

    def turn(self, **_):
        """The loop went round."""
        self.turns += 1

    @property
    def reported(self):
        """Version and mode of each report."""
        return [(report.version, report.mode) for report in self.link.reports]


@pytest.fixture
def scene():
    """An evaluator that was welcomed."""
    built = Scene()
    yield built
    built.environment.close()


def test_each_policy_is_played_greedily_and_sampled_when_it_is_time(scene):
    """Not before the first interval has passed, not the same policy twice, and the newest when the next time comes."""

    def learner(_):
        if scene.link.session.version < 0:
            scene.link.publish(0)
        if scene.now > 145 and scene.link.session.version == 0:
            scene.link.publish(4)
        scene.stop = scene.now > 180

    scene.link.on_service = learner
    assert scene.evaluator.run() == "stopped"
    assert scene.reported == [(0, "greedy"), (0, "sampled"), (4, "greedy"), (4, "sampled")]
    assert {greedy for version, greedy in scene.policy.acts if version == 4} == {True, False}
    assert scene.rests == len(scene.policy.acts)
    assert scene.stats.evaluations == 4
    assert scene.turns > 0


def test_a_policy_learns_of_each_episode_that_begins(scene, monkeypatch):
    """Before the action on its first observation, which counts from 0; also where a second evaluation begins in the middle."""
    begun, act = [], scene.policy.act
    monkeypatch.setattr("services.evaluator.begin_episodes", lambda _, start: begun.append(torch.tensor(start)))

    def acted(observation, **mode):
        assert len(begun) == len(scene.policy.acts) + 1
        assert torch.equal(begun[-1], observation[:, 0] == 0)
        return act(observation, **mode)

    def learner(_):
        if scene.link.session.version < 0:
            scene.link.publish(0)
        scene.stop = len(scene.link.reports) == 2

    scene.policy.act, scene.link.on_service = acted, learner
    assert scene.evaluator.run() == "stopped"
    assert sum(start.any().item() for start in begun) > 1
    assert not torch.stack(begun).all()


def test_no_policy_is_sent_that_is_not_played(scene):
    """A policy a second, an evaluation every ten: but for the first, which shows that the networks fit, each is played."""

    def learner(_):
        scene.link.publish(int(scene.now) - 100)
        scene.stop = len(scene.link.reports) == 6

    scene.link.on_service = learner
    scene.evaluator.run()
    assert scene.link.sent == [0, *dict.fromkeys(version for version, _ in scene.reported)]
    assert len(scene.link.sent) == 4


def test_exactly_the_first_episode_of_each_environment_counts(scene):
    """Each report holds one episode per environment; the ones that follow in an environment that ended early do not count."""
    seeds, reset = [], scene.environment.reset
    scene.environment.reset = lambda seed: seeds.append(seed) or reset(seed)

    def learner(_):
        if scene.link.session.version < 0:
            scene.link.publish(0)
        scene.stop = len(scene.link.reports) == 2

    scene.link.on_service = learner
    scene.evaluator.run()
    for report in scene.link.reports:
        assert report.arrays["episode_length"].tolist() == [3] * EPISODES
        assert report.arrays["episode_return"].tolist() == [0 + 1 + 2] * EPISODES
    assert seeds == [5, 5 + EPISODES], "each evaluation plays other episodes"
    assert scene.stats.env_steps == 2 * 3 * EPISODES
    assert scene.stats.episodes == 2 * EPISODES
    assert scene.stats.return_means == {"greedy": 3.0, "sampled": 3.0}


def test_fewer_environments_than_episodes_play_several_each(scene):
    scene.evaluator.episodes = EPISODES + 2

    def learner(_):
        if scene.link.session.version < 0:
            scene.link.publish(0)
        scene.stop = len(scene.link.reports) == 1

    scene.link.on_service = learner
    scene.evaluator.run()
    assert sorted(scene.link.reports[0].arrays["episode_length"].tolist()) == [1, 1] + [3] * EPISODES


def test_the_final_policy_is_played_when_the_run_ends(scene):
    """The target is reached long before the next evaluation was due: the final policy's score is still reported."""

    def learner(n):
        if n == 1:
            scene.link.publish(0)
        if n == 5:
            scene.link.publish(7)
            scene.link.drain = Drain(reason="target reached", deadline_seconds=40.0)

    scene.link.on_service = learner
    assert scene.evaluator.run() == "target reached"
    assert scene.reported == [(7, "greedy")]
    assert scene.rests == 0
    assert scene.lags == [0]


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_a_final_policy_that_is_still_on_its_way_is_waited_for(scene, seconds):
    """The drain overtook the last policy, because a policy is sent when it is asked for, and may cross a slow link."""
    drained_at = math.inf

    def learner(n):
        nonlocal drained_at
        if n == 1:
            scene.link.publish(0)
        if n == 5:
            drained_at = scene.now
            scene.link.session.version = 7
            scene.link.drain = Drain(reason="target reached", deadline_seconds=40.0)
        if n > 5 and scene.now >= drained_at + seconds and scene.link.newest.version == 0:
            scene.link.publish(7)

    scene.link.on_service = learner
    scene.evaluator.run()
    assert scene.reported == [(7, "greedy")]


def test_what_was_played_while_the_learner_was_away_is_reported_when_it_is_back(scene):
    """A learner restarts for a minute: the evaluation is neither lost nor played twice."""

    def learner(_):
        if scene.link.session.version < 0:
            scene.link.publish(0)
        if scene.stats.evaluations == 2 and scene.now > 150:
            scene.link.connected = True
        scene.stop = scene.now > 200

    scene.link.connected, scene.link.on_service = False, learner
    assert scene.evaluator.run() == "stopped"
    assert scene.reported == [(0, "greedy"), (0, "sampled")]
    assert scene.stats.evaluations == 2


def test_the_last_evaluation_waits_for_a_learner_that_is_away(scene):
    """The cable is cut while the final policy is played: its score is the one that counts."""

    def learner(n):
        if n == 1:
            scene.link.publish(7)
            scene.link.drain = Drain(reason="target reached", deadline_seconds=40.0)
        scene.link.connected = scene.now > 110.0

    scene.link.connected, scene.link.on_service = False, learner
    assert scene.evaluator.run() == "target reached"
    assert scene.reported == [(7, "greedy")]


def test_a_learner_that_does_not_come_back_is_not_waited_for_for_ever(scene):
    """Half of the deadline, as for playing."""

    def learner(n):
        if n == 1:
            scene.link.publish(7)
            scene.link.drain = Drain(reason="target reached", deadline_seconds=40.0)

    scene.link.connected, scene.link.on_service = False, learner
    assert scene.evaluator.run() == "target reached"
    assert scene.reported == []
    assert scene.now <= 100.0 + 20.0 + 0.5


def test_a_final_policy_that_was_played_already_is_not_played_again(scene):
    """Nothing new to say."""

    def learner(_):
        if scene.link.session.version < 0:
            scene.link.publish(0)
        if len(scene.link.reports) == 2 and not scene.link.drain:
            scene.link.drain = Drain(reason="target reached", deadline_seconds=40.0)

    scene.link.on_service = learner
    scene.evaluator.run()
    assert scene.reported == [(0, "greedy"), (0, "sampled")]


def test_an_evaluation_that_would_take_too_long_is_given_up(scene, capsys):
    """Half of the drain's deadline is for playing: an endless episode must not hold up the learner's end."""
    logs.configure("evaluator")
    scene.environment.close()
    scene = Scene(lengths=(100_000,))

    def learner(n):
        if n == 1:
            scene.link.publish(0)
            scene.link.drain = Drain(reason="target reached", deadline_seconds=8.0)

    scene.link.on_service = learner
    scene.evaluator.run()
    assert scene.reported == []
    assert scene.now <= 100.0 + 4.0 + 0.5
    assert scene.stats.playing == 0
    assert f'evaluation_unfinished version=0 episodes_ended="0 of {EPISODES}" seconds=4' in capsys.readouterr().err
    scene.environment.close()


def test_an_evaluation_that_the_drain_interrupts_is_not_called_unfinished(capsys):
    """The final policy was played greedily; the sampled evaluation that is under way is no part of the result."""
    logs.configure("evaluator")
    scene = Scene(every_seconds=0.0, lengths=(20,))

    def learner(n):
        if n == 1:
            scene.link.publish(0)
        if n == 25 + 5:
            assert (scene.stats.evaluations, scene.stats.playing) == (1, EPISODES)
            scene.link.connected = False  # the report of the greedy one waits until half of the deadline has passed
            scene.link.drain = Drain(reason="target reached", deadline_seconds=2.0)

    scene.link.on_service = learner
    scene.link.connected = False
    scene.evaluator.run()
    assert scene.now >= 100.0 + 1.0
    assert scene.stats.playing == 0
    assert "evaluation_unfinished" not in capsys.readouterr().err
    scene.environment.close()


def test_a_loop_that_follows_another_in_its_process_plays_no_episode_before_an_evaluation_is_due(scene):
    """The run went on with other settings in the middle of an evaluation."""
    scene.evaluator.every_seconds = 0.0

    def learner(n):
        if n == 1:
            scene.link.publish(0)
        if scene.stats.playing:
            raise RunChangedError("the learner goes on with other settings", found="another Welcome", wanted="the same")

    scene.link.on_service = learner
    with pytest.raises(RunChangedError):
        scene.evaluator.run()
    assert scene.stats.playing == EPISODES
    seen = []

    def learner_goes_on(_):
        seen.append(scene.stats.playing)
        scene.stop = True

    scene.link.on_service = learner_goes_on
    scene.evaluator.every_seconds = 10.0
    assert scene.evaluator.run() == "stopped"
    assert seen == [0]


def test_an_evaluation_is_abandoned_at_a_stop():
    """SIGTERM in the middle of a long episode: no report of half an episode, and an end at once."""
    scene = Scene(every_seconds=0.0, lengths=(100_000,))

    def learner(n):
        if n == 1:
            scene.link.publish(0)
        scene.stop = n >= 50

    scene.link.on_service = learner
    assert scene.evaluator.run() == "stopped"
    assert scene.reported == []
    assert scene.link.services <= 52
    assert scene.stats.playing == 0
    assert scene.stats.evaluations == 0
    scene.environment.close()


def test_a_drain_in_the_middle_of_an_evaluation_goes_on_with_the_final_policy():
    """The evaluation under way is dropped for the final policy."""
    scene = Scene(every_seconds=0.0, lengths=(20,))

    def learner(n):
        if n == 1:
            scene.link.publish(0)
        if n == 10:
            scene.link.publish(3)
            scene.link.drain = Drain(reason="budget spent", deadline_seconds=40.0)

    scene.link.on_service = learner
    assert scene.evaluator.run() == "budget spent"
    assert scene.reported == [(3, "greedy")]
    scene.environment.close()


def test_without_any_policy_nothing_is_played(scene):
    """The learner never trained."""

    def learner(n):
        if n == 3:
            scene.link.drain = Drain(reason="stopped", deadline_seconds=4.0)

    scene.link.on_service = learner
    assert scene.evaluator.run() == "stopped"
    assert scene.reported == []
    assert scene.policy.acts == []
