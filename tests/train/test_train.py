"""Training: unrolled drafts equal those of decoding, losses equal hand-computed ones, and a run goes on exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eagle_heads
from foretoken.errors import CheckpointError, NumericsError, PromptError
from foretoken.heads.checkpoint import read_checkpoint
from foretoken.heads.eagle_layouts import read_eagle
from foretoken.heads.eagle_structure import TargetFacts
from foretoken.heads.medusa_hydra_layouts import read_hydra, read_medusa
from foretoken.testing import GREEDY
from foretoken.train.eagle import seen_by_step, unrolled
from foretoken.train.examples import Example, is_held_out, read_prompts
from foretoken.train.features import FeatureCache, Streams, TargetFeatures
from foretoken.train.losses import distilled, feature_regression, hard
from foretoken.train.plan import Plan
from foretoken.train.recipe import Place
from foretoken.train.start import frequent_tokens, new_recipe, parts_of
from foretoken.train.trainer import Schedule, Trainer

SHAPE = {"num_heads": 3, "num_steps": 3}


def examples(count: int = 6) -> list[Example]:
    """Texts of the toy target, the first half of each taken for its prompt."""
    return [Example(text, len(text) // 2, f"text {i}") for i, text in enumerate(eagle_heads.texts()[:count])]


def recipe(method: str, seed: int = 3, vocab: int = 52, num_layers: int | None = None) -> object:
    torch.manual_seed(seed)
    parts = parts_of(eagle_heads.target(), (0,))
    vocabulary = frequent_tokens(examples(), vocab, parts)
    made = new_recipe(Plan(method=method, out=Path(), num_layers=num_layers, **SHAPE), parts, vocabulary)
    made.module.double()
    return made


def new_heads(method: str, num_layers: int | None) -> Any:
    return recipe(method, num_layers=num_layers).module.float()


# -- EAGLE's unrolled steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", [1, 3])
def test_unrolled_steps_are_what_decoding_computes(generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of the head at every depth of chains that follow the text, in float64; a shifted token, feature, position
    or mask would change them at the first place."""
    from foretoken.drafters.heads.eagle import EagleDrafter
    from foretoken.drafters.lengths import Fixed
    from foretoken.drafters.parts.eagle_rows import EagleRows
    from foretoken.engine.engine import Engine
    from foretoken.testing import PROMPTS

    head, lm = eagle_heads.trained(generation), eagle_heads.target()
    seen: list[list[Tensor]] = []
    real_open, real_feed = EagleRows.open, EagleRows.feed
    monkeypatch.setattr(EagleRows, "open", lambda self, rows: seen.append([real_open(self, rows)]) or seen[-1][0])
    monkeypatch.setattr(
        EagleRows, "feed", lambda self, *a, **k: seen[-1].append(real_feed(self, *a, **k)) or seen[-1][-1]
    )
    drafter = EagleDrafter(
        head, lm, target_vocab_size=lm.vocab_size, policy=Fixed(4), num_branches=1, reranks=False, max_nodes=None
    )
    engine = Engine(lm, drafter)
    (row,) = engine.add_request(PROMPTS[0], replace(GREEDY, max_tokens=20))
    drafts = []
    propose = drafter.propose
    monkeypatch.setattr(
        drafter, "propose", lambda *a: drafts.append((len(row.token_ids), propose(*a))) or drafts[-1][1]
    )
    while not row.is_finished:
        engine.step()
    text = tuple(row.token_ids)
    streams = eagle_heads.streams_of(torch.tensor([text]), head, torch.float64)[0]
    embedded = torch.nn.functional.embedding(
        torch.tensor(text), eagle_heads.model().get_input_embeddings().weight.double()
    )
    along = [outputs for _, outputs in unrolled(head, head.features(streams), embedded, 0, 5)]
    compared = [0] * 5
    for (length, (tree,)), outputs in zip(drafts, seen, strict=True):
        entry = length - 2  # of the pending token, at place length - 1
        for depth, output in enumerate(outputs):
            is_on_text = tuple(tree.tokens[1 : 1 + depth]) == text[length : length + depth]
            if is_on_text and entry < len(along[depth]):
                torch.testing.assert_close(output[0], along[depth][entry], atol=1e-9, rtol=1e-9)
                compared[depth] += 1
    assert all(compared[:3]), compared


def test_a_row_of_a_later_step_sees_its_prefix_and_its_own_draft() -> None:
    seen = seen_by_step(3, range(1, 3), [2])
    assert seen[0, 0].int().tolist() == [[1, 1, 0, 1, 0], [1, 1, 1, 0, 1]]


