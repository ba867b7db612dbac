#include "cuda/driver.h"

#include <type_traits>

#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace ngn {
namespace {

#ifdef _WIN32
void* open_library(const std::string& name) { return reinterpret_cast<void*>(LoadLibraryA(name.c_str())); }
void* find(void* library, const char* symbol) {
  return reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(library), symbol));
}
std::string why_not_opened() { return "error " + std::to_string(GetLastError()); }
#else
void* open_library(const std::string& name) { return dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL); }
void* find(void* library, const char* symbol) { return dlsym(library, symbol); }
std::string why_not_opened() { return dlerror(); }
#endif

}  // namespace

Driver::Driver(const std::string& library) {
  // It is never closed: torch uses the same one.
  void* handle = open_library(library);
  if (!handle) throw NoDriver("no CUDA driver: " + why_not_opened());
  const auto resolve = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(find(handle, symbol));
    if (!function) throw NoDriver(library + " is no CUDA driver: it has no " + symbol);
  };
  resolve(init_, "cuInit");
  resolve(get_error_name_, "cuGetErrorName");
  resolve(get_error_string_, "cuGetErrorString");
  resolve(device_get_, "cuDeviceGet");
  resolve(primary_context_retain_, "cuDevicePrimaryCtxRetain");
  resolve(context_get_current_, "cuCtxGetCurrent");
  resolve(context_push_, "cuCtxPushCurrent_v2");
  resolve(context_pop_, "cuCtxPopCurrent_v2");
  resolve(module_load_data_, "cuModuleLoadData");
  resolve(module_unload_, "cuModuleUnload");
  resolve(module_get_function_, "cuModuleGetFunction");
  resolve(launch_kernel_, "cuLaunchKernel");
  check(init_(0), "cuInit");
}

void Driver::check(DriverResult result, const char* call) const {
  if (result == 0) return;
  const char *name = nullptr, *words = nullptr;
  get_error_name_(result, &name);
  get_error_string_(result, &words);
  const std::string code = name ? name : "error " + std::to_string(result);
  throw DriverError(std::string(call) + " failed: " + code + (words ? std::string(" (") + words + ")" : ""));
}

Driver::Current::Current(const Driver& driver, DriverContext context) : driver_(driver) {
  DriverContext current = nullptr;
  driver.check(driver.context_get_current_(&current), "cuCtxGetCurrent");
  pushed_ = current != context;
  if (pushed_) driver.check(driver.context_push_(context), "cuCtxPushCurrent");
}

Driver::Current::~Current() {
  DriverContext popped;
  if (pushed_) driver_.context_pop_(&popped);
}

Driver::Device::Device(const Driver& driver, int index, const void* image, const std::vector<const char*>& kernels)
    : driver_(driver) {
  DriverDevice device;
  driver.check(driver.device_get_(&device, index), "cuDeviceGet");
  // torch's own context of the device; retained for as long as the process lives.
  driver.check(driver.primary_context_retain_(&context_, device), "cuDevicePrimaryCtxRetain");
  const Current current(driver, context_);
  DriverModule module;
  driver.check(driver.module_load_data_(&module, image), "cuModuleLoadData");
  try {
    for (const char* name : kernels) {
      functions_.push_back(nullptr);
      driver.check(driver.module_get_function_(&functions_.back(), module, name), "cuModuleGetFunction");
    }
  } catch (const DriverError&) {
    driver.module_unload_(module);
    throw;
  }
}

void Driver::Device::launch(size_t kernel, int64_t blocks, int threads, void* argument, DriverStream stream) const {
  const Current current(driver_, context_);
  void* arguments[] = {argument};
  driver_.check(driver_.launch_kernel_(functions_[kernel], static_cast<unsigned>(blocks), 1, 1,
                                       static_cast<unsigned>(threads), 1, 1, 0, stream, arguments, nullptr),
                "cuLaunchKernel");
}

}  // namespace ngn
