"""What surrounds the kernels: registration, compilers, autocast, the layer, and the texts of errors."""

import copy
import itertools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Problem, relative_error
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import deformops_models as dm
from deformops_models import layout, ops

ROOT = Path(__file__).resolve().parent.parent
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def arguments(
    device, dtype=torch.float32, coordinates=2, softmax=True, contiguous=True, starts=False, need_grad=True,
    backend=None, numbers=None,
):  # fmt: skip
    """Positional arguments of `ops.msda_forward`."""
    problem = Problem.random(batch=2, queries=3, heads=2, num_points=(2, 1), coordinates=coordinates, dtypes=(dtype,))
    tensors = [None if t is None else t.to(device, dtype) for t in _operands(problem)]
    if not contiguous:
        tensors = [None if t is None else t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]
    value, *rest = [None if t is None else t.requires_grad_(need_grad) for t in tensors]
    sizes = torch.tensor(problem.sizes, device=device)
    starts = torch.tensor([0, 45], device=device) if starts else None
    return (value, sizes, starts, *rest, problem.num_points, softmax, 0.5, True, backend, numbers)


def _operands(problem):
    return problem.value, problem.reference, problem.points, problem.weights


CASES = [
    {},
    {"contiguous": False, "starts": True},
    {"numbers": [5, 9, 3, 4]},
    {"coordinates": 4, "dtype": torch.float16},
    {"coordinates": 2, "dtype": torch.float16, "contiguous": False},
    {"coordinates": 0, "softmax": False, "dtype": torch.bfloat16},
    {"coordinates": 4, "dtype": torch.bfloat16, "contiguous": False, "starts": True},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_of_the_forward(device, case):
    opcheck(ops.msda_forward, arguments(device, **case))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("need_value, need_reference", [(True, True), (False, False)])
def test_opcheck_of_the_backward(device, case, need_value, need_reference):
    forward = arguments(device, need_grad=False, **case)
    output = ops.msda_forward(*forward)
    grad = torch.randn_like(output).transpose(0, 1).contiguous().transpose(0, 1)
    need_reference = need_reference and forward[3] is not None
    opcheck(ops.msda_backward, (grad, *forward, need_value, need_reference))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("coordinates", [0, 2, 4])
def test_opcheck_on_the_gpu(dtype, contiguous, coordinates):
    opcheck(ops.msda_forward, arguments("cuda", dtype, coordinates, contiguous=contiguous))


def test_the_operators_run_on_a_cpu_without_the_interpreter():
    script = """
        import torch
        from test_ops import arguments, ops
        from torch.library import opcheck

        for coordinates in (0, 2, 4):
            forward = arguments("cpu", coordinates=coordinates)
            opcheck(ops.msda_forward, forward)
            output = ops.msda_forward(*forward)
            wanted = [t for t in (forward[0], *forward[3:6]) if t is not None]
            grads = torch.autograd.grad(output, wanted, torch.ones_like(output))
            plain = ops._plain(*forward[:-3])
            expected = torch.autograd.grad(plain, wanted, torch.ones_like(output))
            torch.testing.assert_close(output, plain)
            torch.testing.assert_close(grads, expected)
            with torch.autograd.graph.save_on_cpu():
                saved = torch.autograd.grad(ops.msda_forward(*forward), wanted, torch.ones_like(output))
            torch.testing.assert_close(saved, expected)
            output = ops.msda_forward(*forward)
            with torch.inference_mode():
                inferred = torch.autograd.grad(output, wanted, torch.ones_like(output))
            torch.testing.assert_close(inferred, expected)
            detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in forward]
            for need_value in (True, False):
                needs = (need_value, coordinates > 0)
                opcheck(ops.msda_backward, (torch.randn_like(output), *detached, *needs))
        print("fine")
    """
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == "fine", run.stderr[-2000:]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", [None, "cuda", "triton", "eager"])
@pytest.mark.filterwarnings("error:Dynamo detected a call")
def test_the_call_on_a_gpu_is_traced_without_one(backend, dynamic):
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="eager", dynamic=dynamic)
    def run(value, reference, offsets, logits):
        options = {"num_points": [2, 1], "backend": backend}
        return dm.deformable_attention(value * 1, [(5, 9), (3, 4)], None, reference, offsets, logits, **options) * 1

    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = ((2, 57, 2, 16), (2, 3, 2, 2), (2, 3, 2, 3, 2), (2, 3, 2, 3))
        output = run(*(torch.empty(shape, device="cuda") for shape in shapes))
    assert output.shape == (2, 3, 32) and output.device.type == "cuda"


