import io
import subprocess
import sys

import numpy as np
import pytest

from fedtopo_torch.comparison import Comparison, Plan, Run
from fedtopo_torch.figures import (
    clients_figure,
    curves_figure,
    distance_figure,
    persistence_figure,
    save_figure,
)
from fedtopo_torch.topology import diagrams


def clouds(*sizes):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(n, 2)) for n in sizes]


def descriptors(n_clients):
    phi = np.abs(np.random.default_rng(2).normal(size=(n_clients, 46)))
    return phi / np.linalg.norm(phi, axis=1, keepdims=True)


def png(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def points(axes):
    return [np.asarray(collection.get_offsets()) for collection in axes.collections]


def names_on(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


# ---- persistence --------------------------------------------------------------------------------


def test_one_panel_a_client_with_its_bars():
    parts = clouds(10, 12, 15)
    figure = persistence_figure(parts, ["x", "y", "z"], seed=0)
    assert [axes.get_title() for axes in figure.axes] == [
        "x\n10 records",
        "y\n12 records",
        "z\n15 records",
    ]
    for axes, cloud in zip(figure.axes, parts, strict=True):
        for shown, bars in zip(points(axes), diagrams(cloud), strict=True):
            np.testing.assert_array_equal(shown, bars)


def test_the_unit_square_has_its_loop():
    square = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    (axes,) = persistence_figure([square], ["square"], seed=0).axes
    components, loops = points(axes)
    np.testing.assert_allclose(components, [[0, 1]] * 3)
    np.testing.assert_allclose(loops, [[1, np.sqrt(2)]])


def test_panels_share_a_scale_that_holds_every_bar():
    small, large = clouds(10, 10)
    figure = persistence_figure([small, 100 * large], ["small", "large"], seed=0)
    top = max(bars.max() for part in (small, 100 * large) for bars in diagrams(part) if len(bars))
    for axes in figure.axes:
        assert axes.get_xlim() == axes.get_ylim() == pytest.approx((0, 1.05 * top))


def test_subsamples_are_keyed_by_seed_and_name():
    parts = clouds(60, 60)
    shown = points(persistence_figure(parts, ["x", "y"], seed=3, size=20).axes[1])
    alone = points(persistence_figure(parts[1:], ["y"], seed=3, size=20).axes[0])
    other = points(persistence_figure(parts[1:], ["y"], seed=4, size=20).axes[0])
    assert len(shown[0]) == 19
    for a, b in zip(shown, alone, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(shown[0], other[0])


@pytest.mark.parametrize(("given", "limit", "panels"), [(15, 12, 12), (5, 12, 5), (3, 1, 1)])
def test_only_the_first_clients_are_shown(given, limit, panels):
    names = [f"client {k}" for k in range(given)]
    figure = persistence_figure(clouds(*[8] * given), names, seed=0, limit=limit)
    assert len(figure.axes) == panels
    assert (f"first {panels} of {given} clients" in figure.get_suptitle()) == (panels < given)


def test_only_the_outer_panels_are_labelled():
    figure = persistence_figure(clouds(*[8] * 5), list("abcde"), seed=0)
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "birth", "birth", "birth"]
    assert [axes.get_ylabel() for axes in figure.axes] == ["death", "", "", "death", ""]


def test_dimensions_differ_in_marker_as_well_as_in_colour():
    (axes,) = persistence_figure(clouds(30), ["x"], seed=0).axes
    components, loops = axes.collections
    assert len(components.get_paths()[0].vertices) != len(loops.get_paths()[0].vertices)
    assert [c.get_label() for c in axes.collections] == ["H0, components", "H1, loops"]


def test_a_client_without_a_bar_can_be_drawn():
    figure = persistence_figure([np.ones((1, 2)), np.ones((3, 2))], ["one", "same"], seed=0)
    assert figure.axes[0].get_xlim() == (0, 1)
    assert png(figure)


def test_persistence_refuses_a_wrong_number_of_names():
    with pytest.raises(ValueError, match="2 clouds and 1 names"):
        persistence_figure(clouds(5, 5), ["x"], seed=0)
    with pytest.raises(ValueError, match="0 clouds"):
        persistence_figure([], [], seed=0)


# ---- distances ----------------------------------------------------------------------------------


def test_clients_are_ordered_by_cluster_and_then_as_given():
    phi, labels = descriptors(5), [1, 0, 1, 0, 2]
    axes = distance_figure(phi, list("abcde"), labels).axes[0]
    assert names_on(axes.xaxis) == names_on(axes.yaxis) == list("bdace")
    order = [1, 3, 0, 2, 4]
    expected = np.linalg.norm(phi[order][:, None] - phi[order], axis=2)
    np.testing.assert_allclose(axes.images[0].get_array(), expected, atol=1e-12)


def test_lines_part_the_clusters_and_name_them():
    axes = distance_figure(descriptors(5), list("abcde"), [1, 0, 1, 0, 2]).axes[0]
    vertical = {line.get_xdata()[0] for line in axes.lines if line.get_ydata()[0] == 0}
    horizontal = {line.get_ydata()[0] for line in axes.lines if line.get_xdata()[0] == 0}
    assert vertical == horizontal == {1.5, 3.5}
    (top,) = axes.child_axes
    assert names_on(top.xaxis) == ["cluster 0", "cluster 1", "cluster 2"]
    np.testing.assert_allclose(top.get_xticks(), [0.5, 2.5, 4])


def test_without_labels_there_is_one_unnamed_cluster():
    axes = distance_figure(descriptors(3), list("abc")).axes[0]
    assert names_on(axes.xaxis) == list("abc")
    assert not axes.lines and not axes.child_axes


def test_few_distances_are_written_out():
    phi = np.array([[1.0, 0.0], [0.0, 1.0]])
    axes = distance_figure(phi, ["x", "y"]).axes[0]
    assert [text.get_text() for text in axes.texts] == ["0.00", "1.41", "1.41", "0.00"]
    assert not distance_figure(descriptors(11), list("abcdefghijk")).axes[0].texts


@pytest.mark.parametrize(("n_clients", "named"), [(40, True), (41, False), (200, False)])
def test_names_are_dropped_where_they_cannot_be_read(n_clients, named):
    names = [f"client {k}" for k in range(n_clients)]
    figure = distance_figure(descriptors(n_clients), names, [k % 3 for k in range(n_clients)])
    assert (len(names_on(figure.axes[0].xaxis)) == n_clients) == named
    assert max(figure.get_size_inches()) < 14
    assert len(figure.axes[0].child_axes) == 1


def test_many_clusters_are_not_named():
    axes = distance_figure(descriptors(13), list("abcdefghijklm"), range(13)).axes[0]
    assert not axes.child_axes
    assert len(axes.lines) == 4 * 12


def test_names_are_shown_as_they_are():
    names = ["$x_1$", "a very long name of a hospital"]
    axes = distance_figure(descriptors(2), names, [0, 1]).axes[0]
    assert names_on(axes.xaxis) == ["$x_1$", "a very long name of a…"]
    assert not any(label.get_parse_math() for label in axes.get_xticklabels())


def test_one_client_can_be_drawn():
    assert png(distance_figure(descriptors(1), ["only"], [0]))


def test_distance_refuses_wrong_lengths():
    for names, labels in (["x"], [0, 0]), (["x", "y"], [0]), (["x", "y"], [[0, 0]]):
        with pytest.raises(ValueError, match="give one of each per client"):
            distance_figure(descriptors(2), names, labels)


# ---- both ---------------------------------------------------------------------------------------


def test_drawing_twice_gives_the_same_picture():
    for draw in (
        lambda: persistence_figure(clouds(30, 30), ["x", "y"], seed=0, size=20),
        lambda: distance_figure(descriptors(4), list("abcd"), [0, 1, 0, 1]),
    ):
        assert png(draw()) == png(draw())


def test_pyplot_is_not_loaded():
    code = (
        "import sys; from fedtopo_torch.figures import distance_figure as f;"
        "f([[0.0], [1.0]], ['x', 'y']).canvas.draw(); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- comparisons --------------------------------------------------------------------------------


def comparison(methods=("local", "fedavg", "oracle"), seeds=3, n_clients=2):
    """Method i has log-loss 0.5 + i/10 + seed/100 on client 0 and 0.1 more on each next one."""
    plan = Plan.of(methods, "synthetic", seeds)
    names = tuple(f"c${k}$" for k in range(n_clients))
    runs = []
    for i, method in enumerate(plan.methods):
        for seed in plan.seeds:
            last = 0.5 + i / 10 + seed / 100
            runs.append(
                Run(
                    "synthetic",
                    method.label,
                    seed,
                    names,
                    (True,) * n_clients,
                    {"test": (5,) * n_clients},
                    {"test log_loss": last},
                    {"test log_loss": tuple(last + k / 10 for k in range(n_clients))},
                    (5, 10),
                    (0.7, last),
                )
            )
    return Comparison(plan, tuple(runs))


def entries(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_curves_are_means_with_bands():
    figure = curves_figure(comparison(), "synthetic")
    (axes,) = figure.axes
    for i, (line, band) in enumerate(zip(axes.lines, axes.collections, strict=True)):
        np.testing.assert_array_equal(line.get_xdata(), [5, 10])
        mean, std = 0.51 + i / 10, np.std([0, 0.01, 0.02])
        np.testing.assert_allclose(line.get_ydata(), [0.7, mean])
        corners = band.get_paths()[0].vertices
        at_ten = corners[corners[:, 0] == 10][:, 1]
        np.testing.assert_allclose([at_ten.min(), at_ten.max()], [mean - std, mean + std])
    # Listed as they lie on the right: the highest first.
    assert entries(figure) == ["Oracle (not deployable)", "FedAvg", "Local"]


def test_methods_differ_in_colour_or_line_and_in_marker():
    methods = {f"m{i}": "fedavg" for i in range(14)}
    lines = curves_figure(comparison(methods, 1), "synthetic").axes[0].lines
    looks = {(line.get_color(), str(line.get_linestyle())) for line in lines}
    assert len(looks) == 14
    same = [line for line in lines if line.get_color() == lines[0].get_color()]
    assert len(same) == 2 and same[0].get_linestyle() != same[1].get_linestyle()


def test_clients_have_a_row_each_and_methods_a_dot():
    figure = clients_figure(comparison(), "synthetic")
    (axes,) = figure.axes
    assert names_on(axes.yaxis) == ["c$0$", "c$1$"]
    dots = [container.lines[0] for container in axes.containers]
    for i, dot in enumerate(dots):
        np.testing.assert_allclose(dot.get_xdata(), [0.51 + i / 10, 0.61 + i / 10])
        assert (np.abs(dot.get_ydata() - [0, 1]) < 0.5).all()
    whisker = axes.containers[0].lines[2][0].get_segments()[0]
    assert np.ptp(whisker[:, 0]) == pytest.approx(2 * np.std([0, 0.01, 0.02]))
    assert entries(figure) == ["Local", "FedAvg", "Oracle (not deployable)"]
    low, high = axes.get_ylim()
    assert low > high  # the first client is on top


def test_many_clients_are_cut_and_it_is_said():
    figure = clients_figure(comparison(["local"], 1, n_clients=45), "synthetic")
    assert len(names_on(figure.axes[0].yaxis)) == 40
    assert "first 40 of 45 clients" in figure.axes[0].get_title(loc="left")


def test_without_a_finished_run_there_is_no_figure():
    plan = Plan.of("local", "synthetic", 1)
    failed = Comparison(plan, (Run("synthetic", "Local", 0, error="no"),))
    for draw in (curves_figure, clients_figure):
        with pytest.raises(ValueError, match="no run on synthetic has finished"):
            draw(failed, "synthetic")


def test_a_method_without_a_finished_run_is_left_out_and_keeps_no_colour():
    whole = comparison()
    part = Comparison(whole.plan, tuple(run for run in whole.runs if run.method != "FedAvg"))
    assert entries(curves_figure(part, "synthetic")) == ["Oracle (not deployable)", "Local"]
    all_lines = curves_figure(whole, "synthetic").axes[0].lines
    lines = curves_figure(part, "synthetic").axes[0].lines
    assert [line.get_color() for line in lines] == [all_lines[i].get_color() for i in (0, 2)]


def test_saved_as_png_and_svg_and_nothing_else(tmp_path):
    figure = curves_figure(comparison(), "synthetic")
    paths = save_figure(figure, tmp_path / "curves v1.2")
    assert [path.name for path in paths] == ["curves v1.2.png", "curves v1.2.svg"]
    assert sorted(tmp_path.iterdir()) == paths
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in paths[1].read_bytes()
    with pytest.raises(OSError):
        save_figure(figure, tmp_path / "missing" / "curves")


def test_the_same_figure_gives_the_same_files(tmp_path):
    contents = []
    for _ in range(2):
        paths = save_figure(curves_figure(comparison(), "synthetic"), tmp_path / "curves")
        contents.append([path.read_bytes() for path in paths])
    assert contents[0] == contents[1]
