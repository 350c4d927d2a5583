"""pFedMe. T. Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS
2020."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from ..local import Correction, LocalProblem
from ..registry import register
from .base import Algorithm, Cohort, Message, State

__all__ = ["PFedMe"]


@register("pfedme")
class PFedMe(Algorithm):
    """Personal models v at the proximal point of a shared model w.

    In each of tau local rounds, from v = w_k: v <- v - inner_lr (grad F_k(v) + lambda_p (v - w_k)),
    inner_steps times; then w_k <- w_k - outer_lr lambda_p (w_k - v). Server:
    w <- (1 - beta) w + beta sum p_k w_k. The scored model is v.
    """

    title: ClassVar[str] = "pFedMe"
    paper: ClassVar[str] = "T. Dinh, Tran, Nguyen, NeurIPS 2020"

    lambda_p: float = Field(15.0, gt=0, description="pull of v towards w; large: v close to w")
    inner_steps: int = Field(5, ge=1, description="gradient steps on v per local round")
    inner_lr: float | None = Field(None, gt=0, description="of v; by default 1/(1/eta + lambda_p)")
    outer_lr: float | None = Field(None, gt=0, description="of w; by default min(eta, 1/lambda_p)")
    beta: float = Field(1.0, ge=0, description="server step; 1 takes the mean of the w_k")

    def degenerate(self) -> str:
        return "beta = 0: the shared model w never moves" if self.beta == 0 else ""

    def client_state(self, theta0: Tensor, problem: LocalProblem) -> State:
        return {"personal": theta0.repeat(len(problem), 1)}

    def local_update(
        self, message: Message, client: State, problem: LocalProblem
    ) -> tuple[Message, State]:
        w = message["theta"]
        inner_lr = self.inner_lr or 1 / (1 / problem.eta + self.lambda_p)
        outer_lr = self.outer_lr or min(problem.eta, 1 / self.lambda_p)
        for batch in range(problem.local_steps):
            v = problem.descend(w, self._towards(w), self.inner_steps, inner_lr, batch)
            w = problem.stepped(w, v, outer_lr * self.lambda_p)
        return {"theta": w}, {"personal": v}

    def _towards(self, w: Tensor) -> Correction:
        return lambda v: self.lambda_p * (v - w)

    def aggregate(self, server: State, uplink: Message, clients: Cohort) -> State:
        w = clients.mean(uplink["theta"])
        return {"theta": clients.stepped(server["theta"], w, self.beta)}

    def personal(self, message: Message, client: State, problem: LocalProblem) -> Tensor:
        return client["personal"]
