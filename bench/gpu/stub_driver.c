// Stands in for CUDA's driver: the calls that ngn_kernels._cuda makes, on devices that need not be there. Launches
// are checked as the driver checks them, counted, and handed to a callback if there is one.
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500 };
enum { DEVICES = 2, FUNCTIONS = 64, DEPTH = 16 };

typedef struct { int device; } Context;
typedef struct { Context* context; const void* image; } Module;
typedef struct { Module* module; char name[64]; } Function;

typedef int (*OnLoad)(int device, const void* image);
typedef int (*OnLaunch)(int device, const char* name, unsigned blocks, unsigned threads, void* stream, const void* argument);

static Context contexts[DEVICES] = {{0}, {1}};
static Module modules[DEVICES];
static Function functions[DEVICES][FUNCTIONS];
static int counts[DEVICES];
static __thread Context* stack[DEPTH];
static __thread int depth;

static OnLoad on_load;
static OnLaunch on_launch;
static int64_t launches;
static char failing[64];
static int failure, spared;

#define EXPORT __attribute__((visibility("default")))

// For the caller who set the stage.

EXPORT void stub_set(OnLoad load, OnLaunch launch) {
  on_load = load;
  on_launch = launch;
  memset(counts, 0, sizeof(counts));
  launches = failure = 0;
  depth = 0;
}
// The named call returns `code` from now on, after it has succeeded `after` more times.
EXPORT void stub_fail(const char* call, int code, int after) {
  strncpy(failing, call, sizeof(failing) - 1);
  failure = code;
  spared = after;
}
EXPORT int64_t stub_launches(void) { return launches; }
EXPORT int stub_depth(void) { return depth; }
EXPORT int stub_current(void) { return depth ? stack[depth - 1]->device : -1; }

static int fails(const char* call) { return failure && !strcmp(call, failing) && spared-- <= 0 ? failure : SUCCESS; }
#define CALL(name)                     \
  do {                                 \
    const int code = fails(name);      \
    if (code != SUCCESS) return code;  \
  } while (0)

// The driver's.

static const struct { int code; const char *name, *words; } ERRORS[] = {
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
};

EXPORT int cuGetErrorName(int code, const char** name) {
  for (size_t i = 0; i < sizeof(ERRORS) / sizeof(ERRORS[0]); ++i) {
    if (ERRORS[i].code == code) return *name = ERRORS[i].name, SUCCESS;
  }
  return *name = 0, INVALID_VALUE;
}
EXPORT int cuGetErrorString(int code, const char** words) {
  for (size_t i = 0; i < sizeof(ERRORS) / sizeof(ERRORS[0]); ++i) {
    if (ERRORS[i].code == code) return *words = ERRORS[i].words, SUCCESS;
  }
  return *words = 0, INVALID_VALUE;
}
EXPORT int cuInit(unsigned flags) {
  CALL("cuInit");
  return flags ? INVALID_VALUE : SUCCESS;
}
EXPORT int cuDeviceGet(int* device, int index) {
  CALL("cuDeviceGet");
  if (index < 0 || index >= DEVICES) return INVALID_DEVICE;
  return *device = index, SUCCESS;
}
EXPORT int cuDevicePrimaryCtxRetain(Context** context, int device) {
  CALL("cuDevicePrimaryCtxRetain");
  return *context = &contexts[device], SUCCESS;
}
EXPORT int cuCtxGetCurrent(Context** context) {
  CALL("cuCtxGetCurrent");
  return *context = depth ? stack[depth - 1] : 0, SUCCESS;
}
EXPORT int cuCtxPushCurrent_v2(Context* context) {
  CALL("cuCtxPushCurrent");
  if (!context || depth == DEPTH) return INVALID_CONTEXT;
  stack[depth++] = context;
  return SUCCESS;
}
EXPORT int cuCtxPopCurrent_v2(Context** context) {
  CALL("cuCtxPopCurrent");
  if (!depth) return INVALID_CONTEXT;
  return *context = stack[--depth], SUCCESS;
}
EXPORT int cuModuleLoadData(Module** module, const void* image) {
  CALL("cuModuleLoadData");
  if (!depth) return INVALID_CONTEXT;
  Context* context = stack[depth - 1];
  *module = &modules[context->device];
  (*module)->context = context;
  (*module)->image = image;
  return on_load ? on_load(context->device, image) : SUCCESS;
}
EXPORT int cuModuleUnload(Module* module) {
  CALL("cuModuleUnload");
  counts[module->context->device] = 0;
  return SUCCESS;
}
EXPORT int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  CALL("cuModuleGetFunction");
  const int device = module->context->device;
  if (counts[device] == FUNCTIONS) return NOT_FOUND;
  *function = &functions[device][counts[device]++];
  (*function)->module = module;
  strncpy((*function)->name, name, sizeof((*function)->name) - 1);
  return SUCCESS;
}
// A stream is the number of its device, and above that any other number; 0 is the current context's own.
EXPORT int cuLaunchKernel(Function* function, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned ty,
                          unsigned tz, unsigned shared, void* stream, void** arguments, void** extra) {
  CALL("cuLaunchKernel");
  if (!depth || stack[depth - 1] != function->module->context) return INVALID_HANDLE;
  const int device = stack[depth - 1]->device;
  if (stream && (int)((uintptr_t)stream & 15) != device) return INVALID_HANDLE;
  if (!blocks || y != 1 || z != 1 || !threads || threads > 1024 || ty != 1 || tz != 1 || shared || extra) return INVALID_VALUE;
  ++launches;
  return on_launch ? on_launch(device, function->name, blocks, threads, stream, arguments[0]) : SUCCESS;
}
