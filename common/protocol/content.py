"""Checks of what a message contains: arrays by their schema, finite and in range; experience and evaluations as a whole."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from common.errors import DropReason, ProtocolError
from common.protocol.arrays import DTYPES
from common.protocol.limits import EVALUATION_EPISODES, FREE_LENGTH, OBSERVATION_MAX, REWARD_MAX
from common.protocol.messages import MODES, Arrays, ArraySpec, Evaluation, ExperienceMessage
from common.units import Version

LARGEST = {
    "reward": REWARD_MAX,
    **dict.fromkeys(("obs", "final_obs", "action"), OBSERVATION_MAX),
    "memory": OBSERVATION_MAX,  # an LSTM's grows by at most 1 an env step; a gradient of larger ones could overflow
}
"""Largest absolute values in the float arrays of a trajectory."""

EVALUATIONS = 4  # of one evaluator in a second: each writes a line of the log and a row of the learning curve
EVALUATION = (
    ArraySpec(name="episode_return", dtype="float32", shape=(-1,)),
    ArraySpec(name="episode_length", dtype="int32", shape=(-1,)),
)

_NO_DTYPE: Final[np.dtype[Any]] = np.dtype(object)


# --- whole messages ---


def check_experience(message: ExperienceMessage, *, schema: tuple[ArraySpec, ...], newest: Version) -> None:
    """Raise `ProtocolError` unless a published policy acted, and the arrays are the run's, in range, of the claimed env steps."""
    if message.version > newest:
        fact = "policy version that was never published"
        raise ProtocolError(DropReason.VERSION, fact, found=message.version, wanted=f"at most {newest}")
    check_schema(message.arrays, schema)
    check_numbers(message.arrays, LARGEST)
    valid = message.arrays.get("valid")
    if valid is not None and np.count_nonzero(valid) != message.env_steps:
        wanted = f"{np.count_nonzero(valid)} valid rows"
        raise ProtocolError(DropReason.SCHEMA, "env_steps of the message", found=message.env_steps, wanted=wanted)


def check_evaluation(message: Evaluation, *, known: bool, number: int) -> None:
    """Raise `ProtocolError` unless a known policy played, in a known mode, and returns are finite with as many lengths from 1 on.

    `known` is whether the learner knows the version, and `number` counts the evaluations of the sender in this second, from 1:
    one that sends too many is refused, too.
    """
    if number > EVALUATIONS:
        raise ProtocolError(DropReason.UNCREDITED, "evaluations in a second", found=number, wanted=f"at most {EVALUATIONS}")
    if not known:
        wanted = "one that this learner has sent, or that its checkpoint has"
        raise ProtocolError(DropReason.VERSION, "policy version of an evaluation", found=message.version, wanted=wanted)
    if message.mode not in MODES:
        raise ProtocolError(DropReason.SCHEMA, "mode of an evaluation", found=repr(message.mode[:32]), wanted=" or ".join(MODES))
    check_schema(message.arrays, EVALUATION)
    check_numbers(message.arrays)
    returns, lengths = (message.arrays[spec.name] for spec in EVALUATION)
    if len(returns) == 0 or len(returns) != len(lengths):
        found = f"{len(returns)} returns and {len(lengths)} lengths"
        raise ProtocolError(DropReason.SCHEMA, "episodes of an evaluation", found=found, wanted="as many of both, one at least")
    if len(returns) > EVALUATION_EPISODES:
        wanted = f"at most {EVALUATION_EPISODES}"
        raise ProtocolError(DropReason.SCHEMA, "episodes of an evaluation", found=len(returns), wanted=wanted)
    if (shortest := lengths.min()) < 1:
        raise ProtocolError(DropReason.EPISODES, "env steps of an episode of an evaluation", found=shortest, wanted="at least 1")


# --- arrays ---


def check_schema(arrays: Arrays, schema: Sequence[ArraySpec]) -> None:
    """Raise `ProtocolError` (schema) unless `arrays` are exactly those of `schema`; a length of -1 is free up to a limit."""
    for spec in schema:
        array = arrays.get(spec.name)
        if array is None:
            raise ProtocolError(DropReason.SCHEMA, f"array {spec.name}", found="none", wanted=_described(spec.dtype, spec.shape))
        # A dtype's `name` takes longer than all the rest of the check, so it is only looked up for the sentence.
        if array.dtype != DTYPES.get(spec.dtype, _NO_DTYPE) or not _fits(array.shape, spec.shape):
            found = _described(array.dtype.name, array.shape)
            raise ProtocolError(DropReason.SCHEMA, f"array {spec.name}", found=found, wanted=_described(spec.dtype, spec.shape))
    if len(arrays) != len(schema):
        surplus = sorted(set(arrays) - {spec.name for spec in schema})
        raise ProtocolError(DropReason.SCHEMA, "arrays outside the schema", found=surplus, wanted=[spec.name for spec in schema])


@lru_cache(maxsize=256)  # the messages of a run repeat a few shapes
def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return shape == wanted or (
        len(shape) == len(wanted)
        and all(length == want or (want == -1 and length <= FREE_LENGTH) for length, want in zip(shape, wanted, strict=True))
    )


def _described(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype} {list(shape)}"


def check_numbers(arrays: Arrays, largest: Mapping[str, float] = MappingProxyType({})) -> None:
    """Raise `ProtocolError` where a float array holds NaN or infinity (non_finite), or more than its `largest` (out_of_range)."""
    for name, array in arrays.items():
        if array.dtype.kind == "f" and array.size:
            limit = largest.get(name, sys.float_info.max)
            low, high = np.minimum.reduce(array, axis=None), np.maximum.reduce(array, axis=None)  # NaN where there is one
            if not (-limit <= float(low) and float(high) <= limit):
                raise _bad_number(name, array, limit)


def _bad_number(name: str, array: np.ndarray, limit: float) -> ProtocolError:
    finite = np.isfinite(array)
    with np.errstate(over="ignore"):  # a small dtype cannot hold the limit
        row = tuple(int(i) for i in np.argwhere(~(finite & (np.abs(array) <= limit)))[0])
    fact, found = f"array {name} at {list(row)}", str(array[row])
    if not finite[row]:
        return ProtocolError(DropReason.NON_FINITE, fact, found=found, wanted="finite numbers")
    fix = "" if name == "memory" else "scale it in the environment"
    return ProtocolError(DropReason.OUT_OF_RANGE, fact, found=found, wanted=f"at most {limit:,} either way", fix=fix)
