/* SPDX-License-Identifier: Apache-2.0 */
/* simcuda - a stand-in for libcuda.so.1 that needs no GPU.  See README.md.
 *
 * Contexts, streams, events, IPC handles and plain memory of the CUDA driver API, with the
 * semantics that programs of several processes see.  No kernels, no modules; of graphs only the state
 * that stream capture leaves in streams and events.
 */
#define _GNU_SOURCE
#include "simcuda_shm.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext, *CUstream, *CUevent;
typedef unsigned long long CUdeviceptr;
typedef void (*CUhostFn)(void *);
typedef void (*CUstreamCallback)(CUstream, CUresult, void *);
typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcEventHandle;
typedef struct { char reserved[64]; } CUipcMemHandle;

#define API __attribute__((visibility("default"))) CUresult
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

enum {
  OK = 0, E_VALUE = 1, E_OOM = 2, E_NOTINIT = 3, E_DEINIT = 4, E_NODEV = 100, E_DEVICE = 101,
  E_CTX = 201, E_MAP = 205, E_LIMIT = 215, E_PEER = 217, E_OS = 304, E_HANDLE = 400, E_STATE = 401,
  E_NOTFOUND = 500, E_NOTREADY = 600, E_PEER_ON = 704, E_PEER_OFF = 705, E_CTXDEAD = 709,
  E_REGISTERED = 712, E_NOTREGISTERED = 713, E_NOSUP = 801, E_MISMATCH = 803,
  E_CAP_UNSUPPORTED = 900, E_CAP_INVALIDATED = 901, E_CAP_MERGE = 902, E_CAP_UNMATCHED = 903,
  E_CAP_ISOLATION = 905, E_CAP_IMPLICIT = 906, E_CAP_EVENT = 907, E_CAP_THREAD = 908
};

/* ------------------------------------------------------------------ process state */

static _Atomic int g_ready;              /* 0 not initialised, 1 ready, 2 forked child, 3 shut down */
static pthread_mutex_t g_init_mu = PTHREAD_MUTEX_INITIALIZER;
static struct sh *S;
static u32 g_me;                         /* my slot in S->proc */
static u64 g_inc;
static char g_dir[PATH_MAX - 256], g_base[200], g_path[PATH_MAX];
static ino_t g_ino;
static pthread_mutex_t g_lock_mu = PTHREAD_MUTEX_INITIALIZER;
static int g_ndev, g_dev[MAXDEV];        /* visible ordinal -> physical device */
static int g_nphys = 1, g_strict, g_async, g_p2p = 1, g_trace, g_version = 13000;
static bool g_death_pending;             /* what the dead left pending stays pending, as I see it */
static long g_latency_us;
static u32 g_event_limit = 22000;
static u64 g_total_mem = 16ull << 30;
static _Atomic u32 g_my_events, g_slot_hint, g_event_hint;
static _Atomic u64 g_next_id = 16;
static _Atomic u64 g_seen[MAXPROC];      /* when I last looked whether that process lives (ns) */

static CUresult not_ready(void) {
  return atomic_load(&g_ready) == 3 ? E_DEINIT : E_NOTINIT;
}
#define CHK() do { if (unlikely(atomic_load_explicit(&g_ready, memory_order_relaxed) != 1)) return not_ready(); } while (0)

static u64 now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}

static void say(const char *fmt, ...) {
  char b[512];
  va_list ap;
  int n = snprintf(b, sizeof b, "simcuda[%d]: ", (int)getpid());
  va_start(ap, fmt);
  n += vsnprintf(b + n, sizeof b - (size_t)n - 2, fmt, ap);
  va_end(ap);
  if (n > (int)sizeof b - 2) n = (int)sizeof b - 2;
  b[n++] = '\n';
  if (write(2, b, (size_t)n) < 0) { }
}

