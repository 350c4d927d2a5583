"""Tuning of training settings: for every method on validation records, with the same budget.

Each method is trained with the same candidates, the product of the values given, on every seed. The
candidate with the lowest mean validation loss is the method's; its runs are what is compared. Test
records take no part in the choice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .comparison import Comparison, Spread
from .evaluation import METRICS_OF
from .execution import Execution, Progress, Run, execute
from .options import OptionError, did_you_mean
from .plan import Job, Plan
from .training import Training

__all__ = ["Tuned", "Tuning", "candidates", "parse_tune", "run_tuned"]

#: Settings that are no choice of a method's: they change the budget or only the way to compute.
NOT_TUNED = ("rounds", "eval_every", "chunk_clients", "device")
MOST = 200


@dataclass(frozen=True)
class Tuned:
    """How one method was tuned on one federation.

    Attributes:
        losses: mean and std of the pooled validation loss over seeds, per candidate.
        chosen: position of the candidate that was taken; None where none finished all seeds.
    """

    losses: tuple[Spread, ...]
    chosen: int | None


@dataclass(frozen=True)
class Tuning:
    """What was tried, and what was taken.

    Attributes:
        candidates: the settings that were varied, by name.
        methods: by labels of federation and method.
    """

    candidates: tuple[dict[str, Any], ...]
    methods: dict[tuple[str, str], Tuned]


def parse_tune(entries: Sequence[str]) -> dict[str, list[str]]:
    """``["eta=0.01,0.1", "batch_size=16,32"]`` as values by name.

    Raises:
        OptionError: an entry without ``=``, without a value, or a name given twice.
    """
    found: dict[str, list[str]] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        name = name.strip().replace("-", "_")
        values = [value.strip() for value in text.split(",") if value.strip()]
        if not equals or not name or not values:
            raise OptionError(f"'{entry}' is not NAME=VALUE,VALUE,..., for example eta=0.01,0.1.")
        if name in found:
            raise OptionError(f"'{name}' is to be tuned twice: give all its values at once.")
        found[name] = values
    return found


def candidates(training: Training, tune: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values, each checked as a setting.

    Args:
        training: the settings that are not varied.
        tune: values by name of a setting of :class:`~fedtopo_torch.training.Training`.

    Raises:
        OptionError: a name that can't be tuned, a value out of range or given twice, or more than
            200 combinations.
    """
    known = [name for name in Training.model_fields if name not in NOT_TUNED]
    for name, values in tune.items():
        if name not in known:
            raise OptionError(
                f"'{name}' can't be tuned: settings of training can, so that every method has as "
                f"many tries." + did_you_mean(name, known)
            )
        if len(values) == 0:
            raise OptionError(f"no value of {name} to try: give at least one.")
    if math.prod(len(values) for values in tune.values()) > MOST:
        raise OptionError(f"more than {MOST} combinations to try: give fewer values.")
    found: list[dict[str, Any]] = []
    for combination in itertools.product(*tune.values()):
        given = dict(zip(tune, combination, strict=True))
        checked = Training(**{**_given(training), **given})
        settings = {name: getattr(checked, name) for name in given}
        if settings in found:
            raise OptionError(f"{_named(settings)} is to be tried twice.")
        found.append(settings)
    return found


def _given(training: Training) -> dict[str, Any]:
    return {name: getattr(training, name) for name in training.model_fields_set}


def _named(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def run_tuned(
    plan: Plan,
    tune: Mapping[str, Sequence[Any]],
    *,
    processes: int | None = None,
    folder: str | Path | None = None,
    on_progress: Progress | None = None,
) -> Comparison:
    """Run a plan with every method at its best candidate.

    Args:
        plan: what to run; its federations have validation records.
        tune: values by name of a training setting.
        processes, folder, on_progress: of :func:`fedtopo_torch.execution.execute`.

    Returns:
        the runs at the chosen candidates, with ``tuning`` set. Runs on a federation without
        validation records fail, and say what to give. A method without a candidate that
        finished on all seeds has the runs of the first, failed ones among them.

    Raises:
        OptionError: as :func:`candidates`.
    """
    tried = candidates(plan.training, tune)
    trainings = [Training(**{**_given(plan.training), **settings}) for settings in tried]
    jobs = {
        (dataset.label, method.label): [
            [Job(dataset, method, seed, plan.model, t, validated=True) for seed in plan.seeds]
            for t in trainings
        ]
        for dataset, method in itertools.product(plan.datasets, plan.methods)
    }
    every = [job for tries in jobs.values() for own in tries for job in own]
    done = execute(every, processes=processes, folder=folder, on_progress=on_progress)
    methods: dict[tuple[str, str], Tuned] = {}
    runs = []
    for labels, own in jobs.items():
        tuned = methods[labels] = _tuned(done, own)
        # A failure on all candidates is worth showing; an interrupt leaves nothing to show.
        if tuned.chosen is not None or not done.interrupted:
            runs += [run for job in own[tuned.chosen or 0] if (run := done.run(job)) is not None]
    comparison = Comparison(plan, tuple(runs), done.interrupted, done.seconds, done.processes)
    return replace(comparison, tuning=Tuning(tuple(tried), methods))


def _tuned(done: Execution, jobs: Sequence[Sequence[Job]]) -> Tuned:
    losses = []
    for own in jobs:
        found = [done.run(job) for job in own]
        finished = [run for run in found if run is not None and run.error is None]
        losses.append(Spread.of(_validation_loss(run) for run in finished))
    complete = [c for c, spread in enumerate(losses) if spread.seeds == len(jobs[c])]
    return Tuned(tuple(losses), min(complete, key=lambda c: losses[c].mean, default=None))


def _validation_loss(run: Run) -> float:
    return run.pooled[f"validation {METRICS_OF[run.task][0]}"]
