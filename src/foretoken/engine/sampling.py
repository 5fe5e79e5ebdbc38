"""The sampling law, once: logits become the target's distribution, and a choice from it, in this file only.

Order and meaning follow transformers 5.23 ``generate`` in float32: logit bias, repetition penalty, presence and
frequency penalty (vLLM's, output tokens only), no-repeat n-grams, bad words, minimum length, custom processors; then,
unless greedy, temperature, top-k, top-p, min-p, typical-p. Every node sees its own path as prefix, through the row's
incremental history plus the path's difference.

One bad row never harms another: where a row holds NaN or +inf, or where nothing is possible, its choice is -1 and its
log-probabilities are NaN. `failure` turns such a row into the error to report. Nothing here raises for a row's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.engine import noise
from foretoken.engine.errors import ConfigError, NumericsError, ShapeError
from foretoken.engine.history import BadWords, NgramIndex, TokenCounts
from foretoken.engine.support import Support, Warper
from foretoken.params import SamplingParams

Path = Sequence[int]
Entries = tuple[np.ndarray, ...]
"""Token ids int64 (S,) of one node, and values that belong to them."""

FEW = 2048
"""Supports up to this size get their noise directly; larger ones are searched for the tokens that can win."""


class SamplingLaw:
    """The processed distribution of one row: its parameters and the history they look at.

    Args:
      params: what the user asked for, ``bad_words`` already resolved to ``bad_words_ids``.
      vocab_size: V of the target.
      eos_token_ids: impossible before ``min_tokens``, exempt from bad words.
      prompt_ids: the prompt; penalties on repetition and n-grams count it.
      device: where the logits live.

    Attributes:
      seed: of the row; the engine sets it, else it is the one of ``params`` or a fresh one.
      custom_processor_seconds: time spent in ``params.logits_processors``.

    Raises: ConfigError when a bias, bad word or stop token lies outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        prompt_ids: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.seed = noise.fresh_seed() if params.seed is None else params.seed
        self.custom_processor_seconds = 0.0
        self.num_output_tokens = 0
        self.is_greedy = params.temperature == 0.0
        self.warper = Warper() if self.is_greedy else Warper.of(params)
        self.kind = (params.temperature, *(() if self.is_greedy else self.warper.truncation))
        self._check_vocabulary()
        eos = tuple(eos_token_ids)
        self._tokens = list(prompt_ids)
        self._seen = TokenCounts(self._tokens) if params.repetition_penalty != 1.0 else None
        self._output = TokenCounts() if params.presence_penalty or params.frequency_penalty else None
        self._ngrams = NgramIndex(size, self._tokens) if (size := params.no_repeat_ngram_size) else None
        self._bad_words = BadWords(params.bad_words_ids, eos) if params.bad_words_ids else None
        self._stop_ids = (*eos, *(params.stop_token_ids or ())) if params.min_tokens else ()

    def _check_vocabulary(self) -> None:
        named = {
            "logit_bias": [int(token) for token in self.params.logit_bias or ()],
            "bad_words_ids": [token for words in self.params.bad_words_ids or () for token in words],
            "stop_token_ids": self.params.stop_token_ids or (),
        }
        for name, tokens in named.items():
            outside = [token for token in tokens if token >= self.vocab_size]
            if outside:
                raise ConfigError(
                    f"{name} holds token ids {outside}, outside of the vocabulary, 0..{self.vocab_size - 1}; "
                    "leave them out"
                )

    def extend(self, tokens: Iterable[int]) -> None:
        """Carry committed output tokens into the history; O(1) per token."""
        tokens = list(tokens)
        self.num_output_tokens += len(tokens)
        self._tokens.extend(tokens)
        if self._seen is not None:
            self._seen.extend(tokens)
        if self._output is not None:
            self._output.extend(tokens)
        if self._ngrams is not None:
            self._ngrams.update()

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the argmax of the raw logits."""
        return self.is_greedy and not self.is_processed

    @property
    def is_processed(self) -> bool:
        """Whether any processor may still change the logits. Minimum length stops to matter once it is reached."""
        return self._has_processors or (bool(self._stop_ids) and self.num_output_tokens < self.params.min_tokens)

    @cached_property
    def _has_processors(self) -> bool:
        params = self.params
        history = (self._seen, self._output, self._ngrams, self._bad_words)
        return bool(params.logit_bias or params.logits_processors) or any(part is not None for part in history)

    # -- what one node changes; ids and values, in HF's order of processors --------------------------------------

    @cached_property
    def _bias(self) -> Entries:
        bias = self.params.logit_bias or {}
        return np.array([*bias.keys()], dtype=np.int64), np.array([*bias.values()], dtype=np.float32)

    def biases(self, path: Path) -> Entries | None:
        """Tokens and what is added to their logits."""
        return self._bias if self.params.logit_bias else None

    def repetitions(self, path: Path) -> Entries | None:
        """Tokens of prompt, output and path, and the repetition penalty."""
        if self._seen is None:
            return None
        ids, _ = self._seen.with_path(path)
        return ids, np.full(len(ids), self.params.repetition_penalty, dtype=np.float32)

    def occurrences(self, path: Path) -> Entries | None:
        """Tokens of output and path, what their counts cost, and what their presence costs."""
        if self._output is None:
            return None
        ids, counts = self._output.with_path(path)
        presence = np.full(len(ids), self.params.presence_penalty, dtype=np.float32)
        return ids, counts * np.float32(self.params.frequency_penalty), presence

    def bans(self, path: Path) -> Entries | None:
        """Tokens that are impossible: they would repeat an n-gram, complete a bad word, or end the output too early."""
        banned: set[int] = set()
        if self._ngrams is not None:
            banned |= self._ngrams.followers(path)
        if self._bad_words is not None:
            width = self._bad_words.longest_prefix
            tail = self._tokens[max(0, len(self._tokens) - width) :] if width else []
            banned.update(self._bad_words.completing([*tail, *path] if width else ()))
        if self._stop_ids and self.num_output_tokens + len(path) < self.params.min_tokens:
            banned.update(self._stop_ids)
        return (np.fromiter(banned, dtype=np.int64, count=len(banned)),) if banned else None

    def run_custom(self, scores: Tensor, paths: Sequence[Path]) -> Tensor:
        """The user's processors on nodes of one depth d: float32 (b, V) and b paths -> float32 (b, V).

        They get the whole prefixes, (b, T + d).
        """
        prefixes = torch.tensor([[*self._tokens, *path] for path in paths], device=scores.device)
        start = perf_counter()
        for processor in self.params.logits_processors or ():
            scores = processor(prefixes, scores)
        self.custom_processor_seconds += perf_counter() - start
        return scores.float()


# -- the three questions -------------------------------------------------------------------------------------------


def log_probs(logits: Tensor, laws: Sequence[SamplingLaw], paths: Sequence[Path]) -> Tensor:
    """The processed distribution at each node, as log-probabilities.

    Args:
      logits: (M, V), any float dtype; never changed.
      laws: M laws, one per node; nodes of one row share theirs.
      paths: M paths, the draft tokens between the row's committed tokens and the node, its own included.

    Returns: float32 (M, V); NaN in rows without a distribution. A greedy row has no temperature and no truncation: its
      entries are the log-softmax of the processed logits, what users expect to be told; the point mass from which it
      is decoded is what `probs` returns.
    Exactness: transformers' own values up to the rounding of the normaliser, and exactly its support.
    """
    scores = process(logits, laws, paths)
    if scores is logits:
        scores = scores.clone()
    for warper, rows in _by_warper(laws, scores):
        scaled = warper.scaled(scores if rows is None else scores[rows])
        result = _log_law(scaled, warper)
        if rows is None:
            scores = result
        else:
            scores[rows] = result
    return scores


def probs(logits: Tensor, laws: Sequence[SamplingLaw], paths: Sequence[Path]) -> Tensor:
    """The law from which each node's token is decoded, float64 (M, V) and summing to one; NaN in bad rows.

    Arguments as for `log_probs`. A greedy row is a point mass on its argmax.
    """
    result = log_probs(logits, laws, paths).double().exp_()
    result /= result.sum(dim=-1, keepdim=True)
    greedy = [row for row, law in enumerate(laws) if law.is_greedy]
    if greedy:
        best = choose(logits[greedy], [laws[row] for row in greedy], [paths[row] for row in greedy], [0] * len(greedy))
        point = torch.zeros(len(greedy), result.shape[1], dtype=torch.float64, device=result.device)
        point.scatter_(1, best.clamp(min=0)[:, None], 1.0)
        point[best < 0] = torch.nan
        result[greedy] = point
    return result


def choose(logits: Tensor, laws: Sequence[SamplingLaw], paths: Sequence[Path], positions: Sequence[int]) -> Tensor:
    """The target's own token at each node: argmax of log p + Gumbel noise keyed by (seed, position, token).

    Source: the Gumbel-max trick (Gumbel 1954); keyed as in `foretoken.engine.noise`.

    Args:
      logits, laws, paths: as for `log_probs`.
      positions: M absolute indices in the sequence of the token being chosen.

    Returns: int64 (M,) on the device of the logits; -1 where `failure` has something to say.
    Exactness: for one node and seed, the same token in any batch, order and draft; over seeds, exactly the law p.
    Randomness: a pure function of (seed of the law, position, token id); none when greedy, where the lowest index of
      the largest logit wins.
    """
    if all(law.is_argmax for law in laws):
        _check_shapes(logits, laws, paths)
        return argmax(logits)
    return choose_siblings(logits, laws, paths, positions, 1)[0][:, 0]


def choose_siblings(
    logits: Tensor, laws: Sequence[SamplingLaw], paths: Sequence[Path], positions: Sequence[int], k: int
) -> tuple[Tensor, Tensor]:
    """The k best tokens at each node under the noise of `choose`: the natural children of a drafted node.

    Source: Gumbel-top-k sampling without replacement (Kool et al. 2019, arXiv:1903.06059).

    Args: as for `choose`; k: 1 or more.

    Returns: tokens int64 (M, k), best first, the first column equal to `choose`; scores float64 (M, k), perturbed log-
      probability minus the row's best (log-probability when greedy). Where fewer than k tokens are possible, and in bad
      rows, tokens are -1 and scores -inf.
    Exactness: over seeds, k draws without replacement from the law.
    Randomness: as for `choose`.
    """
    scores = process(logits, laws, paths)
    groups = _by_kind(laws)
    if len(groups) == 1:
        return _best(scores, laws, positions, k)
    tokens = torch.empty(len(laws), k, dtype=torch.int64, device=logits.device)
    values = torch.empty(len(laws), k, dtype=torch.float64, device=logits.device)
    for rows in groups:
        group = _best(scores[rows], [laws[row] for row in rows], [positions[row] for row in rows], k)
        tokens[rows], values[rows] = group
    return tokens, values


def failure(logits: Tensor, law: SamplingLaw) -> NumericsError:
    """The error for a row (V,) of logits whose choice was -1."""
    if bool(torch.isnan(logits).any()):
        return NumericsError("the model returned NaN logits; try a wider dtype, or check the weights")
    if not bool((logits > -torch.inf).any()):
        return NumericsError("the model returned -inf for every token; check its attention mask and weights")
    if bool((logits == torch.inf).any()):
        return NumericsError("the model returned infinite logits; try a wider dtype, or check the weights")
    return NumericsError(
        "the sampling parameters leave no token possible; relax bad_words, no_repeat_ngram_size, logit_bias, "
        f"min_tokens or logits_processors ({law.params})"
    )


# -- processors ----------------------------------------------------------------------------------------------------


def process(logits: Tensor, laws: Sequence[SamplingLaw], paths: Sequence[Path]) -> Tensor:
    """Everything before the temperature: (M, V) of any float dtype -> float32 (M, V).

    The input itself comes back when it is float32 and no processor is active; it is never changed.
    """
    _check_shapes(logits, laws, paths)
    active = [row for row, law in enumerate(laws) if law.is_processed]
    if not active:
        return logits.float()
    scores = logits.detach().to(torch.float32, copy=True)
    on_cpu = scores.device.type == "cpu"
    flat: Any = scores.view(-1).numpy() if on_cpu else scores.view(-1)
    where_of: Any = np.where if on_cpu else torch.where

    def gathered(entries_of: Callable[[SamplingLaw, Path], Entries | None]) -> list[Any]:
        return _gathered([(row, entries_of(laws[row], paths[row])) for row in active], scores)

    if added := gathered(SamplingLaw.biases):
        where, bias = added
        flat[where] = flat[where] + bias
    if repeated := gathered(SamplingLaw.repetitions):
        where, penalty = repeated
        values = flat[where]
        flat[where] = where_of(values < 0, values * penalty, values / penalty)
    if counted := gathered(SamplingLaw.occurrences):
        where, frequency, presence = counted
        flat[where] = flat[where] - frequency - presence
    if banned := gathered(SamplingLaw.bans):
        flat[banned[0]] = -torch.inf
    for law, rows in _by_prefix_length(active, laws, paths):
        scores[rows] = law.run_custom(scores[rows], [paths[row] for row in rows])
    return scores


def _check_shapes(logits: Tensor, laws: Sequence[SamplingLaw], paths: Sequence[Path]) -> None:
    if logits.ndim != 2 or not logits.shape[0] == len(laws) == len(paths):
        raise ShapeError(f"logits {tuple(logits.shape)}, {len(laws)} laws, {len(paths)} paths; want (M, V), M and M")


def _gathered(parts: Sequence[tuple[int, Entries | None]], scores: Tensor) -> list[Any]:
    """Entries of several rows as flat indices into (M, V), and their values; empty when no row has any.

    Token 3 of row 2 at V = 10 becomes 23. Tokens outside of the logits' vocabulary are left out. Arrays on the CPU,
    where numpy's indexing is several times faster than torch's, and tensors elsewhere.
    """
    vocab_size = scores.shape[1]
    columns: list[list[np.ndarray]] = []
    for row, entries in parts:
        if entries is None or not len(entries[0]):
            continue
        ids, *values = entries
        if ids.max() >= vocab_size:
            inside = ids < vocab_size
            ids, values = ids[inside], [value[inside] for value in values]
        columns.append([ids + row * vocab_size, *values])
    arrays = [part[0] if len(part) == 1 else np.concatenate(part) for part in zip(*columns, strict=True)]
    if scores.device.type == "cpu":
        return arrays
    return [torch.from_numpy(array).to(scores.device) for array in arrays]


def _by_prefix_length(
    rows: Sequence[int], laws: Sequence[SamplingLaw], paths: Sequence[Path]
) -> list[tuple[SamplingLaw, list[int]]]:
    """Nodes with custom processors, those of one sequence and depth together."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        if laws[row].params.logits_processors:
            groups.setdefault((id(laws[row]), len(paths[row])), []).append(row)
    return [(laws[group[0]], group) for group in groups.values()]


