import gc
import io
import math
import re
import weakref

import numpy as np
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status

from fedtopo_torch import monitor
from fedtopo_torch.evaluation import PER_CLIENT_LIMIT, History, Score
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.monitor import FolderInUse, Progress, TensorBoard
from fedtopo_torch.options import OptionError
from fedtopo_torch.registry import algorithms, models
from fedtopo_torch.trainer import Diverged, Trainer

ROUNDS, EVALUATED = 7, [3, 6, 7]
POOLED = "all clients pooled"


def federation(n_clients=4, records=24):
    """Clients in two groups of different shape; client 'a 0' has one class in its test records."""
    rng = np.random.default_rng(5)
    clients = []
    for k in range(n_clients):
        x = rng.normal(size=(records + 8, 3)) * (1 if k % 2 else [1, 0.02, 0.02])
        y = (x[:, 0] + rng.normal(size=len(x)) > 0).astype(int)
        y[:2] = 0, 1
        if k == 0:
            y[records:] = 1
        train, test = (x[:records], y[:records]), (x[records:], y[records:])
        clients.append(Client(f"{'ab'[k % 2]} {k}", train, test, group=k % 2))
    return Federation(clients, name="toy", source={"dataset": "toy", "options": {"shift": 0.5}})


def trainer(callbacks, algorithm="ptopofl", clients=None, **settings):
    settings = {"rounds": ROUNDS, "eval_every": 3} | settings
    method = algorithms[algorithm]() if isinstance(algorithm, str) else algorithm
    return Trainer(
        method, clients or federation(), models["logistic"](), callbacks=callbacks, **settings
    )


class Stop:
    """Presses Ctrl-C when round 4 has been evaluated."""

    def started(self, trainer, result):
        pass

    def evaluated(self, round, scores):
        if round == 4:
            raise KeyboardInterrupt

    def finished(self, result):
        pass


def events(folder):
    reader = EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0, "histograms": 0}
    )
    return reader.Reload()


def text(reader, tag):
    return [
        (e.step, e.tensor_proto.string_val[0].decode())
        for e in reader.Tensors(f"{tag}/text_summary")
    ]


def session_end(reader):
    content = reader.PluginTagToContent(metadata.PLUGIN_NAME)[metadata.SESSION_END_INFO_TAG]
    return metadata.parse_session_end_info_plugin_data(content).status


def session_start(reader):
    content = reader.PluginTagToContent(metadata.PLUGIN_NAME)[metadata.SESSION_START_INFO_TAG]
    return metadata.parse_session_start_info_plugin_data(content).hparams


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "ptopofl"
    result = trainer([TensorBoard(folder)]).run()
    return folder, result, events(folder)


# ---- TensorBoard: curves ------------------------------------------------------------------------


def test_curves_are_the_history_at_the_evaluated_rounds(run):
    _, result, reader = run
    named = {"(pooled)": POOLED, "(cluster 0)": "cluster", "(cluster 1)": "cluster"}
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in result.history.rows():
        if row.model == "shared" or row.client == "(mean of clients)" or math.isnan(row.value):
            continue
        what = f"{row.split} {monitor.METRIC_TITLES[row.metric]}"
        group = named.get(row.client, "each client")
        name = row.client.strip("()")
        tag = f"{group}/{what}" if group == POOLED else f"{group} {what}/{name}"
        expected.setdefault(tag, []).append((row.round, float(np.float32(row.value))))
    written = {
        tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }
    assert written == expected
    assert [e.step for e in reader.Scalars(f"{POOLED}/test log-loss")] == EVALUATED


def test_an_undefined_auc_is_left_out(run):
    tags = run[2].Tags()["scalars"]
    assert "each client test AUC/a 0" not in tags
    assert "each client test AUC/b 1" in tags
    assert "each client test accuracy/a 0" in tags


