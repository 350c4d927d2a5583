"""Whole runs: against a plain NumPy re-derivation, scikit-learn's optima and themselves."""

import gc
import itertools
import math

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import cdist
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score, log_loss
from torch import nn

from fedtopo_torch.algorithms import Algorithm, Clustered, FedAvg, Local, PTopoFL
from fedtopo_torch.datasets import FedHeartDisease, Synthetic
from fedtopo_torch.evaluation import POOLED
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.models import Model
from fedtopo_torch.models.logistic import Logistic, Softmax
from fedtopo_torch.objective import LinearObjective, Objective
from fedtopo_torch.options import OptionError
from fedtopo_torch.trainer import Diverged, Trainer, train

SIZES = [21, 60, 33, 20, 47, 90, 25, 38]
LABELS = (0, 1, 0, 2, 1, 2, 0, 1)


def run(algorithm, federation, model=None, **settings):
    model = model or (Logistic() if federation.task == "binary" else Softmax())
    return Trainer(algorithm, federation, model, **settings).run()


def mlp(d=3, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 1))


def everything(result):
    """All numbers of a result, to compare runs to the bit."""
    rows = [tuple(repr(v) for v in row) for row in result.history.rows()]
    return rows, {"personal": result.theta, **result.server}


def same_bits(a, b):
    (rows_a, tensors_a), (rows_b, tensors_b) = everything(a), everything(b)
    return (
        rows_a == rows_b
        and tensors_a.keys() == tensors_b.keys()
        and all(torch.equal(tensors_a[name], tensors_b[name]) for name in tensors_a)
    )


