"""What the columns of a user's tables hold, learned from training records, and their features.

A column becomes numbers in one of two ways. Numeric: one feature, a missing value is filled with
the mean. Categorical: one feature ``column=value`` for each category, 1 where the record has it and
0 elsewhere; a missing value is filled with the most frequent category, the first of equals. Means,
frequencies and categories are those of all clients' TRAINING records together, so a client that
lacks every value of a column still has the same features as the others.

Columns that would mislead a model are refused, with advice: dates, identifiers, columns with too
many categories, and numbers among which stands a text.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .tables import Records, Texts, decimal_number, is_missing

__all__ = ["Categorical", "Numeric", "canonical", "fit_column", "sorted_values"]

#: More categories than this are refused,
MOST_CATEGORIES = 50
#: and more than half as many as there are values, unless they are no more than this.
FEW_CATEGORIES = 5
#: From this many steps on, whole numbers that rise from row to row are taken for row numbers.
RISING_STEPS = 9
#: The smallest number that is read as a date, 1 January 1900 without marks between.
EARLIEST = 19000101

_TIME = r"([T ]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)? ?([AP]M)?(Z|[+-]\d{2}:?\d{2})?)?"
_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE = re.compile(
    "|".join(
        (
            rf"\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}{_TIME}",
            rf"\d{{1,2}}[-/.]\d{{1,2}}[-/.](\d{{4}}|\d{{2}}){_TIME}",
            rf"\d{{1,2}}[-. ]{{1,2}}{_MONTH}[-, ]{{1,2}}(\d{{4}}|\d{{2}})",
            rf"{_MONTH} \d{{1,2}},? \d{{4}}",
            r"\d{4}-\d{2}",
            r"\d{1,2}:\d{2}(:\d{2})?",
            r"(19|20)\d{2}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])",
        )
    ),
    re.IGNORECASE,
)
_ID_NAME = re.compile(r"(.*[^A-Za-z])?([iI][dD]|UUID|uuid|GUID|guid)|.*[a-z](Id|ID)")


@dataclass(frozen=True)
class Numeric:
    """A column of numbers.

    Attributes:
        name: of the column.
        mean: of the training records' values; fills missing ones.
        values: of all records ``[n]``, filled.
    """

    name: str
    mean: float
    values: NDArray[np.float64]

    @property
    def feature_names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def features(self) -> NDArray[np.float64]:
        """``[n, 1]``."""
        return self.values[:, None]


@dataclass(frozen=True)
class Categorical:
    """A column of categories.

    Attributes:
        name: of the column.
        categories: of the training records, sorted; numbers by size.
        most_frequent: among the training records; fills missing values.
        values: of all records ``[n]``, filled.
    """

    name: str
    categories: tuple[str, ...]
    most_frequent: str
    values: Texts

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}={category}" for category in self.categories)

    @property
    def features(self) -> NDArray[np.float64]:
        """``[n, categories]``; zeros for a category that no training record has."""
        return (self.values[:, None] == np.array(self.categories, dtype=object)).astype(np.float64)

    @property
    def unseen(self) -> list[str]:
        """Categories that only test records have, sorted."""
        return sorted_values(set(self.values) - set(self.categories))


def fit_column(
    name: str,
    records: Records,
    clients: NDArray[np.int64],
    train: NDArray[np.bool_],
    *,
    decimal: str = ".",
    categorical: bool = False,
) -> Numeric | Categorical | None:
    """Learn a column from its training records, and apply it to all.

    A column is numeric when all training values are numbers, categorical when at most half are.

    Args:
        name: the column's.
        records: all clients' records.
        clients: whose record it is ``[n]``, by number.
        train: which records are for training ``[n]``.
        decimal: ``"."`` or ``","``.
        categorical: take the column for categories whatever its values and its name look like.

    Returns:
        The column, or None when no training record has a value in it.

    Raises:
        ValueError: a text among numbers, a decimal mark of the other kind, dates, identifiers, too
            many categories. The message names the column, an example by file and row, and what to
            do.
    """
    cells = records.columns[name]
    missing = is_missing(cells)
    known = np.flatnonzero(train & ~missing)
    if not len(known):
        return None
    parsed = {text: decimal_number(text, decimal) for text in set(cells)}
    # None becomes NaN.
    values = np.array([parsed[text] for text in cells], dtype=np.float64)
    is_number = ~np.isnan(values)
    # What kind a column is of is decided by training records alone.
    share = is_number[known].mean()
    if not categorical:
        if share < 1:
            _refuse_other_decimal(name, records, known, is_number, decimal)
        if share > 0.5:
            _refuse_texts(name, records, missing, is_number)
        if share < 1 or values[known].min() >= EARLIEST:
            _refuse_dates(name, records, known)
        _refuse_identifiers(name, share == 1 and _rising(values[known], clients[known]))
        if share == 1:
            # The exact sum does not depend on the order of records, nor does its last bit.
            mean = math.fsum(values[known]) / len(known)
            return Numeric(name, mean, np.where(missing, mean, values))
    texts = canonical(cells, decimal) if share == 1 else cells.copy()
    counts = Counter(texts[known])
    _refuse_many_categories(name, counts)
    categories = sorted_values(counts)
    most_frequent = max(categories, key=counts.__getitem__)
    texts[missing] = most_frequent
    return Categorical(name, tuple(categories), most_frequent, texts)


def canonical(cells: Iterable[str], decimal: str = ".") -> Texts:
    """Cells with every number written in one way: 1, 1.0 and 01 are all ``1``."""

    def written(text: str) -> str:
        value = decimal_number(text, decimal)
        if value is None:
            return text
        return str(int(value)) if value.is_integer() else repr(value)

    cells = list(cells)
    ways = {text: written(text) for text in set(cells)}
    return np.array([ways[text] for text in cells], dtype=object)


def sorted_values(values: Iterable[str]) -> list[str]:
    """Sorted: numbers by size where all are numbers, else texts."""
    numbers = {text: decimal_number(text) for text in values}
    if any(value is None for value in numbers.values()):
        return sorted(numbers)
    return sorted(numbers, key=lambda text: (numbers[text], text))


def _refuse_other_decimal(
    name: str,
    records: Records,
    known: NDArray[np.int64],
    is_number: NDArray[np.bool_],
    decimal: str,
) -> None:
    other, said = (",", "comma") if decimal == "." else (".", "point")
    cells = records.columns[name]
    unread = known[~is_number[known]]
    only = [i for i in unread if decimal_number(cells[i], other) is not None]
    if only and len(known) - len(unread) + len(only) > len(known) / 2:
        raise ValueError(
            f"column '{name}' looks like numbers with a decimal {said} "
            f"({_example(cells, records, only[0])}): set decimal={other} (if the {said} separates "
            f"thousands, remove it)."
        )


def _refuse_texts(
    name: str, records: Records, missing: NDArray[np.bool_], is_number: NDArray[np.bool_]
) -> None:
    wrong = np.flatnonzero(~missing & ~is_number)
    if len(wrong):
        known = int((~missing).sum())
        raise ValueError(
            f"column '{name}': {_example(records.columns[name], records, wrong[0])} is not a "
            f"number, while {known - len(wrong)} of {known} values are: correct it, empty the cell "
            f"if the value is missing, or set categorical={name} if the column holds categories."
        )


def _refuse_dates(name: str, records: Records, known: NDArray[np.int64]) -> None:
    cells = records.columns[name]
    dates = [i for i in known if _DATE.fullmatch(cells[i])]
    if len(dates) > len(known) / 2:
        raise ValueError(
            f"column '{name}' holds dates or times ({_example(cells, records, dates[0])}): leave "
            f"it out with drop={name}, or replace it by a number, such as an age or a duration."
        )


def _refuse_identifiers(name: str, rising: bool) -> None:
    if _ID_NAME.fullmatch(name):
        reason, otherwise = "is named like an identifier", f"set categorical={name}"
    elif rising:
        reason = "rises by whole numbers from row to row, as numbers of records do"
        otherwise = "sort the rows in another way"
    else:
        return
    raise ValueError(
        f"column '{name}' {reason}; a model would learn records by heart: leave it out with "
        f"drop={name} (if it does describe the record: {otherwise})."
    )


def _rising(values: NDArray[np.float64], clients: NDArray[np.int64]) -> bool:
    """Whether whole numbers rise strictly within every client, over enough steps to mean it."""
    if not np.all(values == np.floor(values)):
        return False
    order = np.argsort(clients, kind="stable")
    steps = np.diff(values[order])[np.diff(clients[order]) == 0]
    return len(steps) >= RISING_STEPS and bool(np.all(steps > 0))


def _refuse_many_categories(name: str, counts: Counter[str]) -> None:
    total = sum(counts.values())
    if len(counts) <= max(FEW_CATEGORIES, min(MOST_CATEGORIES, total / 2)):
        return
    if len(counts) == total:
        what = f"has another text in each of {total:,} training records, as names and numbers do"
    else:
        what = f"has {len(counts):,} categories in {total:,} training records"
    raise ValueError(
        f"column '{name}' {what}; at most {MOST_CATEGORIES} categories can be used, and at most "
        f"half as many as there are values: leave it out with drop={name}, or merge categories."
    )


def _example(cells: Texts, records: Records, record: int) -> str:
    return f"'{cells[record]}' in {records.where(record)}"
