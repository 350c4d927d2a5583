"""Tables of a comparison: in the terminal, as CSV, JSON, Markdown and LaTeX, from one description.

A :class:`Table` is columns, rows of cells and notes. A cell has a text for people and values for
machines; the five forms only write down what is there.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import rich.table
from rich import box
from rich.console import Group
from rich.text import Text

from .comparison import Comparison, Spread, Summary
from .plan import Choice
from .significance import FEWEST_PAIRS, LEVEL

__all__ = [
    "Cell",
    "Column",
    "Table",
    "clients_table",
    "comparison_tables",
    "failures_table",
    "paper_table",
    "results_table",
    "sent_table",
    "times_table",
]

Value = str | int | float | bool | None

NONE = "–"


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        title: for people.
        fields: names of the values of its cells, for machines.
        number: align to the right, and never break a line within a cell.
    """

    title: str
    fields: tuple[str, ...]
    number: bool = True


@dataclass(frozen=True)
class Cell:
    """One cell: ``text`` for people, ``values`` for machines, one per field of its column."""

    text: str
    values: tuple[Value, ...]
    bold: bool = False


@dataclass(frozen=True)
class Table:
    """A table that can be written in five forms.

    Attributes:
        title: a line above.
        columns: from left to right.
        rows: one cell per column each.
        notes: sentences below.
        groups: rows after which a line is drawn, by index.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    groups: frozenset[int] = frozenset()

    def rich(self) -> Group:
        """For the terminal: ``console.print(table.rich())``."""
        table = rich.table.Table(
            title=Text(self.title),
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for column in self.columns:
            right = column.number
            table.add_column(
                Text(column.title), justify="right" if right else "left", no_wrap=False
            )
        for i, row in enumerate(self.rows):
            table.add_row(
                *(
                    Text(cell.text, style="bold" if cell.bold else "", no_wrap=column.number)
                    for cell, column in zip(row, self.columns, strict=True)
                ),
                end_section=i in self.groups,
            )
        return Group(table, *(Text(note, style="dim") for note in self.notes))

    @property
    def fields(self) -> list[str]:
        """Names of all values of a row."""
        return [name for column in self.columns for name in column.fields]

    def records(self) -> list[dict[str, Value]]:
        """The rows as values by field; NaN is None."""
        return [
            dict(
                zip(self.fields, (_value(v) for cell in row for v in cell.values), strict=True),
            )
            for row in self.rows
        ]

    def csv(self) -> str:
        """One line per row and one column per value; empty where there is none. No notes."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.records())
        return text.getvalue()

    def content(self) -> dict[str, Any]:
        """Title, rows as values by field, and notes: what :meth:`json` writes."""
        return {"title": self.title, "rows": self.records(), "notes": list(self.notes)}

    def json(self) -> str:
        """:meth:`content` as strict JSON."""
        return json.dumps(self.content(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def markdown(self) -> str:
        """A GitHub table, the title above it in bold and the notes below."""
        lines = [f"**{_markdown(self.title)}**", ""]
        lines.append("| " + " | ".join(_markdown(c.title) for c in self.columns) + " |")
        lines.append("|" + "|".join("--:" if c.number else ":--" for c in self.columns) + "|")
        for row in self.rows:
            cells = (f"**{_markdown(c.text)}**" if c.bold else _markdown(c.text) for c in row)
            lines.append("| " + " | ".join(cells) + " |")
        for note in self.notes:
            lines += ["", _markdown(note)]
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        """A ``table`` with a plain ``tabular``, which compiles without any package."""
        lines = [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(self.title)}}}",
            rf"\begin{{tabular}}{{{''.join('r' if c.number else 'l' for c in self.columns)}}}",
            r"\hline",
            " & ".join(_latex(column.title) for column in self.columns) + r" \\",
            r"\hline",
        ]
        for i, row in enumerate(self.rows):
            cells = (rf"\textbf{{{_latex(c.text)}}}" if c.bold else _latex(c.text) for c in row)
            # Braces keep LaTeX from reading "[" or "*" at the start of a row as an option of \\.
            lines.append("{}" + " & ".join(cells) + r" \\")
            if i in self.groups and i + 1 < len(self.rows):
                lines.append(r"\hline")
        lines += [r"\hline", r"\end{tabular}"]
        if self.notes:
            lines.append(r"\par\medskip")
            lines += [rf"{{\footnotesize {_latex(note)}\par}}" for note in self.notes]
        return "\n".join([*lines, r"\end{table}"]) + "\n"


