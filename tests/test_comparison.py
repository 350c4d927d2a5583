"""The engine of ``compare``: the same bits anywhere, nothing run twice, failures as rows."""

import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedtopo_torch
from fedtopo_torch import execution
from fedtopo_torch.algorithms import Clustered, FedAvg, Local, PTopoFL
from fedtopo_torch.comparison import (
    METHODS,
    Comparison,
    Plan,
    Run,
    Spread,
    compare,
    run_plan,
)
from fedtopo_torch.datasets import Synthetic
from fedtopo_torch.models.logistic import Logistic
from fedtopo_torch.options import OptionError
from fedtopo_torch.plan import Choice
from fedtopo_torch.registry import UnknownName, algorithms
from fedtopo_torch.runs import RunFolderError
from fedtopo_torch.trainer import Trainer
from fedtopo_torch.training import Training

SMALL = ("synthetic", {"n_clients": 4, "n_train_max": 80, "n_test": 20})
HERE = {"processes": 1, "rounds": 4}

PLAIN = """
from fedtopo_torch import register
from fedtopo_torch.algorithms import FedAvg

@register("mine")
class Mine(FedAvg):
    title = "Mine"
    step: float = 1.0

    def aggregate(self, server, uplink, clients):
        return {"theta": self.step * clients.mean(uplink["theta"])}
"""

DYING = """
import os
from fedtopo_torch import register
from fedtopo_torch.algorithms import FedAvg

@register("dying")
class Dying(FedAvg):
    title = "Dying"

    def server_state(self, theta0, introductions, facts):
        print("not a result")
        if facts.seed == 1:
            os._exit(7)
        return {"theta": theta0}
"""


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(algorithms, "_classes", dict(algorithms._classes))
    (tmp_path / "algorithms").mkdir()

    def write(name, text):
        (tmp_path / "algorithms" / name).write_text(text)

    return write


@pytest.fixture
def trained(monkeypatch):
    """The (method, seed) of every training that really runs in this process."""
    done = []
    original = Trainer.run

    def run(self):
        done.append((self.algorithm.name, self.seed))
        return original(self)

    monkeypatch.setattr(Trainer, "run", run)
    return done


def content(comparison):
    """Everything measured, as text: equal texts are equal bits, NaN included."""
    rows = []
    for run in comparison.runs:
        kept = run.to_json()
        del kept["seconds"]
        rows.append([run.dataset, run.method, run.seed, run.error, kept])
    return json.dumps(rows)


def made_run(method="A", seed=0, losses=(0.3, 0.5), **changed):
    """A run made by hand: two clients of 10 and 30 test records."""
    n = (10, 30)
    pooled = float(np.nansum(np.multiply(losses, n)) / sum(n))
    keys = [f"{s} {m}" for s in ("train", "test") for m in ("log_loss", "auc", "accuracy")]
    values = {
        "dataset": "synthetic",
        "method": method,
        "seed": seed,
        "clients": ("x", "y"),
        "honest": (True, True),
        "n": {"train": n, "test": n},
        "pooled": dict.fromkeys(keys, pooled),
        "per_client": dict.fromkeys(keys, tuple(losses)),
        "curve_rounds": (1, 2),
        "curve": (0.6, pooled),
    }
    return Run(**(values | changed))


def made(methods, losses, seeds):
    """A comparison made by hand: ``losses[method][seed]`` are the clients' log-losses."""
    plan = Plan.of(methods, "synthetic", seeds)
    runs = [
        made_run(label, seed, losses[label][s])
        for s, seed in enumerate(plan.seeds)
        for label in losses
    ]
    return Comparison(plan, tuple(runs))


# ---- what is refused before anything runs -------------------------------------------------------


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ([], "empty"),
        ([0, 1, 1, 0, 2], "seeds 0, 1 given more than once"),
        ([3, 3], "seed 3 given more than once"),
        (0, "0 seeds"),
        (-2, "-2 seeds"),
        ([1.5], "seed 1.5 is not a whole number"),
        ([True], "seed True is not"),
        (True, "seed True is not"),
    ],
)
def test_seeds_that_are_no_seeds(seeds, message):
    with pytest.raises(OptionError, match=message):
        Plan.of("fedavg", SMALL, seeds)


def test_seeds_are_a_number_or_a_list():
    assert Plan.of("fedavg", SMALL, 3).seeds == (0, 1, 2)
    assert Plan.of("fedavg", SMALL, np.array([5, 2])).seeds == (5, 2)


