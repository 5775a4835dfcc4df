# How the host waits for GPU work: `parking.h`, for Python.

cdef extern from "parking.h" nogil:
    struct patience:
        pass
    int await_work(
        void *event, const uint64_t *word, uint64_t wanted, const uint64_t *state, uint64_t broken, int64_t began,
        int64_t until, const void *doorbell, patience *last
    )
    void use_waiter_thread(void *event, const void *word)
    bint event_is_watched "has_waiter_thread"(void *event)
    int64_t rings()
    int waiter_threads_busy()
    void bind_parking(void *query, void *synchronize, void *get_context, void *set_context, void *exchange_mode)


def waiter_threads():
    """How many threads are in the driver's wait now, and how often one of them has woken others so far."""
    return waiter_threads_busy(), rings()
