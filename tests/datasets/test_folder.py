"""Folders of CSV files: what is understood, by hand and by scikit-learn, and what is refused."""

import csv
import io
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder
from typer.testing import CliRunner

from fedtopo_torch.cli import app
from fedtopo_torch.datasets import Folder, folder_dataset
from fedtopo_torch.datasets.columns import _DATE, _ID_NAME
from fedtopo_torch.options import OptionError
from fedtopo_torch.registry import datasets
from fedtopo_torch.trainer import train

ROOT = Path(__file__).resolve().parents[2]
CLINICS = ROOT / "datasets" / "three_clinics"

NORTH = """age,sex,bmi,split,ill
30,f,20,train,0
50,m,,train,1
40,m,30,train,0
99,x,99,test,1
"""
SOUTH = """age,sex,bmi,split,ill
20,f,,train,1
NA,?,,train,0
70,f,,test,0
"""


@pytest.fixture
def write(tmp_path):
    """``write({"north.csv": text}, **options)``: a Folder on these files."""

    def make(files, **options):
        for name, content in files.items():
            if isinstance(content, str):
                content = content.encode()
            (tmp_path / name).write_bytes(content)
        return Folder(path=tmp_path, **{"target": "ill", **options})

    return make


def table(n=12, seed=0, header="age,sex,ill", row=None):
    """``n`` valid rows under a header; ``row`` replaces the first (row 2 of the file)."""
    rng = random.Random(seed)
    rows = [f"{rng.randint(20, 80)},{rng.choice('fm')},{i % 2}" for i in range(n)]
    if row is not None:
        rows[0] = row
    return "\n".join([header, *rows]) + "\n"


def column(values, n=20, name="value", ill=None):
    """A table of one feature column and the target."""
    rows = [f"{values(i)},{ill(i) if ill else i % 2}" for i in range(n)]
    return "\n".join([f"{name},ill", *rows]) + "\n"


def refused(dataset, kind=ValueError):
    with pytest.raises(ValueError) as caught:
        dataset.load(0)
    assert type(caught.value) is kind, caught.value
    return str(caught.value)


# What is understood


@pytest.mark.filterwarnings("ignore:.*categories that no training record has")
def test_by_hand(write):
    federation = write({"north.csv": NORTH, "south.csv": SOUTH}, test_column="split").load(0)
    assert federation.names == ("north", "south")
    assert federation.feature_names == ("age", "sex=f", "sex=m", "bmi")
    # Ages 30, 50, 40, 20 are known: mean 35. Sex f, m, m, f: as frequent, f comes first. bmi: 25.
    north, south = federation.clouds
    assert north.tolist() == [[30, 1, 0, 20], [50, 0, 1, 25], [40, 0, 1, 30]]
    assert south.tolist() == [[20, 1, 0, 25], [35, 1, 0, 25]]
    x, y = federation.test.client(0)
    raw = x * federation.moments.scale() + federation.moments.mean
    assert raw.tolist()[0] == pytest.approx([99, 0, 0, 99])
    assert y.tolist() == [1]
    assert federation.train.client(0)[1].tolist() == [0, 1, 0]
    assert federation.source["classes"] == ["0", "1"]
    pooled = np.concatenate([north, south])
    np.testing.assert_allclose(federation.moments.mean, pooled.mean(0), atol=1e-12)
    np.testing.assert_allclose(federation.moments.std, pooled.std(0), atol=1e-12)