def _value(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_MARKDOWN = {c: f"\\{c}" for c in r"\`*_[]|<>#~"} | {"\n": " "}

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "–": "--",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "\n": " ",
    "\t": " ",
    **{c: f"\\{c}" for c in "&%$#_{}"},
}


def _markdown(text: str) -> str:
    return "".join(_MARKDOWN.get(c, c) for c in text)


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)


# ---- cells --------------------------------------------------------------------------------------


def _text(text: str) -> Cell:
    return Cell(text, (text,))


def _number(value: float, digits: int = 4) -> Cell:
    return Cell(_shown(value, digits), (value,))


def _shown(value: float, digits: int) -> str:
    if not math.isfinite(value):
        return NONE
    # A diverging method's loss would break the column.
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.2e}"


def _spread(spread: Spread, mark: str | None = None, bold: bool = False) -> Cell:
    """``mean ± std``, and the mark with its place kept free, so that points stay aligned."""
    text = NONE if not spread.seeds else f"{_shown(spread.mean, 4)} ± {_shown(spread.std, 4)}"
    if mark is None:
        return Cell(text, (spread.mean, spread.std), bold)
    return Cell(f"{text} {mark}".rstrip() if mark else text, (spread.mean, spread.std, mark), bold)


def _name(row: Summary) -> Cell:
    text = row.method if row.deployable else f"{row.method} (not deployable)"
    return Cell(text, (row.method, row.deployable))


_METHOD = Column("method", ("method", "deployable"), number=False)


# ---- tables -------------------------------------------------------------------------------------


def comparison_tables(comparison: Comparison, reference: str | None = None) -> list[Table]:
    """All tables worth printing: results and what was sent per federation, gaps to the paper's
    numbers where it has the federation, times, failures where there are any.

    Args:
        comparison: with at least one run.
        reference: see :meth:`Comparison.summary`.

    Raises:
        OptionError: the reference is not compared.
    """
    names = [choice.label for choice in comparison.plan.datasets]
    tables = [results_table(comparison, name, reference) for name in names]
    tables += [sent_table(comparison, name) for name in names]
    paper = paper_table(comparison)
    if paper is not None:
        tables.append(paper)
    tables.append(times_table(comparison))
    if comparison.failures:
        tables.append(failures_table(comparison))
    return tables


def results_table(comparison: Comparison, dataset: str, reference: str | None = None) -> Table:
    """The paper's Tables 1 and 6 for one federation, one row a method.

    Columns: finished seeds; pooled test log-loss and AUC, mean ± std over seeds, the log-loss with
    its significance mark; fractions of clients worse off than under FedAvg and Local; loss of the
    worst client. The best deployable method that finished every seed is bold.

    Raises:
        OptionError: the federation or the reference is not compared.
    """
    chosen = comparison.plan.dataset(dataset)
    rows = [row for row in comparison.summary(reference) if row.dataset == chosen.label]
    columns = (
        _METHOD,
        Column("seeds", ("seeds", "failed_seeds")),
        Column("log-loss", ("log_loss_mean", "log_loss_std", "log_loss_mark")),
        Column("AUC", ("auc_mean", "auc_std")),
        Column("worse than FedAvg", ("worse_than_fedavg",)),
        Column("worse than Local", ("worse_than_local",)),
        Column("worst client", ("worst_client",)),
        Column(
            "mean of clients: log-loss, AUC, accuracy",
            ("client_log_loss", "client_auc", "client_accuracy"),
        ),
    )
    racing = [row for row in rows if row.deployable and row.finished == row.planned]
    lowest = min((row.log_loss.mean for row in racing), default=math.nan)
    highest = max(
        (row.auc.mean for row in racing if not math.isnan(row.auc.mean)), default=math.nan
    )
    # No mark anywhere leaves no place for one.
    place = any(row.mark for row in rows)
    cells = tuple(
        (
            _name(row),
            Cell(str(row.finished), (row.finished, row.failed)),
            _marked(row, place, bold=row in racing and row.log_loss.mean == lowest),
            _spread(row.auc, bold=row in racing and row.auc.mean == highest),
            _number(row.worse_than_fedavg, 2),
            _number(row.worse_than_local, 2),
            _number(row.worst_client, 3),
            Cell(
                " ".join(
                    _shown(v, 3) for v in (row.client_log_loss, row.client_auc, row.client_accuracy)
                ),
                (row.client_log_loss, row.client_auc, row.client_accuracy),
            ),
        )
        for row in rows
    )
    title = f"{chosen.label}: test records, round {comparison.plan.training.rounds}"
    notes = _result_notes(comparison, chosen, rows, reference)
    return Table(title, columns, cells, tuple(notes))


