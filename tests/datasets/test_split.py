"""Training and test records of one client."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtopo_torch.datasets.split import Parts, split_notes, split_records


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40), st.floats(0.05, 0.95), st.integers(0, 99)
)
def test_every_client_keeps_a_training_record_and_classes_where_they_can_be(labels, share, seed):
    labels = np.array(labels)
    train, test, stratified = split_records(labels, share, np.random.default_rng(seed))
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(len(labels)))
    assert len(train) >= 1
    assert len(test) == min(np.ceil(share * len(labels)), len(labels) - 1)
    if stratified:
        assert set(labels[train]) == set(labels[test]) == set(labels)


def test_stratified_by_hand():
    labels = np.repeat([0, 1], [20, 80])
    train, test, stratified = split_records(labels, 0.3, np.random.default_rng(0))
    assert stratified
    assert np.bincount(labels[train]).tolist() == [14, 56]
    assert np.bincount(labels[test]).tolist() == [6, 24]


@pytest.mark.parametrize(
    ("labels", "sizes", "stratified"),
    [
        ([0], (1, 0), False),
        ([0, 0], (1, 1), True),
        ([0, 1], (1, 1), False),
        ([0, 0, 0, 1], (2, 2), False),
        # Two test records hold no record of three classes each.
        ([0, 0, 1, 1, 2, 2], (4, 2), False),
        ([0, 0, 1, 1], (2, 2), True),
    ],
)
def test_small_clients(labels, sizes, stratified):
    parts = split_records(np.array(labels), 0.3, np.random.default_rng(0))
    assert (len(parts.train), len(parts.test)) == sizes
    assert parts.stratified is stratified


def test_notes_name_clients_and_cut_long_lists():
    one, some = np.arange(1), np.arange(2)
    assert split_notes({"a": Parts(some, some, True)}) == []
    parts = {f"c{k}": Parts(one, some, False) for k in range(7)} | {"z": Parts(one, one[:0], False)}
    untested, plain = split_notes(parts)
    assert untested == "without test records, so trained but not scored: 'z'."
    assert plain.endswith("'c0', 'c1', 'c2', 'c3', 'c4' and 2 more.")
