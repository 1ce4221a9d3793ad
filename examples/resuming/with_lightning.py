"""Lightning, saved at the end of each epoch: started again, it goes on after the last one.

multiverso run -n 2 examples/resuming/with_lightning.py --directory saved
"""

import argparse
import os

import pytorch_lightning as lightning
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

import multiverso as mv
from multiverso.torch.lightning import MVCallback


class Digits(lightning.LightningModule):
    """One hidden layer."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def on_train_epoch_start(self):
        print(f"epoch {self.current_epoch + 1} begins", flush=True)

    def training_step(self, batch, _):
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.005)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    mv.init(sync=True)
    print(f"worker {mv.worker_id()} is process {os.getpid()}", flush=True)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    part = Subset(TensorDataset(x, y), mv.shard(len(x)).tolist())
    module = Digits()
    callback = MVCallback(directory=options.directory, every=5, rule=mv.rules.easgd(0.3))
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        devices=1,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = callback.resume()
    if checkpoint is not None:
        print(f"worker {mv.worker_id()} goes on from {checkpoint}", flush=True)
    trainer.fit(module, DataLoader(part, batch_size=32, shuffle=True), ckpt_path=checkpoint)

    if mv.is_master_worker():
        module.load_state_dict(callback.manager.state_dict())
        accuracy = (module.layers(x).argmax(1) == y).float().mean().item()
        print(f"epochs={options.epochs} accuracy={accuracy:.4f}", flush=True)
    mv.shutdown()


if __name__ == "__main__":
    main()
