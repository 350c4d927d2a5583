"""The linear models: logistic and softmax regression."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from ..federation import Federation, Task
from ..options import OptionError
from ..registry import models
from .base import Model

__all__ = ["Logistic", "Softmax", "default_model"]


def _features(federation: Federation, name: str) -> int:
    if len(federation.feature_shape) != 1:
        raise OptionError(
            f"{name} needs one row of features per record; this federation's records have shape "
            f"{list(federation.feature_shape)}."
        )
    return federation.feature_shape[0]


@models.register("logistic")
class Logistic(Model):
    """Logistic regression, ``nn.Linear(d, 1)`` from theta = 0; p = d + 1."""

    paper: ClassVar[str] = "Cox, JRSS B 1958"

    def module(self, federation: Federation) -> nn.Module:
        if federation.task != "binary":
            raise OptionError("logistic regression is for two classes; use model softmax.")
        return nn.Linear(_features(federation, "logistic"), 1)


@models.register("softmax")
class Softmax(Model):
    """Multinomial logistic regression, ``nn.Linear(d, C)`` from theta = 0; p = C (d + 1)."""

    paper: ClassVar[str] = "Theil, International Economic Review 1969"

    def module(self, federation: Federation) -> nn.Module:
        if federation.task != "multiclass":
            raise OptionError("softmax regression is for several classes; use model logistic.")
        return nn.Linear(_features(federation, "softmax"), federation.outputs)


def default_model(task: Task) -> Model:
    """What is trained where no model is named: logistic regression, or softmax for classes."""
    return Logistic() if task == "binary" else Softmax()
