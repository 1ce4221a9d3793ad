"""Lightning's and Hugging Face's own trainers, with the callbacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiverso as mv

SECONDS = 280


def with_lightning(folder: str, every: int) -> Any:
    import warnings

    warnings.simplefilter("ignore")
    import pytorch_lightning as lightning
    import torch

    from multiverso.torch.lightning import MVCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, rows: Any, _: int) -> Any:
            return (self.layer(rows[0]) - rows[1]).square().mean()

        def validation_step(self, rows: Any, _: int) -> None:
            self.validated = self.layer.weight.detach().clone()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    mv.init(sync=True)
    torch.manual_seed(mv.worker_id())
    x = torch.randn(64, 3)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    module, callback = Module(), MVCallback(every=every)
    trainer = lightning.Trainer(
        max_epochs=6,
        devices=1,
        accelerator="cpu",
        callbacks=[callback],
        accumulate_grad_batches=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, loader)
    exchanges = max(table["exchanges"] for table in mv.stats()["tables"].values())
    return module.layer.weight.detach().numpy(), module.validated.numpy(), exchanges


def test_lightning(tmp_path: Path) -> None:
    results = mv.run(with_lightning, workers=2, args=(str(tmp_path), 3), timeout_seconds=SECONDS)
    for weight, validated, exchanges in results:
        np.testing.assert_array_equal(weight, results[0][0])
        np.testing.assert_array_equal(validated, results[0][1])
        assert exchanges == 6 * 2, "4 steps in an epoch: one exchange at the third, one before the validation"
        np.testing.assert_allclose(weight, 1, atol=0.3)


def with_transformers(folder: str) -> Any:
    import warnings

    warnings.simplefilter("ignore")
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from multiverso.torch.huggingface import MVCallback

    mv.init(sync=True)
    torch.manual_seed(mv.worker_id())
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=16, **sizes))
    rows = [
        {"input_ids": torch.randint(0, 20, (8,)), "labels": torch.tensor(index % 2)}
        for index in mv.shard(64).tolist()
    ]
    arguments = TrainingArguments(
        output_dir=f"{folder}/{mv.worker_id()}",
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        save_strategy="epoch",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[MVCallback(every=3)])
    trainer.train()
    trainer.save_model()
    saved = BertForSequenceClassification.from_pretrained(arguments.output_dir)
    exchanges = max(table["exchanges"] for table in mv.stats()["tables"].values())
    return [[p.detach().numpy() for p in m.parameters()] for m in (model, saved)], exchanges


def test_hugging_face(tmp_path: Path) -> None:
    results = mv.run(with_transformers, workers=2, args=(str(tmp_path),), timeout_seconds=SECONDS)
    for (trained, saved), exchanges in results:
        assert exchanges == 2 * 2, "4 steps in an epoch"
        for mine, kept, first in zip(trained, saved, results[0][0][0], strict=True):
            np.testing.assert_array_equal(mine, first)
            np.testing.assert_array_equal(mine, kept)


@pytest.mark.parametrize(
    ("module", "missing", "words"),
    [
        (
            "lightning",
            ["lightning", "pytorch_lightning"],
            'pip install "multiverso[torch]" pytorch-lightning',
        ),
        ("huggingface", ["transformers"], 'pip install "multiverso[torch]" "transformers[torch]"'),
    ],
)
def test_what_is_missing_is_named(module: str, missing: list[str], words: str) -> None:
    gone = "; ".join(f"sys.modules[{name!r}] = None" for name in missing)
    program = f"import sys; {gone}; import multiverso.torch.{module}"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert words in result.stderr
