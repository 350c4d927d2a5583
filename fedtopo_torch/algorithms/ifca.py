"""IFCA. Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning,
NeurIPS 2020."""

from __future__ import annotations

import warnings
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ..local import Facts, LocalProblem
from ..randomness import generator
from ..registry import register
from .base import Algorithm, Cohort, Message, State, group_means

__all__ = ["IFCA"]

# Rounds without a taker after which a cluster is worth a warning.
IDLE_ROUNDS = 10


@register("ifca")
class IFCA(Algorithm):
    """M models; in every round each client trains the one that fits its data best.

    Fits best: lowest training loss F_k, the first of equals. A model becomes the mean of what its
    takers return, weighted by records, and stays as it is without any.
    """

    title: ClassVar[str] = "IFCA"
    paper: ClassVar[str] = "Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020"

    n_clusters: int = Field(2, ge=1, description="M, the number of models; 1 is FedAvg")
    spread: float = Field(
        0.1, ge=0, description="std of the draws that are added to the start, so models differ"
    )

    def degenerate(self) -> str:
        return "n_clusters = 1: IFCA is FedAvg" if self.n_clusters == 1 else ""

    def server_state(self, theta0: Tensor, introductions: Message, facts: Facts) -> State:
        trained = theta0[: facts.parameters]
        shape = (self.n_clusters, len(trained))
        draws = torch.from_numpy(generator(facts.seed, "ifca").standard_normal(shape))
        models = theta0.repeat(self.n_clusters, 1)
        models[:, : len(trained)] = trained + self.spread * draws.to(theta0.dtype)
        return {
            "models": models,
            "takers": torch.full((len(facts.names),), -1),
            "idle": torch.zeros(self.n_clusters, dtype=torch.int64),
        }

    def broadcast(self, server: State, clients: Cohort) -> Message:
        return {"models": server["models"].expand(len(clients), -1, -1)}

    def _choose(self, models: Tensor, problem: LocalProblem) -> tuple[Tensor, Tensor]:
        losses = torch.stack([problem.loss(models[:, j]) for j in range(self.n_clusters)])
        choice = losses.argmin(0)
        return choice, models[torch.arange(len(choice)), choice]

    def local_update(
        self, message: Message, client: State, problem: LocalProblem
    ) -> tuple[Message, State]:
        choice, theta = self._choose(message["models"], problem)
        return {"theta": problem.descend(theta), "choice": choice}, client

    def aggregate(self, server: State, uplink: Message, clients: Cohort) -> State:
        theta, choice = uplink["theta"], uplink["choice"]
        taken = torch.bincount(choice, minlength=self.n_clusters) > 0
        idle = torch.where(taken, 0, server["idle"] + 1)
        for j in torch.nonzero(idle == IDLE_ROUNDS)[:, 0].tolist():
            warnings.warn(f"IFCA: nobody took model {j} for {IDLE_ROUNDS} rounds.", stacklevel=2)
        return {
            "models": group_means(theta, choice, clients.weights, server["models"]),
            "takers": server["takers"].index_copy(0, clients.index, choice),
            "idle": idle,
        }

    def personal(self, message: Message, client: State, problem: LocalProblem) -> Tensor:
        return self._choose(message["models"], problem)[1]

    def clusters(self, server: State) -> Tensor | None:
        return server["takers"] if bool((server["takers"] >= 0).all()) else None
