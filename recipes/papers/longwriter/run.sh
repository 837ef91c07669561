#!/usr/bin/env bash
# From instructions to a judged model on 2 CPU cores: plan and write, tokenize, train with loss=longwriter, judge.
#
#   recipes/papers/longwriter/run.sh [FOLDER [override …]]
#
# FOLDER: longwriter_run by default; a folder that this script made is reused. Overrides apply to the training run.
# The plans, paragraphs and verdicts come from recipes/scripted_model.py, which is not a model. With BASE_URL and MODEL
# your own server writes and judges them: BASE_URL=http://localhost:8000/v1 MODEL=NAME.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
overrides=("${@:2}")
source "$here/../../small_run.sh"
open_run longwriter "${1:-longwriter_run}"
open_server

say "1/6  Instructions, short chats and cases."
python "$here/make_data.py" --output "$data"

say "2/6  Synthesizing: a plan for each instruction, then paragraph after paragraph ($server_model)."
verl-ext synthesize task=agentwrite "sources={instructions:$data/instructions.jsonl}" \
    "output_dir=$run/synthesized" overwrite=true "endpoint.base_url=$server_url" "endpoint.model=$server_model" \
    near_duplicates=null

say "3/6  A tokenizer trained on the texts and a small Qwen3 with random weights; tokenizing."
verl-ext init-model model=tiny "output_dir=$run/model" overwrite=true tokenizer.vocab_size=512 \
    "tokenizer.train_on=[$run/synthesized/agentwrite.jsonl,$data/chats.jsonl]" tokenizer.bos_token=null
verl-ext tokenize "sources={agentwrite:$run/synthesized,chats:$data/chats.jsonl}" "output_dir=$run/tokenised" \
    overwrite=true "model.path=$run/model"

say "4/6  Training on 2 ranks with LongWriter's loss (loss=longwriter)."
NPROC_PER_NODE=2 verl-ext launch recipe=longwriter/small "data.train_dir=$run/tokenised" \
    "model.path=$run/model" "trainer.default_local_dir=$run/checkpoints" trainer.overwrite=true "${overrides[@]}"

say "5/6  Judging the model before and after ($server_model)."
verl-ext judge task=longbench_write "cases=$data/cases.jsonl" "models.before=$run/model" \
    "models.after=$run/checkpoints" max_tokens=1024 max_failed=1 "judge.base_url=$server_url" \
    "judge.model=$server_model" "output_dir=$run/judged" overwrite=true

say "6/6  Results."
show_run
say "Done. Everything is in $run; judged/page.html has every case."
