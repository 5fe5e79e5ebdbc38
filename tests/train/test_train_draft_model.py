"""``foredraft train draft_model``: the loss, what a drafter begins with, what is written, and runs that were killed."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from test_train import examples, goes_on_exactly, run_of
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

import eagle_heads
from foredraft import LLM, SamplingParams, zoo
from foredraft.cli import app
from foredraft.errors import CheckpointError, ConfigError
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model
from foredraft.train.draft_model import DraftModelRecipe, SmallPlan, new_small_model
from foredraft.train.features import target_features
from foredraft.train.losses import distilled
from foredraft.train.plan import Plan
from foredraft.train.recipe import TargetParts
from foredraft.train.start import frequent_tokens, new_recipe, parts_of
from foredraft.train.trainer import Trainer

GREEDY = SamplingParams(temperature=0, max_tokens=16)
SMALL = {
    "shared": SmallPlan(total_variation=0.3),
    "own": SmallPlan(hidden_size=16, own_embeddings=True),
    "from layers": SmallPlan(from_layers=(1,), total_variation=1.0),
}


def target() -> TargetParts:
    return parts_of(eagle_heads.target(), (0,))


def recipe(kind: str, seed: int = 3, vocab: int = 52) -> DraftModelRecipe:
    torch.manual_seed(seed)
    vocabulary = frequent_tokens(examples(), vocab, target())
    made = new_recipe(Plan(method="draft_model", out=Path(), num_layers=1, small=SMALL[kind]), target(), vocabulary)
    assert isinstance(made, DraftModelRecipe)
    made.module.double()
    return made


# -- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_forward_kl_and_total_variation_by_hand(share: float) -> None:
    """Own distribution (1/4, 1/2, 1/4) against (1/2, 1/2, 0): cross entropy 1.5 ln 2, total variation 1/4.

    The gradient of total variation by the logits: q (s - s . q) / 2 with s = (-1, 0, 1), so s . q = 0."""
    states = torch.tensor([[0.0, math.log(2), 0.0]] * 2, dtype=torch.float64, requires_grad=True)
    target_logits = torch.tensor([[0.0, 0.0, -1e9]], dtype=torch.float64)
    rows, weights = torch.tensor([0, 0]), torch.tensor([1.0, 0.0])
    (part,) = distilled(states, torch.eye(3, dtype=torch.float64), target_logits, rows, weights, [2], share)
    assert part.loss.item() == pytest.approx((1 - share) * 1.5 * math.log(2) + share * 0.25)
    part.loss.backward()
    wanted = (1 - share) * torch.tensor([-0.25, 0.0, 0.25]) + share * torch.tensor([-0.125, 0.0, 0.125])
    torch.testing.assert_close(states.grad[0], wanted.double())
    assert not states.grad[1].any()


def test_losses_are_those_of_the_models_own_logits_after_every_answer_token() -> None:
    """The model, as transformers computes it, against the target's distributions: shifted places change them."""
    made, (example, *_) = recipe("own", vocab=64), examples()
    features = target_features(eagle_heads.target(), made.layers, [example])
    (part,) = made.parts([example], features)
    ids = torch.tensor([example.token_ids])
    wanted = eagle_heads.model().double()(input_ids=ids).logits[0].softmax(-1)
    model = LlamaForCausalLM(made.module.config).double()
    embedding = made.module.embedding
    assert embedding is not None
    model.model.load_state_dict({**made.module.body.state_dict(), "embed_tokens.weight": embedding})
    model.tie_weights()
    own = model(input_ids=ids).logits[0].log_softmax(-1)
    losses = -(wanted * own).sum(-1)[example.prompt_length - 1 : -1]
    assert part.num_places == example.num_answer_tokens == len(losses)
    torch.testing.assert_close(part.loss, losses.sum(), atol=1e-8, rtol=1e-8)


# -- what it begins with ---------------------------------------------------------------------------------------------


