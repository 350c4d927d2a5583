"""Oracle and Random, the references; then what holds for every method alike."""

import math
from collections import Counter

import pytest
import torch
from torch import nn

from fedtopo_torch import train
from fedtopo_torch.algorithms import (
    IFCA,
    PACFL,
    Ditto,
    FedAvg,
    FedProx,
    Local,
    Oracle,
    PFedMe,
    PTopoFL,
    Random,
    Scaffold,
)
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.models.logistic import Logistic
from fedtopo_torch.options import OptionError
from fedtopo_torch.randomness import generator
from fedtopo_torch.trainer import Diverged, Trainer

METHODS = {
    method.name: method
    for method in (
        Local(),
        FedAvg(),
        FedProx(),
        Scaffold(),
        PFedMe(),
        IFCA(),
        Ditto(),
        PACFL(),
        PTopoFL(),
        Oracle(),
        Random(),
    )
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def run(method, federation, model=None, **settings):
    return Trainer(method, federation, model or Logistic(), **settings).run()


def regrouped(clients, groups):
    return [Client(c.name, c.train, c.test, group=g) for c, g in zip(clients, groups, strict=True)]


# Oracle


def test_oracle_trains_on_the_true_groups(make_clients):
    clients = make_clients([21, 60, 33, 20])
    result = run(Oracle(), Federation(regrouped(clients, [1, 0, 1, 1])), rounds=1)
    assert result.server["labels"].tolist() == [1, 0, 1, 1]
    # Any numbers will do.
    result = run(Oracle(), Federation(regrouped(clients, [7, 3, 7, -1])), rounds=1)
    assert result.server["labels"].tolist() == [2, 1, 2, 0]
    assert result.report["clusters"] == [["c03"], ["c01"], ["c00", "c02"]]


def test_oracle_weighs_by_records(make_clients):
    clients = regrouped(make_clients([20, 60, 30]), [0, 0, 1])
    report = run(Oracle(), Federation(clients), rounds=1).report
    assert report["weights"] == {"c00": 0.25, "c01": 0.75, "c02": 1.0}


@pytest.mark.parametrize("groups", [[None] * 4, [0, 1, None, 0]], ids=["none", "one unknown"])
def test_oracle_without_groups_is_fedavg(make_clients, groups):
    federation = Federation(regrouped(make_clients([21, 60, 33, 20]), groups))
    oracle, average = (run(m, federation, rounds=20) for m in (Oracle(), FedAvg()))
    assert oracle.server["labels"].tolist() == [0] * 4
    assert torch.allclose(oracle.theta, average.theta, rtol=0, atol=1e-12)
    gap = oracle.history.pooled() - average.history.pooled()
    assert abs(gap).max() < 1e-12


def test_oracle_with_groups_of_one_and_no_blending_is_local(make_clients):
    federation = Federation(regrouped(make_clients([21, 60, 33]), [2, 0, 1]))
    alone, local = (run(m, federation, rounds=20) for m in (Oracle(abar=0), Local()))
    assert torch.allclose(alone.theta, local.theta, rtol=0, atol=1e-12)


def test_groups_on_heart_are_switzerland_against_the_rest():
    result = train("oracle", "fed_heart_disease", rounds=1)
    assert sorted(result.report["clusters"], key=len) == [
        ["Switzerland"],
        ["Cleveland", "Hungary", "VA Long Beach"],
    ]


# Random


@pytest.fixture
def partition(make_facts):
    """``(K, M, seed) -> labels``."""

    def make(k, m, seed=0):
        names = tuple(f"c{i}" for i in range(k))
        facts = make_facts(seed=seed, n=torch.full((k,), 20), names=names)
        return Random(n_clusters=m).partition({}, facts)["labels"].tolist()

    return make


@pytest.mark.parametrize(("k", "m"), [(2, 2), (7, 1), (7, 2), (8, 3), (9, 3), (10, 4), (5, 5)])
def test_random_clusters_are_balanced(partition, k, m):
    for seed in range(5):
        sizes = Counter(partition(k, m, seed))
        assert sorted(sizes) == list(range(m))
        assert max(sizes.values()) - min(sizes.values()) <= 1


def test_random_clusters_are_a_function_of_the_seed(partition):
    drawn = [tuple(partition(8, 2, seed)) for seed in range(20)]
    assert drawn == [tuple(partition(8, 2, seed)) for seed in range(20)]
    # 70 balanced ways to split eight clients: 20 draws of only a few would be no draws.
    assert len(set(drawn)) >= 12
    # Every pair of clients is together 3 times in 7 on average; over 200 seeds 86 +- 7.
    many = [partition(8, 2, seed) for seed in range(200)]
    for a, b in ((0, 1), (0, 7), (3, 4)):
        assert 60 <= sum(labels[a] == labels[b] for labels in many) <= 112


def test_random_labels_are_the_keyed_permutation_of_balanced_ones(partition):
    order = generator(3, "random partition").permutation(8)
    assert partition(8, 2, 3) == [int(i) % 2 for i in order]


def test_random_with_one_cluster_is_fedavg(make_federation):
    federation = make_federation([21, 60, 33, 20])
    with pytest.warns(UserWarning, match="n_clusters = 1"):
        single = run(Random(n_clusters=1), federation, rounds=20)
    average = run(FedAvg(), federation, rounds=20)
    assert torch.allclose(single.theta, average.theta, rtol=0, atol=1e-12)
    gap = single.history.pooled() - average.history.pooled()
    assert abs(gap).max() < 1e-12


def test_fault_16_random_of_one_client_and_of_too_few(make_federation):
    assert run(Random(), make_federation([30]), rounds=1).server["labels"].tolist() == [0]
    with pytest.raises(OptionError, match=r"n_clusters = 3.*2 clients"):
        run(Random(n_clusters=3), make_federation([30, 30]), rounds=1)


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        *((Random, "n_clusters", v) for v in (0, -1, 1.5, "auto", None, True)),
        *((m, "abar", v) for m in (Oracle, Random) for v in (-0.1, 1.1, float("nan"), None)),
        *((m, "alpha", v) for m in (Oracle, Random) for v in (-0.1, 1.1, float("inf"))),
    ],
)
def test_options_out_of_range_are_refused_by_name(method, name, value):
    with pytest.raises(OptionError, match=f"{method.__name__}: option {name} = "):
        method(**{name: value})


