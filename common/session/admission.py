"""Who is welcome and what is taken: the learner's questions at the door, whatever the algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from common.errors import DropReason, PeerError
from common.session.events import RefusalCode
from common.session.roster import Peer, Terms
from common.units import Version
from common.wire.arrays import check_finite, check_schema
from common.wire.messages import MODES, ROLES, ArraySpec, Evaluation, Experience, Hello

Objection: TypeAlias = tuple[RefusalCode, str, bool]
"""Why not, in a word and in a sentence, and whether to greet again may help."""

EVALUATION = (
    ArraySpec(name="episode_return", dtype="float32", shape=(-1,)),
    ArraySpec(name="episode_length", dtype="int32", shape=(-1,)),
)


def check_terms(hello: Hello, run: str, terms: Terms) -> Objection | None:
    """Whether a peer fits the run at all; None where it does."""
    if hello.role not in ROLES:
        return RefusalCode.ROLE, f"role: found {hello.role!r}, wanted one of {', '.join(ROLES)}", False
    if run not in ("", terms.run):
        return RefusalCode.RUN, f"run: found {run!r}, wanted {terms.run!r}; restart this peer to join the run", False
    if hello.env_signature not in ("", terms.env_signature):
        difference = f"environment signature: found {hello.env_signature}, wanted {terms.env_signature}"
        return RefusalCode.ENVIRONMENT, f"{difference}; install the learner's environment packages here", False
    return None


def check_identity(hello: Hello, newest: Peer | None) -> Objection | None:
    """Whether a peer may go by this name, where `newest` is the newest incarnation that did; None where it may."""
    if newest is None or hello.incarnation > newest.key.incarnation:
        return None
    if hello.incarnation < newest.key.incarnation:
        return RefusalCode.SUPERSEDED, f"a newer process took the name {hello.peer!r}; give each peer its own name", False
    if newest.gone:
        return RefusalCode.FORGOTTEN, "this incarnation's account is closed; greet as a new incarnation", True
    return None


def check_experience(message: Experience, *, schema: Sequence[ArraySpec], newest: Version) -> None:
    """Raise `PeerError` unless a published policy acted, the arrays are the run's, finite, and hold the env steps they claim."""
    if message.version > newest:
        fact, wanted = "policy version that was never published", f"at most {newest}"
        raise PeerError(DropReason.VERSION, fact, found=message.version, wanted=wanted)
    check_schema(message.arrays, schema)
    check_finite(message.arrays)
    valid = message.arrays.get("valid")
    if valid is not None and np.count_nonzero(valid) != message.env_steps:
        wanted = f"{np.count_nonzero(valid)} valid rows"
        raise PeerError(DropReason.SCHEMA, "env_steps of the message", found=message.env_steps, wanted=wanted)


def check_evaluation(message: Evaluation) -> None:
    """Raise `PeerError` unless it is of a known mode and holds finite returns, and as many lengths."""
    if message.mode not in MODES:
        raise PeerError(DropReason.SCHEMA, "mode of an evaluation", found=repr(message.mode[:32]), wanted=" or ".join(MODES))
    check_schema(message.arrays, EVALUATION)
    check_finite(message.arrays)
    returns, lengths = (message.arrays[spec.name] for spec in EVALUATION)
    if len(returns) == 0 or len(returns) != len(lengths):
        found = f"{len(returns)} returns and {len(lengths)} lengths"
        raise PeerError(DropReason.SCHEMA, "episodes of an evaluation", found=found, wanted="as many of both, one at least")
