"""The paper's experiments: each table or figure is a short description of what is run and shown.

One file a table or figure, found by name: :func:`experiment`. All are run by the engine of
``compare``: :func:`fedtopo_torch.experiments.reproduction.reproduce`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from ..options import OptionError, did_you_mean

if TYPE_CHECKING:
    from .description import Experiment

__all__ = ["CATALOGUE", "LATER", "experiment", "names_of"]

#: What there is, in the paper's order. Light: the files are imported when one is run.
CATALOGUE = {
    "table1": "Eleven methods on three federations",
    "table2": "Where geometry tells about decision rules, and where it does not",
    "table3": "pTopoFL without one of its parts",
    "table4": "What a client sends and receives",
    "table6": "The view of single clients",
    "table7": "Blending and local steps",
    "table8": "Number of clusters and size of the subsamples",
    "figure2": "The theorems, in numbers",
    "figure3": "Training curves",
    "figure4": "Gain against what a partition explains",
}

#: Tables and figures that are not run, and why.
LATER = {
    "table5": "is the paper's settings: every report of 'reproduce' prints them",
    "table9": "(corrupted clients) is not built yet",
    "table10": "(differential privacy) is not built yet",
    "figure1": "is a drawing of the protocol: there is nothing to run",
    "figure5": "(corrupted clients) is not built yet",
    "figure6": "(differential privacy) is not built yet",
    "figure7": "(drifting clients) is not built yet",
}


def names_of(given: Iterable[str]) -> tuple[str, ...]:
    """The experiments asked for, each once, in the paper's order; ``"all"`` is every one.

    Raises:
        OptionError: an unknown name, one that is not built, or none at all.
    """
    wanted = [name.strip().lower() for name in given]
    if not wanted:
        raise OptionError(f"no experiment given: 'all', or of {', '.join(CATALOGUE)}.")
    for name in wanted:
        if name in LATER:
            raise OptionError(f"{name} {LATER[name]}. There is: {', '.join(CATALOGUE)}.")
        if name not in CATALOGUE and name != "all":
            raise OptionError(f"no experiment '{name}'." + did_you_mean(name, [*CATALOGUE, "all"]))
    return tuple(name for name in CATALOGUE if "all" in wanted or name in wanted)


def experiment(name: str) -> Experiment:
    """The description of one table or figure.

    Raises:
        OptionError: as :func:`names_of`.
    """
    (known,) = names_of([name])
    found: Experiment = import_module(f".{known}", __name__).EXPERIMENT
    return found
