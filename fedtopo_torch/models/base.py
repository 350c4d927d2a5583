"""A named model: declared options, and how to build the torch module for a federation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from ..federation import Federation
from ..options import Options
from ..randomness import torch_seed

__all__ = ["Model"]


class Model(Options, ABC):
    """Base of named models. Subclasses declare options and implement :meth:`module`."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    @abstractmethod
    def module(self, federation: Federation) -> nn.Module:
        """A new module for the federation's features and outputs.

        Raises:
            OptionError: the model does not fit this federation.
        """

    def build(self, federation: Federation, seed: int) -> nn.Module:
        """The module, its initialisation drawn from the run's seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(torch_seed(seed, "initialisation"))
            return self.module(federation)
