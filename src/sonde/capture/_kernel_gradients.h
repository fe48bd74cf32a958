/* The gradients of an optimizer, read where they are the ordinary ones. */

/* The optimizer's groups, a new reference; NULL where they are no plain list. They are the user's: whatever is asked of them may change them. */
static PyObject *groups_of(PyObject *optimizer)
{
    PyObject *groups = PyObject_GetAttr(optimizer, n_param_groups);
    forgive();
    if (groups && !PyList_CheckExact(groups))
        Py_CLEAR(groups);
    return groups;
}

static PyObject *in_group(PyObject *groups, Py_ssize_t i, PyObject *name)
{
    PyObject *group = PyList_GET_ITEM(groups, i), *value = PyDict_CheckExact(group) ? PyDict_GetItemWithError(group, name) : NULL;
    forgive();
    return value;
}

enum { MARK = 1, SUM = 2 };

static uint64_t mixed(uint64_t mark, uint64_t more) { return (mark ^ more) * 0x9E3779B97F4A7C15u; }

/* Where it lies, how often torch changed it in place, and its first and last number: torch is not told of what is changed through `.data`. */
static uint64_t mark_of(PyObject *gradient, const View *view)
{
    uint64_t mark = (uintptr_t)view->data, ends[2] = {0, 0};
    PyObject *version = PyObject_GetAttr(gradient, name_version);
    mark = mixed(mark, version && PyLong_CheckExact(version) ? PyLong_AsUnsignedLongLong(version) : 0);
    Py_XDECREF(version);
    forgive();
    if (view->num && is_dense(view)) {
        memcpy(&ends[0], view->data, (size_t)view->itemsize);
        memcpy(&ends[1], (const char *)view->data + (view->num - 1) * view->itemsize, (size_t)view->itemsize);
    }
    return mixed(mixed(mark, ends[0]), ends[1]);
}

/* Adds what is wanted of a parameter's gradient; 0 where it holds a bad number, or is not ours to read. */
static int add_gradient(PyObject *parameter, int wanted, Gradients *all)
{
    View view;
    Leave away;
    int fine = 0;
    PyObject *gradient = PyObject_GetAttr(parameter, n_grad);
    if (gradient == Py_None) {
        fine = 1;
    } else if (gradient && look(gradient, &view)) {
        fine = 1;
        if (wanted & MARK)
            all->mark = mixed(all->mark, mark_of(gradient, &view));
        if (wanted & SUM && (fine = leave(&away, gradient, &view))) {
            fine = !add_squares(&view, &all->sum);
            come_back(&away);
        }
    }
    Py_XDECREF(gradient);
    forgive();
    return fine;
}

/* 0 where one of the gradients holds a bad number, or is not ours to read. Gradients of another step have another mark. */
static int read_gradients(PyObject *optimizer, long step, int wanted, Gradients *all)
{
    PyObject *groups = groups_of(optimizer);
    int fine = groups != NULL;
    *all = (Gradients){0, (uint64_t)step};
    for (Py_ssize_t i = 0; fine && i < PyList_GET_SIZE(groups); i++) {
        PyObject *params = in_group(groups, i, n_params);
        fine = params && PyList_CheckExact(params);
        Py_XINCREF(params);
        for (Py_ssize_t j = 0; fine && j < PyList_GET_SIZE(params); j++) {
            PyObject *parameter = Py_NewRef(PyList_GET_ITEM(params, j));
            fine = add_gradient(parameter, wanted, all);
            Py_DECREF(parameter);
        }
        Py_XDECREF(params);
    }
    Py_XDECREF(groups);
    return fine;
}

/* The sum of squares of all gradients; negative where that is not a number above zero, or not ours to say. */
static double squares_of(PyObject *optimizer)
{
    Gradients all;
    return read_gradients(optimizer, 0, SUM, &all) && all.sum > 0 && isfinite(all.sum) ? all.sum : -1;
}

/* The same at the end of a closure's optimizer, without reading them again where they are as they were when backward ended. */
static double squares_after(PyObject *optimizer, long step, const Gradients *before)
{
    Gradients now;
    const int same = before->sum > 0 && read_gradients(optimizer, step, MARK, &now) && now.mark == before->mark;
    return same ? before->sum : squares_of(optimizer);
}
