"""Schema of a rollout, and the checks of actions and indices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from common.algorithms.on_policy import recorded_log_prob
from common.algorithms.payload import check_trajectory, trajectory_payload, trajectory_schema
from common.envs.spec import ActionSpec
from common.errors import ProtocolError
from common.protocol.messages import Trajectory

pytestmark = pytest.mark.pure


def test_the_schema_of_stacked_images_and_numbered_actions(image_env):
    """The arrays of 5 steps of 2 environments, written out."""
    schema = trajectory_schema(image_env, length=5, num_envs=2, recorded=recorded_log_prob(length=5, num_envs=2))
    assert [(spec.name, spec.dtype, spec.shape) for spec in schema] == [
        ("obs", "uint8", (8, 2, 10, 12)),  # 2 frames of context, o_0..o_5
        ("start", "bool", (6, 2)),
        ("action", "int64", (5, 2)),
        ("reward", "float32", (5, 2)),
        ("terminated", "bool", (5, 2)),
        ("truncated", "bool", (5, 2)),
        ("valid", "bool", (5, 2)),
        ("final_obs", "uint8", (-1, 10, 12)),
        ("final_index", "int32", (-1,)),
        ("episode_return", "float32", (-1,)),
        ("episode_length", "int32", (-1,)),
        ("episode_index", "int32", (-1,)),
        ("log_prob", "float32", (5, 2)),
    ]


def test_the_schema_of_vectors_and_continuous_actions(vector_env):
    """Pendulum: no stack, actions of one component, nothing recorded."""
    env = dataclasses.replace(vector_env, action=ActionSpec(shape=(1,), low=(-2.0,), high=(2.0,)))
    schema = {spec.name: spec for spec in trajectory_schema(env, length=5, num_envs=2, recorded=())}
    assert schema["obs"].shape == (6, 2, 2)
    assert (schema["action"].dtype, schema["action"].shape) == ("float32", (5, 2, 1))


def test_rollouts_of_both_autoreset_layouts_pass(image_env, make_sample):
    """A truncation with its last observation, one whose last observation is o_{t+1}, and a termination without."""
    ends = [[0, 1], [0, 0], [0, 0], [0, 0]]
    starts = [[0, 0], [0, 1], [0, 0], [0, 0], [0, 0]]
    final = [[[0] * 12] * 10]
    check_trajectory(image_env, make_sample(image_env).arrays)
    check_trajectory(image_env, make_sample(image_env, truncated=ends).arrays)
    check_trajectory(image_env, make_sample(image_env, terminated=ends, truncated=ends, start=starts).arrays)
    check_trajectory(image_env, make_sample(image_env, truncated=ends, start=starts, final_obs=final, final_index=[1]).arrays)


def test_continuous_actions_have_no_number_to_check(vector_env, make_sample):
    """The environment clips them itself."""
    env = dataclasses.replace(vector_env, action=ActionSpec(shape=(1,), low=(-2.0,), high=(2.0,)))
    check_trajectory(env, make_sample(env).arrays)


def test_each_component_of_an_action_is_checked_against_its_own_choices(vector_env, make_sample):
    env = dataclasses.replace(vector_env, action=ActionSpec(choices=(3, 2), shape=(2,)))
    check_trajectory(env, make_sample(env, action=[[[2, 1]] * 2] * 4).arrays)
    for wrong, wanted in (([1, 2], r"found \[1, 2\], wanted 0 to 1"), ([3, 1], r"found \[2, 3\], wanted 0 to 2")):
        with pytest.raises(ProtocolError, match=f"action outside the action space: {wanted}"):
            check_trajectory(env, make_sample(env, action=[[[2, 1]] * 2] * 3 + [[wrong, wrong]]).arrays)


def test_discrete_observations_are_checked_against_their_choices(vector_env, make_sample):
    env = dataclasses.replace(vector_env, observation_dtype="int32", observation_choices=(3, 2))
    sound = [[[2, 1]] * 2] * 5
    check_trajectory(env, make_sample(env, obs=sound).arrays)
    with pytest.raises(ProtocolError, match=r"observation outside the observation space: found \[1, 2\], wanted 0 to 1"):
        check_trajectory(env, make_sample(env, obs=[*sound[:4], [[2, 2]] * 2]).arrays)


FRAME = [[0] * 12] * 10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"action": [[0, 1], [2, 3], [4, 0], [0, 0]]}, r"action outside the action space: found \[0, 4\], wanted 0 to 3"),
        ({"action": [[0, -1], [0, 0], [0, 0], [0, 0]]}, "action outside the action space"),
        ({"final_index": [0], "final_obs": []}, "different length"),
        ({"final_index": [8], "final_obs": [FRAME]}, "final_index outside the rollout"),
        ({"final_index": [1, 1], "final_obs": [FRAME, FRAME]}, "final_index that repeats: found 2, wanted each of 0 to 7 once"),
        ({"final_index": [-1], "final_obs": [FRAME]}, "final_index outside the rollout"),
        (
            {"truncated": [[1, 0], [0, 0], [0, 0], [0, 0]], "start": [[0, 0], [1, 0], [0, 0], [0, 0], [0, 0]]},
            "truncated episodes without final_obs",
        ),
    ],
)
def test_numbers_that_point_outside_are_refused(image_env, make_sample, given, message):
    """A faulty or hostile actor: it must cost a counter, not a crash in the middle of an update."""
    with pytest.raises(ProtocolError, match=message):
        check_trajectory(image_env, make_sample(image_env, **given).arrays)


def test_rollouts_are_sent_as_they_are_and_checked_as_trajectories(vector_env):
    """An action outside the action space fits every schema."""
    schema = trajectory_schema(vector_env, length=2, num_envs=1, recorded=())
    payload = trajectory_payload(env=vector_env, rollout=schema, settings=None, model=None, length=2, num_envs=1)
    assert (payload.message_type, payload.schema) == (Trajectory, schema)
    arrays = {spec.name: np.zeros([max(0, axis) for axis in spec.shape], spec.dtype) for spec in schema}
    payload.check(Trajectory(seq=0, version=0, env_steps=2, env_steps_sent=2, arrays=arrays))
    wrong = Trajectory(seq=0, version=0, env_steps=2, env_steps_sent=2, arrays=arrays | {"action": np.full((2, 1), 9)})
    with pytest.raises(ProtocolError, match="action outside"):
        payload.check(wrong)
