"""Runs trainings and measurements, here or in worker processes, and keeps what is finished.

They are independent and are dealt to the workers one by one. Every one runs on one thread, in a
fresh interpreter or in this one, so its result is the same to the bit wherever it ran. What is
asked for several times, under whatever labels, runs once.
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
from numbers import Integral
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
from .plan import Choice, Job, Measurement, Task
from .runs import RunFolderError, write_atomically
from .trainer import Communication, Diverged, Trainer

__all__ = ["Execution", "Measured", "Progress", "Run", "execute", "serve"]

#: Called with (done, in all, what just ended), all that is asked for counted once.
Progress = Callable[[int, int, str], None]


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
        groups: true group of each client, or None where the federation has none.
        task: of the federation: binary, multiclass or regression.
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
    groups: tuple[int, ...] | None = None
    task: str = "binary"
    warnings: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    error: str | None = None
    stored: bool = field(default=False, compare=False)

    @classmethod
    def failed(cls, job: Job, error: str) -> Run:
        """A run that came to nothing, and why."""
        return cls(job.dataset.label, job.method.label, job.seed, error=error)

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
            "groups": None if self.groups is None else list(self.groups),
            "task": self.task,
            "warnings": list(self.warnings),
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, job: Job, content: dict[str, Any]) -> Run:
        """The run again, under the labels of ``job``.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the content is not a run's.
        """
        if not {"test log_loss", "test rmse"} & set(content["pooled"]):
            raise KeyError("no loss of test records")
        if set(content["per_client"]) != set(content["pooled"]):
            raise KeyError("metrics of clients are not those of the pooled records")
        sent = content["communication"]
        counts = {
            stage: {direction: (int(c[0]), int(c[1])) for direction, c in sent[stage].items()}
            for stage in ("handshake", "introduction", "round")
        }
        clusters, groups = content["clusters"], content["groups"]
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
            None if groups is None else tuple(map(int, groups)),
            str(content["task"]),
            tuple(map(str, content["warnings"])),
            float(content["seconds"]),
            stored=True,
        )


@dataclass(frozen=True)
class Measured:
    """What is kept of one measurement.

    Attributes:
        dataset: label.
        name: of the measurement.
        seed: of the federation.
        values: what was measured, by name.
        warnings, seconds, error, stored: as of a :class:`Run`.
    """

    dataset: str
    name: str
    seed: int
    values: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    error: str | None = None
    stored: bool = field(default=False, compare=False)

    @classmethod
    def failed(cls, job: Measurement, error: str) -> Measured:
        """A measurement that came to nothing, and why."""
        return cls(job.dataset.label, job.name, job.seed, error=error)

    def to_json(self) -> dict[str, Any]:
        """All but names."""
        return {
            "values": self.values,
            "warnings": list(self.warnings),
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, job: Measurement, content: dict[str, Any]) -> Measured:
        """The measurement again, under the names of ``job``.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the content is not a measurement's.
        """
        return cls(
            job.dataset.label,
            job.name,
            job.seed,
            dict(content["values"]),
            tuple(map(str, content["warnings"])),
            float(content["seconds"]),
            stored=True,
        )


#: What a task comes to.
Outcome = Run | Measured


def _kind(task: Task) -> type[Any]:
    return Measured if isinstance(task, Measurement) else Run


def _null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


class _Loaded(NamedTuple):
    federation: Federation
    digest: str
    warnings: tuple[str, ...]


def _data(job: Task) -> tuple[str, int]:
    """What a job is run on, whatever it is called: jobs of one and the same load it once."""
    return json.dumps(job.dataset.described(), sort_keys=True), job.seed


class _Loader:
    """The federation in hand, so that the methods of one seed load it once.

    A federation that can't be loaded is not tried again for every method either.
    """

    def __init__(self, digests: bool) -> None:
        self.digests = digests
        self._have: tuple[str, int] | None = None
        self._loaded: _Loaded | Exception | None = None

    def __call__(self, job: Task) -> _Loaded:
        wanted = _data(job)
        if self._have != wanted:
            # The old one goes before the new one comes: there is never room needed for two.
            self._have, self._loaded = None, None
            self._loaded = self._load(job)
            self._have = wanted
        if isinstance(self._loaded, Exception):
            raise self._loaded
        assert self._loaded is not None
        return self._loaded

    def _load(self, job: Task) -> _Loaded | Exception:
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


def _perform(job: Task, loader: _Loader, folder: Path | None) -> tuple[Outcome, str | None]:
    """One outcome and the key it is stored under; any failure becomes one that says why."""
    key = None
    try:
        loaded = loader(job)
        if folder is not None:
            key = job.key(loaded.digest)
            stored = _read(folder, key, job)
            if stored is not None:
                return stored, None
        with _warnings_kept() as caught:
            outcome: Outcome
            if isinstance(job, Measurement):
                outcome = _measure(job, loaded.federation)
            else:
                outcome = _train(job, loaded.federation)
        texts = tuple(dict.fromkeys((*loaded.warnings, *caught)))
        return replace(outcome, warnings=texts), key
    except Exception as error:
        return _kind(job).failed(job, _explain(error)), None


def _measure(job: Measurement, federation: Federation) -> Measured:
    begun = time.perf_counter()
    values = job.function(federation, job.seed, **job.parameters)
    # As it will be read from the folder: 1.0 stays 1.0, a tuple becomes a list.
    values = json.loads(json.dumps(values, allow_nan=False))
    seconds = time.perf_counter() - begun
    return Measured(job.dataset.label, job.name, job.seed, values, seconds=seconds)


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
    splits = ("train", "test", "validation") if job.validated else ("train", "test")
    evaluator = Evaluator(federation, trainer.objective, splits)
    result = trainer.run()
    if result.interrupted:
        raise KeyboardInterrupt
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
        None if federation.groups is None else tuple(federation.groups.tolist()),
        federation.task,
        seconds=time.perf_counter() - begun,
    )


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


def _read(folder: Path, key: str, job: Task) -> Outcome | None:
    """A stored outcome; None where there is none, or a file that is cut off or not ours."""
    try:
        content = json.loads(_place(folder, key).read_text(encoding="utf-8"))
        if content["key"] != key:
            return None
        outcome: Outcome = _kind(job).from_json(job, content["run"])
        return outcome
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None


def _write(folder: Path, key: str, job: Task, outcome: Outcome) -> None:
    content = {"key": key, "job": str(job), "run": outcome.to_json()}
    try:
        write_atomically(_place(folder, key), json.dumps(content, allow_nan=False).encode())
    except OSError as error:
        raise RunFolderError(
            f"can't keep results in {folder}: {error.strerror or error}."
        ) from None


# ---- worker processes ---------------------------------------------------------------------------


class _Deal:
    """Deals jobs so that each worker keeps to one federation and seed as long as it can."""

    def __init__(self, jobs: Sequence[Task]) -> None:
        self._groups: dict[tuple[str, int], deque[Task]] = {}
        for job in jobs:
            self._groups.setdefault(_data(job), deque()).append(job)
        self._untouched = deque(self._groups)
        self._lock = threading.Lock()

    def next(self, last: Task | None) -> Task | None:
        """The next job for the worker whose last one this was; None when nothing is left."""
        with self._lock:
            group = _data(last) if last else None
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

    def perform(self, job: Task) -> Any:
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


def _in_processes(
    jobs: Sequence[Task],
    count: int,
    folder: Path | None,
    keep: Callable[[Task, Any], None],
    tell: Callable[[Task], None],
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


def _in_this_process(
    jobs: Sequence[Task],
    folder: Path | None,
    keep: Callable[[Task, Any], None],
    tell: Callable[[Task], None],
) -> None:
    loader = _Loader(digests=folder is not None)
    with _one_thread():
        for job in jobs:
            keep(job, _perform(job, loader, folder))
            tell(job)


# ---- all of it ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Execution:
    """What came of tasks.

    Attributes:
        outcomes: of those that ended, by what they compute.
        interrupted: Ctrl-C came before all had.
        seconds: of wall time, starting the processes included.
        processes: how many ran at a time.
    """

    outcomes: dict[str, Outcome]
    interrupted: bool
    seconds: float
    processes: int

    def run(self, job: Job) -> Run | None:
        """The run that was asked for, under the labels of ``job``; None if it did not end."""
        found = self.outcomes.get(job.key(""))
        if not isinstance(found, Run):
            return None
        return replace(found, dataset=job.dataset.label, method=job.method.label)

    def measured(self, task: Measurement) -> Measured | None:
        """Likewise a measurement."""
        found = self.outcomes.get(task.key(""))
        return replace(found, dataset=task.dataset.label) if isinstance(found, Measured) else None


def execute(
    tasks: Sequence[Task],
    *,
    processes: int | None = None,
    folder: str | Path | None = None,
    on_progress: Progress | None = None,
) -> Execution:
    """Run tasks, each thing that is to be computed once.

    Args:
        tasks: trainings and measurements, of one plan or of many.
        processes: how many at a time, at least 1; by default one per core. Results are the same to
            the bit. 1 runs in this process, which a debugger likes.
        folder: keep each finished outcome here, one file each, and take up again what is there.
            Anything that changes a result (a setting, a method's file, the data, the version)
            makes a new one. Failures are not kept.
        on_progress: called in this process as each ends.

    Returns:
        all outcomes; after Ctrl-C those until then, with ``interrupted`` set.

    Raises:
        OptionError: ``processes`` is not valid, or worker processes could not import a method.
        RunFolderError: the folder can't be written.
        RuntimeError: worker processes don't start.
    """
    if processes is not None and (
        not isinstance(processes, Integral) or isinstance(processes, bool) or processes < 1
    ):
        raise OptionError(f"processes is {processes!r}: must be a whole number of at least 1.")
    distinct: dict[str, Task] = {}
    for task in tasks:
        distinct.setdefault(task.key(""), task)
    keys = {id(task): key for key, task in distinct.items()}
    # One federation after the other, so that each is loaded once.
    groups: dict[tuple[str, int], list[Task]] = {}
    for task in distinct.values():
        groups.setdefault(_data(task), []).append(task)
    ordered = [task for group in groups.values() for task in group]
    count = min(processes or _cores(), len(ordered))
    if count > 1:
        for choice in _choices(ordered):
            choice.reference()
    where = Path(folder).resolve() if folder is not None else None
    if where is not None:
        try:
            where.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"can't make {where}: {error.strerror or error}.") from None

    outcomes: dict[str, Outcome] = {}
    begun = time.perf_counter()

    def keep(task: Task, result: tuple[Outcome, str | None] | str) -> None:
        if isinstance(result, tuple):
            outcome, key = result
        else:
            outcome, key = _kind(task).failed(task, result), None
        if where is not None and key is not None:
            _write(where, key, task, outcome)
        outcomes[keys[id(task)]] = outcome

    def tell(task: Task) -> None:
        if on_progress is not None:
            on_progress(len(outcomes), len(ordered), str(task))

    interrupted = False
    try:
        if count > 1 and where is not None and any(where.iterdir()):
            # What is kept needs no processes, and these take seconds to start.
            with _one_thread():
                loader = _Loader(digests=True)
                for task in ordered:
                    found = _kept(task, loader, where)
                    if found is not None:
                        outcomes[keys[id(task)]] = found
                        tell(task)
        left = [task for task in ordered if keys[id(task)] not in outcomes]
        if count > 1 and left:
            _in_processes(left, min(count, len(left)), where, keep, tell)
        elif left:
            _in_this_process(left, where, keep, tell)
    except KeyboardInterrupt:
        interrupted = True
    return Execution(outcomes, interrupted, time.perf_counter() - begun, count)


def _kept(task: Task, loader: _Loader, folder: Path) -> Outcome | None:
    """What the folder has of a task; None also where its data don't load, which its run tells."""
    try:
        return _read(folder, task.key(loader(task).digest), task)
    except Exception:
        return None


def _choices(tasks: Sequence[Task]) -> list[Choice]:
    """Every method, federation and model of the tasks, once."""
    found: dict[int, Choice] = {}
    for task in tasks:
        parts = [task.dataset]
        if isinstance(task, Job):
            parts += [task.method, *([task.model] if task.model else [])]
        found |= {id(choice): choice for choice in parts}
    return list(found.values())


def _cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