METHODS = {
    "local": Local(),
    "fedavg": FedAvg(),
    "clustered": Clustered(labels=LABELS),
    "ptopofl": PTopoFL(),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


class Blend(FedAvg):
    """A method with a shared model that scores clients with half of it."""

    title = "Blend"

    def personal(self, message, client, problem):
        return message["theta"] * 0.5


# NumPy re-derivation


class Reference:
    """Logistic regression of every client by gradient descent, from the formulas alone."""

    def __init__(self, clients, l2=0.01, tau=10):
        self.n = np.array([len(c.train[1]) for c in clients])
        pooled = np.concatenate([c.train[0] for c in clients])
        mean, std = pooled.mean(0), pooled.std(0)
        self.x, self.y = [], []
        for c in clients:
            x = (c.train[0] - mean) / std
            self.x.append(np.concatenate([x, np.ones((len(x), 1))], axis=1))
            self.y.append(c.train[1])
        self.test = [
            (np.concatenate([(c.test[0] - mean) / std, np.ones((len(c.test[0]), 1))], 1), c.test[1])
            for c in clients
        ]
        self.l2, self.tau = l2, tau
        self.p = self.n / self.n.sum()
        smoothness = [np.linalg.eigvalsh(x.T @ x / len(x))[-1] / 4 + l2 for x in self.x]
        self.eta = 1 / max(smoothness)
        self.zero = np.zeros(pooled.shape[1] + 1)

    def local(self, k, w):
        for _ in range(self.tau):
            residual = 1 / (1 + np.exp(-self.x[k] @ w)) - self.y[k]
            w = w - self.eta * (self.x[k].T @ residual / len(residual) + self.l2 * w)
        return w

    def alone(self, rounds):
        rows = [self.zero] * len(self.n)
        for _ in range(rounds):
            rows = [self.local(k, w) for k, w in enumerate(rows)]
        return np.array(rows)

    def fedavg(self, rounds):
        w = self.zero
        for _ in range(rounds):
            w = sum(self.p[k] * self.local(k, w) for k in range(len(self.n)))
        return np.array([w] * len(self.n))

    def clustered(self, rounds, labels, alpha, weights=None):
        labels = np.array(labels)
        weights = self.n if weights is None else weights
        clusters = range(labels.max() + 1)
        theta = [self.zero] * len(clusters)
        omega = [self.p[labels == j].sum() for j in clusters]
        for _ in range(rounds):
            u = []
            for j in clusters:
                members = np.flatnonzero(labels == j)
                total = sum(weights[k] for k in members)
                u.append(sum(weights[k] / total * self.local(k, theta[j]) for k in members))
            blend = sum(o * v for o, v in zip(omega, u, strict=True))
            theta = [(1 - alpha) * v + alpha * blend for v in u]
        return np.array([theta[j] for j in labels])

    def calibrated(self, abar=0.3):
        q = (1 - self.eta * self.l2) ** self.tau
        return abar * (1 - q) / (1 - abar * q)

    def pooled_test_loss(self, rows):
        y = np.concatenate([y for _, y in self.test])
        z = np.concatenate([x @ w for (x, _), w in zip(self.test, rows, strict=True)])
        return log_loss(y, 1 / (1 + np.exp(-z)))


def first_appearance(labels):
    seen = {}
    return np.array([seen.setdefault(label, len(seen)) for label in labels])


def ptopofl_weights(phi, labels, n, trust):
    """n_k exp(-|phi_k - centroid|) t_k by the definition."""
    centroids = np.array([phi[labels == j].mean(0) for j in range(labels.max() + 1)])
    t = np.ones(len(n))
    if trust != "off":
        delta = cdist(phi, phi).sum(1) / (len(phi) - 1)
        if trust == "robust":
            z = (delta - np.median(delta)) / (1.4826 * np.median(np.abs(delta - np.median(delta))))
            t = np.exp(-np.maximum(z - 3, 0))
        else:
            t = np.exp(-np.maximum((delta - delta.mean()) / delta.std() - 1, 0))
    return n * np.exp(-np.linalg.norm(phi - centroids[labels], axis=1)) * t


def agree(result, reference, rows, tolerance=1e-9):
    assert np.abs(result.theta.numpy() - rows).max() < tolerance
    loss = result.history.last("test", "log_loss").pooled
    assert loss == pytest.approx(reference.pooled_test_loss(rows), abs=tolerance)


@pytest.fixture(scope="module")
def settings():
    return {"rounds": 40, "local_steps": 10, "eval_every": 40}


@pytest.mark.parametrize(
    ("sizes", "d"), [(SIZES, 3), ([6, 1500, 30, 8, 700, 12, 20, 25], 20)], ids=["alike", "buckets"]
)
def test_local_fedavg_and_clustered_equal_numpy(make_clients, settings, sizes, d):
    clients = make_clients(sizes, d=d)
    federation, reference = Federation(clients), Reference(clients)
    result = run(FedAvg(), federation, **settings)
    assert result.facts.eta == pytest.approx(reference.eta, rel=1e-12)
    assert (len(result.objective.data(federation.train)) > 1) == (d == 20)
    agree(result, reference, reference.fedavg(40))
    agree(run(Local(), federation, **settings), reference, reference.alone(40))
    result = run(Clustered(labels=LABELS), federation, **settings)
    agree(result, reference, reference.clustered(40, LABELS, reference.calibrated()))
    result = run(Clustered(labels=LABELS, alpha=0.25), federation, **settings)
    agree(result, reference, reference.clustered(40, LABELS, 0.25))


@pytest.mark.parametrize(
    "options",
    [{}, {"trust": "mean_std", "n_clusters": 3}, {"trust": "off", "alpha": 0.5}, {"n_clusters": 1}],
    ids=str,
)
def test_ptopofl_equals_numpy_given_its_descriptors(make_clients, settings, options):
    clients = make_clients(SIZES)
    reference = Reference(clients)
    result = run(PTopoFL(**options), Federation(clients), **settings)
    phi = result.server["descriptor"].numpy()
    m = options.get("n_clusters", 2)
    labels = first_appearance(fcluster(linkage(phi, "ward"), m, "maxclust"))
    assert result.server["labels"].tolist() == labels.tolist()
    weights = ptopofl_weights(phi, labels, reference.n, options.get("trust", "robust"))
    alpha = options.get("alpha", reference.calibrated())
    agree(result, reference, reference.clustered(40, labels, alpha, weights))


def test_softmax_fedavg_equals_numpy(make_clients):
    clients = make_clients([8, 30, 14], classes=3)
    reference = Reference(clients)
    result = run(FedAvg(), Federation(clients, task="multiclass"), rounds=10, local_steps=3)
    eta = 1 / (2 * (1 / reference.eta - 0.01) + 0.01)  # L = lambda_max / 2 + l2
    assert result.facts.eta == pytest.approx(eta, rel=1e-12)
    w = np.zeros((3, 4))
    for _ in range(10):
        ends = []
        for x, y in zip(reference.x, reference.y, strict=True):
            v = w
            for _ in range(3):
                p = np.exp(x @ v.T)
                residual = p / p.sum(1, keepdims=True) - np.eye(3)[y]
                v = v - eta * (residual.T @ x / len(x) + 0.01 * v)
            ends.append(v)
        w = sum(share * v for share, v in zip(reference.p, ends, strict=True))
    weight, bias = result.theta[0, :9].reshape(3, 3).numpy(), result.theta[0, 9:].numpy()
    assert np.abs(weight - w[:, :3]).max() < 1e-12
    assert np.abs(bias - w[:, 3]).max() < 1e-12


# scikit-learn's optimum of the same objective


def optimum(x, y, l2):
    ones = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    model = LogisticRegression(C=1 / (l2 * len(x)), fit_intercept=False, tol=1e-12, max_iter=10_000)
    return model.fit(ones, y).coef_[0]


def test_converged_fedavg_and_local_are_scikit_learns_optima(make_federation):
    l2 = 0.05
    federation = make_federation([40, 25, 90])
    parts = [[v.numpy() for v in federation.train.client(k)] for k in range(3)]
    settings = {"l2": l2, "eval_every": 3000}
    result = run(FedAvg(), federation, rounds=3000, local_steps=1, **settings)
    x, y = (np.concatenate(values) for values in zip(*parts, strict=True))
    assert np.abs(result.theta.numpy() - optimum(x, y, l2)).max() < 1e-6
    result = run(Local(), federation, rounds=300, local_steps=10, **settings)
    expected = [optimum(x, y, l2) for x, y in parts]
    assert np.abs(result.theta.numpy() - expected).max() < 1e-6


# Identities


def test_one_cluster_is_fedavg(make_federation):
    federation = make_federation(SIZES)
    fedavg = run(FedAvg(), federation, rounds=30)
    for method in (Clustered(), Clustered(abar=1), PTopoFL(n_clusters=1, weights="uniform")):
        theta = run(method, federation, rounds=30).theta
        assert torch.allclose(theta, fedavg.theta, rtol=0, atol=1e-12)


def test_clusters_of_one_client_without_blending_are_local(make_federation):
    federation = make_federation(SIZES)
    local = run(Local(), federation, rounds=30).theta
    for method in (Clustered(labels=tuple(range(8)), abar=0), PTopoFL(n_clusters=8, alpha=0)):
        assert torch.allclose(run(method, federation, rounds=30).theta, local, rtol=0, atol=1e-12)


def test_one_client_alone_is_all_the_same(make_federation):
    federation = make_federation([30])
    local = run(Local(), federation, rounds=10).theta
    for method in (FedAvg(), Clustered(), PTopoFL(n_clusters=1)):
        assert torch.allclose(run(method, federation, rounds=10).theta, local, rtol=0, atol=1e-12)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("eta", ["auto", 0.1])
def test_closed_form_and_autograd_train_the_same(make_federation, classes, eta):
    federation = make_federation([20, 33, 27], classes=classes)
    settings = {"rounds": 20, "eta": eta}
    closed = run(FedAvg(), federation, **settings)
    auto = run(FedAvg(), federation, closed_form=False, **settings)
    assert torch.allclose(closed.theta, auto.theta, rtol=0, atol=1e-12)


class Late(Algorithm):
    """Sends the model of the round before: the client's state as it was, not as it becomes."""

    def client_state(self, theta0, problem):
        return {"last": theta0.repeat(len(problem), 1)}

    def local_update(self, message, client, problem):
        return {"theta": client["last"]}, {"last": problem.descend(message["theta"])}


@pytest.mark.parametrize(
    "method", [*METHODS.values(), Blend(), Late()], ids=[*METHODS, "blend", "late"]
)
@pytest.mark.parametrize("kind", ["logistic", "mlp"])
def test_buckets_do_not_change_a_run(make_federation, monkeypatch, method, kind):
    federation = make_federation(SIZES)
    settings = {"rounds": 5, "eta": 0.3, "model": mlp() if kind == "mlp" else None}
    together = run(method, federation, **settings)
    assert len(together.objective.data(federation.train)) == 1
    for cls in (Objective, LinearObjective):
        monkeypatch.setattr(cls, "bucket_size", 1)
    apart = run(method, federation, **settings)
    assert len(apart.objective.data(federation.train)) == 8
    assert torch.allclose(together.theta, apart.theta, rtol=0, atol=1e-12)
    for a, b in zip(together.history.rows(), apart.history.rows(), strict=True):
        assert a[:6] == b[:6]
        assert a.n == b.n
        assert a.value == pytest.approx(b.value, abs=1e-12)


def test_late_methods_first_average_is_the_start(make_federation):
    result = run(Late(), make_federation([20, 30]), rounds=1)
    assert torch.equal(result.theta, torch.zeros(2, 4, dtype=torch.float64))


def test_float32_runs_are_close_to_float64(make_clients):
    clients = make_clients(SIZES)
    for method in METHODS.values():
        double = run(method, Federation(clients), rounds=10)
        single = run(method, Federation(clients, dtype=torch.float32), rounds=10)
        assert single.theta.dtype == torch.float32
        assert torch.allclose(single.theta.double(), double.theta, rtol=0, atol=1e-5)


# To the bit


@every_method
def test_a_rerun_gives_the_same_bits(make_federation, method):
    federation = make_federation(SIZES)
    first = run(method, federation, rounds=5)
    torch.manual_seed(123)
    np.random.seed(123)
    assert same_bits(run(method, federation, rounds=5), first)
    assert same_bits(run(method, make_federation(SIZES), rounds=5), first)


@every_method
@pytest.mark.parametrize("sizes", [SIZES, [6, 900, 30, 8, 700, 12, 20, 25]])
def test_the_order_clients_are_given_in_changes_no_bit(make_clients, method, sizes):
    clients = make_clients(sizes, d=20)
    first = run(method, Federation(clients), rounds=3)
    for order in (clients[::-1], clients[3:] + clients[:3]):
        assert same_bits(run(method, Federation(order), rounds=3), first)


def test_dropout_runs_give_the_same_bits_in_any_order(make_clients):
    clients = make_clients([6, 20, 11])
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    first = run(FedAvg(), Federation(clients), module, rounds=3, eta=0.1)
    torch.manual_seed(5)
    assert same_bits(run(FedAvg(), Federation(clients[::-1]), module, rounds=3, eta=0.1), first)
    other = run(FedAvg(), Federation(clients), module, rounds=3, eta=0.1, seed=1)
    assert not torch.equal(other.theta, first.theta)


@every_method
def test_fault_12_test_labels_change_no_trained_bit(make_clients, method):
    clients = make_clients(SIZES)
    first = run(method, Federation(clients), rounds=5)
    swapped = [Client(c.name, c.train, (c.test[0], 1 - c.test[1])) for c in clients]
    again = run(method, Federation(swapped), rounds=5)
    assert torch.equal(again.theta, first.theta)
    assert all(torch.equal(again.server[name], value) for name, value in first.server.items())
    assert again.history.last().pooled != first.history.last().pooled
    assert again.history.last("train").pooled == first.history.last("train").pooled


@every_method
def test_what_is_evaluated_changes_no_trained_bit(make_federation, method):
    federation = make_federation(SIZES)
    first = run(method, federation, rounds=6)
    rare = run(method, federation, rounds=6, eval_every=4, splits=("test",), metrics=("accuracy",))
    assert torch.equal(rare.theta, first.theta)
    assert rare.history.rounds == [4, 6]


def test_the_models_initialisation_is_the_runs_seed_alone(make_federation):
    class Net(Model):
        def module(self, federation):
            return nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))

    federation = make_federation([5])

    def start(seed):
        return torch.cat([p.detach().flatten() for p in Net().build(federation, seed).parameters()])

    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = start(0)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(start(0), first)
    assert not torch.equal(start(1), first)


