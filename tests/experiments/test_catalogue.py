"""Names, descriptions, and the paper's numbers they point to."""

import json
import math
from pathlib import Path

import pytest

from fedtopo_torch.experiments import CATALOGUE, LATER, experiment, names_of
from fedtopo_torch.experiments.description import Settings
from fedtopo_torch.experiments.table4 import Sent, expected
from fedtopo_torch.options import OptionError
from fedtopo_torch.paper import Printed, entry, other_settings, printed

PAPER = Path(__file__).resolve().parents[3] / "shared" / "paper" / "paper_tables.json"
NAMES = {
    "Local": "local",
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "SCAFFOLD": "scaffold",
    "pFedMe": "pfedme",
    "IFCA": "ifca",
    "Ditto": "ditto",
    "PACFL-style": "pacfl",
    "pTopoFL": "ptopofl",
}


def test_every_name_has_its_description():
    for name in CATALOGUE:
        own = experiment(name)
        assert own.name == name and own.question.endswith((".", "?"))
        assert own.setups or own.measures


def test_names_come_in_the_papers_order_and_once():
    assert names_of(["figure4", "Table1", "figure4"]) == ("table1", "figure4")
    assert names_of(["table3", "all"]) == tuple(CATALOGUE)


@pytest.mark.parametrize("name", list(LATER))
def test_what_is_not_built_says_so(name):
    with pytest.raises(OptionError, match=f"{name} .*There is: table1, "):
        names_of(["table1", name])


def test_unknown_names_and_none():
    with pytest.raises(OptionError, match=r"no experiment 'tabel3'.*Did you mean 'table3'"):
        names_of(["tabel3"])
    with pytest.raises(OptionError, match="no experiment given"):
        names_of([])


def test_every_row_names_a_method_and_federation_of_its_setup():
    settings = Settings((0,), 10)
    for name in CATALOGUE:
        own = experiment(name)
        plans = {key: setup.plan(settings) for key, setup in own.setups.items()}
        for table in own.tables:
            assert len({row.cells for row in table.rows}) == len(table.rows)
            for row in table.rows:
                assert len(row.cells) == len(table.keys)
                plans[row.setup].method(row.method)
                assert row.dataset in {d.label for d in plans[row.setup].datasets}


def test_every_number_of_the_paper_has_a_row():
    """None of a table's legible numbers is left out of what is shown."""
    for name in ("table2", "table3", "table6", "table7", "table8"):
        shown = {
            (*row.paper, metric.name)
            for table in experiment(name).tables
            for row in table.rows
            for metric in table.metrics
        }
        assert set(leaves((name,), entry(name))) <= shown


def leaves(path, content):
    if isinstance(content, list):
        yield path
    else:
        for key, value in content.items():
            yield from leaves((*path, key), value)


def test_rounds_times_local_steps_is_held():
    plans = {
        name: setup.plan(Settings((0,), 150)) for name, setup in experiment("table7").setups.items()
    }
    training = {name: plan.training for name, plan in plans.items()}
    assert {n: (t.rounds, t.local_steps) for n, t in training.items()} == {
        "tau = 1": (1500, 1),
        "tau = 10": (150, 10),
        "tau = 50": (30, 50),
    }
    # Enough points for a curve, few enough not to cost more than the training.
    assert all(t.rounds / t.every <= 51 for t in training.values())


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("p", (21, 0, 0)),
        ("2p", (42, 0, 0)),
        ("M p", (63, 0, 0)),
        ("p + cluster id", (21, 1, 0)),
        ("p + 46 floats once", (21, 0, 46)),
    ],
)
def test_words_of_table_4(text, meant):
    assert expected(text, 21, 3) == Sent(*meant)


def test_words_that_are_none():
    with pytest.raises(ValueError, match="'q' is no term"):
        expected("p + q", 21, 2)


# ---- the paper's numbers ------------------------------------------------------------------------


def test_reading_numbers():
    assert printed("table1", "synthetic", "local", "log_loss") == Printed(0.396, 0.044)
    heart = printed("table1", "fed_heart_disease", "ptopofl", "log_loss")
    assert heart.mean == 0.438 and math.isnan(heart.std)
    assert math.isnan(printed("table1", "synthetic", "ditto", "log_loss").mean)
    assert math.isnan(printed("no", "such", "place").mean)


def test_other_settings():
    assert other_settings({"rounds": 150, "l2": 0.01, "eta": "auto", "local_steps": 10}) == []
    assert other_settings({"rounds": 20, "eta": 0.1}) == [
        "rounds 20 (paper: 150)",
        "eta 0.1 (paper: auto)",
    ]


@pytest.fixture
def source():
    if not PAPER.is_file():
        pytest.skip(f"the paper's tables are not at {PAPER}")
    return json.loads(PAPER.read_text())


def test_tables_1_to_6_are_the_papers(source):
    table = source["table1"]
    for method, values in table.items():
        if method in NAMES:
            if isinstance(values, list):
                values = dict(zip(table["columns"], values, strict=True))
            for place, value in values.items():
                dataset, metric = place.split(".")
                assert entry("table1", dataset, NAMES[method], metric) == value
    for dataset, methods in table["significantly_worse_than_pTopoFL"].items():
        assert entry("significantly_worse", dataset) == [NAMES[method] for method in methods]

    table = source["table2"]
    for i, regime in enumerate(("dim", "tails", "concept", "geometry")):
        for key, place in {
            "ari_ph": ("ptopofl", "ari"),
            "ari_subspace": ("pacfl", "ari"),
            "rho_ph": ("ptopofl", "rho"),
            "rho_random": ("random", "rho"),
            "rho_oracle": ("oracle", "rho"),
        }.items():
            assert printed("table2", regime, *place).mean == table[key][i]
        assert entry("table2", regime, "fedavg", "log_loss") == table["fedavg_log_loss"][i]

    assert {k: v["log_loss"] for k, v in entry("table3").items()} == source["table3"]
    words = {NAMES[method]: value for method, value in source["table4"].items()}
    assert {m: [v["up"], v["down"]] for m, v in entry("table4").items()} == words
    settings, theirs = entry("table5"), source["table5"]
    assert [settings[k] for k in ("l2", "local_steps", "rounds", "n_clusters", "abar")] == [
        theirs[k] for k in ("lambda", "tau", "T", "M", "alpha_bar")
    ]
    columns = source["table6"].pop("columns")
    for dataset, rows in source["table6"].items():
        for method, values in rows.items():
            ours = [printed("table6", dataset, NAMES[method], column).mean for column in columns]
            assert ours == values


def test_tables_7_and_8_and_the_correlation_are_the_papers(source):
    table = source["table7"]
    for i, tau in enumerate(table["tau"]):
        for j, abar in enumerate(table["alpha_bar"]):
            found = printed("table7", str(tau), f"{abar:g}", "log_loss").mean
            assert found == table["log_loss"][i][j]
    for name, (mean, std, ari) in source["table8"].items():
        place = "table8", name.replace("M=", "n_clusters=")
        assert printed(*place, "log_loss") == (mean, std) and printed(*place, "ari").mean == ari
    r = source["figure4"]["correlation_gain_vs_1_minus_rho"]
    assert printed("figure4", "all", "correlation").mean == r
