"""Figure 3: training curves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..plan import METHODS
from ..tables import Column, Table, beside_note, number_cell, text_cell
from .description import FEDERATIONS, Experiment, Study, shown
from .findings import listed
from .table1 import SETUP

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

#: A curve that moves by less over the last tenth of the rounds has settled.
SETTLED = 0.002


def _points(study: Study, dataset: str, method: str) -> tuple[float, float, float, float]:
    """Mean log-loss at the first point, half way and at the end; change over the last tenth."""
    comparison = study.comparison
    rounds, values = comparison.curve(dataset, comparison.plan.method(method).label)
    if not len(values):
        return (math.nan,) * 4
    mean = values.mean(0)

    def at(share: float) -> float:
        return float(mean[np.searchsorted(rounds, share * rounds[-1])])

    return float(mean[0]), at(0.5), float(mean[-1]), float(mean[-1]) - at(0.9)


def _tables(study: Study) -> list[Table]:
    tables = []
    for dataset in FEDERATIONS:
        columns = (
            Column("method", ("method",), number=False),
            Column("first point", ("first",)),
            Column("half way", ("half",)),
            Column("last round", ("last",)),
            Column("change in the last tenth", ("change",)),
            Column("paper", ("paper",)),
        )
        rows = tuple(
            (
                text_cell(shown(method)),
                *map(number_cell, _points(study, dataset, method)),
                number_cell(math.nan),
            )
            for method in METHODS
        )
        notes = (
            f"Pooled test log-loss, mean over {study.seeds_in_words}. {beside_note('Figure 3')}",
        )
        tables.append(Table(f"{dataset}: along the training curves", columns, rows, notes))
    return tables


def _findings(study: Study) -> list[str]:
    said = []
    for dataset in FEDERATIONS:
        changes = {shown(m): _points(study, dataset, m)[3] for m in METHODS}
        moving = {m: change for m, change in changes.items() if abs(change) > SETTLED}
        named = listed(f"{m} ({change:+.4f})" for m, change in moving.items())
        said.append(f"{dataset}: {named}")
    return [
        f"Mean log-loss still moving by more than {SETTLED:g} over the last tenth of the rounds: "
        f"{'; '.join(said)}. The paper says that all methods converge within its 150 rounds."
    ]


def _figures(study: Study) -> dict[str, Figure]:
    from ..figures import curves_figure

    comparison = study.comparison
    return {
        f"curves-{dataset}": curves_figure(comparison, dataset)
        for dataset in FEDERATIONS
        if any(run.dataset == dataset and run.error is None for run in comparison.runs)
    }


EXPERIMENT = Experiment(
    name="figure3",
    question="Do all methods converge within the rounds they are given? A method that has not "
    "would be compared too early.",
    setups={"": SETUP},
    more=_tables,
    findings=_findings,
    figures=_figures,
)