def test_a_value_that_becomes_undefined_leaves_a_gap(tmp_path):
    task = trainer([], "fedavg")
    result = task.run()
    # As it is before round 1.
    result.history = History(result.federation.names, task.evaluator.n, result.federation.honest)
    board = TensorBoard(tmp_path)
    result.history = History(result.federation.names, result.history.n, result.federation.honest)
    board.started(task, result)
    for round, value in ((1, 0.5), (2, math.nan), (3, 0.75)):
        clients = torch.full((4,), value, dtype=torch.float64)
        board.evaluated(round, {("test", "auc"): Score(value, clients)})
    board.finished(result)
    curve = events(tmp_path).Scalars(f"{POOLED}/test AUC")
    assert [(e.step, e.value) for e in curve] == [(1, 0.5), (3, 0.75)]


def test_groups_of_charts_are_sorted_from_the_whole_to_the_parts(run):
    groups = sorted({tag.split("/")[0] for tag in run[2].Tags()["scalars"]})
    assert [group.split(" ")[0] for group in groups] == ["all"] + 6 * ["cluster"] + 6 * ["each"]


def test_only_what_is_evaluated_is_written(tmp_path):
    trainer([TensorBoard(tmp_path)], "local", splits=["train"], metrics=["accuracy"]).run()
    names = federation().names
    assert set(events(tmp_path).Tags()["scalars"]) == {
        f"{POOLED}/train accuracy",
        *(f"each client train accuracy/{name}" for name in names),
    }


def test_many_clients_have_no_curves_of_their_own(tmp_path):
    many = federation(PER_CLIENT_LIMIT + 1)
    trainer([TensorBoard(tmp_path)], clients=many, rounds=2).run()
    groups = {tag.split("/")[0] for tag in events(tmp_path).Tags()["scalars"]}
    assert POOLED in groups and "cluster test log-loss" in groups
    assert not any(group.startswith("each client") for group in groups)


def test_many_clusters_have_no_curves_of_their_own(tmp_path):
    many = federation(PER_CLIENT_LIMIT + 1)
    alone = algorithms["clustered"](labels=tuple(range(len(many))))
    trainer([TensorBoard(tmp_path)], alone, many, rounds=1).run()
    groups = {tag.split("/")[0] for tag in events(tmp_path).Tags()["scalars"]}
    assert groups == {POOLED}


def test_methods_without_clusters_have_no_cluster_curves_and_no_figures(tmp_path):
    trainer([TensorBoard(tmp_path)], "fedavg").run()
    tags = events(tmp_path).Tags()
    assert not any(tag.startswith("cluster") for tag in tags["scalars"])
    assert tags["images"] == []
    assert "run/method/text_summary" not in tags["tensors"]
    assert [path.name for path in tmp_path.iterdir()] == [next(tmp_path.glob("events*")).name]


# ---- TensorBoard: what stands beside the curves -------------------------------------------------


def test_settings_are_told_once(run):
    _, result, reader = run
    ((step, table),) = text(reader, "run/settings")
    assert step == 0
    for line in (
        "| algorithm | ptopofl |",
        "| federation | toy |",
        "| clients | 4 |",
        "| parameters | 4 |",
        "| rounds | 7 |",
        r"| local\_steps | 10 |",
        f"| eta | {result.facts.eta:.6g} |",
        "| l2 | 0.01 |",
        "| seed | 0 |",
        "| algorithm.abar | 0.3 |",
        "| algorithm.alpha | none |",
        "| data.dataset | toy |",
        "| data.shift | 0.5 |",
    ):
        assert line in table.splitlines()


def test_clients_are_told_with_cluster_weight_and_trust(run):
    _, result, reader = run
    ((step, table),) = text(reader, "run/clients")
    header, _, *rows = table.splitlines()
    assert step == 0
    assert header == "| client | training records | test records | cluster | weights | trust |"
    assert [row.split(" | ")[0] for row in rows] == ["| a 0", "| a 2", "| b 1", "| b 3"]
    weight, trust = result.report["weights"]["b 1"], result.report["trust"]["b 1"]
    assert rows[2] == f"| b 1 | 24 | 8 | 1 | {weight:.6g} | {trust:.6g} |"


