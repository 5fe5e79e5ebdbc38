"""A conversation with a model: messages, answers and statistics, without input and output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foredraft.cli.writers import fates, pooled, ratio
from foredraft.config.keywords import check_unicode
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig, SpeculativeLike
from foredraft.engine.frontend import RequestOutput, StreamOutput
from foredraft.errors import ConfigError, ContextLengthError
from foredraft.llm import LLM

PLAIN = "none"
Put = Callable[[StreamOutput], None]
Stop = Callable[[], bool]


@dataclass(frozen=True)
class ChatTurn:
    """One question and its answer.

    Args:
      message: message of the user.
      method: method of drafting.
      output: prompt, tokens, text, seed and metrics.
      is_stopped: whether the user ended the answer.
    """

    message: str
    method: str
    output: RequestOutput
    is_stopped: bool = False

    @property
    def text(self) -> str:
        return self.output.outputs[0].text

    @property
    def token_ids(self) -> Sequence[int]:
        return self.output.outputs[0].token_ids

    @property
    def seed(self) -> int:
        return self.output.outputs[0].seed

    @property
    def num_fed_tokens(self) -> int:
        """Prompt tokens that were not in the cache. The first decoding step reads the last one."""
        return len(self.output.prompt_token_ids) - self.output.num_cached_tokens


def totals(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    """Counters over some answers, and rates derived from them; 0.0 if nothing was counted."""
    outputs = [turn.output for turn in turns]
    counts = pooled(outputs)
    num_tokens = sum(len(turn.token_ids) for turn in turns)
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
    decode_seconds = sum(output.metrics.decode_seconds for output in outputs)
    plain_seconds = sum(
        output.metrics.decode_seconds * ((output.metrics.governor or {}).get("estimated_speedup") or 1.0)
        for output in outputs
    )
    return {
        "num_turns": len(turns),
        "num_generated_tokens": num_tokens,
        "num_steps": counts.num_steps,
        "tokens_per_step": ratio(num_tokens, counts.num_steps),
        **fates(counts),
        "lossless": all(output.lossless for output in outputs),
        "tokens_per_second": ratio(num_tokens, decode_seconds),
        "estimated_speedup": ratio(plain_seconds, decode_seconds),
        "num_prompt_tokens": num_prompt_tokens,
        "num_cached_tokens": num_cached_tokens,
        "num_fed_tokens": num_prompt_tokens - num_cached_tokens,
    }


@dataclass
class Conversation:
    """Messages between a user and a model, formatted with the tokenizer's chat template.

    The prompt of every turn is the whole conversation. With ``LLM(num_cached_prefixes=...)``, the model reads only the
    tokens that are not in the cache.

    Args:
      llm: the model. Its tokenizer needs a chat template.
      params: sampling parameters of every answer; one sample.
      system: system message, if any.

    Attributes:
      turns: answers in the conversation.
      answered: all answers, including those before a reset and empty ones.

    Raises: ConfigError if there is no chat template or more than one sample per answer; PromptError if the template
      rejects the first messages. Many templates reject system messages.
    Exactness: that of the LLM. Under "match", `again` by plain decoding returns the same tokens.
    Randomness: keyed by the seed of ``params`` in every turn. Without a seed, every answer draws one and reports it.
    """

    llm: LLM
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list, init=False)
    turns: list[ChatTurn] = field(default_factory=list, init=False)
    answered: list[ChatTurn] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.params.n != 1:
            raise ConfigError(f"a conversation needs one sample per answer, but n is {self.params.n}; leave n at 1")
        self._llms = {self.llm.speculative_config: self.llm}
        self.reset()
        self.llm.chat_prompt([*self.messages, {"role": "user", "content": "Hello."}])

    def reset(self) -> None:
        """Remove all messages. Settings, counters and caches stay."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.turns = []

    # -- settings ----------------------------------------------------------------------------------------------

    @property
    def method(self) -> str:
        """Method of drafting."""
        return self.llm.speculative_config.title

    def use(self, config: SpeculativeLike) -> None:
        """Change the method of drafting: a name, or any value of ``speculative_config``.

        Raises: ConfigError, and errors of loading a drafter. After an error, the old method stays.
        """
        self.llm = self._llm(config)

    def _llm(self, config: SpeculativeLike) -> LLM:
        is_name = isinstance(config, str) and not config.lstrip().startswith(("{", "@"))
        parsed = SpeculativeConfig.parse({"method": config} if is_name else config)
        if not is_name:
            return self.llm.with_speculative_config(parsed)
        if parsed not in self._llms:
            self._llms[parsed] = self.llm.with_speculative_config(parsed)
        return self._llms[parsed]

    def seed(self, seed: int | None) -> None:
        """Set the seed of the next answers; None draws a new one for each.

        Raises: ConfigError for a seed out of range.
        """
        self.params = replace(self.params, seed=seed)

    @property
    def num_tokens(self) -> int:
        """Tokens of the conversation up to the end of the last answer."""
        if not self.turns:
            return 0
        last = self.turns[-1]
        return len(last.output.prompt_token_ids) + len(last.token_ids)

    @property
    def max_length(self) -> int | None:
        """Limit on tokens of the conversation; None without a limit."""
        return self.llm.engine_config.max_model_len or self.llm.target.context_length

    # -- answers -----------------------------------------------------------------------------------------------

    def ask(self, text: str, put: Put = lambda delta: None, stop: Stop = lambda: False) -> ChatTurn:
        """Send a message, and add it and its answer to the conversation.

        Args:
          put: called with every piece of the answer.
          stop: called after every piece; True ends the answer. Without any text, neither the answer nor the message is
            added.

        Raises:
          PromptError: the message is not valid Unicode.
          ContextLengthError: the context has no room for an answer.
          NumericsError: the model returned no valid distribution. The conversation is unchanged.
        """
        check_unicode(text, "the message")
        question = {"role": "user", "content": text}
        prompt = self.llm.chat_prompt([*self.messages, question])
        self._check_room(len(prompt["prompt_token_ids"]))
        turn = self._answer(self.llm, text, prompt, self.params, put, stop)
        self.answered.append(turn)
        if turn.text:
            self.messages += [question, {"role": "assistant", "content": turn.text}]
            self.turns.append(turn)
        return turn

    def again(
        self, method: SpeculativeLike = PLAIN, put: Put = lambda delta: None, stop: Stop = lambda: False
    ) -> ChatTurn:
        """Answer the last message again with another method, the same seed and the same number of tokens.

        The conversation is unchanged.

        Raises: ConfigError if there is no answer yet.
        """
        if not self.turns:
            raise ConfigError("there is no answer yet to repeat; ask something first")
        last = self.turns[-1]
        params = replace(self.params, seed=last.seed, max_tokens=len(last.token_ids))
        prompt = {"prompt": last.output.prompt, "prompt_token_ids": list(last.output.prompt_token_ids)}
        return self._answer(self._llm(method), last.message, prompt, params, put, stop)

    def _check_room(self, num_tokens: int) -> None:
        limit = self.max_length
        if limit is not None and num_tokens >= limit:
            raise ContextLengthError(
                f"the conversation with this message has {num_tokens} tokens, and the context holds {limit}: no room "
                "for an answer; start a new one (/reset), or shorten the message"
            )

    @staticmethod
    def _answer(
        llm: LLM, message: str, prompt: dict[str, Any], params: SamplingParams, put: Put, stop: Stop
    ) -> ChatTurn:
        with llm.stream(prompt, params) as stream:
            for delta in stream:
                put(delta)
                if delta.finish_reason is None and stop():
                    break
            is_stopped = stream.num_finished == 0
        return ChatTurn(message, llm.speculative_config.title, stream.output(0), is_stopped)