def test_imputation_and_one_hot_equal_scikit_learns():
    federation = Folder(path=CLINICS, target="readmitted").load(4)
    names = federation.feature_names
    rows = {}
    for path in sorted(CLINICS.glob("*.csv")):
        with path.open() as file:
            rows[path.stem] = list(csv.DictReader(file))
    # Rows are told apart by age, blood pressure and walk, so the split can be read off.
    numeric = ["age", "bmi", "systolic", "crp", "walk_metres"]
    every = [row for client in rows.values() for row in client]
    numbers = np.array([[float(row[c] or "nan") for c in numeric] for row in every])
    texts = np.array([[row[c] or None for c in ("sex", "smoking")] for row in every], dtype=object)
    split, first = [], 0
    for k, client in enumerate(federation.names):
        ages = federation.clouds[k][:, names.index("age")]
        walks = federation.clouds[k][:, names.index("walk_metres")]
        own = numbers[first : first + len(rows[client])]
        at = 0
        # Training records keep the order of the file.
        for age, walk in zip(own[:, 0], own[:, 4], strict=True):
            is_train = at < len(ages) and age == ages[at] and (np.isnan(walk) or walk == walks[at])
            at += is_train
            split.append(is_train)
        assert at == len(ages)
        first += len(own)
    split = np.array(split)
    filled = SimpleImputer().fit(numbers[split]).transform(numbers)
    modes = SimpleImputer(strategy="most_frequent", missing_values=None).fit(texts[split])
    encoder = OneHotEncoder(sparse_output=False).fit(modes.transform(texts[split]))
    hot = encoder.transform(modes.transform(texts))
    wanted = np.concatenate([filled, hot], axis=1)
    order = [*numeric, *(n.replace("x0_", "sex=") for n in encoder.get_feature_names_out())]
    order = [n.replace("x1_", "smoking=") for n in order]
    found = np.concatenate(federation.clouds)
    np.testing.assert_allclose(found[:, [names.index(n) for n in order]], wanted[split], rtol=1e-13)


@pytest.mark.filterwarnings("ignore:.*categories that no training record has")
@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.just(""), st.integers(-(10**6), 10**6).map(str)),
            st.sampled_from(["f", "m", "other", "", "F"]),
            st.floats(-1e50, 1e50).map(repr),
            st.booleans(),
        ),
        min_size=3,
        max_size=3,
    )
)
def test_test_records_influence_nothing_in_training(tmp_path_factory, changed):
    """Known fault 23: imputation, categories, standardisation, labels."""
    path = tmp_path_factory.mktemp("leak")

    def load(tests):
        for client in ("a", "b"):
            rows = [f"{i * i % 17},{'fm'[i % 2]},{i / 3},{i % 2},0" for i in range(8)]
            rows += [",,,1,0", *(f"{x},{sex},{z},{int(y)},1" for x, sex, z, y in tests)]
            text = "\n".join(["x,sex,z,ill,test", *rows])
            (path / f"{client}.csv").write_text(text)
        return Folder(path=path, target="ill", test_column="test").load(0)

    before, after = load([("1", "f", "2", True)] * 3), load(changed)
    assert before.feature_names == after.feature_names
    for k in range(2):
        assert np.array_equal(before.clouds[k], after.clouds[k])
        for a, b in zip(before.train.client(k), after.train.client(k), strict=True):
            assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:.*without test records")
def test_test_records_of_a_new_class_change_no_training_label(write):
    def rows(test):
        return (
            "x,split,ill\n" + "".join(f"{i % 5},train,{'bca'[i % 3]}\n" for i in range(12)) + test
        )

    before = write({"a.csv": rows("1,test,b\n"), "b.csv": rows("")}, test_column="split").load(0)
    with pytest.warns(UserWarning, match="classes that no training record has: 'aa'"):
        after = write({"a.csv": rows("1,test,aa\n")}, test_column="split").load(0)
    assert before.source["classes"] == ["a", "b", "c"]
    assert after.source["classes"] == ["a", "b", "c", "aa"]
    assert torch.equal(before.train.client(0)[1], after.train.client(0)[1])
    assert after.test.client(0)[1].tolist() == [3]


def test_the_same_seed_gives_the_same_split_for_any_order_of_files_and_columns(write, tmp_path):
    one, two = table(30, 1), table(40, 2)
    first = write({"a.csv": one, "b.csv": two}).load(3)
    swapped = list(csv.DictReader(io.StringIO(one)))
    text = "ill,sex,age\n" + "".join(f"{r['ill']},{r['sex']},{r['age']}\n" for r in swapped)
    # The first file sets the order of columns.
    second = write({"a.csv": one, "b.csv": two, "c.csv": text}).load(3)
    assert second.feature_names == first.feature_names == ("age", "sex=f", "sex=m")
    for k in range(2):
        assert np.array_equal(first.clouds[k], second.clouds[k])
    assert first.train.n.tolist() == [21, 28]
    assert not np.array_equal(first.clouds[0], write({}).load(4).clouds[0])


