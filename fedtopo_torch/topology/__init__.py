"""What pTopoFL is made of, usable alone: descriptors, partitions, trust.

Knows nothing of federated-learning code: arrays in, arrays out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .descriptor import (
    FEATURE_NAMES,
    MIN_RECORDS,
    N_FEATURES,
    as_cloud,
    cloud_size,
    descriptor,
    descriptors,
    diagrams,
    half_descriptors,
    halves,
    summarise,
)
from .partition import (
    LINKAGES,
    Choice,
    choose_n_clusters,
    evidence,
    guaranteed_radius,
    partition,
    partition_from_distances,
    reproducibility,
    stability_radius,
)
from .subspace import subspace_basis, subspace_distances
from .trust import TRUST_RULES, member_weights, outlyingness, robust_scores, trust_weights

if TYPE_CHECKING:
    from .transformer import PHDescriptor

__all__ = [
    "FEATURE_NAMES",
    "LINKAGES",
    "MIN_RECORDS",
    "N_FEATURES",
    "TRUST_RULES",
    "Choice",
    "PHDescriptor",
    "as_cloud",
    "choose_n_clusters",
    "cloud_size",
    "descriptor",
    "descriptors",
    "diagrams",
    "evidence",
    "guaranteed_radius",
    "half_descriptors",
    "halves",
    "member_weights",
    "outlyingness",
    "partition",
    "partition_from_distances",
    "reproducibility",
    "robust_scores",
    "stability_radius",
    "subspace_basis",
    "subspace_distances",
    "summarise",
    "trust_weights",
]


def __getattr__(name: str) -> Any:
    if name == "PHDescriptor":  # loads scikit-learn, half a second
        from .transformer import PHDescriptor

        return PHDescriptor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
