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
        self._versions = {id(problem): problem.version for problem in self.problems}
        # One bucket holds every client in order: rows can be passed on as they are.
        self._whole = len(self.problems) == 1

    def _rows(self, values: dict[str, Tensor], problem: LocalProblem) -> dict[str, Tensor]:
        if self._whole:
            return dict(values)
        return {name: value[problem.data.rows] for name, value in values.items()}

    def _gather(self, hook: str, work: Callable[[LocalProblem], Message]) -> Message:
        """Run ``work`` on every bucket and put its rows in the order of clients."""
        if self._whole:
            return self._checked(hook, work(self.problems[0]), self.problems[0])
        gathered: Message = {}
        for problem in self.problems:
            for name, value in self._checked(hook, work(problem), problem).items():
                if name not in gathered:
                    gathered[name] = value.new_empty((self.size, *value.shape[1:]))
                gathered[name][problem.data.rows] = value
        return gathered

    def _checked(self, hook: str, message: Message, problem: LocalProblem) -> Message:
        """What a hook returned: a row per client, and the clients' data as they were."""
        k = problem.data.n.shape[0]
        if not isinstance(message, dict):
            what = f"{type(message).__name__}, not a dict of tensors"
            raise ValueError(f"{self._name(hook)} returns {what}.")
        for name, value in message.items():
            if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != k:
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"{self._name(hook)}: '{name}' is {shape}; needed is a tensor with one row for "
                    f"each of {k} clients."
                )
        if problem.version != self._versions[id(problem)]:
            raise ValueError(
                f"{self._name(hook)} changes the clients' records in place: work on copies."
            )
        return message

    def _name(self, hook: str) -> str:
        return f"{type(self.algorithm).__name__}.{hook}"

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

        return self._gather("handshake", hello)

    def introduce(self, facts: Facts) -> Message:
        """Tell every client the facts, then collect the algorithm's introductions."""
        told = dataclasses.replace(facts, n=None, names=(), groups=None)
        for problem in self.problems:
            problem.facts = told
        introductions = self._gather("introduce", self.algorithm.introduce)
        for name, value in introductions.items():
            if not bool(value.isfinite().all()):
                raise ValueError(
                    f"{type(self.algorithm).__name__}.introduce: '{name}' is not finite."
                )
        return introductions

    def start(self, theta0: Tensor) -> None:
        """Create the clients' state."""
        state = self._gather(
            "client_state", lambda problem: self.algorithm.client_state(theta0, problem)
        )
        self.client = {name: value.clone() for name, value in state.items()}

    def update(self, message: Message, round: int) -> Message:
        """One round's local updates; returns every client's uplink, rows ``[K, ...]``."""

        def work(problem: LocalProblem) -> Message:
            uplink, client = self.algorithm.local_update(
                self._rows(message, problem),
                self._rows(self.client, problem),
                problem.at_round(round),
            )
            for name, value in self._checked("local_update", client, problem).items():
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

        return self._gather("local_update", work)

    def personal(self, message: Message, round: int) -> Tensor:
        """The models clients are scored with ``[K, p]``."""

        def work(problem: LocalProblem) -> Message:
            theta = self.algorithm.personal(
                self._rows(message, problem),
                self._rows(self.client, problem),
                problem.at_round(round),
            )
            return {"theta": theta}

        return self._gather("personal", work)["theta"]
