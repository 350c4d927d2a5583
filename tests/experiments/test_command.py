"""``fedtopo reproduce`` on the command line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedtopo_torch
from fedtopo_torch.cli import app
from fedtopo_torch.experiments import CATALOGUE

QUICK = ["--seeds", "1", "--rounds", "1", "--processes", "1"]


@pytest.fixture
def fedtopo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["reproduce", *arguments])


def said(result):
    return " ".join((result.output + result.stderr).split())


def test_help_lists_what_there_is(fedtopo):
    text = said(fedtopo("--help"))
    for name, title in CATALOGUE.items():
        assert f"{name} {title}" in text
    assert "--processes" in text and "--debug" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tabel3"], "Did you mean 'table3'?"),
        (["table3", "table9"], "table9 (corrupted clients) is not built yet"),
        (["table5"], "table5 is the paper's settings"),
        (["figure1"], "nothing to run"),
        (["table3", "--seeds", "x"], "must be how many, or which"),
        (["table3", "--seeds", "1,1"], "given more than once"),
        (["table3", "--rounds", "0"], "--rounds"),
        (["table3", "--name", "a/b"], "can't name a run"),
        ([], "NAME"),
    ],
)
def test_bad_usage(fedtopo, arguments, message):
    result = fedtopo(*arguments)
    assert result.exit_code == 2 and message in said(result), said(result)
    assert not Path("runs").exists()


def test_it_prints_writes_and_goes_on(fedtopo):
    result = fedtopo("table4", *QUICK)
    text = said(result)
    assert result.exit_code == 0, text
    for piece in ("run 11/11", "14 of the 14 cells", "M p", "11 runs", "report-table4.html"):
        assert piece in text
    folder = Path("runs/reproduce")
    assert {p.name for p in folder.iterdir()} == {
        "parts",
        "table4",
        "report-table4.md",
        "report-table4.html",
    }
    again = said(fedtopo("table4", *QUICK, "--name", "reproduce"))
    assert "11 of them taken from before" in again
    page = (folder / "report-table4.html").read_text()
    assert "fedtopo reproduce table4 --seeds 1 --rounds 1" in page


def test_a_folder_that_is_something_else_is_not_touched(fedtopo):
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/notes.txt").write_text("mine")
    result = fedtopo("table4", *QUICK, "--name", "mine")
    assert result.exit_code == 2 and "choose another --name" in said(result)
    assert [p.name for p in Path("runs/mine").iterdir()] == ["notes.txt"]


def test_ctrl_c_keeps_what_is_done(tmp_path):
    root = str(Path(fedtopo_torch.__file__).parents[1])
    command = [sys.executable, "-m", "fedtopo_torch", "reproduce", "table1"]
    started = subprocess.Popen(
        [*command, "--processes", "1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test run in the background may have SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    parts = tmp_path / "runs" / "reproduce" / "parts"
    until = time.monotonic() + 60
    while len(list(parts.glob("*.json"))) < 3:
        assert started.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    text, _ = started.communicate(timeout=60)
    assert started.returncode == 130, text
    assert "the same command goes on from there" in " ".join(text.split())
    assert 3 <= len(list(parts.glob("*.json"))) < 330
    assert not (tmp_path / "runs" / "reproduce" / "report.html").exists()
