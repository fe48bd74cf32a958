/* The statistics of a View: blocks described one by one and joined. Includes no Python. */

static void join(Part *total, const Part *part)
{
    total->zeros += part->zeros;
    total->nan += part->nan;
    total->inf += part->inf;
    if (part->num == 0)
        return;
    if (total->num == 0) {
        total->num = part->num;
        total->mean = part->mean;
        total->m2 = part->m2;
        total->low = part->low;
        total->high = part->high;
        return;
    }
    double a = (double)total->num, b = (double)part->num, apart = part->mean - total->mean;
    total->num += part->num;
    total->mean += apart * (b / (a + b));
    total->m2 += part->m2 + apart * apart * (a * b / (a + b));
    if (part->low < total->low)
        total->low = part->low;
    if (part->high > total->high)
        total->high = part->high;
}

/* One block in double, whatever is in it. Values that are not finite are counted and left out; x is used up. */
static void measure_exactly(double *x, int n, Part *part)
{
    double sums[8] = {0}, low = INFINITY, high = -INFINITY;
    int kept = 0;
    memset(part, 0, sizeof *part);
    for (int i = 0; i < n; i++) {
        double value = x[i];
        uint64_t bits;
        memcpy(&bits, x + i, 8);
        part->zeros += (bits << 1) == 0;
        if ((bits << 1 >> 53) == 0x7ff) {
            if (bits << 12)
                part->nan++;
            else
                part->inf++;
            continue;
        }
        low = value < low ? value : low;
        high = value > high ? value : high;
        x[kept++] = value;
    }
    part->num = kept;
    if (kept == 0)
        return;
    part->low = low;
    part->high = high;
    part->mean = low;
    if (low == high)
        return;
    for (int i = 0; i < kept; i++)
        sums[i & 7] += x[i];
    double centre = (((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))) / kept;
    double deviation[4] = {0}, squares[4] = {0};
    for (int i = 0; i < kept; i++) {
        double d = x[i] - centre;
        deviation[i & 3] += d;
        squares[i & 3] += d * d;
    }
    double off = (deviation[0] + deviation[1]) + (deviation[2] + deviation[3]);
    part->mean = centre + off / kept;
    part->m2 = (squares[0] + squares[1]) + (squares[2] + squares[3]) - off * off / kept;
    if (part->m2 < 0)
        part->m2 = 0;
}

static __attribute__((noinline)) void measure_floats_exactly(const float *x, const float *minus, int n, Part *part)
{
    double wide[BLOCK];
    for (int i = 0; i < n; i++)
        wide[i] = minus ? (double)x[i] - (double)minus[i] : (double)x[i];
    measure_exactly(wide, n, part);
}

/* Returns 1 where the block was an ordinary one. `ahead` and `ahead_minus`: what to ask for meanwhile. */
static int measure_floats(const float *x, const float *minus, int n, float guess, const char *ahead, const char *ahead_minus, Part *part)
{
    float difference[BLOCK];
    const float *values = x;
    if (minus) {
        loops->subtract(x, minus, n, ahead_minus, difference);
        values = difference;
    }
    if (loops->measure(values, n, guess, ahead, part))
        return 1;
    measure_floats_exactly(x, minus, n, part);
    return 0;
}

/* x, or x - minus, times 2^-shift: squares of 1e200 overflow and squares of 1e-200 vanish also in double. */
static void measure_doubles(const double *x, const double *minus, int shift, int n, Part *part)
{
    double wide[BLOCK];
    for (int i = 0; i < n; i++)
        wide[i] = minus ? x[i] - minus[i] : x[i];
    if (shift)
        for (int i = 0; i < n; i++)
            wide[i] = ldexp(wide[i], -shift);
    measure_exactly(wide, n, part);
}

/* Goes through `view`, and in step with it through `minus` (same memory layout) where that is given; copies `view` to `copy` where that is.
 * `rectified`, where given, is what a ReLU would make of it, for one reading of both; its num stays short of the view's where it cannot tell. */
static void measure_shifted(const View *view, const View *minus, char *copy, int shift, Part *total, Part *rectified)
{
    double scratch[BLOCK];
    float wide[BLOCK], wide_minus[BLOCK];
    const void *block;
    Cursor cursor;
    Part part;
    int num;
    memset(total, 0, sizeof *total);
    start(&cursor, view);
    for (int64_t at = 0; (num = next_block(&cursor, view, scratch, &block)) > 0; at += num) {
        const char *other = minus ? minus->data + at * minus->itemsize : NULL;
        if (copy)
            memmove(copy + at * view->itemsize, block, (size_t)num * (size_t)view->itemsize);
        if (view->kind == F64)
            measure_doubles(block, (const double *)other, shift, num, &part);
        else {
            const float *x = widen(view, block, num, wide);
            const float *y = other ? widen(minus, other, num, wide_minus) : NULL;
            const char *ahead = ahead_of(view, at), *ahead_minus = other ? ahead_of(minus, at) : NULL;
            Part positive;
            if (measure_floats(x, y, num, (float)total->mean, ahead, ahead_minus, &part) && rectified &&
                loops->measure_rectified(x, num, (float)rectified->mean, &positive))
                join(rectified, &positive);
        }
        join(total, &part);
    }
}

