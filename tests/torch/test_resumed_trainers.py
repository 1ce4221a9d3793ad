"""Lightning's and Hugging Face's own trainers: a run that was saved and resumed ends as one that went on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiverso as mv
from multiverso.testing.laws import Job, Raised, run_jobs

EPOCHS, SAVED = 4, 2
RULE = mv.rules.easgd(0.3)


def with_lightning(place: str, epochs: int) -> list[Any]:
    import pytorch_lightning as lightning
    import torch

    from multiverso.torch.lightning import MVCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Sequential(
                torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1)
            )

        def training_step(self, rows: Any, _: int) -> Any:
            return (self.layer(rows[0]) - rows[1]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]

    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(mv.worker_id()))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    module, callback = Module(), MVCallback(every=3, directory=place, rule=RULE)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        devices=1,
        accelerator="cpu",
        callbacks=[callback],
        default_root_dir=place,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, ckpt_path=callback.resume())
    assert callback.manager is not None
    return [p.detach().numpy() for p in module.parameters()] + list(callback.manager.state_dict().values())


def with_transformers(place: str, epochs: int) -> list[Any]:
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from multiverso.torch.huggingface import MVCallback

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=16, **sizes))
    draw = torch.Generator().manual_seed(mv.worker_id())
    rows = [
        {"input_ids": torch.randint(0, 20, (8,), generator=draw), "labels": torch.tensor(index % 2)}
        for index in range(24)
    ]
    arguments = TrainingArguments(
        output_dir=f"{place}-own/{mv.worker_id()}",
        per_device_train_batch_size=8,
        num_train_epochs=EPOCHS,
        max_steps=3 * epochs,
        lr_scheduler_type="constant",
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        save_strategy="epoch",
        disable_tqdm=True,
    )
    callback = MVCallback(every=2, directory=place, rule=RULE)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume())
    assert callback.manager is not None
    return [p.detach().numpy() for p in model.parameters()] + list(callback.manager.state_dict().values())


PLACES = {"whole": "-whole", "alone": "-grown", "joined": "-grown"}
TRAINERS = {"lightning": with_lightning, "transformers": with_transformers}


def run(folder: str, trainer: str, part: str) -> Any:
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mv.init(sync=True)
    torch.manual_seed(mv.worker_id() if part != "resumed" else 9)
    place = Path(folder, trainer + PLACES.get(part, ""))
    values = TRAINERS[trainer](str(place), SAVED if part in ("begun", "alone") else EPOCHS)
    mv.shutdown()
    return [np.asarray(value) for value in values]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("saved"))
    parts = {"whole": (0, 1), "begun": (0, 1), "resumed": (0, 1), "alone": (0,), "joined": (0, 1)}
    runs = [(trainer, part) for trainer in TRAINERS for part in parts]
    jobs = [Job(parts[part], (folder, trainer, part)) for trainer, part in runs]
    results = dict(zip(runs, run_jobs(jobs, run), strict=True))

    def of(trainer: str, part: str) -> list[Any]:
        for result in results[trainer, part]:
            assert not isinstance(result, Raised), result.text
        return results[trainer, part]

    return of


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_resumed_run_ends_as_one_that_went_on(ended: Any, trainer: str) -> None:
    whole, begun, resumed = (ended(trainer, part) for part in ("whole", "begun", "resumed"))
    for me in range(2):
        for one, other in zip(whole[me], resumed[me], strict=True):
            np.testing.assert_array_equal(one, other)
        assert any((one != other).any() for one, other in zip(whole[me], begun[me], strict=True))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_second_worker_joins_what_one_has_saved(ended: Any, trainer: str) -> None:
    alone, joined = (ended(trainer, part) for part in ("alone", "joined"))
    centre = len(alone[0]) // 2  # the module's own come first, and then the shared ones
    for one, other in zip(joined[0][centre:], joined[1][centre:], strict=True):
        np.testing.assert_array_equal(one, other)
    assert any((one != other).any() for one, other in zip(joined[0], alone[0], strict=True))
    assert any((one != other).any() for one, other in zip(joined[0][:centre], joined[1], strict=False))


def test_without_a_directory_there_is_nothing_to_resume_from() -> None:
    from multiverso.torch.huggingface import MVCallback as OfTransformers
    from multiverso.torch.lightning import MVCallback as OfLightning

    for callback in (OfTransformers(), OfLightning()):
        with pytest.raises(ValueError, match="no directory="):
            callback.resume()
