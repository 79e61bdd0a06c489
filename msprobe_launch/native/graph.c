/* What a call is to autograd: the edges of its arguments, and the nodes that consume them.
 *
 * The same in Python stands in adapters/torch/edges.py, which also decides what is left to it here. The names of the
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

/* -- nodes of a call */

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

/* [(gradient slot, input)] of a node. Nodes of the call behind it that are not `seen` are put on `todo`; where that is
 * NULL there must be none: then the answer is NULL without an exception. */
static PyObject *hits_of(PyObject *node, PyObject *edges, long long first, PyObject *seen, PyObject *todo) {
    PyObject *following = PyObject_GetAttr(node, n_next_functions), *hits = NULL;
    if (following != NULL && PyTuple_Check(following))
        hits = PyList_New(0);
    Py_ssize_t count = hits == NULL ? 0 : PyTuple_Size(following);
    for (Py_ssize_t slot = 0; hits != NULL && slot < count; slot++) {
        PyObject *pair = PyTuple_GetItem(following, slot), *next = pair == NULL ? NULL : PyTuple_GetItem(pair, 0);
        if (next == Py_None)
            continue;
        Py_ssize_t place = next == NULL ? -2 : place_behind(edges, next, PyTuple_GetItem(pair, 1), first);
        int failed = 0;
        if (place >= 0) {
            PyObject *hit = Py_BuildValue("(nn)", slot, place);
            failed = hit == NULL || PyList_Append(hits, hit) < 0;
            Py_XDECREF(hit);
        } else if (place == -2) {
            int known = todo == NULL || PyErr_Occurred() ? -1 : PySet_Contains(seen, next);
            failed = known < 0 || (!known && (PySet_Add(seen, next) < 0 || PyList_Append(todo, next) < 0));
        }
        if (failed)
            Py_CLEAR(hits);
    }
    Py_XDECREF(following);
    return hits;
}

/* True where there are inputs and each goes in once; one that goes in twice gets a sum of two gradients. */
static int each_once(PyObject *hits) {
    unsigned long long taken = 0;
    Py_ssize_t count = PyList_Size(hits);
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GetItem(PyList_GetItem(hits, i), 1));
        if (place > 63 || (taken >> place & 1))
            return 0;
        taken |= 1ULL << place;
    }
    return count > 0;
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
    PyObject *number = PyObject_GetAttr(result, n_output_nr), *hits = NULL;
    if (number == NULL)
        goto done;
    long long output = PyLong_AsLongLong(number);
    /* An output that is an input handed through has the graph of whatever made that input. */
    if (PyErr_Occurred() || place_of(edges, node, output) != -1)
        goto done;
    hits = hits_of(node, edges, first, NULL, NULL);
    if (hits != NULL && each_once(hits))
        answer = PyTuple_Pack(3, node, number, hits);
done:
    Py_DECREF(node);
    Py_XDECREF(number);
    Py_XDECREF(hits);
    if (answer == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return answer;
}

PyDoc_STRVAR(consumers_doc,
             "consumers(nodes, edges, sequence) -> [(node, [(gradient slot, input)])]: the nodes of a call that consume "
             "one of its inputs. `nodes` is a dictionary by the nodes of its outputs.");

static PyObject *consumers(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *nodes, *edges;
    long long first;
    if (!PyArg_ParseTuple(args, "O!O!L", &PyDict_Type, &nodes, &PyList_Type, &edges, &first))
        return NULL;
    PyObject *todo = PyDict_Keys(nodes), *seen = PySet_New(nodes), *found = PyList_New(0);
    int failed = todo == NULL || seen == NULL || found == NULL;
    for (Py_ssize_t left; !failed && (left = PyList_Size(todo)) > 0;) {
        PyObject *node = PyList_GetItem(todo, left - 1), *hits = NULL;
        Py_INCREF(node);
        if (PyList_SetSlice(todo, left - 1, left, NULL) == 0)
            hits = hits_of(node, edges, first, seen, todo);
        failed = hits == NULL;
        if (!failed && PyList_Size(hits) > 0) {
            PyObject *entry = PyTuple_Pack(2, node, hits);
            failed = entry == NULL || PyList_Append(found, entry) < 0;
            Py_XDECREF(entry);
        }
        Py_XDECREF(hits);
        Py_DECREF(node);
    }
    Py_XDECREF(todo);
    Py_XDECREF(seen);
    if (failed) {
        Py_CLEAR(found);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "next_functions is no tuple");
    }
    return found;
}

static PyMethodDef methods[] = {
    {"whole", whole, METH_VARARGS, whole_doc},
    {"consumers", consumers, METH_VARARGS, consumers_doc},
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
