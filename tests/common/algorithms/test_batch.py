"""Messages into one batch: stacks, columns and indices where they belong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from common.algorithms.batch import collate

pytestmark = pytest.mark.pure


def test_actors_stand_side_by_side_in_the_order_of_their_messages(vector_env, make_sample):
    """Two actors of different width, read-only memory, vectors without a stack."""
    first = make_sample(vector_env, num_envs=2, version=5, seed=1, reward=np.full((4, 2), 1.0))
    second = make_sample(vector_env, num_envs=3, version=7, seed=2, reward=np.full((4, 3), 2.0))
    batch = collate([first, second], vector_env)
    assert batch.observation.shape == (5, 5, 2)
    assert torch.equal(batch.observation[:, 2:], torch.tensor(second.arrays["obs"]))
    assert batch.reward[0].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert batch.version.tolist() == [5, 5, 7, 7, 7]
    assert (batch.action.dtype, batch.valid.dtype) == (torch.int64, torch.bool)


def test_stacks_are_rebuilt_from_frames_and_end_at_the_start_of_an_episode(image_env, make_sample):
    """Every stack written out frame by frame: zero where the frame is older than the last start."""
    start = np.zeros((5, 2), bool)
    start[3, 1] = True
    sample = make_sample(image_env, start=start)
    observation = collate([sample], image_env).observation
    frames = torch.tensor(sample.arrays["obs"])
    for t in range(5):
        for b in range(2):
            kept = min(3, t - 3 + 1) if b == 1 and t >= 3 else 3
            expected = frames[t : t + 3, b].clone()
            expected[: 3 - kept] = 0
            assert torch.equal(observation[t, b], expected)


def test_the_last_observation_of_a_cut_episode_is_stacked_on_what_came_before_it(image_env, make_sample):
    """Same-step autoreset, two actors: one episode three steps old, one that had only just begun."""
    last = np.full((1, 10, 12), 200, np.uint8)
    first = make_sample(image_env, num_envs=2, seed=1, final_obs=last, final_index=[2 * 2 + 1])  # t=2, b=1
    start = np.zeros((5, 1), bool)
    start[1] = True
    second = make_sample(image_env, num_envs=1, seed=2, start=start, final_obs=last + 1, final_index=[1])  # t=1, b=0
    batch = collate([first, second], image_env)
    assert batch.final_index.tolist() == [2 * 3 + 1, 1 * 3 + 2]
    frames = first.arrays["obs"][:, 1]
    assert np.array_equal(batch.final_observation[0].numpy(), np.stack([frames[3], frames[4], last[0]]))
    begun = second.arrays["obs"][3, 0]
    assert np.array_equal(batch.final_observation[1].numpy(), np.stack([np.zeros_like(begun), begun, last[0] + 1]))


def test_a_vector_without_stack_is_its_own_last_observation(vector_env, make_sample):
    """CartPole truncated at 500 steps under same-step autoreset."""
    sample = make_sample(vector_env, final_obs=[[3.0, 4.0]], final_index=[7])
    batch = collate([sample], vector_env)
    assert batch.final_observation.tolist() == [[3.0, 4.0]]
    assert batch.final_index.tolist() == [7]


def test_a_single_image_keeps_its_stack_axis(image_env, make_sample):
    """frame_stack 1 on images: the convolutions still want a channel."""
    env = dataclasses.replace(image_env, frame_stack=1)
    batch = collate([make_sample(env, final_obs=np.ones((1, 10, 12)), final_index=[0])], env)
    assert batch.observation.shape == (5, 2, 1, 10, 12)
    assert batch.final_observation.shape == (1, 1, 10, 12)
