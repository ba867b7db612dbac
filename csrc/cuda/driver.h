// CUDA's driver, found at run time: nothing of CUDA is linked, and importing the module needs no GPU.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace ngn {

// A call of the driver that failed, with its own name and words for the reason.
struct DriverError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// No such library, or one that is no driver.
struct NoDriver : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The driver's types, as its binary interface has them.
using DriverResult = int;
using DriverDevice = int;
using DriverContext = struct ContextOfDriver*;
using DriverModule = struct ModuleOfDriver*;
using DriverFunction = struct FunctionOfDriver*;
using DriverStream = struct StreamOfDriver*;

class Driver {
 public:
  explicit Driver(const std::string& library);

  // An image's kernels on a device.
  class Device {
   public:
    Device(const Driver& driver, int index, const void* image, const std::vector<const char*>& kernels);
    // `kernel` is the number of a kernel in that order, `argument` the address of its only one.
    void launch(size_t kernel, int64_t blocks, int threads, void* argument, DriverStream stream) const;

   private:
    const Driver& driver_;
    DriverContext context_;
    std::vector<DriverFunction> functions_;
  };

 private:
  // The device's context for as long as this lives: torch's own may be that of another device.
  class Current {
   public:
    Current(const Driver& driver, DriverContext context);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Driver& driver_;
    bool pushed_;
  };

  void check(DriverResult result, const char* call) const;

  DriverResult (*init_)(unsigned);
  DriverResult (*get_error_name_)(DriverResult, const char**);
  DriverResult (*get_error_string_)(DriverResult, const char**);
  DriverResult (*device_get_)(DriverDevice*, int);
  DriverResult (*primary_context_retain_)(DriverContext*, DriverDevice);
  DriverResult (*context_get_current_)(DriverContext*);
  DriverResult (*context_push_)(DriverContext);
  DriverResult (*context_pop_)(DriverContext*);
  DriverResult (*module_load_data_)(DriverModule*, const void*);
  DriverResult (*module_unload_)(DriverModule);
  DriverResult (*module_get_function_)(DriverFunction*, DriverModule, const char*);
  DriverResult (*launch_kernel_)(DriverFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 DriverStream, void**, void**);
};

}  // namespace ngn
