"""The command line as a user meets it: exit codes, messages, files."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fedtopo_torch import monitor, train
from fedtopo_torch.cli import app
from fedtopo_torch.registry import algorithms

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["train", "--rounds", "3", "--no-tensorboard"]
FOLDER = Path("runs/ptopofl-fed_heart_disease-seed0")


@pytest.fixture
def fedtopo(tmp_path, monkeypatch):
    """Run the command line in an empty workspace; returns click's result."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(app, [*args], catch_exceptions=False)


def said(result) -> str:
    """All that was printed, without the line breaks of a narrow terminal."""
    return " ".join(result.output.replace("│", " ").split())


def long_table(folder) -> list[dict]:
    return list(csv.DictReader((folder / "results.csv").read_text().splitlines()))


def test_train_writes_everything_and_shows_it(fedtopo):
    result = fedtopo("train", "--rounds", "3")
    assert result.exit_code == 0, said(result)
    text = said(result)
    for piece in (
        "Cleveland",
        "Switzerland",
        "gain over FedAvg",
        "gain over Local",
        "descriptor 46",
    ):
        assert piece in text
    assert "Reproducibility" in text and "Stability radius" in text and "chol is 0" in text
    assert {p.name for p in FOLDER.iterdir()} == {
        *("results.csv", "results.json", "config.json", "models.pt"),
        *("ptopofl", "fedavg", "local"),
    }
    rows = long_table(FOLDER)
    assert list(rows[0]) == [
        *("algorithm", "seed", "round", "client", "split", "model", "metric", "value", "n")
    ]
    content = json.loads((FOLDER / "results.json").read_text())
    assert content["sent_per_client"]["introduction"]["up"] == [46, 0]
    assert [r["algorithm"] for r in content["references"]] == ["fedavg", "local"]
    last = [r for r in rows if r["algorithm"] == "ptopofl" and r["round"] == "3"]
    pooled = [
        r
        for r in last
        if (r["client"], r["split"], r["metric"]) == ("(pooled)", "test", "log_loss")
    ]
    assert [float(r["value"]) for r in pooled] == [content["scores"]["test"]["log_loss"]["pooled"]]
    assert [r["n"] for r in pooled] == ["277"]


def test_models_load_into_the_plain_module_and_score_as_the_table_says(fedtopo):
    assert fedtopo(*SHORT).exit_code == 0
    models = torch.load(FOLDER / "models.pt", weights_only=True)
    config = json.loads((FOLDER / "config.json").read_text())
    content = json.loads((FOLDER / "results.json").read_text())
    assert list(models) == config["clients"]
    federation = train("local", rounds=1).federation
    for i, (client, state) in enumerate(models.items()):
        module = nn.Linear(10, 1, dtype=torch.float64)
        module.load_state_dict(state)
        x, y = federation.test.client(i)
        with torch.no_grad():
            loss = nn.functional.binary_cross_entropy_with_logits(module(x)[:, 0], y)
        reported = content["scores"]["test"]["log_loss"]["clients"][client]
        assert float(loss) == pytest.approx(reported, abs=1e-12)


def test_a_rerun_gives_the_same_bytes(fedtopo):
    assert fedtopo(*SHORT).exit_code == 0
    assert fedtopo(*SHORT, "--name", "again").exit_code == 0
    for name in ("results.csv", "results.json", "config.json"):
        assert (FOLDER / name).read_bytes() == Path("runs/again", name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algo", "ptopofi"], "Did you mean 'ptopofl'?"),
        (["--dataset", "heart"], "no dataset called 'heart'"),
        (["--model", "logisitc"], "Did you mean 'logistic'?"),
        (["--set", "abr=0.3"], "Did you mean 'abar'?"),
        (["--set", "abar"], "NAME=VALUE"),
        (["--set", "abar=0.3", "--set", "abar=0.4"], "given twice"),
        (["--set", "abar=nan"], "abar"),
        (["--set", "abar=inf"], "abar"),
        (["--set", "abar=1.5"], "less than or equal to 1"),
        (["--set", "n_clusters=0"], "n_clusters"),
        (["--set", "n_clusters=9"], "n_clusters = 9, but there are only 4 clients"),
        (["--set", "trust=some"], "trust"),
        (["--eta", "nan"], "neither 'auto' nor a finite number above 0"),
        (["--eta", "-1"], "neither 'auto' nor a finite number above 0"),
        (["--l2", "inf"], "not a finite number"),
        (["--l2", "nan"], "not a finite number"),
        (["--l2", "-1"], "x>=0"),
        (["--rounds", "0"], "x>=1"),
        (["--rounds", "1.5"], "not a valid integer"),
        (["--local-steps", "0"], "x>=1"),
        (["--seed", "-1"], "-1"),
        (["--name", "../elsewhere"], "can't name a run"),
        (["--name", ""], "can't name a run"),
        (["--model", "softmax"], "use model logistic"),
        (["--nonsense"], "No such option"),
    ],
)
def test_fault_31_bad_usage_exits_2_and_leaves_nothing(fedtopo, arguments, message):
    result = fedtopo(*SHORT, *arguments)
    assert result.exit_code == 2, said(result)
    assert message in said(result)
    assert "Traceback" not in said(result)
    assert not Path("runs").exists() or not any(Path("runs").iterdir())


