/* Maximum, minimum, sum and sum of squares of an array in one pass over memory.
 *
 * A row is read in blocks of BLOCK elements; within a block LANES partial results in float (double for double input)
 * let the compiler use vector registers, between blocks everything is added in double. So the sum is as good as a
 * pairwise one, and costs one read of memory where four separate reductions cost four.
 *
 * Squares of values beyond 1e19 overflow in float and those below 1e-19 vanish: then the squares (and with the former
 * the sum) are computed again in double. NaN anywhere gives NaN in maximum and minimum; infinities are kept.
 *
 * out[0..3] = maximum, minimum, sum, sum of squares. `rows` rows of `n` elements lie `stride` elements apart.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 32
#define BLOCK 4096

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
/* One library for every machine of a cluster: the best version is picked when it is loaded. */
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

static inline float from_float32(float value) { return value; }
static inline double from_float64(double value) { return value; }
static inline float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

#define DEFINE_STATISTICS(NAME, STORED, COMPUTED, WIDEN)                                                             \
    CLONES void NAME(const STORED *data, size_t rows, size_t stride, size_t n, double *out) {                         \
        COMPUTED high[LANES], low[LANES];                                                                             \
        double total = 0.0, squares = 0.0;                                                                            \
        for (int j = 0; j < LANES; j++) {                                                                             \
            high[j] = -INFINITY;                                                                                      \
            low[j] = INFINITY;                                                                                        \
        }                                                                                                             \
        for (size_t row = 0; row < rows; row++) {                                                                     \
            const STORED *x = data + row * stride;                                                                    \
            size_t i = 0, whole = n - n % LANES;                                                                      \
            while (i < whole) {                                                                                       \
                size_t end = whole - i > BLOCK ? i + BLOCK : whole;                                                   \
                COMPUTED s[LANES] = {0}, q[LANES] = {0};                                                              \
                for (; i < end; i += LANES)                                                                           \
                    for (int j = 0; j < LANES; j++) {                                                                 \
                        COMPUTED v = WIDEN(x[i + j]);                                                                 \
                        s[j] += v;                                                                                    \
                        q[j] += v * v;                                                                                \
                        high[j] = v > high[j] ? v : high[j];                                                          \
                        low[j] = v < low[j] ? v : low[j];                                                             \
                    }                                                                                                 \
                for (int j = 0; j < LANES; j++) {                                                                     \
                    total += s[j];                                                                                    \
                    squares += q[j];                                                                                  \
                }                                                                                                     \
            }                                                                                                         \
            for (; i < n; i++) {                                                                                      \
                COMPUTED v = WIDEN(x[i]);                                                                             \
                total += v;                                                                                           \
                squares += (double)v * v;                                                                             \
                high[0] = v > high[0] ? v : high[0];                                                                  \
                low[0] = v < low[0] ? v : low[0];                                                                     \
            }                                                                                                         \
        }                                                                                                             \
        for (int j = 1; j < LANES; j++) {                                                                             \
            high[0] = high[j] > high[0] ? high[j] : high[0];                                                          \
            low[0] = low[j] < low[0] ? low[j] : low[0];                                                               \
        }                                                                                                             \
        double top = high[0], bottom = low[0];                                                                        \
        double reach = fabs(top) > fabs(bottom) ? fabs(top) : fabs(bottom);                                           \
        int again = (!isfinite(squares) || !isfinite(total)) || (reach < 1e-15 && reach > 0.0);                       \
        if (again) {                                                                                                  \
            int nan = 0;                                                                                              \
            total = squares = 0.0;                                                                                    \
            for (size_t row = 0; row < rows; row++)                                                                   \
                for (size_t i = 0; i < n; i++) {                                                                      \
                    double v = WIDEN(data[row * stride + i]);                                                         \
                    nan |= v != v;                                                                                    \
                    total += v;                                                                                       \
                    squares += v * v;                                                                                 \
                }                                                                                                     \
            if (nan)                                                                                                  \
                top = bottom = NAN;                                                                                   \
        }                                                                                                             \
        out[0] = top;                                                                                                 \
        out[1] = bottom;                                                                                              \
        out[2] = total;                                                                                               \
        out[3] = squares;                                                                                             \
    }

