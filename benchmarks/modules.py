"""How fast networks train, and thousands of clients: ``python benchmarks/modules.py``.

First table: FedAvg, 100 clients of 150 records of 64 features, ten classes, 10 local steps of
32 records, float32, one thread. Two programs take the same steps on the same batches:

- plain torch: a fresh module and torch.optim.SGD per client, client after client, as most
  frameworks train; the batches are drawn beforehand, so that neither a data loader nor a shuffle
  counts;
- fedtopo: a whole round of the trainer, batches drawn in it.

Both end in the same model (in float64 to 1e-12, for ten clients), or the program stops. Second
table: logistic regression where only some of many clients take part in a round; every case runs in
a process of its own, whose peak memory it shows.

Times are CPU times, which other programs on the machine disturb less than they do wall times; of
several runs the fastest counts, and the range of the ratios over the runs is shown beside it.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import platform
import resource
import statistics
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import rounds as small
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fedtopo_torch import Client, Federation, Trainer
from fedtopo_torch.algorithms import FedAvg
from fedtopo_torch.local import Batches
from fedtopo_torch.models import CNN, MLP, Model
from fedtopo_torch.objective import Objective

CLIENTS, RECORDS, FEATURES, CLASSES = 100, 150, 64, 10
STEPS, BATCH, ETA, L2, SEED = 10, 32, 0.1, 0.01, 0

#: Model and how many times as fast as plain torch it should be.
MODELS: dict[str, tuple[Model, float]] = {
    "MLP 64-128-10": (MLP(hidden=128), 3.0),
    "MLP, BatchNorm": (MLP(hidden=128, norm="batch"), 2.8),
    "CNN 8 x 8": (CNN(), 1.5),
    "CNN, BatchNorm": (CNN(norm="batch"), 1.0),
}

#: Clients, and the share that takes part in a round.
CASES = ((100, 1.0), (1000, 0.01), (1000, 0.1), (10_000, 0.001), (10_000, 0.01))


def federation(clients: int = CLIENTS, dtype: torch.dtype = torch.float32) -> Federation:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((CLASSES, FEATURES))

    def records(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, CLASSES, n)
        return centres[y] + rng.standard_normal((n, FEATURES)), y

    return Federation(
        [Client(f"client_{k:03d}", records(RECORDS), records(1)) for k in range(clients)],
        task="multiclass",
        n_classes=CLASSES,
        dtype=dtype,
    )


class TimedFedAvg(FedAvg):
    """FedAvg that notes when each round's models are averaged."""

    times: list[float]

    def aggregate(self, server: dict, uplink: dict, clients: object) -> dict:
        server = super().aggregate(server, uplink, clients)
        self.times.append(time.process_time())
        return server


def fedtopo(fed: Federation, model: Model, rounds: int) -> tuple[float, torch.Tensor]:
    """CPU seconds per round, the first two left out, and the last global model."""
    method = TimedFedAvg(times=[])
    trainer = Trainer(
        method,
        fed,
        model,
        rounds=rounds + 2,
        eval_every=rounds + 2,
        local_steps=STEPS,
        batch_size=BATCH,
        eta=ETA,
        l2=L2,
        seed=SEED,
        splits=("test",),
        metrics=("log_loss",),
    )
    result = trainer.run()
    return (method.times[-1] - method.times[1]) / rounds, result.server["theta"]


