// The element-wise chains of a decoder layer. Everything is computed in float32; small inputs stay on one thread,
// because waking a second one costs more than the work.
#include <type_traits>
#include <vector>

#include "simd.h"

using namespace specdec;

namespace {

constexpr int64_t PARALLEL_ELEMENTS = 1 << 16;
constexpr int64_t PARALLEL_ACTIVATIONS = 1 << 14;

template <class T>
float mean_square(const T* x, int64_t width) {
    VecF totals[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            const VecF v = load(x + i + j * LANES);
            totals[j] += v * v;
        }
    for (; i + LANES <= width; i += LANES) {
        const VecF v = load(x + i);
        totals[0] += v * v;
    }
    float total = sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
    for (; i < width; i++) total += to_float(x[i]) * to_float(x[i]);
    return total / float(width);
}

// Llama rounds the normalised value to the dtype before the weight, Gemma multiplies by 1 + weight in float32.
template <class T>
void normalise(const T* x, const T* weight, T* out, int64_t width, float eps, bool unit_offset) {
    const float factor = 1.0f / std::sqrt(mean_square(x, width) + eps);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const VecF v = load(x + i) * factor, w = load(weight + i);
        store(out + i, unit_offset ? v * (1.0f + w) : rounded(v, x) * w);
    }
    for (; i < width; i++) {
        const float v = to_float(x[i]) * factor, w = to_float(weight[i]);
        assign(out + i, unit_offset ? v * (1.0f + w) : rounded(v, x) * w);
    }
}

template <class T>
void add(T* residual, const T* delta, int64_t width) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(residual + i, load(residual + i) + load(delta + i));
    for (; i < width; i++) assign(residual + i, to_float(residual[i]) + to_float(delta[i]));
}

// `delta` may be null: then only the norm is computed and `x` is left alone.
template <class T>
void rms_norm(T* x, const T* delta, const T* weight, T* out, int64_t rows, int64_t width, float eps,
              bool unit_offset, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > PARALLEL_ELEMENTS)
    for (int64_t n = 0; n < rows; n++) {
        if (delta) add(x + n * width, delta + n * width, width);
        normalise(x + n * width, weight, out + n * width, width, eps, unit_offset);
    }
}

// Both activations are x * sigmoid(y): y = x for SiLU; gelu's (1 + tanh(u)) / 2 is sigmoid(2u).
template <bool GELU>
VecF activate(VecF x) {
    constexpr float TWO_SQRT_2_OVER_PI = 1.5957691216057308f;
    return x * sigmoid(GELU ? TWO_SQRT_2_OVER_PI * (x + 0.044715f * x * x * x) : x);
}

template <class T, bool GELU>
void gated_row(const T* gate, const T* up, T* out, int64_t width) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, activate<GELU>(load(gate + i)) * load(up + i));
    for (; i < width; i++) assign(out + i, activate<GELU>(splat(to_float(gate[i])))[0] * to_float(up[i]));
}

template <class T, bool GELU>
void gated(const T* gate_up, T* out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > PARALLEL_ACTIVATIONS)
    for (int64_t n = 0; n < rows; n++)
        gated_row<T, GELU>(gate_up + 2 * n * width, gate_up + (2 * n + 1) * width, out + n * width, width);
}

// Mirrors `RopeCall` in native.py.
struct RopeCall {
    const void *q_norm, *k_norm;
    int64_t num_heads, num_kv_heads, head_dim, rotary_dim, num_slots;
    float eps;
    int32_t unit_offset;
};

