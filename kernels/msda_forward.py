"""Forward kernel of multi-scale deformable attention: one program sums the samples of BQ queries for one head."""

import triton
import triton.language as tl

from deformops_models.kernels._launch import Problem, launch
from deformops_models.kernels._sampling import (
    corners,
    first_point,
    load_level,
    load_points,
    load_reference,
    padded,
    row_offset,
    to_pixels,
)


@triton.jit
def sample_level(
    value_ptr, reference_ptr, points_ptr, weights_ptr, o_query, o_row, m_q, o_d, m_d, b_max,
    height, width, start, offset_scale, level: tl.constexpr,
    K: tl.constexpr, FIRST: tl.constexpr, P: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr,
    REF_LEVELS: tl.constexpr, SOFTMAX: tl.constexpr, WIDE: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """One level's weighted samples [BQ, BD] and the sum of its weights [BQ]."""
    o_k = tl.arange(0, padded(K))
    m_k = m_q[:, None] & (o_k < K)[None, :]
    # [BQ, KP]
    b_w = tl.load(weights_ptr + (o_row * P + FIRST)[:, None] + o_k[None, :], mask=m_k, other=0.0).to(tl.float32)
    if SOFTMAX:
        b_w = tl.where(m_k, tl.exp(b_w - b_max[:, None]), 0.0)
    x, y = load_points(points_ptr, o_row, m_q, K, FIRST, P, BQ)
    rx, ry, rw, rh = load_reference(reference_ptr, o_query * REF_LEVELS + level % REF_LEVELS, m_q, C, BQ)
    x = to_pixels(x, rx, rw, width, offset_scale / K, C)
    y = to_pixels(y, ry, rh, height, offset_scale / K, C)
    x0, y0, fx, fy, m_l, m_r, m_u, m_b = corners(x, y, height, width, m_k)
    # [BQ, KP, BD]
    p_ul = value_ptr + row_offset(x0, y0, start, width, STRIDE, WIDE)[:, :, None] + o_d[None, None, :]
    p_bl = p_ul + width * STRIDE
    m_d = m_d[None, None, :]
    v_ul = tl.load(p_ul, mask=(m_l & m_u)[:, :, None] & m_d, other=0.0).to(tl.float32)
    v_ur = tl.load(p_ul + STRIDE, mask=(m_r & m_u)[:, :, None] & m_d, other=0.0).to(tl.float32)
    v_bl = tl.load(p_bl, mask=(m_l & m_b)[:, :, None] & m_d, other=0.0).to(tl.float32)
    v_br = tl.load(p_bl + STRIDE, mask=(m_r & m_b)[:, :, None] & m_d, other=0.0).to(tl.float32)
    b_left, b_right = b_w * (1.0 - fx), b_w * fx
    b_sample = v_ul * (b_left * (1.0 - fy))[:, :, None] + v_ur * (b_right * (1.0 - fy))[:, :, None]
    b_sample += v_bl * (b_left * fy)[:, :, None] + v_br * (b_right * fy)[:, :, None]
    return tl.sum(b_sample, axis=1), tl.sum(b_w, axis=1)


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
    o_q = i_q * BQ + tl.arange(0, BQ)
    m_q = o_q < Q
    o_query = i_b * Q + o_q
    o_row = o_query * M + i_m
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    value_ptr += i_b * S * (M * D) + i_m * D

    b_max = tl.zeros([BQ], tl.float32)
    b_sum = tl.zeros([BQ], tl.float32)
    if SOFTMAX:
        o_p = tl.arange(0, padded(P))
        m_p = m_q[:, None] & (o_p < P)[None, :]
        # [BQ, padded P]
        b_logits = tl.load(weights_ptr + (o_row * P)[:, None] + o_p[None, :], mask=m_p, other=-float("inf"))
        b_max = tl.where(m_q, tl.max(b_logits.to(tl.float32), axis=1), 0.0)

    # [BQ, BD]
    b_output = tl.zeros([BQ, BD], tl.float32)
    next_start = tl.zeros([], tl.int64)
    all_fit = S >= 0
    for level in tl.static_range(L):
        height, width, start, fits = load_level(shapes_ptr, starts_ptr, level, next_start, S, HAS_STARTS)
        next_start = start + height.to(tl.int64) * width
        all_fit = all_fit & fits
        b_level, b_weights = sample_level(
            value_ptr, reference_ptr, points_ptr, weights_ptr, o_query, o_row, m_q, o_d, m_d, b_max,
            height, width, start, offset_scale, level, NUM_POINTS[level], first_point(NUM_POINTS, level),
            P, M * D, C, REF_LEVELS, SOFTMAX, WIDE, BQ,
        )  # fmt: skip
        b_output += b_level
        b_sum += b_weights

    if SOFTMAX:
        b_output = b_output / tl.where(m_q, b_sum, 1.0)[:, None]
    if not HAS_STARTS:
        all_fit = all_fit & (next_start == S)
    # Level sizes that do not fit the value can only be seen here; the result must not look right.
    b_output = tl.where(all_fit, b_output, float("nan"))
    o_out = (o_row * D)[:, None] + o_d[None, :]
    tl.store(output_ptr + o_out, b_output.to(output_ptr.dtype.element_ty), mask=m_q[:, None] & m_d[None, :])


def msda_forward(output, value, shapes, starts, reference, points, weights, problem: Problem) -> None:
    """Writes the output (B, Q, M·D); see `deformops_models.reference.msda` for the operands."""
    launch(
        msda_forward_kernel,
        problem,
        (output, value, shapes, starts, reference, points, weights),
        backward=False,
    )
