/* SPDX-License-Identifier: Apache-2.0 */
/* The slots of interprocess events: whose they are, and what of one event the next one in its slot sees. */

/* A process's slots are its file. A handle names process, file and slot, and opens as long as the slot is the file's: also
 * after its event was destroyed, and after its process died. A process uses its own slots again, last in, first out. */
static u32 g_slots[MAXEVENT], g_nslots;  /* mine that hold no event */
static pthread_mutex_t g_slots_mu = PTHREAD_MUTEX_INITIALIZER;
#define RECLAIMING (~0ull)               /* in sh_event.file, under the segment's lock */

static bool file_lives(u64 file) { /* does its process? */
  for (u32 i = 0, hi = atomic_load(&S->proc_hi); i < hi; i++)
    if (atomic_load(&S->proc[i].state) == 1 && S->proc[i].inc == file) return true;
  return false;
}
static bool slot_imported(struct sh_event *x) {
  for (int i = 0; i < MAXPROC / 64; i++) if (atomic_load(&x->importers[i])) return true;
  return false;
}
static long long slots_in_use(void) { /* what somebody living has, made or opened */
  long long n = 0;
  for (u32 i = 0, hi = atomic_load(&S->event_hi); i < hi; i++) {
    struct sh_event *x = &S->event[i];
    u64 file = atomic_load(&x->file);
    if (file) n += ((atomic_load(&x->word) & 1) && file_lives(file)) || slot_imported(x);
  }
  return n;
}

/* Take from the dead, when there is no more room: half of their files, the oldest ones. Not what somebody has opened. */
static bool slots_reclaim(void) {
  u64 lo = RECLAIMING, hi = 0, file;
  bool got = false;
  for (u32 i = 0; i < MAXPROC; i++) check_proc(i, 0);
  int fd = ctl_lock(false);
  if (fd < 0) return false;
  for (int take = 0; take < 2; take++)
    for (u32 i = 0, end = atomic_load(&S->event_hi); i < end; i++) {
      struct sh_event *x = &S->event[i];
      file = atomic_load(&x->file);
      if (file == RECLAIMING && !slot_imported(x)) { atomic_store(&x->file, 0); got = true; } /* one was killed at it */
      if (file == RECLAIMING || !file || file_lives(file) || slot_imported(x)) continue;
      if (!take) {
        if (file < lo) lo = file;
        if (file > hi) hi = file;
      } else if (file <= lo + (hi - lo) / 2) {
        atomic_store(&x->file, RECLAIMING); /* whoever opens it now looks again at the file after he has said so */
        bool late = slot_imported(x);
        atomic_store(&x->file, late ? file : 0);
        got |= !late;
      }
    }
  ctl_unlock(fd);
  return got;
}

/* Is a record of the event that was in the slot still pending? For ever, if the dead left it so. every_ms: as check_proc's. */
static bool slot_pending(u32 slot, u64 every_ms) {
  u64 last = atomic_load(&S->event[slot].latest);
  if (!last || rec_done(last)) return false;
  u32 o = atomic_load(&S->stream[REC_SLOT(last)].owner);
  if (o) check_proc(o - 1, every_ms);
  return !rec_done(last);
}
/* A slot for a new event: my last one that holds none, and may be used; else one that nobody has. */
static bool slot_take(u32 *slot, bool *fresh) {
  pthread_mutex_lock(&g_slots_mu);
  u32 i = g_nslots;
  while (i && !g_pending_slots && slot_pending(g_slots[i - 1], 5)) i--; /* waits for nobody's end */
  *fresh = !i;
  if (i) {
    *slot = g_slots[i - 1];
    memmove(g_slots + i - 1, g_slots + i, (g_nslots-- - i) * sizeof *g_slots);
  }
  pthread_mutex_unlock(&g_slots_mu);
  if (!*fresh) return true;
  do {
    u32 start = atomic_load(&g_event_hint);
    for (u32 k = 0; k < MAXEVENT; k++) {
      *slot = (start + k) % MAXEVENT;
      struct sh_event *x = &S->event[*slot];
      u64 nobody = 0;
      if (!table_reach(&S->event_hi, S->event, sizeof *x, *slot + 1)) { k += MAXEVENT - 1 - *slot; continue; } /* those below */
      if (atomic_load_explicit(&x->file, memory_order_relaxed)) continue;
      if (!atomic_compare_exchange_strong(&x->file, &nobody, g_inc)) continue;
      x->proc = g_me;
      atomic_store(&g_event_hint, *slot + 1);
      return true;
    }
  } while (slots_reclaim());
  return false;
}
static void slot_give(u32 slot) { /* its event is destroyed */
  struct sh_event *x = &S->event[slot];
  atomic_store(&x->word, ((atomic_load(&x->word) >> 1) + 1) << 1);
  pthread_mutex_lock(&g_slots_mu);
  g_slots[g_nslots++] = slot;
  pthread_mutex_unlock(&g_slots_mu);
}

/* What an event captures: its latest record, and a late signal: a record of the event that was in the slot before, whose
 * completion makes this one look complete. 0, 0: never recorded. */
struct seen { u64 rec, late; };
static inline bool seen_done(struct seen e) { return !e.rec || rec_done(e.rec) || (e.late && rec_done(e.late)); }
static bool seen_poll(struct seen e) { return !e.rec || rec_poll(e.rec) || (e.late && rec_poll(e.late)); }
static bool seen_late(struct seen e) { /* rare: so it looks again and again, rather than sleep on both */
  if (!e.late) return false;
  for (struct timespec t = { 0, 1000000 }; !seen_poll(e);) nanosleep(&t, NULL);
  return true;
}
static void seen_reach(struct seen e) { if (!seen_late(e) && e.rec) rec_reach(e.rec); } /* a stream */
static void seen_wait(struct seen e, bool blocking) { /* a host */
  if (seen_late(e) || !e.rec) return;
  if (g_profile && !blocking) rec_spin(e.rec);
  rec_wait(e.rec, blocking);
}

/* A new event in the slot. It has no record; but with IPCSYNC_HOST_PENDING_SLOTS a signal that the one before it still waits
 * for will come here, and if the dead left that one's record pending, it stays so. */
static void slot_begin(u32 slot, bool fresh, unsigned flags) {
  struct sh_event *x = &S->event[slot];
  u64 last = fresh ? 0 : atomic_load(&x->latest), late = fresh ? 0 : atomic_load(&x->late);
  bool lost = g_pending_slots && last && slot_pending(slot, 0) && rec_lost(last);
  if (last && !lost && !rec_done(last)) late = last;
  else if (late && rec_done(late)) late = 0;
  atomic_store(&x->late, g_pending_slots ? late : 0);
  if (!lost) atomic_store(&x->latest, 0);
  x->flags = flags;
  x->pid = (u32)getpid();
  atomic_store(&x->word, ((atomic_load(&x->word) >> 1) + 1) << 1 | 1);
}

/* rec becomes what the event captures; what it captured before. A signal that has come by now ends earlier records only.
 * By an exchange, so that of records that are made at the same moment each follows another one: the chain has no forks. */
static struct seen slot_record(u32 slot, u64 rec) {
  struct sh_event *x = &S->event[slot];
  u64 late = atomic_load(&x->late);
  if (late && rec_done(late) && atomic_compare_exchange_strong(&x->late, &late, 0)) late = 0;
  return (struct seen){ atomic_exchange(&x->latest, rec), late };
}
