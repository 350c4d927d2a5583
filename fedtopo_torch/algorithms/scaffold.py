"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning, ICML 2020."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ..local import Facts, LocalProblem
from ..registry import register
from ..training import Training
from .base import Algorithm, Cohort, Message, State

__all__ = ["Scaffold"]


@register("scaffold")
class Scaffold(Algorithm):
    """FedAvg with control variates that take out client drift (option II of the paper).

    Local gradients get + c - c_k; after S steps c_k' = c_k - c + (theta - theta_k) / (S eta);
    theta <- theta + eta_g (mean of theta_k - theta); c <- c + sum p_k (c_k' - c_k), with p_k over
    all clients. Controls start at zero.
    """

    title: ClassVar[str] = "SCAFFOLD"
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"

    eta_g: float = Field(1.0, gt=0, description="server step; 1 takes the mean of the models")

    def unsound(self, training: Training) -> str:
        if training.bare:
            return ""
        return (
            "SCAFFOLD reads a client's mean gradient off how far its model moved, which holds for "
            "plain gradient steps only: with momentum or Adam its controls are wrong"
        )

    def client_state(self, theta0: Tensor, problem: LocalProblem) -> State:
        return {"control": theta0.new_zeros(len(problem), problem.parameters)}

    def server_state(self, theta0: Tensor, introductions: Message, facts: Facts) -> State:
        return {"theta": theta0, "control": torch.zeros_like(theta0[: facts.parameters])}

    def broadcast(self, server: State, clients: Cohort) -> Message:
        return {name: value.expand(len(clients), -1) for name, value in server.items()}

    def correction(self, theta: Tensor, message: Message, client: State) -> Tensor | None:
        return message["control"] - client["control"]

    def local_update(
        self, message: Message, client: State, problem: LocalProblem
    ) -> tuple[Message, State]:
        uplink, _ = super().local_update(message, client, problem)
        moved = (message["theta"] - uplink["theta"])[:, : problem.parameters]
        drift = moved / (problem.steps.to(moved.dtype) * problem.eta)[:, None]
        change = drift - message["control"]
        return {**uplink, "control": change}, {"control": client["control"] + change}

    def aggregate(self, server: State, uplink: Message, clients: Cohort) -> State:
        theta = clients.mean(uplink["theta"])
        shares = clients.shares.to(theta.dtype)
        return {
            "theta": clients.stepped(server["theta"], theta, self.eta_g),
            "control": server["control"] + shares @ uplink["control"],
        }
