"""Tables: in the terminal, as CSV, JSON, Markdown, LaTeX and HTML, from one description.

A :class:`Table` is columns, rows of cells and notes. A cell has a text for people and values for
machines; the six forms only write down what is there. Below it the tables of a comparison.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import rich.table
from rich import box
from rich.console import Group
from rich.text import Text

from . import paper
from .comparison import Comparison, Spread, Summary
from .evaluation import LOWER_IS_BETTER, METRIC_TITLES
from .paper import Printed, printed
from .plan import Choice
from .significance import FEWEST_PAIRS, LEVEL

__all__ = [
    "Cell",
    "Column",
    "Table",
    "beside_cells",
    "beside_columns",
    "beside_note",
    "clients_table",
    "comparison_tables",
    "failures_table",
    "markdown_text",
    "number_cell",
    "number_text",
    "paper_table",
    "results_table",
    "sent_table",
    "text_cell",
    "times_table",
    "tuning_table",
]

Value = str | int | float | bool | None

NONE = "–"

#: Above this many clients a table of them is too wide.
MOST_CLIENTS = 8


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        title: for people.
        fields: names of the values of its cells, for machines; none for what others hold already.
        number: align to the right, and never break a line within a cell.
    """

    title: str
    fields: tuple[str, ...]
    number: bool = True


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        text: for people.
        values: for machines, one per field of its column.
        bold: the best of its column.
        mark: of significance, behind the text.
    """

    text: str
    values: tuple[Value, ...]
    bold: bool = False
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """A table that can be written in six forms.

    Attributes:
        title: a line above.
        columns: from left to right.
        rows: one cell per column each.
        notes: sentences below.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

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
        marked = [any(row[j].mark for row in self.rows) for j in range(len(self.columns))]
        for j, column in enumerate(self.columns):
            widest = max((len(row[j].text) for row in self.rows), default=1)
            table.add_column(
                # Titles wrap where numbers leave them no room; in a narrow terminal names do too.
                Text(_folded(column.title, widest)),
                justify="right" if column.number else "left",
                no_wrap=column.number,
                overflow="fold",
            )
            if marked[j]:
                # Apart from the numbers, so that their points stay below each other.
                table.add_column("", no_wrap=True)
        for row in self.rows:
            texts = []
            for j, cell in enumerate(row):
                style = "bold" if cell.bold else ""
                texts += [Text(cell.text, style=style)] + [Text(cell.mark)] * marked[j]
            table.add_row(*texts)
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
        lines = [f"**{markdown_text(self.title)}**", ""]
        lines.append("| " + " | ".join(markdown_text(c.title) for c in self.columns) + " |")
        lines.append("|" + "|".join("--:" if c.number else ":--" for c in self.columns) + "|")
        for row in self.rows:
            lines.append("| " + " | ".join(map(_markdown_cell, row)) + " |")
        for note in self.notes:
            lines += ["", markdown_text(note)]
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
        for row in self.rows:
            # Braces keep LaTeX from reading "[" or "*" at the start of a row as an option of \\.
            lines.append("{}" + " & ".join(map(_latex_cell, row)) + r" \\")
        lines += [r"\hline", r"\end{tabular}"]
        if self.notes:
            lines.append(r"\par\medskip")
            lines += [rf"{{\footnotesize {_latex(note)}\par}}" for note in self.notes]
        return "\n".join([*lines, r"\end{table}"]) + "\n"

    def html(self) -> str:
        """A ``figure`` with a ``table`` that scrolls by itself where it is wider than the page."""
        head = "".join(
            f'<th scope="col"{_CLASS[c.number]}>{escape(c.title)}</th>' for c in self.columns
        )
        lines = [
            f"<figure><figcaption>{escape(self.title)}</figcaption>",
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>',
        ]
        for row in self.rows:
            cells = [
                f"<td{_CLASS[column.number]}>{_html_cell(cell)}</td>"
                for column, cell in zip(self.columns, row, strict=True)
            ]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        lines.append("</tbody></table></div>")
        lines += [f'<p class="note">{escape(note)}</p>' for note in self.notes]
        return "\n".join([*lines, "</figure>"]) + "\n"


_CLASS = {True: ' class="number"', False: ""}


def _html_cell(cell: Cell) -> str:
    text = f"<b>{escape(cell.text)}</b>" if cell.bold else escape(cell.text)
    return f"{text}&nbsp;{escape(cell.mark)}" if cell.mark else text