@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_in_one_graph(device, dynamic):
    torch.compiler.reset()
    sizes = [(5, 9), (3, 4)]

    @torch.compile(fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor", dynamic=dynamic)
    def run(value, reference, offsets, logits):
        options = {"num_points": [2, 1], "backend": "triton"}
        return dm.deformable_attention(value * 1, sizes, None, reference, offsets, logits, **options) * 1

    for batch, queries in ((2, 4), (3, 5)):
        problem = Problem.random(batch=batch, queries=queries, heads=2, num_points=(2, 1))
        leaves = [t.float().to(device).requires_grad_() for t in problem.operands().values()]
        before = dm.call_counts.copy()
        output = run(*leaves)
        grads = torch.autograd.grad(output, leaves, problem.grad.float().to(device))
        assert dm.call_counts["msda_forward"] == before["msda_forward"] + 1
        assert dm.call_counts["msda_backward"] == before["msda_backward"] + 1
        exact = problem.run("eager")
        for actual, (name, expected) in zip([output, *grads], exact.items(), strict=True):
            assert relative_error(actual, expected) < 1e-5, name


@pytest.mark.gpu
def test_compile_with_sizes_on_the_gpu():
    torch.compiler.reset()
    run = torch.compile(dm.deformable_attention, fullgraph=True)
    problem = Problem.random(batch=2, queries=4, heads=2, num_points=(4, 4))
    value, reference, offsets, logits = (t.float().cuda() for t in problem.operands().values())
    sizes, starts = torch.tensor(problem.sizes, device="cuda"), torch.tensor([0, 45], device="cuda")
    output = run(value, sizes, starts, reference, offsets.view(2, 4, 2, 2, 4, 2), logits)
    assert relative_error(output, problem.run("eager")["output"]) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at tracing where CUDA is only pretended")
@pytest.mark.parametrize("metadata", ["tensors", "lists"])
def test_a_call_on_cuda_is_traced_into_one_operator(metadata):
    # A process of its own: this one is told that the interpreter runs the kernels.
    script = f"""
        import warnings
        import torch
        import deformops_models as dm
        from torch._subclasses.fake_tensor import FakeTensorMode

        warnings.simplefilter("error")
        graphs = []

        @torch.compile(fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
        def run(value, sizes, starts, reference, offsets, logits):
            return dm.deformable_attention(value, sizes, starts, reference, offsets, logits)

        with FakeTensorMode(allow_non_fake_inputs=True):
            new = lambda *shape: torch.empty(*shape, device="cuda")
            sizes, starts = [(5, 9), (3, 4)], None
            if {metadata == "tensors"}:
                sizes = torch.empty(2, 2, dtype=torch.int64, device="cuda")
                starts = torch.empty(2, dtype=torch.int64, device="cuda")
            output = run(new(2, 57, 2, 16), sizes, starts, new(2, 5, 2, 2), new(2, 5, 2, 2, 4, 2), new(2, 5, 2, 8))
        assert output.shape == (2, 5, 32) and output.device.type == "cuda"
        print(sum(node.target is torch.ops.deformops_models.msda_forward.default for node in graphs[0].graph.nodes))
    """
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == "1", run.stderr[-2000:]


def test_the_plain_path_compiles_in_one_graph():
    torch.compiler.reset()
    problem = Problem.random(batch=1, queries=3, heads=2, num_points=(4, 4))
    run = torch.compile(dm.deformable_attention, fullgraph=True, backend="eager")
    value, reference, points, weights = problem.operands().values()
    output = run(value, problem.sizes, None, reference, points.view(1, 3, 2, 2, 4, 2), weights)
    torch.testing.assert_close(output, problem.run("eager")["output"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fakes_have_the_strides_of_the_real_ones(device, case):
    from torch._subclasses.fake_tensor import FakeTensorMode

    forward = arguments(device, need_grad=False, **case)
    output = ops.msda_forward(*forward)
    has_reference = forward[3] is not None
    real = ops.msda_backward(output, *forward, True, has_reference)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in forward]
        fake_output = ops.msda_forward(*fakes)
        fake = ops.msda_backward(fake_output, *fakes, True, has_reference)
    for a, b in zip((output, *real), (fake_output, *fake), strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_that_someone_else_entered(device, backend, dtype):
    layer, inputs = _layer(device, backend), _layer_inputs(device)
    exact = layer(*inputs)
    with torch.autocast(device, dtype):
        output = layer(*inputs)
        output.float().square().sum().backward()
    assert output.dtype == dtype
    assert relative_error(output, exact) < 8 * torch.finfo(dtype).eps
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_autocast_does_not_change_the_operator(device, backend):
    problem = Problem.random(batch=1, queries=3, heads=2, dtypes=DTYPES)
    dtypes = {"value": torch.bfloat16, "reference": torch.float32, "points": torch.float16, "weights": torch.float32}
    plain = problem.run(backend, dtypes, device)
    with torch.autocast(device, torch.bfloat16):
        cast = problem.run(backend, dtypes, device)
    for name in plain:
        assert cast[name].dtype == plain[name].dtype
        torch.testing.assert_close(cast[name], plain[name], rtol=1e-5, atol=1e-5)


def _layer(device, backend="triton", **options) -> dm.MultiScaleDeformAttn2d:
    layer = dm.MultiScaleDeformAttn2d(32, num_heads=2, num_levels=2, num_points=2, backend=backend, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer.to(device)


def _layer_inputs(device, batch=2, queries=3):
    query, reference, value = (
        torch.randn(batch, queries, 32),
        torch.rand(batch, queries, 2, 2),
        torch.randn(batch, 57, 32),
    )
    return query.to(device), reference.to(device), value.to(device), [(5, 9), (3, 4)]


def test_inference_mode_then_training(device):
    layer = _layer(device)
    # Sizes that no test used before, so that they are cached in inference mode.
    query, reference, _, _ = _layer_inputs(device)
    value, sizes = torch.randn(2, 61, 32, device=device), [(7, 7), (3, 4)]
    with torch.inference_mode():
        inferred = layer(query, reference, value, sizes, [0, 49])
    output = layer(query, reference, value, sizes, [0, 49])
    output.sum().backward()
    assert torch.equal(inferred, output.detach())
    assert layer.value_proj.weight.grad.count_nonzero() > 0


def test_checkpointing(device):
    layer, (query, reference, value, sizes) = _layer(device), _layer_inputs(device)
    grads = []
    for use in (False, True):
        layer.zero_grad()
        leaf = query.clone().requires_grad_()
        if use:
            output = checkpoint(layer, leaf, reference, value, sizes, use_reentrant=False)
        else:
            output = layer(leaf, reference, value, sizes)
        output.square().sum().backward()
        grads.append([leaf.grad, *(p.grad.clone() for p in layer.parameters())])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)


def test_deepcopy_of_the_layer(device):
    layer, inputs = _layer(device), _layer_inputs(device)
    output = layer(*inputs)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(*inputs), output)
    assert twin.backend is dm.Backend.TRITON
    with torch.no_grad():
        twin.output_proj.bias += 1
    torch.testing.assert_close(twin(*inputs), output + 1)
    assert torch.equal(layer(*inputs), output)


@pytest.mark.parametrize("coordinates, levels", [(2, 2), (2, 1), (4, 2)])
def test_layer_is_four_linears_around_the_operator(device, coordinates, levels):
    layer, (query, _, value, sizes) = _layer(device), _layer_inputs(device)
    reference = torch.rand(2, 3, levels, coordinates, device=device)
    inner = dm.deformable_attention(
        layer.value_proj(value).view(2, 57, 2, 16), sizes, None, reference,
        layer.sampling_offsets(query).view(2, 3, 2, 2, 2, 2), layer.attention_weights(query).view(2, 3, 2, 4),
        backend="eager",
    )  # fmt: skip
    torch.testing.assert_close(layer(query, reference, value, sizes), layer.output_proj(inner), rtol=1e-4, atol=1e-4)


def test_layer_with_other_counts_per_level(device):
    layer = dm.MultiScaleDeformAttn2d(32, num_heads=2, num_levels=2, num_points=(3, 1), backend="triton").to(device)
    layer(*_layer_inputs(device)).sum().backward()
    assert layer.sampling_offsets.out_features == 2 * 4 * 2
    assert layer.attention_weights.weight.grad.isfinite().all()


def test_layer_starts_on_one_ray_per_head_with_uniform_attention():
    layer = dm.MultiScaleDeformAttn2d(64, num_heads=4, num_levels=2, num_points=3)
    offsets = layer.sampling_offsets(torch.randn(1, 64)).view(4, 2, 3, 2)
    rays = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    expected = rays[:, None, None] * torch.tensor([1.0, 2, 3])[:, None]
    torch.testing.assert_close(offsets, expected.expand(4, 2, 3, 2), atol=1e-6, rtol=0)
    assert layer.attention_weights(torch.randn(5, 64)).count_nonzero() == 0


@pytest.mark.parametrize(
    "options, text",
    [
        ({"dim": 30, "num_heads": 4}, "dim=30 is not a multiple of num_heads=4"),
        ({"dim": 32, "num_points": 0}, "num_points=0 must be positive"),
        ({"dim": 32, "num_levels": 3, "num_points": (4, 4)}, r"num_points=\(4, 4\) must be positive, one count or 3"),
        ({"dim": 32, "backend": "fast"}, "backend='fast' is not known: use None, 'cuda', 'triton', 'eager'"),
    ],
)
def test_layer_errors(options, text):
    with pytest.raises(ValueError, match=text):
        dm.MultiScaleDeformAttn2d(**options)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"dim": 32.0}, "dim=32.0: a whole number"),
        ({"dim": 32, "num_heads": "8"}, "num_heads='8': a whole number"),
        ({"dim": 32, "num_points": 4.0}, "num_points=4.0: one whole number, or one per level"),
        ({"dim": 32, "num_levels": 2, "num_points": [4.0, 2.0]}, r"num_points=\[4.0, 2.0\]: one whole number, or one"),
    ],
)
def test_layer_of_other_types(options, text):
    with pytest.raises(TypeError, match=text):
        dm.MultiScaleDeformAttn2d(**options)


