"""Times the operators and their peers on one GPU, each row gated by its error against float64.

    python benchmarks/operators.py --out benchmarks/results/operators.csv

Peers: transformers' eager code, and deformops where it is installed.
"""

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from record import Recorder, device_time, host_time, peak_memory
from torch import Tensor

import deformops_models as dm
from deformops_models.reference import pixels

DETR_LEVELS = ((100, 167), (50, 84), (25, 42), (13, 21))


@dataclass(frozen=True)
class Preset:
    """The work of one real layer; `queries` None means one per pixel, as in an encoder."""

    batch: int
    sizes: tuple[tuple[int, int], ...]
    queries: int | None
    heads: int = 8
    channels: int = 32
    points: int = 4


PRESETS = {
    "encoder": Preset(2, DETR_LEVELS, None),
    "decoder": Preset(4, DETR_LEVELS, 300),
    "m2f1024": Preset(2, ((32, 32), (64, 64), (128, 128)), None),
    "rtdetr640": Preset(16, ((80, 80), (40, 40), (20, 20)), 300),
    "host": Preset(1, DETR_LEVELS, 300),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: Error that an operator may have against float64 on the same operands: rounding of the output, and of the sums.
BOUNDS = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 8e-3}


@dataclass
class Inputs:
    value: Tensor
    shapes: Tensor
    starts: Tensor
    reference: Tensor
    offsets: Tensor
    logits: Tensor
    grad: Tensor

    @classmethod
    def random(cls, preset: Preset, distribution: str, dtype: torch.dtype) -> "Inputs":
        """`local`: about a jittered reference grid, offsets of 2 pixels; `uniform`: all over the image."""
        device = "cuda"
        batch, heads, levels, points = preset.batch, preset.heads, len(preset.sizes), preset.points
        grids = []
        for height, width in preset.sizes:
            y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            grid = torch.stack([x, y], -1).view(-1, 2) + torch.rand(height * width, 2)
            grids.append(grid / torch.tensor([width, height]))
        reference = torch.cat(grids) if preset.queries is None else torch.rand(preset.queries, 2)
        queries = len(reference)
        reference = reference.to(device)[None, :, None].expand(batch, queries, levels, 2).contiguous()
        shapes = torch.tensor(preset.sizes, device=device)
        rows = sum(height * width for height, width in preset.sizes)
        offsets = torch.randn(batch, queries, heads, levels, points, 2, device=device) * 2
        if distribution == "uniform":
            target = torch.rand_like(offsets)
            offsets = (target - reference[:, :, None, :, None]) * shapes.flip(1)[:, None]
        return cls(
            torch.randn(batch, rows, heads, preset.channels, device=device, dtype=dtype),
            shapes,
            torch.cat([shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]]),
            reference,
            offsets.to(dtype),
            torch.randn(batch, queries, heads, levels, points, device=device, dtype=dtype),
            torch.randn(batch, queries, heads * preset.channels, device=device, dtype=dtype),
        )

    def locations(self, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        locations = self.reference[:, :, None, :, None] + offsets / self.shapes.flip(1)[:, None]
        return locations.to(dtype)

    def leaves(self, op: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        """What a provider of `op` takes, as fresh leaves."""
        leaves = [self.value, self.offsets, self.logits]
        if op == "msda":
            # As float32, so that every provider starts from the same locations and rounds them if it must.
            weights = self.logits.flatten(3).float().softmax(-1).view_as(self.logits).to(self.value.dtype)
            leaves = [self.value, self.locations(self.offsets.float(), self.value.dtype), weights]
        return [t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in leaves]


def ours(inputs: Inputs, op: str, **options):
    if op == "msda":
        return lambda v, p, w: dm.msda(v, inputs.shapes, inputs.starts, p, w, **options)
    reference = inputs.reference
    return lambda v, p, w: dm.deformable_attention(v, inputs.shapes, inputs.starts, reference, p, w, **options)


def around(inputs: Inputs, op: str, core):
    """A detector's own softmax and location arithmetic in front of `core(value, locations, weights)`."""
    if op == "msda":
        return core

    def call(value, offsets, logits):
        weights = logits.flatten(3).softmax(-1).view_as(logits)
        return core(value, inputs.locations(offsets, value.dtype), weights.to(value.dtype))

    return call


def transformers_core(inputs: Inputs, op: str):
    from transformers.models.mask2former import modeling_mask2former

    sizes = [tuple(row) for row in inputs.shapes.tolist()]
    sample = modeling_mask2former.multi_scale_deformable_attention
    return around(inputs, op, lambda v, p, w: sample(v, sizes, p, w))


def deformops_core(inputs: Inputs, op: str, native: bool = False, softmax: bool = False):
    import deformops.backends  # noqa: F401  registers the backends
    from deformops.registry import Backend, msda

    options = {"backend": Backend.TRITON, "fp32acc": not native}
    if softmax:
        return lambda v, p, w: msda(
            v, inputs.shapes, inputs.starts, inputs.locations(p, v.dtype), w, softmax=True, **options
        )
    return around(inputs, op, lambda v, p, w: msda(v, inputs.shapes, inputs.starts, p, w, **options))


PROVIDERS = {
    "ours": ours,
    "transformers": transformers_core,
    "deformops": deformops_core,
    "deformops_native": lambda inputs, op: deformops_core(inputs, op, native=True),
    "deformops_softmax": lambda inputs, op: deformops_core(inputs, op, softmax=True),
}


def smooth(inputs: Inputs, op: str, points: Tensor) -> Tensor:
    """1 where a point is away from whole pixels, else 0: there bilinear sampling has no derivative."""
    reference = None if op == "msda" else inputs.reference.double()
    near = []
    for level, (height, width) in enumerate(inputs.shapes.tolist()):
        xy = pixels(points[:, :, :, level].double(), reference, level, height, width, points.shape[4], 0.5)
        near.append(torch.stack([(c - c.round()).abs() < 1e-3 for c in xy]).any(0))
    return (~torch.stack(near, 3)).unsqueeze(-1).double()


def errors(function, exact: list[Tensor], leaves: list[Tensor], grad: Tensor, mask: Tensor) -> dict[str, float]:
    output = function(*leaves)
    results = [output, *torch.autograd.grad(output, leaves, grad.to(output.dtype))]
    found = {}
    for name, result, truth in zip(
        ("output", "grad_value", "grad_points", "grad_weights"), results, exact, strict=True
    ):
        difference = result.double() - truth
        if name == "grad_points":
            difference, truth = difference * mask, truth * mask
        found[name] = (difference.norm() / truth.norm()).item()
    return found


def measure(recorder: Recorder, op: str, preset: str, distribution: str, dtype: str, providers: list[str]) -> None:
    inputs = Inputs.random(PRESETS[preset], distribution, DTYPES[dtype])
    leaves = inputs.leaves(op, torch.float64)
    output = ours(inputs, op, backend="eager")(*leaves)
    exact = [output.detach(), *torch.autograd.grad(output, leaves, inputs.grad.double())]
    mask = smooth(inputs, op, leaves[1].detach())
    del output, leaves
    torch.cuda.empty_cache()
    for provider in providers:
        if provider == "deformops_softmax" and op == "msda":
            continue
        if provider == "deformops_native" and dtype == "float32":
            continue
        row = {"op": op, "preset": preset, "distribution": distribution, "dtype": dtype, "provider": provider}
        function = PROVIDERS[provider](inputs, op)
        found = errors(function, exact, inputs.leaves(op), inputs.grad, mask)
        if provider == "ours":
            too_far = {name: e for name, e in found.items() if not e <= BOUNDS[dtype]}
            if too_far:
                raise AssertionError(f"{row}: errors {too_far} exceed {BOUNDS[dtype]}")
        for name, error in found.items():
            recorder.add(error, **row, metric=f"error_{name}", unit="1")

        leaves = inputs.leaves(op)
        constants = [leaf.detach() for leaf in leaves]
        output = function(*leaves)

        def forward(function=function, constants=constants):
            return function(*constants)

        def backward(output=output, leaves=leaves):
            return torch.autograd.grad(output, leaves, inputs.grad.to(output.dtype), retain_graph=True)

        def both(function=function, leaves=leaves):
            output = function(*leaves)
            return torch.autograd.grad(output, leaves, inputs.grad.to(output.dtype))

        if preset == "host":
            clocks = {
                "host_forward_us": forward,
                "host_grad_us": lambda f=function, leaves=leaves: f(*leaves),
                "host_both_us": both,
            }
            for metric, call in clocks.items():
                recorder.add(*host_time(call), **row, metric=metric, unit="us")
            continue
        for metric, call in {"forward_us": forward, "backward_us": backward, "both_us": both}.items():
            recorder.add(*device_time(call), **row, metric=metric, unit="us")
        recorder.add(peak_memory(both), **row, metric="peak_mib", unit="MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV file to append to")
    parser.add_argument("--commit", help="recorded with each row; default: git's HEAD")
    parser.add_argument("--ops", nargs="+", default=["msda", "deformable_attention"])
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--distributions", nargs="+", default=["local", "uniform"])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=list(PROVIDERS))
    args = parser.parse_args()
    recorder = Recorder(args.out, args.commit)
    rows = itertools.product(args.presets, args.dtypes, args.distributions, args.ops)
    with torch.cuda.stream(torch.cuda.Stream()):
        for preset, dtype, distribution, op in rows:
            measure(recorder, op, preset, distribution, dtype, args.providers)


if __name__ == "__main__":
    main()
