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
  int outputs;  // rows of the head; fewer than `vocabulary` in drafts that guess some tokens only
};

struct Layer {
  std::vector<float> attn_norm, mlp_norm, q_norm, k_norm;  // empty: none. The last two are Qwen3's
  Linear qkv;      // q, k and v stacked
  Linear o;
  Linear gate_up;  // paired, for SwiGLU
  Linear down;
};

// How an EAGLE head (Li et al. 2024, 2025) reads a target's states beside the embedding. Version 1 has
// x = fc(embedding, state). Version 3 has x = fc(states of W layers) for rows that the target has computed, and the
// state itself for guessed ones; its first layer's q, k and v read norm(embedding) and norm(x) side by side.
struct Fusion {
  int version = 0;  // 0: a plain decoder, 1 or 3
  int states = 0;   // floats of the target's states at a row: W * D
  bool normed_residual = false;            // version 3: the first layer's residual is norm(x)
  std::vector<float> input_norm;           // [states] before fc, or empty
  std::vector<float> embed_norm, hidden_norm;  // version 1 has the first or none
  Linear fc;
};

struct Weights {
  Shape shape;
  Fusion fusion;
  Source embed;  // [V, D]; rows are dequantised when they are used, so its memory must stay
  std::vector<Layer> layers;
  std::vector<float> norm;  // empty in EAGLE-1: the target's head reads the states as they are
  Linear head;
  bool shared_head = false;  // with the target

  std::size_t bytes() const;  // of the packed layers and the head
};

using Tensors = std::map<std::string, Source>;       // "layers.0.q" ...; vectors are matrices of one row
using Formats = std::map<std::string, Format>;       // "layers.0.qkv", "layers.0.o", ".gate_up", ".down", "head"

// `fusion` has the numbers of an EAGLE head. `head` replaces a head that the tensors lack: it is shared, not copied.
// Throws std::invalid_argument that names a tensor which is missing or has another shape than `shape` says.
Weights pack_weights(const Shape& shape, Fusion fusion, const Tensors& tensors, const Formats& formats, int threads,
                     const Linear* head = nullptr);

}  // namespace outrider
