/* SPDX-License-Identifier: Apache-2.0 */
/* The work of streams: queues, the worker of each stream, what waits for what. */

static struct trec *trec_new(const struct event *e) { /* NULL if the event keeps no time */
  if (e->flags & 2) return NULL;
  struct trec *t = must(malloc(sizeof *t));
  atomic_init(&t->refs, 2);
  atomic_init(&t->t, 0);
  return t;
}
static void trec_drop(struct trec *t) { if (t && atomic_fetch_sub(&t->refs, 1) == 1) free(t); }

static void graph_run(struct op *o, struct stream *s);
static u64 graph_place(struct op *o, struct stream *s, u64 pos);

static long op_room(const struct op *o) { return o->type == OP_GRAPH ? (long)o->n : 1; } /* in its stream's queue */
static void op_drop(struct op *o) {
  if (o->type == OP_BATCH) work_drop(o->data);
  trec_drop(o->tr);
  free(o->stage);
  mem_drop(o->a);
  mem_drop(o->b);
}
static void run_work(struct work *w, struct stream *s);
static int cost_of(const struct op *o) {
  if (o->cost) return o->cost;
  bool device = o->a && (o->a->kind == A_DEV || o->a->kind == A_IPC);
  if (o->type == OP_WRITE) return device ? GPU_WRITE_DEVICE : GPU_WRITE_HOST;
  if (o->type == OP_WAITVAL) return device ? GPU_WORD_DEVICE : GPU_WORD_HOST;
  return GPU_NOTHING;
}
static bool op_takes_time(const struct op *o) { /* of its own, beside what the profile says */
  return o->type == OP_HOST || o->type == OP_CALLBACK || o->type == OP_COPY || o->type == OP_SET;
}
static bool op_is_seen(const struct op *o) { /* by a CPU, without a call */
  return op_takes_time(o) || o->type == OP_WRITE;
}
/* What the stream does next is behind the record, by its clock too. */
static void stream_after(struct stream *s, struct seen n) {
  seen_reach(n);
  if (!g_profile || !n.rec) return;
  u64 at = n.late ? now_ns() : rec_time(n.rec);
  if (s->clock < at) s->clock = at;
}
/* The same without a wait, if it has got there and nothing is queued before. */
static bool stream_is_after(struct stream *s, struct seen n) {
  if (!g_profile || n.late || s->head) return seen_done(n);
  if (n.rec && !rec_reached(n.rec)) return false;
  stream_after(s, n);
  return true;
}
/* When it begins, and when it is over, by the stream's clock; without a profile only that it waits. */
static void begin(struct op *o, struct stream *s) {
  struct sh_written *waits = g_profile && o->type == OP_WAITVAL ? written_of(o->dst) : NULL;
  u32 count = waits ? atomic_load(&waits->count) : 0;
  bool waited = o->type == OP_WAITVAL && word_wait(o);
  if (o->type == OP_WAIT) stream_after(s, (struct seen){ o->rec, o->late });
  if (!g_profile) return;
  int cost = cost_of(o);
  u32 gap = g_profile->gpu[cost].gap, latency = g_profile->gpu[cost].latency;
  u64 at = s->clock > o->from ? s->clock : o->from;
  if (waits) {
    u64 met = atomic_load(&waits->at); /* by the writing stream's clock: this thread may look late */
    bool written = waited ? atomic_load(&waits->count) != count : met > at;
    if (waited && !written) met = t_clock; /* a CPU's store, just now */
    if (met > at && (waited || written)) {
      at = met, gap = latency;
      if (written && !g_mps && atomic_load(&waits->by) != g_me)
        gap += cost == GPU_WORD_HOST ? g_profile->cross_host : g_profile->cross_device;
    }
    latency = gap;
  }
  if (cost == GPU_RECORD_IPC || cost == GPU_RECORD_IMPORTED) {
    at = turn_begin(g_dev[s->ctx->dev], o->from, at);
    gap = g_profile->gpu[GPU_RECORD_IPC].gap;
    latency = g_profile->gpu[GPU_RECORD_IPC].latency;
  }
  s->clock = at + gap;
  s->seen = at + latency;
  if (op_is_seen(o)) sleep_until(s->seen);
}
/* Do it, and be as late as IPCSYNC_HOST_LATENCY_US wants. */
static void perform(struct op *o, struct stream *s) {
  begin(o, s);
  switch (o->type) {
  case OP_HOST: o->fn(o->data); break;
  case OP_CALLBACK: o->cb((CUstream)(uintptr_t)s->pub, OK, o->data); break;
  case OP_COPY:
    memmove(o->dst, o->stage ? o->stage : o->src, o->n);
    words_stored(o->dst, o->n);
    break;
  case OP_SET:
    if (o->width == 1) memset(o->dst, (int)o->val, o->n);
    else if (o->width == 2) for (size_t i = 0; i < o->n; i++) ((uint16_t *)o->dst)[i] = (uint16_t)o->val;
    else for (size_t i = 0; i < o->n; i++) ((u32 *)o->dst)[i] = (u32)o->val;
    words_stored(o->dst, o->n * (size_t)o->width);
    break;
  case OP_WRITE:
    if (g_profile) word_written(o->dst, s->seen);
    if (o->width == 4) atomic_store((_Atomic u32 *)o->dst, (u32)o->val);
    else atomic_store((_Atomic u64 *)o->dst, o->val);
    words_stored(o->dst, (size_t)o->width);
    break;
  case OP_BATCH: run_work(o->data, s); break;
  case OP_GRAPH: graph_run(o, s); break;
  }
  if (g_latency_us) {
    struct timespec t = { g_latency_us / 1000000, (g_latency_us % 1000000) * 1000 };
    nanosleep(&t, NULL);
  }
  if (g_profile && (op_takes_time(o) || g_latency_us)) {
    u64 now = now_ns(); /* as long as it really took */
    if (s->clock < now) s->clock = now;
    if (s->seen < now) s->seen = now;
  }
  if (o->tr) atomic_store(&o->tr->t, g_profile ? s->seen : now_ns());
}

