"""Small promises between the rooms that nothing else would notice if they broke."""

import copy
import json
import os

import numpy as np
import pytest
import torch
from torch import nn

from fedtopo_torch import Client, Federation, Trainer, topology
from fedtopo_torch.algorithms import Clustered, Cohort, FedAvg, PTopoFL
from fedtopo_torch.local import Facts, LocalProblem
from fedtopo_torch.objective import Objective, objective_for
from fedtopo_torch.runs import write_json
from fedtopo_torch.trainer import Communication, Diverged


def federation(sizes, scale=(), seed=0):
    rng = np.random.default_rng(seed)
    clients = []
    for k, n in enumerate(sizes):
        x = rng.standard_normal((n, 4)) * (scale[k] if scale else 1)
        y = (x[:, 0] > 0).astype(int)
        clients.append(Client(f"c{k}", (x, y), (x, y)))
    return Federation(clients)


def run(method, fed, module=None, **settings):
    settings = {"rounds": 1, "local_steps": 1, "eta": 0.1, **settings}
    return Trainer(method, fed, module or nn.Linear(4, 1), **settings).run()


def test_all_descriptors_use_the_size_of_the_smallest_client_with_20_records():
    fed = federation([60, 25, 40])
    phi = run(PTopoFL(), fed).server["descriptor"].numpy()
    expected = topology.descriptors(fed.clouds, fed.names, seed=0, size=25, repeats=5)
    np.testing.assert_array_equal(phi, expected)


def test_halves_are_of_the_features_that_are_described():
    fed = federation([40, 40, 40], scale=(1, 1, 50))
    server = run(PTopoFL(n_clusters="auto", scale="pooled"), fed).server
    mean, scale = fed.moments.mean.numpy(), fed.moments.scale().numpy()
    clouds = [(cloud - mean) / scale for cloud in fed.clouds]
    expected = topology.halves(clouds, fed.names, seed=0, size=40, repeats=5)
    np.testing.assert_allclose(server["halves"].numpy(), expected, atol=1e-12)


@pytest.mark.filterwarnings("ignore:fewer than 20")
def test_a_client_of_few_records_is_trusted_however_far_off():
    fed = federation([40, 40, 40, 40, 40, 5], scale=(1, 1, 1, 1, 1, 100))
    server = run(PTopoFL(n_clusters=1), fed).server
    free = topology.trust_weights(server["descriptor"].numpy())
    assert free[-1] < 1  # by its descriptor alone it would be flagged
    assert float(server["trust"][-1]) == 1


def test_a_broadcast_to_some_clients_is_of_their_own_clusters():
    server = {"theta": torch.tensor([[1.0], [2.0]]), "labels": torch.tensor([0, 1, 0, 1])}
    some = Cohort(torch.tensor([3, 0]), torch.tensor([1, 1]), 4)
    assert Clustered().broadcast(server, some)["theta"].tolist() == [[2.0], [1.0]]


def test_clients_are_not_told_of_each_other():
    told = []

    class Listens(FedAvg):
        def introduce(self, problem):
            told.append(problem.facts)
            return {}

    run(Listens(), federation([20, 30]))
    assert [(facts.n, facts.names, facts.groups) for facts in told] == [(None, (), None)]


def test_draws_of_several_dropout_layers_do_not_depend_on_padding():
    layers = nn.Sequential(
        nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 1)
    )
    objective = Objective(layers)
    facts = Facts(0.1, 1, 0.0, 0, torch.zeros(4), torch.ones(4), 1)

    clouds = federation([7, 30]).clouds
    clients = [Client(f"c{k}", (x, (x[:, 0] > 0).astype(int))) for k, x in enumerate(clouds)]
    together, alone = (Federation(c, standardize=False) for c in (clients, clients[:1]))
    rows = []
    for each in (together, alone):
        (data,) = objective.data(each.train)
        theta = objective.initial().repeat(len(each), 1)
        rows.append(LocalProblem(objective, data, facts=facts, round=1).gradient(theta)[0])
    assert torch.allclose(rows[0], rows[1], atol=1e-15)


def test_a_clients_state_that_is_not_finite_is_divergence():
    class Hidden(FedAvg):
        def client_state(self, theta0, problem):
            return {"memory": torch.zeros(len(problem), 1)}

        def local_update(self, message, client, problem):
            uplink, _ = super().local_update(message, client, problem)
            return uplink, {"memory": client["memory"] / 0}

    with pytest.raises(Diverged, match=r"round 1 at client 'c0'.*its memory is not finite"):
        run(Hidden(), federation([20, 20]))


def test_of_messages_that_vary_the_largest_of_each_kind_is_counted():
    sent = Communication()
    floats, whole = torch.zeros(2, 5), torch.zeros(2, 3, dtype=torch.int64)
    for message in ({"a": floats}, {"b": whole}, {"a": floats[:, :1]}):
        sent.record("round", "up", message)
    assert sent.round["up"] == (5, 3)


def test_json_has_no_infinity_and_the_mode_of_any_new_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"radius": float("inf"), "nan": [float("nan")], "tensor": torch.ones(1)})
    assert json.loads(path.read_text()) == {"radius": None, "nan": [None], "tensor": [1.0]}
    plain = tmp_path / "plain"
    plain.write_text("")
    assert os.stat(path).st_mode == os.stat(plain).st_mode


def test_hooks_on_a_linear_layer_are_not_skipped_by_the_closed_form():
    module = nn.Linear(2, 1)
    module.register_full_backward_hook(lambda *_: None)
    assert type(objective_for(module, "binary", 0.0)) is Objective


class Centres(nn.Module):
    """Subtracts the mean of the batch from every record."""

    def __init__(self, training_only):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.training_only = training_only

    def forward(self, x):
        if self.training or not self.training_only:
            x = x - x.mean(0)
        return self.layer(x)


def test_a_module_that_mixes_records_where_it_is_scored_is_refused():
    with pytest.raises(ValueError, match="Centres mixes records"):
        run(FedAvg(), federation([20, 30]), Centres(training_only=False))


def test_records_mixed_in_training_are_never_padded():
    fed, module = federation([20, 30, 20, 25]), Centres(training_only=True)
    trainer = Trainer(FedAvg(), fed, module, rounds=1, local_steps=3, eta=0.1)
    assert trainer.objective.mixes
    found = trainer.run()
    moved = []
    for k in range(4):
        x, y = fed.train.client(k)
        plain = copy.deepcopy(module).double()
        optimizer = torch.optim.SGD(plain.parameters(), 0.1)
        for _ in range(3):
            loss = nn.functional.binary_cross_entropy_with_logits(plain(x)[:, 0], y)
            penalty = sum(p.square().sum() for p in plain.parameters()) * 0.01 / 2
            optimizer.zero_grad()
            (loss + penalty).backward()
            optimizer.step()
        moved.append(torch.cat([p.detach().reshape(-1) for p in plain.parameters()]))
    expected = (torch.stack(moved) * (fed.train.n.double() / fed.train.n.sum())[:, None]).sum(0)
    torch.testing.assert_close(found.server["theta"], expected, rtol=0, atol=1e-12)


def test_modules_that_keep_records_apart_are_not():
    for module in (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1)), nn.Linear(4, 1)):
        assert run(FedAvg(), federation([1, 30]), module).rounds == 1
