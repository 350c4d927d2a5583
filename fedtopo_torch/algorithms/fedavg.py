"""FedAvg. McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data, AISTATS 2017."""

from __future__ import annotations

from typing import ClassVar

from ..registry import register
from .base import Algorithm

__all__ = ["FedAvg"]


@register("fedavg")
class FedAvg(Algorithm):
    """One global model: theta <- sum_k p_k GD^tau_k(theta), p_k = n_k / sum n."""

    title: ClassVar[str] = "FedAvg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
