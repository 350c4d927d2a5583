"""How loose the bounds of docs/analysis.md are: ``python benchmarks/bounds.py`` (some seconds).

The synthetic federation, regime dim, seeds 0 to 19, partitioned by its true groups with weights
n_k, eta = 1/L and l2 = 0.01. Each row is what happens divided by what is proved or predicted.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedtopo_torch.datasets import Synthetic
from fedtopo_torch.theory import (
    LinearLosses,
    calibrated_alpha,
    contraction_factor,
    drift_bound,
    fixed_point,
    retained_spread,
    round_map,
    within_share,
)

SEEDS = range(20)
LOCAL_STEPS = (1, 10, 50)
STEPS = 500  # gradient steps after which the distance to the fixed point is looked at
ABAR = 0.3

console = Console(width=100)


def longest(rows: np.ndarray) -> float:
    return float(np.linalg.norm(rows, axis=1).max())


def spread(theta: np.ndarray, omega: np.ndarray) -> float:
    return float(np.linalg.norm(theta - omega @ theta))


def ratios(seed: int) -> dict[tuple[str, str], float]:
    """What happens, divided by what the analysis says, for one federation."""
    federation = Synthetic(regime="dim").load(seed)
    losses = LinearLosses.of(federation)
    labels, n, shares = federation.groups, losses.n, losses.shares
    assert labels is not None
    smoothness, mu = losses.smoothness(), losses.l2
    largest = float(smoothness.max())
    eta, omega = 1 / largest, np.bincount(labels, weights=shares)
    optima = losses.cluster_optima(labels, n)
    shared = losses.minimiser(shares)
    eigenvalues = np.linalg.eigvalsh(losses.hessian(shared, shares))
    found = {
        ("L / mu", ""): largest / mu,
        ("smallest eigenvalue h / mu", ""): float(eigenvalues[0]) / mu,
    }
    for tau in LOCAL_STEPS:
        q, alpha = contraction_factor(eta, mu, tau), calibrated_alpha(ABAR, eta, mu, tau)
        star = fixed_point(losses, labels, n, alpha, eta, tau)
        theta = np.zeros_like(star)
        for _ in range(STEPS // tau):
            theta = round_map(losses, theta, labels, n, alpha, eta, tau)
        bound = q ** (STEPS // tau) * longest(star)
        found["contraction: distance / bound", str(tau)] = longest(theta - star) / bound
        kept = spread(star, omega) / spread(optima, omega)
        for name, h in (("smallest", eigenvalues[0]), ("median", np.median(eigenvalues))):
            told = retained_spread(alpha, float(h), eta, tau)
            found[f"spread kept / formula at the {name} h", str(tau)] = kept / told
        if tau == 1:
            continue
        apart = fixed_point(losses, labels, n, 0.0, eta, tau)
        slopes = np.linalg.norm(losses.gradient(apart[labels]), axis=1)
        for j, (own, optimum) in enumerate(zip(apart, optima, strict=True)):
            weights = np.where(labels == j, n, 0) / n[labels == j].sum()
            proved = drift_bound(
                eta, tau, float(smoothness[labels == j].max()), mu, float(weights @ slopes)
            )
            ratio = float(np.linalg.norm(own - optimum)) / proved
            found[f"drift of cluster {j}: distance / bound", str(tau)] = ratio
    own = losses.client_optima()
    floor = float(shares @ (losses.loss(optima[labels]) - losses.loss(own)))
    dispersion = float(shares @ ((own - shares @ own) ** 2).sum(axis=1))
    within = within_share(own, labels, shares) * dispersion
    found["heterogeneity floor / upper bound", ""] = floor / (largest / 2 * within)
    found["heterogeneity floor / lower bound", ""] = floor / (mu / 2 * within)
    return found


def main() -> None:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for seed in track(
        SEEDS, "Seeds", console=console, transient=True, disable=not console.is_terminal
    ):
        for key, value in ratios(seed).items():
            found[key].append(value)
    table = Table(
        title=f"synthetic, regime=dim, {len(SEEDS)} seeds, eta = 1/L, after {STEPS} gradient steps",
        title_justify="left",
    )
    table.add_column("ratio")
    for column in ("tau", "least", "median", "most"):
        table.add_column(column, justify="right")
    for (what, tau), values in sorted(found.items(), key=lambda item: item[0][0]):
        numbers = (f"{x:.3g}" for x in (min(values), float(np.median(values)), max(values)))
        table.add_row(what, tau, *numbers)
    console.print(table)


if __name__ == "__main__":
    main()
