# Everything runs in .venv, which `make setup` makes and keeps up to date; the other targets call it themselves.
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-kafka demo-queue demo-streams demo-pulsar demo-pubsub demo-servicebus demo-sdk kafka pubsub pulsar pstest goka spark spark42 servicebus test test-all lint format bench bench-queue bench-spark bench-streams docs conformance lock audit proto clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCK_TOOL := uv==0.13.9
AUDIT_TOOL := pip-audit==2.10.1
# Writes code that works with the oldest protobuf allowed, and every newer one.
PROTO_TOOL := grpcio-tools==1.76.0
# Many tests wait for a server, so two cores serve more than two workers; the deep tests wait less.
WORKERS ?= 9
DEEP_WORKERS ?= 6
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
PYTEST := $(BIN)/python -m pytest
KAFKA := $(BIN)/python -m tests.servers.run_kafka
PUBSUB := $(BIN)/python -m tests.servers.run_pubsub
PULSAR := $(BIN)/python -m tests.servers.run_pulsar
PSTEST := $(BIN)/python -m tests.servers.run_pstest
GOKA := $(BIN)/python -m tests.servers.goka
SERVICEBUS := $(BIN)/python -m tests.servers.servicebus.serve
SPARK := $(BIN)/python -m tests.servers.spark_java
SPARK42 := .venv-spark42

export PIP_REQUIRE_VIRTUALENV := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# The tests start hundreds of Python processes, and each would compile these packages again.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make setup        install everything into .venv, from constraints.txt"
	@echo "make demo         run the flights through pipelines on Spark, on an embedded broker; BROKER_URL names another; needs Java 17"
	@echo "make demo-kafka   the same on a Kafka broker, started for it; needs Maven too"
	@echo "make demo-queue   run flights as jobs of a queue on Kafka, with workers that are killed; ARGS='--flights 20000'; needs Java 17 and Maven"
	@echo "make kafka        run COMMAND=bash or another beside a Kafka broker, named in BROKER_URL; needs Java 17 and Maven"
	@echo "make pulsar       the same beside a Pulsar standalone"
	@echo "make pubsub       run COMMAND='broker doctor' or another beside Google's Pub/Sub emulator, named in BROKER_URL; needs Java 17"
	@echo "make pstest       the same beside Google's pstest, which applies filters and keeps keys in order over nacks; needs Go"
	@echo "make demo-streams run the flights through stream processors, one of them killed, on an embedded broker; BROKER_URL names another"
	@echo "make demo-sdk     run the flights through the plain library, without Spark and Java; BROKER_URL names another broker"
	@echo "make servicebus   start a test double of Azure Service Bus and show its URL; COMMAND='.venv/bin/broker doctor' runs that on it"
	@echo "make demo-pulsar  the same on a Pulsar standalone, started for it; needs Java 17 and Maven"
	@echo "make demo-pubsub  the same on Google's Pub/Sub emulator; 10,000 flights unless ARGS='--flights 20000' says otherwise; needs Java 17"
	@echo "make demo-servicebus  the same on the double of Service Bus; 1,000 flights unless ARGS says otherwise"
	@echo "make test         run the tests but the deep ones, all six brokers included; ARGS='-k name' goes to pytest"
	@echo "make spark42      run the tests of Delta tables and a core of those of Spark on PySpark 4.2, in $(SPARK42)"
	@echo "make test-all     run all tests: chaos, second configurations, Spark clusters and benchmarks' self-tests too"
	@echo "make lint         ruff, pyright and the import rules"
	@echo "make format       format and sort imports"
	@echo "make conformance  run the conformance kit on every backend; write docs/conformance.md and docs/guarantees.md"
	@echo "make bench        measure, and write docs/performance.md"
	@echo "make bench-queue  measure Kafka as a queue, and print it"
	@echo "make bench-spark  measure Spark over the brokers, and write docs/performance-spark.md"
	@echo "make bench-streams  measure stream processing, and write docs/performance-streams.md"
	@echo "make docs         run every example of the documentation"
	@echo "make lock         choose new versions and write constraints.txt"
	@echo "make audit        look for published vulnerabilities of the versions in constraints.txt; needs the network"
	@echo "make proto        generate the code of markers.proto"
	@echo "make clean        remove .venv and all caches"

setup: $(STAMP)

$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "anybroker needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another with: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "Python's venv module does not work here; on Debian it is the package python3-venv"; exit 1; }
	@# Two packages come as source, and what builds them has to be there first, by its hash too.
	@awk '/^[^ #]/ { keep = /^(cffi|pycparser|setuptools)==/ } keep' constraints.txt > $(VENV)/first.txt
	$(PIP) install --quiet --require-hashes --no-deps --requirement $(VENV)/first.txt
	@# The double of Service Bus needs python-qpid-proton, which has no wheel: without a C compiler all else still works.
	@awk '/^[^ #]/ { apart = /^python-qpid-proton==/ } apart' constraints.txt > $(VENV)/proton.txt
	@awk '/^[^ #]/ { apart = /^python-qpid-proton==/ } !apart' constraints.txt > $(VENV)/rest.txt
	$(PIP) install --quiet --require-hashes --no-deps --no-build-isolation --use-pep517 --requirement $(VENV)/rest.txt
	@$(PIP) install --quiet --require-hashes --no-deps --no-build-isolation --use-pep517 --requirement $(VENV)/proton.txt \
		> $(VENV)/proton.log 2>&1 \
		|| echo "python-qpid-proton was not built ($(VENV)/proton.log says why; it takes a C compiler): tests on the double of Service Bus are skipped"
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m examples.flights_pipeline

