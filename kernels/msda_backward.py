"""Backward kernel of multi-scale deformable attention: the gradients of one head's samples of BQ queries."""

import triton
import triton.language as tl

from deformops_models.kernels._launch import launch
from deformops_models.kernels._sampling import (
    corner_weights,
    first_point,
    line_offset,
    load_level,
    load_samples,
    padded,
    per_sample,
    row_offset,
    sample_rows,
    softmax_terms,
)


@triton.jit
def add_rows(pointers, b_grad, weight, m_d):
    """Adds weight · grad_output to rows of the value's gradient; their order does not matter, hence relaxed."""
    b_w = weight[:, None]
    tl.atomic_add(pointers, (b_grad * b_w).to(pointers.dtype.element_ty), mask=(b_w != 0.0) & m_d, sem="relaxed")


@triton.jit
def dot_rows(pointers, b_grad, mask, m_d):
    """⟨row, grad_output⟩ per sample [R]; zero for a row outside."""
    return tl.sum(tl.load(pointers, mask=mask[:, None] & m_d, other=0.0).to(tl.float32) * b_grad, axis=1)


@triton.jit
def differentiate_level(
    value_ptr, reference_ptr, points_ptr, weights_ptr,
    grad_value_ptr, grad_reference_ptr, grad_points_ptr,
    b_grad, b_max, b_scale, left_queries, height, width, start, offset_scale,
    level: tl.constexpr, L: tl.constexpr, M: tl.constexpr, D: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr,
    P: tl.constexpr, C: tl.constexpr, REF_LEVELS: tl.constexpr, SOFTMAX: tl.constexpr, WIDE: tl.constexpr,
    BQ: tl.constexpr, NEED_VALUE: tl.constexpr, NEED_REFERENCE: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of one level's points and rows; returns its weights and their gradients, each [R]."""
    KP: tl.constexpr = padded(K)
    BD: tl.constexpr = padded(D)
    STRIDE: tl.constexpr = M * D
    scale = offset_scale / K
    # [R]
    o_sample, m_r, b_w, px, py, rw, rh, x0, y0, fx, fy, m_left, m_right, m_up, m_down = load_samples(
        reference_ptr, points_ptr, weights_ptr, b_max, left_queries, height, width, offset_scale,
        level, M, K, FIRST, P, C, REF_LEVELS, SOFTMAX, BQ,
    )  # fmt: skip
    if SOFTMAX:
        b_w = b_w * per_sample(b_scale, KP, BQ)
    o_d = tl.arange(0, BD)[None, :]
    m_d = o_d < D
    # [R, BD]
    b_grad = tl.reshape(tl.broadcast_to(b_grad[None, :, :], (KP, BQ, BD)), (KP * BQ, BD))
    o_up = row_offset(x0, y0, start, width, STRIDE, WIDE)[:, None] + o_d
    o_down = o_up + line_offset(width, STRIDE, WIDE)
    # [R]
    d_ul = dot_rows(value_ptr + o_up, b_grad, m_left & m_up, m_d)
    d_ur = dot_rows(value_ptr + o_up + STRIDE, b_grad, m_right & m_up, m_d)
    d_bl = dot_rows(value_ptr + o_down, b_grad, m_left & m_down, m_d)
    d_br = dot_rows(value_ptr + o_down + STRIDE, b_grad, m_right & m_down, m_d)

    if NEED_VALUE:
        w_ul, w_ur, w_bl, w_br = corner_weights(b_w, fx, fy, m_left, m_right, m_up, m_down)
        add_rows(grad_value_ptr + o_up, b_grad, w_ul, m_d)
        add_rows(grad_value_ptr + o_up + STRIDE, b_grad, w_ur, m_d)
        add_rows(grad_value_ptr + o_down, b_grad, w_bl, m_d)
        add_rows(grad_value_ptr + o_down + STRIDE, b_grad, w_br, m_d)

    d_up, d_down = d_ul + (d_ur - d_ul) * fx, d_bl + (d_br - d_bl) * fx
    g_w = d_up + (d_down - d_up) * fy
    # By pixel first: a point is a pixel for C = 2, else a factor follows.
    g_x = b_w * ((d_ur - d_ul) * (1.0 - fy) + (d_br - d_bl) * fy)
    g_y = b_w * (d_down - d_up)
    g_px, g_py = g_x, g_y
    if C == 0:
        g_px, g_py = g_x * width, g_y * height
    if C == 4:
        # A point that samples nothing has no gradient, also where it or its reference is not finite.
        px, py = tl.where(g_x == 0.0, 0.0, px), tl.where(g_y == 0.0, 0.0, py)
        g_px = tl.where(g_x == 0.0, 0.0, g_x * (width * scale * rw))
        g_py = tl.where(g_y == 0.0, 0.0, g_y * (height * scale * rh))
    # [R, 2]
    p_xy = grad_points_ptr + (o_sample * 2)[:, None] + tl.arange(0, 2)[None, :]
    tl.store(p_xy, tl.join(g_px, g_py).to(grad_points_ptr.dtype.element_ty), mask=m_r[:, None])
    if NEED_REFERENCE:
        # One row per head and level, summed outside in a fixed order.
        p_ref = grad_reference_ptr + (tl.arange(0, BQ) * (M * L) + level) * C
        m_q = tl.arange(0, BQ) < left_queries
        g_x, g_y = g_x * width, g_y * height
        tl.store(p_ref, sum_points(g_x, KP, BQ), mask=m_q)
        tl.store(p_ref + 1, sum_points(g_y, KP, BQ), mask=m_q)
        if C == 4:
            tl.store(p_ref + 2, sum_points(g_x * px, KP, BQ) * scale, mask=m_q)
            tl.store(p_ref + 3, sum_points(g_y * py, KP, BQ) * scale, mask=m_q)
    return b_w, g_w


@triton.jit
def sum_points(b_samples, KP: tl.constexpr, BQ: tl.constexpr):
    """Sum over a query's points: [KP·BQ] to [BQ]."""
    return tl.sum(tl.reshape(b_samples, (KP, BQ)), axis=0)


@triton.jit(do_not_specialize=["S", "Q", "offset_scale"])
def msda_backward_kernel(
    grad_ptr,
    value_ptr,
    shapes_ptr,
    starts_ptr,
    reference_ptr,
    points_ptr,
    weights_ptr,
    grad_value_ptr,
    grad_reference_ptr,
    grad_points_ptr,
    grad_weights_ptr,
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
    NEED_VALUE: tl.constexpr,
    NEED_REFERENCE: tl.constexpr,
):
    L: tl.constexpr = len(NUM_POINTS)
    BD: tl.constexpr = padded(D)
    i_m = tl.program_id(0) % M
    i_block = tl.program_id(0) // M
    blocks = tl.cdiv(Q, BQ)
    i_b, i_q = (i_block // blocks).to(tl.int64), i_block % blocks
    o_first = i_b * Q + i_q * BQ
    o_value = i_b * S * (M * D) + i_m * D
    o_head = o_first * M + i_m
    value_ptr += o_value
    points_ptr += o_head * (2 * P)
    weights_ptr += o_head * P
    grad_ptr += o_head * D
    grad_points_ptr += o_head * (2 * P)
    grad_weights_ptr += o_head * P
    if C > 0:
        reference_ptr += o_first * (REF_LEVELS * C)
    if NEED_VALUE:
        grad_value_ptr += o_value
    if NEED_REFERENCE:
        grad_reference_ptr += o_head * (L * C)

    left_queries = Q - i_q * BQ
    o_q = tl.arange(0, BQ)
    m_q = o_q < left_queries
    o_d = tl.arange(0, BD)
    m_out = m_q[:, None] & (o_d < D)[None, :]
    o_out = (o_q * (M * D))[:, None] + o_d[None, :]
    # [BQ, BD]
    b_grad = tl.load(grad_ptr + o_out, mask=m_out, other=0.0).to(tl.float32)

    b_max = tl.zeros([BQ], tl.float32)
    b_scale = tl.zeros([BQ], tl.float32)
    if SOFTMAX:
        b_max, b_sum = softmax_terms(weights_ptr, m_q, M, P, BQ)
        b_scale = 1.0 / tl.where(m_q, b_sum, 1.0)

    next_start = tl.zeros([], tl.int64)
    b_weights, g_weights = (), ()
    b_dot = tl.zeros([BQ], tl.float32)
    for level in tl.static_range(L):
        height, width, start, fits = load_level(shapes_ptr, starts_ptr, level, next_start, S, HAS_STARTS)
        next_start = start + height.to(tl.int64) * width
        b_w, g_w = differentiate_level(
            value_ptr, reference_ptr, points_ptr, weights_ptr,
            grad_value_ptr, grad_reference_ptr, grad_points_ptr,
            b_grad, b_max, b_scale, left_queries, height, width, start, offset_scale,
            level, L, M, D, NUM_POINTS[level], first_point(NUM_POINTS, level), P, C, REF_LEVELS, SOFTMAX, WIDE,
            BQ, NEED_VALUE, NEED_REFERENCE,
        )  # fmt: skip
        b_dot += sum_points(b_w * g_w, padded(NUM_POINTS[level]), BQ)
        b_weights = b_weights + (b_w,)
        g_weights = g_weights + (g_w,)

    for level in tl.static_range(L):
        o_q, o_sample, m_r = sample_rows(left_queries, M, NUM_POINTS[level], first_point(NUM_POINTS, level), P, BQ)
        g_w = g_weights[level]
        if SOFTMAX:
            # With p = softmax(logits): ∂L/∂logit = p·(∂L/∂p − Σ p·∂L/∂p), the sum over all levels.
            g_w = b_weights[level] * (g_w - per_sample(b_dot, padded(NUM_POINTS[level]), BQ))
        tl.store(grad_weights_ptr + o_sample, g_w.to(grad_weights_ptr.dtype.element_ty), mask=m_r)


def msda_backward(operands, gradients, *options) -> None:
    """Adds into the value's gradient and writes the others.

    Args:
        operands: gradient of the output, value, shapes, starts, reference, points, weights; all contiguous.
        gradients: of the value, zeroed by the caller, or None to skip it; of the reference as (B, Q, M, L, C) in
            float32, one row per head and level, or None; of the points; of the weights.
        options: those of `launch`.
    """
    flags = {"NEED_VALUE": gradients[0] is not None, "NEED_REFERENCE": gradients[1] is not None}
    launch(msda_backward_kernel, (*operands, *gradients), *options, **flags)
