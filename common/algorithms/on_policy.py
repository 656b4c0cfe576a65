"""The parts that all actor-critic algorithms share, in the order in which experience passes through them.

`ActorCriticPolicy` acts, `network_outputs` passes a batch of its experience through the network, and `ActorCriticLearner` owns
network, optimizer and running statistics. An algorithm adds its update. T and B are the axes of `Batch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.algorithms import optim
from common.algorithms.api import NetworkPolicy
from common.algorithms.batch import Batch, collate
from common.algorithms.moments import Moments, ObservationStatistics
from common.algorithms.ranks import ALONE, Ranks
from common.algorithms.returns import ReturnInputs
from common.algorithms.rewards import RewardStatistics
from common.algorithms.sections import ActorCriticSection
from common.envs.spec import EnvSpec
from common.errors import ResourceError
from common.models import nets, snapshot
from common.models.arithmetic import CPU, autocast
from common.models.memory import Past
from common.models.spec import ModelSettings, Precision
from common.protocol.events import Experience
from common.protocol.messages import ArraySpec

_KEPT = 0.95  # factor on the weight of all earlier value targets per update; the figures are in docs/decisions/0044
_FORWARD_ROWS = 512  # env steps per forward pass: activations stay in the cache


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
    """Pass all observations through the network once, in parts of bounded size.

    `moments` are those of the value targets that the value head was trained on: its outputs are in their normalised units.
    """
    shape = batch.reward.shape
    outputs = _forward(net, batch.observation[:-1].flatten(0, 1), batch.past, precision)
    actions = torch.split(batch.action.flatten(0, 1), [len(output.value) for output in outputs])
    log_prob = torch.cat([output.policy.log_prob(part) for output, part in zip(outputs, actions, strict=True)])
    entropy = torch.cat([output.policy.entropy() for output in outputs])
    normalized_value = torch.cat([output.value for output in outputs])
    with torch.no_grad():
        # The last row bootstraps from o_T. A truncated episode bootstraps from its own last observation, because o_{t+1} is the
        # first of the next episode there.
        state, past = _after(outputs, batch)
        after = _forward(net, torch.cat([batch.observation[-1], batch.final_observation]), past, precision)
        values = moments.denormalize(torch.cat([normalized_value, *(output.value for output in after)]))
        value, bootstrap, final = torch.split(values, [shape.numel(), shape[1], len(batch.final_index)])
        next_value = torch.cat([value[shape[1] :], bootstrap]).index_copy_(0, batch.final_index, final)
    return NetworkOutputs(
        log_prob=log_prob.view(shape),
        entropy=entropy.view(shape),
        normalized_value=normalized_value.view(shape),
        value=value.view(shape),
        next_value=next_value.view(shape),
        state=state,
    )


def _forward(net: nets.ActorCritic, observation: Tensor, past: Past, precision: Precision) -> list[nets.Output]:
    """The outputs for T*B rows, in parts; one part has the same rows of all environments where the network has memory."""
    with autocast(precision, observation.device):
        if net.recurrent is None:
            return [net(part) for part in torch.split(observation, _FORWARD_ROWS)]
        outputs, state = list[nets.Output](), past.state
        rows = max(1, _FORWARD_ROWS // max(1, len(state)))
        for start in torch.split(past.start, rows):
            done = sum(len(output.value) for output in outputs)
            output: nets.Output = net(observation[done : done + start.numel()], Past(state, start))
            assert output.state is not None
            outputs.append(output)
            state = output.state[output.state.shape[0] - len(state) :]
        return outputs


def _after(outputs: Sequence[nets.Output], batch: Batch) -> tuple[Tensor, Past]:
    """The states [B, S] after o_{T-1}, and what came before o_T and the last observations of truncated episodes: one row."""
    rows = [output.state for output in outputs if output.state is not None]
    states = torch.cat(rows) if rows else batch.memory.new_empty(batch.reward.numel(), 0)
    state, final = states[-batch.reward.shape[1] :], states[batch.final_index]
    start = torch.cat([batch.start[-1], batch.start.new_zeros(len(final))])
    return state, Past(torch.cat([state, final]), start.unsqueeze(0))


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


class ActorCriticLearner:
    """`common.algorithms.api.Algorithm` without `update`: owns network, optimizer and the moments of value targets.

    The value head is trained in the normalised units of those moments, where the settings ask for it. `network_outputs` converts
    to units of return, and `_moments.normalize` back.
    """

    def __init__(
        self,
        *,
        settings: ActorCriticSection,
        model: ModelSettings,
        env: EnvSpec,
        seed: int,
        device: torch.device = CPU,
        ranks: Ranks = ALONE,
        normalize_reward: bool = False,
    ) -> None:
        """`seed` fixes initial weights. Raises ConfigError where observations cannot be as `model` asks."""
        settings.require_observations(env, model)
        self._ranks = ranks
        self._settings: ActorCriticSection = settings.for_actions(discrete=env.action.discrete)
        self._env, self._device, self._state_size = env, device, model.state_size
        self._model = nets.build_actor_critic(model, env, seed=seed).to(device)
        self._optimizer_name, eps = settings.optimizer_recipe
        self._optimizer = optim.build_optimizer(self._optimizer_name, self._model, lr=settings.learning_rate, eps=eps)
        self._moments = Moments()  # of value targets
        self._observations = ObservationStatistics(lambda: [self._model], env=env, ranks=ranks)
        self._rewards = RewardStatistics(enabled=normalize_reward, gamma=settings.gamma, ranks=ranks)

    @property
    def model(self) -> nets.ActorCritic:
        """The network whose parameters are published (float32)."""
        return self._model

    def calibrate(self, frames: Tensor) -> None:
        """Begin the normalisation of observations with example observations [N, *frame]."""
        self._observations.calibrate(frames)

    def observe(self, samples: Sequence[Experience]) -> None:
        """Let the network normalise vector observations by all so far, these included."""
        self._observations.add(samples)

    def ingest(self, samples: Sequence[Experience]) -> Batch:
        """Join trajectories into one batch, stacks rebuilt; its rewards are scaled by all so far, these included."""
        self._rewards.add(samples)
        batch = collate(samples, self._env, self._device, state_size=self._state_size)
        return replace(batch, reward=self._rewards.scaled(batch.reward))

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
        return {
            "parameters": snapshot.network_state(self._model),
            "optimizer": {self._optimizer_name: snapshot.optimizer_state(self._optimizer, self._model)},
            "value_moments": asdict(self._moments),
            "observation_moments": self._observations.state_dict(),
            "rewards": self._rewards.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where it is of another architecture or optimizer."""
        optimizers = state.get("optimizer", {})
        if self._optimizer_name not in optimizers:
            fix = "resume with the algorithm settings of that run"
            raise ResourceError(
                "the checkpoint is of another optimizer", found=list(optimizers), wanted=[self._optimizer_name], fix=fix
            )
        self.load_parameters(state)
        snapshot.restore_optimizer(self._optimizer, self._model, optimizers[self._optimizer_name])

    def load_parameters(self, state: Mapping[str, Any]) -> None:
        """Take the network, the statistics of its observations and rewards, and the moments in whose units its values are.

        Where the settings ask for no such units, the head is scaled to units of return.
        """
        snapshot.restore_network(self._model, state.get("parameters", {}))
        self._observations.load_state_dict(state.get("observation_moments", {}))
        self._rewards.load_state_dict(state.get("rewards", {}))
        self._moments = Moments.restored(state["value_moments"]) if "value_moments" in state else Moments()
        if self._moments.count and not getattr(self._settings, "normalize_value", True):
            self._model.value_head.scale_outputs(self._moments.std.item(), self._moments.mean.item())
            self._moments = Moments()
