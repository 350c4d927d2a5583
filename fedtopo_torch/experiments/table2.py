"""Table 2: what descriptors can see, in four regimes."""

from __future__ import annotations

import math

from .description import REGIMES, Beside, Experiment, Row, Setup, Study, shown
from .findings import agreement, listed, signed
from .metrics import ARI, LOG_LOSS, OPTIMA, RHO

__all__ = ["EXPERIMENT"]

METHODS = ("fedavg", "local", "ptopofl", "pacfl", "oracle", "random")

SETUP = Setup(METHODS, REGIMES)


def _rows(*methods: str) -> tuple[Row, ...]:
    return tuple(
        Row((regime, shown(method)), method, regime, paper=("table2", regime, method))
        for regime in REGIMES
        for method in methods
    )


TABLES = (
    Beside(
        "Recovery of the true groups",
        ("regime", "partition of"),
        _rows("ptopofl", "pacfl"),
        (ARI,),
        "Table 2",
        "ARI: adjusted Rand index of partition and true groups; 1 is equal, 0 chance. pTopoFL "
        "compares persistent homology, PACFL-style subspaces.",
    ),
    Beside(
        "Share of the dispersion of client optima that is within clusters",
        ("regime", "partition of"),
        _rows("ptopofl", "pacfl", "random", "oracle"),
        (RHO,),
        "Table 2",
        "rho: 0 where clusters explain all of it, 1 where they explain nothing; lower is better.",
    ),
    Beside(
        "Test log-loss",
        ("regime", "method"),
        _rows(*METHODS),
        (LOG_LOSS,),
        "Table 2",
    ),
)


def _findings(study: Study) -> list[str]:
    said = [agreement([table.table(study) for table in TABLES], len(study.settings.seeds))]
    found, near_oracle, gains = [], [], []
    for regime in REGIMES:
        ari = {m: ARI.of(study, Row((), m, regime)).mean for m in ("ptopofl", "pacfl")}
        rho = {m: RHO.of(study, Row((), m, regime)).mean for m in ("ptopofl", "oracle", "random")}
        found.append(f"{regime} {_two(ari['ptopofl'])} (subspaces {_two(ari['pacfl'])})")
        # Nearer to what the true groups explain than to what chance explains.
        if abs(rho["ptopofl"] - rho["oracle"]) < abs(rho["ptopofl"] - rho["random"]):
            near_oracle.append(regime)
        ours, best = (
            signed(study.mean(regime, "fedavg") - study.mean(regime, method))
            for method in ("ptopofl", "oracle")
        )
        gains.append(f"{regime} {ours} of {best}")
    said.append(f"Mean ARI of pTopoFL's partition: {', '.join(found)}.")
    said.append(
        f"Its rho is nearer to that of the true groups than to that of chance in: "
        f"{listed(near_oracle)}."
    )
    said.append(
        f"Gain in log-loss over FedAvg, of what the true groups would gain: {', '.join(gains)}."
    )
    return said


def _two(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


EXPERIMENT = Experiment(
    name="table2",
    question="Descriptors see features only. dim and tails: groups differ in geometry and in "
    "decision rule; concept: in the rule alone, so there is nothing to see; geometry: in geometry "
    "alone, so there is little to gain from seeing it.",
    setups={"": SETUP},
    measures=(OPTIMA,),
    tables=TABLES,
    findings=_findings,
)
