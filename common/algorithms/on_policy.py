"""The parts that all actor-critic algorithms share, in the order in which experience passes through them.

`ActorCriticPolicy` acts, `network_outputs` passes a batch of its experience through the network, and `ActorCriticLearner` owns
network, optimizer and running statistics, also of value targets. An algorithm adds its update. T and B are the axes of `Batch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.algorithms.api import NetworkPolicy
from common.algorithms.batch import Batch
from common.algorithms.moments import Moments
from common.algorithms.returns import ReturnInputs
from common.algorithms.sections import ActorCriticSection
from common.algorithms.trajectories import TrajectoryLearner, batch_outputs, with_next_value
from common.envs.spec import EnvSpec
from common.models import nets, snapshot
from common.models.spec import ModelSettings, Precision
from common.protocol.messages import ArraySpec

_KEPT = 0.95  # factor on the weight of all earlier value targets per update; the figures are in docs/decisions/0044


# --- acting ---


class ActorCriticPolicy(NetworkPolicy[nets.ActorCritic]):
    """Acts by drawing from the policy head, or greedily by its mode."""

    def __init__(self, *, model: ModelSettings, env: EnvSpec, precision: Precision, seed: int, **_: object) -> None:
        super().__init__(nets.build_actor_critic(model, env), precision=precision, seed=seed, state_size=model.state_size)

    @torch.inference_mode()
    def act(self, observation: Tensor, *, greedy: bool = False) -> Mapping[str, Tensor]:
        """[B, *input] in the environment's dtype → {"action": [B] or [B, K] int64, or [B, A] float32, "log_prob": [B] float32}.

        The log-probability comes from the very outputs that chose the action, rounding of a bfloat16 snapshot included.
        """
        policy, state = self._net.policy(observation, self._past)
        self._remember(state)
        action = policy.mode() if greedy else policy.sample(self._generator)
        return {"action": action, "log_prob": policy.log_prob(action)}


def recorded_log_prob(*, length: int, num_envs: int, **_: object) -> tuple[ArraySpec, ...]:
    """The array that an actor-critic records per env step besides the action: its log-probability."""
    return (ArraySpec(name="log_prob", dtype="float32", shape=(length, num_envs)),)


# --- the network's outputs for a batch ---


class NetworkOutputs(NamedTuple):
    """All [T, B] float32 but the last, invalid rows included. The first three carry gradient, unless it is switched off."""

    log_prob: Tensor  # log pi(a_t | o_t)
    entropy: Tensor  # of pi(. | o_t), nats
    normalized_value: Tensor  # output of the value head for o_t, in the normalised units that it is trained in
    value: Tensor  # V(o_t) in units of return
    next_value: Tensor  # V of the observation that really followed a_t, in units of return
    state: Tensor  # [B, S] of the memory after o_{T-1}, by these weights


def network_outputs(net: nets.ActorCritic, batch: Batch, *, moments: Moments, precision: Precision) -> NetworkOutputs:
    """Pass all observations through the network once.

    `moments` are those of the value targets that the value head was trained on: its outputs are in their normalised units.
    """
    rows, after, state = batch_outputs(net, batch, precision=precision)
    actions = torch.split(batch.action.flatten(0, 1), [len(output.value) for output in rows])
    log_prob = torch.cat([output.policy.log_prob(part) for output, part in zip(rows, actions, strict=True)])
    entropy = torch.cat([output.policy.entropy() for output in rows])
    normalized_value = torch.cat([output.value for output in rows])
    with torch.no_grad():
        values = moments.denormalize(torch.cat([normalized_value, *(output.value for output in after)]))
        value, next_value = with_next_value(values, batch)
    return NetworkOutputs(
        log_prob=log_prob.view(value.shape),
        entropy=entropy.view(value.shape),
        normalized_value=normalized_value.view(value.shape),
        value=value,
        next_value=next_value,
        state=state,
    )


def return_inputs(batch: Batch, outputs: NetworkOutputs, *, clip_reward: bool) -> ReturnInputs:
    """The inputs of `returns.gae` and `returns.vtrace`, [T, B] each."""
    return {
        "reward": batch.reward.sign() if clip_reward else batch.reward,
        "value": outputs.value,
        "next_value": outputs.next_value,
        "terminated": batch.terminated,
        "truncated": batch.truncated,
        "valid": batch.valid,
    }


# --- learning ---


class ActorCriticLearner(TrajectoryLearner[nets.ActorCritic]):
    """`common.algorithms.api.Algorithm` without `update`: owns the moments of value targets, besides what its base owns.

    The value head is trained in the normalised units of those moments, where the settings ask for it. `network_outputs` converts
    to units of return, and `_moments.normalize` back.
    """

    def __init__(self, *, settings: ActorCriticSection, model: ModelSettings, env: EnvSpec, seed: int, **others: Any) -> None:
        """`seed` fixes initial weights; `others`, such as `device` and `ranks`, as of the base.

        Raises ConfigError where observations cannot be as `model` asks.
        """
        settings.require_observations(env, model)
        self._settings: ActorCriticSection = settings.for_actions(discrete=env.action.discrete)
        net = nets.build_actor_critic(model, env, seed=seed)
        super().__init__(net, settings.optimizer_recipe, settings=settings, model=model, env=env, **others)
        self._moments = Moments()  # of value targets

    def normalize_targets(self, target: Tensor, valid: Tensor) -> Tensor:
        """Value targets [T, B] by the moments of the run, into which these are merged first. Invalid rows do not count.

        With several ranks the targets of all of them are merged.
        """
        self._merge_targets(target, valid, keep=1.0)
        return self._moments.normalize(target)

    def move_value_units(self, target: Tensor, valid: Tensor) -> None:
        """Let the units of the value head follow value targets [T, B]; its values in units of return stay the same.

            w' = sigma w / sigma',  b' = (sigma b + mu - mu') / sigma'       PopArt: arXiv:1602.07714, proposition 1

        Invalid rows do not count, the targets of all ranks do. Do not call it between forward and backward pass, because it
        changes weights. The first call sets the units and leaves the weights unchanged.
        """
        before = self._moments
        self._merge_targets(target, valid, keep=_KEPT)
        if before.count:
            factor, offset = before.std / self._moments.std, (before.mean - self._moments.mean) / self._moments.std
            self._model.value_head.scale_outputs(factor.item(), offset.item())

    def _merge_targets(self, target: Tensor, valid: Tensor, *, keep: float) -> None:
        merged = self._moments.faded(keep).merge(Moments.of(target[valid]).over(self._ranks))
        if merged.m2.isfinite():  # the gradient steps on targets that are not finite are left out too
            self._moments = merged

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        return super().state_dict() | {"value_moments": asdict(self._moments)}

    def load_parameters(self, state: Mapping[str, Any]) -> None:
        """Take the network, the statistics of its observations and rewards, and the moments in whose units its values are.

        Where the settings ask for no such units, the head is scaled to units of return. A head in units of return keeps them
        until `move_value_units` takes others: those of one number of deviation 1 from 0.
        """
        super().load_parameters(state)
        self._moments = Moments.restored(state["value_moments"]) if "value_moments" in state else Moments()
        normalized = getattr(self._settings, "normalize_value", False)
        if self._moments.count and not normalized:
            self._model.value_head.scale_outputs(self._moments.std.item(), self._moments.mean.item())
            self._moments = Moments()
        elif normalized and self._in_returns(state):
            self._moments = Moments(count=1, m2=torch.ones((), dtype=torch.float64))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the base; without the setting `normalize_value` the units of values stay, unlike at a warm start."""
        super().load_state_dict(state)
        if not hasattr(self._settings, "normalize_value") and "value_moments" in state:
            snapshot.restore_network(self._model, state["parameters"])
            self._moments = Moments.restored(state["value_moments"])

    @staticmethod
    def _in_returns(state: Mapping[str, Any]) -> bool:
        """Return whether `state` has a head that was trained in units of return."""
        return any(state.get("optimizer", {}).values()) and not state.get("value_moments", {}).get("count")
