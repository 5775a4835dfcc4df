/* SPDX-License-Identifier: Apache-2.0 */
/* softcuda - a stand-in for libcuda.so.1 that needs no GPU.  See README.md.
 *
 * Contexts, streams, events, IPC handles and plain memory of the CUDA driver API, with the
 * semantics that programs of several processes see, and graphs of what streams can do.  No kernels, no modules.
 */
#define _GNU_SOURCE
#include "types.h"

/* The parts are one unit, so that their helpers are static and the compiler sees all of them; each may use what is
 * above it. */
#include "parts/state.c"
#include "parts/profile.c"
#include "parts/liveness.c"
#include "parts/event_slots.c"
#include "parts/objects.c"
#include "parts/allocations.c"
#include "parts/nodes.c"
#include "parts/capture.c"
#include "parts/queues.c"
#include "parts/words.c"
#include "parts/under_way.c"
#include "parts/work.c"
#include "parts/launch.c"
#include "parts/start.c"
#include "parts/devices.c"
#include "parts/contexts.c"
#include "parts/streams.c"
#include "parts/events.c"
#include "parts/ipc.c"
#include "parts/memory.c"
#include "parts/graphs.c"
#include "parts/entry_points.c"
