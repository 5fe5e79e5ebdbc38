"""What an ingress and its replicas say to each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from foredraft.config.engine import EngineConfig, Promise
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.engine.frontend import RequestOutput, StreamOutput
from foredraft.engine.stats import RowStats
from foredraft.llm import LLM
from foredraft.loading.info import ModelInfo
from foredraft.serve.app import Application
from foredraft.serve.errors import ApiError
from foredraft.serve.served import Served

OutputIds = tuple[tuple[int, ...], ...]
"""What each sample of a prompt has said."""


class Route:
    """Where the router of this process has sent a request, told from the router's own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[Routed] = asyncio.Queue()

    def tell(self, replica: str) -> None:
        """The request was sent to this replica; nowhere, if the name is empty: it waits for one with room."""
        with suppress(RuntimeError):  # the loop has ended, and who asked with it
            self._loop.call_soon_threadsafe(self._told.put_nowait, Routed(replica))

    async def sent(self) -> Routed:
        """Wait for what is told next."""
        return await self._told.get()


@dataclass(frozen=True)
class ReplicaRequest:
    """A request for a replica, and how far it has come on others.

    Args:
      request_id: for logs.
      name: of the way of drafting.
      prompts: token ids, with their text where that was given.
      params: of each prompt, with a seed.
      output_ids: of each prompt, what has been delivered; empty where nothing has.
      weights, fingerprint: see `Facts`. No replica with other weights takes it.
      session: of the client; empty where it has named none.
      avoided: replicas that have failed it.
      wants_trees: whether drafts are to come with the news.
      wants_news: whether the client is told of single steps; otherwise news may come seldom.
      route: told where the request is sent; stays in its process.
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
    route: Route | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "route": None}

    @property
    def ids(self) -> Sequence[int]:
        """Token ids of the first prompt, for routing."""
        return self.prompts[0]["prompt_token_ids"]  # type: ignore[no-any-return]

    @property
    def salt(self) -> str:
        """Of the prompts; empty where they have none."""
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
    """The router has sent a request to a replica, which has not answered yet.

    Args:
      replica: empty while the request waits for one with room.
    """

    replica: str


@dataclass(frozen=True)
class Accepted:
    """A replica has a request, and will show from now on that it is alive."""

    replica: str


@dataclass(frozen=True)
class Started:
    """The engine of a replica has taken a request in."""

    replica: str
    fingerprint: str


@dataclass(frozen=True)
class Delta:
    """What steps have brought; nothing, to show that the replica is alive.

    Args:
      stats: of all that this replica has done for the request.
    """

    deltas: tuple[StreamOutput, ...] = ()
    stats: RowStats | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class Finished:
    """The request has come to its end.

    Args:
      outputs: log-probabilities of tokens that were delivered before are not in them.
    """

    outputs: tuple[RequestOutput, ...]
    stats: RowStats
    num_cached_tokens: int


@dataclass(frozen=True)
class Rejected:
    """An error that a client may be told, in parts, since exceptions do not travel well."""

    status: int
    message: str
    param: str | None
    code: str | int | None

    @classmethod
    def of(cls, error: BaseException) -> Rejected:
        told = ApiError.of(error)
        return cls(told.status, told.message, told.param, told.code)

    @property
    def error(self) -> ApiError:
        return ApiError(self.status, self.message, self.param, self.code)

    @property
    def may_work_elsewhere(self) -> bool:
        """Whether the replica is to blame, and not the request."""
        return self.status == 503


@dataclass(frozen=True)
class OtherWeights:
    """A replica has other weights than the request was read for: the model was deployed anew."""

    replica: str
    facts: Facts


Message = Routed | Accepted | Started | Delta | Finished | Rejected | OtherWeights


class Failed(Exception):
    """A replica has died, or is not there; what it was asked for may be asked for elsewhere."""


class Fleet(Protocol):
    """All replicas."""

    def generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        """One of them does it.

        Raises: Failed.
        """

    @property
    def facts(self) -> Facts | None:
        """What they serve; None before the first has said so."""

    def adopt(self, facts: Facts) -> None:
        """They serve this from now on."""


# -- what replicas are ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """Stands for a target of which nothing else is asked."""

    vocab_size: int
    num_embeddings: int


@dataclass(frozen=True, eq=False)
class DistantLLM:
    """What the application reads of an `LLM`, of one in another process."""

    tokenizer: Any
    target: Vocabulary
    speculative_config: SpeculativeConfig
    engine_config: EngineConfig
    model_info: ModelInfo
    promise: Promise
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, llm: LLM) -> DistantLLM:
        vocabulary = Vocabulary(llm.target.vocab_size, llm.target.num_embeddings)
        config, engine, info = llm.speculative_config, llm.engine_config, llm.model_info
        return cls(llm.tokenizer, vocabulary, config, engine, info, llm.promise, llm.sampling_defaults)

    def prepare(self, sampling_params: SamplingParams) -> None:
        """Grammars are compiled where they are used."""


@dataclass(frozen=True)
class Facts:
    """What a replica serves.

    Args:
      llms: by name, the default first.
      weights: changes with the weights, the dtype and the tokenizer's size.
      fingerprint: changes with whatever may change bits, so with the weights too.
    """

    llms: Mapping[str, DistantLLM]
    weights: str
    fingerprint: str

    @classmethod
    def of(cls, served: Served) -> Facts:
        distant = {id(llm): DistantLLM.of(llm) for llm in served.llms}
        names = {name: distant[id(llm)] for name, llm in served.names.items()}
        return cls(names, served.weights, served.fingerprint)

    @property
    def num_rows(self) -> int:
        """Rows that run at once on one replica."""
        return next(iter(self.llms.values())).engine_config.max_num_seqs


class Distant(Served):
    """What is served elsewhere."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(cast("Any", dict(facts.llms)))
        self.fingerprint, self.weights = facts.fingerprint, facts.weights

    def warm(self) -> None:
        """Replicas have done so themselves."""

    @classmethod
    def serve(cls, application: Application, facts: Facts) -> None:
        """Let an application answer for what replicas serve from now on."""
        application.served = cls(facts)
