"""Whole detectors, patched against unpatched: outputs, losses, every gradient, and nothing left after unpatching."""

import copy
import itertools
from dataclasses import dataclass

import pytest
import torch
from models import (
    DETECTORS,
    Detector,
    Tensors,
    anatomy,
    assert_as_accurate,
    attentions,
    import_mmcv_ops,
    mmcv_attention,
    outputs,
    randomize,
    training_step,
    transformers_attention,
)
from torch import Tensor, nn

import deformops_models as dm

FLOAT32, BFLOAT16 = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16))


pytestmark = pytest.mark.usefixtures("wide_tiles")


def kernels(device: str) -> str | None:
    """On a GPU what users get there; on the CPU the kernels have to be asked for."""
    return "triton" if device == "cpu" else None


@dataclass
class Run:
    outputs: Tensors
    losses: Tensors
    gradients: Tensors

    @classmethod
    def of(cls, detector: Detector, model: nn.Module, choices: list[Tensor]) -> "Run":
        return cls(outputs(detector, model), *training_step(detector, model, choices=choices))


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@dataclass
class Comparison:
    """Runs of one model: in float64, before the patch, in it, after it."""

    exact: Run
    before: Run
    patched: Run
    after: Run
    counts: dict[str, int]
    swapped: list[str]
    anatomy: tuple[dict, dict]


_comparisons: dict[tuple[str, str], Comparison] = {}


@pytest.fixture(params=DETECTORS)
def detector(request) -> Detector:
    detector = DETECTORS[request.param]
    pytest.importorskip(detector.framework)
    return detector


@pytest.fixture
def comparison(detector, device) -> Comparison:
    if (detector.name, device) not in _comparisons:
        model = detector.build()
        choices = []
        exact = Run.of(detector, copy.deepcopy(model).double(), choices)
        model.to(device)
        before, untouched = Run.of(detector, model, choices), anatomy(model)
        dm.patch(model, backend=kernels(device))
        swapped = [entry.name for entry in dm.report(model).swapped if entry.part == "attention"]
        dm.call_counts.clear()
        patched = Run.of(detector, model, choices)
        counts = dict(dm.call_counts)
        dm.unpatch(model)
        after = Run.of(detector, model, choices)
        runs = exact, before, patched, after
        _comparisons[detector.name, device] = Comparison(*runs, counts, swapped, (untouched, anatomy(model)))
    return _comparisons[detector.name, device]


def test_the_kernel_runs_in_every_attention_and_upstream_in_none(comparison, detector):
    assert comparison.counts == {"msda_forward": 2 * detector.attentions, "msda_backward": detector.attentions}
    assert comparison.swapped == list(attentions(detector.build(), detector))


@pytest.mark.parametrize("part", ["outputs", "losses", "gradients"])
def test_patched_is_as_accurate_as_unpatched(comparison, part):
    actual, plain, exact = (getattr(run, part) for run in (comparison.patched, comparison.before, comparison.exact))
    assert_as_accurate(actual, plain, exact, FLOAT32)


def test_every_projection_gets_a_gradient(comparison, detector):
    for name, module in attentions(detector.build(), detector).items():
        projections = dict(module.named_children())
        assert {"sampling_offsets", "attention_weights"} <= projections.keys()
        for projection in {"value_proj", "output_proj", "sampling_offsets", "attention_weights"} & projections.keys():
            assert comparison.patched.gradients[f"{name}.{projection}.weight"].abs().max() > 0


def test_unpatched_is_never_patched(comparison, device):
    assert comparison.anatomy[0] == comparison.anatomy[1]
    assert same(comparison.after.outputs, comparison.before.outputs)
    if device == "cpu":
        assert same(comparison.after.losses, comparison.before.losses)
        assert same(comparison.after.gradients, comparison.before.gradients)
    else:
        # Atomic sums of upstream's own backward differ from run to run.
        runs = comparison.after, comparison.before, comparison.exact
        assert_as_accurate(*(run.gradients for run in runs), FLOAT32)


