"""Tables of a diagnosis; :class:`fedtopo_torch.tables.Table` writes them in five forms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .diagnosis import MOST_HALVES, RANDOM_PARTITIONS, Clustering, ColumnEffect, Diagnosis, members
from .tables import NONE, Cell, Column, Table, number_text
from .topology import FEATURE_NAMES
from .topology.partition import MAX_CLUSTERS, MIN_REPRODUCIBILITY

__all__ = [
    "clients_table",
    "columns_table",
    "diagnosis_tables",
    "distances_table",
    "hold_outs_table",
    "partitions_table",
    "pilot_table",
]

#: Up to so many clients the matrix of distances is a table; the figure shows any number.
MATRIX_CLIENTS = 10
#: The coordinates of a descriptor that are no curve, in dimensions 0 and 1.
SUMMARIES = (("entropy", "entropy"), ("amplitude", "amplitude"), ("bars", "count"))
METHODS = {"alone": "alone (Local)", "together": "together (FedAvg)", "cluster": "clusters"}


def diagnosis_tables(diagnosis: Diagnosis, limit: int | None = None) -> list[Table]:
    """All tables of a diagnosis that have something to show.

    Clients, distances (up to 10 clients), partitions, columns, and of the pilot the clients and the
    hold-outs.

    Args:
        diagnosis: any.
        limit: rows of clients at most, for a terminal; the note says how many there are.
    """
    tables = [clients_table(diagnosis, limit)]
    if 1 < len(diagnosis.names) <= MATRIX_CLIENTS:
        tables.append(distances_table(diagnosis))
    tables.append(partitions_table(diagnosis))
    if diagnosis.units is not None:
        tables.append(columns_table(diagnosis))
    if diagnosis.pilot is not None:
        tables += [pilot_table(diagnosis, limit), hold_outs_table(diagnosis)]
    return tables


def clients_table(diagnosis: Diagnosis, limit: int | None = None) -> Table:
    """Each client's descriptor in six numbers, its distance to the others, trust and cluster."""
    columns = (
        Column("client", ("client",), number=False),
        Column("records", ("records",)),
        *(Column(f"{title} H0 / H1", (f"{key}_0", f"{key}_1")) for title, key in SUMMARIES),
        Column("mean distance", ("mean_distance",)),
        Column("trust", ("trust", "z", "flagged")),
        Column("cluster", ("cluster",)),
    )
    at = [[FEATURE_NAMES.index(f"{key}_{h}") for h in (0, 1)] for _, key in SUMMARIES]
    labels = diagnosis.clustering.labels
    rows = tuple(
        (
            Cell(name, (name,)),
            Cell(f"{diagnosis.n[k]:,}", (diagnosis.n[k],)),
            *(_pair(*map(float, diagnosis.phi[k, pair])) for pair in at),
            _number(float(diagnosis.delta[k]), 3),
            Cell(
                f"{diagnosis.trust[k]:.2f}",
                (
                    float(diagnosis.trust[k]),
                    float(diagnosis.scores[k]),
                    bool(diagnosis.trust[k] < 1),
                ),
                mark="!" if diagnosis.trust[k] < 1 else "",
            ),
            Cell(str(labels[k]), (labels[k],)),
        )
        for k, name in list(enumerate(diagnosis.names))[:limit]
    )
    settings = diagnosis.settings
    units = "in their own units" if settings["scale"] == "raw" else "in pooled standard deviations"
    notes = [
        f"Descriptors of training features {units}; H0: components, H1: loops. Entropy, amplitude "
        f"and number of bars as they stand in the descriptor, whose 46 numbers have length 1. Mean "
        f"distance: to the other clients. Cluster: of the partition into "
        f"{diagnosis.clustering.n_clusters}."
    ]
    if diagnosis.flagged:
        shown = ", ".join(diagnosis.flagged[:10]) + (", ..." if diagnosis.flagged[10:] else "")
        notes.append(
            f"!: down-weighted by the trust rule ({settings['trust']}): {shown}. A flag marks "
            f"unusual data, not dishonesty; honest clients get it too."
        )
    elif settings["trust"] != "off":
        notes.append("No client is flagged by the trust rule.")
    return Table("Clients and their descriptors", columns, rows, (*notes, *_cut(diagnosis, limit)))


def distances_table(diagnosis: Diagnosis) -> Table:
    """Euclidean distances between descriptors ``[K, K]``."""
    columns = (
        Column("client", ("client",), number=False),
        *(Column(name, (f"to {name}",)) for name in diagnosis.names),
    )
    rows = tuple(
        (Cell(name, (name,)), *(_number(float(value), 3) for value in diagnosis.distances[k]))
        for k, name in enumerate(diagnosis.names)
    )
    note = "Euclidean; between 0 (the same shape) and 1.41 (nothing in common)."
    return Table("Distances between descriptors", columns, rows, (note,))


