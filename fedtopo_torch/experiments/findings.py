"""Sentences on what agrees with the paper and what does not, computed from the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..paper import SEEDS as PAPER_SEEDS
from ..tables import Table

__all__ = ["Pair", "agreement", "listed", "pairs", "signed"]

#: Numbers this close are called close.
CLOSE = 0.01
#: A difference of two means is surprising beyond so many of its standard errors.
ERRORS = 2.0


class Pair(NamedTuple):
    """A number of ours beside the paper's; std is NaN where there is none."""

    where: str
    metric: str
    ours: float
    ours_std: float
    paper: float
    paper_std: float

    @property
    def gap(self) -> float:
        """Ours - paper's."""
        return self.ours - self.paper


def pairs(tables: Iterable[Table]) -> Iterator[Pair]:
    """Every number of these tables that the paper has too, and ours is not missing."""
    tables = list(tables)
    for table in tables:
        metrics = {
            column.fields[0].removesuffix("_ours"): column.title.removesuffix(", ours")
            for column in table.columns
            if column.fields and column.fields[0].endswith("_ours")
        }
        keys = {c.title: c.fields[0] for c in table.columns if c.fields and not c.number}
        start = [table.title.partition(":")[0]] if len(tables) > 1 else []
        for record in table.records():
            named = [
                f"{title} {record[key]}" if len(keys) > 1 else str(record[key])
                for title, key in keys.items()
            ]
            where = ", ".join([*start, *named])
            for metric, title in metrics.items():
                values = [
                    record[f"{metric}_{part}"]
                    for part in ("ours", "ours_std", "paper", "paper_std")
                ]
                ours, ours_std, paper, paper_std = (
                    math.nan if value is None else float(value) for value in values
                )
                if not (math.isnan(ours) or math.isnan(paper)):
                    yield Pair(where, title, ours, ours_std, paper, paper_std)


def agreement(tables: Sequence[Table], seeds: int, close: float = CLOSE) -> str:
    """How many of the paper's numbers we come close to, and which is farthest off.

    Args:
        tables: made with :func:`fedtopo_torch.tables.beside_cells`.
        seeds: ours are means over so many.
        close: numbers that differ by no more are called close.
    """
    found = list(pairs(tables))
    if not found:
        return "The paper has no legible number to compare with, or nothing of ours has finished."
    near = sum(abs(pair.gap) <= close + 1e-12 for pair in found)
    text = f"Of the {len(found)} numbers the paper prints, ours are within {close:g} of {near}"
    tested = [p for p in found if not (math.isnan(p.ours_std) or math.isnan(p.paper_std))]
    if tested:
        usual = sum(
            abs(p.gap)
            <= ERRORS * math.hypot(p.ours_std / seeds**0.5, p.paper_std / PAPER_SEEDS**0.5)
            for p in tested
        )
        text += (
            f"; of the {len(tested)} with a spread, {usual} differ by no more than two standard "
            f"errors of means over different draws"
        )
    far = max(found, key=lambda pair: abs(pair.gap))
    return (
        f"{text}. Farthest: {far.where}, {far.metric} {far.ours:.3f} (paper {far.paper:.3f}, gap "
        f"{far.gap:+.3f})."
    )


def listed(names: Iterable[str]) -> str:
    """``"A, B and C"``, or ``"none"``."""
    names = list(names)
    if len(names) < 2:
        return "".join(names) or "none"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def signed(value: float, digits: int = 3) -> str:
    """A difference with its sign, or a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:+.{digits}f}"
