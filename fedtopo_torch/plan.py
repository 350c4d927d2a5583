"""What is run: trainings (methods, federations, seeds) and measurements, checked beforehand."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import json
import pickle
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from numbers import Integral
from pathlib import Path
from typing import Any

from . import __version__
from .options import OptionError, Options, did_you_mean
from .registry import Registry, algorithms, datasets, models
from .training import Training

__all__ = [
    "METHODS",
    "Choice",
    "Job",
    "Measurement",
    "Plan",
    "Spec",
    "Specs",
    "Task",
    "Training",
    "seeds_of",
]

#: The rows of the paper's Table 1; what ``"all"`` stands for.
METHODS = (
    "local",
    "fedavg",
    "fedprox",
    "scaffold",
    "pfedme",
    "ifca",
    "ditto",
    "pacfl",
    "ptopofl",
    "oracle",
    "random",
)

#: A method, federation or model: its name, its name and options, or an instance.
Spec = str | tuple[str, Mapping[str, Any]] | Options
#: One of them, several, or several with labels of your own.
Specs = Spec | Sequence[Spec] | Mapping[str, Spec]

#: More seeds than this are taken for a mistake.
MOST_SEEDS = 10_000

_REGISTRIES: dict[str, Registry[Any]] = {
    "algorithm": algorithms,
    "dataset": datasets,
    "model": models,
}


@dataclass(frozen=True)
class Choice:
    """A method, federation or model with its options, and how tables call it.

    Travels to worker processes as a name and options, so that classes of a workspace file, which
    pickle can't import, are found there as they are here: through the registry.

    Attributes:
        kind: ``"algorithm"``, ``"dataset"`` or ``"model"``.
        label: in tables; unique among the methods and among the federations of a plan.
        instance: the configured object.
        name: what it was looked up by, or None for an object that was given.
    """

    kind: str
    label: str
    instance: Any
    name: str | None = None

    @classmethod
    def of(cls, kind: str, spec: Spec, label: str | None = None) -> Choice:
        """Look up and configure.

        Raises:
            OptionError: an unknown name, an unknown option or a value out of range.
        """
        name: str | None = None
        instance: Any = spec
        if not isinstance(spec, Options):
            name, options = (spec, {}) if isinstance(spec, str) else spec
            instance = _REGISTRIES[kind][name](**options)
        return cls(kind, label or _label(kind, instance), instance, name)

    @property
    def options(self) -> dict[str, Any]:
        """The options that were given."""
        return {key: getattr(self.instance, key) for key in sorted(self.instance.model_fields_set)}

    @property
    def key(self) -> str:
        """The name in the registry."""
        return str(self.instance.name)

    @property
    def is_default(self) -> bool:
        """Whether every option has its default value."""
        return bool(self.instance == type(self.instance)())

    def reference(self) -> tuple[str, str]:
        """Where a worker process finds the class: ``("name", name)`` or ``("class", "m:C")``.

        Raises:
            OptionError: it could not find it.
        """
        if self.name is not None:
            return "name", self.name
        own = type(self.instance)
        module = sys.modules.get(own.__module__)
        if own.__module__ != "__main__" and not own.__module__.startswith("_workspace_"):
            found: Any = module
            for part in own.__qualname__.split("."):
                found = getattr(found, part, None)
            if found is own:
                return "class", f"{own.__module__}:{own.__qualname__}"
        with contextlib.suppress(OptionError):
            if own.__module__ != "__main__" and _REGISTRIES[self.kind][self.key] is own:
                return "name", self.key
        raise OptionError(
            f"worker processes can't import the {self.kind} {own.__qualname__} of "
            f"{own.__module__}. Give it by name, as ('{self.key}', {{...}}); or put "
            f"it in a file of its own (./algorithms/NAME.py for a method, or any module that can "
            f"be imported); or use processes=1."
        )

    def described(self) -> dict[str, Any]:
        """Class, options and, for classes that are not part of this package, their source."""
        own = type(self.instance)
        return {
            "class": f"{own.__module__}:{own.__qualname__}",
            "options": self.instance.model_dump(mode="json"),
            "source": _source_digest(own),  # type: ignore[arg-type]
        }

    def __reduce__(self) -> tuple[Any, ...]:
        options = pickle.dumps(self.options)
        return _choice_again, (self.kind, self.reference(), options, self.label)


@cache
def _choice_again(kind: str, reference: tuple[str, str], pickled: bytes, label: str) -> Choice:
    """Once per worker: looking up a name costs milliseconds, reading a folder's columns more."""
    how, where = reference
    options = pickle.loads(pickled)
    if how == "name":
        return Choice.of(kind, (where, options), label)
    module, _, names = where.partition(":")
    found: Any = importlib.import_module(module)
    for part in names.split("."):
        found = getattr(found, part)
    return Choice.of(kind, found(**options), label)


