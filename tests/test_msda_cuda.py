"""The CUDA C++ kernels, compiled for GPUs without one, run thread by thread on the CPU, and run on a GPU."""

import contextlib
import ctypes
import functools
import shutil
import struct

import emulator
import pytest
import torch
from helpers import Problem, deterministic, relative_error

import deformops_models as dm
from deformops_models import api, layout, ops
from deformops_models.backend import Backend, Resolution, interpreting
from deformops_models.kernels import _driver, _nvrtc, msda_cuda

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
GIB = 2**30


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(params=[pytest.param("cpu", id="emulator"), pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request, monkeypatch) -> tuple[str, str]:
    """Device and backend whose operators run the CUDA kernels; on the CPU in the place of Triton's interpreter."""
    if request.param == "cuda":
        return "cuda", "cuda"
    if not interpreting():
        pytest.skip("the kernels are compiled in this process, so they do not run on the CPU")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    build = functools.partial(emulator.Module, folder=request.getfixturevalue("libraries"))
    monkeypatch.setattr(msda_cuda, "_module", lambda problem, device: build(problem))
    monkeypatch.setattr(msda_cuda, "current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(_driver, "shared_memory", lambda device: ROOM)
    monkeypatch.setattr(ops, "_use_cuda", lambda *arguments: True)
    msda_cuda._kernel.cache_clear()
    request.addfinalizer(msda_cuda._kernel.cache_clear)
    return "cpu", "triton"


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
    keys = block = partials = 0
    for (height, width), level in zip(SIZES, levels, strict=True):
        _, _, _, tiles_x, tiles, first_key, _, split_bits, first_partial = level
        splits = 1 << split_bits
        assert tiles_x == -(-width // 8) and tiles == tiles_x * -(-height // 4)
        assert (first_key, first_partial) == (keys, partials)
        assert splits in (1, 2, 4, 8, 16, 32, 64) and splits <= 8 * tiling.warps
        keys += 4 * tiles + 1
        partials += tiles * splits // tiling.warps if splits > tiling.warps else 0
    for level in reversed(levels):
        assert level[6] == block
        block += -(-(level[4] << level[7]) // tiling.warps)
    assert (tiling.keys, tiling.blocks, tiling.partials) == (keys, block, partials)
    assert tiling.level_keys == 4 * max(level[4] for level in levels) + 1
    assert tiling.chunks * tiling.chunk >= queries > (tiling.chunks - 1) * tiling.chunk


def test_the_count_takes_most_queries_then_keeps_most_warps_on_a_multiprocessor():
    assert msda_cuda._count_blocks(2101, 4, 9999, ROOM) == (11, 8, 2104 * 20 + (32 << 10))
    assert msda_cuda._count_blocks(8401, 4, 9999, ROOM) == (11, 8, 8408 * 20 + (32 << 10))
    assert msda_cuda._count_blocks(24577, 4, 9999, ROOM) == (11, 2, 24584 * 8 + (32 << 10))
    assert msda_cuda._count_blocks(2101, 4, 300, ROOM) == (11, 8, 2104 * 20 + 4800)
    # Shared memory of SM 8.6.
    assert msda_cuda._count_blocks(8401, 4, 9999, 97 << 10) == (11, 1, 8408 * 6 + (32 << 10))
    assert msda_cuda._count_blocks(2101, 16, 9999, 97 << 10) == (10, 4, 2104 * 12 + (64 << 10))


@pytest.mark.parametrize(
    "room, points, chunks", [(227, 4, 11), (227, 16, 11), (163, 16, 11), (99, 4, 11), (99, 16, 22)]
)
def test_chunks_fit_into_shared_memory(room, points, chunks):
    tiling = msda_cuda.tiling(SIZES, (points,) * 4, 22223, 16, 32, room << 10)
    assert tiling.chunks == chunks and tiling.chunks * tiling.chunk >= 22223
    assert tiling.shared_bytes + msda_cuda.STATIC_BYTES <= room << 10


def test_levels_that_the_sort_has_no_room_for():
    assert msda_cuda.tiling(((1000, 1000),), (4,), 300000, 8, 32, ROOM) is None
    assert msda_cuda.tiling(((384, 512),), (4,), 300000, 8, 32, ROOM).count_warps == 2
    assert msda_cuda.tiling(((384, 512),), (4,), 300000, 8, 32, 99 << 10) is None
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


def test_nothing_to_compute_is_no_reason_to_refuse(monkeypatch):
    resolution = Resolution(Backend.CUDA, {})
    monkeypatch.setattr(api, "resolve", lambda *arguments: resolution)
    for shape, queries in (((0, 9, 1, 32), 5), ((2, 9, 1, 32), 0)):
        facts = (torch.float32, torch.device("cuda"))
        points = torch.Size((shape[0], queries, 1, 1, 4, 2))
        operands = (torch.Size(shape), *facts), (points, *facts), (points[:-1], *facts)
        names = ("value", "sampling_locations", "attention_weights")
        assert api._checked.__wrapped__(names, *operands, None, 1, None, Backend.CUDA)[0] == [4]


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
    _driver._context.cache_clear()

    def run(driver):
        monkeypatch.setattr(_driver, "_driver", lambda: driver)
        kernel = _nvrtc.Kernel("example", ctypes.c_void_p(1), struct.Struct("P2ifP"), 0)
        kernel((3, 2, 1), 64, 2**40, 5, -6, 0.5, 7, shared_bytes=99)

    yield run
    _driver._context.cache_clear()


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


# On a GPU, and emulated


@pytest.mark.parametrize("channels", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_head_widths(target, channels, dtype):
    Problem.random(queries=37, heads=2, channels=channels, num_points=(2, 1), dtypes=(dtype,)).check(dtype, *target)


@pytest.mark.parametrize("coordinates, reference_levels", [(0, None), (2, 2), (2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("num_points", [(2, 2), (3, 1)])
def test_coordinates(target, coordinates, reference_levels, dtype, num_points):
    problem = Problem.random(
        queries=20, channels=32, num_points=num_points, coordinates=coordinates, reference_levels=reference_levels,
        dtypes=(dtype,),
    )  # fmt: skip
    problem.check(dtype, *target)
    if coordinates == 0:
        problem.check(dtype, *target, method="softmax")


@pytest.mark.parametrize("levels, points", [(1, 1), (1, 5), (3, 4), (5, 4), (8, 8), (4, 16)])
def test_levels_and_points(target, levels, points):
    sizes = [(5, 9), (3, 4), (6, 2), (2, 3), (1, 7), (4, 1), (3, 2), (17, 33)][-levels:]
    Problem.random(batch=1, queries=40, heads=2, channels=32, sizes=sizes, num_points=[points] * levels).check(
        F32, *target
    )


@pytest.mark.parametrize("dtypes", [(BF16, F32, F32, F32), (F16, F32, BF16, F32), (F32, BF16, F16, BF16)], ids=str)
def test_mixes_of_dtypes(target, dtypes):
    problem = Problem.random(queries=30, channels=32, dtypes=tuple(set(dtypes)))
    problem.check(dict(zip(("value", "reference", "points", "weights"), dtypes, strict=True)), *target)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("at_once", [1, 24 << 20])
@pytest.mark.parametrize("channels, warp_samples", [(32, 2), (32, 99), (64, 4), (16, 8)])
def test_long_lists_chunks_and_slices(target, monkeypatch, dtype, at_once, channels, warp_samples):
    """Tiles that several warps and blocks share, chunks of queries, and pairs that are sorted one after the other."""
    sizes, queries = ((9, 17), (3, 4)), 80
    monkeypatch.setattr(msda_cuda, "RECORD_BYTES", at_once)
    monkeypatch.setattr(msda_cuda, "WARP_SAMPLES", warp_samples)
    monkeypatch.setattr(msda_cuda, "CHUNK_BITS", (5,))
    msda_cuda.tiling.cache_clear()
    tiling = msda_cuda.tiling(sizes, (4, 4), queries, 4, channels, ROOM)
    assert tiling.chunks == 3 and (tiling.partials > 0) == (warp_samples < 99)
    problem = Problem.random(queries=queries, heads=2, channels=channels, sizes=sizes, dtypes=(dtype,))
    problem.check(dtype, *target)
    msda_cuda.tiling.cache_clear()


@pytest.mark.parametrize("room, warps", [(1300, 4), (900, 1)])
def test_little_shared_memory(target, monkeypatch, room, warps):
    sizes, queries = ((9, 17), (3, 4)), 40
    monkeypatch.setattr(_driver, "shared_memory", lambda device: room)
    monkeypatch.setattr(msda_cuda, "STATIC_BYTES", 0)
    assert msda_cuda.tiling(sizes, (4, 4), queries, 4, 32, room).count_warps == warps
    Problem.random(queries=queries, heads=2, channels=32, sizes=sizes).check(F32, *target)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_five_thousand_queries(dtype):
    sizes = ((40, 70), (9, 17), (3, 4))
    problem = Problem.random(queries=5000, heads=4, channels=32, sizes=sizes, num_points=(4,) * 3, dtypes=(dtype,))
    problem.check(dtype, "cuda", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [50, 5000])
def test_gradients_repeat_bit_by_bit(queries):
    problem = Problem.random(queries=queries, channels=32, dtypes=(BF16,))
    with deterministic(warn_only=False):
        first = problem.run("cuda", BF16, "cuda")
        for _ in range(20):
            for name, result in problem.run("cuda", BF16, "cuda").items():
                assert torch.equal(result, first[name]), name


def test_levels_may_be_empty(target):
    sizes = [(0, 4), (3, 4), (99, 0)]
    Problem.random(queries=20, channels=32, sizes=sizes, num_points=(2, 2, 2)).check(F32, *target)


def test_sizes_may_be_transposed_int32(target):
    device, backend = target
    # Where both sides could be mistaken for each other without leaving the value's rows.
    sizes = [(4, 8), (2, 4)]
    problem = Problem.random(queries=30, channels=32, sizes=sizes, coordinates=0)
    value, points, weights = (t.float().to(device) for t in (problem.value, problem.points, problem.weights))
    shapes = torch.tensor(list(zip(*sizes, strict=True)), dtype=torch.int32, device=device).T
    found = ops.msda_forward(value, shapes, None, None, points, weights, [4, 4], False, 1.0, True, backend, None)
    assert relative_error(found, problem.run("eager")["output"]) < 1e-5


def test_operands_may_begin_anywhere(target):
    device, backend = target
    problem = Problem.random(queries=30, channels=32, dtypes=(F16,))
    exact = problem.run("eager")

    def shifted(t):
        return torch.empty(t.numel() + 1, dtype=F16, device=device)[1:].view(t.shape).copy_(t).requires_grad_()

    leaves = [shifted(t) for t in problem.operands().values()]
    output = dm.deformable_attention(
        leaves[0], problem.sizes, None, *leaves[1:], num_points=problem.num_points, backend=backend
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
def test_sizes_as_numbers_are_known_where_saved_tensors_are_copied():
    problem = Problem.random(queries=60, channels=32)
    exact = problem.run("eager")
    with deterministic(warn_only=False), torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        actual = problem.run("cuda", F32, "cuda")
    for name, result in actual.items():
        assert relative_error(result, exact[name]) < 1e-5


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


def test_what_is_not_finite_shows(target):
    device, backend = target
    problem = Problem.random(batch=1, queries=4, heads=1, channels=32)
    problem.points[0, 1] = float("nan")
    problem.points[0, 2] = float("inf")
    results = problem.run(backend, F32, device)
    exact = problem.run("eager")
    for name, result in results.items():
        assert result.isfinite().all() == exact[name].isfinite().all()
        assert relative_error(result, exact[name]) < 1e-5
    problem.grad[0, 0] = float("nan")
    found, expected = (problem.run(b, F32, device)["grad_value"].isnan() for b in (backend, "eager"))
    assert expected.any() and (found | ~expected).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ["grad", "weights"])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000])
def test_no_kind_of_nan_is_lost_from_the_values_gradient(target, dtype, name, bits):
    """0x7fffffff is what a GPU's arithmetic gives."""
    device, backend = target
    problem = Problem.random(batch=1, queries=4, heads=1, channels=32, coordinates=0, dtypes=(dtype,))
    problem.points = problem.points.clamp(0.1, 0.9)
    leaves = [t.to(device, dtype) for t in (problem.value, problem.points, problem.weights, problem.grad)]
    odd = 2 if name == "weights" else 3
    leaves[odd] = leaves[odd].float() if name == "weights" else leaves[odd]
    whole = leaves[odd].view(torch.int32 if leaves[odd].dtype == F32 else torch.int16)
    whole[0, 1] = bits if whole.dtype == torch.int32 else bits >> 16
    assert leaves[odd].isnan().any()
    value, points, weights = (t.requires_grad_() for t in leaves[:3])
    output = dm.msda(value, problem.sizes, None, points, weights, num_points=problem.num_points, backend=backend)
    found = torch.autograd.grad(output, value, leaves[3])[0]
    exact = dm.msda(value, problem.sizes, None, points, weights, num_points=problem.num_points, backend="eager")
    expected = torch.autograd.grad(exact, value, leaves[3])[0]
    assert expected.isnan().any() and not (found.isfinite() & expected.isnan()).any()


@pytest.mark.parametrize("need_value", [True, False])
@pytest.mark.parametrize("need_reference", [True, False])
def test_only_the_gradients_that_are_asked_for(target, need_value, need_reference):
    device, backend = target
    problem = Problem.random(queries=20, channels=32)
    exact = problem.run("eager")
    needed = (need_value, need_reference, True, True)
    leaves = [
        t.detach().float().to(device).requires_grad_(need)
        for t, need in zip(problem.operands().values(), needed, strict=True)
    ]
    output = dm.deformable_attention(
        leaves[0], problem.sizes, None, *leaves[1:], num_points=problem.num_points, backend=backend
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
        ops.msda_forward, (value, shapes, None, reference, points, weights, [4, 4], True, 0.5, True, "cuda", None)
    )
