"""What several tests share: random problems, the error budget, a port."""

import socket
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@contextmanager
def deterministic(*, warn_only: bool):
    """Torch's deterministic mode, in which it also fills every fresh tensor with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def poisoned():
    """Makes an element of a fresh output that a kernel forgets to write NaN, instead of whatever lay there."""
    with deterministic(warn_only=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "msda_backward does not have a deterministic implementation")
        yield


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """‖actual − exact‖ / ‖exact‖ in float64; NaN and infinity never pass a comparison with it."""
    actual, exact = actual.detach().double().cpu(), exact.detach().double().cpu()
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    return ((actual - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def assert_within_budget(actual: Tensor, exact: Tensor, plain: Tensor, name: str = "", longest: int = 0) -> None:
    """The error may be twice that of the plain low-precision path plus one rounding of the result's dtype.

    Args:
        actual: what is tested.
        exact: the same in float64.
        plain: the same by the plain path in actual's dtype.
        longest: the longest side of a level in pixels; coordinates up to it are rounded to float32 too.
    """
    band = torch.finfo(actual.dtype).eps + longest * torch.finfo(torch.float32).eps
    bound = 2 * (relative_error(plain, exact) + band)
    error = relative_error(actual, exact)
    assert error <= bound, f"{name}: error {error:.3e} exceeds its budget {bound:.3e}"


@dataclass
class Problem:
    """Random operands in float64 on the CPU, exactly representable in each of `dtypes`.

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
        reference_levels=None, dtypes=(torch.float32,),
    ) -> "Problem":  # fmt: skip
        """`coordinates` 0 gives locations, partly outside the image; 2 and 4 give reference points and offsets."""
        rows, total = sum(h * w for h, w in sizes), sum(num_points)

        def rounded(tensor: Tensor) -> Tensor:
            for dtype in dtypes:
                tensor = tensor.to(dtype)
            return tensor.double()

        def draw_points() -> Tensor:
            shape = (batch, queries, heads, total, 2)
            return rounded(torch.randn(shape) * 2 if coordinates else torch.rand(shape) * 1.4 - 0.2)

        problem = cls(
            list(sizes),
            rounded(torch.randn(batch, rows, heads, channels)),
            rounded(torch.rand(batch, queries, reference_levels or len(sizes), coordinates)) if coordinates else None,
            draw_points(),
            rounded(torch.randn(batch, queries, heads, total)),
            rounded(torch.randn(batch, queries, heads * channels)),
            list(num_points),
        )
        # At a whole pixel bilinear sampling has no derivative, and rounding would decide which side is taken.
        while (near := problem.near_whole_pixels()).any():
            problem.points = torch.where(near.unsqueeze(-1), draw_points(), problem.points)
        return problem

    @property
    def longest(self) -> int:
        """The longest side of a level, in pixels."""
        return max(map(max, self.sizes))

    def near_whole_pixels(self) -> Tensor:
        """(B, Q, M, P): whether x or y is within a thousandth of a whole pixel."""
        from deformops_models.reference import pixels

        near, levels = [], self.points.split(self.num_points, 3)
        for level, ((height, width), points) in enumerate(zip(self.sizes, levels, strict=True)):
            xy = pixels(points, self.reference, level, height, width, points.shape[3], 0.5)
            near.append(torch.stack([(c - c.round()).abs() < 1e-3 for c in xy]).any(0))
        return torch.cat(near, 3)

    def operands(self) -> dict[str, Tensor]:
        names = ("value", "reference", "points", "weights")
        return {name: t for name in names if (t := getattr(self, name)) is not None}

    def run(
        self, backend: str, dtypes=torch.float64, device: str = "cpu", *, sizes=None, starts=None, **options
    ) -> dict[str, Tensor]:
        """Output and every gradient by name. `dtypes` is one dtype, or one per operand's name."""
        import deformops_models as dm

        sizes = self.sizes if sizes is None else sizes
        names = self.operands()
        if not isinstance(dtypes, dict):
            dtypes = dict.fromkeys(names, dtypes)
        leaves = {n: t.to(device=device, dtype=dtypes[n]).requires_grad_() for n, t in names.items()}
        value, points, weights = leaves["value"], leaves["points"], leaves["weights"]
        options = {"num_points": self.num_points, "backend": backend} | options
        if self.reference is None:
            output = dm.msda(value, sizes, starts, points, weights, **options)
        else:
            output = dm.deformable_attention(value, sizes, starts, leaves["reference"], points, weights, **options)
        grads = torch.autograd.grad(output, list(leaves.values()), self.grad.to(output))
        return {"output": output, **{f"grad_{n}": g for n, g in zip(leaves, grads, strict=True)}}

    def check(self, dtypes, device: str, backend: str = "triton", **options) -> dict[str, Tensor]:
        """Runs the kernels on `device` into poisoned memory and asserts every result's dtype and error budget."""
        exact = self.run("eager", **options)
        plain = self.run("eager", dtypes, **options)
        with poisoned():
            actual = self.run(backend, dtypes, device, **options)
        for name, result in actual.items():
            operand = name.removeprefix("grad_") if name != "output" else "value"
            expected = dtypes[operand] if isinstance(dtypes, dict) else dtypes
            assert result.dtype == expected, (name, result.dtype)
            assert_within_budget(result, exact[name], plain[name], name, self.longest)
        return actual


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the order of float32 sums."""
    assert relative_error(actual, expected) < 1e-5


def close_all(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """As `close`, for every tensor and relative to the largest, as some gradients are zero but for rounding."""
    assert actual.keys() == expected.keys()
    largest = max(t.norm() for t in expected.values())
    for name, t in expected.items():
        assert (actual[name] - t).norm() < 1e-5 * largest, name


@contextmanager
def launches(count: int):
    """Asserts how many forward kernels the block launches, and that no patched module runs upstream's forward."""
    import deformops_models as dm

    before = dm.call_counts.copy()
    yield
    assert dm.call_counts["msda_forward"] - before["msda_forward"] == count
    assert dm.call_counts["upstream_forward"] == before["upstream_forward"]
