"""Deformable attention of OpenMMLab, one class for DINO, Deformable DETR, Mask2Former and more, and of detrex."""

import warnings

from deformops_models import patching
from deformops_models.patches.ms_deform_attn import attend
from deformops_models.patching import Family, PatchedModule


class _MultiScaleDeformableAttention(PatchedModule):
    def _identity(self, query, identity, kwargs):
        """What is added to the output."""
        if "residual" in kwargs:
            warnings.warn(
                "residual= is deprecated in MultiScaleDeformableAttention, use identity=", DeprecationWarning, 3
            )
            if identity is not None:
                raise AssertionError("residual= and identity= are the same argument: give one")
            identity = kwargs["residual"]
        return query if identity is None else identity

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
        if not self.runs_operator(query):
            return super().forward(
                query,
                key,
                value,
                identity,
                query_pos,
                key_padding_mask,
                reference_points,
                spatial_shapes,
                level_start_index,
                **kwargs,
            )
        identity = self._identity(query, identity, kwargs)
        value = query if value is None else value
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)
        # The operator reads sizes on the device; mmcv's own assert on their sum would wait for it.
        split = (self.num_heads, self.num_levels, self.num_points)
        operands = (query, reference_points, value, spatial_shapes, key_padding_mask)
        output = attend(self, split, *operands, self.deformops_backend)
        if not self.batch_first:
            output = output.transpose(0, 1)
        return self.dropout(output) + identity


class _Detrex(_MultiScaleDeformableAttention):
    def _identity(self, query, identity, kwargs):
        return query if identity is None else identity


_PARAMETERS = (
    "query",
    "key",
    "value",
    "identity",
    "query_pos",
    "key_padding_mask",
    "reference_points",
    "spatial_shapes",
    "level_start_index",
    "kwargs",
)

FAMILIES = tuple(
    Family(name, name, module, "MultiScaleDeformableAttention", adapter, _PARAMETERS)
    for name, module, adapter in (
        ("mmcv", "mmcv.ops.multi_scale_deform_attn", _MultiScaleDeformableAttention),
        ("detrex", "detrex.layers.multi_scale_deform_attn", _Detrex),
    )
)


def __getattr__(name: str):
    return patching.importable(FAMILIES, __name__, name)
