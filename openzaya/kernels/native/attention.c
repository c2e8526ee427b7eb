/* Causal attention with grouped key-value heads inside documents, tile by tile.

   Scores are computed transposed, [keys][queries]: then maximum, sum and rescaling of a query's
   softmax run down a column, that is, along vector lanes, and every later product finds its sides
   in the order it wants. Tiles that no query of a block may see are never touched. */

#include "common.h"

enum { BLOCK = 64 };

/* Tokens of each row that a query sees: from its document's start, or its window's, to itself. */
typedef struct {
    int seq, padded, window;
    const int32_t *starts; /* [seq] first token of each token's document; NULL: one document */
} Sight;

static inline int first_seen(const Sight *sight, int query) {
    int start = sight->starts ? sight->starts[query < sight->seq ? query : sight->seq - 1] : 0;
    if (sight->window && query - sight->window + 1 > start) start = query - sight->window + 1;
    return start;
}

/* firsts[i] for the BLOCK queries from `query` on; returns whether the tile needs no mask. */
static int tile_is_full(const Sight *sight, int query, int key, int32_t *firsts) {
    int highest = 0;
    for (int i = 0; i < BLOCK; i++) {
        firsts[i] = first_seen(sight, query + i);
        if (firsts[i] > highest) highest = firsts[i];
    }
    return key + BLOCK - 1 <= query && highest <= key;
}

/* The rows of x[seq][dim] in tiles of BLOCK, zero after the last. */
static void padded_rows(const bf16 *x, int seq, int padded, int dim, bf16 *out) {
    memcpy(out, x, (size_t)seq * dim * sizeof(bf16));
    memset(out + (size_t)seq * dim, 0, (size_t)(padded - seq) * dim * sizeof(bf16));
}

/* out[blocks][dim][BLOCK] = x[padded][dim]. A block lies together: rows that are a power of two
   apart would share cache sets. */
static void turn_blocks(int padded, int dim, const bf16 *x, bf16 *out) {
    for (int t = 0; t < padded; t += BLOCK)
        transpose(BLOCK, dim, x + (size_t)t * dim, dim, out + (size_t)t * dim, BLOCK);
}

/* out[blocks][dim / 2][BLOCK]: the same as right sides of products. */
static void pair_blocks(int padded, int dim, const bf16 *x, uint32_t *out) {
    for (int t = 0; t < padded; t += BLOCK)
        pair_columns(BLOCK, dim, x + (size_t)t * dim, dim, out + (size_t)t / 2 * dim, BLOCK);
}

/* One block of queries of one head.
   k[padded][dim], vt[blocks][dim][BLOCK], q[BLOCK][dim], out rows of `stride`, lse[BLOCK]. */
