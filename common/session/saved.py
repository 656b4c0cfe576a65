"""Form of a session's state in a checkpoint, and the check that a state has this form."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[int, Field(ge=0, strict=True)]
Incarnation = Annotated[int, Field(ge=-1, strict=True)]


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Account(_Form):
    produced: Number
    received: Number
    dropped_by_peer: dict[str, Number]


class _Peer(_Form):
    name: str
    incarnation: Number
    role: str
    index: Number
    generation: Number
    public_key: str = ""
    gone: bool
    expected: Number
    ahead: list[tuple[Number, Number]]
    account: _Account


class _Roster(_Form):
    peers: list[_Peer]
    generations: list[tuple[str, Number, Number]]
    forgotten: Incarnation
    named: Incarnation = -1


class _Ledger(_Form):
    produced: Number
    trained: Number
    dropped: dict[str, Number]


class _Session(_Form):
    ledger: _Ledger
    roster: _Roster


def check_saved(state: Any) -> None:
    """Raise `ValueError` unless `state` has the form of `LearnerSide.state_dict`."""
    _Session.model_validate(state)
