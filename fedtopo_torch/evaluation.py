"""How models are scored: per client, per cluster and pooled, and the long table of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .federation import Federation, Split
from .objective import Data, Objective
from .options import OptionError, did_you_mean

__all__ = [
    "LOWER_IS_BETTER",
    "METRICS",
    "METRICS_OF",
    "METRIC_TITLES",
    "PER_CLIENT_LIMIT",
    "POOLED",
    "Evaluator",
    "History",
    "Row",
    "Score",
    "accuracy",
    "auc",
    "client_mean",
]

METRICS = ("log_loss", "auc", "accuracy")
#: By task, the headline first.
METRICS_OF: dict[str, tuple[str, ...]] = {
    "binary": METRICS,
    "multiclass": METRICS,
    "regression": ("rmse", "r2"),
}

#: How metrics are called in tables and charts.
METRIC_TITLES = {
    "log_loss": "log-loss",
    "auc": "AUC",
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "r2": "R2",
}
#: Metrics of which less is better; of the others more is.
LOWER_IS_BETTER = ("log_loss", "rmse")

#: Above this many clients a run keeps per-client values of its last evaluation only.
PER_CLIENT_LIMIT = 50

#: In the ``client`` column of the long table: all honest clients' records together.
POOLED = "(pooled)"
#: In the same column: the unweighted mean of the honest clients whose value is defined.
CLIENT_MEAN = "(mean of clients)"


def auc(scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Area under the ROC curve of every row, by ranks; ties count one half.

    AUC = P(score of a positive > score of a negative) + P(equal) / 2, the Mann-Whitney statistic.
    All rows are computed together; equal to scikit-learn's ``roc_auc_score`` to 1e-12.

    Args:
        scores: ``[k, n]``, any monotone score (logits are fine), finite.
        labels: ``[k, n]`` of 0 and 1.
        mask: ``[k, n]`` of 1 and 0, or None when every entry counts.

    Returns:
        ``[k]`` float64, NaN where a row has one class only.
    """
    real = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask > 0
    positive = (labels > 0) & real
    negative = (labels <= 0) & real
    infinity = torch.full_like(scores, math.inf)
    # Everything but the negatives is moved behind all scores, so it is never counted below one.
    others = torch.where(negative, scores, infinity).sort(dim=1).values
    scores = scores.contiguous()
    below = torch.searchsorted(others, scores, side="left")
    up_to = torch.searchsorted(others, scores, side="right")
    wins = torch.where(positive, below + up_to, torch.zeros_like(below)).sum(1)
    pairs = positive.sum(1) * negative.sum(1)
    # Twice the count of won pairs is a whole number, so the only rounding is one division.
    value = wins.to(torch.float64) / (2 * pairs).to(torch.float64)
    return torch.where(pairs > 0, value, torch.full_like(value, math.nan))


def accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    """1 where a record is classified right, else 0, shaped as the labels.

    A binary logit above 0 (probability above one half) is class 1.
    """
    predicted = outputs > 0 if outputs.ndim == labels.ndim else outputs.argmax(-1)
    return (predicted.to(labels.dtype) == labels).to(torch.float64)


def client_mean(values: Tensor, honest: Tensor | None = None) -> tuple[float, int]:
    """Mean over the (honest) clients whose value is not NaN, and how many they are.

    The mean of no client is NaN.
    """
    keep = ~values.isnan()
    if honest is not None:
        keep &= honest
    count = int(keep.sum())
    return (float(values[keep].mean()) if count else math.nan), count


class Score(NamedTuple):
    """One metric on one split.

    Attributes:
        pooled: over all honest clients' records together.
        clients: per client ``[K]``, NaN where undefined.
        clusters: per cluster ``[M]`` over its honest clients' records, or None without clusters.
        labels: the cluster of each client ``[K]``, or None.
    """

    pooled: float
    clients: Tensor
    clusters: Tensor | None = None
    labels: Tensor | None = None


