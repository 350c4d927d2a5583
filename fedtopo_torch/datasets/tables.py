"""Reading CSV files as text, so that everything wrong can be named by file and row.

Rows are numbered as a spreadsheet shows them: the header is row 1.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from ..federation import LARGEST
from .messages import listed

__all__ = ["MISSING", "Records", "decimal_number", "is_missing", "read_csv_files"]

#: Cells that mean "not known", whatever their capitals; blanks around a cell never count.
MISSING = ("", "na", "nan", "?")

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")

# What a column without a name is called begins so.
_UNNAMED = "(column "

Texts = NDArray[np.object_]


@dataclass(frozen=True)
class Records:
    """The records of one or several files, below one another.

    Attributes:
        files: names of the files.
        file: which file a record is from ``[n]``.
        row: its row there ``[n]``.
        columns: column -> its cells as text ``[n]``, without blanks around them.
        dropped: columns left out on demand, of any file.
        blank_rows: per file, how many rows without any value were left out.
    """

    files: tuple[str, ...]
    file: NDArray[np.int64]
    row: NDArray[np.int64]
    columns: dict[str, Texts]
    dropped: frozenset[str]
    blank_rows: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.row)

    def where(self, record: int) -> str:
        """``north.csv, row 14``."""
        return f"{self.files[self.file[record]]}, row {self.row[record]}"


def is_missing(cells: Texts) -> NDArray[np.bool_]:
    """Which cells hold no value, ``[n]``."""
    absent = {text for text in set(cells) if text.lower() in MISSING}
    return np.array([text in absent for text in cells], dtype=bool)


def decimal_number(text: str, decimal: str = ".") -> float | None:
    """The finite number a cell holds, or None; no thousands separators, no units."""
    if decimal == ",":
        if "." in text:
            return None
        text = text.replace(",", ".")
    # The pattern is stricter than float, which takes inf, nan and 1_000 too.
    if _NUMBER.fullmatch(text) is None:
        return None
    value = float(text)
    return value if abs(value) < LARGEST else None


def read_csv_files(
    paths: Sequence[Path], separator: str, encoding: str, drop: Sequence[str] = ()
) -> Records:
    """Read files that have the same columns, in any order.

    Args:
        paths: at least one; records keep this order, and that of their rows.
        separator: the character between cells.
        encoding: of the text; a byte order mark is not taken for text.
        drop: columns to leave out; they need not be in every file.

    Raises:
        ValueError: a file that is empty, has no records, is not text in this encoding or not CSV
            with this separator; a row with too many or too few cells; two columns of one name, a
            column without a name; files whose columns differ. The message names file, row or
            columns, and what to do.
    """
    tables = [_read(path, separator, encoding, set(drop)) for path in paths]
    first = tables[0].columns
    for path, table in zip(paths, tables, strict=True):
        absent = [c for c in first if c not in table.columns]
        extra = [c for c in table.columns if c not in first]
        if absent or extra:
            problems = [f"lacks {listed(absent, 20)}"] if absent else []
            problems += [f"also has {listed(extra, 20)}"] if extra else []
            raise ValueError(
                f"{path.name} {' and '.join(problems)}, compared with {paths[0].name}: every file "
                f"needs the same columns; rename them, add them (cells may be empty), or leave "
                f"them out with drop={','.join(absent + extra)}."
            )
    return Records(
        files=tuple(path.name for path in paths),
        file=np.repeat(np.arange(len(tables)), [len(t.rows) for t in tables]),
        row=np.concatenate([t.rows for t in tables]),
        columns={c: np.concatenate([t.columns[c] for t in tables]) for c in first},
        dropped=frozenset().union(*(t.dropped for t in tables)),
        blank_rows=tuple(t.blank_rows for t in tables),
    )


@dataclass(frozen=True)
class _Table:
    rows: NDArray[np.int64]
    columns: dict[str, Texts]
    dropped: frozenset[str]
    blank_rows: int


def _read(path: Path, separator: str, encoding: str, drop: set[str]) -> _Table:
    # Spelled so, UTF-8 may begin with a byte order mark, as Excel writes it.
    codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    try:
        with path.open(encoding=codec, newline="") as file:
            return _parse(path.name, file, separator, drop)
    except UnicodeError as error:
        with path.open("rb") as raw:
            utf16 = raw.read(2) in (b"\xff\xfe", b"\xfe\xff")
        likely = "encoding=utf-16" if utf16 else "for example encoding=cp1252 (Excel on Windows)"
        raise ValueError(f"{path.name} is not {encoding} text ({error}): set {likely}.") from None


def _parse(name: str, file: TextIO, separator: str, drop: set[str]) -> _Table:
    reader = csv.reader(file, delimiter=separator, strict=True, skipinitialspace=True)
    number = 0
    header: list[str] | None = None
    rows: list[int] = []
    records: list[list[str]] = []
    blank = 0
    try:
        for number, raw in enumerate(reader, start=1):
            cells = [cell.strip() for cell in raw]
            if not any(cells):
                # An empty line is nothing; a row of empty cells is one that somebody made.
                blank += bool(cells) and header is not None
            elif header is None:
                header = _header(name, cells, separator)
            elif len(cells) != len(header):
                raise ValueError(
                    f"{name}, row {number} has {len(cells)} cells, and the header has "
                    f"{len(header)}: is a '{separator}' missing, or one inside a value without "
                    f"quotes around it?"
                )
            else:
                rows.append(number)
                records.append(cells)
    except csv.Error as error:
        raise ValueError(
            f"{name}, row {number + 1} can't be read as CSV ({error}): look for a quotation mark "
            f"that is not closed."
        ) from None
    if header is None:
        raise ValueError(f"{name} is empty: it needs a row of column names, then the records.")
    if not records:
        raise ValueError(f"{name} has column names and no records: add some, or remove the file.")
    columns = {}
    for column, texts in zip(header, zip(*records, strict=True), strict=True):
        if column in drop:
            continue
        if column.startswith(_UNNAMED):
            if not any(texts):
                continue
            raise ValueError(
                f"{name}: {column.strip('()')} has no name in the header: name it, or leave it out "
                f'with "drop={column}".'
            )
        columns[column] = np.array(texts, dtype=object)
    return _Table(np.array(rows), columns, frozenset(drop.intersection(header)), blank)


def _header(name: str, cells: list[str], separator: str) -> list[str]:
    """The column names; those without one are called ``(column 3)``."""
    if len(cells) == 1:
        for other, said in ((";", ";"), ("\t", "tab"), (",", ",")):
            if other != separator and other in cells[0]:
                raise ValueError(
                    f"{name} has one column, '{_shortened(cells[0])}', with '{said}' in its name: "
                    f'set "separator={said}".'
                )
    header = [cell or f"{_UNNAMED}{i})" for i, cell in enumerate(cells, start=1)]
    twice = [column for column in dict.fromkeys(header) if header.count(column) > 1]
    if twice:
        raise ValueError(
            f"{name} has more than one column called {listed(twice)}: rename or delete all but one."
        )
    return header


def _shortened(text: str) -> str:
    text = text.replace("\t", " ")
    return text if len(text) <= 40 else text[:37] + "..."
