"""`deformops-models doctor`: what this machine has, what will run on it, and whether that computes the right thing."""

import importlib.metadata
import importlib.util
import itertools
import platform
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deformops_models import __version__, reference
from deformops_models.api import deformable_attention, msda
from deformops_models.backend import Backend, compiler, cuda_problem, resolve
from deformops_models.console import table

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_PACKAGES = ("transformers", "timm", "mmcv", "mmcv-lite", "mmengine", "mmdet", "rfdetr", "ultralytics", "accelerate")
_PACKAGES += ("peft", "kernels", "torchao", "bitsandbytes", "torchvision")

_SIZES = ((23, 31), (12, 17))
_STARTS = (0, 23 * 31)
_BATCH, _QUERIES, _HEADS, _CHANNELS, _POINTS = 2, 50, 4, 32, 4
_ROWS = sum(height * width for height, width in _SIZES)

#: Case name to the dtypes of value and of all other operands; the mixes are what autocast hands over.
_CASES = {
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16 + float32": (torch.float16, torch.float32),
    "bfloat16 + float32": (torch.bfloat16, torch.float32),
}
_OPERATORS = ("msda", "msda softmax", "deformable_attention 2", "deformable_attention 4")


def describe() -> str:
    """The machine, the backend of each device and dtype with the reasons, the frameworks and what can be patched."""
    machine = [
        ("deformops-models", __version__),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, built for {_built_for()}"),
        ("triton", _version("triton")),
        ("C compiler", compiler() or "none; Triton needs one at its first launch: install gcc or set CC"),
        *_gpus(),
    ]
    backends = [("DEVICE", "DTYPE", "RUNS", "WHY NOT THE OTHER"), *_backends()]
    packages = [(name, _version(name)) for name in _PACKAGES]
    sections = (("Machine", machine), ("Backends", backends), ("Frameworks", packages), ("Can be patched", _families()))
    return "\n\n".join(f"{title}\n{table(rows, '  ')}" for title, rows in sections)


def _built_for() -> str:
    return f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda or 'none'}"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpus() -> Iterator[tuple[str, str]]:
    for index in range(_gpu_count()):
        facts = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        bfloat16 = "native bfloat16" if native else "no native bfloat16, use float16"
        memory = f"{facts.total_memory / 2**30:.0f} GiB"
        yield f"GPU {index}", f"{facts.name}, SM {facts.major}.{facts.minor}, {memory}, {bfloat16}"
    if not _gpu_count():
        yield "GPU", "none that torch can use"


def _backends() -> Iterator[tuple[str, str, str, str]]:
    for device in ["cpu", *(f"cuda:{index}" for index in range(_gpu_count()))]:
        for dtype in _DTYPES:
            name = str(dtype).removeprefix("torch.")
            try:
                choice = resolve(device, dtype)
                reasons = "; ".join(f"{backend}: {why}" for backend, why in choice.reasons.items())
                yield device, name, str(choice.backend), reasons
            except RuntimeError as error:
                yield device, name, "nothing", str(error)


def _families() -> Iterator[tuple[str, str, str]]:
    from deformops_models.patches import mmcv_lite
    from deformops_models.patching import check_family, families

    for family in families():
        yes = "yes"
        if family.framework == "mmcv" and importlib.util.find_spec("mmcv") and mmcv_lite.install():
            yes = "yes, once deformops_models.patches.mmcv_lite.install() was called: mmcv's compiled part is missing"
        if family.module is None:
            yes = "yes, if its signature and projections are known and it computes the same"
        reason = check_family(family)
        yield family.framework or "any project", family.class_name, yes if reason is None else f"no: {reason}"


def verify() -> int:
    """Compares outputs and all gradients with float64 for every operator and dtype, and prints errors beside bounds.

    On a GPU the kernels of each backend must satisfy error ≤ 2 × (error of the plain path in the same dtypes +
    rounding band); without one, the plain path must satisfy error ≤ 2 × rounding band. Errors are relative:
    ‖result − exact‖ / ‖exact‖. The rounding band is the machine epsilon of value's dtype, plus float32's times the
    longest side of a level because coordinates are computed in float32.

    Returns:
        0 if all are within their bounds, else 1.
    """
    targets = [(torch.device("cuda", i), backend) for i in range(_gpu_count()) for backend in _kernels(i)]
    if targets:
        print("\nVerify: kernels against float64, bound 2 × (error of the plain path + rounding band)")
    else:
        print("\nVerify: there is no GPU; plain path against float64, bound 2 × rounding band")
        targets = [(torch.device("cpu"), Backend.EAGER)]
    layout = "  {:<7}  {:<7}  {:<22}  {:<18}  {:<6}  {}"
    print(layout.format("DEVICE", "BACKEND", "OPERATOR", "DTYPE", "RESULT", "ERROR / BOUND of output and gradients"))
    cases = list(itertools.product(targets, _OPERATORS, _CASES.items()))
    failures = 0
    for (device, backend), operator, (case, dtypes) in cases:
        try:
            checks = _check(operator, dtypes, device, backend)
            passed = all(error <= bound for _, error, bound in checks)
            numbers = "  ".join(f"{name} {error:.1e}/{bound:.1e}" for name, error, bound in checks)
        except RuntimeError as error:
            passed, numbers = False, " ".join(str(error).split())
        failures += not passed
        # Row by row: on a GPU each case compiles its kernels first.
        print(layout.format(str(device), backend, operator, case, "ok" if passed else "FAILED", numbers), flush=True)
    print(f"\n{len(cases) - failures} of {len(cases)} cases are within their bounds")
    return 1 if failures else 0


