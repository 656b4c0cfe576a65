"""Messages of errors."""

import pytest

from common.errors import ConfigError, DropReason, ProtocolError

pytestmark = pytest.mark.pure


def test_a_message_is_fact_found_wanted_and_fix():
    error = ConfigError("env.num_envs", found=0, wanted="at least 1", fix="set it")
    assert str(error) == "env.num_envs: found 0, wanted at least 1; set it"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("the learner refuses this worker: \x1b[2J\x9b31m\u202edone"),
        ConfigError("name", found="\x1b[2J\x9b31m\u202edone"),
        ProtocolError(DropReason.DECODE, "tag", wanted="\x1b[2J\x9b31m\u202edone"),
        ConfigError("name", fix="\x1b[2J\x9b31m\u202edone"),
    ],
)
def test_terminal_escape_codes_of_another_process_are_escaped(error):
    """The text of a Refusal is printed on the terminal of the worker's owner."""
    assert str(error).isprintable()
    assert r"\x1b[2J\x9b31m\u202edone" in str(error)


def test_line_breaks_and_letters_of_any_language_stay():
    assert str(ConfigError("2 problems:\n  1. größe", found="日本")) == "2 problems:\n  1. größe: found 日本"
