"""Device functions that the forward and backward kernels share: where a point lies and which four pixels it reads."""

import triton
import triton.language as tl


@triton.constexpr_function
def padded(count):
    """The tile size that holds `count` elements: tiles are powers of two."""
    return 1 << (count - 1).bit_length()


@triton.constexpr_function
def first_point(num_points, level):
    """Where a level begins in the axis of all points."""
    return sum(num_points[:level])


@triton.jit
def load_level(shapes_ptr, starts_ptr, level, next_start, S, HAS_STARTS: tl.constexpr):
    """Height, width and first row of a level, and whether its rows lie inside the value's S rows."""
    height = tl.load(shapes_ptr + 2 * level).to(tl.int64)
    width = tl.load(shapes_ptr + 2 * level + 1).to(tl.int64)
    start = next_start
    if HAS_STARTS:
        start = tl.load(starts_ptr + level).to(tl.int64)
    # Each factor is bounded first, so that the product cannot wrap around.
    fits = (height >= 0) & (width >= 0) & (height <= S) & (width <= S) & (start >= 0) & (start <= S)
    fits = fits & (start + height * width <= S)
    return tl.where(fits, height, 0).to(tl.int32), tl.where(fits, width, 0).to(tl.int32), start, fits


@triton.jit
def per_sample(b_query, KP: tl.constexpr, BQ: tl.constexpr):
    """Repeats a value per query [BQ] for each of its samples: [KP·BQ], where row k·BQ + q is point k of query q."""
    return tl.reshape(tl.broadcast_to(b_query[None, :], (KP, BQ)), (KP * BQ,))


@triton.jit
def sample_rows(left_queries, M: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr, P: tl.constexpr, BQ: tl.constexpr):
    """Query, offset in the weights, and mask of one level's samples, each [KP·BQ].

    The points of a query lie BQ rows apart, so that a sum over them stays inside a thread.
    """
    KP: tl.constexpr = padded(K)
    o_r = tl.arange(0, KP * BQ)
    o_q, o_k = o_r % BQ, o_r // BQ
    m_r = o_q < left_queries
    if KP > K:
        m_r = m_r & (o_k < K)
    return o_q, o_q * (M * P) + FIRST + o_k, m_r


@triton.jit
def load_axis(reference_ptr, points_ptr, o_ref, o_sample, m_r, axis: tl.constexpr, C: tl.constexpr):
    """Point, reference and size along one axis (0 is x) in float32; zero where C has none."""
    p = tl.load(points_ptr + o_sample * 2 + axis, mask=m_r, other=0.0).to(tl.float32)
    r, size = tl.zeros_like(p), tl.zeros_like(p)
    if C >= 2:
        r = tl.load(reference_ptr + o_ref * C + axis, mask=m_r, other=0.0).to(tl.float32)
    if C == 4:
        size = tl.load(reference_ptr + o_ref * C + 2 + axis, mask=m_r, other=0.0).to(tl.float32)
    return p, r, size


@triton.jit
def to_pixels(p, r, size, extent, scale, C: tl.constexpr):
    """Pixel coordinate along one axis of `extent` pixels; 0 is the centre of the first pixel."""
    if C == 0:
        return p * extent - 0.5
    elif C == 2:
        return r * extent - 0.5 + p
    else:
        return (r + p * scale * size) * extent - 0.5


@triton.jit
def corners(x, y, height, width, m_r):
    """Upper left pixel, fractions, and the masks of the left, right, upper and lower neighbours."""
    # NaN, infinite and far locations fail these comparisons, so that the integer conversion below is defined.
    m_in = m_r & (x > -1.0) & (x < width.to(tl.float32)) & (y > -1.0) & (y < height.to(tl.float32))
    x, y = tl.where(m_in, x, 0.0), tl.where(m_in, y, 0.0)
    x0, y0 = tl.floor(x), tl.floor(y)
    fx, fy = x - x0, y - y0
    x0, y0 = x0.to(tl.int32), y0.to(tl.int32)
    return x0, y0, fx, fy, m_in & (x0 >= 0), m_in & (x0 + 1 < width), y0 >= 0, y0 + 1 < height


