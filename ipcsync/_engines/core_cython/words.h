/* Words of shared memory by C11's rules, the clock, and the futex system call. Nothing here needs the GIL. */
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* What an access of each word of a slot's line is called. */
struct ipcsync_names {
    const char *load, *store;
};
#define WORD(name) {"load " name, "store " name}
static const struct ipcsync_names ipcsync_words[] = {
    WORD("incarnation"), WORD("state"), WORD("recorder"), WORD("watermark"), {0}, {0}, WORD("awaited"), WORD("followed"),
    WORD("recorded"), WORD("completed"), WORD("first_dependent"), WORD("valid_as_of"), WORD("lost"), WORD("root_cause"),
    WORD("announced"),
};

static inline uint64_t ipcsync_load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline void ipcsync_store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static inline uint8_t ipcsync_load_byte(const uint8_t *byte) { return __atomic_load_n(byte, __ATOMIC_ACQUIRE); }
static inline void ipcsync_store_byte(uint8_t *byte, uint8_t value) { __atomic_store_n(byte, value, __ATOMIC_RELEASE); }
static inline void ipcsync_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline int ipcsync_swap(uint32_t *word, uint32_t old, uint32_t new) {
    return __atomic_compare_exchange_n(word, &old, new, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}
static inline uint32_t ipcsync_exchange(uint32_t *word, uint32_t value) {
    return __atomic_exchange_n(word, value, __ATOMIC_ACQ_REL);
}
static inline void ipcsync_raise_to(int64_t *word, int64_t value) {
    int64_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (old < value && !__atomic_compare_exchange_n(word, &old, value, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {}
}
static inline int64_t ipcsync_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}
static inline void ipcsync_futex_wake(void *word, int private, int count) {
    syscall(SYS_futex, word, private ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE, count, 0, 0, 0);
}
/* Whether a signal ended it. */
static inline int ipcsync_futex_wait(void *word, int private, uint32_t seen, int64_t ns) {
    struct timespec limit = {ns / 1000000000LL, ns % 1000000000LL};
    int flag = private ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
    return syscall(SYS_futex, word, flag, seen, &limit, 0, 0) != 0 && errno == EINTR;
}
static __thread int turns; /* that this thread has, in calls that may run anybody's code */
static inline int ipcsync_turns(int more) { return turns += more; }
static inline void ipcsync_pause(int64_t ns) {
    uint32_t nobody_wakes = 0;
    ipcsync_futex_wait(&nobody_wakes, 1, 0, ns);
}
/* Have the thread's sleeps end late by so many ns at most; what it was. */
static inline int ipcsync_slack(int ns) {
    int before = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, ns, 0, 0, 0);
    return before;
}
static inline void ipcsync_add(int *count, int value) { __atomic_add_fetch(count, value, __ATOMIC_ACQ_REL); }
