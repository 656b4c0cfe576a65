"""Checks of the episodes that workers report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.algorithms.episode_reports import TrajectoryEpisodes, check_gradient_episodes
from common.errors import DropReason, ProtocolError
from common.protocol.messages import ExperienceMessage, Gradient, Trajectory

pytestmark = pytest.mark.pure


Rows = list[tuple[int, int]]


def trajectory(seq: int = 0, *, episodes: list[tuple[float, int]], at: Rows | None = None, **rows: Any) -> Trajectory:
    """Return four rows of two environments, each reward 1; nothing ends unless `rows` set an end.

    The episodes are reported `at` rows, by default those of the first ends.
    """
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
    ends = sorted([*rows.get("terminated", []), *rows.get("truncated", [])]) if at is None else at
    arrays["episode_index"] = np.array([2 * t + b for t, b in ends][: len(episodes)], np.int32)
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
    message = TrajectoryEpisodes()(trajectory(episodes=[(2.0, 2)], **rows))
    assert counted(message) == [(2.0, 2)]
    assert message.arrays["episode_env"].tolist() == [0]


@pytest.mark.parametrize(
    ("episodes", "rows"),
    [
        ([(1e6, 1)] * 100, {"start": FIRST}),  # ends that are in no row
        ([(2.5, 2)], SAME_STEP),
        ([(2.0, 3)], SAME_STEP),
        ([(2.0, 2), (2.0, 2)], SAME_STEP),
        ([], SAME_STEP),  # a bad episode kept back
        ([(2.0, -2)], SAME_STEP),
        ([(2.0, 2)], SAME_STEP | {"at": [(1, 1)]}),
        ([(2.0, 2)], SAME_STEP | {"at": [(-3, 0)]}),
        ([(1.0, 1), (1.0, 1)], {"terminated": [(0, 0), (0, 1)], "start": [*FIRST, (1, 0), (1, 1)], "at": [(0, 1), (0, 0)]}),
        ([(2.0, 2), (2.0, 2)], SAME_STEP | {"at": [(1, 0), (1, 0)]}),
        ([(2.0, 2)], {"terminated": [(1, 0)], "start": FIRST}),  # a lost life
    ],
)
def test_a_false_report_is_refused(episodes: list[tuple[float, int]], rows: dict[str, Any]) -> None:
    """Forged episodes; a wrong return or length; too many; too few; nonsense; rows of others, outside, not in order, twice."""
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


@pytest.mark.parametrize("name", ["episode_return", "episode_length", "episode_index"])
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
    check(trajectory(episodes=[(2.0, 2), (2.0, 2)], at=[(1, 1), (3, 1)], **rows))
    message = trajectory(1, episodes=[(5.0, 5)], valid=[(0, 1)], terminated=[(0, 0)], start=[(1, 0), (1, 1)])
    assert counted(check(message)) == [(5.0, 5)]


def test_a_lost_life_is_not_taken_for_the_end_of_an_episode_as_long() -> None:
    """Environment 0 loses a life in the last row, in which the episode of environment 1 ends, with the same return and length."""
    check = TrajectoryEpisodes()
    lost = trajectory(episodes=[(4.0, 4)], at=[(3, 1)], start=FIRST, terminated=[(3, 0), (3, 1)])
    assert check(lost).arrays["episode_env"].tolist() == [1]
    message = trajectory(1, episodes=[(5.0, 5)], valid=[(0, 1)], terminated=[(0, 0)], start=[(1, 0), (1, 1)])
    assert counted(check(message)) == [(5.0, 5)]


def test_episodes_of_a_gradient_are_bounded_by_its_env_steps() -> None:
    """Rewards are not sent: all but one episode of each environment lie inside the message."""

    def check(lengths: list[int], returns: list[float], env: list[int] | None = None) -> ExperienceMessage:
        arrays = {"episode_return": np.array(returns, np.float32), "episode_length": np.array(lengths, np.int32)}
        arrays["episode_env"] = np.array([1] * len(returns) if env is None else env, np.int32)
        message = Gradient(seq=0, version=0, env_steps=8, env_steps_sent=0, arrays=arrays)
        return check_gradient_episodes(message, num_envs=2, most_reward=10.0)

    assert check([900, 4, 4, 700], [1.0] * 4)
    for lengths, returns in (([1] * 9, [0.0] * 9), ([900, 4, 5, 700], [1.0] * 4), ([0], [0.0]), ([2], [21.0]), ([2, 2], [1.0])):
        with pytest.raises(ProtocolError) as refused:
            check(lengths, returns)
        assert refused.value.reason is DropReason.EPISODES
    for env in ([2], [-1], [], [0, 1]):
        with pytest.raises(ProtocolError, match="environments") as refused:
            check([4], [1.0], env)
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
