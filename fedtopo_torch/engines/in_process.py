"""All clients in this process, stacked: each bucket of clients is one batched tensor program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..algorithms.base import Algorithm, Cohort, Message, State
from ..federation import Federation, feature_sums
from ..local import Facts, LocalProblem
from ..objective import Data, Objective
from ..training import Training

__all__ = ["InProcess"]


class InProcess:
    """Runs the client-side hooks of an algorithm on a federation's training records.

    It owns what clients keep: their state, rows ``[K, ...]``, the counters of their modules, and
    with ``buffers="local"`` their modules' float buffers. Messages come from the CPU and go back
    there; the clients' side runs on the objective's device.

    Args:
        federation: the clients' data.
        objective: of the model, checked.
        algorithm: the method.
        training: how clients are trained.
    """

    def __init__(
        self,
        federation: Federation,
        objective: Objective,
        algorithm: Algorithm,
        training: Training,
    ) -> None:
        self.algorithm = algorithm
        self.objective = objective
        self.training = training
        self.size = len(federation)
        self.client: State = {}
        #: Whole-number buffers of each client's module ``[K, c]``.
        self.counters = objective.counters().repeat(self.size, 1)
        #: Which clients have taken part in a round ``[K]``.
        self.seen = torch.zeros(self.size, dtype=torch.bool)
        self._start = objective.initial()
        #: Float buffers that clients keep to themselves ``[K, b]``; None where they are averaged.
        self.buffers: Tensor | None = None
        if training.buffers == "local" and objective.width > objective.p:
            self.buffers = self._start[objective.p :].repeat(self.size, 1)
        self._federation = federation
        self._facts: Facts | None = None
        self._kinds = self._alike(federation.train.n.tolist())
        self.problems = [
            self._problem(data)
            for data in objective.data(federation.train, self._kinds, training.chunk_clients)
        ]

    def _alike(self, n: list[int]) -> tuple[int, ...] | None:
        """Clients of one number may be stacked: as many steps, and no padding where it counts."""
        objective, training = self.objective, self.training
        kinds = n if objective.mixes else [training.steps(m, objective.smallest) for m in n]
        return None if len(set(kinds)) == 1 else tuple(kinds)

    def _problem(self, data: Data) -> LocalProblem:
        clouds = [self._federation.clouds[i] for i in data.rows.tolist()]
        return LocalProblem(self.objective, data, clouds, self._facts)

    # ---- rows to clients and back -----------------------------------------------------------

    def _rows(self, values: dict[str, Tensor], at: Tensor | None) -> dict[str, Tensor]:
        """These positions of rows, on the clients' device; None: all of them in order."""
        device = self.objective.device
        if at is not None:
            values = {name: value[at.to(value.device)] for name, value in values.items()}
        if device.type == "cpu":
            return dict(values)
        return {name: value.to(device) for name, value in values.items()}

    def _gather(
        self,
        hook: str,
        work: Callable[[LocalProblem, Tensor | None], Message],
        index: Tensor | None = None,
    ) -> Message:
        """Run ``work`` on every bucket and put its rows in the order of clients.

        Args:
            hook: for messages.
            work: gets a bucket's problem and its positions among the clients asked.
            index: the clients asked ``[k]``, ascending; None: all of them.
        """
        problems: Sequence[LocalProblem] = self.problems
        size = self.size
        if index is not None:
            size = len(index)
            problems = [
                self._problem(data)
                for data in self.objective.some(
                    self._federation.train, index.tolist(), self._kinds, self.training.chunk_clients
                )
            ]
        gathered: Message = {}
        for problem in problems:
            rows = problem.data.rows
            at = rows if index is None else torch.searchsorted(index, rows)
            # One bucket holds every client in order: rows can be passed on as they are.
            if len(problems) == 1:
                return self._home(self._checked(hook, work(problem, None), problem))
            for name, value in self._checked(hook, work(problem, at), problem).items():
                if name not in gathered:
                    gathered[name] = value.new_empty((size, *value.shape[1:]), device="cpu")
                gathered[name][at] = value.cpu()
        return gathered

    def _home(self, message: Message) -> Message:
        if self.objective.device.type == "cpu":
            return message
        return {name: value.cpu() for name, value in message.items()}

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
        if problem.version != problem.first_version:
            raise ValueError(
                f"{self._name(hook)} changes the clients' records in place: work on copies."
            )
        return message

    def _name(self, hook: str) -> str:
        return f"{type(self.algorithm).__name__}.{hook}"

    # ---- the hooks --------------------------------------------------------------------------

    def handshake(self) -> Message:
        """What every client sends first: n, feature sums and squares, L_k where it is known."""

        def hello(problem: LocalProblem, at: Tensor | None) -> Message:
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
        self._facts = dataclasses.replace(facts, n=None, names=(), groups=None)
        for problem in self.problems:
            problem.facts = self._facts
        introductions = self._gather(
            "introduce", lambda problem, at: self.algorithm.introduce(problem)
        )
        for name, value in introductions.items():
            if not bool(value.isfinite().all()):
                raise ValueError(
                    f"{type(self.algorithm).__name__}.introduce: '{name}' is not finite."
                )
        return introductions

    def start(self, theta0: Tensor) -> None:
        """Create the clients' state."""
        there = theta0.to(self.objective.device)
        state = self._gather(
            "client_state", lambda problem, at: self.algorithm.client_state(there, problem)
        )
        self.client = {
            name: value.clone().to(self.objective.device) for name, value in state.items()
        }

    def update(
        self,
        message: Message,
        round: int,
        cohort: Cohort | None = None,
        counters: Tensor | None = None,
    ) -> tuple[Message, Tensor]:
        """One round's local updates.

        Args:
            message: the broadcast, rows ``[k, ...]``.
            round: its number.
            cohort: who takes part; None: everybody.
            counters: what the server has for the modules' counters ``[c]``.

        Returns:
            the uplink and the counters ``[k, c]`` of the clients asked.
        """
        index = None if cohort is None else cohort.index
        if counters is not None and self.training.buffers == "average":
            if index is None:
                self.counters = counters.expand(self.size, -1).clone()
            else:
                self.counters[index] = counters

        def work(problem: LocalProblem, at: Tensor | None) -> Message:
            rows = problem.data.rows
            # All clients in order need no copy of what they keep.
            all_rows = at is None and index is None
            begun = problem.at_round(round, self.counters[rows].to(self.objective.device))
            uplink, client = self.algorithm.local_update(
                self._received(self._rows(message, at), rows),
                self._rows(self.client, None if all_rows else rows),
                begun,
            )
            self._keep(client, problem, all_rows)
            if self.objective.counts and begun.counters is not None:
                self.counters[rows] = begun.counters.cpu()
            return self._returned(uplink, rows)

        uplink = self._gather("local_update", work, index)
        if index is None:
            self.seen[:] = True
            return uplink, self.counters
        self.seen[index] = True
        return uplink, self.counters[index]

    def _keep(self, client: State, problem: LocalProblem, all_rows: bool) -> None:
        for name, value in self._checked("local_update", client, problem).items():
            if name not in self.client:
                raise ValueError(
                    f"{type(self.algorithm).__name__}.local_update returns the client state "
                    f"'{name}', which client_state did not create."
                )
            if all_rows:
                # Not in place: the uplink may be a view of the old state.
                self.client[name] = value.clone()
            else:
                self.client[name][problem.data.rows.to(value.device)] = value

    def personal(self, message: Message, round: int) -> Tensor:
        """The models all clients are scored with ``[K, p + b]``, on the CPU.

        A client that never took part is scored with the model it would receive, where there is one.

        Args:
            message: the broadcast to everybody.
            round: the last one done.
        """

        def work(problem: LocalProblem, at: Tensor | None) -> Message:
            received = self._received(self._rows(message, at), problem.data.rows)
            theta = self.algorithm.personal(
                received, self._rows(self.client, at), problem.at_round(round)
            )
            needed = [len(problem), self.objective.width]
            if list(theta.shape) != needed:
                raise ValueError(
                    f"{self._name('personal')} returns {list(theta.shape)}; needed are rows "
                    f"{needed}, buffers included."
                )
            fresh = ~self.seen[problem.data.rows].to(theta.device)
            if bool(fresh.any()) and "theta" in received:
                theta = torch.where(fresh[:, None], received["theta"], theta)
            return {"theta": theta}

        return self._gather("personal", work)["theta"]

    # ---- buffers that stay with the clients -------------------------------------------------

    def _received(self, message: Message, rows: Tensor) -> Message:
        """A message with each client's own buffers in its models."""
        if self.buffers is None:
            return message
        own = self.buffers[rows].to(self.objective.device)
        return {name: self._with(value, own) for name, value in message.items()}

    def _with(self, value: Tensor, buffers: Tensor) -> Tensor:
        """Models ``[k, ..., p + b]`` with other buffers ``[k, b]``; what is no model, as it is."""
        if value.ndim < 2 or value.shape[-1] != self.objective.width:
            return value
        if not value.is_floating_point():
            return value
        lead = value.shape[:-1]
        shaped = buffers.reshape(len(buffers), *[1] * (value.ndim - 2), -1).expand(*lead, -1)
        return torch.cat([value[..., : self.objective.p], shaped.to(value.dtype)], dim=-1)

    def _returned(self, uplink: Message, rows: Tensor) -> Message:
        """What leaves the clients: models without their own buffers, which they keep."""
        if self.buffers is None:
            return uplink
        theta = uplink.get("theta")
        if theta is not None and theta.shape[-1] == self.objective.width:
            self.buffers[rows] = theta[..., self.objective.p :].cpu()
        start = self._start[self.objective.p :].repeat(len(rows), 1).to(self.objective.device)
        return {name: self._with(value, start) for name, value in uplink.items()}

    def sent(self, message: Message) -> Message:
        """What of a message travels: without buffers that clients keep, with counters."""
        if self.buffers is not None:
            p, width = self.objective.p, self.objective.width
            message = {
                name: value[..., :p] if value.ndim > 1 and value.shape[-1] == width else value
                for name, value in message.items()
            }
        if not self.objective.counts or self.training.buffers == "local" or not message:
            return message
        return {**message, "counters": self.counters[: len(next(iter(message.values())))]}
