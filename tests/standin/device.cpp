// A device named "cuda" for a CPU build of torch. Its memory is the host's, its kernels are the CPU's.
//
// Real: the allocator and its reports to torch.profiler (memory.h); two devices with a current one for each thread;
// the order of streams and events (streams.h); generators with CUDA's 16 bytes of state; backward on the thread that
// torch's engine has for each device.
//
// Three traps:
// - torch finds the hooks by the name of their class, which must be CUDAHooks.
// - torch asks for the hooks once. Load this library with ctypes before Python imports torch.
// - Import torch._dynamo and torch._inductor before Python learns that there is CUDA.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "collectives.h"
#include "graphs.h"

using at::Tensor;
using c10::Device;
using c10::Stream;

namespace {

Device with_index(Device device) {
  return device.has_index() ? device : Device(device.type(), current_device);
}

REGISTER_ALLOCATOR(DeviceType::CUDA, &allocator)

// ---- devices, streams, events

std::atomic<c10::StreamId> last_stream{0};

using Lock = std::lock_guard<std::recursive_mutex>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device device) const override {
    device = with_index(device);
    return Stream(Stream::UNSAFE, device, current_stream[device.index()]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::UNSAFE, with_index(device), 0); }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, with_index(device), 1 + last_stream++ % (kStreams - 1));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  // Who asks knows from here on that the work is over.
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    check_host_may_wait("the host waits for a stream");
    Lock lock(device_mutex);
    synchronize(queue_of(stream));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    check_host_may_wait("the host waits for the device");
    Lock lock(device_mutex);
    synchronize(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    record_stream(data.get(), queue_of(stream));
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(device_mutex);
    if (!*event) *event = new Event;
    const int64_t graph = is_captured(queue_of(stream)) ? capture->id : 0;
    *static_cast<Event*>(*event) = {std::chrono::steady_clock::now(), clock_of(queue_of(stream)), graph};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const Stream& stream) const override {
    Lock lock(device_mutex);
    if (!event) return;
    const auto& awaited = *static_cast<Event*>(event);
    if (capture && awaited.graph == capture->id) {
      capture->queues.insert(queue_of(stream));
    } else if (is_recorded(queue_of(stream))) {
      invalidate("a stream that is captured waits for work that is not");
    }
    join(clock_of(queue_of(stream)), awaited.clock);
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    check_host_may_wait("the host waits for an event");
    Lock lock(device_mutex);
    TORCH_CHECK(!event || !static_cast<Event*>(event)->graph, "the host waits for an event of a captured graph");
    if (event) join(host_clock, static_cast<Event*>(event)->clock);
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    check_host_may_wait("the host asks for the time between two events");
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(to)->at - static_cast<Event*>(from)->at)
        .count();
  }
};

std::atomic<long> cudnn_version{0};  // that the hooks claim; 0: none

// ---- random numbers

// State as CUDA's Philox has it: a seed, and an offset that every kernel moves on. In a capture, the offset counts from
// the graph's begin, and the seed is that of the replay: `set_state` rewinds, and cannot set another seed.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = 0;
  uint64_t offset_ = 0;

  explicit Generator(DeviceIndex device)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  static DeviceType device_type() { return DeviceType::CUDA; }
  bool is_captured() const { return ::is_captured(current_queue(device().index())); }
  uint64_t& offset() { return is_captured() ? capture->offset_of(self()) : offset_; }
  at::Generator self() const {
    return at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(const_cast<Generator*>(this)));
  }
  void set_current_seed(uint64_t seed) override {
    TORCH_CHECK(!is_captured() || seed == seed_,
                "set_current_seed can be called during stream capture only if new seed is the same as the original seed");
    if (!is_captured()) seed_ = seed, offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(!is_captured(), "Cannot call set_offset during CUDA graph capture");
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(!is_captured(), "Cannot call get_offset during CUDA graph capture");
    return offset_;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    TORCH_CHECK(!is_captured(), "Cannot call seed during CUDA graph capture");
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    uint64_t numbers[2];
    memcpy(numbers, state.data(), 16);
    set_current_seed(numbers[0]);
    offset() = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    const uint64_t numbers[2] = {seed_, const_cast<Generator*>(this)->offset()};
    memcpy(state.data_ptr(), numbers, 16);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  // A seed for one kernel; the next one gets another.
  uint64_t next() {
    offset() += 4;
    return seed_ * 1000003 + offset();
  }
};

