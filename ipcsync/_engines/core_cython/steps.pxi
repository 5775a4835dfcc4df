# The steps of a shortcut, by name: each is given to `hook`, which is null but in tests, before it is taken.

cdef enum Step:
    GUARD, OWN_CLOSED, LOAD_INCARNATION, LOAD_STATE, LOAD_RECORDER, LOAD_RECORDED, LOAD_COMPLETED, ALIVE, COORDINATOR
    CAPTURING, GET_ID, LOCK, UNLOCK, EVENT_RECORD, MARK, STREAM_WAIT, WRITE_VALUE, WAIT_VALUE, EVENT_QUERY
    STORE_RECORDED, FENCE, STORE_COMPLETED, WAKE, SLEEP, LOAD_FIRST_DEPENDENT, LOAD_LOST, AWAIT_WORK
    LOAD_NEWEST, LOAD_VALID_AS_OF, LOAD_BITS, SESSION_GOOD, STORE_BITS, STORE_VALID_AS_OF, STORE_FIRST_DEPENDENT
    LOAD_AWAITED, STORE_AWAITED, LOAD_FOLLOWED, LOAD_ANNOUNCED, STORE_ANNOUNCED, ANNOUNCE, RETRACT, LOAD_HAZARDS
    LOAD_WATERMARK, GET_FLAGS, STORE_ROOT_CAUSE, STORE_LOST, BATCH

STEPS = (
    "guard.check", "own is_closed", "load incarnation", "load state", "load recorder", "load recorded",
    "load completed", "recorder alive?", "coordinator?", "cuStreamIsCapturing", "cuStreamGetId", "lock", "unlock",
    "cuEventRecord", "mark", "cuStreamWaitEvent", "cuStreamWriteValue64", "cuStreamWaitValue64", "cuEventQuery",
    "store recorded", "fence", "store completed", "wake", "sleep", "load first_dependent", "load lost", "await work",
    "load newest", "load valid_as_of", "load bits", "session good?", "store bits", "store valid_as_of",
    "store first_dependent", "load awaited", "store awaited", "load followed", "load announced", "store announced",
    "announce", "retract", "load hazards",
    "load watermark", "cuStreamGetFlags", "store root_cause", "store lost", "cuStreamBatchMemOp",
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
