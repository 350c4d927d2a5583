"""IFCA by hand: who takes which model, what becomes of it, and what is scored."""

import warnings

import pytest
import torch

from fedtopo_torch.algorithms import IFCA, Cohort, FedAvg
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.models.logistic import Logistic
from fedtopo_torch.options import OptionError
from fedtopo_torch.randomness import generator
from fedtopo_torch.trainer import Trainer


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def cohort(*n, index=None, total=None):
    index = torch.arange(len(n)) if index is None else torch.tensor(index)
    return Cohort(index, torch.tensor(n), sum(n) if total is None else total)


def server_of(*models, clients=2):
    """A server that holds these scalar models, before round 1."""
    return {
        "models": rows(*models),
        "takers": torch.full((clients,), -1),
        "idle": torch.zeros(len(models), dtype=torch.int64),
    }


def one_round(method, server, problem, clients):
    uplink, client = method.local_update(method.broadcast(server, clients), {}, problem)
    assert uplink.keys() == {"theta", "choice"}
    assert client == {}
    return uplink, method.aggregate(server, uplink, clients)


def run(method, federation, **settings):
    return Trainer(method, federation, Logistic(), **settings).run()


# Fault 13


def test_fault_13_a_model_nobody_takes_stays_exactly(toy):
    # Both take model 0: 0 -> 0.1 and 0 -> 0.2; 1/4 0.1 + 3/4 0.2 = 0.175.
    problem = toy([1.0, 2.0], counts=[1, 3], local_steps=1)
    uplink, server = one_round(IFCA(), server_of(0.0, 10.0), problem, cohort(1, 3))
    assert uplink["choice"].tolist() == [0, 0]
    assert uplink["theta"].flatten().tolist() == pytest.approx([0.1, 0.2], abs=1e-15)
    assert server["models"][0].item() == pytest.approx(0.175, abs=1e-15)
    assert server["models"][1].item() == 10.0
    assert server["takers"].tolist() == [0, 0]


def test_fault_13_each_model_is_the_mean_of_its_own_takers(toy):
    # Q(1), Q(9), Q(2) with 1, 5 and 3 records: model 0 as before, model 1 goes 10 -> 9.9.
    problem = toy([1.0, 9.0, 2.0], counts=[1, 5, 3], local_steps=1)
    start = server_of(0.0, 10.0, clients=3)
    uplink, server = one_round(IFCA(), start, problem, cohort(1, 5, 3))
    assert uplink["choice"].tolist() == [0, 1, 0]
    assert server["models"].flatten().tolist() == pytest.approx([0.175, 9.9], abs=1e-14)
    assert server["takers"].tolist() == [0, 1, 0]
    # What the round started from is not written on.
    assert start["models"].flatten().tolist() == [0.0, 10.0]
    assert start["takers"].tolist() == [-1, -1, -1]


def test_fault_13_of_equal_losses_the_first_model_is_taken(toy):
    problem = toy([2.0], local_steps=1)
    for models, expected in (((0.0, 4.0), 0), ((4.0, 0.0), 0), ((9.0, 2.0, 2.0), 1)):
        method = IFCA(n_clusters=len(models))
        uplink, _ = one_round(method, server_of(*models, clients=1), problem, cohort(1))
        assert uplink["choice"].tolist() == [expected]


def test_fault_13_the_choice_is_made_on_training_records(make_clients):
    # Test labels turned round: nothing changes.
    clients = make_clients([21, 60, 33])
    turned = [Client(c.name, c.train, (c.test[0], 1 - c.test[1])) for c in clients]
    first, second = (run(IFCA(), Federation(c), rounds=5, seed=3) for c in (clients, turned))
    assert torch.equal(first.server["models"], second.server["models"])
    assert torch.equal(first.server["takers"], second.server["takers"])
    assert torch.equal(first.theta, second.theta)


