"""Forward kernel of multi-scale deformable attention: one program sums the samples of BQ queries for one head."""

import triton
import triton.language as tl

from deformops_models.kernels._launch import launch, traced_launch
from deformops_models.kernels._sampling import (
    corner_weights,
    first_point,
    line_offset,
    load_level,
    load_samples,
    padded,
    row_offset,
    softmax_terms,
)


@triton.jit
def add_row(b_sum, pointers, weight, m_d):
    """b_sum [R, BD] plus weight · row; a row of weight 0 is not read."""
    b_w = weight[:, None]
    return b_sum + tl.load(pointers, mask=(b_w != 0.0) & m_d, other=0.0).to(tl.float32) * b_w


@triton.jit
def sample_level(
    value_ptr, reference_ptr, points_ptr, weights_ptr, b_max, left_queries, height, width, start, offset_scale,
    level: tl.constexpr, M: tl.constexpr, D: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr, P: tl.constexpr,
    C: tl.constexpr, REF_LEVELS: tl.constexpr, SOFTMAX: tl.constexpr, WIDE: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """One level's weighted samples [BQ, BD]."""
    KP: tl.constexpr = padded(K)
    BD: tl.constexpr = padded(D)
    STRIDE: tl.constexpr = M * D
    # [R]
    _, _, b_w, _, _, _, _, x0, y0, fx, fy, m_left, m_right, m_up, m_down = load_samples(
        reference_ptr, points_ptr, weights_ptr, b_max, left_queries, height, width, offset_scale,
        level, M, K, FIRST, P, C, REF_LEVELS, SOFTMAX, BQ,
    )  # fmt: skip
    w_ul, w_ur, w_bl, w_br = corner_weights(b_w, fx, fy, m_left, m_right, m_up, m_down)
    o_d = tl.arange(0, BD)[None, :]
    m_d = o_d < D
    # [R, BD]
    p_up = value_ptr + row_offset(x0, y0, start, width, STRIDE, WIDE)[:, None] + o_d
    p_down = p_up + line_offset(width, STRIDE, WIDE)
    b_sum = tl.zeros([KP * BQ, BD], tl.float32)
    b_sum = add_row(b_sum, p_up, w_ul, m_d)
    b_sum = add_row(b_sum, p_up + STRIDE, w_ur, m_d)
    b_sum = add_row(b_sum, p_down, w_bl, m_d)
    b_sum = add_row(b_sum, p_down + STRIDE, w_br, m_d)
    return tl.sum(tl.reshape(b_sum, (KP, BQ, BD)), axis=0)


@triton.jit(do_not_specialize=["S", "Q", "offset_scale"])
def msda_forward_kernel(
    output_ptr,
    value_ptr,
    shapes_ptr,
    starts_ptr,
    reference_ptr,
    points_ptr,
    weights_ptr,
    S,
    Q,
    offset_scale,
    M: tl.constexpr,
    D: tl.constexpr,
    NUM_POINTS: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    REF_LEVELS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    WIDE: tl.constexpr,
    BQ: tl.constexpr,
):
    L: tl.constexpr = len(NUM_POINTS)
    BD: tl.constexpr = padded(D)
    i_m = tl.program_id(0) % M
    i_block = tl.program_id(0) // M
    blocks = tl.cdiv(Q, BQ)
    i_b, i_q = (i_block // blocks).to(tl.int64), i_block % blocks
    o_d = tl.arange(0, BD)
    o_first = i_b * Q + i_q * BQ
    value_ptr += i_b * S * (M * D) + i_m * D
    if C > 0:
        reference_ptr += o_first * (REF_LEVELS * C)
    points_ptr += (o_first * M + i_m) * (2 * P)
    weights_ptr += (o_first * M + i_m) * P
    output_ptr += (o_first * M + i_m) * D

    left_queries = Q - i_q * BQ
    o_q = tl.arange(0, BQ)
    m_q = o_q < left_queries
    b_max = tl.zeros([BQ], tl.float32)
    b_sum = tl.zeros([BQ], tl.float32)
    if SOFTMAX:
        b_max, b_sum = softmax_terms(weights_ptr, m_q, M, P, BQ)

    # [BQ, BD]
    b_output = tl.zeros([BQ, BD], tl.float32)
    next_start = tl.zeros([], tl.int64)
    all_fit = S >= 0
    for level in tl.static_range(L):
        height, width, start, fits = load_level(shapes_ptr, starts_ptr, level, next_start, S, HAS_STARTS)
        next_start = start + height.to(tl.int64) * width
        all_fit = all_fit & fits
        b_output += sample_level(
            value_ptr, reference_ptr, points_ptr, weights_ptr, b_max, left_queries, height, width, start, offset_scale,
            level, M, D, NUM_POINTS[level], first_point(NUM_POINTS, level), P, C, REF_LEVELS, SOFTMAX, WIDE, BQ,
        )  # fmt: skip

    if SOFTMAX:
        b_output = b_output / tl.where(m_q, b_sum, 1.0)[:, None]
    if not HAS_STARTS:
        all_fit = all_fit & (next_start == S)
    # Level sizes that do not fit the value can only be seen here; the result must not look right.
    b_output = tl.where(all_fit, b_output, float("nan"))
    p_output = output_ptr + (o_q * (M * D))[:, None] + o_d[None, :]
    tl.store(p_output, b_output.to(output_ptr.dtype.element_ty), mask=m_q[:, None] & (o_d < D)[None, :])


def msda_forward(output, value, shapes, starts, reference, points, weights, *options) -> None:
    """Writes the output (B, Q, M·D). Operands are contiguous; `options` are those of `launch`."""
    launch(msda_forward_kernel, (output, value, shapes, starts, reference, points, weights), *options)


def traced_msda_forward(output, value, shapes, starts, reference, points, weights, *options) -> None:
    """The same by a call that a compiler sees into."""
    traced_launch(msda_forward_kernel, (output, value, shapes, starts, reference, points, weights), *options)
