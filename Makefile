.PHONY: demo test test-long mutants

demo:  ## set up, then: text with and without drafting, decode steps as one jitted function, and the table against torch
	@scripts/setup.sh
	@.venv/bin/jdspark generate "def quicksort(" --max-new-tokens 200 --compare
	@.venv/bin/python -m torch_bridge.demo

test:  ## set up, then: lint, types and the default tests
	@scripts/setup.sh
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet .
	@.venv/bin/mypy --no-error-summary
	@.venv/bin/python -m pytest -n 2

test-long:  ## the long sweeps
	@scripts/setup.sh
	@.venv/bin/python -m pytest -n 2 -m long

mutants:  ## change one place of a kernel at a time; its op's tests must fail (long)
	@scripts/setup.sh
	@.venv/bin/python scripts/mutants.py
