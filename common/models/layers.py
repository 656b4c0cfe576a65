"""The layers that networks are made of: convolutions, dense layers and heads, behind the normalisation of observations.

The initial weights of a network depend on its seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.envs.spec import IMAGE_RANK, EnvSpec
from common.models.arithmetic import autocast_dtype, seeded
from common.models.leaves import Leaves, Observation
from common.models.normalisation import ImageNormalisation, VectorNormalisation
from common.models.spec import ModelSettings, ResNet, size_after
from common.models.user_module import UserModule

IMAGE_FEATURES = 256
"""Features of an image beside other leaves: thousands of them would drown the few numbers of a vector.

They are divided by the root of their number, so that all together have the length of a single number near 1.
"""

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": partial(nn.ReLU, inplace=True),  # it follows a layer that does not need its output again, so it needs no memory
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
}
N = TypeVar("N", bound="Network")
_SQRT_2, _BYTE = math.sqrt(2.0), 1.0 / 255.0


class OneHot(nn.Module):
    """One-hot codes of discrete observations, those of all components joined."""

    component: Tensor  # of each output
    choice: Tensor  # of each output

    def __init__(self, choices: tuple[int, ...]) -> None:
        """`choices`: the number of choices of each component."""
        super().__init__()
        with torch.device("cpu"):  # also where a network is only outlined
            component = torch.arange(len(choices)).repeat_interleave(torch.tensor(choices))
            choice = torch.cat([torch.arange(count) for count in choices])
        self.register_buffer("component", component, persistent=False)
        self.register_buffer("choice", choice, persistent=False)

    def forward(self, observation: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, (S,) K] int32 → [N, (S,) sum of choices] in `dtype`."""
        return observation[..., self.component].eq(self.choice).to(dtype)


class _FirstConv(nn.Conv2d):
    """A convolution of bytes scaled to 0..1: the scale goes into the weights, which are far fewer than the input.

    bfloat16 holds 0..255 exactly, but not their 255th parts: so it is also more precise.
    """

    def forward(self, image: Tensor) -> Tensor:
        """[N, S, H, W] with values 0..255, in the dtype to compute in."""
        return functional.conv2d(image, self.weight * _BYTE, self.bias, self.stride, self.padding)


class _ResidualBlock(nn.Module):
    """Two convolutions of 3x3, an activation before each, and the input added to their output: [N, C, H, W] to the same."""

    def __init__(self, channels: int, activation: str) -> None:
        super().__init__()
        # Not in place: the input is added later.
        before = nn.ReLU() if activation == "relu" else _ACTIVATIONS[activation]()
        first, second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.branch = nn.Sequential(before, first, _ACTIVATIONS[activation](), second)

    def forward(self, image: Tensor) -> Tensor:
        """See the class."""
        added: Tensor = self.branch(image)
        return image + added


class Head(nn.Linear):
    """A last layer, always computed in float32: rounding logits to bfloat16 would cost percents of the probability ratio."""

    def __init__(self, features: int, outputs: int, *, gain: float = 1.0) -> None:
        """`gain` of its initial weights where they are orthogonal: the scale of the initial outputs."""
        super().__init__(features, outputs)
        self.gain = gain

    def forward(self, features: Tensor) -> Tensor:
        """[N, F] of any float dtype → [N, outputs] float32."""
        if autocast_dtype(features.device) is not None:
            with torch.autocast(features.device.type, enabled=False):
                return self.forward(features)
        return functional.linear(features.float(), self.weight.float(), self.bias.float())

    @torch.no_grad()
    def scale_outputs(self, factor: float, offset: float) -> None:
        """Multiply all later outputs by `factor`, and add `offset`."""
        self.weight.mul_(factor)
        self.bias.mul_(factor).add_(offset)


