"""Built-in federations; importing this package registers them by name."""

from .base import Dataset
from .fed_heart_disease import FedHeartDisease
from .synthetic import Synthetic

__all__ = ["Dataset", "FedHeartDisease", "Synthetic"]
