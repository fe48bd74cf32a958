/* What the handlers ask of objects of Python. All leave no exception where they answer "no".
 *
 * Asking may run Python: a property of the user's, a tensor of a class of his, a signal handler, another thread. Letting go of something may
 * run its destructor. So whatever is used after that is held meanwhile. */

static _Thread_local PyObject *owed; /* an exception that a question met and that is not ours to drop: Ctrl-C, sys.exit. `beat` raises it. */

/* "No" is the answer, whatever was raised. */
static void forgive(void)
{
    PyObject *type, *error, *trace;
    if (!PyErr_Occurred())
        return;
    if (owed || PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        return;
    }
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    owed = error;
    Py_XDECREF(type);
    Py_XDECREF(trace);
}

/* Where objects of a class keep an attribute that has a slot. Memory that is touched once in a step is in no cache, and Python touches that of the
 * class, its table and the descriptor before it knows: so every line of code that asks remembers the way to what it asked for last. */
typedef struct {
    PyTypeObject *type; /* held where there is an offset, so that no other class gets its address */
    PyObject *name;
    Py_ssize_t offset; /* 0: there is no slot, and Python has to be asked */
} Way;

static __attribute__((noinline, cold)) void find_way(Way *way, PyTypeObject *type, PyObject *name)
{
    PyObject *found = PyObject_GetAttr((PyObject *)type, name);
    const PyMemberDef *member = found && Py_IS_TYPE(found, &PyMemberDescr_Type) ? ((PyMemberDescrObject *)found)->d_member : NULL;
    const Py_ssize_t offset = member && member->type == T_OBJECT_EX && !(member->flags & READONLY) ? member->offset : 0;
    PyTypeObject *gone = way->offset ? way->type : NULL;
    if (offset)
        Py_INCREF(type);
    way->type = type;
    way->name = name;
    way->offset = offset;
    forgive();
    Py_XDECREF(found);
    Py_XDECREF(gone);
}

static PyObject **slot_of(Way *way, PyObject *object, PyObject *name)
{
    if (way->type != Py_TYPE(object) || way->name != name)
        find_way(way, Py_TYPE(object), name);
    return way->offset ? (PyObject **)((char *)object + way->offset) : NULL;
}

#define ON_ITS_WAY(function, ...)                                                                                                                   \
    ({                                                                                                                                              \
        static Way way;                                                                                                                             \
        function(&way, __VA_ARGS__);                                                                                                                \
    })
#define peek(object, name) ON_ITS_WAY(peek_by, object, name)
#define says(object, name, expected) (peek(object, name) == (expected))
#define get(object, name) ON_ITS_WAY(get_by, object, name)
#define whole(object, name) ON_ITS_WAY(whole_by, object, name)
#define real(object, name) ON_ITS_WAY(real_by, object, name)
#define put(object, name, value) ON_ITS_WAY(put_by, object, name, value)
#define put_whole(object, name, number) ON_ITS_WAY(put_whole_by, object, name, number)
#define put_float(object, name, number) ON_ITS_WAY(put_float_by, object, name, number)
#define is_empty(object, name) is_empty_container(peek(object, name))

/* An attribute of an object of ours, borrowed: the object holds it. NULL where there is none. */
static PyObject *peek_by(Way *way, PyObject *object, PyObject *name)
{
    PyObject **slot = slot_of(way, object, name);
    if (slot)
        return *slot;
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value) {
        forgive();
        return NULL;
    }
    Py_DECREF(value);
    return value;
}

/* An attribute that is mostly not there, a new reference: no exception is made for nobody to see. */
static PyObject *find(PyObject *object, PyObject *name)
{
    PyObject *value = NULL;
#if PY_VERSION_HEX >= 0x030D0000
    (void)PyObject_GetOptionalAttr(object, name, &value);
#else
    (void)_PyObject_LookupAttr(object, name, &value);
#endif
    forgive();
    return value;
}

/* The same, held: asking it for a number may run Python. */
static PyObject *get_by(Way *way, PyObject *object, PyObject *name)
{
    PyObject **slot = slot_of(way, object, name);
    return slot ? Py_XNewRef(*slot) : PyObject_GetAttr(object, name);
}

static long whole_by(Way *way, PyObject *object, PyObject *name)
{
    PyObject *value = get_by(way, object, name);
    long number = value && PyLong_CheckExact(value) ? PyLong_AsLong(value) : -1;
    Py_XDECREF(value);
    forgive();
    return number;
}

static double real_by(Way *way, PyObject *object, PyObject *name)
{
    PyObject *value = get_by(way, object, name);
    const double number = value ? PyFloat_AsDouble(value) : NAN;
    Py_XDECREF(value);
    if (PyErr_Occurred()) {
        forgive();
        return NAN;
    }
    return number;
}

static int put_by(Way *way, PyObject *object, PyObject *name, PyObject *value)
{
    PyObject **slot = slot_of(way, object, name);
    if (!slot)
        return PyObject_SetAttr(object, name, value);
    Py_XSETREF(*slot, Py_NewRef(value));
    return 0;
}