class Trunk(nn.Module):
    """Observation [N, *input] in the environment's dtype → features [N, F] in the dtype to compute in.

    A module of the user replaces the convolutions; it too gets bytes as 0..1, and normalised observations if asked.
    """

    def __init__(self, settings: ModelSettings, env: EnvSpec) -> None:
        super().__init__()
        shape = env.network_input_shape
        self.normalisation: ImageNormalisation | VectorNormalisation | None = None
        if settings.normalises(env):
            self.normalisation = ImageNormalisation(env) if env.is_image else VectorNormalisation(env.observation_shape)
        self.one_hot = OneHot(env.observation_choices) if env.observation_choices else None
        if env.observation_choices:
            shape = (*shape[:-1], sum(env.observation_choices))
        self.reads_bytes = env.observation_dtype == "uint8" and self.normalisation is None
        self.user = UserModule(settings, shape) if settings.entry_point else None
        self.conv = nn.Sequential()
        if self.user is not None:
            shape = (self.user.features,)
        elif env.is_image:
            shape = self._convolve(settings, (math.prod(shape[:-IMAGE_RANK]), *shape[-IMAGE_RANK:]))
        self.hidden = dense(math.prod(shape), settings.hidden, settings)
        self.features = settings.hidden[-1] if settings.hidden else math.prod(shape)

    def _convolve(self, settings: ModelSettings, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Build the convolutions of images of `shape` [channels of all stacked images, H, W]; return the shape they make."""
        plan = settings.convolutions(shape[1:])
        inputs, first = shape[0], _FirstConv if self.reads_bytes else nn.Conv2d
        if isinstance(plan, ResNet):
            for width in plan.widths:
                self.conv.extend([first(inputs, width, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)])
                self.conv.extend([_ResidualBlock(width, settings.activation) for _ in range(2)])
                inputs, first = width, nn.Conv2d
            self.conv.append(_ACTIVATIONS[settings.activation]())
            return (inputs, *plan.size_after(shape[1:]))
        for channels, kernel, stride in plan:
            self.conv.append(first(inputs, channels, kernel, stride))
            if settings.layer_norm:
                self.conv.append(nn.GroupNorm(1, channels))  # over channels and places; weights are of channels
            self.conv.append(_ACTIVATIONS[settings.activation]())
            inputs, first = channels, nn.Conv2d
        return (inputs, *size_after(plan, shape[1:]))

    def forward(self, observation: Tensor, dtype: torch.dtype) -> Tensor:
        """See the class; `dtype` is the network's (`Network.compute_dtype`), because a trunk may have no weights."""
        prepare = self.one_hot or self.normalisation
        x = observation.to(dtype) if prepare is None else prepare(observation, dtype)
        if self.conv:
            # channels_last makes training in float32 a quarter faster. Flattening in that order copies nothing.
            x = x.flatten(1, -1 - IMAGE_RANK)  # stacked images of several channels become one image
            x = self.conv(x.contiguous(memory_format=torch.channels_last)).permute(0, 2, 3, 1)
        elif self.reads_bytes:
            x = x * _BYTE
        if self.user is not None:
            x = self.user(x)
        features: Tensor = self.hidden(x.flatten(1))
        return features

    def calibrate(self, frames: Tensor) -> None:
        """Fix the normalisation of images by example images [N, *frame]; no effect where the trunk has none."""
        if isinstance(self.normalisation, ImageNormalisation):
            self.normalisation.calibrate(frames)

    def set_moments(self, mean: Tensor, std: Tensor) -> None:
        """Normalise vectors by these moments [*frame] float64; no effect where the trunk does not normalise them."""
        if isinstance(self.normalisation, VectorNormalisation):
            self.normalisation.set_moments(mean, std)


class _Divided(nn.Module):
    """Features [N, F] divided by the root of F."""

    def forward(self, features: Tensor) -> Tensor:
        return features / math.sqrt(features.shape[1])


class TreeTrunk(nn.Module):
    """Joined observations [N, (S,) bytes] → features [N, F]: those of a trunk of each leaf, side by side, through `model.hidden`.

    A module of the user takes the place of the convolutions of all leaves, and gets them as a dict, prepared, by their paths.
    ONNX models pass the leaves themselves: a tuple of [N, *input of the leaf].
    """

    def __init__(self, settings: ModelSettings, env: EnvSpec) -> None:
        super().__init__()
        settings.normalises(env)
        trunks = [Trunk(_of_leaf(settings, part, among=len(env.parts)), part) for part in env.parts]
        for trunk in trunks:
            if trunk.hidden:  # of an image: a step of Adam moves what follows by each feature, whatever the gradient is
                trunk.hidden.append(_Divided())
        self.leaves = nn.ModuleList(trunks)
        self._leaves = Leaves(env)
        widths = [trunk.features for trunk in trunks]
        self._prepared = {  # of each leaf, as a module of the user gets it
            leaf.path: (width,) if leaf.choices else part.network_input_shape
            for leaf, part, width in zip(env.seen, env.parts, widths, strict=True)
        }
        self.user = UserModule(settings, self._prepared) if settings.entry_point else None
        joined = sum(widths) if self.user is None else self.user.features
        self.hidden = dense(joined, settings.hidden, settings)
        self.features = settings.hidden[-1] if settings.hidden else joined

    def forward(self, observation: Observation, dtype: torch.dtype) -> Tensor:
        """See the class; `dtype` is the network's."""
        leaves = self._leaves.stacks(observation)
        features = [trunk(leaf, dtype) for trunk, leaf in zip(self.trunks(), leaves, strict=True)]
        x = torch.cat(features, dim=1) if self.user is None else self.user(self._prepare(features))
        joined: Tensor = self.hidden(x)
        return joined

    def _prepare(self, features: Sequence[Tensor]) -> dict[str, Tensor]:
        shapes = zip(self._prepared.items(), features, strict=True)
        return {path: leaf.reshape(len(leaf), *shape) for (path, shape), leaf in shapes}

    def trunks(self) -> list[Trunk]:
        """The trunks of all leaves that a network sees, in their order."""
        return [trunk for trunk in self.leaves if isinstance(trunk, Trunk)]

    def calibrate(self, frames: Tensor) -> None:
        """Fix the normalisation of images by example frames [N, bytes]."""
        for trunk, leaf in zip(self.trunks(), self._leaves.frames(frames), strict=True):
            trunk.calibrate(leaf)

    def set_moments(self, mean: Tensor, std: Tensor) -> None:
        """Normalise vectors by these moments [D] float64, of all vectors side by side."""
        vectors = [trunk.normalisation for trunk in self.trunks() if isinstance(trunk.normalisation, VectorNormalisation)]
        widths = [vector.scale.numel() for vector in vectors]
        for vector, own_mean, own_std in zip(vectors, torch.split(mean, widths), torch.split(std, widths), strict=True):
            vector.set_moments(own_mean, own_std)


def _of_leaf(settings: ModelSettings, env: EnvSpec, *, among: int) -> ModelSettings:
    """The settings of the trunk of one leaf. An image beside other leaves gets a layer that brings it to their scale."""
    changed: dict[str, Any] = {"hidden": (IMAGE_FEATURES,) if env.is_image and among > 1 else ()}
    if settings.entry_point:
        changed = {"hidden": (), "entry_point": "", "conv": ()}
    if env.observation_choices:
        changed["normalize_observation"] = False
    return settings.model_copy(update=changed)


def build_trunk(settings: ModelSettings, env: EnvSpec) -> Trunk | TreeTrunk:
    """The trunk for the observations of `env`."""
    return TreeTrunk(settings, env) if env.leaves else Trunk(settings, env)


class Network(nn.Module):
    """Base of whole networks, with one or more trunks."""

    def compute_dtype(self, observation: Observation) -> torch.dtype:
        """Return the dtype that the layers compute in: autocast's, else that of the weights.

        A trunk converts its input to autocast's dtype at once, which saves autocast a second pass over it. The weights are not
        those of a memory, which computes in float32 whatever the others do.
        """
        device = observation.device if isinstance(observation, Tensor) else observation[0].device
        weights = (weight for name, weight in self.named_parameters() if not name.startswith("recurrent."))
        return autocast_dtype(device) or next(weights).dtype

    @property
    def normalizes_vectors(self) -> bool:
        """Return whether `set_moments` has an effect."""
        return any(isinstance(module, VectorNormalisation) for module in self.modules())

    def calibrate(self, frames: Tensor) -> None:
        """Fix the normalisation of images by example frames [N, *frame]; no effect where the network has none."""
        for trunk in self._trunks():
            trunk.calibrate(frames)

    def set_moments(self, mean: Tensor, std: Tensor) -> None:
        """Normalise vectors by these moments [*frame] float64 (several: [D], side by side); no effect where there are none."""
        for trunk in self._trunks():
            trunk.set_moments(mean, std)

    def _trunks(self) -> list[Trunk | TreeTrunk]:
        found = list(self.modules())
        trees = [module for module in found if isinstance(module, TreeTrunk)]
        return [*trees] or [module for module in found if isinstance(module, Trunk)]


def dense(features: int, widths: Sequence[int], settings: ModelSettings) -> nn.Sequential:
    """Fully connected layers of these `widths`, each followed by the activation; [N, features] passes unchanged where none.

    `layer_norm` comes between the two (Ba et al. 2016, arXiv:1607.06450): the next layer's input has the same scale whatever the
    weights and the observation are, which bounds the values of unseen observations (Ball et al. 2023, arXiv:2302.02948).
    """
    layers = nn.Sequential()
    for width in widths:
        layers.append(nn.Linear(features, width))
        if settings.layer_norm:
            layers.append(nn.LayerNorm(width))
        layers.append(_ACTIVATIONS[settings.activation]())
        features = width
    return layers


def initialised(make: Callable[[], N], *, seed: int, orthogonal: bool = True) -> N:
    """The network that `make` describes, float32, its weights drawn from `seed`. Raises ConfigError as `make`.

    Weights are `orthogonal` (Saxe et al. 2013, arXiv:1312.6120) with gain sqrt(2), in heads with their own gain, and biases 0
    (the usual recipe of PPO); else torch's own, as in a user's module: weights and biases uniform within 1 / sqrt(inputs).
    """
    with seeded(seed):  # torch's own are drawn from its global generator
        net = make()
    if orthogonal:
        _orthogonalise(net, seed)
    for module in _own_modules(net):
        if isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.contiguous(memory_format=torch.channels_last)
    return net


def _orthogonalise(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in _own_modules(net):
        if isinstance(module, nn.Linear | nn.Conv2d):
            gain = module.gain if isinstance(module, Head) else _SQRT_2
            nn.init.orthogonal_(module.weight, gain, generator=generator)
            nn.init.zeros_(module.get_parameter("bias"))
        if isinstance(module, nn.RNNCellBase):
            for weight in (module.weight_ih, module.weight_hh):
                nn.init.orthogonal_(weight, generator=generator)
            for bias in (module.get_parameter("bias_ih"), module.get_parameter("bias_hh")):
                nn.init.zeros_(bias)
            # The second gate of both cells keeps the state; at 0 it would forget half in each step (Jozefowicz et al. 2015).
            nn.init.ones_(module.get_parameter("bias_ih").data[module.hidden_size : 2 * module.hidden_size])


def outlined(make: Callable[[], N]) -> N:
    """The network that `make` describes, without storage. Raises ConfigError as `make`."""
    with seeded(0), torch.device("meta"):
        return make()


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """As `module.modules()`, without modules of the user."""
    yield module
    for child in module.children():
        if not isinstance(child, UserModule):
            yield from _own_modules(child)
