"""Ditto. Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization,
ICML 2021."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from ..local import LocalProblem
from ..registry import register
from .base import Message, State
from .fedavg import FedAvg

__all__ = ["Ditto"]


@register("ditto")
class Ditto(FedAvg):
    """FedAvg, and beside it personal models that are pulled towards the global one.

    v_k <- v_k - eta (grad F_k(v_k) + lambda_d (v_k - theta)), tau steps a round, theta as received.
    The scored model is v_k.
    """

    title: ClassVar[str] = "Ditto"
    paper: ClassVar[str] = "Li, Hu, Beirami, Smith, ICML 2021"

    lambda_d: float = Field(0.1, ge=0, description="pull towards the global model; 0 is Local")

    def degenerate(self) -> str:
        return "lambda_d = 0: Ditto's personal models are Local's" if self.lambda_d == 0 else ""

    def client_state(self, theta0: Tensor, problem: LocalProblem) -> State:
        return {"personal": theta0.repeat(len(problem), 1)}

    def local_update(
        self, message: Message, client: State, problem: LocalProblem
    ) -> tuple[Message, State]:
        uplink, _ = super().local_update(message, client, problem)
        theta = message["theta"]
        pull = None if self.lambda_d == 0 else lambda v: self.lambda_d * (v - theta)
        # From step 0 again, so that both models see the same draws.
        again = problem.at_round(problem.round)
        return uplink, {"personal": again.descend(client["personal"], pull)}

    def personal(self, message: Message, client: State, problem: LocalProblem) -> Tensor:
        return client["personal"]
