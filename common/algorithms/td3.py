"""Twin delayed deterministic policy gradients (Fujimoto et al. 2018, arXiv:1802.09477): the learner's side.

Everything but `ActionBounds` speaks in actions of -1 to 1: networks, noise and its clip.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.algorithms import deterministic, optimizers, parameters
from common.algorithms.off_policy import Measured, ReplayLearner
from common.algorithms.parts import Part, RunParts, in_turn
from common.algorithms.q_learning import td_target
from common.algorithms.settings.td3 import TD3Settings
from common.envs.spec import EnvSpec
from common.models import deterministic as models
from common.models.arithmetic import CPU
from common.models.flat import Flat
from common.models.passes import Prepared, Written
from common.models.spec import ModelSettings
from common.replay.memory import Transitions
from common.units import MIB

_ADAM_EPS = 1e-8
_MOST_TOGETHER = 4  # gradient steps whose targets are computed at once: more would save nothing and take memory
_MOST_DRAWN = 16  # gradient steps whose minibatches are drawn at once, if that takes no more than
_MOST_DRAWN_BYTES = 16 * MIB  # for their observations, and
_MOST_DRAWN_PRODUCTS = 1 << 29  # of a row with a weight: a run that is told to stop takes these steps first


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
        self.gradients = Flat.like(parameters), Flat.like(parameters)  # one for each part

    def judge(self, seen: Prepared, *, target: Tensor, lr: float, said: Tensor) -> bool:
        """One step of a critic towards the targets [N], unless its loss is not finite; `said` [N] takes what it said before.

        `seen` was prepared by the passes of either critic.
        """
        output, tape = self.online.forward(seen)
        value = output.squeeze(1)
        said.copy_(value)
        loss, gradient = deterministic.critic_loss(value, target=target)
        if not math.isfinite(loss.item()):
            return False
        self.online.gradients(tape, gradient[:, None], into=self.gradients[0])
        self.descend(lr=lr)
        return True

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


class _Desk(NamedTuple):
    """What the parts lay before one another, for up to K gradient steps on N rows each, R = K * N."""

    order: Tensor  # [3] float64: gradient steps to take, the learning rate, gradient steps taken before
    observation: Tensor  # [R, *input]
    action: Tensor  # [R, A], -1..1
    reward: Tensor  # [R]
    discount: Tensor  # [R]
    next_observation: Tensor  # [R, *input]
    noise: Tensor  # [R, A]
    target: Tensor  # [R]: what both critics are trained towards
    value: Tensor  # [K, 2, N]: what each critic said before its step
    taken: Tensor  # [K, 2] bool: whether it took it
    climbed: Tensor  # [K] bool: whether the actor took a step after that
    actor_loss: Tensor  # [K, 2]: of each part's share of the rows
    action_abs: Tensor  # [K, 2]

    @classmethod
    def of(cls, env: EnvSpec, *, minibatch: int, weights: int, device: torch.device) -> _Desk:
        """Empty; K is less than it could be where a minibatch is large, or a network of so many weights slow."""
        frames = torch.zeros(0, *env.network_input_shape, dtype=getattr(torch, env.observation_dtype), device=device)
        row = 2 * frames.element_size() * math.prod(env.network_input_shape)
        fit = min(_MOST_DRAWN_BYTES // (row * minibatch), _MOST_DRAWN_PRODUCTS // (weights * minibatch))
        steps = max(1, min(_MOST_DRAWN, fit))
        observation = frames.new_zeros(steps * minibatch, *env.network_input_shape)
        action, number = (torch.zeros(steps * minibatch, *shape, device=device) for shape in (env.action.shape, ()))
        pairs = torch.zeros(steps, 2, device=device)
        return cls(
            order=torch.zeros(3, dtype=torch.float64),
            observation=observation,
            action=action,
            reward=number,
            discount=number.clone(),
            next_observation=observation.clone(),
            noise=action.clone(),
            target=number.clone(),
            value=torch.zeros(steps, 2, minibatch, device=device),
            taken=torch.zeros(steps, 2, dtype=torch.bool),
            climbed=torch.zeros(steps, dtype=torch.bool),
            actor_loss=pairs,
            action_abs=pairs.clone(),
        )

    @property
    def steps(self) -> int:
        """K."""
        return len(self.taken)

    def lay(self, rows: Transitions, noise: Tensor, bounds: models.ActionBounds) -> None:
        """Put transitions and noise there."""
        count = slice(len(rows.reward))
        for place, values in (
            (self.observation, rows.observation),
            (self.reward, rows.reward),
            (self.discount, rows.discount),
            (self.next_observation, rows.next_observation),
        ):
            place[count].copy_(torch.from_numpy(values))
        self.action[count].copy_(bounds.unscale(torch.from_numpy(rows.action)))
        self.noise[count].copy_(noise)

    def measured(self, steps: int) -> list[Measured | None]:
        """Of each of the first `steps`: what it measured, or None where a critic left it out."""
        said = self.value[:steps]  # [K, 2, N]
        error = said - self.target[: said[:, 0].numel()].view(steps, 1, -1)
        critics = error.square().mean(dim=2).sum(dim=1), error.abs().mean(dim=(1, 2)), said.mean(dim=(1, 2))
        actor = self.actor_loss[:steps].sum(dim=1), self.action_abs[:steps].sum(dim=1)
        of_critics = dict(zip(("critic_loss", "td_abs", "q_mean"), critics, strict=True))
        of_both = of_critics | dict(zip(("actor_loss", "action_abs"), actor, strict=True))
        taken, climbed = self.taken[:steps].all(dim=1).tolist(), self.climbed[:steps].tolist()
        return [
            {name: values[step] for name, values in (of_both if climbed[step] else of_critics).items()} if taken[step] else None
            for step in range(steps)
        ]


class _Part:
    """One of one or two `parts`, by `rank` from 0: of two, each looks after one critic, and takes half of the rows otherwise."""

    def __init__(
        self, desk: _Desk, actor: _Learned, critics: Sequence[_Learned], settings: TD3Settings, *, rank: int, parts: int
    ) -> None:
        self._desk, self._actor, self._critics, self._settings = desk, actor, critics, settings
        self._rank, self._parts = rank, parts

    def run(self) -> Iterator[None]:
        """Take the gradient steps that were ordered."""
        written = isinstance(self._actor.online, Written)  # it never asks autograd, which then need not look at each operation
        rounds: Iterator[None] = (torch.inference_mode if written else torch.no_grad)()(self._rounds)()
        return rounds

    def _rounds(self) -> Iterator[None]:
        ordered, lr, before = self._desk.order.tolist()
        total, delay, done, taken = int(ordered), self._settings.policy_delay, 0, int(before)
        size = self._settings.minibatch
        seen = self._critics[0].online.prepare(self._desk.observation[: total * size], self._desk.action[: total * size])
        while done < total:
            # Until the targets move they look the same to all steps.
            steps = range(done, min(done + min(delay - taken % delay, _MOST_TOGETHER), total))
            self._look_ahead(steps)
            yield
            self._judge(steps, seen, lr)
            yield
            done, now = steps.stop, int(self._desk.taken[steps.start : steps.stop].all(dim=1).sum())
            taken += now
            moves = now > 0 and taken % delay == 0
            if moves:
                self._climb(done - 1)
                yield
                self._move(lr)
                yield
            if self._rank == 0:
                self._desk.climbed[steps.start : done] = False
                self._desk.climbed[done - 1] = moves

    def _share(self, steps: range) -> slice:
        """The rows of these steps that are mine."""
        first, rows = steps.start * self._settings.minibatch, len(steps) * self._settings.minibatch
        return slice(first + rows * self._rank // self._parts, first + rows * (self._rank + 1) // self._parts)

    def _look_ahead(self, steps: range) -> None:
        """What both critics are to be trained towards."""
        desk, mine = self._desk, self._share(steps)
        actor, critics = self._actor.target, [critic.target for critic in self._critics]
        ahead = desk.next_observation[mine]
        action = deterministic.smoothed(
            actor.evaluate(actor.prepare(ahead)), desk.noise[mine], clip=self._settings.target_noise_clip
        )
        seen = critics[0].prepare(ahead, action)
        value = deterministic.clipped_double(torch.stack([critic.evaluate(seen) for critic in critics]).squeeze(2))
        desk.target[mine] = td_target(reward=desk.reward[mine], discount=desk.discount[mine], value=value)

    def _judge(self, steps: range, seen: Prepared, lr: float) -> None:
        """A step of my critics on each minibatch."""
        desk, size, mine = self._desk, self._settings.minibatch, range(self._rank, len(self._critics), self._parts)
        for step in steps:
            rows = slice(step * size, (step + 1) * size)
            minibatch, target = seen[rows], desk.target[rows]
            for k in mine:
                desk.taken[step, k] = self._critics[k].judge(minibatch, target=target, lr=lr, said=desk.value[step, k])

    def _climb(self, step: int) -> None:
        """The actor's gradient towards what the first critic rates higher; its own weights stay."""
        desk, critic, actor = self._desk, self._critics[0].online, self._actor.online
        observation = desk.observation[self._share(range(step, step + 1))]
        action, played = actor.forward(actor.prepare(observation))
        value, judged = critic.forward(critic.prepare(observation, action))
        loss, gradient = deterministic.actor_loss(value.squeeze(1), rows=self._settings.minibatch)
        actor.gradients(played, critic.input_gradient(judged, gradient[:, None]), into=self._actor.gradients[self._rank])
        desk.actor_loss[step, self._rank] = loss
        desk.action_abs[step, self._rank] = action.abs().mean() * (len(action) / self._settings.minibatch)

    def _move(self, lr: float) -> None:
        """A step of the actor, and then of all targets."""
        if self._rank == 0:
            mine, *others = self._actor.gradients[: self._parts]
            for gradient in others:
                mine.whole.add_(gradient.whole)
            self._actor.descend(lr=lr)
            self._actor.follow(self._settings.target_rate)
        if self._rank == self._parts - 1:
            for critic in self._critics:
                critic.follow(self._settings.target_rate)


