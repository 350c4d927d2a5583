"""Loss, gradient and descent of any module on many clients at once."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from fedtopo_torch import Trainer
from fedtopo_torch.algorithms import FedAvg
from fedtopo_torch.federation import Client, Federation
from fedtopo_torch.local import LocalProblem
from fedtopo_torch.objective import LinearObjective, Objective, objective_for

TOLERANCE = {"rtol": 0, "atol": 1e-12}


def with_ones(x, bias=True):
    return np.concatenate([x, np.ones((len(x), 1))], axis=1) if bias else x


def whole(objective, split):
    """The split as one bucket, padded where clients differ."""
    (bucket,) = split.buckets(10**9)
    return objective.prepare(bucket)


def linear_objectives(federation, bias, l2=0.07):
    module = nn.Linear(federation.feature_shape[0], federation.outputs, bias=bias)
    settings = {"outputs": federation.outputs}
    closed = objective_for(module, federation.task, l2, **settings)
    assert type(closed) is LinearObjective
    return closed, Objective(module, federation.task, l2, **settings)


def random_rows(objective, k, seed=0, size=1.0):
    """Random parameters; buffers as they start."""
    rows = objective.initial().repeat(k, 1)
    values = np.random.default_rng(seed).normal(size=(k, objective.p)) * size
    rows[:, : objective.p] = torch.from_numpy(values)
    return rows


def mlp(d, hidden=4, out=1, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, out))


class Dropping(nn.Module):
    """Dropout and BatchNorm: what draws and what moves buffers while training."""

    def __init__(self, d=3):
        super().__init__()
        self.norm = nn.BatchNorm1d(d)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        return self.out(self.drop(self.norm(x)))


# Closed form, autograd and NumPy agree


CASES = pytest.mark.parametrize(
    ("classes", "bias", "sizes"),
    [
        (2, True, [6, 6, 6]),
        (2, True, [5, 9, 1]),
        (2, False, [5, 9, 1]),
        (4, True, [5, 9, 4]),
        (4, False, [5, 9, 4]),
    ],
)


@CASES
@pytest.mark.parametrize("size", [1.0, 30.0], ids=["small logits", "large logits"])
def test_closed_form_equals_autograd(make_federation, classes, bias, sizes, size):
    federation = make_federation(sizes, classes=classes)
    closed, auto = linear_objectives(federation, bias)
    theta = random_rows(closed, len(sizes), size=size)
    mine, other = whole(closed, federation.train), whole(auto, federation.train)
    assert torch.allclose(closed.gradient(theta, mine), auto.gradient(theta, other), **TOLERANCE)
    # What is put out for a padded record means nothing.
    real = torch.ones_like(mine.labels, dtype=torch.bool) if mine.mask is None else mine.mask > 0
    a, b = closed.outputs(theta, mine)[real], auto.outputs(theta, other)[real]
    assert torch.allclose(a, b, **TOLERANCE)
    assert torch.allclose(closed.loss(theta, mine), auto.loss(theta, other), **TOLERANCE)


@CASES
def test_loss_and_gradient_equal_numpy(make_federation, classes, bias, sizes):
    federation = make_federation(sizes, classes=classes)
    objective, _ = linear_objectives(federation, bias, l2=0.07)
    theta = random_rows(objective, len(sizes))
    data = whole(objective, federation.train)
    losses, gradients = objective.loss(theta, data), objective.gradient(theta, data)
    for k in range(len(sizes)):
        x, y = (v.numpy() for v in federation.train.client(k))
        w, d = theta[k].numpy(), x.shape[1]
        if classes == 2:
            logits = with_ones(x, bias) @ w
            loss = np.logaddexp(0, np.where(y > 0, -logits, logits)).mean()
            gradient = with_ones(x, bias).T @ (1 / (1 + np.exp(-logits)) - y) / len(x)
        else:
            logits = x @ w[: classes * d].reshape(classes, d).T
            if bias:
                logits = logits + w[classes * d :]
            top = logits.max(1, keepdims=True)
            log_p = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
            loss = -log_p[np.arange(len(y)), y].mean()
            residual = (np.exp(log_p) - np.eye(classes)[y]) / len(x)
            gradient = (residual.T @ x).ravel()
            if bias:
                gradient = np.concatenate([gradient, residual.sum(0)])
        # L2 on everything, the bias too.
        assert losses[k].item() == pytest.approx(loss + 0.035 * (w**2).sum(), abs=1e-12)
        assert np.abs(gradients[k].numpy() - (gradient + 0.07 * w)).max() < 1e-12


def test_gradient_of_confident_records():
    # Record x = 1, label 1, logit 22: loss log(1 + e^-22), gradient -e^-22 / (1 + e^-22).
    federation = Federation([Client("a", ([[1.0]], [1]))], standardize=False)
    tiny = math.exp(-22.0)
    for objective in linear_objectives(federation, bias=False, l2=0.0):
        data = whole(objective, federation.train)
        theta = torch.tensor([[22.0]], dtype=torch.float64)
        assert objective.loss(theta, data).item() == pytest.approx(math.log1p(tiny), abs=1e-14)
        expected = -tiny / (1 + tiny)
        assert objective.gradient(theta, data).item() == pytest.approx(expected, abs=1e-14)


def test_l2_acts_on_the_bias(make_federation):
    federation = make_federation([6])
    theta = torch.tensor([[0.0, 0.0, 0.0, 2.0]], dtype=torch.float64)
    gradients = []
    for l2 in (0.0, 0.5):
        objective, auto = linear_objectives(federation, bias=True, l2=l2)
        for each in (objective, auto):
            gradients.append(each.gradient(theta, whole(each, federation.train)))
    for with_l2, without in zip(gradients[2:], gradients[:2], strict=True):
        # 0.5 times a bias of 2
        assert torch.allclose(with_l2 - without, theta * 0.5, **TOLERANCE)


def test_gradient_of_an_mlp_equals_finite_differences(make_federation):
    federation = make_federation([5, 8])
    objective = Objective(mlp(3), l2=0.1)
    data = whole(objective, federation.train)
    theta = objective.initial().repeat(2, 1) + 0.1
    gradient = objective.gradient(theta, data)
    step = 1e-6
    for j in range(objective.p):
        shift = torch.zeros(objective.p, dtype=torch.float64)
        shift[j] = step
        slope = (objective.loss(theta + shift, data) - objective.loss(theta - shift, data)) / (
            2 * step
        )
        assert torch.allclose(slope, gradient[:, j], rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", ["logistic", "softmax", "mlp"])
def test_batched_equals_client_by_client_without_padding(make_federation, kind):
    classes = 3 if kind == "softmax" else 2
    federation = make_federation([5, 9, 7], classes=classes)
    module = mlp(3) if kind == "mlp" else nn.Linear(3, federation.outputs)
    objective = objective_for(module, federation.task, 0.1, outputs=federation.outputs)
    theta = random_rows(objective, 3)
    together = LocalProblem(objective, whole(objective, federation.train))
    rows = together.descend(theta, steps=5, lr=0.3)
    losses = together.loss(theta)
    for k, bucket in enumerate(sorted(federation.train.buckets(1), key=lambda b: b.names)):
        alone = LocalProblem(objective, objective.prepare(bucket))
        assert alone.data.mask is None
        row = alone.descend(theta[k : k + 1], steps=5, lr=0.3)
        assert torch.allclose(row[0], rows[k], **TOLERANCE)
        assert torch.allclose(alone.loss(theta[k : k + 1])[0], losses[k], **TOLERANCE)


def test_padding_of_records_the_module_can_not_take(make_federation):
    class Directions(nn.Module):
        """Divides by the length of a record: NaN for a record of zeros, which padding is."""

        def __init__(self):
            super().__init__()
            self.out = nn.Linear(3, 1)

        def forward(self, x):
            return self.out(x / x.norm(dim=-1, keepdim=True))

    federation = make_federation([5, 9])
    objective = Objective(Directions(), l2=0.1)
    data = whole(objective, federation.train)
    theta = random_rows(objective, 2)
    assert bool(objective.loss(theta, data).isfinite().all())
    assert bool(objective.gradient(theta, data).isfinite().all())


def test_smoothness_is_the_largest_eigenvalue(make_federation):
    for classes, factor in ((2, 1 / 4), (3, 1 / 2)):
        federation = make_federation([5, 9, 2], classes=classes)
        for bias in (True, False):
            objective, _ = linear_objectives(federation, bias, l2=0.07)
            found = objective.smoothness(whole(objective, federation.train))
            for k in range(3):
                x = with_ones(federation.train.client(k)[0].numpy(), bias)
                largest = np.linalg.eigvalsh(x.T @ x / len(x))[-1]
                assert found[k].item() == pytest.approx(factor * largest + 0.07, abs=1e-12)


def test_smoothness_of_other_modules_is_unknown(make_federation):
    objective = Objective(mlp(3))
    assert objective.smoothness(whole(objective, make_federation([5]).train)) is None


# theta and the module


def test_linear_models_start_at_zero_others_at_their_own_initialisation():
    linear = nn.Linear(3, 1)
    assert objective_for(linear, "binary", 0.0).initial().tolist() == [0.0] * 4
    module = mlp(3)
    start = Objective(module).initial()
    own = torch.cat([p.detach().double().flatten() for p in module.parameters()])
    assert torch.equal(start, own)


@pytest.mark.parametrize("kind", ["logistic", "softmax", "mlp"])
def test_state_dict_gives_the_plain_module_the_same_outputs(make_federation, kind):
    federation = make_federation([5], classes=3 if kind == "softmax" else 2)
    outputs = federation.outputs
    module = mlp(3) if kind == "mlp" else nn.Linear(3, outputs)
    objective = objective_for(module, federation.task, 0.0, outputs=outputs)
    theta = random_rows(objective, 1)
    plain = (mlp(3, seed=1) if kind == "mlp" else nn.Linear(3, outputs)).double().eval()
    plain.load_state_dict(objective.state_dict(theta[0]))
    data = whole(objective, federation.train)
    expected = plain(federation.train.client(0)[0])
    found = objective.outputs(theta, data)[0]
    assert torch.allclose(found, expected.squeeze(-1), **TOLERANCE)


def test_state_dict_holds_copies_with_frozen_parameters_and_buffers():
    module = Dropping()
    module.out.bias.requires_grad_(False)
    objective = Objective(module)
    theta = random_rows(objective, 1)[0]
    state = objective.state_dict(theta)
    assert set(state) == set(module.state_dict())
    for value in state.values():
        value.zero_()
    assert torch.equal(objective.state_dict(theta)["out.bias"], module.out.bias.double())
    assert theta[: objective.p].abs().min() > 0


def test_state_dict_of_tied_parameters():
    class Tied(nn.Module):
        """One weight matrix under two names."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight
            self.out = nn.Linear(3, 1)

        def forward(self, x):
            return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))

    objective = Objective(Tied())
    assert objective.p == 13
    theta = random_rows(objective, 1)[0]
    plain = Tied().double()
    plain.load_state_dict(objective.state_dict(theta))
    assert torch.equal(plain.first.weight.flatten(), theta[:9])
    assert plain.second.weight is plain.first.weight


