"""Named models: what they are made of, what they take, and that they train."""

import numpy as np
import pytest
import torch
from torch import nn

from fedtopo_torch import Client, Federation, Trainer
from fedtopo_torch.algorithms import FedAvg, Local
from fedtopo_torch.datasets import LabelSkew
from fedtopo_torch.models import CNN, MLP, Linear, Softmax
from fedtopo_torch.objective import Objective, objective_for
from fedtopo_torch.options import OptionError
from fedtopo_torch.registry import models


@pytest.fixture(autouse=True)
def one_thread():
    """As the trainer does: on small tensors a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def federation(shape=(64,), task="multiclass", sizes=(6, 9), classes=3, seed=0, **settings):
    rng = np.random.default_rng(seed)
    clients = []
    for k, n in enumerate(sizes):
        x = rng.normal(size=(2 * n, *shape))
        y = rng.normal(size=2 * n)
        if task != "regression":
            y = np.arange(2 * n) % (2 if task == "binary" else classes)
        clients.append(Client(f"c{k}", (x[:n], y[:n]), (x[n:], y[n:])))
    return Federation(clients, task=task, **settings)


def names(model, fed=None):
    return [name for name, _ in model.build(fed or federation(), 0).named_children()]


def count(module):
    return sum(p.numel() for p in module.parameters())


# What they are made of


def test_an_mlp_by_hand():
    module = MLP(hidden="5,4").build(federation(), 0)
    assert list(dict(module.named_children())) == ["linear1", "act1", "linear2", "act2", "out"]
    # 64 * 5 + 5, 5 * 4 + 4, 4 * 3 + 3
    assert count(module) == 325 + 24 + 15
    assert type(module.act1) is nn.ReLU
    assert module(torch.zeros(7, 64)).shape == (7, 3)


def test_a_width_is_a_number_a_text_or_several():
    for hidden in (5, "5", (5,), [5]):
        assert MLP(hidden=hidden).hidden == (5,)
    assert MLP(hidden="64, 32").hidden == (64, 32)


def test_norm_comes_before_and_dropout_after_the_activation():
    layers = ["linear1", "norm1", "act1", "drop1", "out"]
    assert names(MLP(norm="batch", dropout=0.2)) == layers
    module = MLP(norm="layer", activation="tanh", dropout=0.2, hidden=6).build(federation(), 0)
    assert type(module.norm1) is nn.LayerNorm and type(module.act1) is nn.Tanh
    assert module.drop1.p == 0.2
    assert count(module) == 65 * 6 + 12 + 7 * 3


def test_a_cnn_by_hand():
    module = CNN().build(federation(), 0)
    blocks = ["conv1", "act1", "pool1", "conv2", "act2", "pool2"]
    assert list(dict(module.named_children())) == ["image", *blocks, "flatten", "out"]
    # 16 filters of 1 x 3 x 3, 32 of 16 x 3 x 3, and 32 x 2 x 2 numbers to 3 classes.
    assert count(module) == 160 + 4640 + 387
    # Row by row: the first pixel of the second row is number 8.
    assert module.image(torch.arange(64.0)[None])[0, 0, 1, 0] == 8


@pytest.mark.parametrize(("norm", "kind"), [("batch", nn.BatchNorm2d), ("group", nn.GroupNorm)])
def test_norms_of_a_cnn(norm, kind):
    module = CNN(channels="8,12", norm=norm, dropout=0.1).build(federation(), 0)
    assert type(module.norm1) is type(module.norm2) is kind
    assert type(module.drop) is nn.Dropout
    if norm == "group":
        assert (module.norm1.num_groups, module.norm2.num_groups) == (2, 3)


def test_records_may_have_a_shape():
    assert names(MLP(), federation((2, 4, 5)))[0] == "flatten"
    assert names(CNN(), federation((4, 5)))[0] == "image"
    assert names(CNN(), federation((2, 4, 5)))[0] == "conv1"
    for shape, expected in (((2, 7, 5), 32), ((8, 9), 128)):
        module = CNN().build(federation(shape), 0)
        assert module.out.in_features == expected
        assert module(torch.zeros(3, *shape)).shape == (3, 3)


# What does not fit


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((10,), "a square number of features such as 64 .* have 10 features. Use model mlp"),
        ((9,), "at least 4 x 4 pixels; this federation's have 3 x 3"),
        ((5, 3), "have 5 x 3"),
        ((1, 2, 8, 8), r"records have shape \[1, 2, 8, 8\]"),
    ],
)
def test_a_cnn_needs_images(shape, message):
    with pytest.raises(OptionError, match=message):
        CNN().build(federation(shape), 0)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (MLP, {"hidden": "64,0"}, "one or more whole numbers of at least 1"),
        (MLP, {"hidden": ""}, "one or more whole numbers"),
        (MLP, {"hidden": "a"}, "integer"),
        (MLP, {"hidden": True}, "must not be a bool"),
        (MLP, {"activation": "gelu"}, "'relu' or 'tanh'"),
        (MLP, {"norm": "group"}, "'none', 'batch' or 'layer'"),
        (MLP, {"dropout": 1}, "less than 1"),
        (CNN, {"channels": "16"}, "two numbers"),
        (CNN, {"channels": "16,0"}, "two whole numbers of at least 1"),
        (CNN, {"norm": "layer"}, "'none', 'batch' or 'group'"),
    ],
)
def test_options_that_cannot_be_used(model, options, message):
    with pytest.raises(OptionError, match=message):
        model(**options)


def test_channels_that_make_no_groups():
    with pytest.raises(OptionError, match=r"channels = \(6, 8\) .* multiples of 4"):
        CNN(channels=(6, 8), norm="group").build(federation(), 0)


# They train


MODELS = {
    "mlp": MLP(hidden=5),
    "mlp, tanh, layer": MLP(hidden="5,4", activation="tanh", norm="layer"),
    "mlp, batch": MLP(hidden=5, norm="batch"),
    "mlp, dropout": MLP(hidden=5, dropout=0.3),
    "cnn": CNN(channels=(4, 8)),
    "cnn, group": CNN(channels=(4, 8), norm="group"),
    "cnn, batch": CNN(channels=(4, 8), norm="batch"),
    "cnn, dropout": CNN(channels=(4, 8), norm="batch", dropout=0.3),
}


@pytest.mark.parametrize(
    ("name", "task"),
    [(name, "multiclass") for name in MODELS]
    + [(name, task) for name in ("mlp", "cnn, batch") for task in ("binary", "regression")],
)
def test_models_learn(name, task):
    fed = federation(task=task, sizes=(8, 8))
    settings = {"rounds": 25, "eta": 0.05, "splits": ("train",)}
    with torch.random.fork_rng(devices=[]):
        model = MODELS[name]
        if "dropout" in name:
            with pytest.warns(UserWarning, match="client by client"):
                result = Trainer(FedAvg(), fed, model, **settings).run()
        else:
            result = Trainer(FedAvg(), fed, model, **settings).run()
    metric = "rmse" if task == "regression" else "log_loss"
    losses = result.history.pooled("train", metric)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", [name for name in MODELS if "dropout" not in name])
def test_batched_equals_client_by_client(name, dtype, close):
    fed = federation(sizes=(6, 6, 6), dtype=dtype)
    objective = objective_for(MODELS[name].build(fed, 0), fed.task, 0.01, outputs=3, dtype=dtype)
    objective.check(*fed.train.client(0))
    assert objective.batched, objective.reason
    (data,) = objective.data(fed.train)
    rows = objective.initial().repeat(3, 1)
    rows[:, : objective.p] *= torch.tensor([[0.5], [1.0], [1.5]], dtype=dtype)
    both = objective.gradient(rows, data), objective.loss(rows, data)
    objective.batched = objective._scored_together = False
    apart = objective.gradient(rows, data), objective.loss(rows, data)
    for found, expected in zip(both, apart, strict=True):
        assert float((found - expected).abs().max()) <= close * float(expected.abs().max())


def test_the_start_is_torchs_own_under_the_runs_seed():
    fed = federation()
    first, again, other = (Objective(MLP().build(fed, seed)).initial() for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    # torch draws a linear layer's weights from Uniform(-1/sqrt(in), 1/sqrt(in)).
    weights = first[: 128 * 64]
    assert 0.99 / 8 < float(weights.abs().max()) <= 1 / 8
    assert float(weights.std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.02)


def test_linear_models_keep_their_tasks():
    with pytest.raises(OptionError, match="use logistic or softmax"):
        Linear().build(federation(), 0)
    with pytest.raises(OptionError, match="use model logistic"):
        Softmax().build(federation(task="binary"), 0)


def test_all_models_are_listed():
    assert {"cnn", "linear", "logistic", "mlp", "softmax"} <= set(models)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:label_skew")
def test_digits_right_values():
    """FedAvg on skewed digits: 10 clients, batches of 32, 10 steps of 0.1 in each of 50 rounds."""
    scores = []
    for seed in range(3):
        fed = LabelSkew(base="digits", alpha=0.3, dtype="float32").load(seed)
        settings = {"rounds": 50, "batch_size": 32, "eta": 0.1, "eval_every": 50, "seed": seed}
        settings |= {"splits": ("test",), "metrics": ("accuracy",)}
        runs = [Trainer(m, fed, MLP(hidden=128), **settings).run() for m in (FedAvg(), Local())]
        scores.append([run.history.last("test", "accuracy").pooled for run in runs])
    fedavg, local = np.mean(scores, axis=0)
    assert fedavg >= 0.945
    assert fedavg > local
