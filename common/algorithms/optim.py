"""Everything between a loss and the next weights: optimizers, gradient steps, schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import unwrap
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from common.algorithms.api import RunProgress
from common.algorithms.ranks import ALONE, Ranks, average_gradients
from common.algorithms.sections import ActorCriticSection, AlgorithmSection, OptimizerName
from common.algorithms.settings import HIGHEST_ADAPTIVE_RATE, LOWEST_ADAPTIVE_RATE
from common.errors import InternalError
from common.units import EnvSteps

Optimizer: TypeAlias = OptimizerName | Literal["radam"]

RMSPROP_DECAY = 0.99
"""Of the running mean of squared gradients in `RMSprop`, as in A3C and IMPALA."""

_RADAM_STEP = unwrap(torch.optim.RAdam.step)

KL_FACTOR = 1.5
"""The step of `kl_adapted_rate`, up and down."""


# --- gradient steps ---


def build_optimizer(name: Optimizer, net: nn.Module, *, lr: float, eps: float) -> torch.optim.Optimizer:
    """The optimizer of a network's parameters."""
    if name == "radam":
        return RAdam(net.parameters(), lr=lr, eps=eps, foreach=True)  # tensor by tensor takes four times as long
    if name == "rmsprop":
        return RMSprop(net.parameters(), lr=lr, eps=eps)
    return Adam(net.parameters(), lr=lr, eps=eps, fused=True)


def gradient_step(
    optimizer: torch.optim.Optimizer,
    net: nn.Module,
    loss: Tensor,
    *,
    lr: float,
    max_grad_norm: float,
    rows: int = 1,
    ranks: Ranks = ALONE,
) -> Tensor:
    """Move all parameters along the gradient of a scalar loss; return the gradient's norm before clipping, a scalar.

    With several `ranks` along the mean of their gradients by `rows`, of which the loss is a mean: `average_gradients`.
    NaN, and no parameter moved, where the loss or the norm is not finite. With Adam no value is read, which would wait for a GPU.
    """
    optimizer.zero_grad(set_to_none=True)
    if rows:
        loss.backward()  # type: ignore[no-untyped-call]
    loss = average_gradients(net.parameters(), loss, rows=rows, ranks=ranks)
    return clipped_step(optimizer, net, loss, lr=lr, max_grad_norm=max_grad_norm)


def differentiate(optimizer: torch.optim.Optimizer, loss: Tensor, *, rows: int, ranks: Ranks) -> Tensor:
    """Give the parameters of an optimizer, and no others, the gradient of a scalar loss; return the loss, without gradient.

    Loss and gradient are those of all ranks, as in `gradient_step`. NaN is returned where the norm of the gradient is not finite.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    optimizer.zero_grad(set_to_none=True)
    if rows:
        loss.backward(inputs=parameters)  # type: ignore[no-untyped-call]
    loss = average_gradients(parameters, loss, rows=rows, ranks=ranks)
    return loss + 0.0 * nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])


def clipped_step(optimizer: torch.optim.Optimizer, net: nn.Module, loss: Tensor, *, lr: float, max_grad_norm: float) -> Tensor:
    """As `gradient_step`, along the gradients that the parameters hold."""
    norm = nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm)
    norm = torch.where(norm.isfinite() & loss.isfinite(), norm, torch.nan)
    step(optimizer, lr=lr, finite=norm)
    return norm


def step(optimizer: torch.optim.Optimizer, *, lr: float, finite: Tensor) -> None:
    """Move all parameters that have a gradient at this learning rate; none where the scalar `finite` is not."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    # The attribute by which torch.amp.GradScaler lets a fused optimizer leave a step out on the device.
    optimizer.found_inf = (~finite.isfinite()).float()  # type: ignore[attr-defined]
    optimizer.step()