def _by_kind(laws: Sequence[SamplingLaw]) -> list[list[int]]:
    """Rows with equal temperature and truncation, greedy ones apart."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for row, law in enumerate(laws):
        groups.setdefault(law.kind, []).append(row)
    return list(groups.values())


def _by_warper(laws: Sequence[SamplingLaw], scores: Tensor) -> list[tuple[Warper, list[int] | None]]:
    """Rows with equal temperature and truncation; None stands for all of them."""
    groups: dict[Warper, list[int]] = {}
    for row, law in enumerate(laws):
        groups.setdefault(law.warper, []).append(row)
    return [(warper, rows if len(groups) > 1 else None) for warper, rows in groups.items()]


# -- laws and choices of rows with equal parameters ----------------------------------------------------------------


def argmax(logits: Tensor) -> Tensor:
    """Lowest index of the largest logit in float32, as greedy ``generate`` takes it; -1 in bad rows.

    (M, V) of any float dtype -> int64 (M,). It is the choice of every law with ``is_argmax``.
    """
    scores = logits.float()
    if scores.device.type == "cpu":
        table = scores.detach().numpy()
        columns = table.argmax(axis=-1)  # torch's takes 20 times longer
        columns[~np.isfinite(table[np.arange(len(table)), columns])] = -1
        return torch.from_numpy(columns)
    best = scores.argmax(dim=-1)
    return best.where(scores.gather(1, best[:, None])[:, 0].isfinite(), -1)


def _best(scores: Tensor, laws: Sequence[SamplingLaw], positions: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The k best tokens of rows of one kind, and their distance to the best: (M, k) int64 and float64."""
    if laws[0].is_greedy:
        return _largest(scores, k)
    warper = laws[0].warper
    keys = [noise.row_key(law.seed, position) for law, position in zip(laws, positions, strict=True)]
    return _perturbed_best(warper, warper.scaled(scores), keys, k)


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries, the argmax first: tokens and differences to the largest."""
    best = argmax(scores)
    if k == 1:
        return best[:, None], torch.where(best < 0, -torch.inf, 0.0).double()[:, None]
    peaks = scores.gather(1, best.clamp(min=0)[:, None])
    marked = scores.double().scatter(1, best.clamp(min=0)[:, None], torch.inf)
    values, tokens = marked.topk(min(k, scores.shape[1]), dim=-1)
    values = values - peaks.double()
    values[:, 0] = 0.0
    return _padded(tokens, values.where((best >= 0)[:, None], -torch.inf), k)


def _padded(tokens: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """k columns, -1 and -inf where there is no token."""
    missing = k - tokens.shape[1]
    tokens = torch.nn.functional.pad(tokens, (0, missing), value=-1)
    values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    return tokens.where(values > -torch.inf, -1), values


def _log_law(scaled: Tensor, warper: Warper) -> Tensor:
    """Log-probabilities of rows with equal parameters, NaN in bad ones: float32 (M, V) -> float32 (M, V)."""
    if not warper.truncates or scaled.device.type != "cpu" or not warper.has_shortcut:
        result = torch.log_softmax(warper.truncated(scaled), dim=-1)
        return result.where(scaled.amax(dim=-1, keepdim=True).isfinite(), torch.nan)
    result = torch.full_like(scaled, -torch.inf)
    for row, values in enumerate(scaled.detach().numpy()):
        peak = float(values.max())
        if not math.isfinite(peak):
            result[row] = torch.nan
            continue
        support = warper.support(values, peak)
        if not support.is_sure:
            support = support.among(warper.kept(values))
        normaliser = peak + np.log(support.weights.sum(dtype=np.float64))
        result[row].numpy()[support.ids] = support.scores - np.float32(normaliser)
    return result


def _perturbed_best(warper: Warper, scaled: Tensor, keys: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The k largest of log p + noise per row, and their distance to the largest: int64 and float64 (M, k)."""
    if scaled.device.type != "cpu" or not warper.has_shortcut:
        return _perturbed_best_dense(warper, scaled, keys, k)
    tokens = np.full((len(keys), k), -1, dtype=np.int64)
    values = np.full((len(keys), k), -np.inf)
    search = _Search(scaled.shape[1])
    for row, (scores, key) in enumerate(zip(scaled.detach().numpy(), keys, strict=True)):
        peak = float(scores.max())
        if not math.isfinite(peak):
            continue
        support = warper.support(scores, peak)
        best, perturbed = search.best(support, key, k)
        if not support.is_sure and _any_unsure(support, best):
            support = support.among(warper.kept(scores))
            best, perturbed = search.best(support, key, k)
        tokens[row, : len(best)] = support.ids[best]
        values[row, : len(best)] = perturbed - perturbed[0]
    return torch.from_numpy(tokens), torch.from_numpy(values)