@triton.jit
def row_offset(x, y, start, width, STRIDE: tl.constexpr, WIDE: tl.constexpr):
    """Offset of pixel (x, y) in a sample's values: 32 bits where the whole sample fits, for fewer registers."""
    row = start.to(tl.int32) + y * width + x
    if WIDE:
        return row.to(tl.int64) * STRIDE
    else:
        return row * STRIDE


@triton.jit
def line_offset(width, STRIDE: tl.constexpr, WIDE: tl.constexpr):
    """Offset from a pixel to the one below it."""
    if WIDE:
        return width.to(tl.int64) * STRIDE
    else:
        return width * STRIDE


@triton.jit
def corner_weights(b_w, fx, fy, m_left, m_right, m_up, m_down):
    """Weights of the upper left, upper right, lower left and lower right pixel; zero outside, also for a NaN in b_w."""
    left, right = tl.where(m_left, b_w * (1.0 - fx), 0.0), tl.where(m_right, b_w * fx, 0.0)
    w_ul, w_ur = tl.where(m_up, left * (1.0 - fy), 0.0), tl.where(m_up, right * (1.0 - fy), 0.0)
    w_bl, w_br = tl.where(m_down, left * fy, 0.0), tl.where(m_down, right * fy, 0.0)
    return w_ul, w_ur, w_bl, w_br


@triton.jit
def softmax_terms(weights_ptr, m_q, M: tl.constexpr, P: tl.constexpr, BQ: tl.constexpr):
    """Largest logit and sum of exp(logit − largest) per query, each [BQ]."""
    o_p = tl.arange(0, padded(P))
    m_p = m_q[:, None] & (o_p < P)[None, :]
    # [BQ, padded P]
    p_logits = weights_ptr + (tl.arange(0, BQ) * (M * P))[:, None] + o_p[None, :]
    b_logits = tl.load(p_logits, mask=m_p, other=-float("inf")).to(tl.float32)
    b_max = tl.where(m_q, tl.max(b_logits, axis=1), 0.0)
    return b_max, tl.sum(tl.exp(b_logits - b_max[:, None]), axis=1)


@triton.jit
def load_samples(
    reference_ptr, points_ptr, weights_ptr, b_max, left_queries, height, width, offset_scale, level: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    REF_LEVELS: tl.constexpr, SOFTMAX: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """One level's samples, each result [KP·BQ].

    Returns:
        Offset in the weights and mask; weight, under softmax exp(logit − largest); point and size of its reference
        by axis; then what `corners` returns.
    """
    o_q, o_sample, m_r = sample_rows(left_queries, M, K, FIRST, P, BQ)
    ABSENT: tl.constexpr = float("-inf") if SOFTMAX else 0.0
    b_w = tl.load(weights_ptr + o_sample, mask=m_r, other=ABSENT).to(tl.float32)
    if SOFTMAX:
        b_w = tl.exp(b_w - per_sample(b_max, padded(K), BQ))
    o_ref = o_q * REF_LEVELS + level % REF_LEVELS
    px, rx, rw = load_axis(reference_ptr, points_ptr, o_ref, o_sample, m_r, 0, C)
    py, ry, rh = load_axis(reference_ptr, points_ptr, o_ref, o_sample, m_r, 1, C)
    x = to_pixels(px, rx, rw, width, offset_scale / K, C)
    y = to_pixels(py, ry, rh, height, offset_scale / K, C)
    x0, y0, fx, fy, m_left, m_right, m_up, m_down = corners(x, y, height, width, m_r)
    return o_sample, m_r, b_w, px, py, rw, rh, x0, y0, fx, fy, m_left, m_right, m_up, m_down