static int futex_wait(_Atomic u64 *w, u64 seen, long timeout_ms) {
  struct timespec t = { timeout_ms / 1000, (timeout_ms % 1000) * 1000000 };
  return (int)syscall(SYS_futex, (u32 *)w, FUTEX_WAIT, (u32)seen, timeout_ms < 0 ? NULL : &t, NULL, 0);
}
static void futex_wake(_Atomic u64 *w) {
  syscall(SYS_futex, (u32 *)w, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* ------------------------------------------------------------------ who lives */

/* 1 alive, 0 dead (a zombie is dead); *start gets the start time */
static int proc_stat(u32 pid, u64 *start) {
  char p[64], b[1024], *q;
  snprintf(p, sizeof p, "/proc/%u/stat", pid);
  int fd = open(p, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno != ENOENT && errno != ESRCH;
  ssize_t n = read(fd, b, sizeof b - 1);
  close(fd);
  if (n <= 0) return 0;
  b[n] = 0;
  if (!(q = strrchr(b, ')'))) return 1;
  q += 2;
  char st = *q;
  unsigned long long val = 0, threads = 0;
  for (int f = 3; f <= 22; f++) {
    if (f == 20) threads = strtoull(q, NULL, 10);
    if (f == 22) val = strtoull(q, NULL, 10);
    q = strchr(q, ' ');
    if (!q) break;
    q++;
  }
  if (start) *start = val;
  if ((st == 'Z' || st == 'X') && threads <= 1) return 0;
  return 1;
}
static int proc_alive(u32 pid, u64 start) {
  u64 s = 0;
  if (!proc_stat(pid, &s)) return 0;
  return s == 0 || s == start;
}

static void unlock_fd(int fd) { /* not by close() alone: a fork may share the open file */
  flock(fd, LOCK_UN);
  close(fd);
}
/* The lock of a segment is flock() on its control file, opened afresh each time: it falls with
 * its holder, and a fork or a closed descriptor cannot confuse it. */
static int ctl_lock(bool nb) {
  pthread_mutex_lock(&g_lock_mu);
  int fd = open(g_path, O_RDWR | O_CLOEXEC);
  if (fd >= 0) {
    int r;
    do r = flock(fd, LOCK_EX | (nb ? LOCK_NB : 0)); while (r < 0 && errno == EINTR);
    struct stat st;
    if (r == 0 && fstat(fd, &st) == 0 && st.st_ino == g_ino && st.st_nlink > 0) return fd;
    if (r == 0) unlock_fd(fd); else close(fd);
  }
  pthread_mutex_unlock(&g_lock_mu);
  return -1;
}
static void ctl_unlock(int fd) {
  unlock_fd(fd);
  pthread_mutex_unlock(&g_lock_mu);
}

static void unlink_prefix(const char *dir, const char *prefix) {
  DIR *d = opendir(dir);
  if (!d) return;
  struct dirent *e;
  size_t n = strlen(prefix);
  while ((e = readdir(d)))
    if (!strncmp(e->d_name, prefix, n)) unlinkat(dirfd(d), e->d_name, 0);
  closedir(d);
}

static void raise_mark(_Atomic u32 *w, u32 v) {
  u32 h = atomic_load(w);
  while (h < v && !atomic_compare_exchange_weak(w, &h, v)) { }
}

static void complete(u32 slot, u64 pos) {
  struct sh_stream *s = &S->stream[slot];
  u64 d = atomic_load(&s->done);
  while (d < pos && !atomic_compare_exchange_weak(&s->done, &d, pos)) { }
  if (atomic_load(&s->waiters)) futex_wake(&s->done);
}

/* The owner of the slot is dead or leaving: what is not done by now never will be.  Each process that
 * looks decides by its own SIMCUDA_DEATH whether that counts as complete, so the range is kept.  No
 * answer goes from complete back to pending on the way: DONE_DEAD stops the threads of one who is
 * leaving before the range is taken, and whoever finds the bit set goes on from there. */
static void abandon(u32 slot) {
  struct sh_stream *s = &S->stream[slot];
  u64 d = atomic_fetch_or(&s->done, DONE_DEAD) & POS_MASK, t = atomic_load(&s->tail);
  if (d < t) {
    atomic_store(&s->lost_from, d);
    atomic_store(&s->lost_to, t);
    d = t + 1; /* the next stream of the slot starts outside the range */
    atomic_store(&s->tail, d);
  }
  atomic_store(&s->done, d);
  futex_wake(&s->done);
}

/* Free the slot if neither an exporter nor an importer has it.  Whoever drops his share calls this
 * afterwards, so the last one does it; the generation in the word keeps a slow caller off its next use. */
static void event_try_free(u32 slot) {
  struct sh_event *e = &S->event[slot];
  u32 w = atomic_load(&e->word);
  if ((w & 3) != EV_USED || atomic_load(&e->owner)) return;
  for (int i = 0; i < MAXPROC / 64; i++)
    if (atomic_load(&e->importers[i])) return;
  atomic_compare_exchange_strong(&e->word, &w, (w & ~3u) | EV_FREE);
}

/* Give back everything that process slot pi holds.  Caller has the file lock and knows that the
 * process is dead or leaving (or is me).  Its pending records are abandoned. */
static void release_proc(u32 pi) {
  struct sh_proc *p = &S->proc[pi];
  u32 hi = atomic_load(&S->event_hi);
  u64 bit = 1ull << (pi % 64);
  for (u32 i = 0; i < hi; i++) {
    struct sh_event *e = &S->event[i];
    u32 w = atomic_load_explicit(&e->word, memory_order_relaxed), me = pi + 1;
    if ((w & 3) == EV_FREE) continue;
    bool touched = false;
    if ((w & 3) == EV_INIT && atomic_load(&e->owner) == me) atomic_store(&e->word, (w & ~3u) | EV_USED);
    if (atomic_load(&e->owner) == me) { atomic_compare_exchange_strong(&e->owner, &me, 0); touched = true; }
    if (atomic_load(&e->importers[pi / 64]) & bit) { atomic_fetch_and(&e->importers[pi / 64], ~bit); touched = true; }
    if (touched) event_try_free(i);
  }
  hi = atomic_load(&S->stream_hi);
  for (u32 i = 0; i < hi; i++) {
    struct sh_stream *s = &S->stream[i];
    if (atomic_load_explicit(&s->owner, memory_order_relaxed) != pi + 1) continue;
    abandon(i);
    atomic_store(&s->owner, 0);
  }
  char pre[300];
  snprintf(pre, sizeof pre, "%s.m.%u.%llu.", g_base, pi, (unsigned long long)p->inc);
  unlink_prefix(g_dir, pre);
  for (int d = 0; d < MAXDEV; d++) atomic_store(&p->used[d], 0);
  p->pid = 0;
  atomic_store(&p->state, 0);
}

static bool proc_dead(u32 pi) {
  struct sh_proc *p = &S->proc[pi];
  return atomic_load(&p->state) == 1 && !proc_alive(p->pid, p->start);
}

/* Look, at most every `every_ms`, whether process slot pi lives; clean up after it if not. */
static void check_proc(u32 pi, u64 every_ms) {
  if (pi >= MAXPROC || pi == g_me) return;
  u64 t = now_ns(), seen = atomic_load_explicit(&g_seen[pi], memory_order_relaxed);
  if (t - seen < every_ms * 1000000ull) return;
  atomic_store_explicit(&g_seen[pi], t, memory_order_relaxed);
  if (!proc_dead(pi)) return;
  int fd = ctl_lock(true);
  if (fd < 0) return; /* somebody is at it */
  if (proc_dead(pi)) release_proc(pi);
  ctl_unlock(fd);
}

/* will never be complete, as this process sees it */
static bool rec_lost(u64 rec) {
  struct sh_stream *s = &S->stream[REC_SLOT(rec)];
  return g_death_pending && REC_POS(rec) > atomic_load(&s->lost_from) && REC_POS(rec) <= atomic_load(&s->lost_to);
}
static inline bool rec_done(u64 rec) {
  u64 d = atomic_load(&S->stream[REC_SLOT(rec)].done);
  if (likely(!g_death_pending)) return d >= REC_POS(rec);
  return (d & POS_MASK) >= REC_POS(rec) && !rec_lost(rec);
}
/* as rec_done, but notices now and then that the process that must complete it is dead */
static bool rec_poll(u64 rec) {
  if (rec_done(rec)) return true;
  u32 o = atomic_load(&S->stream[REC_SLOT(rec)].owner);
  if (o && o != g_me + 1) check_proc(o - 1, 5);
  return rec_done(rec);
}
static void rec_wait(u64 rec) {
  struct sh_stream *s = &S->stream[REC_SLOT(rec)];
  if (rec_done(rec)) return;
  atomic_fetch_add(&s->waiters, 1);
  for (;;) {
    u64 d = atomic_load(&s->done);
    if (rec_done(rec)) break;
    u32 o = atomic_load(&s->owner);
    bool mine = o == g_me + 1;
    int r = futex_wait(&s->done, d, mine || rec_lost(rec) ? -1 : 50);
    if (!mine && r < 0 && errno == ETIMEDOUT) {
      if (o) check_proc(o - 1, 20);
      else if (!g_death_pending) break; /* nobody is left who could complete it */
    }
  }
  atomic_fetch_sub(&s->waiters, 1);
}

/* ------------------------------------------------------------------ objects and handles */

enum { K_CTX = 1, K_STREAM = 2, K_EVENT = 3, K_GRAPH = 4 };
struct hdr {
  _Atomic u64 handle;            /* 0 while the object is not in use */
  u32 idx, gen;
  struct hdr *next;
};
#define CHUNK 1024
struct pool {
  pthread_mutex_t mu;
  struct hdr **_Atomic chunk[1024];
  u32 n, kind;
  size_t size;
  struct hdr *free;
};

struct alloc;
struct trec { _Atomic int refs; _Atomic u64 t; };   /* time of one record */
struct stream;
struct ctx {
  struct hdr h;
  int dev;                       /* visible ordinal */
  bool primary;
  _Atomic int active;
  int refs;
  unsigned flags;
  u64 id;
  pthread_mutex_t mu;
  struct stream *streams;        /* all that are not destroyed */
  _Atomic(struct stream *) legacy, all; /* all: where a record of everything is taken on */
  u64 *gone;                     /* last records of streams that were destroyed before they were done */
  int ngone, cgone;
  u32 peers;
  size_t limit[8];
  int cache_config;
};
enum { ST_USER, ST_LEGACY, ST_THREAD, ST_ALL };
enum { OP_NOP, OP_WAIT, OP_HOST, OP_CALLBACK, OP_COPY, OP_SET, OP_WRITE, OP_WAITVAL, OP_FREE };
struct op {
  struct op *next;
  u64 pos;
  int type, width;
  unsigned flags;
  union { u64 rec; CUhostFn fn; CUstreamCallback cb; void *dst; };
  union { const void *src; void *data; u64 val; };
  size_t n;
  void *stage;                   /* copy of pageable memory, freed afterwards */
  struct alloc *a, *b;           /* allocations held while the operation is queued */
  struct trec *tr;
};
struct stream {
  struct hdr h;
  struct ctx *ctx;
  struct stream *prev, *nxt;     /* in ctx->streams */
  unsigned flags;
  int prio, kind;
  u64 id;
  u32 slot;
  pthread_mutex_t mu;
  pthread_cond_t cv;
  struct op *head, *tail;        /* the operation being executed stays at the head */
  bool worker, dead;
  u64 pub;                       /* handle that callbacks see */
  struct capture *cap;           /* that it takes part in; under g_cap_mu, as cap_next */
  struct stream *cap_next;
};
struct event {
  struct hdr h;
  struct ctx *ctx;
  unsigned flags;
  _Atomic u64 own;               /* latest record of an event that is not interprocess */
  _Atomic u64 *latest;
  int shslot;
  bool imported;
  _Atomic u64 cap;               /* id of the capture in which this handle was last recorded, 0 none */
  pthread_mutex_t mu;
  struct trec *tr;
};
struct graph { struct hdr h; bool capturing; };

static struct pool g_ctxs = { PTHREAD_MUTEX_INITIALIZER, {0}, 0, K_CTX, sizeof(struct ctx), NULL };
static struct pool g_streams = { PTHREAD_MUTEX_INITIALIZER, {0}, 0, K_STREAM, sizeof(struct stream), NULL };
static struct pool g_events = { PTHREAD_MUTEX_INITIALIZER, {0}, 0, K_EVENT, sizeof(struct event), NULL };
static struct pool g_graphs = { PTHREAD_MUTEX_INITIALIZER, {0}, 0, K_GRAPH, sizeof(struct graph), NULL };

/* objects are used again but never unmapped, so a stale handle is found out, not followed */
static void *obj_new(struct pool *p) {
  pthread_mutex_lock(&p->mu);
  struct hdr *h = p->free;
  if (h) {
    p->free = h->next;
  } else {
    u32 c = p->n / CHUNK;
    if (c >= 1024) { pthread_mutex_unlock(&p->mu); return NULL; }
    if (!atomic_load(&p->chunk[c])) atomic_store(&p->chunk[c], calloc(CHUNK, sizeof(struct hdr *)));
    h = calloc(1, p->size);
    if (!h || !p->chunk[c]) { pthread_mutex_unlock(&p->mu); return NULL; }
    h->idx = p->n++;
    atomic_load(&p->chunk[c])[h->idx % CHUNK] = h;
    if (p->kind == K_CTX) pthread_mutex_init(&((struct ctx *)h)->mu, NULL);
    if (p->kind == K_EVENT) pthread_mutex_init(&((struct event *)h)->mu, NULL);
    if (p->kind == K_STREAM) {
      pthread_condattr_t ca;
      pthread_condattr_init(&ca);
      pthread_condattr_setclock(&ca, CLOCK_MONOTONIC);
      pthread_mutex_init(&((struct stream *)h)->mu, NULL);
      pthread_cond_init(&((struct stream *)h)->cv, &ca);
    }
  }
  pthread_mutex_unlock(&p->mu);
  return h;
}
static u64 obj_publish(struct pool *p, void *o) {
  struct hdr *h = o;
  h->gen = (h->gen + 1) & 0xfffff;
  u64 v = 5ull << 56 | (u64)p->kind << 52 | (u64)h->gen << 28 | (u64)h->idx << 4;
  atomic_store(&h->handle, v);
  return v;
}
static void obj_recycle(struct pool *p, void *o) {
  struct hdr *h = o;
  atomic_store(&h->handle, 0);
  pthread_mutex_lock(&p->mu);
  h->next = p->free;
  p->free = h;
  pthread_mutex_unlock(&p->mu);
}
static void *obj_get(struct pool *p, void *handle) {
  u64 v = (u64)(uintptr_t)handle;
  if ((v >> 52) != (5ull << 4 | p->kind) || (v & 15)) return NULL;
  u32 i = (u32)(v >> 4) & 0xffffff;
  if (i >= 1024 * CHUNK) return NULL;
  struct hdr **c = atomic_load_explicit(&p->chunk[i / CHUNK], memory_order_acquire);
  struct hdr *h = c ? c[i % CHUNK] : NULL;
  return h && atomic_load_explicit(&h->handle, memory_order_acquire) == v ? h : NULL;
}
#define H(o) ((void *)(uintptr_t)atomic_load(&(o)->h.handle))

static __thread void *t_stack[256];
static __thread int t_depth;
static __thread int t_capture_mode;
static struct ctx *g_primary[MAXDEV];
static pthread_mutex_t g_primary_mu = PTHREAD_MUTEX_INITIALIZER;

static CUresult cur_ctx(struct ctx **out) {
  if (!t_depth) return E_CTX;
  struct ctx *c = obj_get(&g_ctxs, t_stack[t_depth - 1]);
  if (!c || !atomic_load(&c->active)) return E_CTXDEAD;
  *out = c;
  return OK;
}

/* ------------------------------------------------------------------ memory */

enum { A_DEV, A_IPC, A_HOST, A_REG };
struct alloc {
  uintptr_t base;
  size_t size, maplen;
  int kind, dev, phys;
  unsigned flags;
  void *ctx;
  u64 id, seq;
  int ipc_refs;
  struct ipc_handle ipc;         /* of an imported allocation */
  _Atomic int refs;              /* 1 for being registered, 1 for each queued operation */
};
static pthread_rwlock_t g_mem = PTHREAD_RWLOCK_INITIALIZER;
static struct alloc **g_allocs;  /* by address */
static size_t g_nallocs, g_callocs;
static _Atomic u64 g_mem_seq;

static size_t mem_pos(uintptr_t p) { /* number of allocations with base <= p */
  size_t lo = 0, hi = g_nallocs;
  while (lo < hi) {
    size_t m = (lo + hi) / 2;
    if (g_allocs[m]->base <= p) lo = m + 1; else hi = m;
  }
  return lo;
}
static struct alloc *mem_find_locked(uintptr_t p, size_t n) {
  size_t i = mem_pos(p);
  if (!i) return NULL;
  struct alloc *a = g_allocs[i - 1];
  return p - a->base < a->size && n <= a->size - (p - a->base) ? a : NULL;
}
static struct alloc *mem_hold(uintptr_t p, size_t n) {
  pthread_rwlock_rdlock(&g_mem);
  struct alloc *a = mem_find_locked(p, n ? n : 1);
  if (a) atomic_fetch_add(&a->refs, 1);
  pthread_rwlock_unlock(&g_mem);
  return a;
}
static void mem_drop(struct alloc *a) {
  if (!a || atomic_fetch_sub(&a->refs, 1) != 1) return;
  if (a->maplen) munmap((void *)a->base, a->maplen);
  free(a);
}
static bool mem_add(struct alloc *a) {
  atomic_store(&a->refs, 1);
  a->id = atomic_fetch_add(&g_next_id, 1);
  pthread_rwlock_wrlock(&g_mem);
  if (g_nallocs == g_callocs) {
    size_t c = g_callocs ? g_callocs * 2 : 64;
    void *n = realloc(g_allocs, c * sizeof *g_allocs);
    if (!n) { pthread_rwlock_unlock(&g_mem); return false; }
    g_allocs = n;
    g_callocs = c;
  }
  size_t i = mem_pos(a->base);
  memmove(g_allocs + i + 1, g_allocs + i, (g_nallocs - i) * sizeof *g_allocs);
  g_allocs[i] = a;
  g_nallocs++;
  pthread_rwlock_unlock(&g_mem);
  return true;
}
static void mem_remove_locked(size_t i) {
  memmove(g_allocs + i, g_allocs + i + 1, (g_nallocs - i - 1) * sizeof *g_allocs);
  g_nallocs--;
}
/* take the allocation that starts at p and is of kind k out of the table */
static struct alloc *mem_take(uintptr_t p, int k) {
  pthread_rwlock_wrlock(&g_mem);
  size_t i = mem_pos(p);
  struct alloc *a = i ? g_allocs[i - 1] : NULL;
  if (a && a->base == p && a->kind == k) mem_remove_locked(i - 1); else a = NULL;
  pthread_rwlock_unlock(&g_mem);
  return a;
}
static void mem_name(char *b, size_t n, u32 proc, u64 inc, u64 seq) {
  snprintf(b, n, "%s/%s.m.%u.%llu.%llu", g_dir, g_base, proc, (unsigned long long)inc, (unsigned long long)seq);
}
static u64 mem_used(int phys) {
  u64 u = 0;
  for (u32 i = 0, hi = atomic_load(&S->proc_hi); i < hi; i++) u += atomic_load(&S->proc[i].used[phys]);
  return u;
}
static void mem_release(struct alloc *a) { /* of kind A_DEV, already out of the table */
  char f[PATH_MAX + 64];
  mem_name(f, sizeof f, g_me, g_inc, a->seq);
  unlink(f);
  atomic_fetch_sub(&S->proc[g_me].used[a->phys], a->maplen);
  mem_drop(a);
}
static CUresult mem_alloc(struct ctx *c, size_t n, CUdeviceptr *out) {
  size_t len = (n + 4095) & ~(size_t)4095;
  int phys = g_dev[c->dev];
  if (len < n) return E_OOM;
  atomic_fetch_add(&S->proc[g_me].used[phys], len);
  struct alloc *a = NULL;
  struct statvfs vfs;
  void *m = MAP_FAILED;
  u64 seq = atomic_fetch_add(&g_mem_seq, 1);
  char f[PATH_MAX + 64];
  mem_name(f, sizeof f, g_me, g_inc, seq);
  if (mem_used(phys) > g_total_mem) goto oom;
  if (statvfs(g_dir, &vfs) == 0 && (u64)vfs.f_bavail * vfs.f_frsize < len) goto oom;
  if (!(a = calloc(1, sizeof *a))) goto oom;
  int fd = open(f, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) goto oom;
  if (ftruncate(fd, (off_t)len) == 0) m = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  close(fd);
  if (m == MAP_FAILED) { unlink(f); goto oom; }
  *a = (struct alloc){ .base = (uintptr_t)m, .size = n, .maplen = len, .kind = A_DEV, .dev = c->dev,
                       .phys = phys, .ctx = H(c), .seq = seq };
  mem_add(a);
  *out = (CUdeviceptr)(uintptr_t)m;
  return OK;
oom:
  free(a);
  atomic_fetch_sub(&S->proc[g_me].used[phys], len);
  return E_OOM;
}

/* ------------------------------------------------------------------ stream capture */

/* Only the state of it: an operation on a capturing stream is counted and dropped.  A capture is what runs
 * from cuStreamBeginCapture to cuStreamEndCapture; what breaks its rules invalidates it ("broken"). */
enum { CAP_GLOBAL, CAP_THREAD_LOCAL, CAP_RELAXED };
struct capture {
  struct capture *next;
  u64 id, thread;                /* thread: self() of the one that began it */
  int mode;
  bool broken;
  struct stream *origin, *members; /* members: the origin and the streams that forked from it, by cap_next */
  struct graph *graph;
};
static pthread_mutex_t g_cap_mu = PTHREAD_MUTEX_INITIALIZER; /* innermost but for those of the pools */
static struct capture *g_caps;
static _Atomic u32 g_ncaps;
static _Atomic u64 g_captured;   /* operations that were captured, for simcudaStat */
#define CAPTURES unlikely(atomic_load_explicit(&g_ncaps, memory_order_relaxed))

static u64 self(void) { /* a number that no later thread gets */
  static __thread u64 t;
  if (!t) t = atomic_fetch_add(&g_next_id, 1);
  return t;
}
static struct capture *cap_find_locked(u64 id) {
  struct capture *c = g_caps;
  while (c && c->id != id) c = c->next;
  return c;
}
/* The legacy stream cannot be used while a blocking stream of its context captures. */
static CUresult cap_implicit_locked(struct stream *s, bool breaks) {
  CUresult r = OK;
  if (s->kind != ST_LEGACY) return OK;
  for (struct capture *c = g_caps; c; c = c->next)
    for (struct stream *m = c->members; m; m = m->cap_next)
      if (m->ctx == s->ctx && !(m->flags & 1)) { r = E_CAP_IMPLICIT; if (breaks) c->broken = true; }
  return r;
}
static CUresult cap_unsafe_locked(void) {
  CUresult r = OK;
  if (t_capture_mode == CAP_RELAXED) return OK;
  for (struct capture *c = g_caps; c; c = c->next)
    if (c->thread == self() ? c->mode != CAP_RELAXED : c->mode == CAP_GLOBAL && t_capture_mode == CAP_GLOBAL) {
      r = E_CAP_UNSUPPORTED;
      c->broken = true;
    }
  return r;
}

/* May the calling thread make a potentially unsafe call?  If not: the captures that forbid it are
 * invalidated.  The same with the three functions below. */
static CUresult cap_unsafe(void) {
  if (!CAPTURES) return OK;
  pthread_mutex_lock(&g_cap_mu);
  CUresult r = cap_unsafe_locked();
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}
#define UNSAFE() do { CUresult u_ = cap_unsafe(); if (u_) return u_; } while (0)

/* query the stream, the context, the event, or wait for it? */
static CUresult cap_stream(struct stream *s) {
  if (!CAPTURES) return OK;
  pthread_mutex_lock(&g_cap_mu);
  CUresult r;
  if (s->cap) {
    r = s->cap->broken ? E_CAP_INVALIDATED : E_CAP_UNSUPPORTED;
    s->cap->broken = true;
  } else if (!(r = cap_implicit_locked(s, true))) {
    r = cap_unsafe_locked();
  }
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}
static CUresult cap_ctx(struct ctx *x) {
  if (!CAPTURES) return OK;
  CUresult r = OK;
  pthread_mutex_lock(&g_cap_mu);
  for (struct capture *c = g_caps; c; c = c->next)
    for (struct stream *m = c->members; m; m = m->cap_next)
      if (m->ctx == x) { r = E_CAP_UNSUPPORTED; c->broken = true; }
  if (!r) r = cap_unsafe_locked();
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}
static CUresult cap_event(struct event *e) {
  u64 id = atomic_load_explicit(&e->cap, memory_order_relaxed);
  if (likely(!id) && !CAPTURES) return OK;
  pthread_mutex_lock(&g_cap_mu);
  struct capture *c = cap_find_locked(id);
  if (c) c->broken = true;
  CUresult r = id ? E_CAP_EVENT : cap_unsafe_locked();
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}

/* What becomes of an operation on s: executed (-1), or captured or refused, then the result of the call.
 * ev is the event that it records. */
static int cap_op(struct stream *s, bool supported, struct event *ev) {
  if (!CAPTURES) return -1;
  pthread_mutex_lock(&g_cap_mu);
  struct capture *c = s->cap;
  int r = OK;
  if (!c) {
    if (!(r = cap_implicit_locked(s, true))) r = -1;
  } else if (c->broken) {
    r = E_CAP_INVALIDATED;
  } else if (!supported) {
    r = E_CAP_UNSUPPORTED;
    c->broken = true;
  } else {
    atomic_fetch_add(&g_captured, 1);
    if (ev) atomic_store(&ev->cap, c->id);
  }
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}
/* The same of a wait of s for e.  A stream that waits for a captured event joins its capture. */
static int cap_wait(struct stream *s, struct event *e, bool external) {
  u64 id = atomic_load_explicit(&e->cap, memory_order_relaxed);
  if (likely(!id) && !CAPTURES) return external ? E_VALUE : -1;
  pthread_mutex_lock(&g_cap_mu);
  struct capture *c = s->cap, *x = cap_find_locked(id);
  int r = cap_implicit_locked(s, true);
  if (r) goto out;
  if (!c && (external || !id)) {
    r = external ? E_VALUE : -1;
  } else if (c ? c->broken : !x || x->broken) {
    r = c ? E_CAP_INVALIDATED : E_VALUE;
  } else if (!c && s->kind == ST_LEGACY) {
    r = E_CAP_UNSUPPORTED;
    x->broken = true;
  } else if (c && c != x && !external && (id || atomic_load(e->latest))) {
    r = id ? E_CAP_MERGE : E_CAP_ISOLATION;
    c->broken = true;
    if (x) x->broken = true;
  } else {
    atomic_fetch_add(&g_captured, 1);
    if (!c) { s->cap = x; s->cap_next = x->members; x->members = s; }
  }
out:
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}
static bool cap_in(struct stream *s) {
  if (!CAPTURES) return false;
  pthread_mutex_lock(&g_cap_mu);
  bool in = s->cap;
  pthread_mutex_unlock(&g_cap_mu);
  return in;
}

static CUresult cap_begin(struct stream *s, int mode) {
  if (mode < CAP_GLOBAL || mode > CAP_RELAXED) return E_VALUE;
  if (s->kind == ST_LEGACY) return E_CAP_UNSUPPORTED;
  struct capture *c = calloc(1, sizeof *c);
  struct graph *g = c ? obj_new(&g_graphs) : NULL;
  if (!g) { free(c); return E_OOM; }
  pthread_mutex_lock(&g_cap_mu);
  if (s->cap) {
    pthread_mutex_unlock(&g_cap_mu);
    obj_recycle(&g_graphs, g);
    free(c);
    return E_STATE;
  }
  g->capturing = true;
  obj_publish(&g_graphs, g);
  *c = (struct capture){ g_caps, atomic_fetch_add(&g_next_id, 1), self(), mode, false, s, s, g };
  s->cap = c;
  s->cap_next = NULL;
  g_caps = c;
  atomic_fetch_add(&g_ncaps, 1);
  pthread_mutex_unlock(&g_cap_mu);
  return OK;
}
static CUresult cap_end_locked(struct capture *c, void **graph) {
  CUresult r = c->broken ? E_CAP_INVALIDATED : OK;
  struct capture **p = &g_caps;
  while (*p != c) p = &(*p)->next;
  *p = c->next;
  for (struct stream *m = c->members; m; m = m->cap_next) m->cap = NULL;
  c->graph->capturing = false;
  if (graph && !r) *graph = H(c->graph); else obj_recycle(&g_graphs, c->graph);
  free(c);
  atomic_fetch_sub(&g_ncaps, 1);
  return r;
}
static CUresult cap_end(struct stream *s, void **graph) {
  pthread_mutex_lock(&g_cap_mu);
  struct capture *c = s->cap;
  CUresult r = !c ? E_STATE : c->origin != s ? E_CAP_UNMATCHED
    : c->mode != CAP_RELAXED && c->thread != self() ? E_CAP_THREAD : cap_end_locked(c, graph);
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}
/* s is destroyed: with the origin its capture ends, a forked stream just leaves */
static void cap_leave(struct stream *s) {
  if (!CAPTURES) return;
  pthread_mutex_lock(&g_cap_mu);
  struct capture *c = s->cap;
  if (c && c->origin == s) {
    cap_end_locked(c, NULL);
  } else if (c) {
    struct stream **p = &c->members;
    while (*p != s) p = &(*p)->cap_next;
    *p = s->cap_next;
    s->cap = NULL;
  }
  pthread_mutex_unlock(&g_cap_mu);
}
static CUresult cap_info(struct stream *s, int *st, u64 *id, void **graph) {
  CUresult r = OK;
  if (!CAPTURES) return OK;
  pthread_mutex_lock(&g_cap_mu);
  struct capture *c = s->cap;
  if (!c) r = cap_implicit_locked(s, false);
  else *st = c->broken ? 2 : 1;
  if (c && !c->broken && id) *id = c->id;
  if (c && !c->broken && graph) *graph = H(c->graph);
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}

/* ------------------------------------------------------------------ streams */

static void trec_drop(struct trec *t) { if (t && atomic_fetch_sub(&t->refs, 1) == 1) free(t); }

static void op_drop(struct op *o) {
  if (o->stage) free(o->stage);
  mem_drop(o->a);
  mem_drop(o->b);
}
static void run_op(struct op *o, struct stream *s) {
  switch (o->type) {
  case OP_WAIT: rec_wait(o->rec); break;
  case OP_HOST: o->fn(o->data); break;
  case OP_CALLBACK: o->cb((CUstream)(uintptr_t)s->pub, OK, o->data); break;
  case OP_COPY: memmove(o->dst, o->stage ? o->stage : o->src, o->n); break;
  case OP_SET:
    if (o->width == 1) memset(o->dst, (int)o->val, o->n);
    else if (o->width == 2) for (size_t i = 0; i < o->n; i++) ((uint16_t *)o->dst)[i] = (uint16_t)o->val;
    else for (size_t i = 0; i < o->n; i++) ((u32 *)o->dst)[i] = (u32)o->val;
    break;
  case OP_WRITE:
    if (o->width == 4) atomic_store((_Atomic u32 *)o->dst, (u32)o->val);
    else atomic_store((_Atomic u64 *)o->dst, o->val);
    break;
  case OP_WAITVAL: {
    /* a plain store of a CPU wakes nobody, so this one kind of wait has to look again and again */
    long us = 10;
    for (;;) {
      u64 v;
      bool hit;
      if (o->width == 4) {
        u32 x = atomic_load((_Atomic u32 *)o->dst), y = (u32)o->val;
        v = x;
        hit = (o->flags & 3) == 0 ? (int32_t)(x - y) >= 0 : (o->flags & 3) == 1 ? x == y
            : (o->flags & 3) == 2 ? (x & y) != 0 : (u32)~(x | y) != 0;
      } else {
        u64 y = o->val;
        v = atomic_load((_Atomic u64 *)o->dst);
        hit = (o->flags & 3) == 0 ? (int64_t)(v - y) >= 0 : (o->flags & 3) == 1 ? v == y
            : (o->flags & 3) == 2 ? (v & y) != 0 : ~(v | y) != 0;
      }
      if (hit) break;
      struct timespec t = { 0, us * 1000 };
      nanosleep(&t, NULL);
      if (us < 1000) us *= 2;
    }
    break;
  }
  case OP_FREE: mem_release(o->data); break;
  }
  if (g_latency_us) {
    struct timespec t = { g_latency_us / 1000000, (g_latency_us % 1000000) * 1000 };
    nanosleep(&t, NULL);
  }
  if (o->tr) { atomic_store(&o->tr->t, now_ns()); trec_drop(o->tr); }
  op_drop(o);
}

static bool op_quick(const struct op *o) {
  switch (o->type) {
  case OP_HOST: case OP_CALLBACK: return false;
  case OP_WAIT: return rec_done(o->rec);
  case OP_WAITVAL: return false;
  case OP_COPY: return o->n <= 1 << 20;
  case OP_SET: return o->n <= 1 << 20;
  }
  return true;
}

static void stream_free(struct stream *s) { /* dead and drained */
  atomic_store(&S->stream[s->slot].owner, 0);
  obj_recycle(&g_streams, s);
}

static void *worker(void *arg) {
  struct stream *s = arg;
  pthread_mutex_lock(&s->mu);
  for (;;) {
    while (!s->head) {
      if (s->dead) { s->worker = false; pthread_mutex_unlock(&s->mu); stream_free(s); return NULL; }
      struct timespec t;
      clock_gettime(CLOCK_MONOTONIC, &t);
      t.tv_sec += 3;
      if (pthread_cond_timedwait(&s->cv, &s->mu, &t) == ETIMEDOUT && !s->head && !s->dead) {
        s->worker = false; /* idle: the next operation that needs a thread starts one */
        pthread_mutex_unlock(&s->mu);
        return NULL;
      }
    }
    struct op *o = s->head;
    pthread_mutex_unlock(&s->mu);
    run_op(o, s);
    pthread_mutex_lock(&s->mu);
    s->head = o->next;
    if (!s->head) s->tail = NULL;
    complete(s->slot, o->pos);
    free(o);
  }
}

static void stream_push(struct stream *s, const struct op *t, u64 pos) {
  struct op *o = malloc(sizeof *o);
  if (!o) abort();
  *o = *t;
  o->pos = pos;
  o->next = NULL;
  if (s->tail) s->tail->next = o; else s->head = o;
  s->tail = o;
  if (s->worker) {
    if (s->head == o) pthread_cond_signal(&s->cv);
  } else {
    pthread_t th;
    pthread_attr_t at;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pthread_attr_init(&at);
    pthread_attr_setdetachstate(&at, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&at, 2 << 20);
    for (int i = 0; pthread_create(&th, &at, worker, s); i++) {
      if (i > 1000) { say("cannot start a stream's thread: %s", strerror(errno)); abort(); }
      usleep(10000);
    }
    pthread_attr_destroy(&at);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    s->worker = true;
  }
}

static u64 stream_tail(struct stream *s) { return REC(s->slot, atomic_load(&S->stream[s->slot].tail)); }

static void add_record(u64 **v, int *n, int *cap, u64 r) {
  if (*n == *cap) { *cap = *cap ? *cap * 2 : 16; *v = realloc(*v, (size_t)*cap * sizeof **v); }
  (*v)[(*n)++] = r;
}
/* The records of what is under way in the context: of streams other than s, blocking ones or all.  ctx->mu held. */
static int under_way_locked(struct ctx *c, struct stream *s, bool all, u64 **v) {
  int n = 0, cap = 0;
  *v = NULL;
  for (struct stream *t = c->streams; t; t = t->nxt) {
    if (t == s || (!all && (t->flags & 1))) continue;
    u64 r = stream_tail(t);
    if (!rec_done(r)) add_record(v, &n, &cap, r);
  }
  for (int i = 0; all && i < c->ngone; i++)
    if (!rec_done(c->gone[i])) add_record(v, &n, &cap, c->gone[i]);
  return n;
}

/* what an operation on s has to wait for beside its own stream: the rules of the legacy default stream, and for a
 * record of everything, everything */
static int implicit_deps(struct stream *s, u64 **list, u64 *one) {
  struct ctx *c = s->ctx;
  if (s->kind != ST_LEGACY && s->kind != ST_ALL) {
    if (s->flags & 1) return 0;
    struct stream *l = atomic_load(&c->legacy);
    if (!l) return 0;
    u64 r = stream_tail(l);
    if (rec_done(r)) return 0;
    *one = r;
    *list = one;
    return 1;
  }
  pthread_mutex_lock(&c->mu);
  int n = under_way_locked(c, s, s->kind == ST_ALL, list);
  pthread_mutex_unlock(&c->mu);
  return n;
}

static CUresult submit(struct stream *s, struct op *o, struct event *ev) {
  int captured = cap_op(s, o->type != OP_CALLBACK, ev);
  if (unlikely(captured >= 0)) { op_drop(o); return captured; }
  u64 one, *deps = NULL;
  int nd = implicit_deps(s, &deps, &one);
  struct trec *old = NULL;
  if (ev && !(ev->flags & 2)) {
    o->tr = malloc(sizeof *o->tr);
    atomic_init(&o->tr->refs, 2);
    atomic_init(&o->tr->t, 0);
  }
  struct trec *tr = o->tr;
  struct sh_stream *sh = &S->stream[s->slot];
  pthread_mutex_lock(&s->mu);
  u64 pos = atomic_load(&sh->tail);
  for (int i = 0; i < nd; i++) {
    if (rec_done(deps[i])) continue;
    struct op w = { .type = OP_WAIT, .rec = deps[i] };
    atomic_store(&sh->tail, ++pos);
    stream_push(s, &w, pos);
  }
  atomic_store(&sh->tail, ++pos);
  if (!s->head && !g_async && op_quick(o)) {
    run_op(o, s);
    complete(s->slot, pos);
  } else {
    stream_push(s, o, pos);
  }
  if (ev) {
    if (tr) {
      pthread_mutex_lock(&ev->mu);
      old = ev->tr;
      ev->tr = tr;
      atomic_store(ev->latest, REC(s->slot, pos));
      pthread_mutex_unlock(&ev->mu);
    } else {
      atomic_store(ev->latest, REC(s->slot, pos));
    }
    if (unlikely(atomic_load_explicit(&ev->cap, memory_order_relaxed))) atomic_store(&ev->cap, 0);
  }
  pthread_mutex_unlock(&s->mu);
  trec_drop(old);
  if (deps != &one) free(deps);
  return OK;
}

static CUresult stream_new(struct ctx *c, unsigned flags, int prio, int kind, struct stream **out) {
  u32 start = atomic_load(&g_slot_hint), slot = 0;
  bool got = false;
  for (u32 k = 0; k < 2 * MAXSTREAM && !got; k++) {
    slot = (start + k) % MAXSTREAM;
    u32 zero = 0;
    if (atomic_load_explicit(&S->stream[slot].owner, memory_order_relaxed)) continue;
    if (k < MAXSTREAM && atomic_load(&S->stream[slot].lost_to)) continue; /* a slot remembers one death: spare it */
    raise_mark(&S->stream_hi, slot + 1); /* first, so that a reaper sees the slot */
    got = atomic_compare_exchange_strong(&S->stream[slot].owner, &zero, g_me + 1);
  }
  if (!got) return E_OOM;
  atomic_store(&g_slot_hint, slot + 1);
  struct stream *s = obj_new(&g_streams);
  if (!s) { atomic_store(&S->stream[slot].owner, 0); return E_OOM; }
  u64 d = atomic_load(&S->stream[slot].done);
  atomic_store(&S->stream[slot].tail, d);
  s->ctx = c;
  s->flags = flags;
  s->prio = prio;
  s->kind = kind;
  s->id = atomic_fetch_add(&g_next_id, 1);
  s->slot = slot;
  s->head = s->tail = NULL;
  s->worker = s->dead = false;
  s->cap = NULL;
  s->pub = obj_publish(&g_streams, s);
  if (kind == ST_LEGACY) s->pub = 1;
  if (kind == ST_THREAD) s->pub = 2;
  pthread_mutex_lock(&c->mu);
  s->prev = NULL;
  s->nxt = c->streams;
  if (c->streams) c->streams->prev = s;
  c->streams = s;
  pthread_mutex_unlock(&c->mu);
  *out = s;
  return OK;
}
static void stream_destroy_locked(struct stream *s) { /* ctx->mu held */
  if (s->prev) s->prev->nxt = s->nxt; else s->ctx->streams = s->nxt;
  if (s->nxt) s->nxt->prev = s->prev;
  atomic_store(&s->h.handle, 0);
  cap_leave(s);
  pthread_mutex_lock(&s->mu);
  s->dead = true;
  bool w = s->worker;
  if (w && s->head) { /* what is done by now need not be kept any more */
    struct ctx *c = s->ctx;
    int n = 0;
    for (int i = 0; i < c->ngone; i++) if (!rec_done(c->gone[i])) c->gone[n++] = c->gone[i];
    c->ngone = n;
    add_record(&c->gone, &c->ngone, &c->cgone, stream_tail(s));
  }
  if (w) pthread_cond_signal(&s->cv);
  pthread_mutex_unlock(&s->mu);
  if (!w) stream_free(s); /* no thread, so nothing is queued */
}

/* per-thread default streams: one for each context that this thread used */
struct tls_stream { struct ctx *c; u64 cid; struct stream *s; u64 h; struct tls_stream *next; };
static __thread struct tls_stream *t_streams;
static pthread_key_t g_tls_key;
static void tls_free(void *p) {
  struct tls_stream *t = p, *n;
  for (; t; t = n) {
    n = t->next;
    if (atomic_load(&g_ready) == 1) {
      pthread_mutex_lock(&t->c->mu);
      if (atomic_load(&t->s->h.handle) == t->h) stream_destroy_locked(t->s);
      pthread_mutex_unlock(&t->c->mu);
    }
    free(t);
  }
  t_streams = NULL;
}

/* the context's own stream at `at`, made at its first use */
static CUresult own_stream(struct ctx *c, _Atomic(struct stream *) *at, unsigned flags, int kind, struct stream **out) {
  static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
  CUresult r = OK;
  struct stream *s = atomic_load(at);
  if (!s) {
    pthread_mutex_lock(&mu);
    if (!(s = atomic_load(at)) && !(r = stream_new(c, flags, 0, kind, &s))) atomic_store(at, s);
    pthread_mutex_unlock(&mu);
  }
  *out = s;
  return r;
}
static CUresult get_stream(CUstream h, int pt, struct stream **out) {
  uintptr_t v = (uintptr_t)h;
  if (likely(v > 2)) return (*out = obj_get(&g_streams, h)) ? OK : E_HANDLE;
  struct ctx *c;
  CUresult r = cur_ctx(&c);
  if (r) return r;
  if (v == 0) v = pt ? 2 : 1;
  if (v == 1) return own_stream(c, &c->legacy, 0, ST_LEGACY, out);
  for (struct tls_stream *t = t_streams; t; t = t->next)
    if (t->c == c && t->cid == c->id && atomic_load(&t->s->h.handle) == t->h) { *out = t->s; return OK; }
  if ((r = stream_new(c, 0, 0, ST_THREAD, out))) return r;
  struct tls_stream *t = malloc(sizeof *t);
  *t = (struct tls_stream){ c, c->id, *out, atomic_load(&(*out)->h.handle), t_streams };
  t_streams = t;
  pthread_setspecific(g_tls_key, t);
  return OK;
}

static bool stream_idle(struct stream *s) {
  if (!rec_poll(stream_tail(s))) return false;
  if (s->kind != ST_LEGACY) return true;
  u64 one, *deps = NULL;
  int n = implicit_deps(s, &deps, &one);
  if (deps != &one) free(deps);
  return n == 0;
}
static void stream_sync(struct stream *s) {
  if (s->kind == ST_LEGACY && !stream_idle(s)) {
    struct op o = { .type = OP_NOP };
    submit(s, &o, NULL);
  }
  rec_wait(stream_tail(s));
}
static void ctx_sync(struct ctx *c) {
  u64 *v;
  pthread_mutex_lock(&c->mu);
  int n = under_way_locked(c, NULL, true, &v);
  pthread_mutex_unlock(&c->mu);
  for (int i = 0; i < n; i++) rec_wait(v[i]);
  free(v);
}

/* ------------------------------------------------------------------ contexts */

static CUresult ctx_new(int dev, unsigned flags, bool primary, struct ctx **out) {
  struct ctx *c = obj_new(&g_ctxs);
  if (!c) return E_OOM;
  c->dev = dev;
  c->primary = primary;
  c->flags = flags;
  c->refs = 0;
  c->id = atomic_fetch_add(&g_next_id, 1);
  c->streams = NULL;
  c->ngone = 0;
  c->peers = 0;
  c->cache_config = 0;
  atomic_store(&c->legacy, NULL);
  atomic_store(&c->all, NULL);
  size_t lim[8] = { 1024, 1 << 20, 8 << 20, 2, 2048, 64, 0, 0 };
  memcpy(c->limit, lim, sizeof lim);
  atomic_store(&c->active, 1);
  obj_publish(&g_ctxs, c);
  *out = c;
  return OK;
}
static void event_dispose(struct event *e);
static void ctx_teardown(struct ctx *c) { /* everything in it goes */
  atomic_store(&c->active, 0);
  pthread_mutex_lock(&c->mu);
  while (c->streams) stream_destroy_locked(c->streams);
  atomic_store(&c->legacy, NULL);
  atomic_store(&c->all, NULL);
  pthread_mutex_unlock(&c->mu);
  pthread_mutex_lock(&g_events.mu);
  u32 n = g_events.n;
  pthread_mutex_unlock(&g_events.mu);
  for (u32 i = 0; i < n; i++) {
    struct event *e = (struct event *)atomic_load(&g_events.chunk[i / CHUNK])[i % CHUNK];
    if (atomic_load(&e->h.handle) && e->ctx == c) event_dispose(e);
  }
  void *h = H(c);
  for (;;) {
    struct alloc *a = NULL;
    pthread_rwlock_wrlock(&g_mem);
    for (size_t i = 0; i < g_nallocs; i++)
      if (g_allocs[i]->ctx == h && g_allocs[i]->kind != A_REG) { a = g_allocs[i]; mem_remove_locked(i); break; }
    pthread_rwlock_unlock(&g_mem);
    if (!a) break;
    if (a->kind == A_DEV) mem_release(a); else mem_drop(a);
  }
}

/* ------------------------------------------------------------------ start and end */

static u32 hash32(const char *s) {
  u32 h = 2166136261u;
  for (; *s; s++) h = (h ^ (unsigned char)*s) * 16777619u;
  return h;
}
static void dev_uuid(int phys, unsigned char b[16]) { /* the same in every process, run and segment */
  char t[48];
  for (int i = 0; i < 4; i++) {
    snprintf(t, sizeof t, "simcuda physical device %d word %d", phys, i);
    u32 h = hash32(t);
    h ^= h >> 15; h *= 0x2c1b3c6du; h ^= h >> 12;
    memcpy(b + 4 * i, &h, 4);
  }
  b[6] = (unsigned char)((b[6] & 0x0f) | 0x40);
  b[8] = (unsigned char)((b[8] & 0x3f) | 0x80);
}
static void uuid_text(int phys, char out[48]) {
  unsigned char b[16];
  dev_uuid(phys, b);
  int n = sprintf(out, "GPU-");
  for (int i = 0; i < 16; i++) n += sprintf(out + n, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", b[i]);
}

static void parse_visible(void) {
  const char *v = getenv("CUDA_VISIBLE_DEVICES");
  g_ndev = 0;
  if (!v) {
    for (int i = 0; i < g_nphys; i++) g_dev[g_ndev++] = i;
    return;
  }
  /* like the driver: stop at the first entry that names no device; a device named twice: none */
  while (*v && g_ndev < MAXDEV) {
    while (*v == ' ') v++;
    size_t n = strcspn(v, ",");
    size_t m = n;
    while (m && v[m - 1] == ' ') m--;
    int hit = -1;
    if (m > 4 && !strncasecmp(v, "GPU-", 4)) {
      int hits = 0;
      for (int i = 0; i < g_nphys; i++) {
        char t[48];
        uuid_text(i, t);
        if (m <= strlen(t) && !strncasecmp(t, v, m)) { hit = i; hits++; }
      }
      if (hits != 1) hit = -1;
    } else {
      char *e;
      long k = strtol(v, &e, 10);
      if (e != v && (size_t)(e - v) == m && k >= 0 && k < g_nphys) hit = (int)k;
    }
    if (hit < 0) break;
    for (int i = 0; i < g_ndev; i++) if (g_dev[i] == hit) { g_ndev = 0; return; }
    g_dev[g_ndev++] = hit;
    v += n;
    if (*v == ',') v++; else break;
  }
}
static long env_num(const char *k, long dflt, long lo, long hi) {
  const char *v = getenv(k);
  char *e;
  if (!v || !*v) return dflt;
  long n = strtol(v, &e, 0);
  if (*e || n < lo || n > hi) { say("%s=%s is not a number from %ld to %ld: ignored", k, v, lo, hi); return dflt; }
  return n;
}

static bool env_death(void) {
  const char *v = getenv("SIMCUDA_DEATH");
  if (!v || !*v || !strcmp(v, "complete")) return false;
  if (!strcmp(v, "pending")) return true;
  say("SIMCUDA_DEATH=%s is neither complete nor pending: ignored", v);
  return false;
}

/* other segments of this user that no living process uses any more */
static void gc_segments(void) {
  char pre[64];
  int np = snprintf(pre, sizeof pre, "simcuda%u-%u-", SH_LAYOUT, (unsigned)getuid());
  DIR *d = opendir(g_dir);
  if (!d) return;
  struct dirent *e;
  while ((e = readdir(d))) {
    char f[PATH_MAX + 300], m[300];
    if (strncmp(e->d_name, pre, (size_t)np) || strstr(e->d_name, ".m.") || !strcmp(e->d_name, g_base)) continue;
    snprintf(f, sizeof f, "%s/%s", g_dir, e->d_name);
    int fd = open(f, O_RDWR | O_CLOEXEC);
    if (fd < 0) continue;
    struct stat st;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 && fstat(fd, &st) == 0 && st.st_nlink > 0) {
      bool live = false;
      if ((size_t)st.st_size >= sizeof(struct sh)) {
        struct sh *o = mmap(NULL, sizeof *o, PROT_READ, MAP_SHARED, fd, 0);
        if (o == MAP_FAILED) live = true;
        else {
          if (o->magic == SH_MAGIC && o->layout == SH_LAYOUT) {
            for (u32 i = 0; i < MAXPROC && !live; i++)
              live = atomic_load(&o->proc[i].state) == 1 && proc_alive(o->proc[i].pid, o->proc[i].start);
          } else {
            live = true; /* another version's: leave it */
          }
          munmap(o, sizeof *o);
        }
      }
      if (!live) {
        snprintf(m, sizeof m, "%s.m.", e->d_name);
        unlink_prefix(g_dir, m);
        unlink(f);
      }
    }
    unlock_fd(fd);
  }
  closedir(d);
}

static CUresult attach(void) {
  const char *seg = getenv("SIMCUDA_SEGMENT"), *dir = getenv("SIMCUDA_DIR");
  char name[128];
  snprintf(name, sizeof name, "%s", seg && *seg ? seg : "default");
  for (char *p = name; *p; p++) if (*p == '/' || *p == '.') *p = '_';
  snprintf(g_dir, sizeof g_dir, "%s", dir && *dir ? dir : "/dev/shm");
  snprintf(g_base, sizeof g_base, "simcuda%u-%u-%s", SH_LAYOUT, (unsigned)getuid(), name); /* versions never meet */
  snprintf(g_path, sizeof g_path, "%s/%s", g_dir, g_base);
  int fd;
  struct stat st;
  for (;;) {
    fd = open(g_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) { say("cannot open %s: %s", g_path, strerror(errno)); return E_OS; }
    while (flock(fd, LOCK_EX) < 0 && errno == EINTR) { }
    if (fstat(fd, &st) < 0) { unlock_fd(fd); return E_OS; }
    if (st.st_nlink > 0) break;
    unlock_fd(fd); /* its last user removed it just now */
  }
  g_ino = st.st_ino;
  bool fresh = st.st_size == 0;
  if (fresh && ftruncate(fd, sizeof(struct sh)) < 0) { unlock_fd(fd); return E_OS; }
  if (!fresh && (size_t)st.st_size < sizeof(struct sh)) {
    say("%s is of another version of simcuda: remove it or set SIMCUDA_SEGMENT", g_path);
    unlock_fd(fd);
    return E_MISMATCH;
  }
  int mfd = open(g_path, O_RDWR | O_CLOEXEC); /* a mapping holds its open file, so not the locked one */
  struct sh *m = mfd < 0 ? MAP_FAILED : mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED, mfd, 0);
  if (mfd >= 0) close(mfd);
  if (m == MAP_FAILED) { unlock_fd(fd); return E_OS; }
  if (!fresh && atomic_load(&m->ready) && (m->magic != SH_MAGIC || m->layout != SH_LAYOUT)) {
    say("%s is of another version of simcuda: remove it or set SIMCUDA_SEGMENT", g_path);
    munmap(m, sizeof *m);
    unlock_fd(fd);
    return E_MISMATCH;
  }
  if (!atomic_load(&m->ready)) {
    m->magic = SH_MAGIC;
    m->layout = SH_LAYOUT;
    if (getrandom(&m->nonce, sizeof m->nonce, 0) != sizeof m->nonce) m->nonce = now_ns();
    m->next_inc = 1;
    atomic_store(&m->ready, 1);
  }
  S = m;
  u32 pid = (u32)getpid();
  u64 start = 0;
  proc_stat(pid, &start);
  int slot = -1;
  for (u32 i = 0; i < MAXPROC; i++) {
    struct sh_proc *p = &S->proc[i];
    /* my own pid: an image that this process ran before it called exec */
    if (atomic_load(&p->state) == 1 && (p->pid == pid || !proc_alive(p->pid, p->start))) release_proc(i);
    if (slot < 0 && !atomic_load(&p->state)) slot = (int)i;
  }
  if (slot < 0) { say("more than %d processes in %s", MAXPROC, g_path); unlock_fd(fd); return E_OOM; }
  g_me = (u32)slot;
  struct sh_proc *p = &S->proc[slot];
  p->pid = pid;
  p->start = start;
  g_inc = p->inc = S->next_inc++;
  for (int d = 0; d < MAXDEV; d++) atomic_store(&p->used[d], 0);
  if (atomic_load(&S->proc_hi) < (u32)slot + 1) atomic_store(&S->proc_hi, (u32)slot + 1);
  atomic_store(&p->state, 1);
  gc_segments();
  unlock_fd(fd);
  atomic_store(&g_slot_hint, (u32)slot * 61 % MAXSTREAM);
  atomic_store(&g_event_hint, (u32)slot * 251 % MAXEVENT);
  return OK;
}

static void forked(void) {
  int one = 1;
  atomic_compare_exchange_strong(&g_ready, &one, 2);
}

API cuInit(unsigned flags) {
  int st = atomic_load(&g_ready);
  if (flags) return E_VALUE;
  if (st == 1) return OK;
  if (st) return not_ready();
  CUresult r = OK;
  pthread_mutex_lock(&g_init_mu);
  if (!atomic_load(&g_ready)) {
    g_nphys = (int)env_num("SIMCUDA_DEVICES", 1, 0, MAXDEV);
    g_latency_us = env_num("SIMCUDA_LATENCY_US", 0, 0, 60000000);
    g_event_limit = (u32)env_num("SIMCUDA_EVENT_LIMIT", 22000, 0, MAXEVENT);
    g_strict = (int)env_num("SIMCUDA_STRICT", 0, 0, 1);
    g_async = (int)env_num("SIMCUDA_ASYNC", 0, 0, 1) || g_latency_us;
    g_p2p = (int)env_num("SIMCUDA_P2P", 1, 0, 1);
    g_trace = (int)env_num("SIMCUDA_TRACE", 0, 0, 1);
    g_death_pending = env_death();
    g_total_mem = (u64)env_num("SIMCUDA_MEMORY_MB", 16384, 1, 1 << 30) << 20;
    parse_visible();
    if (!g_ndev) r = E_NODEV;
    else if (!(r = attach())) {
      static bool once;
      if (!once) { once = true; pthread_atfork(NULL, NULL, forked); pthread_key_create(&g_tls_key, tls_free); }
      atomic_store(&g_ready, 1);
    }
  }
  pthread_mutex_unlock(&g_init_mu);
  return r;
}

__attribute__((destructor)) static void leave(void) {
  int one = 1;
  if (!atomic_compare_exchange_strong(&g_ready, &one, 3)) return;
  if (S->proc[g_me].pid != (u32)getpid()) return; /* a vfork child */
  int fd = ctl_lock(false);
  if (fd < 0) return;
  release_proc(g_me);
  bool live = false;
  for (u32 i = 0; i < MAXPROC && !live; i++)
    live = atomic_load(&S->proc[i].state) == 1 && !proc_dead(i);
  if (!live) {
    char pre[300];
    snprintf(pre, sizeof pre, "%s.m.", g_base);
    unlink_prefix(g_dir, pre);
    unlink(g_path);
  }
  ctl_unlock(fd);
}

/* for tests: what the segment holds.  Not part of CUDA. */
__attribute__((visibility("default"))) long long simcudaStat(const char *what) {
  if (atomic_load(&g_ready) != 1) return -1;
  long long n = 0;
  if (!strcmp(what, "processes")) {
    for (u32 i = 0; i < MAXPROC; i++) n += atomic_load(&S->proc[i].state) == 1;
  } else if (!strcmp(what, "streams")) {
    for (u32 i = 0, hi = atomic_load(&S->stream_hi); i < hi; i++) n += atomic_load(&S->stream[i].owner) != 0;
  } else if (!strcmp(what, "events")) {
    for (u32 i = 0, hi = atomic_load(&S->event_hi); i < hi; i++) n += (atomic_load(&S->event[i].word) & 3) != EV_FREE;
  } else if (!strcmp(what, "memory")) {
    for (int d = 0; d < MAXDEV; d++) n += (long long)mem_used(d);
  } else if (!strcmp(what, "captured")) {
    n = (long long)atomic_load(&g_captured);
  } else if (!strcmp(what, "reap")) {
    for (u32 i = 0; i < MAXPROC; i++) { atomic_store(&g_seen[i], 0); bool was = atomic_load(&S->proc[i].state) == 1; check_proc(i, 0); n += was && atomic_load(&S->proc[i].state) == 0; }
  } else {
    return -1;
  }
  return n;
}
__attribute__((visibility("default"))) const char *simcudaPath(void) { return g_path; }

/* ------------------------------------------------------------------ errors, driver, devices */

#define ERRORS(X) \
  X(SUCCESS, 0, "no error") X(ERROR_INVALID_VALUE, 1, "invalid argument") \
  X(ERROR_OUT_OF_MEMORY, 2, "out of memory") X(ERROR_NOT_INITIALIZED, 3, "initialization error") \
  X(ERROR_DEINITIALIZED, 4, "driver shutting down") X(ERROR_PROFILER_DISABLED, 5, 0) \
  X(ERROR_PROFILER_NOT_INITIALIZED, 6, 0) X(ERROR_PROFILER_ALREADY_STARTED, 7, 0) \
  X(ERROR_PROFILER_ALREADY_STOPPED, 8, 0) X(ERROR_STUB_LIBRARY, 34, 0) \
  X(ERROR_CALL_REQUIRES_NEWER_DRIVER, 36, 0) X(ERROR_DEVICE_UNAVAILABLE, 46, 0) \
  X(ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected") \
  X(ERROR_INVALID_DEVICE, 101, "invalid device ordinal") X(ERROR_DEVICE_NOT_LICENSED, 102, 0) \
  X(ERROR_INVALID_IMAGE, 200, "device kernel image is invalid") \
  X(ERROR_INVALID_CONTEXT, 201, "invalid device context") X(ERROR_CONTEXT_ALREADY_CURRENT, 202, 0) \
  X(ERROR_MAP_FAILED, 205, "mapping of buffer object failed") \
  X(ERROR_UNMAP_FAILED, 206, "unmapping of buffer object failed") X(ERROR_ARRAY_IS_MAPPED, 207, 0) \
  X(ERROR_ALREADY_MAPPED, 208, 0) X(ERROR_NO_BINARY_FOR_GPU, 209, 0) X(ERROR_ALREADY_ACQUIRED, 210, 0) \
  X(ERROR_NOT_MAPPED, 211, 0) X(ERROR_NOT_MAPPED_AS_ARRAY, 212, 0) X(ERROR_NOT_MAPPED_AS_POINTER, 213, 0) \
  X(ERROR_ECC_UNCORRECTABLE, 214, 0) X(ERROR_UNSUPPORTED_LIMIT, 215, "limit is not supported on this architecture") \
  X(ERROR_CONTEXT_ALREADY_IN_USE, 216, 0) X(ERROR_PEER_ACCESS_UNSUPPORTED, 217, "peer access is not supported between these two devices") \
  X(ERROR_INVALID_PTX, 218, 0) X(ERROR_INVALID_GRAPHICS_CONTEXT, 219, 0) X(ERROR_NVLINK_UNCORRECTABLE, 220, 0) \
  X(ERROR_JIT_COMPILER_NOT_FOUND, 221, 0) X(ERROR_UNSUPPORTED_PTX_VERSION, 222, 0) \
  X(ERROR_JIT_COMPILATION_DISABLED, 223, 0) X(ERROR_UNSUPPORTED_EXEC_AFFINITY, 224, 0) \
  X(ERROR_UNSUPPORTED_DEVSIDE_SYNC, 225, 0) X(ERROR_CONTAINED, 226, 0) X(ERROR_INVALID_SOURCE, 300, 0) \
  X(ERROR_FILE_NOT_FOUND, 301, 0) X(ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND, 302, 0) \
  X(ERROR_SHARED_OBJECT_INIT_FAILED, 303, 0) X(ERROR_OPERATING_SYSTEM, 304, "OS call failed or operation not supported on this OS") \
  X(ERROR_INVALID_HANDLE, 400, "invalid resource handle") \
  X(ERROR_ILLEGAL_STATE, 401, "the operation cannot be performed in the present state") X(ERROR_LOSSY_QUERY, 402, 0) \
  X(ERROR_NOT_FOUND, 500, "named symbol not found") X(ERROR_NOT_READY, 600, "device not ready") \
  X(ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered") \
  X(ERROR_LAUNCH_OUT_OF_RESOURCES, 701, 0) X(ERROR_LAUNCH_TIMEOUT, 702, 0) \
  X(ERROR_LAUNCH_INCOMPATIBLE_TEXTURING, 703, 0) X(ERROR_PEER_ACCESS_ALREADY_ENABLED, 704, "peer access is already enabled") \
  X(ERROR_PEER_ACCESS_NOT_ENABLED, 705, "peer access has not been enabled") X(ERROR_PRIMARY_CONTEXT_ACTIVE, 708, 0) \
  X(ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed") X(ERROR_ASSERT, 710, 0) X(ERROR_TOO_MANY_PEERS, 711, 0) \
  X(ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712, "part or all of the requested memory range is already mapped") \
  X(ERROR_HOST_MEMORY_NOT_REGISTERED, 713, "pointer does not correspond to a registered memory region") \
  X(ERROR_HARDWARE_STACK_ERROR, 714, 0) X(ERROR_ILLEGAL_INSTRUCTION, 715, 0) X(ERROR_MISALIGNED_ADDRESS, 716, 0) \
  X(ERROR_INVALID_ADDRESS_SPACE, 717, 0) X(ERROR_INVALID_PC, 718, 0) X(ERROR_LAUNCH_FAILED, 719, 0) \
  X(ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, 720, 0) X(ERROR_TENSOR_MEMORY_LEAK, 721, 0) \
  X(ERROR_NOT_PERMITTED, 800, "operation not permitted") X(ERROR_NOT_SUPPORTED, 801, "operation not supported") \
  X(ERROR_SYSTEM_NOT_READY, 802, 0) X(ERROR_SYSTEM_DRIVER_MISMATCH, 803, 0) \
  X(ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, 804, 0) X(ERROR_MPS_CONNECTION_FAILED, 805, 0) X(ERROR_MPS_RPC_FAILURE, 806, 0) \
  X(ERROR_MPS_SERVER_NOT_READY, 807, 0) X(ERROR_MPS_MAX_CLIENTS_REACHED, 808, 0) \
  X(ERROR_MPS_MAX_CONNECTIONS_REACHED, 809, 0) X(ERROR_MPS_CLIENT_TERMINATED, 810, 0) X(ERROR_CDP_NOT_SUPPORTED, 811, 0) \
  X(ERROR_CDP_VERSION_MISMATCH, 812, 0) \
  X(ERROR_STREAM_CAPTURE_UNSUPPORTED, 900, "operation not permitted when stream is capturing") \
  X(ERROR_STREAM_CAPTURE_INVALIDATED, 901, "operation failed due to a previous error during capture") \
  X(ERROR_STREAM_CAPTURE_MERGE, 902, "operation would result in a merge of separate capture sequences") \
  X(ERROR_STREAM_CAPTURE_UNMATCHED, 903, "capture was not ended in the same stream as it began") \
  X(ERROR_STREAM_CAPTURE_UNJOINED, 904, 0) \
  X(ERROR_STREAM_CAPTURE_ISOLATION, 905, "dependency created on uncaptured work in another stream") \
  X(ERROR_STREAM_CAPTURE_IMPLICIT, 906, "operation would make the legacy stream depend on a capturing blocking stream") \
  X(ERROR_CAPTURED_EVENT, 907, "operation not permitted on an event last recorded in a capturing stream") \
  X(ERROR_STREAM_CAPTURE_WRONG_THREAD, 908, "attempt to terminate a thread-local capture sequence from another thread") \
  X(ERROR_TIMEOUT, 909, 0) X(ERROR_GRAPH_EXEC_UPDATE_FAILURE, 910, 0) \
  X(ERROR_EXTERNAL_DEVICE, 911, 0) X(ERROR_INVALID_CLUSTER_SIZE, 912, 0) X(ERROR_FUNCTION_NOT_LOADED, 913, 0) \
  X(ERROR_INVALID_RESOURCE_TYPE, 914, 0) X(ERROR_INVALID_RESOURCE_CONFIGURATION, 915, 0) \
  X(ERROR_KEY_ROTATION, 916, 0) X(ERROR_UNKNOWN, 999, "unknown error")

API cuGetErrorName(CUresult e, const char **s) {
  if (!s) return E_VALUE;
  switch (e) {
#define X(n, v, t) case v: *s = "CUDA_" #n; return OK;
  ERRORS(X)
#undef X
  }
  *s = NULL;
  return E_VALUE;
}
API cuGetErrorString(CUresult e, const char **s) {
  if (!s) return E_VALUE;
  switch (e) {
#define X(n, v, t) case v: { static const char *const m = t; *s = m ? m : "CUDA_" #n; return OK; }
  ERRORS(X)
#undef X
  }
  *s = NULL;
  return E_VALUE;
}
static void load_version(void) {
  static _Atomic int once;
  if (!atomic_exchange(&once, 1)) g_version = (int)env_num("SIMCUDA_DRIVER_VERSION", 13000, 12000, 99990);
}
API cuDriverGetVersion(int *v) {
  if (!v) return E_VALUE;
  load_version();
  *v = g_version;
  return OK;
}

#define DEVCHK(d) do { CHK(); if ((d) < 0 || (d) >= g_ndev) return E_DEVICE; } while (0)
API cuDeviceGetCount(int *n) { CHK(); if (!n) return E_VALUE; *n = g_ndev; return OK; }
API cuDeviceGet(CUdevice *d, int i) { CHK(); if (!d) return E_VALUE; if (i < 0 || i >= g_ndev) return E_DEVICE; *d = i; return OK; }
API cuDeviceGetName(char *s, int n, CUdevice d) {
  DEVCHK(d);
  if (!s || n <= 0) return E_VALUE;
  snprintf(s, (size_t)n, "simcuda (no GPU) #%d", g_dev[d]);
  return OK;
}
API cuDeviceGetUuid(CUuuid *u, CUdevice d) { DEVCHK(d); if (!u) return E_VALUE; dev_uuid(g_dev[d], (unsigned char *)u->bytes); return OK; }
API cuDeviceGetUuid_v2(CUuuid *u, CUdevice d) { return cuDeviceGetUuid(u, d); }
API cuDeviceGetLuid(char *l, unsigned *m, CUdevice d) { DEVCHK(d); (void)l; (void)m; return E_NOSUP; }
API cuDeviceTotalMem_v2(size_t *n, CUdevice d) { DEVCHK(d); if (!n) return E_VALUE; *n = g_total_mem; return OK; }
API cuDeviceGetPCIBusId(char *s, int n, CUdevice d) {
  DEVCHK(d);
  if (!s || n < 13) return E_VALUE;
  snprintf(s, (size_t)n, "0000:%02X:00.0", 0x10 + g_dev[d]);
  return OK;
}
API cuDeviceGetByPCIBusId(CUdevice *d, const char *s) {
  CHK();
  unsigned a, b, c = 0, f = 0;
  if (!d || !s) return E_VALUE;
  if (sscanf(s, "%x:%x:%x.%x", &a, &b, &c, &f) < 3) {
    a = 0;
    if (sscanf(s, "%x:%x.%x", &b, &c, &f) < 2) return E_VALUE;
  }
  for (int i = 0; i < g_ndev; i++)
    if (!a && !c && !f && (int)b == 0x10 + g_dev[i]) { *d = i; return OK; }
  return E_DEVICE;
}
API cuDeviceComputeCapability(int *ma, int *mi, CUdevice d) { DEVCHK(d); if (!ma || !mi) return E_VALUE; *ma = 9; *mi = 0; return OK; }
API cuDeviceCanAccessPeer(int *r, CUdevice a, CUdevice b) {
  DEVCHK(a); DEVCHK(b);
  if (!r) return E_VALUE;
  *r = g_p2p && a != b;
  return OK;
}
API cuDeviceGetP2PAttribute(int *r, int at, CUdevice a, CUdevice b) {
  DEVCHK(a); DEVCHK(b);
  if (!r || a == b || at < 1 || at > 5) return E_VALUE;
  *r = at == 1 ? 0 : g_p2p;
  return OK;
}
API cuDeviceGetAttribute(int *r, int at, CUdevice d) {
  DEVCHK(d);
  static const struct { short at; int v; } tab[] = { /* what an H100 says, less what is not simulated */
    {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {9, 65536},
    {10, 32}, {11, 2147483647}, {12, 65536}, {13, 1980000}, {14, 512}, {15, 1}, {16, 132}, {19, 1},
    {21, 131072}, {22, 131072}, {23, 65536}, {24, 16384}, {25, 16384}, {26, 16384}, {27, 32768}, {28, 32768},
    {29, 2048}, {30, 512}, {31, 1}, {32, 1}, {36, 2619000}, {37, 5120}, {38, 52428800}, {39, 2048}, {40, 3},
    {41, 1}, {42, 32768}, {43, 2048}, {45, 32768}, {46, 32768}, {47, 8192}, {48, 8192}, {49, 32768}, {51, 32},
    {52, 32768}, {53, 32768}, {54, 2046}, {55, 32768}, {56, 131072}, {57, 65536}, {58, 16384}, {59, 16384},
    {60, 16384}, {61, 32768}, {62, 2048}, {63, 32768}, {64, 32768}, {65, 2048}, {66, 32768}, {67, 32768},
    {68, 2046}, {69, 268435456}, {70, 131072}, {71, 65000}, {72, 2097120}, {73, 32768}, {74, 32768}, {75, 9},
    {76, 0}, {77, 32768}, {78, 1}, {79, 1}, {80, 1}, {81, 233472}, {82, 65536}, {87, 2}, {90, 1}, {91, 1},
    {92, 1}, {93, 1}, {94, 1}, {97, 232448}, {98, 0}, {99, 1}, {106, 32}, {111, 1024}, {122, 1}, {123, 1},
    {125, 1}, {130, 0}, {131, -1}, {134, 0},
  };
  if (!r || at < 1 || at > 170) return E_VALUE;
  *r = 0;
  if (at == 33) *r = 0x10 + g_dev[d];
  if (at == 133) *r = getenv("SIMCUDA_MPS") != NULL; /* MPS_ENABLED: nothing else of it is simulated */
  for (size_t i = 0; i < sizeof tab / sizeof *tab; i++) if (tab[i].at == at) *r = tab[i].v;
  return OK;
}

/* ------------------------------------------------------------------ contexts */

static CUresult push(void *h) {
  if (t_depth == 256) return E_OOM;
  t_stack[t_depth++] = h;
  return OK;
}
API cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice d) {
  DEVCHK(d);
  if (!out) return E_VALUE;
  CUresult r = OK;
  pthread_mutex_lock(&g_primary_mu);
  struct ctx *c = g_primary[d];
  if (!c && !(r = ctx_new(d, 0, true, &c))) g_primary[d] = c;
  if (!r) {
    if (!atomic_load(&c->active)) { c->id = atomic_fetch_add(&g_next_id, 1); c->peers = 0; atomic_store(&c->active, 1); }
    c->refs++;
    *out = H(c);
  }
  pthread_mutex_unlock(&g_primary_mu);
  return r;
}
API cuDevicePrimaryCtxRelease_v2(CUdevice d) {
  DEVCHK(d);
  CUresult r = OK;
  pthread_mutex_lock(&g_primary_mu);
  struct ctx *c = g_primary[d];
  if (!c || !c->refs) r = E_CTX;
  else if (!--c->refs) ctx_teardown(c);
  pthread_mutex_unlock(&g_primary_mu);
  return r;
}
API cuDevicePrimaryCtxRelease(CUdevice d) { return cuDevicePrimaryCtxRelease_v2(d); }
API cuDevicePrimaryCtxReset_v2(CUdevice d) {
  DEVCHK(d);
  pthread_mutex_lock(&g_primary_mu);
  struct ctx *c = g_primary[d];
  if (c && atomic_load(&c->active)) { ctx_teardown(c); c->refs = 0; }
  pthread_mutex_unlock(&g_primary_mu);
  return OK;
}
API cuDevicePrimaryCtxReset(CUdevice d) { return cuDevicePrimaryCtxReset_v2(d); }
API cuDevicePrimaryCtxSetFlags_v2(CUdevice d, unsigned f) {
  DEVCHK(d);
  if (f & ~0xffu) return E_VALUE;
  CUresult r = OK;
  pthread_mutex_lock(&g_primary_mu);
  struct ctx *c = g_primary[d];
  if (!c) {
    if (!(r = ctx_new(d, f, true, &c))) { atomic_store(&c->active, 0); g_primary[d] = c; }
  } else {
    c->flags = f;
  }
  pthread_mutex_unlock(&g_primary_mu);
  return r;
}
API cuDevicePrimaryCtxSetFlags(CUdevice d, unsigned f) { return cuDevicePrimaryCtxSetFlags_v2(d, f); }
API cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *a) {
  DEVCHK(d);
  pthread_mutex_lock(&g_primary_mu);
  struct ctx *c = g_primary[d];
  if (f) *f = c ? c->flags : 0;
  if (a) *a = c && atomic_load(&c->active);
  pthread_mutex_unlock(&g_primary_mu);
  return OK;
}
API cuCtxCreate_v2(CUcontext *out, unsigned f, CUdevice d) {
  DEVCHK(d);
  if (!out || (f & ~0xffu)) return E_VALUE;
  struct ctx *c;
  CUresult r = ctx_new(d, f, false, &c);
  if (r) return r;
  *out = H(c);
  return push(H(c));
}
API cuCtxCreate_v3(CUcontext *out, void *params, int n, unsigned f, CUdevice d) {
  CHK();
  if (n && !params) return E_VALUE;
  return n ? E_NOSUP : cuCtxCreate_v2(out, f, d);
}
struct ctx_params { void *affinity; int n; void *cig; };
API cuCtxCreate_v4(CUcontext *out, const struct ctx_params *p, unsigned f, CUdevice d) {
  CHK();
  if (p && (p->n || p->cig)) return E_NOSUP;
  return cuCtxCreate_v2(out, f, d);
}
API cuCtxDestroy_v2(CUcontext h) {
  CHK();
  struct ctx *c = obj_get(&g_ctxs, h);
  if (!c || c->primary) return h && !c ? E_CTXDEAD : E_CTX;
  if (t_depth && t_stack[t_depth - 1] == h) t_depth--;
  ctx_teardown(c);
  obj_recycle(&g_ctxs, c);
  return OK;
}
API cuCtxPushCurrent_v2(CUcontext h) {
  CHK();
  struct ctx *c = obj_get(&g_ctxs, h);
  if (!h) return E_VALUE;
  if (!c || !atomic_load(&c->active)) return E_CTXDEAD;
  return push(h);
}
API cuCtxPopCurrent_v2(CUcontext *out) {
  CHK();
  if (!t_depth) return E_CTX;
  t_depth--;
  if (out) *out = t_stack[t_depth];
  return OK;
}
API cuCtxSetCurrent(CUcontext h) {
  CHK();
  if (!h) { if (t_depth) t_depth--; return OK; }
  struct ctx *c = obj_get(&g_ctxs, h);
  if (!c || !atomic_load(&c->active)) return E_CTXDEAD;
  if (t_depth) t_stack[t_depth - 1] = h; else return push(h);
  return OK;
}
API cuCtxGetCurrent(CUcontext *out) {
  CHK();
  if (!out) return E_VALUE;
  *out = t_depth ? t_stack[t_depth - 1] : NULL;
  return OK;
}
#define CUR(c) struct ctx *c; do { CHK(); CUresult r_ = cur_ctx(&c); if (r_) return r_; } while (0)
static CUresult ctx_or_current(CUcontext h, struct ctx **c) {
  if (!h) return cur_ctx(c);
  *c = obj_get(&g_ctxs, h);
  return *c && atomic_load(&(*c)->active) ? OK : E_CTX;
}
API cuCtxGetDevice(CUdevice *d) { CUR(c); if (!d) return E_VALUE; *d = c->dev; return OK; }
API cuCtxGetDevice_v2(CUdevice *d, CUcontext h) {
  CHK();
  struct ctx *c;
  CUresult r = ctx_or_current(h, &c);
  if (r) return r;
  if (!d) return E_VALUE;
  *d = c->dev;
  return OK;
}
API cuCtxGetFlags(unsigned *f) { CUR(c); if (!f) return E_VALUE; *f = c->flags; return OK; }
API cuCtxSetFlags(unsigned f) { CUR(c); if (f & ~0xffu) return E_VALUE; c->flags = f; return OK; }
API cuCtxGetId(CUcontext h, unsigned long long *id) {
  CHK();
  struct ctx *c;
  CUresult r = ctx_or_current(h, &c);
  if (r) return r;
  if (!id) return E_VALUE;
  *id = c->id;
  return OK;
}
API cuCtxSynchronize(void) {
  CUR(c);
  CUresult r = cap_ctx(c);
  if (!r) ctx_sync(c);
  return r;
}
API cuCtxSynchronize_v2(CUcontext h) {
  CHK();
  struct ctx *c;
  CUresult r = ctx_or_current(h, &c);
  if (r || (r = cap_ctx(c))) return r;
  ctx_sync(c);
  return OK;
}
API cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  CUR(c);
  (void)c;
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return OK;
}
API cuCtxGetApiVersion(CUcontext h, unsigned *v) {
  CHK();
  struct ctx *c;
  CUresult r = ctx_or_current(h, &c);
  if (r) return r;
  if (!v) return E_VALUE;
  *v = 3020;
  return OK;
}
API cuCtxGetLimit(size_t *v, int k) {
  CUR(c);
  if (!v) return E_VALUE;
  if (k < 0 || k > 7) return E_LIMIT;
  *v = c->limit[k];
  return OK;
}
API cuCtxSetLimit(int k, size_t v) { CUR(c); if (k < 0 || k > 7) return E_LIMIT; c->limit[k] = v; return OK; }
API cuCtxGetCacheConfig(int *v) { CUR(c); if (!v) return E_VALUE; *v = c->cache_config; return OK; }
API cuCtxSetCacheConfig(int v) { CUR(c); if (v < 0 || v > 3) return E_VALUE; c->cache_config = v; return OK; }
API cuCtxGetSharedMemConfig(int *v) { CUR(c); (void)c; if (!v) return E_VALUE; *v = 1; return OK; }
API cuCtxSetSharedMemConfig(int v) { CUR(c); (void)c; return v < 0 || v > 2 ? E_VALUE : OK; }
API cuCtxResetPersistingL2Cache(void) { CUR(c); (void)c; return OK; }
API cuCtxEnablePeerAccess(CUcontext h, unsigned f) {
  CUR(c);
  struct ctx *p = obj_get(&g_ctxs, h);
  if (!p || !atomic_load(&p->active) || p == c || p->dev == c->dev) return E_CTX;
  if (f) return E_VALUE;
  if (!g_p2p) return E_PEER;
  if (c->peers & 1u << p->dev) return E_PEER_ON;
  c->peers |= 1u << p->dev;
  return OK;
}
API cuCtxDisablePeerAccess(CUcontext h) {
  CUR(c);
  struct ctx *p = obj_get(&g_ctxs, h);
  if (!p || !atomic_load(&p->active)) return E_CTX;
  if (!(c->peers & 1u << p->dev)) return E_PEER_OFF;
  c->peers &= ~(1u << p->dev);
  return OK;
}
API cuProfilerStart(void) { CUR(c); (void)c; return OK; }
API cuProfilerStop(void) { CUR(c); (void)c; return OK; }
API cuThreadExchangeStreamCaptureMode(int *m) {
  CHK();
  if (!m || *m < CAP_GLOBAL || *m > CAP_RELAXED) return E_VALUE;
  int o = t_capture_mode;
  t_capture_mode = *m;
  *m = o;
  return OK;
}

/* ------------------------------------------------------------------ streams */

/* Functions that take a stream exist twice: the plain one, for which handle 0 is the legacy default
 * stream, and the _ptsz/_ptds one, for which it is the calling thread's. */
#define BOTH(name, suf, decl, ...) \
  API name decl { const int pt = 0; CHK(); __VA_ARGS__; } \
  API name##suf decl { const int pt = 1; CHK(); __VA_ARGS__; }
#define PTSZ(name, decl, ...) BOTH(name, _ptsz, decl, __VA_ARGS__)
#define PTDS(name, decl, ...) BOTH(name, _ptds, decl, __VA_ARGS__)
#define STREAM(h) struct stream *s; do { CUresult r_ = get_stream(h, pt, &s); if (r_) return r_; } while (0)

API cuStreamCreateWithPriority(CUstream *out, unsigned flags, int prio) {
  CUR(c);
  struct stream *s;
  if (!out || flags > 1) return E_VALUE;
  CUresult r = stream_new(c, flags, prio > 0 ? 0 : prio < -5 ? -5 : prio, ST_USER, &s);
  if (!r) *out = H(s);
  return r;
}
API cuStreamCreate(CUstream *out, unsigned flags) { return cuStreamCreateWithPriority(out, flags, 0); }
API cuStreamDestroy_v2(CUstream h) {
  CHK();
  struct stream *s = (uintptr_t)h > 2 ? obj_get(&g_streams, h) : NULL;
  if (!s) return E_HANDLE;
  struct ctx *c = s->ctx;
  pthread_mutex_lock(&c->mu);
  bool live = H(s) == h && s->kind == ST_USER;
  if (live) stream_destroy_locked(s);
  pthread_mutex_unlock(&c->mu);
  return live ? OK : E_HANDLE;
}
PTSZ(cuStreamQuery, (CUstream h), STREAM(h); CUresult r = cap_stream(s); return r ? r : stream_idle(s) ? OK : E_NOTREADY)
PTSZ(cuStreamSynchronize, (CUstream h), STREAM(h); CUresult r = cap_stream(s); if (!r) stream_sync(s); return r)
PTSZ(cuStreamGetPriority, (CUstream h, int *p), STREAM(h); if (!p) return E_VALUE; *p = s->prio; return OK)
PTSZ(cuStreamGetFlags, (CUstream h, unsigned *f), STREAM(h); if (!f) return E_VALUE; *f = s->flags; return OK)
PTSZ(cuStreamGetId, (CUstream h, unsigned long long *id), STREAM(h); if (!id) return E_VALUE; *id = s->id; return OK)
PTSZ(cuStreamGetDevice, (CUstream h, CUdevice *d), STREAM(h); if (!d) return E_VALUE; *d = s->ctx->dev; return OK)
PTSZ(cuStreamGetCtx, (CUstream h, CUcontext *c), STREAM(h); if (!c) return E_VALUE; *c = H(s->ctx); return OK)
PTSZ(cuStreamGetCtx_v2, (CUstream h, CUcontext *c, void **g),
     STREAM(h); if (!c && !g) return E_VALUE; if (c) *c = H(s->ctx); if (g) *g = NULL; return OK)
API cuStreamGetGreenCtx(CUstream h, void **g) { const int pt = 0; CHK(); STREAM(h); (void)s; if (!g) return E_VALUE; *g = NULL; return OK; }
static CUresult capture_info(CUstream h, int pt, int *st, u64 *id, void **graph, void **deps, void **edges, size_t *n) {
  STREAM(h);
  if (!st) return E_VALUE;
  *st = 0;
  if (id) *id = 0;
  if (graph) *graph = NULL;
  if (deps) *deps = NULL;
  if (edges) *edges = NULL;
  if (n) *n = 0;
  return cap_info(s, st, id, graph);
}
PTSZ(cuStreamIsCapturing, (CUstream h, int *st), return capture_info(h, pt, st, 0, 0, 0, 0, 0))
PTSZ(cuStreamGetCaptureInfo, (CUstream h, int *st, u64 *id), return capture_info(h, pt, st, id, 0, 0, 0, 0))
PTSZ(cuStreamGetCaptureInfo_v2, (CUstream h, int *st, u64 *id, void **g, void **d, size_t *n),
     return capture_info(h, pt, st, id, g, d, 0, n))
PTSZ(cuStreamGetCaptureInfo_v3, (CUstream h, int *st, u64 *id, void **g, void **d, void **e, size_t *n),
     return capture_info(h, pt, st, id, g, d, e, n))
PTSZ(cuStreamBeginCapture, (CUstream h), STREAM(h); return cap_begin(s, CAP_GLOBAL))
PTSZ(cuStreamBeginCapture_v2, (CUstream h, int mode), STREAM(h); return cap_begin(s, mode))
PTSZ(cuStreamEndCapture, (CUstream h, void **g), STREAM(h); if (!g) return E_VALUE; *g = NULL; return cap_end(s, g))
API cuGraphDestroy(void *h) {
  CHK();
  pthread_mutex_lock(&g_cap_mu);
  struct graph *g = obj_get(&g_graphs, h);
  bool ok = g && !g->capturing;
  if (ok) obj_recycle(&g_graphs, g);
  pthread_mutex_unlock(&g_cap_mu);
  return ok ? OK : E_VALUE;
}
PTSZ(cuStreamCopyAttributes, (CUstream d, CUstream h), (void)d; STREAM(h); (void)s; return OK)

PTSZ(cuLaunchHostFunc, (CUstream h, CUhostFn fn, void *data),
     STREAM(h); if (!fn) return E_VALUE;
     struct op o = { .type = OP_HOST, .fn = fn, .data = data }; return submit(s, &o, NULL))
PTSZ(cuLaunchHostFunc_v2, (CUstream h, CUhostFn fn, void *data, unsigned mode),
     (void)mode; STREAM(h); if (!fn) return E_VALUE;
     struct op o = { .type = OP_HOST, .fn = fn, .data = data }; return submit(s, &o, NULL))
PTSZ(cuStreamAddCallback, (CUstream h, CUstreamCallback cb, void *data, unsigned flags),
     STREAM(h); if (!cb || flags) return E_VALUE;
     struct op o = { .type = OP_CALLBACK, .cb = cb, .data = data }; return submit(s, &o, NULL))

static CUresult memop(CUstream h, int pt, int type, int width, CUdeviceptr p, u64 v, unsigned flags) {
  STREAM(h);
  if (p % (unsigned)width || (type == OP_WRITE ? flags & ~1u : flags & ~0x40000003u)) return E_VALUE;
  struct alloc *a = mem_hold((uintptr_t)p, (size_t)width);
  if (!a) return E_VALUE;
  struct op o = { .type = type, .width = width, .flags = flags, .dst = (void *)(uintptr_t)p, .val = v, .a = a };
  return submit(s, &o, NULL);
}
PTSZ(cuStreamWriteValue32_v2, (CUstream h, CUdeviceptr p, u32 v, unsigned f), return memop(h, pt, OP_WRITE, 4, p, v, f))
PTSZ(cuStreamWriteValue64_v2, (CUstream h, CUdeviceptr p, u64 v, unsigned f), return memop(h, pt, OP_WRITE, 8, p, v, f))
PTSZ(cuStreamWaitValue32_v2, (CUstream h, CUdeviceptr p, u32 v, unsigned f), return memop(h, pt, OP_WAITVAL, 4, p, v, f))
PTSZ(cuStreamWaitValue64_v2, (CUstream h, CUdeviceptr p, u64 v, unsigned f), return memop(h, pt, OP_WAITVAL, 8, p, v, f))

/* ------------------------------------------------------------------ events */

static _Atomic u32 g_imports[MAXEVENT];  /* how often this process has each slot open */
static pthread_mutex_t g_import_mu = PTHREAD_MUTEX_INITIALIZER;

static void event_dispose(struct event *e) {
  if (e->shslot >= 0) {
    struct sh_event *x = &S->event[e->shslot];
    if (e->imported) {
      pthread_mutex_lock(&g_import_mu);
      if (atomic_fetch_sub(&g_imports[e->shslot], 1) == 1) {
        atomic_fetch_and(&x->importers[g_me / 64], ~(1ull << (g_me % 64)));
        event_try_free((u32)e->shslot);
      }
      pthread_mutex_unlock(&g_import_mu);
    } else {
      atomic_store(&x->owner, 0);
      event_try_free((u32)e->shslot);
      atomic_fetch_sub(&g_my_events, 1);
    }
  }
  trec_drop(e->tr);
  e->tr = NULL;
  obj_recycle(&g_events, e);
}

static struct event *event_init(struct ctx *c, unsigned flags) {
  struct event *e = obj_new(&g_events);
  if (!e) return NULL;
  e->ctx = c;
  e->flags = flags;
  atomic_store(&e->own, 0);
  atomic_store(&e->cap, 0);
  e->latest = &e->own;
  e->shslot = -1;
  e->imported = false;
  e->tr = NULL;
  return e;
}

API cuEventCreate(CUevent *out, unsigned flags) {
  CUR(c);
  if (!out || flags > 7 || (flags & 6) == 4) return E_VALUE;
  u32 slot = 0;
  if (flags & 4) {
    if (atomic_fetch_add(&g_my_events, 1) >= g_event_limit) { atomic_fetch_sub(&g_my_events, 1); return E_OOM; }
    u32 start = atomic_load(&g_event_hint);
    bool got = false;
    for (u32 k = 0; k < MAXEVENT && !got; k++) {
      slot = (start + k) % MAXEVENT;
      u32 w = atomic_load_explicit(&S->event[slot].word, memory_order_relaxed);
      if ((w & 3) != EV_FREE) continue;
      raise_mark(&S->event_hi, slot + 1);
      got = atomic_compare_exchange_strong(&S->event[slot].word, &w, (w & ~3u) + (4 | EV_INIT));
    }
    if (!got) { atomic_fetch_sub(&g_my_events, 1); return E_OOM; }
    atomic_store(&g_event_hint, slot + 1);
    struct sh_event *x = &S->event[slot];
    atomic_store(&x->owner, g_me + 1);
    x->flags = flags;
    x->phys = (u32)g_dev[c->dev];
    x->pid = (u32)getpid();
    atomic_store(&x->latest, 0);
    atomic_store(&x->word, (atomic_load(&x->word) & ~3u) | EV_USED);
  }
  struct event *e = event_init(c, flags);
  if (!e) return E_OOM;
  if (flags & 4) { e->shslot = (int)slot; e->latest = &S->event[slot].latest; }
  obj_publish(&g_events, e);
  *out = H(e);
  return OK;
}

/* SIMCUDA_STRICT: an imported event must not outlive the exporter's */
static bool undefined_use(struct event *e, const char *fn) {
  if (likely(!g_strict || !e->imported)) return false;
  struct sh_event *x = &S->event[e->shslot];
  u32 o = atomic_load(&x->owner);
  if (o) { check_proc(o - 1, 5); o = atomic_load(&x->owner); }
  if (o) return false;
  say("STRICT: %s on an imported event after its exporter (pid %u) destroyed it or exited: undefined behaviour", fn, x->pid);
  return true;
}
#define EVENT(h) struct event *e = obj_get(&g_events, h); \
  if (unlikely(!e)) return E_HANDLE; \
  if (unlikely(undefined_use(e, __func__))) return E_HANDLE

static CUresult event_record(CUevent h, CUstream st, unsigned flags, int pt, const char *fn) {
  if (flags > 1) return E_VALUE;
  struct event *e = obj_get(&g_events, h);
  if (unlikely(!e)) return E_HANDLE;
  STREAM(st);
  if (s->ctx != e->ctx) return E_HANDLE;
  if (unlikely(undefined_use(e, fn))) return E_HANDLE;
  if (flags) { /* external: for the launch of the graph, and only while capturing */
    int r = cap_op(s, true, NULL);
    return r < 0 ? E_VALUE : r;
  }
  struct op o = { .type = OP_NOP };
  return submit(s, &o, e);
}
PTSZ(cuEventRecord, (CUevent h, CUstream st), return event_record(h, st, 0, pt, "cuEventRecord"))
PTSZ(cuEventRecordWithFlags, (CUevent h, CUstream st, unsigned f), return event_record(h, st, f, pt, "cuEventRecordWithFlags"))
API cuCtxRecordEvent(CUcontext hc, CUevent h) {
  CHK();
  struct ctx *c = obj_get(&g_ctxs, hc);
  if (!c || !atomic_load(&c->active)) return E_CTX;
  EVENT(h);
  if (e->ctx != c) return E_HANDLE;
  struct stream *s;
  struct op o = { .type = OP_NOP };
  CUresult r = cap_ctx(c);
  if (r || (r = own_stream(c, &c->all, 1, ST_ALL, &s))) return r;
  return submit(s, &o, e);
}
API cuEventQuery(CUevent h) {
  CHK();
  EVENT(h);
  CUresult c = cap_event(e);
  if (c) return c;
  u64 r = atomic_load(e->latest);
  return !r || rec_poll(r) ? OK : E_NOTREADY;
}
API cuEventSynchronize(CUevent h) {
  CHK();
  EVENT(h);
  CUresult c = cap_event(e);
  if (c) return c;
  u64 r = atomic_load(e->latest);
  if (r) rec_wait(r);
  return OK;
}
API cuEventDestroy_v2(CUevent h) {
  CHK();
  struct event *e = obj_get(&g_events, h);
  if (!e) return E_HANDLE;
  event_dispose(e);
  return OK;
}
API cuEventElapsedTime_v2(float *ms, CUevent h0, CUevent h1) {
  CHK();
  if (!ms) return E_VALUE;
  struct event *e[2] = { obj_get(&g_events, h0), obj_get(&g_events, h1) };
  struct trec *t[2] = { NULL, NULL };
  u64 rec[2];
  CUresult r = OK;
  if (!e[0] || !e[1] || e[0]->ctx != e[1]->ctx) return E_HANDLE;
  for (int i = 0; i < 2; i++) if (e[i]->flags & 2) return E_HANDLE;
  for (int i = 0; i < 2; i++) if ((r = cap_event(e[i]))) return r;
  for (int i = 0; i < 2; i++) {
    pthread_mutex_lock(&e[i]->mu);
    rec[i] = atomic_load(e[i]->latest);
    if ((t[i] = e[i]->tr)) atomic_fetch_add(&t[i]->refs, 1);
    pthread_mutex_unlock(&e[i]->mu);
  }
  if (!t[0] || !t[1]) r = E_HANDLE;
  else if (!rec_done(rec[0]) || !rec_done(rec[1])) r = E_NOTREADY;
  else *ms = (float)((double)(int64_t)(atomic_load(&t[1]->t) - atomic_load(&t[0]->t)) / 1e6);
  trec_drop(t[0]);
  trec_drop(t[1]);
  return r;
}
API cuEventElapsedTime(float *ms, CUevent a, CUevent b) { return cuEventElapsedTime_v2(ms, a, b); }

static CUresult stream_wait(CUstream st, CUevent h, unsigned flags, int pt) {
  if (flags > 1) return E_VALUE;
  struct event *e = obj_get(&g_events, h);
  if (unlikely(!e)) return E_HANDLE;
  STREAM(st);
  if (unlikely(undefined_use(e, "cuStreamWaitEvent"))) return E_HANDLE;
  int captured = cap_wait(s, e, flags);
  if (unlikely(captured >= 0)) return captured;
  u64 r = atomic_load(e->latest);
  if (!r || rec_done(r) || (REC_SLOT(r) == s->slot && !rec_lost(r))) return OK;
  struct op o = { .type = OP_WAIT, .rec = r };
  return submit(s, &o, NULL);
}
PTSZ(cuStreamWaitEvent, (CUstream st, CUevent h, unsigned f), return stream_wait(st, h, f, pt))

/* ------------------------------------------------------------------ IPC handles */

static u64 handle_check(const struct ipc_handle *h) {
  const u64 *w = (const u64 *)h;
  u64 x = 0x9e3779b97f4a7c15ull;
  for (size_t i = 0; i + 1 < sizeof *h / 8; i++) x = (x ^ w[i]) * 0xff51afd7ed558ccdull, x ^= x >> 29;
  return x;
}
static CUresult handle_valid(const struct ipc_handle *h, u64 magic) {
  if (h->magic != magic || h->check != handle_check(h)) return E_VALUE;
  if (h->nonce != S->nonce || h->proc >= MAXPROC) return E_HANDLE; /* another segment's, or an earlier one's */
  return OK;
}
API cuIpcGetEventHandle(CUipcEventHandle *out, CUevent ev) {
  CHK();
  if (!out || !ev) return E_VALUE;
  EVENT(ev);
  if (e->imported || e->shslot < 0) return E_HANDLE;
  struct ipc_handle h = { .magic = EV_MAGIC, .nonce = S->nonce, .slot = (u32)e->shslot,
    .gen = atomic_load(&S->event[e->shslot].word) >> 2, .proc = g_me, .pid = (u32)getpid(), .inc = g_inc };
  h.check = handle_check(&h);
  memcpy(out, &h, sizeof h);
  return OK;
}
API cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle in) {
  CUR(c);
  struct ipc_handle h;
  memcpy(&h, &in, sizeof h);
  if (!out) return E_VALUE;
  CUresult r = handle_valid(&h, EV_MAGIC);
  if (r) return r;
  if (h.proc == g_me && h.inc == g_inc) return E_CTX; /* in the process that made it */
  if (h.slot >= MAXEVENT) return E_VALUE;
  check_proc(h.proc, 0); /* an exporter that was killed is found out here */
  struct sh_event *x = &S->event[h.slot];
  u64 bit = 1ull << (g_me % 64);
  pthread_mutex_lock(&g_import_mu);
  bool first = atomic_fetch_add(&g_imports[h.slot], 1) == 0;
  if (first) atomic_fetch_or(&x->importers[g_me / 64], bit);
  if (atomic_load(&x->word) != (h.gen << 2 | EV_USED) || atomic_load(&x->owner) != h.proc + 1) {
    r = E_HANDLE;
    if (atomic_fetch_sub(&g_imports[h.slot], 1) == 1) {
      atomic_fetch_and(&x->importers[g_me / 64], ~bit);
      event_try_free(h.slot);
    }
  }
  pthread_mutex_unlock(&g_import_mu);
  if (r) return r;
  struct event *e = event_init(c, x->flags & 3);
  if (!e) return E_OOM;
  e->shslot = (int)h.slot;
  e->imported = true;
  e->latest = &x->latest;
  obj_publish(&g_events, e);
  *out = H(e);
  return OK;
}

API cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr p) {
  CHK();
  if (!out) return E_VALUE;
  pthread_rwlock_rdlock(&g_mem);
  struct alloc *a = mem_find_locked((uintptr_t)p, 1);
  CUresult r = a && a->kind == A_DEV ? OK : E_VALUE;
  if (!r) {
    struct ipc_handle h = { .magic = MEM_MAGIC, .nonce = S->nonce, .slot = (u32)a->phys, .proc = g_me,
      .pid = (u32)getpid(), .inc = g_inc, .seq = a->seq, .size = a->size };
    h.check = handle_check(&h);
    memcpy(out, &h, sizeof h);
  }
  pthread_rwlock_unlock(&g_mem);
  return r;
}
API cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle in, unsigned flags) {
  CUR(c);
  static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
  struct ipc_handle h;
  memcpy(&h, &in, sizeof h);
  if (!out || flags > 1) return E_VALUE;
  CUresult r = handle_valid(&h, MEM_MAGIC);
  if (r) return r;
  if (h.proc == g_me && h.inc == g_inc) return E_CTX;
  check_proc(h.proc, 0);
  pthread_mutex_lock(&mu);
  pthread_rwlock_wrlock(&g_mem);
  struct alloc *a = NULL;
  for (size_t i = 0; i < g_nallocs && !a; i++)
    if (g_allocs[i]->kind == A_IPC && !memcmp(&g_allocs[i]->ipc, &h, sizeof h)) a = g_allocs[i];
  if (a) { /* one context per device and process; opening again counts */
    if (a->ctx != H(c)) r = E_HANDLE;
    else { a->ipc_refs++; *out = a->base; }
  }
  pthread_rwlock_unlock(&g_mem);
  if (!a && !r) {
    char f[PATH_MAX + 64];
    size_t len = (h.size + 4095) & ~(size_t)4095;
    mem_name(f, sizeof f, h.proc, h.inc, h.seq);
    int fd = open(f, O_RDWR | O_CLOEXEC);
    void *m = MAP_FAILED;
    if (fd >= 0) {
      m = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
      close(fd);
    }
    if (m == MAP_FAILED) {
      r = E_HANDLE;
    } else {
      a = calloc(1, sizeof *a);
      *a = (struct alloc){ .base = (uintptr_t)m, .size = h.size, .maplen = len, .kind = A_IPC, .dev = c->dev,
                           .phys = (int)h.slot, .ctx = H(c), .ipc_refs = 1, .ipc = h };
      mem_add(a);
      *out = a->base;
    }
  }
  pthread_mutex_unlock(&mu);
  return r;
}
API cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle in, unsigned flags) { return cuIpcOpenMemHandle_v2(out, in, flags); }
API cuIpcCloseMemHandle(CUdeviceptr p) {
  CHK();
  struct alloc *a = NULL;
  CUresult r = E_VALUE;
  pthread_rwlock_wrlock(&g_mem);
  size_t i = mem_pos((uintptr_t)p);
  if (i && g_allocs[i - 1]->base == p && g_allocs[i - 1]->kind == A_IPC) {
    r = OK;
    if (!--g_allocs[i - 1]->ipc_refs) { a = g_allocs[i - 1]; mem_remove_locked(i - 1); }
  }
  pthread_rwlock_unlock(&g_mem);
  mem_drop(a);
  return r;
}

