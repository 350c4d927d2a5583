"""Every experiment, reduced to two seeds and four rounds, against numbers computed another way."""

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.metrics import adjusted_rand_score

from fedtopo_torch import execution
from fedtopo_torch.algorithms import FedAvg, Local, Oracle, PTopoFL, Random
from fedtopo_torch.comparison import Spread
from fedtopo_torch.datasets import FedHeartDisease, LabelSkew, Synthetic
from fedtopo_torch.execution import execute
from fedtopo_torch.experiments import CATALOGUE, experiment, measurements
from fedtopo_torch.experiments.description import REGIMES, Row
from fedtopo_torch.experiments.figure4 import Point, correlation
from fedtopo_torch.experiments.findings import agreement, listed, pairs
from fedtopo_torch.experiments.metrics import rho_values
from fedtopo_torch.experiments.report import write_reproduction
from fedtopo_torch.experiments.reproduction import reproduce
from fedtopo_torch.models.logistic import Logistic
from fedtopo_torch.options import OptionError
from fedtopo_torch.paper import Printed
from fedtopo_torch.plan import Choice, Measurement, Plan
from fedtopo_torch.tables import Column, Table, beside_cells, beside_columns, text_cell
from fedtopo_torch.trainer import Trainer

SEEDS = (0, 1)
ROUNDS = 4


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="module")
def done(parts):
    """All experiments, reduced."""
    made = reproduce(["all"], SEEDS, rounds=ROUNDS, processes=1, folder=parts)
    assert not made.failures and not made.interrupted
    return made


@pytest.fixture(scope="module")
def tables(done):
    """Rows as values, by experiment and title."""
    return {(s.name, t.title): t.records() for s in done.sections for t in s.tables}


def only(tables, name, **wanted):
    """The one record of an experiment in which these columns hold these values."""
    found = [
        record
        for (own, _), records in tables.items()
        if own == name
        for record in records
        if all(record.get(key) == value for key, value in wanted.items())
    ]
    assert len(found) == 1, (name, wanted, len(found))
    return found[0]


def trained(method, dataset, seed, rounds=ROUNDS, steps=10):
    return Trainer(
        method, dataset.load(seed), Logistic(), rounds=rounds, local_steps=steps, seed=seed
    ).run()


def losses(method, dataset, **settings):
    runs = [trained(method, dataset, seed, **settings) for seed in SEEDS]
    return np.array([run.history.last().pooled for run in runs])


# ---- the tables ---------------------------------------------------------------------------------


def test_every_section_has_tables_sentences_and_its_figures(done):
    assert [section.name for section in done.sections] == list(CATALOGUE)
    for section in done.sections:
        assert section.tables and section.findings
        assert all(len(sentence) > 20 for sentence in section.findings)
        assert bool(section.figures) == section.name.startswith("figure")
    by_name = {section.name: section for section in done.sections}
    assert len(by_name["figure3"].figures) == 3


def test_table1(tables):
    for dataset in (Synthetic(), LabelSkew(), FedHeartDisease()):
        own = losses(FedAvg(), dataset)
        title = f"{dataset.name}: test records, round {ROUNDS}"
        (row,) = [r for r in tables["table1", title] if r["method"] == "FedAvg"]
        assert row["log_loss_mean"] == pytest.approx(own.mean(), abs=1e-14)
        assert row["log_loss_std"] == pytest.approx(own.std(), abs=1e-14)
        beside = tables["table1", f"{dataset.name}: beside the paper's Table 1"]
        assert len(beside) == 11
        (row,) = [r for r in beside if r["method"] == "FedAvg"]
        assert row["log_loss_difference"] == pytest.approx(own.mean() - row["log_loss_paper"])


def test_two_seeds_are_too_few_for_marks(done):
    text = " ".join(done.sections[0].findings)
    assert text.count("too few seeds for a test") == 3 and "ignificantly" not in text