at::Generator& default_generator(DeviceIndex device) {
  static at::Generator generators[kDevices] = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return generators[device < 0 ? current_device : device];
}

// ---- tensors

template <typename Make>
Tensor on_device(std::optional<Device> wanted, Make make) {
  c10::impl::VirtualGuardImpl guard(DeviceType::CUDA);
  const Device before = guard.exchangeDevice(with_index(wanted.value_or(Device(DeviceType::CUDA))));
  struct Back {
    c10::impl::VirtualGuardImpl& guard;
    Device device;
    ~Back() { guard.setDevice(device); }
  } back{guard, before};
  return make(c10::DispatchKeySet(c10::DispatchKey::CUDA));
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return on_device(device, [&](auto keys) {
    return at::detail::empty_generic(size, &allocator, keys, at::dtype_or_default(dtype), format);
  });
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return on_device(device, [&](auto keys) {
    return at::detail::empty_strided_generic(size, stride, &allocator, keys, at::dtype_or_default(dtype));
  });
}

// The tensors of one call: those on the device become tensors of the host on the same memory, and back again.
class Translation {
 public:
  std::optional<Device> device;  // of the first tensor, or the one that an argument names

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cuda()) return tensor;
    if (!device) device = tensor.device();
    for (auto& [theirs, ours] : tensors_) {
      if (theirs.is_same(tensor)) return ours;
    }
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        host_storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = host.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    if (tensor.is_conj()) host._set_conj(true);
    if (tensor.is_neg()) host._set_neg(true);
    tensors_.emplace_back(tensor, host);
    return host;
  }

  Tensor to_device(const Tensor& host) {
    if (!host.defined()) return host;
    for (auto& [theirs, ours] : tensors_) {
      if (ours.is_same(host)) return theirs;
    }
    for (auto& [theirs, ours] : tensors_) {
      if (!host.has_storage() || !host.is_alias_of(ours)) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(theirs.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), host.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      return view;
    }
    if (!device || host.layout() != at::kStrided) return host;
    auto made = empty_strided(host.sizes(), host.strides(), host.scalar_type(), {}, device, {});
    made_.insert(made.unsafeGetTensorImpl());
    if (host.numel()) {
      const size_t offset = host.storage_offset() * host.itemsize();
      copy_bytes(made.storage(), static_cast<const char*>(host.storage().data()) + offset,
                 host.storage().nbytes() - offset);
    }
    return made;
  }

  bool has_made(const Tensor& tensor) const { return made_.count(tensor.unsafeGetTensorImpl()); }

  // A kernel may have resized what it was to write into.
  void keep_resized() {
    for (auto& [theirs, ours] : tensors_) {
      if (ours.sizes() == theirs.sizes() && ours.storage().data() == theirs.storage().data()) continue;
      theirs.resize_(ours.sizes());
      copy_bytes(theirs.storage(), ours.storage().data(), ours.storage().nbytes());
      theirs.unsafeGetTensorImpl()->set_sizes_and_strides(ours.sizes(), ours.strides(), ours.storage_offset());
    }
  }

 private:
  static void copy_bytes(const c10::Storage& to, const void* from, size_t nbytes) {
    memcpy(const_cast<c10::Storage&>(to).mutable_data(), from, std::min(to.nbytes(), nbytes));
  }

  c10::Storage host_storage(const c10::Storage& storage) {
    for (auto& [theirs, ours] : storages_) {
      if (theirs == storage.unsafeGetStorageImpl()) return ours;
    }
    auto* impl = storage.unsafeGetStorageImpl();
    c10::Storage host(c10::Storage::use_byte_size_t(), impl->nbytes(),
                      c10::DataPtr(impl->mutable_data(), Device(DeviceType::CPU)), c10::GetCPUAllocator(), true);
    storages_.emplace_back(impl, host);
    return host;
  }

  std::set<at::TensorImpl*> made_;  // on the device, of new tensors of the host
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages_;
  std::vector<std::pair<Tensor, Tensor>> tensors_;
};