/* ------------------------------------------------------------------ memory */

API cuMemAlloc_v2(CUdeviceptr *out, size_t n) { CUR(c); if (!out || !n) return E_VALUE; UNSAFE(); return mem_alloc(c, n, out); }
API cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t w, size_t h, unsigned el) {
  CUR(c);
  if (!out || !pitch || !w || !h || (el != 4 && el != 8 && el != 16)) return E_VALUE;
  UNSAFE();
  *pitch = (w + 511) & ~(size_t)511;
  return mem_alloc(c, *pitch * h, out);
}
API cuMemFree_v2(CUdeviceptr p) {
  CHK();
  if (!p) return OK;
  UNSAFE();
  struct alloc *a = mem_take((uintptr_t)p, A_DEV);
  if (!a) return E_VALUE;
  mem_release(a);
  return OK;
}
API cuMemGetInfo_v2(size_t *fr, size_t *total) {
  CUR(c);
  u64 u = mem_used(g_dev[c->dev]);
  if (fr) *fr = u > g_total_mem ? 0 : g_total_mem - u;
  if (total) *total = g_total_mem;
  return OK;
}
API cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *n, CUdeviceptr p) {
  CHK();
  pthread_rwlock_rdlock(&g_mem);
  struct alloc *a = mem_find_locked((uintptr_t)p, 1);
  if (a && base) *base = a->base;
  if (a && n) *n = a->size;
  pthread_rwlock_unlock(&g_mem);
  return a ? OK : E_NOTFOUND;
}
API cuMemHostAlloc(void **out, size_t n, unsigned flags) {
  CUR(c);
  if (!out || !n || flags > 7) return E_VALUE;
  UNSAFE();
  size_t len = (n + 4095) & ~(size_t)4095;
  void *m = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return E_OOM;
  struct alloc *a = calloc(1, sizeof *a);
  *a = (struct alloc){ .base = (uintptr_t)m, .size = n, .maplen = len, .kind = A_HOST, .dev = c->dev, .flags = flags, .ctx = H(c) };
  mem_add(a);
  *out = m;
  return OK;
}
API cuMemAllocHost_v2(void **out, size_t n) { return cuMemHostAlloc(out, n, 0); }
API cuMemFreeHost(void *p) {
  CHK();
  UNSAFE();
  struct alloc *a = mem_take((uintptr_t)p, A_HOST);
  mem_drop(a);
  return a ? OK : E_VALUE;
}
API cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
  CUR(c);
  if (!p || !n || flags > 15) return E_VALUE;
  UNSAFE();
  pthread_rwlock_rdlock(&g_mem);
  size_t i = mem_pos((uintptr_t)p + n - 1);
  bool clash = i && g_allocs[i - 1]->base + g_allocs[i - 1]->size > (uintptr_t)p;
  pthread_rwlock_unlock(&g_mem);
  if (clash) return E_REGISTERED;
  struct alloc *a = calloc(1, sizeof *a);
  *a = (struct alloc){ .base = (uintptr_t)p, .size = n, .kind = A_REG, .dev = c->dev, .flags = flags, .ctx = H(c) };
  mem_add(a);
  return OK;
}
API cuMemHostUnregister(void *p) {
  CHK();
  UNSAFE();
  struct alloc *a = mem_take((uintptr_t)p, A_REG);
  mem_drop(a);
  return a ? OK : E_NOTREGISTERED;
}
API cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *p, unsigned flags) {
  CHK();
  if (!out || flags) return E_VALUE;
  struct alloc *a = mem_hold((uintptr_t)p, 1);
  bool ok = a && (a->kind == A_HOST || a->kind == A_REG);
  mem_drop(a);
  if (!ok) return E_VALUE;
  *out = (CUdeviceptr)(uintptr_t)p;
  return OK;
}
API cuMemHostGetFlags(unsigned *f, void *p) {
  CHK();
  struct alloc *a = mem_hold((uintptr_t)p, 1);
  bool ok = f && a && (a->kind == A_HOST || a->kind == A_REG);
  if (ok) *f = a->flags;
  mem_drop(a);
  return ok ? OK : E_VALUE;
}

