"""What several tests share: random problems and the error budget."""

from dataclasses import dataclass

import torch
from torch import Tensor


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """‖actual − exact‖ / ‖exact‖ in float64; NaN and infinity never pass a comparison with it."""
    actual, exact = actual.detach().double().cpu(), exact.detach().double().cpu()
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    return ((actual - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def assert_within_budget(actual: Tensor, exact: Tensor, plain: Tensor, name: str = "") -> None:
    """The error may be twice that of the plain low-precision path plus one rounding of the result's dtype.

    Args:
        actual: what is tested.
        exact: the same in float64.
        plain: the same by the plain path in actual's dtype.
    """
    band = torch.finfo(actual.dtype).eps
    bound = 2 * (relative_error(plain, exact) + band)
    error = relative_error(actual, exact)
    assert error <= bound, f"{name}: error {error:.3e} exceeds its budget {bound:.3e}"


@dataclass
class Problem:
    """Random operands in float64 on the CPU, exactly representable in `dtype`.

    `reference` is None for plain locations.
    """

    sizes: list[tuple[int, int]]
    value: Tensor
    reference: Tensor | None
    points: Tensor
    weights: Tensor
    grad: Tensor
    num_points: list[int]

    @classmethod
    def random(
        cls, *, batch=2, queries=7, heads=3, channels=16, sizes=((5, 9), (3, 4)), num_points=(4, 4), coordinates=2,
        reference_levels=None, dtype=torch.float32,
    ) -> "Problem":  # fmt: skip
        """`coordinates` 0 gives locations, partly outside the image; 2 and 4 give reference points and offsets."""
        rows, total = sum(h * w for h, w in sizes), sum(num_points)
        reference = None
        points = torch.rand(batch, queries, heads, total, 2) * 1.4 - 0.2
        if coordinates:
            points = torch.randn(batch, queries, heads, total, 2) * 2
            reference = torch.rand(batch, queries, reference_levels or len(sizes), coordinates)
        tensors = (
            torch.randn(batch, rows, heads, channels),
            reference,
            points,
            torch.randn(batch, queries, heads, total),
            torch.randn(batch, queries, heads * channels),
        )
        tensors = [t if t is None else t.to(dtype).double() for t in tensors]
        return cls(list(sizes), *tensors, list(num_points))

    def operands(self) -> dict[str, Tensor]:
        names = ("value", "reference", "points", "weights")
        return {name: t for name in names if (t := getattr(self, name)) is not None}

    def run(self, backend: str, dtypes=torch.float64, device: str = "cpu", **options) -> dict[str, Tensor]:
        """Output and every gradient by name. `dtypes` is one dtype, or one per operand's name."""
        import deformops_models as dm

        names = self.operands()
        if not isinstance(dtypes, dict):
            dtypes = dict.fromkeys(names, dtypes)
        leaves = {n: t.to(device=device, dtype=dtypes[n]).requires_grad_() for n, t in names.items()}
        value, points, weights = leaves["value"], leaves["points"], leaves["weights"]
        options = {"num_points": self.num_points, "backend": backend} | options
        if self.reference is None:
            output = dm.msda(value, self.sizes, None, points, weights, **options)
        else:
            output = dm.deformable_attention(value, self.sizes, None, leaves["reference"], points, weights, **options)
        grads = torch.autograd.grad(output, list(leaves.values()), self.grad.to(output))
        return {"output": output, **{f"grad_{n}": g for n, g in zip(leaves, grads, strict=True)}}
