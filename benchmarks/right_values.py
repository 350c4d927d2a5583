"""What carries a result, beside ``fedtopo reproduce``: ``python benchmarks/right_values.py``.

Fed-Heart-Disease, the mean over seeds 0 to 9 of the pooled test log-loss and AUC at round 150, and
how often Switzerland is alone, with and without ``chol``; then what ``n_clusters=auto`` decides on
the synthetic federations over seeds 0 to 19. About a minute.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedtopo_torch import Algorithm, Federation, Result, train
from fedtopo_torch.algorithms import FedAvg, Local, PTopoFL
from fedtopo_torch.datasets import FedHeartDisease, Synthetic

console = Console(width=100)


def runs(
    load: Callable[[int], Federation], method: Algorithm, seeds: int, rounds: int = 150
) -> list[Result]:
    return [
        train(method, load(seed), seed=seed, rounds=rounds, eval_every=rounds)
        for seed in track(
            range(seeds),
            description=method.title,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
    ]


def mean(results: list[Result], metric: str = "log_loss") -> str:
    values = [r.history.last("test", metric).pooled for r in results]
    return f"{np.mean(values):.4f} +- {np.std(values):.3f}"


def heart() -> None:
    data, no_chol = FedHeartDisease(), FedHeartDisease(drop_columns="chol")
    jobs = {
        "Local": (data, Local()),
        "FedAvg": (data, FedAvg()),
        "pTopoFL": (data, PTopoFL()),
        "pTopoFL, M = 1": (data, PTopoFL(n_clusters=1)),
        "pTopoFL, scale=pooled": (data, PTopoFL(scale="pooled")),
        "FedAvg, without chol": (no_chol, FedAvg()),
        "pTopoFL, without chol": (no_chol, PTopoFL()),
    }
    table = Table(title="Fed-Heart-Disease, seeds 0 to 9, 150 rounds", title_justify="left")
    for column in (
        "method",
        "test log-loss",
        "test AUC",
        "Switzerland alone",
        "Switzerland flagged",
    ):
        table.add_column(column)
    found: dict[str, list[Result]] = {}
    for name, (source, method) in jobs.items():
        results = found[name] = runs(source.load, method, 10)
        alone = flagged = ""
        if isinstance(method, PTopoFL):
            at = results[0].federation.names.index("Switzerland")
            alone = str(sum(_alone(r.server["labels"].tolist(), at) for r in results)) + " of 10"
            flagged = str(sum(bool(r.server["trust"][at] < 1) for r in results)) + " of 10"
        table.add_row(name, mean(results), mean(results, "auc"), alone, flagged)
    console.print(table)
    wins = sum(
        ours.history.last().pooled < theirs.history.last().pooled
        for ours, theirs in zip(found["pTopoFL"], found["FedAvg"], strict=True)
    )
    console.print(f"pTopoFL has the lower log-loss than FedAvg in {wins} of 10 seeds.\n")


def _alone(labels: list[int], at: int) -> bool:
    return labels.count(labels[at]) == 1


def automatic() -> None:
    table = Table(title="What n_clusters=auto chose, seeds 0 to 19", title_justify="left")
    for column in ("regime", "clusters"):
        table.add_column(column)
    for regime in ("dim", "tails", "concept", "geometry"):
        found = runs(Synthetic(regime=regime).load, PTopoFL(n_clusters="auto"), 20, rounds=1)
        chosen = [len(r.server["u"]) for r in found]
        counts = ", ".join(f"{m} in {chosen.count(m)}" for m in sorted(set(chosen)))
        table.add_row(regime, counts)
    console.print(table)


if __name__ == "__main__":
    heart()
    automatic()
