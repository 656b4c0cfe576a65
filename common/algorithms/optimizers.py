"""The optimizers by name, with the recipes that published results rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from common.models.flat import Flat

OptimizerName: TypeAlias = Literal["adam", "rmsprop"]

DECAY = 0.99
"""Of the running mean of squared gradients in `RMSprop`, as in A3C and IMPALA."""


class RMSprop(torch.optim.Optimizer):
    """RMSprop as TensorFlow computes it, which the published recipes of A3C and IMPALA were tuned with.

        g2 = 0.99 * g2 + 0.01 * g^2,    w = w - lr * g / sqrt(g2 + eps)

    It differs from `torch.optim.RMSprop` in two ways that matter early in a run: eps stands inside the root, and g2 begins at 1,
    so that the first steps are small ones of plain gradient descent, where torch's would be the largest of the run.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, eps: float) -> None:
        """`lr` may be changed later in `param_groups`."""
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in moved:
                gradient = parameter.grad
                square = self.state[parameter].setdefault("square", torch.ones_like(parameter))
                square.mul_(DECAY).addcmul_(gradient, gradient, value=1.0 - DECAY)
                parameter.addcdiv_(gradient, (square + group["eps"]).sqrt_(), value=-group["lr"])


class FlatAdam:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) of parameters that lie in one buffer.

        m = m + (1 - 0.9) (g - m),    v = 0.999 v + (1 - 0.999) g^2,    w = w - lr * m' / (sqrt(v') + eps)

    with m' = m / (1 - 0.9^t), v' = v / (1 - 0.999^t). `torch.optim.Adam` does the same; most of its time for a small network goes
    into finding out what to do.
    """

    def __init__(self, weights: Flat, *, eps: float) -> None:
        """`weights` are moved in place."""
        self._weights, self._eps = weights, eps
        self._mean, self._square = Flat.like(weights.parts), Flat.like(weights.parts)
        self._steps = torch.zeros((), device=weights.whole.device)

    def step(self, gradient: Tensor, *, lr: float) -> None:
        """Move all weights, given the loss's gradient [P]."""
        self._steps += 1
        torch._fused_adam_(
            [self._weights.whole],
            [gradient],
            [self._mean.whole],
            [self._square.whole],
            [],
            [self._steps],
            lr=lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )

    def state(self, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Copies of what is remembered, by the names of the parameters; nothing before the first step."""
        if not self._steps:
            return {}
        kept = zip(names, self._mean.parts, self._square.parts, strict=True)
        return {
            name: {key: value.to("cpu", copy=True) for key, value in zip(_KEPT, (self._steps, mean, square), strict=True)}
            for name, mean, square in kept
        }

    def restore(self, names: Iterable[str], states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Inverse of `state`."""
        for kept in (self._steps, self._mean.whole, self._square.whole):
            kept.zero_()
        for name, mean, square in zip(names, self._mean.parts, self._square.parts, strict=True):
            for kept, value in zip((self._steps, mean, square), (states.get(name, {}).get(key) for key in _KEPT), strict=True):
                if value is not None:
                    kept.copy_(value)


_KEPT = ("step", "exp_avg", "exp_avg_sq")  # as torch names them


def build(name: OptimizerName, net: nn.Module, *, lr: float, eps: float) -> torch.optim.Optimizer:
    """The optimizer of a network's parameters."""
    if name == "rmsprop":
        return RMSprop(net.parameters(), lr=lr, eps=eps)
    return torch.optim.Adam(net.parameters(), lr=lr, eps=eps, fused=True)


def step(optimizer: torch.optim.Optimizer, *, lr: float) -> None:
    """Move all parameters at this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def state_of(optimizer: torch.optim.Optimizer, net: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Copies of what the optimizer remembers, by the names of the parameters it remembers it of."""
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in net.named_parameters()}
    return {name: {key: tensor.to("cpu", copy=True) for key, tensor in state.items()} for name, state in states.items() if state}


def restore(optimizer: torch.optim.Optimizer, net: nn.Module, states: dict[str, dict[str, Any]]) -> None:
    """Inverse of `state_of`."""
    parameters = dict(net.named_parameters())
    optimizer.state.clear()
    for name, state in states.items():
        optimizer.state[parameters[name]] = {key: _like(tensor, parameters[name]) for key, tensor in state.items()}


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A copy beside the parameter and laid out as it is (the fused optimizer walks both together); the step count as it is."""
    if tensor.shape != parameter.shape:
        return tensor.to(parameter.device, copy=True)
    return torch.empty_like(parameter).copy_(tensor)
