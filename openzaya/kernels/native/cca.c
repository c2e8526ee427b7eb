/* From packed latents to attention's queries, keys and values (CCA, arXiv 2510.04476, listing 1).

   packed[batch][seq][(heads + kv) * dim | kv * dim]: queries, keys, then values (the second half of
   their channels is to be taken from the previous token).

   Both convolutions are linear and have two taps each, so together they look two tokens back and
   are one kernel per head, mix[heads + kv][3 * dim (tap, in)][dim], and one constant per channel.
   Then, per head: u = mix(z) + constant + mean of q and k; scaled to length sqrt(dim), keys times
   their temperature; the first `rotary` channels turned. All in fp32, products of bf16.
   depthwise[heads + kv][dim][2], grouped[heads + kv][dim (out)][dim (in)][2]: the earlier token's
   tap first.

   place[batch][seq]: the token's place in its document; what is `d` tokens back counts only from
   place d on. angles are [batch or 1][seq][rotary / 2]. */

#include "common.h"

enum { BLOCK = 64 };

typedef struct {
    int batch, seq, heads, kv, dim, rotary, shared_angles;
    const bf16 *packed;
    const int32_t *place; /* NULL: every row is one document from its first token on */
    const float *depthwise, *depthwise_bias, *grouped, *grouped_bias;
    const float *temperature, *cosine, *sine;
    float floor;
} Work;

static inline int channels(const Work *w) { return (w->heads + w->kv) * w->dim; }
static inline int stride(const Work *w) { return channels(w) + w->kv * w->dim; }
/* Head sizes are compiled in where they are usual: loops over a few channels are then unrolled. */
#define INLINE static inline __attribute__((always_inline))
#define BY_SIZE(dim, call)      \
    switch (dim) {              \
    case 32: call(32); break;   \
    case 64: call(64); break;   \
    case 128: call(128); break; \
    default: call(dim);         \
    }

static inline int place_of(const Work *w, int b, int t) {
    return w->place ? w->place[(size_t)b * w->seq + t] : t;
}
static inline const float *angle(const Work *w, const float *table, int b, int t) {
    return table + ((size_t)(w->shared_angles ? 0 : b) * w->seq + t) * (w->rotary / 2);
}

/* The kernel mix[3 * dim][dim] of one head, and its constant[dim]. */
static void compose(const Work *w, int head, bf16 *mix, float *constant) {
    int dim = w->dim;
    const float *near = w->depthwise + (size_t)head * dim * 2;
    const float *taps = w->grouped + (size_t)head * dim * dim * 2;
    for (int o = 0; o < dim; o++) {
        float sum = w->grouped_bias[head * dim + o];
        for (int i = 0; i < dim; i++) {
            float far_tap = near[2 * i], near_tap = near[2 * i + 1];
            float before = taps[2 * (o * dim + i)], own = taps[2 * (o * dim + i) + 1];
            mix[i * dim + o] = narrow(own * near_tap);
            mix[(dim + i) * dim + o] = narrow(own * far_tap + before * near_tap);
            mix[(2 * dim + i) * dim + o] = narrow(before * far_tap);
            sum += (own + before) * w->depthwise_bias[head * dim + i];
        }
        constant[o] = sum;
    }
}

/* Gradients of the convolutions of one head from those of its kernel, turned [dim][3 * dim], and of
   its constant. */
