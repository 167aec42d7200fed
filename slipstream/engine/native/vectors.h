// SIMD vectors as wide as the processor's registers (512, 256 or 128 bits), by the compiler's vector types, and
// intrinsics where these are faster. A wider type would be kept in memory. bfloat16 is the upper half of a float32;
// rounding to it is to nearest, ties to even. Reductions over lanes have a fixed order.

#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;  // floats of a vector: 4, 8 or 16
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef uint16_t bf16;

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12  // GCC 11 has it by another name
#define __builtin_shufflevector(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

inline Floats load(const float* p) { Floats v; memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, Floats v) { memcpy(p, &v, sizeof v); }
inline Words load_words(const void* p) { Words v; memcpy(&v, p, sizeof v); return v; }
inline Floats splat(float x) { return x - Floats{}; }

inline Words load_splat(const void* p) {  // its first four bytes, in all lanes
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return Words{} + four;
}

inline bool any(Words lanes) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#else
    uint32_t some = 0;
    for (int i = 0; i < LANES; i++) some |= lanes[i];
    return some;
#endif
}

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// sum + a * b, in the register of the sum: by AVX2 a compiler, left to itself, moves sums of many rows to memory and back.
inline Floats add_product(Floats sum, Floats a, Floats b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
#else
    return fma(a, b, sum);
#endif
}

// The same address, but unknown to the compiler: it reads the memory anew and keeps no register for it.
template <class T>
inline const T* opaque(const T* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm volatile("" : "+r"(p));
#endif
    return p;
}

inline Floats load_bf16(const bf16* p) {
    Shorts v;
    memcpy(&v, p, sizeof v);
#if defined(__AVX512F__)
    return (Floats)((Words)_mm512_cvtepu16_epi32((__m256i)v) << 16);
#elif defined(__AVX2__)
    return (Floats)((Words)_mm256_cvtepu16_epi32((__m128i)v) << 16);
#else
    return (Floats)(__builtin_convertvector(v, Words) << 16);
#endif
}

inline Words to_bf16(Floats v) {  // to bfloat16, in the lower half of each lane
    Words bits = (Words)v;
    Words near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Words exact = (Words)(v == v);  // a rounded NaN could become a number
    return (near & exact) | (~exact & 0x7fc0);
}

inline void store_bf16(bf16* p, Floats v) {
    Shorts result = __builtin_convertvector(to_bf16(v), Shorts);
    memcpy(p, &result, sizeof result);
}

#if defined(__AVX512BW__)
// Two vectors of bfloat16, interleaved: `first` gets the first four of each eight columns, `second` the others.
inline void interleave(Words one, Words other, Words& first, Words& second) {
    first = (Words)_mm512_unpacklo_epi16((__m512i)one, (__m512i)other);
    second = (Words)_mm512_unpackhi_epi16((__m512i)one, (__m512i)other);
}

// Sums of such columns, to bfloat16 in the columns' order.
inline void store_interleaved(bf16* p, Floats first, Floats second) {
    const __m512i columns = _mm512_packus_epi32((__m512i)to_bf16(first), (__m512i)to_bf16(second));
    memcpy(p, &columns, sizeof columns);
}
#endif

// The even and the odd elements of pairs of bfloat16, as float32.
inline Floats even_bf16(Words pairs) { return (Floats)(pairs << 16); }
inline Floats odd_bf16(Words pairs) { return (Floats)(pairs & 0xffff0000u); }

// Weights in the form that products use: pairs of bfloat16 where one instruction multiplies and adds such, else widened.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
constexpr bool HAS_BF16_DOT = true;
typedef Words Pairs;
inline Pairs to_pairs(Words v) { return v; }

// sums + the products of pairs of bfloat16
inline Floats dot_pairs(Floats sums, Words a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}
#else
constexpr bool HAS_BF16_DOT = false;
struct Pairs { Floats even, odd; };
inline Pairs to_pairs(Words v) { return {even_bf16(v), odd_bf16(v)}; }
#endif

