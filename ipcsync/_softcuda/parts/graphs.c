/* SPDX-License-Identifier: Apache-2.0 */
/* Calls about graphs: building and looking at them, executables and their launch. */

#define GRAPH_LOCKED(h) struct graph *g; do { CHK(); pthread_mutex_lock(&g_cap_mu); g = obj_get(&g_graphs, h); } while (0)
static CUresult unlocked(CUresult r) { pthread_mutex_unlock(&g_cap_mu); return r; }

API cuGraphCreate(void **out, unsigned flags) {
  CHK();
  if (!out || flags) return E_VALUE;
  struct graph *g = graph_new();
  if (!g) return E_OOM;
  *out = H(g);
  return OK;
}
API cuGraphDestroy(void *h) {
  GRAPH_LOCKED(h);
  CUresult r = !g ? E_VALUE : g->capturing ? E_STATE : OK;
  if (!r) graph_free(g);
  return unlocked(r);
}

/* Add a node to a graph, which may be captured into; takes over w. */
static CUresult add_node(void **out, void *h, void *const *dep, size_t ndep, struct work *w) {
  GRAPH_LOCKED(h);
  bool ok = out && g && (dep || !ndep) && nodes_of_locked(g, dep, ndep);
  for (size_t i = 1; ok && i < ndep; i++) for (size_t k = 0; k < i; k++) ok = ok && dep[i] != dep[k];
  if (ok) *out = H(node_add_locked(g, w, dep, (u32)ndep)); else work_drop(w);
  return unlocked(ok ? OK : E_VALUE);
}
API cuGraphAddEmptyNode(void **out, void *g, void *const *dep, size_t n) {
  CHK();
  return add_node(out, g, dep, n, work_new(N_EMPTY, 0));
}
struct host_params { CUhostFn fn; void *data; };
API cuGraphAddHostNode(void **out, void *g, void *const *dep, size_t n, const struct host_params *p) {
  CHK();
  if (!p || !p->fn) return E_VALUE;
  struct op o = { .type = OP_HOST, .fn = p->fn, .data = p->data };
  return add_node(out, g, dep, n, work_of(&o));
}
struct memset_params { CUdeviceptr dst; size_t pitch; unsigned value, width; size_t n, rows; };
API cuGraphAddMemsetNode(void **out, void *g, void *const *dep, size_t n, const struct memset_params *p, CUcontext h) {
  CHK();
  struct ctx *c;
  CUresult r = ctx_or_current(h, &c);
  if (r) return r;
  if (!p || (p->width != 1 && p->width != 2 && p->width != 4) || p->dst % p->width || !p->n || !p->rows) return E_VALUE;
  if (p->rows > 1) return E_NOSUP;
  struct alloc *a = p->n > SIZE_MAX / 4 ? NULL : mem_hold((uintptr_t)p->dst, p->n * p->width);
  if (!a) return E_VALUE;
  struct op o = { .type = OP_SET, .width = (int)p->width, .dst = mem_at(a, p->dst), .val = p->value, .n = p->n, .a = a };
  return add_node(out, g, dep, n, work_of(&o));
}
static CUresult add_event(void **out, void *g, void *const *dep, size_t n, CUevent h, int type) {
  CHK();
  struct event *e = obj_get(&g_events, h);
  return e ? add_node(out, g, dep, n, event_work(type, e)) : E_HANDLE;
}
API cuGraphAddEventRecordNode(void **out, void *g, void *const *dep, size_t n, CUevent e) {
  return add_event(out, g, dep, n, e, N_RECORD);
}
API cuGraphAddEventWaitNode(void **out, void *g, void *const *dep, size_t n, CUevent e) {
  return add_event(out, g, dep, n, e, N_WAIT);
}
struct batch_params { CUcontext ctx; unsigned count; const union memop_params *v; unsigned flags; };
API cuGraphAddBatchMemOpNode(void **out, void *g, void *const *dep, size_t n, const struct batch_params *p) {
  CHK();
  struct ctx *c;
  struct work *w;
  if (!p) return E_VALUE;
  CUresult r = ctx_or_current(p->ctx, &c);
  if (r || (r = batch_work(p->count, p->v, p->flags, &w))) return r;
  return add_node(out, g, dep, n, w);
}
API cuGraphAddChildGraphNode(void **out, void *h, void *const *dep, size_t n, void *child) {
  GRAPH_LOCKED(child);
  struct plan *p = g && !g->capturing && child != h ? plan_new_locked(g) : NULL;
  unlocked(OK);
  if (!p) return E_VALUE;
  CUresult r = add_node(out, h, dep, n, graph_work(p));
  plan_drop(p);
  return r;
}