static CUresult attribute(void *out, int at, struct alloc *a, CUdeviceptr p) {
  bool host = a->kind == A_HOST || a->kind == A_REG;
  switch (at) {
  case 1: *(void **)out = a->ctx; break;
  case 2: *(u32 *)out = host ? 1 : 2; break;
  case 3: *(CUdeviceptr *)out = p; break;
  case 4: if (!host) return E_VALUE; *(void **)out = (void *)(uintptr_t)p; break;
  case 7: case 20: *(u64 *)out = a->id; break;
  case 6: case 8: case 15: case 21: *(char *)out = 0; break;
  case 9: *(int *)out = a->dev; break;
  case 10: *(char *)out = a->kind == A_DEV; break;
  case 11: case 19: *(CUdeviceptr *)out = a->base; break;
  case 12: case 18: *(size_t *)out = a->size; break;
  case 13: *(char *)out = 1; break;
  case 14: *(u64 *)out = 0; break;
  case 16: *(u32 *)out = 3; break;
  case 17: *(void **)out = NULL; break;
  default: return E_VALUE;
  }
  return OK;
}
API cuPointerGetAttribute(void *out, int at, CUdeviceptr p) {
  CHK();
  struct alloc *a = mem_hold((uintptr_t)p, 1);
  CUresult r = out && a ? attribute(out, at, a, p) : E_VALUE;
  mem_drop(a);
  return r;
}
API cuPointerGetAttributes(unsigned n, int *at, void **out, CUdeviceptr p) {
  CHK();
  if (!at || !out) return E_VALUE;
  struct alloc *a = mem_hold((uintptr_t)p, 1);
  for (unsigned i = 0; i < n; i++) {
    if (!out[i] || (a && attribute(out[i], at[i], a, p) == OK)) continue;
    switch (at[i]) { /* unknown: zero of the attribute's type */
    case 2: *(u32 *)out[i] = 0; break;
    case 9: *(int *)out[i] = -2; break;
    case 6: case 8: case 10: case 13: case 15: case 21: *(char *)out[i] = 0; break;
    case 16: *(u32 *)out[i] = 0; break;
    default: *(u64 *)out[i] = 0;
    }
  }
  mem_drop(a);
  return OK;
}

