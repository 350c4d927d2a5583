"""What watches a run: a progress bar, and TensorBoard.

A round can take a fifth of a millisecond, so a callback does as little as it can in each.
"""

# TensorBoard and matplotlib take more than a second to load: they are imported where needed.
from __future__ import annotations

import io
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from .evaluation import PER_CLIENT_LIMIT, Score
from .options import OptionError

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.figure import Figure
    from tensorboard.plugins.hparams.plugin_data_pb2 import SessionStartInfo
    from torch.utils.tensorboard import SummaryWriter

    from .trainer import Result, Trainer

__all__ = ["Counter", "FolderInUse", "Progress", "TensorBoard"]

Scores = dict[tuple[str, str], Score]

#: How metrics are called in charts and on the progress bar.
METRIC_TITLES = {"log_loss": "log-loss", "auc": "AUC", "accuracy": "accuracy"}

#: Seconds between two updates of the bar.
REDRAW = 0.1
#: Lines per run where there is no terminal.
LINES = 10

#: TensorBoard sorts the groups of charts by name: these come in this order.
POOLED, CLUSTER, CLIENT = "all clients pooled", "cluster", "each client"
#: Above this many clients there are no figures, no projector and no table of clients.
SHOWN_CLIENTS = 1_000
#: Records per client in the persistence diagrams, at most.
DIAGRAM_SIZE = 80
#: Events hold float32; of a diverging run larger values would be shown as infinite.
FLOAT32_MAX = 3.4e38
#: Entries of a list in a table, at most.
LISTED = 60


def _title(trainer: Trainer) -> str:
    return trainer.algorithm.label


def _metric(metric: str) -> str:
    return METRIC_TITLES.get(metric, metric)


class Progress:
    """Shows how far a run is: a bar on a terminal, elsewhere about ten plain lines.

    Both show the pooled test log-loss; of the first split and metric where that is not evaluated.
    They move at evaluated rounds. One object may watch several runs, one after the other.

    Args:
        console: where to write; by default stderr, so that results on stdout can be piped.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bar: Bar | None = None

    def started(self, trainer: Trainer, result: Result) -> None:
        """Show the bar at round 0."""
        self._name, self._rounds = _title(trainer), trainer.rounds
        self._round = self._lines = 0
        self._scores: Scores = {}
        self._bar = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._bar = Bar(
                TextColumn("{task.description:<11}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("round {task.completed:.0f}/{task.total:.0f}", markup=False),
                TextColumn("{task.fields[score]}", markup=False),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=self.console,
                # The drawing thread competes with training.
                refresh_per_second=5,
            )
            self._task = self._bar.add_task(self._name, total=self._rounds, score="")
            self._bar.start()
            self._next = 0.0

    def evaluated(self, round: int, scores: Scores) -> None:
        """Move on to ``round``."""
        self._round, self._scores = round, scores
        if self._bar is not None:
            now = time.monotonic()
            if now >= self._next:
                self._next = now + REDRAW
                self._move()
        elif round == self._rounds or round * LINES // self._rounds > self._lines:
            self._lines = round * LINES // self._rounds
            self._print(f"round {round}/{self._rounds}  {_headline(scores)}")

    def finished(self, result: Result) -> None:
        """Leave the bar, or a last line, where the run has ended."""
        if self._bar is not None:
            if self._round:
                self._move()
            self._bar.stop()
            self._bar = None
        elif result.rounds < self._rounds:
            self._print(f"stopped after round {result.rounds}/{self._rounds}")
        self._scores = {}

    def _move(self) -> None:
        assert self._bar is not None
        self._bar.update(self._task, completed=self._round, score=_headline(self._scores))

    def _print(self, text: str) -> None:
        self.console.print(f"{self._name}  {text}", markup=False, highlight=False, soft_wrap=True)


class Counter:
    """Counts finished runs of a comparison: a bar on a terminal, elsewhere about ten lines.

    Args:
        console: where to write.
        title: what is counted.
    """

    def __init__(self, console: Console, title: str) -> None:
        self.console, self.title = console, title
        self._bar: Bar | None = None
        self._lines = 0
        if console.is_terminal and not console.is_dumb_terminal:
            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("run {task.completed:.0f}/{task.total:.0f}", markup=False),
                TimeRemainingColumn(elapsed_when_finished=True),
                TextColumn("{task.fields[last]}", markup=False),
                console=console,
            )
            self._task = self._bar.add_task(title, total=None, last="starting the processes")
            self._bar.start()

    def __call__(self, done: int, total: int, last: str) -> None:
        """``done`` of ``total`` runs have ended, the last of them being ``last``."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, last=last)
        elif done == total or done * LINES // total > self._lines:
            self._lines = done * LINES // total
            self.console.print(f"{self.title}  run {done}/{total}  {last}", markup=False)

    def close(self) -> None:
        """Leave the display as it is."""
        if self._bar is not None:
            self._bar.stop()


