"""Scores: AUC by ranks, log-loss, accuracy, pooled and per client, and the long table."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from torch import nn

from fedtopo_torch.evaluation import (
    CLIENT_MEAN,
    METRICS,
    PER_CLIENT_LIMIT,
    POOLED,
    Evaluator,
    History,
    Row,
    accuracy,
    auc,
    client_mean,
)
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.objective import objective_for
from fedtopo_torch.options import OptionError


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def scored(clients, splits=("test",), metrics=METRICS, task="binary", **settings):
    """An evaluator of linear models without bias on features as they are given."""
    federation = Federation(clients, task=task, standardize=False, **settings)
    module = nn.Linear(federation.feature_shape[0], federation.outputs, bias=False)
    objective = objective_for(module, task, 0.0, outputs=federation.outputs)
    return federation, Evaluator(federation, objective, splits, metrics)


def one_feature(name, scores, labels, **more):
    """A client whose one feature is the score that a weight of 1 gives."""
    x = np.array(scores, dtype=float)[:, None]
    return Client(name, ([[0.0], [1.0]], [0, 1]), test=(x, labels), **more)


def multiclass_reference(outputs, labels):
    """Mean over the classes present of one against the rest, by probability."""
    shifted = np.exp(outputs - outputs.max(1, keepdims=True))
    p = shifted / shifted.sum(1, keepdims=True)
    present = [c for c in range(outputs.shape[1]) if 0 < (labels == c).sum() < len(labels)]
    return np.mean([roc_auc_score(labels == c, p[:, c]) for c in present])


# AUC


@settings(max_examples=80, derandomize=True, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(-3, 3), st.booleans(), st.booleans()), min_size=7, max_size=7
        ),
        min_size=1,
        max_size=4,
    )
)
def test_auc_equals_scikit_learn_with_ties_and_masks(rows):
    cells = np.array(rows, dtype=float)
    scores, labels, mask = tensor(cells[..., 0] / 7), tensor(cells[..., 1]), tensor(cells[..., 2])
    found = auc(scores, labels, mask)
    for k in range(len(rows)):
        keep = cells[k, :, 2] > 0
        y = cells[k, keep, 1]
        if len(set(y)) < 2:
            assert found[k].isnan()
        else:
            expected = roc_auc_score(y, cells[k, keep, 0] / 7)
            assert found[k].item() == pytest.approx(expected, abs=1e-12)


def test_auc_of_many_records_equals_scikit_learn():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(3, 5000)).round(2)
    labels = (rng.random((3, 5000)) < [[0.5], [0.01], [0.9]]).astype(float)
    found = auc(torch.from_numpy(scores), torch.from_numpy(labels))
    expected = [roc_auc_score(y, s) for y, s in zip(labels, scores, strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert found.dtype == torch.float64
    single = auc(torch.from_numpy(scores).float(), torch.from_numpy(labels).float())
    expected = [roc_auc_score(y, s.astype(np.float32)) for y, s in zip(labels, scores, strict=True)]
    assert single.tolist() == pytest.approx(expected, abs=1e-12)


def test_auc_by_hand():
    scores, labels = tensor([[0.1, 0.9], [0.9, 0.1], [0.5, 0.5]]), tensor([[0, 1]] * 3)
    assert auc(scores, labels).tolist() == [1.0, 0.0, 0.5]


def test_auc_of_extreme_logits():
    scores = tensor([[1e300, -1e300, 1e4, -1e4]])
    assert auc(scores, tensor([[1, 0, 1, 0]])).tolist() == [1.0]
    assert auc(scores, tensor([[0, 1, 0, 1]])).tolist() == [0.0]


def test_what_is_padded_never_counts():
    scores, labels, mask = (
        tensor([[1.0, 2.0, 9.0, -9.0]]),
        tensor([[0, 1, 0, 1]]),
        tensor([[1, 1, 0, 0]]),
    )
    assert auc(scores, labels, mask).tolist() == [1.0]


# Fault 24: a client of one class


def test_fault_24_auc_of_one_class_is_nan_and_left_out_of_the_mean():
    clients = [one_feature("A", [0.1, 0.9], [0, 1]), one_feature("B", [0.2, 0.7, 0.4], [1, 1, 1])]
    federation, evaluator = scored(clients)
    score = evaluator(tensor([[1.0], [1.0]]))["test", "auc"]
    assert score.clients[0].item() == 1.0
    assert math.isnan(score.clients[1].item())
    assert client_mean(score.clients) == (1.0, 1)
    history = History(federation.names, evaluator.n, federation.honest)
    history.add(1, evaluator(tensor([[1.0], [1.0]])))
    (mean,) = [r for r in history.rows() if r.client == CLIENT_MEAN and r.metric == "auc"]
    assert (mean.value, mean.n) == (1.0, 1)


def test_fault_24_all_clients_of_one_class_have_no_mean_but_a_pooled_value():
    clients = [one_feature("A", [0.1, 0.2], [0, 0]), one_feature("B", [0.7, 0.8], [1, 1])]
    _, evaluator = scored(clients)
    score = evaluator(tensor([[1.0], [1.0]]))["test", "auc"]
    assert score.clients.isnan().all()
    mean, count = client_mean(score.clients)
    assert math.isnan(mean)
    assert count == 0
    assert score.pooled == 1.0


# Fault 25: pooled and mean of clients are two numbers


def test_fault_25_accuracy_pooled_and_mean_of_clients():
    clients = [
        one_feature("A", [1.0] * 9 + [-1.0], [1] * 10),
        one_feature("B", [1.0, -1.0], [1, 1]),
    ]
    federation, evaluator = scored(clients)
    history = History(federation.names, evaluator.n, federation.honest)
    history.add(1, evaluator(tensor([[1.0], [1.0]])))
    found = {r.client: (r.value, r.n) for r in history.rows() if r.metric == "accuracy"}
    assert found[POOLED] == (pytest.approx(10 / 12, abs=1e-12), 12)
    assert found[CLIENT_MEAN] == (pytest.approx(0.7, abs=1e-12), 2)
    assert found["A"] == (pytest.approx(0.9, abs=1e-12), 10)
    assert found["B"] == (0.5, 2)


def test_fault_25_auc_pooled_and_mean_of_clients():
    clients = [one_feature("A", [0.6, 0.7], [0, 1]), one_feature("B", [0.1, 0.2], [0, 1])]
    _, evaluator = scored(clients)
    score = evaluator(tensor([[1.0], [1.0]]))["test", "auc"]
    assert client_mean(score.clients) == (1.0, 2)
    assert score.pooled == 0.75


# Fault 26: shapes


@pytest.mark.parametrize("column", [False, True], ids=["[n]", "[n, 1]"])
def test_fault_26_log_loss_does_not_depend_on_the_shape_of_the_outputs(column):
    class Column(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out if column else out[..., 0]

    federation = Federation([one_feature("A", [2.0, -2.0], [1, 0])], standardize=False)
    objective = objective_for(Column(1, 1, bias=False), "binary", 0.0)
    found = Evaluator(federation, objective, ("test",))(tensor([[1.0]]))
    assert found["test", "log_loss"].pooled == pytest.approx(0.126928, abs=5e-7)
    assert found["test", "log_loss"].clients.tolist() == pytest.approx([0.126928], abs=5e-7)
    assert found["test", "accuracy"].pooled == 1.0
    assert found["test", "auc"].pooled == 1.0


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(-1e4, 1e4), st.booleans()), min_size=1, max_size=20))
def test_fault_26_metrics_stay_in_their_ranges(records):
    scores, labels = zip(*records, strict=True)
    clients = [one_feature("A", scores, labels), one_feature("B", [1.0], [1])]
    _, evaluator = scored(clients)
    found = evaluator(tensor([[1.0], [1.0]]))
    for value in (found["test", "accuracy"].pooled, *found["test", "accuracy"].clients.tolist()):
        assert 0 <= value <= 1 + 1e-15
    assert 0 <= found["test", "log_loss"].pooled < math.inf
    right = np.mean([(s > 0) == y for s, y in records])
    assert found["test", "accuracy"].clients[0].item() == pytest.approx(right, abs=1e-12)


def test_accuracy_of_a_logit_of_zero_is_class_zero():
    assert accuracy(tensor([[0.0, 0.0]]), tensor([[0, 1]])).tolist() == [[1.0, 0.0]]
    wide = tensor([[[1.0, 3.0, 2.0], [5.0, 1.0, 1.0]]])
    assert accuracy(wide, torch.tensor([[1, 2]])).tolist() == [[1.0, 0.0]]


# Against scikit-learn, with padding, several buckets and clusters


@pytest.mark.parametrize("sizes", [[5, 5, 5, 5], [40, 7, 13, 2], [3, 1500, 7, 40]])
def test_scores_equal_scikit_learn(sizes):
    # Eighths: logits are exact, so that ties are ties for everybody.
    rng = np.random.default_rng(1)
    clients = []
    for k, n in enumerate(sizes):
        x = rng.integers(-8, 9, size=(n, 20)) / 8
        y = (rng.random(n) < 0.4).astype(int)
        y[:2] = 0, 1
        clients.append(Client(f"c{k}", ([[0.0] * 20], [0]), test=(x, y)))
    _, evaluator = scored(clients)
    theta = torch.from_numpy(rng.integers(-8, 9, size=(4, 20)) / 8)
    clusters = torch.tensor([1, 0, 1, 0])
    found = evaluator(theta, clusters)
    logits = [c.test[0] @ w for c, w in zip(clients, theta.numpy(), strict=True)]
    labels = [c.test[1] for c in clients]

    def reference(members):
        z = np.concatenate([logits[k] for k in members])
        y = np.concatenate([labels[k] for k in members])
        p = 1 / (1 + np.exp(-z))
        return {
            "log_loss": log_loss(y, p),
            "auc": roc_auc_score(y, z),
            "accuracy": accuracy_score(y, z > 0),
        }

    groups = {"pooled": range(4), 0: [1, 3], 1: [0, 2]}
    for metric in METRICS:
        score = found["test", metric]
        tolerance = {"abs": 1e-12}
        assert score.pooled == pytest.approx(reference(range(4))[metric], **tolerance)
        for k in range(4):
            assert score.clients[k].item() == pytest.approx(reference([k])[metric], **tolerance)
        for j in (0, 1):
            expected = reference(groups[j])[metric]
            assert score.clusters[j].item() == pytest.approx(expected, **tolerance)
        assert evaluator(theta)["test", metric].clusters is None


def multiclass_clients(rng, sizes, classes, d=4):
    clients = []
    for k, n in enumerate(sizes):
        y = rng.integers(0, classes, size=n)
        clients.append(
            Client(f"c{k}", ([[0.0] * d], [classes - 1]), test=(rng.normal(size=(n, d)), y))
        )
    return clients


def test_multiclass_scores_equal_scikit_learn():
    rng = np.random.default_rng(2)
    clients = multiclass_clients(rng, [30, 8, 17], 4)
    _, evaluator = scored(clients, task="multiclass")
    weights = rng.normal(size=(3, 4, 4))
    found = evaluator(torch.from_numpy(weights.reshape(3, -1)), torch.tensor([0, 0, 1]))
    logits = [c.test[0] @ w.T for c, w in zip(clients, weights, strict=True)]
    labels = [c.test[1] for c in clients]

    def check(members, value):
        z, y = (
            np.concatenate([logits[k] for k in members]),
            np.concatenate([labels[k] for k in members]),
        )
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        assert value("log_loss") == pytest.approx(log_loss(y, p, labels=range(4)), abs=1e-12)
        assert value("accuracy") == pytest.approx(accuracy_score(y, z.argmax(1)), abs=1e-12)
        assert value("auc") == pytest.approx(multiclass_reference(z, y), abs=1e-12)

    check(range(3), lambda metric: found["test", metric].pooled)
    check([0, 1], lambda metric: found["test", metric].clusters[0].item())
    for k in range(3):
        check([k], lambda metric, k=k: found["test", metric].clients[k].item())


def test_multiclass_auc_is_scikit_learns_macro_one_versus_rest():
    rng = np.random.default_rng(3)
    (client,) = multiclass_clients(rng, [60], 3)
    _, evaluator = scored([client], task="multiclass")
    w = rng.normal(size=(3, 4))
    z = client.test[0] @ w.T
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    expected = roc_auc_score(client.test[1], p, multi_class="ovr", average="macro")
    found = evaluator(torch.from_numpy(w.reshape(1, -1)))["test", "auc"].pooled
    assert found == pytest.approx(expected, abs=1e-12)


def test_multiclass_auc_does_not_change_when_all_logits_of_a_record_are_shifted():
    # The same vector added to the weights of every class leaves all probabilities as they are.
    rng = np.random.default_rng(4)
    (client,) = multiclass_clients(rng, [60], 3)
    _, evaluator = scored([client], task="multiclass")
    w = rng.normal(size=(3, 4))
    before, after = (
        evaluator(torch.from_numpy(v.reshape(1, -1)))["test", "auc"].pooled
        for v in (w, w + rng.normal(size=4))
    )
    assert after == pytest.approx(before, abs=1e-12)


def test_multiclass_auc_counts_the_classes_present_only():
    x = np.eye(3)
    client = Client("a", ([[0.0] * 3], [2]), test=(x[[0, 0, 1]], [0, 0, 1]))
    _, evaluator = scored([client], task="multiclass")
    found = evaluator(tensor(5 * np.eye(3)).reshape(1, -1))["test", "auc"]
    assert found.pooled == 1.0
    alone = Client("a", ([[0.0] * 3], [2]), test=(x[[0, 0]], [0, 0]))
    _, evaluator = scored([alone], task="multiclass")
    assert math.isnan(evaluator(tensor(np.eye(3)).reshape(1, -1))["test", "auc"].pooled)


def test_extreme_logits_are_scored():
    clients = [one_feature("A", [1.0, -1.0], [0, 1]), one_feature("B", [1.0, -1.0], [1, 0])]
    _, evaluator = scored(clients)
    found = evaluator(tensor([[1e4], [1e4]]))
    assert found["test", "log_loss"].clients.tolist() == [1e4, 0.0]
    assert found["test", "log_loss"].pooled == 5e3
    assert found["test", "accuracy"].clients.tolist() == [0.0, 1.0]


# Who is scored


def test_dishonest_clients_are_left_out_of_pooled_means_and_clusters():
    clients = [
        one_feature("A", [1.0, -1.0], [1, 0]),
        one_feature("B", [1.0, -1.0, 2.0], [0, 1, 0], honest=False),
        one_feature("C", [1.0, 1.0], [1, 0]),
    ]
    federation, evaluator = scored(clients)
    theta, clusters = tensor([[1.0], [1.0], [1.0]]), torch.tensor([0, 0, 1])
    found = evaluator(theta, clusters)["test", "accuracy"]
    # A right on 2 of 2, C on 1 of 2; B, wrong on all, does not count.
    assert found.pooled == 0.75
    assert found.clients.tolist() == [1.0, 0.0, 0.5]
    assert found.clusters.tolist() == [1.0, 0.5]
    assert client_mean(found.clients, federation.honest) == (0.75, 2)
    assert evaluator(theta, clusters)["test", "auc"].clusters.tolist() == [1.0, 0.5]
    history = History(federation.names, evaluator.n, federation.honest)
    history.add(1, evaluator(theta, clusters))
    counted = {r.client: r.n for r in history.rows() if r.metric == "accuracy"}
    assert counted == {
        POOLED: 4,
        CLIENT_MEAN: 2,
        "(cluster 0)": 2,
        "(cluster 1)": 2,
        "A": 2,
        "B": 3,
        "C": 2,
    }


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_dishonest_client_can_not_spoil_the_pooled_values(broken):
    clients = [
        one_feature("A", [1.0, -1.0], [1, 0]),
        one_feature("B", [1.0, -1.0], [0, 1], honest=False),
    ]
    _, evaluator = scored(clients)
    found = evaluator(tensor([[0.0], [broken]]), torch.tensor([0, 0]))
    for metric, expected in (("log_loss", math.log(2)), ("auc", 0.5), ("accuracy", 0.5)):
        assert found["test", metric].pooled == pytest.approx(expected, abs=1e-12)
        assert found["test", metric].clusters[0].item() == pytest.approx(expected, abs=1e-12)


def test_clients_without_test_records_have_no_score():
    clients = [
        one_feature("A", [1.0, -1.0], [1, 0]),
        Client("B", ([[0.0]], [0])),
        one_feature("C", [1.0, 1.0], [1, 0]),
    ]
    _, evaluator = scored(clients)
    for weight in (1.0, math.inf):
        found = evaluator(tensor([[1.0], [weight], [1.0]]), torch.tensor([0, 0, 1]))
        score = found["test", "accuracy"]
        assert math.isnan(score.clients[1].item())
        assert (score.clients[0].item(), score.clients[2].item()) == (1.0, 0.5)
        assert score.pooled == 0.75
        assert score.clusters.tolist() == [1.0, 0.5]
        assert client_mean(score.clients) == (0.75, 2)


def test_a_cluster_without_honest_records_has_no_score():
    clients = [one_feature("A", [1.0, -1.0], [1, 0]), Client("B", ([[0.0]], [0]))]
    _, evaluator = scored(clients)
    for metric in METRICS:
        score = evaluator(tensor([[1.0], [1.0]]), torch.tensor([0, 1]))["test", metric]
        assert score.clusters[0].isfinite()
        assert score.clusters[1].isnan()


def test_each_split_is_scored_on_its_own_records():
    client = Client(
        "A",
        ([[1.0], [-1.0]], [1, 0]),
        test=([[1.0], [-1.0]], [0, 1]),
        validation=([[1.0], [1.0]], [1, 0]),
    )
    _, evaluator = scored([client], ("train", "test", "validation"))
    found = evaluator(tensor([[1.0]]))
    accuracies = [found[split, "accuracy"].pooled for split in ("train", "test", "validation")]
    assert accuracies == [1.0, 0.0, 0.5]


def test_scores_do_not_depend_on_the_order_clients_are_given_in():
    rng = np.random.default_rng(5)
    clients = [
        one_feature(name, rng.normal(size=n).round(1), rng.integers(0, 2, n))
        for name, n in zip("abcd", (3, 9, 5, 7), strict=True)
    ]
    theta = tensor([[1.0], [-2.0], [0.5], [3.0]])
    first = scored(clients)[1](theta)
    for order in itertools.islice(itertools.permutations(clients), 1, None, 5):
        again = scored(order)[1](theta)
        for key, score in first.items():
            assert again[key].pooled == score.pooled
            assert torch.equal(again[key].clients.nan_to_num(9), score.clients.nan_to_num(9))


def test_unknown_metrics_and_splits_are_refused():
    clients = [one_feature("A", [1.0], [1])]
    with pytest.raises(OptionError, match=r"'log_los'.*Did you mean 'log_loss'"):
        scored(clients, metrics=("log_los",))
    with pytest.raises(OptionError, match=r"'tests'.*train, test or validation"):
        scored(clients, ("tests",))
    with pytest.raises(OptionError, match="no honest client has a validation record"):
        scored(clients, ("validation",))
    liars = [one_feature("A", [1.0], [1], honest=False)]
    with pytest.raises(OptionError, match="no honest client has a test record"):
        scored(liars)


def test_client_mean():
    values = tensor([1.0, math.nan, 3.0, 8.0])
    assert client_mean(values) == (4.0, 3)
    assert client_mean(values, torch.tensor([True, True, True, False])) == (2.0, 2)
    mean, count = client_mean(tensor([math.nan]))
    assert math.isnan(mean)
    assert count == 0


# The long table


def two_rounds(clients, rounds=(1, 2)):
    federation, evaluator = scored(clients, metrics=("accuracy",))
    history = History(federation.names, evaluator.n, federation.honest, seed=7)
    labels = torch.tensor([0] * (len(clients) - 1) + [1])
    for i, round in enumerate(rounds):
        theta = torch.full((len(clients), 1), (-1.0) ** i, dtype=torch.float64)
        history.add(round, evaluator(theta, labels))
    return history


def test_long_table_has_every_value_of_every_round():
    clients = [one_feature("A", [1.0, -1.0, 1.0], [1, 0, 1]), one_feature("B", [1.0], [0])]
    rows = list(two_rounds(clients, rounds=(5, 10)).rows())

    def row(round, client, value, n):
        return Row(7, round, client, "test", "personal", "accuracy", value, n)

    assert rows == [
        row(5, POOLED, 0.75, 4),
        row(5, CLIENT_MEAN, 0.5, 2),
        row(5, "(cluster 0)", 1.0, 3),
        row(5, "(cluster 1)", 0.0, 1),
        row(5, "A", 1.0, 3),
        row(5, "B", 0.0, 1),
        row(10, POOLED, 0.25, 4),
        row(10, CLIENT_MEAN, 0.5, 2),
        row(10, "(cluster 0)", 0.0, 3),
        row(10, "(cluster 1)", 1.0, 1),
        row(10, "A", 0.0, 3),
        row(10, "B", 1.0, 1),
    ]
    assert all(type(r.value) is float and type(r.n) is int for r in rows)


def test_per_client_values_of_many_clients_are_kept_for_the_last_round_only():
    for count, kept in ((PER_CLIENT_LIMIT, {1, 2, 3}), (PER_CLIENT_LIMIT + 1, {3})):
        clients = [one_feature(f"c{k:03}", [1.0], [1]) for k in range(count)]
        history = two_rounds(clients, rounds=(1, 2, 3))
        rows = list(history.rows())
        assert {r.round for r in rows if r.client == "c000"} == kept
        assert {r.round for r in rows if r.client == "(cluster 0)"} == kept
        pooled = [(r.round, r.value, r.n) for r in rows if r.client == POOLED]
        assert pooled == [(1, 1.0, count), (2, 0.0, count), (3, 1.0, count)]
        assert history.pooled("test", "accuracy").tolist() == [1.0, 0.0, 1.0]
        assert history.last("test", "accuracy").pooled == 1.0
