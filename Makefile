# The two commands: `make demo` and `make test`. Each creates what it needs and reuses it when run again.

ENGINE ?= vllm
PYTHON ?= python3
VENV := .venv-$(ENGINE)

export HF_HUB_OFFLINE = 1
export VLLM_NO_USAGE_STATS = 1

.NOTPARALLEL:
.PHONY: demo test test-full test-vllm test-sglang environment style types test-kernels test-plain \
	test-engines test-engines-full

demo: environment
	$(VENV)/bin/drafttree demo --engine $(ENGINE) $(if $(METHOD),--method $(METHOD))

# The engines' tests side by side, each on half of the cores.
HALF = $(PYTHON) -c "import os; c = sorted(os.sched_getaffinity(0)); h = len(c) // 2; \
	print(*(c[$(1)] or c), sep=',')"

test:
	@$(MAKE) --no-print-directory environment ENGINE=vllm
	@$(MAKE) --no-print-directory environment ENGINE=sglang
	@taskset -c "$$($(call HALF,:h))" $(MAKE) --no-print-directory test-sglang & sglang=$$!; \
	taskset -c "$$($(call HALF,h:))" $(MAKE) --no-print-directory test-vllm; vllm=$$?; \
	wait $$sglang && exit $$vllm

test-full:
	@$(MAKE) --no-print-directory test ENGINE_TESTS="test-engines test-engines-full"

ENGINE_TESTS ?= test-engines

test-vllm:
	@$(MAKE) --no-print-directory environment ENGINE=vllm
	@$(MAKE) --keep-going --no-print-directory ENGINE=vllm style types test-kernels test-plain $(ENGINE_TESTS)

test-sglang:
	@$(MAKE) --no-print-directory environment ENGINE=sglang
	@$(MAKE) --keep-going --no-print-directory ENGINE=sglang types $(ENGINE_TESTS)

environment:
	@$(PYTHON) scripts/set_up.py $(ENGINE)

style:
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

types:
	$(VENV)/bin/mypy

# In processes of their own: the kernels run under Triton's interpreter, engines hold much memory.
test-kernels:
	$(VENV)/bin/pytest tests/kernels

test-plain:
	$(VENV)/bin/pytest tests --ignore=tests/kernels --ignore=tests/engines

test-engines:
	$(VENV)/bin/pytest tests/engines -m "not full"

test-engines-full:
	$(VENV)/bin/pytest tests/engines -m full
