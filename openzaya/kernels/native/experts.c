/* SwiGLU experts for top-1 routing, one expert after the other over all of its tokens.

   Weights stay in fp32 in memory and are narrowed a panel at a time. Activations of a block of
   tokens are held transposed, [channels][tokens]: there the forward products take the weights as
   they lie, and the gradient of the weights takes the activations as they lie.

   gate_up[experts][2 * inner][hidden], gate rows first; down[experts][hidden][inner]. */

#include "common.h"

enum { BLOCK = 64, PANEL = 64, STEP = 32 };

static inline int lower(int a, int b) { return a < b ? a : b; }

/* A leading dimension that is not a power of two, so that rows fall into different cache sets. */
static inline int spread(int size) { return size + 32; }

/* order[tokens]: the tokens of expert 0, then 1, ..., then all others (the skip class);
   begins[experts + 1]: where each one's start. */
int sort_by_expert(int tokens, int experts, const int64_t *index, int32_t *order, int32_t *begins,
                   int threads) {
    (void)threads;
    int32_t *next = calloc((size_t)experts + 1, sizeof(int32_t));
    if (!next) return 1;
    for (int t = 0; t < tokens; t++)
        next[index[t] >= 0 && index[t] < experts ? index[t] : experts]++;
    int32_t start = 0;
    for (int e = 0; e <= experts; e++) {
        int32_t count = next[e];
        next[e] = begins[e] = start;
        start += count;
    }
    for (int t = 0; t < tokens; t++)
        order[next[index[t] >= 0 && index[t] < experts ? index[t] : experts]++] = t;
    free(next);
    return 0;
}

/* Columns of `wide`: each expert's tokens start at a multiple of STEP. */
static inline long kept_columns(int tokens, int experts) {
    return spread(round_up(tokens, STEP) + experts * STEP);
}

/* places[experts + 1]: where each expert's columns start. Returns the most tokens of one, padded. */
static int arrange(int experts, const int32_t *begins, int32_t *places) {
    int longest = 0;
    places[0] = 0;
    for (int e = 0; e < experts; e++) {
        int count = begins[e + 1] - begins[e];
        places[e + 1] = places[e] + round_up(count, STEP);
        longest = count > longest ? count : longest;
    }
    return round_up(longest, BLOCK);
}

/* rows[size][width] = x of the `count` tokens listed, zero after them. */
static void gather(int size, int count, int width, const bf16 *x, const int32_t *tokens,
                   bf16 *rows) {
    for (int i = 0; i < count; i++)
        memcpy(rows + (size_t)i * width, x + (size_t)tokens[i] * width, width * sizeof(bf16));
    memset(rows + (size_t)count * width, 0, (size_t)(size - count) * width * sizeof(bf16));
}

/* out[token][first ..] = values[PANEL][BLOCK] turned, for the tokens listed. */
static void emit(int count, int columns, int width, int first, const float *values,
                 const int32_t *tokens, bf16 *out) {
    bf16 low[PANEL * BLOCK], turned[BLOCK * PANEL];
    narrow_rows(PANEL, BLOCK, values, BLOCK, low, BLOCK);
    transpose(PANEL, BLOCK, low, BLOCK, turned, PANEL);
    for (int j = 0; j < count; j++)
        memcpy(out + (size_t)tokens[j] * width + first, turned + j * PANEL, columns * sizeof(bf16));
}

/* Tokens of the skip class: x times its weight, or zero. */
static void skip(const int32_t *begins, int experts, int tokens, int hidden, const bf16 *x,
                 const int32_t *order, const float *weight, int identity, bf16 *out) {
    for (int i = begins[experts]; i < tokens; i++) {
        size_t at = (size_t)order[i] * hidden;
        float w = identity ? weight[order[i]] : 0.0f;
        for (int c = 0; c < hidden; c++) out[at + c] = narrow(widen(x[at + c]) * w);
    }
}

/* out[tokens][hidden] = weight times each token's expert. wide[2 * inner][kept_columns] keeps
   gate and up of each expert's tokens for the backward pass. */
