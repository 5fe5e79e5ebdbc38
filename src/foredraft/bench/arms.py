"""Benchmark arms that run foredraft's engine, one row at a time or in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from time import perf_counter
from typing import Any

from foredraft.bench.trial import Arm, Run, Sampling, rows_of
from foredraft.config.speculative import SpeculativeConfig
from foredraft.engine import governor as governing
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine, EngineConfig
from foredraft.engine.row import Row, RowOutput
from foredraft.engine.stats import RowStats
from foredraft.loading.info import Loaded, eos_token_ids
from foredraft.loading.models import adapter_of, is_zoo
from foredraft.loading.pairing import Pairing
from foredraft.model.lm import CausalLM


class EngineArm(Arm):
    """An arm that runs foredraft's engine. Engine and cache exist as long as the arm, as in `LLM`.

    Args:
      config: config of the engine; by default one row at a time.
      is_governed: True if measured costs decide the size of drafts.
    """

    def __init__(
        self,
        name: str,
        target: CausalLM,
        drafter: Drafter,
        eos_token_ids: Iterable[int] = (),
        config: EngineConfig | None = None,
        *,
        is_governed: bool = False,
    ) -> None:
        self.name = name
        self.engine = Engine(
            target,
            drafter,
            config or EngineConfig(max_num_seqs=1),
            eos_token_ids=eos_token_ids,
            governor=governing.new_governor(target, drafter) if is_governed else None,
        )

    def run(self, prompt_ids: Sequence[Any], max_new_tokens: int, sampling: Sampling) -> Run:
        """Decode a prompt, or a group of prompts in batches of ``max_num_seqs`` rows.

        Raises: the error with which a row ended, if any.
        """
        prompts = rows_of(prompt_ids)
        if prompts[0] is not prompt_ids:
            return self._run_group(prompts, max_new_tokens, sampling)
        started, emissions = perf_counter(), list[tuple[float, int]]()
        (row,) = self.engine.add_request(prompt_ids, sampling.params(max_new_tokens))
        while not row.is_finished:
            for output in self._step():
                emissions.append((perf_counter(), len(output.token_ids)))
        return Run.of(row.output_ids, started, emissions, stats=row.stats, trace=tuple(row.trace))

    def _run_group(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling) -> Run:
        """Decode one batch after another. The decoding time of a batch starts when all of its rows have been
        prefilled."""
        size = self.engine.config.max_num_seqs
        rows: list[Row] = []
        num_first, entering, decoding = 0, 0.0, 0.0
        for start in range(0, len(prompts), size):
            began = perf_counter()
            batch = [
                self.engine.add_request(prompt, sampling.params(max_new_tokens))[0]
                for prompt in prompts[start : start + size]
            ]
            while any(not row.is_finished and row not in self.engine.decoding_rows for row in batch):
                self._step()  # rows that were prefilled first may end before the last one is
            num_first += sum(row.num_output_tokens for row in batch)
            entered = perf_counter()
            while not all(row.is_finished for row in batch):
                self._step()
            entering, decoding = entering + entered - began, decoding + perf_counter() - entered
            rows += batch
        stats = RowStats.pooled(row.stats for row in rows)
        texts = tuple(tuple(row.output_ids) for row in rows)
        return Run(tuple(chain.from_iterable(texts)), num_first, entering, decoding, stats, rows=texts)

    def _step(self) -> list[RowOutput]:
        outputs = self.engine.step()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs


class OwnArms:
    """Builder of arms over one model. Other models that a method needs are loaded by name.

    Args:
      loaded: the target model. The loaded model may be modified.
      name: name of the model as given by the user. Drafters of a zoo model are found by this name.
      kv_cache_dtype, activations: see `LLM`.
    """

    def __init__(
        self,
        loaded: Loaded,
        name: str,
        dtype: str,
        execution: str,
        exactness: str,
        kv_cache_dtype: str = "auto",
        activations: str | None = None,
    ) -> None:
        self._eos = tuple(eos_token_ids(loaded.model))
        self._exactness = exactness
        self.tokenizer = loaded.tokenizer
        self.target = adapter_of(loaded, execution, kv_cache_dtype, activations)
        zoo_name = name if is_zoo(name) else None
        self._pairing = Pairing(loaded, self.target, loaded.tokenizer, zoo_name, execution, dtype=dtype)

    def drafters_of(self, config: SpeculativeConfig) -> Callable[[], Drafter]:
        """Load the drafter of a config, and return a function that makes drafters.

        Raises: ForedraftError if the method cannot be used with this model.
        """
        return self._pairing.drafting(config).new_drafter

    def arm(
        self,
        name: str,
        config: SpeculativeConfig,
        new_drafter: Callable[[], Drafter] | None = None,
        *,
        num_rows: int = 1,
    ) -> EngineArm:
        """Return an arm for one row, or for batches of ``num_rows``.

        Args:
          new_drafter: result of `drafters_of`; by default the drafter is loaded now.
        """
        engine = EngineConfig(
            max_num_seqs=num_rows,
            acceptance=config.rejection_sample_method,
            typical=config.typical_limits,
            exactness=self._exactness,
        )
        drafter = (new_drafter or self.drafters_of(config))()
        return EngineArm(name, self.target, drafter, self._eos, engine, is_governed=config.is_governed)
