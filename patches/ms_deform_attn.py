"""The original `MSDeformAttn` in the many projects that copied it, and its descendants in rfdetr and ultralytics.

A copy is known by its class name, the parameters of its forward and its four projections, wherever its module is. As
projects have changed its mathematics under the same name, its own forward is tried on random numbers too. The compiled
operator that it came with need not exist: where it does not run on a CPU, it is taken for the original's.
"""

import copy
import types
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from deformops_models import patching
from deformops_models.api import deformable_attention, msda
from deformops_models.layout import level_starts
from deformops_models.patching import Family, PatchedModule

_PROJECTIONS = ("sampling_offsets", "attention_weights", "value_proj", "output_proj")


def attend(module, split, query, reference_points, values, shapes, padding, backend):
    """What the original and its descendants do, which differ in names.

    `split` is (M, L, K), `padding` (B, S) is True where a pixel is padding, `shapes` are pairs of (H, W) or a tensor
    of them.
    """
    batch, queries, _ = query.shape
    value = module.value_proj(values)
    if padding is not None:
        value = value.masked_fill(padding[..., None], 0.0)
    output = deformable_attention(
        value.reshape(batch, values.shape[1], split[0], -1),
        shapes,
        None,
        reference_points.expand(batch, queries, -1, -1),
        module.sampling_offsets(query).reshape(batch, queries, *split, 2),
        module.attention_weights(query).reshape(batch, queries, *split),
        backend=backend,
    )
    return module.output_proj(output)


def _split(module) -> tuple[int, int, int]:
    return module.n_heads, module.n_levels, module.n_points


class _MSDeformAttn(PatchedModule):
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
        # In rfdetr's export mode the graph is meant for other runtimes.
        if getattr(self, "_export", False) or not self.runs_operator(query):
            # Only rfdetr knows the pairs.
            pairs = () if input_spatial_shapes_hw is None else (input_spatial_shapes_hw,)
            return super().forward(
                query,
                reference_points,
                input_flatten,
                input_spatial_shapes,
                input_level_start_index,
                input_padding_mask,
                *pairs,
            )
        shapes = input_spatial_shapes if input_spatial_shapes_hw is None else input_spatial_shapes_hw
        operands = (query, reference_points, input_flatten, shapes, input_padding_mask)
        return attend(self, _split(self), *operands, self.deformops_backend)


class _Ultralytics(PatchedModule):
    def forward(self, query, refer_bbox, value, value_shapes, value_mask=None):
        if not self.runs_operator(query):
            return super().forward(query, refer_bbox, value, value_shapes, value_mask)
        operands = (query, refer_bbox, value, value_shapes, value_mask)
        return attend(self, _split(self), *operands, self.deformops_backend)


class _Copied(Family):
    """Whose classes have many versions, so that each module is looked at too.

    One of a module that nobody knows may have other mathematics as well, and is tried.
    """

    def obstacle(self, module: nn.Module) -> str | None:
        if reason := super().obstacle(module):
            return reason
        if lacking := [name for name in _PROJECTIONS if not isinstance(getattr(module, name, None), nn.Module)]:
            return f"it has no {', '.join(lacking)}"
        for name in ("n_heads", "n_levels", "n_points"):
            if not isinstance(getattr(module, name, None), int):
                return f"{name} is {getattr(module, name, None)!r}, known is one whole number"
        return _difference(module) if self.module is None and not self.is_patched(module) else None


