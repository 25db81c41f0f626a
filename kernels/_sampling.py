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
def load_points(points_ptr, o_row, m_q, K: tl.constexpr, FIRST: tl.constexpr, P: tl.constexpr, BQ: tl.constexpr):
    """x and y of K points per query in float32, each [BQ, KP]; one contiguous load per query."""
    KP: tl.constexpr = padded(K)
    o_xy = tl.arange(0, 2 * KP)
    m_xy = m_q[:, None] & (o_xy < 2 * K)[None, :]
    # [BQ, 2·KP]
    b_xy = tl.load(points_ptr + (o_row * (2 * P) + 2 * FIRST)[:, None] + o_xy[None, :], mask=m_xy, other=0.0)
    return tl.split(tl.reshape(b_xy.to(tl.float32), (BQ, KP, 2)))


@triton.jit
def load_reference(reference_ptr, o_ref, m_q, C: tl.constexpr, BQ: tl.constexpr):
    """Reference point (x, y) and size (w, h) per query in float32, each [BQ]; zero where C has none."""
    rx, ry = tl.zeros([BQ], tl.float32), tl.zeros([BQ], tl.float32)
    rw, rh = tl.zeros([BQ], tl.float32), tl.zeros([BQ], tl.float32)
    if C >= 2:
        rx = tl.load(reference_ptr + o_ref * C, mask=m_q, other=0.0).to(tl.float32)
        ry = tl.load(reference_ptr + o_ref * C + 1, mask=m_q, other=0.0).to(tl.float32)
    if C == 4:
        rw = tl.load(reference_ptr + o_ref * C + 2, mask=m_q, other=0.0).to(tl.float32)
        rh = tl.load(reference_ptr + o_ref * C + 3, mask=m_q, other=0.0).to(tl.float32)
    return rx, ry, rw, rh


@triton.jit
def to_pixels(p, r, size, extent, scale, C: tl.constexpr):
    """Pixel coordinate [BQ, KP] along one axis of `extent` pixels; 0 is the centre of the first pixel."""
    if C == 0:
        return p * extent - 0.5
    elif C == 2:
        return (r * extent - 0.5)[:, None] + p
    else:
        return (r[:, None] + p * scale * size[:, None]) * extent - 0.5


@triton.jit
def corners(x, y, height, width, m_point):
    """Upper left pixel, fractions, and the masks of the left, right, upper and lower neighbours."""
    # NaN, infinite and far locations fail these comparisons, so that the integer conversion below is defined.
    m_in = m_point & (x > -1.0) & (x < width.to(tl.float32)) & (y > -1.0) & (y < height.to(tl.float32))
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
