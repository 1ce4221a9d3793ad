"""Hugging Face's Trainer, saved at the end of each epoch: started again, it goes on after the last one.

multiverso run -n 2 examples/resuming/with_huggingface.py --directory saved
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainerCallback, TrainingArguments

import multiverso as mv
from multiverso.torch.huggingface import MVCallback


class Digits(torch.nn.Module):
    """One hidden layer."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Report(TrainerCallback):
    """Says when an epoch begins."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        print(f"epoch {int(state.epoch) + 1} begins", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    mv.init(sync=True)
    print(f"worker {mv.worker_id()} is process {os.getpid()}", flush=True)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    rows = [{"x": x[row], "labels": y[row]} for row in mv.shard(len(x)).tolist()]
    model = Digits()
    arguments = TrainingArguments(
        output_dir=f"{options.directory}-own/{mv.worker_id()}",
        per_device_train_batch_size=32,
        num_train_epochs=options.epochs,
        learning_rate=0.005,
        use_cpu=True,
        report_to=[],
        save_strategy="epoch",
        save_total_limit=1,
        disable_tqdm=True,
    )
    callback = MVCallback(directory=options.directory, every=5, rule=mv.rules.easgd(0.3))
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback, Report()])
    checkpoint = callback.resume()
    if checkpoint is not None:
        print(f"worker {mv.worker_id()} goes on from {checkpoint}", flush=True)
    trainer.train(resume_from_checkpoint=checkpoint)

    if mv.is_master_worker():
        model.load_state_dict(callback.manager.state_dict())
        accuracy = (model.layers(x).argmax(1) == y).float().mean().item()
        print(f"epochs={options.epochs} accuracy={accuracy:.4f}", flush=True)
    mv.shutdown()


if __name__ == "__main__":
    main()
