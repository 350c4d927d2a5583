"""What every built-in federation offers: declared options, and ``load``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from ..federation import Federation
from ..options import Options

__all__ = ["Dataset"]


class Dataset(Options, ABC):
    """A federation with options; the first line of a subclass's docstring is its one-line help.

    Class attributes:
        name: the name it is registered under.
        paper: where the data or the model of the data comes from.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    dtype: Literal["float64", "float32"] = Field(
        "float64", description="precision of features and models; float32 is faster, to 7 digits"
    )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of results on this federation should know, a sentence or two each."""
        return ()

    @property
    def precision(self) -> torch.dtype:
        """What :meth:`load` gives its federation as ``dtype``."""
        return torch.float32 if self.dtype == "float32" else torch.float64

    @abstractmethod
    def load(self, seed: int) -> Federation:
        """The federation for one seed; the same seed gives the same bits on one machine."""

    def source(self, seed: int) -> dict[str, Any]:
        """How a federation was made: ``{"dataset": name, "seed": seed, "options": {...}}``.

        Holds only what JSON can, so that a run's results and checkpoints can keep it.
        """
        return {"dataset": self.name, "seed": seed, "options": self.model_dump(mode="json")}
