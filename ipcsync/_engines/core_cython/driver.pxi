# The driver's functions, as the binding chose them: taken from its capsules, by name and signature.



cdef extern from "Python.h":
    void *PyCapsule_GetPointer(object capsule, const char *name) except NULL

ctypedef void *Handle
ctypedef int (*Call1)(Handle) noexcept nogil
ctypedef int (*Call2)(Handle, Handle) noexcept nogil
ctypedef int (*CallWait)(Handle, Handle, unsigned int) noexcept nogil
ctypedef int (*CallStatus)(Handle, int *) noexcept nogil
ctypedef int (*CallId)(Handle, unsigned long long *) noexcept nogil
ctypedef int (*CallMode)(int *) noexcept nogil
ctypedef int (*CallCreate)(Handle *, unsigned int) noexcept nogil
ctypedef int (*CallFlags)(Handle, unsigned int *) noexcept nogil
ctypedef int (*CallValue)(Handle, unsigned long long, uint64_t, unsigned int) noexcept nogil
cdef Call2 cuEventRecord
cdef Call1 cuEventQuery, cuEventDestroy
cdef CallCreate cuEventCreate
cdef CallFlags cuStreamGetFlags
cdef CallWait cuStreamWaitEvent
cdef CallStatus cuStreamIsCapturing
cdef CallId cuStreamGetId
cdef CallMode cuThreadExchangeStreamCaptureMode
cdef CallValue cuStreamWriteValue64, cuStreamWaitValue64
cdef bint is_bound = False

FUNCTIONS = {
    "cuEventRecord": b"CUresult (CUevent, CUstream)",
    "cuEventQuery": b"CUresult (CUevent)",
    "cuEventCreate": b"CUresult (CUevent *, unsigned int)",
    "cuEventDestroy": b"CUresult (CUevent)",
    "cuStreamGetFlags": b"CUresult (CUstream, unsigned int *)",
    "cuStreamWaitEvent": b"CUresult (CUstream, CUevent, unsigned int)",
    "cuStreamIsCapturing": b"CUresult (CUstream, CUstreamCaptureStatus *)",
    "cuStreamGetId": b"CUresult (CUstream, unsigned PY_LONG_LONG *)",
    "cuThreadExchangeStreamCaptureMode": b"CUresult (CUstreamCaptureMode *)",
    "cuStreamWriteValue64": b"CUresult (CUstream, CUdeviceptr, cuuint64_t, unsigned int)",
    "cuStreamWaitValue64": b"CUresult (CUstream, CUdeviceptr, cuuint64_t, unsigned int)",
    "cuEventSynchronize": b"CUresult (CUevent)",
    "cuCtxGetCurrent": b"CUresult (CUcontext *)",
    "cuCtxSetCurrent": b"CUresult (CUcontext)",
}


def bind_functions(dict addresses):
    """Have the core call the C functions at these addresses; an empty dict: there are none, and no calls."""
    global cuEventRecord, cuEventQuery, cuStreamWaitEvent, cuStreamIsCapturing, cuStreamGetId, is_bound
    global cuThreadExchangeStreamCaptureMode, cuStreamWriteValue64, cuStreamWaitValue64
    global cuEventCreate, cuEventDestroy, cuStreamGetFlags
    is_bound = False
    if not addresses:
        return
    cuEventRecord = <Call2><uintptr_t>addresses["cuEventRecord"]
    cuEventQuery = <Call1><uintptr_t>addresses["cuEventQuery"]
    cuEventCreate = <CallCreate><uintptr_t>addresses["cuEventCreate"]
    cuEventDestroy = <Call1><uintptr_t>addresses["cuEventDestroy"]
    cuStreamGetFlags = <CallFlags><uintptr_t>addresses["cuStreamGetFlags"]
    cuStreamWaitEvent = <CallWait><uintptr_t>addresses["cuStreamWaitEvent"]
    cuStreamIsCapturing = <CallStatus><uintptr_t>addresses["cuStreamIsCapturing"]
    cuStreamGetId = <CallId><uintptr_t>addresses["cuStreamGetId"]
    cuThreadExchangeStreamCaptureMode = <CallMode><uintptr_t>addresses["cuThreadExchangeStreamCaptureMode"]
    cuStreamWriteValue64 = <CallValue><uintptr_t>addresses["cuStreamWriteValue64"]
    cuStreamWaitValue64 = <CallValue><uintptr_t>addresses["cuStreamWaitValue64"]
    bind_parking(
        cuEventQuery,
        <void *><uintptr_t>addresses["cuEventSynchronize"],
        <void *><uintptr_t>addresses["cuCtxGetCurrent"],
        <void *><uintptr_t>addresses["cuCtxSetCurrent"],
        cuThreadExchangeStreamCaptureMode,
    )
    is_bound = True


def bind_driver():
    """Take the driver's functions from the binding, as it chose them; why not, or None."""
    try:
        from cuda.bindings import cydriver
        exported = cydriver.__pyx_capi__
        bind_functions(
            {name: <uintptr_t>PyCapsule_GetPointer(exported[name], kind) for name, kind in FUNCTIONS.items()}
        )
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None
