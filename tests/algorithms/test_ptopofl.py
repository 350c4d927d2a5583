"""pTopoFL: weights from descriptors by the formulas, partitions, small and far-off clients."""

import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from fedtopo_torch import topology
from fedtopo_torch.algorithms import Cohort, PTopoFL
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.models import CNN, Logistic
from fedtopo_torch.options import OptionError
from fedtopo_torch.trainer import Trainer


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.fixture
def start(make_facts):
    """``(phi, n, options) -> (algorithm, server state)``."""

    def make(phi, n, **options):
        algorithm = PTopoFL(**options)
        facts = make_facts(n=torch.tensor(n), names=tuple(f"c{k}" for k in range(len(n))))
        introductions = {"descriptor": torch.as_tensor(phi, dtype=torch.float64)}
        return algorithm, algorithm.server_state(rows(9.0)[0], introductions, facts)

    return make


# Two pairs on a line: {0, 2} and {10, 14}, centroids 1 and 12.
PAIRS = [[0.0], [2.0], [10.0], [14.0]]


def test_weights_fall_with_the_distance_to_the_centroid(start):
    _, server = start(PAIRS, [20, 40, 60, 30], trust="off")
    assert server["labels"].tolist() == [0, 0, 1, 1]
    # Both members of a pair are equally far from their centroid, so records decide within it.
    weights = server["weights"]
    assert (weights[1] / weights[0]).item() == pytest.approx(2, abs=1e-14)
    assert (weights[3] / weights[2]).item() == pytest.approx(0.5, abs=1e-14)
    # Three in one cluster: centroid 2, distances 2, 1, 3.
    _, server = start([[0.0], [1.0], [5.0]], [20, 20, 20], n_clusters=1, trust="off")
    weights = server["weights"]
    assert (weights[1] / weights[0]).item() == pytest.approx(np.exp(1), rel=1e-14)
    assert (weights[2] / weights[0]).item() == pytest.approx(np.exp(-1), rel=1e-14)


def test_uniform_weights_are_by_records_only(start):
    _, server = start(PAIRS, [20, 40, 60, 30], weights="uniform")
    weights = server["weights"]
    assert (weights[1] / weights[0]).item() == 2.0
    assert (weights[3] / weights[2]).item() == 0.5


def test_robust_trust_by_hand(start):
    # Points 0, 1, 2, 3, 20: mean distances to the others 26/4, 23/4, 22/4, 23/4, 74/4.
    # Median 5.75, deviations 0.75, 0, 0.25, 0, 12.75: MAD 0.25. z of the last 12.75/0.37065.
    phi = [[0.0], [1.0], [2.0], [3.0], [20.0]]
    z = 12.75 / (1.4826 * 0.25)
    _, server = start(phi, [20] * 5, n_clusters=1)
    trust = server["trust"].tolist()
    assert trust[:4] == [1.0] * 4
    assert trust[4] == pytest.approx(np.exp(3 - z), rel=1e-12)
    # Centroid 5.2: distances 5.2, 4.2, 3.2, 2.2, 14.8.
    weights = server["weights"]
    expected = np.exp(3 - z - 14.8 + 2.2)
    assert (weights[4] / weights[3]).item() == pytest.approx(expected, rel=1e-10)


def test_mean_std_trust_by_hand(start):
    phi = [[0.0], [1.0], [2.0], [3.0], [20.0]]
    delta = np.array([6.5, 5.75, 5.5, 5.75, 18.5])
    z = (18.5 - delta.mean()) / delta.std()
    _, server = start(phi, [20] * 5, n_clusters=1, trust="mean_std")
    assert server["trust"].tolist()[:4] == [1.0] * 4
    assert server["trust"][4].item() == pytest.approx(np.exp(1 - z), rel=1e-12)


def test_trust_off_is_one_for_everybody(start):
    _, server = start([[0.0], [1.0], [2.0], [3.0], [20.0]], [20] * 5, trust="off")
    assert server["trust"].tolist() == [1.0] * 5


# The outlier's z is some 5e5: exp(3 - z) is 0 in floating point.
FAR = [[0.0], [1e-4], [2e-4], [3e-4], [20.0]]


def test_a_cluster_of_distrusted_clients_still_trains(start):
    # Within a cluster weights sum to one, however small each is: alone, a client weighs 1.
    algorithm, server = start(FAR, [20] * 5, alpha=0.0)
    assert server["labels"].tolist() == [0, 0, 0, 0, 1]
    clients = Cohort(torch.arange(5), torch.tensor([20] * 5), 100)
    after = algorithm.aggregate(server, {"theta": rows(1.0, 1.0, 1.0, 1.0, 5.0)}, clients)
    assert after["theta"].flatten().tolist() == pytest.approx([1.0, 5.0], abs=1e-12)


