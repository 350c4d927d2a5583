"""The numbers that the paper prints, as far as they are legible in our copy.

Vomo-Donfack, Hoszu, Ginot, Morilla: pTopoFL, 2026.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["CITED", "SEEDS", "Printed", "entry", "other_settings", "printed"]

#: How the paper is called below a table.
CITED = "Vomo-Donfack, Hoszu, Ginot, Morilla, 2026"

#: The paper's means are over so many.
SEEDS = 10

#: What a setting is called in a sentence.
_SETTINGS = {"rounds": "rounds", "local_steps": "local steps", "eta": "eta", "l2": "l2"}


class Printed(NamedTuple):
    """Mean and standard deviation over the paper's 10 seeds; NaN where there is none."""

    mean: float
    std: float


@cache
def _values() -> dict[str, Any]:
    text = Path(__file__).with_name("paper_values.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def entry(*path: str) -> Any:
    """What stands at a place of ``paper_values.json``, whatever it is; None where nothing does.

    ``entry("table5")`` are the paper's settings, ``entry("table1", "synthetic")`` its methods.
    """
    found: Any = _values()
    for name in path:
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found


def printed(*path: str) -> Printed:
    """One number of a table: ``printed("table1", "synthetic", "local", "log_loss")``."""
    mean, std = entry(*path) or (None, None)
    return Printed(*(math.nan if value is None else float(value) for value in (mean, std)))


def other_settings(have: Mapping[str, Any]) -> list[str]:
    """Each setting that is not the paper's, as ``"rounds 20 (paper: 150)"``.

    Args:
        have: of ``rounds``, ``local_steps``, ``eta``, ``l2``: those to compare.
    """
    theirs = entry("table5")
    return [
        f"{_SETTINGS[name]} {_plain(value)} (paper: {_plain(theirs[name])})"
        for name, value in have.items()
        if value != theirs[name]
    ]


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)
