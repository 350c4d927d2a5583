import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtopo_torch import topology

# one coordinate; mean distances to the others: 14/4, 11/4, 10/4, 11/4, 26/4
LINE = np.array([[0.0], [1], [2], [3], [8]])
DELTA = np.array([14, 11, 10, 11, 26]) / 4


def test_delta_is_the_mean_distance_to_the_others_by_hand():
    delta, _ = topology.outlyingness(LINE)
    np.testing.assert_allclose(delta, DELTA, rtol=1e-15)


def test_robust_rule_by_hand():
    # median 11/4, deviations 3/4 0 1/4 0 15/4, MAD 1/4
    z = (DELTA - 11 / 4) / (1.4826 / 4)
    np.testing.assert_allclose(topology.outlyingness(LINE)[1], z, rtol=1e-12)
    expected = [1, 1, 1, 1, math.exp(-(15 / 1.4826 - 3))]
    np.testing.assert_allclose(topology.trust_weights(LINE), expected, rtol=1e-12)


def test_mean_std_rule_by_hand():
    z = (DELTA - DELTA.mean()) / DELTA.std()
    assert z[4] > 1
    np.testing.assert_allclose(
        topology.trust_weights(LINE, "mean_std"), [1, 1, 1, 1, math.exp(1 - z[4])], rtol=1e-12
    )


def test_off_trusts_everybody():
    np.testing.assert_array_equal(topology.trust_weights(LINE, "off"), np.ones(5))


@pytest.mark.parametrize("rule", topology.TRUST_RULES)
@pytest.mark.parametrize(
    "phi",
    [np.eye(1), np.eye(2), np.eye(7), np.full((4, 3), 0.1), np.zeros((3, 46))],
    ids=["one client", "two clients", "equidistant", "identical", "zeros"],
)
def test_no_spread_gives_full_trust(phi, rule):
    np.testing.assert_array_equal(topology.trust_weights(phi, rule), np.ones(len(phi)))


@pytest.mark.parametrize("rule", ["robust", "mean_std"])
def test_rounding_is_no_spread(rule):
    # corners of a regular simplex, turned: equal distances up to the last bits
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(9, 9)))[0]
    np.testing.assert_array_equal(topology.trust_weights(np.eye(9) @ turn, rule), np.ones(9))


def test_mad_of_zero_gives_full_trust_even_to_an_outlier():
    phi = np.array([[0.0], [0], [0], [0], [1]])
    np.testing.assert_array_equal(topology.trust_weights(phi), np.ones(5))
    assert topology.trust_weights(phi, "mean_std")[4] < 1


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from(["robust", "mean_std"]))
def test_weights_follow_the_clients_and_lie_in_0_1(seed, rule):
    rng = np.random.default_rng(seed)
    phi = rng.normal(size=(9, 4))
    phi[0] *= 3
    order = rng.permutation(9)
    trust = topology.trust_weights(phi, rule)
    np.testing.assert_allclose(topology.trust_weights(phi[order], rule), trust[order], rtol=1e-9)
    assert ((trust > 0) & (trust <= 1)).all()


def test_blocks_of_clients_give_the_same_distances():
    phi = np.random.default_rng(0).normal(size=(1_500, 2))
    delta, _ = topology.outlyingness(phi)
    for k in (0, 1_023, 1_024, 1_499):
        others = np.delete(phi, k, axis=0)
        assert delta[k] == pytest.approx(np.linalg.norm(others - phi[k], axis=1).mean())


def test_clients_below_20_records_are_exempt():
    assert topology.trust_weights(LINE, counts=[50, 50, 50, 50, 20])[4] < 1e-3
    trust = topology.trust_weights(LINE, counts=[50, 50, 50, 50, 19])
    np.testing.assert_array_equal(trust, np.ones(5))


def test_robust_scores_by_hand():
    np.testing.assert_allclose(topology.robust_scores([1.0, 2, 3, 4, 10])[4], 7 / 1.4826)
    np.testing.assert_array_equal(topology.robust_scores([5.0, 5, 5, 9]), np.zeros(4))


def test_refusals():
    with pytest.raises(ValueError, match="'mad': one of robust, mean_std, off"):
        topology.trust_weights(LINE, "mad")
    with pytest.raises(ValueError, match="one of robust, mean_std"):
        topology.outlyingness(LINE, "off")
    with pytest.raises(ValueError, match=r"phi\[1, 0\] = nan is not finite"):
        topology.trust_weights([[0.0], [np.nan]])
    with pytest.raises(ValueError, match="clients as rows"):
        topology.trust_weights([0.0, 1.0])
    with pytest.raises(ValueError, match="5 clients but counts of shape"):
        topology.trust_weights(LINE, counts=[1, 2])
