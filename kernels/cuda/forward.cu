// Output of a query and head: LANES threads sum its samples, each a 16-byte piece of the rows.

// Blocks per multiprocessor: a thread with up to four samples of its own fits into 48 registers. 0: as the compiler likes.
constexpr int BLOCKS = SLOTS <= 4 ? 10 : 0;

extern "C" __global__ void __launch_bounds__(ROW_THREADS, BLOCKS)
msda_forward(VALUE *output, const VALUE *value, const long long *shapes, const long long *starts,
             const REFERENCE *reference, const POINT *points, const WEIGHT *weights, int S, int Q, float offset_scale) {
    __shared__ PointLevels levels;
    load_levels(shapes, starts, S, &levels);
    Place place = place_of_thread(Q);
    int h = place.h, b = place.b, row = place.row, lane = threadIdx.x % LANES;
    long long q = place.q;
    Samples samples;
    load_samples(reference, points, weights, q, h, lane, levels, offset_scale, &samples);

    value += (long long)b * S * STRIDE + h * D + lane * CHANNELS;
    float sum[CHANNELS] = {};
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) {
#pragma unroll
        for (int j = 0; j < LANES; j++) {
            if (slot * LANES + j >= P) break;
            int corner = __shfl_sync(FULL, samples.corner[slot], j, LANES);
            float fx = __shfl_sync(FULL, samples.fx[slot], j, LANES), fy = __shfl_sync(FULL, samples.fy[slot], j, LANES);
            float weight = __shfl_sync(FULL, samples.weight[slot], j, LANES);
            const VALUE *up = value + (long long)(corner >> 4) * STRIDE;
            const VALUE *down = up + (long long)levels.at[slot * LANES + j].width * STRIDE;
            float lower = weight * fy, upper = weight - lower;
            float w[4] = {upper - upper * fx, upper * fx, lower - lower * fx, lower * fx};
            float rows[4][CHANNELS];
            load_row(up, corner & 1 && w[0] != 0.0f, rows[0]);
            load_row(up + STRIDE, corner & 2 && w[1] != 0.0f, rows[1]);
            load_row(down, corner & 4 && w[2] != 0.0f, rows[2]);
            load_row(down + STRIDE, corner & 8 && w[3] != 0.0f, rows[3]);
#pragma unroll
            for (int c = 0; c < 4; c++)
#pragma unroll
                for (int i = 0; i < CHANNELS; i++) sum[i] += (corner >> c & 1 ? w[c] : 0.0f) * rows[c][i];
        }
    }
    if (row >= Q) return;
    Vector result;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) sum[i] = levels.fits ? sum[i] : NAN;
#pragma unroll
    for (int i = 0; i < 4; i++) result.word[i] = pack(sum + i * PER_WORD, VALUE());
    *(Vector *)(output + (q * M + h) * D + lane * CHANNELS) = result;
}
