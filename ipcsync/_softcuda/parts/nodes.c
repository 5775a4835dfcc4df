/* SPDX-License-Identifier: Apache-2.0 */
/* Graphs as programs build them, and the plan that an executable graph follows. */

enum { N_KERNEL, N_MEMCPY, N_MEMSET, N_HOST, N_GRAPH, N_EMPTY, N_WAIT, N_RECORD, N_MEMOPS = 12 }; /* CUgraphNodeType */

/* What a node does.  Never changed, so that nodes, plans and batches of a stream share it. */
struct work {
  _Atomic int refs;
  int type;
  void *event;                   /* of N_WAIT and N_RECORD */
  struct plan *child;            /* of N_GRAPH */
  u32 n;
  struct op op[];                /* one after the other */
};
/* A plan is the nodes of a graph when it was instantiated, those of child graphs in between, in an order in which they
 * can run.  They are dealt to lanes: a lane runs its steps one by one, lanes run beside each other. */
struct step {
  struct work *work;
  u32 *dep, ndep, lane, at;      /* dep: indices of steps; at: place in the lane, from 1 */
};
struct plan {
  _Atomic int refs;
  struct held *held;             /* user objects of the graph and of child graphs */
  u32 nheld;
  u32 n, lanes, len[MAXLANES];
  struct step step[];
};

static void set_add(struct set *s, void *h) {
  for (u32 i = 0; i < s->n; i++) if (s->v[i] == h) return;
  if (s->n == s->room) {
    s->room = s->room ? s->room * 2 : 4;
    s->v = must(realloc(s->v, s->room * sizeof *s->v));
  }
  s->v[s->n++] = h;
}
static void set_add_all(struct set *s, const struct set *t) { for (u32 i = 0; i < t->n; i++) set_add(s, t->v[i]); }

static void *user_end(void *arg) {
  struct user *u = arg;
  u->destroy(u->data);
  obj_recycle(&g_users, u);
  return NULL;
}
static void user_release(struct user *u, u64 n) {
  if (atomic_fetch_sub(&u->refs, n) != n) return;
  atomic_store(&u->h.handle, 0);
  /* so that the program's code runs under no lock, and in no call of the program */
  while (start_thread(user_end, u, 2 << 20)) usleep(10000);
}
static void held_add(struct held **v, u32 *n, struct user *u, u64 more) {
  for (u32 i = 0; i < *n; i++) if ((*v)[i].user == u) { (*v)[i].n += more; return; }
  *v = must(realloc(*v, (*n + 1) * sizeof **v));
  (*v)[(*n)++] = (struct held){ u, more };
}
static void held_release(struct held *v, u32 n) {
  for (u32 i = 0; i < n; i++) user_release(v[i].user, v[i].n);
  free(v);
}
static void plan_drop(struct plan *p);
static struct work *work_new(int type, u32 n) {
  struct work *w = must(calloc(1, sizeof *w + n * sizeof(struct op)));
  atomic_init(&w->refs, 1);
  w->type = type;
  w->n = n;
  return w;
}
static struct work *work_hold(struct work *w) { atomic_fetch_add(&w->refs, 1); return w; }
static void work_drop(struct work *w) {
  if (!w || atomic_fetch_sub(&w->refs, 1) != 1) return;
  for (u32 i = 0; i < w->n; i++) { mem_drop(w->op[i].a); mem_drop(w->op[i].b); }
  plan_drop(w->child);
  free(w);
}
/* the work of a node for the operation of a stream, whose holds on memory it takes over */
static struct work *work_of(struct op *o) {
  static const int types[] = { [OP_NOP] = N_EMPTY, [OP_HOST] = N_HOST, [OP_COPY] = N_MEMCPY, [OP_SET] = N_MEMSET,
                               [OP_WRITE] = N_MEMOPS, [OP_WAITVAL] = N_MEMOPS };
  if (o->type == OP_BATCH) return work_hold(o->data);
  struct work *w = work_new(types[o->type], o->type != OP_NOP);
  if (w->n) {
    w->op[0] = *o;
    w->op[0].stage = NULL;       /* pageable memory is read when the graph runs */
    o->a = o->b = NULL;
  }
  return w;
}

/* Add a node; takes over w.  The nodes that it depends on are of g.  g_cap_mu held. */
static struct node *node_add_locked(struct graph *g, struct work *w, void *const *dep, u32 ndep) {
  struct node *n = must(obj_new(&g_nodes));
  n->graph = g;
  n->work = w;
  n->mark = 0;
  n->ndep = ndep;
  n->dep = ndep ? must(malloc(ndep * sizeof *n->dep)) : NULL;
  for (u32 i = 0; i < ndep; i++) n->dep[i] = obj_get(&g_nodes, dep[i]);
  if (g->n == g->room) {
    g->room = g->room ? g->room * 2 : 16;
    g->node = must(realloc(g->node, g->room * sizeof *g->node));
  }
  n->at = g->n;
  g->node[g->n++] = n;
  obj_publish(&g_nodes, n);
  return n;
}
static bool nodes_of_locked(struct graph *g, void *const *v, size_t n) {
  for (size_t i = 0; i < n; i++) {
    struct node *d = obj_get(&g_nodes, v[i]);
    if (!d || d->graph != g) return false;
  }
  return true;
}
static struct graph *graph_new(void) {
  struct graph *g = obj_new(&g_graphs);
  if (!g) return NULL;
  g->capturing = false;
  g->node = NULL;
  g->n = g->room = 0;
  g->held = NULL;
  g->nheld = 0;
  obj_publish(&g_graphs, g);
  return g;
}
static void graph_free(struct graph *g) {
  for (u32 i = 0; i < g->n; i++) {
    work_drop(g->node[i]->work);
    free(g->node[i]->dep);
    obj_recycle(&g_nodes, g->node[i]);
  }
  free(g->node);
  held_release(g->held, g->nheld);
  obj_recycle(&g_graphs, g);
}