def test_calls_that_do_not_fit_the_layer():
    layer, states, reference = dm.MultiScaleDeformAttn2d(32, 2, 2), torch.randn(1, 20, 32), torch.rand(1, 20, 1, 2)
    with pytest.raises(ValueError, match="spatial_shapes has 1 levels, the layer was made for num_levels=2"):
        layer(states, reference, states, [(4, 5)])
    with pytest.raises(TypeError, match="value is a ndarray: a torch.Tensor is expected"):
        layer(states, reference, states.numpy(), [(4, 5)])


def _msda(**changes):
    good = {
        "value": torch.randn(2, 57, 2, 16),
        "spatial_shapes": [(5, 9), (3, 4)],
        "level_start_index": None,
        "sampling_locations": torch.rand(2, 3, 2, 2, 4, 2),
        "attention_weights": torch.rand(2, 3, 2, 2, 4),
    }
    return dm.msda(**good | changes)


def _fused(**changes):
    good = {
        "value": torch.randn(2, 57, 2, 16),
        "spatial_shapes": [(5, 9), (3, 4)],
        "level_start_index": None,
        "reference_points": torch.rand(2, 3, 2, 2),
        "sampling_offsets": torch.rand(2, 3, 2, 2, 4, 2),
        "attention_logits": torch.rand(2, 3, 2, 8),
    }
    return dm.deformable_attention(**good | changes)


