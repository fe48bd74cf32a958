/* Reductions over a View: statistics, sum of squares, any non-zero element, histogram of exponents. No Python in here.
 *
 * The memory is read once, block by block. A block of float32 (bfloat16 and float16 are converted to it) goes through the vector loops of
 * simd_loops.inc; a block with a non-finite or extreme value, and every block of float64, is computed in double. Blocks are merged by the
 * formula of Chan, Golub and LeVeque, so the standard deviation is right also where the mean is much larger.
 */

static void merge(Moments *total, const Moments *block)
{
    total->zeros += block->zeros;
    total->nan += block->nan;
    total->inf += block->inf;
    if (block->num == 0)
        return;
    if (total->num == 0) {
        total->num = block->num;
        total->mean = block->mean;
        total->m2 = block->m2;
        total->low = block->low;
        total->high = block->high;
        return;
    }
    double a = (double)total->num, b = (double)block->num, delta = block->mean - total->mean;
    total->num += block->num;
    total->mean += delta * (b / (a + b));
    total->m2 += block->m2 + delta * delta * (a * b / (a + b));
    if (block->low < total->low)
        total->low = block->low;
    if (block->high > total->high)
        total->high = block->high;
}

/* The moments of one block in double, for any values. Non-finite values are counted and left out. Overwrites x. */
static void measure_exactly(double *x, int n, Moments *out)
{
    double sums[8] = {0}, low = INFINITY, high = -INFINITY;
    int num = 0;
    memset(out, 0, sizeof *out);
    for (int i = 0; i < n; i++) {
        double value = x[i];
        uint64_t bits;
        memcpy(&bits, x + i, 8);
        out->zeros += (bits << 1) == 0;
        if ((bits << 1 >> 53) == 0x7ff) {
            if (bits << 12)
                out->nan++;
            else
                out->inf++;
            continue;
        }
        low = value < low ? value : low;
        high = value > high ? value : high;
        x[num++] = value;
    }
    out->num = num;
    if (num == 0)
        return;
    out->low = low;
    out->high = high;
    out->mean = low;
    if (low == high)
        return;
    for (int i = 0; i < num; i++)
        sums[i & 7] += x[i];
    double center = (((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))) / num;
    double deviation[4] = {0}, squares[4] = {0};
    for (int i = 0; i < num; i++) {
        double d = x[i] - center;
        deviation[i & 3] += d;
        squares[i & 3] += d * d;
    }
    double error = (deviation[0] + deviation[1]) + (deviation[2] + deviation[3]);
    out->mean = center + error / num;
    out->m2 = (squares[0] + squares[1]) + (squares[2] + squares[3]) - error * error / num;
    if (out->m2 < 0)
        out->m2 = 0;
}

static __attribute__((noinline)) void measure_floats_exactly(const float *x, const float *minus, int n, Moments *out)
{
    double wide[BLOCK];
    for (int i = 0; i < n; i++)
        wide[i] = minus ? (double)x[i] - (double)minus[i] : (double)x[i];
    measure_exactly(wide, n, out);
}

/* `upcoming` and `upcoming_minus`: addresses to prefetch meanwhile, or NULL. */
static void measure_floats(const float *x, const float *minus, int n, float guess, const char *upcoming, const char *upcoming_minus, Moments *out)
{
    float difference[BLOCK];
    const float *values = x;
    if (minus) {
        loops->subtract(x, minus, n, upcoming_minus, difference);
        values = difference;
    }
    if (!loops->measure(values, n, guess, upcoming, out))
        measure_floats_exactly(x, minus, n, out);
}

/* x, or x - minus, times 2^-shift: without the shift squares of 1e200 overflow, and squares of 1e-200 vanish, in double too. */
static void measure_doubles(const double *x, const double *minus, int shift, int n, Moments *out)
{
    double wide[BLOCK];
    for (int i = 0; i < n; i++)
        wide[i] = minus ? x[i] - minus[i] : x[i];
    if (shift)
        for (int i = 0; i < n; i++)
            wide[i] = ldexp(wide[i], -shift);
    measure_exactly(wide, n, out);
}

/* The moments of `view`, or of `view` minus `minus` (same memory layout) where that is not NULL. Copies the elements to `copy` where that is
 * not NULL. */
static void measure_shifted(const View *view, const View *minus, char *copy, int shift, Moments *total)
{
    double scratch[BLOCK];
    float wide[BLOCK], wide_minus[BLOCK];
    const void *block;
    Cursor cursor;
    Moments moments;
    int num;
    memset(total, 0, sizeof *total);
    start(&cursor, view);
    for (int64_t at = 0; (num = next_block(&cursor, view, scratch, &block)) > 0; at += num) {
        const char *other = minus ? minus->data + at * minus->itemsize : NULL;
        if (copy)
            memmove(copy + at * view->itemsize, block, (size_t)num * (size_t)view->itemsize);
        if (view->dtype == F64)
            measure_doubles(block, (const double *)other, shift, num, &moments);
        else {
            const float *x = widen(view, block, num, wide);
            const float *y = other ? widen(minus, other, num, wide_minus) : NULL;
            const char *upcoming = prefetch_address(view, at), *upcoming_minus = other ? prefetch_address(minus, at) : NULL;
            measure_floats(x, y, num, (float)total->mean, upcoming, upcoming_minus, &moments);
        }
        merge(total, &moments);
    }
}

enum { NUM_STATISTICS = 9, L2 = 5, NUM_NAN = 7, NUM_INF = 8 }; /* columns of a row, in the order of sonde.events.STATISTICS */

