"""FedProx by hand, against its closed form on quadratics, and where it is FedAvg."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtopo_torch.algorithms import Cohort, FedAvg, FedProx
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


def start_at(*values):
    return {"theta": torch.tensor(values, dtype=torch.float64)[:, None]}


def descended(problem, mu, *start):
    uplink, client = FedProx(mu=mu).local_update(start_at(*start), {}, problem)
    assert client == {}
    return uplink["theta"].flatten().tolist()


def run(method, federation, **settings):
    return Trainer(method, federation, Logistic(), **settings).run()


# Fault 9


def test_fault_09_two_steps_on_q0(toy):
    # 1 -> 0.9 -> 0.9 - 0.1 (0.9 + (0.9 - 1)) = 0.82
    assert descended(toy([0.0]), 1.0, 1.0) == pytest.approx([0.82], abs=1e-15)
    assert descended(toy([0.0]), 0.0, 1.0) == pytest.approx([0.81], abs=1e-15)


def test_fault_09_one_step_on_q5_has_no_pull_yet(toy):
    assert descended(toy([5.0], local_steps=1), 1.0, 1.0) == pytest.approx([1.4], abs=1e-15)


def test_fault_09_the_pull_is_towards_each_rounds_own_start(toy):
    # Round 1 ends at 0.82; round 2: 0.82 -> 0.738 -> 0.738 - 0.1 (0.738 - 0.082) = 0.6724.
    # A pull that still aims at 1 would give 0.7 at the second round's first step already.
    problem, server = toy([0.0]), {"theta": torch.ones(1, dtype=torch.float64)}
    method, everyone = FedProx(mu=1.0), Cohort(torch.arange(1), torch.tensor([1]), 1)
    for expected in (0.82, 0.6724):
        uplink, _ = method.local_update(method.broadcast(server, everyone), {}, problem)
        server = method.aggregate(server, uplink, everyone)
        assert server["theta"].item() == pytest.approx(expected, abs=1e-15)


def test_fault_09_every_client_is_pulled_to_what_it_received(toy):
    # Q(5) from 1: 1.4 -> 1.4 - 0.1 (-3.6 + 0.4) = 1.72
    assert descended(toy([0.0, 5.0]), 1.0, 1.0, 1.0) == pytest.approx([0.82, 1.72], abs=1e-15)
    # From 2, Q(0): 1.8 -> 1.8 - 0.1 (1.8 - 0.2) = 1.64
    assert descended(toy([0.0, 5.0]), 1.0, 2.0, 1.0) == pytest.approx([1.64, 1.72], abs=1e-15)


@PROPERTY
@given(
    mu=st.floats(0, 5),
    tau=st.integers(1, 12),
    w=st.floats(-10, 10),
    a=st.floats(-10, 10),
)
def test_descent_is_the_closed_form(toy, mu, tau, w, a):
    # Fixed point (a + mu w) / (1 + mu), approached by a factor 1 - 0.1 (1 + mu) a step.
    target = (a + mu * w) / (1 + mu)
    expected = target + (w - target) * (1 - 0.1 * (1 + mu)) ** tau
    assert descended(toy([a], local_steps=tau), mu, w) == pytest.approx([expected], abs=1e-12)


# Where it is FedAvg


def test_fault_09_mu_zero_is_fedavg_to_the_bit(make_federation):
    federation = make_federation([21, 60, 33, 20])
    with pytest.warns(UserWarning, match="mu = 0: FedProx is FedAvg"):
        prox = run(FedProx(mu=0), federation, rounds=5)
    average = run(FedAvg(), federation, rounds=5)
    assert torch.equal(prox.theta, average.theta)
    assert torch.equal(prox.server["theta"], average.server["theta"])
    assert list(prox.history.rows()) == list(average.history.rows())


def test_one_local_step_is_fedavg_whatever_mu(make_federation):
    federation = make_federation([21, 60, 33, 20])
    prox = run(FedProx(mu=3), federation, rounds=5, local_steps=1)
    average = run(FedAvg(), federation, rounds=5, local_steps=1)
    assert torch.equal(prox.theta, average.theta)


def test_a_larger_mu_keeps_clients_closer_to_their_start(make_federation):
    # The mean moves less in one round, in every client's data alike.
    federation = make_federation([21, 60, 33, 20])
    moved = [
        run(FedProx(mu=mu), federation, rounds=1, eta=0.1).server["theta"].norm().item()
        for mu in (0.1, 1.0, 5.0)
    ]
    assert moved[0] > moved[1] > moved[2] > 0


def test_only_the_rounds_clients_are_averaged():
    part = Cohort(torch.tensor([1, 3]), torch.tensor([1, 3]), 204)
    server = {"theta": torch.full((1,), 9.0, dtype=torch.float64)}
    assert FedProx().aggregate(server, start_at(0.0, 4.0), part)["theta"].tolist() == [3.0]


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "much", None, True])
def test_mu_out_of_range_is_refused(value):
    with pytest.raises(OptionError, match="FedProx: option mu = "):
        FedProx(mu=value)


def test_the_default_is_the_papers():
    assert FedProx().mu == 0.1
