/* The vector loops over one block of float32, compiled once per instruction set, and the choice among them at run time.
 *
 * simd_loops.inc holds the loops. There is no -march=native and no -ffast-math: one binary runs on every processor of its architecture.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 4096 }; /* elements of a block: 16 KiB of float32 stay in the first-level cache for a second pass */

/* For absolute values between these two, a square, and a sum of BLOCK squares, keeps its precision in float32. */
#define MAX_SQUARABLE 1e16f
#define MIN_SQUARABLE 1e-12f

typedef struct {
    int64_t num; /* finite elements; mean, m2, low and high are over these */
    double mean, m2, low, high; /* m2: the sum of squared deviations from the mean */
    int64_t zeros, nan, inf;
} Moments;

typedef int32_t Word __attribute__((may_alias)); /* four bytes of any type */

typedef struct {
    int (*measure)(const float *x, int n, float guess, const char *upcoming, Moments *out);
    double (*sum_squares)(const float *x, int n, const char *upcoming);
    int (*any_bits)(const Word *bits, int n, int32_t mask);
    void (*subtract)(const float *x, const float *y, int n, const char *upcoming, float *out);
    void (*widen_bf16)(const uint16_t *x, int n, float *out);
    void (*widen_f16)(const uint16_t *x, int n, float *out);
} Loops;

/* ---- prefetching ---- */

/* The hardware prefetcher follows a stream of memory only to the end of a page. While the loops process one block, they prefetch the next block,
 * one cache line of each of its pages in turn, so that the prefetcher follows PAGES streams at once. For a tensor that is in no cache this
 * reads 11.3 instead of 8.5 GB per second on the machine where it was measured. */
enum { PAGE = 4096, LINE = 64, PAGES = BLOCK * 4 / PAGE };

/* Prefetches the line of the next block that belongs to element `at` of the current one. */
static inline __attribute__((always_inline)) void prefetch(const char *upcoming, int at)
{
    const unsigned line = (unsigned)at * 4 / LINE;
    __builtin_prefetch(upcoming + line % PAGES * PAGE + line / PAGES * LINE);
}

/* ---- the loops, once per instruction set ---- */

#define COUNT_ZEROS_BY_COMPARISON(count, bits) ((count) - (((bits) & 0x7fffffff) == 0))

#if defined(__x86_64__)
#include <immintrin.h>

#define NAME(x) x##_sse2
#define TARGET
#define LANES 4
#define MIN(x, m) ((Floats)_mm_min_ps((__m128)(x), (__m128)(m)))
#define MAX(x, m) ((Floats)_mm_max_ps((__m128)(x), (__m128)(m)))
#define COUNT_ZEROS COUNT_ZEROS_BY_COMPARISON
#include "simd_loops.inc"

#define HAS_F16C
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES 8
#define MIN(x, m) ((Floats)_mm256_min_ps((__m256)(x), (__m256)(m)))
#define MAX(x, m) ((Floats)_mm256_max_ps((__m256)(x), (__m256)(m)))
#define COUNT_ZEROS COUNT_ZEROS_BY_COMPARISON
#include "simd_loops.inc"

#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define LANES 16
#define MIN(x, m) ((Floats)_mm512_min_ps((__m512)(x), (__m512)(m)))
#define MAX(x, m) ((Floats)_mm512_max_ps((__m512)(x), (__m512)(m)))
#define COUNT_ZEROS(count, bits)                                                                                            \
    ((Ints)_mm512_mask_add_epi32((__m512i)(count), _mm512_testn_epi32_mask((__m512i)(bits), _mm512_set1_epi32(0x7fffffff)), \
                                 (__m512i)(count), _mm512_set1_epi32(1)))
#include "simd_loops.inc"

#undef HAS_F16C

static const Loops *loops = &loops_sse2;

/* Selects the best instruction set that this processor has, up to `level` (0: SSE2, which every x86-64 has). Returns the level in use. */
static int choose_loops(int level)
{
    __builtin_cpu_init();
    /* F16C is not checked: every processor with AVX2 and FMA has it, and older compilers cannot test for it. */
    if (level >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        loops = &loops_avx512;
        return 2;
    }
    if (level >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        loops = &loops_avx2;
        return 1;
    }
    loops = &loops_sse2;
    return 0;
}

#else

#define NAME(x) x##_any
#define TARGET
#define LANES 4
#define SELECT(x, m, mask) ((Floats)(((Ints)(x) & (mask)) | ((Ints)(m) & ~(mask))))
#define MIN(x, m) SELECT(x, m, (Ints)((x) < (m)))
#define MAX(x, m) SELECT(x, m, (Ints)((x) > (m)))
#define COUNT_ZEROS COUNT_ZEROS_BY_COMPARISON
#include "simd_loops.inc"

static const Loops *loops = &loops_any;

static int choose_loops(int level)
{
    (void)level;
    return 0;
}

#endif
