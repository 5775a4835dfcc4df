/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of executable graphs: how a plan is put on streams, and how its lanes run. */

/* One launch.  Lane 0 runs within the stream of the launch, as one operation; the other lanes are streams of the
 * executable.  Each step has a position in its lane's stream, so that a record can stand for it.  Lane 0 has two more:
 * one before its steps, once all that the launch waits for is done, and one behind all lanes. */
struct run {
  _Atomic int refs;              /* a lane each */
  struct plan *plan;
  u64 after;                     /* record of the end of the executable's launch before */
  u32 begin, end;                /* tickets */
  struct { u32 slot, queue; u64 base; } lane[MAXLANES]; /* base: the position before that of the lane's first step */
  struct { struct seen seen; u32 ticket; struct trec *tr; } step[]; /* seen: what an event's wait or record waits for */
};

static void run_drop(struct run *r) {
  if (atomic_fetch_sub(&r->refs, 1) != 1) return;
  plan_drop(r->plan);
  free(r);
}
static u64 run_record(struct run *r, u32 lane, u64 at) { return REC(r->lane[lane].slot, r->lane[lane].base + at); }

static bool work_holds_queue(const struct work *w) {
  bool holds = false;
  for (u32 i = 0; i < w->n; i++) holds |= op_holds_queue(&w->op[i]);
  return holds;
}

/* Put the launch of an executable (in o) on its lanes, lane 0 behind position pos of s; the position of its end.  Events
 * are recorded and looked at here, in the order of the plan.  s->mu and the executable's mu held. */
static u64 graph_place(struct op *o, struct stream *s, u64 pos) {
  struct exec *x = o->data;
  struct plan *p = x->plan;
  struct run *r = must(calloc(1, sizeof *r + p->n * sizeof *r->step));
  atomic_init(&r->refs, (int)p->lanes);
  r->plan = plan_hold(p);
  r->after = x->last;
  for (u32 l = 0; l < p->lanes; l++) {
    struct stream *t = l ? x->lane[l].s : s;
    if (l) {
      pthread_mutex_lock(&t->mu);
      queue_choose(t);
      pthread_mutex_unlock(&t->mu);
    }
    r->lane[l].slot = t->slot;
    r->lane[l].queue = t->queue;
    r->lane[l].base = l ? atomic_load(&S->stream[t->slot].tail) : pos + 1;
    atomic_store(&S->stream[t->slot].tail, r->lane[l].base + p->len[l] + !l); /* before any record of it is seen */
  }
  r->begin = queue_put(s);
  for (u32 i = 0; i < p->n; i++) {
    struct step *t = &p->step[i];
    struct event *e = t->work->event ? obj_get(&g_events, t->work->event) : NULL;
    r->step[i].ticket = queue_put(t->lane ? x->lane[t->lane].s : s);
    if (!e) continue;
    if (t->work->type == N_WAIT) r->step[i].seen = event_seen(e);
    else r->step[i].seen = event_take(e, run_record(r, t->lane, t->at), r->step[i].tr = trec_new(e));
  }
  r->end = queue_put(s);
  for (u32 l = 1; l < p->lanes; l++) {
    struct stream *t = x->lane[l].s;
    struct op w = { .type = OP_GRAPH, .width = (int)l, .data = r };
    pthread_mutex_lock(&t->mu);
    stream_push(t, &w, r->lane[l].base + p->len[l]);
    pthread_mutex_unlock(&t->mu);
  }
  o->data = r;
  pos = r->lane[0].base + p->len[0] + 1;
  x->last = REC(s->slot, pos);
  return pos;
}

static void step_run(struct run *r, u32 i, struct stream *s) {
  struct step *t = &r->plan->step[i];
  struct seen seen = r->step[i].seen;
  u32 queue = r->lane[t->lane].queue;
  struct op event = { .type = seen.rec ? OP_WAIT : OP_NOP, .rec = seen.rec, .late = seen.late, .tr = r->step[i].tr };
  bool holds = seen.rec || work_holds_queue(t->work);
  for (u32 k = 0; k < t->ndep; k++) {
    struct step *d = &r->plan->step[t->dep[k]];
    if (d->lane != t->lane) stream_after(s, (struct seen){ run_record(r, d->lane, d->at), 0 });
  }
  queue_enter(s, queue, r->step[i].ticket);
  if (!holds) queue_leave(s, queue, r->step[i].ticket);
  if (t->work->event) run_op(&event, s);
  run_work(t->work, s);
  if (holds) queue_leave(s, queue, r->step[i].ticket);
  op_complete(s, r->lane[t->lane].base + t->at);
}
/* run a lane: what the operation that graph_place put on its stream does */
static void graph_run(struct op *o, struct stream *s) {
  struct run *r = o->data;
  struct plan *p = r->plan;
  u32 lane = (u32)o->width;
  if (lane) {
    stream_after(s, (struct seen){ run_record(r, 0, 0), 0 });
  } else {
    if (r->after) stream_after(s, (struct seen){ r->after, 0 });
    queue_enter(s, r->lane[0].queue, r->begin);
    queue_leave(s, r->lane[0].queue, r->begin);
    op_complete(s, r->lane[0].base);
  }
  for (u32 i = 0; i < p->n; i++) if (p->step[i].lane == lane) step_run(r, i, s);
  for (u32 l = 1; !lane && l < p->lanes; l++) stream_after(s, (struct seen){ run_record(r, l, p->len[l]), 0 });
  if (!lane) { queue_enter(s, r->lane[0].queue, r->end); queue_leave(s, r->lane[0].queue, r->end); }
  run_drop(r);
}