def test_the_method_is_told(run):
    ((_, table),) = text(run[2], "run/method")
    lines = table.splitlines()
    assert "| cluster 0 | a 0, a 2 |" in lines
    assert f"| alpha | {run[1].report['alpha']:.6g} |" in lines
    assert f"| flagged | {', '.join(run[1].report['flagged']) or 'none'} |" in lines


def test_corrupted_clients_are_marked(tmp_path):
    part = (np.arange(8.0).reshape(4, 2), np.array([0, 1, 0, 1]))
    clients = [Client("x", part, part), Client("y", part, part, honest=False)]
    trainer([TensorBoard(tmp_path)], "fedavg", Federation(clients)).run()
    ((_, table),) = text(events(tmp_path), "run/clients")
    assert table.splitlines()[2:] == ["| x | 4 | 4 | yes |", "| y | 4 | 4 | no |"]


def test_a_report_that_changes_is_told_again(tmp_path):
    class Counting(algorithms["fedavg"]):
        def report(self, server, facts, clouds):
            moved = bool(server["theta"].any())
            return {"moved": moved, "nested": {"inner": [1.5, None]}}

    trainer([TensorBoard(tmp_path)], Counting()).run()
    reader = events(tmp_path)
    (before, first), (after, second) = text(reader, "run/method")
    assert (before, after) == (0, ROUNDS)
    assert "| moved | False |" in first and "| moved | True |" in second
    assert "| nested.inner | 1.5, none |" in first
    assert len(text(reader, "run/clients")) == 1


def test_names_cannot_break_a_table():
    table = monitor._table(("a", "b"), [("x|y\n*z*", [])])
    assert table.splitlines() == ["| a | b |", "| --- | --- |", r"| x\|y \*z\* | none |"]


def test_long_lists_are_cut():
    assert monitor._text(list(range(100))).endswith("58, 59, and 40 more")


def test_the_projector_finds_descriptors_names_and_clusters(run):
    folder, result, _ = run
    config = (folder / "projector_config.pbtxt").read_text()
    assert 'tensor_path: "00000/descriptors/tensors.tsv"' in config
    assert 'metadata_path: "00000/descriptors/metadata.tsv"' in config
    points = np.loadtxt(folder / "00000/descriptors/tensors.tsv", delimiter="\t")
    assert points.tolist() == [result.report["descriptor"][n] for n in result.federation.names]
    lines = (folder / "00000/descriptors/metadata.tsv").read_text().splitlines()
    assert lines == [
        "client\tcluster",
        "a 0\tcluster 0",
        "a 2\tcluster 0",
        "b 1\tcluster 1",
        "b 3\tcluster 1",
    ]


def test_figures_are_images_of_their_stated_size(run):
    reader = run[2]
    assert reader.Tags()["images"] == ["descriptors/distances", "descriptors/persistence diagrams"]
    for tag in reader.Tags()["images"]:
        (image,) = reader.Images(tag)
        assert image.step == 0
        png = image.encoded_image_string
        assert png[:8] == b"\x89PNG\r\n\x1a\n"
        # A PNG's width and height are its bytes 16 to 24.
        size = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
        assert size == (image.width, image.height)


def test_diagrams_show_the_features_that_are_described(tmp_path, monkeypatch):
    from fedtopo_torch import figures

    seen = []
    draw = figures.persistence_figure
    monkeypatch.setattr(
        figures,
        "persistence_figure",
        lambda clouds, *a, **k: seen.append(clouds) or draw(clouds, *a, **k),
    )
    trainer([TensorBoard(tmp_path / "raw")], rounds=1).run()
    trainer(
        [TensorBoard(tmp_path / "pooled")], algorithms["ptopofl"](scale="pooled"), rounds=1
    ).run()
    raw, pooled = (np.concatenate(clouds) for clouds in seen)
    np.testing.assert_array_equal(raw, np.concatenate(federation().clouds))
    np.testing.assert_allclose(pooled.std(0), 1)


