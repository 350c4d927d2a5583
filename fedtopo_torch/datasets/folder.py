"""A user's own federation: a folder of CSV files, one for each client, or one file for all."""

from __future__ import annotations

import codecs
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from ..federation import Client, Federation, Task
from ..options import OptionError, did_you_mean, names_from_text
from ..randomness import generator
from ..registry import datasets
from .base import Dataset
from .columns import Categorical, Numeric, canonical, fit_column
from .messages import listed
from .split import Parts, split_notes, split_records
from .tables import Records, is_missing, read_csv_files
from .target import Target, read_target

__all__ = ["ClientSummary", "ColumnSummary", "Folder", "FolderSummary", "folder_dataset"]

#: How a test column may say which part a record belongs to, in any capitals.
TEST_WORDS = {"1": True, "true": True, "test": True, "0": False, "false": False, "train": False}


@dataclass(frozen=True)
class ClientSummary:
    """What was understood of one client.

    Attributes:
        name: the client's.
        records, train, test: how many; the first is the sum of the others.
        classes: records of each class, training and test together.
        missing: empty cells among the feature columns.
        prevalence: share of label 1, for a binary target; else None.
    """

    name: str
    records: int
    train: int
    test: int
    classes: dict[str, int]
    missing: int
    prevalence: float | None


@dataclass(frozen=True)
class ColumnSummary:
    """What was understood of one feature column.

    Attributes:
        name: the column's.
        kind: ``"numeric"`` or ``"categorical"``.
        missing: records of all clients without a value.
        fill: what a missing value becomes: the training records' mean, or their most frequent
            category.
        categories: of the training records; empty for a numeric column.
    """

    name: str
    kind: Literal["numeric", "categorical"]
    missing: int
    fill: float | str
    categories: tuple[str, ...] = ()


@dataclass(frozen=True)
class FolderSummary:
    """What was understood of a folder, see :meth:`Folder.describe`.

    Attributes:
        path: the folder or file.
        files: the files read.
        target: the target's column.
        task: binary or multiclass.
        classes: what the labels 0, 1, ... mean.
        clients: sorted by name.
        columns: in the order of the first file.
        feature_names: of what models see, one-hot features as ``column=category``.
        ignored: columns that are not used -> why.
        blank_rows: file -> rows without any value, which were left out.
        warnings: what loading would warn of.
    """

    path: Path
    files: tuple[str, ...]
    target: str
    task: Task
    classes: tuple[str, ...]
    clients: tuple[ClientSummary, ...]
    columns: tuple[ColumnSummary, ...]
    feature_names: tuple[str, ...]
    ignored: dict[str, str]
    blank_rows: dict[str, int]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Understood:
    location: Path
    records: Records
    names: list[str]
    clients: NDArray[np.int64]
    train: NDArray[np.bool_]
    target: Target
    columns: list[Numeric | Categorical]
    ignored: dict[str, str]
    notes: list[str]