def partitions_table(diagnosis: Diagnosis) -> Table:
    """What speaks for each number of clusters."""
    columns = (
        Column("M", ("n_clusters",)),
        Column("clusters", ("clusters",), number=False),
        Column("half-split ARI", ("reproducibility",)),
        Column("silhouette", ("silhouette",)),
        Column("radius", ("stability_radius",)),
        Column("1 - rho", ("explained",)),
        Column("by chance", ("explained_by_chance", "as_good_by_chance")),
        Column("excess", ("excess",)),
    )
    chosen = diagnosis.choice.n_clusters
    rows = tuple(
        (
            Cell(str(each.n_clusters), (each.n_clusters,), bold=each.n_clusters == chosen),
            Cell(
                _members(diagnosis.names, each),
                (" | ".join(_names(diagnosis.names, each.labels, j) for j in _clusters(each)),),
            ),
            _number(each.reproducibility, 2),
            _number(each.silhouette, 2),
            _radius(each.radius),
            _number(each.explained, 2),
            Cell(_shown(each.by_chance, 2), (each.by_chance, each.as_good)),
            _number(each.excess, 2, sign=True),
        )
        for each in diagnosis.clusterings
    )
    linkage = diagnosis.settings["linkage"]
    notes = [
        f"n_clusters=auto takes M = {chosen} (bold): {diagnosis.choice.reason}.",
        f"M up to {MAX_CLUSTERS}, below the number of clients. Half-split ARI: agreement of the "
        f"partitions of random halves of every client's records; reproducible from "
        f"{MIN_REPRODUCIBILITY}, 0 is chance. Radius: descriptors may all move by less and "
        f"{'average' if linkage == 'ward' else linkage} linkage keeps the partition; none where "
        + ("Ward's is another one." if linkage == "ward" else "that is not guaranteed."),
        f"1 - rho: part of the clients' disagreement about the best model that lies between "
        f"clusters, each client's own optimum approximated by {diagnosis.settings['pilot_rounds']} "
        f"rounds alone. It grows with M by chance; by chance: mean of {RANDOM_PARTITIONS} random "
        f"partitions with the same cluster sizes.",
    ]
    if diagnosis.clustering.as_good is not None and diagnosis.clustering.n_clusters > 1:
        notes.append(
            f"M = {diagnosis.clustering.n_clusters}: {diagnosis.clustering.as_good:.0%} of the "
            f"random partitions, among which it may be itself, explain as much or more."
        )
    elif diagnosis.clustering.explained is None:
        notes.append("The clients' own optima are the same: there is no disagreement to explain.")
    return Table("Partitions", columns, rows, tuple(notes))


def columns_table(diagnosis: Diagnosis) -> Table:
    """What changes without each column, and in other units."""
    assert diagnosis.units is not None
    m = diagnosis.n_clusters
    columns = (
        Column("without", ("column", "features"), number=False),
        Column("share of variance", ("variance_share",)),
        Column("distances' size", ("size",)),
        Column("distances' pattern changes", ("change",)),
        *(
            (
                Column(f"ARI with M = {m}", ("agreement", "clusters")),
                Column("half-split ARI", ("reproducibility",)),
            )
            if m is not None
            else ()
        ),
    )
    effects = (*diagnosis.columns, diagnosis.units)
    rows = tuple(
        (
            Cell(each.name, (each.name, ", ".join(each.features))),
            _number(each.variance, 3),
            Cell(NONE if each.size is None else f"× {number_text(each.size, 2)}", (each.size,)),
            _number(each.change, 3),
            *(
                (
                    Cell(
                        _shown(each.agreement, 2),
                        (each.agreement, _clusters_of(diagnosis.names, each)),
                        mark="!" if each.carries else "",
                    ),
                    _number(each.reproducibility, 2),
                )
                if m is not None
                else ()
            ),
        )
        for each in effects
    )
    notes = [
        "Descriptors computed again without the column, with the same draws. Size: mean distance, "
        "without over with. Pattern: 0 if all distances grow or shrink alike, up to 1 "
        "(min over c of |D - c D'| / |D|). Share of variance: of the features as described, "
        "records of all clients pooled."
    ]
    if m is not None:
        notes.append(
            f"ARI: of the partition into {m} with it and without; ! below 0.5, where the column "
            f"carries the partition. Half-split ARI: of the partition without it."
        )
        if len(diagnosis.columns) * len(diagnosis.names) > MOST_HALVES:
            notes.append(
                f"Half-split ARI without each column is computed for up to {MOST_HALVES} clients "
                f"times columns."
            )
    if any(len(each.features) > 1 for each in diagnosis.columns):
        notes.append("One-hot features of one column (COLUMN=category) are left out together.")
    if diagnosis.columns_left_out:
        notes.append(f"Columns: {diagnosis.columns_left_out}.")
    return Table("What the distances depend on", columns, rows, tuple(notes))


