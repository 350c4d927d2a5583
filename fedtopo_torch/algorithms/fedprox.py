"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous
Networks, MLSys 2020."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from ..registry import register
from .base import Message, State
from .fedavg import FedAvg

__all__ = ["FedProx"]


@register("fedprox")
class FedProx(FedAvg):
    """FedAvg whose local gradients get + mu (theta - theta at the start of the round)."""

    title: ClassVar[str] = "FedProx"
    paper: ClassVar[str] = "Li et al., MLSys 2020"

    mu: float = Field(0.1, ge=0, description="pull towards the round's start; 0 is FedAvg")

    def degenerate(self) -> str:
        return "mu = 0: FedProx is FedAvg" if self.mu == 0 else ""

    def correction(self, theta: Tensor, message: Message, client: State) -> Tensor | None:
        return None if self.mu == 0 else self.mu * (theta - message["theta"])
