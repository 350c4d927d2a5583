"""Partial participation: who takes part, what it costs, and what becomes of those who do not."""

import gc
import math
import warnings

import numpy as np
import pytest
import torch
from plain_torch import Plain, twin
from torch import nn

from fedtopo_torch.algorithms import IFCA, Clustered, FedAvg, Local, Scaffold
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.models.logistic import Logistic
from fedtopo_torch.objective import LinearObjective
from fedtopo_torch.options import OptionError
from fedtopo_torch.registry import algorithms
from fedtopo_torch.trainer import Trainer
from fedtopo_torch.training import Training

SIZES = [9, 21, 12, 14, 30, 17]
NAMES = sorted(set(algorithms))


def make(name):
    method = algorithms[name]
    return method(labels=(0, 1, 0, 1, 1, 0)) if name == "clustered" else method()


def trainer(method, federation, module=None, **settings):
    settings = {"eta": 0.2, "local_steps": 3, "rounds": 3, **settings}
    return Trainer(method, federation, module or Logistic(), **settings)


def run(*arguments, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return trainer(*arguments, **settings).run()


def cohorts(federation, rounds=range(1, 41), **settings):
    drawn = trainer(FedAvg(), federation, **settings)
    found = [drawn._cohort(round) for round in rounds]
    return [None if c is None else c.index.tolist() for c in found]


# The draw


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"participation": 0.5}, 3),
        ({"participation": 0.34}, 2),
        ({"participation": 0.01}, 1),
        ({"clients_per_round": 4}, 4),
        ({"clients_per_round": 1}, 1),
    ],
)
def test_a_cohort_is_drawn_without_replacement(make_federation, settings, size):
    drawn = cohorts(make_federation(SIZES), **settings)
    for cohort in drawn:
        assert cohort == sorted(set(cohort)) and len(cohort) == size
        assert set(cohort) <= set(range(6))
    # Everybody has a turn, in another order every time.
    assert {k for cohort in drawn for k in cohort} == set(range(6))
    assert len({tuple(cohort) for cohort in drawn}) > 4


@pytest.mark.parametrize("settings", [{"participation": 1.0}, {"clients_per_round": 6}, {}])
def test_everybody_is_no_cohort(make_federation, settings):
    assert cohorts(make_federation(SIZES), **settings) == [None] * 40


def test_cohorts_are_keyed_by_the_seed(make_federation):
    federation, half = make_federation(SIZES), {"participation": 0.5}
    assert cohorts(federation, **half) == cohorts(federation, **half)
    assert cohorts(federation, **half) != cohorts(federation, seed=1, **half)
    # Round 7 does not depend on the rounds before.
    assert cohorts(federation, [7], **half) == cohorts(federation, **half)[6:7]


def test_sizes_of_cohorts_by_hand():
    assert [Training(participation=f).cohort_size(10) for f in (0.01, 0.1, 0.25, 0.3, 1.0)] == [
        1,
        1,
        2,
        3,
        10,
    ]
    assert Training(clients_per_round=3).cohort_size(10) == 3


# What a round computes