def test_an_existing_run_is_refused_and_kept(fedtopo):
    assert fedtopo(*SHORT).exit_code == 0
    before = (FOLDER / "results.csv").read_bytes()
    result = fedtopo(*SHORT, "--set", "abar=0.9")
    assert result.exit_code == 2
    assert "--overwrite" in said(result)
    assert (FOLDER / "results.csv").read_bytes() == before
    assert fedtopo(*SHORT, "--set", "abar=0.9", "--overwrite").exit_code == 0
    assert (FOLDER / "results.csv").read_bytes() != before
    assert [p.name for p in Path("runs").iterdir()] == [FOLDER.name]


def test_overwriting_with_what_can_not_run_keeps_the_old_run(fedtopo):
    assert fedtopo(*SHORT).exit_code == 0
    before = (FOLDER / "results.csv").read_bytes()
    for bad in (["--eta", "1e300"], ["--set", "n_clusters=9"], ["--set", "abar=7"]):
        assert fedtopo(*SHORT, "--overwrite", *bad).exit_code in (1, 2)
        assert (FOLDER / "results.csv").read_bytes() == before
        assert [p.name for p in Path("runs").iterdir()] == [FOLDER.name]


def test_a_folder_that_is_no_run_is_never_overwritten(fedtopo):
    FOLDER.mkdir(parents=True)
    (FOLDER / "thesis.txt").write_text("years of work")
    result = fedtopo(*SHORT, "--overwrite")
    assert result.exit_code == 2
    assert "not a run" in said(result)
    assert (FOLDER / "thesis.txt").read_text() == "years of work"


def test_an_unwritable_place_exits_1(fedtopo):
    Path("file").write_text("")
    result = fedtopo(*SHORT, "--runs-dir", "file/runs")
    assert result.exit_code == 1
    assert "can't write" in said(result) and "--runs-dir" in said(result)


def test_fault_28_divergence_exits_1_and_keeps_the_rounds_before(fedtopo):
    result = fedtopo("train", "--rounds", "30", "--eta", "205", "--no-tensorboard")
    assert result.exit_code == 1
    assert "pTopoFL diverged in round" in said(result) and "at client '" in said(result)
    assert str(FOLDER) in said(result)
    rows = long_table(FOLDER)
    assert max(int(r["round"]) for r in rows) > 1
    assert not any(r["value"] in ("nan", "inf") for r in rows if r["metric"] == "log_loss")


def test_debug_shows_the_traceback(fedtopo):
    with pytest.raises(ValueError, match="no option"):
        fedtopo(*SHORT, "--set", "abr=1", "--debug")


def interrupt_at(monkeypatch, method, stop):
    original = monitor.Progress.evaluated

    def evaluated(self, round, scores):
        original(self, round, scores)
        if self._name == method and round == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(monitor.Progress, "evaluated", evaluated)


@pytest.mark.parametrize(
    ("method", "kept"), [("pTopoFL", {"ptopofl"}), ("FedAvg", {"ptopofl", "fedavg"})]
)
def test_ctrl_c_keeps_what_is_done(fedtopo, monkeypatch, method, kept):
    interrupt_at(monkeypatch, method, 2)
    result = fedtopo("train", "--rounds", "9", "--no-tensorboard")
    assert result.exit_code == 130
    assert f"Stopped {method} after round" in said(result) and str(FOLDER) in said(result)
    rows = long_table(FOLDER)
    assert {r["algorithm"] for r in rows} == kept
    assert (FOLDER / "models.pt").is_file()


