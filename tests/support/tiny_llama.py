"""A random small Llama, another one for each step, and a trainer that publishes them.

python tiny_llama.py NAME publishes under a name: a line "5" on its standard input asks for step 5, "on" for one step
after another.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT = list(range(1, 60))
TOKENS = 12


def model(step: int, hidden: int = 128, intermediate: int = 512, vocabulary: int = 512) -> Any:
    """The model of a step; heads of less than 32 numbers are refused by vLLM on CPUs."""
    torch.manual_seed(step)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).float().eval()


def greedy(of: Any) -> list[int]:
    """What transformers answers to the prompt."""
    prompt = torch.tensor([PROMPT])
    told = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        answer = of.generate(prompt, max_new_tokens=TOKENS, do_sample=False, **told)
    found: list[int] = answer[0, len(PROMPT) :].tolist()
    return found


def tokens(llm: Any) -> tuple[list[int], list[str]]:
    """What vLLM answers to the prompt, and the versions that it says have made it."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    (answer,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    (completion,) = answer.outputs
    return list(completion.token_ids), [span.version for span in completion.weight_versions]


def sampler(folder: str, **more: Any) -> Any:
    """A vLLM sampler of the model in a folder, which follows publications."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        weight_transfer_config=WeightTransferConfig(backend="multiverso"),
        **more,
    )


def publish() -> None:
    import multiverso as mv

    step = 0
    with mv.Publication(sys.argv[1], like=model(0)) as publication:
        print("ready", flush=True)
        for line in sys.stdin:
            while True:
                step = step + 1 if line == "on\n" else int(line)
                version = publication.publish(model(step), step=step, wait_seconds=60)
                if line != "on\n":
                    break
            print(version, flush=True)


if __name__ == "__main__":
    publish()
