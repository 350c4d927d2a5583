"""A run's folder: results.csv, results.json, config.json and models.pt, each written atomically."""

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
from typing import Any

import torch

from .evaluation import POOLED, Row, client_mean
from .options import OptionError
from .trainer import Result

__all__ = ["RunFolder", "RunFolderError", "summary", "write_atomically"]


class RunFolderError(OSError):
    """The run folder can't be made or written."""


class RunFolder:
    """``runs/<name>/`` of one run.

    Nothing on disk is touched before :meth:`open`. An overwritten run is moved to ``<name>.old``
    and deleted only by :meth:`close`, when the new one has finished.

    Args:
        parent: the folder of all runs, made if missing.
        name: of this run: letters, digits, ``.``, ``_`` and ``-``.
        overwrite: replace a run of the same name.

    Raises:
        OptionError: the name can't be a folder's, or the folder exists or holds something else.
    """

    def __init__(self, parent: Path, name: str, *, overwrite: bool = False) -> None:
        allowed = name.replace(".", "").replace("_", "").replace("-", "")
        if not allowed.isalnum() or name.startswith("."):
            raise OptionError(
                f"'{name}' can't name a run: use letters, digits, '.', '_' and '-', "
                f"not starting with a dot."
            )
        self.path = parent / name
        self.replaced = parent / f"{name}.old"
        self._overwrite = overwrite
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise OptionError(f"{self.path} is a file; choose another --name.")
        if any(self.path.iterdir()) and not (self.path / "config.json").is_file():
            raise OptionError(
                f"{self.path} holds something that is not a run (no config.json); "
                f"choose another --name."
            )
        if not overwrite:
            raise OptionError(
                f"{self.path} exists: give --overwrite to replace that run, or another --name."
            )

    def open(self, config: dict[str, Any]) -> None:
        """Make the folder and write config.json.

        Raises:
            RunFolderError: it can't be made or written.
        """
        try:
            if self.path.exists():
                if self.replaced.exists():
                    shutil.rmtree(self.replaced)
                self.path.rename(self.replaced)
            self.path.mkdir(parents=True)
            write_json(self.path / "config.json", config)
        except OSError as error:
            raise RunFolderError(
                f"can't write the run folder {self.path}: {error.strerror or error}. "
                f"Choose another folder with --runs-dir."
            ) from error

    def write(self, main: Result, references: Sequence[Result] = ()) -> None:
        """Write the results and the personalised models of ``main``."""
        results = [main, *references]
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(("algorithm", *Row._fields))
        for result in results:
            for row in result.history.rows():
                writer.writerow((result.algorithm.name, *row))
        write_atomically(self.path / "results.csv", table.getvalue().encode())
        content = {**summary(main), "references": [summary(r) for r in references]}
        write_json(self.path / "results.json", content)
        if main.history.rounds:
            models = io.BytesIO()
            torch.save(main.state_dicts(), models)
            write_atomically(self.path / "models.pt", models.getvalue())

    def discard(self) -> None:
        """Nothing came of the run: remove its folder and put back what it was to replace."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.replaced.exists() and self._overwrite:
            self.replaced.rename(self.path)

    def close(self) -> None:
        """The run has finished: what it replaced is no longer needed."""
        if self.replaced.exists() and self._overwrite:
            shutil.rmtree(self.replaced)


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
        "scores": scores,
        "sent_per_client": {
            "handshake": sent.handshake,
            "introduction": sent.introduction,
            "round": sent.round,
            "contents": sent.contents,
        },
        "report": result.report,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Strict JSON (NaN becomes null), atomically."""
    text = json.dumps(_finite(content), indent=2, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_atomically(path: Path, content: bytes) -> None:
    """All of it or nothing: a temporary file in the same folder, then one rename."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
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
