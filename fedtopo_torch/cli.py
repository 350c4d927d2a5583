"""The command line: parses and prints, decides nothing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .experiments import CATALOGUE
from .options import FedtopoError, OptionError, Options, did_you_mean, parse_assignments
from .registry import UnknownName

app = typer.Typer(
    name="fedtopo",
    help="Personalised and clustered federated learning, with topological client descriptors.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

# Tables keep their shape in a pipe, where no terminal says how wide it is.
_WIDTH = None if sys.stdout is not None and sys.stdout.isatty() else 100
out = Console(width=_WIDTH, highlight=False)
err = Console(stderr=True, highlight=False)

INTERRUPTED = 130
#: Of each client's training records, kept for validation where settings are tuned.
VALIDATION_SHARE = "0.2"


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


ModelName = Annotated[
    str, typer.Option(help="Model; 'auto' is logistic, or softmax for several classes.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Communication rounds T.")]
LocalSteps = Annotated[int, typer.Option(min=1, help="Gradient steps per client and round, tau.")]
Eta = Annotated[str, typer.Option(help="Step size; 'auto' is 1 / the largest smoothness constant.")]
L2 = Annotated[
    float, typer.Option(min=0, callback=_finite, help="L2 weight lambda, biases included.")
]
Seed = Annotated[
    int, typer.Option(min=0, max=2**32 - 1, metavar="INTEGER", help="Seed of every draw.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="An option of the method, dataset, model or training, for example abar=0.5 or "
        "momentum=0.9; repeat for more. 'fedtopo describe NAME' (or 'training') shows them.",
    ),
]
Target = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Of your own CSV files: what to predict.")
]
Positive = Annotated[
    str | None, typer.Option(metavar="VALUE", help="Of your own CSV files: the target's 1.")
]
TestSize = Annotated[
    str | None, typer.Option(metavar="SHARE", help="Of each client's records, for testing.")
]
Seeds = Annotated[str, typer.Option(help="How many (10 is 0 to 9), or which, separated by commas.")]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Runs at a time; one per core by default.")
]
LocalEpochs = Annotated[
    int | None,
    typer.Option(min=1, help="Instead of --local-steps: passes over a client's records."),
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Records per step; by default all of a client's.")
]
Optimizer = Annotated[str, typer.Option(help="Of the clients: sgd, adam or adamw.")]
Participation = Annotated[
    float, typer.Option(help="Fraction of clients that take part in a round, above 0.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps, or auto for the best there is.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main() -> None:
    """Entry point of ``fedtopo`` and ``python -m fedtopo_torch``."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _stop)
    app()