def test_names_options_and_settings_are_checked():
    with pytest.raises(UnknownName, match="Did you mean 'fedavg'"):
        Plan.of("fedavgg", SMALL)
    with pytest.raises(OptionError, match=r"no option 'abr'.*'abar'"):
        Plan.of(("ptopofl", {"abr": 0.2}), SMALL)
    with pytest.raises(OptionError, match=r"no option 'round'.*'rounds'"):
        compare("fedavg", SMALL, round=3)
    with pytest.raises(OptionError, match="rounds = 0"):
        compare("fedavg", SMALL, rounds=0)
    with pytest.raises(OptionError, match="eta"):
        compare("fedavg", SMALL, eta=-1.0)
    with pytest.raises(OptionError, match="processes is 0"):
        compare("fedavg", SMALL, processes=0)


def test_nothing_and_the_same_twice_are_refused():
    with pytest.raises(OptionError, match="no method"):
        Plan.of([], SMALL)
    with pytest.raises(OptionError, match="no federation"):
        Plan.of("fedavg", [])
    with pytest.raises(OptionError, match="method 'FedAvg' is listed 2 times"):
        Plan.of(["fedavg", "local", FedAvg()], SMALL)
    with pytest.raises(OptionError, match="federation 'synthetic' is listed 2 times"):
        Plan.of("fedavg", ["synthetic", "synthetic"])


def test_a_folder_that_can_not_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="can't make"):
        compare("fedavg", SMALL, 1, folder=tmp_path / "file", **HERE)


# ---- plans --------------------------------------------------------------------------------------


def test_all_is_table_one():
    plan = Plan.of("all", "synthetic")
    assert tuple(method.key for method in plan.methods) == METHODS
    assert len(plan.jobs()) == 11 * 10


def test_labels_show_what_differs_from_the_defaults():
    plan = Plan.of(
        ["ptopofl", ("ptopofl", {"n_clusters": "1", "abar": 0.3}), Clustered(labels=(0, 1, 0, 1))],
        {"tails": ("synthetic", {"regime": "tails"}), "plain": "synthetic"},
    )
    assert [m.label for m in plan.methods] == [
        "pTopoFL",
        "pTopoFL (n_clusters=1)",
        "Clustered (labels=0,1,0,1)",
    ]
    assert [d.label for d in plan.datasets] == ["tails", "plain"]
    assert [m.is_default for m in plan.methods] == [True, False, False]


def test_jobs_keep_methods_of_a_seed_together():
    plan = Plan.of(["local", "fedavg"], SMALL, [4, 2])
    assert [(j.method.key, j.seed) for j in plan.jobs()] == [
        ("local", 4),
        ("fedavg", 4),
        ("local", 2),
        ("fedavg", 2),
    ]


def test_methods_are_found_by_label_and_by_name():
    plan = Plan.of({"one": ("ptopofl", {"n_clusters": 1}), "two": "ptopofl"}, SMALL)
    assert plan.method("two").label == "two"
    assert plan.method("ptopofl").label == "one"
    with pytest.raises(OptionError, match="'fedavg' is not in this comparison"):
        plan.method("fedavg")


def test_curves_have_about_fifty_points_and_the_last_round():
    assert Training(rounds=150).every == 3
    assert Training(rounds=20).every == 1
    assert Training(rounds=150, eval_every=40).every == 40
    comparison = compare("fedavg", SMALL, 1, processes=1, rounds=7, eval_every=3)
    rounds, values = comparison.curve(comparison.plan.datasets[0].label, "FedAvg")
    assert rounds.tolist() == [3, 6, 7] and values.shape == (1, 3)
    assert values[0, -1] == pytest.approx(comparison.runs[0].pooled["test log_loss"], abs=1e-14)


@pytest.mark.parametrize(
    "spec", ["ptopofl", ("ptopofl", {"abar": 0.5}), PTopoFL(n_clusters="auto"), Local()]
)
def test_a_choice_survives_the_way_to_a_worker(spec):
    choice = Choice.of("algorithm", spec)
    again = pickle.loads(pickle.dumps(choice))
    assert (again.label, again.instance) == (choice.label, choice.instance)
    assert again.described() == choice.described()


