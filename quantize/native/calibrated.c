/* Int4 rounding that looks at the inputs: the loops of quantize/algorithms/block_feedback.py and scale_search.py.

   Those modules are the definition; every float operation here is the same one in the same order. Matrices are [in, out]
   with contiguous rows, `*_stride` floats apart; lanes are neighbouring outputs. Every function returns OK or
   OUT_OF_MEMORY. */

#include "native.h"

enum { WIDE = 32 }; /* outputs at a time: a block of 128 columns is then 16 kB */

typedef struct {
    const float *scales, *zeros; /* [num_groups, out] */
    size_t scales_stride, zeros_stride;
    const int32_t *groups; /* [n]: the row of both that each column of the block has */
} grid_t;

INLINE void load(const float *source, size_t stride, size_t rows, size_t width, float *lanes) {
    for (size_t k = 0; k < rows; k++) memcpy(lanes + k * WIDE, source + k * stride, 4 * width);
}

/* From the last row to the first: round, and add the error to the target of the rows before. */
EXPORT int64_t round_block(size_t rows, size_t outputs, const float *target, size_t target_stride, const float *weights,
                           size_t weights_stride, const float *feedback, size_t feedback_stride, const float *scales,
                           size_t scales_stride, const float *zeros, size_t zeros_stride, const int32_t *groups,
                           uint8_t *values, size_t values_stride, float *errors, size_t errors_stride) {
    float *wanted = calloc(rows * WIDE + 1, 4), scale[WIDE], zero[WIDE], weight[WIDE], error[WIDE];
    if (!wanted) return OUT_OF_MEMORY;
    for (int lane = 0; lane < WIDE; lane++) scale[lane] = 1, zero[lane] = 8, weight[lane] = 0;
    for (size_t first = 0; first < outputs; first += WIDE) {
        size_t width = outputs - first < WIDE ? outputs - first : WIDE;
        load(target + first, target_stride, rows, width, wanted);
        for (size_t k = rows; k-- > 0;) {
            float *own = wanted + k * WIDE;
            const float *factors = feedback + k * feedback_stride;
            memcpy(scale, scales + groups[k] * scales_stride + first, 4 * width);
            memcpy(zero, zeros + groups[k] * zeros_stride + first, 4 * width);
            memcpy(weight, weights + k * weights_stride + first, 4 * width);
            for (int lane = 0; lane < WIDE; lane++) {
                own[lane] = clamp(rintf(own[lane] / scale[lane]) + zero[lane], 0, 15);
                error[lane] = weight[lane] - (own[lane] - zero[lane]) * scale[lane];
            }
            for (size_t j = 0; j < k; j++)
                for (int lane = 0; lane < WIDE; lane++) wanted[j * WIDE + lane] += factors[j] * error[lane];
            for (size_t lane = 0; lane < width; lane++)
                values[k * values_stride + first + lane] = (uint8_t)(int32_t)own[lane];
            memcpy(errors + k * errors_stride + first, error, 4 * width);
        }
    }
    free(wanted);
    return OK;
}

