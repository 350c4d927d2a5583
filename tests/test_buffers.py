"""Buffers of modules: every method against plain modules, and what may never touch a buffer."""

import copy
import warnings

import pytest
import torch
from plain_torch import Plain, twin
from torch import nn

from fedtopo_torch.algorithms import IFCA, Ditto, FedAvg, FedProx, Local, PFedMe, Scaffold
from fedtopo_torch.algorithms.base import Cohort
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.registry import algorithms
from fedtopo_torch.trainer import Trainer

SIZES = [9, 17, 9, 12]
SETTINGS = {"eta": 0.1, "batch_size": 8, "local_steps": 2}
#: Every registered method there is.
NAMES = sorted(set(algorithms))


def make(name):
    method = algorithms[name]
    return method(labels=(0, 1, 0, 1)) if name == "clustered" else method()


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def train(method, federation, module=None, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        settings = {**SETTINGS, **settings}
        if "local_epochs" in settings:
            settings.pop("local_steps")
        trainer = Trainer(method, federation, module or net(), **settings)
        return trainer, trainer.run()


def compared(name, federation, *, module=None, rounds=2, **settings):
    """The gap between a run and plain modules, and both their counters."""
    module = module or net()
    trainer, result = train(make(name), federation, module, rounds=rounds, **settings)
    cohort = None
    if settings.get("participation", 1) < 1:
        cohort = lambda round: trainer._cohort(round).index.tolist()  # noqa: E731
    own = {k: v for k, v in settings.items() if k not in ("participation", "chunk_clients")}
    smallest = trainer.objective.smallest
    plain = Plain(module, federation, cohort=cohort, smallest=smallest, **{**SETTINGS, **own})
    theta, counters = plain.run(twin(name, plain, result), rounds)
    return float((theta - result.theta).abs().max()), counters, result


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("name", NAMES)
def test_every_method_equals_plain_modules(make_federation, name, buffers, participation):
    gap, counters, result = compared(
        name, make_federation(SIZES), buffers=buffers, participation=participation
    )
    assert gap < 1e-12
    assert torch.equal(counters, result.counters)


@pytest.mark.parametrize("name", ["fedavg", "pfedme", "ifca", "ditto"])
def test_two_dimensional_batchnorm_equals_plain_modules(name):
    generator = torch.Generator().manual_seed(0)
    clients = []
    for k, n in enumerate([9, 14, 6]):
        x = torch.randn(n + 3, 1, 4, 4, generator=generator).numpy()
        y = (x[:, 0].mean((1, 2)) > 0).astype(int)
        clients.append(Client(f"c{k}", (x[:n], y[:n]), (x[n:], y[n:])))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1)
        module = nn.Sequential(*layers)
    gap, counters, result = compared(name, Federation(clients), module=module, rounds=2)
    assert gap < 1e-12
    assert torch.equal(counters, result.counters)


# Fault 4, by hand


