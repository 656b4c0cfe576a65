"""The actor's loop on a scripted link: when it collects, with which policy, and how it ends."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.algorithms.payload import trajectory_schema
from common.envs.make import make
from common.envs.spec import EnvSettings
from common.errors import DropReason, RunChangedError
from common.observability.health import Health
from common.observability.worker_metrics import ActorStats
from common.protocol.messages import ACTOR_STATE, ArraySpec, Drain, Snapshot, Trajectory
from common.runtime.lifecycle import BUILD_SECONDS
from services.acting.incarnation import Incarnation
from services.acting.loop import ActorLoop
from services.acting.rollout import Rollout

pytestmark = pytest.mark.service

T, B = 4, 2
DRAIN = Drain(reason="target reached", deadline_seconds=5.0)


class FakeLink:
    """Link to a scripted learner: `on_service(n)` runs at the n-th service."""

    def __init__(self, schema):
        """Credits, but no policy yet."""
        self.welcome, self.drain, self.session = SimpleNamespace(schema=schema), None, SimpleNamespace(version=0)
        self.credits, self.services, self.log, self.counted = 1, 0, [], None
        self.unacknowledged_seconds, self.new_incarnation, self.welcomed = 0.0, False, True
        self.snapshot, self.on_service = None, lambda _: None

    @property
    def has_credit(self):
        """Return whether a credit is free."""
        return self.credits > 0

    def greet_after_silence(self):
        """The actor was silent while it built."""
        self.welcomed = False

    def request_snapshot(self, after):
        """Remember."""
        self.log.append(("want", after))

    def service(self, _timeout=0.0):
        """Let the test act."""
        self.services += 1
        assert self.services < 1000, "the loop waits for something that never comes"
        self.on_service(self.services)

    def publish(self, version):
        """A policy arrives."""
        self.snapshot, self.session.version = policy(version), version

    def take_snapshot(self):
        """The newest policy that arrived."""
        snapshot, self.snapshot = self.snapshot, None
        return snapshot

    def count_from(self, produced, dropped):
        """Remember."""
        self.begun_at = (produced, Counter(dropped))

    def count(self, produced, dropped):
        """Remember."""
        self.counted = (produced, Counter(dropped))

    def offer(self, experience):
        """Take it, and the credit."""
        self.credits -= 1
        self.log.append(("offer", experience))

    @property
    def offered(self):
        """All rollouts so far."""
        return [entry[1] for entry in self.log if entry[0] == "offer"]


class FakePolicy:
    """Always action 1; its log-probability is its version."""

    def __init__(self):
        """No weights yet."""
        self.version, self.loaded = None, []

    def load(self, version, parameters, *, env_steps):  # noqa: ARG002
        """Take the weights."""
        assert parameters.tolist() == [version] * 3
        self.version = version
        self.loaded.append(version)

    def experience(self, rollout):
        """Everything is sent as it is."""
        return rollout

    def act(self, observation, *, greedy=False):
        """Act, never greedily."""
        assert not greedy
        n = len(observation)
        return {"action": torch.ones(n, dtype=torch.int64), "log_prob": torch.full((n,), float(self.version))}


def policy(version):
    """A snapshot of three parameters."""
    return Snapshot(
        version=version, env_steps=0, precision="fp32", layout="", arrays={"parameters": np.full(3, version, np.float32)}
    )


class Scene:
    """An actor on counting environments with a scripted link."""

    def __init__(self):
        """Episodes of three steps, then five, and so on."""
        settings = EnvSettings(
            entry_point="common.envs.probes:counting", num_envs=B, kwargs={"lengths": [3], "truncates": [False]}
        )
        self.environment = make(settings)
        recorded = [ArraySpec(name="log_prob", dtype="float32", shape=(T, B))]
        self.link = FakeLink(trajectory_schema(self.environment.spec, length=T, num_envs=B, recorded=recorded))
        self.policy, self.stop, self.turns, self.lags = FakePolicy(), False, 0, []
        self.stats = ActorStats(policy_lag=SimpleNamespace(observe=self.lags.append))
        self.actor = ActorLoop(
            link=self.link,
            incarnation=Incarnation(
                environment=self.environment,
                policy=self.policy,
                rollout=Rollout(self.link.welcome.schema, self.environment.reset(1)),
            ),
            message_type=Trajectory,
            stats=self.stats,
            stopping=lambda: self.stop,
            alive=self.turn,
        )

    def turn(self, **_):
        """The loop went round."""
        self.turns += 1


@pytest.fixture
def scene():
    """An actor that was welcomed."""
    built = Scene()
    yield built
    built.environment.close()


def test_nothing_is_collected_before_there_is_a_credit_and_a_policy(scene):
    """Waiting with a finished rollout would make it old: the wait comes first, and counts as alive."""
    seen = []

    def learner(n):
        seen.append((n, scene.stats.env_steps))
        if n == 3:
            scene.link.publish(0)
            scene.link.credits = 0
        if n == 6:
            scene.link.credits = 1
        if scene.link.offered:
            scene.link.drain = DRAIN

    scene.link.on_service = learner
    assert scene.actor.run() == "target reached"
    assert all(steps == 0 for n, steps in seen if n <= 6)
    assert len(scene.link.offered) == 1
    assert scene.turns >= 5
    assert scene.link.log[0] == ("want", -1)  # of no policy


def test_a_loop_that_follows_another_in_its_process_waits_for_a_policy_of_its_own(scene):
    """The run goes on with other settings: version 0 was never loaded here, and earlier steps were claimed."""
    scene.stats.version, scene.stats.env_steps = 0, 40
    scene.stats.dropped["unfinished"] = 3
    scene.link.session.version = 0

    def learner(n):
        scene.link.credits = 1
        if n == 3:
            scene.link.publish(1)
        if scene.link.offered:
            scene.link.drain = DRAIN

    scene.link.on_service = learner
    scene.actor.run()
    assert scene.link.begun_at == (40, Counter(unfinished=3))
    assert scene.link.log[0] == ("want", -1)
    assert [offered.version for offered in scene.link.offered] == [1]
    assert scene.policy.loaded == [1]


def test_the_rollout_under_way_is_dropped_where_the_run_goes_on_with_other_settings(scene):
    def learner(n):
        scene.link.credits = 1
        if n == 1:
            scene.link.publish(0)
        if n == 4:
            raise RunChangedError("other settings")

    scene.link.on_service = learner
    with pytest.raises(RunChangedError):
        scene.actor.run()
    assert scene.stats.dropped["unfinished"] == scene.stats.env_steps > 0


def test_a_step_that_begins_an_episode_may_take_as_long_as_building(scene):
    """A simulator that takes a minute to begin its second episode was restarted by its liveness probe, in each of them."""
    health, left = Health(clock=lambda: 0.0), []
    step = scene.environment.step

    def slow(action):
        left.append(health._ticks["loop"].within)
        scene.stop = len(left) == T
        return step(action)

    scene.environment.step, scene.actor.alive = slow, health.tick
    scene.link.publish(0)
    scene.actor.run()
    assert left == [BUILD_SECONDS] * T


def test_one_rollout_is_acted_by_one_policy(scene):
    """A policy that arrives in the middle of a rollout waits for its end, and the message has the version that acted."""

    def learner(n):
        scene.link.credits = 1
        if n in (1, 3, 4):  # 3 and 4 fall into the first rollout: only the newest of them ever acts
            scene.link.publish({1: 0, 3: 1, 4: 2}[n])
        if len(scene.link.offered) == 2:
            scene.link.drain = DRAIN

    scene.link.on_service = learner
    scene.actor.run()
    first, second = scene.link.offered
    assert (first.version, second.version) == (0, 2)
    assert np.unique(first.arrays["log_prob"]).tolist() == [0.0]
    assert np.unique(second.arrays["log_prob"]).tolist() == [2.0]
    assert scene.policy.loaded == [0, 2]
    assert scene.lags == [2, 0]


def test_a_policy_is_requested_late_in_each_rollout(scene):
    """Of the versions that are published during a rollout one is sent, and it is there when the next rollout begins."""

    def learner(n):
        scene.link.credits = 1
        if n == 1:
            scene.link.publish(0)
        if len(scene.link.offered) == 3:
            scene.link.drain = DRAIN

    scene.link.on_service = learner
    scene.actor.run()
    assert [entry[0] for entry in scene.link.log] == ["want", "offer"] * 3
    assert [entry[1] for entry in scene.link.log if entry[0] == "want"] == [0] * 3


def test_an_actor_that_waited_for_its_credit_begins_with_the_policy_that_the_credit_names(scene):
    """It requests that one when the credit comes, and none of those before it."""

    def learner(n):
        if n == 1:
            scene.link.publish(0)
        if n == 3:
            scene.link.credits, scene.link.session.version = 1, 5
        if n == 6:
            scene.link.publish(5)
        if scene.link.offered:
            scene.link.drain = DRAIN

    scene.link.credits = 0
    scene.link.on_service = learner
    scene.actor.run()
    assert {entry[1] for entry in scene.link.log[:3] if entry[0] == "want"} == {0}
    assert scene.policy.loaded == [0, 5]
    assert scene.link.offered[0].version == 5


def test_an_actor_with_a_credit_waits_for_its_policy(scene):
    """Not for the credit, which it has: on a slow line the doctor saw no wait for policies."""
    phases = []

    def learner(n):
        phases.append(scene.stats.phases._current)
        if n == 3:
            scene.link.publish(0)
        if scene.link.offered:
            scene.link.drain = DRAIN

    scene.link.on_service = learner
    scene.actor.run()
    assert phases[1:3] == ["snapshot", "snapshot"]


def test_an_actor_does_not_act_by_a_policy_beyond_that_of_its_learner(scene):
    """The learner was killed and continues from an older version: it would refuse the whole rollout."""

    def learner(n):
        scene.link.credits = 1
        if n == 1:
            scene.link.publish(9)
            scene.link.session.version = 7
        if n == 4:
            scene.link.publish(7)
        if scene.link.offered:
            scene.link.drain = DRAIN

    scene.link.on_service = learner
    scene.actor.run()
    assert scene.link.log[0] == ("want", 9)
    assert scene.link.offered[0].version == 7


def test_the_message_holds_what_was_stepped(scene):
    """Env steps are valid rows: the row that only resets an environment is neither counted nor claimed."""

    def learner(_):
        scene.link.credits = 1
        if scene.stats.version < 0:
            scene.link.publish(0)
        if len(scene.link.offered) == 3:
            scene.link.drain = DRAIN

    scene.link.on_service = learner
    scene.actor.run()
    for message in scene.link.offered:
        assert message.env_steps == np.count_nonzero(message.arrays["valid"])
        assert message.arrays["action"].tolist() == [[1] * B] * T
    assert scene.stats.env_steps == sum(message.env_steps for message in scene.link.offered) == 3 * 3 * B
    returns = np.concatenate([message.arrays["episode_return"] for message in scene.link.offered])
    assert returns.tolist() == [3.0] * (3 * B)  # 0 + 1 + 2
    assert (scene.stats.episodes, list(scene.stats.returns)) == (3 * B, returns.tolist())
    assert scene.link.counted == (scene.stats.env_steps, Counter())


@pytest.mark.parametrize("how", ["drain", "stop"])
def test_a_rollout_cut_short_is_counted_as_dropped(scene, how):
    """The run ends, or the pod is moved, in the middle of a rollout: its env steps are produced and dropped, never lost."""

    def learner(n):
        if n == 1:
            scene.link.publish(0)
        if n == 3:
            scene.link.drain, scene.stop = (DRAIN, False) if how == "drain" else (None, True)

    scene.link.on_service = learner
    assert scene.actor.run() == {"drain": "target reached", "stop": "stopped"}[how]
    assert scene.link.offered == []
    assert scene.stats.env_steps > 0
    assert scene.stats.dropped == {DropReason.UNFINISHED: scene.stats.env_steps}
    assert scene.link.counted == (scene.stats.env_steps, scene.stats.dropped)


def test_what_the_policy_makes_of_a_rollout_has_a_phase_of_its_own(scene):
    """Gradients may take longer than acting: the phase shows it, and the message carries the policy's arrays."""
    phases, entered = scene.stats.phases, []
    enter = phases.enter
    phases.enter = lambda phase: entered.append(phase) or enter(phase)

    def experience(rollout):
        return {**rollout, "episode_return": np.full(1, entered[-1] == "experience", np.float32)}

    def learner(n):
        if n == 1:
            scene.link.publish(0)
        if scene.link.offered:
            scene.link.drain = DRAIN

    scene.policy.experience = experience
    scene.link.on_service = learner
    scene.actor.run()
    assert scene.link.offered[0].arrays["episode_return"].tolist() == [1.0]


