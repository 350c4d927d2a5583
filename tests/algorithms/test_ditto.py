"""Ditto by hand; between FedAvg and Local to the bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedtopo_torch.algorithms import Cohort, Ditto, FedAvg, Local
from fedtopo_torch.models.logistic import Logistic
from fedtopo_torch.options import OptionError
from fedtopo_torch.trainer import Trainer

PROPERTY = settings(
    derandomize=True,
    max_examples=25,
    deadline=None,
    # The fixture is a plain function.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def play(method, problem, n, rounds):
    """(theta, [v_k]) after each round of full participation."""
    clients = Cohort(torch.arange(len(n)), torch.tensor(n), sum(n))
    theta0 = problem.objective.initial()
    server = method.server_state(theta0, {}, problem.facts)
    client = method.client_state(theta0, problem)
    for round in range(1, rounds + 1):
        message = method.broadcast(server, clients)
        uplink, client = method.local_update(message, client, problem.at_round(round))
        assert uplink.keys() == {"theta"}
        server = method.aggregate(server, uplink, clients)
        scored = method.personal(method.broadcast(server, clients), client, problem)
        yield server["theta"].item(), scored.flatten().tolist()


def run(method, federation, model=None, **settings):
    return Trainer(method, federation, model or Logistic(), **settings).run()


def test_two_rounds_on_q0_and_q4(toy):
    # Round 1, everything at 1: Q(0) 1 -> 0.9 -> 0.9 - 0.1 (0.9 - 0.1) = 0.82;
    # Q(4) 1 -> 1.3 -> 1.3 - 0.1 (-2.7 + 0.3) = 1.54; theta as FedAvg's, (0.81 + 1.57) / 2 = 1.19.
    # Round 2, theta = 1.19 as received: 0.82 -> 0.775 -> 0.739 and 1.54 -> 1.751 -> 1.9198.
    first, second = play(Ditto(lambda_d=1.0), toy([0.0, 4.0]), [1, 1], 2)
    assert first[0] == pytest.approx(1.19, abs=1e-14)
    assert first[1] == pytest.approx([0.82, 1.54], abs=1e-14)
    # 2 + (1.19 - 2) 0.81
    assert second[0] == pytest.approx(1.3439, abs=1e-14)
    assert second[1] == pytest.approx([0.739, 1.9198], abs=1e-14)


@PROPERTY
@given(
    clients=st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 5)), min_size=1, max_size=4),
    pull=st.floats(0, 4),
    tau=st.integers(1, 6),
)
def test_rounds_are_the_closed_form(toy, clients, pull, tau):
    targets, counts = zip(*clients, strict=True)
    problem = toy([float(a) for a in targets], list(counts), local_steps=tau)
    theta, personal = 1.0, [1.0] * len(targets)
    mean = sum(a * n for a, n in clients) / sum(counts)
    for got_theta, got_personal in play(Ditto(lambda_d=pull), problem, counts, 3):
        aims = [(a + pull * theta) / (1 + pull) for a in targets]
        shrink = (1 - 0.1 * (1 + pull)) ** tau
        personal = [aim + (v - aim) * shrink for aim, v in zip(aims, personal, strict=True)]
        theta = mean + (theta - mean) * 0.9**tau
        assert got_theta == pytest.approx(theta, abs=1e-12)
        assert got_personal == pytest.approx(personal, abs=1e-12)


def test_only_the_rounds_clients_are_averaged():
    part = Cohort(torch.tensor([1, 3]), torch.tensor([1, 3]), 204)
    server = {"theta": torch.full((1,), 9.0, dtype=torch.float64)}
    assert Ditto().aggregate(server, {"theta": rows(0.0, 4.0)}, part)["theta"].tolist() == [3.0]


# Identities


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("model", [Logistic, network])
def test_without_a_pull_the_personal_models_are_locals_to_the_bit(make_federation, model):
    federation = make_federation([21, 60, 33, 20])
    with pytest.warns(UserWarning, match="lambda_d = 0"):
        ditto = run(Ditto(lambda_d=0), federation, model(), rounds=5, eta=0.2)
    local = run(Local(), federation, model(), rounds=5, eta=0.2)
    assert torch.equal(ditto.theta, local.theta)
    assert ditto.history.pooled().tolist() == local.history.pooled().tolist()


@pytest.mark.parametrize("pull", [0.1, 2.0])
@pytest.mark.parametrize("model", [Logistic, network])
def test_the_global_model_is_fedavgs_to_the_bit(make_federation, model, pull):
    federation = make_federation([21, 60, 33, 20])
    ditto = run(Ditto(lambda_d=pull), federation, model(), rounds=5, eta=0.2)
    average = run(FedAvg(), federation, model(), rounds=5, eta=0.2)
    assert torch.equal(ditto.server["theta"], average.server["theta"])
    # Scored apart from the personal models.
    for key, score in ditto.history.shared.items():
        assert score.pooled == average.history.last(*key).pooled
    assert not torch.equal(ditto.theta, average.theta)


def dropout():
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))


def test_with_dropout_the_global_model_is_fedavgs_to_the_bit(make_federation):
    federation = make_federation([21, 33])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = dropout()
    ditto = run(Ditto(), federation, module, rounds=3, eta=0.2)
    average = run(FedAvg(), federation, module, rounds=3, eta=0.2)
    assert torch.equal(ditto.server["theta"], average.server["theta"])


def test_with_dropout_and_no_pull_the_personal_models_are_locals_to_the_bit(make_federation):
    # v_k takes the steps of the round with the same batches as theta, and so the same draws.
    federation = make_federation([21, 33])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = dropout()
    with pytest.warns(UserWarning, match="lambda_d = 0"):
        ditto = run(Ditto(lambda_d=0), federation, module, rounds=3, eta=0.2)
    local = run(Local(), federation, module, rounds=3, eta=0.2)
    assert torch.equal(ditto.theta, local.theta)


def test_a_stronger_pull_keeps_personal_models_closer_to_the_global_one(make_federation):
    federation = make_federation([21, 60, 33, 20])
    gaps = []
    for pull in (0.01, 0.1, 1.0):
        result = run(Ditto(lambda_d=pull), federation, rounds=30, eta=0.2)
        gaps.append((result.theta - result.server["theta"]).norm().item())
    assert gaps[0] > gaps[1] > gaps[2] > 0


def test_personal_models_start_at_theta0_apart_in_memory(toy):
    problem = toy([0.0, 4.0])
    theta0 = problem.objective.initial()
    personal = Ditto().client_state(theta0, problem)["personal"]
    personal[0] = 5.0
    assert personal.flatten().tolist() == [5.0, 1.0]
    assert theta0.item() == 1.0


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "much", None, True])
def test_pull_out_of_range_is_refused(value):
    with pytest.raises(OptionError, match="Ditto: option lambda_d = "):
        Ditto(lambda_d=value)


def test_the_default_is_the_papers():
    assert Ditto().lambda_d == 0.1
