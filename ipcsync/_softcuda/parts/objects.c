/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts, streams and events as this process has them, and the handles that stand for them. */

enum { K_CTX = 1, K_STREAM = 2, K_EVENT = 3, K_GRAPH = 4, K_NODE = 5, K_EXEC = 6, K_USER = 7 };
struct hdr {
  _Atomic u64 handle;            /* 0 while the object is not in use */
  u32 idx, gen;
  struct hdr *next;
};
#define CHUNK 1024
struct pool {
  pthread_mutex_t mu;
  struct hdr **_Atomic chunk[1024];
  u32 n, kind;
  size_t size;
  struct hdr *free;
};

struct alloc;
struct set { void **v; u32 n, room; };   /* handles of nodes */
struct trec { _Atomic int refs; _Atomic u64 t; };   /* time of one record */
struct stream;
#define MAXQUEUES 32             /* as many as CUDA_DEVICE_MAX_CONNECTIONS may ask for */
struct queue { _Atomic u32 given, next, waiters; }; /* entries put in; the ticket at the head; who waits for that */
struct ctx {
  struct hdr h;
  int dev;                       /* visible ordinal */
  bool primary;
  _Atomic int active;
  int refs;
  unsigned flags;
  u64 id;
  pthread_mutex_t mu;
  struct stream *streams;        /* all that are not destroyed */
  _Atomic(struct stream *) legacy, all; /* all: where a record of everything is taken on */
  u64 *gone;                     /* last records of streams that were destroyed before they were done */
  int ngone, cgone;
  u32 peers;
  size_t limit[8];
  int cache_config;
  struct queue queue[MAXQUEUES];
  u32 queue_turn;
};
enum { ST_USER, ST_LEGACY, ST_THREAD, ST_ALL, ST_LANE }; /* lane: of an executable graph */
enum { OP_NOP, OP_WAIT, OP_HOST, OP_CALLBACK, OP_COPY, OP_SET, OP_WRITE, OP_WAITVAL, OP_BATCH, OP_GRAPH };
struct op {
  struct op *next;
  u64 pos;
  u32 queue, ticket;             /* its hardware queue, and its place there */
  int type, width;
  unsigned flags;
  union { u64 rec; CUhostFn fn; CUstreamCallback cb; void *dst; };
  union { const void *src; void *data; u64 val, late; };
  size_t n;                      /* bytes or elements; of a launch, the room that it takes in the queue */
  void *stage;                   /* copy of pageable memory, freed afterwards */
  struct alloc *a, *b;           /* allocations held while the operation is queued */
  struct trec *tr;
  int cost;                      /* GPU_... of the profile */
  u64 from;                      /* when it can begin, with a profile */
};
struct stream {
  struct hdr h;
  struct ctx *ctx;
  struct stream *prev, *nxt;     /* in ctx->streams */
  unsigned flags;
  int prio, kind;
  u64 id;
  u32 slot, queue;               /* queue: the hardware queue that it goes through until it is idle */
  pthread_mutex_t mu;
  pthread_cond_t cv, room;       /* room: fewer than g_capacity operations are queued */
  struct op *head, *tail;        /* the operation being executed stays at the head */
  struct op *spare;              /* done ones, for the next */
  u64 ahead;                     /* up to here the queue was done by a process that outlives this one */
  _Atomic long queued;                  /* operations from head on */
  _Atomic int starved;           /* callers that wait for room */
  bool worker, dead;
  _Atomic u64 clock; u64 seen;              /* with a profile: when the last operation that was executed is over, and seen to be */
  u64 pub;                       /* handle that callbacks see */
  struct capture *cap;           /* that it takes part in; under g_cap_mu, as cap_next */
  struct stream *cap_next;
  struct set cap_deps;           /* what the next node that it captures depends on */
  u64 *cap_edges;                /* zeros, as many as that when last asked */
};
struct event {
  struct hdr h;
  struct ctx *ctx;
  unsigned flags;
  _Atomic u64 own;               /* latest record of an event that is not interprocess */
  _Atomic u64 *latest;
  int shslot;                    /* of an interprocess event, else -1 */
  bool imported;
  u32 word;                      /* of an import: what its sh_event.word was when it was opened */
  _Atomic u64 cap;               /* id of the capture in which this handle was last recorded, 0 none */
  struct set cap_deps;           /* and the nodes that the record stands for; under g_cap_mu */
  pthread_mutex_t mu;
  struct trec *tr;
};
static int event_sort(const struct event *e) { return e->imported ? IMPORTED : e->shslot >= 0 ? IPC : e->flags & 2 ? PLAIN : TIMING; }
struct user {                    /* an object of the program, for as long as graphs need it */
  struct hdr h;
  _Atomic u64 refs;
  CUhostFn destroy;
  void *data;
};
struct held { struct user *user; u64 n; };
struct graph {
  struct hdr h;
  struct held *held;             /* user objects */
  u32 nheld;
  bool capturing;
  struct node **node;            /* in an order in which they can run */
  u32 n, room;
};
struct node {
  struct hdr h;
  struct graph *graph;
  struct work *work;
  struct node **dep;
  u32 ndep, at;                  /* at: its place in the graph */
  u64 mark;
};
#define MAXLANES 32              /* branches of a graph that run at once */
struct exec {
  struct hdr h;
  struct ctx *ctx;
  u64 flags;
  u32 room;                      /* that a launch takes in its stream's queue: its nodes, at least 1 */
  u32 parts;                     /* of those, how many wait, write or record: they break a launch into parts */
  pthread_mutex_t mu;            /* held during a launch; before those of streams */
  struct plan *plan;
  u64 last;                      /* record of the end of its latest launch */
  struct { struct stream *s; void *h; } lane[MAXLANES]; /* 0 is the stream of the launch */
};