static void run_op(struct op *o, struct stream *s) {
  perform(o, s);
  op_drop(o);
}
static void op_complete(struct stream *s, u64 pos) {
  stamp(s->slot, pos, s->seen);
  complete(s->slot, pos);
}

static void run_work(struct work *w, struct stream *s) {
  for (u32 i = 0; i < w->n; i++) {
    struct op o = w->op[i];
    o.cost = cost_of(&o);
    o.a = o.b = NULL;            /* the work holds them */
    run_op(&o, s);
  }
}
/* does the hardware queue itself do it, and hands out nothing else before it is done? */
static bool op_holds_queue(const struct op *o) {
  return o->type == OP_WAIT || o->type == OP_WAITVAL || o->type == OP_WRITE || o->type == OP_BATCH;
}
/* Do what is at the head of its queue. */
static void run_entry(struct op *o, struct stream *s) {
  bool holds = op_holds_queue(o);
  if (!holds) queue_leave(s, o->queue, o->ticket);
  perform(o, s);
  if (holds) queue_leave(s, o->queue, o->ticket);
}
static void run_queued(struct op *o, struct stream *s) {
  if (o->type == OP_GRAPH) { run_op(o, s); return; } /* its steps are the entries */
  if (o->pos > s->ahead) { /* else it is done */
    queue_enter(s, o->queue, o->ticket);
    if (!outlive(s, o)) run_entry(o, s);
  }
  op_drop(o);
}

/* May it be executed in the call?  With a profile: is there nothing that a CPU sees at a time to come? */
static bool op_quick(const struct op *o) {
  if (g_latency_us) return false;
  if (g_profile)
    return o->type == OP_NOP || (o->type == OP_WAIT && !o->late && rec_reached(o->rec))
      || (o->type == OP_WAITVAL && word_fits_now(o));
  if (g_async) return false;
  switch (o->type) {
  case OP_HOST: case OP_CALLBACK: case OP_WAITVAL: case OP_BATCH: case OP_GRAPH: return false;
  case OP_WAIT: return seen_done((struct seen){ o->rec, o->late });
  case OP_COPY: case OP_SET: return o->n <= 1 << 20;
  }
  return true;
}

static void stream_free(struct stream *s) { /* dead and drained */
  atomic_store(&S->stream[s->slot].owner, 0);
  obj_recycle(&g_streams, s);
}

