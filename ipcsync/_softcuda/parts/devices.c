/* SPDX-License-Identifier: Apache-2.0 */
/* Errors, versions and devices. */

#define ERRORS(X) \
  X(SUCCESS, 0, "no error") X(ERROR_INVALID_VALUE, 1, "invalid argument") \
  X(ERROR_OUT_OF_MEMORY, 2, "out of memory") X(ERROR_NOT_INITIALIZED, 3, "initialization error") \
  X(ERROR_DEINITIALIZED, 4, "driver shutting down") X(ERROR_PROFILER_DISABLED, 5, 0) \
  X(ERROR_PROFILER_NOT_INITIALIZED, 6, 0) X(ERROR_PROFILER_ALREADY_STARTED, 7, 0) \
  X(ERROR_PROFILER_ALREADY_STOPPED, 8, 0) X(ERROR_STUB_LIBRARY, 34, 0) \
  X(ERROR_CALL_REQUIRES_NEWER_DRIVER, 36, 0) X(ERROR_DEVICE_UNAVAILABLE, 46, 0) \
  X(ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected") \
  X(ERROR_INVALID_DEVICE, 101, "invalid device ordinal") X(ERROR_DEVICE_NOT_LICENSED, 102, 0) \
  X(ERROR_INVALID_IMAGE, 200, "device kernel image is invalid") \
  X(ERROR_INVALID_CONTEXT, 201, "invalid device context") X(ERROR_CONTEXT_ALREADY_CURRENT, 202, 0) \
  X(ERROR_MAP_FAILED, 205, "mapping of buffer object failed") \
  X(ERROR_UNMAP_FAILED, 206, "unmapping of buffer object failed") X(ERROR_ARRAY_IS_MAPPED, 207, 0) \
  X(ERROR_ALREADY_MAPPED, 208, 0) X(ERROR_NO_BINARY_FOR_GPU, 209, 0) X(ERROR_ALREADY_ACQUIRED, 210, 0) \
  X(ERROR_NOT_MAPPED, 211, 0) X(ERROR_NOT_MAPPED_AS_ARRAY, 212, 0) X(ERROR_NOT_MAPPED_AS_POINTER, 213, 0) \
  X(ERROR_ECC_UNCORRECTABLE, 214, 0) X(ERROR_UNSUPPORTED_LIMIT, 215, "limit is not supported on this architecture") \
  X(ERROR_CONTEXT_ALREADY_IN_USE, 216, 0) X(ERROR_PEER_ACCESS_UNSUPPORTED, 217, "peer access is not supported between these two devices") \
  X(ERROR_INVALID_PTX, 218, 0) X(ERROR_INVALID_GRAPHICS_CONTEXT, 219, 0) X(ERROR_NVLINK_UNCORRECTABLE, 220, 0) \
  X(ERROR_JIT_COMPILER_NOT_FOUND, 221, 0) X(ERROR_UNSUPPORTED_PTX_VERSION, 222, 0) \
  X(ERROR_JIT_COMPILATION_DISABLED, 223, 0) X(ERROR_UNSUPPORTED_EXEC_AFFINITY, 224, 0) \
  X(ERROR_UNSUPPORTED_DEVSIDE_SYNC, 225, 0) X(ERROR_CONTAINED, 226, 0) X(ERROR_INVALID_SOURCE, 300, 0) \
  X(ERROR_FILE_NOT_FOUND, 301, 0) X(ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND, 302, 0) \
  X(ERROR_SHARED_OBJECT_INIT_FAILED, 303, 0) X(ERROR_OPERATING_SYSTEM, 304, "OS call failed or operation not supported on this OS") \
  X(ERROR_INVALID_HANDLE, 400, "invalid resource handle") \
  X(ERROR_ILLEGAL_STATE, 401, "the operation cannot be performed in the present state") X(ERROR_LOSSY_QUERY, 402, 0) \
  X(ERROR_NOT_FOUND, 500, "named symbol not found") X(ERROR_NOT_READY, 600, "device not ready") \
  X(ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered") \
  X(ERROR_LAUNCH_OUT_OF_RESOURCES, 701, 0) X(ERROR_LAUNCH_TIMEOUT, 702, 0) \
  X(ERROR_LAUNCH_INCOMPATIBLE_TEXTURING, 703, 0) X(ERROR_PEER_ACCESS_ALREADY_ENABLED, 704, "peer access is already enabled") \
  X(ERROR_PEER_ACCESS_NOT_ENABLED, 705, "peer access has not been enabled") X(ERROR_PRIMARY_CONTEXT_ACTIVE, 708, 0) \
  X(ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed") X(ERROR_ASSERT, 710, 0) X(ERROR_TOO_MANY_PEERS, 711, 0) \
  X(ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712, "part or all of the requested memory range is already mapped") \
  X(ERROR_HOST_MEMORY_NOT_REGISTERED, 713, "pointer does not correspond to a registered memory region") \
  X(ERROR_HARDWARE_STACK_ERROR, 714, 0) X(ERROR_ILLEGAL_INSTRUCTION, 715, 0) X(ERROR_MISALIGNED_ADDRESS, 716, 0) \
  X(ERROR_INVALID_ADDRESS_SPACE, 717, 0) X(ERROR_INVALID_PC, 718, 0) X(ERROR_LAUNCH_FAILED, 719, 0) \
  X(ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, 720, 0) X(ERROR_TENSOR_MEMORY_LEAK, 721, 0) \
  X(ERROR_NOT_PERMITTED, 800, "operation not permitted") X(ERROR_NOT_SUPPORTED, 801, "operation not supported") \
  X(ERROR_SYSTEM_NOT_READY, 802, 0) X(ERROR_SYSTEM_DRIVER_MISMATCH, 803, 0) \
  X(ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, 804, 0) X(ERROR_MPS_CONNECTION_FAILED, 805, 0) X(ERROR_MPS_RPC_FAILURE, 806, 0) \
  X(ERROR_MPS_SERVER_NOT_READY, 807, 0) X(ERROR_MPS_MAX_CLIENTS_REACHED, 808, 0) \
  X(ERROR_MPS_MAX_CONNECTIONS_REACHED, 809, 0) X(ERROR_MPS_CLIENT_TERMINATED, 810, 0) X(ERROR_CDP_NOT_SUPPORTED, 811, 0) \
  X(ERROR_CDP_VERSION_MISMATCH, 812, 0) \
  X(ERROR_STREAM_CAPTURE_UNSUPPORTED, 900, "operation not permitted when stream is capturing") \
  X(ERROR_STREAM_CAPTURE_INVALIDATED, 901, "operation failed due to a previous error during capture") \
  X(ERROR_STREAM_CAPTURE_MERGE, 902, "operation would result in a merge of separate capture sequences") \
  X(ERROR_STREAM_CAPTURE_UNMATCHED, 903, "capture was not ended in the same stream as it began") \
  X(ERROR_STREAM_CAPTURE_UNJOINED, 904, 0) \
  X(ERROR_STREAM_CAPTURE_ISOLATION, 905, "dependency created on uncaptured work in another stream") \
  X(ERROR_STREAM_CAPTURE_IMPLICIT, 906, "operation would make the legacy stream depend on a capturing blocking stream") \
  X(ERROR_CAPTURED_EVENT, 907, "operation not permitted on an event last recorded in a capturing stream") \
  X(ERROR_STREAM_CAPTURE_WRONG_THREAD, 908, "attempt to terminate a thread-local capture sequence from another thread") \
  X(ERROR_TIMEOUT, 909, 0) X(ERROR_GRAPH_EXEC_UPDATE_FAILURE, 910, 0) \
  X(ERROR_EXTERNAL_DEVICE, 911, 0) X(ERROR_INVALID_CLUSTER_SIZE, 912, 0) X(ERROR_FUNCTION_NOT_LOADED, 913, 0) \
  X(ERROR_INVALID_RESOURCE_TYPE, 914, 0) X(ERROR_INVALID_RESOURCE_CONFIGURATION, 915, 0) \
  X(ERROR_KEY_ROTATION, 916, 0) X(ERROR_UNKNOWN, 999, "unknown error")

API cuGetErrorName(CUresult e, const char **s) {
  if (!s) return E_VALUE;
  switch (e) {
#define X(n, v, t) case v: *s = "CUDA_" #n; return OK;
  ERRORS(X)
#undef X
  }
  *s = NULL;
  return E_VALUE;
}
API cuGetErrorString(CUresult e, const char **s) {
  if (!s) return E_VALUE;
  switch (e) {
#define X(n, v, t) case v: { static const char *const m = t; *s = m ? m : "CUDA_" #n; return OK; }
  ERRORS(X)
#undef X
  }
  *s = NULL;
  return E_VALUE;
}
static void load_version(void) { /* bindings look functions up before they call cuInit, which says if it means nothing */
  static _Atomic int once;
  if (!atomic_exchange(&once, 1)) env_version();
}
static _Atomic unsigned g_asked;
/* How often the version was asked: so the loader sees that the binding calls this library.  Not part of CUDA. */
__attribute__((visibility("default"))) unsigned ipcsync_softcuda_asked(void) { return atomic_load(&g_asked); }
API cuDriverGetVersion(int *v) {
  atomic_fetch_add(&g_asked, 1);
  if (!v) return E_VALUE;
  load_version();
  *v = g_version;
  return OK;
}

#define DEVCHK(d) do { CHK(); if ((d) < 0 || (d) >= g_ndev) return E_DEVICE; } while (0)
API cuDeviceGetCount(int *n) { CHK(); if (!n) return E_VALUE; *n = g_ndev; return OK; }
API cuDeviceGet(CUdevice *d, int i) { CHK(); if (!d) return E_VALUE; if (i < 0 || i >= g_ndev) return E_DEVICE; *d = i; return OK; }
API cuDeviceGetName(char *s, int n, CUdevice d) {
  DEVCHK(d);
  if (!s || n <= 0) return E_VALUE;
  snprintf(s, (size_t)n, "softcuda (no GPU) #%d", g_dev[d]);
  return OK;
}
API cuDeviceGetUuid(CUuuid *u, CUdevice d) { DEVCHK(d); if (!u) return E_VALUE; dev_uuid(g_dev[d], (unsigned char *)u->bytes); return OK; }
API cuDeviceGetUuid_v2(CUuuid *u, CUdevice d) { return cuDeviceGetUuid(u, d); }
API cuDeviceGetLuid(char *l, unsigned *m, CUdevice d) { DEVCHK(d); (void)l; (void)m; return E_NOSUP; }
API cuDeviceTotalMem_v2(size_t *n, CUdevice d) { DEVCHK(d); if (!n) return E_VALUE; *n = g_total_mem; return OK; }
API cuDeviceGetPCIBusId(char *s, int n, CUdevice d) {
  DEVCHK(d);
  if (!s || n < 13) return E_VALUE;
  snprintf(s, (size_t)n, "0000:%02X:00.0", 0x10 + g_dev[d]);
  return OK;
}
API cuDeviceGetByPCIBusId(CUdevice *d, const char *s) {
  CHK();
  unsigned a, b, c = 0, f = 0;
  if (!d || !s) return E_VALUE;
  if (sscanf(s, "%x:%x:%x.%x", &a, &b, &c, &f) < 3) {
    a = 0;
    if (sscanf(s, "%x:%x.%x", &b, &c, &f) < 2) return E_VALUE;
  }
  for (int i = 0; i < g_ndev; i++)
    if (!a && !c && !f && (int)b == 0x10 + g_dev[i]) { *d = i; return OK; }
  return E_DEVICE;
}
API cuDeviceComputeCapability(int *ma, int *mi, CUdevice d) { DEVCHK(d); if (!ma || !mi) return E_VALUE; *ma = 9; *mi = 0; return OK; }
API cuDeviceCanAccessPeer(int *r, CUdevice a, CUdevice b) {
  DEVCHK(a); DEVCHK(b);
  if (!r) return E_VALUE;
  *r = a != b;
  return OK;
}
API cuDeviceGetP2PAttribute(int *r, int at, CUdevice a, CUdevice b) {
  DEVCHK(a); DEVCHK(b);
  if (!r || a == b || at < 1 || at > 5) return E_VALUE;
  *r = at != 1;
  return OK;
}
API cuDeviceGetAttribute(int *r, int at, CUdevice d) {
  DEVCHK(d);
  static const struct { short at; int v; } tab[] = { /* what an H100 says, less what is not simulated */
    {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {9, 65536},
    {10, 32}, {11, 2147483647}, {12, 65536}, {13, 1980000}, {14, 512}, {15, 1}, {16, 132}, {19, 1},
    {21, 131072}, {22, 131072}, {23, 65536}, {24, 16384}, {25, 16384}, {26, 16384}, {27, 32768}, {28, 32768},
    {29, 2048}, {30, 512}, {31, 1}, {32, 1}, {36, 2619000}, {37, 5120}, {38, 52428800}, {39, 2048}, {40, 3},
    {41, 1}, {42, 32768}, {43, 2048}, {45, 32768}, {46, 32768}, {47, 8192}, {48, 8192}, {49, 32768}, {51, 32},
    {52, 32768}, {53, 32768}, {54, 2046}, {55, 32768}, {56, 131072}, {57, 65536}, {58, 16384}, {59, 16384},
    {60, 16384}, {61, 32768}, {62, 2048}, {63, 32768}, {64, 32768}, {65, 2048}, {66, 32768}, {67, 32768},
    {68, 2046}, {69, 268435456}, {70, 131072}, {71, 65000}, {72, 2097120}, {73, 32768}, {74, 32768}, {75, 9},
    {76, 0}, {77, 32768}, {78, 1}, {79, 1}, {80, 1}, {81, 233472}, {82, 65536}, {87, 2}, {90, 1}, {91, 1},
    {92, 0}, {93, 1}, {94, 1}, {97, 232448}, {98, 0}, {99, 1}, {106, 32}, {111, 1024}, {122, 1}, {123, 1},
    {125, 1}, {130, 0}, {131, -1}, {134, 0},
  };
  if (!r || at < 1 || at > 170) return E_VALUE;
  *r = 0;
  if (at == 33) *r = 0x10 + g_dev[d];
  if (at == 133) *r = g_mps;     /* MPS_ENABLED */
  for (size_t i = 0; i < sizeof tab / sizeof *tab; i++) if (tab[i].at == at) *r = tab[i].v;
  return OK;
}
