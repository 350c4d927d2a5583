"""The one round loop: handshake, introduce, broadcast, local update, aggregate, evaluate, log."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .algorithms.base import Algorithm, Cohort, Message, State
from .engines import InProcess
from .evaluation import METRICS, Evaluator, History, Score
from .federation import Federation, Moments
from .local import Facts, Objective, objective_for
from .models.base import Model
from .models.logistic import default_model
from .options import FedtopoError, OptionError
from .registry import algorithms, datasets, models
from .topology import cloud_size

# Normalise a record by the others in its batch, with or without running statistics.
_MIXING = (nn.modules.batchnorm._BatchNorm,)

__all__ = ["Callback", "Communication", "Diverged", "Result", "Trainer", "train"]

# Up to this many feature values per step a second thread costs more than it brings.
ONE_THREAD_BELOW = 4_000_000

# No model that is still learning has a mean log-loss like this: ln 2 is a coin's.
LARGEST_LOSS = 1e6


class Diverged(RuntimeError, FedtopoError):
    """Training left the finite numbers."""


@dataclass
class Communication:
    """Numbers sent per client, counted from the messages themselves.

    Every entry is ``{"up": (floats, integers), "down": (floats, integers)}`` for one client; up is
    what the client sends. ``handshake`` and ``introduction`` happen once, ``round`` every round.
    """

    handshake: dict[str, tuple[int, int]] = field(default_factory=dict)
    introduction: dict[str, tuple[int, int]] = field(default_factory=dict)
    round: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: What the messages consist of: ``{"introduction": {"descriptor": 46}, ...}``.
    contents: dict[str, dict[str, int]] = field(default_factory=dict)

    def record(self, stage: str, direction: str, message: Message) -> None:
        """Count one message of rows, one per client; of several rounds the largest is kept."""
        floats = integers = 0
        for value in message.values():
            size = value.numel() // value.shape[0]
            if value.is_floating_point():
                floats += size
            else:
                integers += size
        counts: dict[str, tuple[int, int]] = getattr(self, stage)
        before = counts.get(direction)
        if before is None or floats > before[0] or integers > before[1]:
            before = before or (0, 0)
            counts[direction] = (max(floats, before[0]), max(integers, before[1]))
            self.contents[f"{stage} {direction}"] = {
                name: value.numel() // len(value) for name, value in message.items()
            }

    def total_floats_up(self, rounds: int) -> int:
        """All floats one client sends in a run of ``rounds`` rounds."""
        once = self.handshake["up"][0] + self.introduction["up"][0]
        return once + rounds * self.round.get("up", (0, 0))[0]


class Callback(Protocol):
    """Something that watches a run: a progress bar, a TensorBoard writer."""

    def started(self, trainer: Trainer, result: Result) -> None:
        """After the handshake and the introductions, before round 1."""

    def evaluated(self, round: int, scores: dict[tuple[str, str], Score]) -> None:
        """After every evaluated round."""

    def finished(self, result: Result) -> None:
        """At the end, also of an interrupted or diverged run."""


@dataclass
class Result:
    """What a run gives back.

    Attributes:
        algorithm: the method, with its options.
        federation: the data it was trained on.
        objective: the model's objective; turns rows into modules.
        facts: of the handshake.
        history: all scores, and the long table.
        theta: the personalised models ``[K, p]`` of the last evaluated round.
        server: the server's state.
        scored: the server's state at the last evaluated round, that of ``theta``.
        communication: numbers sent per client.
        rounds: rounds done.
        interrupted: stopped by Ctrl-C after ``rounds`` rounds.
    """

    algorithm: Algorithm
    federation: Federation
    objective: Objective
    facts: Facts
    history: History
    theta: Tensor
    server: State
    scored: State
    communication: Communication = field(default_factory=Communication)
    rounds: int = 0
    interrupted: bool = False

    @cached_property
    def report(self) -> dict[str, Any]:
        """What the method tells about itself (a partition, weights), computed when first asked.

        See :meth:`fedtopo_torch.algorithms.base.Algorithm.report`.
        """
        return self.algorithm.report(self.server, self.facts, self.federation.clouds)

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        """One ``state_dict`` per client, for the plain torch module."""
        return {
            name: self.objective.state_dict(theta)
            for name, theta in zip(self.federation.names, self.theta, strict=True)
        }


class Trainer:
    """Trains one method on one federation.

    Args:
        algorithm: the method.
        federation: the clients' data.
        model: a torch module, or a :class:`~fedtopo_torch.models.base.Model` that builds one.
        rounds: T >= 1 communication rounds.
        local_steps: tau >= 1 gradient steps per client and round.
        eta: step size > 0, or ``"auto"`` for 1 / max_k L_k, known for linear models.
        l2: lambda >= 0 of the L2 term on all trainable parameters, biases too.
        seed: of every draw.
        eval_every: evaluate every so many rounds, and after the last.
        splits, metrics: what is evaluated, see :class:`~fedtopo_torch.evaluation.Evaluator`.
        callbacks: watchers of the run.
        closed_form: use the closed form for ``nn.Linear`` (autograd gives the same to 1e-12).

    Raises:
        OptionError: an option out of range, or ``eta="auto"`` for a model without known L_k.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        model: nn.Module | Model,
        *,
        rounds: int = 150,
        local_steps: int = 10,
        eta: float | str = "auto",
        l2: float = 0.01,
        seed: int = 0,
        eval_every: int = 1,
        splits: Sequence[str] = ("train", "test"),
        metrics: Sequence[str] = METRICS,
        callbacks: Sequence[Callback] = (),
        closed_form: bool = True,
    ) -> None:
        for name, value in (
            ("rounds", rounds),
            ("local_steps", local_steps),
            ("eval_every", eval_every),
        ):
            if not _is_number(value, Integral) or value < 1:
                raise OptionError(f"{name} is {value!r}: must be a whole number of at least 1.")
        if not _is_number(seed, Integral):
            raise OptionError(f"seed is {seed!r}: must be a whole number.")
        if not _is_number(l2, Real) or not l2 >= 0:
            raise OptionError(f"l2 is {l2!r}: must be a finite number of at least 0.")
        if not isinstance(eta, str) and (not _is_number(eta, Real) or not eta > 0):
            raise OptionError(f"eta is {eta!r}: must be 'auto' or a finite number above 0.")
        if isinstance(eta, str) and eta != "auto":
            raise OptionError(f"eta is '{eta}': must be 'auto' or a finite number above 0.")
        if not isinstance(algorithm, Algorithm):
            raise OptionError(
                f"algorithm is {algorithm!r}: must be an object of a subclass of Algorithm, for "
                f"example PTopoFL() (names are for train)."
            )
        if not isinstance(model, nn.Module | Model):
            raise OptionError(f"model is {model!r}: must be a torch module (names are for train).")
        self.algorithm = algorithm
        self.federation = federation
        self.rounds = rounds
        self.local_steps = local_steps
        self.eta = eta
        self.l2 = l2
        self.seed = seed
        self.eval_every = eval_every
        self.callbacks = tuple(callbacks)
        module = model.build(federation, seed) if isinstance(model, Model) else model
        kept = [name for name, _ in module.named_buffers()]
        kept += [n for n, m in module.named_modules() if isinstance(m, _MIXING)]
        if kept:
            raise OptionError(
                f"{type(module).__name__} has buffers or mixes records ({', '.join(kept[:3])}"
                f"{', ...' if len(kept) > 3 else ''}), as BatchNorm does. How clients merge those "
                f"is not decided in this version: use a normalisation of single records, for "
                f"example GroupNorm or LayerNorm."
            )
        self.objective = objective_for(
            module,
            federation.task,
            l2,
            inputs=federation.feature_shape[-1],
            outputs=federation.outputs,
            dtype=federation.dtype,
            closed_form=closed_form,
        )
        self.objective.check(*federation.train.client(0))
        self.evaluator = Evaluator(federation, self.objective, splits, metrics)

    def run(self) -> Result:
        """Train.

        Warns:
            UserWarning: options that reduce the method to another one.

        Raises:
            Diverged: a model or a loss is no longer finite; names round and client.

        Every exception raised after the handshake carries what was done before as ``.result``.
        """
        reduced = self.algorithm.degenerate()
        if reduced:
            warnings.warn(f"{reduced}.", stacklevel=2)
        work = max(data.features.numel() for data in self.objective.data(self.federation.train))
        with _threads(1 if work < ONE_THREAD_BELOW else None), torch.no_grad():
            return self._run()

    def _run(self) -> Result:
        federation, algorithm = self.federation, self.algorithm
        engine = InProcess(federation, self.objective, algorithm)
        communication = Communication()
        facts = self._handshake(engine, communication)
        introductions = engine.introduce(facts)
        communication.record("introduction", "up", introductions)
        theta0 = self.objective.initial()
        engine.start(theta0)
        server = algorithm.server_state(theta0, introductions, facts)
        n = federation.train.n
        everyone = Cohort(torch.arange(len(federation)), n, int(n.sum()))

        history = History(federation.names, self.evaluator.n, federation.honest, self.seed)
        result = Result(
            algorithm,
            federation,
            self.objective,
            facts,
            history,
            theta0.repeat(len(federation), 1),
            server,
            server,
            communication,
        )
        with contextlib.ExitStack() as watched:
            # The last to start is the first to finish, and each does, whatever the others raise.
            for callback in self.callbacks:
                callback.started(self, result)
                watched.callback(callback.finished, result)
            try:
                try:
                    self._rounds(engine, everyone, result)
                except KeyboardInterrupt:
                    result.interrupted = True
                self._score_shared(result)
            except Exception as error:
                error.result = result  # type: ignore[attr-defined]
                raise
            finally:
                # What a method tells may have changed since it was asked before round 1.
                result.__dict__.pop("report", None)
        return result

    def _rounds(self, engine: InProcess, everyone: Cohort, result: Result) -> None:
        """The loop; ``result`` always holds all that is finished."""
        algorithm, server, history = self.algorithm, result.server, result.history
        # The broadcast that models are scored with is the one the next round starts from.
        message = algorithm.broadcast(server, everyone)
        for round in range(1, self.rounds + 1):
            uplink = engine.update(message, round)
            result.communication.record("round", "down", message)
            result.communication.record("round", "up", uplink)
            self._check(round, result, uplink, engine.client)
            server = algorithm.aggregate(server, uplink, everyone)
            message = algorithm.broadcast(server, everyone)
            scored = round % self.eval_every == 0 or round == self.rounds
            if scored:
                theta = engine.personal(message, round)
                scores = self.evaluator(theta, algorithm.clusters(server))
                self._check_scores(round, result, scores)
                history.add(round, scores)
                # A copy: rows of the clients' state are written again next round.
                result.theta, result.scored = theta.clone(), server
            result.server, result.rounds = server, round
            if scored:
                for callback in self.callbacks:
                    callback.evaluated(round, scores)

    def _score_shared(self, result: Result) -> None:
        """Score the one shared model of the last evaluated round, where a method has one."""
        shared = self.algorithm.shared(result.scored)
        if shared is None or not result.history.rounds:
            return
        rows = shared.expand(len(self.federation), -1)
        scores = self.evaluator(rows, self.algorithm.clusters(result.scored))
        self._check_scores(result.history.rounds[-1], result, scores)
        result.history.shared = scores

    def _handshake(self, engine: InProcess, communication: Communication) -> Facts:
        hello = engine.handshake()
        communication.record("handshake", "up", hello)
        if self.eta != "auto":
            eta = float(self.eta)
        elif "smoothness" in hello:
            eta = 1.0 / float(hello["smoothness"].max())
        else:
            raise OptionError(
                "eta='auto' needs a model whose smoothness is known (logistic or softmax "
                "regression); give a step size, for example eta=0.05."
            )
        n = hello["n"]
        moments = Moments.of(n, hello["feature_sum"], hello["feature_squares"])
        facts = Facts(
            eta=eta,
            local_steps=self.local_steps,
            l2=self.l2,
            seed=self.seed,
            mean=moments.mean,
            scale=moments.scale(),
            smallest=cloud_size(n.numpy(), n_sub=int(n.max())),
            n=n,
            names=self.federation.names,
            groups=self.federation.groups,
        )
        answer = {
            "mean": facts.mean[None],
            "scale": facts.scale[None],
            "eta": torch.tensor([[facts.eta]]),
            "smallest": torch.tensor([[facts.smallest]]),
        }
        communication.record("handshake", "down", answer)
        return facts

    def _check(self, round: int, result: Result, *states: State) -> None:
        for state in states:
            for name, value in state.items():
                # The sum is a cheap first look; it can overflow where no entry did.
                if math.isfinite(value.sum()) or not value.is_floating_point():
                    continue
                if not bool(value.isfinite().all()):
                    broken = ~value.reshape(len(value), -1).isfinite().all(1)
                    self._diverged(round, result, broken, f"its {name} is not finite")

    def _check_scores(
        self, round: int, result: Result, scores: dict[tuple[str, str], Score]
    ) -> None:
        for (split, metric), score in scores.items():
            # Also False for NaN.
            if metric == "log_loss" and not score.pooled < LARGEST_LOSS:
                broken = ~(score.clients < LARGEST_LOSS) & (self.evaluator.n[split] > 0)
                value = float(score.clients[broken][0])
                self._diverged(round, result, broken, f"its {split} log-loss is {value:.3g}")

    def _diverged(self, round: int, result: Result, broken: Tensor, what: str) -> None:
        names = [n for n, bad in zip(self.federation.names, broken.tolist(), strict=True) if bad]
        others = f" (and {len(names) - 1} others)" if len(names) > 1 else ""
        raise Diverged(
            f"{self.algorithm.label} diverged in round {round} at "
            f"client '{names[0]}'{others}: {what}. The step size is eta = {result.facts.eta:.6g}; "
            f"try a smaller one."
        )


