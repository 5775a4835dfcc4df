# Anybody's stream, by its address.

cdef extern from "Python.h":
    int PyIndex_Check(object value)
    int PyLong_CheckExact(object value)
    unsigned long long PyLong_AsUnsignedLongLong(object value)
    void PyErr_Clear()

cdef object our_stream = None  # the class Stream


cdef inline uintptr_t unsigned(value) noexcept:
    """An int of 64 bits; 0 if it is anything else."""
    cdef unsigned long long result
    if not PyLong_CheckExact(value):
        return 0
    result = PyLong_AsUnsignedLongLong(value)
    if result == <unsigned long long>-1:  # no address either
        PyErr_Clear()
        return 0
    return <uintptr_t>result


cdef uintptr_t address_of(stream) except? 0:
    """The CUstream address of anybody's stream; 0 if that is for the Python engine to find, as of None."""
    cdef uintptr_t address
    if stream is None:
        return 0
    if type(stream) is our_stream:
        return <uintptr_t>stream._pointer
    if PyLong_CheckExact(stream):
        address = unsigned(stream)
        return address if address >= 4096 else 0  # a small number may be meant for another argument
    if PyIndex_Check(stream) or isinstance(stream, type):
        return 0
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        return unsigned(getattr(stream, "cuda_stream", None))
    answer = protocol() if callable(protocol) else protocol
    if not isinstance(answer, tuple) or len(<tuple>answer) != 2:
        return 0
    version = (<tuple>answer)[0]
    return unsigned((<tuple>answer)[1]) if PyLong_CheckExact(version) and not version else 0


def know_streams(cls):
    """Which class has the address of its stream in `_pointer`."""
    global our_stream
    our_stream = cls
