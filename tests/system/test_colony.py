"""The helpers of these tests themselves."""

from __future__ import annotations

import signal

import pytest

pytestmark = pytest.mark.system


def test_a_wait_fails_at_once_where_a_service_has_ended_by_itself(colony, wait):
    colony.start("services.cli", "nonsense")
    with pytest.raises(pytest.fail.Exception, match=r"never happened: a wonder; ended meanwhile:(?s:.*)found 'nonsense'"):
        wait(lambda: False, "a wonder")


def test_a_wait_goes_on_where_the_test_has_ended_a_service(colony, wait):
    killed, refused = colony.start("http.server", "0"), colony.start("services.cli", "nonsense")
    killed.signal(signal.SIGKILL)
    assert refused.ended() == 2
    killed.process.wait()
    answers = iter([False, False, True])
    assert wait(lambda: next(answers), "the third answer")