static struct pool g_ctxs = { PTHREAD_MUTEX_INITIALIZER, {0}, 0, K_CTX, sizeof(struct ctx), NULL };
static struct pool g_streams = { PTHREAD_MUTEX_INITIALIZER, {0}, 0, K_STREAM, sizeof(struct stream), NULL };
static struct pool g_events = { PTHREAD_MUTEX_INITIALIZER, {0}, 0, K_EVENT, sizeof(struct event), NULL };
static struct pool g_graphs = { PTHREAD_MUTEX_INITIALIZER, {0}, 0, K_GRAPH, sizeof(struct graph), NULL };
static struct pool g_users = { PTHREAD_MUTEX_INITIALIZER, {0}, 0, K_USER, sizeof(struct user), NULL };
static struct pool g_nodes = { PTHREAD_MUTEX_INITIALIZER, {0}, 0, K_NODE, sizeof(struct node), NULL };
static struct pool g_execs = { PTHREAD_MUTEX_INITIALIZER, {0}, 0, K_EXEC, sizeof(struct exec), NULL };

/* objects are used again but never unmapped, so a stale handle is found out, not followed */
static void *obj_new(struct pool *p) {
  pthread_mutex_lock(&p->mu);
  struct hdr *h = p->free;
  if (h) {
    p->free = h->next;
  } else {
    u32 c = p->n / CHUNK;
    if (c >= 1024) { pthread_mutex_unlock(&p->mu); return NULL; }
    if (!atomic_load(&p->chunk[c])) atomic_store(&p->chunk[c], calloc(CHUNK, sizeof(struct hdr *)));
    h = calloc(1, p->size);
    if (!h || !p->chunk[c]) { pthread_mutex_unlock(&p->mu); return NULL; }
    h->idx = p->n++;
    atomic_load(&p->chunk[c])[h->idx % CHUNK] = h;
    if (p->kind == K_CTX) pthread_mutex_init(&((struct ctx *)h)->mu, NULL);
    if (p->kind == K_EXEC) pthread_mutex_init(&((struct exec *)h)->mu, NULL);
    if (p->kind == K_EVENT) pthread_mutex_init(&((struct event *)h)->mu, NULL);
    if (p->kind == K_STREAM) {
      pthread_condattr_t ca;
      pthread_condattr_init(&ca);
      pthread_condattr_setclock(&ca, CLOCK_MONOTONIC);
      pthread_mutexattr_t ma;
      pthread_mutexattr_init(&ma);
      pthread_mutexattr_settype(&ma, PTHREAD_MUTEX_ADAPTIVE_NP); /* the stream's thread holds it for moments */
      pthread_mutex_init(&((struct stream *)h)->mu, &ma);
      pthread_cond_init(&((struct stream *)h)->cv, &ca);
      pthread_cond_init(&((struct stream *)h)->room, NULL);
    }
  }
  pthread_mutex_unlock(&p->mu);
  return h;
}
static u64 obj_publish(struct pool *p, void *o) {
  struct hdr *h = o;
  h->gen = (h->gen + 1) & 0xfffff;
  u64 v = 5ull << 56 | (u64)p->kind << 52 | (u64)h->gen << 28 | (u64)h->idx << 4;
  atomic_store(&h->handle, v);
  return v;
}
static void obj_recycle(struct pool *p, void *o) {
  struct hdr *h = o;
  atomic_store(&h->handle, 0);
  pthread_mutex_lock(&p->mu);
  h->next = p->free;
  p->free = h;
  pthread_mutex_unlock(&p->mu);
}
static void *obj_get(struct pool *p, void *handle) {
  u64 v = (u64)(uintptr_t)handle;
  if ((v >> 52) != (5ull << 4 | p->kind) || (v & 15)) return NULL;
  u32 i = (u32)(v >> 4) & 0xffffff;
  if (i >= 1024 * CHUNK) return NULL;
  struct hdr **c = atomic_load_explicit(&p->chunk[i / CHUNK], memory_order_acquire);
  struct hdr *h = c ? c[i % CHUNK] : NULL;
  return h && atomic_load_explicit(&h->handle, memory_order_acquire) == v ? h : NULL;
}
#define H(o) ((void *)(uintptr_t)atomic_load(&(o)->h.handle))

static __thread void *t_stack[256];
static __thread int t_depth;
static __thread int t_capture_mode;
static struct ctx *g_primary[MAXDEV];
static pthread_mutex_t g_primary_mu = PTHREAD_MUTEX_INITIALIZER;

static CUresult cur_ctx(struct ctx **out) {
  if (!t_depth) return E_CTX;
  struct ctx *c = obj_get(&g_ctxs, t_stack[t_depth - 1]);
  if (!c || !atomic_load(&c->active)) return E_CTXDEAD;
  *out = c;
  return OK;
}
