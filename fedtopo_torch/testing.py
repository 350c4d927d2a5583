"""A conformance suite for federated methods, for authors of plug-ins and for the built-in ones.

In a test of your own::

    from fedtopo_torch.testing import check_algorithm
    from my_method import MyMethod


    def test_my_method():
        check_algorithm(MyMethod())

Each rule is a function ``check_...`` below, with its reason; :func:`check_algorithm` runs them all
and raises an ``AssertionError`` that says which rule is broken, and where.
"""

from __future__ import annotations

import io
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from .algorithms.base import Algorithm, Cohort, Message, State
from .federation import Client, Federation
from .randomness import generator
from .trainer import Diverged, Result, Trainer

__all__ = ["CHECKS", "check_algorithm", "example_federation", "trace"]

ROUNDS = 3
SIZES = (30, 24, 41, 24)
#: How far two ways to compute the same numbers may lie apart in float64.
ROUNDING = 1e-12
#: A number in a buffer that nobody has a reason to change.
MARK = 7.0
#: Settings of a short run in which not everybody takes part.
PART: dict[str, Any] = {"participation": 0.75, "rounds": 2}
#: Settings of a run in which clients take different numbers of steps.
RAGGED: dict[str, Any] = {"batch_size": 16, "local_epochs": 1}


def example_federation(
    *, order: tuple[int, ...] = (0, 1, 2, 3), test_seed: int = 0, n_features: int = 4
) -> Federation:
    """Four clients of unequal size with three to four features each scaled differently.

    Args:
        order: in which the clients are given.
        test_seed: draws the test labels; training records do not depend on it.
        n_features: d.
    """
    clients = []
    for k in order:
        rng = generator(0, "example", 0, str(k))
        x = rng.standard_normal((SIZES[k] + 12, n_features)) * (1 + 3 * (k % 2))
        y = (x @ np.arange(1, n_features + 1) > rng.standard_normal(len(x))).astype(int)
        test = y[SIZES[k] :]
        if test_seed:
            test = generator(test_seed, "example test", 0, str(k)).permutation(test)
        clients.append(
            Client(
                f"client {k}", (x[: SIZES[k]], y[: SIZES[k]]), (x[SIZES[k] :], test), group=k % 2
            )
        )
    return Federation(clients, name="example")


def _images() -> Federation:
    """The same clients with 4 x 4 images; bright ones are of class 1."""
    clients = []
    for k, n in enumerate(SIZES):
        rng = generator(0, "example images", 0, str(k))
        x = rng.standard_normal((n + 6, 1, 4, 4)) * (1 + k % 2)
        y = (x.mean((1, 2, 3)) > 0.1 * rng.standard_normal(len(x))).astype(int)
        clients.append(Client(f"client {k}", (x[:n], y[:n]), (x[n:], y[n:]), group=k % 2))
    return Federation(clients, name="example images")


class _Marked(nn.Module):
    """A network with a float buffer that nothing may change: it is :data:`MARK`."""

    mark: Tensor

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.register_buffer("mark", torch.tensor([MARK]))
        # A start that is the same every time.
        with torch.no_grad():
            for i, parameter in enumerate(self.layers.parameters()):
                values = torch.linspace(-1, 1, parameter.numel() + 1)[1:] * (-1) ** i
                parameter.copy_(values.reshape(parameter.shape) / 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


#: What methods are checked with: a federation and a module, by name.
EXAMPLES: dict[str, Callable[[], tuple[Federation, nn.Module]]] = {
    "logistic regression": lambda: (example_federation(), nn.Linear(4, 1)),
    "an MLP with BatchNorm": lambda: (
        example_federation(),
        _Marked(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)),
    ),
    "a CNN with BatchNorm": lambda: (
        _images(),
        _Marked(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1)),
    ),
}


