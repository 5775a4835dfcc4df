/* How the host waits for GPU work: it looks, and sleeps in between, until a thread of the recorder's wakes it.
 *
 * CUDA's own wait cannot be bounded or interrupted, and one for work of a process that died may never end. So nobody
 * waits in the driver for another's work. Who waits sleeps on the slot's `completed` word, for a 32nd of the time that
 * it has waited so far, a millisecond at most, and nudges the recorder. That one parks a thread of its own, a berth's,
 * in the driver's wait for what it recorded itself. When that returns, the berth wakes all sleepers, who look again. It
 * touches neither Python nor the board; if it is late, or there is none, the sleepers only look later.
 * Nothing here may be called in a forked child; the engines' check comes first.
 */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { BERTHS = 4, MOST_EVENTS = 64, NOT_READY_YET = 600, RELAXED = 2 };
static const int64_t LOOK_LATEST_NS = 20000, /* how long one looks without a pause, at most */
    LOOK_STALLED_NS = 50000,                 /* who took that long for a look had to yield the processor */
    PAUSE_LEAST_NS = 20000, PAUSE_MOST_NS = 1000000,
    NUDGE_AFTER_NS = 1000000, /* before that, the pauses are short */
    NUDGE_MOST_NS = 64000000,
    SPINS_AFTER_NS = 10000000;

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

struct berth {
    int count;                  /* of events that are still waited for, in their order; 0: idle */
    void *events[MOST_EVENTS];
    const void *word;           /* whose sleepers are woken */
    void *context;              /* of whoever asked */
    uint32_t asked;             /* counts; the thread sleeps on it */
    int has_thread;
    pthread_t thread;
    int64_t since, used;        /* when it was asked, and the processor time that its thread had used by then */
};

static struct berth berths[BERTHS];
static pthread_mutex_t berths_lock = PTHREAD_MUTEX_INITIALIZER; /* of all above; never held over a call of the driver */
static int driver_spins;           /* the driver burns a core while it waits: then nobody is parked any more */
static _Atomic int64_t times_rung; /* how often a berth has woken sleepers */

static int64_t processor_ns(pthread_t thread) {
    clockid_t clock;
    struct timespec used = {0, 0};
    if (pthread_getcpuclockid(thread, &clock) == 0) clock_gettime(clock, &used);
    return used.tv_sec * 1000000000LL + used.tv_nsec;
}

static void *berth_main(void *argument) {
    struct berth *berth = argument;
    void *current = NULL;
    prctl(PR_SET_NAME, "ipcsync-parked", 0, 0, 0);
    int mode = RELAXED; /* for good: a wait must not spoil somebody's capture */
    parking.exchange_mode(&mode);
    pthread_mutex_lock(&berths_lock);
    for (;;) {
        uint32_t seen = __atomic_load_n(&berth->asked, __ATOMIC_ACQUIRE);
        void *event = berth->events[0], *context = berth->context;
        const void *word = berth->word;
        int is_idle = berth->count == 0;
        pthread_mutex_unlock(&berths_lock);
        int error = 0;
        if (is_idle) {
            syscall(SYS_futex, &berth->asked, FUTEX_WAIT_PRIVATE, seen, NULL, 0, 0);
        } else {
            if (context != current) error = parking.set_context(context);
            if (error == 0) {
                current = context;
                error = parking.synchronize(event);
            }
        }
        pthread_mutex_lock(&berths_lock);
        if (!is_idle) {
            berth->count = error == 0 ? berth->count - 1 : 0;
            memmove(berth->events, berth->events + 1, sizeof(void *) * (size_t)berth->count);
            if (error == 0) { /* under the lock: until then the event, and so the board, stays */
                atomic_fetch_add(&times_rung, 1);
                wake_all(word, 0);
            }
        }
    }
    return NULL;
}

static int start_thread(struct berth *berth) {
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0) return 0;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* the process's signals are for the threads that have Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    berth->has_thread = pthread_create(&berth->thread, &attributes, berth_main, berth) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return berth->has_thread;
}