def _any_unsure(support: Support, indices: np.ndarray) -> bool:
    return bool((support.weights[indices] <= support.unsure_weight).any())


def _perturbed_best_dense(warper: Warper, scaled: Tensor, keys: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The same on any device, with noise for the whole vocabulary."""
    healthy = scaled.amax(dim=-1).isfinite()
    tokens = torch.arange(scaled.shape[1], device=scaled.device)
    words = noise.bits(torch.tensor(noise.as_int64(keys), device=scaled.device)[:, None], tokens)
    perturbed = warper.truncated(scaled).double() + noise.gumbel_of_bits(words)
    perturbed = perturbed.where(healthy[:, None], -torch.inf)
    values, best = perturbed.topk(min(k, scaled.shape[1]), dim=-1)
    distance = torch.where(values > -torch.inf, values - values[:, :1], -torch.inf)
    return _padded(best, distance, k)


class _Search:
    """Finds the k largest of score + noise in the supports of rows of one width, on the CPU."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @cached_property
    def _scratch(self) -> noise.Scratch:
        return noise.Scratch.of(self._vocab_size)

    def best(self, support: Support, key: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices into the support, best first, and their perturbed scores; fewer than k where it is smaller."""
        if len(support.ids) > max(FEW, k):
            candidates = self._candidates(support, key, k)
            best, perturbed = _ranked(support, candidates, key, k)
            return candidates[best], perturbed
        return _ranked(support, slice(None), key, k)

    def _candidates(self, support: Support, key: int, k: int) -> np.ndarray:
        """Indices of the few tokens among which the k best are certain to be.

        With e = -log u the perturbed score is log w - log e, so the largest score has the smallest e / w. Since
        e >= 1 - u =: c, a token with c > w R cannot beat a score of -log R.
        """
        rest = noise.complements(key, self._scratch)
        if len(support.ids) < self._vocab_size:
            rest = rest[support.ids]
        with np.errstate(divide="ignore"):
            ratios = rest / support.weights
        first = np.argpartition(ratios, k - 1)[:k] if k > 1 else np.array([ratios.argmin()])
        worst = float(_ranked(support, first, key, k)[1][-1])
        reach = np.exp(support.peak - worst)
        found: np.ndarray = np.flatnonzero(
            rest <= support.weights * np.float32(reach * (1 + 1e-4)) + np.float32(2.0**-31)
        )
        return found


def _ranked(support: Support, among: np.ndarray | slice, key: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best among some members of a support: indices into ``among``, and perturbed scores."""
    ids = support.ids[among]
    perturbed = support.scores[among] + noise.token_gumbel(np.array(key, dtype=np.uint64), ids)
    if k == 1:
        best = np.array([perturbed.argmax()])
    else:
        best = np.argsort(-perturbed, kind="stable")[:k]
        best = best[perturbed[best] > -np.inf]
    return best, perturbed[best]