/* From the first row to the last: move to the best grid point, and add the move to the gradient of the rows after. */
EXPORT int64_t descend_block(size_t rows, size_t outputs, const float *gradient, size_t gradient_stride, float *errors,
                             size_t errors_stride, const float *weights, size_t weights_stride, const float *within,
                             size_t within_stride, const float *scales, size_t scales_stride, const float *zeros,
                             size_t zeros_stride, const int32_t *groups, uint8_t *values, size_t values_stride) {
    float *slopes = calloc(rows * WIDE + 1, 4), scale[WIDE], zero[WIDE], weight[WIDE], error[WIDE], value[WIDE];
    if (!slopes) return OUT_OF_MEMORY;
    for (int lane = 0; lane < WIDE; lane++) scale[lane] = 1, zero[lane] = 8, weight[lane] = error[lane] = 0;
    for (size_t first = 0; first < outputs; first += WIDE) {
        size_t width = outputs - first < WIDE ? outputs - first : WIDE;
        load(gradient + first, gradient_stride, rows, width, slopes);
        for (size_t k = 0; k < rows; k++) {
            float *own = errors + k * errors_stride + first, move[WIDE], curvature = within[k * within_stride + k];
            memcpy(scale, scales + groups[k] * scales_stride + first, 4 * width);
            memcpy(zero, zeros + groups[k] * zeros_stride + first, 4 * width);
            memcpy(weight, weights + k * weights_stride + first, 4 * width);
            memcpy(error, own, 4 * width);
            for (int lane = 0; lane < WIDE; lane++) {
                float best = (weight[lane] + error[lane] - slopes[k * WIDE + lane] / curvature) / scale[lane];
                value[lane] = clamp(rintf(best) + zero[lane], 0, 15);
                float after = (value[lane] - zero[lane]) * scale[lane] - weight[lane];
                move[lane] = after - error[lane];
                error[lane] = after;
            }
            for (size_t j = k + 1; j < rows; j++) {
                float factor = within[j * within_stride + k];
                for (int lane = 0; lane < WIDE; lane++) slopes[j * WIDE + lane] += factor * move[lane];
            }
            for (size_t lane = 0; lane < width; lane++)
                values[k * values_stride + first + lane] = (uint8_t)(int32_t)value[lane];
            memcpy(own, error, 4 * width);
        }
    }
    free(slopes);
    return OK;
}

/* What rounding to each of `num_factors` shrunken scales leaves, weighed by `moments` [rows]; `best` [outputs] becomes
   the scale of the least. `zero` and `base` [outputs]. */
EXPORT int64_t search_scales(size_t rows, size_t outputs, const float *weights, size_t weights_stride,
                             const float *moments, const float *base, const float *zero, const float *factors,
                             size_t num_factors, int half_scales, float *best) {
    float *lanes = calloc(rows * WIDE + 1, 4);
    if (!lanes) return OUT_OF_MEMORY;
    for (size_t first = 0; first < outputs; first += WIDE) {
        size_t width = outputs - first < WIDE ? outputs - first : WIDE;
        float whole[WIDE], low[WIDE], high[WIDE], least[WIDE], chosen[WIDE];
        for (size_t lane = 0; lane < WIDE; lane++) {
            size_t output = first + (lane < width ? lane : 0);
            chosen[lane] = whole[lane] = base[output];
            low[lane] = -zero[output];
            high[lane] = 15 - zero[output];
            least[lane] = INFINITY;
        }
        load(weights + first, weights_stride, rows, width, lanes);
        for (size_t f = 0; f < num_factors; f++) {
            float scale[WIDE], inverse[WIDE], sums[WIDE] = {0};
            for (int lane = 0; lane < WIDE; lane++) {
                scale[lane] = stored_scale(whole[lane] * factors[f], half_scales);
                inverse[lane] = 1 / scale[lane];
            }
            for (size_t k = 0; k < rows; k++)
                for (int lane = 0; lane < WIDE; lane++) {
                    float step = lanes[k * WIDE + lane] * inverse[lane];
                    float error = clamp(rintf(step), low[lane], high[lane]) - step;
                    sums[lane] += moments[k] * (error * error);
                }
            for (int lane = 0; lane < WIDE; lane++) {
                float ratio = scale[lane] / whole[lane], error = sums[lane] * (ratio * ratio);
                chosen[lane] = error < least[lane] ? scale[lane] : chosen[lane];
                least[lane] = error < least[lane] ? error : least[lane];
            }
        }
        memcpy(best + first, chosen, 4 * width);
    }
    free(lanes);
    return OK;
}

/* In units of `scales` [outputs], what rounding to them leaves: `errors` [rows, outputs], contiguous. */
EXPORT int64_t step_errors(size_t rows, size_t outputs, const float *weights, size_t weights_stride, const float *scales,
                           const float *zeros, float *errors) {
    for (size_t k = 0; k < rows; k++) {
        const float *row = weights + k * weights_stride;
        float *out = errors + k * outputs;
        for (size_t o = 0; o < outputs; o++) {
            float step = row[o] * (1 / scales[o]);
            out[o] = clamp(rintf(step), -zeros[o], 15 - zeros[o]) - step;
        }
    }
    return OK;
}
