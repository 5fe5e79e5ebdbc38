"""Training: unrolled drafts equal those of decoding, losses equal hand-computed ones, and a run goes on exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eagle_heads
from foredraft.errors import CheckpointError, NumericsError, PromptError
from foredraft.heads.checkpoint import read_checkpoint
from foredraft.heads.eagle_layouts import TargetFacts, read_eagle
from foredraft.heads.medusa_hydra_layouts import read_hydra, read_medusa
from foredraft.testing import GREEDY
from foredraft.train.examples import Example, is_held_out, read_prompts
from foredraft.train.features import FeatureCache, Features, Streams, target_features
from foredraft.train.head_recipes import unrolled
from foredraft.train.losses import distilled, feature_regression, hard
from foredraft.train.plan import Plan
from foredraft.train.recipe import Texts
from foredraft.train.start import frequent_tokens, new_recipe, parts_of
from foredraft.train.trainer import Schedule, Trainer, side_by_side

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


@pytest.mark.sample(1)
@pytest.mark.parametrize("generation", [1, 3])
def test_unrolled_steps_are_what_decoding_computes(generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of the head at every depth of chains that follow the text, in float64; a shifted token, feature, position
    or mask would change them at the first place."""
    from foredraft.drafters.heads.eagle import EagleDrafter
    from foredraft.engine.engine import Engine
    from foredraft.methods.lengths import LengthPolicy
    from foredraft.testing import PROMPTS

    head, lm = eagle_heads.trained(generation), eagle_heads.target()
    seen: list[list[Tensor]] = []
    real_first, real_feed = EagleDrafter.first, EagleDrafter.feed
    monkeypatch.setattr(
        EagleDrafter, "first", lambda self, given: seen.append([real_first(self, given)]) or seen[-1][0]
    )
    monkeypatch.setattr(
        EagleDrafter, "feed", lambda self, *a, **k: seen[-1].append(real_feed(self, *a, **k)) or seen[-1][-1]
    )
    drafter = EagleDrafter(
        head, lm, target_vocab_size=lm.vocab_size, policy=LengthPolicy(4), num_branches=1, reranks=False, max_nodes=None
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
    entries = torch.arange(len(text) - 2)[None]
    steps = unrolled(head, head.features(streams[None]), embedded[None], entries, 5)
    along = [outputs[: len(text) - 2 - depth] for depth, outputs in enumerate(steps)]
    compared = [0] * 5
    for (length, (tree,)), outputs in zip(drafts, seen, strict=True):
        entry = length - 2  # of the pending token, at place length - 1
        for depth, output in enumerate(outputs):
            is_on_text = tuple(tree.tokens[1 : 1 + depth]) == text[length : length + depth]
            if is_on_text and entry < len(along[depth]):
                torch.testing.assert_close(output[0], along[depth][entry], atol=1e-9, rtol=1e-9)
                compared[depth] += 1
    assert all(compared[:3]), compared


def test_distributions_and_tokens_of_drafts_are_those_of_the_depth() -> None:
    """A prompt of 4 tokens of 8: entry 2 holds token 3, and drafts tokens 4, 5, ..; beside it one of 2 of 5."""
    one, other = Example((10, 11, 12, 13, 14, 15, 16, 17), 4, ""), Example((20, 21, 22, 23, 24), 2, "")
    texts = Texts.of([one, other], 3, torch.device("cpu"))
    assert texts is not None
    assert texts.entries.tolist() == [[2, 3, 4, 5], [0, 1, 2, 2]]
    assert texts.counts == [7, 5, 3]
    assert [tokens.tolist() for tokens in texts.tokens] == [
        [14, 15, 16, 17, 22, 23, 24], [15, 16, 17, 23, 24], [16, 17, 24]
    ]  # fmt: skip
    assert [places.tolist() for places in texts.places] == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 4, 5], [0, 1, 4]]
    assert [target_rows.tolist() for target_rows in texts.target_rows] == [
        [0, 1, 2, 3, 4, 5, 6],
        [1, 2, 3, 5, 6],
        [2, 3, 6],
    ]
    states = torch.arange(16).view(2, 8, 1)
    assert texts.after(states, 1)[texts.places[0]].flatten().tolist() == [3, 4, 5, 6, 9, 10, 11]
    assert Texts.of([Example((1, 2), 2, "")], 3, torch.device("cpu")) is None
    short = Texts.of([Example((1, 2, 3), 1, "")], 2, torch.device("cpu"))
    assert short is not None
    assert short.counts == [1, 0]


