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

/* `within` [rows, rows] times the steps, which are `values` without `zeros`. */
EXPORT int64_t times_steps(size_t rows, size_t outputs, const float *within, size_t within_stride, const uint8_t *values,
                           size_t values_stride, float *products, size_t products_stride, const float *zeros) {
    float *steps = calloc(rows * WIDE + 1, 4);
    if (!steps) return OUT_OF_MEMORY;
    for (size_t first = 0; first < outputs; first += WIDE) {
        size_t width = outputs - first < WIDE ? outputs - first : WIDE;
        for (size_t k = 0; k < rows; k++)
            for (size_t lane = 0; lane < width; lane++)
                steps[k * WIDE + lane] = (float)values[k * values_stride + first + lane] - zeros[first + lane];
        for (size_t k = 0; k < rows; k++) {
            float sums[WIDE] = {0};
            const float *factors = within + k * within_stride;
            for (size_t j = 0; j < rows; j++)
                for (int lane = 0; lane < WIDE; lane++) sums[lane] += factors[j] * steps[j * WIDE + lane];
            memcpy(products + k * products_stride + first, sums, 4 * width);
        }
    }
    free(steps);
    return OK;
}

/* `scales` [outputs] of the least output error, not further from `first` than the factor `most`; `of_steps` is H times
   the steps. The gradient and the errors are brought up to them. */
EXPORT int64_t fit_scales(size_t rows, size_t outputs, float *gradient, size_t gradient_stride, const float *of_steps,
                          size_t of_steps_stride, const float *weights, size_t weights_stride, const uint8_t *values,
                          size_t values_stride, float *errors, size_t errors_stride, float *scales, const float *first,
                          const float *zeros, float most, int half_scales) {
    for (size_t begin = 0; begin < outputs; begin += WIDE) {
        size_t width = outputs - begin < WIDE ? outputs - begin : WIDE;
        float slope[WIDE] = {0}, curvature[WIDE] = {0}, zero[WIDE] = {0}, scale[WIDE], change[WIDE];
        memcpy(zero, zeros + begin, 4 * width);
        for (size_t k = 0; k < rows; k++)
            for (size_t lane = 0; lane < width; lane++) {
                float step = (float)values[k * values_stride + begin + lane] - zero[lane];
                slope[lane] += step * gradient[k * gradient_stride + begin + lane];
                curvature[lane] += step * of_steps[k * of_steps_stride + begin + lane];
            }
        for (size_t lane = 0; lane < width; lane++) {
            float before = scales[begin + lane], start = first[begin + lane];
            float wanted = before - (curvature[lane] > 0 ? slope[lane] / curvature[lane] : 0);
            scale[lane] = stored_scale(clamp(wanted, start / most, start * most), half_scales);
            change[lane] = scale[lane] - before;
        }
        memcpy(scales + begin, scale, 4 * width);
        for (size_t k = 0; k < rows; k++)
            for (size_t lane = 0; lane < width; lane++) {
                float step = (float)values[k * values_stride + begin + lane] - zero[lane];
                gradient[k * gradient_stride + begin + lane] +=
                    change[lane] * of_steps[k * of_steps_stride + begin + lane];
                errors[k * errors_stride + begin + lane] =
                    step * scale[lane] - weights[k * weights_stride + begin + lane];
            }
    }
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
