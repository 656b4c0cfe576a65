"""The replay memory against a list of episodes, kept beside it."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.algorithms.payload import trajectory_schema
from common.algorithms.settings import DQNSettings
from common.config.schema import Settings
from common.envs.make import make
from common.envs.spec import ActionSpec, EnvSettings, EnvSpec, Leaf
from common.errors import InternalError, ResourceError
from common.protocol.events import Experience, WorkerKey
from common.replay.buffer import Replay, Transitions
from services.acting.rollout import Rollout
from services.learner.startup import build_run_algorithm
from tests.common.replay.games import GAMMA, Expected, Game, Key, Mode, Player, code, stacked, window

pytestmark = pytest.mark.pure


def everything(replay: Replay) -> Transitions:
    """All transitions that can be sampled, each once."""
    slots = np.flatnonzero(replay._blocks.span)
    assert len(slots) == len(replay)
    replay._draw = lambda *_: slots  # type: ignore[method-assign]
    return replay.sample(len(slots), np.random.default_rng(0))


def check(found: Transitions, expected: dict[int, Expected], keys: dict[int, Key], env: EnvSpec, mode: Mode) -> None:
    """Each transition found is the one that the list of episodes has for the same step, and none comes twice."""
    assert len(set(found.action.tolist())) == len(found.action)
    for at, action in enumerate(found.action.tolist()):
        wanted = expected[action]
        np.testing.assert_array_equal(found.observation[at], stacked(keys[action], env))
        assert found.reward[at] == pytest.approx(wanted.reward, abs=1e-5)
        assert found.discount[at] == pytest.approx(wanted.discount)
        if mode != "same_step" or wanted.discount:  # same_step ships no last frame of an episode that terminated
            np.testing.assert_array_equal(found.next_observation[at], stacked(wanted.after, env))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_sampled_windows_are_those_of_the_list_of_episodes(data: st.DataObject) -> None:
    """Ends, reset rows, lost messages, two actors, both autoreset modes, agents that left, blocks going on and recycled."""
    draw = data.draw
    mode: Mode = draw(st.sampled_from(["next_step", "same_step", "agents"]))
    shape = draw(st.sampled_from([(3,), (1, 2)]))
    action = ActionSpec(choices=(10**9,), shape=())
    size, n_step = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    env = EnvSpec(observation_shape=shape, observation_dtype="float32", action=action, frame_stack=size, frame_skip=1)
    length, num_envs = draw(st.integers(1, 15)), draw(st.integers(1, 3))
    capacity = draw(st.sampled_from([10 * (size + n_step - 1), 100, 10_000]))
    replay = Replay(env=env, capacity=capacity, n_step=n_step, streams=1, gamma=GAMMA)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    games = [Game(number=number, rng=rng, mode=mode) for number in range(2 * num_envs)]
    players = [Player(games[:num_envs], env, length), Player(games[num_envs:], env, length)]
    runs: dict[int, list[list[Key]]] = {game.number: [[]] for game in games}  # env steps without a gap between them
    sent = [0, 0]
    for peer, lost in draw(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([False, False, True])), max_size=25)):
        arrays, steps = players[peer].message()
        if not lost:
            assert replay.insert(arrays, stream=peer, seq=sent[peer]) == sum(map(len, steps))
        sent[peer] += 1
        for game, of_game in zip(players[peer].games, steps, strict=True):
            runs[game.number].append([]) if lost else runs[game.number][-1].extend(of_game)
    pieces = [(piece, games[number]) for number, several in runs.items() for piece in several]
    keys = {code(key): key for piece, _ in pieces for key in piece}
    walked = {code(key): window(piece, at, game, n_step) for piece, game in pieces for at, key in enumerate(piece)}
    expected = {action: wanted for action, wanted in walked.items() if wanted is not None}
    if len(replay):
        check(everything(replay), expected, keys, env, mode)
    if capacity == 10_000:  # nothing was overwritten
        assert len(replay) == len(expected)


def counting_memory(mode: Mode, rollouts: int) -> Replay:
    """Rollouts of the counting environment by the actor's own recorder, three of them, in windows of 3 steps."""
    entry_point, kwargs = "common.envs.probes:counting", {"lengths": (3, 1, 5, 7)}
    env = make(EnvSettings(entry_point=entry_point, kwargs=kwargs, num_envs=3, autoreset=mode, frame_stack=2))
    replay = Replay(env=env.spec, capacity=400, n_step=3, streams=3, gamma=1.0)
    rollout = Rollout(trajectory_schema(env.spec, length=7, num_envs=3, recorded=()), env.reset(seed=1))
    for number in range(rollouts):
        for t in range(rollout.length):
            rollout.record(t, np.zeros(3, np.int64), {}, env.step(np.zeros(3, np.int64)))
        arrays = rollout.finish()
        replay.insert(arrays, stream="actor", seq=number)
        rollout.begin_next()
    env.close()
    return replay


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_no_window_crosses_a_reset(mode: Mode) -> None:
    """Frames say (step, episode): a window stays in its episode, and is shorter than 3 only at the episode's end."""
    found = everything(counting_memory(mode, rollouts=60))
    assert len(found.action) > 100
    lengths = np.array([3, 1, 5, 7])
    step, episode = found.observation[:, -1].astype(int).T
    after, episode_after = found.next_observation[:, -1].astype(int).T
    ended = found.discount == 0
    whole = np.minimum(step + 3, lengths[episode % 4])
    np.testing.assert_array_equal(found.reward, (whole - 1) * whole / 2 - (step - 1) * step / 2)  # sum of step .. whole-1
    np.testing.assert_array_equal(ended, (whole == lengths[episode % 4]) & (episode % 2 == 0))
    shown = ~ended if mode == "same_step" else np.ones_like(ended)
    np.testing.assert_array_equal(episode_after[shown], episode[shown])
    np.testing.assert_array_equal(after[shown], whole[shown])