template <class T, class C>
void rotate(const T* x, const C* cos, const C* sin, T* out, int64_t rotary, int64_t dim) {
    const int64_t half = rotary / 2;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const VecF a = load(x + i), b = load(x + half + i);
        store(out + i, a * load(cos + i) - b * load(sin + i));
        store(out + half + i, b * load(cos + half + i) + a * load(sin + half + i));
    }
    for (; i < half; i++) {
        const float a = to_float(x[i]), b = to_float(x[half + i]);
        assign(out + i, a * to_float(cos[i]) - b * to_float(sin[i]));
        assign(out + half + i, b * to_float(cos[half + i]) + a * to_float(sin[half + i]));
    }
    if (out != x) std::memcpy(out + rotary, x + rotary, (dim - rotary) * sizeof(T));
}

template <class T, class C>
void rotate_head(const T* x, const T* norm, const C* cos, const C* sin, T* out, const RopeCall& call) {
    if (norm) {
        normalise(x, norm, out, call.head_dim, call.eps, call.unit_offset);
        x = out;
    }
    rotate(x, cos, sin, out, call.rotary_dim, call.head_dim);
}

template <class T, class C>
int rope_write_kv(const RopeCall& call, const T* qkv, const C* cos, const C* sin, T* k_cache, T* v_cache,
                  const int64_t* slots, T* q_out, int64_t rows, int threads) {
    for (int64_t n = 0; n < rows; n++)
        if (slots[n] < 0 || slots[n] >= call.num_slots) return 1;
    const int64_t dim = call.head_dim, width = (call.num_heads + 2 * call.num_kv_heads) * dim;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > PARALLEL_ELEMENTS)
    for (int64_t n = 0; n < rows; n++) {
        const T *q = qkv + n * width, *k = q + call.num_heads * dim, *v = k + call.num_kv_heads * dim;
        const C *c = cos + n * call.rotary_dim, *s = sin + n * call.rotary_dim;
        T *q_row = q_out + n * call.num_heads * dim, *k_row = k_cache + slots[n] * call.num_kv_heads * dim;
        for (int64_t h = 0; h < call.num_heads; h++)
            rotate_head(q + h * dim, (const T*)call.q_norm, c, s, q_row + h * dim, call);
        for (int64_t h = 0; h < call.num_kv_heads; h++)
            rotate_head(k + h * dim, (const T*)call.k_norm, c, s, k_row + h * dim, call);
        std::memcpy(v_cache + slots[n] * call.num_kv_heads * dim, v, call.num_kv_heads * dim * sizeof(T));
    }
    return 0;
}

}  // namespace

#define SPECDEC_EXPORT(NAME, T)                                                                                  \
    void specdec_rms_norm_##NAME(T* x, const T* delta, const T* weight, T* out, int64_t rows, int64_t width,     \
                                 float eps, int unit_offset, int threads) {                                      \
        rms_norm(x, delta, weight, out, rows, width, eps, unit_offset != 0, threads);                            \
    }                                                                                                            \
    void specdec_silu_mul_##NAME(const T* gate_up, T* out, int64_t rows, int64_t width, int threads) {           \
        gated<T, false>(gate_up, out, rows, width, threads);                                                     \
    }                                                                                                            \
    void specdec_gelu_mul_##NAME(const T* gate_up, T* out, int64_t rows, int64_t width, int threads) {           \
        gated<T, true>(gate_up, out, rows, width, threads);                                                      \
    }                                                                                                            \
    int specdec_rope_write_kv_##NAME(const RopeCall* call, const T* qkv, const void* cos, const void* sin,       \
                                     int wide_angles, T* k_cache, T* v_cache, const int64_t* slots, T* q_out,    \
                                     int64_t rows, int threads) {                                                \
        if (wide_angles)                                                                                         \
            return rope_write_kv(*call, qkv, (const float*)cos, (const float*)sin, k_cache, v_cache, slots,      \
                                 q_out, rows, threads);                                                          \
        return rope_write_kv(*call, qkv, (const T*)cos, (const T*)sin, k_cache, v_cache, slots, q_out, rows,     \
                             threads);                                                                           \
    }

extern "C" {
SPECDEC_EXPORT(float32, float)
SPECDEC_EXPORT(bfloat16, bf16)
}
