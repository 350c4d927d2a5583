"""Figures of what pTopoFL sees: persistence diagrams, and distances between descriptors.

Figures are made without pyplot: nothing global changes, and any thread may draw. Colours are safe
for colour-blind readers and nothing is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .randomness import generator
from .topology import diagrams

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike

__all__ = ["distance_figure", "persistence_figure"]

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
    figure = _figure(2.4 * columns + 0.7, 2.6 * rows + 0.8)
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
    figure = _figure(side + 2.6, side + 1.6)
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


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _short(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"
