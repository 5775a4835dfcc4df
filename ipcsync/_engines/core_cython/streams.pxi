# Anybody's stream, by its address.

cdef extern from "Python.h":
    int PyIndex_Check(object value)
    int PyLong_CheckExact(object value)

cdef object our_stream = None  # the class Stream


cdef uintptr_t address_of(stream) except? 0:
    """The CUstream address of anybody's stream; 0 if that is for the Python engine to find, as of None."""
    if stream is None:
        return 0
    if type(stream) is our_stream:
        return <uintptr_t>stream._pointer
    if PyLong_CheckExact(stream):
        return <uintptr_t>stream if 4096 <= stream < 1 << 64 else 0  # a small number may be meant for another argument
    if PyIndex_Check(stream) or isinstance(stream, type):
        return 0
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        answer = protocol() if callable(protocol) else protocol
        if not isinstance(answer, tuple) or len(answer) != 2 or answer[0] != 0:
            return 0
        address = answer[1]
    else:
        address = getattr(stream, "cuda_stream", None)
    return <uintptr_t>address if PyLong_CheckExact(address) and 0 <= address < 1 << 64 else 0


def know_streams(cls):
    """Which class has the address of its stream in `_pointer`."""
    global our_stream
    our_stream = cls
