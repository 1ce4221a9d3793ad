"""A model of transformers and rows to learn, as the page takes them for given."""

import warnings

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

warnings.simplefilter("ignore")  # those of the framework


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        row = self.rows[at]
        return {"input_ids": torch.tensor([row % 10, row % 7, row % 3]), "labels": row % 2}

    def select(self, which):
        return Rows(self.rows[at] for at in which)


dataset = Rows(range(64))
sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
model = BertForSequenceClassification(BertConfig(vocab_size=10, **sizes))
