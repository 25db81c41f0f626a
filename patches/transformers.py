"""Deformable attention of Hugging Face transformers: the wrapper modules, which hold the four projections."""

from torch import Tensor

from deformops_models import patching
from deformops_models.api import deformable_attention
from deformops_models.lazy import attention_weights
from deformops_models.patching import Family, PatchedModule


class _Wrapper(PatchedModule):
    def _attend(
        self, hidden_states, encoder_hidden_states, padding, reference_points, shapes, wanted
    ) -> tuple[Tensor, Tensor]:
        """Upstream's forward with the softmax, the locations and the sampling in one operator.

        `hidden_states` include the positions; `padding` (B, S) is True where a pixel is padding; `shapes` are pairs of
        (H, W).
        """
        batch, queries, _ = hidden_states.shape
        rows = encoder_hidden_states.shape[1]
        if sum(height * width for height, width in shapes) != rows:
            raise ValueError(
                f"spatial shapes {shapes} hold another number of pixels than the {rows} of encoder_hidden_states"
            )
        value = self.value_proj(encoder_hidden_states)
        if padding is not None:
            value = value.masked_fill(padding[..., None], 0.0)
        levels = (batch, queries, self.n_heads, self.n_levels, self.n_points)
        logits = self.attention_weights(hidden_states).view(*levels[:3], self.n_levels * self.n_points)
        output = deformable_attention(
            value.view(batch, rows, self.n_heads, self.d_model // self.n_heads),
            shapes,
            None,
            reference_points.expand(batch, queries, -1, -1),
            self.sampling_offsets(hidden_states).view(*levels, 2),
            logits,
            backend=self.deformops_backend,
        )
        wanted = wanted or bool(self._forward_hooks)
        return self.output_proj(output), attention_weights(logits, levels, wanted=wanted)


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


_PARAMETERS = (
    "hidden_states",
    "attention_mask",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "position_embeddings",
    "reference_points",
)

FAMILIES = (
    Family(
        "mask2former",
        "transformers",
        "transformers.models.mask2former.modeling_mask2former",
        "Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention",
        _Mask2Former,
        (*_PARAMETERS, "spatial_shapes_list", "level_start_index", "output_attentions"),
    ),
    Family(
        "deformable_detr",
        "transformers",
        "transformers.models.deformable_detr.modeling_deformable_detr",
        "DeformableDetrMultiscaleDeformableAttention",
        _DeformableDetr,
        (*_PARAMETERS, "spatial_shapes", "spatial_shapes_list", "level_start_index", "kwargs"),
    ),
)


def __getattr__(name: str):
    return patching.importable(FAMILIES, __name__, name)
