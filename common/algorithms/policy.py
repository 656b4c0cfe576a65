"""Acting with a network: what all policies share, and the `Policy` of PPO and of every algorithm that samples from its head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from common.envs.spec import EnvSpec
from common.models import nets, snapshot
from common.models.nets import ActorCritic
from common.models.spec import ModelSettings, Precision
from common.units import EnvSteps, Version
from common.wire.messages import Arrays, ArraySpec

N = TypeVar("N", bound=nn.Module)


def recorded(*, length: int, num_envs: int, **_: object) -> tuple[ArraySpec, ...]:
    """What an acting actor-critic records per env step besides the action: its log-probability."""
    return (ArraySpec(name="log_prob", dtype="float32", shape=(length, num_envs)),)


class NetworkPolicy(Generic[N]):
    """The part of `common.algorithms.api.Policy` that is the same for every network; load a snapshot before the first `act`."""

    def __init__(self, net: N, *, precision: Precision, seed: int) -> None:
        """Act with `net`, of which it becomes the owner, in `precision`; `seed` fixes the random stream of the actions."""
        self._net = net.requires_grad_(requires_grad=False).eval()
        if precision == "bf16":
            self._net.bfloat16()
        self._generator = torch.Generator().manual_seed(seed)
        self._version: Version = -1

    @property
    def version(self) -> Version:
        """Version of the weights that act; -1 before the first `load`."""
        return self._version

    @property
    def layout(self) -> str:
        """Fingerprint of the parameters it takes."""
        return snapshot.Layout.of(self._net).fingerprint

    def load(self, version: Version, parameters: Tensor, *, env_steps: EnvSteps) -> None:
        """Take the weights of a snapshot: flat [P] float32 or bfloat16. How far the run is makes no difference."""
        del env_steps
        snapshot.load(self._net, parameters)
        self._version = version

    def experience(self, rollout: Arrays) -> Arrays:
        """The rollout as it is."""
        return rollout

    def random_state(self) -> np.ndarray:
        """Return the state of the random stream that actions are drawn from, [N] uint8."""
        state: np.ndarray = self._generator.get_state().numpy()
        return state

    def set_random_state(self, state: np.ndarray) -> None:
        """Restore `random_state`. Raises `RuntimeError` or `TypeError` for bytes that are no such state."""
        self._generator.set_state(torch.from_numpy(state))


class ActorCriticPolicy(NetworkPolicy[ActorCritic]):
    """Acts by drawing from the policy head, or greedily by its mode."""

    def __init__(self, *, model: ModelSettings, env: EnvSpec, precision: Precision, seed: int, **_: object) -> None:
        """Build the network of the run."""
        super().__init__(nets.build(model, env), precision=precision, seed=seed)

    @torch.inference_mode()
    def act(self, observation: Tensor, *, greedy: bool = False) -> Mapping[str, Tensor]:
        """[B, *input] in the environment's dtype → {"action": [B] int64 or [B, A] float32, "log_prob": [B] float32}.

        The log-probability comes from the very outputs that chose the action, rounding of a bfloat16 snapshot included.
        """
        policy = self._net.policy(observation)
        action = policy.mode() if greedy else policy.sample(self._generator)
        return {"action": action, "log_prob": policy.log_prob(action)}
