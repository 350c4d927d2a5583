"""Models by name."""

from .base import Model
from .cnn import CNN
from .logistic import Linear, Logistic, Softmax
from .mlp import MLP

__all__ = ["CNN", "MLP", "Linear", "Logistic", "Model", "Softmax"]
