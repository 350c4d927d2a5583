"""Mini-batches: which records a step sees, and runs against plain modules that see the same."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_torch import Plain, twin
from torch import nn

from fedtopo_torch.algorithms import Ditto, FedAvg, FedProx, Local, PFedMe, Scaffold
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.local import Batches, LocalProblem
from fedtopo_torch.models.logistic import Logistic
from fedtopo_torch.objective import Objective, objective_for
from fedtopo_torch.registry import algorithms
from fedtopo_torch.trainer import Trainer
from fedtopo_torch.training import Training

NAMES = sorted(set(algorithms))


def make(name):
    method = algorithms[name]
    return method(labels=(0, 1, 0, 1)) if name == "clustered" else method()


def numbered(sizes, names=None):
    """Clients whose records are 0, 1, 2, ..., so that a batch can be read."""
    clients = []
    for k, n in enumerate(sizes):
        x = np.arange(n, dtype=float)[:, None]
        clients.append(Client(names[k] if names else f"c{k}", (x, np.arange(n) % 2)))
    return Federation(clients, standardize=False)


def drawn(federation, steps, *, seed=0, round=1, smallest=1, most=None, kinds=None, **training):
    """The records of every step, by client: ``{name: [[...], ...]}``."""
    objective = Objective(nn.Linear(1, 1))
    found = {}
    for data in objective.data(federation.train, kinds, most):
        batches = Batches(data, Training(**training), seed, round, smallest)
        for i, name in enumerate(data.names):
            found[name] = []
            for step in range(steps):
                if batches.whole:
                    found[name].append(list(range(int(data.n[i]))))
                    continue
                index, count = batches(step)
                found[name].append(index[i, : int(count[i])].tolist())
    return found


@given(
    n=st.integers(1, 23),
    size=st.integers(1, 25),
    passes=st.integers(1, 3),
    other=st.integers(1, 30),
    smallest=st.sampled_from([1, 2]),
)
@settings(deadline=None, max_examples=60)
def test_every_pass_takes_every_record_once(n, size, passes, other, smallest):
    if min(n, size) < smallest:
        return
    per_pass = Training(batch_size=size).batches(n, smallest)
    steps = passes * per_pass
    batches = drawn(numbered([n, other]), steps, batch_size=size, smallest=smallest)["c0"]
    left_out = n % size == 1 and smallest == 2 and n > size
    for k in range(passes):
        own = batches[k * per_pass : (k + 1) * per_pass]
        seen = list(itertools.chain(*own))
        assert len(seen) == len(set(seen)) == n - left_out
        assert [len(batch) for batch in own[:-1]] == [size] * (per_pass - 1)
        assert smallest <= len(own[-1]) <= size
    assert steps == Training(batch_size=size, local_epochs=passes).steps(n, smallest)


@pytest.mark.parametrize("n", [8, 3, 1])
def test_a_client_that_fits_into_a_batch_is_taken_whole(n):
    for other in (2, 100):
        assert drawn(numbered([n, other]), 3, batch_size=8)["c0"] == [list(range(n))] * 3


def test_the_last_batch_is_ragged():
    sizes = [len(batch) for batch in drawn(numbered([10, 7]), 6, batch_size=4)["c0"]]
    assert sizes == [4, 4, 2, 4, 4, 2]
    # Fewer than a module can be trained on are left out.
    sizes = [len(b) for b in drawn(numbered([9, 7]), 4, batch_size=4, smallest=2)["c0"]]
    assert sizes == [4, 4, 4, 4]


def test_batches_are_keyed_by_seed_round_and_client():
    one = drawn(numbered([20, 20]), 4, batch_size=5)
    assert one == drawn(numbered([20, 20]), 4, batch_size=5)
    assert one["c0"] != one["c1"]
    assert one != drawn(numbered([20, 20]), 4, batch_size=5, seed=1)
    assert one != drawn(numbered([20, 20]), 4, batch_size=5, round=2)
    # Passes are shuffled anew.
    assert one["c0"] != drawn(numbered([20]), 8, batch_size=5)["c0"][4:]


def test_batches_do_not_depend_on_the_others():
    sizes, names = [20, 13, 5, 33], ["a", "b", "c", "d"]
    together = drawn(numbered(sizes, names), 7, batch_size=6)
    assert drawn(numbered(sizes[::-1], names[::-1]), 7, batch_size=6) == together
    assert drawn(numbered(sizes, names), 7, batch_size=6, most=1) == together
    for k in range(4):
        alone = drawn(numbered([sizes[k]], [names[k]]), 7, batch_size=6)
        assert alone[names[k]] == together[names[k]]


def test_asking_for_few_steps_or_many_gives_the_same_batches():
    federation = numbered([20, 13])
    many = drawn(federation, 30, batch_size=6)
    for steps in (1, 4, 11):
        assert drawn(federation, steps, batch_size=6) == {n: b[:steps] for n, b in many.items()}


# What each descent of a round sees


class Watched(Objective):
    """Keeps the records of every gradient."""

    def __init__(self):
        super().__init__(nn.Linear(1, 1))
        self.seen = []

    def slope(self, weights, data, seeds=(), state=None):
        self.seen.append(
            tuple(
                tuple(x[: int(n), 0].tolist()) for x, n in zip(data.features, data.n, strict=True)
            )
        )
        return super().slope(weights, data, seeds, state)


def watched(method, make_facts, *, steps=3, round=1, **training):
    objective = Watched()
    (data,) = objective.data(numbered([7, 10]).train)
    training = Training(batch_size=3, local_steps=steps, **training)
    facts = make_facts(local_steps=steps, training=training, eta=0.1)
    problem = LocalProblem(objective, data, facts=facts, round=round)
    theta = objective.initial()
    client = method.client_state(theta, problem)
    server = method.server_state(theta, {}, facts)
    message = {name: value.expand(2, *value.shape) for name, value in server.items()}
    method.local_update(message, client, problem)
    return objective.seen


def test_all_descents_of_a_round_see_the_same_batches(make_facts):
    plain = watched(FedAvg(), make_facts)
    assert len(plain) == len(set(plain)) == 3
    assert watched(FedProx(), make_facts) == plain
    assert watched(Scaffold(), make_facts) == plain
    assert watched(Local(), make_facts) == plain
    # The shared model's steps, then the personal one's.
    assert watched(Ditto(), make_facts) == plain * 2
    assert watched(FedAvg(), make_facts, round=2) != plain


def test_inner_steps_of_a_local_round_share_one_batch(make_facts):
    plain = watched(FedAvg(), make_facts)
    inner = watched(PFedMe(inner_steps=4), make_facts)
    assert inner == [batch for batch in plain for _ in range(4)]


# Runs against plain modules


SIZES = [5, 14, 9, 9]
WAYS = {
    "steps": {"local_steps": 4, "batch_size": 6},
    "epochs": {"local_epochs": 2, "batch_size": 6},
    "epochs of whole clients": {"local_epochs": 3},
    "single records": {"local_epochs": 1, "batch_size": 1},
    "larger than all": {"local_steps": 3, "batch_size": 99},
}


def run(method, federation, module=None, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Trainer(method, federation, module or Logistic(), **settings).run()


def zeros(d=3):
    module = nn.Linear(d, 1)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_logistic_regression_equals_plain_modules(make_federation, name, way):
    federation, given = make_federation(SIZES), {"eta": 0.2, "seed": 3, **WAYS[way]}
    result = run(make(name), federation, rounds=2, **given)
    plain = Plain(zeros(), federation, **given)
    theta, _ = plain.run(twin(name, plain, result), 2)
    assert float((theta - result.theta).abs().max()) < 1e-12


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "pfedme", "ditto"])
@pytest.mark.parametrize("way", ["steps", "epochs"])
def test_chunks_change_rounding_only(make_federation, name, way):
    federation, given = make_federation([5, 22, 16, 9, 16, 40]), {"eta": 0.2, **WAYS[way]}
    together = run(make(name), federation, rounds=3, **given)
    for most in (1, 2):
        apart = run(make(name), federation, rounds=3, chunk_clients=most, **given)
        assert float((apart.theta - together.theta).abs().max()) < 1e-12


def test_the_order_of_clients_changes_no_bit(make_clients):
    clients, given = make_clients(SIZES), {"eta": 0.2, "rounds": 3, "participation": 0.5}
    given |= WAYS["epochs"]
    one = run(Scaffold(), Federation(clients), **given)
    other = run(Scaffold(), Federation(clients[::-1]), **given)
    assert torch.equal(one.theta, other.theta)


@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.9}, {"optimizer": "adam"}])
def test_a_client_that_has_finished_is_not_moved(make_clients, optimizer):
    """With clients of other sizes beside it a client takes its own steps, and ends where alone."""
    clients = make_clients([5, 40, 12])
    given = {"eta": 0.1, "rounds": 1, "local_epochs": 2, "batch_size": 4, **optimizer}
    together = run(Local(), Federation(clients, standardize=False), **given)
    for k in range(3):
        alone = run(Local(), Federation([clients[k]], standardize=False), **given)
        assert float((alone.theta[0] - together.theta[k]).abs().max()) < 1e-12
    assert together.facts.local_steps == pytest.approx((5 * 4 + 40 * 20 + 12 * 6) / 57, rel=1e-14)


# Fault 7


def test_fault_07_steps_are_counted_not_epochs(make_facts, toy):
    problem = toy([0.0], counts=[3], local_steps=4)
    training = Training(local_epochs=2, batch_size=2)
    problem.facts = make_facts(training=training, local_steps=4.0)
    method = Scaffold()
    theta = torch.tensor([[1.0]], dtype=torch.float64)
    message = {"theta": theta, "control": torch.zeros(1, 1, dtype=torch.float64)}
    client = method.client_state(theta[0], problem)
    uplink, state = method.local_update(message, client, problem)
    assert problem.steps.tolist() == [4]
    assert float(uplink["theta"]) == pytest.approx(0.6561, abs=1e-15)
    assert float(state["control"]) == pytest.approx(0.85975, abs=1e-14)


class Constant(nn.Module):
    """One parameter, put out for every record."""

    def __init__(self, start=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, x):
        return self.w + 0 * x[:, 0]


def targets(values, sizes):
    clients = [
        Client(f"c{k}", (np.zeros((n, 1)), np.full(n, a)), (np.zeros((1, 1)), np.array([a])))
        for k, (a, n) in enumerate(zip(values, sizes, strict=True))
    ]
    return Federation(clients, task="regression")


def test_fault_07_in_a_whole_run():
    given = {"eta": 0.1, "l2": 0.0, "rounds": 1, "local_epochs": 2, "batch_size": 2}
    result = run(Scaffold(), targets([0.0], [3]), Constant(), **given)
    assert float(result.theta) == pytest.approx(0.6561, abs=1e-15)
    assert float(result.server["control"]) == pytest.approx(0.85975, abs=1e-14)
    # Beside a client of four steps one of two (two records): 0.81 and c' = 0.95.
    result = run(Scaffold(), targets([0.0, 0.0], [3, 2]), Constant(), **given)
    assert float(result.theta[0]) == pytest.approx(0.6 * 0.6561 + 0.4 * 0.81, abs=1e-15)
    assert float(result.server["control"]) == pytest.approx(0.6 * 0.85975 + 0.4 * 0.95, abs=1e-14)


def test_fault_09_fedprox_in_a_whole_run():
    given = {"eta": 0.1, "l2": 0.0, "rounds": 1, "local_steps": 2, "batch_size": 1}
    result = run(FedProx(mu=1.0), targets([0.0], [4]), Constant(), **given)
    assert float(result.theta) == pytest.approx(0.82, abs=1e-15)
    assert float(run(FedAvg(), targets([0.0], [4]), Constant(), **given).theta) == pytest.approx(
        0.81
    )


def test_fault_10_pfedme_in_a_whole_run():
    method = PFedMe(lambda_p=1.0, inner_steps=2, inner_lr=0.1, outer_lr=0.5)
    given = {"eta": 0.1, "l2": 0.0, "rounds": 1, "local_steps": 2, "batch_size": 1}
    result = run(method, targets([0.0], [4]), Constant(), **given)
    assert float(result.theta) == pytest.approx(0.7462, abs=1e-15)
    assert float(result.server["theta"]) == pytest.approx(0.8281, abs=1e-15)


def test_fault_06_scaffold_in_a_whole_run():
    given = {"eta": 0.1, "l2": 0.0, "rounds": 2, "local_steps": 2, "batch_size": 1}
    result = run(Scaffold(), targets([0.0, 4.0], [3, 3]), Constant(), **given)
    assert float(result.theta[0]) == pytest.approx(1.3439, abs=1e-14)
    assert float(result.server["control"]) == pytest.approx(-0.7695, abs=1e-14)


def test_closed_form_batches_are_those_of_autograd(make_federation):
    federation = make_federation(SIZES, classes=3)
    given = {"rounds": 3, "eta": 0.1, **WAYS["epochs"]}
    one, other = (
        run(FedAvg(), federation, nn.Linear(3, 3), closed_form=way, **given)
        for way in (True, False)
    )
    assert float((one.theta - other.theta).abs().max()) < 1e-12


def test_a_gradient_is_over_all_records_whatever_the_batch(make_federation, make_facts):
    federation = make_federation([9])
    objective = objective_for(nn.Linear(3, 1), "binary", 0.0, inputs=3)
    (data,) = objective.data(federation.train)
    facts = make_facts(training=Training(batch_size=2), local_steps=2)
    theta = torch.full((1, 4), 0.5, dtype=torch.float64)
    whole = LocalProblem(objective, data, facts=make_facts()).gradient(theta)
    assert torch.equal(LocalProblem(objective, data, facts=facts).gradient(theta), whole)
