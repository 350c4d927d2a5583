"""The one round loop: handshake, introduce, broadcast, local update, aggregate, evaluate, log."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from . import checkpoint
from .algorithms.base import Algorithm, Cohort, Message, State
from .engines import InProcess
from .evaluation import Evaluator, History, Score
from .federation import Federation, Moments
from .local import Facts, LocalProblem
from .models.base import Model
from .models.logistic import default_model
from .objective import Objective, objective_for
from .options import FedtopoError, OptionError
from .randomness import generator
from .registry import algorithms, datasets, models
from .topology import cloud_size
from .training import Training

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
        theta: the personalised models ``[K, p + b]`` of the last evaluated round.
        counters: whole-number buffers of each client's module ``[K, c]``, of that round too; None
            where there are none, or no round was evaluated.
        unseen: clients that took part in no round; they are scored with what they would receive.
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
    counters: Tensor | None = None
    unseen: int = 0

    @cached_property
    def report(self) -> dict[str, Any]:
        """What the method tells about itself (a partition, weights), computed when first asked.

        See :meth:`fedtopo_torch.algorithms.base.Algorithm.report`.
        """
        return self.algorithm.report(self.server, self.facts, self.described)

    @property
    def described(self) -> list[NDArray[np.float64]]:
        """What the method described of each client, ``[n_k, q]``; its training features mostly.

        See :meth:`fedtopo_torch.algorithms.base.Algorithm.described`.
        """
        federation = self.federation
        if type(self.algorithm).described is Algorithm.described:
            return federation.clouds
        found: list[NDArray[np.float64]] = []
        for i, cloud in enumerate(federation.clouds):
            (data,) = self.objective.some(federation.train, [i])
            problem = LocalProblem(self.objective, data, [cloud], self.facts)
            found += self.algorithm.described(problem)
        return found

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        """One ``state_dict`` per client, for the plain torch module."""
        names = self.federation.names
        counters = [None] * len(names) if self.counters is None else self.counters
        return {
            name: self.objective.state_dict(theta, own)
            for name, theta, own in zip(names, self.theta, counters, strict=True)
        }


class Trainer:
    """Trains one method on one federation.

    Args:
        algorithm: the method.
        federation: the clients' data.
        model: a torch module, or a :class:`~fedtopo_torch.models.base.Model` that builds one.
        seed: of every draw.
        splits, metrics: what is evaluated, see :class:`~fedtopo_torch.evaluation.Evaluator`; by
            default training and test records, and all metrics of the task.
        callbacks: watchers of the run.
        checkpoint: a file to keep the run's state in, every ``checkpoint_every`` rounds and at the
            end; see :mod:`fedtopo_torch.checkpoint`.
        closed_form: use the closed form for ``nn.Linear`` (autograd gives the same to 1e-12).
        **training: of :class:`~fedtopo_torch.training.Training`: rounds, local_steps, eta, ...

    Raises:
        OptionError: an option out of range, ``eta="auto"`` for a model without known L_k, a device
            that is not there, or clients that the model can't be trained on.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        model: nn.Module | Model,
        *,
        seed: int = 0,
        splits: Sequence[str] = ("train", "test"),
        metrics: Sequence[str] | None = None,
        callbacks: Sequence[Callback] = (),
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 10,
        closed_form: bool = True,
        **training: Any,
    ) -> None:
        self.training = Training(**training)
        if not _is_number(seed, Integral):
            raise OptionError(f"seed is {seed!r}: must be a whole number.")
        if not _is_number(checkpoint_every, Integral) or checkpoint_every < 1:
            raise OptionError(
                f"checkpoint_every is {checkpoint_every!r}: must be a whole number of at least 1."
            )
        if not isinstance(algorithm, Algorithm):
            raise OptionError(
                f"algorithm is {algorithm!r}: must be an object of a subclass of Algorithm, for "
                f"example PTopoFL() (names are for train)."
            )
        if not isinstance(model, nn.Module | Model):
            raise OptionError(f"model is {model!r}: must be a torch module (names are for train).")
        self.algorithm = algorithm
        self.federation = federation
        self.seed = seed
        self.callbacks = tuple(callbacks)
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.checkpoint_every = checkpoint_every
        wanted = self.training.clients_per_round
        if wanted is not None and wanted > len(federation):
            raise OptionError(
                f"clients_per_round is {wanted}, but there are only {len(federation)} clients."
            )
        self.device = choose_device(self.training.device, federation.dtype)
        self.module = model.build(federation, seed) if isinstance(model, Model) else model
        self.objective = objective_for(
            self.module,
            federation.task,
            self.training.l2,
            inputs=federation.feature_shape[-1],
            outputs=federation.outputs,
            dtype=federation.dtype,
            closed_form=closed_form,
            device=self.device,
        )
        mean = math.ceil(float(federation.train.n.double().mean()))
        records = min(mean, self.training.batch_size or mean)
        self.objective.check(*_varied(federation), records)
        self._check_batches()
        self.evaluator = Evaluator(federation, self.objective, splits, metrics)

    @property
    def rounds(self) -> int:
        """T, of the settings."""
        return self.training.rounds

    @property
    def eval_every(self) -> int:
        """Rounds between two evaluations."""
        return self.training.eval_every or 1

    def _check_batches(self) -> None:
        """Refuse clients that a module with batch statistics can't be trained on."""
        smallest, size = self.objective.smallest, self.training.batch_size
        few = [
            name
            for name, n in zip(self.federation.names, self.federation.train.n.tolist(), strict=True)
            if min(n, size or n) < smallest
        ]
        if few:
            others = f" and {len(few) - 1} others" if len(few) > 1 else ""
            why = f"client '{few[0]}'{others}: batches of one record"
            raise OptionError(
                f"{self.objective.name} can't be trained on {why}, as BatchNorm can't. Use a "
                f"larger batch_size, leave such clients out, or normalise single records "
                f"(GroupNorm, LayerNorm)."
            )

    def run(self, *, resume: bool = False) -> Result:
        """Train.

        Args:
            resume: go on from the checkpoint where there is one, to the same bits as a run that
                was never stopped; from the start where there is none.

        Warns:
            UserWarning: options that reduce the method to another one, settings that the method
                was not made for, a module that runs client by client.

        Raises:
            Diverged: a model or a loss is no longer finite; names round and client.
            CheckpointError: the checkpoint is damaged.
            OptionError: it is of another configuration (names the difference), or there and nobody
                asked to go on from it.

        Every exception raised after the handshake carries what was done before as ``.result``.
        """
        for text in self._doubts():
            warnings.warn(f"{text}.", stacklevel=2)
        saved, configuration = None, {}
        if self.checkpoint is not None:
            configuration = checkpoint.fingerprint(self)
            saved = checkpoint.find(self.checkpoint, configuration, resume=resume)
        work = int(self.federation.train.n.max()) * math.prod(self.federation.feature_shape)
        with _threads(1 if work < ONE_THREAD_BELOW else None), torch.no_grad():
            return self._run(saved, configuration)

    def _doubts(self) -> list[str]:
        """What a person should know before the run starts."""
        objective, training = self.objective, self.training
        texts = [self.algorithm.degenerate(), self.algorithm.unsound(training)]
        if objective.reason:
            texts.append(
                f"{objective.name} is trained client by client, which takes longer: "
                f"{objective.reason}"
            )
        if training.batch_size is not None and objective.smallest > 1:
            size = training.batch_size
            left = [n for n in self.federation.train.n.tolist() if n > size and n % size == 1]
            if left:
                texts.append(
                    f"{objective.name} can't be trained on one record: the last batch of "
                    f"{len(left)} clients, which would be one, is left out"
                )
        return [text for text in texts if text]

    def _run(self, saved: dict[str, Any] | None, configuration: dict[str, Any]) -> Result:
        federation, algorithm = self.federation, self.algorithm
        engine = InProcess(federation, self.objective, algorithm, self.training)
        communication = Communication()
        facts = self._handshake(engine, communication)
        introductions = engine.introduce(facts)
        communication.record("introduction", "up", introductions)
        theta0 = self.objective.initial()
        engine.start(theta0)
        server = algorithm.server_state(theta0, introductions, facts)

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
        counters = self.objective.counters()
        if saved is not None:
            counters = checkpoint.restore(saved, result, engine)
        with contextlib.ExitStack() as watched:
            # The last to start is the first to finish, and each does, whatever the others raise.
            for callback in self.callbacks:
                callback.started(self, result)
                watched.callback(callback.finished, result)
            try:
                try:
                    self._rounds(engine, result, counters, configuration)
                except KeyboardInterrupt:
                    result.interrupted = True
                self._score_shared(result)
            except Exception as error:
                error.result = result  # type: ignore[attr-defined]
                raise
            finally:
                result.unseen = int((~engine.seen).sum())
                # What a method tells may have changed since it was asked before round 1.
                result.__dict__.pop("report", None)
        return result

    def _cohort(self, round: int) -> Cohort | None:
        """Who takes part in a round; None for everybody."""
        n = self.federation.train.n
        size = self.training.cohort_size(len(n))
        if size == len(n):
            return None
        drawn = generator(self.seed, "participation", round).choice(len(n), size, replace=False)
        index = torch.from_numpy(drawn).sort().values
        return Cohort(index, n[index], int(n.sum()), self.objective.p)

    def _rounds(
        self,
        engine: InProcess,
        result: Result,
        counters: Tensor,
        configuration: dict[str, Any],
    ) -> None:
        """The loop; ``result`` always holds all that is finished."""
        algorithm, server, history = self.algorithm, result.server, result.history
        sent = result.communication
        n = self.federation.train.n
        everyone = Cohort(torch.arange(len(n)), n, int(n.sum()), self.objective.p)
        # The broadcast that models are scored with is the one the next round starts from, where
        # everybody takes part.
        message: Message | None = None
        for round in range(result.rounds + 1, self.rounds + 1):
            cohort = self._cohort(round)
            asked = cohort or everyone
            if message is None or cohort is not None:
                message = algorithm.broadcast(server, asked)
            sent.record("round", "down", engine.sent(message))
            uplink, counted = engine.update(message, round, cohort, counters if message else None)
            sent.record("round", "up", engine.sent(uplink))
            kept = engine.client
            if cohort is not None:
                kept = {name: value[cohort.index] for name, value in kept.items()}
            self._check(round, result, asked, uplink, kept)
            server = algorithm.aggregate(server, uplink, asked)
            if uplink and self.objective.counts:
                counters = torch.maximum(counters, counted.max(0).values)
            message = None
            scored = round % self.eval_every == 0 or round == self.rounds
            if scored:
                message = algorithm.broadcast(server, everyone)
                theta = engine.personal(message, round)
                scores = self.evaluator(theta, algorithm.clusters(server))
                self._check_scores(round, result, scores)
                history.add(round, scores)
                # A copy: rows of the clients' state are written again next round.
                result.theta, result.scored = theta.clone(), server
                if self.objective.counts:
                    # A shared model has the largest counters, a client's own model its own.
                    shared = bool(uplink) and self.training.buffers == "average"
                    own = counters.expand_as(engine.counters) if shared else engine.counters
                    result.counters = own.clone()
            result.server, result.rounds = server, round
            if scored:
                for callback in self.callbacks:
                    callback.evaluated(round, scores)
            if self.checkpoint and (round % self.checkpoint_every == 0 or round == self.rounds):
                checkpoint.save(self.checkpoint, configuration, result, engine, counters)

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
        training = self.training
        if training.eta != "auto":
            eta = float(training.eta)
        elif "smoothness" in hello:
            eta = 1.0 / float(hello["smoothness"].max())
        else:
            raise OptionError(
                "eta='auto' needs a model whose smoothness is known (logistic or softmax "
                "regression); give a step size, for example eta=0.05."
            )
        n = hello["n"]
        moments = Moments.of(n, hello["feature_sum"], hello["feature_squares"])
        steps: float = training.local_steps
        if training.local_epochs is not None:
            taken = [training.steps(m, self.objective.smallest) for m in n.tolist()]
            steps = int((n * torch.tensor(taken)).sum()) / int(n.sum())
        facts = Facts(
            eta=eta,
            local_steps=steps,
            l2=training.l2,
            seed=self.seed,
            mean=moments.mean,
            scale=moments.scale(),
            smallest=cloud_size(n.numpy(), n_sub=int(n.max())),
            n=n,
            names=self.federation.names,
            groups=self.federation.groups,
            parameters=self.objective.p,
            training=training,
        )
        answer = {
            "mean": facts.mean[None],
            "scale": facts.scale[None],
            "eta": torch.tensor([[facts.eta]]),
            "smallest": torch.tensor([[facts.smallest]]),
        }
        communication.record("handshake", "down", answer)
        return facts

    def _check(self, round: int, result: Result, cohort: Cohort, *states: State) -> None:
        for state in states:
            for name, value in state.items():
                # The sum is a cheap first look; it can overflow where no entry did.
                if math.isfinite(value.sum()) or not value.is_floating_point():
                    continue
                if not bool(value.isfinite().all()):
                    wrong = ~value.cpu().reshape(len(value), -1).isfinite().all(1)
                    broken = torch.zeros(len(self.federation), dtype=torch.bool)
                    broken[cohort.index[wrong]] = True
                    self._diverged(round, result, broken, f"its {name} is not finite")

    def _check_scores(
        self, round: int, result: Result, scores: dict[tuple[str, str], Score]
    ) -> None:
        for (split, metric), score in scores.items():
            # Also False for NaN.
            limit = {"log_loss": LARGEST_LOSS, "rmse": math.inf}.get(metric)
            if limit is not None and not score.pooled < limit:
                broken = ~(score.clients < limit) & (self.evaluator.n[split] > 0)
                what = f"its {split} {metric.replace('_', '-')} is"
                self._diverged(
                    round, result, broken, f"{what} {float(score.clients[broken][0]):.3g}"
                )

    def _diverged(self, round: int, result: Result, broken: Tensor, what: str) -> None:
        names = [n for n, bad in zip(self.federation.names, broken.tolist(), strict=True) if bad]
        others = f" (and {len(names) - 1} others)" if len(names) > 1 else ""
        raise Diverged(
            f"{self.algorithm.label} diverged in round {round} at "
            f"client '{names[0]}'{others}: {what}. The step size is eta = {result.facts.eta:.6g}; "
            f"try a smaller one."
        )