# Fault 5: what a run gives back are copies


@pytest.mark.parametrize("method", [*METHODS.values(), Blend()], ids=[*METHODS, "blend"])
def test_fault_05_models_kept_during_a_run_do_not_change_later(make_federation, method):
    class Keep(Quiet):
        def __init__(self):
            self.kept, self.copies, self.servers = [], [], []

        def started(self, trainer, result):
            self.result = result

        def evaluated(self, round, scores):
            self.kept.append((self.result.theta, scores))
            self.copies.append((self.result.theta.clone(), scores["test", "log_loss"].pooled))
            self.servers.append((self.result.server, copy_of(self.result.server)))

    keep = Keep()
    result = run(method, make_federation(SIZES), rounds=6, callbacks=[keep])
    for (theta, scores), (copy, loss) in zip(keep.kept, keep.copies, strict=True):
        assert torch.equal(theta, copy)
        assert scores["test", "log_loss"].pooled == loss
    for server, copy in keep.servers:
        assert all(torch.equal(server[name], copy[name]) for name in copy)
    storages = [theta.untyped_storage().data_ptr() for theta, _ in keep.kept]
    assert len(set(storages)) == 6
    assert result.theta.untyped_storage().data_ptr() not in {
        value.untyped_storage().data_ptr() for value in result.server.values()
    }


