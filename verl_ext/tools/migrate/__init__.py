"""Translation of other trainers' configurations: one table a trainer.

train.yaml, script.sh, 'swift sft --model …'
reading    which trainer, and its keys with their values
tables     each key's place here, from tables/*.yaml
axolotl · llamafactory · llamafactory_v1 · swift · trl    keys that need each other
hf_trainer    what the values of transformers' Trainer become
swift_megatron    its keys by the names of swift · launcher    accelerate's file
serving    what trains nothing: models to serve, adapters to merge
verl       command lines of verl's own trainers, word for word
line       the new command, its checks and its comments
"""
