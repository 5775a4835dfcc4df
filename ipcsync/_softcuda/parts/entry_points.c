/* SPDX-License-Identifier: Apache-2.0 */
/* The look-up of entry points: cuGetProcAddress. */

#include "../names.h"

static CUresult unsupported(void) { return E_NOSUP; }

API cuGetProcAddress(const char *sym, void **pfn, int version, u64 flags);
API cuGetProcAddress_v2(const char *sym, void **pfn, int version, u64 flags, int *status);

struct entry { const char *name; int version; void *fn, *pt; };
static const struct entry g_entries[] = {
#define F(name, ver, fn) { #name, ver, (void *)fn, NULL },
#define Z(name, ver, fn) { #name, ver, (void *)fn, (void *)fn##_ptsz },
#define D(name, ver, fn) { #name, ver, (void *)fn, (void *)fn##_ptds },
  F(cuInit, 2000, cuInit) F(cuDriverGetVersion, 2020, cuDriverGetVersion)
  F(cuGetErrorName, 6000, cuGetErrorName) F(cuGetErrorString, 6000, cuGetErrorString)
  F(cuGetProcAddress, 11030, cuGetProcAddress) F(cuGetProcAddress, 12000, cuGetProcAddress_v2)
  F(cuDeviceGetCount, 2000, cuDeviceGetCount) F(cuDeviceGet, 2000, cuDeviceGet) F(cuDeviceGetName, 2000, cuDeviceGetName)
  F(cuDeviceGetUuid, 9020, cuDeviceGetUuid) F(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2)
  F(cuDeviceGetLuid, 10000, cuDeviceGetLuid) F(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2)
  F(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId) F(cuDeviceGetByPCIBusId, 4010, cuDeviceGetByPCIBusId)
  F(cuDeviceComputeCapability, 2000, cuDeviceComputeCapability) F(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute)
  F(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer) F(cuDeviceGetP2PAttribute, 8000, cuDeviceGetP2PAttribute)
  F(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain)
  F(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease_v2) F(cuDevicePrimaryCtxReset, 7000, cuDevicePrimaryCtxReset_v2)
  F(cuDevicePrimaryCtxSetFlags, 7000, cuDevicePrimaryCtxSetFlags_v2) F(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState)
  F(cuCtxCreate, 3020, cuCtxCreate_v2) F(cuCtxCreate, 11040, cuCtxCreate_v3) F(cuCtxCreate, 12050, cuCtxCreate_v4)
  F(cuCtxDestroy, 4000, cuCtxDestroy_v2) F(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2) F(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2)
  F(cuCtxSetCurrent, 4000, cuCtxSetCurrent) F(cuCtxGetCurrent, 4000, cuCtxGetCurrent)
  F(cuCtxGetDevice, 2000, cuCtxGetDevice) F(cuCtxGetDevice, 13000, cuCtxGetDevice_v2)
  F(cuCtxGetFlags, 7000, cuCtxGetFlags) F(cuCtxSetFlags, 12010, cuCtxSetFlags) F(cuCtxGetId, 12000, cuCtxGetId)
  F(cuCtxSynchronize, 2000, cuCtxSynchronize) F(cuCtxSynchronize, 13000, cuCtxSynchronize_v2)
  F(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange) F(cuCtxGetApiVersion, 3020, cuCtxGetApiVersion)
  F(cuCtxGetLimit, 3010, cuCtxGetLimit) F(cuCtxSetLimit, 3010, cuCtxSetLimit)
  F(cuCtxGetCacheConfig, 3020, cuCtxGetCacheConfig) F(cuCtxSetCacheConfig, 3020, cuCtxSetCacheConfig)
  F(cuCtxGetSharedMemConfig, 4020, cuCtxGetSharedMemConfig) F(cuCtxSetSharedMemConfig, 4020, cuCtxSetSharedMemConfig)
  F(cuCtxResetPersistingL2Cache, 11000, cuCtxResetPersistingL2Cache)
  F(cuCtxEnablePeerAccess, 4000, cuCtxEnablePeerAccess) F(cuCtxDisablePeerAccess, 4000, cuCtxDisablePeerAccess)
  F(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode)
  F(cuProfilerStart, 4000, cuProfilerStart) F(cuProfilerStop, 4000, cuProfilerStop)
  F(cuStreamCreate, 2000, cuStreamCreate) F(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority)
  F(cuStreamDestroy, 4000, cuStreamDestroy_v2) Z(cuStreamQuery, 2000, cuStreamQuery) Z(cuStreamSynchronize, 2000, cuStreamSynchronize)
  Z(cuStreamWaitEvent, 3020, cuStreamWaitEvent) Z(cuStreamGetPriority, 5050, cuStreamGetPriority) Z(cuStreamGetFlags, 5050, cuStreamGetFlags)
  Z(cuStreamGetId, 12000, cuStreamGetId) Z(cuStreamGetDevice, 12080, cuStreamGetDevice)
  Z(cuStreamGetCtx, 9020, cuStreamGetCtx) Z(cuStreamGetCtx, 12050, cuStreamGetCtx_v2) F(cuStreamGetGreenCtx, 12040, cuStreamGetGreenCtx)
  Z(cuStreamIsCapturing, 10000, cuStreamIsCapturing) Z(cuStreamGetCaptureInfo, 10010, cuStreamGetCaptureInfo)
  Z(cuStreamGetCaptureInfo, 11030, cuStreamGetCaptureInfo_v2) Z(cuStreamGetCaptureInfo, 12030, cuStreamGetCaptureInfo_v3)
  Z(cuStreamBeginCapture, 10000, cuStreamBeginCapture) Z(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2)
  Z(cuStreamBeginCaptureToGraph, 12030, cuStreamBeginCaptureToGraph) Z(cuStreamEndCapture, 10000, cuStreamEndCapture)
  Z(cuStreamUpdateCaptureDependencies, 11030, cuStreamUpdateCaptureDependencies)
  Z(cuStreamUpdateCaptureDependencies, 12030, cuStreamUpdateCaptureDependencies_v2)
  F(cuGraphCreate, 10000, cuGraphCreate) F(cuGraphDestroy, 10000, cuGraphDestroy)
  F(cuGraphAddEmptyNode, 10000, cuGraphAddEmptyNode) F(cuGraphAddHostNode, 10000, cuGraphAddHostNode)
  F(cuGraphAddMemsetNode, 10000, cuGraphAddMemsetNode) F(cuGraphAddChildGraphNode, 10000, cuGraphAddChildGraphNode)
  F(cuGraphAddEventRecordNode, 11010, cuGraphAddEventRecordNode) F(cuGraphAddEventWaitNode, 11010, cuGraphAddEventWaitNode)
  F(cuGraphAddBatchMemOpNode, 11070, cuGraphAddBatchMemOpNode)
  F(cuGraphGetNodes, 10000, cuGraphGetNodes) F(cuGraphGetRootNodes, 10000, cuGraphGetRootNodes)
  F(cuGraphGetEdges, 10000, cuGraphGetEdges) F(cuGraphGetEdges, 12030, cuGraphGetEdges_v2)
  F(cuGraphNodeGetDependencies, 10000, cuGraphNodeGetDependencies)
  F(cuGraphNodeGetDependencies, 12030, cuGraphNodeGetDependencies_v2)
  F(cuGraphNodeGetDependentNodes, 10000, cuGraphNodeGetDependentNodes)
  F(cuGraphNodeGetDependentNodes, 12030, cuGraphNodeGetDependentNodes_v2) F(cuGraphNodeGetType, 10000, cuGraphNodeGetType)
  F(cuGraphEventRecordNodeGetEvent, 11010, cuGraphEventRecordNodeGetEvent)
  F(cuGraphEventWaitNodeGetEvent, 11010, cuGraphEventWaitNodeGetEvent)
  F(cuUserObjectCreate, 11030, cuUserObjectCreate) F(cuUserObjectRetain, 11030, cuUserObjectRetain)
  F(cuUserObjectRelease, 11030, cuUserObjectRelease) F(cuGraphRetainUserObject, 11030, cuGraphRetainUserObject)
  F(cuGraphReleaseUserObject, 11030, cuGraphReleaseUserObject)
  F(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags) F(cuGraphInstantiate, 12000, cuGraphInstantiateWithFlags)
  Z(cuGraphInstantiateWithParams, 12000, cuGraphInstantiateWithParams) F(cuGraphExecGetFlags, 12000, cuGraphExecGetFlags)
  F(cuGraphExecUpdate, 12000, cuGraphExecUpdate_v2) F(cuGraphExecDestroy, 10000, cuGraphExecDestroy)
  Z(cuGraphLaunch, 10000, cuGraphLaunch) Z(cuGraphUpload, 11010, cuGraphUpload)
  Z(cuStreamCopyAttributes, 11000, cuStreamCopyAttributes) Z(cuStreamAddCallback, 5000, cuStreamAddCallback)
  Z(cuLaunchHostFunc, 10000, cuLaunchHostFunc) Z(cuLaunchHostFunc, 13020, cuLaunchHostFunc_v2)
  Z(cuStreamWriteValue32, 11070, cuStreamWriteValue32_v2) Z(cuStreamWriteValue64, 11070, cuStreamWriteValue64_v2)
  Z(cuStreamBatchMemOp, 11070, cuStreamBatchMemOp_v2)
  Z(cuStreamWaitValue32, 11070, cuStreamWaitValue32_v2) Z(cuStreamWaitValue64, 11070, cuStreamWaitValue64_v2)
  F(cuEventCreate, 2000, cuEventCreate) F(cuEventDestroy, 4000, cuEventDestroy_v2) Z(cuEventRecord, 2000, cuEventRecord)
  F(cuCtxRecordEvent, 12050, cuCtxRecordEvent)
  Z(cuEventRecordWithFlags, 11010, cuEventRecordWithFlags) F(cuEventQuery, 2000, cuEventQuery) F(cuEventSynchronize, 2000, cuEventSynchronize)
  F(cuEventElapsedTime, 2000, cuEventElapsedTime) F(cuEventElapsedTime, 12080, cuEventElapsedTime_v2)
  F(cuIpcGetEventHandle, 4010, cuIpcGetEventHandle) F(cuIpcOpenEventHandle, 4010, cuIpcOpenEventHandle)
  F(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle) F(cuIpcOpenMemHandle, 4010, cuIpcOpenMemHandle)
  F(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2) F(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle)
  F(cuMemAlloc, 3020, cuMemAlloc_v2) F(cuMemAllocPitch, 3020, cuMemAllocPitch_v2) F(cuMemFree, 3020, cuMemFree_v2)
  F(cuMemGetInfo, 3020, cuMemGetInfo_v2) F(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2)
  F(cuMemAllocHost, 3020, cuMemAllocHost_v2) F(cuMemHostAlloc, 2020, cuMemHostAlloc) F(cuMemFreeHost, 2000, cuMemFreeHost)
  F(cuMemHostRegister, 6050, cuMemHostRegister_v2) F(cuMemHostUnregister, 4000, cuMemHostUnregister)
  F(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2) F(cuMemHostGetFlags, 2030, cuMemHostGetFlags)
  F(cuPointerGetAttribute, 4000, cuPointerGetAttribute) F(cuPointerGetAttributes, 7000, cuPointerGetAttributes)
  D(cuMemcpy, 4000, cuMemcpy) D(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2) D(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2)
  D(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2) D(cuMemcpyPeer, 4000, cuMemcpyPeer) Z(cuMemcpyAsync, 4000, cuMemcpyAsync)
  Z(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2) Z(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2)
  Z(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2) Z(cuMemcpyPeerAsync, 4000, cuMemcpyPeerAsync)
  D(cuMemsetD8, 3020, cuMemsetD8_v2) D(cuMemsetD16, 3020, cuMemsetD16_v2) D(cuMemsetD32, 3020, cuMemsetD32_v2)
  Z(cuMemsetD8Async, 3020, cuMemsetD8Async) Z(cuMemsetD16Async, 3020, cuMemsetD16Async) Z(cuMemsetD32Async, 3020, cuMemsetD32Async)
#define X(n) { #n, 0, (void *)unsupported, NULL },
  OTHER_NAMES(X)
#undef X
};

static CUresult lookup(const char *sym, void **pfn, int version, u64 flags, int *status) {
  if (!sym || !pfn || flags > 3) return E_VALUE;
  load_version();
  *pfn = NULL;
  if (status) *status = 1; /* symbol not found */
  if (version > g_version) return E_VALUE;
  const struct entry *best = NULL;
  for (size_t i = 0; i < sizeof g_entries / sizeof *g_entries; i++) {
    const struct entry *e = &g_entries[i];
    if (strcmp(e->name, sym)) continue;
    if (e->version > version) { if (status && !best) *status = 2; continue; }
    if (!best || e->version >= best->version) best = e;
  }
  if (!best) return OK;
  if (status) *status = 0;
  *pfn = (flags & 2) && best->pt ? best->pt : best->fn;
  return OK;
}
API cuGetProcAddress_v2(const char *sym, void **pfn, int version, u64 flags, int *status) {
  return lookup(sym, pfn, version, flags, status);
}
API cuGetProcAddress(const char *sym, void **pfn, int version, u64 flags) {
  int st;
  CUresult r = lookup(sym, pfn, version, flags, &st);
  return r ? r : st ? E_NOTFOUND : OK;
}
