"""The linear models: logistic, softmax and least-squares regression."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from ..federation import Federation, Task
from ..options import OptionError
from ..registry import models
from .base import Model

__all__ = ["Linear", "Logistic", "Softmax", "default_model"]


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


@models.register("linear")
class Linear(Model):
    """Least-squares regression with a ridge (l2), ``nn.Linear(d, 1)`` from theta = 0; p = d + 1.

    The record loss is (f - y)^2 / 2, in the target's own units: a target far from 0 or with a large
    spread needs many rounds, so standardise it first.
    """

    paper: ClassVar[str] = "Hoerl, Kennard, Technometrics 1970"

    def module(self, federation: Federation) -> nn.Module:
        if federation.task != "regression":
            raise OptionError("model linear is for regressions; use logistic or softmax.")
        return nn.Linear(_features(federation, "linear"), 1)


def default_model(task: Task) -> Model:
    """What is trained where no model is named: the linear model of the task."""
    return {"binary": Logistic(), "multiclass": Softmax(), "regression": Linear()}[task]
