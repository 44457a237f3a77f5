/* The loops of the codecs, each in one pass through memory; words.py and lowrank.py have the same in NumPy.
 *
 * All arguments are buffers of native words, checked for their sizes before the interpreter's lock is released. Words
 * are taken apart by shifts, so that planes are the same on machines of either byte order.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Words that are worked on at a time: they and their base stay in a core's first cache. */
#define BLOCK 2048

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

/* How words become the integers whose planes are compressed; words.How has the same numbers. */
enum { PLAIN, ROTATED, DIFFERENCE, ORDERED };

static const uint8_t zeros[BLOCK];

#define WORDS(T, WIDTH)                                                                                                \
    static inline T ordered_##WIDTH(T x)                                                                               \
    {                                                                                                                  \
        return (T)(x ^ ((T)(0 - (T)(x >> (8 * WIDTH - 1))) & (T)((T)~(T)0 >> 1)));                                     \
    }                                                                                                                  \
    static inline T zigzag_##WIDTH(T x, T base)                                                                        \
    {                                                                                                                  \
        T delta = (T)(x - base);                                                                                       \
        return (T)((T)(delta << 1) ^ (T)(0 - (T)(delta >> (8 * WIDTH - 1))));                                          \
    }                                                                                                                  \
    static inline T unzigzag_##WIDTH(T x, T base)                                                                      \
    {                                                                                                                  \
        return (T)((T)((T)(x >> 1) ^ (T)(0 - (T)(x & 1))) + base);                                                     \
    }                                                                                                                  \
                                                                                                                       \
    FOR_EACH_PROCESSOR static unsigned split_##WIDTH(                                                                  \
        const uint8_t *values, const uint8_t *base, int how, uint8_t *const *out, size_t numel)                        \
    {                                                                                                                  \
        T word[BLOCK], old[BLOCK], any = 0;                                                                            \
        unsigned mask = 0;                                                                                             \
        for (size_t begin = 0; begin < numel; begin += BLOCK) {                                                        \
            size_t count = numel - begin < BLOCK ? numel - begin : BLOCK;                                              \
            memcpy(word, values + begin * WIDTH, count * WIDTH);                                                       \
            if (how >= DIFFERENCE)                                                                                     \
                memcpy(old, base + begin * WIDTH, count * WIDTH);                                                      \
            if (how == ROTATED)                                                                                        \
                for (size_t i = 0; i < count; i++)                                                                     \
                    word[i] = (T)((T)(word[i] << 1) | (T)(word[i] >> (8 * WIDTH - 1)));                                \
            else if (how == DIFFERENCE)                                                                                \
                for (size_t i = 0; i < count; i++)                                                                     \
                    word[i] = zigzag_##WIDTH(word[i], old[i]);                                                         \
            else if (how == ORDERED)                                                                                   \
                for (size_t i = 0; i < count; i++)                                                                     \
                    word[i] = zigzag_##WIDTH(ordered_##WIDTH(word[i]), ordered_##WIDTH(old[i]));                       \
            for (size_t i = 0; i < count; i++)                                                                         \
                any |= word[i];                                                                                        \
            for (int plane = 0; plane < WIDTH; plane++) {                                                              \
                uint8_t *to = out[plane] + begin;                                                                      \
                for (size_t i = 0; i < count; i++)                                                                     \
                    to[i] = (uint8_t)(word[i] >> (8 * plane));                                                         \
            }                                                                                                          \
        }                                                                                                              \
        for (int plane = 0; plane < WIDTH; plane++)                                                                    \
            mask |= (unsigned)((uint8_t)(any >> (8 * plane)) != 0) << plane;                                           \
        return mask;                                                                                                   \
    }                                                                                                                  \
                                                                                                                       \
    FOR_EACH_PROCESSOR static void join_##WIDTH(                                                                       \
        const uint8_t *const *planes, const uint8_t *base, int how, uint8_t *out, size_t numel)                        \
    {                                                                                                                  \
        T word[BLOCK], old[BLOCK];                                                                                     \
        for (size_t begin = 0; begin < numel; begin += BLOCK) {                                                        \
            size_t count = numel - begin < BLOCK ? numel - begin : BLOCK;                                              \
            const uint8_t *from[WIDTH];                                                                                \
            for (int plane = 0; plane < WIDTH; plane++)                                                                \
                from[plane] = planes[plane] ? planes[plane] + begin : zeros;                                           \
            for (size_t i = 0; i < count; i++) {                                                                       \
                T x = 0;                                                                                               \
                for (int plane = 0; plane < WIDTH; plane++)                                                            \
                    x |= (T)((T)from[plane][i] << (8 * plane));                                                        \
                word[i] = x;                                                                                           \
            }                                                                                                          \
            if (how >= DIFFERENCE)                                                                                     \
                memcpy(old, base + begin * WIDTH, count * WIDTH);                                                      \
            if (how == ROTATED)                                                                                        \
                for (size_t i = 0; i < count; i++)                                                                     \
                    word[i] = (T)((T)(word[i] >> 1) | (T)(word[i] << (8 * WIDTH - 1)));                                \
            else if (how == DIFFERENCE)                                                                                \
                for (size_t i = 0; i < count; i++)                                                                     \
                    word[i] = unzigzag_##WIDTH(word[i], old[i]);                                                       \
            else if (how == ORDERED)                                                                                   \
                for (size_t i = 0; i < count; i++)                                                                     \
                    word[i] = ordered_##WIDTH(unzigzag_##WIDTH(word[i], ordered_##WIDTH(old[i])));                     \
            memcpy(out + begin * WIDTH, word, count * WIDTH);                                                          \
        }                                                                                                              \
    }