def test_fault_08_frozen_parameters_are_outside_theta_and_do_not_move(make_federation):
    module = mlp(3)
    frozen = {n: p.detach().clone() for n, p in module[0].named_parameters()}
    module[0].requires_grad_(False)
    objective = Objective(module, l2=0.5)
    assert objective.p == 5
    assert objective.parameter_names == ("2.weight", "2.bias")
    data = whole(objective, make_federation([5, 8]).train)
    problem = LocalProblem(objective, data)
    theta = problem.descend(objective.initial().repeat(2, 1), steps=3, lr=0.1)
    for row in theta:
        state = objective.state_dict(row)
        for name, value in frozen.items():
            assert torch.equal(state[f"0.{name}"], value.double())
        assert not torch.equal(state["2.weight"], module[2].weight.double())


def test_a_linear_model_with_a_frozen_bias_is_not_trained_in_closed_form(make_federation):
    module = nn.Linear(3, 1)
    module.bias.requires_grad_(False)
    objective = objective_for(module, "binary", 0.0)
    assert objective.p == 3
    data = whole(objective, make_federation([5]).train)
    zero = torch.zeros(1, 3, dtype=torch.float64)
    assert torch.allclose(objective.outputs(zero, data), module.bias.detach().double())


def test_the_callers_module_is_not_changed(make_federation):
    module = mlp(3)
    before = {n: v.clone() for n, v in module.state_dict().items()}
    objective = Objective(module)
    problem = LocalProblem(objective, whole(objective, make_federation([5]).train))
    problem.descend(objective.initial()[None], steps=2, lr=1.0)
    assert module.training
    assert all(type(layer) in (nn.Sequential, nn.Linear, nn.Tanh) for layer in module.modules())
    for name, value in module.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])


