/* How soon a process in futex_waitv(2) learns that another one, which holds one of the robust futexes, was killed.
 *
 *     cc -O2 -o death_wait death_wait.c && ./death_wait
 *
 * Each of 1, 64 and 128 words, with the bit FUTEX_WAITERS set and without it: the kernel then wakes nobody. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { DEATHS = 100, LINE = 128, MOST = 128, NUMBER = 449 /* futex_waitv */, SIZE_32 = 2 /* FUTEX_32 */ };

struct waiter { uint64_t value, address; uint32_t flags, reserved; };
struct shared { int64_t killed; char lines[MOST * LINE]; };

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int in_order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Hold the word as a robust futex until killed; the list's node lies 8 bytes behind it. */
static void hold(_Atomic uint32_t *word, int has_waiters, int told) {
    static struct robust_list_head head;
    struct robust_list *node = (void *)((char *)word + 8);
    head.list.next = node;
    node->next = &head.list;
    head.futex_offset = -8;
    syscall(SYS_set_robust_list, &head, sizeof head);
    atomic_store(word, (uint32_t)syscall(SYS_gettid) | (has_waiters ? FUTEX_WAITERS : 0));
    if (write(told, "x", 1) == 1) pause();
    _exit(1);
}

/* One death. Returns the microseconds until it was seen, or a negative errno. */
static double one(struct shared *shared, int words, int has_waiters) {
    memset(shared->lines, 0, sizeof shared->lines);
    _Atomic uint32_t *word = (void *)(shared->lines + LINE * (words / 2));
    int ends[2];
    char byte;
    if (pipe(ends)) return -errno;
    pid_t holder = fork();
    if (holder == 0) hold(word, has_waiters, ends[1]);
    if (read(ends[0], &byte, 1) != 1) return -EIO;
    close(ends[0]);
    close(ends[1]);
    struct waiter waiters[MOST];
    for (int i = 0; i < words; i++) {
        _Atomic uint32_t *each = (void *)(shared->lines + LINE * i);
        waiters[i] = (struct waiter){atomic_load(each), (uint64_t)(uintptr_t)each, SIZE_32, 0};
    }
    pid_t killer = fork();
    if (killer == 0) {
        usleep(3000); /* until the other one waits */
        shared->killed = now_ns();
        kill(holder, SIGKILL);
        _exit(0);
    }
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += 500000000;
    if (until.tv_nsec >= 1000000000) { until.tv_sec++; until.tv_nsec -= 1000000000; }
    long woken = syscall(NUMBER, waiters, words, 0, &until, CLOCK_MONOTONIC);
    double seen = woken < 0 ? -errno : (now_ns() - shared->killed) / 1e3;
    waitpid(killer, NULL, 0);
    waitpid(holder, NULL, 0);
    return seen;
}

int main(void) {
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 1;
    for (int has_waiters = 1; has_waiters >= 0; has_waiters--) {
        for (int words = 1; words <= MOST; words = words == 1 ? 64 : 2 * words) {
            double took[DEATHS];
            int seen = 0, lost = 0;
            for (int i = 0; i < DEATHS && lost < 3; i++) {
                double each = one(shared, words, has_waiters);
                if (each >= 0) took[seen++] = each;
                else { lost++; errno = (int)-each; }
            }
            printf("death seen in futex_waitv, %3d words, FUTEX_WAITERS %s: ", words, has_waiters ? "set" : "not set");
            if (lost) printf("%d not seen: %s\n", lost, strerror(errno));
            else {
                qsort(took, seen, sizeof *took, in_order);
                printf("p50 %.1f us, p99 %.1f us, max %.1f us\n", took[seen / 2], took[seen * 99 / 100], took[seen - 1]);
            }
            fflush(stdout);
        }
    }
    return 0;
}