def test_one_file_with_a_client_column_equals_a_file_for_each(write, tmp_path):
    one, two = table(30, 1), table(40, 2)
    many = write({"north.csv": one, "south.csv": two}).load(1)
    joined = tmp_path / "all" / "joined.csv"
    joined.parent.mkdir()
    lines = [f"{line},north" for line in one.split()[1:]]
    lines += [f"{line},south" for line in two.split()[1:]]
    # Mixed among each other; the order within a client is its file's.
    random.Random(0).shuffle(order := [0] * 30 + [1] * 40)
    parts = iter(lines[:30]), iter(lines[30:])
    joined.write_text("\n".join(["age,sex,ill,clinic", *(next(parts[i]) for i in order)]))
    for path in (joined, joined.parent):
        single = Folder(path=path, target="ill", client_column="clinic").load(1)
        assert single.names == many.names
        assert single.feature_names == many.feature_names
        for k in range(2):
            assert np.array_equal(single.clouds[k], many.clouds[k])
            assert torch.equal(single.test.client(k)[1], many.test.client(k)[1])


def test_a_client_that_lacks_a_column_altogether_has_the_same_features():
    federation = Folder(path=CLINICS, target="readmitted").load(0)
    crp = federation.feature_names.index("crp")
    hillside = federation.names.index("hillside")
    assert len(set(federation.clouds[hillside][:, crp])) == 1
    assert len({cloud.shape[1] for cloud in federation.clouds}) == 1


def test_a_byte_order_mark_and_windows_line_ends(write):
    text = b"\xef\xbb\xbf" + table().replace("\n", "\r\n").encode()
    assert write({"a.csv": text, "b.csv": table()}).load(0).feature_names[0] == "age"


def test_decimal_comma_semicolons_tabs_and_encodings(write):
    plain = write(
        {"a.csv": column(lambda i: f"{i % 7}.5"), "b.csv": table(8, header="value,sex,ill")},
        drop="sex",
    )
    wanted = plain.load(0).clouds[0]
    text = column(lambda i: f"{i % 7}.5").replace(",", ";").replace(".", ",")
    other = table(8, header="value,sex,ill").replace(",", ";")
    comma = write({"a.csv": text, "b.csv": other}, separator=";", decimal=",", drop="sex")
    assert np.array_equal(comma.load(0).clouds[0], wanted)
    tabs = write(
        {n: t.replace(";", "\t").encode("utf-16") for n, t in (("a.csv", text), ("b.csv", other))},
        separator="tab",
        decimal=",",
        drop="sex",
        encoding="utf-16",
    )
    assert np.array_equal(tabs.load(0).clouds[0], wanted)
    assert Folder(separator="\t").separator == "tab"


def test_quoted_cells_hold_separators_and_line_breaks(write):
    text = "note,ill\n" + 5 * '"a, b",0\n"c\nd",1\n"a, b",1\n"c\nd",0\n'
    federation = write({"a.csv": text, "b.csv": text}).load(0)
    assert federation.feature_names == ("note=a, b", "note=c\nd")


@pytest.mark.filterwarnings("ignore:.*without test records")
@pytest.mark.parametrize(
    ("values", "options", "labels"),
    [
        (["0", "1", "1.0", "0"], {}, [0, 1, 1, 0]),
        (["no", "Yes", "YES", "No"], {}, [0, 1, 1, 0]),
        (["False", "True", "true", "false"], {}, [0, 1, 1, 0]),
        (["well", "sick", "sick", "well"], {"positive": "sick"}, [0, 1, 1, 0]),
        (["well", "sick", "dead", "well"], {"positive": "sick"}, [0, 1, 0, 0]),
        (["1", "2.0", "2", "1"], {"positive": "2"}, [0, 1, 1, 0]),
        (["b", "a", "c", "b"], {}, [1, 0, 2, 1]),
        (["10", "9", "2", "9.0"], {}, [2, 1, 0, 1]),
    ],
)
def test_labels(write, values, options, labels):
    text = "x,part,ill\n" + "".join(f"{i % 3},train,{v}\n" for i, v in enumerate(values))
    federation = write({"a.csv": text, "b.csv": text}, test_column="part", **options).load(0)
    assert federation.train.client(0)[1].tolist() == labels
    assert federation.task == ("binary" if len(set(labels)) == 2 else "multiclass")
    assert federation.n_classes == len(set(labels))


