"""A Llama with random weights and a vocabulary of bytes, in Hugging Face layout: 200 KB, and every path is real."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTEXT = 512
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 2, 1, 32


def write_tiny_model(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(_alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    _write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": True,
            "eos_token_id": end,
        },
    )
    save_file(_tensors(vocab_size), folder / "model.safetensors")
    return folder


def _alphabet() -> list[str]:
    return pre_tokenizers.ByteLevel.alphabet()


def _tensors(vocab_size: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * 0.2).to(torch.bfloat16)

    def ones() -> torch.Tensor:
        return torch.ones(HIDDEN, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(vocab_size, HIDDEN), "model.norm.weight": ones()}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        tensors |= {
            f"{name}input_layernorm.weight": ones(),
            f"{name}post_attention_layernorm.weight": ones(),
            f"{name}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{name}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{name}mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{name}mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{name}mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    return tensors


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))
