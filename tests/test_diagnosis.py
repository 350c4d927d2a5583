"""What is said of a federation before it is trained."""

import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn.metrics import adjusted_rand_score

from fedtopo_torch import Client, Federation, topology, train
from fedtopo_torch.algorithms import PTopoFL
from fedtopo_torch.datasets import Synthetic
from fedtopo_torch.diagnosis import (
    MOST_COLUMNS,
    Pilot,
    _changed,
    advise,
    column_groups,
    described_clouds,
    diagnose,
    hold_outs_of,
    members,
)
from fedtopo_torch.diagnosis_tables import diagnosis_tables, partitions_table
from fedtopo_torch.options import OptionError
from fedtopo_torch.randomness import generator
from fedtopo_torch.report import write_diagnosis
from fedtopo_torch.runs import diagnosis_files, diagnosis_folder

QUICK = {"pilot_rounds": 3, "hold_outs": 2}


def told(diagnosis) -> str:
    """Everything a diagnosis says, as one text."""
    tables = [table.json() + table.markdown() for table in diagnosis_tables(diagnosis)]
    return "\n".join([diagnosis.advice.sentence, *diagnosis.findings, *tables])


def one_column_apart(n=40, k=5):
    """Client e differs from the others in column "lab", which is large and 0 for it alone."""
    rng = np.random.default_rng(3)
    clients = []
    for name in "abcde"[:k]:
        x = rng.normal(size=(n, 3))
        x[:, 2] = 0.0 if name == "e" else rng.normal(200, 40, size=n)
        clients.append(Client(name, train=(x, (x[:, 0] > 0).astype(int))))
    return Federation(clients, feature_names=["age", "pulse", "lab"], name="labs")


# ---- parts --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), min_size=2, max_size=60),
    hold_outs=st.integers(2, 7),
    seed=st.integers(0, 5),
)
def test_hold_outs_take_each_record_once_and_classes_evenly(labels, hold_outs, seed):
    labels = np.array(labels)
    dealt = hold_outs_of(labels, hold_outs, np.random.default_rng(seed))
    assert set(dealt) <= set(range(hold_outs))
    for part in (labels >= 0, *(labels == c for c in range(4))):
        counts = np.bincount(dealt[part], minlength=hold_outs)
        assert counts.max() - counts.min() <= 1
    # Something is left to train on in every hold-out.
    assert all((dealt != h).any() for h in range(hold_outs))


def test_the_only_record_of_a_client_is_not_held_out():
    assert hold_outs_of(np.array([1]), 5, np.random.default_rng(0)).tolist() == [-1]


def test_one_hot_features_of_a_column_are_one_group():
    rng = np.random.default_rng(0)
    onehot = np.eye(2)[rng.integers(0, 2, 9)]
    numbers = rng.normal(size=(9, 4))
    cloud = np.column_stack([numbers[:, 0], onehot, numbers[:, 1:3], onehot[:, 0]])
    names = ["age", "sex=f", "sex=m", "dose=mg", "dose=day", "ward=b"]
    assert column_groups(names, [cloud, cloud]) == {
        "age": (0,),
        "sex": (1, 2),
        "dose=mg": (3,),  # not 0 and 1: two numeric columns with such names
        "dose=day": (4,),
        "ward=b": (5,),  # alone
    }
    # A plain column may be called like the source of one-hot features.
    both = column_groups(["sex", "sex=f", "sex=m"], [np.column_stack([numbers[:, 0], onehot])])
    assert both == {"sex": (0,), "sex=": (1, 2)}


