"""What only a GPU can show: graphs, offsets past 2**31, no waiting for the device."""

import pytest
import torch
from helpers import Problem, assert_within_budget, relative_error
from training import SIZE, losses, write_deformable_detr

import deformops_models as dm
from deformops_models.cli import main

pytestmark = pytest.mark.gpu

GIB = 2**30


def leaves_of(problem: Problem, dtype=torch.float32, device="cuda") -> list[torch.Tensor]:
    return [t.to(device, dtype).requires_grad_() for t in problem.operands().values()]


def step(problem: Problem, leaves, grad, sizes=None, starts=None) -> tuple[torch.Tensor, ...]:
    """Output and all gradients through the kernels."""
    value, *rest = leaves
    sizes = problem.sizes if sizes is None else sizes
    output = dm.deformable_attention(value, sizes, starts, *rest, num_points=problem.num_points)
    return output, *torch.autograd.grad(output, leaves, grad)


def needs_memory(gib: int) -> None:
    free = torch.cuda.mem_get_info()[0] / GIB
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free:.0f} are free")


@pytest.mark.parametrize("metadata", ["lists", "tensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_graph_computes_new_data(dtype, metadata):
    """Sizes in tensors may change between replays: other kernels run then, which the capture is the first to load."""
    first, second = (Problem.random(queries=70, heads=5, channels=32, dtypes=(dtype,)) for _ in range(2))
    leaves, grad = leaves_of(first, dtype), first.grad.to("cuda", dtype)
    sizes = starts = None
    if metadata == "tensors":
        sizes, starts = torch.tensor(first.sizes, device="cuda"), torch.tensor([0, 45], device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(first, leaves, grad, sizes, starts)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(first, leaves, grad, sizes, starts)
    with torch.no_grad():
        for leaf, new in zip([*leaves, grad], [*second.operands().values(), second.grad], strict=True):
            leaf.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    exact, plain = second.run("eager"), second.run("eager", dtype)
    for result, name in zip(captured, exact, strict=True):
        assert_within_budget(result, exact[name], plain[name], name, second.longest)


@pytest.mark.parametrize("metadata", ["lists", "tensors"])
def test_nothing_waits_for_the_device(metadata):
    problem = Problem.random(queries=50)
    leaves, grad = leaves_of(problem), problem.grad.float().cuda()
    sizes, starts = problem.sizes, [0, 45]
    if metadata == "tensors":
        sizes, starts = torch.tensor(sizes, device="cuda"), torch.tensor(starts, device="cuda")
    step(problem, leaves, grad, sizes, starts)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(problem, leaves, grad, sizes, starts)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_first_call_equals_the_tenth():
    # A width that no other test compiles.
    problem = Problem.random(queries=100, heads=2, channels=56)
    leaves, grad = leaves_of(problem), problem.grad.float().cuda()
    calls = [step(problem, leaves, grad) for _ in range(10)]
    exact = problem.run("eager")
    for results in (calls[0], calls[9]):
        assert torch.equal(results[0], calls[0][0])
        for result, (name, expected) in zip(results, exact.items(), strict=True):
            assert relative_error(result, expected) < 1e-5, name


def test_five_thousand_queries():
    problem = Problem.random(batch=1, queries=5000, heads=2, channels=32)
    exact = problem.run("eager")
    for result, (name, expected) in zip(
        step(problem, leaves_of(problem), problem.grad.float().cuda()), exact.items(), strict=True
    ):
        assert relative_error(result, expected) < 1e-5, name


def test_cuda_runs_the_kernels_by_default():
    before = dm.call_counts.copy()
    problem = Problem.random()
    step(problem, leaves_of(problem), problem.grad.float().cuda())
    assert dm.call_counts["msda_forward"] == before["msda_forward"] + 1
    assert dm.call_counts["msda_backward"] == before["msda_backward"] + 1
    assert dm.resolve("cuda", torch.bfloat16).backend is dm.Backend.CUDA


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_last_sample_past_two_to_the_31_elements(dtype):
    needs_memory(60)
    batch, height, width, heads, channels, queries = 16, 256, 2049, 8, 32, 100
    rows = height * width
    assert batch * rows * heads * channels > 2**31
    value = torch.randn(batch, rows, heads, channels, device="cuda", dtype=dtype).requires_grad_()
    points = torch.rand(batch, queries, heads, 1, 4, 2, device="cuda")
    weights = torch.rand(batch, queries, heads, 1, 4, device="cuda")
    output = dm.msda(value, [(height, width)], None, points, weights)
    (grad,) = torch.autograd.grad(output, value, torch.ones_like(output))
    for i in (0, batch - 1):
        alone = value[i : i + 1].detach().clone().requires_grad_()
        expected = dm.msda(alone, [(height, width)], None, points[i : i + 1], weights[i : i + 1])
        assert torch.equal(output[i : i + 1], expected)
        (expected_grad,) = torch.autograd.grad(expected, alone, torch.ones_like(expected))
        torch.testing.assert_close(grad[i : i + 1], expected_grad, rtol=1e-3, atol=1e-4)
        assert expected_grad.count_nonzero() > 0


def test_one_sample_past_two_to_the_31_elements():
    needs_memory(60)
    height, width, heads, channels, queries = 2897, 2903, 8, 32, 200
    rows = 15 + height * width
    assert rows * heads * channels > 2**31
    value = torch.randn(1, rows, heads, channels, device="cuda", dtype=torch.float16).requires_grad_()
    x = torch.rand(1, queries, heads, 1, 1, device="cuda") * (width - 1)
    y = torch.rand(1, queries, heads, 1, 1, device="cuda") * 2
    weights = torch.ones(1, queries, heads, 1, 1, device="cuda")

    def run(value, sizes, height, first_line, level):
        own = torch.stack([(x + 0.5) / width, (y + first_line + 0.5) / height], -1)
        points = torch.full((1, queries, heads, len(sizes), 1, 2), -9.0, device="cuda")
        points[:, :, :, level] = own[:, :, :, 0]
        output = dm.msda(value, sizes, None, points, weights.expand(-1, -1, -1, len(sizes), -1))
        return output, *torch.autograd.grad(output, value, torch.ones_like(output))

    output, grad = run(value, [(3, 5), (height, width)], height, height - 3, 1)
    crop = value[:, -3 * width :].detach().clone().requires_grad_()
    expected, expected_grad = run(crop, [(3, width)], 3, 0, 0)
    # The locations differ by a rounding, about 2e-4 pixels.
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(grad[:, -3 * width :], expected_grad, rtol=1e-2, atol=1e-2)
    assert grad[:, : -3 * width].amax().item() == grad[:, : -3 * width].amin().item() == 0


def test_one_line_past_two_to_the_31_elements():
    needs_memory(60)
    width = 2**23 + 7
    value = torch.ones(1, width, 8, 32, device="cuda", dtype=torch.float16).requires_grad_()
    points = torch.rand(1, 64, 8, 1, 1, 2, device="cuda") * 0.8 + 0.1
    points[..., 1] = 0.1  # pixel -0.4: the line above is outside, this one counts 0.6
    output = dm.msda(value, [(1, width)], None, points, torch.ones(1, 64, 8, 1, 1, device="cuda"))
    torch.testing.assert_close(output, torch.full_like(output, 0.6), rtol=2e-3, atol=0)
    (grad,) = torch.autograd.grad(output, value, torch.ones_like(output))
    assert grad.sum(dtype=torch.float64).item() == pytest.approx(64 * 8 * 32 * 0.6, rel=2e-3)


def test_metadata_on_the_device_that_lies_gives_nan():
    problem = Problem.random(batch=1)
    leaves = leaves_of(problem)
    for sizes, starts in (
        ([(5, 9), (3, 5)], None),
        ([(5, 9), (3, 3)], None),
        ([(2**31, 2**31), (3, 4)], [0, 45]),
        ([(5, 9), (3, 4)], [0, 46]),
        ([(5, 9), (3, 4)], [-1, 45]),
    ):
        starts = None if starts is None else torch.tensor(starts, device="cuda")
        output, *_ = step(problem, leaves, problem.grad.float().cuda(), torch.tensor(sizes, device="cuda"), starts)
        torch.cuda.synchronize()
        assert output.isnan().all()


def test_metadata_tensors_of_a_wrong_shape_are_errors():
    problem = Problem.random(batch=1)
    leaves, grad = leaves_of(problem), problem.grad.float().cuda()
    sizes = torch.tensor(problem.sizes, device="cuda")
    with pytest.raises(ValueError, match=r"level_start_index has shape \(3,\): \(2,\) is expected"):
        step(problem, leaves, grad, sizes, torch.tensor([0, 45, 57], device="cuda"))
    with pytest.raises(TypeError, match="spatial_shapes has dtype torch.float32: use int64 or int32"):
        step(problem, leaves, grad, sizes.float())


def test_an_operand_on_another_device_is_an_error():
    problem = Problem.random(batch=1)
    names = ("reference_points", "sampling_offsets", "attention_logits")
    for i, name in enumerate(names, start=1):
        leaves = leaves_of(problem)
        leaves[i] = leaves[i].cpu()
        with pytest.raises(ValueError, match=f"{name} is on cpu but value is on cuda:0: move it there"):
            step(problem, leaves, problem.grad.float().cuda())


def test_a_training_with_cuda_graphs_is_the_same_training(tmp_path, monkeypatch):
    """Two epochs, each measured eagerly in between, so that graphs are also replayed after other work."""
    for module in ("transformers", "torchvision", "pycocotools", "accelerate", "matplotlib", "psutil"):
        pytest.importorskip(module)
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    assert main(["shapes", "--out", str(tmp_path / "data"), "--images", "16", "--size", str(SIZE), "--seed", "4"]) == 0
    model = write_deformable_detr(tmp_path / "model")
    chosen = ["finetune", "--model", model, "--data", tmp_path / "data", "--fp32", "--workers", 0]
    chosen += ["--image-size", SIZE, "--epochs", 2, "--lr", 3e-4, "--no-augment"]
    assert main([*map(str, chosen), "--out", str(tmp_path / "eager")]) == 0
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    recorded, record = [], CUDAGraphTreeManager.record_function

    def recording(self, inputs, function):
        recorded.append(len(losses(tmp_path / "graphs")))
        return record(self, inputs, function)

    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", recording)
    assert main([*map(str, chosen), "--out", str(tmp_path / "graphs"), "--compile", "reduce-overhead"]) == 0
    # Each in the first epoch: later ones only replay.
    assert len(recorded) > 10 and max(recorded) < 4
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    eager, graphs = losses(tmp_path / "eager"), losses(tmp_path / "graphs")
    assert len(eager) == len(graphs) == 8
    for ours, theirs in zip(graphs, eager, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)
