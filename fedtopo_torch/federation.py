"""The clients' data: checked, sorted by client name, standardised, stacked into padded buckets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

__all__ = ["Bucket", "Client", "Federation", "Moments", "Split", "Task"]

Task = Literal["binary", "multiclass", "regression"]

# What starting one more bucket costs per local step, in padded feature values that could have been
# processed instead (measured on CPU: about 9 microseconds against 2.7 values per nanosecond).
BUCKET_COST = 25_000
# Larger features can't be squared and summed in float64.
LARGEST = 1e100
# More classes than this are taken for labels that were meant to be something else.
MOST_CLASSES = 10_000


@dataclass(frozen=True)
class Client:
    """What one client holds.

    Attributes:
        name: unique in its federation; the order of names is the order of clients everywhere.
        train: features ``[n, ...]`` in their own units, and labels ``[n]``; at least one record.
        test: the same for the records the client is scored on, or None.
        validation: the same for records kept for tuning, or None.
        group: the true group, where it is known (synthetic data), for references and ARI.
        honest: False for a corrupted client; it trains but is not scored.
    """

    name: str
    train: tuple[ArrayLike, ArrayLike]
    test: tuple[ArrayLike, ArrayLike] | None = None
    validation: tuple[ArrayLike, ArrayLike] | None = None
    group: int | None = None
    honest: bool = True


class Moments(NamedTuple):
    """Pooled mean and standard deviation (ddof 0) per feature, each ``[d]``."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, n: Tensor, sums: Tensor, squares: Tensor) -> Moments:
        """Merge what clients send.

        Args:
            n: records per client ``[K]``.
            sums: feature sums ``[K, d]``.
            squares: sums of squared deviations from the client's own mean ``[K, d]``; merging
                these loses no digits where raw sums of squares would (Chan, Golub, LeVeque 1983).
        """
        count = n.to(sums.dtype)[:, None]
        total = count.sum()
        mean = sums.sum(0) / total
        spread = squares + count * (sums / count - mean).square()
        return cls(mean, (spread.sum(0) / total).sqrt())

    def scale(self) -> Tensor:
        """The divisor for standardising: the std, and 1 where a column is constant."""
        constant = self.std <= 1e-14 * self.mean.abs().clamp(min=1e-300)
        return torch.where(constant, torch.ones_like(self.std), self.std)


def feature_sums(features: Tensor) -> tuple[Tensor, Tensor]:
    """Sums, and sums of squared deviations from the own mean, of one client's ``[n, d]``."""
    sums = features.sum(0)
    return sums, (features - sums / len(features)).square().sum(0)


@dataclass(frozen=True)
class Bucket:
    """Clients of similar size, stacked.

    Attributes:
        rows: positions of these clients in the federation ``[k]``.
        names: their names.
        features: ``[k, n_max, ...]``, zeros where padded.
        labels: ``[k, n_max]``, zeros where padded.
        mask: ``[k, n_max]`` of 1 and 0, or None when nothing is padded.
        n: records per client ``[k]``.
    """

    rows: Tensor
    names: tuple[str, ...]
    features: Tensor
    labels: Tensor
    mask: Tensor | None
    n: Tensor