/* which side of a copy must be memory that CUDA knows */
enum { ANY = 0, DST = 1, SRC = 2 };
static CUresult copy(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream h, int pt, int need, bool sync) {
  STREAM(h);
  CUresult r = sync ? cap_stream(s) : OK;
  if (r || !n) return r;
  struct alloc *a = mem_hold((uintptr_t)dst, n), *b = mem_hold((uintptr_t)src, n);
  if (!dst || !src || ((need & DST) && !a) || ((need & SRC) && !b)) { mem_drop(a); mem_drop(b); return E_VALUE; }
  struct op o = { .type = OP_COPY, .dst = (void *)(uintptr_t)dst, .src = (void *)(uintptr_t)src, .n = n, .a = a, .b = b };
  if (!b && !sync) { /* pageable source: staged before the call returns */
    if (!(o.stage = malloc(n))) { mem_drop(a); mem_drop(b); return E_OOM; }
    memcpy(o.stage, o.src, n);
  }
  bool wait = sync || !a; /* pageable destination: returns when the copy is complete */
  r = submit(s, &o, NULL);
  if (!r && wait && !cap_in(s)) stream_sync(s);
  return r;
}
#define P(x) ((CUdeviceptr)(uintptr_t)(x))
PTDS(cuMemcpyHtoD_v2, (CUdeviceptr d, const void *s_, size_t n), return copy(d, P(s_), n, 0, pt, DST, true))
PTDS(cuMemcpyDtoH_v2, (void *d, CUdeviceptr s_, size_t n), return copy(P(d), s_, n, 0, pt, SRC, true))
PTDS(cuMemcpyDtoD_v2, (CUdeviceptr d, CUdeviceptr s_, size_t n), return copy(d, s_, n, 0, pt, DST | SRC, false))
PTDS(cuMemcpy, (CUdeviceptr d, CUdeviceptr s_, size_t n), return copy(d, s_, n, 0, pt, ANY, true))
PTDS(cuMemcpyPeer, (CUdeviceptr d, CUcontext dc, CUdeviceptr s_, CUcontext sc, size_t n), (void)dc; (void)sc; return copy(d, s_, n, 0, pt, DST | SRC, false))
PTSZ(cuMemcpyHtoDAsync_v2, (CUdeviceptr d, const void *s_, size_t n, CUstream h), return copy(d, P(s_), n, h, pt, DST, false))
PTSZ(cuMemcpyDtoHAsync_v2, (void *d, CUdeviceptr s_, size_t n, CUstream h), return copy(P(d), s_, n, h, pt, SRC, false))
PTSZ(cuMemcpyDtoDAsync_v2, (CUdeviceptr d, CUdeviceptr s_, size_t n, CUstream h), return copy(d, s_, n, h, pt, DST | SRC, false))
PTSZ(cuMemcpyAsync, (CUdeviceptr d, CUdeviceptr s_, size_t n, CUstream h), return copy(d, s_, n, h, pt, ANY, false))
PTSZ(cuMemcpyPeerAsync, (CUdeviceptr d, CUcontext dc, CUdeviceptr s_, CUcontext sc, size_t n, CUstream h), (void)dc; (void)sc; return copy(d, s_, n, h, pt, DST | SRC, false))

