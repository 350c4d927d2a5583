"""Methods x federations x seeds, on all cores: the engine behind ``fedtopo compare``.

Every method is trained on the same splits. A result does not depend on how many processes there
are, to the bit. A run that fails becomes a row that says why, and stops no other.

    comparison = compare(["local", "fedavg", "ptopofl"], "fed_heart_disease", seeds=10)
    for row in comparison.summary():
        print(row.method, row.loss.mean, row.mark)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .evaluation import METRICS_OF, POOLED
from .execution import Execution, Progress, Run, execute
from .plan import METHODS, Choice, Job, Plan, Spec, Specs
from .significance import TIE, PairedTest, against_reference
from .trainer import Communication
from .training import Training

if TYPE_CHECKING:
    from .tuning import Tuning

__all__ = [
    "METHODS",
    "Choice",
    "Comparison",
    "Job",
    "LongRow",
    "Plan",
    "Run",
    "Spread",
    "Summary",
    "Training",
    "compare",
    "run_plan",
]


def compare(
    algorithms: Specs = "all",
    datasets: Specs = "fed_heart_disease",
    seeds: int | Iterable[int] = 10,
    *,
    model: Spec = "auto",
    processes: int | None = None,
    folder: str | Path | None = None,
    on_progress: Progress | None = None,
    tune: Mapping[str, Sequence[Any]] | None = None,
    **training: Any,
) -> Comparison:
    """Train every method on every federation with every seed.

    A script needs no ``if __name__ == "__main__"`` for it.

    Args:
        algorithms: ``"all"`` (:data:`METHODS`), or methods: names (built in, or of files in
            ./algorithms), ``(name, options)``, instances, or a mapping from labels of your own to
            these.
        datasets: federations, in the same forms.
        seeds: how many (10 is 0 to 9), or which; at least 6 for significance tests.
        model: a name, ``(name, options)`` or instance; ``"auto"`` is logistic regression, softmax
            for several classes.
        processes, folder, on_progress: of :func:`run_plan`.
        tune: values by name of a training setting, ``{"eta": [0.01, 0.1]}``: chosen for each method
            on validation records, see :mod:`fedtopo_torch.tuning`.
        **training: of :class:`Training`.

    Raises:
        OptionError, RunFolderError: as :meth:`Plan.of` and :func:`run_plan`.
    """
    plan = Plan.of(algorithms, datasets, seeds, model=model, **training)
    if tune:
        from .tuning import run_tuned

        return run_tuned(plan, tune, processes=processes, folder=folder, on_progress=on_progress)
    return run_plan(plan, processes=processes, folder=folder, on_progress=on_progress)


def run_plan(
    plan: Plan,
    *,
    processes: int | None = None,
    folder: str | Path | None = None,
    on_progress: Progress | None = None,
) -> Comparison:
    """Run all of a plan.

    Args:
        plan: what to run.
        processes, folder, on_progress: of :func:`fedtopo_torch.execution.execute`.

    Returns:
        all runs that ended; after Ctrl-C those until then, with ``interrupted`` set.

    Raises:
        OptionError, RunFolderError, RuntimeError: as :func:`fedtopo_torch.execution.execute`.
    """
    done = execute(plan.jobs(), processes=processes, folder=folder, on_progress=on_progress)
    return Comparison.of_execution(plan, done)


# ---- what came out ------------------------------------------------------------------------------


class LongRow(NamedTuple):
    """One value of the last round; ``client`` is a name or ``(pooled)``, n its records."""

    dataset: str
    algorithm: str
    seed: int
    client: str
    split: str
    metric: str
    value: float
    n: int


class Spread(NamedTuple):
    """Mean and standard deviation (ddof 0) over the seeds that have a value; NaN for none."""

    mean: float
    std: float
    seeds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        kept = np.array([v for v in values if not math.isnan(v)], dtype=np.float64)
        if not len(kept):
            return cls(math.nan, math.nan, 0)
        return cls(float(kept.mean()), float(kept.std()), len(kept))


@dataclass(frozen=True)
class Summary:
    """One method on one federation, over seeds.

    Attributes:
        dataset, method: labels.
        deployable: False for references that use what no server knows.
        finished, failed, planned: seeds. Planned but neither: an interrupt came first.
        metrics: the two of the task that tables show: ``("log_loss", "auc")``, of a regression
            ``("rmse", "r2")``.
        loss, score: these two, pooled over all honest clients' test records. AUC is left out where
            all of them are of one class. accuracy: likewise; a regression has none.
        test: against the reference, on the pooled loss; None for the reference itself and where
            there is none.
        worse_than_fedavg, worse_than_local: fraction in [0, 1] of clients whose test loss is above
            (by 1e-9 or more) what they have under FedAvg, under Local; mean over seeds. NaN where
            that method is not compared.
        worst_client: largest test loss of a client, mean over seeds.
        client_loss, client_score, client_accuracy: unweighted mean over clients, over seeds; a
            regression has no accuracy.
        client_values: clients times finished seeds.
        without_value: of these, without a test record: left out of everything per client.
        without_score: of these, whose score is undefined (AUC: test records of one class): left out
            of ``client_score``.
        parameters: p of the model.
        up, down: (floats, integers) a client sends and receives in a round.
        up_once, down_once: likewise before round 1, in the introduction.
        handshake_up, handshake_down: likewise in the handshake, which no method is spared.
        seconds: wall time of a run, mean over seeds.
    """

    dataset: str
    method: str
    deployable: bool
    finished: int
    failed: int
    planned: int
    metrics: tuple[str, str]
    loss: Spread
    score: Spread
    accuracy: Spread
    test: PairedTest | None
    worse_than_fedavg: float
    worse_than_local: float
    worst_client: float
    client_loss: float
    client_score: float
    client_accuracy: float
    client_values: int
    without_value: int
    without_score: int
    parameters: int
    up: tuple[int, int]
    down: tuple[int, int]
    up_once: tuple[int, int]
    down_once: tuple[int, int]
    handshake_up: tuple[int, int]
    handshake_down: tuple[int, int]
    seconds: float

    @property
    def mark(self) -> str:
        """``"+"`` significantly worse than the reference, ``"-"`` better, else ``""``."""
        return self.test.mark if self.test else ""


@dataclass(frozen=True)
class Comparison:
    """All runs of a plan that ended, in the plan's order.

    Attributes:
        plan: what was to be run.
        runs: finished and failed ones.
        interrupted: Ctrl-C came before all had run.
        seconds: of wall time, starting the processes included.
        processes: how many ran at a time.
        tuning: what was tried and taken, where settings were tuned.
    """

    plan: Plan
    runs: tuple[Run, ...]
    interrupted: bool = False
    seconds: float = 0.0
    processes: int = 1
    tuning: Tuning | None = None

    @classmethod
    def of_execution(cls, plan: Plan, done: Execution) -> Comparison:
        """The plan's runs out of an execution that had its jobs among others."""
        runs = (done.run(job) for job in plan.jobs())
        ended = tuple(run for run in runs if run is not None)
        return cls(plan, ended, done.interrupted, done.seconds, done.processes)

    @property
    def failures(self) -> list[Run]:
        """Runs that failed, with :attr:`Run.error`."""
        return [run for run in self.runs if run.error is not None]

    @property
    def stored(self) -> int:
        """Runs that were taken from the folder."""
        return sum(run.stored for run in self.runs)

    @cached_property
    def _by_key(self) -> dict[tuple[str, str, int], Run]:
        return {(run.dataset, run.method, run.seed): run for run in self.runs}

    def of(self, dataset: str, method: str) -> list[Run]:
        """The finished runs of a method on a federation, by labels, in the order of seeds."""
        runs = (self._by_key.get((dataset, method, seed)) for seed in self.plan.seeds)
        return [run for run in runs if run is not None and run.error is None]

    def metrics(self, dataset: str) -> tuple[str, str]:
        """The two metrics of a federation's task that tables show, the loss first."""
        loss, score, *_ = METRICS_OF[self.task(dataset)]
        return loss, score

    def task(self, dataset: str) -> str:
        """Of a federation, by label; binary where no run on it has finished."""
        for run in self.runs:
            if run.dataset == dataset and run.error is None:
                return run.task
        return "binary"

    def values(
        self, dataset: str, method: str, metric: str | None = None, split: str = "test"
    ) -> NDArray[np.float64]:
        """Pooled values ``[S]`` in the order of the plan's seeds; NaN where there is no run.

        Of the loss of the federation's task where no metric is named.
        """
        metric = metric or self.metrics(dataset)[0]
        found = {run.seed: run.pooled[f"{split} {metric}"] for run in self.of(dataset, method)}
        return np.array([found.get(seed, math.nan) for seed in self.plan.seeds])

    def clients(self, dataset: str) -> list[str]:
        """Names of all clients of a federation, in order."""
        runs = [run for run in self.runs if run.dataset == dataset]
        return sorted({name for run in runs for name in run.clients})

    def client_values(
        self, dataset: str, method: str, metric: str | None = None, split: str = "test"
    ) -> NDArray[np.float64]:
        """Per-client values ``[S, K]``, seeds and clients in order; NaN where there is none.

        Of the loss of the federation's task where no metric is named.
        """
        metric = metric or self.metrics(dataset)[0]
        names = self.clients(dataset)
        at = {name: k for k, name in enumerate(names)}
        found = {run.seed: run for run in self.of(dataset, method)}
        values = np.full((len(self.plan.seeds), len(names)), math.nan)
        for s, seed in enumerate(self.plan.seeds):
            if seed in found:
                run = found[seed]
                values[s, [at[name] for name in run.clients]] = run.scored(split, metric)
        return values

    def curve(self, dataset: str, method: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Rounds ``[R]`` and pooled test losses ``[S', R]`` of the finished seeds."""
        runs = self.of(dataset, method)
        rounds = runs[0].curve_rounds if runs else ()
        values = np.array([run.curve for run in runs]).reshape(len(runs), len(rounds))
        return np.array(rounds, dtype=np.int64), values

    def rows(self) -> Iterator[LongRow]:
        """The long table of all finished runs: every metric, split, client, and pooled."""
        for run in self.runs:
            honest = np.array(run.honest, dtype=bool)
            for key, pooled in run.pooled.items():
                split, metric = key.split(" ")
                n = run.n[split]
                start = (run.dataset, run.method, run.seed)
                total = int(np.array(n)[honest].sum())
                yield LongRow(*start, POOLED, split, metric, pooled, total)
                for name, value, count in zip(run.clients, run.per_client[key], n, strict=True):
                    yield LongRow(*start, name, split, metric, value, count)

    def reference(self, name: str | None = None) -> Choice | None:
        """The method that others are tested against: the one named, or pTopoFL, or none.

        Raises:
            OptionError: the one named is not compared.
        """
        if name is not None:
            return self.plan.method(name)
        return next((method for method in self.plan.methods if method.key == "ptopofl"), None)

    def summary(self, reference: str | None = None) -> list[Summary]:
        """One row per federation and method, in the plan's order.

        Args:
            reference: label or name of the method that others are tested against; by default
                pTopoFL where it is compared, else nothing is tested.

        Raises:
            OptionError: the reference is not compared.
        """
        chosen = self.reference(reference)
        label = chosen.label if chosen else None
        if label not in self._summaries:
            self._summaries[label] = self._summarised(chosen)
        return list(self._summaries[label])

    @cached_property
    def _summaries(self) -> dict[str | None, list[Summary]]:
        """By the label of the reference."""
        return {}

    def _summarised(self, chosen: Choice | None) -> list[Summary]:
        rows = []
        for dataset in self.plan.datasets:
            tests: dict[str, PairedTest] = {}
            if chosen is not None:
                values = {m.label: self.values(dataset.label, m.label) for m in self.plan.methods}
                tests = against_reference(values, chosen.label)
            for method in self.plan.methods:
                rows.append(self._summary(dataset.label, method, tests.get(method.label)))
        return rows

    def _summary(self, dataset: str, method: Choice, test: PairedTest | None) -> Summary:
        label = method.label
        runs = self.of(dataset, label)
        loss, score = metrics = self.metrics(dataset)
        scored = [run.scored(metric=loss) for run in runs]
        defined = [values[~np.isnan(values)] for values in scored]
        scores = [run.scored(metric=score) for run in runs]
        accuracies = [
            run.scored(metric="accuracy") for run in runs if "test accuracy" in run.pooled
        ]
        sent = runs[0].communication if runs else Communication()

        def count(stage: dict[str, tuple[int, int]], direction: str) -> tuple[int, int]:
            return stage.get(direction, (0, 0))

        return Summary(
            dataset=dataset,
            method=label,
            deployable=method.instance.deployable,
            finished=len(runs),
            failed=sum(run.dataset == dataset and run.method == label for run in self.failures),
            planned=len(self.plan.seeds),
            metrics=metrics,
            loss=Spread.of(self.values(dataset, label)),
            score=Spread.of(self.values(dataset, label, score)),
            accuracy=Spread.of(run.pooled.get("test accuracy", math.nan) for run in runs),
            test=test,
            worse_than_fedavg=self._worse(dataset, runs, "fedavg"),
            worse_than_local=self._worse(dataset, runs, "local"),
            worst_client=Spread.of(float(v.max()) for v in defined if len(v)).mean,
            client_loss=_mean_of_means(scored),
            client_score=_mean_of_means(scores),
            client_accuracy=_mean_of_means(accuracies),
            client_values=sum(sum(run.honest) for run in runs),
            without_value=sum(sum(run.honest) for run in runs) - sum(map(len, defined)),
            without_score=sum(
                int((np.isnan(own) & ~np.isnan(other)).sum())
                for own, other in zip(scores, scored, strict=True)
            ),
            parameters=runs[0].parameters if runs else 0,
            up=count(sent.round, "up"),
            down=count(sent.round, "down"),
            up_once=count(sent.introduction, "up"),
            down_once=count(sent.introduction, "down"),
            handshake_up=count(sent.handshake, "up"),
            handshake_down=count(sent.handshake, "down"),
            seconds=Spread.of(run.seconds for run in runs).mean,
        )

    def _worse(self, dataset: str, runs: Sequence[Run], name: str) -> float:
        """Fraction of clients worse off than under the plain method of this name."""
        plain = [m for m in self.plan.methods if m.key == name]
        other = next((m for m in plain if m.is_default), plain[0] if plain else None)
        if other is None:
            return math.nan
        fractions = []
        loss = self.metrics(dataset)[0]
        for run in runs:
            twin = self._by_key.get((dataset, other.label, run.seed))
            if twin is None or twin.error is not None:
                continue
            gap = run.scored(metric=loss) - twin.scored(metric=loss)
            gap = gap[~np.isnan(gap)]
            if len(gap):
                fractions.append(float((gap >= TIE).mean()))
        return Spread.of(fractions).mean


def _mean_of_means(per_seed: Sequence[NDArray[np.float64]]) -> float:
    means = [Spread.of(values.tolist()).mean for values in per_seed]
    return Spread.of(means).mean
