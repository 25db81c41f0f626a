"""Backward kernel of multi-scale deformable attention: the gradients of one head's samples of BQ queries."""

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
def add_rows(pointers, b_grad, weight, mask):
    """Adds weight · grad_output to the value gradient's rows; the order of additions does not matter, hence relaxed."""
    b_rows = (b_grad[:, None, :] * weight[:, :, None]).to(pointers.dtype.element_ty)
    tl.atomic_add(pointers, b_rows, mask=mask, sem="relaxed")


@triton.jit
def differentiate_level(
    value_ptr, reference_ptr, points_ptr, weights_ptr,
    grad_value_ptr, grad_reference_ptr, grad_points_ptr, grad_weights_ptr,
    b_grad, b_max, b_scale, b_dot, o_query, o_row, m_q, o_d, m_d,
    height, width, start, offset_scale, level: tl.constexpr, L: tl.constexpr,
    K: tl.constexpr, FIRST: tl.constexpr, P: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr,
    REF_LEVELS: tl.constexpr, SOFTMAX: tl.constexpr, WIDE: tl.constexpr, BQ: tl.constexpr,
    NEED_VALUE: tl.constexpr, NEED_REFERENCE: tl.constexpr,
):  # fmt: skip
    """Gradients that flow through one level's K points."""
    KP: tl.constexpr = padded(K)
    o_k = tl.arange(0, KP)
    m_k = m_q[:, None] & (o_k < K)[None, :]
    o_w = (o_row * P + FIRST)[:, None] + o_k[None, :]
    # [BQ, KP]
    b_w = tl.load(weights_ptr + o_w, mask=m_k, other=0.0).to(tl.float32)
    if SOFTMAX:
        b_w = tl.where(m_k, tl.exp(b_w - b_max[:, None]) * b_scale[:, None], 0.0)
    px, py = load_points(points_ptr, o_row, m_q, K, FIRST, P, BQ)
    rx, ry, rw, rh = load_reference(reference_ptr, o_query * REF_LEVELS + level % REF_LEVELS, m_q, C, BQ)
    scale = offset_scale / K
    x = to_pixels(px, rx, rw, width, scale, C)
    y = to_pixels(py, ry, rh, height, scale, C)
    x0, y0, fx, fy, m_l, m_r, m_u, m_b = corners(x, y, height, width, m_k)
    # [BQ, KP, BD]
    o_ul = row_offset(x0, y0, start, width, STRIDE, WIDE)[:, :, None] + o_d[None, None, :]
    o_bl = o_ul + width * STRIDE
    m_d = m_d[None, None, :]
    m_ul, m_ur = (m_l & m_u)[:, :, None] & m_d, (m_r & m_u)[:, :, None] & m_d
    m_bl, m_br = (m_l & m_b)[:, :, None] & m_d, (m_r & m_b)[:, :, None] & m_d
    v_ul = tl.load(value_ptr + o_ul, mask=m_ul, other=0.0).to(tl.float32)
    v_ur = tl.load(value_ptr + o_ul + STRIDE, mask=m_ur, other=0.0).to(tl.float32)
    v_bl = tl.load(value_ptr + o_bl, mask=m_bl, other=0.0).to(tl.float32)
    v_br = tl.load(value_ptr + o_bl + STRIDE, mask=m_br, other=0.0).to(tl.float32)
    g = b_grad[:, None, :]
    # [BQ, KP]
    d_ul, d_ur = tl.sum(v_ul * g, axis=2), tl.sum(v_ur * g, axis=2)
    d_bl, d_br = tl.sum(v_bl * g, axis=2), tl.sum(v_br * g, axis=2)
    upper, lower = d_ul + (d_ur - d_ul) * fx, d_bl + (d_br - d_bl) * fx
    g_w = upper + (lower - upper) * fy
    if SOFTMAX:
        g_w = b_w * (g_w - b_dot[:, None])
    tl.store(grad_weights_ptr + o_w, g_w.to(grad_weights_ptr.dtype.element_ty), mask=m_k)

    if NEED_VALUE:
        left, right = b_w * (1.0 - fx), b_w * fx
        add_rows(grad_value_ptr + o_ul, b_grad, left * (1.0 - fy), m_ul)
        add_rows(grad_value_ptr + o_ul + STRIDE, b_grad, right * (1.0 - fy), m_ur)
        add_rows(grad_value_ptr + o_bl, b_grad, left * fy, m_bl)
        add_rows(grad_value_ptr + o_bl + STRIDE, b_grad, right * fy, m_br)

    g_x = b_w * ((d_ur - d_ul) * (1.0 - fy) + (d_br - d_bl) * fy)
    g_y = b_w * (lower - upper)
    g_px, g_py = g_x, g_y
    if C == 0:
        g_px, g_py = g_x * width, g_y * height
    if C == 4:
        g_px, g_py = g_x * (width * scale * rw)[:, None], g_y * (height * scale * rh)[:, None]
    o_xy = tl.arange(0, 2 * KP)
    g_xy = tl.reshape(tl.join(g_px, g_py), (BQ, 2 * KP)).to(grad_points_ptr.dtype.element_ty)
    p_xy = grad_points_ptr + (o_row * (2 * P) + 2 * FIRST)[:, None] + o_xy[None, :]
    tl.store(p_xy, g_xy, mask=m_q[:, None] & (o_xy < 2 * K)[None, :])
    if NEED_REFERENCE:
        # One row per head and level, summed outside in a fixed order.
        p_ref = grad_reference_ptr + (o_row * L + level) * C
        g_x, g_y = g_x * width, g_y * height
        tl.store(p_ref, tl.sum(g_x, axis=1), mask=m_q)
        tl.store(p_ref + 1, tl.sum(g_y, axis=1), mask=m_q)
        if C == 4:
            tl.store(p_ref + 2, tl.sum(g_x * px, axis=1) * scale, mask=m_q)
            tl.store(p_ref + 3, tl.sum(g_y * py, axis=1) * scale, mask=m_q)


