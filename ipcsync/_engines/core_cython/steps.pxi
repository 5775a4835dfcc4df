# The steps of a shortcut, by name: each is given to `hook`, which is null but in tests, before it is taken.

cdef enum Step:
    GUARD, OWN_CLOSED, LOAD_INCARNATION, LOAD_STATE, LOAD_RECORDER, LOAD_RECORDED, LOAD_COMPLETED, ALIVE, COORDINATOR
    CAPTURING, GET_ID, LOCK, UNLOCK, EVENT_RECORD, MARK, STREAM_WAIT, WRITE_VALUE, WAIT_VALUE, EVENT_QUERY
    STORE_RECORDED, FENCE, STORE_COMPLETED, WAKE, SLEEP, LOAD_BEHIND, LOAD_LOST, AWAIT_WORK
    LOAD_NEWEST, LOAD_AS_OF, LOAD_BITS, SESSION_GOOD, STORE_BITS, STORE_AS_OF, STORE_BEHIND
    LOAD_AWAITED, STORE_AWAITED, LOAD_FOLLOWED, LOAD_VISITED, STORE_VISITED, ENTER, LEAVE, LOAD_VISITS
    LOAD_WATERMARK, GET_FLAGS, STORE_CULPRIT, STORE_LOST, BATCH

STEPS = (
    "guard.check", "own is_closed", "load incarnation", "load state", "load recorder", "load recorded",
    "load completed", "recorder alive?", "coordinator?", "cuStreamIsCapturing", "cuStreamGetId", "lock", "unlock",
    "cuEventRecord", "mark", "cuStreamWaitEvent", "cuStreamWriteValue64", "cuStreamWaitValue64", "cuEventQuery",
    "store recorded", "fence", "store completed", "wake", "sleep", "load behind", "load lost", "await work",
    "load newest", "load as_of", "load bits", "session good?", "store bits", "store as_of", "store behind",
    "load awaited", "store awaited", "load followed", "load visited", "store visited", "enter", "leave", "load visits",
    "load watermark", "cuStreamGetFlags", "store culprit", "store lost", "cuStreamBatchMemOp",
)

ctypedef void (*Hook)(int) noexcept nogil
cdef Hook hook = NULL


def set_hook(uintptr_t address):
    """Have the C function there called with the number of each step, before it is taken; 0: none."""
    global hook
    hook = <Hook>address


cdef inline void step(Step name) noexcept nogil:
    if hook != NULL:
        hook(name)