def copy_of(state):
    return {name: value.clone() for name, value in state.items()}


def test_the_callers_module_is_not_trained(make_federation):
    module = mlp()
    before = copy_of(module.state_dict())
    run(FedAvg(), make_federation([20]), module, rounds=2, eta=0.1)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_state_dicts_load_into_the_plain_module(make_federation):
    federation = make_federation([20, 30])
    result = run(Local(), federation, rounds=3)
    states = result.state_dicts()
    assert list(states) == ["c00", "c01"]
    for k, name in enumerate(federation.names):
        module = nn.Linear(3, 1).double()
        module.load_state_dict(states[name])
        x, y = federation.test.client(k)
        with torch.no_grad():
            right = ((module(x)[:, 0] > 0) == (y > 0)).double().mean().item()
        assert right == pytest.approx(result.history.last("test", "accuracy").clients[k].item())


# Fault 11: the personal model is the one scored


class RightAndWrong(Algorithm):
    """Clients keep a model that is right on every record; the shared one is its opposite."""

    def client_state(self, theta0, problem):
        return {"own": torch.tensor([[1.0, 0.0]], dtype=torch.float64).repeat(len(problem), 1)}

    def local_update(self, message, client, problem):
        return {"theta": -client["own"]}, client

    def personal(self, message, client, problem):
        return client["own"]