// A line of 4 LANES int8 numbers from -127 to 127 becomes two vectors of pairs: the number at `int8_line_index(i, half)` is one
// half of pair i, of 2 LANES. `int8_line_byte` encodes a number.
#if defined(__AVX512VBMI__)  // bfloat16 holds such numbers exactly
constexpr int int8_line_index(int i, int half) { return 16 * (i % 16 / 4) + 8 * (i / 16) + 2 * (i % 4) + half; }
inline uint8_t int8_line_byte(int8_t number) { return number < 0 ? 0x80 | -number : number; }

template <int SHIFT>  // byte SHIFT / 8 of the float32 of each absolute value
constexpr std::array<uint8_t, 128> bf16_byte_table() {
    std::array<uint8_t, 128> bytes{};
    for (int size = 0; size < 128; size++) bytes[size] = uint8_t(std::bit_cast<uint32_t>(float(size)) >> SHIFT);
    return bytes;
}

inline void int8_line_to_bf16(const uint8_t* line, Words& first, Words& second) {
    static constexpr auto lower = bf16_byte_table<16>(), upper = bf16_byte_table<24>();
    __m512i v = _mm512_loadu_si512(line);  // the look-up reads seven bits: the absolute value
    __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(&lower), v, _mm512_loadu_si512(&lower[64]));
    __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(&upper), v, _mm512_loadu_si512(&upper[64]));
    high = _mm512_ternarylogic_epi32(high, v, _mm512_set1_epi8(int8_t(0x80)), 0xf8);  // high | (v & sign)
    first = (Words)_mm512_unpacklo_epi8(low, high), second = (Words)_mm512_unpackhi_epi8(low, high);
}

inline void int8_line_to_pairs(const uint8_t* line, Pairs& first, Pairs& second) {
    Words one, other;
    int8_line_to_bf16(line, one, other);
    first = to_pairs(one), second = to_pairs(other);
}
#else
constexpr int int8_line_index(int i, int half) { return LANES * (2 * (i / LANES) + half) + i % LANES; }
inline uint8_t int8_line_byte(int8_t number) { return uint8_t(number); }

inline Floats load_int8(const uint8_t* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
#else
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    Bytes v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, Floats);
#endif
}

inline void int8_line_to_pairs(const uint8_t* line, Pairs& first, Pairs& second) {
    first = {load_int8(line), load_int8(line + LANES)};
    second = {load_int8(line + 2 * LANES), load_int8(line + 3 * LANES)};
}
#endif

// 2 LANES int8 numbers as int16, two in each lane; `dot_int16_pairs`: the sum of the two products in each lane.
inline Ints load_int8_pairs(const void* p) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
    typedef int8_t Bytes __attribute__((vector_size(2 * LANES)));
    typedef int16_t Wide __attribute__((vector_size(4 * LANES)));
    Bytes v;
    memcpy(&v, p, sizeof v);
    return (Ints)__builtin_convertvector(v, Wide);
#endif
}

inline Ints dot_int16_pairs(Ints a, Ints b) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

#if defined(__AVX512VNNI__)
// sums + the four products in each lane of a's unsigned bytes and b's signed bytes
inline Words dot_int8_quads(Words sums, Words a, Words b) {
    return (Words)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
}
#endif

template <int S, int... I>
inline Floats swap_neighbours(Floats v, std::integer_sequence<int, I...>) {  // each lane's neighbour across bit S
    return __builtin_shufflevector(v, v, (I ^ S)...);
}

template <int S = LANES / 2>
inline float reduce_add(Floats v) {
    if constexpr (S) return reduce_add<S / 2>(v + swap_neighbours<S>(v, std::make_integer_sequence<int, LANES>()));
    return v[0];
}

// Lanes without bit S: a's sums of a lane and its neighbour across that bit; lanes with it: b's.
template <int S, int... I>
inline Floats fold_add(Floats a, Floats b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I & S ? LANES + I : I)...) +
           __builtin_shufflevector(a, b, (I & S ? LANES + (I ^ S) : I ^ S)...);
}