/* Wake the callers that wait for room: many operations at a time, if the stream does not stop here. */
static void room_made(struct stream *s) {
  struct op *o = s->head;
  bool goes_on = o && (o->type == OP_NOP || o->type == OP_WRITE) && queue_heads(s, o->queue, o->ticket);
  if (!goes_on || s->queued <= g_capacity - g_capacity / 16) pthread_cond_broadcast(&s->room);
}

static void *worker(void *arg) {
  struct stream *s = arg;
  t_worker = true;
  if (g_profile) prctl(PR_SET_TIMERSLACK, 1);
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
    run_queued(o, s);
    pthread_mutex_lock(&s->mu);
    s->head = o->next;
    if (!s->head) s->tail = NULL;
    s->queued -= op_room(o);
    if (unlikely(s->starved)) room_made(s);
    op_complete(s, o->pos);
    o->next = s->spare;
    s->spare = o;
  }
}

static void stream_push(struct stream *s, const struct op *t, u64 pos) {
  struct op *o = s->spare;
  if (o) s->spare = o->next; else o = must(malloc(sizeof *o));
  *o = *t;
  o->pos = pos;
  o->next = NULL;
  o->queue = s->queue;
  if (o->type != OP_GRAPH) o->ticket = queue_put(s);
  if (s->tail) __atomic_store_n(&s->tail->next, o, __ATOMIC_RELEASE); else s->head = o;
  s->tail = o;
  s->queued += op_room(o);
  if (s->worker) {
    if (s->head == o) pthread_cond_signal(&s->cv);
  } else {
    for (int i = 0; start_thread(worker, s, 2 << 20); i++) {
      if (i > 1000) { say("cannot start a stream's thread: %s", strerror(errno)); abort(); }
      usleep(10000);
    }
    s->worker = true;
  }
}

static u64 stream_tail(struct stream *s) { return REC(s->slot, atomic_load(&S->stream[s->slot].tail)); }

