"""A torch module as a function of rows: outputs, loss and gradient of k clients' models at once.

A model is a vector ``theta``: the module's trainable parameters in its own order, then its float
buffers (the running statistics of BatchNorm), ``theta [p + b]``. The models of k clients are the
rows of ``Theta [k, p + b]``. Gradients, the L2 term and corrections concern the first p numbers
only; averages cover both. Whole-number buffers (counters) are kept apart, ``[k, c]``.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .federation import Bucket, Split, Task

__all__ = ["Data", "LinearObjective", "Objective", "State", "objective_for"]

RecordLoss = Callable[[Tensor, Tensor], Tensor]
#: The buffers of k clients by name, rows ``[k, ...]``.
State = dict[str, Tensor]


def binary_log_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """-log-likelihood in nats of labels 0/1 ``[...]`` under logits of the same shape."""
    # Above the default threshold of 20 softplus is the identity, off by 2e-9.
    return F.softplus(outputs, threshold=40).sub_(labels * outputs)


def multiclass_log_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """-log-likelihood in nats of labels ``[...]`` under logits ``[..., C]``."""
    loss = F.cross_entropy(
        outputs.reshape(-1, outputs.shape[-1]), labels.reshape(-1), reduction="none"
    )
    return loss.reshape(labels.shape)


def half_squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """(f - y)^2 / 2 of outputs and labels ``[...]``, whose gradient is the residual f - y."""
    return (outputs - labels).square() / 2


RECORD_LOSS: dict[str, RecordLoss] = {
    "binary": binary_log_loss,
    "multiclass": multiclass_log_loss,
    "regression": half_squared_error,
}


@dataclass(frozen=True)
class Data:
    """One split of k clients, laid out for an objective.

    Attributes:
        rows: positions of the clients in the federation ``[k]``.
        names: their names.
        features: ``[k, n_max, ...]`` (a column of ones added for linear models), 0 where padded.
        labels: ``[k, n_max]``.
        mask: ``[k, n_max]`` of 1 and 0, or None when nothing is padded.
        n: records per client ``[k]``.
        inverse_n: ``1/n`` ``[k]``.
    """

    rows: Tensor
    names: tuple[str, ...]
    features: Tensor
    labels: Tensor
    mask: Tensor | None
    n: Tensor
    inverse_n: Tensor

    def total(self, values: Tensor) -> Tensor:
        """Sum of per-record values ``[k, n_max]`` over each client's own records ``[k]``."""
        return (values if self.mask is None else values * self.mask).sum(1)


def _picked(data: Data, index: Tensor, count: Tensor) -> Data:
    """Some records of each client: ``index [k, b]``, of which the first ``count [k]`` are meant."""
    # A batch that is short for everybody has no padding.
    index = index[:, : int(count.max())]
    at = torch.arange(index.shape[0], device=index.device)[:, None]
    mask = None
    if int(count.min()) < index.shape[1]:
        mask = torch.arange(index.shape[1], device=index.device) < count[:, None]
        mask = mask.to(data.inverse_n.dtype)
    return Data(
        data.rows,
        data.names,
        data.features[at, index],
        data.labels.gather(1, index),
        mask,
        count,
        count.to(data.inverse_n.dtype).reciprocal(),
    )


@dataclass(frozen=True)
class LinearData(Data):
    """Data for a linear model; ``features`` has a column of ones where the model has a bias.

    Attributes:
        transposed: the features as ``[k, d + 1, n_max]``, a view.
        scale: ``1/n`` as ``[k, 1, 1]``.
        label_pull: the part of the gradient that does not depend on theta, ``-Y' X / n``
            ``[k, C, d + 1]``.
    """

    transposed: Tensor
    scale: Tensor
    label_pull: Tensor


