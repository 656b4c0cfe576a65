"""Tests of the recorded rollout against the policy's input and the environments' transitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest

from common.algorithms.episode_reports import TrajectoryEpisodes
from common.algorithms.payload import check_trajectory, trajectory_schema
from common.envs.make import make
from common.envs.spec import EnvSettings
from common.envs.stacking import stack
from common.envs.vector import Transition, VectorEnvironment
from common.protocol.messages import Arrays, ArraySpec, Trajectory
from services.acting.rollout import Rollout

pytestmark = pytest.mark.service

Mode = Literal["next_step", "same_step"]
both_modes = pytest.mark.parametrize("mode", ["next_step", "same_step"])


@dataclass
class Played:
    """A run of rollouts, and beside it, kept independently, what went in and out."""

    rollouts: list[Arrays] = field(default_factory=list)
    env_steps: list[int] = field(default_factory=list)
    seen: list[list[np.ndarray]] = field(default_factory=list)  # per rollout, T+1 stacked observations
    transitions: list[Transition] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    log_probs: list[np.ndarray] = field(default_factory=list)


def play(env: VectorEnvironment, *, length: int, rollouts: int) -> Played:
    """Act by chance and record, as the actor's loop does."""
    rng = np.random.default_rng(7)
    recorded = [ArraySpec(name="log_prob", dtype="float32", shape=(length, env.num_envs))]
    schema = trajectory_schema(env.spec, length=length, num_envs=env.num_envs, recorded=recorded)
    rollout = Rollout(schema, env.reset(seed=11))
    played = Played()
    for _ in range(rollouts):
        seen = []
        for t in range(length):
            seen.append(rollout.observation.copy())
            action = rng.integers(0, env.spec.action.n, env.num_envs)
            log_prob = rng.random(env.num_envs, np.float32)
            transition = env.step(action)
            rollout.record(t, action, {"log_prob": log_prob}, transition)
            played.transitions.append(transition)
            played.actions.append(action)
            played.log_probs.append(log_prob)
        played.seen.append([*seen, rollout.observation.copy()])
        played.env_steps.append(rollout.env_steps)
        played.rollouts.append(rollout.finish())
        rollout.begin_next()
    env.close()
    episodes = TrajectoryEpisodes()
    for seq, arrays in enumerate(played.rollouts):
        message = Trajectory(seq=seq, version=0, env_steps=played.env_steps[seq], env_steps_sent=0, arrays=arrays)
        counted = episodes(message).arrays["episode_return"]
        assert len(counted) == len(arrays["episode_return"]), "episodes of an honest actor are contradicted, or not counted"
        assert {spec.name: spec.dtype for spec in schema} == {name: str(array.dtype) for name, array in arrays.items()}
        check_trajectory(env.spec, arrays)
    return played


def counting(mode: Mode, *, lengths: list[int], truncates: list[bool], **settings) -> VectorEnvironment:
    """Counting environments side by side."""
    kwargs = {"lengths": lengths, "truncates": truncates} | settings.pop("kwargs", {})
    return make(EnvSettings(entry_point="common.envs.probes:counting", autoreset=mode, kwargs=kwargs, **settings))


def assert_stacks_are_those_seen(played: Played) -> None:
    """Bit for bit, in every row of every rollout, the bootstrap row included."""
    for arrays, seen in zip(played.rollouts, played.seen, strict=True):
        rebuilt = stack(arrays["obs"], arrays["start"])
        assert len(rebuilt) == len(seen)
        for row, saw in zip(rebuilt, seen, strict=True):
            assert row.tobytes() == saw.tobytes()


@both_modes
def test_stacks_rebuilt_from_pong_are_those_the_policy_saw(mode: Mode) -> None:
    """3,584 env steps of real Pong, cut to short episodes so that the recording holds ends as well as serves."""
    settings = EnvSettings(
        id="ALE/Pong-v5", num_envs=8, autoreset=mode, frame_stack=4, height=42, width=42, max_episode_frames=400
    )
    played = play(make(settings), length=64, rollouts=7)
    ends = sum(len(arrays["episode_length"]) for arrays in played.rollouts)
    assert ends >= 32
    assert_stacks_are_those_seen(played)
    saw = np.stack([row for seen in played.seen for row in seen])
    assert saw.shape == (7 * 65, 8, 4, 42, 42)
    assert (saw[:, :, 3].max(axis=(2, 3)) > 0).all()  # the newest frame is always there, while older ones were cut:
    assert (saw[:, :, 0].max(axis=(2, 3)) == 0).sum() > 3 * ends


@both_modes
@pytest.mark.parametrize("frame_stack", [2, 4])
def test_stacks_rebuilt_from_very_short_episodes_are_those_the_policy_saw(mode: Mode, frame_stack: int) -> None:
    """10,000 env steps of pictures with an end every other row, so that windows hold several ends and cross rollouts."""
    env = counting(
        mode, lengths=[1, 3, 2, 1, 1, 7], truncates=[False, True], num_envs=4, frame_stack=frame_stack, kwargs={"image": True}
    )
    played = play(env, length=25, rollouts=100 if mode == "same_step" else 150)
    assert sum(played.env_steps) >= 9_500
    assert_stacks_are_those_seen(played)


