"""Who is welcome and what is taken: the learner's questions at the door, whatever the algorithm, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.errors import DropReason, PeerError
from common.session import events as e
from common.session.actor_states import State
from common.session.events import RefusalCode, Route
from common.session.peer import Peer
from common.session.roster import Terms
from common.units import Seconds, Version
from common.wire.arrays import check_numbers, check_schema
from common.wire.limits import INCARNATION_MAX, OBSERVATION_MAX, REWARD_MAX
from common.wire.messages import ACTOR_STATE, MODES, ROLES, ArraySpec, Evaluation, Experience, Hello, Refusal, Welcome


class Objection(NamedTuple):
    """Reason of a refusal, as a code and a sentence; whether a new Hello may help, and whether as a new incarnation."""

    code: RefusalCode
    reason: str
    retry: bool
    new_incarnation: bool = False


_OWN_NAME = "give each worker its own name"
SENTENCE = 500  # characters of a reason, all ASCII: a header must hold those of all messages that one Credit rejects

LARGEST = {"reward": REWARD_MAX, "obs": OBSERVATION_MAX, "final_obs": OBSERVATION_MAX, "action": OBSERVATION_MAX}
"""Of the float arrays of a trajectory."""

EVALUATIONS = 4  # of one evaluator in a second: each writes a line of the log and a row of the learning curve
EVALUATION = (
    ArraySpec(name="episode_return", dtype="float32", shape=(-1,)),
    ArraySpec(name="episode_length", dtype="int32", shape=(-1,)),
)


def check_terms(hello: Hello, run: str, terms: Terms) -> Objection | None:
    """Whether a peer fits the run at all; None where it does."""
    if hello.role not in ROLES:
        return Objection(RefusalCode.ROLE, f"role: found {hello.role!r}, wanted one of {', '.join(ROLES)}", retry=False)
    if run not in ("", terms.run):
        difference = f"run: found {run!r}, wanted {terms.run!r}"
        return Objection(RefusalCode.RUN, f"{difference}; restart this peer to join the run", retry=False)
    if hello.env_signature not in ("", terms.env_signature):
        difference = f"environment signature: found {hello.env_signature}, wanted {terms.env_signature}"
        return Objection(RefusalCode.ENVIRONMENT, f"{difference}; install the learner's environment packages here", retry=False)
    return None


def check_identity(hello: Hello, public_key: str, known: Peer | None, *, forgotten: int, named: int) -> Objection | None:
    """Return why a worker may not use this name; None where it may.

    `known`: the newest incarnation of the name; `forgotten`: the largest incarnation of all names that are known no more;
    `named`: the largest incarnation that the learner has named in a refusal.
    """
    if hello.incarnation > max(INCARNATION_MAX, named):
        fact = f"incarnation: found {hello.incarnation}, wanted at most {INCARNATION_MAX}; greet as the one named here"
        return Objection(RefusalCode.SUPERSEDED, fact, retry=True, new_incarnation=True)
    fact = "the account of this incarnation is closed; greet as the one named here"
    renew = Objection(RefusalCode.FORGOTTEN, fact, retry=True, new_incarnation=True)
    if known is None:
        # Of a forgotten name no numbers are left to tell what was trained on already. None of its incarnations is above
        # `forgotten`: one that is not, and has stepped, could be among them and must start anew, from nothing. (It may also
        # be one that met only a learner since killed, and now loses what it kept.) One that has stepped nothing is safe.
        stepped = hello.produced or hello.settled or hello.resend_from
        return renew if stepped and hello.incarnation <= forgotten else None
    if not known.gone and known.public_key and public_key and public_key != known.public_key:
        # Only while the account is open: a worker that left, or was away for long, may come back with a new key.
        return Objection(
            RefusalCode.IN_USE, f"the name {hello.peer!r} belongs to a worker of another key; {_OWN_NAME}", retry=True
        )
    if not known.gone and hello.role != known.role:
        return Objection(RefusalCode.IN_USE, f"the name {hello.peer!r} belongs to an {known.role}; {_OWN_NAME}", retry=True)
    if hello.incarnation > known.key.incarnation:
        return None
    if hello.incarnation < known.key.incarnation:
        fact = f"a newer incarnation of {hello.peer!r} has greeted; greet as the one named here"
        return Objection(RefusalCode.SUPERSEDED, fact, retry=True, new_incarnation=True)
    return renew if known.gone else None


def check_evicted(hello: Hello, known: Peer | None, now: Seconds) -> Objection | None:
    """Return why a worker that sent only bad messages may not come back yet; None where it may."""
    if known is None or now >= known.evicted_until:
        return None
    fact = f"all that {hello.peer!r} sent was refused; mend it, or wait {known.evicted_until - now:.0f} s"
    return Objection(RefusalCode.EVICTED, fact, retry=True)


def name_in_use(hello: Hello) -> Objection:
    """Return the answer to a Hello that uses the name of a connected worker."""
    return Objection(RefusalCode.IN_USE, f"a connected worker has the name {hello.peer!r}; {_OWN_NAME}", retry=True)


def check_room(hello: Hello, known: Peer | None, *, others: int, terms: Terms, draining: bool) -> Objection | None:
    """Whether the run goes on and has a place beside the `others` of that role who are here; None where it has."""
    if draining and (known is None or hello.incarnation != known.key.incarnation):
        # A known peer may still say what it produced, and goodbye.
        return Objection(RefusalCode.DRAINING, "the run is ending", retry=False)
    if others < terms.places(hello.role):
        return None
    remedy = "raise learner.max_actors" if hello.role == "actor" else "end one"
    return Objection(RefusalCode.FULL, f"the run has its {others} {hello.role}s; {remedy} to admit another", retry=True)


def check_experience(message: Experience, *, schema: Sequence[ArraySpec], newest: Version) -> None:
    """Raise `PeerError` unless a published policy acted, and the arrays are the run's, in range, of the claimed env steps."""
    _check_version(message.version, newest)
    check_schema(message.arrays, schema)
    check_numbers(message.arrays, LARGEST)
    valid = message.arrays.get("valid")
    if valid is not None and np.count_nonzero(valid) != message.env_steps:
        wanted = f"{np.count_nonzero(valid)} valid rows"
        raise PeerError(DropReason.SCHEMA, "env_steps of the message", found=message.env_steps, wanted=wanted)