def _kernels(index: int) -> list[Backend]:
    """The backends whose kernels a GPU can run, and Triton's in any case: some shapes need them."""
    return ([] if cuda_problem(index) else [Backend.CUDA]) + [Backend.TRITON]


def _check(
    operator: str, dtypes: Sequence[torch.dtype], device: torch.device, backend: Backend
) -> list[tuple[str, float, float]]:
    """Name, error and bound of the output and of each gradient of one operator in one mix of dtypes."""
    operands, grad = _operands(operator, dtypes)
    exact = _differentiate(_exact, operator, operands, grad, torch.float64)
    on_device = {name: tensor.to(device) for name, tensor in operands.items()}
    results = _differentiate(_public, operator, on_device, grad.to(device), None, backend)
    plain = results
    if backend is not Backend.EAGER:
        plain = _differentiate(_public, operator, on_device, grad.to(device), None, Backend.EAGER)
    band = torch.finfo(dtypes[0]).eps + torch.finfo(torch.float32).eps * max(map(max, _SIZES))
    checks = []
    for name, truth in exact.items():
        error, plain_error = ((r[name].double().cpu() - truth).norm() / truth.norm() for r in (results, plain))
        bound = 2 * (band + (0 if backend is Backend.EAGER else plain_error))
        checks.append((name, float(error), float(bound)))
    return checks


def _operands(operator: str, dtypes: Sequence[torch.dtype]) -> tuple[dict[str, Tensor], Tensor]:
    """Fresh random operands on the CPU in their dtypes, and a gradient of the output.

    Bilinear sampling has no derivative where a coordinate is a whole pixel, and there rounding decides which side is
    taken: points that close are moved.
    """
    value_dtype, other = dtypes
    levels = len(_SIZES)
    shape = (_BATCH, _QUERIES, _HEADS, levels, _POINTS)
    value = torch.randn(_BATCH, _ROWS, _HEADS, _CHANNELS).to(value_dtype)
    grad = torch.randn(_BATCH, _QUERIES, _HEADS * _CHANNELS).to(value_dtype)
    weights = torch.randn(shape)
    if operator == "msda":
        weights = weights.flatten(3).softmax(-1).view(shape)
    operands = {"value": value}
    coordinates = int(operator[-1]) if operator.startswith("deformable") else 0
    if coordinates:
        operands["reference"] = (torch.rand(_BATCH, _QUERIES, levels, coordinates) * 0.8 + 0.1).to(other)

    def draw() -> Tensor:
        return (torch.randn(*shape, 2) * 2 if coordinates else torch.rand(*shape, 2) * 1.2 - 0.1).to(other)

    points = draw()
    while (close := _near_a_kink(points, operands.get("reference"))).any():
        points = torch.where(close.unsqueeze(-1), draw(), points)
    return operands | {"points": points, "weights": weights.to(other)}, grad


def _near_a_kink(points: Tensor, boxes: Tensor | None) -> Tensor:
    """(B, Q, M, L, K), true where x or y is within a thousandth of a whole pixel."""
    near = []
    for level, (height, width) in enumerate(_SIZES):
        boxes64 = None if boxes is None else boxes.double()
        xy = reference.pixels(points[:, :, :, level].double(), boxes64, level, height, width, _POINTS, 0.5)
        near.append(torch.stack([(c - c.round()).abs() < 1e-3 for c in xy]).any(0))
    return torch.stack(near, 3)


def _differentiate(function, operator, operands, grad, dtype=None, *options) -> dict[str, Tensor]:
    """The output and the gradient of every operand, by name."""
    leaves = {name: tensor.detach().to(dtype or tensor.dtype).requires_grad_() for name, tensor in operands.items()}
    output = function(operator, leaves, *options)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad.to(output.dtype))
    return {"output": output.detach()} | dict(zip(leaves, gradients, strict=True))


def _exact(operator: str, leaves: dict[str, Tensor]) -> Tensor:
    points, weights = leaves["points"].flatten(3, 4), leaves["weights"].flatten(3)
    counts = [_POINTS] * len(_SIZES)
    return reference.msda(
        leaves["value"], _SIZES, _STARTS, leaves.get("reference"), points, weights, counts,
        softmax=operator != "msda", offset_scale=0.5,
    )  # fmt: skip


def _public(operator: str, leaves: dict[str, Tensor], backend: Backend) -> Tensor:
    if "reference" in leaves:
        value, boxes, points, logits = leaves.values()
        return deformable_attention(value, _SIZES, None, boxes, points, logits, backend=backend)
    value, points, weights = leaves.values()
    method = "softmax" if operator.endswith("softmax") else "linear"
    return msda(value, _SIZES, None, points, weights, method=method, backend=backend)
