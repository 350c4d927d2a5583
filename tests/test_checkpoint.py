"""Stopped and resumed runs equal straight ones to the bit; files that don't fit are refused."""

import itertools
import os
import random
import warnings

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from fedtopo_torch import checkpoint
from fedtopo_torch.algorithms import Ditto, FedAvg, FedProx, Local
from fedtopo_torch.checkpoint import CheckpointError
from fedtopo_torch.federation import Federation
from fedtopo_torch.models.logistic import Logistic
from fedtopo_torch.monitor import FolderInUse, TensorBoard
from fedtopo_torch.options import OptionError
from fedtopo_torch.registry import algorithms
from fedtopo_torch.trainer import Trainer

SIZES = [9, 14, 9, 14]
NAMES = sorted(set(algorithms))
ROUNDS = 4


def make(name):
    method = algorithms[name]
    return method(labels=(0, 1, 0, 1)) if name == "clustered" else method()


def net(seed=3, width=4):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        middle = nn.Linear(3, width), nn.BatchNorm1d(width)
        return nn.Sequential(*middle, nn.ReLU(), nn.Linear(width, 1))


class Stop:
    """Ends a run after an evaluated round, as Ctrl-C or a fault would."""

    def __init__(self, round, error):
        self.round, self.error = round, error

    def started(self, trainer, result):
        pass

    def evaluated(self, round, scores):
        if round == self.round:
            raise self.error

    def finished(self, result):
        pass


def trainer(method, federation, module=None, **settings):
    settings = {"eta": 0.1, "local_steps": 2, "rounds": ROUNDS, "batch_size": 8, **settings}
    return Trainer(method, federation, module or Logistic(), **settings)


