#!/usr/bin/env bash
# From documents to a judged model on 2 CPU cores: synthesize, tokenize, train with loss=sequence, judge.
#
#   recipes/papers/longalign/run.sh [FOLDER [override …]]
#
# FOLDER: longalign_run by default; a folder that this script made is reused. Overrides apply to the training run.
# The questions, answers and verdicts come from recipes/scripted_model.py, which is not a model. With BASE_URL and MODEL
# your own server writes and judges them: BASE_URL=http://localhost:8000/v1 MODEL=NAME.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
overrides=("${@:2}")
source "$here/../../small_run.sh"
open_run longalign "${1:-longalign_run}"
open_server

say "1/6  Documents, short chats and cases; a tokenizer trained on them and a small Qwen3 with random weights."
python "$here/make_data.py" --output "$data"
verl-ext init-model model=tiny "output_dir=$run/model" overwrite=true \
    "tokenizer.train_on=[$data/documents.jsonl,$data/chats.jsonl]" tokenizer.vocab_size=768 tokenizer.bos_token=null

say "2/6  Synthesizing: five questions about each document, three of them answered ($server_model)."
verl-ext synthesize task=longalign "sources={chronicles:$data/documents.jsonl}" "output_dir=$run/synthesized" \
    overwrite=true "model.path=$run/model" "endpoint.base_url=$server_url" "endpoint.model=$server_model" \
    'intervals=[128,256,512,1024]' records=90 questions=3 near_duplicates=null

say "3/6  Tokenizing: synthesized and general chats."
verl-ext tokenize "sources={longalign:$run/synthesized,chats:$data/chats.jsonl}" "output_dir=$run/tokenised" \
    overwrite=true "model.path=$run/model" category_field=category

say "4/6  Training on 2 ranks; each document counts equally (loss=sequence)."
NPROC_PER_NODE=2 verl-ext launch recipe=longalign/small "data.train_dir=$run/tokenised" \
    "model.path=$run/model" "trainer.default_local_dir=$run/checkpoints" trainer.overwrite=true "${overrides[@]}"

say "5/6  Judging the model before and after, on documents that it has not seen ($server_model)."
verl-ext judge task=longbench_chat "cases=$data/cases.json" "chat.shots=$data/few_shots.json" \
    "models.before=$run/model" "models.after=$run/checkpoints" max_tokens=48 temperature=0 max_failed=1 \
    "judge.base_url=$server_url" "judge.model=$server_model" "output_dir=$run/judged" overwrite=true

say "6/6  Results."
show_run
say "Done. Everything is in $run; judged/page.html has every case."