@pytest.mark.parametrize("regime", REGIMES)
def test_table2(tables, regime):
    dataset = Synthetic(regime=regime)
    runs = [trained(PTopoFL(), dataset, seed) for seed in SEEDS]
    ari = [adjusted_rand_score(r.federation.groups, r.server["labels"]) for r in runs]
    keys = {"regime": regime, "partition_of": "pTopoFL"}
    row = [
        r for (n, t), rs in tables.items() if n == "table2" for r in rs if keys.items() <= r.items()
    ]
    assert row[0]["ari_ours"] == pytest.approx(np.mean(ari), abs=1e-12)
    row = only(tables, "table2", regime=regime, method="FedAvg")
    assert row["log_loss_ours"] == pytest.approx(losses(FedAvg(), dataset).mean(), abs=1e-14)


def optimum(x, y, l2=0.01):
    """The minimiser of mean logistic loss + l2/2 |theta|^2, bias last, by SciPy."""
    x = np.column_stack([x, np.ones(len(x))])

    def value(theta):
        z = x @ theta
        return np.mean(np.logaddexp(0, z) - y * z) + l2 / 2 * theta @ theta

    def slope(theta):
        return x.T @ (expit(x @ theta) - y) / len(y) + l2 * theta

    return minimize(value, np.zeros(x.shape[1]), jac=slope, method="BFGS", tol=1e-10).x


def test_rho_by_its_formula(done):
    study = next(study for study in done.studies if study.experiment.name == "table2")
    for method, row in ((Oracle(), "oracle"), (Random(), "random"), (PTopoFL(), "ptopofl")):
        run = trained(method, Synthetic(regime="tails"), 1, rounds=1)
        train, labels = run.federation.train, run.server["labels"].numpy()
        theta = np.array([optimum(*(v.numpy() for v in train.client(k))) for k in range(8)])
        p = train.n.numpy() / int(train.n.sum())
        total = sum(p[k] * ((theta[k] - p @ theta) ** 2).sum() for k in range(8))
        within = 0.0
        for j in set(labels.tolist()):
            members = labels == j
            centre = p[members] @ theta[members] / p[members].sum()
            within += sum(p[k] * ((theta[k] - centre) ** 2).sum() for k in np.flatnonzero(members))
        found = rho_values(study, Row((), row, "tails"))
        assert set(found) == set(SEEDS)
        assert found[1] == pytest.approx(within / total, rel=1e-5)


def test_table3_and_table8(tables):
    data = Synthetic()
    own = losses(PTopoFL(alpha=0.3), data)
    row = only(tables, "table3", variant="uncalibrated alpha = 0.3")
    assert row["log_loss_ours"] == pytest.approx(own.mean(), abs=1e-14)
    assert row["log_loss_paper"] == 0.405
    row = only(tables, "table8", variant="n_sub = 40")
    assert row["log_loss_ours"] == pytest.approx(losses(PTopoFL(n_sub=40), data).mean(), abs=1e-14)
    one = only(tables, "table8", variant="M = 1")
    assert one["ari_ours"] == 0.0
    # The same training under two names, run once.
    again = only(tables, "table3", variant="no clustering (M = 1)")
    assert again["log_loss_ours"] == one["log_loss_ours"]


def test_table4(tables):
    up = only(tables, "table4", method="IFCA", direction="up")
    assert (up["floats"], up["integers"], up["paper"], up["floats_difference"]) == (
        21,
        1,
        "p + cluster id",
        0,
    )
    assert only(tables, "table4", method="SCAFFOLD", direction="down")["floats"] == 42
    ours = only(tables, "table4", method="pTopoFL", direction="up")
    assert (ours["ours"], ours["floats_once"]) == ("p + 46 floats once", 46)
    # PACFL sends three singular vectors of 20 features; the paper's table has no row for it.
    pacfl = only(tables, "table4", method="PACFL-style", direction="up")
    assert pacfl["floats_once"] == 60 and pacfl["floats_difference"] is None


