"""What every built-in federation offers: declared options, and ``load``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from ..federation import Federation
from ..options import Options

__all__ = ["Dataset", "names_from_text", "pair_from_text"]


def names_from_text(value: Any) -> Any:
    """``"chol, fbs"`` as a tuple of names, for options given on the command line."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def pair_from_text(value: Any) -> Any:
    """``"3,12"`` as two parts, for options given on the command line.

    Raises:
        ValueError: not two of them.
    """
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, tuple | list) or len(parts) != 2:
        raise ValueError("two numbers, separated by a comma")
    return parts


class Dataset(Options, ABC):
    """A federation with options; the first line of a subclass's docstring is its one-line help.

    Class attributes:
        name: the name it is registered under.
        paper: where the data or the model of the data comes from.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of results on this federation should know, a sentence or two each."""
        return ()

    @abstractmethod
    def load(self, seed: int) -> Federation:
        """The federation for one seed; the same seed gives the same bits on one machine."""

    def source(self, seed: int) -> dict[str, Any]:
        """How a federation was made: ``{"dataset": name, "seed": seed, "options": {...}}``.

        Holds only what JSON can, so that a run's results and checkpoints can keep it.
        """
        return {"dataset": self.name, "seed": seed, "options": self.model_dump(mode="json")}
