/* The ordinary end of a step: `StepEnds._end_step` where nothing is due, and the next step is not to be observed, unless this one was.
 * As everywhere here, nothing is changed before that is known. */

#include <pthread.h>
#include <unistd.h>

enum { NOW_AND_THEN = 8, RARELY = 64, LONG_RUN = 1024, SETTLED = 8, UNLINKED_CHECK = 256 }; /* as sonde.capture.probes.base, xray and sonde.runlog.writer have them */

/* The governor's constants, and the x-ray's: written to once, by `Beat`. */
static double aim, least_share, start_ns, memory, long_memory, xray_slow, xray_slow_ns, xray_light_ns, xray_memory;

/* Is this None, or a number of steps that does not divide this one? */
static int is_not_due(PyObject *every, long step)
{
    const long num = every && PyLong_CheckExact(every) ? PyLong_AsLong(every) : -1;
    forgive();
    return every == Py_None || (num > 0 && step % num != 0);
}

static int is_milestone(long step)
{
    while (step > 3 && step % 2 == 0)
        step /= 2;
    return step >= 1 && step <= 3;
}

typedef struct {
    long step;
    double step_ns, own_ns;                /* of the step */
    double purse_ns, plain_ns, rest_ns;    /* of the governor, afterwards */
    double usual_ns, trained_ns;           /* of the x-ray, afterwards */
} End;

/* OverheadBudget.step_ended of a step that was not observed, and OverheadBudget.observes of the next. */
static int governor_rests(Beat *self, End *end)
{
    PyObject *governor = self->governor, *rests = peek(governor, n__rest_ns), *rest = rests && PyDict_CheckExact(rests) ? PyDict_GetItemWithError(rests, Py_False) : NULL;
    const double plain = real(governor, n__plain_ns), observed = real(governor, n__observed_ns), purse = real(governor, n__purse_ns);
    const double budget = real(governor, n_budget), rest_ns = fmax(0, end->step_ns - end->own_ns);
    if (!rest || !PyFloat_CheckExact(rest) || !(plain > 0) || !is_not_due(peek(governor, n_every), end->step + 1))
        return 0;
    const double known = PyFloat_AS_DOUBLE(rest), income = aim * budget * rest_ns;
    end->plain_ns = memory * plain + (1 - memory) * end->own_ns;
    end->rest_ns = long_memory * known + (1 - long_memory) * fmin(rest_ns, 2 * known);
    end->purse_ns = fmin(purse + fmax(income - end->plain_ns, least_share * income), start_ns + 2 * observed);
    return !says(governor, n_every, Py_None) || (whole(governor, n__owed) == 0 && is_not_due(peek(governor, n_at_least_every), end->step + 1) &&
                                                 !is_milestone(end->step + 1) && end->purse_ns < observed);
}

/* StepProfiler.step_begins of the next step. */
static int xray_rests(Beat *self, End *end)
{
    PyObject *xray = self->xray;
    const double last = end->step_ns - end->own_ns, usual = real(xray, n__usual_ns);
    end->trained_ns = real(xray, n__trained_ns) + last;
    end->usual_ns = usual + (1 - xray_memory) * (last - usual);
    if (says(xray, n__wanted, Py_False))
        return 1;
    if (!says(xray, n__every, Py_None) || end->step + 1 <= SETTLED || !(last <= xray_slow * usual + xray_slow_ns))
        return 0;
    if (end->trained_ns >= real(xray, n_due_ns))
        return end->usual_ns < xray_light_ns && end->trained_ns < real(xray, n_long_ns);
    return end->step + 1 != whole(xray, n__expected);
}

static int is_quiet(Beat *self, const End *end)
{
    PyObject *watched = peek(self->models, n__watched), *said = peek(self->guard, n__said), *unseen = PyDict_GetItemWithError(self->meter->scalars, n_forwards);
    return end->step & (end->step - 1) && is_empty(self->far, n_waiting) && is_empty(self->journal, n__waiting) &&
           is_empty(self->journal, n__new_sites) && says(self->xray, n_active, Py_False) && says(self->clock, n__opens, Py_False) &&
           whole(self->clock, n__opening_backwards) == 0 && real(self->loop, n_quiet_until_ns) > (double)self->meter->entered_ns && watched &&
           PyList_CheckExact(watched) && said && PySet_Check(said) && PySet_GET_SIZE(said) == 0 && is_empty(self->losses, n__away) && unseen &&
           PyFloat_CheckExact(unseen) && PyFloat_AS_DOUBLE(unseen) > 0 && self->meter->step_began;
}

/* ---- the end ---- */

