/* SPDX-License-Identifier: Apache-2.0 */
/* Events: records, queries, waits, times. */

static u32 g_imports[MAXEVENT];          /* how often this process has each slot open */
static pthread_mutex_t g_import_mu = PTHREAD_MUTEX_INITIALIZER;

static void import_add(u32 slot) { /* g_import_mu held, as below */
  if (!g_imports[slot]++) atomic_fetch_or(&S->event[slot].importers[g_me / 64], 1ull << (g_me % 64));
}
static void import_drop(u32 slot) {
  if (!--g_imports[slot]) atomic_fetch_and(&S->event[slot].importers[g_me / 64], ~(1ull << (g_me % 64)));
}

static void event_dispose(struct event *e) {
  if (e->imported) {
    pthread_mutex_lock(&g_import_mu);
    import_drop((u32)e->shslot);
    pthread_mutex_unlock(&g_import_mu);
  } else if (e->shslot >= 0) {
    slot_give((u32)e->shslot);
    atomic_fetch_sub(&g_my_events, 1);
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
  PACE(create);
  struct event *e = event_init(c, flags);
  if (!e) return E_OOM;
  if (flags & 4) {
    u32 slot;
    bool fresh;
    if (atomic_fetch_add(&g_my_events, 1) >= g_event_limit || !slot_take(&slot, &fresh)) {
      atomic_fetch_sub(&g_my_events, 1);
      obj_recycle(&g_events, e);
      return E_OOM;
    }
    slot_begin(slot, fresh, flags);
    e->shslot = (int)slot;
    e->latest = &S->event[slot].latest;
  }
  obj_publish(&g_events, e);
  *out = H(e);
  return OK;
}

/* IPCSYNC_HOST_STRICT: an imported event must not outlive the exporter's */
static bool undefined_use(struct event *e, const char *fn) {
  if (likely(!g_strict || !e->imported)) return false;
  struct sh_event *x = &S->event[e->shslot];
  check_proc(x->proc, 5);
  if ((e->word & 1) && atomic_load(&x->word) == e->word && file_lives(atomic_load(&x->file))) return false;
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
  PACE(record[event_sort(e)]);
  STREAM(st);
  if (s->ctx != e->ctx) return E_HANDLE;
  if (unlikely(undefined_use(e, fn))) return E_HANDLE;
  if (flags) { /* external: for the launch of the graph, and only while capturing */
    int r = cap_op(s, NULL, e);
    return r < 0 ? E_STATE : r;
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
  PACE(query[event_sort(e)]);
  CUresult c = cap_event(e, true);
  if (c) return c;
  return seen_poll(event_seen(e)) ? OK : E_NOTREADY;
}
API cuEventSynchronize(CUevent h) {
  CHK();
  EVENT(h);
  CUresult c = cap_event(e, true);
  if (c) return c;
  seen_wait(event_seen(e), e->flags & 1 && e->shslot < 0);
  return OK;
}
API cuEventDestroy_v2(CUevent h) {
  CHK();
  struct event *e = obj_get(&g_events, h);
  if (!e) return E_HANDLE;
  PACE_NS(e->imported ? g_profile->call.close : 0);
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
  for (int i = 0; i < 2; i++) if ((r = cap_event(e[i], false))) return r;
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
  PACE(wait[event_sort(e)]);
  STREAM(st);
  if (unlikely(undefined_use(e, "cuStreamWaitEvent"))) return E_HANDLE;
  int captured = cap_wait(s, e, flags);
  if (unlikely(captured >= 0)) return captured;
  struct seen n = event_seen(e);
  if (seen_done(n) || seen_in_order(n, s)) return OK;
  struct op o = { .type = OP_WAIT, .rec = n.rec, .late = n.late, .cost = e->shslot >= 0 ? GPU_WAIT_IPC : GPU_WAIT_PLAIN };
  return submit(s, &o, NULL);
}
PTSZ(cuStreamWaitEvent, (CUstream st, CUevent h, unsigned f), return stream_wait(st, h, f, pt))
