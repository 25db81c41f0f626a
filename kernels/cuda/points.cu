// Gradients of a query and head's points, weights and reference: ⟨row, grad_output⟩ for each corner of its samples.

// Sums of the LANES threads' `x`, x[j] for sample j, of which thread j receives its own.
__device__ __forceinline__ float sum_transposed(float *x, int lane) {
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) {
        bool upper = lane & step;
#pragma unroll
        for (int j = 0; j < step; j++) {
            float kept = upper ? x[j + step] : x[j], sent = upper ? x[j] : x[j + step];
            x[j] = kept + __shfl_xor_sync(FULL, sent, step);
        }
    }
    return x[0];
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
msda_backward_points(const VALUE *grad, const VALUE *value, const long long *shapes, const long long *starts,
                     const REFERENCE *reference, const POINT *points, const WEIGHT *weights, float *grad_reference,
                     POINT *grad_points, WEIGHT *grad_weights, int S, int Q, float offset_scale) {
    __shared__ PointLevels levels;
    load_levels(shapes, starts, S, &levels);
    Place place = place_of_thread(Q);
    int h = place.h, b = place.b, row = place.row, lane = threadIdx.x % LANES;
    long long q = place.q;
    Samples samples;
    load_samples(reference, points, weights, q, h, lane, levels, offset_scale, &samples);

    float g[CHANNELS];
    load_row(grad + (q * M + h) * D + lane * CHANNELS, true, g);
    value += (long long)b * S * STRIDE + h * D + lane * CHANNELS;
    float grad_w[SLOTS], grad_x[SLOTS], grad_y[SLOTS], row_term = 0.0f;
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) {
        float to_w[LANES] = {}, to_x[LANES] = {}, to_y[LANES] = {};
#pragma unroll
        for (int j = 0; j < LANES; j++) {
            if (slot * LANES + j >= P) break;
            int corner = __shfl_sync(FULL, samples.corner[slot], j, LANES);
            float fx = __shfl_sync(FULL, samples.fx[slot], j, LANES), fy = __shfl_sync(FULL, samples.fy[slot], j, LANES);
            const VALUE *up = value + (long long)(corner >> 4) * STRIDE;
            const VALUE *down = up + (long long)levels.at[slot * LANES + j].width * STRIDE;
            float rows[4][CHANNELS], dot[4] = {};
            load_row(up, corner & 1, rows[0]);
            load_row(up + STRIDE, corner & 2, rows[1]);
            load_row(down, corner & 4, rows[2]);
            load_row(down + STRIDE, corner & 8, rows[3]);
#pragma unroll
            for (int c = 0; c < 4; c++)
#pragma unroll
                for (int i = 0; i < CHANNELS; i++) dot[c] += rows[c][i] * g[i];
            float upper = dot[0] + (dot[1] - dot[0]) * fx, lower = dot[2] + (dot[3] - dot[2]) * fx;
            to_w[j] = upper + (lower - upper) * fy;
            to_x[j] = (dot[1] - dot[0]) + ((dot[3] - dot[2]) - (dot[1] - dot[0])) * fy;
            to_y[j] = lower - upper;
        }
        grad_w[slot] = sum_transposed(to_w, lane);
        grad_x[slot] = sum_transposed(to_x, lane) * samples.weight[slot];
        grad_y[slot] = sum_transposed(to_y, lane) * samples.weight[slot];
        row_term += grad_w[slot] * samples.weight[slot];
    }
    if (SOFTMAX) row_term = sum_over_row(row_term);

    // Of each level's reference: x, y, width, height.
    float to_reference[L][4] = {};
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) {
        int p = slot * LANES + lane;
        if (P % LANES && p >= P) continue;
        // With w = softmax(logits): ∂L/∂logit = w · (∂L/∂w − Σ w · ∂L/∂w).
        float to_weight = SOFTMAX ? samples.weight[slot] * (grad_w[slot] - row_term) : grad_w[slot];
        float x = grad_x[slot], y = grad_y[slot];
        Level level = levels.at[p];
        int l = levels.first[p];
        float scale = offset_scale / num_points[l];
        float by_x = C == 2 ? 1.0f : level.width, by_y = C == 2 ? 1.0f : level.height;
        if (C == 4 || grad_reference) {
            float point[2], size[2], pixel[2];
            load_pair(points + ((q * M + h) * P + p) * 2, point);
            place_point(point, reference, q, l, num_points[l], level.height, level.width, offset_scale, size, pixel);
            if (C == 4) by_x *= scale * size[0], by_y *= scale * size[1];
            if (C && grad_reference) {
                // A point that samples nothing has no gradient, also where it is not finite.
                float gx = x * level.width, gy = y * level.height;
                float of[4] = {gx, gy, gx == 0.0f ? 0.0f : gx * point[0] * scale, gy == 0.0f ? 0.0f : gy * point[1] * scale};
#pragma unroll
                for (int i = 0; i < L; i++)
#pragma unroll
                    for (int c = 0; c < C; c++) to_reference[i][c] += i == l ? of[c] : 0.0f;
            }
        }
        if (row < Q) {
            long long at = (q * M + h) * P + p;
            store(grad_weights + at, to_weight);
            store(grad_points + 2 * at, x == 0.0f ? 0.0f : x * by_x);
            store(grad_points + 2 * at + 1, y == 0.0f ? 0.0f : y * by_y);
        }
    }
    if (C && grad_reference) {
#pragma unroll
        for (int l = 0; l < L; l++)
#pragma unroll
            for (int c = 0; c < C; c++) {
                float sum = sum_over_row(to_reference[l][c]);
                if (lane == 0 && row < Q) grad_reference[((q * M + h) * L + l) * C + c] = sum;
            }
    }
}