def _stop(number: int, frame: Any) -> None:
    """A polite request to end is taken as Ctrl-C: what is done so far is kept."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def _reported(debug: bool) -> Iterator[None]:
    """Errors in one line: exit code 2 for bad usage, 1 for a failure, 130 for Ctrl-C."""
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = _print_warning
            yield
    except (typer.Exit, typer.Abort, click.ClickException):
        raise
    except KeyboardInterrupt:
        err.print("[yellow]stopped[/]; nothing was written.")
        raise typer.Exit(INTERRUPTED) from None
    except (Exception, SystemExit) as error:
        if debug:
            raise
        err.print(f"[bold red]error:[/] {escape(_told(error))}")
        code = 2 if isinstance(error, OptionError) else 1
        raise typer.Exit(code) from None


def _told(error: BaseException) -> str:
    """An error for people; of one that nobody wrote for people, also its kind and its place."""
    if isinstance(error, ValueError | OSError | FedtopoError):
        return str(error) or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    # The last line that is the user's own says more than the last line of a library.
    own = [f for f in frames if "site-packages" not in f.filename and __package__ not in f.filename]
    where = (own or frames)[-1]
    return (
        f"{type(error).__name__}: {error} ({where.filename}, line {where.lineno}, in "
        f"{where.name}). --debug shows the traceback."
    )


def _print_warning(message: Any, *_: Any, **__: Any) -> None:
    err.print(f"[yellow]warning:[/] {escape(str(message))}")


def _given(set_: list[str] | None, **shorthands: str | None) -> dict[str, str]:
    """Options of ``--set``, and of the options that stand for one."""
    short = [f"{name}={value}" for name, value in shorthands.items() if value is not None]
    return parse_assignments([*(set_ or []), *short])


def _shares(options: dict[str, str], parts: dict[str, type[Options]]) -> dict[str, dict[str, str]]:
    """Give every ``--set`` option to the one part (algo, dataset, model) that declares it."""
    shares: dict[str, dict[str, str]] = {part: {} for part in parts}
    for name, value in options.items():
        part, dot, plain = name.partition(".")
        if dot and part in parts:
            owners = [part] if plain in parts[part].model_fields else []
        else:
            plain = name
            owners = [p for p, cls in parts.items() if name in cls.model_fields]
        if not owners:
            known = sorted({field for cls in parts.values() for field in cls.model_fields})
            names = ", ".join(f"{p} '{getattr(c, 'name', p)}'" for p, c in parts.items())
            raise OptionError(f"no option '{name}' in {names}." + did_you_mean(plain, known))
        if len(owners) > 1:
            choices = " or ".join(f"--set {p}.{name}={value}" for p in owners)
            raise OptionError(f"option '{name}' belongs to {' and '.join(owners)}: say {choices}.")
        shares[owners[0]][plain] = value
    return shares


def _training(flags: dict[str, Any], given: dict[str, str]) -> dict[str, Any]:
    """Settings of training from their flags and from ``--set``, checked.

    Raises:
        OptionError: one of them is given in both ways, or not valid.
    """
    from .training import Training

    usual = {name: field.default for name, field in Training.model_fields.items()}
    for name in given:
        if name in flags and flags[name] not in (usual[name], None) and name != "eval_every":
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(f"{name} is given twice, by {flag} and by --set: give one of them.")
    settings = {**flags, **given}
    Training(**settings)
    return settings


def _positive_or_auto(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(
            f"'{text}' is neither 'auto' nor a finite number above 0.", param_hint="'--eta'"
        )
    return value


@app.command()
def train(
    algo: Annotated[
        str, typer.Option(help="Method: a name of 'fedtopo list', or of a file in ./algorithms.")
    ] = "ptopofl",
    dataset: Annotated[str, typer.Option(help="Federation.")] = "fed_heart_disease",
    model: ModelName = "auto",
    rounds: Rounds = 150,
    local_steps: LocalSteps = 10,
    local_epochs: LocalEpochs = None,
    batch_size: BatchSize = None,
    optimizer: Optimizer = "sgd",
    eta: Eta = "auto",
    l2: L2 = 0.01,
    participation: Participation = 1.0,
    device: Device = "cpu",
    seed: Seed = 0,
    set_: SetOption = None,
    target: Target = None,
    positive: Positive = None,
    test_size: TestSize = None,
    references: Annotated[
        bool, typer.Option(help="Also train FedAvg and Local, to compare with.")
    ] = True,
    eval_every: Annotated[int, typer.Option(min=1, help="Evaluate every so many rounds.")] = 1,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Keep the run's state every so many rounds.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the state that was kept last.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the run's folder; by default from the job.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a run of the same name.")
    ] = False,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard events.")] = True,
    debug: Debug = False,
) -> None:
    """Train one method on one federation, beside FedAvg and Local.

    Plain [bold]fedtopo train[/] trains pTopoFL on Fed-Heart-Disease.
    """
    step = _positive_or_auto(eta)
    with _reported(debug):
        # Heavy imports wait until the command line is known to be right.
        from .models.logistic import default_model
        from .monitor import Progress, TensorBoard
        from .registry import algorithms, datasets, models
        from .runs import RunFolder
        from .trainer import Result, Trainer
        from .training import Training

        given = _given(set_, target=target, positive=positive, test_size=test_size)
        parts: dict[str, Any] = {
            "algo": algorithms[algo],
            "dataset": datasets[dataset],
            "training": Training,
        }
        if model != "auto":
            parts["model"] = models[model]
        shares = _shares(given, parts)
        method = parts["algo"](**shares["algo"])
        source = parts["dataset"](**shares["dataset"])
        if name is None:
            name = f"{method.name}-{source.name}-seed{seed}"
        states = runs_dir / f"{name}.checkpoint"
        if resume and overwrite:
            raise OptionError("--resume goes on with a run, --overwrite replaces it: give one.")
        if resume and not (states / f"{method.name}.pt").exists():
            raise OptionError(
                f"no state of a run '{name}' is kept in {states}: --resume goes on from what "
                f"--checkpoint-every keeps. Leave it out to start from round 1."
            )
        # A resumed run is the same run: it may take its own place.
        folder = RunFolder(runs_dir, name, overwrite=overwrite or resume)
        kept = states if checkpoint_every or resume else None
        if overwrite:
            # The state of a run that is to be replaced.
            shutil.rmtree(states, ignore_errors=True)
        flags: dict[str, Any] = {
            "rounds": rounds,
            "local_steps": local_steps,
            "local_epochs": local_epochs,
            "batch_size": batch_size,
            "optimizer": optimizer,
            "eta": step,
            "l2": l2,
            "participation": participation,
            "device": device,
            "eval_every": eval_every,
        }
        settings = _training(flags, shares["training"])
        federation = source.load(seed)
        if model == "auto":
            network = default_model(federation.task)
        else:
            network = parts["model"](**shares["model"])
        methods = [method]
        if references:
            methods += [
                algorithms[other]() for other in ("fedavg", "local") if other != method.name
            ]
        trainers = [
            Trainer(
                each,
                federation,
                network,
                seed=seed,
                checkpoint=kept and kept / f"{each.name}.pt",
                checkpoint_every=checkpoint_every or 10,
                **settings,
            )
            for each in methods
        ]
        config = _config(trainers[0], source, network, [m.name for m in methods[1:]])
        _print_config(config)
        folder.open(config)
        results: list[Result] = []
        failure: Exception | None = None
        try:
            for trainer in trainers:
                watchers: list[Any] = [Progress(out)]
                if trainer is trainers[0]:
                    watchers.insert(0, _Partition(source))
                if tensorboard:
                    watchers.append(TensorBoard(folder.path / trainer.algorithm.name))
                trainer.callbacks = tuple(watchers)
                try:
                    results.append(trainer.run(resume=resume))
                except Exception as error:
                    # What was done before it is kept; the error is told at the end.
                    failure = error
                    if isinstance(getattr(error, "result", None), Result):
                        results.append(error.result)  # type: ignore[attr-defined]
                if failure or results[-1].interrupted:
                    break
        except KeyboardInterrupt:
            if not results or not results[0].rounds:
                raise
            results[-1].interrupted = True
        finally:
            # A second Ctrl-C must not cost what the first one saved.
            with _uninterrupted():
                done = [result for result in results if result.history.rounds]
                finished = failure is None and not results[-1].interrupted if results else False
                if done and done[0] is results[0]:
                    folder.write(done[0], done[1:])
                    where = f"[bold]{escape(str(folder.publish(finished=finished)))}[/]"
                else:
                    folder.discard()
        if not done:
            raise failure or KeyboardInterrupt
        if finished or len(done) > 1:
            _print_results(done)
            _print_sent(done[0])
        if failure is not None:
            out.print(f"\nWhat was done before is in {where}.")
            raise failure
        if not finished:
            last = results[-1]
            out.print(
                f"\n[yellow]Stopped[/] {escape(last.algorithm.label)} after round {last.rounds} of "
                f"{trainers[0].rounds}; what was done so far is in {where}."
            )
            if kept is not None:
                out.print("The same command with --resume goes on from the last state kept.")
            raise typer.Exit(INTERRUPTED)
        files = "results.csv, results.json, config.json, models.pt"
        out.print(f"\nWritten to {where}: {files}")
        if kept is not None:
            out.print(f"State, for --resume with more rounds: {escape(str(kept))}")
        if tensorboard:
            out.print(f"Look at it with: tensorboard --logdir {escape(str(folder.path))}")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back while files are written."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not in the main thread, where nothing interrupts
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _config(trainer: Any, source: Any, network: Any, references: list[str]) -> dict[str, Any]:
    from importlib.metadata import version

    from . import __version__
    from .runs import inputs

    federation = trainer.federation
    return {
        "algorithm": {"name": trainer.algorithm.name, **trainer.algorithm.model_dump(mode="json")},
        "dataset": {"name": source.name, **source.model_dump(mode="json")},
        "model": {"name": network.name, **network.model_dump(mode="json")},
        **trainer.training.model_dump(mode="json"),
        "seed": trainer.seed,
        "references": references,
        **inputs(federation),
        "versions": {
            "fedtopo-torch": __version__,
            **{p: version(p) for p in ("torch", "numpy", "gudhi", "scikit-learn")},
        },
    }


def _print_config(config: dict[str, Any]) -> None:
    from .training import Training

    grid = Table.grid(padding=(0, 2))
    for part in ("algorithm", "dataset", "model"):
        options = dict(config[part])
        shown = ", ".join(f"{k}={_plain(v)}" for k, v in options.items() if k != "name")
        grid.add_row(f"[bold]{part}[/]", escape(str(options["name"])), escape(shown))
    # The usual settings always, the others where they are not the usual ones.
    usual: tuple[str, ...] = ("rounds", "local_steps", "eta", "l2")
    defaults = {name: field.default for name, field in Training.model_fields.items()}
    changed = [k for k in defaults if k not in usual and config[k] != defaults[k]]
    if config["local_epochs"]:
        usual = ("rounds", "eta", "l2")
    job = (*usual, *(k for k in changed if k != "eval_every"), "seed")
    grid.add_row("[bold]training[/]", "", ", ".join(f"{k}={_plain(config[k])}" for k in job))
    out.print(grid)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_plain, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


class _Partition:
    """Prints what the method tells about its clusters before training starts."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def started(self, trainer: Any, result: Any) -> None:
        report = result.report
        if "clusters" not in report:
            return
        out.print()
        if report.get("chosen"):
            choice = report["choice"]
            tried = ", ".join(f"{m}: {value:.2f}" for m, value in choice["reproducibility"].items())
            out.print(f"n_clusters=auto: {choice['reason']}. Half-split ARI of M = {tried}.")
        weights, trust = report["weights"], report.get("trust", {})
        table = Table(title="Partition, before training", title_justify="left")
        table.add_column("cluster", justify="right")
        table.add_column("client")
        table.add_column("weight", justify="right")
        if trust:
            table.add_column("trust", justify="right")
        for j, members in enumerate(report["clusters"]):
            # All names up to 20 clients, else ten of each cluster.
            shown = members if len(weights) <= 20 else members[:10]
            for i, client in enumerate(shown):
                last = i == len(members) - 1
                row = [str(j) if i == 0 else "", escape(client), f"{weights[client]:.3f}"]
                table.add_row(*row, *([f"{trust[client]:.2f}"] if trust else []), end_section=last)
            if len(members) > len(shown):
                table.add_row("", f"and {len(members) - len(shown)} more", end_section=True)
        out.print(table)
        if report.get("reproducibility") is not None:
            out.print(
                f"Reproducibility {report['reproducibility']:.2f}: agreement (ARI) of the "
                f"partitions of six random halves of every client's records; 1 is certain, "
                f"0 is chance."
            )
        elif "trust" in report and len(report["clusters"]) > 1:
            out.print(
                "Reproducibility was not computed: it takes 12 descriptors per client, so only "
                "for up to 20 clients, or with n_clusters=auto."
            )
        if "stability_radius" in report:
            radius = report["stability_radius"]
            if radius is None:
                text = "none: Ward's partition here is not the one of average linkage"
            elif math.isinf(radius):
                text = "infinite: there is one cluster"
            else:
                text = (
                    f"{radius:.2g}: average linkage, which gives the same partition here, keeps it "
                    f"if no descriptor moves further (Ward linkage does not promise that)"
                )
            out.print(f"Stability radius {text}.")
        if report.get("flagged"):
            out.print(
                f"Down-weighted by the trust rule: {escape(', '.join(report['flagged']))}. That "
                f"marks an unusual descriptor; honest clients get it too."
            )
        for note in self.source.notes:
            out.print(f"[dim]Note: {escape(note)}[/]")

    def evaluated(self, round: int, scores: Any) -> None: ...

    def finished(self, result: Any) -> None: ...


