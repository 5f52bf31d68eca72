// The choice of an attention kernel on the stand-in, for the real `scaled_dot_product_attention` above it.
//
// What the kernels have in common is in a header of torch's, which is used as it is. What only a build with CUDA
// has (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp) is written out here, apart from the profiler's rules.

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include <atomic>

namespace {

std::atomic<int64_t> capability{90};  // 10 * major + minor

void set_capability(int64_t major, int64_t minor) { capability = 10 * major + minor; }

bool half(const sdp::sdp_params& p) {
  const auto type = p.query.scalar_type();
  return (type == at::kHalf || type == at::kBFloat16) && p.key.scalar_type() == type && p.value.scalar_type() == type;
}

bool cudnn(const sdp::sdp_params& p) {
  const auto& context = at::globalContext();
  const auto version = at::detail::getCUDAHooks().hasCuDNN() ? at::detail::getCUDAHooks().versionRuntimeCuDNN() : 0;
  const bool deterministic = context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
  if (version < 90000 || !context.userEnabledCuDNNSDP() || deterministic || !half(p)) return false;
  if (p.dropout > 0 && version > 91100 && version < 91400) return false;
  if (!sdp::check_tensor_shapes(p, false) || !sdp::check_attn_mask_shape(p, false)) return false;
  if (p.dropout * 16 != std::floor(p.dropout * 16)) return false;
  if (!sdp::check_nonzero_sequence_lengths_dense(p, false) ||
      !sdp::check_last_dim_stride_equals_1_dense<true>(p, false) ||
      !sdp::check_batch_size_and_num_heads_dense<true, false>(p, false)) {
    return false;
  }
  const int64_t keys = p.query.size(3), values = p.value.size(3);
  const bool wide = capability / 10 == 9 || capability / 10 == 10;
  const int64_t limit = wide && version >= 91100 && keys == 192 && values == 128 ? 192 : 128;
  return keys <= limit && values <= limit && keys % 8 == 0 && values % 8 == 0 && p.key.size(2) != 1 &&
         (p.dropout == 0 || p.query.size(2) != 1) && p.query.size(0) <= 65535 && p.query.size(1) <= 65535;
}

bool flash(const sdp::sdp_params& p) {
  if (!at::globalContext().userEnabledFlashSDP() || capability < 80 || !half(p)) return false;
  if (!sdp::check_tensor_shapes(p, false) || !sdp::check_for_attn_mask(p, false)) return false;
  const int64_t head = p.query.size(3);
  if (p.key.size(3) != head || p.value.size(3) != head || head > 256) return false;
  const bool small = (capability >= 86 && capability <= 89) || capability / 10 == 12;
  if (small && sdp::input_requires_grad(p) && head > 192 && (p.dropout > 0 || head <= 224)) return false;
  if (p.is_causal && p.query.size(2) != p.key.size(2)) return false;
  return sdp::check_batch_size_and_num_heads_dense<true>(p, false) &&
         sdp::check_nonzero_sequence_lengths_dense(p, false) &&
         sdp::check_last_dim_stride_equals_1_dense<true>(p, false);
}

bool efficient(const sdp::sdp_params& p) {
  const auto type = p.query.scalar_type();
  if (!at::globalContext().userEnabledMemEfficientSDP() || !sdp::check_tensor_shapes(p, false)) return false;
  if (type != p.key.scalar_type() || type != p.value.scalar_type() || !(half(p) || type == at::kFloat)) return false;
  const int64_t alignment = half(p) ? 8 : 4, head = p.query.size(3);
  if (head != p.key.size(3) || !head || head % alignment || !p.value.size(3) || p.value.size(3) % alignment) {
    return false;
  }
  return sdp::check_nonzero_sequence_lengths_dense(p, false) &&
         sdp::check_last_dim_stride_equals_1_dense<false>(p, false) &&
         sdp::check_batch_size_and_num_heads_dense<false>(p, false);
}

int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double>,
               bool grouped) {
  const sdp::sdp_params p{query, key, value, mask, dropout, causal, grouped};
  const auto& hooks = at::detail::getCUDAHooks();
  const bool prefers_cudnn =
      (capability / 10 == 9 || capability / 10 == 10) && hooks.hasCuDNN() && hooks.versionRuntimeCuDNN() > 91500;
  using at::SDPBackend;
  if (prefers_cudnn && cudnn(p)) return int64_t(SDPBackend::cudnn_attention);
  if (flash(p)) return int64_t(SDPBackend::flash_attention);
  if (efficient(p)) return int64_t(SDPBackend::efficient_attention);
  if (at::globalContext().userEnabledMathSDP()) return int64_t(SDPBackend::math);
  if (cudnn(p)) return int64_t(SDPBackend::cudnn_attention);
  return int64_t(SDPBackend::error);
}

}  // namespace

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose)
}

TORCH_LIBRARY(standin, m) { m.def("set_capability(int major, int minor) -> ()", &set_capability); }
