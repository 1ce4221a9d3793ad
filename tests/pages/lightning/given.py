"""A module of Lightning and data for it, as the page takes them for given."""

import warnings

import pytorch_lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")  # those of the framework


class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, rows, _):
        return (self.layer(rows[0]) - rows[1]).square().mean()

    def validation_step(self, rows, _):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


module = Module()
rows = torch.randn(64, 3)
dataset = TensorDataset(rows, rows.sum(1, keepdim=True))
validation_loader = DataLoader(dataset, batch_size=32)
