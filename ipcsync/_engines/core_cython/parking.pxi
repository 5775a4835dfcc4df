# How the host waits for GPU work: `parking.h`, for Python.

cdef extern from "parking.h" nogil:
    struct patience:
        pass
    int await_work(
        void *event, const uint64_t *word, uint64_t wanted, const uint64_t *state, uint64_t broken, int64_t began,
        int64_t until, patience *last
    )
    void bind_parking(void *query, void *exchange_mode)
