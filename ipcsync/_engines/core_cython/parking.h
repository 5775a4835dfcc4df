/* How the host waits for GPU work: it looks, and sleeps in between, until a thread of the recorder's wakes it.
 *
 * CUDA's own wait cannot be bounded or interrupted, and one for work of a process that died may never end. So nobody
 * waits in the driver for another's work. Who waits looks and sleeps as `patience.h` plans it, on the slot's `completed`
 * word. On the timeline engine it rings the recorder's doorbell too, and that one has a thread of its own, a waiter thread,
 * in the driver's wait for what it recorded itself. When that returns, the waiter thread wakes all sleepers, who look again.
 * It touches neither Python nor the board; if it is late, or there is none, the sleepers only look later. On the event engine
 * there is none: NVIDIA's driver burns a core in its wait for an interprocess event, whatever the event's flags.
 * Nothing here may be called in a forked child; the engines' check comes first.
 */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "patience.h"

enum { WAITER_THREADS = 4, NOT_READY_YET = 600, RELAXED = 2 };
static const int64_t LOOK_STALLED_NS = 50000, /* who took that long for a look had to yield the processor */
    RING_AFTER_NS = 1000000, /* before that, the pauses are short */
    RING_MOST_NS = 64000000;

/* The driver's functions, null until they are bound. */
static struct {
    int (*query)(void *event);
    int (*synchronize)(void *event);
    int (*get_context)(void **context);
    int (*set_context)(void *context);
    int (*exchange_mode)(int *mode);
} parking;

static inline int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static inline void wake_all(const void *word, int flag) { syscall(SYS_futex, word, FUTEX_WAKE | flag, INT_MAX, 0, 0, 0); }

/* --- the recorder's side ------------------------------------------------------------------------------------------ */

struct waiter_thread {
    void *event;      /* what is waited for; null: idle */
    const void *word; /* whose sleepers are woken */
    void *context;    /* of whoever asked */
    uint32_t asked;   /* counts; the thread sleeps on it */
    int has_thread;
};

static struct waiter_thread waiter_threads[WAITER_THREADS];
static pthread_mutex_t waiter_threads_lock = PTHREAD_MUTEX_INITIALIZER; /* of all above; never held over a call of the driver */
static _Atomic int64_t times_rung; /* how often a waiter thread has woken sleepers */

static void *waiter_main(void *argument) {
    struct waiter_thread *waiter = argument;
    void *current = NULL;
    prctl(PR_SET_NAME, "ipcsync-waiter", 0, 0, 0);
    int mode = RELAXED; /* for good: a wait must not spoil somebody's capture */
    parking.exchange_mode(&mode);
    pthread_mutex_lock(&waiter_threads_lock);
    for (;;) {
        uint32_t seen = __atomic_load_n(&waiter->asked, __ATOMIC_ACQUIRE);
        void *event = waiter->event, *context = waiter->context;
        pthread_mutex_unlock(&waiter_threads_lock);
        int error = 0;
        if (event == NULL) {
            syscall(SYS_futex, &waiter->asked, FUTEX_WAIT_PRIVATE, seen, NULL, 0, 0);
        } else {
            if (context != current) error = parking.set_context(context);
            if (error == 0) {
                current = context;
                error = parking.synchronize(event);
            }
        }
        pthread_mutex_lock(&waiter_threads_lock);
        if (event != NULL) {
            waiter->event = NULL;
            if (error == 0) { /* under the lock: until then the event, and so the board, stays */
                atomic_fetch_add(&times_rung, 1);
                wake_all(waiter->word, 0);
            }
        }
    }
    return NULL;
}

static int start_thread(struct waiter_thread *waiter) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0) return 0;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* the process's signals are for the threads that have Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    waiter->has_thread = pthread_create(&thread, &attributes, waiter_main, waiter) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return waiter->has_thread;
}

/* Have a thread wait for `event`, and then wake the sleepers on `word`; not if one waits for another of theirs. */
static void use_waiter_thread(void *event, const void *word) {
    struct waiter_thread *chosen = NULL;
    void *context = NULL;
    int is_known = 0;
    parking.get_context(&context);
    pthread_mutex_lock(&waiter_threads_lock);
    for (int index = 0; index < WAITER_THREADS; index++) {
        struct waiter_thread *waiter = &waiter_threads[index];
        if (waiter->event == NULL && chosen == NULL) chosen = waiter;
        is_known |= waiter->event != NULL && waiter->word == word; /* it is rung again if that is not the one it is for */
    }
    if (!is_known && chosen != NULL && (chosen->has_thread || start_thread(chosen))) {
        chosen->event = event;
        chosen->word = word;
        chosen->context = context;
        __atomic_add_fetch(&chosen->asked, 1, __ATOMIC_RELEASE);
        wake_all(&chosen->asked, FUTEX_PRIVATE_FLAG);
    }
    pthread_mutex_unlock(&waiter_threads_lock);
}

/* Whether a thread is in the driver's wait for `event`, or will be: it may not be destroyed then. */
static int has_waiter_thread(void *event) {
    int found = 0;
    pthread_mutex_lock(&waiter_threads_lock);
    for (int index = 0; index < WAITER_THREADS; index++) found |= waiter_threads[index].event == event;
    pthread_mutex_unlock(&waiter_threads_lock);
    return found;
}

static int waiter_threads_busy(void) {
    int count = 0;
    pthread_mutex_lock(&waiter_threads_lock);
    for (int index = 0; index < WAITER_THREADS; index++) count += waiter_threads[index].event != NULL;
    pthread_mutex_unlock(&waiter_threads_lock);
    return count;
}

static int64_t rings(void) { return atomic_load(&times_rung); }

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

static void bind_parking(void *query, void *synchronize, void *get_context, void *set_context, void *exchange_mode) {
    if (sleep_ns == 0) measure_sleep();
    parking.query = query;
    parking.synchronize = synchronize;
    parking.get_context = get_context;
    parking.set_context = set_context;
    parking.exchange_mode = exchange_mode;
}

/* --- the waiter's side -------------------------------------------------------------------------------------------- */

/* Wait until the driver says that `event` is complete, or `*word` has reached `wanted`, which is looked at all the same:
 * the event may be another generation's by now. Without an event only for the word. The wait began at `began`, maybe with
 * an earlier call. `doorbell` is the recorder's, or null.
 * 1: look; 0: `until` passed, a signal came, `*state` is `broken`, or the driver has an error, which the caller's next
 * call meets.
 */
static int await_work(
    void *event, const uint64_t *word, uint64_t wanted, const uint64_t *state, uint64_t broken, int64_t began,
    int64_t until, const void *doorbell, struct patience *patience
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
        int64_t took = now - began;
        pause = pause_of(&plan, took);
        if (pause == 0) continue;
        if (doorbell != NULL && took >= plan.soon && took >= RING_AFTER_NS && now - patience->rung >= patience->gap) {
            patience->rung = now;
            patience->gap = patience->gap < RING_MOST_NS ? 2 * patience->gap + RING_AFTER_NS : RING_MOST_NS;
            wake_all(doorbell, 0);
        }
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
    patience->gap = 0;
    if (has_waited) {
        int64_t ended = monotonic_ns();
        learn(patience, &plan, ended - began, ended - now);
    }
    return 1;
}