class Split:
    """One part (train, test or validation) of every client's data.

    Attributes:
        n: records per client ``[K]``, in the order of names.
    """

    def __init__(
        self, names: Sequence[str], features: Sequence[Tensor], labels: Sequence[Tensor]
    ) -> None:
        self.n = torch.tensor([len(y) for y in labels], dtype=torch.int64)
        self._names = tuple(names)
        self._features = list(features)
        self._labels = list(labels)
        self._width = max(1, int(np.prod(features[0].shape[1:])))
        self._buckets: dict[Any, tuple[Bucket, ...]] = {}

    def buckets(
        self, limit: int, kinds: tuple[int, ...] | None = None, most: int | None = None
    ) -> tuple[Bucket, ...]:
        """The data stacked; every client with at least one record is in exactly one bucket.

        Args:
            limit: feature values per bucket, padding included (one client may exceed it).
            kinds: one number per client ``[K]``; only clients of one kind share a bucket.
            most: clients per bucket, at most.
        """
        key = (limit, kinds, most)
        if key not in self._buckets:
            plan = self._planned(range(len(self.n)), limit, kinds, most)
            self._buckets[key] = tuple(self._stack(rows, keep=True) for rows in plan)
        return self._buckets[key]

    def gather(
        self,
        rows: Sequence[int],
        limit: int,
        kinds: tuple[int, ...] | None = None,
        most: int | None = None,
    ) -> list[Bucket]:
        """Some clients' data, stacked anew at each call; arguments as in :meth:`buckets`."""
        return [self._stack(own) for own in self._planned(rows, limit, kinds, most)]

    def _planned(
        self, rows: Sequence[int], limit: int, kinds: tuple[int, ...] | None, most: int | None
    ) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(kinds[row] if kinds else 0, []).append(row)
        plan = []
        for own in groups.values():
            sizes = [int(n) for n in self.n[own]]
            for bucket in plan_buckets(sizes, self._width, limit, most):
                plan.append([own[i] for i in bucket])
        return plan

    def _stack(self, rows: list[int], *, keep: bool = False) -> Bucket:
        n = self.n[rows]
        longest = int(n.max())
        features = pad_sequence([self._features[row] for row in rows], batch_first=True)
        labels = pad_sequence([self._labels[row] for row in rows], batch_first=True)
        if keep:
            # From here on the client's records are views: nothing is stored twice.
            for i, row in enumerate(rows):
                self._features[row], self._labels[row] = features[i, : n[i]], labels[i, : n[i]]
        mask = None
        if int(n.min()) < longest:
            mask = (torch.arange(longest) < n[:, None]).to(features.dtype)
        return Bucket(
            torch.tensor(rows), tuple(self._names[r] for r in rows), features, labels, mask, n
        )

    def client(self, index: int) -> tuple[Tensor, Tensor]:
        """Features ``[n, ...]`` and labels ``[n]`` of one client, without padding."""
        return self._features[index], self._labels[index]


def plan_buckets(
    n: Sequence[int], width: int, limit: int, most: int | None = None
) -> list[list[int]]:
    """Group clients by size so that small ones don't pay for large ones.

    Clients are taken from the largest down. A bucket is closed when the padding it has gathered
    costs more than a new bucket would, or when it would exceed the limit. Clients without records
    are left out.

    Args:
        n: records per client.
        width: feature values per record.
        limit: feature values per bucket, padding included.
        most: clients per bucket, at most.
    """
    order = sorted((i for i in range(len(n)) if n[i] > 0), key=lambda i: (-n[i], i))
    buckets: list[list[int]] = []
    longest = padding = 0
    for i in order:
        wasted = padding + (longest - n[i]) * width
        size = len(buckets[-1]) + 1 if buckets else 0
        full = size * longest * width > limit or size > (most or size)
        if not buckets or full or wasted > BUCKET_COST:
            buckets.append([])
            longest, wasted = n[i], 0
        buckets[-1].append(i)
        padding = wasted
    return [sorted(bucket) for bucket in buckets]