// One kernel or copy. What it uses counts as launched on the current stream of its device; if it does not wait for
// what it relies on, its results are NaN.
class Kernel {
 public:
  void uses(const Tensor& tensor, bool writes) {
    if (!tensor.defined() || !tensor.device().is_cuda() || !tensor.has_storage()) return;
    used_.emplace_back(tensor.storage().data(), writes);
    if (writes) written_.push_back(tensor);
  }

  void launch(Device device, const std::string& op) {
    Lock lock(device_mutex);
    launch_ = ::launch(current_queue(device.index()), op);
    for (const auto& [address, writes] : used_) {
      if (is_captured(launch_.queue)) note_outside(address, writes);
    }
    for (const auto& [address, writes] : used_) right_ &= writes ? write(address, launch_) : read(address, launch_);
  }

  void uses_host(const Tensor& tensor, bool writes) {
    Lock lock(device_mutex);
    auto begin = static_cast<const char*>(tensor.const_data_ptr());
    right_ &= use_host(begin, begin + tensor.nbytes(), writes, launch_);
  }

  void made(const Tensor& tensor) {
    Lock lock(device_mutex);
    if (!launch_.number || !tensor.defined() || !tensor.device().is_cuda()) return;
    write(tensor.storage().data(), launch_);
    written_.push_back(tensor);
  }

  void finish(bool host_waits) {
    if (host_waits && launch_.number) check_host_may_wait(launch_.op + " waits for the device");
    Lock lock(device_mutex);
    if (host_waits && launch_.number && !in_kernel) synchronize(launch_.queue);
    for (const auto& tensor : right_ ? std::vector<Tensor>() : written_) spoil(tensor);
  }

  bool is_right() const { return right_; }
  bool is_recorded() const { return launch_.number && ::is_recorded(launch_.queue); }

  static void spoil(const Tensor& tensor) {
    auto storage = tensor.storage();
    memset(storage.mutable_data(), kNaN, storage.nbytes());
  }

 private:
  std::vector<std::pair<const void*, bool>> used_;
  std::vector<Tensor> written_;
  Launch launch_;
  bool right_ = true;
};

template <typename List, typename Convert>
c10::IValue converted(const List& tensors, Convert convert) {
  c10::List<typename List::value_type> list;
  for (const auto& tensor : tensors) list.push_back(convert(tensor));
  return list;
}

// What cuBLAS keeps for each thread and stream that multiplies, as torch does it; none until a test asks for it.

size_t workspace_nbytes = 0;
std::map<std::pair<std::thread::id, Queue>, c10::DataPtr> workspaces;
std::mutex workspaces_mutex;  // not the device's, which the allocator takes

void keep_workspace(const std::string& op, DeviceIndex device) {
  static const std::set<std::string> products{"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
  if (!workspace_nbytes || !products.count(op)) return;
  std::lock_guard<std::mutex> lock(workspaces_mutex);
  auto& kept = workspaces[{std::this_thread::get_id(), current_queue(device)}];
  if (!kept) kept = allocator.allocate(workspace_nbytes);
}

void clear_workspaces() {
  std::lock_guard<std::mutex> lock(workspaces_mutex);
  workspaces.clear();
}

// Apply `convert` to each tensor of an argument.
template <typename Convert>
c10::IValue with_tensors(const c10::IValue& value, Convert convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) return converted(value.toTensorVector(), convert);
  if (!value.isOptionalTensorList()) return value;
  return converted(value.toOptionalTensorVector(), [&](const std::optional<Tensor>& tensor) {
    return tensor ? std::optional<Tensor>(convert(*tensor)) : tensor;
  });
}

// Draw on the host, while this object lives, with the seed that a generator of the device has for the next kernel.
class HostSeed {
 public:
  explicit HostSeed(const at::Generator& generator) : state_(host_.unsafeGetGeneratorImpl()->get_state()) {
    host_.set_current_seed(static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next());
  }
  ~HostSeed() { host_.unsafeGetGeneratorImpl()->set_state(*state_); }

 private:
  at::Generator host_ = at::detail::getDefaultCPUGenerator();
  c10::intrusive_ptr<c10::TensorImpl> state_;
};

