"""Twin delayed deterministic policy gradients (Fujimoto et al. 2018, arXiv:1802.09477): the learner's side.

Everything but `ActionBounds` speaks in actions of -1 to 1: networks, noise and its clip.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.algorithms import deterministic, optimizers, parameters
from common.algorithms.off_policy import Measured, ReplayLearner
from common.algorithms.q_learning import td_target
from common.algorithms.settings.td3 import TD3Settings
from common.algorithms.side_by_side import SideBySide, in_turn
from common.envs.spec import EnvSpec
from common.models import deterministic as models
from common.models.arithmetic import CPU
from common.models.flat import Flat
from common.models.passes import Prepared, Written
from common.models.spec import ModelSettings
from common.replay.memory import Transitions

_ADAM_EPS = 1e-8
_MOST_TOGETHER = 4  # gradient steps whose targets are computed at once: more would save nothing and take memory


class _Learned:
    """A network, its target, its optimizer, and the passes through both networks."""

    def __init__(self, net: nn.Module, target: nn.Module, settings: TD3Settings) -> None:
        pairs = zip(net.named_parameters(), target.parameters(), strict=True)
        trained = [(name, parameter, followed) for (name, parameter), followed in pairs if parameter.requires_grad]
        self._names, parameters, targets = zip(*trained, strict=True)
        self._weights, self._targets = Flat.of(parameters), Flat.of(targets)
        self._adam = optimizers.FlatAdam(self._weights, eps=_ADAM_EPS)
        self.online = models.passes(net, self._weights, precision=settings.precision)
        self.target = models.passes(target, self._targets, precision=settings.precision)
        self.gradients = Flat.like(parameters), Flat.like(parameters)  # one for each thread

    def judge(self, seen: Prepared, step: slice, target: Tensor, *, lr: float) -> Tensor | None:
        """One step of a critic towards the targets [N]: what it said before [N]; None, and no step, where that is not finite."""
        output, tape = self.online.forward(seen[step])
        value = output.squeeze(1)
        loss, gradient = deterministic.critic_loss(value, target=target)
        if not math.isfinite(loss.item()):
            return None
        self.online.gradients(tape, gradient[:, None], into=self.gradients[0])
        self.descend(lr=lr)
        return value

    def descend(self, *, lr: float) -> None:
        """One step along the first gradient."""
        self._adam.step(self.gradients[0].whole, lr=lr)
        self.online.renew()

    def follow(self, rate: float) -> None:
        """Move the target towards the network (Polyak averaging; Lillicrap et al. 2016, arXiv:1509.02971, section 3)."""
        self._targets.whole.lerp_(self._weights.whole, rate)
        self.target.renew()

    def adam_state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of what the optimizer remembers, by parameter."""
        return self._adam.state(self._names)

    def restored(self, adam_state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The parameters of both networks were restored; here is what the optimizer is to remember."""
        self._adam.restore(self._names, adam_state)
        self.online.renew()
        self.target.renew()


class TD3(ReplayLearner):
    """`common.algorithms.api.Algorithm` for one best action and two critics of it."""

    _settings: TD3Settings

    def __init__(
        self, *, settings: TD3Settings, model: ModelSettings, env: EnvSpec, seed: int, device: torch.device = CPU
    ) -> None:
        """Build networks, optimizers and memory; `seed` fixes initial weights, noise and what is drawn.

        Raises ConfigError for discrete actions and for those without bounds.
        """
        self._bounds = models.ActionBounds.of(env.action)
        super().__init__(settings=settings, env=env, seed=seed, device=device)
        self._nets = models.build(model, env, seed=seed).to(device)
        self._targets = copy.deepcopy(self._nets).requires_grad_(requires_grad=False)
        self._actor = _Learned(self._nets.actor, self._targets.actor, settings)
        pairs = zip(self._nets.critics, self._targets.critics, strict=True)
        self._critics = [_Learned(critic, target, settings) for critic, target in pairs]
        # What a user's own network keeps or draws while it computes is not made for two threads; a GPU does one thing at a time.
        self._two_threads = device == CPU and isinstance(self._actor.online, Written)
        self._each = SideBySide() if self._two_threads else in_turn
        self._generator = torch.Generator().manual_seed(seed)
        self._gradient_steps = 0  # of the whole run

    @property
    def model(self) -> models.Actor:
        """The actor, whose parameters are published (float32)."""
        return self._nets.actor

    def _networks(self) -> tuple[models.ActorCritics, ...]:
        return self._nets, self._targets

    @property
    def _together(self) -> int:
        """All until the targets move: they look the same to these steps."""
        return min(self._settings.policy_delay - self._gradient_steps % self._settings.policy_delay, _MOST_TOGETHER)

    def _train(self, rows: Transitions) -> list[Measured | None]:
        """A step of both critics on each minibatch and, every `policy_delay`-th time, one of the actor and the targets."""
        observation, action = self._tensor(rows.observation), self._bounds.unscale(torch.from_numpy(rows.action)).to(self._device)
        target = torch.cat(self._each(self._targets_of(rows), self._shares(len(rows.reward))))
        steps = self._minibatches(len(target))
        seen = self._critics[0].online.prepare(observation, action)
        values = self._each(
            lambda critic: [critic.judge(seen, step, target[step], lr=self._learning_rate) for step in steps], self._critics
        )
        measured = _measured(values, target.view(len(steps), -1))
        taken = sum(step is not None for step in measured)
        self._gradient_steps += taken
        if taken and self._gradient_steps % self._settings.policy_delay == 0:
            actor = self._step_actor(observation[steps[-1]])
            measured[-1] = {**(measured[-1] or {}), **actor}  # there is one: all steps that were drawn together were taken
            for learned in (self._actor, *self._critics):
                learned.follow(self._settings.target_rate)
        return measured

    def _minibatches(self, rows: int) -> list[slice]:
        return [slice(start, start + self._settings.minibatch) for start in range(0, rows, self._settings.minibatch)]

    def _shares(self, rows: int) -> list[slice]:
        """Of each thread, of so many rows."""
        half = rows // 2
        return [slice(half), slice(half, rows)] if self._two_threads and half else [slice(rows)]

    def _targets_of(self, rows: Transitions) -> Callable[[slice], Tensor]:
        """What both critics are trained towards, [N] of a share of the rows."""
        following, reward, discount = map(self._tensor, (rows.next_observation, rows.reward, rows.discount))
        noise = (
            torch.empty(rows.action.shape).normal_(std=self._settings.target_noise, generator=self._generator).to(self._device)
        )
        actor, critics = self._actor.target, [critic.target for critic in self._critics]

        def look_ahead(mine: slice) -> Tensor:
            ahead = following[mine]
            action = deterministic.smoothed(
                actor.evaluate(actor.prepare(ahead)), noise[mine], clip=self._settings.target_noise_clip
            )
            seen = critics[0].prepare(ahead, action)
            values = torch.stack([critic.evaluate(seen) for critic in critics]).squeeze(2)
            return td_target(reward=reward[mine], discount=discount[mine], value=deterministic.clipped_double(values))

        return look_ahead

    def _step_actor(self, observation: Tensor) -> dict[str, Tensor]:
        """Towards what the first critic rates higher; its own weights stay."""
        critic, actor = self._critics[0].online, self._actor.online
        shares = list(zip(self._shares(len(observation)), self._actor.gradients, strict=False))

        def climb(share: tuple[slice, Flat]) -> tuple[Tensor, Tensor]:
            mine, gradients = observation[share[0]], share[1]
            action, played = actor.forward(actor.prepare(mine))
            value, judged = critic.forward(critic.prepare(mine, action))
            loss, gradient = deterministic.actor_loss(value.squeeze(1), rows=len(observation))
            actor.gradients(played, critic.input_gradient(judged, gradient[:, None]), into=gradients)
            return loss, action

        losses, actions = zip(*self._each(climb, shares), strict=True)
        for _, gradients in shares[1:]:
            self._actor.gradients[0].whole.add_(gradients.whole)
        self._actor.descend(lr=self._learning_rate)
        return {"actor_loss": torch.stack(losses).sum(), "action_abs": torch.cat(actions).abs().mean()}

    def state_dict(self) -> dict[str, Any]:
        """Copies, in nested dicts with string keys; leaves are tensors and JSON scalars."""
        return super().state_dict() | {
            "parameters": parameters.state_of(self._nets),
            "targets": parameters.state_of(self._targets),
            "actor_adam": self._actor.adam_state(),
            "critic_adam": {f"{k}.{name}": kept for k in range(2) for name, kept in self._critics[k].adam_state().items()},
            "generator": self._generator.get_state(),
            "gradient_steps": self._gradient_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; ResourceError, and nothing changed, where the state is of another architecture."""
        parameters.restore(self._nets, state.get("parameters", {}))
        parameters.restore(self._targets, state["targets"])
        self._actor.restored(state["actor_adam"])
        for k, critic in enumerate(self._critics):
            names = [name for name in state["critic_adam"] if name.startswith(f"{k}.")]
            critic.restored({name.removeprefix(f"{k}."): state["critic_adam"][name] for name in names})
        self._generator.set_state(state["generator"])
        self._gradient_steps = state["gradient_steps"]
        super().load_state_dict(state)


def _measured(values: Sequence[Sequence[Tensor | None]], target: Tensor) -> list[Measured | None]:
    """Of each step, by what both critics had said [N] before it and their targets [steps, N]; None where a step was left out."""
    steps = [(k, first, second) for k, (first, second) in enumerate(zip(*values, strict=True))]
    taken = {k: torch.stack((first, second)) for k, first, second in steps if first is not None and second is not None}
    found: list[Measured | None] = [None] * len(steps)
    if taken:
        said = torch.stack(list(taken.values()))  # [steps, 2, N]
        error = said - target[list(taken), None]
        parts = error.square().mean(dim=2).sum(dim=1), error.abs().mean(dim=(1, 2)), said.mean(dim=(1, 2))
        for k, *scalars in zip(taken, *parts, strict=True):
            found[k] = dict(zip(("critic_loss", "td_abs", "q_mean"), scalars, strict=True))
    return found
