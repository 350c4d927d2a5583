"""A run's folder: results.csv, results.json, config.json and models.pt, each written atomically.

A run is written to a hidden folder of its own and gets its name when it has something to show, so
nothing under that name changes before, and two runs never share a folder.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .evaluation import POOLED, Row, client_mean
from .options import OptionError

if TYPE_CHECKING:
    from .trainer import Result

__all__ = [
    "RunFolder",
    "RunFolderError",
    "comparison_folder",
    "diagnosis_files",
    "diagnosis_folder",
    "save",
    "summary",
    "write_atomically",
    "write_json",
]

FILES = ("config.json", "results.csv", "results.json", "models.pt")
LONGEST_NAME = 100
#: What makes a folder a diagnosis.
DIAGNOSIS = "diagnosis.json"


class RunFolderError(OSError):
    """The run folder can't be made or written."""


class RunFolder:
    """``runs/<name>/`` of one run.

    Args:
        parent: the folder of all runs, made if missing.
        name: of this run: letters, digits, ``.``, ``_`` and ``-``, at most 100.
        overwrite: replace a run of the same name, once this one has finished.

    Attributes:
        path: where the run is now: hidden until :meth:`publish`.

    Raises:
        OptionError: the name can't be a folder's, or it is taken.
    """

    def __init__(self, parent: Path, name: str, *, overwrite: bool = False) -> None:
        _check_name(name)
        self.target = parent / name
        self.path = self.target
        self._overwrite = overwrite
        if os.path.lexists(self.target):
            problem = _no_run(self.target)
            if problem:
                raise OptionError(f"{self.target} {problem}; choose another --name.")
            if not overwrite:
                raise OptionError(
                    f"{self.target} exists: give --overwrite to replace it, or another --name."
                )

    def open(self, config: dict[str, Any]) -> None:
        """Make the hidden folder and write config.json into it.

        Raises:
            RunFolderError: it can't be made or written.
        """
        parent = self.target.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f".{self.target.name}.", dir=parent))
            os.chmod(self.path, 0o777 & ~_umask())
        except OSError as error:
            raise RunFolderError(
                f"can't write a run folder in {parent}: {error.strerror or error}. "
                f"Choose another folder with --runs-dir."
            ) from error
        self._put("config.json", lambda path: write_json(path, config))

    def write(self, main: Result, references: Sequence[Result] = ()) -> None:
        """Write the results and the personalised models of ``main``, as far as they go.

        Raises:
            RunFolderError: a file can't be written; the others are written all the same.
        """
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(("algorithm", *Row._fields))
        for result in (main, *references):
            for row in result.history.rows():
                writer.writerow((result.algorithm.name, *row))
        models = io.BytesIO()
        torch.save(main.state_dicts(), models)
        failures = []
        for name, content in (
            ("results.csv", table.getvalue().encode()),
            ("models.pt", models.getvalue()),
        ):
            try:
                self._put(name, lambda path, content=content: write_atomically(path, content))
            except RunFolderError as error:
                failures.append(error)
        told = {**summary(main), "references": [summary(result) for result in references]}
        self._put("results.json", lambda path: write_json(path, told))
        if failures:
            raise failures[0]

    def _put(self, name: str, write: Any) -> None:
        try:
            write(self.path / name)
        except OSError as error:
            raise RunFolderError(
                f"can't write {self.path / name}: {error.strerror or error}."
            ) from error

    def publish(self, *, finished: bool = True) -> Path:
        """Give the run its name, and return where it is.

        A finished run replaces the one it was told to overwrite. An unfinished one, or one whose
        name was taken meanwhile, gets a name of its own beside it.
        """
        aside: Path | None = None
        if os.path.lexists(self.target):
            if finished and self._overwrite and not _no_run(self.target):
                aside = Path(tempfile.mkdtemp(prefix=".replaced.", dir=self.target.parent))
                self.target.rename(aside / self.target.name)
            else:
                self.target = _free(self.target, "" if finished else ".unfinished")
        self.path.rename(self.target)
        self.path = self.target
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        return self.path

    def discard(self) -> None:
        """Nothing came of the run: remove its hidden folder."""
        if self.path != self.target:
            shutil.rmtree(self.path, ignore_errors=True)


def _check_name(name: str) -> None:
    allowed = name.replace(".", "").replace("_", "").replace("-", "")
    if not allowed.isalnum() or name.startswith(".") or len(name) > LONGEST_NAME:
        raise OptionError(
            f"'{name[:LONGEST_NAME]}' can't name a run: use up to {LONGEST_NAME} letters, "
            f"digits, '.', '_' and '-', not starting with a dot."
        )