def test_fault_11_personal_and_shared_models_are_scored_apart():
    x = np.array([[-2.0], [-1.0], [1.0], [2.0]])
    part = (x, [0, 0, 1, 1])
    federation = Federation([Client(name, part, part) for name in "ab"], standardize=False)
    result = run(RightAndWrong(), federation, rounds=3)
    found = {
        (r.model, r.client, r.split): r.value
        for r in result.history.rows()
        if r.metric == "accuracy" and r.round == 3
    }
    for client, split in itertools.product((POOLED, "a", "b"), ("train", "test")):
        assert found["personal", client, split] == 1.0
        assert found["shared", client, split] == 0.0
    assert result.theta.tolist() == [[1.0, 0.0]] * 2


def test_fault_11_methods_without_a_second_model_have_personal_rows_only(make_federation):
    federation = make_federation(SIZES)
    for method in METHODS.values():
        rows = list(run(method, federation, rounds=2).history.rows())
        assert {row.model for row in rows} == {"personal"}


def test_a_shared_model_is_scored_once_at_the_end(make_federation):
    result = run(Blend(), make_federation(SIZES), rounds=3)
    shared = [row for row in result.history.rows() if row.model == "shared"]
    assert {row.round for row in shared} == {3}
    # The same model for all: what FedAvg scores its clients with.
    fedavg = run(FedAvg(), make_federation(SIZES), rounds=3).history.last()
    value = next(
        r.value for r in shared if (r.client, r.split, r.metric) == (POOLED, "test", "log_loss")
    )
    assert value == pytest.approx(fedavg.pooled, abs=1e-12)


# The loop


class Quiet:
    def started(self, trainer, result):
        pass

    def evaluated(self, round, scores):
        pass

    def finished(self, result):
        pass


def test_callbacks_are_told_in_order(make_federation):
    told = []

    class Listener(Quiet):
        def started(self, trainer, result):
            told.append(("started", result.facts.local_steps))

        def evaluated(self, round, scores):
            told.append((round, sorted(scores)))

        def finished(self, result):
            told.append(("finished", result.rounds))

    run(
        FedAvg(),
        make_federation([20]),
        rounds=25,
        eval_every=10,
        metrics=("auc",),
        callbacks=[Listener()],
    )
    keys = [("test", "auc"), ("train", "auc")]
    assert told == [("started", 10), (10, keys), (20, keys), (25, keys), ("finished", 25)]


def test_models_are_scored_after_the_last_aggregation(make_federation):
    federation = make_federation(SIZES)
    result = run(FedAvg(), federation, rounds=4)
    assert torch.equal(result.theta, result.server["theta"].expand(8, -1))
    short = run(FedAvg(), federation, rounds=3)
    assert result.history.pooled()[:3].tolist() == short.history.pooled().tolist()


def test_train_by_names(make_federation):
    federation = make_federation([20, 30])
    by_name = train("fedavg", federation, rounds=3)
    assert same_bits(by_name, run(FedAvg(), federation, rounds=3))
    softmax = train(Local(), make_federation([20, 30], classes=3), rounds=1)
    assert softmax.theta.shape == (2, 12)
    with pytest.raises(OptionError, match=r"'fedagv'.*'fedavg'"):
        train("fedagv", federation)
    with pytest.raises(OptionError, match=r"'logistics'.*'logistic'"):
        train("fedavg", federation, "logistics")
    with pytest.raises(OptionError, match=r"'synthetics'.*'synthetic'"):
        train("fedavg", "synthetics")


def test_models_for_another_task_are_refused(make_federation):
    with pytest.raises(OptionError, match="two classes"):
        run(FedAvg(), make_federation([20], classes=3), Logistic())
    with pytest.raises(OptionError, match="several classes"):
        run(FedAvg(), make_federation([20]), Softmax())


def test_fault_29_one_record_under_batchnorm_is_refused_at_the_start(make_federation):
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    with pytest.raises(OptionError, match=r"client 'c00'.*one record.*BatchNorm.*GroupNorm"):
        Trainer(FedAvg(), make_federation([1, 20]), module, eta=0.1)
    with pytest.raises(OptionError, match=r"client 'c00' and 1 others: batches of one record"):
        Trainer(FedAvg(), make_federation([9, 20]), module, eta=0.1, batch_size=1)


def test_a_client_of_one_record_trains(make_federation):
    for method in (Local(), FedAvg(), Clustered(labels=(0, 1))):
        result = run(method, make_federation([1, 20]), rounds=5)
        assert bool(result.theta.isfinite().all())


