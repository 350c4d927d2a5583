"""The round map beside the trainer's rounds, and what is proved of it, on random federations."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtopo_torch.algorithms import Clustered, PTopoFL
from fedtopo_torch.models.logistic import default_model
from fedtopo_torch.theory import (
    LinearLosses,
    NotConverged,
    contraction_factor,
    drift_bound,
    fixed_point,
    round_map,
    within_share,
)
from fedtopo_torch.trainer import Trainer

SIZES = [21, 30, 40, 33, 25]
# 20 random federations each.
PROPERTY = settings(
    derandomize=True,
    max_examples=20,
    deadline=None,
    # The fixture is a plain function.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SEEDS = st.integers(0, 10_000)
# The slack for rounding that every bound is allowed.
SLACK = 1e-6


class Case:
    """A random small federation, partition, weights, blending and local steps."""

    def __init__(self, seed, make_federation):
        rng = self.rng = np.random.default_rng(seed)
        clients, classes = int(rng.integers(2, 6)), int(rng.integers(2, 4))
        sizes = rng.integers(5, 40, size=clients).tolist()
        federation = make_federation(sizes, d=int(rng.integers(1, 4)), classes=classes, seed=seed)
        self.losses = LinearLosses.of(federation, l2=float(10 ** rng.uniform(-2, 0)))
        clusters = int(rng.integers(1, clients + 1))
        labels = [*range(clusters), *rng.integers(0, clusters, size=clients - clusters)]
        self.labels = rng.permutation(labels)
        self.weights = rng.uniform(0.1, 1.0, size=clients)
        self.members = self.weights * (self.labels == np.arange(clusters)[:, None])
        self.members /= self.members.sum(axis=1, keepdims=True)
        self.alpha = float(rng.choice([0.0, 1.0, rng.uniform()]))
        self.largest = float(self.losses.smoothness().max())
        self.eta = float(rng.choice([1.0, rng.uniform(0.05, 1.0)])) / self.largest
        self.tau = int(rng.integers(1, 12))

    def round(self, theta):
        losses, labels, weights = self.losses, self.labels, self.weights
        return round_map(losses, theta, labels, weights, self.alpha, self.eta, self.tau)

    def fixed_point(self, **changed):
        settings = {"alpha": self.alpha, "eta": self.eta, "local_steps": self.tau} | changed
        return fixed_point(self.losses, self.labels, self.weights, **settings)

    def start(self):
        return self.rng.normal(scale=3.0, size=(len(self.members), self.losses.p))


@pytest.fixture
def make_case(make_federation):
    return lambda seed: Case(seed, make_federation)


def distance(a, b):
    return np.linalg.norm(a - b, axis=1).max()


# The map


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(("labels", "alpha", "tau"), [((0, 1, 0, 2, 1), 0.3, 4), ((0,) * 5, 0, 1)])
def test_round_map_is_the_trainers_round(make_federation, classes, labels, alpha, tau):
    federation = make_federation(SIZES, classes=classes)
    algorithm = Clustered(labels=labels, alpha=alpha)
    result = Trainer(
        algorithm, federation, default_model(federation.task), rounds=7, local_steps=tau
    ).run()
    losses = LinearLosses.of(federation)
    theta = np.zeros((max(labels) + 1, losses.p))
    for _ in range(7):
        theta = round_map(losses, theta, labels, losses.n, alpha, result.facts.eta, tau)
    assert theta == pytest.approx(result.server["theta"].numpy(), abs=1e-12)
    assert theta[list(labels)] == pytest.approx(result.theta.numpy(), abs=1e-12)


def test_round_map_takes_the_state_of_a_method_as_it_is(make_federation):
    federation = make_federation(SIZES)
    result = Trainer(PTopoFL(), federation, default_model("binary"), rounds=3).run()
    server, facts = result.server, result.facts
    losses, theta = LinearLosses.of(federation), torch.zeros(2, 4)
    for _ in range(3):
        theta = round_map(
            losses,
            theta,
            server["labels"],
            server["weights"],
            float(server["alpha"]),
            facts.eta,
            facts.local_steps,
        )
    assert theta == pytest.approx(server["theta"].numpy(), abs=1e-12)


# Fixed points


def test_one_cluster_and_one_local_step_end_at_the_global_optimum(make_federation):
    losses = LinearLosses.of(make_federation(SIZES, classes=3))
    eta = 1 / losses.smoothness().max()
    for alpha in (0.0, 0.5):
        theta = fixed_point(losses, [0] * 5, losses.n, alpha, eta, 1)
        assert theta[0] == pytest.approx(losses.minimiser(losses.shares), abs=1e-8)


def test_clusters_of_one_end_at_the_clients_optima_whatever_tau(make_federation):
    losses = LinearLosses.of(make_federation(SIZES))
    theta = fixed_point(losses, range(5), losses.n, 0.0, 1 / losses.smoothness().max(), 25)
    assert theta == pytest.approx(losses.client_optima(), abs=1e-9)


def test_full_blending_makes_clusters_equal(make_federation):
    losses = LinearLosses.of(make_federation(SIZES))
    eta = 1 / losses.smoothness().max()
    theta = fixed_point(losses, [0, 0, 1, 1, 2], losses.n, 1.0, eta, 3)
    assert theta == pytest.approx(np.repeat(theta[:1], 3, axis=0), abs=1e-11)
    # As if there were one cluster: within-cluster weights n_k and masses omega are p_k again.
    assert theta[:1] == pytest.approx(fixed_point(losses, [0] * 5, losses.n, 0, eta, 3), abs=1e-9)


@given(SEEDS)
@PROPERTY
def test_fixed_point_stays_and_is_where_plain_rounds_go(make_case, seed):
    case = make_case(seed)
    star = case.fixed_point()
    assert distance(case.round(star), star) <= 1e-12
    q, theta = contraction_factor(case.eta, case.losses.l2, case.tau), case.start()
    before, rounds = distance(theta, star), 60
    for _ in range(rounds):
        theta = case.round(theta)
    # No further than the contraction promises, and for most cases that is close.
    assert distance(theta, star) <= q**rounds * before + 1e-9


def test_plain_rounds_take_over_where_newton_fails(make_federation, monkeypatch):
    losses = LinearLosses.of(make_federation(SIZES), l2=0.5)
    case = (losses, [0, 0, 1, 1, 1], losses.n, 0.1, 1 / losses.smoothness().max(), 5)
    star = fixed_point(*case)
    monkeypatch.setattr("fedtopo_torch.theory.rounds._newton_step", lambda r, *_: 100 * r)
    assert fixed_point(*case) == pytest.approx(star, abs=1e-11)


def test_a_fixed_point_that_is_not_reached_is_an_error(make_federation, monkeypatch):
    losses = LinearLosses.of(make_federation(SIZES))
    monkeypatch.setattr("fedtopo_torch.theory.rounds.MOST_STEPS", 2)
    with pytest.raises(NotConverged, match=r"not found in 2 steps: the residual is .*e-"):
        fixed_point(losses, range(5), losses.n, 0.1, 0.1, 5)


# Results of docs/analysis.md


@given(SEEDS)
@PROPERTY
def test_contraction_towards_the_fixed_point(make_case, seed):
    case = make_case(seed)
    star, theta = case.fixed_point(), case.start()
    q, first = contraction_factor(case.eta, case.losses.l2, case.tau), distance(theta, star)
    for t in range(1, 15):
        theta = case.round(theta)
        assert distance(theta, star) <= q**t * first + SLACK


@given(SEEDS)
@PROPERTY
def test_contraction_of_any_two_starts(make_case, seed):
    case = make_case(seed)
    one, other = case.start(), case.start()
    q = contraction_factor(case.eta, case.losses.l2, case.tau)
    assert distance(case.round(one), case.round(other)) <= q * distance(one, other) + 1e-12


@given(SEEDS)
@PROPERTY
def test_gradients_do_not_grow_along_descent(make_case, seed):
    case = make_case(seed)
    losses, shrink = case.losses, 1 - case.eta * case.losses.l2
    rows = case.start()[case.labels]
    before = np.linalg.norm(losses.gradient(rows), axis=1)
    for _ in range(10):
        rows = rows - case.eta * losses.gradient(rows)
        after = np.linalg.norm(losses.gradient(rows), axis=1)
        assert (after <= shrink * before + 1e-12).all()
        before = after


@given(SEEDS)
@PROPERTY
def test_drift_bound_holds(make_case, seed):
    case = make_case(seed)
    losses, star = case.losses, case.fixed_point(alpha=0.0)
    optima = losses.cluster_optima(case.labels, case.weights)
    for own, theta, optimum in zip(case.members, star, optima, strict=True):
        gradient_norm = float(own @ np.linalg.norm(losses.gradient(theta), axis=1))
        largest = float(losses.smoothness()[own > 0].max())
        bound = drift_bound(case.eta, case.tau, largest, losses.l2, gradient_norm)
        assert np.linalg.norm(theta - optimum) <= bound + SLACK


@given(SEEDS)
@PROPERTY
def test_heterogeneity_floor_lies_between_its_bounds(make_case, seed):
    case = make_case(seed)
    losses, shares, labels = case.losses, case.losses.shares, case.labels
    optima = losses.client_optima()
    models = losses.cluster_optima(labels, losses.n)
    floor = shares @ (losses.loss(models[labels]) - losses.loss(optima))
    mean = shares @ optima
    dispersion = shares @ ((optima - mean) ** 2).sum(axis=1)
    within = within_share(optima, labels, shares) * dispersion
    assert losses.l2 / 2 * within <= floor + SLACK
    assert floor <= case.largest / 2 * within + SLACK
    # A model per cluster never costs training loss over one for all.
    shared = losses.minimiser(shares)
    assert floor <= shares @ (losses.loss(shared) - losses.loss(optima)) + SLACK


# Refused


def test_wrong_arguments_are_refused(make_federation):
    losses = LinearLosses.of(make_federation(SIZES))
    free = LinearLosses.of(make_federation(SIZES), l2=0)
    eta, labels, n = 1 / losses.smoothness().max(), [0, 0, 1, 1, 1], losses.n
    with pytest.raises(ValueError, match=r"analysis needs 0 < eta <= 1/L"):
        fixed_point(losses, labels, n, 0.1, 1.01 * eta, 5)
    with pytest.raises(ValueError, match="l2 = 0 a round need not contract"):
        fixed_point(free, labels, n, 0.1, 0.1, 5)
    with pytest.raises(ValueError, match="tolerance is 0"):
        fixed_point(losses, labels, n, 0.1, eta, 5, tolerance=0)
    with pytest.raises(ValueError, match=r"theta has shape \[3, 4\]: must be \[2, 4\]"):
        round_map(losses, np.zeros((3, 4)), labels, n, 0.1, eta, 5)
    with pytest.raises(ValueError, match=r"alpha is -0\.1"):
        round_map(losses, np.zeros((2, 4)), labels, n, -0.1, eta, 5)
    with pytest.raises(ValueError, match="local_steps is True"):
        round_map(losses, np.zeros((2, 4)), labels, n, 0.1, eta, True)
    with pytest.raises(ValueError, match="weights must be 5 finite numbers"):
        round_map(losses, np.zeros((2, 4)), labels, n[:4], 0.1, eta, 5)
    with pytest.raises(ValueError, match="labels must be 5 whole numbers"):
        round_map(losses, np.zeros((2, 4)), labels[:4], n, 0.1, eta, 5)
    # Beyond 1/L a round is still a round; only what relies on the analysis refuses.
    assert np.isfinite(round_map(losses, np.zeros((2, 4)), labels, n, 0.1, 1.5 * eta, 5)).all()
