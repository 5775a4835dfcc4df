/* How the host waits for GPU work: it looks, and sleeps in between.
 *
 * CUDA's own wait cannot be bounded or interrupted, one for work of a process that died may never end, and one for an
 * interprocess event burns a core. So nobody waits in the driver for a point. Who waits looks and sleeps as `patience.h`
 * plans it, on the slot's `completed` word, on which a break wakes it at once.
 * Nothing here may be called in a forked child; the engines' check comes first.
 */
#include <errno.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "patience.h"

enum { NOT_READY_YET = 600, RELAXED = 2 };
static const int64_t LOOK_STALLED_NS = 50000; /* who took that long for a look had to yield the processor */

/* The driver's functions, null until they are bound. */
static struct {
    int (*query)(void *event);
    int (*exchange_mode)(int *mode);
} parking;

static inline int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int64_t sleep_ns; /* how long the shortest sleep takes here */

static void measure_sleep(void) {
    struct timespec shortest = {0, 1000};
    uint32_t word = 0;
    for (int times = 0; times < 5; times++) {
        int64_t began = monotonic_ns();
        syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &shortest, 0, 0);
        int64_t took = monotonic_ns() - began;
        if (times == 0 || took < sleep_ns) sleep_ns = took;
    }
    if (sleep_ns < 20000) sleep_ns = 20000;
    if (sleep_ns > 100000) sleep_ns = 100000;
}

static void bind_parking(void *query, void *exchange_mode) {
    if (sleep_ns == 0) measure_sleep();
    parking.query = query;
    parking.exchange_mode = exchange_mode;
}

/* Wait until the driver says that `event` is complete, or `*word` has reached `wanted`, which is looked at all the same:
 * the event may be another generation's by now. Without an event only for the word. The wait began at `began`, maybe with
 * an earlier call.
 * 1: look; 0: `until` passed, a signal came, `*state` is `broken`, or the driver has an error, which the caller's next
 * call meets.
 */
static int await_work(
    void *event, const uint64_t *word, uint64_t wanted, const uint64_t *state, uint64_t broken, int64_t began,
    int64_t until, struct patience *patience
) {
    struct plan plan = plan_of(patience, sleep_ns);
    int64_t now = monotonic_ns(), pause = 1;
    int result = 0, mode = RELAXED, slack = 0, has_waited = 0, is_interrupted = 0;
    int is_relaxed = event != NULL && parking.exchange_mode(&mode) == 0;
    for (;;) {
        uint64_t seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        result = (int64_t)(seen - wanted) >= 0;
        int error = result || event == NULL ? NOT_READY_YET : parking.query(event);
        result |= error == 0;
        is_interrupted |= __atomic_load_n(state, __ATOMIC_ACQUIRE) == broken;
        if (result || error != NOT_READY_YET || is_interrupted) break;
        int64_t last = now;
        now = monotonic_ns();
        if (now >= until) break;
        has_waited = 1;
        if (pause == 0 && now - last > LOOK_STALLED_NS) {
            interrupt(patience);
            plan.may_look = 0;
        }
        pause = pause_of(&plan, now - began);
        if (pause == 0) continue;
        if (pause > until - now) pause = until - now;
        if (slack == 0) { /* else each sleep would end late by that much */
            slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
            prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
        }
        struct timespec limit = {pause / 1000000000LL, pause % 1000000000LL};
        is_interrupted = syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)seen, &limit, 0, 0) != 0 && errno == EINTR;
    }
    if (slack > 0) prctl(PR_SET_TIMERSLACK, slack, 0, 0, 0);
    if (is_relaxed) parking.exchange_mode(&mode);
    if (!result) return 0;
    if (has_waited) {
        int64_t ended = monotonic_ns();
        learn(patience, &plan, ended - began, ended - now);
    }
    return 1;
}
