"""Attention modules that projects copied: known by name, signature and projections, or left alone with the reason."""

import copy
import re
import sys
import types
from contextlib import nullcontext

import pytest
import torch
from accelerate import init_empty_weights
from helpers import close, close_all, launches
from models import MSDeformAttn, randomize
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import deformops_models as dm
from deformops_models import patching

SIZES = ((3, 5), (2, 2))
ROWS, QUERIES, WIDTH = 19, 4, 16


@pytest.fixture
def attention(device) -> nn.Module:
    return randomize(MSDeformAttn(WIDTH, n_levels=2, n_heads=2, n_points=2)).to(device)


def arguments(device: str, coordinates: int = 2) -> dict[str, object]:
    sizes = torch.tensor(SIZES, device=device)
    return {
        "query": torch.randn(2, QUERIES, WIDTH, device=device),
        "reference_points": torch.rand(2, QUERIES, 2, coordinates, device=device),
        "input_flatten": torch.randn(2, ROWS, WIDTH, device=device),
        "input_spatial_shapes": sizes,
        "input_level_start_index": torch.tensor([0, 15], device=device),
        "input_padding_mask": torch.rand(2, ROWS, device=device) < 0.3,
    }


def run(module: nn.Module, call: dict[str, object]) -> dict[str, torch.Tensor]:
    """The output, and the gradient of every parameter."""
    module.zero_grad()
    output = module(**call)
    output.square().sum().backward()
    return {"output": output.detach()} | {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("coordinates", [2, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_outputs_and_gradients(attention, device, coordinates, masked):
    call = arguments(device, coordinates)
    if not masked:
        del call["input_padding_mask"]
    expected = run(attention, call)
    dm.patch(attention, backend="triton")
    with launches(1):
        close_all(run(attention, call), expected)
    # Positional, as the original code calls it.
    with launches(1):
        close(attention(*call.values()), expected["output"])


def test_the_report_says_how_it_was_known(attention):
    assert "not patched" in str(dm.report(attention))
    dm.patch(attention)
    name = f"{MSDeformAttn.__module__}.MSDeformAttn"
    (entry,) = dm.report(attention).swapped
    assert entry.backend.endswith(f"; {name} has a known name, signature and projections, and computes the same")
    assert type(dm.unpatch(attention)) is MSDeformAttn


def test_a_copy_is_copied_pickled_and_inherited(attention, device, tmp_path):
    call = arguments(device)
    attention.__class__ = type("MyAttention", (MSDeformAttn,), {})
    expected = attention(**call)
    dm.patch(attention, backend="triton")
    with launches(2):
        close(attention(**call), expected)
        close(copy.deepcopy(attention)(**call), expected)
    dm.unpatch(attention)
    attention.__class__ = MSDeformAttn
    torch.save(dm.patch(attention, backend="triton"), tmp_path / "module.pt")
    with launches(1):
        close(torch.load(tmp_path / "module.pt", weights_only=False)(**call), expected)


def _another_signature(self, query, reference_points, value, value_spatial_shapes, value_mask=None):
    return query


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: delattr(m, "output_proj"), "it has no output_proj"),
        (lambda m: setattr(m, "n_points", [2, 4]), r"n_points is \[2, 4\], known is one whole number"),
        (
            lambda m: setattr(m, "__class__", type("MSDeformAttn", (nn.Module,), {"forward": _another_signature})),
            r"unknown signature: forward\(query, .*, value_mask\), known is forward\(query, .*\)",
        ),
        (lambda m: setattr(m, "forward", lambda *args: None), "its forward was replaced on the instance"),
    ],
    ids=["projection", "points", "signature", "instance"],
)
def test_what_is_not_known_is_left_alone(attention, change, reason):
    change(attention)
    cls = type(attention)
    with pytest.raises(dm.PatchError, match=reason):
        dm.patch(attention)
    assert type(attention) is cls


class MSDeformAttnFunction:
    """The compiled operator that is not there."""

    @staticmethod
    def apply(*arguments):
        raise RuntimeError("not compiled with GPU support")


class _Copy(MSDeformAttn):
    """A copy that asks the compiled operator, as most do, with steps for others to change."""

    im2col_step = 64

    def forward(
        self,
        query,
        reference_points,
        input_flatten,
        input_spatial_shapes,
        input_level_start_index,
        input_padding_mask=None,
    ):
        value = self.value_proj(input_flatten)
        if input_padding_mask is not None:
            value = value.masked_fill(input_padding_mask[..., None], 0.0)
        points = (*query.shape[:2], self.n_heads, self.n_levels, self.n_points)
        offsets = self.sampling_offsets(query).view(*points, 2)
        weights = self.normalized(self.attention_weights(query).view(*points[:3], -1)).view(points)
        places = reference_points[:, :, None, :, None]
        if reference_points.shape[-1] == 2:
            locations = places + offsets / self.normalizer(input_spatial_shapes)[:, None]
        else:
            locations = self.in_box(places, offsets)
        output = MSDeformAttnFunction.apply(
            value.unflatten(-1, (self.n_heads, -1)),
            input_spatial_shapes,
            input_level_start_index,
            locations,
            weights,
            self.im2col_step,
        )
        return self.finished(self.output_proj(output))

    def normalized(self, logits):
        return logits.softmax(-1)

    def normalizer(self, shapes):
        return shapes.flip(-1)

    def in_box(self, places, offsets):
        return places[..., :2] + offsets / self.n_points * places[..., 2:] * 0.5

    def finished(self, output):
        return output


