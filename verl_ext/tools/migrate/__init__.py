"""Translation of other trainers' configurations: one table a trainer.

train.yaml, script.sh, 'swift sft --model …'
reading    files, and the words of a command · script    a shell script
tables     the form of tables/*.yaml: programs has what starts which trainer, values what it calls a value
axolotl · llamafactory · llamafactory_v1 · swift · trl    keys that need each other
hf_trainer    what the values of transformers' Trainer become · preferences    losses of answers · sources    data
swift_megatron    its keys by the names of swift · launcher    accelerate's file
serving    what trains nothing: models to serve, adapters to merge
verl       command lines of verl's own trainers, word for word
line       the new command, its checks and its comments
"""
