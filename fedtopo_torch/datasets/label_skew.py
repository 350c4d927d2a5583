"""Clients that differ in how frequent the classes are, and in nothing else.

The generated federation is the label-skew federation of Vomo-Donfack, Hoszu, Ginot, Morilla,
"PTOPOFL: Topology-Guided Personalised Federated Learning with Persistent-Homology Client
Descriptors", 2026. The real tables come with scikit-learn: Wolberg, Mangasarian, Street, Street,
"Breast Cancer Wisconsin (Diagnostic)", UCI Machine Learning Repository, 1993; and the test part of
Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from sklearn.datasets import load_breast_cancer, load_digits

from ..federation import Client, Federation, Task
from ..options import OptionError, pair_from_text
from ..randomness import generator
from ..registry import datasets
from .base import Dataset
from .partitions import classes_partition, dirichlet_partition, iid_partition
from .split import Parts, split_notes, split_records

__all__ = ["LabelSkew"]

# scikit-learn's function and the task of each real table.
_TABLES: dict[str, tuple[Callable[[], Any], Task]] = {
    "breast_cancer": (load_breast_cancer, "binary"),
    "digits": (load_digits, "multiclass"),
}

# Options that mean something only under certain values of another option.
_ONLY: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("base", ("paper",), ("n_features", "separation", "prevalence", "n_min", "n_max")),
    ("base", tuple(_TABLES), ("partition", "alpha", "min_size", "classes_per_client")),
    ("partition", ("dirichlet",), ("alpha", "min_size")),
    ("partition", ("classes",), ("classes_per_client",)),
)


@datasets.register("label_skew")
class LabelSkew(Dataset):
    """Clients whose classes are more or less frequent: generated, or a real table divided up.

    ``base=paper`` (default) draws every client from one model. With d features and one random unit
    vector ``v [d]`` shared by all:

    - prevalence: client k's probability of label 1 is a draw of Uniform(prevalence);
    - label: y = 1 with that probability;
    - features: ``x | y ~ N((y - 1/2) * separation * v, I)``;
    - records: a uniform whole number from ``n_min`` to ``n_max``, ends included, training and test
      together.

    All draws are keyed by the seed and by what is drawn; those of client k belong to its number,
    so that client k is the same whatever ``n_clients`` is.

    The other two divide a real table among the clients: ``base=breast_cancer`` the 569 records of
    scikit-learn's ``load_breast_cancer`` (30 features; label 1 is benign, as there), a binary task;
    ``base=digits`` the 1,797 of ``load_digits`` (8 x 8 pixels of 0 to 16, row by row: 64 features;
    label: the digit), a multiclass task of ten classes.

    - ``partition=dirichlet``: each class in Dirichlet(alpha) shares,
      :func:`~fedtopo_torch.datasets.partitions.dirichlet_partition`;
    - ``partition=classes``: ``classes_per_client`` classes each,
      :func:`~fedtopo_torch.datasets.partitions.classes_partition`;
    - ``partition=iid``: at random, :func:`~fedtopo_torch.datasets.partitions.iid_partition`.

    In all, every client's own records are split at random: ``ceil(test_size * n)`` of n are for
    testing, but one is always left for training. The split is stratified by label where every
    class has two records and both parts have room for each class, else it is not. Models see the
    features standardised with the pooled training mean and std.

    Warns:
        UserWarning: clients that are split without stratifying, or have no test record.

    Raises:
        OptionError: an option that is unknown, out of range, or without meaning for this base or
            partition; a table that can't be divided as asked (the message says what to change).
    """

    paper: ClassVar[str] = (
        "Vomo-Donfack, Hoszu, Ginot, Morilla: PTOPOFL, 2026, label skew; Wolberg, Mangasarian, "
        "Street, Street: Breast Cancer Wisconsin (Diagnostic), UCI, 1993 (CC BY 4.0); Alpaydin, "
        "Kaynak: Optical Recognition of Handwritten Digits, UCI, 1998 (CC BY 4.0)"
    )

    base: Literal["paper", "breast_cancer", "digits"] = Field(
        "paper",
        description="where records come from: paper (generated), or a real table divided by "
        "partition: breast_cancer (569 records, 2 classes) or digits (1,797 records, 10 classes)",
    )
    n_clients: int = Field(10, ge=1, description="clients K")
    test_size: float = Field(
        0.3, ge=0.05, le=0.95, description="share of each client's records kept for testing"
    )
    n_features: int = Field(20, ge=1, description="features d (paper)")
    separation: float = Field(
        0.95,
        ge=0,
        description="distance of the two classes' means, in std (paper); 0 makes labels noise",
    )
    prevalence: tuple[float, float] = Field(
        (0.1, 0.9),
        description="range of a client's probability of label 1, inside [0, 1] (paper)",
    )
    n_min: int = Field(100, ge=1, description="fewest records of a client (paper)")
    n_max: int = Field(200, ge=1, description="most records of a client (paper)")
    partition: Literal["dirichlet", "classes", "iid"] = Field(
        "dirichlet", description="how the table is divided (breast_cancer, digits)"
    )
    alpha: float = Field(
        0.5,
        gt=0,
        description="concentration of the clients' shares in a class (dirichlet); small: a class "
        "lies with few clients, large: all alike",
    )
    min_size: int = Field(
        2, ge=1, description="fewest records of a client, training and test together (dirichlet)"
    )
    classes_per_client: int = Field(
        1, ge=1, description="classes that a client holds, up to all of the table's (classes)"
    )

    _from_text = field_validator("prevalence", mode="before")(pair_from_text)

    @field_validator("prevalence")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= value[0] <= value[1] <= 1:
            raise ValueError("two numbers LOW,HIGH with 0 <= LOW <= HIGH <= 1")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> LabelSkew:
        for switch, wanted, options in _ONLY:
            if getattr(self, switch) in wanted:
                continue
            for option in options:
                # By value and not by what was given: a run's record lists every option.
                if getattr(self, option) != type(self).model_fields[option].default:
                    raise ValueError(
                        f"option {option} is used only with {switch}={' or '.join(wanted)} "
                        f"(here {switch} = {getattr(self, switch)}); leave it out"
                    )
        if self.n_min > self.n_max:
            raise ValueError(f"n_min = {self.n_min} must not be above n_max = {self.n_max}")
        return self

    def load(self, seed: int) -> Federation:
        """``n_clients`` clients called client_00, client_01, ..., whose names sort by number.

        Raises:
            OptionError: a table that can't be divided as asked.
        """
        task: Task = "binary"
        feature_names = n_classes = None
        if self.base == "paper":
            records = [self._generated(seed, k) for k in range(self.n_clients)]
        else:
            load_table, task = _TABLES[self.base]
            table = load_table()
            feature_names = [str(name) for name in table.feature_names]
            n_classes = len(table.target_names)
            divided = self._divided(seed, table.target)
            records = [(table.data[rows], table.target[rows]) for rows in divided]
        width = max(2, len(str(self.n_clients - 1)))
        parts: dict[str, Parts] = {}
        clients = []
        for k, (x, y) in enumerate(records):
            name = f"client_{k:0{width}}"
            # Keyed by the number, since the padding of the name depends on n_clients.
            rng = generator(seed, "label_skew: split", client=str(k))
            train, test, _ = parts[name] = split_records(y, self.test_size, rng)
            clients.append(Client(name, train=(x[train], y[train]), test=(x[test], y[test])))
        for note in split_notes(parts):
            warnings.warn(f"{self.name}: {note}", stacklevel=2)
        return Federation(
            self.held_out(clients, seed),
            task=task,
            n_classes=n_classes,
            feature_names=feature_names,
            name=self.name,
            source=self.source(seed),
            dtype=self.precision,
        )

    def direction(self, seed: int) -> NDArray[np.float64]:
        """The unit vector v ``[d]`` along which the classes of ``base=paper`` lie apart."""
        draw = generator(seed, "label_skew: direction").standard_normal(self.n_features)
        unit: NDArray[np.float64] = draw / np.sqrt(np.square(draw).sum())
        return unit

    def _generated(self, seed: int, k: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        def draws(what: str) -> np.random.Generator:
            return generator(seed, f"label_skew: {what}", client=str(k))

        n = int(draws("size").integers(self.n_min, self.n_max + 1))
        p = draws("prevalence").uniform(*self.prevalence)
        y = (draws("labels").random(n) < p).astype(np.int64)
        x = draws("features").standard_normal((n, self.n_features))
        x += (y[:, None] - 0.5) * self.separation * self.direction(seed)
        return x, y

    def _divided(self, seed: int, labels: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        rng = generator(seed, "label_skew: partition")
        try:
            if self.partition == "dirichlet":
                return dirichlet_partition(labels, self.n_clients, self.alpha, rng, self.min_size)
            if self.partition == "classes":
                return classes_partition(labels, self.n_clients, self.classes_per_client, rng)
            return iid_partition(labels, self.n_clients, rng)
        except ValueError as error:
            raise OptionError(f"{self.name}: {error}") from None
