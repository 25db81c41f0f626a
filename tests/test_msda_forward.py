"""The forward kernel against the specification."""

import math

import pytest
import torch
from helpers import Problem, assert_within_budget, poisoned, relative_error

import deformops_models as dm
from deformops_models import layout

LEVELS = [(5, 9), (3, 4), (6, 2), (2, 3), (1, 7), (4, 1), (3, 2), (7, 5)]
HALVES = (torch.float16, torch.bfloat16)


def run(problem: Problem, device: str, dtype=torch.float32, **changes) -> torch.Tensor:
    """The kernel's output for a problem with references, into poisoned memory; `changes` replaces arguments."""
    operands = {n: t.to(device, dtype) for n, t in problem.operands().items()}
    arguments = {
        "value": operands["value"],
        "spatial_shapes": problem.sizes,
        "level_start_index": None,
        "reference_points": operands["reference"],
        "sampling_offsets": operands["points"],
        "attention_logits": operands["weights"],
        "num_points": problem.num_points,
        "backend": "triton",
    }
    with torch.no_grad(), poisoned():
        return dm.deformable_attention(**arguments | changes)


def exact(problem: Problem, **options) -> torch.Tensor:
    return problem.run("eager", **options)["output"]


def check(problem: Problem, actual: torch.Tensor, **options) -> None:
    plain = problem.run("eager", actual.dtype, **options)["output"]
    assert_within_budget(actual, exact(problem, **options), plain, longest=problem.longest)


def test_the_kernel_runs_and_is_counted(device):
    problem = Problem.random(batch=1, queries=2, heads=1)
    before = dm.call_counts["msda_forward"]
    run(problem, device)
    assert dm.call_counts["msda_forward"] == before + 1
    run(problem, device, backend="eager")
    assert dm.call_counts["msda_forward"] == before + 1


@pytest.mark.parametrize("method", ["linear", "softmax"])
@pytest.mark.parametrize("levels, points", [(1, 1), (2, 3), (8, 1)])
def test_msda_with_locations(device, method, levels, points):
    problem = Problem.random(
        batch=1, queries=5, heads=2, sizes=LEVELS[:levels], num_points=[points] * levels, coordinates=0
    )
    value, locations, weights = (problem.operands()[n].float().to(device) for n in ("value", "points", "weights"))
    shape = (1, 5, 2, levels, points)
    expected = problem.run("eager", method=method)["output"]
    plain = problem.run("eager", torch.float32, method=method)["output"]
    for form in (shape, (*shape[:3], levels * points)):
        with poisoned():
            actual = dm.multi_scale_deformable_attention(
                value, problem.sizes, None, locations.view(*shape, 2), weights.view(form),
                method=method, backend="triton",
            )  # fmt: skip
        assert_within_budget(actual, expected, plain, longest=problem.longest)


@pytest.mark.parametrize("coordinates, reference_levels", [(2, 2), (2, 1), (4, 2), (4, 1)])
def test_references(device, coordinates, reference_levels):
    problem = Problem.random(
        batch=1, queries=5, heads=2, num_points=(3, 2), coordinates=coordinates, reference_levels=reference_levels
    )
    scale = 0.3 + torch.rand(()).item()
    check(problem, run(problem, device, offset_scale=scale), offset_scale=scale)


@pytest.mark.parametrize("width", [100, 160, 333])
@pytest.mark.parametrize("dtype", HALVES)
def test_wide_levels_keep_their_accuracy_in_half_precision(device, dtype, width):
    problem = Problem.random(batch=1, queries=9, heads=1, sizes=[(3, width), (2, 5)], dtypes=(dtype,))
    problem.reference = torch.rand_like(problem.reference).float().double()
    dtypes = {"value": dtype, "reference": torch.float32, "points": dtype, "weights": dtype}
    problem.check(dtypes, device)


@pytest.mark.parametrize("queries", [1, 31, 33])
def test_queries_need_not_fill_a_block(device, queries):
    problem = Problem.random(batch=1, queries=queries, heads=1, channels=24, num_points=(3, 1))
    check(problem, run(problem, device))


@pytest.mark.parametrize("batch, queries", [(0, 3), (2, 0), (0, 0)])
def test_nothing_in_nothing_out(device, batch, queries):
    problem = Problem.random(batch=batch, queries=queries)
    assert run(problem, device).shape == (batch, queries, 48)


