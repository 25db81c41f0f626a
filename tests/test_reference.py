"""The specification against Python loops, and its gradients against finite differences."""

import itertools
import math

import pytest
import torch
from helpers import Problem, relative_error

import deformops_models as dm
from deformops_models import reference

SIZES, COUNTS = [(3, 5), (4, 2), (2, 3)], [2, 3, 1]


def loops(problem: Problem, starts, softmax: bool, offset_scale: float) -> torch.Tensor:
    """Equation 3 of Deformable DETR with one Python loop per index; a pixel's share is its hat function."""
    batch, queries, heads, total = problem.weights.shape
    channels = problem.value.shape[3]
    output = torch.zeros(batch, queries, heads, channels, dtype=torch.float64)
    for b, q, m in itertools.product(range(batch), range(queries), range(heads)):
        weights = problem.weights[b, q, m].tolist()
        if softmax:
            exps = [math.exp(w) for w in weights]
            weights = [e / sum(exps) for e in exps]
        point = 0
        for level, ((height, width), start) in enumerate(zip(problem.sizes, starts, strict=True)):
            for _ in range(problem.num_points[level]):
                px, py = problem.points[b, q, m, point].tolist()
                if problem.reference is not None:
                    own = problem.reference[b, q]
                    box = own[level if len(own) > 1 else 0].tolist()
                    if len(box) == 2:
                        px, py = box[0] + px / width, box[1] + py / height
                    else:
                        share = offset_scale / problem.num_points[level]
                        px, py = box[0] + px * share * box[2], box[1] + py * share * box[3]
                x, y = px * width - 0.5, py * height - 0.5
                for row, column in itertools.product(range(height), range(width)):
                    hat = max(0.0, 1 - abs(x - column)) * max(0.0, 1 - abs(y - row))
                    output[b, q, m] += weights[point] * hat * problem.value[b, start + row * width + column, m]
                point += 1
        assert point == total
    return output.flatten(2)


def specification(problem: Problem, starts=(0, 15, 23), softmax=True, offset_scale=0.5, **tensors):
    operands = {n: getattr(problem, n) for n in ("value", "reference", "points", "weights")} | tensors
    return reference.msda(
        operands["value"], problem.sizes, list(starts), operands["reference"], operands["points"],
        operands["weights"], problem.num_points, softmax=softmax, offset_scale=offset_scale,
    )  # fmt: skip


def small(coordinates: int, **options) -> Problem:
    return Problem.random(
        batch=2, queries=3, heads=2, channels=3, sizes=SIZES, num_points=COUNTS, coordinates=coordinates, **options
    )


@pytest.mark.parametrize("starts", [(0, 15, 23), (14, 6, 0)], ids=["in order", "reversed"])
@pytest.mark.parametrize("coordinates, levels", [(0, None), (2, 3), (2, 1), (4, 3), (4, 1)])
@pytest.mark.parametrize("softmax", [False, True])
def test_output_is_that_of_the_loops(coordinates, levels, softmax, starts):
    problem = small(coordinates, reference_levels=levels)
    scale = 0.5 + torch.rand(()).item()
    actual = specification(problem, starts, softmax, scale)
    torch.testing.assert_close(actual, loops(problem, starts, softmax, scale), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("coordinates, levels", [(0, None), (2, 3), (2, 1), (4, 3), (4, 1)])
@pytest.mark.parametrize("softmax", [False, True])
def test_gradients_are_those_of_finite_differences(coordinates, levels, softmax):
    problem = Problem.random(
        batch=1, queries=2, heads=2, channels=2, sizes=SIZES, num_points=COUNTS, coordinates=coordinates,
        reference_levels=levels,
    )  # fmt: skip
    names = list(problem.operands())
    operands = [t.requires_grad_() for t in problem.operands().values()]

    def run(*tensors):
        return specification(problem, softmax=softmax, **dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(run, operands, fast_mode=True)


def test_a_location_is_a_share_of_the_image_and_x_is_the_width():
    value = torch.arange(6.0).view(1, 6, 1, 1)  # rows 0 1 2 and 3 4 5
    expected = {
        (0.5 / 3, 0.5 / 2): 0.0,
        (2.5 / 3, 0.5 / 2): 2.0,
        (0.5 / 3, 1.5 / 2): 3.0,
        (0.5, 0.5): 2.5,
        (1.0, 1.5 / 2): 2.5,  # half of pixel 5 lies outside
        (1.0, 1.0): 1.25,
        (1 + 0.5 / 3, 0.5): 0.0,
    }
    points = torch.tensor(list(expected)).view(1, -1, 1, 1, 1, 2)
    output = dm.msda(value, [(2, 3)], None, points, torch.ones(points.shape[:-1]))
    torch.testing.assert_close(output.flatten(), torch.tensor(list(expected.values())))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e20, -1e20])
