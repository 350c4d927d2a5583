"""Writes a comparison or a diagnosis into a folder: tables in every form, and figures."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .comparison import Comparison, LongRow
from .diagnosis import Diagnosis
from .runs import DIAGNOSIS, RunFolderError, diagnosis_files, write_atomically, write_json
from .tables import Table, markdown_text

__all__ = ["write_diagnosis", "write_report", "write_tables", "writing"]


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


def write_diagnosis(
    diagnosis: Diagnosis,
    clouds: Sequence[NDArray[np.float64]],
    tables: Sequence[Table],
    folder: Path,
    notes: Sequence[str] = (),
) -> list[Path]:
    """Write a diagnosis, and remove what an earlier one left in the same folder.

    ``report.md`` is for people: advice, findings, all tables and the figures. ``tables.json`` holds
    the tables, each in ``table-NAME.csv`` too; ``distances`` and ``persistence`` are figures, as
    PNG and SVG; ``diagnosis.json`` holds the settings, the advice and the names of the files.

    Args:
        diagnosis: of :func:`fedtopo_torch.diagnosis.diagnose`.
        clouds: training features ``[n_k, d]`` of all clients, as they were described.
        tables: of :func:`fedtopo_torch.diagnosis_tables.diagnosis_tables`.
        folder: of :func:`fedtopo_torch.runs.diagnosis_folder`.
        notes: what a reader should know of the data, a sentence each.

    Returns:
        the files.

    Raises:
        RunFolderError: one of them can't be written.
    """
    from . import __version__
    from .figures import distance_figure, persistence_figure, save_figure

    labels = diagnosis.clustering.labels
    figures = {
        "distances": distance_figure(diagnosis.phi, diagnosis.names, labels),
        "persistence": persistence_figure(
            clouds, diagnosis.names, diagnosis.settings["seed"], diagnosis.settings["n_sub"]
        ),
    }
    paragraphs = [
        f"# Diagnosis of {markdown_text(diagnosis.name)}",
        f"**{markdown_text(diagnosis.advice.sentence)}**",
        *map(markdown_text, diagnosis.findings),
        *(f"Note: {markdown_text(note)}" for note in notes),
        *(table.markdown().rstrip() for table in tables),
        *(f"![{name}]({name}.png)" for name in figures),
    ]
    contents = {
        "report.md": "\n\n".join(paragraphs) + "\n",
        "tables.json": json.dumps([table.content() for table in tables], indent=2) + "\n",
        **{f"table-{_slug(table.title)}.csv": table.csv() for table in tables},
    }
    names = [DIAGNOSIS, *contents, *(f"{name}.{e}" for name in figures for e in ("png", "svg"))]
    told: dict[str, Any] = {
        "federation": diagnosis.name,
        "settings": diagnosis.settings,
        "advice": vars(diagnosis.advice),
        "findings": diagnosis.findings,
        "files": names,
        "fedtopo-torch": __version__,
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        before = diagnosis_files(folder) or []
        # First, so that what a full disk cuts off is still known as a diagnosis.
        write_json(folder / DIAGNOSIS, told)
        for name, text in contents.items():
            write_atomically(folder / name, text.encode())
        for name, figure in figures.items():
            save_figure(figure, folder / name)
        for stale in set(before) - set(names):
            (folder / stale).unlink(missing_ok=True)
    return [folder / name for name in names]


def _slug(text: str) -> str:
    """A title as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80]
