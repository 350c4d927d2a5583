"""PACFL-style: bases of raw features, distances and not similarities, refusals by name."""

import numpy as np
import pytest
import torch

from fedtopo_torch.algorithms import PACFL, FedAvg
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.models.logistic import Logistic
from fedtopo_torch.options import OptionError
from fedtopo_torch.topology import partition_from_distances
from fedtopo_torch.trainer import Trainer


def run(method, federation, **settings):
    return Trainer(method, federation, Logistic(), **settings).run()


def lines(*degrees):
    """Lines in a plane, at these angles to the first axis."""
    t = np.radians(degrees)
    return np.stack([np.cos(t), np.sin(t)], axis=1)[:, :, None]


@pytest.fixture
def labels_of(make_facts):
    """``(bases, options) -> labels``."""

    def make(bases, **options):
        n = torch.full((len(bases),), 20)
        facts = make_facts(n=n, names=tuple(f"c{k}" for k in range(len(bases))))
        theta0 = torch.zeros(1, dtype=torch.float64)
        introductions = {"basis": torch.as_tensor(bases)}
        state = PACFL(**options, abar=0).server_state(theta0, introductions, facts)
        return state["labels"].tolist()

    return make


# What is sent


def test_a_client_sends_the_top_directions_of_its_raw_features(make_clients):
    clients = make_clients([40, 30, 50], d=5)
    result = run(PACFL(), Federation(clients), rounds=1)
    sent = result.server["basis"]
    assert sent.shape == (3, 5, 3)
    assert result.communication.introduction == {"up": (15, 0)}
    for client, basis in zip(clients, sent.numpy(), strict=True):
        top = np.linalg.svd(client.train[0], full_matrices=False)[2][:3].T
        assert np.abs(basis.T @ top) == pytest.approx(np.eye(3), abs=1e-9)


def test_labels_and_test_records_do_not_enter_the_basis(make_clients):
    clients = make_clients([40, 30, 50])
    changed = [
        Client(c.name, (c.train[0], 1 - c.train[1]), (c.test[0] + 5, c.test[1])) for c in clients
    ]
    before, after = (run(PACFL(rank=2), Federation(c), rounds=1) for c in (clients, changed))
    assert torch.equal(before.server["basis"], after.server["basis"])
    assert torch.equal(before.server["labels"], after.server["labels"])


def test_standardised_models_change_nothing_about_the_basis(make_clients):
    clients = make_clients([40, 30, 50])
    raw, standard = (
        run(PACFL(rank=2), Federation(clients, standardize=s), rounds=1) for s in (False, True)
    )
    assert torch.equal(raw.server["basis"], standard.server["basis"])


def test_units_of_a_column_matter(make_clients):
    # In grams, the first column is the leading direction of every client.
    clients = make_clients([40, 30, 50])
    grams = [Client(c.name, (c.train[0] * [1e6, 1, 1], c.train[1]), c.test) for c in clients]
    bases = run(PACFL(rank=1), Federation(grams), rounds=1).server["basis"]
    assert bases[:, 0, 0].abs().tolist() == pytest.approx([1.0] * 3, abs=1e-9)


def test_float32_federations_have_the_same_clusters(make_clients):
    clients = make_clients([40, 30, 50, 20, 25])
    double, single = (
        run(PACFL(rank=2), Federation(clients, dtype=t), rounds=2)
        for t in (torch.float64, torch.float32)
    )
    assert torch.equal(single.server["labels"], double.server["labels"])
    assert single.theta.dtype == torch.float32
    assert torch.allclose(single.theta.double(), double.theta, rtol=0, atol=1e-5)


# Fault 15


def test_fault_15_two_pairs_come_out_as_the_two_pairs(labels_of):
    assert labels_of(lines(0, 80, 5, 85)) == [0, 1, 0, 1]
    assert labels_of(lines(85, 0, 5, 80)) == [0, 1, 1, 0]
    # 175 degrees is 5 degrees away from 0: a line has no sign.
    assert labels_of(lines(0, 90, 175, 95)) == [0, 1, 0, 1]


def test_fault_15_subspaces_of_features_give_the_groups():
    # Group 0 varies along e1, e2; group 1 along e3, e4.
    clients = []
    for k, name in enumerate("abcdef"):
        rng = np.random.default_rng(k)
        width = [1, 1, 0.01, 0.01] if k % 2 == 0 else [0.01, 0.01, 1, 1]
        x = rng.normal(size=(30, 4)) * width
        y = (x.sum(1) > 0).astype(int)
        clients.append(Client(name, (x, y), (x, y)))
    result = run(PACFL(rank=2), Federation(clients), rounds=1)
    assert result.server["labels"].tolist() == [0, 1, 0, 1, 0, 1]
    assert result.report["clusters"] == [["a", "c", "e"], ["b", "d", "f"]]


