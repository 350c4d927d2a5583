"""A small convolutional network for small images."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import ClassVar, Literal

from pydantic import Field, field_validator
from torch import nn

from ..federation import Federation
from ..options import OptionError, pair_from_text
from ..registry import models
from .base import Model

__all__ = ["CNN"]

#: Channels of one group of GroupNorm.
GROUP = 4
#: Two poolings leave one pixel of it.
SMALLEST = 4


@models.register("cnn")
class CNN(Model):
    """Two convolution blocks and a linear layer, for small images such as 8 x 8 digits.

    A block is a 3 x 3 convolution that keeps the size, norm, ReLU and 2 x 2 max pooling; its layers
    are ``conv1``, ``norm1``, ``act1``, ``pool1`` (and 2). Then come ``flatten``, ``drop`` and the
    linear ``out``: one logit for two classes, C for several, the prediction itself in a regression.
    A norm or dropout that is not asked for is not there. Weights start as torch draws them, under
    the run's seed.

    Takes records of shape [C, H, W] with H and W of at least 4, [H, W] (one channel), or flat
    records of a square number of pixels, row by row (``image`` reshapes the last two).

    ``norm=batch`` normalises by the batch: clients of different sizes are then trained in groups of
    one size. Dropout is drawn client by client, which is slower.
    """

    paper: ClassVar[str] = "LeCun, Bottou, Bengio, Haffner, Proceedings of the IEEE 1998"

    channels: tuple[int, int] = Field(
        (16, 32), description="of the two convolutions, from 1; with norm=group multiples of 4"
    )
    norm: Literal["none", "batch", "group"] = Field(
        "none", description="BatchNorm (by the batch) or GroupNorm (by the record, 4 channels each)"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="chance that an input of the last layer is left out of a step"
    )

    _from_text = field_validator("channels", mode="before")(pair_from_text)

    @field_validator("channels")
    @classmethod
    def _positive(cls, value: tuple[int, int]) -> tuple[int, int]:
        if min(value) < 1:
            raise ValueError("two whole numbers of at least 1")
        return value

    def module(self, federation: Federation) -> nn.Module:
        if self.norm == "group" and any(width % GROUP for width in self.channels):
            raise OptionError(
                f"CNN: channels = {self.channels} with norm = group must be multiples of {GROUP}."
            )
        shape = federation.feature_shape
        channels, height, width = image_shape(shape)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if len(shape) == 1:
            layers["image"] = nn.Unflatten(1, (channels, height, width))
        elif len(shape) == 2:
            layers["image"] = nn.Unflatten(1, (channels, height))
        for i, wide in enumerate(self.channels, start=1):
            layers[f"conv{i}"] = nn.Conv2d(channels, wide, 3, padding=1)
            if self.norm == "batch":
                layers[f"norm{i}"] = nn.BatchNorm2d(wide)
            elif self.norm == "group":
                layers[f"norm{i}"] = nn.GroupNorm(wide // GROUP, wide)
            layers[f"act{i}"] = nn.ReLU()
            layers[f"pool{i}"] = nn.MaxPool2d(2)
            channels, height, width = wide, height // 2, width // 2
        layers["flatten"] = nn.Flatten()
        if self.dropout:
            layers["drop"] = nn.Dropout(self.dropout)
        layers["out"] = nn.Linear(channels * height * width, federation.outputs)
        return nn.Sequential(layers)


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height and width of records of a shape.

    Raises:
        OptionError: they are no images, or smaller than 4 x 4.
    """
    side = math.isqrt(shape[0])
    if len(shape) == 1 and side * side != shape[0]:
        raise OptionError(
            f"model cnn needs images: records of shape [C, H, W] or [H, W], or of a square number "
            f"of features such as 64 for 8 x 8; this federation's have {shape[0]} features. Use "
            f"model mlp."
        )
    if len(shape) > 3:
        raise OptionError(
            f"model cnn needs images, records of shape [C, H, W] or [H, W]; this federation's "
            f"records have shape {list(shape)}."
        )
    channels, height, width = {1: (1, side, side), 2: (1, *shape), 3: shape}[len(shape)]
    if min(height, width) < SMALLEST:
        raise OptionError(
            f"model cnn needs images of at least {SMALLEST} x {SMALLEST} pixels; this federation's "
            f"have {height} x {width}."
        )
    return channels, height, width