def plain_torch(fed: Federation, model: Model, rounds: int) -> tuple[float, torch.Tensor]:
    """The same, client by client."""
    shared = model.build(fed, SEED).to(fed.dtype)
    objective = Objective(shared, fed.task, L2, outputs=fed.outputs, dtype=fed.dtype)
    (data,) = objective.data(fed.train)
    settings = Trainer(FedAvg(), fed, model, batch_size=BATCH, eta=ETA, seed=SEED).training
    records = [fed.train.client(k) for k in range(len(fed))]
    loss_of = nn.CrossEntropyLoss()
    seconds = 0.0
    for round in range(1, rounds + 3):
        batches = Batches(data, settings, SEED, round, objective.smallest)
        chosen = [batches(step) for step in range(STEPS)]
        index = [[i[k][: int(n[k])] for i, n in chosen] for k in range(len(fed))]
        begun = time.process_time()
        total = {name: torch.zeros_like(v) for name, v in shared.state_dict().items()}
        for (x, y), own in zip(records, index, strict=True):
            network = copy.deepcopy(shared).train()
            optimizer = torch.optim.SGD(network.parameters(), lr=ETA, weight_decay=L2)
            for i in own:
                optimizer.zero_grad()
                loss_of(network(x[i]), y[i]).backward()
                optimizer.step()
            for name, value in network.state_dict().items():
                if value.is_floating_point():
                    total[name] += value / len(fed)
                else:
                    total[name] = torch.maximum(total[name], value)
        shared.load_state_dict(total)
        if round > 2:
            seconds += time.process_time() - begun
    last = Objective(shared, fed.task, L2, outputs=fed.outputs, dtype=fed.dtype).initial()
    return seconds / rounds, last


def networks(repeats: int) -> Table:
    fed = federation()
    table = Table(title=f"CPU microseconds per client and round, {STEPS} steps of {BATCH} records")
    table.add_column("model")
    for column in ("parameters", "plain torch", "fedtopo"):
        table.add_column(column, justify="right")
    table.add_column("plain / fedtopo", justify="right", style="bold")
    for column in ("range", "wanted"):
        table.add_column(column, justify="right")
    few = federation(10, torch.float64)
    for name, (model, wanted) in MODELS.items():
        (_, found), (_, expected) = fedtopo(few, model, 1), plain_torch(few, model, 1)
        gap = float((found - expected).abs().max() / expected.abs().max())
        if gap > 1e-12:
            sys.exit(f"{name}: the programs end in models {gap:.1e} apart")
        plain, ours = [], []
        for _ in range(repeats):
            plain.append(plain_torch(fed, model, 1)[0])
            ours.append(fedtopo(fed, model, 3)[0])
        ratios = [p / o for p, o in zip(plain, ours, strict=True)]
        table.add_row(
            name,
            f"{found.numel():,}",
            *(f"{1e6 * min(times) / CLIENTS:.0f}" for times in (plain, ours)),
            f"{min(plain) / min(ours):.1f}",
            f"{min(ratios):.1f} to {max(ratios):.1f}",
            f"{wanted:.1f}",
        )
    return table


def participation(clients: int, share: float) -> tuple[float, float]:
    """CPU seconds per round (median) and peak memory in MB of this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fed = small.federation(clients)
    method = TimedFedAvg(times=[])
    Trainer(
        method,
        fed,
        nn.Linear(small.FEATURES, 1),
        rounds=200,
        eval_every=200,
        participation=share,
        eta=ETA,
        splits=("test",),
        metrics=("log_loss",),
    ).run()
    rounds = [b - a for a, b in zip(method.times, method.times[1:], strict=False)]
    return statistics.median(rounds), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cohorts() -> Table:
    title = f"Logistic regression, {small.TRAIN} records of {small.FEATURES} features, 10 steps"
    table = Table(title=title)
    for column in ("clients", "take part", "CPU ms per round", "microseconds each", "peak MB"):
        table.add_column(column, justify="right")
    for clients, share in CASES:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            seconds, memory = pool.submit(participation, clients, share).result()
        count = round(clients * share)
        table.add_row(
            f"{clients:,}",
            str(count),
            f"{1e3 * seconds:.2f}",
            f"{1e6 * seconds / count:.0f}",
            f"{memory:,.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # First, while this process is small: a child's peak memory is never below its parent's.
    many = cohorts()
    for table in (networks(options.repeats), many):
        Console(width=100).print(table)
    print(f"torch {torch.__version__}, {platform.machine()}, one thread")


if __name__ == "__main__":
    main()