@triton.jit(do_not_specialize=["S", "Q", "offset_scale"])
def msda_backward_kernel(
    grad_ptr,
    value_ptr,
    shapes_ptr,
    starts_ptr,
    reference_ptr,
    points_ptr,
    weights_ptr,
    output_ptr,
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
    o_q = i_q * BQ + tl.arange(0, BQ)
    m_q = o_q < Q
    o_query = i_b * Q + o_q
    o_row = o_query * M + i_m
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_sample = i_b * S * (M * D) + i_m * D
    value_ptr += o_sample
    if NEED_VALUE:
        grad_value_ptr += o_sample
    m_qd = m_q[:, None] & m_d[None, :]
    # [BQ, BD]
    b_grad = tl.load(grad_ptr + (o_row * D)[:, None] + o_d[None, :], mask=m_qd, other=0.0).to(tl.float32)

    b_max = tl.zeros([BQ], tl.float32)
    b_scale = tl.zeros([BQ], tl.float32)
    b_dot = tl.zeros([BQ], tl.float32)
    if SOFTMAX:
        o_p = tl.arange(0, padded(P))
        m_p = m_q[:, None] & (o_p < P)[None, :]
        # [BQ, padded P]
        b_logits = tl.load(weights_ptr + (o_row * P)[:, None] + o_p[None, :], mask=m_p, other=-float("inf"))
        b_logits = b_logits.to(tl.float32)
        b_max = tl.where(m_q, tl.max(b_logits, axis=1), 0.0)
        b_sum = tl.sum(tl.where(m_p, tl.exp(b_logits - b_max[:, None]), 0.0), axis=1)
        b_scale = 1.0 / tl.where(m_q, b_sum, 1.0)
        # Σ p·∂L/∂p = ⟨∂L/∂output, output⟩, the row term of the softmax's gradient.
        b_output = tl.load(output_ptr + (o_row * D)[:, None] + o_d[None, :], mask=m_qd, other=0.0).to(tl.float32)
        b_dot = tl.sum(b_grad * b_output, axis=1)

    next_start = tl.zeros([], tl.int64)
    for level in tl.static_range(L):
        height, width, start, fits = load_level(shapes_ptr, starts_ptr, level, next_start, S, HAS_STARTS)
        next_start = start + height.to(tl.int64) * width
        differentiate_level(
            value_ptr, reference_ptr, points_ptr, weights_ptr,
            grad_value_ptr, grad_reference_ptr, grad_points_ptr, grad_weights_ptr,
            b_grad, b_max, b_scale, b_dot, o_query, o_row, m_q, o_d, m_d,
            height, width, start, offset_scale, level, L, NUM_POINTS[level], first_point(NUM_POINTS, level),
            P, M * D, C, REF_LEVELS, SOFTMAX, WIDE, BQ, NEED_VALUE, NEED_REFERENCE,
        )  # fmt: skip


def msda_backward(
    grad,
    value,
    shapes,
    starts,
    reference,
    points,
    weights,
    output,
    grad_value,
    grad_reference,
    grad_points,
    grad_weights,
    problem: Problem,
) -> None:
    """Adds into `grad_value` (zeroed by the caller; None to skip) and writes the other gradients.

    `grad_reference` is (B, Q, M, L, C) in float32, one row per head and level, or None. `output` is the forward's,
    needed where the weights are logits.
    """
    launch(
        msda_backward_kernel,
        problem,
        (grad, value, shapes, starts, reference, points, weights, output)
        + (grad_value, grad_reference, grad_points, grad_weights),
        backward=True,
        NEED_VALUE=grad_value is not None,
        NEED_REFERENCE=grad_reference is not None,
    )