class Line:
    """One environment without ends; frame, action and reward of row t are its number t."""

    env: ClassVar[EnvSpec] = EnvSpec(
        observation_shape=(1,),
        observation_dtype="float32",
        action=ActionSpec(choices=(10**6,), shape=()),
        frame_stack=1,
        frame_skip=1,
    )

    def message(self, first: int, length: int) -> dict[str, np.ndarray]:
        """Rows first .. first+length-1."""
        rows = np.arange(first, first + length + 1)
        none = np.zeros((length, 1), np.bool_)
        return {
            "obs": rows.astype(np.float32)[:, None, None],
            "start": (rows == 0)[:, None],
            "action": rows[:-1, None],
            "reward": rows[:-1, None].astype(np.float32),
            "terminated": none,
            "truncated": none,
            "valid": ~none,
            "final_obs": np.zeros((0, 1), np.float32),
            "final_index": np.zeros(0, np.int32),
        }

    def fill(self, replay: Replay, rows: int, *, first: int = 0, length: int = 10, **more: Any) -> None:
        """Insert rows in messages of `length`."""
        for at in range(first, first + rows, length):
            replay.insert(self.message(at, length), stream="line", seq=at // length, **more)


def test_the_newest_env_steps_are_kept() -> None:
    """Of one environment everything stays but what the block under way will replace, and what still lacks its future."""
    replay = Replay(env=Line.env, capacity=200, n_step=2, streams=1, gamma=1.0)
    Line().fill(replay, 1_000)
    kept = everything(replay).action
    assert replay.layout.capacity >= 200
    assert set(range(1_000 - 200 + replay.layout.fresh, 999)) <= set(kept.tolist())
    assert max(kept) == 998  # row 999 needs frame 1001


def test_what_is_overwritten_is_never_drawn_again() -> None:
    """Draws by the real sampler, as the ring turns, only ever show env steps that are still there."""
    rng = np.random.default_rng(3)
    replay = Replay(env=Line.env, capacity=100, n_step=3, streams=1, gamma=1.0)
    for turn in range(60):
        Line().fill(replay, 10, first=10 * turn)
        found = replay.sample(64, rng)
        assert found.action.min() > 10 * (turn + 1) - replay.layout.positions
        np.testing.assert_array_equal(found.observation[:, 0], found.action)
        np.testing.assert_array_equal(found.next_observation[:, 0], found.action + 3)
        np.testing.assert_array_equal(found.reward, 3 * found.action + 3)


def test_rewards_are_clipped_before_they_are_summed() -> None:
    """Three rewards of 5 count 3."""
    replay = Replay(env=Line.env, capacity=100, n_step=3, streams=1, gamma=1.0, clip_reward=True)
    Line().fill(replay, 50, first=10)
    np.testing.assert_array_equal(replay.sample(20, np.random.default_rng(0)).reward, 3.0)


def test_a_memory_that_is_resumed_clips_as_its_settings_say_now() -> None:
    """It holds raw rewards: signs that were kept would be mixed with the rewards that come."""
    for clip in (False, True):
        saved, replay = (
            Replay(env=Line.env, capacity=100, n_step=1, streams=1, gamma=1.0, clip_reward=each) for each in (not clip, clip)
        )
        Line().fill(saved, 50, first=5)
        replay.load_state_dict(saved.state_dict())
        for own, other in zip(replay.segments(), saved.segments(), strict=True):
            for part, held in zip(own.parts, other.parts, strict=True):
                part[:] = held
        found = replay.sample(50, np.random.default_rng(0)).reward
        assert found.max() == 1.0 if clip else found.min() > 4.0


def test_draws_are_even() -> None:
    """Each of 46 transitions comes within five standard deviations of its share."""
    replay = Replay(env=Line.env, capacity=10_000, n_step=5, streams=1, gamma=1.0)
    Line().fill(replay, 50)
    found = replay.sample(46_000, np.random.default_rng(5))
    counts = np.bincount(found.action, minlength=50)
    assert np.all(counts[46:] == 0)
    assert np.all(np.abs(counts[:46] - 1_000) < 5 * np.sqrt(1_000))


def test_an_environment_pushed_out_begins_anew() -> None:
    """Many fast actors recycle the block of a slow one: it goes on in a new block, and loses only the window between."""
    replay = Replay(env=Line.env, capacity=40, n_step=2, streams=1, gamma=1.0)
    replay.insert(Line().message(0, 5), stream="slow", seq=0)
    Line().fill(replay, 100, first=1_000)
    replay.insert(Line().message(5, 5), stream="slow", seq=1)
    slow = everything(replay).action
    assert set(slow[slow < 1_000].tolist()) == {5, 6, 7, 8}


def test_senders_without_a_write_position_are_forgotten() -> None:
    """Each restart of an actor is a new sender: what is saved in each checkpoint must not grow with their number."""
    replay = Replay(env=Line.env, capacity=40, n_step=2, streams=1, gamma=1.0)
    for incarnation in range(50):
        replay.insert(Line().message(0, 5), stream=("actor", incarnation), seq=0)
    state = replay.state_dict()
    assert len(state["seq"]) <= len(state["writers"]) + 1
    assert state["seq"][-1] == [("actor", 49), 0]


def test_continuous_actions_are_kept_as_they_are() -> None:
    """[B, A] float32 per row."""
    action = ActionSpec(shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0))
    env = EnvSpec(observation_shape=(1,), observation_dtype="float32", action=action, frame_stack=1, frame_skip=1)
    replay = Replay(env=env, capacity=100, n_step=1, streams=1, gamma=1.0)
    message = Line().message(0, 10)
    message["action"] = np.repeat(message["obs"][:-1], 2, axis=2) / 16
    replay.insert(message, stream="line", seq=0)
    found = replay.sample(8, np.random.default_rng(0))
    np.testing.assert_array_equal(found.action * 16, np.repeat(found.observation, 2, axis=1))


