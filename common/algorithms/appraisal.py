"""What an actor-critic network says about a batch: how likely each action is, and what every observation is worth."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.algorithms.batch import Batch
from common.algorithms.moments import Moments
from common.models import nets
from common.models.arithmetic import autocast
from common.models.spec import Precision

_FORWARD_ROWS = 512  # env steps per forward pass: activations stay in the cache


class Appraisal(NamedTuple):
    """All [T, B] float32, invalid rows included. The first three carry gradient, unless it is switched off."""

    log_prob: Tensor  # log pi(a_t | o_t)
    entropy: Tensor  # of pi(. | o_t), nats
    head: Tensor  # what the value head says of o_t, in the units it is trained in
    value: Tensor  # V(o_t) in units of return
    next_value: Tensor  # V of the observation that really followed a_t, in units of return


def appraise(net: nets.ActorCritic, batch: Batch, *, moments: Moments, precision: Precision) -> Appraisal:
    """Pass all observations through the network once, in parts of bounded size.

    `moments` are those of the value targets that the value head was trained on: it speaks in their normalised units.
    """
    shape = batch.reward.shape
    outputs = _forward(net, batch.observation[:-1].flatten(0, 1), precision)
    actions = torch.split(batch.action.flatten(0, 1), _FORWARD_ROWS)
    log_prob = torch.cat([output.policy.log_prob(part) for output, part in zip(outputs, actions, strict=True)])
    entropy = torch.cat([output.policy.entropy() for output in outputs])
    head = torch.cat([output.value for output in outputs])
    with torch.no_grad():
        # What follows the last row, and what followed where an episode was cut (o_{t+1} is of the next one there).
        after = _forward(net, torch.cat([batch.observation[-1], batch.final_observation]), precision)
        values = moments.denormalize(torch.cat([head, *(output.value for output in after)]))
        value, bootstrap, final = torch.split(values, [shape.numel(), shape[1], len(batch.final_index)])
        next_value = torch.cat([value[shape[1] :], bootstrap]).index_copy_(0, batch.final_index, final)
    return Appraisal(*(rows.view(shape) for rows in (log_prob, entropy, head, value, next_value)))


def steps(batch: Batch, seen: Appraisal, *, clip_reward: bool) -> dict[str, Tensor]:
    """What all ways of making returns have in common: the arguments that `gae` and `vtrace` share."""
    return {
        "reward": batch.reward.sign() if clip_reward else batch.reward,
        "value": seen.value,
        "next_value": seen.next_value,
        "terminated": batch.terminated,
        "truncated": batch.truncated,
        "valid": batch.valid,
    }


def _forward(net: nets.ActorCritic, observation: Tensor, precision: Precision) -> list[nets.Output]:
    with autocast(precision, observation.device):
        return [net(part) for part in torch.split(observation, _FORWARD_ROWS)]
