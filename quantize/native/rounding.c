/* Rounding of weights, chunk by chunk: the loops of quantize/rounding.py and quantize/block_rounding.py.

   Those modules are the definition; here every float operation is the same one in the same order, so the stored bytes are
   the same, and sums that go into reports are doubles. Source rows are read as they lie in the file, which need not be
   aligned. Every function returns -1, or the first row that holds NaN or infinity, or DOES_NOT_FIT. */

#include "native.h"

enum { FLOAT32, BFLOAT16, FLOAT16 };                          /* types of the source */
enum { LANES = 16 };                                          /* groups that are searched side by side */
#define INFINITY_BITS 0x7f800000u
#define HALF_TINY 0x1p-14f
#define HALF_MAX 65504.0f

typedef struct {
    double norm, error; /* squared, of the chunk */
} sums_t;

/* ---- bits ---- */

INLINE float half_value(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    float scaled = float_of(magnitude << 13) * 0x1p112f; /* exact, for subnormal numbers as well */
    uint32_t special = magnitude >= 0x7c00 ? INFINITY_BITS : 0;
    return float_of(bits_of(scaled) | special | sign);
}

INLINE size_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

INLINE void widen(const char *source, int dtype, size_t count, float *out) {
    if (dtype == FLOAT32) {
        memcpy(out, source, 4 * count);
    } else if (dtype == BFLOAT16) {
        for (size_t i = 0; i < count; i++) {
            uint16_t bits;
            memcpy(&bits, source + 2 * i, 2);
            out[i] = float_of((uint32_t)bits << 16);
        }
    } else {
        for (size_t i = 0; i < count; i++) {
            uint16_t bits;
            memcpy(&bits, source + 2 * i, 2);
            out[i] = half_value(bits);
        }
    }
}