@torch.no_grad()
def polyak_update(target: nn.Module, online: nn.Module, rate: float, *, finite: Tensor) -> None:
    """Move `target` towards `online`, of one architecture: theta' := rate * theta + (1 - rate) * theta', in place.

    Polyak averaging for rates below 1 (Lillicrap et al. 2016, arXiv:1509.02971, section 3; tau), a copy for 1. Nothing moves
    where the scalar `finite` is not finite; it is not read.
    """
    weight = torch.where(finite.isfinite(), rate, 0.0)
    for parameter, towards in zip(target.parameters(), online.parameters(), strict=True):
        parameter.lerp_(towards, weight)


class _UncompiledOptimizer(torch.optim.Optimizer):
    """Has the methods without the decorators that import torch's compiler, which takes longer than to import torch."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)


class Adam(_UncompiledOptimizer, torch.optim.Adam):
    """Adam as torch computes it (Kingma and Ba 2015, arXiv:1412.6980)."""

    step = torch.no_grad()(unwrap(torch.optim.Adam.step))


class RAdam(_UncompiledOptimizer, torch.optim.RAdam):
    """Rectified Adam as torch computes it (Liu et al. 2020, arXiv:1908.03265): plain momentum until the variance is known."""

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move all parameters; none where `found_inf` is 1, which is read, because torch's own has no such attribute."""
        if self.found_inf is None or not self.found_inf.item():
            _RADAM_STEP(self, closure)


class RMSprop(_UncompiledOptimizer):
    """RMSprop as TensorFlow computes it, which the published recipes of A3C and IMPALA were tuned with.

        g2 = 0.99 * g2 + 0.01 * g^2,    w = w - lr * g / sqrt(g2 + eps)

    It differs from `torch.optim.RMSprop` in two ways that matter early in a run: eps stands inside the root, and g2 begins at 1,
    so that the first steps are small ones of plain gradient descent, where torch's would be the largest of the run.
    """

    found_inf: Tensor | None = None

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, eps: float) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient; none where `found_inf` is 1, which is read: an update has one such step."""
        del closure
        if self.found_inf is not None and self.found_inf.item():
            return
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in moved:
                gradient = parameter.grad
                square = self.state[parameter].setdefault("square", torch.ones_like(parameter))
                square.mul_(RMSPROP_DECAY).addcmul_(gradient, gradient, value=1.0 - RMSPROP_DECAY)
                parameter.addcdiv_(gradient, (square + group["eps"]).sqrt_(), value=-group["lr"])


# --- schedules ---


def scheduled_learning_rate(settings: AlgorithmSection, progress: RunProgress) -> float:
    """The learning rate that the settings plan for this point of the run.

    `linear`: from `learning_rate` to `lr_final` after `lr_env_steps` (0: the whole planned run), and `lr_final` from then on.
    """
    if settings.lr_schedule != "linear":
        return settings.learning_rate
    planned = settings.lr_env_steps or progress.env_steps_planned
    return _straight(settings.learning_rate, settings.lr_final, progress.env_steps / planned)


def scheduled_entropy_coef(settings: ActorCriticSection, *, env_steps: EnvSteps) -> float:
    """Weight of the entropy bonus at this point of the run: from `entropy_coef` to `entropy_final` after `entropy_env_steps`."""
    start = settings.entropy_coef
    if start is None:
        raise InternalError("the entropy bonus depends on the actions", found=None, wanted="settings of for_actions()")
    if settings.entropy_env_steps == 0:
        return start
    return _straight(start, settings.entropy_final, env_steps / settings.entropy_env_steps)


def _straight(start: float, end: float, done: float) -> float:
    return start + (end - start) * min(1.0, done)


def kl_adapted_rate(current: float, *, kl: float, target: float) -> float:
    """The next learning rate: smaller where an update moved the policy more than twice the wanted KL, larger where under half.

    As the adaptive penalty of PPO (Schulman et al. 2017, section 4), applied to the step size in place of the penalty.
    """
    if kl > 2.0 * target:
        current /= KL_FACTOR
    elif kl < 0.5 * target:
        current *= KL_FACTOR
    return min(max(current, LOWEST_ADAPTIVE_RATE), HIGHEST_ADAPTIVE_RATE)