static CUresult set(CUdeviceptr p, u64 v, int width, size_t n, CUstream h, int pt, bool sync) {
  STREAM(h);
  if (p % (unsigned)width || n > SIZE_MAX / 4) return E_VALUE;
  CUresult r = sync ? cap_stream(s) : OK;
  if (r || !n) return r;
  struct alloc *a = mem_hold((uintptr_t)p, n * (size_t)width);
  if (!a) return E_VALUE;
  bool wait = sync && a->kind != A_DEV && a->kind != A_IPC;
  struct op o = { .type = OP_SET, .width = width, .dst = (void *)(uintptr_t)p, .val = v, .n = n, .a = a };
  r = submit(s, &o, NULL);
  if (!r && wait) stream_sync(s);
  return r;
}
PTDS(cuMemsetD8_v2, (CUdeviceptr p, unsigned char v, size_t n), return set(p, v, 1, n, 0, pt, true))
PTDS(cuMemsetD16_v2, (CUdeviceptr p, unsigned short v, size_t n), return set(p, v, 2, n, 0, pt, true))
PTDS(cuMemsetD32_v2, (CUdeviceptr p, unsigned v, size_t n), return set(p, v, 4, n, 0, pt, true))
PTSZ(cuMemsetD8Async, (CUdeviceptr p, unsigned char v, size_t n, CUstream h), return set(p, v, 1, n, h, pt, false))
PTSZ(cuMemsetD16Async, (CUdeviceptr p, unsigned short v, size_t n, CUstream h), return set(p, v, 2, n, h, pt, false))
PTSZ(cuMemsetD32Async, (CUdeviceptr p, unsigned v, size_t n, CUstream h), return set(p, v, 4, n, h, pt, false))

