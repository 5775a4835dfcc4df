/* SPDX-License-Identifier: Apache-2.0 */
/* The state of this process: settings, clock, futexes, messages. */

static _Atomic int g_ready;              /* 0 not initialised, 1 ready, 2 forked child, 3 shut down */
static pthread_mutex_t g_init_mu = PTHREAD_MUTEX_INITIALIZER;
static struct sh *S;
static u32 g_me;                         /* my slot in S->proc */
static u64 g_inc;
static char g_dir[PATH_MAX - 256], g_base[200], g_path[PATH_MAX];
static ino_t g_ino;
static pthread_mutex_t g_lock_mu = PTHREAD_MUTEX_INITIALIZER;
static int g_ndev, g_dev[MAXDEV];        /* visible ordinal -> physical device */
static int g_nphys = 1, g_strict, g_async, g_version = 13000;
static int g_serial = 1, g_pending_slots;
static bool g_death_pending;             /* what the dead left pending stays pending, as I see it */
static long g_latency_us, g_capacity = 1024; /* operations that a stream takes in; 0: any number */
static bool g_poll = true;               /* look at words that streams wait for, not only when woken */
static u32 g_event_limit = 22000;
static u64 g_total_mem = 16ull << 30;
static _Atomic u32 g_my_events, g_slot_hint, g_event_hint;
static _Atomic u64 g_next_id = 16;
static _Atomic u64 g_seen[MAXPROC];      /* when I last looked whether that process lives (ns) */

static CUresult not_ready(void) {
  return atomic_load(&g_ready) == 3 ? E_DEINIT : E_NOTINIT;
}
#define CHK() do { if (unlikely(atomic_load_explicit(&g_ready, memory_order_relaxed) != 1)) return not_ready(); } while (0)

static __thread u64 t_clock;     /* when this thread last asked */
static u64 now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t_clock = (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}

static __thread char *t_said;            /* where the loader wants to have what is said, instead of on stderr */
static __thread size_t t_said_size;
static void say(const char *fmt, ...) {
  char b[512];
  va_list ap;
  if (t_said) {
    va_start(ap, fmt);
    vsnprintf(t_said, t_said_size, fmt, ap);
    va_end(ap);
    return;
  }
  int n = snprintf(b, sizeof b, "softcuda[%d]: ", (int)getpid());
  va_start(ap, fmt);
  n += vsnprintf(b + n, sizeof b - (size_t)n - 2, fmt, ap);
  va_end(ap);
  if (n > (int)sizeof b - 2) n = (int)sizeof b - 2;
  b[n++] = '\n';
  if (write(2, b, (size_t)n) < 0) { }
}

static void *must(void *p) {
  if (!p) { say("out of memory"); abort(); }
  return p;
}

static int futex_wait(_Atomic u32 *w, u32 seen, long timeout_ms) {
  struct timespec t = { timeout_ms / 1000, (timeout_ms % 1000) * 1000000 };
  return (int)syscall(SYS_futex, w, FUTEX_WAIT, seen, timeout_ms < 0 ? NULL : &t, NULL, 0);
}
static void futex_wake(_Atomic u32 *w) {
  syscall(SYS_futex, w, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
