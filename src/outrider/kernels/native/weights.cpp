#include "weights.h"

#include <memory>
#include <stdexcept>
#include <utility>

namespace outrider {
namespace {

// Reads one model: knows where everything is and what shape it must have.
class Packer {
 public:
  Packer(const Tensors& tensors, const Formats& formats, int threads)
      : tensors_(tensors), formats_(formats), threads_(threads) {}

  bool has(const std::string& name) const { return tensors_.contains(name); }

  const Source& matrix(const std::string& name, std::int64_t rows, std::int64_t columns) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) throw std::invalid_argument("tensor " + name + " is missing");
    const Source& source = found->second;
    if (source.rows != rows || source.columns != columns) {
      throw std::invalid_argument("tensor " + name + " is [" + std::to_string(source.rows) + ", " +
                                  std::to_string(source.columns) + "], not [" + std::to_string(rows) + ", " +
                                  std::to_string(columns) + "]");
    }
    return source;
  }

  std::vector<float> vector(const std::string& name, std::int64_t count) const {
    const Source& source = matrix(name, 1, count);
    std::vector<float> values(count);
    dequantise(source.kind, source.data, count, values.data());
    return values;
  }

  std::vector<float> vector_if_any(const std::string& name, std::int64_t count) const {
    return has(name) ? vector(name, count) : std::vector<float>{};
  }

  Linear linear(const std::string& name, const std::vector<Source>& sources, const std::vector<float>& bias = {},
                bool paired = false) const {
    const auto format = formats_.find(name);
    if (format == formats_.end()) throw std::invalid_argument("no format is given for " + name);
    LinearOptions options;
    options.paired = paired;
    options.threads = threads_;
    options.arena = arena_;
    try {
      return Linear(format->second, sources, bias.empty() ? nullptr : bias.data(), options);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(name + ": " + error.what());
    }
  }

 private:
  const Tensors& tensors_;
  const Formats& formats_;
  int threads_;
  std::shared_ptr<Arena> arena_ = std::make_shared<Arena>();  // layers lie in the order in which they are read
};

// `inputs` are the columns of q, k and v. Only the first layer of an EAGLE head may lack a norm before them.
Layer pack_layer(const Packer& packer, const Shape& shape, const std::string& prefix, std::int64_t inputs,
                 bool may_lack_norm) {
  const std::int64_t D = shape.hidden, I = shape.intermediate, d = shape.head_dim;
  const std::int64_t q = shape.heads * d, kv = shape.kv_heads * d;
  Layer layer;
  if (!may_lack_norm || packer.has(prefix + "attn_norm")) layer.attn_norm = packer.vector(prefix + "attn_norm", D);
  layer.mlp_norm = packer.vector(prefix + "mlp_norm", D);
  layer.q_norm = packer.vector_if_any(prefix + "q_norm", d);
  layer.k_norm = packer.vector_if_any(prefix + "k_norm", d);

  std::vector<float> bias;
  if (packer.has(prefix + "q_bias") || packer.has(prefix + "k_bias") || packer.has(prefix + "v_bias")) {
    for (const auto& [name, count] : {std::pair{"q_bias", q}, {"k_bias", kv}, {"v_bias", kv}}) {
      auto part = packer.vector_if_any(prefix + name, count);
      part.resize(count, 0.0f);
      bias.insert(bias.end(), part.begin(), part.end());
    }
  }
  layer.qkv = packer.linear(prefix + "qkv",
                            {packer.matrix(prefix + "q", q, inputs), packer.matrix(prefix + "k", kv, inputs),
                             packer.matrix(prefix + "v", kv, inputs)},
                            bias);
  layer.o = packer.linear(prefix + "o", {packer.matrix(prefix + "o", D, q)});
  layer.gate_up = packer.linear(prefix + "gate_up",
                                {packer.matrix(prefix + "gate", I, D), packer.matrix(prefix + "up", I, D)}, {}, true);
  layer.down = packer.linear(prefix + "down", {packer.matrix(prefix + "down", D, I)});
  return layer;
}

void pack_fusion(const Packer& packer, std::int64_t D, Fusion& fusion) {
  const std::int64_t states = fusion.states;
  fusion.input_norm = packer.vector_if_any("input_norm", states);
  if (fusion.version == 3) {
    fusion.embed_norm = packer.vector("layers.0.embed_norm", D);
    fusion.hidden_norm = packer.vector("layers.0.hidden_norm", D);
  } else {
    fusion.embed_norm = packer.vector_if_any("embed_norm", D);
  }
  fusion.fc = packer.linear("fc", {packer.matrix("fc", D, fusion.version == 3 ? states : 2 * D)},
                            packer.vector_if_any("fc_bias", D));
}

}  // namespace

std::size_t Weights::bytes() const {
  std::size_t bytes = (shared_head ? 0 : head.bytes()) + fusion.fc.bytes();
  for (const Layer& layer : layers) {
    bytes += layer.qkv.bytes() + layer.o.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  }
  return bytes;
}

Weights pack_weights(const Shape& shape, Fusion fusion, const Tensors& tensors, const Formats& formats, int threads,
                     const Linear* head) {
  const Packer packer(tensors, formats, threads);
  Weights weights;
  weights.shape = shape;
  weights.embed = packer.matrix("embed", shape.vocabulary, shape.hidden);
  weights.norm = fusion.version ? packer.vector_if_any("norm", shape.hidden) : packer.vector("norm", shape.hidden);
  if (fusion.version) pack_fusion(packer, shape.hidden, fusion);
  weights.layers.reserve(shape.layers);
  for (int i = 0; i < shape.layers; ++i) {
    const bool first = i == 0 && fusion.version;
    const std::int64_t inputs = first && fusion.version == 3 ? 2 * shape.hidden : shape.hidden;
    weights.layers.push_back(pack_layer(packer, shape, "layers." + std::to_string(i) + ".", inputs, first));
  }
  weights.fusion = std::move(fusion);
  weights.shared_head = head != nullptr;
  const std::string name = packer.has("head") ? "head" : "embed";  // tied
  weights.head = head ? *head : packer.linear("head", {packer.matrix(name, shape.outputs, shape.hidden)});
  return weights;
}

}  // namespace outrider
