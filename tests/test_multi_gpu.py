"""What only two GPUs can show: kernels on the one that is not current, models on both, and training on both."""

import copy
import re
import shutil
import threading

import pytest
import torch
from helpers import Problem, assert_within_budget, launches, relative_error
from models import DETECTORS, assert_as_accurate, outputs, training_step
from training import (
    SIZE,
    evaluated_on_training_images,
    finished,
    kill_one_rank,
    losses,
    scores,
    start,
    two_images_one_empty,
    write_deformable_detr,
    write_mask2former,
)

import deformops_models as dm
from deformops_models.cli import main

pytestmark = pytest.mark.multigpu

SECOND = "cuda:1"
BACKENDS = ("cuda", "triton", "eager")
MODELS = ("hf-mask2former", "hf-deformable-detr-refine", "mmdet-dino-4scale")
FLOAT32 = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def _first_is_current():
    assert torch.cuda.current_device() == 0
    yield
    assert torch.cuda.current_device() == 0


def counts_of(backend: str) -> dict[str, int]:
    return {} if backend == "eager" else {"msda_forward": 1, "msda_backward": 1}


def random_problem(coordinates: int, dtype: torch.dtype) -> Problem:
    """Widths that the CUDA kernels take; coordinates 0 are locations, for `msda`."""
    return Problem.random(queries=37, heads=2, channels=32, coordinates=coordinates, dtypes=(dtype,))


def step(problem: Problem, leaves, grad, backend: str) -> tuple[torch.Tensor, ...]:
    """Output and all gradients."""
    options = {"num_points": problem.num_points, "backend": backend}
    if problem.reference is None:
        value, points, weights = leaves
        output = dm.msda(value, problem.sizes, None, points, weights, **options)
    else:
        value, *rest = leaves
        output = dm.deformable_attention(value, problem.sizes, None, *rest, **options)
    return output, *torch.autograd.grad(output, leaves, grad)


