"""What `benchmarks/tau.py` reckons with, and that it goes on where it was broken off."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import tau
import torch
from tau import Found, kept, of_record

from foredraft import LLM, SamplingParams
from foredraft.bench.trial import Sampling
from foredraft.engine.stats import RowStats
from foredraft.tree import DraftTree


def test_tau_positions_and_kinds_of_counts() -> None:
    found = Found(["chat", "maths"])
    first, second, draft = RowStats(), RowStats(), DraftTree.chain(0, [1, 2, 3])
    for accepted in (0, 2, 1):
        first.record(draft, range(1, accepted + 1), accepted + 1)
    second.record(draft, range(1, 4), 4)
    found.add([first, second])
    found.draft_seconds, found.step_seconds = [0.002, 0.001, 0.004], [0.03, 0.02, 0.05]
    record = found.record()
    assert record["tau"] == pytest.approx(10 / 4)
    assert record["by_position"] == [0.75, 0.5, 0.25, 0.0, 0.0]
    assert record["by_kind"] == {"chat": 2.0, "maths": 4.0}
    assert record["nodes_per_step"] == 4.0
    assert (record["draft_ms"], record["step_ms"]) == ([1.0, 2.0], [20.0, 30.0])
    assert record["low"] == 2.0
    assert record["high"] == 4.0


def test_gains_are_of_the_same_prompts() -> None:
    spread = [(10, 10), (40, 10), (20, 10)]
    better = [(emitted + 5, steps) for emitted, steps in spread]
    gain, low, high = Found(["a"] * 3, better).gain_over(Found(["a"] * 3, spread))
    assert gain == pytest.approx(0.5)
    assert low == pytest.approx(0.5)
    assert high == pytest.approx(0.5)


def test_a_cell_is_kept_by_its_setting_and_half_a_line_is_not(tmp_path: Path) -> None:
    file, cell = tmp_path / "kept.jsonl", {"method": "ngram", "nodes": "8", "setting": "x"}
    assert kept(file, cell) is None
    whole = json.dumps(cell | {"tau": 1.5, "by_prompt": [(3, 2)]})
    file.write_text(f"{whole}\n{whole[:20]}", encoding="utf-8")
    record = kept(file, cell)
    assert record is not None
    assert of_record(["chat"], record).tau() == 1.5
    assert kept(file, cell | {"setting": "y"}) is None


def test_chains_and_trees_are_forced_to_the_same_nodes() -> None:
    asked = {
        (method, nodes): tau.forced(method, nodes).as_dict()
        for method in ("eagle3", "token_recycling", "suffix", "draft_model") for nodes in ("chain", "8", "60")
    }  # fmt: skip
    sizes = {"chain": 6, "8": 8, "60": 60}
    assert all(config["max_draft_nodes"] == sizes[nodes] for (_, nodes), config in asked.items())
    assert asked["eagle3", "60"]["draft_beam_width"] == 10
    assert asked["eagle3", "8"]["num_draft_branches"] == 4
    union = tau.forced('{"method": "union", "drafters": [{"method": "suffix"}, {"method": "ngram"}]}', "8").as_dict()
    assert union["max_draft_nodes"] == 8


def test_what_was_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"question_id": place, "category": "qa", "turns": [f"Who is dog number {place}?"]}) + "\n"
            for place in range(2)
        ),
        encoding="utf-8",
    )
    arguments = ["tau.py", "--prompts", str(prompts), "--per-kind", "2", "--max-new-tokens", "6", "--temperature", "0"]
    arguments += ["--nodes", "chain", "--method", "ngram", "--timed", "1", "--against", "argmax", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    tau.main()
    first = capsys.readouterr().out
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [record["method"] for record in records] == ["argmax", "ngram"]
    least, middle = records[0]["draft_ms"]  # the other one found nothing to draft, so nothing was timed
    assert 0 <= least <= middle
    assert records[1]["by_position"] == [0.0] * 5
    assert "draft_ms" not in records[1]
    monkeypatch.setattr(tau, "run", None)  # so that measuring anything would fail
    tau.main()
    assert capsys.readouterr().out == first


def test_texts_are_compared_with_plain_ones_and_the_gap_where_they_part_is_that_of_the_target() -> None:
    llm = LLM("zoo:tiny", "none", dtype="float32", execution="packed")
    asked = [tau.Question("qa", tuple(llm.tokenizer(text)["input_ids"])) for text in ("A dog", "A king", "A cow")]
    params = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.generate([{"prompt_token_ids": [*one.token_ids]} for one in asked], params)
    texts = [list(one.outputs[0].token_ids) for one in outputs]
    plain, other = Found(["qa"] * 3), Found(["qa"] * 3)
    plain.outputs, other.outputs = texts, [[*text] for text in texts]
    assert tau.beside(llm, asked, plain, other, Sampling()) == {"num_equal": 3, "largest_gap": 0.0}
    other.outputs[1][2] = swapped = (texts[1][2] + 1) % llm.target.vocab_size
    text = torch.tensor([[*asked[1].token_ids, *texts[1][:2]]])
    logits = llm.target.shadow(input_ids=text).logits[0, -1]
    found = tau.beside(llm, asked, plain, other, Sampling())
    assert found["num_equal"] == 2
    assert found["largest_gap"] == pytest.approx(float(logits[texts[1][2]] - logits[swapped]), abs=2e-3)
    other.outputs[0].pop()
    assert tau.beside(llm, asked, plain, other, Sampling()) == {"num_equal": 1, "largest_gap": math.inf}
