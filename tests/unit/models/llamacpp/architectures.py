"""Tiny models of random weights in architectures that only llama.cpp computes, written as GGUF files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM, WINDOW, N_TOKENS = 32, 48, 4, 2, 8, 6, 256
INNER, STATES, STEP_RANK, KERNEL = 64, 8, 4, 4  # of Mamba
Shapes = dict[str, tuple[int, ...]]


def write_gemma3(path: Path) -> Path:
    """Two layers with sliding windows of 6 tokens."""
    writer = _begun(path, "gemma3")
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_sliding_window(WINDOW)
    shapes: Shapes = {
        "attn_norm": (WIDTH,),
        "attn_q": (HEADS * HEAD_DIM, WIDTH),
        "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
        "attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
        "attn_q_norm": (HEAD_DIM,),
        "attn_k_norm": (HEAD_DIM,),
        "attn_output": (WIDTH, HEADS * HEAD_DIM),
        "post_attention_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
        "ffn_gate": (FFN, WIDTH),
        "ffn_up": (FFN, WIDTH),
        "ffn_down": (WIDTH, FFN),
        "post_ffw_norm": (WIDTH,),
    }
    return _ended(writer, path, {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()})


def write_mamba(path: Path) -> Path:
    """Two recurrent layers."""
    writer = _begun(path, "mamba")
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATES)
    writer.add_ssm_time_step_rank(STEP_RANK)
    shapes: Shapes = {
        "attn_norm.weight": (WIDTH,),
        "ssm_in.weight": (2 * INNER, WIDTH),
        "ssm_conv1d.weight": (INNER, KERNEL),
        "ssm_conv1d.bias": (INNER,),
        "ssm_x.weight": (STEP_RANK + 2 * STATES, INNER),
        "ssm_dt.weight": (INNER, STEP_RANK),
        "ssm_dt.bias": (INNER,),
        "ssm_a": (INNER, STATES),
        "ssm_d": (INNER,),
        "ssm_out.weight": (WIDTH, INNER),
    }
    return _ended(writer, path, {f"blk.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()})


def _begun(path: Path, architecture: str) -> GGUFWriter:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(N_TOKENS)])
    writer.add_token_scores([0.0] * N_TOKENS)
    writer.add_token_types([TokenType.NORMAL] * N_TOKENS)
    return writer


def _ended(writer: GGUFWriter, path: Path, shapes: Shapes) -> Path:
    rng = np.random.default_rng(0)
    ends: Shapes = {"token_embd.weight": (N_TOKENS, WIDTH), "output_norm.weight": (WIDTH,)}
    for name, shape in (ends | shapes).items():
        values = rng.standard_normal(shape) * 0.5 + 1 * name.endswith("norm.weight")
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
