"""FedAvg with momentum on the server, an example of a method of one's own.

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019. Run it with ``fedtopo train --algo fedavgm``.
"""

import torch
from pydantic import Field

from fedtopo_torch import register
from fedtopo_torch.algorithms import FedAvg


@register("fedavgm")
class FedAvgM(FedAvg):
    """Server momentum: m <- beta m + (theta - mean of models), theta <- theta - m."""

    title = "FedAvgM"
    paper = "Hsu, Qi, Brown, 2019"
    beta: float = Field(0.5, ge=0, lt=1, description="momentum; 0 is FedAvg")

    def server_state(self, theta0, introductions, facts):
        return {"theta": theta0, "momentum": torch.zeros_like(theta0)}

    def aggregate(self, server, uplink, clients):
        mean = clients.mean(uplink["theta"])
        momentum = self.beta * server["momentum"] + server["theta"] - mean
        # Parameters step, the buffers of a network (BatchNorm's) become the mean's.
        theta = clients.stepped(server["theta"] - momentum, mean, 0.0)
        return {"theta": theta, "momentum": momentum}