def run(*arguments, resume=False, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return trainer(*arguments, **settings).run(resume=resume)


def everything(result):
    """All that a run gives back, for comparison to the bit."""
    sent = result.communication
    tensors = {"theta": result.theta}
    tensors |= {f"server {name}": value for name, value in result.server.items()}
    tensors |= {f"scored {name}": value for name, value in result.scored.items()}
    if result.counters is not None:
        tensors["counters"] = result.counters
    for client, state in result.state_dicts().items():
        tensors |= {f"{client} {name}": value for name, value in state.items()}
    return (
        [tuple(map(repr, row)) for row in result.history.rows()],
        {n: (v.dtype, tuple(v.shape), v.numpy().tobytes()) for n, v in tensors.items()},
        (sent.handshake, sent.introduction, sent.round, sent.contents),
        (result.rounds, result.unseen, result.interrupted, result.facts.eta),
    )


WAYS = {
    "all": {},
    "some, momentum": {"participation": 0.5, "momentum": 0.9, "eval_every": 2},
    "batchnorm, momentum": {"momentum": 0.9, "eval_every": 2, "buffers": "local"},
    "batchnorm, some": {"clients_per_round": 2, "optimizer": "adam", "schedule": "cosine"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_a_straight_one(make_federation, tmp_path, name, way):
    federation, settings = make_federation(SIZES), WAYS[way]
    module = net() if "batchnorm" in way else None
    straight = run(make(name), federation, module, **settings)
    kept = {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 1, **settings}
    # Stopped after round 4, before it is saved.
    with pytest.raises(ZeroDivisionError) as caught:
        run(make(name), federation, module, callbacks=[Stop(4, ZeroDivisionError())], **kept)
    assert caught.value.result.rounds == 4
    resumed = run(make(name), federation, module, resume=True, **kept)
    assert everything(resumed) == everything(straight)
    # Fault 30: one clean curve.
    assert resumed.history.rounds == sorted(set(resumed.history.rounds))
    # A finished run is given back as it was.
    assert everything(run(make(name), federation, module, resume=True, **kept)) == everything(
        straight
    )


def test_a_run_stopped_by_the_keyboard_goes_on(make_federation, tmp_path):
    federation = make_federation(SIZES)
    kept = {"checkpoint": tmp_path / "a" / "run.pt", "checkpoint_every": 2, "rounds": 7}
    stopped = run(Ditto(), federation, callbacks=[Stop(5, KeyboardInterrupt())], **kept)
    assert stopped.interrupted and stopped.rounds == 5
    resumed = run(Ditto(), federation, resume=True, **kept)
    assert everything(resumed) == everything(run(Ditto(), federation, rounds=7))


def test_an_interrupted_runs_counters_are_those_of_its_models(make_federation):
    federation = make_federation(SIZES)

    class Interrupts(FedAvg):
        """Stops in round 4, which is not evaluated."""

        def aggregate(self, server, uplink, clients):
            steps.append(1)
            if len(steps) == 4:
                raise KeyboardInterrupt
            return super().aggregate(server, uplink, clients)

    steps = []
    stopped = run(Interrupts(), federation, net(), eval_every=2)
    assert everything(stopped)[1] != {} and stopped.rounds == 3
    whole = run(FedAvg(), federation, net(), rounds=2)
    assert torch.equal(stopped.theta, whole.theta)
    assert torch.equal(stopped.counters, whole.counters)
    assert stopped.state_dicts()["c00"]["1.num_batches_tracked"].item() == 4


class Draws(FedAvg):
    """Draws from the generators of torch, NumPy and Python in every round."""

    def local_update(self, message, client, problem):
        uplink, client = super().local_update(message, client, problem)
        noise = torch.randn(()) + np.random.standard_normal() + random.gauss(0, 1)
        return {"theta": uplink["theta"] + noise}, client


def test_draws_from_the_global_generators_go_on_where_they_were(make_federation, tmp_path):
    federation = make_federation([9, 12])
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def seed():
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)

    try:
        seed()
        straight = run(Draws(), federation)
        seed()
        kept = {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 1}
        run(Draws(), federation, callbacks=[Stop(3, KeyboardInterrupt())], **kept)
        torch.manual_seed(9)
        assert everything(run(Draws(), federation, resume=True, **kept)) == everything(straight)
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


@pytest.mark.parametrize("method", [FedAvg(), Ditto(), Local()])
@pytest.mark.parametrize("module", [None, net()])
def test_more_rounds_may_be_asked_for_later(make_federation, tmp_path, method, module):
    federation = make_federation(SIZES)
    kept = {"checkpoint": tmp_path / "run.pt", "participation": 0.5}
    first = run(method, federation, module, rounds=3, **kept)
    assert first.rounds == 3
    later = run(method, federation, module, rounds=6, resume=True, **kept)
    straight = run(method, federation, module, rounds=6, participation=0.5)
    assert everything(later) == everything(straight)


def test_more_rounds_of_a_cosine_are_another_run(make_federation, tmp_path):
    federation, kept = make_federation(SIZES), {"checkpoint": tmp_path / "run.pt"}
    run(FedAvg(), federation, rounds=3, schedule="cosine", **kept)
    with pytest.raises(OptionError, match=r"training\.rounds was 3, is 6"):
        run(FedAvg(), federation, rounds=6, schedule="cosine", resume=True, **kept)


def test_fewer_rounds_than_were_done_are_refused(make_federation, tmp_path):
    federation, kept = make_federation(SIZES), {"checkpoint": tmp_path / "run.pt"}
    run(FedAvg(), federation, rounds=4, **kept)
    with pytest.raises(OptionError, match=r"training\.rounds was 4, is 3"):
        run(FedAvg(), federation, rounds=3, resume=True, **kept)


# Fault 30: one clean curve


def curve(folder):
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(e.step, e.value) for e in reader.Scalars("all clients pooled/test log-loss")]


def test_fault_30_a_resumed_run_has_one_whole_curve_and_no_tangled_one(make_federation, tmp_path):
    federation = make_federation(SIZES)
    kept = {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 2}
    first = TensorBoard(tmp_path / "first")
    run(FedAvg(), federation, callbacks=[first, Stop(3, KeyboardInterrupt())], **kept)
    # The same folder twice would hold two curves.
    with pytest.raises(FolderInUse):
        run(FedAvg(), federation, callbacks=[first], resume=True, **kept)
    again = TensorBoard(tmp_path / "again")
    resumed = run(FedAvg(), federation, callbacks=[again], resume=True, **kept)
    run(FedAvg(), federation, callbacks=[TensorBoard(tmp_path / "straight")])
    assert resumed.history.rounds == [1, 2, 3, 4]
    assert [step for step, _ in curve(tmp_path / "first")] == [1, 2, 3]
    assert curve(tmp_path / "again") == curve(tmp_path / "straight")
    assert [step for step, _ in curve(tmp_path / "again")] == [1, 2, 3, 4]


# What may not change


def frozen(seed=3, change=0.0):
    module = net(seed)
    with torch.no_grad():
        module[0].weight[0, 0] += change
    module[0].requires_grad_(False)
    return module


def other_labels(federation_of):
    federation = federation_of(SIZES)
    federation.train.client(0)[1][0] = 1 - federation.train.client(0)[1][0]
    return federation


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"eta": 0.2}, "training.eta was 0.1, is 0.2"),
        ({"momentum": 0.5}, "training.momentum was 0.0, is 0.5"),
        ({"batch_size": None}, "training.batch_size was 8, is None"),
        ({"participation": 0.5}, "training.participation was 1.0, is 0.5"),
        ({"buffers": "local"}, "training.buffers was average, is local"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"splits": ["test"]}, "splits was ['train', 'test'], is ['test']"),
        ({"method": FedProx(mu=0.2)}, "algorithm.mu was 0.1, is 0.2"),
        ({"method": FedAvg()}, "algorithm was fedprox, is fedavg"),
        ({"module": net(width=5)}, "model's parameters was [13, 21], is [36, 46]"),
        ({"module": frozen(4)}, "model's initialisation was "),
        ({"module": frozen(change=1.0)}, "model's initialisation was "),
        ({"federation": other_labels}, "federation was "),
        ({"federation": lambda make: make(SIZES, n_test=13)}, "federation was "),
        ({"federation": lambda make: make(SIZES, dtype=torch.float32)}, "federation was "),
    ],
)
def test_another_configuration_is_refused_and_named(make_federation, tmp_path, change, told):
    kept = {"checkpoint": tmp_path / "run.pt", "rounds": 2}
    change, module = dict(change), frozen()
    run(FedProx(), make_federation(SIZES), module, **kept)
    before = (tmp_path / "run.pt").read_bytes()
    module = change.pop("module", module)
    federation = change.pop("federation", lambda make: make(SIZES))(make_federation)
    method = change.pop("method", FedProx())
    with pytest.raises(OptionError) as caught:
        run(method, federation, module, resume=True, **{**kept, **change})
    assert told in str(caught.value)
    assert str(tmp_path / "run.pt") in str(caught.value)
    assert (tmp_path / "run.pt").read_bytes() == before