def test_the_hparams_page_gets_settings_and_end_in_the_same_folder(run):
    folder, result, reader = run
    tags = reader.PluginTagToContent(metadata.PLUGIN_NAME)
    # No experiment summary: the first run found would decide what is shown of the others.
    assert set(tags) == {metadata.SESSION_START_INFO_TAG, metadata.SESSION_END_INFO_TAG}
    settings = session_start(reader)
    assert settings["algorithm"].string_value == "ptopofl"
    assert settings["eta"].number_value == result.facts.eta
    assert settings["algorithm.abar"].number_value == 0.3
    assert settings["algorithm.alpha"].string_value == "none"
    assert settings["data.shift"].number_value == 0.5
    assert session_end(reader) == Status.Value("STATUS_SUCCESS")
    assert len(list(folder.rglob("events*"))) == 1


# ---- TensorBoard: beginning and end -------------------------------------------------------------


def test_a_used_folder_is_refused(run):
    folder, _, _ = run
    before = sorted(folder.rglob("*"))
    with pytest.raises(FolderInUse, match=r"already holds TensorBoard events.*another folder"):
        TensorBoard(folder)
    assert issubclass(FolderInUse, OptionError)
    assert sorted(folder.rglob("*")) == before


def test_a_second_run_of_one_object_is_refused(tmp_path):
    task = trainer([TensorBoard(tmp_path)], "fedavg")
    task.run()
    with pytest.raises(FolderInUse):
        task.run()
    assert [e.step for e in events(tmp_path).Scalars(f"{POOLED}/test log-loss")] == EVALUATED


def test_runs_side_by_side_share_their_tags(tmp_path):
    for name in ("fedavg", "local"):
        trainer([TensorBoard(tmp_path / name)], name).run()
    assert (
        events(tmp_path / "fedavg").Tags()["scalars"]
        == events(tmp_path / "local").Tags()["scalars"]
    )


def test_an_interrupted_run_stays_readable(tmp_path):
    trainer([TensorBoard(tmp_path), Stop()], eval_every=1).run()
    reader = events(tmp_path)
    assert [e.step for e in reader.Scalars(f"{POOLED}/test log-loss")] == [1, 2, 3, 4]
    assert session_end(reader) == Status.Value("STATUS_FAILURE")


def test_a_diverged_run_stays_readable(tmp_path):
    with pytest.raises(Diverged):
        trainer([TensorBoard(tmp_path)], "fedavg", eta=205, rounds=200, eval_every=1).run()
    reader = events(tmp_path)
    curve = reader.Scalars(f"{POOLED}/train log-loss")
    assert [e.step for e in curve] == list(range(1, len(curve) + 1))
    assert len(curve) > 3 and all(math.isfinite(e.value) for e in curve)
    assert session_end(reader) == Status.Value("STATUS_FAILURE")


def test_no_scores_are_kept(tmp_path):
    task = trainer([], "fedavg")
    result = task.run()
    board, progress = TensorBoard(tmp_path), Progress(Console(file=io.StringIO()))
    for callback in (board, progress):
        callback.started(task, result)
    kept = []
    for round in (1, 2):
        clients = torch.zeros(4)
        kept.append(weakref.ref(clients))
        scores = {("test", "log_loss"): Score(0.0, clients)}
        board.evaluated(round, scores)
        progress.evaluated(round, scores)
    del clients, scores
    for callback in (board, progress):
        callback.finished(result)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


# ---- progress -----------------------------------------------------------------------------------


def plain(callbacks=(), **settings):
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=20)
    result = trainer([Progress(console), *callbacks], "fedavg", **settings).run()
    return out.getvalue(), result