@pytest.mark.slow
def test_ctrl_c_in_a_real_process(tmp_path):
    command = [sys.executable, "-m", "fedtopo_torch", "train", "--rounds", "1000000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, "--no-tensorboard"],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A test run in the background may have SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 120
        # The run has a hidden folder until it has something to show.
        while not list(tmp_path.glob("runs/.*/config.json")):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(2)  # some rounds, however slow the machine: each takes under a millisecond
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, text
    assert "Traceback" not in text
    assert (tmp_path / FOLDER / "results.csv").stat().st_size > 100


def test_list_shows_everything_and_the_options_of_one(fedtopo):
    result = fedtopo("list")
    assert result.exit_code == 0
    for name in ("ptopofl", "fedavg", "local", "clustered", "fed_heart_disease", "synthetic"):
        assert name in result.stdout
    one = said(fedtopo("describe", "ptopofl"))
    for piece in ("abar", "0.3", "number >= 0, <= 1", "whole number >= 1 or auto", "theta [p]"):
        assert piece in one
    assert "descriptor [46]" in one and "descriptor [K x 46]" in one
    assert "control [p]" in said(fedtopo("describe", "scaffold"))
    assert "regime" in said(fedtopo("describe", "synthetic"))
    missing = fedtopo("describe", "ptopof")
    assert missing.exit_code == 2 and "Did you mean 'ptopofl'?" in said(missing)


def test_options_reach_method_dataset_and_model(fedtopo):
    result = fedtopo(
        *SHORT,
        "--dataset",
        "synthetic",
        "--set",
        "n_clients=5",
        "--set",
        "algo.abar=0",
        "--set",
        "regime=tails",
        "--no-references",
    )
    assert result.exit_code == 0, said(result)
    config = json.loads(Path("runs/ptopofl-synthetic-seed0/config.json").read_text())
    assert config["algorithm"]["abar"] == 0 and config["dataset"]["regime"] == "tails"
    assert len(config["clients"]) == 5


def test_the_worked_example_runs_and_momentum_0_is_fedavg(fedtopo):
    shutil.copytree(ROOT / "algorithms", "algorithms")
    assert fedtopo(*SHORT, "--algo", "fedavgm", "--set", "beta=0").exit_code == 0
    rows = long_table(Path("runs/fedavgm-fed_heart_disease-seed0"))

    def values(name):
        return [float(r["value"]) for r in rows if r["algorithm"] == name]

    assert values("fedavgm") == pytest.approx(values("fedavg"), abs=1e-12)
    plain = algorithms["fedavgm"](beta=0.5)
    moved = train(plain, rounds=40).history.pooled()
    assert moved[1] != pytest.approx(train("fedavg", rounds=2).history.pooled()[1], abs=1e-6)
    assert moved[-1] == pytest.approx(train("fedavg", rounds=150).history.pooled()[-1], abs=1e-6)


def test_a_method_file_that_fails_says_why(fedtopo):
    Path("algorithms").mkdir()
    Path("algorithms/broken.py").write_text("import torch\n\nx = 1 / 0\n")
    result = fedtopo(*SHORT, "--algo", "broken")
    assert result.exit_code == 2
    assert "algorithms/broken.py, line 3" in said(result) and "ZeroDivisionError" in said(result)


def test_both_ways_to_start_it(tmp_path):
    for command in (["-m", "fedtopo_torch"], [str(ROOT / "cli.py")]):
        done = subprocess.run(
            [sys.executable, *command, "--help"],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0 and "train" in done.stdout


QUICK = ["compare", "--rounds", "4", "--algos", "local,fedavg,ptopofl", "--seeds", "2"]


def test_compare_prints_and_writes_and_goes_on(fedtopo):
    result = fedtopo(*QUICK, "--processes", "1")
    assert result.exit_code == 0, said(result)
    text = said(result)
    for piece in ("pTopoFL", "beside the paper's Table 1", "6 runs", "46"):
        assert piece in text
    # Two seeds can't show significance: it is said, not marked.
    assert "at least 6" in text or "fewer than 6" in text
    folder = Path("runs/compare-fed_heart_disease")
    names = {p.name for p in folder.iterdir()}
    assert {"results.csv", "tables.md", "tables.tex", "tables.json", "parts"} <= names
    assert {"curves-fed-heart-disease.png", "clients-fed-heart-disease.svg"} <= names
    rows = long_table(folder)
    assert {(r["algorithm"], r["seed"]) for r in rows} == {
        (a, s) for a in ("Local", "FedAvg", "pTopoFL") for s in ("0", "1")
    }
    before = (folder / "results.csv").read_bytes()
    again = fedtopo(*QUICK, "--processes", "1")
    assert "6 of them taken from before" in said(again)
    assert (folder / "results.csv").read_bytes() == before
    more = fedtopo(*QUICK[:-1], "3", "--processes", "1")
    assert "9 runs" in said(more) and "6 of them taken from before" in said(more)


def test_compare_equals_train(fedtopo):
    assert fedtopo(*QUICK, "--processes", "1").exit_code == 0
    rows = long_table(Path("runs/compare-fed_heart_disease"))
    pooled = {
        (r["algorithm"], r["seed"]): float(r["value"])
        for r in rows
        if (r["client"], r["split"], r["metric"]) == ("(pooled)", "test", "log_loss")
    }
    for seed in (0, 1):
        expected = train("ptopofl", seed=seed, rounds=4).history.last().pooled
        assert pooled["pTopoFL", str(seed)] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0,1,1"], "given more than once"),
        (["--seeds", "x"], "must be how many, or which"),
        (["--algos", "fedavg,fedvag"], "Did you mean 'fedavg'?"),
        (["--algos", "fedavg,fedavg"], "listed 2 times"),
        (["--set", "abr=1"], "Did you mean 'abar'?"),
        (["--set", "fedavg.abar=1"], "no option 'fedavg.abar'"),
        (["--reference", "ditto"], "ditto"),
        (["--name", "a/b"], "can't name a run"),
        (["--eta", "0"], "above 0"),
    ],
)
def test_compare_refuses_bad_usage(fedtopo, arguments, message):
    result = fedtopo(*QUICK, "--processes", "1", *arguments)
    assert result.exit_code == 2, said(result)
    assert message in said(result)


