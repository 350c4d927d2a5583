"""What a federation is like before it is trained: would clusters by descriptors help, and why.

Everything is computed from training records; test records are never touched. Descriptors, their
partitions and trust are those of :mod:`fedtopo_torch.topology`. What drives the distances is found
by leaving out one column after another. What clusters would bring is found by short pilot runs in
which a part of the training records is held out.
"""

# scikit-learn's metrics and scipy.spatial are imported where needed, as in topology.
from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from . import topology
from .algorithms.base import Algorithm
from .algorithms.fedavg import FedAvg
from .algorithms.local import Local
from .algorithms.ptopofl import PTopoFL
from .federation import Client, Federation
from .models.logistic import default_model
from .options import OptionError
from .randomness import generator
from .theory import within_share
from .topology import MIN_RECORDS
from .topology.partition import MAX_CLUSTERS, MIN_REPRODUCIBILITY
from .trainer import Result, Trainer

__all__ = [
    "Advice",
    "Clustering",
    "ColumnEffect",
    "Diagnosis",
    "Pilot",
    "advise",
    "column_groups",
    "described_clouds",
    "diagnose",
    "hold_outs_of",
    "members",
]

Progress = Callable[[int, int, str], None]
Kind = Literal["cluster", "together", "alone", "unclear"]

#: All pairs of clients are compared, again for every column.
MOST_CLIENTS = 5_000
#: At most so many columns are left out in turn, and so many clients described for that (7 to 10 ms
#: each, so half a minute).
MOST_COLUMNS = 30
MOST_DESCRIPTORS = 3_000
#: Reproducibility without a column takes twelve more descriptors per client: up to so many
#: clients times columns (40 ms each, so six seconds).
MOST_HALVES = 160
#: A column carries a partition if less than this ARI is left without it.
CARRIED = 0.5
#: Random partitions that 1 - rho is compared with.
RANDOM_PARTITIONS = 200
#: Coordinates of optima that differ by less are the same, up to rounding.
SAME_OPTIMUM = 1e-9
#: Differences of log-losses below this are rounding.
TIE = 1e-9
#: With fewer clients, or fewer records held out in all, evidence is called thin.
FEW_CLIENTS = 5
FEW_RECORDS = 200

#: Options by default.
AUTO = PTopoFL.model_validate({"n_clusters": "auto"})

#: The pilot's methods: what each stands for in a sentence.
PILOT_WORDS = {"cluster": "in clusters", "together": "together", "alone": "alone"}


@dataclass(frozen=True)
class Clustering:
    """One number of clusters M, and what speaks for it.

    Attributes:
        n_clusters: M.
        labels: cluster of each client ``[K]``, from 0, numbered by first appearance.
        reproducibility: half-split ARI, see :func:`fedtopo_torch.topology.reproducibility`; None
            for M = 1.
        silhouette: mean silhouette in [-1, 1]; None for M = 1.
        radius: stability radius r*, see :func:`fedtopo_torch.topology.guaranteed_radius`: infinite
            for M = 1, None where nothing is guaranteed.
        explained: 1 - rho in [0, 1], rho of :func:`fedtopo_torch.theory.within_share`: the part of
            the clients' disagreement about the best model that lies between clusters. None where
            the clients do not disagree.
        by_chance: mean of 1 - rho over random partitions with the same cluster sizes.
        as_good: share in [0, 1] of these random partitions with at least the same 1 - rho.
    """

    n_clusters: int
    labels: tuple[int, ...]
    reproducibility: float | None
    silhouette: float | None
    radius: float | None
    explained: float | None
    by_chance: float | None
    as_good: float | None

    @property
    def excess(self) -> float | None:
        """1 - rho above what random partitions of the same sizes explain."""
        if self.explained is None or self.by_chance is None:
            return None
        return self.explained - self.by_chance


@dataclass(frozen=True)
class ColumnEffect:
    """What changes without one column, or in other units.

    Attributes:
        name: the column's; of one-hot features that of their source column.
        features: names of the features left out together; empty for other units.
        variance: its share in [0, 1] of the features' pooled variance, in the units described;
            None for other units.
        size: mean distance between descriptors without it over that with it; None where all
            distances with it are 0.
        change: how far the pattern of the distances changes, in [0, 1]: min over c of
            |D - c D'| / |D| = sqrt(1 - cos^2), D the distances with it, D' those without it, cos
            = <D, D'> / (|D| |D'|) over all pairs. 0: all distances grow or shrink alike (always so
            for two clients). None where all distances D are 0; 1 where all D' are.
        agreement: ARI of the two partitions into M clusters; 0 where fewer than M descriptors are
            left that differ. None where there is no partition.
        reproducibility: half-split ARI of the partition without it; None where not computed.
        labels: the partition without it ``[K]``, or None.
    """

    name: str
    features: tuple[str, ...]
    variance: float | None
    size: float | None
    change: float | None
    agreement: float | None
    reproducibility: float | None
    labels: tuple[int, ...] | None

    @property
    def carries(self) -> bool:
        """Whether less than :data:`CARRIED` of the partition is left without it."""
        return self.agreement is not None and self.agreement < CARRIED


