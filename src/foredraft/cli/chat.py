"""``foredraft chat``: a conversation in a terminal, or one message per line of standard input."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from foredraft.beginnings import shared_length
from foredraft.cli.help import LIMITS, OUTPUT
from foredraft.cli.options import AsJson, DraftingOptions, Loading, ModelChoice, SamplingOptions, takes_groups
from foredraft.cli.running import (
    EXIT_DIFFERS,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    exit_codes,
    load_llm,
    put_json,
    show_loading,
)
from foredraft.cli.writers import as_record, closing, write_segments
from foredraft.config.keywords import did_you_mean
from foredraft.config.sampling import UnsetInt
from foredraft.engine.frontend import StreamOutput
from foredraft.errors import ConfigError, ForedraftError, error_text
from foredraft.native.abi import MOST_NODES

if TYPE_CHECKING:
    from foredraft.cli.conversation import ChatTurn, Conversation


ANSWER_TOKENS = 256
KEPT_PREFIXES = 2  # this conversation and the one before a /reset
HELP = {
    "/method [NAME]": "change the method of drafting (also JSON, @file); none: plain decoding",
    "/plain": "repeat the last answer by plain decoding, and compare",
    "/stats": "counters of this chat",
    "/seed [N]": "sample answers with this seed; random: a new seed for every answer",
    "/reset": "forget the conversation",
    "/help": "this list; write // for a message that begins with /",
    "/quit": "end the chat, like Ctrl-D; Ctrl-C ends only the answer",
}


@takes_groups
def chat(
    *,
    model: ModelChoice,
    drafting: DraftingOptions,
    system: Annotated[str | None, typer.Option(help="System message. Not every chat template supports it.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Limit on tokens per answer. Default: the model's, else {ANSWER_TOKENS}.")
    ] = None,
    sampling: Annotated[SamplingOptions, "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"],
    max_model_len: Annotated[
        int | None, typer.Option(rich_help_panel=LIMITS, help="Limit on tokens of the conversation.")
    ] = None,
    loading: Loading,
    as_json: AsJson = False,
    stats: Annotated[
        bool, typer.Option("--stats", rich_help_panel=OUTPUT, help="Explain the speed of every answer.")
    ] = False,
) -> None:
    """Talk to a model in the terminal.

    Lines that start with / are commands; /help lists them. Without a terminal, every line of standard input is a
    message, and standard output has the answers only.

    Examples:
      foredraft chat
      foredraft chat --model path/to/model --temperature 0.7
      echo "Tell me a joke." | foredraft chat
    """
    with exit_codes():
        params = sampling.params(max_tokens=UnsetInt(ANSWER_TOKENS) if max_new_tokens is None else max_new_tokens)
        name = model.chosen()
        show_loading(name)
        from foredraft.cli.conversation import Conversation

        llm = load_llm(
            name,
            drafting.config(loading.profile_file),
            gguf_file=model.gguf_file,
            **vars(loading),
            max_model_len=max_model_len,
            num_cached_prefixes=KEPT_PREFIXES,
            prefill_chunk_size=MOST_NODES,  # prompts then use the kernels of steps, so answers stay in the cache
        )
        llm.logs_low_gain = stats
        screen = JsonScreen() if as_json else Screen()
        conversation = Conversation(llm, params.filled(llm.sampling_defaults), system)
        code = Chat(conversation, screen, shows_details=stats).run()
    if code:
        raise typer.Exit(code)


class Chat:
    """Reads messages and commands, and runs them.

    Args:
      screen: source of lines and destination of answers.
      shows_details: explain the speed of every answer.
    """

    def __init__(self, conversation: Conversation, screen: Screen, *, shows_details: bool = False) -> None:
        self.conversation = conversation
        self.screen = screen
        self._shows_details = shows_details
        self._code = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/method": self._method,
            "/plain": self._plain,
            "/stats": self._stats,
            "/seed": self._seed,
            "/reset": self._reset,
            "/help": self._help,
        }

    def run(self) -> int:
        """Run until the end of input or /quit, and return the exit code, which is always 0 on a terminal."""
        self.screen.greet()
        for line in self.screen.lines():
            if line.split()[:1] in (["/quit"], ["/exit"]):
                break
            try:
                self._act(line)
            except ForedraftError as error:
                self._fail(EXIT_REFUSED)
                self.screen.complain(error)
            except KeyboardInterrupt:
                if not self.screen.is_interactive:
                    raise
                self.screen.say("(interrupted; the question is dropped)")
        return 0 if self.screen.is_interactive else self._code

    def _fail(self, code: int) -> None:
        self._code = max(self._code, code)

    def _act(self, line: str) -> None:
        if not line.startswith("/") or line.startswith("//"):
            self._ask(line.removeprefix("/") if line.startswith("//") else line)
            return
        name, _, argument = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            hint = did_you_mean(name, [*self._commands, "/quit"], shown=str)
            raise ConfigError(f"there is no command {name}; {hint} Write // for a message that begins with /")
        command(argument.strip())

    def _ask(self, text: str) -> None:
        with self.screen.answering() as stop:
            turn = self.conversation.ask(text, self.screen.put, stop)
        self.screen.finish(turn)
        self.screen.say(_ending(turn, self.conversation))
        self.screen.note("\n".join(closing([turn.output], is_sampled=False, shows_details=self._shows_details)))

    # -- commands ----------------------------------------------------------------------------------------------

    def _method(self, argument: str) -> None:
        if argument:
            self.conversation.use(argument)
        config = self.conversation.llm.speculative_config
        drafted = f", drafts of up to {config.num_speculative_tokens} tokens" if config.is_speculative else ""
        self.screen.say(f"method {self.conversation.method}{drafted}")

    def _plain(self, _: str) -> None:
        with self.screen.answering() as stop:
            turn = self.conversation.again(put=self.screen.put, stop=stop)
        last = self.conversation.turns[-1]
        shown = len(turn.token_ids) if turn.is_stopped else len(last.token_ids)
        is_identical = turn.token_ids == last.token_ids[:shown]
        self.screen.finish(turn, identical=is_identical)
        if is_identical:
            self.screen.say(
                f"identical: {shown} of {len(last.token_ids)} tokens{_seed(last, self.conversation)}; {last.method} "
                f"took {_steps(last)} steps, plain decoding {_steps(turn)}"
            )
        else:
            self._fail(EXIT_DIFFERS)
            same = shared_length(turn.token_ids, last.token_ids)
            self.screen.say(f"different from token {same} on: {_why_different(self.conversation)}")

    def _stats(self, _: str) -> None:
        from foredraft.cli.conversation import totals

        conversation = self.conversation
        self.screen.table(
            {
                "method": conversation.method,
                "seed": "random" if conversation.params.seed is None else conversation.params.seed,
                **totals(conversation.answered),
                "context_tokens": conversation.num_tokens,
                "max_context_tokens": conversation.max_length,
            }
        )

    def _seed(self, argument: str) -> None:
        if argument == "random":
            self.conversation.seed(None)
        elif argument:
            self.conversation.seed(_whole(argument))
        seed = self.conversation.params.seed
        self.screen.say("a new seed for every answer" if seed is None else f"seed {seed}")

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        self.screen.say("the conversation is empty")

    def _help(self, _: str) -> None:
        self.screen.say("\n".join(f"{usage:<16} {meaning}" for usage, meaning in HELP.items()))


def _ending(turn: ChatTurn, conversation: Conversation) -> str:
    """Note on the end of an answer; empty if the model ended it."""
    if turn.is_stopped:
        return "(stopped)" if turn.text else "(stopped before the first word; the question is dropped)"
    if turn.output.outputs[0].finish_reason != "length":
        return ""
    limit = conversation.max_length
    if limit is not None and conversation.num_tokens >= limit:
        return f"(stopped: the conversation fills the context of {limit} tokens; /reset starts a new one)"
    return f"(stopped at the limit of {len(turn.token_ids)} tokens; raise it with --max-new-tokens)"


def _why_different(conversation: Conversation) -> str:
    config = conversation.llm.speculative_config
    if not config.rule.is_lossless:
        return f"rule {config.rejection_sample_method!r} is lossy; rule 'match' keeps the tokens of plain decoding"
    if not config.rule.keeps_tokens:
        return f"rule {config.rejection_sample_method!r} keeps the distribution only; rule 'match' keeps the tokens too"
    return "two tokens may be so close that rounding decides between them; --dtype float32 makes this rare"


def _whole(argument: str) -> int:
    try:
        return int(argument)
    except ValueError:
        raise ConfigError(f"the seed is {argument!r}; give a whole number, or random") from None


def _seed(turn: ChatTurn, conversation: Conversation) -> str:
    return "" if conversation.params.is_greedy else f", seed {turn.seed}"


def _steps(turn: ChatTurn) -> int:
    return int(turn.output.metrics.speculative_decoding["num_steps"])


class Screen:
    """Standard input and output. Without a terminal, standard output has the answers only."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._console = Console(highlight=False, soft_wrap=True)
        self._notices = Console(stderr=not self.is_interactive, highlight=False, soft_wrap=not self.is_interactive)

    def greet(self) -> None:
        if self.is_interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  line editing and history for input()
            self.say("/help lists the commands")

    def lines(self) -> Iterator[str]:
        """Lines of input that are not empty."""
        while True:
            try:
                line = input("> ") if self.is_interactive else sys.stdin.readline()
            except EOFError:
                self._console.file.write("\n")
                return
            except KeyboardInterrupt:
                if not self.is_interactive:
                    raise typer.Exit(EXIT_INTERRUPTED) from None
                self.say("\n(Ctrl-D or /quit ends the chat)")
                continue
            if not line and not self.is_interactive:
                return
            if line.strip():
                yield line.strip()

    @contextmanager
    def answering(self) -> Iterator[Callable[[], bool]]:
        """Context of an answer. The returned function returns whether Ctrl-C was pressed; a second Ctrl-C
        interrupts at once."""
        if not self.is_interactive:
            yield lambda: False
            return
        pressed: list[int] = []

        def press(number: int, frame: FrameType | None) -> None:
            pressed.append(number)
            if len(pressed) > 1:
                raise KeyboardInterrupt

        previous = signal.signal(signal.SIGINT, press)
        try:
            yield lambda: bool(pressed)
        finally:
            signal.signal(signal.SIGINT, previous)

    def put(self, delta: StreamOutput) -> None:
        """Write a piece of an answer."""
        write_segments(self._console, delta.segments)

    def finish(self, turn: ChatTurn, **facts: Any) -> None:
        """End the answer."""
        self._console.file.write("\n")
        self._console.file.flush()

    def say(self, text: str) -> None:
        """Write a message that is not an answer."""
        if text:
            self._notices.print(Text(text, "dim"))

    def note(self, text: str) -> None:
        """Write the closing line of an answer."""
        self.say(text)

    def table(self, values: dict[str, Any]) -> None:
        """Write named values."""
        self.say("\n".join(f"{name.replace('_', ' '):<22} {_shown(value)}" for name, value in values.items()))

    def complain(self, error: ForedraftError) -> None:
        """Write the message of an error."""
        self._notices.print(Text(error_text(error), "red"))


class JsonScreen(Screen):
    """One JSON object per answer and per /stats. Other messages go to standard error."""

    def __init__(self) -> None:
        super().__init__()
        self._notices = Console(stderr=True, highlight=False, soft_wrap=True)

    def put(self, delta: StreamOutput) -> None:
        """Write nothing: answers are written whole."""

    def finish(self, turn: ChatTurn, **facts: Any) -> None:
        record = as_record(turn.output, turn.message)
        put_json({**record, "num_cached_tokens": turn.output.num_cached_tokens, "method": turn.method, **facts})

    def note(self, text: str) -> None:
        """Write nothing: the JSON object has the counts."""

    def table(self, values: dict[str, Any]) -> None:
        put_json({"stats": values})


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items()).replace("_", " ") or "none"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
