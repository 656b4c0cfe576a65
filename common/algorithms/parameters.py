"""The parameters of a whole network: in a checkpoint, by name, and as a target that follows another network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from common.errors import ResourceError


def state_of(net: nn.Module) -> dict[str, Tensor]:
    """Copies: training may go on while they are written."""
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in net.named_parameters()}


@torch.no_grad()
def restore(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Inverse of `state_of`. Raises ResourceError, and changes nothing, where it is of another architecture."""
    parameters = dict(net.named_parameters())
    _require_same(state, parameters)
    for name, parameter in parameters.items():
        parameter.copy_(state[name])


@torch.no_grad()
def follow(target: nn.Module, online: nn.Module, rate: float) -> None:
    """Move `target` towards `online`, of one architecture: theta' := rate * theta + (1 - rate) * theta', in place.

    Polyak averaging for rates below 1 (Lillicrap et al. 2016, arXiv:1509.02971, section 3; tau), a copy for 1.
    """
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), rate)  # one call, not one a tensor


def _require_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse parameters of other names or shapes, naming only those that differ."""
    shapes = [{name: list(tensor.shape) for name, tensor in tensors.items()} for tensors in (found, wanted)]
    if shapes[0] != shapes[1]:
        differing = [
            {name: shape for name, shape in one.items() if other.get(name) != shape} for one, other in (shapes, shapes[::-1])
        ]
        fix = "resume with the env and model settings of that run"
        raise ResourceError("the checkpoint is of another network", found=differing[0], wanted=differing[1], fix=fix)
