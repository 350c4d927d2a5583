"""What every dataset offers."""

from pathlib import Path

import pytest
import torch

from fedtopo_torch.options import OptionError
from fedtopo_torch.registry import datasets

CLINICS = Path(__file__).resolve().parents[2] / "datasets" / "three_clinics"
OPTIONS = {
    "folder": {"path": CLINICS, "target": "readmitted"},
    "label_skew": {"n_clients": 2},
    "synthetic": {"n_clients": 2},
}


@pytest.mark.parametrize("name", list(datasets))
def test_every_dataset_comes_in_either_precision(name):
    options = OPTIONS.get(name, {})
    wide, narrow = (datasets[name](**options, dtype=d).load(0) for d in ("float64", "float32"))
    assert datasets[name](**options).load(0).digest() == wide.digest()
    assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
    assert narrow.source["options"]["dtype"] == "float32"
    for k in range(len(wide)):
        for one, other in ((wide.train, narrow.train), (wide.test, narrow.test)):
            assert torch.equal(one.client(k)[0].float(), other.client(k)[0])
            assert torch.equal(one.client(k)[1].long(), other.client(k)[1].long())


def test_other_precisions_are_refused():
    with pytest.raises(OptionError, match=r"dtype = 'float16' .* 'float64' or 'float32'"):
        datasets["synthetic"](dtype="float16")
