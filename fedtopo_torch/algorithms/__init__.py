"""The built-in methods, one file each."""

from .base import Algorithm, Cohort, Message, State
from .clustered import Clustered, ClusteredAlgorithm
from .ditto import Ditto
from .fedavg import FedAvg
from .fedprox import FedProx
from .ifca import IFCA
from .local import Local
from .pacfl import PACFL
from .pfedme import PFedMe
from .ptopofl import PTopoFL
from .references import Oracle, Random
from .scaffold import Scaffold

__all__ = [
    "IFCA",
    "PACFL",
    "Algorithm",
    "Clustered",
    "ClusteredAlgorithm",
    "Cohort",
    "Ditto",
    "FedAvg",
    "FedProx",
    "Local",
    "Message",
    "Oracle",
    "PFedMe",
    "PTopoFL",
    "Random",
    "Scaffold",
    "State",
]
