"""What a client tells the server about the shape of its data: 46 numbers, no record.

The numbers summarise the persistent homology, in dimensions 0 and 1, of the Vietoris-Rips
filtration of the client's training features (Euclidean distance). A bar (b, d) of a persistence
diagram is a component (dimension 0) or a loop (dimension 1) that appears at scale b and disappears
at scale d; scales are distances between records, diameters and not radii.

For h = 0, 1 and a cloud of m records, with bar lengths l = d - b and q = l / sum(l):

    curve_h      Betti curve: number of bars with b <= t < d, at N_SCALES values
                 t = linspace(0, CURVE_PERCENTILE-th percentile of the deaths), divided by m
    entropy_h    -sum q ln q, divided by max(ln m, ln 2)
    amplitude_h  sqrt(sum l^2), divided by sqrt(m)
    count_h      number of bars, divided by m

averaged over seeded subsamples of m records, then scaled to unit length.

Source: H. Edelsbrunner, J. Harer, "Computational Topology" (2010), for persistence; persistent
entropy after H. Chintakunta et al., Pattern Recognition 48 (2015). Diagrams are gudhi's.
"""

# gudhi's interface loads scikit-learn, half a second: it is imported where it is first needed.
from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..randomness import generator

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    Diagrams = tuple[np.ndarray, np.ndarray]

__all__ = [
    "FEATURE_NAMES",
    "MIN_RECORDS",
    "N_FEATURES",
    "as_cloud",
    "cloud_size",
    "descriptor",
    "descriptors",
    "diagrams",
    "half_descriptors",
    "halves",
    "summarise",
]

N_SCALES = 20
CURVE_PERCENTILE = 95
#: Bars of this length or shorter are rounding, not topology.
SHORTEST_BAR = 1e-12
#: Clients with fewer records do not decide the common cloud size.
MIN_RECORDS = 20
#: Features beyond this overflow float64 once differences are squared and summed.
LARGEST_FEATURE = 1e100

FEATURE_NAMES = tuple(
    [f"curve_{h}_{t:02d}" for h in (0, 1) for t in range(N_SCALES)]
    + [f"{summary}_{h}" for summary in ("entropy", "amplitude", "count") for h in (0, 1)]
)
N_FEATURES = len(FEATURE_NAMES)


def as_cloud(
    features: ArrayLike, client: str | None = None, columns: Sequence[str] | None = None
) -> np.ndarray:
    """The features of one client as a float64 point cloud.

    Args:
        features: ``[n, d]``, or ``[n, ...]``, flattened to one row a record. Features of a
            DataFrame bring their own column names.
        client: the client's name, for the error message.
        columns: names of the d columns, for the error message.

    Returns:
        ``[n, d]`` float64.

    Raises:
        ValueError: no record, no column, fewer than two dimensions, not numbers, or a value that
            is NaN, infinite or beyond 1e100; the message names client, column and row.
    """
    who = "the cloud" if client is None else f"client {client!r}"
    columns = getattr(features, "columns", columns)
    try:
        cloud = np.asarray(features, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{who}: the features are not a table of numbers ({error}); "
            "encode text as numbers and give every record the same columns"
        ) from error
    if cloud.ndim < 2:
        raise ValueError(
            f"{who}: features must have shape [records, columns], got {list(cloud.shape)}; "
            "for a single column use features.reshape(-1, 1)"
        )
    if cloud.size == 0:
        raise ValueError(
            f"{who}: no features, shape {list(cloud.shape)}; "
            "at least one record and one column are needed"
        )
    cloud = cloud.reshape(len(cloud), -1)
    usable = np.abs(cloud) <= LARGEST_FEATURE  # False for NaN too
    if not usable.all():
        row, column = np.argwhere(~usable)[0]
        label = f" ({columns[column]!r})" if columns is not None else ""
        others = np.count_nonzero(~usable) - 1
        more = f" and {others} more such value(s)" if others else ""
        raise ValueError(
            f"{who}, column {column}{label}, row {row} (from 0): value {cloud[row, column]}{more}; "
            f"fill or drop missing values, and keep features within +-{LARGEST_FEATURE:g}"
        )
    return cloud


