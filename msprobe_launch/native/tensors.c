/* The common case of describing a tensor, as one call: seen before and unchanged, or small, on the host and plain.
 *
 * What `TorchValues.general` does for any tensor takes it 7 us of interpreted code for such a one, and this 2 us; there
 * are some hundreds in a recorded step. Whatever is not plain is handed to `general`, so nothing is decided here that
 * is not decided there. Framework-neutral but for the names of the attributes that are asked for.
 *
 * Built against the stable interface of CPython 3.10: one library for all later versions.
 */
#define Py_LIMITED_API 0x030a0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

void statistics_float32(const float *, size_t, size_t, size_t, double *);
void statistics_float64(const double *, size_t, size_t, size_t, double *);
void statistics_bfloat16(const uint16_t *, size_t, size_t, size_t, double *);

enum { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2 };

/* Addresses below may be those of tensors that hold no memory (see `held` in adapters/torch/values.py). */
#define LOWEST ((unsigned long long)1 << 40)

typedef struct {
    PyObject_HEAD
    PyObject *cache;   /* {id: (weak reference, version, address, value)} */
    PyObject *heads;   /* {(dtype, shape): JSON text of type, dtype and shape} */
    PyObject *kinds;   /* {dtype: FLOAT32 ...} */
    PyObject *rows;    /* {(strides, shape): (rows, elements between them, elements per row) or None} */
    PyObject *fresh;   /* [value]: those measured since the list was last emptied */
    PyObject *make;    /* (head, statistics, requires_grad) -> value */
    PyObject *ref;     /* weakref.ref */
    PyObject *general; /* (tensor) -> value, of any tensor; it fills `heads` */
    Py_ssize_t below;  /* elements from which a tensor is left to `general` */
    Py_ssize_t limit;  /* entries of `cache` */
} Table;

static PyObject *n_version, *n_data_ptr, *n_dtype, *n_is_cpu, *n_numel, *n_is_nested, *n_is_neg, *n_is_contiguous,
    *n_requires_grad, *n_shape, *n_stride;

/* 1, 0, or -1 with an exception set. `what` is taken over. */
static int truth(PyObject *what) {
    if (what == NULL)
        return -1;
    int answer = PyObject_IsTrue(what);
    Py_DECREF(what);
    return answer;
}

/* How a tensor that is not contiguous lies in memory: 1 where it is known and can be read in place. */
static int placed(Table *self, PyObject *tensor, PyObject *shape, size_t layout[3]) {
    int found = 0;
    PyObject *stride = PyObject_CallMethodObjArgs(tensor, n_stride, NULL);
    PyObject *key = stride == NULL ? NULL : PyTuple_Pack(2, stride, shape);
    PyObject *rows = key == NULL ? NULL : PyDict_GetItemWithError(self->rows, key);
    if (rows != NULL && rows != Py_None) {
        for (int i = 0; i < 3; i++)
            layout[i] = PyLong_AsSize_t(PyTuple_GetItem(rows, i));
        found = 1;
    }
    Py_XDECREF(stride);
    Py_XDECREF(key);
    return found;
}

/* The statistics of a plain tensor; NULL without an exception where it is not plain. */
static PyObject *measured(Table *self, PyObject *tensor, PyObject *dtype, PyObject *shape,
                          unsigned long long address) {
    PyObject *kind = PyDict_GetItemWithError(self->kinds, dtype);
    if (kind == NULL || address < LOWEST)
        return NULL;
    if (truth(PyObject_GetAttr(tensor, n_is_cpu)) != 1 || truth(PyObject_GetAttr(tensor, n_is_nested)) != 0 ||
        truth(PyObject_CallMethodObjArgs(tensor, n_is_neg, NULL)) != 0)
        return NULL;
    PyObject *number = PyObject_CallMethodObjArgs(tensor, n_numel, NULL);
    if (number == NULL)
        return NULL;
    Py_ssize_t count = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    if (count <= 0 || count >= self->below)
        return NULL;
    size_t layout[3] = {1, 0, (size_t)count};
    int contiguous = truth(PyObject_CallMethodObjArgs(tensor, n_is_contiguous, NULL));
    if (contiguous < 0 || (!contiguous && !placed(self, tensor, shape, layout)))
        return NULL;
    double out[4];
    const void *data = (const void *)(uintptr_t)address;
    switch (PyLong_AsLong(kind)) {
    case FLOAT32:
        statistics_float32(data, layout[0], layout[1], layout[2], out);
        break;
    case FLOAT64:
        statistics_float64(data, layout[0], layout[1], layout[2], out);
        break;
    case BFLOAT16:
        statistics_bfloat16(data, layout[0], layout[1], layout[2], out);
        break;
    default:
        return NULL;
    }
    return Py_BuildValue("(dddd)", out[0], out[1], out[2] / (double)count, sqrt(out[3]));
}

