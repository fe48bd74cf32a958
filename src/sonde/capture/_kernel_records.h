/* Records as sonde.runlog.format writes them. NULL without an exception: this is left to Python. */

/* By how far a byte is ahead of those that are done, and by its value. */
static uint32_t crc_tables[8][256];
static uint32_t crc_of_half[16] __attribute__((aligned(64)));

enum { SHORT_RECORD = 1024 }; /* bytes */

static void make_crc_tables(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++)
            value = value >> 1 ^ (value & 1 ? 0xEDB88320u : 0);
        crc_tables[0][i] = value;
    }
    for (int i = 0; i < 16; i++)
        crc_of_half[i] = crc_tables[0][i * 16];
    for (int ahead = 1; ahead < 8; ahead++)
        for (int i = 0; i < 256; i++)
            crc_tables[ahead][i] = crc_tables[ahead - 1][i] >> 8 ^ crc_tables[0][crc_tables[ahead - 1][i] & 255];
}

/* zlib's. The machine is little-endian: see sonde.statistics.measure. What is long is taken eight bytes at a time; for what is short, as a step's scalars
 * are, to bring all those tables into the caches would take longer than the sum, and half a byte at a time needs only a line of them. */
static uint32_t crc32_of(const unsigned char *data, Py_ssize_t num, uint32_t seed)
{
    uint32_t value = ~seed, low, high;
    if (num < SHORT_RECORD) {
        for (; num > 0; num--) {
            value ^= *data++;
            value = value >> 4 ^ crc_of_half[value & 15];
            value = value >> 4 ^ crc_of_half[value & 15];
        }
        return ~value;
    }
    for (; num >= 8; num -= 8, data += 8) {
        memcpy(&low, data, 4);
        memcpy(&high, data + 4, 4);
        low ^= value;
        value = 0;
        for (int i = 0; i < 4; i++)
            value ^= crc_tables[7 - i][low >> 8 * i & 255] ^ crc_tables[3 - i][high >> 8 * i & 255];
    }
    while (num--)
        value = crc_tables[0][(value ^ *data++) & 255] ^ value >> 8;
    return ~value;
}

/* A record whose numbers are still to be filled in, at `*numbers`; it begins with these constant parts of the plan. */
static PyObject *begin_record(PyObject *plan, PyObject *parts, Py_ssize_t num_sites, Py_ssize_t num_fields, Py_ssize_t value_bytes, long long step,
                              long long time_ns, char **numbers)
{
    PyObject *shape = peek(plan, n__shape);
    if (!parts || !PyTuple_CheckExact(parts) || PyTuple_GET_SIZE(parts) != 3 || !shape || !PyTuple_CheckExact(shape) || PyTuple_GET_SIZE(shape) != 2 ||
        PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, 0)) != num_sites || PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, 1)) != num_fields)
        return NULL;
    PyObject *front = PyTuple_GET_ITEM(parts, 0), *constant = PyTuple_GET_ITEM(parts, 2);
    if (!PyBytes_CheckExact(front) || !PyBytes_CheckExact(constant))
        return NULL;
    const Py_ssize_t front_num = PyBytes_GET_SIZE(front), constant_num = PyBytes_GET_SIZE(constant);
    PyObject *record = PyBytes_FromStringAndSize(NULL, front_num + 4 + 16 + constant_num + value_bytes * num_sites * num_fields);
    if (!record)
        return NULL;
    char *out = PyBytes_AS_STRING(record), *payload = out + front_num + 4;
    memcpy(out, PyBytes_AS_STRING(front), (size_t)front_num);
    memcpy(payload, &step, 8);
    memcpy(payload + 8, &time_ns, 8);
    memcpy(payload + 16, PyBytes_AS_STRING(constant), (size_t)constant_num);
    *numbers = payload + 16 + constant_num;
    return record;
}

/* The checksum of a record that is filled in. */
static PyObject *finish_record(PyObject *record, PyObject *parts)
{
    const Py_ssize_t front_num = PyBytes_GET_SIZE(PyTuple_GET_ITEM(parts, 0));
    const uint32_t seed = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(parts, 1));
    char *out = PyBytes_AS_STRING(record) + front_num;
    const uint32_t checksum = crc32_of((unsigned char *)out + 4, PyBytes_GET_SIZE(record) - front_num - 4, seed);
    memcpy(out, &checksum, 4);
    return record;
}

/* FramePlan.encode_column of the step's scalars */
static PyObject *encode_step(PyObject *plan, long long step, long long time_ns, PyObject *scalars)
{
    PyObject *value, *record, *parts = peek(plan, n__double);
    Py_ssize_t place = 0;
    char *numbers;
    while (PyDict_Next(scalars, &place, NULL, &value))
        if (!PyFloat_CheckExact(value))
            return NULL;
    if (!(record = begin_record(plan, parts, PyDict_GET_SIZE(scalars), 1, 8, step, time_ns, &numbers)))
        return NULL;
    for (place = 0; PyDict_Next(scalars, &place, NULL, &value); numbers += 8)
        memcpy(numbers, &((PyFloatObject *)value)->ob_fval, 8);
    return finish_record(record, parts);
}

/* frame_record(plan, step, time_ns, rows): FramePlan.encode, where single precision does. */
static PyObject *frame_record(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    Py_buffer buffer;
    char *numbers;
    if (check_count("frame_record", num_args, 4) < 0)
        return NULL;
    const long long step = PyLong_AsLongLong(args[1]), time_ns = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (PyObject_GetBuffer(args[3], &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    PyObject *record = NULL, *parts = peek(args[0], n__single);
    if (buffer.ndim == 2 && buffer.itemsize == 8 && buffer.format && strcmp(buffer.format, "d") == 0)
        record = begin_record(args[0], parts, buffer.shape[0], buffer.shape[1], 4, step, time_ns, &numbers);
    if (record && !to_singles(buffer.buf, buffer.shape[0], buffer.shape[1], numbers))
        Py_CLEAR(record);
    PyBuffer_Release(&buffer);
    if (!record && PyErr_Occurred())
        return NULL;
    return record ? finish_record(record, parts) : Py_NewRef(Py_None);
}
