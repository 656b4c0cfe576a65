"""Schema of a rollout, and the checks of actions, indices and reported episodes."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.algorithms.on_policy import recorded_log_prob
from common.algorithms.payload import (
    TrajectoryEpisodes,
    check_gradient_episodes,
    check_trajectory,
    trajectory_payload,
    trajectory_schema,
)
from common.envs.spec import ActionSpec
from common.errors import DropReason, ProtocolError
from common.protocol.messages import ExperienceMessage, Gradient, Trajectory

pytestmark = pytest.mark.pure


# --- trajectories ---


def test_the_schema_of_stacked_images_and_numbered_actions(image_env):
    """The arrays of 5 steps of 2 environments, written out."""
    schema = trajectory_schema(image_env, length=5, num_envs=2, recorded=recorded_log_prob(length=5, num_envs=2))
    assert [(spec.name, spec.dtype, spec.shape) for spec in schema] == [
        ("obs", "uint8", (8, 2, 10, 12)),  # 2 frames of context, o_0..o_5
        ("start", "bool", (6, 2)),
        ("action", "int64", (5, 2)),
        ("reward", "float32", (5, 2)),
        ("terminated", "bool", (5, 2)),
        ("truncated", "bool", (5, 2)),
        ("valid", "bool", (5, 2)),
        ("final_obs", "uint8", (-1, 10, 12)),
        ("final_index", "int32", (-1,)),
        ("episode_return", "float32", (-1,)),
        ("episode_length", "int32", (-1,)),
        ("log_prob", "float32", (5, 2)),
    ]


def test_the_schema_of_vectors_and_continuous_actions(vector_env):
    """Pendulum: no stack, actions of one component, nothing recorded."""
    env = dataclasses.replace(vector_env, action=ActionSpec(n=0, shape=(1,), low=(-2.0,), high=(2.0,)))
    schema = {spec.name: spec for spec in trajectory_schema(env, length=5, num_envs=2, recorded=())}
    assert schema["obs"].shape == (6, 2, 2)
    assert (schema["action"].dtype, schema["action"].shape) == ("float32", (5, 2, 1))


def test_rollouts_of_both_autoreset_layouts_pass(image_env, make_sample):
    """A truncation with its last observation, one whose last observation is o_{t+1}, and a termination without."""
    ends = [[0, 1], [0, 0], [0, 0], [0, 0]]
    starts = [[0, 0], [0, 1], [0, 0], [0, 0], [0, 0]]
    final = [[[0] * 12] * 10]
    check_trajectory(image_env, make_sample(image_env).arrays)
    check_trajectory(image_env, make_sample(image_env, truncated=ends).arrays)
    check_trajectory(image_env, make_sample(image_env, terminated=ends, truncated=ends, start=starts).arrays)
    check_trajectory(image_env, make_sample(image_env, truncated=ends, start=starts, final_obs=final, final_index=[1]).arrays)


def test_continuous_actions_have_no_number_to_check(vector_env, make_sample):
    """The environment clips them itself."""
    env = dataclasses.replace(vector_env, action=ActionSpec(n=0, shape=(1,), low=(-2.0,), high=(2.0,)))
    check_trajectory(env, make_sample(env).arrays)


FRAME = [[0] * 12] * 10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"action": [[0, 1], [2, 3], [4, 0], [0, 0]]}, r"action outside the action space: found \[0, 4\], wanted 0 to 3"),
        ({"action": [[0, -1], [0, 0], [0, 0], [0, 0]]}, "action outside the action space"),
        ({"final_index": [0], "final_obs": []}, "different length"),
        ({"final_index": [8], "final_obs": [FRAME]}, "final_index outside the rollout"),
        ({"final_index": [-1], "final_obs": [FRAME]}, "final_index outside the rollout"),
        (
            {"truncated": [[1, 0], [0, 0], [0, 0], [0, 0]], "start": [[0, 0], [1, 0], [0, 0], [0, 0], [0, 0]]},
            "truncated episodes without final_obs",
        ),
    ],
)
def test_numbers_that_point_outside_are_refused(image_env, make_sample, given, message):
    """A faulty or hostile actor: it must cost a counter, not a crash in the middle of an update."""
    with pytest.raises(ProtocolError, match=message):
        check_trajectory(image_env, make_sample(image_env, **given).arrays)


def test_rollouts_are_sent_as_they_are_and_checked_as_trajectories(vector_env):
    """An action outside the action space fits every schema."""
    schema = trajectory_schema(vector_env, length=2, num_envs=1, recorded=())
    payload = trajectory_payload(env=vector_env, rollout=schema, settings=None, model=None, length=2, num_envs=1)
    assert (payload.message_type, payload.schema) == (Trajectory, schema)
    arrays = {spec.name: np.zeros([max(0, axis) for axis in spec.shape], spec.dtype) for spec in schema}
    payload.check(Trajectory(seq=0, version=0, env_steps=2, env_steps_sent=2, arrays=arrays))
    wrong = Trajectory(seq=0, version=0, env_steps=2, env_steps_sent=2, arrays=arrays | {"action": np.full((2, 1), 9)})
    with pytest.raises(ProtocolError, match="action outside"):
        payload.check(wrong)


# --- episodes ---


def trajectory(seq: int = 0, *, episodes: list[tuple[float, int]], **rows: Any) -> Trajectory:
    """Return four rows of two environments, each reward 1; nothing ends unless `rows` set an end."""
    arrays = {name: np.zeros((4, 2), np.bool_) for name in ("terminated", "truncated")} | {
        "start": np.zeros((5, 2), np.bool_),
        "valid": np.ones((4, 2), np.bool_),
        "reward": np.ones((4, 2), np.float32),
        "episode_return": np.array([value for value, _ in episodes], np.float32),
        "episode_length": np.array([length for _, length in episodes], np.int32),
    }
    for name, places in rows.items():
        for place in places:
            arrays[name][place] = name != "valid"
    return Trajectory(seq=seq, version=0, env_steps=8, env_steps_sent=0, arrays=arrays)


FIRST = [(0, 0), (0, 1)]  # starts of a new worker
SAME_STEP = {"terminated": [(1, 0)], "start": [*FIRST, (2, 0)]}  # environment 0 ends after two rows
NEXT_STEP = {"truncated": [(1, 0)], "valid": [(2, 0)], "start": [*FIRST, (3, 0)]}


def counted(message: ExperienceMessage) -> list[tuple[float, int]]:
    """The episodes in a message."""
    return list(zip(message.arrays["episode_return"].tolist(), message.arrays["episode_length"].tolist(), strict=True))


@pytest.mark.parametrize("rows", [SAME_STEP, NEXT_STEP])
def test_a_true_report_passes_as_it_is(rows: dict[str, Any]) -> None:
    """In both autoreset modes."""
    message = trajectory(episodes=[(2.0, 2)], **rows)
    assert TrajectoryEpisodes()(message) is message


@pytest.mark.parametrize(
    ("episodes", "rows"),
    [
        ([(1e6, 1)] * 100, {"start": FIRST}),  # ends that are in no row
        ([(2.5, 2)], SAME_STEP),
        ([(2.0, 3)], SAME_STEP),
        ([(2.0, 2), (2.0, 2)], SAME_STEP),
        ([], SAME_STEP),  # a bad episode kept back
        ([(2.0, -2)], SAME_STEP),
    ],
)
def test_a_false_report_is_refused(episodes: list[tuple[float, int]], rows: dict[str, Any]) -> None:
    """A hundred forged episodes; a wrong return or length; one too many; one too few; nonsense."""
    with pytest.raises(ProtocolError) as refused:
        TrajectoryEpisodes()(trajectory(episodes=episodes, **rows))
    assert refused.value.reason is DropReason.EPISODES


def test_returns_go_on_from_message_to_message() -> None:
    """Environment 0 ends after 2 and 4 rows more, environment 1 after 8."""
    check = TrajectoryEpisodes()
    check(trajectory(episodes=[(2.0, 2)], **SAME_STEP))
    second = {"terminated": [(1, 0), (3, 1)], "start": [(2, 0), (4, 1)]}
    assert counted(check(trajectory(1, episodes=[(4.0, 4), (8.0, 8)], **second))) == [(4.0, 4), (8.0, 8)]
    with pytest.raises(ProtocolError, match=r"episode 0 .*: found return 21.0, length 6, wanted return 6, length 6"):
        check(trajectory(2, episodes=[(21.0, 6)], terminated=[(3, 0)], start=[(4, 0)]))


def test_an_episode_whose_beginning_was_not_received_does_not_count() -> None:
    """After a reconnection, a gap, a refused message: nothing shows what it returned. The next one counts again."""
    check = TrajectoryEpisodes()
    ends = {"terminated": [(0, 0), (1, 0)], "start": [(1, 0), (2, 0)]}
    assert counted(check(trajectory(7, episodes=[(1e6, 900), (1.0, 1)], **ends))) == [(1.0, 1)]
    with pytest.raises(ProtocolError, match="length at least 1"):
        check(trajectory(9, episodes=[(1e6, 0), (1.0, 1)], **ends))


def test_an_end_that_is_kept_back_shows_in_the_next_message() -> None:
    """In the last row the end may have been a lost life; the following reset row shows that the episode ended."""
    check = TrajectoryEpisodes()
    check(trajectory(episodes=[], start=FIRST, terminated=[(3, 0)]))
    with pytest.raises(ProtocolError, match="not reported"):
        check(trajectory(1, episodes=[], valid=[(0, 0)], start=[(1, 0)]))


@pytest.mark.parametrize(
    "rows", [{"terminated": [(1, 0)], "start": [(2, 0)]}, {"truncated": [(1, 0)], "start": [(2, 0)]}, {"start": [(0, 0)]}]
)
def test_an_end_that_a_later_message_does_not_report_is_refused(rows: dict[str, Any]) -> None:
    check = TrajectoryEpisodes()
    check(trajectory(episodes=[], start=FIRST))
    with pytest.raises(ProtocolError, match="of the message"):
        check(trajectory(1, episodes=[], **rows))


@pytest.mark.parametrize("name", ["episode_return", "episode_length"])
def test_a_report_in_a_later_message_without_ends_is_refused(name: str) -> None:
    check = TrajectoryEpisodes()
    check(trajectory(episodes=[], start=FIRST))
    message = trajectory(1, episodes=[(21.0, 1)])
    with pytest.raises(ProtocolError, match="episodes of the message"):
        check(replace(message, arrays={**message.arrays, name: message.arrays[name][:0]}))


def test_after_a_gap_the_running_episode_does_not_count() -> None:
    check = TrajectoryEpisodes()
    check(trajectory(episodes=[], start=FIRST))
    check(trajectory(2, episodes=[]))
    assert counted(check(trajectory(3, episodes=[(13.0, 13)], terminated=[(0, 0)], start=[(1, 0)]))) == []


MISSING = [(2, 0), (3, 0)]  # rows that no env worker brought: environment 0 begins anew in the last one


def with_missing_rows(seq: int, *, missing: list[tuple[int, int]], **rows: Any) -> Trajectory:
    """Return a message with rows that are not valid and earn nothing."""
    message = trajectory(seq, valid=missing, **rows)
    message.arrays["reward"][tuple(np.transpose(missing))] = 0
    return message


@pytest.mark.parametrize(
    ("ends", "reported"),
    [
        ({}, []),  # abandoned
        ({"terminated": [(1, 0)]}, [(2.0, 2)]),  # its end is reported
        ({"terminated": [(1, 0)]}, []),  # a lost life, then abandoned
        ({"truncated": [(1, 0)]}, [(2.0, 2)]),
    ],
)
def test_an_episode_before_missing_rows_is_reported_where_it_ended_and_the_next_one_counts_from_zero(ends, reported) -> None:
    check = TrajectoryEpisodes()
    first = with_missing_rows(0, missing=MISSING, start=[*FIRST, (4, 0)], episodes=reported, **ends)
    assert counted(check(first)) == reported
    second = trajectory(1, episodes=[(2.0, 2)], terminated=[(1, 0)], start=[(0, 0), (2, 0)])
    assert counted(check(second)) == [(2.0, 2)]


def test_missing_rows_between_two_messages_abandon_the_running_episode() -> None:
    check = TrajectoryEpisodes()
    check(trajectory(episodes=[], start=FIRST))
    rows = {"start": [(2, 0), (4, 0)], "terminated": [(3, 0)]}
    assert counted(check(with_missing_rows(1, missing=[(0, 0), (1, 0)], episodes=[(2.0, 2)], **rows))) == [(2.0, 2)]


def test_an_episode_that_begins_after_missing_rows_counts_from_there() -> None:
    check = TrajectoryEpisodes()
    check(trajectory(episodes=[], start=FIRST))
    check(with_missing_rows(1, missing=[(0, 0), (1, 0)], episodes=[], start=[(2, 0)]))
    assert counted(check(trajectory(2, episodes=[(3.0, 3)], terminated=[(0, 0)], start=[(1, 0)]))) == [(3.0, 3)]


def test_a_truncated_episode_before_missing_rows_must_be_reported() -> None:
    with pytest.raises(ProtocolError, match="episodes of the message"):
        TrajectoryEpisodes()(with_missing_rows(0, missing=MISSING, start=[*FIRST, (4, 0)], truncated=[(1, 0)], episodes=[]))


def test_a_lost_life_in_the_last_row_is_distinguished_from_an_end_by_the_report() -> None:
    """Environment 0 lost a life; the shorter episode of environment 1 ended."""
    check = TrajectoryEpisodes()
    rows = {"start": [*FIRST, (2, 1)], "terminated": [(1, 1), (3, 0), (3, 1)]}
    check(trajectory(episodes=[(2.0, 2), (2.0, 2)], **rows))
    message = trajectory(1, episodes=[(5.0, 5)], valid=[(0, 1)], terminated=[(0, 0)], start=[(1, 0), (1, 1)])
    assert check(message) is message


def test_episodes_of_a_gradient_are_bounded_by_its_env_steps() -> None:
    """Rewards are not sent: all but one episode of each environment lie inside the message."""

    def check(lengths: list[int], returns: list[float]) -> ExperienceMessage:
        arrays = {"episode_return": np.array(returns, np.float32), "episode_length": np.array(lengths, np.int32)}
        message = Gradient(seq=0, version=0, env_steps=8, env_steps_sent=0, arrays=arrays)
        return check_gradient_episodes(message, num_envs=2, most_reward=10.0)

    assert check([900, 4, 4, 700], [1.0] * 4)
    for lengths, returns in (([1] * 9, [0.0] * 9), ([900, 4, 5, 700], [1.0] * 4), ([0], [0.0]), ([2], [21.0]), ([2, 2], [1.0])):
        with pytest.raises(ProtocolError) as refused:
            check(lengths, returns)
        assert refused.value.reason is DropReason.EPISODES


def test_another_check_goes_on_where_one_stopped() -> None:
    """In lockstep the next incarnation of an actor goes on with its episodes, by numbers of its own."""
    first, second = TrajectoryEpisodes(), TrajectoryEpisodes()
    first(trajectory(7, episodes=[(2.0, 2)], **SAME_STEP))
    second.go_on(first.state_dict(), 0)
    ends = {"terminated": [(1, 0), (3, 1)], "start": [(2, 0), (4, 1)]}
    assert counted(second(trajectory(0, episodes=[(4.0, 4), (8.0, 8)], **ends))) == [(4.0, 4), (8.0, 8)]
    first(trajectory(8, episodes=[], start=[]))
    third = TrajectoryEpisodes()
    third.go_on(first.state_dict(), 0)
    assert counted(third(trajectory(0, episodes=[(12.0, 12)], terminated=[(3, 1)], start=[(4, 1)]))) == [(12.0, 12)]