def test_a_head_that_predicts_features_begins_by_repeating_the_last_one() -> None:
    """It began as the target's last layer, whose weights are made for states before the norm: 516 nats a token."""
    made, example = recipe("eagle"), examples()[0]
    (streams,) = target_features(eagle_heads.target(), made.layers, [example])
    embedded = parts_of(eagle_heads.target(), ()).embedded(torch.tensor([example.token_ids]), torch.float64)
    given = torch.cat([streams[layer] for layer in made.head.shape.streams], dim=-1).to(torch.float64)
    entries = torch.arange(example.prompt_length - 2, len(example.token_ids) - 2)
    (outputs,) = unrolled(made.head, given[None], embedded, entries[None], 1)
    apart = (outputs - given[entries]).norm() / given[entries].norm()
    assert apart < 0.1


# -- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_gradients_of_the_fused_output_are_those_of_autograd(share: float) -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(7, 5, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    target_logits, rows = torch.randn(4, 9, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 1, 2, 3])
    counted = torch.tensor([1, 1, 0, 1, 1, 0, 1.0])
    found = []
    for fused in (True, False):
        own = [tensor.clone().requires_grad_() for tensor in (states, weight)]
        if fused:
            parts = distilled(*own, target_logits, rows, counted, [4, 3], share)
            loss = parts[0].loss + 0.5 * parts[1].loss
        else:
            factors = counted * torch.tensor([1.0] * 4 + [0.5] * 3)
            logits, wanted = own[0] @ own[1].T, target_logits[rows].softmax(-1)
            kl = -(wanted * logits.log_softmax(-1)).sum(-1)
            loss = (((1 - share) * kl + share * (logits.softmax(-1) - wanted).abs().sum(-1) / 2) * factors).sum()
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
    made.noise = 5.0
    seen = []
    real = made.module.state
    monkeypatch.setattr(made.module, "state", lambda head, given: seen.append(given) or real(head, given))
    features = target_features(eagle_heads.target(), made.layers, [example])
    with torch.no_grad():
        made.parts([example], features)
        made.noise = 0.0
        made.parts([example], features)
    on_states, on_embeddings = (seen[0] - seen[SHAPE["num_heads"]]).chunk(2, dim=-1)  # of the first head
    limit = 5.0 / math.sqrt(len(example.token_ids) * on_embeddings.shape[-1])
    assert 0.5 * limit < float(on_embeddings.abs().max()) <= limit * (1 + 1e-9)
    wanted = on_embeddings[:-1] if is_on_states else torch.zeros_like(on_states[1:])  # of a state the token before it
    assert torch.allclose(on_states[1:], wanted)


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


@pytest.mark.sample(1)
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


# -- texts side by side ----------------------------------------------------------------------------------------------


def uneven() -> list[Example]:
    """Texts of many lengths, whose prompts are all but two tokens of them, half, or one token."""
    cut = [(40, 20), (9, 1), (23, 21), (40, 38), (5, 3), (31, 4)]
    return [
        Example((text * 2)[:length], prompt, f"text {i}")
        for i, (text, (length, prompt)) in enumerate(zip(eagle_heads.texts(), cut, strict=False))
    ]


def losses_and_gradients(made: Any, groups: list[list[Example]]) -> tuple[list[list[float]], list[Tensor]]:
    """Sums of all groups by part (loss, places, hits), and of gradients."""
    made.module.zero_grad()
    source = partial(target_features, eagle_heads.target(), made.layers)
    sums = [[0.0, 0, 0] for _ in made.weights]
    for group in groups:
        parts = made.parts(group, source(group))
        losses = [weight * part.loss for weight, part in zip(made.weights, parts, strict=False)]
        torch.autograd.backward(torch.stack(losses).sum())
        for total, part in zip(sums, parts, strict=False):
            found = float(part.loss.detach()), part.num_places, part.num_right
            total[:] = [mine + more for mine, more in zip(total, found, strict=True)]
    return sums, [p.grad.clone() for p in made.module.parameters() if p.grad is not None]


