/* SPDX-License-Identifier: Apache-2.0 */
/* What the driver's calls cost from C, and how long work takes from stream to stream and to the host.
 *
 *   cc -O2 -o costs costs.c -lcuda -lpthread && ./costs
 *
 * One line a figure, in microseconds: name, median, the 99th of a hundred, least.  Calls are timed in bursts that no stream's queue is
 * too short for, hops with everything queued ahead behind a gate, so that the host has no part in them.  Two processes,
 * forked before CUDA starts, for what happens between them.  Declares what it uses of cuda.h, so that it builds without
 * the toolkit. */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
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

typedef int CUresult, CUdevice;
typedef struct opaque *CUcontext, *CUstream, *CUevent;
typedef unsigned long long CUdeviceptr;
typedef struct { char reserved[64]; } CUipcEventHandle, CUipcMemHandle;
enum { NOT_READY = 600, TIMING = 0, PLAIN = 2, BLOCKING = 3, IPC = 6 };
CUresult cuInit(unsigned), cuDeviceGet(CUdevice *, int), cuDevicePrimaryCtxRetain(CUcontext *, CUdevice), cuCtxSetCurrent(CUcontext),
    cuCtxGetCurrent(CUcontext *), cuCtxSynchronize(void), cuStreamCreate(CUstream *, unsigned), cuStreamSynchronize(CUstream),
    cuStreamQuery(CUstream), cuStreamIsCapturing(CUstream, int *), cuThreadExchangeStreamCaptureMode(int *),
    cuStreamWaitEvent(CUstream, CUevent, unsigned), cuEventCreate(CUevent *, unsigned), cuEventDestroy_v2(CUevent),
    cuEventRecord(CUevent, CUstream), cuEventQuery(CUevent), cuEventSynchronize(CUevent),
    cuStreamWriteValue64_v2(CUstream, CUdeviceptr, uint64_t, unsigned), cuStreamWaitValue64_v2(CUstream, CUdeviceptr, uint64_t, unsigned),
    cuIpcGetEventHandle(CUipcEventHandle *, CUevent), cuIpcOpenEventHandle(CUevent *, CUipcEventHandle),
    cuIpcGetMemHandle(CUipcMemHandle *, CUdeviceptr), cuIpcOpenMemHandle_v2(CUdeviceptr *, CUipcMemHandle, unsigned),
    cuMemAlloc_v2(CUdeviceptr *, size_t), cuMemsetD8_v2(CUdeviceptr, unsigned char, size_t), cuMemHostRegister_v2(void *, size_t, unsigned),
    cuMemHostGetDevicePointer_v2(CUdeviceptr *, void *, unsigned), cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
#define WRITE cuStreamWriteValue64_v2
#define WAIT cuStreamWaitValue64_v2

struct entry { unsigned operation; unsigned pad; CUdeviceptr address; uint64_t value; unsigned flags; CUdeviceptr alias; char rest[8]; };
_Static_assert(sizeof(struct entry) == 48, "CUstreamBatchMemOpParams");
static CUresult (*batch)(CUstream, unsigned, struct entry *, unsigned);

static int64_t ns(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000LL + t.tv_nsec; }
#define OK(call) do { CUresult r_ = (call); if (r_) { printf("%s: result %d\n", #call, r_); fflush(stdout); _exit(3); } } while (0)
static int by_size(const void *a, const void *b) { double x = *(const double *)a, y = *(const double *)b; return (x > y) - (x < y); }
static void say(const char *name, double *us, int n) {
  qsort(us, (size_t)n, sizeof *us, by_size);
  printf("%-72s p50 %9.3f  p99 %9.3f  min %9.3f\n", name, us[n / 2], us[n * 99 / 100], us[0]);
  fflush(stdout);
}

