"""Messages between an ingress and its replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from foredraft.config.engine import EngineConfig, Promise
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.engine.frontend import RequestOutput, StreamOutput
from foredraft.engine.stats import RowStats
from foredraft.llm import LLM
from foredraft.loading.info import ModelInfo
from foredraft.serve.errors import ApiError
from foredraft.serve.served import Served

OutputIds = tuple[tuple[int, ...], ...]
"""Output so far of each sample of a prompt."""


@dataclass(frozen=True)
class ReplicaRequest:
    """Request for a replica, with the output that other replicas have delivered.

    Args:
      request_id: id for logs.
      name: served name, which selects a way of drafting.
      prompts: token ids, with their text where that was given.
      params: parameters of each prompt, with a seed.
      output_ids: delivered output of each prompt; empty where nothing was delivered.
      weights, fingerprint: see `Served`. A replica with other weights does not take the request.
      session: session that the client has named, or nothing.
      avoided: replicas that have failed the request.
      wants_trees: whether drafts are sent with every delta.
      wants_news: whether the client gets single steps; otherwise deltas may come seldom.
      route: called with the name of the replica that the request is sent to, or an empty one while it waits for a
        replica with a free row. It stays in its process.
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
        """Cache salt of the prompts; empty where they have none."""
        return str(self.prompts[0].get("cache_salt", ""))

    @property
    def continued(self) -> list[dict[str, Any]]:
        """Prompts as `LLM.stream` takes them."""
        if not self.output_ids:
            return list(self.prompts)
        pairs = zip(self.prompts, self.output_ids, strict=True)
        return [{**prompt, "output_ids": [list(ids) for ids in said]} for prompt, said in pairs]


@dataclass(frozen=True)
class Routed:
    """The request was sent to a replica.

    Args:
      replica: name of the replica; empty while the request waits for one with a free row.
      has_accepted: whether the replica has the request; it then sends a message at least every `SIGN_SECONDS`.
    """

    replica: str
    has_accepted: bool = False


@dataclass(frozen=True)
class Started:
    """The engine of a replica has taken the request in.

    Args:
      fingerprint: fingerprint of the replica.
    """

    fingerprint: str


@dataclass(frozen=True)
class Delta:
    """Output of one or more steps; empty to show that the replica is alive.

    Args:
      stats: counters of all work of this replica for the request.
    """

    deltas: tuple[StreamOutput, ...] = ()
    stats: RowStats | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class Finished:
    """The request has ended.

    Args:
      outputs: results, without the log-probabilities of tokens that other replicas have delivered.
    """

    outputs: tuple[RequestOutput, ...]
    stats: RowStats
    num_cached_tokens: int


class Failed(Exception):
    """A replica has died or cannot be reached. Another replica may take the request."""


@dataclass(frozen=True, eq=False)
class DistantLLM:
    """Facts of an `LLM` in another process, as far as the application reads them."""

    tokenizer: Any
    speculative_config: SpeculativeConfig
    engine_config: EngineConfig
    model_info: ModelInfo
    promise: Promise
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, llm: LLM) -> DistantLLM:
        config, engine, info = llm.speculative_config, llm.engine_config, llm.model_info
        return cls(llm.tokenizer, config, engine, info, llm.promise, llm.sampling_defaults)

    def prepare(self, sampling_params: SamplingParams) -> None:
        """Grammars are compiled by the replica."""


class DistantServed(Served):
    """Served models of a replica, without the models, so that they can be sent to an ingress."""

    def __init__(self, served: Served) -> None:
        distant = {id(llm): DistantLLM.of(llm) for llm in served.llms}
        super().__init__(cast("Any", {name: distant[id(llm)] for name, llm in served.names.items()}))
        self.fingerprint, self.weights = served.fingerprint, served.weights
        self.vocab_size, self.num_embeddings = served.vocab_size, served.num_embeddings

    @property
    def num_rows(self) -> int:
        """Rows that run at once on one replica."""
        return self.llm.engine_config.max_num_seqs

    def warm(self) -> None:
        """Replicas do this themselves."""


Message = Routed | Started | Delta | Finished | ApiError | DistantServed
"""Messages of one request. An error ends it; served models are those of a replica that has other weights."""
