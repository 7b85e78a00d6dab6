/* A libcuda.so.1 for machines without a driver, so that what is linked against it can be imported: no device, says every function.
   Those that sgl_kernel 0.4.10 and tvm_ffi name; `nm -D --undefined-only` of a library lists its own. */
#define NO_DEVICE(name) int name(void) { return 100; }
NO_DEVICE(cuCtxFromGreenCtx) NO_DEVICE(cuCtxGetCurrent) NO_DEVICE(cuCtxGetDevice) NO_DEVICE(cuCtxPopCurrent_v2)
NO_DEVICE(cuCtxPushCurrent_v2) NO_DEVICE(cuDevResourceGenerateDesc) NO_DEVICE(cuDevSmResourceSplitByCount) NO_DEVICE(cuDeviceGet)
NO_DEVICE(cuDeviceGetAttribute) NO_DEVICE(cuDeviceGetDevResource) NO_DEVICE(cuDriverGetVersion) NO_DEVICE(cuFuncSetAttribute)
NO_DEVICE(cuGetErrorName) NO_DEVICE(cuGetErrorString) NO_DEVICE(cuGetProcAddress) NO_DEVICE(cuGetProcAddress_v2)
NO_DEVICE(cuGreenCtxCreate) NO_DEVICE(cuGreenCtxDestroy) NO_DEVICE(cuGreenCtxGetDevResource) NO_DEVICE(cuInit)
NO_DEVICE(cuLaunchKernel) NO_DEVICE(cuLaunchKernelEx) NO_DEVICE(cuMemAddressFree) NO_DEVICE(cuMemAddressReserve)
NO_DEVICE(cuMemCreate) NO_DEVICE(cuMemGetAllocationGranularity) NO_DEVICE(cuMemMap) NO_DEVICE(cuMemRelease)
NO_DEVICE(cuMemSetAccess) NO_DEVICE(cuMemUnmap) NO_DEVICE(cuModuleGetFunction) NO_DEVICE(cuModuleLoadDataEx)
NO_DEVICE(cuModuleUnload) NO_DEVICE(cuPointerGetAttribute) NO_DEVICE(cuStreamCreate)
