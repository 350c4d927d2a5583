"""fedtopo-torch: personalised and clustered federated learning in PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithms.base import Algorithm
    from .federation import Client, Federation
    from .registry import register
    from .trainer import Result, Trainer, train

__version__ = "0.1.0"

# Loaded when first used: torch takes a second to import, and ``fedtopo --help`` needs none of it.
_HOMES = {
    "Algorithm": "algorithms.base",
    "Client": "federation",
    "Federation": "federation",
    "Result": "trainer",
    "Trainer": "trainer",
    "register": "registry",
    "train": "trainer",
}

__all__ = ["Algorithm", "Client", "Federation", "Result", "Trainer", "register", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedtopo_torch' has no attribute '{name}'")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
