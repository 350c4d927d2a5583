"""How clients are trained: one declaration, shared by the trainer, ``compare`` and the CLI."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from .options import Options

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["Training"]

#: Points of a training curve, about; evaluating every round would cost as much as small rounds do.
CURVE_POINTS = 50

# Options that mean something only under certain values of another one.
_ONLY: dict[str, tuple[str, tuple[str, ...]]] = {
    "momentum": ("optimizer", ("sgd",)),
    "weight_decay": ("optimizer", ("adamw",)),
    "decay": ("schedule", ("step",)),
    "decay_every": ("schedule", ("step",)),
}


class Training(Options):
    """How every method is trained; the defaults are the paper's: full-batch gradient descent.

    Raises:
        OptionError: an unknown setting, one out of range, or two that exclude each other.
    """

    rounds: int = Field(150, ge=1, description="communication rounds T")
    local_steps: int = Field(10, ge=1, description="gradient steps tau per client and round")
    local_epochs: int | None = Field(
        None,
        ge=1,
        description="instead of local_steps: passes over a client's records per round, so that "
        "large clients take more steps",
    )
    batch_size: int | None = Field(
        None,
        ge=1,
        description="records per step, drawn without replacement until all were used; all of a "
        "client's records by default, and where it has fewer",
    )
    eta: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto", description="step size; 'auto' is 1 / max_k L_k, known for the linear models"
    )
    schedule: Literal["constant", "cosine", "step"] = Field(
        "constant",
        description="of the step size over rounds: constant, half a cosine down to 0, or times "
        "decay every decay_every rounds",
    )
    decay: float = Field(0.1, gt=0, le=1, description="factor of schedule=step")
    decay_every: int = Field(50, ge=1, description="rounds between two factors of schedule=step")
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="torch.optim's; its state starts fresh every round"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(0.01, ge=0, description="of adamw, beside l2")
    l2: float = Field(0.01, ge=0, description="lambda of the L2 term, biases included; 0 is none")
    participation: float = Field(
        1.0, gt=0, le=1, description="fraction of clients drawn each round, at least one client"
    )
    clients_per_round: int | None = Field(
        None, ge=1, description="instead of participation: number of clients drawn each round"
    )
    buffers: Literal["average", "local"] = Field(
        "average",
        description="of modules such as BatchNorm: averaged like the parameters (counters: the "
        "largest), or kept by each client",
    )
    chunk_clients: int | None = Field(
        None, ge=1, description="clients stacked at a time, at most, to bound memory"
    )
    device: str = Field(
        "cpu",
        description="cpu, cuda (cuda:1), mps, or auto for the best there is; equal to the bit on "
        "cpu alone, which is also the fastest for small models",
    )
    eval_every: int | None = Field(
        None,
        ge=1,
        description="rounds between two evaluations; the last round is always evaluated. By "
        "default every round, in comparisons about 50 in all",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Training:
        given = self.model_fields_set
        for one, other in (
            ("local_steps", "local_epochs"),
            ("participation", "clients_per_round"),
        ):
            # By value and not by what was given: a run's record lists every option.
            default = type(self).model_fields[one].default
            if getattr(self, other) is not None and getattr(self, one) != default:
                raise ValueError(f"{one} and {other} exclude each other: give one of them")
        for name, (switch, allowed) in _ONLY.items():
            changed = getattr(self, name) != type(self).model_fields[name].default
            if name in given and changed and getattr(self, switch) not in allowed:
                raise ValueError(
                    f"{name} is used only with {switch} = {' or '.join(allowed)} "
                    f"(here {getattr(self, switch)}); leave it out"
                )
        return self

    @property
    def every(self) -> int:
        """Rounds between two points of a comparison's curves."""
        return self.eval_every or math.ceil(self.rounds / CURVE_POINTS)

    @property
    def plain(self) -> bool:
        """Whether clients take plain gradient steps of one size, as the analysis assumes."""
        return self.bare and self.schedule == "constant"

    def factor(self, round: int) -> float:
        """What the step size is multiplied by in a round, from 1 in round 1."""
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * (round - 1) / self.rounds)) / 2
        if self.schedule == "step":
            return float(self.decay ** ((round - 1) // self.decay_every))
        return 1.0

    def cohort_size(self, clients: int) -> int:
        """Clients that take part in a round, of so many."""
        if self.clients_per_round is not None:
            return self.clients_per_round
        return max(1, round(self.participation * clients))

    def steps(self, n: int, smallest: int = 1) -> int:
        """Gradient steps S_k of a client with n records in one round."""
        if self.local_epochs is None:
            return self.local_steps
        return self.local_epochs * self.batches(n, smallest)

    def batches(self, n: int, smallest: int = 1) -> int:
        """Batches of at least ``smallest`` records in one pass over n records."""
        if self.batch_size is None or n <= self.batch_size:
            return 1
        whole, rest = divmod(n, self.batch_size)
        return whole + (rest >= smallest)

    @property
    def bare(self) -> bool:
        """Whether a step is ``theta - lr * gradient``, without an optimiser."""
        return self.optimizer == "sgd" and self.momentum == 0

    def optimizer_for(self, parameters: Sequence[Tensor], lr: float) -> Optimizer:
        """A fresh torch.optim optimiser."""
        from torch import optim

        if self.optimizer == "adam":
            return optim.Adam(parameters, lr)
        if self.optimizer == "adamw":
            return optim.AdamW(parameters, lr, weight_decay=self.weight_decay)
        return optim.SGD(parameters, lr, momentum=self.momentum)