def _marked(row: Summary, place: bool, bold: bool) -> Cell:
    cell = _spread(row.log_loss, row.mark, bold)
    # A no-break space, since an ordinary one at the end is cut off.
    return Cell(cell.text + "\u00a0\u00a0", cell.values, bold) if place and not row.mark else cell


def _result_notes(
    comparison: Comparison, dataset: Choice, rows: Sequence[Summary], reference: str | None
) -> list[str]:
    seeds = comparison.plan.seeds
    notes = [
        f"Mean ± std over {len(seeds)} seed{'s' if len(seeds) > 1 else ''}, all clients' test "
        f"records pooled; lower log-loss and higher AUC are better. Worse than: fraction of "
        f"clients; worst client: its log-loss."
    ]
    if any(row.deployable and row.finished == row.planned for row in rows):
        notes[0] += " Bold: best deployable method."
    notes += _significance_notes(comparison, rows, reference)
    if any(row.test and row.test.possible for row in rows) and dataset.key == "fed_heart_disease":
        notes.append(
            "Seeds re-split the same 920 patients: p speaks of splits, not of new patients."
        )
    if any(not row.deployable for row in rows):
        notes.append("Not deployable: uses what no server could know, or chance; a reference only.")
    notes += _missing_notes(comparison, rows)
    return notes


def _significance_notes(
    comparison: Comparison, rows: Sequence[Summary], reference: str | None
) -> list[str]:
    chosen = comparison.reference(reference)
    tests = [row.test for row in rows if row.test is not None]
    if chosen is None or not tests:
        return []
    notes = []
    if any(test.possible for test in tests):
        notes.append(
            f"+ / -: significantly worse / better log-loss than {chosen.label}; paired Wilcoxon "
            f"signed-rank test over seeds, two-sided, Holm's correction over methods, level "
            f"{LEVEL:g}; differences below 1e-9 are zero and left out."
        )
    few = [row for row in rows if row.test is not None and not row.test.possible]
    if len(few) == len(tests):
        notes.append(
            f"No significance test: with fewer than {FEWEST_PAIRS} seeds level {LEVEL:g} can't be "
            f"reached, whatever the values."
        )
    elif few:
        notes.append(
            f"Not tested, with fewer than {FEWEST_PAIRS} seeds in common with {chosen.label}: "
            f"{', '.join(row.method for row in few)}."
        )
    return notes


def _missing_notes(comparison: Comparison, rows: Sequence[Summary]) -> list[str]:
    notes = []
    gaps = [(row, row.finished - row.auc.seeds) for row in rows if row.finished > row.auc.seeds]
    if gaps:
        shown = ", ".join(f"{row.method} {count}" for row, count in gaps)
        notes.append(f"Pooled AUC undefined (one class), left out, in seeds: {shown}.")
    # Which clients have a value depends on the split alone, so one method speaks for all.
    most = max(rows, key=lambda row: row.client_values)
    if most.without_value:
        notes.append(
            f"No test records, left out of everything per client: {most.without_value} of "
            f"{most.client_values} (clients times seeds)."
        )
    if most.without_auc:
        notes.append(
            f"AUC of a client undefined (one class among its test records), left out of the mean "
            f"of clients: {most.without_auc} of {most.client_values} (clients times seeds)."
        )
    failed = [row for row in rows if row.failed]
    if failed:
        shown = ", ".join(f"{row.method} {row.failed}" for row in failed)
        notes.append(
            f"Failed seeds, left out of means and tests: {shown}. Reasons: the table of failed "
            f"runs."
        )
    waiting = sum(row.planned - row.finished - row.failed for row in rows)
    if waiting:
        notes.append(f"Interrupted: {waiting} runs are still to be done.")
    return notes


