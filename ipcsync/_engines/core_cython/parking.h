/* How the host waits for GPU work: it looks, and sleeps in between, until a thread of the recorder's wakes it.
 *
 * CUDA's own wait cannot be bounded or interrupted, and one for work of a process that died may never end. So nobody
 * waits in the driver for another's work. Who waits sleeps on the slot's `completed` word, for a 32nd of the time that
 * it has waited so far, a millisecond at most, and rings the recorder's doorbell. That one has a thread of its own, a waiter thread,
 * in the driver's wait for what it recorded itself. When that returns, the waiter thread wakes all sleepers, who look again. It
 * touches neither Python nor the board; if it is late, or there is none, the sleepers only look later.
 *
 * A look costs less than a sleep. So who waits first looks without a pause for as long as a sleep takes, as long as that
 * pays. And if the waits for an event last about as long each time, it sleeps until shortly before one is due, and then
 * looks, for a tenth of the time that it has waited. Where such looks were interrupted, the processor is wanted by others:
 * then there are none for a while.
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

enum { WAITER_THREADS = 4, MOST_EVENTS = 64, NOT_READY_YET = 600, RELAXED = 2 };
enum { KNOWN_AFTER = 4, MEAN_OF = 8, MOST_ODD = 3, MOST_RESTS = 31 }; /* waits */
static const int64_t LOOK_STALLED_NS = 50000, /* who took that long for a look had to yield the processor */
    PAUSE_LEAST_NS = 50000, PAUSE_MOST_NS = 1000000,
    LATE_NS = 10000,          /* how late a sleep ends, about */
    RING_AFTER_NS = 1000000, /* before that, the pauses are short */
    RING_MOST_NS = 64000000,
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

struct waiter_thread {
    int count;                  /* of events that are still waited for, in their order; 0: idle */
    void *events[MOST_EVENTS];
    const void *word;           /* whose sleepers are woken */
    void *context;              /* of whoever asked */
    uint32_t asked;             /* counts; the thread sleeps on it */
    int has_thread;
    pthread_t thread;
    int64_t since, used;        /* when it was asked, and the processor time that its thread had used by then */
};

static struct waiter_thread waiter_threads[WAITER_THREADS];
static pthread_mutex_t waiter_threads_lock = PTHREAD_MUTEX_INITIALIZER; /* of all above; never held over a call of the driver */
static int driver_spins;           /* the driver burns a core while it waits: then no waiter thread is used any more */
static _Atomic int64_t times_rung; /* how often a waiter thread has woken sleepers */

static int64_t processor_ns(pthread_t thread) {
    clockid_t clock;
    struct timespec used = {0, 0};
    if (pthread_getcpuclockid(thread, &clock) == 0) clock_gettime(clock, &used);
    return used.tv_sec * 1000000000LL + used.tv_nsec;
}

static void *waiter_main(void *argument) {
    struct waiter_thread *waiter = argument;
    void *current = NULL;
    prctl(PR_SET_NAME, "ipcsync-waiter", 0, 0, 0);
    int mode = RELAXED; /* for good: a wait must not spoil somebody's capture */
    parking.exchange_mode(&mode);
    pthread_mutex_lock(&waiter_threads_lock);
    for (;;) {
        uint32_t seen = __atomic_load_n(&waiter->asked, __ATOMIC_ACQUIRE);
        void *event = waiter->events[0], *context = waiter->context;
        const void *word = waiter->word;
        int is_idle = waiter->count == 0;
        pthread_mutex_unlock(&waiter_threads_lock);
        int error = 0;
        if (is_idle) {
            syscall(SYS_futex, &waiter->asked, FUTEX_WAIT_PRIVATE, seen, NULL, 0, 0);
        } else {
            if (context != current) error = parking.set_context(context);
            if (error == 0) {
                current = context;
                error = parking.synchronize(event);
            }
        }
        pthread_mutex_lock(&waiter_threads_lock);
        if (!is_idle) {
            waiter->count = error == 0 ? waiter->count - 1 : 0;
            memmove(waiter->events, waiter->events + 1, sizeof(void *) * (size_t)waiter->count);
            if (error == 0) { /* under the lock: until then the event, and so the board, stays */
                atomic_fetch_add(&times_rung, 1);
                wake_all(word, 0);
            }
        }
    }
    return NULL;
}

static int start_thread(struct waiter_thread *waiter) {
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0) return 0;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* the process's signals are for the threads that have Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    waiter->has_thread = pthread_create(&waiter->thread, &attributes, waiter_main, waiter) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return waiter->has_thread;
}

/* Have a thread wait for these events one after the other, and wake the sleepers on `word` at each; whether one does. */
static int use_waiter_thread(void **events, int count, const void *word) {
    struct waiter_thread *chosen = NULL;
    void *context = NULL;
    int64_t now = monotonic_ns();
    if (count > 0) parking.get_context(&context);
    pthread_mutex_lock(&waiter_threads_lock);
    for (int index = 0; index < WAITER_THREADS; index++) {
        struct waiter_thread *waiter = &waiter_threads[index];
        if (waiter->count == 0) {
            if (chosen == NULL) chosen = waiter;
            continue;
        }
        int64_t took = now - waiter->since;
        if (took > SPINS_AFTER_NS && processor_ns(waiter->thread) - waiter->used > took / 2) driver_spins = 1;
        if (waiter->word == word) count = 0; /* that one is rung again if it does not know of all */
    }
    int is_taken = count > 0 && chosen != NULL && !driver_spins && (chosen->has_thread || start_thread(chosen));
    if (is_taken) {
        chosen->count = count < MOST_EVENTS ? count : MOST_EVENTS;
        memcpy(chosen->events, events, sizeof(void *) * (size_t)chosen->count);
        chosen->word = word;
        chosen->context = context;
        chosen->since = now;
        chosen->used = processor_ns(chosen->thread);
        __atomic_add_fetch(&chosen->asked, 1, __ATOMIC_RELEASE);
        wake_all(&chosen->asked, FUTEX_PRIVATE_FLAG);
    }
    pthread_mutex_unlock(&waiter_threads_lock);
    return is_taken;
}