def test_numbers_taken_for_categories(write):
    text = column(lambda i: [1, 2, "10.0", ""][i % 4])
    federation = write({"a.csv": text, "b.csv": text}, categorical="value").load(0)
    assert federation.feature_names == ("value=1", "value=2", "value=10")


def test_texts_among_which_are_some_numbers_are_categories(write):
    text = column(lambda i: ["1a", "1b", "2"][i % 3])
    federation = write({"a.csv": text, "b.csv": text}).load(0)
    assert federation.feature_names == ("value=1a", "value=1b", "value=2")


# What is said of it


def test_warnings_and_the_description_say_the_same(write):
    north = (
        NORTH.replace("ill", "ill,empty").replace("\n", ",\n").replace("ill,empty,", "ill,empty")
    )
    south = (
        SOUTH.replace("ill", "ill,empty").replace("\n", ",\n").replace("ill,empty,", "ill,empty")
    )
    files = {"north.csv": north + ",,,,,\n\n", "south.csv": south, "README.md": "no CSV"}
    dataset = write(files, test_column="split")
    with pytest.warns(UserWarning) as caught:
        dataset.load(0)
    summary = dataset.describe()
    assert [str(w.message).partition(": ")[2] for w in caught] == list(summary.warnings)
    assert summary.warnings == (
        "rows without any value, left out: 1.",
        "column 'sex': categories that no training record has count as none: 'x'.",
        "column 'empty' is ignored: no training record has a value in it.",
    )
    assert summary.files == ("north.csv", "south.csv")
    assert summary.blank_rows == {"north.csv": 1}
    assert summary.ignored == {"empty": "no training record has a value"}
    assert summary.classes == ("0", "1")
    assert summary.feature_names == ("age", "sex=f", "sex=m", "bmi")
    first, second = summary.clients
    assert (first.name, first.records, first.train, first.test) == ("north", 4, 3, 1)
    assert (first.classes, first.prevalence, first.missing) == ({"0": 2, "1": 2}, 0.5, 1)
    assert (second.train, second.test, second.missing) == (2, 1, 5)
    assert second.prevalence == pytest.approx(1 / 3)
    age, sex, bmi = summary.columns
    assert (age.kind, age.missing, age.fill) == ("numeric", 1, 35.0)
    assert (sex.kind, sex.missing, sex.fill, sex.categories) == ("categorical", 1, "f", ("f", "m"))
    assert (bmi.missing, bmi.fill) == (4, 25.0)


def test_describing_writes_nothing(tmp_path):
    dataset = folder_dataset(CLINICS)(target="readmitted")
    before = {p: p.stat().st_mtime_ns for p in CLINICS.rglob("*")}
    dataset.describe()
    assert before == {p: p.stat().st_mtime_ns for p in CLINICS.rglob("*")}


def test_multiclass_counts(write):
    text = column(lambda i: i % 7, ill=lambda i: "abc"[i % 3], n=9)
    summary = write({"a.csv": text, "b.csv": text}).describe()
    assert summary.task == "multiclass"
    assert summary.clients[0].classes == {"a": 3, "b": 3, "c": 3}
    assert summary.clients[0].prevalence is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,ill\n1,0\n", "without test records, so trained but not scored: 'b'"),
        ("x,ill\n1,0\n2,1\n1,0\n", "without stratifying, for want of records.*: 'b'"),
    ],
)
def test_small_clients_are_warned_of(write, text, message):
    with pytest.warns(UserWarning, match=message):
        federation = write({"a.csv": column(lambda i: i % 7, name="x"), "b.csv": text}).load(0)
    assert int(federation.train.n[1]) >= 1


def test_categories_that_differ_in_capitals_only_are_warned_of(write):
    text = column(lambda i: ["Male", "male", "female"][i % 3])
    with pytest.warns(UserWarning, match="'value': categories differ in capitals only: 'Male', 'm"):
        write({"a.csv": text, "b.csv": text}).load(0)


