"""torch.export, AOTInductor and ONNX: programs run on other batches and sizes than they were made from."""

import copy
import functools
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request

import pytest
import torch
from helpers import Problem, free_port, relative_error
from models import DETECTORS, pixels_and_mask, transformers_attention
from test_compile import DEFORMABLE_DETR, MASK2FORMER, ROOT, fresh_process, patched
from torch import Tensor, nn
from torch.export import Dim

import deformops_models as dm
from deformops_models import ops

pytestmark = pytest.mark.usefixtures("wide_tiles")

MODELS = (MASK2FORMER, DEFORMABLE_DETR, "hf-deformable-detr-two-stage")


class Tensors(nn.Module):
    """A detector whose results are two tensors, which a process without its library can take."""

    def __init__(self, detector: nn.Module):
        super().__init__()
        self.detector = detector

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.detector(pixel_values=pixel_values, pixel_mask=pixel_mask).values())[:2]


class Attend(nn.Module):
    """The operator at fixed level sizes, behind something to compute on both sides."""

    def forward(self, value: Tensor, reference: Tensor, points: Tensor, weights: Tensor) -> Tensor:
        sizes, counts = [(5, 9), (3, 4)], [4, 4]
        backend = None if value.is_cuda else "triton"
        operands = value * 1, sizes, None, reference, points, weights
        return dm.deformable_attention(*operands, num_points=counts, backend=backend) * 1


class AttendToMaps(nn.Module):
    """The operator over feature maps, whose sizes are its level sizes."""

    def __init__(self, backend: str = "triton"):
        super().__init__()
        self.backend = backend

    def forward(self, fine: Tensor, coarse: Tensor, reference: Tensor, points: Tensor, weights: Tensor) -> Tensor:
        sizes = [tuple(level.shape[-2:]) for level in (fine, coarse)]
        rows = torch.cat([level.flatten(2) for level in (fine, coarse)], 2).transpose(1, 2)
        value = rows.unflatten(2, (2, 16))
        return dm.deformable_attention(value, sizes, None, reference, points, weights, backend=self.backend)


class AttendToLocations(nn.Module):
    def __init__(self, backend: str = "triton"):
        super().__init__()
        self.backend = backend

    def forward(self, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return dm.msda(value, [(5, 9), (3, 4)], None, locations, weights, backend=self.backend)


def maps_and_rest(size: tuple[int, int], device: str) -> tuple[Tensor, ...]:
    fine, coarse = (torch.randn(2, 32, k * size[0], k * size[1]) for k in (2, 1))
    others = torch.rand(2, 5, 2, 2), torch.randn(2, 5, 2, 2, 4, 2), torch.randn(2, 5, 2, 2, 4)
    return tuple(t.to(device) for t in (fine, coarse, *others))


_HEIGHT, _WIDTH = Dim("height", min=2, max=40), Dim("width", min=2, max=40)
MAP_AXES = {"fine": {2: 2 * _HEIGHT, 3: 2 * _WIDTH}, "coarse": {2: _HEIGHT, 3: _WIDTH}}
MAP_AXES |= dict.fromkeys(("reference", "points", "weights"))


def export(model: nn.Module, inputs: tuple[Tensor, ...], **axes: dict[int, Dim]) -> torch.export.ExportedProgram:
    """`axes` are dynamic axes by argument."""
    with torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=axes, strict=False)


def export_attend(device: str) -> torch.export.ExportedProgram:
    batch, queries = Dim("batch", min=1, max=16), Dim("queries", min=2, max=100)
    axes = {"value": {0: batch}} | {name: {0: batch, 1: queries} for name in ("reference", "points", "weights")}
    return export(Attend().to(device), operands(2, 5, device)[0], **axes)


@pytest.mark.parametrize("strict", [False, True])
def test_every_axis_may_be_found_out(strict):
    value, points, weights = torch.randn(2, 57, 2, 16), torch.rand(2, 3, 2, 2, 4, 2), torch.rand(2, 3, 2, 2, 4)
    inputs, axes = (value, points, weights), [dict.fromkeys(range(t.dim()), Dim.AUTO) for t in (value, points, weights)]
    program = torch.export.export(AttendToLocations(), inputs, dynamic_shapes=axes, strict=strict)
    assert calls(program) == 1
    inputs = torch.randn(3, 57, 2, 16), torch.rand(3, 7, 2, 2, 4, 2), torch.rand(3, 7, 2, 2, 4)
    assert relative_error(program.module()(*inputs), AttendToLocations("eager")(*inputs)) < 1e-5


