"""All clients in this process, stacked: each bucket of clients is one batched tensor program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ..algorithms.base import Algorithm, Message, State
from ..federation import Federation, feature_sums
from ..local import Facts, LocalProblem, Objective

__all__ = ["InProcess"]


class InProcess:
    """Runs the client-side hooks of an algorithm on a federation's training records.

    It owns the clients' state: rows ``[K, ...]``.
    """

    def __init__(self, federation: Federation, objective: Objective, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.size = len(federation)
        self.client: State = {}
        self.problems = []
        for data in objective.data(federation.train):
            clouds = [federation.clouds[i] for i in data.rows.tolist()]
            self.problems.append(LocalProblem(objective, data, clouds))
        # One bucket holds every client in order: rows can be passed on as they are.
        self._whole = len(self.problems) == 1

    def _rows(self, values: dict[str, Tensor], problem: LocalProblem) -> dict[str, Tensor]:
        if self._whole:
            return dict(values)
        return {name: value[problem.data.rows] for name, value in values.items()}

    def _gather(self, work: Callable[[LocalProblem], Message]) -> Message:
        """Run ``work`` on every bucket and put its rows in the order of clients."""
        if self._whole:
            return work(self.problems[0])
        gathered: Message = {}
        for problem in self.problems:
            for name, value in work(problem).items():
                if name not in gathered:
                    gathered[name] = value.new_empty((self.size, *value.shape[1:]))
                gathered[name][problem.data.rows] = value
        return gathered

    def handshake(self) -> Message:
        """What every client sends first: n, feature sums and squares, L_k where it is known."""

        def hello(problem: LocalProblem) -> Message:
            sums = [feature_sums(torch.from_numpy(cloud)) for cloud in problem.clouds]
            message = {
                "n": problem.n,
                "feature_sum": torch.stack([s for s, _ in sums]),
                "feature_squares": torch.stack([q for _, q in sums]),
            }
            smoothness = problem.objective.smoothness(problem.data)
            return message if smoothness is None else {**message, "smoothness": smoothness}

        return self._gather(hello)

    def introduce(self, facts: Facts) -> Message:
        """Tell every client the facts, then collect the algorithm's introductions."""
        told = dataclasses.replace(facts, n=None, names=(), groups=None)
        for problem in self.problems:
            problem.facts = told
        return self._gather(self.algorithm.introduce)

    def start(self, theta0: Tensor) -> None:
        """Create the clients' state."""
        state = self._gather(lambda problem: self.algorithm.client_state(theta0, problem))
        self.client = {name: value.clone() for name, value in state.items()}

    def update(self, message: Message, round: int) -> Message:
        """One round's local updates; returns every client's uplink, rows ``[K, ...]``."""

        def work(problem: LocalProblem) -> Message:
            uplink, client = self.algorithm.local_update(
                self._rows(message, problem),
                self._rows(self.client, problem),
                problem.at_round(round),
            )
            for name, value in client.items():
                if name not in self.client:
                    raise ValueError(
                        f"{type(self.algorithm).__name__}.local_update returns the client state "
                        f"'{name}', which client_state did not create."
                    )
                if self._whole:
                    # Not in place: the uplink may be a view of the old state.
                    self.client[name] = value.clone()
                else:
                    self.client[name][problem.data.rows] = value
            return uplink

        return self._gather(work)

    def personal(self, message: Message, round: int) -> Tensor:
        """The models clients are scored with ``[K, p]``."""

        def work(problem: LocalProblem) -> Message:
            theta = self.algorithm.personal(
                self._rows(message, problem),
                self._rows(self.client, problem),
                problem.at_round(round),
            )
            return {"theta": theta}

        return self._gather(work)["theta"]
