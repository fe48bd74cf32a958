/* From a tensor's memory to numbers. No Python in here: a View says where the elements are, everything below only reads them.
 *
 * The memory is read once, block by block. An ordinary block of float32 (bfloat16 and float16 are widened to it) goes through the vector
 * loops of _kernel_loops.h; a block with a non-finite or extreme value, and every block of float64, is computed in double. Blocks are joined by
 * the formula of Chan, Golub and LeVeque, so the standard deviation is right also where the mean is large beside it.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 4096, MAX_DIMS = 64 };
enum { F32, F64, BF16, F16, NUM_KINDS };
static const int ITEM_SIZE[NUM_KINDS] = {4, 8, 2, 2};

/* Between these a square, and a sum of BLOCK squares, keeps its precision in float32. */
#define SQUARE_FITS 1e16f
#define SQUARE_SHOWS 1e-12f

typedef struct {
    int64_t num; /* finite elements only, as mean, m2, low and high */
    double mean, m2, low, high;
    int64_t zeros, nan, inf;
} Part;

typedef int32_t Word __attribute__((may_alias)); /* four bytes of whatever type */

typedef struct {
    int (*measure)(const float *, int, float, const char *, Part *);
    int (*measure_rectified)(const float *, int, float, Part *);
    double (*squares)(const float *, int, const char *);
    int (*any)(const Word *, int, int32_t);
    void (*subtract)(const float *, const float *, int, const char *, float *);
    void (*widen_bf16)(const uint16_t *, int, float *);
    void (*widen_f16)(const uint16_t *, int, float *);
} Loops;

/* ---- what is asked for before its turn ---- */

/* One stream of memory keeps a core waiting: the processor guesses what comes next, but only up to the end of a page. So while one block is
 * gone through, the next is asked for, a line of each of its PAGES in turn: that many guesses then run side by side. A third more bytes a
 * second than one page after the other, where a tensor is in no cache (8.5 and 11.3 GB on the machine where it was tried). */
enum { PAGE = 4096, LINE = 64, PAGES = BLOCK * 4 / PAGE };

/* The line that is asked for when `at` floats of a block are done. */
static inline __attribute__((always_inline)) void fetch(const char *ahead, int at)
{
    const unsigned line = (unsigned)at * 4 / LINE;
    __builtin_prefetch(ahead + line % PAGES * PAGE + line / PAGES * LINE);
}

/* ---- the loops, once per instruction set ---- */

#define PLAIN_ZEROS(count, bits) ((count) - (((bits) & 0x7fffffff) == 0))

#if defined(__x86_64__)
#include <immintrin.h>

#define NAME(x) x##_sse2
#define TARGET
#define LANES 4
#define MIN(x, m) ((Floats)_mm_min_ps((__m128)(x), (__m128)(m)))
#define MAX(x, m) ((Floats)_mm_max_ps((__m128)(x), (__m128)(m)))
#define COUNT_ZEROS PLAIN_ZEROS
#include "_kernel_loops.h"

#define HALVES_BY_EIGHT
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES 8
#define MIN(x, m) ((Floats)_mm256_min_ps((__m256)(x), (__m256)(m)))
#define MAX(x, m) ((Floats)_mm256_max_ps((__m256)(x), (__m256)(m)))
#define COUNT_ZEROS PLAIN_ZEROS
#include "_kernel_loops.h"

#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define LANES 16
#define MIN(x, m) ((Floats)_mm512_min_ps((__m512)(x), (__m512)(m)))
#define MAX(x, m) ((Floats)_mm512_max_ps((__m512)(x), (__m512)(m)))
#define COUNT_ZEROS(count, bits)                                                                                     \
    ((Ints)_mm512_mask_add_epi32((__m512i)(count), _mm512_testn_epi32_mask((__m512i)(bits), _mm512_set1_epi32(0x7fffffff)), \
                                 (__m512i)(count), _mm512_set1_epi32(1)))
#include "_kernel_loops.h"

#undef HALVES_BY_EIGHT

static const Loops *loops = &loops_sse2;

