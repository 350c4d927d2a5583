"""Writes a comparison into a folder: tables in every form, figures, and the long table."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from .comparison import Comparison, LongRow
from .runs import RunFolderError, write_atomically
from .tables import Table

__all__ = ["write_report", "write_tables", "writing"]


def write_report(comparison: Comparison, tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write everything that is known of a comparison.

    ``results.csv`` is the long table (one line per run, client, split and metric); ``tables.md``,
    ``tables.tex`` and ``tables.json`` hold all tables, each in ``table-NAME.csv`` too; and
    ``curves-FEDERATION`` and ``clients-FEDERATION`` are figures, as PNG and SVG.

    Args:
        comparison: with at least one run.
        tables: of :func:`fedtopo_torch.tables.comparison_tables`.
        folder: exists.

    Returns:
        the files.

    Raises:
        RunFolderError: one of them can't be written.
    """
    from .figures import clients_figure, curves_figure, save_figure

    long = io.StringIO()
    writer = csv.writer(long, lineterminator="\n")
    writer.writerow(LongRow._fields)
    writer.writerows(comparison.rows())
    with writing(folder):
        files = [folder / "results.csv"]
        write_atomically(files[0], long.getvalue().encode())
        files += write_tables(tables, folder)
        for dataset in comparison.plan.datasets:
            if not any(run.dataset == dataset.label and not run.error for run in comparison.runs):
                continue
            name = _slug(dataset.label)
            curves = curves_figure(comparison, dataset.label)
            files += save_figure(curves, folder / f"curves-{name}")
            clients = clients_figure(comparison, dataset.label)
            files += save_figure(clients, folder / f"clients-{name}")
    return files


def write_tables(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write ``tables.md``, ``tables.tex`` and ``tables.json`` with all, and a CSV file for each.

    Raises:
        OSError: one of them can't be written.
    """
    contents = {
        "tables.md": "\n\n".join(table.markdown() for table in tables) + "\n",
        "tables.tex": "\n\n".join(table.latex() for table in tables) + "\n",
        "tables.json": json.dumps([table.content() for table in tables], indent=2) + "\n",
    }
    for table in tables:
        contents[f"table-{_slug(table.title)}.csv"] = table.csv()
    for name, text in contents.items():
        write_atomically(folder / name, text.encode())
    return [folder / name for name in contents]


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Tell which file of a folder could not be written.

    Raises:
        RunFolderError: instead of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"can't write {error.filename or folder}: {error.strerror or error}."
        ) from error


def _slug(text: str) -> str:
    """A title as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80]