def pilot_table(diagnosis: Diagnosis, limit: int | None = None) -> Table:
    """Held-out log-loss of the pilot per client, and how much better than training together."""
    pilot = diagnosis.pilot
    assert pilot is not None
    others = [each for each in pilot.methods if each != "together"]
    columns = (
        Column("client", ("client",), number=False),
        Column("held out", ("records",)),
        *(Column(METHODS[each], (each,)) for each in pilot.methods),
        *(
            Column(f"gain of {METHODS[each].partition(' ')[0]}", (f"gain_{each}",))
            for each in others
        ),
    )

    def row(
        name: str, records: int, values: dict[str, float], bold: bool = False
    ) -> tuple[Cell, ...]:
        return (
            Cell(name, (name,), bold),
            Cell(f"{records:,}", (records,)),
            *(_number(values[each], 4) for each in pilot.methods),
            *(_number(values["together"] - values[each], 4, sign=True) for each in others),
        )

    rows = [
        row(name, pilot.n[k], {each: pilot.clients[each][k] for each in pilot.methods})
        for k, name in list(enumerate(diagnosis.names))[:limit]
    ]
    pooled = {each: pilot.mean(each) for each in pilot.methods}
    rows.append(row("(pooled)", sum(pilot.records), pooled, bold=True))
    m = diagnosis.n_clusters
    notes = [
        f"Training records only: each is held out once, in one of {len(pilot.records)} hold-outs; "
        f"{pilot.rounds} rounds of logistic (or softmax) regression on the others. Log-loss, lower "
        f"is better; gain: over training together, + is better."
    ]
    if m is not None:
        notes.append(
            f"Clusters: pTopoFL with M = {m}; descriptors of the remaining records gave the "
            f"clusters of all records in {pilot.same_partition} of {len(pilot.records)} hold-outs."
        )
    title = f"Pilot: held-out log-loss after {pilot.rounds} rounds"
    return Table(title, columns, tuple(rows), (*notes, *_cut(diagnosis, limit)))


def hold_outs_table(diagnosis: Diagnosis) -> Table:
    """Pooled held-out log-loss in each hold-out."""
    pilot = diagnosis.pilot
    assert pilot is not None
    columns = (
        Column("hold-out", ("hold_out",)),
        Column("records", ("records",)),
        *(Column(METHODS[each], (each,)) for each in pilot.methods),
    )
    rows = tuple(
        (
            Cell(str(h + 1), (h + 1,)),
            Cell(f"{records:,}", (records,)),
            *(
                Cell(
                    _shown(pilot.hold_outs[each][h], 4),
                    (pilot.hold_outs[each][h],),
                    bold=pilot.hold_outs[each][h] == min(v[h] for v in pilot.hold_outs.values()),
                )
                for each in pilot.methods
            ),
        )
        for h, records in enumerate(pilot.records)
    )
    notes = []
    for i, a in enumerate(pilot.methods):
        for b in pilot.methods[:i]:
            gaps = [x - y for x, y in zip(pilot.hold_outs[b], pilot.hold_outs[a], strict=True)]
            notes.append(
                f"{METHODS[a]} better than {METHODS[b]} in {pilot.wins(a, b)} of {len(gaps)}, by "
                f"{min(gaps):+.4f} to {max(gaps):+.4f}."
            )
    notes.append("Hold-outs share most of their training records: this is no significance test.")
    return Table("Pilot: each hold-out, clients pooled", columns, rows, tuple(notes))


def _shown(value: float | None, digits: int, sign: bool = False) -> str:
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def _number(value: float | None, digits: int, sign: bool = False) -> Cell:
    return Cell(_shown(value, digits, sign), (value,))


def _pair(first: float, second: float) -> Cell:
    return Cell(f"{first:.3f} / {second:.3f}", (first, second))


def _radius(radius: float | None) -> Cell:
    if radius is None:
        return Cell("none", (None,))
    return Cell("infinite" if math.isinf(radius) else f"{radius:.2g}", (radius,))


def _clusters(clustering: Clustering) -> range:
    return range(max(clustering.labels) + 1)


def _members(names: Sequence[str], clustering: Clustering) -> str:
    if clustering.n_clusters == 1:
        return "all"
    if len(names) <= MATRIX_CLIENTS:
        return members(names, clustering.labels, limit=MATRIX_CLIENTS)
    sizes = [clustering.labels.count(j) for j in _clusters(clustering)]
    return "of " + ", ".join(map(str, sizes)) + " clients"


def _names(names: Sequence[str], labels: Sequence[int], cluster: int) -> str:
    return ", ".join(n for n, label in zip(names, labels, strict=True) if label == cluster)


def _clusters_of(names: Sequence[str], effect: ColumnEffect) -> str | None:
    if effect.labels is None:
        return None
    return " | ".join(_names(names, effect.labels, j) for j in range(max(effect.labels) + 1))


def _cut(diagnosis: Diagnosis, limit: int | None) -> list[str]:
    if limit is None or len(diagnosis.names) <= limit:
        return []
    return [f"The first {limit} of {len(diagnosis.names)} clients; the files have them all."]