static int put_whole_by(Way *way, PyObject *object, PyObject *name, long number)
{
    PyObject *value = PyLong_FromLong(number);
    int failed = !value || put_by(way, object, name, value) < 0;
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

static int put_float_by(Way *way, PyObject *object, PyObject *name, double number)
{
    PyObject *value = PyFloat_FromDouble(number);
    int failed = !value || put_by(way, object, name, value) < 0;
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

/* Is what this function answers the expected object? */
static int answers(PyObject *function, PyObject *expected)
{
    PyObject *answer = PyObject_CallNoArgs(function);
    forgive();
    Py_XDECREF(answer);
    return answer == expected;
}

/* Is there no backward under way? Asked of torch._C._current_graph_task_id. */
static int is_outside(PyObject *graph_task)
{
    PyObject *task = PyObject_CallNoArgs(graph_task);
    const int outside = task && PyLong_CheckExact(task) && PyLong_AsLong(task) == -1;
    Py_XDECREF(task);
    forgive();
    return outside;
}

static int is_empty_container(PyObject *value)
{
    return value && ((PyDict_CheckExact(value) && PyDict_GET_SIZE(value) == 0) || (PyList_CheckExact(value) && PyList_GET_SIZE(value) == 0));
}

static PyObject *by_id(PyObject *dict, PyObject *object)
{
    PyObject *key = dict && PyDict_CheckExact(dict) ? PyLong_FromVoidPtr(object) : NULL;
    PyObject *value = key ? PyDict_GetItemWithError(dict, key) : NULL;
    Py_XDECREF(key);
    forgive();
    return value;
}

/* Is the line of this kind of call known? */
static int is_learnt(Beat *self, PyObject *call)
{
    PyObject *lookups = peek(self->lines, n__num_lookups), *num = lookups && PyDict_CheckExact(lookups) ? PyDict_GetItemWithError(lookups, call) : NULL;
    forgive();
    return num && PyLong_AsLong(num) >= LEARNT;
}

/* No forward is under way, no evaluation either, and the first step has begun: the doors need not be left, the clock not be touched. */
static int is_calm(Beat *self)
{
    return self->meter->step_began && whole(self->loop, n__depth) == 0 && says(self->loop, n__entered, Py_None) && is_empty(self->evaluations, n__under_way);
}

/* Would this value be taken by `Recent.see` without further ado? */
static PyObject *is_usual(PyObject *series, PyObject *key, double value)
{
    PyObject *recent = series && PyDict_CheckExact(series) ? PyDict_GetItemWithError(series, key) : NULL;
    forgive();
    PyObject *bound = recent ? peek(recent, n_bound) : NULL, *values = recent ? peek(recent, n__values) : NULL;
    if (!bound || !PyFloat_CheckExact(bound) || !(value <= PyFloat_AS_DOUBLE(bound)) || !values || !PyList_CheckExact(values))
        return NULL;
    const long place = whole(recent, n__place);
    return place >= 0 && place <= PyList_GET_SIZE(values) ? recent : NULL;
}

/* Recent.see */
static int see(PyObject *recent, double value)
{
    const long place = whole(recent, n__place), next = (place + 1) % WINDOW;
    PyObject *number = PyFloat_FromDouble(value), *values = peek(recent, n__values);
    const int failed = !number || !values || (place < PyList_GET_SIZE(values) ? PyList_SetItem(values, place, Py_NewRef(number)) : PyList_Append(values, number)) < 0;
    Py_XDECREF(number);
    if (failed || put_whole(recent, n_num, whole(recent, n_num) + 1) < 0 || put_whole(recent, n__place, next) < 0)
        return -1;
    PyObject *renewed = next % RENEWED ? Py_NewRef(Py_None) : PyObject_CallMethodNoArgs(recent, n__renew);
    Py_XDECREF(renewed);
    return renewed ? 0 : -1;
}

/* Is this frame in code of a library? -1: an exception. */
static int is_in_library(Beat *self, PyFrameObject *frame)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    PyObject *answer = PyObject_CallOneArg(self->is_library, code->co_filename);
    Py_DECREF(code);
    Py_XDECREF(answer);
    return answer ? answer == Py_True : -1;
}

/* The nearest calling frame in the user's own code, as sonde.capture.call_site has it; None where a library trains. */
static PyObject *user_frame(Beat *self)
{
    PyFrameObject *frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame) {
        const int in_library = is_in_library(self, frame);
        if (in_library == 0)
            return (PyObject *)frame;
        Py_SETREF(frame, in_library < 0 ? NULL : PyFrame_GetBack(frame));
        if (in_library < 0)
            return NULL;
    }
    return Py_NewRef(Py_None);
}

/* The function of the user's that a library called, from which the code in this frame was called. Takes the reference, gives another. */
static PyObject *called_by_library(Beat *self, PyObject *given)
{
    while (given && given != Py_None) {
        PyFrameObject *back = PyFrame_GetBack((PyFrameObject *)given);
        const int in_library = back ? is_in_library(self, back) : 1;
        if (in_library) {
            Py_XDECREF(back);
            if (in_library < 0)
                Py_CLEAR(given);
            return given;
        }
        Py_SETREF(given, (PyObject *)back);
    }
    return given;
}

