/* A reentrant lock, as threading.RLock is one, that the end of an ordinary step can take without calling anything: called once in a step, that
 * one takes longer than all else that is asked of the writer. */

typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock;
    unsigned long owner;
    long depth; /* 0: nobody's */
} Latch;

/* 1 it is ours, 0 not within this time (below 0: without end), -1 a signal handler has raised. */
static int latch_take(Latch *self, PY_TIMEOUT_T timeout_us)
{
    const unsigned long me = PyThread_get_thread_ident();
    if (self->depth && self->owner == me)
        return ++self->depth, 1;
    PyLockStatus got = PyThread_acquire_lock_timed(self->lock, 0, 0);
    const long long until = now_ns() + timeout_us * 1000;
    while (got != PY_LOCK_ACQUIRED) {
        const PY_TIMEOUT_T left = timeout_us < 0 ? -1 : (until - now_ns()) / 1000;
        if (timeout_us >= 0 && left <= 0)
            return 0;
        Py_BEGIN_ALLOW_THREADS
        got = PyThread_acquire_lock_timed(self->lock, left, 1);
        Py_END_ALLOW_THREADS
        if (got == PY_LOCK_INTR && PyErr_CheckSignals() < 0)
            return -1;
    }
    self->owner = me;
    self->depth = 1;
    return 1;
}

static void latch_leave(Latch *self)
{
    if (--self->depth == 0)
        PyThread_release_lock(self->lock);
}

static PyObject *latch_acquire(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timeout", NULL};
    double seconds = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|d:acquire", names, &seconds))
        return NULL;
    const int taken = latch_take((Latch *)self, seconds < 0 ? -1 : (PY_TIMEOUT_T)(fmin(seconds, 1e6) * 1e6));
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

static PyObject *latch_release(PyObject *object, PyObject *args)
{
    Latch *self = (Latch *)object;
    (void)args;
    if (!self->depth || self->owner != PyThread_get_thread_ident())
        return PyErr_SetString(PyExc_RuntimeError, "this thread does not hold the latch"), NULL;
    latch_leave(self);
    Py_RETURN_NONE;
}

static PyObject *latch_enter(PyObject *self, PyObject *args)
{
    (void)args;
    return latch_take((Latch *)self, -1) < 0 ? NULL : Py_NewRef(self);
}

static PyObject *latch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args, (void)kwargs;
    Latch *self = (Latch *)type->tp_alloc(type, 0);
    if (self && !(self->lock = PyThread_allocate_lock())) {
        Py_CLEAR(self);
        PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void latch_dealloc(PyObject *object)
{
    Latch *self = (Latch *)object;
    if (self->lock) {
        if (self->depth) /* its holder is gone */
            PyThread_release_lock(self->lock);
        PyThread_free_lock(self->lock);
    }
    Py_TYPE(object)->tp_free(object);
}

static PyMethodDef latch_methods[] = {{"acquire", (PyCFunction)(void (*)(void))latch_acquire, METH_VARARGS | METH_KEYWORDS, NULL},
                                      {"release", latch_release, METH_NOARGS, NULL},
                                      {"__enter__", latch_enter, METH_NOARGS, NULL},
                                      {"__exit__", latch_release, METH_VARARGS, NULL},
                                      {NULL, NULL, 0, NULL}};

static PyTypeObject LatchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sonde.capture._kernel.Latch",
    .tp_basicsize = sizeof(Latch),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = latch_new,
    .tp_dealloc = latch_dealloc,
    .tp_methods = latch_methods,
};