/* Answers of lists: with no place for them only their number; else as many as there are and fit, zeros behind them. */
struct list { void **a, **b; size_t room, n; };
static void list_add(struct list *l, void *a, void *b) {
  if (l->n < l->room) { if (l->a) l->a[l->n] = a; if (l->b) l->b[l->n] = b; }
  l->n++;
}
static CUresult list_end(struct list *l, u64 *edges, size_t *n) {
  bool asked = l->a || l->b;
  for (size_t i = l->n; asked && i < l->room; i++) { if (l->a) l->a[i] = NULL; if (l->b) l->b[i] = NULL; }
  if (asked && edges) memset(edges, 0, l->room * sizeof *edges);
  if (!asked || l->n < *n) *n = l->n;
  return OK;
}
API cuGraphGetNodes(void *h, void **v, size_t *n) {
  GRAPH_LOCKED(h);
  if (!g || !n) return unlocked(E_VALUE);
  struct list l = { v, NULL, *n, 0 };
  for (u32 i = 0; i < g->n; i++) list_add(&l, H(g->node[i]), NULL);
  return unlocked(list_end(&l, NULL, n));
}
API cuGraphGetRootNodes(void *h, void **v, size_t *n) {
  GRAPH_LOCKED(h);
  if (!g || !n) return unlocked(E_VALUE);
  struct list l = { v, NULL, *n, 0 };
  for (u32 i = 0; i < g->n; i++) if (!g->node[i]->ndep) list_add(&l, H(g->node[i]), NULL);
  return unlocked(list_end(&l, NULL, n));
}
API cuGraphGetEdges_v2(void *h, void **from, void **to, u64 *edges, size_t *n) {
  GRAPH_LOCKED(h);
  if (!g || !n || !from != !to) return unlocked(E_VALUE);
  struct list l = { from, to, *n, 0 };
  for (u32 i = 0; i < g->n; i++)
    for (u32 k = 0; k < g->node[i]->ndep; k++) list_add(&l, H(g->node[i]->dep[k]), H(g->node[i]));
  return unlocked(list_end(&l, edges, n));
}
API cuGraphGetEdges(void *h, void **from, void **to, size_t *n) { return cuGraphGetEdges_v2(h, from, to, NULL, n); }

#define NODE_LOCKED(h) struct node *d; do { CHK(); pthread_mutex_lock(&g_cap_mu); d = obj_get(&g_nodes, h); } while (0)
API cuGraphNodeGetDependencies_v2(void *h, void **v, u64 *edges, size_t *n) {
  NODE_LOCKED(h);
  if (!d || !n) return unlocked(E_VALUE);
  struct list l = { v, NULL, *n, 0 };
  for (u32 k = 0; k < d->ndep; k++) list_add(&l, H(d->dep[k]), NULL);
  return unlocked(list_end(&l, edges, n));
}
API cuGraphNodeGetDependencies(void *h, void **v, size_t *n) { return cuGraphNodeGetDependencies_v2(h, v, NULL, n); }
API cuGraphNodeGetDependentNodes_v2(void *h, void **v, u64 *edges, size_t *n) {
  NODE_LOCKED(h);
  if (!d || !n) return unlocked(E_VALUE);
  struct list l = { v, NULL, *n, 0 };
  for (u32 i = d->at + 1; i < d->graph->n; i++)
    for (u32 k = 0; k < d->graph->node[i]->ndep; k++)
      if (d->graph->node[i]->dep[k] == d) list_add(&l, H(d->graph->node[i]), NULL);
  return unlocked(list_end(&l, edges, n));
}
API cuGraphNodeGetDependentNodes(void *h, void **v, size_t *n) { return cuGraphNodeGetDependentNodes_v2(h, v, NULL, n); }
API cuGraphNodeGetType(void *h, int *type) {
  NODE_LOCKED(h);
  if (d && type) *type = d->work->type;
  return unlocked(d && type ? OK : E_VALUE);
}
static CUresult node_event(void *h, CUevent *e, int type) {
  NODE_LOCKED(h);
  bool ok = d && e && d->work->type == type;
  if (ok) *e = d->work->event;
  return unlocked(ok ? OK : E_VALUE);
}
API cuGraphEventRecordNodeGetEvent(void *h, CUevent *e) { return node_event(h, e, N_RECORD); }
API cuGraphEventWaitNodeGetEvent(void *h, CUevent *e) { return node_event(h, e, N_WAIT); }

