// The gradient of the value without atomics, second half: each tile gathers the samples that touch it. Every sum has a
// fixed order.
//
// A tile's gradient [32 pixels, D] is a product: the weights of its samples on its pixels, times the samples' rows of
// grad_output. The tensor cores take it in pieces of 16 pixels, 8 samples and 8 channels.

constexpr int COLUMNS = D / 8;  // of 8 channels: column j of a product holds channels j, j + COLUMNS, ...
constexpr int OWN = 2 * COLUMNS;  // channels of a thread: of pixels (lane / 4, y) the ones from lane % 4 · OWN on
constexpr int GATHER_WARPS = 1 << WARP_BITS;
constexpr bool EXACT = sizeof(VALUE) == 4;           // float32 is multiplied as two tf32 terms each
constexpr int RESIDENT_WARPS = COLUMNS > 8 ? 8 : COLUMNS > 4 || EXACT ? 16 : 24;
struct __align__(COLUMNS * sizeof(VALUE)) Piece { VALUE at[COLUMNS]; };

// The tensor cores read ten bits of mantissa and leave out the rest: a number is less by this factor then, on average.
constexpr float LOST = 1.000345f;

// Rounded to ten bits. A NaN of all ones, which is what a GPU's arithmetic gives, would become zero: `rest_of` keeps it,
// and no record has such a weight.
__device__ __forceinline__ u32 to_tf32(float x) { return __float_as_uint(x) + 0x1000; }
__device__ __forceinline__ u32 rest_of(float x) {
    return __float_as_uint(x - __uint_as_float(to_tf32(x) & 0xffffe000));
}

// The sorted samples of a tile: its own, and those that reach into it from the left, from above and from both.
struct Runs {
    const Record *at[4];
    int length[4], total;

    __device__ __forceinline__ Record operator[](int i) const {
        if (i < length[0]) return at[0][i];
        i -= length[0];
        if (i < length[1]) return at[1][i];
        i -= length[1];
        return i < length[2] ? at[2][i] : at[3][i - length[2]];
    }
};

// `place` are the level's places, `chunks` apart.
__device__ __forceinline__ Runs runs_of(const Record *sorted, const int *place, int chunks, int tile, const Grid &grid) {
    Runs runs = {};
    auto add = [&](int run, int from_tile, int from_kind, int to_tile, int to_kind) {
        int begin = place[(long long)(from_tile * KINDS + from_kind) * chunks];
        runs.at[run] = sorted + begin;
        runs.length[run] = place[(long long)(to_tile * KINDS + to_kind) * chunks] - begin;
    };
    int above = tile - grid.tiles_x;
    add(0, tile, INSIDE, tile + 1, INSIDE);
    if (tile % grid.tiles_x) add(1, tile - 1, RIGHT, tile - 1, DOWN);
    if (above >= 0) add(2, above, BOTH, above + 1, INSIDE);
    if (above >= 0 && tile % grid.tiles_x) add(3, above - 1, BOTH, above - 1, DOWN);
    runs.total = runs.length[0] + runs.length[1] + runs.length[2] + runs.length[3];
    return runs;
}

// Adds up to 32 samples, one of each thread, to the tile whose first pixel is (x, y).
__device__ __forceinline__ void add_samples(Record own, int count, int x, int y, const VALUE *rows, Record *samples,
                                            float (*sum)[COLUMNS][4]) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    own.x -= x, own.y -= y;
    own.weight = lane < count ? EXACT ? own.weight : own.weight * LOST : 0.0f;
    __syncwarp();
    samples[lane] = own;
    __syncwarp();
#pragma unroll
    for (int s = 0; s < 32; s += 8) {
        if (s >= count) break;
        // Of weights and rows, [0] the leading and [1] what float32 has beyond it.
        u32 a[2][TILE_Y / 2][4], b[2][2][COLUMNS];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Record one = samples[s + t + 4 * half];
            Piece piece = *(const Piece *)(rows + (long long)one.row * STRIDE);
            float across = one.weight * __saturatef(1.0f - fabsf(one.x - g));
#pragma unroll
            for (int line = 0; line < TILE_Y; line++) {
                float w = across * __saturatef(1.0f - fabsf(one.y - line));
                a[0][line / 2][line % 2 + 2 * half] = EXACT ? to_tf32(w) : __float_as_uint(w);
                if (EXACT) a[1][line / 2][line % 2 + 2 * half] = rest_of(w);
            }
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                float x = to_float(piece.at[j]);
                // Half-precision rows are tf32 as they are.
                b[0][half][j] = EXACT ? to_tf32(x) : __float_as_uint(x);
                if (EXACT) b[1][half][j] = rest_of(x);
            }
        }
#pragma unroll
        for (int m = 0; m < TILE_Y / 2; m++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                if (EXACT) {
                    multiply(sum[m][j], a[1][m], b[0][0][j], b[0][1][j]);
                    multiply(sum[m][j], a[0][m], b[1][0][j], b[1][1][j]);
                }
                multiply(sum[m][j], a[0][m], b[0][0][j], b[0][1][j]);
            }
    }
}

// A thread's channel j of line `y` of a tile.
__device__ __forceinline__ float channel_of(const float (*sum)[COLUMNS][4], int y, int j) {
    return sum[y / 2][j % COLUMNS][y % 2 * 2 + j / COLUMNS];
}