/* What the operating system needs for a thread that slept; of a GPU this says nothing. */
static _Atomic unsigned woken;
static _Atomic int64_t awake;
static void *sleeper(void *last) {
  for (unsigned k = 1; k <= (unsigned)(uintptr_t)last; k++) {
    while (atomic_load(&woken) < k) syscall(SYS_futex, &woken, FUTEX_WAIT, k - 1, 0, 0, 0);
    atomic_store(&awake, ns());
  }
  return NULL;
}
static void wakes(void) {
  enum { WAKES = 200 };
  double t[WAKES];
  pthread_t thread;
  if (pthread_create(&thread, NULL, sleeper, (void *)(uintptr_t)WAKES)) return;
  for (unsigned k = 0; k < WAKES; k++) {
    usleep(200);
    int64_t b = ns();
    atomic_store(&woken, k + 1);
    syscall(SYS_futex, &woken, FUTEX_WAKE, 1, 0, 0, 0);
    while (atomic_load(&awake) < b) { }
    t[k] = (double)(atomic_load(&awake) - b) / 1e3;
  }
  pthread_join(thread, NULL);
  say("this machine: a thread that slept runs", t, WAKES);
}

struct shared { CUipcEventHandle event; CUipcMemHandle memory; _Atomic int step; _Atomic uint64_t go, told; _Atomic int64_t began; };
static struct shared *S;
static volatile uint64_t *W;     /* a registered page of tmpfs, P for the GPU */
static CUdeviceptr P;
static CUstream A, B;

static void turn(int n) { while (atomic_load(&S->step) != n) usleep(20); }
static void next(int n) { atomic_store(&S->step, n); }
static void begin(void) {
  CUdevice d; CUcontext c; int found; void *f = NULL;
  OK(cuInit(0));
  if (!cuGetProcAddress_v2("cuStreamBatchMemOp", &f, 12000, 0, &found)) batch = f;
  OK(cuDeviceGet(&d, 0)); OK(cuDevicePrimaryCtxRetain(&c, d)); OK(cuCtxSetCurrent(c));
  OK(cuStreamCreate(&A, 1)); OK(cuStreamCreate(&B, 1));
  OK(cuMemHostRegister_v2((void *)W, 4096, 3)); OK(cuMemHostGetDevicePointer_v2(&P, (void *)W, 0));
}
static void sync_both(void) { OK(cuStreamSynchronize(A)); OK(cuStreamSynchronize(B)); }
/* a store ends a stream's wait; a software driver's stream may sleep, so it is woken */
static void store(int word, uint64_t value) { W[word] = value; syscall(SYS_futex, &W[word], FUTEX_WAKE, INT_MAX, 0, 0, 0); }
static void hold(CUstream s) { W[8] = 0; OK(WAIT(s, P + 64, 1, 0)); }
static void release(void) { store(8, 1); }

enum { BURST = 100, BURSTS = 40 };
#define TIMED(name, per, before, call, after) do { double t_[BURSTS]; for (int k_ = 0; k_ < BURSTS; k_++) { before; int64_t b_ = ns(); \
  for (int i = 0; i < (per); i++) { call; } t_[k_] = (double)(ns() - b_) / 1e3 / (per); after; } say(name, t_, BURSTS); } while (0)