@dataclass(frozen=True)
class Pilot:
    """Short runs on a part of the training records, scored on those held out.

    Attributes:
        rounds: of each run.
        n: records of each client held out in all ``[K]``.
        clients: mean log-loss in nats of each client's held-out records ``[K]``, by method
            (``"alone"`` Local, ``"together"`` FedAvg, ``"cluster"`` pTopoFL); NaN without any.
        hold_outs: log-loss of the honest clients' held-out records pooled, one per hold-out
            ``[H]``, by method.
        records: honest clients' records in each hold-out ``[H]``.
        same_partition: hold-outs in which the remaining records gave the clusters of all records;
            None without clusters.
    """

    rounds: int
    n: tuple[int, ...]
    clients: dict[str, tuple[float, ...]]
    hold_outs: dict[str, tuple[float, ...]]
    records: tuple[int, ...]
    same_partition: int | None

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods run."""
        return tuple(self.hold_outs)

    def mean(self, method: str) -> float:
        """Log-loss over all honest clients' held-out records of all hold-outs."""
        return float(np.average(self.hold_outs[method], weights=self.records))

    def wins(self, method: str, other: str) -> int:
        """In how many hold-outs the first has the lower pooled log-loss (by more than 1e-9)."""
        pairs = zip(self.hold_outs[method], self.hold_outs[other], strict=True)
        return sum(a < b - TIE for a, b in pairs)

    def beats(self, method: str, other: str) -> bool:
        """Whether the first has the lower pooled log-loss in every hold-out, of two at least."""
        return len(self.records) > 1 and self.wins(method, other) == len(self.records)


@dataclass(frozen=True)
class Advice:
    """What to do, by the rule of :func:`advise`.

    Attributes:
        kind: ``"cluster"``, ``"together"`` (FedAvg), ``"alone"`` (Local) or ``"unclear"``.
        n_clusters: M where clusters are advised, else 1.
        sentence: the advice and the evidence for it.
        thin: why the evidence is thin; empty if it is not.
    """

    kind: Kind
    n_clusters: int
    sentence: str
    thin: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """All that :func:`diagnose` found out about a federation.

    Attributes:
        name: of the federation.
        settings: options of the descriptor, seed, rounds and hold-outs of the pilot.
        names: of clients, sorted ``[K]``.
        n: training records ``[K]``.
        phi: descriptors ``[K, 46]``, rows of length 1.
        distances: between descriptors ``[K, K]``.
        delta: mean distance of each client to the others ``[K]``.
        scores: z of delta by the trust rule ``[K]``, see
            :func:`fedtopo_torch.topology.outlyingness`.
        trust: t_k in (0, 1] ``[K]``; a client is flagged when it is below 1.
        clusterings: for M = 1, 2, ... up to 6, at most K - 1.
        choice: what ``n_clusters=auto`` takes, and why.
        n_clusters: M of the partition that columns and pilot look at: the one asked for, or
            chosen, or 2 where none is; None where no number of clusters can be tried.
        columns: effect of each column tried, the largest change first.
        columns_left_out: why columns were not tried; empty if all were.
        units: effect of the other units (``scale``); None where there is no distance.
        pilot: or None.
        no_pilot: why there is none; empty if there is one.
        findings: about columns, units and clients, in sentences.
        advice: what to do.
    """

    name: str
    settings: dict[str, Any]
    names: tuple[str, ...]
    n: tuple[int, ...]
    phi: NDArray[np.float64]
    distances: NDArray[np.float64]
    delta: NDArray[np.float64]
    scores: NDArray[np.float64]
    trust: NDArray[np.float64]
    clusterings: tuple[Clustering, ...]
    choice: topology.Choice
    n_clusters: int | None
    columns: tuple[ColumnEffect, ...]
    columns_left_out: str
    units: ColumnEffect | None
    pilot: Pilot | None
    no_pilot: str
    findings: tuple[str, ...]
    advice: Advice

    @property
    def clustering(self) -> Clustering:
        """The partition that columns and pilot look at; one cluster where there is none."""
        m = self.n_clusters or 1
        return next(each for each in self.clusterings if each.n_clusters == m)

    @property
    def flagged(self) -> list[str]:
        """Clients with trust below 1."""
        return [name for name, t in zip(self.names, self.trust, strict=True) if t < 1]


