/* Metrics of two stored tensors in one pass over memory (aggregator/tensors.py says which).
 *
 * Partial results are kept in LANES accumulators, which lets the compiler use vector registers. Sums are in double; those
 * of 16-bit formats are right to 6e-7 of themselves (see FEW).
 * Relative errors are computed in the elements' own type, in float for formats of 16 bits, whose epsilon is added to
 * both sides where the bench is 0.
 *
 * out[0..6] = t.t, b.b, t.b, |t - b|^2, largest |t - b|, largest |b|, largest relative error;
 * near[0..1] = elements whose relative error is below limits[0], limits[1].
 * Returns 1 where both sides are the same bytes, else 0, and -1 where a sum of squares is not finite: then a NaN or an
 * infinity is among the elements, or the sum has overflown, and `out` means nothing.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 32

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
static inline float from_float16(uint16_t bits) {
    /* Exponent and fraction moved into place and scaled by 2^(127 - 15); infinities and NaN have an exponent of ones. */
    uint32_t wide = (uint32_t)(bits & 0x7fff) << 13;
    float value;
    memcpy(&value, &wide, sizeof value);
    value *= 0x1p112f;
    memcpy(&wide, &value, sizeof wide);
    wide |= (bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
    wide |= (uint32_t)(bits & 0x8000) << 16;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* The relative error of v and w, in lane j. */
#define RELATIVE(j, COMPUTED, ABS, EPSILON)                                                                            \
    {                                                                                                                  \
        COMPUTED more = w == 0 ? EPSILON : 0;                                                                          \
        v += more;                                                                                                     \
        w += more;                                                                                                     \
        COMPUTED r = ABS((v - w) / w);                                                                                 \
        relative[j] = r > relative[j] ? r : relative[j];                                                               \
        below[j] += r < first;                                                                                         \
        far_below[j] += r < second;                                                                                    \
    }

/* What is done with the elements i + j. */
#define STEP(at, j, COMPUTED, WIDEN, ABS, EPSILON)                                                                     \
    {                                                                                                                  \
        COMPUTED v = WIDEN(t[at]), w = WIDEN(b[at]), size = ABS(w);                                                    \
        double x = v, y = w, e = x - y, distance = fabs(e);                                                            \
        tt[j] += x * x;                                                                                                \
        bb[j] += y * y;                                                                                                \
        tb[j] += x * y;                                                                                                \
        ee[j] += e * e;                                                                                                \
        error[j] = distance > error[j] ? distance : error[j];                                                          \
        top[j] = size > top[j] ? size : top[j];                                                                        \
        RELATIVE(j, COMPUTED, ABS, EPSILON)                                                                            \
    }

/* All lanes of a pass, added to `out` and `near`. */
#define GATHER                                                                                                         \
    for (int j = 0; j < LANES; j++) {                                                                                  \
        out[0] += tt[j];                                                                                               \
        out[1] += bb[j];                                                                                               \
        out[2] += tb[j];                                                                                               \
        out[3] += ee[j];                                                                                               \
        out[4] = error[j] > out[4] ? error[j] : out[4];                                                                \
        out[5] = top[j] > out[5] ? top[j] : out[5];                                                                    \
        out[6] = relative[j] > out[6] ? relative[j] : out[6];                                                          \
        near[0] += below[j];                                                                                           \
        near[1] += far_below[j];                                                                                       \
    }

#define DEFINE(NAME, STORED, COMPUTED, WIDEN, ABS, EPSILON)                                                            \
    static CLONES void NAME##_alone(const STORED *x, size_t n, double *squares, double *largest) {                     \
        double sum[LANES] = {0};                                                                                       \
        COMPUTED top[LANES] = {0};                                                                                     \
        size_t i = 0;                                                                                                  \
        for (; i + LANES <= n; i += LANES)                                                                             \
            for (int j = 0; j < LANES; j++) {                                                                          \
                COMPUTED v = WIDEN(x[i + j]), a = ABS(v);                                                              \
                sum[j] += (double)v * v;                                                                               \
                top[j] = a > top[j] ? a : top[j];                                                                      \
            }                                                                                                          \
        for (; i < n; i++) {                                                                                           \
            COMPUTED v = WIDEN(x[i]), a = ABS(v);                                                                      \
            sum[0] += (double)v * v;                                                                                   \
            top[0] = a > top[0] ? a : top[0];                                                                          \
        }                                                                                                              \
        *squares = *largest = 0.0;                                                                                     \
        for (int j = 0; j < LANES; j++) {                                                                              \
            *squares += sum[j];                                                                                        \
            *largest = top[j] > *largest ? top[j] : *largest;                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    static CLONES void NAME##_apart(const STORED *t, const STORED *b, size_t n, const COMPUTED *limits, double *out,   \
                                    uint64_t *near) {                                                                  \
        double tt[LANES] = {0}, bb[LANES] = {0}, tb[LANES] = {0}, ee[LANES] = {0}, error[LANES] = {0};                 \
        COMPUTED top[LANES] = {0}, relative[LANES] = {0};                                                              \
        uint32_t below[LANES] = {0}, far_below[LANES] = {0};                                                           \
        const COMPUTED first = limits[0], second = limits[1];                                                          \
        size_t i = 0;                                                                                                  \
        for (; i + LANES <= n; i += LANES)                                                                             \
            for (int j = 0; j < LANES; j++)                                                                            \
                STEP(i + j, j, COMPUTED, WIDEN, ABS, EPSILON)                                                          \
        for (; i < n; i++)                                                                                             \
            STEP(i, 0, COMPUTED, WIDEN, ABS, EPSILON)                                                                  \
        for (int k = 0; k < 7; k++)                                                                                    \
            out[k] = 0.0;                                                                                              \
        near[0] = near[1] = 0;                                                                                         \
        GATHER                                                                                                         \
    }                                                                                                                  \
                                                                                                                       \
    int NAME(const STORED *t, const STORED *b, size_t n, const COMPUTED *limits, double *out, uint64_t *near) {        \
        if (!memcmp(t, b, n * sizeof *t)) {                                                                            \
            NAME##_alone(b, n, out + 1, out + 5);                                                                      \
            out[0] = out[2] = out[1];                                                                                  \
            out[3] = out[4] = out[6] = 0.0;                                                                            \
            near[0] = near[1] = n;                                                                                     \
            return isfinite(out[1]) ? 1 : -1;                                                                          \
        }                                                                                                              \
        NAME##_apart(t, b, n, limits, out, near);                                                                      \
        return isfinite(out[0]) && isfinite(out[1]) ? 0 : -1;                                                          \
    }

DEFINE(apart_float32, float, float, from_float32, fabsf, 0x1p-23f)
DEFINE(apart_float64, double, double, from_float64, fabs, 0x1p-52)

/* Formats of 16 bits are widened a block at a time: the widening and the pass over floats use vector registers then. */
#define BLOCK 2048

static CLONES void widen_bfloat16(const uint16_t *x, size_t n, float *out) {
    for (size_t i = 0; i < n; i++)
        out[i] = from_bfloat16(x[i]);
}

static CLONES void widen_float16_anywhere(const uint16_t *x, size_t n, float *out) {
    for (size_t i = 0; i < n; i++)
        out[i] = from_float16(x[i]);
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

__attribute__((target("avx,f16c"))) static void widen_float16_here(const uint16_t *x, size_t n, float *out) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
    for (; i < n; i++)
        out[i] = from_float16(x[i]);
}

__attribute__((target("avx512f"))) static void widen_float16_wide(const uint16_t *x, size_t n, float *out) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + i))));
    for (; i < n; i++)
        out[i] = from_float16(x[i]);
}