static void decompose(const Work *w, int head, const float *grad_mix, const float *grad_constant,
                      float *grad_depthwise, float *grad_depthwise_bias, float *grad_grouped,
                      float *grad_grouped_bias) {
    int dim = w->dim;
    const float *near = w->depthwise + (size_t)head * dim * 2;
    size_t at = (size_t)head * dim * dim * 2;
    for (int i = 0; i < dim; i++) {
        float by_near = 0.0f, by_far = 0.0f, by_bias = 0.0f;
        float far_tap = near[2 * i], near_tap = near[2 * i + 1];
        float bias = w->depthwise_bias[head * dim + i];
        for (int o = 0; o < dim; o++) {
            const float *from = grad_mix + (size_t)o * 3 * dim + i;
            float first = from[0], second = from[dim], third = from[2 * dim];
            float constant = grad_constant[o];
            size_t place = at + 2 * (o * dim + i);
            float before = w->grouped[place], own = w->grouped[place + 1];
            grad_grouped[place + 1] = first * near_tap + second * far_tap + constant * bias;
            grad_grouped[place] = second * near_tap + third * far_tap + constant * bias;
            by_near += first * own + second * before;
            by_far += second * own + third * before;
            by_bias += constant * (own + before);
        }
        grad_depthwise[(head * dim + i) * 2] = by_far;
        grad_depthwise[(head * dim + i) * 2 + 1] = by_near;
        grad_depthwise_bias[head * dim + i] = by_bias;
    }
    memcpy(grad_grouped_bias + head * dim, grad_constant, dim * sizeof(float));
}

/* rows[BLOCK][3 * dim] = z[t] | z[t - 1] | z[t - 2] of one head, zero past a border or the end. */
INLINE void look_back(const Work *w, const int dim, int b, int head, int t0, int count,
                      bf16 *rows) {
    size_t step = stride(w);
    const bf16 *z = w->packed + ((size_t)b * w->seq + t0) * step + (size_t)head * dim;
    for (int i = 0; i < count; i++, z += step, rows += 3 * dim) {
        int place = place_of(w, b, t0 + i);
        place = place < t0 + i ? place : t0 + i;
        memcpy(rows, z, dim * sizeof(bf16));
        if (place >= 1)
            memcpy(rows + dim, z - step, dim * sizeof(bf16));
        else
            memset(rows + dim, 0, dim * sizeof(bf16));
        if (place >= 2)
            memcpy(rows + 2 * dim, z - 2 * step, dim * sizeof(bf16));
        else
            memset(rows + 2 * dim, 0, dim * sizeof(bf16));
    }
    memset(rows, 0, (size_t)(BLOCK - count) * 3 * dim * sizeof(bf16));
}

/* Adds constant and mean to u[(group + 1)][BLOCK][dim]: the query heads of kv head `g`, then it. */
INLINE void add_means(const Work *w, const int dim, int b, int g, int t0, int count,
                      const float *constant, float *u) {
    int group = w->heads / w->kv;
    const float half = 0.5f, share = 0.5f / (float)group;
    for (int i = 0; i < count; i++) {
        const bf16 *z = w->packed + ((size_t)b * w->seq + t0 + i) * stride(w);
        const bf16 *key = z + (size_t)(w->heads + g) * dim;
        float *uk = u + ((size_t)group * BLOCK + i) * dim;
        const float *ck = constant + (size_t)(w->heads + g) * dim;
#pragma omp simd
        for (int c = 0; c < dim; c++) uk[c] += ck[c] + half * widen(key[c]);
        for (int j = 0; j < group; j++) {
            int head = g * group + j;
            const bf16 *query = z + (size_t)head * dim;
            float *uq = u + ((size_t)j * BLOCK + i) * dim;
            const float *cq = constant + (size_t)head * dim;
#pragma omp simd
            for (int c = 0; c < dim; c++) {
                float q = widen(query[c]);
                uq[c] += cq[c] + half * (q + widen(key[c]));
                uk[c] += share * q;
            }
        }
    }
}

INLINE float inverse_length(const float *u, const int dim, float floor, int *held) {
    float square = 0.0f;
#pragma omp simd reduction(+ : square)
    for (int c = 0; c < dim; c++) square += u[c] * u[c];
    float length = sqrtf(square);
    *held = length < floor;
    return sqrtf((float)dim) / (*held ? floor : length);
}

/* How many of the first value channels of a kv head are of the token itself. */
INLINE int current_channels(const Work *w, const int dim, int g) {
    int left = w->kv * dim / 2 - g * dim;
    return left < 0 ? 0 : left > dim ? dim : left;
}