def test_a_class_that_workers_can_not_import_is_refused_before_anything_runs():
    class Hidden(FedAvg):
        title = "Hidden"

    with pytest.raises(OptionError, match=r"can't import the algorithm .*Hidden.*processes=1"):
        compare([Hidden(), "local"], SMALL, 1, processes=2, rounds=2)
    comparison = compare(Hidden(), SMALL, 1, **HERE)
    assert not comparison.failures


def test_an_instance_of_a_workspace_class_travels_by_its_name(workspace):
    workspace("mine.py", PLAIN)
    choice = Choice.of("algorithm", algorithms["mine"](step=0.5))
    assert choice.reference() == ("name", "mine")
    assert pickle.loads(pickle.dumps(choice)).instance.step == 0.5


# ---- one run ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """FedAvg, Local and pTopoFL on two seeds, in this process."""
    return compare(["local", "fedavg", "ptopofl"], {"toy": SMALL}, [3, 1], **HERE)


def direct(method, seed):
    federation = Synthetic(**SMALL[1]).load(seed)
    return Trainer(method, federation, Logistic(), rounds=4, seed=seed).run()


def test_a_run_is_what_the_trainer_gives(small):
    for method in (Local(), FedAvg(), PTopoFL()):
        runs = small.of("toy", method.title)
        assert [run.seed for run in runs] == [3, 1]
        for run in runs:
            result = direct(method, run.seed)
            for split in ("train", "test"):
                for metric in ("log_loss", "auc", "accuracy"):
                    score = result.history.last(split, metric)
                    key = f"{split} {metric}"
                    assert run.pooled[key] == pytest.approx(score.pooled, abs=1e-14)
                    np.testing.assert_allclose(run.per_client[key], score.clients, atol=1e-14)
            np.testing.assert_allclose(run.curve, result.history.pooled(), atol=1e-14)
            assert run.communication == result.communication
            assert run.parameters == result.theta.shape[1] == 21
            assert run.eta == result.facts.eta
            assert run.n["test"] == (20, 20, 20, 20)


def test_clusters_are_kept(small):
    assert small.of("toy", "FedAvg")[0].clusters is None
    labels = direct(PTopoFL(), 3).server["labels"]
    assert small.of("toy", "pTopoFL")[0].clusters == tuple(labels.tolist())


def test_warnings_for_people_are_kept_once_and_do_not_escape(recwarn):
    comparison = compare(("fedprox", {"mu": 0.0}), SMALL, 1, processes=1, rounds=3, l2=0.0)
    (run,) = comparison.runs
    expected = direct_warnings(("fedprox", {"mu": 0.0}))
    assert run.warnings == expected
    assert len(recwarn) == 0


def direct_warnings(spec):
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare_method = algorithms[spec[0]](**spec[1])
        federation = Synthetic(**SMALL[1]).load(0)
        Trainer(compare_method, federation, Logistic(), rounds=3, l2=0.0).run()
    return tuple(dict.fromkeys(str(w.message) for w in caught if w.category is UserWarning))


def test_one_federation_is_loaded_once_for_all_methods(monkeypatch):
    loads = []
    original = Synthetic.load
    monkeypatch.setattr(
        Synthetic, "load", lambda self, seed: loads.append(seed) or original(self, seed)
    )
    compare(["local", "fedavg", "clustered"], SMALL, 2, **HERE)
    assert loads == [0, 1]


def test_progress_is_told_after_each_run():
    told = []
    compare(["local", "fedavg"], {"toy": SMALL}, 2, on_progress=lambda *a: told.append(a), **HERE)
    assert told[0] == (1, 4, "Local on toy, seed 0")
    assert [done for done, _, _ in told] == [1, 2, 3, 4]


# ---- processes ----------------------------------------------------------------------------------


def test_two_processes_give_the_bits_of_one_also_for_a_method_of_the_workspace(workspace):
    workspace("mine.py", PLAIN)
    plan = Plan.of(
        ["local", "fedavg", ("mine", {"step": 0.9}), "ptopofl", Clustered(labels=(0, 1, 0, 1))],
        [SMALL, "fed_heart_disease"],
        2,
        rounds=3,
    )
    told = []
    two = run_plan(plan, processes=2, on_progress=lambda *a: told.append(a[0]))
    one = run_plan(plan, processes=1)
    assert not one.failures and not two.failures
    assert two.processes == 2
    assert content(one) == content(two)
    assert told == list(range(1, 21))