def operands(batch: int, queries: int, device: str = "cpu") -> tuple[tuple[Tensor, ...], Tensor]:
    """Operands and the exact output."""
    problem = Problem.random(batch=batch, queries=queries, heads=2)
    return tuple(t.float().to(device) for t in problem.operands().values()), problem.run("eager")["output"]


def calls(program: torch.export.ExportedProgram) -> int:
    return sum(node.target is ops.msda_forward for node in program.graph.nodes)


def batch_of(size: int, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Other images than those that the program was made from."""
    pixels, mask = pixels_and_mask(model)
    order = [(image + 1) % 2 for image in range(size)]
    return pixels[order] * 0.7, mask[order]


def export_any_batch(model: nn.Module) -> tuple[torch.export.ExportedProgram | None, str]:
    """The program for up to six images, or the reason where upstream's own model has none either."""
    inputs, batch = pixels_and_mask(model), {0: Dim("batch", min=1, max=6)}
    try:
        return export(model, inputs, pixel_values=batch, pixel_mask=batch), ""
    except torch._dynamo.exc.UserError as error:
        with pytest.raises(torch._dynamo.exc.UserError, match="Constraints violated"):
            export(dm.unpatch(copy.deepcopy(model)), inputs, pixel_values=batch, pixel_mask=batch)
        return None, str(error).splitlines()[0]


@pytest.mark.parametrize("name", MODELS)
def test_export_with_any_batch(name, device, cell):
    pytest.importorskip("transformers")
    cell(name, "torch.export, any batch", device)
    detector = DETECTORS[name]
    model = Tensors(patched(detector, device))
    program, narrowed = export_any_batch(model)
    if narrowed:
        pytest.skip(f"upstream's own model narrows the batch too: {narrowed}")
    assert calls(program) == detector.attentions
    run = program.module()
    for size in (1, 2, 5):
        inputs = batch_of(size, model)
        before = dm.call_counts["msda_forward"]
        with torch.no_grad():
            actual, expected = run(*inputs), model(*inputs)
        assert dm.call_counts["msda_forward"] == before + 2 * detector.attentions
        for a, b in zip(actual, expected, strict=True):
            assert relative_error(a, b) < 1e-4
    with pytest.raises((RuntimeError, AssertionError)):
        run(*batch_of(7, model))
    # Upstream's code fixes the image size, and says so rather than to compute nonsense.
    pixels, mask = batch_of(2, model)
    with pytest.raises((RuntimeError, AssertionError)):
        run(pixels[..., :64, :96].contiguous(), mask[..., :64, :96].contiguous())


def test_export_with_any_level_sizes(device):
    """What upstream's models would need for images of any size, which they do not export."""
    program = export(AttendToMaps().to(device), maps_and_rest((6, 9), device), **MAP_AXES)
    assert calls(program) == 1
    for form in (program, program.run_decompositions()):
        for size in ((6, 9), (4, 13), (11, 5)):
            inputs = maps_and_rest(size, device)
            assert relative_error(form.module()(*inputs), AttendToMaps("eager")(*inputs)) < 1e-5


def test_export_of_the_operator_keeps_one_node(device):
    program = export_attend(device)
    for form in (program, program.run_decompositions()):
        assert calls(form) == 1
        for batch, queries in ((1, 2), (2, 9), (5, 33)):
            inputs, exact = operands(batch, queries, device)
            assert relative_error(form.module()(*inputs), exact) < 1e-5
    for batch, queries in ((17, 5), (2, 101)):
        with pytest.raises((RuntimeError, AssertionError)):
            program.module()(*operands(batch, queries, device)[0])


def test_export_is_loaded_in_a_fresh_process(device, tmp_path):
    inputs, exact = operands(5, 7, device)
    torch.export.save(export_attend(device), tmp_path / "program.pt2")
    torch.save(inputs, tmp_path / "inputs.pt")
    script = f"""
        import torch
        import deformops_models.ops

        program = torch.export.load(r"{tmp_path}/program.pt2").module()
        torch.save(program(*torch.load(r"{tmp_path}/inputs.pt")), r"{tmp_path}/output.pt")
    """
    # On a CPU the operator then runs in plain PyTorch.
    result = fresh_process(script)
    assert result.returncode == 0, result.stderr[-2000:]
    assert relative_error(torch.load(tmp_path / "output.pt"), exact) < 1e-5


@pytest.mark.parametrize("family", ["mask2former", "deformable_detr"])
def test_export_after_unpatch_is_upstreams(family):
    from test_patching import arguments

    module = transformers_attention(family)
    inputs = arguments(module)

    def code() -> str:
        return torch.export.export(module, (), inputs, strict=False).graph_module.code

    before = code()
    dm.patch(module, backend="triton")
    assert "deformops_models" in code()
    dm.unpatch(module)
    assert code() == before
    with dm.patched(module, backend="eager"):
        assert code() == before


# AOTInductor


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at tracing where CUDA is only pretended")
def test_aoti_sees_a_triton_kernel_in_place_of_the_operator():
    """As far as AOTInductor comes without a GPU: the graph that it would compile."""
    script = """
        import torch
        import triton
        from torch._inductor.compile_fx import compile_fx_aot
        from torch._subclasses.fake_tensor import FakeTensorMode
        from triton.backends.compiler import GPUTarget

        from test_export import Attend, Dim, export

        class Hopper:
            def get_current_target(self):
                return GPUTarget("cuda", 90, 32)

        triton.runtime.driver.set_active(Hopper())
        torch._inductor.config.joint_graph_constant_folding = False
        with FakeTensorMode(allow_non_fake_inputs=True):
            shapes = (2, 57, 2, 16), (2, 5, 2, 2), (2, 5, 2, 8, 2), (2, 5, 2, 8)
            inputs = tuple(torch.empty(shape, device="cuda") for shape in shapes)
        batch, queries = Dim("batch", min=1), Dim("queries", min=2)
        axes = {"value": {0: batch}} | {name: {0: batch, 1: queries} for name in ("reference", "points", "weights")}
        program = export(Attend(), inputs, **axes)

        def look(graph, *_, **__):
            for node in graph.graph.nodes:
                if "triton" in str(node.target):
                    print(node.target, node.kwargs["tensors_to_clone"], node.kwargs["kwargs"]["WIDE"])
                assert "deformops" not in str(node.target)
            raise SystemExit

        compile_fx_aot(program.module(check_guards=False), list(inputs), inner_compile=look)
    """
    result = fresh_process(script)
    # Any other tensor to clone would be a copy of an operand at each call.
    seen = "triton_kernel_wrapper_functional ['output_ptr'] False\n"
    assert result.stdout == seen, result.stderr[-2000:]


def aoti_in_a_fresh_process(program, inputs: tuple[Tensor, ...], folder, **variables: str) -> tuple[Tensor, ...]:
    """What the packaged program makes of `inputs` where only torch can be imported."""
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    torch.save(inputs, folder / "inputs.pt")
    script = f"""
        import sys

        sys.modules |= dict.fromkeys(("deformops_models", "transformers", "triton"))
        import torch

        torch.empty(0, device="{inputs[0].device.type}")
        program = torch._inductor.aoti_load_package(r"{path}")
        with torch.inference_mode():
            outputs = program(*torch.load(r"{folder}/inputs.pt"))
        torch.save(outputs, r"{folder}/outputs.pt")
    """
    result = fresh_process(script, PYTHONFAULTHANDLER="1", **variables)
    assert result.returncode == 0, f"{result.returncode}: {result.stdout} {result.stderr[-3000:]}"
    outputs = torch.load(folder / "outputs.pt")
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


@pytest.fixture(scope="module")
def needs_packages(tmp_path_factory):
    """Called with a device, skips where torch cannot load even a package that has nothing of ours."""

    @functools.cache
    def trouble(device: str) -> str | None:
        layer, x = nn.Linear(16, 16).to(device), torch.randn(4, 16, device=device)
        program = torch.export.export(layer, (x,))
        try:
            (output,) = aoti_in_a_fresh_process(program, (x,), tmp_path_factory.mktemp("linear"))
        except AssertionError as error:
            return str(error)[-300:]
        assert relative_error(output, layer(x)) < 1e-2
        return None

    def check(device: str) -> None:
        if found := trouble(device):
            pytest.skip(f"torch cannot load a package of nn.Linear here either: {found}")

    return check


@pytest.mark.gpu
@pytest.mark.timeout(900)  # AOTInductor and its loader take minutes on a slow host
def test_aoti_package_of_the_operator(tmp_path, needs_packages):
    needs_packages("cuda")
    inputs, exact = operands(5, 33, "cuda")
    (output,) = aoti_in_a_fresh_process(export_attend("cuda"), inputs, tmp_path)
    assert relative_error(output, exact) < 1e-5
    too_many, _ = operands(17, 33, "cuda")
    torch.save(too_many, tmp_path / "inputs.pt")
    script = f"""
        import torch

        torch.cuda.init()
        torch._inductor.aoti_load_package(r"{tmp_path}/model.pt2")(*torch.load(r"{tmp_path}/inputs.pt"))
    """
    assert fresh_process(script, AOTI_RUNTIME_CHECK_INPUTS="1").returncode != 0


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [MASK2FORMER, DEFORMABLE_DETR])
def test_aoti_package_of_a_model(name, tmp_path, cell, needs_packages):
    pytest.importorskip("transformers")
    cell(name, "AOTInductor", "cuda")
    needs_packages("cuda")
    model = Tensors(patched(DETECTORS[name], "cuda"))
    program, narrowed = export_any_batch(model)
    if narrowed:
        program = export(model, pixels_and_mask(model), pixel_values=None, pixel_mask=None)
    inputs = batch_of(2 if narrowed else 5, model)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = model(*inputs)
    for a, b in zip(aoti_in_a_fresh_process(program, inputs, tmp_path), expected, strict=True):
        assert relative_error(a, b) < 1e-3