def _headline(scores: Scores) -> str:
    key = ("test", "log_loss")
    if key not in scores:
        key = next((k for k in scores if k[1] == "log_loss"), next(iter(scores)))
    return f"{key[0]} {_metric(key[1])} {_value(scores[key].pooled)}"


def _value(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"


class FolderInUse(OptionError):
    """The folder already holds a run's TensorBoard events."""


class TensorBoard:
    """Writes a run for TensorBoard: curves, tables, descriptors and figures.

    Curves carry the round as their step. Runs whose folders lie side by side share charts:

    - ``all clients pooled/test log-loss``: and so on for every split and metric;
    - ``cluster test log-loss/cluster 0``: for methods with clusters, up to 50 of them;
    - ``each client test log-loss/Cleveland``: up to 50 clients.

    A value that is undefined (the AUC of a client with one class) or beyond float32 is left out.

    Text: ``run/settings``, ``run/clients`` and ``run/method`` (what the method reports). A method
    that reports descriptors gets them in the projector, with the matrix of their distances and the
    persistence diagrams of the first clients as images. The HParams page compares runs by their
    settings.

    A round costs about 10 microseconds per curve, most of it TensorBoard's checksum, which is
    plain Python; evaluate less often where that is too much.

    Args:
        folder: of this run alone; made if missing.

    Raises:
        FolderInUse: the folder holds events: two runs would give one tangled curve.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        self._refuse_used()

    def _refuse_used(self) -> None:
        if any(self.folder.glob("events.out.tfevents.*")):
            raise FolderInUse(
                f"{self.folder} already holds TensorBoard events; a second run would tangle its "
                f"curves with theirs. Choose another folder, or delete this one."
            )

    def started(self, trainer: Trainer, result: Result) -> None:
        """Write everything that is known before round 1.

        Raises:
            FolderInUse: see the class.
        """
        self._refuse_used()
        from torch.utils.tensorboard import SummaryWriter

        self._rounds = trainer.rounds
        self._tags: dict[tuple[str, str, int | None], list[tuple[int, str]]] = {}
        self._names = result.federation.names
        self._writer: SummaryWriter = SummaryWriter(str(self.folder), flush_secs=5)
        settings = _settings(trainer, result)
        self._add(_session(session_start_info=_start_info(settings)), 0)
        self._writer.add_text("run/settings", _table(("setting", "value"), settings.items()), 0)
        report = result.report
        self._texts: dict[str, str] = {}
        self._write_report(result, report, 0)
        if "descriptor" in report and len(self._names) <= SHOWN_CLIENTS:
            self._write_descriptors(trainer, result, report)
        # Of a resumed run the curves begin where the run did.
        for round, scores in result.history.replay():
            self.evaluated(round, scores)
        self._writer.flush()

    def evaluated(self, round: int, scores: Scores) -> None:
        """Add one point to every curve."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        value = Summary.Value
        # All points of a round are one event: twenty times cheaper than one event each.
        points = []
        for (split, metric), score in scores.items():
            clusters = None if score.clusters is None else score.clusters.tolist()
            key = (split, metric, None if clusters is None else len(clusters))
            tags = self._tags.get(key) or self._tags.setdefault(key, self._curves(*key))
            values = [score.pooled, *(clusters or ()), *score.clients.tolist()]
            points += [
                value(tag=tag, simple_value=values[i])
                for i, tag in tags
                if -FLOAT32_MAX <= values[i] <= FLOAT32_MAX  # False for NaN
            ]
        self._add(Summary(value=points), round)

    def finished(self, result: Result) -> None:
        """Write how the run ended, and close the files."""
        from tensorboard.plugins.hparams.api_pb2 import Status
        from tensorboard.plugins.hparams.plugin_data_pb2 import SessionEndInfo

        complete = result.rounds == self._rounds
        status = "STATUS_SUCCESS" if complete else "STATUS_FAILURE"
        try:
            end = SessionEndInfo(status=Status.Value(status), end_time_secs=time.time())
            self._add(_session(session_end_info=end), result.rounds)
            self._write_report(result, result.report, result.rounds)
        finally:
            self._writer.close()

    def _add(self, summary: Any, step: int) -> None:
        self._writer._get_file_writer().add_summary(summary, step)

    def _curves(self, split: str, metric: str, clusters: int | None) -> list[tuple[int, str]]:
        """Position in (pooled, clusters, clients), and tag, of the curves of one score."""
        what = f"{split} {_metric(metric)}"
        curves = [(0, f"{POOLED}/{what}")]
        clusters = clusters or 0
        if clusters <= PER_CLIENT_LIMIT:
            curves += [(1 + j, f"{CLUSTER} {what}/cluster {j}") for j in range(clusters)]
        if len(self._names) <= PER_CLIENT_LIMIT:
            curves += [
                (1 + clusters + k, f"{CLIENT} {what}/{name}") for k, name in enumerate(self._names)
            ]
        return curves

    def _write_report(self, result: Result, report: dict[str, Any], step: int) -> None:
        """The tables that tell about the method, where they are new or have changed."""
        texts = {
            "run/clients": _clients(result, report),
            "run/method": _method(report, self._names),
        }
        for tag, text in texts.items():
            if text and self._texts.get(tag) != text:
                self._writer.add_text(tag, text, step)
        self._texts = texts

    def _write_descriptors(self, trainer: Trainer, result: Result, report: dict[str, Any]) -> None:
        from .figures import distance_figure, persistence_figure

        federation, facts, names = result.federation, result.facts, self._names
        phi = [report["descriptor"][name] for name in names]
        cluster = _cluster_of(report)
        labels = [cluster.get(name, 0) for name in names]
        self._writer.add_embedding(
            np.asarray(phi),
            metadata=[
                [_one_line(name), f"cluster {j}"] for name, j in zip(names, labels, strict=True)
            ],
            metadata_header=["client", "cluster"],
            tag="descriptors",
        )
        self._add(_image("descriptors/distances", distance_figure(phi, names, labels)), 0)
        clouds = federation.clouds
        if trainer.algorithm.model_dump().get("scale") == "pooled":
            mean, scale = facts.mean.numpy(), facts.scale.numpy()
            clouds = [(cloud - mean) / scale for cloud in clouds]
        figure = persistence_figure(
            clouds, names, facts.seed, size=max(1, min(DIAGRAM_SIZE, facts.smallest))
        )
        self._add(_image("descriptors/persistence diagrams", figure), 0)


def _settings(trainer: Trainer, result: Result) -> dict[str, Any]:
    """Everything that was chosen for this run, by name."""
    federation, algorithm = result.federation, trainer.algorithm
    settings = {
        "algorithm": algorithm.name or type(algorithm).__name__,
        "federation": federation.name,
        "clients": len(federation),
        "parameters": result.objective.p,
        "rounds": trainer.rounds,
        "local_steps": trainer.training.local_steps,
        "eta": result.facts.eta,
        "l2": trainer.training.l2,
        "seed": trainer.seed,
    }
    for name, value in algorithm.model_dump().items():
        settings[f"algorithm.{name}"] = value
    for name, value in federation.source.items():
        nested = value if isinstance(value, dict) else {name: value}
        settings |= {f"data.{inner}": entry for inner, entry in nested.items()}
    return settings


def _clients(result: Result, report: dict[str, Any]) -> str:
    """One line per client: records, cluster, and what the method reports per client."""
    federation = result.federation
    # Of methods that report nothing the table would be the same for each.
    same = not report and bool(federation.honest.all())
    if len(federation) > SHOWN_CLIENTS or same:
        return ""
    columns: dict[str, Sequence[Any]] = {
        "client": federation.names,
        "training records": federation.train.n.tolist(),
        "test records": federation.test.n.tolist(),
    }
    if not bool(federation.honest.all()):
        columns["honest"] = ["yes" if h else "no" for h in federation.honest.tolist()]
    if "clusters" in report:
        cluster = _cluster_of(report)
        columns["cluster"] = [cluster.get(name) for name in federation.names]
    for key, value in report.items():
        if _per_client(value, federation.names) and isinstance(value[federation.names[0]], float):
            columns[key] = [value[name] for name in federation.names]
    return _table(list(columns), zip(*columns.values(), strict=True))


def _method(report: dict[str, Any], names: Sequence[str]) -> str:
    """What the method reports about the federation as a whole."""
    lines: dict[str, Any] = {}
    for key, value in report.items():
        if key == "clusters":
            lines |= {f"cluster {j}": members for j, members in enumerate(value)}
        elif not isinstance(value, dict):
            lines[key] = value
        elif not _per_client(value, names):
            lines |= {f"{key}.{inner}": entry for inner, entry in value.items()}
    return _table(("reported", "value"), lines.items()) if lines else ""


def _per_client(value: Any, names: Sequence[str]) -> bool:
    return isinstance(value, dict) and value.keys() == set(names)


def _cluster_of(report: dict[str, Any]) -> dict[str, int]:
    return {name: j for j, members in enumerate(report.get("clusters", ())) for name in members}


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{_text(name)}: {_text(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        more = f", and {len(value) - LISTED} more" if len(value) > LISTED else ""
        return ", ".join(map(_text, value[:LISTED])) + more if value else "none"
    return str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header)]
    lines += [[_escaped(_text(value)) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]()#+!|<>-])", r"\\\1", _one_line(text))


def _start_info(settings: dict[str, Any]) -> SessionStartInfo:
    from tensorboard.plugins.hparams.plugin_data_pb2 import SessionStartInfo

    info = SessionStartInfo(start_time_secs=time.time())
    for name, value in settings.items():
        if isinstance(value, bool):
            info.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            info.hparams[name].number_value = value
        else:
            info.hparams[name].string_value = _text(value)
    return info


def _session(**info: Any) -> Any:
    """A summary by which the HParams page knows this run.

    Without an experiment summary the page gathers settings from all runs; with one, the first run
    it finds would decide which settings of the others are shown.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **info)
    plugin = SummaryMetadata.PluginData(
        plugin_name=metadata.PLUGIN_NAME, content=content.SerializeToString()
    )
    tag = (
        metadata.SESSION_START_INFO_TAG
        if "session_start_info" in info
        else metadata.SESSION_END_INFO_TAG
    )
    return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin))])


def _image(tag: str, figure: Figure) -> Any:
    """The figure as a PNG in a summary; ``SummaryWriter.add_figure`` would load pyplot."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    width, height = figure.canvas.get_width_height()
    image = Summary.Image(
        width=width, height=height, colorspace=4, encoded_image_string=buffer.getvalue()
    )
    return Summary(value=[Summary.Value(tag=tag, image=image)])
