"""A sampler as vLLM makes one by default, with its engine and its worker in processes; says "equal" for each version.

python in_processes.py FOLDER NAME
"""

from __future__ import annotations

import sys

import multiverso as mv
import tiny_llama
from multiverso.vllm import Follower


def main() -> None:
    folder, name = sys.argv[1:]
    llm = tiny_llama.sampler(folder)
    with mv.Publication(name, like=tiny_llama.model(0), slots=2) as publication, Follower(llm, name) as follower:
        for step in range(1, 6):
            publication.publish(tiny_llama.model(step))
            assert follower.update() == step
            answer, versions = tiny_llama.tokens(llm)
            print("equal" if answer == tiny_llama.greedy(tiny_llama.model(step)) else "other", versions, flush=True)
        assert publication.left_out == 0, "with two slots: a version that has been loaded is let go"


if __name__ == "__main__":
    main()