def test_modules_that_can_not_be_trained_are_refused():
    with pytest.raises(ValueError, match="Tanh has no trainable parameter"):
        Objective(nn.Tanh())
    frozen = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="Linear has no trainable parameter"):
        Objective(frozen)
    whole_numbers = nn.Module()
    whole_numbers.code = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ValueError, match=r"'code'.*int64"):
        Objective(whole_numbers)


# Shapes


def test_outputs_of_either_shape_are_the_same(make_federation):
    class Flat(nn.Linear):
        def forward(self, x):
            return super().forward(x)[..., 0]

    federation = make_federation([5, 8])
    column, flat = Objective(nn.Linear(3, 1)), Objective(Flat(3, 1))
    theta = random_rows(column, 2)
    a = column.outputs(theta, whole(column, federation.train))
    b = flat.outputs(theta, whole(flat, federation.train))
    assert a.shape == b.shape == (2, 8)
    assert torch.allclose(a, b, **TOLERANCE)


@pytest.mark.parametrize("drop", [False, True], ids=["batched", "client by client"])
def test_a_module_with_the_wrong_outputs_is_refused_and_told_what_is_needed(make_federation, drop):
    class Answer(nn.Module):
        def __init__(self, answer):
            super().__init__()
            self.out = nn.Linear(3, 2)
            self.drop = nn.Dropout(0.5) if drop else nn.Identity()
            self.answer = answer

        def forward(self, x):
            return self.answer(self.out(self.drop(x)))

    federation = make_federation([5, 8])
    for answer, told in (
        (lambda out: (out, out), "tuple"),
        (lambda out: (out, 1), "tuple|[Tt]ensor"),
        (lambda out: out, r"\[(5|8), 2\].*\[n\]"),
        (lambda out: out.mean(), r"\[\].*\[n\]"),
    ):
        objective = Objective(Answer(answer))
        problem = LocalProblem(objective, whole(objective, federation.train))
        theta = objective.initial().repeat(2, 1)
        with pytest.raises(ValueError, match=told):
            problem.loss(theta)
        with pytest.raises(ValueError, match=told):
            problem.gradient(theta)


