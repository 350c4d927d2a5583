"""Settings chosen per method on validation records, with one budget for all."""

import csv
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from fedtopo_torch.cli import app
from fedtopo_torch.comparison import Comparison, Spread, compare
from fedtopo_torch.datasets import LabelSkew, Synthetic
from fedtopo_torch.execution import execute
from fedtopo_torch.options import OptionError
from fedtopo_torch.plan import Job, Plan
from fedtopo_torch.tables import comparison_tables, tuning_table
from fedtopo_torch.trainer import Trainer
from fedtopo_torch.training import Training
from fedtopo_torch.tuning import candidates, parse_tune

DATA = ("synthetic", {"n_clients": 3, "n_features": 4, "ranks": (1, 3), "validation_size": 0.3})
TINY = {"rounds": 3, "local_steps": 2, "processes": 1}


# Validation records


def test_validation_records_come_out_of_the_training_records():
    whole, parted = (Synthetic(validation_size=v).load(0) for v in (0.0, 0.25))
    assert int(whole.validation.n.sum()) == 0
    assert (parted.train.n + parted.validation.n).tolist() == whole.train.n.tolist()
    assert parted.test.n.tolist() == whole.test.n.tolist()
    for k, n in enumerate(whole.train.n.tolist()):
        assert int(parted.validation.n[k]) == math.ceil(0.25 * n)
        raw = {tuple(row) for row in whole.clouds[k].tolist()}
        kept = {tuple(row) for row in parted.clouds[k].tolist()}
        assert kept < raw  # nothing new, and fewer


def test_validation_records_never_enter_moments():
    parted = LabelSkew(validation_size=0.4).load(1)
    pooled = np.concatenate(parted.clouds)
    np.testing.assert_allclose(parted.moments.mean, pooled.mean(0), atol=1e-12)
    np.testing.assert_allclose(parted.moments.std, pooled.std(0), atol=1e-12)


def test_a_client_of_one_record_keeps_it_for_training():
    federation = LabelSkew(
        base="breast_cancer", partition="dirichlet", alpha=0.05, validation_size=0.9, n_clients=8
    ).load(0)
    assert int(federation.train.n.min()) >= 1


# Candidates


def test_every_combination_is_a_candidate():
    found = candidates(Training(), {"eta": ["0.1", "0.2"], "batch_size": ["8", "none"]})
    assert found == [
        {"eta": 0.1, "batch_size": 8},
        {"eta": 0.1, "batch_size": None},
        {"eta": 0.2, "batch_size": 8},
        {"eta": 0.2, "batch_size": None},
    ]


@pytest.mark.parametrize(
    ("tune", "told"),
    [
        ({"mu": [0.1]}, "'mu' can't be tuned: settings of training can"),
        ({"etaa": [0.1]}, "Did you mean 'eta'"),
        ({"rounds": [10, 20]}, "'rounds' can't be tuned"),
        ({"eta": [0.1, -1]}, "option eta"),
        ({"eta": [0.1, "0.10"]}, "eta=0.1 is to be tried twice"),
        ({"eta": []}, "no value of eta"),
        ({"eta": [0.1 * k for k in range(1, 21)], "l2": range(11)}, "more than 200"),
    ],
)
def test_what_cannot_be_tuned(tune, told):
    with pytest.raises(OptionError, match=told):
        candidates(Training(), tune)


def test_entries_of_the_command_line():
    assert parse_tune(["eta=0.1, 0.2", "batch-size=8"]) == {
        "eta": ["0.1", "0.2"],
        "batch_size": ["8"],
    }
    for entry in ("eta", "eta=", "=0.1", "eta=,"):
        with pytest.raises(OptionError, match="NAME=VALUE"):
            parse_tune([entry])
    with pytest.raises(OptionError, match="twice"):
        parse_tune(["eta=0.1", "eta=0.2"])


# The choice


@pytest.fixture(scope="module")
def tuned() -> Comparison:
    return compare(["fedavg", "local"], [DATA], 2, tune={"eta": [1e-4, 0.3, 0.01]}, **TINY)