# Every method


@every_method
def test_only_the_references_are_not_deployable(method):
    assert method.deployable == (method.name not in ("oracle", "random"))


# p = 4 parameters, d = 3 features, M = 2 clusters, r = 3 directions.
NUMBERS = {
    #           once     up      down, each (floats, whole numbers)
    "local": ((0, 0), (0, 0), (0, 0)),
    "fedavg": ((0, 0), (4, 0), (4, 0)),
    "fedprox": ((0, 0), (4, 0), (4, 0)),
    "scaffold": ((0, 0), (8, 0), (8, 0)),
    "pfedme": ((0, 0), (4, 0), (4, 0)),
    "ifca": ((0, 0), (4, 1), (8, 0)),
    "ditto": ((0, 0), (4, 0), (4, 0)),
    "pacfl": ((9, 0), (4, 0), (4, 0)),
    "ptopofl": ((46, 0), (4, 0), (4, 0)),
    "oracle": ((0, 0), (4, 0), (4, 0)),
    "random": ((0, 0), (4, 0), (4, 0)),
}


@every_method
def test_numbers_sent_per_client_and_round(make_federation, method):
    communication = run(method, make_federation([21, 60, 33, 20]), rounds=3).communication
    once, up, down = NUMBERS[method.name]
    assert communication.introduction == {"up": once}
    assert communication.round == {"up": up, "down": down}
    # Handshake: sums and squares of three features and L_k; n.
    assert communication.handshake["up"] == (7, 1)
    assert communication.total_floats_up(150) == 7 + once[0] + 150 * up[0]


@pytest.mark.parametrize(
    ("method", "once", "up", "down"),
    [(IFCA(n_clusters=5), 0, (4, 1), (20, 0)), (PACFL(rank=2), 6, (4, 0), (4, 0))],
    ids=["five models", "rank two"],
)
def test_numbers_sent_grow_with_the_options(make_federation, method, once, up, down):
    communication = run(method, make_federation([21, 60, 33, 20, 25]), rounds=1).communication
    assert communication.introduction == {"up": (once, 0)}
    assert communication.round == {"up": up, "down": down}


