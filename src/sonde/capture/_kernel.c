/* Statistics of many tensors in one call: the hottest code of Sonde, and optional. sonde.statistics.measure is its only user.
 *
 * Only strided CPU tensors of exactly the types that `setup` is given, in float32, float64, bfloat16 or float16, are taken. Every other object
 * is reported back as not handled, never as an error, and Python measures it with torch operations.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "_kernel_numbers.h"
#include "_kernel_statistics.h"

#include "_kernel_look.h"

enum { NUM_STATISTICS = 9 };

/* ---- arguments ---- */

static int get_rows(PyObject *values, Py_buffer *buffer)
{
    if (PyObject_GetBuffer(values, buffer, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT) < 0)
        return -1;
    if (buffer->ndim != 2 || buffer->itemsize != 8 || !buffer->format || strcmp(buffer->format, "d") != 0 || buffer->shape[1] != NUM_STATISTICS) {
        PyBuffer_Release(buffer);
        PyErr_SetString(PyExc_ValueError, "rows must be a writable array of float64, nine columns wide");
        return -1;
    }
    return 0;
}

static int get_row(PyObject *number, Py_ssize_t num_needed, const Py_buffer *buffer, Py_ssize_t *row)
{
    *row = PyNumber_AsSsize_t(number, PyExc_IndexError);
    if (*row == -1 && PyErr_Occurred())
        return -1;
    if (*row < 0 || *row > buffer->shape[0] || num_needed > buffer->shape[0] - *row) {
        PyErr_Format(PyExc_IndexError, "rows %zd and %zd more do not fit into %zd", *row, num_needed, buffer->shape[0]);
        return -1;
    }
    return 0;
}

