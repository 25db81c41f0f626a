"""Matching and losses of set prediction, for all decoder layers and images at once.

Shape symbols: L layers, B images, Q queries, N objects of the fullest image (others are padded to it), P points,
K matched pairs of one layer, T objects of the whole batch.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

#: Queries and objects of one image that belong together, as int64 tensors on the CPU.
Pairs = tuple[Tensor, Tensor]


def upcast(tensor: Tensor) -> Tensor:
    """In float32, or in float64 if it is already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def sample(maps: Tensor, points: Tensor) -> Tensor:
    """Bilinear values (R, C, P) of `maps` (R, C, H, W) at `points` (R, P, 2) as (x, y), 0..1 over the map."""
    grid = points.to(maps.dtype).mul(2).sub_(1).unsqueeze(2)
    return F.grid_sample(maps, grid, align_corners=False).squeeze(3)


def assign(costs: Tensor, counts: Sequence[int], checks: dict[str, Tensor], layers: Sequence[str]) -> list[list[Pairs]]:
    """The cheapest one-to-one matching of queries and objects in each layer and image; one copy to the host.

    Args:
        costs: (L, B, Q, N); the columns from counts[b] on are padding.
        counts: objects of each image.
        checks: by name, numbers (L, any) of each layer that are not finite if what they stand for is not.
        layers: names for errors.

    Returns:
        For each layer and image its pairs, in the order of the queries.

    Raises:
        FloatingPointError: a check or a cost is not finite.
    """
    from scipy.optimize import linear_sum_assignment

    host = torch.cat([costs.flatten(1), *checks.values()], 1).cpu()
    matrices, *numbers = host.split([costs[0].numel(), *(check.shape[1] for check in checks.values())], 1)
    matrices = matrices.unflatten(1, costs.shape[1:])
    if not host.isfinite().all():
        _raise_if_not_finite(matrices, counts, dict(zip(checks, numbers, strict=True)), layers)
    return [
        [
            tuple(map(torch.from_numpy, linear_sum_assignment(matrix[:, :count])))
            for matrix, count in zip(images, counts, strict=True)
        ]
        for images in matrices.numpy()
    ]


def _raise_if_not_finite(
    matrices: Tensor, counts: Sequence[int], checks: dict[str, Tensor], layers: Sequence[str]
) -> None:
    """Names the first layer, and what of it, that is not finite; padding may be anything."""
    for i, layer in enumerate(layers):
        for name, numbers in checks.items():
            if not numbers[i].isfinite().all():
                raise FloatingPointError(f"{layer}: {name} are not finite: look at the inputs and the learning rate")
        for image, count in enumerate(counts):
            if not matrices[i, image, :, :count].isfinite().all():
                raise FloatingPointError(
                    f"{layer}, image {image}: matching costs are not finite, though predictions are: look at the labels"
                )


def flat_indices(pairs: list[list[Pairs]], queries: int, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Query indices of pairs among the B·Q of their layer, and object indices among the T, (L, K) each."""
    queries_of, objects_of = (
        torch.stack([torch.cat([pair[side] for pair in images]) for images in pairs]) for side in (0, 1)
    )
    images = [image for image, count in enumerate(counts) for _ in range(min(count, queries))]
    images, first = torch.tensor(images, dtype=torch.int64), torch.tensor([0, *counts]).cumsum(0)
    return queries_of + images * queries, objects_of + first[images]


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Index tensors on `device`, in one copy."""
    flat = torch.cat([t.flatten() for t in tensors]).to(device, non_blocking=True)
    parts = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


# Masks


def mask_costs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and dice cost of each query's mask with each object's, (L, B, Q, N) each.

    Args:
        logits: (L, B, Q, P) of the queries' masks at points; overwritten.
        targets: (L, B, N, P), 0..1.
    """
    targets, points = targets.transpose(2, 3), logits.shape[3]
    inside = F.logsigmoid(logits).neg_()
    outside = inside + logits
    cross_entropy = inside.div_(points) @ targets + outside.div_(points) @ (1 - targets)
    masks = logits.sigmoid_()
    overlap = 2 * (masks @ targets)
    area = masks.sum(3)[..., None] + targets.sum(2)[..., None, :]
    return cross_entropy, 1 - (overlap + 1) / (area + 1)


def mask_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and dice loss (R,) of masks given at points, `logits` and `targets` (R, P)."""
    cross_entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
    masks = logits.sigmoid()
    dice = 1 - (2 * (masks * targets).sum(1) + 1) / (masks.sum(1) + targets.sum(1) + 1)
    return cross_entropy, dice


# Boxes, as (centre x, centre y, width, height)


def generalized_iou(a: Tensor, b: Tensor) -> Tensor:
    """Generalized IoU (arXiv:1902.09630) of boxes (..., 4), broadcast; NaN for a negative width or height."""
    (a_low, a_high, a_size), (b_low, b_high, b_size) = _corners(a), _corners(b)
    shared = (torch.minimum(a_high, b_high) - torch.maximum(a_low, b_low)).clamp(min=0).prod(-1)
    union = a_size.prod(-1) + b_size.prod(-1) - shared
    hull = (torch.maximum(a_high, b_high) - torch.minimum(a_low, b_low)).clamp(min=0).prod(-1)
    valid = (a_size >= 0).all(-1) & (b_size >= 0).all(-1)
    return (shared / union - (hull - union) / hull).where(valid, torch.nan)


def _corners(boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    centre, size = boxes.split(2, -1)
    low, high = centre - 0.5 * size, centre + 0.5 * size
    return low, high, high - low


def focal_costs(logits: Tensor, classes: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Focal cost (L, B, Q, N) of giving each query of `logits` (L, B, Q, C) each object's class, `classes` (B, N)."""
    scores = logits.sigmoid()
    positive = alpha * (1 - scores) ** gamma * -(scores + 1e-8).log()
    negative = (1 - alpha) * scores**gamma * -(1 - scores + 1e-8).log()
    return select_classes(positive - negative, classes)


def select_classes(scores: Tensor, classes: Tensor) -> Tensor:
    """(L, B, Q, N): of `scores` (L, B, Q, C) the columns of the objects' `classes` (B, N)."""
    return scores.gather(3, classes[None, :, None].expand(*scores.shape[:3], -1))


def focal_losses(logits: Tensor, targets: Tensor, alpha: float, gamma: float = 2.0) -> Tensor:
    """Focal loss (arXiv:1708.02002) of each element of `logits`; `targets` of the same shape are 0 or 1."""
    scores = logits.sigmoid()
    cross_entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    losses = cross_entropy * (1 - (scores * targets + (1 - scores) * (1 - targets))) ** gamma
    return losses * (alpha * targets + (1 - alpha) * (1 - targets)) if alpha >= 0 else losses
