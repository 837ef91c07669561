"""A small encoder of texts."""

import torch
from transformers import AutoTokenizer, BertConfig, BertModel


def write_encoder(folder, tiny_model):
    """Save a random BERT that distinguishes words."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    BertModel(BertConfig(**config, max_position_embeddings=32, initializer_range=1.0)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