class Objective:
    """Mean record loss + (l2/2)|parameters|^2 of any torch module, by autograd.

    The forward pass of k clients is one ``vmap(functional_call)``; the backward pass is plain
    autograd through it. A module that can't run so, or that draws random numbers while training
    (dropout), goes client by client instead, each under a generator keyed by seed, round, step and
    client name. :meth:`check` finds out; both ways give the same numbers.

    Args:
        module: one record batch ``[n, ...]`` in, ``[n]``, ``[n, 1]`` or ``[n, C]`` out. It is
            copied; parameters with ``requires_grad=False`` stay as they are, outside theta.
        record_loss: ``(outputs [k, n, ...], labels [k, n]) -> [k, n]``, or a task's name.
        l2: lambda >= 0.
        outputs: numbers per record the module must put out (1 for a binary task).
        dtype: of parameters and features.
        device: where data are laid out and the module runs.

    Attributes:
        p: trainable parameters; width: p + b, the length of a row.
        draws: the module draws random numbers while training.
        batched: all clients are trained at once; ``reason`` says why not.
        mixes: in training, what it puts out for a record depends on the others in the batch
            (BatchNorm). Such clients are never padded.
        smallest: the fewest records it can be trained on.

    Raises:
        ValueError: no trainable parameter, or one that is not floating point.
    """

    #: Feature values per bucket of clients. A step has a fixed cost of some 0.3 ms here, shared by
    #: all clients of a bucket, so buckets are large.
    bucket_size: ClassVar[int] = 1_500_000
    #: Numbers of all rows of a bucket, at most: several copies of them are held at a time.
    rows_size: ClassVar[int] = 4_000_000
    #: Numbers that the widest layer puts out for a bucket in one step: what leaves the processor's
    #: cache is fetched again by every operation (networks on 8 x 8 images: 15 % of a step).
    layer_size: ClassVar[int] = 1_000_000

    def __init__(
        self,
        module: nn.Module,
        record_loss: Task | RecordLoss = "binary",
        l2: float = 0.01,
        *,
        outputs: int = 1,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, parameter in module.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ValueError(
                    f"parameter '{name}' of {type(module).__name__} has no shape yet: run the lazy "
                    f"module on one batch first."
                )
            if not parameter.is_floating_point():
                raise ValueError(
                    f"parameter '{name}' of {type(module).__name__} is {parameter.dtype}: "
                    f"only floating point parameters can be trained."
                )
        self.name = type(module).__name__
        self.record_loss: RecordLoss = (
            RECORD_LOSS[record_loss] if isinstance(record_loss, str) else record_loss
        )
        self.l2 = float(l2)
        self.n_outputs = outputs
        self.device = torch.device(device)
        try:
            copied = copy.deepcopy(module)
        except RuntimeError as error:
            raise ValueError(
                f"{type(module).__name__} can't be copied ({_first_line(error)}); of "
                f"torch.nn.utils.weight_norm use the one in torch.nn.utils.parametrizations."
            ) from error
        self._train = copied.to(self.device, dtype).train()
        self._eval = copy.deepcopy(self._train).eval()
        self._prepared: dict[int, tuple[Bucket, Data]] = {}
        trainable = [(n, p) for n, p in self._train.named_parameters() if p.requires_grad]
        if not trainable:
            raise ValueError(f"{type(module).__name__} has no trainable parameter.")
        self.parameter_names = tuple(n for n, _ in trainable)
        self._shapes = tuple(p.shape for _, p in trainable)
        self._sizes = [p.numel() for _, p in trainable]
        self.p = sum(self._sizes)
        self._aliases = _aliases(self._train)
        kept = self._train.state_dict()
        buffers = {name: b for name, b in self._train.named_buffers() if name in kept}
        self._floats = {n: b.shape for n, b in buffers.items() if b.is_floating_point()}
        self._whole = {n: b.shape for n, b in buffers.items() if b.dtype in _WHOLE}
        self.width = self.p + sum(shape.numel() for shape in self._floats.values())
        self.dtype = dtype
        self.draws = any(isinstance(m, _DRAWING) for m in self._train.modules())
        self.batched = not self.draws
        self.reason = "it draws random numbers while training" if self.draws else ""
        self._scored_together = True
        self.mixes = False
        self.smallest = 1
        self._widest = self._records = 1

    # ---- theta <-> module -------------------------------------------------------------------

    def initial(self) -> Tensor:
        """theta_0 ``[p + b]``: the module's own initialisation, on the CPU."""
        named = dict(self._train.named_parameters()) | dict(self._train.named_buffers())
        names = (*self.parameter_names, *self._floats)
        return torch.cat([named[n].detach().reshape(-1) for n in names]).cpu().clone()

    def counters(self) -> Tensor:
        """The module's own whole-number buffers ``[c]``, on the CPU."""
        named = dict(self._train.named_buffers())
        parts = [named[n].reshape(-1).to(torch.int64) for n in self._whole]
        return torch.cat(parts).cpu() if parts else torch.zeros(0, dtype=torch.int64)

    def digest(self) -> str:
        """Hash of where training starts, frozen parameters and constant buffers included."""
        digest = hashlib.sha256(self.initial().numpy().tobytes())
        for name, value in (*self._train.named_parameters(), *self._train.named_buffers()):
            if name not in self.parameter_names and name not in self._floats:
                digest.update(name.encode())
                digest.update(value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def parameters(self, theta: Tensor) -> dict[str, Tensor]:
        """The trainable part of rows ``[..., p]`` or ``[..., p + b]``, named ``[..., *shape]``."""
        lead = theta.shape[:-1]
        if theta.shape[-1] != self.p:
            theta = theta[..., : self.p]
        parts = theta.split(self._sizes, dim=-1)
        return {
            name: part.reshape((*lead, *shape))
            for name, part, shape in zip(self.parameter_names, parts, self._shapes, strict=True)
        }

    def state(self, theta: Tensor, counters: Tensor | None = None) -> State:
        """The buffers in rows ``[k, p + b]`` and counters ``[k, c]``, by name; copies."""
        state, k = {}, len(theta)
        at = self.p
        for name, shape in self._floats.items():
            part = theta[:, at : at + shape.numel()]
            # Contiguous of its own: under vmap a module writes into it through a view.
            state[name] = part.reshape(k, *shape).clone(memory_format=torch.contiguous_format)
            at += shape.numel()
        if self._whole:
            own = self.counters().expand(k, -1) if counters is None else counters
            parts = own.to(theta.device).split([s.numel() for s in self._whole.values()], dim=1)
            for (name, shape), part in zip(self._whole.items(), parts, strict=True):
                state[name] = part.reshape(k, *shape).clone(memory_format=torch.contiguous_format)
        return state

    @property
    def counts(self) -> bool:
        """Whether the module has whole-number buffers."""
        return bool(self._whole)

    def counted(self, state: State) -> Tensor:
        """The counters ``[k, c]`` in a state."""
        return torch.cat([state[n].reshape(len(state[n]), -1) for n in self._whole], dim=1)

    def state_dict(self, theta: Tensor, counters: Tensor | None = None) -> dict[str, Tensor]:
        """The module's full state_dict of theta ``[p + b]`` and counters ``[c]``; copies."""
        state = {name: v.detach().cpu().clone() for name, v in self._eval.state_dict().items()}
        parameters = self.parameters(theta.cpu())
        own = None if counters is None else counters[None].cpu()
        buffers = self.state(theta[None].cpu(), own)
        # What is tied or used twice has several names in a state_dict, and one in theta.
        for of in (self._eval.named_parameters, self._eval.named_buffers):
            first = {id(value): name for name, value in of()}
            for name, value in of(remove_duplicate=False):
                known = first[id(value)]
                if known in parameters:
                    state[name] = parameters[known].detach().clone()
                elif known in buffers:
                    state[name] = buffers[known][0].to(value.dtype, copy=True)
        return state

    def activations(self, layer: str, features: Tensor) -> Tensor:
        """What a named layer of the initial model puts out for records, flattened ``[n, q]``.

        Args:
            layer: a name of the module's ``named_modules()``.
            features: ``[n, ...]``, as the model sees them.

        Raises:
            ValueError: there is no such layer, it is not reached, or it puts out no tensor.
        """
        layers = dict(self._eval.named_modules())
        if layer not in layers or not layer:
            known = ", ".join(name for name in layers if name) or "none"
            raise ValueError(f"{self.name} has no layer '{layer}'. Its layers: {known}.")
        found: list[Any] = []
        handle = layers[layer].register_forward_hook(lambda *call: found.append(call[-1]))
        try:
            with torch.no_grad():
                self._eval(features.to(self.device))
        finally:
            handle.remove()
        if not found or not isinstance(found[-1], Tensor) or len(found[-1]) != len(features):
            raise ValueError(f"layer '{layer}' of {self.name} puts out no row for each record.")
        return found[-1].reshape(len(features), -1).cpu()

    # ---- trying it out ----------------------------------------------------------------------

    def check(self, features: Tensor, labels: Tensor, records: int = 1) -> None:
        """Try the module on a few records: sets draws, batched, mixes, smallest and most.

        Args:
            features, labels: of one client, ``[n, ...]`` and ``[n]``.
            records: that a client has in one step, about.

        Raises:
            ValueError: the module fails on them, changes its input or a buffer that is not in its
                state_dict, keeps a state elsewhere, puts out something else than the task needs,
                draws while it is scored, or lets a record's prediction depend on other records.
        """
        # A second record that differs from the first, where the client has one.
        other = (features != features[:1]).flatten(1).any(1).nonzero()[:1, 0]
        second = features[other] if len(other) else features[:1] * 1.25 + 0.25
        pair = torch.cat([features[:1], second]).to(self.device)
        twice = pair[:1].expand_as(pair).clone()
        before = pair.clone()
        theta = self.initial().to(self.device)[None]
        # A layer that starts at zero would hide what comes before it.
        waves = torch.linspace(1, 2, self.p, dtype=self.dtype, device=self.device)
        theta[:, : self.p] += (theta[:, : self.p] == 0) * waves / 10

        def trial(x: Tensor, *, training: bool, together: bool = False) -> tuple[Tensor, State]:
            rows, module = theta.expand(2, -1), self._train if training else self._eval
            seeds = () if together else (0, 0)
            return self._run(
                module, rows, self.state(rows), torch.stack([x] * 2), [len(x)] * 2, seeds, together
            )

        with torch.no_grad():
            had = self._outside()
            try:
                with _watched(self._eval) as widths:
                    scored, still = trial(pair, training=False)
                trained, after = trial(pair, training=True)
                self.record_loss(scored, labels[:1].to(self.device).expand(2, 2))
                again, _ = trial(pair, training=True)
                same, after_same = trial(twice, training=True)
                drawn = [self._draws(m, theta, pair) for m in (self._train, self._eval)]
            except ValueError:
                raise
            except Exception as error:
                raise ValueError(
                    f"{self.name} fails on this federation's records of shape "
                    f"{list(features.shape[1:])}: {_first_line(error)}"
                ) from error
            if not bool((pair == before).all()):
                raise ValueError(
                    f"{self.name} changes its input in place, which would change the federation's "
                    f"data: use inplace=False."
                )
            now = self._outside()
            changed = [n for (n, b), (_, h) in zip(now, had, strict=True) if not b.equal(h)]
            if changed:
                raise ValueError(
                    f"{self.name} changes its buffer '{changed[0]}', which is not in its "
                    f"state_dict, or no number: clients could not be told apart. Register it as a "
                    f"persistent buffer of floats or integers."
                )
            moved = [n for n, v in self.state(theta).items() if _differ(v[:1], still[n][:1])]
            if moved:
                raise ValueError(
                    f"{self.name} changes its buffer '{moved[0]}' while it is scored: what is "
                    f"evaluated would change what is trained."
                )
            if drawn[1]:
                raise ValueError(
                    f"{self.name} draws random numbers while it is scored: draw only where "
                    f"self.training is true."
                )
            if _differ(again, trained):
                raise ValueError(
                    f"{self.name} puts out something else when it is called again with the same "
                    f"weights, buffers and draws of torch: keep its state in buffers, and draw "
                    f"from torch's own generator."
                )
            self._check_apart(lambda: trial(pair[:1], training=False)[0], scored)
            self.draws = self.draws or drawn[0]
            self.mixes = _differ(trained[:, :1], same[:, :1]) or _moved(after, after_same)
            try:
                _, after_one = trial(pair[:1], training=True)
                # What counts records must not count padding.
                self.mixes = self.mixes or _moved(after, after_one)
            except Exception:
                self.smallest = 2
        self._widest, self._records = max(widths), records
        why = _why_apart(lambda: trial(pair, training=False, together=True)[0], scored)
        self._scored_together = not why
        if self.draws:
            # Dropout's draws would not be keyed by client.
            why = "it draws random numbers while training"
        elif not why:
            why = _why_apart(lambda: trial(pair, training=True, together=True)[0], trained)
        self.reason, self.batched = why, not why
        self._narrow()

    def _outside(self) -> list[tuple[str, Tensor]]:
        """Buffers that are not in rows or counters, of both modes; copies."""
        return [
            (name, buffer.clone())
            for module in (self._train, self._eval)
            for name, buffer in module.named_buffers()
            if name not in self._floats and name not in self._whole
        ]

    def _draws(self, module: nn.Module, theta: Tensor, x: Tensor) -> bool:
        """Whether a forward pass takes numbers from torch's generator."""
        with _drawing(0, self.device):
            had = _generator_state(self.device)
            self._run(module, theta, self.state(theta), x[None], [len(x)], (), False)
            return not torch.equal(_generator_state(self.device), had)

    def _check_apart(self, alone: Callable[[], Tensor], scored: Tensor) -> None:
        """Refuse a module whose prediction for a record depends on the others."""
        try:
            mixes, how = _differ(scored[:, :1], alone()), "depends on the others in the batch"
        except Exception as error:
            mixes, how = True, f"needs others in the batch ({_first_line(error)})"
        if mixes:
            raise ValueError(
                f"{self.name} mixes records: what it predicts for one {how}, so predictions would "
                f"depend on who is scored together."
            )

    def _narrow(self) -> None:
        """Use the faster form of narrow layers where many clients run at once."""
        for module, together in (
            (self._train, self.batched),
            (self._eval, self._scored_together),
        ):
            for layer in module.modules() if together else ():
                if type(layer) is nn.Linear and layer.out_features <= NARROW:
                    layer.__class__ = _NarrowLinear

    # ---- data -------------------------------------------------------------------------------

    @property
    def most(self) -> int:
        """Clients per bucket, at most."""
        layers = self._widest * self._records
        return max(1, min(self.rows_size // self.width, self.layer_size // layers))

    def data(
        self, split: Split, kinds: tuple[int, ...] | None = None, most: int | None = None
    ) -> list[Data]:
        """A split laid out for this objective, once however often it is asked for.

        Args:
            split: of the federation.
            kinds: one number per client; only clients of one kind are stacked together.
            most: clients stacked together, at most.
        """
        found = []
        for bucket in split.buckets(self.bucket_size, kinds, min(most or self.most, self.most)):
            # Keeping the bucket keeps its id from being given to another one.
            if id(bucket) not in self._prepared:
                self._prepared[id(bucket)] = bucket, self.prepare(bucket)
            found.append(self._prepared[id(bucket)][1])
        return found

    def some(
        self,
        split: Split,
        rows: Sequence[int],
        kinds: tuple[int, ...] | None = None,
        most: int | None = None,
    ) -> list[Data]:
        """Some clients of a split, stacked for this once; at a cost of these clients alone."""
        most = min(most or self.most, self.most)
        return [self.prepare(b) for b in split.gather(rows, self.bucket_size, kinds, most)]

    def prepare(self, bucket: Bucket) -> Data:
        """Lay one bucket out for this objective.

        Padding is filled with the client's own first record: a module may have no finite value
        or gradient at an all-zero record, and 0 times NaN is NaN.
        """
        features = bucket.features
        if bucket.mask is not None:
            padding = (bucket.mask == 0).reshape(*bucket.mask.shape, *[1] * (features.ndim - 2))
            features = torch.where(padding, features[:, :1], features)
        return self._data(bucket, features)

    def _data(self, bucket: Bucket, features: Tensor) -> Data:
        place = self.device
        mask = None if bucket.mask is None else bucket.mask.to(place)
        n = bucket.n.to(place)
        return Data(
            bucket.rows,
            bucket.names,
            features.to(place),
            bucket.labels.to(place),
            mask,
            n,
            n.to(self.dtype).reciprocal(),
        )

    def batch(self, data: Data, index: Tensor, count: Tensor) -> Data:
        """Some of every client's records, laid out for one step.

        Args:
            data: k clients.
            index: positions of records ``[k, b]``.
            count: how many of these are meant ``[k]``, at least 1; the others are padding.
        """
        return _picked(data, index, count)

    # ---- values -----------------------------------------------------------------------------

    def outputs(
        self, theta: Tensor, data: Data, *, training: bool = False, seeds: Sequence[int] = ()
    ) -> Tensor:
        """Module outputs ``[k, n]`` (one number per record) or ``[k, n, C]``.

        Args:
            theta: ``[k, p + b]``.
            data: k clients.
            training: train mode; evaluation never draws and never moves a buffer.
            seeds: one per client, for modules that draw.
        """
        module = self._train if training else self._eval
        seeds = seeds if training else ()
        return self._run(module, theta, self.state(theta), data.features, data.n, seeds)[0]

    def _run(
        self,
        module: nn.Module,
        parameters: Tensor,
        state: State,
        features: Tensor,
        n: Tensor | list[int],
        seeds: Sequence[int],
        together: bool | None = None,
    ) -> tuple[Tensor, State]:
        """Outputs of k clients and the buffers afterwards."""
        named, names = self.parameters(parameters), tuple(state)
        if together is None:
            together = self.batched if module is self._train else self._scored_together
        if together:

            def one(tensors: State, x: Tensor) -> tuple[Tensor, State]:
                tensors = dict(tensors)
                result = self._forward(module, tensors, x)
                # A module may write into a buffer or replace it: either is found in the dict.
                return result, {name: tensors[name] for name in names}

            result, state = vmap(one)({**named, **state}, features)
            return self._shaped(result, features.shape[1]), state
        rows = []
        moved: dict[str, list[Tensor]] = {name: [] for name in names}
        for i, count in enumerate(n.tolist() if isinstance(n, Tensor) else n):
            tensors = {name: value[i] for name, value in named.items()}
            tensors |= {name: value[i].clone() for name, value in state.items()}
            # Own records only: neither draws nor statistics may depend on padding.
            x = features[i, :count]
            with _drawing(seeds[i] if seeds else None, self.device):
                result = self._shaped(self._forward(module, tensors, x)[None], count)[0]
            padding = features.shape[1] - count
            rows.append(F.pad(result, (0, 0) * (result.ndim - 1) + (0, padding)))
            for name in names:
                moved[name].append(tensors[name])
        return torch.stack(rows), {name: torch.stack(values) for name, values in moved.items()}

    def _forward(self, module: nn.Module, tensors: State, x: Tensor) -> Tensor:
        """Outputs of one client's module; ``tensors`` then hold its buffers as they are after."""
        for alias, name in self._aliases.items():
            if name in tensors:
                tensors[alias] = tensors[name]
        # torch's own tie_weights leaves the given tensors behind in a layer that is used twice.
        result = functional_call(module, tensors, (x,), tie_weights=False)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            kind = result.dtype if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"{self.name} returns {kind}: a floating point tensor is needed.")
        return result

    def _shaped(self, result: Tensor, n: int) -> Tensor:
        """Outputs ``[k, n]`` or ``[k, n, C]`` of n records, whichever the task needs."""
        shape = tuple(result.shape[1:])
        if self.n_outputs == 1 and shape == (n, 1):
            return result.squeeze(-1)
        if shape == ((n,) if self.n_outputs == 1 else (n, self.n_outputs)):
            return result
        raise ValueError(
            f"the module's outputs have shape {list(shape)} for {n} records; expected "
            f"[n{f', {self.n_outputs}' if self.n_outputs > 1 else ''}]."
        )

    def loss(self, theta: Tensor, data: Data) -> Tensor:
        """F_k(theta_k) ``[k]`` in evaluation mode: mean record loss + (l2/2)|parameters|^2."""
        losses = self.record_loss(self.outputs(theta, data), data.labels)
        penalty = theta[:, : self.p].square().sum(1)
        return data.total(losses) * data.inverse_n + 0.5 * self.l2 * penalty

    def gradient(self, theta: Tensor, data: Data, seeds: Sequence[int] = ()) -> Tensor:
        """grad F_k(theta_k) ``[k, p + b]`` in training mode; 0 for buffers."""
        state = self.state(theta)
        slope, _ = self.slope(self.weights(theta), data, seeds, state)
        still = {name: torch.zeros_like(value) for name, value in state.items()}
        return self.rows(slope, still)

    # Steps are taken on weights, the parameters in the layout that suits the gradient best.

    def weights(self, theta: Tensor) -> Tensor:
        """The parameters in rows ``[k, p + b]``, in the layout of steps; here ``[k, p]``."""
        return theta if self.width == self.p else theta[:, : self.p]

    def rows(self, weights: Tensor, state: State | None = None) -> Tensor:
        """The inverse of :meth:`weights` and :meth:`state`: rows ``[k, p + b]``."""
        if self.width == self.p:
            return weights
        assert state is not None
        parts = [state[name].reshape(len(weights), -1) for name in self._floats]
        return torch.cat([weights, *parts], dim=1)

    def slope(
        self, weights: Tensor, data: Data, seeds: Sequence[int] = (), state: State | None = None
    ) -> tuple[Tensor, State]:
        """The gradient in training mode, in the layout of steps (a new tensor), and the buffers
        after that pass."""
        variable = weights.detach().requires_grad_()
        with torch.enable_grad():
            outputs, state = self._run(
                self._train, variable, state or {}, data.features, data.n, seeds
            )
            losses = self.record_loss(outputs, data.labels)
            total = torch.dot(data.total(losses), data.inverse_n)
            (gradient,) = torch.autograd.grad(total, variable)
        after = {name: value.detach() for name, value in state.items()}
        return gradient.add_(weights.detach(), alpha=self.l2), after

    def smoothness(self, data: Data) -> Tensor | None:
        """L_k ``[k]`` such that F_k is L_k-smooth, or None where it is not known."""
        return None


@contextlib.contextmanager
def _watched(module: nn.Module) -> Iterator[list[int]]:
    """Numbers per record that each layer puts out, once the module has been run."""
    widths: list[int] = [1]

    def note(layer: nn.Module, given: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.ndim:
            widths.append(out.numel() // max(1, len(out)))

    handles = [layer.register_forward_hook(note) for layer in module.modules()]
    try:
        yield widths
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _drawing(seed: int | None, device: torch.device) -> Iterator[None]:
    """Torch's own generators at a seed, and as they were afterwards."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield


def _aliases(module: nn.Module) -> dict[str, str]:
    """Other names of parameters and buffers that several layers share, and their first names."""
    first: dict[int, str] = {}
    aliases = {}
    # Every layer once, unlike named_parameters(remove_duplicate=False).
    for prefix, layer in module.named_modules():
        for name, value in (*layer._parameters.items(), *layer._buffers.items()):
            if value is not None:
                full = f"{prefix}.{name}" if prefix else name
                known = first.setdefault(id(value), full)
                if known != full:
                    aliases[full] = known
    return aliases


def _generator_state(device: torch.device) -> Tensor:
    """The state of the generator that layers on a device draw from."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else torch.get_rng_state()


def _moved(one: State, other: State) -> bool:
    """Whether two trials leave different buffers behind."""
    return any(_differ(value, other[name]) for name, value in one.items())


def _why_apart(together: Callable[[], Tensor], apart: Tensor) -> str:
    """Why a module can't run for many clients at once; empty if it can."""
    try:
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if _differ(together(), apart):
                return "torch.func.vmap gives other results than one client at a time"
        if any("performance drop" in str(item.message) for item in caught):
            return "torch.func.vmap has no fast way to run it"
    except Exception as error:
        return f"torch.func.vmap can't run it ({_first_line(error)})"
    return ""


def _differ(found: Tensor, expected: Tensor) -> bool:
    """Whether two trials differ by more than rounding."""
    if not found.is_floating_point():
        return not torch.equal(found, expected)
    gap = (found - expected).abs().max() if found.numel() else torch.zeros(())
    return bool(gap > 1e-4 * expected.abs().max() + 1e-6) if found.numel() else False


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


# Modules that draw random numbers in their forward pass while training.
_DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU)
# Buffers of these types are counters.
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)

# Output features up to which a batched linear layer is faster with the weights on the left.
NARROW = 4


# Features that fit a core's own cache are multiplied faster when stored as [k, d + 1, n].
TRANSPOSED_BELOW = 60_000


class _NarrowLinear(nn.Linear):
    """``nn.Linear`` as ``(W x')'``: of a batch of clients, ``x W'`` takes bmm's slow path."""

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim < 2:
            return super().forward(input)
        result = (self.weight @ input.mT).mT
        return result if self.bias is None else result + self.bias


class LinearModule(Objective):
    """``nn.Linear`` by autograd: logistic and softmax regression from theta = 0, with known L_k."""

    def __init__(
        self, module: nn.Linear, record_loss: Task = "binary", l2: float = 0.01, **kwargs: Any
    ) -> None:
        super().__init__(module, record_loss, l2, **kwargs)
        self.task = record_loss
        self.has_bias = module.bias is not None

    def initial(self) -> Tensor:
        """theta_0 = 0: the problem is convex, so nothing is gained by drawing a start."""
        return torch.zeros(self.p, dtype=self.dtype)

    def check(self, features: Tensor, labels: Tensor, records: int = 1) -> None:
        """Nothing to try: what a linear layer does is known."""
        self._narrow()

    def design(self, data: Data) -> Tensor:
        """X ``[k, n_max, d + 1]``: a column of ones where the model has a bias, 0 if padded."""
        features, mask = data.features, data.mask
        if self.has_bias:
            features = torch.cat([features, features.new_ones((*features.shape[:2], 1))], dim=-1)
        # A padded record is all zeros, its one included, so that it adds nothing to X' r.
        return features if mask is None else features * mask.unsqueeze(-1)

    def smoothness(self, data: Data) -> Tensor:
        """L_k: lambda_max(X'X/n) times 1/4 (binary), 1/2 (softmax) or 1 (regression), plus l2."""
        x = self.design(data)
        gram = torch.bmm(x.mT, x) * data.inverse_n[:, None, None]
        largest = torch.linalg.eigvalsh(gram)[:, -1]
        return largest / {"binary": 4, "multiclass": 2, "regression": 1}[self.task] + self.l2


class LinearObjective(LinearModule):
    """The same objective in closed form.

    With a column of ones in X and residuals r = sigmoid(X w) - y (softmax(X W') - onehot(y), or
    X w - y in a regression), grad F = X' r / n + l2 w. Gradients agree with autograd to 1e-12.
    """

    #: Feature values per bucket: larger ones leave the processor's cache between local steps,
    #: smaller ones pay more often for starting an operation.
    bucket_size: ClassVar[int] = 400_000

    def prepare(self, bucket: Bucket) -> Data:
        design = super().design(self._data(bucket, bucket.features))
        if design.numel() <= TRANSPOSED_BELOW:
            design = design.mT.contiguous().mT
        return self._linear(self._data(bucket, design))

    def batch(self, data: Data, index: Tensor, count: Tensor) -> LinearData:
        picked = _picked(data, index, count)
        if picked.mask is not None:
            picked = replace(picked, features=picked.features * picked.mask.unsqueeze(-1))
        return self._linear(picked)

    def _linear(self, data: Data) -> LinearData:
        if self.n_outputs == 1:
            targets = data.labels.unsqueeze(1)
        else:
            targets = F.one_hot(data.labels, self.n_outputs).to(self.dtype).mT.contiguous()
        scale = data.inverse_n[:, None, None]
        return LinearData(
            **vars(data),
            transposed=data.features.mT,
            scale=scale,
            label_pull=torch.bmm(targets, data.features).mul_(-scale),
        )

    def design(self, data: Data) -> Tensor:
        return data.features

    def weights(self, theta: Tensor) -> Tensor:
        """``[k, C, d + 1]``, the bias as last column. theta holds all weights, then all biases."""
        if self.n_outputs == 1:
            return theta.unsqueeze(1)
        if not self.has_bias:
            return theta.reshape(len(theta), self.n_outputs, -1)
        weight, bias = theta[:, : -self.n_outputs], theta[:, -self.n_outputs :]
        return torch.cat(
            [weight.reshape(len(theta), self.n_outputs, -1), bias.unsqueeze(-1)], dim=-1
        )

    def rows(self, weights: Tensor, state: State | None = None) -> Tensor:
        if self.n_outputs == 1:
            return weights.squeeze(1)
        if not self.has_bias:
            return weights.flatten(1)
        return torch.cat([weights[..., :-1].flatten(1), weights[..., -1]], dim=1)

    def outputs(
        self, theta: Tensor, data: Data, *, training: bool = False, seeds: Sequence[int] = ()
    ) -> Tensor:
        assert isinstance(data, LinearData)
        # Weights on the left: this orientation of bmm is 5 to 9 times faster than X @ w.
        logits = torch.bmm(self.weights(theta), data.transposed)
        return logits.squeeze(1) if self.n_outputs == 1 else logits.mT

    def slope(
        self, weights: Tensor, data: Data, seeds: Sequence[int] = (), state: State | None = None
    ) -> tuple[Tensor, State]:
        assert isinstance(data, LinearData)
        expected = torch.bmm(weights, data.transposed)
        if self.task == "binary":
            expected = expected.sigmoid_()
        elif self.task == "multiclass":
            expected = expected.softmax(1)
        slope = torch.add(data.label_pull, weights, alpha=self.l2)
        return slope.addcmul_(torch.bmm(expected, data.features), data.scale), {}


def objective_for(
    module: nn.Module,
    task: Task,
    l2: float,
    *,
    inputs: int | None = None,
    outputs: int = 1,
    dtype: torch.dtype = torch.float64,
    closed_form: bool = True,
    device: torch.device | str = "cpu",
) -> Objective:
    """The fastest exact objective for a module: closed form for a plain ``nn.Linear``."""
    if type(module) is nn.Linear and not _customised(module):
        if inputs is not None and module.in_features != inputs:
            raise ValueError(
                f"the model takes {module.in_features} features; this federation's records have "
                f"{inputs}."
            )
        if module.out_features != outputs:
            raise ValueError(
                f"the model puts out {module.out_features} numbers per record; "
                f"a {task} task here needs {outputs}."
            )
        linear = LinearObjective if closed_form else LinearModule
        return linear(module, task, l2, outputs=outputs, dtype=dtype, device=device)
    return Objective(module, task, l2, outputs=outputs, dtype=dtype, device=device)


def _customised(module: nn.Module) -> bool:
    """Hooks, parametrisations or frozen parameters change what a layer computes or trains."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or list(module.children())
        or not all(p.requires_grad for p in module.parameters())
    )
