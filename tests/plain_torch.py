"""The methods once more on plain ``nn.Module`` objects, one client and one record batch at a time.

Nothing here is stacked or padded: every client has a module with real buffers, ``loss.backward()``
and an optimiser of torch.optim. Only the keyed generators are the package's own, because which
records and masks are drawn is part of the promise. A model is ``(row, counters)``, the row being
[trainable parameters | float buffers].
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F

from fedtopo_torch.randomness import generator, torch_seed

LOSSES = {
    "binary": lambda out, y: F.binary_cross_entropy_with_logits(out.reshape(-1), y),
    "multiclass": lambda out, y: F.cross_entropy(out, y),
    "regression": lambda out, y: ((out.reshape(-1) - y) ** 2).mean() / 2,
}


def _floats(net):
    kept = net.state_dict()
    return [b for name, b in net.named_buffers() if name in kept and b.is_floating_point()]


def _whole(net):
    kept = net.state_dict()
    found = [b for name, b in net.named_buffers() if name in kept]
    return [b for b in found if not b.is_floating_point() and b.dtype != torch.bool]


def _trainable(net):
    return [p for p in net.parameters() if p.requires_grad]


def flat(tensors):
    parts = [t.detach().reshape(-1) for t in tensors]
    return torch.cat(parts).clone() if parts else torch.zeros(0)


def read(net):
    """``(row, counters)`` of a module."""
    counters = flat(_whole(net)).long()
    return flat([*_trainable(net), *_floats(net)]), counters


def write(net, row, counters):
    with torch.no_grad():
        at = 0
        for target in [*_trainable(net), *_floats(net)]:
            target.copy_(row[at : at + target.numel()].reshape(target.shape))
            at += target.numel()
        at = 0
        for target in _whole(net):
            target.copy_(counters[at : at + target.numel()].reshape(target.shape))
            at += target.numel()


class Plain:
    """One run's clients; ``run(method, rounds)`` gives ``theta [K, p + b]`` and ``counters``."""

    def __init__(
        self,
        module,
        federation,
        *,
        eta,
        seed=0,
        local_steps=10,
        local_epochs=None,
        batch_size=None,
        l2=0.01,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr),
        factor=lambda round: 1.0,
        buffers="average",
        cohort=None,
        smallest=1,
        draws=False,
    ):
        self.module = copy.deepcopy(module).to(federation.dtype)
        self.federation, self.names = federation, federation.names
        self.n = federation.train.n.tolist()
        self.eta, self.seed, self.l2, self.optimizer = eta, seed, l2, optimizer
        self.local_steps, self.local_epochs, self.size = local_steps, local_epochs, batch_size
        self.factor, self.local_buffers, self.cohort = factor, buffers == "local", cohort
        self.smallest, self.draws = smallest, draws
        self.start, self.counters0 = read(self.module)
        self.p = sum(p.numel() for p in _trainable(self.module))
        self.loss = LOSSES[federation.task]

    # records

    def passes(self, k, round):
        """Batches of client k, pass after pass, without end."""
        n = self.n[k]
        rng = generator(self.seed, "batches", round, self.names[k])
        while True:
            if self.size is None or n <= self.size:
                yield np.arange(n)
                continue
            order = rng.permutation(n)
            for at in range(0, n, self.size):
                if len(order[at : at + self.size]) >= self.smallest:
                    yield order[at : at + self.size]

    def batch(self, k, round, step):
        stream = self.passes(k, round)
        for _ in range(step):
            next(stream)
        return next(stream)

    def steps(self, k):
        if self.local_epochs is None:
            return self.local_steps
        size = min(self.size or self.n[k], self.n[k])
        whole, rest = divmod(self.n[k], size)
        return self.local_epochs * (whole + (rest >= self.smallest and rest > 0))

    # one client

    def descend(
        self, k, model, round, *, correction=None, steps=None, lr=None, batch=None, first=0
    ):
        net = copy.deepcopy(self.module).train()
        write(net, *model)
        lr = self.eta * self.factor(round) if lr is None else lr
        optimizer = self.optimizer(_trainable(net), lr)
        features, labels = self.federation.train.client(k)
        with torch.random.fork_rng(devices=[]):
            for step in range(self.steps(k) if steps is None else steps):
                index = self.batch(k, round, step if batch is None else batch)
                if self.draws:
                    key = f"training draws of step {first + step}"
                    torch.manual_seed(torch_seed(self.seed, key, round, self.names[k]))
                optimizer.zero_grad()
                squares = sum(p.square().sum() for p in _trainable(net))
                loss = self.loss(net(features[index]), labels[index]) + self.l2 / 2 * squares
                pull = None if correction is None else correction(read(net)[0][: self.p])
                loss.backward()
                at = 0
                for p in _trainable(net):
                    if pull is not None:
                        p.grad += pull[at : at + p.numel()].reshape(p.shape)
                    at += p.numel()
                optimizer.step()
        return read(net)

    def train_loss(self, k, row):
        net = copy.deepcopy(self.module)
        write(net, row, self.counters0)
        net.eval()
        x, y = self.federation.train.client(k)
        with torch.no_grad():
            return float(self.loss(net(x), y) + self.l2 / 2 * row[: self.p].square().sum())

    # rounds

    def run(self, method, rounds):
        everyone = list(range(len(self.n)))
        self.own = [self.start[self.p :].clone() for _ in everyone]
        self.count = [self.counters0.clone() for _ in everyone]
        self.server_count, self.seen = self.counters0.clone(), set()
        for round in range(1, rounds + 1):
            cohort = everyone if self.cohort is None else self.cohort(round)
            self.seen |= set(cohort)
            if method.sends and not self.local_buffers:
                for k in cohort:
                    self.count[k] = self.server_count.clone()
            method.round(self, round, cohort)
            if method.sends:
                largest = torch.stack([self.count[k] for k in cohort]).max(0).values
                self.server_count = torch.maximum(self.server_count, largest)
        rows = []
        for k in everyone:
            never = k not in self.seen and hasattr(method, "received")
            rows.append(method.received(self, k) if never else method.scored(self, k))
        if method.sends and not self.local_buffers:
            self.count = [self.server_count for _ in everyone]
        return torch.stack(rows), torch.stack(self.count)

    def received(self, k, row):
        """A model as client k gets it: with its own buffers, if clients keep them."""
        return torch.cat([row[: self.p], self.own[k]]) if self.local_buffers else row

    def returned(self, k, row):
        """A model as it leaves client k."""
        if not self.local_buffers:
            return row
        self.own[k] = row[self.p :]
        return torch.cat([row[: self.p], self.start[self.p :]])

    def mean(self, cohort, rows):
        total = sum(self.n[k] for k in cohort)
        return sum(self.n[k] / total * row for k, row in zip(cohort, rows, strict=True))

    def moved(self, row, target, size):
        """Parameters go a part of the way, buffers become the target's."""
        p = self.p
        return torch.cat([row[:p] + size * (target[:p] - row[:p]), target[p:]])


