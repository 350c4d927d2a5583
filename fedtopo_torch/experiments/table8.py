"""Table 8: sensitivity to M and to the size of the subsamples."""

from __future__ import annotations

import numpy as np

from .description import Beside, Experiment, Row, Setup, Study
from .findings import agreement
from .metrics import ARI, LOG_LOSS

__all__ = ["EXPERIMENT"]

DEFAULT = "M = 2, n_sub = 80 (default)"

#: Label, options, and the paper's row.
VARIANTS: tuple[tuple[str, dict[str, int], str], ...] = (
    ("M = 1", {"n_clusters": 1}, "n_clusters=1"),
    (DEFAULT, {}, "n_clusters=2"),
    ("M = 3", {"n_clusters": 3}, "n_clusters=3"),
    ("M = 4", {"n_clusters": 4}, "n_clusters=4"),
    ("n_sub = 40", {"n_sub": 40}, "n_sub=40"),
    ("n_sub = 160", {"n_sub": 160}, "n_sub=160"),
)

TABLE = Beside(
    "Number of clusters and size of the subsamples on federation (A)",
    ("variant",),
    tuple(Row((label,), label, "synthetic", paper=("table8", key)) for label, _, key in VARIANTS),
    (LOG_LOSS, ARI),
    "Table 8",
    "ARI with the true groups. No subsample is larger than the smallest client of at least 20 "
    "records, so n_sub above that (60 to 200 records here) changes nothing.",
)


def _findings(study: Study) -> list[str]:
    base = study.values("synthetic", DEFAULT)
    parts = []
    for label, _, _ in VARIANTS:
        change = study.values("synthetic", label) - base
        change = change[~np.isnan(change)]
        if label != DEFAULT and len(change):
            parts.append(f"{label} {change.mean():+.3f}")
    said = [agreement([TABLE.table(study)], len(study.settings.seeds))]
    if parts:
        said.append(f"Mean change of the log-loss against the default: {', '.join(parts)}.")
    return said


EXPERIMENT = Experiment(
    name="table8",
    question="How much hangs on the number of clusters, and on how many records a descriptor is "
    "computed from?",
    setups={
        "": Setup(
            {label: ("ptopofl", options) for label, options, _ in VARIANTS},
            {"synthetic": "synthetic"},
        )
    },
    tables=(TABLE,),
    findings=_findings,
)
