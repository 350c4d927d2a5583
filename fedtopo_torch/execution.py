"""Runs the jobs of a plan, here or in worker processes, and keeps what is finished.

Jobs are independent and are dealt to the workers one by one. Every job runs on one thread, in a
fresh interpreter or in this one, so its result is the same to the bit wherever it ran.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from .evaluation import METRICS_OF, Evaluator
from .federation import Federation
from .models.logistic import default_model
from .options import OptionError
from .plan import Job
from .runs import RunFolderError, write_atomically
from .trainer import Communication, Diverged, Trainer

__all__ = ["Run", "failed", "in_processes", "in_this_process", "serve", "write"]


@dataclass(frozen=True)
class Run:
    """What is kept of one run.

    Attributes:
        dataset, method: labels.
        seed: of the run.
        clients: names ``[K]``; honest: whether each is scored in pooled values.
        n: records of each client ``[K]`` by split (train, test).
        pooled: by ``"split metric"`` (``"test log_loss"``), last round.
        per_client: likewise ``[K]``; NaN where undefined.
        curve_rounds, curve: rounds and pooled test log-loss of the training curve.
        communication: numbers sent per client.
        parameters: p, of the model.
        eta: step size used.
        clusters: cluster of each client at the end, or None.
        warnings: what the run warned of, each once.
        seconds: of wall time; loading the data is not in it.
        error: why the run failed; then everything measured is empty.
        stored: read from the folder instead of run.
    """

    dataset: str
    method: str
    seed: int
    clients: tuple[str, ...] = ()
    honest: tuple[bool, ...] = ()
    n: dict[str, tuple[int, ...]] = field(default_factory=dict)
    pooled: dict[str, float] = field(default_factory=dict)
    per_client: dict[str, tuple[float, ...]] = field(default_factory=dict)
    curve_rounds: tuple[int, ...] = ()
    curve: tuple[float, ...] = ()
    communication: Communication = field(default_factory=Communication)
    parameters: int = 0
    eta: float = math.nan
    clusters: tuple[int, ...] | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    error: str | None = None
    stored: bool = field(default=False, compare=False)

    def scored(self, split: str = "test", metric: str = "log_loss") -> NDArray[np.float64]:
        """Per-client values ``[K]``, NaN for clients that are not honest."""
        values = np.array(self.per_client[f"{split} {metric}"], dtype=np.float64)
        values[~np.array(self.honest, dtype=bool)] = math.nan
        return values

    def to_json(self) -> dict[str, Any]:
        """All but labels, as JSON can hold it (NaN is null)."""
        sent = self.communication
        return {
            "clients": list(self.clients),
            "honest": list(self.honest),
            "n": {split: list(n) for split, n in self.n.items()},
            "pooled": {key: _null(value) for key, value in self.pooled.items()},
            "per_client": {
                key: [_null(v) for v in values] for key, values in self.per_client.items()
            },
            "curve_rounds": list(self.curve_rounds),
            "curve": list(self.curve),
            "communication": {
                "handshake": sent.handshake,
                "introduction": sent.introduction,
                "round": sent.round,
                "contents": sent.contents,
            },
            "parameters": self.parameters,
            "eta": self.eta,
            "clusters": None if self.clusters is None else list(self.clusters),
            "warnings": list(self.warnings),
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, job: Job, content: dict[str, Any]) -> Run:
        """The run again, under the labels of ``job``.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the content is not a run's.
        """
        sent = content["communication"]
        counts = {
            stage: {direction: (int(c[0]), int(c[1])) for direction, c in sent[stage].items()}
            for stage in ("handshake", "introduction", "round")
        }
        clusters = content["clusters"]
        return cls(
            job.dataset.label,
            job.method.label,
            job.seed,
            tuple(map(str, content["clients"])),
            tuple(map(bool, content["honest"])),
            {split: tuple(map(int, n)) for split, n in content["n"].items()},
            {key: _nan(value) for key, value in content["pooled"].items()},
            {key: tuple(map(_nan, values)) for key, values in content["per_client"].items()},
            tuple(map(int, content["curve_rounds"])),
            tuple(map(float, content["curve"])),
            Communication(**counts, contents=sent["contents"]),
            int(content["parameters"]),
            float(content["eta"]),
            None if clusters is None else tuple(map(int, clusters)),
            tuple(map(str, content["warnings"])),
            float(content["seconds"]),
            stored=True,
        )


def _null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


class _Loaded(NamedTuple):
    federation: Federation
    digest: str
    warnings: tuple[str, ...]


class _Loader:
    """The federation in hand, so that the methods of one seed load it once.

    A federation that can't be loaded is not tried again for every method either.
    """

    def __init__(self, digests: bool) -> None:
        self.digests = digests
        self._have: tuple[str, int] | None = None
        self._loaded: _Loaded | Exception | None = None

    def __call__(self, job: Job) -> _Loaded:
        wanted = job.dataset.label, job.seed
        if self._have != wanted:
            # The old one goes before the new one comes: there is never room needed for two.
            self._have, self._loaded = None, None
            self._loaded = self._load(job)
            self._have = wanted
        if isinstance(self._loaded, Exception):
            raise self._loaded
        assert self._loaded is not None
        return self._loaded

    def _load(self, job: Job) -> _Loaded | Exception:
        with _warnings_kept() as caught:
            try:
                federation = job.dataset.instance.load(job.seed)
                digest = federation.digest() if self.digests else ""
            except Exception as error:
                return error
        return _Loaded(federation, digest, tuple(caught))


@contextlib.contextmanager
def _warnings_kept() -> Iterator[dict[str, None]]:
    """Texts of the warnings meant for users, each once, in the order they came."""
    texts: dict[str, None] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        try:
            yield texts
        finally:
            texts.update(dict.fromkeys(str(item.message) for item in caught))


def _perform(job: Job, loader: _Loader, folder: Path | None) -> tuple[Run, str | None]:
    """One run and the key it is stored under; any failure becomes a run that says why."""
    key = None
    try:
        loaded = loader(job)
        if folder is not None:
            key = job.key(loaded.digest)
            stored = _read(folder, key, job)
            if stored is not None:
                return stored, None
        with _warnings_kept() as caught:
            run = _train(job, loaded.federation)
        texts = tuple(dict.fromkeys((*loaded.warnings, *caught)))
        return replace(run, warnings=texts), key
    except Exception as error:
        return failed(job, _explain(error)), None


def _train(job: Job, federation: Federation) -> Run:
    begun = time.perf_counter()
    network = job.model.instance if job.model else default_model(federation.task)
    training = job.training
    trainer = Trainer(
        job.method.instance,
        federation,
        network,
        seed=job.seed,
        # The curve is all that is needed on the way; the other scores follow at the end, once.
        splits=("test",),
        metrics=METRICS_OF[federation.task][:1],
        **(training.model_dump() | {"eval_every": training.every}),
    )
    result = trainer.run()
    if result.interrupted:
        raise KeyboardInterrupt
    evaluator = Evaluator(federation, result.objective, ("train", "test"))
    with torch.no_grad():
        scores = evaluator(result.theta)
    labels = result.algorithm.clusters(result.server)
    return Run(
        job.dataset.label,
        job.method.label,
        job.seed,
        federation.names,
        tuple(federation.honest.tolist()),
        {split: tuple(n.tolist()) for split, n in evaluator.n.items()},
        {f"{split} {metric}": score.pooled for (split, metric), score in scores.items()},
        {
            f"{split} {metric}": tuple(score.clients.tolist())
            for (split, metric), score in scores.items()
        },
        tuple(result.history.rounds),
        tuple(result.history.pooled("test", METRICS_OF[federation.task][0]).tolist()),
        result.communication,
        result.theta.shape[1],
        result.facts.eta,
        None if labels is None else tuple(labels.tolist()),
        seconds=time.perf_counter() - begun,
    )


def failed(job: Job, error: str) -> Run:
    return Run(job.dataset.label, job.method.label, job.seed, error=error)


def _explain(error: Exception) -> str:
    text = str(error)
    # These name what is wrong in a sentence; of others the kind of error says half of it.
    if text and isinstance(error, OptionError | Diverged | ValueError | OSError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Torch, BLAS and OpenMP with one thread: the same sums in the same order everywhere."""
    before = torch.get_num_threads()
    with threadpool_limits(1):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