// Record an op that has run.
//
// arguments: for the CPU's kernel, on the device's memory as the run has left it, which the record does not own.
// made: by its outputs in order, the new memory that each was copied to, or none.
void record_op(const c10::OperatorHandle& op, std::vector<c10::IValue> arguments, const std::vector<Tensor>& made,
               at::Generator generator, uint64_t offset) {
  std::vector<std::pair<void*, size_t>> places;
  for (const auto& tensor : made) {
    if (tensor.defined()) places.emplace_back(tensor.storage().mutable_data(), tensor.storage().nbytes());
    else places.emplace_back(nullptr, 0);
  }
  auto run = [op, arguments, places, generator] {
    torch::jit::Stack stack = arguments;
    std::optional<HostSeed> seed;
    if (generator.defined()) seed.emplace(generator);
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    size_t i = 0;
    auto copy = [&](const Tensor& host) {
      const auto [to, nbytes] = places.at(i++);
      if (to && host.numel()) {
        const size_t offset = host.storage_offset() * host.itemsize();
        memcpy(to, static_cast<const char*>(host.storage().data()) + offset,
               std::min(nbytes, host.storage().nbytes() - offset));
      }
      return host;
    };
    for (const auto& value : stack) with_tensors(value, copy);
  };
  record(run, generator, offset);
}

// Run an op's CPU kernel on the device's memory.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t arguments = op.schema().arguments().size(), first = stack->size() - arguments;
  const size_t returns = op.schema().returns().size();
  Translation call;
  Kernel kernel;
  auto host_generator = at::detail::getDefaultCPUGenerator();
  at::Generator generator;
  std::vector<c10::IValue> given;  // on the device
  if (capture) given.assign(stack->begin() + first, stack->end());
  for (size_t i = first; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    const auto* alias = op.schema().arguments()[i - first].alias_info();
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (!call.device) call.device = with_index(value.toDevice());
      value = Device(DeviceType::CPU);
    } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      generator = value.toGenerator();
      value = host_generator;
    } else {
      value = with_tensors(value, [&](const Tensor& tensor) {
        kernel.uses(tensor, alias && alias->isWrite());
        return call.to_host(tensor);
      });
    }
  }
  if (call.device) keep_workspace(op.schema().name(), call.device->index());
  if (call.device) kernel.launch(*call.device, op.schema().name());
  const auto& tags = op.getTags();
  auto tagged = [&](at::Tag tag) { return std::find(tags.begin(), tags.end(), tag) != tags.end(); };
  std::optional<HostSeed> seed;
  uint64_t offset = 0;
  if (tagged(at::Tag::nondeterministic_seeded)) {
    if (!generator.defined()) generator = default_generator(call.device ? call.device->index() : current_device);
    offset = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->offset();
    seed.emplace(generator);
  } else {
    generator = {};
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  seed.reset();
  call.keep_resized();
  std::vector<Tensor> made;
  for (size_t i = stack->size() - returns; i < stack->size(); i++) {
    (*stack)[i] = with_tensors((*stack)[i], [&](const Tensor& host) {
      auto tensor = call.to_device(host);
      if (call.has_made(tensor)) kernel.made(tensor);
      made.push_back(call.has_made(tensor) ? tensor : Tensor());
      return tensor;
    });
  }
  kernel.finish(tagged(at::Tag::data_dependent_output) || tagged(at::Tag::dynamic_output_shape));
  if (!kernel.is_recorded()) return;
  Translation after;
  std::vector<c10::IValue> on_host;
  for (size_t i = 0; i < given.size(); i++) {
    const auto& value = given[i];
    if (value.isDevice()) {
      on_host.emplace_back(Device(DeviceType::CPU));
    } else if (value.isGenerator()) {
      on_host.emplace_back(host_generator);
    } else {
      on_host.push_back(with_tensors(value, [&](const Tensor& tensor) {
        if (!tensor.defined() || !tensor.device().is_cpu()) return after.to_host(tensor);
        auto number = tensor.clone();  // a GPU gets the numbers of the host as the op is launched
        number.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
        return number;
      }));
    }
  }
  record_op(op, std::move(on_host), made, generator, offset);
}

// Two devices wait for each other before and after a copy.
void meet(Device a, Device b) {
  Lock lock(device_mutex);
  auto &one = clock_of(current_queue(a.index())), &other = clock_of(current_queue(b.index()));
  join(one, other);
  join(other, one);
}