def _value(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _folded(title: str, width: int) -> str:
    """The title in lines of ``width``, wider only where a word is; broken after space, _ or -."""
    pieces = re.findall(r"[^ _-]*[ _-]?", title)
    width = max(width, *(len(piece.rstrip()) for piece in pieces))
    lines = [""]
    for piece in pieces:
        if len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


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


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(_MARKDOWN.get(c, c) for c in text)


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)


def _markdown_cell(cell: Cell) -> str:
    text = f"**{markdown_text(cell.text)}**" if cell.bold else markdown_text(cell.text)
    return f"{text} {cell.mark}" if cell.mark else text


def _latex_cell(cell: Cell) -> str:
    text = rf"\textbf{{{_latex(cell.text)}}}" if cell.bold else _latex(cell.text)
    return f"{text} ${cell.mark}$" if cell.mark else text


# ---- cells --------------------------------------------------------------------------------------


def text_cell(text: str) -> Cell:
    """The same text for people and machines."""
    return Cell(text, (text,))


def number_cell(value: float, digits: int = 4) -> Cell:
    """A number, as :func:`number_text` writes it."""
    return Cell(number_text(value, digits), (value,))


def number_text(value: float, digits: int) -> str:
    """A number with so many decimals, or a dash where there is none."""
    if not math.isfinite(value):
        return NONE
    # A diverging method's loss would break the column.
    # Adding zero takes the sign off a zero.
    return f"{round(value, digits) + 0.0:.{digits}f}" if abs(value) < 1e4 else f"{value:.2e}"


def _spread(spread: Spread, *, bold: bool) -> Cell:
    text = _mean_std(spread.mean, spread.std if spread.seeds > 1 else math.nan, 4)
    return Cell(text, (spread.mean, spread.std), bold)


def _name(row: Summary) -> Cell:
    text = row.method if row.deployable else f"{row.method} (not deployable)"
    return Cell(text, (row.method, row.deployable))


_METHOD = Column("method", ("method", "deployable"), number=False)


# ---- tables -------------------------------------------------------------------------------------


def comparison_tables(comparison: Comparison, reference: str | None = None) -> list[Table]:
    """All tables worth printing.

    Per federation the results, the clients (up to 8), what was sent, and the gaps to the paper's
    numbers where it has the federation; then times, and failures where there are any.

    Args:
        comparison: with at least one run.
        reference: see :meth:`Comparison.summary`.

    Raises:
        OptionError: the reference is not compared.
    """
    tables = []
    for dataset in comparison.plan.datasets:
        name = dataset.label
        tables.append(results_table(comparison, name, reference))
        if comparison.tuning is not None:
            tables.append(tuning_table(comparison, name))
        if 0 < len(comparison.clients(name)) <= MOST_CLIENTS:
            tables.append(clients_table(comparison, name))
        tables.append(sent_table(comparison, name))
        paper = paper_table(comparison, name)
        if paper is not None:
            tables.append(paper)
    tables.append(times_table(comparison))
    if comparison.failures:
        tables.append(failures_table(comparison))
    return tables