class Federation:
    """All clients of one federated problem.

    Args:
        clients: in any order; they are sorted by name.
        task: ``"binary"`` (labels 0 and 1), ``"multiclass"`` (labels 0..C-1) or ``"regression"``
            (labels are finite numbers, taken as they are).
        feature_names: one per column, for messages and figures; ``x0, x1, ...`` by default.
        n_classes: C for multiclass; by default 1 + the largest label.
        standardize: give models ``(x - mean) / std`` with the pooled mean and std of the TRAINING
            records (ddof 0; constant columns are only centred). Test records never enter.
        name: what the federation is called in results.
        source: how it was made (dataset options), kept in a run's config.
        dtype: of the features models see.

    Raises:
        ValueError: no client, two clients of one name, a client without training records, shapes
            that differ, NaN or infinite features (naming client, split, row and column), labels
            that are not valid for the task.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        *,
        task: Task = "binary",
        feature_names: Sequence[str] | None = None,
        n_classes: int | None = None,
        standardize: bool = True,
        name: str = "federation",
        source: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        clients = list(clients)
        if not clients:
            raise ValueError("a federation needs at least one client.")
        for client in clients:
            _check_client(client)
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype is {dtype}: must be torch.float32 or torch.float64.")
        if n_classes is not None and (isinstance(n_classes, bool) or n_classes != int(n_classes)):
            raise ValueError(f"n_classes is {n_classes!r}: must be a whole number.")
        if task not in ("binary", "multiclass", "regression"):
            raise ValueError(f"task is '{task}': must be 'binary', 'multiclass' or 'regression'.")
        if task == "regression" and n_classes is not None:
            raise ValueError(f"n_classes is {n_classes}: a regression has no classes.")
        clients = sorted(clients, key=lambda c: c.name)
        self.name = name
        self.task: Task = task
        self.source = dict(source or {})
        self.names = tuple(c.name for c in clients)
        for first, second in zip(self.names, self.names[1:], strict=False):
            if first == second:
                raise ValueError(f"two clients are called '{first}'; names must be unique.")
        groups = [c.group for c in clients]
        self.groups: NDArray[np.int64] | None = (
            None if any(g is None for g in groups) else np.array(groups, dtype=np.int64)
        )
        self.honest = torch.tensor([c.honest for c in clients])

        shape = _shape(clients[0])
        if feature_names is None and len(shape) == 1:
            feature_names = [f"x{j}" for j in range(shape[0])]
        self.feature_names = tuple(feature_names or ())
        self.feature_shape: tuple[int, ...] = tuple(shape)

        raw: dict[str, list[NDArray[np.float64]]] = {}
        labels: dict[str, list[NDArray[Any]]] = {}
        for split in ("train", "test", "validation"):
            parts = [
                _checked(c, split, self.feature_shape, self.feature_names, task) for c in clients
            ]
            raw[split], labels[split] = [x for x, _ in parts], [y for _, y in parts]
        if len(shape) == 1 and len(self.feature_names) != shape[0]:
            raise ValueError(
                f"{len(self.feature_names)} feature names for {shape[0]} feature columns."
            )
        highest = max(int(y.max()) for part in labels.values() for y in part if len(y))
        if task == "regression":
            highest = 0
        if task == "binary" and (highest > 1 or n_classes not in (None, 2)):
            raise ValueError(
                f"a binary federation has labels 0 and 1, not up to {max(highest, 1)} with "
                f"n_classes={n_classes}; use task='multiclass'."
            )
        if n_classes is not None and n_classes < 2:
            raise ValueError(f"n_classes is {n_classes}: there must be at least 2.")
        if n_classes is None and highest >= MOST_CLASSES:
            raise ValueError(
                f"label {highest} would make {highest + 1} classes: number the classes from 0, or "
                f"give n_classes."
            )
        if n_classes is not None and highest >= n_classes:
            raise ValueError(f"label {highest} is outside 0..{n_classes - 1} (n_classes).")
        self.n_classes = 0 if task == "regression" else n_classes or max(2, highest + 1)

        #: Training features in their own units, flattened to ``[n_k, d]``: what a client describes.
        self.clouds: list[NDArray[np.float64]] = [x.reshape(len(x), -1) for x in raw["train"]]
        sums = [feature_sums(torch.from_numpy(x)) for x in self.clouds]
        self.moments = Moments.of(
            torch.tensor([len(x) for x in self.clouds]),
            torch.stack([s for s, _ in sums]),
            torch.stack([q for _, q in sums]),
        )
        self.standardized = standardize
        mean = self.moments.mean.reshape(self.feature_shape)
        scale = self.moments.scale().reshape(self.feature_shape)

        def split_of(split: str) -> Split:
            features = []
            for x in raw[split]:
                values = torch.from_numpy(x)
                if standardize:
                    values = (values - mean) / scale
                values = values.to(dtype)
                if not bool(values.isfinite().all()):
                    raise ValueError(f"{split} features are too large for {dtype}.")
                features.append(values)
            target = torch.int64 if task == "multiclass" else dtype
            return Split(
                self.names, features, [torch.from_numpy(y).to(target) for y in labels[split]]
            )

        self.dtype = dtype
        self.train = split_of("train")
        self.test = split_of("test")
        self.validation = split_of("validation")

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.feature_shape))
        return (
            f"Federation('{self.name}', {len(self)} clients, {int(self.train.n.sum())} training "
            f"and {int(self.test.n.sum())} test records of {shape} features, {self.task})"
        )

    def digest(self) -> str:
        """Hash of every record and of what is known about the clients."""
        known = (
            self.names,
            self.task,
            self.n_classes,
            self.feature_shape,
            str(self.dtype),
            None if self.groups is None else self.groups.tolist(),
            self.honest.tolist(),
        )
        digest = hashlib.sha256(repr(known).encode())
        for split in (self.train, self.test, self.validation):
            for k in range(len(self)):
                for values in split.client(k):
                    digest.update(repr(tuple(values.shape)).encode())
                    digest.update(values.contiguous().numpy().tobytes())
        for cloud in self.clouds:
            digest.update(cloud.tobytes())
        return digest.hexdigest()

    @property
    def outputs(self) -> int:
        """Numbers a model puts out per record: 1 (binary: a logit), C for multiclass."""
        return self.n_classes if self.task == "multiclass" else 1


def _shape(client: Client) -> tuple[int, ...]:
    """Of one record of the first client, which the others must share."""
    try:
        shape = np.shape(client.train[0])
    except ValueError as error:
        raise ValueError(f"client '{client.name}': features must be an array ({error}).") from None
    if len(shape) < 2 or 0 in shape[1:]:
        raise ValueError(
            f"client '{client.name}': features have shape {list(shape)}; needed is [n, d] with at "
            f"least one column (x[:, None] makes a column of a single feature)."
        )
    return shape[1:]


def _check_client(client: Client) -> None:
    """What doesn't need the other clients."""
    if not isinstance(client, Client):
        raise ValueError(f"clients must be Client objects, got {type(client).__name__}.")
    name = client.name
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ValueError(f"client name {name!r}: must be printable text.")
    if name.startswith("("):
        raise ValueError(f"client name '{name}': names in brackets are for tables' own rows.")
    for split in ("train", "test", "validation"):
        part = getattr(client, split)
        if part is not None and not (isinstance(part, tuple | list) and len(part) == 2):
            raise ValueError(f"client '{name}', {split}: must be a pair (features, labels).")
    if client.train is None or np.size(client.train[1]) == 0:
        raise ValueError(f"client '{name}' has no training records; leave it out.")
    if not isinstance(client.honest, bool | np.bool_):
        raise ValueError(f"client '{name}': honest is {client.honest!r}, must be True or False.")
    if client.group is not None and not isinstance(client.group, int | np.integer):
        raise ValueError(f"client '{name}': group is {client.group!r}, must be a whole number.")