/* Remembers an index that was not handled. The list is made only when needed: *rest starts as NULL. */
static int leave_to_python(PyObject **rest, Py_ssize_t index)
{
    PyObject *number = PyLong_FromSsize_t(index);
    int failed = !number || (!*rest && !(*rest = PyList_New(0))) || PyList_Append(*rest, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static PyObject *list_or_none(PyObject *rest)
{
    return rest ? rest : Py_NewRef(Py_None);
}

static int check_count(const char *name, Py_ssize_t given, Py_ssize_t expected)
{
    if (given == expected)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, expected, given);
    return -1;
}

/* ---- the functions ---- */

/* Measures one object into a row; returns 0 where it is not handled, 2 where `rectified` was asked for and told too. None is a row of zeros. */
static int measure_object(PyObject *object, double *row, double *rectified)
{
    View view;
    Leave away;
    double statistics[NUM_STATISTICS] = {0};
    int both = 0;
    if (object != Py_None) {
        if (!look(object, &view) || !leave(&away, object, &view))
            return 0;
        both = measure_view(&view, NULL, NULL, statistics, rectified);
        come_back(&away);
    }
    memcpy(row, statistics, sizeof statistics);
    return 1 + both;
}

static PyObject *measure_one(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    Py_buffer buffer;
    Py_ssize_t row;
    int handled = -1;
    if (check_count("measure_one", num_args, 3) < 0 || get_rows(args[0], &buffer) < 0)
        return NULL;
    if (get_row(args[1], 1, &buffer, &row) == 0)
        handled = measure_object(args[2], (double *)buffer.buf + row * NUM_STATISTICS, NULL);
    PyBuffer_Release(&buffer);
    return handled < 0 ? NULL : Py_NewRef(handled ? Py_True : Py_False);
}

static PyObject *measure(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    Py_buffer buffer;
    Py_ssize_t row;
    PyObject *rest = NULL, *tensors;
    if (check_count("measure", num_args, 3) < 0 || !(tensors = PySequence_Tuple(args[2])))
        return NULL;
    if (get_rows(args[0], &buffer) < 0) {
        Py_DECREF(tensors);
        return NULL;
    }
    Py_ssize_t num = PyTuple_GET_SIZE(tensors);
    int failed = get_row(args[1], num, &buffer, &row);
    for (Py_ssize_t i = 0; !failed && i < num; i++)
        if (!measure_object(PyTuple_GET_ITEM(tensors, i), (double *)buffer.buf + (row + i) * NUM_STATISTICS, NULL))
            failed = leave_to_python(&rest, i);
    PyBuffer_Release(&buffer);
    Py_DECREF(tensors);
    if (failed) {
        Py_XDECREF(rest);
        return NULL;
    }
    return list_or_none(rest);
}

/* keep and change: the two need the same memory layout, since they go through both in the order of memory. */
static int measure_pair(PyObject *tensor, PyObject *copy, int keep, double *row)
{
    View now, kept;
    Leave away;
    double statistics[NUM_STATISTICS] = {0};
    if (!look(tensor, &now) || !look(copy, &kept) || now.kind != kept.kind || !run_alike(&now, &kept) || !leave(&away, tensor, &now))
        return 0;
    measure_view(&now, keep ? NULL : &kept, keep ? (char *)(uintptr_t)kept.data : NULL, statistics, NULL);
    come_back(&away);
    memcpy(row, statistics, sizeof statistics);
    return 1;
}

static PyObject *measure_pairs(PyObject *const *args, Py_ssize_t num_args, int keep)
{
    Py_buffer buffer;
    Py_ssize_t row;
    PyObject *rest = NULL, *tensors = NULL, *copies = NULL;
    int failed = -1;
    if (check_count(keep ? "keep" : "change", num_args, 4) < 0 || get_rows(args[0], &buffer) < 0)
        return NULL;
    if (!(tensors = PySequence_Tuple(args[2])) || !(copies = PySequence_Tuple(args[3])))
        goto done;
    Py_ssize_t num = PyTuple_GET_SIZE(tensors);
    if (PyTuple_GET_SIZE(copies) != num) {
        PyErr_SetString(PyExc_ValueError, "there must be as many copies as tensors");
        goto done;
    }
    failed = get_row(args[1], num, &buffer, &row);
    for (Py_ssize_t i = 0; !failed && i < num; i++)
        if (!measure_pair(PyTuple_GET_ITEM(tensors, i), PyTuple_GET_ITEM(copies, i), keep, (double *)buffer.buf + (row + i) * NUM_STATISTICS))
            failed = leave_to_python(&rest, i);
done:
    PyBuffer_Release(&buffer);
    Py_XDECREF(tensors);
    Py_XDECREF(copies);
    if (failed) {
        Py_XDECREF(rest);
        return NULL;
    }
    return list_or_none(rest);
}

static PyObject *keep(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    return measure_pairs(args, num_args, 1);
}

static PyObject *change(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    return measure_pairs(args, num_args, 0);
}

static PyObject *guard(PyObject *self, PyObject *argument)
{
    (void)self;
    PyObject *rest = NULL, *tensors = PySequence_Tuple(argument);
    double sum = 0;
    Py_ssize_t bad = -1;
    int failed = 0;
    if (!tensors)
        return NULL;
    for (Py_ssize_t i = 0; !failed && bad < 0 && i < PyTuple_GET_SIZE(tensors); i++) {
        View view;
        Leave away;
        PyObject *tensor = PyTuple_GET_ITEM(tensors, i);
        if (tensor == Py_None)
            continue;
        if (!look(tensor, &view) || !leave(&away, tensor, &view)) {
            failed = leave_to_python(&rest, i);
            continue;
        }
        if (add_squares(&view, &sum))
            bad = i;
        come_back(&away);
    }
    Py_DECREF(tensors);
    if (failed) {
        Py_XDECREF(rest);
        return NULL;
    }
    return Py_BuildValue("dnN", sum, bad, list_or_none(rest));
}

/* The same from rows that were measured already. */
static PyObject *guard_rows(PyObject *self, PyObject *rows)
{
    (void)self;
    Py_buffer buffer;
    double sum = 0;
    Py_ssize_t bad = -1;
    if (get_rows(rows, &buffer) < 0)
        return NULL;
    const double *row = buffer.buf;
    for (Py_ssize_t i = 0; i < buffer.shape[0] && bad < 0; i++, row += NUM_STATISTICS) {
        sum += row[5] * row[5];
        if (row[7] != 0 || row[8] != 0)
            bad = i;
    }
    PyBuffer_Release(&buffer);
    return Py_BuildValue("dn", bad < 0 ? sum : Py_NAN, bad);
}

static PyObject *any_nonzero(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    PyObject *rest = NULL, *tensors;
    int found = 0, failed = 0;
    if (check_count("any_nonzero", num_args, 2) < 0)
        return NULL;
    Py_ssize_t limit = PyNumber_AsSsize_t(args[1], PyExc_OverflowError);
    if ((limit == -1 && PyErr_Occurred()) || !(tensors = PySequence_Tuple(args[0])))
        return NULL;
    for (Py_ssize_t i = 0; !failed && !found && i < PyTuple_GET_SIZE(tensors); i++) {
        View view;
        Leave away;
        PyObject *tensor = PyTuple_GET_ITEM(tensors, i);
        if (tensor == Py_None)
            continue;
        if (!look(tensor, &view) || !leave(&away, tensor, &view)) {
            failed = leave_to_python(&rest, i);
            continue;
        }
        found = any_nonzero_in(&view, limit);
        come_back(&away);
    }
    Py_DECREF(tensors);
    if (failed) {
        Py_XDECREF(rest);
        return NULL;
    }
    return Py_BuildValue("NN", PyBool_FromLong(found), list_or_none(rest));
}

static PyObject *exponents(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    View view;
    Leave away;
    int64_t counts[NUM_EXPONENTS];
    if (check_count("exponents", num_args, 2) < 0)
        return NULL;
    Py_ssize_t limit = PyNumber_AsSsize_t(args[1], PyExc_OverflowError);
    if (limit == -1 && PyErr_Occurred())
        return NULL;
    if (!look(args[0], &view) || !leave(&away, args[0], &view))
        Py_RETURN_NONE;
    count_exponents(&view, limit, counts);
    come_back(&away);
    int num = 0;
    double pairs[NUM_EXPONENTS][2];
    for (int i = 0; i < NUM_EXPONENTS; i++)
        if (counts[i]) {
            pairs[num][0] = i + LOWEST;
            pairs[num++][1] = (double)counts[i] * view.repeats;
        }
    return PyBytes_FromStringAndSize((const char *)pairs, num * (Py_ssize_t)sizeof *pairs);
}

/* A tensor of one element as a float. */
static PyObject *number(PyObject *self, PyObject *tensor)
{
    (void)self;
    View view;
    float wide;
    if (!look(tensor, &view) || view.num != 1 || view.repeats != 1)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(view.kind == F64 ? *(const double *)view.data : (double)*widen(&view, view.data, 1, &wide));
}

static void replace(PyObject **slot, PyObject *value)
{
    PyObject *old = *slot;
    *slot = value;
    Py_XDECREF(old);
}

/* setup(Tensor, Parameter, (float32, float64, bfloat16, float16), strided, table, level): `table` is the DLPack exchange capsule or None,
 * `level` bounds the instruction set (tests go through all). Returns (whether the table is used, the level in use). */
static PyObject *setup(PyObject *self, PyObject *args)
{
    (void)self;
    static PyObject **const methods[] = {&call_data_ptr, &call_stride, &call_is_neg, &call_storage, &call_storage_offset};
    static const char *const names[] = {"data_ptr", "stride", "is_neg", "untyped_storage", "storage_offset"};
    PyObject *tensor, *parameter, *kinds[NUM_KINDS], *layout, *capsule, *found[5] = {NULL};
    int level;
    if (!PyArg_ParseTuple(args, "O!O!(OOOO)OOi:setup", &PyType_Type, &tensor, &PyType_Type, &parameter, &kinds[F32], &kinds[F64], &kinds[BF16],
                          &kinds[F16], &layout, &capsule, &level))
        return NULL;
    const DLPackTable *given = NULL;
    if (capsule != Py_None && !(given = PyCapsule_GetPointer(capsule, "dlpack_exchange_api")))
        return NULL;
    if (given && (given->major != 1 || !given->describe))
        given = NULL;
    for (int i = 0; i < 5; i++)
        if (!(found[i] = PyObject_GetAttrString(tensor, names[i]))) {
            while (i-- > 0)
                Py_DECREF(found[i]);
            return NULL;
        }
    for (int i = 0; i < 5; i++)
        replace(methods[i], found[i]);
    for (int i = 0; i < NUM_KINDS; i++)
        replace(&dtypes[i], Py_NewRef(kinds[i]));
    replace(&strided, Py_NewRef(layout));
    replace(&parameter_type, Py_NewRef(parameter));
    replace(&tensor_type, Py_NewRef(tensor));
    table = given; /* a capsule of this kind points to memory that lives as long as the process */
    level = choose_loops(level);
    return Py_BuildValue("Ni", PyBool_FromLong(table != NULL), level);
}

#include "_kernel_hooks.h"
#include "_kernel_places.h"
#include "_kernel_meter.h"
#include "_kernel_beat.h"
#include "_kernel_calls.h"

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, "Say what a tensor is. Until then nothing is handled."},
    {"measure", (PyCFunction)(void (*)(void))measure, METH_FASTCALL, "measure(rows, first_row, tensors) -> indices not handled, or None"},
    {"measure_one", (PyCFunction)(void (*)(void))measure_one, METH_FASTCALL, "measure_one(rows, row, tensor) -> handled"},
    {"keep", (PyCFunction)(void (*)(void))keep, METH_FASTCALL, "keep(rows, first_row, tensors, copies) -> indices not handled, or None"},
    {"change", (PyCFunction)(void (*)(void))change, METH_FASTCALL, "change(rows, first_row, tensors, copies) -> indices not handled, or None"},
    {"guard", guard, METH_O, "guard(tensors) -> (sum of squares, first index with a non-finite value or -1, indices not handled or None)"},
    {"guard_rows", guard_rows, METH_O, "guard_rows(rows) -> (sum of squares, first row with a non-finite value or -1)"},
    {"any_nonzero", (PyCFunction)(void (*)(void))any_nonzero, METH_FASTCALL, "any_nonzero(tensors, limit) -> (found, indices not handled or None)"},
    {"exponents", (PyCFunction)(void (*)(void))exponents, METH_FASTCALL, "exponents(tensor, limit) -> pairs of float64, or None where not handled"},
    {"frame_record", (PyCFunction)(void (*)(void))frame_record, METH_FASTCALL, "frame_record(plan, step, time_ns, rows) -> the record, or None where not handled"},
    {"put_in", (PyCFunction)(void (*)(void))put_in, METH_FASTCALL, "put_in(plan, door, armed) -> pairs of the plan that are not simple"},
    {"take_out", take_out, METH_O, "take_out(armed) -> pairs that are not simple"},
    {"take_calls", take_calls, METH_VARARGS, "take_calls(class, what, variables of torch.compiler, variables of the switchboard)"},
    {"number", number, METH_O, "number(tensor) -> the one element as a float, or None where not handled"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel", "Statistics of many tensors in one call.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void)
{
    name_dtype = PyUnicode_InternFromString("dtype");
    name_layout = PyUnicode_InternFromString("layout");
    name_is_cpu = PyUnicode_InternFromString("is_cpu");
    name_shape = PyUnicode_InternFromString("shape");
    if (!name_dtype || !name_layout || !name_is_cpu || !name_shape)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made && (add_hook_types(made) < 0 || add_beat_types(made) < 0))
        Py_CLEAR(made);
    return made;
}
