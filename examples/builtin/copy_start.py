"""Starting weights that already copy: an induction circuit set by hand in an otherwise random Llama model.

Copying is most of the built-in task, and a small model finds it late when left alone. So the first layer starts with
a head that looks at the token before, and each later layer with heads that look for an earlier place where the present
token was followed by something, and repeat what followed (Elhage et al., "A Mathematical Framework for Transformer
Circuits", 2021; Olsson et al., "In-context Learning and Induction Heads", 2022). Training is free to change all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

EMBEDDING_STD = 0.05
CONSTANT = 0.25  # dimension 0 of every embedding: what the look-back head's queries and keys are made of


def _orthonormal(rows: int, columns: int) -> Tensor:
    """[rows, columns] with orthonormal rows that leave dimension 0 (the constant) alone."""
    basis = torch.linalg.qr(torch.randn(columns - 1, columns - 1))[0][:rows]
    return torch.cat([torch.zeros(rows, 1), basis], dim=1)


@torch.no_grad()
def start_copying(model: LlamaForCausalLM, heads: int) -> None:
    """Set the weights of a fresh model in place; `heads` copying heads in each layer after the first."""
    config = model.config
    width, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    half = head // 2
    frequencies = 10_000.0 ** (-torch.arange(half) / half)

    embedding = model.get_input_embeddings().weight
    embedding.normal_(0, EMBEDDING_STD)
    embedding[:, 0] = CONSTANT
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj,
                       layer.mlp.gate_proj, layer.mlp.up_proj):  # fmt: skip
            linear.weight.normal_(0, 0.5 * linear.in_features**-0.5)
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.normal_(0, 0.05 * linear.in_features**-0.5)

    # Look back by one: the key is the query's vector turned by one position, so their product peaks at distance 1.
    tokens, before = _orthonormal(head, width), _orthonormal(head, width)
    first = model.model.layers[0].self_attn
    norm = (width * EMBEDDING_STD**2 + CONSTANT**2) ** 0.5 / width**0.5
    size = 6.4 / (CONSTANT / norm)
    fast = torch.arange(half) < half // 2
    for linear, turn in ((first.q_proj, torch.zeros(half)), (first.k_proj, frequencies)):
        linear.weight[:head] = 0
        linear.weight[:half, 0] = size * torch.cos(turn) * fast
        linear.weight[half:head, 0] = size * torch.sin(turn) * fast
    first.v_proj.weight[:head] = tokens
    first.o_proj.weight[:, :head] = 0.06 * before.T

    # Look for a place whose token before is the present token; only the slowly turning pairs compare contents.
    slow = torch.cat([~fast, ~fast])
    for layer in list(model.model.layers)[1:]:
        attention = layer.self_attn
        for i in range(heads):
            rows = slice(i * head, (i + 1) * head)
            attention.q_proj.weight[rows] = 1.7 * tokens * slow[:, None]
            attention.k_proj.weight[rows] = 1.7 * before * slow[:, None]
            values = _orthonormal(head, width)
            attention.v_proj.weight[rows] = values
            attention.o_proj.weight[:, rows] = 0.15 * values.T
