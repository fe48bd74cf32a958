/* The ordinary case of backward and of the optimizer's step: 2 the step ends with it, otherwise as in _kernel_ordinary.h. */

/* The only optimizer's account, a new reference; NULL where there are none or several. */
static PyObject *only_account(Beat *self)
{
    PyObject *accounts = peek(self->ledger, n_accounts), *account = NULL;
    Py_ssize_t place = 0;
    if (accounts && PyDict_CheckExact(accounts) && PyDict_GET_SIZE(accounts) == 1)
        PyDict_Next(accounts, &place, NULL, &account);
    return account && says(account, n_far, Py_False) ? Py_NewRef(account) : NULL;
}

/* A handler's part that concerns the only optimizer. */
static int with_account(Beat *self, PyObject *const *args, int (*quick)(Beat *, PyObject *, PyObject *const *))
{
    PyObject *account = only_account(self);
    const int done = account ? quick(self, account, args) : 0;
    Py_XDECREF(account);
    return done;
}

/* Is this optimizer running its closure, which a framework is known to do exactly once? */
static int is_in_closure(Beat *self, PyObject *account)
{
    return says(self->loop, n__in_step, account) && says(self->loop, n__closure, Py_True) && says(self->loop, n_single_closures, Py_True);
}

/* What a weak reference refers to, a new reference; NULL where it is dead or none. */
static PyObject *referred(PyObject *reference)
{
    PyObject *object = reference && PyWeakref_Check(reference) ? PyWeakref_GetObject(reference) : Py_None;
    return object && object != Py_None ? Py_NewRef(object) : NULL;
}

/* Gradients that nobody was heard to clear: are those of the witnesses gone? Another thread's are not to be looked at. */
static int are_gone(PyObject *account)
{
    PyObject *thread = peek(account, n_thread);
    if (!thread || !PyLong_CheckExact(thread) || PyLong_AsUnsignedLong(thread) != PyThread_get_thread_ident()) {
        forgive();
        return 0;
    }
    PyObject *witnesses = Py_XNewRef(peek(account, n_witnesses));
    int gone = witnesses && PyList_CheckExact(witnesses) && PyList_GET_SIZE(witnesses);
    for (Py_ssize_t i = 0; gone && i < PyList_GET_SIZE(witnesses); i++) {
        PyObject *parameter = referred(PyList_GET_ITEM(witnesses, i));
        gone = parameter && says(parameter, n_grad, Py_None);
        Py_XDECREF(parameter);
    }
    Py_XDECREF(witnesses);
    return gone;
}

/* The loss before a framework divided it. */
static double divided(Beat *self, double value)
{
    PyObject *divisor = peek(self->losses, n_divided_by), *answer = divisor && divisor != Py_None ? PyObject_CallNoArgs(divisor) : NULL;
    if (answer)
        value *= PyFloat_AsDouble(answer);
    Py_XDECREF(answer);
    if (PyErr_Occurred()) {
        forgive();
        return NAN;
    }
    return value;
}

/* backward_begins(tensors) */
static int backward_begins(Beat *self, PyObject *account, PyObject *const *args)
{
    View view;
    float wide;
    PyObject *series = peek(self->lines, n__series), *sums = peek(self->losses, n__sums);
    const long step = whole(self->clock, n_number), num_backwards = whole(self->clock, n__backwards);
    const int inside = !says(self->loop, n__in_step, Py_None);
    if (!series || !PyDict_CheckExact(series) || PyDict_GET_SIZE(series) != 1 || !sums || !PyDict_CheckExact(sums) || PyDict_GET_SIZE(sums) ||
        step % CHECKED_EVERY == 0 || whole(self->lines, n__num_alike) <= LEARNT || num_backwards != 0 || !is_calm(self) ||
        (inside && !is_in_closure(self, account)) || !says(self->ledger, n_ever_used, Py_True) || !says(account, n_written, Py_False) ||
        !(says(account, n_cleared, Py_True) || are_gone(account)) || !look(args[0], &view) || view.num != 1 || view.repeats != 1)
        return 0;
    const double value = divided(self, view.kind == F64 ? *(const double *)view.data : (double)*widen(&view, view.data, 1, &wide));
    PyObject *recent = isfinite(value) ? is_usual(peek(self->spikes, n__losses), n_loss, value) : NULL;
    if (!recent || !isnan(real(self->losses, n__scale)))
        return 0;
    Py_INCREF(recent);
    /* In a closure the gradients are looked at before this frame is left: then it is still to be found. */
    PyObject *frame = inside ? Py_NewRef(Py_None) : user_frame(self), *sum = frame ? Py_BuildValue("di", value, 1) : NULL;
    const int failed = !sum || put(self->clock, n_active, Py_True) < 0 || (!inside && put_whole(self->clock, n__backwards, 1) < 0) ||
                       put(account, n_cleared, Py_True) < 0 || put(account, n_backward_since, Py_True) < 0 ||
                       add_to(self->meter->scalars, n_backwards, 1) < 0 ||
                       put(self->kept, n_frame, frame) < 0 || (is_observed(self) && tell_probes(self, n_backward, args, 1) < 0) ||
                       put(self->kept, n_maker, Py_None) < 0 || PyDict_SetItem(sums, n_loss, sum) < 0 ||
                       put_float(self->losses, n_last, value) < 0 || see(recent, value) < 0 || meter_begins(self->meter, text_backward) < 0;
    Py_DECREF(recent);
    Py_XDECREF(frame);
    Py_XDECREF(sum);
    return failed ? -1 : 1;
}

