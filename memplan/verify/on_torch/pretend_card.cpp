// A card that is not there, for autograd: it asks a device for its streams and for its context, and is
// answered here. Nothing runs: what is trained are fake tensors. See pretend_card.py.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

namespace {
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device only() { return {DeviceType::CUDA, 0}; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return only(); }
  Device exchangeDevice(Device) const override { return only(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, only()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, only()); }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
};

Guard guard;
Hooks hooks;

}  // namespace

// Puts this card in the place of the process's own, or that one back.
extern "C" void exchange_card() {
  static const c10::impl::DeviceGuardImplInterface* other = &guard;
  other = c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)]
              .exchange(other);
  auto& real = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  // torch has one such object, made when it was first asked for: what it does is what is exchanged.
  std::swap(*reinterpret_cast<void**>(&real), *reinterpret_cast<void**>(&hooks));
}
