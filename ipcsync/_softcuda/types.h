/* SPDX-License-Identifier: Apache-2.0 */
/* The types and results of the CUDA driver API, as far as softcuda has them, and what all its parts include. */
#pragma once
#include "shm.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext, *CUstream, *CUevent;
typedef unsigned long long CUdeviceptr;
typedef void (*CUhostFn)(void *);
typedef void (*CUstreamCallback)(CUstream, CUresult, void *);
typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcEventHandle;
typedef struct { char reserved[64]; } CUipcMemHandle;

#define API __attribute__((visibility("default"))) CUresult
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

enum {
  OK = 0, E_VALUE = 1, E_OOM = 2, E_NOTINIT = 3, E_DEINIT = 4, E_NODEV = 100, E_DEVICE = 101,
  E_CTX = 201, E_MAP = 205, E_LIMIT = 215, E_OS = 304, E_HANDLE = 400, E_STATE = 401,
  E_NOTFOUND = 500, E_NOTREADY = 600, E_PEER_ON = 704, E_PEER_OFF = 705, E_CTXDEAD = 709,
  E_REGISTERED = 712, E_NOTREGISTERED = 713, E_NOSUP = 801,
  E_CAP_UNSUPPORTED = 900, E_CAP_INVALIDATED = 901, E_CAP_MERGE = 902, E_CAP_UNMATCHED = 903, E_CAP_UNJOINED = 904,
  E_CAP_ISOLATION = 905, E_CAP_IMPLICIT = 906, E_CAP_THREAD = 908, E_GRAPH_UPDATE = 910
};
