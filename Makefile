# Every target makes .venv by itself when it is missing. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export TXL_TEST_DATA ?=

.PHONY: setup demo test test-browser oracle oracle-tensorflow huggingface lm-eval triton gpu gpu-rehearse bench-peers docs \
  lint bench build package clean

setup: $(STAMP)

# Everything is pinned in constraints.txt, the build backend too (--no-build-isolation uses the one installed here).
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/txl demo --out runs/demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/browser --ignore tests/package

# The playground in Chromium, if there is one on the path.
test-browser: $(VENV)/.browser
	$(BIN)/python -m pytest tests/browser

$(VENV)/.browser: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[browser]'
	@touch $@

# Against other implementations, live, in an environment of their time.
oracle: .venv-oracle/.installed
	PYTHONPATH=src .venv-oracle/bin/python -m pytest tests/oracle/test_huggingface.py

.venv-oracle/.installed: constraints-oracle.txt
	$(PYTHON) -m venv .venv-oracle
	.venv-oracle/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oracle.txt \
		torch transformers sacremoses safetensors tokenizers numpy pytest rich lazy_loader portalocker jaxtyping beartype zstandard
	@touch $@

# Checkpoints that TensorFlow wrote; not part of .ci/run, because of its size.
oracle-tensorflow: .venv-tensorflow/.installed
	PYTHONPATH=src .venv-tensorflow/bin/python -m pytest tests/oracle/test_tensorflow.py

.venv-tensorflow/.installed: constraints-tensorflow.txt
	$(PYTHON) -m venv .venv-tensorflow
	.venv-tensorflow/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-tensorflow.txt \
		torch tensorflow-cpu safetensors tokenizers numpy pytest rich lazy_loader portalocker jaxtyping beartype zstandard
	@touch $@

# What `txl export` writes, driven through transformers 5.
huggingface: .venv-huggingface/.installed
	PYTHONPATH=src .venv-huggingface/bin/python -m pytest tests/huggingface

.venv-huggingface/.installed: constraints-huggingface.txt
	$(PYTHON) -m venv .venv-huggingface
	.venv-huggingface/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-huggingface.txt \
		torch transformers safetensors tokenizers numpy pytest rich lazy_loader portalocker jaxtyping beartype zstandard pooch matplotlib
	@touch $@

# lm-evaluation-harness, as it is, against `txl serve`.
lm-eval: .venv-lm-eval/.installed
	PYTHONPATH=src .venv-lm-eval/bin/python -m pytest tests/lm_eval

.venv-lm-eval/.installed: constraints-lm-eval.txt
	$(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lm-eval.txt \
		torch 'lm_eval[api]' starlette uvicorn prometheus_client sse-starlette httpx safetensors tokenizers numpy pytest rich \
		lazy_loader portalocker jaxtyping beartype zstandard pooch matplotlib huggingface_hub
	@touch $@

# The kernels for NVIDIA GPUs, without one: their numbers in Triton's interpreter, their needs from compiled binaries.
triton: .venv-triton/.installed
	TRITON_INTERPRET=1 PYTHONPATH=src .venv-triton/bin/python -m pytest -n 2 tests/attention/test_triton_attention.py \
		tests/models/test_fused_rows.py tests/models/test_fused_layers.py tests/models/test_fused_loss.py \
		tests/models/test_fused_ends.py tests/models/test_fused_reading.py tests/decoding/test_fused_step.py
	PYTHONPATH=src .venv-triton/bin/python -m pytest -n 2 tests/attention/test_triton_binaries.py \
		tests/models/test_loss_binaries.py tests/models/test_rows_binaries.py tests/decoding/test_decode_binaries.py

.venv-triton/.installed: constraints-triton.txt
	$(PYTHON) -m venv .venv-triton
	.venv-triton/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-triton.txt \
		torch triton safetensors tokenizers numpy pytest pytest-xdist rich lazy_loader portalocker jaxtyping beartype zstandard
	@touch $@

# The documentation as a site of plain files in site/; broken links and anchors end it.
docs: .venv-docs/.installed
	PYTHONPATH=src .venv-docs/bin/python -m sphinx -q -W --keep-going -E -d .venv-docs/doctrees docs site
	@echo "open site/index.html, or run python3 -m http.server -d site -b 127.0.0.1: the search then shows excerpts"

.venv-docs/.installed: constraints-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-docs.txt \
		sphinx furo myst-parser sphinx-copybutton torch safetensors tokenizers numpy rich lazy_loader portalocker \
		jaxtyping zstandard pooch matplotlib huggingface_hub
	@touch $@

# The first minutes on a machine with an NVIDIA GPU: tests, speed, memory, a profile; writes results/gpu-NAME.json and .md.
MINUTES ?= 9
gpu: $(STAMP)
	PYTHONPATH=src:. $(BIN)/python -m benchmarks.gpu --minutes $(MINUTES)

# All of it with tiny models on a CPU, so that nothing but the device is new on the day.
gpu-rehearse: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=src:. $(BIN)/python -m benchmarks.gpu --rehearse
	OMP_NUM_THREADS=1 PYTHONPATH=src:. $(BIN)/python -m benchmarks.gpu --first --rehearse
	OMP_NUM_THREADS=1 PYTHONPATH=src:. $(BIN)/python -m benchmarks.gpu_ptb --rehearse

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(STAMP)
	$(BIN)/txl bench train
	$(BIN)/txl bench eval

# Beside Hugging Face's model, in the environment of `make oracle`.
bench-peers: .venv-oracle/.installed
	PYTHONPATH=src:. .venv-oracle/bin/python -m benchmarks.peers

# The source archive, and from it the wheel. On Linux (x86-64) the wheel carries compiled code, and is named after the
# oldest glibc that it runs with; elsewhere it is one of Python alone.
LIBRARIES := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),1)
build: $(STAMP)
	rm -rf build dist
	TXL_LIBRARIES=$(LIBRARIES) $(BIN)/python -m build --no-isolation
	$(if $(LIBRARIES),PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --wheel-dir dist dist/*-linux_x86_64.whl && rm dist/*-linux_x86_64.whl)

# What was built, installed by itself and used where there is no compiler and no home.
package: build
	$(BIN)/python -m pytest tests/package

clean:
	rm -rf $(VENV) .venv-oracle .venv-tensorflow .venv-huggingface .venv-lm-eval .venv-triton .venv-docs site build dist
