"""The original `MSDeformAttn` in the many projects that copied it, and its descendants in rfdetr and ultralytics.

A copy is known by its class name, the parameters of its forward and its four projections, wherever its module is. The
compiled operator that it came with need not exist.
"""

from torch import nn

from deformops_models import patching
from deformops_models.api import deformable_attention
from deformops_models.patching import Family, PatchedModule

_PROJECTIONS = ("sampling_offsets", "attention_weights", "value_proj", "output_proj")


class Attention(PatchedModule):
    """What the original and its descendants do, which differ in names."""

    def _heads_levels_points(self) -> tuple[int, int, int]:
        return self.n_heads, self.n_levels, self.n_points

    def _attend(self, query, reference_points, values, shapes, padding):
        """`padding` (B, S) is True where a pixel is padding; `shapes` are pairs of (H, W) or a tensor of them."""
        batch, queries, _ = query.shape
        value = self.value_proj(values)
        if padding is not None:
            value = value.masked_fill(padding[..., None], 0.0)
        split = (batch, queries, *self._heads_levels_points())
        output = deformable_attention(
            value.reshape(batch, values.shape[1], self._heads_levels_points()[0], -1),
            shapes,
            None,
            reference_points.expand(batch, queries, -1, -1),
            self.sampling_offsets(query).reshape(*split, 2),
            self.attention_weights(query).reshape(split),
            backend=self.deformops_backend,
        )
        return self.output_proj(output)


class _MSDeformAttn(Attention):
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
        return self._attend(query, reference_points, input_flatten, shapes, input_padding_mask)


class _Ultralytics(Attention):
    def forward(self, query, refer_bbox, value, value_shapes, value_mask=None):
        if not self.runs_operator(query):
            return super().forward(query, refer_bbox, value, value_shapes, value_mask)
        return self._attend(query, refer_bbox, value, value_shapes, value_mask)


class _Copied(Family):
    """Whose class may come from anywhere, so that each module is looked at too."""

    def obstacle(self, module: nn.Module) -> str | None:
        if reason := super().obstacle(module):
            return reason
        if lacking := [name for name in _PROJECTIONS if not isinstance(getattr(module, name, None), nn.Module)]:
            return f"it has no {', '.join(lacking)}"
        for name in ("n_heads", "n_levels", "n_points"):
            if not isinstance(getattr(module, name, None), int):
                return f"{name} is {getattr(module, name, None)!r}, known is one whole number"
        if getattr(module, "use_4D_normalizer", False):
            return "use_4D_normalizer=True places its points by another rule"
        return None


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