FLAT = torch.rand(2, 3, 2, 8, 2)
ERRORS = [
    (_msda, {"method": "soft"}, ValueError, "method='soft' is not known: use 'linear' or 'softmax'"),
    (_msda, {"backend": "fast"}, ValueError, "backend='fast' is not known: use None, 'cuda', 'triton', 'eager'"),
    (
        _msda,
        {"value": torch.randn(2, 57, 32)},
        ValueError,
        "value has shape (2, 57, 32): (B, S, M, D) is expected",
    ),
    (
        _msda,
        {"value": torch.randn(1, 57, 2, 16)},
        ValueError,
        "value (1, 57, 2, 16) has batch 1 and 2 heads, the points have 2",
    ),
    (
        _msda,
        {"value": torch.ones(2, 57, 2, 16, dtype=torch.int32)},
        TypeError,
        "value has dtype torch.int32: use float32",
    ),
    (
        _msda,
        {"sampling_locations": FLAT.long()[..., :8, :].view(2, 3, 2, 2, 4, 2)},
        TypeError,
        "sampling_locations has dtype torch.int64: use",
    ),
    (
        _msda,
        {"sampling_locations": torch.rand(2, 3, 2, 2, 4, 3)},
        ValueError,
        "sampling_locations has shape (2, 3, 2, 2, 4, 3): (B, Q, M, L, K, 2) is expected",
    ),
    (
        _msda,
        {"sampling_locations": torch.rand(2, 3, 2, 3, 4, 2)},
        ValueError,
        "sampling_locations has 3 levels in its axis 3 but spatial_shapes has 2",
    ),
    (
        _msda,
        {"sampling_locations": torch.rand(2, 3, 2, 2, 0, 2)},
        ValueError,
        "sampling_locations has shape (2, 3, 2, 2, 0, 2): a level needs at least one point",
    ),
    (
        _msda,
        {"sampling_locations": FLAT},
        ValueError,
        "sampling_locations has a flat point axis (2, 3, 2, 8, 2): pass num_points",
    ),
    (
        _msda,
        {"sampling_locations": FLAT, "num_points": [4, 3]},
        ValueError,
        "num_points=[4, 3] must hold 2 positive counts that sum to 8",
    ),
    (
        _msda,
        {"sampling_locations": FLAT, "num_points": [8, 0]},
        ValueError,
        "num_points=[8, 0] must hold 2 positive counts",
    ),
    (
        _msda,
        {"num_points": [4, 5]},
        ValueError,
        "num_points=[4, 5] does not fit sampling_locations (2, 3, 2, 2, 4, 2): leave it out",
    ),
    (
        _msda,
        {"attention_weights": torch.rand(2, 3, 2, 7)},
        ValueError,
        "attention_weights has shape (2, 3, 2, 7), the points ask for (2, 3, 2, 8)",
    ),
    (
        _msda,
        {"attention_weights": torch.rand(2, 3, 2, 4, 2)},
        ValueError,
        "attention_weights has shape (2, 3, 2, 4, 2), the points ask for (2, 3, 2, 8)",
    ),
    (
        _msda,
        {"attention_weights": torch.rand(2, 3, 2, 2, 4, device="meta")},
        ValueError,
        "attention_weights is on meta but value is on cpu: move it there",
    ),
    (
        _msda,
        {"spatial_shapes": [(5, 9)] * 65},
        ValueError,
        "spatial_shapes has 65 levels: 1 to 64 are supported",
    ),
    (
        _msda,
        {"spatial_shapes": [5, 9]},
        ValueError,
        "spatial_shapes=[5, 9]: one pair (H, W) per level is expected",
    ),
    (_msda, {"spatial_shapes": [(5, 9, 1), (3, 4, 1)]}, ValueError, "one pair (H, W) per level is expected"),
    (
        _msda,
        {"spatial_shapes": torch.tensor([5, 9])},
        ValueError,
        "spatial_shapes has shape (2,): (L, 2) as (H, W) is expected",
    ),
    (
        _msda,
        {"spatial_shapes": torch.tensor(5)},
        ValueError,
        "spatial_shapes has shape (): (L, 2) as (H, W) is expected",
    ),
    (
        _msda,
        {"spatial_shapes": torch.tensor([[5.0, 9], [3, 4]])},
        TypeError,
        "spatial_shapes has dtype torch.float32: use int64 or int32",
    ),
    (
        _msda,
        {"spatial_shapes": [(5.0, 9), (3, 4)]},
        TypeError,
        "spatial_shapes holds 5.0: use integers",
    ),
    (
        _msda,
        {"spatial_shapes": [(5, 8), (3, 4)]},
        ValueError,
        "spatial_shapes=[(5, 8), (3, 4)] hold 52 pixels but value has 57 rows",
    ),
    (_msda, {"level_start_index": [0]}, ValueError, "level_start_index has 1 entries but there are 2 levels"),
    (
        _msda,
        {"level_start_index": torch.tensor([[0, 45]])},
        ValueError,
        "level_start_index has shape (1, 2): (2,) is expected",
    ),
    (
        _msda,
        {"level_start_index": torch.tensor([0.0, 45])},
        TypeError,
        "level_start_index has dtype torch.float32: use int64 or int32",
    ),
    (
        _msda,
        {"level_start_index": [0, 50]},
        ValueError,
        "put level 1 (3×4) at rows 50 to 62, but value has 57 rows",
    ),
    (
        _msda,
        {"spatial_shapes": np.array([(5, 9), (3, 4)])},
        TypeError,
        "spatial_shapes is a ndarray: a tensor or a list of pairs (H, W) is expected, which .tolist() gives",
    ),
    (
        _fused,
        {"reference_points": torch.rand(1, 3, 2, 2)},
        ValueError,
        "reference_points has shape (1, 3, 2, 2): (2, 3, 2 or 1, 2 or 4) is expected",
    ),
    (
        _fused,
        {"reference_points": torch.rand(2, 3, 2, 3)},
        ValueError,
        "reference_points has shape (2, 3, 2, 3)",
    ),
    (_fused, {"reference_points": torch.rand(2, 3, 2)}, ValueError, "reference_points has shape (2, 3, 2)"),
    (_fused, {"sampling_offsets": FLAT}, ValueError, "sampling_offsets has a flat point axis"),
    (
        _fused,
        {"sampling_offsets": torch.rand(2, 3, 2, 2, 4, 2, device="meta")},
        ValueError,
        "sampling_offsets is on meta but value is on cpu",
    ),
    (
        _fused,
        {"reference_points": torch.rand(2, 3, 2, 2, device="meta")},
        ValueError,
        "reference_points is on meta but value is on cpu",
    ),
    (
        _fused,
        {"attention_logits": torch.rand(2, 3, 2, 9)},
        ValueError,
        "attention_logits has shape (2, 3, 2, 9), the points ask for (2, 3, 2, 8)",
    ),
    (
        _fused,
        {"attention_logits": torch.ones(2, 3, 2, 8, dtype=torch.int64)},
        TypeError,
        "attention_logits has dtype torch.int64",
    ),
]


