/* SPDX-License-Identifier: Apache-2.0 */
/* Words that streams wait for: they sleep, and who stores the word wakes them. */

/* A store of this library, by whichever process of the segment, rings the word's bell.  A store of the program's own
 * wakes the stream if a futex wake on the word follows it; on a GPU that wake does nothing.  The library itself never
 * wakes who sleeps on the word: a GPU does not either. */
static struct sh_bell *bell_of(const void *p) { /* a word's place within its page is the same in all processes */
  return &S->bell[((uintptr_t)p >> 3) % MAXBELL];
}
static void words_stored(const void *p, size_t n) {
  size_t count = (((uintptr_t)p & 7) + n + 7) / 8;
  if (count > MAXBELL) count = MAXBELL;
  atomic_thread_fence(memory_order_seq_cst);
  for (size_t i = 0; i < count; i++) {
    struct sh_bell *b = bell_of((const char *)p + 8 * i);
    if (likely(!atomic_load(&b->waiters))) continue;
    atomic_fetch_add(&b->rung, 1);
    syscall(SYS_futex, &b->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
  }
}

static struct sh_written *written_of(const void *p) { return &S->written[bell_of(p) - S->bell]; }
/* With a profile: a stream of this process is about to write the word, which is there at `at`. */
static void word_written(const void *p, u64 at) {
  struct sh_written *w = written_of(p);
  atomic_store_explicit(&w->by, g_me, memory_order_relaxed);
  atomic_store_explicit(&w->at, at, memory_order_relaxed);
  atomic_fetch_add(&w->count, 1);
}

static bool word_fits(const struct op *o, u32 *low) {
  u64 v, y = o->val;
  if (o->width == 4) { /* GEQ is cyclic: the signed difference */
    v = atomic_load((_Atomic u32 *)o->dst);
    y = (u32)y;
  } else {
    v = atomic_load((_Atomic u64 *)o->dst);
  }
  *low = (u32)v;
  u64 all = o->width == 4 ? UINT32_MAX : UINT64_MAX;
  switch (o->flags & 3) {
  case 0: return ((v - y) & all) <= all / 2;
  case 1: return v == y;
  case 2: return v & y;
  default: return ~(v | y) & all;
  }
}

static bool word_fits_now(const struct op *o) { u32 low; return word_fits(o, &low); }

/* Sleep until the bell rings or the word is woken: the kernel compares both with what was seen.  ns < 0: no limit. */
static void word_sleep(struct sh_bell *b, u32 rung, void *word, u32 low, int64_t ns) {
  struct { u64 val, address; u32 flags, reserved; } on[2] = {
    { rung, (uintptr_t)&b->rung, 2, 0 }, { low, (uintptr_t)word, 2, 0 } }; /* 2: FUTEX2_SIZE_U32, shared */
  u64 until = now_ns() + (u64)(ns < 0 ? 0 : ns);
  struct timespec t = { (time_t)(until / 1000000000), (long)(until % 1000000000) };
  static _Atomic bool lacks_waitv; /* before Linux 5.16, or refused by a sandbox */
  if (!atomic_load_explicit(&lacks_waitv, memory_order_relaxed)) {
    if (syscall(449 /* futex_waitv */, on, 2, 0, ns < 0 ? NULL : &t, CLOCK_MONOTONIC) >= 0) return;
    if (errno != ENOSYS && errno != EPERM && errno != EINVAL) return;
    atomic_store(&lacks_waitv, true);
  }
  t = (struct timespec){ ns / 1000000000, ns % 1000000000 };
  syscall(SYS_futex, &b->rung, FUTEX_WAIT, rung, ns < 0 ? NULL : &t, NULL, 0);
}

/* A plain store wakes nobody, so now and then the word is looked at: after 50 us first, later after a 32nd of the time
 * waited, at most 10 ms, so that a stream that waits costs nearly nothing.  Whether it had to wait. */
static bool word_wait(struct op *o) {
  struct sh_bell *b = bell_of(o->dst);
  u32 low;
  if (word_fits(o, &low)) return false;
  u64 began = now_ns(), spins = spin_begin();
  while (spin_on(spins)) if (word_fits(o, &low)) { spin_end(spins, true); return true; }
  spin_end(spins, false);
  atomic_fetch_add(&b->waiters, 1);
  for (;;) {
    u32 rung = atomic_load(&b->rung);
    if (word_fits(o, &low)) break;
    int64_t pause = (int64_t)(now_ns() - began) / 32;
    word_sleep(b, rung, o->dst, low, !g_poll ? -1 : pause < 50000 ? 50000 : pause > 10000000 ? 10000000 : pause);
  }
  atomic_fetch_sub(&b->waiters, 1); /* a process that dies here only makes the word's stores dearer */
  return true;
}