def test_linkage_is_the_one_asked_for(labels_of):
    # 3 apart, then average linkage joins 7 to {0, 3} at 5.5, complete linkage joins 7 to 13 at 6.
    bases = lines(0, 3, 7, 13)
    assert labels_of(bases, linkage="average") == [0, 0, 0, 1]
    assert labels_of(bases, linkage="complete") == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({(0, 1): np.nan, (1, 0): np.nan}, "finite"),
        ({(0, 1): -0.1, (1, 0): -0.1}, "negative"),
        ({(0, 1): 0.5}, "symmetric"),
        ({(0, 0): 1.0, (1, 1): 1.0}, "similarity"),
    ],
)
def test_fault_15_what_is_no_dissimilarity_is_refused(entries, told):
    matrix = np.array([[0.0, 0.1, 0.9], [0.1, 0.0, 0.9], [0.9, 0.9, 0.0]])
    assert partition_from_distances(matrix, 2).tolist() == [0, 0, 1]
    for at, value in entries.items():
        matrix[at] = value
    with pytest.raises(ValueError, match=told):
        partition_from_distances(matrix, 2)


# Fault 16


@pytest.mark.filterwarnings("ignore:n_clusters = 1")
@pytest.mark.parametrize("n_clusters", [1, 2, 3])
def test_fault_16_one_client_is_one_cluster(make_federation, n_clusters):
    result = run(PACFL(n_clusters=n_clusters), make_federation([30]), rounds=2)
    assert result.server["labels"].tolist() == [0]
    assert result.server["omega"].tolist() == [1.0]


def test_fault_16_more_clusters_than_clients_names_both_numbers(make_federation):
    with pytest.raises(OptionError, match=r"n_clusters = 3.*2 clients"):
        run(PACFL(n_clusters=3), make_federation([30, 30]), rounds=1)


def test_fault_16_as_many_clusters_as_clients_are_each_alone(make_federation):
    result = run(PACFL(n_clusters=3), make_federation([30, 20, 25]), rounds=1)
    assert result.server["labels"].tolist() == [0, 1, 2]


def test_fault_16_four_identical_clients_are_separated_as_documented():
    wrong = {}
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(30, 5)) * rng.uniform(0.5, 3, 5) + rng.normal(size=5)
        y = (x[:, 0] > 0).astype(int)
        same = Federation([Client(name, (x, y), (x, y)) for name in "abcd"])
        labels = run(PACFL(), same, rounds=1).server["labels"].tolist()
        if labels != [0, 0, 0, 1]:
            wrong[seed] = labels
    assert wrong == {}


# Identities and options


def test_one_cluster_is_fedavg(make_federation):
    federation = make_federation([21, 60, 33, 20])
    with pytest.warns(UserWarning, match="n_clusters = 1"):
        single = run(PACFL(n_clusters=1), federation, rounds=20)
    average = run(FedAvg(), federation, rounds=20)
    assert torch.allclose(single.theta, average.theta, rtol=0, atol=1e-12)
    gap = single.history.pooled() - average.history.pooled()
    assert abs(gap).max() < 1e-12


def test_a_rank_above_the_number_of_features_names_a_client(make_federation):
    with pytest.raises(OptionError, match=r"rank = 4 .*client 'c00' has 30 .* 3 features"):
        run(PACFL(rank=4), make_federation([30, 20]), rounds=1)


def test_a_rank_above_a_clients_records_names_that_client(make_federation):
    with pytest.raises(OptionError, match=r"rank = 3 .*client 'c01' has 2 training records"):
        run(PACFL(rank=3), make_federation([30, 2, 20]), rounds=1)
    # At the limit it is fine.
    assert run(PACFL(rank=2), make_federation([30, 2, 20]), rounds=1).rounds == 1
    assert run(PACFL(rank=3), make_federation([30, 3, 20]), rounds=1).rounds == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n_clusters", v) for v in (0, -1, 1.5, "auto", None, True)),
        *(("rank", v) for v in (0, -1, 2.5, None, True)),
        *(("linkage", v) for v in ("ward", "single", None)),
        *(("abar", v) for v in (-0.1, 1.1, float("nan"))),
        *(("alpha", v) for v in (-0.1, 1.1, float("inf"))),
    ],
)
def test_options_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(OptionError, match=f"PACFL: option {name} = "):
        PACFL(**{name: value})
