/* When a wait of the host looks, and when it sleeps, by what the last waits for the event tell: as docs/design/protocol.md
 * says. Where looks were interrupted, the processor is wanted by others: then there are none for a while. */
#include <stdint.h>

enum { KEPT = 16, KNOWN_AFTER = 4, SHORTER_OF = 5, MOST_OFF = 3, MOST_RESTS = 31 }; /* waits; one of five may be much shorter */
static const int64_t PAUSE_LEAST_NS = 60000,
    PAUSE_MOST_NS = 5000000, /* then a thread that waits takes 0.3 to 0.4 % of a core; with 1 ms it took 1.1 to 1.6 */
    LATE_NS = 20000; /* how late a sleep ends, about */

/* What those who wait for an event learn for the next time, in ns. Threads share it; what one overwrites is only forgotten. */
struct patience {
    int64_t lasted[KEPT];    /* how long the last waits lasted */
    unsigned count;          /* of all waits since it was learned anew */
    int off;                 /* so many in turn were over before they were due, or long after */
    int rests, rest;         /* so many waits do not look; as many as that, after a look that was interrupted */
};

/* How one wait goes, in ns after its begin. */
struct plan {
    int64_t first; /* it looks until then */
    int64_t soon;  /* it sleeps until then, and looks again: it is over soon; 0: nobody knows when */
    int may_look;
};

/* `sleep_ns`: what the shortest sleep takes. */
static struct plan plan_of(const struct patience *patience, int64_t sleep_ns) {
    int64_t sorted[KEPT];
    unsigned count = __atomic_load_n(&patience->count, __ATOMIC_RELAXED); /* once: another thread may go on counting */
    int kept = count < KEPT ? (int)count : KEPT, is_short = 0;
    struct plan plan = {kept ? 0 : sleep_ns, 0, patience->rests <= 0};
    for (int index = 0; index < kept; index++) {
        int64_t lasted = patience->lasted[index];
        int place = index;
        for (; place > 0 && sorted[place - 1] > lasted; place--) sorted[place] = sorted[place - 1];
        sorted[place] = lasted;
        is_short += lasted <= sleep_ns + PAUSE_LEAST_NS; /* with one pause, or without */
    }
    if (kept) plan.first = sleep_ns * is_short / kept;
    for (int first = is_short; kept >= KNOWN_AFTER && plan.soon == 0 && first <= kept / SHORTER_OF; first++) {
        int alike = 0;
        while (first + alike < kept && sorted[first + alike] <= sorted[first] + sorted[first] / 10) alike++;
        if (alike > kept / 2) plan.soon = sorted[first] - LATE_NS;
    }
    return plan;
}

/* How long to sleep `took` after the begin; 0: look again at once. */
static int64_t pause_of(const struct plan *plan, int64_t took) {
    int64_t since = took - plan->soon, pause = since / 256;
    int is_due = plan->soon && since >= 0 && since < took / 10;
    if (plan->may_look && (took < plan->first || is_due)) return 0;
    if (since < 0) return -since;
    if (is_due) return LATE_NS;
    if (pause < PAUSE_LEAST_NS) return PAUSE_LEAST_NS;
    return pause < PAUSE_MOST_NS ? pause : PAUSE_MOST_NS;
}

/* A wait is over after `took`; its last look but one was `blind` before. Of a sleep that was too long nobody knows by how much. */
static void learn(struct patience *patience, const struct plan *plan, int64_t took, int64_t blind) {
    patience->lasted[patience->count++ % KEPT] = took - (blind < took / 32 ? blind : took / 32);
    int is_off = plan->soon && (took - blind < plan->soon || took > plan->soon + plan->soon / 2);
    patience->off = is_off ? patience->off + 1 : 0;
    if (patience->off == MOST_OFF) patience->count = patience->off = 0; /* work takes another time now */
    if (patience->rests > 0) patience->rests--;
    else patience->rest /= 2; /* it looked in peace */
}

/* Others want the processor: the next waits do not look, the more of them the more often that comes. */
static void interrupt(struct patience *patience) {
    patience->rest = patience->rest < MOST_RESTS ? 2 * patience->rest + 1 : MOST_RESTS;
    patience->rests = patience->rest + 1; /* this one too */
}
