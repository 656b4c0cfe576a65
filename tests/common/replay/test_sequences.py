"""The replay memory of sequences against a list of episodes, kept beside it."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.envs.spec import ActionSpec, EnvSpec
from common.errors import ConfigError, InternalError, ResourceError
from common.replay.sequences import SequenceReplay, Sequences
from tests.common.replay.games import GAMMA, Game, Key, Mode, Player, code, stacked, window

pytestmark = pytest.mark.pure

ACTION = ActionSpec(choices=(10**9,), shape=())
ENV = EnvSpec(observation_shape=(3,), observation_dtype="float32", action=ACTION, frame_stack=1, frame_skip=1)
LENGTH, STATE = 6, 2


def build(env: EnvSpec = ENV, **given: object) -> SequenceReplay:
    """A memory of a hundred rollouts of 6 rows, unless said otherwise."""
    sizes = {"capacity": 600, "length": LENGTH, "state_size": STATE, "burn_in": 2, "n_step": 3, "gamma": GAMMA, "streams": 1}
    return SequenceReplay(env=env, **(sizes | given))  # type: ignore[arg-type]


def everything(replay: SequenceReplay) -> Sequences:
    """All sequences that can be sampled, each once."""

    class Each:
        """Draws each number once."""

        @staticmethod
        def integers(high: int, *, size: int) -> np.ndarray:
            """As a generator's."""
            assert high == size
            return np.arange(high)

    return replay.sample(len(replay), Each())  # type: ignore[arg-type]


