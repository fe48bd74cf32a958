/* Encodes a frame of statistics as the record that sonde.runlog.record_format.FramePlan.encode makes. For little-endian machines only: see
 * sonde/statistics/native_extension.py. */

static PyObject *name_shape_of_plan, *name_single; /* attributes of FramePlan: _shape, _single */

/* ---- CRC-32, as zlib computes it ---- */

static uint32_t crc_tables[8][256]; /* [number of bytes that follow][value of the byte] */
static uint32_t crc_of_half_byte[16] __attribute__((aligned(64)));

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
        crc_of_half_byte[i] = crc_tables[0][i * 16];
    for (int ahead = 1; ahead < 8; ahead++)
        for (int i = 0; i < 256; i++)
            crc_tables[ahead][i] = crc_tables[ahead - 1][i] >> 8 ^ crc_tables[0][crc_tables[ahead - 1][i] & 255];
}

/* Long data is processed eight bytes at a time. For short data, loading those tables (8 KiB) into the cache takes longer than the checksum
 * itself: half a byte at a time needs a table of one cache line. */
static uint32_t crc32_of(const unsigned char *data, Py_ssize_t num, uint32_t seed)
{
    uint32_t value = ~seed, low, high;
    if (num < SHORT_RECORD) {
        for (; num > 0; num--) {
            value ^= *data++;
            value = value >> 4 ^ crc_of_half_byte[value & 15];
            value = value >> 4 ^ crc_of_half_byte[value & 15];
        }
        return ~value;
    }
    for (; num >= 8; num -= 8, data += 8) {
        memcpy(&low, data, 4);
        memcpy(&high, data + 4, 4);
        low ^= value;
        value = crc_tables[7][low & 255] ^ crc_tables[6][low >> 8 & 255] ^ crc_tables[5][low >> 16 & 255] ^ crc_tables[4][low >> 24] ^
                crc_tables[3][high & 255] ^ crc_tables[2][high >> 8 & 255] ^ crc_tables[1][high >> 16 & 255] ^ crc_tables[0][high >> 24];
    }
    while (num--)
        value = crc_tables[0][(value ^ *data++) & 255] ^ value >> 8;
    return ~value;
}

/* ---- the record ---- */

/* Converts rows of double to columns of float, at any address. Returns 0 where a finite number would become infinite or a non-zero one zero. */
static int to_singles(const double *rows, int64_t num_rows, int64_t num_columns, char *out)
{
    for (int64_t column = 0; column < num_columns; column++)
        for (int64_t row = 0; row < num_rows; row++) {
            double value = rows[row * num_columns + column];
            float single = (float)value;
            if ((isinf(single) && !isinf(value)) || (single == 0 && value != 0))
                return 0;
            memcpy(out, &single, 4);
            out += 4;
        }
    return 1;
}

/* Encodes rows by the constant parts of a plan: the bytes before the checksum, the checksum of these, and the payload between time and values.
 * NULL without an exception: only Python can encode this frame. */
static PyObject *encode_singles(PyObject *shape, PyObject *parts, long long step, long long time_ns, const Py_buffer *rows)
{
    if (!PyTuple_CheckExact(parts) || PyTuple_GET_SIZE(parts) != 3 || !PyTuple_CheckExact(shape) || PyTuple_GET_SIZE(shape) != 2 ||
        PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, 0)) != rows->shape[0] || PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, 1)) != rows->shape[1])
        return NULL;
    PyObject *front = PyTuple_GET_ITEM(parts, 0), *constant = PyTuple_GET_ITEM(parts, 2);
    if (!PyBytes_CheckExact(front) || !PyBytes_CheckExact(constant))
        return NULL;
    const uint32_t seed = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(parts, 1));
    const Py_ssize_t front_num = PyBytes_GET_SIZE(front), constant_num = PyBytes_GET_SIZE(constant);
    const Py_ssize_t payload_num = 16 + constant_num + 4 * rows->shape[0] * rows->shape[1];
    PyObject *record = PyErr_Occurred() ? NULL : PyBytes_FromStringAndSize(NULL, front_num + 4 + payload_num);
    if (!record)
        return NULL;
    char *out = PyBytes_AS_STRING(record), *payload = out + front_num + 4;
    memcpy(out, PyBytes_AS_STRING(front), (size_t)front_num);
    memcpy(payload, &step, 8);
    memcpy(payload + 8, &time_ns, 8);
    memcpy(payload + 16, PyBytes_AS_STRING(constant), (size_t)constant_num);
    if (!to_singles(rows->buf, rows->shape[0], rows->shape[1], payload + 16 + constant_num)) {
        Py_DECREF(record);
        return NULL;
    }
    const uint32_t checksum = crc32_of((const unsigned char *)payload, payload_num, seed);
    memcpy(out + front_num, &checksum, 4);
    return record;
}

/* encode_frame(plan, step, time_ns, rows): the bytes of FramePlan.encode in single precision, or None where only Python can encode the frame. */
static PyObject *encode_frame(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    Py_buffer rows;
    if (check_count("encode_frame", num_args, 4) < 0)
        return NULL;
    const long long step = PyLong_AsLongLong(args[1]), time_ns = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (PyObject_GetBuffer(args[3], &rows, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    PyObject *shape = PyObject_GetAttr(args[0], name_shape_of_plan), *parts = shape ? PyObject_GetAttr(args[0], name_single) : NULL, *record = NULL;
    if (parts && rows.ndim == 2 && rows.itemsize == 8 && rows.format && strcmp(rows.format, "d") == 0)
        record = encode_singles(shape, parts, step, time_ns, &rows);
    PyBuffer_Release(&rows);
    Py_XDECREF(shape);
    Py_XDECREF(parts);
    if (!record && !PyErr_Occurred())
        Py_RETURN_NONE;
    return record;
}
