"""The protocol's page and the protocol's code say the same."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest

from common.protocol import limits
from common.protocol.arrays import DTYPES
from common.protocol.events import RefusalCode
from common.protocol.incarnation import TRANSITIONS
from common.protocol.messages import MESSAGE_TYPES, PROTOCOL_VERSION, ArraySpec, Dropped, Message, Reject

pytestmark = pytest.mark.pure

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL))


def documented(section: str) -> list[tuple[str, str]]:
    """Names and types in the field table of a section."""
    return re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", section, re.MULTILINE)


def in_words(hint: object) -> str:
    """A field's type as the page writes it."""
    return f"list of {get_args(hint)[0].__name__}" if get_origin(hint) is tuple else hint.__name__


def test_the_page_describes_every_message_and_no_other() -> None:
    """A message that is added, renamed or removed takes its section along, in the same order."""
    assert [name for name in SECTIONS if name != "Structures"] == [cls.__name__ for cls in MESSAGE_TYPES]


@pytest.mark.parametrize("cls", MESSAGE_TYPES, ids=lambda cls: cls.__name__)
def test_the_page_describes_every_field_in_order_with_its_type(cls: type[Message]) -> None:
    """Somebody writes a worker in another language from the page alone."""
    hints = get_type_hints(cls)
    wanted = [(field.name, in_words(hints[field.name])) for field in fields(cls) if field.name != "arrays"]
    assert documented(SECTIONS[cls.__name__]) == wanted


@pytest.mark.parametrize("cls", [ArraySpec, Dropped, Reject])
def test_the_page_describes_every_structure(cls: type) -> None:
    """The maps inside messages."""
    row = re.search(rf"^\| {cls.__name__} \| (.*) \|$", SECTIONS["Structures"], re.MULTILINE)[1]
    assert re.findall(r"`(\w+)`", row) == [field.name for field in fields(cls)]


def test_the_page_lists_every_limit_with_its_value() -> None:
    """A limit that is changed in code is changed on the page."""
    listed = {
        name: int(value.replace(",", "")) for name, value in re.findall(r"^\| ([A-Z_]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    }
    assert listed == {name: getattr(limits, name) for name in vars(limits) if name.isupper() and name not in ("KIB", "MIB")}


def test_the_page_names_the_version_the_codes_and_the_dtypes() -> None:
    """The closed lists of the protocol."""
    assert f"Version {PROTOCOL_VERSION}." in PAGE
    assert re.findall(r"`(\w+)`\s\(", SECTIONS["Refusal"]) == [str(code) for code in RefusalCode]
    assert all(dtype in PAGE for dtype in DTYPES)


def test_the_page_draws_the_states_of_a_worker_and_no_other_transition() -> None:
    """The diagram is read where the table in code is not."""
    drawn = re.findall(r"^    (\w+) --> (\w+) : (.+)$", PAGE, re.MULTILINE)
    assert drawn == [(str(state), str(after), cause) for state, nexts in TRANSITIONS.items() for after, cause in nexts.items()]


def test_the_page_lists_every_message_at_its_begin() -> None:
    """A newcomer reads the table before the sections."""
    table = PAGE[PAGE.index("## A run in messages") : PAGE.index("```mermaid")]
    assert set(re.findall(r"\[(\w+)\]\(#", table)) == {cls.__name__ for cls in MESSAGE_TYPES}


def test_tags_are_unique_and_spell_the_class() -> None:
    """The tag on the wire is what a person reads in a log."""
    assert [cls.tag for cls in MESSAGE_TYPES] == [re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower() for cls in MESSAGE_TYPES]
