"""File of ``foredraft generate --trace``: drafted, accepted and rejected tokens of every step."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foredraft.cli.info import peak_memory
from foredraft.cli.writers import as_record
from foredraft.engine.frontend import Stream, StreamOutput
from foredraft.folders import write_text
from foredraft.llm import LLM
from foredraft.views.token_view import tell_drafts


class TraceFile:
    """Records the steps of a stream and writes one JSON object per sample."""

    def __init__(self, file: Path, llm: LLM) -> None:
        self._file = file
        self._target = llm.target
        self._method = llm.speculative_config.title
        self._tokenizer = llm.tokenizer
        self._steps: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)

    def note(self, delta: StreamOutput) -> None:
        """Record the tokens of one step, their sources, and the rejected branches."""
        if not delta.token_ids and not delta.text:
            return
        texts = list(delta.texts) or ([delta.text] if delta.text else [])
        self._steps[delta.prompt_index, delta.index].append(
            {
                "token_ids": list(delta.token_ids),
                "texts": texts,
                **tell_drafts(self._tokenizer, delta, slice(0, len(delta.token_ids))),
                "num_drafted": 0 if delta.tree is None else delta.tree.num_draft_tokens,
                "num_accepted": delta.num_accepted,
            }
        )

    def write(self, stream: Stream) -> None:
        """Write all samples. An interrupted sample is written with the tokens that it has.

        Raises: ConfigError if the file cannot be written.
        """
        lines = []
        memory = peak_memory(self._target)
        for place, output in enumerate(stream.outputs()):
            record = as_record(output)
            for sample in output.outputs:
                plans = [asdict(step) for step in output.metrics.trace if step.sample == sample.index]
                steps = self._steps[place, sample.index]
                for step, plan in zip(steps, plans, strict=False):  # a step that ends the output may have no token
                    step |= plan
                shared = {key: record[key] for key in ("prompt", "num_prompt_tokens", "lossless", "metrics", "timings")}
                lines.append(
                    {
                        "result": "trace",
                        "prompt_index": place,
                        "sample": sample.index,
                        "text": sample.text,
                        "finish_reason": sample.finish_reason,
                        "seed": sample.seed,
                        "method": self._method,
                        "peak_memory_bytes": memory,
                        **shared,
                        "steps": steps,
                    }
                )
        write_text(self._file, "".join(json.dumps(line) + "\n" for line in lines))
