"""Checkpoints: all that a run needs to go on, to the same bits as if it had never stopped.

A checkpoint is one file, written atomically, with a checksum. It holds the server's and the
clients' state (of any method: they are plain dicts), the history, and the states of torch's and
NumPy's own generators, which a method of one's own may use; the package's own draws are keyed by
round and need none. It also holds the configuration, and goes on with no other.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .evaluation import History
from .options import FedtopoError, OptionError
from .runs import write_atomically

if TYPE_CHECKING:
    from .engines import InProcess
    from .trainer import Result, Trainer

__all__ = ["CheckpointError", "find", "fingerprint", "restore", "save"]

MAGIC = b"fedtopo-torch checkpoint 1\n"
#: Settings that may change: more rounds can be asked for where the step size does not depend on T.
LATER = "training.rounds"


class CheckpointError(ValueError, FedtopoError):
    """A checkpoint that is damaged."""


def fingerprint(trainer: Trainer) -> dict[str, Any]:
    """Everything the bits of a run depend on, as plain values by name."""
    from . import __version__

    algorithm, objective = trainer.algorithm, trainer.objective
    found = {
        "algorithm": algorithm.name or type(algorithm).__name__,
        "model": repr(trainer.module),
        "model's source": _sources(trainer.module),
        "model's parameters": [objective.p, objective.width],
        "model's initialisation": objective.digest(),
        "computed by": type(objective).__name__,
        "federation": trainer.federation.digest(),
        "seed": trainer.seed,
        "splits": list(trainer.evaluator.n),
        "metrics": list(trainer.evaluator.metrics),
        "version of fedtopo-torch": __version__,
        "version of torch": torch.__version__,
    }
    found |= {f"algorithm.{k}": v for k, v in algorithm.model_dump(mode="json").items()}
    found |= {f"training.{k}": v for k, v in trainer.training.model_dump(mode="json").items()}
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def _sources(module: torch.nn.Module) -> str:
    """Hash of the files of a module's classes that are not torch's; a class may have none."""
    files = set()
    for own in {type(each) for each in module.modules()}:
        if own.__module__.partition(".")[0] not in ("torch", "fedtopo_torch"):
            with contextlib.suppress(OSError, TypeError):
                files.add(Path(inspect.getfile(own)).read_bytes())
    return hashlib.sha256(b"".join(sorted(files))).hexdigest()


def save(
    path: Path,
    configuration: dict[str, Any],
    result: Result,
    engine: InProcess,
    counters: Tensor,
) -> None:
    """Write the state after a finished round.

    Args:
        path: of the file; its folder is made if missing.
        configuration: :func:`fingerprint` of the run, taken once: it reads every record.
        result, engine: of the run.
        counters: the server's.

    Raises:
        OSError: the file can't be written.
    """
    sent = result.communication
    content = {
        "fingerprint": configuration,
        "rounds": result.rounds,
        "server": result.server,
        "scored": result.scored,
        "theta": result.theta,
        "theta's counters": result.counters,
        "client": {name: value.cpu() for name, value in engine.client.items()},
        "seen": engine.seen,
        "buffers": engine.buffers,
        "client counters": engine.counters,
        "counters": counters,
        "history": result.history.state(),
        "communication": [sent.handshake, sent.introduction, sent.round, sent.contents],
        "generators": {
            "torch": torch.get_rng_state(),
            "numpy": _plain_state(np.random.get_state()),
            "python": _listed(random.getstate()),
        },
    }
    stream = io.BytesIO()
    torch.save(content, stream)
    payload = stream.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(payload).hexdigest().encode()
    write_atomically(path, MAGIC + digest + b"\n" + payload)


def find(path: Path, expected: dict[str, Any], *, resume: bool) -> dict[str, Any] | None:
    """The content of a checkpoint of this configuration; None where there is no file.

    Raises:
        CheckpointError: the file is damaged, or no checkpoint.
        OptionError: it is of another configuration, or there and nobody asked to go on.
    """
    if not path.exists():
        return None
    if not resume:
        raise OptionError(
            f"{path} holds an earlier run: resume it, delete the file, or name another."
        )
    try:
        whole = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror or error}.") from None
    if not whole.startswith(MAGIC):
        raise CheckpointError(f"{path} is not a checkpoint of this version of fedtopo-torch.")
    digest, _, payload = whole[len(MAGIC) :].partition(b"\n")
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        raise CheckpointError(
            f"{path} is damaged: its content does not fit its checksum. Delete it to start again."
        )
    content: dict[str, Any] = torch.load(io.BytesIO(payload), weights_only=True)
    _compare(path, content["fingerprint"], expected, content["rounds"])
    return content


def _compare(path: Path, had: dict[str, Any], have: dict[str, Any], done: int) -> None:
    differing = [name for name in {**had, **have} if had.get(name) != have.get(name)]
    if (
        LATER in differing
        and have.get(LATER, 0) >= done
        and have.get("training.schedule") != "cosine"
    ):
        differing.remove(LATER)
    if differing:
        shown = "; ".join(
            f"{name} was {_short(had.get(name))}, is {_short(have.get(name))}"
            for name in differing[:4]
        )
        more = f"; and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise OptionError(
            f"{path} is of another configuration: {shown}{more}. Use the same settings, or delete "
            f"the file to start again."
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def restore(content: dict[str, Any], result: Result, engine: InProcess) -> Tensor:
    """Put a run where the checkpoint was, and return the server's counters."""
    result.rounds = content["rounds"]
    result.server, result.scored = content["server"], content["scored"]
    result.theta, result.counters = content["theta"], content["theta's counters"]
    device = engine.objective.device
    engine.client = {name: value.to(device) for name, value in content["client"].items()}
    engine.seen, engine.buffers = content["seen"], content["buffers"]
    engine.counters = content["client counters"]
    result.history = History.of(content["history"], result.history)
    sent = result.communication
    sent.handshake, sent.introduction, sent.round, sent.contents = content["communication"]
    generators = content["generators"]
    torch.set_rng_state(generators["torch"])
    name, keys, *rest = generators["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(_tupled(generators["python"]))
    counters: Tensor = content["counters"]
    return counters


def _plain_state(state: Any) -> list[Any]:
    name, keys, *rest = state
    return [name, torch.from_numpy(keys.astype(np.int64)), *rest]


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, list) else value
