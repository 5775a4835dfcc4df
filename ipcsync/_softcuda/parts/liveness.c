/* SPDX-License-Identifier: Apache-2.0 */
/* Which processes live, the lock of the segment, and what becomes of the records of those that died. */

/* Two proofs, neither of which knows pids, so that the processes of a segment may be in several pid namespaces.
 *
 * Dead: a thread of our own, which does nothing else, holds `mark` as a robust futex.  The kernel sets FUTEX_OWNER_DIED
 * in it when that thread ends: by the death of the process, whatever kills it and before anybody waits for it, and by
 * exec.  The end of the main thread does not end it, a stop does not, no descriptor that the program closes does, and
 * a child that was forked does not have the thread.  The robust lists of the program's threads stay libc's.
 *
 * Over: other threads of a dead process may still run for some µs on other CPUs, and its work under way goes on
 * (under_way.c).  So its slots are only given to others once nobody holds the lock of its file ~p.<slot>.<inc>.  That
 * is a record lock: the process has it until the last of its threads has closed its files, a forked child has no share
 * in it, and if the program closes its descriptor it is lost, which makes nobody look dead. */
static struct { struct robust_list_head head; struct robust_list entry; _Atomic int held; } *g_mark;

static void *hold_mark(void *unused) {
  (void)unused;
  _Atomic u32 *word = &S->proc[g_me].mark;
  g_mark->head.list.next = &g_mark->entry;
  g_mark->entry.next = &g_mark->head.list;
  g_mark->head.futex_offset = (char *)word - (char *)&g_mark->entry;
  bool ok = syscall(SYS_set_robust_list, &g_mark->head, sizeof g_mark->head) == 0;
  if (ok) atomic_store(word, (u32)syscall(SYS_gettid));
  atomic_store(&g_mark->held, ok ? 1 : -1);
  syscall(SYS_futex, &g_mark->held, FUTEX_WAKE, 1, NULL, NULL, 0);
  while (ok) pause();
  return NULL;
}
/* An idle thread or a stream's: it gets no signals. */
static int start_thread(void *(*fn)(void *), void *arg, size_t stack) {
  pthread_t th;
  pthread_attr_t at;
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  pthread_attr_init(&at);
  pthread_attr_setdetachstate(&at, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&at, stack);
  int r = pthread_create(&th, &at, fn, arg);
  pthread_attr_destroy(&at);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  return r;
}
static bool take_mark(void) {
  /* shared memory: if memory is short, the kernel may take private pages from a dying process before it reads the list */
  g_mark = mmap(NULL, sizeof *g_mark, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (g_mark == MAP_FAILED || start_thread(hold_mark, NULL, 256 << 10)) return false;
  while (!atomic_load(&g_mark->held)) syscall(SYS_futex, &g_mark->held, FUTEX_WAIT, 0, NULL, NULL, 0);
  return atomic_load(&g_mark->held) > 0;
}
/* As if the process had died.  The list is emptied, or the end of the thread would mark whoever has the slot then, if
 * that is of another pid namespace and its thread's id is the same number. */
static void give_up_mark(void) {
  atomic_store(&S->proc[g_me].mark, FUTEX_OWNER_DIED);
  g_mark->head.list.next = &g_mark->head.list;
}
static bool is_dead(struct sh_proc *p) {
  return atomic_load(&p->state) == 1 && atomic_load(&p->mark) & FUTEX_OWNER_DIED;
}
static bool proc_dead(u32 pi) { return is_dead(&S->proc[pi]); }

static int lock_file(int fd, int cmd, short type) {
  struct flock l = { .l_type = type, .l_whence = SEEK_SET, .l_len = 1 };
  int r;
  do r = fcntl(fd, cmd, &l); while (r < 0 && errno == EINTR);
  return r < 0 || (cmd == F_GETLK && l.l_type != F_UNLCK) ? -1 : 0;
}
static void life_name(char f[PATH_MAX + 64], u32 pi) {
  snprintf(f, PATH_MAX + 64, "%s~p.%u.%llu", g_path, pi, (unsigned long long)S->proc[pi].inc);
}
static int open_life(u32 pi, int flags) {
  char f[PATH_MAX + 64];
  life_name(f, pi);
  return open(f, O_RDWR | O_CLOEXEC | flags, 0600);
}
/* Of one that is dead.  By a record lock, which no fork takes along that another thread makes while this one waits. */
static bool proc_over(u32 pi, bool wait) {
  int fd = open_life(pi, 0);
  if (fd < 0) return errno == ENOENT;
  int r = lock_file(fd, wait ? F_SETLKW : F_GETLK, F_WRLCK);
  close(fd);
  return r == 0;
}

/* The lock of a segment is a record lock of its control file, opened afresh each time: it falls with its holder, and no
 * fork, which another thread may do meanwhile, takes it along.  Closing any descriptor of the file drops it. */
static int ctl_lock(bool nb) {
  if (nb ? pthread_mutex_trylock(&g_lock_mu) : pthread_mutex_lock(&g_lock_mu)) return -1;
  int fd = open(g_path, O_RDWR | O_CLOEXEC);
  if (fd >= 0) {
    struct stat st;
    if (lock_file(fd, nb ? F_SETLK : F_SETLKW, F_WRLCK) == 0 && fstat(fd, &st) == 0 && st.st_ino == g_ino && st.st_nlink > 0)
      return fd;
    close(fd);
  }
  pthread_mutex_unlock(&g_lock_mu);
  return -1;
}
static void ctl_unlock(int fd) {
  close(fd);
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

/* Slots of a sparse table up to `to` are there, pages and all, as everything below its high-water mark: to touch one where
 * the file system is full would be SIGBUS.  Before Linux 5.14, which cannot ask, it is. */
static bool pages_taken(void *from, void *end) {
  uintptr_t a = (uintptr_t)from & ~(uintptr_t)4095;
  return madvise((void *)a, (uintptr_t)end - a, 23 /* MADV_POPULATE_WRITE */) == 0 || errno == EINVAL;
}
static bool table_reach(_Atomic u32 *hi, void *table, size_t each, u32 to) {
  u32 h = atomic_load_explicit(hi, memory_order_relaxed);
  if (likely(to <= h)) return true;
  if (!pages_taken((char *)table + h * each, (char *)table + to * each)) return false;
  raise_mark(hi, to);
  return true;
}

static void wake_waiters(struct sh_stream *s) {
  atomic_fetch_add(&s->woken, 1);
  futex_wake(&s->woken);
}
/* Wakes nobody who waits for a later position. */
static void complete(u32 slot, u64 pos) {
  struct sh_stream *s = &S->stream[slot];
  u64 d = atomic_load(&s->done);
  while (d < pos && !atomic_compare_exchange_weak(&s->done, &d, pos)) { }
  if (likely(atomic_load(&s->wanted) > pos)) return;
  atomic_store(&s->wanted, UINT64_MAX); /* who goes on waiting has to look at `woken` again, and then wants it again */
  wake_waiters(s);
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
  wake_waiters(s);
}

/* Abandon the pending records of process slot pi, and remove its memory's files.  Caller has the file lock and knows that the
 * process is dead, or is me and leaves. */
static void abandon_proc(u32 pi) {
  for (u32 i = 0, hi = atomic_load(&S->stream_hi); i < hi; i++)
    if (atomic_load_explicit(&S->stream[i].owner, memory_order_relaxed) == pi + 1) abandon(i);
  char pre[300];
  snprintf(pre, sizeof pre, "%s~m.%u.%llu.", g_base, pi, (unsigned long long)S->proc[pi].inc);
  unlink_prefix(g_dir, pre);
  for (int d = 0; d < MAXDEV; d++) atomic_store(&S->proc[pi].used[d], 0);
  atomic_store(&S->proc[pi].contexts, 0);
}
/* The same, and give back its slots: it is over, so that none of its threads is within a call any more. */
static void release_proc(u32 pi) {
  abandon_proc(pi);
  u32 hi = atomic_load(&S->event_hi);
  u64 bit = 1ull << (pi % 64);
  for (u32 i = 0; i < hi; i++) {
    struct sh_event *e = &S->event[i]; /* its own slots stay its own: their handles open on */
    if (atomic_load_explicit(&e->importers[pi / 64], memory_order_relaxed) & bit) atomic_fetch_and(&e->importers[pi / 64], ~bit);
  }
  hi = atomic_load(&S->stream_hi);
  for (u32 i = 0; i < hi; i++) {
    struct sh_stream *s = &S->stream[i];
    if (atomic_load_explicit(&s->owner, memory_order_relaxed) == pi + 1) atomic_store(&s->owner, 0);
  }
  char life[PATH_MAX + 64];
  life_name(life, pi);
  unlink(life);
  S->proc[pi].pid = 0;
  atomic_store(&S->proc[pi].state, 0);
}

/* Clean up after process slot pi if that is dead and over.  With 0 it is cleaned up on return, but for one that exits
 * and is not over yet; otherwise not if that was tried less than `every_ms` ago, or if another process has the lock, even
 * one that only looks for segments that nobody uses.  While the process lives this costs a load. */
static void check_proc(u32 pi, u64 every_ms) {
  if (pi >= MAXPROC || pi == g_me || likely(!proc_dead(pi))) return;
  u64 t = now_ns(), seen = atomic_load_explicit(&g_seen[pi], memory_order_relaxed);
  if (t - seen < every_ms * 1000000ull) return;
  atomic_store_explicit(&g_seen[pi], t, memory_order_relaxed);
  if (!proc_over(pi, every_ms == 0 && !atomic_load(&S->proc[pi].left))) return;
  int fd = ctl_lock(every_ms > 0);
  if (fd < 0) return; /* somebody is at it */
  if (proc_dead(pi) && proc_over(pi, false)) release_proc(pi);
  ctl_unlock(fd);
}

/* will never be complete, as this process sees it */
static bool rec_lost(u64 rec) {
  struct sh_stream *s = &S->stream[REC_SLOT(rec)];
  return g_death_pending && REC_POS(rec) > atomic_load(&s->lost_from) && REC_POS(rec) <= atomic_load(&s->lost_to);
}
/* The stream has got there; with a profile it may be complete only later. */
static inline bool rec_reached(u64 rec) {
  u64 d = atomic_load(&S->stream[REC_SLOT(rec)].done);
  if (likely(!g_death_pending)) return d >= REC_POS(rec);
  return (d & POS_MASK) >= REC_POS(rec) && !rec_lost(rec);
}
static inline bool rec_done(u64 rec) { return rec_reached(rec) && rec_due(rec); }
/* as rec_done, but notices now and then that the process that must complete it is dead */
static bool rec_poll(u64 rec) {
  if (rec_reached(rec)) return rec_due(rec);
  u32 o = atomic_load(&S->stream[REC_SLOT(rec)].owner);
  if (o && o != g_me + 1) check_proc(o - 1, 5);
  return rec_done(rec);
}
/* Wait until the stream has got there. */
static void rec_reach(u64 rec) {
  struct sh_stream *s = &S->stream[REC_SLOT(rec)];
  if (rec_reached(rec)) return;
  u64 began = spin_begin();
  while (spin_on(began)) if (rec_reached(rec)) { spin_end(began, true); return; }
  spin_end(began, false);
  for (;;) {
    u32 woken = atomic_load(&s->woken);
    u64 wanted = atomic_load(&s->wanted), pos = REC_POS(rec);
    while (wanted > pos && !atomic_compare_exchange_weak(&s->wanted, &wanted, pos)) { }
    if (rec_reached(rec)) break;
    u32 o = atomic_load(&s->owner);
    bool mine = o == g_me + 1;
    int r = futex_wait(&s->woken, woken, mine || rec_lost(rec) ? -1 : 50);
    if (!mine && r < 0 && errno == ETIMEDOUT) {
      if (o) check_proc(o - 1, 20);
      else if (!g_death_pending) break; /* nobody is left who could complete it */
    }
  }
}
/* As it is waited for without the blocking flag: it burns a core, for as long as the stream's process lives. */
static void rec_spin(u64 rec) {
  _Atomic u32 *owner = &S->stream[REC_SLOT(rec)].owner;
  for (u32 o; !rec_reached(rec) && (o = atomic_load(owner)) && !proc_dead(o - 1);) relax();
}
/* A host's wait until it is complete. */
static void rec_wait(u64 rec, bool blocking) {
  u64 began = g_profile ? now_ns() : 0;
  rec_reach(rec);
  if (g_profile) host_late(began, rec_time(rec), blocking);
}
