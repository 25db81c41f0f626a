// The gradient of the value without atomics, first half: the samples of each head and level are sorted by the tile of
// pixels that they touch, so that a tile can gather its own.
//
// A tile is TILE_X by TILE_Y pixels. A sample belongs to the tile of its upper left pixel and, within it, to one of four
// kinds by whether its right or lower neighbours lie in the next tile. So a tile's samples are four runs of the sorted
// list: its own, and those of the left, upper and upper left tile that reach into it. A key is tile · KINDS + kind.
//
// Count and sort find the same key for a sample because `to_pixels` leaves the compiler no choice of rounding.

constexpr int WARPS = THREADS / 32;
constexpr int INSIDE = 0, RIGHT = 1, BOTH = 2, DOWN = 3;

// A level's pixels and tiles, its first key, and for the gather: its first block, the logarithm of how many warps share a
// tile, and where the sums of blocks that share one begin.
struct Grid { int height, width, start, tiles_x, tiles, first_key, first_block, split_bits, first_partial; };
struct Grids { Grid at[L]; };

// What the gather needs of a sample; `row` counts queries over the batch.
struct __align__(16) Record { float x, y, weight; int row; };

__device__ constexpr bool same_points() {
    for (int l = 1; l < L; l++)
        if (num_points[l] != num_points[0]) return false;
    return true;
}
constexpr bool SAME_POINTS = same_points();  // on all levels: then divisions by their number are by a constant

__device__ __forceinline__ int first_point(int level) {
    if (SAME_POINTS) return level * num_points[0];
    int p = 0;
#pragma unroll
    for (int l = 0; l < L; l++) p += l < level ? num_points[l] : 0;
    return p;
}

__device__ __forceinline__ int count_points(int level) {
    int k = num_points[0];
#pragma unroll
    for (int l = 1; l < L && !SAME_POINTS; l++) k = l == level ? num_points[l] : k;
    return k;
}

// Key of a sample, or -1 if it reads nothing.
__device__ __forceinline__ int key_at(const float *pixel, const Grid &grid) {
    Location at = locate(pixel[0], pixel[1], grid.height, grid.width);
    if (at.x < -1 || grid.tiles == 0) return -1;
    int left = max(at.x, 0), up = max(at.y, 0);
    bool right = at.x >= 0 && left % TILE_X == TILE_X - 1 && left + 1 < grid.width;
    bool down = at.y >= 0 && up % TILE_Y == TILE_Y - 1 && up + 1 < grid.height;
    int kind = right ? (down ? BOTH : RIGHT) : (down ? DOWN : INSIDE);
    return (up / TILE_Y * grid.tiles_x + left / TILE_X) * KINDS + kind;
}

// x[i] becomes `first` plus the sum of all before it.
__device__ __forceinline__ void sum_before(int *x, int count, int first) {
    __shared__ int sums[WARPS];
    int each = (count + blockDim.x - 1) / blockDim.x, begin = min(threadIdx.x * each, count), end = min(begin + each, count);
    int own = 0, lane = threadIdx.x % 32;
    for (int i = begin; i < end; i++) own += x[i];
    int before = own;
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(FULL, before, step);
        before += lane >= step ? other : 0;
    }
    if (lane == 31) sums[threadIdx.x / 32] = before;
    __syncthreads();
    int place = first + before - own;
    for (int w = 0; w < threadIdx.x / 32; w++) place += sums[w];
    for (int i = begin; i < end; i++) {
        int next = place + x[i];
        x[i] = place;
        place = next;
    }
    __syncthreads();
}

