/* SPDX-License-Identifier: Apache-2.0 */
/* Stream capture: what becomes nodes of a graph, what they depend on, and what is refused. */

/* A capture is what runs from cuStreamBeginCapture to cuStreamEndCapture; what breaks its rules invalidates it
 * ("broken").  Each of its streams, and each event recorded in it, has the nodes that stand for its work so far. */
enum { CAP_GLOBAL, CAP_THREAD_LOCAL, CAP_RELAXED };
struct capture {
  struct capture *next;
  u64 id, thread;                /* thread: self() of the one that began it */
  int mode;
  bool broken, own;              /* own: of the graph, which then goes if the capture fails */
  struct stream *origin, *members; /* members: the origin and the streams that forked from it, by cap_next */
  struct graph *graph;
  struct set loose;              /* what streams that were destroyed had last */
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
/* query the stream, the context, the event, or wait for it? A synchronous set is no unsafe call. */
static CUresult cap_stream(struct stream *s, bool unsafe) {
  if (!CAPTURES) return OK;
  pthread_mutex_lock(&g_cap_mu);
  CUresult r;
  if (s->cap) {
    r = s->cap->broken ? E_CAP_INVALIDATED : E_CAP_UNSUPPORTED;
    s->cap->broken = true;
  } else if (!(r = cap_implicit_locked(s, true)) && unsafe) {
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
static CUresult cap_event(struct event *e, bool unsafe) {
  u64 id = atomic_load_explicit(&e->cap, memory_order_relaxed);
  if (likely(!id) && !CAPTURES) return OK;
  pthread_mutex_lock(&g_cap_mu);
  struct capture *c = cap_find_locked(id);
  if (c) c->broken = true;
  CUresult r = id ? E_VALUE : unsafe ? cap_unsafe_locked() : OK;
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}

/* the next node of s; takes over w */
static void cap_node_locked(struct stream *s, struct work *w) {
  struct node *n = node_add_locked(s->cap->graph, w, s->cap_deps.v, s->cap_deps.n);
  s->cap_deps.n = 0;
  set_add(&s->cap_deps, H(n));
  atomic_fetch_add(&g_captured, 1);
}
static struct work *event_work(int type, struct event *e) {
  struct work *w = work_new(type, 0);
  w->event = H(e);
  return w;
}
static struct work *graph_work(struct plan *child) {
  struct work *w = work_new(N_GRAPH, 0);
  w->child = plan_hold(child);
  return w;
}
/* What becomes of an operation on s: executed (-1), or captured or refused, then the result of the call.
 * ev is the event that it records; without an operation, as a node of the graph. */
static int cap_op(struct stream *s, struct op *o, struct event *ev) {
  if (!CAPTURES) return -1;
  pthread_mutex_lock(&g_cap_mu);
  struct capture *c = s->cap;
  int r = OK;
  if (!c) {
    if (!(r = cap_implicit_locked(s, true))) r = -1;
  } else if (c->broken) {
    r = E_CAP_INVALIDATED;
  } else if (o && (o->type == OP_CALLBACK || o->type == OP_GRAPH || (ev && ev->shslot >= 0))) {
    r = E_CAP_UNSUPPORTED;
    c->broken = true;
  } else if (!o) {
    cap_node_locked(s, event_work(N_RECORD, ev));
  } else if (ev) {
    atomic_store(&ev->cap, c->id);
    ev->cap_deps.n = 0;
    set_add_all(&ev->cap_deps, &s->cap_deps);
    atomic_fetch_add(&g_captured, 1);
  } else {
    cap_node_locked(s, work_of(o));
  }
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}
/* The same of a wait of s for e.  A stream that waits for a captured event joins its capture. */
static int cap_wait(struct stream *s, struct event *e, bool external) {
  u64 id = atomic_load_explicit(&e->cap, memory_order_relaxed);
  if (likely(!id) && !CAPTURES) return external ? E_STATE : -1;
  pthread_mutex_lock(&g_cap_mu);
  struct capture *c = s->cap, *x = cap_find_locked(id);
  int r = cap_implicit_locked(s, true);
  if (r) goto out;
  if (!c && (external || !id)) {
    r = external ? E_STATE : -1;
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
    if (!c) { s->cap = x; s->cap_next = x->members; x->members = s; s->cap_deps.n = 0; }
    if (external) {
      cap_node_locked(s, event_work(N_WAIT, e));
    } else {
      if (id) set_add_all(&s->cap_deps, &e->cap_deps);
      atomic_fetch_add(&g_captured, 1);
    }
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

/* an executable is to be made of the graph: not while a capture puts nodes into it, which does not survive that */
static CUresult cap_instantiate_locked(struct graph *g) {
  if (!g || !g->capturing) return g ? OK : E_VALUE;
  for (struct capture *c = g_caps; c; c = c->next) if (c->graph == g) c->broken = true;
  return E_VALUE;
}

/* into g, behind nodes of it, or into a new graph */
static CUresult cap_begin(struct stream *s, int mode, void *into, void *const *dep, size_t ndep) {
  if (mode < CAP_GLOBAL || mode > CAP_RELAXED || (ndep && !dep)) return E_VALUE;
  if (s->kind == ST_LEGACY) return E_CAP_UNSUPPORTED;
  struct capture *c = calloc(1, sizeof *c);
  struct graph *g = !c ? NULL : into ? obj_get(&g_graphs, into) : graph_new();
  if (!g) { free(c); return c ? E_VALUE : E_OOM; }
  pthread_mutex_lock(&g_cap_mu);
  CUresult r = s->cap ? E_STATE : g->capturing || !nodes_of_locked(g, dep, ndep) ? E_VALUE : OK;
  if (!r) {
    g->capturing = true;
    *c = (struct capture){ g_caps, atomic_fetch_add(&g_next_id, 1), self(), mode, false, !into, s, s, g, { 0 } };
    s->cap = c;
    s->cap_next = NULL;
    s->cap_deps.n = 0;
    for (size_t i = 0; i < ndep; i++) set_add(&s->cap_deps, dep[i]);
    g_caps = c;
    atomic_fetch_add(&g_ncaps, 1);
  } else {
    if (!into) graph_free(g);
    free(c);
  }
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}
/* Do the first nodes, those that the origin's work depends on, hold all that the other streams captured? */
static bool cap_joined_locked(struct capture *c) {
  struct graph *g = c->graph;
  bool joined = true;
  for (u32 i = 0; i < c->origin->cap_deps.n; i++)
    ((struct node *)obj_get(&g_nodes, c->origin->cap_deps.v[i]))->mark = c->id;
  for (u32 i = g->n; i-- > 0;)
    for (u32 k = 0; g->node[i]->mark == c->id && k < g->node[i]->ndep; k++) g->node[i]->dep[k]->mark = c->id;
  for (struct stream *m = c->members; m; m = m->cap_next) set_add_all(&c->loose, &m->cap_deps);
  for (u32 i = 0; i < c->loose.n; i++) joined &= ((struct node *)obj_get(&g_nodes, c->loose.v[i]))->mark == c->id;
  return joined;
}
static CUresult cap_end_locked(struct capture *c, void **graph) {
  CUresult r = c->broken ? E_CAP_INVALIDATED : cap_joined_locked(c) ? OK : E_CAP_UNJOINED;
  struct capture **p = &g_caps;
  while (*p != c) p = &(*p)->next;
  *p = c->next;
  for (struct stream *m = c->members; m; m = m->cap_next) m->cap = NULL;
  c->graph->capturing = false;
  if (graph && !r) *graph = H(c->graph); else if (c->own) graph_free(c->graph);
  free(c->loose.v);
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
    set_add_all(&c->loose, &s->cap_deps);
  }
  pthread_mutex_unlock(&g_cap_mu);
}
/* what is known of a capture; the arrays are good until the next call that concerns the stream */
struct cap_info { int status; u64 id; void *graph, **deps; u64 *edges; size_t n; };
static CUresult cap_info(struct stream *s, struct cap_info *i) {
  CUresult r = OK;
  *i = (struct cap_info){ 0 };
  if (!CAPTURES) return OK;
  pthread_mutex_lock(&g_cap_mu);
  struct capture *c = s->cap;
  if (!c) {
    r = cap_implicit_locked(s, false);
  } else if (c->broken) {
    i->status = 2;
  } else {
    size_t n = s->cap_deps.n;
    s->cap_edges = must(realloc(s->cap_edges, (n + 1) * sizeof *s->cap_edges));
    memset(s->cap_edges, 0, n * sizeof *s->cap_edges); /* no edge has more to it than that it is there */
    *i = (struct cap_info){ 1, c->id, H(c->graph), s->cap_deps.v, s->cap_edges, n };
  }
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}
/* add to what the stream's next node depends on, or replace it */
static CUresult cap_update(struct stream *s, void *const *dep, size_t ndep, unsigned flags) {
  if (flags > 1 || (ndep && !dep)) return E_VALUE;
  pthread_mutex_lock(&g_cap_mu);
  struct capture *c = s->cap;
  CUresult r = !c ? E_STATE : c->broken ? E_CAP_INVALIDATED : nodes_of_locked(c->graph, dep, ndep) ? OK : E_VALUE;
  if (!r && flags) s->cap_deps.n = 0;
  for (size_t i = 0; !r && i < ndep; i++) set_add(&s->cap_deps, dep[i]);
  pthread_mutex_unlock(&g_cap_mu);
  return r;
}