def test_laws_and_tokens_of_places_are_those_of_the_depth() -> None:
    """Prompt of 4 tokens, text of 8: entry 2 holds token 3, and drafts tokens 4, 5, .. of the text."""
    place = Place.of(Example((10, 11, 12, 13, 14, 15, 16, 17), 4, ""), torch.device("cpu"))
    assert place.first == 2
    assert place.counts(3) == [4, 3, 2]
    rows = place.rows(place.counts(3))
    assert (place.token_ids[place.first + 2 + rows]).tolist() == [14, 15, 16, 17, 15, 16, 17, 16, 17]
    assert Place.of(Example((1, 2), 2, ""), torch.device("cpu")) is None


def test_a_head_that_predicts_features_begins_by_repeating_the_last_one() -> None:
    """It began as the target's last layer, whose weights are made for states before the norm: 516 nats a token."""
    made, example = recipe("eagle"), examples()[0]
    streams = TargetFeatures(eagle_heads.target(), made.layers).of(example)
    embedded = made._target.embedded(torch.tensor(example.token_ids), torch.float64)
    given = made._streams(streams)
    ((rows, outputs),) = unrolled(made.head, given, embedded, example.prompt_length - 2, 1)
    apart = (outputs - given[rows.start : rows.stop]).norm() / given[rows.start : rows.stop].norm()
    assert apart < 0.1


# -- losses ----------------------------------------------------------------------------------------------------------


def test_distillation_of_three_tokens_by_hand() -> None:
    """Logits (0, ln 2, 0) are the law (1/4, 1/2, 1/4). Against (1/2, 1/2, 0): ln 4 / 2 + ln 2 / 2 = 1.5 ln 2."""
    states = torch.tensor([[0.0, math.log(2), 0.0]] * 2, dtype=torch.float64, requires_grad=True)
    law = torch.tensor([[0.0, 0.0, -1e9]], dtype=torch.float64)
    rows, weights = torch.tensor([0, 0]), torch.tensor([1.0, 0.0])
    (part,) = distilled(states, torch.eye(3, dtype=torch.float64), law, rows, weights, [2])
    assert part.loss.item() == pytest.approx(1.5 * math.log(2))
    part.loss.backward()
    torch.testing.assert_close(states.grad[0], torch.tensor([-0.25, 0.0, 0.25], dtype=torch.float64))
    assert not states.grad[1].any()


def test_gradients_of_the_fused_output_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(7, 5, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    law, rows = torch.randn(4, 9, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 1, 2, 3])
    counted = torch.tensor([1, 1, 0, 1, 1, 0, 1.0])
    found = []
    for fused in (True, False):
        own = [tensor.clone().requires_grad_() for tensor in (states, weight)]
        if fused:
            parts = distilled(*own, law, rows, counted, [4, 3])
            loss = parts[0].loss + 0.5 * parts[1].loss
        else:
            factors = counted * torch.tensor([1.0] * 4 + [0.5] * 3)
            loss = (-(law[rows].softmax(-1) * (own[0] @ own[1].T).log_softmax(-1)).sum(-1) * factors).sum()
        loss.backward()
        found.append([loss.detach(), own[0].grad, own[1].grad])
    torch.testing.assert_close(found[0], found[1])


def test_hard_loss_and_feature_regression_by_hand() -> None:
    part = hard(torch.tensor([[0.0, math.log(3)], [0.0, 0.0], [5.0, 0.0]]), torch.tensor([1, 0, -1]))
    assert part.loss.item() == pytest.approx(math.log(4 / 3) + math.log(2))
    assert (part.num_places, part.num_right) == (3, 2)
    found = feature_regression(torch.tensor([[0.5, 3.0]]), torch.tensor([[0.0, 0.0]]))
    assert float(found) == pytest.approx((0.5 * 0.5**2 + 3.0 - 0.5) / 2)


