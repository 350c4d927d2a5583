"""One description of a table, five forms; and what the tables of a comparison say."""

import csv
import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from fedtopo_torch.comparison import Comparison, Plan, Run
from fedtopo_torch.options import OptionError
from fedtopo_torch.tables import (
    Cell,
    Column,
    Table,
    clients_table,
    comparison_tables,
    failures_table,
    paper_table,
    results_table,
    sent_table,
    times_table,
)
from fedtopo_torch.trainer import Communication

SAMPLE = Table(
    "100% of a_b | c",
    (
        Column("method", ("method",), number=False),
        Column("log-loss", ("mean", "mark")),
        Column("worse than FedAvg", ("worse",)),
    ),
    (
        (Cell("A & B", ("A & B",)), Cell("0.5000", (0.5, "+"), mark="+"), Cell("–", (math.nan,))),
        (Cell("C_1", ("C_1",)), Cell("0.2500 ± 0.1", (0.25, ""), bold=True), Cell("1", (1,))),
    ),
    ("a < b: {x}\\y $5 #1 ~ ^",),
)

KEYS = [f"{split} {metric}" for split in ("train", "test") for metric in ("log_loss", "auc")]


def printed(table, width=100):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table.rich())
    return console.file.getvalue()


def run(dataset, method, seed, losses, **changed):
    values = {
        "clients": ("x", "y"),
        "honest": (True, True),
        "n": {"train": (10, 30), "test": (10, 30)},
        "pooled": dict.fromkeys([*KEYS, "test accuracy"], sum(losses) / 2) | {"test auc": 0.75},
        "per_client": dict.fromkeys([*KEYS, "test accuracy"], tuple(losses))
        | {"test auc": (0.5, 0.75)},
        "curve_rounds": (2,),
        "curve": (sum(losses) / 2,),
        "communication": Communication(
            {"up": (21, 1), "down": (21, 2)},
            {"up": (46, 0)},
            {"up": (22, 1), "down": (33, 0)},
        ),
        "parameters": 11,
        "seconds": 0.25,
    }
    return Run(dataset, method, seed, **(values | changed))


def made(n_seeds=6, dataset="fed_heart_disease", methods=("fedavg", "oracle", "ptopofl"), **plan):
    """pTopoFL is better than FedAvg on every seed by 0.01 and more, and Oracle equals it."""
    plan = Plan.of(methods, dataset, n_seeds, **plan)
    runs = []
    for seed in plan.seeds:
        for method in plan.methods:
            gain = 0.0 if method.key == "fedavg" else 0.01 * (1 + seed)
            losses = (0.4 - gain, 0.6 - gain)
            runs.append(run(plan.datasets[0].label, method.label, seed, losses))
    return Comparison(plan, tuple(runs), seconds=12.34, processes=2)


def cell(table, method, title):
    j = [column.title for column in table.columns].index(title)
    (row,) = [row for row in table.rows if row[0].text.startswith(method)]
    return row[j]


# ---- the five forms -----------------------------------------------------------------------------


def test_csv_has_values_under_field_names():
    rows = list(csv.DictReader(io.StringIO(SAMPLE.csv())))
    assert rows == [
        {"method": "A & B", "mean": "0.5", "mark": "+", "worse": ""},
        {"method": "C_1", "mean": "0.25", "mark": "", "worse": "1"},
    ]


def test_json_is_strict_and_whole():
    content = json.loads(SAMPLE.json(), parse_constant=lambda name: pytest.fail(name))
    assert content["title"] == SAMPLE.title and content["notes"] == list(SAMPLE.notes)
    assert content["rows"][0] == {"method": "A & B", "mean": 0.5, "mark": "+", "worse": None}


def test_markdown():
    lines = SAMPLE.markdown().splitlines()
    assert lines[:6] == [
        r"**100% of a\_b \| c**",
        "",
        "| method | log-loss | worse than FedAvg |",
        "|:--|--:|--:|",
        "| A & B | 0.5000 + | – |",
        r"| C\_1 | **0.2500 ± 0.1** | 1 |",
    ]
    # Every row has as many unescaped bars.
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:6]} == {4}


def test_latex_compiles_without_packages_and_escapes():
    lines = SAMPLE.latex().splitlines()
    assert lines[0] == r"\begin{table}" and lines[-1] == r"\end{table}"
    assert r"\caption{100\% of a\_b $|$ c}" in lines
    assert r"\begin{tabular}{lrr}" in lines
    assert r"{}A \& B & 0.5000 $+$ & -- \\" in lines
    assert r"{}C\_1 & \textbf{0.2500 $\pm$ 0.1} & 1 \\" in lines
    note = r"a $<$ b: \{x\}\textbackslash{}y \$5 \#1 \textasciitilde{} \textasciicircum{}"
    assert rf"{{\footnotesize {note}\par}}" in lines
    text = SAMPLE.latex()
    assert text.count(r"\begin{") == text.count(r"\end{") == 2
    assert text.count(r"\hline") == 3 and r"\toprule" not in text
    braces = re.sub(r"\\[{}]", "", text)
    assert braces.count("{") == braces.count("}")
    assert text.isascii()


