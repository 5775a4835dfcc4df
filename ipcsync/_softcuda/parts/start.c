/* SPDX-License-Identifier: Apache-2.0 */
/* cuInit and the end of the process: the settings, the segment, the devices, a fork. */

static u32 hash32(const char *s) {
  u32 h = 2166136261u;
  for (; *s; s++) h = (h ^ (unsigned char)*s) * 16777619u;
  return h;
}
static void dev_uuid(int phys, unsigned char b[16]) { /* the same in every process, run and segment */
  char t[48];
  for (int i = 0; i < 4; i++) {
    snprintf(t, sizeof t, "softcuda physical device %d word %d", phys, i);
    u32 h = hash32(t);
    h ^= h >> 15; h *= 0x2c1b3c6du; h ^= h >> 12;
    memcpy(b + 4 * i, &h, 4);
  }
  b[6] = (unsigned char)((b[6] & 0x0f) | 0x40);
  b[8] = (unsigned char)((b[8] & 0x3f) | 0x80);
}
static void uuid_text(int phys, char out[48]) {
  unsigned char b[16];
  dev_uuid(phys, b);
  int n = sprintf(out, "GPU-");
  for (int i = 0; i < 16; i++) n += sprintf(out + n, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", b[i]);
}

static void parse_visible(void) {
  const char *v = getenv("CUDA_VISIBLE_DEVICES");
  g_ndev = 0;
  if (!v) {
    for (int i = 0; i < g_nphys; i++) g_dev[g_ndev++] = i;
    return;
  }
  /* like the driver: stop at the first entry that names no device; a device named twice: none */
  while (*v && g_ndev < MAXDEV) {
    while (*v == ' ') v++;
    size_t n = strcspn(v, ",");
    size_t m = n;
    while (m && v[m - 1] == ' ') m--;
    int hit = -1;
    if (m > 4 && !strncasecmp(v, "GPU-", 4)) {
      int hits = 0;
      for (int i = 0; i < g_nphys; i++) {
        char t[48];
        uuid_text(i, t);
        if (m <= strlen(t) && !strncasecmp(t, v, m)) { hit = i; hits++; }
      }
      if (hits != 1) hit = -1;
    } else {
      char *e;
      long k = strtol(v, &e, 10);
      if (e != v && (size_t)(e - v) == m && k >= 0 && k < g_nphys) hit = (int)k;
    }
    if (hit < 0) break;
    for (int i = 0; i < g_ndev; i++) if (g_dev[i] == hit) { g_ndev = 0; return; }
    g_dev[g_ndev++] = hit;
    v += n;
    if (*v == ',') v++; else break;
  }
}
static bool g_bad_setting;               /* of one that means nothing: cuInit refuses */
static long env_num(const char *k, long dflt, long lo, long hi) {
  const char *v = getenv(k);
  char *e;
  if (!v || !*v) return dflt;
  long n = strtol(v, &e, 0);
  if (!*e && n >= lo && n <= hi) return n;
  say("%s must be a number from %ld to %ld, but is '%s'", k, lo, hi, v);
  g_bad_setting = true;
  return dflt;
}
static void env_version(void) { g_version = (int)env_num("IPCSYNC_HOST_DRIVER_VERSION", 13000, 12000, 99990); }

static bool env_death(void) {
  const char *v = getenv("IPCSYNC_HOST_DEATH");
  if (!v || !*v || !strcmp(v, "pending")) return true;
  if (!strcmp(v, "complete")) return false;
  say("IPCSYNC_HOST_DEATH must be complete or pending, but is '%s'", v);
  g_bad_setting = true;
  return false;
}

/* An H100 has as many as CUDA_DEVICE_MAX_CONNECTIONS says, else 8, and under MPS 2. */
static u32 env_queues(void) {
  const char *v = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  long n = v ? strtol(v, NULL, 10) : 0;
  if (n <= 0) n = g_mps ? 2 : 8;
  return (u32)env_num("IPCSYNC_HOST_QUEUES", n < MAXQUEUES ? n : MAXQUEUES, 0, MAXQUEUES);
}

static void env_profile(void) {
  const char *v = getenv("IPCSYNC_HOST_PROFILE");
  g_profile = NULL;
  if (!v || !*v) return;
  for (size_t i = 0; i < sizeof PROFILES / sizeof *PROFILES; i++) if (!strcmp(PROFILES[i]->name, v)) g_profile = PROFILES[i];
  if (g_profile) { pace_measure(); return; }
  say("IPCSYNC_HOST_PROFILE must be the name of a GPU in profiles/ (h100), but is '%s'", v);
  g_bad_setting = true;
}

/* other segments of this user that no living process uses any more */
static void gc_segments(void) {
  char pre[64];
  int np = snprintf(pre, sizeof pre, "softcuda%u-%u-", SH_LAYOUT, (unsigned)getuid());
  DIR *d = opendir(g_dir);
  if (!d) return;
  struct dirent *e;
  while ((e = readdir(d))) {
    char f[PATH_MAX + 300], m[300];
    if (strncmp(e->d_name, pre, (size_t)np) || strchr(e->d_name, '~') || !strcmp(e->d_name, g_base)) continue;
    snprintf(f, sizeof f, "%s/%s", g_dir, e->d_name);
    int fd = open(f, O_RDWR | O_CLOEXEC);
    if (fd < 0) continue;
    struct stat st;
    if (lock_file(fd, F_SETLK, F_WRLCK) == 0 && fstat(fd, &st) == 0 && st.st_nlink > 0) {
      bool live = false;
      if ((size_t)st.st_size >= sizeof(struct sh)) {
        struct sh *o = mmap(NULL, sizeof *o, PROT_READ, MAP_SHARED, fd, 0);
        if (o == MAP_FAILED) live = true;
        else {
          for (u32 i = 0; i < MAXPROC && !live; i++)
            live = atomic_load(&o->proc[i].state) == 1 && !is_dead(&o->proc[i]);
          munmap(o, sizeof *o);
        }
      }
      if (!live) {
        snprintf(m, sizeof m, "%s~", e->d_name);
        unlink_prefix(g_dir, m);
        unlink(f);
      }
    }
    close(fd);
  }
  closedir(d);
}

static bool take_room(int fd, size_t from, size_t to) {
  int r;
  do r = fallocate(fd, 0, (off_t)from, (off_t)(to - from)); while (r < 0 && errno == EINTR);
  return r == 0 || errno == EOPNOTSUPP;
}

#define SEGMENT_NAME "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-"
static CUresult attach(void) {
  const char *seg = getenv("IPCSYNC_HOST_SEGMENT"), *dir = getenv("IPCSYNC_HOST_DIR");
  if (!seg || !*seg) seg = "default";
  if (strlen(seg) > 120 || strspn(seg, SEGMENT_NAME) != strlen(seg)) {
    say("IPCSYNC_HOST_SEGMENT must be 1 to 120 of A-Z a-z 0-9 _ . - but is '%s'", seg);
    return E_VALUE;
  }
  if (!dir || !*dir) dir = "/dev/shm";
  char *whole = realpath(dir, NULL); /* files are opened there whenever, and the program may change its directory */
  if (!whole || strlen(whole) >= sizeof g_dir) {
    say("cannot use %s, the directory of the shared memory: %s", dir, strerror(whole ? ENAMETOOLONG : errno));
    free(whole);
    return E_OS;
  }
  snprintf(g_dir, sizeof g_dir, "%s", whole);
  free(whole);
  snprintf(g_base, sizeof g_base, "softcuda%u-%u-%s", SH_LAYOUT, (unsigned)getuid(), seg); /* versions never meet */
  snprintf(g_path, sizeof g_path, "%s/%s", g_dir, g_base);
  int fd;
  struct stat st;
  for (;;) {
    fd = open(g_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) { say("cannot open %s: %s", g_path, strerror(errno)); return E_OS; }
    if (lock_file(fd, F_SETLKW, F_WRLCK) < 0 || fstat(fd, &st) < 0) { close(fd); return E_OS; }
    if (st.st_nlink > 0) break;
    close(fd); /* its last user removed it just now */
  }
  g_ino = st.st_ino;
  bool fresh = st.st_size == 0;
  /* all but the tables, which are sparse: table_reach */
  if (((size_t)st.st_size < sizeof(struct sh) && ftruncate(fd, sizeof(struct sh)) < 0) || !take_room(fd, 0, offsetof(struct sh, stream)) ||
      !take_room(fd, offsetof(struct sh, written), sizeof(struct sh))) {
    say("cannot make %s: %s", g_path, strerror(errno));
    if (fresh) unlink(g_path);
    close(fd);
    return E_OS;
  }
  struct sh *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (m == MAP_FAILED) { close(fd); return E_OS; }
  if (!atomic_load(&m->ready)) {
    if (getrandom(&m->nonce, sizeof m->nonce, 0) != sizeof m->nonce) m->nonce = now_ns();
    m->next_inc = 1;
    atomic_store(&m->ready, 1);
  }
  S = m;
  int slot = -1;
  for (u32 i = 0; i < MAXPROC; i++) {
    if (proc_dead(i) && proc_over(i, false)) release_proc(i);
    if (slot < 0 && !atomic_load(&S->proc[i].state)) slot = (int)i;
  }
  if (slot < 0) { say("more than %d processes in %s", MAXPROC, g_path); munmap(m, sizeof *m); close(fd); return E_OOM; }
  g_me = (u32)slot;
  struct sh_proc *p = &S->proc[slot];
  char left[PATH_MAX + 64];
  life_name(left, g_me);
  unlink(left);                  /* of one that was killed within cuInit */
  p->pid = (u32)getpid();
  g_inc = p->inc = S->next_inc++;
  atomic_store(&p->mark, 0);
  atomic_store(&p->left, 0);
  for (int d = 0; d < MAXDEV; d++) atomic_store(&p->used[d], 0);
  atomic_store(&p->contexts, 0);
  int life = open_life(g_me, O_CREAT); /* never closed */
  if (life < 0 || lock_file(life, F_SETLK, F_RDLCK) < 0 || !take_mark()) {
    say("cannot prove to others that this process lives: no file %s~p.*, thread, or robust futex", g_path);
    if (life >= 0) close(life);
    munmap(m, sizeof *m);
    close(fd);
    return E_OS;
  }
  if (atomic_load(&S->proc_hi) < (u32)slot + 1) atomic_store(&S->proc_hi, (u32)slot + 1);
  atomic_store(&p->state, 1);
  gc_segments();
  close(fd);
  atomic_store(&g_slot_hint, (u32)slot * 61 % MAXSTREAM);
  atomic_store(&g_event_hint, (u32)slot * 251 % MAXEVENT);
  return OK;
}

static _Atomic int g_beginning;          /* calls of cuInit under way: a child forked meanwhile would wait for their lock */
static void forked(void) {
  int was = atomic_load(&g_ready);
  if (was == 1 || (!was && atomic_load(&g_beginning))) atomic_store(&g_ready, 2);
}
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

/* Whether this library is there for ipcsync alone, since it was chosen because there is no GPU: nobody else in the
 * process finds a device.  Everything begins with cuInit, so that is where they are told. */
static _Atomic bool g_hidden;
static __thread bool t_is_loader;

API cuInit(unsigned flags) {
  int st = atomic_load(&g_ready);
  if (flags) return E_VALUE;
  if (atomic_load(&g_hidden) && !t_is_loader) return st == 2 ? E_NOTINIT : E_NODEV;
  if (st == 1) return OK;
  if (st) return not_ready();
  CUresult r = OK;
  atomic_fetch_add(&g_beginning, 1);
  pthread_mutex_lock(&g_init_mu);
  if (!atomic_load(&g_ready)) {
    g_bad_setting = false;
    env_version();
    long teardown_ms = env_num("IPCSYNC_HOST_TEARDOWN_MS", 0, 0, 1000);
    g_nphys = (int)env_num("IPCSYNC_HOST_DEVICES", 1, 0, MAXDEV);
    g_latency_us = env_num("IPCSYNC_HOST_LATENCY_US", 0, 0, 60000000);
    env_profile();
    g_mps = env_num("IPCSYNC_HOST_MPS", 0, 0, 1);
    g_capacity = env_num("IPCSYNC_HOST_CAPACITY", 1024, 0, 1 << 30);
    g_poll = env_num("IPCSYNC_HOST_POLL", 1, 0, 1);
    g_event_limit = (u32)env_num("IPCSYNC_HOST_EVENT_LIMIT", 22000, 0, MAXEVENT);
    g_strict = (int)env_num("IPCSYNC_HOST_STRICT", 0, 0, 1);
    g_serial = (int)env_num("IPCSYNC_HOST_SERIAL", 1, 0, 1);
    g_pending_slots = (int)env_num("IPCSYNC_HOST_PENDING_SLOTS", 0, 0, 1);
    g_async = (int)env_num("IPCSYNC_HOST_ASYNC", 0, 0, 1) || g_latency_us;
    g_queues = env_queues();
    g_death_pending = env_death();
    g_total_mem = (u64)env_num("IPCSYNC_HOST_MEMORY_MB", 16384, 1, 1 << 30) << 20;
    parse_visible();
    if (g_bad_setting) r = E_VALUE;
    else if (!g_ndev) { say("no device is visible (IPCSYNC_HOST_DEVICES, CUDA_VISIBLE_DEVICES)"); r = E_NODEV; }
    else if (!(r = attach())) {
      if (teardown_ms && !slow_teardown(teardown_ms))
        say("IPCSYNC_HOST_TEARDOWN_MS=%ld: the end may come earlier: %s", teardown_ms, strerror(errno));
      static bool once;
      if (!once) { once = true; pthread_key_create(&g_tls_key, tls_free); }
      atomic_store(&g_ready, 1);
    }
  }
  pthread_mutex_unlock(&g_init_mu);
  atomic_fetch_sub(&g_beginning, 1);
  return r;
}

/* What loads the library in Python begins with this; not part of CUDA.  The result of cuInit, with the reason in `said`.
 * hidden < 0: as hidden as it is. */
__attribute__((visibility("default"))) int ipcsync_softcuda_join(int hidden, char *said, size_t size) {
  if (!hidden || (hidden > 0 && !atomic_load(&g_ready))) atomic_store(&g_hidden, hidden);
  t_is_loader = true;
  t_said = said;
  t_said_size = size;
  CUresult r = cuInit(0);
  t_said = NULL;
  t_is_loader = false;
  return r;
}

__attribute__((destructor)) static void leave(void) {
  int one = 1;
  if (atomic_load(&g_ready) != 1 || S->proc[g_me].pid != (u32)getpid()) return; /* a vfork child */
  if (!atomic_compare_exchange_strong(&g_ready, &one, 3)) return;
  int fd = ctl_lock(false);
  if (fd < 0) return;
  atomic_store(&S->proc[g_me].left, 1);
  give_up_mark();
  abandon_proc(g_me); /* other threads may be within calls: whoever finds the process over gives its slots away */
  bool live = false;
  for (u32 i = 0; i < MAXPROC && !live; i++)
    live = atomic_load(&S->proc[i].state) == 1 && !proc_dead(i);
  if (!live) {
    char pre[300];
    snprintf(pre, sizeof pre, "%s~", g_base);
    unlink_prefix(g_dir, pre);
    unlink(g_path);
  }
  ctl_unlock(fd);
}

/* for tests: what the segment holds.  Not part of CUDA. */
__attribute__((visibility("default"))) long long softcudaStat(const char *what) {
  if (atomic_load(&g_ready) != 1) return -1;
  long long n = 0;
  if (!strcmp(what, "processes")) {
    for (u32 i = 0; i < MAXPROC; i++) n += atomic_load(&S->proc[i].state) == 1;
  } else if (!strcmp(what, "dead")) { /* of these: marked, but not cleaned up */
    for (u32 i = 0; i < MAXPROC; i++) n += proc_dead(i);
  } else if (!strcmp(what, "contexts")) {
    for (u32 i = 0; i < MAXPROC; i++) n += atomic_load(&S->proc[i].contexts);
  } else if (!strcmp(what, "streams")) {
    for (u32 i = 0, hi = atomic_load(&S->stream_hi); i < hi; i++) n += atomic_load(&S->stream[i].owner) != 0;
  } else if (!strcmp(what, "events")) {
    n = slots_in_use();
  } else if (!strcmp(what, "memory")) {
    for (int d = 0; d < MAXDEV; d++) n += (long long)mem_used(d);
  } else if (!strcmp(what, "turns")) {
    n = (long long)atomic_load(&S->turns);
  } else if (!strcmp(what, "captured")) {
    n = (long long)atomic_load(&g_captured);
  } else if (!strcmp(what, "reap")) {
    for (u32 i = 0; i < MAXPROC; i++) {
      bool was = atomic_load(&S->proc[i].state) == 1;
      atomic_store(&g_seen[i], 0);
      check_proc(i, 0);
      n += was && atomic_load(&S->proc[i].state) == 0;
    }
  } else {
    return -1;
  }
  return n;
}
__attribute__((visibility("default"))) const char *softcudaPath(void) { return g_path; }