/* q[batch][heads][seq][dim], k and v [batch][kv][seq][dim]. */
INLINE void emit(const Work *w, const int dim, int b, int g, int t0, int count, float *u, bf16 *q,
                 bf16 *k, bf16 *v) {
    int group = w->heads / w->kv, turn = w->rotary / 2, held;
    for (int j = 0; j <= group; j++) {
        int is_key = j == group;
        bf16 *out = is_key ? k + ((size_t)b * w->kv + g) * w->seq * dim
                           : q + ((size_t)b * w->heads + g * group + j) * w->seq * dim;
        for (int i = 0; i < count; i++) {
            float *x = u + ((size_t)j * BLOCK + i) * dim;
            bf16 *to = out + (size_t)(t0 + i) * dim;
            float r = inverse_length(x, dim, w->floor, &held);
            if (is_key) r *= w->temperature[g];
            const float *cosine = angle(w, w->cosine, b, t0 + i);
            const float *sine = angle(w, w->sine, b, t0 + i);
            float y[dim];
#pragma omp simd
            for (int c = 0; c < dim; c++) y[c] = x[c] * r;
#pragma omp simd
            for (int c = 0; c < turn; c++) {
                float first = y[c], second = y[c + turn];
                y[c] = first * cosine[c] - second * sine[c];
                y[c + turn] = second * cosine[c] + first * sine[c];
            }
            narrow_span(dim, y, to);
        }
    }
    int now = current_channels(w, dim, g);
    for (int i = 0; i < count; i++) {
        int t = t0 + i;
        const bf16 *from = w->packed + ((size_t)b * w->seq + t) * stride(w) + channels(w) + g * dim;
        bf16 *to = v + (((size_t)b * w->kv + g) * w->seq + t) * dim;
        memcpy(to, from, now * sizeof(bf16));
        if (t > 0 && place_of(w, b, t) > 0)
            memcpy(to + now, from + now - stride(w), (dim - now) * sizeof(bf16));
        else
            memset(to + now, 0, (dim - now) * sizeof(bf16));
    }
}

/* u[(group + 1)][BLOCK][dim] of a block of tokens, and each head's rows that it came from. */
INLINE void mix_block(const Work *w, const int dim, int b, int g, int t0, int count,
                      const uint32_t *mix, const float *constant, bf16 *rows, float *u) {
    int group = w->heads / w->kv;
    for (int j = 0; j <= group; j++) {
        int head = j == group ? w->heads + g : g * group + j;
        bf16 *own = rows + (size_t)j * BLOCK * 3 * dim;
        look_back(w, dim, b, head, t0, count, own);
        product(BLOCK, dim, 3 * dim, own, 3 * dim, mix + (size_t)head * 3 * dim / 2 * dim, dim,
                u + (size_t)j * BLOCK * dim, dim, 0);
    }
    add_means(w, dim, b, g, t0, count, constant, u);
}

/* All kernels composed: paired[heads + kv][3 * dim / 2][dim] as right sides, their constants, and
   (if not NULL) turned[heads + kv][dim / 2][3 * dim]. */
static int compose_all(const Work *w, uint32_t *paired, float *constant, uint32_t *turned) {
    int dim = w->dim;
    size_t kernel = (size_t)3 * dim * dim;
    bf16 *mix = scratch(kernel * sizeof(bf16));
    if (!mix) return 1;
    for (int head = 0; head < w->heads + w->kv; head++) {
        compose(w, head, mix, constant + (size_t)head * dim);
        pair_rows(3 * dim, dim, mix, dim, paired + head * kernel / 2, dim);
        if (turned) pair_columns(3 * dim, dim, mix, dim, turned + head * kernel / 2, 3 * dim);
    }
    free(mix);
    return 0;
}