def test_bfloat16_autocast_step(detector, device):
    if device == "cpu" and detector.name != "hf-deformable-detr-refine":
        pytest.skip("the interpreter is slow: one detector there, all of them on a GPU")
    model, choices = detector.build(), []
    exact = training_step(detector, copy.deepcopy(model).double(), choices=choices)
    model.to(device)
    try:
        plain = training_step(detector, model, torch.bfloat16, choices)
    except RuntimeError as error:
        pytest.skip(f"upstream's own step does not run under autocast: {error}")
    dm.patch(model, backend=kernels(device))
    dm.call_counts.clear()
    actual = training_step(detector, model, torch.bfloat16, choices)
    assert dm.call_counts == {"msda_forward": detector.attentions, "msda_backward": detector.attentions}
    for part in range(2):
        assert_as_accurate(actual[part], plain[part], exact[part], BFLOAT16)


# Modules alone, over their options


def _compare(module: nn.Module, leaves: Tensors, call) -> None:
    """Output and gradients of `call(module, **leaves)`, patched on the kernel against unpatched."""

    def run(model: nn.Module, dtype: torch.dtype) -> Tensors:
        model = copy.deepcopy(model).to(dtype)
        inputs = {n: t.detach().to(dtype).requires_grad_() for n, t in leaves.items()}
        torch.manual_seed(0)
        result = call(model, **inputs)
        results = result if isinstance(result, tuple) else (result,)
        grads = [torch.linspace(-1, 1, r.numel(), dtype=r.dtype, device=r.device).view(r.shape) for r in results]
        wanted = inputs | dict(model.named_parameters())
        gradients = torch.autograd.grad(results, list(wanted.values()), grads, allow_unused=True)
        named = {f"output {i}": r for i, r in enumerate(results)} | dict(zip(wanted, gradients, strict=True))
        return {name: t for name, t in named.items() if t is not None}

    plain, exact = run(module, torch.float32), run(module, torch.float64)
    before = dm.call_counts["msda_forward"]
    actual = run(dm.patch(copy.deepcopy(module), backend="triton"), torch.float32)
    assert dm.call_counts["msda_forward"] == before + 1
    # Coordinates, up to the longest side of a level, are rounded too.
    assert_as_accurate(actual, plain, exact, FLOAT32 * (1 + max(map(max, SIZES))))


SIZES = ((3, 5), (2, 2))
ROWS = sum(h * w for h, w in SIZES)


def _reference(kind: str, batch: int, queries: int) -> Tensor:
    """Reference points of 2 or 4 coordinates; "b", "q" and "l" name the axes of size 1."""
    axes = ((batch, "b"), (queries, "q"), (len(SIZES), "l"))
    return torch.rand(*(1 if letter in kind else size for size, letter in axes), int(kind[0])) * 0.6 + 0.2


_MMCV_OPTIONS = list(
    itertools.product(
        (True, False), (None, "value", "self"), (True, False), (True, False), ("none", "identity", "residual"),
        ("2", "4", "2l", "4l", "2b", "4b", "2q", "2bql"), (1.0, 0.5, 2.0),
    )
)  # fmt: skip


# A stride that is coprime to every number of choices meets every pair of them.
@pytest.mark.parametrize("options", _MMCV_OPTIONS[:: 41 if torch.cuda.is_available() else 53], ids=repr)
@pytest.mark.filterwarnings('ignore:"residual" is deprecated', "ignore:residual= is deprecated")
def test_mmcv_module_options(options, device):
    batch_first, value, mask, query_pos, identity, reference, ratio = options
    attention = mmcv_attention(batch_first=batch_first, value_proj_ratio=ratio).to(device)
    queries = ROWS if value is None else 4

    def tensor(rows):
        return torch.randn(*((2, rows) if batch_first else (rows, 2)), 16, device=device)

    leaves = {"query": tensor(queries), "reference_points": _reference(reference, 2, queries).to(device)}
    leaves |= {"value": tensor(ROWS)} if value == "value" else {}
    leaves |= {"query_pos": tensor(queries)} if query_pos else {}
    leaves |= {} if identity == "none" else {identity: tensor(queries)}
    fixed = {
        "key_padding_mask": (torch.rand(2, ROWS) < 0.3).to(device) if mask else None,
        "spatial_shapes": torch.tensor(SIZES, device=device),
        "level_start_index": torch.tensor([0, SIZES[0][0] * SIZES[0][1]], device=device),
        "an_argument_of_a_neighbour": 1,
    }
    if value == "self":
        # Positional, as mmcv's transformer layers call it: query, key, value.
        keys = tensor(ROWS)
        _compare(attention, leaves, lambda m, query, **rest: m(query, keys.to(query), keys.to(query), **rest, **fixed))
    else:
        _compare(attention, leaves, lambda m, **rest: m(**rest, **fixed))


