"""Every method against a plain re-derivation in NumPy, client by client, from the formulas alone.

Nothing of the package is used to compute a reference but its keyed draws. Parameters are matrices
``[C, d + 1]`` with the bias in the last column (C = 1 for logistic regression).
"""

from itertools import islice

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from scipy.special import expit, log_softmax, softmax

from fedtopo_torch.algorithms import (
    IFCA,
    PACFL,
    Ditto,
    FedAvg,
    FedProx,
    Local,
    Oracle,
    PFedMe,
    Random,
    Scaffold,
)
from fedtopo_torch.federation import Federation
from fedtopo_torch.models.logistic import Logistic, Softmax
from fedtopo_torch.randomness import generator
from fedtopo_torch.trainer import Trainer

SIZES = [21, 60, 33, 20, 47, 90, 25, 38]
ROUNDS, TAU, L2, FEATURES = 40, 10, 0.01, 5


class Reference:
    """Each method is a generator: the K models that clients are scored with, round by round."""

    def __init__(self, clients, classes):
        self.clients, self.classes = clients, classes
        self.n = np.array([len(c.train[1]) for c in clients])
        self.p = self.n / self.n.sum()
        self.everyone = range(len(clients))
        pooled = np.concatenate([c.train[0] for c in clients])
        mean, std = pooled.mean(0), pooled.std(0)

        def design(part):
            return np.column_stack([(part[0] - mean) / std, np.ones(len(part[1]))])

        self.x = [design(c.train) for c in clients]
        self.y = [np.asarray(c.train[1]) for c in clients]
        self.test = [(design(c.test), np.asarray(c.test[1])) for c in clients]
        largest = max(np.linalg.eigvalsh(x.T @ x / len(x)).max() for x in self.x)
        self.eta = 1 / (largest / (4 if classes == 2 else 2) + L2)
        self.zero = np.zeros((1 if classes == 2 else classes, pooled.shape[1] + 1))

    # Loss and gradient of one client

    def record_losses(self, w, x, y):
        z = x @ w.T
        if self.classes == 2:
            return np.logaddexp(0, z[:, 0]) - y * z[:, 0]
        return -log_softmax(z, axis=1)[np.arange(len(y)), y]

    def loss(self, k, w):
        return self.record_losses(w, self.x[k], self.y[k]).mean() + L2 / 2 * (w**2).sum()

    def grad(self, k, w):
        z = self.x[k] @ w.T
        if self.classes == 2:
            error = expit(z) - self.y[k][:, None]
        else:
            error = softmax(z, axis=1) - np.eye(self.classes)[self.y[k]]
        return error.T @ self.x[k] / self.n[k] + L2 * w

    def descend(self, k, w, extra=lambda v: 0.0):
        for _ in range(TAU):
            w = w - self.eta * (self.grad(k, w) + extra(w))
        return w

    def mean(self, models):
        return sum(q * w for q, w in zip(self.p, models, strict=True))

    # The methods

    def local(self):
        own = [self.zero] * len(self.n)
        while True:
            own = [self.descend(k, w) for k, w in enumerate(own)]
            yield own

    def fedprox(self, mu):
        w = self.zero
        while True:
            pull = lambda v, start=w: mu * (v - start)  # noqa: E731
            w = self.mean([self.descend(k, w, pull) for k in self.everyone])
            yield [w] * len(self.n)

    def scaffold(self, eta_g):
        w, c = self.zero, self.zero
        own = [self.zero] * len(self.n)
        while True:
            ends = [self.descend(k, w, lambda _, shift=c - own[k]: shift) for k in self.everyone]
            new = [own[k] - c + (w - ends[k]) / (TAU * self.eta) for k in self.everyone]
            c = c + self.mean([new[k] - own[k] for k in self.everyone])
            w = w + eta_g * self.mean([v - w for v in ends])
            own = new
            yield [w] * len(self.n)

    def pfedme(self, pull, inner_steps, beta):
        inner, outer = 1 / (1 / self.eta + pull), min(self.eta, 1 / pull)
        w = self.zero
        while True:
            ends, personal = [], []
            for k in self.everyone:
                own = w
                for _ in range(TAU):
                    v = own
                    for _ in range(inner_steps):
                        v = v - inner * (self.grad(k, v) + pull * (v - own))
                    own = own - outer * pull * (own - v)
                ends.append(own)
                personal.append(v)
            w = (1 - beta) * w + beta * self.mean(ends)
            yield personal

    def ditto(self, strength):
        theta, own = self.zero, [self.zero] * len(self.n)
        while True:
            towards = lambda v, theta=theta: strength * (v - theta)  # noqa: E731
            own = [self.descend(k, own[k], towards) for k in self.everyone]
            theta = self.mean([self.descend(k, theta) for k in self.everyone])
            yield own

    def ifca(self, models):
        models = list(models)
        while True:
            taken = [self.favourite(k, models) for k in self.everyone]
            ends = [self.descend(k, models[j]) for k, j in enumerate(taken)]
            for j in range(len(models)):
                takers = [k for k in self.everyone if taken[k] == j]
                if takers:
                    total = sum(self.n[k] for k in takers)
                    models[j] = sum(self.n[k] / total * ends[k] for k in takers)
            self.takers = taken
            yield [models[self.favourite(k, models)] for k in self.everyone]

    def favourite(self, k, models):
        return int(np.argmin([self.loss(k, w) for w in models]))

    def clustered(self, labels, abar=0.3):
        q = (1 - self.eta * L2) ** TAU
        alpha = abar * (1 - q) / (1 - abar * q)
        clusters = sorted(set(labels))
        theta = dict.fromkeys(clusters, self.zero)
        omega = {j: sum(self.p[k] for k in self.everyone if labels[k] == j) for j in clusters}
        while True:
            u = {}
            for j in clusters:
                members = [k for k in self.everyone if labels[k] == j]
                ends = [self.p[k] / omega[j] * self.descend(k, theta[j]) for k in members]
                u[j] = sum(ends)
            blend = sum(omega[j] * u[j] for j in clusters)
            theta = {j: (1 - alpha) * u[j] + alpha * blend for j in clusters}
            yield [theta[j] for j in labels]

    def angle_clusters(self, rank, n_clusters):
        bases = [np.linalg.svd(c.train[0], full_matrices=False)[2][:rank].T for c in self.clients]
        distances = np.zeros((len(bases), len(bases)))
        for a in self.everyone:
            for b in range(a):
                cosines = np.linalg.svd(bases[a].T @ bases[b])[1]
                angles = np.degrees(np.arccos(np.clip(cosines, -1, 1)))
                distances[a, b] = distances[b, a] = angles.sum()
        tree = linkage(squareform(distances), "average")
        return fcluster(tree, n_clusters, "maxclust").tolist()

    # What is compared

    def rows(self, models):
        """Models as the package lays them out: all weights, then all biases."""
        return np.array([np.concatenate([w[:, :-1].ravel(), w[:, -1]]) for w in models])

    def test_loss(self, models):
        pooled = [self.record_losses(w, x, y) for w, (x, y) in zip(models, self.test, strict=True)]
        return np.concatenate(pooled).mean()


