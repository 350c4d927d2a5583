"""PACFL-style clustering. Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin: Efficient
Distribution Similarity Identification in Clustered Federated Learning via Principal Angles Between
Client Data Subspaces, AAAI 2023."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from .. import topology
from ..local import Facts, LocalProblem
from ..options import OptionError
from ..registry import register
from .base import Message, State
from .clustered import ClusteredAlgorithm

__all__ = ["PACFL"]


@register("pacfl")
class PACFL(ClusteredAlgorithm):
    """Clusters clients once by the angles between the main directions of their features.

    A client sends U_k, the top r right singular vectors of its feature matrix in its own units;
    two clients differ by the sum of the r principal angles, in degrees. Weights by records.
    """

    title: ClassVar[str] = "PACFL-style"
    paper: ClassVar[str] = "Vahidian et al., AAAI 2023"

    n_clusters: int = Field(2, ge=1, description="M, the number of clusters")
    rank: int = Field(3, ge=1, description="r, singular vectors a client sends; at most d and n_k")
    linkage: Literal["average", "complete"] = Field(
        "average", description="of the agglomerative clustering"
    )

    def introduce(self, problem: LocalProblem) -> Message:
        for name, cloud in zip(problem.names, problem.clouds, strict=True):
            if self.rank > min(cloud.shape):
                raise OptionError(
                    f"rank = {self.rank} singular vectors, but client '{name}' has {len(cloud)} "
                    f"training records of {cloud.shape[1]} features."
                )
        bases = [topology.subspace_basis(cloud, self.rank) for cloud in problem.clouds]
        return {"basis": torch.from_numpy(np.stack(bases))}

    def partition(self, introductions: Message, facts: Facts) -> State:
        self.check_count(self.n_clusters, facts)
        distances = topology.subspace_distances(introductions["basis"].numpy())
        labels = topology.partition_from_distances(distances, self.n_clusters, self.linkage)
        return {**introductions, "labels": torch.from_numpy(labels)}
