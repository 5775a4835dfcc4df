/* SPDX-License-Identifier: Apache-2.0 */
/* NVIDIA H100 80GB HBM3, driver 580.159.04 (CUDA 13.0), a virtual machine with 16 cores, 2026-11-26.
 *
 * From medians of tests/gpu/costs.c and of its like in Python, on an otherwise idle machine.  Nanoseconds.  What a call
 * costs was measured in bursts of 100; of graphs, on other such machines a day later, whose calls take 1.2 to 1.5 times
 * as long: these are their figures divided by 1.3.  What happens on the GPU cannot be measured one by one: these are numbers that
 * together give the latencies in the comments, which are what `python -m tests.gpu.profile_check` holds. */
static const struct profile H100 = {
  .name = "h100",
  .call = {
    .record = { [PLAIN] = 136, [TIMING] = 890, [IPC] = 794, [IMPORTED] = 1034 },
    .wait = { [PLAIN] = 112, [TIMING] = 112, [IPC] = 724, [IMPORTED] = 895 }, /* timing: not measured */
    .query = { [PLAIN] = 761, [TIMING] = 761 }, /* interprocess: 20 to 37, as here without a pause */
    .write_word = 854, .wait_word = 855, .batch_entry = 41, .query_stream = 1954,
    .graph = 2000, .graph_part = 1300, /* 80 kernels 3800 there; with a wait each 186000, with a write too 279000 */
    .create = 900, .export = 1700, .open = 500, .close = 500,
  },
  .launch = 2400,                /* idle stream, plain record -> query says so: 3555, of which a query and a half at 761 */
  .gpu = {
    /* until the stream goes on, until others see it */
    [GPU_RECORD_PLAIN] = { 20, 40 },       /* hop between streams of a process: 90 */
    [GPU_RECORD_TIMING] = { 1200, 1450 },  /* hop: 1566 */
    [GPU_RECORD_IPC] = { 1200, 3500 },     /* hop: 3767; idle stream -> query: 6315, another process's: 5342 */
    [GPU_WAIT_PLAIN] = { 40, 40 },
    [GPU_WAIT_IPC] = { 250, 250 },
    [GPU_WRITE_HOST] = { 1600, 1500 },     /* idle stream -> the CPU sees it: 5564, another process's: 4303 */
    [GPU_WRITE_DEVICE] = { 1200, 1000 },
    [GPU_WORD_HOST] = { 2000, 1800 },      /* a wait that need not wait: write and wait on one stream 3612; */
    [GPU_WORD_DEVICE] = { 1800, 1350 },    /* on device memory 3007. One that waited: hops 3145 and 2270 */
  },
  .cross_host = 2750, .cross_device = 2290, /* hops of two processes' streams: 5892 and 4559 */
  .turn = 134000,                /* hand-over by interprocess events in turn: 141000 to 160000; under MPS 7000 to 9000 */
  .late_blocking = 77000,        /* blocking cuEventSynchronize for work of milliseconds: 81848 to 88000 */
  .late_spinning = 17000,        /* spinning: 17000 to 34000 */
  .patience = 50000,             /* what is over sooner is seen at once: 4152 blocking, 4628 spinning */
};
