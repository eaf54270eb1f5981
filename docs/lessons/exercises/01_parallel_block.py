"""Exercise 1: attention and MLP read the same stream and are added together (PaLM, arXiv 2204.02311, section 2).

    python docs/lessons/exercises/01_parallel_block.py

Compares a layer with the sum, written down once more from its own parts.
"""

import torch
from exercise import expect

from layouts import tiny_config
from model import DecoderLayer, rotary_tables

torch.manual_seed(0)
config = tiny_config()
layer, tables = DecoderLayer(config).double(), rotary_tables(config)
x = torch.randn(2, 16, config.hidden_size, dtype=torch.float64)

beside = x + layer.attention(layer.input_layernorm(x), *tables) + layer.mlp(layer.post_attention_layernorm(x))
difference = (layer(x, *tables) - beside).abs().max().item()
expect(
    difference < 1e-12,
    f"DecoderLayer is {difference:.2g} away from x + attention(norm(x)) + mlp(norm(x)); "
    "the MLP still reads what attention has added",
)
expect(layer.post_attention_layernorm.weight.requires_grad, "both norms stay: checkpoints keep their names")
print(f"right: attention and MLP both read x, difference {difference:.1g}")