def _number(value: float) -> str:
    if math.isnan(value):
        return "n/a"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"


def _gain(value: float) -> str:
    if math.isnan(value):
        return "n/a"
    colour = "green" if value > 0 else "red" if value < 0 else "white"
    return f"[{colour}]{'+' if value >= 0 else ''}{_number(value)}[/]"


def _print_results(results: list[Any]) -> None:
    """Per client and pooled, the method beside its references."""
    from .evaluation import LOWER_IS_BETTER, METRIC_TITLES, PER_CLIENT_LIMIT

    results = [r for r in results if r.history.rounds]
    if not results:
        return
    history = results[0].history
    evaluated = history.keys()
    metrics = [metric for split, metric in evaluated if split == "test"]
    # Of two classes the AUC says what accuracy says, and more.
    hidden = ("accuracy",) if results[0].federation.task == "binary" else ()
    for metric in (metric for metric in metrics if metric not in hidden):
        better = "lower" if metric in LOWER_IS_BETTER else "higher"
        title = f"Test {METRIC_TITLES[metric]} ({better} is better), round {history.rounds[-1]}"
        out.print()
        out.print(_score_table(results, metric, title))
    if len(results) > 1:
        out.print("gain: how much better than the reference, + is better for all metrics.")
    if results[0].unseen:
        out.print(
            f"{results[0].unseen} of {len(history.names)} clients took part in no round; they are "
            f"scored with the model they would receive."
        )
    if len(history.names) > PER_CLIENT_LIMIT:
        out.print(
            f"(the first {PER_CLIENT_LIMIT} of {len(history.names)} clients; "
            f"results.csv has them all)"
        )
    undefined = int(history.last("test", "auc").clients.isnan().sum()) if "auc" in metrics else 0
    if undefined:
        out.print(
            f"n/a: AUC of {undefined} client(s) whose test records have one class, or none; "
            f"left out of means."
        )


