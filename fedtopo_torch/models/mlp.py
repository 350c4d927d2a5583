"""Multilayer perceptrons."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator
from torch import nn

from ..federation import Federation
from ..options import names_from_text
from ..registry import models
from .base import Model

__all__ = ["MLP"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def _widths(value: Any) -> Any:
    return (value,) if isinstance(value, int) else names_from_text(value)


@models.register("mlp")
class MLP(Model):
    """Multilayer perceptron: per hidden width a linear layer, norm, activation and dropout.

    Layers are called ``linear1``, ``norm1``, ``act1``, ``drop1``, ``linear2``, ... and ``out``; a
    norm or dropout that is not asked for is not there. ``out`` is linear: one logit for two
    classes, C for several, the prediction itself in a regression. Records with a shape, such as
    images, are flattened first (``flatten``). Weights start as torch draws them, under the run's
    seed.

    ``norm=batch`` normalises by the batch: clients of different sizes are then trained in groups of
    one size, and a batch needs two records. Dropout is drawn client by client, which is slower.
    """

    paper: ClassVar[str] = "Rumelhart, Hinton, Williams, Nature 1986"

    hidden: Annotated[tuple[int, ...], BeforeValidator(_widths)] = Field(
        (128,), description="width of each hidden layer, from 1, for example 64,32"
    )
    activation: Literal["relu", "tanh"] = Field("relu", description="of the hidden layers")
    norm: Literal["none", "batch", "layer"] = Field(
        "none", description="BatchNorm (by the batch) or LayerNorm (by the record), before it"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="chance that a hidden number is left out of a training step"
    )

    @field_validator("hidden")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or min(value) < 1:
            raise ValueError("one or more whole numbers of at least 1")
        return value

    def module(self, federation: Federation) -> nn.Module:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if len(federation.feature_shape) > 1:
            layers["flatten"] = nn.Flatten()
        width = math.prod(federation.feature_shape)
        for i, hidden in enumerate(self.hidden, start=1):
            layers[f"linear{i}"] = nn.Linear(width, hidden)
            if self.norm != "none":
                norm = nn.BatchNorm1d if self.norm == "batch" else nn.LayerNorm
                layers[f"norm{i}"] = norm(hidden)
            layers[f"act{i}"] = _ACTIVATIONS[self.activation]()
            if self.dropout:
                layers[f"drop{i}"] = nn.Dropout(self.dropout)
            width = hidden
        layers["out"] = nn.Linear(width, federation.outputs)
        return nn.Sequential(layers)