static void widen_float16(const uint16_t *x, size_t n, float *out) {
    if (__builtin_cpu_supports("avx512f"))
        widen_float16_wide(x, n, out);
    else if (__builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c"))
        widen_float16_here(x, n, out);
    else
        widen_float16_anywhere(x, n, out);
}
#else
#define widen_float16 widen_float16_anywhere
#endif

/* The passes over 16-bit elements that have been widened. Products of two of them are exact in float, and so are added
 * up in float, FEW to a lane, before they are added in double: FEW - 1 roundings, which leave a sum of squares right to
 * 7 * 2^-24 = 4.2e-7 of itself at worst; that of differences, which are rounded and squared first, to 10 * 2^-24 = 6e-7.
 * Some 1e-8 are usual.
 * The stored elements that come next (`soon_...`) are asked for meanwhile: a block is a page of memory, and the
 * machine's own look-ahead ends with the page. A prefetch past the end of a mapping does nothing. */
#define FEW 8

static CLONES void narrow_alone(const float *x, const uint16_t *soon, size_t n, double *squares, double *largest) {
    double sum[LANES] = {0};
    float top[LANES] = {0};
    size_t i = 0;
    *squares = *largest = 0.0;
    for (; i + FEW * LANES <= n; i += FEW * LANES) {
        float few[LANES] = {0};
        for (size_t k = i; k < i + FEW * LANES; k += LANES) {
            __builtin_prefetch(soon + k);
            for (int j = 0; j < LANES; j++) {
                float v = x[k + j], a = fabsf(v);
                few[j] += v * v;
                top[j] = a > top[j] ? a : top[j];
            }
        }
        for (int j = 0; j < LANES; j++)
            sum[j] += few[j];
    }
    if (i < n)
        apart_float32_alone(x + i, n - i, squares, largest);
    for (int j = 0; j < LANES; j++) {
        *squares += sum[j];
        *largest = top[j] > *largest ? top[j] : *largest;
    }
}

/* Products of two such elements are exact, so that a fused multiply-add gives the same bits: it is taken where it is. */
#define FUSED(v, w, sum) __builtin_fmaf(v, w, sum)
#define SEPARATE(v, w, sum) ((sum) + (v) * (w))

#define DEFINE_NARROW_APART(NAME, ATTRIBUTE, MULTIPLY_ADD)                                                             \
    ATTRIBUTE static void NAME(const float *t, const float *b, const uint16_t *soon_t, const uint16_t *soon_b,         \
                               size_t n, const float *limits, double *out, uint64_t *near) {                           \
        double tt[LANES] = {0}, bb[LANES] = {0}, tb[LANES] = {0}, ee[LANES] = {0};                                     \
        float error[LANES] = {0}, top[LANES] = {0}, relative[LANES] = {0};                                             \
        uint32_t below[LANES] = {0}, far_below[LANES] = {0};                                                           \
        const float first = limits[0], second = limits[1];                                                             \
        size_t i = 0;                                                                                                  \
        for (; i + FEW * LANES <= n; i += FEW * LANES) {                                                               \
            float few_tt[LANES] = {0}, few_bb[LANES] = {0}, few_tb[LANES] = {0}, few_ee[LANES] = {0};                  \
            for (size_t k = i; k < i + FEW * LANES; k += LANES) {                                                      \
                __builtin_prefetch(soon_t + k);                                                                        \
                __builtin_prefetch(soon_b + k);                                                                        \
                for (int j = 0; j < LANES; j++) {                                                                      \
                    float v = t[k + j], w = b[k + j], e = v - w, distance = fabsf(e), size = fabsf(w);                 \
                    few_tt[j] = MULTIPLY_ADD(v, v, few_tt[j]);                                                         \
                    few_bb[j] = MULTIPLY_ADD(w, w, few_bb[j]);                                                         \
                    few_tb[j] = MULTIPLY_ADD(v, w, few_tb[j]);                                                         \
                    few_ee[j] += e * e;                                                                                \
                    error[j] = distance > error[j] ? distance : error[j];                                              \
                    top[j] = size > top[j] ? size : top[j];                                                            \
                    RELATIVE(j, float, fabsf, 0x1p-23f)                                                                \
                }                                                                                                      \
            }                                                                                                          \
            for (int j = 0; j < LANES; j++) {                                                                          \
                tt[j] += few_tt[j];                                                                                    \
                bb[j] += few_bb[j];                                                                                    \
                tb[j] += few_tb[j];                                                                                    \
                ee[j] += few_ee[j];                                                                                    \
            }                                                                                                          \
        }                                                                                                              \
        for (int k = 0; k < 7; k++)                                                                                    \
            out[k] = 0.0;                                                                                              \
        near[0] = near[1] = 0;                                                                                         \
        if (i < n)                                                                                                     \
            apart_float32_apart(t + i, b + i, n - i, limits, out, near);                                               \
        GATHER                                                                                                         \
    }

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
DEFINE_NARROW_APART(narrow_apart_avx512, __attribute__((target("avx512f"))), FUSED)
DEFINE_NARROW_APART(narrow_apart_avx2, __attribute__((target("avx2"))), SEPARATE)
DEFINE_NARROW_APART(narrow_apart_anywhere, , SEPARATE)

static void narrow_apart(const float *t, const float *b, const uint16_t *soon_t, const uint16_t *soon_b, size_t n,
                         const float *limits, double *out, uint64_t *near) {
    if (__builtin_cpu_supports("avx512f"))
        narrow_apart_avx512(t, b, soon_t, soon_b, n, limits, out, near);
    else if (__builtin_cpu_supports("avx2"))
        narrow_apart_avx2(t, b, soon_t, soon_b, n, limits, out, near);
    else
        narrow_apart_anywhere(t, b, soon_t, soon_b, n, limits, out, near);
}
#else
DEFINE_NARROW_APART(narrow_apart, , SEPARATE)
#endif

/* Whether a block's sums in float may be wrong: squares below float's range (of bfloat16) are lost, at most BLOCK times
 * 2^-126; and products t b that cancel leave their roundings. */
static int is_doubtful(const double *out) {
    const double least = 1e-20, cancelled = 1.0 / 16;
    return (out[0] < least && out[4] + out[5] > 0) || (out[1] < least && out[5] > 0) ||
           (out[3] < least && out[4] > 0) || out[2] * out[2] < cancelled * out[0] * out[1];
}

#define DEFINE_NARROW(NAME, WIDEN)                                                                                     \
    int NAME(const uint16_t *t, const uint16_t *b, size_t n, const float *limits, double *out, uint64_t *near) {       \
        float wide_t[BLOCK], wide_b[BLOCK];                                                                            \
        int same = !memcmp(t, b, n * sizeof *t);                                                                       \
        for (int k = 0; k < 7; k++)                                                                                    \
            out[k] = 0.0;                                                                                              \
        near[0] = near[1] = same ? n : 0;                                                                              \
        for (size_t i = 0; i < n; i += BLOCK) {                                                                        \
            size_t width = n - i < BLOCK ? n - i : BLOCK;                                                              \
            double part[7] = {0};                                                                                      \
            uint64_t count[2] = {0};                                                                                   \
            WIDEN(b + i, width, wide_b);                                                                               \
            if (same) {                                                                                                \
                narrow_alone(wide_b, b + i + BLOCK, width, part + 1, part + 5);                                        \
                part[0] = part[2] = part[1];                                                                           \
                if (is_doubtful(part))                                                                                 \
                    apart_float32_alone(wide_b, width, part + 1, part + 5);                                            \
            } else {                                                                                                   \
                WIDEN(t + i, width, wide_t);                                                                           \
                narrow_apart(wide_t, wide_b, t + i + BLOCK, b + i + BLOCK, width, limits, part, count);                \
                if (is_doubtful(part))                                                                                 \
                    apart_float32_apart(wide_t, wide_b, width, limits, part, count);                                   \
            }                                                                                                          \
            for (int k = 0; k < 7; k++)                                                                                \
                out[k] = k < 4 ? out[k] + part[k] : part[k] > out[k] ? part[k] : out[k];                               \
            near[0] += count[0];                                                                                       \
            near[1] += count[1];                                                                                       \
        }                                                                                                              \
        if (same)                                                                                                      \
            out[0] = out[2] = out[1];                                                                                  \
        return isfinite(out[0]) && isfinite(out[1]) ? same : -1;                                                       \
    }

DEFINE_NARROW(apart_bfloat16, widen_bfloat16)
DEFINE_NARROW(apart_float16, widen_float16)
