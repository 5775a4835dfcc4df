"""The CUDA driver API for machines with no GPU: real semantics across processes, over shared memory; no kernels.

Functions have the names, parameters and `(CUresult, value…)` results of `cuda.bindings.driver`, whose enums and structs
are used. Handles are small integers in the binding's classes. Every process of one segment (IPCSYNC_HOST_SEGMENT) can
open the others' handles. There is no server: the shared state is in one file that survives a kill at any instruction,
see `layout`.

Where CUDA leaves behaviour undefined, this driver does the strictest: the records that a dead process left pending stay
so for ever, and an import whose exporter destroyed it, ended or died is an invalid handle.
"""

from __future__ import annotations

from cuda.bindings.driver import (
    CUcontext,
    CUdevice,
    CUdevice_attribute,
    CUdeviceptr,
    CUevent,
    CUevent_flags,
    CUevent_record_flags,
    CUevent_wait_flags,
    CUgraph,
    CUhostFn,
    CUipcEventHandle,
    CUipcMem_flags,
    CUipcMemHandle,
    CUmemorytype,
    CUpointer_attribute,
    CUresult,
    CUstream,
    CUstream_flags,
    CUstreamCaptureMode,
    CUstreamCaptureStatus,
    CUstreamWaitValue_flags,
    CUstreamWriteValue_flags,
    CUuuid,
    cuuint32_t,
    cuuint64_t,
)

from ipcsync._drivers.host.capture_calls import (
    cuGraphDestroy,
    cuStreamBeginCapture,
    cuStreamEndCapture,
    cuStreamGetCaptureInfo,
    cuStreamIsCapturing,
    cuThreadExchangeStreamCaptureMode,
)
from ipcsync._drivers.host.context import (
    cuCtxGetCurrent,
    cuCtxGetDevice,
    cuCtxGetStreamPriorityRange,
    cuCtxPopCurrent,
    cuCtxPushCurrent,
    cuCtxSetCurrent,
    cuDevicePrimaryCtxGetState,
    cuDevicePrimaryCtxRelease,
    cuDevicePrimaryCtxRetain,
    cuMemGetInfo,
)
from ipcsync._drivers.host.device import (
    cuDeviceCanAccessPeer,
    cuDeviceGet,
    cuDeviceGetAttribute,
    cuDeviceGetCount,
    cuDeviceGetName,
    cuDeviceGetUuid,
    cuDeviceTotalMem,
)
from ipcsync._drivers.host.event import (
    cuCtxRecordEvent,
    cuEventCreate,
    cuEventDestroy,
    cuEventElapsedTime,
    cuEventQuery,
    cuEventRecord,
    cuEventRecordWithFlags,
    cuEventSynchronize,
    cuStreamWaitEvent,
    wait_event,
)
from ipcsync._drivers.host.init import (
    cuDriverGetVersion,
    cuGetErrorName,
    cuGetErrorString,
    cuInit,
)
from ipcsync._drivers.host.ipc import (
    cuIpcGetEventHandle,
    cuIpcOpenEventHandle,
)
from ipcsync._drivers.host.memcpy import (
    cuMemcpyAsync,
    cuMemcpyDtoD,
    cuMemcpyDtoDAsync,
    cuMemcpyDtoH,
    cuMemcpyDtoHAsync,
    cuMemcpyHtoD,
    cuMemcpyHtoDAsync,
    cuMemsetD8,
    cuMemsetD8Async,
    cuMemsetD32,
    cuMemsetD32Async,
)
from ipcsync._drivers.host.memops import (
    cuStreamWaitValue32,
    cuStreamWaitValue64,
    cuStreamWriteValue32,
    cuStreamWriteValue64,
)
from ipcsync._drivers.host.memory import (
    cuIpcCloseMemHandle,
    cuIpcGetMemHandle,
    cuIpcOpenMemHandle,
    cuMemAlloc,
    cuMemAllocHost,
    cuMemFree,
    cuMemFreeHost,
    cuMemHostAlloc,
    cuMemHostGetDevicePointer,
    cuMemHostRegister,
    cuMemHostUnregister,
    cuPointerGetAttribute,
)
from ipcsync._drivers.host.stream_calls import (
    cuCtxSynchronize,
    cuLaunchHostFunc,
    cuStreamCreate,
    cuStreamCreateWithPriority,
    cuStreamDestroy,
    cuStreamGetCtx,
    cuStreamGetDevice,
    cuStreamGetFlags,
    cuStreamGetId,
    cuStreamGetPriority,
    cuStreamQuery,
    cuStreamSynchronize,
)

__all__ = [name for name in dir() if name.startswith(("cu", "CU"))] + ["wait_event"]