class Tracker(nn.Module):
    """w, put out for every record; a float buffer that becomes the label seen, and a counter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("last", torch.tensor(0.0))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.last.copy_(x.detach().mean())
            self.count.add_(1)
        return self.w + 0 * x[:, 0]


def pair(values=(0.0, 4.0), sizes=(1, 3), n_test=1):
    """Two clients whose records are all one number."""
    clients = []
    for k, (value, n) in enumerate(zip(values, sizes, strict=True)):
        x = torch.full((n, 1), value, dtype=torch.float64).numpy()
        clients.append(Client(f"c{k}", (x, x[:, 0]), (x[:n_test], x[:n_test, 0])))
    return Federation(clients, task="regression", standardize=False)


def test_fault_04_float_buffers_are_averaged_like_parameters():
    _, result = train(FedAvg(), pair(), Tracker(), rounds=1, batch_size=None, l2=0)
    # 0 with n = 1 and 4 with n = 3.
    assert result.server["theta"][1].item() == 3.0
    for state in result.state_dicts().values():
        assert state["last"].item() == 3.0


def test_fault_04_counters_become_the_largest_and_stay_whole():
    # Batches of one: passes of 3 and 5 records are 3 and 5 steps.
    federation = pair(sizes=(3, 5))
    settings = {"batch_size": 1, "local_epochs": 1}
    _, result = train(FedAvg(), federation, Tracker(), rounds=1, **settings)
    for state in result.state_dicts().values():
        assert state["count"].dtype == torch.int64
        assert state["count"].shape == ()
        assert state["count"].item() == 5
    # From 5 on, 3 and 5 more.
    _, result = train(FedAvg(), federation, Tracker(), rounds=2, **settings)
    assert [s["count"].item() for s in result.state_dicts().values()] == [10, 10]


@pytest.mark.parametrize(("method", "buffers"), [(Local(), "average"), (FedAvg(), "local")])
def test_fault_04_counters_that_stay_with_the_clients_are_their_own(method, buffers):
    settings = {"batch_size": 1, "local_epochs": 1, "buffers": buffers}
    _, result = train(method, pair(sizes=(3, 5)), Tracker(), rounds=2, **settings)
    assert [s["count"].item() for s in result.state_dicts().values()] == [6, 10]
    assert [s["last"].item() for s in result.state_dicts().values()] == [0.0, 4.0]


def test_fault_04_counters_and_buffers_of_a_round_nobody_else_took_part_in():
    trainer, result = train(
        FedAvg(), pair(), Tracker(), rounds=1, batch_size=None, clients_per_round=1
    )
    taken = int(trainer._cohort(1).index)
    assert result.server["theta"][1].item() == (0.0, 4.0)[taken]
    assert [s["count"].item() for s in result.state_dicts().values()] == [2, 2]
    assert result.unseen == 1


@pytest.mark.parametrize("name", NAMES)
def test_fault_04_plain_batchnorm_counts_its_batches(make_federation, name):
    _, result = train(make(name), make_federation(SIZES), rounds=2)
    steps = 2 * 2 * (5 if name == "pfedme" else 1)
    for state in result.state_dicts().values():
        assert state["1.num_batches_tracked"].item() == steps
        assert state["1.num_batches_tracked"].dtype == torch.int64
        assert (state["1.running_var"] > 0).all()


# What never touches a buffer


def one_pass(federation, k=0):
    """BatchNorm's statistics after training on all records of a client, as plain torch has them."""
    module = net().double().train()
    module(federation.train.client(k)[0])
    return torch.cat([module[1].running_mean, module[1].running_var])


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (FedAvg(), {}),
        (FedAvg(), {"l2": 10.0}),
        (FedAvg(), {"momentum": 0.9}),
        (FedAvg(), {"optimizer": "adam"}),
        (FedAvg(), {"optimizer": "adamw", "weight_decay": 5.0}),
        (FedProx(mu=50.0), {}),
        (Scaffold(), {}),
        (Scaffold(eta_g=3.0), {}),
        (PFedMe(beta=0.1, inner_steps=1), {}),
        (PFedMe(beta=5.0, inner_steps=1), {}),
        (Ditto(lambda_d=50.0), {}),
    ],
)
def test_only_the_module_moves_its_buffers(make_federation, method, settings):
    federation = make_federation([9])
    _, result = train(
        method, federation, rounds=1, local_steps=1, batch_size=None, eta=0.01, **settings
    )
    expected = one_pass(federation)
    for row in (result.theta[0], result.server["theta"]):
        assert torch.allclose(row[-8:], expected, rtol=0, atol=1e-14)


def test_initial_noise_of_ifca_leaves_buffers_as_they_are(make_federation):
    trainer = Trainer(IFCA(n_clusters=3, spread=2.0), make_federation(SIZES), net(), eta=0.1)
    server = IFCA(n_clusters=3, spread=2.0).server_state(
        trainer.objective.initial(), {}, trainer_facts(trainer)
    )
    start = torch.tensor([0.0] * 4 + [1.0] * 4, dtype=torch.float64)
    assert torch.equal(server["models"][:, -8:], start.expand(3, -1))
    assert not torch.equal(server["models"][0, :-8], server["models"][1, :-8])


def trainer_facts(trainer):
    """The facts that a method is given."""
    kept = []

    class Asks(FedAvg):
        """Keeps the facts."""

        def server_state(self, theta0, introductions, facts):
            kept.append(facts)
            return super().server_state(theta0, introductions, facts)

    train(Asks(), trainer.federation, rounds=1)
    return kept[0]