def results_table(comparison: Comparison, dataset: str, reference: str | None = None) -> Table:
    """The paper's Tables 1 and 6 for one federation, one row a method.

    Columns: pooled test log-loss and AUC (RMSE and R2 of a regression), mean ± std over seeds, the
    loss with its significance mark; fractions of clients worse off than under FedAvg and Local;
    loss of the worst client; mean AUC (R2) of clients. The number of seeds, where some did not
    finish. The best deployable method that finished every seed is bold.

    Raises:
        OptionError: the federation or the reference is not compared.
    """
    chosen = comparison.plan.dataset(dataset)
    rows = [row for row in comparison.summary(reference) if row.dataset == chosen.label]
    loss, score = comparison.metrics(chosen.label)
    # Of two classes the AUC says what accuracy says, and more.
    several = comparison.task(chosen.label) == "multiclass"
    lost, scored = METRIC_TITLES[loss], METRIC_TITLES[score]
    columns: tuple[Column, ...] = (
        Column("method", (*_METHOD.fields, "seeds", "failed_seeds"), number=False),
        Column("seeds", ()),
        Column(lost, (f"{loss}_mean", f"{loss}_std", f"{loss}_mark", "p", "p_holm")),
        Column(scored, (f"{score}_mean", f"{score}_std")),
        *([Column("accuracy", ("accuracy_mean", "accuracy_std"))] if several else []),
        Column("worse than FedAvg", ("worse_than_fedavg",)),
        Column("worse than Local", ("worse_than_local",)),
        Column("worst client", ("worst_client",)),
        Column(f"client {scored}", (f"client_{score}", f"client_{loss}", "client_accuracy")),
    )
    racing = [row for row in rows if row.deployable and row.finished == row.planned]
    lowest = min((row.loss.mean for row in racing), default=math.nan)
    most = max((row.accuracy.mean for row in racing if row.accuracy.seeds), default=math.nan)
    highest = max((row.score.mean for row in racing if row.score.seeds), default=math.nan)
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        (
            Cell(_name(row).text, (*_name(row).values, row.finished, row.failed)),
            Cell(str(row.finished), ()),
            _tested(row, bold=row in racing and row.loss.mean == lowest),
            _spread(row.score, bold=row in racing and row.score.mean == highest),
            *(
                [_spread(row.accuracy, bold=row in racing and row.accuracy.mean == most)]
                if several
                else []
            ),
            number_cell(row.worse_than_fedavg, 2),
            number_cell(row.worse_than_local, 2),
            number_cell(row.worst_client, 3),
            Cell(
                number_text(row.client_score, 3),
                (row.client_score, row.client_loss, row.client_accuracy),
            ),
        )
        for row in rows
    )
    if all(row.finished == row.planned for row in rows):
        columns = columns[:1] + columns[2:]
        cells = tuple(row[:1] + row[2:] for row in cells)
    title = f"{chosen.label}: test records, round {comparison.plan.training.rounds}"
    notes = _result_notes(comparison, chosen, rows, reference)
    return Table(title, columns, cells, tuple(notes))


def _tested(row: Summary, bold: bool) -> Cell:
    cell = _spread(row.loss, bold=bold)
    p = (row.test.p, row.test.adjusted) if row.test else (None, None)
    return Cell(cell.text, (*cell.values, row.mark, *p), bold, row.mark)


def _result_notes(
    comparison: Comparison, dataset: Choice, rows: Sequence[Summary], reference: str | None
) -> list[str]:
    seeds = comparison.plan.seeds
    loss, score = (METRIC_TITLES[metric] for metric in comparison.metrics(dataset.label))
    notes = [
        f"Mean ± std over {_seeds_in(rows, len(seeds))}, all clients' test "
        f"records pooled; lower {loss} and higher {score} are better. Worse than: fraction of "
        f"clients whose {loss} is higher; worst client: its {loss}; client {score}: mean of "
        f"clients."
    ]
    if any(row.deployable and row.finished == row.planned for row in rows):
        notes[0] += " Bold: best deployable method."
    notes += _significance_notes(comparison, rows, reference)
    if any(row.test and row.test.possible for row in rows) and dataset.key == "fed_heart_disease":
        notes.append(
            "Seeds re-split the same 920 patients: p speaks of splits, not of new patients."
        )
    if any(not row.deployable for row in rows):
        notes.append(
            "Not deployable: uses what no server could know, or chance; a reference only. Oracle "
            "is one cluster, so FedAvg, where a federation has no known groups."
        )
    notes += _missing_notes(comparison, rows)
    return notes


def _seeds_in(rows: Sequence[Summary], planned: int) -> str:
    """Over which seeds the means of a table are; rows over different ones can't be compared."""
    if any(row.finished < row.planned for row in rows):
        return (
            f"each row's finished seeds out of {planned} (rows over different seeds are not "
            f"comparable)"
        )
    return f"{planned} seed{'s' if planned > 1 else ''}"


