#!/usr/bin/env bash
# Facts by preference on 2 CPU cores: fine-tune a small model, sample it, score question and answer alone, DPO, answer.
#
#   recipes/papers/glm_long_dpo/run.sh [FOLDER [override …]]
#
# FOLDER: glm_long_dpo_run by default; a folder that this script made is reused. Overrides apply to the DPO run.
# The answers are the small model's own (recipes/small_server.py); score.py takes the place of a reward model.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
overrides=("${@:2}")
source "$here/../../small_run.sh"
open_run glm_long_dpo "${1:-glm_long_dpo_run}"

say "1/5  Chronicles and questions; a tokenizer trained on them and a small Qwen3 with random weights."
python "$here/make_data.py" --output "$data"
verl-ext init-model model=tiny "output_dir=$run/model" overwrite=true "tokenizer.train_on=$data/chats.jsonl" \
    tokenizer.vocab_size=512 tokenizer.bos_token=null
verl-ext tokenize "sources={chats:$data/chats.jsonl}" "output_dir=$run/chats" overwrite=true "model.path=$run/model"

say "2/5  Fine-tuning on answers of which most name a person who stands in no text."
NPROC_PER_NODE=2 verl-ext launch recipe=longalign/small "data.train_dir=$run/chats" \
    "model.path=$run/model" "trainer.default_local_dir=$run/sft" trainer.overwrite=true trainer.total_epochs=1
sft=$(last_export "$run/sft")

say "3/5  Four answers of that model to each prompt, scored without the chronicle; the best against the worst."
start_server small_server.py "$sft"
FACTS=$data/facts.json verl-ext synthesize task=preferences "sources={chronicles:$data/prompts.jsonl}" \
    "output_dir=$run/pairs" overwrite=true answers=4 pair=best_worst "scorer.kind=$here/score.py:right_fact" \
    "endpoint.base_url=$url" endpoint.model=small endpoint.concurrency=32 sampling.max_tokens=24 near_duplicates=null
verl-ext tokenize "sources={chronicles:$run/pairs}" "output_dir=$run/tokenised" overwrite=true "model.path=$sft"

say "4/5  DPO on 2 ranks; before and after it the model answers questions about chronicles that no file before had."
NPROC_PER_NODE=2 verl-ext launch recipe=glm_long_dpo/small "data.train_dir=$run/tokenised" \
    "model.path=$sft" "trainer.default_local_dir=$run/checkpoints" trainer.overwrite=true \
    "eval.prompts={facts:$data/held_out.jsonl}" eval.score=contains eval.max_new_tokens=24 eval.batch_size=24 \
    trainer.val_before_train=true "${overrides[@]}"

say "5/5  Results."
show_run
say "Done. Everything is in $run"
