/* What the kernels share. Source types and chunk-wise functions are in rounding.c. */

#ifndef PLANSMITH_NATIVE_H
#define PLANSMITH_NATIVE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT_PLAIN __attribute__((visibility("default")))
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define EXPORT __attribute__((visibility("default"), target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define EXPORT EXPORT_PLAIN
#endif

/* -DPLAIN_C compiles what processors other than x86-64 get. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(PLAIN_C)
#define HAS_INTRINSICS
#endif

enum { OK = -1, DOES_NOT_FIT = -2, OUT_OF_MEMORY = -3 }; /* besides the number of a row */
#define TINY 0x1p-126f /* smallest normal float32 */

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* The nearest float16, for magnitudes in its normal range. */
INLINE float to_half(float value) {
    uint32_t bits = bits_of(value);
    return float_of((bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fffu);
}

INLINE float usable(float scale) { return scale == 0 ? 1.0f : (scale < TINY ? TINY : scale); }

INLINE float clamp(float value, float low, float high) {
    value = value < low ? low : value;
    return value > high ? high : value;
}

INLINE float stored_scale(float scale, int half_scales) { return usable(half_scales ? to_half(scale) : scale); }

#endif
