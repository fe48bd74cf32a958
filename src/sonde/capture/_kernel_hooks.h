/* What torch calls at every output of an observed step, with no line of Python in between: a stand-in for a leaf's forward, and the hook that
 * waits for the gradient of its output. Both know the common case, one tensor that was seen before, and leave everything else to their
 * `slowly`, a method of the Python classes that extend them (sonde.capture.leaves).
 */

#include <structmember.h>
#include <time.h>

static PyObject *name_slowly, *name_failed, *name_requires_grad, *name_hooks, *name_grad_fn, *name_register, *name_version, *name_forward, *name_forward_hooks, *our_key;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- Desk: what the loop shares with the leaves and hooks that it put in ---- */

enum { OUTPUTS, GRADIENTS, NUM_TABLES };

typedef struct {
    PyObject_HEAD
    long long step;                            /* that is being observed; -1: none */
    long long own_ns;                          /* Sonde's time in the step under way */
    long long hook_ns;                         /* what torch takes to call a hook */
    char fast;                                 /* 0: everything is left to Python */
    char plain;                                /* the step under way is an ordinary one (_kernel_beat.h) */
    char steady;                               /* or would be, were it not observed */
    Py_buffer rows[NUM_TABLES], taken[NUM_TABLES]; /* statistics, and which of them were written in this step */
    PyObject *source;                          /* a weak reference to the output measured last, where a ReLU is expected to follow it */
    PyObject *source_version;                  /* its _version then: what was changed in place meanwhile is another tensor */
    double rectified[NUM_STATISTICS];          /* what a ReLU would make of it: read together, since reading is what costs */
} Desk;

static void desk_clear_tables(Desk *self)
{
    for (int i = 0; i < NUM_TABLES; i++) {
        PyBuffer_Release(&self->rows[i]);
        PyBuffer_Release(&self->taken[i]);
    }
}

