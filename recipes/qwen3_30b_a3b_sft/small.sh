#!/usr/bin/env bash
# The small form of this recipe, on two CPU cores: recipes/qwen3_30b_a3b_sft/small.sh [FOLDER [override …]]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../small_run.sh"
small_model=minimind3_moe_198m # eight experts in each of two layers
small_config='{num_hidden_layers:2,hidden_size:128,moe_intermediate_size:96,num_experts:8,num_experts_per_tok:2'
small_config+=',num_attention_heads:4,num_key_value_heads:2,head_dim:32,initializer_range:0.09}'
open_small qwen3_30b_a3b_sft "${1:-qwen3_30b_a3b_sft_small}" chats=500 code=400

say "Training on four ranks."
verl-ext train "$run/small.yaml" trainer.overwrite=true "${@:2}"

say "Curves."
verl-ext show "$run/out"
