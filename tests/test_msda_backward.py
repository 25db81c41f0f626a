"""The backward kernel against the specification, and every result of the forward with it."""

import itertools
import math

import pytest
import torch
from helpers import Problem, assert_within_budget, deterministic, poisoned

import deformops_models as dm

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAMES = ("value", "reference", "points", "weights")
LEVELS = [(5, 9), (3, 4), (6, 2), (2, 3), (1, 7), (4, 1), (3, 2), (7, 5)]


@pytest.mark.parametrize("channels", [16, 24, 32, 40, 48, 64, 128])
def test_head_widths(device, channels):
    problem = Problem.random(batch=1, queries=5, heads=2, channels=channels, num_points=(2, 1))
    problem.check(F32, device)


@pytest.mark.parametrize("levels", range(1, 9))
def test_levels(device, levels):
    Problem.random(
        batch=1, queries=8, heads=2, sizes=LEVELS[:levels], num_points=[2] * levels, reference_levels=levels
    ).check(F32, device)


@pytest.mark.parametrize("points", [1, 2, 3, 5, 8, 13, 16])
def test_points(device, points):
    Problem.random(batch=1, queries=8, heads=2, num_points=[points] * 2).check(F32, device)


@pytest.mark.parametrize("num_points", [(3, 6, 3), (1, 16, 5), (4, 1, 2)])
@pytest.mark.parametrize("coordinates", [0, 2, 4])
def test_points_may_differ_per_level(device, num_points, coordinates):
    problem = Problem.random(
        batch=1, queries=6, heads=2, sizes=LEVELS[:3], num_points=num_points, coordinates=coordinates
    )
    problem.check(F32, device)


