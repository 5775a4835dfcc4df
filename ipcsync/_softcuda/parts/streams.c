/* SPDX-License-Identifier: Apache-2.0 */
/* Streams, stream memory operations, and captures of streams. */

/* Functions that take a stream exist twice: the plain one, for which handle 0 is the legacy default
 * stream, and the _ptsz/_ptds one, for which it is the calling thread's. */
#define BOTH(name, suf, decl, ...) \
  API name decl { const int pt = 0; CHK(); __VA_ARGS__; } \
  API name##suf decl { const int pt = 1; CHK(); __VA_ARGS__; }
#define PTSZ(name, decl, ...) BOTH(name, _ptsz, decl, __VA_ARGS__)
#define PTDS(name, decl, ...) BOTH(name, _ptds, decl, __VA_ARGS__)
#define STREAM(h) struct stream *s; do { CUresult r_ = get_stream(h, pt, &s); if (r_) return r_; } while (0)

/* CUgraphEdgeData of 8 bytes each, of which only zeros (a full dependency) are known here */
static bool plain_edges(const u64 *e, size_t n) {
  for (size_t i = 0; e && i < n; i++) if (e[i]) return false;
  return true;
}
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
PTSZ(cuStreamQuery, (CUstream h), PACE(query_stream); STREAM(h); CUresult r = cap_stream(s, true); return r ? r : stream_idle(s) ? OK : E_NOTREADY)
PTSZ(cuStreamSynchronize, (CUstream h), STREAM(h); CUresult r = cap_stream(s, true); if (!r) stream_sync(s); return r)
PTSZ(cuStreamGetPriority, (CUstream h, int *p), STREAM(h); if (!p) return E_VALUE; *p = s->prio; return OK)
PTSZ(cuStreamGetFlags, (CUstream h, unsigned *f), STREAM(h); if (!f) return E_VALUE; *f = s->flags; return OK)
PTSZ(cuStreamGetId, (CUstream h, unsigned long long *id),
     STREAM(h); if (!id) return E_VALUE; CUresult r = cap_id(s); if (!r) *id = s->id; return r)
PTSZ(cuStreamGetDevice, (CUstream h, CUdevice *d), STREAM(h); if (!d) return E_VALUE; *d = s->ctx->dev; return OK)
PTSZ(cuStreamGetCtx, (CUstream h, CUcontext *c), STREAM(h); if (!c) return E_VALUE; *c = H(s->ctx); return OK)
PTSZ(cuStreamGetCtx_v2, (CUstream h, CUcontext *c, void **g),
     STREAM(h); if (!c && !g) return E_VALUE; if (c) *c = H(s->ctx); if (g) *g = NULL; return OK)
API cuStreamGetGreenCtx(CUstream h, void **g) { const int pt = 0; CHK(); STREAM(h); (void)s; if (!g) return E_VALUE; *g = NULL; return OK; }
static CUresult capture_info(CUstream h, int pt, int *st, u64 *id, void **graph, void ***deps, u64 **edges, size_t *n) {
  STREAM(h);
  struct cap_info i;
  if (!st) return E_VALUE;
  CUresult r = cap_info(s, &i);
  *st = i.status;
  if (id) *id = i.id;
  if (graph) *graph = i.graph;
  if (deps) *deps = i.deps;
  if (edges) *edges = i.edges;
  if (n) *n = i.n;
  return r;
}
PTSZ(cuStreamIsCapturing, (CUstream h, int *st), return capture_info(h, pt, st, 0, 0, 0, 0, 0))
PTSZ(cuStreamGetCaptureInfo, (CUstream h, int *st, u64 *id), return capture_info(h, pt, st, id, 0, 0, 0, 0))
PTSZ(cuStreamGetCaptureInfo_v2, (CUstream h, int *st, u64 *id, void **g, void ***d, size_t *n),
     return capture_info(h, pt, st, id, g, d, 0, n))
PTSZ(cuStreamGetCaptureInfo_v3, (CUstream h, int *st, u64 *id, void **g, void ***d, u64 **e, size_t *n),
     return capture_info(h, pt, st, id, g, d, e, n))
PTSZ(cuStreamBeginCapture, (CUstream h), STREAM(h); return cap_begin(s, CAP_GLOBAL, NULL, NULL, 0))
PTSZ(cuStreamBeginCapture_v2, (CUstream h, int mode), STREAM(h); return cap_begin(s, mode, NULL, NULL, 0))
PTSZ(cuStreamBeginCaptureToGraph, (CUstream h, void *g, void *const *d, const u64 *edges, size_t n, int mode),
     STREAM(h); if (!g || !plain_edges(edges, n)) return E_VALUE; return cap_begin(s, mode, g, d, n))
