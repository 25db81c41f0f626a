"""What patching promises, on real modules and models of transformers and mmcv."""

import contextlib
import copy
import dataclasses
import functools
import gc
import importlib
import io
import os
import pickle
import subprocess
import sys
import threading
import types
import weakref

import pytest
import torch
from helpers import close, close_all, launches
from models import (
    DETECTORS,
    Tensors,
    attentions,
    mmcv_attention,
    outputs,
    training_step,
    transformers_attention,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deformops_models as dm
from deformops_models import patching
from deformops_models.lazy import LazyWeights, attention_weights
from deformops_models.patching import PatchedModule

SIZES = ((3, 5), (2, 2))
ROWS = sum(h * w for h, w in SIZES)
QUERIES = 4
TINY = DETECTORS["hf-deformable-detr-single-scale"]


@pytest.fixture(params=["mask2former", "deformable_detr"])
def attention(request, device) -> nn.Module:
    """An unpatched wrapper module of transformers."""
    return transformers_attention(request.param).to(device)


_tiny: list[nn.Module] = []


@pytest.fixture
def tiny(device) -> nn.Module:
    """An unpatched Deformable DETR of transformers with three attention modules."""
    pytest.importorskip("transformers")
    if not _tiny:
        _tiny.append(TINY.build())
    return copy.deepcopy(_tiny[0]).to(device)


def arguments(module: nn.Module, **changes) -> dict[str, object]:
    """Keyword arguments for a call of a transformers or mmcv module, the same every time; `changes` replace some."""
    random = torch.Generator().manual_seed(3)
    parameter = next(module.parameters())

    def tensor(*shape):
        return torch.randn(*shape, generator=random).to(parameter)

    points = torch.rand(2, QUERIES, 2, 2, generator=random).to(parameter.device)
    queries, values = tensor(2, QUERIES, 16), tensor(2, ROWS, 16)
    if hasattr(module, "embed_dims"):
        sizes = torch.tensor(SIZES, device=parameter.device)
        queries, values = queries.transpose(0, 1), values.transpose(0, 1)
        return {"query": queries, "value": values, "reference_points": points, "spatial_shapes": sizes} | changes
    named = {"hidden_states": queries, "encoder_hidden_states": values, "reference_points": points}
    named["spatial_shapes_list"] = list(SIZES)
    if hasattr(module, "disable_custom_kernels"):
        named["spatial_shapes"] = torch.tensor(SIZES, device=parameter.device)
        named["level_start_index"] = torch.tensor([0, 15], device=parameter.device)
    return named | changes


# The swap itself


def test_patch_keeps_object_mode_parameters_and_returns_the_model(tiny):
    tiny.train()
    before = {name: (id(m), m.training) for name, m in tiny.named_modules()}
    state = {name: t.data_ptr() for name, t in tiny.state_dict().items()}
    assert dm.patch(tiny) is tiny
    assert {name: (id(m), m.training) for name, m in tiny.named_modules()} == before
    assert {name: t.data_ptr() for name, t in tiny.state_dict().items()} == state
    modules = attentions(tiny, TINY)
    assert len(modules) == 3
    for module in modules.values():
        upstream = type(module).upstream
        assert type(module).__name__ == f"Patched{TINY.attention}" and upstream.__name__ == TINY.attention
        assert isinstance(module, upstream) and isinstance(module, PatchedModule)
        assert type(module).__init__ is upstream.__init__
        assert type(module).kernel_layer_name is None
    assert dm.unpatch(tiny) is tiny
    assert {type(m).__name__ for m in attentions(tiny, TINY).values()} == {TINY.attention}


def test_patching_twice_is_patching_once(tiny):
    dm.patch(tiny)
    classes = [type(m) for m in tiny.modules()]
    dm.patch(tiny)
    assert [type(m) for m in tiny.modules()] == classes
    dm.unpatch(dm.unpatch(tiny))
    assert not any(isinstance(m, PatchedModule) for m in tiny.modules())


def test_patching_again_changes_the_backend(attention):
    dm.patch(attention, backend="triton")
    dm.patch(attention, backend="eager")
    assert attention.deformops_backend is dm.Backend.EAGER
    dm.patch(attention)
    assert attention.deformops_backend is None and "deformops_backend" not in vars(attention)


def test_the_root_itself_is_patched(attention):
    expected = attention(**arguments(attention))[0]
    assert dm.patch(attention, backend="triton") is attention
    with launches(1):
        close(attention(**arguments(attention))[0], expected)
    assert [entry.name for entry in dm.report(attention).swapped] == [""]
    assert str(dm.report(attention)).splitlines()[1].startswith("  + (root): Patched")


def test_another_model_in_the_process_is_untouched(tiny):
    other = copy.deepcopy(tiny)
    dm.patch(tiny)
    assert not any(isinstance(m, PatchedModule) for m in other.modules())
    assert dm.report(other).swapped == [] and len(dm.report(other).skipped) == 4


def test_a_shared_module_is_patched_once(attention):
    model = nn.ModuleList([attention, attention])
    assert len(dm.report(dm.patch(model)).swapped) == 1
    dm.unpatch(model)
    assert not isinstance(model[1], PatchedModule)


def test_no_global_of_another_library_is_rebound(tiny):
    names = ["transformers.models.deformable_detr.modeling_deformable_detr", "torch.nn.modules.module"]
    modules = [importlib.import_module(name) for name in names]
    owners = [*modules, *{type(m) for m in tiny.modules()}, nn.Module]
    before = [dict(vars(owner)) for owner in owners]
    dm.patch(tiny, backend="triton")
    training_step(TINY, tiny)
    dm.unpatch(tiny)
    for owner, entries in zip(owners, before, strict=True):
        changed = {name for name, v in vars(owner).items() if entries.get(name, v) is not v}
        changed |= entries.keys() ^ vars(owner).keys()
        # Upstream's own caches and lazily made docstrings may appear; nothing of ours.
        assert not {n for n in changed if "deformops" in getattr(vars(owner).get(n), "__module__", "")}, owner
        assert not changed & {"forward", "__call__", "__init__", "__class__"}, owner


def test_patched_classes_can_be_imported_and_built():
    from transformers.models.mask2former import modeling_mask2former as upstream

    from deformops_models.patches.transformers import (
        PatchedMask2FormerPixelDecoderEncoderMultiscaleDeformableAttention as Patched,
    )

    assert Patched.upstream is upstream.Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention
    assert type(dm.patch(transformers_attention("mask2former"))) is Patched
    assert [n for n, _ in Patched(16, 2, 2, 2).named_parameters()] == [
        n for n, _ in transformers_attention("mask2former").named_parameters()
    ]
    with pytest.raises(ImportError):
        from deformops_models.patches.transformers import PatchedNothing  # noqa: F401


# What is left alone


def _subclass(base: type, **members) -> type:
    return type("Sub" + base.__name__, (base,), members)


def test_a_subclass_that_inherits_the_forward_is_patched(attention):
    upstream = type(attention)
    attention.__class__ = _subclass(upstream)
    expected = attention(**arguments(attention))[0]
    dm.patch(attention, backend="triton")
    assert type(attention).__name__ == f"PatchedSub{upstream.__name__}"
    with launches(1):
        close(attention(**arguments(attention))[0], expected)
    dm.unpatch(attention)
    assert type(attention).__name__ == f"Sub{upstream.__name__}"


def test_a_subclass_that_overrides_the_forward_is_left_alone(attention):
    attention.__class__ = _subclass(type(attention), forward=lambda self, *args, **kwargs: "mine")
    with pytest.raises(dm.PatchError, match=f"nearest classes in the model: {__name__}.{type(attention).__name__}"):
        dm.patch(attention)
    dm.patch(attention, strict=False)
    assert attention(**arguments(attention)) == "mine"
    (entry,) = dm.report(attention).skipped
    assert " has another forward than transformers.models." in entry.reason


def test_a_core_whose_forward_was_replaced_on_the_instance_is_left_alone(hooks):
    attention = transformers_attention("deformable_detr")
    upstream = attention.attn.forward
    for forward in (
        lambda *args, **named: upstream(*args, **named) * 2,
        types.MethodType(lambda self, *args, **named: upstream(*args, **named) * 2, attention.attn),
    ):
        attention.attn.forward = forward
        with pytest.raises(dm.PatchError, match="its attn's forward was replaced on the instance"):
            dm.patch(attention)
    del attention.attn.forward
    hooks.add_hook_to_module(attention.attn, hooks.ModelHook())
    assert isinstance(dm.patch(attention), PatchedModule)


def test_a_module_that_samples_by_a_core_of_its_own_is_left_alone():
    attention = transformers_attention("deformable_detr")
    attention.attn.__class__ = type("Same", (type(attention.attn),), {})
    assert isinstance(dm.unpatch(dm.patch(attention)).attn, nn.Module)
    attention.attn = type("Mine", (type(attention.attn),), {"forward": lambda self, value, *args: value})()
    with pytest.raises(dm.PatchError, match=r"\(root\): .*: its attn is a .*\.Mine with a forward of its own"):
        dm.patch(attention)


def test_a_core_whose_forward_was_replaced_on_its_class_is_left_alone(monkeypatch):
    attention = transformers_attention("deformable_detr")
    upstream = type(attention.attn).forward

    @functools.wraps(upstream)
    def mine(self, *args, **named):
        return 2 * upstream(self, *args, **named)

    monkeypatch.setattr(type(attention.attn), "forward", mine)
    with pytest.raises(dm.PatchError, match="its attn is a .* with a forward of its own"):
        dm.patch(attention)


def test_an_overridden_step_of_the_forward_still_runs(device):
    attention = transformers_attention("mask2former").to(device)

    def with_pos_embed(self, tensor, position_embeddings):
        return tensor * 2 + position_embeddings

    attention.__class__ = _subclass(type(attention), with_pos_embed=with_pos_embed)
    call = arguments(attention, position_embeddings=torch.ones(2, QUERIES, 16, device=device))
    expected = attention(**call)[0]
    with launches(1):
        close(dm.patch(attention, backend="triton")(**call)[0], expected)


def test_a_forward_replaced_on_the_instance_is_left_alone(tiny):
    name, module = next(iter(attentions(tiny, TINY).items()))
    module.forward = lambda *args, **kwargs: "mine"
    dm.patch(tiny)
    report = dm.report(tiny)
    assert [e.part for e in report.swapped] == ["loss", "attention", "attention"]
    assert [(e.name, e.reason) for e in report.skipped] == [(name, "its forward was replaced on the instance")]
    assert module() == "mine" and type(module).__name__ == TINY.attention


@pytest.mark.parametrize("wrap", [functools.wraps, lambda upstream: lambda mine: mine], ids=["wrapped", "plain"])
def test_a_forward_replaced_on_the_class_is_left_alone(wrap, monkeypatch):
    attention = transformers_attention("mask2former")
    cls, upstream = type(attention), type(attention).forward

    @wrap(upstream)
    def mine(
        self, hidden_states, attention_mask=None, encoder_hidden_states=None, encoder_attention_mask=None,
        position_embeddings=None, reference_points=None, spatial_shapes_list=None, level_start_index=None,
        output_attentions=False,
    ):  # fmt: skip
        raise AssertionError

    monkeypatch.setattr(cls, "forward", mine)
    with pytest.raises(dm.PatchError, match=f"its class's forward was replaced by one of {__name__}"):
        dm.patch(attention)
    monkeypatch.undo()
    assert isinstance(dm.patch(attention), PatchedModule)


@pytest.mark.parametrize("name", ["hf-d-fine", "hf-deimv2"])
def test_a_core_function_of_ones_own_is_left_alone(name):
    pytest.importorskip("transformers")
    attention = next(m for m in DETECTORS[name].build().modules() if hasattr(m, "ms_deformable_attn_core"))
    upstream = attention.ms_deformable_attn_core
    attention.ms_deformable_attn_core = lambda *args: 2 * upstream(*args)
    with pytest.raises(dm.PatchError, match="its ms_deformable_attn_core was replaced"):
        dm.patch(attention)
    attention.ms_deformable_attn_core = upstream
    assert isinstance(dm.patch(attention), PatchedModule)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_part_of_a_model_is_no_obstacle(tiny):
    tiny.extra = torch.jit.script(nn.Linear(2, 2))
    assert dm.report(tiny).skipped and not dm.report(tiny).swapped
    dm.patch(tiny)
    assert "sampling_offsets" not in str(dm.report(tiny)) and not dm.report(tiny).skipped
    with pytest.raises(dm.PatchError, match="no deformable attention"):
        dm.patch(tiny.extra)


def test_a_subclass_may_have_the_name_of_another_family():
    attention = transformers_attention("deformable_detr")
    attention.__class__ = type("MSDeformAttn", (type(attention),), {})
    assert dm.report(dm.patch(attention)).swapped[0].family == "deformable_detr"


def test_a_forward_borrowed_from_another_instance_is_left_alone(attention):
    other = copy.deepcopy(attention)
    attention.forward = other.forward
    dm.patch(attention, strict=False)
    assert not isinstance(attention, PatchedModule) and attention.forward.__self__ is other


def test_unpatch_refuses_a_forward_that_was_replaced_since(attention):
    ours = dm.patch(attention, backend="triton").forward
    attention.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(dm.PatchError, match="forward was replaced on the instance"):
        dm.unpatch(attention)
    with launches(1):
        attention(**arguments(attention))
    del attention.forward
    assert not isinstance(dm.unpatch(attention), PatchedModule)


@pytest.mark.parametrize("method", ["method", "decoder_method"])
def test_discrete_sampling_is_left_alone(attention, method):
    setattr(attention, method, "discrete")
    with pytest.raises(dm.PatchError, match=rf"\(root\): .* {method}='discrete' samples whole pixels"):
        dm.patch(attention)


def test_an_unknown_signature_is_left_alone(attention, monkeypatch):
    rows = {
        key: dataclasses.replace(family, parameters=(*family.parameters, "new"))
        for key, family in patching._families_by_class().items()
    }
    monkeypatch.setattr(patching, "_families_by_class", lambda: rows)
    with pytest.raises(dm.PatchError, match=r"unknown signature: forward\(hidden_states, .*, known is .*, new\)"):
        dm.patch(attention)
    assert not isinstance(attention, PatchedModule)


def test_the_filter_chooses_modules(tiny):
    seen = []

    def decoder_only(module, name):
        seen.append(name)
        assert tiny.get_submodule(name) is module
        return "decoder" in name

    dm.patch(tiny, filter=decoder_only)
    report = dm.report(tiny)
    assert seen == ["", *attentions(tiny, TINY)]
    assert [e.name for e in report.swapped] == [n for n in seen if "decoder" in n]
    assert [(e.name, e.reason) for e in report.skipped] == [(name, "the filter left it out") for name in seen[:2]]
    dm.patch(tiny)
    assert len(dm.report(tiny).swapped) == 4


def test_a_filter_that_raises_changes_nothing(tiny):
    def failing(module, name):
        if "decoder" in name:
            raise KeyError(name)
        return True

    before = str(dm.report(tiny))
    with pytest.raises(KeyError):
        dm.patch(tiny, filter=failing)
    assert not any(isinstance(m, PatchedModule) for m in tiny.modules())
    assert str(dm.report(tiny)) == before


def test_a_filter_that_leaves_everything_out_is_an_error_if_strict(tiny):
    before = str(dm.report(tiny))
    with pytest.raises(dm.PatchError, match="the filter left it out"):
        dm.patch(tiny, filter=lambda module, name: False)
    assert str(dm.report(tiny)) == before
    assert dm.patch(tiny, filter=lambda module, name: False, strict=False) is tiny


class MyDeformableAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.sampling_offsets = nn.Linear(2, 2)


def test_strict_error_names_the_nearest_classes_and_versions():
    model = nn.Sequential(nn.Linear(2, 2), MyDeformableAttention())
    with pytest.raises(dm.PatchError) as error:
        dm.patch(model)
    text = str(error.value)
    assert isinstance(error.value, RuntimeError)
    assert text.startswith("no deformable attention was patched in Sequential")
    assert f"nearest classes in the model: {__name__}.MyDeformableAttention" in text
    assert TINY.attention in text and "MultiScaleDeformableAttention" in text
    for framework in ("torch", "transformers", "mmcv"):
        assert f"{framework} {patching._version(framework)}" in text
    assert f"torch {torch.__version__}" in text
    assert dm.patch(model, strict=False) is model
    (entry,) = dm.report(model).skipped
    assert (entry.name, entry.reason) == ("1", f"class {__name__}.MyDeformableAttention is not known")
    with pytest.raises(dm.PatchError, match="nearest classes in the model: none"):
        dm.patch(nn.Linear(2, 2))


def test_wrong_arguments(attention):
    with pytest.raises(ValueError, match="backend='fast' is not known: use None, 'cuda', 'triton', 'eager'"):
        dm.patch(attention, backend="fast")
    with pytest.raises(ValueError, match="backend='fast'"), dm.patched(attention, backend="fast"):
        pass
    with pytest.raises(TypeError, match="model is a list"):
        dm.patch([attention])
    for parts in (None, iter(("attention",)), (["attention"],), ("attn",)):
        with pytest.raises(ValueError, match="parts=.*: give some of attention, matcher, loss, mask_predictor as a"):
            dm.patch(attention, parts=parts)
    with pytest.raises(TypeError, match="filter is a str: give a function of a module and its name"):
        dm.patch(attention, filter="encoder")
    with pytest.raises(dm.PatchError, match="^no matcher or loss was patched in "):
        dm.patch(attention, parts=("loss", "matcher"))
    for call in (dm.unpatch, dm.report, lambda model: dm.patched(model).__enter__()):
        with pytest.raises(TypeError, match="model is a NoneType: a torch.nn.Module is expected"):
            call(None)
    with pytest.raises(TypeError), dm.patched(attention, no_such_option=1):
        pass
    assert not isinstance(attention, PatchedModule)


def _frozen(base: type) -> type:
    """A subclass whose instances refuse another class."""

    def __setattr__(self, name, value):
        if name == "__class__":
            raise RuntimeError("frozen")
        super(cls, self).__setattr__(name, value)

    cls = _subclass(base, __setattr__=__setattr__)
    return cls


def _final(base: type) -> type:
    """A subclass that cannot be inherited from."""

    def __init_subclass__(cls):
        raise TypeError("final")

    return _subclass(base, __init_subclass__=__init_subclass__)


@pytest.mark.parametrize("make", [_frozen, _final])
def test_a_failed_swap_leaves_the_model_as_it_was(make):
    model = nn.ModuleList([transformers_attention("deformable_detr") for _ in range(3)])
    model[1].__class__ = make(type(model[1]))
    before = [(type(m), dict(vars(m))) for m in model]
    with pytest.raises(dm.PatchError, match=f"^1, a SubDeformable.*: {make.__name__[1:]}$"):
        dm.patch(model, backend="triton")
    assert [(type(m), dict(vars(m))) for m in model] == before
    with pytest.raises(dm.PatchError), dm.patched(model):
        pass
    assert [(type(m), dict(vars(m))) for m in model] == before


def test_a_module_with_slots_is_patched(device):
    from transformers import DeformableDetrConfig

    upstream = type(transformers_attention("deformable_detr"))
    cls = _subclass(upstream, __slots__=("extra",))
    attention = cls(DeformableDetrConfig(d_model=16, num_feature_levels=2), 2, 2).to(device)
    attention.extra = 5
    dm.patch(attention, backend="triton")
    with launches(1):
        attention(**arguments(attention))
    assert type(dm.unpatch(attention)) is cls and attention.extra == 5


# The context manager


def test_patched_unpatches_also_after_an_exception(tiny):
    with dm.patched(tiny, backend="triton") as model:
        assert model is tiny and len(dm.report(tiny).swapped) == 4
    assert not any(isinstance(m, PatchedModule) for m in tiny.modules())
    with pytest.raises(KeyError), dm.patched(tiny):
        raise KeyError
    assert not any(isinstance(m, PatchedModule) for m in tiny.modules())


def test_patched_nests_and_gives_each_module_its_backend_back(tiny):
    first, *others = attentions(tiny, TINY).values()
    dm.patch(tiny, backend="eager", filter=lambda module, name: module is first)
    with dm.patched(tiny, backend="triton"):
        assert first.deformops_backend is dm.Backend.TRITON
        with dm.patched(tiny):
            assert first.deformops_backend is None
        assert {m.deformops_backend for m in (first, *others)} == {dm.Backend.TRITON}
    assert first.deformops_backend is dm.Backend.EAGER
    assert not any(isinstance(m, PatchedModule) for m in others)


def test_patched_leaves_nothing_when_the_block_unpatches(attention):
    dm.patch(attention, backend="eager")
    with dm.patched(attention):
        dm.unpatch(attention)
    assert not isinstance(attention, PatchedModule) and "deformops_backend" not in vars(attention)


def test_patched_keeps_what_the_block_patches_in_addition(tiny):
    first, *others = attentions(tiny, TINY).values()
    with dm.patched(tiny, filter=lambda module, name: module is first):
        dm.patch(tiny)
    assert not isinstance(first, PatchedModule) and all(isinstance(m, PatchedModule) for m in others)


# The report


def test_report_of_an_unpatched_and_a_patched_model(tiny):
    names = list(attentions(tiny, TINY))
    report = dm.report(tiny)
    assert [(e.name, e.class_name, e.family, e.part, e.reason) for e in report.skipped] == [
        ("", type(tiny).__name__, "deformable_detr", "loss", "not patched"),
        *((name, TINY.attention, "deformable_detr", "attention", "not patched") for name in names),
    ]
    assert str(report).splitlines()[0] == "0 modules patched, 4 left alone"
    assert str(report).splitlines()[2] == f"  - {names[0]}: {TINY.attention}: not patched"
    dm.patch(tiny, backend="triton")
    where = next(tiny.parameters()).device
    lines = str(dm.report(tiny)).splitlines()
    assert lines == [
        "4 modules patched, 0 left alone",
        f"  + (root): {type(tiny).__name__}: plain PyTorch",
        *(f"  + {name}: Patched{TINY.attention}: triton (float32 on {where})" for name in names),
    ]
    dm.patch(tiny, backend="eager")
    assert dm.report(tiny).swapped[1].backend == f"upstream's own forward (float32 on {where})"
    dm.patch(tiny)
    assert dm.report(tiny.double()).swapped[1].backend == f"upstream's own forward (float64 on {where})"


def test_report_says_what_a_double_model_with_a_demanded_backend_runs(attention):
    dm.patch(attention.double(), backend="triton")
    before = dm.call_counts.copy()
    attention(**arguments(attention))
    assert dm.call_counts["upstream_forward"] == before["upstream_forward"] + 1
    (entry,) = dm.report(attention).swapped
    assert entry.backend.startswith("upstream's own forward (float64")


def test_report_on_meta(tiny):
    dm.patch(tiny.to("meta"))
    found = {(e.part, e.backend) for e in dm.report(tiny).swapped}
    assert found == {("attention", "undecided: parameters are on meta"), ("loss", "plain PyTorch")}


def test_the_report_keeps_no_model_alive():
    attention = transformers_attention("mask2former")
    dm.patch(attention, filter=lambda module, name: False, strict=False)
    assert dm.report(attention).skipped[0].reason == "the filter left it out"
    gone = weakref.ref(attention)
    del attention
    gc.collect()
    assert gone() is None


# Which forward runs


def test_eager_and_float64_run_upstreams_forward(attention):
    expected = attention(**arguments(attention))[0]
    before = dm.call_counts.copy()
    dm.patch(attention, backend="eager")
    assert torch.equal(attention(**arguments(attention))[0], expected)
    assert dm.call_counts["upstream_forward"] == before["upstream_forward"] + 1
    dm.unpatch(attention).double()
    exact = attention(**arguments(attention))[0]
    dm.patch(attention, backend="triton")
    assert torch.equal(attention(**arguments(attention))[0], exact)
    assert dm.call_counts["upstream_forward"] == before["upstream_forward"] + 2
    assert dm.call_counts["msda_forward"] == before["msda_forward"]


def test_on_the_cpu_every_module_runs_upstreams_forward_bit_for_bit():
    for module in (transformers_attention("mask2former"), transformers_attention("deformable_detr"), mmcv_attention()):
        expected = module(**arguments(module))
        before = dm.call_counts.copy()
        actual = dm.patch(module)(**arguments(module))
        assert dm.call_counts - before == {"upstream_forward": 1}
        first, second = (o if isinstance(o, tuple) else (o,) for o in (actual, expected))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_model_that_moves_after_patching(attention):
    expected = attention(**arguments(attention))[0]
    dm.patch(attention, backend="triton")
    moved = attention.double()
    moved(**arguments(moved))
    with launches(1):
        close(attention.float()(**arguments(attention))[0], expected)


def test_jit_trace_holds_upstreams_forward(attention):
    class Wrap(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, queries, values):
            return self.inner(**call | {"hidden_states": queries, "encoder_hidden_states": values})[0]

    call = arguments(attention)
    inputs = call["hidden_states"], call["encoder_hidden_states"]
    expected = Wrap(attention)(*inputs)
    traced = torch.jit.trace(Wrap(dm.patch(attention, backend="triton")), inputs, check_trace=False)
    close(traced(*inputs), expected)
    assert "deformops_models::" not in str(traced.inlined_graph)


def test_positional_arguments_as_upstream_takes_them(attention):
    call = arguments(attention)
    names = patching.family_of(type(attention)).parameters
    values = [call.get(name) for name in names if name not in ("kwargs", "output_attentions")]
    expected = attention(*values)[0]
    with launches(1):
        close(dm.patch(attention, backend="triton")(*values)[0], expected)


def test_wrong_sizes_are_an_error_as_upstream(attention):
    wrong = arguments(attention, spatial_shapes_list=[(3, 5), (2, 3)])
    with pytest.raises((ValueError, RuntimeError)):
        attention(**wrong)
    with pytest.raises(ValueError, match="spatial shapes"):
        dm.patch(attention, backend="triton")(**wrong)


# The second output


class Softmaxes(TorchDispatchMode):
    """Counts softmax kernels."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._softmax.default
        return func(*args, **(kwargs or {}))


def test_unread_weights_cost_no_softmax(attention):
    dm.patch(attention, backend="triton")
    with Softmaxes() as softmaxes, torch.no_grad():
        output, weights = attention(**arguments(attention))
        assert softmaxes.count == 0 and isinstance(weights, LazyWeights)
        assert (weights.shape, weights.dtype) == ((2, QUERIES, 2, 2, 2), output.dtype)
        assert weights.device == output.device
        assert softmaxes.count == 0
        weights.sum(), weights[0]
        assert softmaxes.count == 1


def test_a_model_without_requested_attentions_computes_no_softmax_of_ours(tiny):
    with Softmaxes() as upstream:
        outputs(TINY, tiny)
    dm.patch(tiny, backend="triton")
    with Softmaxes() as softmaxes:
        outputs(TINY, tiny)
    assert softmaxes.count == upstream.count - 3


READERS = {
    "sum": lambda w: w.sum(),
    "operator": lambda w: 2 * w + 1,
    "index": lambda w: w[:, 1],
    "stack": lambda w: torch.stack([w, w]),
    "out": lambda w: torch.add(w, 1),
    "transpose": lambda w: w.transpose(1, 0),
    "detach": lambda w: w.detach(),
    "clone": lambda w: w.clone(),
    "cpu": lambda w: w.cpu(),
    "to": lambda w: w.to(torch.float64),
    "numpy": lambda w: torch.from_numpy(w.detach().cpu().numpy()),
    "list": lambda w: torch.tensor(w.tolist()),
    "iterate": lambda w: torch.stack(list(w)),
    "view": lambda w: w.view(-1),
    "new": lambda w: torch.empty_like(w).fill_(w.mean().item()),
    "copy": lambda w: copy.copy(w),
    "deepcopy": lambda w: copy.deepcopy(w.detach()),
    "pickle": lambda w: pickle.loads(pickle.dumps(w.detach())),
    "in place on another": lambda w: torch.zeros(w.shape, device=w.device).add_(w),
    "no_grad": lambda w: w.square(),
    "equal": lambda w: torch.tensor(int(torch.equal(w, w.clone()))),
    "size": lambda w: torch.tensor([*w.size(), w.numel(), w.dim(), w.shape[-1], len(w), w.stride(0), w.element_size()]),
    "gradient": lambda w: torch.tensor([int(b) for b in (w.requires_grad, w.is_leaf, w.grad_fn is None)]),
    "kind": lambda w: torch.tensor([int(b) for b in (w.is_floating_point(), w.is_cuda, w.is_contiguous())]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("grad", [True, False])
def test_lazy_weights_read_like_upstreams(reader, grad, device):
    attention = transformers_attention("deformable_detr").to(device)
    with torch.set_grad_enabled(grad):
        expected = READERS[reader](attention(**arguments(attention))[1])
        actual = READERS[reader](dm.patch(attention, backend="triton")(**arguments(attention))[1])
    assert (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, expected.device)
    assert actual.requires_grad == expected.requires_grad
    assert type(actual + 0) is Tensor
    torch.testing.assert_close(actual + 0, expected, rtol=1e-5, atol=1e-6)
    assert repr(attention(**arguments(attention))[1]).startswith("tensor(")


def _gradients(module: nn.Module, call) -> Tensors:
    """Gradients when both outputs of `call(module)` are in the loss; the second one is read under `no_grad` first."""
    module.zero_grad()
    output, weights = call(module)
    with torch.no_grad():
        weights.mean()
    grad = torch.linspace(-1, 1, weights.numel(), device=weights.device).view(weights.shape)
    (output.square().sum() + (weights * grad).sum()).backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return gradients


CALLS = {
    "plain": lambda m: m(**arguments(m)),
    "asked for": lambda m: m(**arguments(m), output_attentions=True),
    "checkpoint": lambda m: checkpoint(lambda: m(**arguments(m)), use_reentrant=False),
    "reentrant": lambda m: checkpoint(
        lambda q: m(**arguments(m, hidden_states=q)), arguments(m)["hidden_states"].requires_grad_(), use_reentrant=True
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_gradients_flow_through_the_second_output(attention, call):
    expected = _gradients(attention, CALLS[call])
    actual = _gradients(dm.patch(attention, backend="triton"), CALLS[call])
    close_all(actual, expected)


def test_gradients_flow_through_the_second_output_past_backward_hooks(attention):
    expected = _gradients(attention, CALLS["plain"])
    dm.patch(attention, backend="triton")
    with contextlib.closing(_Handles()) as handles:
        handles.add(attention.register_full_backward_hook(lambda *_: None))
        close_all(_gradients(attention, CALLS["plain"]), expected)
    with contextlib.closing(_Handles()) as handles:
        handles.add(attention.register_full_backward_pre_hook(lambda *_: None))
        close_all(_gradients(attention, CALLS["plain"]), expected)
    with contextlib.closing(_Handles()) as handles:
        handles.add(nn.modules.module.register_module_full_backward_hook(lambda *_: None))
        close_all(_gradients(attention, CALLS["plain"]), expected)


class _Handles(list):
    add = list.append

    def close(self):
        for handle in self:
            handle.remove()


@pytest.mark.parametrize("read_before", [False, True])
def test_lazy_weights_change_in_place(read_before):
    logits = torch.randn(2, 3, 8, requires_grad=True)
    shape = (2, 3, 2, 4)
    expected = logits.softmax(-1).view(shape) * 3
    weights = attention_weights(logits, shape, wanted=False)
    if read_before:
        with torch.no_grad():
            weights.sum()
    weights *= 3
    close(weights, expected)
    grad = torch.randn(shape)
    close(*(torch.autograd.grad(w, logits, grad)[0] for w in (weights, expected)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("inside", [True, False])
def test_lazy_weights_under_autocast_have_upstreams_dtype(dtype, inside):
    # On CUDA autocast runs the softmax in float32.
    attention = transformers_attention("deformable_detr").cuda()
    results = []
    for module in (attention, dm.patch(copy.deepcopy(attention))):
        with torch.autocast("cuda", dtype):
            weights = module(**arguments(module))[1]
            assert weights.dtype == torch.float32
            read = weights + 0 if inside else None
        results.append(weights + 0 if read is None else read)
    assert results[1].dtype == torch.float32
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


def test_output_attentions_of_a_whole_model(tiny, device):
    pixels = torch.randn(1, 3, 64, 96).to(device)
    with torch.no_grad():
        expected = tiny(pixels, output_attentions=True)
        dm.patch(tiny, backend="triton")
        with launches(3):
            actual = tiny(pixels, output_attentions=True)
    for name, count in (("encoder_attentions", 1), ("cross_attentions", 2)):
        assert len(actual[name]) == len(expected[name]) == count
        for a, b in zip(actual[name], expected[name], strict=True):
            assert type(a) is Tensor
            close(a, b)


def test_output_attentions_of_mask2former(device):
    model = DETECTORS["hf-mask2former"].build().to(device)
    decoder = model.model.pixel_level_module.decoder
    with torch.no_grad():
        features = model.model.pixel_level_module.encoder(torch.randn(1, 3, 64, 96).to(device)).feature_maps
        results = []
        for _ in range(2):
            layer = decoder.encoder.layers[0]
            handle = layer.register_forward_hook(lambda module, args, output: results.append(output[1]))
            decoder(features, output_attentions=True)
            handle.remove()
            dm.patch(model, backend="triton")
    assert len(results) == 2 and type(results[1]) is Tensor
    close(results[1], results[0])


# Hooks


def _events(module: nn.Module, log: list) -> list:
    """Registers every kind of hook; each writes what it got."""

    def forward(module, args, kwargs, output):
        log.append(("forward", sorted(kwargs), [type(o) for o in output], output[1].detach() + 0))
        return output[0] * 2, output[1]

    def full_backward(module, grad_input, grad_output):
        log.append(("full backward", [g.clone() for g in grad_output if g is not None]))

    def backward_pre(module, grad_output):
        log.append(("backward pre", [g.clone() for g in grad_output if g is not None]))

    def pre(module, args, kwargs):
        log.append(("pre", len(args), sorted(kwargs)))
        return args, kwargs | {"hidden_states": kwargs["hidden_states"] + 1}

    return [
        module.register_forward_pre_hook(pre, with_kwargs=True),
        module.register_forward_hook(forward, with_kwargs=True),
        module.register_full_backward_hook(full_backward),
        module.register_full_backward_pre_hook(backward_pre),
    ]


@pytest.mark.parametrize("when", ["before", "after"])
def test_every_kind_of_hook_sees_what_it_saw_upstream(attention, when):
    logs = {}
    for patched in (False, True):
        module, log = copy.deepcopy(attention), []
        if patched and when == "after":
            dm.patch(module, backend="triton")
        _events(module, log)
        if patched and when == "before":
            dm.patch(module, backend="triton")
        output = module(**arguments(module))[0]
        output.sum().backward()
        logs[patched] = log, output
    (expected, plain), (actual, output) = logs[False], logs[True]
    close(output, plain)
    assert [event[0] for event in actual] == [event[0] for event in expected]
    assert [event[0] for event in actual] == ["pre", "forward", "backward pre", "full backward"]
    for ours, theirs in zip(actual, expected, strict=True):
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            if isinstance(a, Tensor):
                close(a, b)
            elif isinstance(a, list) and a and isinstance(a[0], Tensor):
                assert len(a) == len(b)
                for x, y in zip(a, b, strict=True):
                    close(x, y)
            else:
                assert a == b


def test_a_hook_that_asks_for_less_changes_nothing(attention):
    handle = attention.register_forward_hook(lambda module, args, output: (output[0], None))
    dm.patch(attention, backend="triton")
    assert attention(**arguments(attention))[1] is None
    handle.remove()
    dm.unpatch(attention)
    assert not attention._forward_hooks


# Accelerate


@pytest.fixture
def hooks():
    return pytest.importorskip("accelerate.hooks")


def _recorder(hooks):
    class Recorder(hooks.ModelHook):
        def __init__(self):
            self.calls = []

        def pre_forward(self, module, *args, **kwargs):
            self.calls.append("pre")
            return args, kwargs

        def post_forward(self, module, output):
            self.calls.append("post")
            return output

    return Recorder()


@pytest.mark.parametrize("order", ["hook, patch", "patch, hook", "hook, hook, patch", "hook, patch, hook"])
@pytest.mark.parametrize("undo", ["unpatch first", "remove first"])
def test_accelerates_hooks(attention, hooks, order, undo):
    expected = attention(**arguments(attention))[0]
    recorders = []
    for step in order.split(", "):
        if step == "patch":
            dm.patch(attention, backend="triton")
        else:
            recorders.append(_recorder(hooks))
            hooks.add_hook_to_module(attention, recorders[-1], append=True)
    with launches(1):
        close(attention(**arguments(attention))[0], expected)
    assert all(recorder.calls == ["pre", "post"] for recorder in recorders)
    if undo == "remove first":
        hooks.remove_hook_from_module(attention)
        with launches(1):
            close(attention(**arguments(attention))[0], expected)
        dm.unpatch(attention)
    else:
        dm.unpatch(attention)
        before = dm.call_counts.copy()
        assert torch.equal(attention(**arguments(attention))[0], expected)
        assert all(recorder.calls == ["pre", "post"] * 2 for recorder in recorders)
        assert dm.call_counts == before
        hooks.remove_hook_from_module(attention)
    before = dm.call_counts.copy()
    assert torch.equal(attention(**arguments(attention))[0], expected)
    assert dm.call_counts == before and not isinstance(attention, PatchedModule)
    # accelerate leaves its bound forward behind; it is patched and copied as any other.
    copied = copy.deepcopy(attention)
    assert copied.forward.__self__ is copied
    with launches(1):
        close(dm.patch(copied, backend="triton")(**arguments(copied))[0], expected)


def test_a_hooked_patched_module_is_copied_with_its_hook(attention, hooks):
    expected = attention(**arguments(attention))[0]
    hooks.add_hook_to_module(dm.patch(attention, backend="triton"), _recorder(hooks))
    copied = copy.deepcopy(attention)
    assert copied.forward.args[0] is copied and copied._old_forward.__self__ is copied
    with launches(1):
        close(copied(**arguments(copied))[0], expected)
    dm.unpatch(copied)
    assert isinstance(attention, PatchedModule)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["dispatch", "offload"])
def test_accelerates_dispatch_and_offload(attention, device, how, when):
    big_modeling = pytest.importorskip("accelerate.big_modeling")
    model, call = nn.ModuleDict({"a": attention}), arguments(attention)
    expected = attention(**call)[0]
    if when == "after":
        dm.patch(model, backend="triton")
    if how == "dispatch":
        big_modeling.dispatch_model(model, device_map={"": 0 if device == "cuda" else "cpu"}, force_hooks=True)
    else:
        big_modeling.cpu_offload(model, execution_device=torch.device(device))
        assert attention.value_proj.weight.device.type == "meta"
    if when == "before":
        dm.patch(model, backend="triton")
    with launches(1):
        close(attention(**call)[0], expected)
    dm.unpatch(model)
    close(attention(**call)[0], expected)
    assert not isinstance(attention, PatchedModule)


# Copies and files


def test_deepcopy_pickle_and_torch_save(tiny, tmp_path):
    dm.patch(tiny, backend="triton", filter=lambda module, name: "decoder" in name)
    expected = outputs(TINY, tiny)
    torch.save(tiny, tmp_path / "model.pt")
    copies = [copy.deepcopy(tiny), pickle.loads(pickle.dumps(tiny)), _load_trusted(tmp_path / "model.pt")]
    for model in copies:
        assert [(e.name, e.class_name) for e in dm.report(model).swapped] == [
            (e.name, e.class_name) for e in dm.report(tiny).swapped
        ]
        with launches(2):
            assert outputs(TINY, model).keys() == expected.keys()
        for entry in dm.report(model).swapped:
            assert model.get_submodule(entry.name).deformops_backend is dm.Backend.TRITON
        dm.unpatch(model)
        assert not any(isinstance(m, PatchedModule) for m in model.modules())
    assert len(dm.report(tiny).swapped) == 2


def _load_trusted(path) -> nn.Module:
    """`torch.load` of a whole model whose classes are allowed one by one."""
    allowed = [type(dm.patch(transformers_attention("deformable_detr")))]
    for name in torch.serialization.get_unsafe_globals_in_checkpoint(path):
        module, _, attribute = name.rpartition(".")
        allowed.append(getattr(importlib.import_module(module), attribute))
    with torch.serialization.safe_globals(allowed):
        return torch.load(path)


def test_a_subclass_of_a_patched_class_is_copied_as_itself(attention):
    mine = type("Mine", (type(dm.patch(attention, backend="triton")),), {})
    attention.__class__ = mine
    assert type(copy.deepcopy(attention)) is mine
    with pytest.raises(dm.PatchError, match="Mine, which is not ours to change"):
        dm.unpatch(attention)


def test_a_pickle_is_read_in_a_fresh_process(attention, tmp_path):
    attention = dm.patch(attention.cpu(), backend="eager")
    expected = attention(**arguments(attention))[0]
    call = arguments(attention)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps((attention, call, expected)))
    script = """
import pickle, sys, torch
module, call, expected = pickle.loads(open(sys.argv[1], "rb").read())
assert type(module).__name__.startswith("Patched"), type(module)
assert torch.equal(module(**call)[0], expected)
assert str(module.deformops_backend) == "eager"
"""
    _python(script, tmp_path / "model.pkl")


def _python(script: str, *arguments) -> None:
    result = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, env=_environment()
    )
    assert result.returncode == 0, result.stderr


def _environment() -> dict[str, str]:
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), root])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def test_save_pretrained_is_read_by_plain_transformers(tiny, tmp_path):
    tiny = dm.patch(tiny.cpu())
    keys = list(tiny.state_dict())
    pixels = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        expected = tiny(pixels)
    tiny.save_pretrained(tmp_path)
    kept = {"pixels": pixels, "logits": expected.logits, "boxes": expected.pred_boxes, "keys": keys}
    torch.save(kept, tmp_path / "x")
    script = """
import sys
sys.modules["deformops_models"] = None
import torch
from transformers import DeformableDetrForObjectDetection
kept = torch.load(sys.argv[1] + "/x")
model, info = DeformableDetrForObjectDetection.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
assert list(model.state_dict()) == kept["keys"]
with torch.no_grad():
    result = model.eval()(kept["pixels"])
assert torch.equal(result.logits, kept["logits"]) and torch.equal(result.pred_boxes, kept["boxes"])
"""
    _python(script, tmp_path)


def test_state_dict_moves_between_patched_and_unpatched(tiny):
    dm.patch(tiny)
    fresh = copy.deepcopy(_tiny[0])
    assert list(tiny.state_dict()) == list(fresh.state_dict())
    assert [n for n, _ in tiny.named_parameters()] == [n for n, _ in fresh.named_parameters()]
    assert [n for n, _ in tiny.named_buffers()] == [n for n, _ in fresh.named_buffers()]
    assert not fresh.load_state_dict(tiny.state_dict()).missing_keys
    buffer = io.BytesIO()
    torch.save(fresh.state_dict(), buffer)
    buffer.seek(0)
    tiny.load_state_dict(torch.load(buffer))


# Training


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(tiny, use_reentrant):
    losses, gradients = training_step(TINY, tiny)
    dm.patch(tiny, backend="triton")
    tiny.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    before = dm.call_counts.copy()
    actual_losses, actual = training_step(TINY, tiny)
    ran = dm.call_counts - before
    assert ran["msda_forward"] > 3 and ran["msda_backward"] == 3 and not ran["upstream_forward"]
    close(actual_losses["['loss']"], losses["['loss']"])
    close_all(actual, gradients)


@pytest.mark.parametrize("order", ["patch, adapt", "adapt, patch"])
def test_lora_on_the_projections(tiny, order):
    peft = pytest.importorskip("peft")
    projections = ["sampling_offsets", "attention_weights", "value_proj", "output_proj"]
    config = peft.LoraConfig(r=2, target_modules=projections, init_lora_weights=False)

    class Holder(nn.Module):
        # peft asks a PreTrainedModel for input embeddings, which a detector has not.
        def __init__(self, detector):
            super().__init__()
            self.detector = detector

        def forward(self, **kwargs):
            return self.detector(**kwargs)

    def adapt(model):
        torch.manual_seed(0)
        return peft.get_peft_model(Holder(model), config)

    reference = adapt(copy.deepcopy(tiny))
    losses, gradients = training_step(TINY, reference)
    if order == "patch, adapt":
        model = adapt(dm.patch(tiny, backend="triton"))
    else:
        model = dm.patch(adapt(tiny), backend="triton")
    with launches(3):
        actual_losses, actual = training_step(TINY, model)
    close(actual_losses["['loss']"], losses["['loss']"])
    close_all(actual, gradients)
    for name in attentions(model, TINY):
        for projection in projections:
            for factor in ("lora_A", "lora_B"):
                assert actual[f"{name}.{projection}.{factor}.default.weight"].abs().max() > 0
    merged = model.merge_and_unload()
    with launches(3):
        actual = outputs(TINY, merged)["['logits']"]
    close(actual, outputs(TINY, reference.merge_and_unload())["['logits']"])
    dm.unpatch(merged)
    assert set(merged.detector.state_dict()) == set(_tiny[0].state_dict())


def test_parameter_groups_are_found_by_name_after_patching(tiny):
    names = [n for n, _ in tiny.named_parameters() if "sampling_offsets" in n or "reference_points" in n]
    dm.patch(tiny)
    assert len(names) >= 6
    assert [n for n, _ in tiny.named_parameters() if "sampling_offsets" in n or "reference_points" in n] == names


def test_inference_mode_then_training(tiny):
    expected = training_step(TINY, tiny)[1]
    dm.patch(tiny, backend="triton")
    with torch.inference_mode():
        TINY.call(tiny, False)
    close_all(training_step(TINY, tiny)[1], expected)


# FSDP


@pytest.fixture
def mesh(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield torch.distributed.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_patch_before_fully_shard_works_and_unpatch_is_refused(mesh):
    from torch.distributed.fsdp import fully_shard

    if torch.cuda.is_available():
        pytest.skip("the mesh is on the CPU, where the compiled kernels do not run")
    attention = transformers_attention("deformable_detr")
    expected = _gradients(attention, CALLS["plain"])
    model = nn.ModuleDict({"a": dm.patch(attention, backend="triton")})
    fully_shard(attention, mesh=mesh)
    assert type(attention).__name__.startswith("FSDPPatched")
    with launches(1):
        actual = _gradients(attention, CALLS["plain"])
    close_all({n: g.full_tensor() for n, g in actual.items()}, expected)
    assert dm.report(model).swapped[0].backend.startswith("triton (float32")
    dm.patch(model, backend="triton")
    for undo in (dm.unpatch, lambda m: contextlib.ExitStack().enter_context(dm.patched(m)) and dm.unpatch(m)):
        with pytest.raises(dm.PatchError, match="a is now a FSDPPatched.*not ours to change"):
            undo(model)
    assert type(attention).__name__.startswith("FSDPPatched")


def test_patch_after_fully_shard_gives_the_reason(mesh):
    from torch.distributed.fsdp import fully_shard

    model = nn.ModuleDict({"a": transformers_attention("mask2former"), "b": transformers_attention("mask2former")})
    fully_shard(model["a"], mesh=mesh)
    dm.patch(model)
    report = dm.report(model)
    assert [e.name for e in report.swapped] == ["b"]
    assert [(e.name, e.reason) for e in report.skipped] == [("a", "FSDP owns it: patch before fully_shard")]
    with pytest.raises(dm.PatchError, match="FSDP owns it"):
        dm.patch(model["a"])


def test_fully_shard_inside_patched_is_an_error_that_changes_nothing(mesh):
    from torch.distributed.fsdp import fully_shard

    attention = transformers_attention("mask2former")
    with pytest.raises(dm.PatchError, match="not ours to change"), dm.patched(attention):
        fully_shard(attention, mesh=mesh)
    assert type(attention).__name__.startswith("FSDPPatched")


# Threads


def test_threads_patch_different_models(tiny):
    tiny = tiny.cpu()
    models = [copy.deepcopy(tiny) for _ in range(4)]
    expected = outputs(TINY, tiny)["['logits']"]
    results, barrier = {}, threading.Barrier(len(models))

    def work(i):
        barrier.wait(30)
        for _ in range(20):
            dm.unpatch(dm.patch(models[i]))
        dm.patch(models[i])
        with torch.no_grad():
            results[i] = models[i](torch.zeros(1, 3, 64, 96)).logits.shape, len(dm.report(models[i]).swapped)

    _run_threads(work, len(models))
    assert results == dict.fromkeys(range(len(models)), ((1, 9, expected.shape[-1]), 4))
    assert len({type(m) for model in models for m in attentions(model, TINY).values()}) == 1


def test_a_thread_does_not_patch_what_another_is_looking_at(tiny):
    looking, patched = threading.Event(), threading.Event()

    def slow(module, name):
        looking.set()
        # The other thread is done by then if it does not wait for this one.
        assert not patched.wait(0.2)
        return True

    def work(i):
        if i:
            assert looking.wait(30)
            dm.patch(tiny)
            patched.set()
        else:
            dm.patch(tiny, filter=slow)

    _run_threads(work, 2)
    assert len(dm.report(tiny).swapped) == 4


def _run_threads(work, count: int) -> None:
    errors = []

    def guarded(i):
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def test_threads_agree_on_one_patched_class():
    base = type(transformers_attention("mask2former"))
    barrier = threading.Barrier(2)

    class Slow(base):
        def __init_subclass__(cls):
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(1)

    modules = [transformers_attention("mask2former") for _ in range(2)]
    for module in modules:
        module.__class__ = Slow
    _run_threads(lambda i: dm.patch(modules[i]), 2)
    assert type(modules[0]) is type(modules[1])
    for module in modules:
        assert type(dm.unpatch(module)) is Slow
