# make test       what a change must pass, in a virtualenv of its own, on the wheel a user would install
# make test-long  the rest of it: runs that are killed, damaged and resumed, text in every encoding, and CUDA C++ compiled
#                 for the CPU; installs Debian's g++, as root, where there is none
# make test-lm-eval  tasks of lm-evaluation-harness, which it installs: some 300 MB more
# make test-distributed  models and runs on two and four ranks
# make test-slurm  jobs on a Slurm cluster of two nodes, which it starts; installs Debian's Slurm, as root
# make test-llamacpp  GGUF files in llama.cpp itself, whose library comes from npm; NEOX=FILE adds GPT-NeoX's tokenizer.json
# make test-serving  mambakit serve with OpenAI's client, and its page in headless Chromium; installs Debian's, as root, where there is none
# make test-xla   training through torch_xla on the CPU, with the torch 2.9 that it needs: some 7 GB of packages
# make campaign   runs on ranks that are killed 200 times at any moment, and before each write; some twenty minutes
# make signals    commands that are told to stop 50 times at any moment; some ten minutes
# make faults     signals, bad rows, full and slow disks, trackers that hang, each in every phase; some fifteen minutes
# make cold-caches  four processes at once on empty caches of compiled kernels, 20 times; some twenty minutes
# make demo       train a small model on this machine, from the same wheel
# make lint       ruff and mypy

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

SOURCES := pyproject.toml README.md LICENSE $(shell find src -type f -not -path '*/__pycache__/*')

LONG := tests/training tests/data/test_readers_encodings.py tests/data/test_isolated.py tests/data/test_tasks.py \
	tests/checkpoint/test_conversion_memory.py tests/decoding/test_long.py tests/decoding/test_gpu_stepper.py \
	tests/emulated

# Test files side by side, one to a process, each with one thread.
JOBS ?= 2
SIDE_BY_SIDE := --quiet --numprocesses $(JOBS) --dist loadfile

DISTRIBUTED := tests/parallel/test_four_ranks.py tests/parallel/test_runs.py tests/parallel/test_plan.py
SLURM := tests/slurm
LLAMACPP := tests/llamacpp
SERVING := tests/serving
XLA := tests/xla

.PHONY: test test-long test-lm-eval test-distributed test-slurm test-llamacpp test-serving test-xla campaign signals faults cold-caches demo lint bench clean

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(addprefix --ignore=,$(LONG) $(DISTRIBUTED) $(SLURM) $(LLAMACPP) $(SERVING) $(XLA))

test-long: $(VENV)/.installed
	command -v g++ >/dev/null || (apt-get update -qq && apt-get install -qq -y --no-install-recommends g++)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(LONG)

test-lm-eval: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[eval]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet tests/test_harness.py

test-distributed: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet $(DISTRIBUTED)

test-slurm: $(VENV)/.installed
	command -v slurmctld slurmd munged >/dev/null || \
		(apt-get update -qq && apt-get install -qq -y --no-install-recommends slurm-wlm munge)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet $(SLURM)

# The npm package of llama.cpp's bindings for Node has the library itself, of llama.cpp 0.5.0.
LLAMACPP_PACKAGE ?= @node-llama-cpp/linux-x64@3.22.1
LLAMACPP_HOME := $(abspath $(VENV))/llamacpp
NEOX ?=
test-llamacpp: $(VENV)/.installed $(LLAMACPP_HOME)/.installed
	@test -n "$(NEOX)" || echo "GPT-NeoX's tokenizer is not tested: add NEOX=path/to/tokenizer.json"
	OMP_NUM_THREADS=1 MAMBAKIT_LLAMACPP="$$(dirname $$(find $(LLAMACPP_HOME) -name 'libllama.*so'))" MAMBAKIT_NEOX=$(NEOX) \
		$(BIN)/python -m pytest --quiet $(LLAMACPP)

$(LLAMACPP_HOME)/.installed: Makefile
	command -v npm >/dev/null || (echo "make test-llamacpp needs npm, which comes with Node" && false)
	rm -rf $(LLAMACPP_HOME) && mkdir -p $(LLAMACPP_HOME)
	cd $(LLAMACPP_HOME) && npm pack --silent $(LLAMACPP_PACKAGE) && tar -xzf *.tgz && rm *.tgz
	touch $@

test-serving: $(VENV)/.installed
	command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		(apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium)
	OMP_NUM_THREADS=1 MAMBAKIT_CHROMIUM=required $(BIN)/python -m pytest --quiet $(SERVING)

# torch_xla is built for one version of torch, and so has a virtualenv of its own. The core's tests run there too.
XLA_VENV ?= .venv-xla
XLA_CORE := tests/ops tests/model tests/decoding/test_decoder.py
test-xla: $(XLA_VENV)/.installed
	OMP_NUM_THREADS=1 PJRT_DEVICE=CPU $(XLA_VENV)/bin/python -m pytest --quiet $(XLA)
	OMP_NUM_THREADS=1 $(XLA_VENV)/bin/python -m pytest $(SIDE_BY_SIDE) $(XLA_CORE)

$(XLA_VENV)/.installed: constraints.txt Makefile $(SOURCES)
	test -x $(XLA_VENV)/bin/pip || $(PYTHON) -m venv $(XLA_VENV)
	rm -rf dist-xla
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(XLA_VENV)/bin/pip wheel --quiet --no-deps --wheel-dir dist-xla .
	grep -vE '^(torch|triton|nvidia)' constraints.txt >dist-xla/constraints.txt
	$(XLA_VENV)/bin/pip install --quiet torch==2.9.1 torch_xla==2.9.0
	$(XLA_VENV)/bin/pip install --quiet --constraint dist-xla/constraints.txt "$$(ls dist-xla/*.whl)[xla]" pytest pytest-xdist hypothesis
	$(XLA_VENV)/bin/pip install --quiet --no-deps --force-reinstall dist-xla/*.whl
	touch $@

KILLS ?= 200
SEED ?= 0
campaign: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m parallel.campaign --kills $(KILLS) --seed $(SEED)

SIGNALS ?= 50
signals: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m training.signal_campaign --signals $(SIGNALS) --seed $(SEED)

faults: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m training.fault_campaign --signals $(SIGNALS) --seed $(SEED)

ROUNDS ?= 20
DEVICE ?= cpu
cold-caches: $(VENV)/.installed
	$(BIN)/python tests/parallel/cold_caches.py --rounds $(ROUNDS) --device $(DEVICE)

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[bench]"
	$(BIN)/python benchmarks/cpu_training.py

# The wheel itself is installed and tested, with the dependencies it names and no others: what is missing from its files
# or from its metadata cannot hide. constraints.txt pins every version, torch's among them.
$(VENV)/.installed: constraints.txt Makefile $(SOURCES)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[test]"
	$(BIN)/pip install --quiet --no-deps --force-reinstall dist/*.whl
	touch $@

clean:
	rm -rf $(VENV) $(XLA_VENV) dist dist-xla build .pytest_cache .mypy_cache .ruff_cache