WORDS(uint8_t, 1)
WORDS(uint16_t, 2)
WORDS(uint32_t, 4)
WORDS(uint64_t, 8)

/* Where the elements of each exponent of a prediction begin, in the order of exponents. */
static void places(const uint8_t *prediction, size_t numel, size_t next[256])
{
    size_t counts[4][256] = {{0}}, begin = 0; /* four, since neighbours often have one exponent */
    for (size_t i = 0; i < numel; i++) {
        uint32_t x;
        memcpy(&x, prediction + 4 * i, 4);
        counts[i & 3][x >> 23 & 255]++;
    }
    for (int exponent = 0; exponent < 256; exponent++) {
        next[exponent] = begin;
        for (int part = 0; part < 4; part++)
            begin += counts[part][exponent];
    }
}

/* Which planes have other than zeros, or -1 where the prediction changed between the passes. */
static int split_sorted(const uint8_t *values, const uint8_t *prediction, uint8_t *const *out, size_t numel)
{
    size_t next[256];
    uint32_t any = 0;
    int mask = 0;
    places(prediction, numel, next);
    for (size_t i = 0; i < numel; i++) {
        uint32_t x, p;
        memcpy(&x, values + 4 * i, 4);
        memcpy(&p, prediction + 4 * i, 4);
        size_t at = next[p >> 23 & 255]++;
        if (at >= numel)
            return -1;
        x = zigzag_4(ordered_4(x), ordered_4(p));
        any |= x;
        for (int plane = 0; plane < 4; plane++)
            out[plane][at] = (uint8_t)(x >> (8 * plane));
    }
    for (int plane = 0; plane < 4; plane++)
        mask |= ((any >> (8 * plane) & 255) != 0) << plane;
    return mask;
}

/* The words take the place of the prediction. 0, or -1 where it changed between the passes. */
static int join_sorted(const uint8_t *const *planes, uint8_t *prediction, size_t numel)
{
    size_t next[256];
    places(prediction, numel, next);
    for (size_t i = 0; i < numel; i++) {
        uint32_t x = 0, p;
        memcpy(&p, prediction + 4 * i, 4);
        size_t at = next[p >> 23 & 255]++;
        if (at >= numel)
            return -1;
        for (int plane = 0; plane < 4; plane++)
            if (planes[plane])
                x |= (uint32_t)planes[plane][at] << (8 * plane);
        x = ordered_4(unzigzag_4(x, ordered_4(p)));
        memcpy(prediction + 4 * i, &x, 4);
    }
    return 0;
}