int cca_forward(int batch, int seq, int heads, int kv, int dim, int rotary, int shared_angles,
                const bf16 *packed, const int32_t *place, const float *depthwise,
                const float *depthwise_bias, const float *grouped, const float *grouped_bias,
                const float *temperature, const float *cosine, const float *sine, float floor,
                bf16 *q, bf16 *k, bf16 *v, int threads) {
    const Work w = {batch, seq, heads, kv, dim, rotary, shared_angles, packed, place,
                    depthwise, depthwise_bias, grouped, grouped_bias,
                    temperature, cosine, sine, floor};
    int group = heads / kv, blocks = (seq + BLOCK - 1) / BLOCK, failed = 0;
    uint32_t *paired = scratch((size_t)(heads + kv) * 3 * dim * dim * sizeof(bf16));
    float *constant = scratch((size_t)channels(&w) * sizeof(float));
    if (!paired || !constant || compose_all(&w, paired, constant, NULL)) {
        free(paired);
        free(constant);
        return 1;
    }
#pragma omp parallel num_threads(threads)
    {
        bf16 *rows = scratch((size_t)(group + 1) * BLOCK * 3 * dim * sizeof(bf16));
        float *u = scratch((size_t)(group + 1) * BLOCK * dim * sizeof(float));
        if (!rows || !u) {
#pragma omp atomic write
            failed = 1;
        }
        tiles_open();
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(static)
            for (int task = 0; task < batch * blocks * kv; task++) {
                int g = task % kv, t0 = task / kv % blocks * BLOCK, b = task / kv / blocks;
                int count = seq - t0 < BLOCK ? seq - t0 : BLOCK;
#define RUN(size)                                                         \
    mix_block(&w, size, b, g, t0, count, paired, constant, rows, u);      \
    emit(&w, size, b, g, t0, count, u, q, k, v)
                BY_SIZE(dim, RUN)
#undef RUN
            }
        }
        tiles_close();
        free(rows);
        free(u);
    }
    free(paired);
    free(constant);
    return failed;
}

/* Gradient of u[BLOCK][dim] of one head from that of its output; returns that of the temperature. */
INLINE float unturn(const Work *w, const int dim, int b, int t0, int count, const bf16 *grad,
                    float temperature, const float *u, float *du) {
    int turn = w->rotary / 2, held;
    float by_temperature = 0.0f;
    for (int i = 0; i < count; i++) {
        const float *x = u + (size_t)i * dim;
        const bf16 *from = grad + (size_t)i * dim;
        float *to = du + (size_t)i * dim;
        const float *cosine = angle(w, w->cosine, b, t0 + i);
        const float *sine = angle(w, w->sine, b, t0 + i);
#pragma omp simd
        for (int c = 0; c < dim; c++) to[c] = widen(from[c]);
#pragma omp simd
        for (int c = 0; c < turn; c++) {
            float first = to[c], second = to[c + turn];
            to[c] = first * cosine[c] + second * sine[c];
            to[c + turn] = second * cosine[c] - first * sine[c];
        }
        float r = inverse_length(x, dim, w->floor, &held), along = 0.0f;
#pragma omp simd reduction(+ : along)
        for (int c = 0; c < dim; c++) along += to[c] * x[c];
        by_temperature += along * r;
        /* Where the floor holds, the length does not depend on u. */
        float slope = held ? 0.0f : along * r * r / (float)dim;
#pragma omp simd
        for (int c = 0; c < dim; c++) to[c] = temperature * r * (to[c] - x[c] * slope);
    }
    memset(du + (size_t)count * dim, 0, (size_t)(BLOCK - count) * dim * sizeof(float));
    return by_temperature;
}

/* Scratch of one thread in the backward pass. */
typedef struct {
    bf16 *rows, *left, *low;
    float *u, *du, *dz, *carry, *by_mix, *by_constant, *by_temperature;
    uint32_t *right;
} Space;

/* Gradients of one block of tokens of one kv head and its query heads. Gradients only flow to
   earlier tokens, so blocks come from the last to the first: what a block owes the two tokens before
   it waits in `carry`, whose row i + 2 is token t0 + i. */