static int put_scalar(Beat *self, PyObject *name, double number)
{
    PyObject *value = PyFloat_FromDouble(number);
    const int failed = !value || PyDict_SetItem(self->meter->scalars, name, value) < 0;
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

/* Losses.write, Guard.write, Phases.write */
static int write_scalars(Beat *self, const End *end)
{
    PyObject *sums = peek(self->losses, n__sums), *series, *sum, *square = peek(self->guard, n__sum_of_squares);
    Py_ssize_t place = 0;
    while (sums && PyDict_Next(sums, &place, &series, &sum))
        if (!PyTuple_CheckExact(sum) || put_scalar(self, series, PyFloat_AsDouble(PyTuple_GET_ITEM(sum, 0)) / PyFloat_AsDouble(PyTuple_GET_ITEM(sum, 1))) < 0)
            return -1;
    if (square && PyFloat_CheckExact(square) && put_scalar(self, n_grad_norm, sqrt(PyFloat_AS_DOUBLE(square))) < 0)
        return -1;
    return put_scalar(self, n_step_ms, end->step_ns / 1e6) < 0 || put_scalar(self, n_sonde_ms, end->own_ns / 1e6) < 0 ? -1 : 0;
}

static long this_process; /* asking the system takes as long as all other questions of `put_quickly` */

static void know_this_process(void) { this_process = (long)getpid(); }

/* Writer.put where nothing else is to be written and nothing is amiss; 0 where that is left to Python, with nothing written. */
static int put_quickly(Beat *self, PyObject *record)
{
    PyObject *writer = self->writer, *lock = peek(writer, n__lock), *seam = PyDict_GetItemWithError(self->writer_globals, n__write);
    const long fd = whole(writer, n__fd), size = whole(writer, n__size), num_flushes = whole(writer, n__num_flushes);
    forgive();
    if (!lock || !Py_IS_TYPE(lock, &LatchType) || seam != self->os_write || fd < 0 || whole(writer, n__pid) != this_process || !is_empty(writer, n__pending) ||
        !says(writer, n__gap, Py_None) || size < 0 || size > whole(writer, n__segment_bytes) || num_flushes < 0 || (num_flushes + 1) % UNLINKED_CHECK == 0)
        return 0;
    if (latch_take((Latch *)lock, 0) != 1)
        return 0;
    Py_INCREF(lock);
    const char *data = PyBytes_AS_STRING(record);
    const Py_ssize_t num = PyBytes_GET_SIZE(record);
    Py_ssize_t written = 0, more = 1;
    Py_BEGIN_ALLOW_THREADS
    while (written < num && (more = write((int)fd, data + written, (size_t)(num - written))) > 0)
        written += more;
    Py_END_ALLOW_THREADS
    int done = written > 0;
    if (written == num)
        done = put_whole(writer, n__size, size + num) < 0 || put_whole(writer, n__num_flushes, num_flushes + 1) < 0 ? -1 : 1;
    else if (written > 0) { /* a full disk, usually: what is lost is counted there */
        PyObject *settled = PyObject_CallMethod(writer, "_settle", "[O]ins", record, 0, written, "short write");
        done = settled ? 1 : -1;
        Py_XDECREF(settled);
    }
    latch_leave((Latch *)lock);
    Py_DECREF(lock);
    return done;
}

/* object.name(…, flush=True) */
static PyObject *call_flushing(PyObject *object, PyObject *name, PyObject *const *args, Py_ssize_t num)
{
    PyObject *all[6] = {NULL, object}, *names = PyTuple_Pack(1, n_flush);
    for (Py_ssize_t i = 0; i < num; i++)
        all[i + 2] = args[i];
    all[num + 2] = Py_True;
    PyObject *done = names ? PyObject_VectorcallMethod(name, all + 1, (size_t)(num + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, names) : NULL;
    Py_XDECREF(names);
    return done;
}

/* Journal._write_step: there is a scalar that the plan does not know. */
static PyObject *write_new_scalars(Beat *self, long step, long long time_ns)
{
    PyObject *const args[] = {PyLong_FromLong(step), self->meter->scalars, PyLong_FromLongLong(time_ns)};
    PyObject *done = args[0] && args[2] ? call_flushing(self->journal, n__write_step, args, 3) : NULL;
    Py_XDECREF(args[0]);
    Py_XDECREF(args[2]);
    return done;
}

/* Journal.end_step */
static int write_step(Beat *self, const End *end)
{
    PyObject *plan = peek(self->journal, n__step_plan), *fresh = peek(self->journal, n__fresh), *scalars = self->meter->scalars, *done = NULL;
    const long long time_ns = now_ns() - (long long)real(self->journal, n__started_ns);
    PyObject *record = NULL;
    if (plan && plan != Py_None && fresh && PyDict_GET_SIZE(scalars) == PyDict_GET_SIZE(fresh))
        record = encode_step(plan, end->step, time_ns, scalars);
    const int is_written = record ? put_quickly(self, record) : 0;
    if (is_written)
        done = is_written > 0 ? Py_NewRef(Py_None) : NULL;
    else if (record)
        done = call_flushing(self->writer, n_put, &record, 1);
    else if (!PyErr_Occurred())
        done = write_new_scalars(self, end->step, time_ns);
    Py_XDECREF(record);
    Py_XDECREF(done);
    return done && fresh && PyDict_Update(scalars, fresh) == 0 ? 0 : -1;
}

/* Calls a method that has nothing to answer. */
static int call(PyObject *object, PyObject *name)
{
    PyObject *done = PyObject_CallMethodNoArgs(object, name);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* The rest of StepEnds._end_step, but for its choice */
static int begin_step(Beat *self, const End *end)
{
    PyObject *stepped = peek(self->clock, n__stepped), *sums = peek(self->losses, n__sums), *calls = peek(self->kept, n_calls);
    if (!stepped || !sums || !calls || put_whole(self->clock, n_number, end->step + 1) < 0 || put(self->clock, n_active, Py_False) < 0 ||
        put_whole(self->clock, n__backwards, 0) < 0 || put(self->guard, n__sum_of_squares, Py_None) < 0 || call(calls, n_clear) < 0 ||
        put(self->kept, n_frame, Py_None) < 0 || put(self->kept, n_maker, Py_None) < 0 || put_float(self->losses, n__scale, NAN) < 0 ||
        put(self->losses, n__scale_away, Py_None) < 0)
        return -1;
    PyDict_Clear(stepped);
    PyDict_Clear(sums);
    PyObject *watched = peek(self->models, n__watched); /* not before: what was let go of may have had a destructor that changes it */
    for (Py_ssize_t i = 0; watched && i < PyList_GET_SIZE(watched); i++) {
        PyObject *doors = peek(PyList_GET_ITEM(watched, i), n_doors_used);
        if (!doors || PySet_Clear(doors) < 0)
            return -1;
    }
    return 0;
}

/* OverheadBudget.step_ended and what follows from it; of an observed step that is Python, which also decides about the next. */
static int tell_governor(Beat *self, const End *end, int observed)
{
    PyObject *governor = self->governor, *rests = peek(governor, n__rest_ns), *done = NULL;
    if (observed)
        done = PyObject_CallMethod(self->loop, "begin_after_observed", "dd", end->step_ns, end->own_ns);
    else if ((done = PyFloat_FromDouble(end->rest_ns)) &&
             (PyDict_SetItem(rests, Py_False, done) < 0 || put_float(governor, n__plain_ns, end->plain_ns) < 0 ||
              put_float(governor, n__purse_ns, end->purse_ns) < 0))
        Py_CLEAR(done);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Panel.each("now_and_then", step) */
static int look_now_and_then(Beat *self, long step)
{
    PyObject *number = PyLong_FromLong(step);
    const int failed = !number || tell_probes(self, n_now_and_then, &number, 1) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

/* 1: the step has ended, and the next one begun. 0: Python ends it. */
static int end_quickly(Beat *self)
{
    Meter *meter = self->meter;
    End end = {.step = whole(self->clock, n_number)};
    const int observed = is_observed(self);
    if (!is_quiet(self, &end) || (observed && call(self->loop, n_write_observed) < 0))
        return PyErr_Occurred() ? -1 : 0;
    const long long now = now_ns();
    end.own_ns = (double)(meter->desk->own_ns + now - meter->entered_ns);
    end.step_ns = (double)(now - meter->step_began);
    if ((observed ? !is_empty(self->far, n_waiting) : !governor_rests(self, &end)) || !xray_rests(self, &end))
        return 0;
    PyObject *xray = self->xray;
    int failed = meter_account(meter) < 0 || write_scalars(self, &end) < 0 || put_float(xray, n__usual_ns, end.usual_ns) < 0 ||
                 put_float(xray, n__trained_ns, end.trained_ns) < 0 || PyList_SetSlice(meter->under_way, 1, PyList_GET_SIZE(meter->under_way), NULL) < 0;
    meter->mark_ns = meter->step_began = meter->entered_ns = now;
    meter->desk->own_ns = 0;
    if (end.step % (end.step < LONG_RUN ? NOW_AND_THEN : RARELY) == 0)
        failed = failed || look_now_and_then(self, end.step) < 0;
    if (failed || write_step(self, &end) < 0 || begin_step(self, &end) < 0 || tell_governor(self, &end, observed) < 0)
        return -1;
    if (says(self->loop, n_searches, Py_False))
        return 1;
    PyObject *done = PyObject_CallMethod(self->loop, "on_step_end", "lO", end.step, Py_False);
    Py_XDECREF(done);
    return done ? 1 : -1;
}
