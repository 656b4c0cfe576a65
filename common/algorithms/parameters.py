"""The parameters of a whole network: in a checkpoint, by name, and as a target or an average that follows another network."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from common.errors import ResourceError

Net = TypeVar("Net", bound=nn.Module)


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


class RunningAverage(Generic[Net]):
    """What actors get of a network: `net`, an average over its recent past, in which the dips of single policies are not.

        w' := rate * w + (1 - rate) * w'        after each of its gradient steps; at rate 1 `net` is the network itself

    (Polyak and Juditsky 1992, doi:10.1137/0330046, with weights that fade.)
    """

    def __init__(self, online: Net, *, rate: float) -> None:
        """It begins at the network as it is."""
        self._online, self._rate = online, rate
        self.net: Net = copy.deepcopy(online).requires_grad_(requires_grad=False) if rate < 1.0 else online

    def follow(self) -> None:
        """The network has taken a step."""
        if self.net is not self._online:
            follow(self.net, self._online, self._rate)

    def state(self) -> dict[str, Tensor]:
        """As `state_of`; nothing where there is no average."""
        return {} if self.net is self._online else state_of(self.net)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of `state`, after the network itself; from a run without an average it begins at what acted so far."""
        if self.net is not self._online:
            restore(self.net, state or state_of(self._online))


def _require_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse parameters of other names or shapes, naming only those that differ."""
    shapes = [{name: list(tensor.shape) for name, tensor in tensors.items()} for tensors in (found, wanted)]
    if shapes[0] != shapes[1]:
        differing = [
            {name: shape for name, shape in one.items() if other.get(name) != shape} for one, other in (shapes, shapes[::-1])
        ]
        fix = "resume with the env and model settings of that run"
        raise ResourceError("the checkpoint is of another network", found=differing[0], wanted=differing[1], fix=fix)