# What is refused: files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "b.csv is empty: it needs a row of column names"),
        ("\n\n", "b.csv is empty"),
        ("age,sex,ill\n", "b.csv has column names and no records: add some, or remove the file"),
        ("age,sex,ill\n,,\n", "b.csv has column names and no records"),
        ("age,sex,age,ill\n1,f,2,0\n", "b.csv has more than one column called 'age': rename"),
        (
            "age,sex,kg,ill\n1,f,2,0\n",
            "b.csv also has 'kg', compared with a.csv: every file needs the same columns",
        ),
        ("age,ill\n1,0\n", "b.csv lacks 'sex', compared with a.csv"),
        (
            "Age,sex,ill\n1,f,0\n",
            "b.csv lacks 'age' and also has 'Age', compared with a.csv: .*drop=age,Age",
        ),
        ("age,sex,ill\n1,f,0\n1,f\n", "b.csv, row 3 has 2 cells, and the header has 3: is a ','"),
        ("age,sex,ill\n1,5,f,0\n", "b.csv, row 2 has 4 cells, .*without quotes around it"),
        ("age;sex;ill\n1;f;0\n", "b.csv has one column, 'age;sex;ill', .*set \"separator=;\""),
        (
            "age\tsex\till\n1\tf\t0\n",
            "b.csv has one column, 'age sex ill', .*set \"separator=tab\"",
        ),
        ('age,sex,ill\n1,"f,0\n1,m,1\n', "b.csv, row .* can't be read as CSV .*quotation mark"),
        ("age,,ill\n1,f,0\n", r"b.csv: column 2 has no name in the header: .*drop=\(column 2\)"),
        ("age,sex,ill\nä,f,0\n".encode("cp1252"), "b.csv is not utf-8 text .*encoding=cp1252"),
        ("age,sex,ill\n1,f,0\n".encode("utf-16"), "b.csv is not utf-8 text .*encoding=utf-16"),
    ],
)
def test_files_that_cannot_be_used(write, content, message):
    dataset = write({"a.csv": table(), "b.csv": content})
    with pytest.raises(ValueError, match=message):
        dataset.load(0)


def test_a_column_without_a_name_and_without_values_is_nothing(write):
    text = table().replace("\n", ",\n")
    federation = write({"a.csv": text, "b.csv": table()}).load(0)
    assert federation.feature_names == ("age", "sex=f", "sex=m")


def test_an_exported_index_is_left_out_by_its_place(write):
    lines = table().split()
    text = "\n".join(["," + lines[0], *(f"{i},{line}" for i, line in enumerate(lines[1:]))])
    files = {"a.csv": text, "b.csv": text}
    assert "column 1 has no name" in refused(write(files))
    assert write(files, drop="(column 1)").load(0).feature_names[0] == "age"


def test_row_numbers_are_those_of_a_spreadsheet(write):
    text = 'sex,age,ill\n"f\nx",1,0\n\n,,\nm,2,?\n'
    message = refused(write({"a.csv": text, "b.csv": text}))
    assert message.startswith("a.csv, row 5, and 1 more: no value in the target 'ill'")


# What is refused: the target


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (["1", "1"], {}, "the target 'ill' has the value '1' in every record"),
        (["yes", "yes"], {}, "'yes' in every record"),
        (
            ["a", "b"],
            {},
            "has the values 'a' and 'b': say which of them is 1, for example positive=b",
        ),
        (["1", "2"], {}, "say which of them is 1, for example positive=2"),
        (["yes", "1"], {}, "one class written in several ways: '1', 'yes'"),
        (["yes", "no", "1", "0"], {}, "one class written in several ways: '0', '1', 'no', 'yes'"),
        (["Sick", "sick", "well"], {}, "one class written in several ways: 'Sick', 'sick', 'well'"),
        (
            ["a", "b"],
            {"positive": "c"},
            "positive = 'c': the target 'ill' has no such value, but 'a'",
        ),
        (["0", ""], {}, "a.csv, row 3, and 19 more: no value in the target 'ill'; fill it in"),
        (["0", "NaN", "1"], {}, "a.csv, row 3, .*no value in the target"),
    ],
)
def test_targets_that_cannot_be_used(write, values, options, message):
    text = column(lambda i: i % 7, ill=lambda i: values[i % len(values)])
    dataset = write({"a.csv": text, "b.csv": text}, **options)
    with pytest.raises(ValueError, match=message) as caught:
        dataset.load(0)
    wants_option = "positive" in message or "say which" in message
    assert isinstance(caught.value, OptionError) == wants_option


