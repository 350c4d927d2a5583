"""A new workspace: what is in it, that it works, and that nothing is overwritten."""

import shutil
from pathlib import Path

import pytest

from fedtopo_torch.options import OptionError
from fedtopo_torch.registry import algorithms, datasets
from fedtopo_torch.workspace import FOLDERS, TEMPLATE, new_workspace

ROOT = Path(__file__).resolve().parents[1]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }


def test_what_is_in_it(tmp_path):
    written = new_workspace(tmp_path / "deep" / "mine")
    root = tmp_path / "deep" / "mine"
    assert [str(p.relative_to(root)) for p in written] == [
        "algorithms/README.md",
        "algorithms/fedavgm.py",
        "datasets/README.md",
        "datasets/three_clinics/harbour.csv",
        "datasets/three_clinics/hillside.csv",
        "datasets/three_clinics/meadow.csv",
        "runs/.gitignore",
        "runs/README.md",
    ]
    assert files(root) == files(TEMPLATE)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_checkout_is_a_workspace_like_any_other(folder):
    """Changed one? Copy it: cp -r algorithms datasets fedtopo_torch/workspace_template/."""
    # In the checkout runs/ is ignored by the .gitignore at the top.
    wanted = {n: b for n, b in files(TEMPLATE / folder).items() if n != ".gitignore"}
    assert wanted
    for name, content in wanted.items():
        assert (ROOT / folder / name).read_bytes() == content, f"{folder}/{name} differs"


def test_its_examples_are_found_and_load(tmp_path, monkeypatch):
    new_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "fedavgm" in algorithms.workspace()
    assert algorithms["fedavgm"]().beta == 0.5
    assert "three_clinics" in datasets.workspace()
    assert len(datasets["three_clinics"](target="readmitted").load(0)) == 3


def test_other_things_and_empty_folders_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "runs").mkdir()
    new_workspace(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "runs" / "README.md").is_file()


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_is_overwritten(tmp_path, folder):
    new_workspace(tmp_path)
    for other in FOLDERS:
        if other != folder:
            shutil.rmtree(tmp_path / other)
    (tmp_path / folder / "README.md").write_text("mine")
    before = files(tmp_path)
    with pytest.raises(OptionError, match=f"already has {folder}, and nothing is overwritten"):
        new_workspace(tmp_path)
    assert files(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == [folder]


def test_files_in_the_way(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(OptionError, match="already has runs"):
        new_workspace(tmp_path)
    with pytest.raises(OptionError, match="is a file: a workspace needs a folder"):
        new_workspace(tmp_path / "runs")


def test_compiled_examples_are_not_copied(tmp_path, monkeypatch):
    template = tmp_path / "template"
    shutil.copytree(TEMPLATE, template)
    cache = template / "algorithms" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "fedavgm.pyc").write_bytes(b"")
    monkeypatch.setattr("fedtopo_torch.workspace.TEMPLATE", template)
    assert not any("__pycache__" in p.parts for p in new_workspace(tmp_path / "new"))