demo-kafka: $(STAMP)
	$(KAFKA) $(BIN)/python -m examples.flights_pipeline

demo-queue: $(STAMP)
	$(KAFKA) $(BIN)/python -m examples.flights_queue $(ARGS)

pubsub: $(STAMP)
	$(PUBSUB) $(COMMAND)

demo-streams: $(STAMP)
	$(BIN)/python -m examples.flights_streams $(ARGS)

demo-sdk: $(STAMP)
	$(BIN)/python -m examples.flights $(ARGS)

demo-pulsar: $(STAMP)
	$(PULSAR) $(BIN)/python -m examples.flights $(ARGS)

demo-pubsub: $(STAMP)
	$(PUBSUB) $(BIN)/python -m examples.flights $(or $(ARGS),--flights 10000)

# Each aircraft is a session, for which the client makes a connection.
demo-servicebus: $(STAMP)
	$(SERVICEBUS) $(BIN)/python -m examples.flights $(or $(ARGS),--flights 1000)

# Fetches Kafka where it was not yet, which takes longer than a test may. What fails here fails in the tests of Kafka too.
kafka: $(STAMP)
	-@$(KAFKA) $(COMMAND)

servicebus: $(STAMP)
	$(SERVICEBUS) $(COMMAND)

pulsar: $(STAMP)
	-@$(PULSAR) $(COMMAND)

pstest: $(STAMP)
	-@$(PSTEST) $(COMMAND)

# Builds the programs in Go that share tables with broker_streams in its tests.
goka: $(STAMP)
	-@$(GOKA)

# Keeps the classes of Spark's JVMs ready for the tests.
spark: $(STAMP)
	-@$(SPARK)

test: $(STAMP) kafka pulsar spark
	$(PYTEST) -n $(WORKERS) --dist loadgroup -m 'not deep' $(ARGS)

test-all: $(STAMP) kafka pulsar pstest goka spark
	$(PYTEST) -n $(DEEP_WORKERS) --dist loadgroup --hypothesis-profile=random $(ARGS)
	$(if $(ARGS),,$(MAKE) spark42)

# All but PySpark comes from $(VENV).
$(SPARK42)/.installed: $(STAMP) tests/spark/pyspark42.txt
	@test -x $(SPARK42)/bin/python || $(BIN)/python -m venv --without-pip $(SPARK42)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib")); print("$(CURDIR)")' \
		> "$$($(SPARK42)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/anybroker.pth"
	$(PIP) --python $(SPARK42)/bin/python install --quiet --require-hashes --no-deps --ignore-installed \
		--no-build-isolation --use-pep517 --requirement tests/spark/pyspark42.txt
	@touch $@

spark42: $(SPARK42)/.installed kafka
	PATH="$(CURDIR)/$(BIN):$$PATH" $(SPARK42)/bin/python -m pytest -n 0 tests/spark/test_delta.py tests/spark/test_delta_kills.py \
		tests/spark/test_pipeline.py tests/spark/test_pipeline_evolution.py tests/spark/test_batch_read.py \
		tests/spark/test_sink.py tests/spark/test_log_stream.py tests/spark/test_decoding.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

conformance: $(STAMP) kafka pulsar pstest
	$(PYTEST) -n $(DEEP_WORKERS) --dist loadgroup -p broker.testing.matrix --conformance-write=docs/conformance.md \
		tests/conformance tests/broken_variants $(ARGS)
	$(BIN)/python -m broker.testing.matrix docs/guarantees.md

bench: $(STAMP) kafka
	$(BIN)/python -m benchmarks $(ARGS)

bench-queue: $(STAMP) kafka
	$(BIN)/python -m benchmarks kafka-markers kafka-queue kafka-queue-published $(ARGS)

bench-spark: $(STAMP) kafka pulsar
	$(BIN)/python -m benchmarks.spark $(ARGS)

bench-streams: $(STAMP) kafka
	$(BIN)/python -m benchmarks.streams $(ARGS)

docs: $(STAMP) kafka pulsar
	$(PYTEST) tests/docs $(ARGS)

lock:
	@test -x build/lock/bin/uv || $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check '$(LOCK_TOOL)'
	build/lock/bin/uv pip compile pyproject.toml --quiet --upgrade --universal --python-version 3.11 \
		--all-extras --group dev --generate-hashes --no-emit-index-url --no-emit-find-links \
		--custom-compile-command 'make lock' --output-file constraints.txt

# Not a part of `make lint`: a commit must not fail for what was published after it, nor without a network.
audit:
	@test -x build/audit/bin/python || $(PYTHON) -m venv build/audit
	@build/audit/bin/python -m pip install --quiet --disable-pip-version-check '$(AUDIT_TOOL)'
	@rm -f build/audit.txt
	@if build/audit/bin/pip-audit --requirement constraints.txt --require-hashes --disable-pip --progress-spinner off \
		--vulnerability-service osv --output build/audit.txt $(ARGS) 2> build/audit.log; then tail -n 1 build/audit.log; \
	elif test -s build/audit.txt; then cat build/audit.txt; exit 1; \
	else tail -n 1 build/audit.log; \
		echo "Nothing was checked: the advisories of osv.dev cannot be fetched from here (build/audit.log)"; exit 2; fi

proto:
	@test -x build/proto/bin/python || $(PYTHON) -m venv build/proto
	build/proto/bin/python -m pip install --quiet --disable-pip-version-check '$(PROTO_TOOL)'
	build/proto/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. broker_kafka/queue/markers.proto

clean:
	rm -rf $(VENV) $(SPARK42) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
