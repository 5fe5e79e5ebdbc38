"""Messages between an ingress and its replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from foredraft.config.engine import EngineConfig, Guarantee
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.engine.frontend import RequestOutput, StreamOutput
from foredraft.engine.stats import RowStats
from foredraft.llm import LLM
from foredraft.loading.info import ModelInfo
from foredraft.serve.errors import ApiError
from foredraft.serve.served import Served

OutputIds = tuple[tuple[int, ...], ...]
"""Output token ids, for each sample of a prompt."""


@dataclass(frozen=True)
class ReplicaRequest:
    """Request for a replica, with the output that other replicas have already delivered.

    Args:
      request_id: id for logs.
      name: served name, which selects a drafting method.
      prompts: token ids of each prompt, with its text if the client sent text.
      params: sampling parameters of each prompt, with a seed.
      weights, fingerprint: values of `Served.weights` and `Served.fingerprint`; a replica with other weights refuses
        the request.
      output_ids: delivered output of each prompt; empty if nothing was delivered.
      session: session named by the client; empty for none.
      avoided: replicas that have failed the request.
      wants_trees: whether deltas contain draft trees.
      wants_news: whether the client receives the output of single steps; otherwise deltas are sent less often.
      route: callback in the sending process with the name of the replica that receives the request; the name is empty
        while the request waits for a replica with a free row. None in other processes.
    """

    request_id: str
    name: str
    prompts: tuple[dict[str, Any], ...]
    params: tuple[SamplingParams, ...]
    weights: str
    fingerprint: str
    output_ids: tuple[OutputIds, ...] = ()
    session: str = ""
    avoided: frozenset[str] = frozenset()
    wants_trees: bool = False
    wants_news: bool = True
    route: Callable[[str], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "route": None}

    @property
    def ids(self) -> Sequence[int]:
        """Token ids of the first prompt, for routing."""
        return self.prompts[0]["prompt_token_ids"]  # type: ignore[no-any-return]

    @property
    def salt(self) -> str:
        """Cache salt of the prompts; empty for none."""
        return str(self.prompts[0].get("cache_salt", ""))

    @property
    def continued(self) -> list[dict[str, Any]]:
        """Prompts with their output, in the form of `LLM.stream`."""
        if not self.output_ids:
            return list(self.prompts)
        pairs = zip(self.prompts, self.output_ids, strict=True)
        return [{**prompt, "output_ids": [list(ids) for ids in said]} for prompt, said in pairs]


@dataclass(frozen=True)
class Routed:
    """Message that the request was sent to a replica.

    Args:
      replica: name of the replica; empty while the request waits for one with a free row.
      has_accepted: whether the replica has accepted the request; it then sends a message at least every `SIGN_SECONDS`.
    """

    replica: str
    has_accepted: bool = False


@dataclass(frozen=True)
class Started:
    """Message that the engine of a replica has accepted the request.

    Args:
      fingerprint: fingerprint of the replica.
    """

    fingerprint: str


@dataclass(frozen=True)
class Delta:
    """Output of one or more steps; empty as a sign of life.

    Args:
      deltas: output of single rows.
      stats: counters of all work of this replica for the request.
      num_cached_tokens: number of prompt tokens found in the prefix cache.
    """

    deltas: tuple[StreamOutput, ...] = ()
    stats: RowStats | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class Finished:
    """Message that the request has ended.

    Args:
      outputs: results, without the log-probabilities of tokens that other replicas have delivered.
      stats: counters of all work of this replica for the request.
      num_cached_tokens: number of prompt tokens found in the prefix cache.
    """

    outputs: tuple[RequestOutput, ...]
    stats: RowStats
    num_cached_tokens: int


class Failed(Exception):
    """Error of a replica that has died or cannot be reached. Another replica may take the request."""


@dataclass(frozen=True, eq=False)
class DistantLLM:
    """Attributes of an `LLM` in another process, as far as the application needs them."""

    tokenizer: Any
    speculative_config: SpeculativeConfig
    engine_config: EngineConfig
    model_info: ModelInfo
    guarantee: Guarantee
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, llm: LLM) -> DistantLLM:
        config, engine, info = llm.speculative_config, llm.engine_config, llm.model_info
        return cls(llm.tokenizer, config, engine, info, llm.guarantee, llm.sampling_defaults)

    def prepare(self, sampling_params: SamplingParams) -> None:
        """Do nothing, because the replica compiles grammars."""


class DistantServed(Served):
    """Served models of a replica without the weights, small enough to be sent to an ingress."""

    def __init__(self, served: Served) -> None:
        distant = {id(llm): DistantLLM.of(llm) for llm in served.llms}
        super().__init__(cast("Any", {name: distant[id(llm)] for name, llm in served.names.items()}))
        self.fingerprint, self.weights = served.fingerprint, served.weights
        self.vocab_size, self.num_embeddings = served.vocab_size, served.num_embeddings

    @property
    def num_rows(self) -> int:
        """Number of rows that one replica runs at once."""
        return self.llm.engine_config.max_num_seqs

    def warm(self) -> None:
        """Do nothing, because replicas warm up themselves."""


Message = Routed | Started | Delta | Finished | ApiError | DistantServed
"""Messages of one request. `ApiError` ends the request; `DistantServed` reports that the replica has other weights."""
