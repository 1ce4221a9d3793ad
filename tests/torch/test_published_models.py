"""A model of transformers whose parameters are a published version."""

from __future__ import annotations

import os

import pytest
import torch
import transformers

import multiverso as mv


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_a_language_model_are_the_shared_memory(tied: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    trained, served = (transformers.LlamaForCausalLM(config).bfloat16().eval() for _ in range(2))
    prompt = torch.arange(9)[None]
    name = f"of-test-{os.urandom(8).hex()}"
    with mv.Publication(name, like=trained) as publication, mv.subscribe(name, timeout_seconds=60) as subscription:
        publication.publish(trained)
        with subscription.latest() as snapshot:
            served.load_state_dict(snapshot.torch(), assign=True)
            at = {key: tensor.data_ptr() for key, tensor in snapshot.torch().items()}
        assert {key: tensor.data_ptr() for key, tensor in served.state_dict().items()} == at
        assert (at["lm_head.weight"] == at["model.embed_tokens.weight"]) is tied
        for _ in range(4):
            publication.publish(transformers.LlamaForCausalLM(config).bfloat16())
        with torch.no_grad():
            assert torch.equal(served(prompt).logits, trained(prompt).logits), "it keeps its version"
        del served, snapshot