def a_copy(**steps) -> nn.Module:
    cls = type("MSDeformAttn", (_Copy,), {"forward": _Copy.forward, **steps})
    return randomize(cls(WIDTH, n_levels=2, n_heads=2, n_points=2))


def _with_a_scale(self, *sizes, **named):
    _Copy.__init__(self, *sizes, **named)
    self.scale = nn.Parameter(torch.ones(()))  # it may be another when weights are loaded


def _with_more_logits(self, *sizes, **named):
    _Copy.__init__(self, *sizes, **named)
    self.attention_weights = nn.Linear(WIDTH, 9)


def _only_points(self, places, offsets):
    raise ValueError("boxes are not supported")


@pytest.mark.parametrize("steps", [{}, {"in_box": _only_points}], ids=["all", "points"])
def test_the_extension_need_not_exist_to_try_a_copy(steps, device):
    attention = a_copy(**steps).to(device)
    call = arguments(device)
    state = torch.get_rng_state()
    dm.patch(attention, backend="triton")
    assert torch.equal(torch.get_rng_state(), state)
    original = randomize(MSDeformAttn(WIDTH, n_levels=2, n_heads=2, n_points=2)).to(device)
    original.load_state_dict(attention.state_dict())
    with launches(1):
        close(attention(**call), original(**call))
    with pytest.raises(RuntimeError, match="not compiled"):
        dm.unpatch(attention)(**call)


@pytest.mark.parametrize("place", ["meta", "fake", "half", "no biases", "empty"])
def test_a_copy_is_tried_wherever_its_weights_are(place):
    with torch.device("meta") if place == "meta" else FakeTensorMode() if place == "fake" else nullcontext():
        attention = a_copy() if place != "meta" else a_copy().to("meta")
        if place == "half":
            attention.half()
        if place == "no biases":
            attention.value_proj.bias = None
        with init_empty_weights() if place == "empty" else nullcontext():
            assert isinstance(dm.patch(attention), patching.PatchedModule)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ({"normalized": lambda self, logits: logits.sigmoid()}, "with 2 coordinates it is .* away"),
        ({"normalizer": lambda self, shapes: shapes}, "with 2 coordinates it is .* away"),
        ({"in_box": lambda self, places, offsets: places[..., :2] + offsets}, "with 4 coordinates it is .* away"),
        ({"finished": lambda self, output: (output, 1)}, "its forward returns another thing"),
        ({"finished": lambda self, output: output[:, :1]}, r"its forward returns another thing than \(2, 5, 16\)"),
        ({"finished": lambda self, output: output.no()}, "its forward could not be tried: 'Tensor' object has no"),
        ({"finished": lambda self, output: nn.functional.dropout(output, 0.5, self.training)}, "with 2 coordinates"),
        ({"__init__": _with_a_scale}, "it has scale beside the four projections"),
        ({"__init__": _with_more_logits}, "its forward could not be tried: "),
    ],
    ids=["sigmoid", "height first", "boxes", "tuple", "shape", "broken", "dropout", "parameter", "logits"],
)
@pytest.mark.parametrize("training", [False, True])
def test_another_mathematics_is_left_alone(steps, reason, training):
    attention = a_copy(**steps).train(training)
    cls = type(attention)
    with pytest.raises(dm.PatchError, match=reason):
        dm.patch(attention)
    assert type(attention) is cls
    assert re.search(reason, str(dm.report(attention)))


def _coarser(value, shapes, starts, locations, weights, step):
    return dm.msda(value, shapes, starts, locations.round(decimals=1), weights, backend="eager")


def test_an_operator_of_its_own_is_tried_where_it_runs(monkeypatch):
    attention = a_copy()
    monkeypatch.setattr(MSDeformAttnFunction, "apply", _coarser)
    with pytest.raises(dm.PatchError, match="with 2 coordinates it is .* away"):
        dm.patch(attention)


@pytest.mark.parametrize("decorator", [torch.no_grad(), torch.autocast("cpu", enabled=False)])
def test_a_decorated_forward_is_left_alone(decorator):
    with pytest.raises(dm.PatchError, match="a decorator is around its forward"):
        dm.patch(a_copy(forward=decorator(_Copy.forward)))


def _in_evaluation(self, output):
    return output if self.training else 2 * output


@pytest.mark.parametrize("training", [False, True])
def test_a_copy_is_tried_in_training_and_in_evaluation(training):
    with pytest.raises(dm.PatchError, match="with 2 coordinates it is .* away"):
        dm.patch(a_copy(finished=_in_evaluation).train(training))