@pytest.mark.parametrize(
    "call, changes, error, text", ERRORS, ids=[f"{c.__name__}-{i}" for i, (c, *_) in enumerate(ERRORS)]
)
def test_errors_name_argument_value_and_remedy(call, changes, error, text):
    before = dm.call_counts.copy()
    with pytest.raises(error, match=re.escape(text)):
        call(**changes)
    assert dm.call_counts == before


@pytest.mark.parametrize(
    "starts, error, text",
    [
        ([0], ValueError, "level_start_index has 1 entries but there are 2 levels"),
        ([0, 45, 99], ValueError, "level_start_index has 3 entries but there are 2 levels"),
        ([0.9, 45], TypeError, "level_start_index holds 0.9: use integers"),
        ([-5, 45], ValueError, r"level_start_index=\[-5, 45\]: value has rows 0 to 57"),
        (torch.tensor([0, 58]), ValueError, r"level_start_index=\[0, 58\]: value has rows 0 to 57"),
    ],
)
def test_starts_are_checked_beside_sizes_that_lie_on_a_device(starts, error, text):
    good = {"value": (2, 57, 2, 16), "sampling_locations": (2, 3, 2, 2, 4, 2), "attention_weights": (2, 3, 2, 2, 4)}
    operands = {name: torch.empty(shape, device="meta") for name, shape in good.items()}
    operands["spatial_shapes"] = torch.empty(2, 2, dtype=torch.int64, device="meta")
    with pytest.raises(error, match=text):
        dm.msda(**operands, level_start_index=starts, backend="triton")
    assert dm.msda(**operands, level_start_index=[0, 45], backend="triton").shape == (2, 3, 32)


