"""Problems to time: the sizes of real layers, and random operands for them."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deformops_models.layout import level_starts
from deformops_models.reference import pixels

OPS = ("msda", "deformable_attention")
DISTRIBUTIONS = ("local", "uniform")
#: Name to the dtypes of value and of points and weights; reference points are always float32.
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "autocast": (torch.bfloat16, torch.float32),
}
OFFSET_SCALE = 0.5
_SPREAD = 2.0  # pixels, standard deviation of local offsets

Sizes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Preset:
    """The work of one real layer.

    Args:
        batch: B.
        sizes: (H, W) of each level.
        queries: Q; None is one per pixel, as in an encoder.
        heads, channels: M and D.
        points: K_l of each level.
        coordinates: of a reference point: 2, one per level; or 4, a box for all levels.
        dtypes: timed unless others are asked for.
        uniform: times uniform locations in bfloat16 too, unless a distribution is asked for.
    """

    batch: int
    sizes: Sizes
    queries: int | None
    points: tuple[int, ...]
    heads: int = 8
    channels: int = 32
    coordinates: int = 2
    dtypes: tuple[str, ...] = ("bfloat16",)
    uniform: bool = False

    @property
    def rows(self) -> int:
        """S."""
        return sum(height * width for height, width in self.sizes)

    @property
    def query_count(self) -> int:
        """Q."""
        return self.rows if self.queries is None else self.queries

    @property
    def equal_points(self) -> bool:
        """Whether every level has the same number of points."""
        return len(set(self.points)) == 1

    @property
    def corner_elements(self) -> int:
        """Elements of value that the samples' four corners take, each counted as often as it is sampled."""
        return 4 * self.batch * self.query_count * self.heads * sum(self.points) * self.channels


def _pyramid(height: int, width: int, strides: tuple[int, ...]) -> Sizes:
    return tuple((math.ceil(height / stride), math.ceil(width / stride)) for stride in strides)


def _scaled(queries: int, strides: tuple[int, ...]) -> Sizes:
    """The levels of a 1536×2048 image, scaled so that their pixels are about `queries`."""
    levels = _pyramid(1536, 2048, strides)
    scale = math.sqrt(queries / sum(height * width for height, width in levels))
    return tuple((round(height * scale), round(width * scale)) for height, width in levels)


_FIVE = (4, 8, 16, 32, 64)
_DETR = _pyramid(800, 1333, _FIVE[1:])
_EVERY = tuple(DTYPES)

PRESETS = {
    # Deformable DETR and DINO with 4 levels; Mask2Former's pixel decoder; RT-DETR's decoder.
    "encoder": Preset(2, _DETR, None, (4,) * 4, dtypes=_EVERY, uniform=True),
    "decoder": Preset(4, _DETR, 300, (4,) * 4, dtypes=_EVERY),
    "m2f1024": Preset(2, ((32, 32), (64, 64), (128, 128)), None, (4,) * 3, dtypes=_EVERY, uniform=True),
    "rtdetr640": Preset(16, ((80, 80), (40, 40), (20, 20)), 300, (4,) * 3, dtypes=_EVERY),
    # LW-DETR's decoder in training, which takes 13 groups of 300 queries.
    "narrow": Preset(8, _pyramid(800, 1333, (16,)), 3900, (2,), heads=16, channels=16, coordinates=4),
    # DINO with 5 levels; an encoder with twice the points; D-FINE's decoder.
    "five_levels": Preset(1, _pyramid(800, 1333, _FIVE), None, (4,) * 5),
    "eight_points": Preset(1, _DETR, None, (8,) * 4),
    "unequal": Preset(16, _pyramid(640, 1066, (8, 16, 32)), 300, (3, 6, 3), coordinates=4),
    # Timed on the host: the device has next to nothing to do.
    "host": Preset(1, _DETR, 300, (4,) * 4),
}
#: One quantity grows in each sweep; the cost should grow in proportion to `corner_elements`.
LINEAR = {
    **{f"linear_q{q}": Preset(1, _scaled(q, _FIVE), None, (4,) * 5) for q in (5000, 11000, 22000, 45000, 90000)},
    **{f"linear_lk{4 * k}": Preset(1, _scaled(22000, _FIVE[1:]), None, (k,) * 4) for k in (1, 2, 4, 8)},
    **{f"linear_d{d}": Preset(1, _scaled(22000, _FIVE), None, (4,) * 5, channels=d) for d in (16, 32, 64)},
}


class Case(NamedTuple):
    """What is timed, by name; one row per provider."""

    preset: str
    distribution: str
    dtype: str
    op: str

    @property
    def work(self) -> Preset:
        return (PRESETS | LINEAR)[self.preset]