@datasets.register("folder")
class Folder(Dataset):
    """Your own CSV files: one per client, or one for all with a column that names the client.

    ``path`` is a folder with one CSV per client, named like its file without ``.csv``; or, with
    ``client_column``, one CSV (or a folder that holds just one). The first row names the columns,
    which are the same in every file, in any order.

    - Target: see ``target`` and ``positive``. The words 0/1, no/yes and false/true are understood;
      more than two values make a multiclass task with the values, sorted, as classes.
    - Missing: a cell that is empty, NA, NaN or ? in any capitals. A target must not be missing.
    - Numeric column: all its training values are numbers. One feature; missing values become the
      mean of all clients' training values.
    - Categorical column: at most half are. One feature ``column=category``, 0 or 1, for each
      category of all clients' training records; missing values become their most frequent
      category (the first of equals); a category that only test records have gives all zeros.
    - A column without any training value is ignored. A client may lack all values of a column.
    - Test records: marked by ``test_column``, or drawn. ``ceil(test_size * n)`` of a client's n
      records, but at most n - 1, by scikit-learn's ``train_test_split`` seeded by the run's seed
      and the client's name; stratified by class where every class has two records and both parts
      have room for each class, else not. What test records hold influences nothing in training.

    Models see the features standardised with the pooled training mean and std.

    Warns:
        UserWarning: clients split without stratifying or without test records, columns ignored,
            categories and classes that only test records have, categories that differ in capitals
            only, blank rows left out.

    Raises:
        OptionError: options that do not fit the files (an unknown column, a missing path).
        ValueError: files that can't be used: empty, unreadable, of different columns; a target
            that is missing or has one value; texts among numbers, dates, identifiers, too many
            categories; a client without training records. The message names the file and row, or
            the column, and says what to do.
    """

    paper: ClassVar[str] = "your own CSV files"

    path: Path | None = Field(
        None, description="folder with one CSV file per client, or one CSV file (client_column)"
    )
    target: str = Field("", description="column to predict; required")
    positive: str | None = Field(
        None, description="value of the target that is label 1; all others are 0"
    )
    client_column: str | None = Field(
        None, description="column that names the client, where one file holds all clients"
    )
    test_size: float = Field(
        0.3, ge=0.05, le=0.95, description="share of each client's records kept for testing"
    )
    test_column: str | None = Field(
        None,
        description="column that marks test records (1, true, test) and training records (0, "
        "false, train), in place of test_size",
    )
    separator: Literal[",", ";", "tab"] = Field(",", description="between cells: , or ; or tab")
    decimal: Literal[".", ","] = Field(".", description="decimal mark of numbers: . or ,")
    drop: tuple[str, ...] = Field((), description="columns to leave out, separated by commas")
    categorical: tuple[str, ...] = Field(
        (), description="columns of numbers that are codes of categories, separated by commas"
    )
    encoding: str = Field("utf-8", description="of the files, for example cp1252 or utf-16")

    _from_text = field_validator("drop", "categorical", mode="before")(names_from_text)

    @field_validator("separator", mode="before")
    @classmethod
    def _tab(cls, value: Any) -> Any:
        return "tab" if value in ("\t", "\\t") else value

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str) -> str:
        try:
            codecs.lookup(value)
        except LookupError:
            raise ValueError("an encoding Python knows, such as utf-8, cp1252, utf-16") from None
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Folder:
        roles = {
            role: column
            for role in ("target", "client_column", "test_column")
            if (column := getattr(self, role))
        }
        for i, (role, column) in enumerate(roles.items()):
            for other, same in list(roles.items())[:i]:
                if column == same:
                    raise ValueError(f"column '{column}' can't be both {other} and {role}")
            for option in ("drop", "categorical"):
                if column in getattr(self, option):
                    raise ValueError(f"column '{column}' is the {role}: take it out of {option}")
        both = sorted(set(self.drop) & set(self.categorical))
        if both:
            raise ValueError(f"column '{both[0]}' can't be both in drop and in categorical")
        if self.test_column and self.test_size != type(self).model_fields["test_size"].default:
            raise ValueError("test_column and test_size exclude each other; leave one out")
        return self

    def load(self, seed: int) -> Federation:
        """One client per file, or per value of ``client_column``."""
        known = self._understand(seed)
        for note in known.notes:
            warnings.warn(f"{_own_name(known.location)}: {note}", stacklevel=2)
        x = np.concatenate([column.features for column in known.columns], axis=1)
        y = known.target.labels
        clients = []
        for k, name in enumerate(known.names):
            own = known.clients == k
            train, test = own & known.train, own & ~known.train
            clients.append(Client(name, train=(x[train], y[train]), test=(x[test], y[test])))
        return Federation(
            self.held_out(clients, seed),
            task=known.target.task,
            n_classes=len(known.target.classes),
            feature_names=_feature_names(known),
            name=_own_name(known.location),
            source={**self.source(seed), "classes": list(known.target.classes)},
            dtype=self.precision,
        )

    def describe(self, seed: int = 0) -> FolderSummary:
        """What loading with this seed would understand; writes nothing.

        Raises:
            OptionError, ValueError: as :meth:`load` does.
        """
        known = self._understand(seed)
        missing = {c.name: is_missing(known.records.columns[c.name]) for c in known.columns}
        per_record = np.sum(list(missing.values()), axis=0)
        target = known.target
        clients = []
        for k, name in enumerate(known.names):
            own = known.clients == k
            counts = np.bincount(target.labels[own], minlength=len(target.classes)).tolist()
            clients.append(
                ClientSummary(
                    name,
                    records=int(own.sum()),
                    train=int((own & known.train).sum()),
                    test=int((own & ~known.train).sum()),
                    classes=dict(zip(target.classes, counts, strict=True)),
                    missing=int(per_record[own].sum()),
                    prevalence=counts[1] / sum(counts) if target.task == "binary" else None,
                )
            )
        columns = []
        for column in known.columns:
            count = int(missing[column.name].sum())
            if isinstance(column, Numeric):
                columns.append(ColumnSummary(column.name, "numeric", count, column.mean))
            else:
                columns.append(
                    ColumnSummary(
                        column.name,
                        "categorical",
                        count,
                        column.most_frequent,
                        column.categories,
                    )
                )
        records = known.records
        blank = zip(records.files, records.blank_rows, strict=True)
        return FolderSummary(
            path=known.location,
            files=records.files,
            target=self.target,
            task=target.task,
            classes=target.classes,
            clients=tuple(clients),
            columns=tuple(columns),
            feature_names=_feature_names(known),
            ignored=known.ignored,
            blank_rows={file: count for file, count in blank if count},
            warnings=tuple(known.notes),
        )

    def _understand(self, seed: int) -> _Understood:
        location, paths = self._files()
        separator = "\t" if self.separator == "tab" else self.separator
        # A role's column is never dropped, so drop can only name features.
        records = read_csv_files(paths, separator, self.encoding, self.drop)
        self._check_columns(records)
        target = read_target(self.target, records, positive=self.positive, decimal=self.decimal)
        names, clients = self._clients(records, paths)
        train, parts = self._train(seed, records, names, clients, target)
        target, untrained = target.ordered(train)

        notes = split_notes(parts)
        if untrained:
            notes.append(f"classes that no training record has: {listed(untrained)}.")
        blank = sum(records.blank_rows)
        if blank:
            notes.append(f"rows without any value, left out: {blank}.")
        ignored = dict.fromkeys(self.drop, "left out by drop")
        columns = []
        roles = {self.target, self.client_column, self.test_column}
        for name in records.columns:
            if name in roles:
                continue
            column = fit_column(
                name,
                records,
                clients,
                train,
                decimal=self.decimal,
                categorical=name in self.categorical,
            )
            if column is None:
                ignored[name] = "no training record has a value"
                notes.append(f"column '{name}' is ignored: no training record has a value in it.")
                continue
            columns.append(column)
            if isinstance(column, Categorical):
                notes.extend(_category_notes(column))
        if not columns:
            raise ValueError(
                f"{_own_name(location)}: there is no column to learn from beside the target "
                f"'{self.target}'."
            )
        return _Understood(
            location, records, names, clients, train, target, columns, ignored, notes
        )

    def _files(self) -> tuple[Path, list[Path]]:
        if self.path is None:
            raise OptionError(f"{self.name}: say where the CSV files are with path=FOLDER.")
        location = self.path.expanduser()
        if location.is_file():
            paths = [location]
        elif location.is_dir():
            inside = sorted(p for p in location.iterdir() if not p.name.startswith("."))
            paths = [p for p in inside if p.is_file() and p.suffix.lower() == ".csv"]
            if not paths:
                others = f"; it holds {listed(p.name for p in inside)}" if inside else ""
                raise OptionError(
                    f"{self.name}: there is no .csv file in {self.path}{others}. Put one CSV file "
                    f"per client there."
                )
        else:
            raise OptionError(f"{self.name}: there is no folder or file {self.path}.")
        if self.client_column is None and len(paths) == 1:
            raise OptionError(
                f"{self.name}: {paths[0].name} is the only file. Name the column that tells "
                f"clients apart with client_column=COLUMN, or give one file per client."
            )
        if self.client_column is not None and len(paths) > 1:
            raise OptionError(
                f"{self.name}: client_column = '{self.client_column}' is for one file, and "
                f"{self.path} holds {len(paths)}; leave it out (a client is a file), or give the "
                f"path of one."
            )
        return location, paths

    def _check_columns(self, records: Records) -> None:
        columns = records.columns
        if not self.target:
            raise OptionError(
                f"{self.name}: say which column is to be predicted with target=COLUMN. "
                f"Columns: {', '.join(columns)}."
            )
        named = {
            "target": [self.target],
            "client_column": [self.client_column or ""],
            "test_column": [self.test_column or ""],
            "categorical": self.categorical,
        }
        for option, wanted in named.items():
            for column in wanted:
                if column and column not in columns:
                    raise OptionError(
                        f"{self.name}: {option} = '{column}' is no column of "
                        f"{records.files[0]}.{did_you_mean(column, columns)}"
                    )
        for column in self.drop:
            if column not in records.dropped:
                raise OptionError(
                    f"{self.name}: drop = '{column}' is no column of any file."
                    + did_you_mean(column, columns)
                )

    def _clients(self, records: Records, paths: list[Path]) -> tuple[list[str], NDArray[np.int64]]:
        """Names, sorted, and for each record the number of its client ``[n]``."""
        if self.client_column is None:
            stems = [path.stem for path in paths]
            twice = [stem for stem in stems if stems.count(stem) > 1]
            if twice:
                raise ValueError(f"two files are called '{twice[0]}': a client needs its own name.")
            names = sorted(stems)
            return names, np.array([names.index(s) for s in stems])[records.file]
        cells = records.columns[self.client_column]
        absent = np.flatnonzero(is_missing(cells))
        if len(absent):
            raise ValueError(
                f"{records.where(absent[0])}: no value in the client column "
                f"'{self.client_column}'; fill it in or delete the row."
            )
        found, codes = np.unique(cells.astype(str), return_inverse=True)
        return found.tolist(), codes.astype(np.int64)

    def _train(
        self,
        seed: int,
        records: Records,
        names: list[str],
        clients: NDArray[np.int64],
        target: Target,
    ) -> tuple[NDArray[np.bool_], dict[str, Parts]]:
        """Which records are for training ``[n]``, and how each client was split."""
        train = np.zeros(len(records), dtype=bool)
        parts = {}
        marked = None if self.test_column is None else self._marked(records, self.test_column)
        for k, name in enumerate(names):
            own = np.flatnonzero(clients == k)
            if marked is None:
                rng = generator(seed, "split", client=name)
                part = split_records(target.labels[own], self.test_size, rng)
            else:
                test = marked[own]
                part = Parts(np.flatnonzero(~test), np.flatnonzero(test), stratified=True)
                if not len(part.train):
                    raise ValueError(
                        f"client '{name}' has no training records: '{self.test_column}' marks all "
                        f"{len(own)} as test records."
                    )
            train[own[part.train]] = True
            parts[name] = part
        return train, parts

    @staticmethod
    def _marked(records: Records, column: str) -> NDArray[np.bool_]:
        """Which records a test column marks as test records ``[n]``."""
        cells = canonical(records.columns[column])
        marks = [TEST_WORDS.get(text.lower()) for text in cells]
        for record, mark in enumerate(marks):
            if mark is None:
                raise ValueError(
                    f"{records.where(record)}: '{cells[record]}' in the test column '{column}' is "
                    f"none of 1, true, test (a test record) and 0, false, train."
                )
        return np.array(marks, dtype=bool)


