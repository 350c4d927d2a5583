"""SCAFFOLD by hand, its invariants, and the point it converges to."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from torch import nn

from fedtopo_torch.algorithms import Cohort, FedAvg, Scaffold
from fedtopo_torch.local import LocalProblem
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


def cohort(*n, index=None, total=None):
    index = torch.arange(len(n)) if index is None else torch.tensor(index)
    return Cohort(index, torch.tensor(n), sum(n) if total is None else total)


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def play(method, problem, clients, rounds):
    """Server and client states after 1, 2, ... rounds of full participation."""
    theta0 = problem.objective.initial()
    server = method.server_state(theta0, {}, problem.facts)
    client = method.client_state(theta0, problem)
    for round in range(1, rounds + 1):
        message = method.broadcast(server, clients)
        uplink, client = method.local_update(message, client, problem.at_round(round))
        server = method.aggregate(server, uplink, clients)
        yield server, client


def run(method, federation, **settings):
    return Trainer(method, federation, Logistic(), **settings).run()


# Fault 6: two rounds by hand


def test_fault_06_two_rounds_on_q0_and_q4(toy):
    first, second = play(Scaffold(), toy([0.0, 4.0]), cohort(1, 1), 2)
    for (server, client), w, c, controls in (
        (first, 1.19, -0.95, [0.95, -2.85]),
        (second, 1.3439, -0.7695, [1.2255, -2.7645]),
    ):
        assert server["theta"].item() == pytest.approx(w, abs=1e-14)
        assert server["control"].item() == pytest.approx(c, abs=1e-14)
        assert client["control"].flatten().tolist() == pytest.approx(controls, abs=1e-14)


def test_fault_06_unequal_records_and_a_server_step(toy):
    # Round 1 as above but for the weights 1/4, 3/4 and half a server step:
    # w = 1 + (0.25 (-0.19) + 0.75 0.57) / 2 = 1.19; c = 0.25 0.95 - 0.75 2.85 = -1.9.
    steps = play(Scaffold(eta_g=0.5), toy([0.0, 4.0], counts=[1, 3]), cohort(1, 3), 1)
    server, client = next(steps)
    assert server["theta"].item() == pytest.approx(1.19, abs=1e-14)
    assert server["control"].item() == pytest.approx(-1.9, abs=1e-14)
    assert client["control"].flatten().tolist() == pytest.approx([0.95, -2.85], abs=1e-14)


def test_fault_06_controls_start_at_zero(toy):
    problem = toy([0.0, 4.0])
    theta0 = problem.objective.initial()
    server = Scaffold().server_state(theta0, {}, problem.facts)
    assert server["control"].tolist() == [0.0]
    assert Scaffold().client_state(theta0, problem)["control"].tolist() == [[0.0], [0.0]]


@PROPERTY
@given(
    clients=st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 5)), min_size=1, max_size=5),
    tau=st.integers(1, 4),
    rounds=st.integers(1, 4),
)
def test_rounds_in_exact_fractions(toy, clients, tau, rounds):
    targets, counts = zip(*clients, strict=True)
    problem = toy([float(a) for a in targets], list(counts), local_steps=tau)
    *_, (server, client) = play(Scaffold(), problem, cohort(*counts), rounds)

    eta, p = Fraction(1, 10), [Fraction(n, sum(counts)) for n in counts]
    w, c, controls = Fraction(1), Fraction(0), [Fraction(0)] * len(p)
    for _ in range(rounds):
        ends = []
        for a, own in zip(targets, controls, strict=True):
            v = w
            for _ in range(tau):
                v -= eta * (v - a + c - own)
            ends.append(v)
        new = [own - c + (w - v) / (tau * eta) for own, v in zip(controls, ends, strict=True)]
        c += sum(q * (b - a) for q, a, b in zip(p, controls, new, strict=True))
        w += sum(q * (v - w) for q, v in zip(p, ends, strict=True))
        controls = new
    assert server["theta"].item() == pytest.approx(float(w), abs=1e-10)
    assert server["control"].item() == pytest.approx(float(c), abs=1e-10)
    assert client["control"].flatten().tolist() == pytest.approx(list(map(float, controls)))
    mean = cohort(*counts).mean(client["control"])
    assert mean.item() == pytest.approx(server["control"].item(), abs=1e-11)


def test_the_mean_of_the_controls_stays_the_servers_on_real_data(make_federation):
    federation = make_federation([21, 60, 33, 20, 47])
    trainer = Trainer(Scaffold(), federation, Logistic())
    (data,) = trainer.objective.data(federation.train)
    facts = run(Scaffold(), federation, rounds=1).facts
    problem = LocalProblem(trainer.objective, data, facts=facts)
    everyone = cohort(21, 60, 33, 20, 47)
    for server, client in play(Scaffold(), problem, everyone, 20):
        gap = everyone.mean(client["control"]) - server["control"]
        assert gap.abs().max().item() < 1e-12
    assert client["control"].abs().max().item() > 0.01


# Fault 7: steps, not rounds or epochs


def test_fault_07_a_control_divides_by_the_steps_taken(toy):
    # Three equal records, four full-batch steps: w = 0.9^4, c' = (1 - 0.6561) / (4 0.1).
    server, client = next(play(Scaffold(), toy([0.0], counts=[3], local_steps=4), cohort(3), 1))
    assert server["theta"].item() == pytest.approx(0.6561, abs=1e-15)
    assert client["control"].item() == pytest.approx(0.85975, abs=1e-15)


class Uneven(LocalProblem):
    """Client 0 stops after two steps, client 1 goes on to four; the facts still say tau = 9."""

    @property
    def steps(self):
        return torch.tensor([2, 4])

    def descend(self, theta, correction=None, steps=None, lr=None):
        two = super().descend(theta, correction, 2, lr)
        four = super().descend(two, correction, 2, lr)
        return torch.stack([two[0], four[1]])


def test_fault_07_steps_are_counted_for_each_client(toy):
    plain = toy([0.0, 0.0], local_steps=9)
    problem = Uneven(plain.objective, plain.data, facts=plain.facts)
    message = {"theta": rows(1.0, 1.0), "control": rows(0.0, 0.0)}
    uplink, client = Scaffold().local_update(message, {"control": rows(0.0, 0.0)}, problem)
    assert uplink["theta"].flatten().tolist() == pytest.approx([0.81, 0.6561], abs=1e-15)
    # 0.19 / 0.2 and 0.3439 / 0.4
    assert client["control"].flatten().tolist() == pytest.approx([0.95, 0.85975], abs=1e-15)


def test_fault_07_the_step_size_is_the_runs(toy):
    # 1 -> 0.5 -> 0.25: c' = 0.75 / (2 0.5)
    _, client = next(play(Scaffold(), toy([0.0], eta=0.5), cohort(1), 1))
    assert client["control"].item() == pytest.approx(0.75, abs=1e-15)


# Fault 8: frozen parameters


def test_fault_08_a_frozen_layer_has_no_control_and_does_not_move(make_federation):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    module[0].requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    federation = make_federation([20, 30])
    result = Trainer(Scaffold(), federation, module, rounds=3, eta=0.1).run()
    # The trainable layer alone: 4 weights and a bias.
    assert result.server["control"].shape == (5,)
    assert result.communication.round == {"up": (10, 0), "down": (10, 0)}
    for state in result.state_dicts().values():
        assert torch.equal(state["0.weight"], before["0.weight"])
        assert torch.equal(state["0.bias"], before["0.bias"])
        assert not torch.equal(state["2.weight"], before["2.weight"])


# Some clients of all


def test_a_part_of_the_clients_moves_the_control_by_their_share_of_all():
    # Records 1, 3 and 4; the first two come, with models 0.81, 1.57 and changes 0.95, -2.85.
    part = cohort(1, 3, index=[0, 1], total=8)
    server = {"theta": rows(1.0)[0], "control": rows(0.5)[0]}
    uplink = {"theta": rows(0.81, 1.57), "control": rows(0.95, -2.85)}
    after = Scaffold().aggregate(server, uplink, part)
    # theta = 1/4 0.81 + 3/4 1.57; c = 0.5 + 1/8 0.95 - 3/8 2.85
    assert after["theta"].item() == pytest.approx(1.38, abs=1e-15)
    assert after["control"].item() == pytest.approx(0.5 - 0.95, abs=1e-15)
    assert server["theta"].item() == 1.0
    assert server["control"].item() == 0.5


# Where it is FedAvg


def test_round_1_is_fedavgs_to_the_bit(make_federation):
    # All controls are still zero, and a linear model starts at zero.
    federation = make_federation([21, 60, 33, 20])
    assert torch.equal(
        run(Scaffold(), federation, rounds=1).theta, run(FedAvg(), federation, rounds=1).theta
    )
    second = [run(m, federation, rounds=2).theta for m in (Scaffold(), FedAvg())]
    assert (second[0] - second[1]).abs().max() > 1e-4


def test_one_local_step_is_fedavg_in_every_round(make_federation):
    # sum p_k (g_k + c - c_k) = sum p_k g_k, because the mean of the c_k is c.
    federation = make_federation([21, 60, 33, 20])
    controlled, average = (
        run(m, federation, rounds=30, local_steps=1).theta for m in (Scaffold(), FedAvg())
    )
    assert torch.allclose(controlled, average, rtol=0, atol=1e-12)


def test_a_single_client_is_fedavg(make_federation):
    federation = make_federation([40])
    controlled, average = (run(m, federation, rounds=30).theta for m in (Scaffold(), FedAvg()))
    assert torch.allclose(controlled, average, rtol=0, atol=1e-12)


# What it is for


def test_it_converges_to_the_pooled_optimum_where_fedavg_drifts(make_federation):
    federation = make_federation([21, 60, 33, 20, 47])
    x, y = zip(*(federation.train.client(k) for k in range(5)), strict=True)
    x, y = torch.cat(x).numpy(), torch.cat(y).numpy()
    design = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    # scikit-learn minimises C sum of losses + |w|^2 / 2; our bias is penalised like a weight.
    optimum = LogisticRegression(
        C=1 / (0.1 * len(x)), fit_intercept=False, tol=1e-12, max_iter=10_000
    ).fit(design, y)
    optimum = optimum.coef_[0]
    long = {"rounds": 800, "local_steps": 10, "l2": 0.1, "eval_every": 800}
    controlled = run(Scaffold(), federation, **long).server["theta"].numpy()
    assert np.abs(controlled - optimum).max() < 1e-6
    average = run(FedAvg(), federation, **long).server["theta"].numpy()
    assert np.abs(average - optimum).max() > 1e-3


def test_half_a_server_step_converges_to_the_same_point(make_federation):
    federation = make_federation([21, 60, 33])
    settings = {"rounds": 1500, "l2": 0.1, "eval_every": 1500}
    whole, half = (run(Scaffold(eta_g=g), federation, **settings).theta for g in (1.0, 0.5))
    assert torch.allclose(whole, half, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "fast", None, True])
def test_server_step_out_of_range_is_refused(value):
    with pytest.raises(OptionError, match="Scaffold: option eta_g = "):
        Scaffold(eta_g=value)