def test_report_of_a_distrusted_cluster_has_no_nan(start, make_facts):
    algorithm, server = start(FAR, [20] * 5, alpha=0.0)
    names = tuple(f"c{k}" for k in range(5))
    facts = make_facts(n=torch.tensor([20] * 5), names=names, smallest=20)
    clouds = [np.random.default_rng(k).normal(size=(20, 2)) for k in range(5)]
    report = algorithm.report(server, facts, clouds)
    assert report["weights"]["c4"] == 1.0
    assert sum(report["weights"][name] for name in names[:4]) == pytest.approx(1.0, abs=1e-12)
    assert report["flagged"] == ["c4"]


def test_a_distrusted_client_alone_trains_in_a_run():
    # Five clients of almost the same shape, one of another: its trust is 0 in floating point.
    x = np.random.default_rng(0).normal(size=(40, 3))
    y = (x[:, 0] > 0).astype(int)
    clients = [Client(f"a{i}", (x * [1, 1, 1 + 1e-6 * i], y)) for i in range(5)]
    angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    ring = np.stack([50 * np.cos(angle), 50 * np.sin(angle), angle], axis=1)
    clients.append(Client("odd", (ring, (ring[:, 0] > 0).astype(int))))
    federation = Federation(clients)
    settings = {"rounds": 20, "splits": ("train",), "metrics": ("log_loss",)}
    trusting = Trainer(PTopoFL(trust="off"), federation, Logistic(), **settings).run()
    wary = Trainer(PTopoFL(), federation, Logistic(), **settings).run()
    assert wary.server["labels"].tolist() == [0, 0, 0, 0, 0, 1]
    # Alone in its cluster, its weight is 1 whatever its trust.
    assert torch.allclose(wary.theta[-1], trusting.theta[-1], rtol=0, atol=1e-9)


# Partitions


def test_fault_16_one_client_is_one_cluster(make_federation):
    for n_clusters in (1, "auto"):
        method = PTopoFL(n_clusters=n_clusters)
        result = Trainer(method, make_federation([30]), Logistic(), rounds=1).run()
        assert result.server["labels"].tolist() == [0]
        assert result.server["omega"].tolist() == [1.0]


def test_fault_16_more_clusters_than_clients_names_both_numbers(make_federation):
    with pytest.raises(ValueError, match=r"3.*2 clients"):
        Trainer(PTopoFL(n_clusters=3), make_federation([30, 30]), Logistic(), rounds=1).run()


def test_four_identical_clients_train_like_one(make_clients):
    one = make_clients([30])[0]
    same = [Client(name, one.train, one.test) for name in "abcd"]
    # Their descriptors are equal but for the subsamples, which all records leave no room for.
    result = Trainer(PTopoFL(n_clusters=1), Federation(same), Logistic(), rounds=3).run()
    alone = Trainer(PTopoFL(n_clusters=1), Federation([one]), Logistic(), rounds=3).run()
    assert result.server["trust"].tolist() == [1.0] * 4
    assert torch.allclose(result.theta, alone.theta.expand(4, -1), rtol=0, atol=1e-12)


def test_small_clients_are_named_and_trusted(make_federation):
    federation = make_federation([40, 41, 42, 43, 8, 9], names=[*"abcd", "tiny", "wee"])
    with pytest.warns(UserWarning, match=r"20 training records.*tiny, wee"):
        result = Trainer(PTopoFL(), federation, Logistic(), rounds=1).run()
    assert result.server["trust"][4:].tolist() == [1.0, 1.0]
    assert result.facts.smallest == 40


def test_twenty_records_are_not_few(make_federation):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = Trainer(PTopoFL(), make_federation([20, 30]), Logistic(), rounds=1).run()
    assert result.facts.smallest == 20


# Activations of a layer


def network(d=3, out=1):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = {"hidden": nn.Linear(d, 4), "act": nn.Tanh(), "drop": nn.Dropout(0.5)}
        return nn.Sequential(OrderedDict(layers, out=nn.Linear(4, out)))


