"""The actor's command line."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from services.actor.settings import parse

pytestmark = pytest.mark.service


def test_one_fact_is_enough():
    """`rookery actor --learner tcp://host:port`, as on a second machine; all else comes with the Welcome."""
    invocation = parse(["--learner", "tcp://10.0.0.7:5700"], {})
    assert invocation.settings.actor.learner == "tcp://10.0.0.7:5700"
    assert (invocation.settings.actor.name, invocation.debug) == ("", False)


def test_the_environment_can_say_it_too():
    """A container gets its settings as variables, and its command line from the image."""
    environ = {"ROOKERY_ACTOR__LEARNER": "tcp://learner:5700", "ROOKERY_METRICS__PORT": "9100"}
    settings = parse(["--name", "actor-3"], environ).settings
    assert (settings.actor.learner, settings.actor.name, settings.metrics.port) == ("tcp://learner:5700", "actor-3", 9100)


@pytest.mark.parametrize("address", ["10.0.0.7:5700", "tcp://:5700", "tcp://10.0.0.7:99999"])
def test_an_address_that_cannot_be_is_refused(address):
    """Before anything is waited for."""
    with pytest.raises(ConfigError, match="tcp://host:port"):
        parse(["--learner", address], {})


def test_an_unknown_option_is_one_line_and_exit_code_2(capsys):
    """No page of usage that hides the word that was wrong."""
    with pytest.raises(SystemExit) as end:
        parse(["--lerner", "tcp://10.0.0.7:5700"], {})
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
