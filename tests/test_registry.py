"""Names to classes: built in, and one's own in ./algorithms."""

import pytest

from fedtopo_torch.algorithms import FedAvg, PTopoFL
from fedtopo_torch.datasets import Synthetic
from fedtopo_torch.models.logistic import Logistic
from fedtopo_torch.options import OptionError
from fedtopo_torch.registry import Registry, UnknownName, algorithms, datasets, models, register
from fedtopo_torch.trainer import train

IMPORT = "from fedtopo_torch.algorithms import FedAvg\n"


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """``write(name, text)`` puts a file into ./algorithms; what it registers is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(algorithms, "_classes", dict(algorithms._classes))
    (tmp_path / "algorithms").mkdir()

    def write(name, text):
        path = tmp_path / "algorithms" / name
        path.write_text(text)
        return path

    return write


def refused(registry, name):
    with pytest.raises(UnknownName) as caught:
        registry[name]
    return str(caught.value)


# Built in


def test_built_in_names():
    assert {"clustered", "fedavg", "local", "ptopofl"} <= set(algorithms)
    assert {"fed_heart_disease", "synthetic"} <= set(datasets)
    assert {"logistic", "softmax"} <= set(models)
    assert algorithms["fedavg"] is FedAvg
    assert datasets["synthetic"] is Synthetic
    assert models["logistic"] is Logistic


def test_names_are_taken_in_any_case_and_with_dashes():
    assert algorithms["FedAvg"] is FedAvg
    assert algorithms["pTopoFL"] is PTopoFL
    assert datasets["fed-heart-disease"] is datasets["fed_heart_disease"]


def test_every_class_knows_its_name():
    for registry in (algorithms, datasets, models):
        for name in registry:
            assert registry[name].name == name


@pytest.mark.parametrize(
    ("registry", "wrong", "near"),
    [
        (algorithms, "fedvag", "fedavg"),
        (algorithms, "ptopo", "ptopofl"),
        (datasets, "heart_disease", "fed_heart_disease"),
        (models, "logit", "logistic"),
    ],
)
def test_fault_31_unknown_name_tells_the_nearest(registry, wrong, near):
    message = refused(registry, wrong)
    assert f"no {registry.kind} called '{wrong}'" in message
    assert f"Did you mean '{near}'?" in message
    assert "Known: " in message


def test_fault_31_a_name_like_no_other_lists_the_known_ones():
    message = refused(algorithms, "zzzz")
    assert "Did you mean" not in message
    for name in ("clustered", "fedavg", "local", "ptopofl"):
        assert name in message


def test_an_unknown_name_is_an_option_error():
    assert issubclass(UnknownName, OptionError)


# Registering


def test_a_taken_name_is_refused():
    with pytest.raises(OptionError, match=r"'fedavg' is taken by .*fedavg\.FedAvg"):

        @register("fedavg")
        class Mine(FedAvg):
            pass

    assert algorithms["fedavg"] is FedAvg


def test_a_class_may_replace_itself_when_its_module_is_loaded_again():
    registry = Registry(
        "thing", "fedtopo_torch.algorithms", "fedtopo_torch.algorithms.base:Algorithm"
    )

    def load():
        @registry.register("mine")
        class Mine(FedAvg):
            pass

        return Mine

    first, again = load(), load()
    assert first is not again
    assert registry["mine"] is again


# Files of one's own


def test_a_file_in_the_workspace_is_found_by_name(workspace, make_federation):
    workspace(
        "half_step.py",
        "from fedtopo_torch import Algorithm, register\n"
        '@register("half_step")\n'
        "class HalfStep(Algorithm):\n"
        "    factor: float = 0.5\n"
        "    def personal(self, message, client, problem):\n"
        "        return message['theta'] * self.factor\n",
    )
    cls = algorithms["half_step"]
    assert cls.__name__ == "HalfStep"
    assert cls.name == "half_step"
    assert "half_step" in algorithms.workspace()
    federation = make_federation([20, 30])
    theta = train("half_step", federation, rounds=3).theta
    assert theta.tolist() == (train("fedavg", federation, rounds=3).theta * 0.5).tolist()


def test_the_only_class_of_a_file_needs_no_decorator(workspace):
    workspace("plain.py", IMPORT + "class Plain(FedAvg):\n    pass\n")
    cls = algorithms["plain"]
    assert (cls.__name__, cls.name) == ("Plain", "plain")
    assert FedAvg.name == "fedavg"


def test_dashes_find_a_file_with_underscores(workspace):
    workspace("my_method.py", IMPORT + "class Mine(FedAvg):\n    pass\n")
    assert algorithms["my-method"].__name__ == "Mine"


def test_another_workspace_has_its_own_file_of_that_name(workspace, tmp_path, monkeypatch):
    workspace("mine.py", IMPORT + "class First(FedAvg):\n    pass\n")
    assert algorithms["mine"].__name__ == "First"
    other = tmp_path / "other"
    (other / "algorithms").mkdir(parents=True)
    (other / "algorithms" / "mine.py").write_text(IMPORT + "class Second(FedAvg):\n    pass\n")
    monkeypatch.chdir(other)
    assert algorithms["mine"].__name__ == "Second"


def test_a_file_with_two_classes_asks_for_the_decorator(workspace):
    workspace("two.py", IMPORT + "class A(FedAvg):\n    pass\nclass B(A):\n    pass\n")
    message = refused(algorithms, "two")
    assert "two.py" in message
    assert '@register("two")' in message
    assert "A, B" in message


def test_a_file_without_a_class_says_so(workspace):
    workspace("nothing.py", "x = 1\n")
    assert "no class" in refused(algorithms, "nothing")
    # An imported class is not the file's own.
    workspace("imported.py", IMPORT)
    assert "no class" in refused(algorithms, "imported")


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("x = 1\n\ny = 1 / 0\n", 3, "ZeroDivisionError: division by zero"),
        ("x = 1\ndef f(:\n", 2, "SyntaxError"),
        ("import not_a_module_of_anybody\n", 1, "ModuleNotFoundError"),
        ("def f():\n    return {}['a']\n\n\nf()\n", 2, "KeyError"),
        (IMPORT + "class A(FedAvg):\n    mu: float = nothing\n", 3, "NameError"),
    ],
)
def test_fault_31_a_file_that_fails_to_import_says_file_line_and_why(workspace, text, line, why):
    workspace("bad.py", text)
    for _ in range(2):  # the second time too
        message = refused(algorithms, "bad")
        assert "bad.py" in message
        assert f"line {line}" in message
        assert why in message
    assert "bad" not in algorithms._classes


def test_what_a_failing_file_registered_is_forgotten(workspace):
    workspace(
        "bad.py",
        IMPORT + "from fedtopo_torch import register\n"
        '@register("bad")\nclass Bad(FedAvg):\n    pass\nraise RuntimeError("late")\n',
    )
    assert "late" in refused(algorithms, "bad")
    # Repaired, it works without a new start.
    workspace("bad.py", IMPORT + "class Repaired(FedAvg):\n    pass\n")
    assert algorithms["bad"].__name__ == "Repaired"


def test_a_file_that_takes_a_built_in_name_is_told(workspace):
    workspace(
        "clash.py",
        IMPORT + "from fedtopo_torch import register\n"
        '@register("fedavg")\nclass Clash(FedAvg):\n    pass\n',
    )
    message = refused(algorithms, "clash")
    assert "clash.py" in message
    assert "'fedavg' is taken" in message
    assert algorithms["fedavg"] is FedAvg


def test_a_file_named_like_a_built_in_method_is_refused(workspace):
    workspace("fedavg.py", "raise RuntimeError\n")
    assert "fedavg.py has the name of a built-in" in refused(algorithms, "fedavg")
    assert algorithms["local"] is not None


def test_a_name_may_have_capitals_and_no_path_leads_out_of_the_workspace(workspace, tmp_path):
    workspace("MyMethod.py", IMPORT + "class Mine(FedAvg):\n    pass\n")
    assert algorithms["MyMethod"].name == "MyMethod"
    (tmp_path / "evil.py").write_text(IMPORT + "class Evil(FedAvg):\n    pass\n")
    assert "no algorithm called '../evil'" in refused(algorithms, "../evil")


@pytest.mark.parametrize("what", ["def f():\n    pass\n", "class A:\n    pass\n"])
def test_only_subclasses_can_be_registered(workspace, what):
    workspace("odd.py", f'from fedtopo_torch import register\n@register("odd")\n{what}')
    assert "no subclass of Algorithm" in refused(algorithms, "odd")


def test_a_missing_file_is_named_and_the_workspaces_files_are_known(workspace):
    workspace("my_method.py", IMPORT + "class Mine(FedAvg):\n    pass\n")
    workspace("not-a-name.py", "raise RuntimeError\n")
    message = refused(algorithms, "my_methd")
    assert "my_methd.py" in message
    assert "Did you mean 'my_method'?" in message
    assert "not-a-name" not in message


def test_a_known_name_is_listed_once(workspace):
    workspace("my_method.py", IMPORT + "class Mine(FedAvg):\n    pass\n")
    assert algorithms["my_method"].__name__ == "Mine"
    assert refused(algorithms, "zzzz").count("my_method") == 1


def test_without_a_workspace_folder_nothing_is_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert algorithms.workspace() == {}
    assert "no file" in refused(algorithms, "my_method")
    # Datasets and models are no plain files.
    assert "no file" not in refused(models, "my_model")


# Paths and installed packages


def test_a_path_and_a_class_name(workspace, tmp_path):
    place = tmp_path / "elsewhere"
    place.mkdir()
    text = IMPORT + "class A(FedAvg):\n    pass\nclass B(FedAvg):\n    mu: float = 2.0\n"
    (place / "methods.py").write_text(text)
    cls = algorithms[f"{place}/methods.py:B"]
    assert cls.__name__ == "B" and cls().mu == 2.0
    assert algorithms["elsewhere/methods.py:A"].__name__ == "A"
    assert algorithms[f"{place}/methods.py:B"] is cls
    message = refused(algorithms, f"{place}/methods.py:C")
    assert "methods.py" in message and "A, B" in message
    assert "no file" in refused(algorithms, f"{place}/nothing.py:C")
    (place / "other.py").write_text("class C:\n    pass\n")
    assert "subclasses of Algorithm there: no class" in refused(algorithms, f"{place}/other.py:C")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package on sys.path that offers entry points."""
    (tmp_path / "someones_fl.py").write_text(IMPORT + "class Theirs(FedAvg):\n    pass\nx = 1\n")
    info = tmp_path / "someones_fl-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-fl\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fedtopo_torch.algorithms]\ntheirs = someones_fl:Theirs\nnumber = someones_fl:x\n"
        "gone = not_installed_anywhere:Gone\nfedavg = someones_fl:Theirs\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_an_installed_package_offers_a_method_by_entry_point(installed):
    assert "theirs" in set(algorithms)
    cls = algorithms["theirs"]
    assert (cls.__name__, cls.name) == ("Theirs", "theirs")
    assert algorithms["fedavg"] is FedAvg
    assert "no subclass of Algorithm" in refused(algorithms, "number")
    assert "not_installed_anywhere" in refused(algorithms, "gone")