def test_a_measurement_is_no_target(write):
    text = column(lambda i: i % 7, ill=lambda i: f"{i / 7:.3f}", n=40)
    message = refused(write({"a.csv": text, "b.csv": column(lambda i: i % 7)}))
    assert (
        "the target 'ill' has 40 different values in 60 records: that is a measurement" in message
    )


# What is refused: columns


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            lambda i: "abc" if i == 3 else i % 7,
            "column 'value': 'abc' in a.csv, row 5 is not a number, while 38 of 40 values are",
        ),
        (lambda i: "inf" if i == 3 else i % 7, "'inf' in a.csv, row 5 is not a number"),
        (lambda i: "1e300" if i == 3 else i % 7, "'1e300' in a.csv, row 5 is not a number"),
        (lambda i: "1_000" if i == 3 else i % 7, "'1_000' in a.csv, row 5 is not a number"),
        (lambda i: "< 5" if i == 3 else i % 7, "'< 5' in a.csv, row 5 is not a number"),
        (
            lambda i: f'"{i % 7},5"',
            "'value' looks like numbers with a decimal comma .'\\d,5' in a.csv, row \\d+",
        ),
        (lambda i: f'"{i % 7},5"' if i % 3 else i, "decimal comma .*set decimal=,"),
        (
            lambda i: f"2024-01-{i % 20 + 1:02}",
            "'value' holds dates or times .'2024-01-..' in a.csv, row \\d+",
        ),
        (lambda i: f"{i % 20 + 1}.3.24", "holds dates or times .*leave it out with drop=value"),
        (lambda i: f"20240{i % 9 + 1}15", "holds dates or times"),
        (lambda i: 1000 + 3 * i, "'value' rises by whole numbers .* drop=value"),
        (lambda i: f"patient {i * 7 % 20}", "'value' has .. categories in 28 training records"),
    ],
)
def test_columns_that_would_mislead(write, values, message):
    text = column(values)
    with pytest.raises(ValueError, match=message):
        write({"a.csv": text, "b.csv": text}).load(0)


def test_a_column_of_different_texts_is_an_identifier(write):
    files = {f"{c}.csv": column(lambda i, c=c: f"{c} {i}") for c in "ab"}
    message = refused(write(files))
    assert "column 'value' has another text in each of 28 training records" in message
    assert "drop=value" in message


@pytest.mark.parametrize("name", ["id", "ID", "patient_id", "patientId", "Patient ID", "uuid"])
def test_identifiers_by_name(write, name):
    text = column(lambda i: i % 5, name=name)
    message = refused(write({"a.csv": text, "b.csv": text}))
    assert f"column '{name}' is named like an identifier" in message
    # There is a way out, for a device id that is a category.
    federation = write({}, categorical=(name,)).load(0)
    assert federation.feature_names[0] == f"{name}=0"


@pytest.mark.parametrize("name", ["covid", "lipid", "acid", "idle", "sid"])
def test_names_that_only_end_like_an_identifier(name):
    assert not _ID_NAME.fullmatch(name)


@pytest.mark.parametrize(
    "text",
    ["2024-1-3", "2024/01/03 12:30", "03.01.2024", "1/3/24", "3 Jan 2024", "3-March-24",
     "January 3, 2024", "2024-01-03T12:30:05.123Z", "2024-01", "12:30", "20240103"],
)  # fmt: skip
def test_dates(text):
    assert _DATE.fullmatch(text)


@pytest.mark.parametrize("text", ["1.5", "2024", "120/80", "20241503", "may", "1-2", "12.03"])
def test_no_dates(text):
    assert not _DATE.fullmatch(text)