def _is_number(value: object, kind: type[Integral] | type[Real]) -> bool:
    """A finite number of Python's or NumPy's, and not a bool."""
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Use ``count`` torch threads, and give the caller's setting back."""
    before = torch.get_num_threads()
    if count is not None and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def train(
    algorithm: str | Algorithm = "ptopofl",
    dataset: str | Federation = "fed_heart_disease",
    model: str | nn.Module | Model | None = None,
    *,
    seed: int = 0,
    **settings: Any,
) -> Result:
    """Train one method by names: ``train("ptopofl", "fed_heart_disease", rounds=150)``.

    Args:
        algorithm: a name (built in, or a file in ./algorithms) or an instance with options.
        dataset: a name, or a federation of your own.
        model: a name, a module; by default logistic regression, softmax for several classes.
        seed: of the split, of the data where they are drawn, and of the run.
        **settings: of :class:`Trainer`.
    """
    method: Algorithm = algorithms[algorithm]() if isinstance(algorithm, str) else algorithm
    federation = datasets[dataset]().load(seed) if isinstance(dataset, str) else dataset
    if model is None:
        model = default_model(federation.task)
    network: nn.Module | Model = models[model]() if isinstance(model, str) else model
    return Trainer(method, federation, network, seed=seed, **settings).run()