class TD3(ReplayLearner):
    """`common.algorithms.api.Algorithm` for one best action and two critics of it, and `InParts`."""

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
        weights = sum(parameter.numel() for parameter in self._nets.critics[0].parameters())
        self._desk = _Desk.of(env, minibatch=settings.minibatch, weights=weights, device=device)
        # What a user's own network keeps or draws while it computes is not made for two; a GPU does one thing at a time.
        parts = 2 if device == CPU and isinstance(self._actor.online, Written) and settings.minibatch > 1 else 1
        self.parts: Sequence[Part] = [
            _Part(self._desk, self._actor, self._critics, settings, rank=rank, parts=parts) for rank in range(parts)
        ]
        self.run_parts: RunParts = in_turn
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
        return self._desk.steps

    def _train(self, rows: Transitions) -> list[Measured | None]:
        """A step of both critics on each minibatch and, every `policy_delay`-th time, one of the actor and the targets."""
        desk, steps = self._desk, len(rows.reward) // self._settings.minibatch
        noise = torch.empty(rows.action.shape).normal_(std=self._settings.target_noise, generator=self._generator)
        desk.lay(rows, noise, self._bounds)
        desk.order.copy_(torch.tensor((steps, self._learning_rate, self._gradient_steps), dtype=torch.float64))
        self.run_parts(self.parts)
        measured = desk.measured(steps)
        self._gradient_steps += sum(step is not None for step in measured)
        return measured

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
