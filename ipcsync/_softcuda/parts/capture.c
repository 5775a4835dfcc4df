/* SPDX-License-Identifier: Apache-2.0 */
/* Stream capture: what it refuses, and what it leaves in streams and events. */

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
static _Atomic u64 g_captured;   /* operations that were captured, for softcudaStat */
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

/* ask for the stream's id? */
static CUresult cap_id(struct stream *s) {
  if (!CAPTURES) return OK;
  pthread_mutex_lock(&g_cap_mu);
  CUresult r = !s->cap ? OK : s->cap->broken ? E_CAP_INVALIDATED : E_CAP_UNSUPPORTED;
  if (s->cap) s->cap->broken = true;
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}
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
static CUresult cap_event(struct event *e, CUresult captured) {
  u64 id = atomic_load_explicit(&e->cap, memory_order_relaxed);
  if (likely(!id) && !CAPTURES) return OK;
  pthread_mutex_lock(&g_cap_mu);
  struct capture *c = cap_find_locked(id);
  if (c) c->broken = true;
  CUresult r = id ? captured : cap_unsafe_locked();
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
