/* The beat of an ordinary step: what the loop does when nothing is wrong, with no line of Python in between but the probes' where it is observed.
 *
 * Every handler first looks whether the call is the ordinary one, and changes nothing before it knows. Then it does exactly what the method of
 * the same name in sonde.capture.step_tracker would do, on the same objects; everything else it leaves to that method. Once in a step, Python has gone
 * cold: a frame of it costs several microseconds, and the loop had about a hundred of them.
 */

#define PARTS(X)                                                                                                                                    \
    X(clock) X(ledger) X(kept) X(losses) X(lines) X(guard) X(spikes) X(evaluations) X(models) X(governor) X(xray) X(journal) X(writer) X(far) X(panel) X(course)
#define TOOLS(X) X(graph_task) X(tracing) X(grad_enabled) X(rng_state) X(is_library) X(call_type) X(rate_names) X(constants) X(writer_globals) X(os_write)
#define NAMES(X)                                                                                                                                    \
    X(_anchor) X(_backwards) X(_closure) X(_depth) X(_entered) X(_ever_stepped) X(_in_step) X(_losses) X(_norms) X(_num_alike) X(_num_lookups)       \
    X(_place) X(_scale) X(_scaler_stepped) X(_series) X(_stepped) X(_sum_of_squares) X(_sums) X(_thread) X(_under_way) X(_values)        \
    X(_with_output) X(_without) X(accounts) X(active) X(append) X(backward_since) X(bound) X(by_library) X(calls) X(cleared) X(divided_by)           \
    X(doors_used) X(doubts) X(end_plain_step) X(ever_entered) X(ever_used) X(far) X(found_inf) X(frame) X(grad) X(index) X(is_floating_point)        \
    X(known_optimizers) X(last) X(lr) X(maker) X(name) X(num) X(num_steps) X(number) X(optimizer) X(param_groups) X(params) X(training)      \
    X(witnesses) X(written) X(backward_begins) X(backward_ended) X(forward_begins) X(forward_ended) X(optimizer_begins) X(optimizer_ended)           \
    X(zero_grad) X(backwards) X(deaf) X(faults) X(fetch_begins) X(fetch_ended) X(forwards) X(loss) X(optimizer_step) X(optimizer_steps) X(zero_grads) X(forward)               \
    X(clip) X(clips) X(clipped) X(_away) X(_fd) X(_gap) X(_lock) X(_num_flushes) X(_pending) X(_pid) X(_segment_bytes) X(_size) X(_write) X(_double)                \
    X(_every) X(_expected) X(_fresh) X(_new_sites) X(_observed_ns) X(_opening_backwards) X(_opens) X(_owed) X(_plain_ns)         \
    X(_purse_ns) X(_renew) X(_rest_ns) X(_said) X(_shape) X(_scale_away) X(_single) X(_write_step) X(after) X(backward) X(before) X(closure) X(each) X(entered) X(fetched) X(flush) X(guarded) X(left) X(thread) X(trained) X(write_observed) X(_started_ns) X(_step_plan) X(_trained_ns) X(_usual_ns) X(_waiting) X(_wanted) X(_watched)         \
    X(at_least_every) X(budget) X(clear) X(due_ns) X(every) X(grad_norm) X(long_ns) X(now_and_then) X(put) X(quiet_until_ns) X(rng) X(rng_due) X(_schedulers) X(has_stepped) X(scheduler_step) X(scheduler_stepped) X(scheduler_steps) X(searches) X(single_closures) X(sonde_ms) X(_graph_task) X(_is_compiling_flag) X(_listeners) X(call) X(original) X(watched) X(step_ms) X(waiting)

#define DECLARE(name) static PyObject *n_##name;
NAMES(DECLARE)
#undef DECLARE

enum { LEARNT = 8, CHECKED_EVERY = 128, RENEWED = 16, WINDOW = 64 }; /* as sonde.capture.call_site and sonde.spike_detection have them; a test compares */
enum { STILL = 4, RESTLESS = 64 }; /* forwards for which a random state is believed, or not compared */

/* What is known of all gradients of an optimizer: the sum of their squares, and a mark by which it is seen that they are still the same ones,
 * unchanged. */
typedef struct {
    double sum;
    uint64_t mark;
} Gradients;

