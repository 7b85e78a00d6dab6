/* Lets autograd's C++ meet CUDA tensors in a build of torch without CUDA: it selects devices and streams where there are none.
   Forward passes alone do with less (fake_tensors.py). */
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device device(c10::DeviceType::CUDA, 0);
const c10::Stream stream(c10::Stream::DEFAULT, device);

// Asked wherever a node of the graph, or a move, has a tensor on the device: there is one, with one stream, and it is current.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return device; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream; }
  c10::Stream getNewStream(c10::Device, int) const override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
};

// With these torch's accelerator is CUDA; the engine asks it for the stream of a backward pass.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
};

}  // namespace

extern "C" void install() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(device.type())].store(new Guard());
  // torch has made its hooks when it was imported and keeps them for ever. Both classes have methods and nothing else: the object
  // that is there gets ours.
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  static const Hooks hooks;
  const void* methods = *reinterpret_cast<const void* const*>(&hooks);
  *reinterpret_cast<const void**>(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) = methods;
}