# ---- where results are kept ---------------------------------------------------------------------


def _place(folder: Path, key: str) -> Path:
    return folder / f"{key[:40]}.json"


def _read(folder: Path, key: str, job: Job) -> Run | None:
    """A stored run; None where there is none, or a file that is cut off or not ours."""
    try:
        content = json.loads(_place(folder, key).read_text(encoding="utf-8"))
        return Run.from_json(job, content["run"]) if content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None


def write(folder: Path, key: str, job: Job, run: Run) -> None:
    content = {"key": key, "job": str(job), "run": run.to_json()}
    try:
        write_atomically(_place(folder, key), json.dumps(content, allow_nan=False).encode())
    except OSError as error:
        raise RunFolderError(
            f"can't keep results in {folder}: {error.strerror or error}."
        ) from None


# ---- worker processes ---------------------------------------------------------------------------


class _Deal:
    """Deals jobs so that each worker keeps to one federation and seed as long as it can."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._groups: dict[tuple[str, int], deque[Job]] = {}
        for job in jobs:
            self._groups.setdefault((job.dataset.label, job.seed), deque()).append(job)
        self._untouched = deque(self._groups)
        self._lock = threading.Lock()

    def next(self, last: Job | None) -> Job | None:
        """The next job for the worker whose last one this was; None when nothing is left."""
        with self._lock:
            group = (last.dataset.label, last.seed) if last else None
            if group is None or not self._groups[group]:
                if self._untouched:
                    group = self._untouched.popleft()
                else:
                    # Help the group with most left: the data are loaded twice, nobody waits.
                    group = max(self._groups, key=lambda g: len(self._groups[g]))
            jobs = self._groups[group]
            return jobs.popleft() if jobs else None


_READY = "ready"


def serve(folder: str | None) -> None:
    """The main program of a worker process: jobs come on stdin, outcomes go out on stdout."""
    inbox, outbox = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What a method prints must not mix with what is sent.
    os.dup2(2, 1)
    where = Path(folder) if folder is not None else None
    loader = _Loader(digests=where is not None)
    with _one_thread(), contextlib.suppress(BrokenPipeError):
        _send(outbox, _READY)
        while True:
            try:
                payload = pickle.load(inbox)
            except EOFError:
                return
            try:
                outcome: Any = _perform(pickle.loads(payload), loader, where)
            except Exception as error:
                outcome = _explain(error)
            _send(outbox, outcome)


def _send(stream: Any, content: Any) -> None:
    pickle.dump(content, stream)
    stream.flush()


class _Worker:
    """A fresh interpreter that runs jobs, and the pipes to it.

    Not :mod:`multiprocessing`: that imports the user's script once more in every worker, which
    fails for a script without an ``if __name__ == "__main__"`` and for one read from stdin.
    """

    def __init__(self, folder: Path | None) -> None:
        code = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
            f"sys.path[:] = {[str(p) for p in sys.path]!r}; "
            f"from {__name__} import serve; serve({str(folder) if folder else None!r})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def wait_until_ready(self) -> None:
        """
        Raises:
            RuntimeError: the process ended before it could take a job.
        """
        try:
            pickle.load(self.process.stdout)  # type: ignore[arg-type]
        except (EOFError, pickle.UnpicklingError):
            raise RuntimeError(
                f"a worker process could not start ({self.ending()}); its message is above. "
                f"processes=1 does without."
            ) from None

    def perform(self, job: Job) -> Any:
        """
        Raises:
            EOFError, OSError, pickle.UnpicklingError: the process ended meanwhile.
        """
        _send(self.process.stdin, pickle.dumps(job))
        return pickle.load(self.process.stdout)  # type: ignore[arg-type]

    def ending(self) -> str:
        """How the process ended."""
        code = self.process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"ended by signal {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def stop(self) -> None:
        """End the process, whatever it is doing: what it computed is kept by its parent."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the process and close the pipes; nobody may be reading from them."""
        self.stop()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


