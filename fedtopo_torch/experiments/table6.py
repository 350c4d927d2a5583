"""Table 6: who is worse off than without the method."""

from __future__ import annotations

from ..plan import METHODS
from .description import FEDERATIONS, Beside, Experiment, Row, Study, shown
from .findings import agreement
from .metrics import WORSE_THAN_FEDAVG, WORSE_THAN_LOCAL, WORST_CLIENT
from .table1 import SETUP

__all__ = ["EXPERIMENT"]

TABLES = tuple(
    Beside(
        f"{dataset}: fractions of clients worse off, and the worst client",
        ("method",),
        tuple(Row((shown(m),), m, dataset, paper=("table6", dataset, m)) for m in METHODS),
        (WORSE_THAN_FEDAVG, WORSE_THAN_LOCAL, WORST_CLIENT),
        "Table 6",
        "Worse: a client's test log-loss is higher than its own under FedAvg or Local; worst "
        "client: its log-loss.",
    )
    for dataset in FEDERATIONS
)


def _findings(study: Study) -> list[str]:
    said = [agreement([t.table(study) for t in TABLES], len(study.settings.seeds), close=0.05)]
    parts = []
    for dataset in FEDERATIONS:
        ours = study.summary(Row((), "ptopofl", dataset))
        parts.append(
            f"{dataset} {ours.worse_than_fedavg:.0%} and {ours.worse_than_local:.0%}"
            if ours.finished
            else f"{dataset} –"
        )
    return [
        *said,
        f"Clients worse off under pTopoFL than under FedAvg and than alone: {', '.join(parts)}.",
    ]


EXPERIMENT = Experiment(
    name="table6",
    question="A better mean can hide clients that lose. How many clients would do better with "
    "FedAvg or alone, and how is the worst one served?",
    setups={"": SETUP},
    tables=TABLES,
    findings=_findings,
)