def test_a_linear_model_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"puts out 2 .*needs 1"):
        objective_for(nn.Linear(3, 2), "binary", 0.0)
    with pytest.raises(ValueError, match=r"puts out 1 .*needs 4"):
        objective_for(nn.Linear(3, 1), "multiclass", 0.0, outputs=4)


def test_record_losses_have_one_number_per_record():
    binary = Objective(nn.Linear(1, 1)).record_loss
    logits = torch.tensor([[2.0, -2.0, 0.0]], dtype=torch.float64)
    losses = binary(logits, torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64))
    expected = [math.log1p(math.exp(-2)), math.log1p(math.exp(-2)), math.log(2)]
    assert losses[0].tolist() == pytest.approx(expected, abs=1e-15)
    several = Objective(nn.Linear(1, 3), "multiclass", outputs=3).record_loss
    losses = several(torch.zeros(2, 5, 3), torch.zeros(2, 5, dtype=torch.int64))
    assert losses.shape == (2, 5)
    assert losses.flatten().tolist() == pytest.approx([math.log(3)] * 10, abs=1e-6)


@pytest.mark.parametrize("logit", [1e4, -1e4, 800.0, -800.0])
def test_extreme_logits_have_finite_losses(logit):
    binary = Objective(nn.Linear(1, 1)).record_loss
    logits = torch.full((1, 2), logit, dtype=torch.float64)
    losses = binary(logits, torch.tensor([[0.0, 1.0]], dtype=torch.float64))
    assert losses[0].tolist() == pytest.approx([max(logit, 0), max(-logit, 0)], abs=1e-12)
    several = Objective(nn.Linear(1, 3), "multiclass", outputs=3).record_loss
    wide = torch.tensor([[[logit, 0.0, 0.0]]], dtype=torch.float64)
    assert bool(several(wide, torch.tensor([[0]])).isfinite().all())