def test_fake_tensors_before_and_after_real_ones(device):
    rows = 100 + len(layout._tensors)

    def call():
        value, points = torch.ones(1, rows, 1, 16, device=device), torch.ones(1, 2, 1, 1, 2, 2, device=device) / 2
        return dm.msda(value, [(1, rows)], None, points, points[..., 0], backend="triton")

    def fake():
        with FakeTensorMode():
            return call()

    assert isinstance(fake(), FakeTensor)
    assert call().abs().sum() > 0
    assert isinstance(fake(), FakeTensor)


def test_distributed_tensors_are_refused():
    class DTensor(torch.Tensor):
        pass

    with pytest.raises(TypeError, match=r"value is a DTensor: .* pass \.to_local\(\), or backend='eager'"):
        _msda(value=torch.randn(2, 57, 2, 16).as_subclass(DTensor), backend="triton")


def test_the_good_calls_are_good():
    assert _msda().shape == _fused().shape == (2, 3, 32)
    assert _msda(attention_weights=torch.rand(2, 3, 2, 8)).shape == (2, 3, 32)
    flat = {"sampling_locations": FLAT, "num_points": [5, 3]}
    assert _msda(**flat, attention_weights=torch.rand(2, 3, 2, 8)).shape == (2, 3, 32)
    with pytest.raises(ValueError, match="the points ask for"):
        _msda(**flat, attention_weights=torch.rand(2, 3, 2, 2, 4))
    assert _fused(attention_logits=torch.rand(2, 3, 2, 2, 4)).shape == (2, 3, 32)


