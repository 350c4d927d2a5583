"""The column a model is to predict: two classes or several, from the texts of a table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..federation import Task
from ..options import OptionError
from .columns import canonical, sorted_values
from .messages import listed
from .tables import Records, decimal_number, is_missing

__all__ = ["Target", "read_target"]

#: Pairs of words, in any capitals, whose second is understood to be the positive class.
BINARY_WORDS = (("0", "1"), ("no", "yes"), ("false", "true"))
#: More classes than this, or than half as many as there are records, are taken for measurements.
MOST_CLASSES = 100
#: As many classes are always allowed.
FEW_CLASSES = 5


@dataclass(frozen=True)
class Target:
    """Labels of all records.

    Attributes:
        task: binary or multiclass.
        classes: what the labels 0, 1, ... mean.
        labels: ``[n]``.
    """

    task: Task
    classes: tuple[str, ...]
    labels: NDArray[np.int64]

    def ordered(self, train: NDArray[np.bool_]) -> tuple[Target, list[str]]:
        """The same with the classes of training records first, and the classes only tests have.

        So test records can add classes, and can't change the label of any training record.
        """
        if self.task == "binary":
            return self, []
        known = np.isin(np.arange(len(self.classes)), self.labels[train])
        order = np.argsort(~known, kind="stable")
        classes = tuple(self.classes[i] for i in order)
        return (
            Target(self.task, classes, np.argsort(order)[self.labels]),
            list(classes[int(known.sum()) :]),
        )


def read_target(
    name: str, records: Records, *, positive: str | None = None, decimal: str = "."
) -> Target:
    """Labels from a column.

    With ``positive``, records of that value are 1 and all others 0. Without: the words of
    ``BINARY_WORDS`` are understood; more than two values make a multiclass task, whose classes are
    the sorted values (numbers by size).

    Args:
        name: the column's.
        records: all clients' records.
        positive: the value that means 1.
        decimal: ``"."`` or ``","``.

    Raises:
        OptionError: two values without a word for which is 1, a ``positive`` that no record has.
        ValueError: a record without a value (naming file and row), a column with one value, one
            class written in several ways, so many values that they must be measurements.
    """
    cells = records.columns[name]
    absent = np.flatnonzero(is_missing(cells))
    if len(absent):
        more = f", and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ValueError(
            f"{records.where(absent[0])}{more}: no value in the target '{name}'; fill it in or "
            f"delete the row."
        )
    numeric = all(decimal_number(text, decimal) is not None for text in set(cells))
    texts = canonical(cells, decimal) if numeric else cells
    values = sorted_values(set(texts))
    if len(values) == 1:
        raise ValueError(
            f"the target '{name}' has the value '{values[0]}' in every record: there is nothing to "
            f"learn; choose another column, or add records of another class."
        )
    if positive is not None:
        wanted = canonical([positive], decimal)[0] if numeric else positive
        if wanted not in values:
            raise OptionError(
                f"positive = '{positive}': the target '{name}' has no such value, but "
                f"{listed(values, 10)}."
            )
        others = [v for v in values if v != wanted]
        negative = others[0] if len(others) == 1 else f"not {wanted}"
        return Target("binary", (negative, wanted), (texts == wanted).astype(np.int64))
    folded = {value.casefold() for value in values}
    for pair in BINARY_WORDS:
        if folded == set(pair):
            labels = np.array([text.casefold() == pair[1] for text in texts], dtype=np.int64)
            return Target("binary", pair, labels)
    if len(folded) < len(values) or folded <= {word for pair in BINARY_WORDS for word in pair}:
        raise ValueError(
            f"the target '{name}' has one class written in several ways: {listed(values, 10)}; "
            f"write it in one."
        )
    if len(values) == 2:
        raise OptionError(
            f"the target '{name}' has the values '{values[0]}' and '{values[1]}': say which of "
            f"them is 1, for example positive={values[1]}."
        )
    if len(values) > max(FEW_CLASSES, min(MOST_CLASSES, len(records) / 2)):
        raise ValueError(
            f"the target '{name}' has {len(values):,} different values in {len(records):,} "
            f"records: that is a measurement or a text, not a class; make classes of it, or say "
            f"with positive= which value is 1."
        )
    codes = {value: code for code, value in enumerate(values)}
    labels = np.array([codes[text] for text in texts], dtype=np.int64)
    return Target("multiclass", tuple(values), labels)