# Options of the trainer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rounds", v) for v in (0, -1, 1.5, True, "many", None, math.nan)),
        *(("local_steps", v) for v in (0, 2.5, True)),
        *(("eval_every", v) for v in (0, False, math.inf)),
        *(("eta", v) for v in (0, -0.1, math.nan, math.inf, "fast", None, True)),
        *(("l2", v) for v in (-0.1, math.nan, math.inf, "small", None, True)),
        *(("seed", v) for v in (0.5, None, "a", True, math.nan)),
    ],
)
def test_fault_31_settings_out_of_range_are_refused_by_name(make_federation, name, value):
    federation = make_federation([5])
    with pytest.raises(OptionError, match=rf"^{name} is|option {name} = "):
        Trainer(FedAvg(), federation, Logistic(), **{name: value})


def test_settings_at_the_ends_of_their_ranges_are_taken(make_federation):
    result = run(FedAvg(), make_federation([5]), rounds=1, local_steps=1, l2=0, seed=-3, eta=1)
    assert result.rounds == 1
    assert result.facts.eta == 1.0


def test_automatic_step_size_of_an_mlp_is_an_error_that_says_so(make_federation):
    with pytest.raises(OptionError, match=r"eta='auto'.*smoothness.*step size"):
        run(FedAvg(), make_federation([20]), mlp())


# Fault 28: divergence


@pytest.mark.parametrize("method", [*METHODS.values(), Blend()], ids=[*METHODS, "blend"])
@pytest.mark.parametrize("eval_every", [1, 3, 150])
def test_fault_28_divergence_names_method_round_and_client(make_federation, method, eval_every):
    federation = make_federation(SIZES)
    finished = []

    class Listener(Quiet):
        def finished(self, result):
            finished.append(result)

    with pytest.raises(Diverged) as caught:
        # eta l2 = 2.5: each step multiplies weights by -1.5, whatever the data.
        run(method, federation, eta=250, eval_every=eval_every, callbacks=[Listener()])
    result = caught.value.result
    message = str(caught.value)
    assert method.title in message
    assert f"round {result.rounds + 1} " in message
    assert any(f"client '{name}'" in message for name in federation.names)
    assert "eta = 250" in message
    # The last good round and nothing after it.
    assert result.rounds > 0
    assert finished == [result]
    assert bool(result.theta.isfinite().all())
    assert all(bool(value.isfinite().all()) for value in result.server.values())
    rows = list(result.history.rows())
    assert [row for row in rows if not math.isfinite(row.value)] == []
    assert max((row.round for row in rows), default=0) <= result.rounds
    assert bool(rows) == (eval_every <= result.rounds)


@pytest.mark.parametrize("method", [Local(), FedAvg(), PTopoFL()], ids=lambda m: m.title)
def test_fault_28_a_hopeless_step_size_is_refused_in_round_1(make_federation, method):
    with pytest.raises(Diverged, match=r"diverged in round 1 at client 'c00'.*eta = 1e\+06"):
        run(method, make_federation(SIZES), eta=1e6)


def test_fault_28_the_client_named_is_the_one_that_diverged(make_clients):
    # Only one client's features are large enough for this step size to be too long.
    clients = make_clients([20, 20, 20])
    loud = Client("c01", (clients[1].train[0] * 1e3, clients[1].train[1]))
    federation = Federation([clients[0], loud, clients[2]], standardize=False)
    squares = nn.Sequential(nn.Linear(3, 1), Cube())
    with pytest.raises(Diverged, match=r"Local diverged in round \d+ at client 'c01':"):
        run(Local(), federation, squares, eta=1e-3, splits=("train",))


class Cube(nn.Module):
    def forward(self, x):
        return x**3


# Interrupts


class StopAfter(Quiet):
    """Ctrl-C while round ``at`` is being shown."""

    def __init__(self, at):
        self.at = at
        self.ended = None

    def evaluated(self, round, scores):
        if round == self.at:
            raise KeyboardInterrupt

    def finished(self, result):
        self.ended = result


@pytest.mark.parametrize("method", [*METHODS.values(), Blend()], ids=[*METHODS, "blend"])
def test_an_interrupted_run_keeps_what_was_done(make_federation, method):
    federation, stop = make_federation(SIZES), StopAfter(7)
    result = run(method, federation, rounds=20, callbacks=[stop])
    assert result.interrupted
    assert stop.ended is result
    rows = list(result.history.rows())
    assert max(row.round for row in rows) in (6, 7)
    assert [row for row in rows if math.isnan(row.value)] == []
    assert bool(result.theta.isfinite().all())


@pytest.mark.parametrize("method", [*METHODS.values(), Blend()], ids=[*METHODS, "blend"])
def test_an_interrupted_run_equals_a_run_of_as_many_rounds(make_federation, method):
    federation = make_federation(SIZES)
    result = run(method, federation, rounds=20, callbacks=[StopAfter(7)])
    assert result.rounds == result.history.rounds[-1]
    assert same_bits(run(method, federation, rounds=result.rounds), result)


