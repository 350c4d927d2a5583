"""The contract of a federated method.

A method is a class with a few short functions on rows: the models of k clients are the rows of
``Theta [k, p]``. The trainer owns the loop, the clients' data, evaluation and logging. ``State``
and ``Message`` are plain dicts of tensors, so checkpoints, the count of floats sent and engines
that run clients elsewhere work for every method without a line in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from ..local import Facts, LocalProblem, stepped
from ..options import Options
from ..training import Training

__all__ = ["Algorithm", "Cohort", "Message", "State", "group_means"]

State = dict[str, Tensor]
Message = dict[str, Tensor]


@dataclass(frozen=True)
class Cohort:
    """The clients that take part in a round.

    Attributes:
        index: their positions among all clients ``[k]``.
        n: their training records ``[k]``.
        total: training records of ALL clients.
        parameters: p, the trainable part of a row ``[p + b]``; None where there are no buffers.
    """

    index: Tensor
    n: Tensor
    total: int = field(default=0)
    parameters: int | None = None

    def __len__(self) -> int:
        return self.index.shape[0]

    @cached_property
    def weights(self) -> Tensor:
        """``n_k / sum n`` over this cohort ``[k]``, float64.

        Raises:
            ValueError: no client of the cohort has a training record.
        """
        total = int(self.n.sum())
        if total <= 0:
            raise ValueError(
                "none of the round's clients has a training record: there is nothing to average."
            )
        return self.n.to(torch.float64) / total

    @cached_property
    def shares(self) -> Tensor:
        """p_k = ``n_k / sum n`` over ALL clients ``[k]``, float64."""
        return self.n.to(torch.float64) / self.total

    def stepped(self, theta: Tensor, target: Tensor, size: float) -> Tensor:
        """A model moved by ``size`` of the way to another: see ``fedtopo_torch.local.stepped``."""
        return stepped(theta, target, size, self.parameters)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of the clients' rows ``[k, ...]``, weighted by their training records."""
        if not values.is_floating_point():
            raise TypeError(f"a mean of {values.dtype} rows would round; convert them to floats.")
        weights = self.weights.to(values.dtype)
        return weights @ values if values.ndim == 2 else torch.tensordot(weights, values, dims=1)


def group_means(values: Tensor, labels: Tensor, weights: Tensor, before: Tensor) -> Tensor:
    """Weighted mean of the rows of each group; a group without rows stays as it was.

    Args:
        values: rows ``[k, p]``.
        labels: the group of each row ``[k]``, from 0.
        weights: what a row counts within its group, up to a factor ``[k]``.
        before: the groups' rows until now ``[M, p]``.
    """
    members = one_hot(labels, before.shape[0]).mT * weights
    mass = members.sum(1, keepdim=True)
    means = (members / mass).to(values.dtype) @ values
    return torch.where(mass > 0, means, before)


class Algorithm(Options):
    """One federated method: FedAvg unless a hook is overridden.

    Options are class annotations with the paper's defaults (see :class:`fedtopo_torch.options.
    Options`). All hooks are pure functions of their arguments: state lives in the dicts they return
    and nowhere else. Client-side hooks (client_state, introduce, local_update, personal) see k rows
    at a time, k = 1 on a node of its own, and never the server's state.
    """

    #: Set by the registry.
    name: ClassVar[str] = ""
    #: How tables and plots call it.
    title: ClassVar[str] = ""
    #: Authors, title, venue and year of where it was published.
    paper: ClassVar[str] = ""
    #: False for references that use what no server could know.
    deployable: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """How tables and plots call it: its own title, or its class's name."""
        # A subclass without a title must not be taken for the method it builds on.
        return str(vars(type(self)).get("title") or type(self).__name__)

    def client_state(self, theta0: Tensor, problem: LocalProblem) -> State:
        """Rows ``[k, ...]`` that stay on the clients between rounds; none by default."""
        return {}

    def described(self, problem: LocalProblem) -> Sequence[NDArray[np.float64]]:
        """What a client's descriptor is made of, one ``[n_k, q]`` array per client.

        Training features in their own units by default. Client-side: for :meth:`introduce`; in
        simulations also given to :meth:`report` and drawn by TensorBoard's figures.
        """
        return problem.clouds

    def introduce(self, problem: LocalProblem) -> Message:
        """What a client sends once about its data, before round 1; nothing by default."""
        return {}

    def server_state(self, theta0: Tensor, introductions: Message, facts: Facts) -> State:
        """The server's state before round 1; by default the one global model ``theta [p]``.

        Args:
            theta0: the model's start ``[p]``.
            introductions: every client's introduction, rows ``[K, ...]``.
            facts: of the handshake, ``n [K]`` and ``names`` included.
        """
        return {"theta": theta0}

    def broadcast(self, server: State, clients: Cohort) -> Message:
        """What the server sends: rows ``[k, ...]`` for the clients asked; theta by default."""
        return {"theta": server["theta"].expand(len(clients), -1)}

    def correction(self, theta: Tensor, message: Message, client: State) -> Tensor | None:
        """Added to the gradient at each local step: rows ``[k, p]``, or None for nothing."""
        return None

    def local_update(
        self, message: Message, client: State, problem: LocalProblem
    ) -> tuple[Message, State]:
        """A client's work in one round: what it sends back, and its new state.

        By default tau gradient steps from the model received.
        """
        correction = None
        if type(self).correction is not Algorithm.correction:
            correction = lambda theta: self.correction(theta, message, client)  # noqa: E731
        return {"theta": problem.descend(message["theta"], correction)}, client

    def aggregate(self, server: State, uplink: Message, clients: Cohort) -> State:
        """The server's new state; by default the mean of the models, weighted by records."""
        return {**server, "theta": clients.mean(uplink["theta"])}

    def personal(self, message: Message, client: State, problem: LocalProblem) -> Tensor:
        """The model each client is scored with, rows ``[k, p]``: the only place that decides it.

        Args:
            message: the broadcast after the last aggregation.
        """
        return message["theta"]

    def degenerate(self) -> str:
        """What these options reduce the method to, for a warning at the start; else empty."""
        return ""

    def unsound(self, training: Training) -> str:
        """Why these settings are not what the method was made for, for a warning; else empty."""
        return ""

    def clusters(self, server: State) -> Tensor | None:
        """The cluster of each client ``[K]``, from 0, for methods that have some; else None."""
        return None

    def shared(self, server: State) -> Tensor | None:
        """The one global model ``[p]`` of a method that scores clients with another one.

        It is scored at the end of a run beside the personalised models, as model ``shared``. By
        default ``server["theta"]`` where that is one model and :meth:`personal` is overridden.
        """
        theta = server.get("theta")
        own = type(self).personal is not Algorithm.personal
        return theta if own and theta is not None and theta.ndim == 1 else None

    def report(
        self, server: State, facts: Facts, clouds: Sequence[NDArray[np.float64]]
    ) -> dict[str, Any]:
        """What a run should tell people about the server's state, JSON-ready.

        By default the names in each cluster, as ``clusters``, of a method that has some.

        Simulation only: ``clouds`` are what :meth:`described` gives for all clients, which no
        server sees; what is computed from them here is printed, never sent and never used in
        training.
        """
        labels = self.clusters(server)
        if labels is None:
            return {}
        members: list[list[str]] = [[] for _ in range(int(labels.max()) + 1)]
        for name, label in zip(facts.names, labels.tolist(), strict=True):
            members[label].append(name)
        return {"clusters": members}