class Local:
    sends = False

    def __init__(self, plain):
        self.rows = [plain.start.clone() for _ in plain.n]

    def round(self, plain, round, cohort):
        for k in cohort:
            model = self.rows[k], plain.count[k]
            self.rows[k], plain.count[k] = plain.descend(k, model, round)

    def scored(self, plain, k):
        return self.rows[k]


class FedAvg:
    sends = True

    def __init__(self, plain):
        self.theta = plain.start.clone()

    def correction(self, plain, k):
        return None

    def round(self, plain, round, cohort):
        rows = []
        for k in cohort:
            model = plain.received(k, self.theta), plain.count[k]
            row, plain.count[k] = plain.descend(
                k, model, round, correction=self.correction(plain, k)
            )
            rows.append(plain.returned(k, row))
        self.theta = plain.mean(cohort, rows)

    def scored(self, plain, k):
        return plain.received(k, self.theta)

    def received(self, plain, k):
        return plain.received(k, self.theta)


class FedProx(FedAvg):
    def correction(self, plain, k):
        start = self.theta[: plain.p]
        return lambda w: 0.1 * (w - start)


class Scaffold(FedAvg):
    def __init__(self, plain):
        super().__init__(plain)
        self.c = torch.zeros_like(self.theta[: plain.p])
        self.own = [self.c.clone() for _ in plain.n]

    def round(self, plain, round, cohort):
        p, rows, changes = plain.p, [], []
        for k in cohort:
            model = plain.received(k, self.theta), plain.count[k]
            pull = self.c - self.own[k]
            row, plain.count[k] = plain.descend(k, model, round, correction=lambda w, g=pull: g)
            walked = plain.steps(k) * plain.eta * plain.factor(round)
            new = self.own[k] - self.c + (self.theta[:p] - row[:p]) / walked
            changes.append(plain.n[k] / sum(plain.n) * (new - self.own[k]))
            self.own[k] = new
            rows.append(plain.returned(k, row))
        self.theta = plain.mean(cohort, rows)
        self.c = self.c + sum(changes)