def sent_table(comparison: Comparison, dataset: str) -> Table:
    """The paper's Table 4 for one federation: what one client sends and receives.

    Counted from the messages: floats, also in multiples of p where they are one, and integers.

    Raises:
        OptionError: the federation is not compared.
    """
    label = comparison.plan.dataset(dataset).label
    rows = [row for row in comparison.summary() if row.dataset == label and row.finished]
    columns = (
        _METHOD,
        Column("up, a round", ("up_floats", "up_integers")),
        Column("down, a round", ("down_floats", "down_integers")),
        Column("up, once", ("once_up_floats", "once_up_integers")),
        Column("down, once", ("once_down_floats", "once_down_integers")),
    )
    cells = tuple(
        (
            _name(row),
            _sent(row.up, row.parameters),
            _sent(row.down, row.parameters),
            _sent(row.up_once, 0),
            _sent(row.down_once, 0),
        )
        for row in rows
    )
    notes = ["Of one client, counted from its messages; once: before round 1."]
    if rows:
        p = sorted({row.parameters for row in rows})
        up, down = (_words(max(getattr(row, f"handshake_{d}") for row in rows)) for d in _WAYS)
        notes[0] = (
            f"Floats (and integers) of one client, counted from its messages; p = "
            f"{' or '.join(map(str, p))} parameters. Once: before round 1, apart from the "
            f"handshake (sizes, feature moments, step size: {up} up, {down} down)."
        )
    return Table(f"{label}: what one client sends and receives", columns, cells, tuple(notes))


_WAYS = ("up", "down")


def _words(counts: tuple[int, int]) -> str:
    floats, integers = counts
    return f"{floats} floats" + (f" and {integers} integers" if integers else "")


def _sent(counts: tuple[int, int], p: int) -> Cell:
    floats, integers = counts
    text = f"{floats:,}" if floats or not integers else ""
    if p and floats and floats % p == 0:
        times = floats // p
        text += f" ({times if times > 1 else ''}p)"
    if integers:
        text += f"{' + ' if text else ''}{integers} int"
    return Cell(text, counts)


def times_table(comparison: Comparison) -> Table:
    """Seconds of one run per method and federation, mean over seeds, and all runs of a method."""
    plan, summary = comparison.plan, comparison.summary()
    columns = (
        _METHOD,
        *(Column(d.label, (f"seconds {d.label}",)) for d in plan.datasets),
        Column("all its runs", ("seconds_all",)),
    )
    cells = []
    for method in plan.methods:
        rows = [row for row in summary if row.method == method.label]
        total = sum(row.seconds * row.finished for row in rows if row.finished)
        cells.append(
            (
                _name(rows[0]),
                *(_number(row.seconds, 3) for row in rows),
                _number(total, 1),
            )
        )
    notes = [
        f"Wall time of single runs while {comparison.processes} "
        f"{'runs share' if comparison.processes > 1 else 'run has'} the machine; loading data and "
        f"starting processes not included. The whole comparison took {comparison.seconds:.1f} s."
    ]
    if comparison.stored:
        notes.append(
            f"{comparison.stored} of {len(comparison.runs)} runs were taken from the folder, with "
            f"the seconds they took then."
        )
    return Table("Seconds per run", columns, tuple(cells), tuple(notes))


def failures_table(comparison: Comparison) -> Table:
    """Every failed run with its reason."""
    columns = (
        Column("federation", ("dataset",), number=False),
        Column("method", ("method",), number=False),
        Column("seed", ("seed",)),
        Column("reason", ("reason",), number=False),
    )
    rows = tuple(
        (
            _text(run.dataset),
            _text(run.method),
            Cell(str(run.seed), (run.seed,)),
            _text(run.error or ""),
        )
        for run in comparison.failures
    )
    return Table(f"Failed runs ({len(rows)} of {len(comparison.runs)})", columns, rows)


