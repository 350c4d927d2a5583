"""Losses of the linear models: by hand, by plain NumPy, and beside what training computes."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedtopo_torch.algorithms import FedAvg
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.models.logistic import default_model
from fedtopo_torch.theory import LinearLosses, NotConverged
from fedtopo_torch.trainer import Trainer

SIZES = [21, 7, 40, 33]


def one_client(x, y, **settings):
    """Losses of a single client, on the features as given."""
    l2 = settings.pop("l2", 0.0)
    x = np.array(x, dtype=float).reshape(len(y), -1)
    federation = Federation([Client("a", (x, np.array(y)))], standardize=False, **settings)
    return LinearLosses.of(federation, l2=l2)


@pytest.fixture(params=[2, 3], ids=["logistic", "softmax"])
def federation(request, make_federation):
    return make_federation(SIZES, d=4, classes=request.param)


@pytest.fixture
def losses(federation):
    return LinearLosses.of(federation, l2=0.05)


def some_rows(losses, seed=0):
    return np.random.default_rng(seed).normal(size=(len(losses.n), losses.p))


# By hand


def test_two_records_by_hand():
    # At theta = (0, 0) every probability is 1/2; x = 1 has label 1, x = -1 has label 0.
    losses = one_client([1, -1], [1, 0], l2=0.5)
    assert losses.loss([0, 0]) == pytest.approx([np.log(2)], abs=1e-15)
    assert losses.gradient([0, 0]).tolist() == [[-0.5, 0.0]]
    assert losses.hessian([0, 0], [1.0]).tolist() == [[0.75, 0.0], [0.0, 0.75]]
    # X'X/n is the identity: L = 1/4 + 1/2.
    assert losses.smoothness().tolist() == [0.75]
    # At theta = (0, 2) the L2 term is 1/2 (1/2) 4 = 1: the bias counts.
    record = (np.log1p(np.exp(2)) - 2 + np.log1p(np.exp(2))) / 2
    assert losses.loss([0, 2]) == pytest.approx([record + 1], abs=1e-15)


def test_softmax_by_hand():
    # One record x = 2 of class 1 of 3; at theta = 0 each has probability 1/3.
    losses = one_client([2], [1], task="multiclass", n_classes=3, l2=0.1)
    zero = np.zeros(6)
    assert losses.p == 6
    assert losses.loss(zero) == pytest.approx([np.log(3)], abs=1e-15)
    # Weights of the classes first, then their biases.
    expected = [2 / 3, -4 / 3, 2 / 3, 1 / 3, -2 / 3, 1 / 3]
    assert losses.gradient(zero)[0] == pytest.approx(expected, abs=1e-15)
    # Between the biases of classes 0 and 1 it is -1/9; of one bias with itself 1/3 - 1/9 + l2.
    hessian = losses.hessian(zero, [1.0])
    assert hessian[3, 4] == pytest.approx(-1 / 9, abs=1e-15)
    assert hessian[3, 3] == pytest.approx(2 / 9 + 0.1, abs=1e-15)
    assert hessian[0, 4] == pytest.approx(-2 / 9, abs=1e-15)
    # X'X = (4, 2; 2, 1) has eigenvalue 5: L = 5/2 + 0.1.
    assert losses.smoothness() == pytest.approx([2.6], abs=1e-14)


def test_the_minimum_of_a_bias_alone_is_the_log_odds():
    # A constant feature is centred to 0, so that only the bias learns: 3 of 4 labels are 1.
    federation = Federation([Client("a", (np.ones((4, 1)), np.array([1, 1, 1, 0])))])
    losses = LinearLosses.of(federation, l2=1e-9)
    assert losses.minimiser([1.0]) == pytest.approx([0.0, np.log(3)], abs=1e-7)


def test_attributes(make_federation):
    federation = make_federation([10, 30], d=4, names=["b", "a"])
    losses = LinearLosses.of(federation)
    assert losses.names == ("a", "b")
    assert losses.n.tolist() == [30, 10]
    assert losses.shares.tolist() == [0.75, 0.25]
    assert (losses.p, losses.l2) == (5, 0.01)


# Beside independent derivations


def test_loss_in_plain_numpy(federation, losses):
    rows = some_rows(losses)
    for k, (value, row) in enumerate(zip(losses.loss(rows), rows, strict=True)):
        features, labels = (part.numpy() for part in federation.train.client(k))
        weight, bias = row[: -losses.outputs].reshape(losses.outputs, -1), row[-losses.outputs :]
        total = 0.0
        for x, y in zip(features, labels.astype(int), strict=True):
            logits = weight @ x + bias
            scores = np.exp([0.0, logits[0]] if losses.outputs == 1 else logits)
            total -= np.log(scores[y] / scores.sum())
        expected = total / len(labels) + 0.05 / 2 * (row @ row)
        assert value == pytest.approx(expected, rel=1e-13)


def test_derivatives_by_finite_differences(losses):
    rows, h = some_rows(losses), 1e-6
    gradient, hessians = losses.gradient(rows), losses.hessians(rows)
    for i, step in enumerate(h * np.eye(losses.p)):
        slope = (losses.loss(rows + step) - losses.loss(rows - step)) / (2 * h)
        assert gradient[:, i] == pytest.approx(slope, abs=1e-8)
        curvature = (losses.gradient(rows + step) - losses.gradient(rows - step)) / (2 * h)
        assert hessians[:, i] == pytest.approx(curvature, abs=1e-8)


def test_hessian_is_the_weighted_sum_over_clients(losses):
    theta, weights = some_rows(losses)[0], np.array([0.5, 0.0, 2.0, 0.25])
    expected = np.tensordot(weights, losses.hessians(theta), axes=1)
    assert losses.hessian(theta, weights) == pytest.approx(expected, abs=1e-13)


def test_the_hessian_lies_between_l2_and_the_smoothness(losses):
    for scale in (0.0, 0.1, 10.0):
        spectrum = np.linalg.eigvalsh(losses.hessians(scale * some_rows(losses)))
        assert (spectrum >= 0.05 - 1e-14).all()
        assert (spectrum <= losses.smoothness()[:, None] + 1e-12).all()


@pytest.mark.parametrize("closed_form", [True, False])
def test_what_training_computes(federation, losses, closed_form):
    trainer = Trainer(
        FedAvg(), federation, default_model(federation.task), l2=0.05, closed_form=closed_form
    )
    objective, rows = trainer.objective, torch.from_numpy(some_rows(losses))
    for data in objective.data(federation.train):
        own = rows[data.rows]
        expected = objective.loss(own, data).numpy()
        assert losses.loss(rows)[data.rows] == pytest.approx(expected, abs=1e-12)
        expected = objective.gradient(own, data).numpy()
        assert losses.gradient(rows)[data.rows] == pytest.approx(expected, abs=1e-12)
        expected = objective.smoothness(data).numpy()
        assert losses.smoothness()[data.rows] == pytest.approx(expected, abs=1e-12)


def test_float32_federations_are_computed_in_float64(make_clients):
    clients = make_clients(SIZES, d=4)
    losses = LinearLosses.of(Federation(clients, dtype=torch.float32))
    reference = LinearLosses.of(Federation(clients))
    rows = torch.from_numpy(some_rows(losses)).float()
    for values in (losses.loss(rows), losses.gradient(rows), losses.minimiser(losses.shares)):
        assert values.dtype == np.float64
    # The features were rounded to float32; nothing else was.
    design = reference.design.astype(np.float32).astype(np.float64)
    assert np.array_equal(losses.design, design)


# Minima


def test_minimiser_beside_scikit_learn(losses):
    weights = np.array([0.1, 0.0, 0.6, 0.3])
    theta = losses.minimiser(weights)
    # Its penalty is |w|^2 / 2 with the bias left out: here the bias is a column like the others.
    reference = LogisticRegression(
        C=1 / 0.05, fit_intercept=False, solver="newton-cholesky", tol=1e-12, max_iter=1000
    ).fit(losses.design, losses.labels, sample_weight=np.repeat(weights / losses.n, losses.n))
    expected = np.concatenate([reference.coef_[:, :-1].ravel(), reference.coef_[:, -1]])
    assert theta == pytest.approx(expected, abs=1e-7)


def test_minima_have_no_gradient(losses):
    weights = np.array([1.0, 3.0, 4.0, 4.0])
    within = {0: [0.25, 0.75, 0, 0], 1: [0, 0, 0.5, 0.5]}
    optima = losses.cluster_optima([0, 0, 1, 1], weights)
    for j, theta in enumerate(optima):
        gradient = np.array(within[j]) @ losses.gradient(theta)
        assert np.linalg.norm(gradient) <= 1e-10
    own = losses.client_optima()
    assert np.linalg.norm(losses.gradient(own), axis=1).max() <= 1e-10
    shared = losses.minimiser(losses.shares)
    assert np.linalg.norm(losses.shares @ losses.gradient(shared)) <= 1e-10
    assert losses.cluster_optima([0, 1, 2, 3], losses.n) == pytest.approx(own, abs=1e-12)
    assert losses.cluster_optima([0] * 4, losses.n)[0] == pytest.approx(shared, abs=1e-12)


def test_without_l2_a_minimum_is_found_where_there_is_one():
    x, y = [-2, -1, 0, 1, 2, 3], [0, 1, 0, 1, 0, 1]
    losses = one_client(x, y)
    theta = losses.minimiser([1.0])
    assert np.linalg.norm(losses.gradient(theta)) <= 1e-10
    reference = LogisticRegression(C=np.inf, tol=1e-12, max_iter=1000).fit(np.c_[x], y)
    expected = [*reference.coef_[0], *reference.intercept_]
    assert theta == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("x", "y", "settings", "message"),
    [
        ([-1, -2, 1, 2], [0, 0, 1, 1], {}, "no minimum: the two classes can be separated"),
        # One record of each class on the boundary: still nothing stops theta.
        ([-1, 0, 0, 2], [0, 0, 1, 1], {}, "no minimum"),
        ([1, 2, 3], [1, 1, 1], {}, "no minimum"),
        ([[1, 2], [2, 4], [3, 6], [4, 8]], [0, 1, 0, 1], {}, "not unique: feature columns"),
        ([-1, 0, 1], [0, 1, 2], {"task": "multiclass"}, "softmax regression is not unique"),
    ],
)
def test_without_l2_what_has_no_single_minimum_is_refused(x, y, settings, message):
    with pytest.raises(ValueError, match=f"l2 = 0.*{message}"):
        one_client(x, y, **settings).minimiser([1.0])


def test_a_minimum_that_rounding_hides_is_an_error():
    rng = np.random.default_rng(0)
    losses = one_client(1e9 * rng.normal(size=(40, 3)), rng.integers(0, 2, 40), l2=0.01)
    with pytest.raises(NotConverged, match=r"gradient norm is .*standardised features"):
        losses.minimiser([1.0])


# Refused


def test_wrong_arguments_are_refused(losses, make_federation):
    p = losses.p
    with pytest.raises(ValueError, match=rf"shape \[3, {p}\].*\[4, {p}\] with one row per client"):
        losses.loss(np.zeros((3, p)))
    with pytest.raises(ValueError, match=rf"shape \[4, {p}\]: must be \[{p}\]"):
        losses.hessian(np.zeros((4, p)), losses.shares)
    with pytest.raises(ValueError, match="weights sum to 2: must sum to 1"):
        losses.minimiser([0.5] * 4)
    for weights in ([1.0], [2, -1, 0, 0], [np.nan, 1, 0, 0]):
        with pytest.raises(ValueError, match="weights must be 4 numbers of at least 0"):
            losses.minimiser(weights)
    for l2 in (-0.1, np.nan, np.inf):
        with pytest.raises(ValueError, match="l2 is"):
            LinearLosses.of(make_federation([5, 5]), l2=l2)
    images = Federation([Client("a", (np.zeros((4, 2, 2)), [0, 1, 0, 1]))])
    with pytest.raises(ValueError, match=r"one row of features.*\[2, 2\]"):
        LinearLosses.of(images)
