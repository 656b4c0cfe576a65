"""A network of the user's own, which `model.entry_point` builds, and the checks that it fits.

An actor's batch has the newest observation of each environment, and the learner's has rows in random order: both compute the
same only where each row is computed alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from common import extensions
from common.errors import ConfigError
from common.models.arithmetic import seeded
from common.models.spec import ModelSettings

Shape: TypeAlias = tuple[int, ...] | Mapping[str, tuple[int, ...]]
"""Of one observation; of several arrays that of each, by its path."""

_Batch: TypeAlias = Tensor | dict[str, Tensor]
_TRIAL_ROWS = 2  # observations on which the module is tried
_ROWS = 3  # of which each is computed beside others
_RELATIVE, _ABSOLUTE = 1e-4, 1e-5  # rounding may depend on the place of a row


class UserModule(nn.Module):
    """The module that `model.entry_point` builds, its output flattened: [N, *shape] of any float dtype → [N, features].

    For an observation of several arrays it takes a dict of them by path, and is built with the dict of their shapes.
    """

    def __init__(self, settings: ModelSettings, shape: Shape) -> None:
        """Raises ConfigError where the call fails, or makes no module, or one that does not take `shape` or mixes rows."""
        super().__init__()
        name = settings.entry_point
        function = extensions.import_attribute(name, setting="model.entry_point")
        with torch.device("cpu"):  # not on "meta": the module is run once, and may compute while it is built
            build = extensions.bind_arguments(function, shape, entry_point=name, setting="model.kwargs", kwargs=settings.kwargs)
            module = _built(build, shape, name)
            _require_no_buffers(module, name)
            self.module = module
            self.features = math.prod(_trial_output(module, shape, name).shape[1:])
            _require_float32(module, name)
            with torch.random.fork_rng(devices=()):  # which goes on from here, so that the second one draws other numbers
                _require_parameters_alone(module, _built(build, shape, name), shape, name)
            require_independent_rows(module, shape, name)
            _require_one_mode(module, shape, name)

    def forward(self, observation: _Batch) -> Tensor:
        """See the class."""
        features: Tensor = self.module(observation)
        return features.flatten(1)


def _built(build: Callable[[], object], shape: Shape, name: str) -> nn.Module:
    try:
        module = build()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        wanted = f"a torch.nn.Module for observations of shape {shape}"
        raise ConfigError(f"{name} fails when it is called", found=found, wanted=wanted) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{name} made no network", found=type(module), wanted="a torch.nn.Module")
    return module


def _require_no_buffers(module: nn.Module, name: str) -> None:
    """Refuse buffers: a snapshot carries parameters alone, so a buffer could differ between learner and actors."""
    buffers = sorted(module.state_dict().keys() - {name for name, _ in module.named_parameters(remove_duplicate=False)})
    if buffers:
        raise ConfigError(
            f"{name} has state that no snapshot carries",
            found=f"buffers {', '.join(buffers)}",
            wanted="parameters alone",
            fix="register them with persistent=False if they are always the same, else use parameters; LayerNorm for BatchNorm",
        )


def _require_float32(module: nn.Module, name: str) -> None:
    """Refuse parameters of another dtype, lazy ones as made: a snapshot rounds them, and a network computes in that of one."""
    if others := {key: str(each.dtype) for key, each in module.named_parameters() if each.dtype != torch.float32}:
        fix = "cast it, or make an index a buffer with persistent=False, from model.kwargs or a fixed seed"
        raise ConfigError(f"{name} has parameters that no snapshot carries", found=others, wanted="torch.float32", fix=fix)


@torch.no_grad()
def _require_parameters_alone(module: nn.Module, other: nn.Module, shape: Shape, name: str) -> None:
    """Refuse (ConfigError) a module if another one with its parameters computes another output: actors build one of their own."""
    batch = _batch(shape, partial(torch.rand, _ROWS, generator=torch.Generator().manual_seed(0)))
    _trial_output(other, shape, name)  # which makes the parameters of lazy layers
    own, others = ([(key, tuple(each.shape)) for key, each in net.named_parameters()] for net in (module, other))
    if own != others:
        fact, fix = f"{name} builds another network at its second call", "keep nothing from one call to the next"
        raise ConfigError(fact, found=f"parameters {others}", wanted=f"{own}", fix=fix)
    for parameter, given in zip(other.parameters(), module.parameters(), strict=True):
        parameter.data = given.data
    with _in_evaluation_mode(module), _in_evaluation_mode(other):
        first, second = (_output(each, batch, name) for each in (module, other))
    if not torch.allclose(first, second, _RELATIVE, _ABSOLUTE, equal_nan=True):
        raise ConfigError(
            f"{name} draws numbers that no snapshot carries",
            found="another output of a second one with the same parameters",
            wanted="an output that follows from the parameters",
            fix="make them a torch.nn.Parameter with requires_grad=False",
        )


def _batch(shape: Shape, make: Callable[..., Tensor]) -> _Batch:
    """Return what `make` returns for the shape, or for that of each array."""
    return make(*shape) if isinstance(shape, tuple) else {path: make(*each) for path, each in shape.items()}


def _trial_output(module: nn.Module, shape: Shape, name: str) -> Tensor:
    wanted = f"features [N, F] of floats for observations {('N', *shape) if isinstance(shape, tuple) else dict(shape)}"
    with torch.no_grad():
        output = _output(module, _batch(shape, partial(torch.zeros, _TRIAL_ROWS)), name)
    if (
        isinstance(output, Tensor)
        and output.is_floating_point()
        and output.ndim > 1
        and len(output) == _TRIAL_ROWS
        and output.numel()
    ):
        return output
    found = f"{output.dtype} {tuple(output.shape)} of {_TRIAL_ROWS}" if isinstance(output, Tensor) else str(type(output))
    raise ConfigError(f"{name} makes no features", found=found, wanted=wanted)


def require_independent_rows(module: nn.Module, shape: Shape, name: str) -> None:
    """Raise `ConfigError` where the output for an observation [*shape] changes with the other observations of the batch."""
    generator = torch.Generator().manual_seed(0)
    batch, others = (_batch(shape, partial(torch.rand, _ROWS, generator=generator)) for _ in range(2))
    with torch.no_grad(), _in_evaluation_mode(module):
        outputs = _output(module, batch, name)
        for row in range(_ROWS):
            mixed = _with_row(others, row, batch)
            if not torch.allclose(_output(module, mixed, name)[row], outputs[row], _RELATIVE, _ABSOLUTE, equal_nan=True):
                raise ConfigError(
                    f"{name} mixes the rows of a batch",
                    found="another output for the same observation beside other observations",
                    wanted="an output that depends on its own row alone",
                    fix="set model.recurrent for an LSTM or GRU after this network; use LayerNorm for BatchNorm over the rows",
                )


def _with_row(others: _Batch, row: int, batch: _Batch) -> _Batch:
    if isinstance(others, dict) and isinstance(batch, dict):
        return {path: torch.cat([each[:row], batch[path][row : row + 1], each[row + 1 :]]) for path, each in others.items()}
    assert isinstance(others, Tensor)
    assert isinstance(batch, Tensor)
    return torch.cat([others[:row], batch[row : row + 1], others[row + 1 :]])


def _require_one_mode(module: nn.Module, shape: Shape, name: str) -> None:
    """Refuse (ConfigError) outputs that differ between training and evaluation, or between two calls: actors evaluate."""
    batch = _batch(shape, partial(torch.rand, _ROWS, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        trained = _output(module, batch, name, seed=0)
        with _in_evaluation_mode(module):
            acted = _output(module, batch, name, seed=1)
    if trained.shape != acted.shape or not torch.allclose(trained, acted, _RELATIVE, _ABSOLUTE, equal_nan=True):
        raise ConfigError(
            f"{name} computes another output in training than in evaluation",
            found="outputs that differ for the same observation",
            wanted="the same in both, because the learner and its actors must compute the same policy",
            fix="remove dropout and other noise; algorithm.entropy_coef keeps a policy exploring",
        )


@contextmanager
def _in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _output(module: nn.Module, batch: _Batch, name: str, *, seed: int = 0) -> Tensor:
    """Return the output for `batch`, with the same random numbers at each call of one `seed`.

    Raises `ConfigError`, also where the module writes to its input: that is the actor's stack, or the batch of the next network.
    """
    given = list(batch.values()) if isinstance(batch, dict) else [batch]
    before = [each._version for each in given]  # noqa: SLF001  counts writes, those that change no value too
    try:
        with seeded(seed):
            output: Tensor = module(dict(batch) if isinstance(batch, dict) else batch)  # it may change the dict
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{name} fails on an observation", found=found, wanted="features for any observation") from error
    if [each._version for each in given] != before:  # noqa: SLF001
        fix = "write x = x / 10 for x /= 10, and set inplace=False in the first layer"
        raise ConfigError(f"{name} writes to its input", found="an observation changed in place", wanted="a new tensor", fix=fix)
    return output