def diagnose(
    federation: Federation,
    *,
    method: PTopoFL | None = None,
    seed: int = 0,
    pilot_rounds: int = 50,
    hold_outs: int = 5,
    n_jobs: int | None = None,
    on_progress: Progress | None = None,
) -> Diagnosis:
    """Tell whether clusters by topological descriptors would help this federation, and why.

    Nothing is changed, and no test record is used. The pilot trains logistic (for several classes
    softmax) regression on the features of a record in one row, with the trainer's defaults; of a
    federation meant for another model it is a hint.

    Args:
        federation: at most 5,000 clients.
        method: options of the descriptor (scale, linkage, n_sub, repeats), of trust and of the
            pilot's clustered training. ``n_clusters`` may be ``"auto"`` (default here: the number
            chosen, or 2 to show what it would give) or one of the numbers tried.
        seed: of every draw; with the same seed descriptors are those of a run of pTopoFL.
        pilot_rounds: communication rounds of each pilot run, at least 1.
        hold_outs: H, at least 2. Each client's training records are divided at random in H parts
            with about the same classes; each part is held out once. See :func:`hold_outs_of`.
        n_jobs: threads that describe clients, as in joblib. The result is the same to the bit.
        on_progress: called with (steps done, steps in all, what was done).

    Returns:
        a :class:`Diagnosis`; the same for the same federation and arguments, to the bit.

    Raises:
        OptionError: an option out of range, an ``n_clusters`` that can't be tried, too many
            clients.
    """
    method = AUTO if method is None else method
    _check(federation, pilot_rounds, hold_outs)
    work = _Work(federation, method, seed, n_jobs)
    # Descriptors, halves, models; and where there are others: columns, units, hold-outs.
    total = 3 + (len(work.tried) + 1 + hold_outs if len(federation) > 1 else 0)
    done = itertools.count(1)

    def step(what: str) -> None:
        if on_progress is not None:
            on_progress(next(done), total, what)

    clouds = work.clouds(method.scale)
    # The one place where clients of few records are named in a warning.
    phi = work.describe(clouds)
    step("descriptors")
    with _quiet():
        halves = work.halves(clouds)
        step("halves")
        choice = topology.choose_n_clusters(phi, halves, method.linkage)
        m = _reference(method, choice)
        optima = _optima(federation, pilot_rounds, seed)
        clusterings = _clusterings(work, phi, choice, optima)
        step("models of each client alone")
        labels = next((c.labels for c in clusterings if c.n_clusters == m), None)
        columns, units = _effects(work, phi, m, labels, step)
        pilot, no_pilot = _pilot(federation, method, m, labels, seed, pilot_rounds, hold_outs, step)
    delta, scores = topology.outlyingness(phi, "robust" if method.trust == "off" else method.trust)
    trust = topology.trust_weights(phi, method.trust, federation.train.n.numpy())
    names = federation.names
    few = [name for name, n in zip(names, federation.train.n, strict=True) if n < MIN_RECORDS]
    findings = _findings(names, m, labels, choice, columns, units, method.scale, few)
    carriers = [column.name for column in columns if column.carries]
    return Diagnosis(
        name=federation.name,
        settings={
            **{k: getattr(method, k) for k in ("scale", "linkage", "n_sub", "repeats", "trust")},
            "n_clusters": method.n_clusters,
            "seed": seed,
            "pilot_rounds": pilot_rounds,
            "hold_outs": hold_outs,
        },
        names=names,
        n=tuple(federation.train.n.tolist()),
        phi=phi,
        distances=_distances(phi),
        delta=delta,
        scores=scores,
        trust=trust,
        clusterings=clusterings,
        choice=choice,
        n_clusters=m,
        columns=columns,
        columns_left_out=work.left_out,
        units=units,
        pilot=pilot,
        no_pilot=no_pilot,
        findings=findings,
        advice=advise(names, choice, m, labels, pilot, no_pilot, carriers, few),
    )


