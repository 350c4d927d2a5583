"""Synthetic federations in which geometry and decision rules differ together, or one alone.

Federation (A) and its three siblings of Vomo-Donfack, Hoszu, Ginot, Morilla, "PTOPOFL:
Topology-Guided Personalised Federated Learning with Persistent-Homology Client Descriptors", 2026.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from scipy.optimize import brentq
from scipy.special import expit, logit

from ..federation import Client, Federation
from ..options import pair_from_text
from ..randomness import generator
from ..registry import datasets
from .base import Dataset

__all__ = ["Synthetic"]


@datasets.register("synthetic")
class Synthetic(Dataset):
    """Two hidden groups of clients that differ in geometry, in decision rule, or in both.

    Client k belongs to group ``g = k mod 2``. Notation: d features, u and v two random orthonormal
    directions, ``sigmoid(t) = 1 / (1 + exp(-t))``.

    - Rule: ``w = signal * u`` in group 0 and ``signal * v`` in group 1 (regime geometry: ``u`` in
      both).
    - Features, one record ``x [d]``: in regimes dim and geometry
      ``x = B_g z sqrt(d / r_g) + noise * eps`` with standard normal ``z [r_g]`` and ``eps [d]`` and
      a random orthonormal frame ``B_g [d, r_g]``; in regime tails standard normal, in group 1 each
      record multiplied by ``sqrt((nu - 2) / chi2_nu)`` (Student's t, scaled to variance 1); in
      regime concept standard normal.
    - Label: 1 with probability ``sigmoid(x.w + b_k)``. ``b_k`` is solved (Brent's method) so that
      the mean of these probabilities over all the client's records, training and test together, is
      a draw of Uniform(prevalence).
    - Training records: a uniform whole number from ``n_train_min`` to ``n_train_max``, ends
      included.

    So dim and tails have both differences, concept only the rule's, geometry only the features'.
    Models see the features standardised with the pooled training mean and std. A client with few
    records may hold only one class.

    Draws are keyed by the seed and by what is drawn: those of u, v and B_g are shared, all others
    belong to the client's number, so that client k is the same whatever ``n_clients`` is.

    Raises:
        OptionError: an option that is unknown or out of range; a rank above ``n_features`` where
            the regime uses ranks; ``n_train_min > n_train_max``.
    """

    paper: ClassVar[str] = "Vomo-Donfack, Hoszu, Ginot, Morilla: PTOPOFL, 2026, federation (A)"

    regime: Literal["dim", "tails", "concept", "geometry"] = Field(
        "dim",
        description="what differs between the groups: dim (rank of the features, and rule), tails "
        "(heavy tails, and rule), concept (rule only), geometry (rank only)",
    )
    n_clients: int = Field(8, ge=1, description="clients K; client k is of group k mod 2")
    n_features: int = Field(20, ge=2, description="features d")
    signal: float = Field(2.6, ge=0, description="length of the rule w; 0 makes labels noise")
    n_train_min: int = Field(60, ge=1, description="fewest training records of a client")
    n_train_max: int = Field(200, ge=1, description="most training records of a client")
    n_test: int = Field(80, ge=1, description="test records of every client")
    ranks: tuple[int, int] = Field(
        (3, 12), description="rank of the features in group 0 and in group 1 (dim, geometry)"
    )
    noise: float = Field(
        0.4, ge=0, description="std of what is added to the low-rank features (dim, geometry)"
    )
    nu: float = Field(
        3.0,
        gt=2,
        description="degrees of freedom of group 1's heavy tails (tails); near 2: heavier",
    )
    prevalence: tuple[float, float] = Field(
        (0.10, 0.45), description="range of a client's mean probability of label 1, inside (0, 1)"
    )

    _from_text = field_validator("ranks", "prevalence", mode="before")(pair_from_text)

    @field_validator("prevalence")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1] < 1:
            raise ValueError("two numbers LOW,HIGH with 0 < LOW <= HIGH < 1")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Synthetic:
        if self.n_train_min > self.n_train_max:
            raise ValueError(
                f"n_train_min = {self.n_train_min} must not be above "
                f"n_train_max = {self.n_train_max}"
            )
        if self._low_rank and not all(1 <= r <= self.n_features for r in self.ranks):
            raise ValueError(
                f"ranks = {self.ranks} must be between 1 and n_features = {self.n_features}"
            )
        return self

    @property
    def _low_rank(self) -> bool:
        return self.regime in ("dim", "geometry")

    def load(self, seed: int) -> Federation:
        """``n_clients`` clients called client_00, client_01, ..., whose names sort by number."""
        rules = self.rules(seed)
        frames = self.frames(seed) if self._low_rank else None
        width = max(2, len(str(self.n_clients - 1)))
        return Federation(
            self.held_out(
                [
                    self._client(seed, k, f"client_{k:0{width}}", rules, frames)
                    for k in range(self.n_clients)
                ],
                seed,
            ),
            name=self.name,
            source=self.source(seed),
            dtype=self.precision,
        )

    def rules(self, seed: int) -> NDArray[np.float64]:
        """The true weights w of group 0 and of group 1, ``[2, d]``."""
        u, v = _orthonormal(generator(seed, "synthetic: rules"), self.n_features, 2).T
        return self.signal * np.stack([u, u if self.regime == "geometry" else v])

    def frames(self, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The orthonormal frames B_0 ``[d, r_0]`` and B_1 ``[d, r_1]`` of dim and geometry."""
        first, second = (
            _orthonormal(generator(seed, f"synthetic: frame {g}"), self.n_features, r)
            for g, r in enumerate(self.ranks)
        )
        return first, second

    def _client(
        self,
        seed: int,
        k: int,
        name: str,
        rules: NDArray[np.float64],
        frames: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
    ) -> Client:
        def draws(what: str) -> np.random.Generator:
            # Keyed by the number, since the padding of the name depends on n_clients.
            return generator(seed, f"synthetic: {what}", client=str(k))

        group = k % 2
        n = int(draws("size").integers(self.n_train_min, self.n_train_max + 1))
        frame = frames[group] if frames is not None else None
        x = self._features(draws("features"), n + self.n_test, group, frame)
        # Summed by NumPy itself: the order, and so the last bit, can't depend on BLAS threads.
        scores = (x * rules[group]).sum(axis=1)
        mean = draws("prevalence").uniform(*self.prevalence)
        probabilities = expit(scores + _intercept(scores, mean))
        y = (draws("labels").random(len(x)) < probabilities).astype(np.int64)
        return Client(name, train=(x[:n], y[:n]), test=(x[n:], y[n:]), group=group)

    def _features(
        self, rng: np.random.Generator, n: int, group: int, frame: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        d = self.n_features
        if frame is not None:
            rank = frame.shape[1]
            x: NDArray[np.float64] = rng.standard_normal((n, rank)) @ frame.T * np.sqrt(d / rank)
            x += self.noise * rng.standard_normal((n, d))
            return x
        x = rng.standard_normal((n, d))
        if self.regime == "tails" and group == 1:
            x *= np.sqrt((self.nu - 2) / rng.chisquare(self.nu, size=(n, 1)))
        return x


def _orthonormal(rng: np.random.Generator, d: int, r: int) -> NDArray[np.float64]:
    """A uniformly distributed orthonormal frame ``[d, r]``."""
    q, triangle = np.linalg.qr(rng.standard_normal((d, r)))
    # QR leaves the signs to the library; a positive diagonal makes the frame uniform and unique.
    signed: NDArray[np.float64] = q * np.where(np.diagonal(triangle) < 0, -1.0, 1.0)
    return signed


def _intercept(scores: NDArray[np.float64], mean: float) -> float:
    """The b for which the mean of ``sigmoid(scores + b)`` is ``mean``."""

    def gap(b: float) -> float:
        return float(expit(scores + b).mean()) - mean

    # At the ends every single probability is below, or above, the mean wanted.
    low, high = logit(mean) - scores.max() - 1, logit(mean) - scores.min() + 1
    return float(brentq(gap, low, high, xtol=1e-12))
