"""What an experiment consists of, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..comparison import Comparison, Spread, Summary
from ..execution import Measured, Run
from ..paper import SEEDS as PAPER_SEEDS
from ..paper import entry, other_settings, printed
from ..plan import Choice, Measurement, Plan, Spec, Specs
from ..registry import algorithms
from ..tables import Column, Table, beside_cells, beside_columns, beside_note, text_cell
from . import CATALOGUE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "FEDERATIONS",
    "REGIMES",
    "Beside",
    "Experiment",
    "Measure",
    "Metric",
    "Row",
    "Settings",
    "Setup",
    "Study",
    "shown",
]

#: Federation (A) and its siblings, by what differs between their groups.
REGIMES: Mapping[str, Spec] = {
    regime: ("synthetic", {"regime": regime}) for regime in ("dim", "tails", "concept", "geometry")
}

#: The federations of Table 1.
FEDERATIONS: Mapping[str, Spec] = {
    name: name for name in ("synthetic", "label_skew", "fed_heart_disease")
}


@cache
def shown(method: str) -> str:
    """How tables call a method, with the warning that a reference needs."""
    own = algorithms[method]
    return own.title if own.deployable else f"{own.title} (not deployable)"


@dataclass(frozen=True)
class Settings:
    """Of all experiments of a run.

    Attributes:
        seeds: of splits, drawn data and runs.
        rounds: T with the paper's number of local steps; with fewer steps there are more rounds.
    """

    seeds: tuple[int, ...]
    rounds: int

    def others(self) -> list[str]:
        """What is not as in the paper, for a note."""
        changed = other_settings({"rounds": self.rounds})
        # Which seeds does not matter: ours draw other numbers than the paper's.
        if len(self.seeds) != PAPER_SEEDS:
            changed.append(f"{len(self.seeds)} seeds (paper: {PAPER_SEEDS})")
        return changed


@dataclass(frozen=True)
class Setup:
    """Methods that are trained on federations, with every seed.

    Attributes:
        methods: names, or specs by label.
        datasets: specs by label.
        local_steps: tau; rounds times local steps is the same for all setups.
    """

    methods: Specs
    datasets: Mapping[str, Spec]
    local_steps: int = field(default_factory=lambda: int(entry("table5")["local_steps"]))

    def plan(self, settings: Settings) -> Plan:
        """The trainings. Settings that are not said are the defaults, which are the paper's."""
        steps = settings.rounds * int(entry("table5")["local_steps"])
        rounds = max(1, steps // self.local_steps)
        return Plan.of(
            self.methods,
            self.datasets,
            settings.seeds,
            rounds=rounds,
            local_steps=self.local_steps,
        )


@dataclass(frozen=True, eq=False)
class Measure:
    """A measurement of federations, with every seed.

    Attributes:
        function, parameters: see :class:`fedtopo_torch.plan.Measurement`.
        datasets: specs by label.
    """

    function: Callable[..., dict[str, Any]]
    datasets: Mapping[str, Spec]
    parameters: Mapping[str, Any]

    def tasks(self, settings: Settings) -> list[Measurement]:
        """One measurement per federation and seed."""
        return [
            Measurement(dataset, self.function, seed, self.parameters)
            for dataset in (
                Choice.of("dataset", spec, name) for name, spec in self.datasets.items()
            )
            for seed in settings.seeds
        ]


@dataclass(frozen=True)
class Row:
    """One row of a table: what was trained, and where the paper has its numbers.

    Attributes:
        cells: of the leading columns.
        method: name or label in the setup; dataset: label in the setup.
        setup: its name in the experiment.
        paper: where :mod:`fedtopo_torch.paper` has the row; the metric's name follows.
    """

    cells: tuple[str, ...]
    method: str
    dataset: str
    setup: str = ""
    paper: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metric:
    """A number of a row.

    Attributes:
        name: in ``paper_values.json`` and in the values of a table.
        title: for people.
        of: its mean and std over seeds.
        digits: decimals shown.
    """

    name: str
    title: str
    of: Callable[[Study, Row], Spread]
    digits: int = 4


@dataclass(frozen=True)
class Beside:
    """A table of ours, the paper's and the difference.

    Attributes:
        title: above it.
        keys: titles of the leading columns.
        rows: of the table.
        metrics: three columns each.
        place: what the paper calls it.
        note: a sentence below, before those on the paper.
    """

    title: str
    keys: tuple[str, ...]
    rows: tuple[Row, ...]
    metrics: tuple[Metric, ...]
    place: str
    note: str = ""

    def table(self, study: Study) -> Table:
        """With the numbers of a study."""
        columns = [Column(title, (title.replace(" ", "_"),), number=False) for title in self.keys]
        for metric in self.metrics:
            columns += beside_columns(metric.name, metric.title)
        rows = []
        for row in self.rows:
            cells = [text_cell(text) for text in row.cells]
            for metric in self.metrics:
                theirs = printed(*row.paper, metric.name)
                cells += beside_cells(metric.of(study, row), theirs, metric.digits)
            rows.append(tuple(cells))
        notes = [self.note] if self.note else []
        notes.append(f"Mean (± std) over {study.seeds_in_words}. {beside_note(self.place)}")
        others = study.settings.others()
        if others:
            notes.append(f"Not the paper's settings: {', '.join(others)}.")
        return Table(self.title, tuple(columns), tuple(rows), tuple(notes))


def _nothing(study: Study) -> list[Any]:
    return []


@dataclass(frozen=True)
class Experiment:
    """One of the paper's tables or figures.

    Attributes:
        name: ``table3`` and so on.
        question: what it answers and how to read it, a few sentences.
        setups: what is trained, by name.
        measures: what is measured besides.
        tables: beside the paper's.
        more: tables before those, made from the study.
        findings: what agrees with the paper and what does not, computed from the study.
        figures: by name.
    """

    name: str
    question: str
    setups: Mapping[str, Setup] = field(default_factory=dict)
    measures: tuple[Measure, ...] = ()
    tables: tuple[Beside, ...] = ()
    more: Callable[[Study], list[Table]] = _nothing
    findings: Callable[[Study], list[str]] = _nothing
    figures: Callable[[Study], Mapping[str, Figure]] = lambda study: {}

    @property
    def title(self) -> str:
        """In a line, without the name."""
        return CATALOGUE[self.name]


@dataclass(frozen=True)
class Study:
    """What came of an experiment.

    Attributes:
        experiment: its description.
        settings: it was run with.
        comparisons: of its setups, by name.
        measured: what its measures came to.
    """

    experiment: Experiment
    settings: Settings
    comparisons: Mapping[str, Comparison]
    measured: Mapping[Measure, Sequence[Measured]]

    @property
    def comparison(self) -> Comparison:
        """Of an experiment with one setup.

        Raises:
            ValueError: there are several.
        """
        (only,) = self.comparisons.values()
        return only

    @property
    def seeds_in_words(self) -> str:
        """Over how many seeds the means are."""
        planned = len(self.settings.seeds)
        if any(comparison.failures for comparison in self.comparisons.values()):
            return f"each row's finished seeds out of {planned}"
        return f"{planned} seed{'s' if planned > 1 else ''}"

    def runs(self, row: Row) -> list[Run]:
        """The finished runs of a row."""
        comparison = self.comparisons[row.setup]
        return comparison.of(row.dataset, comparison.plan.method(row.method).label)

    def values(
        self, dataset: str, method: str, metric: str = "log_loss", setup: str = ""
    ) -> NDArray[np.float64]:
        """Pooled test values ``[S]``, one per seed; NaN where there is no run."""
        comparison = self.comparisons[setup]
        return comparison.values(dataset, comparison.plan.method(method).label, metric)

    def mean(self, dataset: str, method: str, metric: str = "log_loss", setup: str = "") -> float:
        """Their mean over the seeds that have one."""
        return Spread.of(self.values(dataset, method, metric, setup)).mean

    @cached_property
    def _summaries(self) -> dict[tuple[str, str, str], Summary]:
        return {
            (name, row.dataset, row.method): row
            for name, comparison in self.comparisons.items()
            for row in comparison.summary()
        }

    def summary(self, row: Row) -> Summary:
        """The row's line in the comparison."""
        label = self.comparisons[row.setup].plan.method(row.method).label
        return self._summaries[row.setup, row.dataset, label]

    def measurements(self, measure: Measure, dataset: str) -> dict[int, dict[str, Any]]:
        """What one of the measures came to on a federation, by seed; failures are left out."""
        return {
            each.seed: each.values
            for each in self.measured[measure]
            if each.dataset == dataset and each.error is None
        }
