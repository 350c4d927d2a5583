"""Local training: every client alone, the reference a federation has to beat."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..local import Facts, LocalProblem
from ..registry import register
from .base import Algorithm, Cohort, Message, State

__all__ = ["Local"]


@register("local")
class Local(Algorithm):
    """Every client trains its own model, T tau gradient steps from theta_0; nothing is sent."""

    title: ClassVar[str] = "Local"
    paper: ClassVar[str] = "no federation: each client alone"

    def client_state(self, theta0: Tensor, problem: LocalProblem) -> State:
        return {"theta": theta0.repeat(len(problem), 1)}

    def server_state(self, theta0: Tensor, introductions: Message, facts: Facts) -> State:
        return {}

    def broadcast(self, server: State, clients: Cohort) -> Message:
        return {}

    def local_update(
        self, message: Message, client: State, problem: LocalProblem
    ) -> tuple[Message, State]:
        return {}, {"theta": problem.descend(client["theta"])}

    def aggregate(self, server: State, uplink: Message, clients: Cohort) -> State:
        return server

    def personal(self, message: Message, client: State, problem: LocalProblem) -> Tensor:
        return client["theta"]