@dataclass(frozen=True)
class Problem:
    """Random operands of one operator.

    Args:
        preset: the sizes.
        shapes, starts: (L, 2) and (L,), as tensors beside the operands.
        scale: part of a box's side that an offset of 1 is, (P, 1).
        reference: (B, Q, L, 2) or (B, Q, 1, 4) in float32 for `deformable_attention`; None for `msda`.
        value: (B, S, M, D).
        points: locations or offsets, (B, Q, M, L, K, 2), or (B, Q, M, P, 2) where the counts differ.
        weights: normalised or logits, as `points` without its last axis.
        grad: (B, Q, M·D), of the output.
    """

    preset: Preset
    shapes: Tensor
    starts: Tensor
    scale: Tensor
    reference: Tensor | None
    value: Tensor
    points: Tensor
    weights: Tensor
    grad: Tensor

    @classmethod
    def random(
        cls, preset: Preset, distribution: str, dtype: str, op: str, device: torch.device | str = "cuda"
    ) -> "Problem":
        """Draws locations about each query's reference point (`local`) or all over the image (`uniform`)."""
        value_dtype, other = DTYPES[dtype]
        batch, queries, heads, levels = preset.batch, preset.query_count, preset.heads, len(preset.sizes)
        shapes = torch.tensor(preset.sizes, device=device)
        counts = torch.tensor(preset.points, device=device)
        per_point = shapes.flip(1).repeat_interleave(counts, 0)  # (P, 2) as (W, H)
        scale = (OFFSET_SCALE / counts).repeat_interleave(counts)[:, None]
        centres = _centres(preset, device)
        axes = (batch, queries, heads, len(per_point))
        if distribution == "uniform":
            locations = torch.rand(*axes, 2, device=device)
        else:
            locations = centres[:, :, None, None] + torch.randn(*axes, 2, device=device) * _SPREAD / per_point
        points, weights, reference = locations, torch.randn(axes, device=device), None
        if op == "msda":
            weights = weights.softmax(-1)
        elif preset.coordinates == 2:
            reference = centres[:, :, None].expand(-1, -1, levels, -1).contiguous()
            points = (locations - centres[:, :, None, None]) * per_point
        else:
            sides = torch.rand(batch, queries, 2, device=device) * 0.4 + 0.1
            reference = torch.cat([centres, sides], -1)[:, :, None]
            points = (locations - centres[:, :, None, None]) / (sides[:, :, None, None] * scale)
        if preset.equal_points:
            points, weights = (t.unflatten(3, (levels, preset.points[0])) for t in (points, weights))
        return cls(
            preset,
            shapes,
            torch.tensor(level_starts(preset.sizes), device=device),
            scale,
            reference,
            torch.randn(batch, preset.rows, heads, preset.channels, device=device).to(value_dtype),
            points.to(other),
            weights.to(other),
            torch.randn(batch, queries, heads * preset.channels, device=device).to(value_dtype),
        )

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """What an implementation takes and differentiates: value, points, weights."""
        return self.value, self.points, self.weights

    def leaves(self) -> list[Tensor]:
        """The operands as fresh leaves."""
        return [t.clone().requires_grad_() for t in self.operands]

    def locations(self, offsets: Tensor) -> Tensor:
        """A detector's own arithmetic: offsets to locations, in float32 as the reference points."""
        if self.preset.coordinates == 2:
            return self.reference[:, :, None, :, None] + offsets / self.shapes.flip(1)[:, None]
        if self.preset.equal_points:
            centres, sides = self.reference[:, :, None, :, None].chunk(2, -1)
            return centres + offsets * (OFFSET_SCALE / self.preset.points[0]) * sides
        centres, sides = self.reference[:, :, None].chunk(2, -1)
        return centres + offsets * self.scale * sides

    def smooth(self) -> Tensor:
        """1 where a point is away from whole pixels, else 0: there bilinear sampling has no derivative."""
        near, levels = [], self.points.double().flatten(3, -2).split(self.preset.points, 3)
        boxes = None if self.reference is None else self.reference.double()
        for level, ((height, width), points) in enumerate(zip(self.preset.sizes, levels, strict=True)):
            xy = pixels(points, boxes, level, height, width, points.shape[3], OFFSET_SCALE)
            near.append(torch.stack([(c - c.round()).abs() < 1e-3 for c in xy]).any(0))
        return (~torch.cat(near, 3)).view(self.points.shape[:-1]).unsqueeze(-1).double()


def _centres(preset: Preset, device: torch.device | str) -> Tensor:
    """(B, Q, 2): anywhere, or for an encoder one within each pixel."""
    if preset.queries is not None:
        return torch.rand(preset.batch, preset.queries, 2, device=device)
    grids = []
    for height, width in preset.sizes:
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        grid = torch.stack([x, y], -1).view(-1, 2).to(device)
        grid = grid + torch.rand(preset.batch, height * width, 2, device=device)
        grids.append(grid / torch.tensor([width, height], device=device))
    return torch.cat(grids, 1)
