"""Weighted means, FedAvg and Local on problems that can be worked out by hand."""

from itertools import permutations

import pytest
import torch

from fedtopo_torch.algorithms import Cohort, FedAvg, Local


def rows(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)[:, None]


def cohort(*n, index=None, total=None):
    index = torch.arange(len(n)) if index is None else torch.tensor(index)
    return Cohort(index, torch.tensor(n), sum(n) if total is None else total)


def averaged(clients, *values, dtype=torch.float64):
    before = {"theta": torch.full((1,), 9.0, dtype=dtype)}
    return FedAvg().aggregate(before, {"theta": rows(*values, dtype=dtype)}, clients)["theta"]


# Fault 1: sample weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fault_01_mean_is_weighted_by_records(dtype):
    theta = averaged(cohort(1, 3), 0.0, 4.0, dtype=dtype)
    assert theta.dtype == dtype
    assert theta.tolist() == [3.0]


def test_fault_01_only_the_rounds_clients_count():
    # Two clients of 100 records each stay away this round.
    part = cohort(1, 3, index=[1, 3], total=204)
    assert averaged(part, 0.0, 4.0).tolist() == [3.0]
    assert part.weights.tolist() == [0.25, 0.75]
    assert part.shares.tolist() == [1 / 204, 3 / 204]


def test_fault_01_equal_records_give_the_plain_mean():
    assert averaged(cohort(7, 7), 0.0, 4.0).tolist() == [2.0]


def test_fault_01_one_client_keeps_its_model():
    assert averaged(cohort(5), 1.25).tolist() == [1.25]


def test_fault_01_weights_are_computed_in_float64_for_float32_models():
    # 2**24 + 1 is not a float32; as a float64 weight it is exact.
    n = 2**24 + 1
    weights = cohort(n, n).weights
    assert weights.dtype == torch.float64
    assert weights.tolist() == [0.5, 0.5]
    assert averaged(cohort(n, n), 1.0, 3.0, dtype=torch.float32).tolist() == [2.0]


def test_fault_01_no_order_of_the_clients_changes_the_mean():
    # Weights 1/8, 1/8, 2/8, 4/8: exact, so equality is to the bit. 1/8 (0 + 8) + 2/8 4 + 4/8 16.
    pairs = [(1, 0.0), (1, 8.0), (2, 4.0), (4, 16.0)]
    for order in permutations(pairs):
        n, values = zip(*order, strict=True)
        assert averaged(cohort(*n), *values).tolist() == [10.0]


def test_mean_keeps_the_shape_of_a_row():
    values = torch.arange(12, dtype=torch.float64).reshape(2, 2, 3)
    # 1/4 first + 3/4 second, second = first + 6
    assert torch.equal(cohort(1, 3).mean(values), values[0] + 4.5)
    assert cohort(1, 3).mean(torch.tensor([0.0, 4.0])).tolist() == 3.0


def test_fault_04_kind_whole_numbers_are_not_averaged_to_zero():
    counts = torch.tensor([[3], [5]])
    try:
        mean = cohort(1, 1).mean(counts)
    except (TypeError, ValueError):
        return  # refusing is right too
    assert mean.tolist() == [4]


# Fault 2: accumulators


def test_fault_02_nothing_is_added_up_over_rounds():
    algorithm, clients = FedAvg(), cohort(1, 2, 3)
    server = {"theta": torch.zeros(1, dtype=torch.float64)}
    for _ in range(3):
        server = algorithm.aggregate(server, {"theta": rows(2.0, 2.0, 2.0)}, clients)
        assert server["theta"].item() == pytest.approx(2.0, abs=1e-15)


@pytest.mark.parametrize("values", sorted(set(permutations((6.0, 0.0, 0.0)))))
def test_fault_02_the_mean_is_over_all_clients_in_any_order(values):
    assert averaged(cohort(5, 5, 5), *values).item() == pytest.approx(2.0, abs=1e-15)