@pytest.fixture(params=[2, 3], ids=["logistic", "softmax"])
def compare(request, make_clients):
    """``(method, reference generator of a Reference) -> (result, reference)``, compared."""

    def make(method, derive, seed=0):
        classes = request.param
        clients = make_clients(SIZES, FEATURES, classes=classes)
        task, model = ("binary", Logistic()) if classes == 2 else ("multiclass", Softmax())
        federation = Federation(clients, task=task)
        settings = {"rounds": ROUNDS, "local_steps": TAU, "l2": L2, "seed": seed}
        result = Trainer(method, federation, model, **settings).run()
        reference = Reference(clients, classes)
        derived = derive(reference, result)
        assert result.facts.eta == pytest.approx(reference.eta, rel=1e-12)
        rounds = list(islice(derived, ROUNDS))
        expected = [reference.test_loss(models) for models in rounds]
        assert result.history.pooled() == pytest.approx(expected, abs=1e-11)
        assert result.theta.numpy() == pytest.approx(reference.rows(rounds[-1]), abs=1e-11)
        return result, reference

    return make


def test_local(compare):
    compare(Local(), lambda reference, _: reference.local())


def test_fedavg(compare):
    compare(FedAvg(), lambda reference, _: reference.fedprox(0.0))


@pytest.mark.parametrize("mu", [0.1, 2.0])
def test_fedprox(compare, mu):
    compare(FedProx(mu=mu), lambda reference, _: reference.fedprox(mu))


@pytest.mark.parametrize("eta_g", [1.0, 0.5])
def test_scaffold(compare, eta_g):
    compare(Scaffold(eta_g=eta_g), lambda reference, _: reference.scaffold(eta_g))


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_pfedme(compare, beta):
    compare(PFedMe(beta=beta), lambda reference, _: reference.pfedme(15.0, 5, beta))


@pytest.mark.parametrize("pull", [0.1, 2.0])
def test_ditto(compare, pull):
    compare(Ditto(lambda_d=pull), lambda reference, _: reference.ditto(pull))


@pytest.mark.parametrize(("n_clusters", "seed"), [(2, 0), (3, 1)])
def test_ifca(compare, n_clusters, seed):
    def derive(reference, _):
        outputs, width = reference.zero.shape
        flat = 0.1 * generator(seed, "ifca").standard_normal((n_clusters, outputs * width))
        return reference.ifca(
            np.column_stack([w[:-outputs].reshape(outputs, -1), w[-outputs:]]) for w in flat
        )

    result, reference = compare(IFCA(n_clusters=n_clusters), derive, seed)
    assert result.server["takers"].tolist() == reference.takers
    assert len(set(reference.takers)) > 1


@pytest.mark.parametrize("n_clusters", [2, 3])
def test_pacfl(compare, n_clusters):
    def derive(reference, result):
        labels = reference.angle_clusters(3, n_clusters)
        ours = result.server["labels"].tolist()
        # The same clusters, whatever their numbers.
        assert len(set(zip(ours, labels, strict=True))) == len(set(labels)) == n_clusters
        return reference.clustered(labels)

    compare(PACFL(n_clusters=n_clusters), derive)


@pytest.mark.parametrize("abar", [0.0, 0.3, 1.0])
@pytest.mark.filterwarnings("ignore:full blending")
def test_oracle(compare, abar):
    groups = [0, 1] * 4
    compare(Oracle(abar=abar), lambda reference, _: reference.clustered(groups, abar))


@pytest.mark.parametrize("n_clusters", [2, 3])
def test_random(compare, n_clusters):
    def derive(reference, result):
        labels = result.server["labels"].tolist()
        sizes = np.bincount(labels, minlength=n_clusters)
        assert len(sizes) == n_clusters
        assert sizes.max() - sizes.min() <= 1
        return reference.clustered(labels)

    compare(Random(n_clusters=n_clusters), derive)
