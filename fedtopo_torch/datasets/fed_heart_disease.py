"""Fed-Heart-Disease: four hospitals, 920 patients, one yes-or-no question.

The table comes with the package (``heart_disease/``, whose README tells its columns, codes, origin
and licence). Source: Janosi, Steinbrunn, Pfisterer, Detrano, "Heart Disease", UCI Machine Learning
Repository, 1988 (CC BY 4.0). As a federation of hospitals: Ogier du Terrail et al., "FLamby:
Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare Settings",
NeurIPS 2022.
"""

from __future__ import annotations

import csv
import warnings
from importlib import resources
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator
from sklearn.model_selection import train_test_split

from ..federation import Client, Federation
from ..options import OptionError, did_you_mean, names_from_text
from ..registry import datasets
from .base import Dataset

__all__ = ["FEATURES", "HOSPITALS", "FedHeartDisease", "heart_table"]

#: The hospitals in the order of the table, which is also the order of the clients.
HOSPITALS = ("Cleveland", "Hungary", "Switzerland", "VA Long Beach")

#: The features used. slope, ca and thal are mostly missing outside Cleveland and are left out.
FEATURES = (
    "age",
    "sex",
    "cp",
    "trestbps",
    "chol",
    "fbs",
    "restecg",
    "thalach",
    "exang",
    "oldpeak",
)


def heart_table() -> dict[str, dict[str, NDArray[np.float64]]]:
    """The bundled table: hospital -> column -> values ``[n]``, NaN where missing, in file order.

    Columns are UCI's 14 (``FEATURES``, slope, ca, thal and num) with UCI's codes and units.
    """
    path = resources.files(__package__) / "heart_disease" / "heart_disease.csv"
    rows = list(csv.DictReader(path.read_text(encoding="ascii").splitlines()))
    table = {}
    for hospital in HOSPITALS:
        own = [row for row in rows if row["hospital"] == hospital]
        table[hospital] = {
            column: np.array([float(row[column] or "nan") for row in own])
            for column in rows[0]
            if column != "hospital"
        }
    return table


@datasets.register("fed_heart_disease")
class FedHeartDisease(Dataset):
    """Heart disease in four hospitals (UCI; 920 patients, ten features, real data).

    A client is a hospital (303, 294, 123 and 200 patients). The label is 1 when the angiogram
    showed disease (``num > 0``). Features ``x [n, 10]`` keep UCI's codes and units; models see
    ``(x - mean) / std``, with the pooled mean and std of all hospitals' training records.

    The split, so that others can reproduce it without this package: for each hospital in the order
    of ``HOSPITALS``, rows in file order, scikit-learn's ``train_test_split(numpy.arange(n),
    test_size=0.3, random_state=seed, stratify=label)``. It is the one draw that is not keyed by the
    client's name.

    A missing value is filled with the mean of its column over the observed values of all hospitals'
    TRAINING records, in training and test records alike. Test records influence nothing a model is
    trained on.

    The true group (for the oracle reference) is 1 for Switzerland and 0 for the others. What sets
    Switzerland apart is partly how it was recorded: chol is 0 for every Swiss patient and for 49 of
    Long Beach's 200, which is how a missing value was written there. Those zeros are kept, as
    FLamby keeps them, and in raw units they dominate the distances between patients;
    ``drop_columns="chol"`` shows what is left without them.

    Warns:
        UserWarning: under ``missing="drop"`` Switzerland keeps 46 patients of whom one is healthy,
            and one record can't be in both parts: that hospital is split without ``stratify``, with
            the same ``random_state``. The same holds for any hospital with a class of one record.

    Raises:
        OptionError: an option that is unknown or out of range, a column that does not exist.
    """

    paper: ClassVar[str] = (
        "Janosi, Steinbrunn, Pfisterer, Detrano: Heart Disease, UCI Machine Learning Repository, "
        "1988 (CC BY 4.0)"
    )

    missing: Literal["impute", "drop"] = Field(
        "impute",
        description="missing values: 'impute' fills the pooled training mean (920 patients), "
        "'drop' keeps the patients complete in the features used (740 with all ten)",
    )
    drop_columns: tuple[str, ...] = Field(
        (), description="features to leave out, separated by commas, for example chol,fbs"
    )
    test_size: float = Field(
        0.3, ge=0.05, le=0.95, description="share of each hospital's patients kept for testing"
    )

    _from_text = field_validator("drop_columns", mode="before")(names_from_text)

    @field_validator("drop_columns")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for column in value:
            if column not in FEATURES:
                # The message continues "option drop_columns = ... is not valid: must be".
                hint = did_you_mean(column, FEATURES).rstrip(".")
                raise ValueError(f"names of features, and '{column}' is none.{hint}")
        if set(value) == set(FEATURES):
            raise ValueError("fewer than all ten features")
        return tuple(column for column in FEATURES if column in value)

    @property
    def notes(self) -> tuple[str, ...]:
        if "chol" in self.drop_columns:
            return ()
        return (
            "chol is 0 for every Swiss patient and 49 of Long Beach's: UCI's way of writing "
            "'missing'. In raw units it dominates distances between patients and so the "
            "descriptors; --set drop_columns=chol or --set scale=pooled shows the partition "
            "without it.",
        )

    def load(self, seed: int) -> Federation:
        """Four clients named as in ``HOSPITALS``, split by ``seed``.

        Raises:
            OptionError: a seed that scikit-learn's split can't take (0 to 2**32 - 1).
        """
        if not 0 <= seed < 2**32:
            raise OptionError(f"seed = {seed}: {self.name} splits by seeds 0 to 2**32 - 1.")
        names = [f for f in FEATURES if f not in self.drop_columns]
        parts = {}
        for hospital, columns in heart_table().items():
            x = np.stack([columns[f] for f in names], axis=1)
            y = (columns["num"] > 0).astype(np.int64)
            if self.missing == "drop":
                complete = ~np.isnan(x).any(axis=1)
                x, y = x[complete], y[complete]
            train, test = self._split(hospital, y, seed)
            parts[hospital] = (x[train], y[train], x[test], y[test])

        fill = np.nanmean(np.concatenate([x for x, _, _, _ in parts.values()]), axis=0)

        def filled(x: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.where(np.isnan(x), fill, x)

        return Federation(
            self.held_out(
                [
                    Client(
                        hospital,
                        train=(filled(x), y),
                        test=(filled(x_test), y_test),
                        group=int(hospital == "Switzerland"),
                    )
                    for hospital, (x, y, x_test, y_test) in parts.items()
                ],
                seed,
            ),
            feature_names=names,
            name=self.name,
            source=self.source(seed),
            dtype=self.precision,
        )

    def _split(
        self, hospital: str, y: NDArray[np.int64], seed: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rarest = int(np.bincount(y, minlength=2).min())
        if rarest < 2:
            warnings.warn(
                f"{self.name}: of the {len(y)} patients of {hospital} only {rarest} are of one "
                f"class, so its split into training and test records is not stratified.",
                stacklevel=3,
            )
        train, test = train_test_split(
            np.arange(len(y)),
            test_size=self.test_size,
            random_state=seed,
            stratify=None if rarest < 2 else y,
        )
        return train, test