def check_evaluation(message: Evaluation, *, newest: Version, number: int) -> None:
    """Raise `PeerError` unless a published policy played, in a known mode, and returns are finite with as many lengths.

    `number` counts the evaluations of the sender in this second, from 1: one that sends too many is refused, too.
    """
    if number > EVALUATIONS:
        raise PeerError(DropReason.UNCREDITED, "evaluations in a second", found=number, wanted=f"at most {EVALUATIONS}")
    _check_version(message.version, newest)
    if message.mode not in MODES:
        raise PeerError(DropReason.SCHEMA, "mode of an evaluation", found=repr(message.mode[:32]), wanted=" or ".join(MODES))
    check_schema(message.arrays, EVALUATION)
    check_numbers(message.arrays)
    returns, lengths = (message.arrays[spec.name] for spec in EVALUATION)
    if len(returns) == 0 or len(returns) != len(lengths):
        found = f"{len(returns)} returns and {len(lengths)} lengths"
        raise PeerError(DropReason.SCHEMA, "episodes of an evaluation", found=found, wanted="as many of both, one at least")


def _check_version(version: Version, newest: Version) -> None:
    if version > newest:
        raise PeerError(DropReason.VERSION, "policy version that was never published", found=version, wanted=f"at most {newest}")


def welcome(peer: Peer, terms: Terms, *, window: int, version: Version, state: State | None) -> Welcome:
    """Return the Welcome of a peer that is admitted, with the `state` from which an actor goes on in lockstep.

    In lockstep, an actor whose place has no state yet begins as the first actor at that place did.
    """
    actor = peer.role == "actor"
    begins = terms.lockstep and actor and state is None
    return Welcome(
        arrays={} if state is None or not state.size else {ACTOR_STATE: state},
        index=peer.index,
        generation=0 if begins else peer.generation,
        config=terms.config,
        env_signature=terms.env_signature,
        schema=terms.schema if actor else (),
        credits=window if actor else 0,
        version=version,
        heartbeat_seconds=terms.heartbeat_seconds,
        incarnation=peer.key.incarnation,
    )


def refusal(route: Route, code: RefusalCode, reason: str, *, retry: bool, incarnation: int = -1) -> list[e.Instruction]:
    """Say no, and note it."""
    reason = sentence(reason)
    note = e.Note(event="peer_refused", fields={"route": route.hex(), "code": str(code), "reason": reason}, warning=True)
    return [e.Send(route=route, message=Refusal(code=code, reason=reason, retry=retry, incarnation=incarnation)), note]


def sentence(text: str) -> str:
    """`text`, which may be or quote what a peer sent, short and plain."""
    return text[:SENTENCE].encode("ascii", "backslashreplace").decode()[:SENTENCE]
