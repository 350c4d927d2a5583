"""Table 3: ablations."""

from __future__ import annotations

import numpy as np

from ..paper import printed
from ..plan import Spec
from .description import Beside, Experiment, Row, Setup, Study
from .findings import agreement
from .metrics import LOG_LOSS

__all__ = ["EXPERIMENT"]

FULL = "full pTopoFL"

#: Label, what is run, and the paper's row.
VARIANTS: tuple[tuple[str, Spec, str], ...] = (
    (FULL, "ptopofl", "full"),
    ("no clustering (M = 1)", ("ptopofl", {"n_clusters": 1}), "no_clustering_M1"),
    ("uniform weights", ("ptopofl", {"weights": "uniform"}), "uniform_weights"),
    ("no trust", ("ptopofl", {"trust": "off"}), "no_trust"),
    ("trust by mean and std", ("ptopofl", {"trust": "mean_std"}), "trust_mean_std"),
    ("uncalibrated alpha = 0.3", ("ptopofl", {"alpha": 0.3}), "uncalibrated_alpha_0.3"),
)

TABLE = Beside(
    "Ablations on federation (A)",
    ("variant",),
    tuple(Row((label,), label, "synthetic", paper=("table3", key)) for label, _, key in VARIANTS),
    (LOG_LOSS,),
    "Table 3",
    "Uniform weights: by records alone, without closeness and trust.",
)


def _findings(study: Study) -> list[str]:
    full = study.values("synthetic", FULL)
    said = []
    for label, _, key in VARIANTS[1:]:
        change = study.values("synthetic", label) - full
        change = change[~np.isnan(change)]
        if len(change):
            theirs = (
                printed("table3", key, "log_loss").mean - printed("table3", "full", "log_loss").mean
            )
            said.append(
                f"{label} {change.mean():+.3f} (paper {theirs:+.3f}), worse in "
                f"{int((change > 0).sum())} of {len(change)} seeds"
            )
    changes = f"Change against full pTopoFL: {'; '.join(said)}." if said else ""
    return [agreement([TABLE.table(study)], len(study.settings.seeds)), *filter(None, [changes])]


EXPERIMENT = Experiment(
    name="table3",
    question="Which parts of pTopoFL carry its result on federation (A): the clusters, the weights "
    "within them, the trust rule, the calibration of the blending?",
    setups={"": Setup({label: spec for label, spec, _ in VARIANTS}, {"synthetic": "synthetic"})},
    tables=(TABLE,),
    findings=_findings,
)
