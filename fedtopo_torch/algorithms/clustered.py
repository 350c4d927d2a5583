"""Clustered training with blending: the base of pTopoFL and of every method with a fixed partition.

Vomo-Donfack, Hoszu, Ginot, Morilla: pTopoFL, 2026.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from torch import Tensor
from torch.nn.functional import one_hot

from ..local import Facts
from ..options import OptionError
from ..registry import register
from ..theory import calibrated_alpha
from ..training import Training
from .base import Algorithm, Cohort, Message, State, group_means

__all__ = ["Clustered", "ClusteredAlgorithm"]


class ClusteredAlgorithm(Algorithm, ABC):
    """Clusters j with models theta_j, within-cluster weights w_k and masses omega_j:

    u_j = sum_{k in j} w_k GD^tau_k(theta_j);  theta_j <- (1 - alpha) u_j + alpha sum_i omega_i u_i.

    w_k sums to 1 in each cluster, omega_j is the sum of p_k in j. A subclass says what the clusters
    are (:meth:`partition`) and, if not n_k, what w_k is proportional to (:meth:`weigh`). A cluster
    of which nobody takes part in a round keeps its u_j.
    """

    abar: float = Field(
        0.3,
        ge=0,
        le=1,
        description="target effective blending of clusters at the fixed point; 0 trains clusters "
        "apart, 1 makes them equal",
    )
    alpha: float | None = Field(
        None,
        ge=0,
        le=1,
        description="blending weight per round, given directly instead of calibrated from abar",
    )

    def degenerate(self) -> str:
        if getattr(self, "n_clusters", 2) == 1:
            return "n_clusters = 1: all clients train one model"
        if self.alpha == 1 or (self.alpha is None and self.abar == 1):
            return "full blending: all clusters get the same model"
        return ""

    def unsound(self, training: Training) -> str:
        if training.plain or self.alpha is not None or self.abar in (0, 1):
            return ""
        return (
            "abar is calibrated for plain gradient steps of one size: with momentum, Adam or a "
            "schedule clusters may be blended more or less than that; alpha sets it directly"
        )

    def check_count(self, n_clusters: int, facts: Facts) -> None:
        """Refuse more clusters than clients; a single client is one cluster, whatever M."""
        if n_clusters > len(facts.names) > 1:
            raise OptionError(
                f"n_clusters = {n_clusters}, but there are only {len(facts.names)} clients."
            )

    @abstractmethod
    def partition(self, introductions: Message, facts: Facts) -> State:
        """``{"labels": [K] int64, ...}``: cluster of each client, from 0; more entries are kept."""

    def weigh(self, server: State, facts: Facts) -> Tensor:
        """What within-cluster weights are proportional to ``[K]``; n_k by default."""
        assert facts.n is not None
        return facts.n.to(torch.float64)

    def server_state(self, theta0: Tensor, introductions: Message, facts: Facts) -> State:
        assert facts.n is not None
        state = self.partition(introductions, facts)
        members = one_hot(state["labels"]).to(torch.float64)
        alpha = self.alpha
        if alpha is None:
            alpha = calibrated_alpha(self.abar, facts.eta, facts.l2, facts.local_steps)
            if self.abar > 0 and facts.l2 == 0:
                warnings.warn(
                    "with l2 = 0 the calibrated alpha is 0, whatever abar: clusters train apart. "
                    "Give alpha to blend them.",
                    stacklevel=2,
                )
        start = theta0.repeat(members.shape[1], 1)
        return {
            **state,
            "weights": self.weigh(state, facts),
            "omega": members.mT @ (facts.n.to(torch.float64) / int(facts.n.sum())),
            "alpha": torch.tensor(alpha, dtype=torch.float64),
            "u": start,
            "theta": start,
        }

    def broadcast(self, server: State, clients: Cohort) -> Message:
        return {"theta": server["theta"][server["labels"][clients.index]]}

    def aggregate(self, server: State, uplink: Message, clients: Cohort) -> State:
        theta, index = uplink["theta"], clients.index
        labels, weights = server["labels"][index], server["weights"][index]
        u = group_means(theta, labels, weights, server["u"])
        alpha, omega = server["alpha"].to(theta.dtype), server["omega"].to(theta.dtype)
        return {**server, "u": u, "theta": (1 - alpha) * u + alpha * (omega @ u)}

    def clusters(self, server: State) -> Tensor | None:
        return server["labels"]

    def report(
        self, server: State, facts: Facts, clouds: Sequence[NDArray[np.float64]]
    ) -> dict[str, Any]:
        labels, weights = server["labels"], server["weights"]
        mass = weights.new_zeros(len(server["u"])).index_add(0, labels, weights)
        within = dict(zip(facts.names, (weights / mass[labels]).tolist(), strict=True))
        told = super().report(server, facts, clouds)
        return {**told, "weights": within, "alpha": float(server["alpha"])}


def _split_commas(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


@register("clustered")
class Clustered(ClusteredAlgorithm):
    """Clustered training on a partition you give."""

    title: ClassVar[str] = "Clustered"
    paper: ClassVar[str] = "Vomo-Donfack et al., 2026 (with a partition of your own)"

    labels: Annotated[tuple[int, ...], BeforeValidator(_split_commas)] = Field(
        (),
        description="cluster of each client in the order of their sorted names, for example "
        "0,0,1,0; one cluster if empty",
    )

    def partition(self, introductions: Message, facts: Facts) -> State:
        labels = self.labels or (0,) * len(facts.names)
        if len(labels) != len(facts.names):
            raise OptionError(
                f"labels has {len(labels)} entries for {len(facts.names)} clients "
                f"({', '.join(facts.names[:6])}{', ...' if len(facts.names) > 6 else ''})."
            )
        _, numbered = np.unique(labels, return_inverse=True)
        return {"labels": torch.from_numpy(numbered)}
