/* How a tensor is asked for its memory.
 *
 * Through the DLPack exchange table of its type where torch has one (no Python runs: a tiny tensor costs the guard 80 ns in all), and through
 * its methods otherwise (490 ns). Neither can tell that a user shrank a storage under a living tensor; torch's own operations read past it as well. A storage that was freed altogether
 * (FSDP does that to parameters) is recognised and not handled.
 */

enum { RELEASE_GIL_FROM = 1 << 18 }; /* elements: below it other threads gain less than the hand-over costs */


typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t num_dims;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *older;
    void *allocate, *export_managed, *import_managed;
    int (*describe)(void *object, DLTensor *out);
    void *current_stream;
} DLPackTable;

enum { DL_CPU = 1, DL_FLOAT = 2, DL_BFLOAT = 4 };

static PyObject *tensor_type, *parameter_type; /* NULL until setup */
static PyObject *dtypes[NUM_KINDS], *strided;
static PyObject *call_data_ptr, *call_stride, *call_is_neg, *call_storage, *call_storage_offset; /* from the type: an instance cannot shadow them */
static PyObject *name_dtype, *name_layout, *name_is_cpu, *name_shape;
static const DLPackTable *table;

/* A whole number from a method of the tensor; -1 and no exception where there is none. */
static long long ask_number(PyObject *method, PyObject *tensor)
{
    PyObject *answer = PyObject_CallOneArg(method, tensor);
    long long number = answer ? PyLong_AsLongLong(answer) : -1;
    Py_XDECREF(answer);
    if (number == -1)
        PyErr_Clear();
    return number;
}

static int ask_is(PyObject *tensor, PyObject *name, PyObject *expected)
{
    PyObject *answer = PyObject_GetAttr(tensor, name);
    if (!answer)
        PyErr_Clear();
    Py_XDECREF(answer); /* only compared: the expected object is held elsewhere */
    return answer == expected;
}

static int read_sizes(PyObject *tuple, int64_t *sizes)
{
    int num = -1;
    if (tuple && PyTuple_Check(tuple) && PyTuple_GET_SIZE(tuple) <= MAX_DIMS) {
        num = (int)PyTuple_GET_SIZE(tuple);
        for (int i = 0; i < num; i++) {
            sizes[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
            if (sizes[i] == -1 && PyErr_Occurred()) {
                num = -1;
                break;
            }
        }
    }
    Py_XDECREF(tuple);
    if (num < 0)
        PyErr_Clear();
    return num;
}

static int describe_by_table(PyObject *tensor, View *view)
{
    DLTensor it;
    if (table->describe(tensor, &it) != 0) {
        PyErr_Clear();
        return 0;
    }
    if (it.device.type != DL_CPU || it.dtype.lanes != 1 || it.num_dims < 0 || it.num_dims > MAX_DIMS || (it.num_dims && (!it.shape || !it.strides)))
        return 0;
    if (it.dtype.code == DL_FLOAT && it.dtype.bits == 32)
        view->kind = F32;
    else if (it.dtype.code == DL_FLOAT && it.dtype.bits == 64)
        view->kind = F64;
    else if (it.dtype.code == DL_FLOAT && it.dtype.bits == 16)
        view->kind = F16;
    else if (it.dtype.code == DL_BFLOAT && it.dtype.bits == 16)
        view->kind = BF16;
    else
        return 0;
    view->data = (const char *)it.data + it.byte_offset;
    return set_view(view, it.num_dims, it.shape, it.strides);
}

static int describe_by_methods(PyObject *tensor, View *view)
{
    int64_t shape[MAX_DIMS], stride[MAX_DIMS];
    PyObject *dtype = PyObject_GetAttr(tensor, name_dtype);
    if (!dtype)
        PyErr_Clear();
    Py_XDECREF(dtype);
    for (view->kind = 0; view->kind < NUM_KINDS && dtypes[view->kind] != dtype; view->kind++)
        ;
    if (view->kind == NUM_KINDS || !ask_is(tensor, name_is_cpu, Py_True) || !ask_is(tensor, name_layout, strided))
        return 0;
    int num_dims = read_sizes(PyObject_GetAttr(tensor, name_shape), shape);
    if (num_dims < 0 || read_sizes(PyObject_CallOneArg(call_stride, tensor), stride) != num_dims)
        return 0;
    long long data = ask_number(call_data_ptr, tensor);
    if (data < 0)
        return 0;
    view->data = (const char *)(uintptr_t)data;
    return set_view(view, num_dims, shape, stride);
}

/* Where the elements of this object are. 0 where it is not ours to read; never leaves an exception. */
static int look(PyObject *tensor, View *view)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (!tensor_type || (type != tensor_type && type != parameter_type))
        return 0;
    if (!(table ? describe_by_table(tensor, view) : describe_by_methods(tensor, view)))
        return 0;
    view->itemsize = ITEM_SIZE[view->kind];
    if (view->num == 0)
        return 1;
    if (!view->data || (uintptr_t)view->data % (uintptr_t)view->itemsize)
        return 0;
    /* Of a freed storage only the offset into it is left, which is no address. Real addresses are rarely so low, so few tensors are asked. */
    if ((uint64_t)(uintptr_t)view->data < (uint64_t)1 << 42) {
        long long offset = ask_number(call_storage_offset, tensor);
        if (offset < 0 || (uint64_t)offset * (uint64_t)view->itemsize == (uint64_t)(uintptr_t)view->data)
            return 0;
    }
    /* A real tensor with the negative bit is the imaginary part of a conjugate: every second number in memory, or a single one. */
    if (!is_dense(view) || view->num == 1) {
        PyObject *negative = PyObject_CallOneArg(call_is_neg, tensor);
        if (!negative)
            PyErr_Clear();
        Py_XDECREF(negative);
        if (negative != Py_False)
            return 0;
    }
    return 1;
}

/* Do these two hold the same bytes? 0 also where that cannot be told. */
static int are_same_bytes(PyObject *a, PyObject *b)
{
    DLTensor x, y;
    if (!table || (PyObject *)Py_TYPE(a) != tensor_type || (PyObject *)Py_TYPE(b) != tensor_type || table->describe(a, &x) != 0 || table->describe(b, &y) != 0) {
        PyErr_Clear();
        return 0;
    }
    return x.device.type == DL_CPU && y.device.type == DL_CPU && x.dtype.bits == 8 && y.dtype.bits == 8 && x.num_dims == 1 && y.num_dims == 1 && x.data &&
           y.data && x.shape[0] == y.shape[0] && x.strides[0] == 1 && y.strides[0] == 1 &&
           memcmp((const char *)x.data + x.byte_offset, (const char *)y.data + y.byte_offset, (size_t)x.shape[0]) == 0;
}

/* ---- reading without the GIL ---- */

typedef struct {
    PyThreadState *thread;
    PyObject *storage;
} Leave;

/* Large tensors are read without the GIL. The storage is held meanwhile: another thread may give the tensor a new one. */
static int leave(Leave *leave, PyObject *tensor, const View *view)
{
    leave->thread = NULL;
    leave->storage = NULL;
    if (view->num < RELEASE_GIL_FROM)
        return 1;
    leave->storage = PyObject_CallOneArg(call_storage, tensor);
    if (!leave->storage) {
        PyErr_Clear();
        return 0;
    }
    leave->thread = PyEval_SaveThread();
    return 1;
}

static void come_back(Leave *leave)
{
    if (leave->thread)
        PyEval_RestoreThread(leave->thread);
    Py_XDECREF(leave->storage);
}
