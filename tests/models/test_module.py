"""Modules of a user's own file as models."""

import shutil

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fedtopo_torch import train
from fedtopo_torch.cli import app
from fedtopo_torch.comparison import compare
from fedtopo_torch.models import MLP, Model
from fedtopo_torch.models.module import module_model
from fedtopo_torch.options import OptionError
from fedtopo_torch.plan import Choice, Plan
from fedtopo_torch.registry import UnknownName, models

NET = '''
import torch
from torch import nn

from fedtopo_torch.models import Model


class Net(nn.Module):
    """One hidden layer."""

    def __init__(self, in_features, outputs, hidden=4):
        super().__init__()
        self.hidden = nn.Linear(in_features, hidden)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))


class Fixed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(10, 1))


class Shaped(nn.Module):
    def __init__(self, *, in_shape, outputs=7):
        super().__init__()
        self.shape, self.outputs = in_shape, outputs


class Needy(nn.Module):
    def __init__(self, width, depth):
        super().__init__()


class Broken(nn.Module):
    def __init__(self, in_features):
        raise RuntimeError("no weights today")


class Tuned(Model):
    """Options of its own."""

    hidden: int = 3

    def module(self, federation):
        return Net(federation.feature_shape[0], federation.outputs, self.hidden)
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "_loaded", {})
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


def build(name, federation, seed=0):
    return models[name]().build(federation, seed)


def test_a_constructor_gets_what_it_names(file, make_federation):
    two, four = make_federation([5, 5]), make_federation([5, 5], d=6, classes=4)
    net = build("net.py:Net", two)
    assert (net.hidden.in_features, net.hidden.out_features, net.out.out_features) == (3, 4, 1)
    net = build("net.py:Net", four)
    assert (net.hidden.in_features, net.out.out_features) == (6, 4)
    shaped = build("net.py:Shaped", four)
    assert (shaped.shape, shaped.outputs) == ((6,), 4)
    assert isinstance(build(f"{file}:Fixed", two), nn.Sequential)


def test_the_start_is_the_runs_seed(file, make_federation):
    federation = make_federation([5, 5])
    first, again, other = (build("net.py:Net", federation, seed) for seed in (1, 1, 2))
    assert torch.equal(first.hidden.weight, again.hidden.weight)
    assert not torch.equal(first.hidden.weight, other.hidden.weight)


def test_a_model_of_a_file_has_options(file, make_federation):
    tuned = models["net.py:Tuned"](hidden=2)
    assert isinstance(tuned, Model)
    assert tuned.build(make_federation([5, 5]), 0).hidden.out_features == 2
    with pytest.raises(OptionError, match=r"no option 'hiden'. Did you mean 'hidden'"):
        models["net.py:Tuned"](hiden=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("net.py:Nope", "no model called 'Nope': needed is a class .*torch's Module.*there: Net"),
        ("net.py", "a class in a file is net.py:ClassName"),
        ("other.py:Net", "there is no file other.py"),
    ],
)
def test_names_that_lead_nowhere(file, name, message):
    with pytest.raises(UnknownName, match=message):
        models[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Needy", "Needy.__init__ needs width and depth: give defaults .* in_features, in_shape"),
        ("Broken", r"records of shape \[3\] and 1 output.s.: RuntimeError: no weights today"),
    ],
)
def test_modules_that_can_not_be_built_say_what_is_needed(file, make_federation, name, message):
    with pytest.raises(OptionError, match=message):
        build(f"net.py:{name}", make_federation([5, 5]))


def test_the_same_class_makes_the_same_model(file):
    assert models["net.py:Net"] is models["net.py:Net"]
    assert module_model(nn.Identity, "a") is module_model(nn.Identity, "a")
    assert models["net.py:Net"]().name == "net.py:Net"
    assert "One hidden layer" in models["net.py:Net"].__doc__


def test_training_by_name_is_training_the_module(file):
    by_name = train("fedavg", model="net.py:Net", rounds=2, eta=0.1)
    federation = by_name.federation
    by_hand = train("fedavg", federation, build("net.py:Net", federation), rounds=2, eta=0.1)
    assert torch.equal(by_name.theta, by_hand.theta)


def test_a_plan_knows_the_file_by_its_content(file):
    def key():
        plan = Plan.of("fedavg", model="net.py:Net", seeds=1, eta=0.1)
        (job,) = plan.jobs()
        return job.key("data")

    first = key()
    assert key() == first
    models._loaded.clear()
    file.write_text(NET.replace("hidden=4", "hidden=5"))
    assert key() != first


def test_a_choice_of_an_instance_travels_by_the_full_name(file):
    choice = Choice.of("model", models["net.py:Net"]())
    assert choice.reference() == ("name", "net.py:Net")


def test_worker_processes_find_the_module(file):
    runs = [
        compare("fedavg", seeds=2, model="net.py:Net", rounds=2, eta=0.1, processes=count).runs
        for count in (1, 2)
    ]
    assert not any(run.error for run in runs[0])
    assert runs[0] == runs[1]
    assert runs[0][0].parameters == 10 * 4 + 4 + 4 + 1


def test_from_the_command_line(file):
    arguments = ["train", "--model", "net.py:Net", "--eta", "0.1", "--rounds", "2"]
    result = CliRunner().invoke(app, [*arguments, "--no-references", "--no-tensorboard"])
    assert result.exit_code == 0, result.output
    (folder,) = [f for f in (file.parent / "runs").iterdir() if not f.name.startswith(".")]
    assert '"name": "net.py:Net"' in (folder / "config.json").read_text()
    shutil.rmtree(folder)
    arguments[2] = "net.py:Tuned"
    arguments += ["--set", "hidden=2", "--no-references", "--no-tensorboard"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    states = torch.load(folder / "models.pt", weights_only=True)
    assert states["Hungary"]["hidden.weight"].shape == (2, 10)


def test_bad_usage_exits_2(file):
    for model in ("net.py:Needy", "net.py:Nope", "cnn"):
        result = CliRunner().invoke(app, ["train", "--model", model, "--eta", "0.1"])
        assert result.exit_code == 2
        assert "Traceback" not in result.output


def test_describe_tells_of_models(file):
    for name, text in (("mlp", "linear1, norm1, act1"), ("net.py:Net", "One hidden layer")):
        result = CliRunner().invoke(app, ["describe", name])
        assert result.exit_code == 0
        assert text in result.output
    assert MLP.option_lines()[0][:2] == ("hidden", "128")