def test_float64_cannot_be_forced_through_the_kernel():
    for name in ("value", "sampling_locations"):
        good = {"value": (2, 57, 2, 16), "sampling_locations": (2, 3, 2, 2, 4, 2)}[name]
        with pytest.raises(
            RuntimeError, match="backend='triton' cannot run: torch.float64 is not supported by the ker"
        ):
            _msda(**{name: torch.rand(good, dtype=torch.float64)}, backend="triton")


def test_resolve_says_what_runs_and_why_not_the_other():
    triton, eager = dm.Backend.TRITON, dm.Backend.EAGER
    for dtype, backend in itertools.product(DTYPES, (None, "eager")):
        assert dm.resolve("cpu", dtype, backend).backend is eager
    assert "plain path unless" in dm.resolve("cpu", torch.float32).reasons[triton]
    asked = "backend='eager' was asked for"
    assert dm.resolve("cpu", torch.float32, "eager").reasons == {triton: asked, dm.Backend.CUDA: asked}
    assert "torch.float64 is not supported" in dm.resolve("cuda", torch.float64).reasons[triton]
    assert dm.msda.resolve is dm.deformable_attention.resolve is dm.resolve
    with pytest.raises(ValueError, match="backend='fast' is not known"):
        dm.resolve("cpu", torch.float32, "fast")
    with pytest.raises(RuntimeError, match="backend='triton' cannot run: torch.float64"):
        dm.resolve("cpu", torch.float64, dm.Backend.TRITON)


def test_resolve_outside_the_interpreter():
    script = """
        import torch
        import deformops_models as dm
        print(dm.resolve("cpu", torch.float32).reasons[dm.Backend.TRITON])
        print(dm.resolve("cuda", torch.bfloat16).backend)
        print(dm.resolve("cuda", torch.bfloat16).reasons[dm.Backend.EAGER])
        for device in ("cpu", "mps"):
            try:
                dm.resolve(device, torch.float32, "triton")
            except RuntimeError as error:
                print(error)
        import os
        os.environ.pop("CC", None)
        os.environ["PATH"] = ""
        from deformops_models import backend
        backend.compiler.cache_clear()
        backend._device_problem.cache_clear()
        try:
            dm.resolve("cuda", torch.float32)
        except RuntimeError as error:
            print(error)
    """
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == [
        "tensors are on cpu; the kernels need CUDA",
        "triton",
        "CUDA tensors run the kernels",
        "backend='triton' cannot run: tensors are on cpu; the kernels need CUDA",
        "backend='triton' cannot run: tensors are on mps; the kernels need CUDA",
        "the Triton kernel cannot run: no C compiler found, which Triton needs at first launch: install gcc or set CC, "
        "nor the CUDA kernel: torch sees no GPU. Pass backend='eager' for plain PyTorch",
    ], run.stderr[-2000:]