def _significance_notes(
    comparison: Comparison, rows: Sequence[Summary], reference: str | None
) -> list[str]:
    chosen = comparison.reference(reference)
    tests = [row.test for row in rows if row.test is not None]
    if chosen is None or not tests:
        return []
    loss = METRIC_TITLES[rows[0].metrics[0]]
    notes = []
    if any(test.possible for test in tests):
        notes.append(
            f"+ / -: significantly worse / better {loss} than {chosen.label}; paired Wilcoxon "
            f"signed-rank test over seeds, two-sided, Holm's correction over methods, level "
            f"{LEVEL:g}; differences below 1e-9 are zero and left out."
        )
    few = [row for row in rows if row.test is not None and not row.test.possible]
    own = next(row for row in rows if row.method == chosen.label)
    if own.finished < FEWEST_PAIRS <= own.planned:
        notes.append(
            f"No significance test: {chosen.label}, which the others are tested against, has "
            f"finished {own.finished} of {own.planned} seeds; at least {FEWEST_PAIRS} are needed."
        )
    elif len(few) == len(tests):
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
    gaps = [(row, row.finished - row.score.seeds) for row in rows if row.finished > row.score.seeds]
    if gaps:
        shown = ", ".join(f"{row.method} {count}" for row, count in gaps)
        title = METRIC_TITLES[rows[0].metrics[1]]
        notes.append(f"Pooled {title} undefined (one class), left out, in seeds: {shown}.")
    # Which clients have a value depends on the split alone, so one method speaks for all.
    most = max(rows, key=lambda row: row.client_values)
    if most.without_value:
        notes.append(
            f"No test records, left out of everything per client: {most.without_value} of "
            f"{most.client_values} (clients times seeds)."
        )
    if most.without_score:
        notes.append(
            f"{METRIC_TITLES[most.metrics[1]]} of a client undefined (one class or one value among "
            f"its test records), left out of the mean "
            f"of clients: {most.without_score} of {most.client_values} (clients times seeds)."
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


def tuning_table(comparison: Comparison, dataset: str) -> Table:
    """What was tried for every method on one federation, and what was taken.

    Columns: pooled validation loss, mean ± std over seeds, one per candidate; the chosen is bold.

    Raises:
        OptionError: the federation is not compared.
        ValueError: nothing was tuned.
    """
    if comparison.tuning is None:
        raise ValueError("nothing was tuned in this comparison.")
    tuning, label = comparison.tuning, comparison.plan.dataset(dataset).label
    tried = [", ".join(f"{k}={v}" for k, v in c.items()) for c in tuning.candidates]
    loss = comparison.metrics(label)[0]
    columns = (
        Column("method", ("method",), number=False),
        *(Column(text, (f"{text} mean", f"{text} std")) for text in tried),
        Column("chosen", ("chosen",), number=False),
    )
    cells = []
    for method in comparison.plan.methods:
        tuned = tuning.methods[label, method.label]
        spreads = [_spread(spread, bold=c == tuned.chosen) for c, spread in enumerate(tuned.losses)]
        chosen = NONE if tuned.chosen is None else tried[tuned.chosen]
        cells.append((text_cell(method.label), *spreads, text_cell(chosen)))
    note = (
        f"Pooled {METRIC_TITLES[loss]} on validation records, mean ± std over seeds; the lowest "
        f"that finished every seed was taken. Every method had the same {len(tried)} candidates. "
        f"Test records took no part."
    )
    return Table(f"{label}: tuned on validation records", columns, tuple(cells), (note,))


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
    whole = f" and {integers} integer{'s' if integers > 1 else ''}" if integers else ""
    return f"{floats} floats{whole}"


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
                *(number_cell(row.seconds, 3) for row in rows),
                number_cell(total, 1),
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
            text_cell(run.dataset),
            text_cell(run.method),
            Cell(str(run.seed), (run.seed,)),
            text_cell(run.error or ""),
        )
        for run in comparison.failures
    )
    return Table(f"Failed runs ({len(rows)} of {len(comparison.runs)})", columns, rows)


def clients_table(comparison: Comparison, dataset: str, metric: str | None = None) -> Table:
    """One metric on the test records per method (rows) and client (columns), mean over seeds.

    Args:
        comparison: the runs.
        dataset: label or name of the federation.
        metric: ``log_loss`` (nats), ``auc`` or ``accuracy`` (in [0, 1]), of a regression ``rmse``
            or ``r2``; the task's loss by default. NaN is left out of means.

    Raises:
        OptionError: the federation is not compared.
    """
    label = comparison.plan.dataset(dataset).label
    rows = [row for row in comparison.summary() if row.dataset == label and row.finished]
    names = comparison.clients(label)
    metric = metric or comparison.metrics(label)[0]
    values = [comparison.client_values(label, row.method, metric) for row in rows]
    spreads = [[Spread.of(own[:, k].tolist()) for k in range(len(names))] for own in values]
    pick: Callable[[list[float]], float] = min if metric in LOWER_IS_BETTER else max
    best = []
    for k in range(len(names)):
        means = [
            own[k].mean
            for own, row in zip(spreads, rows, strict=True)
            if row.deployable and own[k].seeds
        ]
        best.append(pick(means) if means else math.nan)
    columns = (_METHOD, *(Column(name, (f"{name} mean", f"{name} std")) for name in names))
    cells = tuple(
        (
            _name(row),
            *(
                Cell(
                    number_text(s.mean, 3),
                    (s.mean, s.std),
                    bold=row.deployable and s.mean == best[k],
                )
                for k, s in enumerate(own)
            ),
        )
        for row, own in zip(rows, spreads, strict=True)
    )
    title = f"{label}: {METRIC_TITLES[metric]} of each client's test records"
    notes = ["Mean over seeds. Bold: best deployable method for the client."]
    undefined = max((int(np.isnan(own).sum()) for own in values), default=0)
    if undefined:
        total = max(own.size for own in values)
        notes.append(f"No value (no records, or of one class): {undefined} of {total}, left out.")
    return Table(title, columns, cells, tuple(notes))


