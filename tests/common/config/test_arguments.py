"""The options that all services share."""

from __future__ import annotations

import pytest

from common.config import arguments

pytestmark = pytest.mark.service


def read(words, named=None, environ=None):
    """Settings as a service reads them."""
    parsed = arguments.service_parser("actor", "Step.", "rookery actor").parse_intermixed_args(words)
    return arguments.settings_from_arguments(parsed, named or {}, environ or {}).settings


def test_words_win_over_options_and_options_over_the_environment():
    """The most particular wish wins."""
    environ = {"ROOKERY_ACTOR__NAME": "from-environment", "ROOKERY_RUN__SEED": "4"}
    settings = read(["--log-format", "json"], {"actor.name": "from-option", "actor.learner": None}, environ)
    assert (settings.actor.name, settings.run.seed, settings.log.format) == ("from-option", 4, "json")
    assert settings.actor.learner == "tcp://127.0.0.1:5700"
    assert read(["actor.name=from-words"], {"actor.name": "from-option"}, environ).actor.name == "from-words"


def test_help_says_what_it_is_for_and_shows_an_example(capsys):
    """A newcomer's first word is --help."""
    with pytest.raises(SystemExit) as end:
        read(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for words in ("rookery actor", "Step.", "example: rookery actor", "--config", "section.key=value", "--debug"):
        assert words in shown


@pytest.mark.parametrize("words", [["--nonsense"], ["--log-format", "xml"], ["--deb"]])
def test_a_slip_costs_one_line(words, capsys):
    """Exit code 2; the line names the word and says where to look."""
    with pytest.raises(SystemExit) as end:
        read(words)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("rookery actor: error: ")
    assert err.endswith("see rookery actor --help\n")
    assert words[-1] in err
    assert err.count("\n") == 1
