"""Clustered training with blending, by hand."""

from itertools import permutations

import pytest
import torch

from fedtopo_torch.algorithms import Clustered, Cohort
from fedtopo_torch.options import OptionError


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def cohort(n, index=None):
    """The clients ``index`` of a federation with ``n`` records each; all by default."""
    n = torch.tensor(n)
    index = torch.arange(len(n)) if index is None else torch.tensor(index)
    return Cohort(index, n[index], int(n.sum()))


@pytest.fixture
def start(make_facts):
    """``(labels, n, options) -> (algorithm, server state)``, all models at 9."""

    def make(labels, n, facts=None, **options):
        algorithm = Clustered(labels=labels, **options)
        names = tuple(f"c{k}" for k in range(len(n)))
        told = make_facts(n=torch.tensor(n), names=names, **(facts or {}))
        return algorithm, algorithm.server_state(rows(9.0)[0], {}, told)

    return make


def test_every_number_of_one_round(start):
    # u = (1/4 0 + 3/4 4, 8) = (3, 8); omega = (1/2, 1/2); blend = 5.5, half of it taken.
    algorithm, server = start((0, 0, 1), [1, 3, 4], alpha=0.5)
    assert server["omega"].tolist() == [0.5, 0.5]
    server = algorithm.aggregate(server, {"theta": rows(0.0, 4.0, 8.0)}, cohort([1, 3, 4]))
    assert server["u"].flatten().tolist() == [3.0, 8.0]
    assert server["theta"].flatten().tolist() == [4.25, 6.75]
    sent = algorithm.broadcast(server, cohort([1, 3, 4]))["theta"]
    assert sent.flatten().tolist() == [4.25, 4.25, 6.75]


@pytest.mark.parametrize(
    ("alpha", "expected"), [(0.0, [3.0, 8.0]), (1.0, [5.5, 5.5])], ids=["apart", "equal"]
)
def test_blending_at_its_ends(start, alpha, expected):
    for options in ({"alpha": alpha}, {"abar": alpha}):
        algorithm, server = start((0, 0, 1), [1, 3, 4], {"l2": 0.5}, **options)
        server = algorithm.aggregate(server, {"theta": rows(0.0, 4.0, 8.0)}, cohort([1, 3, 4]))
        assert server["theta"].flatten().tolist() == expected


def test_alpha_is_calibrated_from_abar(start):
    # q = (1 - 0.1 0.5)^2 = 0.9025; alpha = 0.3 0.0975 / (1 - 0.3 0.9025)
    _, server = start((0, 1), [1, 1], {"l2": 0.5})
    assert server["alpha"].item() == pytest.approx(0.02925 / 0.72925, abs=1e-15)
    _, server = start((0, 1), [1, 1], {"l2": 0.5}, alpha=0.25)
    assert server["alpha"].item() == 0.25


def test_effective_blending_at_the_fixed_point_is_abar(toy, make_facts):
    # F_k(w) = mu/2 w^2 - a_k w has curvature mu only, so the calibration is exact: of the distance
    # (6 - 2) / mu between the optima the fixed point keeps the fraction 1 - abar.
    mu = 0.5
    problem = toy([2.0, 6.0], l2=mu, record_loss=lambda out, labels: -labels * out)
    algorithm, clients = Clustered(labels=(0, 1), abar=0.3), cohort([1, 1])
    facts = make_facts(l2=mu, n=torch.tensor([1, 1]), names=("c0", "c1"))
    server = algorithm.server_state(problem.objective.initial(), {}, facts)
    for _ in range(600):
        uplink, _ = algorithm.local_update(algorithm.broadcast(server, clients), {}, problem)
        server = algorithm.aggregate(server, uplink, clients)
    low, high = server["theta"].flatten().tolist()
    assert high - low == pytest.approx(0.7 * 4 / mu, abs=1e-10)
    assert (low + high) / 2 == pytest.approx(4 / mu, abs=1e-10)


# Faults 1 to 3 in every cluster


def test_fault_01_weights_hold_within_each_cluster_of_a_partial_cohort(start):
    n = [1, 3, 100, 100, 2]
    algorithm, server = start((0, 0, 0, 1, 1), n, alpha=0.0)
    # Of cluster 0 the clients with 1 and 3 records come, of cluster 1 the one with 2.
    server = algorithm.aggregate(server, {"theta": rows(0.0, 4.0, 7.0)}, cohort(n, [0, 1, 4]))
    assert server["theta"].flatten().tolist() == [3.0, 7.0]


