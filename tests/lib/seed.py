"""The command and the dataset class of the document that requested this project."""

# Verbatim except for the sequence-parallel size.
SEED_COMMAND = r"""
PYTHONUNBUFFERED=1 torchrun --nnodes=$nnodes --nproc_per_node=$nproc_per_node --node_rank=$NODE_RANK --master_addr=$master_ip --master_port=$master_port  \
    fsdp_sft_trainer.py \
    +data.train_dir=$train_files \
    +data.max_tokens=131072 \
    optim.lr=3e-5 \
    data.train_batch_size=$nnodes \
    data.micro_batch_size=1 \
    data.micro_batch_size_per_gpu=1 \
    data.custom_cls.path=sft_data_packer.py \
    data.custom_cls.name=SFTDataSet \
    model.partial_pretrain=$model_path \
    model.use_liger=True \
    trainer.default_local_dir=$save_path \
    trainer.project_name=$task_name \
    trainer.experiment_name=$task_name \
    trainer.logger=['console'] \
    ulysses_sequence_parallel_size=2 \
    use_remove_padding=true
"""  # noqa: E501

# sft_data_packer.py, verbatim.
SEED_CLASS = """import torch
import datasets
import numpy as np
from tqdm import tqdm


class SFTDataSet:
    def __init__(self, train_dir, max_tokens, padding_value):
        self.dataframe = datasets.load_from_disk(train_dir).shuffle(seed=42)
        self.max_tokens = max_tokens
        self.padding_value = padding_value
        self.token_aware_batch_pack()

    def token_aware_batch_pack(self):
        self.batch_idx_list = []
        batch, batch_tokens = [], 0
        for idx, tok_len in tqdm(enumerate(self.dataframe['length']), total=len(self.dataframe), desc="token aware batch packing"):
            if batch and batch_tokens + tok_len > self.max_tokens:
                self.batch_idx_list.append(batch)
                batch, batch_tokens = [], 0
            if tok_len <= self.max_tokens:
                batch.append(idx)
                batch_tokens += tok_len

        if batch and batch_tokens <= self.max_tokens:
            self.batch_idx_list.append(batch)

    def __len__(self):
        return len(self.batch_idx_list)

    def __getitem__(self, item):
        return self.batch_idx_list[item]


    def collate_fn(self, batch_idx):
        batch = [self.dataframe[idx] for idx in batch_idx[0]]
        packed_input_ids = np.full(self.max_tokens, self.padding_value, dtype=np.int64)
        packed_position_ids = np.full(self.max_tokens, 0, dtype=np.int64)
        packed_loss_mask = np.full(self.max_tokens, 0, dtype=np.int64)
        packed_category_ids = np.zeros(self.max_tokens, dtype=np.int64)
        attention_mask = np.zeros(self.max_tokens, dtype=np.int64)
        current_pos = 0
        for record in batch:
            end_pos = current_pos + record['length']
            packed_input_ids[current_pos:end_pos] = record['input_ids']
            packed_position_ids[current_pos:end_pos] = [i for i in range(record['length'])]
            packed_loss_mask[current_pos:end_pos] = record['loss_mask']
            packed_category_ids[current_pos:end_pos] = record['category_ids']
            attention_mask[current_pos:end_pos] = 1
            current_pos = end_pos
        packed_position_ids[end_pos:] = [i for i in range(self.max_tokens-end_pos)]
        return {
            'input_ids': torch.from_numpy(packed_input_ids).unsqueeze(0),
            'position_ids': torch.from_numpy(packed_position_ids).unsqueeze(0),
            'loss_mask': torch.from_numpy(packed_loss_mask).unsqueeze(0),
            'category_ids': torch.from_numpy(packed_category_ids).unsqueeze(0),
            'attention_mask': torch.from_numpy(attention_mask).unsqueeze(0),
        }
"""  # noqa: E501
