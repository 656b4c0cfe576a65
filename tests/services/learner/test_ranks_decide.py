"""Decisions of several ranks, and the version from which they continue."""

from __future__ import annotations

import pytest

from common.errors import InternalError, ResourceError
from services.learner.coverage import Coverage
from services.learner.ranks import REASONS, Agreement, Vote, common_version, decide
from tests.ranks import on_every_rank

pytestmark = pytest.mark.pure


def vote(**changed):
    counts = {"messages": 1, "env_steps": 8, "episodes": 0}
    return Vote(**{"ready": True, **counts, "reason": 0, "save": False, "weights": 0} | changed)


def test_an_update_begins_when_every_rank_is_ready_and_one_has_experience():
    assert decide([vote(), vote(messages=0, env_steps=0)]).train
    assert not decide([vote(), vote(ready=False)]).train
    assert not decide([vote(messages=0), vote(messages=0)]).train


def test_ranks_are_idle_where_all_are_ready_and_none_has_experience():
    assert decide([vote(messages=0), vote(messages=0)]).idle
    assert not decide([vote(messages=0), vote(messages=0, ready=False)]).idle
    assert not decide([vote(messages=0), vote()]).idle


def test_one_rank_ends_the_run_of_all_and_no_update_begins():
    decision = decide([vote(), vote(reason=REASONS.index("stopped"))])
    assert (decision.reason, decision.train) == ("stopped", False)


def test_one_rank_makes_all_write_a_checkpoint_and_env_steps_are_summed():
    decision = decide([vote(env_steps=5, episodes=2), vote(save=True, env_steps=7)])
    assert (decision.save, decision.env_steps, decision.episodes) == (True, 12, 2)


def test_ranks_of_different_weights_end_with_an_error():
    with pytest.raises(InternalError, match="weights of the ranks differ"):
        decide([vote(weights=1), vote(weights=2)])


def test_votes_and_episodes_are_exchanged_between_ranks():
    def work(ranks):
        agreement = Agreement(ranks)
        own = [1.5] * ranks.index
        decision = agreement.decide(vote(env_steps=ranks.index, episodes=len(own)))
        return decision.env_steps, agreement.episodes(own, [3] * ranks.index, Coverage(4, ranks.index, 2), decision.episodes)

    assert on_every_rank(3, work) == [(3, ([1.5, 1.5, 1.5], [3, 3, 3], Coverage(12, 3, 6)))] * 3


def test_the_coverage_of_all_ranks_is_exchanged_where_no_episode_ended_too():
    def work(ranks):
        return Agreement(ranks).episodes([], [], Coverage(4, ranks.index), 0)

    assert on_every_rank(2, work) == [([], [], Coverage(8, 1))] * 2


@pytest.mark.parametrize(
    ("versions", "wanted"),
    [(([7], [7]), 7), (([9, 7, 5], [8, 7]), 7), (([9, 5], [8, 5, 3], [5]), 5), (([9], []), -1), (([9], [8]), -1)],
)
def test_ranks_continue_from_the_newest_version_that_all_have(versions, wanted):
    def work(ranks):
        own = versions[ranks.index]
        return common_version(ranks, lambda most: max((each for each in own if most is None or each <= most), default=-1))

    assert on_every_rank(len(versions), work) == [wanted] * len(versions)


def test_work_that_fails_on_one_rank_fails_on_all():
    def work(ranks):
        def part():
            if ranks.index == 1:
                raise ResourceError("the disk is full")
            return ranks.index

        with pytest.raises(ResourceError) as raised:
            Agreement(ranks).together(part)
        return str(raised.value), Agreement(ranks).together(lambda: ranks.index)

    other = "another rank cannot do its part: found rank 1; its log has the reason"
    assert on_every_rank(3, work) == [(text, [0, 1, 2]) for text in (other, "the disk is full", other)]
