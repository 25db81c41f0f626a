"""The CUDA C++ kernels: each problem compiles without a GPU; on one every result is within the error budget."""

import ctypes
import struct

import pytest
import torch
from helpers import Problem, deterministic, relative_error

import deformops_models as dm
from deformops_models import layout, ops
from deformops_models.kernels import _nvrtc, msda_cuda

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
GIB = 2**30


# Without a GPU


@pytest.mark.skipif(torch.version.cuda is None or _nvrtc.problem() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "problem",
    [
        msda_cuda.Problem(BF16, BF16, BF16, F32, 32, 8, (4, 4, 4, 4), 2, 4, True),
        msda_cuda.Problem(F16, F16, F16, F16, 64, 8, (3, 6, 3), 4, 1, True),
        msda_cuda.Problem(F32, F32, F32, F32, 128, 2, (2,), 0, 1, False),
        msda_cuda.Problem(BF16, F32, F16, F32, 16, 16, (1, 16), 0, 1, True),
    ],
    ids=str,
)
def test_compiles_ahead_of_time(problem, architecture):
    binary = _nvrtc.compile_source(msda_cuda.source(problem), architecture)
    for name in ("msda_forward", "msda_backward_points", "msda_count", "msda_sort", "msda_gather"):
        assert name.encode() in binary


@pytest.mark.skipif(torch.version.cuda is None or _nvrtc.problem() is not None, reason="needs NVRTC")
def test_a_compilers_error_is_shown():
    with pytest.raises(RuntimeError, match=r'cannot compile the kernels:\n.*identifier "nonsense"'):
        _nvrtc.compile_source("__device__ int x = nonsense;", "sm_80")


ROOM = 227 << 10  # bytes of shared memory of a block on SM 9.0
SIZES = ((100, 167), (50, 84), (25, 42), (13, 21))