@pytest.mark.parametrize("coordinates, reference_levels", [(0, None), (2, 2), (2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_coordinates(device, coordinates, reference_levels, dtype):
    problem = Problem.random(
        batch=1, queries=5, heads=2, num_points=(2, 1), coordinates=coordinates, reference_levels=reference_levels,
        dtypes=(dtype,),
    )  # fmt: skip
    problem.check(dtype, device)
    if coordinates == 0:
        problem.check(dtype, device, method="softmax")


MIXES = [
    (F16, F32, F32, F32),
    (BF16, F32, BF16, F32),
    (F32, BF16, F16, BF16),
    (BF16, F16, F32, F16),
    (F16, BF16, F16, BF16),
]


def check_mix(mix, device):
    problem = Problem.random(batch=1, queries=8, heads=2, sizes=[(5, 9)], num_points=[3], dtypes=(BF16, F16))
    problem.check(dict(zip(NAMES, mix, strict=True)), device)


@pytest.mark.parametrize("mix", MIXES)
def test_dtypes_may_be_mixed(device, mix):
    check_mix(mix, device)


def every_triple() -> list[tuple[torch.dtype, ...]]:
    """27 of the 81 mixes of four operands, in which any three of them take each of their 27 mixes once."""
    dtypes = (F32, F16, BF16)
    return [tuple(dtypes[i] for i in (a, b, c, (a + b + c) % 3)) for a, b, c in itertools.product(range(3), repeat=3)]


@pytest.mark.gpu
@pytest.mark.parametrize("mix", every_triple())
def test_every_mix_of_three_dtypes(mix):
    check_mix(mix, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("mix", list(itertools.product([F32, F16, BF16], repeat=3)))
def test_every_mix_of_dtypes_at_locations(mix):
    problem = Problem.random(
        batch=1, queries=8, heads=2, sizes=[(5, 9)], num_points=[3], coordinates=0, dtypes=(BF16, F16)
    )
    problem.check(dict(zip(("value", "points", "weights"), mix, strict=True)), "cuda", method="linear")


@pytest.mark.parametrize("batch, queries", [(1, 1), (1, 33), (65, 2), (0, 3), (2, 0)])
def test_batches_and_queries_of_any_size(device, batch, queries):
    problem = Problem.random(
        batch=batch,
        queries=queries,
        heads=8 if batch == 1 else 1,
        channels=24,
        sizes=[(2, 3), (3, 1)],
        num_points=(1, 2),
    )
    if batch * queries:
        problem.check(F32, device)
        return
    results = problem.run("triton", F32, device)
    assert results["grad_value"].shape == problem.value.shape
    assert results["grad_value"].count_nonzero() == 0
    assert results["grad_points"].shape == problem.points.shape


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_four_thousand_contributions_of_one_are_not_lost(device, dtype):
    queries = 4096 // (8 * 16)
    value = torch.zeros(1, 1, 1, 2, dtype=dtype, device=device, requires_grad=True)
    points = torch.full((1, queries, 1, 8, 16, 2), 0.5, device=device)
    weights = torch.ones(1, queries, 1, 8, 16, device=device)
    output = dm.msda(value, [(1, 1)] * 8, [0] * 8, points, weights, backend="triton")
    output.backward(torch.ones_like(output))
    assert value.grad.dtype == dtype
    assert value.grad.flatten().tolist() == [4096.0, 4096.0]


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_the_accumulator_of_the_value_gradient_can_be_chosen(device, dtype):
    problem = Problem.random(batch=1, queries=8, heads=2, num_points=(1, 1), dtypes=(dtype,))
    problem.check(dtype, device, fp32_grad_accum=True)
    # Few contributions per pixel, so that a half accumulator holds them to a few roundings.
    actual = problem.run("triton", dtype, device, fp32_grad_accum=False)["grad_value"]
    expected = problem.run("eager", dtype)["grad_value"]
    assert actual.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.cpu(), expected, rtol=8 * eps, atol=8 * eps * expected.abs().max().item())


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("coordinates", [0, 2])
def test_the_incoming_gradient_may_have_any_layout(device, kind, coordinates):
    grad = torch.randn(2, 3, 32, device=device)
    if kind == "transposed":
        grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "sliced":
        grad = torch.stack([grad, torch.full_like(grad, math.nan)], -1)[..., 0]
    if kind == "expanded":
        grad = grad[:1, :1, :1].expand(2, 3, 32)
    assert not grad.is_contiguous()
    problem = Problem.random(batch=2, queries=3, heads=2, coordinates=coordinates, num_points=(2, 1))
    problem.grad = grad.double().cpu()
    leaves = {n: t.float().to(device).requires_grad_() for n, t in problem.operands().items()}
    value, *rest = leaves.values()
    run = dm.deformable_attention if coordinates else dm.msda
    output = run(value, problem.sizes, None, *rest, num_points=problem.num_points, backend="triton")
    with poisoned():
        actual = torch.autograd.grad(output, list(leaves.values()), grad)
    exact, plain = problem.run("eager"), problem.run("eager", F32)
    for name, result in zip(leaves, actual, strict=True):
        assert_within_budget(result, exact[f"grad_{name}"], plain[f"grad_{name}"], name, problem.longest)


def test_a_sum_after_the_operator_sends_an_expanded_gradient(device):
    problem = Problem.random(batch=1, queries=3, heads=2)
    problem.grad = torch.ones_like(problem.grad)
    expected = problem.run("triton", F32, device)
    leaves = {n: t.float().to(device).requires_grad_() for n, t in problem.operands().items()}
    value, *rest = leaves.values()
    dm.deformable_attention(
        value, problem.sizes, None, *rest, num_points=problem.num_points, backend="triton"
    ).sum().backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, expected[f"grad_{name}"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wanted", [(n,) for n in NAMES] + [("reference", "weights"), ("value", "points")])
def test_only_the_gradients_that_are_wanted(device, wanted):
    problem = Problem.random(batch=1, queries=3, heads=1, coordinates=4)
    expected = problem.run("triton", F32, device)
    operands = {n: t.float().to(device).requires_grad_(n in wanted) for n, t in problem.operands().items()}
    value, *rest = operands.values()
    output = dm.deformable_attention(value, problem.sizes, None, *rest, num_points=problem.num_points, backend="triton")
    output.backward(problem.grad.float().to(device))
    for name, tensor in operands.items():
        if name in wanted:
            torch.testing.assert_close(tensor.grad, expected[f"grad_{name}"], rtol=1e-5, atol=1e-6)
        else:
            assert tensor.grad is None


def test_the_backward_pass_is_told_sizes_that_are_numbers(device):
    problem = Problem.random(batch=1, queries=3, heads=1)
    value, *rest = (t.float().to(device) for t in problem.operands().values())
    value.requires_grad_()
    for sizes, known in (
        ([torch.tensor(pair) for pair in problem.sizes], [5, 9, 3, 4]),
        (problem.sizes, [5, 9, 3, 4]),
        (torch.tensor(problem.sizes), None),
    ):
        output = dm.deformable_attention(value, sizes, None, *rest, num_points=problem.num_points, backend="triton")
        assert output.grad_fn.options[-1] == known


def test_no_gradient_wanted_saves_nothing(device):
    problem = Problem.random(batch=1, queries=3, heads=1)
    value, *rest = (t.float().to(device) for t in problem.operands().values())
    output = dm.deformable_attention(value, problem.sizes, None, *rest, num_points=problem.num_points, backend="triton")
    assert not output.requires_grad


@pytest.mark.parametrize("coordinates", [0, 2, 4])
@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1e20])
def test_a_location_that_is_nowhere_has_no_gradient(device, coordinates, bad):
    problem = Problem.random(batch=1, queries=3, heads=2, coordinates=coordinates, num_points=(3, 4))
    problem.points[0, 1, 0, 2, 0] = problem.points[0, 1, 1, 5, 1] = bad
    actual = problem.run("triton", F32, device)
    problem.points = problem.points.nan_to_num(1e9).clamp(-1e9, 1e9)
    exact = problem.run("eager")
    for name, result in actual.items():
        torch.testing.assert_close(result.cpu().double(), exact[name], rtol=1e-4, atol=1e-4, msg=name)
    assert actual["grad_points"][0, 1, 0, 2].tolist() == [0, 0]
    assert actual["grad_points"][0, 1, 1, 5].tolist() == [0, 0]


@pytest.mark.parametrize("coordinate", range(4))
def test_a_reference_that_is_not_finite_has_no_gradient(device, coordinate):
    problem = Problem.random(batch=1, queries=3, heads=2, coordinates=4)
    problem.reference[0, 1, 0, coordinate] = math.nan
    problem.reference[0, 2, 1, coordinate] = math.inf
    results = problem.run("triton", F32, device)
    for name, result in results.items():
        assert result.isfinite().all(), name
    assert results["grad_reference"][0, 1, 0].tolist() == [0] * 4
    assert results["grad_points"][0, 2, :, 4:].count_nonzero() == 0


@pytest.mark.parametrize("operand", ["reference", "points", "weights"])
def test_nan_in_one_query_touches_no_other(device, operand):
    problem = Problem.random(batch=1, queries=4, heads=2)
    clean = problem.run("triton", F32, device)
    problem.operands()[operand][0, 2] = math.nan
    bad = problem.run("triton", F32, device)
    for name in ("grad_reference", "grad_points", "grad_weights"):
        assert torch.equal(bad[name][0, [0, 1, 3]], clean[name][0, [0, 1, 3]]), name
    if operand != "weights":
        assert bad["grad_value"].isfinite().all()


def test_nan_attention_reaches_only_the_pixels_it_looks_at(device):
    problem = Problem.random(batch=2, queries=4, heads=2, sizes=[(4, 9)], num_points=[1])
    problem.points.zero_()
    problem.reference[1, 2] = torch.tensor([0.5 / 9, 0.5 / 4])
    problem.weights[1, 2, 0] = math.nan
    grad = problem.run("triton", F32, device)["grad_value"].isnan()
    assert grad[0].sum() == 0 and grad[1, :, 1].sum() == 0
    assert grad[1, 0, 0].all()
    assert not grad[1, [2, 3, 4, 5, 6, 7, 8, *range(11, 36)], 0].any()


def test_softmax_gradients_do_not_overflow(device):
    # Three points fill a tile of four: the fourth must not leak into the sums.
    for coordinates, shift in ((2, 300.0), (4, -300.0)):
        problem = Problem.random(batch=1, queries=8, heads=2, num_points=(3, 5), coordinates=coordinates)
        problem.weights = (problem.weights + shift).float().double()
        problem.check(F32, device)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_what_all_values_share_does_not_drown_the_gradient_of_the_logits(device, dtype):
    problem = Problem.random(batch=1, queries=8, heads=2, channels=32, sizes=[(25, 29), (13, 14)], coordinates=0)
    problem.points = problem.points.clamp(0.1, 0.9)
    problem.value = problem.value + 10
    for name, tensor in problem.operands().items():
        setattr(problem, name, tensor.to(dtype).double())
    problem.grad = problem.grad.to(dtype).double()
    problem.check(dtype, device, method="softmax")


def test_metadata_that_lies_gives_no_wild_writes(device):
    from deformops_models import ops

    problem = Problem.random(batch=1, queries=2, heads=1)
    value, reference, points, weights = (t.float().to(device) for t in problem.operands().values())
    for sizes, starts in (
        ([(2**20, 2**20), (3, 4)], None),
        ([(5, 9), (3, 4)], [2**40, -(2**40)]),
        ([(-5, 9), (3, 4)], [0, 45]),
    ):
        sizes = torch.tensor(sizes, device=device)
        starts = None if starts is None else torch.tensor(starts, device=device)
        arguments = (value, sizes, starts, reference, points, weights, problem.num_points, True, 0.5, True, None, None)
        grads = ops.msda_backward(problem.grad.float().to(device), *arguments, True, True)
        assert [g.shape for g in grads] == [value.shape, reference.shape, points.shape, weights.shape]


def test_deterministic_mode_alerts(device):
    problem = Problem.random(batch=1, queries=2, heads=1)
    with (
        deterministic(warn_only=False),
        pytest.raises(RuntimeError, match=r"msda_backward does not have a deterministic .*backend='eager'"),
    ):
        problem.run("triton", F32, device)
    with deterministic(warn_only=True), pytest.warns(UserWarning, match="msda_backward does not have a determin"):
        problem.run("triton", F32, device)


def test_deterministic_mode_lets_through_what_needs_no_value_gradient(device):
    problem = Problem.random(batch=1, queries=3, heads=2)
    value, *rest = (t.float().to(device) for t in problem.operands().values())
    leaves = [t.requires_grad_() for t in rest]
    runs = []
    for _ in range(2):
        with deterministic(warn_only=False):
            output = dm.deformable_attention(
                value, problem.sizes, None, *leaves, num_points=problem.num_points, backend="triton"
            )
            runs.append(torch.autograd.grad(output, leaves, problem.grad.float().to(device)))
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*runs, strict=True))


