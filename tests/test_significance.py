import math

import numpy as np
import pytest
from scipy import stats

from fedtopo_torch.significance import PairedTest, against_reference, holm, signed_rank


def enumerated(d):
    """Two-sided exact p by all 2^n signs, midranks for ties."""
    d = np.asarray(d, dtype=float)
    ranks = stats.rankdata(np.abs(d))
    n, total = len(d), ranks.sum()
    observed = abs(ranks[d > 0].sum() - total / 2)
    hits = 0
    for signs in range(2**n):
        w = sum(r for i, r in enumerate(ranks) if signs >> i & 1)
        hits += abs(w - total / 2) >= observed - 1e-9
    return hits / 2**n


# ---- one test -----------------------------------------------------------------------------------


def test_six_differences_of_one_sign_by_hand():
    # Only two of the 2^6 sign patterns are as extreme.
    d = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert signed_rank(d, np.zeros(6)) == pytest.approx(2 / 64, abs=1e-15)


def test_the_smallest_of_six_against_by_hand():
    # W- = 1: patterns with min(W+, W-) <= 1 are {}, {1} and their mirrors, 4 of 64.
    d = np.array([-0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert signed_rank(d, np.zeros(6)) == pytest.approx(4 / 64, abs=1e-15)


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 10])
def test_equals_scipy_and_the_enumeration(n):
    rng = np.random.default_rng(n)
    a, b = rng.normal(size=n), rng.normal(size=n) - 0.3
    p = signed_rank(a, b)
    assert p == pytest.approx(stats.wilcoxon(a, b, method="exact").pvalue, abs=1e-12)
    assert p == pytest.approx(enumerated(a - b), abs=1e-12)


def test_differences_below_1e_9_are_zeros_and_dropped():
    d = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 9e-10, -9e-10, 0.0])
    assert signed_rank(d, np.zeros(9)) == pytest.approx(2 / 64, abs=1e-15)
    d[6] = 1.1e-9
    assert signed_rank(d, np.zeros(9)) == pytest.approx(2 / 128, abs=1e-15)


def test_all_zero_gives_one():
    a = np.array([0.4, 0.5, 0.6])
    assert signed_rank(a, a + 5e-10) == 1.0
    assert signed_rank([], []) == 1.0


def test_ties_use_the_approximation_but_never_below_the_exact_minimum():
    # Five equal differences: scipy's normal approximation says 0.025, no data can.
    ones = np.ones(5)
    assert stats.wilcoxon(ones, method="approx").pvalue < 0.05
    assert signed_rank(ones, np.zeros(5)) == pytest.approx(0.0625) == enumerated(ones)
    d = np.array([1.0, 1.0, 2.0, -3.0, 4.0, 5.0, -6.0, 7.0])
    assert signed_rank(d, np.zeros(8)) == stats.wilcoxon(d, method="approx").pvalue


@pytest.mark.parametrize("n", [51, 200])
def test_many_seeds(n):
    d = np.random.default_rng(0).normal(size=n)
    assert signed_rank(d, np.zeros(n)) == stats.wilcoxon(d, method="approx").pvalue


def test_what_can_not_be_paired_is_refused():
    with pytest.raises(ValueError, match="shapes"):
        signed_rank([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="finite"):
        signed_rank([1.0, math.nan], [1.0, 2.0])


# ---- Holm ---------------------------------------------------------------------------------------


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04; running maximum.
    np.testing.assert_allclose(holm([0.04, 0.01, 0.03, 0.02]), [0.06, 0.04, 0.06, 0.06])


def test_holm_never_exceeds_one_and_keeps_ties_equal():
    np.testing.assert_allclose(holm([0.5, 0.9, 0.5]), [1.0, 1.0, 1.0])
    np.testing.assert_allclose(holm([0.02, 0.02]), [0.04, 0.04])


def test_holm_of_one_and_of_none():
    np.testing.assert_array_equal(holm([0.03]), [0.03])
    assert holm([]).shape == (0,)


# ---- the family ---------------------------------------------------------------------------------


def test_marks_against_the_reference():
    base = np.linspace(0.40, 0.49, 10)
    step = np.linspace(0.01, 0.02, 10)
    tests = against_reference(
        {"ours": base, "worse": base + step, "better": base - step, "same": base}, "ours"
    )
    assert set(tests) == {"worse", "better", "same"}
    assert [tests[m].mark for m in ("worse", "better", "same")] == ["+", "-", ""]
    # 2 / 2^10 times 3 and times 2, and the running maximum makes both the larger.
    assert tests["worse"].p == pytest.approx(2 / 1024)
    assert tests["worse"].adjusted == pytest.approx(6 / 1024) == tests["better"].adjusted
    assert tests["same"] == PairedTest(10, 0, 1.0, 1.0, "")


def test_holm_can_take_a_mark_away():
    base = np.zeros(6)
    up = np.arange(1.0, 7.0)
    assert against_reference({"ref": base, "a": up}, "ref")["a"].mark == "+"
    two = against_reference({"ref": base, "a": up, "b": -up}, "ref")
    assert [t.mark for t in two.values()] == ["", ""]
    assert two["a"].adjusted == pytest.approx(4 / 64)


def test_five_seeds_are_said_to_be_too_few():
    base = np.zeros(5)
    test = against_reference({"ref": base, "a": base + np.arange(1.0, 6.0)}, "ref")["a"]
    assert not test.possible
    assert test.mark == "" and math.isnan(test.p) and math.isnan(test.adjusted)
    assert test.pairs == test.nonzero == 5


def test_six_seeds_with_a_zero_are_tested_but_not_marked():
    d = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    test = against_reference({"ref": np.zeros(6), "a": d}, "ref")["a"]
    assert test.possible and (test.pairs, test.nonzero) == (6, 5)
    assert test.p == pytest.approx(0.0625) and test.mark == ""


def test_seeds_without_a_value_leave_their_pair_out():
    base = np.array([0.0, 0, 0, 0, 0, 0, math.nan, 0])
    own = np.array([1.0, 2, 3, 4, 5, 6, 7, math.nan])
    few = np.array([1.0, 2, 3, 4, 5, math.nan, math.nan, math.nan])
    tests = against_reference({"ref": base, "a": own, "few": few}, "ref")
    assert tests["a"].pairs == 6 and tests["a"].p == pytest.approx(2 / 64)
    # A method that can't be tested does not make the others pay.
    assert tests["a"].adjusted == tests["a"].p and tests["a"].mark == "+"
    assert not tests["few"].possible


def test_direction_is_the_ranks_not_the_mean():
    d = np.array([-30.0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14])
    test = against_reference({"ref": np.zeros(15), "a": d}, "ref")["a"]
    assert test.p < 0.05 and d.mean() > 0 and test.mark == "+"
    test = against_reference({"ref": np.zeros(15), "a": np.where(d < 0, -300, d)}, "ref")["a"]
    assert test.mark == "+"


def test_unknown_reference_and_unequal_lengths():
    with pytest.raises(ValueError, match="'x' is not among"):
        against_reference({"a": [1.0]}, "x")
    with pytest.raises(ValueError, match="2 values of 'b' for 1 of 'a'"):
        against_reference({"a": [1.0], "b": [1.0, 2.0]}, "a")
