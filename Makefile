# Commands for developers; `make help` lists them. To use EDL, `pip install .` is enough.
#
#   make test PYTHON=python3.12 VENV=/tmp/venv      another interpreter, another folder
#   make test PYTEST_ARGS="-k reader -x"            some of the tests
#   make demo DEMO_ARGS="--quick"                   options of `edl demo`
#   make soak SOAK_ARGS="--minutes 5 --seed 7"      options of the soak test

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
SOAK_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --no-input --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-services test-jobs test-kubernetes test-all test-gpu lint docs bench soak \
	tools-services tools-kubernetes tools bench-tools protocol manifests wheel clean

help: ## list these commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-17s %s\n", $$1, $$2}'

demo: $(VENV)/.demo ## the whole story on handwritten digits: teachers come and go, a student never notices
	@$(BIN)/edl demo $(DEMO_ARGS)

LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports && $(BIN)/python -m tests lint

test: $(VENV)/.dev ## set up, lint, and run the tests that need only Python packages: about ten minutes
	@code=0; $(LINT) || code=1; $(BIN)/python -m tests fast $(PYTEST_ARGS) || code=1; exit $$code

test-services: $(VENV)/.dev tools-services ## tests on real Consul, etcd, Triton, vLLM, Prometheus, Chromium and Slurm
	$(BIN)/python -m tests services $(PYTEST_ARGS)

test-jobs: $(VENV)/.dev ## tests of elastic jobs of several processes: kills, recovery, trainers, examples
	$(BIN)/python -m tests jobs $(PYTEST_ARGS)

test-kubernetes: $(VENV)/.dev tools-kubernetes ## tests on a real Kubernetes cluster
	$(BIN)/python -m tests kubernetes $(PYTEST_ARGS)

test-all: $(VENV)/.dev lint tools ## all tests; writes tests/durations.json
	$(BIN)/python -m tests all --record

docs: $(VENV)/.dev ## build the documentation as a site into build/site, every link checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build   # --quiet would hide a dead link from `strict` as well
	@echo "The site begins at build/site/index.html"

test-gpu: $(VENV)/.dev ## checks on one NVIDIA GPU; on a CPU those that mean something there (python -m tests.gpu)
	$(BIN)/python -m tests.gpu $(PYTEST_ARGS)

lint: $(VENV)/.dev ## ruff, mypy --strict, the layers of the design, and the tests of docs and repository
	$(LINT)

bench: $(VENV)/.dev bench-tools ## run every benchmark, about an hour, and write docs/benchmarks.md
	$(BIN)/python -m benchmarks

soak: $(VENV)/.dev tools ## let everything fail at random for half an hour, and write docs/reliability.md
	$(BIN)/python -m tests.soak --report docs/reliability.md $(SOAK_ARGS)

tools-services: ## fetch the real Consul, etcd, Slurm, Triton, Chromium, Prometheus and vLLM
	@bash tools/consul.sh
	@bash tools/etcd.sh
	@bash tools/slurm.sh
	@bash tools/chromium.sh
	@bash tools/prometheus.sh
	@PYTHON=$(PYTHON) bash tools/triton.sh
	@bash tools/vllm.sh

tools-kubernetes: ## fetch Helm and Consul, and build the cluster of ../shared/kube where that folder exists
	@bash tools/consul.sh
	@PYTHON=$(PYTHON) bash tools/kubernetes.sh

tools: tools-services tools-kubernetes ## fetch all of these

bench-tools: tools ## fetch what only benchmarks need: torchft and Ray Train
	@PYTHON=$(PYTHON) bash tools/torchft.sh
	@PYTHON=$(PYTHON) bash tools/ray.sh

# The stubs are those of a file NAME_pb2; ours is named NAME and builds its classes in a pool of its own.
protocol: $(VENV)/.dev ## compile edl/protocol/*.proto
	for name in etcd kserve master store; do \
		$(BIN)/python -m grpc_tools.protoc --proto_path=edl/protocol --descriptor_set_out=edl/protocol/$$name.binpb \
			--pyi_out=edl/protocol $$name.proto && mv edl/protocol/$${name}_pb2.pyi edl/protocol/$$name.pyi || exit 1; \
	done

manifests: tools ## render serving/kube/manifests from the Helm chart
	$(BIN)/python tools/manifests.py

wheel: $(VENV)/.dev ## build sdist and wheel into dist/, and try each in a fresh environment
	rm -f dist/elastic_distill-*
	$(BIN)/python -m hatchling build --target sdist --directory dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist dist/elastic_distill-*.tar.gz
	PYTHON=$(PYTHON) bash tools/try_packages.sh dist/elastic_distill-*

clean: ## remove what was made here, the virtual environment too
	rm -rf $(VENV) .tools build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# --- Environments. A stamp tells that its packages are installed; editing a file it hangs on installs again. ---

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt | $(BIN)/pip
	@echo "Installing torch into $(VENV) ..."
	@$(PIP) torch
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@echo "Installing what the demo needs into $(VENV) ..."
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo "Installing everything for development into $(VENV), about a minute ..."
	@$(PIP) --editable '.[dev]' paddlepaddle
	@touch $@ $(VENV)/.demo
