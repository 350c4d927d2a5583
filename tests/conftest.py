"""Small federations and the toy problem Q(a), for every test of the core."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedtopo_torch.federation import Bucket, Client, Federation
from fedtopo_torch.local import Facts, LocalProblem
from fedtopo_torch.objective import Objective


class Scalar(nn.Module):
    """One parameter w, put out for every record whatever its features."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, x):
        return self.w + 0 * x[:, 0]


def half_square(outputs, labels):
    return 0.5 * (outputs - labels) ** 2


def build_facts(**changed):
    values = {
        "eta": 0.1,
        "local_steps": 2,
        "l2": 0.0,
        "seed": 0,
        "mean": torch.zeros(1),
        "scale": torch.ones(1),
        "smallest": 1,
    }
    return Facts(**(values | changed))


def build_toy(targets, counts=None, *, l2=0.0, record_loss=half_square, start=1.0, **facts):
    """Clients with loss (w - a)^2 / 2, one for each a in targets, as one LocalProblem."""
    counts = counts or [1] * len(targets)
    n_max = max(counts)
    labels = torch.zeros(len(targets), n_max, dtype=torch.float64)
    mask = torch.zeros_like(labels)
    for k, (a, n) in enumerate(zip(targets, counts, strict=True)):
        labels[k, :n], mask[k, :n] = a, 1
    objective = Objective(Scalar(start), record_loss=record_loss, l2=l2)
    bucket = Bucket(
        rows=torch.arange(len(targets)),
        names=tuple(f"c{k}" for k in range(len(targets))),
        features=torch.zeros(len(targets), n_max, 1, dtype=torch.float64),
        labels=labels,
        mask=None if bool(mask.all()) else mask,
        n=torch.tensor(counts),
    )
    return LocalProblem(objective, objective.prepare(bucket), facts=build_facts(l2=l2, **facts))


def build_clients(sizes, d=3, *, seed=0, n_test=12, classes=2, names=None):
    """Clients with their own shift and rule; labels of every class where there is room."""
    rng = np.random.default_rng(seed)
    clients = []
    for k, n in enumerate(sizes):
        rule = rng.normal(size=(d, classes))
        shift, scale = rng.normal(size=d), rng.uniform(0.5, 2.0, size=d)
        parts = []
        for size in (n, n_test):
            x = rng.normal(size=(size, d)) * scale + shift
            y = (x @ rule + rng.gumbel(size=(size, classes))).argmax(1)
            y[:classes] = np.arange(classes)[:size]
            parts.append((x, y))
        name = names[k] if names else f"c{k:02}"
        clients.append(Client(name, parts[0], parts[1] if n_test else None, group=k % 2))
    return clients


def build_federation(sizes, d=3, *, classes=2, seed=0, n_test=12, names=None, **settings):
    clients = build_clients(sizes, d, seed=seed, n_test=n_test, classes=classes, names=names)
    return Federation(clients, task="binary" if classes == 2 else "multiclass", **settings)


@pytest.fixture
def make_facts():
    return build_facts


@pytest.fixture
def toy():
    return build_toy


@pytest.fixture
def make_clients():
    return build_clients


@pytest.fixture
def make_federation():
    return build_federation