def _varied(federation: Federation) -> tuple[Tensor, Tensor]:
    """Records of the first client that has two different ones, to try a model on."""
    for k in range(min(len(federation), 100)):
        features, labels = federation.train.client(k)
        if bool((features != features[:1]).any()):
            return features, labels
    return federation.train.client(0)


def choose_device(name: str, dtype: torch.dtype) -> torch.device:
    """The device to run on.

    Args:
        name: ``"cpu"``, ``"cuda"`` (``"cuda:1"``), ``"mps"`` or ``"auto"``: CUDA where there is
            one, else MPS where there is one and the data are float32, else the CPU.
        dtype: of the data.

    Raises:
        OptionError: there is no such device, or it can't compute in this dtype.
    """
    kind = name.partition(":")[0]
    mps = torch.backends.mps.is_available()
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if mps and dtype == torch.float32 else "cpu")
    if kind not in ("cpu", "cuda", "mps"):
        raise OptionError(f"device is '{name}': must be auto, cpu, cuda or mps.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise OptionError("device is 'cuda', but torch finds no CUDA device here: use cpu or auto.")
    if kind == "mps":
        if dtype == torch.float64:
            raise OptionError(
                "device 'mps' can't compute in float64: use a float32 federation, or cpu."
            )
        if not mps:
            raise OptionError("device is 'mps', but torch finds none here: use cpu or auto.")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device is '{name}': {str(error).partition(chr(10))[0]}") from None
    return device


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
