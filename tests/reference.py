"""The paper in plain loops: what every fast path is compared to. Written to be read, not to be fast.

One sentence after the other is stripped of its padding and goes through the model alone; one head after the other
attends to one slot after the other. Everything is float64 and differentiable, so that autograd through these loops
gives the gradients to compare with. The weights are a `LinformerModel`'s state dict.
"""

import math

import torch
import torch.nn.functional as F


ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}


def linear(states, weights, name):
    return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(states, weights, name, config):
    centered = states - states.mean(-1, keepdim=True)
    variance = (centered**2).mean(-1, keepdim=True)
    normal = centered / (variance + config.layer_norm_eps).sqrt()
    return normal * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def projected_length(config, layer):
    lengths = config.projected_length
    return lengths if isinstance(lengths, int) else lengths[layer]


def projection_weight(weights, config, layer, role):
    """What projects the keys or the values ("key" or "value") of one layer; a pooling has no weight."""
    if config.projection_type in ("mean_pooling", "max_pooling"):
        return None
    if config.projection_sharing == "layerwise":
        owner = "encoder.shared_projection"
    elif config.projection_sharing == "key_value":
        owner = f"encoder.layer.{layer}.attention.self.key_projection"
    else:
        owner = f"encoder.layer.{layer}.attention.self.{role}_projection"
    return weights[f"{owner}.weight"]


def project(tokens, weight, config, layer):
    """The slots of one sentence's r tokens (r, channels), and the log of how many tokens each stands for."""
    num_tokens = len(tokens)
    k = projected_length(config, layer)
    slots, log_counts = [], []
    if config.projection_type in ("linear", "random"):
        for slot in range(k):
            slots.append(sum(weight[slot, j] * tokens[j] for j in range(num_tokens)))
            log_counts.append(0.0)
    elif config.projection_type == "convolution":
        stride = math.ceil(config.max_position_embeddings / k)
        for start in range(0, num_tokens, stride):
            window = tokens[start : start + stride]
            slots.append(sum(weight[:, 0, j] * window[j] for j in range(len(window))))
            log_counts.append(0.0)
    else:
        num_slots = min(k, num_tokens)
        for slot in range(num_slots):
            window = torch.stack([tokens[p] for p in range(num_tokens) if p * num_slots // num_tokens == slot])
            slots.append(window.mean(0) if config.projection_type == "mean_pooling" else window.amax(0))
            log_counts.append(math.log(len(window)))
    return torch.stack(slots), tokens.new_tensor(log_counts)


def head_rows(tokens, weights, config, layer, role, head):
    """The projected keys (or values) of one head, and the log counts of its slots."""
    size = config.hidden_size // config.num_attention_heads
    own = slice(head * size, (head + 1) * size)
    name = f"encoder.layer.{layer}.attention.self.{role}"
    matrix, offset = weights[f"{name}.weight"][own], weights[f"{name}.bias"][own]
    weight = projection_weight(weights, config, layer, role)
    if config.projection_sharing == "none" and weight is not None:
        weight = weight[own] if config.projection_type == "convolution" else weight[head]
        rows, log_counts = project(tokens @ matrix.T, weight, config, layer)
        return rows + offset, log_counts
    rows, log_counts = project(tokens, weight, config, layer)
    return rows @ matrix.T + offset, log_counts


def attend(tokens, weights, config, layer):
    """Self-attention of one sentence without padding: (r, c) to (r, c), and the probabilities (h, r, slots)."""
    size = config.hidden_size // config.num_attention_heads
    queries = linear(tokens, weights, f"encoder.layer.{layer}.attention.self.query")
    contexts, probabilities = [], []
    for head in range(config.num_attention_heads):
        keys, log_counts = head_rows(tokens, weights, config, layer, "key", head)
        values, _ = head_rows(tokens, weights, config, layer, "value", head)
        own = queries[:, head * size : (head + 1) * size]
        scores = torch.stack([own @ keys[s] / math.sqrt(size) + log_counts[s] for s in range(len(keys))], -1)
        probabilities.append(scores.softmax(-1))
        contexts.append(sum(probabilities[-1][:, s, None] * values[s] for s in range(len(values))))
    return torch.cat(contexts, -1), torch.stack(probabilities)


def transformer_layer(tokens, weights, config, layer):
    name = f"encoder.layer.{layer}"

    def attention(states):
        return linear(attend(states, weights, config, layer)[0], weights, f"{name}.attention.output.dense")

    def feed_forward(states):
        inner = ACTIVATIONS[config.hidden_act](linear(states, weights, f"{name}.intermediate.dense"))
        return linear(inner, weights, f"{name}.output.dense")

    for function, norm in (
        (attention, f"{name}.attention.output.LayerNorm"),
        (feed_forward, f"{name}.output.LayerNorm"),
    ):
        if config.norm_first:
            tokens = tokens + function(layer_norm(tokens, weights, norm, config))
        else:
            tokens = layer_norm(tokens + function(tokens), weights, norm, config)
    return tokens


def sentence_hidden_states(words, token_types, positions, weights, config):
    """All hidden states of one sentence of r word embeddings (r, c): the embeddings' and then every layer's."""
    embedded = words + weights["embeddings.position_embeddings.weight"][positions]
    embedded = embedded + weights["embeddings.token_type_embeddings.weight"][token_types]
    hidden = [layer_norm(embedded, weights, "embeddings.LayerNorm", config)]
    for layer in range(config.num_hidden_layers):
        hidden.append(transformer_layer(hidden[-1], weights, config, layer))
    if config.norm_first:
        hidden[-1] = layer_norm(hidden[-1], weights, "encoder.LayerNorm", config)
    return hidden


def in_double(state_dict):
    return {name: value.detach().double() for name, value in state_dict.items()}


def real_positions(attention_mask, row, seq_len):
    if attention_mask is None:
        return torch.arange(seq_len)
    return attention_mask[row].bool().nonzero()[:, 0]


def self_attention(weights, config, layer, hidden_states, attention_mask=None):
    """The self-attention of one layer alone, before its output layer: (b, n, c) to (b, n, c), zero where padded."""
    result = torch.zeros_like(hidden_states)
    for row in range(len(hidden_states)):
        real = real_positions(attention_mask, row, hidden_states.shape[1])
        if len(real):
            context, _ = attend(hidden_states[row, real], weights, config, layer)
            result = result.index_put((torch.tensor(row), real), context)
    return result


def linformer(
    weights,
    config,
    input_ids=None,
    attention_mask=None,
    token_type_ids=None,
    position_ids=None,
    inputs_embeds=None,
):
    """The whole encoder: a list of all hidden states, each (b, n, c) and zero at padded positions."""
    if inputs_embeds is None:
        inputs_embeds = weights["embeddings.word_embeddings.weight"][input_ids]
    batch, seq_len, _ = inputs_embeds.shape
    results = [torch.zeros_like(inputs_embeds) for _ in range(config.num_hidden_layers + 1)]
    for row in range(batch):
        real = real_positions(attention_mask, row, seq_len)
        if not len(real):
            continue
        token_types = torch.zeros_like(real) if token_type_ids is None else token_type_ids[row, real]
        positions = torch.arange(len(real))
        if position_ids is not None:
            positions = position_ids.expand(batch, seq_len)[row, real]
        hidden = sentence_hidden_states(inputs_embeds[row, real], token_types, positions, weights, config)
        results = [
            result.index_put((torch.tensor(row), real), states) for result, states in zip(results, hidden, strict=True)
        ]
    return results