/* The best that this processor has, up to `level` (0: what every x86-64 has). Returns the level in use. */
static int choose_loops(int level)
{
    __builtin_cpu_init();
    /* Every processor with AVX2 and FMA has F16C, which older compilers cannot ask for. */
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
#define PICK(x, m, mask) ((Floats)(((Ints)(x) & (mask)) | ((Ints)(m) & ~(mask))))
#define MIN(x, m) PICK(x, m, (Ints)((x) < (m)))
#define MAX(x, m) PICK(x, m, (Ints)((x) > (m)))
#define COUNT_ZEROS PLAIN_ZEROS
#include "_kernel_loops.h"

static const Loops *loops = &loops_any;

static int choose_loops(int level)
{
    (void)level;
    return 0;
}

#endif

/* ---- where the elements are ---- */

typedef struct {
    const char *data;
    int kind, itemsize, num_dims;
    int64_t num;    /* elements to read */
    double repeats; /* every element counts so often: an expanded tensor is not read again and again */
    int64_t shape[MAX_DIMS], stride[MAX_DIMS];
    int num_given; /* as the tensor itself has them */
    int64_t given_shape[MAX_DIMS], given_stride[MAX_DIMS];
} View;

/* The order of elements does not matter to statistics: dimensions are sorted by stride and joined, so that a permuted or channels_last tensor
 * is one run of memory. Returns 0 where the sizes make no sense. */
static int set_view(View *view, int num_dims, const int64_t *shape, const int64_t *stride)
{
    int kept = 0, empty = 0;
    view->num_given = num_dims;
    for (int i = 0; i < num_dims; i++) {
        view->given_shape[i] = shape[i];
        view->given_stride[i] = stride[i];
    }
    view->num = 1;
    view->repeats = 1;
    for (int i = 0; i < num_dims; i++) {
        int64_t size = shape[i], step = stride[i];
        if (size < 0 || step < 0)
            return 0;
        empty |= size == 0;
        if (size <= 1)
            continue;
        if (step == 0) {
            view->repeats *= (double)size;
            continue;
        }
        if (__builtin_mul_overflow(view->num, size, &view->num) || view->num > INT64_MAX / 8 || step > INT64_MAX / 8 / size)
            return 0;
        int at = kept++;
        for (; at > 0 && view->stride[at - 1] < step; at--) {
            view->shape[at] = view->shape[at - 1];
            view->stride[at] = view->stride[at - 1];
        }
        view->shape[at] = size;
        view->stride[at] = step;
    }
    int last = 0;
    for (int i = 1; i < kept; i++) {
        if (view->stride[last] == view->shape[i] * view->stride[i])
            view->shape[last] *= view->shape[i];
        else
            view->shape[++last] = view->shape[i];
        view->stride[last] = view->stride[i];
    }
    if (kept == 0) {
        view->shape[0] = 1;
        view->stride[0] = 1;
    }
    view->num_dims = last + 1;
    if (empty)
        view->num = 0;
    return 1;
}

static inline int is_dense(const View *view)
{
    return view->num_dims == 1 && view->stride[0] == 1;
}

/* Do the elements of both lie in memory in the same order, without holes? */
static int run_alike(const View *a, const View *b)
{
    if (!is_dense(a) || !is_dense(b) || a->repeats != 1 || b->repeats != 1 || a->num != b->num || a->num_given != b->num_given)
        return 0;
    for (int i = 0; i < a->num_given; i++)
        if (a->given_shape[i] != b->given_shape[i] || (a->given_shape[i] > 1 && a->given_stride[i] != b->given_stride[i]))
            return 0;
    return 1;
}

typedef struct {
    int64_t done, index[MAX_DIMS];
} Cursor;

static void start(Cursor *cursor, const View *view)
{
    cursor->done = 0;
    memset(cursor->index, 0, sizeof(int64_t) * (size_t)view->num_dims);
}

static void copy_run(char *out, const char *from, int64_t num, int64_t step, int itemsize)
{
    if (step == 1) {
        memcpy(out, from, (size_t)(num * itemsize));
        return;
    }
    for (int64_t i = 0; i < num; i++)
        memcpy(out + i * itemsize, from + i * step * itemsize, (size_t)itemsize);
}

static void gather(Cursor *cursor, const View *view, int64_t num, char *out)
{
    const int last = view->num_dims - 1, itemsize = view->itemsize;
    while (num > 0) {
        int64_t offset = 0, run = view->shape[last] - cursor->index[last];
        if (run > num)
            run = num;
        for (int i = 0; i <= last; i++)
            offset += cursor->index[i] * view->stride[i];
        const char *from = view->data + offset * itemsize;
        switch (itemsize) { /* constants let the compiler make each a plain move */
        case 2: copy_run(out, from, run, view->stride[last], 2); break;
        case 4: copy_run(out, from, run, view->stride[last], 4); break;
        default: copy_run(out, from, run, view->stride[last], 8);
        }
        out += run * itemsize;
        num -= run;
        cursor->index[last] += run;
        for (int i = last; i > 0 && cursor->index[i] == view->shape[i]; i--) {
            cursor->index[i] = 0;
            cursor->index[i - 1]++;
        }
    }
}

/* The next block of raw elements: in place where memory is one run, else gathered into scratch (BLOCK elements). Returns how many; 0: done. */
static int next_block(Cursor *cursor, const View *view, void *scratch, const void **block)
{
    int64_t left = view->num - cursor->done;
    int num = left < BLOCK ? (int)left : BLOCK;
    if (is_dense(view)) {
        *block = view->data + cursor->done * view->itemsize;
    } else {
        gather(cursor, view, num, scratch);
        *block = scratch;
    }
    cursor->done += num;
    return num;
}

/* For `fetch` in the loops over the block at `at`: the block after it. NULL where no whole one follows. */
static const char *ahead_of(const View *view, int64_t at)
{
    return view->kind == F32 && at + 2 * BLOCK <= view->num && is_dense(view) ? view->data + (at + BLOCK) * 4 : NULL;
}

static const float *widen(const View *view, const void *block, int num, float *out)
{
    if (view->kind == F32)
        return block;
    (view->kind == BF16 ? loops->widen_bf16 : loops->widen_f16)(block, num, out);
    return out;
}