def test_all_layers_of_the_target_are_the_target() -> None:
    """A drafter that begins as every layer of its target says what the target says."""
    lm = eagle_heads.target()
    model = new_small_model(target(), SmallPlan(from_layers=tuple(range(lm.num_layers)))).double()
    ids = torch.tensor(examples()[0].token_ids)
    states = model.states(target().embedded(ids[None], torch.float64))[0]
    (features,) = target_features(lm, (lm.num_layers,), examples()[:1])
    torch.testing.assert_close(states, features[lm.num_layers], atol=1e-6, rtol=1e-6)


def test_embeddings_of_the_target_are_neither_trained_nor_kept_in_checkpoints() -> None:
    names = dict(recipe("shared").module.named_parameters())
    assert not any("embed" in name for name in names)
    assert "embedding" in dict(recipe("own").module.named_parameters())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (SmallPlan(from_layers=(0, 4)), r"contains \[4\], but .* 0\.\.1"),
        (SmallPlan(hidden_size=16), "add own_embeddings"),
        (SmallPlan(hidden_size=12, own_embeddings=True), "must be a multiple of 8"),
        (SmallPlan(total_variation=1.5), r"total_variation is 1\.5"),
        (SmallPlan(hidden_size=-1), "use 1 or more"),
        (SmallPlan(from_layers=(0,), hidden_size=16), "leave hidden_size out"),
        (SmallPlan(start=Path("."), from_layers=(0,)), "already has layers and embeddings"),
    ],
)
def test_drafters_that_cannot_be_made_are_refused(plan: SmallPlan, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_small_model(target(), plan)


def test_layers_of_another_kind_are_not_begun_with(tmp_path: Path) -> None:
    model = toy_model(64)
    model.model.layers[1].self_attn.q_proj = torch.nn.Linear(32, 32, bias=True, dtype=model.dtype)
    with pytest.raises(ConfigError, match="differ from Llama's"):
        new_small_model(parts_of(CausalLM(model, execution="eager"), (0,)), SmallPlan(from_layers=(0,)))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 64}')
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="type 'gpt2'"):
        new_small_model(target(), SmallPlan(start=tmp_path))


# -- runs ------------------------------------------------------------------------------------------------------------


def trainer(kind: str, folder: Path, seed: int = 3, num_tokens: int = 160) -> Trainer:
    return run_of(recipe(kind, seed), folder, num_tokens)


@pytest.mark.parametrize(
    "kind", ["shared", *(pytest.param(one, marks=pytest.mark.full) for one in ("own", "from layers"))]
)
def test_every_kind_learns(kind: str, tmp_path: Path) -> None:
    steps = list(trainer(kind, tmp_path, num_tokens=1200).steps())
    assert sum(step.loss for step in steps[-4:]) < 0.95 * sum(step.loss for step in steps[:4])


@pytest.mark.parametrize("kind", ["shared", "own"])
def test_an_interrupted_run_that_goes_on_has_the_weights_of_one_that_was_not(kind: str, tmp_path: Path) -> None:
    assert goes_on_exactly(partial(trainer, kind), tmp_path)


@pytest.mark.parametrize("kind", SMALL)
def test_what_is_written_is_a_model_that_training_can_go_on_from(kind: str, tmp_path: Path) -> None:
    made = recipe(kind)
    made.save(tmp_path, {"first_token_acceptance": 0.5})
    read = LlamaForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([examples()[0].token_ids])
    states = read.model(input_ids=ids).last_hidden_state.double()
    small = made.module
    table = target().embedding if small.embedding is None else small.embedding
    own = torch.nn.functional.embedding(ids, table).double()
    with torch.no_grad():
        torch.testing.assert_close(states, small.states(own), atol=0.1, rtol=0.1)
    again = new_small_model(target(), SmallPlan(start=tmp_path))
    assert (again.embedding is None) == (small.embedding is None)
    assert read.config.draft_vocabulary == made.vocabulary.target_ids.tolist()


