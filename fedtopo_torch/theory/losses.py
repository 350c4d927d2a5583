"""The losses of the linear models on a federation, their derivatives and their minima."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..options import FedtopoError
from .checks import ROUNDING, checked_clusters

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from ..federation import Federation

#: Gradient norm at which a minimum counts as found.
GRADIENT_NORM = 1e-10


class NotConverged(RuntimeError, FedtopoError):
    """A minimum or a fixed point was not reached to the accuracy promised."""


@dataclass(frozen=True, eq=False)
class LinearLosses:
    """F_k of every client under logistic or softmax regression, in float64.

    F_k(theta) = mean record loss of client k's training records + (l2/2)|theta|^2, over all
    parameters, biases included, on the features as models see them. theta is laid out as the
    trainer's rows are (``nn.Linear``: all weights, row by row of the weight matrix, then the
    biases), and NumPy arrays or CPU tensors are taken alike. p = d + 1 for a binary task and
    C (d + 1) for C classes.

    Make one with :meth:`of`.

    Attributes:
        names: the clients' names.
        n: training records ``[K]``.
        design: all clients' records, one client after the other, with a column of ones last
            ``[N, d + 1]``.
        labels: ``[N]``; 0 and 1, or 0..C-1.
        outputs: 1 for a binary task, C for several classes.
        l2: lambda >= 0.

    Raises:
        ValueError: l2 is negative or not finite.
    """

    names: tuple[str, ...]
    n: NDArray[np.int64]
    design: NDArray[np.float64]
    labels: NDArray[np.int64]
    outputs: int = 1
    l2: float = 0.01

    def __post_init__(self) -> None:
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise ValueError(f"l2 is {self.l2}: must be a finite number of at least 0.")

    @classmethod
    def of(cls, federation: Federation, l2: float = 0.01) -> LinearLosses:
        """The losses of a federation's training records; standardised where it says so.

        Raises:
            ValueError: records that are not rows of features, or an l2 out of range.
        """
        if len(federation.feature_shape) != 1:
            raise ValueError(
                f"linear models need one row of features per record; this federation's records "
                f"have shape {list(federation.feature_shape)}."
            )
        parts = [federation.train.client(k) for k in range(len(federation))]
        features = np.concatenate([x.numpy() for x, _ in parts]).astype(np.float64)
        return cls(
            names=federation.names,
            n=federation.train.n.numpy().copy(),
            design=np.column_stack([features, np.ones(len(features))]),
            labels=np.concatenate([y.numpy() for _, y in parts]).astype(np.int64),
            outputs=federation.outputs,
            l2=float(l2),
        )

    @cached_property
    def shares(self) -> NDArray[np.float64]:
        """p_k = n_k / sum n ``[K]``."""
        return self.n / self.n.sum()

    @cached_property
    def p(self) -> int:
        """Parameters of one model."""
        return self.outputs * self.design.shape[1]

    def loss(self, theta: ArrayLike) -> NDArray[np.float64]:
        """F_k(theta_k) ``[K]`` at one model per client ``[K, p]``, or at one for all ``[p]``."""
        rows = self._rows(theta)
        losses = self._record_losses(self._logits(rows), self.labels)
        totals = np.add.reduceat(losses, [part.start for part in self._parts])
        return totals / self.n + self.l2 / 2 * (rows**2).sum(axis=1)

    def gradient(self, theta: ArrayLike) -> NDArray[np.float64]:
        """grad F_k(theta_k) ``[K, p]`` at one model per client ``[K, p]``, or one for all."""
        rows = self._rows(theta)
        errors = self._expected(self._logits(rows)) - self._all_targets
        totals = np.stack([(errors[part].T @ self.design[part]).ravel() for part in self._parts])
        return totals[:, self._order] / self.n[:, None] + self.l2 * rows

    def hessians(self, theta: ArrayLike) -> NDArray[np.float64]:
        """Second derivatives of F_k at theta_k ``[K, p, p]``; theta as for :meth:`gradient`."""
        expected = self._expected(self._logits(self._rows(theta)))
        mean = [np.full(n, 1 / n) for n in self.n.tolist()]
        curvatures = [
            self._curvature(self.design[part], expected[part], record)
            for part, record in zip(self._parts, mean, strict=True)
        ]
        return np.stack(curvatures) + self.l2 * np.eye(self.p)

    def hessian(self, theta: ArrayLike, weights: ArrayLike) -> NDArray[np.float64]:
        """Second derivatives ``[p, p]`` of sum_k w_k F_k at theta ``[p]``.

        Args:
            theta: one model.
            weights: w_k >= 0 ``[K]``.
        """
        weights = self._weights(weights)
        x, _, record = self._records(weights)
        expected = self._expected(x @ self._matrices(self._model(theta)[None])[0])
        return self._curvature(x, expected, record) + self.l2 * weights.sum() * np.eye(self.p)

    def smoothness(self) -> NDArray[np.float64]:
        """L_k ``[K]`` such that F_k is L_k-smooth.

        lambda_max(X_k'X_k/n_k)/4 + l2 for a binary task, lambda_max/2 + l2 for several classes,
        X_k with its column of ones: what clients send in the handshake.
        """
        gram = np.stack([self.design[part].T @ self.design[part] for part in self._parts])
        largest = np.linalg.eigvalsh(gram / self.n[:, None, None])[:, -1]
        return largest / (4 if self.outputs == 1 else 2) + self.l2

    def minimiser(self, weights: ArrayLike) -> NDArray[np.float64]:
        """The theta ``[p]`` that minimises sum_k w_k F_k.

        scipy's trust-region Newton method, then plain Newton steps as long as they halve the
        gradient. The distance to the minimiser is at most the gradient norm divided by l2.

        Args:
            weights: w_k >= 0 ``[K]``, sum 1; :attr:`shares` for the one model of all records.

        Raises:
            ValueError: weights that are negative or don't sum to 1; or l2 = 0 and there is no
                minimum (the records are separable) or more than one (columns that depend linearly
                on each other; several classes).
            NotConverged: the gradient norm is above 1e-10 at the best point found.
        """
        from scipy.optimize import minimize

        weights = self._weights(weights)
        if abs(weights.sum() - 1) > ROUNDING:
            raise ValueError(f"weights sum to {weights.sum():.6g}: must sum to 1.")
        x, labels, record = self._records(weights)
        if self.l2 == 0:
            self._check_minimum(x, labels)
        targets = self._targets(labels)

        def value(theta: NDArray[np.float64]) -> float:
            losses = self._record_losses(x @ self._matrices(theta[None])[0], labels)
            return float(record @ losses + self.l2 / 2 * theta @ theta)

        def slope(theta: NDArray[np.float64]) -> NDArray[np.float64]:
            error = self._expected(x @ self._matrices(theta[None])[0]) - targets
            return ((error * record[:, None]).T @ x).ravel()[self._order] + self.l2 * theta

        def curvature(theta: NDArray[np.float64]) -> NDArray[np.float64]:
            expected = self._expected(x @ self._matrices(theta[None])[0])
            return self._curvature(x, expected, record) + self.l2 * np.eye(self.p)

        # Near the minimum a trust region sees only rounding in the loss; Newton goes on from there.
        theta = minimize(
            value,
            np.zeros(self.p),
            jac=slope,
            hess=curvature,
            method="trust-exact",
            options={"gtol": 1e-5},
        ).x
        gradient = slope(theta)
        while True:
            step = np.linalg.lstsq(curvature(theta), gradient, rcond=None)[0]
            better = slope(theta - step)
            if not np.linalg.norm(better) < np.linalg.norm(gradient) / 2:
                break
            theta, gradient = theta - step, better
        reached = float(np.linalg.norm(gradient))
        if not reached <= GRADIENT_NORM:
            raise NotConverged(
                f"the minimum was not found: the gradient norm is {reached:.1e}, needed is "
                f"{GRADIENT_NORM:.0e}. A larger l2 (it is {self.l2:g}), or standardised features, "
                f"make the problem easier."
            )
        return theta

    def client_optima(self) -> NDArray[np.float64]:
        """theta*_k, the minimiser of each client's own F_k ``[K, p]``; see :meth:`minimiser`."""
        return np.stack([self.minimiser(weights) for weights in np.eye(len(self.n))])

    def cluster_optima(self, labels: ArrayLike, weights: ArrayLike) -> NDArray[np.float64]:
        """theta*_j, the minimiser of sum_{k in j} w_k F_k of each cluster ``[M, p]``.

        Args:
            labels: cluster of each client ``[K]``, 0..M-1, all in use.
            weights: what a client counts within its cluster, up to a factor ``[K]``.

        Raises:
            ValueError, NotConverged: as :meth:`minimiser`.
        """
        _, members = checked_clusters(labels, weights, len(self.n))
        return np.stack([self.minimiser(row) for row in members])

    # Inside, the model of a client is a matrix [C, d + 1] whose last column is the bias.

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        """Positions in the raveled matrix ``[C, d + 1]`` of the entries of theta ``[p]``."""
        positions = np.arange(self.p).reshape(self.outputs, -1)
        return np.concatenate([positions[:, :-1].ravel(), positions[:, -1]])

    @cached_property
    def _parts(self) -> list[slice]:
        """Where the records of each client are."""
        ends = np.cumsum(self.n).tolist()
        return [slice(end - n, end) for n, end in zip(self.n.tolist(), ends, strict=True)]

    @cached_property
    def _all_targets(self) -> NDArray[np.float64]:
        return self._targets(self.labels)

    def _targets(self, labels: NDArray[np.int64]) -> NDArray[np.float64]:
        """What outputs are compared with ``[n, C]``: labels, one-hot for several classes."""
        if self.outputs == 1:
            return labels[:, None].astype(np.float64)
        return np.eye(self.outputs)[labels]

    def _model(self, theta: ArrayLike) -> NDArray[np.float64]:
        model = np.asarray(theta, dtype=np.float64)
        if model.shape != (self.p,):
            raise ValueError(f"theta has shape {list(model.shape)}: must be [{self.p}].")
        return model

    def _rows(self, theta: ArrayLike) -> NDArray[np.float64]:
        rows, clients = np.asarray(theta, dtype=np.float64), len(self.n)
        if rows.shape not in ((self.p,), (clients, self.p)):
            raise ValueError(
                f"theta has shape {list(rows.shape)}: must be [{self.p}], or [{clients}, {self.p}] "
                f"with one row per client."
            )
        return np.broadcast_to(rows, (clients, self.p))

    def _weights(self, weights: ArrayLike) -> NDArray[np.float64]:
        values = np.asarray(weights, dtype=np.float64)
        if values.shape != self.n.shape or not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"weights must be {len(self.n)} numbers of at least 0, one a client.")
        return values

    def _matrices(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """``[k, d + 1, C]``: what the design is multiplied with."""
        flat = np.empty(rows.shape)
        flat[:, self._order] = rows
        return flat.reshape(len(rows), self.outputs, -1).swapaxes(1, 2)

    def _records(
        self, weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """Design, labels and weights of the records of all clients that count."""
        record = np.repeat(weights / self.n, self.n)
        counts = record > 0
        return self.design[counts], self.labels[counts], record[counts]

    def _logits(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """``[N, C]``, each client's records under its own row."""
        logits = np.empty((len(self.design), self.outputs))
        for part, matrix in zip(self._parts, self._matrices(rows), strict=True):
            np.matmul(self.design[part], matrix, out=logits[part])
        return logits

    def _expected(self, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probabilities ``[n, C]``; of label 1 for a binary task."""
        from scipy.special import expit, softmax

        probabilities: NDArray[np.float64] = (
            expit(logits) if self.outputs == 1 else softmax(logits, axis=1)
        )
        return probabilities

    def _record_losses(
        self, logits: NDArray[np.float64], labels: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """-log-likelihood in nats ``[n]``."""
        from scipy.special import logsumexp

        if self.outputs == 1:
            losses = np.logaddexp(0, logits[:, 0]) - labels * logits[:, 0]
        else:
            losses = logsumexp(logits, axis=1) - logits[np.arange(len(labels)), labels]
        return np.asarray(losses)

    def _curvature(
        self,
        x: NDArray[np.float64],
        expected: NDArray[np.float64],
        record: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """``[p, p]`` of the mean record loss; records ``[n]`` are weighted."""
        if self.outputs == 1:
            return (x * (record * (expected * (1 - expected))[:, 0])[:, None]).T @ x
        width, blocks = x.shape[1], np.empty((self.p, self.p))
        for a in range(self.outputs):
            for b in range(a + 1):
                scale = record * expected[:, a] * ((a == b) - expected[:, b])
                block = (x * scale[:, None]).T @ x
                at, to = (slice(c * width, (c + 1) * width) for c in (a, b))
                blocks[at, to], blocks[to, at] = block, block.T
        return blocks[np.ix_(self._order, self._order)]

    def _check_minimum(self, x: NDArray[np.float64], labels: NDArray[np.int64]) -> None:
        """Refuse problems without exactly one minimum; only l2 = 0 has them."""
        from scipy.optimize import linprog

        if self.outputs > 1:
            raise ValueError(
                "with l2 = 0 the minimiser of softmax regression is not unique: the same vector "
                "added to the weights of every class changes no probability. Give an l2 above 0."
            )
        if np.linalg.matrix_rank(x) < x.shape[1]:
            raise ValueError(
                "with l2 = 0 the minimiser is not unique: feature columns (and the ones of the "
                "bias) depend linearly on each other. Give an l2 above 0."
            )
        # Some w with s_i x_i.w >= 0 for all records and > 0 for one: along it the loss falls
        # forever (Albert and Anderson, Biometrika 1984).
        sides = x / np.abs(x).max(axis=0) * np.where(labels == 1, 1.0, -1.0)[:, None]
        found = linprog(-sides.sum(axis=0), A_ub=-sides, b_ub=np.zeros(len(x)), bounds=(-1, 1))
        if found.status != 0 or -found.fun > 1e-6 * len(x):
            raise ValueError(
                "with l2 = 0 there is no minimum: the two classes can be separated, so the loss "
                "falls for ever as theta grows. Give an l2 above 0."
            )