def _no_run(path: Path) -> str:
    """Why a path is not a run that may be replaced; empty if it is one."""
    if path.is_symlink():
        return "is a symbolic link"
    if not path.is_dir():
        return "is a file"
    try:
        config = json.loads((path / "config.json").read_text())
        methods = {config["algorithm"]["name"], *config["references"]}
        known = "fedtopo-torch" in config["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        return "holds something that is not a run (no config.json of one)"
    foreign = [p.name for p in path.iterdir() if p.name not in FILES and p.name not in methods]
    return f"holds more than a run ({sorted(foreign)[0]})" if foreign else ""


def _free(path: Path, suffix: str) -> Path:
    """A name beside ``path`` that nobody has."""
    names = [f"{path.name}{suffix}"] if suffix else []
    for number in range(2, 10_000):
        candidate = path.with_name(names.pop() if names else f"{path.name}{suffix}-{number}")
        if not os.path.lexists(candidate):
            return candidate
    raise RunFolderError(f"there are too many runs called {path.name}; remove some.")


def save(result: Result, path: str | Path, references: Sequence[Result] = ()) -> Path:
    """Write a run made from Python as ``fedtopo train`` does: ``save(result, "runs/mine")``.

    Returns:
        The folder.

    Raises:
        OptionError: the folder exists.
        RunFolderError: it can't be written.
    """
    from . import __version__

    path = Path(path)
    folder = RunFolder(path.parent, path.name)
    folder.open(
        {
            "algorithm": {
                "name": result.algorithm.name,
                **result.algorithm.model_dump(mode="json"),
            },
            "dataset": result.federation.source or {"name": result.federation.name},
            "eta": result.facts.eta,
            "local_steps": result.facts.local_steps,
            "l2": result.facts.l2,
            "seed": result.facts.seed,
            "references": [r.algorithm.name for r in references],
            **inputs(result.federation),
            "versions": {"fedtopo-torch": __version__, "torch": torch.__version__},
        }
    )
    try:
        folder.write(result, references)
        return folder.publish()
    except BaseException:
        folder.discard()
        raise


def inputs(federation: Any) -> dict[str, Any]:
    """What a model's inputs are: features, and what they were standardised by."""
    moments = federation.moments if federation.standardized else None
    return {
        "clients": list(federation.names),
        "features": list(federation.feature_names),
        "feature_mean": None if moments is None else moments.mean.tolist(),
        "feature_scale": None if moments is None else moments.scale().tolist(),
    }


def summary(result: Result) -> dict[str, Any]:
    """The headline of a run as plain values: last round, pooled, per client, what was sent."""
    history = result.history
    scores: dict[str, Any] = {}
    for split, metric in history.keys() if history.rounds else ():
        score = history.last(split, metric)
        mean, defined = client_mean(score.clients, history.honest)
        scores.setdefault(split, {})[metric] = {
            POOLED.strip("()"): score.pooled,
            "mean_of_clients": mean,
            "clients_defined": defined,
            "clients": dict(zip(history.names, score.clients.tolist(), strict=True)),
        }
    sent = result.communication
    return {
        "algorithm": result.algorithm.name,
        "options": result.algorithm.model_dump(mode="json"),
        "rounds": result.rounds,
        "interrupted": result.interrupted,
        "eta": result.facts.eta,
        "unseen_clients": result.unseen,
        "buffers": buffers(result),
        "scores": scores,
        "sent_per_client": {
            "handshake": sent.handshake,
            "introduction": sent.introduction,
            "round": sent.round,
            "contents": sent.contents,
        },
        "report": result.report,
    }


def buffers(result: Result) -> dict[str, Any]:
    """The model's buffers: how clients merge them, float numbers and whole-number counters."""
    objective = result.objective
    return {
        "policy": result.facts.training.buffers,
        "floats": objective.width - objective.p,
        "counters": objective.counters().numel(),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Strict JSON (NaN becomes null, arrays become lists), atomically."""
    text = json.dumps(_plain(content), indent=2, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)


def write_atomically(path: Path, content: bytes) -> None:
    """All of it or nothing: a temporary file in the same folder, then one rename."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def comparison_folder(parent: Path, name: str) -> Path:
    """The folder of a comparison, made if missing; one that exists is gone on with.

    Raises:
        OptionError: the name can't be a folder's, or it is taken by something else.
        RunFolderError: it can't be made.
    """
    path = parent / name
    _check_name(name)
    if os.path.lexists(path) and not (path / "parts").is_dir():
        raise OptionError(f"{path} is not a comparison (no parts/ in it); choose another --name.")
    try:
        (path / "parts").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"can't make {path}: {error.strerror or error}. Choose another folder with --runs-dir."
        ) from error
    return path


def diagnosis_folder(parent: Path, name: str) -> Path:
    """The folder of a diagnosis, not made yet; an earlier diagnosis may be replaced.

    Raises:
        OptionError: the name can't be a folder's, or it is taken by something else.
        RunFolderError: it can't be made.
    """
    path = parent / name
    _check_name(name)
    if os.path.lexists(path) and (path.is_symlink() or diagnosis_files(path) is None):
        raise OptionError(
            f"{path} is not a diagnosis (no {DIAGNOSIS} of one); choose another --name."
        )
    # Told before the work, not after it.
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise RunFolderError(f"can't write in {there}. Choose another folder with --runs-dir.")
    return path


def diagnosis_files(path: Path) -> list[str] | None:
    """Names of the files of a diagnosis; None where the folder holds none."""
    try:
        told = json.loads((path / DIAGNOSIS).read_text())
        files = [str(name) for name in told["files"]] if "fedtopo-torch" in told else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Only plain names: a changed file must not lead out of the folder.
    return None if files is None else [name for name in files if Path(name).name == name]