int experts_forward(int tokens, int hidden, int inner, int experts, int identity, const bf16 *x,
                    const int32_t *order, const int32_t *begins, const float *weight,
                    const float *gate_up, const float *down, bf16 *wide, bf16 *out, int threads) {
    int failed = 0, longest;
    const long ldw = kept_columns(tokens, experts);
    int32_t *places = scratch((size_t)(experts + 1) * sizeof(int32_t));
    if (!places) return 1;
    longest = arrange(experts, begins, places);
    skip(begins, experts, tokens, hidden, x, order, weight, identity, out);
#pragma omp parallel num_threads(threads)
    {
        int widest = hidden > inner ? hidden : inner;
        bf16 *rows = scratch((size_t)BLOCK * hidden * sizeof(bf16));
        uint32_t *xt = scratch((size_t)longest * hidden * sizeof(bf16));
        uint32_t *acts = scratch((size_t)longest * inner * sizeof(bf16));
        bf16 *panel = scratch((size_t)2 * PANEL * spread(widest) * sizeof(bf16));
        float *gate = scratch(2 * PANEL * BLOCK * sizeof(float)), *up = gate + PANEL * BLOCK;
        if (!rows || !xt || !acts || !panel || !gate) {
#pragma omp atomic write
            failed = 1;
        }
        tiles_open();
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic)
            for (int e = 0; e < experts; e++) {
                int total = begins[e + 1] - begins[e];
                const int32_t *own = order + begins[e];
                const float *w1 = gate_up + (size_t)e * 2 * inner * hidden;
                const float *w2 = down + (size_t)e * hidden * inner;
                for (int t = 0; t < total; t += BLOCK) {
                    gather(BLOCK, lower(total - t, BLOCK), hidden, x, own + t, rows);
                    pair_columns(BLOCK, hidden, rows, hidden, xt + (size_t)t / 2 * hidden, BLOCK);
                }
                if (!total) continue;
                long lda = spread(hidden);
                for (int i = 0; i < inner; i += PANEL) {
                    int height = lower(inner - i, PANEL);
                    narrow_rows(height, hidden, w1 + (size_t)i * hidden, hidden, panel, lda);
                    narrow_rows(height, hidden, w1 + (size_t)(inner + i) * hidden, hidden,
                                panel + PANEL * lda, lda);
                    for (int t = 0; t < total; t += BLOCK) {
                        int count = lower(total - t, BLOCK), size = round_up(count, STEP);
                        const uint32_t *right = xt + (size_t)t / 2 * hidden;
                        product(height, size, hidden, panel, lda, right, BLOCK, gate, BLOCK, 0);
                        product(height, size, hidden, panel + PANEL * lda, lda, right, BLOCK, up,
                                BLOCK, 0);
                        uint32_t *act = acts + ((size_t)t * inner + (size_t)i * BLOCK) / 2;
                        for (int r = 0; r < height; r += 2) {
                            const float *g = gate + r * BLOCK, *u = up + r * BLOCK;
                            float both[2 * BLOCK];
#pragma omp simd
                            for (int j = 0; j < 2 * BLOCK; j++)
                                both[j] = g[j] / (1.0f + exp_fast(-g[j])) * u[j];
                            pair_span(BLOCK, both, both + BLOCK, act + r / 2 * BLOCK);
                        }
                        bf16 *kept = wide + (size_t)i * ldw + places[e] + t;
                        narrow_rows(height, size, gate, BLOCK, kept, ldw);
                        narrow_rows(height, size, up, BLOCK, kept + (size_t)inner * ldw, ldw);
                    }
                }
                lda = spread(inner);
                for (int i = 0; i < hidden; i += PANEL) {
                    int height = lower(hidden - i, PANEL);
                    narrow_rows(height, inner, w2 + (size_t)i * inner, inner, panel, lda);
                    for (int t = 0; t < total; t += BLOCK) {
                        int count = lower(total - t, BLOCK), size = round_up(count, STEP);
                        float share[BLOCK] = {0};
                        for (int j = 0; j < count; j++) share[j] = weight[own[t + j]];
                        product(height, size, inner, panel, lda, acts + (size_t)t * inner / 2, BLOCK,
                                gate, BLOCK, 0);
                        for (int r = 0; r < height; r++)
#pragma omp simd
                            for (int j = 0; j < BLOCK; j++) gate[r * BLOCK + j] *= share[j];
                        emit(count, height, hidden, i, gate, own + t, out);
                    }
                }
            }
        }
        tiles_close();
        free(rows);
        free(xt);
        free(acts);
        free(panel);
        free(gate);
    }
    free(places);
    return failed;
}

