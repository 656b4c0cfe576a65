"""The sums of the ledger, apart from any message."""

from __future__ import annotations

import pytest

from common.errors import DropReason, InternalError
from common.protocol.ledger import Account, Ledger, sum_counts
from common.protocol.messages import Dropped

pytestmark = pytest.mark.pure


def test_what_an_actor_stepped_is_in_flight_until_it_is_received() -> None:
    """A Report counts 30 steps, of which a first rollout of 10 arrives."""
    ledger, account = Ledger(), Account()
    ledger.report(account, 30)
    assert (ledger.produced, ledger.in_flight, account.in_flight) == (30, 30, 30)
    ledger.receive(account, 10)
    ledger.queued += 10
    assert (ledger.in_flight, account.in_flight) == (20, 20)
    ledger.check(account.in_flight)


def test_experience_that_overtakes_the_heartbeat_counts_as_produced() -> None:
    """The rollout is here before any report of its steps: in flight is never negative."""
    ledger, account = Ledger(), Account()
    ledger.receive(account, 10)
    ledger.queued += 10
    assert (ledger.produced, account.in_flight) == (10, 0)
    ledger.report(account, 10)
    assert ledger.produced == 10


def test_counters_of_a_worker_only_grow() -> None:
    """A confused worker reports less than before: what it said first stands."""
    ledger, account = Ledger(), Account()
    ledger.report(account, 30, [Dropped(reason="unfinished", env_steps=5)])
    ledger.report(account, 10, [Dropped(reason="unfinished", env_steps=2)])
    assert (ledger.produced, ledger.dropped.total(), ledger.in_flight) == (30, 5, 25)


def test_unknown_reasons_count_together_as_unfinished() -> None:
    """A newer actor drops for reasons that this learner has no name for: not a step of them is lost."""
    ledger, account = Ledger(), Account()
    drops = [Dropped(reason=reason, env_steps=steps) for reason, steps in (("rain", 3), ("snow", 4), ("stale", 2))]
    ledger.report(account, 20, drops)
    ledger.report(account, 20, drops)
    assert ledger.dropped == {DropReason.UNFINISHED: 7, DropReason.STALE: 2}
    ledger.check(account.in_flight)


def test_more_dropped_than_produced_raises_what_was_produced() -> None:
    """A liar's drops cannot make anything negative."""
    ledger, account = Ledger(), Account()
    ledger.report(account, 5, [Dropped(reason="stale", env_steps=2**62)])
    assert (ledger.produced, ledger.in_flight) == (2**62, 0)
    ledger.check(account.in_flight)


@pytest.mark.parametrize(("trained", "accounts"), [(1, 30), (0, 29), (31, -1)])
def test_a_ledger_that_does_not_balance_says_so(trained: int, accounts: int) -> None:
    """A step counted twice, or not at all, is a bug of ours: it must not pass in silence."""
    ledger = Ledger(produced=30, trained=trained)
    with pytest.raises(InternalError, match="does not balance"):
        ledger.check(accounts)


def test_a_restored_ledger_rolls_back_what_has_no_account() -> None:
    """Ten steps were queued at the checkpoint: six of an actor that may come back, four of one that had left."""
    ledger = Ledger.restored({"produced": 100, "trained": 80, "dropped": {"stale": 10}}, 6)
    assert (ledger.queued, ledger.in_flight, ledger.dropped[DropReason.ROLLED_BACK]) == (0, 6, 4)
    ledger.check(6)


def test_every_reason_is_in_the_summary() -> None:
    assert set(Ledger().as_dict()["dropped"]) == {str(reason) for reason in DropReason}


def test_ledgers_of_ranks_are_summed_by_column_and_reason() -> None:
    one = {"produced": 5, "trained": 2, "dropped": {"stale": 3, "gap": 0}}
    assert sum_counts([one, one]) == {"produced": 10, "trained": 4, "dropped": {"stale": 6, "gap": 0}}
    with pytest.raises(KeyError):
        sum_counts([one, {"produced": 5}])
