/* Where the elements of a tensor are in memory, how they are read block by block, and how a torch tensor is asked for its memory. */

/* ---- elements in memory ---- */

enum { MAX_DIMS = 64 };
enum { F32, F64, BF16, F16, NUM_DTYPES };
static const int ITEM_SIZE[NUM_DTYPES] = {4, 8, 2, 2};

typedef struct {
    const char *data;
    int dtype, itemsize, num_dims;
    int64_t num;    /* elements in memory */
    double repeats; /* how often each of them counts: an expanded tensor is read once */
    int64_t shape[MAX_DIMS], stride[MAX_DIMS]; /* sorted and merged, see set_view */
    int tensor_dims;                           /* as the tensor itself has them */
    int64_t tensor_shape[MAX_DIMS], tensor_stride[MAX_DIMS];
} View;

/* Statistics do not depend on the order of elements: dimensions are sorted by stride and merged, so that a permuted or channels_last tensor
 * becomes one contiguous run of memory. Returns 0 where the sizes are invalid. */
static int set_view(View *view, int num_dims, const int64_t *shape, const int64_t *stride)
{
    int num_sorted = 0, is_empty = 0;
    view->tensor_dims = num_dims;
    for (int i = 0; i < num_dims; i++) {
        view->tensor_shape[i] = shape[i];
        view->tensor_stride[i] = stride[i];
    }
    view->num = 1;
    view->repeats = 1;
    for (int i = 0; i < num_dims; i++) {
        int64_t size = shape[i], step = stride[i];
        if (size < 0 || step < 0)
            return 0;
        is_empty |= size == 0;
        if (size <= 1)
            continue;
        if (step == 0) {
            view->repeats *= (double)size;
            continue;
        }
        if (__builtin_mul_overflow(view->num, size, &view->num) || view->num > INT64_MAX / 8 || step > INT64_MAX / 8 / size)
            return 0;
        int at = num_sorted++;
        for (; at > 0 && view->stride[at - 1] < step; at--) {
            view->shape[at] = view->shape[at - 1];
            view->stride[at] = view->stride[at - 1];
        }
        view->shape[at] = size;
        view->stride[at] = step;
    }
    int last = 0;
    for (int i = 1; i < num_sorted; i++) {
        if (view->stride[last] == view->shape[i] * view->stride[i])
            view->shape[last] *= view->shape[i];
        else
            view->shape[++last] = view->shape[i];
        view->stride[last] = view->stride[i];
    }
    if (num_sorted == 0) {
        view->shape[0] = 1;
        view->stride[0] = 1;
    }
    view->num_dims = last + 1;
    if (is_empty)
        view->num = 0;
    return 1;
}

static inline int is_dense(const View *view)
{
    return view->num_dims == 1 && view->stride[0] == 1;
}