@pytest.mark.parametrize("queries, channels", [(22223, 32), (300, 32), (22223, 64), (22223, 128), (1, 16)])
def test_every_tile_has_its_warps(queries, channels):
    tiling = msda_cuda.tiling(SIZES, (4,) * 4, queries, 16, channels, ROOM)
    levels = list(struct.iter_unpack("9i", tiling.grids))
    assert [level[:3] for level in levels] == [(100, 167, 0), (50, 84, 16700), (25, 42, 20900), (13, 21, 21950)]
    assert [level[3:5] for level in levels] == [(21, 525), (11, 143), (6, 42), (3, 12)]
    assert [level[5] for level in levels] == [0, 2101, 2101 + 573, 2101 + 573 + 169]
    assert tiling.keys == 4 * (525 + 143 + 42 + 12) + 4 and tiling.level_keys == 2101
    block = partials = 0
    for level in reversed(levels):
        tiles, first_block, splits = level[4], level[6], level[7]
        assert first_block == block and splits in (1, 2, 4, 8, 16, 32, 64) and splits <= 8 * tiling.warps
        block += -(-tiles * splits // tiling.warps)
    for level in levels:
        assert level[8] == partials
        partials += level[4] * level[7] // tiling.warps if level[7] > tiling.warps else 0
    assert (tiling.blocks, tiling.partials) == (block, partials)
    assert tiling.chunks * tiling.chunk >= queries > (tiling.chunks - 1) * tiling.chunk


def test_levels_that_the_sort_has_no_room_for():
    assert msda_cuda.tiling(((1000, 1000),), (4,), 300, 8, 32, ROOM) is None
    assert msda_cuda.tiling(((100, 167),), (4,), 300, 8, 32, ROOM) is not None
    assert msda_cuda.tiling(((100, 167),), (4,), 300, 8, 32, 40 << 10) is None
    assert msda_cuda.tiling(((0, 7),), (4,), 300, 8, 32, ROOM) is None


@pytest.mark.parametrize(
    "shape, queries, num_points, reason",
    [
        ((1, 9, 1, 24), 5, (4,), "24 channels"),
        ((1, 9, 1, 32), 5, (40, 40), "80 points"),
        ((0, 9, 1, 32), 5, (4,), "nothing to compute"),
        ((1, 9, 1, 32), 0, (4,), "nothing to compute"),
        ((2**16, 9, 1, 32), 5, (4,), "too large"),
    ],
)
def test_what_the_kernels_do_not_take(shape, queries, num_points, reason):
    assert reason in msda_cuda.problem(torch.Size(shape), queries, num_points)
    assert msda_cuda.problem(torch.Size((2, 9, 8, 32)), 5, (4, 4)) is None


def test_sizes_are_known_of_lists_and_of_copied_tensors():
    sizes = ((5, 9), (3, 4))
    shapes, starts = layout.device_layout(sizes, None, 57, torch.device("cpu"))
    assert starts is None and layout.known_sizes(shapes, None, 57) == sizes
    assert layout.known_sizes(shapes, None, 58) is None
    _, gap = layout.device_layout(sizes, [0, 46], 58, torch.device("cpu"))
    assert layout.known_sizes(shapes, gap, 58) is None
    _, following = layout.device_layout(sizes, [0, 45], 57, torch.device("cpu"))
    assert layout.known_sizes(shapes, following, 57) == sizes
    assert layout.known_sizes(torch.tensor(sizes), None, 57) is None


class Driver:
    """Stands in for the driver's library: `results` are the next launches' error codes."""

    def __init__(self, *results: int):
        self.results, self.calls = list(results), []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == "cuLaunchKernel":
                buffer = ctypes.cast(arguments[-1][1], ctypes.POINTER(ctypes.c_char))
                self.arguments = buffer[: ctypes.cast(arguments[-1][3], ctypes.POINTER(ctypes.c_size_t))[0]]
                self.shape = arguments[1:8]
                return self.results.pop(0)
            return 0

        return call


@pytest.fixture
def launch(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    _nvrtc._context.cache_clear()

    def run(driver):
        monkeypatch.setattr(_nvrtc, "_driver", lambda: driver)
        kernel = _nvrtc.Kernel("example", ctypes.c_void_p(1), struct.Struct("P2ifP"), 0)
        kernel((3, 2, 1), 64, 2**40, 5, -6, 0.5, 7, shared_bytes=99)

    yield run
    _nvrtc._context.cache_clear()


def test_a_launch_passes_its_arguments(launch):
    driver = Driver(0)
    launch(driver)
    assert driver.calls == ["cuLaunchKernel"] and driver.shape == (3, 2, 1, 64, 1, 1, 99)
    # As a C struct: the pointer after the float begins at a multiple of 8.
    assert driver.arguments == struct.pack("<QiifxxxxQ", 2**40, 5, -6, 0.5, 7)


def test_a_thread_without_a_context_gets_torchs(launch):
    driver = Driver(201, 0)
    launch(driver)
    made = ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert driver.calls == ["cuLaunchKernel", *made, "cuLaunchKernel"]


def test_an_error_of_the_driver_names_the_kernel(launch):
    with pytest.raises(RuntimeError, match="example: cuLaunchKernel: CUDA error 700"):
        launch(Driver(700))


def test_cuda_is_refused_where_it_cannot_run():
    problem = Problem.random(channels=32)
    with pytest.raises(RuntimeError, match="backend='cuda' cannot run: tensors are on cpu"):
        problem.run("cuda", F32)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_head_widths(channels, dtype):
    Problem.random(queries=37, heads=2, channels=channels, num_points=(2, 1), dtypes=(dtype,)).check(
        dtype, "cuda", "cuda"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("coordinates, reference_levels", [(0, None), (2, 2), (2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("num_points", [(2, 2), (3, 1)])
def test_coordinates(coordinates, reference_levels, dtype, num_points):
    problem = Problem.random(
        queries=20, channels=32, num_points=num_points, coordinates=coordinates, reference_levels=reference_levels,
        dtypes=(dtype,),
    )  # fmt: skip
    problem.check(dtype, "cuda", "cuda")
    if coordinates == 0:
        problem.check(dtype, "cuda", "cuda", method="softmax")


@pytest.mark.gpu
@pytest.mark.parametrize("levels, points", [(1, 1), (1, 5), (3, 4), (5, 4), (8, 8), (4, 16)])
def test_levels_and_points(levels, points):
    sizes = [(5, 9), (3, 4), (6, 2), (2, 3), (1, 7), (4, 1), (3, 2), (17, 33)][-levels:]
    Problem.random(batch=1, queries=40, heads=2, channels=32, sizes=sizes, num_points=[points] * levels).check(
        F32, "cuda", "cuda"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(BF16, F32, F32, F32), (F16, F32, BF16, F32), (F32, BF16, F16, BF16)], ids=str)
def test_mixes_of_dtypes(dtypes):
    problem = Problem.random(queries=30, channels=32, dtypes=tuple(set(dtypes)))
    problem.check(dict(zip(("value", "reference", "points", "weights"), dtypes, strict=True)), "cuda", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("queries, heads, sizes", [(5000, 2, ((9, 17), (3, 4))), (2500, 8, ((40, 70), (7, 5)))])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("at_once", [16 << 10, 24 << 20])
def test_long_lists_chunks_and_slices(monkeypatch, queries, heads, sizes, dtype, at_once):
    """Tiles that several blocks share, several chunks of queries, and pairs that are sorted one after the other."""
    monkeypatch.setattr(msda_cuda, "RECORD_BYTES", at_once)
    tiling = msda_cuda.tiling(sizes, (4, 4), queries, 2 * heads, 32, ROOM)
    assert tiling.chunks > 1 and tiling.partials > 0
    Problem.random(queries=queries, heads=heads, channels=32, sizes=sizes, dtypes=(dtype,)).check(dtype, "cuda", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [50, 5000])
def test_gradients_repeat_bit_by_bit(queries):
    problem = Problem.random(queries=queries, channels=32, dtypes=(BF16,))
    with deterministic(warn_only=False):
        first = problem.run("cuda", BF16, "cuda")
        for _ in range(20):
            for name, result in problem.run("cuda", BF16, "cuda").items():
                assert torch.equal(result, first[name]), name


@pytest.mark.gpu
def test_operands_may_begin_anywhere():
    problem = Problem.random(queries=30, channels=32, dtypes=(F16,))
    exact = problem.run("eager")

    def shifted(t):
        return torch.empty(t.numel() + 1, dtype=F16, device="cuda")[1:].view(t.shape).copy_(t).requires_grad_()

    leaves = [shifted(t) for t in problem.operands().values()]
    output = dm.deformable_attention(
        leaves[0], problem.sizes, None, *leaves[1:], num_points=problem.num_points, backend="cuda"
    )
    results = [output, *torch.autograd.grad(output, leaves, shifted(problem.grad).detach())]
    for result, expected in zip(results, exact.values(), strict=True):
        assert relative_error(result, expected) < 5e-3


@pytest.mark.gpu
def test_sizes_on_the_device_are_learned_without_waiting():
    problem = Problem.random(queries=60, channels=32)
    sizes, starts = torch.tensor(problem.sizes, device="cuda"), torch.tensor([0, 45], device="cuda")
    exact = problem.run("eager")
    with deterministic(warn_only=False):
        actual = problem.run("cuda", F32, "cuda", sizes=sizes, starts=starts)
    assert layout.known_sizes(sizes, starts, 57) == tuple(problem.sizes)
    for name, result in actual.items():
        assert relative_error(result, exact[name]) < 1e-5
    sizes += 0
    assert layout.known_sizes(sizes, starts, 57) is None


@pytest.mark.gpu
def test_overlapping_levels_run_tritons_backward():
    problem = Problem.random(queries=20, channels=32, sizes=((5, 9), (5, 9)))
    problem.value = problem.value[:, :50]
    exact = problem.run("eager", starts=[0, 5])
    actual = problem.run("cuda", F32, "cuda", starts=[0, 5])
    for name, result in actual.items():
        assert relative_error(result, exact[name]) < 1e-5
    with deterministic(warn_only=False), pytest.raises(RuntimeError, match="does not have a deterministic"):
        problem.run("cuda", F32, "cuda", starts=[0, 5])


@pytest.mark.gpu
def test_what_is_not_finite_shows():
    problem = Problem.random(batch=1, queries=4, heads=1, channels=32)
    problem.points[0, 1] = float("nan")
    problem.points[0, 2] = float("inf")
    results = problem.run("cuda", F32, "cuda")
    exact = problem.run("eager")
    for name, result in results.items():
        assert result.isfinite().all() == exact[name].isfinite().all()
        assert relative_error(result, exact[name]) < 1e-5
    problem.grad[0, 0] = float("nan")
    found, expected = (problem.run(b, F32, "cuda")["grad_value"].isnan() for b in ("cuda", "eager"))
    assert expected.any() and (found | ~expected).all()


@pytest.mark.gpu
@pytest.mark.parametrize("need_value", [True, False])
@pytest.mark.parametrize("need_reference", [True, False])
def test_only_the_gradients_that_are_asked_for(need_value, need_reference):
    problem = Problem.random(queries=20, channels=32)
    exact = problem.run("eager")
    needed = (need_value, need_reference, True, True)
    leaves = [
        t.detach().float().cuda().requires_grad_(need)
        for t, need in zip(problem.operands().values(), needed, strict=True)
    ]
    output = dm.deformable_attention(
        leaves[0], problem.sizes, None, *leaves[1:], num_points=problem.num_points, backend="cuda"
    )
    output.backward(problem.grad.to(output))
    for name, leaf in zip(problem.operands(), leaves, strict=True):
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.grad is not None:
            assert relative_error(leaf.grad, exact[f"grad_{name}"]) < 1e-5


@pytest.mark.gpu
def test_a_training_step_needs_little_memory():
    sizes = ((100, 167), (50, 84), (25, 42), (13, 21))
    rows = sum(h * w for h, w in sizes)
    value = torch.randn(2, rows, 8, 32, device="cuda", dtype=BF16, requires_grad=True)
    offsets = torch.randn(2, rows, 8, 4, 4, 2, device="cuda", dtype=BF16, requires_grad=True)
    logits = torch.randn(2, rows, 8, 4, 4, device="cuda", dtype=BF16, requires_grad=True)
    reference = torch.rand(2, rows, 4, 2, device="cuda")
    grad = torch.randn(2, rows, 256, device="cuda", dtype=BF16)

    def step():
        output = dm.deformable_attention(value, sizes, None, reference, offsets, logits)
        return output, torch.autograd.grad(output, (value, offsets, logits), grad)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = step()
    torch.cuda.synchronize()
    assert (torch.cuda.max_memory_allocated() - before) / 2**20 < 0.7 * 119
    del results


@pytest.mark.gpu
def test_opcheck_of_the_cuda_kernels():
    problem = Problem.random(queries=9, channels=32)
    value, reference, points, weights = (t.float().cuda().requires_grad_() for t in problem.operands().values())
    shapes, _ = layout.device_layout(problem.sizes, None, 57, value.device)
    torch.library.opcheck(
        ops.msda_forward, (value, shapes, None, reference, points, weights, [4, 4], True, 0.5, True, "cuda")
    )