class PFedMe(FedAvg):
    strength, inner, beta = 15.0, 5, 1.0

    def __init__(self, plain):
        super().__init__(plain)
        self.v = [plain.start.clone() for _ in plain.n]

    def round(self, plain, round, cohort):
        p, rows = plain.p, []
        eta = plain.eta * plain.factor(round)
        inner_lr, outer_lr = 1 / (1 / eta + self.strength), min(eta, 1 / self.strength)
        for k in cohort:
            w = plain.received(k, self.theta)
            for step in range(plain.steps(k)):
                anchor = w[:p]
                v, plain.count[k] = plain.descend(
                    k,
                    (w, plain.count[k]),
                    round,
                    correction=lambda u, a=anchor: self.strength * (u - a),
                    steps=self.inner,
                    lr=inner_lr,
                    batch=step,
                    first=step * self.inner,
                )
                w = plain.moved(w, v, outer_lr * self.strength)
            self.v[k] = v
            rows.append(plain.returned(k, w))
        self.theta = plain.moved(self.theta, plain.mean(cohort, rows), self.beta)

    def scored(self, plain, k):
        return self.v[k]


class Ditto(FedAvg):
    def __init__(self, plain):
        super().__init__(plain)
        self.v = [plain.start.clone() for _ in plain.n]

    def round(self, plain, round, cohort):
        theta, counts = self.theta[: plain.p], list(plain.count)
        super().round(plain, round, cohort)
        for k in cohort:
            self.v[k], _ = plain.descend(
                k, (self.v[k], counts[k]), round, correction=lambda w: 0.1 * (w - theta)
            )

    def scored(self, plain, k):
        return self.v[k]


class IFCA:
    sends = True

    def __init__(self, plain, spread=0.1):
        self.models = [plain.start.clone() for _ in range(2)]
        draws = generator(plain.seed, "ifca").standard_normal((2, plain.p))
        for model, draw in zip(self.models, draws, strict=True):
            model[: plain.p] += spread * torch.from_numpy(draw)

    def choose(self, plain, k):
        rows = [plain.received(k, model) for model in self.models]
        losses = [plain.train_loss(k, row) for row in rows]
        best = int(np.argmin(losses))
        return best, rows[best]

    def round(self, plain, round, cohort):
        taken = {0: [], 1: []}
        for k in cohort:
            j, row = self.choose(plain, k)
            row, plain.count[k] = plain.descend(k, (row, plain.count[k]), round)
            taken[j].append((k, plain.returned(k, row)))
        for j, pairs in taken.items():
            if pairs:
                self.models[j] = plain.mean([k for k, _ in pairs], [row for _, row in pairs])

    def scored(self, plain, k):
        return self.choose(plain, k)[1]


class Clustered:
    """Clustered training, given labels, what weights are proportional to, and alpha."""

    sends = True

    def __init__(self, plain, labels, weights, alpha):
        self.labels, self.weights, self.alpha = labels, weights, alpha
        self.u = [plain.start.clone() for _ in range(max(labels) + 1)]
        self.theta = [row.clone() for row in self.u]

    def round(self, plain, round, cohort):
        members = {}
        for k in cohort:
            j = self.labels[k]
            model = plain.received(k, self.theta[j]), plain.count[k]
            row, plain.count[k] = plain.descend(k, model, round)
            members.setdefault(j, []).append((self.weights[k], plain.returned(k, row)))
        for j, pairs in members.items():
            mass = sum(w for w, _ in pairs)
            self.u[j] = sum(w / mass * row for w, row in pairs)
        share = [0.0] * len(self.u)
        for k, j in enumerate(self.labels):
            share[j] += plain.n[k] / sum(plain.n)
        blend = sum(s * u for s, u in zip(share, self.u, strict=True))
        self.theta = [(1 - self.alpha) * u + self.alpha * blend for u in self.u]

    def scored(self, plain, k):
        return plain.received(k, self.theta[self.labels[k]])


METHODS = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "pfedme": PFedMe,
    "ifca": IFCA,
    "ditto": Ditto,
}


def twin(name, plain, result):
    """The plain method of a name; of clustered ones with the run's partition and weights."""
    if name in METHODS:
        return METHODS[name](plain)
    server = result.server
    return Clustered(
        plain, server["labels"].tolist(), server["weights"].tolist(), float(server["alpha"])
    )
