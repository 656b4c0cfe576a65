"""Remote environments over the in-memory transport: rows are those of local ones, and no transition crosses missing rows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch

from common.algorithms.batch import collate
from common.algorithms.episode_reports import TrajectoryEpisodes
from common.algorithms.moments import Moments
from common.algorithms.on_policy import ActorCriticPolicy, network_outputs, recorded_log_prob
from common.algorithms.payload import trajectory_schema
from common.config.run_config import EnvRunConfig, RunConfig
from common.config.schema import Settings
from common.envs.make import make
from common.envs.remote import check_observe, observe_schema
from common.envs.spec import EnvSettings
from common.envs.trial import spec_of
from common.errors import ConfigError
from common.models.spec import ModelSettings
from common.observability.env_metrics import EnvWorkerStats, PolicyServerStats
from common.protocol.env_side import EnvSide
from common.protocol.env_slots import EnvSessionConfig, SlotState
from common.protocol.events import Experience
from common.protocol.messages import ENV_WORKER, Observe, Trajectory
from common.protocol.worker_side import Identity, WorkerSide
from common.replay.blocks import spans
from common.replay.rows import rows_by_environment
from common.runtime import process
from common.transport.api import LIMIT_MESSAGES
from common.transport.link import Link
from services import policy_server
from services.acting.rollout import Rollout
from services.env_worker import EnvWorkerLoop
from services.policy_server import DRAIN_SECONDS, RemoteEnvironments
from tests.support.memory import MemoryHub

pytestmark = pytest.mark.service

T, SLOTS, ROWS = 8, 2, 2
B = SLOTS * ROWS
STEP_TIMEOUT = 1.0
COUNTING = EnvSettings(entry_point="common.envs.probes:counting", num_envs=B)
CARTPOLE = EnvSettings(id="CartPole-v1", num_envs=ROWS)
LEAVING = EnvSettings(entry_point="common.envs.probes:leaving_agents", kwargs={"mask": "info"}, action_mask=True, num_envs=B)
SEEDED = EnvSettings(entry_point="common.envs.probes:observed_value", num_envs=B)


class Worker:
    """An env worker with a loop that turns at the command of the stage."""

    def __init__(self, stage, name, incarnation):
        self.transport, self.alive, self.paused = stage.hub.connect(), True, False
        identity = Identity(role=ENV_WORKER, name=name, incarnation=incarnation, software="test")
        self.link = Link(
            transport=self.transport, session=WorkerSide(identity), clock=lambda: stage.now, log_event=stage.notes.append
        )
        self.loop = None

    def turn(self):
        """Handle what has arrived; greet, build, step."""
        if not self.alive or self.paused:
            return
        if self.loop is None:
            self.link.service()
            if self.link.welcome:
                environment = make(EnvRunConfig.from_json(self.link.welcome.config).env)
                self.link.check_environment(environment.spec)
                self.loop = EnvWorkerLoop(
                    link=self.link,
                    environment=environment,
                    stats=EnvWorkerStats(),
                    stopping=lambda: False,
                    alive=lambda **_: None,
                )
        else:
            self.loop.turn(0.0)
            if self.link.drain:
                self.link.close("drained")
                self.alive = False


class Stage:
    """Remote environments and their env workers in one thread: they turn while the policy server waits, and so does the clock."""

    def __init__(self, settings=COUNTING, workers=SLOTS):
        self.now, self.notes, self.idles = 0.0, [], 0
        self.hub, self.incarnations = MemoryHub(), count(1)
        self.spec = spec_of(settings)
        env = settings.model_copy(update={"num_envs": ROWS})
        config = EnvRunConfig(run_id="run-1", seed=1, environment_seed=1, algorithm="ppo", env=env).model_dump_json()
        session = EnvSessionConfig(
            run="run-1",
            env_config=config,
            env_signature=self.spec.signature,
            schema=observe_schema(self.spec, rows=ROWS),
            check=partial(check_observe, self.spec),
            slots=max(SLOTS, workers),
            rows=ROWS,
            reset_seconds=300.0,
        )
        self.side, self.stats = EnvSide(session), PolicyServerStats()
        self.server, self.received_key = self.hub.bind(), ""
        self.handshakes = self.server.handshakes
        self.remote = RemoteEnvironments(
            side=self.side,
            transport=self,
            spec=self.spec,
            step_timeout=STEP_TIMEOUT,
            stats=self.stats,
            clock=lambda: self.now,
            log_event=self.notes.append,
            idle=self.idle,
            stopping=lambda: False,
        )
        self.workers = {}
        for number in range(workers):
            self.start(f"w{number}")

    def restart_server(self, **config):
        """Begin a new session, by another `config`, on the same connections."""
        self.remote.side = self.side = EnvSide(replace(self.side.config, **config))

    def start(self, name):
        """Start an env worker, or its next incarnation."""
        self.workers[name] = Worker(self, name, next(self.incarnations))

    def kill(self, name):
        """End an env worker as `kill -9` does."""
        self.workers[name].alive = False
        self.hub.disconnect(self.workers[name].transport)

    def idle(self):
        """Count."""
        self.idles += 1
        assert self.idles < 10_000, "a step that never ends"

    def send(self, route, frames):
        """Transport of the policy server."""
        return self.server.send(route, frames)

    def receive(self, timeout):
        """Let the env workers turn; where none sends anything, time passes."""
        for worker in self.workers.values():
            worker.turn()
        if (received := self.server.receive(0.0)) is None:
            self.now += timeout
        return received

    def close(self):
        """Transport of the policy server."""
        self.server.close()

    def join(self):
        """Serve until every env worker has a slot and its first observations."""
        while self.side.connected < len(self.workers) or not self.side.answered:
            self.remote.service(0.05)
        for _ in range(20):
            self.remote.service(0.05)


def rollout_of(stage, seed=1):
    """A rollout that begins with the first observations."""
    schema = trajectory_schema(stage.spec, length=T, num_envs=B, recorded=[])
    return Rollout(schema, stage.remote.reset(seed))


def collect(stage, rollout, before_row=lambda _: None):
    """Arrays of one rollout, with action 0 throughout; `before_row(t)` is called before each row."""
    for t in range(T):
        before_row(t)
        action = np.zeros(B, np.int64)
        rollout.record(t, action, {}, stage.remote.step(action))
    env_steps, arrays = rollout.env_steps, rollout.finish()
    rollout.begin_next()
    return env_steps, arrays


def check_rows(arrays):
    """Every valid row is one step of one episode: it counts on by one, and earns what the observation before it says."""
    obs = arrays["obs"]
    for t, b in np.argwhere(arrays["valid"]):
        assert arrays["reward"][t, b] == obs[t, b, 0]
        assert obs[t + 1, b].tolist() == [obs[t, b, 0] + 1, obs[t, b, 1]]
    for t, b in np.argwhere(~arrays["valid"]):
        assert arrays["reward"][t, b] == 0
        assert not arrays["terminated"][t, b]
        assert not arrays["truncated"][t, b]


def check_windows(arrays):
    """No window of a replay memory, three steps long, holds an invalid row or two episodes."""
    for rows in rows_by_environment(arrays):
        lengths, _ = spans(rows.valid, rows.ended, 3)
        for begin, length in enumerate(lengths):
            if length == 0:
                continue
            inside = slice(begin, begin + length)
            assert rows.valid[inside].all()
            assert not rows.ended[begin : begin + length - 1].any()
            if not rows.terminated[begin + length - 1]:
                assert rows.frames[begin + length, 0] == rows.frames[begin, 0] + length


@pytest.mark.parametrize("settings", [COUNTING, SEEDED, LEAVING], ids=["counting", "seeded", "agents"])
def test_rows_of_env_workers_are_those_of_local_environments(settings):
    """Seeds, ends and last observations: nothing shows that the environments are elsewhere, but for one row at the begin."""
    stage, local = Stage(settings), make(settings)
    stage.remote.reset(7)
    stage.join()
    first = stage.remote.step(np.zeros(B, np.int64))
    assert first.start.all()
    assert not first.valid.any()
    assert np.array_equal(first.observation, local.reset(7))
    random = np.random.default_rng(0)
    for _ in range(60):
        action = random.integers(0, 2, B)
        here, there = local.step(action), stage.remote.step(action)
        for name, wanted, found in zip(here._fields, here, there, strict=True):
            assert np.array_equal(wanted, found), name
            assert wanted.dtype == found.dtype, name
    local.close()


@pytest.mark.parametrize("killed_at", range(2 * T))
def test_no_transition_crosses_missing_rows_when_an_env_worker_dies_at_any_row(killed_at):
    """Killed before any row, and replaced three rows later: rows, windows and episodes stay whole, and all are counted."""
    stage = Stage()
    rollout, episodes, produced, row = rollout_of(stage), TrajectoryEpisodes(), 0, count()
    stage.join()

    def before_row(_):
        now = next(row)
        if now == killed_at:
            stage.kill("w1")
        if now == killed_at + 3:
            stage.start("w1")

    lost = 0
    for seq in range(4):
        env_steps, arrays = collect(stage, rollout, before_row)
        check_rows(arrays)
        check_windows(arrays)
        assert env_steps == np.count_nonzero(arrays["valid"])
        message = Trajectory(seq=seq, version=0, env_steps=env_steps, env_steps_sent=produced + env_steps, arrays=arrays)
        produced += env_steps
        accepted = episodes(message).arrays["episode_return"]
        assert set(accepted.tolist()) <= {0.0, 3.0, 10.0}  # the sums of whole episodes of 1, 3 and 5 steps
        lost += np.count_nonzero(~arrays["valid"][:, ROWS:] & ~arrays["start"][1:, ROWS:])
    assert lost >= 2 * ROWS  # a missing row is no env step; that of the kill may have been answered before
    assert arrays["valid"][:, ROWS:].any()  # the successor's rows count again


@pytest.mark.parametrize("killed_at", range(T))
def test_an_env_worker_that_is_replaced_between_two_rows_leaves_a_missing_row(killed_at):
    """Its successor has begun before the next action: without a row between, the learner would take its first for a reset."""
    stage = Stage()
    rollout, episodes, row = rollout_of(stage), TrajectoryEpisodes(), count()
    stage.join()

    def before_row(_):
        if next(row) == T + killed_at:
            stage.kill("w0")
            stage.remote.service(0.05)
            stage.start("w0")
            while next(iter(stage.side._slots)).state is not SlotState.BEGUN:
                stage.remote.service(0.05)

    produced = 0
    for seq in range(4):
        env_steps, arrays = collect(stage, rollout, before_row)
        check_rows(arrays)
        check_windows(arrays)
        produced += env_steps
        episodes(Trajectory(seq=seq, version=0, env_steps=env_steps, env_steps_sent=produced, arrays=arrays))
    assert stage.side.missing_rows == ROWS


@pytest.mark.parametrize("killed_at", [3, T - 1])
def test_each_slot_has_a_memory_of_its_own_which_a_replaced_env_worker_begins_anew(killed_at):
    """The episodes of the successor begin with zeros, the others go on; the learner computes the same from the rows."""
    stage, model = Stage(), ModelSettings(hidden=(4,), recurrent="lstm", recurrent_size=5)
    policy = ActorCriticPolicy(model=model, env=stage.spec, precision="fp32", seed=1)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.3)
    size = {"length": T, "num_envs": B}
    recorded, first = recorded_log_prob(**size), stage.remote.reset(1)
    rollout = Rollout(trajectory_schema(stage.spec, **size, recorded=recorded, state_size=model.state_size), first)
    alone = [ActorCriticPolicy(model=model, env=stage.spec, precision="fp32", seed=1) for _ in range(B)]
    for each in alone:
        each.network.load_state_dict(policy.network.state_dict())
    stage.join()
    row, lost = count(), 0
    for _ in range(4):
        for t in range(T):
            now = next(row)
            if now == T + killed_at:
                stage.kill("w1")
            if now == T + killed_at + 3:
                stage.start("w1")
            start, seen = torch.from_numpy(rollout.start(t)), torch.from_numpy(rollout.observation)
            policy.begin_episodes(start)
            acted = {name: values.numpy() for name, values in policy.act(seen).items()}
            for b, each in enumerate(alone):
                if start[b]:
                    each.memory = torch.zeros_like(each.memory)
                each.begin_episodes(torch.zeros(1, dtype=torch.bool))
                each.act(seen[b : b + 1])
                torch.testing.assert_close(policy.memory[b], each.memory[0], rtol=0, atol=1e-6)
            action = acted.pop("action")
            rollout.record(t, action, acted, stage.remote.step(action))
        env_steps, arrays = rollout.env_steps, rollout.finish(policy.memory.numpy())
        rollout.begin_next()
        lost += np.count_nonzero(~arrays["valid"][:, ROWS:] & ~arrays["start"][1:, ROWS:])
        check_rows(arrays)
        assert arrays["start"][:-1][arrays["valid"] & (arrays["obs"][:-1, :, 0] == 0)].all()
        batch = collate([Experience(version=0, env_steps=env_steps, arrays=arrays)], stage.spec, state_size=model.state_size)
        outputs = network_outputs(policy.network, batch, moments=Moments(), precision="fp32")
        torch.testing.assert_close(outputs.log_prob[batch.valid], batch.log_prob[batch.valid], rtol=0, atol=1e-5)
        torch.testing.assert_close(outputs.state, batch.memory[1], rtol=0, atol=1e-5)
    assert lost >= 3 * ROWS
    assert arrays["valid"][:, ROWS:].any()


def test_a_policy_server_that_was_restarted_gets_rows_again():
    """It numbers its Acts from 0, and the env workers stay the incarnations that they are."""
    stage = Stage()
    stage.join()
    stage.remote.reset(1)
    for _ in range(20):
        stage.remote.step(np.zeros(B, np.int64))
    stage.restart_server()
    stage.remote.reset(2)
    transition = stage.remote.step(np.zeros(B, np.int64))
    assert transition.valid.all() or transition.start.all()
    assert {slot.state for slot in stage.side._slots} == {SlotState.READY}


def test_an_env_worker_that_is_late_loses_its_episodes_and_no_other_rows():
    stage = Stage()
    rollout = rollout_of(stage)
    stage.join()
    _, arrays = collect(stage, rollout, lambda t: setattr(stage.workers["w1"], "paused", t in {3, 4}))
    check_rows(arrays)
    assert not arrays["valid"][3:5, ROWS:].any()
    assert arrays["valid"][3:5, :ROWS].any()
    assert [note.event for note in stage.notes if note.warning] == ["env_worker_late"]
    assert stage.now >= STEP_TIMEOUT


@pytest.mark.parametrize("workers", [SLOTS, 32])
def test_env_workers_step_on_where_the_policy_acts_for_longer_than_they_may_hear_nothing(workers):
    """Those of 32 send more messages meanwhile than the policy server reads at once while it waits for rows."""
    stage, action = Stage(workers=workers), np.zeros(workers * ROWS, np.int64)
    stage.remote.reset(1)
    stage.join()
    stage.remote.step(action)
    for _ in range(3):
        for _ in range(12):
            stage.now += 0.5
            for worker in stage.workers.values():
                worker.turn()
        assert stage.remote.step(action).valid.any()
    assert [note.event for note in stage.notes].count("policy_server_lost") == 3 * workers
    assert stage.side.missing_rows == 0


def test_no_env_worker_is_silent_whose_messages_wait_when_a_policy_server_was_held_up():
    stage = Stage()
    stage.remote.reset(1)
    stage.join()
    for _ in range(24):
        stage.now += 0.5
        for worker in stage.workers.values():
            worker.turn()
    stage.remote.service(messages=1)
    assert stage.side.workers_lost == 0


def test_the_ends_of_episodes_are_seen_where_every_reset_is_late():
    stage, run = Stage(), RunConfig.of(Settings(env=COUNTING), run_id="run-1")
    stage.restart_server(env_config=EnvRunConfig.of(run, rows=ROWS, environment_seed=1).model_dump_json())
    stage.remote.reset(1)
    stage.join()
    for worker in stage.workers.values():
        worker.link.say = Late(stage, worker)
    ends = 0
    for _ in range(40):
        transition = stage.remote.step(np.zeros(B, np.int64))
        ends += np.count_nonzero(transition.terminated | transition.truncated)
    assert ends


class Late:
    """Holds an answer with new episodes back for longer than the step timeout."""

    def __init__(self, stage, worker):
        self.stage, self.worker, self.say, self.turn = stage, worker, worker.link.say, worker.turn
        self.held, self.until = None, 0.0
        worker.turn = self.turned

    def __call__(self, message):
        if isinstance(message, Observe) and message.arrays["start"].any():
            self.held, self.until = message, self.stage.now + 1.5 * STEP_TIMEOUT
        else:
            self.say(message)

    def turned(self):
        if self.held is None:
            self.turn()
        elif self.stage.now >= self.until:
            held, self.held = self.held, None
            self.say(held)


def test_a_reset_is_announced_and_its_time_is_limited(monkeypatch):
    stage = Stage(workers=1)
    stage.remote.reset(1)
    stage.join()
    (worker,) = stage.workers.values()
    limited, resets, environment = [], [], worker.loop.environment

    def reset(seed):
        resets.append((limited == ["limit"], worker.link.sent["report"] - reports))
        return first(seed)

    first, reports = environment.reset, worker.link.sent["report"]
    monkeypatch.setattr(environment, "reset", reset)
    monkeypatch.setattr(process, "build_limit", lambda: limited.append("limit") or nullcontext())
    stage.remote.reset(2)
    stage.remote.service(0.05)
    assert resets == [(True, 1)]


@pytest.mark.parametrize("at_once", [1, policy_server.MESSAGES_AT_ONCE])
def test_answers_that_a_policy_server_did_not_read_in_time_because_it_was_stopped_count(at_once, monkeypatch):
    monkeypatch.setattr(policy_server, "MESSAGES_AT_ONCE", at_once)
    stage = Stage()
    stage.remote.reset(1)
    stage.join()
    stage.remote.step(np.zeros(B, np.int64))
    receive = stage.receive

    def stopped(_timeout):
        for worker in stage.workers.values():
            worker.turn()
        stage.now += 2 * STEP_TIMEOUT
        stage.receive = receive

    stage.receive = stopped
    assert stage.remote.step(np.zeros(B, np.int64)).valid.all()


def test_a_step_without_any_env_worker_waits_for_one_and_serves_the_learner():
    stage = Stage(workers=0)
    stage.remote.reset(1)

    def idle():
        stage.idles += 1
        if stage.idles == 50:
            stage.start("w0")

    stage.remote.idle = idle
    transition = stage.remote.step(np.zeros(B, np.int64))
    assert transition.start.tolist() == [True, True, False, False]
    assert stage.idles >= 50


def test_the_end_of_the_run_ends_the_env_workers():
    stage = Stage()
    stage.remote.reset(1)
    stage.join()
    stage.remote.step(np.zeros(B, np.int64))
    stage.remote.drain("solved")
    assert [worker.link.drain.reason for worker in stage.workers.values()] == ["solved", "solved"]
    assert (stage.side.connected, stage.side.workers_lost) == (0, 0)
    assert stage.now < DRAIN_SECONDS
    stage.remote.close()
    assert (stage.stats.env_workers, stage.stats.rows_waiting) == (0, 0)


def test_a_connection_that_floods_is_ignored_and_costs_no_row():
    """Messages that are discarded unread cost the steps of the others no time."""
    stage = Stage()
    stage.remote.reset(1)
    stage.join()
    flooder = stage.hub.connect()
    for _ in range(LIMIT_MESSAGES + 40):
        while not flooder.send([b"no message"]):
            stage.remote.service()
    while stage.stats.ignored < 39:
        stage.remote.service()
    assert [note.event for note in stage.notes].count("connection_ignored") == 1
    assert stage.side.messages_refused.total() == LIMIT_MESSAGES + 1
    stage.remote.step(np.zeros(B, np.int64))
    assert stage.remote.step(np.zeros(B, np.int64)).valid.all()


def test_an_env_worker_with_another_environment_ends_with_one_line():
    stage = Stage()
    config = EnvRunConfig(run_id="run-1", seed=1, environment_seed=1, algorithm="ppo", env=CARTPOLE).model_dump_json()
    stage.restart_server(env_config=config)
    with pytest.raises(ConfigError, match="the environment here is not the policy server's: found signature"):
        stage.join()


def test_an_env_worker_of_other_rows_ends_with_one_line():
    stage = Stage()
    env = COUNTING.model_copy(update={"num_envs": 3})
    config = EnvRunConfig(run_id="run-1", seed=1, environment_seed=1, algorithm="ppo", env=env).model_dump_json()
    stage.restart_server(env_config=config)
    with pytest.raises(ConfigError, match="the policy server wants other rows than the environments here have"):
        stage.join()
