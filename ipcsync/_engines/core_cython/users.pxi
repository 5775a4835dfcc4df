# What users hold: points and shared events, whose calls first try the shortcut.

from libc.string cimport strcmp, strdup

cdef extern from "Python.h":
    ctypedef struct PyMethodDef:
        const char *ml_name
        const char *ml_doc
    void *PyType_GetSlot(object kind, int slot)
    const int Py_tp_methods, Py_tp_new

ctypedef object (*NewFunction)(object kind, object arguments, PyObject *keywords)

cdef object NOTHING = ()

cdef inline void count(Core core, bint is_short):
    """Count a call; not `is_short`: one whose arguments Python looks at first."""
    if core is not None:
        core.session.shortcuts += is_short
        core.session.slow_calls += not is_short

cdef class AttachedBase:
    """What belongs to an attachment, whose engine it has for life."""

    cdef object attached
    cdef Core core

    @property
    def _engine(self):
        return self.attached.engine

    @property
    def _attached(self):
        return self.attached

    @_attached.setter
    def _attached(self, attached):
        engine = None if attached is None else attached.engine
        # Python takes the calls of one that has a trace, or whose use is over.
        self.core = <Core>engine if isinstance(engine, Core) and not (<Core>engine).is_traced else None
        self.attached = attached

@cython.embedsignature(False)
cdef class PointBase(AttachedBase):
    """PointBase(attached, generation)\n--\n\nWhat a point holds."""  # CPython reads the signature there

    cdef public int64_t _generation

    def __init__(self, attached, int64_t generation):
        self._attached = attached
        self._generation = generation

    def wait(self, stream=None, *, timeout=None, ahead=False):
        cdef Core core = self.core
        cdef uintptr_t address = 0 if core is None or timeout is not None or ahead is not False else address_of(stream)
        cdef bint is_short = address != 0 and try_wait(core, address, self._generation)
        count(core, is_short)
        if not is_short:
            self._slow_wait(stream, timeout=timeout, ahead=ahead)

    def query(self):
        cdef Core core = self.core
        if core is None:
            return self._slow_query()
        count(core, True)
        return ask(core, self._generation)

    def synchronize(self, timeout=None):
        cdef Core core = self.core
        count(core, core is not None)
        if core is None:
            self._slow_synchronize(timeout)
        else:
            core.await_complete(self._generation, timeout)

cdef class EventBase(AttachedBase):
    cdef public object _point_type
    cdef public bint _is_recorder, _is_open

    def record(self, stream=None, *, timeout=None, after=NOTHING):
        cdef PointBase point
        cdef int64_t generation = 0
        if self._is_open and self._is_recorder and timeout is None and after is NOTHING and self.core is not None:
            address = address_of(stream)
            if address != 0 and self.core.is_recorder:
                check_use(self.core)
                generation = record_on(self.core, <Handle>address, False, FOREVER, None, None)
            count(self.core, generation > 0)
            if generation > 0:
                point = (<NewFunction>PyType_GetSlot(self._point_type, Py_tp_new))(self._point_type, NOTHING, NULL)
                point.attached = self.attached
                point.core = self.core
                point._generation = generation
                return point
        return self._slow_record(stream, timeout=timeout, after=after)

cdef object described(kind, function):
    cdef PyMethodDef *method = <PyMethodDef *>PyType_GetSlot(kind, Py_tp_methods)
    cdef bytes name = function.__name__.encode()
    # In the form that CPython reads there, which has no annotations.
    names = Signature.from_callable(function).parameters.values()
    signature = Signature([each.replace(annotation=Parameter.empty) for each in names])
    cdef bytes text = f"{function.__name__}(${str(signature)[1:]}\n--\n\n{function.__doc__ or ''}".encode()
    while strcmp(method.ml_name, name):
        method += 1
    method.ml_doc = strdup(text)  # for as long as the type lives, which is always
    return kind.__dict__[function.__name__]

def shortened(names):
    """A class decorator: the core's methods replace the methods `names`, which they call as `_slow_…` if need be. Each
    has the method's docstring, and its signature without the annotations, which CPython has for no builtin."""
    def shorten(cls):
        for name in names.split():
            slow = cls.__dict__[name]
            setattr(cls, f"_slow_{name}", slow)
            setattr(cls, name, described(cls.__base__, slow))
        return cls
    return shorten