static PyObject *described(Table *self, PyObject *tensor, unsigned long long address) {
    PyObject *value = NULL, *key = NULL, *statistics = NULL, *gradient = NULL;
    PyObject *dtype = PyObject_GetAttr(tensor, n_dtype);
    PyObject *shape = dtype == NULL ? NULL : PyObject_GetAttr(tensor, n_shape);
    if (shape == NULL || (key = PyTuple_Pack(2, dtype, shape)) == NULL)
        goto done;
    PyObject *head = PyDict_GetItemWithError(self->heads, key);
    if (head == NULL || (statistics = measured(self, tensor, dtype, shape, address)) == NULL ||
        (gradient = PyObject_GetAttr(tensor, n_requires_grad)) == NULL)
        goto done;
    value = PyObject_CallFunctionObjArgs(self->make, head, statistics, gradient, NULL);
    if (value != NULL && PyList_Append(self->fresh, value) < 0)
        Py_CLEAR(value);
done:
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    Py_XDECREF(key);
    Py_XDECREF(statistics);
    Py_XDECREF(gradient);
    return value;
}

/* What is known of the tensor, where it is this very one and unchanged: a new reference, or NULL. */
static PyObject *known(Table *self, PyObject *tensor, PyObject *key, long long version, unsigned long long address) {
    PyObject *entry = PyDict_GetItemWithError(self->cache, key);
    if (entry == NULL || PyLong_AsLongLong(PyTuple_GetItem(entry, 1)) != version ||
        PyLong_AsUnsignedLongLong(PyTuple_GetItem(entry, 2)) != address)
        return NULL;
    Py_INCREF(entry); /* calling the reference could run anything */
    PyObject *owner = PyObject_CallObject(PyTuple_GetItem(entry, 0), NULL), *value = NULL;
    if (owner == tensor) {
        value = PyTuple_GetItem(entry, 3);
        Py_INCREF(value);
    }
    Py_XDECREF(owner);
    Py_DECREF(entry);
    return value;
}

static int remember(Table *self, PyObject *tensor, PyObject *key, PyObject *version, PyObject *address,
                    PyObject *value) {
    PyObject *ref = PyObject_CallFunctionObjArgs(self->ref, tensor, NULL);
    PyObject *entry = ref == NULL ? NULL : PyTuple_Pack(4, ref, version, address, value);
    int failed = entry == NULL;
    if (!failed && PyDict_Size(self->cache) >= self->limit)
        PyDict_Clear(self->cache);
    if (!failed)
        failed = PyDict_SetItem(self->cache, key, entry);
    Py_XDECREF(ref);
    Py_XDECREF(entry);
    return failed;
}

static PyObject *Table_call(PyObject *object, PyObject *args, PyObject *keywords) {
    (void)keywords;
    Table *self = (Table *)object;
    if (PyTuple_Size(args) != 1) {
        PyErr_SetString(PyExc_TypeError, "a table describes one tensor");
        return NULL;
    }
    PyObject *tensor = PyTuple_GetItem(args, 0), *value = NULL;
    PyObject *version = PyObject_GetAttr(tensor, n_version);
    PyObject *pointer = version == NULL ? NULL : PyObject_CallMethodObjArgs(tensor, n_data_ptr, NULL);
    PyObject *key = pointer == NULL ? NULL : PyLong_FromVoidPtr(tensor);
    if (key != NULL) {
        unsigned long long address = PyLong_AsUnsignedLongLong(pointer);
        value = known(self, tensor, key, PyLong_AsLongLong(version), address);
        if (value == NULL && !PyErr_Occurred() && (value = described(self, tensor, address)) != NULL &&
            remember(self, tensor, key, version, pointer, value) != 0)
            Py_CLEAR(value);
    }
    Py_XDECREF(version);
    Py_XDECREF(pointer);
    Py_XDECREF(key);
    if (value == NULL) {
        /* Not plain, or something raised on the way (no versions, no storage): `general` has an answer to all. */
        PyErr_Clear();
        value = PyObject_CallFunctionObjArgs(self->general, tensor, NULL);
    }
    return value;
}

