/* SPDX-License-Identifier: Apache-2.0 */
/* Memory: allocation, registration, attributes, copies and fills. */

API cuMemAlloc_v2(CUdeviceptr *out, size_t n) { CUR(c); if (!out || !n) return E_VALUE; UNSAFE(); return mem_alloc(c, n, out); }
API cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t w, size_t h, unsigned el) {
  CUR(c);
  if (!out || !pitch || !w || !h || (el != 4 && el != 8 && el != 16)) return E_VALUE;
  UNSAFE();
  *pitch = (w + 511) & ~(size_t)511;
  size_t all;
  return __builtin_mul_overflow(*pitch, h, &all) ? E_OOM : mem_alloc(c, all, out);
}
/* What is freed goes behind all work of its context; but a host function would wait for its own stream. */
static void mem_wait(struct alloc *a) {
  struct ctx *c = a && !t_worker ? obj_get(&g_ctxs, a->ctx) : NULL;
  if (c) ctx_sync(c);
}
API cuMemFree_v2(CUdeviceptr p) {
  CHK();
  if (!p) return OK;
  UNSAFE();
  struct alloc *a = mem_take((uintptr_t)p, A_DEV);
  if (!a) return E_VALUE;
  mem_wait(a);
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
  struct alloc *a = must(calloc(1, sizeof *a));
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
  mem_wait(a);
  mem_drop(a);
  return a ? OK : E_VALUE;
}
/* -1: some of it cannot be written */
static int is_one_mapping(uintptr_t from, uintptr_t to) {
  FILE *f = fopen("/proc/self/maps", "re");
  unsigned long a = 0, b;
  char w;
  int one = 0;
  while (f && one >= 0 && a < to && fscanf(f, "%lx-%lx %*c%c%*[^\n]", &a, &b, &w) == 3)
    if (a < to && from < b) one = w != 'w' ? -1 : a <= from && to <= b;
  if (f) fclose(f);
  return one;
}
API cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
  CUR(c);
  if (!p || !n || flags > 15) return E_VALUE;
  if (flags & 8) return E_NOSUP; /* READ_ONLY: see cuDeviceGetAttribute */
  UNSAFE();
  uintptr_t from = (uintptr_t)p & ~(uintptr_t)4095;
  size_t len = ((uintptr_t)p + n - from + 4095) & ~(size_t)4095;
  if (len < n || msync((void *)from, len, MS_ASYNC)) return E_VALUE; /* nothing is there */
  int one = is_one_mapping(from, from + len);
  if (one < 0) return E_VALUE;
  struct alloc *a = must(calloc(1, sizeof *a));
  *a = (struct alloc){ .base = (uintptr_t)p, .size = n, .kind = A_REG, .dev = c->dev, .flags = flags, .ctx = H(c) };
  /* A GPU keeps to the pages, whatever the program does to their mapping.  Private ones are mapped but once. */
  void *m = one ? mremap((void *)from, 0, len, MREMAP_MAYMOVE) : MAP_FAILED;
  if (m != MAP_FAILED) { a->pages = (uintptr_t)m + ((uintptr_t)p - from); a->maplen = len; }
  pthread_rwlock_wrlock(&g_mem);
  size_t i = mem_pos((uintptr_t)p + n - 1);
  bool clash = i && g_allocs[i - 1]->base + g_allocs[i - 1]->size > (uintptr_t)p;
  if (!clash) mem_add_locked(a);
  pthread_rwlock_unlock(&g_mem);
  if (!clash) return OK;
  atomic_store(&a->refs, 1);
  mem_drop(a);
  return E_REGISTERED;
}
API cuMemHostUnregister(void *p) {
  CHK();
  UNSAFE();
  struct alloc *a = mem_take((uintptr_t)p, A_REG);
  mem_wait(a);
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
  CUresult r = sync ? cap_stream(s, true) : OK;
  if (r || !n) return r;
  struct alloc *a = mem_hold((uintptr_t)dst, n), *b = mem_hold((uintptr_t)src, n);
  if (!dst || !src || ((need & DST) && !a) || ((need & SRC) && !b)) { mem_drop(a); mem_drop(b); return E_VALUE; }
  struct op o = { .type = OP_COPY, .dst = mem_at(a, dst), .src = mem_at(b, src), .n = n, .a = a, .b = b };
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
  CUresult r = sync ? cap_stream(s, false) : OK;
  if (r || !n) return r;
  struct alloc *a = mem_hold((uintptr_t)p, n * (size_t)width);
  if (!a) return E_VALUE;
  bool wait = sync && a->kind != A_DEV && a->kind != A_IPC;
  struct op o = { .type = OP_SET, .width = width, .dst = mem_at(a, p), .val = v, .n = n, .a = a };
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
