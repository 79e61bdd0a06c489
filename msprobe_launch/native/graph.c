/* What a call is to autograd, in its common cases: the edges of plain tensors among its arguments, and a call whose one
 * node consumes all its inputs.
 *
 * Both have their general form in adapters/torch/edges.py, which decides whatever is left to it here. The names of the
 * attributes are PyTorch's; nothing else of it is known.
 *
 * Built against the stable interface of CPython 3.10: one library for all later versions.
 */
#define Py_LIMITED_API 0x030a0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* AccumulateGrad nodes carry the largest sequence number there is. */
#define LEAF_SEQUENCE (1LL << 62)

static PyObject *n_requires_grad, *n_grad_fn, *n_output_nr, *n_next_functions, *n_sequence_nr, *n_variable, *zero;

/* -- edges of arguments */

typedef struct {
    PyObject_HEAD
    PyObject *tensors; /* types of plain tensors */
    PyObject *others;  /* types that hold no tensors */
    PyObject *general; /* (values, edges): of any values */
} Edges;

/* (node, output number) of a plain tensor, (tensor, 0) of a leaf, None where it has no gradient: a new reference. */
static PyObject *edge_of(PyObject *tensor) {
    PyObject *wanted = PyObject_GetAttr(tensor, n_requires_grad);
    if (wanted == NULL)
        return NULL;
    int truth = PyObject_IsTrue(wanted);
    Py_DECREF(wanted);
    if (truth < 0)
        return NULL;
    if (!truth)
        Py_RETURN_NONE;
    PyObject *edge = NULL, *node = PyObject_GetAttr(tensor, n_grad_fn);
    if (node == Py_None) {
        edge = PyTuple_Pack(2, tensor, zero);
    } else if (node != NULL) {
        PyObject *number = PyObject_GetAttr(tensor, n_output_nr);
        if (number != NULL)
            edge = PyTuple_Pack(2, node, number);
        Py_XDECREF(number);
    }
    Py_XDECREF(node);
    return edge;
}

