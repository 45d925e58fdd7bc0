"""A tiny recurrent model of random weights, written as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

WIDTH, INNER, STATES, STEP_RANK, KERNEL, N_TOKENS = 32, 64, 8, 4, 4, 8


def write_mamba(path: Path) -> Path:
    """Write one layer of Mamba."""
    writer = GGUFWriter(path, "mamba")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(1)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATES)
    writer.add_ssm_time_step_rank(STEP_RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(N_TOKENS)])
    writer.add_token_scores([0.0] * N_TOKENS)
    writer.add_token_types([TokenType.NORMAL] * N_TOKENS)
    rng = np.random.default_rng(0)
    for name, shape in {
        "token_embd.weight": (N_TOKENS, WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ssm_in.weight": (2 * INNER, WIDTH),
        "blk.0.ssm_conv1d.weight": (INNER, KERNEL),
        "blk.0.ssm_conv1d.bias": (INNER,),
        "blk.0.ssm_x.weight": (STEP_RANK + 2 * STATES, INNER),
        "blk.0.ssm_dt.weight": (INNER, STEP_RANK),
        "blk.0.ssm_dt.bias": (INNER,),
        "blk.0.ssm_a": (INNER, STATES),
        "blk.0.ssm_d": (INNER,),
        "blk.0.ssm_out.weight": (WIDTH, INNER),
    }.items():
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