/* Whether the elements of both are in memory in the same order, without gaps. */
static int have_same_layout(const View *a, const View *b)
{
    if (!is_dense(a) || !is_dense(b) || a->repeats != 1 || b->repeats != 1 || a->num != b->num || a->tensor_dims != b->tensor_dims)
        return 0;
    for (int i = 0; i < a->tensor_dims; i++)
        if (a->tensor_shape[i] != b->tensor_shape[i] || (a->tensor_shape[i] > 1 && a->tensor_stride[i] != b->tensor_stride[i]))
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

static void copy_strided(char *out, const char *from, int64_t num, int64_t step, int itemsize)
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
        switch (itemsize) { /* with a constant size the compiler turns each memcpy into one move */
        case 2: copy_strided(out, from, run, view->stride[last], 2); break;
        case 4: copy_strided(out, from, run, view->stride[last], 4); break;
        default: copy_strided(out, from, run, view->stride[last], 8);
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

/* The next block of raw elements: in place where the memory is contiguous, else gathered into scratch (BLOCK elements). Returns the number of
 * elements, 0 at the end. */
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

/* The address to prefetch while the loops process the block at element `at`: the block after it. NULL where no whole block follows. */
static const char *prefetch_address(const View *view, int64_t at)
{
    return view->dtype == F32 && at + 2 * BLOCK <= view->num && is_dense(view) ? view->data + (at + BLOCK) * 4 : NULL;
}

/* A block as float32: itself, or converted into `out`. Not for float64. */
static const float *widen(const View *view, const void *block, int num, float *out)
{
    if (view->dtype == F32)
        return block;
    (view->dtype == BF16 ? loops->widen_bf16 : loops->widen_f16)(block, num, out);
    return out;
}

/* ---- from a torch tensor to a View ----
 *
 * get_view uses the DLPack exchange API of the tensor type where torch has one (no Python runs; check_finite of a tiny tensor takes 80 ns), and
 * the methods of the tensor otherwise (490 ns). Neither detects that a user shrank a storage below a living tensor; torch's own operations
 * read past its end too. A storage that was freed (FSDP frees those of unused parameters) is detected and not handled.
 */

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

/* DLPackExchangeAPI of dlpack.h, version 1 */
typedef struct {
    uint32_t major, minor;
    void *previous;
    void *allocate, *to_managed, *from_managed;
    int (*describe)(void *object, DLTensor *out); /* dltensor_from_py_object_no_sync */
    void *current_stream;
} DLPackApi;

enum { DL_CPU = 1, DL_FLOAT = 2, DL_BFLOAT = 4 };

static PyObject *tensor_type, *parameter_type; /* NULL before setup */
static PyObject *dtypes[NUM_DTYPES], *strided;
/* Methods of the type: attributes that a user sets on a tensor cannot replace them. */
static PyObject *method_data_ptr, *method_stride, *method_is_neg, *method_storage, *method_storage_offset;
static PyObject *name_dtype, *name_layout, *name_is_cpu, *name_shape;
static const DLPackApi *dlpack_api;

/* An integer from a method of the tensor; -1 and no exception where the call fails. */
static long long call_for_int(PyObject *method, PyObject *tensor)
{
    PyObject *result = PyObject_CallOneArg(method, tensor);
    long long number = result ? PyLong_AsLongLong(result) : -1;
    Py_XDECREF(result);
    if (number == -1)
        PyErr_Clear();
    return number;
}

static int attribute_is(PyObject *tensor, PyObject *name, PyObject *expected)
{
    PyObject *value = PyObject_GetAttr(tensor, name);
    if (!value)
        PyErr_Clear();
    Py_XDECREF(value); /* compared by address only: this module holds the expected object */
    return value == expected;
}

/* Reads a tuple of sizes and releases it. Returns how many, or -1. */
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

static int view_from_dlpack(PyObject *tensor, View *view)
{
    DLTensor it;
    if (dlpack_api->describe(tensor, &it) != 0) {
        PyErr_Clear();
        return 0;
    }
    if (it.device.type != DL_CPU || it.dtype.lanes != 1 || it.num_dims < 0 || it.num_dims > MAX_DIMS || (it.num_dims && (!it.shape || !it.strides)))
        return 0;
    if (it.dtype.code == DL_FLOAT && it.dtype.bits == 32)
        view->dtype = F32;
    else if (it.dtype.code == DL_FLOAT && it.dtype.bits == 64)
        view->dtype = F64;
    else if (it.dtype.code == DL_FLOAT && it.dtype.bits == 16)
        view->dtype = F16;
    else if (it.dtype.code == DL_BFLOAT && it.dtype.bits == 16)
        view->dtype = BF16;
    else
        return 0;
    view->data = (const char *)it.data + it.byte_offset;
    return set_view(view, it.num_dims, it.shape, it.strides);
}

static int view_from_methods(PyObject *tensor, View *view)
{
    int64_t shape[MAX_DIMS], stride[MAX_DIMS];
    PyObject *dtype = PyObject_GetAttr(tensor, name_dtype);
    if (!dtype)
        PyErr_Clear();
    Py_XDECREF(dtype);
    for (view->dtype = 0; view->dtype < NUM_DTYPES && dtypes[view->dtype] != dtype; view->dtype++)
        ;
    if (view->dtype == NUM_DTYPES || !attribute_is(tensor, name_is_cpu, Py_True) || !attribute_is(tensor, name_layout, strided))
        return 0;
    int num_dims = read_sizes(PyObject_GetAttr(tensor, name_shape), shape);
    if (num_dims < 0 || read_sizes(PyObject_CallOneArg(method_stride, tensor), stride) != num_dims)
        return 0;
    long long data = call_for_int(method_data_ptr, tensor);
    if (data < 0)
        return 0;
    view->data = (const char *)(uintptr_t)data;
    return set_view(view, num_dims, shape, stride);
}

/* Fills in the View of a tensor. Returns 0 where this module does not handle the object; never leaves an exception. */
static int get_view(PyObject *tensor, View *view)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (!tensor_type || (type != tensor_type && type != parameter_type))
        return 0;
    if (!(dlpack_api ? view_from_dlpack(tensor, view) : view_from_methods(tensor, view)))
        return 0;
    view->itemsize = ITEM_SIZE[view->dtype];
    if (view->num == 0)
        return 1;
    if (!view->data || (uintptr_t)view->data % (uintptr_t)view->itemsize)
        return 0;
    /* The data pointer of a freed storage is the bare offset into it. Real addresses are rarely this low, so few tensors need the call. */
    if ((uint64_t)(uintptr_t)view->data < (uint64_t)1 << 42) {
        long long offset = call_for_int(method_storage_offset, tensor);
        if (offset < 0 || (uint64_t)offset * (uint64_t)view->itemsize == (uint64_t)(uintptr_t)view->data)
            return 0;
    }
    /* A real tensor with the negative bit is the imaginary part of a conjugate: every second number in memory, or a single one. */
    if (!is_dense(view) || view->num == 1) {
        PyObject *is_negative = PyObject_CallOneArg(method_is_neg, tensor);
        if (!is_negative)
            PyErr_Clear();
        Py_XDECREF(is_negative);
        if (is_negative != Py_False)
            return 0;
    }
    return 1;
}

/* ---- reading without the GIL ---- */

enum { RELEASE_GIL_FROM = 1 << 18 }; /* elements: for smaller tensors switching threads costs more than the other threads gain */

typedef struct {
    PyThreadState *thread;
    PyObject *storage;
} ReleasedGil;

/* Releases the GIL while a large tensor is read, and holds its storage: another thread may give the tensor a new one. Returns 0 where the tensor
 * has no storage; then there is nothing to undo. */
static int release_gil(ReleasedGil *released, PyObject *tensor, const View *view)
{
    released->thread = NULL;
    released->storage = NULL;
    if (view->num < RELEASE_GIL_FROM)
        return 1;
    released->storage = PyObject_CallOneArg(method_storage, tensor);
    if (!released->storage) {
        PyErr_Clear();
        return 0;
    }
    released->thread = PyEval_SaveThread();
    return 1;
}

static void acquire_gil(ReleasedGil *released)
{
    if (released->thread)
        PyEval_RestoreThread(released->thread);
    Py_XDECREF(released->storage);
}
