/* SPDX-License-Identifier: Apache-2.0 */
/* Which processes live, the lock of the segment, and what becomes of the records of those that died. */

/* 1 alive, 0 dead (a zombie is dead); *start gets the start time */
static int proc_stat(u32 pid, u64 *start) {
  char p[64], b[1024], *q;
  snprintf(p, sizeof p, "/proc/%u/stat", pid);
  int fd = open(p, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno != ENOENT && errno != ESRCH;
  ssize_t n = read(fd, b, sizeof b - 1);
  close(fd);
  if (n <= 0) return 0;
  b[n] = 0;
  if (!(q = strrchr(b, ')'))) return 1;
  q += 2;
  char st = *q;
  unsigned long long val = 0, threads = 0;
  for (int f = 3; f <= 22; f++) {
    if (f == 20) threads = strtoull(q, NULL, 10);
    if (f == 22) val = strtoull(q, NULL, 10);
    q = strchr(q, ' ');
    if (!q) break;
    q++;
  }
  if (start) *start = val;
  if ((st == 'Z' || st == 'X') && threads <= 1) return 0;
  return 1;
}
static int proc_alive(u32 pid, u64 start) {
  u64 s = 0;
  if (!proc_stat(pid, &s)) return 0;
  return s == 0 || s == start;
}

static void unlock_fd(int fd) { /* not by close() alone: a fork may share the open file */
  flock(fd, LOCK_UN);
  close(fd);
}
/* The lock of a segment is flock() on its control file, opened afresh each time: it falls with
 * its holder, and a fork or a closed descriptor cannot confuse it. */
static int ctl_lock(bool nb) {
  pthread_mutex_lock(&g_lock_mu);
  int fd = open(g_path, O_RDWR | O_CLOEXEC);
  if (fd >= 0) {
    int r;
    do r = flock(fd, LOCK_EX | (nb ? LOCK_NB : 0)); while (r < 0 && errno == EINTR);
    struct stat st;
    if (r == 0 && fstat(fd, &st) == 0 && st.st_ino == g_ino && st.st_nlink > 0) return fd;
    if (r == 0) unlock_fd(fd); else close(fd);
  }
  pthread_mutex_unlock(&g_lock_mu);
  return -1;
}
static void ctl_unlock(int fd) {
  unlock_fd(fd);
  pthread_mutex_unlock(&g_lock_mu);
}

static void unlink_prefix(const char *dir, const char *prefix) {
  DIR *d = opendir(dir);
  if (!d) return;
  struct dirent *e;
  size_t n = strlen(prefix);
  while ((e = readdir(d)))
    if (!strncmp(e->d_name, prefix, n)) unlinkat(dirfd(d), e->d_name, 0);
  closedir(d);
}

static void raise_mark(_Atomic u32 *w, u32 v) {
  u32 h = atomic_load(w);
  while (h < v && !atomic_compare_exchange_weak(w, &h, v)) { }
}

static void complete(u32 slot, u64 pos) {
  struct sh_stream *s = &S->stream[slot];
  u64 d = atomic_load(&s->done);
  while (d < pos && !atomic_compare_exchange_weak(&s->done, &d, pos)) { }
  if (atomic_load(&s->waiters)) futex_wake(&s->done);
}

/* The owner of the slot is dead or leaving: what is not done by now never will be.  Each process that
 * looks decides by its own IPCSYNC_HOST_DEATH whether that counts as complete, so the range is kept.  No
 * answer goes from complete back to pending on the way: DONE_DEAD stops the threads of one who is
 * leaving before the range is taken, and whoever finds the bit set goes on from there. */
static void abandon(u32 slot) {
  struct sh_stream *s = &S->stream[slot];
  u64 d = atomic_fetch_or(&s->done, DONE_DEAD) & POS_MASK, t = atomic_load(&s->tail);
  if (d < t) {
    atomic_store(&s->lost_from, d);
    atomic_store(&s->lost_to, t);
    d = t + 1; /* the next stream of the slot starts outside the range */
    atomic_store(&s->tail, d);
  }
  atomic_store(&s->done, d);
  futex_wake(&s->done);
}

/* Give back everything that process slot pi holds.  Caller has the file lock and knows that the
 * process is dead or leaving (or is me).  Its pending records are abandoned. */
static void release_proc(u32 pi) {
  struct sh_proc *p = &S->proc[pi];
  u32 hi = atomic_load(&S->event_hi);
  u64 bit = 1ull << (pi % 64);
  for (u32 i = 0; i < hi; i++) {
    struct sh_event *e = &S->event[i]; /* its own slots stay its own: their handles open on */
    if (atomic_load_explicit(&e->importers[pi / 64], memory_order_relaxed) & bit) atomic_fetch_and(&e->importers[pi / 64], ~bit);
  }
  hi = atomic_load(&S->stream_hi);
  for (u32 i = 0; i < hi; i++) {
    struct sh_stream *s = &S->stream[i];
    if (atomic_load_explicit(&s->owner, memory_order_relaxed) != pi + 1) continue;
    abandon(i);
    atomic_store(&s->owner, 0);
  }
  char pre[300];
  snprintf(pre, sizeof pre, "%s.m.%u.%llu.", g_base, pi, (unsigned long long)p->inc);
  unlink_prefix(g_dir, pre);
  for (int d = 0; d < MAXDEV; d++) atomic_store(&p->used[d], 0);
  p->pid = 0;
  atomic_store(&p->state, 0);
}

static bool proc_dead(u32 pi) {
  struct sh_proc *p = &S->proc[pi];
  return atomic_load(&p->state) == 1 && !proc_alive(p->pid, p->start);
}

/* Look, at most every `every_ms`, whether process slot pi lives; clean up after it if not.  With 0 it is cleaned up on
 * return; otherwise not if another process has the lock, even one that only looks for segments that nobody uses. */
static void check_proc(u32 pi, u64 every_ms) {
  if (pi >= MAXPROC || pi == g_me) return;
  u64 t = now_ns(), seen = atomic_load_explicit(&g_seen[pi], memory_order_relaxed);
  if (t - seen < every_ms * 1000000ull) return;
  atomic_store_explicit(&g_seen[pi], t, memory_order_relaxed);
  if (!proc_dead(pi)) return;
  int fd = ctl_lock(every_ms > 0);
  if (fd < 0) return; /* somebody is at it */
  if (proc_dead(pi)) release_proc(pi);
  ctl_unlock(fd);
}

/* will never be complete, as this process sees it */
static bool rec_lost(u64 rec) {
  struct sh_stream *s = &S->stream[REC_SLOT(rec)];
  return g_death_pending && REC_POS(rec) > atomic_load(&s->lost_from) && REC_POS(rec) <= atomic_load(&s->lost_to);
}
static inline bool rec_done(u64 rec) {
  u64 d = atomic_load(&S->stream[REC_SLOT(rec)].done);
  if (likely(!g_death_pending)) return d >= REC_POS(rec);
  return (d & POS_MASK) >= REC_POS(rec) && !rec_lost(rec);
}
/* as rec_done, but notices now and then that the process that must complete it is dead */
static bool rec_poll(u64 rec) {
  if (rec_done(rec)) return true;
  u32 o = atomic_load(&S->stream[REC_SLOT(rec)].owner);
  if (o && o != g_me + 1) check_proc(o - 1, 5);
  return rec_done(rec);
}
static void rec_wait(u64 rec) {
  struct sh_stream *s = &S->stream[REC_SLOT(rec)];
  if (rec_done(rec)) return;
  atomic_fetch_add(&s->waiters, 1);
  for (;;) {
    u64 d = atomic_load(&s->done);
    if (rec_done(rec)) break;
    u32 o = atomic_load(&s->owner);
    bool mine = o == g_me + 1;
    int r = futex_wait(&s->done, d, mine || rec_lost(rec) ? -1 : 50);
    if (!mine && r < 0 && errno == ETIMEDOUT) {
      if (o) check_proc(o - 1, 20);
      else if (!g_death_pending) break; /* nobody is left who could complete it */
    }
  }
  atomic_fetch_sub(&s->waiters, 1);
}
