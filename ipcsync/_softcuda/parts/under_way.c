/* SPDX-License-Identifier: Apache-2.0 */
/* Work under way outlives its process, and so does the end of the process, as with a GPU. */

/* An operation of a millisecond and more is done by a process of its own, which shares all memory with this one and is
 * not killed with it; the stream's thread waits for it.  After a SIGKILL it goes on with the stream's queue, up to what
 * must wait for something or needs the program.  Its lock of the life file keeps the slots from being given to others.
 * It traces the stream's thread, so that the kernel holds back that thread's last step (PTRACE_EVENT_EXIT): the mark
 * comes at once, but the process is over, for its parent and for pidfds, only when the work is.
 * It uses nothing of libc that takes a lock: the thread that holds that may be dead. */
#define LONG_BYTES (8u << 20)
#define LONG_US 1000
struct job { struct stream *s; struct op *o; pid_t thread; };
static void run_entry(struct op *o, struct stream *s);
static void op_complete(struct stream *s, u64 pos);

static bool op_passes(const struct op *o) { /* needs neither a wait nor the program */
  switch (o->type) {
  case OP_HOST: case OP_CALLBACK: case OP_BATCH: case OP_GRAPH: return false;
  case OP_WAIT: return seen_done((struct seen){ o->rec, o->late });
  case OP_WAITVAL: return word_fits_now(o);
  }
  return true;
}
static bool op_long(const struct op *o) {
  size_t n = o->type == OP_COPY ? o->n : o->type == OP_SET ? o->n * (size_t)o->width : 0;
  return n >= LONG_BYTES || g_latency_us >= LONG_US;
}

static int go_on(void *arg) {
  struct job *j = arg;
  char life[PATH_MAX + 64];
  life_name(life, g_me);
  setsid(); /* away from signals to the process's group */
  syscall(436 /* close_range */, 0, ~0u, 0); /* nobody's connection stays open by this */
  int fd = open(life, O_RDWR | O_CLOEXEC);
  if (fd < 0 || lock_file(fd, F_SETLK, F_RDLCK) || proc_dead(g_me)) _exit(1); /* had not begun */
  syscall(SYS_ptrace, PTRACE_SEIZE, j->thread, NULL, PTRACE_O_TRACEEXIT); /* refused to some: then it ends earlier */
  struct op *o = j->o;
  int n = 0;
  do {
    run_entry(o, j->s);
    j->s->ahead = o->pos;
    op_complete(j->s, o->pos);
    o = __atomic_load_n(&o->next, __ATOMIC_ACQUIRE);
    /* while this process lives, its thread makes room in the stream now and then */
  } while (o && op_passes(o) && queue_heads(j->s, o->queue, o->ticket) && atomic_load(&g_ready) == 1 &&
           ((++n < 64 && !atomic_load(&j->s->starved)) || proc_dead(g_me)));
  _exit(0);
}

/* Whether the operation, at the head of its queues, was done by a process that outlives this one. */
static bool outlive(struct stream *s, struct op *o) {
  char stack[64 << 10] __attribute__((aligned(16)));
  if (!op_long(o) || !op_passes(o)) return false;
  struct job j = { s, o, (pid_t)syscall(SYS_gettid) };
  /* No signal at its end, and waiting needs __WALL: the program's own waits for children do not see it. */
  int pid = clone(go_on, stack + sizeof stack, CLONE_VM | CLONE_VFORK | CLONE_FS, &j);
  if (pid > 0) while (waitpid(pid, NULL, __WALL) < 0 && errno == EINTR) { }
  return o->pos <= s->ahead;
}

/* Make the end of this process last about `ms` longer, between its mark and its zombie: the kernel then has so many pages
 * to unmap.  They are of one small file, so that they cost page tables, but no memory; a forked child does not get them. */
static bool slow_teardown(long ms) {
  const size_t size = 2 << 20;
  int fd = memfd_create("softcuda-teardown", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)size) < 0) return false;
  u64 spent = 0;
  bool ok = true;
  for (int i = 0; ok && spent < (u64)ms * 1000000ull; i++) {
    void *m = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    ok = m != MAP_FAILED && madvise(m, size, MADV_DONTFORK) == 0;
    static u64 each;
    if (ok && i % 64 == 1) { /* what one costs to unmap */
      u64 t = now_ns();
      ok = munmap(m, size) == 0;
      each = now_ns() - t;
    } else if (i) {
      spent += each;
    }
  }
  close(fd);
  return ok;
}
