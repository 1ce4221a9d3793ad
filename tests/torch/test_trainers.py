"""Lightning's and Hugging Face's own trainers, with the callbacks; and resumed, as if they had gone on."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiverso as mv
from documentation import run_page
from multiverso.testing.laws import Job, call, run_jobs, unless_raised


def with_lightning(folder: str, every: int) -> Any:
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


def with_transformers(folder: str) -> Any:
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from multiverso.torch.huggingface import MVCallback

    mv.init(sync=True)
    torch.manual_seed(mv.worker_id())
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=16, **sizes))
    rows = [
        {"input_ids": torch.randint(0, 20, (8,)), "labels": torch.tensor(index % 2)} for index in mv.shard(64).tolist()
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
    callback = MVCallback(every=3)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    callback.manager.finish()
    trainer.save_model()
    saved = BertForSequenceClassification.from_pretrained(arguments.output_dir)
    exchanges = max(table["exchanges"] for table in mv.stats()["tables"].values())
    return [[p.detach().numpy() for p in m.parameters()] for m in (model, saved)], exchanges


EPOCHS, SAVED = 4, 2
RULE = mv.rules.easgd(0.3)


def resumed_by_lightning(place: str, epochs: int) -> list[Any]:
    import pytorch_lightning as lightning
    import torch

    from multiverso.torch.lightning import MVCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))

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


def resumed_by_transformers(place: str, epochs: int) -> list[Any]:
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
PARTS = {"whole": (0, 1), "begun": (0, 1), "resumed": (0, 1), "alone": (0,), "joined": (0, 1)}
PAGES = ("lightning", "huggingface")
TRAINERS = {"lightning": resumed_by_lightning, "transformers": resumed_by_transformers}


def save_and_resume(folder: str, trainer: str, part: str) -> Any:
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mv.init(sync=True)
    torch.manual_seed(mv.worker_id() if part != "resumed" else 9)
    place = Path(folder, trainer + PLACES.get(part, ""))
    values = TRAINERS[trainer](str(place), SAVED if part in ("begun", "alone") else EPOCHS)
    mv.shutdown()
    return [np.asarray(value) for value in values]


def resume_from_nowhere() -> list[str]:
    from multiverso.torch.huggingface import MVCallback as OfTransformers
    from multiverso.torch.lightning import MVCallback as OfLightning

    said = []
    for callback in (OfTransformers(), OfLightning()):
        with pytest.raises(ValueError, match="no directory=") as raised:
            callback.resume()
        said.append(str(raised.value))
    return said


def ignore_warnings() -> None:
    """Those of the trainers."""
    warnings.simplefilter("ignore")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, forked_from: Callable[[str], AbstractContextManager[None]]) -> Any:
    """What each run returns, by its function and its last arguments; two processes do all."""
    folder = str(tmp_path_factory.mktemp("trained"))
    jobs: dict[tuple[Any, ...], Job] = {
        (with_lightning,): Job((0, 1), (with_lightning, folder, 3)),
        (with_transformers,): Job((0, 1), (with_transformers, folder)),
        (resume_from_nowhere,): Job((0,), (resume_from_nowhere,)),
    }
    for page in PAGES:
        jobs[run_page, page] = Job((0, 1), (run_page, page, folder))
    for trainer in TRAINERS:
        for part, members in PARTS.items():
            jobs[trainer, part] = Job(members, (save_and_resume, folder, trainer, part))
    with forked_from("trainers"):
        results = run_jobs([*jobs.values()], call, preload=(ignore_warnings,))
    return lambda *name: unless_raised(results[[*jobs].index(name)])


@pytest.mark.parametrize("page", PAGES)
def test_what_the_page_shows_runs(ended: Any, page: str) -> None:
    ended(run_page, page)


def test_lightning(ended: Any) -> None:
    results = ended(with_lightning)
    for weight, validated, exchanges in results:
        np.testing.assert_array_equal(weight, results[0][0])
        np.testing.assert_array_equal(validated, results[0][1])
        assert exchanges == 6 * 2, "4 steps in an epoch: one exchange at the third, one before the validation"
        np.testing.assert_allclose(weight, 1, atol=0.3)


def test_hugging_face(ended: Any) -> None:
    results = ended(with_transformers)
    for (trained, saved), exchanges in results:
        assert exchanges == 2 * 2 + 2, "4 steps in an epoch; and two of finish()"
        for mine, kept, first in zip(trained, saved, results[0][0][0], strict=True):
            np.testing.assert_array_equal(mine, first)
            np.testing.assert_array_equal(mine, kept)


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


def test_without_a_directory_there_is_nothing_to_resume_from(ended: Any) -> None:
    assert all(len(said) == 2 for said in ended(resume_from_nowhere))


def import_without_them() -> list[str]:
    """In a worker of its own: what the imports say."""
    missing: dict[str, Any] = dict.fromkeys(("lightning", "pytorch_lightning", "transformers"))
    sys.modules.update(missing)
    said = []
    for name in ("lightning", "huggingface"):
        try:
            importlib.import_module(f"multiverso.torch.{name}")
        except ImportError as error:
            said.append(str(error))
    return said


def test_what_is_missing_is_named() -> None:
    of_lightning, of_transformers = mv.run(import_without_them, 1)[0]
    assert 'pip install "multiverso[torch]" pytorch-lightning' in of_lightning
    assert 'pip install "multiverso[torch]" "transformers[torch]"' in of_transformers
