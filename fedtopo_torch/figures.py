"""Figures of what pTopoFL sees (persistence diagrams, distances between descriptors) and of a
comparison of methods (training curves, clients).

Figures are made without pyplot: nothing global changes, and any thread may draw. Colours are safe
for colour-blind readers and nothing is told by colour alone.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .evaluation import METRIC_TITLES
from .randomness import generator
from .topology import diagrams

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.text import Text
    from numpy.typing import ArrayLike

    from .comparison import Comparison

__all__ = [
    "clients_figure",
    "curves_figure",
    "distance_figure",
    "new_figure",
    "persistence_figure",
    "save_figure",
]

#: Above this many clients a matrix has no room for names, and shows clusters only.
NAMED_CLIENTS = 40
#: Up to this many clients the distances are written into the cells.
WRITTEN_CLIENTS = 10
#: Most clusters that are named along a matrix.
NAMED_CLUSTERS = 12
#: Longer names are cut.
NAME_LENGTH = 22

# Okabe and Ito's blue and vermilion; the markers differ as well.
DIMENSIONS = (
    ("H0, components", "o", "#0072B2"),
    ("H1, loops", "^", "#D55E00"),
)

#: Okabe and Ito's colours but the yellow, which is hard to see on white.
METHOD_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000")
# Line styles and markers have other periods than the colours: 28 methods differ in one of them,
# and methods of one colour always in line and marker.
METHOD_LINES = ("-", "--", "-.", ":")
METHOD_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p")


def persistence_figure(
    clouds: Sequence[ArrayLike],
    names: Sequence[str],
    seed: int,
    size: int = 80,
    limit: int = 12,
) -> Figure:
    """Persistence diagrams of clients in dimensions 0 and 1, one panel a client.

    All panels share their scales, so that clients can be compared. Of a larger client a subsample
    is shown, drawn without replacement and keyed by (seed, client's name).

    Args:
        clouds: K arrays ``[n_k, d]`` of features; scales are distances in their units.
        names: K client names.
        seed: of the subsamples.
        size: records per client at most, at least 1. Clients of different sizes differ for that
            reason alone.
        limit: only the first so many clients are shown, at least 1.

    Raises:
        ValueError: no client, not one name per client, or a cloud that
            :func:`fedtopo_torch.topology.as_cloud` refuses.
    """
    if not len(clouds) or len(clouds) != len(names):
        raise ValueError(f"{len(clouds)} clouds and {len(names)} names: give one name per cloud.")
    shown = min(len(clouds), limit)
    columns = min(4, math.ceil(math.sqrt(shown)))
    rows = math.ceil(shown / columns)
    figure = new_figure(2.4 * columns + 0.7, 2.6 * rows + 0.8)
    first: Axes | None = None
    top = 0.0
    for i in range(shown):
        cloud, name = np.asarray(clouds[i], dtype=np.float64), names[i]
        n = len(cloud)
        if n > size:
            keep = generator(seed, "persistence figure", client=name).choice(n, size, replace=False)
            cloud = cloud[keep]
        axes = figure.add_subplot(rows, columns, i + 1, sharex=first, sharey=first)
        first = first or axes
        for bars, (label, marker, colour) in zip(diagrams(cloud), DIMENSIONS, strict=True):
            axes.scatter(
                bars[:, 0],
                bars[:, 1],
                s=22,
                marker=marker,
                facecolor=colour,
                linewidth=0,
                alpha=0.75,
                label=label,
                clip_on=False,
                zorder=3,
            )
            top = max(top, float(bars.max(initial=0.0)))
        axes.axline((0, 0), slope=1, color="0.6", linewidth=0.9, linestyle="--")
        records = f"{len(cloud)} of {n} records" if len(cloud) < n else f"{n} records"
        axes.set_title(f"{_short(name)}\n{records}", fontsize=10, parse_math=False)
        # Inner panels share the scale of the outer ones; repeating it would only add ink.
        axes.tick_params(labelbottom=i + columns >= shown, labelleft=i % columns == 0)
        if i + columns >= shown:
            axes.set_xlabel("birth")
        if i % columns == 0:
            axes.set_ylabel("death")
        axes.set_aspect("equal")
        axes.spines[["top", "right"]].set_visible(False)
    assert first is not None
    limits = (0.0, 1.05 * top or 1.0)
    first.set(xlim=limits, ylim=limits)
    first.xaxis.set_major_locator(MaxNLocator(4))
    first.yaxis.set_major_locator(MaxNLocator(4))
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    some = f", first {shown} of {len(clouds)} clients" if shown < len(clouds) else ""
    figure.suptitle(f"Persistence diagrams{some}", fontsize=12)
    return figure


def distance_figure(
    descriptors: ArrayLike, names: Sequence[str], labels: Sequence[int] | None = None
) -> Figure:
    """Euclidean distances between clients' descriptors, clients ordered by cluster.

    Lines are drawn between clusters. Clients are named up to 40, distances written up to 10.

    Args:
        descriptors: ``[K, q]``, usually of length 1, so that distances lie in [0, 2].
        names: K client names.
        labels: the cluster of each client ``[K]``, or None for one cluster. Within a cluster
            clients stay in the order given.

    Raises:
        ValueError: not one name and one label per client.
    """
    from scipy.spatial.distance import cdist

    phi = np.asarray(descriptors, dtype=np.float64)
    cluster = np.zeros(len(phi), dtype=int) if labels is None else np.asarray(labels)
    if not len(phi) or len(names) != len(phi) or cluster.shape != (len(phi),):
        raise ValueError(
            f"{len(phi)} descriptors, {len(names)} names and {cluster.size} labels: "
            f"give one of each per client."
        )
    order = np.argsort(cluster, kind="stable")
    phi, cluster = phi[order], cluster[order]
    distances = cdist(phi, phi)
    top = float(distances.max()) or 1.0
    size = len(phi)
    named = size <= NAMED_CLIENTS
    side = max(3.6, 0.26 * size) if named else 7.5
    figure = new_figure(side + 2.6, side + 1.6)
    axes = figure.add_subplot()
    image = axes.imshow(distances, cmap="cividis", vmin=0.0, vmax=top, interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    bar.set_label("distance between descriptors")
    starts = np.concatenate([[0], np.flatnonzero(np.diff(cluster)) + 1, [size]])
    for start in starts[1:-1]:
        for draw in (axes.axhline, axes.axvline):
            # White on black: seen on the dark and on the light end of the colours.
            draw(start - 0.5, color="black", linewidth=3.2)
            draw(start - 0.5, color="white", linewidth=1.6)
    if named:
        ordered = [_short(names[k]) for k in order]
        axes.set_xticks(range(size), ordered, rotation=90, fontsize=9, parse_math=False)
        axes.set_yticks(range(size), ordered, fontsize=9, parse_math=False)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    axes.tick_params(length=0)
    if labels is not None and len(starts) - 1 <= NAMED_CLUSTERS:
        above = axes.secondary_xaxis("top")
        above.set_xticks(
            [(start + end - 1) / 2 for start, end in pairwise(starts)],
            [f"cluster {cluster[start]}" for start in starts[:-1]],
            fontsize=9,
            # A cluster may be one narrow column beside another.
            rotation=0 if np.diff(starts).min() * side / size > 0.8 else 90,
        )
        above.tick_params(length=0)
    if size <= WRITTEN_CLIENTS:
        for (i, j), value in np.ndenumerate(distances):
            colour = "white" if value <= top / 2 else "black"
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=9)
    figure.suptitle(
        f"Distances between the descriptors of {size} client{'s' if size > 1 else ''}", fontsize=12
    )
    return figure


def curves_figure(comparison: Comparison, dataset: str) -> Figure:
    """Training curves: pooled test loss (RMSE of a regression) against rounds, one line a method.

    The line is the mean over finished seeds, the band one standard deviation (ddof 0) to either
    side. Methods differ in colour and line style, and are listed in the order of their last mean.

    Args:
        comparison: the runs; :attr:`~fedtopo_torch.plan.Training.eval_every` sets the points.
        dataset: label or name of the federation.

    Raises:
        OptionError: the federation is not compared.
        ValueError: no run on it has finished.
    """
    label = comparison.plan.dataset(dataset).label
    figure = new_figure(7.6, 4.4)
    axes = figure.add_subplot()
    drawn = []
    for i, method in enumerate(comparison.plan.methods):
        rounds, values = comparison.curve(label, method.label)
        if not len(values):
            continue
        mean, std = values.mean(0), values.std(0)
        colour = METHOD_COLOURS[i % len(METHOD_COLOURS)]
        axes.fill_between(rounds, mean - std, mean + std, color=colour, alpha=0.07, linewidth=0)
        style = METHOD_LINES[i % len(METHOD_LINES)]
        name = _name(method.label, method.instance.deployable)
        (line,) = axes.plot(
            rounds,
            mean,
            color=colour,
            linestyle=style,
            linewidth=1.6,
            # One point is no line.
            marker=METHOD_MARKERS[i % len(METHOD_MARKERS)] if len(rounds) == 1 else None,
            label=name,
        )
        drawn.append((float(mean[-1]), line))
    if not drawn:
        raise ValueError(f"no run on {label} has finished: there is no curve to draw.")
    drawn.sort(key=lambda pair: -pair[0])
    # As high in the list as on the right of the figure.
    legend = figure.legend(
        handles=[line for _, line in drawn],
        loc="outside right upper",
        frameon=False,
        fontsize=9,
        handlelength=3.2,
    )
    _plain_text(legend.get_texts())
    axes.set(xlabel="round", ylabel=f"test {METRIC_TITLES[comparison.metrics(label)[0]]}, pooled")
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    seeds = len(comparison.plan.seeds)
    _title(axes, f"{label}: mean ± std over {seeds} seed{'s' if seeds > 1 else ''}")
    return figure


def clients_figure(comparison: Comparison, dataset: str) -> Figure:
    """Test loss (RMSE of a regression) of every client: one row a client, one dot a method.

    Dots are means over the seeds with a value, whiskers one standard deviation (ddof 0) to either
    side. Methods differ in colour and marker.

    Args:
        comparison: the runs.
        dataset: label or name of the federation. Of more than 40 clients the first 40 are shown.

    Raises:
        OptionError: the federation is not compared.
        ValueError: no run on it has finished.
    """
    label = comparison.plan.dataset(dataset).label
    methods = [
        (i, method)
        for i, method in enumerate(comparison.plan.methods)
        if comparison.of(label, method.label)
    ]
    if not methods:
        raise ValueError(f"no run on {label} has finished: there is no client to draw.")
    names = comparison.clients(label)
    shown = names[:NAMED_CLIENTS]
    # A row has room for its methods, and a gap to the next.
    height = len(shown) * (0.1 * len(methods) + 0.22)
    figure = new_figure(7.6, height + 1.3)
    axes = figure.add_subplot()
    rows = np.arange(len(shown))
    for place, (i, method) in enumerate(methods):
        values = comparison.client_values(label, method.label)[:, : len(shown)]
        at = np.flatnonzero(~np.isnan(values).all(0))
        shift = 0.76 * ((place + 0.5) / len(methods) - 0.5)
        axes.errorbar(
            np.nanmean(values[:, at], axis=0),
            rows[at] + shift,
            xerr=np.nanstd(values[:, at], axis=0),
            fmt=METHOD_MARKERS[i % len(METHOD_MARKERS)],
            color=METHOD_COLOURS[i % len(METHOD_COLOURS)],
            markersize=5,
            elinewidth=0.9,
            label=_name(method.label, method.instance.deployable),
        )
    for row in rows[1::2]:
        axes.axhspan(row - 0.5, row + 0.5, color="0.955", linewidth=0, zorder=0)
    axes.set_yticks(rows, [_short(name) for name in shown], parse_math=False)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"test {METRIC_TITLES[comparison.metrics(label)[0]]}")
    axes.spines[["top", "right"]].set_visible(False)
    legend = figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    _plain_text(legend.get_texts())
    some = f", first {len(shown)} of {len(names)} clients" if len(shown) < len(names) else ""
    seeds = len(comparison.plan.seeds)
    _title(axes, f"{label}: mean ± std over {seeds} seed{'s' if seeds > 1 else ''}{some}")
    return figure


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG (200 dots per inch) and SVG, each all of it or nothing.

    Args:
        figure: any figure of this module.
        path: without an ending: ``runs/curves`` gives ``runs/curves.png`` and ``runs/curves.svg``.
            The folder must exist.

    Returns:
        the two paths.

    Raises:
        OSError: a file can't be written.
    """
    from .runs import write_atomically

    paths = []
    for ending, settings in (
        # No date, no version and no random ids: the same figure gives the same file.
        ("png", {"dpi": 200, "metadata": {"Software": None}}),
        ("svg", {"metadata": {"Date": None, "Creator": None}}),
    ):
        content = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": path.name}):
            figure.savefig(content, format=ending, **settings)
        # with_suffix would take what follows a dot in the name for an ending.
        place = path.with_name(f"{path.name}.{ending}")
        write_atomically(place, content.getvalue())
        paths.append(place)
    return paths


def _name(label: str, deployable: bool) -> str:
    return label if deployable else f"{label} (not deployable)"


def _title(axes: Axes, text: str) -> None:
    _plain_text([axes.set_title(text, fontsize=12, loc="left")])


def _plain_text(texts: Sequence[Text]) -> None:
    """A dollar sign in a label is a dollar sign, not mathematics."""
    for text in texts:
        text.set_parse_math(False)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, made without pyplot."""
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _short(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"