def test_the_lowest_mean_validation_loss_is_taken(tuned):
    label = tuned.plan.datasets[0].label
    for method in tuned.plan.methods:
        means = []
        for eta in (1e-4, 0.3, 0.01):
            losses = []
            for seed in (0, 1):
                federation = Synthetic(**DATA[1]).load(seed)
                result = Trainer(
                    method.instance,
                    federation,
                    _logistic(),
                    rounds=3,
                    local_steps=2,
                    eta=eta,
                    seed=seed,
                    splits=("validation",),
                ).run()
                losses.append(result.history.last("validation").pooled)
            means.append(np.mean(losses))
        found = tuned.tuning.methods[label, method.label]
        np.testing.assert_allclose([s.mean for s in found.losses], means, atol=1e-12)
        assert found.chosen == int(np.argmin(means))
        assert {run.eta for run in tuned.of(label, method.label)} == {
            (1e-4, 0.3, 0.01)[found.chosen]
        }


def _logistic():
    from fedtopo_torch.models.logistic import Logistic

    return Logistic()


def test_runs_are_those_of_the_chosen_setting_alone(tuned):
    label = tuned.plan.datasets[0].label
    chosen = tuned.tuning.candidates[tuned.tuning.methods[label, "FedAvg"].chosen]["eta"]
    fixed = compare(["fedavg"], [DATA], 2, eta=chosen, **TINY)
    assert tuned.values(label, "FedAvg").tolist() == fixed.values(label, "FedAvg").tolist()


def test_test_records_take_no_part_in_the_choice():
    # Test labels that are all wrong change no choice.
    plan = Plan.of(["fedavg"], [DATA], 1, rounds=2, local_steps=2)
    job = plan.jobs()[0]
    run = execute(
        [Job(job.dataset, job.method, 0, None, job.training, validated=True)], processes=1
    ).run(Job(job.dataset, job.method, 0, None, job.training, validated=True))
    assert {key.split(" ")[0] for key in run.pooled} == {"train", "test", "validation"}
    assert run.n["validation"] == tuple(Synthetic(**DATA[1]).load(0).validation.n.tolist())


def test_a_setting_that_diverges_is_not_taken():
    found = compare(["fedavg"], [DATA], 1, tune={"eta": [1e9, 0.1]}, **TINY)
    (tuned,) = found.tuning.methods.values()
    assert tuned.losses[0] == Spread(pytest.approx(math.nan, nan_ok=True), tuned.losses[0].std, 0)
    assert tuned.chosen == 1 and not found.failures


def test_where_every_setting_fails_the_reason_is_shown():
    found = compare(["fedavg"], [DATA], 1, tune={"eta": [1e9]}, **TINY)
    (tuned,) = found.tuning.methods.values()
    assert tuned.chosen is None
    assert "diverged" in found.failures[0].error


def test_a_federation_without_validation_records_says_what_to_give():
    found = compare(["fedavg"], ["synthetic"], 1, tune={"eta": [0.1]}, **TINY)
    assert "validation_size" in found.failures[0].error


def test_the_table_says_what_was_tried_and_taken(tuned):
    label = tuned.plan.datasets[0].label
    table = tuning_table(tuned, label)
    assert [column.title for column in table.columns] == [
        "method",
        "eta=0.0001",
        "eta=0.3",
        "eta=0.01",
        "chosen",
    ]
    for row in table.rows:
        (bold,) = [j for j, cell in enumerate(row) if cell.bold]
        assert row[-1].text == table.columns[bold].title
    assert "same 3 candidates" in table.notes[0]
    assert any("tuned on validation" in t.title for t in comparison_tables(tuned))
    with pytest.raises(ValueError, match="nothing was tuned"):
        tuning_table(compare(["local"], [DATA], 1, **TINY), label)


def test_the_command_keeps_a_fifth_for_validation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--set", "n_clients=3", "--rounds", "2", "--seeds", "1", "--processes", "1"]
    command = ["compare", "--dataset", "synthetic", "--algos", "local,fedavg", *options]
    done = CliRunner().invoke(app, [*command, "--tune", "eta=0.05,0.2", "--name", "t"])
    assert done.exit_code == 0, done.output
    assert "tuned on validation records" in " ".join(done.output.split())
    with (tmp_path / "runs/t/results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert "validation_size=0.2" in rows[0]["dataset"]
    wrong = CliRunner().invoke(app, [*command, "--tune", "mu=0.1", "--name", "u"])
    assert wrong.exit_code == 2 and not (tmp_path / "runs/u").exists()