static int quick_backward_begins(Beat *self, PyObject *const *args) { return with_account(self, args, backward_begins); }

static int is_of(PyObject *account, PyObject *optimizer)
{
    PyObject *reference = peek(account, n_optimizer);
    return reference && PyWeakref_Check(reference) && PyWeakref_GetObject(reference) == optimizer;
}

static int backward_ended(Beat *self, PyObject *account, PyObject *const *args)
{
    (void)args;
    const int inside = !says(self->loop, n__in_step, Py_None);
    if ((inside && !is_in_closure(self, account)) || whole(self->clock, n_known_optimizers) <= 0 ||
        !(says(account, n_written, Py_True) || whole(account, n_doubts) == 0))
        return 0;
    if (inside) { /* nobody asks about the gradients of a closure before they are used */
        PyObject *optimizer = referred(peek(account, n_optimizer));
        Gradients *all = &self->in_closure;
        const int fine = optimizer && isnan(real(self->losses, n__scale)) && read_gradients(optimizer, whole(self->clock, n_number), MARK | SUM, all) &&
                         all->sum > 0 && isfinite(all->sum);
        Py_XDECREF(optimizer);
        if (!fine) {
            all->sum = 0;
            return 0;
        }
        if (put(self->kept, n_frame, Py_None) < 0)
            return -1;
    }
    return meter_finishes(self->meter, text_backward) < 0 || put(account, n_written, Py_True) < 0 ? -1 : 1;
}

static int quick_backward_ended(Beat *self, PyObject *const *args) { return with_account(self, args, backward_ended); }

/* The norms of this optimizer's gradients, where this one is as usual. */
static PyObject *usual_norms(Beat *self, PyObject *account, double norm)
{
    PyObject *norms = peek(self->spikes, n__norms), *index = peek(account, n_index);
    return norms && index ? is_usual(norms, index, norm) : NULL;
}

/* Guard.gradients has nothing to tell of but their norm. */
static int are_fresh(Beat *self, PyObject *account)
{
    PyObject *witnesses = peek(account, n_witnesses);
    return witnesses && PyList_CheckExact(witnesses) && PyList_GET_SIZE(witnesses) && whole(account, n_num_steps) >= 2 &&
           says(self->guard, n__sum_of_squares, Py_None) && (says(account, n_cleared, Py_True) || says(account, n_backward_since, Py_False));
}

static int use_gradients(Beat *self, PyObject *account, double sum)
{
    return put_float(self->guard, n__sum_of_squares, sum) < 0 || put_whole(account, n_num_steps, whole(account, n_num_steps) + 1) < 0 ||
                   put(account, n_cleared, Py_False) < 0 || put(account, n_backward_since, Py_False) < 0 || put(account, n_written, Py_False) < 0 ||
                   sign(account) < 0 || put(self->kept, n_frame, Py_None) < 0
               ? -1
               : 0;
}

/* sonde.capture.gradient_state.optimizer_parameters, a new reference; NULL, and no exception, where the groups are not plain. */
static PyObject *optimizer_parameters(PyObject *optimizer)
{
    PyObject *groups = groups_of(optimizer), *all = groups ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(groups); i++) {
        PyObject *params = in_group(groups, i, n_params);
        if (!params || !PyList_CheckExact(params) || PyList_SetSlice(all, PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, params) < 0)
            Py_CLEAR(all);
    }
    forgive();
    Py_XDECREF(groups);
    return all;
}

/* Panel.each("before" or "after", optimizer, parameters, closure=…) */
static int tell_of_update(Beat *self, PyObject *moment, PyObject *optimizer, PyObject *parameters, int closure)
{
    PyObject *all[] = {NULL, self->panel, moment, optimizer, parameters, closure ? Py_True : Py_False}, *names = PyTuple_Pack(1, n_closure);
    PyObject *told = names ? PyObject_VectorcallMethod(n_each, all + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, names) : NULL;
    Py_XDECREF(names);
    Py_XDECREF(told);
    return told ? 0 : -1;
}

/* What `squares_of` says, where the probes have just read the gradients and know it. */
static double squares_known(Beat *self, PyObject *optimizer)
{
    PyObject *known = PyObject_CallMethodOneArg(self->panel, n_guarded, optimizer);
    double sum = -1;
    if (known == Py_None)
        sum = squares_of(optimizer);
    else if (known && PyTuple_CheckExact(known) && PyTuple_GET_SIZE(known) == 2 && PyLong_AsLong(PyTuple_GET_ITEM(known, 1)) == -1)
        sum = PyFloat_AsDouble(PyTuple_GET_ITEM(known, 0));
    Py_XDECREF(known);
    forgive();
    return sum > 0 && isfinite(sum) ? sum : -1;
}