__device__ __forceinline__ void write_line(VALUE *grad_value, const Grid &grid, int x, int y, const float *line) {
    int lane = threadIdx.x % 32;
    x += lane / 4;
    if (x >= grid.width || y >= grid.height) return;
    struct __align__(OWN * sizeof(VALUE) < 16 ? OWN * sizeof(VALUE) : 16) { u32 word[OWN / PER_WORD]; } out;
#pragma unroll
    for (int j = 0; j < OWN / PER_WORD; j++) out.word[j] = pack(line + j * PER_WORD, VALUE());
    *(decltype(out) *)(grad_value + (long long)(grid.start + y * grid.width + x) * STRIDE + lane % 4 * OWN) = out;
}

// A power of two of warps shares the samples of a tile. Where they fill several blocks, the last block to arrive adds up
// the `partials` of all, in their order. Grid: tiles of all levels, pairs of batch and head.
extern "C" __global__ void __launch_bounds__(32 * GATHER_WARPS, RESIDENT_WARPS / GATHER_WARPS)
msda_gather(const VALUE *grad, const __grid_constant__ Grids grids, int keys, int chunks, const int *places,
            const Record *sorted, float *partials, int *arrived, int all_partials, VALUE *grad_value, int first_pair,
            int S, int Q) {
    __shared__ Record samples[GATHER_WARPS][32];
    __shared__ float sums[GATHER_WARPS][32][D + 4];
    __shared__ bool last;
    int level = L - 1, pair = first_pair + blockIdx.y, b = pair / M, h = pair % M;
#pragma unroll
    for (int l = L - 2; l >= 0; l--) level = blockIdx.x >= grids.at[l].first_block ? l : level;
    Grid grid = grids.at[level];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const VALUE *rows = grad + h * D + g * COLUMNS;
    const int *place = places + ((long long)pair * keys + grid.first_key) * chunks;
    sorted += list_of(places, keys, chunks, first_pair, pair, Q);
    grad_value += (long long)b * S * STRIDE + h * D;
    int block = blockIdx.x - grid.first_block;

    int sharing_bits = min(grid.split_bits, WARP_BITS), block_bits = grid.split_bits - sharing_bits;
    int sharing = 1 << sharing_bits, blocks = 1 << block_bits;
    int tile = (block >> block_bits << WARP_BITS - sharing_bits) + (warp >> sharing_bits), part = warp & sharing - 1;
    int x = tile % grid.tiles_x * TILE_X, y = tile / grid.tiles_x * TILE_Y;
    block &= blocks - 1;
    Runs runs = {};
    if (tile < grid.tiles) runs = runs_of(sorted, place, chunks, tile, grid);
    int steps = (runs.total + 31) / 32, share = steps + (1 << grid.split_bits) - 1 >> grid.split_bits;
    int step = (block * sharing + part) * share, end = min(step + share, steps);
    float sum[TILE_Y / 2][COLUMNS][4] = {};
    // The last step repeats the last sample, with weight zero.
    auto load = [&](int step) { return runs[min(step * 32 + lane, runs.total - 1)]; };
    Record next;
    if (step < end) next = load(step);
    for (; step < end; step++) {
        Record own = next;
        if (step + 1 < end) next = load(step + 1);
        add_samples(own, runs.total - step * 32, x, y, rows, samples[warp], sum);
    }
#pragma unroll
    for (int line = 0; sharing == 1 && line < TILE_Y; line++) {
        float out[OWN];
#pragma unroll
        for (int j = 0; j < OWN; j++) out[j] = channel_of(sum, line, j);
        if (tile < grid.tiles) write_line(grad_value, grid, x, y + line, out);
    }
    if (sharing == 1) return;
#pragma unroll
    for (int line = 0; line < TILE_Y; line++)
#pragma unroll
        for (int j = 0; j < OWN; j++) sums[warp][line * TILE_X + g][t * OWN + j] = channel_of(sum, line, j);
    __syncthreads();
    // The warps of a tile share its lines.
    int slot = blockIdx.y * all_partials + grid.first_partial + tile * blocks, first_warp = warp - part;
    float *partial = partials + (long long)slot * 32 * D + g * D + t * OWN;
    for (int line = part; line < TILE_Y; line += sharing) {
        float out[OWN] = {};
        for (int w = 0; w < sharing; w++)
#pragma unroll
            for (int j = 0; j < OWN; j++) out[j] += sums[first_warp + w][line * TILE_X + g][t * OWN + j];
        if (blocks == 1 && tile < grid.tiles) write_line(grad_value, grid, x, y + line, out);
#pragma unroll
        for (int j = 0; blocks > 1 && j < OWN; j++) partial[(block * 32 + line * TILE_X) * D + j] = out[j];
    }
    if (blocks == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(arrived + slot, 1) == blocks - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int line = warp; line < TILE_Y; line += sharing) {
        float out[OWN] = {};
        for (int other = 0; other < blocks; other++)
#pragma unroll
            for (int j = 0; j < OWN; j++) out[j] += __ldcg(partial + (other * 32 + line * TILE_X) * D + j);
        write_line(grad_value, grid, x, y + line, out);
    }
}
