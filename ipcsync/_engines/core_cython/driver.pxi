# The driver's functions, as the binding chose them: taken from its capsules, by name and signature.

from cpython.pycapsule cimport PyCapsule_GetPointer

ctypedef void *Handle
cdef int (*cuEventRecord)(Handle, Handle) noexcept nogil
cdef int (*cuEventQuery)(Handle) noexcept nogil
cdef int (*cuEventDestroy)(Handle) noexcept nogil
cdef int (*cuStreamGetFlags)(Handle, unsigned int *) noexcept nogil
cdef int (*cuStreamWaitEvent)(Handle, Handle, unsigned int) noexcept nogil
cdef int (*cuStreamIsCapturing)(Handle, int *) noexcept nogil
cdef int (*cuStreamGetId)(Handle, unsigned long long *) noexcept nogil
cdef int (*cuStreamGetCtx)(Handle, Handle *) noexcept nogil
cdef int (*cuThreadExchangeStreamCaptureMode)(int *) noexcept nogil
cdef int (*cuStreamWriteValue64)(Handle, unsigned long long, uint64_t, unsigned int) noexcept nogil
cdef int (*cuStreamWaitValue64)(Handle, unsigned long long, uint64_t, unsigned int) noexcept nogil
cdef int (*cuStreamBatchMemOp)(Handle, unsigned int, void *, unsigned int) noexcept nogil
cdef int (*cuCtxGetCurrent)(Handle *) noexcept nogil
cdef int (*cuCtxSetCurrent)(Handle) noexcept nogil

cdef dict PLACES = {
    "cuEventRecord": (b"CUevent, CUstream", <uintptr_t>&cuEventRecord),
    "cuEventQuery": (b"CUevent", <uintptr_t>&cuEventQuery),
    "cuEventDestroy": (b"CUevent", <uintptr_t>&cuEventDestroy),
    "cuStreamGetFlags": (b"CUstream, unsigned int *", <uintptr_t>&cuStreamGetFlags),
    "cuStreamWaitEvent": (b"CUstream, CUevent, unsigned int", <uintptr_t>&cuStreamWaitEvent),
    "cuStreamIsCapturing": (b"CUstream, CUstreamCaptureStatus *", <uintptr_t>&cuStreamIsCapturing),
    "cuStreamGetId": (b"CUstream, unsigned PY_LONG_LONG *", <uintptr_t>&cuStreamGetId),
    "cuStreamGetCtx": (b"CUstream, CUcontext *", <uintptr_t>&cuStreamGetCtx),
    "cuThreadExchangeStreamCaptureMode": (b"CUstreamCaptureMode *", <uintptr_t>&cuThreadExchangeStreamCaptureMode),
    "cuStreamWriteValue64": (b"CUstream, CUdeviceptr, cuuint64_t, unsigned int", <uintptr_t>&cuStreamWriteValue64),
    "cuStreamWaitValue64": (b"CUstream, CUdeviceptr, cuuint64_t, unsigned int", <uintptr_t>&cuStreamWaitValue64),
    "cuStreamBatchMemOp": (
        b"CUstream, unsigned int, CUstreamBatchMemOpParams *, unsigned int", <uintptr_t>&cuStreamBatchMemOp
    ),
    "cuCtxGetCurrent": (b"CUcontext *", <uintptr_t>&cuCtxGetCurrent),
    "cuCtxSetCurrent": (b"CUcontext", <uintptr_t>&cuCtxSetCurrent),
}
FUNCTIONS = {name: b"CUresult (" + arguments + b")" for name, (arguments, _) in PLACES.items()}

def bind_functions(dict addresses):
    """Have the core call the C functions at these addresses."""
    for name, (_, place) in PLACES.items():
        (<void **><uintptr_t>place)[0] = <void *><uintptr_t>addresses[name]
    measure_sleep()