@pytest.mark.parametrize("batch", [65, 80])
def test_results_do_not_depend_on_the_batch_size(device, batch):
    problem = Problem.random(batch=batch, queries=2, heads=1, sizes=[(2, 3)], num_points=[2])
    output = run(problem, device)
    check(problem, output)
    for i in (0, batch // 2, batch - 1):
        alone = Problem(problem.sizes, *[t[i : i + 1] for t in _tensors(problem)], problem.num_points)
        assert torch.equal(run(alone, device)[0], output[i])


def _tensors(problem: Problem) -> list[torch.Tensor]:
    return [problem.value, problem.reference, problem.points, problem.weights, problem.grad]


def test_the_same_call_gives_the_same_bits(device):
    problem = Problem.random(batch=1)
    first = run(problem, device)
    assert all(torch.equal(run(problem, device), first) for _ in range(2))


def _strided(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The same numbers in another layout."""
    if kind == "permuted":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "sliced":
        return torch.stack([tensor, torch.full_like(tensor, math.nan)], -1).flatten(-2)[..., ::2]
    holder = torch.full((tensor.numel() + 1,), math.nan, dtype=tensor.dtype, device=tensor.device)
    return holder[1:].copy_(tensor.flatten()).view_as(tensor)


@pytest.mark.parametrize("kind", ["permuted", "sliced", "misaligned"])
def test_operands_may_have_any_layout(device, kind):
    problem = Problem.random(batch=2, queries=3, heads=2, dtypes=HALVES)
    names = {"value": "value", "reference": "reference_points", "points": "sampling_offsets"}
    names["weights"] = "attention_logits"
    for dtype in (torch.float32, torch.float16):
        operands = {names[n]: _strided(t.to(device, dtype), kind) for n, t in problem.operands().items()}
        assert all(kind == "misaligned" or not t.is_contiguous() for t in operands.values())
        actual, plain = run(problem, device, dtype, **operands), run(problem, device, dtype)
        # Unaligned pointers are read in smaller pieces, by a variant that may sum in another order.
        assert relative_error(actual, plain) <= (4 * torch.finfo(dtype).eps if kind == "misaligned" else 0.0)


def test_operands_may_be_expanded(device):
    problem = Problem.random(batch=2, queries=3, heads=2)
    problem.value = problem.value[:1].expand(2, -1, -1, -1)
    problem.reference = problem.reference[:, :1].expand(-1, 3, -1, -1)
    output = run(problem, device)
    check(problem, output)
    expanded = {
        "value": problem.value[:1].float().to(device).expand(2, -1, -1, -1),
        "reference_points": problem.reference[:, :1].float().to(device).expand(-1, 3, -1, -1),
    }
    assert torch.equal(run(problem, device, **expanded), output)


@pytest.mark.parametrize("ints", [torch.int32, torch.int64])
@pytest.mark.parametrize("where", ["lists", "cpu", "device"])
def test_metadata_may_be_lists_or_tensors_of_either_width(device, where, ints):
    problem = Problem.random(batch=1, queries=3, heads=1)
    # The smaller level first: a reader that ignores the starts is wrong.
    problem.value = problem.value.roll(12, 1)
    sizes, starts = torch.tensor(problem.sizes, dtype=ints), torch.tensor([12, 0], dtype=ints)
    if where == "lists":
        sizes, starts = [list(s) for s in problem.sizes], (12, 0)
    if where == "device":
        sizes, starts = sizes.to(device), starts.to(device)
    check(problem, run(problem, device, spatial_shapes=sizes, level_start_index=starts), starts=(12, 0))


def test_lists_of_tensors_are_looked_up_by_their_numbers(device):
    problem = Problem.random(batch=1, queries=3, heads=1)
    expected = run(problem, device, level_start_index=[0, 45])
    before = len(layout._layouts), len(layout._tensors)
    for _ in range(2):
        sizes = [torch.tensor(pair, device=device) for pair in problem.sizes]
        starts = list(torch.tensor([0, 45], device=device))
        assert torch.equal(run(problem, device, spatial_shapes=sizes, level_start_index=starts), expected)
    assert (len(layout._layouts), len(layout._tensors)) == before


def test_metadata_may_be_a_column_slice(device):
    problem = Problem.random(batch=1, queries=3, heads=1)
    sizes = torch.tensor([(*s, -1) for s in problem.sizes], device=device)[:, :2]
    assert torch.equal(run(problem, device, spatial_shapes=sizes), run(problem, device))


def test_rows_that_no_level_owns_are_not_read(device):
    problem = Problem.random(batch=2, queries=3, heads=2)
    expected = run(problem, device)
    padded = torch.full((2, 60, 2, 16), math.nan)
    padded[:, 2:47], padded[:, 48:] = problem.value[:, :45], problem.value[:, 45:]
    assert torch.equal(run(problem, device, value=padded.to(device), level_start_index=[2, 48]), expected)


def test_levels_may_be_empty(device):
    problem = Problem.random(batch=1, queries=3, heads=1, sizes=[(0, 4), (3, 4), (99, 0)], num_points=[2, 2, 2])
    check(problem, run(problem, device))


LIES = {
    "beyond the rows": ([(5, 9), (3, 5)], None),
    "too few pixels": ([(5, 9), (3, 3)], None),
    "negative size": ([(-5, -9), (3, 4)], [0, 45]),
    "one negative size": ([(5, 9), (-3, 4)], [0, 45]),
    "negative start": ([(5, 9), (3, 4)], [-1, 45]),
    "start too late": ([(5, 9), (3, 4)], [0, 46]),
    "product wraps around": ([(2**32, 2**32), (3, 4)], [0, 45]),
    "int32 wraps around": ([(2**32 + 5, 9), (3, 4)], [0, 45]),
}


@pytest.mark.parametrize("lie", LIES)
def test_host_metadata_that_lies_is_an_error(device, lie):
    sizes, starts = LIES[lie]
    problem = Problem.random(batch=1, queries=2, heads=1)
    for backend in ("triton", "eager"):
        with pytest.raises(ValueError, match="spatial_shapes.* value has 57 rows"):
            run(problem, device, spatial_shapes=sizes, level_start_index=starts, backend=backend)
        with pytest.raises(ValueError, match="spatial_shapes.* value has 57 rows"):
            starts_ = None if starts is None else torch.tensor(starts)
            run(problem, device, spatial_shapes=torch.tensor(sizes), level_start_index=starts_, backend=backend)


@pytest.mark.parametrize("lie", LIES)
def test_metadata_on_the_device_that_lies_gives_nan(device, lie):
    from deformops_models import ops

    sizes, starts = LIES[lie]
    problem = Problem.random(batch=1, queries=2, heads=1)
    operands = [t.float().to(device) for t in problem.operands().values()]
    sizes = torch.tensor(sizes, device=device)
    starts = None if starts is None else torch.tensor(starts, device=device)
    # The operator below `dm.msda`, because on the CPU the sizes are known and checked before.
    options = problem.num_points, True, 0.5, True, None, None
    output = ops.msda_forward(operands[0], sizes, starts, *operands[1:], *options)
    assert output.isnan().all()


@pytest.mark.parametrize("coordinates", [0, 2, 4])
@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1e20])
def test_a_location_that_is_nowhere_counts_as_absent(device, coordinates, bad):
    problem = Problem.random(batch=1, queries=3, heads=2, coordinates=coordinates)
    clean = problem.run("triton", torch.float32, device)["output"]
    problem.points[0, 1, 0, 2, 0] = problem.points[0, 1, 1, 5, 1] = bad
    actual = problem.run("triton", torch.float32, device)["output"]
    problem.points = problem.points.nan_to_num(1e9).clamp(-1e9, 1e9)
    assert torch.equal(actual, problem.run("triton", torch.float32, device)["output"])
    assert torch.equal(actual[0, ::2], clean[0, ::2])


@pytest.mark.parametrize("name", ["reference_points", "sampling_offsets", "attention_logits"])
def test_nan_in_one_query_touches_no_other(device, name):
    problem = Problem.random(batch=2, queries=4, heads=2)
    clean = run(problem, device)
    operand = {"reference_points": "reference", "sampling_offsets": "points", "attention_logits": "weights"}[name]
    bad = problem.operands()[operand].float().to(device)
    bad[0, 2] = math.nan
    output = run(problem, device, **{name: bad})
    others = torch.ones(2, 4, dtype=torch.bool)
    others[0, 2] = False
    assert torch.equal(output[others], clean[others])
    # Nowhere to look gives zero, no attention to look with gives NaN.
    own = output[0, 2]
    assert own.isnan().all() if name == "attention_logits" else own.count_nonzero() == 0


def test_softmax_does_not_overflow(device):
    problem = Problem.random(batch=1, queries=3, heads=1, num_points=(3, 2))
    expected = run(problem, device)
    for shift in (300.0, -300.0):
        logits = (problem.weights + shift).float()
        shifted = run(problem, device, attention_logits=logits.to(device))
        torch.testing.assert_close(shifted, expected, rtol=1e-3, atol=1e-4)
    one = torch.full_like(logits, -math.inf)
    one[..., 1] = 0
    problem.weights = one.double()
    assert run(problem, device).isfinite().all()
    check(problem, run(problem, device))
