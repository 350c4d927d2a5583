"""Is one method better than another? Paired Wilcoxon tests over seeds, Holm-corrected.

Wilcoxon, Biometrics Bulletin 1, 1945; Holm, Scandinavian Journal of Statistics 6, 1979. Averaging
over seeds first and comparing bars of standard deviations would ignore that all methods see the
same splits; the signed-rank test uses the pairing and assumes no normal distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata, wilcoxon

__all__ = ["FEWEST_PAIRS", "LEVEL", "TIE", "PairedTest", "against_reference", "holm", "signed_rank"]

#: Level of the tests.
LEVEL = 0.05
#: Differences below this count as zero: rounding, not a difference of methods.
TIE = 1e-9
#: With five pairs the smallest two-sided p is 2 / 2^5 = 0.0625, whatever the data.
FEWEST_PAIRS = 6


@dataclass(frozen=True)
class PairedTest:
    """One method against the reference.

    Attributes:
        pairs: seeds on which both have a value.
        nonzero: of these, pairs that differ by at least :data:`TIE`.
        p: two-sided p of the signed-rank test; NaN where :attr:`possible` is False.
        adjusted: p after Holm's correction over all methods tested; NaN likewise.
        mark: ``"+"`` significantly larger values than the reference (a worse log-loss), ``"-"``
            significantly smaller (better), ``""`` neither.
    """

    pairs: int
    nonzero: int
    p: float
    adjusted: float
    mark: str

    @property
    def possible(self) -> bool:
        """Whether there are enough pairs for 0.05 to be reached at all."""
        return self.pairs >= FEWEST_PAIRS


def signed_rank(values: ArrayLike, reference: ArrayLike) -> float:
    """Two-sided p of Wilcoxon's signed-rank test of paired values.

    With ``d = values - reference``: differences ``|d| < 1e-9`` are zero and are dropped
    (Wilcoxon's own way), the rest go to :func:`scipy.stats.wilcoxon`: the exact distribution where
    no two ``|d|`` are tied, for up to 50 pairs; its normal approximation otherwise. The
    approximation can fall below what any data can reach, so p is never less than
    ``2 / 2^nonzero``, the smallest exact p.

    Args:
        values, reference: ``[S]`` each, one value per seed, finite.

    Returns:
        p in (0, 1]; 1 when all differences are zero.

    Raises:
        ValueError: lengths that differ, or a value that is not finite.
    """
    d = _differences(values, reference)
    d = d[np.abs(d) >= TIE]
    if not len(d):
        return 1.0
    tied = len(np.unique(np.abs(d))) < len(d)
    method = "exact" if not tied and len(d) <= 50 else "approx"
    p = float(wilcoxon(d, alternative="two-sided", method=method).pvalue)
    return min(1.0, max(p, 2.0 ** (1 - len(d))))


def holm(p: Sequence[float]) -> NDArray[np.float64]:
    """Holm's step-down adjustment of m p-values, in the order given.

    With ``p_(1) <= ... <= p_(m)``: adjusted ``p_(i) = max over j <= i of min(1, (m - j + 1)
    p_(j))``. Rejecting where the adjusted value is at most 0.05 keeps the probability of any false
    rejection at 0.05 or less, whatever the dependence between the tests.
    """
    values = np.asarray(p, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    steps = np.minimum(1.0, values[order] * np.arange(len(values), 0, -1))
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(steps)
    return adjusted


def against_reference(
    values: Mapping[str, ArrayLike], reference: str, level: float = LEVEL
) -> dict[str, PairedTest]:
    """Test every method against one of them.

    Args:
        values: per method ``[S]``, entry s from the same split and seed for all; NaN where a
            method has no value there. Only pairs without NaN are tested.
        reference: the method the others are compared with.
        level: of the family of tests, in (0, 1).

    Returns:
        one :class:`PairedTest` for each other method. Methods with fewer than six pairs can't reach
        0.05: they are not tested and don't count in Holm's correction.

    Raises:
        ValueError: the reference is not among the methods, or lengths differ.
    """
    if reference not in values:
        raise ValueError(f"the reference '{reference}' is not among the methods tested.")
    base = np.asarray(values[reference], dtype=np.float64)
    pairs: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    for name, given in values.items():
        if name == reference:
            continue
        own = np.asarray(given, dtype=np.float64)
        if own.shape != base.shape:
            raise ValueError(f"{len(own)} values of '{name}' for {len(base)} of '{reference}'.")
        both = ~(np.isnan(own) | np.isnan(base))
        pairs[name] = own[both], base[both]
    tested = [name for name, (own, _) in pairs.items() if len(own) >= FEWEST_PAIRS]
    p = [signed_rank(*pairs[name]) for name in tested]
    adjusted = dict(zip(tested, holm(p).tolist(), strict=True))
    plain = dict(zip(tested, p, strict=True))
    tests = {}
    for name, (own, other) in pairs.items():
        d = _differences(own, other)
        d = d[np.abs(d) >= TIE]
        mark = ""
        if name in adjusted and adjusted[name] <= level:
            mark = "+" if float(np.sign(d) @ rankdata(np.abs(d))) > 0 else "-"
        tests[name] = PairedTest(
            len(own), len(d), plain.get(name, math.nan), adjusted.get(name, math.nan), mark
        )
    return tests


def _differences(values: ArrayLike, reference: ArrayLike) -> NDArray[np.float64]:
    own = np.asarray(values, dtype=np.float64)
    other = np.asarray(reference, dtype=np.float64)
    if own.ndim != 1 or own.shape != other.shape:
        raise ValueError(f"paired values of shapes {list(own.shape)} and {list(other.shape)}.")
    if not (np.isfinite(own).all() and np.isfinite(other).all()):
        raise ValueError("paired values must be finite.")
    return own - other
