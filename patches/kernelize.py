"""A layer for the package `kernels` of Hugging Face, whose `kernelize` swaps the sampling of transformers' models.

`patch` does more: it also takes the softmax and the locations into the kernel. This is for code that selects its
kernels by a mapping already.
"""

from torch import Tensor, nn

from deformops_models.api import msda


class MultiScaleDeformableAttention(nn.Module):
    """The module that transformers offers to `kernelize` under this name."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_spatial_shapes_list: list[tuple[int, int]],
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int,
    ) -> Tensor:
        """(B, Q, M·D) of value (B, S, M, D), locations (B, Q, M, L, K, 2) and weights (B, Q, M, L, K)."""
        return msda(value, value_spatial_shapes_list, None, sampling_locations, attention_weights)


class _Here:
    """What a mapping holds: a repository that has its one layer in this process."""

    def load(self) -> type[nn.Module]:
        return MultiScaleDeformableAttention

    def __str__(self) -> str:
        return f"{__name__} (layer `{MultiScaleDeformableAttention.__name__}`)"


#: For `kernels.use_kernel_mapping` or `kernels.register_kernel_mapping`.
MAPPING = {MultiScaleDeformableAttention.__name__: dict.fromkeys(("cuda", "cpu"), _Here())}