def _score_table(results: list[Any], metric: str, title: str) -> Table:
    from .evaluation import LOWER_IS_BETTER, PER_CLIENT_LIMIT

    main, *others = results
    history = main.history
    scores = [r.history.last("test", metric) for r in results]
    sign = -1 if metric in LOWER_IS_BETTER else 1
    table = Table(title=title, title_justify="left")
    table.add_column("client")
    table.add_column("n", justify="right")
    for result in results:
        table.add_column(escape(result.algorithm.label), justify="right")
    for result in others:
        table.add_column(f"gain over {escape(result.algorithm.label)}", justify="right")

    def cells(values: list[float]) -> list[str]:
        gains = [_gain(sign * (values[0] - value)) for value in values[1:]]
        return [*map(_number, values), *gains]

    counts = history.n["test"].tolist()
    shown = history.names[:PER_CLIENT_LIMIT]
    for i, client in enumerate(shown):
        values = cells([float(score.clients[i]) for score in scores])
        table.add_row(escape(client), str(counts[i]), *values, end_section=client == shown[-1])
    pooled = cells([score.pooled for score in scores])
    honest = int((history.n["test"] * history.honest).sum())
    table.add_row("pooled", str(honest), *pooled, style="bold")
    return table


def _print_sent(result: Any) -> None:
    """Everything one client sent, counted from the messages."""
    from .runs import buffers

    sent = result.communication
    table = Table(title="What one client sent, counted from its messages", title_justify="left")
    for column in ("when", "what", "floats", "integers"):
        table.add_column(column, justify="right" if column in ("floats", "integers") else "left")
    total_integers = 0
    each, total = f"in each of {result.rounds} rounds", "in all"
    clients = len(result.federation)
    if result.facts.training.cohort_size(clients) < clients:
        each = f"in a round, of {result.rounds}, that it takes part in"
        total = "in all, if in every round"
    stages = (
        ("once, handshake", "handshake", 1),
        ("once, introduction", "introduction", 1),
        (each, "round", result.rounds),
    )
    for when, stage, times in stages:
        floats, integers = getattr(sent, stage).get("up", (0, 0))
        contents = sent.contents.get(f"{stage} up", {})
        what = ", ".join(f"{k} {v}" for k, v in contents.items()) or "nothing"
        table.add_row(when, what, f"{floats:,}", f"{integers:,}")
        total_integers += times * integers
    table.add_section()
    table.add_row(total, "", f"{sent.total_floats_up(result.rounds):,}", f"{total_integers:,}")
    out.print()
    out.print(table)
    kept = buffers(result)
    if kept["floats"] or kept["counters"]:
        how = {
            "average": "averaged over clients like the parameters (counters: the largest)",
            "local": "kept by each client and not sent",
        }[kept["policy"]]
        out.print(
            f"The model's {kept['floats']} buffers and {kept['counters']} counters are {how}."
        )


