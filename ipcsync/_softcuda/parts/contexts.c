/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts: primary and other ones, and which is current. */

static void ctx_set_active(struct ctx *c, int active) {
  atomic_fetch_add(&S->proc[g_me].contexts, (u32)(active - atomic_exchange(&c->active, active)));
}
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
  ctx_set_active(c, 1);
  obj_publish(&g_ctxs, c);
  *out = c;
  return OK;
}
static void event_dispose(struct event *e);
static void ctx_teardown(struct ctx *c) { /* everything in it goes */
  ctx_set_active(c, 0);
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
      if (g_allocs[i]->ctx == h) { a = g_allocs[i]; atomic_store(&a->unregistered, a->kind == A_REG); mem_remove_locked(i); break; }
    pthread_rwlock_unlock(&g_mem);
    if (!a) break;
    if (a->kind == A_DEV) mem_release(a); else mem_drop(a);
  }
}

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
    if (!atomic_load(&c->active)) { c->id = atomic_fetch_add(&g_next_id, 1); c->peers = 0; ctx_set_active(c, 1); }
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
    if (!(r = ctx_new(d, f, true, &c))) { ctx_set_active(c, 0); g_primary[d] = c; }
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
  ctx_sync(c);
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
API cuCtxSynchronize_v2(CUcontext h) {
  CHK();
  struct ctx *c;
  CUresult r = ctx_or_current(h, &c);
  if (r || (r = cap_ctx(c))) return r;
  ctx_sync(c);
  return OK;
}
API cuCtxSynchronize(void) { return cuCtxSynchronize_v2(NULL); }
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
