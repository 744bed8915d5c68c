// The weights of a decoder, packed from the tensors of a file under the project's own names for them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "linear/linear.h"

namespace outrider {

struct Shape {
  int vocabulary, hidden, layers, heads, kv_heads, head_dim, intermediate;
  float norm_eps;
};

struct Layer {
  std::vector<float> attn_norm, mlp_norm, q_norm, k_norm;  // the last two are empty but in Qwen3
  Linear qkv;      // q, k and v stacked
  Linear o;
  Linear gate_up;  // paired, for SwiGLU
  Linear down;
};

struct Weights {
  Shape shape;
  Source embed;  // [V, D]; rows are dequantised when they are used, so its memory must stay
  std::vector<Layer> layers;
  std::vector<float> norm;
  Linear head;

  std::size_t bytes() const;  // of the packed layers and the head
};

using Tensors = std::map<std::string, Source>;       // "layers.0.q" ...; vectors are matrices of one row
using Formats = std::map<std::string, Format>;       // "layers.0.qkv", "layers.0.o", ".gate_up", ".down", "head"

// Throws std::invalid_argument that names a tensor which is missing or has another shape than `shape` says.
Weights pack_weights(const Shape& shape, const Tensors& tensors, const Formats& formats, int threads);

}  // namespace outrider
