"""What k clients know and do in one round: their problem, its records step by step, and descent.

Everything here works on k rows together, so one client (k = 1) and a thousand simulated ones run
the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .objective import Data, Objective
from .randomness import generator, torch_seed
from .training import Training

__all__ = ["Batches", "Correction", "Facts", "LocalProblem", "stepped"]

Correction = Callable[[Tensor], "Tensor | None"]


@dataclass(frozen=True)
class Facts:
    """What the handshake tells everybody before anything else.

    Attributes:
        eta: step size, before the schedule.
        local_steps: tau, gradient steps per round; with ``local_epochs`` the mean of the clients',
            weighted by records.
        l2: lambda; every F_k has (lambda/2)|theta|^2 over all trainable parameters.
        seed: the run's seed.
        mean: pooled mean of the training features in their own units ``[d]``.
        scale: pooled std ``[d]`` (1 for constant columns).
        smallest: the most records that all clients' descriptors can be made of, see
            :func:`fedtopo_torch.topology.cloud_size`.
        n: training records per client ``[K]``; on the server only, None at a client.
        names: client names; on the server only, empty at a client.
        groups: true groups ``[K]`` where a federation knows them; for references that use what no
            server could know, None at a client.
        parameters: p, the trainable part of a row, which comes first; None: all of it.
        training: batches, optimiser and the rest of how clients are trained.
    """

    eta: float
    local_steps: float
    l2: float
    seed: int
    mean: Tensor
    scale: Tensor
    smallest: int
    n: Tensor | None = None
    names: tuple[str, ...] = ()
    groups: NDArray[np.int64] | None = None
    parameters: int | None = None
    training: Training = field(default_factory=Training)  # type: ignore[arg-type]


def stepped(theta: Tensor, target: Tensor, size: float, parameters: int | None) -> Tensor:
    """Models moved by ``size`` of the way to others; 1 is exactly there.

    Their buffers become those of the target: half the way is no statistic, and more than the whole
    way could make a variance negative.

    Args:
        theta, target: ``[..., p + b]``.
        size: 0 stays (but for buffers), 1 is the target, more goes beyond.
        parameters: p; None where there are no buffers.
    """
    if parameters is None or parameters == theta.shape[-1]:
        return torch.lerp(theta, target, size)
    moved = torch.lerp(theta[..., :parameters], target[..., :parameters], size)
    return torch.cat([moved, target[..., parameters:]], dim=-1)


class Batches:
    """The records of every step of k clients in one round.

    A client's records are shuffled by a generator keyed by seed, round and its name, taken
    ``batch_size`` at a time until all were used, and shuffled again. The last batch of a pass may
    be smaller; it is left out where the module can't be trained on so few. A client with no more
    records than a batch takes all of them in their own order. Every descent of a round that asks
    for step s gets the same records.

    Args:
        data: k clients.
        training: the batch size.
        seed, round: of the draws.
        smallest: the fewest records a batch may have.
    """

    def __init__(
        self, data: Data, training: Training, seed: int, round: int, smallest: int = 1
    ) -> None:
        self._data, self._size = data, training.batch_size
        self._seed, self._round, self._smallest = seed, round, smallest
        self._n = data.n.tolist()
        self._per_pass = [training.batches(n, smallest) for n in self._n]
        #: All of a client's records in every step.
        self.whole = self._size is None or max(self._n) <= self._size
        self._index = torch.zeros(0, 0, 0, dtype=torch.int64)
        self._count = torch.zeros(0, 0, dtype=torch.int64)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Positions ``[k, b]`` of the records of a step, and how many are meant ``[k]``."""
        if step >= len(self._index):
            self._draw(max(step + 1, 2 * len(self._index)))
        return self._index[step], self._count[step]

    def expect(self, steps: int) -> None:
        """Draw so many steps at once, which is cheaper than one by one."""
        if steps > len(self._index):
            self._draw(steps)

    def _draw(self, steps: int) -> None:
        assert self._size is not None
        width = min(self._size, max(self._n))
        index = np.zeros((steps, len(self._n), width), dtype=np.int64)
        count = np.zeros((steps, len(self._n)), dtype=np.int64)
        for i, (n, passes) in enumerate(zip(self._n, self._per_pass, strict=True)):
            rng = generator(self._seed, "batches", self._round, self._data.names[i])
            size = min(self._size, n)
            sizes = np.full(passes, size)
            sizes[-1] = min(size, n - size * (passes - 1))
            for start in range(0, steps, passes):
                # Unshuffled where all are taken: the same whoever else is in the bucket.
                order = (np.arange(n) if n == size else rng.permutation(n))[: passes * size]
                # A short last batch is filled up with the pass's first records, as padding.
                filled = np.resize(order, passes * size).reshape(passes, size)
                stop = min(start + passes, steps)
                index[start:stop, i, :size] = filled[: stop - start]
                index[start:stop, i, size:] = filled[: stop - start, :1]
                count[start:stop, i] = sizes[: stop - start]
        place = self._data.n.device
        self._index = torch.from_numpy(index).to(place)
        self._count = torch.from_numpy(count).to(place)


