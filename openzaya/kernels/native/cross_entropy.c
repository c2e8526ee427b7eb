/* LM head and cross-entropy without logits in memory: bf16 sides, fp32 sums, logits and softmax.

   Logits are computed transposed, [vocabulary][tokens], a block at a time, twice: once for each
   token's log-sum-exp, once for the gradients, when nothing but that sum is needed of the others.
   hidden[tokens][width], weight[vocab][width], targets[tokens] (negative: no loss). */

#include "common.h"

enum { TOKENS = 64, SPAN = 256, ROWS = 64, PANEL = 256 };

/* Rows `first`.. of the weights, `count` of them, zero past the vocabulary. */
static const bf16 *weight_rows(const bf16 *weight, int vocab, int width, int first, int count,
                               bf16 *space) {
    if (first + count <= vocab) return weight + (size_t)first * width;
    size_t real = (size_t)(vocab - first) * width;
    memcpy(space, weight + (size_t)first * width, real * sizeof(bf16));
    memset(space + real, 0, ((size_t)count * width - real) * sizeof(bf16));
    return space;
}

/* xt[padded / TOKENS][width / 2][TOKENS] and x[padded / 2][width] of the tokens, zero past the last:
   a block of tokens lies together, as rows that are powers of two apart would share cache sets. */
static int arrange(int tokens, int padded, int width, const bf16 *hidden, uint32_t *xt,
                   uint32_t *x, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        bf16 *block = scratch((size_t)TOKENS * width * sizeof(bf16));
        if (!block) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(static)
            for (int t = 0; t < padded; t += TOKENS) {
                int count = tokens - t < TOKENS ? tokens - t : TOKENS;
                memcpy(block, hidden + (size_t)t * width, (size_t)count * width * sizeof(bf16));
                memset(block + (size_t)count * width, 0,
                       (size_t)(TOKENS - count) * width * sizeof(bf16));
                pair_columns(TOKENS, width, block, width, xt + (size_t)t / 2 * width, TOKENS);
                if (x) pair_rows(TOKENS, width, block, width, x + (size_t)t / 2 * width, width);
            }
        }
        free(block);
    }
    return failed;
}

/* lse[tokens] and loss[tokens] (zero without a target). */
static int normalisers(int tokens, int padded, int vocab, int width, const bf16 *weight,
                       const int64_t *targets, const uint32_t *xt, float *lse, float *loss,
                       int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *logits = scratch(ROWS * TOKENS * sizeof(float));
        bf16 *space = scratch((size_t)ROWS * width * sizeof(bf16));
        if (!logits || !space) {
#pragma omp atomic write
            failed = 1;
        }
        tiles_open();
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic)
            for (int t = 0; t < padded; t += TOKENS) {
                float highest[TOKENS], total[TOKENS], picked[TOKENS], top[TOKENS];
                int32_t wanted[TOKENS];
                int count = tokens - t < TOKENS ? tokens - t : TOKENS;
                for (int j = 0; j < TOKENS; j++) {
                    highest[j] = -INFINITY;
                    total[j] = picked[j] = 0.0f;
                    wanted[j] = j < count && targets[t + j] >= 0 ? (int32_t)targets[t + j] : -1;
                }
                for (int v = 0; v < vocab; v += ROWS) {
                    int rows = vocab - v < ROWS ? vocab - v : ROWS;
                    product(ROWS, TOKENS, width, weight_rows(weight, vocab, width, v, ROWS, space),
                            width, xt + (size_t)t / 2 * width, TOKENS, logits, TOKENS, 0);
                    memcpy(top, highest, sizeof top);
                    for (int i = 0; i < rows; i++) {
                        const float *row = logits + i * TOKENS;
#pragma omp simd
                        for (int j = 0; j < TOKENS; j++) top[j] = row[j] > top[j] ? row[j] : top[j];
                    }
#pragma omp simd
                    for (int j = 0; j < TOKENS; j++) {
                        total[j] *= exp_fast(highest[j] - top[j]);
                        highest[j] = top[j];
                    }
                    for (int i = 0; i < rows; i++) {
                        const float *row = logits + i * TOKENS;
#pragma omp simd
                        for (int j = 0; j < TOKENS; j++) total[j] += exp_fast(row[j] - top[j]);
                    }
                    for (int j = 0; j < count; j++)
                        if (wanted[j] >= v && wanted[j] < v + rows)
                            picked[j] = logits[(wanted[j] - v) * TOKENS + j];
                }
                for (int j = 0; j < count; j++) {
                    lse[t + j] = highest[j] + logf(total[j]);
                    loss[t + j] = wanted[j] < 0 ? 0.0f : lse[t + j] - picked[j];
                }
            }
        }
        tiles_close();
        free(logits);
        free(space);
    }
    return failed;
}

/* loss[tokens] in nats; with grad_hidden[tokens][width] and grad_weight[vocab][width] (both fp32,
   overwritten) not NULL also the gradients of the sum of the losses. */
