"""fedtopo-torch: personalised and clustered federated learning in PyTorch."""

from .algorithms.base import Algorithm
from .federation import Client, Federation
from .registry import register
from .trainer import Result, Trainer, train

__all__ = ["Algorithm", "Client", "Federation", "Result", "Trainer", "register", "train"]
__version__ = "0.1.0"
