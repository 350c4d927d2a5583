"""A torch module of a user's own file as a named model."""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import Any, ClassVar

from torch import nn

from ..federation import Federation
from ..options import OptionError
from .base import Model

__all__ = ["ModuleModel", "module_model"]

#: What a constructor may ask for by name, and what it then gets.
_GIVEN = ("in_features", "in_shape", "outputs")


class ModuleModel(Model):
    """A torch module class, built for a federation by the names of its constructor's arguments.

    ``in_features`` is the number of values in a record, ``in_shape`` the record's shape (a tuple),
    ``outputs`` the numbers per record that the module must put out: 1 for two classes (the logit)
    and for a regression, C for C classes. Other arguments keep their defaults.
    """

    network: ClassVar[type[nn.Module]]

    def module(self, federation: Federation) -> nn.Module:
        shape = federation.feature_shape
        values = (math.prod(shape), shape, federation.outputs)
        offered: dict[str, Any] = dict(zip(_GIVEN, values, strict=True))
        parameters = inspect.signature(self.network).parameters.values()
        named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        missing = [
            p.name
            for p in parameters
            if p.default is p.empty
            and p.name not in (_GIVEN if p.kind is not p.POSITIONAL_ONLY else ())
            and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if missing:
            raise OptionError(
                f"{self.network.__name__}.__init__ needs {' and '.join(missing)}: give defaults to "
                f"all arguments but {', '.join(_GIVEN)}, which the federation decides; or write a "
                f"subclass of fedtopo_torch.models.Model, whose options --set can set."
            )
        try:
            return self.network(**{name: offered[name] for name in _GIVEN if name in named})
        except Exception as error:
            raise OptionError(
                f"{self.network.__name__} can't be built for records of shape {list(shape)} and "
                f"{federation.outputs} output(s): {type(error).__name__}: {error}"
            ) from error


@cache
def module_model(network: type[nn.Module], name: str) -> type[Model]:
    """The model class of a module class: the same one whenever it is asked for.

    Args:
        network: of a user's file.
        name: what it was looked up by, which finds it again.
    """
    about = {
        "__module__": network.__module__,
        "__qualname__": network.__qualname__,
        "__doc__": network.__doc__,
        "network": network,
        "name": name,
        "__annotations__": {"network": ClassVar, "name": ClassVar[str]},
    }
    return type(network.__name__, (ModuleModel,), about)
