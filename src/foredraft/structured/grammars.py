"""Grammars for one tokenizer: compiled once, cached for later requests, and limited in size and time."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from foredraft.config.structured import StructuredOutputs
from foredraft.errors import ConfigError, GrammarError
from foredraft.extras import install_command
from foredraft.structured.forcing import Vocabulary
from foredraft.structured.matching import MAX_STATES, Compiled, Matching, first_line
from foredraft.structured.schemas import prepared, unheld_keywords

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("foredraft")

MOST_KEPT, MOST_KEPT_CHARACTERS = 64, 1 << 20
"""Maximum number of compiled grammars in the cache, and of their characters; the least recently used are dropped. A
compiled grammar takes some 40 bytes per character."""
MOST_MASKS = 1 << 13
"""Number of masks made by matchers of one compiled grammar after which the next request compiles it again. Masks add
states to the shared automaton, some 20 MB by then for a bad grammar, and 64 MB at `MAX_STATES`.
"""
WHITE_SPACE = r" |\n[ \t]{0,16}"
"""Default white space between the parts of JSON. Without a limit, small models write white space until their budget
ends.
"""
STACK_BYTES = 1 << 29
"""Stack size of the compiling thread. llguidance recurses once for every rule that refers to the next, at some 2 kB
each, and `MAX_CHARACTERS` allow 15,000 such rules. A stack of 8 MB crashed at 5,000. Only used pages take memory.
"""
UNFORCED = '%llguidance {"no_forcing": true}'
"""Option that keeps llguidance from computing forced text to its end in every mask. `Place.forced` computes the part
that a draft needs.
"""
MAX_TOKENS = "max_tokens"
"""Keyword of grammars that count tokens. Forced text is found byte by byte, which such grammars would miscount."""
MAX_GBNF_CHARACTERS = 1 << 14
"""Length of the longest grammar in llama.cpp's format. Converting 700 rules to Lark takes a second, and 5,000 rules
take 37.
"""
ONE_OF = "oneOf constraints are not supported"
OF_SCHEMA = "failed to compile JSON schema: "
_sizing = threading.Lock()  # the stack size of new threads is a setting of the whole process
_ENDLESS = re.compile(r"-\d{19}(?![\d.eE])")
"""Integers that may round to -2**63, which send llguidance 1.9 into an endless recursion."""


class Grammars:
    """Compiles grammars and makes matchers for the rows of one model.

    Source: llguidance (github.com/guidance-ai/llguidance). Limits of llguidance bound the work of compiling and of
      every mask, whatever the grammar.

    Args:
      tokenizer: tokenizer of the model; None if it has none.
      vocab_size: V of the model.
      eos_token_ids: EOS tokens of the model.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[StructuredOutputs, Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def compile(self, wanted: StructuredOutputs) -> None:
        """Compile a grammar in advance, so that rows that use it need not wait.

        Raises: GrammarError for an invalid grammar, or one that costs too much; ConfigError without llguidance.
        """
        self._found(wanted)

    def matching(self, wanted: StructuredOutputs) -> Matching:
        """Return the matcher of a new row. Raises: as `compile`."""
        return Matching(self._found(wanted), self._eos, self._vocab_size)

    def _found(self, wanted: StructuredOutputs) -> Compiled:
        if (found := self._known(wanted)) is not None:
            return found
        with self._compiling:  # other threads can still use cached grammars
            found = self._known(wanted) or self._newly_compiled(wanted)
            with self._lock:
                self._compiled[wanted] = found
                self._compiled.move_to_end(wanted)
                while self._keeps_too_much():
                    self._compiled.popitem(last=False)
            return found

    def _keeps_too_much(self) -> bool:
        num_characters = sum(wanted.num_characters for wanted in self._compiled)
        return len(self._compiled) > max(1, MOST_KEPT if num_characters <= MOST_KEPT_CHARACTERS else 0)

    def _known(self, wanted: StructuredOutputs) -> Compiled | None:
        """Return a compiled grammar from the cache if it may still be used."""
        with self._lock:
            found = self._compiled.get(wanted)
            if found is None or found.is_full or found.num_masks > MOST_MASKS:
                return None
            self._compiled.move_to_end(wanted)
            return found

    def _newly_compiled(self, wanted: StructuredOutputs) -> Compiled:
        if told := unheld_keywords(wanted):
            logger.warning("no mask can enforce %s of the JSON schema, so outputs may violate it", ", ".join(told))
        compiled = Compiled(lambda: _on_large_stack(lambda: self._new(wanted)))
        counts_tokens = wanted.grammar is not None and MAX_TOKENS in wanted.grammar
        compiled.vocabulary = None if counts_tokens else self._vocabulary
        return compiled

    def _new(self, wanted: StructuredOutputs) -> LLMatcher:
        require_llguidance()
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._read_tokenizer(), self._eos)
        return _matcher(wanted, self._vocabulary.tokenizer)

    def _read_tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        if self._tokenizer is None:
            raise GrammarError(
                "structured_outputs needs a tokenizer; put its files beside the weights (in Python, tokenizer=...)"
            )
        if not self._eos:
            raise GrammarError("structured_outputs needs an EOS token to end the output, but this model has none")
        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=list(self._eos))
        except Exception as error:
            raise GrammarError(
                f"structured_outputs cannot read the tokenizer of this model ({error}); use a fast tokenizer, which is "
                "based on the tokenizers library"
            ) from None