def test_scored_with_the_model_that_fits_best_after_the_last_aggregation(toy):
    # Q(1) takes 0 of (0, 2.5), as Q(-9) does with nine times the records. Model 0 becomes
    # 1/10 0.1 - 9/10 0.9 = -0.8: for Q(1) now 2.5 fits better (1.125 against 1.62).
    problem = toy([1.0, -9.0], counts=[1, 9], local_steps=1)
    clients, method = cohort(1, 9), IFCA()
    uplink, server = one_round(method, server_of(0.0, 2.5), problem, clients)
    assert uplink["choice"].tolist() == [0, 0]
    assert server["models"].flatten().tolist() == pytest.approx([-0.8, 2.5], abs=1e-15)
    scored = method.personal(method.broadcast(server, clients), {}, problem)
    assert scored.flatten().tolist() == pytest.approx([2.5, -0.8], abs=1e-15)


# Some clients of all


def test_a_part_of_the_clients_decides_on_the_models():
    # Of records 100, 1, 100, 3 the second and the fourth come.
    part = cohort(1, 3, index=[1, 3], total=204)
    uplink = {"theta": rows(0.0, 4.0), "choice": torch.tensor([0, 0])}
    server = IFCA().aggregate(server_of(7.0, 10.0, clients=4), uplink, part)
    assert server["models"].flatten().tolist() == [3.0, 10.0]
    assert server["takers"].tolist() == [-1, 0, -1, 0]
    assert IFCA().clusters(server) is None
    uplink = {"theta": rows(5.0, 6.0), "choice": torch.tensor([1, 0])}
    server = IFCA().aggregate(server, uplink, cohort(100, 100, index=[0, 2], total=204))
    assert server["models"].flatten().tolist() == [6.0, 5.0]
    assert server["takers"].tolist() == [1, 0, 0, 0]
    assert IFCA().clusters(server).tolist() == [1, 0, 0, 0]


def test_float32_models_stay_float32():
    uplink = {"theta": rows(0.0, 4.0).float(), "choice": torch.tensor([0, 0])}
    start = server_of(7.0, 10.0)
    server = IFCA().aggregate({**start, "models": start["models"].float()}, uplink, cohort(1, 3))
    assert server["models"].dtype == torch.float32
    assert server["models"].flatten().tolist() == [3.0, 10.0]


# The start


def test_models_start_around_theta0_from_the_runs_seed(make_facts):
    theta0 = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def models(seed, **options):
        facts = make_facts(seed=seed, names=("a", "b"), n=torch.tensor([1, 1]))
        return IFCA(**options).server_state(theta0, {}, facts)["models"]

    draws = torch.from_numpy(generator(5, "ifca").standard_normal((2, 3)))
    assert torch.allclose(models(5), theta0 + 0.1 * draws, rtol=0, atol=1e-15)
    assert torch.equal(models(5), models(5))
    assert not torch.equal(models(5), models(6))
    assert torch.equal(models(5, n_clusters=3, spread=0.0), theta0.expand(3, -1))


def test_the_draws_have_the_spread_asked_for(make_facts):
    facts = make_facts(names=("a",), n=torch.tensor([1]))
    zero = torch.zeros(20_000, dtype=torch.float64)
    models = IFCA(n_clusters=3, spread=0.5).server_state(zero, {}, facts)["models"]
    # Standard error of a std from 20,000 draws: 0.5 %.
    assert models.std(dim=1).tolist() == pytest.approx([0.5] * 3, rel=0.03)
    assert models.mean(dim=1).abs().max().item() < 0.02
    assert abs(torch.corrcoef(models)[0, 1].item()) < 0.04


def test_one_model_without_spread_is_fedavg(make_federation):
    federation = make_federation([21, 60, 33, 20])
    with pytest.warns(UserWarning, match="n_clusters = 1: IFCA is FedAvg"):
        single = run(IFCA(n_clusters=1, spread=0), federation, rounds=20)
    average = run(FedAvg(), federation, rounds=20)
    assert torch.allclose(single.theta, average.theta, rtol=0, atol=1e-12)
    gap = single.history.pooled() - average.history.pooled()
    assert abs(gap).max() < 1e-12