/* optimizer_begins(optimizer, closure) */
static int optimizer_begins(Beat *self, PyObject *account, PyObject *const *args)
{
    PyObject *optimizer = args[0], *recent = NULL;
    const int closure = args[1] == Py_True;
    if (!is_of(account, optimizer) || !is_calm(self) || !is_empty(self->clock, n__stepped) || !is_learnt(self, n_optimizer_step) ||
        !(closure || (are_fresh(self, account) && usual_norms(self, account, -INFINITY))))
        return 0;
    const int observed = is_observed(self);
    PyObject *parameters = observed ? optimizer_parameters(optimizer) : NULL;
    if (observed && !parameters)
        return 0;
    /* Where this turns out not to be ordinary, the probes are told again: they measure the same once more. */
    int done = observed && tell_of_update(self, n_before, optimizer, parameters, closure) < 0 ? -1 : 1;
    const double sum = closure || done < 0 ? 0 : observed ? squares_known(self, optimizer) : squares_of(optimizer), norm = sum > 0 ? 0.5 * log(sum) : NAN;
    if (done == 1 && !closure && !(sum > 0 && (recent = Py_XNewRef(usual_norms(self, account, norm)))))
        done = 0;
    if (done == 1 &&
        (put(self->clock, n_active, Py_True) < 0 || put(self->loop, n__in_step, account) < 0 || put(self->loop, n__closure, args[1]) < 0 ||
         (!closure && (use_gradients(self, account, sum) < 0 || see(recent, norm) < 0)) || meter_begins(self->meter, text_optimizer) < 0))
        done = -1;
    Py_XDECREF(recent);
    Py_XDECREF(parameters);
    return done;
}

static int quick_optimizer_begins(Beat *self, PyObject *const *args) { return with_account(self, args, optimizer_begins); }

/* Writes the learning rates; 0 where one of them is no plain number, or has no scalar yet. With `write` 0 it only looks. */
static int take_rates(Beat *self, PyObject *optimizer, int write)
{
    PyObject *groups = groups_of(optimizer);
    int done = groups && PyList_GET_SIZE(groups) <= PyTuple_GET_SIZE(self->rate_names);
    for (Py_ssize_t i = 0; done == 1 && i < PyList_GET_SIZE(groups); i++) {
        PyObject *rate = in_group(groups, i, n_lr), *name = PyTuple_GET_ITEM(self->rate_names, i);
        if (!rate || !PyFloat_CheckExact(rate) || !PyDict_Contains(self->meter->scalars, name))
            done = 0;
        else if (write && PyDict_SetItem(self->meter->scalars, name, rate) < 0)
            done = -1;
    }
    Py_XDECREF(groups);
    return done;
}

/* optimizer_ended(optimizer): the step ends with it. */
static int optimizer_ended(Beat *self, PyObject *account, PyObject *const *args)
{
    PyObject *optimizer = args[0], *found = find(optimizer, n_found_inf);
    Py_XDECREF(found); /* None is all that is asked for */
    PyObject *stepped = peek(self->clock, n__stepped), *anchor = Py_XNewRef(peek(self->clock, n__anchor)), *key = PyLong_FromVoidPtr(optimizer), *parameters = NULL;
    int done = 0;
    const int closure = is_in_closure(self, account), observed = is_observed(self);
    const double sum = closure && are_fresh(self, account) ? squares_after(optimizer, whole(self->clock, n_number), &self->in_closure) : -1;
    if (key && (!found || found == Py_None) && says(self->loop, n__in_step, account) && is_of(account, optimizer) &&
        (closure ? sum > 0 : says(self->loop, n__closure, Py_False)) && stepped && PyDict_CheckExact(stepped) && PyDict_GET_SIZE(stepped) == 0 && anchor &&
        (anchor == Py_None ? whole(self->clock, n_known_optimizers) <= 1 : PyObject_RichCompareBool(anchor, key, Py_EQ) == 1) &&
        take_rates(self, optimizer, 0) && (!observed || (parameters = optimizer_parameters(optimizer))))
        done = meter_finishes(self->meter, text_optimizer) < 0 || put(self->loop, n__in_step, Py_None) < 0 ||
                       (observed && tell_of_update(self, n_after, optimizer, parameters, closure) < 0) ||
                       (closure && use_gradients(self, account, sum) < 0) || put(self->loop, n__scaler_stepped, Py_True) < 0 ||
                       add_to(self->meter->scalars, n_optimizer_steps, 1) < 0 || take_rates(self, optimizer, 1) < 0 ||
                       PyDict_SetItem(stepped, key, Py_None) < 0 || put(self->clock, n__ever_stepped, Py_True) < 0 ||
                       put_whole(self->clock, n__without, 0) < 0
                   ? -1
                   : 2;
    if (done == 0)
        forgive();
    Py_XDECREF(anchor);
    Py_XDECREF(parameters);
    Py_XDECREF(key);
    return done;
}

static int quick_optimizer_ended(Beat *self, PyObject *const *args) { return with_account(self, args, optimizer_ended); }