static void attend_block(const Sight *sight, int dim, int query, const bf16 *q, const bf16 *k,
                         const bf16 *vt, bf16 *out, long stride, float *lse, char *space) {
    float *scores = (float *)space;
    float *sum = scores + BLOCK * BLOCK;
    uint32_t *queries = (uint32_t *)(sum + dim * BLOCK);
    uint32_t *weights = queries + dim / 2 * BLOCK;
    float highest[BLOCK], total[BLOCK], shrink[BLOCK];
    int32_t firsts[BLOCK];
    const float scale = 1.0f / sqrtf((float)dim);

    pair_columns(BLOCK, dim, q, dim, queries, BLOCK);
    memset(sum, 0, (size_t)dim * BLOCK * sizeof(float));
    for (int j = 0; j < BLOCK; j++) {
        highest[j] = -INFINITY;
        total[j] = 0.0f;
    }
    int begin = first_seen(sight, query) / BLOCK * BLOCK;
    for (int key = begin; key <= query; key += BLOCK) {
        product(BLOCK, BLOCK, dim, k + (size_t)key * dim, dim, queries, BLOCK, scores, BLOCK, 0);
        if (!tile_is_full(sight, query, key, firsts))
            for (int i = 0; i < BLOCK; i++) {
                float *row = scores + i * BLOCK;
#pragma omp simd
                for (int j = 0; j < BLOCK; j++)
                    row[j] = key + i <= query + j && key + i >= firsts[j] ? row[j] : -INFINITY;
            }
        float top[BLOCK];
        memcpy(top, highest, sizeof top);
        for (int i = 0; i < BLOCK; i++) {
            const float *row = scores + i * BLOCK;
#pragma omp simd
            for (int j = 0; j < BLOCK; j++) top[j] = row[j] > top[j] ? row[j] : top[j];
        }
        /* A query that has seen nothing yet keeps a finite reference, so that nothing is NaN. */
#pragma omp simd
        for (int j = 0; j < BLOCK; j++) {
            float reference = top[j] == -INFINITY ? 0.0f : top[j];
            shrink[j] = exp_fast((highest[j] - reference) * scale);
            highest[j] = top[j];
            top[j] = reference;
            total[j] *= shrink[j];
        }
        for (int i = 0; i < BLOCK; i += 2) {
            float *even = scores + i * BLOCK, *odd = even + BLOCK;
#pragma omp simd
            for (int j = 0; j < BLOCK; j++) {
                even[j] = exp_fast((even[j] - top[j]) * scale);
                odd[j] = exp_fast((odd[j] - top[j]) * scale);
                total[j] += even[j] + odd[j];
            }
            pair_span(BLOCK, even, odd, weights + i / 2 * BLOCK);
        }
        if (key > begin)
            for (int i = 0; i < dim; i++) {
                float *row = sum + i * BLOCK;
#pragma omp simd
                for (int j = 0; j < BLOCK; j++) row[j] *= shrink[j];
            }
        product(dim, BLOCK, BLOCK, vt + (size_t)key * dim, BLOCK, weights, BLOCK, sum, BLOCK, 1);
    }
    int count = sight->seq - query < BLOCK ? sight->seq - query : BLOCK;
    for (int j = 0; j < count; j++) {
        float inverse = 1.0f / total[j];
        for (int i = 0; i < dim; i++) out[j * stride + i] = narrow(sum[i * BLOCK + j] * inverse);
        lse[j] = highest[j] * scale + logf(total[j]);
    }
}

/* q [batch][heads][seq][dim], k and v [batch][kv][seq][dim] -> out [batch][seq][heads][dim],
   lse [batch][heads][seq]; starts [batch][seq] or NULL. Returns 0, or 1 without memory. */
int attention_forward(int batch, int heads, int kv, int seq, int dim, int window, const bf16 *q,
                      const bf16 *k, const bf16 *v, const int32_t *starts, bf16 *out, float *lse,
                      int threads) {
    int padded = round_up(seq, BLOCK), blocks = padded / BLOCK, failed = 0;
    size_t size = (size_t)padded * dim;
    bf16 *keys = scratch((size_t)batch * kv * size * 2 * sizeof(bf16));
    if (!keys) return 1;
    bf16 *values = keys + (size_t)batch * kv * size;
#pragma omp parallel num_threads(threads)
    {
        char *space = scratch(sizeof(float) * (BLOCK * BLOCK * 2 + dim * BLOCK * 3));
        bf16 *rows = scratch(size * sizeof(bf16));
        if (!space || !rows) {
#pragma omp atomic write
            failed = 1;
        }
        tiles_open();
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic)
            for (int i = 0; i < batch * kv; i++) {
                padded_rows(k + (size_t)i * seq * dim, seq, padded, dim, keys + i * size);
                padded_rows(v + (size_t)i * seq * dim, seq, padded, dim, rows);
                turn_blocks(padded, dim, rows, values + i * size);
            }
#pragma omp for schedule(dynamic)
            for (int task = 0; task < batch * heads * blocks; task++) {
                /* Long blocks first, so that the last ones to finish are short. */
                int block = blocks - 1 - task / (batch * heads), i = task % (batch * heads);
                int b = i / heads, h = i % heads, query = block * BLOCK;
                size_t pair_of_heads = (size_t)b * kv + h / (heads / kv);
                Sight sight = {seq, padded, window, starts ? starts + (size_t)b * seq : NULL};
                int count = seq - query < BLOCK ? seq - query : BLOCK;
                padded_rows(q + ((size_t)i * seq + query) * dim, count, BLOCK, dim, rows);
                attend_block(&sight, dim, query, rows, keys + pair_of_heads * size,
                             values + pair_of_heads * size,
                             out + (((size_t)b * seq + query) * heads + h) * dim,
                             (long)heads * dim, lse + (size_t)i * seq + query, space);
            }
        }
        tiles_close();
        free(space);
        free(rows);
    }
    free(keys);
    return failed;
}

