# What users hold: points and shared events, whose calls first try the shortcut.

from cpython.object cimport PyObject

cdef extern from "Python.h":
    void *PyType_GetSlot(object kind, int slot)
    const int Py_tp_new

ctypedef object (*NewFunction)(object kind, object arguments, PyObject *keywords)

cdef object NOTHING = ()


cdef inline Core core_of(attached):
    engine = None if attached is None else attached.engine
    return <Core>engine if isinstance(engine, Core) else None


cdef inline void left(Core core):
    """Count a call that is left to the Python engine."""
    if core is not None and core.look is not None:
        core.look.slow_calls += 1


cdef inline double seconds_of(timeout) except? -2:
    """Of a second at most: a larger int may be too large for a double."""
    try:
        return 1 if timeout is None else <double>timeout
    except OverflowError:
        return 1 if timeout > 0 else -1


cdef class PointBase:
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


def shortened(names, stream_class=None):
    """As in `core_python`."""
    def shorten(cls):
        for name in names.split():
            slow = cls.__dict__[name]
            if name != "__init__":
                setattr(cls, f"_slow_{name}", slow)
            delattr(cls, name)
        return cls
    return shorten