def test_a_worker_that_dies_is_a_failed_row_and_prints_are_harmless(workspace):
    workspace("dying.py", DYING)
    comparison = compare(["dying", "fedavg"], SMALL, 3, processes=2, rounds=2)
    (failure,) = comparison.failures
    assert (failure.method, failure.seed) == ("Dying", 1)
    assert "ended with exit code 7" in failure.error
    assert len(comparison.runs) == 6


def test_a_script_needs_no_main_guard(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "from fedtopo_torch.comparison import compare\n"
        "c = compare(['local', 'fedavg'], 'synthetic', 2, rounds=2, processes=2)\n"
        "print(len(c.runs), len(c.failures), c.processes)\n"
    )
    root = str(Path(fedtopo_torch.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout.strip()) == (0, "4 0 2"), done.stderr


def test_workers_that_can_not_start_are_one_clear_error(monkeypatch):
    monkeypatch.setattr(execution, "__name__", "no_such_module")
    with pytest.raises(RuntimeError, match=r"could not start .*processes=1"):
        compare(["local", "fedavg"], SMALL, 1, processes=2, rounds=2)


def test_idle_workers_help_with_the_group_that_has_most_left():
    plan = Plan.of(["local", "fedavg", "clustered"], SMALL, 2)
    deal = execution._Deal(plan.jobs())
    a, b = deal.next(None), deal.next(None)
    assert (a.seed, b.seed) == (0, 1)
    # Each keeps to its own seed; the second has three jobs at once, and then helps.
    b = deal.next(deal.next(b))
    assert b.seed == 1
    helped = deal.next(b)
    assert (helped.seed, helped.method.key) == (0, "fedavg")
    last = deal.next(a)
    assert (last.seed, last.method.key) == (0, "clustered")
    assert deal.next(last) is None and deal.next(None) is None


# ---- failures and interrupts --------------------------------------------------------------------


def test_a_diverging_method_is_a_row_that_says_where_and_stops_no_other():
    comparison = compare(
        ["fedavg", ("ptopofl", {"n_clusters": 9}), "local"], SMALL, 2, processes=1, rounds=3
    )
    assert [(run.method, run.seed) for run in comparison.failures] == [
        ("pTopoFL (n_clusters=9)", 0),
        ("pTopoFL (n_clusters=9)", 1),
    ]
    assert "9" in comparison.failures[0].error and "4 clients" in comparison.failures[0].error
    assert len(comparison.of(comparison.plan.datasets[0].label, "Local")) == 2

    comparison = compare("fedavg", SMALL, [5], processes=1, rounds=400, eta=1e6, l2=1.0)
    (failure,) = comparison.failures
    assert failure.seed == 5
    assert "FedAvg diverged in round" in failure.error and "client 'client" in failure.error


def test_any_exception_names_its_kind(workspace):
    workspace("mine.py", PLAIN.replace("self.step *", "self.nothing *"))
    comparison = compare(["mine", "fedavg"], SMALL, 1, **HERE)
    (failure,) = comparison.failures
    assert failure.error.startswith("AttributeError: ") and "nothing" in failure.error


def test_a_federation_that_does_not_load_fails_all_its_runs_and_is_tried_once(monkeypatch):
    tries = []

    def load(self, seed):
        tries.append(seed)
        raise ValueError("the table is torn")

    monkeypatch.setattr(Synthetic, "load", load)
    comparison = compare(["local", "fedavg"], [SMALL, "fed_heart_disease"], 1, **HERE)
    assert [run.error for run in comparison.failures] == ["the table is torn"] * 2
    assert tries == [0] and len(comparison.runs) == 4


def interrupt_after(count):
    def progress(done, total, label):
        if done == count:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupt_keeps_what_is_finished_and_the_rest_is_done_later(tmp_path, processes):
    plan = Plan.of(["local", "fedavg"], SMALL, 3, rounds=2)
    part = run_plan(plan, processes=processes, folder=tmp_path, on_progress=interrupt_after(2))
    assert part.interrupted
    assert 2 <= len(part.runs) < 6 and not part.failures
    assert len(list(tmp_path.glob("*.json"))) == len(part.runs)
    rest = run_plan(plan, processes=1, folder=tmp_path)
    assert not rest.interrupted
    assert rest.stored == len(part.runs) and len(rest.runs) == 6
    assert content(rest) == content(run_plan(plan, processes=1))
    assert part.summary()[0].planned == 3


def test_ctrl_c_inside_a_training_stops_the_comparison(monkeypatch):
    original = Trainer.run

    def run(self):
        result = original(self)
        result.interrupted = self.algorithm.name == "fedavg"
        return result

    monkeypatch.setattr(Trainer, "run", run)
    comparison = compare(["local", "fedavg", "clustered"], SMALL, 1, **HERE)
    assert comparison.interrupted and [run.method for run in comparison.runs] == ["Local"]


# ---- kept results -------------------------------------------------------------------------------


def test_nothing_is_run_twice(tmp_path, trained):
    plan = Plan.of(["local", "fedavg", "ptopofl"], SMALL, 2, rounds=3)
    first = run_plan(plan, processes=1, folder=tmp_path)
    assert len(trained) == 6 and first.stored == 0
    second = run_plan(plan, processes=1, folder=tmp_path)
    assert len(trained) == 6 and second.stored == 6
    assert content(first) == content(second)
    assert second.summary() == first.summary()
    # More seeds and methods only add theirs.
    compare(["fedavg", "ditto"], SMALL, 3, processes=1, folder=tmp_path, rounds=3)
    assert trained[6:] == [("ditto", 0), ("ditto", 1), ("fedavg", 2), ("ditto", 2)]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"key": 1}', b"\xff\xfe", None])