def test_table6(tables):
    title = "label_skew: fractions of clients worse off, and the worst client"
    (row,) = [r for r in tables["table6", title] if r["method"] == "FedAvg"]
    clients = {
        name: np.array(
            [trained(method, LabelSkew(), seed).history.last().clients.numpy() for seed in SEEDS]
        )
        for name, method in (("fedavg", FedAvg()), ("local", Local()))
    }
    worse = (clients["fedavg"] - clients["local"] >= 1e-9).mean()
    assert row["worse_than_local_ours"] == pytest.approx(worse)
    assert row["worst_client_ours"] == pytest.approx(clients["fedavg"].max(1).mean(), abs=1e-14)
    assert row["worst_client_paper"] == 0.723


def test_table7(tables):
    grid = tables["table7", "The same as a grid, with spreads"]
    own = losses(PTopoFL(abar=0.6), Synthetic(), rounds=ROUNDS * 10, steps=1)
    assert grid[0]["tau"] == "1" and grid[0]["abar_0.6"] == pytest.approx(own.mean(), abs=1e-14)
    row = only(tables, "table7", tau="1", abar="0.6")
    assert row["log_loss_ours"] == grid[0]["abar_0.6"] and row["log_loss_paper"] == 0.383
    columns = [f"abar_{abar}" for abar in ("0", "0.1", "0.3", "0.6", "1")]
    values = np.array([[line[c] for c in columns] for line in grid[:3]])
    np.testing.assert_allclose([g["spread_over_abar"] for g in grid[:3]], np.ptp(values, axis=1))
    np.testing.assert_allclose([grid[3][c] for c in columns], np.ptp(values, axis=0))


# ---- the figures --------------------------------------------------------------------------------


def logistic_descent(x, y, theta, eta, steps, l2=0.01):
    for _ in range(steps):
        theta = theta - eta * (x.T @ (expit(x @ theta) - y) / len(y) + l2 * theta)
    return theta


def test_figure2_against_a_plain_simulation(done):
    """Distances after rounds of a few lines of NumPy, to where 2,000 rounds of them lead."""
    study = next(study for study in done.studies if study.experiment.name == "figure2")
    measure = study.experiment.measures[0]
    found = study.measurements(measure, "synthetic")[0]["50"]
    run = trained(PTopoFL(), Synthetic(), 0, rounds=1)
    train, n = run.federation.train, run.federation.train.n.numpy()
    data = []
    for k in range(8):
        x, y = (values.numpy() for values in train.client(k))
        data.append((np.column_stack([x, np.ones(len(x))]), y))
    labels, w = run.server["labels"].numpy(), run.server["weights"].numpy()
    omega = np.array([n[labels == j].sum() / n.sum() for j in (0, 1)])
    eta, q = run.facts.eta, (1 - run.facts.eta * 0.01) ** 50
    alpha = 0.3 * (1 - q) / (1 - 0.3 * q)
    theta, path = np.zeros((2, 21)), []
    for _ in range(400):
        path.append(theta)
        ends = [logistic_descent(*data[k], theta[labels[k]], eta, 50) for k in range(8)]
        u = np.array(
            [
                sum(w[k] * ends[k] for k in range(8) if labels[k] == j) / w[labels == j].sum()
                for j in (0, 1)
            ]
        )
        theta = (1 - alpha) * u + alpha * omega @ u
    for t in (0, 1, 5, 20):
        own = np.linalg.norm(path[t] - theta, axis=1).max()
        assert found["distance"][t] == pytest.approx(own, rel=1e-6)
    assert found["q"] == pytest.approx(q)


def test_figure2_bounds_hold_in_every_seed(tables):
    rows = tables["figure2", "Bounds and predictions, checked"]
    assert len(rows) == 6
    for row in rows:
        assert (row["holds"], row["seeds"]) == (2, 2), row


def test_drift_is_nothing_for_one_step():
    federation = Synthetic(n_clients=4).load(0)
    found = measurements.drift(federation, 0, l2=0.01, local_steps=[1, 3], share=0.5)
    assert found["step"][0] == 0 and max(found["bias"][0]) < 1e-8 < min(found["bias"][1])


def test_blending_keeps_all_at_zero_and_nothing_at_one():
    federation = Synthetic(n_clients=4).load(0)
    found = measurements.blending(federation, 0, l2=0.01, local_steps=5, alphas=[0.0, 0.2, 1.0])
    assert found["kept"][0] == 1 and found["kept"][2] == pytest.approx(0, abs=1e-12)
    assert 0 < found["kept"][1] < 1
    assert found["eigenvalues"]["smallest"] < found["eigenvalues"]["median"]