def test_an_actor_that_waits_for_a_credit_can_be_stopped(scene):
    """SIGTERM reaches an actor while its learner is away."""
    scene.link.credits = 0

    def learner(n):
        scene.stop = n == 5

    scene.link.on_service = learner
    assert scene.actor.run() == "stopped"
    assert scene.stats.dropped == {}


class Forgetful:
    """A learner in lockstep that forgets the actor of `scene` while it builds, and refuses its first message after that."""

    def __init__(self, scene, *, forgets, after=(0, [7])):
        """It forgets the first `forgets` builds; `after` has slot and state of the Welcomes after the first."""
        self.scene, self.forgets, self.after, self.builds, self.services = scene, forgets, after, 0, 0
        self.greet(0, [7])
        scene.link.publish(0)
        scene.link.on_service = self.answer
        scene.actor.restart = self.build
        scene.actor.incarnation = self.build()

    def greet(self, slot, state):
        """A Welcome of `slot`, to continue from `state`."""
        arrays = {ACTOR_STATE: np.array(state, np.uint8)} if state else {}
        self.scene.link.welcome = SimpleNamespace(schema=self.scene.link.welcome.schema, index=slot, arrays=arrays)

    def build(self):
        """A new incarnation."""
        self.builds, self.services = self.builds + 1, 0
        rollout = Rollout(self.scene.link.welcome.schema, self.scene.environment.reset(1))
        return Incarnation(environment=self.scene.environment, policy=self.scene.policy, rollout=rollout)

    def answer(self, _):
        """The learner's part of a service: its refusal, and the new Welcome, are there at the second one after a build."""
        self.services += 1
        if self.services == 2:
            self.scene.link.welcomed = True
            if self.builds <= self.forgets:
                self.greet(*self.after)
                self.scene.link.new_incarnation = True
        if self.scene.link.offered:
            self.scene.link.drain = DRAIN