def test_terminal_keeps_points_below_each_other_and_takes_markup_for_text():
    table = replace(SAMPLE, title="[bold]x[/]", notes=("[red]",))
    lines = printed(table).splitlines()
    assert lines[0].strip() == "[bold]x[/]" and lines[-1].strip() == "[red]"
    a, c = (next(line for line in lines if name in line) for name in ("A & B", "C_1"))
    assert a.index("0.5000") + len("0.5000") == c.index("0.2500") + len("0.2500 ± 0.1")
    assert a.index("+") > a.index("0.5000")


@pytest.mark.parametrize("width", [80, 100])
def test_every_table_fits_the_terminal_with_no_number_cut(width):
    comparison = made(methods="all")
    for table in comparison_tables(comparison):
        text = printed(table, width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        for row in table.rows:
            for part, column in zip(row, table.columns, strict=True):
                if column.number:
                    assert part.text in text


def test_every_row_fits_its_columns():
    for table in comparison_tables(made(methods="all")):
        for row in table.rows:
            assert len(row) == len(table.columns)
            for part, column in zip(row, table.columns, strict=True):
                assert len(part.values) == len(column.fields)
        assert len(set(table.fields)) == len(table.fields)


# ---- results ------------------------------------------------------------------------------------


def test_results_by_hand():
    table = results_table(made(), "fed_heart_disease")
    # FedAvg 0.5 throughout; pTopoFL 0.49, 0.48, ... 0.44: mean 0.465, std sqrt(35/12)/100.
    assert cell(table, "FedAvg", "log-loss").text == "0.5000 ± 0.000"
    assert cell(table, "pTopoFL", "log-loss").text == "0.4650 ± 0.017"
    assert cell(table, "FedAvg", "AUC").text == "0.7500 ± 0.000"
    assert cell(table, "pTopoFL", "worse than FedAvg").text == "0.00"
    assert cell(table, "pTopoFL", "worse than Local").text == "–"
    assert cell(table, "pTopoFL", "worst client").text == "0.565"
    assert cell(table, "pTopoFL", "client AUC").text == "0.625"
    record = table.records()[2]
    assert record["log_loss_mean"] == pytest.approx(0.465)
    assert record["worse_than_local"] is None and record["seeds"] == 6


def test_marks_and_the_sentences_below():
    table = results_table(made(), "fed_heart_disease")
    # Two tests, p = 2/64 and 1: Holm doubles the first to 0.0625.
    assert [row[1].mark for row in table.rows] == ["", "", ""]
    table = results_table(made(7), "fed_heart_disease")
    assert [row[1].mark for row in table.rows] == ["+", "", ""]
    assert table.records()[0]["p"] == pytest.approx(2 / 128)
    assert table.records()[0]["p_holm"] == pytest.approx(4 / 128)
    assert table.records()[2]["p"] is None
    notes = " ".join(table.notes)
    assert "+ / -: significantly worse / better log-loss than pTopoFL" in notes
    assert "Wilcoxon" in notes and "Holm" in notes and "0.05" in notes
    assert "p speaks of splits, not of new patients" in notes
    assert "Mean ± std over 7 seeds" in notes
    other = results_table(made(7), "fed_heart_disease", "fedavg")
    assert [row[1].mark for row in other.rows] == ["", "-", "-"]
    assert "better log-loss than FedAvg" in " ".join(other.notes)


def test_fewer_than_six_seeds_are_said_and_not_marked():
    table = results_table(made(5), "fed_heart_disease")
    notes = " ".join(table.notes)
    assert not any(row[1].mark for row in table.rows)
    assert "fewer than 6 seeds level 0.05 can't be reached" in notes
    assert "+ / -" not in notes and "patients" not in notes


def test_patients_are_spoken_of_on_the_hearts_table_only():
    table = results_table(made(7, dataset="synthetic"), "synthetic")
    assert "+ / -" in " ".join(table.notes) and "patients" not in " ".join(table.notes)


def test_the_best_deployable_method_is_bold():
    comparison = made(7)
    best = comparison.runs[1]
    assert best.method == "Oracle"
    table = results_table(comparison, "fed_heart_disease")
    assert [row[0].text for row in table.rows] == ["FedAvg", "Oracle (not deployable)", "pTopoFL"]
    assert [row[1].bold for row in table.rows] == [False, False, True]
    assert [r["deployable"] for r in table.records()] == [True, False, True]
    assert "Not deployable" in " ".join(table.notes)


def test_failed_and_missing_seeds_are_counted_and_never_bold():
    comparison = made(7)
    runs = list(comparison.runs)
    at = next(i for i, r in enumerate(runs) if (r.method, r.seed) == ("pTopoFL", 3))
    runs[at] = Run("fed_heart_disease", "pTopoFL", 3, error="diverged in round 3 at client 'x'")
    failed = replace(comparison, runs=tuple(runs[:-1]), interrupted=True)
    table = results_table(failed, "fed_heart_disease")
    assert [row[1].text for row in table.rows] == ["7", "7", "5"]
    assert [row[2].bold for row in table.rows] == [True, False, False]
    assert table.records()[2]["failed_seeds"] == 1
    notes = " ".join(table.notes)
    assert "Failed seeds, left out of means and tests: pTopoFL 1." in notes
    assert "Interrupted: 1 runs are still to be done." in notes
    # Five seeds in common with the reference: said.
    assert "No significance test" in notes
    failures = comparison_tables(failed)[-1]
    assert failures.title == "Failed runs (1 of 20)"
    assert failures.records() == [
        {
            "dataset": "fed_heart_disease",
            "method": "pTopoFL",
            "seed": 3,
            "reason": "diverged in round 3 at client 'x'",
        }
    ]
    assert "diverged in round 3" in printed(failures_table(failed))


def test_undefined_auc_is_counted():
    comparison = made(6)
    nan = {"test auc": math.nan}
    runs = [
        replace(
            r,
            pooled=r.pooled | (nan if r.seed == 0 and r.method == "FedAvg" else {}),
            per_client=r.per_client | ({"test auc": (math.nan, 0.5)} if r.seed < 2 else {}),
        )
        for r in comparison.runs
    ]
    table = results_table(replace(comparison, runs=tuple(runs)), "fed_heart_disease")
    notes = " ".join(table.notes)
    assert "Pooled AUC undefined (one class), left out, in seeds: FedAvg 1." in notes
    assert "left out of the mean of clients: 2 of 12 (clients times seeds)" in notes


def test_a_comparison_in_which_everything_failed_still_has_its_tables():
    plan = Plan.of(["fedavg", "ptopofl"], "fed_heart_disease", 1)
    runs = tuple(Run("fed_heart_disease", m.label, 0, error="no") for m in plan.methods)
    tables = comparison_tables(Comparison(plan, runs))
    assert tables[0].rows[0][2].text == "–"
    for table in tables:
        assert printed(table) and table.csv() and table.markdown() and table.latex()
        json.loads(table.json())


# ---- the other tables ---------------------------------------------------------------------------


def test_what_is_sent_in_floats_in_multiples_of_p_and_integers():
    table = sent_table(made(1), "fed_heart_disease")
    assert cell(table, "FedAvg", "up, a round").text == "22 (2p) + 1 int"
    assert cell(table, "FedAvg", "down, a round").text == "33 (3p)"
    assert cell(table, "FedAvg", "up, once").text == "46"
    assert cell(table, "FedAvg", "down, once").text == "0"
    assert table.records()[0]["up_integers"] == 1
    (note,) = table.notes
    assert "p = 11 parameters" in note
    assert "21 floats and 1 integer up, 21 floats and 2 integers down" in note


def test_clients_by_method():
    table = clients_table(made(2), "fed_heart_disease")
    assert [column.title for column in table.columns] == ["method", "x", "y"]
    # pTopoFL on client x: 0.39 and 0.38.
    ours = cell(table, "pTopoFL", "x")
    assert ours.text == "0.385" and ours.bold and ours.values[1] == pytest.approx(0.005)
    assert not cell(table, "Oracle", "x").bold
    assert cell(clients_table(made(2), "fed_heart_disease", "auc"), "FedAvg", "y").text == "0.750"


def test_times_add_up():
    table = times_table(made(6))
    assert cell(table, "FedAvg", "fed_heart_disease").text == "0.250"
    assert cell(table, "FedAvg", "all its runs").text == "1.5"
    assert "2 runs share the machine" in table.notes[0] and "12.3 s" in table.notes[0]


def test_gaps_to_the_paper_none_hidden():
    comparison = made(6, methods="all")
    table = paper_table(comparison, "fed_heart_disease")
    assert len(table.rows) == 11
    record = table.records()[[r[0].text for r in table.rows].index("pTopoFL")]
    assert record["log_loss_paper"] == 0.438
    assert record["log_loss_difference"] == pytest.approx(0.465 - 0.438)
    assert record["auc_paper"] is None and record["auc_difference"] is None
    fedavg = table.records()[1]
    assert (fedavg["log_loss_paper"], fedavg["auc_paper"]) == (0.463, 0.864)
    shown = cell(table, "FedAvg", "log-loss, paper").text, table.rows[1][3].text
    assert shown == ("0.463", "+0.0370")
    assert not any("settings" in note for note in table.notes)


def test_other_settings_options_and_federations_are_not_taken_for_the_papers():
    changed = paper_table(made(1, rounds=20, l2=0.1), "fed_heart_disease")
    assert (
        "Not the paper's settings: rounds 20 (paper: 150), l2 0.1 (paper: 0.01)." in changed.notes
    )
    tails = made(1, dataset=("synthetic", {"regime": "tails"}))
    assert paper_table(tails, "synthetic") is None
    options = paper_table(made(1, methods=[("ptopofl", {"n_clusters": 1})]), "fed_heart_disease")
    assert options.records()[0]["log_loss_paper"] is None


def test_unknown_federation():
    with pytest.raises(OptionError, match="'other' is not in this comparison"):
        results_table(made(1), "other")