static void add_record(u64 **v, int *n, int *cap, u64 r) {
  if (*n == *cap) { *cap = *cap ? *cap * 2 : 16; *v = must(realloc(*v, (size_t)*cap * sizeof **v)); }
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

/* Is the record one of this stream, so that what comes now is behind it anyway? */
static bool seen_in_order(struct seen e, struct stream *s) { return REC_SLOT(e.rec) == s->slot && !rec_lost(e.rec); }
static struct seen event_seen(struct event *e) {
  struct seen n = { atomic_load(e->latest), 0 };
  if (n.rec && e->shslot >= 0) n.late = atomic_load(&S->event[e->shslot].late);
  return n;
}
/* The event's latest record becomes rec; what that has to wait for: of an interprocess event, its earlier record. */
static struct seen event_take(struct event *e, u64 rec, struct trec *tr) {
  struct seen prior = { 0, 0 };
  struct trec *old = NULL;
  if (e->shslot >= 0) {
    prior = slot_record((u32)e->shslot, rec);
    if (!g_serial) prior = (struct seen){ 0, 0 };
  } else if (tr) {
    pthread_mutex_lock(&e->mu);
    old = e->tr;
    e->tr = tr;
    atomic_store(e->latest, rec);
    pthread_mutex_unlock(&e->mu);
  } else {
    atomic_store(e->latest, rec);
  }
  if (unlikely(atomic_load_explicit(&e->cap, memory_order_relaxed))) atomic_store(&e->cap, 0);
  trec_drop(old);
  return prior;
}

static bool stream_is_full(struct stream *s, u32 more) {
  long queued = atomic_load_explicit(&s->queued, memory_order_relaxed);
  return queued && queued + more > g_capacity;
}
/* A stream takes in so many operations and no more: the caller waits for room for n, holding nothing that a host function
 * or a stream's thread could need.  A host function itself is not held up: it may be what makes room. */
static void stream_room(struct stream *s, u32 n) {
  if (!g_capacity || t_worker) return;
  if (unlikely(stream_is_full(s, n))) {
    pthread_mutex_lock(&s->mu);
    s->starved++;
    while (stream_is_full(s, n)) pthread_cond_wait(&s->room, &s->mu);
    s->starved--;
    pthread_mutex_unlock(&s->mu);
  }
  u64 over = atomic_load_explicit(&s->clock, memory_order_relaxed), ahead = (u64)g_capacity * 1000;
  if (over > ahead + t_clock) sleep_until(over - ahead); /* what is not over by the clock is in the queue too: a us each */
}

static CUresult submit_now(struct stream *s, struct op *o, struct event *ev) { /* if there is room or not */
  int captured = cap_op(s, o, ev);
  if (unlikely(captured >= 0)) { op_drop(o); return captured; }
  if (g_profile) {
    static const int records[SORTS] = { GPU_RECORD_PLAIN, GPU_RECORD_TIMING, GPU_RECORD_IPC, GPU_RECORD_IMPORTED };
    o->cost = ev ? records[event_sort(ev)] : cost_of(o);
    o->from = t_clock + g_profile->launch; /* the call's pace has just asked */
  }
  u64 one, *deps = NULL;
  int nd = implicit_deps(s, &deps, &one);
  struct trec *tr = o->tr = ev ? trec_new(ev) : NULL; /* run_op drops its share of it */
  struct sh_stream *sh = &S->stream[s->slot];
  queue_order_begin();
  pthread_mutex_lock(&s->mu);
  bool free_queue = queue_choose(s);
  u64 pos = atomic_load(&sh->tail);
  for (int i = 0; i < nd; i++) {
    if (stream_is_after(s, (struct seen){ deps[i], 0 })) continue;
    struct op w = { .type = OP_WAIT, .rec = deps[i], .cost = GPU_WAIT_PLAIN };
    atomic_store(&sh->tail, ++pos);
    stream_push(s, &w, pos);
  }
  if (ev && ev->shslot >= 0) { /* pending for all before it can complete; one position is for the wait */
    atomic_store(&sh->tail, pos += 2);
    struct seen prior = event_take(ev, REC(s->slot, pos), NULL);
    if (!seen_in_order(prior, s) && !stream_is_after(s, prior)) {
      struct op w = { .type = OP_WAIT, .rec = prior.rec, .late = prior.late, .cost = GPU_WAIT_PLAIN };
      stream_push(s, &w, pos - 1);
    }
  } else {
    pos = o->type == OP_GRAPH ? graph_place(o, s, pos) : pos + 1;
    atomic_store(&sh->tail, pos);
  }
  if (!s->head && free_queue && op_quick(o)) {
    if (o->type == OP_WAITVAL) o->type = OP_NOP; /* the stream has looked in this moment */
    run_op(o, s);
    op_complete(s, pos);
  } else {
    stream_push(s, o, pos);
  }
  if (ev && ev->shslot < 0) event_take(ev, REC(s->slot, pos), tr);
  pthread_mutex_unlock(&s->mu);
  queue_order_end();
  if (deps != &one) free(deps);
  return OK;
}

static CUresult submit(struct stream *s, struct op *o, struct event *ev) {
  if (!cap_in(s)) stream_room(s, 1);
  return submit_now(s, o, ev);
}

static CUresult stream_new(struct ctx *c, unsigned flags, int prio, int kind, struct stream **out) {
  u32 start = atomic_load(&g_slot_hint), slot = 0;
  bool got = false;
  for (u32 k = 0; k < 2 * MAXSTREAM && !got; k++) {
    slot = (start + k) % MAXSTREAM;
    u32 zero = 0;
    if (!table_reach(&S->stream_hi, S->stream, sizeof *S->stream, slot + 1)) { k += MAXSTREAM - 1 - slot; continue; } /* those below */
    if (atomic_load_explicit(&S->stream[slot].owner, memory_order_relaxed)) continue;
    if (k < MAXSTREAM && atomic_load(&S->stream[slot].lost_to)) continue; /* a slot remembers one death: spare it */
    if (g_profile && !pages_taken(S->times[slot], S->times[slot + 1])) continue;
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
  s->queue = 0;
  s->head = s->tail = NULL;
  s->ahead = 0;
  s->queued = s->starved = 0;
  s->clock = s->seen = 0;
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
  struct tls_stream *t = must(malloc(sizeof *t));
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
  rec_wait(stream_tail(s), s->ctx->flags & 4);
}
static void ctx_sync(struct ctx *c) {
  u64 *v;
  pthread_mutex_lock(&c->mu);
  int n = under_way_locked(c, NULL, true, &v);
  pthread_mutex_unlock(&c->mu);
  for (int i = 0; i < n; i++) rec_wait(v[i], c->flags & 4);
  free(v);
}
