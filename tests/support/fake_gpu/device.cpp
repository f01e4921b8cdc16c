// A CUDA device that computes nothing, for fake tensors on a build of torch without CUDA: torch's autograd engine,
// DTensor and FSDP2 ask it for devices, streams, events and generators. Streams and events are numbers; what orders
// them is kept in a log, which stream_order.py reads.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

using namespace c10;

namespace {

// One device: the autograd engine starts a thread for each.
const Device DEVICE(DeviceType::CUDA, 0);
thread_local int64_t current_stream = 0;
std::atomic<int64_t> streams{1}, events{1};

enum Kind : int64_t { RECORD, BLOCK, SYNCHRONIZE_EVENT, SYNCHRONIZE_STREAM, SYNCHRONIZE_DEVICE };
std::mutex log_mutex;
std::vector<std::array<int64_t, 3>> log_;  // (kind, event or stream, stream)

void note(Kind kind, int64_t what, int64_t stream) {
  std::lock_guard<std::mutex> lock(log_mutex);
  log_.push_back({kind, what, stream});
}

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  DeviceCapability getDeviceCapability(Device) const override { return {}; }
  Stream getStream(Device) const override { return Stream(Stream::UNSAFE, DEVICE, current_stream); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::UNSAFE, DEVICE, 0); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::UNSAFE, DEVICE, streams++); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return getNewStream(DEVICE, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(DEVICE);
    current_stream = stream.id();
    return before;
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(events++);
    note(RECORD, reinterpret_cast<int64_t>(*event), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    note(BLOCK, reinterpret_cast<int64_t>(event), stream.id());
  }
  void synchronizeEvent(void* event) const override { note(SYNCHRONIZE_EVENT, reinterpret_cast<int64_t>(event), 0); }
  void synchronizeStream(const Stream& stream) const override { note(SYNCHRONIZE_STREAM, stream.id(), 0); }
  void synchronizeDevice(const DeviceIndex) const override { note(SYNCHRONIZE_DEVICE, 0, 0); }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Generator_ final : GeneratorImpl {
  uint64_t seed_ = 0, offset_ = 0;
  Generator_() : GeneratorImpl(DEVICE, DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { return seed_; }
  void set_state(const TensorImpl&) override {}
  intrusive_ptr<TensorImpl> get_state() const override { return at::empty({16}, at::kByte).unsafeReleaseIntrusivePtr(); }
  Generator_* clone_impl() const override { return new Generator_(); }
};

// The choice of sdp_utils.cpp on Hopper: cuDNN (3) in 16 bits without a mask, else the memory-efficient kernel (2).
int64_t choose_attention(const at::Tensor& query, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool) {
  auto type = query.scalar_type();
  return (type == at::kBFloat16 || type == at::kHalf) && !mask.has_value() ? 3 : 2;
}

}  // namespace

namespace at::native {
static RegisterCUDADispatch<std::remove_reference_t<decltype(_fused_sdp_choice_stub)>> choice(
    _fused_sdp_choice_stub, choose_attention);
}

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 92000; }
  long versionRuntimeCuDNN() const override { return 92000; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Allocator* getPinnedMemoryAllocator() const override { return GetCPUAllocator(); }
  Device getDeviceFromPtr(void*) const override { return DEVICE; }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<Generator_>(); }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static Generator generator = make_generator<Generator_>();
    return generator;
  }
  void deviceSynchronize(DeviceIndex) const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

// CUDA has one kernel for each of these. Where it has none, torch takes their formulas instead: SiLU's has six
// temporaries, by which SDXL's peak was 16 % too high. Never called, since fake tensors answer first.
at::Tensor activation_backward(const at::Tensor&, const at::Tensor&) { TORCH_CHECK(false, "nothing is computed here"); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("silu_backward", TORCH_FN(activation_backward));
  library.impl("mish_backward", TORCH_FN(activation_backward));
}

extern "C" void synchronize_device() { note(SYNCHRONIZE_DEVICE, 0, 0); }

extern "C" int64_t current_stream_id() { return current_stream; }

// Move up to `room` entries of the log to `out`, and return how many.
extern "C" int64_t take_order(int64_t* out, int64_t room) {
  std::lock_guard<std::mutex> lock(log_mutex);
  int64_t count = std::min<int64_t>(room, log_.size());
  std::copy_n(log_.begin()->data(), 3 * count, out);
  log_.erase(log_.begin(), log_.begin() + count);
  return count;
}
