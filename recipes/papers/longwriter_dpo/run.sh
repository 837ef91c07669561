#!/usr/bin/env bash
# Lengths by preference on 2 CPU cores: fine-tune a small model, sample it, score its answers, DPO, judge lengths.
#
#   recipes/papers/longwriter_dpo/run.sh [FOLDER [override …]]
#
# FOLDER: longwriter_dpo_run by default; a folder that this script made is reused. Overrides apply to the DPO run.
# The answers are the small model's own (recipes/small_server.py). Their quality is judged by recipes/scripted_model.py,
# which is not a model; with BASE_URL and MODEL your own server judges: BASE_URL=http://localhost:8000/v1 MODEL=NAME.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
overrides=("${@:2}")
source "$here/../../small_run.sh"
open_run longwriter_dpo "${1:-longwriter_dpo_run}"
open_server

say "1/6  Texts of chapters, prompts and cases; a tokenizer trained on them and a small Qwen3 with random weights."
python "$here/make_data.py" --output "$data"
verl-ext init-model model=tiny "output_dir=$run/model" overwrite=true "tokenizer.train_on=$data/chats.jsonl" \
    tokenizer.vocab_size=512 tokenizer.bos_token=null
verl-ext tokenize "sources={texts:$data/chats.jsonl}" "output_dir=$run/texts" overwrite=true "model.path=$run/model"

say "2/6  Fine-tuning on texts of which most have 100 words, whatever is asked for."
NPROC_PER_NODE=2 verl-ext launch recipe=longwriter/small data.share_prefixes=true \
    "data.train_dir=$run/texts" "model.path=$run/model" "trainer.default_local_dir=$run/sft" trainer.overwrite=true \
    trainer.total_epochs=3
sft=$(last_export "$run/sft")

say "3/6  Four answers of that model to each prompt, scored by length and quality ($server_model); the best against another."
start_server small_server.py "$sft"
verl-ext synthesize task=preferences "sources={writing:$data/prompts.jsonl}" text_key=prompt "output_dir=$run/pairs" \
    overwrite=true answers=4 pair=best_random min_gap=5 scorer.kind=writing "scorer.endpoint.base_url=$server_url" \
    "scorer.endpoint.model=$server_model" "endpoint.base_url=$url" endpoint.model=small endpoint.concurrency=32 \
    sampling.max_tokens=420 near_duplicates=null
verl-ext tokenize "sources={writing:$run/pairs}" "output_dir=$run/tokenised" overwrite=true "model.path=$sft"

say "4/6  DPO on 2 ranks."
NPROC_PER_NODE=2 verl-ext launch recipe=longwriter_dpo/small "data.train_dir=$run/tokenised" \
    "model.path=$sft" "trainer.default_local_dir=$run/checkpoints" trainer.overwrite=true "${overrides[@]}"

say "5/6  The length of answers before and after, to prompts about subjects that no file before had."
verl-ext judge task=longwrite_ruler "cases=$data/cases.jsonl" "models.before=$sft" "models.after=$run/checkpoints" \
    max_tokens=420 temperature=0 "output_dir=$run/judged" overwrite=true

say "6/6  Results."
show_run
say "Done. Everything is in $run; judged/page.html has every case."
