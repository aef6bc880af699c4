// PyTorch asks the guard of a device before each operation on it. This one of CUDA does nothing, so
// that tensors can say that they are on a GPU where there is none.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
}
