/* SPDX-License-Identifier: Apache-2.0 */
/* Hardware queues: which operations of different streams hold each other up. */

/* A queue hands out its entries in the order in which they were put into it, whatever their streams, and each only when
 * its stream has got to it.  Waits and writes of words are done by the queue itself, so what follows waits for them; all
 * else is only started.  Each context has so many; with 0 each stream has one of its own.  They have no locks, which one
 * that is killed could leave taken for the process that goes on with its work. */
static u32 g_queues;
/* Held from before a record of an operation is seen until the operation is in its queue: what waits for it must come
 * behind it there, or the queue stands still for ever.  Before the mutexes of streams. */
static pthread_mutex_t g_queue_order = PTHREAD_MUTEX_INITIALIZER;
static void queue_order_begin(void) { if (likely(g_queues)) pthread_mutex_lock(&g_queue_order); }
static void queue_order_end(void) { if (likely(g_queues)) pthread_mutex_unlock(&g_queue_order); }

/* An idle stream is about to put something into a queue: an empty one if there is one, else each in turn.  Whether it is
 * empty.  g_queue_order and s->mu held. */
static bool queue_choose(struct stream *s) {
  struct ctx *c = s->ctx;
  if (s->head) return false;
  if (unlikely(!g_queues)) return true;
  bool empty = false;
  u32 at = c->queue_turn;
  for (u32 i = 0; i < g_queues && !empty; i++) {
    u32 k = (c->queue_turn + i) % g_queues;
    if ((empty = atomic_load(&c->queue[k].next) == atomic_load(&c->queue[k].given))) at = k;
  }
  s->queue = at;
  c->queue_turn = (at + 1) % g_queues;
  return empty;
}
/* Put an entry into the stream's queue; its ticket.  g_queue_order held. */
static u32 queue_put(struct stream *s) { return atomic_fetch_add(&s->ctx->queue[s->queue].given, 1); }
static bool queue_heads(struct stream *s, u32 queue, u32 ticket) { /* is the entry at the head? */
  return unlikely(!g_queues) || atomic_load(&s->ctx->queue[queue].next) == ticket;
}
/* wait until it is */
static void queue_enter(struct stream *s, u32 queue, u32 ticket) {
  struct queue *q = &s->ctx->queue[queue];
  if (queue_heads(s, queue, ticket)) return;
  atomic_fetch_add(&q->waiters, 1);
  for (u32 next; (int32_t)(ticket - (next = atomic_load(&q->next))) > 0;)
    syscall(SYS_futex, &q->next, FUTEX_WAIT_BITSET, next, NULL, NULL, 1u << ticket % 32);
  atomic_fetch_sub(&q->waiters, 1);
}
/* Take the entry at the head out; once, though a helper that died may have done so. */
static void queue_leave(struct stream *s, u32 queue, u32 ticket) {
  struct queue *q = &s->ctx->queue[queue];
  u32 next = ticket + 1;
  if (!atomic_compare_exchange_strong(&q->next, &(u32){ ticket }, next)) return;
  if (atomic_load(&q->waiters)) syscall(SYS_futex, &q->next, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, 1u << next % 32);
}
