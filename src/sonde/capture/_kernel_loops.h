/* The inner loops over one block of float32, compiled once per instruction set: _kernel.c includes this file several times with
 *
 *   NAME(x)   the name of x in this version        TARGET   the attribute that switches the instruction set on
 *   LANES     floats in one vector                 MIN, MAX (x, m): m where x is NaN, as the x86 instructions do
 *   COUNT_ZEROS(count, bits)                       count of lanes whose bits are +0.0 or -0.0
 *   HALVES_BY_EIGHT                                defined where the processor widens eight float16 at once
 *
 * A block has at most BLOCK elements, so that it stays in the first-level cache between two passes, and so that no sum of floats is long
 * enough to lose what float32 can tell. The lanes are sums of their own: that is what makes the loops fast without -ffast-math.
 */

typedef float NAME(Floats) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t NAME(Ints) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#define Floats NAME(Floats)
#define Ints NAME(Ints)
#define LOAD(p) (*(const Floats *)(p))

TARGET static inline double NAME(add_lanes)(Floats v)
{
    double sums[4] = {0, 0, 0, 0};
    for (int lane = 0; lane < LANES; lane++)
        sums[lane & 3] += v[lane];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* Describes an ordinary block and returns 1; returns 0 where a value is not finite, or so large or small that its square leaves float32.
 *
 * One pass, with deviations from a guess at the mean, which is that of the blocks before. A guess that is off by more than the spread of the
 * values would cost digits: then the block, in the first-level cache by now, is gone through once more with what was learnt. A few values
 * that stand out from a crowd of equal ones are told apart in double only. */
TARGET static inline __attribute__((always_inline)) int NAME(measure_as)(const float *x, int n, float guess, const int rectified, const char *ahead, Part *part)
{
    double deviation, squares;
    float low, high;
    int zeros;
    if (!(guess >= -SQUARE_FITS && guess <= SQUARE_FITS))
        guess = 0;
    for (int tries = 0;; tries++) {
        const float first = rectified && x[0] < 0 ? 0 : x[0];
        Floats low0 = (Floats){0} + first, low1 = low0, high0 = low0, high1 = low0;
        Floats d0 = {0}, d1 = {0}, q0 = {0}, q1 = {0};
        Ints zeros0 = {0}, zeros1 = {0};
        int i = 0;
        for (; i + 2 * LANES <= n; i += 2 * LANES) {
            for (int at = i; at < i + 2 * LANES && ahead; at += 16)
                fetch(ahead, at);
            Floats a = LOAD(x + i), b = LOAD(x + i + LANES);
            if (rectified) {
                a = MAX(a, ((Floats){0}));
                b = MAX(b, ((Floats){0}));
            }
            low0 = MIN(a, low0);
            low1 = MIN(b, low1);
            high0 = MAX(a, high0);
            high1 = MAX(b, high1);
            zeros0 = COUNT_ZEROS(zeros0, (Ints)a);
            zeros1 = COUNT_ZEROS(zeros1, (Ints)b);
            a -= guess;
            b -= guess;
            d0 += a;
            d1 += b;
            q0 += a * a;
            q1 += b * b;
        }
        low0 = MIN(low1, low0);
        high0 = MAX(high1, high0);
        zeros0 += zeros1;
        deviation = NAME(add_lanes)(d0 + d1);
        squares = NAME(add_lanes)(q0 + q1);
        low = low0[0];
        high = high0[0];
        zeros = 0;
        for (int lane = 0; lane < LANES; lane++) {
            low = low0[lane] < low ? low0[lane] : low;
            high = high0[lane] > high ? high0[lane] : high;
            zeros += zeros0[lane];
        }
        for (; i < n; i++) {
            const float value = rectified && x[i] < 0 ? 0 : x[i];
            uint32_t bits;
            memcpy(&bits, &value, 4);
            double d = (double)value - guess;
            deviation += d;
            squares += d * d;
            low = value < low ? value : low;
            high = value > high ? value : high;
            zeros += (bits << 1) == 0;
        }
        /* A NaN shows in the sum alone, since minimum and maximum pass over it. */
        if (!(low >= -SQUARE_FITS && high <= SQUARE_FITS) || deviation != deviation)
            return 0;
        if (low == high) { /* constant: say so exactly */
            guess = low;
            deviation = squares = 0;
            break;
        }
        if (high < SQUARE_SHOWS && low > -SQUARE_SHOWS)
            return 0;
        deviation /= n;
        squares -= deviation * deviation * n;
        if (deviation * deviation * n <= 4 * squares)
            break;
        if (tries == 3)
            return 0;
        guess = (float)(guess + deviation);
        ahead = NULL;
    }
    part->num = n;
    part->mean = guess + deviation;
    part->m2 = squares > 0 ? squares : 0;
    part->low = low;
    part->high = high;
    part->zeros = zeros;
    part->nan = part->inf = 0;
    return 1;
}

TARGET static int NAME(measure)(const float *x, int n, float guess, const char *ahead, Part *part)
{
    return ahead ? NAME(measure_as)(x, n, guess, 0, ahead, part) : NAME(measure_as)(x, n, guess, 0, NULL, part);
}

/* The same of what a ReLU makes of a block in which `measure` found nothing extraordinary. */
TARGET static int NAME(measure_rectified)(const float *x, int n, float guess, Part *part)
{
    return NAME(measure_as)(x, n, guess, 1, NULL, part);
}

/* The sum of squares as float32 sees it: NaN or infinite where an element is, or where a square overflows. */
TARGET static double NAME(squares)(const float *x, int n, const char *ahead)
{
    Floats q0 = {0}, q1 = {0}, q2 = {0}, q3 = {0};
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        for (int at = i; at < i + 4 * LANES && ahead; at += 16)
            fetch(ahead, at);
        Floats a = LOAD(x + i), b = LOAD(x + i + LANES), c = LOAD(x + i + 2 * LANES), d = LOAD(x + i + 3 * LANES);
        q0 += a * a;
        q1 += b * b;
        q2 += c * c;
        q3 += d * d;
    }
    double sum = NAME(add_lanes)((q0 + q1) + (q2 + q3));
    for (; i < n; i++)
        sum += (double)x[i] * x[i];
    return sum;
}