@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_aoti_example_packages_and_serves(device, tmp_path, monkeypatch, needs_packages):
    pytest.importorskip("transformers")
    image_module = pytest.importorskip("PIL.Image")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler to package with")
    if device == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    example, package = ROOT / "examples" / "serve_aoti.py", tmp_path / "model.pt2"
    words = ["package", "--model", "shapes-tiny", "--out", str(package), "--size", "64"]
    made = subprocess.run([sys.executable, example, *words], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-3000:]

    image = image_module.effect_mandelbrot((96, 64), (-2, -1, 1, 1), 100).convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG")
    port = free_port()
    script = f"""
        import runpy, sys

        sys.modules |= dict.fromkeys(("deformops_models", "transformers", "triton"))
        sys.argv = ["serve_aoti.py", "serve", "--out", r"{package}", "--port", "{port}"]
        runpy.run_path(r"{example}", run_name="__main__")
    """
    server = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE, text=True)
    try:
        found = json.loads(ask(port, file.getvalue(), server))
        with pytest.raises(urllib.error.HTTPError, match="400: Bad Request") as refused:
            ask(port, file.getvalue()[:500], server)
        assert b"the body is no image" in refused.value.read()
    except AssertionError:
        needs_packages(device)
        raise
    finally:
        server.kill()
        server.communicate()

    dtype, bound = ("bfloat16", 0.05) if device == "cuda" else ("float32", 1e-3)
    model = dm.unpatch(dm.Mask2Former.from_pretrained("shapes-tiny", device=device, dtype=dtype))
    pixels = torch.tensor(list(image.resize((64, 64)).tobytes()), device=device).view(1, 64, 64, 3)
    statistics = torch.tensor([[123.675, 116.28, 103.53], [58.395, 57.12, 57.375]], device=device)
    with torch.inference_mode():
        outputs = model(((pixels - statistics[0]) / statistics[1]).movedim(-1, 1).to(model.dtype))
    scores, labels = outputs.class_queries_logits[0].float().softmax(-1)[:, :-1].max(-1)
    areas = (outputs.masks_queries_logits[0] > 0).float().mean((-1, -2))
    names = [model.config.id2label[label] for label in labels.tolist()]
    wanted = list(zip(scores.tolist(), names, areas.tolist(), strict=True))
    surely = [one for one in wanted if one[0] > 0.5 + bound]
    assert surely and len(found) <= sum(score > 0.5 - bound for score, *_ in wanted)
    for score, name, area in surely:
        expected = [pytest.approx(score, abs=bound), name, pytest.approx(area, abs=bound)]
        assert any(one == expected for one in found)


