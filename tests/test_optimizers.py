"""Optimisers and schedules against torch.optim on a plain module per client."""

import math
import warnings

import pytest
import torch
from plain_torch import Plain, twin
from torch import nn

from fedtopo_torch.algorithms import PACFL, Clustered, FedAvg, Oracle, PTopoFL, Scaffold
from fedtopo_torch.models.logistic import Logistic
from fedtopo_torch.options import OptionError
from fedtopo_torch.registry import algorithms
from fedtopo_torch.trainer import Trainer
from fedtopo_torch.training import Training

SIZES = [5, 13, 9]

OPTIMISERS = {
    "sgd": ({}, torch.optim.SGD),
    "momentum": ({"momentum": 0.9}, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
    "adam": ({"optimizer": "adam"}, torch.optim.Adam),
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.3},
        lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.3),
    ),
}
every_optimiser = pytest.mark.parametrize("optimiser", OPTIMISERS)


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def zeros(outputs=1):
    module = nn.Linear(3, outputs)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


def run(method, federation, module=None, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Trainer(method, federation, module or Logistic(), **settings).run()


def gap(name, federation, module, optimiser, rounds=2, factor=lambda round: 1.0, **settings):
    given, build = OPTIMISERS[optimiser]
    settings = {"eta": 0.05, "batch_size": 6, **settings}
    schedule = {k: settings.pop(k) for k in list(settings) if k in ("schedule", "decay_every")}
    result = run(
        algorithms[name](), federation, module, rounds=rounds, **given, **settings, **schedule
    )
    smallest = 2 if any(isinstance(m, nn.BatchNorm1d) for m in module.modules()) else 1
    plain = Plain(module, federation, optimizer=build, factor=factor, smallest=smallest, **settings)
    theta, _ = plain.run(twin(name, plain, result), rounds)
    return float((theta - result.theta).abs().max())


@every_optimiser
@pytest.mark.parametrize("name", ["local", "fedavg", "fedprox", "scaffold", "ditto", "pfedme"])
def test_every_optimiser_is_torchs_with_every_correction(make_federation, name, optimiser):
    federation = make_federation(SIZES)
    assert gap(name, federation, zeros(), optimiser, local_epochs=2) < 1e-12
    assert gap(name, federation, net(), optimiser, local_steps=2) < 1e-12


@every_optimiser
def test_every_optimiser_is_torchs_for_several_classes(make_federation, optimiser):
    federation, module = make_federation(SIZES, classes=3), zeros(3)
    if "adam" in optimiser:
        # From zero a balanced batch has gradients that are zero but for rounding, of which Adam's
        # first step makes any number up to eta.
        module = nn.Sequential(module)
        nn.init.constant_(module[0].weight, 0.3)
        module[0].weight.data[0] *= -1
    assert gap("fedavg", federation, module, optimiser, local_steps=3) < 1e-12


@every_optimiser
def test_an_optimisers_state_starts_fresh_every_round(make_federation, optimiser):
    """Two rounds of one client alone are two runs, the second from where the first ended."""
    federation, (given, _) = make_federation([20]), OPTIMISERS[optimiser]
    given = {"eta": 0.05, "local_steps": 4, "rounds": 1, **given}
    whole = run(FedAvg(), federation, **{**given, "rounds": 2})
    first = run(FedAvg(), federation, **given)
    module = nn.Sequential(nn.Linear(3, 1))
    with torch.no_grad():
        module.double()[0].weight.copy_(first.theta[0, :3])
        module[0].bias.copy_(first.theta[0, 3:])
    second = run(FedAvg(), federation, module, **given)
    assert float((whole.theta - second.theta).abs().max()) < 1e-14


class Constant(nn.Module):
    """w, put out for every record; w = 1 and a target of 0 give the gradient w."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x):
        return self.w + 0 * x[:, 0]


@pytest.fixture(scope="module")
def origin():
    """One client whose target is 0."""
    from fedtopo_torch.federation import Client, Federation

    x = [[0.0], [1.0]]
    return Federation([Client("a", (x, [0.0, 0.0]), (x, [0.0, 0.0]))], task="regression")


def end(federation, **settings):
    settings = {"eta": 0.1, "l2": 0.0, "local_steps": 2, "rounds": 1, **settings}
    return float(run(FedAvg(), federation, Constant(), **settings).theta)


def test_momentum_by_hand(origin):
    # Velocities 1, then 0.5 + 0.9: w = 1 - 0.1 - 0.14; a round later from rest.
    assert end(origin, momentum=0.5) == pytest.approx(0.76, abs=1e-15)
    assert end(origin, momentum=0.5, rounds=2) == pytest.approx(0.76**2, abs=1e-15)


def test_adamw_decays_beside_the_gradient_by_hand(origin):
    # Adam's first step is eta, whatever the gradient; before it w shrinks by eta * weight_decay.
    after = end(origin, optimizer="adamw", weight_decay=0.5, local_steps=1)
    assert after == pytest.approx(1 * (1 - 0.05) - 0.1, abs=1e-8)
    assert end(origin, optimizer="adam", local_steps=1) == pytest.approx(0.9, abs=1e-8)


def test_schedules_by_hand(origin):
    # Step sizes 0.1, 0.1, 0.01, 0.01, 0.001.
    one = {"local_steps": 1}
    after = end(origin, rounds=5, schedule="step", decay_every=2, **one)
    assert after == pytest.approx(0.9**2 * 0.99**2 * 0.999, abs=1e-15)
    after = end(origin, rounds=3, schedule="step", decay_every=1, decay=0.5, **one)
    assert after == pytest.approx(0.9 * 0.95 * 0.975, abs=1e-15)
    # Half a cosine over four rounds: 1, (1 + sqrt(1/2))/2, 1/2, (1 - sqrt(1/2))/2.
    after = end(origin, rounds=4, schedule="cosine", **one)
    half = math.sqrt(0.5)
    expected = 0.9 * (1 - 0.05 * (1 + half)) * 0.95 * (1 - 0.05 * (1 - half))
    assert after == pytest.approx(expected, abs=1e-15)
    assert end(origin, rounds=1, schedule="cosine") == pytest.approx(0.81)


def test_factors_of_a_schedule():
    training = Training(rounds=100, schedule="cosine")
    values = [training.factor(round) for round in range(1, 101)]
    assert values[0] == 1.0 and values[50] == pytest.approx(0.5)
    assert values == sorted(values, reverse=True) and 0 < values[-1] < 1e-3
    training = Training(schedule="step", decay_every=3, decay=0.1)
    factors = [training.factor(round) for round in (1, 3, 4, 6, 7)]
    assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    assert Training().factor(77) == 1.0


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "pfedme", "ditto"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_schedules_reach_every_step_of_a_round(make_federation, name, optimiser):
    def factor(round):
        return 0.1 ** ((round - 1) // 2)

    way = {"schedule": "step", "decay_every": 2, "local_steps": 3}
    federation = make_federation(SIZES)
    assert gap(name, federation, zeros(), optimiser, 4, factor, **way) < 1e-12

    def cosine(round):
        return (1 + math.cos(math.pi * (round - 1) / 4)) / 2

    way = {"schedule": "cosine", "local_steps": 3}
    assert gap(name, federation, zeros(), optimiser, 4, cosine, **way) < 1e-12


# What is said


def told(method, federation, **settings):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(method, federation, Logistic(), rounds=1, local_steps=1, **settings).run()
    return [str(w.message) for w in caught if w.category is UserWarning]


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam", "eta": 0.1}])
def test_scaffold_says_why_its_controls_need_plain_steps(make_federation, settings):
    (text,) = told(Scaffold(), make_federation([20, 20]), **settings)
    assert "mean gradient off how far its model moved" in text
    assert "with momentum or Adam its controls are wrong" in text


@pytest.mark.parametrize("settings", [{}, {"batch_size": 5}, {"schedule": "cosine"}])
def test_scaffold_says_nothing_where_steps_are_plain(make_federation, settings):
    assert told(Scaffold(), make_federation([20, 20]), **settings) == []


@pytest.mark.parametrize("method", [PTopoFL(), PACFL(), Oracle(), Clustered(labels=(0, 1, 0, 1))])
def test_clustered_methods_say_that_abar_is_calibrated_for_plain_steps(make_federation, method):
    federation = make_federation([20, 21, 22, 23])
    for settings in ({"momentum": 0.9}, {"optimizer": "adam"}, {"schedule": "step"}):
        (text,) = told(method, federation, **settings)
        assert "abar is calibrated for plain gradient steps of one size" in text
    assert told(method, federation) == []
    given = type(method)(**{**method.model_dump(), "alpha": 0.3})
    assert told(given, federation, momentum=0.9) == []


def test_averaging_says_nothing(make_federation):
    assert told(FedAvg(), make_federation([20, 20]), optimizer="adam", eta=0.1) == []


# Options that exclude each other, or mean nothing


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"local_steps": 5, "local_epochs": 2}, ["local_steps", "local_epochs"]),
        ({"participation": 0.5, "clients_per_round": 2}, ["participation", "clients_per_round"]),
        ({"momentum": 0.9, "optimizer": "adam"}, ["momentum", "optimizer = sgd", "adam"]),
        ({"weight_decay": 0.1}, ["weight_decay", "optimizer = adamw", "sgd"]),
        ({"decay": 0.5}, ["decay", "schedule = step", "constant"]),
        ({"decay_every": 5, "schedule": "cosine"}, ["decay_every", "schedule = step", "cosine"]),
        ({"momentum": 1.0}, ["momentum"]),
        ({"momentum": -0.1}, ["momentum"]),
        ({"batch_size": 0}, ["batch_size"]),
        ({"batch_size": 2.5}, ["batch_size"]),
        ({"local_epochs": 0}, ["local_epochs"]),
        ({"participation": 0}, ["participation"]),
        ({"participation": 1.01}, ["participation"]),
        ({"participation": math.nan}, ["participation"]),
        ({"clients_per_round": 0}, ["clients_per_round"]),
        ({"decay": 0, "schedule": "step"}, ["decay"]),
        ({"weight_decay": math.inf, "optimizer": "adamw"}, ["weight_decay"]),
        ({"optimizer": "sdg"}, ["optimizer", "sgd"]),
        ({"schedule": "linear"}, ["schedule", "cosine"]),
        ({"buffers": "none"}, ["buffers", "average"]),
        ({"chunk_clients": 0}, ["chunk_clients"]),
        ({"chunk_clients": True}, ["chunk_clients"]),
        ({"batchsize": 5}, ["batchsize", "batch_size"]),
    ],
)
def test_fault_31_settings_that_can_not_be_are_refused_by_name(make_federation, settings, names):
    with pytest.raises(OptionError) as caught:
        Trainer(FedAvg(), make_federation([9]), Logistic(), **settings)
    assert all(name in str(caught.value) for name in names)


def test_defaults_may_be_named_beside_their_alternative():
    """A run's record lists every option; it can be given back."""
    for given in ({"local_epochs": 2}, {"clients_per_round": 3}, {"optimizer": "adam"}):
        training = Training(**given)
        assert Training(**training.model_dump()) == training


# Devices


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("mps", "device 'mps' can't compute in float64"),
        ("gpu", "device is 'gpu': must be auto, cpu, cuda or mps"),
        ("", "must be auto"),
        ("cpu:x", "device is 'cpu:x'"),
        ("meta", "device is 'meta'"),
    ],
)
def test_a_device_that_can_not_be_used_is_refused(make_federation, device, told):
    with pytest.raises(OptionError) as caught:
        Trainer(FedAvg(), make_federation([9]), Logistic(), device=device)
    assert told in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_without_one_is_refused(make_federation, device):
    with pytest.raises(OptionError, match="torch finds no CUDA device here"):
        Trainer(FedAvg(), make_federation([9]), Logistic(), device=device)
    assert Trainer(FedAvg(), make_federation([9]), Logistic(), device="auto").device.type == "cpu"


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is an MPS device")
def test_mps_without_one_is_refused(make_federation):
    with pytest.raises(OptionError, match="'mps', but torch finds none here"):
        Trainer(FedAvg(), make_federation([9], dtype=torch.float32), Logistic(), device="mps")
