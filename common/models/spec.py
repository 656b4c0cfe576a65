"""What a network is for and how it looks: pure descriptions, no tensors. `nets.py` builds them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Precision: TypeAlias = Literal["fp32", "bf16"]
"""Of arithmetic, or of what is sent."""


class ModelSettings(BaseModel):
    """Section `model` of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    conv: tuple[tuple[int, int, int], ...] = Field(
        default=((32, 8, 4), (64, 4, 2), (64, 3, 1)),
        description="convolutions for image observations: (channels, kernel, stride) each; default: Nature CNN",
    )
    entry_point: str = Field(
        default="",
        description="your own, in place of the convolutions: package.module:Class, called with the shape of one observation and "
        "kwargs, returns a torch Module from observations to features",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to the entry point")
    hidden: tuple[int, ...] = Field(
        default=(512,), description="widths of the fully connected layers after the convolutions, or of the whole MLP"
    )
    activation: Literal["relu", "elu", "tanh", "silu"] = Field(default="relu", description="nonlinearity between layers")
    layer_norm: bool = Field(
        default=False,
        description="layer normalisation between each fully connected layer and its nonlinearity (of td3: in its critics alone): "
        "what a network believes about states that it never saw stays within bounds",
    )
    normalize_observation: bool = Field(
        default=False,
        description="centre observations on the mean of some random play and divide by twice its deviation, both then fixed; "
        "what stands still in an image vanishes, and what moves is what the network sees",
    )
    shared_trunk: bool = Field(default=True, description="policy and value share all layers but the last")
