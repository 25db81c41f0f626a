"""Deformable attention of Hugging Face transformers: the wrapper modules, which hold the four projections."""

import math
import types

from torch import Tensor, nn

from deformops_models import patching
from deformops_models.api import deformable_attention
from deformops_models.lazy import attention_weights
from deformops_models.patching import Family, PatchedModule


class _Wrapper(PatchedModule):
    def _counts(self) -> list[int] | None:
        """Points of each level where upstream has one axis for the points of all levels, else None."""

    def _project(self, projection: str, states: Tensor) -> Tensor:
        return getattr(self, projection)(states)

    def _attend(
        self, hidden_states, encoder_hidden_states, padding, reference_points, shapes, wanted
    ) -> tuple[Tensor, Tensor]:
        """Upstream's forward with the softmax, the locations and the sampling in one operator.

        `hidden_states` include the positions; `padding` (B, S) is True where a pixel is padding; `shapes` are pairs of
        (H, W), or a tensor, which the operator checks without a wait for the GPU.
        """
        batch, queries, _ = hidden_states.shape
        rows = encoder_hidden_states.shape[1]
        if not isinstance(shapes, Tensor) and sum(height * width for height, width in shapes) != rows:
            raise ValueError(
                f"spatial shapes {shapes} hold another number of pixels than the {rows} of encoder_hidden_states"
            )
        value = self._project("value_proj", encoder_hidden_states)
        if padding is not None:
            value = value.masked_fill(padding[..., None], 0.0)
        counts = self._counts()
        points = (self.n_levels, self.n_points) if counts is None else (sum(counts),)
        axes = (batch, queries, self.n_heads, *points)
        logits = self.attention_weights(hidden_states).view(batch, queries, self.n_heads, math.prod(points))
        output = deformable_attention(
            value.view(batch, rows, self.n_heads, self.d_model // self.n_heads),
            shapes,
            None,
            reference_points.expand(batch, queries, -1, -1),
            self.sampling_offsets(hidden_states).view(*axes, 2),
            logits,
            num_points=counts,
            offset_scale=getattr(self, "offset_scale", 0.5),
            backend=self.deformops_backend,
        )
        wanted = wanted or bool(self._forward_hooks)
        return self._project("output_proj", output), attention_weights(logits, axes, wanted=wanted)


class _Mask2Former(_Wrapper):
    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        position_embeddings=None,
        reference_points=None,
        spatial_shapes_list=None,
        level_start_index=None,
        output_attentions=False,
    ):
        if not self.runs_operator(hidden_states):
            return super().forward(
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                position_embeddings,
                reference_points,
                spatial_shapes_list,
                level_start_index,
                output_attentions,
            )
        if position_embeddings is not None:
            hidden_states = self.with_pos_embed(hidden_states, position_embeddings)
        return self._attend(
            hidden_states,
            encoder_hidden_states,
            attention_mask,
            reference_points,
            spatial_shapes_list,
            output_attentions,
        )


class _OneFormer(_Wrapper):
    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        position_embeddings=None,
        reference_points=None,
        spatial_shapes=None,
        level_start_index=None,
        output_attentions=False,
        spatial_shapes_list=None,
    ):
        if not self.runs_operator(hidden_states):
            # Older versions do not know it.
            pairs = {} if spatial_shapes_list is None else {"spatial_shapes_list": spatial_shapes_list}
            return super().forward(
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                position_embeddings,
                reference_points,
                spatial_shapes,
                level_start_index,
                output_attentions,
                **pairs,
            )
        if position_embeddings is not None:
            hidden_states = self.with_pos_embed(hidden_states, position_embeddings)
        return self._attend(
            hidden_states,
            encoder_hidden_states,
            attention_mask,
            reference_points,
            spatial_shapes if spatial_shapes_list is None else spatial_shapes_list,
            output_attentions,
        )


class _DeformableDetr(_Wrapper):
    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        position_embeddings=None,
        reference_points=None,
        spatial_shapes=None,
        spatial_shapes_list=None,
        level_start_index=None,
        **kwargs,
    ):
        if not self.runs_operator(hidden_states):
            return super().forward(
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                position_embeddings,
                reference_points,
                spatial_shapes,
                spatial_shapes_list,
                level_start_index,
                **kwargs,
            )
        if position_embeddings is not None:
            hidden_states = hidden_states + position_embeddings
        return self._attend(
            hidden_states,
            encoder_hidden_states,
            None if attention_mask is None else ~attention_mask,
            reference_points,
            spatial_shapes_list,
            kwargs.get("output_attentions"),
        )


class _GroundingDino(_DeformableDetr):
    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        position_embeddings=None,
        reference_points=None,
        spatial_shapes=None,
        spatial_shapes_list=None,
        level_start_index=None,
        output_attentions=False,
    ):
        return super().forward(
            hidden_states,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            position_embeddings,
            reference_points,
            spatial_shapes,
            spatial_shapes_list,
            level_start_index,
            output_attentions=output_attentions,
        )