/* Are any bits under the mask set? Signs are left out, so that -0.0 is zero. */
TARGET static int NAME(any)(const Word *bits, int n, int32_t mask)
{
    Ints any0 = {0}, any1 = {0};
    int i = 0;
    int32_t any = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        any0 |= *(const Ints *)(bits + i);
        any1 |= *(const Ints *)(bits + i + LANES);
    }
    any0 |= any1;
    for (int lane = 0; lane < LANES; lane++)
        any |= any0[lane];
    for (; i < n; i++)
        any |= bits[i];
    return (any & mask) != 0;
}

TARGET static void NAME(subtract)(const float *x, const float *y, int n, const char *ahead, float *out)
{
    int i = 0;
    for (; i + 16 <= n && ahead; i += 16) {
        fetch(ahead, i);
        for (int at = i; at < i + 16; at += LANES)
            *(Floats *)(out + at) = LOAD(x + at) - LOAD(y + at);
    }
    for (; i < n; i++)
        out[i] = x[i] - y[i];
}

TARGET static void NAME(widen_bf16)(const uint16_t *x, int n, float *out)
{
    for (int i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)x[i] << 16;
        memcpy(out + i, &bits, 4);
    }
}

TARGET static void NAME(widen_f16)(const uint16_t *x, int n, float *out)
{
    int i = 0;
#ifdef HALVES_BY_EIGHT
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
#endif
    for (; i < n; i++) {
        uint32_t sign = (uint32_t)(x[i] & 0x8000) << 16, magnitude = x[i] & 0x7fff;
        uint32_t normal = (magnitude << 13) + (112u << 23); /* the exponent's bias is 127 instead of 15 */
        uint32_t special = (magnitude << 13) | 0x7f800000u;
        /* As numbers, not by a trick with denormals: the training may have told the processor to flush those. */
        float small = (float)(int32_t)magnitude * 5.9604644775390625e-8f;
        uint32_t small_bits;
        memcpy(&small_bits, &small, 4);
        uint32_t bits = magnitude < 0x400 ? small_bits : magnitude >= 0x7c00 ? special : normal;
        bits |= sign;
        memcpy(out + i, &bits, 4);
    }
}

static const Loops NAME(loops) = {
    NAME(measure), NAME(measure_rectified), NAME(squares), NAME(any), NAME(subtract), NAME(widen_bf16), NAME(widen_f16),
};

#undef Floats
#undef Ints
#undef LOAD
#undef NAME
#undef TARGET
#undef LANES
#undef MIN
#undef MAX
#undef COUNT_ZEROS