def test_compare_options_of_one_method_and_of_all(fedtopo):
    arguments = [*QUICK, "--dataset", "synthetic", "--processes", "1", "--seeds", "1"]
    options = ["--set", "n_clients=4", "--set", "ptopofl.abar=1", "--name", "x"]
    assert fedtopo(*arguments, *options).exit_code == 0
    rows = long_table(Path("runs/x"))
    assert len({r["client"] for r in rows}) == 5


def test_compare_your_own_folder_and_a_failed_method(fedtopo):
    shutil.copytree(ROOT / "datasets", "datasets")
    Path("algorithms").mkdir()
    Path("algorithms/fails.py").write_text(
        "from fedtopo_torch.algorithms import FedAvg\n\n\n"
        'class Fails(FedAvg):\n    """Never works."""\n\n'
        "    def broadcast(self, server, clients):\n        raise RuntimeError('no signal')\n"
    )
    result = fedtopo(
        *QUICK[:4],
        "fedavg,fails",
        "--dataset",
        "three_clinics",
        "--target",
        "readmitted",
        "--seeds",
        "2",
        "--processes",
        "2",
    )
    assert result.exit_code == 1
    assert "no signal" in said(result) and "FedAvg" in said(result)


def test_inspect_and_new_workspace(fedtopo):
    assert fedtopo("new-workspace", "mine").exit_code == 0
    result = fedtopo("inspect", "mine/datasets/three_clinics", "--target", "readmitted")
    assert result.exit_code == 0
    for piece in ("hillside", "crp", "numeric", "categorical", "58"):
        assert piece in said(result)
    assert fedtopo("inspect", "mine/datasets/three_clinics").exit_code == 2
    assert fedtopo("new-workspace", "mine").exit_code == 2


def test_diagnose_says_that_chol_carries_the_partition(fedtopo):
    result = fedtopo("diagnose")
    assert result.exit_code == 0, said(result)
    text = said(result)
    for piece in (
        "diagnose step 19/19",
        "n_clusters=auto takes M = 2",
        "chol carries the partition into 2 clusters, {Cleveland, Hungary, VA Long Beach} | "
        "{Switzerland}: without it",
        "In standardised units the clusters are",
        "Switzerland. A flag marks unusual data, not dishonesty",
        "chol is 0 for every Swiss patient",
        "Cluster, with M = 2:",
        "the evidence is thin (4 clients)",
    ):
        assert piece in text
    folder = Path("runs/diagnose-fed_heart_disease")
    assert {"report.md", "tables.json", "distances.svg", "persistence.png"} <= {
        path.name for path in folder.iterdir()
    }
    (columns,) = folder.glob("table-what-the-distances*.csv")
    rows = {row["column"]: row for row in csv.DictReader(columns.read_text().splitlines())}
    assert "Switzerland | " not in rows["sex"]["clusters"] and float(rows["sex"]["agreement"]) == 1
    for without in ("chol", "all columns, standardised"):
        assert "Switzerland" not in rows[without]["clusters"].split(" | ")


SMALL = ["--pilot-rounds", "2", "--hold-outs", "2", "--set", "repeats=1"]


