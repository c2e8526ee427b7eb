#define _GNU_SOURCE
#include "common.h"

#ifdef TILES
#include <sys/syscall.h>
#include <unistd.h>

/* Ask the kernel for the tile registers. Returns 0 where it grants them. */
int openzaya_init(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    return (int)syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}

int openzaya_tiles(void) { return 1; }

/* All eight tiles with 16 rows of 64 bytes. A constant, as compilers know only of the first bytes
   that `_tile_loadconfig` reads, and drop what is written to the others. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} CONFIG __attribute__((aligned(64))) = {
    .palette = 1,
    .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 16, 16},
};

void tiles_open(void) { _tile_loadconfig(&CONFIG); }

void tiles_close(void) { _tile_release(); }

/* 32 x 32 of the result: four tiles of sums, two of each side. */
static void product_32x32(int k, const bf16 *a, long lda, const uint32_t *b, long ldb, float *c,
                          long ldc, int accumulate) {
    if (accumulate) {
        _tile_loadd(0, c, ldc * 4);
        _tile_loadd(1, c + 16, ldc * 4);
        _tile_loadd(2, c + 16 * ldc, ldc * 4);
        _tile_loadd(3, c + 16 * ldc + 16, ldc * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int i = 0; i < k; i += 32) {
        _tile_loadd(4, a + i, lda * 2);
        _tile_loadd(6, b + i / 2 * ldb, ldb * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + i / 2 * ldb + 16, ldb * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 16 * lda + i, lda * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, ldc * 4);
    _tile_stored(1, c + 16, ldc * 4);
    _tile_stored(2, c + 16 * ldc, ldc * 4);
    _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
}

static void product_16x16(int k, const bf16 *a, long lda, const uint32_t *b, long ldb, float *c,
                          long ldc, int accumulate) {
    if (accumulate)
        _tile_loadd(0, c, ldc * 4);
    else
        _tile_zero(0);
    for (int i = 0; i < k; i += 32) {
        _tile_loadd(4, a + i, lda * 2);
        _tile_loadd(6, b + i / 2 * ldb, ldb * 4);
        _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, c, ldc * 4);
}

void product(int m, int n, int k, const bf16 *a, long lda, const uint32_t *b, long ldb, float *c,
             long ldc, int accumulate) {
    for (int j = 0; j < n; j += 32)
        for (int i = 0; i < m; i += 32) {
            const bf16 *left = a + i * lda;
            float *out = c + i * ldc + j;
            if (i + 32 <= m && j + 32 <= n) {
                product_32x32(k, left, lda, b + j, ldb, out, ldc, accumulate);
                continue;
            }
            for (int s = j; s < j + 32 && s < n; s += 16)
                for (int r = i; r < i + 32 && r < m; r += 16)
                    product_16x16(k, a + r * lda, lda, b + s, ldb, c + r * ldc + s, ldc,
                                  accumulate);
        }
}

#else

int openzaya_init(void) { return 0; }
int openzaya_tiles(void) { return 0; }
void tiles_open(void) {}
void tiles_close(void) {}

void product(int m, int n, int k, const bf16 *a, long lda, const uint32_t *b, long ldb, float *c,
             long ldc, int accumulate) {
    for (int i = 0; i < m; i++) {
        float *row = c + i * ldc;
        if (!accumulate) memset(row, 0, (size_t)n * sizeof(float));
        for (int p = 0; p < k; p += 2) {
            float even = widen(a[i * lda + p]), odd = widen(a[i * lda + p + 1]);
            const uint32_t *right = b + p / 2 * ldb;
#pragma omp simd
            for (int j = 0; j < n; j++)
                row[j] += even * widen((bf16)right[j]) + odd * widen((bf16)(right[j] >> 16));
        }
    }
}

#endif

void pair_rows(int k, int n, const bf16 *src, long lds, uint32_t *dst, long ldd) {
    for (int i = 0; i < k; i += 2) {
        const bf16 *even = src + i * lds, *odd = even + lds;
        uint32_t *out = dst + i / 2 * ldd;
#pragma omp simd
        for (int j = 0; j < n; j++) out[j] = (uint32_t)even[j] | (uint32_t)odd[j] << 16;
    }
}

/* Pairs of bf16, read and written as one number. */
typedef uint32_t __attribute__((may_alias)) word;

/* dst[n][m] = src[m][n], words; both sizes multiples of 16. */
#ifdef __AVX512F__
static void turn_16x16(const word *src, long lds, word *dst, long ldd) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(src + i * lds);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    /* r[4 i + j] now holds column j + 4 c of rows 4 i.. in its lane c. */
    for (int j = 0; j < 4; j++) {
        __m512i low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        __m512i high = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
        _mm512_storeu_si512(dst + j * ldd, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(dst + (4 + j) * ldd, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(dst + (8 + j) * ldd, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_storeu_si512(dst + (12 + j) * ldd, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}
#else
static void turn_16x16(const word *src, long lds, word *dst, long ldd) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) dst[j * ldd + i] = src[i * lds + j];
}
#endif

static void turn_words(int m, int n, const word *src, long lds, word *dst, long ldd) {
    for (int i = 0; i < m; i += 16)
        for (int j = 0; j < n; j += 16) turn_16x16(src + i * lds + j, lds, dst + j * ldd + i, ldd);
}

void pair_columns(int n, int k, const bf16 *src, long lds, uint32_t *dst, long ldd) {
    turn_words(n, k / 2, (const word *)src, lds / 2, dst, ldd);
}

void transpose(int m, int n, const bf16 *src, long lds, bf16 *dst, long ldd) {
    uint32_t words[16 * 64];
    for (int i = 0; i < m; i += 32)
        for (int j = 0; j < n; j += 64) {
            int columns = n - j < 64 ? n - j : 64;
            pair_rows(32, columns, src + i * lds + j, lds, words, 64);
            turn_words(16, columns, words, 64, (word *)(dst + j * ldd + i), ldd / 2);
        }
}

void narrow_rows(int m, int n, const float *src, long lds, bf16 *dst, long ldd) {
    for (int i = 0; i < m; i++) narrow_span(n, src + i * lds, dst + i * ldd);
}
