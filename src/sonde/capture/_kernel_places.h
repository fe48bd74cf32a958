/* Leaves in the place of their modules' forwards, all at once: the simple cases of sonde.capture.instead. */

/* put_in(plan, door, armed): `plan` has pairs of a weak reference to a module and its leaf. Each leaf is put in the place of its module's
 * forward, and its pair (the module's attributes, the leaf) added to `armed`. Answers with the pairs of the plan that are not so simple: the door
 * itself, modules with hooks, and those that have a forward of their own. */
static PyObject *put_in(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    if (check_count("put_in", num_args, 3) < 0)
        return NULL;
    PyObject *plan = args[0], *armed = args[2], *rest = PyList_New(0);
    if (!PyList_CheckExact(plan) || !PyList_CheckExact(armed) || !rest) {
        Py_XDECREF(rest);
        return PyErr_Occurred() ? NULL : (PyErr_SetString(PyExc_TypeError, "plan and armed must be lists"), NULL);
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(plan); i++) {
        PyObject *pair = PyList_GET_ITEM(plan, i);
        if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2 || !PyWeakref_Check(PyTuple_GET_ITEM(pair, 0))) {
            PyErr_SetString(PyExc_TypeError, "a plan has pairs of a weak reference and a leaf");
            break;
        }
        PyObject *leaf = PyTuple_GET_ITEM(pair, 1), *part = PyWeakref_GetObject(PyTuple_GET_ITEM(pair, 0));
        if (part == Py_None)
            continue;
        PyObject *attributes = PyObject_GenericGetDict(part, NULL);
        PyObject *hooks = attributes ? PyDict_GetItemWithError(attributes, name_forward_hooks) : NULL;
        const int simple = part != args[1] && hooks && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 0 && PyDict_Contains(attributes, name_forward) == 0;
        PyErr_Clear();
        PyObject *put = simple ? PyTuple_Pack(2, attributes, leaf) : NULL;
        const int failed = simple ? !put || PyList_Append(armed, put) < 0 || PyDict_SetItem(attributes, name_forward, leaf) < 0 : PyList_Append(rest, pair) < 0;
        Py_XDECREF(put);
        Py_XDECREF(attributes);
        if (failed)
            break;
    }
    if (PyErr_Occurred())
        Py_CLEAR(rest);
    return rest;
}

/* take_out(armed): undoes it. Answers with the pairs on which somebody else stands by now; those are left as they are. */
static PyObject *take_out(PyObject *self, PyObject *armed)
{
    (void)self;
    PyObject *rest = PyList_New(0);
    if (!PyList_CheckExact(armed) || !rest) {
        Py_XDECREF(rest);
        return PyErr_Occurred() ? NULL : (PyErr_SetString(PyExc_TypeError, "armed must be a list"), NULL);
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(armed); i++) {
        PyObject *pair = PyList_GET_ITEM(armed, i), *attributes = PyTuple_GET_ITEM(pair, 0), *leaf = PyTuple_GET_ITEM(pair, 1);
        const int simple = PyObject_TypeCheck(leaf, &LeafType) && (!((Leaf *)leaf)->under || ((Leaf *)leaf)->under == Py_None) &&
                           PyDict_GetItemWithError(attributes, name_forward) == leaf;
        PyErr_Clear();
        if ((simple ? PyDict_DelItem(attributes, name_forward) : PyList_Append(rest, pair)) < 0) {
            Py_CLEAR(rest);
            break;
        }
    }
    return rest;
}