@pytest.mark.parametrize("method", ["medusa", "hydra", "hydra++", "eagle", "eagle3", "draft_model"])
def test_texts_side_by_side_have_the_losses_and_gradients_of_one_after_the_other(method: str) -> None:
    made: Any = recipe(method)
    with torch.no_grad():  # no layer may stand still, as those that begin as nothing do
        for parameter in made.module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    if method == "eagle":
        made.noise = 0.0
    alone, own = losses_and_gradients(made, [[example] for example in uneven()])
    together, others = losses_and_gradients(made, side_by_side(uneven(), 100))
    assert alone[0][1] == sum(len(one.token_ids) - 2 - max(0, one.prompt_length - 2) for one in uneven())
    torch.testing.assert_close(torch.tensor(alone), torch.tensor(together), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(own, others, atol=1e-9, rtol=1e-9)
    assert all(gradient.abs().max() > 0 for gradient in own)


def test_groups_of_a_forward_are_filled_with_the_longest_first() -> None:
    lengths = [[len(one.token_ids) for one in group] for group in side_by_side(uneven(), 100)]
    assert lengths == [[40, 40], [31, 23, 9], [5]]
    assert [[one.key for one in group] for group in side_by_side(uneven(), 0)] == [[one.key] for one in uneven()]
    assert [len(group) for group in side_by_side(uneven(), 1)] == [1] * 6


def test_kept_and_computed_features_of_texts_side_by_side_are_those_of_each(tmp_path: Path) -> None:
    layers = (1, eagle_heads.target().num_layers)
    source = partial(target_features, eagle_heads.target(), layers)
    cache = FeatureCache(source, tmp_path, layers)
    cache(uneven()[1:3])
    cache.close()
    for example, streams in zip(uneven(), FeatureCache(source, tmp_path, layers)(uneven()), strict=True):
        torch.testing.assert_close([streams], source([example]), atol=1e-9, rtol=1e-9)


# -- runs ------------------------------------------------------------------------------------------------------------


def run_of(
    made: Any,
    folder: Path,
    num_tokens: int = 160,
    rate: float = 1e-2,
    batch_tokens: int = 20,
    forward_tokens: int = 0,
    autocast: torch.dtype | None = None,
) -> Trainer:
    source = partial(target_features, eagle_heads.target(), made.layers)
    schedule = Schedule(num_tokens, batch_tokens, rate)
    return Trainer(made, source, examples(), schedule, folder, autocast, forward_tokens)


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


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "method",
    ["hydra++", "eagle", *(pytest.param(one, marks=pytest.mark.full) for one in ("medusa", "hydra", "eagle3"))],
)
def test_every_recipe_learns(method: str, tmp_path: Path) -> None:
    steps = list(trainer(method, tmp_path, num_tokens=800).steps())
    assert sum(step.loss for step in steps[-3:]) < 0.9 * sum(step.loss for step in steps[:3])


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_products_may_be_cast_and_the_target_is_not(method: str, tmp_path: Path) -> None:
    """It was cast, and refused it: no head could be trained in bfloat16 unless features of its texts were kept."""
    steps = list(trainer(method, tmp_path, num_tokens=60, autocast=torch.bfloat16, forward_tokens=100).steps())
    assert all(step.loss > 0 for step in steps)


@pytest.mark.parametrize(("method", "forward_tokens"), [("hydra++", 0), ("eagle", 100)])
def test_an_interrupted_run_that_goes_on_has_the_weights_of_one_that_was_not(
    method: str, forward_tokens: int, tmp_path: Path
) -> None:
    def new(folder: Path, seed: int, rate: float = 1e-2) -> Trainer:
        return trainer(method, folder, seed, num_tokens=240, rate=rate, batch_tokens=60, forward_tokens=forward_tokens)

    assert goes_on_exactly(new, tmp_path)
    other = new(tmp_path / "b", 3, 1e-3)
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
    made: Any = recipe("medusa")

    def broken(texts: Sequence[Example]) -> list[Streams]:
        found = target_features(eagle_heads.target(), made.layers, texts)
        return [{layer: states * math.nan for layer, states in one.items()} for one in found]

    run = Trainer(made, broken, examples(), Schedule(160, 20, 1e-2), tmp_path)
    with pytest.raises(NumericsError, match=r"the loss of text \d is nan at step 1 .*learning_rate"):
        run.take_step()


