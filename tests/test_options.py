"""Declared options: every kind of wrong value is refused with a message that helps."""

import math
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from fedtopo_torch.algorithms import Clustered, FedAvg, Local, PTopoFL
from fedtopo_torch.options import OptionError, Options, did_you_mean, parse_assignments


class Sample(Options):
    """One option of every kind."""

    mu: float = Field(0.1, ge=0, description="pull")
    rate: float = Field(0.5, gt=0, lt=1)
    steps: int = Field(5, ge=1, description="inner steps")
    clusters: Annotated[int, Field(ge=1)] | Literal["auto"] = 2
    beta: float | None = None
    kind: Literal["ward", "average"] = "ward"
    fast: bool = False


def refused(cls, **values):
    with pytest.raises(OptionError) as caught:
        cls(**values)
    return str(caught.value)


def test_fault_31_unknown_option_names_the_nearest():
    message = refused(Sample, step=3)
    assert "Sample has no option 'step'" in message
    assert "Did you mean 'steps'?" in message
    assert "beta, clusters, fast, kind, mu, rate, steps" in message
    assert "'abar'" in refused(PTopoFL, abarr=0.2)
    assert "no option 'mu'" in refused(FedAvg, mu=0.1)
    assert "Known: none." in refused(Local, eta=0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mu", math.nan),
        ("mu", math.inf),
        ("mu", -math.inf),
        ("mu", "nan"),
        ("mu", "inf"),
        ("mu", "1e999"),
        ("mu", -0.1),
        ("mu", "abc"),
        ("mu", None),
        ("mu", [1.0]),
        ("rate", 0.0),
        ("rate", 1.0),
        ("rate", math.nan),
        ("steps", 0),
        ("steps", 2.5),
        ("steps", "2.5"),
        ("steps", math.nan),
        ("steps", math.inf),
        ("steps", "many"),
        ("clusters", 0),
        ("clusters", "automatic"),
        ("clusters", 1.5),
        ("clusters", None),
        ("beta", math.nan),
        ("beta", "inf"),
        ("kind", "single"),
        ("fast", "maybe"),
        ("fast", 2),
    ],
)
def test_fault_31_wrong_values_are_refused_by_name_and_value(name, value):
    message = refused(Sample, **{name: value})
    assert message.startswith(f"Sample: option {name} = {value!r} is not valid: must be ")
    assert "\n" not in message


@pytest.mark.parametrize("name", ["mu", "rate", "steps", "clusters", "beta"])
@pytest.mark.parametrize("value", [True, False])
def test_fault_31_true_and_false_are_no_numbers(name, value):
    assert f"option {name} = {value}" in refused(Sample, **{name: value})


def test_several_wrong_values_are_told_together():
    message = refused(Sample, mu=-1, steps=0)
    assert "mu = -1" in message
    assert "steps = 0" in message


def test_values_at_the_ends_and_text_from_a_command_line_are_taken():
    options = Sample(mu="0", steps="1", clusters="3", beta="1e-3", fast="false")
    assert (options.mu, options.steps, options.clusters, options.beta) == (0.0, 1, 3, 1e-3)
    assert options.fast is False
    assert Sample(clusters="auto").clusters == "auto"


def test_options_are_frozen():
    options = Sample()
    with pytest.raises((ValidationError, AttributeError)):
        options.mu = 3.0
    assert options.mu == 0.1


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (PTopoFL, "n_clusters", 0),
        (PTopoFL, "n_clusters", True),
        (PTopoFL, "abar", 1.1),
        (PTopoFL, "abar", -0.1),
        (PTopoFL, "abar", True),
        (PTopoFL, "alpha", math.nan),
        (PTopoFL, "alpha", 2),
        (PTopoFL, "n_sub", 1),
        (PTopoFL, "repeats", 0),
        (PTopoFL, "trust", "on"),
        (PTopoFL, "linkage", "single"),
        (PTopoFL, "scale", "z"),
        (PTopoFL, "weights", "n"),
        (Clustered, "labels", "0,x"),
        (Clustered, "labels", (0.5, 1)),
        (Clustered, "labels", 3),
    ],
)
def test_fault_31_options_of_the_methods(cls, name, value):
    assert f"option {name} = " in refused(cls, **{name: value})


def test_option_lines_tell_name_default_and_meaning():
    lines = {name: rest for name, *rest in Sample.option_lines()}
    assert lines["mu"] == ["0.1", "number >= 0", "pull"]
    assert (lines["beta"][0], lines["beta"][2]) == ("none", "")
    assert (lines["clusters"][0], lines["clusters"][2]) == ("2", "")


def test_nearest_name():
    assert did_you_mean("fedvag", ["local", "fedavg"]) == (
        " Did you mean 'fedavg'? Known: fedavg, local."
    )
    assert did_you_mean("zzz", ["local", "fedavg"]) == " Known: fedavg, local."
    assert did_you_mean("x", []) == " Known: none."


# NAME=VALUE


def test_assignments():
    values = parse_assignments(["abar=0.3", "n-clusters = auto", "labels=0,1", "note=a=b"])
    assert values == {"abar": "0.3", "n_clusters": "auto", "labels": "0,1", "note": "a=b"}
    assert parse_assignments([]) == {}


@pytest.mark.parametrize("entry", ["abar", "=0.3", " =1", ""])
def test_assignments_without_name_or_value_are_refused(entry):
    with pytest.raises(OptionError, match="NAME=VALUE"):
        parse_assignments([entry])


def test_an_option_given_twice_is_refused():
    with pytest.raises(OptionError, match=r"'n_clusters' is given twice.*2.*3"):
        parse_assignments(["n_clusters=2", "n-clusters=3"])