@app.command("list")
def list_(debug: Debug = False) -> None:
    """Show the methods, federations and models there are."""
    with _reported(debug):
        for kind, registry in _kinds().items():
            table = Table(title=f"{kind}s", title_justify="left")
            for column in ("name", "what it is", "from"):
                table.add_column(column)
            for each in registry:
                cls = registry[each]
                first = _plain_text(cls.__doc__).partition("\n")[0]
                table.add_row(each, escape(first), escape(vars(cls).get("paper", "")))
            for each, place in registry.workspace().items():
                table.add_row(each, escape(place), "your workspace")
            out.print(table)
        out.print("'fedtopo describe NAME' tells more of each.")


def _kinds() -> dict[str, Any]:
    from .registry import algorithms, datasets, models

    return {"algorithm": algorithms, "dataset": datasets, "model": models}


@app.command()
def describe(
    name: Annotated[str, typer.Argument(help="A method, federation or model.")],
    debug: Debug = False,
) -> None:
    """Explain one method, federation or model: equations, options, what is kept and sent."""
    with _reported(debug):
        found: list[tuple[str, Any]] = []
        if name == "training":
            from .training import Training

            found.append(("settings of train and compare", Training))
        for kind, registry in _kinds().items():
            try:
                found.append((kind, registry[name]))
            except UnknownName as error:
                # A file of one's own that fails to import is the answer, not a wrong name.
                if "fails to import" in str(error):
                    raise
        if not found:
            known = {each for registry in _kinds().values() for each in registry}
            own = {each for registry in _kinds().values() for each in registry.workspace()}
            raise OptionError(f"nothing is called '{name}'." + did_you_mean(name, known | own))
        for kind, cls in found:
            out.print(f"[bold]{escape(name)}[/] ({kind})\n\n{escape(_plain_text(cls.__doc__))}\n")
            if vars(cls).get("paper"):
                out.print(f"[dim]From: {escape(cls.paper)}[/]\n")
            if cls.model_fields:
                table = Table(title="options, for --set NAME=VALUE", title_justify="left")
                for column in ("name", "default", "range", "meaning"):
                    table.add_column(column)
                for row in cls.option_lines():
                    table.add_row(*map(escape, row))
                out.print(table)
            else:
                out.print("It has no options.")
            if kind == "algorithm":
                out.print(_what_goes_where(cls))


def _what_goes_where(cls: Any) -> Table:
    """What a method keeps and sends, read off its own dicts in one round on example data."""
    from .testing import trace

    table = Table(
        title="kept and sent (p: parameters, d: features, K: clients; read off one round)",
        title_justify="left",
    )
    for column in ("where", "what"):
        table.add_column(column)
    for where, shapes in trace(cls()).items():
        what = ", ".join(f"{key} [{shape}]" for key, shape in shapes.items())
        table.add_row(where, escape(what) or "nothing")
    return table


def _plain_text(docstring: str | None) -> str:
    """A docstring without its markup, and without what only callers from Python need."""
    text = re.split(
        r"\n\n(?:Args|Raises|Warns|Returns|Attributes):\n", inspect.cleandoc(docstring or "")
    )
    return re.sub(r":\w+:`[~.]*([^`]*)`|``", r"\1", text[0])