def test_an_actor_that_was_forgotten_while_it_built_keeps_what_it_built(scene):
    """Building once more would take as long, and it would be forgotten again."""
    learner = Forgetful(scene, forgets=3)
    assert scene.actor.run() == "target reached"
    assert (learner.builds, len(scene.link.offered)) == (1, 1)


@pytest.mark.parametrize("after", [(0, [8]), (0, []), (1, [7])])
def test_an_actor_that_is_welcomed_to_continue_elsewhere_builds_again(scene, after):
    """Another state, the beginning, or another slot."""
    learner = Forgetful(scene, forgets=1, after=after)
    scene.actor.run()
    assert (learner.builds, len(scene.link.offered)) == (2, 1)


def test_an_actor_that_has_stepped_since_it_was_built_builds_again(scene):
    """Its environments are not in the state of the Welcome any more."""
    learner = Forgetful(scene, forgets=0)

    def forget_in_the_first_rollout(n):
        learner.answer(n)
        if learner.builds == 1 and scene.stats.env_steps:
            scene.link.new_incarnation = True

    scene.link.on_service = forget_in_the_first_rollout
    scene.actor.run()
    assert (learner.builds, len(scene.link.offered)) == (2, 1)
    assert scene.stats.dropped[DropReason.ROLLED_BACK] > 0
