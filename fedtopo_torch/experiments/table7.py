"""Table 7: the calibrated blending does not depend on the number of local steps."""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from ..tables import Column, Table, number_cell, text_cell
from .description import Beside, Experiment, Row, Setup, Study
from .findings import agreement
from .metrics import LOG_LOSS

__all__ = ["EXPERIMENT"]

STEPS = (1, 10, 50)
BLENDING = (0.0, 0.1, 0.3, 0.6, 1.0)
#: Up to this abar the clusters still differ, and the claim is checked.
DISTINCT = 0.3


def _label(abar: float) -> str:
    return f"abar = {abar:g}"


METHODS = {_label(abar): ("ptopofl", {"abar": abar}) for abar in BLENDING}

TABLE = Beside(
    "Local steps and target blending on federation (A)",
    ("tau", "abar"),
    tuple(
        Row(
            (str(steps), f"{abar:g}"),
            _label(abar),
            "synthetic",
            setup=f"tau = {steps}",
            paper=("table7", str(steps), f"{abar:g}"),
        )
        for steps, abar in product(STEPS, BLENDING)
    ),
    (LOG_LOSS,),
    "Table 7",
)


def _means(study: Study) -> np.ndarray:
    """Mean log-loss ``[tau, abar]``."""
    means = [LOG_LOSS.of(study, row).mean for row in TABLE.rows]
    return np.array(means).reshape(len(STEPS), len(BLENDING))


def _grid(study: Study) -> list[Table]:
    means = _means(study)
    columns = (
        Column("tau", ("tau",), number=False),
        *(Column(_label(abar), (f"abar_{abar:g}",)) for abar in BLENDING),
        Column("spread over abar", ("spread_over_abar",)),
    )
    rows = [
        (text_cell(str(steps)), *map(number_cell, line), number_cell(float(np.ptp(line))))
        for steps, line in zip(STEPS, means, strict=True)
    ]
    rows.append(
        (
            text_cell("spread over tau"),
            *(number_cell(float(np.ptp(column))) for column in means.T),
            number_cell(math.nan),
        )
    )
    notes = (
        "Mean test log-loss. Spread: largest less smallest of the row or column. All rows take the "
        "same number of local steps in all.",
    )
    return [Table("The same as a grid, with spreads", columns, tuple(rows), notes)]


def _findings(study: Study) -> list[str]:
    means = _means(study)
    low = [abar <= DISTINCT for abar in BLENDING]
    over_tau = np.ptp(means, axis=0)
    over_abar = np.ptp(means, axis=1)
    said = [agreement([TABLE.table(study)], len(study.settings.seeds))]
    if np.isfinite(means).all():
        said.append(
            f"Spread over tau: at most {over_tau[low].max():.4f} up to abar = {DISTINCT:g}, and "
            f"{over_tau.max():.4f} up to 1. Spread over abar: at most "
            f"{np.ptp(means[:, low], axis=1).max():.4f} up to abar = {DISTINCT:g}, and "
            f"{over_abar.min():.4f} to {over_abar.max():.4f} up to 1."
        )
    return said


EXPERIMENT = Experiment(
    name="table7",
    question="alpha is set so that the blending at the fixed point is abar whatever the number of "
    "local steps tau. So results should depend on abar and hardly on tau, with the total number of "
    "local steps held equal.",
    setups={f"tau = {steps}": Setup(METHODS, {"synthetic": "synthetic"}, steps) for steps in STEPS},
    more=_grid,
    tables=(TABLE,),
    findings=_findings,
)