static PyObject *desk_write_to(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    Desk *self = (Desk *)object;
    if (check_count("write_to", num_args, 2 * NUM_TABLES) < 0)
        return NULL;
    desk_clear_tables(self);
    for (int i = 0; i < NUM_TABLES; i++) {
        if (get_rows(args[2 * i], &self->rows[i]) < 0)
            break;
        if (PyObject_GetBuffer(args[2 * i + 1], &self->taken[i], PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
            break;
        if (self->taken[i].itemsize != 1 || self->taken[i].len < self->rows[i].shape[0]) {
            PyErr_SetString(PyExc_ValueError, "there must be one byte for each row");
            break;
        }
    }
    if (PyErr_Occurred()) {
        desk_clear_tables(self);
        return NULL;
    }
    Py_RETURN_NONE;
}

static void desk_forget_source(Desk *self)
{
    Py_CLEAR(self->source);
    Py_CLEAR(self->source_version);
}

static void desk_dealloc(PyObject *object)
{
    desk_clear_tables((Desk *)object);
    desk_forget_source((Desk *)object);
    Py_TYPE(object)->tp_free(object);
}

/* Measures a tensor into a row of a table, or writes the row that is known already. */
static int desk_measure(Desk *self, int table, Py_ssize_t row, PyObject *tensor, const double *known, double *rectified)
{
    Py_buffer *rows = &self->rows[table];
    if (tensor == Py_None || !rows->buf || row < 0 || row >= rows->shape[0])
        return 0;
    double *place = (double *)rows->buf + row * NUM_STATISTICS;
    int done = 1;
    if (known)
        memcpy(place, known, NUM_STATISTICS * sizeof *known);
    else
        done = measure_object(tensor, place, rectified);
    if (done)
        ((char *)self->taken[table].buf)[row] = 1;
    return done;
}

/* The output of a leaf was measured together with its ReLU: remember which tensor that was. */
static void desk_expect_relu(Desk *self, PyObject *output, const double *rectified)
{
    desk_forget_source(self);
    memcpy(self->rectified, rectified, sizeof self->rectified);
    self->source = PyWeakref_NewRef(output, NULL);
    self->source_version = PyObject_GetAttr(output, name_version);
    if (!self->source || !self->source_version)
        desk_forget_source(self);
    PyErr_Clear();
}

/* Is this the tensor that was measured together with its ReLU, unchanged? Then `rectified` is known. Asked once. */
static int desk_knows(Desk *self, PyObject *args, double *rectified)
{
    int same = 0;
    memcpy(rectified, self->rectified, sizeof self->rectified);
    if (self->source && PyTuple_GET_SIZE(args) == 1 && PyWeakref_GetObject(self->source) == PyTuple_GET_ITEM(args, 0)) {
        PyObject *version = PyObject_GetAttr(PyTuple_GET_ITEM(args, 0), name_version);
        same = version && PyObject_RichCompareBool(version, self->source_version, Py_EQ) == 1;
        Py_XDECREF(version);
        PyErr_Clear();
    }
    desk_forget_source(self);
    return same;
}

static PyMemberDef desk_members[] = {
    {"step", T_LONGLONG, offsetof(Desk, step), 0, NULL},
    {"own_ns", T_LONGLONG, offsetof(Desk, own_ns), 0, NULL},
    {"hook_ns", T_LONGLONG, offsetof(Desk, hook_ns), 0, NULL},
    {"fast", T_BOOL, offsetof(Desk, fast), 0, NULL},
    {"plain", T_BOOL, offsetof(Desk, plain), 0, NULL},
    {"steady", T_BOOL, offsetof(Desk, steady), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef desk_methods[] = {
    {"write_to", (PyCFunction)(void (*)(void))desk_write_to, METH_FASTCALL, "write_to(outputs, taken, gradients, taken): the tables"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject DeskType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sonde.capture._kernel.Desk",
    .tp_basicsize = sizeof(Desk),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = desk_dealloc,
    .tp_members = desk_members,
    .tp_methods = desk_methods,
};

/* Calls object.slowly(argument), and where that fails object.failed(error). What is no Exception, Ctrl-C above all, is the user's. */
static int go_slowly(PyObject *object, PyObject *argument)
{
    PyObject *done = PyObject_CallMethodOneArg(object, name_slowly, argument);
    if (!done && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
        done = PyObject_CallMethodOneArg(object, name_failed, error);
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(trace);
    }
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* ---- Hook: waits on an output for its gradient ---- */

typedef struct {
    PyObject_HEAD
    Desk *desk;
    Py_ssize_t row;
    long long step; /* at which it was set: on a kept graph it outlives the step, and is then deaf */
} Hook;

static int hook_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    Hook *self = (Hook *)object;
    PyObject *desk;
    if (!PyArg_ParseTuple(args, "O!n:Hook", &DeskType, &desk, &self->row))
        return -1;
    Py_INCREF(desk);
    Py_XSETREF(self->desk, (Desk *)desk);
    self->step = -1;
    return 0;
}

static void hook_dealloc(PyObject *object)
{
    Py_CLEAR(((Hook *)object)->desk);
    Py_TYPE(object)->tp_free(object);
}

static PyObject *hook_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    Hook *self = (Hook *)object;
    Desk *desk = self->desk;
    if (!desk || desk->step != self->step || PyTuple_GET_SIZE(args) != 1)
        Py_RETURN_NONE;
    int64_t started = now_ns();
    PyObject *gradient = PyTuple_GET_ITEM(args, 0);
    if (!(desk->fast && desk_measure(desk, GRADIENTS, self->row, gradient, NULL, NULL)) && go_slowly(object, gradient) < 0)
        return NULL;
    desk->own_ns += now_ns() - started + desk->hook_ns;
    Py_RETURN_NONE;
}

static PyMemberDef hook_members[] = {
    {"row", T_PYSSIZET, offsetof(Hook, row), READONLY, NULL},
    {"step", T_LONGLONG, offsetof(Hook, step), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject HookType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sonde.capture._kernel.Hook",
    .tp_basicsize = sizeof(Hook),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_init = hook_init,
    .tp_dealloc = hook_dealloc,
    .tp_call = hook_call,
    .tp_members = hook_members,
};

/* `tensor.register_hook(hook)` without its handle, which nobody would use. 0 where that is left to Python. */
static int await_gradient(PyObject *tensor, Hook *hook)
{
    PyObject *hooks = PyObject_GetAttr(tensor, name_hooks), *node = NULL, *done = NULL;
    Py_XDECREF(hooks);
    if (hooks == Py_None && (node = PyObject_GetAttr(tensor, name_grad_fn)) && node != Py_None && (hooks = PyODict_New())) {
        if (PyODict_SetItem(hooks, our_key, (PyObject *)hook) == 0 && PyObject_SetAttr(tensor, name_hooks, hooks) == 0)
            done = PyObject_CallMethodOneArg(node, name_register, tensor);
        Py_DECREF(hooks);
    }
    Py_XDECREF(node);
    Py_XDECREF(done);
    PyErr_Clear();
    return done != NULL;
}

/* ---- Leaf: stands in for the forward of a module ---- */

typedef struct {
    PyObject_HEAD
    Desk *desk;
    PyObject *module;  /* a weak reference */
    PyObject *forward; /* the function of its class */
    PyObject *under;   /* what the instance had in this place, or NULL */
    PyObject *first;   /* the Hook of its first call's first tensor, once there is one */
    long long step, calls;
    char rectifies; /* it is a ReLU */
    char feeds_relu; /* one stands behind it, and is likely to be given its output */
} Leaf;

static int leaf_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    Leaf *self = (Leaf *)object;
    PyObject *desk, *module, *forward;
    if (!PyArg_ParseTuple(args, "O!OO:Leaf", &DeskType, &desk, &module, &forward))
        return -1;
    Py_INCREF(desk);
    Py_XSETREF(self->desk, (Desk *)desk);
    Py_XSETREF(self->module, Py_NewRef(module));
    Py_XSETREF(self->forward, Py_NewRef(forward));
    self->step = -1;
    return 0;
}

static int leaf_traverse(PyObject *object, visitproc visit, void *arg)
{
    Leaf *self = (Leaf *)object;
    Py_VISIT(self->desk);
    Py_VISIT(self->module);
    Py_VISIT(self->forward);
    Py_VISIT(self->under);
    Py_VISIT(self->first);
    return 0;
}

static int leaf_clear(PyObject *object)
{
    Leaf *self = (Leaf *)object;
    Py_CLEAR(self->desk);
    Py_CLEAR(self->module);
    Py_CLEAR(self->forward);
    Py_CLEAR(self->under);
    Py_CLEAR(self->first);
    return 0;
}

static void leaf_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    leaf_clear(object);
    Py_TYPE(object)->tp_free(object);
}

static PyObject *call_forward(Leaf *self, PyObject *args, PyObject *kwargs)
{
    if (self->under && self->under != Py_None)
        return PyObject_Call(self->under, args, kwargs);
    PyObject *module = self->module ? PyObject_CallNoArgs(self->module) : NULL;
    if (!module)
        return NULL;
    Py_ssize_t num = PyTuple_GET_SIZE(args);
    PyObject *output = NULL, *all = PyTuple_New(num + 1);
    if (all) {
        PyTuple_SET_ITEM(all, 0, module);
        for (Py_ssize_t i = 0; i < num; i++)
            PyTuple_SET_ITEM(all, i + 1, Py_NewRef(PyTuple_GET_ITEM(args, i)));
        output = PyObject_Call(self->forward, all, kwargs);
        Py_DECREF(all);
    } else {
        Py_DECREF(module);
    }
    return output;
}

/* The common case. 0 where it is left to Python, which then measures anew. */
static int leaf_measure(Leaf *self, PyObject *output, const double *known)
{
    Desk *desk = self->desk;
    if (!desk->fast || self->calls || !self->first || !PyObject_TypeCheck(self->first, &HookType) || (PyObject *)Py_TYPE(output) != tensor_type)
        return 0;
    Hook *hook = (Hook *)self->first;
    PyObject *differentiable = PyObject_GetAttr(output, name_requires_grad);
    PyErr_Clear();
    Py_XDECREF(differentiable);
    double rectified[NUM_STATISTICS];
    int done = differentiable ? desk_measure(desk, OUTPUTS, hook->row, output, known, self->feeds_relu ? rectified : NULL) : 0;
    if (!done)
        return 0;
    if (done == 2)
        desk_expect_relu(desk, output, rectified);
    if (differentiable == Py_True) {
        hook->step = desk->step;
        if (!await_gradient(output, hook))
            return 0;
    }
    self->calls = 1;
    return 1;
}

static PyObject *leaf_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Leaf *self = (Leaf *)object;
    if (!self->desk)
        return PyErr_SetString(PyExc_RuntimeError, "this leaf was never set up"), NULL;
    Py_INCREF(object); /* whatever the forward does to the module's attributes */
    Desk *desk = self->desk;
    double rectified[NUM_STATISTICS];
    const int is_known = desk->source && desk_knows(desk, args, rectified) && self->rectifies && (!self->under || self->under == Py_None);
    PyObject *output = call_forward(self, args, kwargs);
    if (output) {
        int64_t started = now_ns();
        if (self->step != desk->step) {
            self->step = desk->step;
            self->calls = 0;
        }
        if (!leaf_measure(self, output, is_known ? rectified : NULL) && go_slowly(object, output) < 0)
            Py_CLEAR(output);
        desk->own_ns += now_ns() - started;
    }
    Py_DECREF(object);
    return output;
}

static PyMemberDef leaf_members[] = {
    {"module", T_OBJECT, offsetof(Leaf, module), READONLY, NULL},
    {"forward", T_OBJECT, offsetof(Leaf, forward), READONLY, NULL},
    {"under", T_OBJECT, offsetof(Leaf, under), 0, NULL},
    {"first", T_OBJECT, offsetof(Leaf, first), 0, NULL},
    {"step", T_LONGLONG, offsetof(Leaf, step), 0, NULL},
    {"calls", T_LONGLONG, offsetof(Leaf, calls), 0, NULL},
    {"rectifies", T_BOOL, offsetof(Leaf, rectifies), 0, NULL},
    {"feeds_relu", T_BOOL, offsetof(Leaf, feeds_relu), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject LeafType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sonde.capture._kernel.Leaf",
    .tp_basicsize = sizeof(Leaf),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = leaf_init,
    .tp_traverse = leaf_traverse,
    .tp_clear = leaf_clear,
    .tp_dealloc = leaf_dealloc,
    .tp_call = leaf_call,
    .tp_members = leaf_members,
};

static int add_hook_types(PyObject *module)
{
    static struct {
        PyObject **slot;
        const char *text;
    } const names[] = {{&name_slowly, "slowly"}, {&name_failed, "failed"}, {&name_requires_grad, "requires_grad"}, {&name_hooks, "_backward_hooks"},
                       {&name_grad_fn, "grad_fn"}, {&name_register, "_register_hook_dict"}, {&name_version, "_version"},
                       {&name_forward, "forward"}, {&name_forward_hooks, "_forward_hooks"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].slot = PyUnicode_InternFromString(names[i].text)))
            return -1;
    our_key = PyLong_FromLong(-1); /* torch numbers the hooks of others from 0 up */
    return our_key && PyModule_AddType(module, &DeskType) == 0 && PyModule_AddType(module, &HookType) == 0 && PyModule_AddType(module, &LeafType) == 0 ? 0 : -1;
}
