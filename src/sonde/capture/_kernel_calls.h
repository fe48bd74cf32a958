/* What torch calls at a model's door and around an optimizer's step, without a frame of Python.
 *
 * torch.compile follows the `__call__` of such an object line by line, and there it must find Python that ends at once. Python itself calls what
 * stands in the class's slot. So the classes and their `__call__` are Python's, and only the slot is ours. Whoever gives such a class another
 * `__call__` gets Python's slot back with it. */

static PyObject *compiler, *switchboard; /* the variables of torch.compiler and of sonde.capture.patches */
static ternaryfunc by_python;            /* what stands in the slot of a class that has a `__call__` */

/* Every hook of torch's that is meant here is given three things. */
typedef PyObject *(*Answer)(PyObject *self, PyObject *const *given);

/* Does torch.compile, or a debugger, look at every frame that begins? Then ours must be one. */
static int are_frames_looked_at(void) { return _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) != _PyEval_EvalFrameDefault; }

static int is_compiled(void) { return are_frames_looked_at() || PyDict_GetItemWithError(compiler, n__is_compiling_flag) != Py_False; }

static PyObject *answer(PyObject *self, PyObject *args, PyObject *kwargs, Answer how)
{
    if (kwargs || PyTuple_GET_SIZE(args) != 3 || is_compiled())
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

/* Who listens, a new reference; NULL where that is nobody. */
static PyObject *who_listens(void)
{
    PyObject *listeners = PyDict_GetItemWithError(switchboard, n__listeners);
    return listeners && PyTuple_CheckExact(listeners) && PyTuple_GET_SIZE(listeners) ? Py_NewRef(listeners) : NULL;
}

/* listener.name(first, second) of each of them */
static PyObject *tell_each(PyObject *listeners, PyObject *name, PyObject *first, PyObject *second)
{
    PyObject *done = Py_NewRef(Py_None);
    for (Py_ssize_t i = 0; done && i < PyTuple_GET_SIZE(listeners); i++) {
        PyObject *const all[] = {PyTuple_GET_ITEM(listeners, i), first, second};
        Py_SETREF(done, PyObject_VectorcallMethod(name, all, second ? 3 : first ? 2 : 1, NULL));
    }
    return done;
}

static PyObject *tell_listeners(PyObject *name, PyObject *first, PyObject *second)
{
    PyObject *listeners = who_listens(), *done = listeners ? tell_each(listeners, name, first, second) : Py_NewRef(Py_None);
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

/* torch.autograd.backward(…): what it is given is passed on, and so is what it answers or raises. */
static PyObject *slot_backward(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *graph_task = PyDict_GetItemWithError(switchboard, n__graph_task);
    PyObject *listeners = PyTuple_GET_SIZE(args) && !is_compiled() && graph_task && is_outside(graph_task) ? who_listens() : NULL;
    if (!listeners)
        return PyErr_Occurred() ? NULL : by_python(self, args, kwargs);
    PyObject *original = get(self, n_original), *told = original ? tell_each(listeners, n_backward_begins, PyTuple_GET_ITEM(args, 0), NULL) : NULL;
    PyObject *result = told ? PyObject_Call(original, args, kwargs) : NULL, *type, *error, *trace;
    if (told) {
        PyErr_Fetch(&type, &error, &trace);
        Py_SETREF(told, tell_each(listeners, n_backward_ended, NULL, NULL));
        if (told) {
            PyErr_Restore(type, error, trace);
        } else { /* Ctrl-C, in a handler: it goes before whatever backward raised */
            Py_CLEAR(result);
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(trace);
        }
    }
    Py_XDECREF(told);
    Py_XDECREF(original);
    Py_DECREF(listeners);
    return result;
}

/* take_calls(class, what, variables of torch.compiler, variables of sonde.capture.patches or None) */
static PyObject *take_calls(PyObject *self, PyObject *args)
{
    (void)self;
    static const struct {
        const char *what;
        ternaryfunc slot;
    } all[] = {{"enters", slot_enters}, {"leaves", slot_leaves}, {"begins", slot_begins}, {"ended", slot_ended}, {"backward", slot_backward}};
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