INLINE void backward_block(const Work *w, const int dim, int b, int g, int t0, int count,
                           const uint32_t *paired, const uint32_t *turned, const float *constant,
                           const bf16 *dq, const bf16 *dk, const Space *s, bf16 *grad_packed) {
    int group = w->heads / w->kv;
    size_t kernel = (size_t)3 * dim * dim;
    const size_t block = (size_t)BLOCK * dim, span = (size_t)(BLOCK + 2) * dim;
    mix_block(w, dim, b, g, t0, count, paired, constant, s->rows, s->u);
    for (int j = 0; j <= group; j++) {
        int is_key = j == group, head = is_key ? w->heads + g : g * group + j;
        const bf16 *grad = is_key ? dk + ((size_t)b * w->kv + g) * w->seq * dim
                                  : dq + ((size_t)b * w->heads + head) * w->seq * dim;
        float *d = s->du + j * block, *sum = s->by_constant + (size_t)head * dim;
        float by = unturn(w, dim, b, t0, count, grad + (size_t)t0 * dim,
                          is_key ? w->temperature[g] : 1.0f, s->u + j * block, d);
        if (is_key) s->by_temperature[g] += by;
        for (int i = 0; i < count; i++)
#pragma omp simd
            for (int c = 0; c < dim; c++) sum[c] += d[i * dim + c];
        /* Through the convolutions. */
        narrow_span(BLOCK * dim, d, s->low);
        product(BLOCK, 3 * dim, dim, s->low, dim, turned + head * kernel / 2, 3 * dim, s->dz,
                3 * dim, 0);
        transpose(BLOCK, dim, s->low, dim, s->left, BLOCK);
        pair_rows(BLOCK, 3 * dim, s->rows + 3 * j * block, 3 * dim, s->right, 3 * dim);
        product(dim, 3 * dim, BLOCK, s->left, BLOCK, s->right, 3 * dim, s->by_mix + head * kernel,
                3 * dim, 1);
        float *sums = s->carry + j * span;
        for (int i = 0; i < count; i++)
            for (int back = 0; back < 3 && place_of(w, b, t0 + i) >= back; back++) {
                float *to = sums + (size_t)(i + 2 - back) * dim;
                const float *from = s->dz + ((size_t)i * 3 + back) * dim;
#pragma omp simd
                for (int c = 0; c < dim; c++) to[c] += from[c];
            }
    }
    /* Through the means; then these tokens are complete. */
    const float share = 0.5f / (float)group;
    for (int i = 0; i < count; i++) {
        bf16 *out = grad_packed + ((size_t)b * w->seq + t0 + i) * stride(w);
        const float *by_key = s->du + group * block + (size_t)i * dim;
        float *key = s->carry + group * span + (size_t)(i + 2) * dim;
        float total[dim];
#pragma omp simd
        for (int c = 0; c < dim; c++) total[c] = key[c] + 0.5f * by_key[c];
        for (int j = 0; j < group; j++) {
            const float *d = s->du + j * block + (size_t)i * dim;
            float *query = s->carry + j * span + (size_t)(i + 2) * dim;
#pragma omp simd
            for (int c = 0; c < dim; c++) {
                total[c] += 0.5f * d[c];
                query[c] += 0.5f * d[c] + share * by_key[c];
            }
            narrow_span(dim, query, out + (size_t)(g * group + j) * dim);
        }
        narrow_span(dim, total, out + (size_t)(w->heads + g) * dim);
    }
    for (int j = 0; j <= group; j++) {
        float *sums = s->carry + j * span;
        memmove(sums + block, sums, (size_t)2 * dim * sizeof(float));
        memset(sums, 0, block * sizeof(float));
    }
}

/* Gradient of the value channels of one kv head. */
static void backward_values(const Work *w, int b, int g, const bf16 *dv, bf16 *grad_packed) {
    int dim = w->dim, now = current_channels(w, dim, g);
    const bf16 *from = dv + ((size_t)b * w->kv + g) * w->seq * dim;
    for (int t = 0; t < w->seq; t++, from += dim) {
        bf16 *to = grad_packed + ((size_t)b * w->seq + t) * stride(w) + channels(w) + g * dim;
        memcpy(to, from, now * sizeof(bf16));
        if (t + 1 < w->seq && place_of(w, b, t + 1) > 0)
            memcpy(to + now, from + dim + now, (dim - now) * sizeof(bf16));
        else
            memset(to + now, 0, (dim - now) * sizeof(bf16));
    }
}

