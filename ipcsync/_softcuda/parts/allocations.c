/* SPDX-License-Identifier: Apache-2.0 */
/* The table of this process's memory, by address. */

enum { A_DEV, A_IPC, A_HOST, A_REG };
struct alloc {
  uintptr_t base, pages;         /* pages: where streams find it, for registered shared memory a mapping of its own */
  size_t size, maplen;
  int kind, dev, phys;
  unsigned flags;
  void *ctx;
  u64 id, seq;
  int ipc_refs;
  struct mem_handle ipc;         /* of an imported allocation */
  _Atomic int refs;              /* 1 for being in the table, 1 for each queued operation and node of a graph */
  _Atomic bool unregistered;     /* of kind A_REG: given back, the program may have unmapped it */
};
static pthread_rwlock_t g_mem = PTHREAD_RWLOCK_INITIALIZER;
static struct alloc **g_allocs;  /* by address */
static size_t g_nallocs, g_callocs;
static _Atomic u64 g_mem_seq;

static size_t mem_pos(uintptr_t p) { /* number of allocations with base <= p */
  size_t lo = 0, hi = g_nallocs;
  while (lo < hi) {
    size_t m = (lo + hi) / 2;
    if (g_allocs[m]->base <= p) lo = m + 1; else hi = m;
  }
  return lo;
}
static struct alloc *mem_find_locked(uintptr_t p, size_t n) {
  size_t i = mem_pos(p);
  if (!i) return NULL;
  struct alloc *a = g_allocs[i - 1];
  return p - a->base < a->size && n <= a->size - (p - a->base) ? a : NULL;
}
static struct alloc *mem_hold(uintptr_t p, size_t n) {
  pthread_rwlock_rdlock(&g_mem);
  struct alloc *a = mem_find_locked(p, n ? n : 1);
  if (a) atomic_fetch_add(&a->refs, 1);
  pthread_rwlock_unlock(&g_mem);
  return a;
}
static void mem_drop(struct alloc *a) {
  if (!a || atomic_fetch_sub(&a->refs, 1) != 1) return;
  if (a->maplen) munmap((void *)(a->pages & ~(uintptr_t)4095), a->maplen);
  free(a);
}
/* What a stream finds at p: in the allocation, or in memory that CUDA does not know. */
static void *mem_at(const struct alloc *a, CUdeviceptr p) {
  return (void *)(a ? a->pages + ((uintptr_t)p - a->base) : (uintptr_t)p);
}
static void mem_add_locked(struct alloc *a) {
  atomic_store(&a->refs, 1);
  a->id = atomic_fetch_add(&g_next_id, 1);
  if (!a->pages) a->pages = a->base;
  if (g_nallocs == g_callocs) {
    size_t c = g_callocs ? g_callocs * 2 : 64;
    g_allocs = must(realloc(g_allocs, c * sizeof *g_allocs));
    g_callocs = c;
  }
  size_t i = mem_pos(a->base);
  memmove(g_allocs + i + 1, g_allocs + i, (g_nallocs - i) * sizeof *g_allocs);
  g_allocs[i] = a;
  g_nallocs++;
}
static void mem_add(struct alloc *a) {
  pthread_rwlock_wrlock(&g_mem);
  mem_add_locked(a);
  pthread_rwlock_unlock(&g_mem);
}
static void mem_remove_locked(size_t i) {
  memmove(g_allocs + i, g_allocs + i + 1, (g_nallocs - i - 1) * sizeof *g_allocs);
  g_nallocs--;
}
/* take the allocation that starts at p and is of kind k out of the table */
static struct alloc *mem_take(uintptr_t p, int k) {
  pthread_rwlock_wrlock(&g_mem);
  size_t i = mem_pos(p);
  struct alloc *a = i ? g_allocs[i - 1] : NULL;
  if (a && a->base == p && a->kind == k) mem_remove_locked(i - 1); else a = NULL;
  if (a && k == A_REG) atomic_store(&a->unregistered, true);
  pthread_rwlock_unlock(&g_mem);
  return a;
}
static void mem_name(char *b, size_t n, u32 proc, u64 inc, u64 seq) {
  snprintf(b, n, "%s/%s~m.%u.%llu.%llu", g_dir, g_base, proc, (unsigned long long)inc, (unsigned long long)seq);
}
static u64 mem_used(int phys) {
  u64 u = 0;
  for (u32 i = 0, hi = atomic_load(&S->proc_hi); i < hi; i++) u += atomic_load(&S->proc[i].used[phys]);
  return u;
}
static void mem_release(struct alloc *a) { /* of kind A_DEV, already out of the table */
  char f[PATH_MAX + 64];
  mem_name(f, sizeof f, g_me, g_inc, a->seq);
  unlink(f);
  atomic_fetch_sub(&S->proc[g_me].used[a->phys], a->maplen);
  mem_drop(a);
}
static CUresult mem_alloc(struct ctx *c, size_t n, CUdeviceptr *out) {
  size_t len = (n + 4095) & ~(size_t)4095;
  int phys = g_dev[c->dev];
  if (len < n) return E_OOM;
  atomic_fetch_add(&S->proc[g_me].used[phys], len);
  struct alloc *a = NULL;
  struct statvfs vfs;
  void *m = MAP_FAILED;
  u64 seq = atomic_fetch_add(&g_mem_seq, 1);
  char f[PATH_MAX + 64];
  mem_name(f, sizeof f, g_me, g_inc, seq);
  if (mem_used(phys) > g_total_mem) goto oom;
  if (statvfs(g_dir, &vfs) == 0 && (u64)vfs.f_bavail * vfs.f_frsize < len) goto oom;
  if (!(a = calloc(1, sizeof *a))) goto oom;
  int fd = open(f, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) goto oom;
  if (ftruncate(fd, (off_t)len) == 0) m = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  close(fd);
  if (m == MAP_FAILED) { unlink(f); goto oom; }
  *a = (struct alloc){ .base = (uintptr_t)m, .size = n, .maplen = len, .kind = A_DEV, .dev = c->dev,
                       .phys = phys, .ctx = H(c), .seq = seq };
  mem_add(a);
  *out = (CUdeviceptr)(uintptr_t)m;
  return OK;
oom:
  free(a);
  atomic_fetch_sub(&S->proc[g_me].used[phys], len);
  return E_OOM;
}
