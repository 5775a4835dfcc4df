/* SPDX-License-Identifier: Apache-2.0 */
/* Hardware queues: which operations of different streams hold each other up. */

/* A queue hands out its entries in the order in which they were put into it, whatever their streams, and each only when
 * its stream has got to it.  Waits and writes of words are done by the queue itself, so what follows waits for them; all
 * else is only started.  With no queues here, each stream has one of its own. */
#define MAXQUEUES 128
struct queue { pthread_mutex_t mu; pthread_cond_t cv; u64 given, next; };
static struct queue g_queue[MAXQUEUES];
static u32 g_queues;
static _Atomic u32 g_queue_turn;
/* Held from before a record of an operation is seen until the operation is in its queue: what waits for it must come
 * behind it there, or the queue stands still for ever.  Before the mutexes of streams. */
static pthread_mutex_t g_queue_order = PTHREAD_MUTEX_INITIALIZER;
static void queue_order_begin(void) { if (unlikely(g_queues)) pthread_mutex_lock(&g_queue_order); }
static void queue_order_end(void) { if (unlikely(g_queues)) pthread_mutex_unlock(&g_queue_order); }

static void queues_init(u32 n) {
  g_queues = n;
  for (u32 i = 0; i < n; i++) { pthread_mutex_init(&g_queue[i].mu, NULL); pthread_cond_init(&g_queue[i].cv, NULL); }
}
static u32 queue_of_new_stream(void) { return g_queues ? atomic_fetch_add(&g_queue_turn, 1) % g_queues : 0; }

/* put an entry into the stream's queue; its ticket */
static u64 queue_put(struct stream *s) {
  if (likely(!g_queues)) return 0;
  struct queue *q = &g_queue[s->queue];
  pthread_mutex_lock(&q->mu);
  u64 t = q->given++;
  pthread_mutex_unlock(&q->mu);
  return t;
}
/* wait until the entry is at the head */
static void queue_enter(u32 queue, u64 ticket) {
  if (likely(!g_queues)) return;
  struct queue *q = &g_queue[queue];
  pthread_mutex_lock(&q->mu);
  while (q->next != ticket) pthread_cond_wait(&q->cv, &q->mu);
  pthread_mutex_unlock(&q->mu);
}
/* take the entry at the head out */
static void queue_leave(u32 queue) {
  if (likely(!g_queues)) return;
  struct queue *q = &g_queue[queue];
  pthread_mutex_lock(&q->mu);
  q->next++;
  pthread_cond_broadcast(&q->cv);
  pthread_mutex_unlock(&q->mu);
}
static bool queue_empty(struct stream *s) {
  if (likely(!g_queues)) return true;
  struct queue *q = &g_queue[s->queue];
  pthread_mutex_lock(&q->mu);
  bool empty = q->next == q->given;
  pthread_mutex_unlock(&q->mu);
  return empty;
}
