"""How fast a round is: ``python benchmarks/rounds.py``.

FedAvg with logistic regression, 150 training and 80 test records of 20 features per client, 10
local steps, the pooled test log-loss after every round and nothing else, one thread, float64. Four
programs do the same work in one run, and the table shows time per client and round, and ratios:

- plain torch: one nn.Linear, torch.optim.SGD, client after client, as most frameworks train;
- NumPy: all clients stacked, written with matmul;
- fedtopo: the closed form for linear models;
- fedtopo, any module: the same module by vmap and autograd.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fedtopo_torch import Client, Federation, Trainer
from fedtopo_torch.algorithms import FedAvg

TRAIN, TEST, FEATURES, STEPS, ETA, L2 = 150, 80, 20, 10, 0.1, 0.01


def federation(n_clients: int) -> Federation:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(FEATURES)

    def records(n: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.standard_normal((n, FEATURES))
        return x, (rng.random(n) < 1 / (1 + np.exp(-x @ weights))).astype(np.int64)

    return Federation(
        [Client(f"client_{k:04d}", records(TRAIN), records(TEST)) for k in range(n_clients)]
    )


class Clock:
    """A trainer callback that notes when rounds end, leaving out set-up and the first rounds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def started(self, trainer: object, result: object) -> None: ...

    def evaluated(self, round: int, scores: object) -> None:
        self.times.append(time.perf_counter())

    def finished(self, result: object) -> None: ...

    def per_round(self) -> float:
        return (self.times[-1] - self.times[2]) / (len(self.times) - 3)


def fedtopo(fed: Federation, rounds: int, closed_form: bool) -> tuple[float, float]:
    clock = Clock()
    result = Trainer(
        FedAvg(),
        fed,
        nn.Linear(FEATURES, 1) if closed_form else _zeros(nn.Linear(FEATURES, 1)),
        rounds=rounds + 3,
        local_steps=STEPS,
        eta=ETA,
        l2=L2,
        splits=("test",),
        metrics=("log_loss",),
        callbacks=(clock,),
        closed_form=closed_form,
    ).run()
    return clock.per_round(), float(result.history.pooled()[rounds - 1])


def _zeros(module: nn.Linear) -> nn.Linear:
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


def plain_torch(fed: Federation, rounds: int) -> tuple[float, float]:
    model = _zeros(nn.Linear(FEATURES, 1).double())
    loss_of = nn.BCEWithLogitsLoss()
    data = [(*fed.train.client(k), *fed.test.client(k)) for k in range(len(fed))]
    data = [(x, y[:, None], xt, yt[:, None]) for x, y, xt, yt in data]
    start = time.perf_counter()
    for _ in range(rounds):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in state.items()}
        for x, y, _, _ in data:
            model.load_state_dict(state)
            optimizer = torch.optim.SGD(model.parameters(), lr=ETA, weight_decay=L2)
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                total[name] += value / len(data)
        model.load_state_dict(total)
        with torch.no_grad():
            loss = sum(float(loss_of(model(xt), yt)) for _, _, xt, yt in data) / len(data)
    return (time.perf_counter() - start) / rounds, loss


def numpy_matmul(fed: Federation, rounds: int) -> tuple[float, float]:
    train = [fed.train.client(k) for k in range(len(fed))]
    test = [fed.test.client(k) for k in range(len(fed))]

    def stacked(parts: list) -> tuple[np.ndarray, np.ndarray]:
        x = np.stack([p[0].numpy() for p in parts])
        x = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2)
        return x, np.stack([p[1].numpy() for p in parts])

    (x, y), (xt, yt) = stacked(train), stacked(test)
    xs, xts = x.transpose(0, 2, 1), xt.transpose(0, 2, 1)
    theta = np.zeros(FEATURES + 1)
    start = time.perf_counter()
    for _ in range(rounds):
        w = np.tile(theta, (len(x), 1))[:, None, :]
        for _ in range(STEPS):
            residual = 1 / (1 + np.exp(-np.matmul(w, xs))) - y[:, None, :]
            w = w - ETA * (np.matmul(residual, x) / TRAIN + L2 * w)
        theta = w[:, 0].mean(0)
        z = np.matmul(np.broadcast_to(theta, (len(x), 1, len(theta))), xts)[:, 0]
        loss = float(np.mean(np.logaddexp(0, z) - yt * z))
    return (time.perf_counter() - start) / rounds, loss


def best(run: Callable[[], tuple[float, float]], repeats: int) -> tuple[float, float]:
    """The fastest of several runs: the others were disturbed."""
    return min(run() for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 100, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="Time per client and round (microseconds), 10 local steps")
    for column in ("clients", "plain torch", "NumPy", "fedtopo", "any module"):
        table.add_column(column, justify="right")
    for column in ("plain / fedtopo", "fedtopo / NumPy", "plain / any module"):
        table.add_column(column, justify="right", style="bold")
    for k in options.clients:
        fed = federation(k)
        rounds = max(5, 4000 // k)
        slow = max(2, 100 // k)
        runs = {
            "plain": lambda fed=fed, slow=slow: plain_torch(fed, slow),
            "numpy": lambda fed=fed, rounds=rounds: numpy_matmul(fed, rounds),
            "closed": lambda fed=fed, rounds=rounds: fedtopo(fed, rounds, True),
            "module": lambda fed=fed, rounds=rounds: fedtopo(fed, rounds, False),
        }
        found = {name: best(run, options.repeats) for name, run in runs.items()}
        losses = [loss for name, (_, loss) in found.items() if name != "plain"]
        if max(losses) - min(losses) > 1e-9:
            sys.exit(f"the programs disagree: test log-losses {losses}")
        us = {name: 1e6 * seconds / k for name, (seconds, _) in found.items()}
        table.add_row(
            str(k),
            *(f"{us[n]:.1f}" for n in ("plain", "numpy", "closed", "module")),
            f"{us['plain'] / us['closed']:.0f}",
            f"{us['closed'] / us['numpy']:.2f}",
            f"{us['plain'] / us['module']:.1f}",
        )
    Console().print(table)
    print(f"torch {torch.__version__}, NumPy {np.__version__}, {platform.machine()}, one thread")


if __name__ == "__main__":
    main()