/* Gradients of `experts_forward`. grad_gate_up and grad_down (fp32, overwritten) may be NULL. */
int experts_backward(int tokens, int hidden, int inner, int experts, int identity, const bf16 *x,
                     const int32_t *order, const int32_t *begins, const float *weight,
                     const float *gate_up, const float *down, const bf16 *wide, const bf16 *grad,
                     bf16 *grad_x, float *grad_weight, float *grad_gate_up, float *grad_down,
                     int threads) {
    int failed = 0, longest;
    const long ldw = kept_columns(tokens, experts);
    int32_t *places = scratch((size_t)(experts + 1) * sizeof(int32_t));
    if (!places) return 1;
    longest = arrange(experts, begins, places);
    skip(begins, experts, tokens, hidden, grad, order, weight, identity, grad_x);
    for (int i = begins[experts]; i < tokens; i++) {
        size_t at = (size_t)order[i] * hidden;
        float sum = 0.0f;
        if (identity)
            for (int c = 0; c < hidden; c++) sum += widen(grad[at + c]) * widen(x[at + c]);
        grad_weight[order[i]] = sum;
    }
#pragma omp parallel num_threads(threads)
    {
        const long ldt = spread(longest), ldx = hidden + 16, ldi = inner + 16;
        int widest = hidden > 2 * inner ? hidden : 2 * inner;
        size_t square = (size_t)PANEL * BLOCK;
        bf16 *rows = scratch((size_t)BLOCK * hidden * sizeof(bf16));
        uint32_t *gp = scratch((size_t)longest * hidden * sizeof(bf16)); /* [blocks][h/2][BLOCK] */
        bf16 *ga = scratch((size_t)hidden * ldt * sizeof(bf16));         /* [hidden][tokens] */
        uint32_t *xr = scratch((size_t)longest / 2 * ldx * sizeof(uint32_t)); /* [tokens/2][h] */
        bf16 *dwa = scratch((size_t)2 * inner * ldt * sizeof(bf16));     /* [2 inner][tokens] */
        uint32_t *dwp = scratch((size_t)longest * inner * 2 * sizeof(bf16));
        uint32_t *actp = scratch((size_t)longest / 2 * ldi * sizeof(uint32_t));
        bf16 *panel = scratch((size_t)PANEL * spread(widest) * sizeof(bf16));
        bf16 *strip = scratch((size_t)PANEL * widest * sizeof(bf16));
        float *slope = scratch(square * sizeof(float));
        bf16 *act = scratch(square * sizeof(bf16));
        float *by_weight = scratch((size_t)longest * sizeof(float));
        if (!rows || !gp || !ga || !xr || !dwa || !dwp || !actp || !panel || !strip || !slope ||
            !act || !by_weight) {
#pragma omp atomic write
            failed = 1;
        }
        tiles_open();
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic)
            for (int e = 0; e < experts; e++) {
                int total = begins[e + 1] - begins[e], padded = round_up(total, STEP);
                const int32_t *own = order + begins[e];
                size_t first = (size_t)e * 2 * inner * hidden, second = (size_t)e * hidden * inner;
                if (!total) {
                    if (grad_gate_up)
                        memset(grad_gate_up + first, 0, (size_t)2 * inner * hidden * sizeof(float));
                    if (grad_down)
                        memset(grad_down + second, 0, (size_t)hidden * inner * sizeof(float));
                    continue;
                }
                for (int t = 0; t < total; t += BLOCK) {
                    int count = lower(total - t, BLOCK);
                    gather(BLOCK, count, hidden, x, own + t, rows);
                    pair_rows(BLOCK, hidden, rows, hidden, xr + (size_t)t / 2 * ldx, ldx);
                    gather(BLOCK, count, hidden, grad, own + t, rows);
                    pair_columns(BLOCK, hidden, rows, hidden, gp + (size_t)t / 2 * hidden, BLOCK);
                    transpose(BLOCK, hidden, rows, hidden, ga + t, ldt);
                }
                memset(by_weight, 0, (size_t)total * sizeof(float));
                /* Through the second product and SwiGLU. */
                for (int i = 0; i < inner; i += PANEL) {
                    int height = lower(inner - i, PANEL);
                    narrow_rows(hidden, height, down + second + i, inner, strip, PANEL);
                    transpose(hidden, height, strip, PANEL, panel, spread(hidden));
                    for (int t = 0; t < total; t += BLOCK) {
                        int count = lower(total - t, BLOCK), size = round_up(count, STEP);
                        float share[BLOCK] = {0}, sum[BLOCK] = {0};
                        for (int j = 0; j < count; j++) share[j] = weight[own[t + j]];
                        product(height, size, hidden, panel, spread(hidden),
                                gp + (size_t)t / 2 * hidden, BLOCK, slope, BLOCK, 0);
                        for (int r = 0; r < height; r++) {
                            const bf16 *gates = wide + (size_t)(i + r) * ldw + places[e] + t;
                            const bf16 *ups = gates + (size_t)inner * ldw;
                            const float *d = slope + r * BLOCK;
                            bf16 *to = dwa + (size_t)(i + r) * ldt + t;
                            float acts[BLOCK] = {0}, dg[BLOCK] = {0}, du[BLOCK] = {0};
#pragma omp simd
                            for (int j = 0; j < size; j++) {
                                float g = widen(gates[j]), u = widen(ups[j]);
                                float sigmoid = 1.0f / (1.0f + exp_fast(-g)), silu = g * sigmoid;
                                float scaled = d[j] * share[j];
                                sum[j] += silu * u * d[j];
                                acts[j] = silu * u * share[j];
                                du[j] = scaled * silu;
                                dg[j] = scaled * u * (sigmoid + silu * (1.0f - sigmoid));
                            }
                            narrow_span(BLOCK, acts, act + r * BLOCK);
                            narrow_span(BLOCK, dg, to);
                            narrow_span(BLOCK, du, to + inner * ldt);
                        }
                        for (int j = 0; j < count; j++) by_weight[t + j] += sum[j];
                        pair_columns(height, BLOCK, act, BLOCK, actp + (size_t)t / 2 * ldi + i, ldi);
                        uint32_t *right = dwp + (size_t)t * inner;
                        pair_rows(height, BLOCK, dwa + (size_t)i * ldt + t, ldt,
                                  right + (size_t)i / 2 * BLOCK, BLOCK);
                        pair_rows(height, BLOCK, dwa + (size_t)(inner + i) * ldt + t, ldt,
                                  right + (size_t)(inner + i) / 2 * BLOCK, BLOCK);
                    }
                }
                for (int t = 0; t < total; t++) grad_weight[own[t]] = by_weight[t];
                /* Gradients of the weights, as long products over all tokens. */
                if (grad_gate_up)
                    for (int i = 0; i < 2 * inner; i += PANEL)
                        product(lower(2 * inner - i, PANEL), hidden, padded, dwa + (size_t)i * ldt,
                                ldt, xr, ldx, grad_gate_up + first + (size_t)i * hidden, hidden, 0);
                if (grad_down)
                    for (int i = 0; i < hidden; i += PANEL)
                        product(lower(hidden - i, PANEL), inner, padded, ga + (size_t)i * ldt, ldt,
                                actp, ldi, grad_down + second + (size_t)i * inner, inner, 0);
                /* Through the first product. */
                for (int i = 0; i < hidden; i += PANEL) {
                    int height = lower(hidden - i, PANEL);
                    narrow_rows(2 * inner, height, gate_up + first + i, hidden, strip, PANEL);
                    transpose(2 * inner, height, strip, PANEL, panel, spread(2 * inner));
                    for (int t = 0; t < total; t += BLOCK) {
                        int count = lower(total - t, BLOCK), size = round_up(count, STEP);
                        product(height, size, 2 * inner, panel, spread(2 * inner),
                                dwp + (size_t)t * inner, BLOCK, slope, BLOCK, 0);
                        emit(count, height, hidden, i, slope, own + t, grad_x);
                    }
                }
            }
        }
        tiles_close();
        free(rows);
        free(gp);
        free(ga);
        free(xr);
        free(dwa);
        free(dwp);
        free(actp);
        free(panel);
        free(strip);
        free(slope);
        free(act);
        free(by_weight);
    }
    free(places);
    return failed;
}