@every_method
def test_the_order_clients_are_given_in_changes_no_bit(make_clients, method):
    # One client is so large that it gets a bucket of its own.
    clients = make_clients([21, 60, 33, 9000, 20], n_test=5)
    results = []
    for order in ([0, 1, 2, 3, 4], [3, 4, 0, 2, 1], [4, 3, 2, 1, 0]):
        results.append(run(method, Federation([clients[k] for k in order]), rounds=3))
    trainer = Trainer(method, results[0].federation, Logistic())
    assert len(trainer.objective.data(results[0].federation.train)) == 2
    for other in results[1:]:
        assert torch.equal(other.theta, results[0].theta)
        assert other.server.keys() == results[0].server.keys()
        for name, value in results[0].server.items():
            assert torch.equal(other.server[name], value), name
        assert [repr(r) for r in other.history.rows()] == [
            repr(r) for r in results[0].history.rows()
        ]


IDENTICAL = {
    "pacfl": [0, 0, 0, 1],
    "ptopofl": [0, 0, 0, 1],
    "oracle": [0, 1, 0, 1],
    "random": [1, 0, 0, 1],
}


@every_method
def test_fault_16_four_identical_clients_train_like_one(make_clients, method):
    one = make_clients([30])[0]
    same = [Client(name, one.train, one.test, group=k % 2) for k, name in enumerate("abcd")]
    result = run(method, Federation(same), rounds=8)
    assert bool(result.theta.isfinite().all())
    assert all(math.isfinite(row.value) for row in result.history.rows())
    if method.name in IDENTICAL:
        assert result.server["labels"].tolist() == IDENTICAL[method.name]
    # What one client trains alone, they train together: rounding apart, all models are the same.
    alone = run(method, Federation([Client("a", one.train, one.test, group=0)]), rounds=8)
    assert torch.allclose(result.theta, alone.theta.expand(4, -1), rtol=0, atol=1e-12)


WILD = {**METHODS, "pfedme": PFedMe(inner_lr=1e6, outer_lr=1e6)}


@pytest.mark.parametrize("method", WILD.values(), ids=WILD)
@pytest.mark.parametrize("eval_every", [1, 100])
def test_fault_28_divergence_names_method_round_and_client(make_federation, method, eval_every):
    federation = make_federation([21, 60, 33, 20])
    with pytest.raises(Diverged) as caught:
        run(method, federation, eta=1e6, rounds=100, eval_every=eval_every)
    result, message = caught.value.result, str(caught.value)
    assert f"{method.title} diverged in round {result.rounds + 1} at client 'c0" in message
    assert "eta = 1e+06" in message
    if eval_every == 1:
        assert result.rounds <= 1
    assert all(math.isfinite(row.value) for row in result.history.rows())
    assert bool(result.theta.isfinite().all())


def frozen_network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    module[0].requires_grad_(False)
    return module


@every_method
def test_fault_08_frozen_parameters_do_not_move_and_are_not_sent(make_federation, method):
    module = frozen_network()
    before = {name: value.double() for name, value in module.state_dict().items()}
    result = run(method, make_federation([20, 30, 25]), module, rounds=3, eta=0.2)
    assert result.theta.shape == (3, 5)
    for state in result.state_dicts().values():
        assert torch.equal(state["0.weight"], before["0.weight"])
        assert torch.equal(state["0.bias"], before["0.bias"])
        assert not torch.equal(state["2.weight"], before["2.weight"])
    # As many numbers as for a linear model of four features and a bias.
    _, up, _ = NUMBERS[method.name]
    assert result.communication.round["up"] == (up[0] // 4 * 5, up[1])


# What the README and the specification say about heart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("fedprox", 0.4623),
        ("scaffold", 0.4538),
        ("pfedme", 0.4435),
        ("ditto", 0.4294),
        ("pacfl", 0.4255),
    ],
)
def test_heart_right_values(method, expected):
    losses = []
    for seed in range(10):
        result = train(
            method, "fed_heart_disease", seed=seed, rounds=150, eval_every=150, splits=("test",)
        )
        losses.append(result.history.last("test", "log_loss").pooled)
        if method == "pacfl":
            assert ["Switzerland"] in result.report["clusters"]
    assert sum(losses) / 10 == pytest.approx(expected, abs=0.002)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*nobody took")
def test_heart_right_value_of_ifca_depends_on_its_draws():
    losses = [
        train("ifca", "fed_heart_disease", seed=seed, rounds=150, eval_every=150)
        .history.last()
        .pooled
        for seed in range(10)
    ]
    assert sum(losses) / 10 == pytest.approx(0.438, abs=0.01)
