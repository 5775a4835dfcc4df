# What users hold: points and shared events, whose calls first try the shortcut.

cimport cython
from cpython.object cimport PyObject
from libc.string cimport strcmp, strdup

cdef extern from "Python.h":
    ctypedef struct PyMethodDef:
        const char *ml_name
        const char *ml_doc
    void *PyType_GetSlot(object kind, int slot)
    const int Py_tp_methods, Py_tp_new

ctypedef object (*NewFunction)(object kind, object arguments, PyObject *keywords)

cdef object NOTHING = ()


cdef inline Core core_of(attached):
    engine = None if attached is None else attached.engine
    return <Core>engine if isinstance(engine, Core) else None


cdef inline void left(Core core):
    """Count a call that is left to the Python engine."""
    if core is not None and core.session is not None:
        core.session.slow_calls += 1


cdef inline double seconds_of(timeout) except? -2:
    """Of a second at most: a larger int may be too large for a double."""
    try:
        return 1 if timeout is None else <double>timeout
    except OverflowError:
        return 1 if timeout > 0 else -1


@cython.embedsignature(False)
cdef class PointBase:
    """PointBase(attached, generation)\n--\n\nWhat a point holds."""  # CPython reads the signature there

    cdef object attached
    cdef Core core
    cdef public int64_t _generation

    def __init__(self, attached, int64_t generation):
        self._attached = attached
        self._generation = generation

    @property
    def _attached(self):
        return self.attached

    @_attached.setter
    def _attached(self, attached):
        self.core = core_of(attached)  # which one has for life
        self.attached = attached

    def wait(self, stream=None, *, timeout=None, ahead=False):
        cdef Core core = self.core
        # With a timeout only what is recorded: how long it may sleep is for the Python engine to count.
        if core is not None and ahead is False and (timeout is None or timeout >= 0) and core.try_wait(
            stream, self._generation, LONGEST_NS if timeout is None else 0
        ):
            return
        left(core)
        self._slow_wait(stream, timeout=timeout, ahead=ahead)

    def query(self):
        cdef Core core = self.core
        cdef int result = -1 if core is None else core.try_query(self._generation)
        if result >= 0:
            return result == 1
        left(core)
        return self._slow_query()

    def synchronize(self, timeout=None):
        cdef Core core = self.core
        cdef double seconds = seconds_of(timeout)
        cdef int64_t began = ipcsync_now()
        if core is None or not seconds >= 0:
            self._slow_synchronize(timeout)
        elif not core.try_synchronize(self._generation, min(<int64_t>LONGEST_NS, <int64_t>(min(seconds, 1) * 1e9))):
            left(core)
            core.synchronize(self._generation, timeout, began)


cdef class EventBase:
    cdef public object _attached, _point_type
    cdef object engine
    cdef Core core
    cdef public bint _is_recorder, _is_open

    @property
    def _engine(self):
        return self.engine

    @_engine.setter
    def _engine(self, engine):
        self.core = <Core>engine if isinstance(engine, Core) else None
        self.engine = engine

    def record(self, stream=None, *, timeout=None, after=NOTHING):
        cdef PointBase point
        cdef int64_t generation
        if self._is_open and self._is_recorder and timeout is None and after is NOTHING and self.core is not None:
            generation = self.core.try_record(stream)
            if generation > 0:
                point = (<NewFunction>PyType_GetSlot(self._point_type, Py_tp_new))(self._point_type, NOTHING, NULL)
                point.attached = self._attached
                point.core = self.core
                point._generation = generation
                return point
            left(self.core)
        return self._slow_record(stream, timeout=timeout, after=after)


cdef str signature_of(function):
    """In the form that CPython reads in the docstring of a builtin method. It has no annotations."""
    code = function.__code__
    count = code.co_argcount
    positional, by_keyword = code.co_varnames[1:count], code.co_varnames[count:count + code.co_kwonlyargcount]
    defaults = dict(zip(reversed(positional), reversed(function.__defaults__ or ())))
    defaults.update(function.__kwdefaults__ or {})
    parts = ["$self", *positional, *("*" for _ in by_keyword[:1]), *by_keyword]
    return ", ".join([f"{part}={defaults[part]!r}" if part in defaults else part for part in parts])


cdef object described(kind, function):
    """The method of `kind` that has this function's name; it gets its docstring and signature too."""
    cdef PyMethodDef *method = <PyMethodDef *>PyType_GetSlot(kind, Py_tp_methods)
    cdef bytes name = function.__name__.encode()
    cdef bytes text = f"{function.__name__}({signature_of(function)})\n--\n\n{function.__doc__ or ''}".encode()
    while strcmp(method.ml_name, name):
        method += 1
    method.ml_doc = strdup(text)  # for as long as the type lives, which is always
    return kind.__dict__[function.__name__]


def shortened(names):
    """A class decorator: shortcuts replace the methods `names`, which they call as `_slow_…` if need be.

    A shortcut has the method's docstring, and its signature without the annotations, which CPython has for no builtin.
    """
    def shorten(cls):
        for name in names.split():
            slow = cls.__dict__[name]
            if name == "__init__":
                delattr(cls, name)
            else:
                setattr(cls, f"_slow_{name}", slow)
                setattr(cls, name, described(cls.__base__, slow))
        return cls
    return shorten