def test_what_was_trained_is_read_back_and_drafts(tmp_path: Path) -> None:
    made = recipe("eagle3")
    made.save(tmp_path, {"first_token_acceptance": 0.5})
    lm = eagle_heads.target()
    facts = TargetFacts(lm.name, 32, 64, lm.num_layers, (0,), lm.shadow.get_input_embeddings().weight)
    head, _ = read_eagle(read_checkpoint(tmp_path), facts)
    assert head.lm_head is None
    assert len(head.vocabulary) == 52
    assert head.first_token_acceptance == 0.5


# -- data ------------------------------------------------------------------------------------------------------------


class Counting:
    """A source that counts how often it is asked."""

    def __init__(self, source: Features) -> None:
        self._source, self.num_asked = source, 0

    def __call__(self, examples: Sequence[Example]) -> list[Streams]:
        self.num_asked += len(examples)
        return self._source(examples)


def test_kept_features_are_read_back_and_a_full_disk_ends_keeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = (1, eagle_heads.target().num_layers)
    source = Counting(partial(target_features, eagle_heads.target(), layers))
    cache = FeatureCache(source, tmp_path, layers)
    first = [cache([example]) for example in examples()]
    cache.close()
    again = FeatureCache(source, tmp_path, layers)
    for example, streams in zip(examples(), first, strict=True):
        torch.testing.assert_close(again([example]), streams, atol=0, rtol=0)
    assert source.num_asked == len(examples())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("foredraft.train.features.save_file", full)
    other = FeatureCache(source, tmp_path / "other", layers)
    other(examples()[:1])
    other.close()
    other(examples()[:1])
    assert source.num_asked == len(examples()) + 2


def test_trainings_that_want_other_layers_share_a_folder(tmp_path: Path) -> None:
    """Features of the last layer alone, then of two, then of the last again: nobody reads or overwrites the wrong."""
    last = eagle_heads.target().num_layers
    for layers, num_asked in (((last,), 6), ((1, last), 6), ((last,), 0)):
        source = Counting(partial(target_features, eagle_heads.target(), layers))
        cache = FeatureCache(source, tmp_path, layers)
        for example in examples():
            torch.testing.assert_close(cache([example]), source._source([example]), atol=0, rtol=0)
        cache.close()
        assert source.num_asked == num_asked


def test_trainings_at_the_same_time_do_not_replace_each_others_shards(tmp_path: Path) -> None:
    """Shards that began with the same text had one name: the later one replaced the other, whose places in the index
    then named rows of other texts, or rows that were not there."""
    layers = (eagle_heads.target().num_layers,)
    source = partial(target_features, eagle_heads.target(), layers)
    made = examples()
    first, second = FeatureCache(source, tmp_path, layers), FeatureCache(source, tmp_path, layers)
    for cache, taken in ((first, made), (second, [made[0], made[2]])):  # the second finds the rest where it looks later
        for example in taken:
            cache([example])
    first.close()
    reader = FeatureCache(source, tmp_path, layers)  # knows the places of the first
    second.close()
    for cache in (reader, FeatureCache(source, tmp_path, layers)):
        for example in made:
            torch.testing.assert_close(cache([example]), source([example]), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "contains no prompts"),
        ("{", "line 1 is not JSON"),
        ('{"prompt": "a"}\n{"prompt": "  "}', "line 2 contains no prompt"),
        ('{"prompt": "a", "answer": 3}', "answer must be text"),
    ],
)
def test_broken_prompts_are_refused_by_line(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(PromptError, match=message):
        read_prompts(file)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="contains no files of prompts"):
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