def test_images_go_through_a_convolution(make_federation):
    rng = np.random.default_rng(0)
    clients = [
        Client(name, (rng.normal(size=(n, 1, 4, 4)), np.arange(n) % 2))
        for name, n in (("a", 5), ("b", 3))
    ]
    federation = Federation(clients)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    objective = Objective(module, l2=0.0)
    theta = objective.initial().repeat(2, 1)
    found = objective.outputs(theta, whole(objective, federation.train))
    for k, n in enumerate((5, 3)):
        plain = module.double()(federation.train.client(k)[0])[:, 0]
        assert torch.allclose(found[k, :n], plain, **TOLERANCE)


# Data laid out once


def test_an_objective_lays_out_the_federation_it_is_asked_for(make_federation):
    # Federations come and go, and so do the addresses of what they held.
    objective = objective_for(nn.Linear(3, 1), "binary", 0.0)
    for seed in range(60):
        federation = make_federation([4, 5], seed=seed, standardize=False, n_test=0)
        (data,) = objective.data(federation.train)
        x, _ = federation.train.client(1)
        assert torch.equal(data.features[1, :, :3], x)
        del federation, data, x


def test_data_is_laid_out_once(make_federation):
    federation = make_federation([4, 5])
    objective = objective_for(nn.Linear(3, 1), "binary", 0.0)
    first, again = objective.data(federation.train), objective.data(federation.train)
    assert all(a is b for a, b in zip(first, again, strict=True))


# Descent


def test_descent_on_the_toy_problem_and_counted_steps(toy):
    problem = toy([0.0, 4.0])
    start = torch.ones(2, 1, dtype=torch.float64)
    theta = problem.descend(start)
    assert theta.flatten().tolist() == pytest.approx([0.81, 1.57], abs=1e-15)
    assert problem.steps.tolist() == [2, 2]
    theta = problem.descend(theta, steps=1, lr=0.5)
    assert theta.flatten().tolist() == pytest.approx([0.405, 2.785], abs=1e-15)
    assert problem.steps.tolist() == [3, 3]
    assert problem.at_round(4).steps.tolist() == [0, 0]
    assert start.flatten().tolist() == [1.0, 1.0]


def test_no_step_returns_a_copy(toy):
    start = torch.ones(1, 1, dtype=torch.float64)
    theta = toy([0.0]).descend(start, steps=0)
    theta.add_(1)
    assert start.item() == 1.0


def test_no_correction_is_plain_descent_to_the_bit(make_federation):
    federation = make_federation([5, 9])
    for module in (nn.Linear(3, 1), mlp(3)):
        objective = objective_for(module, "binary", 0.1)
        data = whole(objective, federation.train)
        start = random_rows(objective, 2)
        plain = LocalProblem(objective, data).descend(start, steps=5, lr=0.3)
        none = LocalProblem(objective, data).descend(start, lambda rows: None, steps=5, lr=0.3)
        assert torch.equal(plain, none)


def test_a_correction_sees_the_current_rows(toy):
    # Adding w turns w^2/2 into w^2: w <- w - 0.1 (2 w).
    seen = []
    theta = toy([0.0]).descend(
        torch.ones(1, 1, dtype=torch.float64), lambda rows: seen.append(rows.item()) or rows
    )
    assert seen == pytest.approx([1.0, 0.8], abs=1e-15)
    assert theta.item() == pytest.approx(0.64, abs=1e-15)


def test_descent_without_facts_needs_steps_and_step_size(toy):
    problem = toy([0.0])
    problem.facts = None
    with pytest.raises(ValueError, match="steps and lr"):
        problem.descend(torch.ones(1, 1, dtype=torch.float64), steps=1)


def test_fault_32_gradients_and_losses_carry_no_graph(make_federation):
    federation = make_federation([5, 9])
    for module in (nn.Linear(3, 1), mlp(3)):
        objective = objective_for(module, "binary", 0.1)
        problem = LocalProblem(objective, whole(objective, federation.train))
        start = random_rows(objective, 2)
        for value in (problem.gradient(start), problem.descend(start, steps=2, lr=0.1)):
            assert not value.requires_grad
            assert value.grad_fn is None
        assert not start.requires_grad


# Fault 27: dropout and buffers


def test_fault_27_evaluation_neither_draws_nor_moves_a_buffer(make_federation):
    objective = Objective(Dropping())
    data = whole(objective, make_federation([5, 9]).train)
    theta = random_rows(objective, 2)
    before = objective.state_dict(theta[0])
    state = torch.random.get_rng_state()
    first, second = objective.outputs(theta, data), objective.outputs(theta, data)
    assert torch.equal(first, second)
    assert torch.equal(objective.loss(theta, data), objective.loss(theta, data))
    after = objective.state_dict(theta[0])
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["norm.num_batches_tracked"].item() == 0
    assert torch.equal(torch.random.get_rng_state(), state)


