"""What is read off the runs of a row."""

from __future__ import annotations

import math

import numpy as np

from ..comparison import Spread
from ..paper import entry
from .description import REGIMES, Measure, Metric, Row, Study
from .measurements import client_optima

__all__ = [
    "ARI",
    "AUC",
    "LOG_LOSS",
    "OPTIMA",
    "RHO",
    "WORSE_THAN_FEDAVG",
    "WORSE_THAN_LOCAL",
    "WORST_CLIENT",
    "ari_values",
    "rho_values",
]


#: What rho needs beside the runs.
OPTIMA = Measure(client_optima, REGIMES, {"l2": entry("table5")["l2"]})


def ari_values(study: Study, row: Row) -> dict[int, float]:
    """Adjusted Rand index of the partition with the true groups, by seed; 1 equal, 0 chance."""
    from sklearn.metrics import adjusted_rand_score

    return {
        run.seed: float(adjusted_rand_score(run.groups, run.clusters))
        for run in study.runs(row)
        if run.groups is not None and run.clusters is not None
    }


def rho_values(study: Study, row: Row) -> dict[int, float]:
    """Share of the dispersion of client optima that is within clusters, by seed; lower is better.

    rho(C) = sum_k p_k |theta*_k - mean of its cluster|^2 / sum_k p_k |theta*_k - mean|^2, of the
    partition the run trained with.
    """
    from ..theory import within_share

    found = study.measurements(OPTIMA, row.dataset)
    return {
        run.seed: within_share(
            np.array(found[run.seed]["optima"]),
            np.array(run.clusters),
            np.array(found[run.seed]["shares"]),
        )
        for run in study.runs(row)
        if run.clusters is not None and run.seed in found
    }


def _single(value: float, seeds: int) -> Spread:
    """A mean whose std nobody needs."""
    return Spread(value, math.nan, seeds)


def _of_summary(name: str, title: str, digits: int) -> Metric:
    def of(study: Study, row: Row) -> Spread:
        summary = study.summary(row)
        return _single(getattr(summary, name), summary.finished)

    return Metric(name, title, of, digits)


LOG_LOSS = Metric("log_loss", "log-loss", lambda study, row: study.summary(row).loss)
AUC = Metric("auc", "AUC", lambda study, row: study.summary(row).score)
ARI = Metric("ari", "ARI", lambda study, row: Spread.of(ari_values(study, row).values()), 2)
RHO = Metric("rho", "rho", lambda study, row: Spread.of(rho_values(study, row).values()), 2)
WORSE_THAN_FEDAVG = _of_summary("worse_than_fedavg", "worse than FedAvg", 2)
WORSE_THAN_LOCAL = _of_summary("worse_than_local", "worse than Local", 2)
WORST_CLIENT = _of_summary("worst_client", "worst client", 3)