def test_fault_02_aggregation_does_not_change_what_it_was_given():
    server = {"theta": torch.full((1,), 9.0, dtype=torch.float64)}
    uplink = {"theta": rows(0.0, 4.0)}
    after = FedAvg().aggregate(server, uplink, cohort(1, 3))
    after["theta"].add_(100)
    assert server["theta"].tolist() == [9.0]
    assert uplink["theta"].flatten().tolist() == [0.0, 4.0]


# Fault 3: nobody has a record


@pytest.mark.parametrize("n", [(0, 0), (0,), ()])
def test_fault_03_no_record_at_all_is_an_error_and_the_model_stays(n):
    server = {"theta": torch.full((1,), 9.0, dtype=torch.float64)}
    uplink = {"theta": torch.zeros(len(n), 1, dtype=torch.float64)}
    clients = Cohort(torch.arange(len(n)), torch.tensor(n, dtype=torch.int64), 0)
    with pytest.raises(ValueError, match=r"no|none"):
        FedAvg().aggregate(server, uplink, clients)
    assert server["theta"].tolist() == [9.0]


def test_fault_03_a_client_without_records_has_no_weight():
    assert averaged(cohort(0, 2), 100.0, 4.0).tolist() == [4.0]


# A round of FedAvg and of Local on Q(0) and Q(4): w = a + (1 - a) 0.9^steps


def test_fedavg_round_on_the_toy_problem(toy):
    problem = toy([0.0, 4.0])
    server = {"theta": torch.ones(1, dtype=torch.float64)}
    algorithm, clients = FedAvg(), cohort(1, 1)
    uplink, _ = algorithm.local_update(algorithm.broadcast(server, clients), {}, problem)
    assert uplink["theta"].flatten().tolist() == pytest.approx([0.81, 1.57], abs=1e-15)
    server = algorithm.aggregate(server, uplink, clients)
    assert server["theta"].item() == pytest.approx(1.19, abs=1e-15)


def test_fedavg_round_with_unequal_records_and_padding(toy):
    # The second client has three records; padding must not dilute the first's gradient.
    problem = toy([0.0, 4.0], counts=[1, 3])
    server = {"theta": torch.ones(1, dtype=torch.float64)}
    algorithm, clients = FedAvg(), cohort(1, 3)
    uplink, _ = algorithm.local_update(algorithm.broadcast(server, clients), {}, problem)
    assert uplink["theta"].flatten().tolist() == pytest.approx([0.81, 1.57], abs=1e-15)
    theta = algorithm.aggregate(server, uplink, clients)["theta"].item()
    assert theta == pytest.approx(0.25 * 0.81 + 0.75 * 1.57, abs=1e-15)


def test_local_goes_on_from_its_own_model_and_sends_nothing(toy):
    problem, algorithm = toy([0.0, 4.0]), Local()
    theta0 = problem.objective.initial()
    client = algorithm.client_state(theta0, problem)
    for rounds in (1, 2, 3):
        uplink, client = algorithm.local_update({}, client, problem)
        assert uplink == {}
        decay = 0.9 ** (2 * rounds)
        expected = [decay, 4 - 3 * decay]
        assert algorithm.personal({}, client, problem).flatten().tolist() == pytest.approx(
            expected, abs=1e-14
        )
    assert theta0.tolist() == [1.0]


def test_a_correction_is_added_to_the_gradient(toy):
    class Pulled(FedAvg):
        """Adds 1 to the gradient: Q(a) becomes Q(a - 1)."""

        def correction(self, theta, message, client):
            return torch.ones_like(theta)

    problem = toy([1.0, 5.0])
    message = {"theta": torch.ones(2, 1, dtype=torch.float64)}
    uplink, _ = Pulled().local_update(message, {}, problem)
    assert uplink["theta"].flatten().tolist() == pytest.approx([0.81, 1.57], abs=1e-15)
