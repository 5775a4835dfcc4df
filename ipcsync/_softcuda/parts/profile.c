/* SPDX-License-Identifier: Apache-2.0 */
/* A real GPU's figures: what calls cost, and when work is over (IPCSYNC_HOST_PROFILE). */

/* Each stream has a clock: when its last operation is over, as the GPU would have it.  An operation begins when that one
 * is over and the launch has arrived, and is over by the clock, not by when its thread ran.  So nobody needs to run for
 * what only a driver's call sees: a record is taken as reached at once, with the time at which it will be complete, and
 * who looks compares that with his own clock.  What a CPU sees by itself, a word or a copy, is stored in time by the
 * stream's thread, which sleeps until shortly before. */
enum {
  GPU_NOTHING, GPU_RECORD_PLAIN, GPU_RECORD_TIMING, GPU_RECORD_IPC, GPU_RECORD_IMPORTED, GPU_WAIT_PLAIN, GPU_WAIT_IPC,
  GPU_WRITE_HOST, GPU_WRITE_DEVICE, GPU_WORD_HOST, GPU_WORD_DEVICE, GPU_COSTS
};
enum { PLAIN, TIMING, IPC, IMPORTED, SORTS }; /* of events */
struct profile {                 /* nanoseconds */
  const char *name;
  struct {                       /* what calls take */
    u32 record[SORTS], wait[SORTS], query[SORTS]; /* by the sort of event */
    u32 write_word, wait_word, batch_entry, query_stream, create, export, open, close;
    u32 graph, graph_part;       /* a launch, and more for each node that breaks it into parts */
  } call;
  u32 launch;                    /* from a call until an idle stream begins with it */
  struct { u32 gap, latency; } gpu[GPU_COSTS]; /* until the stream goes on, until others see it; of waits for words: met at once, met later */
  u32 cross_host, cross_device;  /* more for a wait for a word that another process's stream writes; 0 under MPS */
  u32 turn;                      /* a record of an interprocess event, where the last one was another process's; 0 under MPS */
  u32 late_blocking, late_spinning; /* a host's wait returns so late */
  u32 patience;                  /* unless it lasted less than this */
};
#include "../profiles/h100.h"
static const struct profile *const PROFILES[] = { &H100 };
static const struct profile *g_profile;  /* NULL: everything as fast as it goes */
static bool g_mps;
#define SPIN_NS 10000            /* the longest look without a pause */

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}
/* Sleep, and look without a pause at the end: a sleep ends some microseconds late. */
static void sleep_until(u64 until) {
  u64 now;
  while ((now = now_ns()) < until) {
    if (until - now <= SPIN_NS) continue;
    u64 at = until - SPIN_NS + 2000;
    struct timespec t = { (time_t)(at / 1000000000), (long)(at % 1000000000) };
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
  }
}

/* --- calls: PACE(what) in a function makes it take at least that long, up to its return --- */
static u32 g_pace_over;          /* what the pace itself takes beyond that: the clock, the return */
static u64 pace_until(u32 ns) { return ns ? now_ns() + ns - g_pace_over : 0; }
static inline void pace_end(const u64 *until) {
  if (unlikely(*until)) while (now_ns() < *until) { }
}
#define PACE_NS(ns) __attribute__((cleanup(pace_end), unused)) const u64 pace_ = unlikely(g_profile != NULL) ? pace_until(ns) : 0
static void pace_measure(void) { /* 0.2 ms; the least, since all else only adds */
  enum { EACH = 500, N = 50 };
  u64 least = UINT64_MAX;
  g_pace_over = 0;
  for (int i = 0; i < 8; i++) {
    u64 began = now_ns();
    for (int k = 0; k < N; k++) { const u64 until = pace_until(EACH); pace_end(&until); }
    u64 took = (now_ns() - began) / N;
    if (took < least) least = took;
  }
  g_pace_over = least < EACH + 100 ? (u32)(least - EACH) : 100;
}
#define PACE(what) PACE_NS(g_profile->call.what)

/* --- when a record is complete --- */
static u64 rec_time(u64 rec) {   /* of one whose position is reached; of an old one, when a later one is */
  u64 pos = REC_POS(rec), done = atomic_load(&S->stream[REC_SLOT(rec)].done) & POS_MASK;
  if (done >= pos + TIMES) pos = done + 1 - TIMES;
  return atomic_load_explicit(&S->times[REC_SLOT(rec)][pos % TIMES], memory_order_relaxed);
}
static bool rec_due(u64 rec) {
  if (likely(!g_profile)) return true;
  u64 t = rec_time(rec);
  return t <= t_clock || t <= now_ns();
}
static void stamp(u32 slot, u64 pos, u64 at) {
  if (g_profile) atomic_store_explicit(&S->times[slot][pos % TIMES], at, memory_order_relaxed);
}

/* A stream's thread looks for what it waits for without a pause, SPIN_NS at most, since a sleeper is woken later than a
 * GPU's stream goes on.  Where that was in vain (both threads on one core, or a long wait), fewer waits begin so. */
static __thread bool t_worker;   /* a stream's thread, in which host functions run too */
static __thread int t_skip, t_penalty;
static u64 spin_begin(void) {
  if (!g_profile || !t_worker) return 0;
  if (t_skip) { t_skip--; return 0; }
  return now_ns();
}
static bool spin_on(u64 began) {
  relax();
  return began && now_ns() - began < SPIN_NS;
}
static void spin_end(u64 began, bool paid) {
  if (!began) return;
  t_penalty = paid ? 0 : t_penalty >= 32 ? 64 : 2 * t_penalty + 1;
  t_skip = t_penalty;
}

/* Processes that record interprocess events share the GPU by turns.  A record that arrives before its process's turn begins
 * is part of it, else it needs a new one behind all others.  When it begins, which is not before `at`. */
static u64 turn_begin(int phys, u64 arrives, u64 at) {
  static _Atomic u64 mine[MAXDEV]; /* when this process's latest begins */
  if (g_mps) return at;
  for (;;) {
    u64 last = atomic_load(&S->turn[phys]), begins = atomic_load(&mine[phys]);
    if (arrives <= begins) return at > begins ? at : begins;
    if (TURN_SLOT(last) == g_me + 1) return at;
    if (last) begins = (TURN_AT(last) > at ? TURN_AT(last) : at) + g_profile->turn; else begins = at;
    if (!atomic_compare_exchange_strong(&S->turn[phys], &last, TURN(g_me + 1, begins))) continue;
    if (last) atomic_fetch_add(&S->turns, 1);
    atomic_store(&mine[phys], begins);
    return begins;
  }
}

/* A host's wait for what is over at `at` returns: late, if it had to sleep long. */
static void host_late(u64 began, u64 at, bool blocking) {
  if (at > began + g_profile->patience) at += blocking ? g_profile->late_blocking : g_profile->late_spinning;
  if (now_ns() >= at) return;
  int slack = prctl(PR_GET_TIMERSLACK);
  prctl(PR_SET_TIMERSLACK, 1);
  sleep_until(at);
  prctl(PR_SET_TIMERSLACK, slack);
}