@both_modes
def test_what_a_policy_sees_has_only_frames_of_its_episode(mode: Mode) -> None:
    """Seen from the pictures alone: a row's stack is the last pictures since its episode began, and zeros before."""
    env = counting(mode, lengths=[1, 3, 2, 6], truncates=[False, True], num_envs=2, frame_stack=3, kwargs={"image": True})
    played = play(env, length=9, rollouts=12)
    history: list[list[np.ndarray]] = [[], []]
    observations = [played.seen[0][0][:, -1], *(transition.observation for transition in played.transitions)]
    starts = [np.ones(2, bool), *(transition.start for transition in played.transitions)]
    for row, (observation, start) in enumerate(zip(observations[:-1], starts[:-1], strict=True)):
        for b in range(2):
            history[b] = [observation[b]] if start[b] else [*history[b], observation[b]][-3:]
            saw = played.seen[row // 9][row % 9][b]
            np.testing.assert_array_equal(saw[3 - len(history[b]) :], history[b])
            assert not saw[: 3 - len(history[b])].any()


def valid_steps(arrays: Arrays) -> Iterator[tuple[np.ndarray, np.ndarray, int, int]]:
    """(observation, next observation, t, b) of each valid row by the rule of the trajectory's table, S = 1."""
    finals = dict(zip(arrays["final_index"].tolist(), arrays["final_obs"], strict=True))
    length, num_envs = arrays["valid"].shape
    for t, b in zip(*np.nonzero(arrays["valid"]), strict=True):
        after = finals.get(int(t * num_envs + b), arrays["obs"][t + 1, b])
        yield arrays["obs"][t, b], after, int(t), int(b)
    assert all(0 <= index < length * num_envs for index in finals)


@both_modes
@pytest.mark.parametrize("plan", [[False], [True], [False, True, True]], ids=["terminates", "truncates", "mixed"])
def test_no_stored_transition_crosses_a_reset(mode: Mode, plan: list[bool]) -> None:
    """Counting: what follows a valid row is one count further in the same episode; and every count is there once.

    The one exception proves the rule: after a termination in same_step the next row is another episode's, and is not
    looked at, because a terminated episode has no value to bootstrap from.
    """
    lengths = [3, 1, 5]
    played = play(counting(mode, lengths=lengths, truncates=plan, num_envs=3), length=10, rollouts=6)
    met: list[list[tuple[int, int]]] = [[], [], []]
    for arrays in played.rollouts:
        for before, after, t, b in valid_steps(arrays):
            met[b].append((int(before[1]), int(before[0])))
            assert arrays["reward"][t, b] == before[0]
            ended = (arrays["terminated"] | arrays["truncated"])[t, b]
            assert ended == (before[0] + 1 == lengths[int(before[1]) % 3])
            assert arrays["truncated"][t, b] == (ended and plan[int(before[1]) % len(plan)])
            if mode == "next_step" or not arrays["terminated"][t, b]:
                assert tuple(after) == (before[0] + 1, before[1])
    for steps in met:
        expected = [(episode, count) for episode in range(100) for count in range(lengths[episode % 3])]
        assert steps == expected[: len(steps)]


@both_modes
def test_a_reset_costs_one_row_under_next_step_and_none_under_same_step(mode: Mode) -> None:
    """The ledger counts env steps: rows that only bring a reset are no env steps."""
    played = play(counting(mode, lengths=[2, 4], truncates=[False, True], num_envs=2), length=7, rollouts=8)
    valid = np.concatenate([arrays["valid"] for arrays in played.rollouts])
    ended = np.concatenate([arrays["terminated"] | arrays["truncated"] for arrays in played.rollouts])
    start = np.concatenate([arrays["start"][:-1] for arrays in played.rollouts])
    if mode == "same_step":
        assert valid.all()
        np.testing.assert_array_equal(start[1:], ended[:-1])
    else:
        np.testing.assert_array_equal(~valid[1:], ended[:-1])
        np.testing.assert_array_equal(start[2:], ended[:-2])
        assert not ended[~valid].any()
    assert valid[0].all()
    assert start[0].all()
    assert played.env_steps == [int(arrays["valid"].sum()) for arrays in played.rollouts]


@both_modes
def test_returns_and_lengths_are_those_of_whole_episodes(mode: Mode) -> None:
    """Episodes of 3, 1 and 23 steps in rollouts of 10: most long ones begin two rollouts before the one they end in."""
    lengths = [3, 1, 23]
    played = play(counting(mode, lengths=lengths, truncates=[True, False], num_envs=2), length=10, rollouts=15)
    rewards, steps, expected = np.zeros(2), np.zeros(2, int), []
    for row, transition in enumerate(played.transitions):
        if row % 10 == 0:
            expected.append([])
        for b in range(2):
            if not transition.valid[b]:
                continue
            rewards[b] += transition.reward[b]
            steps[b] += 1
            if transition.terminated[b] or transition.truncated[b]:
                expected[-1].append((rewards[b], steps[b], row % 10 * 2 + b))
                rewards[b], steps[b] = 0, 0
    reported = [
        list(zip(*(a[f"episode_{each}"] for each in ("return", "length", "index")), strict=True)) for a in played.rollouts
    ]
    assert reported == expected
    assert {length: total for rollout in reported for total, length, _ in rollout} == {3: 3.0, 1: 0.0, 23: 253.0}


@pytest.mark.parametrize("kwargs", [{}, {"truncates": True}], ids=["terminates", "truncates"])
def test_each_agent_that_leaves_reports_its_own_episode_and_no_row_without_it_is_an_env_step(kwargs) -> None:
    """Of 1 and 3 env steps in 4 rows; messages of 5 rows begin and end at each of them. The last observation has no step left."""
    settings = EnvSettings(entry_point="common.envs.probes:leaving_agents", kwargs=kwargs, num_envs=4, frame_stack=2)
    played = play(make(settings), length=5, rollouts=8)
    assert_stacks_are_those_seen(played)
    assert sum(played.env_steps) == 2 * 10 * (1 + 3)
    lengths = np.concatenate([arrays["episode_length"] for arrays in played.rollouts])
    assert lengths.tolist() == [1, 1, 3, 3] * 10
    left = {1: [], 3: []}
    for arrays in played.rollouts:
        obs = arrays["obs"][1:]
        for t, b in zip(*np.nonzero(arrays["valid"]), strict=True):
            ended = (arrays["terminated"] | arrays["truncated"])[t, b]
            assert obs[t + 1, b, 1] == obs[t, b, 1] - 1 == (0 if ended else obs[t + 1, b, 1])
            left[3 if b % 2 else 1].append(int(obs[t, b, 1]))
    assert sorted(left[1]) == [1] * 20
    assert sorted(left[3]) == [1] * 20 + [2] * 20 + [3] * 20


@both_modes
def test_a_lost_life_is_an_end_to_the_learner_and_none_to_the_game(mode: Mode) -> None:
    """Breakout by chance: five ends a game are stored, with the stack going on after four; the return is the whole game's."""
    env = make(EnvSettings(id="ALE/Breakout-v5", num_envs=2, autoreset=mode, height=42, width=42, terminate_on_life_loss=True))
    played = play(env, length=50, rollouts=14)
    lost, over = (np.stack([getattr(row, name) for row in played.transitions]) for name in ("life_lost", "terminated"))
    terminated, start = (np.concatenate([arrays[name][-50:] for arrays in played.rollouts]) for name in ("terminated", "start"))
    np.testing.assert_array_equal(terminated, lost | over)
    assert not start[lost].any()
    ends = [np.flatnonzero(over[:, b]) for b in range(2)]
    assert min(map(len, ends)) >= 2
    for b in range(2):
        assert lost[: ends[b][-1], b].sum() == 4 * len(ends[b])
    reported = np.concatenate([arrays["episode_return"] for arrays in played.rollouts])
    rewards = np.stack([row.reward for row in played.transitions])
    assert reported.sum() == sum(rewards[: ends[b][-1] + 1, b].sum() for b in range(2))
    assert len(reported) == sum(map(len, ends))


@both_modes
def test_a_row_holds_what_was_given_with_it(mode: Mode) -> None:
    """Actions, log-probabilities and rewards stay in their row, and finished arrays are not written to again."""
    played = play(counting(mode, lengths=[4], truncates=[True], num_envs=3), length=6, rollouts=5)
    rows = [arrays[name] for name in ("action", "log_prob", "reward") for arrays in played.rollouts]
    given = [*played.actions, *played.log_probs, *(transition.reward for transition in played.transitions)]
    np.testing.assert_array_equal(np.concatenate(rows), given)
    for before, after in zip(played.rollouts, played.rollouts[1:], strict=False):
        np.testing.assert_array_equal(before["obs"][-1], after["obs"][0])
        np.testing.assert_array_equal(before["start"][-1], after["start"][0])
        assert not np.shares_memory(before["obs"], after["obs"])


def test_rollouts_without_ends_have_empty_lists() -> None:
    """Most rollouts of a long game end no episode: the arrays of free length are there, and empty."""
    played = play(counting("same_step", lengths=[1000], truncates=[True], num_envs=2), length=4, rollouts=2)
    for name, shape in {"final_obs": (0, 2), "final_index": (0,), "episode_return": (0,), "episode_index": (0,)}.items():
        assert played.rollouts[1][name].shape == shape


@both_modes
def test_nothing_is_sent_that_was_not_written(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds anything, so what it held before must not show in any array, the first context included."""
    played = []
    for junk in (7, 9):
        monkeypatch.setattr(np, "empty", lambda shape, dtype=float, junk=junk: np.full(shape, junk, dtype))
        env = counting(mode, lengths=[2, 5], truncates=[True], num_envs=2, frame_stack=4, kwargs={"image": True})
        played.append(play(env, length=6, rollouts=3))
    for one, other in zip(*(run.rollouts for run in played), strict=True):
        assert {name: array.tobytes() for name, array in one.items()} == {name: array.tobytes() for name, array in other.items()}
    assert not played[0].rollouts[0]["obs"][:3].any()
