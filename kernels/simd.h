// Sixteen-lane vectors on top of the GCC/Clang vector extension: one AVX-512 register, or several narrower ones.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace specdec {

constexpr int LANES = 16;

typedef float VecF __attribute__((vector_size(64)));
typedef int32_t VecI __attribute__((vector_size(64)));
typedef uint32_t VecU __attribute__((vector_size(64)));
typedef uint16_t HalfVec __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

constexpr VecI LANE_BITS = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                            1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};

template <class To, class From>
inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

inline void assign(float* p, float x) { *p = x; }
// Round to nearest, ties to even; a NaN stays one.
inline void assign(bf16* p, float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    p->bits = x == x ? uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) : 0x7FC0;
}

inline VecF splat(float x) { return VecF{} + x; }

inline VecF load(const float* p) {
    VecF v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline VecF load(const bf16* p) {
    HalfVec half;
    std::memcpy(&half, p, sizeof half);
    return bit_cast<VecF>(__builtin_convertvector(half, VecU) << 16);
}

inline void store(float* p, VecF v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16* p, VecF v) {
    const VecU bits = bit_cast<VecU>(v);
    const VecU rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const HalfVec half = __builtin_convertvector(v == v ? rounded : VecU{} + 0x7FC0, HalfVec);
    std::memcpy(p, &half, sizeof half);
}

// The value that storing as T and loading again gives.
inline VecF rounded(VecF v, const float*) { return v; }
inline VecF rounded(VecF v, const bf16*) {
    const VecU bits = bit_cast<VecU>(v);
    const VecU kept = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
    return v == v ? bit_cast<VecF>(kept) : v;
}
template <class T>
inline float rounded(float x, const T*) {
    T stored;
    assign(&stored, x);
    return to_float(stored);
}

inline VecF maximum(VecF a, VecF b) { return a > b ? a : b; }

inline float sum(VecF v) {
    float total[LANES];
    std::memcpy(total, &v, sizeof v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) total[i] += total[i + width];
    return total[0];
}

inline float largest(VecF v) {
    float top[LANES];
    std::memcpy(top, &v, sizeof v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) top[i] = top[i] > top[i + width] ? top[i] : top[i + width];
    return top[0];
}

constexpr float LOG2_E = 1.44269504088896340736f;

// 2^x within an ulp or two; below -126 the result is 2^-126 instead of a denormal. exp2(0) is exactly 1.
inline VecF exp2(VecF x) {
    x = x < splat(-126.0f) ? splat(-126.0f) : x;
    x = x > splat(127.0f) ? splat(127.0f) : x;
    // Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
    const VecF shifted = x + 12582912.0f;
    const VecF f = x - (shifted - 12582912.0f);
    VecF poly = splat(1.535336188319500e-4f);
    poly = poly * f + 1.339887440266574e-3f;
    poly = poly * f + 9.618437357674640e-3f;
    poly = poly * f + 5.550332471162809e-2f;
    poly = poly * f + 2.402264791363012e-1f;
    poly = poly * f + 6.931472028550421e-1f;
    poly = poly * f + 1.0f;
    return bit_cast<VecF>(bit_cast<VecU>(poly) + (bit_cast<VecU>(shifted) << 23));
}

inline VecF sigmoid(VecF x) { return 1.0f / (1.0f + exp2(x * -LOG2_E)); }
inline VecF tanh(VecF x) { return 1.0f - 2.0f / (1.0f + exp2(x * (2.0f * LOG2_E))); }

}  // namespace specdec
