"""Any module: a run equals plain modules trained one by one, or is refused with the reason."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from plain_torch import Plain, twin, write
from torch import nn
from torch.nn.utils import parametrizations

from fedtopo_torch.algorithms import FedAvg, Local
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.objective import Objective
from fedtopo_torch.trainer import Trainer

SETTINGS = {"eta": 0.1, "batch_size": 8, "local_steps": 5}
SIZES = [7, 19, 12, 5, 30]


class Body(nn.Module):
    """A part of its own between two linear layers."""

    def __init__(self, middle=None, width=4):
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 1)
        self.middle = middle or nn.Identity()

    def forward(self, x):
        return self.last(torch.tanh(self.middle(self.first(x))))


class Recurrent(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.cell = kind(1, 4, batch_first=True, **settings)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.cell(x[..., None])[0][:, -1])


class Attention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 1)
        self.attend = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)

    def forward(self, x):
        h = self.first(x[..., None])
        return self.last(self.attend(h, h, h, need_weights=False)[0].mean(1))


class Bag(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.words = nn.EmbeddingBag(10, 4, mode=mode)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.words((x * 3).long().clamp(-5, 4) + 5))


class Embedded(Bag):
    def __init__(self):
        super().__init__("mean")
        self.words = nn.Embedding(10, 4)

    def forward(self, x):
        return self.last(self.words((x * 3).long().clamp(-5, 4) + 5).mean(1))


class ReadsItem(Body):
    def forward(self, x):
        h = self.first(x)
        return self.last(
            torch.tanh(h * 1.1 if h.abs().mean().item() > 0.5 and self.training else h)
        )


class FunctionalDropout(Body):
    def forward(self, x):
        return self.last(F.dropout(torch.tanh(self.first(x)), 0.5, self.training))


class Noise(Body):
    always = False

    def forward(self, x):
        noisy = self.training or self.always
        return super().forward(x + 0.1 * torch.randn_like(x) if noisy else x)


class Centres(nn.Module):
    """Float and integer buffers, assigned anew or changed in place."""

    def __init__(self, *, assign, persistent=True, kind=torch.int64):
        super().__init__()
        self.last, self.assign = nn.Linear(3, 1), assign
        self.register_buffer("centre", torch.zeros(3), persistent=persistent)
        self.register_buffer("calls", torch.zeros(2, dtype=kind), persistent=persistent)

    def forward(self, x):
        if self.training and self.assign:
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
            self.calls = self.calls + 1
        elif self.training:
            self.centre.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.calls.add_(1)
        return self.last(x - self.centre)


class CountsRecords(Body):
    """A counter that padded records would enter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("records", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.records += len(x)
        return super().forward(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.last(torch.tanh(self.b(torch.tanh(self.norm(self.a(x))))))


class UsedTwice(nn.Module):
    """Two layers, each under two names."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b, self.last = self.a, nn.Linear(3, 1)
        self.norm_a = nn.BatchNorm1d(3)
        self.norm_b = self.norm_a

    def forward(self, x):
        return self.last(self.norm_b(torch.tanh(self.b(self.norm_a(self.a(x))))))


def from_zero(middle):
    module = Body(middle)
    nn.init.zeros_(module.last.weight)
    return module


def instance_norm():
    norm = nn.InstanceNorm1d(1, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (1, 3)), norm, nn.Flatten(), nn.Linear(3, 1))


def transformer():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.3)
    parts = nn.Unflatten(1, (3, 1)), nn.Linear(1, 4), layer, nn.Flatten(), nn.Linear(12, 1)
    return nn.Sequential(*parts)


DRAWS, FAST = "it draws random numbers while training", "torch.func.vmap has no fast way"
CANNOT = "torch.func.vmap can't run it"

#: A module, and why it is trained client by client ("" where it is not).
MODULES = {
    "batchnorm": (lambda: Body(nn.BatchNorm1d(4)), ""),
    "batchnorm before a zero layer": (lambda: from_zero(nn.BatchNorm1d(4)), ""),
    "instancenorm": (instance_norm, ""),
    "groupnorm": (lambda: Body(nn.GroupNorm(1, 4)), ""),
    "layernorm": (lambda: Body(nn.LayerNorm(4)), ""),
    "prelu": (lambda: Body(nn.PReLU()), ""),
    "in-place relu": (lambda: Body(nn.ReLU(inplace=True)), ""),
    "orthogonal": (lambda: Body(parametrizations.orthogonal(nn.Linear(4, 4))), ""),
    "embedding": (Embedded, ""),
    "buffers changed": (lambda: Centres(assign=False), ""),
    "buffers assigned": (lambda: Centres(assign=True), ""),
    "small integers": (lambda: Centres(assign=False, kind=torch.int32), ""),
    "counts records": (CountsRecords, ""),
    "tied": (Tied, ""),
    "used twice": (UsedTwice, ""),
    "dropout": (lambda: Body(nn.Dropout(0.5)), DRAWS),
    "dropout and batchnorm": (
        lambda: Body(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.3))),
        DRAWS,
    ),
    "alpha dropout": (lambda: Body(nn.AlphaDropout(0.3)), DRAWS),
    "rrelu": (lambda: Body(nn.RReLU()), DRAWS),
    "functional dropout": (FunctionalDropout, DRAWS),
    "noise": (Noise, DRAWS),
    "lstm with dropout": (lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.5), DRAWS),
    "attention with dropout": (lambda: Attention(0.5), DRAWS),
    "transformer": (transformer, DRAWS),
    "lstm": (lambda: Recurrent(nn.LSTM), CANNOT),
    "gru": (lambda: Recurrent(nn.GRU), CANNOT),
    "cumulative batchnorm": (lambda: Body(nn.BatchNorm1d(4, momentum=None)), CANNOT),
    "spectral norm": (lambda: Body(parametrizations.spectral_norm(nn.Linear(4, 4))), CANNOT),
    "reads item": (ReadsItem, CANNOT),
    "weight norm": (lambda: Body(parametrizations.weight_norm(nn.Linear(4, 4))), FAST),
    "attention": (Attention, FAST),
    "bag": (lambda: Bag("mean"), FAST),
    "bag of largest": (lambda: Bag("max"), FAST),
}


def made(build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def trained(module, federation, **settings):
    """A run, what it warned of, and the trainer."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(FedAvg(), federation, module, **{**SETTINGS, "rounds": 2, **settings})
        result = trainer.run()
    return result, [str(w.message) for w in caught if w.category is UserWarning], trainer


@pytest.mark.parametrize("name", MODULES)
def test_a_run_equals_plain_modules_trained_one_by_one(make_federation, name):
    build, why = MODULES[name]
    module, federation = made(build), make_federation(SIZES)
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    result, told, trainer = trained(module, federation)
    objective = trainer.objective
    plain = Plain(
        module, federation, **SETTINGS, smallest=objective.smallest, draws=objective.draws
    )
    theta, counters = plain.run(twin("fedavg", plain, result), 2)
    assert float((theta - result.theta).abs().max()) < 1e-12
    assert counters.shape[1] == 0 or torch.equal(counters, result.counters)
    # How it was run, said once.
    assert objective.batched == (not why)
    assert len([text for text in told if "client by client" in text]) == bool(why)
    assert why in objective.reason
    # Nothing of the caller's moves.
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())
    # A state_dict is the whole model.
    client, features = federation.names[1], federation.test.client(1)[0]
    loaded, written = (copy.deepcopy(module).double().eval() for _ in range(2))
    loaded.load_state_dict(result.state_dicts()[client], strict=True)
    write(written, result.theta[1], counters[1])
    with torch.no_grad():
        assert torch.equal(loaded(features), written(features))
    kinds = {n: (v.dtype.is_floating_point, v.shape) for n, v in module.state_dict().items()}
    found = result.state_dicts()[client].items()
    assert {n: (v.dtype.is_floating_point, v.shape) for n, v in found} == kinds


@pytest.mark.parametrize("name", ["batchnorm", "functional dropout", "lstm", "tied"])
def test_float32_is_as_close_as_float32_allows(make_clients, name):
    module, federation = (
        made(MODULES[name][0]),
        Federation(make_clients(SIZES), dtype=torch.float32),
    )
    result, _, trainer = trained(module, federation)
    objective = trainer.objective
    assert result.theta.dtype == torch.float32
    plain = Plain(
        module, federation, **SETTINGS, smallest=objective.smallest, draws=objective.draws
    )
    theta, _ = plain.run(twin("fedavg", plain, result), 2)
    assert float((theta - result.theta).abs().max()) < 1e-5


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


@pytest.fixture(scope="module")
def images():
    generator = torch.Generator().manual_seed(0)
    clients = []
    for k, n in enumerate([9, 14, 6]):
        x = torch.randn(n + 5, 1, 4, 4, generator=generator).numpy()
        y = torch.randint(0, 3, (n + 5,), generator=generator).numpy()
        clients.append(Client(f"c{k}", (x[:n], y[:n]), (x[n:], y[n:])))
    return Federation(clients, task="multiclass", n_classes=3)


def test_a_convolutional_net_equals_plain_modules(images):
    module = made(cnn)
    result, told, trainer = trained(module, images)
    assert trainer.objective.batched and not told
    # One image has many values per channel: such a batch is no hindrance.
    assert trainer.objective.smallest == 1
    plain = Plain(module, images, **SETTINGS)
    theta, counters = plain.run(twin("fedavg", plain, result), 2)
    assert float((theta - result.theta).abs().max()) < 1e-12
    assert torch.equal(counters, result.counters)


@pytest.mark.parametrize("name", ["batchnorm", "instancenorm", "used twice", "buffers assigned"])
@pytest.mark.parametrize("batch_size", [None, 8])
def test_chunks_and_single_clients_change_rounding_only(make_federation, name, batch_size):
    module, federation = made(MODULES[name][0]), make_federation(SIZES)
    settings = {"batch_size": batch_size}
    together = trained(module, federation, **settings)[0]
    for most in (1, 2):
        apart = trained(module, federation, chunk_clients=most, **settings)[0]
        assert float((together.theta - apart.theta).abs().max()) < 1e-12
        if together.counters is not None:
            assert torch.equal(together.counters, apart.counters)


@pytest.mark.parametrize("name", ["dropout", "functional dropout", "lstm with dropout", "noise"])
def test_draws_do_not_depend_on_who_is_trained_together(make_federation, name):
    module, federation = made(MODULES[name][0]), make_federation(SIZES)
    together = trained(module, federation)[0]
    assert torch.equal(together.theta, trained(module, federation)[0].theta)
    apart = trained(module, federation, chunk_clients=1)[0]
    assert float((together.theta - apart.theta).abs().max()) < 1e-12


# Refused, with the reason


class NamedOutputs(Body):
    def forward(self, x):
        return super().forward(x), x


class Remembers(Body):
    """A state that is no buffer."""

    def __init__(self):
        super().__init__()
        self.mean = 0.0

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return super().forward(x - self.mean)


class MovesWhenScored(Centres):
    def forward(self, x):
        self.centre.add_(x.detach().mean(0), alpha=0.1)
        return self.last(x - self.centre)


class NoisyScores(Noise):
    always = True


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        return self.last(x)


class ChangesInput(Body):
    def forward(self, x):
        x += 1
        return super().forward(x)


class Flag(Body):
    def __init__(self):
        super().__init__()
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x):
        self.begun |= self.training
        return super().forward(x)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (NamedOutputs, "NamedOutputs returns tuple"),
        (Whole, "'steps' of Whole is torch.int64"),
        (
            lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)),
            "'0.weight' of Sequential has no",
        ),
        (lambda: Body(nn.BatchNorm1d(4, track_running_stats=False)), "Body mixes records"),
        (lambda: from_zero(nn.BatchNorm1d(4, track_running_stats=False)), "Body mixes records"),
        (
            lambda: Centres(assign=True, persistent=False),
            "its buffer 'centre', which is not in its",
        ),
        (lambda: Centres(assign=False, persistent=False), "its buffer 'centre', which is not in"),
        (Flag, "its buffer 'begun', which is not in its state_dict, or no number"),
        (lambda: MovesWhenScored(assign=False), "its buffer 'centre' while it is scored"),
        (Remembers, "Remembers puts out something else when it is called again"),
        (NoisyScores, "NoisyScores draws random numbers while it is scored"),
        (ChangesInput, "ChangesInput changes its input in place"),
        (lambda: nn.Sequential(nn.Linear(4, 1)), "Sequential fails on this federation's records"),
        (lambda: nn.Sequential(nn.Linear(3, 2)), "shape [2, 2] for 2 records; expected [n]"),
    ],
)
def test_a_module_that_can_not_be_trained_rightly_is_refused(make_federation, build, told):
    with pytest.raises(ValueError) as caught:
        Trainer(FedAvg(), make_federation([8, 9]), made(build), eta=0.1)
    assert told in str(caught.value).replace("[1, 2, 2]", "[2, 2]")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_a_module_that_can_not_be_copied_is_refused():
    with pytest.raises(ValueError, match=r"can't be copied .* use the one in .*parametrizations"):
        Objective(nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(3, 1))))


def test_labels_outside_the_classes_are_refused(make_clients):
    clients = make_clients([6, 6], classes=3)
    with pytest.raises(ValueError, match=r"label 2 is outside 0\.\.1"):
        Federation(clients, task="multiclass", n_classes=2)


# Fault 8: frozen layers


@pytest.mark.parametrize("method", [FedAvg(), Local()])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_fault_08_frozen_parameters_stay_to_the_bit_with_every_optimiser(
    make_federation, method, optimizer
):
    module = made(lambda: Body(nn.BatchNorm1d(4)))
    module.first.requires_grad_(False)
    module.middle.weight.requires_grad_(False)
    federation = make_federation(SIZES)
    result = Trainer(method, federation, module, rounds=2, optimizer=optimizer, **SETTINGS).run()
    # 5 of the last layer and 4 of BatchNorm's bias; 8 running statistics.
    assert (result.objective.p, result.objective.width) == (9, 17)
    for state in result.state_dicts().values():
        for name in ("first.weight", "first.bias", "middle.weight"):
            assert torch.equal(state[name], module.state_dict()[name].double())
        assert not torch.equal(state["last.weight"], module.last.weight.double())