def test_size_and_pattern_of_changed_distances():
    before = np.array([[0, 3, 4], [3, 0, 0], [4, 0, 0]], dtype=float)
    assert _changed(before, 2 * before) == pytest.approx((2.0, 0.0), abs=1e-7)
    apart = np.array([[0, 0, 0], [0, 0, 5], [0, 5, 0]], dtype=float)
    size, change = _changed(before, apart)
    assert size == pytest.approx(5 / 7) and change == pytest.approx(1.0)
    assert _changed(np.zeros((3, 3)), before) == (None, None)
    assert _changed(before, np.zeros((3, 3))) == (0.0, 1.0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_pattern_s_change_is_what_no_factor_explains(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(0.1, 1, size=(2, 4, 4))
    residual = minimize_scalar(lambda c: np.linalg.norm(a - c * b), options={"xtol": 1e-12}).fun
    assert _changed(a, b)[1] == pytest.approx(residual / np.linalg.norm(a), abs=1e-7)


def test_members_in_words():
    assert members(["a", "b", "c"], [0, 1, 0]) == "{a, c} | {b}"
    assert members(list("abcdefgh"), [0] * 8, limit=3) == "{a, b, c, and 5 more}"


# ---- the rule of the advice ---------------------------------------------------------------------

FOUND = topology.Choice(2, {2: 0.9, 3: 0.1}, {2: 0.5, 3: 0.4}, True, "2 clusters: ARI 0.90")
NOTHING = topology.Choice(1, {2: 0.1}, {2: 0.5}, False, "no reproducible structure: ARI 0.10")
SIX = list("abcdef")


def pilot(alone, together, cluster, records=60):
    hold_outs = {"alone": alone, "together": together, "cluster": cluster}
    return Pilot(
        rounds=5,
        n=(records * len(alone) // 6,) * 6,
        clients=dict.fromkeys(hold_outs, (0.5,) * 6),
        hold_outs={name: tuple(values) for name, values in hold_outs.items()},
        records=(records,) * len(alone),
        same_partition=1,
    )


@pytest.mark.parametrize(
    ("choice", "losses", "kind", "piece"),
    [
        # Better than both in every hold-out.
        (FOUND, ([5, 5, 5], [6, 6, 6], [4, 4, 4]), "cluster", "Cluster, with M = 2"),
        # Not better than alone in every one: advised, and said.
        (FOUND, ([5, 5, 5], [6, 6, 6], [4, 4, 5.5]), "cluster", "so training alone may do as well"),
        # Lower on average, but not in most hold-outs.
        (FOUND, ([5, 5, 9], [6, 6, 10], [5.1, 5.1, 4]), "unclear", "No clear difference between"),
        # Not better than together in every one.
        (FOUND, ([5, 5, 5], [4, 6, 6], [4.5, 4, 4]), "unclear", "training in 2 clusters and"),
        # Reproducible, but another is better.
        (FOUND, ([3, 3, 3], [6, 6, 6], [4, 4, 4]), "alone", "Train alone (Local)"),
        (FOUND, ([6, 6, 6], [3, 3, 3], [4, 4, 4]), "together", "Train together (FedAvg)"),
        # Without structure clusters are not advised, however low their loss.
        (NOTHING, ([5, 5, 5], [6, 6, 6], [1, 1, 1]), "alone", "no reproducible structure"),
        (NOTHING, ([5, 5, 5], [6, 6, 4], [1, 1, 1]), "unclear", "lower alone than together in 2"),
        (NOTHING, ([5, 5, 5], [5, 5, 5], [1, 1, 1]), "unclear", "lower alone than together in 0"),
    ],
)
def test_the_rule(choice, losses, kind, piece):
    advice = advise(SIX, choice, 2, [0, 1] * 3, pilot(*losses, records=600))
    assert (advice.kind, advice.thin) == (kind, ())
    assert advice.n_clusters == (2 if kind == "cluster" else 1)
    assert piece in advice.sentence and "evidence is thin" not in advice.sentence
    assert advice.sentence.count(". ") == 0 and advice.sentence.endswith(".")


def test_a_number_of_clusters_asked_for_needs_structure_of_its_own():
    advice = advise(SIX, FOUND, 3, [0, 1, 2] * 2, pilot([5, 5], [6, 6], [1, 1]))
    assert advice.kind == "alone" and "no reproducible structure with M = 3" in advice.sentence


def test_one_hold_out_decides_nothing():
    advice = advise(SIX, NOTHING, 2, [0, 1] * 3, pilot([5], [6], [4], records=600))
    assert advice.kind == "unclear" and advice.thin == ("one hold-out",)


def test_thin_evidence_is_called_thin():
    losses = [5, 5], [6, 6], [4, 4]
    few = advise(list("abc"), FOUND, 2, [0, 0, 1], pilot(*losses), few=["c"])
    assert few.thin == (
        "3 clients",
        "120 held-out records",
        "a cluster of clients with fewer than 20 records only",
    )
    assert "the evidence is thin (3 clients, 120 held-out records and a cluster" in few.sentence
    most = advise(SIX, FOUND, 2, [0, 1] * 3, pilot(*losses, records=200), few=list("abcd"))
    assert most.thin == ("most clients have fewer than 20 records",)


def test_what_carries_a_partition_belongs_to_the_advice():
    losses = [5, 5], [6, 6], [4, 4]
    one = advise(SIX, FOUND, 2, [0, 1] * 3, pilot(*losses), carriers=["chol"])
    two = advise(SIX, FOUND, 2, [0, 1] * 3, pilot(*losses), carriers=["chol", "age"])
    none = advise(SIX, NOTHING, 2, [0, 1] * 3, pilot(*losses), carriers=["chol"])
    assert "look at chol first, which carries the partition" in one.sentence
    assert "look at chol and age first, which each carry the partition" in two.sentence
    assert "chol" not in none.sentence


# ---- numbers against other ways to compute them -------------------------------------------------


@pytest.fixture(scope="module")
def dim():
    options = {"n_clients": 6, "n_features": 6, "ranks": (1, 5), "n_test": 10}
    return Synthetic(**options).load(seed=0)


@pytest.fixture(scope="module")
def diagnosed(dim):
    return diagnose(dim, seed=4, pilot_rounds=5, hold_outs=3)


def test_descriptors_and_trust_are_those_of_a_run(dim, diagnosed):
    server = train("ptopofl", dim, seed=4, rounds=1).server
    np.testing.assert_array_equal(diagnosed.phi, server["descriptor"])
    np.testing.assert_array_equal(diagnosed.trust, server["trust"])
    two = next(each for each in diagnosed.clusterings if each.n_clusters == 2)
    assert two.labels == tuple(server["labels"].tolist())


def test_partitions_are_those_of_topology(dim, diagnosed):
    size = topology.cloud_size(dim.train.n.numpy())
    halves = topology.halves(dim.clouds, dim.names, seed=4, size=size, repeats=5)
    assert diagnosed.choice == topology.choose_n_clusters(diagnosed.phi, halves)
    assert [each.n_clusters for each in diagnosed.clusterings] == [1, 2, 3, 4, 5]
    for each in diagnosed.clusterings:
        assert each.radius == topology.guaranteed_radius(diagnosed.phi, each.labels)
    assert adjusted_rand_score(dim.groups, diagnosed.clustering.labels) == 1
    assert math.isinf(diagnosed.clusterings[0].radius)


def test_rho_is_that_of_the_clients_own_models(dim, diagnosed):
    optima = train("local", dim, rounds=5, seed=4).theta.numpy()
    p = dim.train.n.numpy() / int(dim.train.n.sum())
    labels = np.array(diagnosed.clustering.labels)
    total = sum(p[k] * np.sum((optima[k] - p @ optima) ** 2) for k in range(len(p)))

    def explained(labels):
        within = 0.0
        for k in range(len(p)):
            own = labels == labels[k]
            mean = sum(p[i] * optima[i] for i in np.flatnonzero(own)) / p[own].sum()
            within += p[k] * np.sum((optima[k] - mean) ** 2)
        return 1 - within / total

    found = diagnosed.clustering
    assert found.explained == pytest.approx(explained(labels), abs=1e-12)
    rng = generator(4, "random partitions", round=found.n_clusters)
    chance = np.mean([explained(rng.permutation(labels)) for _ in range(200)])
    assert found.by_chance == pytest.approx(chance, abs=1e-12)
    assert found.excess == pytest.approx(explained(labels) - chance, abs=1e-12)
    one = diagnosed.clusterings[0]
    assert (one.explained, one.excess) == pytest.approx((0, 0), abs=1e-12)
    # More clusters explain more by chance.
    chance = [each.by_chance for each in diagnosed.clusterings]
    assert chance == sorted(chance) and 0 < diagnosed.clustering.as_good < 0.5


def test_hold_outs_are_runs_on_the_other_records(dim, diagnosed):
    methods = {
        "alone": "local",
        "together": "fedavg",
        "cluster": PTopoFL(n_clusters=diagnosed.n_clusters),
    }
    records, losses = np.zeros(6), {name: np.zeros(6) for name in methods}
    for h in range(3):
        clients = []
        for k, name in enumerate(dim.names):
            x, y = dim.clouds[k], dim.train.client(k)[1].numpy().astype(int)
            out = hold_outs_of(y, 3, generator(4, "hold-outs", client=name)) == h
            records[k] += out.sum()
            clients.append(Client(name, train=(x[~out], y[~out]), test=(x[out], y[out])))
        for name, method in methods.items():
            result = train(method, Federation(clients), rounds=5, seed=4)
            score = result.history.last("test", "log_loss")
            assert diagnosed.pilot.hold_outs[name][h] == pytest.approx(score.pooled, abs=1e-12)
            losses[name] += score.clients.numpy() * [len(c.test[1]) for c in clients]
    assert diagnosed.pilot.n == tuple(records) == diagnosed.n
    for name in methods:
        expected = losses[name] / records
        np.testing.assert_allclose(diagnosed.pilot.clients[name], expected, atol=1e-12)
        pooled = losses[name].sum() / records.sum()
        assert diagnosed.pilot.mean(name) == pytest.approx(pooled, abs=1e-12)


def test_columns_are_left_out_as_if_they_were_not_there():
    federation = one_column_apart()
    found = diagnose(federation, **QUICK)
    size = topology.cloud_size(federation.train.n.numpy())
    spread = np.concatenate(federation.clouds).var(axis=0)
    for column in found.columns:
        j = federation.feature_names.index(column.name)
        assert column.variance == pytest.approx(spread[j] / spread.sum())
        others = [np.delete(cloud, j, axis=1) for cloud in federation.clouds]
        phi = topology.descriptors(others, federation.names, seed=0, size=size, repeats=5)
        distances = np.linalg.norm(phi[:, None] - phi, axis=2)
        assert column.size == pytest.approx(distances.mean() / found.distances.mean())
        labels = topology.partition(phi, found.n_clusters)
        assert column.labels == tuple(labels)
        agreement = adjusted_rand_score(found.clustering.labels, labels)
        assert column.agreement == pytest.approx(agreement)
    pooled = diagnose(federation, method=PTopoFL(n_clusters="auto", scale="pooled"), **QUICK)
    assert found.units.labels == next(
        c.labels for c in pooled.clusterings if c.n_clusters == found.n_clusters
    )
    assert pooled.units.name == "all columns, own units"


# ---- what is said -------------------------------------------------------------------------------


def test_a_column_that_sets_a_client_apart_is_named():
    found = diagnose(one_column_apart(), **QUICK)
    assert found.n_clusters == 2 and found.clustering.labels == (0, 0, 0, 0, 1)
    (lab,) = [column for column in found.columns if column.carries]
    assert lab.name == "lab" == found.columns[0].name and lab.variance > 0.99
    text = " ".join(found.findings)
    assert "The pattern of the distances depends most on lab" in text
    assert "lab carries the partition into 2 clusters, {a, b, c, d} | {e}" in text
    assert "look at lab first" in found.advice.sentence


def test_structure_is_found_where_it_is_and_nowhere_else(diagnosed):
    assert diagnosed.choice.found
    assert "carries the partition" in " ".join(diagnosed.findings)
    assert "(half-split ARI 1.00)" in diagnosed.advice.sentence
    concept = Synthetic(regime="concept", n_clients=6, n_features=4).load(seed=0)
    found = diagnose(concept, **QUICK)
    assert not found.choice.found and found.advice.kind != "cluster"
    assert "no reproducible structure" in found.advice.sentence
    assert "is not reproducible" in " ".join(found.findings)
    assert not any("carries" in finding for finding in found.findings)


def records(n, d=3, classes=2, seed=0, shape=None):
    rng = np.random.default_rng([seed, n])
    x = rng.normal(size=(n, *(shape or (d,))))
    return x, rng.integers(0, classes, n)


def build(sizes, **options):
    settings = {key: options.pop(key) for key in ("task", "dtype") if key in options}
    clients = [Client(f"c{k}", records(n, seed=k, **options)) for k, n in enumerate(sizes)]
    return Federation(clients, **settings)


def same(n):
    x, y = records(n)
    return Federation([Client(name, (x, y)) for name in "abcd"])


def labelled(*classes):
    rng = np.random.default_rng(0)
    return Federation(
        [
            Client(f"c{k}", (rng.normal(size=(25, 2)), np.full(25, label)))
            for k, label in enumerate(classes)
        ]
    )


ODD = {
    "one client": (lambda: build([30]), "nobody to train with"),
    "two clients": (lambda: build([30, 30]), "at least 3 are needed"),
    "one record each": (lambda: build([1, 1, 1, 1]), "none can be held out"),
    "some of one record": (lambda: build([1, 30, 30, 30]), "4 clients"),
    "two records each": (lambda: build([2] * 5), "most clients have fewer than 20"),
    "one class each": (lambda: labelled(0, 1, 0, 1), "Train alone"),
    "one class in all": (lambda: labelled(0, 0, 0, 0), "thin"),
    "constant": (
        lambda: Federation([Client(n, (np.ones((30, 2)), np.arange(30) % 2)) for n in "abcd"]),
        "the descriptors are all the same",
    ),
    "identical": (lambda: same(30), "the descriptors are all the same"),
    "identical, subsamples": (lambda: same(120), "thin"),
    "many columns": (lambda: build([20] * 4, d=200), "thin"),
    "many clients": (lambda: build([25] * 60, d=2), "held-out log-loss"),
    "multiclass": (lambda: build([40] * 5, classes=3, task="multiclass"), "held-out log-loss"),
    "images": (lambda: build([25] * 4, shape=(1, 6, 6)), "held-out log-loss"),
    "one column": (lambda: build([30] * 4, d=1), "held-out log-loss"),
    "float32": (lambda: build([30] * 4, dtype=torch.float32), "held-out log-loss"),
}


@pytest.mark.filterwarnings("ignore:fewer than 20 training records")
@pytest.mark.parametrize("case", ODD)
def test_odd_federations_get_a_sensible_report(case, tmp_path):
    make, piece = ODD[case]
    federation = make()
    method = PTopoFL(n_clusters="auto", repeats=1)
    found = diagnose(federation, method=method, **QUICK)
    assert piece in told(found)
    assert not re.search(r"\b(nan|inf)\b", told(found), re.IGNORECASE)
    assert found.advice.sentence.endswith(".")
    for table in diagnosis_tables(found, limit=3):
        assert table.csv() and table.latex() and table.rich()
    if case in ("one client", "constant"):
        clouds = described_clouds(federation, "raw")
        assert write_diagnosis(found, clouds, diagnosis_tables(found), tmp_path / case)


def test_columns_are_capped_and_it_is_said():
    found = diagnose(build([20] * 3, d=40), method=PTopoFL(n_clusters="auto", repeats=1), **QUICK)
    assert len(found.columns) == MOST_COLUMNS and "30 of 40 columns" in found.columns_left_out
    assert "30 of 40 columns" in told(found)
    share = {column.name: column.variance for column in found.columns}
    variance = np.concatenate(build([20] * 3, d=40).clouds).var(axis=0)
    largest = np.argsort(-variance)[:30]
    assert set(share) == {f"x{j}" for j in largest}
    assert share[f"x{largest[0]}"] == pytest.approx(variance.max() / variance.sum())
    image = diagnose(build([20] * 3, shape=(6, 6)), pilot_rounds=1, hold_outs=2)
    assert not image.columns and "records of shape 6x6 have 36 values" in told(image)
    assert image.units is not None


def test_flagged_clients_get_the_caveat(diagnosed):
    assert not diagnosed.flagged and "No client is flagged" in told(diagnosed)
    trust = diagnosed.trust.copy()
    trust[2] = 0.4
    text = told(replace(diagnosed, trust=trust))
    assert "client_02. A flag marks unusual data, not dishonesty" in text


def test_the_radius_is_printed_only_where_it_is_guaranteed(diagnosed):
    changed = [replace(each, radius=None) for each in diagnosed.clusterings]
    table = partitions_table(replace(diagnosed, clusterings=tuple(changed)))
    at = [column.title for column in table.columns].index("radius")
    assert {row[at].text for row in table.rows} == {"none"}
    assert partitions_table(diagnosed).rows[0][at].text == "infinite"
    assert json.loads(partitions_table(diagnosed).json())["rows"][0]["stability_radius"] is None


# ---- promises -----------------------------------------------------------------------------------


def test_test_records_are_never_looked_at(dim, diagnosed):
    rng = np.random.default_rng(9)
    clients = []
    for k, name in enumerate(dim.names):
        other = rng.normal(size=(7, 6)) * 1e6, rng.integers(0, 2, 7)
        own = dim.clouds[k], dim.train.client(k)[1].numpy()
        clients.append(Client(name, train=own, test=other))
    clients.reverse()
    again = diagnose(Federation(clients), seed=4, pilot_rounds=5, hold_outs=3, n_jobs=2)
    assert told(again) == told(diagnosed)
    np.testing.assert_array_equal(again.phi, diagnosed.phi)
    assert again.pilot == diagnosed.pilot


def test_progress_is_counted_to_the_end():
    for federation in (build([20] * 3), build([30]), build([1, 1])):
        steps = []
        with pytest.warns(UserWarning) if len(federation) == 2 else nullcontext():
            diagnose(federation, on_progress=lambda *step: steps.append(step), **QUICK)  # noqa: B023
        assert [done for done, _, _ in steps] == list(range(1, steps[0][1] + 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hold_outs": 1}, "hold_outs is 1"),
        ({"pilot_rounds": 0}, "pilot_rounds is 0"),
        ({"pilot_rounds": 2.5}, "pilot_rounds is 2.5"),
        ({"method": PTopoFL(n_clusters=9)}, "the numbers tried"),
        ({"method": PTopoFL(n_clusters=1)}, "here: 2, 3"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        diagnose(build([20] * 4), **options)


def test_too_many_clients_are_refused(monkeypatch):
    monkeypatch.setattr("fedtopo_torch.diagnosis.MOST_CLIENTS", 3)
    with pytest.raises(OptionError, match="4 clients: all pairs are compared, so at most 3"):
        diagnose(build([20] * 4))


def test_corrupted_clients_train_and_do_not_count():
    clients = [Client(f"c{k}", records(20, seed=k), honest=k > 0) for k in range(4)]
    found = diagnose(Federation(clients), **QUICK).pilot
    assert found.n == (20,) * 4 and found.records == (30, 30)
    for name, losses in found.clients.items():
        assert found.mean(name) == pytest.approx(np.mean(losses[1:]), abs=1e-12)


def test_a_number_of_clusters_may_be_asked_for():
    found = diagnose(build([20] * 4), method=PTopoFL(n_clusters=3), **QUICK)
    assert found.n_clusters == 3 and len(set(found.clustering.labels)) == 3


# ---- the folder ---------------------------------------------------------------------------------


def test_an_earlier_diagnosis_is_replaced_and_nothing_else(tmp_path):
    first, second = one_column_apart(k=3), build([20] * 11, d=1)
    place = diagnosis_folder(tmp_path, "diagnose-x")
    found = diagnose(first, **QUICK)
    files = write_diagnosis(found, first.clouds, diagnosis_tables(found), place, ["Mind lab."])
    assert {path.name for path in place.iterdir()} == {path.name for path in files}
    report = (place / "report.md").read_text()
    assert report.startswith("# Diagnosis of labs\n") and "Note: Mind lab." in report
    assert found.findings[0].split(":")[0] in report
    assert "half-split ARI" in report and "| lab | " in report
    assert "(distances.png)" in report and "(persistence.png)" in report
    again = write_diagnosis(
        found, first.clouds, diagnosis_tables(found), tmp_path / "again", ["Mind lab."]
    )
    for one, other in zip(files, again, strict=True):
        if one.suffix != ".svg":  # matplotlib draws its identifiers at random
            assert one.read_bytes() == other.read_bytes()

    (place / "my-notes.txt").write_text("kept")
    assert diagnosis_folder(tmp_path, "diagnose-x") == place
    found = diagnose(second, **QUICK)
    files = write_diagnosis(found, second.clouds, diagnosis_tables(found), place)
    # The matrix of distances is a table for up to ten clients: no stale one stays.
    assert {path.name for path in place.iterdir()} == {p.name for p in files} | {"my-notes.txt"}
    assert not (place / "table-distances-between-descriptors.csv").exists()


def test_a_folder_that_is_no_diagnosis_is_refused(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "thesis")
    for name in ("thesis", "file", "link"):
        with pytest.raises(OptionError, match=r"is not a diagnosis \(no diagnosis.json of one\)"):
            diagnosis_folder(tmp_path, name)
    with pytest.raises(OSError, match="can't write in"):
        diagnosis_folder(tmp_path / "file" / "runs", "x")
    (tmp_path / "thesis" / "diagnosis.json").write_text('{"files": ["a"]}')
    assert diagnosis_files(tmp_path / "thesis") is None


def test_files_outside_the_folder_are_never_removed(tmp_path):
    told = {"files": ["../precious.csv", "old.csv"], "fedtopo-torch": "0"}
    (tmp_path / "diagnosis.json").write_text(json.dumps(told))
    assert diagnosis_files(tmp_path) == ["old.csv"]