def clients_table(comparison: Comparison, dataset: str, metric: str = "log_loss") -> Table:
    """One metric per client and method on the test records, mean ± std over seeds.

    Args:
        comparison: the runs.
        dataset: label or name of the federation.
        metric: ``log_loss`` (nats), ``auc`` or ``accuracy`` (in [0, 1]); NaN is left out of means.

    Raises:
        OptionError: the federation is not compared.
    """
    label = comparison.plan.dataset(dataset).label
    methods = [m for m in comparison.plan.methods if comparison.of(label, m.label)]
    columns = (
        Column("client", ("client",), number=False),
        *(Column(m.label, (f"{m.label} mean", f"{m.label} std", f"{m.label} n")) for m in methods),
    )
    values = {m.label: comparison.client_values(label, m.label, metric) for m in methods}
    rows = []
    for k, name in enumerate(comparison.clients(label)):
        spreads = [Spread.of(values[m.label][:, k].tolist()) for m in methods]
        rows.append(
            (
                _text(name),
                *(
                    Cell(_shown(s.mean, 3), (s.mean, s.std, s.seeds), bold=_best(s, spreads, metric))
                    for s in spreads
                ),
            )
        )
    title = f"{label}: {metric.replace('_', '-')} per client, test records"
    note = "Mean over seeds; bold: best method for this client, references included."
    return Table(title, columns, tuple(rows), (note,))


def _best(spread: Spread, spreads: Sequence[Spread], metric: str) -> bool:
    means = [s.mean for s in spreads if s.seeds]
    pick: Callable[[list[float]], float] = min if metric == "log_loss" else max
    return bool(means) and spread.seeds > 0 and spread.mean == pick(means)


# ---- the paper's numbers ------------------------------------------------------------------------


@cache
def _paper() -> dict[str, Any]:
    text = Path(__file__).with_name("paper_values.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def paper_table(comparison: Comparison) -> Table | None:
    """Ours, the paper's and the difference, for every method on the paper's three federations.

    Nothing is left out: a method the paper has no (legible) number for stands with a dash. None
    where no federation of the comparison is one of the paper's, with its default options.
    """
    paper, plan = _paper(), comparison.plan
    own = [d for d in plan.datasets if d.key in paper["table1"] and d.is_default]
    if not own:
        return None
    columns = (
        Column("federation", ("dataset",), number=False),
        Column("method", ("method",), number=False),
        *(
            Column(title, (f"{metric}_{field}",))
            for metric, name in (("log_loss", "log-loss"), ("auc", "AUC"))
            for title, field in (
                (f"{name}, ours", "ours"),
                ("paper's", "paper"),
                ("difference", "difference"),
            )
        ),
    )
    summary = {(row.dataset, row.method): row for row in comparison.summary()}
    cells, lines = [], set()
    for dataset in own:
        for method in plan.methods:
            printed = paper["table1"][dataset.key].get(method.key, {}) if method.is_default else {}
            row = summary[dataset.label, method.label]
            cells.append(
                (
                    _text(dataset.label),
                    _text(method.label),
                    *_gap(row.log_loss.mean, printed.get("log_loss")),
                    *_gap(row.auc.mean, printed.get("auc")),
                )
            )
        lines.add(len(cells) - 1)
    notes = [f"Paper: {paper['source']}. {NONE}: no such number there."]
    training = plan.training
    changed = [
        f"{name} {_plain_number(have)} (paper {_plain_number(theirs)})"
        for name, have, theirs in (
            ("rounds", training.rounds, paper["rounds"]),
            ("local steps", training.local_steps, paper["local_steps"]),
            ("eta", training.eta, "auto"),
            ("l2", training.l2, 0.01),
            ("model", plan.model.label if plan.model else "logistic", "logistic"),
        )
        if have != theirs
    ]
    if changed:
        notes.append(f"Not the paper's settings: {', '.join(changed)}.")
    return Table(
        "Beside the paper's Table 1 (means over seeds)",
        columns,
        tuple(cells),
        tuple(notes),
        frozenset(lines),
    )


def _plain_number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _gap(ours: float, printed: Sequence[float | None] | None) -> tuple[Cell, Cell, Cell]:
    theirs = math.nan if printed is None or printed[0] is None else printed[0]
    gap = ours - theirs
    shown = NONE if math.isnan(gap) else f"{gap:+.4f}"
    return _number(ours), _number(theirs, 3), Cell(shown, (gap,))
