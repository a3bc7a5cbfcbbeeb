/* bfloat16 to float16, rounded to the nearest even as every processor with F16C does it. */

#include "native.h"

#ifdef HAS_INTRINSICS
#include <immintrin.h>

#define WITH_F16C __attribute__((target("avx2,f16c")))

EXPORT_PLAIN int64_t casts_halves(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

WITH_F16C static __m128i cast(__m128i bits) {
    __m256 values = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* OK, or how many values came before the first 64 of which one is NaN or infinite in float16. */
EXPORT_PLAIN WITH_F16C int64_t cast_halves(size_t count, const uint16_t *bfloats, uint16_t *halves) {
    const __m128i exponent = _mm_set1_epi16(0x7c00);
    for (size_t begin = 0; begin < count; begin += 64) {
        __m128i special = _mm_setzero_si128();
        size_t end = count - begin < 64 ? count : begin + 64;
        for (size_t i = begin; i < end; i += 8) {
            uint16_t some[8] = {0};
            size_t width = end - i < 8 ? end - i : 8;
            memcpy(some, bfloats + i, width == 8 ? 16 : 2 * width);
            __m128i cast_to = cast(_mm_loadu_si128((const __m128i *)some));
            special = _mm_or_si128(special, _mm_cmpeq_epi16(_mm_and_si128(cast_to, exponent), exponent));
            _mm_storeu_si128((__m128i *)some, cast_to);
            memcpy(halves + i, some, width == 8 ? 16 : 2 * width);
        }
        if (_mm_movemask_epi8(special)) return (int64_t)begin;
    }
    return OK;
}

#else

EXPORT_PLAIN int64_t casts_halves(void) { return 0; }

#endif