static PyObject *Table_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"cache", "heads", "kinds", "rows", "fresh", "make", "ref", "general", "below", "limit", NULL};
    PyObject *cache, *heads, *kinds, *rows, *fresh, *make, *ref, *general;
    Py_ssize_t below, limit;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOOOOOOOnn", names, &cache, &heads, &kinds, &rows, &fresh, &make,
                                     &ref, &general, &below, &limit))
        return NULL;
    if (!PyDict_Check(cache) || !PyDict_Check(heads) || !PyDict_Check(kinds) || !PyDict_Check(rows) ||
        !PyList_Check(fresh)) {
        PyErr_SetString(PyExc_TypeError, "cache, heads, kinds and rows are dictionaries, fresh is a list");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Table *self = (Table *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    PyObject **fields[] = {&self->cache, &self->heads, &self->kinds, &self->rows, &self->fresh, &self->make, &self->ref,
                           &self->general};
    PyObject *values[] = {cache, heads, kinds, rows, fresh, make, ref, general};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        Py_INCREF(values[i]);
        *fields[i] = values[i];
    }
    self->below = below;
    self->limit = limit;
    return (PyObject *)self;
}

static int Table_traverse(PyObject *object, visitproc visit, void *arg) {
    Table *self = (Table *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->cache);
    Py_VISIT(self->heads);
    Py_VISIT(self->kinds);
    Py_VISIT(self->rows);
    Py_VISIT(self->fresh);
    Py_VISIT(self->make);
    Py_VISIT(self->ref);
    Py_VISIT(self->general);
    return 0;
}

static int Table_clear(PyObject *object) {
    Table *self = (Table *)object;
    Py_CLEAR(self->cache);
    Py_CLEAR(self->heads);
    Py_CLEAR(self->kinds);
    Py_CLEAR(self->rows);
    Py_CLEAR(self->fresh);
    Py_CLEAR(self->make);
    Py_CLEAR(self->ref);
    Py_CLEAR(self->general);
    return 0;
}

static void Table_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Table_clear(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyType_Slot table_slots[] = {
    {Py_tp_doc, "Table(cache, heads, kinds, rows, fresh, make, ref, general, below, limit): table(tensor) -> value"},
    {Py_tp_new, Table_new},
    {Py_tp_call, Table_call},
    {Py_tp_traverse, Table_traverse},
    {Py_tp_clear, Table_clear},
    {Py_tp_dealloc, Table_dealloc},
    {0, NULL},
};

static PyType_Spec table_spec = {
    .name = "msprobe_launch.native._tensors.Table",
    .basicsize = sizeof(Table),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = table_slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_tensors", "Describing plain tensors (msprobe_launch.native).", -1, NULL, NULL, NULL, NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__tensors(void) {
    struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&n_version, "_version"},     {&n_data_ptr, "data_ptr"},       {&n_dtype, "dtype"},
        {&n_is_cpu, "is_cpu"},        {&n_numel, "numel"},             {&n_is_nested, "is_nested"},
        {&n_is_neg, "is_neg"},        {&n_is_contiguous, "is_contiguous"}, {&n_requires_grad, "requires_grad"},
        {&n_shape, "shape"},          {&n_stride, "stride"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL)
            return NULL;
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&table_spec);
    if (made == NULL || type == NULL || PyModule_AddObject(made, "Table", type) < 0) {
        Py_XDECREF(made);
        Py_XDECREF(type);
        return NULL;
    }
    return made;
}