def test_numbers_that_rise_in_one_client_only_are_no_identifier(write):
    text, mixed = column(lambda i: i), column(lambda i: i * 7 % 20)
    assert write({"a.csv": text, "b.csv": mixed}).load(0).feature_names == ("value",)


def test_ten_thousand_categories(write):
    text = column(lambda i: f"c{i % 10000}", n=30000)
    message = refused(write({"a.csv": text, "b.csv": column(lambda i: "c1")}))
    assert "column 'value' has " in message and "categories in 21,014 training records" in message
    assert "at most 50 categories can be used" in message


def test_a_wrong_decimal_point(write):
    text = column(lambda i: f"{i % 7}.5").replace(",", ";")
    message = refused(write({"a.csv": text, "b.csv": text}, separator=";", decimal=","))
    assert "looks like numbers with a decimal point" in message and "set decimal=." in message


def test_a_text_among_the_numbers_of_test_records_only(write):
    text = "x,split,ill\n1,0,0\n2,0,1\n3,0,1\nhigh,1,0\n"
    message = refused(write({"a.csv": text, "b.csv": text}, test_column="split"))
    assert "column 'x': 'high' in a.csv, row 5 is not a number, while 6 of 8" in message


def test_no_column_to_learn_from(write):
    text = "ill,empty\n0,\n1,\n0,\n1,\n"
    assert "there is no column to learn from" in refused(write({"a.csv": text, "b.csv": text}))


def test_two_files_of_one_stem(write, tmp_path):
    dataset = write({"a.csv": table(), "a.CSV": table()})
    if len(list(tmp_path.iterdir())) < 2:
        pytest.skip("this file system does not tell capitals apart")
    assert "two files are called 'a'" in refused(dataset)


# What is refused: test and client columns


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ("train,train,maybe", "a.csv, row 4: 'maybe' in the test column 'part' is none of 1, true"),
        ("train,,test", "a.csv, row 3: '' in the test column 'part'"),
        ("test,test,test", "client 'a' has no training records: 'part' marks all 3 as test"),
    ],
)
def test_test_columns(write, marks, message):
    def text(marks):
        rows = [f"{i},{mark},{i % 2}" for i, mark in enumerate(marks.split(","))]
        return "\n".join(["x,part,ill", *rows])

    good = text("0,FALSE,true,1.0")
    dataset = write({"a.csv": text(marks), "b.csv": good}, test_column="part")
    with pytest.raises(ValueError, match=message):
        dataset.load(0)
    federation = write({"a.csv": good}, test_column="part").load(0)
    assert federation.train.n.tolist() == federation.test.n.tolist() == [2, 2]


def test_a_row_without_a_client(write):
    text = "clinic,x,ill\na,1,0\n,2,1\n"
    message = refused(write({"all.csv": text}, client_column="clinic"))
    assert message.startswith("all.csv, row 3: no value in the client column 'clinic'")


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "y", "drop": "a,y"}, "column 'y' is the target: take it out of drop"),
        (
            {"target": "y", "categorical": "y"},
            "column 'y' is the target: take it out of categorical",
        ),
        (
            {"target": "y", "client_column": "y"},
            "column 'y' can't be both target and client_column",
        ),
        (
            {"client_column": "c", "drop": "c"},
            "column 'c' is the client_column: take it out of drop",
        ),
        ({"drop": "a", "categorical": "a"}, "column 'a' can't be both in drop and in categorical"),
        ({"test_column": "t", "test_size": 0.2}, "test_column and test_size exclude each other"),
        ({"separator": "|"}, "',', ';' or 'tab'"),
        ({"decimal": ";"}, "'.' or ','"),
        ({"encoding": "utf-99"}, "an encoding Python knows"),
        ({"test_size": 0}, "greater than or equal to 0.05"),
        ({"targte": "y"}, "no option 'targte'. Did you mean 'target'?"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(OptionError, match=message):
        Folder(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target": ""},
            "say which column is to be predicted with target=COLUMN. Columns: age, sex",
        ),
        ({"target": "il"}, "target = 'il' is no column of a.csv. Did you mean 'ill'?"),
        ({"test_column": "part"}, "test_column = 'part' is no column of a.csv. Known: age"),
        ({"drop": "agee"}, "drop = 'agee' is no column of any file. Did you mean 'age'?"),
        (
            {"categorical": "agee"},
            "categorical = 'agee' is no column of a.csv. Did you mean 'age'?",
        ),
        ({"client_column": "sex"}, "client_column = 'sex' is for one file, and .* holds 2"),
        ({"path": None}, "folder: say where the CSV files are with path=FOLDER"),
        ({"path": "/no/such/folder"}, "there is no folder or file /no/such/folder"),
    ],
)
def test_options_that_do_not_fit_the_files(write, options, message):
    dataset = write({"a.csv": table(), "b.csv": table()})
    dataset = Folder(**{"path": dataset.path, "target": "ill", **options})
    with pytest.raises(OptionError, match=message):
        dataset.load(0)
    with pytest.raises(OptionError, match=message):
        dataset.describe()