@app.callback()
def _root() -> None:
    """Quiet the libraries that talk to the terminal."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@app.command("inspect")
def inspect_(
    folder: Annotated[Path, typer.Argument(help="A folder of CSV files, one per client.")],
    target: Target = None,
    positive: Positive = None,
    test_size: TestSize = None,
    set_: SetOption = None,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Print what a folder of your own CSV files is understood as; writes nothing."""
    with _reported(debug):
        from .datasets.folder import folder_dataset

        source: Any = folder_dataset(folder)
        given = _given(set_, target=target, positive=positive, test_size=test_size)
        options = _shares(given, {"dataset": source})["dataset"]
        summary = source(**options).describe(seed)
        out.print(
            f"[bold]{escape(str(summary.path))}[/]: {len(summary.clients)} clients, "
            f"{len(summary.feature_names)} features for a model, target "
            f"'{escape(summary.target)}' ({summary.task}; 0.. are "
            f"{escape(', '.join(summary.classes))})"
        )
        table = Table(title="clients", title_justify="left")
        for column in ("client", "records", "training", "test", "classes", "missing cells"):
            table.add_column(column, justify="left" if column == "client" else "right")
        for client in summary.clients:
            counts = ", ".join(f"{name}: {count}" for name, count in client.classes.items())
            if client.prevalence is not None:
                counts += f" ({client.prevalence:.0%})"
            sizes = (client.records, client.train, client.test)
            table.add_row(
                escape(client.name), *map(str, sizes), escape(counts), str(client.missing)
            )
        out.print(table)
        table = Table(title="columns", title_justify="left")
        for column in ("column", "kind", "missing", "filled with", "categories"):
            table.add_column(column)
        for each in summary.columns:
            fill = f"{each.fill:.4g}" if isinstance(each.fill, float) else each.fill
            categories = ", ".join(each.categories[:8]) + (", ..." if each.categories[8:] else "")
            table.add_row(
                escape(each.name), each.kind, str(each.missing), escape(fill), escape(categories)
            )
        out.print(table)
        for name, why in summary.ignored.items():
            out.print(f"not used: {escape(name)} ({escape(why)})")
        for file, count in summary.blank_rows.items():
            out.print(f"left out: {count} blank rows of {escape(file)}")
        for client in summary.clients:
            if sum(count > 0 for count in client.classes.values()) < 2:
                _print_warning(f"{client.name} has one class only: its AUC will be undefined.")
        for text in summary.warnings:
            _print_warning(text)


