# The board's words, and a call's steps on them: `hook`, null but in tests, is given each one's name before it.

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

cdef extern from "words.h" nogil:
    struct ipcsync_names:
        const char *load
        const char *store
    const ipcsync_names ipcsync_words[]
    uint64_t ipcsync_load(const uint64_t *word)
    void ipcsync_store(uint64_t *word, uint64_t value)
    uint8_t ipcsync_load_byte(const uint8_t *byte)
    void ipcsync_store_byte(uint8_t *byte, uint8_t value)
    void ipcsync_fence()
    bint ipcsync_swap(uint32_t *word, uint32_t old, uint32_t new)
    uint32_t ipcsync_exchange(uint32_t *word, uint32_t value)
    void ipcsync_raise_to(int64_t *word, int64_t value)
    int64_t ipcsync_now()
    void ipcsync_futex_wake(void *word, bint private, int count)
    bint ipcsync_futex_wait(void *word, bint private, uint32_t seen, int64_t ns)
    int ipcsync_turns(int more)
    void ipcsync_pause(int64_t ns)
    int ipcsync_slack(int ns)
    void ipcsync_add(int *count, int value)
    uint64_t thread_now "pthread_self"()
    int lowest_of "__builtin_ctzll"(uint64_t bits)

cdef int64_t FOREVER = 1 << 62  # as in `_deadline`
cdef int64_t NOBODY_NS = 10_000_000_000  # for which a wait by name without a recorder is quiet
cdef int64_t FULL_NS = 100_000_000  # for which a record waits for room before it is logged
cdef int64_t LEAST_NS = 5_000_000  # for which a record waits for others' driver calls even if its timeout is shorter
cdef int64_t PATIENCE_NS = 1_000_000_000  # for which a hazard is waited for
cdef int64_t LONGEST_GAP_NS = 1_000_000  # between two looks at hazards
cdef int64_t LONGEST_LOOK_NS = 20_000_000  # what is longer is this process's own pause

def set_times(*, int64_t nobody_ns=10_000_000_000, int64_t patience_ns=1_000_000_000):
    """For tests: other times than these."""
    global NOBODY_NS, PATIENCE_NS
    NOBODY_NS, PATIENCE_NS = nobody_ns, patience_ns

cpdef enum:  # of the board: `layout.py` is held against these by a test
    HEADER = 9, NEWEST = 12, FIRST_SESSION = 512, LINE = 16  # words
    S_STATE = 0, S_SERIAL = 1, S_OWNER = 9, S_DOORBELL = 10
    LIVE = 1, OWNER_DIED = 0x40000000
    INCARNATION = 0, STATE, RECORDER, WATERMARK
    AWAITED = 6, FOLLOWED, RECORDED, COMPLETED, FIRST_DEPENDENT, VALID_AS_OF, LOST, ROOT_CAUSE, ANNOUNCED
    OPEN = 1, BROKEN, CLOSED

ctypedef void (*Hook)(const char *) noexcept nogil
cdef Hook hook = NULL

def set_hook(uintptr_t address):
    """Have the C function there called with the name of each step, before it is taken; 0: none."""
    global hook
    hook = <Hook>address

cdef inline void step(const char *name) noexcept nogil:
    if hook != NULL:
        hook(name)

cdef inline uint64_t load(const uint64_t *place, int word) noexcept nogil:
    """A word of a slot's line."""
    step(ipcsync_words[word].load)
    return ipcsync_load(place + word)

cdef inline void store(uint64_t *place, int word, uint64_t value) noexcept nogil:
    step(ipcsync_words[word].store)
    ipcsync_store(place + word, value)

cdef inline void fence() noexcept nogil:
    step(b"fence")
    ipcsync_fence()
