"""The commands and code blocks of the README and of docs/ run as written."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from pydantic import Field
from typer.testing import CliRunner

from fedtopo_torch import train
from fedtopo_torch.cli import app
from fedtopo_torch.registry import algorithms

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
ANALYSIS = (ROOT / "docs" / "analysis.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def fedtopo_commands() -> list[list[str]]:
    whole = [block.replace("\\\n", " ") for block in blocks("sh")]
    lines = [line.partition("#")[0] for block in whole for line in block.splitlines()]
    commands = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(c)[1:] for c in commands if c.startswith("fedtopo ")]


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("algorithms", "datasets"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.slow
def test_every_command_runs(workspace):
    commands = fedtopo_commands()
    assert ["train"] in commands and len(commands) >= 5
    for command in commands:
        if command[0] in ("compare", "reproduce"):
            command += ["--rounds", "2", "--seeds", "1"]  # all of it is what the table is for
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0, (command, result.output)


def test_python_blocks_run(workspace):
    ran = 0
    for block in blocks("python"):
        if "class " in block:
            continue
        if "models.pt" in block:
            assert CliRunner().invoke(app, ["train", "--rounds", "2"]).exit_code == 0
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
        ran += 1
    assert ran == 4


def test_the_example_method_is_the_file_in_the_workspace(workspace):
    (block,) = [b for b in blocks("python") if "@register" in b]
    source = (ROOT / "algorithms" / "fedavgm.py").read_text()
    assert source.split('"""\n\n', 1)[1] == block
    assert algorithms["fedavgm"](beta=0.9).beta == 0.9


def test_the_fedprox_of_the_readme_is_fedprox():
    (block,) = [b for b in blocks("python") if "class FedProx" in b]
    names = {"FedAvg": algorithms["fedavg"], "Field": Field}
    exec(compile(block, "README.md", "exec"), names)
    theirs = train(names["FedProx"](mu=0.2), rounds=3).theta
    assert torch.equal(theirs, train(algorithms["fedprox"](mu=0.2), rounds=3).theta)


def test_python_of_the_analysis_runs():
    (block,) = blocks("python", ANALYSIS)
    exec(compile(block, "docs/analysis.md", "exec"), {"__name__": "analysis"})


def test_every_check_the_analysis_names_selects_tests():
    lines = "".join(blocks("sh", ANALYSIS)).splitlines()
    checks = [shlex.split(line) for line in lines if line.startswith("pytest ")]
    assert len(checks) >= 6
    for _, path, *selection in checks:
        files = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).glob("test_*.py"))
        names = re.findall(r"^def (test_\w+)", "".join(f.read_text() for f in files), re.MULTILINE)
        words = selection[1].split(" or ") if selection else [""]
        for word in words:
            assert any(word in name for name in names), (path, word)
