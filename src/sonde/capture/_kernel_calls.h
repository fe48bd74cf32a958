/* What torch calls at a model's door and around an optimizer's step, without a frame of Python.
 *
 * torch.compile follows the `__call__` of such an object line by line, and there it must find Python that ends at once. Python itself calls what
 * stands in the class's slot. So the classes and their `__call__` are Python's, and only the slot is ours. Whoever gives such a class another
 * `__call__` gets Python's slot back with it. */

static PyObject *compiler, *switchboard; /* the variables of torch.compiler and of sonde.capture.calls */
static ternaryfunc by_python;            /* what stands in the slot of a class that has a `__call__` */

/* Every hook of torch's that is meant here is given three things. */
typedef PyObject *(*Answer)(PyObject *self, PyObject *const *given);

/* Does torch.compile, or a debugger, look at every frame that begins? Then ours must be one. */
static int are_frames_looked_at(void) { return _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) != _PyEval_EvalFrameDefault; }

static PyObject *answer(PyObject *self, PyObject *args, PyObject *kwargs, Answer how)
{
    if (kwargs || PyTuple_GET_SIZE(args) != 3 || are_frames_looked_at() || PyDict_GetItemWithError(compiler, n__is_compiling_flag) != Py_False)
        return PyErr_Occurred() ? NULL : by_python(self, args, kwargs);
    PyObject *done = how(self, &PyTuple_GET_ITEM(args, 0));
    Py_XDECREF(done);
    return done ? Py_NewRef(Py_None) : NULL; /* torch would take anything else for a new output */
}

/* self.call(self.watched, …) */
static PyObject *at_the_door(PyObject *self, PyObject *const *rest, size_t num)
{
    PyObject *call = get(self, n_call), *all[5] = {NULL, call ? get(self, n_watched) : NULL};
    for (size_t i = 0; i < num; i++)
        all[i + 2] = rest[i];
    PyObject *done = all[1] ? PyObject_Vectorcall(call, all + 1, (num + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL) : NULL;
    Py_XDECREF(all[1]);
    Py_XDECREF(call);
    return done;
}

/* (module, args, kwargs) */
static PyObject *enters(PyObject *self, PyObject *const *given)
{
    return given[2] == Py_None ? Py_NewRef(Py_None) : at_the_door(self, given, 3);
}

/* (module, args, output) */
static PyObject *leaves(PyObject *self, PyObject *const *given)
{
    PyObject *const rest[] = {given[0], given[2]};
    return at_the_door(self, rest, 2);
}

/* listener.name(…) of all who listen */
static PyObject *tell_listeners(PyObject *name, PyObject *optimizer, PyObject *closure)
{
    PyObject *listeners = Py_XNewRef(PyDict_GetItemWithError(switchboard, n__listeners)), *done = Py_NewRef(Py_None);
    const Py_ssize_t num = listeners && PyTuple_CheckExact(listeners) ? PyTuple_GET_SIZE(listeners) : 0;
    for (Py_ssize_t i = 0; done && i < num; i++) {
        PyObject *const all[] = {PyTuple_GET_ITEM(listeners, i), optimizer, closure};
        Py_SETREF(done, PyObject_VectorcallMethod(name, all, closure ? 3 : 2, NULL));
    }
    Py_XDECREF(listeners);
    return done;
}

/* (optimizer, args, kwargs): args begin with the optimizer; is there a closure among the rest? */
static PyObject *begins(PyObject *self, PyObject *const *given)
{
    (void)self;
    PyObject *value, *closure = Py_False;
    Py_ssize_t place = 0;
    for (Py_ssize_t i = 1; PyTuple_Check(given[1]) && i < PyTuple_GET_SIZE(given[1]); i++)
        if (PyCallable_Check(PyTuple_GET_ITEM(given[1], i)))
            closure = Py_True;
    while (PyDict_Check(given[2]) && PyDict_Next(given[2], &place, NULL, &value))
        if (PyCallable_Check(value))
            closure = Py_True;
    return tell_listeners(n_optimizer_begins, given[0], closure);
}

static PyObject *ended(PyObject *self, PyObject *const *given)
{
    (void)self;
    return tell_listeners(n_optimizer_ended, given[0], NULL);
}

#define SLOT(how)                                                                                                                                   \
    static PyObject *slot_##how(PyObject *self, PyObject *args, PyObject *kwargs) { return answer(self, args, kwargs, how); }
SLOT(enters)
SLOT(leaves)
SLOT(begins)
SLOT(ended)
#undef SLOT

/* take_calls(class, what, variables of torch.compiler, variables of sonde.capture.calls or None) */
static PyObject *take_calls(PyObject *self, PyObject *args)
{
    (void)self;
    static const struct {
        const char *what;
        ternaryfunc slot;
    } all[] = {{"enters", slot_enters}, {"leaves", slot_leaves}, {"begins", slot_begins}, {"ended", slot_ended}};
    PyTypeObject *type;
    PyObject *torchs, *ours = Py_None;
    const char *what;
    if (!PyArg_ParseTuple(args, "O!sO!|O:take_calls", &PyType_Type, &type, &what, &PyDict_Type, &torchs, &ours))
        return NULL;
    if (!(type->tp_flags & Py_TPFLAGS_HEAPTYPE) || !type->tp_call)
        return PyErr_SetString(PyExc_TypeError, "take_calls needs a class with a __call__"), NULL;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(what, all[i].what) == 0) {
            Py_XSETREF(compiler, Py_NewRef(torchs));
            if (PyDict_CheckExact(ours))
                Py_XSETREF(switchboard, Py_NewRef(ours));
            if (type->tp_call != all[i].slot)
                by_python = type->tp_call;
            type->tp_call = all[i].slot;
            PyType_Modified(type);
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "%s is none of the calls", what), NULL;
}
