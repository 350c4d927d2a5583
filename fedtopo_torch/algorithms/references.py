"""References that use what no server could know: the true groups, and chance.

They run the same clustered training as pTopoFL, with weights by records.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from ..local import Facts
from ..randomness import generator
from ..registry import register
from .base import Message, State
from .clustered import ClusteredAlgorithm

__all__ = ["Oracle", "Random"]


@register("oracle")
class Oracle(ClusteredAlgorithm):
    """Clustered training on the true groups; one cluster where a federation has none."""

    title: ClassVar[str] = "Oracle"
    paper: ClassVar[str] = "reference, not deployable: knows the true groups"
    deployable: ClassVar[bool] = False

    def partition(self, introductions: Message, facts: Facts) -> State:
        if facts.groups is None:
            return {"labels": torch.zeros(len(facts.names), dtype=torch.int64)}
        _, labels = np.unique(facts.groups, return_inverse=True)
        return {"labels": torch.from_numpy(labels)}


@register("random")
class Random(ClusteredAlgorithm):
    """Clustered training on balanced clusters drawn by chance."""

    title: ClassVar[str] = "Random"
    paper: ClassVar[str] = "reference, not deployable: a partition by chance"
    deployable: ClassVar[bool] = False

    n_clusters: int = Field(2, ge=1, description="M; sizes differ by one at most")

    def partition(self, introductions: Message, facts: Facts) -> State:
        self.check_count(self.n_clusters, facts)
        balanced = torch.arange(len(facts.names)) % self.n_clusters
        order = generator(facts.seed, "random partition").permutation(len(facts.names))
        return {"labels": balanced[torch.from_numpy(order)]}