# ---- the paper's numbers ------------------------------------------------------------------------


def paper_table(comparison: Comparison, dataset: str) -> Table | None:
    """Ours, the paper's and the difference, for every method on one of the paper's federations.

    Nothing is left out: a method the paper has no (legible) number for stands with a dash. None
    where the federation is not one of the paper's, with its default options.

    Raises:
        OptionError: the federation is not compared.
    """
    plan = comparison.plan
    chosen = plan.dataset(dataset)
    if paper.entry("table1", chosen.key) is None or not chosen.is_default:
        return None
    columns = (
        Column("method", ("method",), number=False),
        *beside_columns("log_loss", "log-loss"),
        *beside_columns("auc", "AUC"),
    )
    cells = []
    for row in comparison.summary():
        if row.dataset == chosen.label:
            method = plan.method(row.method)
            # Only what is run as the paper runs it has a number to stand beside.
            name = method.key if method.is_default else ""
            losses, aucs = (
                beside_cells(ours, printed("table1", chosen.key, name, metric), std=False)
                for metric, ours in (("log_loss", row.loss), ("auc", row.score))
            )
            cells.append((text_cell(row.method), *losses, *aucs))
    notes = [f"Means over seeds. {beside_note('Table 1')}"]
    changed = paper.other_settings(plan.training.model_dump(include=_COMPARED))
    if plan.model and plan.model.label != "logistic":
        changed.append(f"model {plan.model.label} (paper: logistic)")
    if changed:
        notes.append(f"Not the paper's settings: {', '.join(changed)}.")
    title = f"{chosen.label}: beside the paper's Table 1"
    return Table(title, columns, tuple(cells), tuple(notes))


_COMPARED = {"rounds", "local_steps", "eta", "l2"}


def beside_columns(name: str, title: str) -> tuple[Column, Column, Column]:
    """Columns of a number of ours, the paper's, and the gap; filled by :func:`beside_cells`.

    Args:
        name: of the metric, before ``_ours``, ``_paper``, ``_difference`` in the values' names.
        title: of the metric, for people.
    """
    ours, theirs = ((f"{name}_{who}", f"{name}_{who}_std") for who in ("ours", "paper"))
    return (
        Column(f"{title}, ours", ours),
        Column(f"{title}, paper", theirs),
        Column("gap", (f"{name}_difference",)),
    )


def beside_cells(
    ours: Spread, theirs: Printed, digits: int = 4, *, std: bool = True
) -> tuple[Cell, Cell, Cell]:
    """Ours, the paper's and the difference of the means; with ``std`` as mean ± std, if any."""
    gap = ours.mean - theirs.mean
    return (
        Cell(
            _mean_std(ours.mean, ours.std if std and ours.seeds > 1 else math.nan, digits),
            (ours.mean, ours.std),
        ),
        Cell(
            _mean_std(theirs.mean, theirs.std if std else math.nan, min(digits, 3)),
            (theirs.mean, theirs.std),
        ),
        Cell(NONE if math.isnan(gap) else f"{gap:+.{digits}f}", (gap,)),
    )


def _mean_std(mean: float, std: float, digits: int) -> str:
    text = number_text(mean, digits)
    return text if math.isnan(std) else f"{text} ± {number_text(std, min(digits, 3))}"


def beside_note(table: str) -> str:
    """The sentence below a table with the paper's numbers."""
    return (
        f"gap: ours - paper's. Paper: {paper.CITED}, {table}; {NONE}: no number there that we "
        f"could read."
    )
