"""Wording that messages of several datasets share."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["listed"]


def listed(items: Iterable[object], limit: int = 5) -> str:
    """``'a', 'b', 'c' and 4 more``: the first few of many, quoted."""
    every = [f"'{item}'" for item in items]
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more