def _positive(value: int, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return number


def _persistence(clouds: list[np.ndarray]) -> list[Diagrams]:
    """``diagrams`` of several clouds in one call of gudhi, whose fixed cost a call is 0.4 ms."""
    from gudhi.sklearn.rips_persistence import RipsPersistence

    rips = RipsPersistence(homology_dimensions=[0, 1], homology_coeff_field=2, n_jobs=1)
    return [(_bars(h0), _bars(h1)) for h0, h1 in rips.fit_transform(clouds)]


def _bars(diagram: np.ndarray) -> np.ndarray:
    """Finite bars longer than rounding, sorted so that record order changes no later sum."""
    births, deaths = diagram[:, 0], diagram[:, 1]
    bars = diagram[np.isfinite(deaths) & (deaths - births > SHORTEST_BAR)]
    return bars[np.lexsort((bars[:, 1], bars[:, 0]))]


def diagrams(points: ArrayLike) -> Diagrams:
    """Vietoris-Rips persistence diagrams of a point cloud in dimensions 0 and 1.

    Coefficients in Z/2, Euclidean distance, no longest edge. Infinite bars and bars of length at
    most 1e-12 are dropped. All n records are used and the cost grows as n^2.3 (1.2 ms at n = 80):
    take a subsample of a large cloud first, as ``descriptor`` does.

    Args:
        points: ``[n, d]`` with n >= 1.

    Returns:
        ``(h0 [b0, 2], h1 [b1, 2])``, rows (birth, death) in increasing order. One record, or
        identical records, have no bar: shape ``[0, 2]``.

    Raises:
        ValueError: see ``as_cloud``.
    """
    return _persistence([as_cloud(points)])[0]


def summarise(diagrams: Diagrams, size: int) -> np.ndarray:
    """The 46 numbers of one cloud, before they are scaled to unit length.

    Formulas in the module's docstring, order in ``FEATURE_NAMES``.

    Args:
        diagrams: ``(h0 [b0, 2], h1 [b1, 2])`` finite bars, as ``diagrams`` returns them. An empty
            diagram gives zeros.
        size: m >= 1, the number of records in the cloud.

    Returns:
        ``[46]``, non-negative. Curves and counts are per record; an entropy is in units of ln m;
        amplitudes carry the unit of the features.

    Raises:
        ValueError: ``size`` is not a whole number of at least 1.
    """
    size = _positive(size, "size")
    curves = np.zeros((2, N_SCALES))
    entropy, amplitude, count = np.zeros(2), np.zeros(2), np.zeros(2)
    for h, bars in enumerate(diagrams):
        if len(bars) == 0:
            continue
        births, deaths = bars.T
        scales = np.linspace(0.0, np.percentile(deaths, CURVE_PERCENTILE), N_SCALES)[:, None]
        curves[h] = np.count_nonzero((births <= scales) & (scales < deaths), axis=1) / size
        lengths = deaths - births
        shares = lengths / lengths.sum()
        entropy[h] = np.sum(shares * np.log(1 / shares)) / np.log(max(size, 2))
        amplitude[h] = np.sqrt(np.sum(lengths**2) / size)
        count[h] = len(bars) / size
    return np.concatenate([curves[0], curves[1], entropy, amplitude, count])


def descriptor(points: ArrayLike, size: int, repeats: int, rng: np.random.Generator) -> np.ndarray:
    """The descriptor phi of one client.

    d = mean over ``repeats`` of ``summarise(diagrams(subsample), m)``, phi = d / |d|_2, where each
    subsample is m = min(size, n) records drawn without replacement. A client with n <= size uses
    all its records once (every subsample would be the same cloud) and draws nothing from ``rng``.

    Args:
        points: ``[n, d]`` features, n >= 1.
        size: records per subsample, at least 1; see ``cloud_size``.
        repeats: number of subsamples, at least 1.
        rng: generator of the draws; see ``fedtopo_torch.randomness.generator``.

    Returns:
        ``[46]`` of unit length; zeros if no subsample has a bar (one record, identical records).

    Raises:
        ValueError: see ``as_cloud``; ``size`` or ``repeats`` below 1.
    """
    cloud = as_cloud(points)
    size, repeats = _positive(size, "size"), _positive(repeats, "repeats")
    n = len(cloud)
    if n <= size:
        subsamples = [cloud]
    else:
        subsamples = [cloud[rng.choice(n, size, replace=False)] for _ in range(repeats)]
    m = min(size, n)
    mean = np.mean([summarise(bars, m) for bars in _persistence(subsamples)], axis=0)
    norm = np.linalg.norm(mean)
    return mean / norm if norm > 0 else mean


def half_descriptors(
    points: ArrayLike, size: int, repeats: int, splits: int, rng: np.random.Generator
) -> np.ndarray:
    """Descriptors of the two halves of random splits of one client's records.

    What remains the same from one half to the other is a property of the client, not of the draw
    of its records: see ``fedtopo_torch.topology.choose_n_clusters``.

    A half is described by subsamples of max(1, size // 2) records. Every client that has
    ``size`` records has that many in each half; with subsamples of ``size``, clients of few and of
    many records would differ by the sizes of their halves, in every split, whatever their data.

    Args:
        points: ``[n, d]`` features, n >= 1. With n odd the first half has one record more.
        size: records per subsample of the whole client, as in ``descriptor``.
        repeats: subsamples per half, at least 1.
        splits: number of splits S, at least 1.
        rng: generator of the splits and of the subsamples.

    Returns:
        ``[S, 2, 46]``; zeros for a client of one record, which has no bar on either side.

    Raises:
        ValueError: see ``as_cloud``; ``size``, ``repeats`` or ``splits`` below 1.
    """
    cloud = as_cloud(points)
    half_size = max(1, _positive(size, "size") // 2)
    splits = _positive(splits, "splits")
    if len(cloud) == 1:
        return np.zeros((splits, 2, N_FEATURES))
    return np.array(
        [
            [
                descriptor(cloud[half], half_size, repeats, rng)
                for half in np.array_split(rng.permutation(len(cloud)), 2)
            ]
            for _ in range(splits)
        ]
    )


def cloud_size(counts: ArrayLike, n_sub: int = 80) -> int:
    """The number of records m that every client's subsamples have.

    m = min(n_sub, smallest n_k among clients with n_k >= 20): descriptors of clouds of different
    sizes differ for that reason alone. If no client has 20 records, m = min(n_sub, largest n_k):
    everybody uses all its records.

    Args:
        counts: ``[K]`` numbers of training records n_k, each at least 1.
        n_sub: the most records in a subsample, at least 1.

    Raises:
        ValueError: no client, a client without records, or ``n_sub`` below 1.
    """
    n_sub = _positive(n_sub, "n_sub")
    counts = np.asarray(counts)
    if counts.ndim != 1 or counts.size == 0:
        raise ValueError(f"counts must hold one number per client, got shape {list(counts.shape)}")
    if counts.min() < 1:
        k = int(counts.argmin())
        raise ValueError(f"client {k} (from 0) has {counts[k]} records; leave it out")
    large = counts[counts >= MIN_RECORDS]
    return min(n_sub, int(large.min() if large.size else counts.max()))


def named_clouds(
    clouds: Iterable[Any], names: Iterable[str] | None
) -> tuple[list[np.ndarray], list[str]]:
    """Checked clouds and their names, ``"0", "1", ...`` by default; errors as ``descriptors``."""
    clouds = list(clouds)
    names = [str(name) for name in (range(len(clouds)) if names is None else names)]
    if not clouds:
        raise ValueError("no clients: give at least one cloud")
    if len(clouds) != len(names):
        raise ValueError(f"{len(clouds)} clouds but {len(names)} names: give one name per cloud")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two clients are called {twice!r}: draws are keyed by name, rename one")
    return [as_cloud(cloud, name) for cloud, name in zip(clouds, names, strict=True)], names


def descriptors(
    clouds: Iterable[Any],
    names: Iterable[str],
    *,
    seed: int,
    size: int,
    repeats: int,
    n_jobs: int | None = None,
) -> np.ndarray:
    """``descriptor`` of every client, each from its own keyed generator.

    Row k depends on (seed, name, features, size, repeats) of client k alone: not on the other
    clients, their order, or ``n_jobs``. Clients with fewer than 20 records are named in a warning.

    Args:
        clouds: K feature arrays ``[n_k, d]``; see ``as_cloud``.
        names: K client names, all different.
        seed: the run's seed.
        size: records per subsample; see ``cloud_size``.
        repeats: subsamples per client.
        n_jobs: threads, as in joblib (None: 1 or the surrounding context's; -1: all cores).

    Returns:
        ``[K, 46]``.

    Raises:
        ValueError: see ``descriptor``; names missing or repeated; no clients.
    """
    from joblib import Parallel, delayed

    clouds, names = named_clouds(clouds, names)
    few = [name for name, cloud in zip(names, clouds, strict=True) if len(cloud) < MIN_RECORDS]
    if few:
        listed = ", ".join(few[:10]) + (f" and {len(few) - 10} more" if len(few) > 10 else "")
        warnings.warn(
            f"fewer than {MIN_RECORDS} training records: {listed}; all of them are used, "
            "and the descriptor is noisier than, and not comparable to, the others'",
            stacklevel=2,
        )
    rows = Parallel(n_jobs=n_jobs, prefer="threads")(
        delayed(descriptor)(cloud, size, repeats, generator(seed, "descriptor", 0, name))
        for cloud, name in zip(clouds, names, strict=True)
    )
    return np.array(rows)


def halves(
    clouds: Iterable[Any],
    names: Iterable[str],
    *,
    seed: int,
    size: int,
    repeats: int,
    splits: int = 6,
    n_jobs: int | None = None,
) -> np.ndarray:
    """``half_descriptors`` of every client, each from its own keyed generator.

    Arguments and errors as in ``descriptors``; ``splits`` is the number of random splits S.

    Returns:
        ``[K, S, 2, 46]``.
    """
    from joblib import Parallel, delayed

    clouds, names = named_clouds(clouds, names)
    rows = Parallel(n_jobs=n_jobs, prefer="threads")(
        delayed(half_descriptors)(cloud, size, repeats, splits, generator(seed, "halves", 0, name))
        for cloud, name in zip(clouds, names, strict=True)
    )
    return np.array(rows)
