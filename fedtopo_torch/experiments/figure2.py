"""Figure 2: contraction, drift and blending against what is proved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comparison import Spread
from ..paper import entry
from ..tables import NONE, Cell, Column, Table, beside_note, number_cell, text_cell
from .description import Experiment, Measure, Study
from .measurements import blending, contraction, drift

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

DATASET = "synthetic"
PAPER = entry("table5")
#: Slack for rounding, as a fraction of the distance at the start; of the drift, absolute.
SLACK = 1e-6

CONTRACTION = Measure(
    contraction,
    {DATASET: DATASET},
    {
        "l2": PAPER["l2"],
        "abar": PAPER["abar"],
        "local_steps": [1, 10, 50],
        "rounds": PAPER["rounds"],
    },
)
#: Doubling, so that points lie evenly on a logarithmic axis.
STEPS = [2, 4, 8, 16, 32, 64]
#: With the step size of training, and with one so small that the bias is still linear.
SHARES = (0.01, 1.0)
SMALL, FULL = (
    Measure(
        drift,
        {DATASET: DATASET},
        {"l2": PAPER["l2"], "local_steps": STEPS, "share": share},
    )
    for share in SHARES
)
BLENDING = Measure(
    blending,
    {DATASET: DATASET},
    {
        "l2": PAPER["l2"],
        "local_steps": PAPER["local_steps"],
        "alphas": [0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0],
    },
)


def _found(study: Study, measure: Measure) -> dict[int, dict[str, Any]]:
    return study.measurements(measure, DATASET)


def _contraction_ratio(values: Mapping[str, Any]) -> float:
    """Largest distance over its bound, over tau and rounds from 1, where rounding does not rule."""
    worst = 0.0
    for each in values.values():
        distance = np.array(each["distance"])
        bound = each["q"] ** np.arange(len(distance)) * distance[0]
        # At the start the two are equal.
        seen = np.flatnonzero(bound > SLACK * distance[0])[1:]
        worst = max(worst, float((distance[seen] / bound[seen]).max()))
    return worst


def _drift_slope(values: Mapping[str, Any]) -> float:
    """Slope of log bias against log eta (tau - 1), mean over clusters; 1 is linear growth."""
    step, bias = np.log(values["step"]), np.log(values["bias"])
    return float(np.mean(np.polyfit(step, bias, 1)[0]))


def _drift_ratio(values: Mapping[str, Any]) -> float:
    """Largest bias over its bound."""
    return float((np.array(values["bias"]) / (np.array(values["bound"]) + SLACK)).max())


def _about_one(slope: float) -> bool:
    return abs(slope - 1) <= 0.1


def _between(values: Mapping[str, Any]) -> float:
    """Fraction of the alphas where what is kept lies between the two predictions."""
    kept, low, high = (np.array(values[name]) for name in ("kept", "smallest", "median"))
    return float(np.mean((kept >= low - SLACK) & (kept <= high + SLACK)))


CHECKS = (
    (
        "(a) largest distance / bound, from round 1",
        "at most 1",
        CONTRACTION,
        _contraction_ratio,
        lambda v: v <= 1 + SLACK,
    ),
    ("(b) largest bias / bound", "at most 1", FULL, _drift_ratio, lambda v: v <= 1),
    ("(b) largest bias / bound, eta / 100", "at most 1", SMALL, _drift_ratio, lambda v: v <= 1),
    # Linear growth is for small eta (tau - 1); later the bias saturates.
    ("(b) slope of the bias, eta of training", "less than 1", FULL, _drift_slope, lambda v: v < 1),
    ("(b) slope of the bias, eta / 100", "about 1", SMALL, _drift_slope, _about_one),
    ("(c) alphas between the predictions", "all", BLENDING, _between, lambda v: v == 1),
)


def _checks(study: Study) -> list[tuple[str, str, list[float], int]]:
    """What is checked, what it should be, its value per seed, and how many seeds hold."""
    rows = []
    for title, wanted, measure, of, holds in CHECKS:
        values = [of(each) for each in _found(study, measure).values()]
        rows.append((title, wanted, values, sum(map(holds, values))))
    return rows


def _table(study: Study) -> list[Table]:
    columns = (
        Column("check", ("check",), number=False),
        Column("theory", ("theory",), number=False),
        Column("ours, mean", ("ours", "ours_std")),
        Column("least", ("least",)),
        Column("most", ("most",)),
        Column("holds in seeds", ("holds", "seeds")),
        Column("paper", ("paper",)),
    )
    rows = []
    for title, wanted, values, holds in _checks(study):
        spread = Spread.of(values)
        cells = [text_cell(title), text_cell(wanted)]
        cells.append(Cell(number_cell(spread.mean).text, (spread.mean, spread.std)))
        cells += [number_cell(f(values)) if values else number_cell(math.nan) for f in (min, max)]
        cells.append(Cell(f"{holds} of {len(values)}", (holds, len(values))))
        cells.append(Cell(NONE, (None,)))
        rows.append(tuple(cells))
    notes = (
        f"On federation (A) with pTopoFL's partition and weights, over {study.seeds_in_words}. "
        f"(a): where the bound is above {SLACK:g} of the start. (b): slack {SLACK:g}; tau "
        f"{STEPS[0]} to {STEPS[-1]}, with the step size of training and a hundredth of it; a slope "
        f"within 0.1 of 1 counts as 1. "
        f"{beside_note('Figure 2')}",
    )
    return [Table("Bounds and predictions, checked", columns, tuple(rows), notes)]


def _findings(study: Study) -> list[str]:
    said = []
    for title, wanted, values, holds in _checks(study):
        if values:
            said.append(
                f"{title}: {min(values):.3g} to {max(values):.3g} (theory: {wanted}); holds in "
                f"{holds} of {len(values)} seeds."
            )
    return [" ".join(said) or "Nothing was measured."]


def _figures(study: Study) -> dict[str, Figure]:
    from ..figures import new_figure

    seed = study.settings.seeds[0]
    contracted, small, full, blended = (
        _found(study, measure).get(seed, {}) for measure in (CONTRACTION, SMALL, FULL, BLENDING)
    )
    if not (contracted and small and full and blended):
        return {}
    drifted = {name: small[name] + full[name] for name in small}
    parts = contracted, drifted, blended
    figure = new_figure(11.0, 3.9)
    panels = figure.subplots(1, 3)
    for axes, draw, values in zip(panels, (_draw_a, _draw_b, _draw_c), parts, strict=True):
        draw(axes, values)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, handlelength=2.6)
    figure.suptitle(f"Federation (A), pTopoFL's partition, seed {seed}", fontsize=12)
    return {"checks": figure}


def _styles() -> Iterable[tuple[str, str]]:
    from ..figures import METHOD_COLOURS, METHOD_MARKERS

    return zip(METHOD_COLOURS, METHOD_MARKERS, strict=False)


def _draw_a(axes: Axes, values: Mapping[str, Any]) -> None:
    for (steps, each), (colour, marker) in zip(values.items(), _styles(), strict=False):
        distance = np.array(each["distance"])
        rounds = np.arange(len(distance))
        every = max(1, len(rounds) // 6)
        axes.semilogy(
            distance, color=colour, marker=marker, markevery=every, ms=4, label=f"tau = {steps}"
        )
        axes.semilogy(rounds, each["q"] ** rounds * distance[0], "--", color=colour, lw=1)
    axes.plot([], [], "--", color="0.3", lw=1, label="bound, $q^t$")
    axes.set(xlabel="round", ylabel="distance to the fixed point")
    # Below this it is rounding.
    axes.set_ylim(bottom=1e-9)
    axes.set_title("(a) contraction", fontsize=10, loc="left")


def _draw_b(axes: Axes, values: Mapping[str, Any]) -> None:
    bias, bound = np.array(values["bias"]), np.array(values["bound"])
    for j, (colour, marker) in zip(range(bias.shape[1]), _styles(), strict=False):
        axes.loglog(
            values["step"], bias[:, j], color=colour, marker=marker, ms=4, label=f"cluster {j}"
        )
        axes.loglog(values["step"], bound[:, j], ":", color=colour)
    axes.plot([], [], ":", color="0.3", label="bound")
    axes.set(xlabel="eta (tau - 1)", ylabel="distance of fixed point and optimum")
    axes.set_title("(b) drift, alpha = 0", fontsize=10, loc="left")


def _draw_c(axes: Axes, values: Mapping[str, Any]) -> None:
    from ..figures import METHOD_COLOURS

    alpha, h = values["alpha"], values["eigenvalues"]
    axes.semilogx(alpha, values["kept"], "o", color=METHOD_COLOURS[0], ms=5, label="measured")
    for name, style in (("smallest", "--"), ("median", ":")):
        label = f"{name} eigenvalue, {h[name]:.2g}"
        axes.semilogx(alpha, values[name], style, color=METHOD_COLOURS[1], label=label)
    axes.set(xlabel="alpha", ylabel="spread between clusters kept")
    axes.set_title("(c) blending", fontsize=10, loc="left")


EXPERIMENT = Experiment(
    name="figure2",
    question="Do the theorems hold in numbers? (a) The distance to the fixed point falls at least "
    "as fast as q^t, q = (1 - eta mu)^tau, for the calibrated alpha. (b) Without blending, the "
    "bias of tau local steps grows like eta (tau - 1), as long as that is small, and stays below "
    "its bound. (c) Blending keeps the fraction of the spread between clusters that a common "
    "Hessian would predict, between its smallest (dashed) and median (dotted) eigenvalue.",
    measures=(CONTRACTION, SMALL, FULL, BLENDING),
    more=_table,
    findings=_findings,
    figures=_figures,
)