def ask(port: int, body: bytes, server: subprocess.Popen) -> bytes:
    """What a server on this machine answers once it listens."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(1200):  # loading takes a minute on some machines
        assert server.poll() is None, server.stderr.read()[-3000:]
        try:
            with direct.open(f"http://localhost:{port}", body, timeout=60) as answer:
                return answer.read()
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            time.sleep(0.5)
    raise AssertionError("nobody listens")


# ONNX


@pytest.mark.parametrize("way", ["unpatch", "eager"])
def test_export_to_onnx(way, cell):
    from test_patching import arguments

    if importlib.util.find_spec("onnxscript") is None:
        pytest.skip("the package onnxscript, with which torch exports to ONNX, is not installed")
    from onnx.reference import ReferenceEvaluator

    cell(MASK2FORMER, "ONNX, attention alone", "cpu")
    module = dm.patch(transformers_attention("mask2former"), backend="triton")
    inputs = arguments(module)
    expected = module(**inputs)[0]
    dm.unpatch(module)
    if way == "eager":
        dm.patch(module, backend="eager")
    program = torch.onnx.export(module, (), kwargs=inputs, dynamo=True, verbose=False)
    proto = program.model_proto
    assert {node.domain for node in proto.graph.node} <= {"", "ai.onnx"}
    tensors = {name: value.numpy() for name, value in inputs.items() if isinstance(value, Tensor)}
    (output, *_) = ReferenceEvaluator(proto).run(None, {i.name: tensors[i.name] for i in proto.graph.input})
    assert relative_error(torch.from_numpy(output), expected) < 1e-4
