/* SPDX-License-Identifier: Apache-2.0 */
/* softcuda - layout of the memory that all processes of one segment share.
 *
 * One control file per segment, <dir>/softcuda<layout>-<uid>-<segment>, holds flat tables.
 * Nothing in them is a pointer or a process-shared mutex: slots are claimed with
 * compare-and-swap, hot words are single 64-bit atomics, waiting is futex on the
 * sh_stream.woken, and on a word and its bell (parts/words.c).  So a process that is killed at any instruction
 * leaves nothing locked; whoever finds it dead ("reaps" it) repairs its slots.
 */
#pragma once
#include <stdatomic.h>
#include <stdint.h>

typedef uint32_t u32;
typedef uint64_t u64;

#define SH_LAYOUT  24u /* bump with every change of the structures below */
#define MAXPROC    512
#define MAXSTREAM  32768
#define MAXEVENT   131072
#define MAXDEV     16
#define MAXBELL    512           /* words of a page */
#define TIMES      64            /* of a stream's latest operations, with a profile */

/* A record is (stream slot, position).  Positions of a slot never restart, also when the
 * slot is used again by another stream, so a record is complete iff done >= position and a
 * stale record can never be mistaken for a later one. */
#define POS_BITS   48
#define POS_MASK   ((1ull << POS_BITS) - 1)
#define REC(slot, pos) (((u64)(slot) << POS_BITS) | (pos))
#define REC_SLOT(r) ((u32)((r) >> POS_BITS))
#define REC_POS(r)  ((r) & POS_MASK)
#define TURN_BITS  54            /* nanoseconds since the start of the machine: 208 days */
#define TURN(slot, at) (((u64)(slot) << TURN_BITS) | (at))
#define TURN_SLOT(t) ((u32)((t) >> TURN_BITS))
#define TURN_AT(t) ((t) & ((1ull << TURN_BITS) - 1))
#define DONE_DEAD   (1ull << 63) /* in sh_stream.done: the owner is dead or leaving, nothing is done any more */

struct sh_proc {                 /* 256 bytes */
  _Atomic u32 state;             /* 0 free, 1 live */
  _Atomic u32 mark;              /* robust futex, see liveness.c: FUTEX_OWNER_DIED once the process is dead or leaving */
  u64 inc;                       /* unique per registration */
  u32 pid;                       /* in its own pid namespace, so for itself and for messages only */
  _Atomic u32 left;              /* 1: it exits, and has abandoned its records itself */
  _Atomic u64 used[MAXDEV];      /* bytes of device memory, by physical device */
  _Atomic u32 contexts;
  char pad[256 - 28 - 8 * MAXDEV];
};

struct sh_stream {               /* 64 bytes: one cache line */
  _Atomic u64 done;              /* position of the last completed operation */
  _Atomic u64 tail;              /* position of the last operation queued */
  _Atomic u64 wanted;            /* nobody waits for an earlier position */
  _Atomic u32 woken;             /* moves when those who wait are to look again; futex */
  _Atomic u32 owner;             /* process slot + 1, 0 free */
  _Atomic u64 lost_from, lost_to; /* lost_from < position <= lost_to: left pending by an owner that died; 0, 0 none */
  char pad[16];
};

struct sh_event {                /* 128 bytes; a slot for interprocess events, of one process */
  _Atomic u64 file;              /* that process's sh_proc.inc, also after its death; 0 nobody's */
  u32 proc, pid;                 /* its slot, and its pid */
  _Atomic u32 word;              /* generation << 1 | whether an event is in it; moves with each that is made or destroyed */
  u32 flags;
  _Atomic u64 latest;            /* REC() of the latest record, 0 never recorded; stays when the event is destroyed */
  _Atomic u64 late;              /* REC() of an earlier event's record that signals this one, 0 none */
  _Atomic u64 importers[MAXPROC / 64];
  char pad[128 - 40 - MAXPROC / 8];
};

/* Rung by each store of the library to a word at this place of a page, of whichever page, if a stream waits for one. */
struct sh_bell { _Atomic u32 rung, waiters; };
/* With a profile: the latest write of a stream to a word at that place, how many there were, whose it was (process slot), when. */
struct sh_written { _Atomic u32 count, by; _Atomic u64 at; };

struct sh {
  _Atomic u32 ready;
  u64 nonce;                     /* random, tells this segment from an earlier one of that name */
  u64 next_inc;                  /* under the file lock */
  _Atomic u32 stream_hi, event_hi, proc_hi; /* high-water marks of the tables */
  char pad[4096 - 36];
  struct sh_bell bell[MAXBELL];
  struct sh_proc proc[MAXPROC];
  struct sh_stream stream[MAXSTREAM];
  struct sh_event event[MAXEVENT];
  _Atomic u64 times[MAXSTREAM][TIMES]; /* by position: when it is complete; only with a profile (parts/profile.c) */
  struct sh_written written[MAXBELL];
  _Atomic u64 turn[MAXDEV];      /* TURN(process slot + 1, when it begins): the latest turn of a process that records imported events */
  _Atomic u64 turns;             /* how often it went from one process to another */
};
_Static_assert(sizeof(struct sh_bell) * MAXBELL == 4096, "layout");
_Static_assert(sizeof(struct sh_proc) == 256, "layout");
_Static_assert(sizeof(struct sh_stream) == 64, "layout");
_Static_assert(sizeof(struct sh_event) == 128, "layout");

/* opaque contents of CUipcEventHandle (64 bytes): as in the real driver, where they were seen */
struct event_handle {
  u32 pid, unread;               /* unread: may be anything when it is opened */
  u64 file, slot;                /* file: half of sh.nonce, and sh_event.file */
  u64 zero[5];
};
_Static_assert(sizeof(struct event_handle) == 64, "layout");
/* opaque contents of CUipcMemHandle (64 bytes) */
struct mem_handle {
  u64 magic;
  u64 nonce;
  u32 phys, unused;              /* device */
  u32 proc, pid;                 /* exporter; the pid is of its own namespace, and nobody reads it */
  u64 inc;
  u64 seq, size;                 /* number of the file, bytes */
  u64 check;
};
_Static_assert(sizeof(struct mem_handle) == 64, "layout");
#define MEM_MAGIC 0x4d454d4f52495043ull