/* Whether a thread is in the driver's wait for `event`, or will be: it may not be destroyed then. */
static int has_waiter_thread(void *event) {
    int found = 0;
    pthread_mutex_lock(&waiter_threads_lock);
    for (int index = 0; index < WAITER_THREADS; index++)
        for (int place = 0; place < waiter_threads[index].count; place++) found |= waiter_threads[index].events[place] == event;
    pthread_mutex_unlock(&waiter_threads_lock);
    return found;
}

static int waiter_threads_busy(void) {
    int count = 0;
    pthread_mutex_lock(&waiter_threads_lock);
    for (int index = 0; index < WAITER_THREADS; index++) count += waiter_threads[index].count != 0;
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

/* What those who wait for an event learn for the next time, in ns. Threads share it; what one overwrites is only forgotten. */
struct patience {
    int vain;                /* how often the first look was in vain: each time the next one is half as long */
    int rests, rest;         /* so many waits do not look; as many as that, after a look that was interrupted */
    int odd;                 /* so many in turn were far from the mean, or slept beyond their work's end */
    int count;               /* of waits that tell how long they last, up to MEAN_OF: */
    int64_t mean, deviation; /* the mean, and the mean distance from it */
    int64_t rung;            /* when the recorder was rung last */
    int64_t gap;             /* how long from then to the next time at least: it grows while that is in vain */
};

/* A wait that began `took` ago is over. `is_late`: its work may have been over before this one looked. */
static void learn(struct patience *patience, int64_t took, int is_late) {
    int64_t far = patience->count ? took - patience->mean : 0, least = 2 * patience->deviation + LATE_NS;
    if (patience->rests > 0) patience->rests--;
    else patience->rest /= 2; /* it looked in peace */
    if (took <= sleep_ns) patience->vain = 0;
    else if (took > sleep_ns + 2 * PAUSE_LEAST_NS && patience->vain < 30) patience->vain++;
    else if (patience->vain > 0) patience->vain--; /* a longer look might have paid */
    if (is_late && far > -least) far = -least;
    patience->odd = is_late || far > patience->mean / 4 ? patience->odd + 1 : 0;
    if (patience->odd == MOST_ODD) { /* work takes another time now: it is learned anew */
        patience->odd = patience->count = 0;
        return;
    }
    if (patience->count == 0) patience->mean = took, patience->deviation = 0;
    if (far > patience->mean / 4) far = patience->mean / 4; /* an exception counts for little */
    if (patience->count < MEAN_OF) patience->count++;
    patience->mean += far / patience->count;
    patience->deviation += ((far < 0 ? -far : far) - patience->deviation) / patience->count;
}

/* Others want the processor: the next waits do not look, the more of them the more often that comes. */
static void interrupt(struct patience *patience) {
    patience->rest = patience->rest < MOST_RESTS ? 2 * patience->rest + 1 : MOST_RESTS;
    patience->rests = patience->rest + 1; /* this one too */
}

/* How long after its begin a wait is to be over soon; 0: nobody knows. */
static int64_t soon_after(const struct patience *patience) {
    int64_t most = patience->mean / 20, margin = 2 * patience->deviation + LATE_NS;
    if (patience->count < KNOWN_AFTER || patience->deviation > most || patience->mean <= sleep_ns) return 0;
    return patience->mean - (margin < most ? margin : most);
}

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
    int64_t now = monotonic_ns(), soon = soon_after(patience);
    int64_t first = soon ? 0 : sleep_ns >> patience->vain; /* how long the first look lasts */
    int result = 0, mode = RELAXED, slack = 0, may_look = patience->rests <= 0, has_waited = 0, is_interrupted = 0;
    int is_relaxed = event != NULL && parking.exchange_mode(&mode) == 0;
    enum { LOOKED, PAUSED, SLEPT } turn = PAUSED;
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
        if (turn == LOOKED && now - last > LOOK_STALLED_NS) {
            interrupt(patience);
            may_look = 0;
        }
        int64_t took = now - began;
        int is_due = soon && took >= soon && took - soon < took / 10;
        turn = may_look && (took < first || is_due) ? LOOKED : took < soon ? SLEPT : PAUSED;
        if (turn == LOOKED) continue;
        int64_t pause = is_due ? 0 : took / 32;
        if (pause < PAUSE_LEAST_NS) pause = PAUSE_LEAST_NS;
        if (pause > PAUSE_MOST_NS) pause = PAUSE_MOST_NS;
        if (turn == SLEPT) {
            pause = soon - took;
        } else if (doorbell != NULL && took >= RING_AFTER_NS && now - patience->rung >= patience->gap) {
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
    if (result) patience->gap = 0;
    if (result && has_waited) learn(patience, monotonic_ns() - began, turn == SLEPT);
    return result;
}
