"""What every built-in federation offers: declared options, and ``load``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from ..federation import Client, Federation
from ..options import Options
from ..randomness import generator
from .split import split_records

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

    validation_size: float = Field(
        0.0,
        ge=0,
        le=0.9,
        description="share of each client's training records kept for tuning instead; missing "
        "values are filled in before",
    )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of results on this federation should know, a sentence or two each."""
        return ()

    @property
    def precision(self) -> torch.dtype:
        """What :meth:`load` gives its federation as ``dtype``."""
        return torch.float32 if self.dtype == "float32" else torch.float64

    def held_out(self, clients: Sequence[Client], seed: int) -> list[Client]:
        """The clients with part of their training records as validation records.

        ``ceil(validation_size * n)`` of n, one at least left for training; stratified by label
        where that is possible. Draws are keyed by seed and the client's name.
        """
        if not self.validation_size:
            return list(clients)
        parted = []
        for client in clients:
            x, y = (np.asarray(values) for values in client.train)
            rng = generator(seed, "validation", client=client.name)
            train, validation, _ = split_records(y, self.validation_size, rng)
            parted.append(
                replace(
                    client, train=(x[train], y[train]), validation=(x[validation], y[validation])
                )
            )
        return parted

    @abstractmethod
    def load(self, seed: int) -> Federation:
        """The federation for one seed; the same seed gives the same bits on one machine."""

    def source(self, seed: int) -> dict[str, Any]:
        """How a federation was made: ``{"dataset": name, "seed": seed, "options": {...}}``.

        Holds only what JSON can, so that a run's results and checkpoints can keep it.
        """
        return {"dataset": self.name, "seed": seed, "options": self.model_dump(mode="json")}
