"""The parameters of a network outside of it, and back.

As one flat buffer, as their gradients too, in the messages Snapshot and Gradient; by name, with the state of their optimizer, in
checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.errors import DropReason, ProtocolError, ResourceError
from common.models.spec import Precision

# --- one flat buffer ---


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """Names and shapes of the parameters, in the order in which they lie in the flat buffer (row-major each)."""

    entries: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, module: nn.Module) -> ParameterLayout:
        """The layout of a network; independent of its weights and their precision."""
        return cls(tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters()))

    @property
    def size(self) -> int:
        """P, the number of values."""
        return sum(math.prod(shape) for _, shape in self.entries)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that two processes compare before they exchange parameters."""
        return hashlib.sha256(json.dumps(self.entries).encode()).hexdigest()[:16]


def flatten(module: nn.Module, precision: Precision) -> np.ndarray:
    """A copy of all parameters: [P] float32, or [P] uint16 holding the bits of bfloat16 (round to nearest even)."""
    return _to_array([parameter.detach() for parameter in module.parameters()], precision)


def digest(module: nn.Module) -> str:
    """SHA-256 of `flatten` in float32, as 64 hex digits: equal for networks that are equal to the bit."""
    return hashlib.sha256(flatten(module, "fp32").tobytes()).hexdigest()


def flatten_gradient(module: nn.Module, precision: Precision) -> np.ndarray:
    """As `flatten`, of the gradients: zeros for a parameter that has none."""
    parameters = module.parameters()
    return _to_array([torch.zeros_like(p, requires_grad=False) if p.grad is None else p.grad for p in parameters], precision)


def _to_array(tensors: list[Tensor], precision: Precision) -> np.ndarray:
    flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
    array: np.ndarray = (flat if precision == "fp32" else flat.bfloat16().view(torch.uint16)).cpu().numpy()
    return array


def to_tensor(array: np.ndarray) -> Tensor:
    """[P] float32 or uint16 bits, as a Snapshot carries it → [P] float32 or bfloat16 tensor."""
    # Memory of the wire is read-only, which torch cannot express; parameters are small and come seldom, so one copy is cheap.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if tensor.dtype not in (torch.float32, torch.uint16):
        raise ProtocolError(DropReason.SCHEMA, "snapshot of another dtype", found=str(array.dtype), wanted="float32 or uint16")
    return tensor if tensor.dtype == torch.float32 else tensor.view(torch.bfloat16)


@torch.no_grad()
def load(module: nn.Module, parameters: Tensor | np.ndarray) -> None:
    """Overwrite all parameters from a flat buffer, cast to the module's precision. Raises ProtocolError where it does not fit."""
    flat = to_tensor(parameters) if isinstance(parameters, np.ndarray) else parameters
    for parameter, values in _split(module, flat):
        parameter.copy_(values)


def load_gradient(module: nn.Module, flat: Tensor) -> None:
    """Set the gradients of all trained parameters from a flat buffer [P] float32. Raises ProtocolError where it does not fit."""
    for parameter, values in _split(module, flat):
        parameter.grad = torch.empty_like(parameter).copy_(values) if parameter.requires_grad else None


def _split(module: nn.Module, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    parameters = list(module.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    if flat.shape != (sum(sizes),):
        raise ProtocolError(DropReason.SCHEMA, "snapshot of another network", found=list(flat.shape), wanted=[sum(sizes)])
    parts = torch.split(flat, sizes)
    return [(parameter, part.view(parameter.shape)) for parameter, part in zip(parameters, parts, strict=True)]


# --- by name ---


def network_state(net: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by name: training may go on while they are written."""
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in net.named_parameters()}


def require_same_network(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raise ResourceError for a state with parameters of other names or shapes."""
    parameters = dict(net.named_parameters())
    found, wanted = ({name: list(tensor.shape) for name, tensor in tensors.items()} for tensors in (state, parameters))
    if found != wanted:
        raise ResourceError(
            "the checkpoint is of another network",
            found={name: shape for name, shape in found.items() if wanted.get(name) != shape},
            wanted={name: shape for name, shape in wanted.items() if found.get(name) != shape},
            fix="resume with the env and model settings of that run",
        )


@torch.no_grad()
def restore_network(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Inverse of `network_state`. Raises ResourceError, and changes nothing, for parameters of other names or shapes."""
    require_same_network(net, state)
    for name, parameter in net.named_parameters():
        parameter.copy_(state[name])


def optimizer_state(optimizer: torch.optim.Optimizer, net: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Copies of the optimizer's state by the name of the parameter that it belongs to."""
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in net.named_parameters()}
    return {name: {key: tensor.to("cpu", copy=True) for key, tensor in state.items()} for name, state in states.items() if state}


def restore_optimizer(optimizer: torch.optim.Optimizer, net: nn.Module, states: dict[str, dict[str, Any]]) -> None:
    """Inverse of `optimizer_state`."""
    parameters = dict(net.named_parameters())
    optimizer.state.clear()
    for name, state in states.items():
        kept = {key: _like(tensor, parameters[name]) for key, tensor in state.items()}
        if "step" in kept and not optimizer.defaults.get("fused"):
            kept["step"] = kept["step"].cpu()  # where torch reads it: on a GPU each read would wait
        optimizer.state[parameters[name]] = kept


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A copy on the parameter's device and in its memory layout, as the fused optimizer needs; the step count unchanged."""
    if tensor.shape != parameter.shape:
        return tensor.to(parameter.device, copy=True)
    return torch.empty_like(parameter).copy_(tensor)