// Record a copy that has run. It holds what is in the host's memory, and nothing of the device.
void record_copy(const Tensor& to, const Tensor& from) {
  Translation call;
  record([to = call.to_host(to), from = call.to_host(from)] {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  Translation call;
  Kernel kernel;
  const bool between_devices = self.is_cuda() && source.is_cuda() && self.device() != source.device();
  if (between_devices) meet(self.device(), source.device());
  kernel.uses(source, false);
  kernel.uses(self, true);
  kernel.launch(source.is_cuda() ? source.device() : self.device(), "aten::copy_");
  if (!self.is_cuda()) kernel.uses_host(self, true);
  if (!source.is_cuda()) kernel.uses_host(source, false);
  auto to = call.to_host(self);
  if (kernel.is_recorded() && !self.is_cuda()) capture->host_contents.emplace_back(self, self.clone());
  {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(call.to_host(source));
  }
  kernel.finish(!non_blocking && !(self.is_cuda() && source.is_cuda()));
  if (!kernel.is_right()) Kernel::spoil(to);
  if (kernel.is_recorded()) record_copy(self, source);
  if (between_devices) meet(self.device(), source.device());
  return self;
}

void record_stream_of(Tensor& self, Stream stream) { record_stream(self.storage().data(), queue_of(stream)); }

// What only changes how a tensor looks at its storage runs on the tensor itself.

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor& set_window(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(self, storage, offset, size, stride);
}
Tensor& set_storage(Tensor& self, at::Storage storage) {
  const int64_t elements = storage.nbytes() / self.itemsize();
  return at::cpu::set_(self, storage, 0, {elements}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::cpu::set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, &allocator, true);
  return at::cpu::set_(self, nothing, 0, {0}, {});
}

// Return a tensor on the same memory, which does not own it.
Tensor borrowed(const Tensor& tensor) {
  auto* data = const_cast<c10::Storage&>(tensor.storage()).mutable_data();
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::DataPtr(data, tensor.device()),
                       &allocator, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return alias;
}

// Free the memory of a tensor's storage, or allocate it again.
void resize_storage(const Tensor& tensor, size_t nbytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  TORCH_CHECK(!nbytes || !storage->nbytes(), "the stand-in resizes storages from nothing and to nothing only");
  on_device(storage->device(), [&](auto) {
    storage->set_data_ptr_noswap(allocator.allocate(nbytes));
    storage->set_nbytes(nbytes);
    return tensor;
  });
}

// Unlike the CPU's, CUDA's histogram takes integers.
void histc(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& numbers = (*stack)[stack->size() - op.schema().arguments().size()];
  const auto type = numbers.toTensor().scalar_type();
  numbers = numbers.toTensor().to(at::kFloat);
  run_on_host(op, stack);
  stack->back() = stack->back().toTensor().to(type);
}

}  // namespace

void run_or_record(Device device, std::function<void()> work) {
  work();
  if (is_recorded(current_queue(device.index()))) record(std::move(work));
}

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}

