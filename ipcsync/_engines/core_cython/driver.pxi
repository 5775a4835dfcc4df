# The driver's functions, as the binding chose them: taken from its capsules, by name and signature.

cdef extern from "Python.h":
    void *PyCapsule_GetPointer(object capsule, const char *name) except NULL

ctypedef void *Handle
cdef int (*cuEventRecord)(Handle, Handle) noexcept nogil
cdef int (*cuEventQuery)(Handle) noexcept nogil
cdef int (*cuEventDestroy)(Handle) noexcept nogil
cdef int (*cuStreamGetFlags)(Handle, unsigned int *) noexcept nogil
cdef int (*cuStreamWaitEvent)(Handle, Handle, unsigned int) noexcept nogil
cdef int (*cuStreamIsCapturing)(Handle, int *) noexcept nogil
cdef int (*cuStreamGetId)(Handle, unsigned long long *) noexcept nogil
cdef int (*cuThreadExchangeStreamCaptureMode)(int *) noexcept nogil
cdef int (*cuStreamWriteValue64)(Handle, unsigned long long, uint64_t, unsigned int) noexcept nogil
cdef int (*cuStreamWaitValue64)(Handle, unsigned long long, uint64_t, unsigned int) noexcept nogil
cdef int (*cuStreamBatchMemOp)(Handle, unsigned int, void *, unsigned int) noexcept nogil
cdef int (*cuCtxGetCurrent)(Handle *) noexcept nogil
cdef int (*cuCtxSetCurrent)(Handle) noexcept nogil

cdef dict PLACES = {
    "cuEventRecord": (b"CUresult (CUevent, CUstream)", <uintptr_t>&cuEventRecord),
    "cuEventQuery": (b"CUresult (CUevent)", <uintptr_t>&cuEventQuery),
    "cuEventDestroy": (b"CUresult (CUevent)", <uintptr_t>&cuEventDestroy),
    "cuStreamGetFlags": (b"CUresult (CUstream, unsigned int *)", <uintptr_t>&cuStreamGetFlags),
    "cuStreamWaitEvent": (b"CUresult (CUstream, CUevent, unsigned int)", <uintptr_t>&cuStreamWaitEvent),
    "cuStreamIsCapturing": (b"CUresult (CUstream, CUstreamCaptureStatus *)", <uintptr_t>&cuStreamIsCapturing),
    "cuStreamGetId": (b"CUresult (CUstream, unsigned PY_LONG_LONG *)", <uintptr_t>&cuStreamGetId),
    "cuThreadExchangeStreamCaptureMode": (
        b"CUresult (CUstreamCaptureMode *)", <uintptr_t>&cuThreadExchangeStreamCaptureMode
    ),
    "cuStreamWriteValue64": (
        b"CUresult (CUstream, CUdeviceptr, cuuint64_t, unsigned int)", <uintptr_t>&cuStreamWriteValue64
    ),
    "cuStreamWaitValue64": (
        b"CUresult (CUstream, CUdeviceptr, cuuint64_t, unsigned int)", <uintptr_t>&cuStreamWaitValue64
    ),
    "cuStreamBatchMemOp": (
        b"CUresult (CUstream, unsigned int, CUstreamBatchMemOpParams *, unsigned int)", <uintptr_t>&cuStreamBatchMemOp
    ),
    "cuCtxGetCurrent": (b"CUresult (CUcontext *)", <uintptr_t>&cuCtxGetCurrent),
    "cuCtxSetCurrent": (b"CUresult (CUcontext)", <uintptr_t>&cuCtxSetCurrent),
}
FUNCTIONS = {name: kind for name, (kind, _) in PLACES.items()}


def bind_functions(dict addresses):
    """Have the core call the C functions at these addresses."""
    for name, (_, place) in PLACES.items():
        (<void **><uintptr_t>place)[0] = <void *><uintptr_t>addresses[name]
    measure_sleep()


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
