"""Synthetic federations: the model behind each regime, keyed draws, options."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import expit, logit
from scipy.stats import kurtosis

from fedtopo_torch.datasets.base import Dataset
from fedtopo_torch.datasets.synthetic import Synthetic, _intercept
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.options import OptionError
from fedtopo_torch.registry import datasets

REGIMES = ("dim", "tails", "concept", "geometry")


def all_features(federation, k):
    """Training and test features of one client in their own units."""
    test = federation.test.client(k)[0] * federation.moments.scale() + federation.moments.mean
    return np.concatenate([federation.clouds[k], test.numpy()])


def same_bits(a, b, clients):
    for k in clients:
        assert np.array_equal(a.clouds[k], b.clouds[k])
        assert torch.equal(a.train.client(k)[1], b.train.client(k)[1])
        assert torch.equal(a.test.client(k)[1], b.test.client(k)[1])


# Shapes


@pytest.mark.parametrize("regime", REGIMES)
def test_federation(regime):
    federation = Synthetic(regime=regime).load(0)
    assert federation.names == tuple(f"client_0{k}" for k in range(8))
    assert federation.groups.tolist() == [0, 1] * 4
    assert federation.feature_shape == (20,)
    assert federation.test.n.tolist() == [80] * 8
    assert int(federation.train.n.min()) >= 60
    assert int(federation.train.n.max()) <= 200
    pooled = torch.cat([federation.train.client(k)[0] for k in range(8)])
    assert pooled.mean(0).abs().max() < 1e-12
    assert (pooled.std(0, correction=0) - 1).abs().max() < 1e-12
    assert federation.source["dataset"] == "synthetic"
    assert federation.source["seed"] == 0
    assert federation.source["options"]["regime"] == regime
    # The record of how it was made makes it again.
    again = datasets[federation.source["dataset"]](**federation.source["options"]).load(0)
    same_bits(federation, again, range(8))


def test_names_sort_by_number_however_many_clients():
    small = {"n_features": 2, "ranks": (1, 2), "n_train_max": 60, "n_test": 1}
    names = Synthetic(n_clients=101, **small).load(0).names
    assert names[:2] == ("client_000", "client_001")
    assert names[-1] == "client_100"
    assert list(names) == sorted(names)


def test_training_sizes_cover_the_range_with_both_ends():
    sizes = Synthetic(n_clients=200, n_train_min=3, n_train_max=6, n_test=1).load(0).train.n
    assert sorted(set(sizes.tolist())) == [3, 4, 5, 6]


def test_a_client_of_one_record_is_allowed():
    federation = Synthetic(n_train_min=1, n_train_max=1).load(0)
    assert federation.train.n.tolist() == [1] * 8


# Draws


def test_the_same_seed_gives_the_same_bits_and_another_seed_another_federation():
    a, b, c = (Synthetic().load(s) for s in (7, 7, 8))
    same_bits(a, b, range(8))
    assert a.clouds[0].shape != c.clouds[0].shape or not np.array_equal(a.clouds[0], c.clouds[0])


@pytest.mark.parametrize("regime", REGIMES)
def test_more_clients_leave_the_others_as_they_are(regime):
    few = Synthetic(regime=regime, n_clients=5).load(3)
    more = Synthetic(regime=regime, n_clients=6).load(3)
    # From 101 clients on the names are longer; the draws are still the same.
    many = Synthetic(regime=regime, n_clients=101).load(3)
    same_bits(few, more, range(5))
    same_bits(few, many, range(5))


def test_the_order_in_which_clients_are_given_does_not_matter():
    federation = Synthetic().load(1)
    clients = []
    for k in range(8):
        x, y = all_features(federation, k), federation.test.client(k)[1]
        n = int(federation.train.n[k])
        train = (x[:n], federation.train.client(k)[1])
        clients.append(Client(federation.names[k], train=train, test=(x[n:], y), group=k % 2))
    forward, backward = Federation(clients), Federation(clients[::-1])
    assert forward.names == backward.names == federation.names
    for k in range(8):
        for split in ("train", "test"):
            for a, b in zip(
                getattr(forward, split).client(k), getattr(backward, split).client(k), strict=True
            ):
                assert torch.equal(a, b)
    same_bits(federation, backward, range(8))


def test_changing_test_records_leaves_training_tensors_bit_identical():
    federation = Synthetic().load(2)

    def rebuilt(change):
        return Federation(
            [
                Client(
                    name,
                    train=(federation.clouds[k], federation.train.client(k)[1]),
                    test=(change(federation.test.client(k)[0]), federation.test.client(k)[1]),
                )
                for k, name in enumerate(federation.names)
            ]
        )

    a, b = rebuilt(lambda x: x), rebuilt(lambda x: x * -50 + 1000)
    for k in range(8):
        assert torch.equal(a.train.client(k)[0], b.train.client(k)[0])
        assert torch.equal(a.train.client(k)[0], federation.train.client(k)[0])


def test_another_process_with_another_number_of_threads_gives_the_same_bits():
    code = (
        "import hashlib\n"
        "from fedtopo_torch.datasets import Synthetic\n"
        "f = Synthetic(n_features=60).load(11)\n"
        "h = hashlib.sha256()\n"
        "for k in range(8):\n"
        "    h.update(f.clouds[k].tobytes() + f.train.client(k)[1].numpy().tobytes())\n"
        "    h.update(f.test.client(k)[0].numpy().tobytes())\n"
        "print(h.hexdigest())\n"
    )
    root = Path(__file__).resolve().parents[2]
    digests = set()
    for threads in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
        }
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(run.stdout.strip())
    assert len(digests) == 1


# The rules


@pytest.mark.parametrize("regime", REGIMES)
def test_rules_are_orthogonal_except_in_geometry(regime):
    for seed in range(5):
        first, second = Synthetic(regime=regime).rules(seed)
        assert np.linalg.norm(first) == pytest.approx(2.6, abs=1e-12)
        assert np.linalg.norm(second) == pytest.approx(2.6, abs=1e-12)
        if regime == "geometry":
            assert np.array_equal(first, second)
        else:
            assert abs(first @ second) < 1e-12


def test_directions_are_uniform_on_the_sphere():
    u = np.stack([Synthetic(n_features=3, ranks=(1, 3)).rules(s)[0] for s in range(400)]) / 2.6
    # 400 draws: a coordinate's mean has a standard error of 0.03, its mean square one of 0.015.
    assert np.abs(u.mean(0)).max() < 0.12
    assert np.abs((u**2).mean(0) - 1 / 3).max() < 0.06


@pytest.mark.parametrize("regime", REGIMES)
def test_labels_follow_the_rule_of_the_group(regime):
    dataset = Synthetic(regime=regime, n_train_min=4000, n_train_max=4000, n_clients=2)
    federation = dataset.load(0)
    rules = dataset.rules(0)
    for k in range(2):
        x = all_features(federation, k)
        y = torch.cat([federation.train.client(k)[1], federation.test.client(k)[1]]).numpy()
        scores = x @ rules[k]
        # The b that reproduces the labels' mean is near the b_k that was used.
        p = expit(scores + _intercept(scores, float(y.mean())))
        # Calibrated in five bins of equal size: right signal and direction, standard error 0.017.
        for part in np.array_split(np.argsort(p), 5):
            assert abs(y[part].mean() - p[part].mean()) < 0.05


def test_the_mean_probability_of_a_client_lies_in_the_range_asked_for():
    dataset = Synthetic(n_clients=40, n_train_min=3000, n_train_max=3000)
    federation = dataset.load(0)
    means = np.array([float(federation.train.client(k)[1].mean()) for k in range(40)])
    # Sampling error of a mean of 3,080 labels: at most 0.009.
    assert means.min() > 0.10 - 0.03
    assert means.max() < 0.45 + 0.03
    # Uniform(0.10, 0.45) has mean 0.275; the standard error over 40 clients is 0.016.
    assert means.mean() == pytest.approx(0.275, abs=0.05)
    narrow = Synthetic(n_clients=4, n_train_min=3000, n_train_max=3000, prevalence="0.8,0.8")
    for k in range(4):
        assert float(narrow.load(0).train.client(k)[1].mean()) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("mean", [0.001, 0.10, 0.45, 0.999])
@pytest.mark.parametrize("spread", [0.0, 1.0, 50.0])
def test_the_intercept_gives_the_mean_probability(mean, spread):
    scores = spread * np.linspace(-3, 2, 101)
    b = _intercept(scores, mean)
    assert expit(scores + b).mean() == pytest.approx(mean, abs=1e-9)
    if spread == 0:
        assert b == pytest.approx(logit(mean), abs=1e-9)


# The features


@pytest.mark.parametrize("regime", ["dim", "geometry"])
def test_low_rank_features(regime):
    for k, rank in ((0, 3), (1, 12)):
        x = all_features(Synthetic(regime=regime, noise=0).load(0), k)
        values = np.linalg.svd(x, compute_uv=False)
        assert values[rank - 1] > 1e-3 * values[0]
        assert values[rank] < 1e-10 * values[0]
    # With noise 0.4: r directions of variance 20/r + 0.16, the others 0.16.
    dataset = Synthetic(regime=regime, n_train_min=20000, n_train_max=20000, n_clients=2)
    federation, frames = dataset.load(0), dataset.frames(0)
    for k, rank in ((0, 3), (1, 12)):
        x, frame = federation.clouds[k], frames[k]
        np.testing.assert_allclose(frame.T @ frame, np.eye(rank), atol=1e-12)
        expected = 20 / rank * frame @ frame.T + 0.16 * np.eye(20)
        assert np.abs(x.T @ x / len(x) - expected).max() < 0.03 * 20 / rank


def test_clients_of_one_group_share_their_subspace():
    federation = Synthetic(noise=0).load(0)
    rank = np.linalg.matrix_rank
    clouds = federation.clouds
    assert rank(np.concatenate([clouds[0], clouds[2]])) == 3
    assert rank(np.concatenate([clouds[1], clouds[3]])) == 12
    assert rank(np.concatenate([clouds[0], clouds[1]])) == 15


def test_tails_are_heavy_in_group_1_only_and_its_variance_is_1():
    options = {"n_clients": 2, "n_train_min": 50000, "n_train_max": 50000}
    light, heavy = Synthetic(regime="tails", **options).load(0).clouds
    assert abs(kurtosis(light, axis=None)) < 0.05
    assert kurtosis(heavy, axis=None) > 5
    assert light.var() == pytest.approx(1, abs=0.01)
    # With nu = 12 the fourth moment exists: variance 1, excess kurtosis 6/(12 - 4) = 0.75.
    _, milder = Synthetic(regime="tails", nu=12, **options).load(0).clouds
    assert milder.var() == pytest.approx(1, abs=0.02)
    assert kurtosis(milder, axis=None) == pytest.approx(0.75, abs=0.15)
    # One factor per record: the squares of two columns go together.
    squares = milder[:, :2] ** 2
    assert np.corrcoef(squares.T)[0, 1] > 0.05


def test_concept_has_the_same_standard_normal_features_in_both_groups():
    clouds = Synthetic(regime="concept", n_clients=2, n_train_min=20000, n_train_max=20000).load(0)
    for x in clouds.clouds:
        assert np.abs(np.cov(x.T) - np.eye(20)).max() < 0.05
        assert abs(kurtosis(x, axis=None)) < 0.05


# The options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regime": "concpt"}, "'dim', 'tails', 'concept' or 'geometry'"),
        ({"n_client": 3}, "no option 'n_client'. Did you mean 'n_clients'?"),
        ({"n_train_min": 300}, "n_train_min = 300 must not be above n_train_max = 200"),
        ({"n_features": 10}, r"ranks = \(3, 12\) must be between 1 and n_features = 10"),
        ({"ranks": (0, 3)}, "ranks"),
        ({"ranks": "3"}, "ranks = '3' is not valid: must be two numbers"),
        ({"ranks": 3}, "two numbers"),
        ({"nu": 2}, "greater than 2"),
        ({"prevalence": (0.5, 0.4)}, "0 < LOW <= HIGH < 1"),
        ({"prevalence": "0,0.4"}, "0 < LOW <= HIGH < 1"),
        ({"signal": float("inf")}, "finite"),
        ({"n_clients": 0}, "greater than or equal to 1"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(OptionError, match=message):
        Synthetic(**options)


def test_options_as_text():
    dataset = Synthetic(ranks="2, 5", prevalence="0.2,0.3", n_clients="4")
    assert dataset.ranks == (2, 5)
    assert dataset.prevalence == (0.2, 0.3)
    assert dataset.n_clients == 4


def test_ranks_matter_only_where_they_are_used():
    assert Synthetic(regime="concept", n_features=5).load(0).feature_shape == (5,)


def test_every_registered_dataset_has_a_line_of_help_and_described_options():
    assert {"synthetic", "fed_heart_disease"} <= set(datasets)
    for name in datasets:
        cls = datasets[name]
        assert issubclass(cls, Dataset)
        assert cls.name == name
        assert cls.paper
        assert cls.__doc__.splitlines()[0].endswith(".")
        assert all(meaning for *_, meaning in cls.option_lines())


def test_the_base_class_cannot_be_used():
    with pytest.raises(TypeError, match="abstract"):
        Dataset()