@app.command()
def diagnose(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder of CSV files, one per client.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Federation; fed_heart_disease without a folder.")
    ] = None,
    target: Target = None,
    positive: Positive = None,
    test_size: TestSize = None,
    set_: SetOption = None,
    seed: Seed = 0,
    pilot_rounds: Annotated[
        int, typer.Option(min=1, help="Communication rounds of each pilot run.")
    ] = 50,
    hold_outs: Annotated[
        int, typer.Option(min=2, help="Parts of the training records held out in turn.")
    ] = 5,
    name: Annotated[
        str | None, typer.Option(help="Name of the folder; by default diagnose-FEDERATION.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    debug: Debug = False,
) -> None:
    """Before any training: would clusters by descriptors help this federation, and why.

    Looks at training records only. Options of --set are the data's, and those of ptopofl.
    """
    with _reported(debug):
        if folder is not None and dataset is not None:
            raise OptionError(f"give the folder {folder} or --dataset {dataset}, not both.")
        from .algorithms.ptopofl import PTopoFL
        from .datasets.folder import folder_dataset
        from .diagnosis import AUTO, described_clouds
        from .diagnosis import diagnose as compute
        from .diagnosis_tables import diagnosis_tables
        from .monitor import Counter
        from .registry import datasets
        from .report import write_diagnosis
        from .runs import diagnosis_folder

        cls: Any = (
            datasets[dataset or "fed_heart_disease"] if folder is None else folder_dataset(folder)
        )
        given = _given(set_, target=target, positive=positive, test_size=test_size)
        shares = _shares(given, {"algo": PTopoFL, "dataset": cls})
        chosen: dict[str, Any] = {"n_clusters": AUTO.n_clusters, **shares["algo"]}
        method = PTopoFL(**chosen)
        source = cls(**shares["dataset"])
        place = diagnosis_folder(runs_dir, f"diagnose-{source.name}" if name is None else name)
        federation = source.load(seed)
        begun = time.perf_counter()
        counter = Counter(out, "diagnose", "step", "descriptors")
        try:
            diagnosis = compute(
                federation,
                method=method,
                seed=seed,
                pilot_rounds=pilot_rounds,
                hold_outs=hold_outs,
                on_progress=counter,
            )
        finally:
            counter.close()
        clouds = described_clouds(federation, method.scale)
        with _uninterrupted():
            write_diagnosis(diagnosis, clouds, diagnosis_tables(diagnosis), place, source.notes)
        seconds = time.perf_counter() - begun
        for table in diagnosis_tables(diagnosis, limit=20):
            out.print()
            out.print(table.rich())
        out.print()
        for finding in diagnosis.findings:
            out.print(escape(finding))
        for note in source.notes:
            out.print(f"[dim]Note: {escape(note)}[/]")
        out.print(f"\n[bold]{escape(diagnosis.advice.sentence)}[/]\n")
        out.print(
            f"{seconds:.0f} s. Written to [bold]{escape(str(place))}[/]: report.md, tables as .csv "
            f"and .json, figures as .png and .svg"
        )


@app.command("new-workspace")
def new_workspace_(
    folder: Annotated[Path, typer.Argument(help="Where; made if missing.")],
    debug: Debug = False,
) -> None:
    """Make algorithms/, datasets/ and runs/ with an example of each in a folder of your own."""
    with _reported(debug):
        from .workspace import new_workspace

        for path in new_workspace(folder):
            out.print(escape(str(path)))
        out.print(f"Start with: cd {escape(str(folder))} && fedtopo train --algo fedavgm")


@app.command()
def compare(
    algos: Annotated[
        str, typer.Option(help="Methods, separated by commas; 'all' is the paper's eleven.")
    ] = "all",
    dataset: Annotated[
        str, typer.Option(help="Federations, separated by commas.")
    ] = "fed_heart_disease",
    seeds: Seeds = "10",
    model: ModelName = "auto",
    rounds: Rounds = 150,
    local_steps: LocalSteps = 10,
    local_epochs: LocalEpochs = None,
    batch_size: BatchSize = None,
    optimizer: Optimizer = "sgd",
    eta: Eta = "auto",
    l2: L2 = 0.01,
    participation: Participation = 1.0,
    device: Device = "cpu",
    reference: Annotated[
        str | None, typer.Option(help="Method the others are tested against; pTopoFL by default.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="An option of every method and federation that has it, or of one "
            "(ptopofl.abar=0.1); repeat for more.",
        ),
    ] = None,
    target: Target = None,
    positive: Positive = None,
    test_size: TestSize = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="Choose a training setting per method on validation records, for example "
            "eta=0.01,0.1; repeat for more.",
        ),
    ] = None,
    processes: Processes = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the folder; by default from the federations.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    debug: Debug = False,
) -> None:
    """Run many methods on the same splits, and print who is better, and how surely.

    Finished runs are kept: the same command again, also after Ctrl-C, runs only what is missing.
    """
    step = _positive_or_auto(eta)
    with _reported(debug):
        from .comparison import Plan, run_plan
        from .monitor import Counter
        from .plan import METHODS
        from .registry import algorithms, datasets, models
        from .report import write_report
        from .runs import comparison_folder
        from .tables import comparison_tables
        from .training import Training
        from .tuning import candidates, parse_tune, run_tuned

        given = _given(set_, target=target, positive=positive, test_size=test_size)
        chosen = METHODS if algos == "all" else [part.strip() for part in algos.split(",")]
        methods = {each: algorithms[each] for each in chosen}
        federations = {each.strip(): datasets[each.strip()] for each in dataset.split(",")}
        parts = {**methods, **federations, "training": Training}
        if model != "auto":
            parts[model] = models[model]
        options = _spread(given, parts)
        tried = parse_tune(tune or [])
        if tried:
            for each in federations:
                if "validation_size" in federations[each].model_fields:
                    options[each].setdefault("validation_size", VALIDATION_SHARE)
        plan = Plan.of(
            # Names, not objects: processes find a workspace's classes by them.
            [(each, options[each]) for each in chosen],
            [(each, options[each]) for each in federations],
            _seeds(seeds),
            model=model if model == "auto" else (model, options[model]),
            **_training(
                {
                    "rounds": rounds,
                    "local_steps": local_steps,
                    "local_epochs": local_epochs,
                    "batch_size": batch_size,
                    "optimizer": optimizer,
                    "eta": step,
                    "l2": l2,
                    "participation": participation,
                    "device": device,
                },
                options["training"],
            ),
        )
        if reference is not None:
            plan.method(reference)
        # Wrong values before a folder is made.
        candidates(plan.training, tried)
        short = "-".join(Path(each).stem for each in federations)
        folder = comparison_folder(runs_dir, f"compare-{short}" if name is None else name)
        counter = Counter(out, "compare")
        settings: dict[str, Any] = {
            "processes": processes,
            "folder": folder / "parts",
            "on_progress": counter,
        }
        try:
            run: Any = functools.partial(run_tuned, tune=tried) if tried else run_plan
            comparison = run(plan, **settings)
        finally:
            counter.close()
        if not comparison.runs:
            with contextlib.suppress(OSError):  # not empty: something was kept before
                (folder / "parts").rmdir()
                folder.rmdir()
            raise KeyboardInterrupt
        with _uninterrupted():
            tables = comparison_tables(comparison, reference)
            write_report(comparison, tables, folder)
        for table in tables:
            out.print()
            out.print(table.rich())
        again = f", {comparison.stored} of them taken from before" if comparison.stored else ""
        out.print(
            f"\n{len(comparison.runs)} runs in {comparison.seconds:.0f} s on "
            f"{comparison.processes} processes{again}. Written to [bold]{escape(str(folder))}[/]: "
            f"results.csv, tables as .md, .tex, .json and .csv, figures as .png and .svg"
        )
        if comparison.interrupted:
            out.print("[yellow]Stopped[/]: the same command goes on where this one ended.")
            raise typer.Exit(INTERRUPTED)
        if comparison.failures:
            raise typer.Exit(1)


