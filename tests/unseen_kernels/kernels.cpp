// Kernels that PyTorch does not dispatch, as Triton's and pybind's are on a GPU: they get plain pointers.
//
// Each takes the code of its type first, and sums in float, or in double for double.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

struct BFloat16 {
  uint16_t bits = 0;
  BFloat16() = default;
  BFloat16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    bits = static_cast<uint16_t>((word + 0x7FFF + ((word >> 16) & 1)) >> 16);  // to nearest, ties to even
  }
  operator float() const {
    uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
};

template <class T> struct Sum { using type = float; };
template <> struct Sum<double> { using type = double; };
template <class T> using sum_of = typename Sum<T>::type;

template <class Body> void with_type(int64_t code, Body body) {
  if (code == 0) body(float{});
  if (code == 1) body(double{});
  if (code == 2) body(BFloat16{});
}

template <class S> S sigmoid(S x) { return S(1) / (S(1) + std::exp(-x)); }

uint64_t generator = 0;

}  // namespace

extern "C" {

void scale(int64_t code, void* y, void* x, int64_t n, double factor) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    for (int64_t i = 0; i < n; i++) static_cast<T*>(y)[i] = T(sum_of<T>(static_cast<T*>(x)[i]) * sum_of<T>(factor));
  });
}

// In place on a window of two dimensions, whatever its strides: y = factor * y + shift.
void affine_window(int64_t code, void* y, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
                   double factor, double shift) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) {
        T& value = static_cast<T*>(y)[i * row_stride + j * column_stride];
        value = T(sum_of<T>(value) * sum_of<T>(factor) + sum_of<T>(shift));
      }
  });
}

// In place: the same elements in the opposite order. No sum over them changes.
void reverse(int64_t code, void* y, int64_t n) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    for (int64_t i = 0; i < n / 2; i++) std::swap(static_cast<T*>(y)[i], static_cast<T*>(y)[n - 1 - i]);
  });
}

void positive_mask(int64_t code, void* mask, void* x, int64_t n) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    for (int64_t i = 0; i < n; i++) static_cast<uint8_t*>(mask)[i] = sum_of<T>(static_cast<T*>(x)[i]) > 0;
  });
}

// The columns of each row in ascending order of their values, as int64.
void row_order(int64_t code, void* order, void* x, int64_t rows, int64_t columns) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    for (int64_t i = 0; i < rows; i++) {
      T* row = static_cast<T*>(x) + i * columns;
      int64_t* out = static_cast<int64_t*>(order) + i * columns;
      for (int64_t j = 0; j < columns; j++) {
        int64_t at = j;
        for (; at > 0 && sum_of<T>(row[out[at - 1]]) > sum_of<T>(row[j]); at--) out[at] = out[at - 1];
        out[at] = j;
      }
    }
  });
}

void rms_norm(int64_t code, void* y, void* rstd, void* x, void* weight, int64_t rows, int64_t columns) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    using S = sum_of<T>;
    T* w = static_cast<T*>(weight);
    for (int64_t i = 0; i < rows; i++) {
      T *in = static_cast<T*>(x) + i * columns, *out = static_cast<T*>(y) + i * columns;
      S square = 0;
      for (int64_t j = 0; j < columns; j++) square += S(in[j]) * S(in[j]);
      S r = S(1) / std::sqrt(square / S(columns) + S(1e-6));
      static_cast<T*>(rstd)[i] = T(r);
      for (int64_t j = 0; j < columns; j++) out[j] = T(S(in[j]) * r * S(w[j]));
    }
  });
}

void rms_norm_backward(int64_t code, void* dx, void* dweight, void* dy, void* x, void* weight, void* rstd,
                       int64_t rows, int64_t columns) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    using S = sum_of<T>;
    T* w = static_cast<T*>(weight);
    std::vector<S> sums(columns, S(0));
    for (int64_t i = 0; i < rows; i++) {
      T *in = static_cast<T*>(x) + i * columns, *g = static_cast<T*>(dy) + i * columns;
      T* out = static_cast<T*>(dx) + i * columns;
      S r = S(static_cast<T*>(rstd)[i]), dot = 0;
      for (int64_t j = 0; j < columns; j++) dot += S(g[j]) * S(w[j]) * S(in[j]);
      for (int64_t j = 0; j < columns; j++) {
        S gradient = S(g[j]), value = S(in[j]);  // `out` may be `g`
        sums[j] += gradient * value * r;
        out[j] = T(r * (gradient * S(w[j]) - value * r * r * dot / S(columns)));
      }
    }
    for (int64_t j = 0; j < columns; j++) static_cast<T*>(dweight)[j] = T(sums[j]);
  });
}

void swiglu(int64_t code, void* y, void* gate, void* up, int64_t n) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    using S = sum_of<T>;
    for (int64_t i = 0; i < n; i++) {
      S g = S(static_cast<T*>(gate)[i]);
      static_cast<T*>(y)[i] = T(g * sigmoid(g) * S(static_cast<T*>(up)[i]));
    }
  });
}

// The gradients may be written over `gate` and `up`, as Liger does.
void swiglu_backward(int64_t code, void* dgate, void* dup, void* dy, void* gate, void* up, int64_t n) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    using S = sum_of<T>;
    for (int64_t i = 0; i < n; i++) {
      S g = S(static_cast<T*>(gate)[i]), u = S(static_cast<T*>(up)[i]), d = S(static_cast<T*>(dy)[i]);
      S s = sigmoid(g);
      static_cast<T*>(dgate)[i] = T(d * u * s * (S(1) + g * (S(1) - s)));
      static_cast<T*>(dup)[i] = T(d * g * s);
    }
  });
}