/* A float's value; 0 for denormals, infinities and NaNs, whose bits are looked at, since the processor may be set to
 * flush denormals. */
static inline double wide(uint32_t bits)
{
    uint32_t exponent = bits & 0x7F800000u;
    float value;
    bits = exponent == 0 || exponent == 0x7F800000u ? 0 : bits;
    memcpy(&value, &bits, 4);
    return value;
}

FOR_EACH_PROCESSOR static void predict(const double *product, const double *scales, const uint8_t *base, double factor,
                                       size_t lead, size_t columns, uint8_t *out, size_t numel)
{
    for (size_t begin = 0; begin < numel;) {
        size_t row = (lead + begin) / columns, end = (row + 1) * columns - lead;
        double scale = scales[row];
        end = end < numel ? end : numel;
        for (size_t i = begin; i < end; i++) {
            uint32_t x;
            memcpy(&x, base + 4 * i, 4);
            double value = factor * wide(x) + product[lead + i] * scale, size = fabs(value);
            float rounded = (float)(size >= 0x1p-126 && size < 0x1p127 ? value : 0.0);
            memcpy(out + 4 * i, &rounded, 4);
        }
        begin = end;
    }
}

FOR_EACH_PROCESSOR static void change(const uint8_t *values, const uint8_t *base, double factor, double *out,
                                      size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        uint32_t x, y;
        memcpy(&x, values + 4 * i, 4);
        memcpy(&y, base + 4 * i, 4);
        double now = wide(x), old = wide(y), delta = now - factor * old;
        out[i] = now != 0.0 && old != 0.0 ? delta : 0.0;
    }
}

/* ------------------------------------------------------------------------------------------ what Python calls */

static int is_size(const Py_buffer *buffer, Py_ssize_t expected, const char *what)
{
    if (buffer->len == expected)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes where %zd belong", what, buffer->len, expected);
    return 0;
}

static int is_way(int how, int width, const Py_buffer *base)
{
    if (width != 1 && width != 2 && width != 4 && width != 8)
        PyErr_Format(PyExc_ValueError, "words of %d bytes", width);
    else if (how < PLAIN || how > ORDERED || (how >= DIFFERENCE) != (base->obj != NULL))
        PyErr_Format(PyExc_ValueError, "how is %d, %s base", how, base->obj ? "with a" : "without");
    else
        return 1;
    return 0;
}

/* The planes of a tuple, None for one of zeros; how many were taken hold of, or -1 with an error set. */
static int planes_of(PyObject *tuple, int width, size_t numel, int flags, Py_buffer held[8], uint8_t *planes[8])
{
    int count = 0;
    if (PyTuple_GET_SIZE(tuple) != width) {
        PyErr_Format(PyExc_ValueError, "%zd planes of words of %d bytes", PyTuple_GET_SIZE(tuple), width);
        return -1;
    }
    for (int plane = 0; plane < width; plane++) {
        PyObject *each = PyTuple_GET_ITEM(tuple, plane);
        planes[plane] = NULL;
        if (each == Py_None && flags == PyBUF_SIMPLE)
            continue;
        if (PyObject_GetBuffer(each, &held[count], flags) == 0) {
            planes[plane] = held[count].buf;
            if (is_size(&held[count++], (Py_ssize_t)numel, "a plane"))
                continue;
        }
        while (count)
            PyBuffer_Release(&held[--count]);
        return -1;
    }
    return count;
}

static PyObject *changed(void)
{
    PyErr_SetString(PyExc_ValueError, "the prediction was changed meanwhile");
    return NULL;
}

PyDoc_STRVAR(split_doc, "split(values, base, how, width, planes) -> which planes have other than zeros, a bit each");