class _Kept(NamedTuple):
    """A score as a history keeps it."""

    pooled: float
    clients: list[float]
    clusters: list[float] | None
    labels: Tensor | None

    @classmethod
    def of(cls, score: Score) -> _Kept:
        clusters = None if score.clusters is None else score.clusters.tolist()
        return cls(score.pooled, score.clients.tolist(), clusters, score.labels)

    def score(self) -> Score:
        """The score again."""
        clients = torch.tensor(self.clients, dtype=torch.float64)
        clusters = self.clusters
        by_cluster = None if clusters is None else torch.tensor(clusters, dtype=torch.float64)
        return Score(self.pooled, clients, by_cluster, self.labels)


def _tuples(scores: dict[tuple[str, str], Any]) -> dict[tuple[str, str], tuple[Any, ...]]:
    return {key: tuple(score) for key, score in scores.items()}


class Evaluator:
    """Scores rows of models on chosen splits with chosen metrics.

    Args:
        federation: whose data.
        objective: lays out the data and runs the model (evaluation mode).
        splits: of ``"train"``, ``"test"``, ``"validation"``.
        metrics: of the task's :data:`METRICS_OF`, all of them by default. ``log_loss`` in nats,
            from logits; ``auc`` for multi-class is the mean of one-against-the-rest over the
            classes present; ``accuracy`` in [0, 1]; ``rmse`` in units of the target; ``r2`` = 1 -
            sum (f - y)^2 / sum (y - mean)^2, at most 1, the mean being that of the records scored.

    Raises:
        OptionError: an unknown metric or split, or a split in which nobody has a record.
    """

    def __init__(
        self,
        federation: Federation,
        objective: Objective,
        splits: Sequence[str] = ("train", "test"),
        metrics: Sequence[str] | None = None,
    ) -> None:
        splits = (splits,) if isinstance(splits, str) else splits
        metrics = (metrics,) if isinstance(metrics, str) else metrics
        known = METRICS_OF[federation.task]
        metrics = known if metrics is None else metrics
        for metric in metrics:
            if metric not in known:
                raise OptionError(
                    f"there is no metric '{metric}' for a {federation.task} task."
                    + did_you_mean(metric, known)
                )
        self.metrics = tuple(metrics)
        self.objective = objective
        self.honest = federation.honest
        self.n: dict[str, Tensor] = {}
        self._data: dict[str, list[Data]] = {}
        self._share: dict[str, Tensor] = {}
        self._left_out: dict[str, Tensor | None] = {}
        for name in splits:
            if name not in ("train", "test", "validation"):
                raise OptionError(f"there is no split '{name}': train, test or validation.")
            split: Split = getattr(federation, name)
            counted = split.n * self.honest
            if int(counted.sum()) == 0:
                hint = " Give validation_size, for example 0.2." if name == "validation" else ""
                raise OptionError(
                    f"no honest client has a {name} record: nothing to score on.{hint}"
                )
            self.n[name] = split.n
            left_out = (counted == 0).to(objective.device)
            self._left_out[name] = left_out if bool(left_out.any()) else None
            self._data[name] = objective.data(split)
            share = counted.to(federation.dtype) / int(counted.sum())
            self._share[name] = share.to(objective.device)
        self.size = len(federation)

    def __call__(
        self, theta: Tensor, clusters: Tensor | None = None
    ) -> dict[tuple[str, str], Score]:
        """Scores by ``(split, metric)`` of models theta ``[K, p]``, row k on client k.

        Args:
            clusters: the cluster of each client ``[K]``, to score clusters too.
        """
        if clusters is not None and (clusters.shape != (self.size,) or int(clusters.min()) < 0):
            raise ValueError(
                f"clusters are {clusters.tolist()[:20]}; needed is a number from 0 for each of "
                f"{self.size} clients."
            )
        theta = theta.to(self.objective.device)
        scores = {}
        # Not kept: bound methods in an object would keep it, and all data, until the collector ran.
        special = {"auc": self._auc, "rmse": self._errors, "r2": self._errors}
        for split, parts in self._data.items():
            outputs = [
                self.objective.outputs(
                    theta if len(parts) == 1 and len(d.rows) == self.size else theta[d.rows], d
                )
                for d in parts
            ]
            for metric in self.metrics:
                compute = special.get(metric, self._mean)
                scores[split, metric] = _home(compute(split, metric, outputs, clusters))
        return scores

    def _gather(self, parts: list[Data], values: list[Tensor]) -> Tensor:
        """Per-client values of all buckets in the order of clients; NaN without records."""
        if len(parts) == 1 and len(parts[0].rows) == self.size:
            return values[0]
        gathered = torch.full(
            (self.size,), math.nan, dtype=values[0].dtype, device=values[0].device
        )
        for data, value in zip(parts, values, strict=True):
            gathered[data.rows] = value
        return gathered

    def _mean(
        self, split: str, metric: str, outputs: list[Tensor], clusters: Tensor | None
    ) -> Score:
        parts = self._data[split]
        per_record = self.objective.record_loss if metric == "log_loss" else accuracy
        values = [
            d.total(per_record(out, d.labels)).mul_(d.inverse_n)
            for d, out in zip(parts, outputs, strict=True)
        ]
        per_client = self._gather(parts, values)
        share = self._share[split]
        # What has a share of 0 may be NaN, and must not spread.
        left_out = self._left_out[split]
        defined = per_client if left_out is None else per_client.masked_fill(left_out, 0.0)
        pooled = float(torch.dot(defined.to(share.dtype), share))
        by_cluster = None
        if clusters is not None:
            groups = torch.nn.functional.one_hot(clusters).to(share) * share[:, None]
            by_cluster = (groups * defined[:, None]).sum(0) / groups.sum(0)
        return Score(pooled, per_client, by_cluster, clusters)

    def _errors(
        self, split: str, metric: str, outputs: list[Tensor], clusters: Tensor | None
    ) -> Score:
        """RMSE or R2, from each client's squared errors and labels around the client's mean."""
        parts, n = self._data[split], self.n[split].to(torch.float64)
        own = self.honest & (n > 0)
        errors = self._gather(
            parts,
            [
                d.total((out - d.labels).square().to(torch.float64))
                for d, out in zip(parts, outputs, strict=True)
            ],
        ).cpu()
        levels, within = self._spread(parts, own)

        def value(groups: Tensor) -> Tensor:
            """Per group of clients, the columns of ``[K, M]`` of 1 and 0."""
            count = n @ groups
            if metric == "rmse":
                return ((errors @ groups) / count).sqrt()
            means = (n * levels) @ groups / count
            between = n[:, None] * (levels[:, None] - means).square() * groups
            return _explained(
                errors @ groups, within @ groups + between.sum(0), (n * levels.square()) @ groups
            )

        # What has no say may be NaN, and must not spread.
        if metric == "rmse":
            per_client = (errors / n).sqrt()
        else:
            per_client = _explained(errors, within, torch.zeros_like(within))
        errors, levels, within = (v.where(own, 0.0) for v in (errors, levels, within))
        n = n * own
        by_cluster = None
        if clusters is not None:
            by_cluster = value(torch.nn.functional.one_hot(clusters).to(torch.float64))
        return Score(float(value(torch.ones_like(n)[:, None])), per_client, by_cluster, clusters)

    def _spread(self, parts: list[Data], own: Tensor) -> tuple[Tensor, Tensor]:
        """Each client's mean label, as seen from the first client's first, and its sum of squared
        deviations from it ``[K]``; constant labels give exact zeros."""
        firsts, means, within = [], [], []
        for data in parts:
            labels = data.labels.to(torch.float64)
            shift = labels - labels[:, :1]
            mean = data.total(shift) / data.n
            firsts.append(labels[:, 0])
            means.append(mean)
            within.append(data.total((shift - mean[:, None]).square()))
        first = self._gather(parts, firsts).cpu()
        level = first - first[own][0] + self._gather(parts, means).cpu()
        return level, self._gather(parts, within).cpu()

    def _auc(
        self, split: str, metric: str, outputs: list[Tensor], clusters: Tensor | None
    ) -> Score:
        parts = self._data[split]
        per_client = self._gather(
            parts, [_auc_of(out, d.labels, d.mask) for d, out in zip(parts, outputs, strict=True)]
        )
        flat_scores, flat_labels, owners = [], [], []
        for data, out in zip(parts, outputs, strict=True):
            rows = data.rows.to(data.labels.device)
            keep = self.honest.to(rows.device)[rows][:, None].expand(data.labels.shape)
            if data.mask is not None:
                keep = keep & (data.mask > 0)
            flat_scores.append(out[keep])
            flat_labels.append(data.labels[keep])
            owners.append(rows[:, None].expand(data.labels.shape)[keep])
        scores, labels, owner = torch.cat(flat_scores), torch.cat(flat_labels), torch.cat(owners)
        pooled = float(_auc_of(scores[None], labels[None], None))
        by_cluster = None
        if clusters is not None:
            groups = clusters.to(owner.device)[owner]
            by_cluster = torch.stack(
                [
                    _auc_of(scores[None, groups == j], labels[None, groups == j], None)[0]
                    for j in range(int(clusters.max()) + 1)
                ]
            )
        return Score(pooled, per_client, by_cluster, clusters)