typedef struct {
    PyObject_HEAD
    PyObject *loop;
    Meter *meter;
    Gradients in_closure; /* when its backward ended; a sum of 0: not known */
#define DECLARE(name) PyObject *name;
    PARTS(DECLARE)
    TOOLS(DECLARE)
#undef DECLARE
} Beat;

#include "_kernel_peek.h"
#include "_kernel_latch.h"
#include "_kernel_records.h"
#include "_kernel_gradients.h"
#include "_kernel_ordinary.h"
#include "_kernel_update.h"
#include "_kernel_end.h"

/* ---- calling them ---- */

/* Half of a handler is done, and then it failed: as `contained` has it. What is no Exception, Ctrl-C above all, is the user's. */
static PyObject *stumble(Beat *self, PyObject *name)
{
    self->meter->desk->plain = self->meter->desk->steady = 0;
    if (!PyErr_Occurred())
        Py_RETURN_NONE;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyObject *type, *error, *trace, *faults = NULL, *answer = NULL;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if ((faults = PyObject_GetAttr(self->loop, n_faults)))
        answer = PyObject_CallMethod(faults, "caught", "OsO", name, "", error);
    Py_XDECREF(faults);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return answer;
}

static PyObject *raise_owed(void)
{
    PyObject *error = owed;
    owed = NULL;
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_DECREF(error);
    return NULL;
}

/* The handler in C where the step is an ordinary one, else the loop's method. */
static PyObject *beat(PyObject *object, PyObject *const *args, Py_ssize_t num_args, Py_ssize_t expected, PyObject *name,
                      int (*quick)(Beat *, PyObject *const *))
{
    Beat *self = (Beat *)object;
    if (!self->loop || check_count("a handler of the loop", num_args, expected) < 0)
        return self->loop ? NULL : Py_NewRef(Py_None);
    Desk *desk = self->meter->desk;
    if (desk->steady && says(self->loop, n_deaf, Py_False)) {
        self->meter->entered_ns = now_ns();
        int done = quick(self, args);
        const int ended = done == 2 ? end_quickly(self) : 0;
        desk->own_ns += now_ns() - self->meter->entered_ns; /* which a step that began sets anew */
        if (owed)
            return raise_owed(); /* a step that is not ended yet is ended by the next call */
        if (done == 2 && ended == 0)
            return PyObject_CallMethodNoArgs(self->loop, n_end_plain_step);
        if (done == 2)
            done = ended;
        if (done == 1)
            Py_RETURN_NONE;
        if (done < 0)
            return stumble(self, name);
    }
    PyObject *method = PyObject_GetAttr((PyObject *)Py_TYPE(self->loop), name), *answer = NULL, *all[8] = {NULL, self->loop};
    for (Py_ssize_t i = 0; i < expected; i++)
        all[i + 2] = args[i];
    if (method)
        answer = PyObject_Vectorcall(method, all + 1, (size_t)(expected + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_XDECREF(method);
    return answer;
}

#define HANDLER(name, expected)                                                                                                                     \
    static PyObject *beat_##name(PyObject *self, PyObject *const *args, Py_ssize_t num_args)                                                        \
    {                                                                                                                                               \
        return beat(self, args, num_args, expected, n_##name, quick_##name);                                                                        \
    }
HANDLER(fetch_begins, 0)
HANDLER(fetch_ended, 1)
HANDLER(zero_grad, 1)
HANDLER(forward_begins, 4)
HANDLER(forward_ended, 3)
HANDLER(backward_begins, 1)
HANDLER(backward_ended, 0)
HANDLER(optimizer_begins, 2)
HANDLER(optimizer_ended, 1)
HANDLER(clipped, 1)
HANDLER(scheduler_stepped, 2)

static int beat_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Beat *self = (Beat *)object;
    PyObject *loop, *meter;
    if (!PyArg_ParseTuple(args, "OO!:Beat", &loop, &MeterType, &meter))
        return -1;
#define TAKE(part)                                                                                                                                  \
    {                                                                                                                                               \
        PyObject *given = kwargs ? PyDict_GetItemString(kwargs, #part) : NULL;                                                                      \
        if (!given)                                                                                                                                 \
            return PyErr_SetString(PyExc_TypeError, "Beat needs " #part), -1;                                                                       \
        Py_XSETREF(self->part, Py_NewRef(given));                                                                                                   \
    }
    PARTS(TAKE)
    TOOLS(TAKE)
#undef TAKE
    double *const constants[] = {&aim, &least_share, &start_ns, &memory, &long_memory, &xray_slow, &xray_slow_ns, &xray_light_ns, &xray_memory};
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++) {
        PyObject *given = PyTuple_CheckExact(self->constants) ? PyTuple_GetItem(self->constants, (Py_ssize_t)i) : NULL;
        *constants[i] = given ? PyFloat_AsDouble(given) : NAN;
        if (PyErr_Occurred())
            return -1;
    }
    Py_XSETREF(self->loop, Py_NewRef(loop));
    Py_INCREF(meter);
    Py_XSETREF(self->meter, (Meter *)meter);
    if (!PyType_Check(self->call_type) || !PyType_IsSubtype((PyTypeObject *)self->call_type, &PyTuple_Type) || !PyTuple_CheckExact(self->rate_names))
        return PyErr_SetString(PyExc_TypeError, "call_type must be a tuple type, rate_names a tuple"), -1;
    return 0;
}

static int beat_traverse(PyObject *object, visitproc visit, void *arg)
{
    Beat *self = (Beat *)object;
    Py_VISIT(self->loop);
    Py_VISIT(self->meter);
#define VISIT(name) Py_VISIT(self->name);
    PARTS(VISIT)
    TOOLS(VISIT)
#undef VISIT
    return 0;
}

static int beat_clear(PyObject *object)
{
    Beat *self = (Beat *)object;
    Py_CLEAR(self->loop);
    Py_CLEAR(self->meter);
#define CLEAR(name) Py_CLEAR(self->name);
    PARTS(CLEAR)
    TOOLS(CLEAR)
#undef CLEAR
    return 0;
}

static void beat_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    beat_clear(object);
    Py_TYPE(object)->tp_free(object);
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))beat_##name, METH_FASTCALL, NULL},
static PyMethodDef beat_methods[] = {METHOD(fetch_begins) METHOD(fetch_ended) METHOD(zero_grad) METHOD(forward_begins) METHOD(forward_ended) METHOD(backward_begins) METHOD(backward_ended)
                                         METHOD(optimizer_begins) METHOD(optimizer_ended) METHOD(clipped) METHOD(scheduler_stepped){NULL, NULL, 0, NULL}};
#undef METHOD

static PyTypeObject BeatType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sonde.capture._kernel.Beat",
    .tp_basicsize = sizeof(Beat),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = beat_init,
    .tp_traverse = beat_traverse,
    .tp_clear = beat_clear,
    .tp_dealloc = beat_dealloc,
    .tp_methods = beat_methods,
};