def test_figure3_points_are_those_of_the_runs(tables, done):
    (row,) = [
        r
        for r in tables["figure3", "synthetic: along the training curves"]
        if r["method"] == "Local"
    ]
    curves = np.array([trained(Local(), Synthetic(), s).history.pooled() for s in SEEDS]).mean(0)
    assert row["first"] == pytest.approx(curves[0]) and row["last"] == pytest.approx(curves[-1])
    assert row["half"] == pytest.approx(curves[1])
    # The last tenth of four rounds is the last round.
    assert row["change"] == 0 and row["paper"] is None


def test_figure4_is_the_correlation_of_its_points(tables):
    row = only(tables, "figure4", regime="all")
    assert row["points"] == 8 and row["correlation_paper"] == 0.87
    assert -1 <= row["correlation_ours"] <= 1
    # Two points are always on a line: no correlation within a regime.
    assert only(tables, "figure4", regime="dim")["correlation_ours"] is None
    dim = losses(FedAvg(), Synthetic()) - losses(PTopoFL(), Synthetic())
    assert only(tables, "figure4", regime="dim")["gain_ours"] == pytest.approx(dim.mean())


def test_correlation():
    def made(*values):
        return [Point("dim", seed, x, y) for seed, (x, y) in enumerate(values)]

    assert correlation(made((0, 1), (1, 3), (2, 5))) == pytest.approx(1)
    assert correlation(made((0, 0), (1, 1), (2, 0))) == pytest.approx(0)
    assert math.isnan(correlation(made((0, 0), (1, 1))))
    assert math.isnan(correlation(made((0, 0), (1, 0), (2, 0))))


# ---- sentences ----------------------------------------------------------------------------------


def beside(*rows):
    columns = (Column("row", ("row",), number=False), *beside_columns("loss", "loss"))
    cells = tuple((text_cell(name), *beside_cells(ours, theirs)) for name, ours, theirs in rows)
    return Table("title: more", columns, cells)


def test_agreement_counts_and_names_the_farthest():
    nan = math.nan
    table = beside(
        ("a", Spread(0.405, 0.01, 10), Printed(0.4, 0.01)),
        ("b", Spread(0.45, 0.01, 10), Printed(0.4, 0.01)),
        ("c", Spread(0.41, 0.01, 10), Printed(0.4, nan)),
        ("d", Spread(0.9, 0.01, 10), Printed(nan, nan)),
        ("e", Spread(nan, nan, 0), Printed(0.4, nan)),
    )
    assert [pair.where for pair in pairs([table])] == ["a", "b", "c"]
    # Two standard errors: 2 sqrt(2) 0.01 / sqrt(10) = 0.0089.
    assert agreement([table], 10) == (
        "Of the 3 numbers the paper prints, ours are within 0.01 of 2; of the 2 with a spread, 1 "
        "differ by no more than two standard errors of means over different draws. Farthest: b, "
        "loss 0.450 (paper 0.400, gap +0.050)."
    )
    assert "no legible number" in agreement([beside()], 10)
    assert next(iter(pairs([table, beside()]))).where == "title, a"


def test_lists():
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "none",
        "a",
        "a and b",
        "a, b and c",
    ]


# ---- nothing twice, nothing lost ----------------------------------------------------------------


def test_each_thing_runs_once_and_the_folder_has_it(done, parts, monkeypatch):
    outcomes = len(done.execution.outcomes)
    asked = sum(
        len(plan.jobs()) for s in done.studies for plan in (c.plan for c in s.comparisons.values())
    )
    assert outcomes < asked and len(list(parts.iterdir())) == outcomes
    monkeypatch.setattr(Trainer, "run", lambda self: pytest.fail("trained again"))
    again = reproduce(["all"], SEEDS, rounds=ROUNDS, processes=1, folder=parts)
    assert again.stored == outcomes
    for one, two in zip(done.sections, again.sections, strict=True):
        assert [t.json() for t in one.tables] == [t.json() for t in two.tables]
        assert one.findings == two.findings