static int add_edge(Edges *self, PyObject *value, PyObject *edges) {
    PyObject *kind = (PyObject *)Py_TYPE(value);
    int found = PySet_Contains(self->tensors, kind);
    if (found > 0) {
        PyObject *edge = edge_of(value);
        found = edge == NULL ? -1 : PyList_Append(edges, edge);
        Py_XDECREF(edge);
        return found;
    }
    if (found == 0)
        found = PySet_Contains(self->others, kind);
    if (found)
        return found < 0 ? -1 : 0;
    PyObject *values = PyTuple_Pack(1, value), *done = NULL;
    if (values != NULL)
        done = PyObject_CallFunctionObjArgs(self->general, values, edges, NULL);
    Py_XDECREF(values);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *Edges_call(PyObject *object, PyObject *args, PyObject *keywords) {
    (void)keywords;
    PyObject *values, *edges;
    if (!PyArg_ParseTuple(args, "OO!", &values, &PyList_Type, &edges))
        return NULL;
    PyObject *iterator = PyObject_GetIter(values), *value;
    if (iterator == NULL)
        return NULL;
    int failed = 0;
    while (!failed && (value = PyIter_Next(iterator)) != NULL) {
        failed = add_edge((Edges *)object, value, edges);
        Py_DECREF(value);
    }
    Py_DECREF(iterator);
    if (failed || PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Edges_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"tensors", "others", "general", NULL};
    PyObject *tensors, *others, *general;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO", names, &tensors, &others, &general))
        return NULL;
    if (!PyAnySet_Check(tensors) || !PyAnySet_Check(others)) {
        PyErr_SetString(PyExc_TypeError, "tensors and others are sets of types");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Edges *self = (Edges *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(tensors);
    Py_INCREF(others);
    Py_INCREF(general);
    self->tensors = tensors;
    self->others = others;
    self->general = general;
    return (PyObject *)self;
}

static int Edges_traverse(PyObject *object, visitproc visit, void *arg) {
    Edges *self = (Edges *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->tensors);
    Py_VISIT(self->others);
    Py_VISIT(self->general);
    return 0;
}

static int Edges_clear(PyObject *object) {
    Edges *self = (Edges *)object;
    Py_CLEAR(self->tensors);
    Py_CLEAR(self->others);
    Py_CLEAR(self->general);
    return 0;
}

static void Edges_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Edges_clear(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyType_Slot edges_slots[] = {
    {Py_tp_doc, "Edges(tensors, others, general): edges(values, list) adds an edge or None for each tensor"},
    {Py_tp_new, Edges_new},
    {Py_tp_call, Edges_call},
    {Py_tp_traverse, Edges_traverse},
    {Py_tp_clear, Edges_clear},
    {Py_tp_dealloc, Edges_dealloc},
    {0, NULL},
};

static PyType_Spec edges_spec = {
    .name = "msprobe_launch.native._graph.Edges",
    .basicsize = sizeof(Edges),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = edges_slots,
};

/* -- calls of one node */

/* Which of the edges is (source, number), the first; -1 for none, -2 with an exception set. */
static Py_ssize_t place_of(PyObject *edges, PyObject *source, long long number) {
    Py_ssize_t count = PyList_Size(edges);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *edge = PyList_GetItem(edges, i);
        if (edge == Py_None || PyTuple_GetItem(edge, 0) != source)
            continue;
        long long own = PyLong_AsLongLong(PyTuple_GetItem(edge, 1));
        if (own == -1 && PyErr_Occurred())
            return -2;
        if (own == number)
            return i;
    }
    return -1;
}

/* The place among the edges of what a node hands a gradient on to. -1: to none of them. -2 with an exception set: it
 * failed; -2 without: a node that the call has made, further on which an input may be. */
static Py_ssize_t place_behind(PyObject *edges, PyObject *following, PyObject *number, long long first) {
    long long output = PyLong_AsLongLong(number);
    if (output == -1 && PyErr_Occurred())
        return -2;
    Py_ssize_t place = place_of(edges, following, output);
    if (place != -1)
        return place;
    PyObject *order = PyObject_CallMethodObjArgs(following, n_sequence_nr, NULL);
    if (order == NULL)
        return -2;
    int overflow = 0;
    long long made = PyLong_AsLongLongAndOverflow(order, &overflow);
    Py_DECREF(order);
    if (!overflow && made >= 0 && made < first)
        return -1;
    if (!overflow && made >= 0 && made <= LEAF_SEQUENCE)
        return -2;
    PyObject *leaf = PyObject_GetAttr(following, n_variable);
    if (leaf == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -2;
        PyErr_Clear();
        return -1;
    }
    place = place_of(edges, leaf, 0);
    Py_DECREF(leaf);
    return place;
}

/* [(gradient slot, input)] of a node; NULL without an exception where the general form has to look. */
static PyObject *hits_of(PyObject *following, PyObject *edges, long long first) {
    Py_ssize_t count = PyTuple_Size(following);
    PyObject *hits = PyList_New(0);
    unsigned long long taken = 0;
    for (Py_ssize_t slot = 0; hits != NULL && slot < count; slot++) {
        PyObject *pair = PyTuple_GetItem(following, slot), *next = pair == NULL ? NULL : PyTuple_GetItem(pair, 0);
        if (next == Py_None)
            continue;
        Py_ssize_t place = next == NULL ? -2 : place_behind(edges, next, PyTuple_GetItem(pair, 1), first);
        if (place == -1)
            continue;
        /* An input that goes in twice gets a sum of two gradients. */
        int odd = place < 0 || place > 63 || (taken >> place & 1);
        PyObject *hit = odd ? NULL : Py_BuildValue("(nn)", slot, place);
        if (hit == NULL || PyList_Append(hits, hit) < 0)
            Py_CLEAR(hits);
        else
            taken |= 1ULL << place;
        Py_XDECREF(hit);
    }
    if (hits != NULL && !taken)
        Py_CLEAR(hits);
    return hits;
}

PyDoc_STRVAR(whole_doc,
             "whole(result, edges, sequence) -> (node, output number, [(gradient slot, input)]) of a tensor whose node "
             "consumes all inputs of its call, each once; None where that is not sure.");

static PyObject *whole(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *result, *edges, *answer = NULL;
    long long first;
    if (!PyArg_ParseTuple(args, "OO!L", &result, &PyList_Type, &edges, &first))
        return NULL;
    PyObject *node = PyObject_GetAttr(result, n_grad_fn);
    if (node == NULL)
        return NULL;
    if (node == Py_None)
        return node;
    PyObject *number = PyObject_GetAttr(result, n_output_nr), *following = NULL, *hits = NULL;
    if (number == NULL)
        goto done;
    long long output = PyLong_AsLongLong(number);
    /* An output that is an input handed through has the graph of whatever made that input. */
    if (PyErr_Occurred() || place_of(edges, node, output) != -1)
        goto done;
    following = PyObject_GetAttr(node, n_next_functions);
    if (following != NULL && PyTuple_Check(following) && (hits = hits_of(following, edges, first)) != NULL)
        answer = PyTuple_Pack(3, node, number, hits);
done:
    Py_DECREF(node);
    Py_XDECREF(number);
    Py_XDECREF(following);
    Py_XDECREF(hits);
    if (answer == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return answer;
}

static PyMethodDef methods[] = {
    {"whole", whole, METH_VARARGS, whole_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_graph", "Edges of calls (msprobe_launch.native).", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__graph(void) {
    struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&n_requires_grad, "requires_grad"},   {&n_grad_fn, "grad_fn"},         {&n_output_nr, "output_nr"},
        {&n_next_functions, "next_functions"}, {&n_sequence_nr, "_sequence_nr"}, {&n_variable, "variable"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL)
            return NULL;
    if ((zero = PyLong_FromLong(0)) == NULL)
        return NULL;
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&edges_spec);
    if (made == NULL || type == NULL || PyModule_AddObject(made, "Edges", type) < 0) {
        Py_XDECREF(made);
        Py_XDECREF(type);
        return NULL;
    }
    return made;
}