static int add_beat_types(PyObject *module)
{
#define INTERN(name)                                                                                                                                \
    if (!(n_##name = PyUnicode_InternFromString(#name)))                                                                                            \
        return -1;
    NAMES(INTERN)
#undef INTERN
    if (!(text_other = PyUnicode_InternFromString("other_ms")) || !(text_backward = PyUnicode_InternFromString("backward")) ||
        !(text_data = PyUnicode_InternFromString("data")))
        return -1;
    static const struct {
        const char *name;
        long value;
    } shared[] = {{"LEARNT", LEARNT}, {"CHECKED_EVERY", CHECKED_EVERY}, {"RENEWED", RENEWED}, {"WINDOW", WINDOW}, {"NOW_AND_THEN", NOW_AND_THEN}, {"RARELY", RARELY},
                  {"LONG_RUN", LONG_RUN}, {"SETTLED", SETTLED},
                  {"UNLINKED_CHECK", UNLINKED_CHECK}};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++)
        if (PyModule_AddIntConstant(module, shared[i].name, shared[i].value) < 0)
            return -1;
    make_crc_tables();
    know_this_process();
    if (pthread_atfork(NULL, NULL, know_this_process) != 0)
        return PyErr_NoMemory(), -1;
    text_forward = n_forward, text_optimizer = n_optimizer;
    return PyModule_AddType(module, &MeterType) < 0 || PyModule_AddType(module, &BeatType) < 0 || PyModule_AddType(module, &LatchType) < 0 ? -1 : 0;
}
