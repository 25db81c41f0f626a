"""FSDP2: a model whose parameters and optimizer state are spread over all processes, and whole tensors out of it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from deformops_models.train.tasks import check_keeps_layers, innermost_layers


def shard(model: nn.Module, device: torch.device) -> None:
    """Spreads a patched model over all processes, layer by layer; its parameters are sharded tensors from then on.

    Parameters are gathered and gradients summed in float32 while autocast halves what is computed, as in a training
    that is not sharded. A policy that casts what goes into layers would round reference points and targets.

    Args:
        model: with the same weights in every process; what it holds moves to the device part by part.
        device: of this process, and its current one.

    Raises:
        UsageError: the model drops whole layers.
    """
    # Processes would not gather the same layers together.
    check_keeps_layers(model, "--fsdp")
    # Upstream returns parts of a tensor, which nobody changes in place.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDP\w+\) returned a view tensor")
    mesh = torch.distributed.init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*innermost_layers(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def whole(tree: Any, keep: bool = True) -> Any:
    """Puts the sharded tensors of a tree together on the CPU; other tensors stay what they are.

    All processes have to call it. Those that do not `keep` the tensors get None in their place.
    """
    found: dict[int, Tensor | None] = {}

    def gather(t: DTensor) -> Tensor | None:
        if id(t) not in found:
            gathered = t.detach().full_tensor()
            found[id(t)] = gathered.cpu() if keep else None
        return found[id(t)]

    return tree_map_only(DTensor, gather, tree)


def weights(model: nn.Module, keep: bool = True) -> dict[str, Tensor | None]:
    """The model's whole `state_dict`, as `whole` gives it."""
    # A parameter with two names is gathered once: its variable is one object, of which others are made else.
    return whole(model.state_dict(keep_vars=isinstance(model, FSDPModule)), keep)


def parts_of(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Takes this process's parts out of an optimizer's `state_dict` of whole tensors.

    Args:
        state: of `whole`; it is the same for any number of processes, sharded or not.
        optimizer: of the parameters, sharded or not.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def part(t: Any, parameter: nn.Parameter) -> Any:
        # A moment has its parameter's shape, the count of steps has none.
        if not isinstance(parameter, DTensor) or t.shape != parameter.shape:
            return t
        t = t.to(parameter.device)
        return distribute_tensor(t, parameter.device_mesh, parameter.placements, src_data_rank=None)

    moments = {
        k: {name: part(t, parameters[k]) for name, t in entries.items()} for k, entries in state["state"].items()
    }
    return {**state, "state": moments}