def _label(kind: str, instance: Any) -> str:
    """The title (a method's) or name, and the options that differ from their defaults."""
    title = instance.label if kind == "algorithm" else ""
    fields = type(instance).model_fields
    changed = [
        f"{key}={_plain(getattr(instance, key))}"
        for key in sorted(instance.model_fields_set)
        if getattr(instance, key) != fields[key].get_default(call_default_factory=True)
    ]
    name = str(title or instance.name or type(instance).__name__)
    return f"{name} ({', '.join(changed)})" if changed else name


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_plain, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Job:
    """One run: a method on one federation, with one seed."""

    dataset: Choice
    method: Choice
    seed: int
    model: Choice | None
    training: Training
    validated: bool = False

    @property
    def id(self) -> tuple[str, str, int]:
        """Labels and seed, unique in a plan."""
        return self.dataset.label, self.method.label, self.seed

    def __str__(self) -> str:
        return f"{self.method.label} on {self.dataset.label}, seed {self.seed}"

    def key(self, data: str) -> str:
        """Hash of everything the result depends on: a changed setting, method, data set or version
        has another one.

        Args:
            data: digest of the federation's records.
        """
        training = self.training.model_dump(mode="json") | {"eval_every": self.training.every}
        content = {
            "versions": _versions(),
            "method": self.method.described(),
            "dataset": self.dataset.described() | {"data": data},
            "model": self.model.described() if self.model else None,
            "training": training,
            "seed": self.seed,
        }
        # Only where it is so: what was kept before stays what it is.
        return _digest(content | {"validated": True} if self.validated else content)


@dataclass(frozen=True)
class Measurement:
    """Numbers computed of one federation, with one seed: whatever is not a training.

    Attributes:
        function: called as ``function(federation, seed, **parameters)``; returns what strict JSON
            can hold, under names. Of a module, so that worker processes find it.
        parameters: what JSON can hold.
    """

    dataset: Choice
    function: Callable[..., dict[str, Any]]
    seed: int
    parameters: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.__name__

    def __str__(self) -> str:
        what = self.name.replace("_", " ")
        return f"{what} on {self.dataset.label}, seed {self.seed}"

    def key(self, data: str) -> str:
        """Hash of everything the result depends on, as :meth:`Job.key`."""
        content = {
            "versions": _versions(),
            "function": f"{self.function.__module__}:{self.function.__qualname__}",
            "source": _source_digest(self.function),
            "dataset": self.dataset.described() | {"data": data},
            "parameters": self.parameters,
            "seed": self.seed,
        }
        return _digest(content)


#: What the engine runs.
Task = Job | Measurement


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Plan:
    """What is compared; :meth:`of` checks it.

    Attributes:
        methods, datasets: labels are unique among each.
        seeds: of splits, drawn data and runs; distinct.
        training: of every run.
        model: None is logistic regression, or softmax where there are several classes.
    """

    methods: tuple[Choice, ...]
    datasets: tuple[Choice, ...]
    seeds: tuple[int, ...]
    training: Training
    model: Choice | None = None

    @classmethod
    def of(
        cls,
        algorithms: Specs = "all",
        datasets: Specs = "fed_heart_disease",
        seeds: int | Iterable[int] = 10,
        *,
        model: Spec = "auto",
        **training: Any,
    ) -> Plan:
        """Arguments as in :func:`fedtopo_torch.comparison.compare`.

        Raises:
            OptionError: an unknown name or option, a value out of range, the same method,
                federation or seed twice, or none of them.
        """
        if isinstance(algorithms, str) and algorithms == "all":
            algorithms = METHODS
        return cls(
            _choices("algorithm", algorithms),
            _choices("dataset", datasets),
            seeds_of(seeds),
            Training(**training),
            None if isinstance(model, str) and model == "auto" else Choice.of("model", model),
        )

    def jobs(self) -> list[Job]:
        """Every run, federation by federation and seed by seed."""
        return [
            Job(dataset, method, seed, self.model, self.training)
            for dataset in self.datasets
            for seed in self.seeds
            for method in self.methods
        ]

    def method(self, name: str) -> Choice:
        """The method with this label, or else the first with this name in the registry.

        Raises:
            OptionError: there is none.
        """
        return _find("method", self.methods, name)

    def dataset(self, name: str) -> Choice:
        """The federation with this label, or else the first with this name in the registry.

        Raises:
            OptionError: there is none.
        """
        return _find("federation", self.datasets, name)