// Lanes with bit S of `a` and lanes without it of `b` change places.
template <int S, int... I>
inline void swap_lanes(Words& a, Words& b, std::integer_sequence<int, I...>) {
#if defined(__AVX512F__)
    constexpr uint16_t with = S == 1 ? 0xaaaa : S == 2 ? 0xcccc : S == 4 ? 0xf0f0 : 0xff00, without = uint16_t(~with);
    constexpr auto NEAR = _MM_PERM_ENUM(S == 1 ? 0xb1 : 0x4e);
    const __m512i x = (__m512i)a, y = (__m512i)b;
    if constexpr (S <= 2)
        a = (Words)_mm512_mask_shuffle_epi32(x, with, y, NEAR), b = (Words)_mm512_mask_shuffle_epi32(y, without, x, NEAR);
    else
        a = (Words)_mm512_mask_shuffle_i32x4(x, with, y, y, S == 4 ? 0xb1 : 0x4e),
        b = (Words)_mm512_mask_shuffle_i32x4(y, without, x, x, S == 4 ? 0xb1 : 0x4e);
#else
    const Words first = __builtin_shufflevector(a, b, (I & S ? LANES + (I ^ S) : I)...);
    b = __builtin_shufflevector(a, b, (I & S ? LANES + I : I ^ S)...), a = first;
#endif
}

template <int S = 1>
inline void transpose(Words (&v)[LANES]) {
    for (int i = 0; i < LANES; i++)
        if (!(i & S)) swap_lanes<S>(v[i], v[i + S], std::make_integer_sequence<int, LANES>());
    if constexpr (2 * S < LANES) transpose<2 * S>(v);
}

inline Floats maximum(Floats a, Floats b) {  // b's where one is NaN
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    Words more = (Words)(a > b);
    return (Floats)(((Words)a & more) | ((Words)b & ~more));
#endif
}

inline bool any_nan(Floats a, Floats b) {  // whether a lane of either is NaN
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q);
#else
    return any((Words)(a != a) | (Words)(b != b));
#endif
}

template <int S, int... I>
inline Floats fold_max(Floats a, Floats b, std::integer_sequence<int, I...>) {  // as `fold_add`, the greater one
    return maximum(__builtin_shufflevector(a, b, (I & S ? LANES + I : I)...),
                   __builtin_shufflevector(a, b, (I & S ? LANES + (I ^ S) : I ^ S)...));
}

template <int S>
inline void fold_max_all(Floats (&v)[LANES]) {
    for (int i = 0; i < LANES; i += 2 * S) v[i] = fold_max<S>(v[i], v[i + S], std::make_integer_sequence<int, LANES>());
}

// Lane i: the greatest of v[i].
inline Floats reduce_max_each(Floats (&v)[LANES]) {
    fold_max_all<1>(v), fold_max_all<2>(v);
    if constexpr (LANES > 4) fold_max_all<4>(v);
    if constexpr (LANES > 8) fold_max_all<8>(v);
    return v[0];
}

template <int S = LANES / 2>
inline float reduce_max(Floats v) {
    if constexpr (S) return reduce_max<S / 2>(maximum(v, swap_neighbours<S>(v, std::make_integer_sequence<int, LANES>())));
    return v[0];
}

// e^x for x <= 0, to about 1e-7; 0 below -87
inline Floats exponential(Floats x) {
    const Floats magic = splat(12582912.0f);  // adding it rounds to whole numbers
    Floats whole = fma(x, splat(1.44269504f), magic) - magic;
    Floats rest = fma(whole, splat(-0.693145752f), x);
    rest = fma(whole, splat(-1.42860677e-6f), rest);
    Floats sum = splat(1.98756915e-4f);
    for (float c : {1.39819994e-3f, 8.33345198e-3f, 4.16657962e-2f, 1.66666657e-1f, 0.5f}) sum = fma(sum, rest, splat(c));
    sum = fma(sum, rest * rest, rest + splat(1.0f));
    Ints power = __builtin_convertvector(whole, Ints) + 127;
    Words seen = (Words)(x > splat(-87.0f));
    return (Floats)((Words)(sum * (Floats)(power << 23)) & seen);
}

}  // namespace
