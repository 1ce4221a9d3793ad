"""A sampler's side of it: which version is next, asked where it may wait without stopping vLLM."""

from __future__ import annotations

from typing import Any

from multiverso.in_process import Closing
from multiverso.publications import subscribe


class Follower(Closing):
    """Keeps a vLLM sampler at a publication's newest version.

    Args:
        llm: a ``vllm.LLM`` that was made with ``weight_transfer_config=WeightTransferConfig(backend="multiverso")``.
        publication: its name.
        job: the address of the job that publishes it, as for `multiverso.subscribe`.
        timeout_seconds: deadline of each wait.

    Attributes:
        version: what the sampler has; 0 before the first.

    Examples:
        >>> llm = vllm.LLM(model, weight_transfer_config=WeightTransferConfig("multiverso"))  # doctest: +SKIP
        >>> policy = multiverso.vllm.Follower(llm, "policy")  # doctest: +SKIP
        >>> version = policy.update()  # doctest: +SKIP
        >>> answers = llm.generate(prompts)  # doctest: +SKIP
    """

    def __init__(self, llm: Any, publication: str, job: str | None = None, *, timeout_seconds: float = 120.0) -> None:
        self._llm = llm
        self.version = 0
        info = {"publication": publication, "job": job, "timeout_seconds": timeout_seconds}
        self._llm.init_weight_transfer_engine({"init_info": info})
        self._subscription = subscribe(publication, job, timeout_seconds=timeout_seconds)

    def update(self, newer_than: int = 0, timeout_seconds: float | None = None) -> int:
        """Loads the newest version, if the sampler has an older one; to be called between requests.

        Afterwards each answer says which version made it: ``answer.outputs[0].weight_versions``.

        Args:
            newer_than: waits for a version that is newer than this one.
            timeout_seconds: of that wait; by default the follower's.

        Returns:
            The version that the sampler has now.

        Raises:
            WaitTimeoutError: there was no such version in time; says whether somebody publishes.
            Exception: vLLM's; it was not loaded, and the sampler has the version before. The message names both.
        """
        with self._subscription.wait(newer_than, timeout_seconds) as snapshot:
            if snapshot.version != self.version:
                self._llm.start_weight_update()
                self._llm.update_weights({"update_info": {"ticket": snapshot.ticket}})
                self._llm.finish_weight_update(str(snapshot.version))
                self._llm.reset_prefix_cache()  # of the version before
                self.version = snapshot.version
        return self.version

    def close(self) -> None:
        """Ends it; the sampler keeps its version."""
        self._subscription.close()
        self._llm.shutdown_weight_transfer_engine()