TRANSFORMS = {
    "jvp": lambda run, value: torch.func.jvp(run, (value,), (value,)),
    "grad": lambda run, value: torch.func.grad(lambda v: run(v).sum())(value),
    "vmap": lambda run, value: torch.func.vmap(run)(value[None]),
    "functionalize": lambda run, value: torch.func.functionalize(run)(value),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_functions_are_refused_and_leave_nothing_behind(transform, device):
    # A size that nobody has asked for before, so that it is not looked up.
    rows = 100 + len(layout._tensors)
    value, points = torch.randn(1, rows, 1, 16, device=device), torch.rand(1, 2, 1, 1, 2, 2, device=device)
    weights = torch.rand(1, 2, 1, 1, 2, device=device)

    def run(value, backend="triton"):
        return dm.msda(value, [(1, rows)], None, points, weights, backend=backend)

    with pytest.raises(NotImplementedError, match="pass backend='eager'"):
        TRANSFORMS[transform](run, value)
    leaf = value.clone().requires_grad_()
    assert relative_error(run(value), run(value.double(), "eager")) < 1e-5
    run(leaf).sum().backward()
    assert leaf.grad.abs().sum() > 0


def test_forward_mode_derivatives_are_refused(device):
    value, *rest = arguments(device, coordinates=0)
    value = value.detach()

    def operator(value):
        return ops.msda_forward(value, *rest)

    def run(value):
        points, weights = rest[3].detach(), rest[4].detach()
        return dm.msda(value, [(5, 9), (3, 4)], None, points, weights, num_points=(2, 1), backend="triton")

    for jvp in (
        lambda v: torch.func.jvp(operator, (v,), (v,))[1],
        torch.compile(lambda v: torch.func.jvp(run, (v,), (v,))[1], backend="aot_eager"),
    ):
        with pytest.raises(Exception, match="forward-mode derivatives: pass backend='eager'"):
            jvp(value)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="pass backend='eager'"):
        operator(torch.autograd.forward_ad.make_dual(value, value))
    with pytest.raises(NotImplementedError, match="pass backend='eager'"):
        torch.func.grad(lambda v: operator(v).sum())(value)


def test_forward_over_reverse_is_refused(device):
    value, *rest = arguments(device)
    output = ops.msda_forward(value, *rest)
    with torch.autograd.forward_ad.dual_level():
        grad = torch.autograd.forward_ad.make_dual(torch.ones_like(output), torch.ones_like(output))
        with pytest.raises(NotImplementedError, match="pass backend='eager'"):
            torch.autograd.grad(output, value, grad)


def test_a_batch_of_gradients(device):
    problem = Problem.random(batch=1, queries=2, heads=1)
    leaves = [t.float().to(device).requires_grad_() for t in problem.operands().values()]
    value, *rest = leaves
    output = dm.deformable_attention(value, problem.sizes, None, *rest, num_points=problem.num_points, backend="triton")
    grads = torch.randn(3, *output.shape, device=device)
    batched = torch.autograd.grad(output, leaves, grads, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(output, leaves, grad, retain_graph=True) for grad in grads]
    for found, expected in zip(batched, zip(*singly, strict=True), strict=True):
        assert relative_error(found, torch.stack(expected)) < 1e-5


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("size", [(0, 0), (0, 4)])
def test_levels_without_pixels_sample_nothing(device, backend, size):
    value = torch.rand(2, 0, 2, 16, device=device, requires_grad=True)
    locations, weights = torch.rand(2, 3, 2, 1, 4, 2, device=device), torch.rand(2, 3, 2, 1, 4, device=device)
    output = dm.msda(value, [size], None, locations, weights, backend=backend)
    output.sum().backward()
    assert torch.equal(output, torch.zeros(2, 3, 32, device=device)) and value.grad.shape == value.shape


@pytest.mark.parametrize(
    "change, error",
    [
        ({"value": np.zeros((2, 57, 2, 16))}, "value is a ndarray: a torch.Tensor is expected"),
        ({"attention_weights": None}, "attention_weights is a NoneType"),
        ({"spatial_shapes": 5}, "spatial_shapes is a int: a tensor or a list of pairs"),
        ({"level_start_index": 0}, "level_start_index is a int: a tensor, a list or None"),
        ({"spatial_shapes": [("5", "9"), (3, 4)]}, "spatial_shapes holds '5': use integers"),
        ({"spatial_shapes": [(5, 9), (3, None)]}, "spatial_shapes holds None: use integers"),
        ({"spatial_shapes": [(5, 9), (3.0, 4)]}, "spatial_shapes holds 3.0: use integers"),
        ({"level_start_index": [[0], [45]]}, r"level_start_index holds \[0\]: use integers"),
        ({"level_start_index": [0, None]}, "level_start_index holds None: use integers"),
        ({"num_points": 4.0}, "num_points=4.0: one whole number per level"),
        ({"num_points": 4}, "num_points=4: one whole number per level"),
        ({"num_points": [4.5, 3.5]}, r"num_points=\[4.5, 3.5\]: one whole number per level"),
    ],
    ids=str,
)
def test_arguments_of_another_type(change, error):
    with pytest.raises(TypeError, match=error):
        _msda(**change)