class _RTDetrV2(_DeformableDetr):
    def _counts(self):
        return self.n_points_list


class _DFine(_Wrapper):
    def _counts(self):
        return self.num_points_list

    def _project(self, projection, states):
        # The layer around it projects, where anything does.
        return states

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        reference_points=None,
        encoder_hidden_states=None,
        spatial_shapes=None,
        spatial_shapes_list=None,
        **kwargs,
    ):
        if not self.runs_operator(hidden_states):
            return super().forward(
                hidden_states,
                attention_mask,
                reference_points,
                encoder_hidden_states,
                spatial_shapes,
                spatial_shapes_list,
                **kwargs,
            )
        return self._attend(
            hidden_states,
            encoder_hidden_states,
            None if attention_mask is None else ~attention_mask,
            reference_points,
            spatial_shapes_list,
            kwargs.get("output_attentions"),
        )


_QUERIES_AND_KEYS = (
    "hidden_states",
    "attention_mask",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "position_embeddings",
    "reference_points",
)
_MASK2FORMER = (*_QUERIES_AND_KEYS, "spatial_shapes_list", "level_start_index", "output_attentions")
_ONEFORMER = (
    *_QUERIES_AND_KEYS,
    "spatial_shapes",
    "level_start_index",
    "output_attentions",
    "spatial_shapes_list",
)
_DEFORMABLE_DETR = (*_QUERIES_AND_KEYS, "spatial_shapes", "spatial_shapes_list", "level_start_index", "kwargs")
_GROUNDING_DINO = (*_DEFORMABLE_DETR[:-1], "output_attentions")
_D_FINE = (
    "hidden_states",
    "attention_mask",
    "reference_points",
    "encoder_hidden_states",
    "spatial_shapes",
    "spatial_shapes_list",
    "kwargs",
)


class _WithCore(Family):
    def obstacle(self, module: nn.Module) -> str | None:
        if reason := super().obstacle(module):
            return reason
        # The adapters do its work themselves.
        attn = module._modules.get("attn")
        core = type(attn)
        if issubclass(core, nn.Module) and (
            core.forward.__module__ != self.module or patching.foreign_code(core.forward, self.module)
        ):
            return f"its attn is a {core.__module__}.{core.__qualname__} with a forward of its own"
        if attn is not None and patching.has_foreign_forward(attn) and not _is_kernelized(attn):
            return "its attn's forward was replaced on the instance"
        own = getattr(module, "ms_deformable_attn_core", None)
        if patching.foreign_code(own, self.module):
            return "its ms_deformable_attn_core was replaced"
        return None


def _is_kernelized(module: nn.Module) -> bool:
    """Whether the forward on the instance is one that `kernelize` has put there: another layer's, bound to it."""
    forward = vars(module)["forward"]
    bound = isinstance(forward, types.MethodType) and forward.__self__ is module
    return bound and forward.__name__ == "forward" and "<locals>" not in forward.__qualname__


FAMILIES = tuple(
    _WithCore(
        name,
        "transformers",
        f"transformers.models.{name}.modeling_{name}",
        f"{prefix}MultiscaleDeformableAttention",
        adapter,
        parameters,
        optional=("spatial_shapes_list",) if adapter is _OneFormer else (),
    )
    for name, prefix, adapter, parameters in (
        ("mask2former", "Mask2FormerPixelDecoderEncoder", _Mask2Former, _MASK2FORMER),
        ("oneformer", "OneFormerPixelDecoderEncoder", _OneFormer, _ONEFORMER),
        ("deformable_detr", "DeformableDetr", _DeformableDetr, _DEFORMABLE_DETR),
        ("rt_detr", "RTDetr", _DeformableDetr, _DEFORMABLE_DETR),
        ("rt_detr_v2", "RTDetrV2", _RTDetrV2, _DEFORMABLE_DETR),
        ("d_fine", "DFine", _DFine, _D_FINE),
        ("deimv2", "Deimv2", _DFine, _D_FINE),
        ("omdet_turbo", "OmDetTurbo", _DeformableDetr, _DEFORMABLE_DETR),
        ("lw_detr", "LwDetr", _DeformableDetr, _DEFORMABLE_DETR),
        ("rf_detr", "RfDetr", _DeformableDetr, _DEFORMABLE_DETR),
        ("pp_doclayout_v2", "PPDocLayoutV2", _DeformableDetr, _DEFORMABLE_DETR),
        ("pp_doclayout_v3", "PPDocLayoutV3", _DeformableDetr, _DEFORMABLE_DETR),
        ("pp_doclayout_v4", "PPDocLayoutV4", _DeformableDetr, _DEFORMABLE_DETR),
        ("grounding_dino", "GroundingDino", _GroundingDino, _GROUNDING_DINO),
        ("mm_grounding_dino", "MMGroundingDino", _GroundingDino, _GROUNDING_DINO),
    )
)


def __getattr__(name: str):
    return patching.importable(FAMILIES, __name__, name)