static void calls(void) {
  CUevent plain, ipc, timing; int status, mode; CUcontext c;
  OK(cuEventCreate(&plain, PLAIN)); OK(cuEventCreate(&ipc, IPC)); OK(cuEventCreate(&timing, TIMING));
  OK(cuEventRecord(plain, A)); OK(cuEventRecord(ipc, A)); OK(cuEventRecord(timing, A)); sync_both();
  TIMED("cuEventRecord, own, disable timing", BURST, , OK(cuEventRecord(plain, A)), sync_both());
  TIMED("cuEventRecord, own, timing", BURST, , OK(cuEventRecord(timing, A)), sync_both());
  TIMED("cuEventRecord, own, interprocess", BURST, , OK(cuEventRecord(ipc, A)), sync_both());
  TIMED("cuEventRecord, own, interprocess, held stream", BURST, hold(A), OK(cuEventRecord(ipc, A)), release(); sync_both());
  TIMED("cuEventQuery, own, interprocess, complete", BURST, , OK(cuEventQuery(ipc)), );
  TIMED("cuEventQuery, own, disable timing, complete", BURST, , OK(cuEventQuery(plain)), );
  TIMED("cuEventQuery, own, interprocess, pending", BURST, hold(A); OK(cuEventRecord(ipc, A)), if (cuEventQuery(ipc) != NOT_READY) abort(), release(); sync_both());
  TIMED("cuStreamWaitEvent, own, interprocess, complete", BURST, , OK(cuStreamWaitEvent(B, ipc, 0)), sync_both());
  TIMED("cuStreamWaitEvent, own, disable timing, complete", BURST, , OK(cuStreamWaitEvent(B, plain, 0)), sync_both());
  TIMED("cuStreamWaitEvent, own, interprocess, pending", BURST, hold(A); OK(cuEventRecord(ipc, A)), OK(cuStreamWaitEvent(B, ipc, 0)), release(); sync_both());
  TIMED("cuStreamWriteValue64, host page", BURST, , OK(WRITE(A, P + 128, 1, 0)), sync_both());
  TIMED("cuStreamWaitValue64, host page, satisfied", BURST, W[16] = 1, OK(WAIT(A, P + 128, 1, 0)), sync_both());
  TIMED("cuStreamWaitValue64, host page, pending", BURST, hold(A); W[16] = 0, OK(WAIT(A, P + 128, 1, 0)), W[16] = 1; release(); sync_both());
  CUdeviceptr d;
  OK(cuMemAlloc_v2(&d, 4096)); OK(cuMemsetD8_v2(d, 0, 4096));
  TIMED("cuStreamWriteValue64, device memory", BURST, , OK(WRITE(A, d, 1, 0)), sync_both());
  struct entry probe = { .operation = 5, .address = P + 128, .value = 1 };
  if (batch && !batch(A, 1, &probe, 0)) {
    struct entry op[2] = { { .operation = 5, .address = P + 128, .value = 1 }, { .operation = 5, .address = P + 192, .value = 1 } };
    TIMED("cuStreamBatchMemOp, one write", BURST, , OK(batch(A, 1, op, 0)), sync_both());
    TIMED("cuStreamBatchMemOp, two writes", BURST, , OK(batch(A, 2, op, 0)), sync_both());
  }
  TIMED("WriteValue64 + cuEventRecord(plain) (timeline with marker)", BURST, , OK(WRITE(A, P + 128, 1, 0)); OK(cuEventRecord(plain, A)), sync_both());
  TIMED("cuStreamIsCapturing", 1000, , OK(cuStreamIsCapturing(A, &status)), );
  TIMED("cuCtxGetCurrent", 1000, , OK(cuCtxGetCurrent(&c)), );
  TIMED("cuThreadExchangeStreamCaptureMode x 2", 1000, , mode = 2; OK(cuThreadExchangeStreamCaptureMode(&mode)); OK(cuThreadExchangeStreamCaptureMode(&mode)), );
  TIMED("cuStreamQuery, idle", BURST, , OK(cuStreamQuery(A)), );
  CUevent made[BURST]; CUipcEventHandle handle;
  TIMED("cuEventCreate, interprocess", BURST, , OK(cuEventCreate(&made[i], IPC)), for (int i = 0; i < BURST; i++) OK(cuEventDestroy_v2(made[i])));
  TIMED("cuIpcGetEventHandle", BURST, , OK(cuIpcGetEventHandle(&handle, ipc)), );
}

enum { LOOKS = 200 };
#define UNTIL(name, call, over) do { double t_[LOOKS]; for (int k = 0; k < LOOKS; k++) { usleep(200); int64_t b_ = ns(); call; while (!(over)) { } \
  t_[k] = (double)(ns() - b_) / 1e3; } say(name, t_, LOOKS); } while (0)

