/* Residual merge and RMSNorm in one pass: what every sub-layer ends and begins with.

   stream' = bias + stream * residual_scale + output * output_scale
   normed  = stream' * r * gain,  r = 1 / sqrt(mean(stream'^2) + eps)

   Without `output` there is no merge; without `gain` no norm. Rows are tokens, [rows][width]. */

#include "common.h"

int merge_norm_forward(int rows, int width, const float *stream, const bf16 *output,
                       const float *bias, const float *residual_scale, const float *output_scale,
                       const float *gain, float eps, float *merged, bf16 *normed, float *inverse,
                       int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int i = 0; i < rows; i++) {
        const float *x = stream + (size_t)i * width;
        if (output) {
            const bf16 *y = output + (size_t)i * width;
            float *sum = merged + (size_t)i * width;
#pragma omp simd
            for (int c = 0; c < width; c++)
                sum[c] = bias[c] + x[c] * residual_scale[c] + widen(y[c]) * output_scale[c];
            x = sum;
        }
        if (!gain) continue;
        float square = 0.0f;
#pragma omp simd reduction(+ : square)
        for (int c = 0; c < width; c++) square += x[c] * x[c];
        float r = 1.0f / sqrtf(square / (float)width + eps);
        bf16 *out = normed + (size_t)i * width;
#pragma omp simd
        for (int c = 0; c < width; c++) out[c] = narrow(x[c] * r * gain[c]);
        inverse[i] = r;
    }
    return 0;
}

/* Gradients of `merge_norm_forward`.

   grad_merged (NULL: none arrives) is of stream', grad_normed of normed. Column sums over tokens:
   sums[0] of d stream', [1] of d stream' * stream, [2] of d stream' * output, [3] of the gain;
   [4][width], overwritten. */
int merge_norm_backward(int rows, int width, const float *stream, const bf16 *output,
                        const float *residual_scale, const float *output_scale, const float *gain,
                        const float *merged, const float *inverse, const float *grad_merged,
                        const bf16 *grad_normed, float *grad_stream, bf16 *grad_output,
                        float *sums, int threads) {
    size_t part = (size_t)5 * width;
    float *parts = calloc(part * threads, sizeof(float));
    if (!parts) return 1;
#pragma omp parallel num_threads(threads)
    {
        float *total = parts + thread_number() * part, *by_stream = total + width;
        float *by_output = total + 2 * width, *by_gain = total + 3 * width, *grad = total + 4 * width;
#pragma omp for schedule(static)
        for (int i = 0; i < rows; i++) {
            size_t at = (size_t)i * width;
            const float *incoming = grad_merged ? grad_merged + at : NULL;
            if (gain) {
                const float *x = merged + at;
                const bf16 *g = grad_normed + at;
                float r = inverse[i], along = 0.0f;
#pragma omp simd reduction(+ : along)
                for (int c = 0; c < width; c++) along += widen(g[c]) * gain[c] * x[c];
                along *= r * r * r / (float)width;
#pragma omp simd
                for (int c = 0; c < width; c++) {
                    float slope = widen(g[c]);
                    by_gain[c] += slope * x[c] * r;
                    grad[c] = slope * gain[c] * r - x[c] * along;
                }
                if (incoming)
#pragma omp simd
                    for (int c = 0; c < width; c++) grad[c] += incoming[c];
            } else
                memcpy(grad, incoming, (size_t)width * sizeof(float));
            float *out = grad_stream + at;
            if (!output) {
                memcpy(out, grad, (size_t)width * sizeof(float));
                continue;
            }
            const float *x = stream + at;
            const bf16 *y = output + at;
            bf16 *other = grad_output + at;
#pragma omp simd
            for (int c = 0; c < width; c++) {
                total[c] += grad[c];
                by_stream[c] += grad[c] * x[c];
                by_output[c] += grad[c] * widen(y[c]);
                out[c] = grad[c] * residual_scale[c];
                other[c] = narrow(grad[c] * output_scale[c]);
            }
        }
    }
    memset(sums, 0, (size_t)4 * width * sizeof(float));
    for (int i = 0; i < threads; i++)
        for (int c = 0; c < 4 * width; c++) sums[c] += parts[i * part + c];
    free(parts);
    return 0;
}