def _explained(errors: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """R2; NaN where labels are all the same, so that nothing is left to explain.

    Args:
        errors: sums of squared errors.
        total: sums of squared deviations of labels from their mean.
        squares: what a total may be a rounding error of.
    """
    known = total > 1e-28 * squares
    return torch.where(known, 1 - errors / total, torch.full_like(total, math.nan))


def _home(score: Score) -> Score:
    """A score on the CPU."""
    by_cluster = None if score.clusters is None else score.clusters.cpu()
    return Score(score.pooled, score.clients.cpu(), by_cluster, score.labels)


def _auc_of(outputs: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    """AUC per row; for ``[k, n, C]`` the mean over classes present of one against the rest."""
    if outputs.ndim == labels.ndim:
        return auc(outputs, labels, mask)
    # Probabilities rank records across each other; raw logits carry a constant of their own.
    outputs = outputs.log_softmax(-1)
    per_class = torch.stack(
        [auc(outputs[..., c], (labels == c).long(), mask) for c in range(outputs.shape[-1])]
    )
    return per_class.nanmean(0)


class Row(NamedTuple):
    """One line of the long table.

    ``client`` is a client's name, ``(pooled)``, ``(mean of clients)`` or ``(cluster j)``; ``n`` is
    the number of records behind the value, for a mean of clients the number of clients.
    """

    seed: int
    round: int
    client: str
    split: str
    model: str
    metric: str
    value: float
    n: int


class History:
    """The scores of a run, round by round.

    Pooled values are kept for every evaluated round; per-client and per-cluster values too for up
    to :data:`PER_CLIENT_LIMIT` clients, beyond that for the last evaluated round only, so that
    memory does not grow with clients times rounds.
    """

    def __init__(
        self, names: Sequence[str], n: dict[str, Tensor], honest: Tensor, seed: int = 0
    ) -> None:
        self.names = tuple(names)
        self.n = n
        self.honest = honest
        self.seed = seed
        # One entry per evaluated round, appended whole: an interrupt leaves no half of one. Plain
        # numbers: thousands of small tensors would fragment memory.
        self._pooled: list[tuple[int, dict[tuple[str, str], float]]] = []
        self._detail: list[tuple[int, dict[tuple[str, str], _Kept]]] = []
        self._last: dict[tuple[str, str], Score] = {}
        #: Scores of the one shared model at the end, where a method has one.
        self.shared: dict[tuple[str, str], Score] = {}

    def add(self, round: int, scores: dict[tuple[str, str], Score]) -> None:
        """Add one evaluated round.

        Args:
            round: its number.
            scores: by ``(split, metric)``, what the evaluator returned.
        """
        kept = round, {key: _Kept.of(score) for key, score in scores.items()}
        if len(self.names) > PER_CLIENT_LIMIT:
            self._detail = [kept]
        else:
            self._detail.append(kept)
        self._last = scores
        self._pooled.append((round, {key: score.pooled for key, score in scores.items()}))

    def state(self) -> dict[str, Any]:
        """Everything in it, as a checkpoint can hold it."""
        return {
            "pooled": self._pooled,
            "detail": [(round, _tuples(scores)) for round, scores in self._detail],
            "last": _tuples(self._last),
        }

    @classmethod
    def of(cls, state: dict[str, Any], fresh: History) -> History:
        """The history that :meth:`state` was taken of; ``fresh`` is an empty one of that run."""
        fresh._pooled = list(state["pooled"])
        fresh._detail = [
            (round, {key: _Kept(*score) for key, score in scores.items()})
            for round, scores in state["detail"]
        ]
        fresh._last = {key: Score(*score) for key, score in state["last"].items()}
        return fresh

    def replay(self) -> Iterator[tuple[int, dict[tuple[str, str], Score]]]:
        """The scores of all evaluated rounds again; without clients where they were not kept."""
        detail = dict(self._detail)
        for round, pooled in self._pooled:
            if round in detail:
                yield round, {key: kept.score() for key, kept in detail[round].items()}
            else:
                nobody = torch.full((len(self.names),), math.nan, dtype=torch.float64)
                yield round, {key: Score(value, nobody) for key, value in pooled.items()}

    @property
    def rounds(self) -> list[int]:
        """The evaluated rounds."""
        return [round for round, _ in self._pooled]

    def keys(self) -> list[tuple[str, str]]:
        """The ``(split, metric)`` pairs that were evaluated."""
        return list(self._pooled[-1][1]) if self._pooled else []

    def pooled(self, split: str = "test", metric: str = "log_loss") -> np.ndarray:
        """The pooled metric at every evaluated round."""
        return np.array([scores[split, metric] for _, scores in self._pooled])

    def last(self, split: str = "test", metric: str = "log_loss") -> Score:
        """The score at the last evaluated round.

        Raises:
            KeyError: that split and metric were not evaluated.
        """
        if (split, metric) not in self.keys():
            raise KeyError(f"no {metric} of {split} was evaluated, only {self.keys()}.")
        return self._last[split, metric]

    def rows(self) -> Iterator[Row]:
        """The long table, by round. Values of nobody's records are left out."""
        detail = dict(self._detail)
        for round, pooled in self._pooled:
            for (split, metric), value in pooled.items():
                if round in detail:
                    kept = detail[round][split, metric]
                    yield from self._rows_of(round, split, "personal", metric, kept)
                else:
                    n = int((self.n[split] * self.honest).sum())
                    yield self._row(round, POOLED, split, "personal", metric, value, n)
        for (split, metric), score in self.shared.items():
            kept = _Kept.of(score)
            yield from self._rows_of(self.rounds[-1], split, "shared", metric, kept)

    def _row(
        self, round: int, client: str, split: str, model: str, metric: str, value: float, n: int
    ) -> Row:
        return Row(self.seed, round, client, split, model, metric, float(value), int(n))

    def _rows_of(
        self, round: int, split: str, model: str, metric: str, score: _Kept
    ) -> Iterator[Row]:
        n = self.n[split]
        total = int((n * self.honest).sum())
        yield self._row(round, POOLED, split, model, metric, score.pooled, total)
        mean, count = client_mean(torch.tensor(score.clients, dtype=torch.float64), self.honest)
        yield self._row(round, CLIENT_MEAN, split, model, metric, mean, count)
        if score.clusters is not None:
            for j, value in enumerate(score.clusters):
                members = int((n * self.honest * (score.labels == j)).sum())
                if members:
                    yield self._row(round, f"(cluster {j})", split, model, metric, value, members)
        for name, value, count in zip(self.names, score.clients, n.tolist(), strict=True):
            if count:
                yield self._row(round, name, split, model, metric, value, count)