def test_fault_01_cluster_masses_are_over_all_clients_even_when_some_stay_away(start):
    n = [1, 3, 12]
    algorithm, server = start((0, 0, 1), n, alpha=1.0)
    server = algorithm.aggregate(server, {"theta": rows(4.0, 8.0)}, cohort(n, [1, 2]))
    # omega = (4/16, 12/16): 1/4 4 + 3/4 8
    assert server["theta"].flatten().tolist() == [7.0, 7.0]


def test_fault_03_a_cluster_nobody_took_part_in_keeps_its_u(start):
    n = [1, 3, 4]
    algorithm, server = start((0, 0, 1), n, alpha=0.5)
    server = algorithm.aggregate(server, {"theta": rows(0.0, 4.0, 8.0)}, cohort(n))
    server = algorithm.aggregate(server, {"theta": rows(2.0, 2.0)}, cohort(n, [0, 1]))
    assert server["u"].flatten().tolist() == [2.0, 8.0]
    # blend = 1/2 2 + 1/2 8 = 5
    assert server["theta"].flatten().tolist() == [3.5, 6.5]


def test_fault_03_clients_without_records_leave_their_cluster_as_it_was(start):
    n = [0, 4]
    algorithm, server = start((0, 1), n, alpha=0.0)
    server = algorithm.aggregate(server, {"theta": rows(5.0, 2.0)}, cohort(n))
    assert server["theta"].flatten().tolist() == [9.0, 2.0]
    assert server["omega"].tolist() == [0.0, 1.0]


def test_fault_02_nothing_is_added_up_over_rounds(start):
    algorithm, server = start((0, 0, 1), [1, 3, 4], alpha=0.5)
    for _ in range(3):
        server = algorithm.aggregate(server, {"theta": rows(2.0, 2.0, 2.0)}, cohort([1, 3, 4]))
        assert server["theta"].flatten().tolist() == pytest.approx([2.0, 2.0], abs=1e-15)


def test_fault_02_the_order_of_the_clients_does_not_matter(start):
    members = [(0, 1, 0.0), (0, 3, 4.0), (1, 4, 8.0), (1, 8, 2.0)]
    # u = (3, 4), omega = (4/16, 12/16), blend = 3.75: exact in binary
    for order in permutations(members):
        labels, n, values = zip(*order, strict=True)
        algorithm, server = start(labels, list(n), alpha=0.5)
        server = algorithm.aggregate(server, {"theta": rows(*values)}, cohort(list(n)))
        assert server["theta"].flatten().tolist() == [3.375, 3.875]


def test_float32_models_stay_float32(start):
    algorithm, server = start((0, 0, 1), [1, 3, 4], alpha=0.5)
    server = {**server, "u": server["u"].float(), "theta": server["theta"].float()}
    uplink = {"theta": rows(0.0, 4.0, 8.0).float()}
    after = algorithm.aggregate(server, uplink, cohort([1, 3, 4]))["theta"]
    assert after.dtype == torch.float32
    assert after.flatten().tolist() == [4.25, 6.75]


def test_models_start_apart_in_memory(start):
    _, server = start((0, 1), [1, 1])
    server["theta"][0] = 1.0
    assert server["theta"][1].item() == 9.0


# Labels


def test_labels_may_be_any_numbers_and_text(start):
    for labels in ((7, 3, 7), "7,3,7"):
        _, server = start(labels, [1, 1, 1])
        assert server["labels"].tolist() == [1, 0, 1]
        assert len(server["theta"]) == 2


def test_no_labels_is_one_cluster(start):
    _, server = start((), [1, 1, 1])
    assert server["labels"].tolist() == [0, 0, 0]
    assert server["omega"].tolist() == [1.0]


def test_labels_of_another_length_are_refused_with_both_numbers(start):
    with pytest.raises(OptionError, match=r"2 entries for 3 clients.*c0, c1, c2"):
        start((0, 1), [1, 1, 1])


def test_report_tells_clusters_weights_and_alpha(start, make_facts):
    algorithm, server = start((0, 0, 1), [1, 3, 4], alpha=0.5)
    facts = make_facts(n=torch.tensor([1, 3, 4]), names=("a", "b", "c"))
    report = algorithm.report(server, facts, [])
    assert report["clusters"] == [["a", "b"], ["c"]]
    assert report["weights"] == {"a": 0.25, "b": 0.75, "c": 1.0}
    assert report["alpha"] == 0.5
