"""Processes that agree: on the main one's values, and on gradients that they average with one sum."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.no_grad()
def share(tensors: Iterable[Tensor]) -> None:
    """Gives every process the main one's values."""
    for t in tensors:
        shared = t.contiguous()
        torch.distributed.broadcast(shared, src=0)
        t.copy_(shared)


class GradientAverage:
    """Averages the gradients of a model that each process holds whole.

    `DistributedDataParallel` copies each gradient into a bucket from a hook of its own, hundreds of small operations
    that the host has to launch. Here all gradients are put together at once and summed by one collective, for which
    there are two of each for a moment. What is lost is that the sum could run beside the backward pass: where
    processes are linked slowly, DDP may be faster.

    Args:
        model: on its device. It gets the main process's weights and buffers; which parameters ask for a gradient
            does not change from then on.
    """

    def __init__(self, model: nn.Module) -> None:
        share([*model.parameters(), *model.buffers()])
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.sizes = [p.numel() for p in self.parameters]
        self.all_used = torch.ones(len(self.parameters), device=self.parameters[0].device)

    @torch.no_grad()
    def __call__(self) -> None:
        """Gives each parameter the mean of its gradients in all processes; to have none counts as zero.

        A parameter that has no gradient in any process keeps None, so that the optimizer leaves it alone.
        All processes have to call it. It waits for the device only in those where a gradient is missing.
        """
        missing = any(p.grad is None for p in self.parameters)
        used = self.all_used.new_tensor([p.grad is not None for p in self.parameters]) if missing else self.all_used
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        # Who has a gradient is summed with them.
        flat = torch.cat([*(g.flatten() for g in gradients), used])
        torch.distributed.all_reduce(flat)
        flat /= torch.distributed.get_world_size()
        *means, users = flat.split([*self.sizes, len(self.sizes)])
        somewhere = users.tolist() if missing else [1.0] * len(means)
        for parameter, mean, anybody in zip(self.parameters, means, somewhere, strict=True):
            parameter.grad = mean.view_as(parameter) if anybody else None