def test_the_plain_path_is_deterministic(device):
    problem = Problem.random(batch=1, queries=5, heads=2)
    with deterministic(warn_only=False):
        first, second = (problem.run("eager", F32, device) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_a_second_derivative_is_refused(device):
    problem = Problem.random(batch=1, queries=2, heads=1)
    value, *rest = (t.float().to(device).requires_grad_() for t in problem.operands().values())
    output = dm.deformable_attention(value, problem.sizes, None, *rest, num_points=problem.num_points, backend="triton")
    (grad,) = torch.autograd.grad(output.sum(), value, create_graph=True)
    with pytest.raises(NotImplementedError, match="backend='eager'"):
        grad.sum().backward()


def test_the_kernel_runs_and_is_counted(device):
    problem = Problem.random(batch=1, queries=2, heads=1)
    before = dm.call_counts.copy()
    problem.run("triton", F32, device)
    problem.run("eager", F32, device)
    assert {n: dm.call_counts[n] - before[n] for n in ("msda_forward", "msda_backward")} == {
        "msda_forward": 1,
        "msda_backward": 1,
    }


def test_gradients_accumulate_over_several_backwards(device):
    problem = Problem.random(batch=1, queries=2, heads=1)
    once = problem.run("triton", F32, device)["grad_value"]
    value, *rest = (t.float().to(device) for t in problem.operands().values())
    value.requires_grad_()
    with poisoned():
        for _ in range(2):
            output = dm.deformable_attention(
                value, problem.sizes, None, *rest, num_points=problem.num_points, backend="triton"
            )
            output.backward(problem.grad.float().to(device))
    torch.testing.assert_close(value.grad, 2 * once)
