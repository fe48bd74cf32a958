/* sonde.statistics._native: statistics of many tensors in one call, and the encoding of frames. Optional; the modules of sonde.statistics are
 * the only users, and compute the same numbers with torch operations where this extension was not built.
 *
 * Handled are strided CPU tensors of exactly the types that `setup` receives, in float32, float64, bfloat16 or float16. Every other object is
 * returned as not handled, never as an error, and Python measures it with torch operations.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "simd.h"
#include "tensor_view.h"
#include "statistics.h"

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
        PyErr_Format(PyExc_IndexError, "%zd rows from row %zd on do not fit into %zd", num_needed, *row, buffer->shape[0]);
        return -1;
    }
    return 0;
}

/* Adds an index to the list of tensors that were not handled. The list is created when it is needed: *unhandled starts as NULL. */
static int add_unhandled(PyObject **unhandled, Py_ssize_t index)
{
    PyObject *number = PyLong_FromSsize_t(index);
    int failed = !number || (!*unhandled && !(*unhandled = PyList_New(0))) || PyList_Append(*unhandled, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static PyObject *list_or_none(PyObject *list)
{
    return list ? list : Py_NewRef(Py_None);
}

static int check_count(const char *name, Py_ssize_t num_args, Py_ssize_t expected)
{
    if (num_args == expected)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, expected, num_args);
    return -1;
}

#include "frame_records.h"

/* ---- statistics ---- */

/* Measures one object into a row; None gives a row of zeros. Returns 0 where the object is not handled. */
static int measure_object(PyObject *object, double *row)
{
    View view;
    ReleasedGil released;
    double statistics[NUM_STATISTICS] = {0};
    if (object != Py_None) {
        if (!get_view(object, &view) || !release_gil(&released, object, &view))
            return 0;
        measure_view(&view, NULL, NULL, statistics);
        acquire_gil(&released);
    }
    memcpy(row, statistics, sizeof statistics);
    return 1;
}

static PyObject *measure_one(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    Py_buffer buffer;
    Py_ssize_t row;
    int is_handled = -1;
    if (check_count("measure_one", num_args, 3) < 0 || get_rows(args[0], &buffer) < 0)
        return NULL;
    if (get_row(args[1], 1, &buffer, &row) == 0)
        is_handled = measure_object(args[2], (double *)buffer.buf + row * NUM_STATISTICS);
    PyBuffer_Release(&buffer);
    return is_handled < 0 ? NULL : Py_NewRef(is_handled ? Py_True : Py_False);
}

static PyObject *measure(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    Py_buffer buffer;
    Py_ssize_t row;
    PyObject *unhandled = NULL, *tensors;
    if (check_count("measure", num_args, 3) < 0 || !(tensors = PySequence_Tuple(args[2])))
        return NULL;
    if (get_rows(args[0], &buffer) < 0) {
        Py_DECREF(tensors);
        return NULL;
    }
    Py_ssize_t num = PyTuple_GET_SIZE(tensors);
    int failed = get_row(args[1], num, &buffer, &row);
    for (Py_ssize_t i = 0; !failed && i < num; i++)
        if (!measure_object(PyTuple_GET_ITEM(tensors, i), (double *)buffer.buf + (row + i) * NUM_STATISTICS))
            failed = add_unhandled(&unhandled, i);
    PyBuffer_Release(&buffer);
    Py_DECREF(tensors);
    if (failed) {
        Py_XDECREF(unhandled);
        return NULL;
    }
    return list_or_none(unhandled);
}

/* ---- snapshots: copy and measure, measure the difference to the copy ---- */

/* The tensor and its copy need the same memory layout, because both are read in the order of memory. */
static int measure_pair(PyObject *tensor, PyObject *copy, int is_snapshot, double *row)
{
    View now, stored;
    ReleasedGil released;
    double statistics[NUM_STATISTICS] = {0};
    if (!get_view(tensor, &now) || !get_view(copy, &stored) || now.dtype != stored.dtype || !have_same_layout(&now, &stored) ||
        !release_gil(&released, tensor, &now))
        return 0;
    measure_view(&now, is_snapshot ? NULL : &stored, is_snapshot ? (char *)(uintptr_t)stored.data : NULL, statistics);
    acquire_gil(&released);
    memcpy(row, statistics, sizeof statistics);
    return 1;
}

static PyObject *measure_pairs(PyObject *const *args, Py_ssize_t num_args, int is_snapshot)
{
    Py_buffer buffer;
    Py_ssize_t row;
    PyObject *unhandled = NULL, *tensors = NULL, *copies = NULL;
    int failed = -1;
    if (check_count(is_snapshot ? "snapshot" : "diff", num_args, 4) < 0 || get_rows(args[0], &buffer) < 0)
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
        if (!measure_pair(PyTuple_GET_ITEM(tensors, i), PyTuple_GET_ITEM(copies, i), is_snapshot, (double *)buffer.buf + (row + i) * NUM_STATISTICS))
            failed = add_unhandled(&unhandled, i);
done:
    PyBuffer_Release(&buffer);
    Py_XDECREF(tensors);
    Py_XDECREF(copies);
    if (failed) {
        Py_XDECREF(unhandled);
        return NULL;
    }
    return list_or_none(unhandled);
}

static PyObject *snapshot(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    return measure_pairs(args, num_args, 1);
}

static PyObject *diff(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    return measure_pairs(args, num_args, 0);
}

/* ---- finite check, non-zero check, exponents, single elements ---- */

static PyObject *check_finite(PyObject *self, PyObject *argument)
{
    (void)self;
    PyObject *unhandled = NULL, *tensors = PySequence_Tuple(argument);
    double sum = 0;
    Py_ssize_t first_bad = -1;
    int failed = 0;
    if (!tensors)
        return NULL;
    for (Py_ssize_t i = 0; !failed && first_bad < 0 && i < PyTuple_GET_SIZE(tensors); i++) {
        View view;
        ReleasedGil released;
        PyObject *tensor = PyTuple_GET_ITEM(tensors, i);
        if (tensor == Py_None)
            continue;
        if (!get_view(tensor, &view) || !release_gil(&released, tensor, &view)) {
            failed = add_unhandled(&unhandled, i);
            continue;
        }
        if (add_squares(&view, &sum))
            first_bad = i;
        acquire_gil(&released);
    }
    Py_DECREF(tensors);
    if (failed) {
        Py_XDECREF(unhandled);
        return NULL;
    }
    return Py_BuildValue("dnN", sum, first_bad, list_or_none(unhandled));
}

/* The answer of check_finite from rows that were measured already. */
static PyObject *check_finite_rows(PyObject *self, PyObject *rows)
{
    (void)self;
    Py_buffer buffer;
    double sum = 0;
    Py_ssize_t first_bad = -1;
    if (get_rows(rows, &buffer) < 0)
        return NULL;
    const double *row = buffer.buf;
    for (Py_ssize_t i = 0; i < buffer.shape[0] && first_bad < 0; i++, row += NUM_STATISTICS) {
        sum += row[L2] * row[L2];
        if (row[NUM_NAN] != 0 || row[NUM_INF] != 0)
            first_bad = i;
    }
    PyBuffer_Release(&buffer);
    return Py_BuildValue("dn", first_bad < 0 ? sum : Py_NAN, first_bad);
}

static PyObject *any_nonzero(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    PyObject *unhandled = NULL, *tensors;
    int is_found = 0, failed = 0;
    if (check_count("any_nonzero", num_args, 2) < 0)
        return NULL;
    Py_ssize_t limit = PyNumber_AsSsize_t(args[1], PyExc_OverflowError);
    if ((limit == -1 && PyErr_Occurred()) || !(tensors = PySequence_Tuple(args[0])))
        return NULL;
    for (Py_ssize_t i = 0; !failed && !is_found && i < PyTuple_GET_SIZE(tensors); i++) {
        View view;
        ReleasedGil released;
        PyObject *tensor = PyTuple_GET_ITEM(tensors, i);
        if (tensor == Py_None)
            continue;
        if (!get_view(tensor, &view) || !release_gil(&released, tensor, &view)) {
            failed = add_unhandled(&unhandled, i);
            continue;
        }
        is_found = any_nonzero_in(&view, limit);
        acquire_gil(&released);
    }
    Py_DECREF(tensors);
    if (failed) {
        Py_XDECREF(unhandled);
        return NULL;
    }
    return Py_BuildValue("NN", PyBool_FromLong(is_found), list_or_none(unhandled));
}

static PyObject *exponents(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    View view;
    ReleasedGil released;
    int64_t counts[NUM_EXPONENTS];
    if (check_count("exponents", num_args, 2) < 0)
        return NULL;
    Py_ssize_t limit = PyNumber_AsSsize_t(args[1], PyExc_OverflowError);
    if (limit == -1 && PyErr_Occurred())
        return NULL;
    if (!get_view(args[0], &view) || !release_gil(&released, args[0], &view))
        Py_RETURN_NONE;
    count_exponents(&view, limit, counts);
    acquire_gil(&released);
    int num = 0;
    double pairs[NUM_EXPONENTS][2];
    for (int i = 0; i < NUM_EXPONENTS; i++)
        if (counts[i]) {
            pairs[num][0] = i + LOWEST_EXPONENT;
            pairs[num++][1] = (double)counts[i] * view.repeats;
        }
    return PyBytes_FromStringAndSize((const char *)pairs, num * (Py_ssize_t)sizeof *pairs);
}

static PyObject *read_element(PyObject *self, PyObject *tensor)
{
    (void)self;
    View view;
    float wide;
    if (!get_view(tensor, &view) || view.num != 1 || view.repeats != 1)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(view.dtype == F64 ? *(const double *)view.data : (double)*widen(&view, view.data, 1, &wide));
}

/* ---- the module ---- */

static void replace(PyObject **slot, PyObject *value)
{
    PyObject *old = *slot;
    *slot = value;
    Py_XDECREF(old);
}

/* setup(Tensor, Parameter, (float32, float64, bfloat16, float16), strided, dlpack, level): `dlpack` is the capsule of the DLPack exchange API or
 * None, `level` the highest instruction set to use (tests run all of them). Returns whether DLPack is used, and the level in use. */
static PyObject *setup(PyObject *self, PyObject *args)
{
    (void)self;
    static PyObject **const methods[] = {&method_data_ptr, &method_stride, &method_is_neg, &method_storage, &method_storage_offset};
    static const char *const names[] = {"data_ptr", "stride", "is_neg", "untyped_storage", "storage_offset"};
    PyObject *tensor, *parameter, *torch_dtypes[NUM_DTYPES], *layout, *capsule, *found[5] = {NULL};
    int level;
    if (!PyArg_ParseTuple(args, "O!O!(OOOO)OOi:setup", &PyType_Type, &tensor, &PyType_Type, &parameter, &torch_dtypes[F32], &torch_dtypes[F64],
                          &torch_dtypes[BF16], &torch_dtypes[F16], &layout, &capsule, &level))
        return NULL;
    const DLPackApi *api = NULL;
    if (capsule != Py_None && !(api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api")))
        return NULL;
    if (api && (api->major != 1 || !api->describe))
        api = NULL;
    for (int i = 0; i < 5; i++)
        if (!(found[i] = PyObject_GetAttrString(tensor, names[i]))) {
            while (i-- > 0)
                Py_DECREF(found[i]);
            return NULL;
        }
    for (int i = 0; i < 5; i++)
        replace(methods[i], found[i]);
    for (int i = 0; i < NUM_DTYPES; i++)
        replace(&dtypes[i], Py_NewRef(torch_dtypes[i]));
    replace(&strided, Py_NewRef(layout));
    replace(&parameter_type, Py_NewRef(parameter));
    replace(&tensor_type, Py_NewRef(tensor));
    dlpack_api = api; /* the capsule points to memory that lives as long as the process */
    level = choose_loops(level);
    return Py_BuildValue("Ni", PyBool_FromLong(dlpack_api != NULL), level);
}

#define FASTCALL(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

static PyMethodDef functions[] = {
    {"setup", setup, METH_VARARGS, "Set the tensor types to handle. Before the first call no object is handled."},
    {"measure", FASTCALL(measure), "measure(rows, first_row, tensors) -> indices not handled, or None"},
    {"measure_one", FASTCALL(measure_one), "measure_one(rows, row, tensor) -> whether it was handled"},
    {"snapshot", FASTCALL(snapshot), "snapshot(rows, first_row, tensors, copies) -> indices not handled, or None"},
    {"diff", FASTCALL(diff), "diff(rows, first_row, tensors, copies) -> indices not handled, or None"},
    {"check_finite", check_finite, METH_O, "check_finite(tensors) -> (sum of squares, first index with a non-finite value or -1, indices not handled or None)"},
    {"check_finite_rows", check_finite_rows, METH_O, "check_finite_rows(rows) -> (sum of squares, first row with a non-finite value or -1)"},
    {"any_nonzero", FASTCALL(any_nonzero), "any_nonzero(tensors, limit) -> (whether one was found, indices not handled or None)"},
    {"exponents", FASTCALL(exponents), "exponents(tensor, limit) -> pairs of exponent and count as float64, or None where not handled"},
    {"read_element", read_element, METH_O, "read_element(tensor) -> the single element as a float, or None where not handled"},
    {"encode_frame", FASTCALL(encode_frame), "encode_frame(plan, step, time_ns, rows) -> the record, or None where not handled"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Statistics of many tensors in one call.", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    name_dtype = PyUnicode_InternFromString("dtype");
    name_layout = PyUnicode_InternFromString("layout");
    name_is_cpu = PyUnicode_InternFromString("is_cpu");
    name_shape = PyUnicode_InternFromString("shape");
    name_shape_of_plan = PyUnicode_InternFromString("_shape");
    name_single = PyUnicode_InternFromString("_single");
    if (!name_dtype || !name_layout || !name_is_cpu || !name_shape || !name_shape_of_plan || !name_single)
        return NULL;
    make_crc_tables();
    return PyModule_Create(&module);
}