def on_second(problem: Problem, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    leaves = [t.to(SECOND, dtype).requires_grad_() for t in problem.operands().values()]
    return leaves, problem.grad.to(SECOND, dtype)


def assert_right(results, problem: Problem, dtype: torch.dtype) -> None:
    """On the second GPU and within the error budget against float64."""
    exact, plain = problem.run("eager"), problem.run("eager", dtype)
    for result, name in zip(results, exact, strict=True):
        assert result.device == torch.device(SECOND) and result.dtype == dtype
        assert_within_budget(result, exact[name], plain[name], name, problem.longest)


# Operators


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coordinates", [0, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_on_the_second_gpu_while_the_first_is_current(backend, coordinates, dtype):
    problem = random_problem(coordinates, dtype)
    dm.call_counts.clear()
    results = step(problem, *on_second(problem, dtype), backend)
    assert dm.call_counts == counts_of(backend)
    assert_right(results, problem, dtype)


def test_sizes_in_tensors_on_the_second_gpu():
    problem = random_problem(2, torch.float32)
    for _ in range(2):  # in the first backward pass the numbers may be on their way here
        results = problem.run(None, torch.float32, SECOND, sizes=torch.tensor(problem.sizes, device=SECOND))
        assert_right(results.values(), problem, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_gpus_in_turns(backend):
    """What is cached for one GPU is not used on the other."""
    problem = random_problem(2, torch.float32)
    exact = problem.run("eager")
    for device in ("cuda:0", SECOND, "cuda:0", SECOND):
        for name, result in problem.run(backend, torch.float32, device).items():
            assert result.device == torch.device(device)
            assert relative_error(result, exact[name]) < 1e-5, (device, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_on_the_second_gpu(backend):
    torch.compiler.reset()
    problem = random_problem(2, torch.float32)

    @torch.compile(fullgraph=True)
    def attend(value, reference, points, weights):
        return 2 * dm.deformable_attention(
            value, problem.sizes, None, reference, points, weights, num_points=problem.num_points, backend=backend
        )

    leaves, grad = on_second(problem, torch.float32)
    for _ in range(2):
        dm.call_counts.clear()
        output = attend(*leaves)
        results = output / 2, *torch.autograd.grad(output, leaves, grad / 2)
        assert dm.call_counts == counts_of(backend)
        exact = problem.run("eager")
        for result, name in zip(results, exact, strict=True):
            assert result.device == torch.device(SECOND)
            assert relative_error(result, exact[name]) < 1e-5, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_captured_on_the_second_gpu_computes_new_data(backend, dtype):
    first, second = (random_problem(2, dtype) for _ in range(2))
    leaves, grad = on_second(first, dtype)
    side = torch.cuda.Stream(SECOND)
    side.wait_stream(torch.cuda.current_stream(SECOND))
    with torch.cuda.stream(side):
        for _ in range(3):
            step(first, leaves, grad, backend)
    torch.cuda.synchronize(SECOND)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = step(first, leaves, grad, backend)
    with torch.no_grad():
        for leaf, new in zip([*leaves, grad], [*second.operands().values(), second.grad], strict=True):
            leaf.copy_(new)
    torch.cuda.synchronize(SECOND)
    graph.replay()
    torch.cuda.synchronize(SECOND)
    assert_right(captured, second, dtype)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("index", [1, 2, 3])
def test_operands_on_two_gpus_are_an_error(index, backend):
    problem = random_problem(2, torch.float32)
    leaves = [t.to("cuda:0", torch.float32) for t in problem.operands().values()]
    leaves[index] = leaves[index].to(SECOND)
    name = ("value", "reference_points", "sampling_offsets", "attention_logits")[index]
    with pytest.raises(ValueError, match=f"{name} is on cuda:1 but value is on cuda:0: move it there"):
        dm.deformable_attention(leaves[0], problem.sizes, None, *leaves[1:], num_points=[4, 4], backend=backend)


# Models


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_moves_to_the_second_gpu_after_the_patch(name):
    detector = DETECTORS[name]
    pytest.importorskip(detector.framework)
    model, choices = detector.build(), []
    doubled = copy.deepcopy(model).double()
    exact = outputs(detector, doubled), *training_step(detector, doubled, choices=choices)
    found = []
    for change, count in ((lambda m: m, 0), (dm.patch, detector.attentions)):
        moved = change(copy.deepcopy(model)).to(SECOND)
        dm.call_counts.clear()
        evaluated = outputs(detector, moved)
        assert dm.call_counts == ({"msda_forward": count} if count else {})
        assert all(t.device == torch.device(SECOND) for t in evaluated.values())
        # Training loops make their GPU the current one, and upstream's own code may rely on it.
        with torch.cuda.device(SECOND):
            found.append((evaluated, *training_step(detector, moved, choices=choices)))
        assert dm.call_counts["msda_backward"] == count
    for actual, plain, right in zip(found[1], found[0], exact, strict=True):
        assert_as_accurate(actual, plain, right, FLOAT32)


#: Which parts of a model are on which GPU. The attentions of the second one are on both.
DEVICE_MAPS = {
    "hf-mask2former": {
        "model.pixel_level_module.encoder": 0,
        "model.pixel_level_module.decoder": 1,
        "model.transformer_module": 0,
        "class_predictor": 0,
        "criterion": 0,
    },
    "hf-deformable-detr-single-scale": {
        "model.backbone": 0,
        "model.input_proj": 0,
        "model.query_position_embeddings": 0,
        "model.level_embed": 0,
        "model.encoder": 0,
        "model.decoder": 1,
        "model.reference_points": 1,
        "class_embed": 1,
        "bbox_embed": 1,
    },
}


@pytest.mark.parametrize("name", DEVICE_MAPS)
def test_a_model_spread_over_both_gpus(name):
    pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    detector, device_map = DETECTORS[name], DEVICE_MAPS[name]
    model = detector.build().to("cuda:0")
    expected = outputs(detector, dm.patch(model))
    accelerate.dispatch_model(model, device_map)
    assert {p.device.index for p in model.parameters()} == {0, 1}
    with launches(detector.attentions):
        actual = outputs(detector, model)
    assert actual.keys() == expected.keys()
    for key, t in expected.items():
        assert relative_error(actual[key], t) < 1e-4, key


def assert_near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Relative to the largest, as some gradients are zero but for rounding."""
    assert actual.keys() == expected.keys()
    largest = max(t.norm() for t in expected.values())
    for name, t in expected.items():
        assert (actual[name] - t).norm() < 1e-4 * largest, name


def test_two_models_on_two_gpus_in_two_threads_at_once():
    pytest.importorskip("transformers")
    detectors = [DETECTORS[name] for name in ("hf-deformable-detr-refine", "hf-deformable-detr-single-scale")]
    models = [detector.build().to(f"cuda:{i}") for i, detector in enumerate(detectors)]
    pixels = [torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(1)).to(f"cuda:{i}") for i in range(2)]
    barrier, errors = threading.Barrier(2), []

    def run(i):
        models[i].zero_grad()
        logits = models[i](pixel_values=pixels[i]).logits
        logits.square().sum().backward()
        return {"logits": logits} | {n: p.grad for n, p in models[i].named_parameters() if p.grad is not None}

    def work(i, expected):
        try:
            for _ in range(10):
                barrier.wait(60)
                assert_near(run(i), expected)
        except BaseException as error:
            barrier.abort()
            errors.append(error)

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, deterministic=True):
        plain = [run(i) for i in range(2)]
        for model in models:
            dm.patch(model)
        before = dm.call_counts.copy()
        expected = [run(i) for i in range(2)]
        for ours, theirs in zip(expected, plain, strict=True):
            assert_near(ours, theirs)
        threads = [threading.Thread(target=work, args=(i, expected[i]), daemon=True) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)
    launched = dm.call_counts["msda_forward"] - before["msda_forward"]
    # Two threads may count at the same moment.
    assert 10 * sum(d.attentions for d in detectors) < launched <= 11 * sum(d.attentions for d in detectors)
    assert dm.call_counts["upstream_forward"] == before["upstream_forward"]


# Training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    for module in ("transformers", "torchvision", "pycocotools", "accelerate", "matplotlib", "psutil"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("training")
    assert main(["shapes", "--out", str(folder / "data"), "--images", "16", "--size", str(SIZE), "--seed", "4"]) == 0
    write_deformable_detr(folder / "deformable_detr")
    write_mask2former(folder / "mask2former", dropout=0.0)
    two_images_one_empty(folder / "data", folder / "two_images")
    evaluated_on_training_images(folder / "data", folder / "evaluated", images=15)
    return folder


def arguments(folder, out, *more, model="deformable_detr", data="data"):
    chosen = ("--model", folder / model, "--data", folder / data, "--out", out, "--bf16", "--workers", 0)
    return ["finetune", *map(str, (*chosen, "--image-size", SIZE, "--epochs", 2, "--lr", 3e-4, *more))]


@pytest.fixture(scope="module")
def one_gpu(folder):
    """Losses of one GPU with four images a step, and how far a second run is off, relative to them."""
    runs = []
    for name in ("one", "again"):
        finished(*arguments(folder, folder / name, "--batch-size", 4))
        runs.append(losses(folder / name))
    assert len(runs[0]) == len(runs[1]) == 8
    return runs[0], max(_deviation(a, b) for a, b in zip(*runs, strict=True))


def _deviation(a, b) -> float:
    """Of the loss, relative."""
    return abs(a[1] / b[1] - 1)


def assert_same_curve(actual, one_gpu) -> None:
    expected, noise = one_gpu
    assert [(step, rate) for step, *_, rate in actual] == [(step, rate) for step, *_, rate in expected]
    # bfloat16 rounds sums over half a batch twice as often; half or twice the loss would be a fault.
    for ours, theirs in zip(actual, expected, strict=True):
        assert _deviation(ours, theirs) <= max(2 * noise, 1e-2), (ours, theirs)
        assert ours[2] == pytest.approx(theirs[2], rel=0.1)
    assert _deviation(actual[0], expected[0]) <= 2e-3


SHARDED = pytest.mark.parametrize("sharded", [(), ("--fsdp",)], ids=["whole", "fsdp"])


@pytest.mark.parametrize(
    "way", [(), ("--fsdp",), ("--compile", "reduce-overhead")], ids=["whole", "fsdp", "whole-cuda-graphs"]
)
def test_two_gpus_train_as_one(way, folder, one_gpu, tmp_path):
    printed = finished(*arguments(folder, tmp_path, "--batch-size", 2, *way), processes=2)
    said = f"2 process(es){' with FSDP' if '--fsdp' in way else ''}, bf16 on cuda:0"
    assert said in printed and printed.count("done: step 8") == 1
    assert_same_curve(losses(tmp_path), one_gpu)


@SHARDED
@pytest.mark.parametrize("model", ["deformable_detr", "mask2former"])
def test_one_of_two_gpus_has_no_objects(model, sharded, folder, tmp_path):
    options = {"model": model, "data": "two_images"}
    one = folder / f"{model}-two-images"
    if not one.exists():
        finished(*arguments(folder, one, "--no-augment", "--batch-size", 2, **options))
    finished(*arguments(folder, tmp_path, "--no-augment", "--batch-size", 1, *sharded, **options), processes=2)
    # Mask2Former draws points in each process, and averages classes there.
    bound = 1e-2 if model == "deformable_detr" else 0.2
    for ours, theirs in zip(losses(tmp_path), losses(one), strict=True):
        assert _deviation(ours, theirs) <= bound


@SHARDED
def test_training_goes_on_with_two_gpus_or_one_after_a_kill(sharded, folder, one_gpu, tmp_path):
    out, alone = tmp_path / "out", tmp_path / "alone"
    options = ("--save-every", 1, "--ema", 0.9)
    both = arguments(folder, out, *options, "--batch-size", 2, *sharded)
    process = start(*both, processes=2)
    printed = kill_one_rank(process, out, step=3)
    assert process.returncode != 0
    assert re.search(r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9", printed), printed
    shutil.copytree(out, alone)
    assert re.search(r"goes on at step [2-7] of 8", finished(*both, "--resume", processes=2))
    assert_same_curve(losses(out), one_gpu)
    one = arguments(folder, alone, *options, "--batch-size", 4, "--resume")
    assert re.search(r"goes on at step [2-7] of 8", finished(*one))
    assert_same_curve(losses(alone), one_gpu)


@SHARDED
def test_average_precision_of_two_gpus_is_that_of_one(sharded, folder, tmp_path):
    """Each of 15 images counts once, though one GPU has one more of them."""
    options = ("--no-augment", "--epochs", 40, "--lr", 3e-3, "--batch-size", 4)
    finished(*arguments(folder, tmp_path, *options, *sharded, data="evaluated"), processes=2)
    found = scores(tmp_path)[-1]
    evaluated = ("--data", str(folder / "evaluated"), "--dtype", "bfloat16", "--workers", "0")
    printed = finished("eval", "--model", str(tmp_path / "last"), *evaluated)
    assert "on 15 images of" in printed
    expected = float(re.search(r"patched +([\d.]+)", printed).group(1))
    assert expected > 0.05 and found == pytest.approx(expected, rel=0.05, abs=0.01)