static PyObject *py_split(PyObject *self, PyObject *args)
{
    Py_buffer values, base, held[8];
    uint8_t *planes[8];
    int how, width, count = -1;
    unsigned mask = 0;
    PyObject *tuple;
    if (!PyArg_ParseTuple(args, "y*z*iiO!", &values, &base, &how, &width, &PyTuple_Type, &tuple))
        return NULL;
    if (is_way(how, width, &base) && is_size(&values, values.len / width * width, "values") &&
        (base.obj == NULL || is_size(&base, values.len, "base")))
        count = planes_of(tuple, width, (size_t)(values.len / width), PyBUF_WRITABLE, held, planes);
    if (count >= 0) {
        size_t numel = (size_t)(values.len / width);
        Py_BEGIN_ALLOW_THREADS
        switch (width) {
        case 1: mask = split_1(values.buf, base.buf, how, planes, numel); break;
        case 2: mask = split_2(values.buf, base.buf, how, planes, numel); break;
        case 4: mask = split_4(values.buf, base.buf, how, planes, numel); break;
        default: mask = split_8(values.buf, base.buf, how, planes, numel);
        }
        Py_END_ALLOW_THREADS
        while (count)
            PyBuffer_Release(&held[--count]);
        count = 0;
    }
    PyBuffer_Release(&values);
    if (base.obj)
        PyBuffer_Release(&base);
    return count < 0 ? NULL : PyLong_FromUnsignedLong(mask);
}

PyDoc_STRVAR(join_doc, "join(planes, base, how, width, out): the inverse of split; None is a plane of zeros");