static void plan_drop(struct plan *p) {
  if (!p || atomic_fetch_sub(&p->refs, 1) != 1) return;
  for (u32 i = 0; i < p->n; i++) { work_drop(p->step[i].work); free(p->step[i].dep); }
  held_release(p->held, p->nheld);
  free(p);
}
static void plan_hold_users(struct plan *p, const struct held *v, u32 n) {
  for (u32 i = 0; i < n; i++) {
    atomic_fetch_add(&v[i].user->refs, 1);
    held_add(&p->held, &p->nheld, v[i].user, 1);
  }
}
static struct plan *plan_hold(struct plan *p) { atomic_fetch_add(&p->refs, 1); return p; }
static struct step *step_add(struct plan *p, struct work *w, u32 ndep) {
  struct step *s = &p->step[p->n++];
  s->work = w;
  s->dep = ndep ? must(malloc(ndep * sizeof *s->dep)) : NULL;
  s->ndep = 0;
  return s;
}
/* The steps of a child graph between two empty ones; the index of the latter. */
static u32 child_steps(struct plan *p, struct plan *child, u32 begin) {
  bool *inner = must(calloc(child->n + 1, 1)); /* something depends on it */
  for (u32 i = 0; i < child->n; i++) {
    struct step *c = &child->step[i], *s = step_add(p, work_hold(c->work), c->ndep + 1);
    for (u32 k = 0; k < c->ndep; k++) { inner[c->dep[k]] = true; s->dep[s->ndep++] = begin + 1 + c->dep[k]; }
    if (!s->ndep) s->dep[s->ndep++] = begin;
  }
  struct step *end = step_add(p, work_new(N_EMPTY, 0), child->n + 1);
  for (u32 i = 0; i < child->n; i++) if (!inner[i]) end->dep[end->ndep++] = begin + 1 + i;
  if (!end->ndep) end->dep[end->ndep++] = begin;
  free(inner);
  return p->n - 1;
}
/* Each step goes to a lane all of whose steps are behind it, best one that it waits for anyhow, else to a new lane.
 * clock[i][l] is how many steps of lane l are complete once step i is. */
static void deal(struct plan *p) {
  u32 (*clock)[MAXLANES] = must(calloc(p->n + 1, sizeof *clock)), turn = 0;
  for (u32 i = 0; i < p->n; i++) {
    struct step *s = &p->step[i];
    u32 *mine = clock[i], lane = MAXLANES;
    for (u32 k = 0; k < s->ndep; k++) {
      u32 *c = clock[s->dep[k]];
      for (u32 l = 0; l < p->lanes; l++) if (c[l] > mine[l]) mine[l] = c[l];
    }
    for (u32 k = 0; k < s->ndep && lane == MAXLANES; k++) {
      struct step *d = &p->step[s->dep[k]];
      if (d->at == p->len[d->lane]) lane = d->lane;
    }
    for (u32 l = 0; l < p->lanes && lane == MAXLANES; l++) if (mine[l] == p->len[l]) lane = l;
    if (lane == MAXLANES) lane = p->lanes < MAXLANES ? p->lanes++ : turn++ % MAXLANES;
    s->lane = lane;
    mine[lane] = s->at = ++p->len[lane];
  }
  free(clock);
}
/* what an executable made of the graph does; g_cap_mu held */
static struct plan *plan_new_locked(struct graph *g) {
  u32 n = 0, *to = must(malloc((g->n + 1) * sizeof *to));
  for (u32 i = 0; i < g->n; i++) n += g->node[i]->work->child ? g->node[i]->work->child->n + 2 : 1;
  struct plan *p = must(calloc(1, sizeof *p + n * sizeof *p->step));
  atomic_init(&p->refs, 1);
  plan_hold_users(p, g->held, g->nheld);
  for (u32 i = 0; i < g->n; i++) {
    struct node *d = g->node[i];
    struct plan *child = d->work->child;
    if (child) plan_hold_users(p, child->held, child->nheld);
    struct step *s = step_add(p, child ? work_new(N_EMPTY, 0) : work_hold(d->work), d->ndep);
    for (u32 k = 0; k < d->ndep; k++) s->dep[s->ndep++] = to[d->dep[k]->at];
    to[i] = child ? child_steps(p, child, p->n - 1) : p->n - 1;
  }
  free(to);
  deal(p);
  if (!p->lanes) p->lanes = 1;
  return p;
}