def test_folders_without_clients(write, tmp_path):
    assert "there is no .csv file in" in refused(write({}), OptionError)
    assert "it holds 'a.xlsx'" in refused(write({"a.xlsx": "x"}), OptionError)
    message = refused(write({"a.csv": table()}), OptionError)
    assert "a.csv is the only file. Name the column that tells clients apart" in message
    alone = Folder(path=tmp_path / "a.csv", target="ill")
    assert "is the only file" in refused(alone, OptionError)


def test_drop_takes_columns_that_some_files_lack(write):
    files = {"a.csv": table(), "b.csv": table(header="age,sex,ill").replace("sex", "gender")}
    assert "lacks 'sex' and also has 'gender'" in refused(write(files))
    assert write(files, drop="sex, gender").load(0).feature_names == ("age",)


# The example, and the names federations go by


def test_the_example_of_three_clinics_trains(monkeypatch):
    monkeypatch.chdir(ROOT)
    cls = folder_dataset(Path("datasets/three_clinics"))
    assert cls.name == "three_clinics"
    assert cls.__doc__.splitlines()[0] == "Your federation in datasets/three_clinics."
    dataset = cls(target="readmitted")
    federation = dataset.load(0)
    assert federation.names == ("harbour", "hillside", "meadow")
    assert federation.name == federation.source["dataset"] == "three_clinics"
    assert federation.source["options"]["path"] == "datasets/three_clinics"
    again = cls(**federation.source["options"]).load(0)
    assert np.array_equal(again.clouds[0], federation.clouds[0])
    result = train("fedavg", federation, seed=0, rounds=30, eval_every=30)
    # Better than the coin's 0.693.
    assert result.history.last("test", "log_loss").pooled < 0.6
    summary = dataset.describe()
    assert all(40 <= client.records <= 60 for client in summary.clients)
    assert {c.kind for c in summary.columns} == {"numeric", "categorical"}
    assert all(client.missing > 0 for client in summary.clients)
    assert summary.warnings == ()


def test_the_readme_of_the_workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets").symlink_to(ROOT / "datasets")
    text = (ROOT / "datasets" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "README.md", "exec"), names := {"__name__": "readme"})
    assert len(names["federation"]) == 3
    (command,) = re.findall(r"^fedtopo (train .*)$", text, re.MULTILINE)
    result = CliRunner().invoke(app, [*command.split(), "--rounds", "2", "--no-tensorboard"])
    assert result.exit_code == 0, result.output
    documented = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)))
    assert set(documented) == set(Folder.model_fields) - {"path"}


def test_the_class_of_a_folder_leaves_the_registered_one_alone():
    cls = folder_dataset(CLINICS)
    assert issubclass(cls, Folder) and datasets["folder"] is Folder
    assert Folder.name == "folder" and Folder().path is None and cls().path == CLINICS


def test_multiclass_federations_train(write):
    text = column(lambda i: (i % 3) * 2 + (i * 7 % 10) / 10, ill=lambda i: "abc"[i % 3], n=60)
    federation = write({"a.csv": text, "b.csv": text}).load(0)
    result = train("fedavg", federation, rounds=20, eval_every=20)
    assert result.history.last("test", "accuracy").pooled > 0.8
