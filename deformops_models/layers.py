"""The attention layer of Deformable DETR as a module."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deformops_models.api import MAX_LEVELS, deformable_attention
from deformops_models.backend import Backend, as_backend
from deformops_models.layout import Sizes, Starts, count_levels


class MultiScaleDeformAttn2d(nn.Module):
    """Multi-scale deformable attention with its four projections (Deformable DETR, section 4.1).

    Args:
        dim: channels of queries, values and output; a multiple of `num_heads`.
        num_heads: M.
        num_levels: L.
        num_points: K per level, or one count per level.
        backend: see `resolve`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int | Sequence[int] = 4,
        backend: Backend | str | None = None,
    ):
        super().__init__()
        for name, number in (("dim", dim), ("num_heads", num_heads), ("num_levels", num_levels)):
            if not isinstance(number, int):
                raise TypeError(f"{name}={number!r}: a whole number is expected")
        if num_heads < 1 or dim < 1 or dim % num_heads:
            raise ValueError(f"dim={dim} is not a multiple of num_heads={num_heads}")
        if not 1 <= num_levels <= MAX_LEVELS:
            raise ValueError(f"num_levels={num_levels}: 1 to {MAX_LEVELS} are supported")
        counts = list(num_points) if isinstance(num_points, Sequence) else [num_points] * num_levels
        if not all(isinstance(count, int) for count in counts):
            raise TypeError(f"num_points={num_points!r}: one whole number, or one per level, is expected")
        if len(counts) != num_levels or min(counts, default=0) < 1:
            raise ValueError(f"num_points={num_points} must be positive, one count or {num_levels} of them")
        self.dim, self.num_heads, self.num_levels, self.num_points = dim, num_heads, num_levels, counts
        self.backend = as_backend(backend)
        points = num_heads * sum(counts)
        self.sampling_offsets = nn.Linear(dim, 2 * points)
        self.attention_weights = nn.Linear(dim, points)
        self.value_proj = nn.Linear(dim, dim)
        self.output_proj = nn.Linear(dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Offsets start on one ray per head, the k-th point k pixels out; attention starts uniform."""
        angles = torch.arange(self.num_heads, dtype=torch.float32) * (2 * math.pi / self.num_heads)
        rays = torch.stack([angles.cos(), angles.sin()], -1)
        rays = rays / rays.abs().amax(-1, keepdim=True)
        steps = torch.cat([torch.arange(1, count + 1, dtype=torch.float32) for count in self.num_points])
        with torch.no_grad():
            nn.init.zeros_(self.sampling_offsets.weight)
            self.sampling_offsets.bias.copy_((rays[:, None] * steps[None, :, None]).flatten())
            nn.init.zeros_(self.attention_weights.weight)
            nn.init.zeros_(self.attention_weights.bias)
            for linear in (self.value_proj, self.output_proj):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)

    def forward(
        self,
        query: Tensor,
        reference: Tensor,
        value: Tensor,
        spatial_shapes: Sizes,
        level_start_index: Starts = None,
    ) -> Tensor:
        """Attends from `query` (B, Q, dim) to `value` (B, S, dim) around `reference` (B, Q, L or 1, 2 or 4).

        `spatial_shapes` and `level_start_index` are as for `msda`. Returns (B, Q, dim).
        """
        for name, tensor in (("query", query), ("value", value)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} is a {type(tensor).__name__}: a torch.Tensor is expected")
            if tensor.dim() != 3 or tensor.shape[2] != self.dim or tensor.shape[0] != query.shape[0]:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}: ({query.shape[0]}, N, {self.dim}) is expected"
                )
        if (levels := count_levels(spatial_shapes)) != self.num_levels:
            raise ValueError(f"spatial_shapes has {levels} levels, the layer was made for num_levels={self.num_levels}")
        batch, queries = query.shape[:2]
        split = (batch, queries, self.num_heads, sum(self.num_points))
        value = self.value_proj(value)
        output = deformable_attention(
            value.view(batch, value.shape[1], self.num_heads, self.dim // self.num_heads),
            spatial_shapes,
            level_start_index,
            reference,
            self.sampling_offsets(query).view(*split, 2),
            self.attention_weights(query).view(split),
            num_points=self.num_points,
            backend=self.backend,
        )
        return self.output_proj(output)
