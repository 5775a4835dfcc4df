/* SPDX-License-Identifier: Apache-2.0 */
/* IPC handles of events and of memory. */

static u64 handle_check(const struct mem_handle *h) {
  const u64 *w = (const u64 *)h;
  u64 x = 0x9e3779b97f4a7c15ull;
  for (size_t i = 0; i + 1 < sizeof *h / 8; i++) x = (x ^ w[i]) * 0xff51afd7ed558ccdull, x ^= x >> 29;
  return x;
}
static u64 event_file(u64 file) { return S->nonce << 32 | file; } /* the nonce: no handle of another segment opens */
API cuIpcGetEventHandle(CUipcEventHandle *out, CUevent ev) {
  CUR(c);
  (void)c;
  if (!out || !ev) return E_VALUE;
  EVENT(ev);
  PACE(export);
  if (e->imported || e->shslot < 0) return E_HANDLE;
  struct event_handle h = { .pid = (u32)getpid(), .file = event_file(g_inc), .slot = (u32)e->shslot };
  memcpy(out, &h, sizeof h);
  return OK;
}
API cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle in) {
  CUR(c);
  PACE(open);
  static const u64 zero[5];
  struct event_handle h;
  memcpy(&h, &in, sizeof h);
  if (!out) return E_VALUE;
  if (memcmp(h.zero, zero, sizeof zero) || h.slot >= atomic_load(&S->event_hi)) return E_MAP;
  u32 slot = (u32)h.slot;
  struct sh_event *x = &S->event[slot];
  pthread_mutex_lock(&g_import_mu);
  import_add(slot); /* first, so that nobody reclaims the slot */
  u64 file = atomic_load(&x->file);
  CUresult r = !file || event_file(file) != h.file || x->pid != h.pid ? E_MAP : file == g_inc ? E_CTX : OK;
  struct event *e = r ? NULL : event_init(c, x->flags & 3);
  if (!e) import_drop(slot);
  pthread_mutex_unlock(&g_import_mu);
  if (!e) return r ? r : E_OOM;
  e->shslot = (int)slot;
  e->imported = true;
  e->word = atomic_load(&x->word);
  e->latest = &x->latest;
  obj_publish(&g_events, e);
  *out = H(e);
  return OK;
}

API cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr p) {
  CHK();
  if (!out) return E_VALUE;
  pthread_rwlock_rdlock(&g_mem);
  struct alloc *a = mem_find_locked((uintptr_t)p, 1);
  CUresult r = a && a->kind == A_DEV ? OK : E_VALUE;
  if (!r) {
    struct mem_handle h = { .magic = MEM_MAGIC, .nonce = S->nonce, .phys = (u32)a->phys, .proc = g_me,
      .pid = (u32)getpid(), .inc = g_inc, .seq = a->seq, .size = a->size };
    h.check = handle_check(&h);
    memcpy(out, &h, sizeof h);
  }
  pthread_rwlock_unlock(&g_mem);
  return r;
}
API cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle in, unsigned flags) {
  CUR(c);
  static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
  struct mem_handle h;
  memcpy(&h, &in, sizeof h);
  if (!out || flags != 1) return E_VALUE; /* LAZY_ENABLE_PEER_ACCESS */
  if (h.magic != MEM_MAGIC || h.check != handle_check(&h)) return E_VALUE;
  if (h.nonce != S->nonce || h.proc >= MAXPROC) return E_HANDLE; /* another segment's, or an earlier one's */
  if (h.proc == g_me && h.inc == g_inc) return E_CTX;
  check_proc(h.proc, 0);
  CUresult r = OK;
  pthread_mutex_lock(&mu);
  pthread_rwlock_wrlock(&g_mem);
  struct alloc *a = NULL;
  for (size_t i = 0; i < g_nallocs && !a; i++)
    if (g_allocs[i]->kind == A_IPC && !memcmp(&g_allocs[i]->ipc, &h, sizeof h)) a = g_allocs[i];
  if (a) { /* one context per device and process; opening again counts */
    if (a->ctx != H(c)) r = E_HANDLE;
    else { a->ipc_refs++; *out = a->base; }
  }
  pthread_rwlock_unlock(&g_mem);
  if (!a && !r) {
    char f[PATH_MAX + 64];
    size_t len = (h.size + 4095) & ~(size_t)4095;
    mem_name(f, sizeof f, h.proc, h.inc, h.seq);
    int fd = open(f, O_RDWR | O_CLOEXEC);
    void *m = MAP_FAILED;
    if (fd >= 0) {
      m = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
      close(fd);
    }
    if (m == MAP_FAILED) {
      r = E_HANDLE;
    } else {
      a = must(calloc(1, sizeof *a));
      *a = (struct alloc){ .base = (uintptr_t)m, .size = h.size, .maplen = len, .kind = A_IPC, .dev = c->dev,
                           .phys = (int)h.phys, .ctx = H(c), .ipc_refs = 1, .ipc = h };
      mem_add(a);
      *out = a->base;
    }
  }
  pthread_mutex_unlock(&mu);
  return r;
}
API cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle in, unsigned flags) { return cuIpcOpenMemHandle_v2(out, in, flags); }
API cuIpcCloseMemHandle(CUdeviceptr p) {
  CHK();
  struct alloc *a = NULL;
  CUresult r = E_VALUE;
  pthread_rwlock_wrlock(&g_mem);
  size_t i = mem_pos((uintptr_t)p);
  if (i && g_allocs[i - 1]->base == p && g_allocs[i - 1]->kind == A_IPC) {
    r = OK;
    if (!--g_allocs[i - 1]->ipc_refs) { a = g_allocs[i - 1]; mem_remove_locked(i - 1); }
  }
  pthread_rwlock_unlock(&g_mem);
  mem_drop(a);
  return r;
}