@pytest.mark.parametrize(("method", "is_on_states"), [("hydra", True), ("hydra++", False)])
def test_noise_is_on_what_hydra_reads(method: str, is_on_states: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No larger than alpha / sqrt(T H), on embeddings and, without a prefix layer, the same on hidden states."""
    made, example = recipe(method), examples()[0]
    made._noise = 5.0
    seen = []
    real = made._heads.inputs_along
    monkeypatch.setattr(made._heads, "inputs_along", lambda head, *given: seen.append(given) or real(head, *given))
    features = TargetFeatures(eagle_heads.target(), made.layers).of(example)
    made.parts(example, features)
    noisy = seen[0]
    made._noise = 0.0
    made.parts(example, features)
    clean = seen[SHAPE["num_heads"]]
    on_states, on_embeddings = (mine - theirs for mine, theirs in zip(noisy, clean, strict=True))
    limit = 5.0 / math.sqrt(len(example.token_ids) * on_embeddings.shape[-1])
    assert 0.5 * limit < float(on_embeddings.abs().max()) <= limit * (1 + 1e-9)
    assert torch.allclose(on_states, on_embeddings if is_on_states else torch.zeros_like(on_states))


@pytest.mark.parametrize(("method", "given", "num_layers"), [("medusa", None, 1), ("medusa", 3, 3), ("hydra", None, 1)])
def test_blocks_of_a_medusa_or_hydra_head_are_as_many_as_asked_for(
    method: str, given: int | None, num_layers: int
) -> None:
    heads = new_heads(method, given)
    assert heads.shape.num_layers == num_layers
    state = torch.randn(2, 32 if method == "medusa" else 64)
    assert heads.state(0, state).shape == (2, 32)


@pytest.mark.parametrize(("given", "num_layers"), [(None, 4), (2, 2), (1, 1)])
def test_an_mlp_of_hydra_plus_plus_has_four_layers_unless_said_otherwise(given: int | None, num_layers: int) -> None:
    """Two of them once, with no option and no word, while the page said four."""
    heads = new_heads("hydra++", given)
    assert heads.shape.num_layers == num_layers
    calls = []
    for block in (heads.first[0], *(heads.later[0] if heads.later else ())):
        block.register_forward_hook(lambda module, *_: calls.append(module))
    heads.state(0, torch.randn(1, 64))
    assert len(calls) == num_layers == len(set(calls))  # called one after the other, and no two the same


@pytest.mark.parametrize("method", ["medusa", "hydra++"])
def test_layers_of_a_head_are_trained_apart_and_read_back_apart(method: str, tmp_path: Path) -> None:
    made = trainer(method, tmp_path / "run", num_tokens=800, num_layers=3 if method == "medusa" else None)
    list(made.steps())
    made.recipe.save(tmp_path, {})
    stored = read_checkpoint(tmp_path)
    read = read_medusa(stored, 32, 64) if method == "medusa" else read_hydra(stored, 32, 64)
    assert read[0].shape.num_layers == (3 if method == "medusa" else 4)
    assert not read[0].shape.is_shared
    assert [tensor.shape for tensor in read[0].parameters()] == [
        tensor.shape for tensor in made.recipe.module.parameters()
    ]


# -- runs ------------------------------------------------------------------------------------------------------------


def run_of(made: Any, folder: Path, num_tokens: int = 160, rate: float = 1e-2) -> Trainer:
    source = TargetFeatures(eagle_heads.target(), made.layers)
    return Trainer(made, source, examples(), Schedule(num_tokens, 20, rate), folder)


def trainer(method: str, folder: Path, seed: int = 3, num_layers: int | None = None, **schedule: Any) -> Trainer:
    return run_of(recipe(method, seed, num_layers=num_layers), folder, **schedule)


def same_weights(one: Trainer, other: Trainer) -> bool:
    pairs = zip(one.recipe.module.parameters(), other.recipe.module.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def goes_on_exactly(new: Callable[[Path, int], Trainer], folder: Path) -> bool:
    """A run is stopped after two steps and begun from other weights: all of its state is in the checkpoint."""
    whole, first = new(folder / "a", 3), new(folder / "b", 3)
    list(whole.steps())
    first.take_step()
    first.take_step()
    first.save()
    first.take_step()  # lost, as by a kill
    second = new(folder / "b", 99)
    assert second.resume()
    list(second.steps())
    return same_weights(second, whole)


@pytest.mark.parametrize("method", ["medusa", "hydra", "hydra++", "eagle", "eagle3"])
def test_every_recipe_learns(method: str, tmp_path: Path) -> None:
    steps = list(trainer(method, tmp_path, num_tokens=800).steps())
    assert sum(step.loss for step in steps[-3:]) < 0.9 * sum(step.loss for step in steps[:3])


@pytest.mark.parametrize("method", ["hydra++", "eagle"])
def test_an_interrupted_run_that_goes_on_has_the_weights_of_one_that_was_not(method: str, tmp_path: Path) -> None:
    assert goes_on_exactly(partial(trainer, method), tmp_path)
    other = trainer(method, tmp_path / "b", rate=1e-3)
    with pytest.raises(CheckpointError, match=r"learning_rate=0\.01"):
        other.resume()


def test_a_checkpoint_of_a_gpu_is_gone_on_from_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused as unreadable, with the advice to remove it."""
    first = trainer("medusa", tmp_path)
    first.take_step()
    with monkeypatch.context() as patched:
        patched.setattr("torch.serialization.location_tag", lambda _: "cuda:0")
        first.save()
    second = trainer("medusa", tmp_path, seed=99)
    assert second.resume()
    assert same_weights(second, first)


def test_a_loss_that_is_not_finite_stops_and_names_the_batch(tmp_path: Path) -> None:
    run = trainer("medusa", tmp_path)
    real = run._features.of
    run._features = type("Broken", (), {"of": lambda _, e: {k: v * math.nan for k, v in real(e).items()}})()
    with pytest.raises(NumericsError, match=r"the loss of example text \d is nan at step 1 .*learning_rate"):
        run.take_step()


def test_what_was_trained_is_read_back_and_drafts(tmp_path: Path) -> None:
    made = recipe("eagle3")
    made.save(tmp_path, {"first_token_acceptance": 0.5})
    lm = eagle_heads.target()
    facts = TargetFacts(lm.name, 32, 64, lm.num_layers, (0,), lm.shadow.get_input_embeddings().weight)
    head, _ = read_eagle(read_checkpoint(tmp_path), facts)
    assert head.lm_head is None
    assert len(head.vocabulary) == 52
    assert head.expectation is not None


# -- data ------------------------------------------------------------------------------------------------------------


class Counting:
    """A source that counts how often it is asked."""

    def __init__(self, source: TargetFeatures) -> None:
        self._source, self.num_asked = source, 0

    def of(self, example: Example) -> Streams:
        self.num_asked += 1
        return self._source.of(example)


def test_kept_features_are_read_back_and_a_full_disk_ends_keeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = (1, eagle_heads.target().num_layers)
    source = Counting(TargetFeatures(eagle_heads.target(), layers))
    cache = FeatureCache(source, tmp_path, layers)
    first = [cache.of(example) for example in examples()]
    cache.close()
    again = FeatureCache(source, tmp_path, layers)
    for example, streams in zip(examples(), first, strict=True):
        torch.testing.assert_close(again.of(example), streams, atol=0, rtol=0)
    assert source.num_asked == len(examples())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("foretoken.train.features.save_file", full)
    other = FeatureCache(source, tmp_path / "other", layers)
    other.of(examples()[0])
    other.close()
    other.of(examples()[0])
    assert source.num_asked == len(examples()) + 2


def test_trainings_that_want_other_layers_share_a_folder(tmp_path: Path) -> None:
    """Features of the last layer alone, then of two, then of the last again: nobody reads or overwrites the wrong."""
    last = eagle_heads.target().num_layers
    for layers, num_asked in (((last,), 6), ((1, last), 6), ((last,), 0)):
        source = Counting(TargetFeatures(eagle_heads.target(), layers))
        cache = FeatureCache(source, tmp_path, layers)
        for example in examples():
            torch.testing.assert_close(cache.of(example), source._source.of(example), atol=0, rtol=0)
        cache.close()
        assert source.num_asked == num_asked


def test_trainings_at_the_same_time_do_not_replace_each_others_shards(tmp_path: Path) -> None:
    """Shards that began with the same text had one name: the later one replaced the other, whose places in the index
    then named rows of other texts, or rows that were not there."""
    layers = (eagle_heads.target().num_layers,)
    source = TargetFeatures(eagle_heads.target(), layers)
    made = examples()
    first, second = FeatureCache(source, tmp_path, layers), FeatureCache(source, tmp_path, layers)
    for cache, taken in ((first, made), (second, [made[0], made[2]])):  # the second finds the rest where it looks later
        for example in taken:
            cache.of(example)
    first.close()
    reader = FeatureCache(source, tmp_path, layers)  # knows the places of the first
    second.close()
    for cache in (reader, FeatureCache(source, tmp_path, layers)):
        for example in made:
            torch.testing.assert_close(cache.of(example), source.of(example), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ("{", "line 1 is not JSON"),
        ('{"prompt": "a"}\n{"prompt": "  "}', "line 2 holds no prompt"),
        ('{"prompt": "a", "answer": 3}', "answer must be text"),
    ],
)
def test_broken_prompts_are_refused_by_line(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(PromptError, match=message):
        read_prompts(file)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="holds no files of prompts"):
        read_prompts(tmp_path)
    with pytest.raises(PromptError, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl")
    for name, data in (("cut.jsonl.xz", b"\xfd7zXZ\x00\x00"), ("latin.txt", b"caf\xe9")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(PromptError, match="cannot be read"):
            read_prompts(tmp_path / name)


def test_held_out_prompts_are_chosen_by_their_text(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(f"question {i}" for i in range(300)))
    held = {asked.text for asked in read_prompts(file) if is_held_out(asked.digest, 10)}
    assert 10 < len(held) < 60
    file.write_text("\n".join(f"question {i}" for i in reversed(range(300))))
    assert held == {asked.text for asked in read_prompts(tmp_path) if is_held_out(asked.digest, 10)}
