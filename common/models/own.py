"""A network of the user's own in place of the convolutions: built, tried, and refused where it does not fit."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from common import extensions
from common.errors import ConfigError
from common.models.spec import ModelSettings

_TRIED = 2  # observations of the trial


class OwnModule(nn.Module):
    """What `model.entry_point` builds, with its output flattened: [N, *shape] of any float dtype → [N, features]."""

    def __init__(self, settings: ModelSettings, shape: tuple[int, ...]) -> None:
        """Call `model.entry_point` with `shape` and `model.kwargs`; its initial weights are its own affair.

        Raises ConfigError where it cannot be called so, makes no module, or one that does not take such observations.
        """
        super().__init__()
        name = settings.entry_point
        function = extensions.find(name, setting="model.entry_point")
        with torch.device("cpu"):  # wherever our own layers are described: it is tried, and may compute while it is built
            module = extensions.bound(function, shape, entry_point=name, setting="model.kwargs", kwargs=settings.kwargs)()
            if not isinstance(module, nn.Module):
                raise ConfigError(f"{name} made no network", found=type(module), wanted="a torch.nn.Module")
            _require_no_buffers(module, name)
            self.module = module
            self.features = math.prod(_tried(module, shape, name).shape[1:])

    def forward(self, observation: Tensor) -> Tensor:
        """See the class."""
        features: Tensor = self.module(observation)
        return features.flatten(1)


def _require_no_buffers(module: nn.Module, name: str) -> None:
    """Refuse what would be one thing in the learner and another in the actors: a snapshot carries parameters alone."""
    buffers = sorted(module.state_dict().keys() - {name for name, _ in module.named_parameters(remove_duplicate=False)})
    if buffers:
        raise ConfigError(
            f"{name} has state that no snapshot carries",
            found=f"buffers {', '.join(buffers)}",
            wanted="parameters alone",
            fix="register them with persistent=False where they never change, else use parameters, or LayerNorm for BatchNorm",
        )


def _tried(module: nn.Module, shape: tuple[int, ...], name: str) -> Tensor:
    """What the module makes of a few zeros."""
    wanted = f"features [N, F] of floats for observations {('N', *shape)}"
    try:
        with torch.no_grad():
            output = module(torch.zeros(_TRIED, *shape))
    except Exception as error:
        raise ConfigError(f"{name} fails on an observation", found=f"{type(error).__name__}: {error}", wanted=wanted) from error
    if isinstance(output, Tensor) and output.is_floating_point() and output.ndim > 1 and len(output) == _TRIED and output.numel():
        return output
    found = f"{output.dtype} {tuple(output.shape)} of {_TRIED}" if isinstance(output, Tensor) else str(type(output))
    raise ConfigError(f"{name} makes no features", found=found, wanted=wanted)