@pytest.mark.parametrize("coordinates", [0, 2, 4])
def test_a_location_that_is_nowhere_counts_as_absent(coordinates, bad):
    problem = small(coordinates)
    problem.points[0, 1, 0, 2, 0] = bad
    problem.points[1, 2, 1, 4, 1] = bad
    actual = problem.run("eager", torch.float32)
    problem.points[0, 1, 0, 2, 0] = 9e4
    problem.points[1, 2, 1, 4, 1] = 9e4
    expected = problem.run("eager", torch.float32)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name
    assert actual["grad_points"][0, 1, 0, 2].tolist() == [0, 0]
    assert actual["grad_points"][1, 2, 1, 4].tolist() == [0, 0]


@pytest.mark.parametrize("coordinate", range(4))
def test_a_reference_that_is_not_finite_has_no_gradient(coordinate):
    problem = small(4)
    problem.reference[0, 1, 1, coordinate] = math.nan
    problem.reference[1, 0, 2, coordinate] = math.inf
    results = problem.run("eager", torch.float32)
    for name, result in results.items():
        assert result.isfinite().all(), name
    assert results["grad_reference"][0, 1, 1].tolist() == [0] * 4
    assert results["grad_points"][0, 1, :, 2:5].count_nonzero() == 0


def test_pixels_that_no_point_needs_are_not_read():
    value = torch.full((1, 6, 1, 2), math.nan)
    value[0, 4] = 7.0
    points = torch.tensor([0.5, 0.75]).view(1, 1, 1, 1, 1, 2)
    outside = torch.tensor([-3.0, 0.5]).view(1, 1, 1, 1, 1, 2)
    # Only the pixel under the point: its neighbours are read with weight zero, so they hold numbers.
    value[0, 5] = value[0, 1] = value[0, 2] = 0.0
    assert dm.msda(value, [(2, 3)], None, points, torch.ones(1, 1, 1, 1, 1)).flatten().tolist() == [7, 7]
    assert dm.msda(value, [(2, 3)], None, outside, torch.ones(1, 1, 1, 1, 1)).flatten().tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("coordinates", [0, 2, 4])
def test_half_precision_rounds_results_only(coordinates, dtype):
    problem = small(coordinates, dtypes=(dtype,))
    exact, half = problem.run("eager"), problem.run("eager", dtype)
    for name, result in half.items():
        assert result.dtype == dtype
        assert relative_error(result, exact[name]) < torch.finfo(dtype).eps, name


def test_float64_anywhere_computes_in_float64():
    problem = small(2)
    dtypes = {"value": torch.float32, "reference": torch.float16, "points": torch.float64, "weights": torch.float32}
    problem.reference = problem.reference.half().double()
    exact, mixed = problem.run("eager"), problem.run(None, dtypes)
    for name, result in mixed.items():
        assert relative_error(result, exact[name]) < torch.finfo(result.dtype).eps, name
    assert mixed["output"].dtype == torch.float32
    assert mixed["grad_points"].dtype == torch.float64
    torch.testing.assert_close(mixed["grad_points"], exact["grad_points"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch, queries", [(0, 3), (2, 0)])
def test_nothing_in_nothing_out(batch, queries):
    problem = Problem.random(batch=batch, queries=queries)
    results = problem.run("eager", torch.float32)
    assert results["output"].shape == (batch, queries, 48)
    assert results["grad_value"].shape == problem.value.shape
    assert results["grad_value"].count_nonzero() == 0


def test_rows_past_two_to_the_24_are_told_apart():
    height, width = 4097, 4099
    value = torch.zeros(1, height * width, 1, 1)
    value[0, -2] = 1.0
    point = torch.tensor([(width - 1.5) / width, (height - 0.5) / height], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        points = point.to(dtype).view(1, 1, 1, 1, 1, 2)
        output = dm.msda(value, [(height, width)], None, points, torch.ones(1, 1, 1, 1, 1), backend="eager")
        assert output.item() == pytest.approx(1, abs=2e-3), dtype