PTSZ(cuStreamUpdateCaptureDependencies, (CUstream h, void *const *d, size_t n, unsigned f),
     STREAM(h); return cap_update(s, d, n, f))
PTSZ(cuStreamUpdateCaptureDependencies_v2, (CUstream h, void *const *d, const u64 *edges, size_t n, unsigned f),
     STREAM(h); if (!plain_edges(edges, n)) return E_VALUE; return cap_update(s, d, n, f))
PTSZ(cuStreamEndCapture, (CUstream h, void **g), STREAM(h); if (!g) return E_VALUE; *g = NULL; return cap_end(s, g))
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

/* A memory operation, or OP_NOP; holds the memory. */
static CUresult memop(int type, int width, CUdeviceptr p, u64 v, unsigned flags, struct op *o) {
  if (p % (unsigned)width || (flags & (type == OP_WRITE ? ~0u : ~0x40000003u))) return E_VALUE;
  if (flags >> 30) return E_NOSUP; /* FLUSH: see cuDeviceGetAttribute */
  struct alloc *a = mem_hold((uintptr_t)p, (size_t)width);
  if (!a) return E_VALUE;
  *o = (struct op){ .type = type, .width = width, .flags = flags, .dst = mem_at(a, p), .val = v, .a = a };
  return OK;
}
static CUresult one_memop(CUstream h, int pt, int type, int width, CUdeviceptr p, u64 v, unsigned flags) {
  PACE_NS(type == OP_WRITE ? g_profile->call.write_word : g_profile->call.wait_word);
  STREAM(h);
  struct op o;
  CUresult r = memop(type, width, p, v, flags, &o);
  return r ? r : submit(s, &o, NULL);
}
/* CUstreamBatchMemOpParams */
union memop_params {
  int operation;
  struct { int operation; CUdeviceptr address; u64 value; unsigned flags; CUdeviceptr alias; } value;
  struct { int operation; unsigned flags; } barrier;
  u64 pad[6];
};
/* All of a batch, or none of it.  NVIDIA: fewer than 256. */
static CUresult batch_work(unsigned count, const union memop_params *v, unsigned flags, struct work **out) {
  if (!count || count > 255 || !v || flags) return E_VALUE;
  struct work *w = work_new(N_MEMOPS, count);
  CUresult r = OK;
  for (unsigned i = 0; i < count && !r; i++) {
    int wide = v[i].operation == 4 || v[i].operation == 5;
    u64 value = wide ? v[i].value.value : (u32)v[i].value.value;
    switch (v[i].operation) {
    case 1: case 4: r = memop(OP_WAITVAL, wide ? 8 : 4, v[i].value.address, value, v[i].value.flags, &w->op[i]); break;
    case 2: case 5: r = memop(OP_WRITE, wide ? 8 : 4, v[i].value.address, value, v[i].value.flags, &w->op[i]); break;
    case 6: r = v[i].barrier.flags > 1 ? E_VALUE : OK; break; /* all accesses here are in order anyhow */
    case 3: case 8: r = E_NOSUP; break; /* flush of remote writes, reduction: see cuDeviceGetAttribute */
    default: r = E_VALUE;
    }
  }
  if (r) work_drop(w); else *out = w;
  return r;
}
PTSZ(cuStreamBatchMemOp_v2, (CUstream h, unsigned count, const union memop_params *v, unsigned flags),
     PACE_NS(g_profile->call.write_word + (count - 1) * g_profile->call.batch_entry);
     STREAM(h);
     struct work *w;
     CUresult r = batch_work(count, v, flags, &w);
     if (r) return r;
     struct op o = { .type = OP_BATCH, .data = w };
     return submit(s, &o, NULL))
PTSZ(cuStreamWriteValue32_v2, (CUstream h, CUdeviceptr p, u32 v, unsigned f), return one_memop(h, pt, OP_WRITE, 4, p, v, f))
PTSZ(cuStreamWriteValue64_v2, (CUstream h, CUdeviceptr p, u64 v, unsigned f), return one_memop(h, pt, OP_WRITE, 8, p, v, f))
PTSZ(cuStreamWaitValue32_v2, (CUstream h, CUdeviceptr p, u32 v, unsigned f), return one_memop(h, pt, OP_WAITVAL, 4, p, v, f))
PTSZ(cuStreamWaitValue64_v2, (CUstream h, CUdeviceptr p, u64 v, unsigned f), return one_memop(h, pt, OP_WAITVAL, 8, p, v, f))
