"""pTopoFL. Vomo-Donfack, Hoszu, Ginot, Morilla: pTopoFL: Topology-Guided Personalised Federated
Learning with Persistent-Homology Client Descriptors, 2026."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from .. import topology
from ..local import Facts, LocalProblem
from ..options import OptionError
from ..registry import register
from .base import Message, State
from .clustered import ClusteredAlgorithm

__all__ = ["PTopoFL"]

# Reproducibility costs twelve descriptors per client; a report leaves it out above this many.
REPORT_LIMIT = 20


@register("ptopofl")
class PTopoFL(ClusteredAlgorithm):
    """Clusters clients once by 46 persistent-homology numbers of their features, then trains them.

    Descriptor phi_k, partition and trust t_k are those of :mod:`fedtopo_torch.topology`; weights
    are w_k proportional to n_k exp(-|phi_k - centroid of its cluster|) t_k.

    ``describe=LAYER`` describes, instead of features, what that layer of the initial model puts
    out for a client's training records (evaluation mode, flattened, ``[n_k, q]``). Everybody knows
    the initial model, so nothing more is sent. It sees features as models do, standardised.

    Limits: contraction, drift bound and the calibration of alpha from abar are proved for strongly
    convex losses and plain gradient steps. For a network they are a heuristic: the blending reached
    may differ from abar (``alpha`` sets it directly), and descriptors of random features tell of
    the records' geometry only as far as an untrained layer keeps it.
    """

    title: ClassVar[str] = "pTopoFL"
    paper: ClassVar[str] = "Vomo-Donfack, Hoszu, Ginot, Morilla, 2026"

    n_clusters: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        2, description="M, or 'auto': the clearest reproducible number of clusters, else one"
    )
    weights: Literal["descriptor", "uniform"] = Field(
        "descriptor", description="by closeness to the centroid and trust, or by records only"
    )
    trust: Literal["robust", "mean_std", "off"] = Field(
        "robust", description="how far-off descriptors are down-weighted"
    )
    linkage: Literal["ward", "average", "complete"] = Field(
        "ward", description="of the agglomerative clustering"
    )
    scale: Literal["raw", "pooled"] = Field(
        "raw", description="describe features in their own units, or standardised by pooled moments"
    )
    describe: str = Field(
        "features",
        description="what is described: features, or the name of a layer of the initial model, "
        "whose activations are (act1 of model mlp; a wrong name lists them)",
    )
    n_sub: int = Field(80, ge=2, description="records per subsample of the descriptor, at most")
    repeats: int = Field(5, ge=1, description="subsamples averaged in a descriptor")

    @model_validator(mode="after")
    def _consistent(self) -> PTopoFL:
        if self.describe != "features" and self.scale == "pooled":
            raise ValueError(
                f"scale = pooled is for features: activations of a layer (describe = "
                f"{self.describe}) have no pooled moments; leave scale out"
            )
        return self

    def described(self, problem: LocalProblem) -> Sequence[NDArray[np.float64]]:
        if self.describe != "features":
            try:
                return problem.activations(self.describe)
            except ValueError as error:
                raise OptionError(f"describe = {self.describe}: {error}") from error
        if self.scale == "raw":
            return problem.clouds
        assert problem.facts is not None
        mean, scale = problem.facts.mean.numpy(), problem.facts.scale.numpy()
        return [(cloud - mean) / scale for cloud in problem.clouds]

    def _settings(self, facts: Facts) -> dict[str, int]:
        size = min(self.n_sub, facts.smallest)
        return {"seed": facts.seed, "size": size, "repeats": self.repeats}

    def _halves(
        self, clouds: Sequence[NDArray[np.float64]], names: Sequence[str], facts: Facts
    ) -> Tensor:
        """Descriptors of random halves of every client's records ``[k, 6, 2, 46]``."""
        return torch.from_numpy(topology.halves(clouds, names, **self._settings(facts)))

    def introduce(self, problem: LocalProblem) -> Message:
        facts = problem.facts
        assert facts is not None
        clouds = self.described(problem)
        phi = topology.descriptors(clouds, problem.names, **self._settings(facts))
        message = {"descriptor": torch.from_numpy(phi)}
        if self.n_clusters == "auto":
            message["halves"] = self._halves(clouds, problem.names, facts)
        return message

    def partition(self, introductions: Message, facts: Facts) -> State:
        assert facts.n is not None
        phi = introductions["descriptor"].numpy()
        m = self.n_clusters
        if m == "auto":
            m = topology.choose_n_clusters(
                phi, introductions["halves"].numpy(), self.linkage
            ).n_clusters
        self.check_count(m, facts)
        trust = topology.trust_weights(phi, self.trust, facts.n.numpy())
        labels = topology.partition(phi, m, self.linkage)
        return {
            **introductions,
            "labels": torch.from_numpy(labels),
            "trust": torch.from_numpy(trust),
        }

    def weigh(self, server: State, facts: Facts) -> Tensor:
        n = super().weigh(server, facts)
        if self.weights == "uniform":
            return n
        phi, labels, trust = (server[name].numpy() for name in ("descriptor", "labels", "trust"))
        return torch.from_numpy(topology.member_weights(phi, labels, n.numpy(), trust))

    def report(
        self, server: State, facts: Facts, clouds: Sequence[NDArray[np.float64]]
    ) -> dict[str, Any]:
        phi, labels = server["descriptor"].numpy(), server["labels"].numpy()
        halves = server.get("halves")
        if halves is None and len(phi) <= REPORT_LIMIT:
            halves = self._halves(clouds, facts.names, facts)
        trust = dict(zip(facts.names, server["trust"].tolist(), strict=True))
        return super().report(server, facts, clouds) | {
            "descriptor": dict(zip(facts.names, phi.tolist(), strict=True)),
            "trust": trust,
            "flagged": [name for name, t in trust.items() if t < 1],
            "chosen": self.n_clusters == "auto",
            **topology.evidence(phi, labels, halves, self.linkage),
        }
