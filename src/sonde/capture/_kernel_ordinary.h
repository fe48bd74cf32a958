/* The ordinary case of each of the loop's handlers: 1 it was, and is done; 0 it was not, and nothing is changed; -1 an exception. */

static int quick_fetch_begins(Beat *self, PyObject *const *args)
{
    (void)args;
    if (!is_empty(self->clock, n__stepped))
        return 0;
    return put(self->clock, n_active, Py_True) < 0 || meter_begins(self->meter, text_data) < 0 ? -1 : 1;
}

static int is_observed(Beat *self) { return !self->meter->desk->plain; }

/* Panel.each(moment, …): 0, or -1 with an exception. */
static int tell_probes(Beat *self, PyObject *moment, PyObject *const *args, Py_ssize_t num)
{
    PyObject *all[8] = {NULL, self->panel, moment};
    for (Py_ssize_t i = 0; i < num; i++)
        all[i + 3] = args[i];
    PyObject *told = PyObject_VectorcallMethod(n_each, all + 1, (size_t)(num + 2) | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_XDECREF(told);
    return told ? 0 : -1;
}

/* fetch_ended(batch) */
static int quick_fetch_ended(Beat *self, PyObject *const *args)
{
    if (meter_finishes(self->meter, text_data) < 0)
        return -1;
    return is_observed(self) && tell_probes(self, n_fetched, args, 1) < 0 ? -1 : 1;
}

/* Notes that this thread has to do with the gradients of this optimizer; see Ledger._ours. */
static int sign(PyObject *account)
{
    PyObject *thread = peek(account, n_thread);
    const unsigned long ident = PyThread_get_thread_ident();
    if (thread && PyLong_CheckExact(thread) && PyLong_AsUnsignedLong(thread) == ident)
        return 0;
    forgive();
    PyObject *number = PyLong_FromUnsignedLong(ident);
    const int failed = !number || put(account, n_thread, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static int quick_zero_grad(Beat *self, PyObject *const *args)
{
    PyObject *accounts = peek(self->ledger, n_accounts), *account = by_id(accounts, args[0]);
    if (!self->meter->step_began || !is_empty(self->clock, n__stepped) || !is_learnt(self, n_zero_grad) || !accounts)
        return 0;
    if (put(self->clock, n_active, Py_True) < 0 || add_to(self->meter->scalars, n_zero_grads, 1) < 0)
        return -1;
    return account && (put(account, n_cleared, Py_True) < 0 || sign(account) < 0) ? -1 : 1;
}

/* clipped(max_norm) */
static int quick_clipped(Beat *self, PyObject *const *args)
{
    (void)args;
    return is_learnt(self, n_clip) ? add_to(self->meter->scalars, n_clips, 1) < 0 ? -1 : 1 : 0;
}

/* scheduler_stepped(scheduler, given) */
static int quick_scheduler_stepped(Beat *self, PyObject *const *args)
{
    PyObject *known = by_id(peek(self->course, n__schedulers), args[0]);
    if (!known || !says(known, n_has_stepped, Py_True) || !is_learnt(self, n_scheduler_step))
        return 0;
    return add_to(self->meter->scalars, n_scheduler_steps, 1) < 0 ? -1 : 1;
}

/* Does this input hold only finite numbers, or none that could be otherwise? */
static int is_finite_input(PyObject *value)
{
    View view;
    Leave away;
    double sum = 0;
    if (value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value))
        return 1;
    if (look(value, &view)) {
        if (!leave(&away, value, &view))
            return 0;
        const int bad = add_squares(&view, &sum);
        come_back(&away);
        return !bad;
    }
    if ((PyObject *)Py_TYPE(value) != tensor_type)
        return 0;
    PyObject *floating = PyObject_CallMethodNoArgs(value, n_is_floating_point);
    forgive();
    Py_XDECREF(floating);
    return floating == Py_False;
}

static int are_finite_inputs(PyObject *args, PyObject *kwargs)
{
    Py_ssize_t place = 0;
    PyObject *value;
    if (!PyTuple_CheckExact(args) || !PyDict_CheckExact(kwargs))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        if (!is_finite_input(PyTuple_GET_ITEM(args, i)))
            return 0;
    while (PyDict_Next(kwargs, &place, NULL, &value))
        if (!is_finite_input(value))
            return 0;
    return 1;
}

/* The state of the random generator, a new reference. To ask for it takes a tenth of all the time that goes by here, and where nobody draws it
 * stays the same: then it is asked for at every fifth forward. One that begins to draw begins with the state that is believed; it is those
 * after it that may be looked back at with other random numbers than they had, up to the next time that it is asked for. */
static PyObject *random_state(Beat *self)
{
    const long due = whole(self->kept, n_rng_due);
    PyObject *known = peek(self->kept, n_rng);
    if (known && known != Py_None && due > 0)
        return put_whole(self->kept, n_rng_due, due - 1) < 0 ? NULL : Py_NewRef(known);
    Py_XINCREF(known);
    PyObject *state = PyObject_CallNoArgs(self->rng_state);
    const int compared = state && known && known != Py_None && due == 0, same = compared && are_same_bytes(known, state);
    Py_XDECREF(known);
    if (state && (put(self->kept, n_rng, state) < 0 || put_whole(self->kept, n_rng_due, same ? STILL : compared ? -RESTLESS : due + (due < 0)) < 0))
        Py_CLEAR(state);
    return state;
}

/* forward_begins(watched, module, args, kwargs) */
static int quick_forward_begins(Beat *self, PyObject *const *args)
{
    PyObject *watched = args[0], *module = args[1];
    if (!is_outside(self->graph_task) || !answers(self->tracing, Py_None) || !answers(self->grad_enabled, Py_True) || !is_calm(self) || !is_learnt(self, n_forward) ||
        !says(watched, n_ever_entered, Py_True) || !says(module, n_training, Py_True) || !are_finite_inputs(args[2], args[3]))
        return 0;
    PyObject *doors = peek(watched, n_doors_used), *calls = peek(self->kept, n_calls), *name = peek(watched, n_name);
    PyObject *rng = random_state(self), *parts = NULL, *wrapped = NULL, *call = NULL, *done = NULL, *thread = NULL, *key = NULL;
    int failed = -1;
    if (rng && doors && calls && name && (parts = PyTuple_Pack(5, name, module, args[2], args[3], rng)) && (wrapped = PyTuple_Pack(1, parts)) &&
        (call = PyTuple_Type.tp_new((PyTypeObject *)self->call_type, wrapped, NULL)) && (thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident())) &&
        (key = PyLong_FromVoidPtr(module)) && put(self->kept, n_frame, Py_None) == 0 && (done = PyObject_CallMethodOneArg(calls, n_append, call)) &&
        put(self->clock, n_active, Py_True) == 0 && put_whole(self->loop, n__depth, 1) == 0 && put(self->loop, n__thread, thread) == 0 &&
        (!is_observed(self) || PySet_Contains(doors, key) || (put(self->loop, n__entered, watched) == 0 && tell_probes(self, n_entered, args, 4) == 0)) &&
        PySet_Add(doors, key) == 0 && add_to(self->meter->scalars, n_forwards, 1) == 0)
        failed = meter_begins(self->meter, text_forward);
    Py_XDECREF(rng);
    Py_XDECREF(parts);
    Py_XDECREF(wrapped);
    Py_XDECREF(call);
    Py_XDECREF(done);
    Py_XDECREF(thread);
    Py_XDECREF(key);
    return failed < 0 ? -1 : 1;
}

/* Evaluations.trained, where it may have something to say, and Loop._leave */
static int leave_observed(Beat *self, PyObject *const *args)
{
    if (says(args[1], n_training, Py_True) && !is_finite_input(args[2])) {
        PyObject *done = PyObject_CallMethodOneArg(self->evaluations, n_trained, args[2]);
        Py_XDECREF(done);
        if (!done)
            return -1;
    }
    if (says(self->loop, n__entered, Py_None))
        return 0;
    PyObject *const told[] = {args[0], args[2]};
    return put(self->loop, n__entered, Py_None) < 0 ? -1 : tell_probes(self, n_left, told, 2);
}

/* forward_ended(watched, module, output) */
static int quick_forward_ended(Beat *self, PyObject *const *args)
{
    PyObject *thread = peek(self->loop, n__thread), *seen = peek(self->models, n__with_output), *key = PyLong_FromVoidPtr(args[0]);
    const int is_seen = key && seen && PySet_Check(seen) && PySet_Contains(seen, key) == 1;
    Py_XDECREF(key);
    PyObject *entered = peek(self->loop, n__entered);
    if (args[2] == Py_None || whole(self->loop, n__depth) != 1 || (entered != Py_None && (!is_observed(self) || entered != args[0])) ||
        !is_empty(self->evaluations, n__under_way) || !thread || PyLong_AsUnsignedLong(thread) != PyThread_get_thread_ident() || !answers(self->grad_enabled, Py_True) || !is_seen) {
        forgive();
        return 0;
    }
    if (put_whole(self->loop, n__depth, 0) < 0 || meter_finishes(self->meter, text_forward) < 0)
        return -1;
    if (says(self->kept, n_by_library, Py_True)) {
        PyObject *maker = called_by_library(self, user_frame(self));
        const int failed = !maker || put(self->kept, n_maker, maker) < 0;
        Py_XDECREF(maker);
        if (failed)
            return -1;
    }
    return is_observed(self) && leave_observed(self, args) < 0 ? -1 : 1;
}