def test_an_interrupted_runs_shared_rows_are_of_the_round_they_name(make_federation):
    class Stopping(Blend):
        """Ctrl-C in the middle of round 8."""

        def aggregate(self, server, uplink, clients):
            if counter.pop() == 8:
                raise KeyboardInterrupt
            return super().aggregate(server, uplink, clients)

    federation, counter = make_federation(SIZES), list(range(20, 0, -1))
    result = run(Stopping(), federation, rounds=20, eval_every=5)
    assert result.interrupted
    (round,) = {row.round for row in result.history.rows() if row.model == "shared"}
    straight = run(Blend(), federation, rounds=round, eval_every=5)
    found = result.history.shared["test", "log_loss"].pooled
    assert found == straight.history.shared["test", "log_loss"].pooled


def test_an_interrupt_before_the_first_evaluation_leaves_an_empty_table(make_federation):
    class Stopping(FedAvg):
        def aggregate(self, server, uplink, clients):
            raise KeyboardInterrupt

    result = run(Stopping(), make_federation([20, 30]), rounds=5)
    assert result.interrupted
    assert result.rounds == 0
    assert [row for row in result.history.rows() if row.model == "personal" and row.round > 0] == []
    assert bool(result.theta.isfinite().all())


# Threads


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_callers_threads_come_back(make_federation, two_threads):
    inside = []

    class Look(Quiet):
        def evaluated(self, round, scores):
            inside.append(torch.get_num_threads())

    federation = make_federation([20])
    run(FedAvg(), federation, rounds=1, callbacks=[Look()])
    assert inside == [1]
    assert torch.get_num_threads() == 2
    with pytest.raises(Diverged):
        run(FedAvg(), federation, eta=1e6)
    assert torch.get_num_threads() == 2
    run(FedAvg(), federation, callbacks=[StopAfter(1)])
    assert torch.get_num_threads() == 2

    class Broken(FedAvg):
        def aggregate(self, server, uplink, clients):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run(Broken(), federation)
    assert torch.get_num_threads() == 2
    assert torch.is_grad_enabled()


# Communication


def test_communication_is_counted_from_the_messages(make_federation):
    d, p = 5, 6
    federation = make_federation(SIZES, d=d)
    counts = {name: run(m, federation, rounds=2).communication for name, m in METHODS.items()}
    for communication in counts.values():
        # Sums, squares and L_k; the number of records is the one whole number.
        assert communication.handshake["up"] == (2 * d + 1, 1)
        assert communication.contents["handshake up"] == {
            "n": 1,
            "feature_sum": d,
            "feature_squares": d,
            "smoothness": 1,
        }
    for name in ("fedavg", "clustered", "ptopofl"):
        assert counts[name].round == {"up": (p, 0), "down": (p, 0)}
    assert counts["local"].round == {"up": (0, 0), "down": (0, 0)}
    for name in ("local", "fedavg", "clustered"):
        assert counts[name].introduction["up"] == (0, 0)
    assert counts["ptopofl"].introduction["up"] == (46, 0)
    assert counts["ptopofl"].contents["introduction up"] == {"descriptor": 46}
    assert counts["fedavg"].total_floats_up(150) == 11 + 150 * 6
    assert counts["ptopofl"].total_floats_up(150) == 11 + 46 + 150 * 6
    assert counts["local"].total_floats_up(150) == 11


def test_choosing_the_number_of_clusters_sends_twelve_more_descriptors(make_federation):
    method = PTopoFL(n_clusters="auto", repeats=1, n_sub=10)
    communication = run(method, make_federation(SIZES), rounds=1).communication
    assert communication.introduction["up"] == (46 + 6 * 2 * 46, 0)
    assert communication.contents["introduction up"] == {"descriptor": 46, "halves": 552}


def test_a_model_without_known_smoothness_sends_none(make_federation):
    communication = run(FedAvg(), make_federation([20]), mlp(), rounds=1, eta=0.1).communication
    assert communication.handshake["up"] == (6, 1)
    assert communication.round == {"up": (21, 0), "down": (21, 0)}


def test_whole_numbers_and_several_tensors_are_counted_apart(make_federation):
    class Chatty(FedAvg):
        def local_update(self, message, client, problem):
            k = len(problem)
            uplink, client = super().local_update(message, client, problem)
            return {**uplink, "steps": problem.steps, "map": torch.zeros(k, 2, 5)}, client

    federation = make_federation([20, 20, 900], d=50)
    communication = run(Chatty(), federation, rounds=2).communication
    assert communication.round["up"] == (51 + 10, 1)
    assert communication.contents["round up"] == {"theta": 51, "steps": 1, "map": 10}


# Fault 32: memory


def live_tensors():
    gc.collect()
    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]