def test_what_is_kept_starts_no_process(done, parts, monkeypatch):
    def refuse(*_):
        pytest.fail("a process was started")

    monkeypatch.setattr(execution, "_Worker", refuse)
    again = reproduce(["table3", "figure4"], SEEDS, rounds=ROUNDS, processes=2, folder=parts)
    assert again.stored == len(again.execution.outcomes) and not again.failures


def test_an_interrupt_keeps_what_is_done(tmp_path):
    def stop(count, total, last):
        if count == 3:
            raise KeyboardInterrupt

    part = reproduce(["table4"], 1, rounds=1, processes=1, folder=tmp_path, on_progress=stop)
    assert part.interrupted and len(list(tmp_path.iterdir())) == 3
    with pytest.raises(ValueError, match="interrupted"):
        _ = part.sections
    whole = reproduce(["table4"], 1, rounds=1, processes=1, folder=tmp_path)
    assert whole.stored == 3 and len(whole.execution.outcomes) == 11 and whole.sections


def length(federation, seed, *, factor):
    if seed == 1:
        raise ValueError("seed 1 is refused")
    return {"clients": len(federation) * factor, "pair": (1, 2.0)}


def measurement(seed=0, factor=1, label="here"):
    dataset = Choice.of("dataset", ("synthetic", {"n_clients": 3}), label)
    return Measurement(dataset, length, seed, {"factor": factor})


def test_measurements_are_kept_like_trainings(tmp_path):
    tasks = [measurement(), measurement(label="there"), measurement(factor=2), measurement(1)]
    told = []
    first = execute(tasks, processes=1, folder=tmp_path, on_progress=lambda *a: told.append(a))
    assert told[-1][:2] == (3, 3) and told[0][2] == "length on here, seed 0"
    found = [first.measured(task) for task in tasks]
    assert [each.dataset for each in found] == ["here", "there", "here", "here"]
    assert found[0].values == {"clients": 3, "pair": [1, 2.0]} == found[1].values
    assert found[2].values["clients"] == 6
    assert found[3].error == "seed 1 is refused" and found[3].values == {}
    assert len(list(tmp_path.iterdir())) == 2
    again = execute(tasks, processes=1, folder=tmp_path)
    assert again.measured(tasks[2]).stored and again.measured(tasks[2]) == found[2]
    assert not again.measured(tasks[3]).stored


def test_trainings_of_several_plans_run_once_under_the_labels_asked_for():
    small = ("synthetic", {"n_clients": 3, "n_train_max": 70})
    one = Plan.of({"mine": "fedavg"}, {"a": small}, 1, rounds=2)
    two = Plan.of(["fedavg", "local"], {"b": small}, 1, rounds=2)
    other = Plan.of({"mine": "fedavg"}, {"a": ("synthetic", {"n_clients": 4})}, 1, rounds=2)
    jobs = [*one.jobs(), *two.jobs(), *other.jobs()]
    done = execute(jobs, processes=2)
    assert len(done.outcomes) == 3
    runs = [done.run(job) for job in jobs]
    assert [(r.dataset, r.method) for r in runs] == [
        ("a", "mine"),
        ("b", "FedAvg"),
        ("b", "Local"),
        ("a", "mine"),
    ]
    assert runs[0].pooled == runs[1].pooled != runs[3].pooled
    # The same label for other data is not taken for the same data.
    assert len(runs[3].clients) == 4 and runs[0].groups == (0, 1, 0)


def test_failures_are_told_and_the_rest_stands(monkeypatch):
    original = Synthetic.load

    def load(self, seed):
        if seed == 1:
            raise ValueError("the second seed is torn")
        return original(self, seed)

    monkeypatch.setattr(Synthetic, "load", load)
    broken = reproduce(["table3", "table7", "figure2", "figure4"], 2, rounds=1, processes=1)
    assert {each.seed for each in broken.failures} == {1}
    table = broken.failures_table()
    assert table.records()[0]["reason"] == "the second seed is torn"
    for section in broken.sections:
        assert section.findings
        text = " ".join(note for table in section.tables for note in table.notes)
        assert "finished seeds out of 2" in text or section.name == "figure2"
    monkeypatch.setattr(Synthetic, "load", lambda self, seed: load(self, 1))
    nothing = reproduce(["all"], 1, rounds=1, processes=1)
    assert all(section.findings for section in nothing.sections)