/* Gradients of `cca_forward`, all overwritten. */
int cca_backward(int batch, int seq, int heads, int kv, int dim, int rotary, int shared_angles,
                 const bf16 *packed, const int32_t *place, const float *depthwise,
                 const float *depthwise_bias, const float *grouped, const float *grouped_bias,
                 const float *temperature, const float *cosine, const float *sine, float floor,
                 const bf16 *dq, const bf16 *dk, const bf16 *dv, bf16 *grad_packed,
                 float *grad_depthwise, float *grad_depthwise_bias, float *grad_grouped,
                 float *grad_grouped_bias, float *grad_temperature, int threads) {
    const Work w = {batch, seq, heads, kv, dim, rotary, shared_angles, packed, place,
                    depthwise, depthwise_bias, grouped, grouped_bias,
                    temperature, cosine, sine, floor};
    int group = heads / kv, blocks = (seq + BLOCK - 1) / BLOCK, all = heads + kv, failed = 0;
    size_t kernel = (size_t)3 * dim * dim, block = (size_t)(group + 1) * BLOCK * dim;
    size_t sums = all * kernel + channels(&w) + kv;
    uint32_t *paired = scratch(all * kernel * sizeof(bf16));
    uint32_t *turned = scratch(all * kernel * sizeof(bf16));
    float *constant = scratch((size_t)channels(&w) * sizeof(float));
    float *totals = calloc(sums * threads, sizeof(float));
    if (!paired || !turned || !constant || !totals || compose_all(&w, paired, constant, turned)) {
        free(paired);
        free(turned);
        free(constant);
        free(totals);
        return 1;
    }
#pragma omp parallel num_threads(threads)
    {
        Space s;
        s.rows = scratch(block * 3 * sizeof(bf16));
        s.u = scratch(block * sizeof(float));
        s.du = scratch(block * sizeof(float));
        s.dz = scratch((size_t)BLOCK * 3 * dim * sizeof(float));
        s.carry = scratch((size_t)(group + 1) * (BLOCK + 2) * dim * sizeof(float));
        s.left = scratch((size_t)BLOCK * dim * sizeof(bf16));
        s.low = scratch((size_t)BLOCK * dim * sizeof(bf16));
        s.right = scratch((size_t)BLOCK / 2 * 3 * dim * sizeof(uint32_t));
        if (!s.rows || !s.u || !s.du || !s.dz || !s.carry || !s.left || !s.low || !s.right) {
#pragma omp atomic write
            failed = 1;
        }
        tiles_open();
#pragma omp barrier
        if (!failed) {
            s.by_mix = totals + thread_number() * sums;
            s.by_constant = s.by_mix + all * kernel;
            s.by_temperature = s.by_constant + channels(&w);
#pragma omp for schedule(static, 1)
            for (int task = 0; task < batch * kv; task++) {
                int g = task % kv, b = task / kv;
                memset(s.carry, 0, (size_t)(group + 1) * (BLOCK + 2) * dim * sizeof(float));
                for (int t0 = (blocks - 1) * BLOCK; t0 >= 0; t0 -= BLOCK) {
                    int count = seq - t0 < BLOCK ? seq - t0 : BLOCK;
#define RUN(size)                                                                             \
    backward_block(&w, size, b, g, t0, count, paired, turned, constant, dq, dk, &s, grad_packed)
                    BY_SIZE(dim, RUN)
#undef RUN
                }
                backward_values(&w, b, g, dv, grad_packed);
            }
        }
        tiles_close();
        free(s.rows);
        free(s.u);
        free(s.du);
        free(s.dz);
        free(s.carry);
        free(s.left);
        free(s.low);
        free(s.right);
    }
    for (int i = 1; i < threads; i++)
        for (size_t c = 0; c < sums; c++) totals[c] += totals[i * sums + c];
    for (int head = 0; head < all; head++)
        decompose(&w, head, totals + head * kernel, totals + all * kernel + (size_t)head * dim,
                  grad_depthwise, grad_depthwise_bias, grad_grouped, grad_grouped_bias);
    memcpy(grad_temperature, totals + all * kernel + channels(&w), kv * sizeof(float));
    free(paired);
    free(turned);
    free(constant);
    free(totals);
    return failed;
}