/* Magnitudes are ordered as their bits are, and integer maxima vectorize; NaN and infinity come out largest. */
INLINE uint32_t largest_bits(const float *values, size_t count) {
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(values[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

INLINE double sum_of_squares(const float *values, size_t count) {
    double lanes[8] = {0}, total = 0;
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int lane = 0; lane < 8; lane++) lanes[lane] += (double)values[i + lane] * (double)values[i + lane];
    for (; i < count; i++) total += (double)values[i] * (double)values[i];
    for (int lane = 0; lane < 8; lane++) total += lanes[lane];
    return total;
}

/* ---- element types ---- */

/* e4m3's nearest value of a magnitude; above 448 it saturates. */
INLINE float round_e4m3_magnitude(float magnitude) {
    magnitude = magnitude > 448.0f ? 448.0f : magnitude;
    uint32_t bits = bits_of(magnitude);
    float normal = float_of((bits + 0x7ffff + ((bits >> 20) & 1)) & 0xfff00000u);
    float subnormal = (magnitude + 0x1p14f) - 0x1p14f; /* a multiple of 2**-9, rounded by the hardware */
    return magnitude < 0x1p-6f ? subnormal : normal;
}

/* The code of a value that e4m3 has. */
INLINE uint32_t e4m3_code_of(float rounded) {
    uint32_t bits = bits_of(rounded);
    return rounded < 0x1p-6f ? bits_of(rounded + 0x1p14f) - bits_of(0x1p14f) : (bits >> 20) - ((127 - 7) << 3);
}

INLINE float e4m3_value(uint32_t code) {
    return code < 8 ? (float)code * 0x1p-9f : float_of((code << 20) + ((127u - 7) << 23));
}

INLINE float round_e2m1_magnitude(float magnitude) {
    magnitude = magnitude > 6.0f ? 6.0f : magnitude;
    uint32_t octave = bits_of(magnitude) < bits_of(1.0f) ? bits_of(1.0f) : bits_of(magnitude);
    float unit = float_of((octave & INFINITY_BITS) + (22u << 23));
    return (magnitude + unit) - unit;
}

INLINE uint8_t e2m1_code_of(float rounded) {
    uint32_t halves = (uint32_t)(int32_t)(rounded + rounded); /* 0 1 2 3 4 6 8 12 */
    return (uint8_t)(halves - (halves > 4) - (halves > 6) - 3 * (halves > 8));
}

/* Two values 0..15 in a byte, the first one low. */
INLINE void pack_nibbles(const uint8_t *values, size_t count, uint8_t *out) {
    for (size_t i = 0; i < count / 2; i++) out[i] = (uint8_t)(values[2 * i] | values[2 * i + 1] << 4);
}

/* ---- whole chunks ---- */

__attribute__((visibility("default"))) int rounding_version(void) { return 4; } /* of the arguments below */

/* Squared norm of what stays as it is, and its largest magnitude. */
EXPORT int64_t measure(const char *source, int dtype, size_t rows, size_t columns, float *largest, sums_t *sums) {
    float *row = malloc(4 * columns + 4);
    uint32_t most = 0;
    if (!row) return OUT_OF_MEMORY;
    for (size_t r = 0; r < rows; r++) {
        widen(source + r * columns * size_of(dtype), dtype, columns, row);
        uint32_t bits = largest_bits(row, columns);
        if (bits >= INFINITY_BITS) {
            free(row);
            return (int64_t)r;
        }
        most = bits > most ? bits : most;
        if (sums) sums->norm += sum_of_squares(row, columns);
    }
    *largest = float_of(most);
    free(row);
    return OK;
}

/* e4m3 of `count` values with one scale; the errors replace the values. */
INLINE void round_e4m3(float *values, size_t count, float scale, uint8_t *codes) {
    for (size_t i = 0; i < count; i++) {
        float step = values[i] / scale, magnitude = fabsf(step);
        float rounded = round_e4m3_magnitude(magnitude);
        codes[i] = (uint8_t)(e4m3_code_of(rounded) | ((bits_of(step) >> 24) & 0x80));
        values[i] = (rounded - magnitude) * scale;
    }
}

/* e4m3 with a scale for each row, which is written to `scales` [rows]; or all with `given`. */
EXPORT int64_t round_fp8(const char *source, int dtype, size_t rows, size_t columns, const float *given, uint8_t *codes,
                         float *scales, sums_t *sums) {
    float *row = malloc(4 * columns + 4);
    if (!row) return OUT_OF_MEMORY;
    for (size_t r = 0; r < rows; r++) {
        widen(source + r * columns * size_of(dtype), dtype, columns, row);
        uint32_t bits = largest_bits(row, columns);
        if (bits >= INFINITY_BITS) {
            free(row);
            return (int64_t)r;
        }
        float scale = given ? *given : usable(float_of(bits) / 448.0f);
        if (!given) scales[r] = scale;
        sums->norm += sum_of_squares(row, columns);
        round_e4m3(row, columns, scale, codes + r * columns);
        sums->error += sum_of_squares(row, columns);
    }
    free(row);
    return OK;
}

/* e4m3 of at most 128 rows with a scale for every 128 columns, `scales` [ceil(columns / 128)]. */
EXPORT int64_t round_fp8_band(const char *source, int dtype, size_t rows, size_t columns, uint8_t *codes, float *scales,
                              sums_t *sums) {
    float *band = malloc(4 * rows * columns + 4);
    size_t num_blocks = (columns + 127) / 128;
    if (!band) return OUT_OF_MEMORY;
    memset(scales, 0, 4 * num_blocks);
    for (size_t r = 0; r < rows; r++) {
        float *row = band + r * columns;
        widen(source + r * columns * size_of(dtype), dtype, columns, row);
        for (size_t b = 0; b < num_blocks; b++) {
            size_t begin = 128 * b, count = columns - begin < 128 ? columns - begin : 128;
            uint32_t bits = largest_bits(row + begin, count);
            if (bits >= INFINITY_BITS) {
                free(band);
                return (int64_t)r;
            }
            scales[b] = float_of(bits) > scales[b] ? float_of(bits) : scales[b];
        }
        sums->norm += sum_of_squares(row, columns);
    }
    for (size_t b = 0; b < num_blocks; b++) scales[b] = usable(scales[b] / 448.0f);
    for (size_t r = 0; r < rows; r++) {
        for (size_t b = 0; b < num_blocks; b++) {
            size_t begin = r * columns + 128 * b, left = columns - 128 * b;
            round_e4m3(band + begin, left < 128 ? left : 128, scales[b], codes + begin);
        }
        sums->error += sum_of_squares(band + r * columns, columns);
    }
    free(band);
    return OK;
}

EXPORT int64_t round_int8(const char *source, int dtype, size_t rows, size_t columns, int8_t *values, float *scales,
                          sums_t *sums) {
    float *row = malloc(4 * columns + 4);
    if (!row) return OUT_OF_MEMORY;
    for (size_t r = 0; r < rows; r++) {
        widen(source + r * columns * size_of(dtype), dtype, columns, row);
        uint32_t bits = largest_bits(row, columns);
        if (bits >= INFINITY_BITS) {
            free(row);
            return (int64_t)r;
        }
        float scale = scales[r] = usable(float_of(bits) / 127.0f);
        sums->norm += sum_of_squares(row, columns);
        for (size_t i = 0; i < columns; i++) {
            float step = row[i] / scale, rounded = clamp(rintf(step), -127.0f, 127.0f);
            values[r * columns + i] = (int8_t)(int32_t)rounded;
            row[i] = (rounded - step) * scale;
        }
        sums->error += sum_of_squares(row, columns);
    }
    free(row);
    return OK;
}

/* ---- int4 in groups ---- */

typedef struct {
    float base, zero; /* the scale of the whole range, and the zero point 0..15 */
} range_t;

INLINE range_t int4_range(const float *group, size_t size, int symmetric) {
    int32_t high_bits = 0, low_bits = 0;
    for (size_t i = 0; i < size; i++) {
        int32_t bits = (int32_t)bits_of(group[i]); /* of a negative number: a negative integer */
        int32_t below = (bits >> 31) & bits & 0x7fffffff;
        high_bits = bits > high_bits ? bits : high_bits;
        low_bits = below > low_bits ? below : low_bits;
    }
    float high = float_of((uint32_t)high_bits), depth = float_of((uint32_t)low_bits);
    if (symmetric) {
        float above = high / 7, under = depth / 8;
        return (range_t){usable(above > under ? above : under), 8};
    }
    float base = high / 15 + depth / 15;
    return (range_t){usable(base), clamp(rintf(depth / (base < TINY ? TINY : base)), 0, 15)};
}

/* Of `num_factors` shrunken scales for each of 16 groups, the one of the least squared error. `turned` is [size][16]. */
INLINE void search_int4(const float *turned, size_t size, const range_t *ranges, const float *factors, size_t num_factors,
                        int half_scales, float *best) {
    float least[LANES], low[LANES], high[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        least[lane] = INFINITY;
        best[lane] = stored_scale(ranges[lane].base * factors[0], half_scales);
        low[lane] = -ranges[lane].zero;
        high[lane] = 15 - ranges[lane].zero;
    }
    for (size_t f = 0; f < num_factors; f++) {
        float scales[LANES], inverse[LANES], errors[LANES] = {0};
        for (int lane = 0; lane < LANES; lane++) {
            scales[lane] = stored_scale(ranges[lane].base * factors[f], half_scales);
            inverse[lane] = 1 / scales[lane];
        }
        for (size_t k = 0; k < size; k++)
            for (int lane = 0; lane < LANES; lane++) {
                float step = turned[k * LANES + lane] * inverse[lane];
                float error = clamp(rintf(step), low[lane], high[lane]) - step;
                errors[lane] += error * error;
            }
        for (int lane = 0; lane < LANES; lane++) {
            float ratio = scales[lane] / ranges[lane].base, error = errors[lane] * (ratio * ratio);
            best[lane] = error < least[lane] ? scales[lane] : best[lane];
            least[lane] = error < least[lane] ? error : least[lane];
        }
    }
}

/* Up to 16 groups [num][size] to [size][16]; what is missing is zeros. */
INLINE void turn(const float *groups, size_t num, size_t size, float *turned) {
    if (num < LANES) memset(turned, 0, 4 * size * LANES);
    for (size_t k = 0; k < size; k++)
        for (size_t lane = 0; lane < num; lane++) turned[k * LANES + lane] = groups[lane * size + k];
}

INLINE void round_int4_group(float *group, size_t size, float scale, float zero, uint8_t *unpacked) {
    for (size_t i = 0; i < size; i++) {
        float step = group[i] / scale, rounded = clamp(rintf(step), -zero, 15 - zero);
        unpacked[i] = (uint8_t)(int32_t)(rounded + zero);
        group[i] = (rounded - step) * scale;
    }
}

/* `scales` and `zeros` [rows * columns / size]; `zeros` NULL: symmetric. `half_scales`: they are float16 numbers, and a
   scale that leaves its normal range, shrunk by `smallest`, does not fit. */
EXPORT int64_t round_int4(const char *source, int dtype, size_t rows, size_t columns, size_t size, const float *factors,
                          size_t num_factors, float smallest, int half_scales, uint8_t *packed, float *scales,
                          uint8_t *zeros, sums_t *sums) {
    size_t num_groups = rows * columns / size;
    float *groups = malloc(8 * LANES * size), *turned = groups + LANES * size;
    uint8_t *unpacked = malloc(size);
    int64_t result = groups && unpacked ? OK : OUT_OF_MEMORY;
    for (size_t first = 0; result == OK && first < num_groups; first += LANES) {
        size_t num = num_groups - first < LANES ? num_groups - first : LANES;
        range_t ranges[LANES];
        widen(source + first * size * size_of(dtype), dtype, num * size, groups);
        for (size_t lane = 0; lane < LANES; lane++) {
            const float *group = groups + lane * size;
            ranges[lane] = lane < num ? int4_range(group, size, !zeros) : (range_t){1, 8};
            if (lane < num && largest_bits(group, size) >= INFINITY_BITS) {
                result = (int64_t)((first + lane) * size / columns);
                break;
            }
            float base = ranges[lane].base;
            if (half_scales && (base * smallest < HALF_TINY || base > HALF_MAX)) result = DOES_NOT_FIT;
        }
        if (result != OK) break;
        float best[LANES];
        if (num_factors > 1) {
            turn(groups, num, size, turned);
            search_int4(turned, size, ranges, factors, num_factors, half_scales, best);
        } else {
            for (int lane = 0; lane < LANES; lane++) best[lane] = stored_scale(ranges[lane].base * factors[0], half_scales);
        }
        sums->norm += sum_of_squares(groups, num * size);
        for (size_t lane = 0; lane < num; lane++) {
            size_t group = first + lane;
            round_int4_group(groups + lane * size, size, best[lane], ranges[lane].zero, unpacked);
            pack_nibbles(unpacked, size, packed + group * size / 2);
            scales[group] = best[lane];
            if (zeros) zeros[group] = (uint8_t)ranges[lane].zero;
        }
        sums->error += sum_of_squares(groups, num * size);
    }
    free(groups);
    free(unpacked);
    return result;
}

/* ---- blocks of four-bit floats ---- */

/* The first of the candidates [num][16] with the least squared error, `turned` [size][16] being magnitudes. */
INLINE void search_e2m1(const float *turned, size_t size, const float *candidates, size_t num, uint32_t *best) {
    float least[LANES];
    for (size_t c = 0; c < num; c++) {
        const float *scales = candidates + c * LANES;
        float inverse[LANES], errors[LANES] = {0};
        for (int lane = 0; lane < LANES; lane++) inverse[lane] = 1 / scales[lane];
        for (size_t k = 0; k < size; k++)
            for (int lane = 0; lane < LANES; lane++) {
                float step = turned[k * LANES + lane] * inverse[lane];
                float error = round_e2m1_magnitude(step) - step;
                errors[lane] += error * error;
            }
        for (int lane = 0; lane < LANES; lane++) {
            float ratio = scales[lane] / candidates[lane], error = errors[lane] * (ratio * ratio);
            best[lane] = c == 0 || error < least[lane] ? (uint32_t)c : best[lane];
            least[lane] = c == 0 || error < least[lane] ? error : least[lane];
        }
    }
}

INLINE void round_e2m1_block(float *block, size_t size, float scale, uint8_t *packed) {
    uint8_t codes[32];
    for (size_t i = 0; i < size; i++) {
        float step = block[i] / scale, magnitude = fabsf(step), rounded = round_e2m1_magnitude(magnitude);
        codes[i] = (uint8_t)(e2m1_code_of(rounded) | ((bits_of(step) >> 28) & 8));
        block[i] = (rounded - magnitude) * scale;
    }
    pack_nibbles(codes, size, packed);
}

/* The power of two that a block is divided by, as an exponent: quantize/e8m0.py. */
INLINE int32_t exponent_of(float largest, float element_mantissa, int32_t element_exponent, int ceil) {
    int exponent;
    if (largest == 0) return 0;
    float mantissa = frexpf(largest, &exponent);
    exponent += (ceil && mantissa > element_mantissa) - element_exponent;
    return exponent < -126 ? -126 : (exponent > 126 ? 126 : exponent);
}

INLINE float power_of_two(int32_t exponent) { return float_of((uint32_t)(exponent + 127) << 23); }

INLINE uint32_t scale_code(float scale) {
    uint32_t code = e4m3_code_of(round_e4m3_magnitude(scale));
    return code < 1 ? 1 : code;
}

/* Offsets from the code of the scale that puts the largest magnitude at 6; or {0} and `fours`: 4 as well. */
EXPORT int64_t round_nvfp4(const char *source, int dtype, size_t rows, size_t columns, float tensor_scale,
                           const int32_t *offsets, size_t num_offsets, int fours, uint8_t *packed, uint8_t *codes,
                           sums_t *sums) {
    enum { SIZE = 16, MOST = 16 };
    size_t num_blocks = rows * columns / SIZE, num = fours ? 2 : num_offsets;
    float blocks[SIZE * LANES], turned[SIZE * LANES], candidates[MOST * LANES];
    uint32_t tried[MOST * LANES], best[LANES];
    for (size_t first = 0; first < num_blocks; first += LANES) {
        size_t present = num_blocks - first < LANES ? num_blocks - first : LANES;
        float largest[LANES] = {0};
        widen(source + first * SIZE * size_of(dtype), dtype, present * SIZE, blocks);
        for (size_t lane = 0; lane < present; lane++) {
            uint32_t bits = largest_bits(blocks + lane * SIZE, SIZE);
            if (bits >= INFINITY_BITS) return (int64_t)((first + lane) * SIZE / columns);
            largest[lane] = float_of(bits) / tensor_scale;
        }
        for (size_t c = 0; c < num; c++)
            for (int lane = 0; lane < LANES; lane++) {
                int32_t code = (int32_t)scale_code(largest[lane] / (fours && c ? 4.0f : 6.0f));
                if (!fours && num > 1) {
                    code += offsets[c];
                    code = code < 1 ? 1 : (code > 126 ? 126 : code);
                }
                tried[c * LANES + lane] = (uint32_t)code;
                candidates[c * LANES + lane] = e4m3_value((uint32_t)code) * tensor_scale;
            }
        memset(best, 0, sizeof best);
        if (num > 1) {
            turn(blocks, present, SIZE, turned);
            for (size_t i = 0; i < SIZE * LANES; i++) turned[i] = fabsf(turned[i]);
            search_e2m1(turned, SIZE, candidates, num, best);
        }
        sums->norm += sum_of_squares(blocks, present * SIZE);
        for (size_t lane = 0; lane < present; lane++) {
            uint32_t code = largest[lane] == 0 ? 0x38 : tried[best[lane] * LANES + lane];
            codes[first + lane] = (uint8_t)code;
            round_e2m1_block(blocks + lane * SIZE, SIZE, e4m3_value(code) * tensor_scale, packed + (first + lane) * SIZE / 2);
        }
        sums->error += sum_of_squares(blocks, present * SIZE);
    }
    return OK;
}

/* `ways` of choosing the exponent, in order: 0 the specification's, 1 the smallest that clips nothing. */
EXPORT int64_t round_mxfp4(const char *source, int dtype, size_t rows, size_t columns, const int32_t *ways,
                           size_t num_ways, uint8_t *packed, uint8_t *codes, sums_t *sums) {
    enum { SIZE = 32 };
    size_t num_blocks = rows * columns / SIZE;
    float blocks[SIZE * LANES], turned[SIZE * LANES], candidates[2 * LANES];
    int32_t exponents[2 * LANES];
    uint32_t best[LANES];
    for (size_t first = 0; first < num_blocks; first += LANES) {
        size_t present = num_blocks - first < LANES ? num_blocks - first : LANES;
        widen(source + first * SIZE * size_of(dtype), dtype, present * SIZE, blocks);
        for (size_t lane = 0; lane < LANES; lane++) {
            uint32_t bits = lane < present ? largest_bits(blocks + lane * SIZE, SIZE) : 0;
            if (bits >= INFINITY_BITS) return (int64_t)((first + lane) * SIZE / columns);
            for (size_t way = 0; way < num_ways; way++) {
                int32_t exponent = exponent_of(float_of(bits), 0.75f, 3, ways[way]);
                exponents[way * LANES + lane] = exponent;
                candidates[way * LANES + lane] = power_of_two(exponent);
            }
        }
        memset(best, 0, sizeof best);
        if (num_ways > 1) {
            turn(blocks, present, SIZE, turned);
            for (size_t i = 0; i < SIZE * LANES; i++) turned[i] = fabsf(turned[i]);
            search_e2m1(turned, SIZE, candidates, num_ways, best);
        }
        sums->norm += sum_of_squares(blocks, present * SIZE);
        for (size_t lane = 0; lane < present; lane++) {
            int32_t exponent = exponents[best[lane] * LANES + lane];
            codes[first + lane] = (uint8_t)(exponent + 127);
            round_e2m1_block(blocks + lane * SIZE, SIZE, power_of_two(exponent), packed + (first + lane) * SIZE / 2);
        }
        sums->error += sum_of_squares(blocks, present * SIZE);
    }
    return OK;
}

EXPORT int64_t round_mxfp8(const char *source, int dtype, size_t rows, size_t columns, uint8_t *values, uint8_t *codes,
                           sums_t *sums) {
    enum { SIZE = 32 };
    float block[SIZE];
    for (size_t b = 0; b < rows * columns / SIZE; b++) {
        widen(source + b * SIZE * size_of(dtype), dtype, SIZE, block);
        uint32_t bits = largest_bits(block, SIZE);
        if (bits >= INFINITY_BITS) return (int64_t)(b * SIZE / columns);
        int32_t exponent = exponent_of(float_of(bits), 0.875f, 9, 1);
        codes[b] = (uint8_t)(exponent + 127);
        sums->norm += sum_of_squares(block, SIZE);
        round_e4m3(block, SIZE, power_of_two(exponent), values + b * SIZE);
        sums->error += sum_of_squares(block, SIZE);
    }
    return OK;
}