API cuUserObjectCreate(void **out, void *data, CUhostFn destroy, unsigned refs, unsigned flags) {
  CHK();
  if (!out || !destroy || !refs || refs > INT_MAX || flags != 1) return E_VALUE; /* 1: NO_DESTRUCTOR_SYNC */
  struct user *u = obj_new(&g_users);
  if (!u) return E_OOM;
  u->destroy = destroy;
  u->data = data;
  atomic_store(&u->refs, refs);
  obj_publish(&g_users, u);
  *out = H(u);
  return OK;
}
#define USER(h, count) CHK(); struct user *u = obj_get(&g_users, h); if (!u || !count || count > INT_MAX) return E_VALUE
API cuUserObjectRetain(void *h, unsigned n) { USER(h, n); atomic_fetch_add(&u->refs, n); return OK; }
API cuUserObjectRelease(void *h, unsigned n) { USER(h, n); user_release(u, n); return OK; }
API cuGraphRetainUserObject(void *graph, void *h, unsigned n, unsigned flags) {
  USER(h, n);
  GRAPH_LOCKED(graph);
  if (!g || flags > 1) return unlocked(E_VALUE);
  if (!flags) atomic_fetch_add(&u->refs, n); /* else those of the caller */
  held_add(&g->held, &g->nheld, u, n);
  return unlocked(OK);
}
API cuGraphReleaseUserObject(void *graph, void *h, unsigned n) {
  USER(h, n);
  GRAPH_LOCKED(graph);
  u32 i = 0;
  while (g && i < g->nheld && g->held[i].user != u) i++;
  if (!g || i == g->nheld || g->held[i].n < n) return unlocked(E_VALUE);
  if (!(g->held[i].n -= n)) g->held[i] = g->held[--g->nheld];
  unlocked(OK);
  user_release(u, n);
  return OK;
}

enum { INSTANTIATE_AUTO_FREE = 1, INSTANTIATE_UPLOAD = 2, INSTANTIATE_DEVICE_LAUNCH = 4, INSTANTIATE_PRIORITY = 8 };
static CUresult instantiate(void **out, void *h, u64 flags) {
  CUR(c);
  struct exec *x;
  if (!out || flags > 15) return E_VALUE;
  if (flags & INSTANTIATE_DEVICE_LAUNCH) return E_NOSUP;
  CUresult r = exec_new(c, h, flags, &x);
  if (!r) *out = H(x);
  return r;
}
API cuGraphInstantiateWithFlags(void **out, void *g, u64 flags) {
  return flags & INSTANTIATE_UPLOAD ? E_VALUE : instantiate(out, g, flags);
}
struct instantiate_params { u64 flags; CUstream upload; void *error; int result; };
static CUresult instantiate_with(void **out, void *g, struct instantiate_params *p, int pt) {
  CHK();
  if (!p) return E_VALUE;
  p->error = NULL;
  p->result = 1;                 /* CUDA_GRAPH_INSTANTIATE_ERROR */
  if (p->flags & INSTANTIATE_UPLOAD) { STREAM(p->upload); if (cap_in(s)) return E_CAP_UNSUPPORTED; }
  CUresult r = instantiate(out, g, p->flags);
  if (!r) p->result = 0;
  return r;
}
API cuGraphInstantiateWithParams(void **out, void *g, struct instantiate_params *p) { return instantiate_with(out, g, p, 0); }
API cuGraphInstantiateWithParams_ptsz(void **out, void *g, struct instantiate_params *p) { return instantiate_with(out, g, p, 1); }
API cuGraphExecGetFlags(void *h, u64 *flags) {
  CHK();
  struct exec *x = obj_get(&g_execs, h);
  if (!x || !flags) return E_VALUE;
  *flags = x->flags;
  return OK;
}
API cuGraphExecDestroy(void *h) { CHK(); return exec_free(h); }
PTSZ(cuGraphLaunch, (void *x, CUstream h), STREAM(h); return exec_launch(x, s))
PTSZ(cuGraphUpload, (void *x, CUstream h), STREAM(h); return exec_upload(x, s))

/* Same steps in the same order, of the same types: the executable does from its next launch on what the graph does. */
struct update_result { int result; void *node, *from; };
API cuGraphExecUpdate_v2(void *hx, void *hg, struct update_result *out) {
  enum { SAME, ERROR, TOPOLOGY, TYPE };
  CHK();
  struct exec *x = obj_get(&g_execs, hx);
  if (!x || !out) return E_VALUE;
  *out = (struct update_result){ ERROR, NULL, NULL };
  pthread_mutex_lock(&x->mu);
  GRAPH_LOCKED(hg);
  bool ok = g && !g->capturing && H(x) == hx;
  struct plan *p = ok ? plan_new_locked(g) : NULL, *old = x->plan;
  unlocked(OK);
  if (p) out->result = p->n != old->n ? TOPOLOGY : SAME;
  for (u32 i = 0; p && i < p->n && out->result == SAME; i++) {
    struct step *a = &p->step[i], *b = &old->step[i];
    if (a->ndep != b->ndep || (a->ndep && memcmp(a->dep, b->dep, a->ndep * sizeof *a->dep))) out->result = TOPOLOGY;
    else if (a->work->type != b->work->type) out->result = TYPE;
  }
  if (p && out->result == SAME) { x->plan = p; p = old; }
  pthread_mutex_unlock(&x->mu);
  plan_drop(p);
  return !ok ? E_VALUE : out->result ? E_GRAPH_UPDATE : OK;
}
