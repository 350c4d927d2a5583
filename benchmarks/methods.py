"""What a round of each method costs next to FedAvg's: ``python benchmarks/methods.py``.

Logistic regression, 150 training records of 20 features per client, 10 local steps, one thread,
float64; all in one run. The last round is evaluated, and nothing else.
"""

from __future__ import annotations

import time
import warnings

import torch
from rich.console import Console
from rich.table import Table
from rounds import FEATURES, federation
from torch import nn

from fedtopo_torch import Federation, Trainer
from fedtopo_torch.registry import algorithms

METHODS = ("fedavg", "fedprox", "scaffold", "ifca", "ditto", "pfedme", "pacfl", "ptopofl")


def seconds(name: str, fed: Federation, rounds: int) -> float:
    """Time per round, the difference of a long and a short run, so that set-up drops out."""

    def run(count: int) -> float:
        job = Trainer(
            algorithms[name](), fed, nn.Linear(FEATURES, 1), rounds=count, eval_every=count
        )
        start = time.perf_counter()
        job.run()
        return time.perf_counter() - start

    return min((run(rounds + 2) - run(2)) / rounds for _ in range(3))


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sizes = (8, 100)
    table = Table(title="Time per client and round (microseconds), and times FedAvg's")
    table.add_column("method")
    for k in sizes:
        table.add_column(f"K = {k}", justify="right")
        table.add_column("x FedAvg", justify="right", style="bold")
    found = {}
    for k in sizes:
        fed = federation(k)
        for name in METHODS:
            found[name, k] = seconds(name, fed, 4000 // k) / k
    for name in METHODS:
        cells = []
        for k in sizes:
            ratio = found[name, k] / found["fedavg", k]
            cells += [f"{1e6 * found[name, k]:.1f}", f"{ratio:.2f}"]
        table.add_row(algorithms[name].title, *cells)
    Console().print(table)
    print(f"torch {torch.__version__}, one thread")


if __name__ == "__main__":
    main()
