"""The arrays of a Gradient message: what an actor sends that computes the loss on its own rollout.

P = parameters of the network, in the order of its snapshots, those included that are not trained (their gradient is 0).

| array | dtype | shape | meaning |
|---|---|---|---|
| gradient | float32, or uint16 holding bfloat16 bits | [P] | of the mean loss over the rollout's valid env steps |
| loss_parts | float32 | [len(PARTS)] | the parts of that loss, by the names in `PARTS` |
| episode_return, episode_length | float32, int32 | [K] | raw return and env steps of the episodes that ended in the rollout |
"""

from __future__ import annotations

from functools import partial

import numpy as np

from common.algorithms.episodes import gradient_episodes
from common.algorithms.settings.a3c import A3CGradSettings
from common.algorithms.shipment import Shipment
from common.algorithms.single_pass import Loss
from common.envs.spec import EnvSpec
from common.errors import DropReason, PeerError
from common.models import nets
from common.models.snapshot import Layout
from common.models.spec import ModelSettings
from common.wire.limits import REWARD_MAX
from common.wire.messages import ArraySpec, Experience, Gradient

PARTS = Loss._fields[1:]
"""What `loss_parts` holds, in this order."""

_BF16_EXPONENT = np.uint16(0x7F80)  # all ones: infinity or NaN


def gradients(
    *, settings: A3CGradSettings, model: ModelSettings, env: EnvSpec, length: int, num_envs: int, **_: object
) -> Shipment:
    """Gradients of the network that `model` and `env` describe, each of at most T = `length` by B = `num_envs` env steps."""
    size = Layout.of(nets.outline(model, env)).size
    schema = (
        ArraySpec(name="gradient", dtype="float32" if settings.gradient_precision == "fp32" else "uint16", shape=(size,)),
        ArraySpec(name="loss_parts", dtype="float32", shape=(len(PARTS),)),
        ArraySpec(name="episode_return", dtype="float32", shape=(-1,)),
        ArraySpec(name="episode_length", dtype="int32", shape=(-1,)),
    )
    episodes = partial(gradient_episodes, num_envs=num_envs, most_reward=REWARD_MAX)
    return Shipment(
        message=Gradient, schema=schema, check=partial(check_gradient, most=length * num_envs), episodes=lambda: episodes
    )


def check_gradient(message: Experience, *, most: int) -> None:
    """Refuse (PeerError) bfloat16 that is not finite, and a gradient of more than `most` env steps: they are its weight."""
    if message.env_steps > most:
        raise PeerError(DropReason.SCHEMA, "env steps of a gradient", found=message.env_steps, wanted=f"at most {most}")
    gradient = message.arrays["gradient"]
    if gradient.dtype == np.uint16:
        broken = np.flatnonzero((gradient & _BF16_EXPONENT) == _BF16_EXPONENT)
        if len(broken):
            fact = f"array gradient at {[int(broken[0])]}"
            raise PeerError(DropReason.NON_FINITE, fact, found=f"bfloat16 {gradient[broken[0]]:#06x}", wanted="finite numbers")
