"""Where the clients' side of a round runs."""

from .in_process import InProcess

__all__ = ["InProcess"]