def test_a_file_that_is_cut_off_or_not_ours_is_made_again(tmp_path, trained, damage):
    plan = Plan.of(["local", "fedavg"], SMALL, 1, rounds=2)
    before = content(run_plan(plan, processes=1, folder=tmp_path))
    path = sorted(tmp_path.glob("*.json"))[0]
    path.write_bytes(path.read_bytes()[:-40] if damage is None else damage)
    again = run_plan(plan, processes=1, folder=tmp_path)
    assert len(trained) == 3 and again.stored == 1
    assert content(again) == before
    assert run_plan(plan, processes=1, folder=tmp_path).stored == 2


def test_what_changes_a_result_makes_a_new_run(tmp_path, trained):
    def runs(method="fedavg", dataset=SMALL, seeds=1, **settings):
        before = len(trained)
        settings = {"rounds": 2} | settings
        compare(method, dataset, seeds, processes=1, folder=tmp_path, **settings)
        return len(trained) - before

    assert runs() == 1 and runs() == 0
    assert runs(rounds=3) == 1
    assert runs(local_steps=2) == 1
    assert runs(eta=0.1) == 1
    assert runs(l2=0.1) == 1
    assert runs(eval_every=2) == 1
    assert runs(seeds=[1]) == 1
    assert runs(dataset=("synthetic", SMALL[1] | {"n_test": 21})) == 1
    assert runs(method=("fedprox", {"mu": 0.2})) == 1
    assert runs(method=("fedprox", {"mu": 0.3})) == 1
    # The same thing said otherwise is the same run, and labels are only labels.
    assert runs(method=FedAvg(), model="logistic") == 1
    assert runs(method={"my name": "fedavg"}, dataset={"my data": SMALL}) == 0
    assert runs() == 0


def test_changed_records_make_a_new_run(tmp_path, trained, monkeypatch):
    compare("fedavg", SMALL, 1, folder=tmp_path, **HERE)
    original = Synthetic.load
    # As when somebody edits a CSV file: the same options, other records.
    monkeypatch.setattr(Synthetic, "load", lambda self, seed: original(self, seed + 1))
    assert compare("fedavg", SMALL, 1, folder=tmp_path, **HERE).stored == 0


def test_an_edited_csv_file_makes_a_new_run(tmp_path, workspace):
    home = tmp_path / "datasets" / "ours"
    home.mkdir(parents=True)
    for name, shift in (("north", 0), ("south", 1)):
        rows = [f"{(i * 7) % 11 + shift},{(i * 5) % 3},{i % 2}" for i in range(40)]
        (home / f"{name}.csv").write_text("\n".join(["age,dose,ill", *rows]) + "\n")
    ours = ("ours", {"target": "ill"})
    kept = {"folder": tmp_path / "kept", **HERE}
    first = compare(["local", "fedavg"], ours, 2, **kept)
    assert not first.failures and first.clients("ours (target=ill)") == ["north", "south"]
    assert compare(["local", "fedavg"], ours, 2, **kept).stored == 4
    path = home / "north.csv"
    path.write_text(path.read_text().replace("\n0,0,0\n", "\n3,0,0\n", 1))
    assert compare(["local", "fedavg"], ours, 2, **kept).stored == 0