static PyObject *py_join(PyObject *self, PyObject *args)
{
    Py_buffer base, out, held[8];
    uint8_t *planes[8];
    int how, width, count = -1;
    PyObject *tuple;
    if (!PyArg_ParseTuple(args, "O!z*iiw*", &PyTuple_Type, &tuple, &base, &how, &width, &out))
        return NULL;
    if (is_way(how, width, &base) && is_size(&out, out.len / width * width, "out") &&
        (base.obj == NULL || is_size(&base, out.len, "base")))
        count = planes_of(tuple, width, (size_t)(out.len / width), PyBUF_SIMPLE, held, planes);
    if (count >= 0) {
        size_t numel = (size_t)(out.len / width);
        const uint8_t *const *from = (const uint8_t *const *)planes;
        Py_BEGIN_ALLOW_THREADS
        switch (width) {
        case 1: join_1(from, base.buf, how, out.buf, numel); break;
        case 2: join_2(from, base.buf, how, out.buf, numel); break;
        case 4: join_4(from, base.buf, how, out.buf, numel); break;
        default: join_8(from, base.buf, how, out.buf, numel);
        }
        Py_END_ALLOW_THREADS
        while (count)
            PyBuffer_Release(&held[--count]);
        count = 0;
    }
    PyBuffer_Release(&out);
    if (base.obj)
        PyBuffer_Release(&base);
    if (count < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(split_sorted_doc, "split_sorted(values, prediction, planes) -> as split, in the order of exponents");

static PyObject *py_split_sorted(PyObject *self, PyObject *args)
{
    Py_buffer values, prediction, held[8];
    uint8_t *planes[8];
    int count = -1, mask = 0;
    PyObject *tuple;
    if (!PyArg_ParseTuple(args, "y*y*O!", &values, &prediction, &PyTuple_Type, &tuple))
        return NULL;
    if (is_size(&values, values.len / 4 * 4, "values") && is_size(&prediction, values.len, "prediction"))
        count = planes_of(tuple, 4, (size_t)(values.len / 4), PyBUF_WRITABLE, held, planes);
    if (count >= 0) {
        Py_BEGIN_ALLOW_THREADS
        mask = split_sorted(values.buf, prediction.buf, planes, (size_t)(values.len / 4));
        Py_END_ALLOW_THREADS
        while (count)
            PyBuffer_Release(&held[--count]);
        count = 0;
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&prediction);
    if (count < 0)
        return NULL;
    return mask < 0 ? changed() : PyLong_FromLong(mask);
}

PyDoc_STRVAR(join_sorted_doc, "join_sorted(planes, prediction): the inverse of split_sorted, put where the prediction is");

static PyObject *py_join_sorted(PyObject *self, PyObject *args)
{
    Py_buffer prediction, held[8];
    uint8_t *planes[8];
    int count = -1, failed = 0;
    PyObject *tuple;
    if (!PyArg_ParseTuple(args, "O!w*", &PyTuple_Type, &tuple, &prediction))
        return NULL;
    if (is_size(&prediction, prediction.len / 4 * 4, "prediction"))
        count = planes_of(tuple, 4, (size_t)(prediction.len / 4), PyBUF_SIMPLE, held, planes);
    if (count >= 0) {
        Py_BEGIN_ALLOW_THREADS
        failed = join_sorted((const uint8_t *const *)planes, prediction.buf, (size_t)(prediction.len / 4));
        Py_END_ALLOW_THREADS
        while (count)
            PyBuffer_Release(&held[--count]);
        count = 0;
    }
    PyBuffer_Release(&prediction);
    if (count < 0)
        return NULL;
    if (failed)
        return changed();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(predict_doc, "predict(product, scales, base, factor, lead, columns, out)");

static PyObject *py_predict(PyObject *self, PyObject *args)
{
    Py_buffer product, scales, base, out;
    double factor;
    Py_ssize_t lead, columns;
    int fits = 0;
    if (!PyArg_ParseTuple(args, "y*y*y*dnnw*", &product, &scales, &base, &factor, &lead, &columns, &out))
        return NULL;
    if (columns < 1 || lead < 0 || lead >= columns)
        PyErr_Format(PyExc_ValueError, "a range begins in column %zd of %zd", lead, columns);
    else
        fits = is_size(&base, base.len / 4 * 4, "base") && is_size(&out, base.len, "out") &&
               is_size(&scales, scales.len / 8 * 8, "scales");
    if (fits && (product.len / columns != scales.len || product.len % columns)) {
        PyErr_Format(PyExc_ValueError, "product has %zd bytes where %zd rows of %zd belong", product.len,
                     scales.len / 8, columns);
        fits = 0;
    }
    if (fits && base.len / 4 > product.len / 8 - lead) {
        PyErr_Format(PyExc_ValueError, "%zd elements from column %zd on are more than the product has",
                     base.len / 4, lead);
        fits = 0;
    }
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        predict(product.buf, scales.buf, base.buf, factor, (size_t)lead, (size_t)columns, out.buf,
                (size_t)(base.len / 4));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&product);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&base);
    PyBuffer_Release(&out);
    if (!fits)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(change_doc, "change(values, base, factor, out): values - factor * base in float64");

static PyObject *py_change(PyObject *self, PyObject *args)
{
    Py_buffer values, base, out;
    double factor;
    int fits;
    if (!PyArg_ParseTuple(args, "y*y*dw*", &values, &base, &factor, &out))
        return NULL;
    fits = is_size(&values, values.len / 4 * 4, "values") && is_size(&base, values.len, "base") &&
           is_size(&out, values.len * 2, "out");
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        change(values.buf, base.buf, factor, out.buf, (size_t)(values.len / 4));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&base);
    PyBuffer_Release(&out);
    if (!fits)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"split", py_split, METH_VARARGS, split_doc},
    {"join", py_join, METH_VARARGS, join_doc},
    {"split_sorted", py_split_sorted, METH_VARARGS, split_sorted_doc},
    {"join_sorted", py_join_sorted, METH_VARARGS, join_sorted_doc},
    {"predict", py_predict, METH_VARARGS, predict_doc},
    {"change", py_change, METH_VARARGS, change_doc},
    {NULL, NULL, 0, NULL},
};

/* What words.py compares, so that what an older source was compiled to is not used. */
static int execute(PyObject *module)
{
    return PyModule_AddIntConstant(module, "VERSION", 3);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "ds_galore.checkpoint.codecs._compiled", "The loops of the codecs.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__compiled(void)
{
    return PyModuleDef_Init(&module);
}