namespace standin {

struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? ::current_device : device);
  }
  DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = ::current_device;
    if (device >= 0) ::current_device = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex device) const override {
    check_host_may_wait("the host waits for the device");
    Lock lock(device_mutex);
    synchronize(device);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  bool hasCuDNN() const override { return cudnn_version; }
  bool compiledWithCuDNN() const override { return cudnn_version; }
  bool supportsBFloat16RNNWithCuDNN() const override { return cudnn_version; }
  long versionCuDNN() const override { return cudnn_version; }
  long versionRuntimeCuDNN() const override { return cudnn_version; }
  double batchnormMinEpsilonCuDNN() const override { return 0; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace standin

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("record_stream", &record_stream_of);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_window);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
  // These have kernels for every device, which would ask for CUDA's own.
  for (const char* name :
       {"convolution", "convolution_backward", "convolution_overrideable", "convolution_backward_overrideable",
        "native_group_norm", "native_group_norm_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  auto locked = [](auto function) {
    return [function](DeviceIndex device) {
      Lock lock(device_mutex);
      return function(device);
    };
  };
  m.def("device_count", [] { return int(kDevices); });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](DeviceIndex device) { current_device = device; });
  m.def("current_stream", [](DeviceIndex device) { return current_stream[device]; });
  m.def("set_stream", [](c10::StreamId stream, DeviceIndex device) {
    current_device = device;
    current_stream[device] = stream;
  });
  m.def("register_host", [](uintptr_t address, size_t nbytes) {
    check_host_may_wait("the host registers memory");
    Lock lock(device_mutex);
    registered[reinterpret_cast<const char*>(address)] = reinterpret_cast<const char*>(address) + nbytes;
  });
  m.def("synchronize", locked([](DeviceIndex device) {
          check_host_may_wait("the host waits for the device");
          synchronize(device);
        }));
  m.def("default_generator", [](DeviceIndex device) { return default_generator(device); });

  m.def("live", locked([](DeviceIndex device) { return memories[device].allocated().current; }));
  m.def("peak", locked([](DeviceIndex device) { return memories[device].allocated().peak; }));
  m.def("stats", locked([](DeviceIndex device) {
          std::map<std::string, std::map<std::string, std::map<std::string, int64_t>>> stats;
          const char* pools[kPools] = {"all", "small_pool", "large_pool"};
          for (int quantity = 0; quantity < kQuantities; quantity++) {
            for (int pool = 0; pool < kPools; pool++) {
              const Counter& counter = memories[device].counters[quantity][pool];
              stats[kNames[quantity]][pools[pool]] = {{"current", counter.current},
                                                      {"peak", counter.peak},
                                                      {"allocated", counter.allocated},
                                                      {"freed", counter.freed}};
            }
          }
          return stats;
        }));
  m.def("reset_peak", locked([](DeviceIndex device) {
          for (auto& quantity : memories[device].counters) {
            for (auto& counter : quantity) counter.peak = counter.current;
          }
        }));
  m.def("empty_cache", [] {
    check_host_may_wait("the allocator gives its cache back");
    Lock lock(device_mutex);
    for (DeviceIndex device = 0; device < kDevices; device++) empty_cache(device);
  });
  m.def("set_limit", [](DeviceIndex device, int64_t nbytes) {
    Lock lock(device_mutex);
    memories[device].limit = nbytes;
  });
  m.def("set_allowed", [](DeviceIndex device, int64_t nbytes) {
    Lock lock(device_mutex);
    memories[device].allowed = nbytes;
  });
  m.def("limit", locked([](DeviceIndex device) { return memories[device].limit; }));
  m.def("resize_storage", &resize_storage);

  m.def("is_capturing", [] { return is_captured(current_queue(current_device)); });
  m.def("new_pool", [] { return ++last_pool; });
  m.def("begin_capture", [](int64_t pool) {
    Lock lock(device_mutex);
    begin_capture(current_queue(current_device), pool);
  });
  m.def("end_capture", [] {
    Lock lock(device_mutex);
    return end_capture(current_queue(current_device));
  });
  m.def("replay_graph", [](int64_t id) { replay_graph(id, current_queue(current_device)); });
  m.def("drop_graph", &drop_graph);
  m.def("set_in_kernel", [](bool on) { return std::exchange(in_kernel, on); });
  m.def("is_recorded", [](DeviceIndex device) { return is_recorded(current_queue(device)); });
  m.def("borrowed", [](const Tensor& tensor) { return borrowed(tensor); });
  m.def("generator_offset", [](DeviceIndex device) {
    return static_cast<Generator*>(default_generator(device).unsafeGetGeneratorImpl())->offset();
  });
  m.def("record_call", [](std::function<void()> call, DeviceIndex device, uint64_t offset) {
    record(std::move(call), default_generator(device), offset);
  });
  m.def("segments", [] {
    Lock lock(device_mutex);
    return segments();
  });
  m.def("set_cudnn", [](long version) { cudnn_version = version; });
  m.def("set_workspace", [](size_t nbytes) {
    clear_workspaces();
    workspace_nbytes = nbytes;
  });
  m.def("clear_workspaces", &clear_workspaces);
  m.def("set_slack", [](int64_t nbytes) {
    Lock lock(device_mutex);
    slack_nbytes = nbytes;
  });
  m.def("set_reports", [](bool on) {
    Lock lock(device_mutex);
    reports = on;
  });
  m.def("host_memory_group", &host_memory_group);
  m.def("take_races", [] {
    Lock lock(device_mutex);
    return std::exchange(races, {});
  });
}