def test_diagnose_your_own_files_and_again(fedtopo):
    shutil.copytree(ROOT / "datasets", "datasets")
    target = ["--target", "readmitted"]
    by_folder = fedtopo("diagnose", "datasets/three_clinics", *target, *SMALL)
    assert by_folder.exit_code == 0, said(by_folder)
    assert "left out together" in said(by_folder) and "3 clients" in said(by_folder)
    report = Path("runs/diagnose-three_clinics/report.md")
    before = report.read_text()
    by_name = fedtopo("diagnose", "--dataset", "three_clinics", *target, *SMALL)
    assert by_name.exit_code == 0 and report.read_text() == before
    other = fedtopo("diagnose", "datasets/three_clinics", *target, *SMALL, "--set", "scale=pooled")
    assert other.exit_code == 0 and "all columns, own units" in report.read_text()


def test_diagnose_cuts_long_tables_on_the_terminal_only(fedtopo):
    result = fedtopo(
        *("diagnose", "--dataset", "synthetic", "--set", "n_clients=22", *SMALL),
        *("--set", "n_features=2", "--set", "regime=concept", "--set", "n_train_min=20"),
        *("--set", "n_train_max=20"),
    )
    assert result.exit_code == 0, said(result)
    assert "client_19" in said(result) and "client_21" not in said(result)
    assert "The first 20 of 22 clients; the files have them all" in said(result)
    clients = Path("runs/diagnose-synthetic/table-clients-and-their-descriptors.csv")
    assert len(clients.read_text().splitlines()) == 23


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--target", "x"], "there is no folder or file nowhere"),
        (["nowhere", "--dataset", "synthetic"], "not both"),
        (["--dataset", "heart"], "no dataset called 'heart'"),
        (["--set", "linkag=ward"], "Did you mean 'linkage'?"),
        (["--pilot-rounds", "0"], "x>=1"),
        (["--hold-outs", "1"], "x>=2"),
        (["--name", "../x"], "can't name a run"),
        (["--name", "thesis"], "is not a diagnosis"),
        (["--set", "n_clusters=4", "--set", "repeats=1"], "here: 2, 3"),
    ],
)
def test_diagnose_refuses_bad_usage(fedtopo, arguments, message):
    Path("runs/thesis").mkdir(parents=True)
    result = fedtopo("diagnose", *arguments)
    assert result.exit_code == 2, said(result)
    assert message in said(result)
    assert [path.name for path in Path("runs").iterdir()] == ["thesis"]
    assert not any(Path("runs/thesis").iterdir())


def test_diagnose_stopped_by_ctrl_c_leaves_nothing(fedtopo, monkeypatch):
    def stop(self, done, total, last):
        raise KeyboardInterrupt

    monkeypatch.setattr(monitor.Counter, "__call__", stop)
    result = fedtopo("diagnose")
    assert result.exit_code == 130 and "nothing was written" in said(result)
    assert not Path("runs").exists()


KEPT = ["train", "--dataset", "synthetic", "--algo", "fedavg", "--no-references", "--name", "r"]
KEPT += ["--set", "n_clients=3", "--no-tensorboard"]


def test_resume_goes_on_and_never_starts_or_replaces_by_surprise(fedtopo):
    assert fedtopo(*KEPT, "--rounds", "2").exit_code == 0
    before = Path("runs/r/results.csv").read_bytes()
    done = fedtopo(*KEPT, "--rounds", "4", "--resume")
    assert done.exit_code == 2 and "no state of a run 'r' is kept" in said(done)
    assert Path("runs/r/results.csv").read_bytes() == before
    keep = ["--checkpoint-every", "1"]
    assert fedtopo(*KEPT, "--rounds", "2", *keep, "--overwrite").exit_code == 0
    done = fedtopo(*KEPT, "--rounds", "4", "--resume", "--overwrite")
    assert done.exit_code == 2 and "give one" in said(done)
    assert fedtopo(*KEPT, "--rounds", "4", "--resume").exit_code == 0
    straight = [*KEPT[:-4], "straight", *KEPT[-3:]]
    assert fedtopo(*straight, "--rounds", "4").exit_code == 0
    results = Path("runs/straight/results.csv").read_bytes()
    assert Path("runs/r/results.csv").read_bytes() == results
    # A replaced run's state goes with it.
    assert fedtopo(*KEPT, "--rounds", "2", "--overwrite").exit_code == 0
    assert not Path("runs/r.checkpoint").exists()


def test_a_setting_given_twice_is_refused(fedtopo):
    done = fedtopo(*KEPT, "--batch-size", "7", "--set", "batch_size=8")
    assert done.exit_code == 2 and "batch_size is given twice" in said(done)
