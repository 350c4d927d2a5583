"""The descriptor as a scikit-learn transformer.

Apart from ``descriptor.py`` because its base class loads scikit-learn, half a second that a run
without topology should not pay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted

from .descriptor import FEATURE_NAMES, cloud_size, descriptors, named_clouds

__all__ = ["PHDescriptor"]


class PHDescriptor(TransformerMixin, BaseEstimator):
    """Persistent-homology descriptors of point clouds: ``[X_1, ..., X_K] -> [K, 46]``.

    ``fit`` learns the size m of the subsamples (and, when asked, pooled moments); ``transform``
    describes each cloud. Formulas: ``fedtopo_torch.topology.descriptor``.

    Args:
        n_sub: most records in a subsample, at least 1.
        repeats: subsamples averaged per cloud, at least 1.
        scale: ``"raw"`` keeps the features' own units; ``"pooled"`` standardises them with the
            mean and standard deviation (ddof 0) over all records of all clouds seen by ``fit``,
            constant columns divided by 1.
        random_state: the seed, an integer. Draws are keyed by it and by the cloud's name, so a
            cloud's row does not depend on the other clouds, on their order, or on ``n_jobs``.
        n_jobs: threads, as in joblib.

    Attributes:
        size_: m = min(n_sub, smallest n_k among clouds of at least 20 records).
        mean_, scale_: ``[d]``, only with ``scale="pooled"``.

    Raises:
        ValueError: an option out of range, a cloud that ``as_cloud`` refuses, names missing or
            repeated, or (``scale="pooled"``) clouds with different numbers of columns.

    Example:
        >>> phi = PHDescriptor(n_jobs=2).fit_transform([X_1, X_2], names=["north", "south"])
    """

    def __init__(
        self,
        n_sub: int = 80,
        repeats: int = 5,
        scale: str = "raw",
        random_state: int = 0,
        n_jobs: int | None = None,
    ) -> None:
        self.n_sub = n_sub
        self.repeats = repeats
        self.scale = scale
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(
        self, X_list: Iterable[Any], y: None = None, names: Sequence[str] | None = None
    ) -> PHDescriptor:
        """Learn ``size_`` and, with ``scale="pooled"``, ``mean_`` and ``scale_``."""
        if self.scale not in ("raw", "pooled"):
            raise ValueError(f'scale must be "raw" or "pooled", got {self.scale!r}')
        clouds, names = named_clouds(X_list, names)
        self.size_ = cloud_size([len(cloud) for cloud in clouds], self.n_sub)
        if self.scale == "pooled":
            for cloud, name in zip(clouds, names, strict=True):
                _same_columns(cloud, name, clouds[0].shape[1])
            moments = StandardScaler().fit(np.concatenate(clouds))
            self.mean_, self.scale_ = moments.mean_, moments.scale_
        return self

    def transform(self, X_list: Iterable[Any], names: Sequence[str] | None = None) -> np.ndarray:
        """Describe each cloud.

        Args:
            X_list: K arrays ``[n_k, d]``.
            names: K different names that key the draws; ``"0", "1", ...`` by default.

        Returns:
            ``[K, 46]``, rows of unit length (zeros for a cloud without a bar).
        """
        check_is_fitted(self, "size_")
        clouds, names = named_clouds(X_list, names)
        if self.scale == "pooled":
            for cloud, name in zip(clouds, names, strict=True):
                _same_columns(cloud, name, len(self.mean_))
            clouds = [(cloud - self.mean_) / self.scale_ for cloud in clouds]
        return descriptors(
            clouds,
            names,
            seed=self.random_state,
            size=self.size_,
            repeats=self.repeats,
            n_jobs=self.n_jobs,
        )

    def fit_transform(
        self, X_list: Iterable[Any], y: None = None, names: Sequence[str] | None = None
    ) -> np.ndarray:
        """``fit`` then ``transform`` on the same clouds and names."""
        X_list = list(X_list)
        return self.fit(X_list, names=names).transform(X_list, names=names)

    def get_feature_names_out(self, input_features: None = None) -> np.ndarray:
        """The 46 names: curve_0_00 ... curve_1_19, entropy_0, ..., count_1."""
        return np.array(FEATURE_NAMES, dtype=object)


def _same_columns(cloud: np.ndarray, name: str, columns: int) -> None:
    if cloud.shape[1] != columns:
        raise ValueError(
            f'client {name!r} has {cloud.shape[1]} columns, expected {columns}: scale="pooled" '
            "standardises column by column, so all clouds need the same ones"
        )
