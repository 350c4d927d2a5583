"""The closed forms: by hand, and against what they describe, simulated on quadratics."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtopo_torch.theory import (
    calibrated_alpha,
    contraction_factor,
    drift_bound,
    effective_blending,
    retained_spread,
    stochastic_floor,
    within_share,
)

PROPERTY = settings(derandomize=True, max_examples=50, deadline=None)
SEEDS = st.integers(0, 10_000)


# Contraction and calibration


def test_calibrated_alpha_by_hand():
    # q = (1 - 0.5)^2 = 1/4: alpha = 0.3 0.75 / (1 - 0.075)
    assert contraction_factor(0.5, 1.0, 2) == 0.25
    assert calibrated_alpha(0.3, 0.5, 1.0, 2) == pytest.approx(0.225 / 0.925, abs=1e-15)


@pytest.mark.parametrize(("eta", "mu", "tau"), [(0.1, 0.01, 10), (0.1, 0.0, 10), (3.0, 1.0, 1)])
def test_calibrated_alpha_at_the_ends_of_abar(eta, mu, tau):
    assert calibrated_alpha(0.0, eta, mu, tau) == 0.0
    assert calibrated_alpha(1.0, eta, mu, tau) == 1.0


@given(st.floats(0, 1), st.floats(1e-3, 1), st.floats(1e-3, 1), st.integers(1, 100))
@PROPERTY
def test_calibration_gives_abar_in_directions_of_curvature_mu(abar, eta, mu, tau):
    alpha = calibrated_alpha(abar, eta, mu, tau)
    assert effective_blending(alpha, mu, eta, tau) == pytest.approx(abar, abs=1e-11)
    # Steeper directions are blended less: abar is the most that any is.
    assert effective_blending(alpha, (mu + 1 / eta) / 2, eta, tau) <= abar + 1e-11


def test_calibration_at_the_ends():
    for abar in (0.0, 1.0):
        assert effective_blending(calibrated_alpha(abar, 0.5, 0.01, 10), 0.01, 0.5, 10) == abar


def test_calibration_makes_the_result_independent_of_tau_at_mu_only():
    def odds(h, tau):
        abar = effective_blending(calibrated_alpha(0.3, 0.5, 0.01, tau), h, 0.5, tau)
        return abar / (1 - abar)

    for tau in (1, 10, 1000):
        assert odds(0.01, tau) == pytest.approx(3 / 7, abs=1e-12)
    # With h = 20 mu they are 20 times smaller at tau = 1, and grow to the same with tau.
    assert odds(0.2, 1) == pytest.approx(3 / 7 / 20, abs=1e-12)
    assert odds(0.2, 10_000) == pytest.approx(3 / 7, abs=1e-12)


# Blending


def test_blending_by_hand():
    # q_h = 1 - 0.5: abar = 0.5 / (1 - 0.25), retained = 0.5 0.5 / 0.75
    assert effective_blending(0.5, 1.0, 0.5, 1) == pytest.approx(2 / 3, abs=1e-15)
    assert retained_spread(0.5, 1.0, 0.5, 1) == pytest.approx(1 / 3, abs=1e-15)


def test_blending_at_the_ends():
    h = np.array([1e-12, 0.1, 2.0])
    assert effective_blending(0.0, h, 0.5, 3).tolist() == [0, 0, 0]
    assert retained_spread(0.0, h, 0.5, 3).tolist() == [1, 1, 1]
    assert effective_blending(1.0, h, 0.5, 3).tolist() == [1, 1, 1]
    assert retained_spread(1.0, h, 0.5, 3).tolist() == [0, 0, 0]
    # eta h = 1: one step lands on the client's optimum, so alpha acts once.
    assert effective_blending(0.3, 2.0, 0.5, 3) == pytest.approx(0.3, abs=1e-15)


def test_no_digits_are_lost_where_curvature_is_small():
    # 1 - q_h = 3 10^-18 to 18 digits; alpha = 10^-18: abar = 1/4 exactly.
    assert effective_blending(1e-18, 1e-18, 1.0, 3) == pytest.approx(0.25, rel=1e-14)


@given(st.floats(0, 1), st.floats(1e-3, 1), st.integers(1, 50), SEEDS)
@PROPERTY
def test_blending_falls_with_curvature_and_adds_up_to_one(alpha, eta, tau, seed):
    h = np.sort(np.random.default_rng(seed).uniform(1e-6, 1, size=8)) / eta
    lost, kept = effective_blending(alpha, h, eta, tau), retained_spread(alpha, h, eta, tau)
    assert lost + kept == pytest.approx(np.ones(8), abs=1e-14)
    assert (np.diff(lost) <= 1e-15).all()
    assert (lost >= alpha - 1e-15).all()


@given(SEEDS)
@settings(PROPERTY, max_examples=20)
def test_the_blending_formula_is_exact_on_quadratics_with_a_common_hessian(seed):
    rng = np.random.default_rng(seed)
    clients, clusters, p = 6, 3, 4
    labels = np.array([0, 1, 2, 0, 1, 0])
    shares, tau = rng.dirichlet(np.ones(clients)), int(rng.integers(1, 8))
    alpha, eta = rng.uniform(0, 1), 1.0
    frame, _ = np.linalg.qr(rng.normal(size=(p, p)))
    h = rng.uniform(0.2, 1.0, size=p)
    hessian = frame * h @ frame.T
    centres = rng.normal(size=(clients, p))
    members = np.array([np.where(labels == j, rng.uniform(0.1, 1, 6), 0) for j in range(clusters)])
    members /= members.sum(axis=1, keepdims=True)
    omega = np.bincount(labels, weights=shares)

    theta = rng.normal(size=(clusters, p))
    for _ in range(400):
        rows = theta[labels]
        for _ in range(tau):
            rows = rows - eta * (rows - centres) @ hessian
        u = members @ rows
        theta = (1 - alpha) * u + alpha * (omega @ u)

    optima = members @ centres
    spread = (optima - omega @ optima) @ frame
    kept = (theta - omega @ theta) @ frame
    assert kept == pytest.approx(retained_spread(alpha, h, eta, tau) * spread, abs=1e-9)
    # Blending moves clusters, not their mean.
    assert omega @ theta == pytest.approx(omega @ optima, abs=1e-9)


# Drift


def test_drift_bound_by_hand():
    # 0.1 * 10 * 4 * 2 / (2 * 0.5)
    assert drift_bound(0.1, 11, 4.0, 0.5, 2.0) == pytest.approx(8.0, abs=1e-14)
    assert drift_bound(0.1, 1, 4.0, 0.5, 2.0) == 0.0


def test_the_drift_of_two_parabolas_by_hand():
    # F_1 = t^2 / 2 and F_2 = (t - 1)^2 / 4, weights 1/2, eta = 1, tau = 2: GD takes t to 0 and to
    # 1 - (1 - t) / 4, so t = 3/8 + t/8, t = 3/7; the minimiser is 1/3. Distance 2/21.
    # The slopes are 3/7 and -2/7: G = 5/14, L = 1, mu = 1/2: the bound is 5/14.
    assert drift_bound(1.0, 2, 1.0, 0.5, 5 / 14) == pytest.approx(5 / 14, abs=1e-15)
    t = 3 / 7
    assert t == pytest.approx(0.5 * 0 + 0.5 * (1 - (1 - t) / 4), abs=1e-15)
    assert abs(t - 1 / 3) < 5 / 14


# Noise


def test_stochastic_floor_by_hand():
    # 0.5 * 3 / (1 * 1.5) = 1; weights (1/4, 3/4) and (1): 10/16 and 1
    floor = stochastic_floor(0.5, 1.0, 3.0, [1, 3, 5], [0, 0, 1])
    assert floor == pytest.approx([0.625, 1.0], abs=1e-15)


def test_the_floor_falls_with_the_size_of_the_cluster():
    floor = stochastic_floor(0.1, 0.5, 1.0, np.ones(5), [0, 0, 0, 0, 1])
    assert floor[0] == pytest.approx(floor[1] / 4, rel=1e-14)


def simulated_error(hessians, alpha, seed, replicates=4000, eta=0.2, variance=2.0, tau=4):
    """E|theta_j - theta*_j(tau)|^2 of noisy rounds, long after the start ``[M]``."""
    rng = np.random.default_rng(seed)
    labels, weights = np.array([0, 0, 0, 1]), np.array([0.2, 0.3, 0.5, 1.0])
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    p = hessians.shape[-1]
    centres = rng.normal(size=(4, p))
    members, omega = np.stack([weights * (labels == j) for j in (0, 1)]), np.array([0.6, 0.4])
    assert omega == pytest.approx(np.bincount(labels, weights=shares))

    def step(theta, noise):
        rows = theta[:, labels]
        for _ in range(tau):
            slope = np.einsum("kij,rkj->rki", hessians, rows - centres)
            slope += noise * np.sqrt(variance / p) * rng.normal(size=rows.shape)
            rows = rows - eta * slope
        u = members @ rows
        return (1 - alpha) * u + alpha * (omega @ u)[:, None]

    star = np.zeros((1, 2, p))
    for _ in range(300):
        star = step(star, 0.0)
    theta = np.repeat(star, replicates, axis=0)
    errors = []
    for round in range(40):
        theta = step(theta, 1.0)
        if round >= 20:
            errors.append(((theta - star) ** 2).sum(axis=2).mean(axis=0))
    return np.mean(errors, axis=0), stochastic_floor(eta, 0.5, variance, weights, labels)


def test_stochastic_floor_is_reached_where_all_curvature_is_mu():
    error, floor = simulated_error(np.repeat(0.5 * np.eye(3)[None], 4, axis=0), 0.0, seed=0)
    assert error == pytest.approx(floor, rel=0.02)


def test_stochastic_floor_bounds_a_run_and_is_within_a_factor_of_three_of_it():
    frames = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 3, 3)))[0]
    curvature = np.array([0.5, 0.8, 2.0])
    hessians = frames * curvature @ frames.swapaxes(1, 2)
    error, floor = simulated_error(hessians, 0.0, seed=2)
    assert (error <= floor).all()
    assert (error >= floor / 3).all()


def test_stochastic_floor_of_the_noisiest_cluster_holds_for_all_when_they_are_blended():
    hessians = np.repeat(0.5 * np.eye(3)[None], 4, axis=0)
    error, floor = simulated_error(hessians, 0.3, seed=3)
    assert (error <= floor.max()).all()
    # Blending averages over clusters: the lonely client's noise is well below its own floor.
    assert error[1] < 0.8 * floor[1]


# Dispersion of the optima


def test_within_share_by_hand():
    # Points 0, 2 | 6, 8 with equal shares: within 1, mean 4, in all (16 + 4 + 4 + 16)/4 = 10.
    points = np.array([[0.0], [2.0], [6.0], [8.0]])
    assert within_share(points, [0, 0, 1, 1], [1, 1, 1, 1]) == pytest.approx(0.1, abs=1e-15)
    # Shares (3, 1) / 4 of points 0 and 4: mean 1. One more client at 1 is a cluster of its own.
    points = np.array([[0.0], [4.0], [1.0]])
    assert within_share(points, [0, 0, 1], [3, 1, 4]) == pytest.approx(1.0, abs=1e-15)


@given(SEEDS)
@PROPERTY
def test_within_share_at_the_ends_and_in_between(seed):
    rng = np.random.default_rng(seed)
    optima, shares = rng.normal(size=(6, 3)) + 5, rng.dirichlet(np.ones(6))
    labels = np.array([0, 1, 2, *rng.integers(0, 3, 3)])
    assert within_share(optima, np.zeros(6, dtype=int), shares) == pytest.approx(1, abs=1e-14)
    assert within_share(optima, np.arange(6), shares) == pytest.approx(0, abs=1e-14)
    rho = within_share(optima, labels, shares)
    assert 0 <= rho <= 1
    # Merging clusters never lowers it; moving and scaling the optima changes nothing.
    assert within_share(optima, np.minimum(labels, 1), shares) >= rho - 1e-14
    assert within_share(3 * optima - 7, labels, 2 * shares) == pytest.approx(rho, abs=1e-12)


def test_within_share_without_dispersion_is_refused():
    for optima in (np.full((3, 2), 0.1), np.ones((1, 2))):
        labels = np.zeros(len(optima), dtype=int)
        with pytest.raises(ValueError, match="all client optima are equal"):
            within_share(optima, labels, np.ones(len(optima)))


# Refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: effective_blending(1.5, 1.0, 0.1, 1), r"alpha is 1.5: must be in \[0, 1\]"),
        (lambda: effective_blending(np.nan, 1.0, 0.1, 1), "alpha is nan"),
        (lambda: effective_blending(0.5, 0.0, 0.1, 1), "h must be above 0 and at most 1/eta = 10"),
        (lambda: retained_spread(0.5, np.array([1.0, 11.0]), 0.1, 1), "h must be above 0"),
        (lambda: retained_spread(0.5, np.nan, 0.1, 1), "h must be above 0"),
        (lambda: retained_spread(0.5, 1.0, 0.0, 1), "eta is 0.0: must be a finite number above 0"),
        (lambda: retained_spread(0.5, 1.0, 0.1, 0), "local_steps is 0: must be a whole number"),
        (lambda: retained_spread(0.5, 1.0, 0.1, 1.5), "local_steps is 1.5"),
        (lambda: drift_bound(0.3, 2, 4.0, 1.0, 1.0), r"analysis needs 0 < eta <= 1/L"),
        (lambda: drift_bound(0.1, 2, 4.0, 0.0, 1.0), "mu is 0.0: must be above 0"),
        (lambda: drift_bound(0.1, 2, 4.0, 5.0, 1.0), "at most the smoothness 4.0"),
        (lambda: drift_bound(0.1, 2, 4.0, 1.0, -1.0), "gradient_norm is -1.0"),
        (lambda: stochastic_floor(0.1, 0.0, 1.0, [1], [0]), "mu is 0.0: must be above 0"),
        (lambda: stochastic_floor(2.0, 1.0, 1.0, [1], [0]), "analysis needs"),
        (lambda: stochastic_floor(0.1, 1.0, -1.0, [1], [0]), "variance is -1.0"),
        (lambda: stochastic_floor(0.1, 1.0, 1.0, [1, 1], [0]), "weights must be 1 finite numbers"),
        (lambda: stochastic_floor(0.1, 1.0, 1.0, [0, 1], [0, 1]), "weights of cluster 0 are all 0"),
        (lambda: within_share(np.zeros(3), [0, 0, 1], [1, 1, 1]), "optima must be a finite matrix"),
        (lambda: within_share(np.eye(3), [0, 0, 2], [1, 1, 1]), r"labels are \[0, 2\]: must be 0"),
        (lambda: within_share(np.eye(3), [0, 1], [1, 1, 1]), "labels must be 3 whole numbers"),
        (lambda: within_share(np.eye(2), [0.0, 1.0], [1, 1]), "labels must be 2 whole numbers"),
    ],
)
def test_arguments_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