def test_mmcv_dropout_draws_the_same_numbers(device):
    attention = mmcv_attention(dropout=0.5, batch_first=True).to(device).train()
    query, reference = torch.randn(2, ROWS, 16, device=device), _reference("2", 2, ROWS).to(device)
    results = []
    for module in (attention, dm.patch(copy.deepcopy(attention), backend="triton")):
        torch.manual_seed(0)
        shapes = torch.tensor(SIZES, device=device)
        results.append(module(query, reference_points=reference, spatial_shapes=shapes))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(results[1] == query, results[0] == query)


def test_mmcv_residual_and_identity_together_are_refused_as_upstream_does(device):
    attention = mmcv_attention().to(device)
    query = torch.randn(ROWS, 2, 16, device=device)
    arguments = {"reference_points": _reference("2", 2, ROWS).to(device), "spatial_shapes": torch.tensor(SIZES)}
    for model in (attention, dm.patch(copy.deepcopy(attention), backend="triton")):
        with pytest.raises(AssertionError, match="residual"):
            model(query, identity=query, residual=query, **arguments)
        with pytest.warns(DeprecationWarning, match="residual"):
            model(query, residual=query, **arguments | {"spatial_shapes": torch.tensor(SIZES, device=device)})


@pytest.mark.parametrize("pre_norm", [False, True])
def test_sequence_first_through_mmcvs_transformer_layer(pre_norm, device):
    import_mmcv_ops()
    from mmcv.cnn.bricks.transformer import BaseTransformerLayer

    order = ("norm", "cross_attn", "norm", "ffn") if pre_norm else ("cross_attn", "norm", "ffn", "norm")
    attention = {"type": "MultiScaleDeformableAttention", "embed_dims": 16, "num_heads": 2, "num_levels": 2}
    layer = BaseTransformerLayer(
        attn_cfgs=[attention | {"num_points": 2, "dropout": 0.0}],
        ffn_cfgs={"type": "FFN", "embed_dims": 16, "feedforward_channels": 32, "ffn_drop": 0.0},
        operation_order=order,
    )
    layer = randomize(layer).to(device)
    queries = 4
    leaves = {
        "query": torch.randn(queries, 2, 16, device=device),
        "value": torch.randn(ROWS, 2, 16, device=device),
        "query_pos": torch.randn(queries, 2, 16, device=device),
        "reference_points": _reference("2", 2, queries).to(device),
    }

    def call(model, query, value, query_pos, reference_points):
        return model(
            query, value, value, query_pos=query_pos, reference_points=reference_points,
            spatial_shapes=torch.tensor(SIZES, device=device), level_start_index=None,
            key_padding_mask=torch.arange(ROWS, device=device).expand(2, -1) > 15,
        )  # fmt: skip

    _compare(layer, leaves, call)


_HF_OPTIONS = list(
    itertools.product(
        ("mask2former", "deformable_detr"), (True, False), (True, False), ("2", "4", "2l", "4l", "2b", "2q"),
        (True, False),
    )
)  # fmt: skip


@pytest.mark.parametrize("options", _HF_OPTIONS[:: 2 if torch.cuda.is_available() else 5], ids=repr)
def test_transformers_module_options(options, device):
    family, mask, position, reference, weights = options
    attention = transformers_attention(family).to(device)
    queries = 4
    leaves = {
        "hidden_states": torch.randn(2, queries, 16, device=device),
        "encoder_hidden_states": torch.randn(2, ROWS, 16, device=device),
        "reference_points": _reference(reference, 2, queries).to(device),
    }
    leaves |= {"position_embeddings": torch.randn(2, queries, 16, device=device)} if position else {}
    fixed = {"spatial_shapes_list": list(SIZES)}
    if mask:
        fixed["attention_mask"] = (torch.rand(2, ROWS) < 0.3).to(device)
    if family == "deformable_detr":
        fixed["spatial_shapes"] = torch.tensor(SIZES, device=device)
        fixed["level_start_index"] = torch.tensor([0, 15], device=device)
    # Also the second output, lazy or asked for, and its gradient.
    _compare(attention, leaves, lambda m, **rest: m(**rest, **fixed, output_attentions=weights))
