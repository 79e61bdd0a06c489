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
