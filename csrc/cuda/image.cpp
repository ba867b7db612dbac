#include "cuda/image.h"

#ifdef _WIN32
#define NGN_READ_ONLY ".section .rdata,\"dr\"\n"
#define NGN_HIDDEN
#else
#define NGN_READ_ONLY ".section .rodata\n"
#define NGN_HIDDEN ".hidden ngn_image_begin, ngn_image_end\n"
#endif

__asm__(NGN_READ_ONLY
        ".globl ngn_image_begin, ngn_image_end\n" NGN_HIDDEN
        ".balign 16\n"
        "ngn_image_begin:\n"
        ".incbin \"" NGN_IMAGE "\"\n"
        "ngn_image_end:\n"
        ".text\n");

extern "C" const char ngn_image_begin[], ngn_image_end[];

namespace ngn {

const void* const image = ngn_image_begin;
const size_t image_size = static_cast<size_t>(ngn_image_end - ngn_image_begin);

}  // namespace ngn
