"""The conformance suite passes for every method there is, and catches those that break a rule."""

from typing import ClassVar

import pytest
import torch
from pydantic import Field

from fedtopo_torch import Algorithm
from fedtopo_torch.algorithms import FedAvg, PTopoFL, Scaffold
from fedtopo_torch.registry import algorithms
from fedtopo_torch.testing import CHECKS, check_algorithm


@pytest.mark.parametrize("name", sorted(set(algorithms)))
def test_every_method_conforms(name):
    check_algorithm(algorithms[name])


@pytest.mark.parametrize(
    "method", [PTopoFL(n_clusters="auto"), PTopoFL(n_clusters=3), Scaffold(eta_g=0.5)]
)
def test_methods_conform_with_other_options(method):
    check_algorithm(method)


class Undocumented(FedAvg):
    """An option without a meaning."""

    mu: float = 0.1


class Mixes(FedAvg):
    """Clients see each other's models."""

    def local_update(self, message, client, problem):
        theta = problem.descend(message["theta"])
        return {"theta": theta - theta.mean(0)}, client


class InPlace(FedAvg):
    """Writes into the message."""

    def local_update(self, message, client, problem):
        theta = message["theta"].contiguous()
        theta += 1
        return super().local_update({"theta": theta}, client, problem)

    def broadcast(self, server, clients):
        return {"theta": server["theta"].repeat(len(clients), 1)}


class ServerInPlace(FedAvg):
    """Writes into the server's state."""

    def aggregate(self, server, uplink, clients):
        server["theta"] += clients.mean(uplink["theta"])
        return server


class Undeclared(FedAvg):
    """Keeps a state that client_state did not create."""

    def local_update(self, message, client, problem):
        uplink, _ = super().local_update(message, client, problem)
        return uplink, {"memory": uplink["theta"]}


class Random(FedAvg):
    """Draws from torch's global generator."""

    def personal(self, message, client, problem):
        return message["theta"] + torch.randn_like(message["theta"])


class WholeCohort(FedAvg):
    """Takes for granted that everybody takes part."""

    def aggregate(self, server, uplink, clients):
        return {"theta": torch.stack([uplink["theta"][k] for k in range(4)]).mean(0)}


class Growing(FedAvg):
    """Sends more from round to round."""

    def local_update(self, message, client, problem):
        uplink, client = super().local_update(message, client, problem)
        return {**uplink, **({"extra": uplink["theta"]} if problem.round > 1 else {})}, client


class NotFinite(FedAvg):
    """Divides by zero."""

    def personal(self, message, client, problem):
        return message["theta"] / 0


class PlainNumbers(FedAvg):
    """Keeps a number that is no tensor."""

    def server_state(self, theta0, introductions, facts):
        return {"theta": theta0, "count": 1}


class Stateful(FedAvg):
    """Keeps a memory outside its dicts."""

    memory: list = Field([], description="what a method must not have")

    def personal(self, message, client, problem):
        self.memory.append(1)
        return message["theta"] * len(self.memory)


class Shrinks(FedAvg):
    """A server step on the whole row, buffers and all."""

    def aggregate(self, server, uplink, clients):
        return {"theta": 0.9 * clients.mean(uplink["theta"])}


class NoisyStart(FedAvg):
    """Draws around the start, running statistics too."""

    def server_state(self, theta0, introductions, facts):
        noise = torch.linspace(-1, 1, len(theta0), dtype=theta0.dtype)
        return {"theta": theta0 + 0.1 * noise}


class CutsBuffers(FedAvg):
    """Scores rows without their buffers."""

    def personal(self, message, client, problem):
        return message["theta"][:, : problem.parameters]


class ByHand(FedAvg):
    """Its own loop over the gradient of all records."""

    def local_update(self, message, client, problem):
        theta = message["theta"]
        for _ in range(problem.local_steps):
            theta = theta - problem.eta * problem.gradient(theta)
        return {"theta": theta}, client


class Padded(FedAvg):
    """Takes the zeros that fill up small clients for labels."""

    def local_update(self, message, client, problem):
        uplink, client = super().local_update(message, client, problem)
        return {"theta": uplink["theta"] + 0.01 * problem.labels.mean(1, keepdim=True)}, client


class NeedsTwo(FedAvg):
    """Divides by a spread that one client does not have."""

    def aggregate(self, server, uplink, clients):
        theta = uplink["theta"]
        return {"theta": clients.mean(theta) + 0 * theta.std(0)}


class Forgets(FedAvg):
    """A memory outside its dicts that every run starts anew."""

    memory: ClassVar[list] = []

    def server_state(self, theta0, introductions, facts):
        self.memory.clear()
        return super().server_state(theta0, introductions, facts)

    def aggregate(self, server, uplink, clients):
        theta = clients.mean(uplink["theta"])
        self.memory.append(theta)
        trained = torch.stack(self.memory).mean(0)
        return {"theta": torch.where(theta == 7.0, theta, trained)}


@pytest.mark.parametrize(
    ("method", "rule", "told"),
    [
        (Undocumented, "check_options", "'mu' has no description"),
        (NotFinite, "check_finite", "log-loss is nan"),
        (Random, "check_rerun", "different models"),
        (Stateful, "check_rerun", "different models"),
        (Mixes, "check_rows", "mixes rows"),
        (InPlace, "check_hooks", "local_update changes its argument 'theta' in place"),
        (ServerInPlace, "check_hooks", "aggregate changes its argument 'theta' in place"),
        (Growing, "check_hooks", "change from round to round"),
        (WholeCohort, "check_hooks", "IndexError"),
        (PlainNumbers, "check_hooks", "'count' is no tensor"),
        (Undeclared, "check_finite", "'memory', which client_state did not create"),
        (Padded, "check_rows", "mixes rows"),
        (CutsBuffers, "check_rows", "personal returns [1, 25]; needed are rows [1, 32], buffers"),
        (Shrinks, "check_buffers", "step only the first problem.parameters numbers"),
        (NoisyStart, "check_buffers", "step only the first problem.parameters numbers"),
        (ByHand, "check_batches", "take steps with problem.descend"),
        (NeedsTwo, "check_cohort", "with clients_per_round=1: "),
        (Forgets, "check_resume", "differs from a straight one"),
    ],
)
def test_a_broken_rule_is_named(method: type[Algorithm], rule: str, told: str):
    with pytest.raises(AssertionError) as caught:
        check_algorithm(method)
    assert str(caught.value).startswith(f"{method.__name__}, {rule}: ")
    assert told in str(caught.value)


def test_every_check_says_why_it_is_there():
    assert len(CHECKS) >= 14
    assert all(check.__doc__ for check in CHECKS)