def memory_of(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """States [2, B, S] that say which observation comes next: the newest frame before row 0, and the last frame."""
    first = arrays["obs"][len(arrays["obs"]) - LENGTH - 1].reshape(arrays["reward"].shape[1], -1)[:, :1]
    last = arrays["obs"][-1].reshape(arrays["reward"].shape[1], -1)[:, :1]
    return np.stack([np.repeat(first, STATE, 1), np.repeat(last, STATE, 1)])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_windows_inside_sequences_are_those_of_the_list_of_episodes(data: st.DataObject) -> None:
    """Ends, reset rows, lost messages, two actors, both autoreset modes, agents that left, rollouts overwritten."""
    draw = data.draw
    mode: Mode = draw(st.sampled_from(["next_step", "same_step", "agents"]))
    size, n_step, num_envs = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    burn_in = draw(st.integers(0, LENGTH - n_step))
    env = EnvSpec(
        observation_shape=draw(st.sampled_from([(3,), (1, 2)])),
        observation_dtype="float32",
        action=ACTION,
        frame_stack=size,
        frame_skip=1,
    )
    replay = build(env, burn_in=burn_in, n_step=n_step, capacity=draw(st.sampled_from([60, 6_000])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    games = [Game(number=number, rng=rng, mode=mode) for number in range(2 * num_envs)]
    players = [Player(games[:num_envs], env, LENGTH), Player(games[num_envs:], env, LENGTH)]
    runs: dict[int, list[list[Key]]] = {game.number: [[]] for game in games}  # env steps without a gap between them
    sent = [0, 0]
    for peer, lost in draw(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([False, False, True])), max_size=25)):
        arrays, steps = players[peer].message()
        if not lost:
            arrays["memory"] = memory_of(arrays)
            assert replay.insert(arrays, stream=peer, seq=sent[peer]) == LENGTH * num_envs
        sent[peer] += 1
        for game, of_game in zip(players[peer].games, steps, strict=True):
            runs[game.number].append([]) if lost else runs[game.number][-1].extend(of_game)
    if not len(replay):
        return
    found = everything(replay)
    flat = found.observation.reshape(-1, *env.network_input_shape)
    count = len(found.memory)
    assert np.all(found.index // count >= burn_in)
    assert np.all(found.index // count < burn_in + LENGTH)
    pieces = [(piece, games[number]) for number, several in runs.items() for piece in several]
    places = {code(key): (piece, start, game) for piece, game in pieces for start, key in enumerate(piece)}
    for at, action in enumerate(found.action.tolist()):
        piece, start, game = places[action]
        span = int(found.env_steps[at])
        wanted = window(piece, start, game, n_step)
        assert wanted is not None
        after = piece[start + span] if start + span < len(piece) else None
        if mode == "same_step" and span < n_step and after is not None and game.ends.get(after) == "truncated":
            wanted = window(piece, start, game, span)  # its last observation came separately, so that env step is left out
            assert wanted is not None
        np.testing.assert_array_equal(flat[found.index[at]], stacked(piece[start], env))
        assert found.reward[at] == pytest.approx(wanted.reward, abs=1e-5)
        assert found.discount[at] == pytest.approx(wanted.discount)
        if wanted.discount:
            np.testing.assert_array_equal(flat[found.following[at]], stacked(wanted.after, env))
    np.testing.assert_array_equal(found.memory[:, 0], found.observation[0].reshape(count, size, -1)[:, -1, 0])
    np.testing.assert_array_equal(found.later_memory[:, 0], found.observation[LENGTH].reshape(count, size, -1)[:, -1, 0])


class Line:
    """One environment without ends: frame, action and reward of row t are its number t."""

    @staticmethod
    def message(number: int) -> dict[str, np.ndarray]:
        """The rows of a rollout."""
        rows = np.arange(number * LENGTH, (number + 1) * LENGTH + 1)
        none = np.zeros((LENGTH, 1), np.bool_)
        return {
            "obs": np.repeat(rows[:, None, None], 3, axis=2).astype(np.float32),
            "start": (rows == 0)[:, None],
            "action": rows[:-1, None],
            "reward": rows[:-1, None].astype(np.float32),
            "terminated": none,
            "truncated": none,
            "valid": ~none,
            "memory": np.full((2, 1, STATE), number, np.float32),
        }

    def fill(self, replay: SequenceReplay, rollouts: int, *, first: int = 0) -> None:
        """Insert rollouts one after the other."""
        for number in range(first, first + rollouts):
            replay.insert(self.message(number), stream="line", seq=number)


def test_each_env_step_is_trained_on_once() -> None:
    """Sequences overlap by the burn-in, which is not trained on but where the actor began."""
    replay = build(burn_in=2)
    Line().fill(replay, 10)
    found = everything(replay)
    assert sorted(found.action.tolist()) == list(range(2, 9 * LENGTH + 2))
    assert len(replay) == 9 * LENGTH  # the tenth rollout has no successor yet
    np.testing.assert_array_equal(found.memory[:, 0], np.arange(9))
    np.testing.assert_array_equal(found.later_memory[:, 0], np.arange(1, 10))


def test_what_is_overwritten_is_never_drawn_again() -> None:
    """Draws by the real sampler, as the ring turns, only ever show rollouts that are still there."""
    replay, rng = build(capacity=60), np.random.default_rng(3)
    for turn in range(40):
        Line().fill(replay, 1, first=turn)
        if turn:
            found = replay.sample(2 * LENGTH, rng)
            assert found.observation.shape == (2 + LENGTH + 3, 2, 3)
            assert found.memory.min() >= turn - 9
            np.testing.assert_array_equal(found.observation.reshape(-1, 3)[found.following][:, 0], found.action + 3)


def test_the_share_that_cannot_be_drawn_grows_with_environments_that_were_not_planned_for() -> None:
    """Of each environment the newest rollout: with as many as the memory has rollouts, nothing is left to draw."""
    seen = {}
    for streams in (10, 25, 100):
        replay = build(streams=10)
        for number, stream in itertools.product(range(12), range(streams)):
            replay.insert(Line().message(number), stream=stream, seq=number)
        seen[streams] = replay.incomplete, len(replay) / 600
    assert seen == {10: (0.1, 0.9), 25: (0.25, 0.75), 100: (1.0, 0.0)}


def test_a_restarted_memory_goes_on_with_the_bytes_that_it_saved() -> None:
    """Segments and state: the same samples, and the next rollout follows the newest."""
    replay, copied = build(), build()
    Line().fill(replay, 30)
    state = copy.deepcopy(replay.state_dict())
    copied.load_state_dict(state)
    for saved, restored in zip(replay.segments(), copied.segments(), strict=True):
        for source, target in zip(saved.parts, restored.parts, strict=True):
            target[:] = source
    for each in (replay, copied):
        Line().fill(each, 3, first=30)
    first, second = (each.sample(10 * LENGTH, np.random.default_rng(1)) for each in (replay, copied))
    for name in ("observation", "action", "reward", "memory", "later_memory"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    with pytest.raises(ResourceError, match="of another layout"):
        build(capacity=1_200).load_state_dict(state)


def test_a_segment_that_was_written_to_has_another_key() -> None:
    """Else the next checkpoint would keep the old bytes."""
    replay = build(capacity=60)
    Line().fill(replay, 30)
    before = [segment.key for segment in replay.segments()]
    Line().fill(replay, 1, first=30)
    assert [segment.key for segment in replay.segments()] != before


def test_rewards_are_clipped_before_they_are_summed() -> None:
    """Three rewards of more than 1 count 1 + 0.9 + 0.81."""
    replay = build(clip_reward=True)
    Line().fill(replay, 10, first=1)
    np.testing.assert_allclose(everything(replay).reward, 2.71, rtol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    """In one line each."""
    with pytest.raises(ConfigError, match=r"burn_in: found 4, wanted at most 3 = rollout.length 6 less algorithm.n_step 3"):
        build(burn_in=4)
    with pytest.raises(ConfigError, match="replay_capacity: found 599, wanted at least 600"):
        build(capacity=599, streams=10)
    with pytest.raises(InternalError, match="empty replay"):
        build().sample(LENGTH, np.random.default_rng(0))
    assert len(build().sample(0, np.random.default_rng(0)).action) == 0


def test_a_stream_that_was_silent_for_a_turn_of_the_memory_does_not_go_on_in_rows_of_another():
    """Its last rollout has been overwritten meanwhile."""
    replay = build(capacity=60)
    for number in range(1, 6):
        replay.insert(Line.message(number), stream="b", seq=number)
    replay.insert(Line.message(100), stream="a", seq=0)
    for number in range(6, 17):
        replay.insert(Line.message(number), stream="b", seq=number)
    replay.insert(Line.message(101), stream="a", seq=1)
    found = everything(replay)
    np.testing.assert_array_equal(found.observation.reshape(-1, 3)[found.following][:, 0], found.action + 3)