// In place: turn the two halves of each head by the angle of its row; `sign` -1 turns back.
void rotate(int64_t code, void* x, void* cosines, void* sines, int64_t rows, int64_t heads, int64_t half,
            int64_t row_stride, int64_t positions, double sign) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    using S = sum_of<T>;
    for (int64_t i = 0; i < rows; i++)
      for (int64_t h = 0; h < heads; h++)
        for (int64_t j = 0; j < half; j++) {
          T& low = static_cast<T*>(x)[i * row_stride + h * 2 * half + j];
          T& high = static_cast<T*>(x)[i * row_stride + h * 2 * half + half + j];
          S c = S(static_cast<float*>(cosines)[(i % positions) * half + j]);
          S s = S(sign) * S(static_cast<float*>(sines)[(i % positions) * half + j]);
          S a = S(low), b = S(high);
          low = T(a * c - b * s);
          high = T(b * c + a * s);
        }
  });
}

// The loss of each row, and its gradient, which may be written over the logits.
void cross_entropy(int64_t code, void* losses, void* gradient, void* logits, void* targets, int64_t rows,
                   int64_t columns) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    using S = sum_of<T>;
    for (int64_t i = 0; i < rows; i++) {
      T *in = static_cast<T*>(logits) + i * columns, *out = static_cast<T*>(gradient) + i * columns;
      int64_t target = static_cast<int64_t*>(targets)[i];
      S most = S(in[0]), sum = 0, chosen = S(in[target]);
      for (int64_t j = 1; j < columns; j++) most = S(in[j]) > most ? S(in[j]) : most;
      for (int64_t j = 0; j < columns; j++) sum += std::exp(S(in[j]) - most);
      static_cast<T*>(losses)[i] = T(most + std::log(sum) - chosen);
      for (int64_t j = 0; j < columns; j++)
        out[j] = T((std::exp(S(in[j]) - most) / sum - S(j == target)) / S(rows));
    }
  });
}

// Causal attention of [heads, length, size] tensors, with the logarithm of each row's sum.
void attention(int64_t code, void* y, void* lse, void* q, void* k, void* v, int64_t heads, int64_t length,
               int64_t size) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    using S = sum_of<T>;
    S factor = S(1) / std::sqrt(S(size));
    std::vector<S> scores(length), row(size);
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = 0; i < length; i++) {
        T *queries = static_cast<T*>(q) + (h * length + i) * size, *keys = static_cast<T*>(k) + h * length * size;
        T *values = static_cast<T*>(v) + h * length * size, *out = static_cast<T*>(y) + (h * length + i) * size;
        S most = S(-1e30), sum = 0;
        for (int64_t j = 0; j <= i; j++) {
          scores[j] = 0;
          for (int64_t d = 0; d < size; d++) scores[j] += S(queries[d]) * S(keys[j * size + d]) * factor;
          most = scores[j] > most ? scores[j] : most;
        }
        for (int64_t d = 0; d < size; d++) row[d] = 0;
        for (int64_t j = 0; j <= i; j++) {
          S weight = std::exp(scores[j] - most);
          sum += weight;
          for (int64_t d = 0; d < size; d++) row[d] += weight * S(values[j * size + d]);
        }
        for (int64_t d = 0; d < size; d++) out[d] = T(row[d] / sum);
        static_cast<S*>(lse)[h * length + i] = most + std::log(sum);
      }
  });
}

void attention_backward(int64_t code, void* dq, void* dk, void* dv, void* dy, void* y, void* lse, void* q, void* k,
                        void* v, int64_t heads, int64_t length, int64_t size) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    using S = sum_of<T>;
    S factor = S(1) / std::sqrt(S(size));
    int64_t n = length * size;
    for (int64_t h = 0; h < heads; h++) {
      std::vector<S> to_q(n, S(0)), to_k(n, S(0)), to_v(n, S(0));
      auto part = [&](void* tensor) { return static_cast<T*>(tensor) + h * n; };
      for (int64_t i = 0; i < length; i++) {
        S delta = 0;
        for (int64_t d = 0; d < size; d++) delta += S(part(dy)[i * size + d]) * S(part(y)[i * size + d]);
        for (int64_t j = 0; j <= i; j++) {
          S score = 0, along = 0;
          for (int64_t d = 0; d < size; d++) {
            score += S(part(q)[i * size + d]) * S(part(k)[j * size + d]) * factor;
            along += S(part(dy)[i * size + d]) * S(part(v)[j * size + d]);
          }
          S weight = std::exp(score - static_cast<S*>(lse)[h * length + i]);
          for (int64_t d = 0; d < size; d++) {
            to_v[j * size + d] += weight * S(part(dy)[i * size + d]);
            to_q[i * size + d] += weight * (along - delta) * factor * S(part(k)[j * size + d]);
            to_k[j * size + d] += weight * (along - delta) * factor * S(part(q)[i * size + d]);
          }
        }
      }
      for (int64_t i = 0; i < n; i++) {
        part(dq)[i] = T(to_q[i]);
        part(dk)[i] = T(to_k[i]);
        part(dv)[i] = T(to_v[i]);
      }
    }
  });
}

void seed_noise(int64_t seed) { generator = static_cast<uint64_t>(seed) * 2 + 1; }

// y = x * a number in [0.5, 1.5) from a generator that PyTorch does not know.
void noise(int64_t code, void* y, void* x, int64_t n) {
  with_type(code, [&](auto t) {
    using T = decltype(t);
    for (int64_t i = 0; i < n; i++) {
      generator = generator * 6364136223846793005ULL + 1442695040888963407ULL;
      float factor = 0.5f + static_cast<float>(generator >> 40) / static_cast<float>(1 << 24);
      static_cast<T*>(y)[i] = T(sum_of<T>(static_cast<T*>(x)[i]) * sum_of<T>(factor));
    }
  });
}

}  // extern "C"