def drafted_by(llm: LLM, prompt: str) -> list[tuple[int, ...]]:
    """All drafts of a text, without their roots."""
    drafter, drafts = llm.drafting.new_drafter(), []
    propose = drafter.propose
    drafter.propose = lambda *given: [drafts.append(tree.tokens[1:]) or tree for tree in propose(*given)]
    with llm.engine(drafter) as engine:
        (row,) = engine.add_request(llm.tokenizer(prompt)["input_ids"], GREEDY)
        while not row.is_finished:
            engine.step()
    return drafts


def command(folder: Path, *more: str) -> list[str]:
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(f"Once there was a {one} who" for one in ("dog", "girl", "king", "cow", "boy", "cat")))
    given = ["--target", "zoo:tiny", "--prompts", str(prompts), "--raw", "--out", str(folder / "draft")]
    small = ["--max-new-tokens", "10", "--batch-tokens", "24", "--held-out", "8", "--evaluate-tokens", "1000"]
    return ["train", "draft_model", *given, *small, "--dtype", "float32", "--execution", "packed", *more]


@pytest.mark.full
def test_prompts_become_a_drafter_that_changes_nothing(tmp_path: Path) -> None:
    """Begun as three layers of the target, over frequent tokens alone: read back, it drafts only these."""
    done = CliRunner().invoke(
        app, command(tmp_path, "--from-layers", "0,1,5", "--draft-vocabulary-size", "256", "--json")
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["tau"] >= 1.0
    llm = LLM("zoo:tiny", {"model": str(tmp_path / "draft")}, dtype="float32", execution="packed")
    assert llm.speculative_config.method == "draft_model"
    kept = set(llm.drafting.model.config.draft_vocabulary)
    drafted = {token for row in drafted_by(llm, "A king and a cow") for token in row}
    assert len(kept) == 256
    assert drafted
    assert drafted <= kept
    (text,) = llm.generate("A king and a cow", GREEDY)
    (plain,) = llm.with_speculative_config("none").generate("A king and a cow", GREEDY)
    assert text.outputs[0].token_ids == plain.outputs[0].token_ids
    assert LLM(str(tmp_path / "draft"), execution="packed").generate("A king", GREEDY)  # with its tokenizer


def test_a_drafter_whose_vocabulary_has_no_eos_is_refused(tmp_path: Path) -> None:
    llm = LLM("zoo:tiny", "none", dtype="float32", execution="eager")
    parts = parts_of(llm.target, (0,))
    vocabulary = DraftVocabulary.of(range(10, 200), parts.vocab_size)
    DraftModelRecipe(new_small_model(parts, SmallPlan(from_layers=(0,))), parts, vocabulary).save(tmp_path, {})
    with pytest.raises(CheckpointError, match="none of the target's EOS tokens"):
        llm.with_speculative_config({"method": "draft_model", "model": str(tmp_path)}).generate("A dog", GREEDY)


def test_the_drafter_of_the_toy_can_be_trained_further(tmp_path: Path) -> None:
    start = str(zoo.path("tiny", "draft"))
    done = CliRunner().invoke(app, command(tmp_path, "--start", start, "--dry-run", "--json"))
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["num_parameters"] > 500_000


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--from-layers", "first"], "--from-layers is 'first'"),
        (["--from-layers", "0,9"], "contains [9]"),
        (["--total-variation", "2"], "total_variation is 2.0"),
    ],
)
def test_commands_that_cannot_be_followed_are_refused(more: list[str], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, command(tmp_path, *more))
    assert done.exit_code == 2
    assert message in done.output.replace("\n", " ")


def test_layers_are_chosen_for_models_alone(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", "medusa", *command(tmp_path, "--from-layers", "0")[2:]])
    assert done.exit_code == 2
    assert "not for medusa" in done.output.replace("\n", " ")