int cross_entropy(int tokens, int vocab, int width, const bf16 *hidden, const bf16 *weight,
                  const int64_t *targets, float *loss, float *grad_hidden, float *grad_weight,
                  int threads) {
    int padded = round_up(tokens, TOKENS), failed;
    size_t size = (size_t)padded * width;
    uint32_t *xt = scratch(size * 4), *x = grad_hidden ? xt + size / 2 : NULL;
    float *lse = scratch((size_t)padded * sizeof(float));
    if (!xt || !lse) {
        free(xt);
        free(lse);
        return 1;
    }
    failed = arrange(tokens, padded, width, hidden, xt, x, threads) ||
             normalisers(tokens, padded, vocab, width, weight, targets, xt, lse, loss, threads);
    if (!grad_hidden || failed) {
        free(xt);
        free(lse);
        return failed;
    }
    for (int t = tokens; t < padded; t++) lse[t] = 0.0f;
    /* [threads][blocks][width][TOKENS]: each thread's share of the hidden states' gradient. */
    float *shares = calloc(size * threads, sizeof(float));
    if (!shares) {
        free(xt);
        free(lse);
        return 1;
    }
#pragma omp parallel num_threads(threads)
    {
        float *logits = scratch(PANEL * TOKENS * sizeof(float));
        bf16 *slopes = scratch(PANEL * SPAN * sizeof(bf16));
        uint32_t *pairs = scratch(PANEL * TOKENS * sizeof(bf16));
        bf16 *space = scratch((size_t)PANEL * width * sizeof(bf16));
        bf16 *turned = scratch((size_t)PANEL * width * sizeof(bf16));
        float *panel = scratch((size_t)PANEL * width * sizeof(float));
        float *grads = shares + thread_number() * size;
        if (!logits || !slopes || !pairs || !space || !turned || !panel) {
#pragma omp atomic write
            failed = 1;
        }
        tiles_open();
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(static, 1)
            for (int v = 0; v < vocab; v += PANEL) {
                int rows = vocab - v < PANEL ? vocab - v : PANEL;
                const bf16 *w = weight_rows(weight, vocab, width, v, PANEL, space);
                transpose(PANEL, width, w, width, turned, PANEL);
                for (int t = 0; t < padded; t += TOKENS) {
                    int count = tokens - t < TOKENS ? tokens - t : TOKENS;
                    float share[TOKENS]; /* 0 silences a token without a target */
                    for (int j = 0; j < TOKENS; j++)
                        share[j] = j < count && targets[t + j] >= 0 ? 1.0f : 0.0f;
                    product(PANEL, TOKENS, width, w, width, xt + (size_t)t / 2 * width, TOKENS, logits,
                            TOKENS, 0);
                    for (int i = 0; i < rows; i++) {
                        float *row = logits + i * TOKENS;
#pragma omp simd
                        for (int j = 0; j < TOKENS; j++)
                            row[j] = exp_fast(row[j] - lse[t + j]) * share[j];
                    }
                    memset(logits + rows * TOKENS, 0,
                           (size_t)(PANEL - rows) * TOKENS * sizeof(float));
                    for (int j = 0; j < count; j++)
                        if (targets[t + j] >= v && targets[t + j] < v + rows)
                            logits[(targets[t + j] - v) * TOKENS + j] -= 1.0f;
                    int within = t % SPAN;
                    narrow_rows(PANEL, TOKENS, logits, TOKENS, slopes + within, SPAN);
                    pair_rows(PANEL, TOKENS, slopes + within, SPAN, pairs, TOKENS);
                    product(width, TOKENS, PANEL, turned, PANEL, pairs, TOKENS,
                            grads + (size_t)t * width, TOKENS, 1);
                    /* The gradient of the weights in longer stretches, as it lies in memory. */
                    if (within + TOKENS == SPAN || t + TOKENS == padded)
                        product(PANEL, width, within + TOKENS, slopes, SPAN,
                                x + (size_t)(t - within) / 2 * width, width, panel, width,
                                t >= SPAN);
                }
                memcpy(grad_weight + (size_t)v * width, panel,
                       (size_t)rows * width * sizeof(float));
            }
#pragma omp for schedule(static)
            for (int t = 0; t < tokens; t++) {
                const float *from = shares + (size_t)(t / TOKENS) * width * TOKENS + t % TOKENS;
                for (int c = 0; c < width; c++) {
                    float sum = 0.0f;
                    for (int i = 0; i < threads; i++) sum += from[i * size + c * TOKENS];
                    grad_hidden[(size_t)t * width + c] = sum;
                }
            }
        }
        tiles_close();
        free(logits);
        free(slopes);
        free(pairs);
        free(space);
        free(turned);
        free(panel);
    }
    free(shares);
    free(xt);
    free(lse);
    return failed;
}
