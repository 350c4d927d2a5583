"""Models by name."""

from . import logistic
from .base import Model

__all__ = ["Model", "logistic"]
