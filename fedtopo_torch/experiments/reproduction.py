"""Runs the paper's experiments, and makes of each a section of the report.

done = reproduce(["table3", "figure4"], folder="runs/reproduce/parts")
for section in done.sections:
    print(section.title, section.findings)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..comparison import Comparison
from ..execution import Execution, Measured, Progress, Run, execute
from ..options import OptionError
from ..paper import entry
from ..plan import Task, seeds_of
from ..tables import Column, Table, text_cell
from . import experiment, names_of
from .description import Settings, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Reproduction", "Section", "reproduce"]


@dataclass(frozen=True)
class Section:
    """What the report says about one experiment.

    Attributes:
        name, title, question: of the experiment.
        findings: sentences computed from the numbers.
        tables: all of them.
        figures: by name.
    """

    name: str
    title: str
    question: str
    findings: tuple[str, ...]
    tables: tuple[Table, ...]
    figures: Mapping[str, Figure]

    @classmethod
    def of(cls, study: Study) -> Section:
        """Tables, sentences and figures of what was run."""
        own = study.experiment
        tables = [*own.more(study), *(table.table(study) for table in own.tables)]
        return cls(
            own.name,
            own.title,
            own.question,
            tuple(own.findings(study)),
            tuple(tables),
            own.figures(study),
        )


@dataclass(frozen=True)
class Reproduction:
    """What came of the experiments that were asked for.

    Attributes:
        settings: of all.
        studies: one per experiment, in the paper's order.
        execution: what was run; each thing once, however many experiments show it.
    """

    settings: Settings
    studies: tuple[Study, ...]
    execution: Execution

    @property
    def interrupted(self) -> bool:
        """Ctrl-C came before all had run: the studies are not whole."""
        return self.execution.interrupted

    @property
    def stored(self) -> int:
        """How many outcomes were taken from the folder."""
        return sum(outcome.stored for outcome in self.execution.outcomes.values())

    @property
    def failures(self) -> list[Run | Measured]:
        """Trainings and measurements that failed, each once."""
        return [o for o in self.execution.outcomes.values() if o.error is not None]

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The report's sections.

        Raises:
            ValueError: the reproduction was interrupted: its means would be over different seeds.
        """
        if self.interrupted:
            raise ValueError("interrupted: run it again, it goes on where it stopped.")
        return tuple(Section.of(study) for study in self.studies)

    def failures_table(self) -> Table | None:
        """Every failure with its reason; None where there is none."""
        if not self.failures:
            return None
        titles = ("federation", "what", "seed", "reason")
        columns = tuple(Column(title, (title,), number=False) for title in titles)
        rows = tuple(
            tuple(
                text_cell(text)
                for text in (
                    each.dataset,
                    each.method if isinstance(each, Run) else each.name,
                    str(each.seed),
                    each.error or "",
                )
            )
            for each in self.failures
        )
        return Table(f"Failed ({len(rows)} of {len(self.execution.outcomes)})", columns, rows)


def reproduce(
    names: Iterable[str] = ("all",),
    seeds: int | Sequence[int] = 10,
    *,
    rounds: int | None = None,
    processes: int | None = None,
    folder: str | Path | None = None,
    on_progress: Progress | None = None,
) -> Reproduction:
    """Run experiments of the paper.

    Args:
        names: of :data:`fedtopo_torch.experiments.CATALOGUE`, or ``"all"``.
        seeds: how many (10 is 0 to 9), or which.
        rounds: T with 10 local steps, at least 1; by default the paper's 150. Fewer are a quick
            look, and every table says so.
        processes, folder, on_progress: of :func:`fedtopo_torch.execution.execute`.

    Raises:
        OptionError: an unknown name, or a value out of range.
        RunFolderError, RuntimeError: as :func:`fedtopo_torch.execution.execute`.
    """
    experiments = [experiment(name) for name in names_of(names)]
    if rounds is None:
        rounds = int(entry("table5")["rounds"])
    if rounds < 1:
        raise OptionError(f"rounds is {rounds}: must be at least 1.")
    settings = Settings(seeds_of(seeds), rounds)
    plans = [
        {name: setup.plan(settings) for name, setup in own.setups.items()} for own in experiments
    ]
    measured = [{m: m.tasks(settings) for m in own.measures} for own in experiments]
    tasks: list[Task] = [job for own in plans for plan in own.values() for job in plan.jobs()]
    tasks += [task for own in measured for its_tasks in own.values() for task in its_tasks]
    done = execute(tasks, processes=processes, folder=folder, on_progress=on_progress)
    studies = []
    for own, its_plans, its_measures in zip(experiments, plans, measured, strict=True):
        comparisons = {
            name: Comparison.of_execution(plan, done) for name, plan in its_plans.items()
        }
        ended = {
            measure: [found for task in its_tasks if (found := done.measured(task)) is not None]
            for measure, its_tasks in its_measures.items()
        }
        studies.append(Study(own, settings, comparisons, ended))
    return Reproduction(settings, tuple(studies), done)