def in_processes(
    jobs: Sequence[Job],
    count: int,
    folder: Path | None,
    keep: Callable[[Job, Any], None],
    tell: Callable[[Job], None],
) -> None:
    """Run jobs in worker processes; ``keep`` and ``tell`` are called here, as each ends."""
    deal = _Deal(jobs)
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    workers: dict[int, _Worker] = {}
    stopping = threading.Event()

    def attend(number: int) -> None:
        """One thread a worker: hands it a job, waits, hands on what comes back."""
        try:
            worker, job = workers[number], None
            worker.wait_until_ready()
            while not stopping.is_set() and (job := deal.next(job)) is not None:
                try:
                    outcome = worker.perform(job)
                except (EOFError, OSError, pickle.UnpicklingError):
                    if stopping.is_set():
                        return
                    outcome = (
                        f"its worker process {worker.ending()}. Where memory ran out, fewer "
                        f"processes at a time may help."
                    )
                    worker.close()
                    worker = workers[number] = _Worker(folder)
                    worker.wait_until_ready()
                outcomes.put((job, outcome))
        except BaseException as error:
            if not stopping.is_set():
                outcomes.put(error)

    threads = [threading.Thread(target=attend, args=(i,), daemon=True) for i in range(count)]
    try:
        for number in range(count):
            workers[number] = _Worker(folder)
        for thread in threads:
            thread.start()
        for _ in jobs:
            outcome = outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            keep(*outcome)
            tell(outcome[0])
    finally:
        stopping.set()
        for worker in list(workers.values()):
            worker.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        for worker in workers.values():
            worker.close()
        # Runs that ended while an interrupt came are kept too.
        with contextlib.suppress(queue.Empty):
            while True:
                outcome = outcomes.get_nowait()
                if not isinstance(outcome, BaseException):
                    keep(*outcome)


def in_this_process(
    jobs: Sequence[Job],
    folder: Path | None,
    keep: Callable[[Job, Any], None],
    tell: Callable[[Job], None],
) -> None:
    loader = _Loader(digests=folder is not None)
    with _one_thread():
        for job in jobs:
            keep(job, _perform(job, loader, folder))
            tell(job)