def test_the_bytes_of_a_million_atari_frames() -> None:
    """The size is that of the arrays, known before they are allocated; no page of them is touched here."""
    action = ActionSpec(choices=(18,), shape=())
    env = EnvSpec(observation_shape=(84, 84), observation_dtype="uint8", action=action, frame_stack=4, frame_skip=4)
    replay = Replay(env=env, capacity=1_000_000, n_step=3, gamma=0.99, streams=64)
    assert replay.layout.capacity >= 1_000_000
    assert 7.0e9 < replay.layout.nbytes <= 7.4e9


def test_an_image_among_several_arrays_is_held_once() -> None:
    """With stacks of four: all that a memory holds is within 2 % of the bytes of its observations."""
    leaves = (Leaf(path="camera", shape=(84, 84), dtype="uint8"), Leaf(path="joints", shape=(16,), dtype="float32"))
    size = 84 * 84 + 16 * 4
    action = ActionSpec(choices=(4,), shape=())
    env = EnvSpec(observation_shape=(size,), observation_dtype="uint8", action=action, frame_stack=4, frame_skip=1, leaves=leaves)
    layout = Replay(env=env, capacity=100_000, n_step=1, gamma=0.99, streams=16).layout
    assert size <= layout.nbytes / layout.capacity <= 1.02 * size


