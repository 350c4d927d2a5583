"""pFedMe by hand, its rates, and what is scored."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtopo_torch.algorithms import Cohort, PFedMe
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
BY_HAND = {"lambda_p": 1.0, "inner_steps": 2, "inner_lr": 0.1, "outer_lr": 0.5}


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def cohort(*n):
    return Cohort(torch.arange(len(n)), torch.tensor(n), sum(n))


def updated(method, problem, *start):
    """(w_k, v_k) after one round from ``start``; the old personal models are far off."""
    old = {"personal": rows(*[99.0] * len(start))}
    uplink, client = method.local_update({"theta": rows(*start)}, old, problem)
    assert uplink.keys() == {"theta"}
    return uplink["theta"].flatten().tolist(), client["personal"].flatten().tolist()


# Fault 10


@pytest.mark.parametrize(("tau", "v", "w"), [(1, 0.82, 0.91), (2, 0.7462, 0.8281)])
def test_fault_10_local_rounds_on_q0(toy, tau, v, w):
    # v: 1 -> 0.9 -> 0.9 - 0.1 (0.9 - 0.1) = 0.82, w = 1 - 0.5 0.18 = 0.91; the second local round
    # starts from v = w = 0.91: 0.819 -> 0.819 - 0.1 (0.819 - 0.091) = 0.7462.
    ended, personal = updated(PFedMe(**BY_HAND), toy([0.0], local_steps=tau), 1.0)
    assert ended == pytest.approx([w], abs=1e-15)
    assert personal == pytest.approx([v], abs=1e-15)


def test_fault_10_two_clients_with_padding(toy):
    # Q(4) is Q(0) of 4 - w, three times as far: v = 4 - 3 0.7462, w = 4 - 3 0.8281.
    ended, personal = updated(PFedMe(**BY_HAND), toy([0.0, 4.0], counts=[1, 3]), 1.0, 1.0)
    assert ended == pytest.approx([0.8281, 1.5157], abs=1e-14)
    assert personal == pytest.approx([0.7462, 1.7614], abs=1e-14)


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 1.34380), (0.5, 1.17190), (0.0, 1.0)])
def test_fault_10_beta_is_how_far_the_server_goes_to_the_mean(toy, beta, expected):
    # 1/4 0.8281 + 3/4 1.5157 = 1.3438
    method = PFedMe(**BY_HAND, beta=beta)
    ended, _ = updated(method, toy([0.0, 4.0], counts=[1, 3]), 1.0, 1.0)
    server = {"theta": torch.ones(1, dtype=torch.float64)}
    after = method.aggregate(server, {"theta": rows(*ended)}, cohort(1, 3))
    assert after["theta"].item() == pytest.approx(expected, abs=1e-14)
    assert server["theta"].item() == 1.0


def test_fault_10_only_the_rounds_clients_are_averaged():
    part = Cohort(torch.tensor([1, 3]), torch.tensor([1, 3]), 204)
    server = {"theta": torch.full((1,), 9.0, dtype=torch.float64)}
    after = PFedMe(beta=0.5).aggregate(server, {"theta": rows(0.0, 4.0)}, part)
    assert after["theta"].tolist() == [6.0]


@PROPERTY
@given(
    strength=st.floats(0.1, 5),
    inner_steps=st.integers(1, 6),
    tau=st.integers(1, 4),
    a=st.floats(-10, 10),
    w=st.floats(-10, 10),
)
def test_local_rounds_are_the_closed_form(toy, strength, inner_steps, tau, a, w):
    method = PFedMe(lambda_p=strength, inner_steps=inner_steps, inner_lr=0.1, outer_lr=0.15)
    ended, personal = updated(method, toy([a], local_steps=tau), w)
    for _ in range(tau):
        proximal = (a + strength * w) / (1 + strength)
        v = proximal + (w - proximal) * (1 - 0.1 * (1 + strength)) ** inner_steps
        w = w - 0.15 * strength * (w - v)
    assert ended == pytest.approx([w], abs=1e-11)
    assert personal == pytest.approx([v], abs=1e-11)


def test_many_inner_steps_reach_the_proximal_point(toy):
    # Minimiser of v^2 / 2 + (v - 1)^2 / 2
    method = PFedMe(lambda_p=1.0, inner_steps=400, inner_lr=0.1, outer_lr=0.5)
    assert updated(method, toy([0.0], local_steps=1), 1.0)[1] == pytest.approx([0.5], abs=1e-14)


# Rates by default


def test_default_rates_depend_on_the_runs_step_size(toy):
    one = PFedMe(inner_steps=1)
    assert one.lambda_p == 15
    # inner 1 / (10 + 15) = 0.04; outer min(0.1, 1/15) = 1/15, so w goes all the way to v
    ended, personal = updated(one, toy([0.0], local_steps=1), 1.0)
    assert personal == pytest.approx([0.96], abs=1e-15)
    assert ended == pytest.approx([0.96], abs=1e-15)
    # inner 1 / (100 + 15), outer 0.01: w = 1 - 0.15 / 115
    ended, personal = updated(one, toy([0.0], local_steps=1, eta=0.01), 1.0)
    assert personal == pytest.approx([114 / 115], abs=1e-15)
    assert ended == pytest.approx([1 - 0.15 / 115], abs=1e-15)


def test_one_rate_given_leaves_the_other_at_its_default(toy):
    problem = toy([0.0], local_steps=1)
    ended, personal = updated(PFedMe(inner_steps=1, inner_lr=0.5), problem, 1.0)
    assert (ended, personal) == ([0.5], [0.5])
    ended, personal = updated(PFedMe(inner_steps=1, outer_lr=1 / 30), problem, 1.0)
    assert personal == pytest.approx([0.96], abs=1e-15)
    assert ended == pytest.approx([0.98], abs=1e-15)


def test_default_rates_stay_stable_at_any_step_size(make_federation):
    # inner_lr < 1 / lambda_p and outer_lr <= 1 / lambda_p: eta = 1e6 does no harm here.
    federation = make_federation([21, 60])
    result = Trainer(PFedMe(), federation, Logistic(), eta=1e6, rounds=20).run()
    assert result.history.pooled("train")[-1] < 0.7


# What is scored


def test_fault_11_kind_the_scored_model_is_v_not_w(toy):
    problem, method = toy([0.0]), PFedMe(**BY_HAND)
    message = {"theta": rows(1.0)}
    _, client = method.local_update(message, {"personal": rows(1.0)}, problem)
    assert method.personal(message, client, problem).item() == pytest.approx(0.7462, abs=1e-15)


def test_fault_05_kind_scored_rows_share_no_storage_with_w(toy):
    # At outer_lr lambda_p = 1, w_k equals v_k in value.
    problem = toy([0.0, 4.0])
    method = PFedMe(lambda_p=1.0, inner_lr=0.1, outer_lr=1.0)
    message = {"theta": rows(1.0, 1.0)}
    uplink, client = method.local_update(message, {"personal": rows(1.0, 1.0)}, problem)
    assert torch.equal(uplink["theta"], client["personal"])
    server = method.aggregate({"theta": rows(1.0)[0]}, uplink, cohort(1, 1))
    kept = [uplink["theta"].clone(), server["theta"].clone()]
    method.personal(message, client, problem).add_(100)
    assert torch.equal(uplink["theta"], kept[0])
    assert torch.equal(server["theta"], kept[1])
    assert message["theta"].flatten().tolist() == [1.0, 1.0]


def test_fault_05_kind_a_runs_models_share_no_storage(make_federation):
    result = Trainer(PFedMe(), make_federation([20, 30]), Logistic(), rounds=2).run()
    before = result.server["theta"].clone()
    assert result.theta.data_ptr() != result.server["theta"].data_ptr()
    result.theta.add_(100)
    assert torch.equal(result.server["theta"], before)


def test_personal_models_start_at_theta0_apart_in_memory(toy):
    problem = toy([0.0, 4.0])
    theta0 = problem.objective.initial()
    personal = PFedMe().client_state(theta0, problem)["personal"]
    assert personal.flatten().tolist() == [1.0, 1.0]
    personal[0] = 5.0
    assert personal[1].item() == 1.0
    assert theta0.item() == 1.0


def test_the_shared_model_is_scored_beside_the_personal_ones(make_federation):
    result = Trainer(PFedMe(), make_federation([20, 30]), Logistic(), rounds=5).run()
    shared = result.history.shared["test", "log_loss"].pooled
    rows_of_w = result.server["theta"].expand(2, -1)
    x = [result.federation.test.client(k) for k in range(2)]
    logits = torch.cat([f @ w[:-1] + w[-1] for (f, _), w in zip(x, rows_of_w, strict=True)])
    labels = torch.cat([y for _, y in x])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    assert shared == pytest.approx(expected.item(), abs=1e-12)
    assert abs(shared - result.history.last().pooled) > 1e-3


# Options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lambda_p", v) for v in (0, -1, float("nan"), float("inf"), "strong", None)),
        *(("inner_steps", v) for v in (0, -1, 1.5, None, True)),
        *(("inner_lr", v) for v in (0, -0.1, float("nan"))),
        *(("outer_lr", v) for v in (0, -0.1, float("inf"))),
        *(("beta", v) for v in (-0.1, float("nan"), None)),
    ],
)
def test_options_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(OptionError, match=f"PFedMe: option {name} = "):
        PFedMe(**{name: value})


def test_beta_zero_is_warned_about_and_leaves_w_at_its_start(make_federation):
    federation = make_federation([20, 30])
    with pytest.warns(UserWarning, match="beta = 0"):
        result = Trainer(PFedMe(beta=0), federation, Logistic(), rounds=3).run()
    assert result.server["theta"].tolist() == [0.0] * 4
    assert bool((result.theta != 0).any())