/* The statistics of one View as a row; `minus` and `copy` as in measure_shifted. */
static void measure_view(const View *view, const View *minus, char *copy, double *row)
{
    Moments total;
    int shift = 0;
    measure_shifted(view, minus, copy, 0, &total);
    double largest = fmax(fabs(total.low), fabs(total.high)), low = total.low, high = total.high;
    if (view->dtype == F64 && total.num && largest != 0 && (largest > 1e140 || largest < 1e-140)) {
        shift = ilogb(largest);
        measure_shifted(view, minus, NULL, shift, &total);
    }
    double num = (double)total.num, repeats = view->repeats;
    row[0] = (double)view->num * repeats;
    row[1] = ldexp(total.mean, shift);
    row[2] = num > 0 ? ldexp(sqrt(total.m2 / num), shift) : 0;
    row[3] = low;
    row[4] = high;
    row[L2] = ldexp(sqrt((total.m2 + num * total.mean * total.mean) * repeats), shift);
    row[6] = (double)total.zeros * repeats;
    row[NUM_NAN] = (double)total.nan * repeats;
    row[NUM_INF] = (double)total.inf * repeats;
}

/* Adds the squares of a View to *sum. Returns 1 where an element is not finite. */
static int add_squares(const View *view, double *sum)
{
    double scratch[BLOCK], total = 0;
    float wide[BLOCK];
    const void *block;
    Cursor cursor;
    int num, is_bad = 0;
    start(&cursor, view);
    for (int64_t at = 0; !is_bad && (num = next_block(&cursor, view, scratch, &block)) > 0; at += num) {
        double squares = 0;
        if (view->dtype == F64) {
            const double *x = block;
            double lanes[4] = {0};
            for (int i = 0; i < num; i++)
                lanes[i & 3] += x[i] * x[i];
            squares = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
            for (int i = 0; i < num && !isfinite(squares) && !is_bad; i++)
                is_bad = !isfinite(x[i]);
        } else {
            const float *x = widen(view, block, num, wide);
            squares = loops->sum_squares(x, num, prefetch_address(view, at));
            /* Sums outside of float32's range are computed again in double. A block of zeros is common (unused embeddings) and recognized by its
             * bits. */
            if (!(squares < 1e38) || (squares < 1e-30 && loops->any_bits((const Word *)x, num, 0x7fffffff))) {
                squares = 0;
                for (int i = 0; i < num; i++)
                    squares += (double)x[i] * x[i];
                is_bad = !isfinite(squares);
            }
        }
        total += squares;
    }
    *sum += total * view->repeats;
    return is_bad;
}

/* Whether any of the first `limit` elements in memory is not zero. */
static int any_nonzero_in(const View *view, int64_t limit)
{
    double scratch[BLOCK];
    const void *block;
    Cursor cursor;
    int num;
    start(&cursor, view);
    while (limit > 0 && (num = next_block(&cursor, view, scratch, &block)) > 0) {
        if (num > limit)
            num = (int)limit;
        limit -= num;
        if (view->dtype == F64) {
            const double *x = block;
            for (int i = 0; i < num; i++)
                if (x[i] != 0)
                    return 1;
        } else if (view->dtype == F32) {
            if (loops->any_bits(block, num, 0x7fffffff))
                return 1;
        } else {
            const uint16_t *x = block;
            uint16_t any = 0;
            for (int i = 0; i < num; i++)
                any |= x[i];
            if (any & 0x7fff)
                return 1;
        }
    }
    return 0;
}

/* The range of floor(log2 |x|) of float32, denormals included; float64 is clamped to it. */
enum { LOWEST_EXPONENT = -149, HIGHEST_EXPONENT = 127, NUM_EXPONENTS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1 };

/* Counts the exponents of the finite non-zero elements. Of more than `limit` elements (0: no limit) only about that many are counted, in evenly
 * spaced blocks. */
static void count_exponents(const View *view, int64_t limit, int64_t *counts)
{
    int64_t every = limit > 0 && view->num > limit ? (view->num + limit - 1) / limit : 1;
    double scratch[BLOCK];
    float wide[BLOCK];
    int64_t normal[4][256] = {{0}};
    const void *block;
    Cursor cursor;
    int num;
    memset(counts, 0, sizeof(int64_t) * NUM_EXPONENTS);
    start(&cursor, view);
    for (int64_t at = 0; (num = next_block(&cursor, view, scratch, &block)) > 0; at++) {
        if (at % every)
            continue;
        if (view->dtype == F64) {
            const double *x = block;
            for (int i = 0; i < num; i++) {
                if (x[i] == 0 || !isfinite(x[i]))
                    continue;
                int exponent = ilogb(x[i]);
                counts[(exponent < LOWEST_EXPONENT ? LOWEST_EXPONENT : exponent > HIGHEST_EXPONENT ? HIGHEST_EXPONENT : exponent) - LOWEST_EXPONENT]++;
            }
            continue;
        }
        const float *x = widen(view, block, num, wide);
        for (int i = 0; i < num; i++) { /* four tables: with one, equal neighbors would wait for each other's store */
            uint32_t bits;
            memcpy(&bits, x + i, 4);
            bits &= 0x7fffffff;
            normal[i & 3][bits >> 23]++;
            if (bits < 0x800000 && bits)
                counts[31 - __builtin_clz(bits)]++; /* the lowest bit of a denormal is 2^-149 */
        }
    }
    for (int exponent = 1; exponent < 255; exponent++)
        for (int table = 0; table < 4; table++)
            counts[exponent - 127 - LOWEST_EXPONENT] += normal[table][exponent];
}
