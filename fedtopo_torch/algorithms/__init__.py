"""The built-in methods, one file each."""

from .base import Algorithm, Cohort, Message, State
from .clustered import Clustered, ClusteredAlgorithm
from .fedavg import FedAvg
from .local import Local
from .ptopofl import PTopoFL

__all__ = [
    "Algorithm",
    "Clustered",
    "ClusteredAlgorithm",
    "Cohort",
    "FedAvg",
    "Local",
    "Message",
    "PTopoFL",
    "State",
]
