"""Table 4: communication, counted from the messages."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..comparison import Summary
from ..paper import entry
from ..plan import METHODS
from ..tables import NONE, Cell, Column, Table, beside_note, text_cell
from .description import Experiment, Row, Setup, Study, shown
from .findings import listed

__all__ = ["EXPERIMENT", "Sent", "expected"]


class Sent(NamedTuple):
    """Numbers of one client: floats and integers a round, and floats once before round 1."""

    floats: int
    integers: int
    once: int


def expected(text: str, p: int, n_clusters: int) -> Sent:
    """What a cell of the paper's table means: ``"p + cluster id"``, ``"M p"``.

    Args:
        text: terms joined by +: multiples of p, ``cluster id``, ``N floats once``.
        p: parameters of the model.
        n_clusters: M.

    Raises:
        ValueError: a term that is none of these.
    """
    floats = integers = once = 0
    for term in text.split(" + "):
        if term == "cluster id":
            integers += 1
        elif found := re.fullmatch(r"(\d+) floats once", term):
            once += int(found[1])
        elif found := re.fullmatch(r"(\d*|M ?)p", term):
            factor = found[1].strip()
            floats += p * (n_clusters if factor == "M" else int(factor or 1))
        else:
            raise ValueError(f"'{term}' is no term of Table 4.")
    return Sent(floats, integers, once)


def _sent(summary: Summary, direction: str) -> Sent:
    floats, integers = getattr(summary, direction)
    return Sent(floats, integers, getattr(summary, f"{direction}_once")[0])


def _words(sent: Sent, p: int) -> str:
    times, rest = divmod(sent.floats, p)
    multiple = "" if not times else "p" if times == 1 else f"{times}p"
    terms = [multiple] if multiple else []
    terms += [f"{rest} floats"] if rest else []
    terms += [f"{sent.integers} int"] if sent.integers else []
    terms += [f"{sent.once} floats once"] if sent.once else []
    return " + ".join(terms) or "nothing"


def _rows(study: Study) -> list[tuple[str, str, Sent, str | None, Sent | None, int]]:
    """Method, direction, ours, the paper's words and what they mean, p; of finished methods."""
    rows = []
    clusters = int(entry("table5")["n_clusters"])
    for method in METHODS:
        summary = study.summary(Row((), method, "synthetic"))
        if not summary.finished:
            continue
        p = summary.parameters
        for direction in ("up", "down"):
            text = entry("table4", method, direction)
            meant = expected(text, p, clusters) if text else None
            rows.append((method, direction, _sent(summary, direction), text, meant, p))
    return rows


def _table(study: Study) -> list[Table]:
    columns = (
        Column("method", ("method",), number=False),
        Column("direction", ("direction",), number=False),
        Column("ours", ("ours", "floats", "integers", "floats_once")),
        Column("paper", ("paper", "paper_floats")),
        Column("gap", ("floats_difference",)),
    )
    cells, p = [], 0
    for method, direction, ours, text, meant, p in _rows(study):
        words = _words(ours, p)
        gap = None if meant is None else ours.floats - meant.floats
        cells.append(
            (
                text_cell(shown(method)),
                text_cell(direction),
                Cell(words, (words, *ours)),
                Cell(text or NONE, (text, None if meant is None else meant.floats)),
                Cell(NONE if gap is None else f"{gap:+d}", (gap,)),
            )
        )
    notes = (
        f"Floats of one client in one round, counted from the messages on federation (A); p = {p} "
        f"parameters, M = {entry('table5')['n_clusters']}; int: integers; once: before round 1. "
        f"{beside_note('Table 4')}",
    )
    return [Table("What one client sends (up) and receives (down)", columns, tuple(cells), notes)]


def _findings(study: Study) -> list[str]:
    compared = [row for row in _rows(study) if row[4] is not None]
    off = [
        f"{shown(method)} {direction} ({_words(ours, p)}, paper {text})"
        for method, direction, ours, text, meant, p in compared
        if ours != meant
    ]
    same = len(compared) - len(off)
    text = f"{same} of the {len(compared)} cells of the paper's table are what our messages hold"
    return [f"{text}." if not off else f"{text}; not: {listed(off)}."]


EXPERIMENT = Experiment(
    name="table4",
    question="What does a method cost in communication? Counted from the messages that the trainer "
    "passes, not from a formula.",
    setups={"": Setup(METHODS, {"synthetic": "synthetic"})},
    more=_table,
    findings=_findings,
)