/* Have a thread wait for these events one after the other, and wake the sleepers on `word` at each; whether one does. */
static int park(void **events, int count, const void *word) {
    struct berth *chosen = NULL;
    void *context = NULL;
    int64_t now = monotonic_ns();
    if (count > 0) parking.get_context(&context);
    pthread_mutex_lock(&berths_lock);
    for (int index = 0; index < BERTHS; index++) {
        struct berth *berth = &berths[index];
        if (berth->count == 0) {
            if (chosen == NULL) chosen = berth;
            continue;
        }
        int64_t took = now - berth->since;
        if (took > SPINS_AFTER_NS && processor_ns(berth->thread) - berth->used > took / 2) driver_spins = 1;
        if (berth->word == word) count = 0; /* that one is nudged again if it does not know of all */
    }
    int is_parked = count > 0 && chosen != NULL && !driver_spins && (chosen->has_thread || start_thread(chosen));
    if (is_parked) {
        chosen->count = count < MOST_EVENTS ? count : MOST_EVENTS;
        memcpy(chosen->events, events, sizeof(void *) * (size_t)chosen->count);
        chosen->word = word;
        chosen->context = context;
        chosen->since = now;
        chosen->used = processor_ns(chosen->thread);
        __atomic_add_fetch(&chosen->asked, 1, __ATOMIC_RELEASE);
        wake_all(&chosen->asked, FUTEX_PRIVATE_FLAG);
    }
    pthread_mutex_unlock(&berths_lock);
    return is_parked;
}

/* Whether a thread is in the driver's wait for `event`, or will be: it may not be destroyed then. */
static int is_parked(void *event) {
    int found = 0;
    pthread_mutex_lock(&berths_lock);
    for (int index = 0; index < BERTHS; index++)
        for (int place = 0; place < berths[index].count; place++) found |= berths[index].events[place] == event;
    pthread_mutex_unlock(&berths_lock);
    return found;
}

static int berths_taken(void) {
    int count = 0;
    pthread_mutex_lock(&berths_lock);
    for (int index = 0; index < BERTHS; index++) count += berths[index].count != 0;
    pthread_mutex_unlock(&berths_lock);
    return count;
}

static int64_t rings(void) { return atomic_load(&times_rung); }

static void bind_parking(void *query, void *synchronize, void *get_context, void *set_context, void *exchange_mode) {
    parking.query = query;
    parking.synchronize = synchronize;
    parking.get_context = get_context;
    parking.set_context = set_context;
    parking.exchange_mode = exchange_mode;
}

/* --- the waiter's side -------------------------------------------------------------------------------------------- */

/* What a waiter learns from one wait for the next. */
struct patience {
    int64_t look;   /* how long to look without a pause: it shrinks while that is in vain */
    int64_t nudged; /* when the recorder was nudged last */
    int64_t gap;    /* how long from then to the next time at least: it grows while that is in vain */
};

/* Wait until the driver says that `event` is complete, or `*word` has reached `wanted`, which is looked at all the same:
 * the event may be another generation's by now. Without an event only for the word. `nudge` is the recorder's, or null.
 * 1: look; 0: `until` passed, a signal came, `*state` is `broken`, or the driver has an error, which the caller's next
 * call meets.
 */
static int await_work(
    void *event, const uint64_t *word, uint64_t wanted, const uint64_t *state, uint64_t broken, int64_t until,
    const void *nudge, struct patience *patience
) {
    int64_t began = monotonic_ns(), now = began;
    int64_t look = patience->look;
    int result = 0, mode = RELAXED, is_interrupted = 0;
    if (event != NULL && parking.exchange_mode(&mode) != 0) return 0;
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
        if (now - began < look && now - last < LOOK_STALLED_NS) continue;
        look = 0;
        if (nudge != NULL && now - began >= NUDGE_AFTER_NS && now - patience->nudged >= patience->gap) {
            patience->nudged = now;
            patience->gap = patience->gap < NUDGE_MOST_NS ? 2 * patience->gap + NUDGE_AFTER_NS : NUDGE_MOST_NS;
            wake_all(nudge, 0);
        }
        int64_t pause = (now - began) / 32;
        if (pause < PAUSE_LEAST_NS) pause = PAUSE_LEAST_NS;
        if (pause > PAUSE_MOST_NS) pause = PAUSE_MOST_NS;
        if (pause > until - now) pause = until - now;
        struct timespec limit = {pause / 1000000000LL, pause % 1000000000LL};
        is_interrupted = syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)seen, &limit, 0, 0) != 0 && errno == EINTR;
    }
    if (event != NULL) parking.exchange_mode(&mode);
    if (result) patience->gap = 0;
    if (result && now - began < 2 * LOOK_LATEST_NS) patience->look = LOOK_LATEST_NS;
    else if (now - began > patience->look) patience->look /= 2;
    return result;
}