def test_the_closed_form_and_autograd_are_not_mixed(make_federation, tmp_path):
    kept = {"checkpoint": tmp_path / "run.pt", "rounds": 2}
    run(FedAvg(), make_federation(SIZES), **kept)
    with pytest.raises(OptionError, match="LinearObjective, is LinearModule"):
        run(FedAvg(), make_federation(SIZES), closed_form=False, resume=True, **kept)


# Files


@pytest.fixture
def saved(make_federation, tmp_path):
    """A finished run of two rounds."""
    path = tmp_path / "run.pt"
    run(FedAvg(), make_federation([9, 12]), checkpoint=path, rounds=2)
    return path


def again(make_federation, path, **settings):
    settings = {"resume": True, "rounds": 2, **settings}
    return run(FedAvg(), make_federation([9, 12]), checkpoint=path, **settings)


def flipped(content):
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flipped, "is damaged"),
        (lambda content: content[: len(content) // 2], "is damaged"),
        (lambda content: content[:-1], "is damaged"),
        (lambda content: content + b"x", "is damaged"),
        (lambda content: content[: len(checkpoint.MAGIC) + 5], "is damaged"),
        (lambda content: content[: len(checkpoint.MAGIC)], "is damaged"),
        (lambda content: content[:5], "is not a checkpoint"),
        (lambda content: b"", "is not a checkpoint"),
        (lambda content: b"name,age\nAnn,3\n", "is not a checkpoint"),
        (lambda content: content.replace(b"checkpoint 1", b"checkpoint 9", 1), "not a checkpoint"),
    ],
)
def test_damaged_and_foreign_files_are_refused(make_federation, saved, damage, told):
    saved.write_bytes(damage(saved.read_bytes()))
    with pytest.raises(CheckpointError) as caught:
        again(make_federation, saved)
    assert told in str(caught.value) and str(saved) in str(caught.value)


