"""Training state taken apart and put together: nothing may change on the way, not a type, not a bit."""

import json
import math

import pytest
import torch

from common.errors import InternalError
from common.runtime.checkpoint_files import flatten_state, restore_state

pytestmark = pytest.mark.pure


def _there_and_back(state):
    structure, tensors = flatten_state(state)
    return restore_state(json.loads(json.dumps(structure, allow_nan=False)), tensors)


def same(left, right):
    """Equal in type, order of keys and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and left.numpy().tobytes() == right.numpy().tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(
            same(left[k], right[k]) and type(k) is type(v) for k, v in zip(left, right, strict=True)
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)  # -0.0 is not 0.0, and nan equals nan


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"a": {}, "b": [], "c": ()},
        {0: 1, "0": 2},
        {"betas": (0.9, 0.999), "params": [0, 1], "foreach": None, "amsgrad": False, "lr": 1e-5, "n": 10**30},
        {"tensor": "a name that looks like a tag", "list": [{"mapping": 1}]},
        {"nan": math.nan, "inf": [math.inf, -math.inf], "minus zero": -0.0},
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(2)}, "a.b+": torch.ones(3)},
        {0: torch.zeros(1), "0": torch.ones(1)},
        {"text": "ü\n\x00 ☃"},
    ],
)
def test_a_state_comes_back_as_it_was(state):
    """Keys that are ints (torch's optimizers), keys with dots (torch's modules), tuples, infinities, awkward text."""
    assert same(_there_and_back(state), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_tensors_of_every_kind_come_back(dtype):
    """Weights, rounded weights, statistics, counters, random state, masks; also the scalar and the empty one."""
    for shape in ((), (0,), (2, 3)):
        tensor = torch.ones(shape, dtype=dtype)
        back = _there_and_back({"x": tensor})["x"]
        assert torch.equal(back, tensor)
        assert back.dtype == dtype


def test_views_of_one_memory_are_saved_apart():
    """Parameters that are windows on one flat buffer, a transposed one, and one that is still being trained."""
    flat = torch.arange(6.0, requires_grad=True)
    _, tensors = flatten_state({"head": flat[:3], "tail": flat[3:], "turned": flat.detach().view(2, 3).T, "whole": flat})
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == 4
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in tensors.values())
    assert tensors["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_saved_values_do_not_follow_the_training_that_goes_on():
    """The state is taken at one update; the weights change at the next."""
    weight = torch.zeros(2)
    structure, tensors = flatten_state({"w": weight})
    weight += 1
    assert restore_state(structure, tensors)["w"].tolist() == [0, 0]


@pytest.mark.parametrize("state", [{"f": print}, {"x": {"y": {1, 2}}}, {(1, 2): 3}, {True: 1}, {"x": b"bytes"}])
def test_what_has_no_exact_form_is_a_bug_that_names_its_place(state):
    """Better found by the first checkpoint of a test than by the first resume of a user."""
    with pytest.raises(InternalError, match="state"):
        flatten_state(state)
