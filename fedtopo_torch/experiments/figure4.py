"""Figure 4: gain over FedAvg against the share of dispersion between clusters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..comparison import Spread
from ..paper import printed
from ..tables import Cell, Column, Table, beside_cells, beside_columns, beside_note, text_cell
from .description import REGIMES, Experiment, Row, Setup, Study
from .metrics import OPTIMA, rho_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "Point", "correlation", "points"]

ALL = "all"


class Point(NamedTuple):
    """One regime and seed."""

    regime: str
    seed: int
    explained: float
    gain: float


def points(study: Study) -> list[Point]:
    """1 - rho of pTopoFL's partition, and its gain in log-loss over FedAvg."""
    found = []
    for regime in REGIMES:
        rho = rho_values(study, Row((), "ptopofl", regime))
        gains = study.values(regime, "fedavg") - study.values(regime, "ptopofl")
        for seed, gain in zip(study.settings.seeds, gains.tolist(), strict=True):
            if seed in rho and not math.isnan(gain):
                found.append(Point(regime, seed, 1 - rho[seed], gain))
    return found


def correlation(given: list[Point]) -> float:
    """Pearson's r; NaN for fewer than three points or where one side does not vary."""
    x, y = (np.array([getattr(point, name) for point in given]) for name in ("explained", "gain"))
    if len(given) < 3 or not (np.ptp(x) and np.ptp(y)):
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


def _parts(study: Study) -> dict[str, list[Point]]:
    every = points(study)
    within = {regime: [p for p in every if p.regime == regime] for regime in REGIMES}
    return {ALL: every, **within}


def _table(study: Study) -> list[Table]:
    columns = (
        Column("regime", ("regime",), number=False),
        Column("points", ("points",)),
        *beside_columns("explained", "1 - rho"),
        *beside_columns("gain", "gain"),
        *beside_columns("correlation", "Pearson r"),
    )
    rows = []
    for regime, given in _parts(study).items():
        cells = [text_cell(regime), Cell(str(len(given)), (len(given),))]
        for name, digits in (("explained", 2), ("gain", 4)):
            spread = Spread.of(getattr(point, name) for point in given)
            cells += beside_cells(spread, printed("figure4", regime, name), digits)
        r = Spread(correlation(given), math.nan, len(given))
        cells += beside_cells(r, printed("figure4", regime, "correlation"), 2)
        rows.append(tuple(cells))
    notes = (
        f"One point per regime and seed, {study.seeds_in_words} each. Gain: log-loss of FedAvg "
        f"less that of pTopoFL. {beside_note('Figure 4')}",
    )
    return [Table("Gain and share between clusters", columns, tuple(rows), notes)]


def _findings(study: Study) -> list[str]:
    parts = {regime: correlation(given) for regime, given in _parts(study).items()}
    theirs = printed("figure4", ALL, "correlation").mean
    within = {regime: r for regime, r in parts.items() if regime != ALL and not math.isnan(r)}
    if math.isnan(parts[ALL]):
        return ["Too few points for a correlation."]
    text = f"Over all regimes r = {parts[ALL]:.2f} (paper {theirs:.2f})"
    if within:
        named = ", ".join(f"{regime} {r:.2f}" for regime, r in within.items())
        text += f"; within one regime: {named}"
        negative = [regime for regime, r in within.items() if r < 0]
        text += (
            ". The relation holds between regimes, not within each of them"
            if negative and parts[ALL] > 0
            else ""
        )
    return [f"{text}."]


def _figures(study: Study) -> dict[str, Figure]:
    from ..figures import METHOD_COLOURS, METHOD_MARKERS, new_figure

    parts = _parts(study)
    if not parts[ALL]:
        return {}
    figure = new_figure(7.0, 4.4)
    axes = figure.add_subplot()
    for i, regime in enumerate(REGIMES):
        r = correlation(parts[regime])
        axes.scatter(
            [point.explained for point in parts[regime]],
            [point.gain for point in parts[regime]],
            marker=METHOD_MARKERS[i],
            facecolor=METHOD_COLOURS[i],
            edgecolor="white",
            linewidth=0.5,
            s=42,
            label=regime if math.isnan(r) else f"{regime}, r = {r:.2f}",
        )
    axes.axhline(0, color="0.6", linewidth=0.9)
    axes.set(xlabel="1 - rho of pTopoFL's partition", ylabel="gain in log-loss over FedAvg")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    axes.set_title(f"All regimes: r = {correlation(parts[ALL]):.2f}", fontsize=12, loc="left")
    return {"gain": figure}


EXPERIMENT = Experiment(
    name="figure4",
    question="The analysis says that a partition can gain in proportion to the share 1 - rho of "
    "the dispersion of client optima that lies between its clusters. Does the measured gain over "
    "FedAvg follow it, over all regimes and within each?",
    setups={"": Setup(("fedavg", "ptopofl"), REGIMES)},
    measures=(OPTIMA,),
    more=_table,
    findings=_findings,
    figures=_figures,
)