static void exec_lanes_end(struct exec *x) { /* what is on them goes on to its end */
  pthread_mutex_lock(&x->ctx->mu);
  for (u32 l = 1; l < x->plan->lanes; l++) /* not those that ended with the context */
    if (x->lane[l].s && H(x->lane[l].s) == x->lane[l].h) stream_destroy_locked(x->lane[l].s);
  pthread_mutex_unlock(&x->ctx->mu);
}
static CUresult exec_new(struct ctx *c, void *graph, u64 flags, struct exec **out) {
  struct exec *x = obj_new(&g_execs);
  if (!x) return E_OOM;
  x->ctx = c;
  x->flags = flags;
  x->last = 0;
  memset(x->lane, 0, sizeof x->lane);
  pthread_mutex_lock(&g_cap_mu);
  struct graph *g = obj_get(&g_graphs, graph);
  CUresult r = cap_instantiate_locked(g);
  x->plan = r ? NULL : plan_new_locked(g);
  x->room = !r && x->plan->n ? x->plan->n : 1;
  x->parts = 0;
  for (u32 i = 0; !r && i < x->plan->n; i++) x->parts += x->plan->step[i].work->type >= N_WAIT;
  pthread_mutex_unlock(&g_cap_mu);
  for (u32 l = 1; !r && l < x->plan->lanes; l++)
    if (!(r = stream_new(c, 1, 0, ST_LANE, &x->lane[l].s))) x->lane[l].h = H(x->lane[l].s);
  if (r) {
    if (x->plan) exec_lanes_end(x);
    plan_drop(x->plan);
    obj_recycle(&g_execs, x);
    return r;
  }
  obj_publish(&g_execs, x);
  *out = x;
  return OK;
}
static CUresult exec_free(void *handle) {
  struct exec *x = obj_get(&g_execs, handle);
  if (!x) return E_VALUE;
  pthread_mutex_lock(&x->mu);    /* a launch that another thread began first */
  bool live = H(x) == handle;
  if (live) {
    atomic_store(&x->h.handle, 0);
    exec_lanes_end(x);
    plan_drop(x->plan);
  }
  pthread_mutex_unlock(&x->mu);
  if (live) obj_recycle(&g_execs, x);
  return live ? OK : E_VALUE;
}
/* Can its nodes run?  Registered memory that was given back since is the program's to unmap; events may be gone. */
static CUresult exec_ready(struct exec *x) {
  for (u32 l = 1; l < x->plan->lanes; l++) if (H(x->lane[l].s) != x->lane[l].h) return E_CTXDEAD;
  for (u32 i = 0; i < x->plan->n; i++) {
    struct work *w = x->plan->step[i].work;
    if (w->event && !obj_get(&g_events, w->event)) return E_HANDLE;
    for (u32 k = 0; k < w->n; k++)
      for (int side = 0; side < 2; side++) {
        struct alloc *a = side ? w->op[k].b : w->op[k].a;
        if (a && atomic_load(&a->unregistered)) return E_VALUE;
      }
  }
  return OK;
}
static CUresult exec_launch(void *handle, struct stream *s) {
  struct exec *x = obj_get(&g_execs, handle);
  if (!x) return E_VALUE;
  PACE_NS(g_profile->call.graph + x->parts * g_profile->call.graph_part);
  if (!cap_in(s)) stream_room(s, x->room);
  pthread_mutex_lock(&x->mu);
  struct op o = { .type = OP_GRAPH, .data = x, .n = x->room };
  CUresult r = H(x) != handle ? E_VALUE : exec_ready(x);
  if (!r) r = submit_now(s, &o, NULL);
  pthread_mutex_unlock(&x->mu);
  return r;
}
/* There is nowhere to upload it to, but the order is kept: behind the stream's work and the launches so far. */
static CUresult exec_upload(void *handle, struct stream *s) {
  struct exec *x = obj_get(&g_execs, handle);
  if (!x) return E_VALUE;
  if (cap_in(s)) return E_CAP_UNSUPPORTED;
  stream_room(s, 1);
  pthread_mutex_lock(&x->mu);
  struct op o = { .type = x->last ? OP_WAIT : OP_NOP, .rec = x->last };
  CUresult r = submit_now(s, &o, NULL);
  pthread_mutex_unlock(&x->mu);
  return r;
}