def test_a_changed_method_file_makes_a_new_run(tmp_path, workspace, trained):
    from fedtopo_torch import plan

    workspace("mine.py", PLAIN)
    compare("mine", SMALL, 1, folder=tmp_path / "kept", **HERE)
    assert compare("mine", SMALL, 1, folder=tmp_path / "kept", **HERE).stored == 1
    workspace("mine.py", PLAIN.replace("self.step *", "0.5 * self.step *"))
    plan._source_digest.cache_clear()
    assert compare("mine", SMALL, 1, folder=tmp_path / "kept", **HERE).stored == 0


def test_failed_runs_are_tried_again(tmp_path, trained):
    for _ in range(2):
        compare(("ptopofl", {"n_clusters": 9}), SMALL, 1, folder=tmp_path, **HERE)
    assert len(trained) == 2 and not list(tmp_path.iterdir())


# ---- summaries ----------------------------------------------------------------------------------


def test_spread_leaves_undefined_values_out_and_counts():
    assert Spread.of([1.0, math.nan, 3.0]) == (2.0, 1.0, 2)
    assert Spread.of([]).seeds == 0 and math.isnan(Spread.of([math.nan]).mean)


def test_summary_by_hand():
    losses = {
        "FedAvg": [(0.4, 0.4), (0.4, 0.4)],
        "Local": [(0.3, 0.7), (0.4, 0.3)],
        "pTopoFL": [(0.4 + 5e-10, 0.5), (0.2, 0.2)],
    }
    comparison = made(["fedavg", "local", "ptopofl"], losses, 2)
    fedavg, local, ours = comparison.summary()
    assert ours.loss.mean == pytest.approx(((4 + 15) / 40 + 8 / 40) / 2)
    assert ours.loss.std == pytest.approx(((4 + 15) / 40 - 8 / 40) / 2)
    # Seed 0: the first client ties within 1e-9, the second is worse; seed 1: none is.
    assert ours.worse_than_fedavg == pytest.approx(0.25)
    assert ours.worse_than_local == pytest.approx(0.25)
    assert local.worse_than_fedavg == pytest.approx((0.5 + 0.0) / 2)
    assert fedavg.worse_than_fedavg == 0.0
    assert local.worst_client == pytest.approx((0.7 + 0.4) / 2)
    assert ours.client_loss == pytest.approx((0.45 + 0.2) / 2)
    assert ours.test is None and fedavg.test is not None and not fedavg.test.possible


def test_clients_without_a_value_or_not_honest_are_left_out_and_counted():
    plan = Plan.of(["fedavg", "local"], "synthetic", 1)
    three = {"clients": ("x", "y", "z"), "n": {"train": (1, 1, 1), "test": (0, 1, 1)}}
    one = made_run("FedAvg", losses=(0.4, 0.4), **three)
    nan = math.nan
    scores = {
        "test log_loss": (nan, 0.3, 9.0),
        "test auc": (nan, nan, 0.5),
        "test accuracy": (nan, 0.5, 0.0),
    }
    honest = {"honest": (True, True, False)}
    one = made_run("FedAvg", **three, **honest, per_client=scores)
    two = made_run(
        "Local", **three, **honest, per_client=scores | {"test log_loss": (nan, 0.2, 0.1)}
    )
    fedavg, _ = Comparison(plan, (one, two)).summary()
    assert fedavg.worst_client == 0.3 and fedavg.client_accuracy == 0.5
    assert fedavg.worse_than_local == 1.0
    assert (fedavg.client_values, fedavg.without_value, fedavg.without_score) == (2, 1, 1)
    assert math.isnan(fedavg.client_score)