def _check(federation: Federation, pilot_rounds: int, hold_outs: int) -> None:
    for name, value, least in (("pilot_rounds", pilot_rounds, 1), ("hold_outs", hold_outs, 2)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise OptionError(f"{name} is {value!r}: must be a whole number of at least {least}.")
    if len(federation) > MOST_CLIENTS:
        raise OptionError(
            f"{len(federation)} clients: all pairs are compared, so at most {MOST_CLIENTS} can be "
            f"diagnosed. Take a random part of them."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that the first descriptors have given already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


# ---- descriptors, with all columns and without ---------------------------------------------------


class _Work:
    """Describes clients in the same way again and again, with columns left out."""

    def __init__(
        self, federation: Federation, method: PTopoFL, seed: int, n_jobs: int | None
    ) -> None:
        self.federation, self.method, self.seed = federation, method, seed
        size = topology.cloud_size(federation.train.n.numpy(), method.n_sub)
        self.settings: dict[str, Any] = {
            "seed": seed,
            "size": size,
            "repeats": method.repeats,
            "n_jobs": n_jobs,
        }
        self.groups = column_groups(_feature_names(federation), federation.clouds)
        variance = federation.moments.std.numpy() ** 2
        if method.scale == "pooled":
            variance = variance / federation.moments.scale().numpy() ** 2
        self.shares = {
            name: float(variance[list(at)].sum() / variance.sum()) if variance.sum() > 0 else 0.0
            for name, at in self.groups.items()
        }
        self.tried, self.left_out = self._tried()

    def _tried(self) -> tuple[list[str], str]:
        """Columns to leave out in turn, and why others are not tried."""
        names, n_clients = list(self.groups), len(self.federation)
        if n_clients < 2:
            return [], "one client has no distance to another"
        if len(names) < 2:
            return [], "there is only one column, and nothing is left without it"
        if len(self.federation.feature_shape) > 1 and len(names) > MOST_COLUMNS:
            shape = "x".join(map(str, self.federation.feature_shape))
            return [], (
                f"records of shape {shape} have {len(names)} values, more than {MOST_COLUMNS}, and "
                f"one of them means little"
            )
        limit = min(MOST_COLUMNS, max(1, MOST_DESCRIPTORS // n_clients))
        if len(names) <= limit:
            return names, ""
        largest = sorted(names, key=lambda name: -self.shares[name])[:limit]
        return largest, (
            f"tried are the {limit} of {len(names)} columns with the largest share of the "
            f"features' variance (at most {MOST_COLUMNS} columns, and {MOST_DESCRIPTORS:,} "
            f"descriptors of clients in all)"
        )

    @property
    def with_halves(self) -> bool:
        """Whether reproducibility without each column is affordable."""
        return len(self.federation) * len(self.tried) <= MOST_HALVES

    def clouds(self, scale: str, without: Sequence[int] = ()) -> list[NDArray[np.float64]]:
        """Training features as described, some columns left out."""
        clouds = described_clouds(self.federation, scale)
        return [np.delete(cloud, list(without), axis=1) for cloud in clouds] if without else clouds

    def describe(self, clouds: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        return topology.descriptors(clouds, self.federation.names, **self.settings)

    def halves(self, clouds: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        return topology.halves(clouds, self.federation.names, **self.settings)


def described_clouds(federation: Federation, scale: str) -> list[NDArray[np.float64]]:
    """Training features ``[n_k, d]`` in their own units, or with ``"pooled"`` standardised."""
    if scale == "raw":
        return federation.clouds
    mean, divisor = federation.moments.mean.numpy(), federation.moments.scale().numpy()
    return [(cloud - mean) / divisor for cloud in federation.clouds]


def column_groups(
    names: Sequence[str], clouds: Sequence[NDArray[np.float64]]
) -> dict[str, tuple[int, ...]]:
    """Which features to leave out together: the one-hot features of one source column.

    Features called ``COLUMN=...`` (as the folder dataset calls them) are one column, COLUMN being
    what comes before the first ``=``, if there are at least two of them and they hold nothing but
    0 and 1. Every other feature is a column of its own; features of one name are one column.

    Args:
        names: of the features ``[d]``.
        clouds: K arrays ``[n_k, d]``.

    Returns:
        column -> positions of its features, in the order of first appearance. One-hot features are
        called ``COLUMN=`` where another feature is called COLUMN.
    """
    together: dict[tuple[str, bool], list[int]] = {}
    for j, name in enumerate(names):
        column, equals, _ = name.partition("=")
        binary = bool(equals) and all(np.isin(cloud[:, j], (0.0, 1.0)).all() for cloud in clouds)
        together.setdefault((column if binary else name, binary), []).append(j)
    groups = {}
    for (column, binary), at in together.items():
        if len(at) == 1:
            column = names[at[0]]
        elif binary and column in names:
            column = f"{column}="
        groups[column] = tuple(at)
    return groups


def _feature_names(federation: Federation) -> tuple[str, ...]:
    if len(federation.feature_shape) == 1:
        return federation.feature_names
    places = itertools.product(*map(range, federation.feature_shape))
    return tuple("x[" + ",".join(map(str, place)) + "]" for place in places)


def _distances(phi: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.spatial.distance import cdist

    return cdist(phi, phi)


def _effects(
    work: _Work,
    phi: NDArray[np.float64],
    m: int | None,
    labels: tuple[int, ...] | None,
    step: Callable[[str], None],
) -> tuple[tuple[ColumnEffect, ...], ColumnEffect | None]:
    """What each column does, the largest change first; and what other units do."""
    if len(phi) < 2:
        return (), None
    distances = _distances(phi)
    scale = work.method.scale

    def effect(
        name: str, features: tuple[int, ...], scale: str, halved: bool, variance: float | None
    ) -> ColumnEffect:
        clouds = work.clouds(scale, features)
        other = work.describe(clouds)
        size, change = _changed(distances, _distances(other))
        agreement = reproducibility = None
        found: tuple[int, ...] | None = None
        if m is not None and labels is not None:
            from sklearn.metrics import adjusted_rand_score

            agreement = 0.0
            if len(np.unique(other, axis=0)) >= m:
                found = tuple(topology.partition(other, m, work.method.linkage).tolist())
                agreement = float(adjusted_rand_score(labels, found))
            if halved:
                halves = work.halves(clouds)
                reproducibility = topology.reproducibility(halves, m, work.method.linkage)
        every = _feature_names(work.federation)
        step(f"without {name}" if features else name)
        return ColumnEffect(
            name,
            tuple(every[j] for j in features),
            variance,
            size,
            change,
            agreement,
            reproducibility,
            found,
        )

    columns = [
        effect(name, work.groups[name], scale, work.with_halves, work.shares[name])
        for name in work.tried
    ]
    columns.sort(key=lambda column: -(column.change or 0.0))
    other_scale, title = ("pooled", STANDARDISED) if scale == "raw" else ("raw", OWN_UNITS)
    return tuple(columns), effect(title, (), other_scale, True, None)


def _changed(
    before: NDArray[np.float64], after: NDArray[np.float64]
) -> tuple[float | None, float | None]:
    """``size`` and ``change`` of :class:`ColumnEffect`, of two matrices of distances ``[K, K]``."""
    norms = float(np.linalg.norm(before)), float(np.linalg.norm(after))
    if norms[0] == 0:
        return None, None
    if norms[1] == 0:
        return 0.0, 1.0
    cos = float(np.vdot(before / norms[0], after / norms[1]))
    return float(after.mean() / before.mean()), math.sqrt(max(0.0, 1 - cos**2))


STANDARDISED = "all columns, standardised"
OWN_UNITS = "all columns, own units"


# ---- partitions ---------------------------------------------------------------------------------


def _reference(method: PTopoFL, choice: topology.Choice) -> int | None:
    """M of the partition to look at."""
    candidates = list(choice.reproducibility)
    if method.n_clusters == "auto":
        return choice.n_clusters if choice.found else (2 if candidates else None)
    if method.n_clusters not in candidates:
        tried = ", ".join(map(str, candidates)) or "none"
        raise OptionError(
            f"n_clusters = {method.n_clusters} can't be diagnosed: give auto, or one of the "
            f"numbers tried (2 to {MAX_CLUSTERS}, below the number of clients; here: {tried})."
        )
    return method.n_clusters


def _optima(federation: Federation, rounds: int, seed: int) -> NDArray[np.float64]:
    """Each client's own optimum, as far as so many rounds come ``[K, p]``."""
    alone = _part(federation, [np.ones(int(n), dtype=bool) for n in federation.train.n])
    return _train(Local(), alone, rounds, seed, "train").theta.to(torch.float64).numpy()


def _clusterings(
    work: _Work, phi: NDArray[np.float64], choice: topology.Choice, optima: NDArray[np.float64]
) -> tuple[Clustering, ...]:
    n = work.federation.train.n.numpy()
    shares = n / n.sum()
    found = []
    for m in (1, *choice.reproducibility):
        labels = topology.partition(phi, m, work.method.linkage)
        explained = by_chance = as_good = None
        if np.abs(optima - optima[0]).max() > SAME_OPTIMUM:
            explained = 1 - float(within_share(optima, labels, shares))
            rng = generator(work.seed, "random partitions", round=m)
            draws = np.array(
                [
                    1 - float(within_share(optima, rng.permutation(labels), shares))
                    for _ in range(RANDOM_PARTITIONS)
                ]
            )
            by_chance = float(draws.mean())
            as_good = float((draws >= explained - TIE).mean())
        found.append(
            Clustering(
                n_clusters=m,
                labels=tuple(labels.tolist()),
                reproducibility=choice.reproducibility.get(m),
                silhouette=choice.silhouette.get(m),
                radius=topology.guaranteed_radius(phi, labels, work.method.linkage),
                explained=explained,
                by_chance=by_chance,
                as_good=as_good,
            )
        )
    return tuple(found)


# ---- the pilot ----------------------------------------------------------------------------------


def hold_outs_of(
    labels: NDArray[np.int64], hold_outs: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """The hold-out that each record of one client is in ``[n]``, 0 to H - 1.

    Records are shuffled, sorted by class, and dealt one after the other from a random hold-out on,
    so that hold-outs differ by at most one record, and by at most one of each class. The only
    record of a client is in none (-1): something must be left to train on.
    """
    n = len(labels)
    if n == 1:
        return np.array([-1])
    order = rng.permutation(n)
    order = order[np.argsort(labels[order], kind="stable")]
    dealt = np.empty(n, dtype=np.int64)
    dealt[order] = (rng.integers(hold_outs) + np.arange(n)) % hold_outs
    return dealt


def _part(federation: Federation, kept: Sequence[NDArray[np.bool_]]) -> Federation:
    """The training records that are kept, the others as validation records; no test records."""
    clients = []
    for k, (name, cloud) in enumerate(zip(federation.names, federation.clouds, strict=True)):
        labels = federation.train.client(k)[1].numpy()
        inside = kept[k]
        clients.append(
            Client(
                name,
                train=(cloud[inside], labels[inside]),
                validation=(cloud[~inside], labels[~inside]),
                honest=bool(federation.honest[k]),
            )
        )
    return Federation(
        clients,
        task=federation.task,
        n_classes=federation.n_classes,
        standardize=federation.standardized,
        name=federation.name,
        dtype=federation.dtype,
    )


def _train(
    algorithm: Algorithm, federation: Federation, rounds: int, seed: int, split: str
) -> Result:
    result = Trainer(
        algorithm,
        federation,
        default_model(federation.task),
        rounds=rounds,
        seed=seed,
        eval_every=rounds,
        splits=(split,),
        metrics=("log_loss",),
    ).run()
    if result.interrupted:
        raise KeyboardInterrupt
    return result


def _pilot(
    federation: Federation,
    method: PTopoFL,
    m: int | None,
    labels: tuple[int, ...] | None,
    seed: int,
    rounds: int,
    hold_outs: int,
    step: Callable[[str], None],
) -> tuple[Pilot | None, str]:
    """The pilot, or why there is none."""
    if len(federation) < 2:
        return None, "one client has nobody to train with"
    dealt = [
        hold_outs_of(
            federation.train.client(k)[1].numpy().astype(np.int64),
            hold_outs,
            generator(seed, "hold-outs", client=name),
        )
        for k, name in enumerate(federation.names)
    ]
    methods: dict[str, Algorithm] = {"alone": Local(), "together": FedAvg()}
    if m is not None:
        methods["cluster"] = method.model_copy(update={"n_clusters": m})
    honest = federation.honest.numpy()
    n = np.array([[int((part == h).sum()) for part in dealt] for h in range(hold_outs)])
    used = [h for h in range(hold_outs) if n[h, honest].sum() > 0]
    if not used:
        for h in range(hold_outs):
            step(f"hold-out {h + 1}")
        return None, "no client has two training records, so none can be held out"
    clients: dict[str, list[NDArray[np.float64]]] = {each: [] for each in methods}
    pooled: dict[str, list[float]] = {each: [] for each in methods}
    same = 0
    for h in range(hold_outs):
        if h in used:
            part = _part(federation, [each != h for each in dealt])
            for name, algorithm in methods.items():
                result = _train(algorithm, part, rounds, seed, "validation")
                score = result.history.last("validation", "log_loss")
                clients[name].append(score.clients.numpy().astype(np.float64))
                pooled[name].append(score.pooled)
                if name == "cluster":
                    same += tuple(result.server["labels"].tolist()) == labels
        step(f"hold-out {h + 1}")
    weights = n[used]

    def mean(values: list[NDArray[np.float64]]) -> tuple[float, ...]:
        total = weights.sum(axis=0)
        summed = (np.where(weights > 0, values, 0.0) * weights).sum(axis=0)
        return tuple(np.where(total > 0, summed / np.maximum(total, 1), math.nan).tolist())

    return (
        Pilot(
            rounds=rounds,
            n=tuple(weights.sum(axis=0).tolist()),
            clients={name: mean(values) for name, values in clients.items()},
            hold_outs={name: tuple(values) for name, values in pooled.items()},
            records=tuple(weights[:, honest].sum(axis=1).tolist()),
            same_partition=same if m is not None else None,
        ),
        "",
    )


# ---- in words -----------------------------------------------------------------------------------


def members(names: Sequence[str], labels: Sequence[int], limit: int = 5) -> str:
    """``{Cleveland, Hungary} | {Switzerland}``: clusters with their first clients."""
    told = []
    for j in range(max(labels) + 1):
        own = [name for name, label in zip(names, labels, strict=True) if label == j]
        more = f", and {len(own) - limit} more" if len(own) > limit else ""
        told.append("{" + ", ".join(own[:limit]) + more + "}")
    return " | ".join(told)


def _some(words: Sequence[str], limit: int = 10) -> str:
    """``a, b and c``, of many the first and how many more."""
    return _listed([*words[:limit], *([f"{len(words) - limit} more"] if words[limit:] else [])])


def _listed(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _findings(
    names: Sequence[str],
    m: int | None,
    labels: tuple[int, ...] | None,
    choice: topology.Choice,
    columns: Sequence[ColumnEffect],
    units: ColumnEffect | None,
    scale: str,
    few: Sequence[str],
) -> tuple[str, ...]:
    """What drives the distances and carries the partition, in sentences."""
    told = []
    if few:
        told.append(
            f"Fewer than {MIN_RECORDS} training records: {_some(few)}. Such descriptors are noisy "
            f"and not comparable to the others'."
        )
    changes = [(column.name, column.change) for column in columns if column.change is not None]
    # Of two clients there is one distance, and no pattern.
    if len(changes) > 1 and len(names) > 2:
        (first, largest), (second, next_largest) = changes[:2]
        told.append(
            f"The pattern of the distances depends most on {first}: {largest:.0%} of it is another "
            f"without {first}, at most {next_largest:.0%} without any other column ({second})."
        )
    if m is None or labels is None:
        return tuple(told)
    agreement = choice.reproducibility[m]
    if agreement < MIN_REPRODUCIBILITY:
        told.append(
            f"The partition into {m} clusters is not reproducible (half-split ARI "
            f"{agreement:.2f}), so what columns and units do to it may be chance."
        )
        return tuple(told)
    clusters = f"the partition into {m} clusters, {members(names, labels)}"
    carriers = [column for column in columns if column.carries]
    if len(carriers) == 1:
        told.append(
            f"{carriers[0].name} carries {clusters}: without it {_other(names, carriers[0])}."
        )
    elif carriers:
        each = _some([f"{column.name} (ARI {column.agreement:.2f})" for column in carriers])
        told.append(f"{each} carry {clusters}: without any one of them it is another one.")
    elif columns:
        least = min(column.agreement for column in columns if column.agreement is not None)
        told.append(
            f"No single one of the {len(columns)} columns tried carries {clusters}: without any "
            f"one of them it stays alike (ARI at least {least:.2f})."
        )
    if units is not None and units.agreement is not None:
        where = "standardised units" if scale == "raw" else "the columns' own units"
        told.append(
            f"In {where} {_other(names, units)}: it depends on the units."
            if units.carries
            else f"In {where} the partition stays alike (ARI {units.agreement:.2f})."
        )
    return tuple(told)


def _other(names: Sequence[str], effect: ColumnEffect) -> str:
    """The partition that is left, where it is another one."""
    if effect.labels is None:
        return "there is no partition left, for want of descriptors that differ"
    return f"the clusters are {members(names, effect.labels)} (ARI {effect.agreement:.2f})"


def advise(
    names: Sequence[str],
    choice: topology.Choice,
    m: int | None,
    labels: Sequence[int] | None,
    pilot: Pilot | None,
    no_pilot: str = "",
    carriers: Sequence[str] = (),
    few: Sequence[str] = (),
) -> Advice:
    """One sentence of advice, and the rule behind it.

    By pooled log-loss of held-out records, "consistently" meaning in EVERY hold-out:

    1. Clusters, where the partition is reproducible (half-split ARI of at least 0.4, the rule of
       ``n_clusters=auto``), consistently better than training together, and better than training
       alone on average and in more than half of the hold-outs.
    2. Else, of training together, training alone and, if reproducible, clusters, the one that is
       consistently better than each other.
    3. Else no clear difference, between those that no other is consistently better than.

    Training alone is held to a lower bar in 1 because the question is whether clusters are better
    than one model for all; where they are not consistently better than training alone, the
    sentence says so. Hold-outs share most of their training records, so "in 5 of 5" is no
    significance test. Evidence from fewer than 5 clients, fewer than 200 held-out records, a single
    hold-out, clients mostly of fewer than 20 records, or a partition with a cluster of such clients
    only is called thin.

    Args:
        names: of clients ``[K]``.
        choice: of :func:`fedtopo_torch.topology.choose_n_clusters`.
        m: M of the partition; None where there is none.
        labels: the partition ``[K]``, or None.
        pilot: or None.
        no_pilot: why there is none.
        carriers: columns that carry the partition.
        few: clients of fewer than 20 training records.
    """
    if pilot is None:
        if len(names) == 1:
            return Advice("alone", 1, f"Train alone (Local): {no_pilot}.", ())
        return Advice("unclear", 1, f"No advice: {no_pilot}.", ())
    reproducible = m is not None and choice.reproducibility[m] >= MIN_REPRODUCIBILITY
    kind, standing = _decide(pilot, reproducible)
    phrases = {
        "cluster": f"training in {m} clusters",
        "together": "training together",
        "alone": "training alone",
    }
    head = {
        "cluster": f"Cluster, with M = {m}",
        "together": "Train together (FedAvg)",
        "alone": "Train alone (Local)",
        "unclear": "No clear difference between " + _listed([phrases[each] for each in standing]),
    }[kind]
    if reproducible and m is not None and labels is not None:
        structure = (
            f"the partition {members(names, labels)} is reproducible (half-split ARI "
            f"{choice.reproducibility[m]:.2f})"
        )
    elif choice.found and m is not None:
        structure = f"no reproducible structure with M = {m}"
    else:
        structure = choice.reason
    candidates = [each for each in pilot.methods if each != "cluster" or reproducible]
    losses = _listed([f"{pilot.mean(each):.4f} {PILOT_WORDS[each]}" for each in candidates])
    # What is compared with the others: what is advised, or the lowest of those that stand.
    best = standing[0] if kind == "unclear" else kind
    wins = _listed(
        [
            f"{PILOT_WORDS[other]} in {pilot.wins(best, other)}"
            for other in candidates
            if other != best
        ]
    )
    sentence = (
        f"{head}: {structure}; held-out log-loss of the pilot is {losses}, and of "
        f"{len(pilot.records)} hold-outs it is lower {PILOT_WORDS[best]} than {wins}"
    )
    if kind == "cluster" and not pilot.beats("cluster", "alone"):
        sentence += ", so training alone may do as well"
    if reproducible and carriers:
        verb = "carries" if len(carriers) == 1 else "each carry"
        sentence += f"; look at {_some(carriers)} first, which {verb} the partition"
    thin = _thin(names, labels if reproducible else None, pilot, few)
    if thin:
        sentence += f"; the evidence is thin ({_listed(thin)})"
    return Advice(kind, m if kind == "cluster" and m is not None else 1, sentence + ".", thin)


def _decide(pilot: Pilot, reproducible: bool) -> tuple[Kind, list[str]]:
    """The kind of advice, and the methods that no other beats, the lowest loss first."""
    if (
        reproducible
        and pilot.beats("cluster", "together")
        and pilot.mean("cluster") < pilot.mean("alone") - TIE
        and 2 * pilot.wins("cluster", "alone") > len(pilot.records)
    ):
        return "cluster", ["cluster"]
    candidates = [each for each in pilot.methods if each != "cluster" or reproducible]
    standing = sorted(
        (a for a in candidates if not any(pilot.beats(b, a) for b in candidates)),
        key=lambda each: (pilot.mean(each), each),
    )
    return (standing[0] if len(standing) == 1 else "unclear"), standing  # type: ignore[return-value]


def _thin(
    names: Sequence[str], labels: Sequence[int] | None, pilot: Pilot, few: Sequence[str]
) -> tuple[str, ...]:
    """Why evidence is thin; ``labels`` where a partition is part of it."""
    reasons = []
    if len(names) < FEW_CLIENTS:
        reasons.append(f"{len(names)} clients")
    if sum(pilot.records) < FEW_RECORDS:
        reasons.append(f"{sum(pilot.records)} held-out records")
    if len(pilot.records) < 2:
        reasons.append("one hold-out")
    if 2 * len(few) > len(names):
        reasons.append(f"most clients have fewer than {MIN_RECORDS} records")
    elif few and labels is not None:
        others = {label for name, label in zip(names, labels, strict=True) if name not in few}
        if others != set(labels):
            reasons.append(f"a cluster of clients with fewer than {MIN_RECORDS} records only")
    return tuple(reasons)