def _kept_in_a_list(self, output):
    self.seen.append(output)
    return output


def _kept_in_a_name(self, output):
    self.last_output = output
    return output


@pytest.mark.parametrize(("finished", "name"), [(_kept_in_a_list, "seen"), (_kept_in_a_name, "last_output")])
def test_a_copy_that_keeps_things_is_left_alone_and_as_it_was(finished, name):
    attention = a_copy(finished=finished)
    attention.seen = []
    before = dict(vars(attention))
    with pytest.raises(dm.PatchError, match=f"its forward keeps {name}, which a patched one would not"):
        dm.patch(attention)
    assert name in str(dm.report(attention))
    assert vars(attention) == before and not attention.seen


def test_a_projection_without_a_width_is_named():
    attention = a_copy()
    attention.value_proj = nn.Sequential(attention.value_proj)
    with pytest.raises(dm.PatchError, match="its value_proj is a Sequential without in_features: it cannot be tried"):
        dm.patch(attention)


def test_without_projections_it_is_another_thing():
    # Core functions carry the name too, and hold no projections.
    core = type("MSDeformAttn", (nn.Module,), {"forward": MSDeformAttn.forward})()
    with pytest.raises(dm.PatchError, match="it has no sampling_offsets, attention_weights, value_proj, output_proj"):
        dm.patch(core)


def test_rfdetrs_pairs_and_export(attention, device):
    class MSDeformAttn(type(attention)):
        def forward(
            self,
            query,
            reference_points,
            input_flatten,
            input_spatial_shapes,
            input_level_start_index,
            input_padding_mask=None,
            input_spatial_shapes_hw=None,
        ):
            if getattr(self, "_export", False) and input_spatial_shapes_hw is None:
                raise ValueError("export needs pairs")
            first = (query, reference_points, input_flatten, input_spatial_shapes, input_level_start_index)
            return super().forward(*first, input_padding_mask)

    attention.__class__ = MSDeformAttn
    call = arguments(device) | {"input_spatial_shapes_hw": list(SIZES)}
    expected = run(attention, call)
    dm.patch(attention, backend="triton")
    with launches(1):
        close_all(run(attention, call), expected)
    attention._export = True
    with launches(0):
        close(attention(**call), expected["output"])
        with pytest.raises(ValueError, match="export needs pairs"):
            attention(**call | {"input_spatial_shapes_hw": None})


class _Detrex(nn.Module):
    """detrex's module by its contract: mmcv's without `residual`, and with other attribute names."""

    def __init__(self, batch_first):
        super().__init__()
        self.embed_dim, self.num_heads, self.num_levels, self.num_points = WIDTH, 2, 2, 2
        self.batch_first, self.dropout = batch_first, nn.Dropout(0.0)
        for name, child in MSDeformAttn(WIDTH, 2, 2, 2).named_children():
            self.add_module(name, child)

    def forward(
        self,
        query,
        key=None,
        value=None,
        identity=None,
        query_pos=None,
        key_padding_mask=None,
        reference_points=None,
        spatial_shapes=None,
        level_start_index=None,
        **kwargs,
    ):
        value = query if value is None else value
        identity = query if identity is None else identity
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)
        self.n_levels, self.n_heads, self.n_points, self.d_model = 2, 2, 2, WIDTH
        output = MSDeformAttn.forward(
            self, query, reference_points, value, spatial_shapes, level_start_index, key_padding_mask
        )
        return self.dropout(output if self.batch_first else output.transpose(0, 1)) + identity


@pytest.mark.parametrize("batch_first", [True, False])
def test_detrex(batch_first, device, monkeypatch):
    # The package is not on PyPI, so that this class stands for its own.
    (family,) = (f for f in patching.families() if f.name == "detrex")
    module = types.ModuleType(family.module)
    vars(module).update(MSDeformAttn=MSDeformAttn, WIDTH=WIDTH)
    forward = types.FunctionType(
        _Detrex.forward.__code__, vars(module), "forward", _Detrex.forward.__defaults__, _Detrex.forward.__closure__
    )
    cls = type(family.class_name, (_Detrex,), {"__module__": family.module, "forward": forward})
    setattr(module, family.class_name, cls)
    monkeypatch.setitem(sys.modules, family.module, module)
    attention = randomize(cls(batch_first)).to(device)

    def tensor(length):
        return torch.randn(*((2, length) if batch_first else (length, 2)), WIDTH, device=device)

    call = {"query": tensor(QUERIES), "value": tensor(ROWS), "query_pos": tensor(QUERIES), "identity": tensor(QUERIES)}
    names = {"reference_points": "reference_points", "input_spatial_shapes": "spatial_shapes"}
    names |= {"input_padding_mask": "key_padding_mask"}
    call |= {names[name]: value for name, value in arguments(device).items() if name in names}
    # It takes any keyword and reads none.
    call["residual"] = tensor(QUERIES)
    expected = run(attention, call)
    dm.patch(attention, backend="triton")
    with launches(1):
        close_all(run(attention, call), expected)