static void latencies(void) {
  CUevent plain, ipc; uint64_t value = 0;
  OK(cuEventCreate(&plain, PLAIN)); OK(cuEventCreate(&ipc, IPC));
  OK(cuEventRecord(plain, A)); OK(cuEventRecord(ipc, A)); sync_both();
  W[32] = 0;
  UNTIL("idle stream: record plain -> query says complete", OK(cuEventRecord(plain, A)), cuEventQuery(plain) == 0);
  UNTIL("idle stream: record interprocess -> query says complete", OK(cuEventRecord(ipc, A)), cuEventQuery(ipc) == 0);
  UNTIL("idle stream: write value -> CPU sees the word", OK(WRITE(A, P + 256, ++value, 0)), W[32] == value);
  double t[LOOKS];
  W[48] = 0;
  for (int k = 0; k < LOOKS; k++) { /* as the probe that gave the figure: the stream's wait is queued, a CPU's store ends it */
    OK(WAIT(A, P + 384, (uint64_t)k + 1, 0)); OK(cuEventRecord(ipc, A));
    usleep(200);
    int64_t b = ns();
    store(48, (uint64_t)k + 1);
    while (cuEventQuery(ipc)) { }
    t[k] = (double)(ns() - b) / 1e3;
  }
  say("a CPU's store ends a stream's wait, by its query", t, LOOKS);
  CUevent blocking;
  OK(cuEventCreate(&blocking, BLOCKING));
  for (int k = 0; k < 40; k++) {
    hold(A); OK(cuEventRecord(blocking, A));
    pid_t pid = fork(); /* no CUDA there: it stores when the parent has slept for milliseconds */
    if (!pid) { usleep(3000); S->began = ns(); release(); _exit(0); }
    OK(cuEventSynchronize(blocking));
    t[k] = (double)(ns() - S->began) / 1e3;
    waitpid(pid, NULL, 0);
  }
  say("a CPU's store -> blocking cuEventSynchronize returns, after milliseconds", t, 40);
}

enum { ROUNDS = 150, TIMES = 9 };
enum kind { EVENTS, WORDS, SAME };
static void hops(const char *name, enum kind kind, unsigned flags, CUdeviceptr mine, CUdeviceptr theirs) {
  double us[TIMES];
  static uint64_t value;
  CUevent x[ROUNDS], y[ROUNDS];
  for (int i = 0; kind == EVENTS && i < ROUNDS; i++) { OK(cuEventCreate(&x[i], flags)); OK(cuEventCreate(&y[i], flags)); }
  for (int k = 0; k <= TIMES; k++) {
    hold(A);
    for (int i = 0; i < ROUNDS; i++) {
      value++;
      if (kind == EVENTS) {
        OK(cuEventRecord(x[i], A)); OK(cuStreamWaitEvent(B, x[i], 0)); OK(cuEventRecord(y[i], B)); OK(cuStreamWaitEvent(A, y[i], 0));
      } else {
        CUstream other = kind == WORDS ? B : A;
        OK(WRITE(A, mine, value, 0)); OK(WAIT(other, mine, value, 0)); OK(WRITE(other, theirs, value, 0)); OK(WAIT(A, theirs, value, 0));
      }
    }
    usleep(3000);
    int64_t b = ns();
    release(); sync_both();
    if (k) us[k - 1] = (double)(ns() - b) / 1e3 / (2 * ROUNDS); /* not the first */
  }
  for (int i = 0; kind == EVENTS && i < ROUNDS; i++) { OK(cuEventDestroy_v2(x[i])); OK(cuEventDestroy_v2(y[i])); }
  say(name, us, TIMES);
}

static void one_process(void) {
  CUdeviceptr d;
  calls();
  latencies();
  OK(cuMemAlloc_v2(&d, 4096)); OK(cuMemsetD8_v2(d, 0, 4096)); OK(cuCtxSynchronize());
  hops("hop by events (disable timing)", EVENTS, PLAIN, 0, 0);
  hops("hop by events (timing)", EVENTS, TIMING, 0, 0);
  hops("hop by events (interprocess)", EVENTS, IPC, 0, 0);
  hops("hop by words, registered tmpfs page", WORDS, 0, P + 1024, P + 1088);
  hops("hop by words, device memory", WORDS, 0, d + 1024, d + 1088);
  hops("write+wait on one stream, host memory", SAME, 0, P + 1536, P + 1600);
  hops("write+wait on one stream, device memory", SAME, 0, d + 1536, d + 1600);
}