/* What the backward pass of one query head needs of it, in the orders its products want. */
typedef struct {
    bf16 *kt;           /* keys, [blocks][dim][BLOCK] */
    uint32_t *qt, *gt;  /* queries and output gradients, [blocks][dim / 2][BLOCK] */
    uint32_t *q, *g;    /* the same, [padded / 2][dim] */
    float *delta, *lse; /* [padded] */
    float *dq;          /* [blocks][dim][BLOCK] */
} Head;

static size_t head_bytes(int padded, int dim) {
    size_t size = (size_t)padded * dim;
    return size * (sizeof(bf16) + 4 * sizeof(uint32_t) / 2 + sizeof(float)) +
           (size_t)padded * 2 * sizeof(float) + 64;
}

static Head head_in(char *space, int padded, int dim) {
    size_t size = (size_t)padded * dim;
    Head head;
    head.dq = (float *)space;
    head.delta = head.dq + size;
    head.lse = head.delta + padded;
    head.qt = (uint32_t *)(head.lse + padded);
    head.q = head.qt + size / 2;
    head.gt = head.q + size / 2;
    head.g = head.gt + size / 2;
    head.kt = (bf16 *)(head.g + size / 2);
    return head;
}

/* Gradients of one block of keys from all queries that see it: dk and dv [BLOCK][dim] grow. */
static void backward_block(const Sight *sight, int dim, int key, const Head *head, const bf16 *k,
                           const bf16 *v, float *dk, float *dv, char *space) {
    float *scores = (float *)space;
    float *slopes = scores + BLOCK * BLOCK;
    uint32_t *pairs = (uint32_t *)(slopes + BLOCK * BLOCK);
    bf16 *weights = (bf16 *)(pairs + BLOCK / 2 * BLOCK);
    bf16 *grads = weights + BLOCK * BLOCK;
    int32_t firsts[BLOCK];
    const float scale = 1.0f / sqrtf((float)dim);

    for (int query = key; query < sight->padded; query += BLOCK) {
        /* Starts and windows only move forward: behind the last query that sees us, none does. */
        if (first_seen(sight, query) >= key + BLOCK) break;
        int full = tile_is_full(sight, query, key, firsts);
        size_t at = (size_t)query * dim;
        product(BLOCK, BLOCK, dim, k + (size_t)key * dim, dim, head->qt + at / 2, BLOCK, scores,
                BLOCK, 0);
        product(BLOCK, BLOCK, dim, v + (size_t)key * dim, dim, head->gt + at / 2, BLOCK, slopes,
                BLOCK, 0);
        const float *lse = head->lse + query, *delta = head->delta + query;
        for (int i = 0; i < BLOCK; i++) {
            float *s = scores + i * BLOCK, *d = slopes + i * BLOCK;
            if (!full)
#pragma omp simd
                for (int j = 0; j < BLOCK; j++)
                    s[j] = key + i <= query + j && key + i >= firsts[j] ? s[j] : -INFINITY;
#pragma omp simd
            for (int j = 0; j < BLOCK; j++) {
                s[j] = exp_fast(s[j] * scale - lse[j]);
                d[j] = s[j] * (d[j] - delta[j]) * scale;
            }
        }
        narrow_span(BLOCK * BLOCK, scores, weights);
        narrow_span(BLOCK * BLOCK, slopes, grads);
        pair_rows(BLOCK, BLOCK, grads, BLOCK, pairs, BLOCK);
        product(BLOCK, dim, BLOCK, weights, BLOCK, head->g + at / 2, dim, dv, dim, 1);
        product(BLOCK, dim, BLOCK, grads, BLOCK, head->q + at / 2, dim, dk, dim, 1);
        product(dim, BLOCK, BLOCK, head->kt + (size_t)key * dim, BLOCK, pairs, BLOCK, head->dq + at,
                BLOCK, 1);
    }
}