_REPRODUCE_HELP = f"""
Run the paper's experiments, and print our numbers beside the paper's.

Finished runs are kept: the same command again, also after Ctrl-C, runs only what is missing.

\b
{chr(10).join(f"{name:<8} {title}" for name, title in CATALOGUE.items())}
all      every one of these, each training once
"""


@app.command(help=_REPRODUCE_HELP, rich_help_panel=None)
def reproduce(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="What to run; see above.")],
    seeds: Seeds = "10",
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds T; fewer than the paper's are a quick look.")
    ] = 150,
    processes: Processes = None,
    name: Annotated[str, typer.Option(help="Name of the folder.")] = "reproduce",
    runs_dir: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    debug: Debug = False,
) -> None:
    with _reported(debug):
        from .experiments import names_of
        from .plan import seeds_of
        from .runs import comparison_folder

        # Before the imports that take seconds.
        chosen, wanted = names_of(names), seeds_of(_seeds(seeds))
        from .experiments.report import write_reproduction
        from .experiments.reproduction import reproduce as run
        from .monitor import Counter

        folder = comparison_folder(runs_dir, name)
        counter = Counter(out, "reproduce")
        try:
            done = run(
                chosen,
                wanted,
                rounds=rounds,
                processes=processes,
                folder=folder / "parts",
                on_progress=counter,
            )
        finally:
            counter.close()
        if done.interrupted:
            out.print(
                f"[yellow]Stopped[/]: {len(done.execution.outcomes)} runs are kept in "
                f"{escape(str(folder / 'parts'))}; the same command goes on from there."
            )
            raise typer.Exit(INTERRUPTED)
        with _uninterrupted():
            command = ["fedtopo", "reproduce", *names, *_changed(seeds=seeds, rounds=rounds)]
            files = write_reproduction(done, folder, command)
        _print_reproduction(done)
        kept = f", {done.stored} of them taken from before" if done.stored else ""
        out.print(
            f"\n{len(done.execution.outcomes)} runs in {done.execution.seconds:.0f} s on "
            f"{done.execution.processes} processes{kept}. Written to "
            f"[bold]{escape(str(files[-1]))}[/], and tables and figures beside it."
        )
        if done.failures:
            raise typer.Exit(1)


def _changed(seeds: str, rounds: int) -> list[str]:
    """What differs from the defaults, as it is typed."""
    return ["--seeds", seeds] * (seeds != "10") + ["--rounds", str(rounds)] * (rounds != 150)


def _print_reproduction(done: Any) -> None:
    """Every experiment: what it asks, what came out, and all tables."""
    for section in done.sections:
        out.print(f"\n[bold]{section.name}: {escape(section.title)}[/]\n")
        out.print(escape(section.question))
        for sentence in section.findings:
            out.print(f"- {escape(sentence)}")
        for table in section.tables:
            out.print()
            out.print(table.rich())
    failures = done.failures_table()
    if failures is not None:
        out.print()
        out.print(failures.rich())


def _seeds(text: str) -> int | list[int]:
    """``"10"`` is a number of seeds, ``"3,"`` and ``"0,4"`` are seeds."""
    try:
        if "," not in text:
            return int(text)
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise OptionError(
            f"seeds is '{text}': must be how many, or which, separated by commas."
        ) from None


def _spread(options: dict[str, str], parts: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Give each option to every part that declares it, or to the one named before a dot."""
    shares: dict[str, dict[str, str]] = {part: {} for part in parts}
    for name, value in options.items():
        part, dot, plain = name.rpartition(".")
        owners = [part] if dot and part in parts else list(parts)
        owners = [each for each in owners if plain in parts[each].model_fields]
        if not owners:
            known = {field for cls in parts.values() for field in cls.model_fields}
            raise OptionError(
                f"no option '{name}' in {', '.join(parts)}." + did_you_mean(plain, known)
            )
        for each in owners:
            shares[each].setdefault(plain, value)
            if dot:
                shares[each][plain] = value
    return shares