class LocalProblem:
    """All that k clients know in one round; k = 1 on a node of its own.

    Attributes:
        names: the clients' names.
        n: training records ``[k]``.
        clouds: training features in their own units, one ``[n_k, d]`` array per client.
        facts: what the handshake told, or None during the handshake itself.
        round: the current round; 0 before the first.
        counters: whole-number buffers of the clients' modules ``[k, c]``, after the last descent;
            None for the module's own.
    """

    def __init__(
        self,
        objective: Objective,
        data: Data,
        clouds: Sequence[NDArray[np.float64]] = (),
        facts: Facts | None = None,
        round: int = 0,
        counters: Tensor | None = None,
    ) -> None:
        self.objective = objective
        self.data = data
        self.clouds = clouds
        self.facts = facts
        self.round = round
        self.counters = self._start_counters = counters
        self._taken = 0
        self._batches: Batches | None = None
        self._watched = (data.features, data.labels, data.n)
        #: :attr:`version` when this problem was made.
        self.first_version = self.version

    @property
    def version(self) -> int:
        """Grows with every change of the data in place; nobody may make one."""
        return sum([value._version for value in self._watched])

    def at_round(self, round: int, counters: Tensor | None = None) -> LocalProblem:
        """The same clients in another round, or at the start of this one; no step taken yet."""
        again = LocalProblem(self.objective, self.data, self.clouds, self.facts, round, counters)
        if round == self.round and counters is None:
            again.counters = again._start_counters = self._start_counters
            again._batches = self._batches
        return again

    def __len__(self) -> int:
        return len(self.data.names)

    @property
    def names(self) -> tuple[str, ...]:
        return self.data.names

    @property
    def n(self) -> Tensor:
        return self.data.n

    @property
    def features(self) -> Tensor:
        """``[k, n_max, ...]`` as the model sees them, zeros where padded."""
        return self.data.features

    @property
    def labels(self) -> Tensor:
        """``[k, n_max]``, zeros where padded."""
        return self.data.labels

    @property
    def parameters(self) -> int:
        """p, the trainable part of a row ``[p + b]``, which comes first; buffers follow."""
        return self.objective.p

    def stepped(self, theta: Tensor, target: Tensor, size: float) -> Tensor:
        """Rows moved by ``size`` of the way to others, see :func:`stepped`."""
        return stepped(theta, target, size, self.parameters)

    @property
    def eta(self) -> float:
        """This round's step size."""
        assert self.facts is not None
        return self.facts.eta * self.facts.training.factor(self.round)

    @property
    def local_steps(self) -> int:
        """S_k, gradient steps in a round: the same for all of these clients."""
        assert self.facts is not None
        if self.facts.training.local_epochs is None:
            return int(self.facts.local_steps)
        return self.facts.training.steps(int(self.n[0]), self.objective.smallest)

    @property
    def steps(self) -> Tensor:
        """Gradient steps taken in this round ``[k]``."""
        return torch.full_like(self.n, self._taken)

    def loss(self, theta: Tensor) -> Tensor:
        """F_k(theta_k) on the training records ``[k]``, in evaluation mode."""
        return self.objective.loss(theta, self.data)

    def gradient(self, theta: Tensor) -> Tensor:
        """grad F_k(theta_k) over all training records, rows like theta; in training mode."""
        return self.objective.gradient(theta, self.data, self._seeds())

    def activations(self, layer: str) -> list[NDArray[np.float64]]:
        """What a layer of the initial model puts out for each client's training records.

        See :meth:`fedtopo_torch.objective.Objective.activations`; one ``[n_k, q]`` per client.
        """
        found = []
        for features, n in zip(self.features, self.n.tolist(), strict=True):
            found.append(self.objective.activations(layer, features[:n]).double().numpy())
        return found

    def _batch(self, step: int) -> Data:
        """The records of a step."""
        if self.facts is None or self.facts.training.batch_size is None:
            return self.data
        if self._batches is None:
            facts, smallest = self.facts, self.objective.smallest
            self._batches = Batches(self.data, facts.training, facts.seed, self.round, smallest)
        if self._batches.whole:
            return self.data
        self._batches.expect(self.local_steps)
        return self.objective.batch(self.data, *self._batches(step))

    def _seeds(self) -> Sequence[int]:
        """One per client for this step, where the module draws."""
        if not self.objective.draws:
            return ()
        seed = self.facts.seed if self.facts else 0
        purpose = f"training draws of step {self._taken}"
        return [torch_seed(seed, purpose, self.round, name) for name in self.names]

    def descend(
        self,
        theta: Tensor,
        correction: Correction | None = None,
        steps: int | None = None,
        lr: float | None = None,
        batch: int | None = None,
    ) -> Tensor:
        """Steps of the run's optimiser from the rows theta ``[k, p + b]``; returns new rows.

        Plain descent is ``theta <- theta - lr (grad F(theta) + correction(theta))``, each gradient
        over the step's batch; buffers move as the module moves them. The optimiser's state starts
        fresh in every call.

        Args:
            theta: where to start; not changed.
            correction: called at each step with the current rows; rows ``[k, p + b]`` or
                ``[k, p]``, of which the first p numbers are added to the gradient, or None for
                none (then the arithmetic is that of plain descent).
            steps: how many; the round's :attr:`local_steps` by default.
            lr: step size; the round's :attr:`eta` by default.
            batch: use the records of this step of the round in every step; by default each step
                has its own.
        """
        if self.facts is not None:
            steps = self.local_steps if steps is None else steps
            lr = self.eta if lr is None else lr
        if steps is None or lr is None:
            raise ValueError(
                "descend needs steps and lr where there are no facts to take them from."
            )
        objective = self.objective
        if not steps:
            return theta.clone()
        weights, state = objective.weights(theta), objective.state(theta, self.counters)
        optimizer, stepping = None, False
        if self.facts is not None and not self.facts.training.bare:
            weights = weights.clone()
            optimizer = self.facts.training.optimizer_for([weights], lr)
        for _ in range(steps):
            data = self._batch(self._taken if batch is None else batch)
            slope, after = objective.slope(weights, data, self._seeds(), state)
            extra = None if correction is None else correction(objective.rows(weights, state))
            if extra is not None:
                slope.add_(objective.weights(self._corrected(extra, theta)))
            if optimizer is None:
                # In place, but for the first step, whose weights are the caller's.
                out = weights if stepping else torch.empty_like(weights)
                weights = torch.sub(weights, slope, alpha=lr, out=out)
                stepping = True
            else:
                weights.grad = slope
                optimizer.step()
            state = after
            self._taken += 1
        if objective.counts:
            self.counters = objective.counted(state)
        return objective.rows(weights, state)

    def _corrected(self, extra: Tensor, theta: Tensor) -> Tensor:
        """A correction as rows, once it is known to be one."""
        widths = (self.objective.width, self.objective.p)
        if (
            extra.ndim != 2
            or len(extra) != len(theta)
            or extra.shape[1] not in widths
            or extra.dtype != theta.dtype
        ):
            raise ValueError(
                f"correction returns {extra.dtype} of shape {list(extra.shape)}; needed are "
                f"{theta.dtype} rows of shape {list(theta.shape)}."
            )
        return extra
