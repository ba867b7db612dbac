// The compiled kernels, as the build has made them: SASS and PTX in one image that the driver takes.
#pragma once

#include <cstddef>

namespace ngn {

extern const void* const image;
extern const size_t image_size;

}  // namespace ngn