def test_of_models_without_spread_everybody_takes_the_first(make_federation):
    # One round only: from then on an untrained model may be the better one for some client.
    federation = make_federation([21, 60, 33, 20])
    equal = run(IFCA(n_clusters=3, spread=0), federation, rounds=1)
    average = run(FedAvg(), federation, rounds=1)
    assert equal.server["takers"].tolist() == [0] * 4
    assert torch.allclose(equal.server["models"][0], average.theta[0], rtol=0, atol=1e-12)
    assert torch.equal(equal.server["models"][1:], torch.zeros(2, 4, dtype=torch.float64))


# Models nobody takes


def idle_warnings(caught):
    return [str(w.message) for w in caught if "nobody took" in str(w.message)]


def same_clients(make_clients, names="abcd"):
    one = make_clients([30])[0]
    return Federation([Client(name, one.train, one.test) for name in names])


@pytest.mark.parametrize(("rounds", "expected"), [(9, 0), (10, 1), (35, 1)])
def test_a_model_nobody_takes_is_warned_about_once_after_ten_rounds(make_clients, rounds, expected):
    # Identical clients always agree on one of the two models.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(IFCA(), same_clients(make_clients), rounds=rounds)
    left = 1 - int(result.server["takers"][0])
    assert len(idle_warnings(caught)) == expected
    assert all(f"model {left} " in message for message in idle_warnings(caught))


def test_idle_rounds_are_counted_anew_after_a_taker():
    first = {"theta": rows(1.0, 1.0), "choice": torch.tensor([0, 0])}
    both = {"theta": rows(1.0, 1.0), "choice": torch.tensor([0, 1])}
    server = server_of(0.0, 10.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for uplink in [first] * 9 + [both] + [first] * 9:
            server = IFCA().aggregate(server, uplink, cohort(1, 1))
        assert idle_warnings(caught) == []
        assert server["idle"].tolist() == [0, 9]
        server = IFCA().aggregate(server, first, cohort(1, 1))
        assert len(idle_warnings(caught)) == 1


def test_fault_16_one_client_and_identical_clients_take_one_model(make_federation, make_clients):
    alone = run(IFCA(), make_federation([30]), rounds=3)
    assert bool(alone.theta.isfinite().all())
    taken = set()
    for seed in range(8):
        same = run(IFCA(), same_clients(make_clients), rounds=3, seed=seed)
        assert len(set(same.server["takers"].tolist())) == 1
        assert torch.equal(same.theta, same.theta[:1].expand(4, -1))
        taken.add(int(same.server["takers"][0]))
    # The second model alone, too.
    assert taken == {0, 1}


def test_fault_16_more_models_than_clients_leave_some_untouched(make_federation):
    result = run(IFCA(n_clusters=5), make_federation([30, 20]), rounds=5)
    start = torch.from_numpy(0.1 * generator(0, "ifca").standard_normal((5, 4)))
    untouched = [j for j in range(5) if torch.equal(result.server["models"][j], start[j])]
    assert 3 <= len(untouched) < 5
    assert not set(untouched) & set(result.server["takers"].tolist())


def test_different_rules_are_told_apart():
    # Two clients label by x > 0, two by x < 0: no shared model can serve them.
    clients = []
    for k, name in enumerate("abcd"):
        x = torch.randn(40, 1, generator=torch.Generator().manual_seed(k)).numpy()
        y = ((x[:, 0] > 0) if k < 2 else (x[:, 0] < 0)).astype(int)
        clients.append(Client(name, (x, y), (x, y)))
    result = run(IFCA(), Federation(clients), rounds=30)
    takers = result.server["takers"].tolist()
    assert takers[0] == takers[1] != takers[2] == takers[3]
    assert result.history.last("test", "accuracy").pooled > 0.95
    report = result.report["clusters"]
    assert sorted(report) == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n_clusters", v) for v in (0, -1, 1.5, "auto", None, True)),
        *(("spread", v) for v in (-0.1, float("nan"), float("inf"), None)),
    ],
)
def test_options_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(OptionError, match=f"IFCA: option {name} = "):
        IFCA(**{name: value})