def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def last_line(console):
    """What is left on the screen: the last line with anything printable on it."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()][-1]


def test_without_a_terminal_about_ten_plain_lines():
    text, result = plain(rounds=150, eval_every=1)
    assert all(line.isprintable() for line in text.split("\n"))
    losses = result.history.pooled("test", "log_loss")
    assert text.splitlines() == [
        f"FedAvg  round {t}/150  test log-loss {losses[t - 1]:.4f}" for t in range(15, 151, 15)
    ]


@pytest.mark.parametrize(
    ("rounds", "eval_every", "lines"),
    [(3, 1, [1, 2, 3]), (7, 3, [3, 6, 7]), (1, 1, [1]), (25, 10, [10, 20, 25])],
)
def test_lines_come_at_evaluated_rounds_and_at_the_last(rounds, eval_every, lines):
    text, _ = plain(rounds=rounds, eval_every=eval_every)
    assert [line.split()[2] for line in text.splitlines()] == [f"{t}/{rounds}" for t in lines]


def test_the_headline_is_the_first_split_where_test_is_not_evaluated():
    text, result = plain(splits=["train"], metrics=["accuracy", "log_loss"])
    loss = result.history.pooled("train", "log_loss")[-1]
    assert text.splitlines()[-1] == f"FedAvg  round 7/7  train log-loss {loss:.4f}"
    text, result = plain(splits=["train"], metrics=["auc"])
    assert text.splitlines()[-1].startswith("FedAvg  round 7/7  train AUC 0.")


def test_an_interrupted_run_says_where_it_stopped():
    text, result = plain([Stop()], eval_every=1)
    assert result.interrupted
    assert text.splitlines()[-1] == f"FedAvg  stopped after round {result.rounds}/7"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None)
    trainer([Progress(console)], "fedavg").run()
    assert "\x1b" not in console.file.getvalue()
    assert len(console.file.getvalue().splitlines()) == 3


def test_a_terminal_gets_a_bar_that_ends_at_the_last_round(monkeypatch):
    console = terminal(monkeypatch)
    result = trainer([Progress(console)]).run()
    text = console.file.getvalue()
    loss = result.history.pooled()[-1]
    last = last_line(console)
    assert "pTopoFL" in last and "round 7/7" in last and f"test log-loss {loss:.4f}" in last
    # The cursor, hidden while the bar is drawn, is back.
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_the_bar_is_left_where_an_interrupted_run_stopped(monkeypatch):
    console = terminal(monkeypatch)
    trainer([Progress(console), Stop()], "fedavg", eval_every=1).run()
    text = console.file.getvalue()
    assert "round 4/7" in last_line(console)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_the_bar_is_cleaned_up_when_training_diverges_at_once(monkeypatch):
    console = terminal(monkeypatch)
    with pytest.raises(Diverged):
        trainer([Progress(console)], "fedavg", eta=1e300, l2=1e10).run()
    text = console.file.getvalue()
    assert "round 0/7" in last_line(console)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_one_object_watches_several_runs(monkeypatch):
    console = terminal(monkeypatch)
    progress = Progress(console)
    for name in ("fedavg", "local"):
        trainer([progress], name).run()
    text = console.file.getvalue()
    assert "FedAvg" in text and "Local" in text
    assert text.count("\x1b[?25h") == 2


def test_the_bar_is_not_redrawn_every_round(monkeypatch):
    updates = []
    update = monitor.Bar.update
    monkeypatch.setattr(
        monitor.Bar,
        "update",
        lambda self, *a, **k: updates.append(k["completed"]) or update(self, *a, **k),
    )
    monkeypatch.setattr(monitor.time, "monotonic", lambda: 1000.0)
    trainer([Progress(terminal(monkeypatch))], "fedavg", rounds=50, eval_every=1).run()
    assert updates == [1, 50]