/* Gradients of `attention_forward`; grad and out are [batch][seq][heads][dim]. */
int attention_backward(int batch, int heads, int kv, int seq, int dim, int window, const bf16 *q,
                       const bf16 *k, const bf16 *v, const int32_t *starts, const bf16 *out,
                       const float *lse, const bf16 *grad, bf16 *dq, bf16 *dk, bf16 *dv,
                       int threads) {
    int padded = round_up(seq, BLOCK), group = heads / kv, failed = 0;
    size_t size = (size_t)padded * dim, real = (size_t)seq * dim;
#pragma omp parallel num_threads(threads)
    {
        char *space = scratch(BLOCK * BLOCK * 16);
        char *prepared = scratch(head_bytes(padded, dim));
        bf16 *rows = scratch(size * 3 * sizeof(bf16));
        float *sums = scratch(size * 2 * sizeof(float));
        if (!space || !prepared || !rows || !sums) {
#pragma omp atomic write
            failed = 1;
        }
        tiles_open();
#pragma omp barrier
        if (!failed) {
            bf16 *keys = rows, *values = rows + size, *one = values + size;
            Head head = head_in(prepared, padded, dim);
#pragma omp for schedule(dynamic)
            for (int i = 0; i < batch * kv; i++) {
                int b = i / kv;
                Sight sight = {seq, padded, window, starts ? starts + (size_t)b * seq : NULL};
                padded_rows(k + i * real, seq, padded, dim, keys);
                padded_rows(v + i * real, seq, padded, dim, values);
                turn_blocks(padded, dim, keys, head.kt);
                memset(sums, 0, size * 2 * sizeof(float));
                for (int g = 0; g < group; g++) {
                    int h = i % kv * group + g;
                    size_t at = (size_t)b * heads + h;
                    padded_rows(q + at * real, seq, padded, dim, one);
                    pair_blocks(padded, dim, one, head.qt);
                    pair_rows(padded, dim, one, dim, head.q, dim);
                    memset(one + real, 0, (size - real) * sizeof(bf16));
                    for (int t = 0; t < seq; t++) {
                        size_t place = (((size_t)b * seq + t) * heads + h) * dim;
                        float delta = 0.0f;
                        memcpy(one + (size_t)t * dim, grad + place, dim * sizeof(bf16));
#pragma omp simd reduction(+ : delta)
                        for (int c = 0; c < dim; c++)
                            delta += widen(grad[place + c]) * widen(out[place + c]);
                        head.delta[t] = delta;
                        head.lse[t] = lse[at * seq + t];
                    }
                    for (int t = seq; t < padded; t++) head.delta[t] = head.lse[t] = 0.0f;
                    pair_blocks(padded, dim, one, head.gt);
                    pair_rows(padded, dim, one, dim, head.g, dim);
                    memset(head.dq, 0, size * sizeof(float));
                    for (int key = 0; key < padded; key += BLOCK)
                        backward_block(&sight, dim, key, &head, keys, values,
                                       sums + (size_t)key * dim, sums + size + (size_t)key * dim,
                                       space);
                    for (int t = 0; t < seq; t++)
                        for (int c = 0; c < dim; c++)
                            dq[at * real + (size_t)t * dim + c] =
                                narrow(head.dq[((size_t)(t / BLOCK) * dim + c) * BLOCK + t % BLOCK]);
                }
                for (size_t c = 0; c < real; c++) {
                    dk[i * real + c] = narrow(sums[c]);
                    dv[i * real + c] = narrow(sums[size + c]);
                }
            }
        }
        tiles_close();
        free(space);
        free(prepared);
        free(rows);
        free(sums);
    }
    return failed;
}