def test_summary_equals_a_computation_from_the_trainers_results(small):
    results = {
        title: [direct(method, seed) for seed in (3, 1)]
        for title, method in (("Local", Local()), ("FedAvg", FedAvg()), ("pTopoFL", PTopoFL()))
    }
    for row in small.summary():
        own = results[row.method]
        pooled = [r.history.last().pooled for r in own]
        assert row.loss.mean == pytest.approx(np.mean(pooled), abs=1e-14)
        assert row.loss.std == pytest.approx(np.std(pooled), abs=1e-14)
        aucs = [r.history.last("test", "auc").pooled for r in own]
        assert row.score.mean == pytest.approx(np.mean(aucs), abs=1e-14)
        clients = np.array([r.history.last().clients.numpy() for r in own])
        assert row.worst_client == pytest.approx(clients.max(1).mean(), abs=1e-14)
        for name in ("FedAvg", "Local"):
            other = np.array([r.history.last().clients.numpy() for r in results[name]])
            worse = (clients - other >= 1e-9).mean()
            assert getattr(row, f"worse_than_{name.lower()}") == pytest.approx(worse)
        sent = own[0].communication
        assert (row.up, row.down) == (
            sent.round.get("up", (0, 0)),
            sent.round.get("down", (0, 0)),
        )
    assert [row.up_once[0] for row in small.summary()] == [0, 0, 46]


def test_marks_come_with_six_seeds():
    seeds = 6
    base = [(0.40 + 0.01 * s, 0.45) for s in range(seeds)]
    up = [(x + 0.05 + 0.01 * s, y) for s, (x, y) in enumerate(base)]
    losses = {"FedAvg": up, "pTopoFL": base}
    fedavg, ours = made(["fedavg", "ptopofl"], losses, seeds).summary()
    assert fedavg.mark == "+" and ours.test is None and ours.mark == ""
    assert fedavg.test.p == pytest.approx(2 / 64)
    # Seen from FedAvg, the other is better; a reference that is not compared is refused.
    comparison = made(["fedavg", "ptopofl"], losses, seeds)
    assert [row.mark for row in comparison.summary("fedavg")] == ["", "-"]
    with pytest.raises(OptionError, match="'ditto' is not in this comparison"):
        comparison.summary("ditto")
    few = made(["fedavg", "ptopofl"], losses, 5).summary()
    assert few[0].mark == "" and not few[0].test.possible


def test_without_ptopofl_nothing_is_tested():
    losses = {"FedAvg": [(0.4, 0.4)] * 6, "Local": [(0.3, 0.7)] * 6}
    assert [row.test for row in made(["fedavg", "local"], losses, 6).summary()] == [None, None]


def test_the_plain_method_is_the_measure_of_worse():
    losses = {"FedProx (mu=0.5)": [(0.5, 0.3)], "one": [(0.0, 0.0)], "FedAvg": [(0.4, 0.4)]}
    methods = {
        "FedProx (mu=0.5)": ("fedprox", {"mu": 0.5}),
        "one": "ditto",
        "FedAvg": "fedavg",
    }
    rows = made(methods, losses, 1).summary()
    assert [row.worse_than_fedavg for row in rows] == [0.5, 0.0, 0.0]
    assert all(math.isnan(row.worse_than_local) for row in rows)


def test_arrays_and_the_long_table(small):
    values = small.values("toy", "FedAvg", "auc")
    assert values.shape == (2,)
    assert small.clients("toy") == [f"client_0{k}" for k in range(4)]
    clients = small.client_values("toy", "FedAvg")
    assert clients.shape == (2, 4)
    rows = list(small.rows())
    # Three methods, two seeds, two splits, three metrics, four clients and pooled.
    assert len(rows) == 3 * 2 * 2 * 3 * 5
    pooled = [
        row.value for row in rows if row[1:2] + row[3:6] == ("FedAvg", "(pooled)", "test", "auc")
    ]
    assert pooled == values.tolist()
    assert {row.n for row in rows if row.split == "test"} == {20, 80}


def test_missing_runs_are_nan_and_failed_ones_counted():
    plan = Plan.of(["fedavg", "local"], "synthetic", 3)
    runs = (made_run("FedAvg", 0), Run("synthetic", "FedAvg", 1, error="no"), made_run("Local", 2))
    comparison = Comparison(plan, runs, interrupted=True)
    assert np.isnan(comparison.values("synthetic", "FedAvg")).tolist() == [False, True, True]
    fedavg, local = comparison.summary()
    assert (fedavg.finished, fedavg.failed, fedavg.planned) == (1, 1, 3)
    assert (local.finished, local.failed) == (1, 0)
    assert math.isnan(local.worse_than_fedavg)


def test_a_method_that_never_finished_has_a_row():
    plan = Plan.of(["fedavg"], "synthetic", 1)
    failed = Run("synthetic", "FedAvg", 0, error="no")
    (row,) = Comparison(plan, (failed,)).summary()
    assert (row.finished, row.failed) == (0, 1) and math.isnan(row.loss.mean)