def bind_driver():
    """Take the driver's functions from the binding, as it chose them. NoDriver if it lacks one."""
    try:
        from cuda.bindings import cydriver
        own = cydriver.__pyx_capi__
        bind_functions({name: <uintptr_t>PyCapsule_GetPointer(own[name], kind) for name, kind in FUNCTIONS.items()})
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        why = f"the binding lacks a function that ipcsync needs: {type(error).__name__}: {error}"
        raise NoDriver(f"{why}: install a newer cuda-bindings") from None

# --- waits of the host -------------------------------------------------------------------------------------------------

# Nobody waits in the driver for a point: who waits looks and sleeps in between, as `patience.h` plans it.

cdef extern from "patience.h" nogil:
    struct patience:
        pass
    struct plan:
        bint may_look
    plan plan_of(const patience *last, int64_t sleep_ns)
    int64_t pause_of(const plan *plan, int64_t took)
    void learn(patience *last, const plan *plan, int64_t took, int64_t blind)
    void interrupt(patience *last)

cdef enum:
    NOT_READY = 600
    RELAXED = 2  # of the capture modes
    LOOK_STALLED_NS = 50000  # who took that long for a look had to yield the processor

cdef int64_t sleep_ns = 100000  # how long the shortest sleep takes here

cdef void measure_sleep() noexcept:
    global sleep_ns
    cdef uint32_t word = 0
    for _ in range(5):
        began = ipcsync_now()
        ipcsync_futex_wait(&word, True, 0, 1000)
        sleep_ns = min(sleep_ns, ipcsync_now() - began)
    sleep_ns = max(sleep_ns, 20000)

cdef int query_relaxed(Handle event) noexcept nogil:
    """The driver's answer about an event, in relaxed capture mode, since another thread may capture: 0 if complete."""
    cdef int mode = RELAXED
    cdef bint is_relaxed = cuThreadExchangeStreamCaptureMode(&mode) == 0
    cdef int result = cuEventQuery(event)
    if is_relaxed:
        cuThreadExchangeStreamCaptureMode(&mode)
    return result

cdef bint await_work(
    Handle event, const uint64_t *word, uint64_t wanted, const uint64_t *state, int64_t began, int64_t until,
    patience *last
) noexcept nogil:
    """Wait until the driver says that `event` is complete, or the word has reached `wanted`, which is looked at all the
    same: the event may be another generation's by now. Without an event only for the word. The wait began at `began`,
    maybe with an earlier call. Whether to look; else `until` passed, a signal came, the slot is broken, or the driver
    has an error, which the caller's next call meets."""
    cdef plan how = plan_of(last, sleep_ns)
    cdef int64_t now = ipcsync_now(), pause = 1
    cdef int mode = RELAXED, slack = 0
    cdef bint is_there, has_waited = False, is_interrupted = False
    cdef bint is_relaxed = event != NULL and cuThreadExchangeStreamCaptureMode(&mode) == 0
    while True:
        seen = ipcsync_load(word)
        is_there = <int64_t>(seen - wanted) >= 0
        error = NOT_READY if is_there or event == NULL else cuEventQuery(event)
        is_there = is_there or error == 0
        if is_there or error != NOT_READY or is_interrupted or ipcsync_load(state) == BROKEN:
            break
        before, now = now, ipcsync_now()
        if now >= until:
            break
        has_waited = True
        if pause == 0 and now - before > LOOK_STALLED_NS:
            interrupt(last)
            how.may_look = False
        pause = pause_of(&how, now - began)
        if pause == 0:
            continue
        pause = min(pause, until - now)
        if slack == 0:  # else each sleep would end late by that much
            slack = ipcsync_slack(1)
        is_interrupted = ipcsync_futex_wait(<void *>word, False, <uint32_t>seen, pause)
    if slack > 0:
        ipcsync_slack(slack)
    if is_relaxed:
        cuThreadExchangeStreamCaptureMode(&mode)
    if is_there and has_waited:
        before, now = now, ipcsync_now()
        learn(last, &how, now - began, now - before)
    return is_there
