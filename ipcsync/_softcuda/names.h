/* SPDX-License-Identifier: Apache-2.0 */
/* Names of the driver API that softcuda knows but does not simulate: a look-up finds a function that returns
 * CUDA_ERROR_NOT_SUPPORTED. */
#define OTHER_NAMES(X) \
  X(cuArray3DCreate) X(cuArray3DGetDescriptor) X(cuArrayCreate) X(cuArrayDestroy) X(cuArrayGetDescriptor) \
  X(cuArrayGetMemoryRequirements) X(cuArrayGetPlane) X(cuArrayGetSparseProperties) \
  X(cuCheckpointOperationComplete) X(cuCheckpointProcessCheckpoint) \
  X(cuCheckpointProcessGetRestoreThreadId) X(cuCheckpointProcessGetState) X(cuCheckpointProcessLock) \
  X(cuCheckpointProcessRestore) X(cuCheckpointProcessUnlock) X(cuCoredumpDeregisterCompleteCallback) \
  X(cuCoredumpDeregisterStartCallback) X(cuCoredumpGetAttribute) X(cuCoredumpGetAttributeGlobal) \
  X(cuCoredumpRegisterCompleteCallback) X(cuCoredumpRegisterStartCallback) X(cuCoredumpSetAttribute) \
  X(cuCoredumpSetAttributeGlobal) X(cuCtxAttach) X(cuCtxDetach) X(cuCtxFromGreenCtx) X(cuCtxGetDevResource) \
  X(cuCtxGetExecAffinity) X(cuCtxWaitEvent) X(cuDestroyExternalMemory) \
  X(cuDestroyExternalSemaphore) X(cuDevResourceGenerateDesc) X(cuDevSmResourceSplit) \
  X(cuDevSmResourceSplitByCount) X(cuDeviceGetCliqueCount) X(cuDeviceGetCliqueInfo) \
  X(cuDeviceGetDefaultMemPool) X(cuDeviceGetDevResource) X(cuDeviceGetExecAffinitySupport) \
  X(cuDeviceGetFabricClusterUuid) X(cuDeviceGetGraphMemAttribute) X(cuDeviceGetHostAtomicCapabilities) \
  X(cuDeviceGetMemPool) X(cuDeviceGetNvSciSyncAttributes) X(cuDeviceGetP2PAtomicCapabilities) \
  X(cuDeviceGetProperties) X(cuDeviceGetTexture1DLinearMaxWidth) X(cuDeviceGraphMemTrim) \
  X(cuDeviceRegisterAsyncNotification) X(cuDeviceSetGraphMemAttribute) X(cuDeviceSetMemPool) \
  X(cuDeviceUnregisterAsyncNotification) X(cuEGLStreamConsumerAcquireFrame) X(cuEGLStreamConsumerConnect) \
  X(cuEGLStreamConsumerConnectWithFlags) X(cuEGLStreamConsumerDisconnect) \
  X(cuEGLStreamConsumerReleaseFrame) X(cuEGLStreamProducerConnect) X(cuEGLStreamProducerDisconnect) \
  X(cuEGLStreamProducerPresentFrame) X(cuEGLStreamProducerReturnFrame) X(cuEventCreateFromEGLSync) \
  X(cuExternalMemoryGetMappedBuffer) X(cuExternalMemoryGetMappedMipmappedArray) \
  X(cuFlushGPUDirectRDMAWrites) X(cuFuncGetAttribute) X(cuFuncGetModule) X(cuFuncGetName) \
  X(cuFuncGetParamCount) X(cuFuncGetParamInfo) X(cuFuncIsLoaded) X(cuFuncLoad) X(cuFuncSetAttribute) \
  X(cuFuncSetBlockShape) X(cuFuncSetCacheConfig) X(cuFuncSetSharedMemConfig) X(cuFuncSetSharedSize) \
  X(cuGLCtxCreate) X(cuGLGetDevices) X(cuGLInit) X(cuGLMapBufferObject) X(cuGLMapBufferObjectAsync) \
  X(cuGLRegisterBufferObject) X(cuGLSetBufferObjectMapFlags) X(cuGLUnmapBufferObject) \
  X(cuGLUnmapBufferObjectAsync) X(cuGLUnregisterBufferObject) X(cuGetExportTable) \
  X(cuGraphAddDependencies) \
  X(cuGraphAddExternalSemaphoresSignalNode) \
  X(cuGraphAddExternalSemaphoresWaitNode) X(cuGraphAddKernelNode) \
  X(cuGraphAddMemAllocNode) X(cuGraphAddMemFreeNode) X(cuGraphAddMemcpyNode) \
  X(cuGraphAddNode) X(cuGraphBatchMemOpNodeGetParams) X(cuGraphBatchMemOpNodeSetParams) \
  X(cuGraphChildGraphNodeGetGraph) X(cuGraphClone) X(cuGraphConditionalHandleCreate) \
  X(cuGraphDebugDotPrint) X(cuGraphDestroyNode) \
  X(cuGraphEventRecordNodeSetEvent) X(cuGraphEventWaitNodeSetEvent) \
  X(cuGraphExecBatchMemOpNodeSetParams) X(cuGraphExecChildGraphNodeSetParams) \
  X(cuGraphExecEventRecordNodeSetEvent) X(cuGraphExecEventWaitNodeSetEvent) \
  X(cuGraphExecExternalSemaphoresSignalNodeSetParams) X(cuGraphExecExternalSemaphoresWaitNodeSetParams) \
  X(cuGraphExecGetId) X(cuGraphExecHostNodeSetParams) \
  X(cuGraphExecKernelNodeSetParams) X(cuGraphExecMemcpyNodeSetParams) X(cuGraphExecMemsetNodeSetParams) \
  X(cuGraphExecNodeSetParams) X(cuGraphExternalSemaphoresSignalNodeGetParams) \
  X(cuGraphExternalSemaphoresSignalNodeSetParams) X(cuGraphExternalSemaphoresWaitNodeGetParams) \
  X(cuGraphExternalSemaphoresWaitNodeSetParams) X(cuGraphGetId) \
  X(cuGraphHostNodeGetParams) X(cuGraphHostNodeSetParams) \
  X(cuGraphKernelNodeCopyAttributes) \
  X(cuGraphKernelNodeGetAttribute) X(cuGraphKernelNodeGetParams) X(cuGraphKernelNodeSetAttribute) \
  X(cuGraphKernelNodeSetParams) X(cuGraphMemAllocNodeGetParams) \
  X(cuGraphMemFreeNodeGetParams) X(cuGraphMemcpyNodeGetParams) X(cuGraphMemcpyNodeSetParams) \
  X(cuGraphMemsetNodeGetParams) X(cuGraphMemsetNodeSetParams) X(cuGraphNodeFindInClone) \
  X(cuGraphNodeGetContainingGraph) \
  X(cuGraphNodeGetEnabled) X(cuGraphNodeGetLocalId) X(cuGraphNodeGetParams) X(cuGraphNodeGetToolsId) \
  X(cuGraphNodeSetEnabled) X(cuGraphNodeSetParams) \
  X(cuGraphRemoveDependencies) X(cuGraphicsEGLRegisterImage) \
  X(cuGraphicsGLRegisterBuffer) X(cuGraphicsGLRegisterImage) X(cuGraphicsMapResources) \
  X(cuGraphicsResourceGetMappedEglFrame) X(cuGraphicsResourceGetMappedMipmappedArray) \
  X(cuGraphicsResourceGetMappedPointer) X(cuGraphicsResourceSetMapFlags) \
  X(cuGraphicsSubResourceGetMappedArray) X(cuGraphicsUnmapResources) X(cuGraphicsUnregisterResource) \
  X(cuGraphicsVDPAURegisterOutputSurface) X(cuGraphicsVDPAURegisterVideoSurface) X(cuGreenCtxCreate) \
  X(cuGreenCtxDestroy) X(cuGreenCtxGetDevResource) X(cuGreenCtxGetId) X(cuGreenCtxRecordEvent) \
  X(cuGreenCtxStreamCreate) X(cuGreenCtxWaitEvent) X(cuImportExternalMemory) X(cuImportExternalSemaphore) \
  X(cuKernelGetAttribute) X(cuKernelGetFunction) X(cuKernelGetLibrary) X(cuKernelGetName) \
  X(cuKernelGetParamCount) X(cuKernelGetParamInfo) X(cuKernelSetAttribute) X(cuKernelSetCacheConfig) \
  X(cuLaunch) X(cuLaunchCooperativeKernel) X(cuLaunchCooperativeKernelMultiDevice) X(cuLaunchGrid) \
  X(cuLaunchGridAsync) X(cuLaunchKernel) X(cuLaunchKernelEx) X(cuLibraryEnumerateKernels) \
  X(cuLibraryGetGlobal) X(cuLibraryGetKernel) X(cuLibraryGetKernelCount) X(cuLibraryGetManaged) \
  X(cuLibraryGetModule) X(cuLibraryGetUnifiedFunction) X(cuLibraryLoadData) X(cuLibraryLoadFromFile) \
  X(cuLibraryUnload) X(cuLinkAddData) X(cuLinkAddFile) X(cuLinkComplete) X(cuLinkCreate) X(cuLinkDestroy) \
  X(cuLogicalEndpointAddDevice) X(cuLogicalEndpointBindAddr) X(cuLogicalEndpointBindMem) \
  X(cuLogicalEndpointCreate) X(cuLogicalEndpointDestroy) X(cuLogicalEndpointExport) \
  X(cuLogicalEndpointGetLimits) X(cuLogicalEndpointIdRelease) X(cuLogicalEndpointIdReserve) \
  X(cuLogicalEndpointImport) X(cuLogicalEndpointQuery) X(cuLogicalEndpointUnbind) X(cuLogsCurrent) \
  X(cuLogsDumpToFile) X(cuLogsDumpToMemory) X(cuLogsRegisterCallback) X(cuLogsUnregisterCallback) \
  X(cuMemAddressFree) X(cuMemAddressReserve) X(cuMemAdvise) X(cuMemAllocAsync) X(cuMemAllocFromPoolAsync) \
  X(cuMemAllocManaged) X(cuMemBatchDecompressAsync) X(cuMemCreate) X(cuMemDiscardAndPrefetchBatchAsync) \
  X(cuMemDiscardBatchAsync) X(cuMemExportToShareableHandle) X(cuMemFreeAsync) X(cuMemGetAccess) \
  X(cuMemGetAllocationGranularity) X(cuMemGetAllocationPropertiesFromHandle) X(cuMemGetDefaultMemPool) \
  X(cuMemGetHandleForAddressRange) X(cuMemGetLocationInfo) X(cuMemGetMemPool) \
  X(cuMemImportFromShareableHandle) X(cuMemMap) X(cuMemMapArrayAsync) X(cuMemPoolCreate) \
  X(cuMemPoolDestroy) X(cuMemPoolExportPointer) X(cuMemPoolExportToShareableHandle) X(cuMemPoolGetAccess) \
  X(cuMemPoolGetAttribute) X(cuMemPoolImportFromShareableHandle) X(cuMemPoolImportPointer) \
  X(cuMemPoolSetAccess) X(cuMemPoolSetAttribute) X(cuMemPoolTrimTo) X(cuMemPrefetchAsync) \
  X(cuMemPrefetchBatchAsync) X(cuMemRangeGetAttribute) X(cuMemRangeGetAttributes) X(cuMemRelease) \
  X(cuMemRetainAllocationHandle) X(cuMemSetAccess) X(cuMemSetMemPool) X(cuMemUnmap) X(cuMemcpy2D) \
  X(cuMemcpy2DAsync) X(cuMemcpy2DUnaligned) X(cuMemcpy3D) X(cuMemcpy3DAsync) X(cuMemcpy3DBatchAsync) \
  X(cuMemcpy3DPeer) X(cuMemcpy3DPeerAsync) X(cuMemcpy3DWithAttributesAsync) X(cuMemcpyAtoA) X(cuMemcpyAtoD) \
  X(cuMemcpyAtoH) X(cuMemcpyAtoHAsync) X(cuMemcpyBatchAsync) X(cuMemcpyDtoA) X(cuMemcpyHtoA) \
  X(cuMemcpyHtoAAsync) X(cuMemcpyWithAttributesAsync) X(cuMemsetD2D16) X(cuMemsetD2D16Async) \
  X(cuMemsetD2D32) X(cuMemsetD2D32Async) X(cuMemsetD2D8) X(cuMemsetD2D8Async) X(cuMipmappedArrayCreate) \
  X(cuMipmappedArrayDestroy) X(cuMipmappedArrayGetLevel) X(cuMipmappedArrayGetMemoryRequirements) \
  X(cuMipmappedArrayGetSparseProperties) X(cuModuleEnumerateFunctions) X(cuModuleGetFunction) \
  X(cuModuleGetFunctionCount) X(cuModuleGetGlobal) X(cuModuleGetLoadingMode) X(cuModuleGetSurfRef) \
  X(cuModuleGetTexRef) X(cuModuleLoad) X(cuModuleLoadData) X(cuModuleLoadDataEx) X(cuModuleLoadFatBinary) \
  X(cuModuleUnload) X(cuMulticastAddDevice) X(cuMulticastBindAddr) X(cuMulticastBindMem) \
  X(cuMulticastCreate) X(cuMulticastGetGranularity) X(cuMulticastUnbind) \
  X(cuOccupancyAvailableDynamicSMemPerBlock) X(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags) X(cuOccupancyMaxActiveClusters) \
  X(cuOccupancyMaxPotentialBlockSize) X(cuOccupancyMaxPotentialBlockSizeWithFlags) \
  X(cuOccupancyMaxPotentialClusterSize) X(cuParamSetSize) X(cuParamSetTexRef) X(cuParamSetf) X(cuParamSeti) \
  X(cuParamSetv) X(cuPointerSetAttribute) X(cuProfilerInitialize) \
  X(cuSignalExternalSemaphoresAsync) X(cuStreamAttachMemAsync) \
  X(cuStreamBeginCaptureToCig) X(cuStreamBeginRecaptureToGraph) \
  X(cuStreamEndCaptureToCig) X(cuStreamGetAttribute) X(cuStreamGetDevResource) X(cuStreamSetAttribute) \
  X(cuSurfObjectCreate) X(cuSurfObjectDestroy) \
  X(cuSurfObjectGetResourceDesc) X(cuSurfRefGetArray) X(cuSurfRefSetArray) X(cuTensorMapEncodeIm2col) \
  X(cuTensorMapEncodeIm2colWide) X(cuTensorMapEncodeTiled) X(cuTensorMapReplaceAddress) \
  X(cuTexObjectCreate) X(cuTexObjectDestroy) X(cuTexObjectGetResourceDesc) \
  X(cuTexObjectGetResourceViewDesc) X(cuTexObjectGetTextureDesc) X(cuTexRefCreate) X(cuTexRefDestroy) \
  X(cuTexRefGetAddress) X(cuTexRefGetAddressMode) X(cuTexRefGetArray) X(cuTexRefGetBorderColor) \
  X(cuTexRefGetFilterMode) X(cuTexRefGetFlags) X(cuTexRefGetFormat) X(cuTexRefGetMaxAnisotropy) \
  X(cuTexRefGetMipmapFilterMode) X(cuTexRefGetMipmapLevelBias) X(cuTexRefGetMipmapLevelClamp) \
  X(cuTexRefGetMipmappedArray) X(cuTexRefSetAddress) X(cuTexRefSetAddress2D) X(cuTexRefSetAddressMode) \
  X(cuTexRefSetArray) X(cuTexRefSetBorderColor) X(cuTexRefSetFilterMode) X(cuTexRefSetFlags) \
  X(cuTexRefSetFormat) X(cuTexRefSetMaxAnisotropy) X(cuTexRefSetMipmapFilterMode) \
  X(cuTexRefSetMipmapLevelBias) X(cuTexRefSetMipmapLevelClamp) X(cuTexRefSetMipmappedArray) \
  X(cuVDPAUCtxCreate) \
  X(cuVDPAUGetDevice) X(cuWaitExternalSemaphoresAsync)
