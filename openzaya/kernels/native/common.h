/* What all kernels share: bf16, exp, and small matrix products with fp32 sums.

   Matrices are row-major. A product takes its left side as rows of bf16 and its right side
   "paired": element [k / 2][n] is a 32-bit word that holds rows k and k + 1 of column n, which is
   how AMX tiles (and VNNI) want it. Without AMX the same product is a plain loop.

   Results do not depend on which thread runs first: what threads sum up for all is kept apart by
   thread, over a fixed division of the work, and added in their order. */

#ifndef OPENZAYA_COMMON_H
#define OPENZAYA_COMMON_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
static inline int thread_number(void) { return omp_get_thread_num(); }
#else
static inline int thread_number(void) { return 0; }
#endif

/* Without tiles where the system does not grant them to us. */
#if defined(__AMX_BF16__) && !defined(NO_TILES)
#define TILES
#endif

#if defined(__AVX512F__) || defined(TILES)
#include <immintrin.h>
#endif

typedef uint16_t bf16;

static inline float widen(bf16 value) {
    union { uint32_t bits; float number; } x = {.bits = (uint32_t)value << 16};
    return x.number;
}

/* Round to nearest, ties to even; NaN stays NaN. */
static inline bf16 narrow(float value) {
    union { float number; uint32_t bits; } x = {.number = value};
    uint32_t rounded = (x.bits + 0x7fff + ((x.bits >> 16) & 1)) >> 16;
    return (bf16)(value != value ? 0x7fc0 : rounded);
}

/* dst[n] = src[n], and dst[n] pairs even[n] with odd[n]; n is a multiple of 16. */
#ifdef __AVX512BF16__
static inline void narrow_span(int n, const float *src, bf16 *dst) {
    for (int i = 0; i < n; i += 16)
        _mm256_storeu_si256((__m256i *)(dst + i),
                            (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(src + i)));
}

static inline void pair_span(int n, const float *even, const float *odd, uint32_t *dst) {
    for (int i = 0; i < n; i += 16) {
        __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(even + i)));
        __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(odd + i)));
        _mm512_storeu_si512(dst + i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}
#else
static inline void narrow_span(int n, const float *src, bf16 *dst) {
#pragma omp simd
    for (int i = 0; i < n; i++) dst[i] = narrow(src[i]);
}

static inline void pair_span(int n, const float *even, const float *odd, uint32_t *dst) {
#pragma omp simd
    for (int i = 0; i < n; i++)
        dst[i] = (uint32_t)narrow(even[i]) | (uint32_t)narrow(odd[i]) << 16;
}
#endif

/* e^x to about two units in the last place; 0 below -87, which includes minus infinity. */
static inline float exp_fast(float x) {
    float bounded = x > 88.0f ? 88.0f : x;
    bounded = bounded < -87.0f ? -87.0f : bounded;
    float n = rintf(bounded * 1.44269504088896341f);
    float r = bounded - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { uint32_t bits; float number; } scale = {.bits = (uint32_t)((int32_t)n + 127) << 23};
    float result = p * scale.number;
    return x < -87.0f ? 0.0f : result;
}

static inline int round_up(int value, int step) { return (value + step - 1) / step * step; }

/* Memory aligned to cache lines; NULL only when the system has none left (for no bytes some systems
   return NULL as well, so a line is taken). */
static inline void *scratch(size_t bytes) {
    return aligned_alloc(64, bytes ? (bytes + 63) / 64 * 64 : 64);
}

void tiles_open(void);
void tiles_close(void);

/* c[m][n] (+)= a[m][k] b[k][n].
   m and n are multiples of 16, k of 32; lda counts bf16, ldb pairs, ldc floats. */
void product(int m, int n, int k, const bf16 *a, long lda, const uint32_t *b, long ldb, float *c,
             long ldc, int accumulate);

/* dst[k / 2][n] pairs the rows of src[k][n]. */
void pair_rows(int k, int n, const bf16 *src, long lds, uint32_t *dst, long ldd);

/* dst[k / 2][n] pairs the columns of src[n][k]: the transpose as a right side.
   n is a multiple of 16, k of 32, lds even. */
void pair_columns(int n, int k, const bf16 *src, long lds, uint32_t *dst, long ldd);

/* dst[n][m] = src[m][n]; m is a multiple of 32, n of 16, ldd even. */
void transpose(int m, int n, const bf16 *src, long lds, bf16 *dst, long ldd);

/* dst[m][n] = src[m][n] in bf16; n is a multiple of 16. */
void narrow_rows(int m, int n, const float *src, long lds, bf16 *dst, long ldd);

#endif