def _choices(kind: str, given: Specs) -> tuple[Choice, ...]:
    what = {"algorithm": "method", "dataset": "federation"}[kind]
    if isinstance(given, Mapping):
        labelled: list[tuple[str | None, Spec]] = list(given.items())
    elif isinstance(given, str | Options) or (
        isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)
    ):
        labelled = [(None, given)]
    else:
        labelled = [(None, spec) for spec in given]
    choices = tuple(Choice.of(kind, spec, label) for label, spec in labelled)
    if not choices:
        raise OptionError(f"no {what} to compare: give at least one.")
    labels = [choice.label for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise OptionError(f"the {what} '{label}' is listed {labels.count(label)} times.")
    return choices


def seeds_of(given: int | Iterable[int]) -> tuple[int, ...]:
    """The seeds that are meant: so many from 0, or these.

    Raises:
        OptionError: none, one that is no whole number, or one given twice.
    """
    if isinstance(given, Integral) and not isinstance(given, bool):
        if given < 1:
            raise OptionError(f"{given} seeds: there must be at least one.")
        if int(given) > MOST_SEEDS:
            raise OptionError(f"{given} seeds: {MOST_SEEDS} at most.")
        return tuple(range(int(given)))
    seeds = tuple(given) if isinstance(given, Iterable) else (given,)
    if not seeds:
        raise OptionError("the list of seeds is empty: give at least one.")
    for seed in seeds:
        if not isinstance(seed, Integral) or isinstance(seed, bool):
            raise OptionError(f"seed {seed!r} is not a whole number.")
    twice = sorted({int(seed) for seed in seeds if seeds.count(seed) > 1})
    if twice:
        raise OptionError(
            f"seed{'s' if len(twice) > 1 else ''} {', '.join(map(str, twice))} given more than "
            f"once: a repeated seed is the same run and would count twice in every test."
        )
    return tuple(map(int, seeds))


def _find(what: str, choices: Sequence[Choice], name: str) -> Choice:
    for fits in (lambda c: c.label == name, lambda c: name in (c.name, c.key)):
        for choice in choices:
            if fits(choice):
                return choice
    known = {choice.label for choice in choices}
    raise OptionError(f"the {what} '{name}' is not in this comparison." + did_you_mean(name, known))


@cache
def _versions() -> dict[str, str]:
    """Of this package, its source, and what computes for it."""
    digest = hashlib.sha256()
    home = Path(__file__).parent
    for path in sorted(home.rglob("*.py")):
        digest.update(str(path.relative_to(home)).encode() + path.read_bytes())
    packages = ("torch", "numpy", "scipy", "scikit-learn", "gudhi")
    return {
        "fedtopo-torch": __version__,
        "source": digest.hexdigest(),
        **{package: version(package) for package in packages},
    }


@cache
def _source_digest(own: Any) -> str | None:
    """Hash of the files of a class and its bases, or of a function, where they are not part of
    this package."""
    root = __name__.partition(".")[0]
    parts = []
    # A measurement is a function; a model made of a torch module has that class beside it.
    network = getattr(own, "network", object)
    for base in (*getattr(own, "__mro__", (own,)), *network.__mro__):
        top = base.__module__.partition(".")[0]
        if top in (root, "builtins", "pydantic", "abc", "typing", "torch"):
            continue
        try:
            parts.append(Path(inspect.getfile(base)).read_bytes())
        except (OSError, TypeError):
            # No file, nothing to compare with: never taken for what was stored before.
            parts.append(uuid.uuid4().bytes)
    return hashlib.sha256(b"".join(parts)).hexdigest() if parts else None
