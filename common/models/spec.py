"""Settings of networks, without torch. `nets.py` builds the networks."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from common.conditions import OnlyIf, Unless
from common.envs.spec import EnvSpec
from common.errors import ConfigError

Precision: TypeAlias = Literal["fp32", "bf16"]
"""Of arithmetic, or of sent parameters."""

Size: TypeAlias = Annotated[int, Field(ge=1, le=65536)]
"""Number of units or channels of a layer, side of a kernel, or stride."""

Convolutions: TypeAlias = tuple[tuple[Size, Size, Size], ...]
"""(channels, kernel, stride) of each layer."""


class ResNet(NamedTuple):
    """The large network of IMPALA (Espeholt et al. 2018, arXiv:1802.01561, figure 3) up to its first fully connected layer.

    A section of each of `widths` is a convolution, a pooling that halves the image, and two residual blocks.
    """

    widths: tuple[int, ...] = (16, 32, 32)

    @property
    def least_side(self) -> int:
        """Return the fewest rows and columns of an image: each section halves them."""
        return 1 << len(self.widths)

    def size_after(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the size [H, W] that the sections make of `size`."""
        return tuple(-(-side // self.least_side) for side in size)


_RESNETS = {"impala": ResNet(), "impala-2": ResNet((32, 64, 64)), "impala-4": ResNet((64, 128, 128))}
_BY_SIZE: tuple[Convolutions, ...] = (
    ((32, 8, 4), (64, 4, 2), (64, 3, 1)),  # Mnih et al. 2015, for 84x84; from 52x52 on
    ((32, 4, 2), (64, 3, 2), (64, 3, 1)),  # from 24x24 on
    ((32, 3, 2), (64, 3, 1)),  # from 11x11 on
    ((16, 2, 1), (32, 2, 1), (64, 2, 1)),  # from 6x6 on: grids, in which each cell matters
)
_T = TypeVar("_T")
_OfActorCritics: TypeAlias = Annotated[_T, Unless("algorithm.name", "pqn", "dqn", "td3", "sac")]
_LEAST_SIDE = 3  # of what the convolutions of `auto` make of an image


class ModelSettings(BaseModel):
    """Section `model` of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    conv: Annotated[Convolutions | Literal["auto", "impala", "impala-2", "impala-4"], OnlyIf("entry_point", "")] = Field(
        default="auto",
        description="convolutions for image observations: (channels, kernel, stride) each; auto: by the size of the image, from "
        "52x52 on the Nature CNN, below 6x6 none; impala: the ResNet of IMPALA, impala-2 and impala-4: twice and four times as "
        "wide; []: none, images are flattened",
    )
    entry_point: str = Field(
        default="",
        description="your own, in place of the convolutions: package.module:Class, called with the shape of one observation and "
        "kwargs, returns a torch Module from observations to features",
    )
    kwargs: Annotated[dict[str, Any], Unless("entry_point", "")] = Field(default_factory=dict, description="of the entry point")
    hidden: tuple[Size, ...] = Field(
        default=(512,), description="widths of the fully connected layers after the convolutions, or of the whole MLP"
    )
    activation: Literal["relu", "elu", "tanh", "silu"] = Field(default="relu", description="nonlinearity between layers")
    layer_norm: bool = Field(
        default=False,
        description="layer normalisation before each nonlinearity of fully connected layers and convolutions, not in impala's "
        "ResNet (of td3 and sac: in the critics alone): values of states that it never saw stay within bounds",
    )
    normalize_observation: bool = Field(
        default=False,
        description="vectors: each component by its running mean and deviation, clipped to -10..10; images: by the mean of some "
        "random play and twice its largest deviation, both then fixed, so that fixed parts vanish and moving parts remain; "
        "not of discrete observations",
    )
    # Before `recurrent`, whose condition on it does not count where it has no effect: `unmet` takes settings in their order.
    shared_trunk: _OfActorCritics[bool] = Field(
        default=True, description="actor-critics: policy and value share all layers but the last"
    )
    recurrent: Annotated[
        Literal["lstm", "gru"] | None,
        Unless("algorithm.name", "td3", "sac", why="it has no memory"),
        Unless("shared_trunk", False, why="values would not have the memory that the policy has"),
    ] = Field(default=None, description="memory of earlier observations, after the fully connected layers; not of td3 and sac")
    recurrent_size: Annotated[int, OnlyIf("recurrent", "lstm", "gru")] = Field(
        default=256, ge=1, le=8192, description="outputs of that memory (H)"
    )
    initial_log_std: _OfActorCritics[float] = Field(
        default=0.0,
        ge=-10.0,
        le=2.0,
        description="actor-critics: initial logarithm of the deviation of continuous actions, in halves of an action's range",
    )

    @property
    def state_size(self) -> int:
        """Return the numbers in the state of one environment's memory; 0 without memory."""
        return {"lstm": 2, "gru": 1, None: 0}[self.recurrent] * self.recurrent_size

    def normalises(self, env: EnvSpec) -> bool:
        """Return whether observations are normalised. Raises `ConfigError` where all of them are discrete."""
        if self.normalize_observation and all(part.observation_choices for part in env.parts):
            fact, fix = "discrete observations have no mean to be normalised by", "set model.normalize_observation=false"
            raise ConfigError(fact, found="model.normalize_observation true", wanted="false", fix=fix)
        return self.normalize_observation

    def convolutions(self, size: tuple[int, ...]) -> Convolutions | ResNet:
        """Return the convolutions for images of `size` [H, W]: the setting, or for `auto` the first that leave enough.

        Raises `ConfigError` for a setting that does not fit.
        """
        if self.conv == "auto":
            return next((layers for layers in _BY_SIZE if min(size_after(layers, size)) >= _LEAST_SIDE), ())
        fact = "model.conv does not fit the image"
        if isinstance(self.conv, str):
            resnet = _RESNETS[self.conv]
            if min(size) < resnet.least_side:
                wanted = (
                    f"at least {resnet.least_side} rows and columns for {self.conv}, which halves them {len(resnet.widths)} times"
                )
                raise ConfigError(fact, found=size, wanted=wanted, fix="set model.conv to auto")
            return resnet
        if min(size_after(self.conv, size)) < 1:
            wanted = "at least one row and column after every convolution"
            fix = "set model.conv to auto, to fewer or smaller layers, or to [] for none"
            raise ConfigError(fact, found=size, wanted=wanted, fix=fix)
        return self.conv


def size_after(layers: Convolutions, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the size [H, W] that convolutions make of `size`; a side below 1: they do not fit."""
    for _, kernel, stride in layers:
        size = tuple((side - kernel) // stride + 1 for side in size)
    return size