enum { CROSSED = 5, EACH = 300 };
static void recorder(void) {
  CUevent e; CUdeviceptr d;
  begin();
  OK(cuEventCreate(&e, IPC)); OK(cuIpcGetEventHandle(&S->event, e));
  OK(cuMemAlloc_v2(&d, 1 << 21)); OK(cuMemsetD8_v2(d, 0, 8192)); OK(cuCtxSynchronize()); OK(cuIpcGetMemHandle(&S->memory, d));
  next(1);
  for (uint64_t k = 1; k <= 2 * EACH; k++) {
    while (atomic_load(&S->go) != k) { }
    atomic_store(&S->began, ns());
    if (k <= EACH) OK(cuEventRecord(e, A)); else OK(WRITE(A, P + 256, k, 0));
    atomic_store(&S->told, k);
    usleep(50); /* a software driver's stream needs the core */
  }
  for (int k = 0; k < 2 * CROSSED; k++) { /* its half of the hops, queued behind a gate of its own */
    CUdeviceptr base = k < CROSSED ? P + 512 : d;
    hold(A);
    for (uint64_t i = 1; i <= ROUNDS; i++) { OK(WRITE(A, base, (uint64_t)k * ROUNDS + i, 0)); OK(WAIT(A, base + 64, (uint64_t)k * ROUNDS + i, 0)); }
    next(10 + 2 * k);
    turn(11 + 2 * k);
    OK(cuStreamSynchronize(A));
  }
  turn(100);
  hold(A); OK(cuEventRecord(e, A));
  next(101); turn(102);
  release(); sync_both();
  next(103); turn(104);
  one_process();
  exit(0);
}

int main(void) {
  int fd = (int)syscall(SYS_memfd_create, "page", 0), status;
  if (fd < 0 || ftruncate(fd, 4096)) return 1;
  W = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  S = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  pid_t pid = fork();
  if (!pid) recorder();
  CUevent e; CUdeviceptr d; double t[EACH];
  begin(); turn(1);
  OK(cuIpcOpenEventHandle(&e, S->event)); OK(cuIpcOpenMemHandle_v2(&d, S->memory, 1));
  for (uint64_t k = 1; k <= 2 * EACH; k++) {
    usleep(200);
    atomic_store(&S->go, k);
    if (k <= EACH) { while (atomic_load(&S->told) != k) { } while (cuEventQuery(e)) { } } else while (W[32] != k) { }
    t[(k - 1) % EACH] = (double)(ns() - atomic_load(&S->began)) / 1e3;
    while (atomic_load(&S->told) != k) { }
    if (k % EACH == 0) say(k == EACH ? "record of an interprocess event -> importer's query says complete" : "write value -> the other process's CPU sees the word", t, EACH);
  }
  for (int k = 0; k < 2 * CROSSED; k++) {
    CUdeviceptr base = k < CROSSED ? P + 512 : d;
    turn(10 + 2 * k);
    for (uint64_t i = 1; i <= ROUNDS; i++) { OK(WAIT(A, base, (uint64_t)k * ROUNDS + i, 0)); OK(WRITE(A, base + 64, (uint64_t)k * ROUNDS + i, 0)); }
    usleep(1000);
    int64_t b = ns();
    next(11 + 2 * k); release();
    OK(cuStreamSynchronize(A));
    t[k % CROSSED] = (double)(ns() - b) / 1e3 / (2 * ROUNDS);
    if (k % CROSSED == CROSSED - 1) say(k < CROSSED ? "two processes' streams, a hop by words of a host page" : "two processes' streams, a hop by words of device memory", t, CROSSED);
  }
  next(100); turn(101);
  TIMED("cuEventQuery, imported, pending", BURST, , if (cuEventQuery(e) != NOT_READY) abort(), );
  TIMED("cuStreamWaitEvent, imported, pending", 20, , OK(cuStreamWaitEvent(A, e, 0)), );
  next(102); turn(103);
  sync_both();
  TIMED("cuEventQuery, imported, complete", BURST, , OK(cuEventQuery(e)), );
  TIMED("cuStreamWaitEvent, imported, complete", BURST, , OK(cuStreamWaitEvent(A, e, 0)), sync_both());
  TIMED("cuEventRecord, imported", BURST, , OK(cuEventRecord(e, A)), sync_both());
  CUevent again[BURST];
  TIMED("cuIpcOpenEventHandle", BURST, , OK(cuIpcOpenEventHandle(&again[i], S->event)), for (int i = 0; i < BURST; i++) OK(cuEventDestroy_v2(again[i])));
  TIMED("cuEventDestroy, imported", BURST, for (int i = 0; i < BURST; i++) OK(cuIpcOpenEventHandle(&again[i], S->event)), OK(cuEventDestroy_v2(again[i])), );
  next(104);
  waitpid(pid, &status, 0);
  wakes();
  return !WIFEXITED(status) || WEXITSTATUS(status);
}
