// Where a point lies and which four pixels it reads: what all kernels here share.
//
// Compile-time constants: VALUE, POINT, WEIGHT, REFERENCE (element types), D channels, M heads, L levels, P points of all
// levels, NUM_POINTS per level, C coordinates of a reference (0: points are locations), REF_LEVELS, SOFTMAX.

struct float16 { u16 bits; };
struct bfloat16 { u16 bits; };
struct __align__(16) Vector { u32 word[4]; };

__device__ constexpr int num_points[L] = NUM_POINTS;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bfloat16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_float(float16 x) { return from_float16(x.bits); }
__device__ __forceinline__ void store(float *to, float x) { *to = x; }
__device__ __forceinline__ void store(bfloat16 *to, float x) { to->bits = to_bfloat16s(x, 0.0f) & 0xffff; }
__device__ __forceinline__ void store(float16 *to, float x) { to->bits = to_float16s(x, 0.0f) & 0xffff; }

// Elements of a 4-byte word of a row, as floats; the last argument tells their type.
__device__ __forceinline__ void unpack(u32 word, float *to, float) { to[0] = __uint_as_float(word); }
__device__ __forceinline__ void unpack(u32 word, float *to, bfloat16) {
    to[0] = __uint_as_float(word << 16);
    to[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void unpack(u32 word, float *to, float16) {
    to[0] = from_float16(word & 0xffff);
    to[1] = from_float16(word >> 16);
}
__device__ __forceinline__ u32 pack(const float *from, float) { return __float_as_uint(from[0]); }
__device__ __forceinline__ u32 pack(const float *from, bfloat16) { return to_bfloat16s(from[0], from[1]); }
__device__ __forceinline__ u32 pack(const float *from, float16) { return to_float16s(from[0], from[1]); }

constexpr int PER_WORD = 4 / sizeof(VALUE);
constexpr int CHANNELS = 16 / sizeof(VALUE);  // of one thread: a 16-byte piece of a row
constexpr int LANES = D / CHANNELS;           // threads of a row
constexpr int STRIDE = M * D;                 // elements between two pixels

struct Level { int height, width, start; };

// One axis in pixels; 0 is the centre of the first one. Written with fused operations, so that every kernel rounds alike
// and finds the same pixel.
__device__ __forceinline__ float to_pixels(float point, float reference, float size, float extent, float scale) {
    if (C == 0) return fmaf(point, extent, -0.5f);
    if (C == 2) return fmaf(reference, extent, -0.5f) + point;
    return fmaf(fmaf(point * scale, size, reference), extent, -0.5f);
}

// A sample: its upper left pixel, or -2 in x if it reads nothing, and the fractions.
struct Location { int x, y; float fx, fy; };

__device__ __forceinline__ Location locate(float x, float y, int height, int width) {
    // Not-a-number, infinite and far locations fail these comparisons.
    bool inside = x > -1.0f && x < (float)width && y > -1.0f && y < (float)height;
    float x0 = floorf(inside ? x : -2.0f), y0 = floorf(inside ? y : -2.0f);
    return {(int)x0, (int)y0, x - x0, y - y0};
}

// Two neighbours in memory, read at once.
template <class T> struct __align__(2 * sizeof(T)) Pair { T x, y; };

template <class T> __device__ __forceinline__ void load_pair(const T *from, float *to) {
    Pair<T> pair = *(const Pair<T> *)from;
    to[0] = to_float(pair.x), to[1] = to_float(pair.y);
}

// A point of query `q` (an index over batch and queries) in pixels, with the size of its reference; `k_points` is the
// number of points of its level.
__device__ __forceinline__ void place_point(const float *point, const REFERENCE *reference, long long q, int level,
                                            int k_points, int height, int width, float offset_scale, float *size,
                                            float *pixel) {
    float center[2] = {}, scale = offset_scale / k_points;
    size[0] = size[1] = 0.0f;
    reference += (q * REF_LEVELS + level % REF_LEVELS) * C;
    if (C) load_pair(reference, center);
    if (C == 4) load_pair(reference + 2, size);
    pixel[0] = to_pixels(point[0], center[0], size[0], width, scale);
    pixel[1] = to_pixels(point[1], center[1], size[1], height, scale);
}

// Level of each point, for threads whose points lie on different levels. Level sizes come from device memory and are
// bounded before they are multiplied; `fits` tells whether all levels lie inside the value's S rows.
struct PointLevels {
    Level at[P];
    int first[P];  // level and its number of points
    bool fits;
};

__device__ __forceinline__ void load_levels(const long long *shapes, const long long *starts, int S, PointLevels *levels) {
    for (int point = threadIdx.x; point < P; point += ROW_THREADS) {
        long long start = 0;
        bool all_fit = true;
        for (int l = 0, p = 0; l < L; p += num_points[l], l++) {
            long long height = shapes[2 * l], width = shapes[2 * l + 1];
            if (starts) start = starts[l];
            bool fits = height >= 0 && width >= 0 && height <= S && width <= S && start >= 0 && start <= S;
            fits = fits && start + height * width <= S;
            if (point >= p && point < p + num_points[l]) {
                levels->at[point] = {fits ? (int)height : 0, fits ? (int)width : 0, (int)start};
                levels->first[point] = l;
            }
            start += height * width;
            all_fit = all_fit && fits;
        }
        if (point == 0) levels->fits = all_fit && (starts || start == S);
    }
    __syncthreads();
}

// With float32 values every digit counts.
__device__ __forceinline__ float exponential(float x) { return sizeof(VALUE) == 4 ? expf(x) : __expf(x); }

// What a thread of the kernels of rows works on: head h and query `row` of batch b, `q` over the batch.
struct Place { int b, row, h; long long q; };

__device__ __forceinline__ Place place_of_thread(int Q) {
    constexpr int QUERIES = ROW_THREADS / LANES;
    int blocks = (Q + QUERIES - 1) / QUERIES, h = blockIdx.x % M, b = blockIdx.x / M / blocks;
    int row = blockIdx.x / M % blocks * QUERIES + threadIdx.x / LANES;
    // Threads behind the last query work on it too, so that a warp stays whole.
    return {b, row, h, (long long)b * Q + min(row, Q - 1)};
}

// The samples of one query and head, spread over its LANES threads: point `slot * LANES + lane` is a thread's own.
constexpr int SLOTS = (P + LANES - 1) / LANES;
constexpr u32 FULL = 0xffffffff;

struct Samples {
    int corner[SLOTS];  // row of the upper left pixel · 16 + bits of the corners that exist: ul, ur, bl, br
    float fx[SLOTS], fy[SLOTS], weight[SLOTS];
};

__device__ __forceinline__ float max_over_row(float x) {
    for (int step = LANES / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, step));
    return x;
}
__device__ __forceinline__ float sum_over_row(float x) {
    for (int step = LANES / 2; step; step /= 2) x += __shfl_xor_sync(FULL, x, step);
    return x;
}

__device__ __forceinline__ void load_samples(const REFERENCE *reference, const POINT *points, const WEIGHT *weights,
                                             long long q, int h, int lane, const PointLevels &levels,
                                             float offset_scale, Samples *samples) {
    float largest = -INFINITY, total = 0.0f;
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) {
        int p = slot * LANES + lane;
        samples->corner[slot] = 0;
        samples->fx[slot] = samples->fy[slot] = 0.0f;
        samples->weight[slot] = SOFTMAX ? -INFINITY : 0.0f;
        if (P % LANES && p >= P) continue;
        samples->weight[slot] = to_float(weights[(q * M + h) * P + p]);
        Level level = levels.at[p];
        float point[2], size[2], pixel[2];
        int l = levels.first[p];
        load_pair(points + ((q * M + h) * P + p) * 2, point);
        place_point(point, reference, q, l, num_points[l], level.height, level.width, offset_scale, size, pixel);
        Location at = locate(pixel[0], pixel[1], level.height, level.width);
        int left = at.x >= 0, right = at.x + 1 < level.width, up = at.y >= 0, down = at.y + 1 < level.height;
        int exists = at.x < -1 ? 0 : (left & up) | (right & up) << 1 | (left & down) << 2 | (right & down) << 3;
        samples->corner[slot] = (level.start + at.y * level.width + at.x) << 4 | exists;
        samples->fx[slot] = exists ? at.fx : 0.0f;
        samples->fy[slot] = exists ? at.fy : 0.0f;
        if (SOFTMAX) largest = fmaxf(largest, samples->weight[slot]);
    }
    if (SOFTMAX) {
        largest = max_over_row(largest);
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) {
            samples->weight[slot] = exponential(samples->weight[slot] - largest);
            total += samples->weight[slot];
        }
        float scale = 1.0f / sum_over_row(total);
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) samples->weight[slot] *= scale;
    }
}

// A thread's piece of a row, zero where `exists` is false.
__device__ __forceinline__ void load_row(const VALUE *row, bool exists, float *to) {
    Vector piece = {0, 0, 0, 0};
    if (exists) piece = *(const Vector *)row;
#pragma unroll
    for (int i = 0; i < 4; i++) unpack(piece.word[i], to + i * PER_WORD, VALUE());
}
