/* Products of bfloat16 summed in float32, with AVX512_BF16: X'Y of inputs X [num_tokens, rows], Y [num_tokens, columns].

   quantize/calibration/products.py says what is computed; sums are in an order of their own, always the same one.
   "Packed" inputs are panels of PANEL columns, each of them all pairs of tokens one after the other: of a pair and column
   the earlier token is the lower half of a uint32. What is missing of the last pair or panel is zero. */

#include "native.h"

#ifdef HAS_INTRINSICS
#include <immintrin.h>

enum {
    PANEL = 16,
    ROWS = 8,    /* of a block of the result: half a panel */
    PANELS = 3,  /* of its columns */
    PAIRS = 128, /* that are summed before the block is stored: their panels stay in the first-level cache */
};
#define WITH_BFLOAT16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

EXPORT_PLAIN int64_t multiplies_bfloat16(void) {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}

WITH_BFLOAT16 static __m512i rounded(const float *values, __mmask16 lanes) {
    __m256bh halves = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(lanes, values));
    return _mm512_cvtepu16_epi32((__m256i)halves);
}

/* `values` [tokens, columns], rows `stride` floats apart, to their place in the first of panels of `all_pairs`. */
EXPORT_PLAIN WITH_BFLOAT16 int64_t pack_tokens(size_t tokens, size_t columns, const float *values, size_t stride,
                                          uint32_t *packed, size_t all_pairs) {
    for (size_t pair = 0; 2 * pair < tokens; pair++) {
        const float *first = values + 2 * pair * stride;
        int is_whole = 2 * pair + 1 < tokens;
        for (size_t begin = 0; begin < columns; begin += PANEL) {
            __mmask16 lanes = columns - begin < PANEL ? (__mmask16)((1u << (columns - begin)) - 1) : 0xffff;
            __m512i pairs_of = rounded(first + begin, lanes);
            if (is_whole) {
                __m512i second = rounded(first + stride + begin, lanes);
                pairs_of = _mm512_or_si512(pairs_of, _mm512_slli_epi32(second, 16));
            }
            _mm512_storeu_si512(packed + (begin / PANEL * all_pairs + pair) * PANEL, pairs_of);
        }
    }
    return OK;
}

/* ROWS x (count * PANEL) sums over `pairs`; `left` is at the first of ROWS columns of a panel. Panels of `right` begin
   `right_stride` apart. */
WITH_BFLOAT16 INLINE void add_block(size_t pairs, const uint32_t *left, const uint32_t *right, size_t right_stride, int count,
                               float *total, size_t stride, size_t num_rows, size_t num_columns) {
    __m512 sums[ROWS][PANELS];
    for (int row = 0; row < ROWS; row++)
        for (int panel = 0; panel < count; panel++) sums[row][panel] = _mm512_setzero_ps();
    for (size_t pair = 0; pair < pairs; pair++) {
        __m512bh columns[PANELS];
        for (int panel = 0; panel < count; panel++)
            columns[panel] = (__m512bh)_mm512_loadu_si512(right + panel * right_stride + pair * PANEL);
        for (int row = 0; row < ROWS; row++) {
            __m512bh value = (__m512bh)_mm512_set1_epi32((int)left[pair * PANEL + row]);
            for (int panel = 0; panel < count; panel++)
                sums[row][panel] = _mm512_dpbf16_ps(sums[row][panel], value, columns[panel]);
        }
    }
    for (int row = 0; row < ROWS && (size_t)row < num_rows; row++)
        for (int panel = 0; panel < count; panel++) {
            size_t left_over = num_columns - panel * PANEL;
            __mmask16 lanes = left_over < PANEL ? (__mmask16)((1u << left_over) - 1) : 0xffff;
            float *place = total + row * stride + panel * PANEL;
            _mm512_mask_storeu_ps(place, lanes, _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, place), sums[row][panel]));
        }
}

/* Add X'Y to the panels `row_begin`.. x `column_begin`.. of `total` [num_rows, num_columns]; both inputs are packed.

   `upper` leaves out what lies wholly below the diagonal. */
EXPORT_PLAIN WITH_BFLOAT16 int64_t add_products(size_t pairs, const uint32_t *left, size_t left_stride,
                                           const uint32_t *right, size_t right_stride, size_t row_begin, size_t row_end,
                                           size_t column_begin, size_t column_end, int upper, float *total,
                                           size_t stride, size_t num_rows, size_t num_columns) {
    for (size_t begin = 0; begin < pairs; begin += PAIRS) {
        size_t some = pairs - begin < PAIRS ? pairs - begin : PAIRS;
        for (size_t column = column_begin; column < column_end; column += PANELS) {
            size_t count = column_end - column < PANELS ? column_end - column : PANELS;
            const uint32_t *columns = right + column * right_stride + begin * PANEL;
            size_t last_row = upper && column + count < row_end ? column + count : row_end;
            for (size_t row = row_begin * PANEL; row < last_row * PANEL && row < num_rows; row += ROWS) {
                const uint32_t *rows = left + row / PANEL * left_stride + begin * PANEL + row % PANEL;
                float *place = total + row * stride + column * PANEL;
                size_t rest = num_columns - column * PANEL;
                if (count == 3)
                    add_block(some, rows, columns, right_stride, 3, place, stride, num_rows - row, rest);
                else if (count == 2)
                    add_block(some, rows, columns, right_stride, 2, place, stride, num_rows - row, rest);
                else
                    add_block(some, rows, columns, right_stride, 1, place, stride, num_rows - row, rest);
            }
        }
    }
    return OK;
}

#else

EXPORT_PLAIN int64_t multiplies_bfloat16(void) { return 0; }

#endif