def test_a_folder_is_refused(make_federation, tmp_path):
    with pytest.raises(CheckpointError, match="can't read"):
        again(make_federation, tmp_path)


def test_an_earlier_run_is_not_written_over(make_federation, saved):
    before = saved.read_bytes()
    with pytest.raises(OptionError, match=r"holds an earlier run: resume it"):
        again(make_federation, saved, resume=False)
    assert saved.read_bytes() == before


def test_resuming_nothing_is_a_run_from_the_start(make_federation, tmp_path, saved):
    fresh = again(make_federation, tmp_path / "new.pt")
    assert everything(fresh) == everything(again(make_federation, saved))


@pytest.mark.parametrize("where", ["replace", "fdopen"])
def test_a_crash_while_writing_leaves_the_old_file(make_federation, tmp_path, monkeypatch, where):
    path = tmp_path / "run.pt"
    kept = {"checkpoint": path, "checkpoint_every": 1}
    real, calls = getattr(os, where), []

    def fails(*arguments):
        calls.append(1)
        if len(calls) == 3:
            if where == "fdopen":
                os.close(arguments[0])
            raise OSError("no space left")
        return real(*arguments)

    monkeypatch.setattr(os, where, fails)
    with pytest.raises(OSError, match="no space left") as caught:
        run(FedAvg(), make_federation(SIZES), **kept)
    monkeypatch.undo()
    # What was done is not lost to the caller.
    assert caught.value.result.rounds == 3
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
    resumed = run(FedAvg(), make_federation(SIZES), resume=True, **kept)
    assert everything(resumed) == everything(run(FedAvg(), make_federation(SIZES)))


def test_checkpoints_come_as_often_as_asked_and_at_the_end(make_federation, tmp_path, monkeypatch):
    rounds, real = [], checkpoint.save

    def counts(path, trainer, result, *rest):
        rounds.append(result.rounds)
        return real(path, trainer, result, *rest)

    monkeypatch.setattr(checkpoint, "save", counts)
    kept = {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 3, "rounds": 7}
    run(FedAvg(), make_federation([9]), **kept)
    assert rounds == [3, 6, 7]


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_how_often_is_a_whole_number(make_federation, value):
    with pytest.raises(ValueError, match="checkpoint_every is"):
        trainer(FedAvg(), make_federation([9]), checkpoint_every=value)


# Fault 5: what is kept are copies


@pytest.mark.parametrize("name", NAMES)
def test_fault_05_results_of_a_stopped_run_do_not_move_with_the_next(make_federation, name):
    kept = []

    class Keeps(Stop):
        def started(self, trainer, result):
            self.result = result

        def evaluated(self, round, scores):
            kept.append((self.result.theta, self.result.counters, everything(self.result)[1]))

    federation = make_federation(SIZES)
    run(make(name), federation, net(), callbacks=[Keeps(0, None)], clients_per_round=3, rounds=4)
    for (theta, counters, then), (_, _, after) in itertools.pairwise(kept):
        assert theta.numpy().tobytes() == then["theta"][2]
        assert counters.numpy().tobytes() == then["counters"][2]
        assert then["theta"] != after["theta"]


def test_fault_05_a_checkpoint_is_not_changed_by_training_on(make_federation, tmp_path):
    path, copies = tmp_path / "run.pt", {}

    class Reads(Stop):
        def evaluated(self, round, scores):
            if path.exists():
                copies[round - 1] = path.read_bytes()

    federation = make_federation(SIZES)
    kept = {"checkpoint": path, "checkpoint_every": 1}
    run(Ditto(), federation, net(), callbacks=[Reads(0, None)], **kept)
    for done in (2, 3):
        path.write_bytes(copies[done])
        stopped = run(Ditto(), federation, net(), rounds=done, resume=True, checkpoint=path)
        assert everything(stopped) == everything(run(Ditto(), federation, net(), rounds=done))


def test_a_federation_that_is_read_again_is_the_same(make_clients):
    first, second = (Federation(make_clients(SIZES)) for _ in range(2))
    assert first.digest() == second.digest()
    assert first.digest() != Federation(make_clients(SIZES, seed=1)).digest()