@pytest.mark.parametrize(
    "settings", [{"participation": 0.5}, {"clients_per_round": 1}, {"clients_per_round": 5}]
)
@pytest.mark.parametrize("name", NAMES)
def test_every_method_equals_plain_modules(make_federation, name, settings):
    federation, given = make_federation(SIZES), {"eta": 0.2, "local_steps": 2, "batch_size": 8}
    run_of = trainer(make(name), federation, rounds=3, **settings, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = run_of.run()
    module = nn.Linear(3, 1)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    cohort = lambda round: run_of._cohort(round).index.tolist()  # noqa: E731
    plain = Plain(module, federation, cohort=cohort, **given)
    theta, _ = plain.run(twin(name, plain, result), 3)
    assert float((theta - result.theta).abs().max()) < 1e-12
    assert result.unseen == len(SIZES) - len(plain.seen)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_change_rounding_only(make_federation, name):
    federation, settings = make_federation(SIZES), {"participation": 0.67, "batch_size": 8}
    together = run(make(name), federation, **settings)
    apart = run(make(name), federation, chunk_clients=1, **settings)
    assert float((together.theta - apart.theta).abs().max()) < 1e-12


class Constant(nn.Module):
    """w, put out for every record."""

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


class Ends(FedAvg):
    """Every client is at its own target after a round."""

    def local_update(self, message, client, problem):
        return {"theta": problem.labels[:, :1].clone()}, client


def test_fault_01_only_the_rounds_clients_count():
    federation = targets([0.0, 4.0, 100.0, 100.0], [1, 3, 100, 100])
    by_cohort = {(0, 1): 3.0, (0,): 0.0, (2, 3): 100.0, (0, 2): 100 * 100 / 101}
    seen = set()
    for seed in range(40):
        run_of = trainer(Ends(), federation, Constant(), seed=seed, rounds=1, participation=0.5)
        cohort = tuple(run_of._cohort(1).index.tolist())
        if cohort in by_cohort:
            seen.add(cohort)
            found = float(run_of.run().server["theta"])
            assert found == pytest.approx(by_cohort[cohort], rel=1e-15)
    assert (0, 1) in seen


def test_fault_03_a_cluster_nobody_of_which_took_part_keeps_its_u():
    federation = targets([0.0, 4.0], [1, 3])
    method = Clustered(labels=(0, 1), alpha=0.25)
    run_of = trainer(
        method,
        federation,
        Constant(),
        eta=0.1,
        l2=0.0,
        local_steps=1,
        rounds=1,
        clients_per_round=1,
    )
    taken = int(run_of._cohort(1).index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = run_of.run()
    u = [1.0, 1.0]
    u[taken] = 1 - 0.1 * (1 - (0.0, 4.0)[taken])
    assert result.server["u"][:, 0].tolist() == pytest.approx(u, abs=1e-15)
    assert result.server["u"][1 - taken].item() == 1.0
    blend = 0.25 * u[0] + 0.75 * u[1]
    theta = [0.75 * value + 0.25 * blend for value in u]
    assert result.server["theta"][:, 0].tolist() == pytest.approx(theta, abs=1e-15)


def test_controls_of_scaffold_are_shared_out_over_all_clients():
    federation = targets([0.0, 4.0], [1, 3])
    given = {"eta": 0.1, "l2": 0.0, "local_steps": 2, "rounds": 1, "clients_per_round": 1}
    run_of = trainer(Scaffold(), federation, Constant(), **given)
    taken = int(run_of._cohort(1).index)
    result = run_of.run()
    # Two steps from 1: gradients 1 and 0.9 towards 0, -3 and -2.7 towards 4.
    change = (0.95, -2.85)[taken]
    assert float(result.server["control"]) == pytest.approx((0.25, 0.75)[taken] * change, abs=1e-14)
    assert float(result.server["theta"]) == pytest.approx((0.81, 1.57)[taken], abs=1e-15)


def test_a_model_of_ifca_without_takers_in_the_cohort_stays_to_the_bit(make_federation):
    federation = make_federation(SIZES)
    servers = []

    class Keeps(IFCA):
        """Keeps what the server had."""

        def aggregate(self, server, uplink, clients):
            after = super().aggregate(server, uplink, clients)
            servers.append((server["models"], uplink["choice"], after["models"]))
            return after

    run(Keeps(spread=1.0), federation, rounds=6, clients_per_round=1)
    for before, (choice,), after in servers:
        assert torch.equal(before[1 - choice], after[1 - choice])
        assert not torch.equal(before[choice], after[choice])


# Those who never took part


@pytest.mark.parametrize("name", NAMES)
def test_clients_never_seen_are_scored_with_what_they_would_receive(make_federation, name):
    federation = make_federation(SIZES)
    run_of = trainer(make(name), federation, rounds=1, clients_per_round=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = run_of.run()
    seen = set(run_of._cohort(1).index.tolist())
    assert result.unseen == 4
    server, everyone = result.server, torch.arange(6)
    for k in set(range(6)) - seen:
        if name == "local":
            expected = torch.zeros(4, dtype=torch.float64)
        elif name == "ifca":
            assert any(torch.equal(result.theta[k], model) for model in server["models"])
            continue
        elif "labels" in server:
            expected = server["theta"][server["labels"][everyone[k]]]
        else:
            expected = server["theta"]
        assert torch.equal(result.theta[k], expected)
        # They have their scores.
        assert math.isfinite(float(result.history.last("test", "log_loss").clients[k]))


def test_nobody_is_unseen_where_all_take_part(make_federation):
    assert run(FedAvg(), make_federation(SIZES)).unseen == 0
    assert run(Local(), make_federation(SIZES), rounds=40, clients_per_round=2).unseen == 0


# What it costs


class Counting(LinearObjective):
    """Counts the clients whose gradients are computed, and whose data are laid out."""

    asked: list[int]
    laid_out: list[str]

    def slope(self, weights, data, seeds=(), state=None):
        self.asked.append(len(weights))
        return super().slope(weights, data, seeds, state)

    def prepare(self, bucket):
        self.laid_out += bucket.names
        return super().prepare(bucket)


def test_a_round_costs_nothing_for_those_who_stay_away(make_federation):
    federation = make_federation([12] * 40)
    run_of = trainer(FedAvg(), federation, rounds=10, clients_per_round=2, eval_every=10)
    objective = run_of.objective
    objective.__class__ = Counting
    objective.asked, objective.laid_out = [], []
    run_of.run()
    assert objective.asked == [2] * 30
    # Everybody once, for the handshake, and then each round's two.
    assert len(objective.laid_out) <= 40 + 20


def test_only_clients_that_take_part_do_any_work(make_federation):
    asked = []

    class Asks(FedAvg):
        """Keeps who was asked."""

        def local_update(self, message, client, problem):
            asked.append((problem.round, problem.names))
            return super().local_update(message, client, problem)

    federation = make_federation(SIZES)
    run_of = trainer(Asks(), federation, rounds=5, participation=0.5)
    run_of.run()
    for round in range(1, 6):
        names = {n for at, names in asked if at == round for n in names}
        expected = [federation.names[k] for k in run_of._cohort(round).index.tolist()]
        assert names == set(expected)


# eval_every


@pytest.mark.parametrize("name", NAMES)
def test_how_often_is_evaluated_changes_no_bit(make_federation, name):
    federation, settings = make_federation(SIZES), {"rounds": 5, "participation": 0.5}
    every = run(make(name), federation, **settings)
    some = run(make(name), federation, eval_every=2, **settings)
    assert some.history.rounds == [2, 4, 5]
    assert torch.equal(some.theta, every.theta)
    kept = {row[1:] for row in every.history.rows() if row.round in (2, 4, 5)}
    assert {str(row[1:]) for row in some.history.rows()} == {str(row) for row in kept}


# Faults 30 and 32


def test_fault_32_no_tensor_kept_between_rounds_has_a_graph(make_federation):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    settings = {"participation": 0.5, "momentum": 0.9, "batch_size": 8, "rounds": 2}
    for name in NAMES:
        result = run(make(name), make_federation(SIZES), module, **settings)
        tensors = [result.theta, result.counters, *result.server.values()]
        tensors += [v for state in result.state_dicts().values() for v in state.values()]
        assert all(t.grad_fn is None and not t.requires_grad and t.grad is None for t in tensors)


def test_fault_32_nothing_piles_up_over_rounds_of_partial_participation(make_federation):
    counts = []

    class Counts:
        def started(self, trainer, result):
            pass

        def evaluated(self, round, scores):
            gc.collect()
            found = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
            counts.append((len(found), len(run_of.objective._prepared)))

        def finished(self, result):
            pass

    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    settings = {"participation": 0.5, "momentum": 0.9, "batch_size": 8, "eval_every": 5}
    run_of = trainer(
        Scaffold(), make_federation(SIZES), module, rounds=20, callbacks=[Counts()], **settings
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        run_of.run()
    assert len(counts) == 4
    assert counts[1] == counts[2] == counts[3]


def test_more_clients_a_round_than_there_are_is_an_error(make_federation):
    with pytest.raises(OptionError, match="clients_per_round is 7, but there are only 6 clients"):
        trainer(FedAvg(), make_federation(SIZES), clients_per_round=7)
