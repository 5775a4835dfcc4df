# The steps of a call: the name of each is given to `hook`, which is null but in tests, before it is taken.

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


cdef inline void wake_all(uint64_t *place) noexcept nogil:
    """Wake those who wait for a slot."""
    step(b"wake")
    ipcsync_futex_wake(place + RECORDED, False, 0x7FFFFFFF)
