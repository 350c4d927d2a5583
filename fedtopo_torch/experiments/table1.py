"""Table 1: who is better, and how surely."""

from __future__ import annotations

from ..paper import entry, printed
from ..plan import METHODS
from ..tables import Table, paper_table, results_table
from .description import FEDERATIONS, Experiment, Setup, Study
from .findings import agreement, listed, signed

__all__ = ["EXPERIMENT", "SETUP"]

#: Also of Table 6 and Figure 3, so it is trained once.
SETUP = Setup(METHODS, FEDERATIONS)


def _results(study: Study) -> list[Table]:
    comparison = study.comparison
    return [results_table(comparison, name) for name in FEDERATIONS]


def _beside(study: Study) -> list[Table]:
    tables = (paper_table(study.comparison, name) for name in FEDERATIONS)
    return [table for table in tables if table is not None]


def _tables(study: Study) -> list[Table]:
    return [*_results(study), *_beside(study)]


def _findings(study: Study) -> list[str]:
    comparison = study.comparison
    said = [agreement(_beside(study), len(study.settings.seeds))]
    summary = comparison.summary()
    for dataset in FEDERATIONS:
        rows = {comparison.plan.method(r.method).key: r for r in summary if r.dataset == dataset}
        gain = rows["fedavg"].loss.mean - rows["ptopofl"].loss.mean
        theirs = (
            printed("table1", dataset, "fedavg", "log_loss").mean
            - printed("table1", dataset, "ptopofl", "log_loss").mean
        )
        text = f"{dataset}: pTopoFL gains {signed(gain)} over FedAvg (paper {signed(theirs)})"
        ended = [row for row in rows.values() if row.deployable and row.finished == row.planned]
        if ended:
            best = min(ended, key=lambda row: row.loss.mean)
            text += f"; best deployable method: {best.method} ({best.loss.mean:.3f})"
        if not any(row.test and row.test.possible for row in rows.values()):
            said.append(f"{text}; too few seeds for a test.")
            continue
        worse, better = (
            {name: row.method for name, row in rows.items() if row.mark == mark and row.deployable}
            for mark in "+-"
        )
        marked = entry("significantly_worse", dataset) or []
        text += f". Significantly worse than it: {listed(worse.values())}"
        text += f"; better: {listed(better.values())}. "
        text += f"Of the {len(marked)} that the paper marks as worse, we find "
        said.append(
            f"{text}{len(set(marked) & set(worse))}."
            if marked
            else f"{text.rpartition('Of the')[0]}The paper marks none there that we could read."
        )
    return said


EXPERIMENT = Experiment(
    name="table1",
    question="Does a personalised model per cluster, found from 46 numbers a client, beat one "
    "model for all, and each client alone? Where geometry and rules of clients differ together "
    "(synthetic), where only labels are skewed, and on four real hospitals.",
    setups={"": SETUP},
    more=_tables,
    findings=_findings,
)