def test_fault_27_evaluation_mode_is_the_plain_modules(make_federation):
    module = Dropping()
    module.norm.running_mean.fill_(0.5)
    module.norm.running_var.fill_(4.0)
    objective = Objective(module)
    federation = make_federation([5])
    data = whole(objective, federation.train)
    found = objective.outputs(objective.initial()[None], data)[0]
    with torch.no_grad():
        expected = module.double().eval()(federation.train.client(0)[0])[:, 0]
    assert torch.allclose(found, expected, **TOLERANCE)


class Dropout(nn.Module):
    def __init__(self, d=3):
        super().__init__()
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(d, 1)

    def forward(self, x):
        return self.out(self.drop(x))


def dropout_problem(federation, make_facts, seed=0, round=1):
    torch.manual_seed(99)
    objective = Objective(Dropout(), l2=0.0)
    data = whole(objective, federation.train)
    return LocalProblem(objective, data, facts=make_facts(seed=seed), round=round)


def test_dropout_draws_are_keyed_by_seed_round_step_and_client(make_clients, make_facts):
    one = make_clients([6])[0]
    twins = Federation([Client(name, one.train) for name in ("a", "b")], standardize=False)
    theta = torch.ones(2, 4, dtype=torch.float64)

    def gradient(step=0, **key):
        problem = dropout_problem(twins, make_facts, **key)
        for _ in range(step):
            problem.descend(theta, steps=1, lr=0.0)
        return problem.gradient(theta)

    base = gradient()
    assert torch.equal(gradient(), base)
    assert not torch.equal(base[0], base[1])
    for changed in (gradient(seed=1), gradient(round=2), gradient(step=1)):
        assert not torch.equal(changed[0], base[0])
        assert not torch.equal(changed[1], base[1])


def test_dropout_draws_do_not_depend_on_padding_or_on_the_others(make_clients, make_facts):
    clients = make_clients([6, 25, 9])
    theta = torch.ones(3, 4, dtype=torch.float64)
    federation = Federation(clients, standardize=False)
    together = dropout_problem(federation, make_facts).descend(theta, steps=3, lr=0.1)
    for k, each in enumerate(clients):
        alone = dropout_problem(Federation([each], standardize=False), make_facts)
        row = alone.descend(theta[k : k + 1], steps=3, lr=0.1)
        assert torch.allclose(row[0], together[k], **TOLERANCE)


def test_dropout_draws_are_on_in_training_and_leave_the_callers_generator(
    make_federation, make_facts
):
    federation = make_federation([400])
    problem = dropout_problem(federation, make_facts)
    theta = torch.ones(1, 4, dtype=torch.float64)
    state = torch.random.get_rng_state()
    trained = problem.objective.outputs(theta, problem.data, training=True, seeds=[5])
    assert torch.equal(torch.random.get_rng_state(), state)
    scored = problem.objective.outputs(theta, problem.data)
    # Inputs are kept, doubled, with probability one half: the means agree.
    assert not torch.allclose(trained, scored)
    assert trained.mean().item() == pytest.approx(scored.mean().item(), abs=0.3)


# How many clients are stacked


def test_clients_are_stacked_as_far_as_the_widest_layer_allows(make_federation):
    federation = make_federation([8] * 6)
    objective = Objective(mlp(3, hidden=50), federation.task)
    objective.check(*federation.train.client(0), records=8)
    # 50 numbers for each of 8 records, so 2,500 clients make a million.
    assert objective.most == 2500
    objective.layer_size = 1000
    assert [len(data.names) for data in objective.data(federation.train)] == [2, 2, 2]
    objective.rows_size = objective.width
    assert objective.most == 1


def test_data_laid_out_for_a_run_go_when_it_ends(make_federation):
    trainer = Trainer(FedAvg(), make_federation([8, 8]), nn.Linear(3, 1), rounds=1)
    (data,) = trainer.objective.data(trainer.federation.train)
    kept = weakref.ref(data)
    gc.collect()
    gc.disable()
    try:
        trainer.run()
        del data, trainer
        assert kept() is None
    finally:
        gc.enable()
