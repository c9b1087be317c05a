"""The paper and the local window in plain loops: what fast paths are compared to. Written to be read, not to be fast.

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


def of_layer(value, layer):
    """One of the fields that are one number, or a list with a number for each layer."""
    return value if isinstance(value, int) else value[layer]


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


def slot_tokens(num_tokens, config, layer):
    """The ranks of the tokens that each slot of a sentence is made of: a list of lists."""
    k = of_layer(config.projected_length, layer)
    if k == 0:
        return []
    if config.projection_type in ("linear", "random"):
        return [list(range(num_tokens)) for _ in range(k)]
    if config.projection_type == "convolution":
        stride = math.ceil(config.max_position_embeddings / k)
        return [list(range(start, min(start + stride, num_tokens))) for start in range(0, num_tokens, stride)]
    num_slots = min(k, num_tokens)
    return [[p for p in range(num_tokens) if p * num_slots // num_tokens == slot] for slot in range(num_slots)]


def project(tokens, weight, config, layer):
    """The slots of one sentence's r tokens: (r, channels) to (slots, channels)."""
    slots = [tokens[:0]]
    for slot, members in enumerate(slot_tokens(len(tokens), config, layer)):
        if config.projection_type in ("linear", "random"):
            content = sum(weight[slot, j] * tokens[j] for j in members)
        elif config.projection_type == "convolution":
            content = sum(weight[:, 0, place] * tokens[j] for place, j in enumerate(members))
        elif config.projection_type == "mean_pooling":
            content = tokens[members].mean(0)
        else:
            content = tokens[members].amax(0)
        slots.append(content[None])
    return torch.cat(slots)


def exact_tokens(query, num_tokens, config, layer):
    """The ranks of the tokens that the token of rank `query` attends to one by one."""
    w, g = of_layer(config.local_attention_window, layer), config.num_global_tokens
    if w == 0:
        return []
    if query < g:
        return list(range(num_tokens))
    around = [p for p in range(num_tokens) if p // w in (query // w - 1, query // w, query // w + 1)]
    return around + [p for p in range(min(g, num_tokens)) if p not in around]


def added_to_score(members, exact, config):
    """What a slot's score gets so that it stands for those of its tokens that are not attended to one by one."""
    rest = [p for p in members if p not in exact]
    if not rest:
        return -math.inf
    return math.log(len(rest)) if config.projection_type in ("mean_pooling", "max_pooling") else 0.0


def keys_or_values(tokens, weights, config, layer, role):
    """The keys, or the values, of one sentence's tokens (r, c) and of its slots (slots, c)."""
    name = f"encoder.layer.{layer}.attention.self"
    matrix, offset = weights[f"{name}.{role}.weight"], weights[f"{name}.{role}.bias"]
    exact = tokens @ matrix.T + offset
    slots = exact[:0]
    has_slots = of_layer(config.projected_length, layer) > 0
    weight = projection_weight(weights, config, layer, role) if has_slots else None
    if config.projection_sharing == "none" and weight is not None:
        heads = []
        for head in range(config.num_attention_heads):
            size = config.hidden_size // config.num_attention_heads
            own = slice(head * size, (head + 1) * size)
            own_weight = weight[own] if config.projection_type == "convolution" else weight[head]
            heads.append(project(tokens @ matrix[own].T, own_weight, config, layer))
        slots = torch.cat(heads, -1) + offset
    elif has_slots:
        slots = project(tokens, weight, config, layer) @ matrix.T + offset
    if config.dual_layer_norm and of_layer(config.local_attention_window, layer) > 0:
        exact = layer_norm(exact, weights, f"{name}.local_norm", config)
        slots = layer_norm(slots, weights, f"{name}.projected_norm", config) if has_slots else slots
    return exact, slots


def attend(tokens, weights, config, layer):
    """Self-attention of one sentence without padding.

    (r, c) to (r, c), and the probabilities that tokens give to tokens (h, r, r) and to slots (h, r, slots).
    """
    size = config.hidden_size // config.num_attention_heads
    queries = linear(tokens, weights, f"encoder.layer.{layer}.attention.self.query")
    token_keys, slot_keys = keys_or_values(tokens, weights, config, layer, "key")
    token_values, slot_values = keys_or_values(tokens, weights, config, layer, "value")
    members = slot_tokens(len(tokens), config, layer)
    contexts = []
    of_tokens = tokens.new_zeros(config.num_attention_heads, len(tokens), len(tokens))
    of_slots = tokens.new_zeros(config.num_attention_heads, len(tokens), len(members))
    for query in range(len(tokens)):
        exact = exact_tokens(query, len(tokens), config, layer)
        bias = tokens.new_tensor([0.0] * len(exact) + [added_to_score(slot, exact, config) for slot in members])
        keys, values = torch.cat([token_keys[exact], slot_keys]), torch.cat([token_values[exact], slot_values])
        heads = []
        for head in range(config.num_attention_heads):
            own = slice(head * size, (head + 1) * size)
            scores = keys[:, own] @ queries[query, own] / math.sqrt(size) + bias
            probabilities = scores.softmax(-1)
            heads.append(probabilities @ values[:, own])
            of_tokens[head, query, exact] = probabilities[: len(exact)].detach()
            of_slots[head, query] = probabilities[len(exact) :].detach()
        contexts.append(torch.cat(heads))
    return torch.stack(contexts), (of_tokens, of_slots)


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