/* A row, in the order of sonde.events.STATISTICS. */
static void write_row(const Part *total, const View *view, double low, double high, int shift, double *row)
{
    double num = (double)total->num, repeats = view->repeats;
    row[0] = (double)view->num * repeats;
    row[1] = ldexp(total->mean, shift);
    row[2] = num > 0 ? ldexp(sqrt(total->m2 / num), shift) : 0;
    row[3] = low;
    row[4] = high;
    row[5] = ldexp(sqrt((total->m2 + num * total->mean * total->mean) * repeats), shift);
    row[6] = (double)total->zeros * repeats;
    row[7] = (double)total->nan * repeats;
    row[8] = (double)total->inf * repeats;
}

/* The row of one tensor, and where it is asked for that of its ReLU. Returns 1 where the latter was told. */
static int measure_view(const View *view, const View *minus, char *copy, double *row, double *rectified_row)
{
    Part total, rectified = {0};
    int shift = 0;
    measure_shifted(view, minus, copy, 0, &total, rectified_row ? &rectified : NULL);
    double largest = fmax(fabs(total.low), fabs(total.high)), low = total.low, high = total.high;
    if (view->kind == F64 && total.num && largest != 0 && (largest > 1e140 || largest < 1e-140)) {
        shift = ilogb(largest);
        measure_shifted(view, minus, NULL, shift, &total, NULL);
    }
    write_row(&total, view, low, high, shift, row);
    if (!rectified_row || view->num == 0 || rectified.num != view->num)
        return 0;
    write_row(&rectified, view, rectified.low, rectified.high, 0, rectified_row);
    return 1;
}

/* Adds the squares of a view to *sum. Returns 1 where an element is not finite. */
static int add_squares(const View *view, double *sum)
{
    double scratch[BLOCK], total = 0;
    float wide[BLOCK];
    const void *block;
    Cursor cursor;
    int num, bad = 0;
    start(&cursor, view);
    for (int64_t at = 0; !bad && (num = next_block(&cursor, view, scratch, &block)) > 0; at += num) {
        double squares = 0;
        if (view->kind == F64) {
            const double *x = block;
            double lanes[4] = {0};
            for (int i = 0; i < num; i++)
                lanes[i & 3] += x[i] * x[i];
            squares = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
            for (int i = 0; i < num && !isfinite(squares) && !bad; i++)
                bad = !isfinite(x[i]);
        } else {
            const float *x = widen(view, block, num, wide);
            squares = loops->squares(x, num, ahead_of(view, at));
            /* What float32 cannot hold is looked at again. A block of zeros is common (unused embeddings) and told apart by its bits. */
            if (!(squares < 1e38) || (squares < 1e-30 && loops->any((const Word *)x, num, 0x7fffffff))) {
                squares = 0;
                for (int i = 0; i < num; i++)
                    squares += (double)x[i] * x[i];
                bad = !isfinite(squares);
            }
        }
        total += squares;
    }
    *sum += total * view->repeats;
    return bad;
}

/* Is any of the first `limit` elements not zero? */
static int any_nonzero_in(View *view, int64_t limit)
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
        if (view->kind == F64) {
            const double *x = block;
            for (int i = 0; i < num; i++)
                if (x[i] != 0)
                    return 1;
        } else if (view->kind == F32) {
            if (loops->any(block, num, 0x7fffffff))
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

/* floor(log2 |x|) of float32, denormals included; float64 is clamped to this range. */
enum { LOWEST = -149, HIGHEST = 127, NUM_EXPONENTS = HIGHEST - LOWEST + 1 };

/* Of more than `limit` elements only so many are counted, in evenly spaced blocks; then the counts are of these. */
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
        if (view->kind == F64) {
            const double *x = block;
            for (int i = 0; i < num; i++) {
                if (x[i] == 0 || !isfinite(x[i]))
                    continue;
                int exponent = ilogb(x[i]);
                counts[(exponent < LOWEST ? LOWEST : exponent > HIGHEST ? HIGHEST : exponent) - LOWEST]++;
            }
            continue;
        }
        const float *x = widen(view, block, num, wide);
        for (int i = 0; i < num; i++) { /* four tables, or equal neighbours would wait for each other */
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
            counts[exponent - 127 - LOWEST] += normal[table][exponent];
}

/* Rows of double to columns of float, at any address. 0 where a number would not survive. */
static int to_singles(const double *rows, int64_t num_rows, int64_t num_columns, char *out)
{
    for (int64_t column = 0; column < num_columns; column++)
        for (int64_t row = 0; row < num_rows; row++) {
            double value = rows[row * num_columns + column];
            float single = (float)value;
            if ((isinf(single) && !isinf(value)) || (single == 0 && value != 0))
                return 0;
            memcpy(out, &single, 4);
            out += 4;
        }
    return 1;
}