@pytest.mark.parametrize("kind", ["logistic", "mlp", "dropout"])
@pytest.mark.parametrize("method", [Local(), FedAvg(), Clustered(), Blend()], ids=lambda m: m.title)
def test_fault_32_nothing_piles_up_over_rounds(make_federation, method, kind):
    counts = {}

    class Count(Quiet):
        def evaluated(self, round, scores):
            if round in (5, 50):
                counts[round] = len(live_tensors())

    module = {"logistic": None, "mlp": mlp()}.get(kind, nn.Sequential(nn.Dropout(0.5), mlp()))
    # More clients than a run keeps every round's values of.
    clients = 51 if kind != "dropout" else 3
    federation = make_federation([2] * clients, n_test=2)
    settings = {"rounds": 50, "local_steps": 1, "eta": 0.1, "callbacks": [Count()]}
    if kind == "dropout":
        settings["metrics"] = ("accuracy",)
        settings["splits"] = ("test",)
    result = run(method, federation, module, **settings)
    assert result.rounds == 50
    assert counts[50] == counts[5]


@pytest.mark.parametrize("method", [*METHODS.values(), Blend()], ids=[*METHODS, "blend"])
def test_fault_32_nothing_stored_keeps_a_graph(make_federation, method):
    before = {id(o) for o in live_tensors()}
    result = run(method, make_federation(SIZES), mlp(), rounds=3, eta=0.1)
    held = [result.theta, *result.server.values(), result.facts.mean, result.facts.scale]
    for key in result.history.keys():  # noqa: SIM118 (a history is no dict)
        score = result.history.last(*key)
        held += [score.clients, *([] if score.clusters is None else [score.clusters])]
    for state in result.state_dicts().values():
        held += state.values()
    for value in held:
        assert not value.requires_grad
        assert value.grad_fn is None
    assert [o for o in live_tensors() if id(o) not in before and o.grad_fn is not None] == []


# Right values on the two built-in federations


def final(method, federation, seed, rounds=150, **settings):
    settings = {"eval_every": rounds, "splits": ("test",), "metrics": ("log_loss",), **settings}
    return run(method, federation, rounds=rounds, seed=seed, **settings)


@pytest.mark.slow
def test_heart_right_values():
    methods = {
        "local": Local(),
        "fedavg": FedAvg(),
        "ptopofl": PTopoFL(),
        "one cluster": PTopoFL(n_clusters=1),
    }
    losses, alone = {name: [] for name in methods}, 0
    for seed in range(10):
        federation = FedHeartDisease().load(seed)
        for name, method in methods.items():
            result = final(method, federation, seed)
            losses[name].append(result.history.last().pooled)
            if name == "ptopofl":
                switzerland = federation.names.index("Switzerland")
                labels = result.server["labels"].tolist()
                alone += labels.count(labels[switzerland]) == 1
    means = {name: np.mean(values) for name, values in losses.items()}
    assert means["local"] == pytest.approx(0.4403, abs=0.002)
    assert means["fedavg"] == pytest.approx(0.4635, abs=0.002)
    assert means["ptopofl"] == pytest.approx(0.4255, abs=0.002)
    assert means["one cluster"] == pytest.approx(0.482, abs=0.006)
    assert all(p < f for p, f in zip(losses["ptopofl"], losses["fedavg"], strict=True))
    assert alone == 10


@pytest.mark.slow
def test_synthetic_true_groups_beat_local_and_local_beats_fedavg():
    losses = []
    for seed in range(20):
        federation = Synthetic(regime="dim").load(seed)
        oracle = Clustered(labels=tuple(federation.groups.tolist()))
        losses.append(
            [final(m, federation, seed).history.last().pooled for m in (oracle, Local(), FedAvg())]
        )
    oracle, local, fedavg = np.mean(losses, axis=0)
    assert oracle < local < fedavg


@pytest.mark.slow
@pytest.mark.parametrize(
    ("regime", "low", "high"), [("dim", 0.95, 1), ("tails", 0.93, 1), ("concept", -0.1, 0.1)]
)
def test_synthetic_partition_recovers_groups_where_features_differ(regime, low, high):
    scores = []
    for seed in range(20):
        federation = Synthetic(regime=regime).load(seed)
        labels = final(PTopoFL(), federation, seed, rounds=1).server["labels"]
        scores.append(adjusted_rand_score(federation.groups, labels))
    assert low <= np.mean(scores) <= high


@pytest.mark.slow
@pytest.mark.parametrize(("regime", "clusters", "least"), [("concept", 1, 16), ("dim", 2, 18)])
def test_synthetic_number_of_clusters_is_found(regime, clusters, least):
    method, found = PTopoFL(n_clusters="auto"), []
    for seed in range(20):
        federation = Synthetic(regime=regime).load(seed)
        result = final(method, federation, seed, rounds=1)
        found.append(len(result.server["theta"]))
    assert found.count(clusters) >= least