def _run(
    algorithm: Algorithm,
    federation: Federation | None = None,
    example: str = "logistic regression",
    *,
    resume: bool = False,
    **settings: Any,
) -> Result:
    own, module = EXAMPLES[example]()
    settings = {"rounds": ROUNDS, "local_steps": 2, "eta": 0.1, **settings}
    if "local_epochs" in settings:
        del settings["local_steps"]
    trainer = Trainer(algorithm, federation or own, module, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return trainer.run(resume=resume)


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and bool((left == right).all())


def trace(algorithm: Algorithm) -> dict[str, dict[str, str]]:
    """What a method keeps and sends, by place: ``{"a client sends, each round": {"theta": "p"}}``.

    Read off its own dicts in one round of logistic regression on example data. Shapes are written
    with p (parameters), d (features) and K (clients); whole numbers are marked.
    """
    d = 16
    federation = example_federation(n_features=d)
    trainer = Trainer(algorithm, federation, nn.Linear(d, 1), rounds=1, local_steps=1, eta=0.1)
    watched = _Watched(inner=algorithm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trainer.algorithm = watched
        trainer.run()
    letters = {d + 1: "p", d: "d", len(federation): "K"}

    def shape(value: Tensor, skip: int) -> str:
        sizes = " x ".join(letters.get(n, str(n)) for n in value.shape[skip:]) or "1"
        return sizes if value.is_floating_point() else f"{sizes} whole"

    places = {
        "a client sends, once": ("introduce", 1),
        "a client sends, each round": ("local_update's uplink", 1),
        "a client receives, each round": ("broadcast", 1),
        "a client keeps": ("client_state", 1),
        "the server keeps": ("server_state", 0),
    }
    return {
        place: {name: shape(value, skip) for name, value in watched.kept.get(hook, {}).items()}
        for place, (hook, skip) in places.items()
    }


def check_options(algorithm: Algorithm) -> None:
    """Every option has a meaning, options survive JSON, and an unknown one is refused."""
    cls = type(algorithm)
    assert (cls.__doc__ or "").strip(), f"{cls.__name__} has no docstring"
    for name, _, _, meaning in cls.option_lines():
        assert meaning, f"option '{name}' has no description: use Field(..., description=...)"
    again = cls(**json.loads(json.dumps(algorithm.model_dump(mode="json"))))
    assert again == algorithm, "options are not the same after a round trip through JSON"
    try:
        cls.model_validate({"no_method_has_this_option": 1})
    except ValueError:
        pass
    else:
        raise AssertionError("an unknown option is accepted")


def check_rerun(algorithm: Algorithm) -> None:
    """Two runs give the same bits: all state is in the dicts, all draws are keyed."""
    first, second = _run(algorithm), _run(algorithm)
    assert _same(first.theta, second.theta), "two runs of the same job give different models"


def check_finite(algorithm: Algorithm) -> None:
    """Models and losses stay finite."""
    result = _run(algorithm)
    assert bool(result.theta.isfinite().all()), "a personal model is not finite"
    assert np.isfinite(result.history.pooled()).all(), "a loss is not finite"


def check_buffers(algorithm: Algorithm) -> None:
    """Buffers are averaged, and nothing else: only the parameters of a row are stepped."""
    for example in list(EXAMPLES)[1:]:
        for buffers in ("average", "local"):
            result = _run(algorithm, example=example, buffers=buffers, **PART)
            loss = result.history.pooled()
            assert np.isfinite(loss).all(), f"{example}: a loss is not finite"
            for name, state in result.state_dicts().items():
                gap = abs(float(state["mark"]) - MARK)
                assert gap <= ROUNDING, (
                    f"{example}, buffers={buffers}: a buffer that the module never changes has "
                    f"moved by {gap:.2g} at {name}: step only the first problem.parameters numbers "
                    f"of a row (problem.stepped and clients.stepped do)"
                )
                assert float(state["layers.1.running_var"].min()) > 0, (
                    f"{example}, buffers={buffers}: a running variance is not positive at {name}"
                )


def check_order(algorithm: Algorithm) -> None:
    """The order in which clients are given changes no bit."""
    given = _run(algorithm, example_federation(order=(3, 1, 0, 2)))
    assert _same(given.theta, _run(algorithm).theta), "the order of clients changes the models"


def check_rows(algorithm: Algorithm) -> None:
    """Client-side hooks treat rows apart: client by client gives what all together give."""
    _compare_rows(algorithm, rounds=2)


def check_chunks(algorithm: Algorithm) -> None:
    """The same of mini-batches, of clients with other numbers of steps, and of some clients."""
    _compare_rows(algorithm, **PART, **RAGGED)


def _compare_rows(algorithm: Algorithm, **settings: Any) -> None:
    # Convolutions would add time, and nothing that a method could get wrong.
    for example in list(EXAMPLES)[:2]:
        together = _run(algorithm, example=example, **settings)
        apart = _run(algorithm, example=example, chunk_clients=1, **settings)
        gap = float((together.theta - apart.theta).abs().max())
        assert gap <= ROUNDING, (
            f"{example}{_told(settings)}: clients computed one by one differ by {gap:.2g} from all "
            f"together: a client-side hook mixes rows"
        )


def _told(settings: dict[str, Any]) -> str:
    return "".join(f", {name}={value}" for name, value in settings.items())


def check_batches(algorithm: Algorithm) -> None:
    """Steps are taken by ``problem.descend``, on the run's mini-batches."""
    whole, small = _run(algorithm), _run(algorithm, batch_size=7)
    trained = not _same(whole.theta, whole.objective.initial().expand_as(whole.theta))
    assert not (trained and _same(whole.theta, small.theta)), (
        "batch_size changes nothing: take steps with problem.descend, not by hand on "
        "problem.gradient, which is over all records"
    )


def check_cohort(algorithm: Algorithm) -> None:
    """Any clients may take part, one alone too; those who never did can be scored."""
    for size in (1, 2, 3):
        for rounds in (1, 5):
            try:
                theta = _run(algorithm, clients_per_round=size, rounds=rounds).theta
            except Diverged as error:
                raise AssertionError(f"with clients_per_round={size}: {error}") from error
            assert bool(theta.isfinite().all()), (
                f"with clients_per_round={size} a personal model is not finite"
            )


def check_resume(algorithm: Algorithm) -> None:
    """A run that is stopped and resumed gives the same bits: all state is in the dicts."""
    for example in list(EXAMPLES)[:2]:
        with tempfile.TemporaryDirectory() as folder:
            settings = {**PART, **RAGGED}
            kept = {"checkpoint": Path(folder) / "run.pt", **settings}
            _run(algorithm, example=example, **kept)
            # In a new object, as after a restart.
            again = type(algorithm)(**algorithm.model_dump())
            kept["rounds"] = settings["rounds"] = PART["rounds"] + 1
            resumed = _run(again, example=example, resume=True, **kept)
        straight = _run(algorithm, example=example, **settings)
        same = _same(straight.theta, resumed.theta) and all(
            _same(value, resumed.server[name]) for name, value in straight.server.items()
        )
        assert same, (
            f"{example}: a run resumed after round {PART['rounds']} differs from a straight one: "
            f"keep what is needed later in the state of the server or of the clients"
        )


def check_test_labels(algorithm: Algorithm) -> None:
    """Test labels change nothing that is trained."""
    other = _run(algorithm, example_federation(test_seed=1))
    assert _same(other.theta, _run(algorithm).theta), "test labels reach training"


def check_storage(algorithm: Algorithm) -> None:
    """Results are plain tensors without a graph, and what is saved can be loaded safely."""
    result = _run(algorithm)
    for name, value in {**result.server, "theta": result.theta}.items():
        assert isinstance(value, Tensor), f"server state '{name}' is no tensor"
        assert not value.requires_grad, f"'{name}' keeps an autograd graph"
    file = io.BytesIO()
    torch.save(result.server, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded.keys() == result.server.keys(), "the server's state does not survive saving"
    json.dumps(result.report)


class _Watched(Algorithm):
    """Passes every hook on to ``inner``, and checks what goes in and comes out."""

    inner: Algorithm
    seen: dict[str, Any] = Field(default_factory=dict)
    kept: dict[str, Any] = Field(default_factory=dict)

    def _call(self, hook: str, *arguments: Any) -> Any:
        before = [_frozen(a) for a in arguments]
        answer = getattr(self.inner, hook)(*arguments)
        for given, kept in zip(arguments, before, strict=True):
            if kept is not None:
                assert given.keys() == kept.keys(), f"{hook} adds to or removes from its arguments"
                for name, value in kept.items():
                    assert _same(given[name], value), (
                        f"{hook} changes its argument '{name}' in place"
                    )
        return answer

    def _message(self, hook: str, message: Message, k: int) -> Message:
        """Rows of plain tensors, with the same names and shapes in every round."""
        assert isinstance(message, dict), f"{hook} returns {type(message).__name__}, not a dict"
        shapes = {}
        for name, value in message.items():
            assert isinstance(name, str), f"{hook}: the key {name!r} is no string"
            assert isinstance(value, Tensor), f"{hook}: '{name}' is no tensor"
            assert value.ndim >= 1 and len(value) == k, f"{hook}: '{name}' has no row per client"
            assert not value.requires_grad, f"{hook}: '{name}' keeps an autograd graph"
            shapes[name] = (value.dtype, tuple(value.shape[1:]))
        self.kept[hook] = message
        first = self.seen.setdefault(hook, shapes)
        assert shapes == first, f"{hook}: names or shapes change from round to round"
        return message

    def client_state(self, theta0: Tensor, problem: Any) -> State:
        return self._message(
            "client_state", self._call("client_state", theta0, problem), len(problem)
        )

    def introduce(self, problem: Any) -> Message:
        return self._message("introduce", self._call("introduce", problem), len(problem))

    def server_state(self, theta0: Tensor, introductions: Message, facts: Any) -> State:
        state = self._call("server_state", theta0, introductions, facts)
        for name, value in state.items():
            assert isinstance(value, Tensor), f"server_state: '{name}' is no tensor"
        self.kept["server_state"] = state
        return state

    def broadcast(self, server: State, clients: Cohort) -> Message:
        answer = self._call("broadcast", server, clients)
        return self._message("broadcast", answer, len(clients))

    def local_update(self, message: Message, client: State, problem: Any) -> tuple[Message, State]:
        uplink, state = self._call("local_update", message, client, problem)
        self._message("local_update's uplink", uplink, len(problem))
        assert self._message("client_state", state, len(problem)) is state
        return uplink, state

    def aggregate(self, server: State, uplink: Message, clients: Cohort) -> State:
        answer = self._call("aggregate", server, uplink, clients)
        assert answer.keys() == server.keys(), (
            f"aggregate returns {sorted(answer)}, server_state created {sorted(server)}"
        )
        self._part(server, uplink, clients)
        return answer

    def _part(self, server: State, uplink: Message, clients: Cohort) -> None:
        """Some clients only: their rows are enough, and what the others sent has no say."""
        some = torch.arange(0, len(clients), 2)
        index, n = clients.index[some], clients.n[some]
        cohort = Cohort(index, n, clients.total, clients.parameters)
        part = self.inner.aggregate(server, {n: v[some] for n, v in uplink.items()}, cohort)
        for name, value in part.items():
            assert value.shape == server[name].shape, f"aggregate of some clients reshapes '{name}'"
            if value.is_floating_point():
                assert bool(value.isfinite().all()), f"aggregate of some clients breaks '{name}'"

    def personal(self, message: Message, client: State, problem: Any) -> Tensor:
        theta = self._call("personal", message, client, problem)
        assert not theta.requires_grad, "personal keeps an autograd graph"
        return theta

    def shared(self, server: State) -> Tensor | None:
        return self.inner.shared(server)

    def clusters(self, server: State) -> Tensor | None:
        return self.inner.clusters(server)


def _frozen(argument: Any) -> dict[str, Tensor] | None:
    if not isinstance(argument, dict):
        return None
    return {name: value.clone() for name, value in argument.items()}


def check_hooks(algorithm: Algorithm) -> None:
    """Hooks are pure: nothing changed in place, declared state, rows, and any cohort will do."""
    _run(_Watched(inner=algorithm))
    _run(_Watched(inner=algorithm), example="an MLP with BatchNorm", **PART, **RAGGED)


def check_single_client(algorithm: Algorithm) -> None:
    """A federation of one client trains."""
    whole = example_federation()
    x, y = whole.clouds[0], whole.train.client(0)[1].numpy().astype(int)
    alone = Federation([Client("only", (x, y), (x, y))])
    result = _run(algorithm, alone)
    assert bool(result.theta.isfinite().all()), "one client alone breaks the method"


#: What :func:`check_algorithm` runs, in this order.
CHECKS: tuple[Callable[[Algorithm], None], ...] = (
    check_options,
    check_finite,
    check_rerun,
    check_order,
    check_rows,
    check_hooks,
    check_buffers,
    check_chunks,
    check_batches,
    check_cohort,
    check_resume,
    check_test_labels,
    check_storage,
    check_single_client,
)


def check_algorithm(algorithm: Algorithm | type[Algorithm], **options: Any) -> None:
    """Check one method against every rule of the contract.

    Takes a few seconds. What it can't check is whether the method is right: compare that with a
    closed form, or with a plain re-implementation.

    Args:
        algorithm: the method, or its class (constructed with ``options``).
        **options: for the class.

    Raises:
        AssertionError: which rule is broken, and where.
    """
    if isinstance(algorithm, type):
        algorithm = algorithm(**options)
    for check in CHECKS:
        try:
            check(algorithm)
        except Exception as error:
            what = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            raise AssertionError(
                f"{type(algorithm).__name__}, {check.__name__}: {what}{error}"
            ) from error