def _difference(module: nn.Module) -> str | None:
    """Why a copy's own forward is not the original's, as far as random numbers show; or None."""
    parts = (*module.named_parameters(), *module.named_buffers(), *module.named_children())
    if own := [name for name, _ in parts if name.split(".")[0] not in _PROJECTIONS]:
        return f"it has {', '.join(own)} beside the four projections"
    if hasattr(type(module).forward, "__wrapped__"):
        return "a decorator is around its forward"
    for name in _PROJECTIONS:
        if not isinstance(getattr(getattr(module, name), "in_features", None), int):
            return f"its {name} is a {type(getattr(module, name)).__name__} without in_features: it cannot be tried"
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32) - 0.5

    with (
        _disable_current_modes(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
    ):
        try:
            found = [_try(_twin(module, training, random), n, random) for training in (True, False) for n in (2, 4)]
        except (AttributeError, TypeError) as error:
            return f"its forward could not be tried: {error}"
    # Not every copy takes boxes.
    ran = [difference for difference, error in found if error is None]
    return next(filter(None, ran), None) if ran else f"its forward could not be tried: {found[0][1]}"


def _try(twin: nn.Module, coordinates: int, random: Callable[..., Tensor]) -> tuple[str | None, str | None]:
    """How a copy's forward differs from ours, and what it raised."""
    sizes = [(2 + level % 2, 3 + level % 3) for level in range(twin.n_levels)]
    query = random(2, 5, twin.sampling_offsets.in_features)
    places = random(2, 5, twin.n_levels, coordinates) + 0.5
    values = random(2, sum(height * width for height, width in sizes), twin.value_proj.in_features)
    padding = random(*values.shape[:2]) > 0.25
    shapes, starts = torch.tensor(sizes), torch.tensor(level_starts(sizes))
    before = _attributes(twin)
    forward = type(twin).forward
    # Others' code can raise anything.
    try:
        expected = attend(twin, _split(twin), query, places, values, shapes, padding, "eager")
        try:
            found = forward(twin, query, places, values, shapes, starts, padding)
        except Exception:  # its operator may need a GPU, or not be compiled; what else is wrong is raised again
            found = _without_extension(forward)(twin, query, places, values, shapes, starts, padding)
    except Exception as error:
        return None, " ".join(str(error).split())[:200] or type(error).__name__
    after = _attributes(twin)
    if kept := [name for name in after if after[name] != before.get(name)]:
        return f"its forward keeps {', '.join(kept)}, which a patched one would not", None
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return f"its forward returns another thing than ({', '.join(map(str, expected.shape))})", None
    error = ((found - expected).norm() / expected.norm()).item()
    if error < 1e-3:
        return None, None
    return f"its forward computes something else: with {coordinates} coordinates it is {error:.1%} away", None


def _attributes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Which objects the module and its containers hold, by name."""
    held = {name: value for name, value in vars(module).items() if name != "_modules"}
    return {name: (id(value), *map(id, _items(value))) for name, value in held.items()}


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return value if isinstance(value, list | set) else ()


def _twin(module: nn.Module, training: bool, random: Callable[..., Tensor]) -> nn.Module:
    """The module with other projections: its own may be on meta, quantised or adapted, or have hooks."""
    layers = {name: getattr(module, name) for name in _PROJECTIONS}
    twin = object.__new__(type(module))
    # What a forward adds to is not the module's own.
    own = {name: copy.copy(v) if isinstance(v, dict | list | set) else v for name, v in vars(module).items()}
    twin.__dict__ = own | {
        "training": training,
        "_modules": {name: _Linear(layer.in_features, layer.out_features, random) for name, layer in layers.items()},
    }
    return twin


class _Linear(nn.Module):
    """Without parameters, which may be made elsewhere than asked for while a model is built."""

    def __init__(self, in_features: int, out_features: int, random: Callable[..., Tensor]):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight, self.bias = random(out_features, in_features), random(out_features)

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.weight, self.bias)


def _without_extension(forward: Callable) -> Callable:
    """The same function, which finds plain PyTorch where the original has its compiled operator."""
    known = "MSDeformAttnFunction"
    names = [name for name, v in forward.__globals__.items() if known in (name, getattr(v, "__name__", None))]
    functions = forward.__globals__ | dict.fromkeys(names, _PlainFunction)
    same = types.FunctionType(forward.__code__, functions, forward.__name__, forward.__defaults__, forward.__closure__)
    same.__kwdefaults__ = forward.__kwdefaults__
    return same


class _PlainFunction:
    @staticmethod
    def apply(value, shapes, starts, locations, weights, im2col_step):
        return msda(value, shapes, starts, locations, weights, backend="eager")


_ORIGINAL = (
    "query",
    "reference_points",
    "input_flatten",
    "input_spatial_shapes",
    "input_level_start_index",
    "input_padding_mask",
    "input_spatial_shapes_hw",
)

FAMILIES = tuple(
    _Copied(name, framework, module, "MSDeformAttn", adapter, parameters, optional=("input_spatial_shapes_hw",))
    for name, framework, module, adapter, parameters in (
        ("rfdetr", "rfdetr", "rfdetr.models.ops.modules.ms_deform_attn", _MSDeformAttn, _ORIGINAL),
        (
            "ultralytics_rtdetr",
            "ultralytics",
            "ultralytics.nn.modules.transformer",
            _Ultralytics,
            ("query", "refer_bbox", "value", "value_shapes", "value_mask"),
        ),
        ("ms_deform_attn", None, None, _MSDeformAttn, _ORIGINAL),
    )
)


def __getattr__(name: str):
    return patching.importable(FAMILIES, __name__, name)