def _checked(
    client: Client, split: str, shape: tuple[int, ...], feature_names: Sequence[str], task: Task
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    where = f"client '{client.name}', {split} records"
    part = getattr(client, split)
    if part is None:
        part = np.empty((0, *shape)), np.empty(0)
    try:
        # A copy: what the caller does with the array later must not reach a run.
        x = np.asarray(part[0], dtype=np.float64).copy()
        y = np.asarray(part[1])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: features must be numbers ({error}).") from None
    if x.ndim < 2 or x.shape[1:] != shape:
        raise ValueError(
            f"{where}: features have shape {list(x.shape)}; "
            f"expected [n, {', '.join(map(str, shape))}] as for the first client."
        )
    if y.shape != (len(x),):
        raise ValueError(f"{where}: {len(x)} records but labels of shape {list(y.shape)}.")
    bad = np.argwhere(~(np.abs(x) < LARGEST))
    if len(bad):
        row, *column = bad[0]
        if len(column) == 1 and len(feature_names) == shape[0]:
            which = f"'{feature_names[column[0]]}' (column {column[0]})"
        else:
            which = f"{[int(c) for c in column]}"
        more = f"; {len(bad)} such values in all" if len(bad) > 1 else ""
        raise ValueError(
            f"{where}: feature {which} of row {row} is {x[tuple(bad[0])]}{more}. Features must "
            f"be finite (below {LARGEST:g}): fill or drop missing values first."
        )
    try:
        labels = y.astype(np.float64)
    except (TypeError, ValueError):
        labels = np.full(len(y), np.nan)
    if task == "regression":
        wrong = np.flatnonzero(~(np.abs(labels) < LARGEST))
        if len(wrong):
            raise ValueError(
                f"{where}: label of row {wrong[0]} is {y[wrong[0]].tolist()!r}; labels of a "
                f"regression are finite numbers (below {LARGEST:g})."
            )
        return x, labels
    # Compared as floats, so that NaN, infinities and numbers beyond int64 are refused too.
    wrong = np.flatnonzero(~((labels >= 0) & (labels < 2**31) & (labels == np.floor(labels))))
    if len(wrong):
        raise ValueError(
            f"{where}: label of row {wrong[0]} is {y[wrong[0]].tolist()!r}; "
            f"labels are whole numbers from 0 (0 and 1 for a binary task)."
        )
    return x, labels.astype(np.int64)
