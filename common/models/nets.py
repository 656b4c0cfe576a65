"""The parts networks are made of (convolutions for images, a multilayer perceptron for vectors, heads), and the actor-critic.

Orthogonal initialisation with gain sqrt(2), in heads with their own gain, biases 0 (the usual recipe of PPO implementations).
A network draws its initial weights from its own generator, never from torch's global one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.envs.spec import IMAGE_RANK, EnvSpec
from common.errors import ConfigError
from common.models.arithmetic import autocast_dtype
from common.models.distributions import Categorical, DiagonalGaussian, Distribution
from common.models.own import OwnModule
from common.models.spec import ModelSettings

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": partial(nn.ReLU, inplace=True),  # it follows a layer that does not need its output again: no memory is asked for
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
}
N = TypeVar("N", bound="Network")
_SQRT_2, _BYTE = math.sqrt(2.0), 1.0 / 255.0


class Output(NamedTuple):
    """What the network says about N observations: a distribution over actions, and value [N] float32."""

    policy: Distribution
    value: Tensor


class _FirstConv(nn.Conv2d):
    """A convolution of bytes scaled to 0..1: the scale goes into the weights, which are far fewer than the input.

    bfloat16 holds 0..255 exactly, but not their 255th parts: so it is also more precise.
    """

    def forward(self, image: Tensor) -> Tensor:
        """[N, S, H, W] with values 0..255, in the dtype to compute in."""
        return functional.conv2d(image, self.weight * _BYTE, self.bias, self.stride)


class Normalisation(nn.Module):
    """Observations centred on fixed means and divided by one fixed number, both taken from example frames.

    Not trained, and still parameters: they belong to the policy, so they travel in its snapshots. Every pixel or component
    has its own mean. They share one divisor, twice the deviation of the liveliest, which brings nearly all values into -1..1:
    dividing each by its own would turn pixels that hardly ever change into the loudest ones.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.divisor = nn.Parameter(torch.empty(()), requires_grad=False)

    def forward(self, observation: Tensor) -> Tensor:
        """[N, (S,) *frame] of any float dtype → the same shape and dtype."""
        return (observation - self.mean.to(observation.dtype)).mul_(self.divisor.reciprocal().to(observation.dtype))

    @torch.no_grad()
    def calibrate(self, frames: Tensor) -> None:
        """Take mean and divisor from example frames [N, *frame]."""
        values = frames.float()
        self.mean.copy_(values.mean(0))
        self.divisor.copy_(2.0 * values.std(0).max().clamp_min(1e-3))


class Head(nn.Linear):
    """A last layer, always computed in float32: rounding logits to bfloat16 would cost percents of the probability ratio."""

    def __init__(self, features: int, outputs: int, *, gain: float) -> None:
        """`gain` of its initial weights: how far from 0 the outputs begin."""
        super().__init__(features, outputs)
        self.gain = gain

    def forward(self, features: Tensor) -> Tensor:
        """[N, F] of any float dtype → [N, outputs] float32."""
        if autocast_dtype(features.device) is not None:
            with torch.autocast(features.device.type, enabled=False):
                return self.forward(features)
        return functional.linear(features.float(), self.weight.float(), self.bias.float())


