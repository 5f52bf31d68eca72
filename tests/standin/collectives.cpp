// Collectives between the devices of several processes: in the order of a stream, as NCCL's, over gloo.
//
// An asynchronous collective runs on a stream of the group's own, which waits for the current one; a stream that
// uses its results must wait for the work. A replay of a graph exchanges again. What gloo exchanges are copies in host memory. The host does not wait
// for the copies, so streams that lack an event race here as everywhere (streams.h).

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "collectives.h"

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace {

// Holds the tensors until a stream has waited for the work, as NCCL does.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(OpType type, c10::intrusive_ptr<c10::ivalue::Future> future, Tensors inputs)
      : Work(-1, type), future_(std::move(future)), inputs_(std::move(inputs)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    future_->wait();
    inputs_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  Tensors inputs_;
};

// Makes a stream the current one of its device.
class OnStream {
 public:
  OnStream(const c10::impl::VirtualGuardImpl& device, c10::Stream stream)
      : device_(device), before_(device.exchangeStream(stream)) {}
  ~OnStream() { device_.exchangeStream(before_); }

 private:
  const c10::impl::VirtualGuardImpl& device_;
  c10::Stream before_;
};

Tensors hosts_of(const Tensors& tensors, bool copied) {
  Tensors hosts;
  for (const auto& tensor : tensors) {
    auto host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
    if (copied) host.copy_(tensor, /*non_blocking=*/true);
    hosts.push_back(host);
  }
  return hosts;
}

class HostMemoryGroup final : public c10d::Backend {
 public:
  explicit HostMemoryGroup(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "standin"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(OpType::BROADCAST, options.asyncOp, tensors, tensors,
               [=, this](Tensors& in, Tensors& out) { return wait(gloo_->broadcast(in, options), in, out); });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(OpType::ALLREDUCE, options.asyncOp, tensors, tensors, [=, this](Tensors& in, Tensors& out) {
      auto sum = options;
      sum.reduceOp = sum_of(options.reduceOp);
      wait(gloo_->allreduce(in, sum), in, out);
      average(options.reduceOp, out);
    });
  }

  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(OpType::ALLGATHER, options.asyncOp, inputs, outputs.at(0), [=, this](Tensors& in, Tensors& out) {
      Lists lists{out};
      gloo_->allgather(lists, in, options)->wait();
    });
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return run(OpType::_ALLGATHER_BASE, options.asyncOp, {input}, {output}, [=, this](Tensors& in, Tensors& out) {
      gloo_->_allgather_base(out[0], in[0], options)->wait();
    });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return run(OpType::COALESCED, options.asyncOp, inputs, outputs, [=, this](Tensors& in, Tensors& out) {
      for (size_t i = 0; i < in.size(); i++) gloo_->_allgather_base(out[i], in[i], options)->wait();
    });
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_all(OpType::_REDUCE_SCATTER_BASE, {output}, {input}, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_all(OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs, inputs, options);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    for (const auto device : c10::irange(device_.deviceCount())) device_.synchronizeDevice(device);
    return gloo_->barrier(options);
  }

 private:
  static ReduceOp sum_of(const ReduceOp& op) { return op == ReduceOp::AVG ? ReduceOp(ReduceOp::SUM) : op; }

  void average(const ReduceOp& op, Tensors& sums) {
    if (op != ReduceOp::AVG) return;
    for (auto& sum : sums) sum.div_(getSize());
  }

  static void wait(const WorkPtr& work, const Tensors& in, Tensors& out) {
    work->wait();
    out = in;
  }

  WorkPtr reduce_scatter_all(OpType type, const Tensors& outputs, const Tensors& inputs,
                             const c10d::ReduceScatterOptions& options) {
    return run(type, options.asyncOp, inputs, outputs, [=, this](Tensors& in, Tensors& out) {
      auto sum = options;
      sum.reduceOp = sum_of(options.reduceOp);
      for (size_t i = 0; i < in.size(); i++) gloo_->_reduce_scatter_base(out[i], in[i], sum)->wait();
      average(options.reduceOp, out);
    });
  }

  // Run `exchange` on copies of the tensors in host memory.
  template <typename Exchange>
  WorkPtr run(OpType type, bool async, const Tensors& inputs, const Tensors& outputs, Exchange exchange) {
    // NCCL's kernels are no ops: neither autograd nor a mode sees them.
    c10::impl::ExcludeDispatchKeyGuard unseen(
        c10::autograd_dispatch_keyset_with_ADInplaceOrView |
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    const auto device = outputs.at(0).device();
    const OnStream order(device_, async ? stream_after_current(device) : device_.getStream(device));
    auto hosts = std::make_shared<std::pair<Tensors, Tensors>>(hosts_of(inputs, true), hosts_of(outputs, false));
    run_or_record(device, [exchange, hosts] { exchange(hosts->first, hosts->second); });
    for (size_t i = 0; i < outputs.size(); i++) outputs[i].copy_(hosts->second[i], /*non_blocking=*/true);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::vector{device});
    future->markCompleted(c10::IValue(outputs));
    return c10::make_intrusive<StreamWork>(type, std::move(future), async ? inputs : Tensors());
  }

  c10::Stream stream_after_current(c10::Device device) {
    auto [found, added] = streams_.try_emplace(device.index(), c10::Stream::UNSAFE, device, 0);
    if (added) found->second = device_.getNewStream(device);
    void* event = nullptr;
    device_.record(&event, device_.getStream(device), device.index(), c10::EventFlag::PYTORCH_DEFAULT);
    device_.block(event, found->second);
    device_.destroyEvent(event, device.index());
    return found->second;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::impl::VirtualGuardImpl device_{c10::DeviceType::CUDA};
  std::map<c10::DeviceIndex, c10::Stream> streams_;  // of the group
};

}  // namespace

namespace c10d {

// DistributedDataParallel asks for it.
struct DeviceTimer final : Timer {
  explicit DeviceTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional(*to - *from) : std::nullopt;
  }
};

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, DeviceTimer)

}  // namespace c10d

c10::intrusive_ptr<c10d::Backend> host_memory_group(c10::intrusive_ptr<c10d::Backend> gloo) {
  return c10::make_intrusive<HostMemoryGroup>(std::move(gloo));
}