// How many samples of each key a block's queries have, and for each sample how many of them come before it, in the order
// of queries and points. Grid: chunks of queries, levels, batch · heads. A level has one key more than it needs, whose
// place will be the end of its last. A lone chunk writes the keys' places in the list of its pair at once.
extern "C" __global__ void __launch_bounds__(THREADS)
msda_count(const REFERENCE *reference, const POINT *points, const __grid_constant__ Grids grids, int keys, int *counts,
           u16 *ranks, int chunk, int Q, float offset_scale) {
    extern __shared__ int shared[];
    int chunks = gridDim.x, level = blockIdx.y, pair = blockIdx.z, b = pair / M, h = pair % M;
    Grid grid = grids.at[level];
    int own_keys = grid.tiles * KINDS + 1, K = count_points(level), padded = (own_keys + 7) / 8 * 8;
    int threads = blockDim.x, warps = threads / 32;  // fewer where a level has many keys
    int *count = shared;                    // [own_keys]
    u16 *before = (u16 *)(count + padded);  // [warps][own_keys]: of the warps before
    u16 *key_of = before + warps * padded;  // [chunk · K]
    u16 *rank = key_of + chunk * K;         // [chunk · K]: of the same warp before
    for (int i = threadIdx.x; i < padded * warps / 8; i += threads) ((Vector *)before)[i] = {0, 0, 0, 0};
    __syncthreads();

    // Every warp has a run of samples of its own, in whose order it works.
    int first = blockIdx.x * chunk, samples = min(chunk, Q - first) * K;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int share = (samples + warps - 1) / warps, begin = warp * share, end = min(begin + share, samples);
    u16 *own = before + warp * padded;
    for (int i = begin + lane; i - lane < end; i += 32) {
        int key = -1;
        if (i < end) {
            long long row = b * Q + first + i / K;
            float point[2], size[2], pixel[2];
            load_pair(points + ((row * M + h) * P + first_point(level) + i % K) * 2, point);
            place_point(point, reference, row, level, K, grid.height, grid.width, offset_scale, size, pixel);
            key = key_at(pixel, grid);
        }
        u32 peers = __match_any_sync(FULL, key);
        int earlier = __popc(peers & ((1u << lane) - 1)), count = key >= 0 ? own[key] : 0;
        __syncwarp();
        if (i < end) key_of[i] = max(key, 0), rank[i] = count + earlier;
        if (key >= 0 && earlier == 0) own[key] = count + __popc(peers);
        __syncwarp();
    }
    __syncthreads();
    // Two keys at a time: no sum reaches 2^16.
    for (int i = threadIdx.x; i < padded / 2; i += threads) {
        u32 sum = 0, *pair_of = (u32 *)before + i;
        for (int w = 0; w < warps; w++, pair_of += padded / 2) {
            u32 counts = *pair_of;
            *pair_of = sum;
            sum += counts;
        }
        count[2 * i] = sum & 0xffff, count[2 * i + 1] = sum >> 16;
    }
    __syncthreads();
    ranks += (long long)(pair * P + first_point(level)) * Q + first;
    for (int i = begin + lane; i < end; i += 32) ranks[i % K * Q + i / K] = own[key_of[i]] + rank[i];
    if (chunks == 1) sum_before(count, own_keys, first_point(level) * Q);
    int *to = counts + ((long long)pair * keys + grid.first_key) * chunks + blockIdx.x + (chunks > 1);
    for (int i = threadIdx.x; i < own_keys; i += threads) to[(long long)i * chunks] = count[i];
    if (chunks > 1 && threadIdx.x + blockIdx.x + level + pair == 0) counts[0] = 0;
}

// Where a pair's list begins among the records: places of a lone chunk count within a pair.
__device__ __forceinline__ int list_of(const int *places, int keys, int chunks, int first_pair, int pair, int Q) {
    return chunks > 1 ? -places[(long long)first_pair * keys * chunks] : (pair - first_pair) * P * Q;
}

// Writes the samples of `gridDim.y` pairs of batch and head, from `first_pair` on, at their places. Rows are read as
// they lie in memory; a warp then takes one point of 32 queries, whose places are often neighbours.
extern "C" __global__ void __launch_bounds__(THREADS)
msda_sort(const REFERENCE *reference, const POINT *points, const WEIGHT *weights, const __grid_constant__ Grids grids,
          int keys, int chunks, int chunk_bits, const int *places, const u16 *ranks, Record *sorted, int *arrived,
          int all_partials, int first_pair, int Q, float offset_scale) {
    __shared__ Pair<POINT> point_of[SORT_QUERIES][P + 1];
    __shared__ float weight_of[SORT_QUERIES][P + 1], largest_of[SORT_QUERIES], scale_of[SORT_QUERIES];
    int pair = first_pair + blockIdx.y, b = pair / M, h = pair % M;
    int first = blockIdx.x * SORT_QUERIES, queries = min(SORT_QUERIES, Q - first);
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < all_partials; i += gridDim.x * THREADS)
        arrived[blockIdx.y * all_partials + i] = 0;
    for (int i = threadIdx.x; i < queries * P; i += THREADS) {
        long long at = (((long long)b * Q + first + i / P) * M + h) * P + i % P;
        weight_of[i / P][i % P] = to_float(weights[at]);
        point_of[i / P][i % P] = ((const Pair<POINT> *)points)[at];
    }
    __syncthreads();
    for (int q = threadIdx.x; SOFTMAX && q < queries; q += THREADS) {
        float largest = -INFINITY, total = 0.0f;
        for (int p = 0; p < P; p++) largest = fmaxf(largest, weight_of[q][p]);
        for (int p = 0; p < P; p++) total += exponential(weight_of[q][p] - largest);
        largest_of[q] = largest, scale_of[q] = 1.0f / total;
    }
    __syncthreads();

    const int *place = places + (long long)pair * keys * chunks;
    sorted += list_of(places, keys, chunks, first_pair, pair, Q);
    for (int i = threadIdx.x; i < SORT_QUERIES * P; i += THREADS) {
        int q = i % SORT_QUERIES, p = i / SORT_QUERIES, row = b * Q + first + q, level = 0;
        if (q >= queries) continue;
#pragma unroll
        for (int l = 1; l < L; l++) level = p >= first_point(l) ? l : level;
        const Grid &grid = grids.at[level];
        float point[2] = {to_float(point_of[q][p].x), to_float(point_of[q][p].y)}, size[2], pixel[2];
        place_point(point, reference, row, level, count_points(level), grid.height, grid.width, offset_scale, size, pixel);
        int key = key_at(pixel, grid);
        if (key < 0) continue;
        float weight = weight_of[q][p];
        if (SOFTMAX) weight = exponential(weight - largest_of[q]) * scale_of[q];
        int to = place[(long long)(grid.first_key + key) * chunks + ((first + q) >> chunk_bits)] +
                 ranks[(long long)(pair * P + p) * Q + first + q];
        // Infinity is as much an error to see as NaN, and the gather's rounding cannot lose it.
        sorted[to] = {pixel[0], pixel[1], weight == weight ? weight : INFINITY, row};
    }
}
