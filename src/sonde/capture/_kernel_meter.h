/* Whose time is it? The part of sonde.capture.phase_timer that runs at every call, and its twin in Python is there. */

typedef struct {
    PyObject_HEAD
    Desk *desk;
    PyObject *scalars;   /* of the step under way: a dict */
    PyObject *names;     /* of each phase's scalar: a dict */
    PyObject *under_way; /* scalars of the phases, innermost last: a list, whose first is of the time outside of all */
    PyObject *on_change; /* who else wants to know */
    long long mark_ns, entered_ns, step_began;
    char validating;
} Meter;

static PyObject *text_other, *text_data, *text_forward, *text_backward, *text_optimizer;

static int meter_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    Meter *self = (Meter *)object;
    PyObject *desk, *scalars, *names;
    if (!PyArg_ParseTuple(args, "O!O!O!:Meter", &DeskType, &desk, &PyDict_Type, &scalars, &PyDict_Type, &names))
        return -1;
    PyObject *under_way = PyList_New(1);
    if (!under_way)
        return -1;
    PyList_SET_ITEM(under_way, 0, Py_NewRef(text_other));
    Py_INCREF(desk);
    Py_XSETREF(self->desk, (Desk *)desk);
    Py_XSETREF(self->scalars, Py_NewRef(scalars));
    Py_XSETREF(self->names, Py_NewRef(names));
    Py_XSETREF(self->under_way, under_way);
    Py_XSETREF(self->on_change, Py_NewRef(Py_None));
    return 0;
}

static int meter_traverse(PyObject *object, visitproc visit, void *arg)
{
    Meter *self = (Meter *)object;
    Py_VISIT(self->on_change);
    return 0;
}

static int meter_clear(PyObject *object)
{
    Py_CLEAR(((Meter *)object)->on_change);
    return 0;
}

static void meter_dealloc(PyObject *object)
{
    Meter *self = (Meter *)object;
    PyObject_GC_UnTrack(object);
    Py_CLEAR(self->desk);
    Py_CLEAR(self->scalars);
    Py_CLEAR(self->names);
    Py_CLEAR(self->under_way);
    Py_CLEAR(self->on_change);
    Py_TYPE(object)->tp_free(object);
}

/* Adds to a number in a dict. */
static int add_to(PyObject *dict, PyObject *name, double more)
{
    PyObject *before = PyDict_GetItemWithError(dict, name);
    if (!before)
        return PyErr_Occurred() ? -1 : (PyErr_SetObject(PyExc_KeyError, name), -1);
    PyObject *sum = PyFloat_FromDouble(PyFloat_AsDouble(before) + more);
    int failed = !sum || PyErr_Occurred() || PyDict_SetItem(dict, name, sum) < 0;
    Py_XDECREF(sum);
    return failed ? -1 : 0;
}

static int meter_account(Meter *self)
{
    const long long now = self->entered_ns - self->desk->own_ns, passed = now - self->mark_ns;
    self->mark_ns = now;
    const Py_ssize_t num = PyList_GET_SIZE(self->under_way);
    return self->step_began && passed > 0 && num ? add_to(self->scalars, PyList_GET_ITEM(self->under_way, num - 1), passed / 1e6) : 0;
}

static int meter_tell(Meter *self, PyObject *phase, PyObject *begins)
{
    if (self->on_change == Py_None)
        return 0;
    PyObject *done = PyObject_CallFunctionObjArgs(self->on_change, phase, begins, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int is_text(PyObject *text, PyObject *other)
{
    return text == other || (PyUnicode_Check(text) && PyUnicode_Compare(text, other) == 0);
}

static int meter_begins(Meter *self, PyObject *phase)
{
    PyObject *name = PyDict_GetItemWithError(self->names, phase);
    if (!name)
        return PyErr_Occurred() ? -1 : (PyErr_SetObject(PyExc_KeyError, phase), -1);
    if (meter_tell(self, phase, Py_True) < 0 || meter_account(self) < 0)
        return -1;
    if (self->validating && (is_text(phase, text_forward) || is_text(phase, text_backward) || is_text(phase, text_optimizer))) {
        self->validating = 0;
        if (PyList_SetItem(self->under_way, 0, Py_NewRef(text_other)) < 0)
            return -1;
    }
    return PyList_Append(self->under_way, name);
}

static int meter_finishes(Meter *self, PyObject *phase)
{
    PyObject *name = PyDict_GetItemWithError(self->names, phase);
    if (!name)
        return PyErr_Occurred() ? -1 : (PyErr_SetObject(PyExc_KeyError, phase), -1);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->under_way); i++)
        if (PyList_GET_ITEM(self->under_way, i) == name) {
            if (meter_account(self) < 0 || PyList_SetSlice(self->under_way, i, i + 1, NULL) < 0)
                return -1;
            return meter_tell(self, phase, Py_False);
        }
    return 0;
}

static PyObject *none_unless(int failed)
{
    return failed < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *meter_begin(PyObject *self, PyObject *phase) { return none_unless(meter_begins((Meter *)self, phase)); }

static PyObject *meter_finish(PyObject *self, PyObject *phase) { return none_unless(meter_finishes((Meter *)self, phase)); }

static PyObject *meter_accounts(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    return none_unless(meter_account((Meter *)self));
}

static PyMemberDef meter_members[] = {
    {"under_way", T_OBJECT_EX, offsetof(Meter, under_way), READONLY, NULL},
    {"on_change", T_OBJECT, offsetof(Meter, on_change), 0, NULL},
    {"mark_ns", T_LONGLONG, offsetof(Meter, mark_ns), 0, NULL},
    {"entered_ns", T_LONGLONG, offsetof(Meter, entered_ns), 0, NULL},
    {"step_began", T_LONGLONG, offsetof(Meter, step_began), 0, NULL},
    {"validating", T_BOOL, offsetof(Meter, validating), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef meter_methods[] = {
    {"begin", meter_begin, METH_O, "begin(phase)"},
    {"finish", meter_finish, METH_O, "finish(phase)"},
    {"account", meter_accounts, METH_NOARGS, "account(): what has passed since the last change belongs to the innermost phase"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject MeterType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sonde.capture._kernel.Meter",
    .tp_basicsize = sizeof(Meter),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = meter_init,
    .tp_traverse = meter_traverse,
    .tp_clear = meter_clear,
    .tp_dealloc = meter_dealloc,
    .tp_members = meter_members,
    .tp_methods = meter_methods,
};