def described(federation, module, options, **settings):
    settings = {"rounds": 1, "eta": 0.1, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of dropout, which goes client by client
        return Trainer(PTopoFL(**options), federation, module, **settings).run()


@pytest.mark.parametrize("sizes", [[40, 40, 40], [50, 25, 40, 31]])
def test_descriptors_of_a_layer_are_those_of_numpys_activations(make_federation, sizes):
    federation, module = make_federation(sizes), network().double()
    result = described(federation, module, {"describe": "act", "n_clusters": "auto"})
    weight, bias = (p.detach().numpy() for p in module.hidden.parameters())
    moments = federation.moments
    mean, scale = moments.mean.numpy(), moments.scale().numpy()
    clouds = [np.tanh((x - mean) / scale @ weight.T + bias) for x in federation.clouds]
    for found, expected in zip(result.described, clouds, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    settings = {"seed": 0, "size": min(sizes), "repeats": 5}
    phi = topology.descriptors(clouds, federation.names, **settings)
    halves = topology.halves(clouds, federation.names, **settings)
    np.testing.assert_allclose(result.server["descriptor"], phi, rtol=0, atol=1e-9)
    np.testing.assert_allclose(result.server["halves"], halves, rtol=0, atol=1e-9)
    # Nothing but the descriptors is sent, whatever the layer's width.
    assert result.communication.contents["introduction up"] == {"descriptor": 46, "halves": 552}


def test_the_report_describes_what_was_sent(make_federation):
    federation, module = make_federation([40] * 6), network().double()
    sent = described(federation, module, {"describe": "act", "n_clusters": "auto"})
    # Not sent with a number given: the report computes the halves itself, of the same activations.
    told = described(federation, module, {"describe": "act", "n_clusters": 2}).report
    assert told["choice"] == sent.report["choice"]
    features = described(federation, module, {"n_clusters": 2}).report
    assert features["choice"]["reproducibility"] != told["choice"]["reproducibility"]


def test_the_layer_is_the_initial_models_however_long_the_run(make_federation):
    federation, module = make_federation([40, 40]), network().double()
    short, long = (
        described(federation, module, {"describe": "hidden"}, rounds=rounds) for rounds in (1, 4)
    )
    assert torch.equal(short.server["descriptor"], long.server["descriptor"])
    for one, other in zip(short.described, long.described, strict=True):
        np.testing.assert_array_equal(one, other)


def test_activations_of_images_are_flattened_and_do_not_depend_on_padding():
    rng = np.random.default_rng(0)
    clients = [
        Client(f"c{k}", (rng.normal(size=(n, 1, 4, 4)), np.arange(n) % 2))
        for k, n in enumerate((25, 32))
    ]
    together, alone = Federation(clients, standardize=False), []
    model, settings = CNN(channels=(2, 3)), {"splits": ("train",)}
    found = described(together, model, {"describe": "pool1"}, **settings)
    assert [cloud.shape for cloud in found.described] == [(25, 8), (32, 8)]
    for k in (0, 1):
        federation = Federation([clients[k]], standardize=False)
        (cloud,) = described(federation, model, {"describe": "pool1"}, **settings).described
        alone.append(cloud)
    for one, other in zip(found.described, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-14)


def test_a_layer_that_is_not_there_is_an_error_that_lists_the_layers(make_federation):
    federation = make_federation([40, 40])
    message = r"describe = hiden: Sequential has no layer 'hiden'. Its layers: hidden, act, drop"
    with pytest.raises(OptionError, match=message):
        described(federation, network(), {"describe": "hiden"})
    with pytest.raises(OptionError, match=r"Linear has no layer 'act'. Its layers: none"):
        described(federation, Logistic(), {"describe": "act"})


def test_pooled_scale_is_for_features():
    with pytest.raises(OptionError, match=r"scale = pooled is for features.*describe = act1"):
        PTopoFL(describe="act1", scale="pooled")


# What the descriptor depends on


def descriptors(clients, **options):
    result = Trainer(PTopoFL(**options), Federation(clients), Logistic(), rounds=1).run()
    return result.server["descriptor"]


def test_labels_and_test_records_do_not_enter_the_descriptor(make_clients):
    clients = make_clients([40, 30, 50])
    before = descriptors(clients)
    changed = [
        Client(c.name, (c.train[0], 1 - c.train[1]), (c.test[0] + 5, c.test[1])) for c in clients
    ]
    assert torch.equal(descriptors(changed), before)
    assert before.shape == (3, 46)
    assert torch.allclose(before.norm(dim=1), torch.ones(3, dtype=torch.float64), atol=1e-12)


def test_units_of_a_column_matter_only_in_raw_scale(make_clients):
    clients = make_clients([40, 30, 50])
    grams = [Client(c.name, (c.train[0] * [1000, 1, 1], c.train[1]), c.test) for c in clients]
    pooled = [descriptors(c, scale="pooled") for c in (clients, grams)]
    assert torch.allclose(pooled[0], pooled[1], rtol=0, atol=1e-9)
    raw = [descriptors(c, scale="raw") for c in (clients, grams)]
    assert not torch.allclose(raw[0], raw[1], rtol=0, atol=1e-3)


def test_a_clients_descriptor_does_not_depend_on_the_others_names_or_number(make_clients):
    clients = make_clients([40, 40, 40, 40])
    whole, part = descriptors(clients), descriptors([clients[3], clients[1]])
    assert torch.equal(part, whole[[1, 3]])