def test_a_server_step_leaves_buffers_at_the_mean():
    cohort = Cohort(torch.arange(2), torch.tensor([1, 3]), 4, parameters=1)
    before = torch.tensor([1.0, 5.0])
    moved = cohort.stepped(before, torch.tensor([3.0, 7.0]), 0.5)
    assert moved.tolist() == [2.0, 7.0]
    assert cohort.stepped(before, torch.tensor([3.0, 7.0]), 2.0).tolist() == [5.0, 7.0]
    assert before.tolist() == [1.0, 5.0]


@pytest.mark.parametrize("name", NAMES)
def test_scoring_moves_nothing(make_federation, name):
    federation = make_federation(SIZES)
    _, every = train(make(name), federation, rounds=2)
    _, once = train(make(name), federation, rounds=2, eval_every=2, splits="test")
    assert torch.equal(every.theta, once.theta)
    assert torch.equal(every.counters, once.counters)
    before = every.theta.clone()
    evaluator = Trainer(make(name), federation, net(), eta=0.1).evaluator
    first, again = ({k: s.pooled for k, s in evaluator(before).items()} for _ in range(2))
    assert first == again
    assert torch.equal(before, every.theta)


def test_scores_are_those_of_the_plain_module_in_evaluation_mode(make_federation):
    federation = make_federation(SIZES)
    _, result = train(Local(), federation, rounds=2)
    score = result.history.last("test", "log_loss")
    for k, (name, state) in enumerate(result.state_dicts().items()):
        module = copy.deepcopy(net()).double().eval()
        module.load_state_dict(state)
        x, y = federation.test.client(federation.names.index(name))
        loss = nn.functional.binary_cross_entropy_with_logits(module(x)[:, 0], y)
        assert abs(float(loss) - float(score.clients[k])) < 1e-12


# Fault 27 and 29


def test_fault_27_evaluation_between_rounds_draws_nothing(make_federation):
    federation = make_federation(SIZES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    _, every = train(FedAvg(), federation, module, rounds=4)
    _, last = train(FedAvg(), federation, module, rounds=4, eval_every=4)
    assert torch.equal(every.theta, last.theta)
    assert every.history.pooled()[-1] == last.history.pooled()[-1]


def test_fault_29_a_last_batch_of_one_is_left_out_and_said(make_federation):
    federation = make_federation([9, 16, 17, 8])
    with pytest.warns(UserWarning, match="the last batch of 2 clients, which would be one"):
        result = Trainer(
            FedAvg(), federation, net(), rounds=2, eta=0.1, batch_size=8, local_epochs=2
        ).run()
    assert result.history.pooled().max() < 10
    # 9 = 8 + 1 and 17 = 8 + 8 + 1: one and two batches in a pass.
    assert result.facts.local_steps == (9 * 2 + 16 * 4 + 17 * 4 + 8 * 2) / 50


@pytest.mark.parametrize(
    ("sizes", "settings", "told"),
    [
        ([5, 1, 6], {}, "client 'c01': batches of one record"),
        ([1, 1, 6], {"batch_size": 4}, "client 'c00' and 1 others: batches of one record"),
        ([5, 6], {"batch_size": 1}, "client 'c00' and 1 others: batches of one record"),
    ],
)
def test_fault_29_batches_of_one_under_batchnorm_are_refused(
    make_federation, sizes, settings, told
):
    with pytest.raises(ValueError) as caught:
        Trainer(FedAvg(), make_federation(sizes), net(), eta=0.1, **settings)
    assert told in str(caught.value)
    assert "GroupNorm" in str(caught.value)


@pytest.mark.parametrize("norm", [nn.GroupNorm(1, 4), nn.LayerNorm(4)])
def test_fault_29_one_record_is_enough_for_other_norms(make_federation, norm):
    module = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 1))
    for size in (None, 4, 1):
        settings = {"rounds": 2, "batch_size": size}
        gap, _, result = compared(
            "fedavg", make_federation([1, 5, 9]), module=copy.deepcopy(module), **settings
        )
        assert gap < 1e-12
        assert result.history.pooled().max() < 10