@pytest.mark.parametrize(("capacity", "actors", "length"), [(20_000, 32, 16), (20_000, 32, 4), (10_000, 8, 16)])
def test_a_memory_holds_nine_tenths_of_its_capacity_however_many_environments_write(capacity, actors, length) -> None:
    """Each of them has a block that is not yet full; through the learner, as `rookery learner` builds it."""
    values = {"replay_capacity": capacity, "n_step": 3, "warmup": 1}
    settings = Settings(
        algorithm=DQNSettings(**values), model={"hidden": [4]}, env={"num_envs": 16}, actor={"count": actors},
        learner={"batch": 1, "max_policy_lag": 100}, rollout={"length": length},
    )  # fmt: skip
    env = EnvSpec(
        observation_shape=(1,),
        observation_dtype="float32",
        action=ActionSpec(choices=(2,), shape=()),
        frame_stack=1,
        frame_skip=1,
    )
    learner, row = (
        build_run_algorithm(settings, env, seed=0),
        {"action": "i8", "reward": "f4", "terminated": "?", "truncated": "?"},
    )
    arrays = {name: np.zeros((length, 16), dtype) for name, dtype in row.items()} | {"valid": np.ones((length, 16), bool)}
    arrays |= {"obs": np.zeros((length + 1, 16, 1), np.float32), "start": np.zeros((length + 1, 16), bool)}
    arrays |= {"final_obs": np.zeros((0, 1), np.float32), "final_index": np.zeros(0, np.int64)}
    least = 1.0
    for seq in range(3 * capacity // (actors * 16 * length)):
        samples = [Experience(worker=WorkerKey(name=f"{actor}", incarnation=0), seq=seq, version=0, env_steps=1, arrays=arrays)
                   for actor in range(actors)]  # fmt: skip
        for sample in samples:
            learner.ingest([sample])
            if seq * actors * 16 * length > 1.5 * capacity:
                least = min(least, len(learner._replay) / capacity)
    assert least >= 0.9


def test_the_share_of_incomplete_blocks_grows_with_environments_that_were_not_planned_for() -> None:
    """Actors of other machines may join a run: each environment keeps a block that holds nothing else."""
    replay, seen = Replay(env=Line.env, capacity=1_000, n_step=1, streams=4, gamma=1.0), {}
    for streams in (4, 20):
        least = 1.0
        for seq in range(60):
            for stream in range(streams):
                replay.insert(Line().message(10 * seq, 10), stream=(streams, stream), seq=seq)
            least = min(least, len(replay) / replay.layout.capacity) if seq > 40 else least
        seen[streams] = replay.incomplete, least
    assert seen[4][0] <= 0.1
    assert seen[4][1] >= 0.9
    assert seen[20][0] == 0.5
    assert seen[20][1] < 0.75


def test_an_empty_memory_gives_nothing() -> None:
    """One row without its window is not yet a transition."""
    replay = Replay(env=Line.env, capacity=100, n_step=5, streams=1, gamma=1.0)
    replay.insert(Line().message(0, 2), stream="line", seq=0)
    assert len(replay) == 0
    with pytest.raises(InternalError, match="empty replay"):
        replay.sample(1, np.random.default_rng(0))


def test_observations_are_written_over_by_the_next_sample() -> None:
    """The memory for them is allocated once per batch size; the other arrays stay."""
    replay = Replay(env=Line.env, capacity=100, n_step=1, streams=1, gamma=1.0)
    Line().fill(replay, 50)
    rng = np.random.default_rng(0)
    seen = deque([replay.sample(8, rng) for _ in range(2)])
    assert np.shares_memory(seen[0].observation, seen[1].observation)
    assert not np.shares_memory(seen[0].action, seen[1].action)


def copied(replay: Replay, other: Replay) -> None:
    """Give `other` what a checkpoint keeps of `replay`."""
    other.load_state_dict(replay.state_dict())
    for source, target in zip(replay.segments(), other.segments(), strict=True):
        assert source.nbytes == target.nbytes
        for here, there in zip(source.parts, target.parts, strict=True):
            there[:] = here


@pytest.mark.parametrize("messages", [0, 1, 3, 17, 90])
def test_a_memory_that_was_saved_goes_on_bit_for_bit(messages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty, begun, full and recycled, in several segments: what is inserted, drawn and overwritten later is the same."""
    monkeypatch.setattr("common.replay.blocks.SEGMENT_BYTES", 500)
    first, second = (Replay(env=Line.env, capacity=200, n_step=3, streams=1, gamma=0.9) for _ in range(2))
    rngs = np.random.default_rng(1), np.random.default_rng(1)
    Line().fill(first, 10 * messages)
    copied(first, second)
    for turn in range(messages, messages + 60):
        rows = []
        for replay, rng in zip((first, second), rngs, strict=True):
            Line().fill(replay, 10, first=10 * turn)
            rows.append(replay.sample(16, rng))
        for name in ("observation", "action", "reward", "discount", "next_observation"):
            np.testing.assert_array_equal(getattr(rows[0], name), getattr(rows[1], name))
    assert len(first) == len(second)
    assert first.state_dict()["writers"] == second.state_dict()["writers"]


def test_only_segments_that_were_written_to_have_new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint writes those alone."""
    monkeypatch.setattr("common.replay.blocks.SEGMENT_BYTES", 1)  # each block is one
    replay = Replay(env=Line.env, capacity=400, n_step=1, streams=1, gamma=1.0)
    Line().fill(replay, 200)
    before = [segment.key for segment in replay.segments()]
    assert before == [segment.key for segment in replay.segments()]
    Line().fill(replay, 10, first=200)
    after = [segment.key for segment in replay.segments()]
    assert 1 <= len(set(after) - set(before)) <= 2
    contents = {segment.key: b"".join(segment.parts) for segment in replay.segments()}
    replay.sample(10, np.random.default_rng(1))
    assert contents == {segment.key: b"".join(segment.parts) for segment in replay.segments()}


def test_contents_of_another_layout_are_refused() -> None:
    """The user changed replay_capacity or n_step; nothing is mixed up."""
    first = Replay(env=Line.env, capacity=200, n_step=3, streams=1, gamma=0.9)
    for other in ({"capacity": 400, "n_step": 3}, {"capacity": 200, "n_step": 2}):
        second = Replay(env=Line.env, streams=1, gamma=0.9, **other)
        with pytest.raises(ResourceError, match="another layout"):
            second.load_state_dict(first.state_dict())