def test_bad_settings():
    with pytest.raises(OptionError, match="rounds is 0"):
        reproduce(["table3"], rounds=0)
    with pytest.raises(OptionError, match="seed 1 given more than once"):
        reproduce(["table3"], [1, 1])


# ---- the report ---------------------------------------------------------------------------------


class Reader(HTMLParser):
    """What a page asks of the network, its texts, and whether its tags close."""

    VOID = ("meta", "img", "br", "link", "input")

    def __init__(self):
        super().__init__()
        self.asked, self.ids, self.anchors, self.open, self.rows = [], [], [], [], []
        self.images = 0

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        for name in ("src", "srcset", "data", "poster", "background", "action"):
            if name in attributes:
                self.asked.append(attributes[name])
        if "href" in attributes:
            assert tag == "a", tag
            self.anchors.append(attributes["href"])
        assert tag not in ("script", "iframe", "object", "embed", "base")
        if tag == "img":
            assert attributes["alt"]
            self.images += 1
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "tr" in self.open and self.open[-1] in ("td", "th", "b"):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def folder(done, tmp_path_factory):
    where = tmp_path_factory.mktemp("report")
    files = write_reproduction(done, where, ["fedtopo", "reproduce", "all", "--seeds", "2"])
    assert all(path.is_file() for path in files)
    return where


def test_the_page_holds_every_row_and_needs_no_network(done, folder):
    text = (folder / "report.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert all(source.startswith("data:image/svg+xml;base64,") for source in reader.asked)
    assert reader.images == len(reader.asked) == 5
    assert set(reader.anchors) == {f"#{name}" for name in CATALOGUE} and len(reader.ids) == 10
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    assert "url(" not in style and "@import" not in style
    shown = {tuple(cell.replace("\xa0", " ") for cell in row) for row in reader.rows}
    for section in done.sections:
        for table in section.tables:
            for row in table.rows:
                cells = tuple(c.text + (f" {c.mark}" if c.mark else "") for c in row)
                assert cells in shown, (section.name, cells)


def test_both_reports_say_how_they_were_made(folder):
    for name in ("report.html", "report.md"):
        text = (folder / name).read_text().replace("\\", "")
        for piece in (
            "fedtopo reproduce all --seeds 2",
            f"torch {torch.__version__}",
            "0 to 1",
            "rounds 4 (paper: 150), 2 seeds (paper: 10)",
            "target effective blending",
            "cores",
        ):
            assert piece in text, (name, piece)


def test_every_form_is_written(done, folder):
    for section in done.sections:
        own = folder / section.name
        content = json.loads((own / "tables.json").read_text())
        assert [table["title"] for table in content] == [t.title for t in section.tables]
        names = {path.suffix for path in own.iterdir()}
        assert {".md", ".tex", ".json", ".csv"} <= names
        assert {path.stem for path in own.glob("*.svg")} == set(section.figures)
        assert {path.stem for path in own.glob("*.png")} == set(section.figures)
        assert len(list(own.glob("*.csv"))) == len(section.tables)
    links = re.findall(r"!\[.*?\]\((.*?)\)", (folder / "report.md").read_text())
    assert len(links) == 5 and all((folder / link).is_file() for link in links)


def test_one_experiment_is_a_report_of_its_own(tmp_path, parts, done):
    one = reproduce(["table8"], SEEDS, rounds=ROUNDS, processes=1, folder=parts)
    write_reproduction(one, tmp_path, ["fedtopo"])
    text = (tmp_path / "report-table8.html").read_text()
    assert "Table 8" in text and 'id="table3"' not in text
    assert not (tmp_path / "table3").exists()


def test_setups_are_shared():
    assert experiment("table6").setups[""] is experiment("table1").setups[""]
