# `make demo` and `make test`; `make check` before every commit; `make smoke` starts each engine once.
# Each creates what it needs and reuses it when run again.

ENGINE ?= vllm
PYTHON ?= python3
VENV := .venv-$(ENGINE)

export VLLM_NO_USAGE_STATS = 1

# Tests use pinned models only; the demo asks the hub first.
test check smoke test-%: export HF_HUB_OFFLINE = 1

.NOTPARALLEL:
.PHONY: demo test test-full check smoke static environments environment style types \
	test-without-engine test-vllm test-sglang test-smoke test-engines test-hosts test-host

demo: environment
	$(VENV)/bin/drafttree demo --engine $(ENGINE) $(if $(METHOD),--method $(METHOD))

RUN := @$(MAKE) --no-print-directory

# The cores, and the two halves of them: the engines' tests run side by side, each on a half.
CORES := $(shell $(PYTHON) -c "import os; print(len(os.sched_getaffinity(0)))")
HALF = $(PYTHON) -c "import os; c = sorted(os.sched_getaffinity(0)); h = len(c) // 2; \
	print(*(c[$(1)] or c), sep=',')"
SIDE_BY_SIDE = taskset -c "$$($(call HALF,:h))" $(MAKE) --no-print-directory $(1) & first=$$!; \
	taskset -c "$$($(call HALF,h:))" $(MAKE) --no-print-directory $(2); second=$$?; \
	wait $$first && exit $$second

# SGLang's tests without an engine follow its engine tests, which take less time than vLLM's.
test: environments
	@$(MAKE) --no-print-directory static; first=$$?; \
	$(MAKE) --no-print-directory ENGINE=vllm test-without-engine; second=$$?; \
	($(call SIDE_BY_SIDE,--keep-going ENGINE=sglang test-engines test-without-engine,\
		ENGINE=vllm test-engines)) && exit $$((first + second))

test-full:
	$(RUN) test MARKS=

check: environments
	@$(MAKE) --no-print-directory static; first=$$?; \
	$(MAKE) --no-print-directory ENGINE=vllm test-without-engine; second=$$?; \
	$(MAKE) --no-print-directory ENGINE=sglang test-without-engine && exit $$((first + second))

static: environments
	@$(call SIDE_BY_SIDE,ENGINE=sglang types,--keep-going ENGINE=vllm style types)

smoke: environments
	@$(call SIDE_BY_SIDE,ENGINE=sglang test-smoke,ENGINE=vllm test-smoke)

test-vllm:
	$(RUN) environment ENGINE=vllm
	$(RUN) ENGINE=vllm test-engines

test-sglang:
	$(RUN) environment ENGINE=sglang
	$(RUN) ENGINE=sglang test-engines

environments:
	$(RUN) environment ENGINE=vllm
	$(RUN) environment ENGINE=sglang

environment:
	@$(PYTHON) scripts/setup/set_up.py $(ENGINE)

style:
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

types:
	$(VENV)/bin/mypy --cache-dir .mypy_cache/$(ENGINE)

# All tests that start no engine run in vLLM's environment; those of SGLang's own code skip there.
WITHOUT_ENGINE_vllm := tests --ignore=tests/engines
WITHOUT_ENGINE_sglang := $(wildcard tests/fake_gpu/test_sglang*.py)

# Combinations of settings beyond the main ones are left to `make test-full`.
MARKS ?= not full

# One process for each core, of one thread each.
test-without-engine:
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest $(WITHOUT_ENGINE_$(ENGINE)) -m "$(MARKS)" \
		-n $(CORES) --dist worksteal

test-smoke:
	$(VENV)/bin/pytest tests/engines -m smoke

test-engines:
	$(VENV)/bin/pytest tests/engines -m "$(MARKS)"

# The engines' own tests of speculative decoding (docs/hosts.md); not part of `make test`.
test-hosts: environments
	@$(MAKE) --no-print-directory ENGINE=sglang test-host; first=$$?; \
	$(MAKE) --no-print-directory ENGINE=vllm test-host && exit $$first

test-host:
	PYTHONPATH=.:kernels $(VENV)/bin/python -m scripts.hosts.own_tests $(ENGINE)
