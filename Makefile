PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo examples test test-gpu test-docs check docs wheel bench clean

help:
	@echo "make setup     virtual environment in .venv, packages as pinned in constraints.txt"
	@echo "make demo      train LeNet on two devices and prove that the result is that of one"
	@echo "make examples  each script and notebook of examples/, kway beside the version by hand; no GPU is needed"
	@echo "make test      all tests that need no GPU"
	@echo "make test-gpu  the tests that need a GPU"
	@echo "make test-docs what documents show and takes long: some ten minutes"
	@echo "make docs      the documents as a site, in build/site"
	@echo "make wheel     wheel and sdist in dist/, tried in an empty environment"
	@echo "make check     style, types, import directions"
	@echo "make bench     benchmarks/overhead: kway against hand-written loops"
	@echo "make clean     remove .venv and caches; runs/ stays"
	@echo "Each does its own set-up. PYTHON=python3.12 chooses another Python (3.11 or newer)."

$(READY): pyproject.toml constraints.txt scripts/setup.py
	@$(PYTHON) scripts/setup.py

setup: $(READY)

demo: $(READY)
	@$(BIN)/python scripts/demo.py

examples: $(READY)
	$(BIN)/python examples/one_device.py
	$(BIN)/python examples/data_parallel.py
	$(BIN)/python examples/all_reduce.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/ddp_launcher.py
	$(BIN)/python examples/ddp_spawn.py
	$(BIN)/python examples/cpu_gpu.py
	$(BIN)/python examples/overlap.py
	$(BIN)/python examples/process_pool.py
	$(BIN)/python examples/fashion_mnist.py --data synthetic --model lenet --devices cpu:2 --lr 0.05 --epochs 3
	$(BIN)/python scripts/notebook.py examples/first_run.ipynb

test: $(READY)
	@$(BIN)/python -m compileall -q src
	PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -m "not gpu and not slow" -n 3 --dist loadfile --no-loadscope-reorder

test-gpu: $(READY)
	$(BIN)/python -m pytest -q -m gpu

test-docs: $(READY)
	$(BIN)/python -m pytest -q -m slow tests/docs

docs: $(READY)
	$(BIN)/python scripts/cli_doc.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheel: $(READY)
	$(BIN)/python scripts/try_wheel.py

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/overhead/run.py

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