def check_grammar(wanted: StructuredOutputs) -> None:
    """Check a grammar before a model is loaded, for a tokenizer that has one token for each byte.

    A Lark grammar that may name special tokens is left to `Grammars.compile`, which knows them.

    Raises: as `Grammars.compile`.
    """
    require_llguidance()
    from llguidance import LLTokenizer

    if wanted.grammar is None or "<" not in wanted.grammar:
        _on_large_stack(lambda: _matcher(wanted, LLTokenizer("byte")))


def require_llguidance() -> None:
    """Raise ConfigError if llguidance is not installed."""
    try:
        import llguidance  # noqa: F401 - only whether it is there
    except ImportError:
        raise ConfigError(
            f"structured_outputs needs llguidance, which is not installed: {install_command('structured')}"
        ) from None


def _matcher(wanted: StructuredOutputs, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_STATES)
    for splits_one_of in (False, True):
        try:
            grammar = f"{written(wanted, splits_one_of=splits_one_of)}\n{UNFORCED}"
        except ValueError as error:
            raise refused(wanted, str(error)) from None
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if wanted.json is None or ONE_OF not in matcher.get_error():
            break
    if not matcher.is_error():
        matcher.compute_bitmask()  # fails if no output matches
    if matcher.is_error():
        raise refused(wanted, matcher.get_error())
    return matcher


def _on_large_stack(compile: Callable[[], LLMatcher]) -> LLMatcher:
    """Run a function in a thread with a large stack and return its result."""
    result: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            result.set_result(compile())
        except BaseException as error:
            result.set_exception(error)

    with _sizing:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="foredraft-grammar", daemon=True).start()
        except RuntimeError:
            raise GrammarError(
                f"no stack of {STACK_BYTES >> 20} MiB can be allocated for compiling structured_outputs; raise the "
                "limit of the process's address space"
            ) from None
        finally:
            threading.stack_size(before)
    return result.result()


def check_integers(text: str) -> None:
    """Check that a text has no integer at which llguidance would crash the process.

    Raises: ValueError if it has one.
    """
    for found in _ENDLESS.finditer(text):
        if float(found[0]) == -(2.0**63):
            raise ValueError(f"the integer {found[0]} cannot be compiled; write it as {found[0]}.0")


def refused(wanted: StructuredOutputs, reason: str) -> GrammarError:
    """Return the error for a grammar, with llguidance's reason."""
    reason = reason.rpartition(OF_SCHEMA)[2] if wanted.json is not None else reason
    said = "no text matches it" if reason.startswith("NoExtension") else first_line(reason)
    return GrammarError(f"structured_outputs.{wanted.kind} is refused: {said}")


def written(wanted: StructuredOutputs, *, splits_one_of: bool = False) -> str:
    """Return the grammar in llguidance's variant of Lark. Raises: ValueError for an invalid schema."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import is_lark_syntax

    if wanted.regex is not None:
        regex: str = json.loads(LLMatcher.grammar_from_regex(wanted.regex))["grammars"][0]["lark_grammar"]
        return regex
    if wanted.choice is not None:
        texts = [json.dumps(text, ensure_ascii=False) for text in wanted.choice]
        return f"start: TEXT\nTEXT: {' | '.join(texts)}"  # one terminal, since rules allow only 2,000 alternatives
    if wanted.grammar is not None:
        check_integers(wanted.grammar)  # it may contain JSON schemas
        return wanted.grammar if is_lark_syntax(wanted.grammar) else _from_gbnf(wanted.grammar)
    options: dict[str, Any] = {"whitespace_flexible": not wanted.disable_any_whitespace}
    if wanted.whitespace_pattern is not None:
        options["whitespace_pattern"] = wanted.whitespace_pattern
    elif not wanted.disable_any_whitespace:
        options["whitespace_pattern"] = WHITE_SPACE
    text = '{"type": "object"}' if wanted.json is None else str(wanted.json)
    check_integers(text)
    try:
        schema = json.loads(text)
        if not isinstance(schema, dict | bool):
            raise ValueError("it is neither an object nor a boolean")
        schema, _ = prepared(schema, splits_one_of=splits_one_of)
        given = schema.get("x-guidance")
        schema["x-guidance"] = {**(given if isinstance(given, dict) else {}), **options}
        return f"start: %json {json.dumps(schema, allow_nan=False)}"
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _from_gbnf(text: str) -> str:
    """Convert a grammar from llama.cpp's format to llguidance's variant of Lark."""
    from llguidance import grammar_from

    if len(text) > MAX_GBNF_CHARACTERS:
        raise ValueError(
            f"a GBNF grammar may have at most {MAX_GBNF_CHARACTERS} characters, but this one has {len(text)}; make it "
            "smaller, or write it in Lark's format, with a rule 'start'"
        )
    return grammar_from("gbnf", text)