def folder_dataset(path: Path) -> type[Folder]:
    """The dataset of one folder: a :class:`Folder` with this path, named like the folder.

    ``fedtopo train --dataset NAME`` uses it for ``./datasets/NAME/``.
    """
    # In the class body the name path would be the field's.
    default = path

    class WorkspaceFolder(Folder):
        path: Path | None = Field(default, description="folder with one CSV file per client")

    WorkspaceFolder.name = _own_name(path)
    WorkspaceFolder.__doc__ = f"Your federation in {path}.\n\n{Folder.__doc__}"
    return WorkspaceFolder


def _own_name(location: Path) -> str:
    """What a federation in this folder or file is called."""
    return location.stem if location.is_file() else location.resolve().name


def _feature_names(known: _Understood) -> tuple[str, ...]:
    return tuple(name for column in known.columns for name in column.feature_names)


def _category_notes(column: Categorical) -> Iterator[str]:
    if column.unseen:
        yield (
            f"column '{column.name}': categories that no training record has count as none: "
            f"{listed(column.unseen)}."
        )
    spellings: dict[str, list[str]] = {}
    for category in column.categories:
        spellings.setdefault(category.casefold(), []).append(category)
    for same in spellings.values():
        if len(same) > 1:
            yield f"column '{column.name}': categories differ in capitals only: {listed(same)}."