class Trunk(nn.Module):
    """Observation [N, *input] in the environment's dtype → features [N, F] in the weights' dtype (or autocast's).

    A module of the user's stands where the convolutions would; it too sees bytes as 0..1, and normalised where asked.
    """

    def __init__(self, settings: ModelSettings, env: EnvSpec) -> None:
        super().__init__()
        shape = env.network_input_shape
        self.normalisation = Normalisation(env.observation_shape) if settings.normalize_observation else None
        self.reads_bytes = env.observation_dtype == "uint8" and self.normalisation is None
        self.own = OwnModule(settings, shape) if settings.entry_point else None
        if self.own is not None:
            shape = (self.own.features,)
        elif len(env.observation_shape) > IMAGE_RANK:
            raise _no_network(env)
        self.conv = nn.Sequential()
        for channels, kernel, stride in settings.conv if len(shape) == 1 + IMAGE_RANK else ():
            layer = _FirstConv if self.reads_bytes and not self.conv else nn.Conv2d
            self.conv.append(layer(shape[0], channels, kernel, stride))
            self.conv.append(_ACTIVATIONS[settings.activation]())
            shape = (channels, *((size - kernel) // stride + 1 for size in shape[1:]))
            if min(shape) < 1:
                wanted = "at least one row and column after every convolution"
                fix = "use fewer or smaller model.conv layers, or larger images"
                raise ConfigError("model.conv does not fit the image", found=env.network_input_shape, wanted=wanted, fix=fix)
        self.hidden = dense(math.prod(shape), settings.hidden, settings)
        self.features = settings.hidden[-1] if settings.hidden else math.prod(shape)

    def forward(self, observation: Tensor) -> Tensor:
        """See the class."""
        x = observation.to(_compute_dtype(self, observation.device))
        if self.normalisation is not None:
            x = self.normalisation(x)
        if self.conv:
            # channels_last makes training in float32 a quarter faster. Flattening in that order copies nothing.
            x = self.conv(x.contiguous(memory_format=torch.channels_last)).permute(0, 2, 3, 1)
        elif self.reads_bytes:
            x = x * _BYTE
        if self.own is not None:
            x = self.own(x)
        features: Tensor = self.hidden(x.reshape(len(x), -1))
        return features


class Network(nn.Module):
    """A whole network, with one or more trunks."""

    def calibrate(self, frames: Tensor) -> None:
        """Fix the normalisation of observations by example frames [N, *frame]; nothing where the network has none."""
        for module in self.modules():
            if isinstance(module, Normalisation):
                module.calibrate(frames)


class ActorCritic(Network):
    """Policy and value, with one trunk or one each."""

    def __init__(self, settings: ModelSettings, env: EnvSpec) -> None:
        super().__init__()
        discrete = env.action.discrete
        self.trunk = Trunk(settings, env)
        self.value_trunk = None if settings.shared_trunk else Trunk(settings, env)
        outputs = env.action.n if discrete else math.prod(env.action.shape)
        self.policy_head = Head(self.trunk.features, outputs, gain=0.01)
        self.value_head = Head(self.trunk.features, 1, gain=1.0)
        self.log_std = None if discrete else nn.Parameter(torch.zeros(outputs))
        self._action_shape = env.action.shape

    def policy(self, observation: Tensor) -> Distribution:
        """The distribution alone, for acting: no value is computed."""
        return self._policy(self.trunk(observation))

    def forward(self, observation: Tensor) -> Output:
        """Observation [N, *input] in the environment's dtype → distribution and value, in float32 whatever the weights are."""
        features = self.trunk(observation)
        value_features = features if self.value_trunk is None else self.value_trunk(observation)
        return Output(self._policy(features), self.value_head(value_features).squeeze(-1))

    def _policy(self, features: Tensor) -> Distribution:
        outputs = self.policy_head(features)
        if self.log_std is None:
            return Categorical.from_logits(outputs)
        return DiagonalGaussian(outputs, self.log_std.float())


def dense(features: int, widths: Sequence[int], settings: ModelSettings) -> nn.Sequential:
    """Fully connected layers of these `widths`, each followed by the activation; [N, features] passes unchanged where none.

    `layer_norm` comes between the two (Ba et al. 2016, arXiv:1607.06450): the next layer's input has the same scale whatever the
    weights and the observation are, which bounds what a value can be where nothing was seen (Ball et al. 2023, arXiv:2302.02948).
    """
    layers = nn.Sequential()
    for width in widths:
        layers.append(nn.Linear(features, width))
        if settings.layer_norm:
            layers.append(nn.LayerNorm(width))
        layers.append(_ACTIVATIONS[settings.activation]())
        features = width
    return layers


class Perceptron(NamedTuple):
    """A network of one form: `features` of its input, and whether its hidden layers have `layer_norm`."""

    features: int
    layer_norm: bool


def perceptron(net: nn.Module) -> Perceptron | None:
    """A network that is nothing but `dense` layers with ReLU and a Head, fed with floats; None for any other."""
    parts = [module for module in net.modules() if not isinstance(module, Network | Trunk | nn.Sequential)]
    if any(module.reads_bytes for module in net.modules() if isinstance(module, Trunk)):
        return None
    kinds = [type(part) for part in parts]
    for block in ([nn.Linear, nn.ReLU], [nn.Linear, nn.LayerNorm, nn.ReLU]):
        if kinds == [*block * (len(kinds) // len(block)), Head]:
            first = next(part for part in parts if isinstance(part, nn.Linear))
            return Perceptron(first.in_features, layer_norm=nn.LayerNorm in kinds)
    return None


def build(settings: ModelSettings, env: EnvSpec, *, seed: int = 0) -> ActorCritic:
    """The actor-critic of a run, float32, freshly initialised from `seed`. Raises ConfigError where it does not fit the input."""
    return initialised(lambda: ActorCritic(settings, env), env, seed=seed)


def outline(settings: ModelSettings, env: EnvSpec) -> ActorCritic:
    """The actor-critic's names and shapes alone, without storage. Raises ConfigError where it does not fit the input."""
    return outlined(lambda: ActorCritic(settings, env), env)


def initialised(make: Callable[[], N], env: EnvSpec, *, seed: int) -> N:
    """The network that `make` describes, float32, its weights drawn from `seed`. Raises ConfigError for spaces without one."""
    _require_vector_actions(env)
    with torch.random.fork_rng(devices=()):  # a module of the user's draws from torch's global generator
        torch.default_generator.manual_seed(seed)
        net = make()
    _initialise(net, torch.Generator().manual_seed(seed))
    return net


def outlined(make: Callable[[], N], env: EnvSpec) -> N:
    """The network that `make` describes, without storage. Raises ConfigError for spaces without one."""
    _require_vector_actions(env)
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        return make()


def _require_vector_actions(env: EnvSpec) -> None:
    if len(env.action.shape) > 1:
        raise _no_network(env)


def _no_network(env: EnvSpec) -> ConfigError:
    return ConfigError(
        "no network for these spaces",
        found=f"observations {env.observation_shape}, actions {env.action.shape}",
        wanted="observations that are vectors or grey images [H, W], actions that are numbers or vectors",
        fix="flatten them in your env.entry_point, or bring your own network for observations, model.entry_point",
    )


def _compute_dtype(module: nn.Module, device: torch.device) -> torch.dtype:
    """What the layers will compute in: converting the input to it at once spares autocast a second pass over it."""
    return autocast_dtype(device) or next((parameter.dtype for parameter in module.parameters()), torch.float32)


def _initialise(net: Network, generator: torch.Generator) -> None:
    """Orthogonal weights (Saxe et al. 2013, arXiv:1312.6120), zero biases, deviation 1; a user's module stays as it was built."""
    for module in _ours(net):
        if isinstance(module, nn.Linear | nn.Conv2d):
            gain = module.gain if isinstance(module, Head) else _SQRT_2
            nn.init.orthogonal_(module.weight, gain, generator=generator)
        if isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.contiguous(memory_format=torch.channels_last)
        if isinstance(module, Normalisation):
            nn.init.ones_(module.divisor)
        for name, parameter in module.named_parameters(recurse=False):
            if name in ("bias", "log_std", "mean"):
                nn.init.zeros_(parameter)


def _ours(module: nn.Module) -> Iterator[nn.Module]:
    """As `module.modules()`, without what a user brought."""
    yield module
    for child in module.children():
        if not isinstance(child, OwnModule):
            yield from _ours(child)