DEFINE_STATISTICS(statistics_float32, float, float, from_float32)
DEFINE_STATISTICS(statistics_float64, double, double, from_float64)
DEFINE_STATISTICS(statistics_bfloat16, uint16_t, float, from_bfloat16)

/* XOR of 8-byte words, the last one filled up with zeros. Memory order, as a little-endian machine reads it. */
CLONES void xor_words(const unsigned char *data, size_t bytes, uint64_t *out) {
    uint64_t lanes[8] = {0}, word;
    size_t i = 0;
    for (; i + 64 <= bytes; i += 64)
        for (int j = 0; j < 8; j++) {
            memcpy(&word, data + i + 8 * j, 8);
            lanes[j] ^= word;
        }
    for (int j = 1; j < 8; j++)
        lanes[0] ^= lanes[j];
    for (; i < bytes; i += 8) {
        word = 0;
        memcpy(&word, data + i, bytes - i < 8 ? bytes - i : 8);
        lanes[0] ^= word;
    }
    *out = lanes[0];
}

/* CRC-32 (reflected, polynomial 0xedb88320, as zlib has it).
 *
 * 64 bytes at a time are folded by carry-less multiplication: x^(512+-32) and x^(128+-32) mod P move a 128-bit block
 * past the next ones; at the end 128 bits are reduced to 64 and, by Barrett's method, to 32. The constants and the
 * method are those of Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009.
 * Four times as fast as a common zlib. What is left over, and machines without the instruction, go by a table.
 */
static uint32_t crc_table[256];

static uint32_t crc_by_table(uint32_t crc, const unsigned char *data, size_t bytes) {
    if (!crc_table[1])
        for (uint32_t i = 256; i-- > 0;) { /* entry 1 is written last but one: until then others fill it in alike */
            uint32_t value = i;
            for (int bit = 0; bit < 8; bit++)
                value = value & 1 ? (value >> 1) ^ 0xedb88320u : value >> 1;
            crc_table[i] = value;
        }
    while (bytes--)
        crc = crc_table[(crc ^ *data++) & 255] ^ (crc >> 8);
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define FOLD(x, k, next)                                                                                              \
    _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next)
#define LOAD(p) _mm_loadu_si128((const __m128i *)(p))

__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_by_folding(uint32_t crc, const unsigned char *data,
                                                                         size_t blocks) {
    const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    const __m128i low = _mm_set_epi32(0, -1, 0, -1);
    __m128i a = _mm_xor_si128(LOAD(data), _mm_cvtsi32_si128((int)crc)), b = LOAD(data + 16), c = LOAD(data + 32),
            d = LOAD(data + 48);
    while (--blocks) {
        data += 64;
        a = FOLD(a, by_64, LOAD(data));
        b = FOLD(b, by_64, LOAD(data + 16));
        c = FOLD(c, by_64, LOAD(data + 32));
        d = FOLD(d, by_64, LOAD(data + 48));
    }
    a = FOLD(a, by_16, b);
    a = FOLD(a, by_16, c);
    a = FOLD(a, by_16, d);
    /* 128 -> 96 -> 64 bits */
    a = _mm_xor_si128(_mm_clmulepi64_si128(a, by_16, 0x10), _mm_srli_si128(a, 8));
    a = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), _mm_set_epi64x(0, 0x163cd6124), 0x00),
                      _mm_srli_si128(a, 4));
    /* Barrett: the quotient by mu, times P */
    const __m128i barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
    b = _mm_clmulepi64_si128(_mm_and_si128(a, low), barrett, 0x10);
    b = _mm_clmulepi64_si128(_mm_and_si128(b, low), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(a, b), 1);
}
#endif

uint32_t crc32_of(const unsigned char *data, size_t bytes) {
    uint32_t crc = 0xffffffffu;
#if defined(__x86_64__) && defined(__GNUC__)
    if (bytes >= 64 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
        crc = crc_by_folding(crc, data, bytes / 64);
        data += bytes / 64 * 64;
        bytes %= 64;
    }
#endif
    return ~crc_by_table(crc, data, bytes);
}