/* ------------------------------------------------------------------ look-up of entry points */

#include "simcuda_names.h"

static CUresult unsupported(const char *name) {
  if (g_trace) say("%s is not simulated: CUDA_ERROR_NOT_SUPPORTED", name);
  return E_NOSUP;
}
#define X(n) static CUresult stub_##n(void) { return unsupported(#n); }
OTHER_NAMES(X)
#undef X

API cuGetProcAddress(const char *sym, void **pfn, int version, u64 flags);
API cuGetProcAddress_v2(const char *sym, void **pfn, int version, u64 flags, int *status);

struct entry { const char *name; int version; void *fn, *pt; };
static const struct entry g_entries[] = {
#define F(name, ver, fn) { #name, ver, (void *)fn, NULL },
#define Z(name, ver, fn) { #name, ver, (void *)fn, (void *)fn##_ptsz },
#define D(name, ver, fn) { #name, ver, (void *)fn, (void *)fn##_ptds },
  F(cuInit, 2000, cuInit) F(cuDriverGetVersion, 2020, cuDriverGetVersion)
  F(cuGetErrorName, 6000, cuGetErrorName) F(cuGetErrorString, 6000, cuGetErrorString)
  F(cuGetProcAddress, 11030, cuGetProcAddress) F(cuGetProcAddress, 12000, cuGetProcAddress_v2)
  F(cuDeviceGetCount, 2000, cuDeviceGetCount) F(cuDeviceGet, 2000, cuDeviceGet) F(cuDeviceGetName, 2000, cuDeviceGetName)
  F(cuDeviceGetUuid, 9020, cuDeviceGetUuid) F(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2)
  F(cuDeviceGetLuid, 10000, cuDeviceGetLuid) F(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2)
  F(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId) F(cuDeviceGetByPCIBusId, 4010, cuDeviceGetByPCIBusId)
  F(cuDeviceComputeCapability, 2000, cuDeviceComputeCapability) F(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute)
  F(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer) F(cuDeviceGetP2PAttribute, 8000, cuDeviceGetP2PAttribute)
  F(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain)
  F(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease_v2) F(cuDevicePrimaryCtxReset, 7000, cuDevicePrimaryCtxReset_v2)
  F(cuDevicePrimaryCtxSetFlags, 7000, cuDevicePrimaryCtxSetFlags_v2) F(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState)
  F(cuCtxCreate, 3020, cuCtxCreate_v2) F(cuCtxCreate, 11040, cuCtxCreate_v3) F(cuCtxCreate, 12050, cuCtxCreate_v4)
  F(cuCtxDestroy, 4000, cuCtxDestroy_v2) F(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2) F(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2)
  F(cuCtxSetCurrent, 4000, cuCtxSetCurrent) F(cuCtxGetCurrent, 4000, cuCtxGetCurrent)
  F(cuCtxGetDevice, 2000, cuCtxGetDevice) F(cuCtxGetDevice, 13000, cuCtxGetDevice_v2)
  F(cuCtxGetFlags, 7000, cuCtxGetFlags) F(cuCtxSetFlags, 12010, cuCtxSetFlags) F(cuCtxGetId, 12000, cuCtxGetId)
  F(cuCtxSynchronize, 2000, cuCtxSynchronize) F(cuCtxSynchronize, 13000, cuCtxSynchronize_v2)
  F(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange) F(cuCtxGetApiVersion, 3020, cuCtxGetApiVersion)
  F(cuCtxGetLimit, 3010, cuCtxGetLimit) F(cuCtxSetLimit, 3010, cuCtxSetLimit)
  F(cuCtxGetCacheConfig, 3020, cuCtxGetCacheConfig) F(cuCtxSetCacheConfig, 3020, cuCtxSetCacheConfig)
  F(cuCtxGetSharedMemConfig, 4020, cuCtxGetSharedMemConfig) F(cuCtxSetSharedMemConfig, 4020, cuCtxSetSharedMemConfig)
  F(cuCtxResetPersistingL2Cache, 11000, cuCtxResetPersistingL2Cache)
  F(cuCtxEnablePeerAccess, 4000, cuCtxEnablePeerAccess) F(cuCtxDisablePeerAccess, 4000, cuCtxDisablePeerAccess)
  F(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode)
  F(cuProfilerStart, 4000, cuProfilerStart) F(cuProfilerStop, 4000, cuProfilerStop)
  F(cuStreamCreate, 2000, cuStreamCreate) F(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority)
  F(cuStreamDestroy, 4000, cuStreamDestroy_v2) Z(cuStreamQuery, 2000, cuStreamQuery) Z(cuStreamSynchronize, 2000, cuStreamSynchronize)
  Z(cuStreamWaitEvent, 3020, cuStreamWaitEvent) Z(cuStreamGetPriority, 5050, cuStreamGetPriority) Z(cuStreamGetFlags, 5050, cuStreamGetFlags)
  Z(cuStreamGetId, 12000, cuStreamGetId) Z(cuStreamGetDevice, 12080, cuStreamGetDevice)
  Z(cuStreamGetCtx, 9020, cuStreamGetCtx) Z(cuStreamGetCtx, 12050, cuStreamGetCtx_v2) F(cuStreamGetGreenCtx, 12040, cuStreamGetGreenCtx)
  Z(cuStreamIsCapturing, 10000, cuStreamIsCapturing) Z(cuStreamGetCaptureInfo, 10010, cuStreamGetCaptureInfo)
  Z(cuStreamGetCaptureInfo, 11030, cuStreamGetCaptureInfo_v2) Z(cuStreamGetCaptureInfo, 12030, cuStreamGetCaptureInfo_v3)
  Z(cuStreamBeginCapture, 10000, cuStreamBeginCapture) Z(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2)
  Z(cuStreamEndCapture, 10000, cuStreamEndCapture) F(cuGraphDestroy, 10000, cuGraphDestroy)
  Z(cuStreamCopyAttributes, 11000, cuStreamCopyAttributes) Z(cuStreamAddCallback, 5000, cuStreamAddCallback)
  Z(cuLaunchHostFunc, 10000, cuLaunchHostFunc) Z(cuLaunchHostFunc, 13020, cuLaunchHostFunc_v2)
  Z(cuStreamWriteValue32, 11070, cuStreamWriteValue32_v2) Z(cuStreamWriteValue64, 11070, cuStreamWriteValue64_v2)
  Z(cuStreamWaitValue32, 11070, cuStreamWaitValue32_v2) Z(cuStreamWaitValue64, 11070, cuStreamWaitValue64_v2)
  F(cuEventCreate, 2000, cuEventCreate) F(cuEventDestroy, 4000, cuEventDestroy_v2) Z(cuEventRecord, 2000, cuEventRecord)
  F(cuCtxRecordEvent, 12050, cuCtxRecordEvent)
  Z(cuEventRecordWithFlags, 11010, cuEventRecordWithFlags) F(cuEventQuery, 2000, cuEventQuery) F(cuEventSynchronize, 2000, cuEventSynchronize)
  F(cuEventElapsedTime, 2000, cuEventElapsedTime) F(cuEventElapsedTime, 12080, cuEventElapsedTime_v2)
  F(cuIpcGetEventHandle, 4010, cuIpcGetEventHandle) F(cuIpcOpenEventHandle, 4010, cuIpcOpenEventHandle)
  F(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle) F(cuIpcOpenMemHandle, 4010, cuIpcOpenMemHandle)
  F(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2) F(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle)
  F(cuMemAlloc, 3020, cuMemAlloc_v2) F(cuMemAllocPitch, 3020, cuMemAllocPitch_v2) F(cuMemFree, 3020, cuMemFree_v2)
  F(cuMemGetInfo, 3020, cuMemGetInfo_v2) F(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2)
  F(cuMemAllocHost, 3020, cuMemAllocHost_v2) F(cuMemHostAlloc, 2020, cuMemHostAlloc) F(cuMemFreeHost, 2000, cuMemFreeHost)
  F(cuMemHostRegister, 6050, cuMemHostRegister_v2) F(cuMemHostUnregister, 4000, cuMemHostUnregister)
  F(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2) F(cuMemHostGetFlags, 2030, cuMemHostGetFlags)
  F(cuPointerGetAttribute, 4000, cuPointerGetAttribute) F(cuPointerGetAttributes, 7000, cuPointerGetAttributes)
  D(cuMemcpy, 4000, cuMemcpy) D(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2) D(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2)
  D(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2) D(cuMemcpyPeer, 4000, cuMemcpyPeer) Z(cuMemcpyAsync, 4000, cuMemcpyAsync)
  Z(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2) Z(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2)
  Z(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2) Z(cuMemcpyPeerAsync, 4000, cuMemcpyPeerAsync)
  D(cuMemsetD8, 3020, cuMemsetD8_v2) D(cuMemsetD16, 3020, cuMemsetD16_v2) D(cuMemsetD32, 3020, cuMemsetD32_v2)
  Z(cuMemsetD8Async, 3020, cuMemsetD8Async) Z(cuMemsetD16Async, 3020, cuMemsetD16Async) Z(cuMemsetD32Async, 3020, cuMemsetD32Async)
#define X(n) { #n, 0, (void *)stub_##n, NULL },
  OTHER_NAMES(X)
#undef X
};

static CUresult lookup(const char *sym, void **pfn, int version, u64 flags, int *status) {
  if (!sym || !pfn || flags > 3) return E_VALUE;
  load_version();
  *pfn = NULL;
  if (status) *status = 1; /* symbol not found */
  if (version > g_version) return E_VALUE;
  const struct entry *best = NULL;
  for (size_t i = 0; i < sizeof g_entries / sizeof *g_entries; i++) {
    const struct entry *e = &g_entries[i];
    if (strcmp(e->name, sym)) continue;
    if (e->version > version) { if (status && !best) *status = 2; continue; }
    if (!best || e->version >= best->version) best = e;
  }
  if (!best) return OK;
  if (status) *status = 0;
  *pfn = (flags & 2) && best->pt ? best->pt : best->fn;
  return OK;
}
API cuGetProcAddress_v2(const char *sym, void **pfn, int version, u64 flags, int *status) {
  return lookup(sym, pfn, version, flags, status);
}
API cuGetProcAddress(const char *sym, void **pfn, int version, u64 flags) {
  int st;
  CUresult r = lookup(sym, pfn, version, flags, &st);
  return r ? r : st ? E_NOTFOUND : OK;
}
